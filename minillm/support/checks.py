"""How a caller's mistake is refused: with the value, cut if it is long, and what would be right.

Written by hand.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from inspect import signature
from itertools import chain
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor, nn


def quoted(value: object, most: int = 60) -> str:
    """A value as an error shows it: its `repr`, without the middle of one that is long."""
    if isinstance(value, str | bytes) and len(value) > most:
        half = most // 2
        return f"{value[:half]!r}...{value[-half:]!r} ({len(value):,} long)"
    text = repr(value)
    return text if len(text) <= 2 * most else f"{text[: 2 * most]}..."


def check_number(name: str, value: Any, *, whole: bool = False) -> None:
    """Raises: ValueError for what is no number, such as "1", or no whole one."""
    if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
        kind = "a whole number" if whole else "a number"
        raise ValueError(f"{name} must be {kind}, not {quoted(value)}")


# What it is called in transformers, peft, trl and nanoGPT, and what it is here.
_OURS = {
    "r": "rank",
    "lora_alpha": "alpha",
    "target_modules": "targets",
    "lora_dropout": "dropout",
    "max_length": "max_new_tokens|context_length|window",  # the first that the function has
    "max_tokens": "max_new_tokens",
    "do_sample": "sampler=Sampler()",
    **{k: f"sampler=Sampler({k}=...)" for k in ("temperature", "top_k", "top_p", "min_p", "seed")},
    "repetition_penalty": "sampler=Sampler(repetition_penalty=...)",
    "num_beams": "beam_search(model, ids, num_beams=...)",
    "num_return_sequences": "num_return|input_ids=ids.repeat_interleave(n, 0) when sampling, "
    "beam_search(model, ids, num_return=...) with beams",
    "logits_processor": "sampler=Sampler(steps=[f]), f(logits, previous_ids),",
    "stop_strings": "stop",
    "use_cache": "cache",
    "streamer": "stream_text(model, tokenizer, prompt, ...)",
    "torch_dtype": "dtype",
    "device_map": "device",
    "n_layer": "num_hidden_layers",
    "n_layers": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    **dict.fromkeys(["n_embd", "d_model", "dim"], "hidden_size"),
    "n_inner": "intermediate_size",
    **dict.fromkeys(["block_size", "n_positions", "n_ctx"], "max_position_embeddings"),
    "layer_norm_epsilon": "rms_norm_eps",
    "dropout": "attention_dropout",
    "bias": "attention_bias and mlp_bias",
    **dict.fromkeys(["learning_rate", "lr"], "max_lr"),
    **dict.fromkeys(["max_iters", "max_steps", "num_train_epochs"], "steps"),
    "warmup_iters": "warmup_steps",
    **dict.fromkeys(["grad_clip", "max_grad_norm"], "max_norm"),
    **dict.fromkeys(["beta1", "beta2"], "betas"),
    **dict.fromkeys(["bf16", "dtype"], "precision"),
    "logging_steps": "log_interval",
    "eval_steps": "eval_interval",
    "save_steps": "Run(folder, checkpoint_interval=...)",
    "save_total_limit": "Run(folder, keep=...)",
    **dict.fromkeys(["output_dir", "out_dir"], "Run(folder)"),
    **dict.fromkeys(["batch_size", "per_device_train_batch_size"], "WindowBatches(tokens, ...)"),
    "args": "config=TrainConfig(...)",
    "train_dataset": "batches",
    "data_collator": "batches",
    **dict.fromkeys(["eval_dataset", "compute_metrics"], "validate"),
    "callbacks": "on_log",
    "optimizers": "optimizer",
    "tokenizer": "run=Run(folder, tokenizer=...)",
    "processing_class": "run=Run(folder, tokenizer=...)",
}


def said_here(strange: Collection[str], known: Collection[str]) -> str:
    """Names that are not known, what they are called here if that is known, and the known ones."""
    ours = []
    for name in sorted({*strange} & _OURS.keys()):
        words = _OURS[name].split("|")
        ours.append(f"{name} is {next((x for x in words if x in known), words[-1])} here")
    return "; ".join([", ".join(sorted(strange)), *ours, f"it has {', '.join(known)}"])


Part = TypeVar("Part", bound=Callable[..., Any])


def our_words(part: Part) -> Part:
    """A function, or a dataclass, that answers a keyword it has not with those that it has.

    Another library's word is told in ours. Raises: TypeError, as Python would.
    """
    made: Any = part
    function = made.__init__ if isinstance(part, type) else part
    known = [name for name in signature(function).parameters if name != "self"]
    name = function.__qualname__.removesuffix(".__init__")

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        if strange := named.keys() - {*known}:
            raise TypeError(f"{name} has no {said_here(strange, known)}")
        return function(*args, **named)

    if not isinstance(part, type):
        return call  # type: ignore[return-value]
    made.__init__ = call
    return part


Kind = tuple[str, Callable[[Any], bool]]  # in words, and whether a value is of that kind


def whole(least: int = 0, most: int = 2**31 - 1, why: str = "") -> Kind:
    """Whole numbers from `least` to `most`."""
    words = f"a whole number from {least} to {most}{why}"
    return words, lambda x: type(x) is int and least <= x <= most


def number(words: str, fits: Callable[[float], bool]) -> Kind:
    """Numbers that fit, neither NaN nor infinite; `words` follow "a number" in the error."""

    def check(x: Any) -> bool:
        is_number = isinstance(x, int | float) and not isinstance(x, bool)
        return is_number and abs(x) < 1e300 and fits(x)

    return f"a number {words}", check


def any_of(*kinds: Kind) -> Kind:
    """Values of one of these kinds."""
    words = " or ".join(words for words, _ in kinds)
    return words, lambda x: any(fits(x) for _, fits in kinds)


def list_of(kind: Kind) -> Kind:
    """Lists and tuples of values of a kind."""
    words, fits = kind
    return f"a list, each {words}", lambda x: isinstance(x, list | tuple) and all(map(fits, x))


SWITCH: Kind = "true or false", lambda x: type(x) is bool
NULL: Kind = "null", lambda x: x is None
TEXT: Kind = "a string", lambda x: isinstance(x, str)
TABLE: Kind = "a table", lambda x: isinstance(x, Mapping) and all(isinstance(k, str) for k in x)
POSITIVE = number("above 0", lambda x: x > 0)
NOT_NEGATIVE = number("of at least 0", lambda x: x >= 0)
SHARE = number("from 0 to below 1", lambda x: 0 <= x < 1)


def check_kind(name: str, value: Any, kind: Kind) -> None:
    """Raises: ValueError, with the name, for a value of another kind."""
    words, fits = kind
    if not fits(value):
        raise ValueError(f"{name} must be {words}, not {quoted(value)}")


def check_values(given: Any, kinds: Mapping[str, Kind]) -> None:
    """Raises: ValueError for a field of a dataclass that is of another kind; None fits where it is
    the default.
    """
    for f in fields(given):
        value = getattr(given, f.name)
        if f.name in kinds and (value is not None or f.default is not None):
            check_kind(f.name, value, kinds[f.name])


def check_one_of(name: str, value: Any, known: Sequence[str]) -> None:
    """Raises: ValueError for a name that is not known; the error lists those that are."""
    if value not in known:
        raise ValueError(f"{name} {quoted(value)} is unknown: choose one of {', '.join(known)}")


def check_settings(saved: dict[str, Any], ours: dict[str, Any]) -> None:
    """Raise a ValueError that names each setting in which two runs differ."""
    names = sorted(saved.keys() | ours.keys())
    wrong = [
        f"{n}: saved {saved.get(n)!r}, now {ours.get(n)!r}"
        for n in names
        if saved.get(n) != ours.get(n)
    ]
    if wrong:
        raise ValueError("the saved run had other settings: " + "; ".join(wrong))


def count_in(state: dict[str, Any], name: str) -> int:
    """A count from 0 in a saved state. Raises: ValueError if it is something else."""
    value = state.get(name)
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} must be a count from 0, not {value!r}")
    return value


def index_in(state: dict[str, Any], ours: dict[str, Any]) -> int:
    """How many things a source had given when `state` was saved; `ours` is what it says now.

    Raises: ValueError if anything but the index differs, or if that is no count from 0.
    """
    check_settings(state, {**ours, "index": state.get("index")})
    return count_in(state, "index")


def check_utf8(name: str, text: str) -> None:
    """Raises: ValueError, with the place, for half a character, which no file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        wrong = f"{text[error.start]!r} at place {error.start}, surrogates not allowed"
        raise ValueError(f"{name}, {quoted(text)}, holds half a character: {wrong}") from None


