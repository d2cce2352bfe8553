"""Encoder and decoder against BART, Marian and torch; masks, memory, generation, bad input."""

import copy
import math
import re
from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from seq2seq_checkpoints import CASES, batch, pair
from transformers.models.bart.modeling_bart import shift_tokens_right
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

from minillm.beyond.two_sequences.cross import CrossAttention
from minillm.beyond.two_sequences.seq2seq import (
    DecoderLayer,
    EncoderDecoder,
    EncoderLayer,
    Prompt,
    Seq2SeqConfig,
    shift_right,
    sinusoids,
)
from minillm.deeper.caches.kinds import CACHE_KINDS
from minillm.generation import generate
from minillm.sampling import Sampler

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SIZES = {"vocab_size": 40, "d_model": 16, "max_position_embeddings": 24, "init_std": 0.3}


def model_of(seed=0, **changes):
    return EncoderDecoder(Seq2SeqConfig(**{**SIZES, **changes}), seed=seed).eval()


def theirs_name(name):
    name = name.replace(".o_proj.", ".out_proj.")
    return name if name.startswith("lm_head") else f"model.{name}"


@pytest.fixture(params=CASES)
def both(request, tmp_path):
    return pair(request.param, tmp_path)


def test_logits_and_gradients_are_those_of_transformers(both):
    theirs, ours = both
    x, y, x_mask, y_mask = batch()
    for masks in ({}, {"attention_mask": x_mask, "decoder_attention_mask": y_mask}):
        kept = y_mask.bool() if masks else torch.ones_like(y).bool()
        expected = theirs(input_ids=x, decoder_input_ids=y, **masks).logits
        mine = ours(x, y, **masks)
        torch.testing.assert_close(mine[kept], expected[kept], atol=1e-5, rtol=1e-5)
        toward = torch.randn(mine.shape, generator=torch.Generator().manual_seed(1))
        toward = toward * kept[..., None] / kept.sum()  # a loss is a mean over tokens
        for model, output in ((theirs, expected), (ours, mine)):
            model.zero_grad()
            (output * toward).sum().backward()
        named = dict(theirs.named_parameters(remove_duplicate=False))
        for name, p in ours.named_parameters():
            if p.requires_grad:
                other = named[theirs_name(name)].grad
                torch.testing.assert_close(p.grad, other, atol=1e-5, rtol=1e-5)


def test_greedy_generation_is_that_of_transformers_token_by_token(both):
    theirs, ours = both
    x, _, x_mask, _ = batch()
    for new in (1, 2, 15):
        for mask in (None, x_mask):
            given = {"attention_mask": mask, "max_new_tokens": new}
            expected = theirs.generate(x, num_beams=1, do_sample=False, **given)
            assert ours.generate(x, **given).tolist() == expected.tolist()


@pytest.mark.parametrize("forced", [{"forced_bos_token_id": 7}, {"forced_eos_token_id": 8}])
@pytest.mark.parametrize("name", ["bart", "marian", "bart-untied"])
def test_forced_tokens_are_those_of_transformers(name, forced, tmp_path):
    theirs, _ = pair(name, tmp_path)
    for key, value in forced.items():
        setattr(theirs.generation_config, key, value)
    theirs.save_pretrained(tmp_path)
    ours = EncoderDecoder.from_pretrained(tmp_path)
    x, *_ = batch()
    found = ours.generate(x, max_new_tokens=6, eos_token_id=None)
    assert found.tolist() == theirs.generate(x, max_new_tokens=6, min_new_tokens=6).tolist()
    column = 1 if "forced_bos_token_id" in forced else -1
    assert set(found[:, column].tolist()) == set(forced.values())


def test_a_beginning_is_continued_as_transformers_does(both):
    theirs, ours = both
    x, *_ = batch()
    start = ours.config.decoder_start_token_id
    begun = torch.tensor([[start, 5, 6], [start, 7, 8], [start, 9, 9]])
    expected = theirs.generate(x, decoder_input_ids=begun, max_new_tokens=6)
    assert ours.generate(x, decoder_input_ids=begun, max_new_tokens=6).tolist() == expected.tolist()


