"""The gated layer against transformers' Mllama, `PictureLM` against transformers' LLaVA."""

import pytest
import torch
from vision_checkpoints import LLAVAS, PLACEHOLDER, make_llava, pictures_for, save

from minillm.beyond.pictures.picture_parts import PictureConfig
from minillm.beyond.pictures.pictures import (
    GatedCrossAttentionLayer,
    PictureLM,
    Projector,
    put_pictures,
)
from minillm.beyond.pictures.vision_parts import VisionConfig
from minillm.config import ModelConfig


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
        y.square().mean().backward()
        named = {k: p.grad for k, p in layer.named_parameters()}
        grads.append((y.detach(), a.grad, b.grad, named))
    (y, gx, gf, gp), (y2, gx2, gf2, gp2) = grads
    torch.testing.assert_close(y, y2, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gx, gx2, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gf, gf2, atol=1e-5, rtol=1e-5)
    assert gp.keys() == gp2.keys()
    for name in gp:
        torch.testing.assert_close(gp[name], gp2[name], atol=1e-5, rtol=1e-4)


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
        (lambda: GatedCrossAttentionLayer(24, 4, 0), "intermediate_size must be at least 1, not 0"),
    ],
)
def test_sizes_that_do_not_fit(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "mask", [torch.ones(2, 5, 6).bool(), torch.ones(5, 7).bool(), torch.ones(2, 5, 7), [[[True]]]]
)
def test_a_mask_that_does_not_fit(mask):
    layer = GatedCrossAttentionLayer(24, 4, 40)
    keys_values = layer.keys_values(torch.randn(2, 7, 24))
    with pytest.raises(ValueError, match=r"mask must be bool \(B, T, S\) = \(2, 5, 7\), not"):
        layer(torch.randn(2, 5, 24), keys_values, mask=mask)
    with pytest.raises(ValueError, match="x has shape"):
        layer.keys_values(torch.randn(2, 7, 23))


def test_inputs_of_a_gated_layer_that_do_not_fit():
    layer, x = GatedCrossAttentionLayer(24, 4, 40), torch.randn(2, 5, 24)
    keys_values = layer.keys_values(torch.randn(2, 7, 24))
    with pytest.raises(ValueError, match=r"x has shape \(2, 5, 23\), expected \(B, T, 24\)"):
        layer(x[..., :23], keys_values)
    with pytest.raises(ValueError, match="x must be a tensor of floats, not list"):
        layer(x.tolist(), keys_values)
    with pytest.raises(ValueError, match=r"must be what .* gave, not Tensor"):
        layer(x, torch.randn(2, 7, 24))
    with pytest.raises(ValueError, match=r"features must be a tensor of floats, not torch.int64"):
        layer.keys_values(torch.ones(2, 7, 24).long())


@pytest.fixture(scope="module", params=LLAVAS)
def both(request, tmp_path_factory):
    theirs = make_llava(request.param)
    folder = save(theirs, tmp_path_factory.mktemp("llava"))
    return PictureLM.from_pretrained(folder), theirs


def prompt(model, plan, seed=3):
    """Ids of rows in which each P of the plan is a picture and each digit so many words."""
    generator = torch.Generator().manual_seed(seed)
    n = model.config.features_per_picture
    rows = []
    for parts in plan:
        ids = []
        for part in parts:
            words = torch.randint(6, 60, (int(part) if part != "P" else 0,), generator=generator)
            ids += [PLACEHOLDER] * n if part == "P" else words.tolist()
        rows.append(ids)
    return rows


def padded(rows):
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


PLANS = {"one": ["2P3"], "two in a row": ["1P2P3"], "two rows": ["P4", "2P2"]}


@pytest.mark.parametrize("plan", PLANS)
def test_llava_forward(both, plan):
    ours, theirs = both
    ids = torch.tensor(prompt(ours, PLANS[plan]))
    pixels = pictures_for(theirs.config.vision_config, "".join(PLANS[plan]).count("P"))
    with torch.no_grad():
        expected = theirs(input_ids=ids, pixel_values=pixels).logits
        logits = ours(ids, pixels=pixels)
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
        features = ours.picture_features(pixels)
        again = ours(ids, features=features, logits_to_keep=2)
        torch.testing.assert_close(again, logits[:, -2:], atol=1e-6, rtol=1e-5)
        other = ours(ids, pixels=pixels.flip(3))
    assert (other - logits)[:, -1].abs().max() > 1e-3


