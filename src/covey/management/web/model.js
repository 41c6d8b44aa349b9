// State of the page: the last snapshot with all later deltas applied.

const FIELDS = ["name", "role", "id", "rank", "host", "state", "step", "doing", "heartbeatAt", "restarts", "incarnation", "pid",
  "busyMs", "straggles", "loss", "hasLog", "address"];
const MOVING = ["name", "step", "doing", "heartbeatAt", "busyMs", "straggles", "loss"];
const EVENTS_MAX = 1000;
const POINTS_MAX = 2400;

const named = (fields, row) => Object.fromEntries(fields.map((field, place) => [field, row[place]]));

export class Model {
  constructor() {
    this.cluster = null;
    this.about = { kind: "training" };
    this.nodes = new Map();
    this.history = [];
    this.recoveries = new Map();
    this.events = [];
    this.version = "";
    this.skew = 0; // seconds that the scheduler's clock is ahead of this one
    this.ended = false;
  }

  /** Apply a message; return its changes: names of changed nodes, whether nodes were added, removed or moved, events, recoveries. */
  take(kind, message) {
    const whole = kind === "whole";
    this.cluster = message.cluster;
    this.ended = message.cluster.phase === "ended";
    this.skew = message.cluster.now - Date.now() / 1000;
    if (whole) {
      this.nodes.clear();
      this.history = message.history.map(([at, step, loss, alive]) => ({ at, step, loss, alive }));
      this.recoveries.clear();
      this.events = [];
      this.version = message.version;
    }
    if (message.about) this.about = message.about;
    const news = { whole, names: [], reordered: whole, events: message.events ?? [], recoveries: message.recoveries ?? [] };
    for (const row of message.nodes ?? []) {
      const found = named(FIELDS, row);
      news.reordered ||= !this.nodes.has(found.name) || this.nodes.get(found.name).rank !== found.rank;
      this.nodes.set(found.name, found);
      news.names.push(found.name);
    }
    for (const row of message.moved ?? []) {
      const found = this.nodes.get(row[0]);
      if (!found) continue;
      MOVING.forEach((field, place) => { found[field] = row[place]; });
      news.names.push(found.name);
    }
    for (const name of message.gone ?? []) news.reordered = this.nodes.delete(name) || news.reordered;
    for (const incident of news.recoveries) this.recoveries.set(incident.number, incident);
    this.events.push(...news.events);
    if (this.events.length > EVENTS_MAX) this.events.splice(0, this.events.length - EVENTS_MAX);
    if (message.point) {
      const [at, step, loss, alive] = message.point;
      this.history.push({ at, step, loss, alive });
      if (this.history.length > POINTS_MAX) this.history = this.history.filter((_, place) => place % 2 === 0);
    }
    return news;
  }

  now() {
    return Date.now() / 1000 + this.skew;
  }

  workers() {
    return [...this.nodes.values()].filter((n) => n.role === "worker" || n.role === "server");
  }

  /** Return steps per second between points that are at least `least` seconds apart. */
  pace(least = 2) {
    const found = [];
    let from = null;
    for (const point of this.history) {
      if (from && point.at - from.at >= least) {
        if (point.step >= from.step && from.step >= 0) found.push({ at: point.at, value: (point.step - from.step) / (point.at - from.at) });
        from = point;
      }
      from ??= point;
    }
    return found;
  }

  losses() {
    return this.history.filter((point) => point.loss !== null).map((point) => ({ at: point.at, value: point.loss }));
  }
}
