"""The graders of 08_roofline accept right answers and say what is wrong with wrong ones."""

import math

from minillm.exercises import grade

INTENSITY = {
    "1 text, float32": 0.5,
    "1 text, bfloat16": 1,
    "8 texts, bfloat16": 8,
    "8 texts with prompts of 100 tokens, bfloat16": 800,
    "8 texts, weights in int8": 16,
}


def step_seconds(texts, context, *, weights, kept, operations, bandwidth, peak):
    return max((weights + texts * context * kept) / bandwidth, texts * operations / peak)


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


def bisected(limit, memory, context, **chip):
    """Right, in another way: halve the interval."""
    low, high = 0, 10**15
    while low < high:
        middle = (low + high + 1) // 2
        room = chip["weights"] + middle * context * chip["kept"]
        fits = room <= memory and step_seconds(middle, context, **chip) <= limit
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


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


ONE, TWO, THREE = (f"08_roofline.{number}" for number in (1, 2, 3))
RIGHT = {ONE: INTENSITY, TWO: step_seconds, THREE: most_texts}
PROMPTS = "8 texts with prompts of 100 tokens, bfloat16"
WRONG = [
    (ONE, {**INTENSITY, "1 text, float32": 0.25}, "two operations"),
    (ONE, {**INTENSITY, "1 text, float32": 2}, "bytes for each operation"),
    (ONE, {**INTENSITY, "8 texts, bfloat16": 1}, "fetched once for all texts"),
    (ONE, {**INTENSITY, PROMPTS: 100}, "share one reading"),
    (ONE, {**INTENSITY, "8 texts, weights in int8": ...}, "not filled in yet"),
    (ONE, {**INTENSITY, "8 texts, weights in int8": True}, "write a number"),
    (ONE, {**INTENSITY, "8 texts, weights in int8": 8}, "has one byte"),
    (ONE, {"1 text": 1}, "with the 5 questions"),
    (TWO, added, "not the sum"),
    (TWO, faster, "here reading takes longer"),
    (TWO, weights_for_each, "once per step for all texts"),
    (TWO, one_cache, "a cache of its own"),
    (TWO, only_reading, "computing takes longer than reading"),
    (TWO, one_token, "each text has `context` of them"),
    (THREE, weights_elsewhere, "in the same memory"),
    (THREE, without("room"), "forget a limit: memory"),
    (THREE, without("reading"), "forget a limit: reading"),
    (THREE, without("computing"), "forget a limit: computing"),
    (THREE, may_be_negative, "the answer is 0"),
    (THREE, rounded_up, "one too many"),
    (THREE, lambda *s, **c: min(limits(*s, **c).values()), "counted whole"),
]


def test_other_right_answers():
    assert grade(THREE, bisected).status == "correct", grade(THREE, bisected).message


def test_a_dictionary_of_dots_is_unsolved():
    assert grade(ONE, dict.fromkeys(INTENSITY, ...)).status == "unsolved"
