// The course's byte-pair tokenizer (chapter 02) in plain JavaScript: text to ids and back, equal to
// the package's for a tokenizer.json that the course has saved (ids are ranks).

// White space as Unicode and the package have it; JavaScript's \s is another set.
const SPACE = "\\t-\\r \\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000";
const FOLDS = { s: "\u017f", k: "\u212a" }; // letters that equal s and k but for case

// The pattern that cuts a text into words, in JavaScript's own dialect.
// Python: regex.compile
function toJavaScript(pattern) {
  const anyCase = pattern.replace(/\(\?i:([^)]*)\)/g, (_, body) =>
    `(?:${body.replace(/[a-z]/g, (c) => `[${c}${c.toUpperCase()}${FOLDS[c] ?? ""}]`)})`);
  let source = "", inClass = false;
  for (let i = 0; i < anyCase.length; i++) {
    const two = anyCase.slice(i, i + 2);
    if (two === "\\s" || two === "\\S") {
      if (inClass && two === "\\S") throw new Error("a class with \\S in it is not known here");
      source += inClass ? SPACE : two === "\\s" ? `[${SPACE}]` : `[^${SPACE}]`;
      i++;
    } else if (two[0] === "\\") {
      source += two;
      i++;
    } else {
      if (two[0] === "[") inClass = true;
      if (two[0] === "]") inClass = false;
      source += two[0];
    }
  }
  return new RegExp(source, "gu");
}

// GPT-2's letters for the 256 bytes, in which tokenizer.json writes its tokens.
function bytesToUnicode() {
  const letters = new Array(256);
  let next = 256;
  for (let byte = 0; byte < 256; byte++) {
    const shown = (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
    letters[byte] = String.fromCodePoint(shown ? byte : next++);
  }
  return letters;
}

// Python: BPETokenizer
export class Tokenizer {
  constructor(json) {
    const split = json.pre_tokenizer.pretokenizers.find((part) => part.type === "Split");
    this.words = toJavaScript(split.pattern.Regex);
    this.letters = bytesToUnicode();
    this.bytes = new Map(this.letters.map((letter, byte) => [letter, byte]));
    this.special = new Map(json.added_tokens.map((token) => [token.content, token.id]));
    this.ranks = new Map(Object.entries(json.model.vocab).filter(([token]) => !this.special.has(token)));
    this.tokens = new Map([...this.ranks].map(([token, id]) => [id, token]));
    const first = json.post_processor?.single?.[0]?.SpecialToken?.id;
    this.begin = first === undefined ? null : this.special.get(first);
    this.memo = new Map();
  }

  // Ids of a text, the begin token first. An error if the text spells a special token.
  encode(text, { begin = true } = {}) {
    for (const name of this.special.keys()) {
      if (text.includes(name)) throw new Error(`the text spells the special token ${name}`);
    }
    const ids = begin && this.begin !== null ? [this.begin] : [];
    for (const [word] of text.toWellFormed().matchAll(this.words)) {
      if (!this.memo.has(word)) this.memo.set(word, this.encodeWord(word));
      ids.push(...this.memo.get(word));
    }
    return ids;
  }

  // Merge the neighbours whose union has the lowest rank, leftmost first, while there are any.
  encodeWord(word) {
    const parts = [...new TextEncoder().encode(word)].map((byte) => this.letters[byte]);
    for (;;) {
      let best = -1, lowest = Infinity;
      for (let i = 0; i + 1 < parts.length; i++) {
        const rank = this.ranks.get(parts[i] + parts[i + 1]) ?? Infinity;
        if (rank < lowest) [best, lowest] = [i, rank];
      }
      if (best < 0) return parts.map((part) => this.ranks.get(part));
      parts.splice(best, 2, parts[best] + parts[best + 1]);
    }
  }

  // The bytes of one id; none for a special token.
  bytesOf(id) {
    return Uint8Array.from([...(this.tokens.get(id) ?? "")].map((letter) => this.bytes.get(letter)));
  }

  decode(ids) {
    return new TextDecoder("utf-8", { ignoreBOM: true }).decode(Uint8Array.from(ids.flatMap((id) => [...this.bytesOf(id)])));
  }
}
