"""CNN beside ViT for beyond/16_pictures: two small eyes at three amounts of data, three seeds.

    OMP_NUM_THREADS=1 python benchmarks/eyes.py

Each eye names colour and glyph of the left thing of a scene, from so many scenes and no more, 300
steps of 64. The rate is the best of two with seed 0. Prints how many of 400 new scenes are named
exactly; then the same, at 500 scenes, with all things moved by half a patch, so that each glyph
lies in four patches. Some four minutes of CPU.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.beyond.pictures.scenes import COLORS, GLYPHS, sample_scene
from minillm.beyond.pictures.vision import VisionTransformer
from minillm.beyond.pictures.vision_parts import VisionConfig
from minillm.training import cosine_schedule

CLASSES = len(COLORS) + len(GLYPHS)


class ViT(nn.Module):
    """The page's eye, and what its class token says."""

    def __init__(self, size: tuple[int, int], seed: int) -> None:
        super().__init__()
        config = VisionConfig(image_size=size, patch_size=8, hidden_size=64, intermediate_size=128)
        self.eye = VisionTransformer(config, seed=seed)
        nn.init.normal_(self.eye.position_embedding.weight, 0.0, 0.5)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(self.eye(pixels)[:, 0])


def cnn(size: tuple[int, int]) -> nn.Module:
    """Two convolutions of 3 x 3, each followed by the largest of 2 x 2, and one matrix."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * size[0] * size[1] // 16, CLASSES),
    )  # fmt: skip


def scenes(seed: int, count: int, moved: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Pixels, and colour and glyph of the left thing, as numbers."""
    rng = np.random.default_rng(seed)
    drawn = [sample_scene(rng) for _ in range(count)]
    colors, glyphs = list(COLORS), list(GLYPHS)
    pixels = torch.from_numpy(np.stack([s.pixels() for s in drawn]))
    if moved:
        pixels = F.pad(pixels, (4, 4, 4, 4))  # 32 x 40, and every cell lies across four patches
    named = [(colors.index(s.left.color), glyphs.index(s.left.glyph)) for s in drawn]
    return pixels, *torch.tensor(named).T


def make(kind: str, moved: bool, seed: int) -> nn.Module:
    size = (32, 40) if moved else (24, 32)
    return ViT(size, seed) if kind == "ViT" else cnn(size)


def exact(kind: str, count: int, rate: float, seed: int, moved: bool = False) -> int:
    """Train an eye on `count` scenes; how many of 400 new ones it names."""
    torch.manual_seed(seed)
    model, steps = make(kind, moved, seed), 300
    pixels, color, glyph = scenes(seed, count, moved)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = cosine_schedule(step, rate, rate / 20, 30, steps)
        rows = torch.randint(count, (64,))
        scores = model(pixels[rows])
        loss = F.cross_entropy(scores[:, :8], color[rows])
        loss = loss + F.cross_entropy(scores[:, 8:], glyph[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    pixels, color, glyph = scenes(999, 400, moved)
    with torch.no_grad():
        scores = model(pixels)
    right = (scores[:, :8].argmax(-1) == color) & (scores[:, 8:].argmax(-1) == glyph)
    return int(right.sum())


def main() -> None:
    for kind in ("CNN", "ViT"):
        weights = sum(p.numel() for p in make(kind, False, 0).parameters())
        print(f"{kind}: {weights:,} weights")
        for count in (500, 2000, 8000):
            tried = {rate: exact(kind, count, rate, 0) for rate in (1e-3, 3e-3)}
            best = max(tried, key=tried.__getitem__)
            row = [tried[best], *(exact(kind, count, best, seed) for seed in (1, 2))]
            print(f"{kind} {count:5,} scenes, rate {best:g} of {tried}: {row}", flush=True)
        row = [exact(kind, 500, best, seed, moved=True) for seed in range(3)]
        print(f"{kind}   500 scenes, moved by half a patch, rate {best:g}: {row}", flush=True)


if __name__ == "__main__":
    main()
