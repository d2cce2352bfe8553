"""Wrong answers of 07: exercise, answer, words that its message holds."""

import torch

from minillm.attention import attention


class Head:
    """Right: the turned keys and the values, glued."""

    def __init__(self, q_proj, k_proj, v_proj, rope):
        self.parts, self.rope, self.kept = (q_proj, k_proj, v_proj), rope, None

    @property
    def past(self):
        return 0 if self.kept is None else self.kept[0].shape[2]

    def keep(self, k, v):
        if self.kept is not None:
            k, v = (torch.cat(pair, 2) for pair in zip(self.kept, (k, v), strict=True))
        self.kept = k, v
        return k, v

    def mask(self, T, S):
        return torch.ones(T, S, dtype=torch.bool).tril(S - T)

    def first(self, T):
        return self.past

    def read(self, x):
        T = x.shape[1]
        first = self.first(T)
        turn = self.rope(torch.arange(first, first + T)[None])
        q, k, v = (part(x)[:, None] for part in self.parts)
        k, v = self.keep(turn(k), v)
        return attention(turn(q), k, v, mask=self.mask(T, k.shape[2]))[:, 0]


class Restarts(Head):
    def first(self, T):
        return 0


class Unmasked(Head):
    def mask(self, T, S):
        return None


class Corner(Head):
    def mask(self, T, S):
        return torch.ones(T, S, dtype=torch.bool).tril()


class EveryOutput(Head):
    def read(self, x):
        self.x = torch.cat((self.x, x), 1) if self.kept else x
        self.kept = None
        out = super().read(self.x)
        return out


class Again(EveryOutput):
    def read(self, x):
        return super().read(x)[:, -x.shape[1] :]


class Shared(Head):
    store = {}  # noqa: RUF012 (the mistake)

    @property
    def kept(self):
        return self.store.get(self.parts[0])

    @kept.setter
    def kept(self, value):
        if value is not None:
            self.store[self.parts[0]] = value


class OfTheClass(Head):
    """Keeps in the class what belongs to the object."""

    kept = None

    def __init__(self, q_proj, k_proj, v_proj, rope):
        self.parts, self.rope = (q_proj, k_proj, v_proj), rope

    def keep(self, k, v):
        OfTheClass.kept = super().keep(k, v)
        del self.kept
        return OfTheClass.kept


class Unturned(Head):
    """Keeps plain keys, and turns all of them by the positions of the new ones."""

    def read(self, x):
        T = x.shape[1]
        turn = self.rope(torch.arange(self.past, self.past + T)[None])
        q, k, v = (part(x)[:, None] for part in self.parts)
        k, v = self.keep(k, v)
        return attention(turn(q), k, v, mask=self.mask(T, k.shape[2]))[:, 0]


PREDICTED = {
    "positions computed without a cache": 2190,
    "positions computed with a cache": 119,
    "positions in the cache at the end": 119,
    "mask of the last step": (1, 119),
    "bytes of the cache at the end": 91_392,
}


def mended(model, cache, ids, num_new):
    new = ids
    for _ in range(num_new):
        logits = model(new, cache, first=cache.length)
        new = logits[:, -1:].argmax(-1)
        ids = torch.cat((ids, new), dim=1)
    return ids


def broken(model, cache, ids, num_new):
    new = ids
    for step in range(num_new):
        logits = model(new, cache, first=step)
        new = logits[:, -1:].argmax(-1)
        ids = torch.cat((ids, new), dim=1)
    return ids


def cold_only(model, cache, ids, num_new):
    new, prompt = ids, ids.shape[1]
    for step in range(num_new):
        logits = model(new, cache, first=prompt + step - 1 if step else 0)
        new = logits[:, -1:].argmax(-1)
        ids = torch.cat((ids, new), dim=1)
    return ids


def whole_text(model, cache, ids, num_new):
    for _ in range(num_new):
        ids = torch.cat((ids, model(ids, cache)[:, -1:].argmax(-1)), dim=1)
    return ids


def one_too_far(model, cache, ids, num_new):
    new = ids
    for step in range(num_new):
        logits = model(new, cache, first=cache.length + (step > 0))
        new = logits[:, -1:].argmax(-1)
        ids = torch.cat((ids, new), dim=1)
    return ids


def afresh(model, cache, ids, num_new):
    for _ in range(num_new):
        ids = torch.cat((ids, model(ids, type(cache)(0))[:, -1:].argmax(-1)), dim=1)
    return ids


def only_the_new(model, cache, ids, num_new):
    return mended(model, cache, ids, num_new)[:, ids.shape[1] :]


def finish(ids, end, pad, dim=1, keep=True):
    ended = (ids == end).int()
    after = ended.cumsum(dim) - (ended if keep else 0) > 0
    lengths = (ended.cumsum(1) - ended == 0).sum(1)
    return ids.masked_fill(after, pad), lengths


def finish_in_place(ids, end, pad):
    done, lengths = finish(ids, end, pad)
    return ids.copy_(done), lengths


def finish_short(ids, end, pad):
    done, lengths = finish(ids, end, pad)
    return done, lengths - (ids == end).any(1).int()


def first_end(ids, end, pad):  # argmax is 0 where there is no end
    return finish(ids, end, pad)[0], (ids == end).int().argmax(1) + 1


def not_pad(ids, end, pad):
    done, _ = finish(ids, end, pad)
    return done, (done != pad).sum(1)


def row_by_row(ids, end, pad):
    pairs = [finish(row[None], end, pad) for row in ids]
    return torch.cat([ids for ids, _ in pairs]), torch.cat([n for _, n in pairs])


