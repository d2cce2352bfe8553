// The distribution that is drawn from, as chapter 09 computes it: temperature, then top-k, top-p,
// min-p, then the softmax. Temperature 0 is greedy.

import { softmax } from "./minillm.js";

// Probabilities after the dials; `topK` 0 and `topP` 1 and `minP` 0 cut nothing.
// Python: Sampler.probabilities
export function distribution(logits, { temperature = 1, topK = 0, topP = 1, minP = 0 } = {}) {
  const order = [...logits.keys()].sort((a, b) => logits[b] - logits[a] || a - b);
  const result = new Float64Array(logits.length);
  if (temperature === 0) {
    result[order[0]] = 1; // the best token has it all
    return result;
  }
  let kept = topK > 0 ? order.slice(0, topK) : order;
  const shares = softmax(kept.map((id) => logits[id] / temperature));
  let before = 0, count = 0; // what the tokens before this one have together
  while (count < kept.length && (topP === 1 || before < topP)) before += shares[count++];
  kept = kept.slice(0, count);
  if (minP > 0) {
    const least = logits[order[0]] / temperature + Math.log(minP);
    kept = kept.filter((id) => logits[id] / temperature >= least);
  }
  const final = softmax(kept.map((id) => logits[id] / temperature));
  kept.forEach((id, i) => { result[id] = final[i]; });
  return result;
}

// The first token at which the sum of probabilities exceeds u in [0, 1).
export function draw(probabilities, u) {
  let sum = 0, last = 0;
  for (let id = 0; id < probabilities.length; id++) {
    if (probabilities[id] > 0) last = id;
    sum += probabilities[id];
    if (u < sum) return id;
  }
  return last;
}

export const bits = (p) => -Math.log2(p);
