"""What the tests of multihead and mla share: transformers' layers with our weights, and checks."""

import itertools
import math
from functools import partial

import pytest
import torch
from meta_device import MetaDevice
from torch import nn
from torch._dynamo.testing import CompileCounter
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

from minillm import make_cache
from minillm.attention import build_mask
from minillm.deeper.attention.mla import MultiHeadLatentAttention
from minillm.deeper.attention.rope_scaling import RotaryEmbedding
from minillm.heads import MultiHeadAttention

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
STEPS = {"chunks": [4, 1, 1, 3, 1, 1], "one-by-one": [1] * T}
CACHES = ["dynamic", "static", "sliding", "paged"]


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


def check_random_masks(make):
    """Equal to transformers under causal masks with holes."""
    modules, x = make(), inputs()
    for mask in (random_mask((B, 1, T, T)), random_mask((B, H, T, T)), random_mask((1, 1, T, T))):
        got, expected = both(modules, x, mask, torch.arange(T)[None])
        torch.testing.assert_close(got, expected, **CLOSE)


def check_left_padding(make):
    """Equal to transformers, and padding changes nothing."""
    modules, x = make(), inputs()
    mask, valid = left_padded([11, 7, 1], T)
    positions = (valid.cumsum(1) - 1).clamp(min=0)
    got, expected = both(modules, x, mask, positions)
    torch.testing.assert_close(got[valid], expected[valid], **CLOSE)
    _, ours, rotary, rotation = modules
    alone = ours(x[1:2, 4:], rope=rotation(*rotary(x, torch.arange(7)[None])), is_causal=True)
    torch.testing.assert_close(got[1:2, 4:], alone, **CLOSE)  # padding changes nothing


def check_cached_steps(make, steps):
    """Step by step equal to transformers in one go."""
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


def check_cached_steps_with_our_rope_masks_and_caches(make, cache_kind):
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


def check_is_causal_equals_mask(module):
    x, causal = inputs(), torch.ones(T, T).tril().bool()
    torch.testing.assert_close(module(x, is_causal=True), module(x, mask=causal), **CLOSE)


def check_gradients_reach_every_parameter(module):
    module(inputs(), is_causal=True).square().sum().backward()
    for name, parameter in module.named_parameters():
        # a bias of the keys adds one number to all scores of a query: softmax does not see it
        if name != "k_proj.bias":
            assert parameter.grad.abs().max() > 1e-6, name


def check_autocast(module, how):
    """Norms may answer in float32 there, projections in bfloat16: k and v must still fit."""
    module, x, cache = randomize(module), inputs(), Growing()
    expected = module(x, is_causal=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = module(x, is_causal=True, cache=cache, **how)
    assert cache.k.dtype == cache.v.dtype == torch.bfloat16
    assert (got.float() - expected).norm() / expected.norm() < 0.02
    got.float().square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in module.parameters())


def check_compiled_decoding(module, shape):
    """A static cache changes no shape from step to step: nothing breaks, nothing recompiles."""
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


def cached_per_token(module):
    """How many numbers the cache keeps of a position."""
    cache = Growing()
    module(inputs(), cache=cache, is_causal=True)
    return (cache.k.numel() + cache.v.numel()) / (B * T)


def check_input_that_does_not_fit(module):
    with pytest.raises(ValueError, match=r"\(3, 11, 47\), expected \(B, T, 48\)"):
        module(inputs()[..., :-1])
    with pytest.raises(ValueError, match=r"\(11, 48\), expected"):
        module(inputs()[0])


def check_on_a_device(module, heads_and_sizes, **how):
    """Forward with rotation, mask and cache, and backward: nothing asked, nothing left behind."""
    groups, key_size, value_size, rotated = heads_and_sizes
    module, positions = module.to("meta"), torch.arange(T, device="meta").expand(B, T)
    x = torch.empty(B, T, C, device="meta", requires_grad=True)
    for scaling in (None, YARN):
        rotary = RotaryEmbedding(rotated, scaling=scaling).to("meta")
        for dtype, cached in itertools.product((torch.float32, torch.bfloat16), (False, True)):
            module, cache = module.to(dtype), Growing() if cached else None
            with MetaDevice():
                mask = build_mask(positions, positions, window=4)
                settings = {"mask": mask} if cached else {"is_causal": True}
                y = module(x.to(dtype), rope=rotary(positions), cache=cache, **settings, **how)
                y.sum().backward()
            assert y.shape == x.shape and y.is_meta and y.dtype == dtype
            if cache is not None:
                assert cache.k.shape == (B, groups, T, key_size) and cache.k.is_meta
                assert cache.v.shape == (B, groups, T, value_size) and cache.v.is_meta
