"""Weights are opened whatever lies beside them: tokenizers nobody reads, ids that no token has."""

import json

import pytest
import torch
import transformers
from family_checkpoints import make
from gguf_files import write as write_gguf
from safetensors.torch import save_model
from tokenizer_folders import plain_byte_level
from tokenizers import Tokenizer, decoders, models

from minillm.bpe import BPETokenizer
from minillm.deeper.pretrained.folder import FILES
from minillm.deeper.pretrained.load import from_pretrained
from minillm.model import CausalLM

IDS = torch.tensor([[1, 5, 9]])


def word_piece(folder):
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "the": 1, "##s": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(folder / "tokenizer.json"))


def edited(folder):
    """One of ours, changed by hand since it was saved."""
    BPETokenizer.train("the cat", 260).save(folder)
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"pad_id"', '"pad"').replace('"1.0"', '"1.1"'))


def written(name, content):
    return lambda folder: (folder / name).write_bytes(content)


BESIDE = {
    "WordPiece": (word_piece, "WordPiece"),
    "no JSON": (written("tokenizer.json", b"{"), "not whole JSON"),
    "no UTF-8": (written("tokenizer.json", b"\xff{}"), "tokenizer.json"),
    "a list": (written("tokenizer.json", b"[]"), "not an object"),
    "edited": (edited, "edited since it was saved"),
    "a damaged config": (written("tokenizer_config.json", b"5"), "tokenizer_config.json"),
    "SentencePiece's own": (written("tokenizer.model", b"x"), "has tokenizer.model but"),
    "Bert's list": (written("vocab.txt", b"x"), "has vocab.txt but"),
}


@pytest.mark.parametrize("name", BESIDE)
@torch.no_grad()
def test_a_tokenizer_that_cannot_be_read_does_not_lock_the_weights(name, tmp_path, recwarn):
    expected = make("llama-2", tmp_path)(IDS).logits
    change, words = BESIDE[name]
    if name == "a damaged config":
        plain_byte_level().save(str(tmp_path / "tokenizer.json"))
    change(tmp_path)
    recwarn.clear()
    alone = CausalLM.from_pretrained(tmp_path)
    assert not [w for w in recwarn if "tokeniz" in str(w.message)]  # never opened
    torch.testing.assert_close(alone(IDS), expected, atol=1e-5, rtol=1e-5)
    with pytest.warns(UserWarning, match=words):
        model, tokenizer = from_pretrained(tmp_path)
    assert tokenizer is None and torch.equal(model(IDS), alone(IDS))


def test_a_tokenizer_of_a_gguf_that_cannot_be_read(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", changes={"tokenizer.ggml.model": "gpt2"})
    with pytest.warns(UserWarning, match=r"comes without a tokenizer: .*tokenizer\.ggml\.pre"):
        assert from_pretrained(path)[1] is None
    assert torch.equal(CausalLM.from_pretrained(path)(IDS), from_pretrained(path)[0](IDS))


@pytest.mark.parametrize(
    ("file", "keys", "ends"),
    [
        ("config", {"bos_token_id": 50256}, None),
        ("config", {"eos_token_id": 50256}, ()),
        ("config", {"eos_token_id": [3, 50256, 4]}, (3, 4)),
        ("config", {"eos_token_id": -1}, ()),
        ("config", {"pad_token_id": 50256}, None),
        ("generation_config", {"eos_token_id": [2, 50256]}, (2,)),
        ("generation_config", {"eos_token_id": 50256}, ()),
        ("generation_config", {"eos_token_id": -1}, ()),
    ],
)
@torch.no_grad()
def test_special_ids_outside_the_vocabulary_are_passed_over(file, keys, ends, tmp_path):
    expected = make("llama-2", tmp_path)(IDS).logits
    if file == "config":
        (tmp_path / "generation_config.json").unlink()  # what that says would go before
    path = tmp_path / f"{file}.json"
    data = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**data, **keys}))
    with pytest.warns(UserWarning, match="is outside a vocabulary of .* passed over"):
        model, _ = from_pretrained(tmp_path)
    torch.testing.assert_close(model(IDS), expected, atol=1e-5, rtol=1e-5)
    if ends is not None:
        assert model.config.eos_token_ids == ends
    model.generate(IDS, max_new_tokens=2)
    with pytest.raises(ValueError, match="outside a vocabulary"):  # said by a caller: a mistake
        type(model.config)(**{**vars(model.config), "bos_token_id": 50256})


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Qwen2", "Gemma", "Mamba", "Falcon"])
@torch.no_grad()
def test_a_tied_file_may_hold_the_head_alone(family, tmp_path):
    """As safetensors' save_model leaves it, which keeps one name of a tensor that has two."""
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "tie_word_embeddings": True,
    }
    if family != "Mamba":
        sizes |= {"num_attention_heads": 4, "intermediate_size": 48, "num_key_value_heads": 4}
    if family in ("GPT2", "Falcon"):
        del sizes["intermediate_size"], sizes["num_key_value_heads"]  # by other names there
    if family == "Gemma":
        sizes["head_dim"] = 8
    config = getattr(transformers, f"{family}Config")(**sizes)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    theirs.save_pretrained(tmp_path)
    save_model(theirs, str(tmp_path / "model.safetensors"), metadata={"format": "pt"})
    ours = CausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(ours(IDS), theirs(IDS).logits, atol=1e-5, rtol=1e-5)
    assert ours.lm_head.weight is ours.model.embed_tokens.weight


def test_the_hub_is_asked_for_all_files_of_a_tokenizer():
    wanted = {"special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"}
    assert wanted | {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= {*FILES}
