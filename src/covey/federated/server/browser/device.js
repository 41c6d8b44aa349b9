// Device in a browser tab: joins rounds of the server that served this page, trains on samples that never leave the tab, and
// sends masked updates. It trains perceptrons with one hidden layer: hidden.weight, hidden.bias, out.weight, out.bias.

import { Session, encode, scale } from "./secure.js";

const WAIT_MS = 20000;
const [SUCCEED, NOT_READY] = [200, 201];
const prefix = location.pathname.replace(/\/device\/.*$/, "");

// -- requests and safetensors -------------------------------------------------------------------------------------------

async function post(path, body, type = "application/json") {
  const answer = await fetch(`${prefix}/${path}`, { method: "POST", body, headers: { "content-type": type } });
  if (answer.headers.get("content-type") !== "application/x-safetensors") return [await answer.json(), null];
  return readTensors(await answer.arrayBuffer());
}

function readTensors(buffer) {
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  const { __metadata__: fields, ...tensors } = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const model = {};
  for (const [name, { shape, data_offsets: [low, high] }] of Object.entries(tensors))
    model[name] = { shape, values: new Float32Array(buffer.slice(8 + length + low, 8 + length + high)) };
  return [fields, model];
}

function maskedBody(words, fields) {
  const tensor = { dtype: "U32", shape: [words.length], data_offsets: [0, words.byteLength] };
  let head = JSON.stringify({ __metadata__: fields, masked: tensor });
  const padding = (8 - (new TextEncoder().encode(head).length % 8)) % 8;
  const bytes = new TextEncoder().encode(head + " ".repeat(padding));
  const length = new Uint8Array(8);
  new DataView(length.buffer).setBigUint64(0, BigInt(bytes.length), true);
  return new Blob([length, bytes, words]);
}

// -- training -----------------------------------------------------------------------------------------------------------

export function train(model, { images, labels }, epochs, rate) {
  const [inputs, hidden] = model["hidden.weight"].shape;
  const classes = model["out.bias"].shape[0];
  const own = Object.fromEntries(Object.entries(model).map(([name, one]) => [name, Float64Array.from(one.values)]));
  const [w1, b1, w2, b2] = ["hidden.weight", "hidden.bias", "out.weight", "out.bias"].map((name) => own[name]);
  let loss = 0;
  let right = 0;
  for (let epoch = 0; epoch < epochs; epoch++) {
    const [g1, gb1, g2, gb2] = [w1, b1, w2, b2].map((one) => new Float64Array(one.length));
    loss = right = 0;
    images.forEach((image, sample) => {
      const active = Float64Array.from(b1);
      for (let i = 0; i < inputs; i++) for (let h = 0; h < hidden; h++) active[h] += image[i] * w1[i * hidden + h];
      for (let h = 0; h < hidden; h++) active[h] = Math.max(0, active[h]);
      const logits = Float64Array.from(b2);
      for (let h = 0; h < hidden; h++) for (let c = 0; c < classes; c++) logits[c] += active[h] * w2[h * classes + c];
      const most = Math.max(...logits);
      const exponentials = logits.map((one) => Math.exp(one - most));
      const sum = exponentials.reduce((a, b) => a + b);
      const slope = exponentials.map((one, c) => (one / sum - (c === labels[sample] ? 1 : 0)) / images.length);
      loss -= Math.log(exponentials[labels[sample]] / sum + 1e-9) / images.length;
      right += (logits.indexOf(most) === labels[sample] ? 1 : 0) / images.length;
      const back = new Float64Array(hidden);
      for (let h = 0; h < hidden; h++)
        for (let c = 0; c < classes; c++) {
          g2[h * classes + c] += active[h] * slope[c];
          if (active[h] > 0) back[h] += slope[c] * w2[h * classes + c];
        }
      for (let c = 0; c < classes; c++) gb2[c] += slope[c];
      for (let h = 0; h < hidden; h++) gb1[h] += back[h];
      for (let i = 0; i < inputs; i++) for (let h = 0; h < hidden; h++) g1[i * hidden + h] += image[i] * back[h];
    });
    const down = (values, slopes) => values.forEach((_, n) => (values[n] -= rate * slopes[n]));
    [[w1, g1], [b1, gb1], [w2, g2], [b2, gb2]].forEach((pair) => down(...pair));
  }
  return { own, loss, right };
}

