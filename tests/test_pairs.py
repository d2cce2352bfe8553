"""Pairs of two things that are right each by itself: kinds of layers with caches, padding, packed
copies, exported steps, guesses and examples side by side. A pair is right, or refused by name.

The measure is the plain pass without a cache, over each row alone.
"""

import copy
import dataclasses
import warnings
from functools import cache as remembered

import pytest
import torch
import transformers
from torch import nn

from minillm.beyond.answers.sft import Isolated
from minillm.beyond.export.step import DecodingStep, decode
from minillm.config import ModelConfig
from minillm.deeper.caches.kinds import CACHE_KINDS
from minillm.deeper.generation.compiled import compiled_step
from minillm.deeper.generation.speculative import speculative_generate
from minillm.generation import generate
from minillm.layers import GatedMLP, RMSNorm
from minillm.model import CausalLM, Decoder, llama_layer, llama_rotary
from minillm.rope import RotaryEmbedding
from minillm.support.family import FAMILIES, Family


class FirstUnturned(Decoder):
    """A stack that runs its layers in its own way: the first is not rotated."""

    def forward(self, x, position_ids, mask, is_causal, cache=None, rope=None):
        rope = self.rotary(position_ids)
        for i, layer in enumerate(self.layers):
            kept = None if cache is None else cache[i]
            x = layer(x, rope=rope if i else None, mask=mask, is_causal=is_causal, cache=kept)
        return self.norm(x)


class EverySecond(Decoder):
    """A stack that makes its mask itself: a token reads itself, and those an even number away."""

    def prepare(self, input_ids, attention_mask=None, position_ids=None, cache=None):
        given = (input_ids, attention_mask, position_ids, cache)
        positions, mask, _ = super().prepare(*given)
        past, T = 0 if cache is None else cache.length, input_ids.shape[1]
        keys = torch.arange(past + T) if cache is None else cache.key_positions(T)
        distance = torch.arange(past, past + T)[:, None] - keys
        even = (distance >= 0) & (distance % 2 == 0) & (keys >= 0)
        return positions, even if mask is None else mask & even, False


class Near(Decoder):
    """A stack whose layers, or every second of them, read four positions and turn twice as fast."""

    every = 1

    def layer_mask(self, layer, mask, position_ids, cache):
        if layer % self.every:
            return mask
        past, T = 0 if cache is None else cache.length, position_ids.shape[1]
        keys = torch.arange(past + T) if cache is None else cache.key_positions(T)
        distance = torch.arange(past, past + T)[:, None] - keys
        near = (distance >= 0) & (distance < 4) & (keys >= 0)
        return near if mask is None else mask & near

    def layer_rotation(self, layer, rope, position_ids):
        return rope if layer % self.every else self.rotary(2 * position_ids)


class NearAndFar(Near):
    every = 2


class Doubled(RotaryEmbedding):
    """A rotation of one's own: twice as fast."""

    def forward(self, position_ids):
        return super().forward(2 * position_ids)


def doubled(c):
    return Doubled(c.head_dim)


def gelu_mlp(c, layer):
    return GatedMLP(c.hidden_size, c.intermediate_size, activation="gelu")


def half(head, inputs, scores):
    return scores / 2


def halved(c):
    return half


def norm_of_its_own(c):
    return RMSNorm(c.hidden_size, eps=0.1)


class LastNorm(Decoder):
    """A stack whose last norm is another one."""

    def __init__(self, config):
        super().__init__(config)
        self.norm = nn.LayerNorm(config.hidden_size)


