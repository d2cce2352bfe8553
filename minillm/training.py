"""Training: rows, AdamW, the loss of a batch, batches, held-out bits, the loop (notebook 07).

For any model from ids to logits. A training that must survive a kill, or has several processes, is
`minillm.deeper.training.trainer`'s.
"""

# Built from notebooks/07_training.ipynb: edit there, then make build.

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.bpe import well_formed
from minillm.support.checks import training as checks
from minillm.support.checks.words import our_words
from minillm.support.counting import count_targets, named_numbers
from minillm.support.modes import EvalMode, looking
from minillm.support.sources import IndexedSource, batch_source

__all__ = [
    "AdamW",
    "RowBatches",
    "TrainConfig",
    "WindowBatches",
    "add_gradient",
    "begin_id",
    "clip_grad_norm",
    "cosine_schedule",
    "cross_entropy",
    "decay_groups",
    "document_row",
    "epoch_order",
    "evaluate",
    "get_batch",
    "gradients",
    "is_matrix",
    "pad_rows",
    "train",
]


def document_row(
    ids: Iterable[int], eos_token_id: int, bos_token_id: int | None = None
) -> list[int]:
    """A document from begin to end token; a begin token of its own is not written twice.

    `bos_token_id` is what `begin_id` says (None: the end token, at both ends).
    """
    begin = eos_token_id if bos_token_id is None else bos_token_id
    row = [*map(int, ids), eos_token_id]  # numpy's integers are no JSON
    return row if len(row) > 1 and row[0] == begin else [begin, *row]


def pad_rows(rows: list[list[int]], width: int, fill: int) -> tuple[Tensor, Tensor]:
    """Rows of different length as inputs and targets, shifted by one; targets of padding are -100.

    Shape: rows of at most W ids -> inputs (B, W - 1), targets (B, W - 1).
    """
    filled = np.full((len(rows), width), fill, dtype=np.int64)
    targets = np.full((len(rows), width - 1), -100, dtype=np.int64)
    for i, row in enumerate(rows):
        filled[i, : len(row)] = row
        targets[i, : len(row) - 1] = row[1:]
    return torch.from_numpy(filled[:, :-1].copy()), torch.from_numpy(targets)


