"""The best cut of a text and beam search, against brute force, transformers, scores recomputed."""

import math
import random
from functools import partial
from itertools import pairwise, product

import pytest
import torch

from minillm.deeper.generation.search import beam_search, exhaustive_search, viterbi_segment


def bigram(seed: int, size: int = 4):
    table = torch.randn(size, size, generator=torch.Generator().manual_seed(seed)).double() * 2
    return table, lambda ids: table[ids[:, -1]]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("length_penalty", [0.0, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("eos", [None, 2, {1, 2}])
def test_wide_beam_is_exhaustive(seed, length_penalty, eos):
    table, step = bigram(seed)
    options = {"max_new_tokens": 4, "length_penalty": length_penalty, "eos_token_id": eos}
    best = exhaustive_search(step, torch.tensor([0]), **options)
    found = beam_search(step, torch.tensor([0]), num_beams=256, **options)[0]
    assert found.ids == best.ids
    path, total = [0, *found.ids], 0.0
    for a, b in pairwise(path):
        total += float(table[a].log_softmax(-1)[b])
    assert found.log_prob == pytest.approx(total, abs=1e-12)
    assert found.score == pytest.approx(total / len(found.ids) ** length_penalty, abs=1e-12)


def llama(eos: int | list[int]):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=23, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, initializer_range=0.9,
        bos_token_id=1, eos_token_id=eos, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_beam_search_equals_transformers():
    model = llama(2)
    prompt = torch.tensor([1, 5, 9])
    theirs = model.generate(
        prompt[None], num_beams=5, num_return_sequences=3, max_new_tokens=6, do_sample=False,
        length_penalty=0.0, early_stopping="never", output_scores=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    with torch.no_grad():
        ours = beam_search(
            lambda ids: model(ids).logits[:, -1], prompt, num_beams=5, num_return=3,
            max_new_tokens=6, length_penalty=0.0, eos_token_id=2,
        )  # fmt: skip
    for one, row, score in zip(ours, theirs.sequences, theirs.sequences_scores, strict=True):
        new = row[3:].tolist()
        assert one.ids == (new[: new.index(2) + 1] if 2 in new else new)
        assert one.log_prob == pytest.approx(float(score), abs=1e-4)


@pytest.mark.parametrize("num_ends", [1, 2, 3, 4])
def test_a_beam_of_any_width_goes_on_while_its_path_can_win(num_ends):
    """One token goes on, all others end: then two beams are enough to find the best of all."""
    lengths = set()
    for seed, length_penalty in product(range(10), [0.0, 0.5, 1.0, 2.0]):
        table = torch.randn(8, num_ends + 1, generator=torch.Generator().manual_seed(seed)).double()
        table[2:, 0] += 2  # who goes on is rewarded later

        def step(ids, table=table):
            return table[ids.shape[1]].expand(len(ids), -1)

        options = {"max_new_tokens": 6, "length_penalty": length_penalty}
        options["eos_token_id"] = range(1, num_ends + 1)
        best = exhaustive_search(step, torch.tensor([0]), **options)
        for width in range(2, num_ends + 2):
            found = beam_search(step, torch.tensor([0]), num_beams=width, **options)[0]
            assert found.ids == best.ids and found.score == pytest.approx(best.score, abs=1e-12)
        lengths.add(len(best.ids))
    assert {1, 6} < lengths


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("eos", [[2], [2, 3, 7], list(range(2, 20))])
def test_beams_stop_where_transformers_never_stops_early(eos, length_penalty):
    model = llama(eos)

    def step(ids):
        return model(ids).logits[:, -1]

    for (width, num_return), start in product([(2, 1), (3, 2), (5, 3)], [1, 4, 21]):
        prompt = torch.tensor([start, 5, 9])
        options = {"num_beams": width, "max_new_tokens": 7, "length_penalty": length_penalty}
        theirs = model.generate(
            prompt[None], num_return_sequences=num_return, do_sample=False,
            early_stopping="never", **options,
        )  # fmt: skip
        ended = [next((i + 1 for i, t in enumerate(row) if t in eos), 7) for row in theirs[:, 3:]]
        with torch.no_grad():
            ours = beam_search(step, prompt, eos_token_id=eos, num_return=num_return, **options)
        wanted = [row[3 : 3 + n].tolist() for row, n in zip(theirs, ended, strict=True)]
        assert [h.ids for h in ours] == wanted


def test_beam_search_returns_n_best_in_order():
    _, step = bigram(1)
    found = beam_search(step, torch.tensor([0]), num_beams=64, max_new_tokens=3, num_return=5)
    assert len(found) == 5 and len({tuple(h.ids) for h in found}) == 5
    assert [h.score for h in found] == sorted((h.score for h in found), reverse=True)


def test_beam_search_keeps_the_minimum_length():
    table, step = bigram(3)
    table[:, 2] += 50  # the end token is nearly certain
    options = {"num_beams": 3, "max_new_tokens": 5, "eos_token_id": 2}
    assert beam_search(step, torch.tensor([0]), **options)[0].ids == [2]
    longer = beam_search(step, torch.tensor([0]), min_new_tokens=3, **options)[0].ids
    assert len(longer) == 3 and longer[-1] == 2 and 2 not in longer[:-1]
    never = beam_search(step, torch.tensor([0]), **options | {"min_new_tokens": 6})[0].ids
    assert len(never) == 5 and 2 not in never[:-1]


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("eos", [2, {1, 2}])
def test_a_beam_of_one_is_greedy(eos, length_penalty):
    ends, lengths = {eos} if isinstance(eos, int) else eos, set()
    for seed in range(20):
        table, step = bigram(seed)
        greedy = [0]
        while len(greedy) < 6 and not set(greedy[1:]) & ends:
            greedy.append(int(table[greedy[-1]].argmax()))
        options = {"num_beams": 1, "max_new_tokens": 5, "length_penalty": length_penalty}
        found = beam_search(step, torch.tensor([0]), eos_token_id=eos, **options)
        assert [h.ids for h in found] == [greedy[1:]]
        lengths.add(len(greedy))
    assert len(lengths) > 2


def test_an_end_leaves_the_beam_as_wide_as_it_was():
    table = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.01, 0.97, 0.01, 0.01], [0.3, 0.2, 0.5, 0]])
    found = beam_search(
        lambda ids: table[ids[:, -1]].log(), torch.tensor([2]), num_beams=2, max_new_tokens=2,
        length_penalty=0.0, eos_token_id={2, 3}, num_return=2,
    )  # fmt: skip
    assert [h.ids for h in found] == [[2], [1, 1]]  # [1] was third best, behind [2], which ended