OWN = {
    "own-forward": Family(decoder=FirstUnturned),
    "own-prepare": Family(decoder=EverySecond),
    "own-layers": Family(decoder=NearAndFar),
    "own-rotation": Family(rotary=doubled),
    "own-norm": Family(norm=norm_of_its_own),
    "own-last-norm": Family(decoder=LastNorm),
    "own-mlp": Family(mlp=gelu_mlp),
    "own-scores": Family(scores=halved),
    "own-nothing": Family(layer=llama_layer, rotary=llama_rotary),
}
SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.3}
SIZES |= {"max_position_embeddings": 128}
ATTENTION = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}
FOUR = {**ATTENTION, "num_hidden_layers": 4}
STATE = {"state_size": 8, "num_heads": 4, "n_groups": 1, "chunk_size": 4}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
DELTA |= {"linear_value_head_dim": 8, "rms_norm_eps": 1e-2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
MLA = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
KINDS = {
    "llama": ATTENTION,
    "qwen3": ATTENTION,
    "gemma": {**ATTENTION, "num_key_value_heads": 1},
    "mistral": {**ATTENTION, "sliding_window": 4},
    "gpt2": {**ATTENTION, "num_key_value_heads": 4},
    "falcon": {**ATTENTION, "num_key_value_heads": 1},
    "mixtral": {**ATTENTION, **EXPERTS},
    "deepseek_v3": {**ATTENTION, **MLA, "num_key_value_heads": 4},
    "gemma3_text": {**FOUR, "sliding_window": 4, "sliding_window_pattern": 2},
    "olmo3": {**FOUR, "sliding_window": 4},
    "gpt_oss": {**FOUR, **EXPERTS, "sliding_window": 4},
    "smollm3": FOUR,
    "qwen3_5_text": {**FOUR, **DELTA},
    "mamba": {**SIZES, "state": {"state_size": 8}},
    "mamba2": {**SIZES, "state": STATE},
    "bamba": {**FOUR, "state": STATE, "attn_layer_indices": (0, 2)},  # a state stands last
    "bamba:last": {**FOUR, "state": STATE, "attn_layer_indices": (1, 3)},
    "bamba:one": {**FOUR, "state": STATE, "attn_layer_indices": (1,)},
    "bamba:none": {**FOUR, "state": STATE, "attn_layer_indices": ()},
    "bamba:window": {
        **FOUR,
        "state": STATE,
        "attn_layer_indices": (0, 2),
        "sliding_window": 4,
    },
    "bamba:attention": {
        **FOUR,
        "state": STATE,
        "attn_layer_indices": (0, 1, 2, 3),
        "partial_rotary_factor": 0.5,
    },
    "llama:dynamic": {**ATTENTION, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    **dict.fromkeys(OWN, ATTENTION),
}
STATES = {kind for kind in KINDS if kind.startswith(("mamba", "bamba", "qwen3_5"))}
# What is refused, and the words that name it; all else is right.
PACKED = {
    **{kind: "layers.0 is a MambaLayer" for kind in STATES},
    "bamba": "layers.1 is a MambaLayer",
    "bamba:window": "layers.1 is a MambaLayer",
    "bamba:attention": "runs its layers in its own way|PartialRotary",
    **{"gemma": "gelu", "gpt2": "gelu", "falcon": "gelu", "mixtral": "SparseMoeBlock"},
    "deepseek_v3": "MultiHeadLatentAttention",
    **{"gemma3_text": "Sandwich", "olmo3": "PostNorm", "gpt_oss": "SinkAttention"},
    "own-forward": "a FirstUnturned runs its layers in its own way",
    "own-layers": "a NearAndFar runs its layers in its own way",
    "own-rotation": "rotary is a Doubled",
    "own-norm": "layers.0.input_layernorm is RMSNorm",
    "own-last-norm": "norm is LayerNorm",
    "own-mlp": "layers.0.mlp has another activation than silu",
    "own-scores": "lm_head changes its scores, as its family does",
}
EXPORT = {
    **dict.fromkeys(STATES, "keeps states"),
    "own-prepare": "own-prepare makes positions and masks in its own way",
    "own-layers": "own-layers makes positions and masks in its own way",
    "llama:dynamic": "dynamic rope_scaling",
}
WINDOWS = ("mistral", "bamba:window", "gemma3_text", "olmo3", "gpt_oss")
ISOLATED = {**EXPORT, **dict.fromkeys(WINDOWS, "a sliding window")}
GUESSES = dict.fromkeys(STATES, "a state cannot go back")


@pytest.fixture(autouse=True)
def families_of_ones_own(monkeypatch):
    for kind, family in OWN.items():
        monkeypatch.setitem(FAMILIES, kind, family)


@pytest.fixture
def lm(request):
    return made(request.param)


@remembered
def made(kind, seed=0):
    """The model of a kind, in eval mode, its biases and norms moved too; no test changes it."""
    family = kind.partition(":")[0]
    model = CausalLM(ModelConfig(**KINDS[kind], model_type=family), seed=seed).eval()
    generator = torch.Generator().manual_seed(7 + seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator))
    return model


def ids(rows=2, length=12, seed=1):
    return torch.randint(3, 61, (rows, length), generator=torch.Generator().manual_seed(seed))


def masks(where, length=12):
    """Which tokens of two rows are real; the first row has no padding."""
    mask = torch.ones(2, length, dtype=torch.long)
    if where:
        mask[1, {"left": slice(0, 3), "middle": slice(4, 6), "right": slice(9, 12)}[where]] = 0
    return mask


def of_kinds(kinds=KINDS):
    return pytest.mark.parametrize("lm", kinds, indirect=True)


def right(found, wanted, what=None):
    said = None if what is None else lambda message: f"{what}: {message}"
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-5, msg=said)


