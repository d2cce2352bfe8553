"""How refusals say things: values in few characters, our own words."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import wraps
from inspect import signature
from typing import Any, TypeVar


def quoted(value: object, most: int = 60) -> str:
    """A value as an error shows it: its `repr`, without the middle of one that is long."""
    if isinstance(value, str | bytes) and len(value) > most:
        half = most // 2
        return f"{value[:half]!r}...{value[-half:]!r} ({len(value):,} long)"
    text = repr(value)
    return text if len(text) <= 2 * most else f"{text[: 2 * most]}..."


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
    **dict.fromkeys(["bf16", "dtype", "precision"], "precision|RunConfig(precision=...)"),
    **{k: f"RunConfig({k}=...)" for k in ("fused", "optimizer", "parallel")},
    "compile": "generate(..., compile=True) or RunConfig(compile=True)",
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
    **{k: f"ForeignTokenizer({k}=...)" for k in ("added_tokens", "normalizer", "chat_template")},
    **{k: f"ForeignTokenizer({k}=...)" for k in ("drop_unknown_bytes", "named_tokens")},
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
