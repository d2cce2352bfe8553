"""Qwen2-VL: pictures of any size in the stream of tokens, at positions that have three numbers.

Explained in notebooks/deeper/16_real_readers.ipynb. Computes what Hugging Face's
`Qwen2VLForConditionalGeneration` does; `deeper.pretrained.qwen_vl` reads and writes its files.
"""

# Built from notebooks/deeper/16_real_readers.ipynb: edit there, then make build.

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from minillm.beyond.pictures.vision_parts import check_floats
from minillm.cache import KVCache
from minillm.config import ModelConfig
from minillm.generation import generate
from minillm.heads import MultiHeadAttention
from minillm.layers import ACTIVATIONS, MLP, LayerNorm
from minillm.model import CausalLM
from minillm.rope import RotaryEmbedding, Rotation, rope_periods
from minillm.support.checks.kinds import POSITIVE, TEXT, check_one_of, check_values, list_of, whole
from minillm.support.checks.model import check_inputs
from minillm.support.modes import EvalMode
from minillm.support.saved import SavedModel

__all__ = [
    "PatchMerger",
    "Prompt",
    "QwenVL",
    "QwenVLConfig",
    "QwenVisionConfig",
    "VisionBlock",
    "VisionTower",
    "check_grids",
    "cut_into_squares",
    "merge_order",
    "mrope",
    "mrope_positions",
    "patch_rotation",
]


def check_grids(grids: Tensor, merge_size: int) -> None:
    """Raises: ValueError unless grids are (pictures, 3), positive, squares in each."""
    if not isinstance(grids, Tensor):
        raise ValueError(f"grids must be a tensor, not {grids!r:.60}")
    if grids.ndim != 2 or grids.shape[1] != 3 or grids.dtype not in (torch.int64, torch.int32):
        found = f"{grids.dtype} {tuple(grids.shape)}"
        raise ValueError(
            f"grids are whole numbers (pictures, 3): times, rows, columns; not {found}"
        )
    for t, h, w in grids.tolist():
        if min(t, h, w) < 1 or h % merge_size or w % merge_size:
            m = merge_size
            raise ValueError(f"a grid of {(t, h, w)} patches has no squares of {m} x {m}")