def alone(lm, row, mask):
    """The logits of a row's real tokens, by themselves. Shape: (T,), (T,) -> (real, V)."""
    return lm(row[mask.bool()][None])[0]


def written(lm, prompt, new):
    """The greedy text by its definition: everything is read anew for each token."""
    for _ in range(new):
        prompt = torch.cat([prompt, lm(prompt)[:, -1:].argmax(-1)], 1)
    return prompt


@of_kinds()
@pytest.mark.parametrize("padding", [None, "left", "middle", "right"])
@torch.no_grad()
def test_padding(lm, padding):
    text, mask = ids(), masks(padding)
    if padding == "middle" and lm.config.stateful:
        with pytest.raises(ValueError, match="states reads no padding between tokens"):
            lm(text, attention_mask=mask)
        return
    if padding == "middle" and lm.config.model_type in ("own-prepare", "own-layers"):
        return  # its rule counts places in the row, and so does the measure
    if padding == "middle" and lm.config.sliding_window:
        return  # likewise
    found = lm(text, attention_mask=mask)
    for row in range(2):
        right(found[row, mask[row].bool()], alone(lm, text[row], mask[row]))


@torch.no_grad()
def test_a_layer_says_its_own_mask_and_rotation(monkeypatch):
    """If all say the same, it is the model whose config has that window and that rotation."""
    monkeypatch.setitem(FAMILIES, "near", Family(decoder=Near))
    monkeypatch.setitem(FAMILIES, "doubled", Family(rotary=doubled))
    near = CausalLM(ModelConfig(**ATTENTION, model_type="near")).eval()
    window = ModelConfig(**ATTENTION, model_type="doubled", sliding_window=4)
    right(near(ids()), CausalLM(window).eval()(ids()))
    plain = CausalLM(ModelConfig(**ATTENTION)).eval()
    assert (near(ids()) - plain(ids())).abs().max() > 0.1


@of_kinds()
@pytest.mark.parametrize("padding", [None, "left"])
@torch.no_grad()
def test_caches_in_pieces_and_steps(lm, padding):
    """One pass in pieces of 5, 1, 1, 3 and 2 tokens is one pass, whatever is kept between them."""
    text, mask = ids(), masks(padding)
    rows = [alone(lm, text[row], mask[row]) for row in range(2)]
    for cache in CACHE_KINDS:
        if cache == "sliding" and lm.config.sliding_window is None:
            with pytest.raises(ValueError, match="a sliding cache drops keys"):
                lm.make_cache(cache, batch_size=2)
            continue
        memory, parts, done = lm.make_cache(cache, batch_size=2, max_length=12), [], 0
        for piece in text.split([5, 1, 1, 3, 2], dim=1):
            done += piece.shape[1]
            given = {} if padding is None else {"attention_mask": mask[:, :done]}
            parts.append(lm(piece, cache=memory, **given))
        found = torch.cat(parts, 1)
        for row, wanted in enumerate(rows):
            got = found[row, mask[row].bool()]
            if cache == "quantized" and any(getattr(x, "holds_keys", True) for x in memory.layers):
                assert (got - wanted).square().mean().sqrt() < 0.1 * wanted.std()
            else:
                right(got, wanted, cache)


