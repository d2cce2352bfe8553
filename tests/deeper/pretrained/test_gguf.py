"""GGUF files against transformers' own reader, numpy by the format, and damaged in every way."""

import math
import random
import re
import struct
import subprocess
import sys
import tracemalloc
import unicodedata
import warnings
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf_files import CONFIGS, KINDS, interleaved, lists, model_of, theirs, write
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_texts import END, NATURAL

from minillm.bpe import GPT2_PATTERN, LLAMA3_PATTERN, QWEN2_PATTERN, BPETokenizer
from minillm.cli.main import main
from minillm.config import ModelConfig
from minillm.deeper.attention.rope_scaling import rope_frequencies
from minillm.deeper.generation.stream import stream_text
from minillm.deeper.pretrained.gguf import (
    _MOST_TOKENS,
    read_config,
    read_header,
    read_tokenizer,
    read_weights,
)
from minillm.deeper.pretrained.load import from_pretrained
from minillm.deeper.tokenizer.foreign import ForeignTokenizer
from minillm.deeper.tokenizer.hf_json import spell
from minillm.generation import generate

transformers.logging.set_verbosity_error()
CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
CUTS = {
    "gpt-2": GPT2_PATTERN,
    "smollm": (r"\p{N}", GPT2_PATTERN),
    "llama-bpe": LLAMA3_PATTERN,
    "qwen2": QWEN2_PATTERN,
}


def tokenizer_of(pattern=GPT2_PATTERN, **options) -> ForeignTokenizer:
    """A tokenizer of 320 tokens, four of them special."""
    names = ("<|im_start|>", "<|im_end|>", "<|other|>", END)
    trained = BPETokenizer.train(" ".join(NATURAL.values()), 320, pattern=pattern)
    ranks = {token: i for token, i in trained.ranks.items() if i < 316}
    special = {name: 316 + i for i, name in enumerate(names)}
    options = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", **options}
    return ForeignTokenizer(ranks, pattern, special, **options)


def by_transformers(path: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)


# What the file holds, by transformers


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_names_shapes_and_order_are_those_of_transformers(name, tmp_path):
    original = model_of(name)
    path = write(tmp_path / "model.gguf", original)
    ours, tokenizer = from_pretrained(path)
    read = by_transformers(path)
    assert tokenizer is None and not ours.training
    for found in (read.state_dict(), original.state_dict()):
        assert ours.state_dict().keys() == found.keys()
        for key, tensor in ours.state_dict().items():
            assert torch.equal(tensor, found[key]), key
    ids = torch.randint(320, (2, 17), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours(ids), original(ids).logits, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_numbers_of_transformers(kind, tmp_path):
    path = write(tmp_path / "model.gguf", model_of("llama"), kind=kind)
    ours = from_pretrained(path)[0].state_dict()
    assert {tensor.dtype for tensor in ours.values()} == {torch.float32}
    for key, tensor in by_transformers(path).state_dict().items():
        assert torch.equal(ours[key], tensor), key


# The numbers, by ten lines of numpy a format


def halves(data: np.ndarray) -> np.ndarray:
    """The numbers of four bits: low halves of the bytes first, then the high ones."""
    return np.concatenate([data & 15, data >> 4], axis=-1).astype(np.float32)


def by_hand(data: bytes, kind: str) -> np.ndarray:
    """The numbers of a tensor's bytes, from the formats' descriptions."""
    raw = np.frombuffer(data, np.uint8)
    if kind in ("F32", "F16"):
        return raw.view({"F32": np.float32, "F16": np.float16}[kind]).astype(np.float32)
    if kind == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    size = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}[kind]
    blocks = raw.reshape(-1, size)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if kind == "Q8_0":
        return scale * blocks[:, 2:].view(np.int8).astype(np.float32)
    if kind == "Q4_0":
        return scale * (halves(blocks[:, 2:]) - 8)
    least = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
    return scale * halves(blocks[:, 4:]) + least


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_by_hand(kind, tmp_path):
    header = read_header(write(tmp_path / "model.gguf", model_of("qwen2"), kind=kind))
    weights = dict(read_weights(header, read_config(header)))
    data = header.path.read_bytes()
    for theirs_, ours in (
        ("blk.1.ffn_up", "model.layers.1.mlp.up_proj"),
        ("token_embd", "model.embed_tokens"),
    ):
        stored = header.tensors[f"{theirs_}.weight"]
        assert stored.kind == kind
        numbers = by_hand(data[stored.start : stored.start + stored.num_bytes], kind)
        found = weights[f"{ours}.weight"].numpy()
        assert found.shape == stored.shape and np.array_equal(
            found.reshape(-1), numbers.reshape(-1)
        )


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1"])
def test_other_kinds_of_the_library_are_read_too(kind, tmp_path):
    path = write(tmp_path / "model.gguf", kind=kind)
    ours = from_pretrained(path)[0].state_dict()
    for key, tensor in by_transformers(path).state_dict().items():
        assert torch.equal(ours[key], tensor), key


def test_dtype_and_what_follows_from_the_tensors(tmp_path):
    path = write(tmp_path / "model.gguf", model_of("llama-tied"), kind="Q8_0")
    model, _ = from_pretrained(path, dtype="bfloat16")
    assert {t.dtype for t in model.state_dict().values()} == {torch.bfloat16}
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.eos_token_id == 319 and model.config.bos_token_id == 318


def with_tensors(path: Path, more: dict[str, np.ndarray], **options) -> Path:
    """A file with further tensors, or others of the same names."""
    options = {"model": model_of("llama"), **options}
    weights = {**theirs(options["model"]), **more}
    import gguf_files

    kept, gguf_files.theirs = gguf_files.theirs, lambda model: weights
    try:
        return write(path, **options)
    finally:
        gguf_files.theirs = kept