def test_pad_tokens_of_a_source_are_padding_in_generation_only(tmp_path):
    theirs, ours = pair("bart", tmp_path)
    x, y, *_ = batch()
    x[0, -3:] = ours.config.pad_token_id
    expected = theirs.generate(x, max_new_tokens=8)
    assert ours.generate(x, max_new_tokens=8).tolist() == expected.tolist()
    mask = x.ne(ours.config.pad_token_id).long()
    assert ours.generate(x, attention_mask=mask, max_new_tokens=8).tolist() == expected.tolist()
    with torch.no_grad():
        plain = theirs(input_ids=x, decoder_input_ids=y).logits
        torch.testing.assert_close(ours(x, y), plain, atol=1e-5, rtol=1e-5)
        assert (ours(x, y, attention_mask=mask) - plain).abs().max() > 1e-3


def test_right_padding_of_a_source_changes_nothing():
    model, (x, y, *_) = model_of(vocab_size=50), batch()
    mask = torch.ones_like(x)
    mask[0, 5:] = 0
    with torch.no_grad():
        alone = model(x[:1, :5], y[:1])
        torch.testing.assert_close(model(x, y, attention_mask=mask)[:1], alone, atol=1e-5, rtol=0)
    several = model.generate(x, attention_mask=mask, max_new_tokens=9, eos_token_id=None)
    one = model.generate(x[:1, :5], max_new_tokens=9, eos_token_id=None)
    assert several[:1].tolist() == one.tolist()


# ---- the parts ----


@pytest.mark.parametrize(("size", "heads"), [(24, 4), (10, 1), (6, 6)])
@pytest.mark.parametrize("padded", [False, True])
def test_cross_attention_is_that_of_torch(size, heads, padded):
    torch.manual_seed(0)
    ours = CrossAttention(size, heads)
    theirs = torch.nn.MultiheadAttention(size, heads, batch_first=True)
    projections = (ours.q_proj, ours.k_proj, ours.v_proj)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([p.weight for p in projections]))
        theirs.in_proj_bias.copy_(torch.cat([p.bias for p in projections]))
        theirs.out_proj.load_state_dict(ours.o_proj.state_dict())
    x, other = torch.randn(2, 5, size), torch.randn(2, 7, size)
    real = torch.ones(2, 7, dtype=torch.bool)
    real[1, 4:] = not padded
    y = ours(x, ours.keys_values(other), mask=real[:, None, None])
    expected, _ = theirs(x, other, other, key_padding_mask=~real)
    torch.testing.assert_close(y, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("positions", "size"), [(1, 1), (7, 2), (30, 21), (64, 24)])
def test_sinusoids_are_those_of_marian(positions, size):
    theirs = MarianSinusoidalPositionalEmbedding(positions, size).create_weight()
    torch.testing.assert_close(sinusoids(positions, size), theirs, atol=1e-6, rtol=0)


@given(st.lists(st.integers(0, 39) | st.just(-100), min_size=1, max_size=8))
@settings(deadline=None)
def test_the_shift_is_that_of_transformers(labels):
    rows = torch.tensor([labels, labels[::-1]])
    before = rows.clone()
    config = Seq2SeqConfig(**SIZES, pad_token_id=3, decoder_start_token_id=5)
    assert torch.equal(shift_right(rows, config), shift_tokens_right(rows, 3, 5))
    assert torch.equal(rows, before)


@torch.no_grad()
def test_the_encoder_reads_in_both_directions_and_the_decoder_backwards():
    model, (x, y, *_) = model_of(vocab_size=50), batch()
    changed = x.clone()
    changed[:, -1] = 49
    keys, moved = (model.encode(ids).keys_values[0][0] for ids in (x, changed))
    assert (keys - moved).abs().amax((0, 1, 3)).min() > 1e-4
    later = y.clone()
    later[:, 4] = 49
    difference = (model(x, y) - model(x, later)).abs().amax((0, 2))
    assert difference[:4].max() == 0 and difference[4:].min() > 1e-4


@torch.no_grad()
def test_padding_is_read_by_nobody():
    model, (x, y, x_mask, y_mask) = model_of(vocab_size=50), batch()
    other = torch.where(x_mask.bool(), x, 17), torch.where(y_mask.bool(), y, 18)
    masks = {"attention_mask": x_mask, "decoder_attention_mask": y_mask}
    kept = y_mask.bool()
    assert torch.equal(model(x, y, **masks)[kept], model(*other, **masks)[kept])


# ---- memory and caches ----


def test_the_source_is_read_once():
    model = model_of(decoder_layers=3)
    calls = Counter()
    for layer in model.decoder.layers:
        for kind, part in (("cross", layer.encoder_attn), ("self", layer.self_attn)):
            for proj in (part.k_proj, part.v_proj):
                proj.register_forward_hook(
                    lambda m, i, out, kind=kind: calls.update(
                        {kind: 1, f"{kind} keys": out.shape[1]}
                    )
                )
    model.generate(torch.arange(3, 14)[None], max_new_tokens=12, eos_token_id=None)
    assert calls == {"cross": 6, "cross keys": 6 * 11, "self": 6 * 12, "self keys": 6 * 12}


