// Views of an operator: all jobs, and one job whose scheduler is unreachable.

import * as actions from "/console/actions.js";
import { byId, h, mark, number, put } from "/console/dom.js";
import { above, job as chosen, jobPage } from "/console/net.js";
import { line } from "/console/recoveries.js";

const REFRESH_MS = 2000;

const COLUMNS = [["job", (job) => `${job.namespace}/${job.name}`], ["state", (job) => job.state], ["workers", (job) => job.workers], ["step", (job) => (job.step >= 0 ? number(job.step) : "–")],
  ["restarts", (job) => String(job.restarts)], ["cluster", (job) => job.phase || "–"], ["newest recovery", (job) => job.recovery || "–"], ["reason", (job) => job.why]];

export class Jobs {
  constructor(model) {
    this.model = model;
    this.rows = new Map();
    this.body = h("tbody");
    this.empty = h("p", { class: "empty", text: "No jobs, or another replica of the operator manages them." });
    const head = h("tr", {}, ...COLUMNS.map(([title]) => h("th", { text: title, scope: "col" })));
    this.element = h("div", {}, h("div", { class: "wide" }, h("table", { class: "plain-table jobs" }, h("thead", {}, head), this.body)), this.empty);
  }

  draw() {
    const { jobs } = this.model.about;
    this.empty.hidden = jobs.length > 0;
    const names = new Set();
    for (const job of jobs) {
      const name = COLUMNS[0][1](job);
      names.add(name);
      if (!this.rows.has(name)) {
        const row = h("tr", {}, ...COLUMNS.map(([title]) => h(title === "job" ? "th" : "td", { class: title === "reason" || title === "state" ? "" : "mono" })));
        row.firstChild.scope = "row";
        row.firstChild.append(h("a", { href: jobPage(name), text: name }));
        this.rows.set(name, row);
        this.body.append(row);
      }
      const row = this.rows.get(name);
      mark(row, "job", job.state);
      COLUMNS.slice(1).forEach(([, text], place) => put(row.children[place + 1], text(job)));
    }
    for (const [name, row] of this.rows) {
      if (names.has(name)) continue;
      row.remove();
      this.rows.delete(name);
    }
  }

  tick() {}
}

/** One job without a reachable scheduler: it is pending, suspended or finished. */
export class Away {
  constructor() {
    this.why = h("p", { class: "trouble" });
    this.facts = h("dl", { class: "facts wide-facts" });
    this.resume = h("button", { type: "button", class: "primary", text: "Resume…", onclick: () => actions.resume(chosen) });
    this.story = h("ol", { class: "story" });
    this.element = h("section", { "aria-label": `Job ${chosen}` }, this.why, h("div", { class: "tools" }, this.resume), this.facts, h("h3", { text: "Events" }), this.story);
    this.refreshedAt = 0;
  }

  /** `why`: why the scheduler is unreachable. */
  async draw(why) {
    put(this.why, why);
    if (!this.element.isConnected) byId("main").replaceChildren(this.element);
    if (Date.now() - this.refreshedAt < REFRESH_MS) return;
    this.refreshedAt = Date.now();
    const [{ jobs }, { events }] = await Promise.all([above("/jobs"), above(`/story?node=${encodeURIComponent(chosen)}`)]);
    const found = jobs.find((job) => COLUMNS[0][1](job) === chosen);
    this.resume.hidden = found?.state !== "Suspended";
    const facts = found ? COLUMNS.map(([title, text]) => [title, text(found) || "–"]) : [["job", `${chosen} does not exist`]];
    this.facts.replaceChildren(...facts.map(([name, text]) => h("div", {}, h("dt", { text: name }), h("dd", { class: "mono", text }))));
    this.story.replaceChildren(...events.reverse().map((event) => line(event)));
  }
}