@torch.no_grad()
def test_biases_of_a_llama(tmp_path):
    """A Llama with biases, of which q's and k's are turned like their rows."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, attention_bias=True, mlp_bias=True,
        rms_norm_eps=1e-5,
    )  # fmt: skip
    torch.manual_seed(0)
    original = transformers.AutoModelForCausalLM.from_config(config).eval()
    for key, weight in original.named_parameters():
        if key.endswith("bias"):
            weight.normal_()
    config.pad_token_id = 0
    ours, _ = from_pretrained(write(tmp_path / "model.gguf", original))
    for key, tensor in original.state_dict().items():
        assert torch.equal(ours.state_dict()[key], tensor), key


def llama3_factors(head_dim: int, base: float, factor: float) -> np.ndarray:
    """What llama.cpp's converter stores for Llama 3.1: plain frequencies over slowed ones."""
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    slowed, _ = rope_frequencies(head_dim, base=base, scaling=scaling)
    plain, _ = rope_frequencies(head_dim, base=base)
    return (plain / slowed).numpy()


def test_llama_3_1_keeps_its_scaling_in_a_tensor(tmp_path):
    factors = llama3_factors(16, 5e4, 32.0)
    path = with_tensors(tmp_path / "model.gguf", {"rope_freqs.weight": factors})
    config = from_pretrained(path)[0].config
    assert config.rope_scaling["rope_type"] == "llama3" and config.rope_scaling["factor"] == 32.0
    found, _ = rope_frequencies(16, base=5e4, scaling=config.rope_scaling)
    wanted = rope_frequencies(16, base=5e4)[0] / torch.from_numpy(factors)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    for wrong in (factors[:-1], factors * 2, factors + np.nan, np.linspace(1, 9, 8)):
        wrong = wrong.astype(np.float32)
        with_tensors(path, {"rope_freqs.weight": wrong})
        with pytest.raises(ValueError, match=r"model\.gguf: .*(rope_freqs|factor)"):
            from_pretrained(path)
    both = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    with_tensors(path, {"rope_freqs.weight": factors}, changes=both)
    with pytest.raises(ValueError, match=r"rope_freqs\.weight beside rope\.scaling\.type 'linear'"):
        from_pretrained(path)


# The tokenizer


@pytest.mark.parametrize("cut", CUTS)
def test_the_tokenizer_comes_back_from_its_lists(cut, tmp_path):
    tokenizer = tokenizer_of(CUTS[cut], chat_template=CHAT)
    path = write(tmp_path / "model.gguf", tokenizer=tokenizer, cut=cut)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = from_pretrained(path)[1]
    assert (found.ranks, found.special_tokens) == (tokenizer.ranks, tokenizer.special_tokens)
    assert found.pattern == tokenizer.pattern
    assert (found.bos_token, found.eos_token) == ("<|im_start|>", "<|im_end|>")
    for text in NATURAL.values():
        assert found.encode_ordinary(text) == tokenizer.encode_ordinary(text) or cut == "qwen2"
    chat = [{"role": "user", "content": "Hi, 123!"}]
    assert found.apply_chat_template(chat) == tokenizer.apply_chat_template(chat)


@pytest.mark.parametrize("cut", ["gpt-2", "qwen2", "llama-bpe"])
def test_ids_are_those_of_the_tokenizer_that_transformers_makes_of_the_file(cut, tmp_path):
    """But for its gaps: it overlooks the names of cuts, and that Qwen composes characters."""
    name = "qwen2" if cut == "qwen2" else "llama"
    tokenizer = tokenizer_of(CUTS[cut])
    path = write(tmp_path / "model.gguf", model_of(name), tokenizer=tokenizer, cut=cut)
    ours = from_pretrained(path)[1]
    read = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    texts = [text for text in NATURAL.values() if unicodedata.normalize("NFC", text) == text]
    if cut == "llama-bpe":  # transformers cuts these by GPT-2's pattern all the same
        texts = ["the cat sat on the mat", " it is here"]
    for text in texts:
        assert ours.encode_ordinary(text) == read.encode(text, add_special_tokens=False), text


def test_added_unused_and_missing_tokens(tmp_path):
    trained = tokenizer_of()
    ranks = {token: i for token, i in trained.ranks.items() if token != b"\x04"}
    special = {name: i for name, i in trained.special_tokens.items() if name != "<|other|>"}
    added = {"<think>": trained.special_tokens["<|other|>"]}
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    tokenizer = ForeignTokenizer(
        ranks, GPT2_PATTERN, special, added_tokens=added, drop_unknown_bytes=True, **names
    )
    found = from_pretrained(write(tmp_path / "model.gguf", tokenizer=tokenizer))[1]
    assert found.added_tokens == added and b"\x04" not in found.ranks
    assert found.encode("a\x04<think>b") == [
        *found.encode("a"),
        added["<think>"],
        *found.encode("b"),
    ]
    assert found.decode([trained.ranks[b"\x04"]]) == ""


PIECES = "ab ba aba b\u2581 \u2581a \u2581ab bab aa é".split()