@torch.no_grad()
@pytest.mark.parametrize("kind", [k for k in CACHE_KINDS if k not in ("sliding", "quantized")])
def test_every_cache_gives_the_logits_of_no_cache(kind):
    model, (x, y, x_mask, y_mask) = model_of(vocab_size=50), batch()
    y_mask[:, -2:] = 1
    memory = model.encode(x, attention_mask=x_mask)
    for mask in (None, y_mask):
        whole = model.decode(y, memory, attention_mask=mask)
        cache = model.make_cache(kind, batch_size=3, max_length=7)
        parts = []
        for start, end in ((0, 3), (3, 4), (4, 6), (6, 7)):
            now = None if mask is None else mask[:, :end]
            parts.append(model.decode(y[:, start:end], memory, attention_mask=now, cache=cache))
        kept = torch.ones_like(y).bool() if mask is None else mask.bool()
        torch.testing.assert_close(torch.cat(parts, 1)[kept], whole[kept], atol=1e-5, rtol=1e-5)
        assert cache.length == 7 and memory.keys_values[0][0].shape[2] == 9


@pytest.mark.parametrize("cache", ["static", "paged", None])
def test_generation_does_not_depend_on_the_cache(cache):
    model, (x, _, x_mask, _) = model_of(vocab_size=50), batch()
    given = {"attention_mask": x_mask, "max_new_tokens": 10, "eos_token_id": None}
    assert torch.equal(model.generate(x, cache=cache, **given), model.generate(x, **given))


def test_a_left_padded_beginning_goes_on_with_its_mask(tmp_path):
    theirs, ours = pair("bart", tmp_path)
    x, *_ = batch()
    start = ours.config.decoder_start_token_id
    begun = torch.tensor([[start, 5, 6], [1, start, 8], [1, 1, start]])
    mask = torch.tensor([[1, 1, 1], [0, 1, 1], [0, 0, 1]])
    found = ours.generate(
        x, decoder_input_ids=begun, decoder_attention_mask=mask, max_new_tokens=5, eos_token_id=None
    )
    for _ in range(4):  # transformers prepends a start token, so step by step with its forward
        with torch.no_grad():
            logits = theirs(
                input_ids=x, decoder_input_ids=begun, decoder_attention_mask=mask
            ).logits[:, -1]
        begun = torch.cat([begun, logits.argmax(-1, keepdim=True)], dim=1)
        mask = F.pad(mask, (0, 1), value=1)
    assert torch.equal(found[:, :-1], begun)


def test_sampling_is_seeded_and_stays_in_the_nucleus():
    model, (x, *_) = model_of(vocab_size=50), batch()
    given = {"max_new_tokens": 8, "eos_token_id": None}
    a, b = (model.generate(x, sampler=Sampler(temperature=1.5, seed=4), **given) for _ in range(2))
    assert torch.equal(a, b)
    other = model.generate(x, sampler=Sampler(temperature=1.5, seed=5), **given)
    greedy = model.generate(x, sampler=Sampler(top_k=1, seed=5), **given)
    assert not torch.equal(a, other) and torch.equal(greedy, model.generate(x, **given))


def test_a_writer_is_a_language_model_to_generate():
    model, (x, *_) = model_of(vocab_size=50), batch()
    start = torch.full((3, 1), model.config.decoder_start_token_id)
    seen = []
    with torch.no_grad():
        prompt = Prompt(model, model.encode(x))
    found = generate(prompt, start, max_new_tokens=5, eos_token_id=None, on_token=seen.append)
    assert torch.equal(found, model.generate(x, max_new_tokens=5, eos_token_id=None))
    assert len(seen) == 5


