// What a person may do to a cluster. Each is asked twice, and the answer is the scheduler's own sentence.

import { byId, h, plural } from "/console/dom.js";
import { job, post } from "/console/net.js";

/** A note at the edge of the page, gone after a while unless somebody is at it; a later one of the same `name` takes its place. */
export function note(text, { bad = false, name = "", link = "", to = "" } = {}) {
  const made = h("p", { class: "note", "data-bad": String(bad), "data-name": name }, text, link && " ", link && h("a", { href: to, text: link }),
    h("button", { type: "button", class: "plain", "aria-label": "Close this note", text: "×", onclick: () => made.remove() }));
  const old = name && [...byId("notes").children].find((note) => note.dataset.name === name);
  if (old) old.replaceWith(made);
  else byId("notes").append(made);
  const leave = () => (made.matches(":hover, :focus-within") ? setTimeout(leave, 1000) : made.remove());
  setTimeout(leave, bad || link ? 15_000 : 8000);
}

/** Ask; `act(form)` returns what is posted, as [path, body], once it was confirmed. */
export function confirm({ title, says, fields = [], button, danger = false, act }) {
  const trouble = h("p", { class: "trouble", role: "alert" });
  const yes = h("button", { type: "submit", class: danger ? "danger" : "primary", text: button });
  const form = h("form", { method: "dialog" }, h("h2", { id: "asked", text: title }), ...says.map((text) => h("p", { text })), ...fields, trouble,
    h("div", { class: "choices" }, h("button", { type: "button", text: "Cancel", onclick: () => dialog.close() }), yes));
  const dialog = h("dialog", { "aria-labelledby": "asked" }, form);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    yes.disabled = true;
    trouble.textContent = "";
    try {
      const answer = await act(form);
      dialog.close();
      note(answer.reason ? `${answer.message} ${answer.reason}` : answer.message);
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
    const form = h("form", { method: "dialog" }, h("h2", { id: "asked", text: "This cluster asks for its token" }), h("p", { id: "why", class: why ? "trouble" : "", role: "alert", text: why }),
      h("label", { for: "token", text: "Token (COVEY_TOKEN, else the one in the registry file of who runs the scheduler)" }), field,
      h("p", { class: "quiet", text: "It stays in this tab, until the tab is closed." }), h("div", { class: "choices" }, h("button", { type: "submit", class: "primary", text: "Open" })));
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
    says: [`There are ${members.length}. More are started at the next boundary; fewer drain first, those with the highest ranks.`, job && `The number is written into the job ${job}.`].filter(Boolean),
    fields: [field(`${role}s`, wanted)],
    button: "Scale",
    act: () => {
      const change = Number(wanted.value) - members.length;
      if (change === 0) throw new Error(`there are ${plural(members.length, role)} already`);
      if (job) return post("/scale", { workers: Number(wanted.value) });
      if (change > 0) return post("/scaleout", federated ? { worker_num: 0, server_num: change } : { worker_num: change, server_num: 0 });
      return post("/scalein", { node_ids: members.slice(change).map((node) => node.id) });
    },
  });
}

export const drain = (node) => confirm({
  title: `Drain ${node.name}?`,
  says: [`It finishes its step, hands over what it holds and leaves; the world is smaller by one.`],
  button: "Drain",
  act: () => post("/scalein", { node_ids: [node.role === "server" ? node.id : node.name] }),
});

export const drainHost = (host, nodes) => confirm({
  title: `Drain the host ${host}?`,
  says: [`${plural(nodes.length, "worker")} finish their step, hand over what they hold and leave: ${nodes.map((node) => node.name).join(", ")}.`],
  button: "Drain host",
  act: () => post("/scalein", { node_ids: nodes.map((node) => node.name) }),
});

export const kill = (node) => confirm({
  title: `Kill ${node.name}?`,
  says: [`Process ${node.pid} on ${node.host} receives SIGKILL, as a fault would end it. What follows is what follows a death.`],
  button: "Kill",
  danger: true,
  act: () => post("/kill", { node: node.name }),
});

const why = () => h("input", { name: "reason", maxlength: "500", placeholder: "for the log and the story" });

export function dump() {
  const reason = why();
  confirm({
    title: "Dump and end?",
    says: ["Every rank writes down what it holds at its next safe point, in the form of a checkpoint. Then the run ends."],
    fields: [field("Why", reason)],
    button: "Dump and end",
    danger: true,
    act: () => post("/dump", reason.value ? { reason: reason.value } : {}),
  });
}

const suspend = () => confirm({
  title: `Stop the job ${job}?`,
  says: ["It is suspended: its pods are taken away, and what was not written down is lost. The job stays, and can be resumed."],
  button: "Stop",
  danger: true,
  act: () => post("/suspend", { suspend: true }),
});

export const resume = () => confirm({
  title: `Resume the job ${job}?`,
  says: ["Its pods are created anew; what its program wrote down is where it begins."],
  button: "Resume",
  act: () => post("/suspend", { suspend: false }),
});

export function stop(model) {
  if (job) return suspend();
  const reason = why();
  return confirm({
    title: "Stop the cluster?",
    says: [`${plural(model.workers().length, model.about.kind === "federated" ? "server" : "worker")} end. What was not written down is lost.`],
    fields: [field("Why", reason)],
    button: "Stop",
    danger: true,
    act: () => post("/stop", reason.value ? { reason: reason.value } : {}),
  });
}
