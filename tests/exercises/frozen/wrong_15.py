"""Wrong answers of 15: exercise, answer, words that its message holds."""

import torch
import torch.nn.functional as F

from minillm.beyond.two_sequences.seq2seq import shift_right

HELD = {
    "keys in a layer's memory after 1 target token, 20 source tokens": 20,
    "keys in a layer's memory after 30 target tokens, 20 source tokens": 20,
    "keys in a layer's self-attention cache after 30 target tokens were fed": 30,
    "runs of the encoder for 30 target tokens": 1,
    "bytes of BART-large's memory of 1,024 source tokens in 16 bits": 50_331_648,
}

ONE, MANY, SELF, RUNS, BYTES = HELD


def cross_mask(input_ids, pad):
    return (input_ids != pad)[:, None, None, :]


def causal_too(input_ids, pad):
    return cross_mask(input_ids, pad) & torch.ones(4, input_ids.shape[1]).tril().bool()


def in_place(input_ids, pad):
    mask = cross_mask(input_ids, pad).clone()
    input_ids.zero_()
    return mask


def prefix_mask(S, T):
    mask = torch.ones(S + T, S + T).tril().bool()
    mask[:S, :S] = True
    return mask


def blind_target(S, T):
    mask = prefix_mask(S, T)
    mask[S:, :S] = False
    return mask


def open_target(S, T):
    mask = prefix_mask(S, T)
    mask[S:, S:] = True
    return mask


def not_itself(S, T):
    mask = prefix_mask(S, T)
    mask[S:, S:] = torch.ones(T, T).tril(-1).bool()
    return mask


def t5(q, k, v, table, buckets, *, scale=1.0, all_scaled=1.0, bias=1.0, after=0.0):
    added = torch.nn.functional.embedding(buckets, table).movedim(-1, 0)
    weights = ((scale * q @ k.mT + bias * added) * all_scaled).softmax(-1)
    return (weights + after * added) @ v


def reshaped(q, k, v, table, buckets):
    return (q @ k.mT + table[buckets].reshape(-1, *buckets.shape)).softmax(-1) @ v


def one_head(q, k, v, table, buckets):
    return (q @ k.mT + table[buckets][..., 0]).softmax(-1) @ v


def loss(model, source, target, pad, *, fed=None, first=None, last=None, begin=0, ignored=None):
    mask = (source != pad).long()
    fed = shift_right(target, model.config) if fed is None else fed
    logits = model(source, fed, attention_mask=mask)[:, begin:first]
    counted = pad if ignored is None else ignored
    return F.cross_entropy(logits.mT, target[:, last:][:, : logits.shape[1]], ignore_index=counted)


def frozen_encoder(model, source, target, pad):
    memory = model.encode(source, attention_mask=(source != pad).long())
    memory = memory._replace(keys_values=[(k.detach(), v.detach()) for k, v in memory[0]])
    logits = model.decode(shift_right(target, model.config), memory)
    return F.cross_entropy(logits.mT, target, ignore_index=pad)


def source_unmasked(model, source, target, pad):
    logits = model(source, shift_right(target, model.config))
    return F.cross_entropy(logits.mT, target, ignore_index=pad)


WRONG = [
    ("15.1", lambda ids, pad: ~cross_mask(ids, pad), "turned round"),
    ("15.1", lambda ids, pad: (ids != pad)[:, None, :, None], "does not broadcast"),
    ("15.1", lambda ids, pad: (ids != pad)[:, None], "does not broadcast"),
    ("15.1", lambda ids, pad: cross_mask(ids, pad).int(), "a bool tensor"),
    ("15.1", lambda ids, pad: cross_mask(ids, 0), "reads [True, True], it should be [True, False]"),
    ("15.1", causal_too, "a causal mask has no place"),
    ("15.1", in_place, "were changed"),
    ("15.2", {**HELD, MANY: 50}, "bring the source a key"),
    ("15.2", {**HELD, SELF: 20}, "one key"),
    ("15.2", {**HELD, RUNS: 30}, "the second time"),
    ("15.2", {**HELD, BYTES: 25_165_824}, "keys and values"),
    ("15.2", {**HELD, ONE: ...}, "not filled in"),
    ("15.2", [20, 20, 30, 1, 50_331_648], "a dictionary"),
    ("15.3", lambda S, T: torch.ones(S + T, S + T).tril().bool(), "cannot read ahead"),
    ("15.3", lambda S, T: torch.ones(S + T, S + T).bool(), "not written yet"),
    ("15.3", lambda S, T: ~prefix_mask(S, T), "turned round"),
    ("15.3", lambda S, T: prefix_mask(S, T).T, "not written yet"),
    ("15.3", blind_target, "the whole source"),
    ("15.3", open_target, "comes after it"),
    ("15.3", not_itself, "row 3 is [1, 1, 1, 0, 0], it should be [1, 1, 1, 1, 0]"),
    ("15.3", lambda S, T: prefix_mask(S, T)[S:], "should be bool (5, 5)"),
    ("15.4", lambda *a: t5(*a, scale=a[0].shape[-1] ** -0.5), "root of D"),
    ("15.4", lambda *a: t5(*a, all_scaled=a[0].shape[-1] ** -0.5), "root of D"),
    ("15.4", lambda *a: t5(*a, bias=0.0), "missing"),
    ("15.4", lambda *a: t5(*a, bias=0.0, after=1.0), "before the softmax"),
    ("15.4", reshaped, "a reshape mixes them"),
    ("15.4", one_head, "for H = 3"),
    ("15.4", lambda *a: t5(*a)[:, 0], "return (2, 3, 4, 8)"),
    ("15.5", lambda *a: loss(*a, first=-1, last=1), "as it was given"),
    ("15.5", lambda *a: loss(*a, fed=a[2]), "a leak"),
    ("15.5", lambda *a: loss(*a, begin=1), "asked for what it is fed"),
    ("15.5", lambda *a: loss(*a, fed=a[2], first=-1, last=1), "the start token is never fed"),
    ("15.5", lambda *a: loss(*a, first=-1), "asked for nowhere"),
    ("15.5", lambda *a: loss(*a, ignored=-100), "padding of the target is counted"),
    ("15.5", lambda *a: loss(*a).detach(), "no gradient reaches"),
    ("15.5", frozen_encoder, "no gradient reaches"),
    ("15.5", source_unmasked, "the padding of the source is read"),
    ("15.5", lambda *a: 2 * loss(*a), "the loss should be"),
    ("15.5", lambda *a: loss(*a).item(), "return one number as a tensor"),
]
