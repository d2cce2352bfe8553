"""Qwen2-VL against transformers: patches, positions, rotation, tower, whole model, bad input."""

import copy
import re

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from qwen_vl_checkpoints import CASES, END, IMAGE, LAYOUTS, START, VIDEO, draw, pair
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.modeling_qwen2_vl import (
    Qwen2VLRotaryEmbedding,
    Qwen2VLVisionRotaryEmbedding,
)
from transformers.vision_utils import get_vision_position_ids

import minillm
from minillm.config import ModelConfig
from minillm.deeper.caches.kinds import CACHE_KINDS
from minillm.deeper.pictures.qwen_vl import (
    PatchMerger,
    QwenVisionConfig,
    QwenVL,
    QwenVLConfig,
    cut_into_squares,
    merge_order,
    mrope,
    mrope_positions,
    patch_rotation,
)
from minillm.rope import RotaryEmbedding
from minillm.sampling import Sampler

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

BOTH = {"placeholder_ids": (IMAGE, VIDEO)}


@pytest.fixture(params=CASES)
def both(request, tmp_path):
    return pair(request.param, tmp_path)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return pair("plain", tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize("P", [1, 4])
def test_patches_are_those_of_the_processor(m, P):
    generator = torch.Generator().manual_seed(0)
    picture = torch.rand(3, 2 * m * P, 3 * m * P, generator=generator)
    processor = Qwen2VLImageProcessorPil(patch_size=P, merge_size=m)
    sizes = {"patch_size": P, "merge_size": m, "temporal_patch_size": 2}
    expected, height, width = processor.patchify(picture.numpy(), **sizes)
    patches, grid = cut_into_squares(picture, P, merge_size=m)
    assert grid == (1, height, width) == (1, 2 * m, 3 * m)
    assert np.array_equal(patches.numpy(), expected)
    frames = torch.rand(4, 3, 2 * m * P, 3 * m * P, generator=generator)
    film, grid = cut_into_squares(frames, P, merge_size=m)
    assert grid == (2, 2 * m, 3 * m)
    halves = [cut_into_squares(frames[i : i + 2], P, merge_size=m)[0] for i in (0, 2)]
    assert torch.equal(film, torch.cat(halves))
    still = cut_into_squares(picture[None].expand(2, -1, -1, -1), P, merge_size=m)[0]
    assert torch.equal(still, patches)


@pytest.mark.parametrize("m", [1, 2, 3])
def test_order_and_rotation_of_patches_are_theirs(m):
    for h, w in ((1, 1), (2, 3), (4, 1), (5, 7)):
        grid = torch.tensor([[1, h * m, w * m]])
        expected = get_vision_position_ids(grid, m)  # (N, 2)
        order = merge_order(h * m, w * m, m)
        assert torch.stack((order // (w * m), order % (w * m)), 1).tolist() == expected.tolist()
        for D, base in ((4, 10000.0), (12, 100.0), (80, 10000.0)):
            config = transformers.AutoConfig.for_model("qwen2_vl").vision_config
            config.embed_dim, config.num_heads = 3 * D, 3
            config.rope_parameters = {"rope_type": "axial", "rope_theta": base}
            cos, sin = Qwen2VLVisionRotaryEmbedding(config)(torch.empty(0), expected)
            mine = patch_rotation(h * m, w * m, D, merge_size=m, base=base)
            torch.testing.assert_close(mine.cos[0], cos)
            torch.testing.assert_close(mine.sin[0], sin)


def test_a_patch_pair_scores_by_rows_and_columns_apart_alone():
    h, w, D = 6, 8, 16
    q, k = torch.randn(2, 1, 1, 1, D, generator=torch.Generator().manual_seed(0)).double()
    turn = patch_rotation(h, w, D, merge_size=2)
    every = (turn(q.expand(1, 1, h * w, D)) @ turn(k.expand(1, 1, h * w, D)).mT)[0, 0]
    order = merge_order(h, w)
    scores = torch.zeros(h * w, h * w, dtype=every.dtype)
    scores[order[:, None], order] = every
    scores = scores.view(h, w, h, w)
    torch.testing.assert_close(scores[1, 2, 3, 5], scores[0, 1, 2, 4], atol=1e-5, rtol=0)
    assert (scores[1, 2, 3, 5] - scores[1, 2, 3, 4]).abs() > 1e-3


@given(
    rows=st.lists(
        st.lists(
            st.one_of(
                st.integers(1, 4),
                st.tuples(st.just(1), st.integers(1, 3), st.integers(1, 4)),
                st.tuples(st.integers(2, 3), st.integers(3, 4), st.integers(1, 3)),
            ),
            min_size=1,
            max_size=5,
        ),
        min_size=1,
        max_size=3,
    ),
    side=st.sampled_from(["left", "right"]),
)
@settings(max_examples=150, deadline=None)
def test_positions_and_delta_are_theirs(plain, rows, side):
    theirs, ours = plain
    apart = []  # theirs takes neighbouring pictures for one
    for row in rows:
        kept = []
        for part in row:
            if kept and not isinstance(part, int) and not isinstance(kept[-1], int):
                kept.append(1)
            kept.append(part)
        apart.append(kept)
    if not any(isinstance(p, tuple) for row in apart for p in row):
        apart[0].append((1, 2, 2))
    x, mask, _, grids, kw = draw(ours.config, apart, side=side)
    grid_kw = {k: v for k, v in kw.items() if "pixel" not in k}
    expected, delta = theirs.model.get_rope_index(x, attention_mask=mask, **grid_kw)
    positions, mine = mrope_positions(x, grids, attention_mask=mask, **BOTH)
    assert positions.tolist() == expected.tolist()
    assert mine.tolist() == delta.tolist()


def test_films_longer_than_wide_follow_the_paper_and_not_transformers(plain):
    theirs, _ = plain
    x = torch.tensor([[5] + 4 * [VIDEO] + [6, 7]])
    grids = torch.tensor([[4, 2, 2]])  # four times, one row, one column of squares
    types = (x == VIDEO).int() * 2
    wrong, _ = theirs.model.get_rope_index(x, types, video_grid_thw=grids)
    mine, delta = mrope_positions(x, grids, **BOTH)
    assert mine[0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert mine[1:, 0].tolist() == 2 * [[0, 1, 1, 1, 1, 5, 6]]
    assert delta.item() == 0
    # there the text goes on at the film's second moment: if this fails, it has been mended
    assert wrong[0, 0].tolist() == [0, 1, 2, 3, 4, 2, 3]


def test_pictures_side_by_side_have_places_of_their_own():
    x = torch.tensor([6 * [IMAGE] + [5]])
    positions, delta = mrope_positions(x, torch.tensor([[1, 4, 4], [1, 2, 4]]), **BOTH)
    assert positions[:, 0].tolist() == [
        [0, 0, 0, 0, 2, 2, 4],
        [0, 0, 1, 1, 2, 2, 4],
        [0, 1, 0, 1, 2, 3, 4],
    ]
    assert delta.tolist() == [[-2]]
    text, nothing = mrope_positions(x - x + 7, **BOTH)
    assert text.tolist() == [[list(range(7))]] * 3 and nothing.tolist() == [[0]]


@pytest.mark.parametrize("sections", [(2, 1, 1), (1, 1, 2), (0, 4, 0), (16, 24, 24)])
def test_the_rotation_of_three_rows_is_theirs(sections):
    D = 2 * sum(sections)
    config = transformers.AutoConfig.for_model(
        "qwen2_vl",
        text_config={
            "hidden_size": 4 * D,
            "num_attention_heads": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5,
                                "mrope_section": list(sections)},
        },
    ).text_config  # fmt: skip
    rotary = RotaryEmbedding(D, base=5e5)
    positions = torch.randint(0, 90, (3, 2, 7), generator=torch.Generator().manual_seed(0))
    cos, sin = Qwen2VLRotaryEmbedding(config)(torch.empty(0), positions)
    mine = mrope(rotary, positions, sections)
    torch.testing.assert_close(mine.cos, cos, atol=1e-5, rtol=0)
    torch.testing.assert_close(mine.sin, sin, atol=1e-5, rtol=0)
    same = positions[:1].expand(3, -1, -1)
    assert torch.equal(mrope(rotary, same, sections).cos, rotary(positions[0]).cos)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_and_features_are_those_of_transformers(both, layout):
    theirs, ours = both
    for side in ("left", "right"):
        x, mask, pixels, grids, kw = draw(ours.config, LAYOUTS[layout], side=side)
        with torch.no_grad():
            expected = theirs(input_ids=x, attention_mask=mask, **kw).logits
            mine = ours(x, pixels, grids, attention_mask=mask)
            seen = theirs.model.visual(pixels, grid_thw=grids).pooler_output
        torch.testing.assert_close(ours.visual(pixels, grids), seen, atol=1e-5, rtol=1e-5)
        kept = mask.bool()
        torch.testing.assert_close(mine[kept], expected[kept], atol=2e-5, rtol=1e-5)
        last = ours(x, pixels, grids, attention_mask=mask, logits_to_keep=2)
        torch.testing.assert_close(last, mine[:, -2:], atol=1e-5, rtol=1e-5)


def test_gradients_are_those_of_transformers(both):
    theirs, ours = both
    x, _, pixels, grids, kw = draw(ours.config, LAYOUTS["several"])
    pixels.requires_grad_(True)
    kw["pixel_values"] = pixels
    mine = ours(x, pixels, grids)
    toward = torch.randn(mine.shape, generator=torch.Generator().manual_seed(1)) / 100
    names = {"language.model.embed_tokens.weight": "model.language_model.embed_tokens.weight"}
    names |= {
        f"visual.{k}": f"model.visual.{k}" for k in ("merger.ln_q.weight", "merger.mlp.0.bias")
    }
    names |= {"visual.blocks.0.norm1.bias": "model.visual.blocks.0.norm1.bias"}
    weights, others = dict(ours.named_parameters()), dict(theirs.named_parameters())
    (mine * toward).sum().backward()
    got = [pixels.grad.clone()] + [weights[k].grad for k in names]
    pixels.grad = None
    (theirs(input_ids=x, **kw).logits * toward).sum().backward()
    expected = [pixels.grad] + [others[k].grad for k in names.values()]
    for a, b in zip(got, expected, strict=True):
        assert b.abs().max() > 1e-4
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "last"])
@torch.no_grad()
def test_cached_greedy_generation_is_theirs(both, layout):
    theirs, ours = both
    x, mask, pixels, grids, kw = draw(ours.config, LAYOUTS[layout])
    options = {"max_new_tokens": 8, "do_sample": False}
    expected = theirs.generate(x, attention_mask=mask, **kw, **options)
    mine = ours.generate(x, pixels, grids, attention_mask=mask, max_new_tokens=8)
    assert mine.tolist() == expected.tolist()


@torch.no_grad()
def test_after_a_picture_at_the_end_their_generation_leaves_their_own_positions(plain):
    theirs, ours = plain
    x, _, pixels, grids, kw = draw(ours.config, LAYOUTS["last"])
    mine = ours.generate(x, pixels, grids, max_new_tokens=6, eos_token_id=None)
    T = x.shape[1]

    def by_forward(ids):
        """What their model says after each token, all at once, without a cache."""
        more = torch.nn.functional.pad(kw["mm_token_type_ids"], (0, ids.shape[1] - T))
        out = theirs(input_ids=ids, **{**kw, "mm_token_type_ids": more}).logits
        return out[:, T - 1 : -1].argmax(-1)

    assert mine[:, T:].tolist() == by_forward(mine).tolist()
    wrong = theirs.generate(x, max_new_tokens=6, do_sample=False, eos_token_id=None, **kw)
    # each row of positions goes on by itself there; equal now would mean that it was mended
    assert wrong[:, T:].tolist() != by_forward(wrong).tolist()


@torch.no_grad()
@pytest.mark.parametrize("kind", [None, *CACHE_KINDS])
def test_every_cache_gives_the_same_and_pictures_are_read_once(kind, plain):
    _, model = plain
    x, mask, pixels, grids, _ = draw(model.config, LAYOUTS["batch"])
    if kind == "sliding":
        with pytest.raises(ValueError, match="sliding"):
            model.generate(x, pixels, grids, attention_mask=mask, max_new_tokens=2, cache=kind)
        return
    read = []
    hook = model.visual.register_forward_hook(lambda *_: read.append(1))
    options = {"attention_mask": mask, "max_new_tokens": 9, "eos_token_id": None}
    got = model.generate(x, pixels, grids, cache=kind, **options)
    assert len(read) == 1
    whole = model.generate(x, pixels, grids, cache=None, **options)
    hook.remove()
    assert kind == "quantized" or got.tolist() == whole.tolist()
    drawn = model.generate(x, pixels, grids, sampler=Sampler(seed=1), **options)
    assert drawn.tolist() != whole.tolist()


@torch.no_grad()
def test_a_prompt_may_come_in_pieces_and_needs_its_delta(plain):
    _, model = plain
    ids, _, pixels, grids, _ = draw(model.config, LAYOUTS["one"])
    more = torch.cat((ids, torch.tensor([[7, IMAGE, 9]])), 1)  # written: no picture, but its id
    prompt = model.read(ids, pixels, grids)
    whole = prompt(more)
    for cuts in ((6, 11), (1, 12), (9,), (10, 11, 12)):
        cache = model.language.make_cache(batch_size=1)
        parts = [prompt(p, cache=cache) for p in more.tensor_split(cuts, dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-5)
    prompt.delta = torch.zeros_like(prompt.delta)
    wrong = (prompt(more) - whole).abs()
    assert wrong[:, : ids.shape[1]].max() == 0 and wrong[:, ids.shape[1] :].max() > 0.05


@torch.no_grad()
def test_rows_of_a_batch_are_as_one_by_one(both):
    _, model = both
    layouts = LAYOUTS["batch"]
    x, mask, pixels, grids, _ = draw(model.config, layouts)
    together = model(x, pixels, grids, attention_mask=mask)
    options = {"max_new_tokens": 6, "eos_token_id": None}
    made = model.generate(x, pixels, grids, attention_mask=mask, **options)
    first = 0
    for row, layout in enumerate(layouts):
        number = sum(isinstance(part, tuple) for part in layout)
        own = grids[first : first + number]
        before = int(grids[:first].prod(1).sum())
        mine = pixels[before : before + int(own.prod(1).sum())]
        start = int((mask[row] == 0).sum())
        alone = model(x[row : row + 1, start:], mine, own)[0]
        torch.testing.assert_close(together[row, start:], alone, atol=1e-5, rtol=1e-5)
        alone = model.generate(x[row : row + 1, start:], mine, own, **options)[0]
        assert made[row, start:].tolist() == alone.tolist()
        assert torch.equal(model.visual(mine, own), model.visual(pixels, grids)[
            before // model.visual.merger.group :][: int(own.prod(1).sum())
                                                   // model.visual.merger.group])  # fmt: skip
        first += number


@torch.no_grad()
def test_without_pictures_it_is_the_language_model(plain):
    theirs, model = plain
    x = torch.tensor([[5, 6, 7, 8, 9]])
    torch.testing.assert_close(model(x), model.language(x), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(model(x), theirs(input_ids=x).logits, atol=1e-5, rtol=1e-5)
    none = torch.zeros(0, 96), torch.zeros(0, 3, dtype=torch.long)
    assert torch.equal(model(x, *none), model(x)) and model.visual(*none).shape == (0, 32)
    mine = model.generate(x, max_new_tokens=5, eos_token_id=None)
    plain = minillm.generate(model.language, x, max_new_tokens=5, eos_token_id=None)
    assert mine.tolist() == plain.tolist()


def test_gradients_flow_into_the_tower_and_a_step_of_training_helps(plain):
    model = QwenVL(plain[1].config, seed=1)
    x, _, pixels, grids, _ = draw(model.config, LAYOUTS["one"])
    optimizer = torch.optim.AdamW(model.visual.parameters(), lr=1e-2)
    losses = []
    for _ in range(6):
        logits = model(x, pixels, grids)[:, -3:-1]
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), x[0, -2:]))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.01


MODEL = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
         "intermediate_size": 16, "model_type": "qwen2"}  # fmt: skip


def config_of(text=None, vision=None, **changes):
    vision = QwenVisionConfig(**{"hidden_size": 32, "depth": 1, "embed_dim": 16, "num_heads": 2,
                                 "patch_size": 4, **(vision or {})})  # fmt: skip
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO, "mrope_section": (2, 1, 1)}
    tokens |= {"vision_start_token_id": START, "vision_end_token_id": END}
    return QwenVLConfig(ModelConfig(**{**MODEL, **(text or {})}), vision, **{**tokens, **changes})


