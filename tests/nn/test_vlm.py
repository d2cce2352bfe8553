"""The gated layer against transformers' Mllama, and what it promises."""

import pytest
import torch

from minillm.nn.vlm import GatedCrossAttentionLayer


def mllama_layer(C, H, G, F, act="silu"):
    """transformers' layer of those sizes, random gates included."""
    from transformers.models.mllama.configuration_mllama import MllamaTextConfig
    from transformers.models.mllama.modeling_mllama import MllamaCrossAttentionDecoderLayer

    config = MllamaTextConfig(
        hidden_size=C,
        num_attention_heads=H,
        num_key_value_heads=G,
        intermediate_size=F,
        hidden_act=act,
        vocab_size=32,
        num_hidden_layers=1,
        pad_token_id=0,
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    layer = MllamaCrossAttentionDecoderLayer(config, 0)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(0.0, 0.3)
        layer.cross_attn_attn_gate.fill_(0.7)
        layer.cross_attn_mlp_gate.fill_(-0.4)
    return layer.eval()


def ours_like(theirs, C, H, G, F, act="silu"):
    ours = GatedCrossAttentionLayer(C, H, F, num_kv_heads=G, activation=act)
    ours.load_state_dict(theirs.state_dict())
    return ours


def theirs_on(theirs, x, features, mask, cache=None):
    """Their forward: masks are numbers to add, and rows that see nothing are given apart."""
    added = sees = None
    if mask is not None:
        sees = mask.any(-1)[:, None, :, None].float()  # (B, 1, T, 1)
        low = torch.finfo(torch.float32).min
        added = torch.where(mask, 0.0, low)[:, None] * sees
    return theirs(
        x,
        cross_attention_states=features,
        cross_attention_mask=added,
        attention_mask=None,
        full_text_row_masked_out_mask=None if sees is None else sees,
        past_key_values=cache,
    )


SIZES = [
    (24, 4, 4, 40, "silu"),
    (24, 4, 2, 32, "gelu"),
    (30, 3, 1, 17, "silu"),
    (8, 1, 1, 8, "relu"),
]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("masked", [False, True])
def test_layer_equals_mllama_forward_and_gradients(sizes, masked):
    theirs = mllama_layer(*sizes)
    ours = ours_like(theirs, *sizes)
    x, features = torch.randn(2, 5, sizes[0]), torch.randn(2, 7, sizes[0])
    mask = None
    if masked:  # each row sees something, as theirs differs from the original where it does not
        mask = torch.rand(2, 5, 7) < 0.4
        mask[:, :, 3] = True
    grads = []
    for layer in (ours, theirs):
        a, b = x.clone().requires_grad_(), features.clone().requires_grad_()
        y = (
            layer(a, layer.keys_values(b), mask=mask)
            if layer is ours
            else theirs_on(theirs, a, b, mask)
        )
        y.square().sum().backward()
        named = {k: p.grad for k, p in layer.named_parameters()}
        grads.append((y.detach(), a.grad, b.grad, named))
    (y, gx, gf, gp), (y2, gx2, gf2, gp2) = grads
    torch.testing.assert_close(y, y2, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gx, gx2, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(gf, gf2, atol=1e-4, rtol=1e-5)
    assert gp.keys() == gp2.keys()
    for name in gp:
        torch.testing.assert_close(gp[name], gp2[name], atol=2e-4, rtol=1e-4)


def test_keys_and_values_are_kept_while_the_text_grows():
    from transformers import DynamicCache

    theirs = mllama_layer(*SIZES[1])
    ours = ours_like(theirs, *SIZES[1])
    x, features = torch.randn(2, 6, 24), torch.randn(2, 7, 24)
    kept = ours.keys_values(features)
    whole = ours(x, kept)
    cache = DynamicCache()
    with torch.no_grad():
        first = theirs_on(theirs, x[:, :3], features, None, cache)
        torch.testing.assert_close(ours(x[:, :3], kept), first, atol=1e-5, rtol=1e-5)
        for t in range(3, 6):
            step = ours(x[:, t : t + 1], kept)
            torch.testing.assert_close(step, whole[:, t : t + 1], atol=1e-6, rtol=1e-5)
            expected = theirs_on(theirs, x[:, t : t + 1], None, None, cache)
            torch.testing.assert_close(step, expected, atol=1e-5, rtol=1e-5)


def test_new_gates_change_nothing_and_learn():
    layer = GatedCrossAttentionLayer(24, 4, 40, num_kv_heads=2)
    x, features = torch.randn(2, 5, 24), torch.randn(2, 7, 24)
    y = layer(x, layer.keys_values(features))
    assert torch.equal(y, x)
    y.square().sum().backward()
    assert layer.cross_attn_attn_gate.grad.abs() > 0
    assert layer.cross_attn_mlp_gate.grad.abs() > 0


def test_a_token_that_may_not_see_the_picture_stays_as_it_is():
    theirs = mllama_layer(*SIZES[0])
    layer = ours_like(theirs, *SIZES[0])
    x, features = torch.randn(2, 5, 24), torch.randn(2, 7, 24)
    mask = torch.ones(2, 5, 7, dtype=torch.bool)
    mask[0, :2] = mask[1, 4] = False
    y = layer(x, layer.keys_values(features), mask=mask)
    assert torch.equal(y[0, :2], x[0, :2]) and torch.equal(y[1, 4], x[1, 4])
    assert not torch.isclose(y[0, 2], x[0, 2]).any()
    with torch.no_grad():
        other = theirs_on(theirs, x, features, mask)
    sees = mask.any(-1)
    torch.testing.assert_close(y[sees], other[sees], atol=1e-5, rtol=1e-5)
    assert (other[~sees] - x[~sees]).abs().max() > 0.01  # transformers lets them read all


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: GatedCrossAttentionLayer(24, 5, 8),
            "hidden_size=24 is no multiple of num_heads=5",
        ),
        (
            lambda: GatedCrossAttentionLayer(24, 4, 8, num_kv_heads=3),
            "4 query heads cannot share 3",
        ),
        (lambda: GatedCrossAttentionLayer(24, 0, 8), "num_heads must be at least 1, not 0"),
        (lambda: GatedCrossAttentionLayer(24, 4, 8, activation="no"), "unknown activation 'no'"),
    ],
)
def test_sizes_that_do_not_fit(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "mask", [torch.ones(2, 5, 6).bool(), torch.ones(5, 7).bool(), torch.ones(2, 5, 7)]
)
def test_a_mask_that_does_not_fit(mask):
    layer = GatedCrossAttentionLayer(24, 4, 40)
    keys_values = layer.keys_values(torch.randn(2, 7, 24))
    with pytest.raises(ValueError, match=r"mask must be bool \(B, T, S\) = \(2, 5, 7\), not"):
        layer(torch.randn(2, 5, 24), keys_values, mask=mask)
    with pytest.raises(ValueError, match="x has shape"):
        layer.keys_values(torch.randn(2, 7, 23))
