"""Generation: token after token must equal the whole computed at once, however it is done."""

import copy
import dataclasses
import io
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from family_checkpoints import make, ragged
from torch._dynamo.testing import CompileCounter

from minillm.bpe import BPETokenizer
from minillm.config import ModelConfig
from minillm.deeper.generation.stream import stream_text
from minillm.deeper.pretrained.load import from_pretrained
from minillm.generation import generate
from minillm.model import CausalLM
from minillm.sampling import GREEDY, Sampler


@pytest.fixture(scope="module")
def tokenizer():
    texts = ["the cat sat on the mat, the dog ate the été hat"] * 4
    return BPETokenizer.train(texts, 300, special_tokens=("<|endoftext|>",))


def model(seed=0, vocab_size=300, **changes):
    config = ModelConfig(vocab_size, 32, 2, 4, 48, num_key_value_heads=2, initializer_range=0.3)
    config = ModelConfig(**{**vars(config), **changes})
    return CausalLM(config, seed=seed).eval()


SAMPLERS = {
    "greedy": lambda: GREEDY,
    "all at once": lambda: Sampler(
        temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2,
        presence_penalty=0.3, frequency_penalty=0.2, seed=5,
    ),
}  # fmt: skip
samplers = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)


def step_by_hand(m, row, count, sampler):
    """The definition: everything anew for each token, one row, no cache."""
    for _ in range(count):
        with torch.no_grad():
            drawn = sampler(m(row)[:, -1], row)
        row = torch.cat([row, drawn[:, None]], 1)
    return row


@samplers
@pytest.mark.parametrize("cache", ["dynamic", "static", "paged", None])
def test_every_cache_gives_the_definition(sampler, cache):
    m, prompt = model(), torch.tensor([[5, 7, 11]])
    found = generate(m, prompt, max_new_tokens=20, sampler=sampler(), cache=cache)
    assert torch.equal(found, step_by_hand(m, prompt, 20, sampler()))


@samplers
def test_a_ragged_batch_equals_its_rows_one_by_one(sampler):
    m, (ids, mask, _) = model(), ragged()
    chosen = sampler()
    together = generate(m, ids, attention_mask=mask, max_new_tokens=16, sampler=chosen)
    for row, padding in enumerate((mask == 0).sum(1).tolist()):
        own = chosen if chosen is GREEDY else only_row(chosen, row)
        alone = generate(m, ids[row : row + 1, padding:], max_new_tokens=16, sampler=own)
        assert torch.equal(together[row : row + 1, padding:], alone)


def only_row(sampler, row):
    """A new sampler like this one, for a batch of one that stands for that row."""
    return partial(dataclasses.replace(sampler), rows=[row])


@torch.no_grad()
def test_sampling_options_as_transformers(tmp_path):
    theirs = make("llama-3", tmp_path)
    ours, _ = from_pretrained(tmp_path)
    ids, mask, _ = ragged()
    options = {"attention_mask": mask, "max_new_tokens": 24}
    # theirs counts padding as tokens that occurred, so no padding here
    expected = theirs.generate(ids[:1], max_new_tokens=24, do_sample=False, repetition_penalty=1.3)
    found = generate(
        ours, ids[:1], max_new_tokens=24, sampler=Sampler(temperature=0, repetition_penalty=1.3)
    )
    assert torch.equal(found, expected)
    for eos in (7, [7, 50, 3]):
        expected = theirs.generate(ids, do_sample=False, eos_token_id=eos, **options)
        assert torch.equal(generate(ours, ids, eos_token_id=eos, **options), expected)


def test_rows_that_end_are_filled_and_the_rest_goes_on():
    m, prompt = model(pad_token_id=2), torch.tensor([[5, 7], [8, 9], [1, 4]])
    free = generate(m, prompt, max_new_tokens=12)
    eos = free[1, 5].item()
    stopped = generate(m, prompt, max_new_tokens=12, eos_token_id=eos)
    for row, full in zip(stopped.tolist(), free.tolist(), strict=True):
        new = full[2:]
        end = new.index(eos) + 1 if eos in new else len(new)
        assert row[2 : 2 + end] == new[:end] and set(row[2 + end :]) <= {2}
    assert generate(m, prompt[1:2], max_new_tokens=12, eos_token_id=eos).shape[1] <= 6
    no_pad = generate(model(), prompt, max_new_tokens=12, eos_token_id=eos)
    assert set(no_pad[1, 6:].tolist()) <= {eos}


