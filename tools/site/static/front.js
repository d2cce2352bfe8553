// The live story of the front page: the button, the dials, the choice of the next token.

import { fetched, Model } from "./model.js";
import { bits, distribution, draw } from "./sampling.js";
import { StoryLanguage } from "./stories.js";

const CHOICES = 10;
const DIALS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.05, value: 1 }, (x) => (x ? x.toFixed(2) : "0: always the best")],
  ["topK", "Top-k", { min: 0, max: 50, step: 1, value: 0 }, (x) => (x ? `${x}` : "off")],
  ["topP", "Top-p", { min: 0.05, max: 1, step: 0.05, value: 1 }, (x) => (x < 1 ? x.toFixed(2) : "off")],
  ["minP", "Min-p", { min: 0, max: 0.5, step: 0.01, value: 0 }, (x) => (x ? x.toFixed(2) : "off")],
];

const percent = (p) => (p > 0 && p < 0.001 ? "< 0.1%" : `${(100 * p).toFixed(1)}%`);
const shade = (p) => Math.min(1, bits(Math.max(p, 1e-9)) / 8).toFixed(3);

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name in made && typeof value !== "string") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export class Live {
  constructor(model, language, section) {
    Object.assign(this, { model, language });
    this.story = section.querySelector("#story");
    this.note = section.querySelector("#story-note");
    this.status = section.querySelector("#status");
    this.panel = section.querySelector("#panel");
    this.settings = {};
    this.build();
  }

  build() {
    const dials = element("fieldset", {}, element("legend", {}, "Dials for the next token"));
    for (const [name, label, range, shown] of DIALS) {
      const input = element("input", { type: "range", id: `dial-${name}` });
      for (const [key, value] of Object.entries(range)) input.setAttribute(key, value);
      const output = element("span");
      const read = () => {
        this.settings[name] = Number(input.value);
        output.textContent = shown(this.settings[name]);
        input.setAttribute("aria-valuetext", output.textContent);
        if (this.logits) this.showChoices();
      };
      input.addEventListener("input", read);
      read();
      dials.append(element("label", {}, element("span", {}, label), input, output));
    }
    this.choices = element("ol", { class: "choices", "aria-label": "the most probable next tokens; choose one" });
    this.buttons = Array.from({ length: CHOICES }, () => {
      const button = element("button", { type: "button" },
        element("span", { class: "word" }), element("span", { class: "bar" }), element("span", { class: "share" }));
      button.addEventListener("click", () => this.guard(() => this.take(button.token)));
      this.choices.append(element("li", {}, button));
      return button;
    });
    this.rest = element("p", { class: "rest" });
    const button = (id, text, act) => {
      const made = element("button", { type: "button", id }, text);
      made.addEventListener("click", act);
      return made;
    };
    this.drawing = button("draw", "Draw the next token", () => this.guard(() => this.drawOne()));
    this.writing = button("write", "Write to the end", () => (this.running ? (this.running = false) : this.guard(() => this.write())));
    this.prompt = element("input", { type: "text", id: "prompt", placeholder: "Once upon a time", autocomplete: "off" });
    const form = element("form", { class: "begin" },
      element("label", { for: "prompt" }, "Begin with"), this.prompt, element("button", { type: "submit", id: "again" }, "Start again"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.guard(() => this.begin(this.prompt.value));
    });
    this.panel.replaceChildren(dials, this.choices, this.rest,
      element("p", { class: "acts" }, this.drawing, " ", this.writing), form);
  }

  // One thing at a time: a click while a step runs is not lost in the middle of it.
  async guard(act) {
    if (this.busy) return;
    this.busy = true;
    this.panel.setAttribute("aria-busy", "true");
    try {
      await act();
    } catch (error) {
      this.say(error.message);
    }
    this.busy = false;
    this.panel.removeAttribute("aria-busy");
  }

  say(text) {
    this.status.textContent = text;
  }

  begin(text = "") {
    const ids = this.model.tokenizer.encode(text, { begin: false });
    if (ids.length > this.model.slots - 1) throw new Error(`the text has ${ids.length} tokens, room is for ${this.model.slots - 1}`);
    this.model.restart();
    Object.assign(this, { ids: [], probs: [], over: false });
    this.logits = this.model.step(this.model.begin);
    for (const id of ids) this.read(id);
    this.show();
    const wrong = text && this.language.firstWrong(text);
    this.say(!text ? "A new story. Draw, or choose a token."
      : !wrong ? "Begun with your text."
      : `Begun with your text. No story begins like this: “${wrong}” is the first word that none has there. ` +
        "The model has read such stories and nothing else, so what follows may be no story, or no words at all.");
  }

  // Append a token, whose price is what the model itself gave it, whatever the dials say.
  read(id) {
    this.probs.push(distribution(this.logits)[id]);
    this.ids.push(id);
    this.over = id === this.model.end || this.model.position >= this.model.slots;
    if (!this.over) this.logits = this.model.step(id);
  }

  take(id) {
    if (this.over) return;
    this.read(id);
    this.show();
    this.say(this.over ? "The story is over." : `${this.name(id)}, probability ${this.probs.at(-1).toFixed(3)}`);
  }

  drawOne() {
    if (!this.over) this.take(draw(distribution(this.logits, this.settings), Math.random()));
  }

  // To the end of the story; of one that is over, another from its beginning.
  async write() {
    if (this.over) this.begin();
    this.running = true;
    this.showActs();
    while (!this.over && this.running) {
      this.read(draw(distribution(this.logits, this.settings), Math.random()));
      this.show();
      await new Promise((done) => setTimeout(done)); // the page stays alive
    }
    this.running = false;
    this.showActs();
    this.say(this.over ? "The story is over." : "Stopped.");
  }

  name(id) {
    if (id === this.model.end) return "∎ (end of the story)";
    return this.model.tokenizer.decode([id]).replaceAll(" ", "␣").replaceAll("\n", "↵");
  }

  // A token's bytes may end inside a character; its span then waits for the rest.
  show() {
    const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    this.story.replaceChildren(...this.ids.map((id, i) => {
      const text = id === this.model.end ? "∎" : decoder.decode(this.model.tokenizer.bytesOf(id), { stream: true });
      const p = this.probs[i];
      return element("span", { style: `--s:${shade(p)}`, title: `probability ${p.toFixed(3)}` }, text);
    }));
    this.note.textContent = this.price();
    this.showChoices();
  }

  // What the text cost the model; of one that is over also whether it is valid, and its own floor.
  price() {
    const text = this.model.tokenizer.decode(this.ids), bytes = new TextEncoder().encode(text).length;
    if (!bytes) return "Nothing is written yet. The redder a token, the less probable the model found it.";
    const total = this.probs.reduce((sum, p) => sum + bits(p), 0), perByte = (x) => (x / bytes).toFixed(4);
    const cost = `cost the model ${perByte(total)} bits a byte`;
    if (!this.over) return `${this.ids.length} tokens, ${bytes} bytes. They ${cost} so far.`;
    const wrong = this.language.firstWrong(text);
    if (wrong === null) {
      const floor = -this.language.score(text) / Math.LN2;
      const luck = total < floor ? " (Less, by luck: on average no model can pay less.)" : "";
      return `Valid to the last word. The story ${cost}. Its own floor, what a perfect model would have paid for it, is ${perByte(floor)}.${luck}`;
    }
    const fault = wrong ? `the first word that cannot stand there is “${wrong}”` : "it ends too early";
    return `Not valid: ${fault}. The text ${cost}. It has no floor, for no story of the language is this one.`;
  }

  // What the buttons do now; after the end there is no next token to choose.
  showActs() {
    this.writing.textContent = this.running ? "Stop" : this.over ? "Tell another" : "Write to the end";
    this.drawing.disabled = this.choices.hidden = this.rest.hidden = this.over;
  }

  showChoices() {
    const own = distribution(this.logits), now = distribution(this.logits, this.settings);
    const best = [...own.keys()].sort((a, b) => own[b] - own[a]).slice(0, CHOICES);
    best.forEach((id, i) => {
      const button = this.buttons[i], [word, bar, share] = button.children;
      button.token = id;
      word.textContent = this.name(id);
      share.textContent = percent(now[id]);
      bar.style.setProperty("--now", now[id]);
      bar.style.setProperty("--own", own[id]);
      button.setAttribute("aria-label", `${this.name(id)}, ${percent(now[id])}; without the dials ${percent(own[id])}`);
      button.classList.toggle("cut", now[id] === 0);
    });
    const others = now.reduce((sum, p) => sum + p, 0) - best.reduce((sum, id) => sum + now[id], 0);
    this.rest.textContent = `The other ${own.length - CHOICES} tokens together: ${percent(Math.max(0, others))}. The thin line is the model's own probability, without the dials.`;
    this.showActs();
  }
}

