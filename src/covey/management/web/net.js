// How this page speaks with the port it came from, and with nobody else.
//
// On loopback the port lends the page a key; elsewhere a person gives the token, which this tab alone keeps. Both travel in a
// header of each request, which no other web page can set or read: a cookie would be sent along with anybody's requests.

const STORE = "covey-token";
const NOBODY = "the scheduler does not answer: what was asked for may not have been heard";
const AGAIN_MS = [300, 1000, 2000, 5000];

export class Refused extends Error {
  constructor(status, sentence) {
    super(sentence);
    this.status = status;
  }
}

/** The job of an operator that is looked into ("namespace/name"), and what stands before the paths of its scheduler. */
export const job = new URLSearchParams(location.search).get("job") ?? "";
const base = job ? `/jobs/${job.split("/").map(encodeURIComponent).join("/")}` : "";

/** Where a job of an operator is looked into. */
export const jobPage = (name) => `/?job=${encodeURIComponent(name).replace("%2F", "/")}`;

let bearer = "";
let asking = null;

/** Find what opens the port; `ask(why)` is called for a token where a person must give one. */
export async function open(ask) {
  asking = ask;
  const key = await fetch("/key", { cache: "no-store" });
  if (key.ok) bearer = (await key.json()).key;
  else await login(sessionStorage.getItem(STORE) ? "" : await sentence(key));
}

async function login(why) {
  let trouble = why;
  for (;;) {
    const token = (!trouble && sessionStorage.getItem(STORE)) || (await asking(trouble));
    const answer = await fetch("/settings", { headers: { Authorization: `Bearer ${token}` }, cache: "no-store" });
    if (answer.ok) {
      bearer = token;
      sessionStorage.setItem(STORE, token);
      return;
    }
    sessionStorage.removeItem(STORE);
    trouble = await sentence(answer);
  }
}

async function sentence(answer) {
  try {
    return (await answer.json()).error_message ?? `HTTP ${answer.status}`;
  } catch {
    return `HTTP ${answer.status}`;
  }
}

/** A scheduler that was started anew has another key: what it refuses for that is asked once more. */
async function request(path, options = {}, again = true) {
  const headers = { Authorization: `Bearer ${bearer}`, ...(options.body ? { "Content-Type": "application/json" } : {}) };
  let answer;
  try {
    answer = await fetch(path, { ...options, headers, cache: "no-store" });
    if (answer.status === 401 && again) {
      await open(asking);
      return request(path, options, false);
    }
  } catch (error) {
    throw error instanceof TypeError ? new Error(NOBODY) : error;
  }
  if (!answer.ok) throw new Refused(answer.status, await sentence(answer));
  return answer;
}

export const get = async (path) => (await request(base + path)).json();
export const post = async (path, body) => (await request(base + path, { method: "POST", body: JSON.stringify(body ?? {}) })).json();
/** The port this page came from, also where a job is looked into. */
export const above = async (path) => (await request(path)).json();

/** The stream, for ever: an end is answered by asking again. `heard(kind, content)` and `line(state, why)` tell of it. */
export async function follow(heard, line) {
  for (let failures = 0; ; ) {
    try {
      const answer = await request(`${base}/stream`);
      line("live", "");
      await read(answer.body.getReader(), (kind, content) => {
        failures = 0;
        heard(kind, content);
      });
      continue;
    } catch (error) {
      line("lost", error.message, error.status ?? 0);
    }
    await new Promise((done) => setTimeout(done, AGAIN_MS[Math.min(failures, AGAIN_MS.length - 1)]));
    failures += 1;
  }
}

async function read(reader, heard) {
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += decoder.decode(value, { stream: true });
    const pieces = rest.split("\n\n");
    rest = pieces.pop();
    for (const piece of pieces) {
      const kind = /^event: (.*)$/m.exec(piece)?.[1];
      const data = /^data: (.*)$/m.exec(piece)?.[1];
      if (kind && data) heard(kind, JSON.parse(data));
    }
  }
}