def gemma_lists() -> dict:
    """Scores and tokens as in Gemma's files: runs of spaces as such, bytes, letters, pieces."""
    rows = [
        ("<pad>", 3),
        ("<eos>", 3),
        ("<bos>", 3),
        ("<unk>", 3),
        ("\n", 4),
        ("  ", 4),
        ("   ", 4),
        ("<b>", 4),
    ]
    rows += [(f"<0x{i:02X}>", 6) for i in range(256)]
    rows += [(piece, 1) for piece in [*PIECES, *"ab<>/\u2581"]]
    scores = [-1000.0 * (kind != 6) for _, kind in rows[:264]]
    scores += [-float(i) for i in range(len(rows) - 264)]
    found = {"model": "llama", "pre": "default", "add_space_prefix": False, "scores": scores}
    found |= {"tokens": [token for token, _ in rows], "token_type": [kind for _, kind in rows]}
    found |= {"bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3, "padding_token_id": 0}
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def joined(text: str, lists: dict) -> list[int]:
    """Ids by the rule itself: of all neighbours join those first whose token scores highest."""
    tokens, scores, kinds = (
        lists[f"tokenizer.ggml.{k}"] for k in ("tokens", "scores", "token_type")
    )
    score = {t: s for t, s, k in zip(tokens, scores, kinds, strict=True) if k == 1}
    whole = [t.replace(" ", "\u2581") for t, k in zip(tokens, kinds, strict=True) if k == 4]
    pattern = "|".join(sorted(map(re.escape, whole), key=len, reverse=True))
    ids: list[int] = []
    for part in filter(None, re.split(f"({pattern})", text.replace(" ", "\u2581"))):
        pieces = [part] if part in whole else [*part]
        while pairs := [
            (score[a + b], -i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in score
        ]:
            i = -max(pairs)[1]
            pieces[i : i + 2] = ["".join(pieces[i : i + 2])]
        for piece in pieces:
            known = piece.replace("\u2581", " ") if piece in whole else piece
            spelled = [f"<0x{byte:02X}>" for byte in piece.encode()]
            ids += map(tokens.index, [known] if known in tokens else spelled)
    return ids


def test_gemmas_pieces_are_joined_by_their_scores(tmp_path):
    lists = gemma_lists()
    config = CONFIGS["gemma3"]()
    config.vocab_size, config.num_hidden_layers = len(lists["tokenizer.ggml.tokens"]), 1
    config.bos_token_id = config.eos_token_id = config.pad_token_id = 0
    model = transformers.AutoModelForCausalLM.from_config(config)
    path = write(tmp_path / "model.gguf", model, changes=lists)
    found = from_pretrained(path)[1]
    theirs_ = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    texts = ["ab aba\nb  ba", "<b>bab</b>", "éab漢 🦊 a", "b   a    b", "", "\u2581ab \u2581  a"]
    generator = random.Random(0)
    texts += ["".join(generator.choices("ab \n<>", k=40)) for _ in range(50)]
    for text in texts:
        ids = found.encode_ordinary(text)
        assert ids == joined(text, lists), text
        assert found.encode(text) == [2, *ids] and found.decode(ids) == text.replace("\u2581", " ")
        if "    " not in text and "\u2581" not in text:  # there theirs goes another way
            assert ids == theirs_(text, add_special_tokens=False)["input_ids"], text
    assert (found.bos_token, found.eos_token, found.pad_token) == ("<bos>", "<eos>", "<pad>")
    found.save(tmp_path)
    again = type(found).load(tmp_path)
    assert [again.encode(text) for text in texts] == [found.encode(text) for text in texts]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scores": None}, "scores does not fit 2"),
        ({"scores": [0.0]}, "scores does not fit 2"),
        ({"scores": ["high"] * 5}, "scores does not fit 2"),
        ({"unknown_token_id": "<unk>"}, "unknown_token_id is '<unk>', no token"),
        ({"token_type": [3] * 5}, "token_type does not fit 2"),
        ({"add_eos_token": True}, "add_eos_token is not supported"),
        ("long", "a token of 1,001 characters: at most 1,000 are read"),
        ("twice", "the token 'ab' is there as two kinds"),
    ],
)
def test_pieces_that_contradict_each_other(changes, words, tmp_path):
    lists = gemma_lists()
    if isinstance(changes, str):
        tokens = lists["tokenizer.ggml.tokens"]
        tokens[tokens.index("ab") if changes == "long" else tokens.index("<b>")] = (
            "a" * 1001 if changes == "long" else "ab"
        )
        changes = {}
    changes = lists | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    header = read_header(write(tmp_path / "model.gguf", changes=changes))
    with pytest.raises(ValueError, match=r"model\.gguf: ") as caught:
        read_tokenizer(header)
    assert words in str(caught.value)


def test_pieces_need_a_library_and_it_is_named(tmp_path, monkeypatch):
    header = read_header(write(tmp_path / "model.gguf", changes=gemma_lists()))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match="pip install tokenizers"):
        read_tokenizer(header)


def test_llama_3_begins_texts_and_qwen_composes_characters(tmp_path):
    path = write(tmp_path / "a.gguf", tokenizer=tokenizer_of(LLAMA3_PATTERN), cut="llama-bpe",
                 changes={"tokenizer.ggml.add_bos_token": None})  # fmt: skip
    found = from_pretrained(path)[1]
    assert found.add_bos and found.encode("a") == [found.bos_token_id, *found.encode_ordinary("a")]
    path = write(tmp_path / "b.gguf", tokenizer=tokenizer_of(QWEN2_PATTERN), cut="qwen2")
    found = from_pretrained(path)[1]
    assert found.encode("e\u0301") == found.encode("é") and not found.add_bos


@pytest.mark.parametrize("kind", ["llama", "t5", "bert"])
def test_other_kinds_of_tokenizers_come_as_none_with_a_warning(kind, tmp_path):
    changes = {"tokenizer.ggml.model": kind}
    path = write(tmp_path / "model.gguf", tokenizer=tokenizer_of(), changes=changes)
    with pytest.warns(UserWarning, match=f"the kind '{kind}': no tokenizer is read"):
        model, tokenizer = from_pretrained(path)
    assert tokenizer is None and model.num_parameters() > 0


