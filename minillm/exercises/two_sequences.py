"""Graders of 15: masks of cross-attention and of a prefix, the two caches, T5, a wrong loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.beyond.two_sequences.seq2seq import EncoderDecoder, Seq2SeqConfig, shift_right
from minillm.exercises import check_table, check_values, exercise


def _shape(x: Any) -> str:
    return f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)


@exercise(
    "15.1",
    "which of the two texts does the mask speak about, and along which axis do its positions lie?",
    "the source alone decides: one row of the mask serves all heads and all target positions",
)
def _cross_mask(answer: Callable[[Tensor, int], Any]) -> str | None:
    for pad, rows in ((0, [[5, 6, 7, 0, 0], [0, 8, 9, 4, 4]]), (3, [[1, 3], [0, 2], [2, 0]])):
        ids = torch.tensor(rows)
        (B, S), H, T = ids.shape, 5, 4
        given = ids.clone()
        mask = answer(given, pad)
        if not torch.equal(given, ids):
            return "input_ids were changed; make a new tensor"
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            return f"the mask should be a bool tensor, not {_shape(mask)}"
        try:
            full = mask.expand(B, H, T, S)
        except RuntimeError:
            return f"{tuple(mask.shape)} does not broadcast to (B, H, T, S) = {(B, H, T, S)}"
        wanted = ids.ne(pad)[:, None, None, :].expand(B, H, T, S)
        if torch.equal(full, wanted):
            continue
        if torch.equal(full, ~wanted):
            return "turned round: True is where a position may read"
        if torch.equal(full, wanted & torch.ones(T, S, dtype=torch.bool).tril()):
            return "a causal mask has no place here: the source is all there"
        row, head, at, _ = (full != wanted).nonzero()[0].tolist()
        reads, right = (m[row, head, at].tolist() for m in (full, wanted))
        case = f"for ids {rows[row]} and padding {pad} target position {at}"
        return f"{case} reads {reads}, it should be {right}"
    return None


HELD = {
    "keys in a layer's memory after 1 target token, 20 source tokens": 20,
    "keys in a layer's memory after 30 target tokens, 20 source tokens": 20,
    "keys in a layer's self-attention cache after 30 target tokens were fed": 30,
    "runs of the encoder for 30 target tokens": 1,
    "bytes of BART-large's memory of 1,024 source tokens in 16 bits": 12 * 2 * 1024 * 1024 * 2,
}
ONE, MANY, SELF, RUNS, BYTES = HELD
HINTS = {
    ONE: "the memory is made before the first target token",
    MANY: "does a target token bring the source a key?",
    SELF: "each token that is fed brings one key",
    RUNS: "what would the encoder compute the second time?",
    BYTES: "layers x (keys and values) x source tokens x numbers x bytes of a number",
}


@exercise(
    "15.2",
    "which of the two caches gets a key with each target token?",
    "the memory is as long as the source and stays so; the target's cache is as long as the target",
)
def _held(answer: Any) -> str | None:
    return check_table(answer, HELD, HINTS)


@exercise(
    "15.3",
    "four blocks: who of source and target reads whom of source and target?",
    "one stack of layers can do both jobs; what an encoder is, a mask can say",
)
def _prefix_mask(answer: Callable[[int, int], Any]) -> str | None:
    for S, T in ((3, 2), (1, 4), (4, 1)):
        mask = answer(S, T)
        case = f"{S} source and {T} target tokens"
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != (S + T, S + T):
            return f"{case}: the mask should be bool {(S + T, S + T)}, not {_shape(mask)}"
        wanted = torch.ones(S + T, S + T, dtype=torch.bool).tril()
        wanted[:S, :S] = True
        if torch.equal(mask, wanted):
            continue
        if torch.equal(mask, ~wanted):
            return f"{case}: turned round: True is where a position may read"
        if S > 1 and torch.equal(mask, wanted.tril()):
            return (
                f"{case}: this is a language model's mask: the source cannot read ahead in itself"
            )
        if mask[:S, S:].any():
            return f"{case}: the source reads the target, which is not written yet"
        if not mask[S:, :S].all():
            return f"{case}: a target token should read the whole source"
        if mask[S:, S:].triu(1).any():
            return f"{case}: a target token reads one that comes after it"
        row = int((mask != wanted).any(1).nonzero()[0])
        return (
            f"{case}: row {row} is {mask[row].int().tolist()}, it should be "
            f"{wanted[row].int().tolist()}"
        )
    return None


def t5_attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor, buckets: Tensor) -> Tensor:
    """Attention without a scale, a number of the table added to each score."""
    scores = q @ k.mT + table[buckets].permute(2, 0, 1)
    return scores.softmax(-1) @ v


@exercise(
    "15.4",
    "a number of the table for each head and pair, added to the scores, before the softmax",
    "positions can be numbers added to scores; T5 makes up for the scale in its first weights",
)
def _t5(answer: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Any]) -> str | None:
    generator = torch.Generator().manual_seed(0)
    for B, H, T, S, D in ((2, 3, 4, 5, 8), (1, 2, 3, 3, 4), (2, 4, 4, 4, 16)):
        q, k, v = (torch.randn(B, H, n, D, generator=generator) for n in (T, S, S))
        table = torch.randn(7, H, generator=generator)
        buckets = torch.randint(7, (T, S), generator=generator)
        wanted = t5_attention(q, k, v, table, buckets)
        got = answer(q, k, v, table, buckets)
        if not isinstance(got, Tensor) or got.shape != wanted.shape:
            return f"return {tuple(wanted.shape)}, not {_shape(got)}"
        bias = table[buckets].permute(2, 0, 1)
        scale = "T5 does not divide its scores by the root of D"
        mistakes = [
            (scale, (q @ k.mT * D**-0.5 + bias).softmax(-1) @ v),
            (scale, ((q @ k.mT + bias) * D**-0.5).softmax(-1) @ v),
            ("the numbers of the table are missing", (q @ k.mT).softmax(-1) @ v),
            (
                "the numbers are added to the scores, before the softmax, not to the weights",
                ((q @ k.mT).softmax(-1) + bias) @ v,
            ),
            (
                "table[buckets] has its heads on the last axis: move it, a reshape mixes them",
                (q @ k.mT + table[buckets].reshape(H, T, S)).softmax(-1) @ v,
            ),
        ]
        if why := check_values(got, wanted, mistakes, near=1e-4):
            return f"for H = {H}, T = {T}, S = {S}: {why}"
    return None


@exercise(
    "15.5",
    "which token is asked for where the start token is fed?",
    "the shift is done once: in the input, or by an offset of input and labels, and not in both",
)
def _loss_of_pairs(answer: Callable[[EncoderDecoder, Tensor, Tensor, int], Any]) -> str | None:
    for pad, start in ((0, 1), (11, 3)):
        sizes = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "init_std": 0.5}
        ids = {"pad_token_id": pad, "decoder_start_token_id": start}
        model = EncoderDecoder(Seq2SeqConfig(12, **sizes, **ids)).eval()  # type: ignore[arg-type]
        source = torch.tensor([[4, 5, 6, 7], [8, 9, pad, pad], [5, 5, 8, pad]])
        target = torch.tensor([[9, 4, 10, 7, 2], [6, 8, 2, pad, pad], [7, 2, pad, pad, pad]])
        mask, fed = (source != pad).long(), shift_right(target, model.config)
        logits = model(source, fed, attention_mask=mask)
        wanted = _loss(logits, target, pad)
        got = answer(model, source.clone(), target.clone(), pad)
        if not isinstance(got, Tensor) or got.shape != ():
            return f"return one number as a tensor, the mean, not {_shape(got)}"
        copied = model(source, target, attention_mask=mask)
        slips = {
            "as it was given: the start is asked for the second token": (
                _loss(logits[:, :-1], target[:, 1:], pad)
            ),
            "a leak: each position is fed what it is asked for": _loss(copied, target, pad),
            "each position is asked for what it is fed": (
                _loss(logits[:, 1:], target[:, :-1], pad)
            ),
            "the start token is never fed": _loss(copied[:, :-1], target[:, 1:], pad),
            "the longest target's end is asked for nowhere": (
                _loss(logits[:, :-1], target[:, :-1], pad)
            ),
            "padding of the target is counted": _loss(logits, target, -100),
            "the padding of the source is read": _loss(model(source, fed), target, pad),
        }
        said = f"the loss should be {wanted:.4f}, not {got:.4f}"
        if why := check_values(got, wanted, slips, near=1e-4, otherwise=said):
            return why
        if idle := _without_gradient(got, model) - _without_gradient(wanted, model):
            return f"the number is right, but no gradient reaches {min(idle)}: it is not trained"
    return None


def _without_gradient(loss: Tensor, model: EncoderDecoder) -> set[str]:
    names, weights = zip(*model.named_parameters(), strict=True)
    if not loss.requires_grad:
        return set(names)
    found = torch.autograd.grad(loss, weights, allow_unused=True, retain_graph=True)
    return {name for name, gradient in zip(names, found, strict=True) if gradient is None}


def _loss(logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=ignored)