@of_kinds()
@torch.no_grad()
def test_generation(lm):
    text, mask, options = ids(), masks("left"), {"max_new_tokens": 8, "eos_token_id": None}
    rows = [written(lm, text[row][mask[row].bool()][None], 8)[0, -8:] for row in range(2)]
    for kind in ("dynamic", "static", "sliding", "paged", None):
        cache = kind
        if kind == "sliding" and lm.config.sliding_window is None:
            cache = lm.make_cache("dynamic", batch_size=2).fork()  # a copy of a cache, instead
        found = generate(lm, text, cache=cache, attention_mask=mask, **options)
        assert torch.equal(found[:, 12:], torch.stack(rows)), kind


@of_kinds()
@torch.no_grad()
def test_packed_copies(lm, request):
    kind = request.node.callspec.params["lm"]
    if kind in PACKED:
        with pytest.raises(
            ValueError, match=f"cannot be packed: .*({PACKED[kind]})|{PACKED[kind]}"
        ):
            lm.packed("linear")
        return
    packed, text, mask = lm.packed("halves"), ids(), masks("left")
    right(packed(text, attention_mask=mask), lm(text, attention_mask=mask))
    for cache in ("dynamic", "static"):
        options = {"max_new_tokens": 8, "eos_token_id": None, "cache": cache}
        options["attention_mask"] = mask
        assert torch.equal(generate(packed, text, **options), generate(lm, text, **options))
    assert torch.equal(
        generate(packed, text[:1], max_new_tokens=8), generate(lm, text[:1], max_new_tokens=8)
    )


@of_kinds()
@torch.no_grad()
def test_exported_steps(lm, request):
    kind = request.node.callspec.params["lm"]
    if kind in EXPORT:
        with pytest.raises(ValueError, match=EXPORT[kind]):
            DecodingStep(lm, max_length=20, batch_size=2)
        return
    step = DecodingStep(lm, max_length=20, batch_size=2)
    assert torch.equal(decode(step, ids(), step.empty(), max_new_tokens=8), written(lm, ids(), 8))


@of_kinds()
@torch.no_grad()
def test_examples_side_by_side(lm, request):
    kind = request.node.callspec.params["lm"]
    if kind in ISOLATED:
        with pytest.raises(ValueError, match=ISOLATED[kind]):
            Isolated(lm)
        return
    text = ids()
    numbers = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3, [0] * 2 + [1] * 10])
    found = Isolated(lm)(torch.stack([text, numbers], 1))
    for row in range(2):
        for example in numbers[row].unique():
            here = numbers[row] == example
            right(found[row, here], alone(lm, text[row], here))


@of_kinds()
@torch.no_grad()
def test_guesses(lm, request):
    kind = request.node.callspec.params["lm"]
    draft = made(kind, seed=1)
    options = {"max_new_tokens": 12, "eos_token_id": None}
    plain = made("llama", seed=1)
    if kind in GUESSES:
        for one, other in ((lm, draft), (plain, draft), (lm, plain)):
            with pytest.raises(ValueError, match=GUESSES[kind]):
                speculative_generate(one, other, ids(1), **options)
        return
    for one, others in ((lm, (draft, lm, plain)), (plain, (lm,))):
        wanted = written(one, ids(1), 12)
        for other in others:
            assert torch.equal(speculative_generate(one, other, ids(1), **options), wanted)


@of_kinds(sorted(STATES))
def test_compiled_steps(lm):
    with pytest.raises(ValueError, match="cannot be compiled"):
        compiled_step(lm, lm.make_cache("static", batch_size=1, max_length=8))


@pytest.mark.parametrize("last", [False, True], ids=["a state last", "attention last"])
@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_layers_of_two_kinds_are_one_cache(kind, last):
    """Forks, rows, and going back to the start, between layers that attend and states."""
    lm, text = made("bamba:last" if last else "bamba"), ids(2, 20)
    if kind == "sliding":
        lm = copy.deepcopy(lm)
        lm.config = dataclasses.replace(lm.config, sliding_window=64)
        lm.model.config = lm.config
    cache = lm.make_cache(kind, batch_size=2, max_length=20)
    with torch.no_grad():
        lm(text[:, :9], cache=cache)
        twin = cache.fork()
        one, other = lm(text[:, 9:14], cache=cache), lm(text[:, 14:19], cache=twin)
        assert cache.length == twin.length == 14
        again = lm.make_cache(kind, batch_size=2, max_length=20)
        lm(text[:, :9], cache=again)
        right(lm(text[:, 14:19], cache=again), other)
        again.reorder([1, 0])
        cache.reset()
        whole = lm(text[:, :14], cache=cache)[:, 9:]
        if kind != "quantized":  # whose new tokens are read rounded, wherever they are cut
            right(whole, one)
        swapped = lm(text[[1, 0], 19:], cache=again)
        right(swapped[[1, 0]], lm(text[:, 19:], cache=twin))
    with pytest.raises(ValueError, match="a state cannot go back"):
        cache.crop(3)


