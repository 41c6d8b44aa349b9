// A federated cluster: how its rounds go, what its updates came to, who serves them, and what privacy has cost. And an
// operator: its jobs.

import { Chart } from "/console/charts.js";
import { h, mark, number, put } from "/console/dom.js";

export class Rounds {
  constructor(model) {
    this.model = model;
    this.accuracy = new Chart("Accuracy", "");
    this.loss = new Chart("Loss", "");
    this.facts = h("dl", { class: "facts wide-facts" });
    this.element = h("div", {}, h("section", { class: "charts" }, this.accuracy.element, this.loss.element), this.facts);
    this.cells = new Map();
  }

  draw() {
    const { instance } = this.model.about;
    const rounds = this.model.about.rounds ?? [];
    for (const name of ["accuracy", "loss"]) {
      this[name].draw(rounds.filter((round) => round[name] !== null).map((round) => ({ at: round.at, value: round[name] })), []);
    }
    const privacy = instance.privacy;
    this.say("job", instance.flName || "–");
    this.say("status", instance.instanceStatus);
    this.say("iteration", `${instance.currentIteration} of ${instance.flIterationNum}`);
    this.say("stage", instance.stage);
    this.say("devices in this round", `${instance.joined} of ${instance.start_fl_job_threshold}`);
    this.say("updates in this round", number(instance.counted));
    this.say("updates accepted so far", number(this.model.about.updates));
    this.say("windows missed", number(instance.missed));
    for (const [reason, count] of Object.entries(this.model.about.refused ?? {})) this.say(`refused: ${reason}`, number(count));
    for (const [name, value] of Object.entries(instance.metrics)) this.say(`model ${name}`, number(value));
    if (privacy) this.say("privacy spent", `ε ${number(privacy.epsilon)}${privacy.budget ? ` of ${number(privacy.budget)}` : ""} at δ ${number(privacy.delta)}`);
    for (const node of this.model.nodes.values()) {
      if (node.role === "server") this.say(`load of ${node.name}`, this.model.about.load?.[node.id] ?? node.state);
    }
    this.say("why", instance.reason);
  }

  say(name, text) {
    if (!this.cells.has(name)) {
      const cell = h("dd", { class: "mono" });
      this.facts.append(h("div", {}, h("dt", { text: name }), cell));
      this.cells.set(name, cell);
    }
    put(this.cells.get(name), String(text));
  }

  tick() {}
}

const COLUMNS = [["job", (job) => `${job.namespace}/${job.name}`], ["state", (job) => job.state], ["workers", (job) => job.workers], ["step", (job) => (job.step >= 0 ? number(job.step) : "–")],
  ["restarts", (job) => String(job.restarts)], ["cluster", (job) => job.phase || "–"], ["newest recovery", (job) => job.recovery || "–"], ["why", (job) => job.why]];

export class Jobs {
  constructor(model) {
    this.model = model;
    this.rows = new Map();
    this.body = h("tbody");
    this.empty = h("p", { class: "empty", text: "There are no jobs, or another replica looks after them." });
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
        const row = h("tr", {}, ...COLUMNS.map(([title]) => h(title === "job" ? "th" : "td", { class: title === "why" || title === "state" ? "" : "mono" })));
        row.firstChild.scope = "row";
        this.rows.set(name, row);
        this.body.append(row);
      }
      const row = this.rows.get(name);
      mark(row, "job", job.state);
      COLUMNS.forEach(([, text], place) => put(row.children[place], text(job)));
    }
    for (const [name, row] of this.rows) {
      if (names.has(name)) continue;
      row.remove();
      this.rows.delete(name);
    }
  }

  tick() {}
}
