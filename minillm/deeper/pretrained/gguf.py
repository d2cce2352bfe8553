"""GGUF files, as llama.cpp reads them: config, weights and tokenizer out of one file.

Every count is compared with the file's size before anything is made of it. The weights, most of
them blocks of a few bits a number, become float32 by the library gguf.
"""

# Built from notebooks/deeper/10_gguf.ipynb: edit there, then make build.

import math
import mmap
import operator
import os
import re
import struct
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from minillm.bpe import GPT2_PATTERN, LLAMA3_PATTERN, QWEN2_PATTERN
from minillm.config import ModelConfig
from minillm.deeper.attention.rope_layouts import interleaved_to_half
from minillm.deeper.attention.rope_scaling import rope_frequencies
from minillm.deeper.pretrained.weights import check_apart
from minillm.deeper.tokenizer.foreign import ForeignTokenizer
from minillm.deeper.tokenizer.hf_json import LONGEST_TOKEN, check_merges, unspell
from minillm.deeper.tokenizer.patterns import SMOLLM_PATTERNS
from minillm.deeper.tokenizer.wrapped import WrappedTokenizer
from minillm.support.family import family_of

__all__ = [
    "Header",
    "Stored",
    "Values",
    "our_name",
    "read_config",
    "read_header",
    "read_rows",
    "read_tokenizer",
    "read_weights",
    "shapes",
]

# The kinds of values by their numbers: what struct calls them.
_NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}

_STRING, _LIST = 8, 9

# The most that a header may hold. Published ones have fewer than a hundred keys, some thousands of
# tensors, 300,000 tokens and 16 MB; a vocabulary of a million, with as many merges, has room.
_MOST = 1 << 24  # characters of a string, numbers of a list

_MOST_STRINGS, _MOST_KEYS, _MOST_TENSORS = 1 << 22, 1 << 16, 1 << 14

_LARGEST = 48 << 20  # bytes


class Values(Sequence[Any]):
    """A list of a file, kept as its bytes: what is asked for becomes Python's number or string.

    Args:
        numbers: those of the list, or of a list of strings the place in `text` where each begins,
            and where one more would.
        text: the strings, each with its length before it.
    """

    def __init__(self, numbers: np.ndarray, text: bytes | None = None) -> None:
        self.numbers, self.text = numbers, text

    def __len__(self) -> int:
        return len(self.numbers) - (self.text is not None)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        i = range(len(self))[i]  # counts from the end, too
        if self.text is None:
            return self.numbers[i].item()
        return self.text[self.numbers[i] + 8 : self.numbers[i + 1]].decode()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list | tuple | Values) or len(self) != len(other):
            return False
        return all(map(operator.eq, self, other))

    def __repr__(self) -> str:
        more = f", ... {len(self):,} in all" if len(self) > 8 else ""
        return f"[{', '.join(f'{value!r:.60}' for value in self[:8])}{more}]"


