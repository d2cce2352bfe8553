"""`VisionTransformer` against transformers' ViT, SigLIP and CLIP."""

import pytest
import torch
from torch.nn import functional as F
from vision_checkpoints import TOWERS, make_tower, pictures_for, save

from minillm.beyond.pictures.vision import VisionTransformer, cut_patches
from minillm.beyond.pictures.vision_parts import VisionConfig


@pytest.fixture(scope="module", params=TOWERS)
def both(request, tmp_path_factory):
    theirs = make_tower(request.param)
    folder = save(theirs, tmp_path_factory.mktemp("tower"))
    return VisionTransformer.from_pretrained(folder), theirs


def test_features_and_pooled_vector(both):
    ours, theirs = both
    pixels = pictures_for(theirs.config, count=3)
    with torch.no_grad():
        expected = theirs(pixels)
        features = ours(pixels)
        torch.testing.assert_close(features, expected.last_hidden_state, atol=1e-5, rtol=1e-5)
        one = ours(pixels[1:2])
        torch.testing.assert_close(one, features[1:2], atol=1e-5, rtol=1e-5)
        if expected.pooler_output is not None:
            pooled = ours.pool(features)
            torch.testing.assert_close(pooled, expected.pooler_output, atol=1e-5, rtol=1e-5)
        else:
            with pytest.raises(ValueError, match="made with vision_use_head=False"):
                ours.pool(features)