MAX_ID = (1 << 31) - 1


def is_id(value: Any) -> bool:
    """Whether `value` can be the id of a token; True, 0.5 and 10**15 cannot."""
    return type(value) is int and 0 <= value <= MAX_ID


def check_tokens(
    ranks: Mapping[bytes, int], special: Mapping[str, int], added: Mapping[str, int]
) -> None:
    """Raises: ValueError if ids are none or repeat, a token is empty or both special and not."""
    ids = [*chain(ranks.values(), special.values(), added.values())]
    for i in ids:
        if not is_id(i):
            raise ValueError(f"an id is a whole number from 0 to {MAX_ID:,}, not negative: {i!r}")
    for text in chain(special, added):
        check_utf8("a token", text)
    if twice := special.keys() & added.keys():
        raise ValueError(f"{quoted(min(twice))} is special and not special")
    if len({*ids}) < len(ids):
        shared = next(i for i, count in Counter(ids).items() if count > 1)
        raise ValueError(f"two tokens share the id {shared}")
    if b"" in ranks or "" in special or "" in added:
        raise ValueError("a token is empty")


def check_texts(texts: Any, name: str = "texts") -> None:
    """Raises: ValueError for one text where many belong, for its letters would be taken for them.

    Also for bytes, and for the path of a file that was not read.
    """
    if isinstance(texts, str):
        one_or_many = "write [text] for one, text.split(...) if it holds many"
        raise ValueError(f"{name} must be several texts, not one, {quoted(texts)}: {one_or_many}")
    _check_read(texts, name)