def test_it_learns_and_everything_gets_a_gradient():
    """Copying a short text backwards, which needs both texts."""
    config = Seq2SeqConfig(
        12, d_model=32, encoder_layers=1, decoder_layers=1, init_std=0.15,
        max_position_embeddings=8, pad_token_id=0, decoder_start_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = EncoderDecoder(config, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(250):
        x = torch.randint(3, 12, (32, 5), generator=generator)
        y = F.pad(x.flip(1), (0, 1), value=2)
        loss = F.cross_entropy(model(x, shift_right(y, config)).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())
    x = torch.randint(3, 12, (50, 5), generator=generator)
    found = model.eval().generate(x, max_new_tokens=6)
    assert (found[:, 1:] == F.pad(x.flip(1), (0, 1), value=2)).all(1).float().mean() > 0.9


def test_initial_weights_follow_seed_and_size():
    one, same, other = (model_of(seed, vocab_size=500, d_model=64) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert abs(one.lm_head.weight.std() / 0.3 - 1) < 0.05
    assert one.encoder.embed_tokens.weight is one.lm_head.weight
    assert one.lm_head.weight[one.config.pad_token_id].abs().max() == 0
    state = torch.random.get_rng_state()
    model_of()
    assert torch.equal(state, torch.random.get_rng_state())


def test_dropout_only_in_training_and_everywhere():
    x, y, *_ = batch()
    for name in ("dropout", "attention_dropout", "activation_dropout"):
        model = model_of(vocab_size=50, **{name: 0.5})
        assert torch.equal(model(x, y), model(x, y))
        model.train()
        assert not torch.equal(model(x, y), model(x, y))


def test_training_with_dropout_draws_as_transformers(tmp_path):
    theirs, ours = pair("bart", tmp_path, dropout=0.2, activation_dropout=0.1)
    x, y, *_ = batch()
    found = []
    for call in (
        partial(theirs.train(), input_ids=x, decoder_input_ids=y),
        partial(ours.train(), x, y),
    ):
        torch.manual_seed(5)
        out = call()
        found.append(out if isinstance(out, torch.Tensor) else out.logits)
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_sixteen_bits_stay_sixteen_bits(dtype):
    model, (x, y, x_mask, _) = model_of(vocab_size=50).to(dtype), batch()
    logits = model(x, y, attention_mask=x_mask)
    assert logits.dtype == dtype and logits.isfinite().all()
    assert model.generate(x, max_new_tokens=4, eos_token_id=None).shape == (3, 5)


def test_a_layer_is_what_torch_says():
    """Post-norm: torch's encoder layer with norm_first=False."""
    config = Seq2SeqConfig(**SIZES, encoder_ffn_dim=20, activation_function="relu")
    ours = EncoderLayer(config).eval()
    theirs = torch.nn.TransformerEncoderLayer(16, 4, 20, dropout=0.0, batch_first=True).eval()
    attention = ours.self_attn
    with torch.no_grad():
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        theirs.self_attn.in_proj_weight.copy_(torch.cat([p.weight for p in projections]))
        theirs.self_attn.in_proj_bias.copy_(torch.cat([p.bias for p in projections]))
        theirs.self_attn.out_proj.load_state_dict(attention.o_proj.state_dict())
        theirs.linear1.load_state_dict(ours.fc1.state_dict())
        theirs.linear2.load_state_dict(ours.fc2.state_dict())
    x = torch.randn(2, 6, 16)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-5)
    layer = DecoderLayer(config).eval()
    memory = layer.encoder_attn.keys_values(x)
    assert layer(torch.randn(2, 3, 16), memory, is_causal=True).shape == (2, 3, 16)


# ---- bad input ----

ONE = torch.tensor([[5, 6, 7]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.encode(torch.tensor([[5, 40]])), "input_ids hold 40, .* ids 0 to 39"),
        (lambda m: m.encode(torch.tensor([[5, -1]])), "input_ids hold -1"),
        (lambda m: m(ONE, torch.tensor([[2, 77]])), "decoder_input_ids hold 77"),
        (lambda m: m.encode(torch.empty(1, 0).long()), r"at least one id, not .*\(1, 0\)"),
        (lambda m: m.encode(torch.tensor([5, 6])), r"must be int64 .*\(2,\)"),
        (lambda m: m.encode(torch.tensor([[5.0]])), "not torch.float32"),
        (lambda m: m.encode(ONE, attention_mask=torch.ones(1, 4)), r"is \(1, 4\), .* \(1, 3\)"),
        (lambda m: m.encode(ONE, attention_mask=torch.zeros(1, 3).long()), r"rows \[0\] are empty"),
        (lambda m: m.encode(ONE, attention_mask=-torch.ones(1, 3).long()), "holds -1:"),
        (lambda m: m.encode(ONE.expand(1, 3).repeat(1, 9)), "reach 27 positions, there are 24"),
        (lambda m: m(ONE, ONE.repeat(1, 9)), "decoder_input_ids reach 27 positions"),
        (
            lambda m: m(ONE, ONE, decoder_attention_mask=torch.ones(1, 2)),
            r"decoder_input_ids is \(1, 2\), it should be \(1, 3\)",
        ),
        (lambda m: m.decode(ONE.expand(2, 3), m.encode(ONE)), "2 targets for a memory of 1"),
        (
            lambda m: m.decode(ONE, model_of(decoder_layers=1).encode(ONE)),
            "a memory of 1 layers for 2",
        ),
        (lambda m: m.decode(ONE, m.encode(ONE), logits_to_keep=-1), "logits_to_keep .* -1"),
        (
            lambda m: m.generate(ONE, max_new_tokens=25),
            "26 target tokens are asked for, there are 24 positions",
        ),
        (lambda m: m.generate(ONE, max_new_tokens=-1), "max_new_tokens .* 0 or more, not -1"),
        (lambda m: m.generate(ONE, max_new_tokens=2.0), r"max_new_tokens .* integer, .* not 2\.0"),
        (lambda m: m.generate(ONE, max_new_tokens="2"), "max_new_tokens .* integer, .* not '2'"),
        (lambda m: m.encode([[5, 6]]), r"input_ids must be a tensor, not a list: \[\[5, 6\]\]"),
        (lambda m: m.encode(ONE.numpy()), "input_ids must be a tensor, not a ndarray"),
        (lambda m: m.encode(None), "input_ids must be a tensor, not a NoneType"),
        (lambda m: m.encode(ONE, attention_mask=[[1, 1, 1]]), "mask of input_ids .* not a list"),
        (lambda m: m([[5, 6]], ONE), "^input_ids must be a tensor, not a list"),
        (lambda m: m(ONE, [[2, 3]]), "decoder_input_ids must be a tensor, not a list"),
        (
            lambda m: m(ONE, ONE, decoder_attention_mask=[[1, 1, 1]]),
            "the mask of decoder_input_ids must be a tensor, not a list",
        ),
        (lambda m: m.decode([[2]], m.encode(ONE)), "decoder_input_ids must be a tensor"),
        (lambda m: m.decode(torch.tensor(2), m.encode(ONE)), r"at least one id, not .* \(\)"),
        (lambda m: m.generate([[5, 6]], max_new_tokens=2), "^input_ids must be a tensor"),
        (
            lambda m: m.generate(ONE, max_new_tokens=2, attention_mask=[[1, 1, 1]]),
            "the mask of input_ids must be a tensor, not a list",
        ),
        (
            lambda m: m.generate(ONE, max_new_tokens=2, decoder_input_ids=[[2]]),
            "decoder_input_ids must be a tensor, not a list",
        ),
        (lambda m: shift_right([[5, 6]], m.config), "labels must be a tensor, not a list"),
        (
            lambda m: m.generate(ONE, max_new_tokens=3, decoder_input_ids=ONE),
            r"rows \[0\] do not begin with 2",
        ),
        (
            lambda m: m.generate(ONE, max_new_tokens=2, compile=True, cache="static"),
            "an EncoderDecoder is not compiled",
        ),
        (lambda m: m.generate(ONE, max_new_tokens=2, cache="sliding"), "window"),
        (lambda m: m.generate(ONE, max_new_tokens=2, eos_token_id=99), r"end tokens \(99,\)"),
    ],
)
def test_what_does_not_fit_is_named(call, message):
    model = model_of()
    with pytest.raises(ValueError, match=message):
        call(model)


def test_the_last_token_needs_no_position():
    found = model_of().generate(ONE, max_new_tokens=24, eos_token_id=None)
    assert found.shape == (1, 25)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "t5"}, "model_type 't5' is unknown: choose one of bart, marian"),
        ({"vocab_size": 0}, "vocab_size must be a whole number from 1 .*, not 0"),
        ({"encoder_layers": 0}, "encoder_layers must be"),
        ({"decoder_ffn_dim": 2.5}, "decoder_ffn_dim must be a whole number from 1 .*, not 2.5"),
        ({"encoder_attention_heads": 3}, "encoder_attention_heads=3 do not divide d_model=16"),
        ({"decoder_attention_heads": 5}, "decoder_attention_heads=5 do not divide"),
        ({"activation_function": "tanh"}, "'tanh' is unknown: choose one of relu"),
        ({"dropout": 1.0}, "dropout must be a number from 0 to below 1, not 1.0"),
        ({"attention_dropout": None}, "attention_dropout must be a number"),
        ({"pad_token_id": 40}, "pad_token_id=40, but target ids are 0 to 39"),
        ({"decoder_start_token_id": -1}, "decoder_start_token_id=-1"),
        ({"forced_bos_token_id": 99}, "forced_bos_token_id=99"),
        ({"eos_token_id": [2, 50]}, "eos_token_id=50"),
        ({"pad_token_id": "1"}, "pad_token_id='1', but target ids are"),
        ({"eos_token_id": 2.0}, "eos_token_id=2.0"),
        ({"decoder_start_token_id": [2, 3]}, r"decoder_start_token_id=\[2, 3\]"),
        ({"decoder_vocab_size": 0}, "decoder_vocab_size must be a whole number from 1 .*, not 0"),
        ({"init_std": -1.0}, "init_std must be a number of at least 0, not -1.0"),
        ({"init_std": math.nan}, "init_std .* not nan"),
        ({"share_encoder_decoder_embeddings": False}, "is Marian's"),
        (
            {"model_type": "marian", "share_encoder_decoder_embeddings": False,
             "decoder_vocab_size": 60, "pad_token_id": 50},
            "pad_token_id=50, but source ids are 0 to 39",
        ),
    ],
)  # fmt: skip
def test_configs_that_cannot_be_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        Seq2SeqConfig(**{**SIZES, **changes})


