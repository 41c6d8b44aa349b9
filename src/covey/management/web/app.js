// The page: header, views, the panel of one node, and keyboard shortcuts.

import * as actions from "/console/actions.js";
import { byId, h, mark, milliseconds, number, plural, put, span } from "/console/dom.js";
import { Logs } from "/console/logs.js";
import { Model } from "/console/model.js";
import { Away, Jobs } from "/console/jobs.js";
import { follow, get, job, open } from "/console/net.js";
import { Nodes } from "/console/nodes.js";
import { Recoveries, Settings, Story, line, ofRank, took } from "/console/recoveries.js";
import { Rounds } from "/console/rounds.js";

const TICK_MS = 1000;

const model = new Model();
const show = (name) => void openPanel(name);
let views = {};
let shown = "";
let panel = null;
let waiting = null; // changes that are not drawn yet
let phase = "";
let away = null; // view of an operator's job whose scheduler is unreachable

// -- header ---------------------------------------------------------------------------------------------------------

function header() {
  const { cluster } = model;
  put(byId("cluster"), job || cluster.cluster_id);
  put(byId("phase"), cluster.phase);
  mark(byId("phase"), "state", cluster.phase);
  put(byId("reason"), cluster.reason);
  document.title = `${cluster.phase} · covey ${job || cluster.cluster_id}`;
  if (phase && phase !== cluster.phase) put(byId("said"), `The cluster is ${cluster.phase}: ${cluster.reason}`);
  phase = cluster.phase;
  figures();
}

function figures() {
  const { cluster } = model;
  const federated = model.about.kind === "federated";
  const members = model.workers();
  const alive = members.filter((node) => node.state === "alive").length;
  const slow = members.filter((node) => node.straggles).length;
  const pace = model.pace().at(-1);
  const last = model.history.at(-1);
  const found = model.about.kind === "operator" ? jobFigures(model.about.jobs) : {
    [federated ? "servers" : "workers"]: `${alive} / ${federated ? cluster.server_num : Math.max(cluster.goal, members.length)}`,
    [federated ? "iteration" : "step"]: last && last.step >= 0 ? number(last.step) : "–",
    [federated ? "rounds/s" : "steps/s"]: pace ? number(pace.value) : "–",
    loss: number(last?.loss),
    stragglers: federated ? null : String(slow),
    restarts: String(members.reduce((sum, node) => sum + node.restarts, 0)),
    recoveries: String([...model.recoveries.values()].filter((incident) => !incident.strategy.startsWith("scale")).length),
    generation: String(cluster.generation),
    up: span(model.now() - cluster.started_at),
  };
  const box = byId("figures");
  for (const [name, text] of Object.entries(found)) {
    if (text === null) continue;
    let value = box.querySelector(`[data-of="${name}"]`);
    if (!value) {
      value = h("dd", { class: "mono", "data-of": name });
      box.append(h("div", {}, h("dt", { text: name }), value));
    }
    put(value, text);
  }
}

function jobFigures(jobs) {
  const of = (state) => String(jobs.filter((job) => job.state === state).length);
  const restarts = jobs.reduce((sum, job) => sum + job.restarts, 0);
  return { jobs: String(jobs.length), running: of("Running"), restarting: of("Restarting"), succeeded: of("Succeeded"), failed: of("Failed"), restarts: String(restarts) };
}

function line_(state, why, status = 0) {
  const element = byId("line");
  mark(element, "state", model.ended ? "ended" : state);
  put(element, model.ended ? "ended" : state === "live" ? "live" : "reconnecting");
  element.title = why;
  if (job && status === 409) {
    away ??= new Away();
    shown = ""; // the chosen view returns with the next message of the stream
    document.body.classList.add("away");
    away.draw(why).catch((error) => actions.note(error.message, { bad: true }));
  } else if (!model.cluster && why) byId("main").replaceChildren(h("p", { class: "empty", role: "status", text: why }));
}

/** Show a note about an incident: node, cause, strategy, outcome and duration. The note of an open incident is replaced when it closes. */
function showIncident(incident) {
  const resized = incident.strategy.startsWith("scale");
  const open = incident.outcome === "open";
  const end = open ? "in progress" : `${incident.outcome} after ${milliseconds(took(incident))}`;
  const text = resized ? `${incident.strategy}: ${end}.` : `${incident.node}${ofRank(incident)}: ${incident.cause}. ${incident.strategy} ${end}.`;
  actions.note(text, { name: `incident-${incident.number}`, link: "Waterfall", to: `#recoveries/${incident.number}`, bad: incident.outcome === "ended" });
}