LATER = lists(tokenizer_of(), 320, "gpt-2")["tokenizer.ggml.merges"][1:]  # without the first


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pre": "jais"}, "pre is 'jais': we know how gpt-2, smollm"),
        ({"pre": None}, "pre is None"),
        ({"tokens": None}, "tokens must be a list of strings"),
        ({"merges": [1, 2]}, "merges must be a list of strings"),
        ({"token_type": [1, 2]}, "token_type does not fit 320 tokens"),
        ({"token_type": [6] * 320}, "of the kind 6: not supported"),
        ({"merges": ["a b", "c"]}, "the merge"),
        ({"merges": LATER}, "which is not listed"),
        ({"add_eos_token": True}, "add_eos_token is not supported"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be the id of a token, not '</s>'"),
        ({"eos_token_id": [1, 2]}, "eos_token_id must be the id of a token, not [1, 2]"),
        ({"tokens": ["!"] * 320}, "the token '!' is there twice, as 0 and as 1"),
        ({"tokens": [chr(0x6F22 + i) for i in range(320)]}, "is not spelled in bytes"),
        (
            {"tokens": [*map(chr, range(33, 100)), "a" * 60_000, *map("x{}".format, range(252))]},
            "is too long",
        ),
        ({"tokens": ["a"] * 319}, "319 tokens do not fit the 320 rows of token_embd.weight"),
    ],
)
def test_lists_that_contradict_each_other(changes, words, tmp_path):
    changes = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    path = write(tmp_path / "model.gguf", tokenizer=tokenizer_of(), changes=changes)
    header = read_header(path)
    with pytest.raises(ValueError, match=r"model\.gguf: ") as caught:
        read_config(header)  # reads the ids, and counts the tokens
        read_tokenizer(header)
    assert words in str(caught.value)


# The config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.rope.scaling.type", "yarn"),
        ("llama.rope.scaling.factor", 4.0),
        ("llama.expert_count", 8),
        ("llama.attention.sliding_window", 64),
        ("llama.attention.value_length", 24),
        ("llama.rope.dimension_count", 8),
        ("llama.attention.scale", 0.5),
        ("llama.tensor_data_layout", "reference"),
        ("llama.vocab_size", 321),
        ("llama.attention.head_count", [4, 4]),
        ("llama.attention.head_count", 3),
        ("llama.attention.head_count_kv", 3),
        ("llama.embedding_length", 0),
        ("llama.rope.freq_base", math.nan),
    ],
)
def test_keys_that_would_change_the_numbers_are_refused_by_name(key, value, tmp_path):
    path = write(tmp_path / "model.gguf", changes={key: value})
    with pytest.raises(ValueError, match=r"model\.gguf") as caught:
        from_pretrained(path)
    words = {"llama.embedding_length": "hidden_size", "llama.rope.freq_base": "rope_theta"}
    words |= {"llama.attention.head_count": "head", "llama.attention.head_count_kv": "head"}
    assert words.get(key, key) in str(caught.value)


def test_what_a_gemma_3_must_say_and_what_follows_from_its_layers(tmp_path):
    model = model_of("gemma3")
    for key in ("attention.sliding_window", "rope.freq_base"):
        path = write(tmp_path / "model.gguf", model, changes={f"gemma3.{key}": None})
        with pytest.raises(ValueError, match=rf"it lacks gemma3\.{key}"):
            read_config(read_header(path))
    strange = {"rope.scaling.type": "yarn", "attn_logit_softcapping": 50.0}
    for key, value in {**strange, "attention.sliding_window_pattern": 6}.items():
        path = write(tmp_path / "model.gguf", model, changes={f"gemma3.{key}": value})
        with pytest.raises(ValueError, match=rf"gemma3\.{key} = .* is not supported"):
            read_config(read_header(path))
    for cap in (0.0, -1.0):
        path = write(path, model, changes={"gemma3.final_logit_softcapping": cap})
        with pytest.raises(ValueError, match="final_logit_softcapping must be a number above 0"):
            read_config(read_header(path))
    scales = {}
    for layers in (7, 62):
        path = write(tmp_path / "model.gguf", model, changes={"gemma3.block_count": layers})
        scales[layers] = read_config(read_header(path)).query_pre_attn_scalar
    assert scales == {7: 256, 62: 64 / 4}  # Google's model of 62 layers: 5,376 / 32 = 168


# Of a Gemma 3 the layers without a window (4B and up); llama.cpp reads it alike for all.
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3"])
@torch.no_grad()
def test_a_rotation_that_is_slowed(name, tmp_path):
    model, linear = model_of(name), {"rope_type": "linear", "factor": 8.0}
    ids = torch.arange(17)[None] * 7
    plain, c = model(ids).logits, model.config
    kind = c.model_type.removesuffix("_text")
    changes = {f"{kind}.rope.scaling.type": "linear", f"{kind}.rope.scaling.factor": 8.0}
    ours, _ = from_pretrained(write(tmp_path / "model.gguf", model, changes=changes))
    tables = c.rope_parameters
    slow = {**tables.get("full_attention", tables), **linear}
    c.rope_parameters = {**tables, "full_attention": slow} if kind == "gemma3" else slow
    theirs_ = transformers.AutoModelForCausalLM.from_config(c).eval()
    theirs_.load_state_dict(model.state_dict())
    torch.testing.assert_close(ours(ids), theirs_(ids).logits, atol=1e-4, rtol=1e-5)
    assert (ours(ids) - plain).abs().max() > 0.1
    assert ours.config.rope_scaling == linear
    assert getattr(ours.config, "rope_local", {"rope_theta": 1e4}) == {"rope_theta": 1e4}
    path = write(tmp_path / "model.gguf", model, changes={**changes, [*changes][1]: None})
    with pytest.raises(ValueError, match=r"model\.gguf: .*factor"):
        read_config(read_header(path))


@torch.no_grad()
def test_a_cap_on_the_scores(tmp_path):
    model, ids = model_of("gemma3"), torch.arange(17)[None] * 7
    path = tmp_path / "model.gguf"
    ours, _ = from_pretrained(write(path, model, changes={"gemma3.final_logit_softcapping": 2.0}))
    assert model(ids).logits.abs().max() > 3
    model.config.final_logit_softcapping = 2.0
    torch.testing.assert_close(ours(ids), model(ids).logits, atol=1e-4, rtol=1e-5)
    changes = {"llama.final_logit_softcapping": 2.0}
    with pytest.raises(ValueError, match="a llama config has no final_logit_softcapping"):
        from_pretrained(write(path, changes=changes))


