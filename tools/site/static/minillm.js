// The whole model in plain JavaScript: one text, one token at a time, as chapters 03 to 10 build it.
// C hidden size, H query heads, G key heads, D head size, S keys, V tokens; heads and positions lie
// side by side in one typed array. Sums are taken in 64 bits, what they come to is kept in 32.

// Every tensor of a safetensors file, widened to float32. The file is a length (8 bytes), a header
// with each tensor's type, shape and place, and the numbers. A bfloat16 is the upper half of a
// float32: to widen one is a shift.
// Python: safetensors.torch.load
export function readSafetensors(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const start = 8 + (bytes.length < 8 ? Infinity : Number(view.getBigUint64(0, true)));
  const cut = `the weights are cut short, or no safetensors file: ${bytes.length} bytes`;
  if (start > bytes.length) throw new Error(`${cut}, too few for the header`);
  const { __metadata__, ...header } = JSON.parse(new TextDecoder().decode(bytes.subarray(8, start)));
  const end = start + Math.max(0, ...Object.values(header).map((entry) => entry.data_offsets[1]));
  if (end > bytes.length) throw new Error(`${cut} of ${end}`);
  const tensors = new Map();
  for (const [name, { dtype, shape, data_offsets: [from, to] }] of Object.entries(header)) {
    const size = shape.reduce((a, b) => a * b, 1);
    if (dtype !== "BF16" || to - from !== 2 * size) {
      throw new Error(`${name}: ${to - from} bytes of ${dtype}, wanted ${2 * size} of BF16`);
    }
    const halves = new Uint16Array(bytes.slice(start + from, start + to).buffer);
    const wide = new Uint32Array(size);
    for (let i = 0; i < size; i++) wide[i] = halves[i] << 16;
    tensors.set(name, { shape, data: new Float32Array(wide.buffer) });
  }
  return tensors;
}

// Matrix times vector: (C), (N, C) -> (N). Four sums at a time, so that none waits for the last one.
// Python: torch.nn.functional.linear
export function linear(x, weight) {
  const C = x.length, y = new Float32Array(weight.length / C);
  for (let row = 0, w = 0; row < y.length; row++) {
    let a = 0, b = 0, c = 0, d = 0, i = 0;
    for (; i + 3 < C; i += 4, w += 4) {
      a += x[i] * weight[w];
      b += x[i + 1] * weight[w + 1];
      c += x[i + 2] * weight[w + 2];
      d += x[i + 3] * weight[w + 3];
    }
    for (; i < C; i++, w++) a += x[i] * weight[w]; // where C is no multiple of 4
    y[row] = a + b + c + d;
  }
  return y;
}

// Probabilities: the largest score is subtracted first, so that no power overflows.
export function softmax(scores) {
  const probs = new Float64Array(scores.length);
  let max = -Infinity, sum = 0;
  for (const score of scores) max = Math.max(max, score);
  for (let i = 0; i < probs.length; i++) sum += probs[i] = Math.exp(scores[i] - max);
  return probs.map((p) => p / sum);
}

// One query a head reads the S keys so far, its own the last; nothing comes later, so no mask.
// (H D), (S, G D), (S, G D) -> (H D)
export function attention(q, k, v, D, G) {
  const S = k.length / (G * D), y = new Float32Array(q.length), scores = new Float64Array(S);
  const repeats = q.length / (G * D), scale = D ** -0.5;
  for (let h = 0; h < G * repeats; h++) {
    const head = Math.floor(h / repeats) * D; // query head h reads with key head h // repeats
    for (let s = 0; s < S; s++) {
      let score = 0;
      for (let i = 0; i < D; i++) score += q[h * D + i] * k[s * G * D + head + i];
      scores[s] = score * scale;
    }
    const probs = softmax(scores);
    for (let s = 0; s < S; s++) {
      for (let i = 0; i < D; i++) y[h * D + i] += probs[s] * v[s * G * D + head + i];
    }
  }
  return y;
}

