// View of the cluster: charts, a map of hosts, and a table that creates only visible rows.

import { Chart } from "/console/charts.js";
import { h, mark, number, plural, put, span } from "/console/dom.js";

const ROW = 28; // pixels, as in the style sheet
const SPARE = 6; // rows beyond each edge of the visible part
const STATES = ["dead", "suspect", "waiting", "alive", "left"];

const COLUMNS = [
  { key: "rank", title: "rank", right: true, text: (n) => (n.rank >= 0 && n.role !== "scheduler" ? String(n.rank) : "–"), order: (n) => n.rank },
  { key: "role", title: "node", text: (n) => n.name, order: (n) => n.name },
  { key: "host", title: "host", text: (n) => n.host, order: (n) => n.host },
  { key: "state", title: "state", text: (n) => n.state, order: (n) => STATES.indexOf(n.state) },
  { key: "step", title: "step", right: true, text: (n) => (n.step >= 0 ? number(n.step) : "–"), order: (n) => n.step },
  { key: "doing", title: "doing", text: doing, order: (n) => n.doing },
  { key: "busy", title: "busy per step", right: true, text: (n) => (n.busyMs ? `${number(n.busyMs)} ms` : "–"), order: (n) => n.busyMs },
  { key: "beat", title: "last heartbeat", right: true, text: (n, now) => (n.heartbeatAt > 0 ? span(now - n.heartbeatAt) : "–"), order: (n) => -n.heartbeatAt },
  { key: "restarts", title: "restarts", right: true, text: (n) => String(n.restarts), order: (n) => n.restarts },
];

function doing(n) {
  return n.straggles ? `${n.doing || "–"}, ${n.straggles.toFixed(1)} × the median step time` : n.doing || "–";
}

export class Nodes {
  constructor(model, show) {
    this.model = model;
    this.show = show;
    this.pace = new Chart("Throughput", model.about.kind === "federated" ? " rounds/s" : " steps/s", true);
    this.loss = new Chart("Loss", "");
    this.map = h("section", { class: "hosts", "aria-hidden": "true" });
    this.blocks = new Map();
    this.cells = new Map();
    this.filter = h("input", { type: "search", id: "filter", placeholder: "Filter: name, host, state", "aria-label": "Filter nodes",
      autocomplete: "off", spellcheck: "false", oninput: () => this.arrange() });
    this.count = h("span", { class: "quiet mono", role: "status" });
    this.spacer = h("div", { class: "spacer" });
    this.scroller = h("div", { class: "scroller", tabindex: "0", role: "grid", "aria-label": "Nodes", "aria-rowcount": "0" }, this.spacer);
    this.heads = COLUMNS.map((column) =>
      h("button", { type: "button", class: `head c-${column.key}${column.right ? " right" : ""}`, text: column.title, onclick: () => this.sortBy(column) }));
    this.element = h("div", {}, h("section", { class: "charts" }, this.pace.element, this.loss.element), this.map,
      h("div", { class: "tools" }, this.filter, this.count), h("div", { class: "row heads" }, ...this.heads), this.scroller);
    this.rows = [];
    this.order = [];
    this.sort = { column: COLUMNS[0], down: false };
    this.active = "";
    this.scroller.addEventListener("scroll", () => this.paint(), { passive: true });
    this.scroller.addEventListener("keydown", (event) => this.key(event));
    this.scroller.addEventListener("focus", () => this.active || !this.scroller.matches(":focus-visible") || this.key(new KeyboardEvent("keydown", { key: "Home" })));
    this.seen = new ResizeObserver(() => this.paint());
    this.seen.observe(this.scroller);
  }

  sortBy(column) {
    this.sort = { column, down: this.sort.column === column && !this.sort.down };
    for (const [place, head] of this.heads.entries()) {
      if (COLUMNS[place] === column) head.dataset.sorted = this.sort.down ? "down" : "up";
      else delete head.dataset.sorted;
    }
    this.arrange();
  }

  draw(news) {
    const faults = [...this.model.recoveries.values()].filter((i) => !i.strategy.startsWith("scale")).map((i) => i.at);
    this.pace.draw(this.model.pace(), faults);
    this.loss.draw(this.model.losses(), faults);
    this.drawMap(news);
    const unsorted = this.sort.column.key !== "rank" || this.filter.value;
    if (news.reordered || unsorted) this.arrange();
    else this.paint();
  }

  tick() {
    this.paint();
  }

  // -- host map ------------------------------------------------------------------------------------------------------

  drawMap(news) {
    if (news.reordered) return this.layMap();
    for (const name of news.names) {
      const node = this.model.nodes.get(name);
      const cell = this.cells.get(name);
      if (cell && cell.dataset.state !== look(node)) {
        cell.dataset.state = look(node);
        cell.title = `${node.name}: ${node.state}`;
      }
    }
    return undefined;
  }

