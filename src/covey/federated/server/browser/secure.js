// Device side of a secure round in JavaScript: an independent implementation of covey/federated/privacy.
// Secrets are made with WebCrypto; Shamir's sharing uses BigInt. tests/vectors/secure.json is valid for both implementations.

const text = new TextEncoder();
const PRIME = 2n ** 256n + 297n;
const SHARE_BYTES = 33;
const METRIC_COUNT = 8;
const METRIC_MAX = 1024;

export const encode64 = (bytes) => btoa(Array.from(new Uint8Array(bytes), (one) => String.fromCharCode(one)).join(""));
export const decode64 = (encoded) => Uint8Array.from(atob(encoded), (one) => one.charCodeAt(0));

const toNumber = (bytes) => bytes.reduce((sum, one) => (sum << 8n) + BigInt(one), 0n);

function toBytes(number, size) {
  const bytes = new Uint8Array(size);
  for (let index = size - 1; index >= 0; index--, number >>= 8n) bytes[index] = Number(number & 255n);
  return bytes;
}

// -- keys ---------------------------------------------------------------------------------------------------------------

const PKCS8 = decode64("MC4CAQAwBQYDK2VuBCIEIA=="); // precedes the 32 bytes of a private X25519 key

const privateKey = (raw) =>
  crypto.subtle.importKey("pkcs8", new Uint8Array([...PKCS8, ...raw]), "X25519", true, ["deriveBits"]);

export async function publicOf(raw) {
  const { x } = await crypto.subtle.exportKey("jwk", await privateKey(raw));
  return decode64(x.replace(/-/g, "+").replace(/_/g, "/"));
}

export async function agreed(raw, other) {
  const key = await crypto.subtle.importKey("raw", other, "X25519", false, []);
  return new Uint8Array(await crypto.subtle.deriveBits({ name: "X25519", public: key }, await privateKey(raw), 256));
}

async function derive(secret, session, purpose) {
  const key = await crypto.subtle.importKey("raw", secret, "HKDF", false, ["deriveBits"]);
  const how = { name: "HKDF", hash: "SHA-256", salt: text.encode(session), info: text.encode(purpose) };
  return crypto.subtle.deriveBits(how, key, 256);
}

// -- masks --------------------------------------------------------------------------------------------------------------

async function stream(raw, size) {
  const key = await crypto.subtle.importKey("raw", raw, "AES-CTR", false, ["encrypt"]);
  const how = { name: "AES-CTR", counter: new Uint8Array(16), length: 128 };
  return new Uint32Array(await crypto.subtle.encrypt(how, key, new Uint8Array(4 * size)));
}

export const selfMask = async (seed, session, size) => stream(await derive(seed, session, "covey self mask"), size);

export const pairMask = async (raw, other, session, size) =>
  stream(await derive(await agreed(raw, other), session, "covey pair mask"), size);

async function shareKey(raw, other, session, sender, receiver, use) {
  const route = `${text.encode(sender).length}/${sender}/${receiver}`;
  const secret = await derive(await agreed(raw, other), session, `covey shares ${route}`);
  const key = await crypto.subtle.importKey("raw", secret, "AES-GCM", false, [use]);
  return [{ name: "AES-GCM", iv: new Uint8Array(12), additionalData: text.encode(`${session} ${route}`) }, key];
}

export async function seal(shares, raw, other, session, sender, receiver) {
  const [how, key] = await shareKey(raw, other, session, sender, receiver, "encrypt");
  return new Uint8Array(await crypto.subtle.encrypt(how, key, shares));
}

async function unseal(sealed, raw, other, session, sender, receiver) {
  const [how, key] = await shareKey(raw, other, session, sender, receiver, "decrypt");
  return new Uint8Array(await crypto.subtle.decrypt(how, key, sealed));
}

// -- Shamir -------------------------------------------------------------------------------------------------------------

export function split(secret, indices, coefficients) {
  const terms = [...coefficients].reverse();
  return new Map(
    indices.map((index) => {
      const value = [...terms, toNumber(secret)].reduce((sum, term) => (sum * BigInt(index) + term) % PRIME, 0n);
      return [index, toBytes(value, SHARE_BYTES)];
    }),
  );
}

function below() {
  for (;;) {
    const bytes = crypto.getRandomValues(new Uint8Array(SHARE_BYTES));
    bytes[0] &= 1; // 257 bits: about half of the draws are below PRIME
    const number = toNumber(bytes);
    if (number < PRIME) return number;
  }
}

// -- integers modulo 2^32 -----------------------------------------------------------------------------------------------