def test_keys_that_change_nothing_are_read_in_silence(tmp_path):
    changes = {"llama.rope.scaling.type": "none", "llama.expert_count": 0, "general.url": "x"}
    changes |= {"llama.tensor_data_layout": "Meta AI original pth", "quantize.imatrix.file": "y"}
    path = write(tmp_path / "model.gguf", changes=changes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_pretrained(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general.architecture": "gemma2"}, "architecture 'gemma2' is not supported, only llama"),
        ({"llama.block_count": None}, "it lacks llama.block_count"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "it lacks llama.attention.layer_norm"),
        ({"llama.block_count": 3}, "missing: model.layers.2"),
        ({"llama.block_count": 1}, "unexpected: model.layers.1"),
        ({"llama.feed_forward_length": 128}, "the config wants (128, 64)"),
        ({"llama.block_count": 2**31 - 1}, "missing: model.layers.2"),
        ({"llama.attention.key_length": 2**31 - 2}, "largest weight has"),
        ({"split.count": 2}, "a part of a model in 2 files"),
        ({"split.count": "two"}, "a part of a model in two files"),
        ({"llama.context_length": "long"}, "max_position_embeddings"),
    ],
)
def test_configs_that_do_not_fit(changes, words, tmp_path):
    if "llama.attention.key_length" in changes:
        changes = {**changes, "llama.rope.dimension_count": None}
    path = write(tmp_path / "model.gguf", changes=changes)
    with pytest.raises(ValueError, match=r"model\.gguf") as caught:
        from_pretrained(path)
    assert words in str(caught.value)


def test_the_end_of_a_turn_ends_a_text_too(tmp_path):
    path = write(tmp_path / "model.gguf", changes={"tokenizer.ggml.eot_token_id": 317})
    assert from_pretrained(path)[0].config.eos_token_id == (319, 317)


def named(names: dict[str, int], first: int = 300) -> dict:
    """The lists of a vocabulary with these names, each of its kind, from the id `first` on."""
    found = lists(tokenizer_of(), 320, "gpt-2")
    tokens, kinds = [*found["tokenizer.ggml.tokens"]], [*found["tokenizer.ggml.token_type"]]
    for i, (name, kind) in enumerate([*names.items(), *((f"[x{n}]", 5) for n in range(20))]):
        if first + i < 320:
            tokens[first + i], kinds[first + i] = name, kind
    changes = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    changes |= dict.fromkeys(["tokenizer.ggml.model", "tokenizer.ggml.padding_token_id"])
    return {**changes, "tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.bos_token_id": None}


# What llama.cpp (the wheel xllamacpp 2026.10.11549) printed as its "EOG token" for these files.
@pytest.mark.parametrize(
    ("names", "keys", "ends"),
    [
        ({"<|im_start|>": 3, "<|im_end|>": 3, END: 3}, {"eos": 301, "eom": 300}, {300, 301, 302}),
        ({"<|im_end|>": 3, "<|other|>": 3}, {"eot": 301}, {5, 300, 301}),
        ({"<|im_end|>": 3, "<|other|>": 3}, {"eot": 4_000_000}, {5, 300}),
        ({END: 4, "<eos>": 1, "[EOS]": 5}, {}, {5, 300, 301, 302}),
        ({"<|fim_pad|>": 3, "<|repo_name|>": 3, "<|file_sep|>": 3}, {}, {5, 300, 301, 302}),
        ({"<|fim_pad|>": 3, "<|file_sep|>": 3}, {"fim_pad": 7, "fim_sep": 9}, {5, 7, 9}),
        ({"<|end|>": 3, "<|return|>": 3, "<|call|>": 3}, {}, {5, 301, 302}),
        ({"<|end|>": 3, "<|call|>": 3, "<|flush|>": 3}, {}, {5, 301, 302}),
        ({"<|end|>": 3, "<|calls|>": 3, "<|return|>": 3}, {}, {5, 301, 302}),
        ({"<|end|>": 3, "<|flush|>": 3, "<|return|>": 3}, {}, {5, 300, 301, 302}),
        ({"</s>": 3, "<|tool_response>": 3}, {"eos": 300}, {301}),
        ({"<|fim_prefix|>": 3, "<|start|>": 3, "<s>": 3}, {}, {5}),
    ],
)
@pytest.mark.filterwarnings("ignore:.*passed over")
def test_a_text_ends_where_llama_cpp_ends_it(names, keys, ends, tmp_path):
    changes = named(names) | {f"tokenizer.ggml.{k}_token_id": i for k, i in keys.items()}
    path = write(tmp_path / "model.gguf", changes=changes)
    model, _ = from_pretrained(path)
    assert {*model.config.eos_token_ids} == ends
    prompt, others = torch.tensor([[2, 3]]), [i for i in range(320) if i not in ends]
    for end in ends:  # and so do generate and stream_text, without being told
        plan = iter([others[9], others[40], end, others[7]])
        found = generate(
            model, prompt, max_new_tokens=4, sampler=lambda *_, p=plan: torch.tensor([next(p)])
        )
        assert found[0, 2:].tolist() == [others[9], others[40], end]
        plan = iter([1, 2, end, 3])
        pieces = stream_text(
            model,
            tokenizer_of(),
            prompt,
            max_new_tokens=4,
            sampler=lambda *_, p=plan: torch.tensor([next(p)]),
        )
        assert "".join(pieces) == tokenizer_of().decode([1, 2])


