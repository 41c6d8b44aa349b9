// View of a federated cluster: metrics of its rounds, updates, load of its servers, and spent privacy.

import { Chart } from "/console/charts.js";
import { h, number, put } from "/console/dom.js";

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
    this.set("job", instance.flName || "–");
    this.set("status", instance.instanceStatus);
    this.set("iteration", `${instance.currentIteration} of ${instance.flIterationNum}`);
    this.set("stage", instance.stage);
    this.set("devices in this round", `${instance.joined} of ${instance.start_fl_job_threshold}`);
    this.set("updates in this round", number(instance.counted));
    this.set("updates accepted so far", number(this.model.about.updates));
    this.set("windows missed", number(instance.missed));
    for (const [reason, count] of Object.entries(this.model.about.refused ?? {})) this.set(`refused: ${reason}`, number(count));
    for (const [name, value] of Object.entries(instance.metrics)) this.set(`model ${name}`, number(value));
    if (privacy) this.set("privacy spent", `ε ${number(privacy.epsilon)}${privacy.budget ? ` of ${number(privacy.budget)}` : ""} at δ ${number(privacy.delta)}`);
    for (const node of this.model.nodes.values()) {
      if (node.role === "server") this.set(`load of ${node.name}`, this.model.about.load?.[node.id] ?? node.state);
    }
    this.set("reason", instance.reason);
  }

  set(name, text) {
    if (!this.cells.has(name)) {
      const cell = h("dd", { class: "mono" });
      this.facts.append(h("div", {}, h("dt", { text: name }), cell));
      this.cells.set(name, cell);
    }
    put(this.cells.get(name), String(text));
  }

  tick() {}
}
