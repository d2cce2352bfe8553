"""Training on conversations: which tokens are the assistant's, and rows that examples share.

Explained in notebooks/beyond/13_answers.ipynb; conversations as batches, with what is refused:
`minillm.beyond.answers.conversations`.
"""

# Built from notebooks/beyond/13_answers.ipynb: edit there, then make build.

import unicodedata
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minillm.attention import causal_mask
from minillm.model import CausalLM
from minillm.support.modes import check_positionwise
from minillm.training import document_row

__all__ = ["Example", "Isolated", "document_example", "token_mask"]


class Example(NamedTuple):
    """Token ids, and which of them the model shall learn to write."""

    ids: list[int]
    mask: list[bool]


def token_mask(
    tokenizer: Any, text: str, ids: Sequence[int], spans: Sequence[tuple[int, int]]
) -> list[bool]:
    """Which tokens of `text` have a character of one of the spans.

    Raises: ValueError if the tokens do not write `text`, byte by byte, in its normal form.
    """
    if hasattr(tokenizer, "library"):  # of Hugging Face: it knows which characters a token is from
        places = tokenizer.offsets(text, ids)
    else:
        if form := getattr(tokenizer, "normalizer", None):
            text, spans = _normalized(form, text, spans)
        if tokenizer.decode_bytes(ids) != text.encode():
            raise ValueError(f"the tokenizer writes another text than {text[:80]!r}")
        sizes = {i: len(tokenizer.decode_bytes([i])) for i in {*ids}}
        ends = [*accumulate(sizes[i] for i in ids)]
        places = [*zip([0, *ends], ends, strict=False)]
        spans = [(len(text[:a].encode()), len(text[:b].encode())) for a, b in spans]
    counted = bytearray(len(text.encode()))  # 1 for what stands in a span
    for begin, end in spans:
        counted[begin:end] = bytes([1]) * (end - begin)
    return [1 in counted[begin:end] for begin, end in places]


def _normalized(
    form: Any, text: str, spans: Sequence[tuple[int, int]]
) -> tuple[str, list[tuple[int, int]]]:
    """The text in its normal form, and the spans there; what a border joins is in the span."""
    whole = unicodedata.normalize(form, text)
    moved = []
    for begin, end in spans:
        before, after = (unicodedata.normalize(form, t) for t in (text[:begin], text[end:]))
        moved.append((_alike(before, whole), len(whole) - _alike(after[::-1], whole[::-1])))
    return whole, moved


def _alike(a: str, b: str) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((n for n, (x, y) in pairs if x != y), min(len(a), len(b)))


def document_example(
    ids: Iterable[int], eos_token_id: int, bos_token_id: int | None = None
) -> Example:
    """A document from begin to end token, as `document_row`, all of which is to be learned."""
    row = document_row(ids, eos_token_id, bos_token_id)
    return Example(row, [False] + [True] * (len(row) - 1))


class Isolated(nn.Module):
    """Makes a `CausalLM` read packed rows: each example sees itself alone, from position 0 on.

    Shape: (B, 2, T), ids and numbers of examples -> (B, T, V).
    Raises: ValueError for another shape; for a model with a sliding window, which it would ignore,
        and one in which a position depends on more than the keys before it.
    """

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        if model.config.sliding_window is not None:
            raise ValueError(f"a sliding window ({model.config.sliding_window}) is not packed")
        check_positionwise(model, "examples side by side are not isolated")
        self.model = model

    def forward(self, packed: Tensor) -> Tensor:
        """Ids and numbers of examples (B, 2, T) -> logits (B, T, V), each example by itself."""
        if packed.dim() != 3 or packed.shape[1] != 2:
            raise ValueError(f"packed rows are (B, 2, T), not {tuple(packed.shape)}")
        ids, numbers = packed.unbind(1)  # (B, T)
        B, T = ids.shape
        slots = torch.arange(T, device=ids.device).expand(B, T)
        begins = torch.ones_like(ids, dtype=torch.bool)
        begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
        first = torch.where(begins, slots, 0).cummax(-1).values  # slot of the example's first token
        mask = (first[:, :, None] == first[:, None, :]) & causal_mask(T, T, device=ids.device)
        return self.model.run(ids, slots - first, mask[:, None], False)
