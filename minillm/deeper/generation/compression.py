"""A text as a small file: arithmetic coding by a model's probabilities (deeper/10_real_text)."""

# Built from notebooks/deeper/10_real_text.ipynb: edit there, then make build.

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from minillm.support.checks.model import context_length
from minillm.support.checks.texts import check_text, check_tokenizer
from minillm.support.checks.words import quoted
from minillm.support.modes import EvalMode
from minillm.training import begin_id

__all__ = [
    "TOTAL",
    "WIDTH",
    "ArithmeticDecoder",
    "arithmetic_encode",
    "compress",
    "decompress",
    "shares",
]

TOTAL = 1 << 24  # the parts that all shares of a step add up to

WIDTH = 48  # bits of the interval's width


def arithmetic_encode(parts: Iterable[tuple[int, int]]) -> bytes:
    """The bytes of a number that falls into each of these shares in turn.

    A part (start, count) is what is left of the interval: of its 2^24 parts, `count` from `start`.
    Source: Witten, Neal, Cleary 1987; the beginning of the interval is one long number here.
    """
    low, width, bits = 0, 1 << WIDTH, WIDTH
    for start, count in parts:
        step = width // TOTAL
        low, width = low + step * start, step * count
        shift = WIDTH + 1 - width.bit_length()
        low, width, bits = low << shift, width << shift, bits + shift
    spare = width.bit_length() - 1  # the last bits may be anything
    size = -(-(bits - spare) // 8)
    number = (low + width - 1) >> spare << spare
    return (number << 8 * size >> bits).to_bytes(size, "big")


class ArithmeticDecoder:
    """Gives back, one after the other, the symbols whose shares `arithmetic_encode` was given.

    Raises: ValueError where the bytes have ended long ago.
    """

    def __init__(self, data: bytes) -> None:
        self.number, self.bits = int.from_bytes(data + bytes(16), "big"), 8 * len(data) + 128
        self.width, self.taken = 1 << WIDTH, WIDTH
        self.rest = self.number >> (self.bits - WIDTH)  # how far the number is above `low`

    def next(self, starts: np.ndarray) -> int:
        """The symbol i whose share, from starts[i] up to starts[i + 1], the number lies in.

        Shape: (V + 1,), from 0 to 2^24.
        """
        step = self.width // TOTAL
        place = min(self.rest // step, TOTAL - 1)
        symbol = int(np.searchsorted(starts, place, side="right")) - 1
        first, end = int(starts[symbol]), int(starts[symbol + 1])
        self.rest, self.width = self.rest - step * first, step * (end - first)
        shift = WIDTH + 1 - self.width.bit_length()
        self.taken += shift
        if self.taken > self.bits:
            raise ValueError(
                f"{(self.bits - 128) // 8} bytes end before their text: they are damaged, or the "
                "numbers were not computed as on the machine that wrote them"
            )
        new = (self.number >> (self.bits - self.taken)) & ((1 << shift) - 1)
        self.rest, self.width = self.rest << shift | new, self.width << shift
        return symbol


def shares(logits: Tensor) -> np.ndarray:
    """Where each token's share begins: 2^24 parts dealt by probability, at least one for each.

    Shape: (V,) -> (V + 1,) int64, from 0 to 2^24.
    Raises: ValueError for a logit that is no number.
    """
    p = logits.double().softmax(-1).cpu().numpy()
    if not np.isfinite(p).all():
        raise ValueError("the model's logits are not finite: no shares of them")
    counts = 1 + (p * (TOTAL - len(p))).astype(np.int64)
    counts[counts.argmax()] += TOTAL - counts.sum()  # what rounding down left over
    return np.concatenate([[0], counts.cumsum()])


class _Reader:
    """A model that reads token by token and says what may follow; it sees a window of them.

    When the window is full, a new one begins half a window back, as in `evaluate_text`.
    """

    def __init__(self, model: Any, window: int) -> None:
        self.model, self.window, self.cache = model, window, None
        self.seen: list[int] = []  # what the cache holds
        self.place = next(model.parameters()).device

    def after(self, token: int) -> np.ndarray:
        """The shares of what follows `token`."""
        new = [token]
        if self.cache is None or len(self.seen) == self.window:
            self.seen = self.seen[self.window // 2 :]
            self.cache, new = self.model.make_cache(batch_size=1), [*self.seen, token]
        self.seen.append(token)
        ids = torch.tensor([new], device=self.place)
        return shares(self.model(ids, cache=self.cache, logits_to_keep=1)[0, -1])


def _reader(model: nn.Module, tokenizer: Any, window: int | None) -> tuple[_Reader, int, int]:
    """A reader, the token that begins a text, and the one that ends it."""
    check_tokenizer(tokenizer)
    begin, end, known = begin_id(tokenizer), tokenizer.eos_token_id, context_length(model.config)
    if begin is None or end is None:
        raise ValueError("the tokenizer has no end token: nothing could say where a text ends")
    window = min(known, 1024) if window is None else window
    if not 2 <= window <= known:
        raise ValueError(f"window {window} must be from 2 to the model's context, {known}")
    return _Reader(model, window), begin, end


@torch.inference_mode()
def compress(model: Any, tokenizer: Any, text: str, *, window: int | None = None) -> bytes:
    """A text as the few bytes that `decompress` makes it of again, with the same model.

    As many bits as the model is surprised by, end token included: about `evaluate_text` a byte.

    Args:
        window: tokens that the model sees at once (None: its context, 1024 at most).
    Raises: ValueError for several texts or none, no end token, a window that does not fit,
        a text that the tokenizer changes.
    """
    check_text(text)
    reader, token, end = _reader(model, tokenizer, window)
    ids, parts = tokenizer.encode_ordinary(text), []
    if tokenizer.decode(ids) != text:
        raise ValueError(f"the tokenizer gives {quoted(text)} back changed: no exact file of it")
    with EvalMode(model):
        for following in [*ids, end]:
            starts = reader.after(token)
            parts.append((int(starts[following]), int(starts[following + 1] - starts[following])))
            token = following
    return arithmetic_encode(parts)


@torch.inference_mode()
def decompress(model: Any, tokenizer: Any, data: bytes, *, window: int | None = None) -> str:
    """The text of `compress`: the same model, window, program and processor must read it.

    Raises: ValueError for bytes that end before a text does.
    """
    reader, token, end = _reader(model, tokenizer, window)
    decoder, ids = ArithmeticDecoder(data), []
    with EvalMode(model):
        while (token := decoder.next(reader.after(token))) != end:
            ids.append(token)
    return tokenizer.decode(ids)
