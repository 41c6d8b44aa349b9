// Views of incidents (as waterfalls of their stages), events and settings.

import { h, milliseconds, moment, put } from "/console/dom.js";
import { jobPage } from "/console/net.js";

export const took = (incident) => STAGES.reduce((sum, stage) => sum + (incident.ms[stage] ?? 0), 0);
export const ofRank = (incident) => (incident.rank >= 0 ? ` (rank ${incident.rank})` : "");

const STAGES = ["detected", "decided", "re-formed", "restored", "resumed"];

export class Recoveries {
  constructor(model, show) {
    this.model = model;
    this.show = show;
    this.made = new Map();
    this.list = h("ol", { class: "incidents", reversed: true });
    this.empty = h("p", { class: "empty", text: "No failures and no resizes so far." });
    this.element = h("div", {}, this.empty, this.list);
  }

  draw(news) {
    if (news.whole) {
      this.made.clear();
      this.list.replaceChildren();
    }
    const fresh = news.whole ? [...this.model.recoveries.values()] : news.recoveries;
    for (const incident of fresh) {
      const made = this.incident(incident);
      const old = this.made.get(incident.number);
      if (old) old.replaceWith(made);
      else this.list.prepend(made);
      this.made.set(incident.number, made);
    }
    this.empty.hidden = this.made.size > 0;
  }

  /** Scroll to the incident with this number. */
  open(number) {
    const found = this.made.get(Number(number));
    found?.scrollIntoView({ block: "nearest" });
    found?.focus();
  }

  incident(incident) {
    const total = took(incident);
    let reached = 0;
    const bars = STAGES.filter((stage) => stage in incident.ms).map((stage) => {
      const length = incident.ms[stage];
      const bar = h("span", { class: "bar-part" });
      bar.style.left = `${total ? (100 * reached) / total : 0}%`;
      bar.style.width = `${total ? Math.max(0.4, (100 * length) / total) : 0.4}%`;
      reached += length;
      return h("div", { class: "stage", "data-stage": stage }, h("span", { class: "quiet", text: stage }), h("span", { class: "track" }, bar),
        h("span", { class: "mono right", text: milliseconds(length) }));
    });
    const rank = incident.rank >= 0 ? `rank ${incident.rank}` : "";
    const open = incident.outcome === "open";
    const node = incident.node.includes(":") ? h("button", { type: "button", class: "link", text: incident.node, onclick: () => this.show(incident.node) }) : incident.node;
    return h("li", { class: "incident", value: incident.number, tabindex: "-1" },
      h("h3", {}, h("span", { class: "mono quiet", text: `#${incident.number}` }), node, h("span", { class: "quiet light", text: rank }),
        h("span", { class: "badge", "data-state": open ? "healing" : incident.outcome, text: incident.outcome }),
        h("span", { class: "grow" }), h("strong", { class: "mono", text: open ? "in progress" : milliseconds(total) })),
      h("p", {}, h("b", { text: incident.strategy }), ` · ${incident.cause}`),
      h("p", { class: "quiet", text: incident.reason }), h("div", { class: "waterfall" }, ...bars),
      h("p", { class: "quiet mono small", text: moment(incident.at) }));
  }

  tick() {}
}

export class Story {
  constructor(model, show, get) {
    this.model = model;
    this.show = show;
    this.get = get;
    this.node = "";
    this.choice = h("select", { id: "story-node", "aria-label": "Node of the events", onchange: () => (location.hash = this.choice.value ? `story/${this.choice.value}` : "story") });
    this.details = h("input", { type: "checkbox", id: "details", onchange: () => this.reload() });
    this.list = h("ol", { class: "story" });
    this.element = h("div", {}, h("div", { class: "tools" }, this.choice, h("label", {}, this.details, " show details")), this.list);
  }

  async open(node) {
    this.node = node;
    await this.reload();
  }

  async reload() {
    this.choices();
    const found = this.node ? (await this.get(`/story?node=${encodeURIComponent(this.node)}`)).events : this.model.events;
    this.list.replaceChildren(...this.lines(found));
  }

  choices() {
    const names = ["", "cluster", ...this.model.nodes.keys()];
    if (this.node && !names.includes(this.node)) names.push(this.node);
    if (names.join() === this.known) return;
    this.known = names.join();
    this.choice.replaceChildren(...names.map((name) => h("option", { value: name, text: name || "all nodes", selected: name === this.node })));
  }

  draw(news) {
    if (news.reordered) this.choices();
    if (news.whole) void this.reload();
    else this.list.prepend(...this.lines(news.events.filter((event) => !this.node || event.node === this.node)));
    while (this.list.children.length > 500) this.list.lastChild.remove();
  }

  lines(events) {
    return events.filter((event) => this.details.checked || event.level !== "detail").map((event) => line(event, this.show)).reverse().slice(0, 500);
  }

  tick() {}
}

export function line(event, show) {
  const node = show && event.node.includes(":") ? h("button", { type: "button", class: "link", text: event.node, onclick: () => show(event.node) })
    : event.node.includes("/") ? h("a", { class: "link", href: jobPage(event.node), text: event.node }) : h("span", { text: event.node });
  return h("li", { "data-level": event.level }, h("time", { class: "mono quiet", text: new Date(event.at * 1000).toTimeString().slice(0, 8), title: moment(event.at) }),
    node, h("b", { text: event.what }), h("span", { class: "quiet", text: event.reason }));
}

export class Settings {
  constructor(get) {
    this.get = get;
    this.all = h("input", { type: "checkbox", id: "all-settings", onchange: () => this.list() });
    this.body = h("tbody");
    this.found = [];
    this.count = h("span", { class: "quiet" });
    const head = h("tr", {}, ...["setting", "value", "origin", "meaning"].map((text) => h("th", { text, scope: "col" })));
    this.element = h("div", {}, h("div", { class: "tools" }, h("label", {}, this.all, " show defaults"), this.count),
      h("div", { class: "wide" }, h("table", { class: "plain-table" }, h("thead", {}, head), this.body)));
  }

  async open() {
    this.found = (await this.get("/settings")).settings;
    this.list();
  }

  list() {
    const shown = this.found.filter((setting) => this.all.checked || setting.origin !== "default");
    put(this.count, `${this.found.length - shown.length} defaults not shown`);
    this.count.hidden = this.all.checked;
    this.body.replaceChildren(...shown.map((setting) => h("tr", {}, h("th", { scope: "row", class: "mono", text: setting.name }),
      h("td", { class: "mono", text: setting.value || "–" }), h("td", { class: "quiet mono", text: setting.origin }), h("td", { class: "quiet", text: setting.what }))));
  }

  draw() {}
  tick() {}
}