# Dynamic NTK: beyond the trained length all keys turn by the length of the pass.

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}


def growing(seed=0, trained=12):
    keys = {**ATTENTION, "max_position_embeddings": trained, "rope_scaling": DYNAMIC}
    return CausalLM(ModelConfig(**keys), seed=seed).eval()


@torch.no_grad()
def test_a_row_turns_by_its_own_length():
    lm, long, short = growing(), ids(1, 20), ids(1, 4, seed=2)
    both = torch.cat([torch.cat([torch.zeros(1, 16, dtype=torch.long), short], 1), long])
    mask = torch.ones_like(both)
    mask[0, :16] = 0
    found = lm(both, attention_mask=mask)
    right(found[0, 16:], lm(short)[0])
    right(found[1], lm(long)[0])
    for one in (lm, lm.packed("linear")):
        for cache in ("dynamic", "static", "paged", None):
            options = {"max_new_tokens": 10, "eos_token_id": None}
            if cache == "static":
                options["max_new_tokens"] = 3
            said = generate(one, both, cache=cache, attention_mask=mask, **options)
            assert torch.equal(said[:1, 16:], generate(one, short, cache=cache, **options))
            assert torch.equal(said[1:], generate(one, long, cache=cache, **options))


@pytest.mark.parametrize("length", [3, 9, 12, 15])
@pytest.mark.parametrize("which", ["both", "model", "draft"])
def test_guesses_end_where_keys_begin_to_turn(which, length):
    lm, draft = (growing(seed) for seed in (0, 0))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in draft.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator))
    plain = CausalLM(ModelConfig(**ATTENTION)).eval()
    one, other = {"both": (lm, draft), "model": (lm, plain), "draft": (plain, draft)}[which]
    guessed = []
    options = {"max_new_tokens": 20, "eos_token_id": None}
    found = speculative_generate(
        one, other, ids(1, length), on_round=lambda n, _: guessed.append(n), **options
    )
    assert torch.equal(found, generate(one, ids(1, length), **options))
    assert (max(guessed) > 0) == (length < 11)
    assert guessed[-1] == 0


@torch.no_grad()
def test_a_piece_beyond_the_trained_length_is_refused():
    lm, text = growing(), ids(1, 24)
    for first, second in ((4, 8), (10, 2)):  # within it a piece is right
        cache = lm.make_cache(batch_size=1)
        lm(text[:, :first], cache=cache)
        found = lm(text[:, first : first + second], cache=cache)
        right(found, lm(text[:, : first + second])[:, first:])
    for first, second in ((4, 9), (10, 14), (15, 2)):
        cache = lm.make_cache(batch_size=1)
        lm(text[:, :first], cache=cache)
        before = cache.length
        with pytest.raises(ValueError, match=f"beyond 12 positions: read these {second} and the"):
            lm(text[:, first : first + second], cache=cache)
        assert cache.length == before


@torch.no_grad()
def test_steps_beyond_the_trained_length_are_those_of_transformers(tmp_path):
    """There, too, old keys stay as they were turned; without a cache all are turned anew."""
    lm = growing()
    keys = {k: v for k, v in lm.config.to_dict().items() if k not in ("architectures",)}
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**keys)).eval()
    theirs.load_state_dict(lm.state_dict())
    text, options = ids(1, 9), {"max_new_tokens": 12}
    for cache in ("dynamic", None):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wanted = theirs.generate(
                text, do_sample=False, use_cache=cache is not None, eos_token_id=None, **options
            )
        assert torch.equal(generate(lm, text, cache=cache, eos_token_id=None, **options), wanted)