class _Cursor:
    """Reads a file's bytes from front to back, never more than there are.

    Every count is compared with the bytes that are left, before anything is made of its size.
    """

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def fail(self, what: str) -> NoReturn:
        """Raises: ValueError that names the file and the place."""
        raise ValueError(f"{self.path}, byte {self.at:,}: {what}")

    def need(self, count: int, size: int, what: str, most: int = _MOST) -> None:
        """Raises: ValueError if so many things of at least so many bytes cannot follow."""
        if count * size > len(self.data) - self.at:
            left = f"the file has {len(self.data) - self.at:,} bytes left"
            self.fail(f"{count:,} {what} of at least {size:,} bytes should follow, and {left}")
        if count > most:
            self.fail(f"{count:,} {what} should follow; no header has more than {most:,}")
        if self.at + count * size > _LARGEST:
            self.fail(f"{count:,} {what} should follow; a header has at most {_LARGEST:,} bytes")

    def numbers(self, form: str, count: int = 1) -> tuple[Any, ...]:
        """The next `count` numbers; `form` as struct has it, always the lowest byte first."""
        size = struct.calcsize(f"<{form}")
        self.need(count, size, "numbers")
        found = struct.unpack_from(f"<{count}{form}", self.data, self.at)
        self.at += count * size
        return found

    def string(self, longest: int = _MOST) -> str:
        """The next string: its length in bytes, then UTF-8."""
        (length,) = self.numbers("Q")
        if length > longest:
            self.fail(f"a name of {length:,} bytes; at most {longest:,} are allowed")
        self.need(length, 1, "characters")
        try:
            text = self.data[self.at : self.at + length].decode()
        except UnicodeDecodeError as error:
            self.fail(f"a string that is not UTF-8: {error.reason}")
        self.at += length
        return text

    def strings(self, count: int) -> Values:
        """The next `count` strings, looked at and kept as they stand."""
        self.need(count, 8, "strings", _MOST_STRINGS)
        begin, places = self.at, np.zeros(count + 1, np.uint32)
        length_at = struct.Struct("<Q").unpack_from
        for i in range(count):
            start = self.at + 8
            end = start + length_at(self.data, self.at)[0] if start <= len(self.data) else start
            if not self.at < end <= min(len(self.data), _LARGEST):
                self.string()  # says what is wrong
            try:
                self.data[start:end].decode()
            except UnicodeDecodeError:
                self.string()
            self.at = end
            places[i + 1] = end - begin
        return Values(places, self.data[begin : self.at])

    def value(self, kind: int) -> Any:
        """The next value: a number, a string, or a list of one of them."""
        if kind in _NUMBERS:
            return self.numbers(_NUMBERS[kind])[0]
        if kind == _STRING:
            return self.string()
        if kind != _LIST:
            self.fail(f"a value of the unknown kind {kind}")
        kind, count = *self.numbers("I"), *self.numbers("Q")
        if kind == _STRING:
            return self.strings(count)
        if kind not in _NUMBERS:
            self.fail(f"a list of values of kind {kind}: not supported")
        dtype = np.dtype(f"<{_NUMBERS[kind]}")
        self.need(count, dtype.itemsize, "numbers")
        found = np.frombuffer(self.data, dtype, count, self.at).copy()
        self.at += found.nbytes
        return Values(found)


@dataclass(frozen=True)
class Stored:
    """One tensor in a file: its shape as torch counts, how its numbers are written, and where."""

    shape: tuple[int, ...]
    kind: str
    start: int  # bytes from the beginning of the file
    num_bytes: int


@dataclass(frozen=True)
class Header:
    """What stands before the weights: keys with their values, and where each tensor lies."""

    path: Path
    keys: Mapping[str, Any]
    tensors: Mapping[str, Stored]

    def fail(self, what: str) -> NoReturn:
        """Raises: ValueError that names the file."""
        raise ValueError(f"{self.path}: {what}")


def read_header(path: str | os.PathLike[str]) -> Header:
    """All that a GGUF file says before its weights; of those, only where they lie.

    Raises: ValueError that names file and place, if the file is no GGUF, is damaged or cut off;
        ImportError without the library gguf.
    Source: ggml's docs/gguf.md, versions 2 and 3 of the format.
    """
    path = Path(path)
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is no GGUF file: it does not begin with GGUF")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Cursor(path, data))