def test_rows_that_end_at_different_times_are_drawn_as_alone():
    m, prompt = model(pad_token_id=2), torch.tensor([[5, 7], [8, 9], [1, 4], [3, 3]])
    ends, lengths = list(range(0, 300, 12)), set()
    options = {"max_new_tokens": 40, "eos_token_id": ends}
    together = generate(m, prompt, sampler=Sampler(temperature=1.5, seed=5), **options)
    for row in range(4):
        own = only_row(Sampler(temperature=1.5, seed=5), row)
        alone = generate(m, prompt[row : row + 1], sampler=own, **options)
        lengths.add(alone.shape[1])
        assert torch.equal(together[row : row + 1, : alone.shape[1]], alone)
        assert set(together[row, alone.shape[1] :].tolist()) <= {2}
    assert len(lengths) > 2


def test_the_configs_end_token_is_the_default():
    free = generate(model(), torch.tensor([[5, 7]]), max_new_tokens=12)
    eos = free[0, 6].item()
    m = model(eos_token_id=(eos, 299))
    first = free[0, 2:].tolist().index(eos)
    assert generate(m, torch.tensor([[5, 7]]), max_new_tokens=12).shape[1] == 3 + first
    assert generate(m, torch.tensor([[5, 7]]), max_new_tokens=12, eos_token_id=None).shape[1] == 14


def test_stop_strings_across_token_borders(tokenizer):
    m = model(vocab_size=tokenizer.vocab_size)
    prompt = torch.tensor([tokenizer.encode("the cat")])
    free = generate(m, prompt, max_new_tokens=30)[0, prompt.shape[1] :].tolist()
    text = tokenizer.decode(free)
    tested = 0
    for start in range(0, 20, 3):
        for length in (1, 4, 9):
            stop = text[start : start + length]
            if not stop or "�" in stop:
                continue
            found = generate(m, prompt, max_new_tokens=30, stop=stop, tokenizer=tokenizer)
            new = found[0, prompt.shape[1] :].tolist()
            shortest = next(n for n in range(1, 31) if stop in tokenizer.decode(free[:n]))
            assert new == free[:shortest]
            pieces = stream_text(m, tokenizer, prompt, max_new_tokens=30, stop=stop)
            assert "".join(pieces) == text[: text.index(stop)]
            tested += 1
    assert tested > 5


def test_a_row_that_has_ended_is_not_read_for_stop_strings(tokenizer):
    """It is filled with the pad token, which the tokenizer need not know."""
    vocab_size = tokenizer.vocab_size
    m, (ids, mask, _) = model(1, vocab_size + 1, pad_token_id=vocab_size), ragged()
    free = generate(m, ids, attention_mask=mask, max_new_tokens=12)
    assert (free < vocab_size).all()
    options = {"attention_mask": mask, "max_new_tokens": 12, "eos_token_id": free[1, -8].item()}
    found = generate(m, ids, stop="no such words", tokenizer=tokenizer, **options)
    assert torch.equal(found, generate(m, ids, **options)) and (found == vocab_size).any()


def test_ids_without_a_token_do_not_hide_a_stop_string(tokenizer):
    """A padded vocabulary: ids that no token has may stand between the parts of a stop string."""
    unknown, word = tokenizer.vocab_size + 5, tokenizer.encode("the cat")
    m = model(vocab_size=tokenizer.vocab_size + 20)
    plan = [*(unknown,) * 3, word[0], *(unknown,) * 20, *word[1:], unknown, word[0]]
    prompt = torch.tensor([tokenizer.encode("the")])

    def planned():
        ids = iter(plan)
        return lambda logits, previous: torch.tensor([next(ids)])

    options = {"max_new_tokens": len(plan), "stop": "the cat"}
    found = generate(m, prompt, sampler=planned(), tokenizer=tokenizer, **options)
    assert found[0, prompt.shape[1] :].tolist() == plan[:-2]
    assert "".join(stream_text(m, tokenizer, prompt, sampler=planned(), **options)) == ""
    del options["stop"]
    pieces = stream_text(m, tokenizer, prompt, sampler=planned(), **options)
    assert "".join(pieces) == tokenizer.decode(plan) == tokenizer.decode([*word, word[0]])


