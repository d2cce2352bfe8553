"""An encoder and a decoder beside transformers' BART, interleaved.

    OMP_NUM_THREADS=1 python benchmarks/seq2seq.py

The same random weights in both. Forward without gradients, forward with backward, and greedy
generation with caches (40 tokens, no end token). CPU time; prints the medians and the median over
the rounds of ours / theirs in the same round (below 1: ours is quicker).
"""

import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import transformers
from torch import Tensor

from minillm.nn.seq2seq import EncoderDecoder

B, S, T, NEW, ROUNDS = 4, 64, 48, 40, 20
SIZES = {"small": (64, 2, 128, 500), "medium": (256, 3, 1024, 8000)}


def contenders(C: int, layers: int, ffn: int, vocab: int) -> tuple[torch.nn.Module, EncoderDecoder]:
    config = transformers.BartConfig(
        vocab_size=vocab, d_model=C, encoder_layers=layers, decoder_layers=layers,
        encoder_ffn_dim=ffn, decoder_ffn_dim=ffn, encoder_attention_heads=4,
        decoder_attention_heads=4, max_position_embeddings=128, dropout=0.0,
        forced_eos_token_id=None,
    )  # fmt: skip
    theirs = transformers.BartForConditionalGeneration(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        return theirs, EncoderDecoder.from_pretrained(folder)


def measure(calls: list[Callable[[], object]], rounds: int) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in calls]
    for i in range(rounds + 1):
        for call, found in zip(calls, times, strict=True):
            start = time.process_time()
            call()
            if i:  # the first round is a warm-up
                found.append(time.process_time() - start)
    return times


def main() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, ", end="")
    print(f"{torch.get_num_threads()} thread(s), {ROUNDS} rounds, CPU ms")
    for size, (C, layers, ffn, vocab) in SIZES.items():
        theirs, ours = contenders(C, layers, ffn, vocab)
        x, y = torch.randint(3, vocab, (B, S)), torch.randint(3, vocab, (B, T))
        mask = torch.ones_like(x)
        mask[0, 40:] = 0
        here = {"attention_mask": mask}

        def logits(which: int, pair: tuple = (ours, theirs)) -> Tensor:  # noqa: B023
            if which == 0:
                return pair[0](x, y, **here)  # noqa: B023
            return pair[1](input_ids=x, decoder_input_ids=y, **here).logits  # noqa: B023

        def forward(which: int) -> None:
            with torch.no_grad():
                logits(which)  # noqa: B023

        def backward(which: int) -> None:
            logits(which).square().mean().backward()  # noqa: B023

        def write(which: int) -> Tensor:
            if which == 0:
                return ours.generate(x, max_new_tokens=NEW, eos_token_id=None, **here)  # noqa: B023
            return theirs.generate(  # noqa: B023
                x, max_new_tokens=NEW, min_new_tokens=NEW, num_beams=1, do_sample=False, **here  # noqa: B023
            )

        torch.testing.assert_close(logits(0), logits(1), atol=1e-5, rtol=1e-5)
        for kind, call in (("forward", forward), ("with backward", backward), ("generate", write)):
            pair = [lambda c=call: c(0), lambda c=call: c(1)]
            mine, other = measure(pair, ROUNDS if kind != "generate" else ROUNDS // 2)
            ratio = statistics.median(a / b for a, b in zip(mine, other, strict=True))
            a, b = (1e3 * statistics.median(t) for t in (mine, other))
            print(f"{size:8} {kind:14} ours {a:8.1f}  transformers {b:8.1f}  ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