// -- a round ------------------------------------------------------------------------------------------------------------

class Late extends Error {} // the round continues without this device

async function secureRound(flId, start, model, data, plan, report) {
  const { own, loss, right } = train(model, data, plan.epochs, plan.lr);
  const names = Object.keys(model).sort();
  const changed = (name) => [...own[name]].map((one, n) => Math.fround(one) - model[name].values[n]);
  const change = Float32Array.from(names.flatMap(changed));
  const size = data.labels.length;
  const session = new Session(flId);
  const request = async (path, more = {}) => {
    for (;;) {
      const common = { fl_id: flId, iteration: Number(start.iteration), data_size: size, ticket: start.ticket };
      const [answer] = await post(path, JSON.stringify({ ...common, timestamp: Date.now(), wait: WAIT_MS, ...more }));
      if (answer.retcode === SUCCEED) return answer;
      if (answer.retcode !== NOT_READY) throw new Late(answer.reason);
    }
  };
  await request("exchangeKeys", await session.publicKeys());
  const keys = await request("getKeys");
  if (keys.done) throw new Late("the round is complete");
  const metrics = [1, loss, right, 0, 0, 0, 1, 0];
  const words = encode(change, metrics, size, scale(plan.cipher.reach, keys.samples, keys.devices));
  // Replies omit fields that have their default, such as an index of 0.
  await request("shareSecrets", { encrypted_shares: await session.share(filled(keys)) });
  const secrets = await request("getSecrets");
  if (secrets.done) throw new Late("the round is complete");
  await session.take(secrets.encrypted_shares ?? []);
  report("sending a masked update");
  const masked = await session.mask(words);
  const metadata = { fl_id: flId, iteration: start.iteration, data_size: String(size), ticket: secrets.ticket };
  const body = maskedBody(masked, { ...metadata, timestamp: String(Date.now()) });
  const [counted] = await post("updateModel", body, "application/x-safetensors");
  if (counted.retcode !== SUCCEED) throw new Late(counted.reason);
  const list = await request("getClientList");
  if (!list.done) await request("reconstructSecrets", { reconstruct_secret_shares: session.reveal(list.clients) });
  return { loss, right, change: Array.from(change) };
}

const filled = (keys) => {
  const others = keys.remote_publickeys.map((one) => ({ index: 0, ...one }));
  return { ...keys, index: keys.index ?? 0, remote_publickeys: others };
};

// Takes part in rounds until the training ends; returns loss, accuracy and change of each round.
export async function takePart(flId, data, report) {
  let done = 0;
  const rounds = [];
  for (;;) {
    const job = { fl_id: flId, timestamp: Date.now(), data_size: data.labels.length, iteration: done, wait: WAIT_MS };
    const [start, model] = await post("startFLJob", JSON.stringify(job));
    if (model === null) {
      if (start.instance) return rounds;
      await new Promise((wake) => setTimeout(wake, 200));
      continue;
    }
    const plan = JSON.parse(start.fl_plan_config);
    if (plan.cipher.encrypt_type !== "PW_ENCRYPT") throw new Error("this page supports only secure rounds: start the servers with --secure");
    if (plan.cipher.signed) throw new Error("the servers require device certificates (pki_verify), which this page does not support");
    report(`training in iteration ${start.iteration}`);
    try {
      const result = await secureRound(flId, start, model, data, plan, report);
      done = Number(start.iteration);
      rounds.push(result);
      report(`iteration ${done} is done: loss ${result.loss.toFixed(3)}, accuracy ${(100 * result.right).toFixed(1)} %`);
    } catch (error) {
      if (!(error instanceof Late)) throw error;
      report(`the round continues without this device: ${error.message}`);
    }
  }
}
