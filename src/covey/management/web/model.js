// What the page knows: the last whole picture, and what changed since.

const FIELDS = ["name", "role", "id", "rank", "host", "state", "step", "doing", "heardAt", "restarts", "incarnation", "pid",
  "busyMs", "straggles", "loss", "hasLog", "address"];
const MOVING = ["name", "step", "doing", "heardAt", "busyMs", "straggles", "loss"];
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
    this.skew = 0; // the scheduler's clock, as this one sees it
    this.ended = false;
  }

  /** Take a piece in; returns what of it is new: the names of nodes, whether the set of nodes changed, events, recoveries. */
  take(kind, piece) {
    const whole = kind === "whole";
    this.cluster = piece.cluster;
    this.ended = piece.cluster.phase === "ended";
    this.skew = piece.cluster.now - Date.now() / 1000;
    if (whole) {
      this.nodes.clear();
      this.history = piece.history.map(([at, step, loss, alive]) => ({ at, step, loss, alive }));
      this.recoveries.clear();
      this.events = [];
      this.version = piece.version;
    }
    if (piece.about) this.about = piece.about;
    const news = { whole, names: [], reordered: whole, events: piece.events ?? [], recoveries: piece.recoveries ?? [] };
    for (const row of piece.nodes ?? []) {
      const found = named(FIELDS, row);
      news.reordered ||= !this.nodes.has(found.name) || this.nodes.get(found.name).rank !== found.rank;
      this.nodes.set(found.name, found);
      news.names.push(found.name);
    }
    for (const row of piece.moved ?? []) {
      const found = this.nodes.get(row[0]);
      if (!found) continue;
      MOVING.forEach((field, place) => { found[field] = row[place]; });
      news.names.push(found.name);
    }
    for (const name of piece.gone ?? []) news.reordered = this.nodes.delete(name) || news.reordered;
    for (const incident of news.recoveries) this.recoveries.set(incident.number, incident);
    this.events.push(...news.events);
    if (this.events.length > EVENTS_MAX) this.events.splice(0, this.events.length - EVENTS_MAX);
    if (piece.point) {
      const [at, step, loss, alive] = piece.point;
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

  /** Steps per second, between points far enough apart to say something. */
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