def test_all_hidden_states(both):
    ours, theirs = both
    pixels = pictures_for(theirs.config)
    with torch.no_grad():
        expected = theirs(pixels, output_hidden_states=True).hidden_states
        states = ours.hidden_states(pixels)
    assert len(states) == len(expected) == ours.config.num_hidden_layers + 1
    for a, b in zip(states, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_gradients(both):
    ours, theirs = both
    grads = []
    for model in (ours, theirs):
        pixels = pictures_for(theirs.config).requires_grad_()
        model.zero_grad()
        y = model(pixels)
        (y if model is ours else y.last_hidden_state).square().mean().backward()
        weight = ours.patch_embedding.weight if model is ours else _patches(theirs)
        last = ours.layers[-1].mlp.down_proj if model is ours else _last(theirs)
        grads.append((pixels.grad, weight.grad.clone(), last.weight.grad.clone()))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def _patches(model):
    e = model.embeddings
    return (
        e.patch_embedding if hasattr(e, "patch_embedding") else e.patch_embeddings.projection
    ).weight


def _last(model):
    layers = model.layers if hasattr(model, "layers") else model.encoder.layers
    return layers[-1].mlp.fc2


def test_siglip_with_a_picture_that_is_not_square():
    """transformers does not ask for the sides: as many patches as a square picture has will do."""
    theirs = make_tower("siglip")
    config = VisionConfig(
        "siglip_vision_model", (8, 72), 8, hidden_size=24, intermediate_size=40,
        num_hidden_layers=3, hidden_act="gelu_pytorch_tanh", vision_use_head=True,
    )  # fmt: skip
    ours = VisionTransformer(config)
    from minillm.deeper.pretrained.vision import _from_file

    ours.load_state_dict(_from_file(theirs.state_dict(), config))
    pixels = torch.randn(2, 3, 8, 72)
    with torch.no_grad():
        expected = theirs(pixels).last_hidden_state
        torch.testing.assert_close(ours(pixels), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("patch", [4, (8, 4), (2, 16), (24, 32), 1])
def test_patches_are_a_convolution(patch):
    pixels = torch.randn(2, 3, 24, 32)
    p, q = (patch, patch) if isinstance(patch, int) else patch
    weight, bias = torch.randn(10, 3, p, q), torch.randn(10)
    expected = F.conv2d(pixels, weight, bias, stride=(p, q)).flatten(2).mT
    y = cut_patches(pixels, patch) @ weight.flatten(1).T + bias
    torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-5)
    unfolded = F.unfold(pixels, (p, q), stride=(p, q)).mT
    assert torch.equal(cut_patches(pixels, patch), unfolded)


def test_a_new_model_is_drawn_from_its_seed():
    config = VisionConfig(image_size=16, patch_size=8)
    state = torch.random.get_rng_state()
    a, b, c = (VisionTransformer(config, seed=s) for s in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(a.patch_embedding.weight, b.patch_embedding.weight)
    assert not torch.equal(a.patch_embedding.weight, c.patch_embedding.weight)
    assert not a.layers[0].self_attn.q_proj.bias.any()
    assert a.class_embedding.std() > 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: VisionConfig("vit3"), "model_type 'vit3' is unknown: choose one of vit, siglip"),
        (
            lambda: VisionConfig(image_size=7, patch_size=8),
            "no patch of 8 in a picture of 7",
        ),
        (
            lambda: VisionConfig(image_size=(24, 6), patch_size=8),
            r"no patch of 8 in a picture of \(24, 6",
        ),
        (
            lambda: VisionConfig(image_size=(24, 20, 3)),
            "image_size must be a positive integer or two, not",
        ),
        (lambda: VisionConfig(patch_size=0), "patch_size must be a positive integer or two, not 0"),
        (
            lambda: VisionConfig(hidden_size=2.5),
            "hidden_size must be a whole number from 1 to 2147483647, not 2.5",
        ),
        (lambda: VisionConfig("clip_vision_model", num_attention_heads=5), "heads=5 do not divide"),
        (lambda: VisionConfig("clip_vision_model", qkv_bias=False), "qkv_bias=False is ViT's"),
        (lambda: VisionConfig(hidden_act="swoosh"), "'swoosh' is unknown: choose one of relu"),
        (lambda: VisionConfig(layer_norm_eps=-1), "layer_norm_eps must be a number"),
        (
            lambda: cut_patches(torch.zeros(1, 3, 24, 30), 8),
            r"\(1, 3, 24, 30\) cannot be cut .* 8 x 8",
        ),
        (lambda: cut_patches(torch.zeros(3, 24, 32), 8), r"\(3, 24, 32\) cannot be cut"),
        (lambda: cut_patches(torch.zeros(1, 3, 24, 32), 0), "positive integer or two, not 0"),
        (lambda: cut_patches(torch.zeros(1, 3, 24, 32), 8.0), "positive integer or two, not 8.0"),
        (lambda: cut_patches([[0.0]], 8), "pixels must be a tensor of floats, not list"),
    ],
)
def test_what_cannot_be(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("shape", [(1, 3, 24, 24), (1, 1, 24, 32), (3, 24, 32), (1, 3, 32, 24)])
def test_pictures_of_another_size(shape):
    model = VisionTransformer(VisionConfig(image_size=(24, 32), patch_size=8))
    with pytest.raises(ValueError, match=r"should be \(B, 3, 24, 32\), in patches of 8 x 8"):
        model(torch.zeros(shape))


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (torch.zeros(1, 3, 16, 16, dtype=torch.uint8), "tensor of floats, not torch.uint8"),
        (torch.zeros(1, 3, 16, 16).tolist(), "tensor of floats, not list"),
        (torch.zeros(1, 3, 16, 16).numpy(), "tensor of floats, not ndarray"),
        (torch.full((1, 3, 16, 16), torch.nan), "768 of 768 pixels are NaN or infinite"),
    ],
)
def test_pixels_that_are_no_numbers(pixels, message):
    model = VisionTransformer(VisionConfig(image_size=16, patch_size=8))
    with pytest.raises(ValueError, match=message):
        model(pixels)


def test_pooling_features_of_another_size():
    config = VisionConfig("siglip_vision_model", 16, 8, vision_use_head=True)
    with pytest.raises(ValueError, match=r"shape \(1, 4, 63\), expected \(B, T, 64\)"):
        VisionTransformer(config).pool(torch.zeros(1, 4, 63))


def test_sixteen_bits_are_close_and_stay_sixteen():
    config = VisionConfig("clip_vision_model", 24, 8, hidden_act="quick_gelu")
    wide, narrow = VisionTransformer(config), VisionTransformer(config).bfloat16()
    pixels = torch.rand(2, 3, 24, 24)  # as a decoder of pictures gives them
    with torch.no_grad():
        y = narrow(pixels)
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y.float(), wide(pixels), atol=0.05, rtol=0.05)
