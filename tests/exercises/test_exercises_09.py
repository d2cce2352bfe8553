"""Planted wrong answers of notebook 09, each with the sentence that it must earn."""

import math

import torch

from minillm.exercises.sampling import PREDICTIONS


def keep(probs, p, crossing=True):
    order = sorted(range(len(probs)), key=lambda i: -probs[i])
    kept, mass = [], 0.0
    for i in order:
        if mass + probs[i] > p and not crossing:
            break
        kept.append(i)
        mass += probs[i]
        if mass >= p - 1e-9:
            break
    return kept


def next_token(
    probs, t, p, u, *, power=None, crossing=True, cut=True, scale=True, best=False, cold=False
):
    exponent = 1 / t if power is None else power(t)
    if cold:  # cut first
        kept = keep(probs, p)
        probs = [q if i in kept else 0.0 for i, q in enumerate(probs)]
    probs = [q**exponent for q in probs]
    probs = [q / sum(probs) for q in probs]
    if not cold:
        kept = keep(probs, p, crossing) if cut else range(len(probs))
    if not kept:
        kept = [max(range(len(probs)), key=lambda i: probs[i])]
    kept = kept if best else sorted(kept)
    total, reached = sum(probs[i] for i in kept) if scale else 1, 0.0
    for i in kept:
        reached += probs[i]
        if reached > u * total:
            return i
    return kept[-1]


def softmax_of_probabilities(probs, t, p, u):
    shaped = [math.exp(q / t) for q in probs]
    return next_token([q / sum(shaped) for q in shaped], 1.0, p, u)


def from_zero_on(probs, t, p, u):
    """Lets the cut tokens stand in the list, and takes the first whose sum is *at least* u."""
    shaped = [q ** (1 / t) for q in probs]
    shaped = [q / sum(shaped) for q in shaped]
    kept, reached = keep(shaped, p), 0.0
    total = sum(shaped[i] for i in kept)
    for i in range(len(shaped)):
        reached += shaped[i] if i in kept else 0.0
        if reached >= u * total:
            return i
    return max(kept)


def next_token_with_torch(probs, t, p, u):
    shaped = (torch.tensor(probs, dtype=torch.float64).log() / t).softmax(0)
    best, ids = shaped.sort(descending=True, stable=True)
    left = torch.zeros_like(shaped)
    kept = ids[best.cumsum(0) - best < p - 1e-9]
    left[kept] = shaped[kept]
    return (left.cumsum(0) <= u * left.sum()).sum()


def changed(predictions=None, **changes):
    """The right predictions, but for some; `k3=4` changes "... top_k = 3"."""
    short = dict(zip(["p75", "p76", "k3", "m", "mt", "k2", "t", "hot"], PREDICTIONS, strict=True))
    right = {key: value for key, (value, _) in PREDICTIONS.items()}
    return {**right, **{short[key]: value for key, value in changes.items()}}


def write_batch(
    next_logits, sampler, count, end, max_new, *, named=True, remove=False, guard=True, run_on=False
):
    rows, live = [[] for _ in range(count)], list(range(count))
    for _ in range(max_new):
        if guard and not live:
            break
        logits = torch.stack([next_logits(rows[row]) for row in live])
        ids = sampler(logits, rows=live) if named else sampler(logits)
        for row, token in zip(live, ids.tolist()):  # noqa: B905
            rows[row].append(token)
            if remove and token == end:
                live.remove(row)
        if not remove and not run_on:
            live = [row for row in live if rows[row][-1] != end]
    return rows


def one_by_one(next_logits, sampler, count, end, max_new):
    rows = []
    for row in range(count):
        ids = []
        while len(ids) < max_new and (not ids or ids[-1] != end):
            ids.append(int(sampler(next_logits(ids)[None], rows=[row])))
        rows.append(ids)
    return rows


def typical_log_of_zero(probs, mass):
    return typical([math.exp(math.log(p)) for p in probs], mass)


def typical(probs, mass):
    entropy = -sum(p * math.log(p) for p in probs if p)
    possible = [i for i, p in enumerate(probs) if p]
    far = sorted(possible, key=lambda i: abs(-math.log(probs[i]) - entropy))
    while sum(probs[i] for i in far[:-1]) >= mass:
        far.pop()
    return sorted(far)


def unsorted(probs, mass):
    return sorted(typical(probs, mass), key=lambda i: -probs[i])


def in_pieces(pieces, stop):
    text = ""
    for piece in pieces:
        if stop in piece:
            return text + piece.partition(stop)[0]
        text += piece
    return text


RIGHT = {
    "09.1": next_token,
    "09.2": changed(),
    "09.3": write_batch,
    "09.4": lambda pieces, stop: "".join(pieces).partition(stop)[0],
    "09.5": typical,
}


def log_of_zero(probs, t, p, u):
    shaped = [math.exp(math.log(q) / t) for q in probs]
    return next_token([q / sum(shaped) for q in shaped], 1.0, p, u)


def all_equal(probs, t, p, u):
    """Keeps all that are as probable as the last one kept."""
    shaped = [q ** (1 / t) for q in probs]
    least = min(shaped[i] for i in keep([q / sum(shaped) for q in shaped], p))
    return next_token([q if q >= least else 0.0 for q in shaped], 1.0, 1.0, u)


def beyond(probs, t, p, u):
    """What is left is not rescaled; where u lies beyond, the last token of the list."""
    shaped = [q ** (1 / t) for q in probs]
    shaped = [q / sum(shaped) for q in shaped]
    kept, reached = keep(shaped, p), 0.0
    for i in sorted(kept):
        reached += shaped[i]
        if reached > u:
            return i
    return len(probs) - 1