@pytest.mark.parametrize("labels", [torch.tensor([5, 6]), torch.empty(1, 0).long()])
def test_labels_that_are_no_rows_are_refused(labels):
    with pytest.raises(ValueError, match=re.escape(f"not {tuple(labels.shape)}")):
        shift_right(labels, Seq2SeqConfig(**SIZES))


@pytest.mark.parametrize("missing", ["decoder_start_token_id", "pad_token_id"])
def test_a_target_without_its_tokens_is_refused(missing):
    config = Seq2SeqConfig(**SIZES, **{missing: None})
    with pytest.raises(ValueError, match=f"{missing}=None"):
        shift_right(ONE, config)
    if missing == "decoder_start_token_id":
        with pytest.raises(ValueError, match="decoder_start_token_id is None"):
            EncoderDecoder(config).generate(ONE, max_new_tokens=3)


def test_parts_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="hidden_size=10 is no multiple of num_heads=4"):
        CrossAttention(10, 4)
    with pytest.raises(ValueError, match="num_heads must be at least 1"):
        CrossAttention(10, 0)
    part = CrossAttention(8, 2)
    with pytest.raises(ValueError, match=r"x has shape \(2, 3, 6\), expected \(B, T, 8\)"):
        part.keys_values(torch.zeros(2, 3, 6))
    with pytest.raises(ValueError, match=r"expected \(B, T, 8\)"):
        part(torch.zeros(2, 8), part.keys_values(torch.zeros(2, 3, 8)))
    with pytest.raises(ValueError, match="do not fit"):
        part(torch.zeros(3, 2, 8), part.keys_values(torch.zeros(2, 3, 8)))
    assert math.isclose(sinusoids(2, 4)[1, 0].item(), math.sin(1), abs_tol=1e-6)