def check_text(text: Any, several: str = "join several") -> None:
    """Raises: ValueError for several texts where one belongs, for bytes, and for a path."""
    if not isinstance(text, str):
        _check_read(text, "text")
        raise ValueError(f"text must be one text, a str, not {quoted(text)}: {several}")


def check_one_row(ids: Any) -> None:
    """Raises: ValueError for rows of ids, or a single id, where one row belongs."""
    rows = isinstance(ids, list | tuple) and bool(ids) and isinstance(ids[0], list | tuple)
    if rows or isinstance(ids, str | Mapping | Integral):
        each = "for several rows [decode(row) for row in ids]"
        each = f"for one id [{ids}]" if isinstance(ids, Integral) else each
        raise ValueError(f"decode takes the ids of one text, not {quoted(ids)}: {each}")


def check_end(eos_token_id: Any) -> None:
    """Raises: ValueError for what is no id, as a tokenizer without an end token has."""
    if not isinstance(eos_token_id, Integral):
        road = "BPETokenizer.train(..., special_tokens=['<|endoftext|>']) makes one"
        wanted = f"eos_token_id must be the id of an end token, not {quoted(eos_token_id)}"
        raise ValueError(f"{wanted}: {road}, WindowBatches needs none")


def check_token_row(tokens: Any) -> None:
    """Raises: ValueError for a text, texts, a path or a tokenizer where a row of ids belongs."""
    row = hasattr(tokens, "__getitem__") and not isinstance(tokens, str | bytes)
    if isinstance(tokens, list | tuple):
        row = all(isinstance(i, Integral) for i in tokens[:1])
    if not row:
        road = "torch.tensor(tokenizer.encode(text)) makes one of a text"
        raise ValueError(f"tokens must be a row of token ids, not {quoted(tokens)}: {road}")