def in_lists(ids, end, pad):
    done, lengths = [], []
    for row in ids.tolist():
        length = row.index(end) + 1 if end in row else len(row)
        done.append(row[:length] + [pad] * (len(row) - length))
        lengths.append(length)
    return torch.tensor(done), torch.tensor(lengths)


def ask(model, cache, held, ids):
    common = 0
    for old, new in zip(held, ids[:-1], strict=False):
        if old != new:
            break
        common += 1
    cache.crop(common)
    return model(torch.tensor([ids[common:]]), cache)[:, -1]


def from_nothing(model, cache, held, ids):
    cache.reset()
    return model(torch.tensor([ids]), cache)[:, -1]


def without_crop(model, cache, held, ids):
    return model(torch.tensor([ids[len(held) :] or ids[-1:]]), cache)[:, -1]


def nothing_left(model, cache, held, ids):
    common = 0
    while common < min(len(held), len(ids)) and held[common] == ids[common]:
        common += 1
    cache.crop(common)
    return model(torch.tensor([ids[common:]], dtype=torch.long), cache)[:, -1]


def all_logits(model, cache, held, ids):
    ask(model, cache, held, ids)
    cache.reset()
    return model(torch.tensor([ids]), cache)


class Forgets(Head):
    """Keeps no more than 32 positions."""

    seen = 0

    def first(self, T):
        self.seen += T
        return self.seen - T

    def keep(self, k, v):
        k, v = super().keep(k, v)
        self.kept = k[:, :, -32:], v[:, :, -32:]
        return k, v


def token_by_token(model, cache, held, ids):
    common = 0
    while common < min(len(held), len(ids) - 1) and held[common] == ids[common]:
        common += 1
    cache.crop(common)
    return [model(torch.tensor([[token]]), cache) for token in ids[common:]][-1][:, -1]


def into_held(model, cache, held, ids):
    logits = ask(model, cache, held, ids)
    held[:] = ids
    return logits


WRONG = [
    ("08.1", Restarts, "as if they stood at position 0"),
    ("08.1", Unmasked, "read those after them"),
    ("08.1", Corner, "aligned with the end"),
    ("08.1", EveryOutput, "should return what the new ones read"),
    ("08.1", Again, "a projection has seen"),
    ("08.1", Shared, "it belongs to the object"),
    ("08.1", OfTheClass, "it belongs to the object"),
    ("08.1", Unturned, "keys have to be turned"),
    ("08.1", Forgets, "1 new positions after 40"),
    ("08.2", {**PREDICTED, "positions computed without a cache": 2210}, "100 tokens, not 101"),
    ("08.2", {**PREDICTED, "positions computed with a cache": 120}, "nobody reads it"),
    ("08.2", {**PREDICTED, "positions in the cache at the end": 20}, "the prompt is kept"),
    ("08.2", {**PREDICTED, "mask of the last step": [119, 119]}, "has one query"),
    ("08.2", {**PREDICTED, "bytes of the cache at the end": 30_464}, "keeps its own"),
    ("08.2", {**PREDICTED, "bytes of the cache at the end": ...}, "not filled in yet"),
    ("08.2", {"positions": 119}, "with the five questions"),
    ("08.2", {**PREDICTED, "positions computed without a cache": "2190"}, "write a number"),
    ("08.3", broken, "after 4 others was put at 1"),
    ("08.3", cold_only, "after 6 in the cache: a token that comes after 6 others was put at 0"),
    ("08.3", whole_text, "give it the new token only"),
    ("08.3", one_too_far, "after 1 others was put at 2"),
    ("08.3", afresh, "another cache than the one given"),
    ("08.3", only_the_new, "the answer should be [[5,"),
    ("08.4", lambda ids, end, pad: finish(ids, end, pad, dim=0, keep=False), "neighbour"),
    ("08.4", lambda ids, end, pad: finish(ids, end, pad, keep=False), "the end 9 itself is gone"),
    ("08.4", lambda ids, end, pad: (ids, finish(ids, end, pad)[1]), "after the first 9"),
    ("08.4", finish_in_place, "work on a copy"),
    ("08.4", finish_short, "the end counts"),
    ("08.4", first_end, "is whole"),
    ("08.4", not_pad, "a 0 in the text is a token like others"),
    ("08.4", lambda ids, end, pad: finish(ids, end, pad)[0], "return two tensors"),
    ("08.4", lambda ids, end, pad: finish(ids, end, pad)[::-1], "the ids (B, T), then"),
    ("08.4", lambda ids, end, pad: (finish(ids, end, pad)[0], [2, 4, 5, 1]), "(B,)"),
    ("08.4", lambda ids, end, pad: (finish(ids, end, pad)[0], ids[:, :1]), "not (4, 5) and (4, 1)"),
    ("08.4", row_by_row, "you walk through rows"),
    ("08.4", in_lists, "you walk through rows"),
    ("08.4", lambda ids, end, pad: (torch.full_like(ids, pad), ids[:, 0]), "should become"),
    ("08.5", from_nothing, "5 positions computed, 2 would do"),
    ("08.5", without_crop, "the cache holds [4, 7, 2, 8, 5, 1] now"),
    ("08.5", nothing_left, "logits need at least one position"),
    ("08.5", all_logits, "(1, V), not (1, 3, 3)"),
    ("08.5", token_by_token, "in 3 passes"),
    ("08.5", into_held, "you changed the lists"),
]
