"""Wrong answers of 08_roofline: exercise, answer, words that its message holds."""

import math

INTENSITY = {
    "1 text, float32": 0.5,
    "1 text, bfloat16": 1,
    "8 texts, bfloat16": 8,
    "8 texts with prompts of 100 tokens, bfloat16": 800,
    "8 texts, weights in int8": 16,
}


def added(texts, context, *, weights, kept, operations, bandwidth, peak):
    return (weights + texts * context * kept) / bandwidth + texts * operations / peak


def faster(texts, context, *, weights, kept, operations, bandwidth, peak):
    return min((weights + texts * context * kept) / bandwidth, texts * operations / peak)


def weights_for_each(texts, context, *, weights, kept, operations, bandwidth, peak):
    return max(texts * (weights + context * kept) / bandwidth, texts * operations / peak)


def one_cache(texts, context, *, weights, kept, operations, bandwidth, peak):
    return max((weights + context * kept) / bandwidth, texts * operations / peak)


def only_reading(texts, context, *, weights, kept, operations, bandwidth, peak):
    return (weights + texts * context * kept) / bandwidth


def one_token(texts, context, *, weights, kept, operations, bandwidth, peak):
    return max((weights + texts * kept) / bandwidth, texts * operations / peak)


def limits(limit, memory, context, *, weights, kept, operations, bandwidth, peak):
    room = (memory - weights) / (context * kept)
    reading = (limit * bandwidth - weights) / (context * kept)
    return {"room": room, "reading": reading, "computing": limit * peak / operations}


def most_texts(*sizes, **chip):
    return max(0, math.floor(min(limits(*sizes, **chip).values())))


def without(name):
    def answer(*sizes, **chip):
        rest = {key: value for key, value in limits(*sizes, **chip).items() if key != name}
        return max(0, math.floor(min(rest.values())))

    return answer


def may_be_negative(*sizes, **chip):
    return math.floor(min(limits(*sizes, **chip).values()))


def weights_elsewhere(limit, memory, *sizes, **chip):
    return most_texts(limit, memory + chip["weights"], *sizes, **chip)


def rounded_up(*sizes, **chip):
    return max(0, math.ceil(min(limits(*sizes, **chip).values())))


PROMPTS = "8 texts with prompts of 100 tokens, bfloat16"

WRONG = [
    ("08_roofline.1", {**INTENSITY, "1 text, float32": 0.25}, "two operations"),
    ("08_roofline.1", {**INTENSITY, "1 text, float32": 2}, "bytes for each operation"),
    ("08_roofline.1", {**INTENSITY, "8 texts, bfloat16": 1}, "fetched once for all texts"),
    ("08_roofline.1", {**INTENSITY, PROMPTS: 100}, "share one reading"),
    ("08_roofline.1", {**INTENSITY, "8 texts, weights in int8": ...}, "not filled in yet"),
    ("08_roofline.1", {**INTENSITY, "8 texts, weights in int8": True}, "write a number"),
    ("08_roofline.1", {**INTENSITY, "8 texts, weights in int8": 8}, "has one byte"),
    ("08_roofline.1", {"1 text": 1}, "with the five cases"),
    ("08_roofline.2", added, "not the sum"),
    ("08_roofline.2", faster, "here reading takes longer"),
    ("08_roofline.2", weights_for_each, "once per step for all texts"),
    ("08_roofline.2", one_cache, "a cache of its own"),
    ("08_roofline.2", only_reading, "computing takes longer than reading"),
    ("08_roofline.2", one_token, "each text has `context` of them"),
    ("08_roofline.3", weights_elsewhere, "in the same memory"),
    ("08_roofline.3", without("room"), "forget a limit: memory"),
    ("08_roofline.3", without("reading"), "forget a limit: reading"),
    ("08_roofline.3", without("computing"), "forget a limit: computing"),
    ("08_roofline.3", may_be_negative, "the answer is 0"),
    ("08_roofline.3", rounded_up, "one too many"),
    ("08_roofline.3", lambda *s, **c: min(limits(*s, **c).values()), "counted whole"),
]