def test_ends_and_stops_may_be_tensors():
    m, prompt = model(), torch.tensor([[5, 7, 11]])
    free = generate(m, prompt, max_new_tokens=20)[0]
    end = free[8]
    expected = generate(m, prompt, max_new_tokens=20, eos_token_id=int(end))
    assert expected.shape[1] < free.numel()
    for ends in (end, end[None], [end], (end, 298), np.array([int(end)]), np.int64(end)):
        assert torch.equal(generate(m, prompt, max_new_tokens=20, eos_token_id=ends), expected)
    expected = generate(m, prompt, max_new_tokens=20, stop=[free[8:10].tolist()])
    assert expected.shape[1] < free.numel()
    for stop in (free[None, 8:10], [free[8:10]], [[*free[8:10]]], [(int(free[8]), free[9])]):
        assert torch.equal(generate(m, prompt, max_new_tokens=20, stop=stop), expected)
    with pytest.raises(ValueError, match="stop takes strings or sequences of ids"):
        generate(m, prompt, max_new_tokens=20, stop=free[8:10])


def test_stop_sequences_of_ids():
    m, prompt = model(), torch.tensor([[5, 7, 11]])
    free = generate(m, prompt, max_new_tokens=20)[0].tolist()
    found = generate(m, prompt, max_new_tokens=20, stop=[free[8:10], [298, 297]])[0].tolist()
    first = next(i for i in range(5, 24) if free[i - 2 : i] == free[8:10] and i > 4)
    assert found == free[:first]


def test_stream_text_joins_to_the_whole_in_whole_characters(tokenizer):
    m = model(seed=1, vocab_size=tokenizer.vocab_size)
    sampler = {"temperature": 1.5, "seed": 3}  # hot enough to break characters apart
    ids = torch.tensor([tokenizer.encode("the")])
    pieces = list(stream_text(m, tokenizer, "the", max_new_tokens=80, sampler=Sampler(**sampler)))
    whole = generate(m, ids, max_new_tokens=80, sampler=Sampler(**sampler))[0, 1:].tolist()
    assert "".join(pieces) == tokenizer.decode(whole)
    assert all(pieces) and len(pieces) > 20


def test_on_token_sees_each_step():
    m, prompt, seen = model(), torch.tensor([[5], [6]]), []
    found = generate(m, prompt, max_new_tokens=7, on_token=lambda ids: seen.append(ids.clone()))
    assert torch.equal(torch.stack(seen, 1), found[:, 1:])


def test_a_cache_that_already_holds_the_beginning():
    m, prompt = model(), torch.tensor([[5, 7, 11, 13, 17]])
    cache = m.make_cache(batch_size=1)
    with torch.no_grad():
        m(prompt[:, :3], cache=cache)
    calls = []
    hook = m.model.embed_tokens.register_forward_hook(
        lambda _, args, __: calls.append(args[0].shape[1])
    )
    found = generate(m, prompt, max_new_tokens=6, cache=cache.fork())
    hook.remove()
    assert calls == [2, 1, 1, 1, 1, 1] and cache.length == 3
    assert torch.equal(found, generate(m, prompt, max_new_tokens=6))
    with pytest.raises(ValueError, match=r"holds 3 positions of a prompt of 3.*crop\(2\)"):
        generate(m, prompt[:, :3], max_new_tokens=6, cache=cache)