def _parse(cursor: _Cursor) -> Header:
    cursor.at = 4
    (version,) = cursor.numbers("I")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3)
        why = "written with the highest byte first" if swapped else "only 2 and 3 are known"
        cursor.fail(f"version {version} of GGUF is not supported: {why}")
    num_tensors, num_keys = cursor.numbers("Q", 2)
    cursor.need(num_keys, 13, "keys", _MOST_KEYS)  # a name's length, a kind, a value
    keys: dict[str, Any] = {}
    for _ in range(num_keys):
        name = cursor.string(longest=65535)
        if name in keys:
            cursor.fail(f"the key {name!r:.80} for the second time")
        keys[name] = cursor.value(*cursor.numbers("I"))
    cursor.need(
        num_tensors, 24, "tensors", _MOST_TENSORS
    )  # a name's length, a count, a kind, an offset
    found: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(num_tensors):
        name = cursor.string(longest=65535)
        if name in found:
            cursor.fail(f"the tensor {name!r:.80} for the second time")
        (num_dims,) = cursor.numbers("I")
        if not 1 <= num_dims <= 4:
            cursor.fail(f"{name!r:.80} has {num_dims:,} dimensions, not 1 to 4")
        shape = cursor.numbers("Q", num_dims)[::-1]  # the file counts columns first
        found[name] = (shape, *cursor.numbers("I"), *cursor.numbers("Q"))
    alignment = keys.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        cursor.fail(f"general.alignment must be a power of two, not {alignment!r:.40}")
    first = -(-cursor.at // alignment) * alignment  # where the weights begin
    header = Header(cursor.path, keys, {})
    size = len(cursor.data)
    tensors = {n: _place(header, n, *t, first, alignment, size) for n, t in found.items()}
    _check_apart(header, tensors)
    return Header(cursor.path, keys, tensors)


def _place(
    header: Header,
    name: str,
    shape: tuple[int, ...],
    number: int,
    offset: int,
    first: int,
    alignment: int,
    size: int,
) -> Stored:
    """Where a tensor lies. Raises: ValueError if it cannot lie there."""
    try:
        kind, in_block, bytes_of_block = _block(number)
    except (ValueError, NotImplementedError):
        header.fail(f"{name!r:.80} is written in the type {number}, which is unknown")
    if 0 in shape or shape[-1] % in_block:
        rule = f"rows of {kind} are multiples of {in_block} numbers"
        header.fail(f"{name!r:.80} has the shape {shape}, and {rule}")
    num_bytes = math.prod(shape) // in_block * bytes_of_block
    start = first + offset
    if offset % alignment or start + num_bytes > size:
        where = f"bytes {start:,} to {start + num_bytes:,}"
        header.fail(f"{name!r:.80} should lie at {where}; the file has {size:,} bytes")
    return Stored(shape, kind, start, num_bytes)


@cache
def _block(number: int) -> tuple[str, int, int]:
    """Of a type its name, the numbers in a block, and the bytes. Raises: if it is not known."""
    library = _library()
    kind = library.GGMLQuantizationType(number)
    in_block, bytes_of_block = library.GGML_QUANT_SIZES[kind]
    library.dequantize(np.zeros((1, bytes_of_block), np.uint8), kind)
    return kind.name, in_block, bytes_of_block


def _check_apart(header: Header, tensors: Mapping[str, Stored]) -> None:
    """Raises: ValueError if two tensors share bytes."""
    end, before = 0, ""
    for name, stored in sorted(tensors.items(), key=lambda item: item[1].start):
        if stored.start < end:
            header.fail(f"{name!r:.80} begins at byte {stored.start:,}, inside of {before!r:.80}")
        end, before = stored.start + stored.num_bytes, name


def _library() -> ModuleType:
    try:
        import gguf
    except ImportError:
        raise ImportError("GGUF files need a library: pip install gguf") from None
    return gguf


# Architectures whose weights we can read: llama.cpp's name, and ours.
_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}

# The config's keys, after the name of the architecture.
_SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}

_OPTIONAL = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "context_length": "max_position_embeddings",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}

# Those without which an architecture would be another model.
_ITS_OWN = {
    "gemma3": {"attention.sliding_window": "sliding_window", "rope.freq_base": "rope_theta"}
}

# Keys that may say only one thing: what we compute.
_SUPPORTED: dict[str, Any] = {
    "rope.scaling.type": "none",
    "attention.causal": True,
    "expert_count": 0,
    "expert_used_count": 0,
    "tensor_data_layout": "Meta AI original pth",  # q and k as `read_weights` expects them
}