def test_no_text_spells_an_end_token_that_a_file_calls_user_defined(tmp_path):
    tokenizer = tokenizer_of()
    changes = {"tokenizer.ggml.token_type": [*(1,) * 316, 4, 3, 4, 4]}
    path = write(tmp_path / "model.gguf", tokenizer=tokenizer, changes=changes)
    model, found = from_pretrained(path)
    assert model.config.eos_token_ids == (317, 319) and found.added_tokens == {"<|other|>": 318}
    assert found.special_tokens == {"<|im_start|>": 316, "<|im_end|>": 317, END: 319}
    with pytest.raises(ValueError, match="spells the special token"):
        found.encode(f"a{END}")


@pytest.mark.parametrize("key", ["bos", "eos", "eot", "eom", "padding", "fim_pad"])
def test_an_id_outside_the_vocabulary_is_passed_over_with_a_warning(key, tmp_path):
    changes = {f"tokenizer.ggml.{key}_token_id": 320}
    path = write(tmp_path / "model.gguf", tokenizer=tokenizer_of(), changes=changes)
    with pytest.warns(UserWarning, match=rf"model\.gguf: .*{key}_token_id 320 is passed over"):
        model, tokenizer = from_pretrained(path)
    assert tokenizer.encode("a") and model.config.vocab_size == 320
    assert 320 not in (model.config.bos_token_id, model.config.pad_token_id)
    assert {*model.config.eos_token_ids} == {317, 319}


def test_tensors_that_no_config_knows_are_named(tmp_path):
    path = with_tensors(tmp_path / "m.gguf", {"blk.0.ffn_gate_inp.weight": np.ones((4, 64), "f4")})
    with pytest.raises(ValueError, match=r"m\.gguf .*unexpected: blk\.0\.ffn_gate_inp\.weight"):
        from_pretrained(path)


# Folders and names


def test_a_folder_with_one_file_opens_and_with_two_does_not(tmp_path):
    path = write(tmp_path / "a.gguf", tokenizer=tokenizer_of())
    (tmp_path / "README.md").write_text("about it")
    model, tokenizer = from_pretrained(tmp_path)
    assert tokenizer.eos_token == "<|im_end|>"
    ids = torch.tensor([tokenizer.encode("the cat")])
    assert generate(model, ids, max_new_tokens=3).shape[1] == ids.shape[1] + 3
    write(tmp_path / "b.gguf")
    with pytest.raises(ValueError, match=r"several GGUF files, name one of them: a\.gguf, b\.gguf"):
        from_pretrained(tmp_path)
    assert from_pretrained(str(path))[1] is not None


def test_a_checkpoint_beside_a_file_counts(tmp_path):
    write(tmp_path / "a.gguf")
    model_of("qwen3").save_pretrained(tmp_path)
    assert from_pretrained(tmp_path)[0].config.model_type == "qwen3"


def test_files_that_are_not_there_or_are_something_else(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file '.*none\.gguf'"):
        from_pretrained(str(tmp_path / "none.gguf"))
    for content in (b"", b"GG", b"PK\x03\x04 a zip file"):
        (tmp_path / "x.bin").write_bytes(content)
        with pytest.raises(ValueError, match=r"x\.bin is no GGUF file"):
            from_pretrained(tmp_path / "x.bin")


def test_without_the_library_the_command_is_said(tmp_path):
    path = write(tmp_path / "model.gguf")
    code = f"""
import sys
sys.modules["gguf"] = None
from minillm import from_pretrained
try:
    from_pretrained({str(path)!r})
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install gguf" in done.stdout, done.stderr


def test_the_command_line_takes_a_file(tmp_path, capsys):
    path = str(write(tmp_path / "model.gguf", tokenizer=tokenizer_of()))
    options = ["--device", "cpu"]
    short = ["--prompt", "the cat", "--max-new-tokens", "4", "--temperature", "0"]
    assert main(["generate", path, *options, *short]) == 0
    assert capsys.readouterr().out.startswith("the cat")
    assert main(["eval", path, *options, "--documents", "2", "--samples", "0"]) == 0
    assert "bits per byte" in capsys.readouterr().out
    assert main(["generate", str(tmp_path / "none.gguf"), *options]) == 1
    assert "there is no file" in capsys.readouterr().err


# Damaged files


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    """A file with lists of strings and of numbers, its header short."""
    path = tmp_path_factory.mktemp("whole") / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("words", ["one", "two"])
    writer.add_bool("switch", True)
    writer.add_tensor("token_embd.weight", np.ones((2, 32), np.float32))
    writer.add_tensor("norm.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def refused(data: bytes, folder: Path) -> str:
    """The words with which the bytes of a file are refused."""
    path = folder / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"model\.gguf") as caught:
        read_header(path)
    assert type(caught.value) is ValueError
    return str(caught.value)


def test_a_file_cut_off_anywhere_is_refused(whole, tmp_path):
    (tmp_path / "model.gguf").write_bytes(whole)
    header = read_header(tmp_path / "model.gguf")
    assert header.keys["numbers"] == [1, 2, 3] and header.keys["words"] == ["one", "two"]
    assert header.keys["switch"] is True and [*header.tensors] == [
        "token_embd.weight",
        "norm.weight",
    ]
    stored = [*header.tensors.values()]
    end = max(s.start + s.num_bytes for s in stored)
    assert end == len(whole)
    for length in range(end):
        refused(whole[:length], tmp_path)


@given(st.data())
def test_any_changed_byte_gives_a_header_or_a_refusal(whole, tmp_path_factory, data):
    """No hang, no other error, and no memory beyond the file's own measure."""
    folder = tmp_path_factory.mktemp("changed")
    changed = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, 400))] = data.draw(st.integers(0, 255))
    (folder / "model.gguf").write_bytes(changed)
    tracemalloc.start()
    try:
        read_config(read_header(folder / "model.gguf"))
    except ValueError as error:
        assert "model.gguf" in str(error)
    finally:
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert most < 1_000_000


