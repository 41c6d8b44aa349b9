// A federated cluster: how its rounds go, what its updates came to, who serves them, and what privacy has cost.

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