def mrope_positions(
    input_ids: Tensor,
    grids: Tensor | None = None,
    *,
    placeholder_ids: Collection[int],
    merge_size: int = 2,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Positions in time, height and width, and how far they run ahead of the number of tokens.

    A token of text moves all three on by one. A picture's features stand at their own time, row and
    column, counted from where the text before it stopped; the text goes on after the largest of
    these. The k-th token after the prompt stands at (tokens before it) + delta.
    `grids` are the pictures' patches (times, rows, columns) in the order in which they appear.
    Shape: ids (B, T), grids (pictures, 3), mask (B, T) -> positions (3, B, T), delta (B, 1).
        Positions of padding are 0.
    Raises: ValueError if placeholders and features do not match, or grids do not divide.
    Source: Wang et al. 2024 (Qwen2-VL), section 2.1.
    """
    check_inputs(input_ids, attention_mask, None, past=0)
    grids = torch.empty(0, 3, dtype=torch.long) if grids is None else grids
    check_grids(grids, merge_size)
    real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    here = torch.isin(input_ids, torch.tensor(list(placeholder_ids), device=input_ids.device))
    wanted = int((here & real.bool()).sum())
    features = int(grids.prod(1).sum()) // merge_size**2
    if wanted != features:
        counts = f"{wanted} placeholders for {features} features of {len(grids)} pictures"
        raise ValueError(f"input_ids and pictures do not match: {counts}")
    pictures = iter([(t, h // merge_size, w // merge_size) for t, h, w in grids.tolist()])
    positions = torch.zeros(3, *input_ids.shape, dtype=torch.long)
    delta = torch.zeros(len(input_ids), 1, dtype=torch.long)
    for row, (marks, mask) in enumerate(zip(here.cpu(), real.bool().cpu(), strict=True)):
        is_picture = marks[mask].tolist()
        parts, i, start = [torch.zeros(3, 0, dtype=torch.long)], 0, 0
        while i < len(is_picture):
            if is_picture[i]:
                part = (
                    torch.cartesian_prod(*map(torch.arange, next(pictures))).view(-1, 3).T + start
                )
            else:
                part = torch.full((3, 1), start)
            held = is_picture[i : i + part.shape[1]]
            if is_picture[i] and not all(held):
                raise ValueError(
                    f"a picture of {part.shape[1]} features begins at token {i} of row {row}, and "
                    f"text interrupts its placeholders"
                )
            if len(held) < part.shape[1]:
                counts = f"{len(held)} of the {part.shape[1]} placeholders of its last picture"
                raise ValueError(f"row {row} ends after {counts}")
            parts.append(part)
            i, start = i + part.shape[1], int(part.max()) + 1
        positions[:, row, mask] = torch.cat(parts, 1)
        delta[row] = start - len(is_picture)
    return positions.to(input_ids.device), delta.to(input_ids.device)


def mrope(rotary: RotaryEmbedding, positions: Tensor, sections: Sequence[int]) -> Rotation:
    """The rotation of positions of three numbers: each pair of a head listens to one of them.

    The first sections[0] pairs, the fastest, turn by time, the next by height, the last by width.
    Where the three are equal, as in text, this is the ordinary rotation.
    Shape: (3, B, T) -> Rotation of (B, T, D).
    Raises: ValueError unless there are three sections, D/2 pairs in all.
    Source: Wang et al. 2024 (Qwen2-VL), section 2.1.
    """
    pairs = rotary.head_dim // 2
    if len(sections) != 3 or sum(sections) != pairs:
        raise ValueError(f"sections {list(sections)} are not three, {pairs} pairs in all")
    if positions.ndim != 3 or positions.shape[0] != 3:
        raise ValueError(f"positions must be (3, B, T), not {tuple(positions.shape)}")
    every = rotary(positions)  # (3, B, T, D): all pairs, turned by each of the three

    def pick(x: Tensor) -> Tensor:
        parts = x.split([*sections, *sections], dim=-1)  # partners lie D/2 apart
        return torch.cat([part[i % 3] for i, part in enumerate(parts)], dim=-1)

    return Rotation(pick(every.cos), pick(every.sin))


def merge_order(height: int, width: int, merge_size: int = 2) -> Tensor:
    """The patches of a grid, numbered row by row, in the order in which Qwen2-VL reads them.

    The patches of each square of merge_size x merge_size stand together, squares row by row.
    Shape: -> (height * width,) long.
    Raises: ValueError if the grid does not divide into such squares.
    """
    m = merge_size
    if min(height, width, m) < 1 or height % m or width % m:
        raise ValueError(f"a grid of {height} x {width} patches has no squares of {m} x {m}")
    numbers = torch.arange(height * width).view(height // m, m, width // m, m)
    return numbers.transpose(1, 2).flatten()


def cut_into_squares(
    picture: Tensor, patch_size: int = 14, *, merge_size: int = 2, temporal_patch_size: int = 2
) -> tuple[Tensor, tuple[int, int, int]]:
    """Patches of a picture or a film in `merge_order`, one a row, and the grid that they make.

    The grid is times, rows, columns. A patch spans `temporal_patch_size` frames; a still picture is
    shown that often.
    Shape: (channels, H, W) or (frames, channels, H, W)
        -> (times * rows * columns, channels * temporal_patch_size * patch_size^2).
    Raises: ValueError if frames, height or width do not divide.
    """
    check_floats("picture", picture)
    P, M, F = patch_size, merge_size, temporal_patch_size
    if picture.ndim not in (3, 4):
        raise ValueError(f"a picture is (channels, H, W), not {tuple(picture.shape)}")
    frames = picture.expand(F, *picture.shape) if picture.ndim == 3 else picture
    N, C, H, W = frames.shape
    if not frames.numel() or N % F or H % (P * M) or W % (P * M):
        wanted = f"frames by {F}, height and width by {P} x {M} = {P * M}"
        raise ValueError(f"{N} frames of {H} x {W} pixels do not divide: {wanted}")
    t, h, w = N // F, H // P, W // P
    x = frames.reshape(t, F, C, h, P, w, P).permute(0, 3, 5, 2, 1, 4, 6)  # (t, h, w, C, F, P, P)
    x = x.reshape(t, h * w, C * F * P * P)[:, merge_order(h, w, M)]
    return x.flatten(0, 1), (t, h, w)


def patch_rotation(
    height: int,
    width: int,
    head_dim: int,
    *,
    merge_size: int = 2,
    base: float = 10000.0,
    device: torch.device | str | None = None,
) -> Rotation:
    """The rotation of a grid's patches: half of each head's pairs by the row, half by the column.

    Both halves have the same frequencies, those of a head half as large.
    Shape: -> Rotation of (1, height * width, head_dim), patches in `merge_order`.
    Raises: ValueError for a head size that is no multiple of 4, or a grid that does not divide.
    """
    if head_dim < 4 or head_dim % 4:
        raise ValueError(f"head_dim must be a multiple of 4, not {head_dim}")
    order = merge_order(height, width, merge_size).to(device)
    frequencies = 1 / rope_periods(head_dim // 2, base, device=device)  # (D/4,)
    by_row = (order // width)[:, None] * frequencies
    by_column = (order % width)[:, None] * frequencies
    angles = torch.cat((by_row, by_column), -1).repeat(1, 2)[None]  # (1, N, D)
    return Rotation(angles.cos(), angles.sin())


@dataclass(frozen=True)
class QwenVisionConfig:
    """Sizes of a Qwen2-VL tower, named as in Hugging Face's files.

    Args:
        hidden_size: of the language model, which reads what the tower writes.
        embed_dim: of the tower itself.
        spatial_merge_size: so many patches, squared, become one feature.
        temporal_patch_size: so many frames lie in one patch.
    Raises: ValueError, with the value, for sizes that do not fit each other.
    """

    hidden_size: int
    depth: int = 32
    embed_dim: int = 1280
    num_heads: int = 16
    mlp_ratio: int = 4
    in_channels: int = 3
    patch_size: int = 14
    spatial_merge_size: int = 2
    temporal_patch_size: int = 2
    hidden_act: str = "quick_gelu"
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        counts = dict.fromkeys(vars(self), whole(1))
        check_values(self, counts | {"rope_theta": POSITIVE, "hidden_act": TEXT})
        check_one_of("hidden_act", self.hidden_act, list(ACTIVATIONS))
        if self.embed_dim % (4 * self.num_heads):
            sizes = f"embed_dim={self.embed_dim}, num_heads={self.num_heads}"
            raise ValueError(f"heads must have a multiple of 4 numbers: {sizes}")

    @property
    def patch_numbers(self) -> int:
        """How many numbers a patch has: all pixels of its frames, in all channels."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


class VisionBlock(nn.Module):
    """Attention among the patches of a frame, then the feed-forward block; pre-norm.

    Shape: (frames, patches, E) -> the same.
    """

    def __init__(self, config: QwenVisionConfig) -> None:
        super().__init__()
        c, E = config, config.embed_dim
        self.norm1, self.norm2 = LayerNorm(E, eps=1e-6), LayerNorm(E, eps=1e-6)
        self.attn = MultiHeadAttention(E, c.num_heads, bias=True, out_bias=True)
        self.mlp = MLP(E, E * c.mlp_ratio, activation=c.hidden_act)

    def forward(self, x: Tensor, rope: Rotation) -> Tensor:
        x = x + self.attn(self.norm1(x), rope=rope)
        return x + self.mlp(self.norm2(x))


class PatchMerger(nn.Module):
    """One feature for the language model out of each square of patches, which stand together.

    Shape: (..., patches, E) -> (..., patches / merge_size^2, C).
    Source: Wang et al. 2024 (Qwen2-VL), section 2.1.
    """

    def __init__(self, embed_dim: int, hidden_size: int, merge_size: int = 2) -> None:
        super().__init__()
        self.group = merge_size**2
        wide = embed_dim * self.group
        self.ln_q = LayerNorm(embed_dim, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(wide, wide), nn.GELU(), nn.Linear(wide, hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-2] % self.group:
            raise ValueError(f"{x.shape[-2]} patches do not make groups of {self.group}")
        return self.mlp(self.ln_q(x).unflatten(-2, (-1, self.group)).flatten(-2))


class VisionTower(nn.Module):
    """Patches of pictures of any size in, features for the language model out.

    Each picture is read alone, and each frame of a film: no patch sees those of another.
    Source: Wang et al. 2024 (Qwen2-VL), section 2.1.
    """

    def __init__(self, config: QwenVisionConfig) -> None:
        super().__init__()
        c = self.config = config
        self.patch_embed = nn.Linear(c.patch_numbers, c.embed_dim, bias=False)
        self.blocks = nn.ModuleList(VisionBlock(c) for _ in range(c.depth))
        self.merger = PatchMerger(c.embed_dim, c.hidden_size, c.spatial_merge_size)

    def check(self, pixels: Tensor, grids: Tensor) -> None:
        """Raises: ValueError if grids do not divide, or pixels are no floats that fit them."""
        c = self.config
        check_floats("pixels", pixels)
        check_grids(grids, c.spatial_merge_size)
        wanted = (int(grids.prod(1).sum()), c.patch_numbers)
        if pixels.shape != wanted:
            found = f"{tuple(pixels.shape)}, the grids {grids.tolist()} want {wanted}"
            raise ValueError(f"pixels are {found}: a row a patch")

    def forward(self, pixels: Tensor, grids: Tensor) -> Tensor:
        """Features of all pictures, one after the other.

        Shape: pixels (patches, numbers of a patch), grids (pictures, 3)
            -> (patches / merge_size^2, C).
        Raises: ValueError as `check`.
        """
        self.check(pixels, grids)
        c, features, first = self.config, [], 0
        for (h, w), alike in groupby(grids.tolist(), key=lambda grid: grid[1:]):
            frames = sum(t for t, _, _ in alike)  # pictures of one size are read side by side
            last = first + frames * h * w
            patches, first = pixels[first:last], last
            x = self.patch_embed(patches.to(self.patch_embed.weight.dtype)).view(frames, h * w, -1)
            rope = patch_rotation(
                h,
                w,
                c.embed_dim // c.num_heads,
                merge_size=c.spatial_merge_size,
                base=c.rope_theta,
                device=x.device,
            )
            for block in self.blocks:
                x = block(x, rope)
            features.append(self.merger(x).flatten(0, 1))
        return torch.cat(features) if features else pixels.new_zeros(0, c.hidden_size)


@dataclass(frozen=True)
class QwenVLConfig:
    """A language model of the qwen2 family, a tower, and how the two meet.

    Args:
        mrope_section: how many pairs of a head turn by time, by height, by width.
        image_token_id, video_token_id: placeholders, where features of the tower go.
    Raises: ValueError, with the values, for parts that do not fit each other.
    """

    text: ModelConfig
    vision: QwenVisionConfig
    mrope_section: Sequence[int] = (16, 24, 24)
    image_token_id: int = 151655
    video_token_id: int = 151656
    vision_start_token_id: int = 151652
    vision_end_token_id: int = 151653

    def __post_init__(self) -> None:
        if self.text.model_type != "qwen2":
            raise ValueError(f"text must be of the family qwen2, not {self.text.model_type}")
        marks = dict.fromkeys(("vision_start_token_id", "vision_end_token_id"), whole())
        check_values(self, {**marks, "mrope_section": list_of(whole())})
        object.__setattr__(self, "mrope_section", tuple(self.mrope_section))
        pairs, found = self.text.head_dim // 2, self.mrope_section
        if len(found) != 3:
            raise ValueError(f"mrope_section must be three whole numbers, not {found}")
        if sum(found) != pairs:
            raise ValueError(f"mrope_section {found} has {sum(found)} pairs, a head has {pairs}")
        if self.vision.hidden_size != self.text.hidden_size:
            sizes = f"{self.vision.hidden_size}, the language model reads {self.text.hidden_size}"
            raise ValueError(f"the tower writes vectors of {sizes}")
        for name in ("image_token_id", "video_token_id"):
            if type(i := getattr(self, name)) is not int or not 0 <= i < self.text.vocab_size:
                raise ValueError(f"{name}={i!r}, but ids are 0 to {self.text.vocab_size - 1}")


class QwenVL(SavedModel):
    """A language model that reads pictures in its stream of tokens.

    Weights are drawn with `seed`, as `CausalLM` draws its own.
    Source: Wang et al. 2024, Qwen2-VL.
    """

    files = "qwen_vl.LAYOUT"

    def __init__(self, config: QwenVLConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.language = CausalLM(config.text, seed=seed)
        with torch.random.fork_rng(devices=[]):  # torch's own initial values leave no trace
            self.visual = VisionTower(config.vision)
        self.reset_parameters(seed)

    @torch.no_grad()
    def reset_parameters(self, seed: int = 0) -> None:
        """Draw all matrices anew; biases zero; norms as they were made."""
        self.language.reset_parameters(seed)
        device = self.visual.patch_embed.weight.device
        generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
        for name, weight in self.visual.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, self.config.text.initializer_range, generator=generator)
            elif name.endswith("bias"):
                weight.zero_()

    def read(
        self,
        input_ids: Tensor,
        pixels: Tensor | None = None,
        grids: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
    ) -> "Prompt":
        """Look at the pictures, once, and put what was seen in the places held for it.

        Shape: ids and mask (B, T); pixels (patches, numbers) and grids (pictures, 3) of all
            pictures, in the order in which the rows hold them.
        Raises: ValueError, before any work, if pictures and placeholders do not match.
        """
        if (pixels is None) != (grids is None):
            given, lacks = ("grids", "pixels") if pixels is None else ("pixels", "grids")
            raise ValueError(f"{given} are given without {lacks}: a picture is both")
        c, language = self.config, self.language.model
        placeholders = (c.image_token_id, c.video_token_id)
        positions, delta = mrope_positions(
            input_ids,
            grids,
            placeholder_ids=placeholders,
            merge_size=c.vision.spatial_merge_size,
            attention_mask=attention_mask,
        )
        if pixels is not None and grids is not None:
            self.visual.check(pixels, grids)
        x = language.embed(input_ids, positions[0])  # (B, T, C)
        if pixels is not None and grids is not None:
            here = torch.isin(input_ids, input_ids.new_tensor(placeholders))
            if attention_mask is not None:
                here = here & attention_mask.bool()
            x = x.masked_scatter(here[..., None], self.visual(pixels, grids).to(x.dtype))
        return Prompt(self, x, positions, delta)

    def forward(
        self,
        input_ids: Tensor,
        pixels: Tensor | None = None,
        grids: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        logits_to_keep: int = 0,
    ) -> Tensor:
        """Scores for the next token after each one, pictures read on the way.

        Shape: as `read` -> (B, T or logits_to_keep, V).
        Raises: ValueError as `read`.
        """
        prompt = self.read(input_ids, pixels, grids, attention_mask=attention_mask)
        return prompt(input_ids, attention_mask=attention_mask, logits_to_keep=logits_to_keep)

    def generate(
        self,
        input_ids: Tensor,
        pixels: Tensor | None = None,
        grids: Tensor | None = None,
        *,
        max_new_tokens: int,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Continue each row; `options` are those of `minillm.generate`, but for `compile`.

        Shape: as `read` -> (B, T + new).
        Raises: ValueError as `read` and `minillm.generate`.
        """
        if options.get("compile"):
            raise ValueError("compile=True is for CausalLM: a QwenVL is not compiled")
        with torch.inference_mode(), EvalMode(self):
            prompt = self.read(input_ids, pixels, grids, attention_mask=attention_mask)
        return generate(
            prompt,
            input_ids,
            max_new_tokens=max_new_tokens,
            attention_mask=attention_mask,
            **options,
        )


class Prompt:
    """Texts whose pictures have been looked at: for `generate`, a language model like any other.

    It holds what must outlive the first step: the vectors and positions of the prompt, and `delta`,
    which the positions of all later tokens need.
    """

    def __init__(self, model: QwenVL, x: Tensor, positions: Tensor, delta: Tensor) -> None:
        self.model, self.x, self.positions, self.delta = model, x, positions, delta
        self.config, self.make_cache = model.config.text, model.language.make_cache

    def __call__(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        cache: KVCache | None = None,
        logits_to_keep: int = 0,
    ) -> Tensor:
        """Scores after each of the new tokens, which belong to the prompt or follow it.

        Shape: (B, T) ids, (B, past + T) mask -> (B, T or logits_to_keep, V).
        """
        language, past = self.model.language, 0 if cache is None else cache.length
        rotary: Any = language.model.rotary  # the family has one
        text, mask, is_causal = language.model.prepare(input_ids, attention_mask, None, cache)
        x = self.x[:, past : past + input_ids.shape[1]]
        known = x.shape[1]  # tokens of the prompt; the others are text that follows it
        if len(x) != len(input_ids):
            raise ValueError(f"{len(input_ids)} rows of ids for a prompt of {len(x)}")
        later = (text + self.delta).expand(len(x), -1)[:, known:]
        x = torch.cat((x, language.model.embed(input_ids[:, known:], later)), 1)
        positions = self.positions[:, :, past : past + known]
        positions = torch.cat((positions, later.expand(3, -1, -1)), 2)
        rope = mrope(rotary, positions, self.model.config.mrope_section)
        x = language.model(x, text, mask, is_causal, cache, rope)
        return language.lm_head(x[:, -logits_to_keep:])
