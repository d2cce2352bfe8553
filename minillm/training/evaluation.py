"""Bits per byte of whole documents, and the bytes that each token stands for (notebook 07)."""

# Built from notebooks/07_training.ipynb: edit there, then make build.

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from minillm.checks import check_texts, check_tokenizer
from minillm.modes import EvalMode
from minillm.tokenizer.pretokenizer import well_formed
from minillm.training.data import pad_rows
from minillm.training.loss import cross_entropy

__all__ = ["evaluate", "token_byte_lengths"]


@torch.no_grad()
def evaluate(
    model: nn.Module,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    batch_tokens: int = 8192,
    eos_token_id: int | None = None,
) -> float:
    """Bits per byte of whole documents, each alone in its row.

    All nats, those of the end token included, over the bytes of the text.

    Comparable with `StoryLanguage.bits_per_byte`, with n-grams, and across tokenizers.

    Raises: ValueError for one text instead of several, arguments in another order, texts without a
        byte, or if no end token is known.
    """
    check_tokenizer(tokenizer)
    check_texts(texts)
    eos_token_id = tokenizer.eos_token_id if eos_token_id is None else eos_token_id
    if eos_token_id is None:
        raise ValueError(
            "the tokenizer has no end token: say with eos_token_id which one begins a text"
        )
    texts = [well_formed(text) for text in texts]  # the text that is encoded has the bytes
    rows = sorted(
        ([eos_token_id, *tokenizer.encode_ordinary(t), eos_token_id] for t in texts), key=len
    )
    num_bytes = sum(len(t.encode("utf-8")) for t in texts)
    if not num_bytes:
        raise ValueError(f"{len(texts)} texts without a byte: nothing to measure")
    device, nats = next(model.parameters()).device, 0.0
    with EvalMode(model):
        while rows:
            size = max(1, batch_tokens // len(rows[-1]))
            batch, rows = rows[-size:], rows[:-size]
            inputs, targets = pad_rows(batch, len(batch[-1]), eos_token_id)
            logits = model(inputs.to(device))
            nats += float(cross_entropy(logits, targets.to(device), reduction="sum"))
    return nats / math.log(2) / num_bytes


def token_byte_lengths(tokenizer: Any) -> Tensor:
    """How many bytes of text each token stands for; 0 for special tokens and for ids without one.

    Shape: -> (V,) int64.
    """
    lengths = [0] * tokenizer.vocab_size
    for i in set(range(len(lengths))) - set(tokenizer.special_tokens.values()):
        with suppress(ValueError):  # ids may have gaps
            lengths[i] = len(tokenizer.decode_bytes([i]))
    return torch.tensor(lengths)
