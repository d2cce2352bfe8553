// The language of the stories: the package's own grammar file, compiled to nodes that read a text.
// A node's read(text, start, table) gives where reading arrived, the cards drawn so far, and the
// natural log-probability of what was read; or null, if the text does not begin so.

const SLOT =
  /\{(?<capital>\^?)(?<slot>\w+)(?::(?<pool>\w+)|\+(?<plus>\w+))?(?:\.(?<form>\w+))?\}|<(?<rule>\w+)>|\((?<inline>[^()]*)\)/g;

// A text that notes how far it was found to agree with what could stand there.
class Reader {
  constructor(text) {
    Object.assign(this, { text, far: 0 });
  }

  startsWith(value, start) {
    let same = 0;
    while (same < value.length && this.text[start + same] === value[same]) same++;
    this.far = Math.max(this.far, start + same);
    return same === value.length;
  }
}

// Words that are always the same, or, with a function, a card that was drawn before.
class Text {
  constructor(value) {
    this.value = typeof value === "string" ? () => value : value;
  }

  read(text, start, table) {
    const value = this.value(table);
    return text.startsWith(value, start) ? [start + value.length, table, 0] : null;
  }
}

// A slot filled now: any card of its pool that is not on the table, equally likely.
class Draw {
  constructor(slot, pool, others, printed) {
    Object.assign(this, { slot, pool, others, printed, logProb: -Math.log(pool.length - others.length) });
  }

  read(text, start, table) {
    for (const card of this.pool) {
      const value = this.printed(card);
      if (!this.others.some((other) => table[other] === card) && text.startsWith(value, start)) {
        return [start + value.length, { ...table, [this.slot]: card }, this.logProb];
      }
    }
    return null;
  }
}

// Nodes one after the other.
class Chain {
  constructor(nodes) {
    this.nodes = nodes;
  }

  read(text, start, table) {
    let total = 0;
    for (const node of this.nodes) {
      const found = node.read(text, start, table);
      if (!found) return null;
      [start, table] = found;
      total += found[2];
    }
    return [start, table, total];
  }
}

// Several ways to go on, each with a weight.
class Choice {
  constructor(weights, chains) {
    const sum = weights.reduce((a, b) => a + b);
    this.ways = chains.map((chain, i) => [Math.log(weights[i] / sum), chain]);
  }

  read(text, start, table) {
    for (const [logProb, chain] of this.ways) {
      const found = chain.read(text, start, table);
      if (found) return [found[0], found[1], logProb + found[2]];
    }
    return null;
  }
}

// The pools and rules of a grammar file.
function readNotation(source) {
  const pools = {}, rules = {};
  let forms = [], pool, rule;
  for (const line of source.split(/\r?\n/)) {
    const [, kind, rest] = line.match(/^(\S*) ?(.*)$/), way = line.match(/^([\d.]*)- (.*)/);
    if (!line.trim() || line.startsWith("#")) continue;
    if (kind === "pool") {
      const [name, columns = ""] = rest.split(":");
      [pool, forms] = [(pools[name] ??= []), columns.match(/\w+/g) ?? []];
    } else if (kind === "rule") rule = rules[rest.trim()] ??= [];
    else if (way) rule.push([Number(way[1] || 1), way[2].trim()]);
    else if (line.startsWith(" ")) rule.at(-1)[1] += ` ${line.trim()}`;
    else {
      const values = line.split("|").map((value) => value.trim());
      if (values.length !== forms.length) throw new Error(`the grammar's line ${line} has not ${forms.length} forms`);
      pool.push({ "": values[0], ...Object.fromEntries(forms.map((form, i) => [form, values[i]])) });
    }
  }
  return { pools, rules };
}

export class StoryLanguage {
  constructor(source) {
    Object.assign(this, readNotation(source));
    [this.root] = this.alternatives(this.rules.story, {});
  }

  // A template as nodes, given the slots filled before it (slot: pool); the slots filled after it.
  compile(template, before) {
    const nodes = [], slots = { ...before };
    let end = 0;
    for (const match of template.matchAll(SLOT)) {
      if (match.index > end) nodes.push(new Text(template.slice(end, match.index)));
      end = match.index + match[0].length;
      const { slot, rule, inline } = match.groups;
      if (slot) {
        nodes.push(this.mention(match.groups, slots));
        continue;
      }
      const ways = rule ? this.rules[rule] : inline.split("|").map((way) => [1, way]);
      const [node, after] = this.alternatives(ways, slots);
      nodes.push(node);
      for (const name of Object.keys(slots)) delete slots[name];
      Object.assign(slots, after);
    }
    if (end < template.length) nodes.push(new Text(template.slice(end)));
    return [new Chain(nodes), slots];
  }

  // A first mention {slot:pool}, which is noted in `slots`, or a later one, or a sum {a+b}.
  mention({ capital, slot, pool, plus, form = "" }, slots) {
    const shown = (value) => (capital ? value[0].toUpperCase() + value.slice(1) : value);
    if (pool) {
      const others = Object.keys(slots).filter((name) => slots[name] === pool);
      slots[slot] = pool;
      return new Draw(slot, this.pools[pool], others, (card) => shown(card[form]));
    }
    if (!plus) return new Text((table) => shown(table[slot][form]));
    const total = (table) => `${Number(table[slot].n) + Number(table[plus].n)}`;
    return new Text((table) => shown(this.pools.numbers.find((card) => card.n === total(table))[form]));
  }

  // Alternatives as one node; of the slots those stay known that all of them fill.
  alternatives(ways, slots) {
    const compiled = ways.map(([, way]) => this.compile(way, slots));
    if (compiled.length === 1) return compiled[0];
    const ends = compiled.map(([, end]) => end);
    const common = Object.entries(ends[0]).filter(([slot, pool]) => ends.every((end) => end[slot] === pool));
    return [new Choice(ways.map(([weight]) => weight), compiled.map(([chain]) => chain)), Object.fromEntries(common)];
  }

  // The natural log-probability of a whole story; -Infinity outside the language.
  score(text) {
    const found = this.root.read(new Reader(text), 0, {});
    return found && found[0] === text.length ? found[2] : -Infinity;
  }

  // The first word of a text that no story has there; "" if it ends too early, null for a story.
  firstWrong(text) {
    const reader = new Reader(text), found = this.root.read(reader, 0, {});
    if (found?.[0] === text.length) return null;
    if (found) return text.slice(found[0]).match(/\S+/)?.[0] ?? text.slice(found[0]);
    if (reader.far === text.length) return "";
    return text.slice(text.slice(0, reader.far).lastIndexOf(" ") + 1).split(" ")[0] || " ";
  }
}