def check_training(model: Any, config: Any, optimizer: Any, run: Any) -> None:
    """Raises: ValueError for parts of a `Trainer` that cannot be, such as steps for a config."""
    module: Kind = "an nn.Module, such as CausalLM(config)", lambda x: hasattr(x, "parameters")
    plan: Kind = "a TrainConfig, such as TrainConfig(100)", lambda x: hasattr(x, "learning_rate")
    road = "an optimizer or a function of the model, lambda model: torch.optim.SGD(...)"
    made: Kind = road, lambda x: not isinstance(x, str | type)
    folder: Kind = "a Run, such as Run(folder)", lambda x: x is None or hasattr(x, "at_work")
    check_kind("model", model, module)
    check_kind("config", config, plan)
    check_kind("optimizer", optimizer, made)
    check_kind("run", run, folder)


def check_train_config(config: Any) -> None:
    """Raises: ValueError for a setting of a `TrainConfig` out of range, or beside another."""
    for name in ("steps", "gradient_accumulation_steps", "log_interval"):
        check_kind(name, getattr(config, name), whole(1))
    for name in ("warmup_steps", "eval_interval"):
        check_kind(name, getattr(config, name), whole())
    for name in ("max_lr", "weight_decay", "eps"):
        check_kind(name, getattr(config, name), NOT_NEGATIVE)
    check_kind("betas", config.betas, list_of(SHARE))
    if config.min_lr is not None and not 0 <= config.min_lr <= config.max_lr:
        raise ValueError(f"min_lr {config.min_lr} must be from 0 to max_lr, {config.max_lr}")
    if not config.max_norm > 0:
        raise ValueError(f"max_norm must be positive, not {config.max_norm}")
    check_one_of("precision", config.precision, ("float32", "bfloat16"))
    check_one_of("parallel", config.parallel, ("ddp", "fsdp", "tensor"))
    check_one_of("optimizer", config.optimizer, ("adamw", "muon"))
    if config.parallel == "tensor" and config.compile:
        raise ValueError("compile=True is not for parallel='tensor': choose one of the two")
    if config.optimizer == "muon" and not config.fused:
        raise ValueError("muon goes with torch's AdamW, not with fused=False")


def check_tokenizer(tokenizer: Any) -> None:
    """Raises: ValueError for what encodes nothing, such as texts where the tokenizer belongs, and
    for a tokenizer of another library."""
    if hasattr(tokenizer, "encode_ordinary") and hasattr(tokenizer, "special_tokens"):
        return
    kind = f"{type(tokenizer).__module__.partition('.')[0]}.{type(tokenizer).__name__}"
    if hasattr(tokenizer, "save_pretrained"):  # of transformers
        road = "save it, tokenizer.save_pretrained(folder), and BPETokenizer.load(folder) opens it"
        raise ValueError(f"a {kind} is no tokenizer of minillm: {road}")
    if hasattr(tokenizer, "encode") and not isinstance(tokenizer, str):  # of tiktoken, tokenizers
        road = "BPETokenizer.load(folder) opens a tokenizer.json, from_tiktoken_file ranks"
        raise ValueError(f"a {kind} is no tokenizer of minillm: {road}")
    order = "the order is model, tokenizer, texts"
    raise ValueError(f"{quoted(tokenizer)} is no tokenizer: {order}")


def check_config(config: Any) -> None:
    """Raises: ValueError for a config of another library, a table of keys, or a file's name."""
    if not hasattr(config, "family"):
        road = (
            "a ModelConfig, such as ModelConfig(**keys) or ModelConfig.from_dict(their.to_dict())"
        )
        kind = f"{type(config).__module__.partition('.')[0]}.{type(config).__name__}"
        raise ValueError(f"a config of minillm is wanted, not a {kind}: {road}")


def check_model(model: Any) -> None:
    """Raises: ValueError for a model of another library, or for what is none, such as its name."""
    if not hasattr(getattr(model, "config", None), "eos_token_ids"):
        found = f"a {type(model).__module__.partition('.')[0]}.{type(model).__name__}"
        found = quoted(model) if isinstance(model, str | os.PathLike) else found
        road = "from_pretrained(folder or name) opens a checkpoint and returns (model, tokenizer)"
        raise ValueError(f"{found} is no model of minillm: {road}")


