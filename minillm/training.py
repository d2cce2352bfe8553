"""Training: the loss of a batch, batches, AdamW, held-out bits, the loop (notebook 07).

For any model from ids to logits. What must survive a kill is a part that is handed in: see
`minillm.deeper.training.run`.
"""

# Built from notebooks/07_training.ipynb: edit there, then make build.

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from minillm.bpe import well_formed
from minillm.support.checks.kinds import check_sizes, index_in
from minillm.support.checks.texts import check_texts, check_tokenizer
from minillm.support.checks.training import (
    check_end,
    check_shifted,
    check_targets,
    check_token_row,
    check_train_config,
    check_training,
)
from minillm.support.checks.words import our_words
from minillm.support.counting import Meter, count_targets, due, keep_record
from minillm.support.device import (
    forward_of,
    fresh_rng_state,
    processes_of,
    rng_state,
    set_rng_state,
)
from minillm.support.modes import EvalMode

__all__ = [
    "AdamW",
    "BatchSource",
    "IndexedSource",
    "Optimizer",
    "RowBatches",
    "TrainConfig",
    "Trainer",
    "WindowBatches",
    "batch_source",
    "clip_grad_norm",
    "cosine_schedule",
    "cross_entropy",
    "decay_groups",
    "document_row",
    "epoch_order",
    "evaluate",
    "get_batch",
    "is_matrix",
    "pad_rows",
    "token_byte_lengths",
]


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """Negative log-likelihood of the targets in nats, in float32 (float64 if the logits are).

    `mean` divides by the number of targets that count; if none does, there is nothing to learn: 0.
    Nothing is shifted here: of ids (B, T), `cross_entropy(model(ids)[:, :-1], ids[:, 1:])`.
    Targets of floating point are probabilities of all ids (`deeper.training.expected_loss`).

    Shape: logits (..., V), targets (...) or, of floating point, (..., V) -> scalar.
    Raises: ValueError for shapes that do not fit; on the CPU, for targets outside the vocabulary;
        TypeError for logits that are no tensor.
    """
    check_targets(logits, targets, ignore_index)
    if targets.is_floating_point():
        from minillm.deeper.training.expected_loss import expected_loss

        return expected_loss(logits, targets, reduction)
    logits, targets = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1).long()
    if logits.dtype in (torch.float16, torch.bfloat16):
        from minillm.deeper.training.half_precision import summed_loss

        total = summed_loss(logits, targets, ignore_index)
    else:
        total = F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")
    count = (targets != ignore_index).sum()
    return total if reduction == "sum" else total / count.clamp(min=1)


def document_row(ids: Iterable[int], eos_token_id: int) -> list[int]:
    """A document between two end tokens; one that it begins with itself is not written twice."""
    row = [*map(int, ids), eos_token_id]  # numpy's integers are no JSON
    return row if len(row) > 1 and row[0] == eos_token_id else [eos_token_id, *row]


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


@lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """The order in which an epoch takes `count` things: of the seed and the epoch alone."""
    return np.random.default_rng([seed, epoch]).permutation(count)


