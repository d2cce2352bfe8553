// Two figures that move, beside the static ones: the causal mask (03), softmax and temperature (09).

import { softmax } from "./minillm.js";

// May query t read key s? T queries and S keys, aligned at the end; window null: no limit.
export function mask(T, S, window = null) {
  return Array.from({ length: T }, (_, t) => Array.from({ length: S }, (_, s) => {
    const position = t + S - T;
    return s <= position && (window === null || s > position - window);
  }));
}

// Shares of the likely tokens at temperature t, and of all `others` together, which share `rest`.
export function heated({ likely, others, rest }, t) {
  const logits = [...Object.values(likely), ...new Array(others).fill(rest / others)].map(Math.log);
  const shares = [...softmax(logits.map((x) => x / t))];
  const few = Object.keys(likely).length;
  return [...shares.slice(0, few), shares.slice(few).reduce((a, b) => a + b, 0)];
}

let dials = 0;

function dial(label, min, max, step, value, change) {
  const row = document.createElement("label");
  const id = `moving-${dials++}`;
  row.innerHTML = `<span>${label}</span><input type="range" id="${id}"><output for="${id}"></output>`;
  const input = row.querySelector("input");
  Object.assign(input, { min, max, step, value });
  input.addEventListener("input", change);
  return { row, input, output: row.querySelector("output"), get value() { return Number(input.value); } };
}

const WORDS = ["Ben", "fox", "Ada", "owl", "Mia", "cat", "Ben", "fox"];

function maskFigure(place) {
  const N = WORDS.length;
  const show = () => {
    if (queries.value > keys.value) queries.input.value = keys.value;
    const T = queries.value, S = keys.value, w = window_.value < N ? window_.value : null;
    keys.output.textContent = S;
    queries.output.textContent = T;
    window_.output.textContent = w ?? "off";
    const rows = mask(T, S, w);
    const head = WORDS.slice(0, S).map((word, s) => `<th scope="col">${word}<br>${s}</th>`).join("");
    table.innerHTML = `<caption>${T} queries, ${S} keys: a filled cell may be read</caption>` +
      `<tr><td></td>${head}</tr>` + rows.map((row, t) => `<tr><th scope="row">${WORDS[t + S - T]} ${t + S - T}</th>` +
        row.map((may) => `<td class="${may ? "may" : "not"}"><span class="hear">${may ? "reads" : "no"}</span></td>`).join("") + "</tr>").join("");
    const count = rows.at(-1).filter(Boolean).length;
    said.textContent = `The last query stands at position ${S - 1} and reads ${count} of ${S} keys; ` +
      `the first at position ${S - T} and reads ${rows[0].filter(Boolean).length}.`;
  };
  const keys = dial("Keys S", 1, N, 1, 7, show), queries = dial("Queries T", 1, N, 1, 7, show);
  const window_ = dial("Window", 1, N, 1, N, show);
  const table = document.createElement("table"), said = document.createElement("p");
  place.append("Move it: fewer queries than keys, as when a text is continued, or a window.",
    keys.row, queries.row, window_.row, table, said);
  show();
}

function temperatureFigure(place, data) {
  const names = [...Object.keys(data.likely).map((word) => word.trim()), `${data.others.toLocaleString("en")} others`];
  const list = document.createElement("ul");
  list.innerHTML = names.map((name) => `<li><span class="word">${name}</span><span class="bar"></span><span class="share"></span></li>`).join("");
  const show = () => {
    heat.output.textContent = heat.value.toFixed(2);
    heated(data, heat.value).forEach((share, i) => {
      list.children[i].children[1].style.setProperty("--now", share);
      list.children[i].children[2].textContent = share.toFixed(3);
    });
  };
  const heat = dial("Temperature t", 0.1, 4, 0.05, 1, show);
  place.append("Move it: softmax of the logits divided by t.", heat.row, list);
  show();
}

for (const [name, draw] of [["mask", maskFigure], ["temperature", temperatureFigure]]) {
  for (const place of document.querySelectorAll(`.figure-${name}`)) {
    draw(place, JSON.parse(place.querySelector("script").textContent));
  }
}