def test_nothing_to_generate():
    prompt = torch.tensor([[5, 7]])
    assert torch.equal(generate(model(), prompt, max_new_tokens=0), prompt)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, x: generate(m, x[0], max_new_tokens=1), r"\(B, T\)"),
        (lambda m, x: generate(m, x[:, :0], max_new_tokens=1), r"at least one a row"),
        (lambda m, x: generate(m, x, max_new_tokens=-1), "-1"),
        (
            lambda m, x: generate(m, x, max_new_tokens=1, attention_mask=torch.tensor([[1, 0]])),
            "on the left",
        ),
        (
            lambda m, x: generate(m, x, max_new_tokens=1, attention_mask=torch.ones(1, 3)),
            "differ in shape",
        ),
        (lambda m, x: generate(m, x, max_new_tokens=1, stop="a"), "need a tokenizer"),
        (lambda m, x: generate(m, x, max_new_tokens=1, stop=[[]]), "must not be empty"),
        (lambda m, x: generate(m, x, max_new_tokens=1, stop=[5, 7]), r"as in \[\[5, 7\]\]"),
        (lambda m, x: generate(m, x, max_new_tokens=1, eos_token_id=300), r"ids are 0\.\.299"),
        (lambda m, x: generate(m, x, max_new_tokens=1, eos_token_id=[3, -1]), r"\(3, -1\)"),
        (lambda m, x: generate(m, x, max_new_tokens=1, stop=[[3, 300]]), r"ids \[300\], but"),
        (lambda m, x: generate(m, x, max_new_tokens=1, min_new_tokens=-5), "negative: -5"),
        (lambda m, x: generate(m, x, max_new_tokens=2.0), r"max_new_tokens .* not 2\.0"),
        (lambda m, x: generate(m, x.tolist(), max_new_tokens=2), r"must be tensors, not \[\["),
        (lambda m, x: generate(m, x, max_new_tokens="2"), "max_new_tokens .* not '2'"),
        (lambda m, x: generate(m, x, max_new_tokens=None), "max_new_tokens .* not None"),
        (
            lambda m, x: generate(m, x + 295, max_new_tokens=1),
            "id 302, the vocabulary ids 0 to 299",
        ),
        (lambda m, x: generate(m, x.bool(), max_new_tokens=1), "torch.bool"),
        (lambda m, x: generate(m, x, max_new_tokens=1, compile=True), "static"),
    ],
)
def test_calls_that_make_no_sense(call, message):
    with pytest.raises(ValueError, match=message):
        call(model(), torch.tensor([[5, 7]]))


def test_a_copy_of_a_compiled_model_computes_with_its_own_weights():
    torch._dynamo.reset()
    m, prompt = model(), torch.tensor([[5, 7, 11]])
    m.compiled_run = torch.compile(m.run, dynamic=False, backend="eager")
    options = {"max_new_tokens": 8, "cache": "static"}
    before = generate(m, prompt, compile=True, **options)
    other = copy.deepcopy(m)
    assert not hasattr(other, "compiled_run")  # what follows would compile with g++
    other.compiled_run = torch.compile(other.run, dynamic=False, backend="eager")
    other.reset_parameters(seed=1)
    assert torch.equal(generate(m, prompt, compile=True, **options), before)
    found = generate(other, prompt, compile=True, **options)
    assert torch.equal(found, generate(model(seed=1), prompt, max_new_tokens=8))
    torch.save(m, io.BytesIO())


def test_prompts_of_nearly_one_length_share_what_is_compiled():
    torch._dynamo.reset()
    counter = CompileCounter()  # no C++ needed
    m = model()
    m.compiled_run = torch.compile(m.run, dynamic=False, backend=counter)
    for length in range(2, 14):
        prompt = torch.arange(1, length + 1)[None]
        found = generate(m, prompt, max_new_tokens=4, cache="static", compile=True)
        assert torch.equal(found, generate(m, prompt, max_new_tokens=4))
    assert counter.frame_count == 1


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_static_decoding_gives_the_same_ids_and_compiles_once():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    m, (ids, mask, _) = model(num_hidden_layers=1), ragged()  # g++ takes seconds for each layer
    for _ in range(2):
        found = generate(
            m, ids, attention_mask=mask, max_new_tokens=12, cache="static", compile=True
        )
        assert torch.equal(found, generate(m, ids, attention_mask=mask, max_new_tokens=12))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_a_static_cache_is_compiled_once_and_a_growing_one_each_time():
    torch._dynamo.reset()
    counter = CompileCounter()  # no C++ needed
    m, prompt = model(), torch.tensor([[5, 7, 11], [1, 2, 3]])
    m.compiled_run = torch.compile(m.run, dynamic=False, backend=counter)
    found = generate(m, prompt, max_new_tokens=20, cache="static", compile=True)
    assert torch.equal(found, generate(m, prompt, max_new_tokens=20)) and counter.frame_count == 1
    growing = m.make_cache(batch_size=2)
    with torch.inference_mode():
        for t in range(3):
            m.compiled_run(prompt[:, t : t + 1].clone(), torch.tensor([[t]]), None, False, growing)
    assert counter.frame_count == 4