class IndexedSource:
    """What gives items without end, item i depending on `settings` and on i alone.

    So a number, `index`, says where it stands. One of your own sets `settings` (plain JSON) and
    says what `item(index)` is.
    """

    settings: dict[str, Any]  # what must not change
    index = 0  # of the next item

    def item(self, index: int) -> Any:
        """Item number `index`."""
        raise NotImplementedError

    def __iter__(self) -> "IndexedSource":
        return self

    def __next__(self) -> Any:
        item = self.item(self.index)
        self.index += 1
        return item

    def state_dict(self) -> dict[str, Any]:
        """Where the source stands, with the settings that must not change."""
        return {**self.settings, "index": self.index}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go where `state` says. Raises: ValueError if its settings are others than ours."""
        self.index = index_in(state, self.state_dict())


class RowBatches(IndexedSource):
    """Rows of tokens, some at a time, padded to the longest of them; each row once an epoch.

        rows = [[*tokenizer.encode(text), end] for text in texts]
        inputs, targets = next(RowBatches(rows, 16, end))

    The order of an epoch depends on the seed and on the epoch alone; its last batch may be smaller.

    Shape: -> inputs (B, T), targets (B, T), int64; targets of padding are -100.
    Raises: ValueError if there is no row, or no end token.
    """

    def __init__(
        self, rows: Sequence[list[int]], batch_size: int, eos_token_id: int, *, seed: int = 0
    ) -> None:
        check_sizes(batch_size=batch_size, rows=len(rows))
        check_end(eos_token_id)
        self.rows, self.batch_size, self.eos_token_id = rows, batch_size, eos_token_id
        self.settings = {"batch_size": batch_size, "seed": seed, "rows": len(rows)}

    def __repr__(self) -> str:
        return f"RowBatches({len(self.rows):,} rows, {self.batch_size} a batch)"

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
    check_token_row(tokens)
    if batch_size < 1 or context_length < 1 or len(tokens) < context_length + 1:
        raise ValueError(
            f"{batch_size} windows of {context_length} + 1 tokens from {len(tokens)} tokens"
        )
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

    def __init__(self, tokens: Any, batch_size: int, context_length: int, *, seed: int = 0) -> None:
        check_token_row(tokens)
        self.tokens, self.batch_size, self.context_length = tokens, batch_size, context_length
        sizes = {"batch_size": batch_size, "context_length": context_length}
        self.settings = {**sizes, "seed": seed, "tokens": len(tokens)}

    def __repr__(self) -> str:
        size = f"batches of {self.batch_size} x {self.context_length}"
        return f"WindowBatches({len(self.tokens):,} tokens, {size})"

    def item(self, index: int) -> tuple[Tensor, Tensor]:
        """Batch number `index`."""
        mixed = np.random.SeedSequence([self.settings["seed"], index]).generate_state(1)[0]
        generator = torch.Generator().manual_seed(int(mixed))  # torch's seeds have 32 bits
        return get_batch(self.tokens, self.batch_size, self.context_length, generator=generator)


class BatchSource(Protocol):
    """What `Trainer` draws from: batches without end, and a state (plain JSON) to go back to."""

    def __next__(self) -> tuple[Tensor, Tensor]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def batch_source(batches: Any) -> BatchSource:
    """`batches` itself if it has a state; any other iterable of (inputs, targets) is given one.

    Raises: ValueError for what is no batches, such as texts.
    """
    if all(hasattr(batches, name) for name in ("__next__", "state_dict", "load_state_dict")):
        return batches
    from minillm.deeper.training.plain_batches import PlainBatches

    return PlainBatches(batches)


def _adamw_step(p: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    """One step of one parameter, in place; `state` holds m, v and how many steps were taken."""
    beta1, beta2 = group["betas"]
    state["step"] += 1
    t = float(state["step"])
    m = state["exp_avg"].lerp_(grad, 1 - beta1)
    v = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    p.mul_(1 - group["lr"] * group["weight_decay"])
    scale = (v / (1 - beta2**t)).sqrt_().add_(group["eps"])
    p.addcdiv_(m, scale, value=-group["lr"] / (1 - beta1**t))


class AdamW:
    """Adam with decoupled weight decay, for parameters or groups of them, as `torch.optim.AdamW`.

        optimizer = AdamW(decay_groups(model, 0.1), lr=1e-3, betas=(0.9, 0.95))
        loss.backward(), optimizer.step(), optimizer.zero_grad()

    Source: Loshchilov and Hutter 2019, algorithm 2, with the decay multiplied by the learning rate
    as torch does.
    Raises: ValueError for a rate, eps or decay below 0, and for betas that are not from 0 to below
        1.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"lr {lr}, betas {betas}, eps {eps} or weight decay {weight_decay}")
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
            for p in group["params"]:
                if p.grad is not None:
                    if p not in self.state:
                        zeros = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                        self.state[p] = {"step": torch.zeros(()), **zeros}
                    _adamw_step(p, p.grad, self.state[p], group)


class Optimizer(Protocol):
    """What the trainer needs of an optimizer: `AdamW`, and each of torch's, has it."""

    param_groups: list[dict[str, Any]]

    def zero_grad(self) -> None: ...

    def step(self) -> Any: ...