def test_every_byte_of_the_header_set_to_its_most(whole, tmp_path):
    for place in range(len(whole) - 3 * 128):
        changed = bytearray(whole)
        changed[place] = 255
        path = tmp_path / "model.gguf"
        path.write_bytes(changed)
        try:
            read_config(read_header(path))
        except ValueError as error:
            assert "model.gguf" in str(error), place


def header_of(*lists: tuple[int, int, bytes]) -> bytes:
    """A file of lists alone, each given by its kind, its count and its bytes."""
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, len(lists))
    for i, (kind, count, body) in enumerate(lists):
        data += struct.pack("<QcIIQ", 1, b"%d" % i, 9, kind, count) + body
    return data


@pytest.mark.parametrize(
    ("kind", "one", "value"),
    [
        (0, b"\x07", 7),
        (1, b"\xff", -1),
        (6, struct.pack("<f", 0.5), 0.5),
        (7, b"\x01", True),
        (10, struct.pack("<Q", 2**63), 2**63),
        (8, bytes(8), ""),
        (8, struct.pack("<Q", 3) + "鱼".encode(), "鱼"),
    ],
)
def test_a_list_takes_no_more_memory_than_the_file(kind, one, value, tmp_path):
    count = 100_000
    path = tmp_path / "model.gguf"
    path.write_bytes(header_of((kind, count, one * count)))
    read_header(path)  # what is imported
    tracemalloc.start()
    found = read_header(path).keys["0"]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2 * path.stat().st_size + 100_000
    assert len(found) == count and found[0] == found[-1] == value == found[99_999]
    assert type(found[5]) is type(value) and found[3:5] == [value, value]
    assert found == [value] * count and found != [value] * 9 and found != value
    with pytest.raises(IndexError):
        found[count]
    assert len(repr(found)) < 600 and repr(found).endswith("... 100,000 in all]")


