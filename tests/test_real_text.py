"""Real text: nanoGPT's recipe as the benchmark re-states it, and the tables that the page shows."""

import bz2
import csv
import importlib.util
import math
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from minillm.bpe import BPETokenizer
from minillm.cli.corpus import END
from minillm.cli.options import OF_A_FILE

ROOT = Path(__file__).resolve().parents[1]
SPEC = importlib.util.spec_from_file_location("real_text", ROOT / "benchmarks" / "real_text.py")
real_text = importlib.util.module_from_spec(SPEC)  # its folder stays off the path of other tests
sys.modules["real_text"] = real_text
SPEC.loader.exec_module(real_text)


def rows(name):
    with (ROOT / "assets/shakespeare" / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_model_it_is_compared_with_is_gpt2_without_biases():
    """nanoGPT's model is GPT-2's, with an exact GELU; as transformers compute it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ours = real_text.GPT(65)
    shape = {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 65}
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(**shape, **drop, activation_function="gelu")
    theirs = transformers.GPT2LMHeadModel(config)
    names = {"tokens": "wte", "positions": "wpe", "blocks": "h", "ln": "ln_f"}
    parts = {"qkv": "attn.c_attn", "proj": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
    state = {name: torch.zeros_like(p) for name, p in theirs.state_dict().items()}
    for name, p in ours.state_dict().items():
        first, *rest = name.split(".")
        path = ".".join(["transformer", names.get(first, first), *(parts.get(x, x) for x in rest)])
        path = "lm_head.weight" if first == "head" else path
        inside = first == "blocks" and p.dim() == 2
        assert state[path].shape == (p.T if inside else p).shape
        state[path] = p.T if inside else p  # transformers' are the other way round
    theirs.load_state_dict(state)
    ids = torch.randint(65, (2, 64))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs.eval()(ids).logits, atol=1e-5, rtol=1e-5)
    assert ours.tokens.weight is ours.head.weight


def test_each_letter_counts_once_with_half_a_window_before_it():
    torch.manual_seed(0)
    model, text = real_text.GPT(4), "abcd" * 40 + "é"
    ids = torch.randint(4, (len(text),))
    nats = 0.0
    with torch.no_grad():
        for i in range(1, len(ids)):  # the window of 64 that first reaches the letter
            start = 0 if i <= 64 else math.ceil((i - 64) / 32) * 32
            losses = model(ids[None, start:i])[0, -1]
            nats += float(F.cross_entropy(losses, ids[i]))
    bits = nats / math.log(2) / len(text.encode())
    assert real_text.letters_bits(model, ids, text) == pytest.approx(bits, rel=1e-5)


def test_tokens_and_characters_had_equal_time_and_their_own_best_rate():
    kinds = defaultdict(list)
    for row in rows("tokens.csv"):
        kinds[row["kind"]].append({name: float(row[name]) for name in row if name != "kind"})
    assert [*kinds] == ["tokens", "characters", "characters, long rows"]
    for found in (kinds["tokens"], kinds["characters"]):
        tried = {row["rate"]: row["bits"] for row in found if row["seed"] == 0}
        best = min(tried, key=tried.get)
        assert len(tried) == 3
        assert [row["seed"] for row in found if row["rate"] == best] == [0, 1, 2]
    times = [sum(row["seconds"] for row in found) / len(found) for found in kinds.values()]
    assert max(times) < 1.1 * min(times)


def test_what_is_read_again_and_again_was_looked_at_every_twenty_steps():
    found = rows("again.csv")
    assert [int(row["step"]) for row in found] == list(range(20, 401, 20))
    text = bz2.decompress(real_text.SHAKESPEARE.read_bytes()).decode()[:45_000]
    tokenizer = BPETokenizer.train([text], OF_A_FILE["vocab_size"], special_tokens=[END])
    size = len(tokenizer.encode_ordinary(text)) + 1  # the end
    row = OF_A_FILE["batch_size"] * OF_A_FILE["context_length"]
    times = [int(each["step"]) * row / size for each in found]
    assert [float(each["times_read"]) for each in found] == pytest.approx(times, abs=0.01)