AUTOCAST_FAMILIES = {
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2},
    "gemma": {"num_key_value_heads": 1},
    "gpt2": {"num_key_value_heads": 4},
    "falcon": {"num_key_value_heads": 1},
    "deepseek_v3": {
        "num_key_value_heads": 4, "kv_lora_rank": 16,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "head_dim": None,
    },
}  # fmt: skip


def assert_best_to_bfloat16(m, rows, mask):
    """Each new token is the best one, as far as logits with the errors of bfloat16 can tell.

    Two caches may round a sum in another order, so that one of two tokens whose logits lie within
    an error of each other wins here, the other there: on which processor, nobody can promise. But
    if no logit is off by more than `error`, no token more than twice that below the best is drawn.
    """
    with torch.no_grad():
        exact = m(rows[:, :-1], attention_mask=mask[:, :-1])[:, -10:]
        with torch.autocast("cpu", torch.bfloat16):
            rounded = m(rows[:, :-1], attention_mask=mask[:, :-1])[:, -10:].float()
    error = (rounded - exact).abs().amax()
    assert error < 0.1 * exact.abs().amax()
    drawn = exact.gather(-1, rows[:, -10:, None])[..., 0]
    assert (drawn >= exact.amax(-1) - 2 * 1.5 * error).all()  # another order: half as much again


@pytest.mark.parametrize("family", AUTOCAST_FAMILIES)
def test_generation_under_autocast(family):
    """Keys and values come in bfloat16 there, from float32 weights; every cache must take them."""
    sizes = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 48, "initializer_range": 0.3, "model_type": family}
    m, (ids, mask, _) = CausalLM(ModelConfig(**sizes, **AUTOCAST_FAMILIES[family])), ragged()
    m.eval()
    options = {"attention_mask": mask, "max_new_tokens": 10}
    for kind in ("dynamic", "static", "paged"):
        with torch.autocast("cpu", torch.bfloat16):
            rows = generate(m, ids, cache=kind, **options)
        assert_best_to_bfloat16(m, rows, torch.cat([mask, torch.ones(3, 10, dtype=mask.dtype)], 1))
    with torch.autocast("cpu", torch.bfloat16):
        assert m.make_cache(batch_size=1)[0].dtype == torch.bfloat16
        own = m.make_cache(batch_size=1, dtype=torch.float16)[0].dtype
        assert own == torch.float16  # who asks gets what was asked for
        cache = m.make_cache(batch_size=len(ids))
        with torch.no_grad():  # one shot and in two pieces, to bfloat16's precision
            whole = m(ids, attention_mask=mask)
            m(ids[:, :-1], attention_mask=mask[:, :-1], cache=cache)
            last = m(ids[:, -1:], attention_mask=mask, cache=cache)
    gap = (whole[:, -1:].float() - last.float()).abs().max()
    assert gap < 0.05 * whole[:, -1].float().abs().max()
    assert m.make_cache(batch_size=1)[0].dtype == torch.float32


def test_float64_is_not_touched_by_autocast():
    m, prompt = model().double(), torch.tensor([[5, 7, 11]])
    with torch.autocast("cpu", torch.bfloat16):
        assert m.make_cache(batch_size=1)[0].dtype == torch.float64
        assert torch.equal(
            generate(m, prompt, max_new_tokens=8), step_by_hand(m, prompt, 8, GREEDY)
        )


def test_mistral_generates_past_its_window_with_any_cache(tmp_path):
    theirs = make("mistral", tmp_path)
    ours, _ = from_pretrained(tmp_path)
    ids, mask, _ = ragged()
    options = {"attention_mask": mask, "max_new_tokens": 20}
    expected = theirs.generate(ids, do_sample=False, **options)
    for cache in ("sliding", "dynamic", "static"):
        assert torch.equal(generate(ours, ids, cache=cache, **options), expected)


