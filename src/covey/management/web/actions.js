// Actions of the user on a cluster. Each needs a confirmation; the scheduler's reply is shown as it is.

import { byId, h, plural } from "/console/dom.js";
import { job, post } from "/console/net.js";

/** Show a note at the edge of the page. It disappears after a while, unless it is hovered or focused. A later note with the same `name` replaces it. */
export function note(text, { bad = false, name = "", link = "", to = "" } = {}) {
  const made = h("p", { class: "note", "data-bad": String(bad), "data-name": name }, text, link && " ", link && h("a", { href: to, text: link }),
    h("button", { type: "button", class: "plain", "aria-label": "Close this note", text: "×", onclick: () => made.remove() }));
  const old = name && [...byId("notes").children].find((note) => note.dataset.name === name);
  if (old) old.replaceWith(made);
  else byId("notes").append(made);
  const leave = () => (made.matches(":hover, :focus-within") ? setTimeout(leave, 1000) : made.remove());
  setTimeout(leave, bad || link ? 15_000 : 8000);
}

/** Open a confirmation dialog; `act(form)` sends the request and returns the reply. */
export function confirm({ title, texts, fields = [], button, danger = false, act }) {
  const trouble = h("p", { class: "trouble", role: "alert" });
  const yes = h("button", { type: "submit", class: danger ? "danger" : "primary", text: button });
  const form = h("form", { method: "dialog" }, h("h2", { id: "asked", text: title }), ...texts.map((text) => h("p", { text })), ...fields, trouble,
    h("div", { class: "choices" }, h("button", { type: "button", text: "Cancel", onclick: () => dialog.close() }), yes));
  const dialog = h("dialog", { "aria-labelledby": "asked" }, form);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    yes.disabled = true;
    trouble.textContent = "";
    try {
      const reply = await act(form);
      dialog.close();
      note(reply.reason ? `${reply.message} ${reply.reason}` : reply.message);
    } catch (error) {
      trouble.textContent = error.message;
      yes.disabled = false;
    }
  });
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  form.querySelector("input")?.select();
}

export function askToken(why) {
  return new Promise((done) => {
    const field = h("input", { type: "password", id: "token", name: "token", required: true, autocomplete: "off", "aria-describedby": "why" });
    const form = h("form", { method: "dialog" }, h("h2", { id: "asked", text: "Token required" }), h("p", { id: "why", class: why ? "trouble" : "", role: "alert", text: why }),
      h("label", { for: "token", text: "Token (COVEY_TOKEN, else from the registry file of the user who runs the scheduler)" }), field,
      h("p", { class: "quiet", text: "The token is stored in this tab only, until the tab is closed." }), h("div", { class: "choices" }, h("button", { type: "submit", class: "primary", text: "Open" })));
    const dialog = h("dialog", { id: "login", "aria-labelledby": "asked" }, form);
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      dialog.remove();
      done(field.value.trim());
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

const field = (label, input) => h("label", { class: "field" }, label, input);

export function scale(model) {
  const federated = model.about.kind === "federated";
  const role = federated ? "server" : "worker";
  const members = [...model.nodes.values()].filter((node) => node.role === role && node.rank >= 0 && node.state !== "left").sort((a, b) => a.rank - b.rank);
  const wanted = h("input", { type: "number", name: "wanted", min: "1", max: "4096", required: true, value: String(members.length) });
  confirm({
    title: `Change the number of ${role}s`,
    texts: [
      `The cluster has ${plural(members.length, role)}. ` + (federated
        ? "Scaling out makes room for servers that you start. Scaling in removes the highest ranks."
        : "New workers start now and join the current step. Scaling in removes the highest ranks; samples they have not contributed move to the next step."),
      job && `The number is written into the job ${job}.`,
    ].filter(Boolean),
    fields: [field(`${role}s`, wanted)],
    button: "Scale",
    act: () => {
      const change = Number(wanted.value) - members.length;
      if (change === 0) throw new Error(`the cluster has ${plural(members.length, role)} already: enter another number`);
      if (job) return post("/scale", { workers: Number(wanted.value) });
      if (change > 0) return post("/scaleout", federated ? { worker_num: 0, server_num: change } : { worker_num: change, server_num: 0 });
      return post("/scalein", { node_ids: members.slice(change).map((node) => node.id) });
    },
  });
}

export const drain = (node) => confirm({
  title: `Drain ${node.name}?`,
  texts: [{
    worker: "The worker leaves the group now; samples it has not contributed move to the next step. The world size decreases by one.",
    pserver: "Its rows move to the other parameter servers; then it leaves. The number of parameter servers decreases by one.",
  }[node.role] ?? "The server takes no more updates, hands over those it has, and leaves."],
  button: "Drain",
  act: () => post("/scalein", { node_ids: [node.role === "server" ? node.id : node.name] }),
});

export const drainHost = (host, nodes) => confirm({
  title: `Drain the host ${host}?`,
  texts: [`${plural(nodes.length, "worker")} leave the group now: ${nodes.map((node) => node.name).join(", ")}. Samples they have not contributed move to the next step.`],
  button: "Drain host",
  act: () => post("/scalein", { node_ids: nodes.map((node) => node.name) }),
});

export const kill = (node) => confirm({
  title: `Kill ${node.name}?`,
  texts: [`Sends SIGKILL to process ${node.pid} on ${node.host}. The cluster recovers as from any crash.`],
  button: "Kill",
  danger: true,
  act: () => post("/kill", { node: node.name }),
});

const reasonField = () => h("input", { name: "reason", maxlength: "500", placeholder: "for logs and events" });

export function dump() {
  const reason = reasonField();
  confirm({
    title: "Dump and end?",
    texts: ["Every rank writes its state as a checkpoint at its next safe point. Then the run ends."],
    fields: [field("Reason", reason)],
    button: "Dump and end",
    danger: true,
    act: () => post("/dump", reason.value ? { reason: reason.value } : {}),
  });
}

const suspend = () => confirm({
  title: `Stop the job ${job}?`,
  texts: ["Suspends the job: its pods are deleted, and progress since the last checkpoint is lost. The job can be resumed."],
  button: "Stop",
  danger: true,
  act: () => post("/suspend", { suspend: true }),
});

export const resume = () => confirm({
  title: `Resume the job ${job}?`,
  texts: ["Creates the pods again. The script resumes from its newest checkpoint."],
  button: "Resume",
  act: () => post("/suspend", { suspend: false }),
});

export function stop(model) {
  if (job) return suspend();
  const reason = reasonField();
  return confirm({
    title: "Stop the cluster?",
    texts: [`Stops ${plural(model.workers().length, model.about.kind === "federated" ? "server" : "worker")}. Progress since the last checkpoint is lost.`],
    fields: [field("Reason", reason)],
    button: "Stop",
    danger: true,
    act: () => post("/stop", reason.value ? { reason: reason.value } : {}),
  });
}