def test_length_penalty_prefers_longer_sequences():
    table = torch.tensor([[0.1, 0.49, 0.41], [0.1, 0.1, 0.8], [1.0, 0.0, 0.0]]).log()
    for penalty, expected in ((0.0, [2]), (1.0, [1, 2])):  # .41 against .49 x .8 = .392
        found = beam_search(
            lambda ids: table[ids[:, -1]], torch.tensor([0]), num_beams=3, max_new_tokens=2,
            length_penalty=penalty, eos_token_id=2,
        )  # fmt: skip
        assert found[0].ids == expected


@pytest.mark.parametrize(
    "bad", [{"num_beams": 0}, {"max_new_tokens": 0}, {"num_return": 3}, {"length_penalty": -1.0}]
)
def test_searches_refuse(bad):
    options = {"num_beams": 2, "max_new_tokens": 3} | bad
    with pytest.raises(ValueError, match=r"num_return|length_penalty"):
        beam_search(bigram(0)[1], torch.tensor([0]), **options)


@pytest.mark.parametrize("length_penalty", [math.nan, math.inf, 1e4])
def test_searches_refuse_a_penalty_that_makes_no_numbers(length_penalty):
    words = rf"length_penalty and 3\*\*length_penalty must be finite, got {length_penalty}"
    for find in (exhaustive_search, partial(beam_search, num_beams=2)):
        with pytest.raises(ValueError, match=words):
            find(None, torch.tensor([0]), max_new_tokens=3, length_penalty=length_penalty)


def test_searches_refuse_ends_that_never_come_and_a_negative_minimum():
    for find in (exhaustive_search, partial(beam_search, num_beams=2)):
        for ends in ([4], [1, 99], [-1]):
            with pytest.raises(ValueError, match=r"end tokens \(.*\), but ids are 0..3"):
                find(bigram(0)[1], torch.tensor([0]), max_new_tokens=3, eos_token_id=ends)
    with pytest.raises(ValueError, match="min_new_tokens must not be negative: -1"):
        beam_search(None, torch.tensor([0]), num_beams=2, max_new_tokens=3, min_new_tokens=-1)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_searches_refuse_logits_that_are_no_numbers(value):
    def step(ids):
        return torch.tensor([[0.0, value, 1.0]]).expand(len(ids), 3)

    for find in (exhaustive_search, partial(beam_search, num_beams=2)):
        with pytest.raises(ValueError, match=r"logits hold NaN or \+inf"):
            find(step, torch.tensor([0]), max_new_tokens=2)
    with pytest.raises(ValueError, match=r"max_new_tokens \(0\)"):
        exhaustive_search(bigram(0)[1], torch.tensor([0]), max_new_tokens=0)


def brute_force(text, probs):
    if not text:
        return [[]]
    return [
        [text[:i], *r]
        for i in range(1, len(text) + 1)
        if text[:i] in probs
        for r in brute_force(text[i:], probs)
    ]


def test_viterbi_against_brute_force():
    rng = random.Random(0)
    for _ in range(200):
        words = ["a", "b", *{"".join(rng.choices("ab", k=rng.randint(2, 4))) for _ in range(6)}]
        probs = {word: rng.uniform(0.01, 1) for word in words}
        text = "".join(rng.choices("ab", k=rng.randint(0, 10)))
        found = viterbi_segment(text, probs)
        best = max(math.prod(probs[w] for w in cut) for cut in brute_force(text, probs))
        assert "".join(found) == text and math.isclose(math.prod(probs[w] for w in found), best)


def test_viterbi_on_chinese_and_on_the_unknown():
    probs = {"研究": 0.3, "研究生": 0.15, "生命": 0.25, "命": 0.02, "的": 0.2, "起源": 0.08}
    assert viterbi_segment("研究生命的起源", probs) == ["研究", "生命", "的", "起源"]
    assert viterbi_segment("研究X生命", probs) == ["研究", "X", "生命"]
    assert viterbi_segment("", probs) == [] and viterbi_segment("ab", {}) == ["a", "b"]
    assert len(viterbi_segment("研究" * 5000, probs)) == 5000
    with pytest.raises(ValueError, match="positive"):
        viterbi_segment("a", {"a": 0.0})