# What ends a text in llama.cpp: the end of a text, of a turn, of a message, if a key names one,
_END_KEYS = ("eos", "eot", "eom")

# what fills, begins a repository or parts files in code: by its key, or else by one of these names,
_FILE_ENDS = {
    "fim_pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]".split(),
    "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>".split(),
    "fim_sep": ["<|file_sep|>"],
}

# and in any case the tokens of these names.
_END_NAMES = {
    *"<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn>".split(),
    *"<|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|>".split(),
    *"<end_of_utterance> <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> [e~[".split(),
}


def read_config(header: Header) -> ModelConfig:
    """The config that a file's keys and tensors tell of.

    Raises: ValueError for an unknown architecture, a missing key, and for a key that would change
        what the model computes, each by name.
    """
    keys = dict(header.keys)
    name = keys.get("general.architecture")
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        header.fail(f"the architecture {name!r:.40} is not supported, only {known}")
    if keys.get("split.count") not in (None, 0, 1):
        header.fail(f"a part of a model in {keys['split.count']!s:.40} files: join them first")
    ours = {
        key.removeprefix(f"{name}."): v for key, v in keys.items() if key.startswith(f"{name}.")
    }
    needed = _SIZES | _ITS_OWN.get(name, {})
    if missing := [f"{name}.{key}" for key in needed if key not in ours]:
        header.fail(f"it lacks {', '.join(missing)}")
    found = {new: ours.pop(old) for old, new in (_OPTIONAL | needed).items() if old in ours}
    found |= _found_in_tensors(header)
    if ours.get("rope.scaling.type") == "linear":  # of a Gemma 3 where no window reads
        scaling = {"rope_type": ours.pop("rope.scaling.type")}
        found["rope_scaling"] = {**scaling, "factor": ours.pop("rope.scaling.factor", None)}
    found["bos_token_id"], found["pad_token_id"] = _id_of(header, "bos"), _id_of(header, "padding")
    if ends := _ends(header):
        found["eos_token_id"] = ends[0] if len(ends) == 1 else tuple(ends)
    try:
        config = ModelConfig(model_type=_ARCHITECTURES[name], **found)
        config = _with_scale(_with_scaling(header, config))
    except ValueError as error:
        header.fail(str(error))
    for key in ("attention.value_length", "rope.dimension_count"):
        if ours.pop(key, config.head_dim) != config.head_dim:
            header.fail(f"{name}.{key} differs from the size of a head, {config.head_dim}")
    for key, value in _SUPPORTED.items():
        if ours.get(key, value) != value:
            header.fail(f"{name}.{key} = {ours[key]!r:.60} is not supported, only {value!r}")
    harmless = {*_SUPPORTED, "rope.scaling.finetuned", "rope.scaling.original_context_length"}
    if strange := sorted(ours.keys() - harmless):
        header.fail(f"{name}.{strange[0]:.80} = {ours[strange[0]]!r:.60} is not supported")
    return config


def _id_of(header: Header, name: str) -> int | None:
    """The id that the key of that name gives; with a warning none if there is no such token."""
    key, rows = f"tokenizer.ggml.{name}_token_id", header.tensors["token_embd.weight"].shape[0]
    found = header.keys.get(key)
    if found is not None and type(found) is not int:
        header.fail(f"{key} must be the id of a token, not {found!r:.40}")
    if found is None or 0 <= found < rows:
        return found
    what = f"{header.path}: {key} {found} is passed over, being outside a vocabulary of {rows}"
    warnings.warn(what, stacklevel=5)
    return None


