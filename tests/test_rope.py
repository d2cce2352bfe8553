"""Rotary embedding against transformers' rotations, and complex numbers."""

import subprocess
import sys
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from meta_device import MetaDevice
from rope_cases import LLAMA3, SCALINGS, config_of, draw
from torch import nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from minillm.deeper.attention import rope_scaling
from minillm.deeper.attention.rope_layouts import half_to_interleaved, interleaved_to_half
from minillm.deeper.attention.rope_scaling import rope_frequencies
from minillm.rope import RotaryEmbedding


def rotary(head_dim, **settings):
    """The chapter's module, or the deeper page's where more is asked than the chapter's can do."""
    more = settings.get("interleaved") or settings.get("scaling")
    asked = {k: v for k, v in settings.items() if more or k not in ("interleaved", "scaling")}
    return (rope_scaling.RotaryEmbedding if more else RotaryEmbedding)(head_dim, **asked)


@pytest.mark.parametrize("head_dim", [0, -2, 7])
def test_head_dim_must_be_even(head_dim):
    with pytest.raises(ValueError, match=f"head_dim must be even and at least 2, got {head_dim}"):
        RotaryEmbedding(head_dim)


# Rotations


@pytest.mark.parametrize("name", SCALINGS)
def test_tables_and_rotated_heads_equal_llamas(name):
    positions = torch.stack([torch.arange(40), torch.arange(40) + 300])
    reference = LlamaRotaryEmbedding(config_of(SCALINGS[name], 32, 10000.0, 512))
    cos, sin = reference(draw(1), positions)
    rope = rotary(32, scaling=SCALINGS[name], max_position_embeddings=512)
    rotation = rope(positions)
    torch.testing.assert_close(rotation.cos, cos, rtol=0, atol=5e-5)  # angles up to 339: 2^-16 each
    torch.testing.assert_close(rotation.sin, sin, rtol=0, atol=5e-5)
    if name in ("none", "default", "linear"):
        assert torch.equal(rotation.cos, cos)
        assert torch.equal(rotation.sin, sin)
    q, k = draw(2, 4, 40, 32), draw(2, 2, 40, 32, seed=1)
    expected_q, expected_k = apply_rotary_pos_emb(q, k, rotation.cos, rotation.sin)
    torch.testing.assert_close(rotation(q), expected_q, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rotation(k), expected_k, rtol=1e-6, atol=1e-6)