// How many positions each pair of numbers takes to turn by one radian: (D/2)
export function ropePeriods(D, base) {
  return Float32Array.from({ length: D / 2 }, (_, i) => base ** ((2 * i) / D));
}

// The rotation of one position: numbers i and i + D/2 of each head are a pair and turn together.
export class Rotation {
  constructor(angles) {
    Object.assign(this, { cos: angles.map(Math.cos), sin: angles.map(Math.sin) });
  }

  forward(x) {
    const half = this.cos.length, y = new Float32Array(x.length);
    for (let head = 0; head < x.length; head += 2 * half) {
      for (let i = 0; i < half; i++) {
        const a = x[head + i], b = x[head + half + i];
        y[head + i] = a * this.cos[i] - b * this.sin[i];
        y[head + half + i] = b * this.cos[i] + a * this.sin[i];
      }
    }
    return y;
  }
}

export class RotaryEmbedding {
  constructor(D, base) {
    this.inv_freq = ropePeriods(D, base).map((period) => 1 / period);
  }

  forward(position) {
    return new Rotation(this.inv_freq.map((frequency) => position * frequency));
  }
}

// Each vector divided by its root mean square, then scaled: (..., C) -> (..., C)
export class RMSNorm {
  constructor(weight, eps) {
    Object.assign(this, { weight, eps });
  }

  forward(x) {
    const C = this.weight.length, y = new Float32Array(x.length);
    for (let start = 0; start < x.length; start += C) {
      let squares = 0;
      for (let i = 0; i < C; i++) squares += x[start + i] ** 2;
      const scale = 1 / Math.sqrt(squares / C + this.eps);
      for (let i = 0; i < C; i++) y[start + i] = x[start + i] * scale * this.weight[i];
    }
    return y;
  }
}

// One layer's keys and values, a position after the other, in buffers that double when they are full.
// Python: CacheLayer
export class DynamicLayer {
  constructor(size, maxLength) {
    Object.assign(this, { size, maxLength, length: 0 });
    this.buffers = [new Float32Array(size), new Float32Array(size)];
  }

  // (G D), (G D): one more position -> (S, G D), (S, G D): all that are filled
  update(k, v) {
    if (this.length === this.maxLength) throw new Error(`the cache has ${this.maxLength} slots, all full`);
    const start = this.length++ * this.size, end = start + this.size;
    return [k, v].map((x, i) => {
      if (end > this.buffers[i].length) {
        const old = this.buffers[i];
        this.buffers[i] = new Float32Array(2 * old.length);
        this.buffers[i].set(old);
      }
      this.buffers[i].set(x, start);
      return this.buffers[i].subarray(0, end);
    });
  }
}

// As Qwen3 has it: Llama's, with a norm on the queries and keys of each head.
export class MultiHeadAttention {
  constructor(weights, prefix, c) {
    const C = c.hidden_size, D = c.head_dim, H = c.num_attention_heads, G = c.num_key_value_heads;
    Object.assign(this, { head_dim: D, num_kv_heads: G });
    this.q_proj = weights(`${prefix}q_proj.weight`, H * D, C);
    this.k_proj = weights(`${prefix}k_proj.weight`, G * D, C);
    this.v_proj = weights(`${prefix}v_proj.weight`, G * D, C);
    this.o_proj = weights(`${prefix}o_proj.weight`, C, H * D);
    this.q_norm = new RMSNorm(weights(`${prefix}q_norm.weight`, D), c.rms_norm_eps);
    this.k_norm = new RMSNorm(weights(`${prefix}k_norm.weight`, D), c.rms_norm_eps);
  }

  forward(x, rope, cache) {
    const q = rope.forward(this.q_norm.forward(linear(x, this.q_proj)));
    const k = rope.forward(this.k_norm.forward(linear(x, this.k_proj)));
    const [keys, values] = cache.update(k, linear(x, this.v_proj));
    return linear(attention(q, keys, values, this.head_dim, this.num_kv_heads), this.o_proj);
  }
}

