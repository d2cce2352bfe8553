"""multihead: equal to transformers' attention modules and torch's own, cached and uncached."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    DeepseekV3Config,
    DynamicCache,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from minillm.cache.base import make_cache
from minillm.nn.attention import build_mask
from minillm.nn.layers import RMSNorm
from minillm.nn.mla import (
    MultiHeadLatentAttention,
    latent_attention_absorbed,
    latent_attention_naive,
)
from minillm.nn.multihead import MultiHeadAttention, merge_heads, split_heads
from minillm.nn.rope import RotaryEmbedding

B, T, C, H, G, D = 3, 11, 48, 6, 2, 16
SIZES = dict(hidden_size=C, num_attention_heads=H, num_key_value_heads=G, num_hidden_layers=1)
CLOSE = dict(atol=1e-5, rtol=1e-5)
MLA = dict(kv_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10)
YARN = dict(
    rope_type="yarn",
    factor=8.0,
    original_max_position_embeddings=16,
    mscale=1.0,
    mscale_all_dim=1.0,
)


class HalfSplit:
    """transformers' rotation of one tensor, from its cos and sin (1 or B, T, D)."""

    def __init__(self, cos, sin):
        self.cos, self.sin = cos, sin

    def __call__(self, x):
        return apply_rotary_pos_emb(x, x, self.cos, self.sin)[0]


class Interleaved(HalfSplit):
    """DeepSeek's layout: bring (x0, x1), (x2, x3), ... into halves, then rotate."""

    def __call__(self, x):
        return super().__call__(torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1))


class Growing:
    """The simplest cache: concatenation. Remembers what it was given."""

    def __init__(self):
        self.k = self.v = None

    def update(self, k, v):
        self.k = k if self.k is None else torch.cat([self.k, k], dim=2)
        self.v = v if self.v is None else torch.cat([self.v, v], dim=2)
        return self.k, self.v


