"""Seeds for beyond/16_pictures: both ways into a language model, three seeds each.

    OMP_NUM_THREADS=1 python benchmarks/picture_seeds.py

For each seed trains what the page trains with one: the small reader, placeholders with position
vectors drawn at 0.5 and at 0.02, and gated layers between those of a frozen text model, fed by the
first one's frozen eye. Prints exact answers of 400, with the asked picture, a black one, and
another question's, and how many name the other thing of the asked picture. About a minute of CPU
time a seed.
"""

import numpy as np
import torch
from torch import Tensor, nn

from minillm.beyond.pictures.picture_parts import PictureConfig
from minillm.beyond.pictures.pictures import GatedCrossAttentionLayer, PictureLM, put_pictures
from minillm.beyond.pictures.scenes import COLORS, GLYPHS, sample_scene
from minillm.beyond.pictures.vision_parts import VisionConfig
from minillm.config import ModelConfig
from minillm.model import CausalLM
from minillm.training import cosine_schedule, cross_entropy

WORDS = ["<picture>", "<end>", "left?", "right?", *COLORS, *GLYPHS]
IDS = {word: i for i, word in enumerate(WORDS)}
TEXT = ModelConfig(
    vocab_size=len(WORDS), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=4, eos_token_id=1,
)  # fmt: skip
EYE = VisionConfig(image_size=(24, 32), patch_size=8, hidden_size=64, intermediate_size=128)
CONFIG = PictureConfig(EYE, TEXT, 0, vision_feature_layer=-1)


def examples(
    rng: np.random.Generator, count: int, placeholders: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Pixels, ids, and the words for the thing that is not asked for."""
    scenes, rows, others = [sample_scene(rng) for _ in range(count)], [], []
    for scene, side in zip(scenes, rng.integers(2, size=count), strict=True):
        thing, other = (scene.right, scene.left) if side else (scene.left, scene.right)
        text = ["right?" if side else "left?", thing.color, thing.glyph, "<end>"]
        rows.append([0] * placeholders + [IDS[word] for word in text])
        others.append([IDS[other.color], IDS[other.glyph]])
    pixels = torch.from_numpy(np.stack([s.pixels() for s in scenes]))
    return pixels, torch.tensor(rows), torch.tensor(others)


def train(scores, weights, *, seed: int, n: int, steps: int, rate: float = 2e-3) -> None:
    """Fit `scores(ids, pixels)` to fresh examples, 64 a step."""
    optimizer = torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.98), fused=True)
    rng = np.random.default_rng(seed)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = cosine_schedule(step, rate, rate / 20, 50, steps)
        pixels, ids, _ = examples(rng, 64, n)
        loss = cross_entropy(scores(ids[:, :-1], pixels)[:, n:], ids[:, n + 1 :])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()


class SmallReader(nn.Module):
    """The page's first reader: patches, places, a text model; its eye has no layers."""

    def __init__(self, text: CausalLM, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        C = text.config.hidden_size
        self.text = text
        self.patches = nn.Conv2d(3, C, kernel_size=8, stride=8)
        self.places = nn.Parameter(0.5 * torch.randn(12, C))

    def forward(self, ids: Tensor, pixels: Tensor) -> Tensor:
        decoder = self.text.model
        positions, mask, is_causal = decoder.prepare(ids)
        x = decoder.embed(ids, positions)
        seen = self.patches(pixels).flatten(2).mT + self.places
        x = put_pictures(x, ids, 0, seen)
        return self.text.lm_head(decoder(x, positions, mask, is_causal))


class Looking(nn.Module):
    """A text model with a gated layer before each of its own."""

    def __init__(self, text: CausalLM, seed: int) -> None:
        super().__init__()
        self.text = text
        torch.manual_seed(seed)
        c = text.config
        self.gated = nn.ModuleList(
            GatedCrossAttentionLayer(c.hidden_size, c.num_attention_heads, c.intermediate_size)
            for _ in text.model.layers
        )

    def forward(self, ids: Tensor, features: Tensor) -> Tensor:
        decoder = self.text.model
        positions, mask, is_causal = decoder.prepare(ids)
        x, rope = decoder.embed(ids, positions), decoder.rotary(positions)
        for gated, layer in zip(self.gated, decoder.layers, strict=True):
            x = gated(x, gated.keys_values(features))
            x = layer(x, rope=rope, mask=mask, is_causal=is_causal)
        return self.text.lm_head(decoder.norm(x))


@torch.no_grad()
def count(scores, n: int) -> list[int]:
    pixels, ids, others = examples(np.random.default_rng(999), 400, n)
    found, named = [], 0
    for shown in (pixels, torch.zeros_like(pixels), pixels.roll(1, dims=0)):
        row = ids[:, : n + 1]
        for _ in range(2):
            row = torch.cat([row, scores(row, shown)[:, -1:].argmax(-1)], dim=1)
        found.append(int((row[:, -2:] == ids[:, n + 1 : n + 3]).all(1).sum()))
        if shown is pixels:
            named = int((row[:, -2:] == others).all(1).sum())
    return [*found, named]


def main() -> None:
    print("right of 400: its picture, a black one, another's; the other thing named")
    for seed in range(3):
        small = SmallReader(CausalLM(TEXT, seed=seed), seed)
        train(small, list(small.parameters()), seed=seed, n=12, steps=600)
        print(f"seed {seed} the small reader: {count(small, 12)}", flush=True)
        models = {}
        for std in (0.5, 0.02):
            model = models[std] = PictureLM(CONFIG, seed=seed)
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                table = model.vision_tower.position_embedding.weight
                table.normal_(0.0, std, generator=generator)
            scores = lambda ids, pixels, model=model: model(ids, pixels=pixels)  # noqa: E731
            train(scores, list(model.parameters()), seed=seed, n=12, steps=600)
            print(f"seed {seed} placeholders, positions at {std}: {count(scores, 12)}", flush=True)
            if std == 0.5:
                kept = table.detach().clone()
                table.data[1:] = kept[1:].view(3, 4, -1).flip(1).flatten(0, 1)
                print(f"seed {seed} the same, columns exchanged: {count(scores, 12)}", flush=True)
                table.data.copy_(kept)
        text = CausalLM(TEXT, seed=seed)
        weights = list(text.parameters())
        train(lambda ids, _, text=text: text(ids), weights, seed=5, n=0, steps=100)
        text.requires_grad_(False)
        eye = models[0.5].requires_grad_(False)
        looking = Looking(text, seed)
        scores = lambda ids, pixels, looking=looking, eye=eye: looking(  # noqa: E731
            ids, eye.picture_features(pixels)
        )
        weights = list(looking.gated.parameters())
        train(scores, weights, seed=seed + 7, n=0, steps=400, rate=3e-3)
        print(f"seed {seed} gated layers: {count(scores, 0)}", flush=True)


if __name__ == "__main__":
    main()
