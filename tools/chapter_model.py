"""The model that a reader trains in chapter 07, as a folder that later chapters open.

    python tools/chapter_model.py                    writes assets/chapter-07
    python tools/chapter_model.py --to some/folder   writes it there

It runs the cells of notebooks/07_training.ipynb that carry the tag `asset`, as they stand; what
those of the package need, they take from the package, which is word for word the same. The weights
are stored under chapter 10's names, as any Llama's, so `from_pretrained` opens them. Another
processor rounds differently and arrives at other weights of about the same loss.
"""

from __future__ import annotations

import argparse
import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from cells import load, text_of

from minillm import training
from minillm.config import ModelConfig
from minillm.deeper.pretrained.load import save_pretrained
from minillm.model import CausalLM

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "notebooks" / "07_training.ipynb"


def run_page() -> dict[str, Any]:
    """The names that the tagged cells of the page leave behind."""
    names: dict[str, Any] = dict(vars(training))  # what the page builds
    for i, cell in enumerate(load(PAGE, PAGE.name)["cells"]):
        if "asset" in cell["metadata"].get("tags", []):
            code = compile(text_of(cell), f"{PAGE.name}, cell {i}", "exec")
            with redirect_stdout(io.StringIO()):
                exec(code, names)
    return names


def as_causal_lm(story_model: torch.nn.Module, eos_token_id: int) -> CausalLM:
    """The page's model as chapter 10's class: the same weights under the same names."""
    V, C = story_model.embed_tokens.weight.shape
    layer = story_model.layers[0]
    config = ModelConfig(
        vocab_size=V,
        hidden_size=C,
        intermediate_size=layer.mlp.up_proj.out_features,
        num_hidden_layers=len(story_model.layers),
        num_attention_heads=layer.self_attn.num_heads,
        rms_norm_eps=story_model.norm.eps,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=eos_token_id,
        eos_token_id=eos_token_id,
    )
    model = CausalLM(config)
    model.model.load_state_dict(story_model.state_dict())
    return model.eval()


def make(folder: Path) -> float:
    """Train, write the folder, and return the held-out loss in bits per byte."""
    names = run_page()
    story_model, tokenizer = names["trained"], names["tokenizer"]
    model = as_causal_lm(story_model, tokenizer.eos_token_id)
    tokenizer.bos_token, tokenizer.add_bos = tokenizer.eos_token, True  # so each row began
    with torch.no_grad():
        ids = torch.tensor([tokenizer.encode(names["held_out"][0])])
        torch.testing.assert_close(model(ids), story_model.eval()(ids), rtol=1e-5, atol=1e-5)
    save_pretrained(model, tokenizer, folder)
    return names["history"][-1]["held_out"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, default=ROOT / "assets" / "chapter-07")
    given = parser.parse_args()
    print(f"{given.to}: {make(given.to):.4f} bits per byte on held-out stories")