def test_llava_gradients(both):
    ours, theirs = both
    ids = torch.tensor(prompt(ours, ["2P3"]))
    grads = []
    for model in (ours, theirs):
        pixels = pictures_for(theirs.config.vision_config, 1).requires_grad_()
        model.zero_grad()
        if model is ours:
            logits, projector = model(ids, pixels=pixels), model.multi_modal_projector
        else:
            logits = model(input_ids=ids, pixel_values=pixels).logits
            projector = model.model.multi_modal_projector
        logits.square().mean().backward()
        grads.append((pixels.grad, projector.linear_1.weight.grad, model_head(model).weight.grad))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def model_head(model):
    return model.language_model.lm_head if isinstance(model, PictureLM) else model.lm_head


@pytest.mark.parametrize("cache", ["dynamic", "static", None])
def test_llava_greedy_generation_with_a_cache_and_left_padding(both, cache):
    ours, theirs = both
    rows = prompt(ours, ["2P3", "P1", "4P2P1"])
    pixels = pictures_for(theirs.config.vision_config, 4)
    ids, mask = padded(rows)
    new = 8
    if cache == "static" and ours.config.text_config.sliding_window:
        cache = "sliding"
    options = {"max_new_tokens": new, "cache": cache, "eos_token_id": None}
    written = ours.generate(ids, pixels=pixels, attention_mask=mask, **options)[:, -new:]
    given = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    given |= {"suppress_tokens": [PLACEHOLDER], "pad_token_id": 0, "eos_token_id": None}
    start = 0
    for row, out in zip(rows, written, strict=True):
        count = row.count(PLACEHOLDER) // ours.config.features_per_picture
        own = pixels[start : start + count]
        start += count
        alone = ours.generate(torch.tensor([row]), pixels=own, **options)[0, -new:]
        assert out.tolist() == alone.tolist()
        if cache == "dynamic":
            ids1 = torch.tensor([row])
            expected = theirs.generate(
                input_ids=ids1, pixel_values=own, attention_mask=torch.ones_like(ids1), **given
            )
            assert alone.tolist() == expected[0, -new:].tolist()


def test_llava_cached_scores_equal_uncached(both):
    ours, theirs = both
    ids = torch.tensor(prompt(ours, ["2P6"]))
    pixels = pictures_for(theirs.config.vision_config, 1)
    with torch.no_grad():
        whole = ours(ids, pixels=pixels)
        cache = ours.language_model.make_cache(batch_size=1)
        first = ids.shape[1] - 4
        parts = [ours(ids[:, :first], pixels=pixels, cache=cache)]
        parts += [ours(ids[:, t : t + 1], cache=cache) for t in range(first, ids.shape[1])]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-5)


