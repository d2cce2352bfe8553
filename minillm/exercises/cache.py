"""Graders of notebook 08: a cached head, what it costs, lost positions, ends in a batch, reuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from minillm.attention import attention
from minillm.cache import CacheLayer, KVCache
from minillm.exercises import Unsolved, as_given, check_table, check_values, exercise, is_number
from minillm.rope import RotaryEmbedding


class _Counted(nn.Linear):
    """A projection that counts the positions it was given."""

    positions = 0

    def forward(self, x: Tensor) -> Tensor:
        self.positions += x.shape[-2]
        return super().forward(x)


class _Asked(TorchFunctionMode):
    """The most queries that attention, or a softmax over keys, was given at once."""

    most = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        name = getattr(func, "__name__", "")
        dim = options.get("dim", args[1] if len(args) > 1 else None)
        over_keys = name == "softmax" and dim in (-1, args[0].ndim - 1 if args else None)
        if args and (over_keys or name == "scaled_dot_product_attention"):
            self.most = max(self.most, args[0].shape[-2])
        return func(*args, **options)


def _outputs(x: Tensor, parts: Sequence[nn.Linear], rope: Any, pieces: list[int], how: str) -> list:
    """What each piece of x should read, or would read after a well-known mistake."""
    kept: list[tuple[Tensor, Tensor]] = []
    found, past = [], 0
    for piece in x.split(pieces, dim=1):
        T = piece.shape[1]
        first = 0 if how == "restart" else past
        turn = rope(torch.arange(first, first + T)[None])
        q, k, v = (nn.functional.linear(piece, p.weight)[:, None] for p in parts)
        kept.append((k if how == "plain keys" else turn(k), v))
        keys, values = (torch.cat(tensors, dim=2) for tensors in zip(*kept, strict=True))
        mask = torch.ones(T, past + T, dtype=torch.bool)
        if how != "no mask":
            mask = mask.tril(0 if how == "corner" else past)
        found.append(attention(turn(q), keys, values, mask=mask)[:, 0])
        past += T
    return found


MISTAKES = {
    "restart": "the new ones were turned as if they stood at position 0",
    "no mask": "new positions read those after them",
    "corner": "the mask is not aligned with the end of the keys: the first new query must read "
    "all that was there before",
    "plain keys": "keys have to be turned as well as queries, each by its own position",
}


@exercise(
    "08.1",
    "which two tensors of earlier positions does a new query need, and at which position does it "
    "stand?",
    "keys and values are all that has to stay (keys kept turned are turned only once); queries are "
    "used once",
)
def _cached_head(answer: Callable[..., Any]) -> str | None:
    with torch.no_grad():
        message = _run_head(answer, [4, 1, 1]) or _run_two(answer)
        for pieces in ([1] * 6, [3, 2, 1], [6], [40, 1, 1]):
            message = message or _run_head(answer, pieces)
        return message


def _head(seed: int, length: int) -> tuple[list[_Counted], RotaryEmbedding, Tensor]:
    torch.manual_seed(seed)
    parts = [_Counted(6, 8, bias=False) for _ in range(3)]
    return parts, RotaryEmbedding(8, base=100.0), torch.randn(2, length, 6)


def _run_head(answer: Callable[..., Any], pieces: list[int]) -> str | None:
    parts, rope, x = _head(0, sum(pieces))
    head, past = answer(*parts, rope), 0
    expected = _outputs(x, parts, rope, pieces, "right")
    mistaken = {how: _outputs(x, parts, rope, pieces, how) for how in MISTAKES}
    for i, (piece, want) in enumerate(zip(x.split(pieces, dim=1), expected, strict=True)):
        with _Asked() as asked:
            got = head.read(piece)
        if got is None or got is ...:
            raise Unsolved
        case = f"{piece.shape[1]} new positions after {past}"
        if tuple(got.shape) != tuple(want.shape):
            return (
                f"{case}: read should return what the new ones read, "
                f"{tuple(want.shape)}, not {tuple(got.shape)}"
            )
        past += piece.shape[1]
        slips = {MISTAKES[how]: outputs[i] for how, outputs in mistaken.items()}
        where = "compare with one_head" if i == 0 else "is something kept twice, or not turned?"
        said = f"off by up to {(got - want).abs().max():.2f}; {where}"
        if why := check_values(got, want, slips, near=1e-4, otherwise=said):
            return f"{case}: {why}"
        most = max(part.positions for part in parts)
        if most > past:
            return (
                f"{case}: right, but a projection has seen {most} positions where {past} have "
                "passed: keep its results instead of computing them again"
            )
        if asked.most > piece.shape[1]:
            return (
                f"{case}: right, but {asked.most} queries read where {piece.shape[1]} are new: "
                "what earlier positions read is needed no more"
            )
    return None


def _run_two(answer: Callable[..., Any]) -> str | None:
    parts, rope, x = _head(1, 6)
    one, other = answer(*parts, rope), answer(*parts, rope)
    one.read(x[:, :3])
    if not torch.allclose(other.read(x[:, :2]), _outputs(x, parts, rope, [2, 4], "right")[0]):
        return "two heads share what they keep: it belongs to the object (self), not to the class"
    return None


PREDICTED: dict[str, Any] = {
    "positions computed without a cache": sum(range(100, 120)),
    "positions computed with a cache": 119,
    "positions in the cache at the end": 119,
    "mask of the last step": (1, 119),
    "bytes of the cache at the end": 3 * 2 * (16 + 16) * 119 * 4,
}
SLIPS: dict[tuple[str, Any], str] = {
    ("positions computed without a cache", 2210): "the first step reads 100 tokens, not 101",
    ("positions computed without a cache", 2310): "the last token is drawn, nobody reads it",
    ("positions computed without a cache", 2400): "the text grows by one token a step",
    ("positions computed without a cache", 2000): "the text grows by one token a step",
    ("positions computed with a cache", 120): "the last token is drawn, nobody reads it",
    ("positions computed with a cache", 20): "the prompt has to be read, too",
    ("positions computed with a cache", 19): "the prompt has to be read, too",
    ("positions in the cache at the end", 120): "the last token is drawn, nobody reads it",
    ("positions in the cache at the end", 20): "the prompt is kept, too",
    ("mask of the last step", (1, 1)): "the query reads all that is kept",
    ("mask of the last step", (1, 118)): "the new token reads itself, too",
    ("mask of the last step", (1, 120)): "the last token is drawn, nobody reads it",
    ("mask of the last step", (119, 119)): "with a cache, a step has one query",
    ("mask of the last step", (119, 1)): "queries first: (T, S)",
    ("bytes of the cache at the end", 45_696): "half of it: keys and values are kept, and a number "
    "in float32 has 4 bytes",
    ("bytes of the cache at the end", 30_464): "each of the 3 layers keeps its own",
    ("bytes of the cache at the end", 92_160): "119 positions are kept, the last token is not",
}


def _slip(question: str, value: Any) -> str | None:
    if question.startswith("bytes") and value == PREDICTED[question] / 4:
        return "a number in float32 has 4 bytes"
    return SLIPS.get((question, value))


def _is_size(value: Any) -> bool:
    return is_number(value) or isinstance(value, tuple)


@exercise(
    "08.2",
    "go through three steps on paper: what goes into the model, what is in the cache before and "
    "after?",
    "with a cache each position is computed once, and the last token drawn is never read",
)
def _predict(answer: Any) -> str | None:
    if (given := as_given(answer, PREDICTED)) is not None:
        answer = {q: tuple(x) if isinstance(x, list) else x for q, x in given.items()}
    hints = dict.fromkeys(PREDICTED, "write down the first two steps and the last")
    return check_table(answer, PREDICTED, hints, _slip, fits=_is_size)


class _Length:
    """A cache of which only the length matters."""

    def __init__(self, length: int = 0) -> None:
        self.length = length


class _Written:
    """A model that writes down what it is given; its logits depend on tokens and positions."""

    def __init__(self, cache: _Length) -> None:
        self.cache = cache
        self.calls: list[tuple[list[int], int]] = []

    def __call__(self, ids: Tensor, cache: _Length, first: int | None = None) -> Tensor:
        if cache is not self.cache:
            raise ValueError("the model was called with another cache than the one given")
        past = cache.length
        first = past if first is None else int(first)
        self.calls.append((ids[0].tolist(), first))
        cache.length += ids.shape[1]
        places = torch.arange(first, first + ids.shape[1])
        return torch.nn.functional.one_hot((7 * ids + 3 * places + 1) % 11, 11).float()


@exercise(
    "08.3",
    "try prompts of one token and of four: where does the second call say that its token stands?",
    "only the cache knows how much is past; a prompt of one token hides the mistake",
)
def _mended(answer: Callable[..., Any]) -> str | None:
    for past, prompt in ((0, [5]), (0, [3, 1, 4, 1]), (6, [2, 7]), (3, [8])):
        cache, ids = _Length(past), torch.tensor([prompt])
        model = _Written(cache)
        got = answer(model, cache, ids, 5)
        case = f"a prompt of {len(prompt)} token" + "s" * (len(prompt) > 1)
        case += f" after {past} in the cache" if past else ""
        length, last = past, prompt
        for step, (tokens, first) in enumerate(model.calls):
            if step and len(tokens) > 1:
                return (
                    f"{case}: call {step + 1} gets {len(tokens)} tokens, but the cache holds "
                    "the earlier ones already: give it the new token only"
                )
            if tokens != last and step == 0:
                return f"{case}: the first call should get the prompt {prompt}, not {tokens}"
            if first != length:
                return f"{case}: a token that comes after {length} others was put at {first}"
            length += len(tokens)
        if len(model.calls) != 5:
            return f"{case}: 5 new tokens need 5 calls of the model, not {len(model.calls)}"
        want = list(prompt)
        for step in range(5):
            want.append((7 * want[-1] + 3 * (past + len(prompt) - 1 + step) + 1) % 11)
        if got.tolist() != [want]:
            return f"{case}: the answer should be {[want]}, not {got.tolist()}"
    return None


BATCHES = (
    [[3, 9, 4, 4, 1], [2, 2, 2, 9, 5], [1, 2, 3, 4, 5], [9, 9, 1, 1, 9]],
    [[0, 3, 0, 9, 2], [0, 0, 0, 0, 0], [4, 0, 5, 6, 9]],  # the pad is a token like others
    [[9, 1], [1, 9], [1, 1]],
    [[4, 4, 4]],
)
NUMBERS = {Tensor.tolist, Tensor.item, Tensor.numpy, Tensor.__iter__, Tensor.__int__, Tensor.unbind}


class _NoLoops(TorchFunctionMode):
    """Notes when tensors become Python numbers or rows, and counts how often they are indexed."""

    looped, indexed = False, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.looped |= func in NUMBERS
        self.indexed += func in (Tensor.__getitem__, Tensor.__setitem__)
        return func(*args, **(kwargs or {}))


@exercise(
    "08.4",
    "how many ends has a row had *before* each of its tokens?",
    "a running count along the time says what comes after the first end; the count along the "
    "batch would mix texts",
)
def _finish(answer: Callable[[Tensor, int, int], tuple[Tensor, Tensor]]) -> str | None:
    for rows in BATCHES:
        wanted, lengths = [], []
        for row in rows:
            length = row.index(9) + 1 if 9 in row else len(row)
            wanted.append(row[:length] + [0] * (len(row) - length))
            lengths.append(length)
        ids = torch.tensor(rows)
        with _NoLoops() as watch:
            answered = answer(ids, 9, 0)
        shapes = [tuple(getattr(x, "shape", ())) for x in answered]
        if shapes != [tuple(ids.shape), (len(rows),)]:
            said = "return two tensors: the ids (B, T), then the lengths (B,)"
            if len(shapes) == 2:
                said += f"; here {tuple(ids.shape)} and {(len(rows),)}, not "
                said += f"{shapes[0]} and {shapes[1]}"
            return said
        got, got_lengths = (x.tolist() for x in answered)
        if ids.tolist() != rows:
            return "you changed the ids that you were given: work on a copy"
        message = _wrong_row(rows, wanted, got)
        if message:
            return message
        for row, want, found in zip(rows, lengths, got_lengths, strict=True):
            if found != want:
                hint = "the end counts" if found == want - 1 else "a row without end is whole"
                if found == sum(token != 0 for token in row[:want]):
                    hint = "a 0 in the text is a token like others"
                return f"the length of {row} with end 9 is {want}, not {found}: {hint}"
        if watch.looped or watch.indexed > 6:
            return "the numbers are right, but you walk through rows or tokens in Python"
    return None


def _wrong_row(rows: list[list[int]], wanted: list[list[int]], got: list[list[int]]) -> str | None:
    ids = torch.tensor(rows)
    if got != wanted and got == ids.masked_fill((ids == 9).cumsum(0) > 0, 0).tolist():
        return "a row is erased by its neighbour's end: time runs along dimension 1, not 0"
    for row, want, found in zip(rows, wanted, got, strict=True):
        if found == want:
            continue
        if 9 in row and found[: row.index(9) + 1] == [*want[: row.index(9)], 0]:
            return f"in {row} the end 9 itself is gone: it belongs to the text"
        if found == row:
            return f"in {row} everything after the first 9 should be 0"
        return f"{row} with end 9 and pad 0 should become {want}, not {found}"
    return None


class _Summed:
    """A model that keeps its tokens as keys; its logits tell what it has read, and where."""

    def __init__(self) -> None:
        self.computed = self.passes = 0

    def __call__(self, ids: Tensor, cache: KVCache) -> Tensor:
        self.computed += ids.shape[1]
        self.passes += 1
        tokens = ids[:, None, :, None].float()
        keys, _ = cache[0].update(tokens, tokens)
        places = torch.arange(1, keys.shape[2] + 1)
        sums = (keys[0, 0, :, 0] * places.sqrt()).cumsum(0)[-ids.shape[1] :]
        return torch.stack([sums, sums.sin(), sums.cos()], dim=-1)[None]  # (1, T, 3)


CHATS: tuple[tuple[list[int], list[int]], ...] = (
    ([], [4, 7, 2]),
    ([4, 7, 2], [4, 7, 2, 8, 5]),
    ([4, 7, 2, 8, 5], [4, 7, 6, 8, 5, 1]),
    ([4, 7, 6, 8], [4, 7, 6, 8]),
    ([4, 7, 6, 8, 3], [4, 7]),
    ([4, 7, 6], [9, 7, 6]),
)


@exercise(
    "08.5",
    "what do `held` and `ids` have in common, and how little may the model read to give logits?",
    "a cache can be cut back to what two texts have in common: one way to serve chats",
)
def _ask(answer: Callable[..., Any]) -> str | None:
    for held, ids in CHATS:
        cache, model = KVCache([CacheLayer(1, 1, 1, 1)]), _Summed()
        if held:
            model(torch.tensor([held]), cache)
        want = _Summed()(torch.tensor([ids]), KVCache([CacheLayer(1, 1, 1, 1)]))[:, -1]
        model.computed = model.passes = 0
        given = list(held), list(ids)
        case = f"held {held}, ids {ids}"
        try:
            got = answer(model, cache, *given)
        except ValueError as error:
            if "at least one new position" not in str(error):
                raise
            return f"{case}: nothing new is left to read, but logits need at least one position"
        if given != (held, ids):
            return f"{case}: you changed the lists that you were given"
        if tuple(got.shape) != (1, 3):
            return f"{case}: the logits of the last position are (1, V), not {tuple(got.shape)}"
        if cache.length != len(ids):
            return f"{case}: the cache should hold {len(ids)} positions now, not {cache.length}"
        kept = cache[0].update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))[0]
        inside = [int(x) for x in kept[0, 0, :-1, 0].tolist()]
        if inside != ids:
            return f"{case}: the cache holds {inside} now"
        if not torch.allclose(got, want, atol=1e-4):
            return f"{case}: these are not the logits after the last token"
        common = 0
        while common < min(len(held), len(ids) - 1) and held[common] == ids[common]:
            common += 1
        if model.computed > len(ids) - common:
            return f"{case}: {model.computed} positions computed, {len(ids) - common} would do"
        if model.passes > 1:
            return f"{case}: right, but in {model.passes} passes; the new part fits into one"
    return None
