"""An eye beside transformers' ViT, picture models beside its LLaVA and Qwen2-VL, interleaved.

    OMP_NUM_THREADS=1 python benchmarks/vision.py

The same random weights in both. The eye: forward without gradients, and forward with backward, for
4 pictures of 64 x 64 in patches of 8. The picture models: forward of 4 rows with a picture each and
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
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLForConditionalGeneration
from transformers.models.vit.modeling_vit import ViTModel

from minillm.beyond.pictures.pictures import PictureLM
from minillm.beyond.pictures.vision import VisionTransformer
from minillm.deeper.pictures.qwen_vl import QwenVL

ROUNDS, NEW = 15, 24


class Contest:
    """Eyes and picture models in pairs with the same weights, and what is asked of them."""

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
        self.make_qwen(C, layers)
        self.pixels = torch.randn(4, 3, 64, 64)
        words = torch.randint(6, 1000, (4, 20))
        self.ids = torch.cat([torch.full((4, 64), 5), words], dim=1)
        self.squares = torch.randn(4 * 64, 3 * 2 * 8 * 8)  # what Qwen2-VL's processor makes
        self.grids = torch.tensor([[1, 8, 8]] * 4)
        self.qwen_ids = torch.cat([torch.full((4, 16), 5), words], dim=1)  # 2 x 2 patches a place

    def make_qwen(self, C: int, layers: int) -> None:
        rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [C // 32, C // 32, 0]}
        rope["mrope_section"][2] = C // 8 - 2 * (C // 32)
        config = transformers.AutoConfig.for_model(
            "qwen2_vl",
            text_config={
                "vocab_size": 1000, "hidden_size": C, "intermediate_size": 3 * C,
                "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 4,
                "bos_token_id": 1, "eos_token_id": 2, "rope_parameters": rope,
            },
            vision_config={
                "depth": layers, "embed_dim": C, "hidden_size": C, "num_heads": 4, "patch_size": 8,
            },
            image_token_id=5,
            video_token_id=4,
            vision_start_token_id=3,
        )  # fmt: skip
        self.theirs_qwen = Qwen2VLForConditionalGeneration(config).eval()
        with tempfile.TemporaryDirectory() as folder:
            self.theirs_qwen.save_pretrained(folder)
            self.qwen = QwenVL.from_pretrained(folder)

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

    def asked_of_theirs(self) -> dict[str, torch.Tensor]:
        given = {"pixel_values": self.squares, "image_grid_thw": self.grids}
        kinds = {"mm_token_type_ids": (self.qwen_ids == 5).int()}
        mask = {"attention_mask": torch.ones_like(self.qwen_ids)}
        return {"input_ids": self.qwen_ids, **given, **kinds, **mask}

    @torch.no_grad()
    def qwen_forward(self, ours: bool) -> torch.Tensor:
        if ours:
            return self.qwen(self.qwen_ids, self.squares, self.grids)
        return self.theirs_qwen(**self.asked_of_theirs()).logits

    def qwen_generation(self, ours: bool) -> None:
        if ours:
            given = {"max_new_tokens": NEW, "eos_token_id": None}
            ids = self.qwen.generate(self.qwen_ids, self.squares, self.grids, **given)
        else:
            given = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
            ids = self.theirs_qwen.generate(**self.asked_of_theirs(), pad_token_id=0, **given)
        assert ids.shape == (4, 36 + NEW)


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
        for forward in (contest.model_forward, contest.qwen_forward):
            torch.testing.assert_close(forward(True), forward(False), atol=1e-5, rtol=1e-5)
        for call in (
            contest.eye_forward,
            contest.eye_forward_and_backward,
            contest.model_forward,
            contest.generation,
            contest.qwen_forward,
            contest.qwen_generation,
        ):
            mine, other = measure(call)
            ratio = statistics.median(a / b for a, b in zip(mine, other, strict=True))
            a, b = (1e3 * statistics.median(t) for t in (mine, other))
            print(f"{size:7} {call.__name__:25} ours {a:7.1f}, theirs {b:7.1f}, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