def test_nothing_is_dropped_while_a_model_writes():
    x, *_ = batch()
    drops = {"dropout": 0.5, "attention_dropout": 0.5, "activation_dropout": 0.5}
    model, options = model_of(vocab_size=50, **drops), {"max_new_tokens": 8}
    expected = model.generate(x, **options)
    model.train()
    model.decoder.eval()
    before = [part.training for part in model.modules()]
    assert torch.equal(model.generate(x, **options), expected)
    with torch.no_grad():
        prompt = Prompt(model, copy.deepcopy(model).eval().encode(x))
    begin = torch.full((len(x), 1), model.config.decoder_start_token_id)
    found = generate(prompt, begin, **options)
    assert [part.training for part in model.modules()] == before
    assert torch.equal(found, generate(Prompt(model.eval(), prompt.memory), begin, **options))


def test_numbers_are_counted_as_transformers_counts_them(both):
    theirs, ours = both
    shared = getattr(theirs.model, "shared", None)  # untied, theirs holds this table for no use
    spare = 0 if shared is None or ours.config.tie_word_embeddings else shared.weight.numel()
    for options in ({}, {"only_trainable": True}):
        assert ours.num_parameters(**options) == theirs.num_parameters(**options) - spare
    matrices = ours.num_parameters(exclude_embeddings=True)
    assert matrices == theirs.num_parameters(exclude_embeddings=True)
