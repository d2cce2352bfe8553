// The shipped model on the page: its three files fetched, then one token in, logits out.

import { CausalLM, readSafetensors } from "./minillm.js";
import { Tokenizer } from "./tokenizer.js";

export async function fetched(address, onBytes) {
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
  // Everything from `base`, a folder as the course saves models; `onBytes` hears how much has come.
  static async load(base, onBytes = () => {}) {
    try {
      const [config, weights, tokenizer] = await Promise.all(
        ["config.json", "model.safetensors", "tokenizer.json"].map((name) =>
          fetched(new URL(name, base).href, onBytes)));
      const json = (bytes) => JSON.parse(new TextDecoder().decode(bytes));
      return new Model(new CausalLM(json(config), readSafetensors(weights)), new Tokenizer(json(tokenizer)));
    } catch (error) {
      if (!(error instanceof RangeError)) throw error;
      throw new Error("this browser has no room for arrays of the model's size", { cause: error });
    }
  }

  constructor(model, tokenizer) {
    const { bos_token_id: begin, eos_token_id: end, max_position_embeddings: slots } = model.config;
    Object.assign(this, { model, tokenizer, begin, end, slots });
    this.restart();
  }

  // An empty cache: the text so far is forgotten.
  restart() {
    this.cache = this.model.makeCache(this.slots);
  }

  get position() {
    return this.cache[0].length;
  }

  // Read one more token; the logits of the next.
  step(id) {
    return this.model.forward(id, this.cache);
  }
}