class AdamW:
    """Adam with decoupled weight decay, for parameters or groups of them, as `torch.optim.AdamW`.

        optimizer = AdamW(decay_groups(model, 0.1), lr=1e-3, betas=(0.9, 0.95))
        loss.backward(), optimizer.step(), optimizer.zero_grad()

    Source: Loshchilov and Hutter 2019, algorithm 2; the decay times the rate, as torch does.
    Raises: ValueError for numbers out of range.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        checks.check_adamw(lr, betas, eps, weight_decay)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        groups: list[Any] = list(params)
        if groups and not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        self.param_groups = [{**defaults, **g, "params": list(g["params"])} for g in groups]
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Move every parameter that has a gradient."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in [p for p in group["params"] if p.grad is not None]:
                if p not in self.state:
                    zeros = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                    self.state[p] = {"step": torch.zeros(()), **zeros}
                state, grad = self.state[p], p.grad
                state["step"] += 1
                t = float(state["step"])
                m = state["exp_avg"].lerp_(grad, 1 - beta1)
                v = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                scale = (v / (1 - beta2**t)).sqrt_().add_(group["eps"])
                p.addcdiv_(m, scale, value=-group["lr"] / (1 - beta1**t))


def is_matrix(name: str, p: Tensor) -> bool:
    """Whether a parameter is a matrix of weights: no vector, and no logarithms (`..._log`)."""
    return p.dim() >= 2 and not name.endswith("_log")


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices decay; vectors (norms and biases) and logarithms do not."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [p for name, p in named if is_matrix(name, p)]
    others = [p for name, p in named if not is_matrix(name, p)]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def cosine_schedule(
    step: int, max_lr: float, min_lr: float, warmup_steps: int, total_steps: int
) -> float:
    """The rate of step 0, 1, ...: linear up to `max_lr`, half a cosine down to `min_lr`.

    Step `warmup_steps` - 1 is the first with `max_lr`, step `total_steps` the first with `min_lr`.
    Raises: ValueError for a step below 0, a warm-up longer than the training, rates out of order.
    """
    checks.check_schedule(step, max_lr, min_lr, warmup_steps, total_steps)
    if step < warmup_steps:
        return max_lr * (step + 1) / warmup_steps
    if step >= total_steps:
        return min_lr
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    return min_lr + (max_lr - min_lr) * (1 + math.cos(math.pi * progress)) / 2


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients so that their joint norm is at most `max_norm`; returns the norm before.

    Raises: ValueError if `max_norm` is not positive.
    """
    checks.check_max_norm(max_norm)
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros(())
    norm = torch.stack([torch.linalg.vector_norm(g) for g in grads]).norm()
    if hasattr(norm, "full_tensor"):  # sharded gradients: sum over the shards
        norm = norm.full_tensor()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(scale)
    return norm


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """Negative log-likelihood of the targets in nats; the mean is over those that count.

    If none counts, there is nothing to learn: 0. Computed in float32 (float64 if the logits are).
    Nothing is shifted here: of ids (B, T), `cross_entropy(model(ids)[:, :-1], ids[:, 1:])`.

    Shape: logits (..., V), targets (...) -> scalar.
    Raises: ValueError for shapes and targets that do not fit; TypeError for logits of another kind.
    """
    checks.check_targets(logits, targets, ignore_index)
    if targets.is_floating_point() or logits.dtype in (torch.float16, torch.bfloat16):
        from minillm.deeper.training.other_losses import other_loss

        return other_loss(logits, targets, ignore_index, reduction)
    logits, targets = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1).long()
    total = F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")
    return total if reduction == "sum" else total / (targets != ignore_index).sum().clamp(min=1)


@lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """The order in which an epoch takes `count` things: of the seed and the epoch alone."""
    return np.random.default_rng([seed, epoch]).permutation(count)