const unit = (most, devices) => 2 ** Math.floor(Math.log2((2 ** 31 - 1 - devices) / most));

export const scale = (reach, samples, devices) => [reach, unit(reach * samples, devices), unit(METRIC_MAX * samples, devices)];

function rounded(value) {
  const low = Math.floor(value);
  const rest = value - low;
  return rest < 0.5 || (rest === 0.5 && low % 2 === 0) ? low : low + 1;
}

export function encode(values, metrics, weight, [reach, valueUnit, metricUnit]) {
  const words = new Uint32Array(values.length + METRIC_COUNT);
  values.forEach((value, index) => {
    if (!(Math.abs(value) <= reach))
      throw new Error(`a value of the update is ${value} away from the model, but update_reach is ${reach}: nothing was sent`);
    words[index] = rounded(value * (weight * valueUnit));
  });
  const fits = metrics.every((one) => Math.abs(one) <= METRIC_MAX);
  metrics.forEach((one, index) => (words[values.length + index] = fits ? rounded(one * weight * metricUnit) : 0));
  return words;
}

// -- a session ----------------------------------------------------------------------------------------------------------

export class Session {
  constructor(flId) {
    this.flId = flId;
    [this.c, this.s, this.seed] = [0, 1, 2].map(() => crypto.getRandomValues(new Uint8Array(32)));
    this.held = new Map(); // by device: shares of its seed and of its key
    this.revealed = null; // the list for which shares were revealed
  }

  async publicKeys() {
    return { c_pk: encode64(await publicOf(this.c)), s_pk: encode64(await publicOf(this.s)) };
  }

  async share(keys) {
    const holders = keys.remote_publickeys.length + 1;
    if (holders < 3 || 2 * keys.needed <= holders || keys.needed > holders)
      throw new Error(`the server's threshold of ${keys.needed} of ${holders} shares is unsafe: nothing was sent`);
    this.keys = keys;
    this.others = new Map(keys.remote_publickeys.map((other) => [other.fl_id, other]));
    if (this.others.size !== holders - 1 || this.others.has(this.flId)) throw new Error("the server's list of keys names a device twice");
    const indices = [keys.index + 1, ...keys.remote_publickeys.map((other) => other.index + 1)];
    const [ofSeed, ofKey] = [this.seed, this.s].map((secret) =>
      split(secret, indices, Array.from({ length: keys.needed - 1 }, below)),
    );
    this.held.set(this.flId, [ofSeed.get(keys.index + 1), ofKey.get(keys.index + 1)]);
    return Promise.all(
      keys.remote_publickeys.map(async (other) => {
        const both = new Uint8Array([...ofSeed.get(other.index + 1), ...ofKey.get(other.index + 1)]);
        const sealed = await seal(both, this.c, decode64(other.c_pk), keys.session, this.flId, other.fl_id);
        return { fl_id: other.fl_id, share: encode64(sealed) };
      }),
    );
  }

  async take(shares) {
    for (const one of shares) {
      const sender = this.others.get(one.fl_id);
      if (!sender) throw new Error(`the server sent shares of ${one.fl_id}, which is not a neighbour`);
      const both = await unseal(decode64(one.share), this.c, decode64(sender.c_pk), this.keys.session, one.fl_id, this.flId);
      this.held.set(one.fl_id, [both.slice(0, SHARE_BYTES), both.slice(SHARE_BYTES)]);
    }
    if (this.held.size < this.keys.needed)
      throw new Error(`${this.held.size} devices shared secrets, and ${this.keys.needed} are needed`);
  }

  async mask(words) {
    const { session, index } = this.keys;
    const masked = words.slice();
    const add = (mask, sign) => mask.forEach((one, index) => (masked[index] += sign * one));
    add(await selfMask(this.seed, session, words.length), 1);
    for (const name of this.held.keys()) {
      if (name === this.flId) continue;
      const other = this.others.get(name);
      add(await pairMask(this.s, decode64(other.s_pk), session, words.length), index < other.index ? 1 : -1);
    }
    return masked;
  }

  reveal(clients) {
    const list = JSON.stringify(clients);
    if (this.revealed !== null && this.revealed !== list) throw new Error("the server sent a second list: no share was sent for it");
    const listed = new Set(clients);
    const count = [...this.held.keys()].filter((name) => listed.has(name)).length;
    if (!listed.has(this.flId) || listed.size !== clients.length || count < this.keys.needed)
      throw new Error("the list of updates could reveal single updates: no share was sent");
    this.revealed = list;
    return [...this.held].map(([name, [seed, key]]) => ({ fl_id: name, share: encode64(listed.has(name) ? seed : key) }));
  }
}