def test_a_minimum_length_holds_off_end_tokens_as_transformers_does(tmp_path):
    theirs = make("llama-3", tmp_path)
    m, _ = from_pretrained(tmp_path)
    ids, mask, _ = ragged()
    free = generate(m, ids, attention_mask=mask, max_new_tokens=12, eos_token_id=None)
    ends = sorted(set(free[:, 21:25].flatten().tolist()))  # greedy would end at once
    options = {"max_new_tokens": 12, "min_new_tokens": 6, "eos_token_id": ends}
    found = generate(m, ids, attention_mask=mask, **options)
    expected = theirs.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **options)
    assert torch.equal(found, expected)
    assert not torch.isin(found[:, 21:27], torch.tensor(ends)).any()
    at_once = generate(m, ids, attention_mask=mask, max_new_tokens=12, eos_token_id=ends)
    assert at_once.shape[1] == 22  # without a minimum all rows end with their first token


@pytest.mark.parametrize(
    ("drawn", "found"),
    [
        (lambda x: x.argmax(-1) + 0.7, r"torch.float32 \(2,\)"),
        (lambda x: x.argmax(-1, keepdim=True), r"torch.int64 \(2, 1\)"),
        (lambda x: x.argmax(-1)[:1], r"torch.int64 \(1,\)"),
        (lambda x: x.argmax(), r"torch.int64 \(\)"),
        (lambda x: x.argmax(-1) > 0, r"torch.bool \(2,\)"),
        (lambda x: x.argmax(-1).tolist(), r"\[\d+, \d+\]"),
        (lambda x: None, "None"),
    ],
)
def test_what_a_sampler_returns_is_one_id_a_row(drawn, found):
    m, seen = model(), []
    message = rf"a sampler must return ids, int64 or int32 \(2,\), not {found}"
    with pytest.raises(ValueError, match=message):
        generate(
            m, torch.tensor([[5, 7], [8, 9]]), max_new_tokens=3, on_token=seen.append,
            sampler=lambda logits, previous_ids: drawn(logits),
        )  # fmt: skip
    assert not seen


def test_ids_of_32_bits_are_ids():
    m, prompt = model(), torch.tensor([[5, 7], [8, 9]])
    short = generate(m, prompt, max_new_tokens=5, sampler=lambda x, _: x.argmax(-1).int())
    assert torch.equal(short, generate(m, prompt, max_new_tokens=5))


# Dropout is for training

PROMPT = torch.tensor([[5, 7, 11, 13, 17, 19, 23, 29]])


def dropping(seed=0, **changes):
    """A model as it is built, or as a `Trainer` leaves it: in training mode, with dropout."""
    return model(seed, attention_dropout=0.5, **changes).train()


def modes(m):
    return [part.training for part in m.modules()]


@pytest.mark.parametrize("cache", ["dynamic", "static", None])
def test_nothing_is_dropped_while_a_model_generates(cache):
    m, expected = dropping(), generate(model(), PROMPT, max_new_tokens=12, cache=cache)
    m.model.layers[1].eval()  # a part that is not trained
    before = modes(m)
    assert torch.equal(generate(m, PROMPT, max_new_tokens=12, cache=cache), expected)
    assert modes(m) == before and m.training and not m.model.layers[1].self_attn.training
    m.eval()
    m.model.layers[0].self_attn.train()  # as one that was put in afterwards
    before = modes(m)
    assert torch.equal(generate(m, PROMPT, max_new_tokens=12, cache=cache), expected)
    assert modes(m) == before


def test_nothing_is_dropped_while_a_packed_model_generates():
    m = dropping()
    packed = m.packed()
    expected = generate(model().packed(), PROMPT, max_new_tokens=12)
    assert torch.equal(generate(packed, PROMPT, max_new_tokens=12), expected)
    assert all(modes(m)) and not packed.training


def test_an_error_gives_the_mode_back():
    m = dropping()

    def stop(drawn):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(m, PROMPT, max_new_tokens=3, on_token=stop)
    assert all(modes(m))
    with pytest.raises(ValueError, match="must return ids"):
        generate(m, PROMPT, max_new_tokens=3, sampler=lambda x, _: x)
    assert all(modes(m))


