// A device's side of a secure round in plain JavaScript: the arithmetic of covey/federated/privacy, written apart from it.
// Everything secret is made with WebCrypto; Shamir's sharing is BigInt. tests/vectors/secure.json holds for both.

const text = new TextEncoder();
const PRIME = 2n ** 256n + 297n;
const SHARE_BYTES = 33;
const TOLD = 8;
const TOLD_RANGE = 1024;

export const encode64 = (bytes) => btoa(Array.from(new Uint8Array(bytes), (one) => String.fromCharCode(one)).join(""));
export const decode64 = (said) => Uint8Array.from(atob(said), (one) => one.charCodeAt(0));

const toNumber = (bytes) => bytes.reduce((sum, one) => (sum << 8n) + BigInt(one), 0n);

function toBytes(number, size) {
  const bytes = new Uint8Array(size);
  for (let place = size - 1; place >= 0; place--, number >>= 8n) bytes[place] = Number(number & 255n);
  return bytes;
}

// -- keys ---------------------------------------------------------------------------------------------------------------

const PKCS8 = decode64("MC4CAQAwBQYDK2VuBCIEIA=="); // what comes before 32 bytes of a private X25519 key

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

async function shareKey(raw, other, session, giver, taker, use) {
  const route = `${text.encode(giver).length}/${giver}/${taker}`;
  const secret = await derive(await agreed(raw, other), session, `covey shares ${route}`);
  const key = await crypto.subtle.importKey("raw", secret, "AES-GCM", false, [use]);
  return [{ name: "AES-GCM", iv: new Uint8Array(12), additionalData: text.encode(`${session} ${route}`) }, key];
}

export async function seal(shares, raw, other, session, giver, taker) {
  const [how, key] = await shareKey(raw, other, session, giver, taker, "encrypt");
  return new Uint8Array(await crypto.subtle.encrypt(how, key, shares));
}

async function unseal(sealed, raw, other, session, giver, taker) {
  const [how, key] = await shareKey(raw, other, session, giver, taker, "decrypt");
  return new Uint8Array(await crypto.subtle.decrypt(how, key, sealed));
}

// -- Shamir -------------------------------------------------------------------------------------------------------------

export function split(secret, places, coefficients) {
  const terms = [...coefficients].reverse();
  return new Map(
    places.map((place) => {
      const value = [...terms, toNumber(secret)].reduce((sum, term) => (sum * BigInt(place) + term) % PRIME, 0n);
      return [place, toBytes(value, SHARE_BYTES)];
    }),
  );
}

function below() {
  for (;;) {
    const bytes = crypto.getRandomValues(new Uint8Array(SHARE_BYTES));
    bytes[0] &= 1; // 257 bits, so that most draws fit
    const number = toNumber(bytes);
    if (number < PRIME) return number;
  }
}

// -- whole numbers modulo 2^32 ------------------------------------------------------------------------------------------

const unit = (most, devices) => 2 ** Math.floor(Math.log2((2 ** 31 - 1 - devices) / most));

export const scale = (reach, samples, devices) => [reach, unit(reach * samples, devices), unit(TOLD_RANGE * samples, devices)];

function rounded(value) {
  const low = Math.floor(value);
  const rest = value - low;
  return rest < 0.5 || (rest === 0.5 && low % 2 === 0) ? low : low + 1;
}

export function encode(values, told, weight, [reach, valueUnit, toldUnit]) {
  const words = new Uint32Array(values.length + TOLD);
  values.forEach((value, place) => {
    if (!(Math.abs(value) <= reach)) throw new Error(`a value is ${value} off, and ${reach} is the reach: nothing was sent`);
    words[place] = rounded(value * (weight * valueUnit));
  });
  const fits = told.every((one) => Math.abs(one) <= TOLD_RANGE);
  told.forEach((one, place) => (words[values.length + place] = fits ? rounded(one * weight * toldUnit) : 0));
  return words;
}

// -- a session ----------------------------------------------------------------------------------------------------------

export class Session {
  constructor(flId) {
    this.flId = flId;
    [this.c, this.s, this.seed] = [0, 1, 2].map(() => crypto.getRandomValues(new Uint8Array(32)));
    this.held = new Map(); // by whose they are: shares of its seed and of its key
    this.answered = null;
  }

  async publicKeys() {
    return { c_pk: encode64(await publicOf(this.c)), s_pk: encode64(await publicOf(this.s)) };
  }

  async share(keys) {
    const holders = keys.remote_publickeys.length + 1;
    if (holders < 3 || 2 * keys.needed <= holders || keys.needed > holders)
      throw new Error(`the server wants ${keys.needed} of ${holders} shares to be enough: nothing was sent`);
    this.keys = keys;
    this.others = new Map(keys.remote_publickeys.map((other) => [other.fl_id, other]));
    if (this.others.size !== holders - 1 || this.others.has(this.flId)) throw new Error("a device is listed twice");
    const places = [keys.index + 1, ...keys.remote_publickeys.map((other) => other.index + 1)];
    const [ofSeed, ofKey] = [this.seed, this.s].map((secret) =>
      split(secret, places, Array.from({ length: keys.needed - 1 }, below)),
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
      const giver = this.others.get(one.fl_id);
      if (!giver) throw new Error(`${one.fl_id} is no neighbour of this device`);
      const both = await unseal(decode64(one.share), this.c, decode64(giver.c_pk), this.keys.session, one.fl_id, this.flId);
      this.held.set(one.fl_id, [both.slice(0, SHARE_BYTES), both.slice(SHARE_BYTES)]);
    }
    if (this.held.size < this.keys.needed) throw new Error(`too few devices shared secrets: ${this.held.size}`);
  }

  async mask(words) {
    const { session, index } = this.keys;
    const hidden = words.slice();
    const add = (mask, sign) => mask.forEach((one, place) => (hidden[place] += sign * one));
    add(await selfMask(this.seed, session, words.length), 1);
    for (const name of this.held.keys()) {
      if (name === this.flId) continue;
      const other = this.others.get(name);
      add(await pairMask(this.s, decode64(other.s_pk), session, words.length), index < other.index ? 1 : -1);
    }
    return hidden;
  }

  reveal(clients) {
    const said = JSON.stringify(clients);
    if (this.answered !== null && this.answered !== said) throw new Error("the server gave a second list: it is refused");
    const listed = new Set(clients);
    const here = [...this.held.keys()].filter((name) => listed.has(name)).length;
    if (!listed.has(this.flId) || listed.size !== clients.length || here < this.keys.needed)
      throw new Error("the list of updates would give single ones away: no share was sent");
    this.answered = said;
    return [...this.held].map(([name, [seed, key]]) => ({ fl_id: name, share: encode64(listed.has(name) ? seed : key) }));
  }
}