def randomize(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2 + (
            parameter.ndim == 1
        )
    return module.eval()


def inputs(seed=1, batch=B, length=T):
    return torch.randn(batch, length, C, generator=torch.Generator().manual_seed(seed))


def random_mask(shape, seed=2):
    """Causal, with holes; every query may read itself."""
    keep = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.7
    length = shape[-1]
    return (keep | torch.eye(length, dtype=torch.bool)) & torch.ones(length, length).tril().bool()


def left_padded(lengths, total):
    """bool (B, 1, T, T): causal, no padding read but by padding itself."""
    start = total - torch.tensor(lengths)
    key = torch.arange(total)
    valid = key >= start[:, None]
    mask = valid[:, None, :] & (key[:, None] >= key)
    return (mask | torch.eye(total, dtype=torch.bool))[:, None], valid


def hugging_face(kind):
    """A transformers module with random weights, ours with the same, the rotary embedding."""
    config_class, attention_class = {
        "llama": (LlamaConfig, LlamaAttention),
        "llama_bias": (partial(LlamaConfig, attention_bias=True), LlamaAttention),
        "llama_head_dim": (partial(LlamaConfig, head_dim=D), LlamaAttention),
        "qwen2": (Qwen2Config, Qwen2Attention),
        "qwen3": (partial(Qwen3Config, head_dim=D), Qwen3Attention),
        "mistral": (partial(MistralConfig, sliding_window=4), MistralAttention),
    }[kind]
    config = config_class(**SIZES, attn_implementation="eager")
    theirs = randomize(attention_class(config, layer_idx=0))
    ours = MultiHeadAttention(
        C,
        H,
        num_kv_heads=G,
        head_dim=theirs.head_dim,
        bias=theirs.q_proj.bias is not None,
        out_bias=theirs.o_proj.bias is not None,
        qk_norm=partial(nn.RMSNorm, eps=config.rms_norm_eps) if kind == "qwen3" else None,
    ).eval()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours, LlamaRotaryEmbedding(config), HalfSplit


def deepseek(q_lora_rank, yarn, interleave=True):
    rope = dict(rope_parameters=dict(rope_theta=10000.0, **YARN)) if yarn else {}
    config = DeepseekV3Config(
        **(SIZES | dict(num_key_value_heads=H)),
        **MLA,
        q_lora_rank=q_lora_rank,
        rope_interleave=interleave,
        attn_implementation="eager",
        **rope,
    )
    theirs = randomize(DeepseekV3Attention(config, layer_idx=0))
    scale = None
    if yarn:  # the paper's temperature, squared because it stands for a factor on q and on k
        scale = (MLA["qk_nope_head_dim"] + MLA["qk_rope_head_dim"]) ** -0.5
        scale *= (0.1 * YARN["mscale_all_dim"] * math.log(YARN["factor"]) + 1.0) ** 2
    ours = MultiHeadLatentAttention(C, H, **MLA, q_lora_rank=q_lora_rank, scale=scale).eval()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours, DeepseekV3RotaryEmbedding(config), Interleaved if interleave else HalfSplit


def both(modules, x, mask, positions):
    theirs, ours, rotary, rotation = modules
    cos, sin = rotary(x, positions)
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    expected, _ = theirs(x, position_embeddings=(cos, sin), attention_mask=additive)
    return ours(x, rope=rotation(cos, sin), mask=mask), expected


KINDS = ["llama", "llama_bias", "llama_head_dim", "qwen2", "qwen3", "mistral"]
LATENT = [(q_rank, yarn) for q_rank in (None, 20) for yarn in (False, True)]
ALL = [pytest.param(partial(hugging_face, kind), id=kind) for kind in KINDS] + [
    pytest.param(partial(deepseek, *setting), id=f"deepseek-{setting[0]}-yarn={setting[1]}")
    for setting in LATENT
]


@pytest.mark.parametrize("make", ALL)
def test_transformers_random_masks(make):
    modules, x = make(), inputs()
    for mask in (random_mask((B, 1, T, T)), random_mask((B, H, T, T)), random_mask((1, 1, T, T))):
        got, expected = both(modules, x, mask, torch.arange(T)[None])
        torch.testing.assert_close(got, expected, **CLOSE)


@pytest.mark.parametrize("make", ALL)
def test_transformers_left_padding(make):
    modules, x = make(), inputs()
    mask, valid = left_padded([11, 7, 1], T)
    positions = (valid.cumsum(1) - 1).clamp(min=0)
    got, expected = both(modules, x, mask, positions)
    torch.testing.assert_close(got[valid], expected[valid], **CLOSE)
    _, ours, rotary, rotation = modules
    alone = ours(x[1:2, 4:], rope=rotation(*rotary(x, torch.arange(7)[None])), is_causal=True)
    torch.testing.assert_close(got[1:2, 4:], alone, **CLOSE)  # padding changes nothing


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("steps", [[4, 1, 1, 3, 1, 1], [1] * T], ids=["chunks", "one-by-one"])
def test_transformers_cached_steps(make, steps):
    modules, x = make(), inputs()
    _, ours, rotary, rotation = modules
    mask = random_mask((B, 1, T, T))
    positions = torch.arange(T)[None] + torch.tensor([[0], [3], [5]])
    _, expected = both(modules, x, mask, positions)
    cache, start, outputs = Growing(), 0, []
    for step in steps:
        stop = start + step
        rope = rotation(*rotary(x, positions[:, start:stop]))
        new = ours(x[:, start:stop], rope=rope, mask=mask[:, :, start:stop, :stop], cache=cache)
        outputs.append(new)
        start = stop
    torch.testing.assert_close(torch.cat(outputs, dim=1), expected, **CLOSE)


def our_rotary(config, kind):
    given = dict(config.rope_parameters)
    latent = kind is Interleaved
    return RotaryEmbedding(
        config.qk_rope_head_dim if latent else getattr(config, "head_dim", None) or C // H,
        base=given["rope_theta"],
        scaling=given if given["rope_type"] == "yarn" else None,
        interleaved=latent,
        max_position_embeddings=config.max_position_embeddings,
    )


@pytest.mark.parametrize("cache_kind", ["dynamic", "static", "sliding", "paged"])
@pytest.mark.parametrize("make", ALL)
def test_transformers_cached_steps_with_our_rope_masks_and_caches(make, cache_kind):
    """A left-padded batch, in chunks and step by step, beside transformers with its own cache."""
    theirs, ours, rotary, kind = make()
    config, x, window = theirs.config, inputs(), 4 if cache_kind == "sliding" else None
    _, valid = left_padded([11, 7, 1], T)
    positions = (valid.cumsum(1) - 1).clamp(min=0)
    latent = kind is Interleaved
    cache = make_cache(
        cache_kind,
        num_layers=1,
        batch_size=B,
        num_kv_heads=1 if latent else G,
        key_dim=config.kv_lora_rank if latent else ours.head_dim,
        value_dim=config.qk_rope_head_dim if latent else ours.head_dim,
        max_length=T + 2 if cache_kind == "static" else None,
        window=window,
        block_size=3,
    )
    rope, past = our_rotary(config, kind), DynamicCache()
    for step in (5, 1, 3, 1, 1):
        start = cache.length
        stop, now = start + step, positions[:, start : start + step]
        query, key = start + torch.arange(step), cache.key_positions(step)
        mask = build_mask(
            query, key, key_valid=valid[:, key.clamp(min=0, max=T - 1)], window=window
        )
        got = ours(x[:, start:stop], rope=rope(now), mask=mask, cache=cache[0])
        full = build_mask(query, torch.arange(stop), key_valid=valid[:, :stop], window=window)
        expected, _ = theirs(
            x[:, start:stop],
            position_embeddings=rotary(x, now),
            attention_mask=torch.zeros(full.shape).masked_fill(~full, torch.finfo(x.dtype).min),
            past_key_values=past,
        )
        real = valid[:, start:stop]
        torch.testing.assert_close(got[real], expected[real], **CLOSE)
    assert cache.length == T


def test_mistral_sliding_window():
    """The window is in the mask alone: ours equals theirs with the mask they make."""
    from transformers.masking_utils import create_sliding_window_causal_mask

    modules, x = hugging_face("mistral"), inputs()
    config = modules[0].config
    theirs = create_sliding_window_causal_mask(
        config=config,
        inputs_embeds=x,
        attention_mask=torch.ones(B, T, dtype=torch.long),
        past_key_values=None,
        position_ids=torch.arange(T)[None],
    )
    position = torch.arange(T)
    age = position[:, None] - position
    mask = ((age >= 0) & (age < config.sliding_window))[None, None]
    assert torch.equal(mask.expand_as(theirs), theirs == 0)
    got, expected = both(modules, x, mask, position[None])
    torch.testing.assert_close(got, expected, **CLOSE)
    assert not torch.allclose(
        got, modules[1](x, rope=HalfSplit(*modules[2](x, position[None])), is_causal=True)
    )


def test_deepseek_half_split_layout():
    modules, x = deepseek(20, True, interleave=False), inputs()
    got, expected = both(modules, x, random_mask((B, 1, T, T)), torch.arange(T)[None])
    torch.testing.assert_close(got, expected, **CLOSE)


def test_yarn_scale_matters():
    """The parity test above would notice a forgotten factor."""
    theirs, ours, rotary, rotation = deepseek(20, True)
    ours.scale = (MLA["qk_nope_head_dim"] + MLA["qk_rope_head_dim"]) ** -0.5
    got, expected = both(
        (theirs, ours, rotary, rotation), inputs(), random_mask((B, 1, T, T)), torch.arange(T)[None]
    )
    assert (got - expected).abs().max() > 1e-3


@pytest.mark.parametrize("heads", [1, 2, 6])
@pytest.mark.parametrize("causal", [False, True])
def test_torch_multihead_attention(heads, causal):
    ours, x = randomize(MultiHeadAttention(C, heads, bias=True, out_bias=True)), inputs()
    theirs = nn.MultiheadAttention(C, heads, batch_first=True).eval()
    for name in ("weight", "bias"):
        stacked = torch.cat([getattr(p, name) for p in (ours.q_proj, ours.k_proj, ours.v_proj)])
        getattr(theirs, f"in_proj_{name}").data = stacked.data
    theirs.out_proj.load_state_dict(ours.o_proj.state_dict())
    forbidden = torch.ones(T, T).triu(1).bool() if causal else None
    expected, _ = theirs(x, x, x, attn_mask=forbidden, need_weights=False)
    torch.testing.assert_close(ours(x, is_causal=causal), expected, **CLOSE)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_shared_heads_equal_repeated_heads(kv_heads):
    """GQA is MHA whose key and value heads are repeated: head h reads group h // (H / G)."""
    shared, x = randomize(MultiHeadAttention(C, H, num_kv_heads=kv_heads, head_dim=D)), inputs()
    full = MultiHeadAttention(C, H, head_dim=D)
    weights = shared.state_dict()
    for name in ("k_proj.weight", "v_proj.weight"):
        weights[name] = (
            weights[name].view(kv_heads, D, C).repeat_interleave(H // kv_heads, 0).view(H * D, C)
        )
    full.load_state_dict(weights)
    torch.testing.assert_close(shared(x, is_causal=True), full(x, is_causal=True), **CLOSE)


def test_scale_is_a_factor_on_queries():
    x = inputs()
    given = randomize(MultiHeadAttention(C, H, scale=0.1))
    usual = MultiHeadAttention(C, H)
    weights = given.state_dict()
    weights["q_proj.weight"] = weights["q_proj.weight"] * 0.1 * math.sqrt(C // H)
    usual.load_state_dict(weights)
    torch.testing.assert_close(given(x), usual(x), **CLOSE)


def test_is_causal_equals_mask():
    x, causal = inputs(), torch.ones(T, T).tril().bool()
    for module in (MultiHeadAttention(C, H, num_kv_heads=G), MultiHeadLatentAttention(C, H, **MLA)):
        torch.testing.assert_close(module(x, is_causal=True), module(x, mask=causal), **CLOSE)


def test_gradients_reach_every_parameter():
    x = inputs()
    for module in (
        MultiHeadAttention(C, H, num_kv_heads=G, bias=True, qk_norm=nn.RMSNorm),
        MultiHeadLatentAttention(C, H, **MLA, q_lora_rank=20),
    ):
        module(x, is_causal=True).square().sum().backward()
        for name, parameter in module.named_parameters():
            # a bias of the keys adds one number to all scores of a query: softmax does not see it
            if name != "k_proj.bias":
                assert parameter.grad.abs().max() > 1e-6, name


def test_dropout_only_while_training():
    module, x = MultiHeadAttention(C, H, dropout=0.5), inputs()
    torch.manual_seed(0)
    noisy = module(x)
    assert not torch.allclose(noisy, module(x))
    module.eval()
    assert torch.equal(module(x), module(x))
    plain = MultiHeadAttention(C, H)
    plain.load_state_dict(module.state_dict())
    torch.testing.assert_close(module(x), plain(x), **CLOSE)


def test_split_and_merge_heads(generator):
    x = torch.randn(B, T, C, generator=generator)
    heads = split_heads(x, H)
    assert heads.shape == (B, H, T, C // H)
    assert heads.data_ptr() == x.data_ptr()  # a view
    assert torch.equal(heads[:, 2], x[:, :, 2 * C // H : 3 * C // H])
    assert torch.equal(merge_heads(heads), x)
    with pytest.raises(ValueError, match="48 features cannot be cut into 5"):
        split_heads(x, 5)


def latent_parts(queries, keys, dtype=torch.float64, batch=2, heads=4, seed=3):
    R, N, P, V = 16, 6, 4, 5
    shapes = [
        (batch, heads, queries, N + P),
        (batch, 1, keys, R),
        (batch, 1, keys, P),
    ]
    generator = torch.Generator().manual_seed(seed)
    shapes.append((heads * (N + V), R))
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 9), (4, 9), (9, 9)])
def test_absorbed_equals_naive(queries, keys, generator):
    parts = latent_parts(queries, keys)
    for shape in (
        (queries, keys),
        (2, 1, queries, keys),
        (2, 4, queries, keys),
        (1, 4, queries, keys),
        (1, keys),
        (2, 1, 1, keys),
    ):
        mask = torch.rand(shape, generator=generator) < 0.6  # some rows fully masked: zeros in both
        for settings in (
            dict(),
            dict(mask=mask),
            dict(is_causal=True),
            dict(mask=mask, is_causal=True),
        ):
            naive = latent_attention_naive(*parts, scale=0.3, **settings)
            absorbed = latent_attention_absorbed(*parts, scale=0.3, **settings)
            torch.testing.assert_close(absorbed, naive, atol=1e-12, rtol=1e-12)


@given(
    sizes=st.tuples(*[st.integers(1, 5)] * 6),
    extra=st.integers(0, 5),
    how=st.sampled_from(["nothing", "mask", "causal", "both"]),
    seed=st.integers(0, 99),
)
def test_absorbed_equals_naive_for_any_sizes(sizes, extra, how, seed):
    batch, heads, queries, N, P, V = sizes
    R, keys = N + extra, queries + extra
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, heads, queries, N + P), (batch, 1, keys, R), (batch, 1, keys, P)
    parts = [
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in (*shapes, (heads * (N + V), R))
    ]
    settings = {"is_causal": how in ("causal", "both")}
    if how in ("mask", "both"):
        settings["mask"] = torch.rand(batch, 1, queries, keys, generator=generator) < 0.6
    naive = latent_attention_naive(*parts, scale=0.5, **settings)
    absorbed = latent_attention_absorbed(*parts, scale=0.5, **settings)
    assert naive.shape == (batch, heads, queries, V)
    torch.testing.assert_close(absorbed, naive, atol=1e-11, rtol=1e-11)


def test_absorbed_gradients_equal_naive_gradients(generator):
    parts = [part.requires_grad_() for part in latent_parts(4, 9)]
    mask = torch.rand(2, 1, 4, 9, generator=generator) < 0.7
    naive, absorbed = (
        torch.autograd.grad(attend(*parts, scale=0.3, mask=mask).square().sum(), parts)
        for attend in (latent_attention_naive, latent_attention_absorbed)
    )
    for got, expected in zip(absorbed, naive, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-11, rtol=1e-11)


def test_absorbed_in_bfloat16_is_as_good_as_naive():
    parts = latent_parts(1, 200, dtype=torch.float32)
    exact = latent_attention_naive(*(part.bfloat16().double() for part in parts), scale=0.3)
    naive, absorbed = (
        (attend(*(part.bfloat16() for part in parts), scale=0.3) - exact).norm() / exact.norm()
        for attend in (latent_attention_naive, latent_attention_absorbed)
    )
    assert naive < 0.02 and absorbed < 0.02


def make_with_norms(kind, norm):
    if kind == "gqa":
        return MultiHeadAttention(C, H, num_kv_heads=G, qk_norm=norm)
    return MultiHeadLatentAttention(C, H, **MLA, q_lora_rank=20, norm=norm)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # nn.RMSNorm says that it is not fused
@pytest.mark.parametrize("norm", [nn.RMSNorm, RMSNorm], ids=["torch", "ours"])
@pytest.mark.parametrize(("kind", "how"), [("gqa", {}), ("mla", {"absorb": False}),
                                           ("mla", {"absorb": True})])  # fmt: skip
def test_autocast(kind, how, norm):
    """Norms may answer in float32 there, projections in bfloat16: k and v must still fit."""
    module, x, cache = randomize(make_with_norms(kind, norm)), inputs(), Growing()
    expected = module(x, is_causal=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = module(x, is_causal=True, cache=cache, **how)
    assert cache.k.dtype == cache.v.dtype == torch.bfloat16
    assert (got.float() - expected).norm() / expected.norm() < 0.02
    got.float().square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in module.parameters())


@pytest.mark.parametrize("shape", [(2, 0, C), (0, 5, C)], ids=["no-positions", "no-texts"])
@pytest.mark.parametrize("masked", [False, True])
def test_nothing_in_nothing_out(shape, masked):
    x, (_, T, _) = torch.ones(shape), shape
    mask = torch.ones(T, T, dtype=torch.bool) if masked else None
    for is_causal in (False, True):
        module = MultiHeadAttention(C, H, num_kv_heads=G)
        assert module(x, is_causal=is_causal, mask=mask).shape == shape
        for absorb in (False, True):
            module = MultiHeadLatentAttention(C, H, **MLA)
            assert module(x, is_causal=is_causal, mask=mask, absorb=absorb).shape == shape


@pytest.mark.parametrize("q_lora_rank", [None, 20])
def test_absorb_is_a_choice_of_cost_not_of_numbers(q_lora_rank):
    module, x = randomize(MultiHeadLatentAttention(C, H, **MLA, q_lora_rank=q_lora_rank)), inputs()
    mask = random_mask((B, 1, T, T))
    expected = module(x, mask=mask, absorb=False)
    torch.testing.assert_close(module(x, mask=mask, absorb=True), expected, **CLOSE)
    torch.testing.assert_close(module(x, mask=mask), expected, rtol=0, atol=0)
    module.absorb = True
    torch.testing.assert_close(
        module(x, mask=mask), module(x, mask=mask, absorb=True), rtol=0, atol=0
    )
    torch.testing.assert_close(module(x, mask=mask, absorb=False), expected, rtol=0, atol=0)


class Largest(TorchDispatchMode):
    """Looks at every tensor that any operation returns: the most elements per key position."""

    def __init__(self, keys):
        super().__init__()
        self.keys, self.per_key = keys, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.numel() % self.keys == 0:
                self.per_key = max(self.per_key, tensor.numel() // self.keys)
        return result


def elements_per_key(module, length, absorb, batch=2):
    """The largest tensor made in one decoding step over `length` keys, per key and row.

    `length` is a prime that no weight shares, so that tensors over the keys can be told by size.
    """
    cache, x = Growing(), inputs(batch=batch, length=length)
    with torch.no_grad():
        module(x[:, :-1], is_causal=True, cache=cache)
        with Largest(length) as seen:
            module(
                x[:, -1:], cache=cache, absorb=absorb, mask=torch.ones(batch, 1, 1, length).bool()
            )
    return seen.per_key / batch


def test_no_key_or_value_per_head_while_decoding_absorbed():
    R = MLA["kv_lora_rank"]
    module = randomize(MultiHeadLatentAttention(C, H, **MLA))
    for absorb in (True, None):  # None: what a warm cache chooses by itself
        assert elements_per_key(module, 101, absorb=absorb) <= max(R, H)  # the latent, or scores
    expanded = MLA["qk_nope_head_dim"] + MLA["v_head_dim"]
    naive = elements_per_key(module, 101, absorb=False)
    assert naive >= H * expanded > max(R, H)  # the naive form does make them


@pytest.mark.parametrize("latent", [False, True], ids=["gqa", "mla"])
def test_compiled_decoding_is_one_graph(latent):
    """A static cache changes no shape from step to step: nothing breaks, nothing recompiles."""
    if latent:
        module, shape = MultiHeadLatentAttention(C, H, **MLA), (1, 24, 8)
    else:
        module, shape = MultiHeadAttention(C, H, num_kv_heads=G), (G, C // H, C // H)
    names = ("num_kv_heads", "key_dim", "value_dim")
    sizes = dict(zip(names, shape, strict=True), num_layers=1, batch_size=B, max_length=T + 3)
    cache, rotary, x = make_cache("static", **sizes), RotaryEmbedding(8), inputs()

    def step(x):
        query, key = cache.query_positions(x.shape[1]), cache.key_positions(x.shape[1])
        return module(x, rope=rotary(query[None]), mask=build_mask(query, key), cache=cache[0])

    counter = CompileCounter()
    torch.compiler.reset()
    with torch.no_grad():
        compiled = torch.compile(step, backend=counter, fullgraph=True)
        outputs = [step(x[:, :5])] + [compiled(x[:, t : t + 1]) for t in range(5, T)]
        expected = module(x, rope=rotary(torch.arange(T)[None]), is_causal=True)
    torch.testing.assert_close(torch.cat(outputs, dim=1), expected, **CLOSE)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("module", "per_token"),
    [
        (MultiHeadAttention(C, H), 2 * C),
        (MultiHeadAttention(C, H, num_kv_heads=G), 2 * G * C // H),
        (MultiHeadAttention(C, H, num_kv_heads=1), 2 * C // H),
        (MultiHeadLatentAttention(C, H, **MLA), 24 + 8),
    ],
    ids=["mha", "gqa", "mqa", "mla"],
)
def test_cached_values_per_token(module, per_token):
    cache = Growing()
    module(inputs(), cache=cache, is_causal=True)
    assert cache.k.numel() + cache.v.numel() == B * T * per_token


def test_latent_is_cached_normalised_and_key_rotated():
    _, ours, rotary, rotation = deepseek(20, False)
    x, cache = inputs(), Growing()
    rope = rotation(*rotary(x, torch.arange(T)[None]))
    ours(x, rope=rope, cache=cache, is_causal=True)
    latent, k_pe = ours.kv_a_proj_with_mqa(x).split([24, 8], dim=-1)
    torch.testing.assert_close(cache.k, ours.kv_a_layernorm(latent)[:, None], **CLOSE)
    torch.testing.assert_close(cache.v, rope(k_pe[:, None]), **CLOSE)


def test_absorbing_pays_counts_multiplications():
    """The rule equals torch's own count of the two forms' products."""
    from torch.utils.flop_counter import FlopCounterMode

    module = MultiHeadLatentAttention(C, H, **MLA)
    R, N, P, V = 24, 12, 8, 10
    for queries, keys in ((1, 1), (1, 2), (1, 50), (5, 50), (30, 50), (50, 50)):
        parts = [
            torch.randn(1, H, queries, N + P, device="meta"),
            torch.randn(1, 1, keys, R, device="meta"),
            torch.randn(1, 1, keys, P, device="meta"),
            torch.randn(H * (N + V), R, device="meta"),
        ]
        flops = []
        for attend in (latent_attention_naive, latent_attention_absorbed):
            with FlopCounterMode(display=False) as counter:
                attend(*parts, scale=1.0)
            flops.append(counter.get_total_flops())
        assert module.absorbing_pays(queries, keys) == (flops[1] < flops[0])


def test_deepseek_v3_sizes():
    """Real sizes on the meta device: what the notebook says about parameters and cache."""
    with torch.device("meta"):
        module = MultiHeadLatentAttention(
            7168,
            128,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            q_lora_rank=1536,
        )
        cache = Growing()
        module(torch.randn(1, 10, 7168), cache=cache, is_causal=True)
        theirs = DeepseekV3Attention(DeepseekV3Config(), layer_idx=0)
    assert (cache.k.numel() + cache.v.numel()) / 10 == 576
    assert {k: v.shape for k, v in module.state_dict().items()} == {
        k: v.shape for k, v in theirs.state_dict().items()
    }


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ((48, 6), dict(num_kv_heads=4), "6 query heads cannot share 4 key heads"),
        ((48, 6), dict(num_kv_heads=0), "num_kv_heads must be at least 1, not 0"),
        ((48, 6), dict(num_kv_heads=12), "6 query heads cannot share 12 key heads"),
        ((48, 5), dict(), "hidden_size=48 is no multiple of num_heads=5"),
        ((48, 0), dict(), "num_heads must be at least 1, not 0"),
        ((48, 6), dict(dropout=1.0), "dropout must lie in"),
    ],
)
def test_sizes_that_do_not_fit(arguments, settings, message):
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(*arguments, **settings)


def test_latent_sizes_that_do_not_fit():
    with pytest.raises(ValueError, match="kv_lora_rank must be at least 1, not 0"):
        MultiHeadLatentAttention(C, H, **(MLA | dict(kv_lora_rank=0)))
    with pytest.raises(ValueError, match="q_lora_rank must be at least 1, not -2"):
        MultiHeadLatentAttention(C, H, **MLA, q_lora_rank=-2)


@pytest.mark.parametrize(
    "module", [MultiHeadAttention(C, H), MultiHeadLatentAttention(C, H, **MLA)], ids=["mha", "mla"]
)
def test_input_that_does_not_fit(module):
    with pytest.raises(ValueError, match=r"\(3, 11, 47\), expected \(B, T, 48\)"):
        module(inputs()[..., :-1])
    with pytest.raises(ValueError, match=r"\(11, 48\), expected"):
        module(inputs()[0])
