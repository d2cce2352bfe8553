"""An encoder and a decoder beside transformers' BART, interleaved.

    OMP_NUM_THREADS=1 python benchmarks/seq2seq.py

The same random weights in both; 4 sources of 64 tokens, one of them padded. Forward for targets of
48 tokens without gradients, forward with backward, and cached greedy generation of 40 tokens. CPU
time; prints the medians and the median over the rounds of ours / theirs in the same round (below
1: ours is quicker).
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

from minillm.beyond.two_sequences.seq2seq import EncoderDecoder

B, S, T, NEW, ROUNDS = 4, 64, 48, 40, 20
SIZES = {"small": (64, 2, 128, 500), "medium": (256, 3, 1024, 8000)}  # C, layers, F, V


class Contest:
    """Two models with the same weights, and what each of them is asked to do."""

    def __init__(self, C: int, layers: int, ffn: int, vocab: int) -> None:
        config = transformers.BartConfig(
            vocab_size=vocab, d_model=C, encoder_layers=layers, decoder_layers=layers,
            encoder_ffn_dim=ffn, decoder_ffn_dim=ffn, encoder_attention_heads=4,
            decoder_attention_heads=4, max_position_embeddings=128, dropout=0.0,
            forced_eos_token_id=None,
        )  # fmt: skip
        self.theirs = transformers.BartForConditionalGeneration(config).eval()
        with tempfile.TemporaryDirectory() as folder:
            self.theirs.save_pretrained(folder)
            self.ours = EncoderDecoder.from_pretrained(folder)
        self.x, self.y = torch.randint(3, vocab, (B, S)), torch.randint(3, vocab, (B, T))
        self.mask = torch.ones_like(self.x)
        self.mask[0, 40:] = 0

    def logits(self, ours: bool) -> Tensor:
        if ours:
            return self.ours(self.x, self.y, attention_mask=self.mask)
        given: Any = {"input_ids": self.x, "decoder_input_ids": self.y, "attention_mask": self.mask}
        return self.theirs(**given).logits

    @torch.no_grad()
    def forward(self, ours: bool) -> None:
        self.logits(ours)

    def forward_and_backward(self, ours: bool) -> None:
        self.logits(ours).square().mean().backward()

    def generate(self, ours: bool) -> None:
        given: Any = {"attention_mask": self.mask, "max_new_tokens": NEW, "min_new_tokens": NEW}
        if ours:
            ids = self.ours.generate(self.x, **given)
        else:
            ids = self.theirs.generate(self.x, num_beams=1, do_sample=False, **given)
        assert ids.shape == (B, 1 + NEW)


def measure(call: Callable[[bool], None]) -> tuple[list[float], list[float]]:
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
    for size, sizes in SIZES.items():
        contest = Contest(*sizes)
        torch.testing.assert_close(
            contest.logits(True), contest.logits(False), atol=1e-5, rtol=1e-5
        )
        for call in (contest.forward, contest.forward_and_backward, contest.generate):
            mine, other = measure(call)
            ratio = statistics.median(a / b for a, b in zip(mine, other, strict=True))
            a, b = (1e3 * statistics.median(t) for t in (mine, other))
            print(f"{size:7} {call.__name__:21} ours {a:7.1f}, theirs {b:7.1f}, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