// -- views -----------------------------------------------------------------------------------------------------------

const VIEWS = {
  nodes: [() => (model.about.kind === "federated" ? "Servers" : "Cluster"), () => new Nodes(model, show)],
  jobs: [() => "Jobs", () => new Jobs(model)],
  rounds: [() => "Rounds", () => new Rounds(model)],
  recoveries: [() => "Recoveries", () => new Recoveries(model, show)],
  story: [() => "Events", () => new Story(model, show, get)],
  logs: [() => "Logs", () => new Logs(model, get)],
  settings: [() => "Settings", () => new Settings(get)],
};
const OF_KIND = {
  training: { views: ["nodes", "recoveries", "story", "logs", "settings"], actions: ["scale", "dump", "stop"] },
  federated: { views: ["nodes", "rounds", "story", "settings"], actions: ["scale", "stop"] },
  operator: { views: ["jobs", "story"], actions: [] },
};
const ACTIONS = { scale: "Scale…", dump: "Dump…", stop: "Stop…" };

function build() {
  const kind = OF_KIND[model.about.kind];
  views = Object.fromEntries(kind.views.map((name) => [name, { title: VIEWS[name][0](), view: VIEWS[name][1]() }]));
  byId("tabs").replaceChildren(...Object.entries(views).map(([name, { title }], place) =>
    h("a", { href: `#${name}`, "data-view": name, title: `${title} (${place + 1})` }, title)));
  byId("actions").replaceChildren(...kind.actions.map((name) =>
    h("button", { type: "button", class: name === "stop" ? "danger-text" : "", text: ACTIONS[name], onclick: () => actions[name](model) })));
}

function route() {
  const [name, ...rest] = decodeURIComponent(location.hash.slice(1)).split("/");
  const wanted = name in views ? name : Object.keys(views)[0];
  const { view } = views[wanted];
  if (shown !== wanted) {
    shown = wanted;
    byId("main").replaceChildren(view.element);
    for (const tab of byId("tabs").children) {
      if (tab.dataset.view === wanted) tab.setAttribute("aria-current", "page");
      else tab.removeAttribute("aria-current");
    }
    view.draw({ whole: true, names: [], reordered: true, events: [], recoveries: [...model.recoveries.values()] });
  }
  view.open?.(rest.join("/"))?.catch?.((error) => actions.note(error.message, { bad: true }));
}

function receive(kind, message) {
  const news = model.take(kind, message);
  if (!Object.keys(views).length) {
    build();
    route();
  } else if (!shown) route();
  document.body.classList.remove("away");
  if (kind === "news" && "recoveries" in views) news.recoveries.forEach(showIncident);
  if (waiting) {
    waiting.whole ||= news.whole;
    waiting.reordered ||= news.reordered;
    waiting.names.push(...news.names);
    waiting.events.push(...news.events);
    waiting.recoveries.push(...news.recoveries);
    return;
  }
  waiting = news;
  requestAnimationFrame(draw);
}

function draw() {
  const began = performance.now();
  const news = waiting;
  waiting = null;
  header();
  views[shown].view.draw(news);
  if (panel && (news.names.includes(panel.name) || news.whole)) panel.draw();
  if (panel) panel.addEvents(news.events);
  line_("live", "");
  document.dispatchEvent(new CustomEvent("drawn", { detail: performance.now() - began })); // for tests that measure it
}

// -- one node --------------------------------------------------------------------------------------------------------

class Panel {
  constructor(name, from) {
    this.name = name;
    this.from = from; // gets the focus back
    this.facts = h("dl", { class: "facts" });
    this.story = h("ol", { class: "story narrow" });
    this.buttons = h("div", { class: "choices left" });
    this.title = h("h2", { tabindex: "-1", text: name });
    this.element = h("aside", { class: "panel", "aria-label": `Node ${name}` }, h("div", { class: "panel-head" }, this.title, h("span", { class: "grow" }),
      h("button", { type: "button", class: "plain", "aria-label": "Close", title: "Close (Esc)", text: "×", onclick: closePanel })), this.facts, this.buttons, h("h3", { text: "Events" }), this.story);
  }