def in_list_order(probs, t, p, u):
    shaped = [q ** (1 / t) for q in probs]
    shaped = [q / sum(shaped) for q in shaped]
    left = [q if sum(shaped[:i]) < p - 1e-9 else 0.0 for i, q in enumerate(shaped)]
    return next_token(left, 1.0, 1.0, u)


def two_neighbours(pieces, stop):
    """Joins a piece with the one before it, and no more."""
    for i in range(len(pieces)):
        for j in (0, 1):
            text = "".join(pieces[i - j : i + 1]) if i >= j else ""
            if stop in text:
                return "".join(pieces[: i - j]) + text.partition(stop)[0]
    return "".join(pieces)


def last_in_the_text_so_far(pieces, stop):
    text = ""
    for piece in pieces:
        text += piece
        if stop in text:
            return text[: text.rfind(stop)]
    return text


def using(**options):
    return lambda *args: next_token(*args, **options)


WRONG = [
    ("09.1", using(power=lambda t: t), "wrong way round"),
    ("09.1", using(power=lambda t: 1), "changes nothing"),
    ("09.1", softmax_of_probabilities, "softmax takes logits"),
    ("09.1", using(cut=False), "nothing is cut"),
    ("09.1", using(crossing=False), "belongs to what is kept"),
    ("09.1", using(scale=False), "sums to less than 1"),
    ("09.1", using(best=True), "in the order of the list"),
    ("09.1", using(cold=True), "the temperature comes first"),
    ("09.1", from_zero_on, "u = 0: token 0 has been cut"),
    ("09.1", lambda probs, t, p, u: 0, "I expected"),
    ("09.1", lambda probs, t, p, u: 5, "there is no token 5"),
    ("09.1", lambda probs, t, p, u: probs[0], "a whole number"),
    ("09.1", log_of_zero, "raised ValueError"),
    ("09.1", all_equal, "two tokens tie at the border"),
    ("09.1", beyond, "sums to less than 1"),
    ("09.1", in_list_order, "not in the order of the list"),
    ("09.2", changed(p75=3), "the first two have together"),
    ("09.2", changed(p76=2), "right so far: 7 of 8"),
    ("09.2", changed(k3=4), "exactly k are kept"),
    ("09.2", changed(mt=2), "its square root"),
    ("09.2", changed(k2=0.5), "must sum to 1"),
    ("09.2", changed(t=0.25), "divide by their sum"),
    ("09.2", changed(hot=...), "not filled in yet"),
    ("09.2", changed(m="two"), "write a number"),
    ("09.3", lambda *args: write_batch(*args, named=False), "which row is it?"),
    ("09.3", lambda *args: write_batch(*args, remove=True), "while a loop runs over it"),
    (
        "09.3",
        lambda *args: write_batch(*args, named=False, remove=True),
        "two mistakes are left",
    ),
    ("09.3", lambda *args: [row[:-1] for row in write_batch(*args)], "written alone it is"),
    ("09.3", lambda *args: write_batch(*args, guard=False), "nothing left to stack"),
    ("09.3", lambda *args: write_batch(*args, run_on=True), "goes on after its end token"),
    ("09.3", lambda *args: write_batch(*args)[:-1], "you return"),
    ("09.3", lambda *args: write_batch(*args[:-1], args[-1] + 1), "has 2 ids, max_new is 1"),
    ("09.3", lambda *args: write_batch(*args[:-1], max(1, args[-1] - 1)), "max_new is 5"),
    ("09.3", lambda *args: write_batch(*args[:-1], 10_000), "max_new is 1"),
    ("09.4", lambda pieces, stop: "".join(pieces), "across two pieces"),
    ("09.4", in_pieces, "across two pieces"),
    ("09.4", lambda pieces, stop: "".join(pieces).partition(stop)[0] + stop, "is still there"),
    (
        "09.4",
        lambda pieces, stop: (
            "".join(pieces).rpartition(stop)[0] if stop in "".join(pieces) else "".join(pieces)
        ),
        "instead of the first",
    ),
    ("09.4", two_neighbours, "you ran past 'end.'"),
    ("09.4", last_in_the_text_so_far, "instead of the first"),
    ("09.5", keep, "the most probable tokens"),
    ("09.5", lambda probs, mass: [len(probs) - 1], "I expected"),
    ("09.5", lambda probs, mass: [], "you kept no token"),
    ("09.5", unsorted, "return their indices in order"),
    ("09.5", lambda probs, mass: set(typical(probs, mass)), "return a list"),
    ("09.5", typical_log_of_zero, "raised ValueError"),
]


def test_another_right_answer_is_accepted():
    from minillm.exercises import grade

    for name, answer in (("09.1", next_token_with_torch), ("09.3", one_by_one)):
        assert grade(name, answer).status == "correct", grade(name, answer).message


def test_typical_agrees_with_transformers():
    """The grader's idea of 08.5 is the one of transformers' TypicalLogitsWarper."""
    from transformers.generation.logits_process import TypicalLogitsWarper

    from minillm.exercises.sampling import _typical_set

    probs = [0.4, 0.3, 0.15, 0.1, 0.05]
    for mass in (0.2, 0.5, 0.9):
        kept = TypicalLogitsWarper(mass)(None, torch.tensor([probs]).log())[0]
        assert kept.isfinite().nonzero()[:, 0].tolist() == _typical_set(probs, mass)
    assert math.isclose(sum(probs), 1)