const LACKS = "this browser is too old for it (String.toWellFormed and readable streams are wanted)";

async function loadLive(section) {
  const button = section.querySelector("#load"), status = section.querySelector("#status");
  const progress = element("progress", { max: 1, value: 0, "aria-label": "loading the model" });
  button.disabled = true;
  status.textContent = `Loading ${section.dataset.size} …`;
  button.after(progress);
  let come = 0;
  try {
    if (!("".toWellFormed && window.ReadableStream)) throw new Error(LACKS);
    const base = new URL(section.dataset.base, document.baseURI);
    const heard = (bytes) => {
      come += bytes;
      progress.value = come / (1e6 * parseFloat(section.dataset.size));
    };
    const [model, grammar] = await Promise.all([Model.load(base, heard), fetched(new URL("en.txt", base).href, heard)]);
    const live = new Live(model, new StoryLanguage(new TextDecoder().decode(grammar)), section);
    live.begin();
    button.hidden = true;
    live.panel.hidden = false;
    live.writing.focus();
    section.live = live;
    live.guard(() => live.write());
  } catch (error) {
    button.disabled = false;
    status.textContent = `The live model cannot run here: ${error.message}. The recorded story stays.`;
  }
  progress.remove();
}

const section = document.querySelector("#live");
section?.querySelector("#load").addEventListener("click", () => loadLive(section));
