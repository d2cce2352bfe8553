"""An eye beside transformers' ViT, and a picture model beside its LLaVA, interleaved.

    OMP_NUM_THREADS=1 python benchmarks/vision.py

The same random weights in both. The eye: forward without gradients, and forward with backward, for
4 pictures of 64 x 64 in patches of 8. The picture model: forward of 4 rows with a picture each and
20 words, and cached greedy generation of 24 tokens. CPU time; prints the medians and the median
over the rounds of ours / theirs in the same round (below 1: ours is quicker).
"""

import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import transformers
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, ViTConfig
from transformers.models.vit.modeling_vit import ViTModel

from minillm.nn.vision import VisionTransformer
from minillm.nn.vlm import PictureLM

ROUNDS, NEW = 15, 24


class Contest:
    """Two eyes and two picture models with the same weights, and what is asked of them."""

    def __init__(self, C: int, layers: int) -> None:
        eye = {
            "hidden_size": C, "intermediate_size": 4 * C, "num_hidden_layers": layers,
            "num_attention_heads": 4, "image_size": 64, "patch_size": 8,
        }  # fmt: skip
        text = LlamaConfig(
            vocab_size=1000, hidden_size=C, intermediate_size=3 * C, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=4, eos_token_id=None,
        )  # fmt: skip
        config = LlavaConfig(
            vision_config=CLIPVisionConfig(**eye), text_config=text, image_token_index=5
        )
        self.theirs = ViTModel(ViTConfig(**eye)).eval()
        self.llava = transformers.LlavaForConditionalGeneration(config).eval()
        with tempfile.TemporaryDirectory() as folder:
            self.theirs.save_pretrained(folder)
            self.ours = VisionTransformer.from_pretrained(folder)
        with tempfile.TemporaryDirectory() as folder:
            self.llava.save_pretrained(folder)
            self.model = PictureLM.from_pretrained(folder)
        self.pixels = torch.randn(4, 3, 64, 64)
        words = torch.randint(6, 1000, (4, 20))
        self.ids = torch.cat([torch.full((4, 64), 5), words], dim=1)

    def features(self, ours: bool) -> torch.Tensor:
        if ours:
            return self.ours(self.pixels)
        return self.theirs(self.pixels).last_hidden_state

    @torch.no_grad()
    def eye_forward(self, ours: bool) -> None:
        self.features(ours)

    def eye_forward_and_backward(self, ours: bool) -> None:
        self.features(ours).square().mean().backward()

    @torch.no_grad()
    def model_forward(self, ours: bool) -> torch.Tensor:
        if ours:
            return self.model(self.ids, pixels=self.pixels)
        return self.llava(input_ids=self.ids, pixel_values=self.pixels).logits

    def generation(self, ours: bool) -> None:
        if ours:
            given = {"max_new_tokens": NEW, "eos_token_id": None}
            ids = self.model.generate(self.ids, pixels=self.pixels, **given)
        else:
            given = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
            given["attention_mask"] = torch.ones_like(self.ids)
            ids = self.llava.generate(input_ids=self.ids, pixel_values=self.pixels, **given)
        assert ids.shape == (4, 84 + NEW)


def measure(call: Callable[[bool], object]) -> tuple[list[float], list[float]]:
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(ROUNDS + 1):
        for ours, found in zip((True, False), times, strict=True):
            start = time.process_time()
            call(ours)
            if i:  # the first round warms up
                found.append(time.process_time() - start)
    return times


def main() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, ", end="")
    print(f"{torch.get_num_threads()} thread(s), {ROUNDS} rounds, CPU ms")
    for size, sizes in {"small": (64, 2), "medium": (256, 4)}.items():
        contest = Contest(*sizes)
        pairs = (contest.features(True), contest.features(False))
        torch.testing.assert_close(*pairs, atol=1e-5, rtol=1e-5)
        logits = (contest.model_forward(True), contest.model_forward(False))
        torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)
        for call in (
            contest.eye_forward,
            contest.eye_forward_and_backward,
            contest.model_forward,
            contest.generation,
        ):
            mine, other = measure(call)
            ratio = statistics.median(a / b for a, b in zip(mine, other, strict=True))
            a, b = (1e3 * statistics.median(t) for t in (mine, other))
            print(f"{size:7} {call.__name__:25} ours {a:7.1f}, theirs {b:7.1f}, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
