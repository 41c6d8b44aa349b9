// Log of a node: its end, followed as it grows, or a search from its start.

import { bytes, h, put } from "/console/dom.js";

const TAIL = 64 * 1024; // bytes shown first
const LINES_MAX = 5000;
const REFRESH_MS = 1000;
const RETRY_MS = 2000;
const FOUND_MAX = 2000; // lines of a search
const ESCAPES = /\u001b\[[0-9;?]*[A-Za-z]/g;

export class Logs {
  constructor(model, get) {
    this.model = model;
    this.get = get;
    this.node = "";
    this.turn = 0; // replies to older requests are ignored
    this.choice = h("select", { id: "log-node", "aria-label": "Node of the log", onchange: () => (location.hash = `logs/${this.choice.value}`) });
    this.find = h("input", { type: "search", id: "find", placeholder: "Search the whole log, then Enter", "aria-label": "Search the log", maxlength: "100",
      autocomplete: "off", spellcheck: "false", onkeydown: (event) => event.key === "Enter" && void this.open(this.node), onsearch: () => !this.find.value && void this.open(this.node) });
    this.follow = h("input", { type: "checkbox", id: "follow", checked: true });
    this.state = h("span", { class: "quiet mono", role: "status" });
    this.text = h("pre", { class: "log", tabindex: "0", "aria-label": "Log" });
    this.element = h("div", { class: "logs" }, h("div", { class: "tools" }, this.choice, this.find, h("label", {}, this.follow, " follow"), this.state), this.text);
  }

  async open(node) {
    this.choices(node);
    this.node = node || this.choice.value;
    this.choice.value = this.node;
    const turn = ++this.turn;
    this.text.replaceChildren();
    clearTimeout(this.timer);
    if (!this.node) {
      put(this.state, "no log: the nodes were not started by covey run");
      return;
    }
    try {
      if (this.find.value) await this.search(turn, this.find.value);
      else await this.tail(turn);
    } catch (error) {
      if (turn !== this.turn) return;
      put(this.state, error.message);
      if (!error.status) this.timer = setTimeout(() => this.element.isConnected && void this.open(this.node), RETRY_MS); // no reply: retry
    }
  }

  piece(start, find = "") {
    const query = find ? `&find=${encodeURIComponent(find)}` : "";
    return this.get(`/logs/${encodeURIComponent(this.node)}?start=${start}${query}`);
  }

  async tail(turn) {
    let piece = await this.piece(-TAIL);
    if (turn !== this.turn) return;
    this.add(piece.text, true);
    const look = async () => {
      if (turn !== this.turn || !this.element.isConnected) return;
      try {
        if (this.follow.checked && !document.hidden && !this.model.ended) {
          const next = await this.piece(piece.next);
          if (turn !== this.turn) return;
          piece = next;
          this.add(piece.text, false);
        }
        put(this.state, `${bytes(piece.size)}${piece.start > 0 ? ", end shown" : ""}`);
      } catch (error) {
        put(this.state, error.message);
      }
      this.timer = setTimeout(look, REFRESH_MS);
    };
    await look();
  }

  async search(turn, text) {
    let found = 0;
    for (let start = 0, size = 1; start < size && found < FOUND_MAX; ) {
      const piece = await this.piece(start, text);
      if (turn !== this.turn) return;
      found += this.add(piece.text, false, text);
      size = piece.size;
      put(this.state, `${found} lines found in ${bytes(piece.next)} of ${bytes(size)}`);
      if (piece.next === start) break;
      start = piece.next;
    }
    put(this.state, `${found}${found >= FOUND_MAX ? " or more" : ""} lines found`);
  }

  /** Append lines and return their number. Scroll to the end only if the end was visible. */
  add(text, toEnd, marked = "") {
    const lines = text.replace(ESCAPES, "").split("\n").slice(0, -1);
    const box = this.text;
    const atEnd = toEnd || box.scrollTop + box.clientHeight > box.scrollHeight - 40;
    box.append(...lines.map((content) => h("span", {}, ...highlighted(content.replace(/.*\r(?=.)/, ""), marked), "\n")));
    while (box.childElementCount > LINES_MAX) box.firstChild.remove();
    if (atEnd && !marked) box.scrollTop = box.scrollHeight;
    return lines.length;
  }

  choices(wanted) {
    const names = [...this.model.nodes.values()].filter((node) => node.hasLog).sort((a, b) => a.rank - b.rank).map((node) => node.name);
    if (wanted && !names.includes(wanted)) names.push(wanted);
    if (names.join() === this.known) return;
    this.known = names.join();
    this.choice.replaceChildren(...names.map((name) => h("option", { value: name, text: name })));
  }

  draw(news) {
    if (news.reordered) {
      this.choices(this.node);
      if (this.node) this.choice.value = this.node;
      else if (this.choice.value) void this.open("");
    }
  }

  tick() {}

  focus() {
    this.find.focus();
  }
}

function highlighted(text, wanted) {
  const at = wanted ? text.toLowerCase().indexOf(wanted.toLowerCase()) : -1;
  if (at < 0) return [text];
  return [text.slice(0, at), h("mark", { text: text.slice(at, at + wanted.length) }), text.slice(at + wanted.length)];
}