def check_documents(documents: Any) -> None:
    """Raises: ValueError for what is no endless stream of documents, such as texts."""
    if not (hasattr(documents, "__next__") and hasattr(documents, "state_dict")):
        road = "texts become documents by TextDocuments(texts, tokenizer.encode_ordinary)"
        raise ValueError(f"{quoted(documents)} is no stream of documents; {road}")


def texts_of(texts: str | Iterable[str]) -> Iterable[str]:
    """Texts, or one as the only one of a list.

    Raises: ValueError for bytes, a path, and a string that is the name of a file.
    """
    if not isinstance(texts, str):
        _check_read(texts, "texts")
        return texts
    if "\n" not in texts and len(texts) < 1024 and os.path.isfile(texts):
        read = f"Path({texts!r}).read_text(encoding='utf-8')"
        raise ValueError(f"{quoted(texts)} is the name of a file: hand in what it holds, {read}")
    return [texts]


def _check_read(texts: Any, name: str) -> None:
    if isinstance(texts, os.PathLike):
        read = f"[Path({os.fspath(texts)!r}).read_text(encoding='utf-8')]"
        raise ValueError(f"{name} must be texts, not a path: {read}")
    if isinstance(texts, bytes | bytearray):
        raise ValueError(f"{name} must be texts, not bytes, {quoted(bytes(texts))}: decode them")


def check_mask(mask: Tensor | None, name: str = "attention_mask") -> None:
    """Raises: ValueError for a mask that holds neither bools nor integers.

    Only the type is looked at: for a number of a tensor on a GPU one would have to wait.
    """
    if mask is not None and (mask.is_floating_point() or mask.is_complex()):
        wanted = "bool or an integer type: 1 is a token, 0 is padding"
        raise ValueError(f"{name} is {mask.dtype}; it must be {wanted}")


def check_inputs(
    input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, past: int
) -> None:
    """Raises: ValueError for ids, mask and positions of shapes that do not fit each other."""
    import torch
    from torch import Tensor

    more = [x for x in (attention_mask, position_ids) if x is not None]
    for x in (input_ids, *more):
        if not isinstance(x, Tensor):
            raise ValueError(f"ids, mask and positions must be tensors, not {x!r:.60}")
    shape = tuple(input_ids.shape)
    whole = input_ids.dtype in (torch.int64, torch.int32)
    if input_ids.dim() != 2 or not input_ids.numel() or not whole:
        raise ValueError(f"input_ids must be int64 or int32 (B, T), not {input_ids.dtype} {shape}")
    if attention_mask is not None and attention_mask.shape != (shape[0], past + shape[1]):
        wanted = f"(B, past + T) = {(shape[0], past + shape[1])}"
        raise ValueError(f"attention_mask {tuple(attention_mask.shape)} should be {wanted}")
    check_mask(attention_mask)
    if position_ids is not None and position_ids.shape not in (shape, (1, shape[1])):
        raise ValueError(f"position_ids {tuple(position_ids.shape)} do not fit input_ids {shape}")


def look_up(table: nn.Embedding, ids: Tensor, what: str) -> Tensor:
    """The rows of a table. Raises: ValueError, on the CPU, for an id that has none."""
    try:
        return table(ids)
    except IndexError:
        first, last, size = int(ids.min()), int(ids.max()), len(table.weight)
        wrong = f"{what} {first if first < 0 else last}"
        raise ValueError(f"{wrong}, but this model has learned only {size} {what}s") from None