def test_between_the_pieces_of_a_text_the_model_is_as_the_caller_left_it(tokenizer):
    m, options = dropping(vocab_size=tokenizer.vocab_size), {"max_new_tokens": 20}
    expected = list(stream_text(copy.deepcopy(m).eval(), tokenizer, "the cat sat", **options))
    pieces = stream_text(m, tokenizer, "the cat sat", **options)
    other = stream_text(m, tokenizer, "the cat sat", **options)  # at the same time
    for piece in expected:
        assert next(pieces) == piece and next(other) == piece
        assert all(modes(m))
    pieces = stream_text(m, tokenizer, "the cat sat", **options)
    next(pieces)
    m.eval()
    pieces.close()  # what is closed late changes nothing any more
    assert not any(modes(m))


# Absurd lengths: what is asked for costs nothing until it is there

ENDLESS = 10**15  # ids for all of it would be 8 petabytes


def ends_after(count):
    """A sampler that draws 3, and then the end token 2."""
    return lambda logits, ids: torch.full((len(ids),), 3 if ids.shape[1] < count else 2)


@pytest.mark.parametrize("cache", ["dynamic", "quantized", "paged", None])
@pytest.mark.parametrize("padded", [False, True])
def test_room_is_taken_as_tokens_come(cache, padded):
    ids = torch.tensor([[5, 7, 11], [4, 6, 8]])
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]]) if padded else None
    how = {"sampler": ends_after(9), "eos_token_id": 2, "attention_mask": mask, "cache": cache}
    found = generate(model(), ids, max_new_tokens=ENDLESS, **how)
    assert found.shape == (2, 10) and found[:, 3:].tolist() == [[3] * 6 + [2]] * 2


def test_a_stream_takes_room_as_tokens_come(tokenizer):
    m = model(eos_token_id=2)
    how = {"sampler": ends_after(12), "max_new_tokens": ENDLESS}
    assert "".join(stream_text(m, tokenizer, torch.tensor([[5, 7]]), **how)) == "\x03" * 10


@pytest.mark.parametrize("compile", [False, True])
def test_a_static_cache_has_no_more_room_than_the_model_has_positions(compile):
    m, ids = model(max_position_embeddings=60), torch.tensor([[5, 7, 11]])
    how = {"cache": "static", "sampler": ends_after(9), "eos_token_id": 2}
    said = rf"a prompt of 3 and max_new_tokens={ENDLESS}, but this model has 60 positions"
    with pytest.raises(ValueError, match=said):
        generate(m, ids, max_new_tokens=ENDLESS, compile=compile, **how)
    with pytest.raises(ValueError, match="max_new_tokens=58"):
        generate(m, ids, max_new_tokens=58, **how)
    assert generate(m, ids, max_new_tokens=57, **how).shape == (1, 10)


def test_a_scaling_counts_as_positions():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 30}
    m = model(max_position_embeddings=60, rope_scaling=scaling)
    how = {"cache": "static", "sampler": ends_after(9), "eos_token_id": 2}
    assert generate(m, torch.tensor([[5]]), max_new_tokens=119, **how).shape == (1, 10)
    with pytest.raises(ValueError, match="this model has 120 positions"):
        generate(m, torch.tensor([[5]]), max_new_tokens=120, **how)


def test_a_ring_is_no_longer_than_what_may_come():
    m, ids = model(sliding_window=2**31 - 1), torch.tensor([[5, 7, 11]])
    cache = m.make_cache("sliding", batch_size=1, max_length=20)
    assert sum(b.nbytes for b in cache[0]._buffers) < 10_000
    expected = generate(m, ids, max_new_tokens=17)
    assert torch.equal(generate(m, ids, max_new_tokens=17, cache=cache), expected)
    with pytest.raises(ValueError, match=r"cache='sliding' reserves no more"):
        generate(m, ids, max_new_tokens=ENDLESS, cache="sliding")


def test_a_sampler_sees_the_prompt_and_what_was_drawn_and_the_prompt_stays():
    seen, ids = [], torch.tensor([[5, 7, 11]])

    def keep(logits, previous):
        seen.append(previous.tolist())
        return torch.tensor([len(seen)], dtype=torch.int32)

    generate(model(), ids, max_new_tokens=3, sampler=keep, eos_token_id=None)
    assert seen == [[[5, 7, 11]], [[5, 7, 11, 1]], [[5, 7, 11, 1, 2]]]
    assert ids.tolist() == [[5, 7, 11]]