def test_the_largest_vocabulary_that_is_read_takes_less_than_200_megabytes(tmp_path):
    size, path = 20_000, tmp_path / "model.gguf"
    tokens = [bytes([byte]) for byte in range(256)]
    pairs = [(tokens[i // 256], tokens[i % 256]) for i in range(size - 256)]
    writer = gguf.GGUFWriter(path, "llama")
    spelled = [spell(token) for token in tokens + [a + b for a, b in pairs]]
    writer.add_array("tokenizer.ggml.tokens", spelled)
    writer.add_array("tokenizer.ggml.token_type", [1] * size)
    writer.add_array("tokenizer.ggml.merges", [f"{spell(a)} {spell(b)}" for a, b in pairs[400:]])
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "gpt-2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    header = read_header(path)
    tracemalloc.start()
    with pytest.raises(ValueError, match="should be merged from"):  # all are merged, to find it
        read_tokenizer(header)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most / size * _MOST_TOKENS < 190e6


def test_strings_of_a_list_are_looked_at_while_they_are_read(tmp_path):
    def strings(*texts: bytes) -> bytes:
        return b"".join(struct.pack("<Q", len(text)) + text for text in texts)

    words = refused(header_of((8, 3, strings(b"a", b"\xff", b"b"))), tmp_path)
    assert "byte 66: a string that is not UTF-8" in words
    data = header_of((8, 2, strings(b"abc") + struct.pack("<Q", 9) + b"12345678"))
    assert "9 characters of at least 1 bytes should follow" in refused(data, tmp_path)
    assert "2 numbers" not in refused(header_of((8, 2, strings(b"a" * 12))), tmp_path)
    two = "é".encode()  # one letter, cut into two strings
    assert "not UTF-8" in refused(header_of((8, 2, strings(two[:1], two[1:]))), tmp_path)


def test_what_no_header_needs_is_refused_before_it_is_read(tmp_path):
    """Files of holes, so that nothing large is written."""
    path = tmp_path / "model.gguf"
    for data, length, words in (
        (header_of((8, (1 << 22) + 1, b"")), 1 << 26, "4,194,305 strings should follow; no header"),
        (header_of((0, 1 << 24, b"")), 1 << 24, None),
        (header_of(*[(0, 1, b"1")] * 3, (10, 6_500_000, b"")), 1 << 26, "at most 50,331,648 bytes"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 65_537), 1 << 20, "65,537 keys should follow; no hea"),
        (b"GGUF" + struct.pack("<IQQ", 3, 16_385, 0), 1 << 20, "16,385 tensors should follow; no"),
    ):
        with open(path, "wb") as file:
            file.write(data)
            file.truncate(len(data) + length)
        if words is None:
            assert len(read_header(path).keys["0"]) == 1 << 24
            continue
        with pytest.raises(ValueError, match=words):
            read_header(path)


def test_errors_stay_short_whatever_a_file_says(tmp_path):
    long = "x" * 100_000
    for key in ("general.architecture", "split.count", "llama.rope.scaling.type", "llama.new"):
        path = write(tmp_path / "m.gguf", changes={key: long})
        with pytest.raises(ValueError, match=r"m\.gguf") as caught:
            from_pretrained(path)
        assert len(str(caught.value)) < 400 + len(str(path)), key
    for key in ("llama.context_length", "llama.rope.scaling.type", "split.count"):
        path = write(tmp_path / "m.gguf", changes={key: [*range(50_000)]})
        with pytest.raises(ValueError, match=r"m\.gguf") as caught:
            from_pretrained(path)
        assert len(str(caught.value)) < 400 + len(str(path)), key


def test_two_tensors_that_are_one_weight_are_refused(tmp_path):
    ones = np.ones(64, np.float32)
    for name in ("model.norm.weight", "lm_head.weight"):
        path = with_tensors(tmp_path / "m.gguf", {name: ones})
        theirs_ = {"model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
        message = f"m.gguf: {theirs_[name]} and {name} are one weight to us, {name}"
        with pytest.raises(ValueError, match=message):
            from_pretrained(path)
        header = read_header(path)
        with pytest.raises(ValueError, match=message):
            next(read_weights(header, read_config(header)))
    path = with_tensors(tmp_path / "m.gguf", {"model.layers.0.self_attn.q_proj.weight": ones})
    with pytest.raises(ValueError, match=r"blk\.0\.attn_q\.weight and model\.layers\.0\.self_attn"):
        from_pretrained(path)
    path = with_tensors(tmp_path / "m.gguf", {"model.layers.7.self_attn.q_proj.weight": ones})
    with pytest.raises(ValueError, match=r"unexpected: model\.layers\.7.*: llama.cpp has no such"):
        from_pretrained(path)


def test_no_model_is_made_of_thousands_of_layers(tmp_path):
    norms = {f"blk.{i}.ffn_norm.weight": np.ones(64, np.float32) for i in range(1025)}
    path = with_tensors(tmp_path / "m.gguf", norms, changes={"llama.block_count": 1025})
    with pytest.raises(ValueError, match=r"m\.gguf is not read: 1,025 layers, more than 1,024"):
        from_pretrained(path)


def test_a_tokenizer_larger_than_any_published_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path / "model.gguf", tokenizer=tokenizer_of())
    monkeypatch.setattr("minillm.deeper.pretrained.gguf._MOST_TOKENS", 319)
    with pytest.raises(ValueError, match=r"tokens has 320 strings, more than 319"):
        read_tokenizer(read_header(path))


HUGE = 10**12


def test_counts_that_cannot_be(whole, tmp_path):
    for place, name in ((8, "tensors"), (16, "keys")):
        for count in (HUGE, 2**64 - 1, 2**63):
            changed = whole[:place] + struct.pack("<Q", count) + whole[place + 8 :]
            assert f"{count:,} {name} of at least" in refused(changed, tmp_path) or place == 8
    at = whole.index(b"words") + 5 + 4 + 4
    changed = whole[:at] + struct.pack("<Q", HUGE) + whole[at + 8 :]
    assert f"{HUGE:,} strings of at least 8 bytes should follow" in refused(changed, tmp_path)
    at = whole.index(b"numbers") + 7 + 4 + 4
    changed = whole[:at] + struct.pack("<Q", HUGE) + whole[at + 8 :]
    assert f"{HUGE:,} numbers of at least 4 bytes should follow" in refused(changed, tmp_path)


def test_a_header_that_is_all_there_and_still_too_long(tmp_path):
    """A list that fills a large file would take dozens of times its size as Python's numbers."""
    path, count = tmp_path / "model.gguf", 1 << 25
    start = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k"
    start += struct.pack("<IIQ", 9, 0, count)
    with open(path, "wb") as file:
        file.write(start)
        file.truncate(len(start) + count)
    with pytest.raises(ValueError, match="33,554,432 numbers should follow; no header has more"):
        read_header(path)


def test_each_kind_of_damage_is_called_by_its_name(whole, tmp_path):
    def changed(old: bytes, new: bytes) -> str:
        assert whole.count(old) >= 1 and len(old) == len(new)
        return refused(whole.replace(old, new, 1), tmp_path)

    assert "does not begin with GGUF" in changed(b"GGUF", b"GGML")
    assert "version 1 of GGUF" in changed(b"GGUF\x03\0\0\0", b"GGUF\x01\0\0\0")
    assert "highest byte first" in changed(b"GGUF\x03\0\0\0", b"GGUF\0\0\0\x03")
    assert "the key 'numbers' for the second time" in refused(
        whole.replace(b"\x05\0\0\0\0\0\0\0words", b"\x07\0\0\0\0\0\0\0numbers", 1), tmp_path
    )
    info = whole.index(b"token_embd.weight") + 17
    dims, first, second, kind, offset = struct.unpack_from("<IQQIQ", whole, info)
    assert (dims, first, second, kind, offset) == (2, 32, 2, 0, 0)

    def stored(**new: int) -> str:
        values = {"dims": 2, "first": 32, "second": 2, "kind": 0, "offset": 0, **new}
        packed = struct.pack("<IQQIQ", *values.values())
        return refused(whole[:info] + packed + whole[info + len(packed) :], tmp_path)

    assert "has 1,000 dimensions, not 1 to 4" in stored(dims=1000)
    assert "written in the type 99, which is unknown" in stored(kind=99)
    assert "written in the type 4, which is unknown" in stored(kind=4)
    assert "written in the type 15, which is unknown" in stored(kind=15)  # no one can decode it
    assert "should lie at bytes" in stored(second=HUGE)
    assert "should lie at bytes" in stored(offset=2**63)
    assert "should lie at bytes" in stored(offset=8)
    assert "rows of Q4_0 are multiples of 32" in stored(kind=2, first=31)
    assert "rows of F32 are multiples of 1" in stored(first=0)
    assert "inside of 'token_embd.weight'" in stored(second=3)
    twice = whole.replace(b"\x0b\0\0\0\0\0\0\0norm.weight", b"\x11\0\0\0\0\0\0\0token_embd.weight")
    assert "the tensor 'token_embd.weight' for the second time" in refused(twice, tmp_path)


def test_the_config_of_a_header_is_a_config(tmp_path):
    path = write(tmp_path / "model.gguf", model_of("qwen3"), tokenizer=tokenizer_of())
    header = read_header(path)
    config = read_config(header)
    assert isinstance(config, ModelConfig) and config.head_dim == 128
    assert read_tokenizer(header).vocab_size == config.vocab_size
    assert lists(tokenizer_of(), 320, "gpt-2")["tokenizer.ggml.model"] == "gpt2"


def test_rows_for_neighbours_are_what_the_writer_stores():
    weight = np.arange(8)[:, None]
    assert interleaved(weight, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
