"""Controls of beyond/12_state: what predicts stories, the state or the short convolution?

    OMP_NUM_THREADS=1 python benchmarks/state_controls.py [steps]

Small models on the stories of `StoryLanguage`: layers with a state, the same without the state
(everything is forgotten at each position), without the convolution, without both, attention, and
attention whose queries, keys and values go through such a convolution. Each rate is tried with
seed 0; the best is run with seeds 1 and 2 as well. Prints held-out bits a byte.
"""

import sys
from functools import partial

import torch
from torch import Tensor, nn

from minillm.beyond.state.mamba import Mamba2Mixer, causal_conv
from minillm.bpe import BPETokenizer
from minillm.config import ModelConfig
from minillm.deeper.training.documents import DocumentBatches, StoryDocuments
from minillm.model import CausalLM
from minillm.stories.language import StoryLanguage
from minillm.training import TrainConfig, evaluate, train

RATES = (1e-2, 3e-2, 6e-2)
STATE = {"model_type": "mamba2", "num_hidden_layers": 3}
ATTENTION = {"model_type": "qwen3", "num_hidden_layers": 2, "intermediate_size": 160}
ATTENTION |= {"num_attention_heads": 2, "rope_theta": 1e5}
KINDS = {
    "state": STATE,
    "state removed": STATE,
    "convolution removed": STATE,
    "both removed": STATE,
    "attention": ATTENTION,
    "attention, convolution": ATTENTION,
}


class Convolved(nn.Module):
    """A projection, and a causal convolution of each of its channels over four positions."""

    def __init__(self, projection: nn.Linear) -> None:
        super().__init__()
        self.projection = projection
        self.weight = nn.Parameter(torch.empty(projection.out_features, 1, 4).uniform_(-0.5, 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return causal_conv(self.projection(x), self.weight, None)[0]


def make(kind: str, vocab_size: int, end: int, seed: int) -> CausalLM:
    """A model of that kind, with about 150,000 weights."""
    width = 1 if kind in ("convolution removed", "both removed") else 4
    sizes = {"state_size": 16, "num_heads": 4, "chunk_size": 32, "conv_kernel": width}
    more = {"state": sizes} if KINDS[kind] is STATE else {}
    config = ModelConfig(
        vocab_size=vocab_size, hidden_size=64, tie_word_embeddings=True, initializer_range=0.08,
        eos_token_id=end, **KINDS[kind], **more,
    )  # fmt: skip
    model = CausalLM(config, seed=seed)
    torch.manual_seed(seed)
    for module in model.modules():
        if isinstance(module, Mamba2Mixer) and kind in ("state removed", "both removed"):
            module.A_log.requires_grad_(False).fill_(20.0)  # A = -e^20: nothing is left of before
    if kind == "attention, convolution":
        for layer in model.model.layers:
            for name in ("q_proj", "k_proj", "v_proj"):
                attention = layer.self_attn
                setattr(attention, name, Convolved(getattr(attention, name)))
    return model


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 150
    kinds = sys.argv[2].split(";") if len(sys.argv) > 2 else KINDS
    language = StoryLanguage("en")
    tokenizer = BPETokenizer.train(
        language.corpus(1000, seed=0), 1024, special_tokens=["<|endoftext|>"], add_bos=True
    )
    end, held_out = tokenizer.eos_token_id, language.corpus(60, seed="held out")
    floor = language.bits_per_byte(held_out)

    def bits(kind: str, rate: float, seed: int) -> float:
        model = make(kind, tokenizer.vocab_size, end, seed)
        documents = StoryDocuments(language, tokenizer.encode_ordinary, seed=seed)
        batches = DocumentBatches(documents, 4, 256, eos_token_id=end)
        settings = TrainConfig(steps, max_lr=rate, min_lr=rate / 100, warmup_steps=20)
        train(model, batches, settings)
        found = evaluate(model, tokenizer, held_out)
        print(f"  {kind:22} rate {rate:g}, seed {seed}: {found:.4f}", flush=True)
        return found

    print(f"{steps} steps; the floor is {floor:.4f} bits a byte")
    for kind in kinds:
        tried = {rate: bits(kind, rate, 0) for rate in RATES}
        best = min(tried, key=tried.__getitem__)
        row = [tried[best], *map(partial(bits, kind, best), (1, 2))]
        print(f"{kind:22} best rate {best:g}: " + "  ".join(f"{x:.4f}" for x in row), flush=True)


if __name__ == "__main__":
    main()