class RowBatches(IndexedSource):
    """Rows of tokens, some at a time, padded to the longest of them; each row once an epoch.

        rows = [[*tokenizer.encode(text), end] for text in texts]
        inputs, targets = next(RowBatches(rows, 16, end))

    The last batch of an epoch may be smaller.

    Shape: -> inputs (B, T), targets (B, T), int64; targets of padding are -100.
    Raises: ValueError if there is no row, or no end token.
    """

    shown = "{rows:,} rows, {batch_size} a batch"

    def __init__(
        self, rows: Sequence[list[int]], batch_size: int, eos_token_id: int, *, seed: int = 0
    ) -> None:
        checks.check_rows(rows, batch_size, eos_token_id)
        self.rows, self.batch_size, self.eos_token_id = rows, batch_size, eos_token_id
        self.settings = {"batch_size": batch_size, "seed": seed, "rows": len(rows)}

    def item(self, index: int) -> tuple[Tensor, Tensor]:
        """Batch number `index`."""
        epoch, place = divmod(index, -(-len(self.rows) // self.batch_size))
        order = epoch_order(self.settings["seed"], epoch, len(self.rows))
        rows = [self.rows[i] for i in order[place * self.batch_size :][: self.batch_size]]
        return pad_rows(rows, max(map(len, rows)), self.eos_token_id)


def get_batch(
    tokens: Tensor | np.ndarray,
    batch_size: int,
    context_length: int,
    *,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Random windows and, shifted by one, what follows each of their tokens.

    The shift by one happens here (and in `pad_rows`, for documents) and nowhere else.

    Shape: tokens (N,) -> inputs (B, T), targets (B, T), int64; inputs[:, 1:] == targets[:, :-1].
    Raises: ValueError if no window of T + 1 tokens fits, or for a text instead of its ids.
    """
    checks.check_windows(tokens, batch_size, context_length)
    starts = torch.randint(len(tokens) - context_length, (batch_size,), generator=generator)
    windows = [tokens[s : s + context_length + 1] for s in starts.tolist()]
    stacked = np.stack([w.cpu() if isinstance(w, Tensor) else w for w in windows])
    rows = torch.from_numpy(stacked.astype(np.int64)).to(device)
    return rows[:, :-1], rows[:, 1:]


class WindowBatches(IndexedSource):
    """Random windows of a row of tokens; batch i depends on the seed and on i alone.

        batches = WindowBatches(torch.tensor(tokenizer.encode(text)), 16, 256)
        inputs, targets = next(batches)

    Shape: tokens (N,), a tensor, an array or a `TokenDataset` -> inputs (B, T), targets (B, T).
    Raises: ValueError for a text instead of its ids; as batches are drawn, if no window fits.
    """

    shown = "{tokens:,} tokens, batches of {batch_size} x {context_length}"

    def __init__(self, tokens: Any, batch_size: int, context_length: int, *, seed: int = 0) -> None:
        checks.check_token_row(tokens)
        self.tokens, self.batch_size, self.context_length = tokens, batch_size, context_length
        sizes = {"batch_size": batch_size, "context_length": context_length}
        self.settings = {**sizes, "seed": seed, "tokens": len(tokens)}

    def item(self, index: int) -> tuple[Tensor, Tensor]:
        """Batch number `index`."""
        mixed = np.random.SeedSequence([self.settings["seed"], index]).generate_state(1)[0]
        generator = torch.Generator().manual_seed(int(mixed))  # it takes 32 bits of a seed
        return get_batch(self.tokens, self.batch_size, self.context_length, generator=generator)


def begin_id(tokenizer: Any, eos_token_id: int | None = None) -> int | None:
    """The token that begins a document: the one that `encode` puts first, else the end token.

    `eos_token_id` is the end token if it is not the tokenizer's own.
    """
    if getattr(tokenizer, "add_bos", False):
        return tokenizer.bos_token_id
    return tokenizer.eos_token_id if eos_token_id is None else eos_token_id


@torch.no_grad()
def evaluate(
    model: nn.Module,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    batch_tokens: int = 8192,
    eos_token_id: int | None = None,
) -> float:
    """Bits per byte of whole documents, each alone in its row, its end token predicted too.

    A row begins with `begin_id(tokenizer)`; `eos_token_id` is for an end token of another name.
    Comparable with `StoryLanguage.bits_per_byte`, with n-grams, and across tokenizers.

    Raises: ValueError for arguments in another order, no end token, texts without a byte.
    """
    checks.check_evaluation(tokenizer, texts, eos_token_id)
    end = tokenizer.eos_token_id if eos_token_id is None else eos_token_id
    begin = begin_id(tokenizer, end)
    texts = [well_formed(text) for text in texts]  # the text that is encoded has the bytes
    rows = sorted(([begin, *tokenizer.encode_ordinary(text), end] for text in texts), key=len)
    num_bytes = sum(len(text.encode()) for text in texts)
    device, nats = next(model.parameters()).device, 0.0
    with EvalMode(model):
        while rows:
            size = max(1, batch_tokens // len(rows[-1]))
            batch, rows = rows[-size:], rows[:-size]
            inputs, targets = pad_rows(batch, len(batch[-1]), end)
            logits = model(inputs.to(device))
            nats += float(cross_entropy(logits, targets.to(device), reduction="sum"))
    return nats / math.log(2) / num_bytes


@our_words
@dataclass(frozen=True)
class TrainConfig:
    """What decides the numbers of a training, and how often one looks at it.

    Raises: ValueError for values out of range.
    """

    steps: int
    max_lr: float = 1e-3  # after `warmup_steps`
    min_lr: float | None = None  # at `steps`; None: a tenth of `max_lr`
    warmup_steps: int = 100  # in a training that is shorter, all of it
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1  # of matrices
    max_norm: float = 1.0
    gradient_accumulation_steps: int = 1  # batches a step
    seed: int = 0  # of dropout
    log_interval: int = 10  # steps from one record to the next
    eval_interval: int = 0  # steps from one look at held-out texts to the next; 0: at the end

    def __post_init__(self) -> None:
        checks.check_train_config(self)

    def learning_rate(self, step: int) -> float:
        """The rate of a step."""
        min_lr = self.max_lr / 10 if self.min_lr is None else self.min_lr
        warmup_steps = min(self.warmup_steps, self.steps)
        return cosine_schedule(step, self.max_lr, min_lr, warmup_steps, self.steps)

    def make_optimizer(self, model: nn.Module) -> Any:
        """AdamW in torch's version, one kernel for the whole formula; only matrices decay."""
        groups = decay_groups(model, self.weight_decay)
        return torch.optim.AdamW(groups, lr=self.max_lr, betas=self.betas, eps=self.eps, fused=True)


def add_gradient(model: nn.Module, batch: tuple[Tensor, Tensor], count: int) -> Tensor:
    """Add a batch's part of the gradient of a mean over `count` targets; returns its nats."""
    checks.check_shifted(model, *batch)
    device = next(model.parameters()).device
    inputs, targets = (x.to(device) for x in batch)
    nats = cross_entropy(model(inputs), targets, reduction="sum")
    (nats * (1 / max(1, count))).backward()
    return nats.detach()


def gradients(
    model: nn.Module,
    batches: Iterator[tuple[Tensor, Tensor]],
    config: TrainConfig,
    *,
    add: Callable[[nn.Module, tuple[Tensor, Tensor], int], Tensor] = add_gradient,
) -> tuple[Tensor, int, Tensor]:
    """Draw the batches of a step; leave the gradient of their mean in the parameters, clipped.

    Returns the summed loss in nats, how many targets it is of, and the norm before clipping.
    `add` says what is done with each batch.
    """
    drawn = [next(batches) for _ in range(config.gradient_accumulation_steps)]
    count = sum(count_targets(targets) for _, targets in drawn)
    model.zero_grad()
    nats = torch.stack([add(model, batch, count) for batch in drawn]).sum()
    return nats, count, clip_grad_norm(model.parameters(), config.max_norm)


def train(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    config: TrainConfig,
    *,
    validate: Callable[[nn.Module], float | dict[str, float]] | None = None,
    on_log: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Train `model(ids (B, T)) -> logits (B, T, V)` on `batches` of (inputs, targets).

    Returns the records, one every `log_interval` steps; `on_log` gets each as it is made. Every
    `eval_interval` steps and at the end, what `validate(model)` returns stands in the record.

        history = train(model, RowBatches(rows, 16, end), TrainConfig(500))

    Raises: ValueError for parts that are none, such as steps for a config; FloatingPointError for
        a loss or gradient that is not finite, before a weight moves.
    """
    checks.check_loop(model, config)
    source: Any = batch_source(batches)
    optimizer, began = config.make_optimizer(model), time.perf_counter()
    history: list[dict[str, Any]] = []
    nats, targets, tokens = 0.0, 0, 0  # since the last record, and from the start
    torch.manual_seed(config.seed)
    model.train()
    for step in range(config.steps):
        summed, count, length = gradients(model, source, config)
        loss, norm = float(summed), float(length)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise FloatingPointError(f"step {step}: loss {loss}, gradient norm {norm}")
        rate = config.learning_rate(step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        nats, targets, tokens = nats + loss, targets + count, tokens + count
        done = step + 1
        look = done % (config.eval_interval or config.steps) == 0 or done == config.steps
        if look or done % config.log_interval == 0:
            record: dict[str, Any] = {"step": done, "tokens": tokens}
            record |= {"loss": nats / targets} if targets else {}
            record |= {"lr": rate, "grad_norm": norm, "seconds": time.perf_counter() - began}
            if look and validate is not None:
                with looking(model):
                    found = named_numbers(validate(model))
                checks.check_found(record, found)
                record |= found
            history.append(record)
            nats, targets = 0.0, 0
            if on_log is not None:
                on_log(record)
    return history
