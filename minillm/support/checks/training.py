"""Refusals of batches, targets and settings of a training."""

from __future__ import annotations

from numbers import Integral
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
from minillm.support.checks.kinds import (
    NOT_NEGATIVE,
    SHARE,
    Kind,
    check_kind,
    check_one_of,
    list_of,
    whole,
)
from minillm.support.checks.words import quoted


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


def check_documents(documents: Any) -> None:
    """Raises: ValueError for what is no endless stream of documents, such as texts."""
    if not (hasattr(documents, "__next__") and hasattr(documents, "state_dict")):
        road = "texts become documents by TextDocuments(texts, tokenizer.encode_ordinary)"
        raise ValueError(f"{quoted(documents)} is no stream of documents; {road}")


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
