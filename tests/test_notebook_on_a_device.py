"""The cells of notebook 10 that pick a device, run on a pretended GPU with a tiny model."""

import contextlib
import json
import math
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pretended_device import PretendedDevice

from minillm.bpe import BPETokenizer
from minillm.config import ModelConfig
from minillm.generation import generate
from minillm.model import CausalLM
from minillm.sampling import Sampler
from minillm.stories.language import StoryLanguage
from minillm.training import WindowBatches, cross_entropy

PAGE = Path(__file__).parents[1] / "notebooks/10_minillm.ipynb"


@pytest.mark.filterwarnings("ignore:a document of")
def test_the_page_trains_and_measures_on_a_gpu(monkeypatch):
    monkeypatch.delenv("MINILLM_DEVICE", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # whatever this machine has
    cells = {c["id"]: "".join(c["source"]) for c in json.loads(PAGE.read_text("utf-8"))["cells"]}
    language = StoryLanguage("en")
    tokenizer = BPETokenizer.train(
        language.corpus(100, seed=1), 700, special_tokens=("<|endoftext|>",), add_bos=True
    )
    page = {
        "torch": torch, "math": math, "time": time, "textwrap": textwrap, "generate": generate,
        "ModelConfig": ModelConfig, "Sampler": Sampler, "WindowBatches": WindowBatches,
        "CausalLM": CausalLM, "cross_entropy": cross_entropy, "kept": torch.arange(600) % 690,
        "language": language, "tokenizer": tokenizer, "mine": tokenizer, "MY_BEGINNING": "The ",
        "end": tokenizer.eos_token_id, "floor": 0.1, "MY_STEPS": 2,
        "held_out": language.corpus(2, seed=5), "written": torch.arange(900) % 690,
    }  # fmt: skip
    monkeypatch.setattr(
        "IPython.display.display", lambda *_, **__: SimpleNamespace(update=lambda figure: None)
    )
    with PretendedDevice():
        exec(cells["1db0ee4e"], page)
        assert page["device"] == torch.device("cuda") and page["precision"] == "bfloat16"
        page |= {"C": 32, "L": 2, "H": 4, "rows": 2, "steps": 2}
        exec(cells["65345f34f"], page)
        exec("import dataclasses", page)
        exec(cells["cc0b6742"], page)
        assert all(p.is_cuda for p in page["model"].parameters())
        assert page["device"].type == "cuda"
        lines = cells["def2ff83"].splitlines()
        exec("\n".join(line for line in lines if line.startswith("ours")), page)
        assert not any(p.is_cuda for p in page["ours"].parameters())
        with contextlib.suppress(AssertionError):  # two steps are no training
            exec(cells["owntext3"].replace("=120", "=4"), page)
        assert page["written_by_it"].is_cuda