def _ends(header: Header) -> list[int]:
    """The ids that end a text: those of keys first, then those that llama.cpp knows by their names.

    Source: llama.cpp's src/llama-vocab.cpp, `special_eog_ids` of `llama_vocab::impl::load`.
    """
    tokens = header.keys.get("tokenizer.ggml.tokens")
    known = {*_END_NAMES}.union(*_FILE_ENDS.values())
    listed = enumerate(tokens if isinstance(tokens, list | Values) else ())
    ids = {token: i for i, token in listed if isinstance(token, str) and token in known}
    ends = [_id_of(header, name) for name in _END_KEYS]
    for key, names in _FILE_ENDS.items():
        by_key = _id_of(header, key)
        ends += map(ids.get, names) if by_key is None else [by_key]
    ends += sorted(i for name, i in ids.items() if name in _END_NAMES)
    used = {name for name, i in ids.items() if i in ends}
    calls = used & {"<|call|>", "<|calls|>"}
    if calls and used & {"<|return|>", "<|flush|>"}:  # there "<|end|>" ends a part of an answer
        ends = [i for i in ends if i != ids.get("<|end|>")]
    if "<|tool_response>" in used:
        ends = [i for i in ends if i != ids.get("</s>")]
    return [*dict.fromkeys(i for i in ends if i is not None)]


def _found_in_tensors(header: Header) -> dict[str, Any]:
    """What no key says: the rows of the embedding, and which weights are there at all."""
    tensors = header.tensors
    if "token_embd.weight" not in tensors:
        header.fail("it lacks the tensor token_embd.weight")
    rows, tokens = tensors["token_embd.weight"].shape[0], header.keys.get("tokenizer.ggml.tokens")
    for key, value in header.keys.items():
        if key.endswith(".vocab_size") and value != rows:
            header.fail(f"{key:.80} is {value!r:.40}, and token_embd.weight has {rows:,} rows")
    if isinstance(tokens, list | Values) and len(tokens) != rows:
        header.fail(f"{len(tokens):,} tokens do not fit the {rows:,} rows of token_embd.weight")
    return {
        "vocab_size": rows,
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }


def _with_scaling(header: Header, config: ModelConfig) -> ModelConfig:
    """The config with Llama 3.1's scaling, if the file holds what it divides each frequency by.

    Its four numbers are not there: they are guessed, as published, and what they give is compared.
    """
    if "rope_freqs.weight" not in header.tensors:
        return config
    factors = _decoded(header, "rope_freqs.weight")
    scaling: dict[str, Any] = {"rope_type": "llama3", "factor": float(factors.max())}
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192}
    if config.rope_scaling is not None:
        raise ValueError("rope_freqs.weight beside rope.scaling.type 'linear': not supported")
    if factors.shape != (config.head_dim // 2,):
        raise ValueError(f"rope_freqs.weight is {tuple(factors.shape)}, not (head_dim / 2,)")
    plain, _ = rope_frequencies(config.head_dim, base=config.rope_theta)
    slowed, _ = rope_frequencies(config.head_dim, base=config.rope_theta, scaling=scaling)
    if not torch.allclose(plain / factors, slowed, rtol=1e-5, atol=0):
        raise ValueError("rope_freqs.weight is not Llama 3.1's scaling: not supported")
    return replace(config, rope_scaling=scaling)


def _with_scale(config: ModelConfig) -> ModelConfig:
    """Of a Gemma 3 the number by whose root it divides scores, which no key of its files says.

    It is a head's size; in the largest model, of 62 layers, C / heads.
    Source: llama.cpp's src/llama-model.cpp, `f_attention_scale` of LLM_ARCH_GEMMA3.
    """
    if config.model_type != "gemma3_text":
        return config
    share = config.hidden_size / config.num_attention_heads
    scale = share if config.num_hidden_layers == 62 else config.head_dim
    return replace(config, query_pre_attn_scalar=scale)  # type: ignore[call-arg]


# Names of weights, theirs -> ours.
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def our_name(name: str, architecture: str = "llama") -> str:
    """What we call a weight: blk.3.ffn_up.bias is model.layers.3.mlp.up_proj.bias.

    Its family may name some otherwise. An unknown name stays as it is.
    """
    family = family_of(_ARCHITECTURES.get(str(architecture), "llama"))
    names = {**_NAMES, **family.gguf_names}
    match = re.fullmatch(r"(?:blk\.([0-9]{1,9})\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in names:
        return name
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{layer}{names[match[2]]}.{match[3]}"


def _names(header: Header) -> dict[str, str]:
    """The weights' names, theirs and ours. Raises: ValueError if two of them are one to us."""
    kind = header.keys.get("general.architecture", "llama")
    names = {name: our_name(name, kind) for name in header.tensors if name != "rope_freqs.weight"}
    try:
        check_apart(names.items())
    except ValueError as error:
        header.fail(str(error))
    if ours := [name for name in names if re.match(r"model\.|lm_head\.", name)]:
        header.fail(f"unexpected: {', '.join(ours[:5])}: llama.cpp has no such names")
    return names


def shapes(header: Header) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights under our names, before any is read.

    Raises: ValueError if two tensors are one weight to us, or if one has our name.
    """
    return {ours: header.tensors[name].shape for name, ours in _names(header).items()}


def read_weights(
    header: Header, config: ModelConfig, *, matrices: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """The weights under our names, as float32, one after another; without matrices, if so asked.

    llama.cpp turns neighbours in Llama's heads: the rows of q and k are put back to halves. Of
    Gemma 3's norms it stores what they multiply by, which is 1 + weight.
    """
    for name, ours in _names(header).items():
        if matrices or len(header.tensors[name].shape) == 1:
            tensor = _in_halves(name, _decoded(header, name), config)
            shifted = config.model_type == "gemma3_text" and name.endswith("norm.weight")
            yield ours, tensor - 1 if shifted else tensor


def _in_halves(name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    """The rows of a tensor of that name, in our order."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    part = name.split(".")[-2]
    turned = config.model_type == "llama" and part in heads
    return interleaved_to_half(tensor, heads[part]) if turned else tensor


def _decoded(header: Header, name: str) -> Tensor:
    """The numbers of one tensor."""
    library, stored = _library(), header.tensors[name]
    mapped = np.memmap(header.path, np.uint8, "r", stored.start, (stored.num_bytes,))
    rows = np.asarray(mapped).reshape(*stored.shape[:-1], -1)  # rows of bytes
    numbers = library.dequantize(rows, library.GGMLQuantizationType[stored.kind])
    return torch.from_numpy(np.array(numbers, np.float32))


def read_rows(
    header: Header, config: ModelConfig, kinds: Collection[str]
) -> Iterator[tuple[str, Tensor, str]]:
    """The matrices under our names, as the bytes of their rows and the kind of these.

    Of another kind than `kinds` they are written anew, some rows at a time, as Q8_0: 8 bits and a
    scale for 32 numbers. Shape: -> (N, bytes) uint8 each.
    """
    library = _library()
    for name, ours in _names(header).items():
        stored = header.tensors[name]
        if len(stored.shape) < 2:
            continue
        data = np.fromfile(header.path, np.uint8, stored.num_bytes, offset=stored.start)
        rows, kind = data.reshape(stored.shape[0], -1), stored.kind
        if kind not in kinds:
            theirs, kind = library.GGMLQuantizationType[kind], "Q8_0"
            some = (rows[i : i + 256] for i in range(0, len(rows), 256))
            pieces = (library.dequantize(piece, theirs) for piece in some)
            q8 = library.GGMLQuantizationType.Q8_0
            rows = np.concatenate([library.quantize(piece, q8) for piece in pieces])
        yield ours, _in_halves(name, torch.from_numpy(rows), config), kind


_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")

# How text is cut before merging, by the names that tokenizer.ggml.pre gives.
_PATTERNS: dict[str, str | tuple[str, ...]] = {
    "gpt-2": GPT2_PATTERN,
    "smollm": SMOLLM_PATTERNS,
    "qwen2": QWEN2_PATTERN,
    "deepseek-r1-qwen": QWEN2_PATTERN,
    **dict.fromkeys(_LLAMA3_NAMES, LLAMA3_PATTERN),
}

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6


def read_tokenizer(header: Header) -> ForeignTokenizer | WrappedTokenizer | None:
    """The tokenizer of a file's lists; None, and a warning, for kinds that we do not read.

    SentencePiece's comes through the library tokenizers, if it puts no space before a text.
    Raises: ValueError if a list is missing or contradicts another, or if text would be cut in a way
        that we do not know; ImportError if that library is needed and missing.
    """
    ours = {k.removeprefix("tokenizer.ggml."): v for k, v in header.keys.items()}
    kind, pieces = ours.get("model"), ours.get("model") == "llama"
    pieces = pieces and ours.get("add_space_prefix") is False
    if kind != "gpt2" and not pieces:
        if kind is not None:
            what = f"{header.path} has a tokenizer of the kind {kind!r:.40}: no tokenizer is read"
            warnings.warn(what, stacklevel=3)
        return None
    cut = ours.get("pre")
    if not pieces and (not isinstance(cut, str) or cut not in _PATTERNS):
        known = ", ".join(_PATTERNS)
        header.fail(f"tokenizer.ggml.pre is {cut!r:.40}: we know how {known} cut text")
    if ours.get("add_eos_token"):
        header.fail("tokenizer.ggml.add_eos_token is not supported")
    try:
        return _pieces(ours) if pieces else _tokenizer(ours, str(cut))
    except ValueError as error:
        header.fail(str(error))


@dataclass(frozen=True)
class _Lists:
    """Tokens with their ids, by kind; which of them are named; and what writes a conversation."""

    plain: dict[str, int]
    special: dict[str, int]
    added: dict[str, int]
    bytes: dict[str, int]
    named: dict[str, str]
    template: str | None


def _lists(ours: Mapping[str, Any], tokens: Sequence[str], *, spelled: bool) -> _Lists:
    """The tokens, sorted out; single bytes are among them if they are `spelled`, as in <0x0A>."""
    template = ours.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ValueError(f"tokenizer.chat_template must be a string, not {template!r:.40}")
    kinds = ours.get("token_type", [_NORMAL] * len(tokens))
    if not isinstance(kinds, list | Values) or len(kinds) != len(tokens):
        raise ValueError(f"tokenizer.ggml.token_type does not fit {len(tokens):,} tokens")
    named: dict[str, str] = {}
    for name in ("bos", "eos", "padding", *(["unknown"] if spelled else [])):
        i = ours.get(f"{name}_token_id")
        if i is not None and type(i) is not int:
            raise ValueError(f"tokenizer.ggml.{name}_token_id is {i!r:.40}, no token")
        if i is not None and 0 <= i < len(tokens):  # else passed over, as `read_config` tells
            named[name] = tokens[i]
    found = _Lists({}, {}, {}, {}, named, template)
    for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind == _USER_DEFINED and token in _END_NAMES:
            kind = _CONTROL  # as llama.cpp has it: no text may end by spelling such a token
        if kind in (_CONTROL, _UNKNOWN) or token in named.values():
            home = found.special
        elif kind in (_NORMAL, _USER_DEFINED):
            home = found.plain if kind == _NORMAL else found.added
        elif kind == _BYTE and spelled:
            home = found.bytes
        elif kind == _UNUSED:
            continue  # a row of the embedding that no token has
        else:
            raise ValueError(f"the token {token!r:.60} is of the kind {kind!r}: not supported")
        if home.setdefault(token, i) != i:
            raise ValueError(f"the token {token!r:.60} is there twice, as {home[token]} and as {i}")
    return found


def _tokenizer(ours: Mapping[str, Any], cut: str) -> ForeignTokenizer:
    tokens, merges = (_strings(ours, key) for key in ("tokens", "merges"))
    found = _lists(ours, tokens, spelled=False)
    named = found.named
    ranks = {unspell(token): i for token, i in found.plain.items()}
    check_merges(found.plain, _Pairs(merges), whole_words=cut in _LLAMA3_NAMES)
    return ForeignTokenizer(
        ranks,
        _PATTERNS[cut],
        found.special,
        added_tokens=found.added,
        bos_token=named.get("bos"),
        eos_token=named.get("eos"),
        pad_token=named.get("padding"),
        add_bos=bool(ours.get("add_bos_token", cut in _LLAMA3_NAMES)),
        normalizer="NFC" if cut == "qwen2" else None,
        chat_template=found.template,
        drop_unknown_bytes=True,
        named_tokens={f"{name.removesuffix('ding')}_token": t for name, t in named.items()},
    )


def _pieces(ours: Mapping[str, Any]) -> WrappedTokenizer:
    """SentencePiece's, of which a file has no merges: of two neighbours that make a token those
    are joined first whose token has the highest score.

    Source: llama.cpp's src/llama-vocab.cpp, `llm_tokenizer_spm_session`.
    """
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    except ImportError:
        raise ImportError("SentencePiece's needs a library: pip install tokenizers") from None
    tokens, scores = _strings(ours, "tokens", _MOST_PIECES), ours.get("scores")
    found = _lists(ours, tokens, spelled=True)
    if not isinstance(scores, Values) or scores.text is not None or len(scores) != len(tokens):
        raise ValueError(f"tokenizer.ggml.scores does not fit {len(tokens):,} tokens")
    vocab = {**found.plain, **found.special, **found.added, **found.bytes}
    if other := next((t for t, i in found.plain.items() if vocab[t] != i), None):
        raise ValueError(f"the token {other!r:.60} is there as two kinds")
    if (longest := max(map(len, found.plain), default=0)) > LONGEST_TOKEN:
        raise ValueError(f"a token of {longest:,} characters: at most {LONGEST_TOKEN:,} are read")
    own = {token: token for token in found.plain}  # each string once, however many merges have it
    merges = [
        (own[left], own[right])
        for token in sorted(found.plain, key=lambda token: -scores[found.plain[token]])
        for i in range(len(token) - 1, 0, -1)
        if (left := token[:i]) in own and (right := token[i:]) in own
    ]
    unknown = found.named.pop("unknown", None)
    model = models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown)
    library = Tokenizer(model)
    library.normalizer = normalizers.Replace(" ", "\u2581")
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence(steps)
    library.add_special_tokens([AddedToken(t, normalized=False) for t in found.special])
    library.add_tokens([AddedToken(t) for t in found.added])  # runs of spaces, as they are replaced
    names = {f"{name.removesuffix('ding')}_token": t for name, t in found.named.items()}
    all_names = names if unknown is None else {"unk_token": unknown, **names}
    template = found.template
    made = WrappedTokenizer(library, chat_template=template, named_tokens=all_names, **names)
    if ours.get("add_bos_token", True) and made.bos_token is not None:
        made.add_bos = True
    return made


# Published vocabularies of this kind have at most some 202,000 tokens. Each takes up to 850 bytes.
_MOST_TOKENS = 220_000

_MOST_PIECES = 270_000  # Gemma's have 262,144


def _strings(ours: Mapping[str, Any], key: str, most: int | None = None) -> Sequence[str]:
    found = ours.get(key)
    if not isinstance(found, list | Values) or not all(isinstance(text, str) for text in found):
        raise ValueError(f"tokenizer.ggml.{key} must be a list of strings, not {found!r:.40}")
    most = most or _MOST_TOKENS * (2 if key == "merges" else 1)
    if len(found) > most:
        raise ValueError(f"tokenizer.ggml.{key} has {len(found):,} strings, more than {most:,}")
    return found


class _Pairs(Sequence[Any]):
    """Merges as pairs, each made of its string when it is asked for."""

    def __init__(self, merges: Sequence[str]) -> None:
        self.merges = merges

    def __len__(self) -> int:
        return len(self.merges)

    def __getitem__(self, i: Any) -> Any:
        left, _, right = self.merges[i].partition(" ")
        if not left or not right:
            raise ValueError(f"the merge {self.merges[i]!r:.60} is not two tokens")
        return left, right