def check_prompt(
    input_ids: Tensor, attention_mask: Tensor | None, max_new_tokens: int, vocab_size: int
) -> None:
    """Raises: ValueError for unknown ids, or a prompt that has no right end to continue at."""
    from torch import Tensor

    for x in (input_ids, attention_mask):
        if x is not None and not isinstance(x, Tensor):
            road = "torch.tensor([tokenizer.encode(text)])"
            if isinstance(x, Mapping):  # what a tokenizer of transformers returns
                road = "hand in its entries, **encoding"
            raise ValueError(f"a prompt and its mask must be tensors, not {quoted(x)}: {road}")
    if input_ids.dim() != 2 or not input_ids.numel():
        shape = tuple(input_ids.shape)
        raise ValueError(f"a prompt is (B, T) ids, at least one a row, not {shape}")
    if not isinstance(max_new_tokens, int) or max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be an integer, 0 or more, not {max_new_tokens!r}")
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        shapes = f"{tuple(attention_mask.shape)} and {tuple(input_ids.shape)}"
        raise ValueError(f"attention_mask and input_ids differ in shape: {shapes}")
    check_mask(attention_mask)
    if input_ids.is_meta:
        return  # shapes without numbers
    first, last = int(input_ids.min()), int(input_ids.max())
    if first < 0 or last >= vocab_size:
        wrong = first if first < 0 else last
        raise ValueError(f"the prompt has id {wrong}, the vocabulary ids 0 to {vocab_size - 1}")
    if attention_mask is None:
        return
    mask = attention_mask.bool()
    if not mask[:, -1].all() or (mask[:, :-1] & ~mask[:, 1:]).any():
        raise ValueError("padding must stand on the left: generation continues at the right end")


def check_drawn(drawn: Any, rows: int) -> Tensor:
    """What a sampler returned; not its values, for which a GPU would be waited for.

    Raises: ValueError unless it is ids, of that many rows.
    """
    import torch

    if isinstance(drawn, torch.Tensor):
        if drawn.shape == (rows,) and drawn.dtype in (torch.int64, torch.int32):
            return drawn
        found = f"{drawn.dtype} {tuple(drawn.shape)}"
    else:
        found = f"{drawn!r:.60}"
    raise ValueError(f"a sampler must return ids, int64 or int32 ({rows},), not {found}")


def context_length(config: Any) -> int:
    """How many positions the config is for: those of the training, or those of its scaling."""
    trained, scaling = config.max_position_embeddings, getattr(config, "rope_scaling", None) or {}
    original = scaling.get("original_max_position_embeddings") or trained
    return max(trained, int(original * (scaling.get("factor") or 1)))


def check_room(config: Any, cache: str, length: int, max_new_tokens: int) -> None:
    """Raises: ValueError if a cache of that kind would reserve more room than there are positions.

    `length` is that of the prompt.
    """
    room, known = length + max_new_tokens, context_length(config)
    reserved = {"static": room, "sliding": getattr(config, "sliding_window", None)}
    if min(room, reserved.get(cache) or 0) > known:
        raise ValueError(
            f"a prompt of {length} and max_new_tokens={max_new_tokens}, but this model has {known} "
            f"positions: cache={cache!r} reserves no more, cache='dynamic' grows"
        )


def check_targets(logits: Any, targets: Tensor, ignore_index: int) -> None:
    """Raises: ValueError unless the targets fit the logits, in shape and, on the CPU, in their ids;
    TypeError for logits that are no tensor.
    """
    if not hasattr(logits, "reshape"):
        kind = type(logits).__name__
        raise TypeError(f"the model must return its logits (B, T, V), a tensor, not a {kind}")
    shape, V = tuple(logits.shape), logits.shape[-1]
    probs = targets.is_floating_point() and targets.shape == logits.shape
    if not probs and (targets.is_floating_point() or shape[:-1] != tuple(targets.shape)):
        raise ValueError(f"logits {shape} do not fit targets {tuple(targets.shape)}")
    if probs or targets.device.type != "cpu":  # elsewhere one would have to wait for the answer
        return
    counted = targets[targets != ignore_index]
    if counted.numel():
        low, high = (int(x) for x in counted.aminmax())
        if low < 0 or high >= V:
            raise ValueError(f"targets {low}..{high} outside the vocabulary of {V}")


def check_shifted(model: Any, inputs: Tensor, targets: Tensor) -> None:
    """Raises: ValueError for a `CausalLM` whose targets are its inputs, and not what follows them.

    They may be, in rows of one token again and again, or by chance, where fewer than 8 count.
    """
    plain = hasattr(getattr(model, "config", None), "family") and targets.ndim == 2
    if not plain or inputs.shape != targets.shape:
        return
    targets = targets.to(inputs.device)
    counted = targets != -100
    if counted.sum() < 8 or (inputs != targets)[counted].any():
        return
    if not (inputs[:, 1:] == targets[:, :-1])[counted[:, :-1]].all():
        road = "of ids (B, T) inputs are ids[:, :-1], targets ids[:, 1:]"
        raise ValueError(f"targets equal inputs, and nothing is shifted here: {road}")