  layMap() {
    this.cells.clear();
    const hosts = new Map();
    for (const node of this.sorted()) {
      if (node.role === "scheduler") continue;
      if (!hosts.has(node.host)) hosts.set(node.host, []);
      hosts.get(node.host).push(node);
    }
    mark(this.map, "many", String(hosts.size > 30));
    this.map.replaceChildren(...[...hosts].map(([host, nodes]) => {
      const cells = nodes.map((node) => {
        const cell = h("i", { title: `${node.name}: ${node.state}`, "data-state": look(node), onclick: () => this.show(node.name) });
        this.cells.set(node.name, cell);
        return cell;
      });
      return h("div", { class: "host" }, h("div", { class: "quiet clip", text: `${host} · ${nodes.length}` }), h("div", { class: "cells" }, ...cells));
    }));
  }

  // -- node table ----------------------------------------------------------------------------------------------------

  sorted() {
    const { column, down } = this.sort;
    const sign = down ? -1 : 1;
    return [...this.model.nodes.values()].sort((a, b) => {
      if (column.key === "rank" && a.role !== b.role) return roleOrder(a) - roleOrder(b);
      const x = column.order(a);
      const y = column.order(b);
      return sign * (x < y ? -1 : x > y ? 1 : 0) || roleOrder(a) - roleOrder(b) || a.rank - b.rank;
    });
  }

  arrange() {
    const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = (node) => words.every((word) => `${node.name} ${node.host} ${node.state} ${doing(node)} ${node.straggles ? "straggler" : ""}`.toLowerCase().includes(word));
    this.order = this.sorted().filter(fits).map((node) => node.name);
    const all = this.model.nodes.size;
    put(this.count, words.length ? `${this.order.length} of ${all}` : plural(all, "node"));
    this.spacer.style.height = `${this.order.length * ROW}px`;
    this.scroller.style.height = `${this.order.length * ROW + 2}px`; // the style sheet sets the limit
    this.scroller.setAttribute("aria-rowcount", this.order.length);
    this.paint();
  }

  /** Draw the visible rows. Elements are reused by position. */
  paint() {
    const from = Math.max(0, Math.floor(this.scroller.scrollTop / ROW) - SPARE);
    const count = Math.min(this.order.length - from, Math.ceil(this.scroller.clientHeight / ROW) + 2 * SPARE);
    while (this.rows.length < count) this.rows.push(this.makeRow());
    const now = this.model.now();
    this.rows.forEach((row, slot) => {
      if (slot >= count) {
        if (!row.hidden) row.hidden = true;
        return;
      }
      if (row.hidden) row.hidden = false;
      this.fill(row, from + slot, now);
    });
  }

  makeRow() {
    const cells = COLUMNS.map((column) => h("span", { role: "gridcell", class: `c-${column.key}${column.right ? " right mono" : ""}` }));
    const row = h("div", { class: "row", role: "row" }, ...cells);
    row.cells = cells;
    row.addEventListener("click", () => this.show(row.name));
    this.scroller.append(row);
    return row;
  }

  fill(row, place, now) {
    const node = this.model.nodes.get(this.order[place]);
    if (!node) return;
    if (row.place !== place) {
      row.place = place;
      row.style.transform = `translateY(${place * ROW}px)`;
      row.setAttribute("aria-rowindex", place + 1);
    }
    if (row.name !== node.name) {
      row.name = node.name;
      row.id = `row-${node.name}`;
    }
    mark(row, "state", look(node));
    const active = String(node.name === this.active);
    if (row.dataset.active !== active) {
      row.dataset.active = active;
      row.setAttribute("aria-selected", active);
    }
    COLUMNS.forEach((column, at) => put(row.cells[at], column.text(node, now)));
  }

  key(event) {
    const steps = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1, PageDown: 15, PageUp: -15, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Enter" && this.active) this.show(this.active);
    if (steps === undefined || !this.order.length) return;
    event.preventDefault();
    const at = this.order.indexOf(this.active);
    const next = Math.max(0, Math.min(this.order.length - 1, at < 0 ? 0 : at + steps));
    this.active = this.order[next];
    const top = next * ROW;
    if (top < this.scroller.scrollTop) this.scroller.scrollTop = top;
    const bottom = top + ROW - this.scroller.clientHeight;
    if (bottom > this.scroller.scrollTop) this.scroller.scrollTop = bottom;
    this.paint();
    this.scroller.setAttribute("aria-activedescendant", `row-${this.active}`);
  }

  focus() {
    this.filter.focus();
    this.filter.select();
  }
}

const ROLES = ["scheduler", "worker", "pserver", "server", "spare"];
const roleOrder = (node) => ROLES.indexOf(node.role);
const look = (node) => (node.straggles && node.state === "alive" ? "slow" : node.state);