def test_interleaved_scores_equal_deepseeks():
    positions = torch.arange(17)[None]
    half, interleaved = (rotary(16, interleaved=i)(positions) for i in (False, True))
    q, k = draw(2, 4, 17, 16), draw(2, 1, 17, 16, seed=1)
    expected_q, expected_k = apply_rotary_pos_emb_interleave(q, k, half.cos, half.sin)
    expected = expected_q @ expected_k.mT
    torch.testing.assert_close(interleaved(q) @ interleaved(k).mT, expected, rtol=1e-5, atol=1e-5)
    # theirs comes out de-interleaved, ours as it went in
    ours = interleaved(q).unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    torch.testing.assert_close(ours, expected_q, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_rotation_is_a_product_of_complex_numbers(interleaved):
    positions = torch.tensor([[0, 3, 7, 100]])
    x = draw(2, 3, 4, 8)
    if interleaved:
        pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    else:
        pairs = torch.complex(*x.double().chunk(2, -1))
    frequencies = 10000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    angles = positions[0, :, None] * frequencies
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    parts = torch.view_as_real(turned)
    expected = parts.flatten(-2) if interleaved else torch.cat(parts.unbind(-1), -1)
    actual = rotary(8, interleaved=interleaved)(positions)(x)
    torch.testing.assert_close(actual, expected.float(), rtol=1e-5, atol=1e-5)


@given(st.integers(0, 10**6), st.integers(0, 5000), st.booleans(), st.sampled_from([4, 16, 64]))
def test_norms_are_kept(seed, position, interleaved, head_dim):
    x = draw(1, 2, 3, head_dim, seed=seed)
    rotation = rotary(head_dim, interleaved=interleaved)(torch.arange(3)[None] + position)
    torch.testing.assert_close(rotation(x).norm(dim=-1), x.norm(dim=-1), rtol=1e-5, atol=1e-6)


@given(st.integers(0, 10**6), st.integers(0, 2000), st.booleans())
def test_scores_depend_on_differences_of_positions_only(seed, shift, interleaved):
    q, k = draw(2, 1, 2, 6, 16, seed=seed).unbind()
    rope, positions = rotary(16, interleaved=interleaved), torch.arange(6)[None]
    here, there = rope(positions), rope(positions + shift)
    scores, shifted = here(q) @ here(k).mT / 4, there(q) @ there(k).mT / 4
    # an angle of a few thousand is known to 2^-13 in float32, and that is all the error there is
    tolerance = 1e-5 if shift < 100 else 1e-3
    torch.testing.assert_close(shifted, scores, rtol=0, atol=tolerance)


@given(st.integers(0, 500), st.integers(0, 500), st.booleans())
def test_rotations_compose(first, second, interleaved):
    x, rope = draw(1, 2, 1, 16), rotary(16, interleaved=interleaved)
    turn = [rope(torch.tensor([[p]])) for p in (first, second, first + second)]
    torch.testing.assert_close(turn[1](turn[0](x)), turn[2](x), rtol=0, atol=5e-4)
    back = type(turn[0])(turn[0].cos, -turn[0].sin)
    torch.testing.assert_close(back(turn[0](x)), x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rows_of_a_batch_have_their_own_positions(interleaved):
    rope, x = rotary(8, interleaved=interleaved), draw(2, 3, 4, 8)
    positions = torch.tensor([[0, 0, 1, 2], [5, 6, 7, 8]])
    together = rope(positions)(x)
    for row in range(2):
        alone = rope(positions[row : row + 1])(x[row : row + 1])
        assert torch.equal(together[row : row + 1], alone)
    assert torch.equal(rope(positions[:1])(x)[1], rope(positions[:1])(x[1:])[0])  # (1, T) is shared


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients(interleaved):
    rotation = rotary(6, interleaved=interleaved)(torch.tensor([[0, 2, 9]]))
    x = draw(1, 2, 3, 6).double().requires_grad_()
    assert torch.autograd.gradcheck(rotation, (x,))


def test_input_of_another_shape_is_an_error():
    rotation = RotaryEmbedding(8)(torch.arange(4)[None])
    for shape in [(1, 2, 5, 8), (1, 2, 4, 16), (1, 2, 1, 8)]:
        with pytest.raises(ValueError, match=r"does not fit a rotation of \(T, D\) = \(4, 8\)"):
            rotation(torch.zeros(shape))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_type_of_the_input_is_kept_and_the_product_is_in_float32(dtype, interleaved):
    rotation = rotary(16, interleaved=interleaved)(torch.arange(900, 910)[None])
    x = draw(1, 2, 10, 16, dtype=dtype)
    assert rotation(x).dtype == dtype
    assert torch.equal(rotation(x), rotation(x.to(max(dtype, torch.float32, key=bits))).to(dtype))


def bits(dtype):
    return torch.finfo(dtype).bits


# The module


class Model(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.rope = rotary(32, **settings)


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half()])
@pytest.mark.parametrize("name", ["none", "yarn", "llama3", "dynamic"])
def test_angles_stay_in_float32_when_the_model_is_cast(name, cast):
    settings = {"scaling": SCALINGS[name], "max_position_embeddings": 512}
    positions = torch.arange(1000)[None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = rotary(32, **settings)(positions)
        model = cast(Model(**settings))
        assert model.linear.weight.dtype != torch.float32
        assert model.rope.inv_freq.dtype == torch.float32
        assert torch.equal(model.rope(positions).cos, expected.cos)
        assert torch.equal(model.rope(positions).sin, expected.sin)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(model.rope(positions).cos, expected.cos)
    rounded = torch.arange(1000)[:, None] * rope_frequencies(32)[0].bfloat16().float()
    assert (rounded.cos() - RotaryEmbedding(32)(positions).cos[0, :, :16]).abs().max() > 0.1


def test_nothing_is_saved_and_nothing_is_learned():
    assert not RotaryEmbedding(8).state_dict()
    assert not list(RotaryEmbedding(8).parameters())


def test_a_model_built_on_meta_gets_its_frequencies_back():
    expected = RotaryEmbedding(32)(torch.arange(5)[None]).cos
    with torch.device("meta"):
        moved, assigned = Model(), Model()
    assert moved.rope.inv_freq.is_meta
    moved = moved.to_empty(device="cpu")
    assert torch.equal(moved.rope(torch.arange(5)[None]).cos, expected)
    assigned.load_state_dict(Model().state_dict(), assign=True)
    assert torch.equal(assigned.rope(torch.arange(5)[None]).cos, expected)


def test_dynamic_follows_the_length_and_has_no_memory():
    settings = {"scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 16}
    rope = rotary(8, **settings)
    short, long = torch.arange(16)[None], torch.arange(64)[None]
    before = rope(short).cos
    assert torch.equal(before, RotaryEmbedding(8)(short).cos)
    assert not torch.equal(rope(long).cos[:, :16], before)  # the keys of a cache would be stale
    assert torch.equal(rope(short).cos, before)
    reference = LlamaRotaryEmbedding(config_of(settings["scaling"], 8, 10000.0, 16))
    torch.testing.assert_close(rope(long).cos, reference(draw(1), long)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("scaling", "covered"),
    [
        (None, 64),
        ({"rope_type": "linear", "factor": 2.0}, 128),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({**LLAMA3, "original_max_position_embeddings": 32}, 256),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}, 64),
    ],
    ids=["none", "linear", "yarn", "llama3", "yarn below the stated length"],
)
def test_positions_beyond_what_is_covered_warn_once(scaling, covered):
    rope = rotary(8, scaling=scaling, max_position_embeddings=64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rope(torch.tensor([[0, covered - 1]]))
    with pytest.warns(UserWarning, match=f"position {covered} lies beyond the {covered} positions"):
        rope(torch.tensor([[covered]]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rope(torch.tensor([[covered + 1]]))


@pytest.mark.parametrize("scaling", [None, {"rope_type": "dynamic", "factor": 2.0}])
def test_no_warning_without_a_limit(scaling):
    rope = rotary(8, scaling=scaling, max_position_embeddings=64 if scaling else None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rope(torch.tensor([[100_000]]))
        rope(torch.tensor([[10**9]]))


# Layouts


@pytest.mark.parametrize("num_heads", [1, 3])
def test_reordered_weights_and_biases_turn_one_layout_into_the_other(num_heads):
    D, C, T = 8, 12, 5
    x = draw(2, T, C)
    q, k = draw(2, num_heads * D, C, seed=1).unbind()
    bq, bk = draw(2, num_heads * D, seed=2).unbind()

    def scores(rope, q, k, bq, bk):
        rotation = rope(torch.arange(T)[None])
        heads = [
            (x @ w.T + b).view(2, T, num_heads, D).transpose(1, 2) for w, b in ((q, bq), (k, bk))
        ]
        return rotation(heads[0]) @ rotation(heads[1]).mT

    half = [interleaved_to_half(w, num_heads) for w in (q, k, bq, bk)]
    expected = scores(rotary(D, interleaved=True), q, k, bq, bk)
    torch.testing.assert_close(scores(RotaryEmbedding(D), *half), expected, rtol=1e-5, atol=1e-4)
    assert (scores(RotaryEmbedding(D), q, k, bq, bk) - expected).abs().max() > 1  # mixed: nonsense
    for w, h in zip((q, k, bq, bk), half, strict=True):
        assert torch.equal(half_to_interleaved(h, num_heads), w)


def test_reordering_is_that_of_the_published_llama_conversion():
    H, D, C = 3, 8, 5
    w = draw(H * D, C)
    expected = w.view(H, D // 2, 2, C).transpose(1, 2).reshape(H * D, C)
    assert torch.equal(interleaved_to_half(w, H), expected)


@pytest.mark.parametrize(("rows", "heads"), [(12, 5), (12, 12), (12, 0)])
def test_rows_that_make_no_heads_are_an_error(rows, heads):
    for reorder in (interleaved_to_half, half_to_interleaved):
        with pytest.raises(ValueError, match=f"{rows} rows do not make {heads} heads of even size"):
            reorder(torch.zeros(rows, 3), heads)


# Compiled, and on a GPU


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", ["none", "yarn", "dynamic"])
def test_it_is_traced_in_one_graph(name, interleaved):
    settings = {"scaling": SCALINGS[name], "max_position_embeddings": 512}
    rope = rotary(16, interleaved=interleaved, **settings)
    x, positions = draw(1, 2, 5, 16), torch.arange(5)[None] + 2
    traced = torch.compile(lambda p, x: rope(p)(x), fullgraph=True, backend="eager")
    torch.testing.assert_close(traced(positions, x), rope(positions)(x), rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["none", "yarn", "llama3", "dynamic"])
def test_on_a_gpu_it_gives_the_same_and_waits_for_nothing(name):
    settings = {"scaling": SCALINGS[name], "max_position_embeddings": 512}
    rope = rotary(64, **settings)
    x, positions = draw(1, 2, 5, 64), torch.arange(5)[None] + 400
    expected = rope(positions)(x)
    rope, x, positions = rope.to("cuda", torch.bfloat16), x.cuda(), positions.cuda()
    assert rope.inv_freq.is_cuda and rope.inv_freq.dtype == torch.float32
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = rope(positions)(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", SCALINGS)
def test_on_a_device_nothing_is_asked_and_nothing_left_behind(name, interleaved):
    settings = {"scaling": SCALINGS[name], "max_position_embeddings": 512}
    rope = rotary(16, interleaved=interleaved, **settings)
    left = rotary(16, interleaved=interleaved, **settings)  # never moved to the device
    positions = torch.arange(600, 605, device="meta").expand(2, 5)
    for dtype in (torch.float32, torch.bfloat16):
        rope = rope.to("meta", dtype)
        x = torch.empty(2, 3, 5, 16, device="meta", dtype=dtype, requires_grad=True)
        with MetaDevice():
            for rotation in (rope(positions), left(positions)):
                y = rotation(x)
                (gradient,) = torch.autograd.grad(y.sum(), x)
                assert y.is_meta and y.dtype == gradient.dtype == dtype
                assert rotation.cos.is_meta and rotation.signed_sin.dtype == torch.float32


@pytest.mark.parametrize("interleaved", [False, True])
def test_signed_sin_is_all_that_a_rotation_by_hand_needs(interleaved):
    """Packed weights rotate by themselves: x cos + partner signed_sin, bit for bit the same."""
    rotation = rotary(8, interleaved=interleaved)(torch.arange(5)[None])
    x = draw(2, 3, 5, 8)
    partner = x.roll(4, -1)
    if interleaved:
        partner = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    cos, signed_sin = rotation.cos[:, None], rotation.signed_sin[:, None]
    assert torch.equal(rotation(x), torch.addcmul(x * cos, partner, signed_sin))
    assert torch.equal(rotation.signed_sin.abs(), rotation.sin.abs())


def test_the_deeper_one_without_more_is_the_chapters():
    positions = torch.tensor([[0, 3, 70], [5, 6, 900]])
    for settings in ({}, {"base": 500.0}, {"max_position_embeddings": 1000}):
        ours = RotaryEmbedding(16, **settings)
        theirs = rope_scaling.RotaryEmbedding(16, scaling=None, interleaved=False, **settings)
        assert isinstance(theirs, RotaryEmbedding) and theirs.max_length == ours.max_length
        for name in ("cos", "sin", "signed_sin"):
            assert torch.equal(getattr(theirs(positions), name), getattr(ours(positions), name))


def test_scalings_are_looked_up_only_if_there_is_one():
    code = """if True:
        import sys
        import torch
        import minillm
        from minillm.rope import RotaryEmbedding
        rope = RotaryEmbedding(8, base=5e5, max_position_embeddings=64).to(torch.bfloat16)
        rope(torch.arange(4)[None])(torch.zeros(1, 2, 4, 8))
        print("minillm.deeper.attention.rope_scaling" in sys.modules)
        minillm.RotaryEmbedding(8, scaling={"rope_type": "linear", "factor": 2.0})
        print("minillm.deeper.attention.rope_scaling" in sys.modules)
    """
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.split() == ["False", "True"], result.stderr