// SwiGLU: hidden numbers, each multiplied by the SiLU of its gate.
export class GatedMLP {
  constructor(weights, prefix, c) {
    this.gate_proj = weights(`${prefix}gate_proj.weight`, c.intermediate_size, c.hidden_size);
    this.up_proj = weights(`${prefix}up_proj.weight`, c.intermediate_size, c.hidden_size);
    this.down_proj = weights(`${prefix}down_proj.weight`, c.hidden_size, c.intermediate_size);
  }

  forward(x) {
    const gate = linear(x, this.gate_proj), up = linear(x, this.up_proj);
    return linear(up.map((u, i) => (u * gate[i]) / (1 + Math.exp(-gate[i]))), this.down_proj);
  }
}

// Attention, then the feed-forward block, each on a normalised copy and added back.
export class DecoderLayer {
  constructor(weights, prefix, c) {
    const norm = (name) => new RMSNorm(weights(`${prefix}${name}.weight`, c.hidden_size), c.rms_norm_eps);
    this.input_layernorm = norm("input_layernorm");
    this.self_attn = new MultiHeadAttention(weights, `${prefix}self_attn.`, c);
    this.post_attention_layernorm = norm("post_attention_layernorm");
    this.mlp = new GatedMLP(weights, `${prefix}mlp.`, c);
  }

  forward(x, rope, cache) {
    const attended = this.self_attn.forward(this.input_layernorm.forward(x), rope, cache);
    const h = x.map((value, i) => value + attended[i]);
    const fed = this.mlp.forward(this.post_attention_layernorm.forward(h));
    return h.map((value, i) => value + fed[i]);
  }
}

// The embedding, the layers, a last norm: a token and its position -> (C)
export class Decoder {
  constructor(weights, c) {
    this.embed_tokens = weights("model.embed_tokens.weight", c.vocab_size, c.hidden_size);
    this.layers = Array.from({ length: c.num_hidden_layers }, (_, i) =>
      new DecoderLayer(weights, `model.layers.${i}.`, c));
    this.norm = new RMSNorm(weights("model.norm.weight", c.hidden_size), c.rms_norm_eps);
    this.rotary = new RotaryEmbedding(c.head_dim, c.rope_theta);
  }

  forward(id, position, cache) {
    const C = this.norm.weight.length, rope = this.rotary.forward(position);
    const x = this.embed_tokens.subarray(id * C, (id + 1) * C);
    return this.norm.forward(this.layers.reduce((h, layer, i) => layer.forward(h, rope, cache[i]), x));
  }
}

// The whole model: a token in, a score for every possible next token out.
export class CausalLM {
  constructor(config, tensors) {
    const kind = { model_type: "qwen3", hidden_act: "silu", tie_word_embeddings: true };
    for (const [name, value] of Object.entries({ ...kind, rope_scaling: null, attention_bias: false })) {
      if (config[name] !== value) throw new Error(`the config's ${name} must be ${value}, not ${config[name]}`);
    }
    for (const name of ["rope_theta", "rms_norm_eps", "max_position_embeddings"]) {
      if (!(config[name] > 0)) throw new Error(`the config's ${name} must be positive, not ${config[name]}`);
    }
    const weights = (name, ...shape) => {
      const found = tensors.get(name);
      if (`${found?.shape}` === `${shape}`) return found.data;
      throw new Error(`the config wants ${name} of shape (${shape}), the file has (${found?.shape})`);
    };
    Object.assign(this, { config, model: new Decoder(weights, config) });
  }

  // An empty cache: the text so far is forgotten.
  makeCache(maxLength = this.config.max_position_embeddings) {
    const size = this.config.num_key_value_heads * this.config.head_dim;
    return this.model.layers.map(() => new DynamicLayer(size, maxLength));
  }

  // Read one more token; the logits of the next: (V). Head and embedding are one matrix.
  forward(id, cache) {
    if (!(id >= 0 && id < this.config.vocab_size)) throw new Error(`no token has the id ${id}`);
    return linear(this.model.forward(id, cache[0].length, cache), this.model.embed_tokens);
  }
}