def check_cached(cache: Any, length: int) -> None:
    """Raises: ValueError unless each layer has put `length` positions into its cache."""
    for i, layer in enumerate(cache.layers):
        if layer.holds_keys and layer.length < length:
            road = "see help(minillm.MultiHeadAttention), or generate with cache=None"
            raise ValueError(f"layer {i} did not call cache.update(keys, values): {road}")


def check_sizes(**sizes: int | None) -> None:
    """Raises: ValueError that names the first size below 1; None is no size."""
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name} must be at least 1, not {size}")


def check_input(x: Tensor, hidden_size: int) -> None:
    """Raises: ValueError unless x is (B, T, hidden_size)."""
    if x.ndim != 3 or x.shape[-1] != hidden_size:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected (B, T, {hidden_size})")


def check_kept(name: str, x: Tensor, shape: tuple[Any, ...], layer: Any) -> None:
    """Raises: ValueError unless keys or values have that shape and the cache's dtype, device."""
    if x.shape != shape:
        raise ValueError(f"{name} {tuple(x.shape)} do not fit a cache of {shape}")
    if x.dtype != layer.dtype or x.device != layer.device:
        found, wanted = f"{x.dtype} on {x.device}", f"{layer.dtype} on {layer.device}"
        raise ValueError(f"{name} are {found}, the cache {wanted}")


def check_rows_kept(rows: Tensor, batch_size: int) -> None:
    """Raises: ValueError unless each is a row of a batch; rows on a GPU are not looked at."""
    wrong = rows.ndim != 1 or not len(rows)
    if not wrong and rows.device.type == "cpu":
        wrong = bool(rows.min() < 0 or rows.max() >= batch_size)
    if wrong:
        raise ValueError(f"rows {rows.tolist()} of a cache with {batch_size} rows")


def check_causal(num_queries: int, num_keys: int) -> None:
    """Raises: ValueError if there are fewer keys than queries: the first would read nothing."""
    if num_queries > num_keys:
        raise ValueError(
            f"causal: fewer keys than queries ({num_queries} queries, {num_keys} keys)"
        )


def check_positions(
    query_positions: Tensor, key_positions: Tensor, key_valid: Tensor | None, window: int | None
) -> None:
    """Raises: ValueError unless they are (T,) or (B, T), (S,) or (B, S), (B, S), and positive."""
    if window is not None and window < 1:
        raise ValueError(f"window must be positive, got {window}")
    given = [query_positions, key_positions] + ([] if key_valid is None else [key_valid])
    batches = {x.shape[0] for x in given if x.ndim == 2}
    fits = key_valid is None or key_valid.shape[1:] == key_positions.shape[-1:]
    if not fits or len(batches - {1}) > 1 or any(x.ndim not in (1, 2) for x in given):
        shapes = ", ".join(str(tuple(x.shape)) for x in given)
        raise ValueError(f"positions of queries, of keys, key_valid do not fit: {shapes}")