def test_bad_input_is_refused_before_any_work(plain):
    _, model = plain
    ids, mask, pixels, grids, _ = draw(model.config, LAYOUTS["one"])
    worked = []
    hooks = [
        part.register_forward_hook(lambda *_: worked.append(1))
        for part in (model.language.model.embed_tokens, model.visual.patch_embed)
    ]
    more = torch.cat((ids, ids[:, 4:5]), 1)
    split = ids.clone()
    split[0, [5, -1]] = torch.tensor([7, IMAGE])
    odd = torch.tensor([[1, 3, 8]])
    for arguments, message in [
        ((ids,), "6 placeholders for 0 features of 0 pictures"),
        ((more, pixels, grids), "7 placeholders for 6 features of 1 pictures"),
        ((ids - ids + 5, pixels, grids), "0 placeholders for 6 features of 1 pictures"),
        ((split, pixels, grids), "begins at token 4 of row 0, and text interrupts"),
        ((ids, pixels), "pixels are given without grids"),
        ((ids, None, grids), "grids are given without pixels"),
        ((ids, pixels, odd), "a grid of (1, 3, 8) patches has no squares of 2 x 2"),
        ((ids, pixels, grids[0]), "grids are whole numbers (pictures, 3)"),
        ((ids, pixels, grids.float()), "not torch.float32 (1, 3)"),
        ((ids, pixels, 0 * grids), "a grid of (0, 0, 0)"),
        ((ids, pixels[1:], grids), "(23, 96), the grids [[1, 4, 6]] want (24, 96)"),
        ((ids, pixels[:, 1:], grids), "(24, 95), the grids [[1, 4, 6]] want (24, 96)"),
        ((ids[0], pixels, grids), "input_ids must be int64 or int32 (B, T), not torch.int64 (13,)"),
        ((ids.float(), pixels, grids), "not torch.float32 (1, 13)"),
        (([[5, 6]],), "ids, mask and positions must be tensors, not [[5, 6]]"),
        ((None,), "ids, mask and positions must be tensors, not None"),
        ((ids, pixels, [[1, 4, 6]]), "grids must be a tensor, not [[1, 4, 6]]"),
        ((ids, pixels, grids.bool()), "not torch.bool (1, 3)"),
        ((ids, [[0.5]], grids), "pixels must be a tensor of floats, not list"),
        ((ids, pixels.long(), grids), "pixels must be a tensor of floats, not torch.int64"),
    ]:
        for call in (model, lambda *a: model.generate(*a, max_new_tokens=1)):
            with pytest.raises(ValueError, match=re.escape(message)):
                call(*arguments)
    with pytest.raises(ValueError, match=r"attention_mask .* should be"):
        model(ids, pixels, grids, attention_mask=mask[:, 1:])
    for call in (model, lambda *a, **k: model.generate(*a, max_new_tokens=1, **k)):
        with pytest.raises(ValueError, match=r"ids, mask and positions must be tensors, not \[\[1"):
            call(ids, pixels, grids, attention_mask=mask.tolist())
    with pytest.raises(ValueError, match="compile=True"):
        model.generate(ids, pixels, grids, max_new_tokens=1, compile=True)
    end = torch.tensor([[5, 6, IMAGE, IMAGE], [IMAGE, IMAGE, 5, 6]])
    with pytest.raises(ValueError, match="row 0 ends after 2 of the 4 placeholders of its last"):
        mrope_positions(end, torch.tensor([[1, 4, 4]]), **BOTH)
    assert not worked
    prompt = model.read(ids, pixels, grids)
    with pytest.raises(ValueError, match="2 rows of ids for a prompt of 1"):
        prompt(ids.repeat(2, 1))
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: merge_order(3, 4), "3 x 4 patches has no squares of 2 x 2"),
        (lambda: merge_order(0, 4), "0 x 4 patches"),
        (lambda: patch_rotation(2, 2, 6), "multiple of 4, not 6"),
        (lambda: cut_into_squares(torch.zeros(3, 8, 12), 4), "8 x 12 pixels do not divide"),
        (lambda: cut_into_squares(torch.zeros(3, 3, 8, 8), 4), "3 frames of 8 x 8"),
        (lambda: cut_into_squares(torch.zeros(8, 8), 4), r"not \(8, 8\)"),
        (lambda: cut_into_squares([[0.5]], 4), "picture must be a tensor of floats, not list"),
        (lambda: cut_into_squares(torch.ones(3, 8, 8).int(), 4), "floats, not torch.int32"),
        (lambda: mrope(RotaryEmbedding(8), torch.zeros(3, 1, 2), (1, 1, 1)), r"\[1, 1, 1\]"),
        (lambda: mrope(RotaryEmbedding(8), torch.zeros(1, 2), (2, 1, 1)), r"\(3, B, T\), not"),
        (lambda: PatchMerger(4, 8)(torch.zeros(1, 6, 4)), "6 patches do not make groups of 4"),
        (lambda: config_of(text={"model_type": "llama"}), "family qwen2, not llama"),
        (lambda: config_of(mrope_section=(2, 2, 1)), r"\(2, 2, 1\) has 5 pairs, a head has 4"),
        (lambda: config_of(mrope_section=(2, 2)), r"three whole numbers, not \(2, 2\)"),
        (lambda: config_of(vision={"hidden_size": 8}), "8, the language model reads 32"),
        (lambda: config_of(image_token_id=96), "image_token_id=96, but ids are 0 to 95"),
        (lambda: config_of(vision={"num_heads": 3}), "embed_dim=16, num_heads=3"),
        (
            lambda: config_of(vision={"depth": 0}),
            "depth must be a whole number from 1 to 2147483647, not 0",
        ),
        (
            lambda: config_of(vision={"hidden_act": "quack"}),
            "'quack' is unknown: choose one of relu",
        ),
        (lambda: config_of(vision={"rope_theta": 0}), "rope_theta must be a number above 0, not 0"),
    ],
)
def test_bad_sizes_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_weights_are_drawn_by_seed_and_leave_no_trace():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    models = [QwenVL(config_of(), seed=s) for s in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), before)
    first, again, other = (m.visual.merger.mlp[0].weight for m in models)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert models[0].num_parameters() == sum(p.numel() for p in models[0].parameters())


def test_the_published_sizes_are_the_defaults():
    config = transformers.AutoConfig.for_model("qwen2_vl").vision_config
    ours = QwenVisionConfig(hidden_size=3584)
    for name in ("depth", "embed_dim", "num_heads", "mlp_ratio", "in_channels", "patch_size"):
        assert getattr(ours, name) == getattr(config, name)
    assert ours.patch_numbers == 3 * 2 * 14 * 14


def test_pictures_are_read_and_texts_written_in_eval_mode(plain):
    model, ran = copy.deepcopy(plain[1]).train(), []
    for part in model.modules():
        part.register_forward_hook(lambda part, *_: ran.append((part, part.training)))
    x, mask, pixels, grids, _ = draw(model.config, LAYOUTS["batch"])
    model.generate(x, pixels, grids, attention_mask=mask, max_new_tokens=2)
    assert {model.visual, model.language.lm_head} <= {part for part, _ in ran}
    assert not any(training for _, training in ran)
    assert all(part.training for part in model.modules())


def test_numbers_are_counted_as_transformers_counts_them(both):
    theirs, ours = both
    for options in ({}, {"only_trainable": True}, {"exclude_embeddings": True}):
        assert ours.num_parameters(**options) == theirs.num_parameters(**options)