def small(**changes):
    vision = VisionConfig(image_size=(8, 16), patch_size=8, hidden_size=12)
    text = ModelConfig(
        vocab_size=20, hidden_size=16, intermediate_size=20, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    given = {"image_token_index": 3, "vision_feature_layer": -1, **changes}
    return PictureConfig(vision, text, **given)


def test_placeholders_and_features_that_do_not_match():
    model = PictureLM(small())
    pixels = torch.zeros(1, 3, 8, 16)
    with pytest.raises(ValueError, match=r"3 placeholders \(id 3\) in the text, 2 features"):
        model(torch.tensor([[3, 3, 3, 7]]), pixels=pixels)
    with pytest.raises(ValueError, match=r"2 placeholders \(id 3\) in the text, 4 features"):
        model.generate(
            torch.tensor([[3, 3, 7]]), pixels=pixels.expand(2, -1, -1, -1), max_new_tokens=1
        )
    with pytest.raises(ValueError, match=r"2 placeholders \(id 3\) in the text and no pictures"):
        model(torch.tensor([[3, 3, 7]]))
    with pytest.raises(ValueError, match="compile=True: a step of a PictureLM cannot be compiled"):
        model.generate(
            torch.tensor([[3, 3, 7]]), pixels=pixels, max_new_tokens=1, cache="static", compile=True
        )
    with pytest.raises(ValueError, match="give pixels or features, not both"):
        model(torch.tensor([[3, 3, 7]]), pixels=pixels, features=torch.zeros(1, 2, 16))
    with pytest.raises(ValueError, match="logits_to_keep must not be negative: -1"):
        model(torch.tensor([[4]]), logits_to_keep=-1)


def test_put_pictures_fills_placeholders_in_order():
    ids = torch.tensor([[9, 1, 9, 2], [3, 9, 9, 4]])
    x, features = torch.zeros(2, 4, 5), torch.randn(2, 2, 5)
    y = put_pictures(x, ids, 9, features)
    assert torch.equal(y[ids == 9], features.flatten(0, 1))
    assert not y[ids != 9].any()
    assert put_pictures(x, ids, 7, None) is x
    shifted = torch.tensor([[9, 9, 9, 2], [3, 9, 1, 4]])  # the sum is right, no row is
    with pytest.raises(ValueError, match=r"rows are \[3, 1\], not multiples of the 2 features"):
        put_pictures(x, shifted, 9, features)
    assert put_pictures(x, shifted, 9, features.flatten(0, 1)).shape == x.shape


@pytest.mark.parametrize(
    ("ids", "features", "message"),
    [
        ([[9, 1]], torch.zeros(1, 5), r"ids should be \(1, 2\), not list"),
        (torch.tensor([[9, 1, 1]]), torch.zeros(1, 5), r"ids should be \(1, 2\), not \(1, 3\)"),
        (torch.tensor([[9, 1]]), torch.zeros(1, 6), r"features \(1, 6\) should be \(\.\.\., 5\)"),
        (torch.tensor([[9, 1]]), torch.tensor(1.0), r"features \(\) should be \(\.\.\., 5\)"),
        (torch.tensor([[9, 1]]), [[0.0] * 5], "features must be a tensor of floats, not list"),
        (torch.tensor([[9, 1]]), torch.ones(1, 5).long(), "tensor of floats, not torch.int64"),
    ],
)
def test_put_pictures_refuses(ids, features, message):
    with pytest.raises(ValueError, match=message):
        put_pictures(torch.zeros(1, 2, 5), ids, 9, features)


def test_a_model_without_pictures_is_the_language_model():
    model = PictureLM(small()).eval()
    ids = torch.tensor([[4, 5, 6]])
    with torch.no_grad():
        assert torch.equal(model(ids), model.language_model(ids))
    torch.testing.assert_close(model.generate(ids, max_new_tokens=4, eos_token_id=None)[:, :3], ids)


def test_a_placeholder_is_never_written():
    model = PictureLM(small())
    with torch.no_grad():
        model.language_model.lm_head.weight.zero_()
        model.language_model.lm_head.weight[3] = 5.0
    for sign in (1, -1):  # whichever way the last vector points
        with torch.no_grad():
            model.language_model.lm_head.weight.mul_(sign)
        ids = model.generate(torch.tensor([[4, 5]]), max_new_tokens=6, eos_token_id=None)
        assert 3 not in ids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_token_index": 20}, "image_token_index=20, but ids are 0 to 19"),
        ({"image_token_index": -1}, "image_token_index=-1, but"),
        ({"vision_feature_layer": 3}, "vision_feature_layer=3, there are 3 states"),
        ({"vision_feature_layer": [-1, -4]}, "there are 3 states"),
        (
            {"vision_feature_select_strategy": "patch"},
            "vision_feature_select_strategy 'patch' is unknown",
        ),
    ],
)
def test_configs_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        small(**changes)


def test_texts_that_are_not_computed():
    vision = VisionConfig(image_size=(8, 16), patch_size=8)
    text = ModelConfig(
        model_type="gpt2", vocab_size=20, hidden_size=16, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=16, intermediate_size=20,
    )  # fmt: skip
    with pytest.raises(ValueError, match="model_type 'gpt2' is unknown: choose one of llama"):
        PictureConfig(vision, text, image_token_index=3)


def test_a_projector_of_unknown_kind():
    with pytest.raises(ValueError, match="activation 'no' is unknown"):
        Projector(4, 8, activation="no")
    with pytest.raises(ValueError, match="vision_size must be at least 1, not 0"):
        Projector(0, 8)


def test_pictures_are_read_and_texts_written_in_eval_mode():
    model, ran = PictureLM(small()), []
    for part in model.modules():
        part.register_forward_hook(lambda part, *_: ran.append((part, part.training)))
    pixels = torch.zeros(1, 3, 8, 16)
    model.generate(torch.tensor([[4, 3, 3, 5]]), pixels=pixels, max_new_tokens=2)
    assert {model.multi_modal_projector, model.language_model.lm_head} <= {part for part, _ in ran}
    assert not any(training for _, training in ran)
    assert all(part.training for part in model.modules())


def test_numbers_are_counted_as_transformers_counts_them(both):
    ours, theirs = both
    for options in ({}, {"only_trainable": True}):
        assert ours.num_parameters(**options) == theirs.num_parameters(**options)
