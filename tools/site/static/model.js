// The shipped model in the browser: onnxruntime-web on one thread, one token in, logits out.

import { Tokenizer } from "./tokenizer.js";

async function fetched(address, onBytes) {
  const answer = await fetch(address);
  if (!answer.ok) throw new Error(`${address.split("/").pop()} could not be loaded (${answer.status})`);
  const pieces = [];
  let length = 0;
  for (const reader = answer.body.getReader(); ;) {
    const { done, value } = await reader.read();
    if (done) break;
    pieces.push(value);
    length += value.length;
    onBytes(value.length);
  }
  const whole = new Uint8Array(length);
  let at = 0;
  for (const piece of pieces) {
    whole.set(piece, at);
    at += piece.length;
  }
  return whole;
}

export class Model {
  // Everything from `base`, a folder of this site; `onBytes` hears how much has come.
  static async load(base, onBytes = () => {}) {
    if (typeof WebAssembly !== "object") throw new Error("this browser has no WebAssembly");
    const at = (name) => new URL(name, base).href;
    const [wasm, weights, facts, tokenizer] = await Promise.all(
      ["ort-wasm-simd-threaded.wasm", "model.onnx", "model.json", "tokenizer.json"].map((name) =>
        fetched(at(name), onBytes)));
    const json = (bytes) => JSON.parse(new TextDecoder().decode(bytes));
    const ort = await import(at("ort.wasm.min.mjs"));
    ort.env.wasm.numThreads = 1; // more need headers that a plain server does not send
    ort.env.wasm.wasmBinary = wasm;
    ort.env.wasm.wasmPaths = { mjs: at("ort-wasm-simd-threaded.mjs") };
    const session = await ort.InferenceSession.create(weights, { executionProviders: ["wasm"] });
    return new Model(ort, session, json(facts), new Tokenizer(json(tokenizer)));
  }

  constructor(ort, session, facts, tokenizer) {
    Object.assign(this, { ort, session, facts, tokenizer, slots: facts.cache[3] });
    this.restart();
  }

  // An empty cache: the text so far is forgotten.
  restart() {
    const size = this.facts.cache.reduce((a, b) => a * b, 1);
    const zeros = () => new this.ort.Tensor("float32", new Float32Array(size), this.facts.cache);
    Object.assign(this, { position: 0, keys: zeros(), values: zeros() });
  }

  // Read one more token; the logits of the next.
  async step(id) {
    if (this.position >= this.slots) throw new Error(`the cache has ${this.slots} slots, all full`);
    const whole = (number, shape) =>
      new this.ort.Tensor("int64", BigInt64Array.of(BigInt(number)), shape);
    const { logits, new_keys, new_values } = await this.session.run({
      input_ids: whole(id, [1, 1]),
      position: whole(this.position, [1]),
      keys: this.keys,
      values: this.values,
    });
    Object.assign(this, { position: this.position + 1, keys: new_keys, values: new_values });
    return logits.data;
  }
}
