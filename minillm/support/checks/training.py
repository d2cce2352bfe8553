"""Refusals of batches, targets and settings of a training."""

from __future__ import annotations

from numbers import Integral
from typing import TYPE_CHECKING, Any

from minillm.support.checks.kinds import (
    NOT_NEGATIVE,
    SHARE,
    Kind,
    check_kind,
    check_one_of,
    check_sizes,
    list_of,
    whole,
)
from minillm.support.checks.texts import check_texts, check_tokenizer
from minillm.support.checks.words import quoted

if TYPE_CHECKING:
    from torch import Tensor


def check_end(eos_token_id: Any) -> None:
    """Raises: ValueError for what is no id, as a tokenizer without an end token has."""
    if not isinstance(eos_token_id, Integral):
        road = "BPETokenizer.train(..., special_tokens=['<|endoftext|>']) makes one"
        wanted = f"eos_token_id must be the id of an end token, not {quoted(eos_token_id)}"
        raise ValueError(f"{wanted}: {road}, WindowBatches needs none")


def check_begin(bos_token_id: Any) -> None:
    """Raises: ValueError for what is no id; None stands for the end token."""
    if bos_token_id is not None and not isinstance(bos_token_id, Integral):
        raise ValueError(f"bos_token_id must be the id of a token, not {quoted(bos_token_id)}")


def check_token_row(tokens: Any) -> None:
    """Raises: ValueError for a text, texts, a path or a tokenizer where a row of ids belongs."""
    row = hasattr(tokens, "__getitem__") and not isinstance(tokens, str | bytes)
    if isinstance(tokens, list | tuple):
        row = all(isinstance(i, Integral) for i in tokens[:1])
    if not row:
        road = "torch.tensor(tokenizer.encode(text)) makes one of a text"
        raise ValueError(f"tokens must be a row of token ids, not {quoted(tokens)}: {road}")


def check_rows(rows: Any, batch_size: int, eos_token_id: Any) -> None:
    """Raises: ValueError if there is no row, none in a batch, or no end token."""
    check_sizes(batch_size=batch_size, rows=len(rows))
    check_end(eos_token_id)


def check_windows(tokens: Any, batch_size: int, context_length: int) -> None:
    """Raises: ValueError for what is no row of ids, and where no window of T + 1 tokens fits."""
    check_token_row(tokens)
    if batch_size < 1 or context_length < 1 or len(tokens) < context_length + 1:
        raise ValueError(
            f"{batch_size} windows of {context_length} + 1 tokens from {len(tokens)} tokens"
        )


def check_adamw(lr: float, betas: Any, eps: float, weight_decay: float) -> None:
    """Raises: ValueError for a rate, eps or decay below 0, and for betas not from 0 to below 1."""
    if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"lr {lr}, betas {betas}, eps {eps} or weight decay {weight_decay}")


def check_schedule(
    step: int, max_lr: float, min_lr: float, warmup_steps: int, total_steps: int
) -> None:
    """Raises: ValueError for a step below 0, a warm-up longer than the training, rates in turn."""
    if not 0 <= warmup_steps <= total_steps or not 0 <= min_lr <= max_lr or step < 0:
        raise ValueError(
            f"step {step}, warm-up {warmup_steps} of {total_steps}, rates {min_lr}..{max_lr}"
        )


def check_max_norm(max_norm: float) -> None:
    """Raises: ValueError if `max_norm` is not positive."""
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, not {max_norm}")


def check_found(record: Any, found: Any) -> None:
    """Raises: ValueError if what looking at a model found has the name of a record's own number."""
    if clash := ", ".join(sorted((record.keys() | {"loss"}) & found.keys())):
        raise ValueError(f"validate returned {clash}: the run records that itself, rename it")


def check_loop(model: Any, config: Any) -> None:
    """Raises: ValueError for parts of `train` that cannot be, or that need a `Trainer`."""
    check_training(model, config)
    for name, plain in (("precision", "float32"), ("compile", False)):
        if (given := getattr(config, name, plain)) != plain:
            road = "Trainer(model, batches, config).train() does that"
            raise ValueError(f"train knows no {name}={given!r}: {road}")


def check_training(model: Any, config: Any, optimizer: Any = None, run: Any = None) -> None:
    """Raises: ValueError for parts of a training that cannot be, such as steps for a config."""
    module: Kind = "an nn.Module, such as CausalLM(config)", lambda x: hasattr(x, "parameters")
    plan: Kind = "a TrainConfig, such as TrainConfig(100)", lambda x: hasattr(x, "learning_rate")
    road = "an optimizer or a function of the model, lambda model: torch.optim.SGD(...)"
    made: Kind = road, lambda x: not isinstance(x, str | type)
    folder: Kind = "a Run, such as Run(folder)", lambda x: x is None or hasattr(x, "at_work")
    check_kind("model", model, module)
    if hasattr(model, "packed_layers"):
        raise ValueError("a PackedLM only generates: train the model that it was made from")
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
    check_max_norm(config.max_norm)


def check_run_config(config: Any) -> None:
    """Raises: ValueError for a setting of a `RunConfig` that is unknown, or beside another."""
    check_one_of("precision", config.precision, ("float32", "bfloat16"))
    check_one_of("parallel", config.parallel, ("ddp", "fsdp", "tensor"))
    check_one_of("optimizer", config.optimizer, ("adamw", "muon"))
    if config.parallel == "tensor" and config.compile:
        raise ValueError("compile=True is not for parallel='tensor': choose one of the two")
    if config.optimizer == "muon" and not config.fused:
        raise ValueError("muon goes with torch's AdamW, not with fused=False")


def check_evaluation(tokenizer: Any, texts: Any, eos_token_id: int | None) -> None:
    """Raises: ValueError for arguments in another order, one text, no end token, or no byte."""
    check_tokenizer(tokenizer)
    check_texts(texts)
    if eos_token_id is None and tokenizer.eos_token_id is None:
        raise ValueError(
            "the tokenizer has no end token: say with eos_token_id which one begins a text"
        )
    if not any(texts):
        raise ValueError(f"{len(texts)} texts without a byte: nothing to measure")


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