def is_matrix(name: str, p: Tensor) -> bool:
    """Whether a parameter is a matrix of weights: no vector, and no logarithms (`..._log`)."""
    return p.dim() >= 2 and not name.endswith("_log")


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices decay, vectors (norms and biases) do not.

    Logarithms do not either: what they stand for would go to 1, not to 0.
    """
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
    if not 0 <= warmup_steps <= total_steps or not 0 <= min_lr <= max_lr or step < 0:
        raise ValueError(
            f"step {step}, warm-up {warmup_steps} of {total_steps}, rates {min_lr}..{max_lr}"
        )
    if step < warmup_steps:
        return max_lr * (step + 1) / warmup_steps
    if step >= total_steps:
        return min_lr
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return min_lr + (max_lr - min_lr) * (1 + math.cos(math.pi * progress)) / 2


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients so that their joint norm is at most `max_norm`; returns the norm before.

    Raises: ValueError if `max_norm` is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, not {max_norm}")
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


@torch.no_grad()
def evaluate(
    model: nn.Module,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    batch_tokens: int = 8192,
    eos_token_id: int | None = None,
) -> float:
    """Bits per byte of whole documents, each alone in its row.

    All nats, those of the end token included, over the bytes of the text.

    Comparable with `StoryLanguage.bits_per_byte`, with n-grams, and across tokenizers.

    Raises: ValueError for one text instead of several, arguments in another order, texts without a
        byte, or if no end token is known.
    """
    check_tokenizer(tokenizer)
    check_texts(texts)
    eos_token_id = tokenizer.eos_token_id if eos_token_id is None else eos_token_id
    if eos_token_id is None:
        raise ValueError(
            "the tokenizer has no end token: say with eos_token_id which one begins a text"
        )
    texts = [well_formed(text) for text in texts]  # the text that is encoded has the bytes
    rows = sorted(
        ([eos_token_id, *tokenizer.encode_ordinary(t), eos_token_id] for t in texts), key=len
    )
    num_bytes = sum(len(t.encode("utf-8")) for t in texts)
    if not num_bytes:
        raise ValueError(f"{len(texts)} texts without a byte: nothing to measure")
    device, nats = next(model.parameters()).device, 0.0
    with EvalMode(model):
        while rows:
            size = max(1, batch_tokens // len(rows[-1]))
            batch, rows = rows[-size:], rows[:-size]
            inputs, targets = pad_rows(batch, len(batch[-1]), eos_token_id)
            logits = model(inputs.to(device))
            nats += float(cross_entropy(logits, targets.to(device), reduction="sum"))
    return nats / math.log(2) / num_bytes


def token_byte_lengths(tokenizer: Any) -> Tensor:
    """How many bytes of text each token stands for; 0 for special tokens and for ids without one.

    Shape: -> (V,) int64.
    """
    lengths = [0] * tokenizer.vocab_size
    for i in set(range(len(lengths))) - set(tokenizer.special_tokens.values()):
        with suppress(ValueError):  # ids may have gaps
            lengths[i] = len(tokenizer.decode_bytes([i]))
    return torch.tensor(lengths)


if TYPE_CHECKING:
    from minillm.deeper.training.run import Run


@our_words
@dataclass(frozen=True)
class TrainConfig:
    """What decides the numbers of a training, and how often one looks at it.

    The rate climbs to `max_lr` for `warmup_steps` and falls to `min_lr` (None: a tenth) at `steps`.
    A step adds up `gradient_accumulation_steps` batches; `max_norm` clips their gradient. `seed` is
    that of dropout, `precision` that of matrix products (weights are float32). Records are made
    every `log_interval` steps; every `eval_interval` (0: at the end) one looks.

    Args:
        betas, eps, weight_decay: AdamW's; only matrices decay.
        precision: "float32", or "bfloat16" (autocast).
        compile: by torch, which needs a C++ compiler.
        optimizer: "adamw", or "muon" for the layers' matrices.
        parallel: "ddp", "fsdp" or "tensor", where several processes are.
    Raises: ValueError for values out of range, and for settings that exclude each other.
    """

    steps: int
    max_lr: float = 1e-3
    min_lr: float | None = None
    warmup_steps: int = 100
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_norm: float = 1.0
    gradient_accumulation_steps: int = 1
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    optimizer: Literal["adamw", "muon"] = "adamw"
    fused: bool = True  # torch's AdamW in one kernel; False: ours, the same formula
    seed: int = 0
    parallel: Literal["ddp", "fsdp", "tensor"] = "ddp"  # under torchrun
    log_interval: int = 10
    eval_interval: int = 0

    def __post_init__(self) -> None:
        check_train_config(self)

    def learning_rate(self, step: int) -> float:
        """The rate of a step; a warm-up longer than the run is cut."""
        warmup = min(self.warmup_steps, self.steps)
        min_lr = self.max_lr / 10 if self.min_lr is None else self.min_lr
        return cosine_schedule(step, self.max_lr, min_lr, warmup, self.steps)

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        """AdamW, with weight decay for matrices only, or Muon for the matrices of the layers."""
        groups = decay_groups(model, self.weight_decay)
        if self.optimizer == "muon":
            from minillm.deeper.training.muon import MuonAdamW

            return MuonAdamW(model, groups, self.max_lr, self.betas, self.eps)
        if not self.fused:
            return AdamW(groups, lr=self.max_lr, betas=self.betas, eps=self.eps)
        return torch.optim.AdamW(groups, lr=self.max_lr, betas=self.betas, eps=self.eps, fused=True)


class Trainer:
    """Trains `model(ids (B, T)) -> logits (B, T, V)` on `batches` of (inputs, targets).

    `batches` is any iterable; one without a state (`BatchSource`) begins anew when a run resumes.
    `optimizer`, an object or a function of the model, takes the place of `config`'s, and keeps its
    own rate unless there is a `schedule(step)`; `loss(logits, targets)` takes that of the mean
    cross-entropy over the targets that count.

    `validate(model)` returns a number or a dict of them, `sample(model)` a text; both run every
    `eval_interval` steps and at the end. `token_bytes` (V,) adds the loss in bits per byte.
    `on_log` gets each record, `history` keeps them. `run=Run(folder)` writes records and
    checkpoints, and resumes. `balance`, for experts, adds a loss that the records leave out.
    Losses are in nats a target.

        trainer = Trainer(model, batches, TrainConfig(500), run=Run("runs/first"))
        history = trainer.train()  # or trainer.resume() before it, to go on from a checkpoint

    Raises: ValueError for parts that are none, such as a number of steps for a config.
    """

    @our_words
    def __init__(
        self,
        model: nn.Module,
        batches: BatchSource | Iterable[tuple[Tensor, Tensor]],
        config: TrainConfig,
        *,
        optimizer: Optimizer | Callable[[nn.Module], Optimizer] | None = None,
        schedule: Callable[[int], float] | None = None,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
        run: "Run | None" = None,
        validate: Callable[[nn.Module], float | dict[str, float]] | None = None,
        sample: Callable[[nn.Module], str] | None = None,
        token_bytes: Tensor | None = None,
        on_log: Callable[[dict[str, Any]], None] | None = None,
        balance: Any = None,
        progress: bool = True,
    ) -> None:
        check_training(model, config, optimizer, run)
        self.batches, self.config, self.run = batch_source(batches), config, run
        self.validate, self.sample, self.on_log = validate, sample, on_log
        self.token_bytes, self.progress, self.balance = token_bytes, progress, balance
        self.handed_in = {"optimizer": optimizer, "schedule": schedule, "loss": loss}
        self.loss = loss
        self.device = next(model.parameters()).device
        self.processes = processes_of(config.parallel)
        self.model, self.forward = forward_of(model, self.processes, config.compile)
        self.step, self.tokens, self.step_incomplete = 0, 0, False
        self.history: list[dict[str, Any]] = []
        self.meter = Meter()
        self.rng = fresh_rng_state(config.seed + self.processes.rank, self.device)
        make: Any = config.make_optimizer if optimizer is None else optimizer
        self.optimizer: Optimizer = make if hasattr(make, "step") else make(self.model)
        self.schedule = config.learning_rate if optimizer is schedule is None else schedule

    def one_step(self) -> tuple[float, int, int, float]:
        """One update; returns summed loss in nats, targets, bytes and the gradient's norm.

        What fails before the weights move is undone: the step may be taken again.

        Raises: FloatingPointError for a loss or norm that is not finite; RuntimeError if the last
            step was broken off while the weights moved.
        """
        if self.step_incomplete:
            raise RuntimeError(f"step {self.step} was broken off while the weights moved: resume()")
        before, self.rng = self.batches.state_dict(), rng_state(self.device)
        try:
            loss, targets, num_bytes, norm = self._gradients()
            sound = math.isfinite(loss) and math.isfinite(norm)
        except BaseException:  # Ctrl-C too
            self._undo(before)
            raise
        if not sound:
            self._undo(before)
            where = self.run.save(self) if self.run else "nowhere: Run(folder) was not given"
            raise FloatingPointError(
                f"step {self.step}: loss {loss}, gradient norm {norm}; state before it: {where}"
            )
        if self.schedule is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = self.schedule(self.step)
        self.step_incomplete = True
        self.optimizer.step()
        if self.balance is not None:
            self.balance.after_step()
        self.optimizer.zero_grad()
        self.step, self.tokens, self.step_incomplete = self.step + 1, self.tokens + targets, False
        return loss, targets, num_bytes, norm

    def _gradients(self) -> tuple[float, int, int, float]:
        """Draw the batches of a step; leave their clipped gradient in the parameters."""
        drawn = [next(self.batches) for _ in range(self.config.gradient_accumulation_steps)]
        counts = [count_targets(targets, self.token_bytes) for _, targets in drawn]
        if self.step == 0 and self.loss is None:
            check_shifted(self.model, *drawn[0])
        count, num_bytes = (sum(column) for column in zip(*counts, strict=True))
        losses, half = [], self.config.precision == "bfloat16"
        parts = [self.processes.share(batch) for batch in drawn]
        for i, part in enumerate(parts, 1):
            inputs, targets = (x.to(self.device) for x in part)
            with self.processes.communicate(self.forward, i == len(parts)):
                with torch.autocast(self.device.type, torch.bfloat16, enabled=half):
                    logits = self.forward(inputs)
                if self.loss is None:
                    loss = cross_entropy(logits, targets, reduction="sum")
                else:
                    loss = self.loss(logits, targets) * count_targets(targets, None)[0]
                mean = loss * (self.processes.size / max(1, count))  # processes average gradients
                if self.balance is not None:
                    mean = mean + self.balance(targets) / len(parts)
                mean.backward()
            losses.append(loss.detach())
        total = self.processes.total(torch.stack(losses).sum())
        norm = clip_grad_norm(self.model.parameters(), self.config.max_norm)
        return float(total), count, num_bytes, float(norm)  # here we wait for the device

    def _undo(self, place: dict[str, Any]) -> None:
        """As if the step had not begun."""
        self.optimizer.zero_grad()
        if self.balance is not None:
            self.balance.forget()
        set_rng_state(self.rng, self.device)
        self.batches.load_state_dict(place)

    def train(self, until: int | None = None) -> list[dict[str, Any]]:
        """Take steps until `config.steps` (or `until`); returns the records of the log.

        Raises: FloatingPointError with the step if its loss or gradient is not finite; with a run,
            the state before that step is saved. ValueError for a name in what `validate` returns
            that a record has itself, and as `Run.at_work` says.
        """
        config = self.config
        last = config.steps if until is None else min(until, config.steps)
        hidden = not (self.progress and self.processes.rank == 0)
        with (
            self.run.at_work(self) if self.run else nullcontext(),
            tqdm(total=last, initial=self.step, unit="step", disable=hidden) as bar,
        ):
            set_rng_state(self.rng, self.device)
            self.model.train()
            self.meter.start(self.tokens)
            try:
                while self.step < last:
                    self.meter.add(*self.one_step())
                    bar.update()
                    done = self.step == last
                    look = done or due(self.step, config.eval_interval)
                    if look or due(self.step, config.log_interval):
                        keep_record(self, self._look() if look else {}, bar)
                    if self.run:
                        self.run.after_step(self, done)
            finally:  # after an error or Ctrl-C `train` may be called again
                self.rng = rng_state(self.device)
        return self.history

    def resume(self, path: Any = None) -> bool:
        """Go on from `path`, or the run's newest checkpoint; False if there is none.

        Raises: ValueError without a run: a trainer alone keeps no checkpoints.
        """
        if self.run is None:
            raise ValueError("no run to resume: Trainer(..., run=Run(folder)) names its folder")
        return self.run.resume(self, path)

    def _look(self) -> dict[str, Any]:
        """Validation and a sample text; the training goes on as if nobody had looked."""
        found: dict[str, Any] = {}
        rng = rng_state(self.device)
        try:
            with EvalMode(self.model), torch.no_grad():
                if self.validate is not None:
                    value = self.validate(self.model)
                    value = value if isinstance(value, dict) else {"validation": value}
                    found |= {name: float(number) for name, number in value.items()}
                if self.sample is not None:
                    found["sample"] = self.sample(self.model)
        finally:
            set_rng_state(rng, self.device)
        return found
