"""Graders of 08_roofline: intensities, the least time of a step, how many texts at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from minillm.exercises import check_table, check_values, exercise

INTENSITY = {
    "1 text, float32": 0.5,
    "1 text, bfloat16": 1,
    "8 texts, bfloat16": 8,
    "8 texts with prompts of 100 tokens, bfloat16": 800,
    "8 texts, weights in int8": 16,
}


def _slip(case: str, value: float) -> str | None:
    wanted = INTENSITY[case]
    slips = [
        (case.endswith("int8"), 8, "that is bfloat16, a number in int8 has one byte"),
        (True, wanted / 2, "a multiplication and an addition are two operations"),
        (True, 1 / wanted, "these are bytes for each operation"),
        (case.startswith("8 texts with"), 100, "all texts share one reading of the weights"),
        (case.startswith("8"), wanted / 8, "the matrix is fetched once for all texts"),
    ]
    return next((why for holds, slip, why in slips if holds and math.isclose(value, slip)), None)


@exercise(
    "08_roofline.1",
    "how often is each number fetched, and for how many multiplications and additions is it used?",
    "whatever shares one reading of the weights raises the intensity: texts, tokens, fewer bytes",
)
def _intensity(answer: Any) -> str | None:
    hints = dict.fromkeys(INTENSITY, "divide the operations of all texts by the bytes")
    return check_table(answer, INTENSITY, hints, _slip)


# weights, kept per token, operations per text, bandwidth, peak
CHIPS = (
    {"weights": 16e9, "kept": 131072, "operations": 16e9, "bandwidth": 3.35e12, "peak": 989e12},
    {"weights": 4e6, "kept": 2688, "operations": 4.3e6, "bandwidth": 10e9, "peak": 20e9},
)


def _least(texts: int, context: int, chip: dict[str, float]) -> float:
    fetched = chip["weights"] + texts * context * chip["kept"]
    return max(fetched / chip["bandwidth"], texts * chip["operations"] / chip["peak"])


@exercise(
    "08_roofline.2",
    "what must be fetched once, what for each text, and which of the two limits holds?",
    "the slower of reading and computing sets the pace; the weights count once per step",
)
def _step_seconds(answer: Callable[..., float]) -> str | None:
    for chip in CHIPS:
        for texts, context in ((1, 100), (16, 2000), (64, 10), (500, 1)):
            got = float(answer(texts, context, **chip))
            want = _least(texts, context, chip)
            case = f"texts = {texts}, context = {context}"
            weights, kept = chip["weights"], chip["kept"]
            reading = (weights + texts * context * kept) / chip["bandwidth"]
            computing = texts * chip["operations"] / chip["peak"]
            known = {
                reading + computing: "a chip reads and computes at the same time: the slower "
                "of the two counts, not the sum",
                reading: "here computing takes longer than reading",
                computing: "here reading takes longer than computing",
                texts * (weights + context * kept) / chip["bandwidth"]: "the weights are read "
                "once per step for all texts, not once per text",
                weights / chip["bandwidth"]: "the caches have to be read, too",
                max((weights + context * kept) / chip["bandwidth"], computing): "each text has "
                "a cache of its own",
                max((weights + texts * kept) / chip["bandwidth"], computing): "`kept` bytes are "
                "for one token, and each text has `context` of them",
            }
            slips = [(why, value) for value, why in known.items()]
            said = f"{want:.6g} seconds, not {got:.6g}"
            if why := check_values(got, want, slips, otherwise=said):
                return f"{case}: {why}"
    return None


@exercise(
    "08_roofline.3",
    "three things limit the number of texts: reading in time, computing in time, and memory",
    "with long texts memory and its speed decide, and arithmetic hardly ever",
)
def _most_texts(answer: Callable[..., int]) -> str | None:
    for chip in CHIPS:
        for limit, memory, context in (
            (0.02, 80e9, 2000),
            (0.02, 1e15, 2000),
            (0.02, 1e15, 1),
            (0.5, 80e9, 500),
            (0.5, 80e9, 100_000),
            (1e-5, 80e9, 2000),
            (10.0, 5e6, 100),
        ):
            got = answer(limit, memory, context, **chip)
            case = (
                f"limit {limit} s, {memory:g} bytes, {context} tokens, weights {chip['weights']:g}"
            )
            if got != int(got):
                return f"{case}: texts are counted whole, not {got}"
            room = (memory - chip["weights"]) / (context * chip["kept"])
            spare = limit * chip["bandwidth"] - chip["weights"]
            reading = spare / (context * chip["kept"])
            computing = limit * chip["peak"] / chip["operations"]
            want = max(0, math.floor(min(room, reading, computing)))
            free = memory / (context * chip["kept"])

            def most(*limits: float) -> int:
                return max(0, math.floor(min(limits)))

            slips = {
                f"{got} texts are one too many: round down": want + 1,
                "the weights lie in the same memory as the caches": most(free, reading, computing),
                f"{got} texts forget a limit: memory": most(reading, computing),
                f"{got} texts forget a limit: reading": most(room, computing),
                f"{got} texts forget a limit: computing": most(room, reading),
            }
            said = f"{want} texts, not {got}"
            if got < 0:
                said = f"not even one text fits; the answer is 0, not {got}"
            if why := check_values(got, want, slips, near=0, otherwise=said):
                return f"{case}: {why}"
    return None
