// Requests to the management port that served this page, and to no other host.
//
// On loopback the page reads a key from the port; elsewhere the user enters the token, which is stored in this tab only. Both are
// sent in a header, which other web pages can neither set nor read. A cookie would also be sent with requests of other pages.

const STORE = "covey-token";
const NO_REPLY = "No answer from the scheduler. Check whether the request took effect before you repeat it.";
const RETRY_MS = [300, 1000, 2000, 5000];

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The operator's job that this page shows ("namespace/name"), or ""; `base` is the prefix of the paths of its scheduler. */
export const job = new URLSearchParams(location.search).get("job") ?? "";
const base = job ? `/jobs/${job.split("/").map(encodeURIComponent).join("/")}` : "";

/** Return the URL of the page of an operator's job. */
export const jobPage = (name) => `/?job=${encodeURIComponent(name).replace("%2F", "/")}`;

let bearer = "";
let asking = null;

/** Get the key or the token; `ask(why)` is called if the user must enter a token. */
export async function open(ask) {
  asking = ask;
  const key = await fetch("/key", { cache: "no-store" });
  if (key.ok) bearer = (await key.json()).key;
  else await login(sessionStorage.getItem(STORE) ? "" : await errorMessage(key));
}

async function login(why) {
  let trouble = why;
  for (;;) {
    const token = (!trouble && sessionStorage.getItem(STORE)) || (await asking(trouble));
    const response = await fetch("/settings", { headers: { Authorization: `Bearer ${token}` }, cache: "no-store" });
    if (response.ok) {
      bearer = token;
      sessionStorage.setItem(STORE, token);
      return;
    }
    sessionStorage.removeItem(STORE);
    trouble = await errorMessage(response);
  }
}

async function errorMessage(response) {
  try {
    return (await response.json()).error_message ?? `HTTP ${response.status}`;
  } catch {
    return `HTTP ${response.status}`;
  }
}

/** Send a request. After a 401 get a new key and retry once, because a restarted scheduler has another key. */
async function request(path, options = {}, again = true) {
  const headers = { Authorization: `Bearer ${bearer}`, ...(options.body ? { "Content-Type": "application/json" } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
    if (response.status === 401 && again) {
      await open(asking);
      return request(path, options, false);
    }
  } catch (error) {
    throw error instanceof TypeError ? new Error(NO_REPLY) : error;
  }
  if (!response.ok) throw new Refused(response.status, await errorMessage(response));
  return response;
}

export const get = async (path) => (await request(base + path)).json();
export const post = async (path, body) => (await request(base + path, { method: "POST", body: JSON.stringify(body ?? {}) })).json();
/** Get a path of the operator itself, also on the page of a job. */
export const above = async (path) => (await request(path)).json();

/** Follow the stream and reconnect after its end. Calls `receive(kind, content)` for messages and `line(state, why, status)` for the connection. */
export async function follow(receive, line) {
  for (let failures = 0; ; ) {
    try {
      const response = await request(`${base}/stream`);
      line("live", "");
      await read(response.body.getReader(), (kind, content) => {
        failures = 0;
        receive(kind, content);
      });
      continue;
    } catch (error) {
      line("lost", error.message, error.status ?? 0);
    }
    await new Promise((done) => setTimeout(done, RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]));
    failures += 1;
  }
}

async function read(reader, receive) {
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
      if (kind && data) receive(kind, JSON.parse(data));
    }
  }
}