def check_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    is_causal: bool,
    dropout_p: float = 0.0,
) -> tuple[Tensor | None, Tensor | None]:
    """Mask and bias with the four dimensions of the scores, the bias in at least float32.

    Raises: ValueError with the offending values if shapes or types do not fit.
    """
    if not (q.ndim == k.ndim == v.ndim == 4):
        raise ValueError(f"q, k, v must be (batch, heads, positions, size), got {_shapes(q, k, v)}")
    (B, H, T, D), (_, G, S, _) = q.shape, k.shape
    if k.shape != (B, G, S, D) or v.shape[:3] != (B, G, S) or G == 0 or H % G:
        raise ValueError(f"batch, heads, positions or sizes do not fit: {_shapes(q, k, v)}")
    if not (q.dtype == k.dtype == v.dtype and q.is_floating_point()):
        raise ValueError(f"q, k, v must have one float dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if is_causal:
        check_causal(T, S)
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")
    if mask is None and bias is None:
        return None, None
    import torch  # who checks a text needs none

    if mask is not None:
        if mask.dtype != torch.bool:
            raise ValueError(f"mask must be bool, True where a query may read, got {mask.dtype}")
        mask = _four_dimensions("mask", mask, (B, H, T, S))
    if bias is not None:
        if not bias.is_floating_point():
            raise ValueError(f"bias must be floating point, got {bias.dtype}")
        bias = _four_dimensions("bias", bias, (B, H, T, S))
        bias = bias.to(torch.promote_types(q.dtype, torch.float32))
    return mask, bias


def check_logits(x: Any, *, like: Tensor | None = None, made_by: object = None) -> None:
    """Raises: ValueError unless x is (B, V), not empty, or of that shape, if it was made of it."""
    shape = tuple(x.shape) if hasattr(x, "shape") else quoted(x)
    if like is not None and shape != tuple(like.shape):
        made_by = getattr(made_by, "__name__", made_by)
        raise ValueError(f"{made_by} must return logits {tuple(like.shape)}, not {shape}")
    if x.ndim != 2 or not x.numel():
        raise ValueError(f"logits must be (B, V), not empty, got {shape}")


def check_previous_ids(ids: Tensor, logits: Tensor) -> None:
    """Raises: ValueError unless ids are (B, T) for logits (B, V), and, on a CPU, all below V."""
    if ids.ndim != 2 or ids.shape[0] != logits.shape[0]:
        have, want = tuple(ids.shape), tuple(logits.shape)
        raise ValueError(f"previous_ids {have} must be (B, T) for logits {want}")
    V, on_cpu = logits.shape[-1], ids.device.type == "cpu"  # asking a GPU means waiting
    if on_cpu and ids.numel() and (largest := int(ids.amax())) >= V:
        raise ValueError(f"previous_ids hold {largest}, the vocabulary {V} tokens")


def check_rows(rows: Sequence[int], count: int) -> None:
    """Raises: ValueError unless rows are so many different numbers, 0 and up."""
    if not len(rows) == len(set(rows)) == count or min(rows) < 0:
        raise ValueError(f"rows {list(rows)} are not {count} different numbers, 0 and up")


def finite_maximum(logits: Tensor) -> Tensor:
    """The maximum of each row (B, 1). Raises: ValueError if one is NaN or infinite."""
    top = logits.amax(-1, keepdim=True)  # one NaN in a row makes it NaN
    # The one question that a `Sampler` asks a GPU at each step: it waits for the answer.
    if bool((top - top).any()):  # 0 for every finite number, NaN for all else
        raise ValueError("logits hold NaN or +inf, or a row has nothing but -inf")
    return top


def _four_dimensions(name: str, x: Tensor, target: tuple[int, ...]) -> Tensor:
    sizes = zip(reversed(x.shape), reversed(target), strict=False)
    if x.ndim > 4 or not all(size in (1, wanted) for size, wanted in sizes):
        raise ValueError(f"{name} {tuple(x.shape)} does not broadcast to {target}")
    return x if x.ndim == 4 else x[(None,) * (4 - x.ndim)]


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"


_MOST_ALPHA = 1_000_000  # adapters in use have an alpha of 1 to some thousands


def check_adapter(name: str, layer: nn.Module, rank: Any, alpha: Any, dropout: Any) -> None:
    """Raises: ValueError if the layer can have no such adapter."""
    from torch import nn

    if hasattr(layer, "lora_A"):
        raise ValueError(f"{name} has an adapter already")
    if not isinstance(layer, nn.Linear):
        raise ValueError(f"{name} is a {type(layer).__name__}, not a linear layer")
    shape = (layer.out_features, layer.in_features)
    check_kind(f"the rank for {name}, a matrix {shape},", rank, whole(1, min(shape)))
    alphas = number(f"from -{_MOST_ALPHA:,} to {_MOST_ALPHA:,}", lambda x: abs(x) <= _MOST_ALPHA)
    check_kind("alpha", alpha, alphas)
    check_kind("dropout", dropout, SHARE)