  draw() {
    const node = model.nodes.get(this.name);
    if (!node) {
      this.facts.replaceChildren(h("div", {}, h("dt", { text: "state" }), h("dd", { text: "no longer a member" })));
      this.buttons.replaceChildren();
      return;
    }
    const facts = {
      state: node.state, rank: node.rank >= 0 ? String(node.rank) : "–", host: `${node.host} (${node.address})`, doing: node.doing || "–",
      step: node.step >= 0 ? number(node.step) : "–", loss: number(node.loss), "busy per step": node.busyMs ? `${number(node.busyMs)} ms` : "–",
      straggles: node.straggles ? `${node.straggles.toFixed(2)} × the median step time` : "no", "last heartbeat": node.heartbeatAt > 0 ? `${span(model.now() - node.heartbeatAt)} ago` : "–",
      restarts: String(node.restarts), incarnation: String(node.incarnation), process: node.pid ? String(node.pid) : "–",
    };
    this.facts.replaceChildren(...Object.entries(facts).map(([name, text]) => h("div", {}, h("dt", { text: name }), h("dd", { class: "mono", text }))));
    if (this.buttons.childElementCount || node.role === "scheduler") return;
    const button = (text, does, kind = "") => h("button", { type: "button", class: kind, text, onclick: does });
    const now = () => model.nodes.get(this.name) ?? node;
    this.buttons.replaceChildren(...[
      node.hasLog && h("a", { class: "button", href: `#logs/${node.name}`, text: "Log" }),
      !job && node.role !== "spare" && button("Drain…", () => actions.drain(now())),
      !job && this.hostWorkers().length > 1 && button("Drain host…", () => actions.drainHost(node.host, this.hostWorkers())),
      model.about.kind === "training" && button("Kill…", () => actions.kill(now()), "danger-text"),
    ].filter(Boolean));
  }

  /** The workers on this node's host. */
  hostWorkers() {
    const { host } = model.nodes.get(this.name) ?? {};
    return [...model.nodes.values()].filter((node) => node.role === "worker" && node.host === host && node.rank >= 0 && node.state !== "left");
  }

  async read() {
    const reply = await get(`/story?node=${encodeURIComponent(this.name)}&limit=200`);
    this.story.replaceChildren(...reply.events.reverse().map((event) => line(event, show)));
  }

  addEvents(events) {
    this.story.prepend(...events.filter((event) => event.node === this.name).reverse().map((event) => line(event, show)));
  }
}

async function openPanel(name) {
  const from = panel?.from ?? document.activeElement;
  panel?.element.remove();
  panel = new Panel(name, from);
  panel.draw();
  document.body.append(panel.element);
  document.body.classList.add("with-panel");
  panel.title.focus();
  try {
    await panel.read();
  } catch (error) {
    actions.note(error.message, { bad: true });
  }
}

function closePanel() {
  panel?.element.remove();
  document.body.classList.remove("with-panel");
  panel?.from?.focus?.();
  panel = null;
}

// -- keys ------------------------------------------------------------------------------------------------------------

const KEYS = [["1 … 5", "switch to a view"], ["/", "filter, or search the log"], ["j k ↑ ↓", "select a node in the table"], ["Enter", "open the selected node"], ["Esc", "close panel or dialog"], ["s", "scale"], ["?", "show this list"]];

function help() {
  const dialog = h("dialog", { "aria-labelledby": "asked" }, h("h2", { id: "asked", text: "Keys" }),
    h("dl", { class: "facts" }, ...KEYS.map(([key, text]) => h("div", {}, h("dt", {}, h("kbd", { text: key })), h("dd", { text })))),
    h("p", { class: "quiet", text: `covey ${model.version} · ${plural(model.nodes.size, "node")}` }), h("form", { method: "dialog", class: "choices" }, h("button", { text: "Close" })));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && panel && !document.querySelector("dialog[open]")) return closePanel();
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea") || document.querySelector("dialog[open]")) return undefined;
  const names = Object.keys(views);
  if (/^[1-9]$/.test(event.key) && names[event.key - 1]) location.hash = names[event.key - 1];
  else if (event.key === "/") views[shown]?.view.focus?.();
  else if (event.key === "?") help();
  else if (event.key === "s" && OF_KIND[model.about.kind].actions.includes("scale") && model.cluster) actions.scale(model);
  else if ((event.key === "j" || event.key === "k") && shown === "nodes") {
    views.nodes.view.scroller.focus();
    views.nodes.view.key(event);
    return undefined;
  } else return undefined;
  event.preventDefault();
  return undefined;
});

byId("help").addEventListener("click", help);
window.addEventListener("hashchange", route);
setInterval(() => {
  if (!model.cluster || model.ended) return;
  views[shown]?.view.tick();
  figures();
}, TICK_MS);

if (job) {
  const mark_ = document.querySelector(".mark");
  mark_.href = "/";
  mark_.setAttribute("aria-label", "covey: all jobs");
  put(byId("cluster"), job);
}
await open(actions.askToken).catch((error) => line_("lost", error.message)); // the stream reconnects
await follow(receive, line_);
