"""LoRA: a change of low rank beside each matrix; the matrices themselves stay as they are.

Explained in notebooks/beyond/14_lora.ipynb; an adapter in files: `minillm.pretrained.adapters`.
"""

# Built from notebooks/beyond/14_lora.ipynb: edit there, then make build.

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.fence import matches

__all__ = [
    "LoRALinear",
    "adapted_layers",
    "add_lora",
    "check_adapter",
    "check_merged",
    "insert_adapters",
    "linear_layers",
    "lora_disabled",
    "lora_layers",
    "meant_layers",
    "merge",
    "remove_lora",
    "unmerge",
]


class LoRALinear(nn.Linear):
    """A linear layer with an adapter: y = W x + b + s B A x, where only A and B are trained.

    `weight` and `bias` are those of `base`, not copies. s is alpha / rank, or alpha / sqrt(rank)
    with `use_rslora`. A is drawn, B begins as zeros: at first the layer computes what `base` does.
    The adapter is float32 beside weights of 16 bits. `lora_A` may be another layer's, to share it.

    Shape: x (..., in) -> (..., out); A (rank, in), B (out, rank).
    Raises: ValueError for a rank below 1 or above the smaller side of W, an alpha that is no number
        or beyond a million, a dropout outside 0 to 1.
    Source: Hu et al. 2021, section 4.1; Kalajdzievski 2023 for alpha / sqrt(rank).
    """

    unmerged_weight: Tensor  # W, while `weight` holds W + s B A

    def __init__(
        self,
        base: nn.Linear,
        rank: int,
        alpha: float,
        *,
        use_rslora: bool = False,
        dropout: float = 0.0,
        generator: torch.Generator | None = None,
        lora_A: nn.Linear | None = None,
    ) -> None:
        check_adapter("a linear layer", base, rank, alpha, dropout)
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.rank, self.alpha, self.use_rslora = rank, alpha, use_rslora
        self.scale = alpha / (math.sqrt(rank) if use_rslora else rank)
        self.merged, self.enabled, self.tied = False, True, False
        self.dropout = nn.Dropout(dropout)
        dtype = torch.promote_types(base.weight.dtype, torch.float32)
        options: dict[str, Any] = {"bias": False, "device": base.weight.device, "dtype": dtype}
        self.lora_A = lora_A or nn.utils.skip_init(nn.Linear, self.in_features, rank, **options)
        self.lora_B = nn.utils.skip_init(nn.Linear, rank, self.out_features, **options)
        with torch.no_grad():
            if lora_A is None:
                bound = self.in_features**-0.5
                drawn = torch.empty(rank, self.in_features)
                self.lora_A.weight.copy_(drawn.uniform_(-bound, bound, generator=generator))
            self.lora_B.weight.zero_()
        self.train(base.training)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out), with the adapter's change unless it is switched off."""
        y = F.linear(x, self.weight, self.bias)
        if self.merged or not self.enabled:
            return y
        low = self.lora_A(self.dropout(x).to(self.lora_A.weight.dtype))  # (..., rank)
        return (y + self.lora_B(low * self.scale)).to(y.dtype)

    def change(self) -> Tensor:
        """What the adapter adds to the matrix: s B A. Shape: -> (out, in)."""
        return self.lora_B.weight @ self.lora_A.weight * self.scale

    def matrix(self) -> Tensor:
        """The matrix that x is multiplied with, the adapter (but not its dropout) included."""
        if self.merged or not self.enabled:
            return self.weight
        return (self.weight + self.change()).to(self.weight.dtype)

    @torch.no_grad()
    def merge(self) -> None:
        """Put W + s B A in the place of W, which is kept. Of a model's layers, use `merge`.

        Raises: ValueError if it is merged, or if the matrix would be NaN or infinite.
        """
        merged = _merged_matrix("this layer", self)
        self.register_buffer("unmerged_weight", self.weight.detach(), persistent=False)
        self.weight = nn.Parameter(merged, requires_grad=self.weight.requires_grad)
        self.merged = True

    def unmerge(self) -> None:
        """Put W back, bit for bit. Raises: ValueError if it is not merged."""
        if not self.merged:
            raise ValueError("this layer is not merged: there is nothing to take back")
        self.weight = nn.Parameter(self.unmerged_weight, requires_grad=self.weight.requires_grad)
        del self.unmerged_weight
        self.merged = False

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.rank}, alpha={self.alpha}"


def _merged_matrix(name: str, layer: LoRALinear) -> Tensor:
    """W + s B A. Raises: ValueError if it is merged already, or NaN or infinite."""
    if layer.merged:
        raise ValueError(f"{name} is merged already: its change would be added twice")
    change, dtype = layer.change(), layer.weight.dtype
    if not change.isfinite().all():
        raise ValueError(f"the adapter of {name} is NaN or infinite")
    matrix = (layer.weight + change).to(dtype)
    if not matrix.isfinite().all():
        raise ValueError(f"{name} would be NaN or infinite in {dtype}")
    return matrix


_MOST_ALPHA = 1_000_000  # adapters in use have an alpha of 1 to some thousands


def check_adapter(name: str, layer: nn.Module, rank: Any, alpha: Any, dropout: Any) -> None:
    """Raises: ValueError if the layer can have no such adapter."""
    number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if isinstance(layer, LoRALinear):
        raise ValueError(f"{name} has an adapter already")
    if not isinstance(layer, nn.Linear):
        raise ValueError(f"{name} is a {type(layer).__name__}, not a linear layer")
    shape = (layer.out_features, layer.in_features)
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= min(shape):
        raise ValueError(f"rank {rank!r:.60} for {name}, a matrix {shape}: from 1 to {min(shape)}")
    if not number or not abs(alpha) <= _MOST_ALPHA:
        most = f"at most {_MOST_ALPHA:,} and at least {-_MOST_ALPHA:,}"
        raise ValueError(f"alpha must be a finite number, not {alpha!r:.60}: {most}")
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ValueError(f"dropout must be a number from 0, below 1, not {dropout!r:.60}")


def linear_layers(model: nn.Module) -> dict[str, list[str]]:
    """The linear layers by their names in the family's checkpoints, and what we call them.

    Both are the same but for GPT-2 and Falcon, whose one matrix for queries, keys and values is
    three of ours.
    """
    from minillm.pretrained.weights import layer_name

    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not name.endswith((".lora_A", ".lora_B")):
            found.setdefault(layer_name(name, getattr(model, "config", None)), []).append(name)
    return found


def lora_layers(model: nn.Module) -> dict[str, LoRALinear]:
    """The layers with adapters, by our names."""
    found: dict[str, Any] = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    # a notebook's own LoRALinear counts too
    return {name: module for name, module in found.items() if hasattr(module, "lora_A")}


def meant_layers(names: Iterable[str], targets: str | Collection[str]) -> list[str]:
    """The names of the layers that targets, in one of peft's three ways to write them, mean."""
    if isinstance(targets, str) and targets.lower() == "all-linear":  # so does peft
        return [name for name in names if name != "lm_head"]
    if isinstance(targets, str):
        return matches(targets, names)  # a stranger's pattern may take years
    wanted = {*targets}
    parts = {name: name.split(".") for name in names}
    return [n for n, p in parts.items() if any(".".join(p[i:]) in wanted for i in range(len(p)))]


def _choose(model: nn.Module, targets: str | Collection[str]) -> list[str]:
    """The names of the layers that targets mean. Raises: ValueError for a target without one."""
    named = isinstance(targets, Collection) and all(isinstance(t, str) for t in targets)
    if not named or isinstance(targets, Mapping):
        raise ValueError(f"targets must be names or a pattern, not {targets!r}")
    names = list(linear_layers(model))
    chosen = meant_layers(names, targets)
    each = [] if isinstance(targets, str) else targets
    empty = [target for target in each if not meant_layers(names, [target])]
    if empty or not chosen:
        which = f"no linear layer fits {', '.join(map(repr, empty)) or repr(targets)}"
        known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names)) or "none"
        hint = " (a string is a pattern for whole names)" if isinstance(targets, str) else ""
        raise ValueError(f"{which}{hint}; there are {known}")
    return chosen


def add_lora(
    model: nn.Module,
    rank: int,
    alpha: float,
    targets: str | Collection[str] = "all-linear",
    *,
    use_rslora: bool = False,
    dropout: float = 0.0,
    seed: int = 0,
) -> list[str]:
    """Give the target layers adapters and freeze everything else; returns the layers' names.

    Where peft says `r`, `lora_alpha` and `target_modules`, these are `rank`, `alpha` and `targets`.
    Targets are written as there: the last parts of the names that the layers have in Hugging Face's
    checkpoints, or whole names; a pattern that fits whole names; or "all-linear": all but the head.

    Raises: ValueError, before anything is changed, for targets that are no strings or fit no linear
        layer, a model that has adapters, a rank that a layer cannot have (see `LoRALinear`).
    """
    chosen = _choose(model, targets)
    settings = {"rank": rank, "alpha": alpha, "use_rslora": use_rslora, "dropout": dropout}
    insert_adapters(model, chosen, settings, seed)
    return chosen


def insert_adapters(
    model: nn.Module, chosen: list[str], settings: Mapping[str, Any], seed: int
) -> None:
    """Put `LoRALinear` in the place of the chosen layers. Raises: ValueError before any is."""
    if first := next(iter(lora_layers(model)), None):
        raise ValueError(f"{first} has an adapter already: merge and remove_lora, or remove_lora")
    if hasattr(model, "packed_layers"):
        raise ValueError("a PackedLM only generates: adapters go to the model it was made from")
    layers = linear_layers(model)
    values = [settings[key] for key in ("rank", "alpha", "dropout")]
    for name in chosen:
        for ours in layers[name]:
            check_adapter(name, model.get_submodule(ours), *values)
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    for name in chosen:
        shared: nn.Linear | None = None  # one A for the parts of a fused matrix
        for ours in layers[name]:
            base: Any = model.get_submodule(ours)
            layer = LoRALinear(base, **settings, generator=generator, lora_A=shared)
            shared = layer.lora_A
            parent, _, last = ours.rpartition(".")
            setattr(model.get_submodule(parent), last, layer)


@contextmanager
def lora_disabled(model: nn.Module) -> Iterator[None]:
    """Within this block the model computes as if it had no adapters.

    Raises: ValueError if there are none, or if they are merged.
    """
    layers = adapted_layers(model)
    if merged := next((name for name, layer in layers.items() if layer.merged), None):
        raise ValueError(f"{merged} is merged: unmerge the model, then switch its adapters off")
    before = {layer: layer.enabled for layer in layers.values()}
    try:
        for layer in before:
            layer.enabled = False
        yield
    finally:
        for layer, enabled in before.items():
            layer.enabled = enabled


def adapted_layers(model: nn.Module) -> dict[str, LoRALinear]:
    """Raises: ValueError if the model has no adapters."""
    if not (layers := lora_layers(model)):
        raise ValueError(f"a {type(model).__name__} without adapters: see add_lora, load_adapter")
    return layers


def merge(model: nn.Module) -> None:
    """Add each adapter's change to its matrix, so that the model costs no more than without.

    The matrices are kept for `unmerge`: as much memory again as the adapted layers take, until
    `remove_lora`. A head that is tied to the embedding becomes a matrix of its own, for its change
    is none of the embedding's; the config then says so.

    Raises: ValueError, before anything is changed, if there are no adapters, one is merged, or one
        would make a matrix NaN or infinite.
    """
    layers = adapted_layers(model)
    for name, layer in layers.items():
        _merged_matrix(name, layer)
    for layer in layers.values():
        layer.merge()
    head, config = layers.get("lm_head"), getattr(model, "config", None)
    if head is not None and getattr(config, "tie_word_embeddings", False):
        head.tied = True
        _set_tied(model, False)


def unmerge(model: nn.Module) -> None:
    """Take `merge` back, bit for bit.

    Raises: ValueError, before anything is changed, if there are no adapters or one is not merged.
    """
    layers = adapted_layers(model)
    if name := next((name for name, layer in layers.items() if not layer.merged), None):
        raise ValueError(f"{name} is not merged: there is nothing to take back")
    for layer in layers.values():
        layer.unmerge()
    head = layers.get("lm_head")
    if head is not None and head.tied:
        head.tied = False
        _set_tied(model, True)


def _set_tied(model: Any, tied: bool) -> None:
    """Let the config say whether the head is the embedding, and the weights be so."""
    model.config = model.model.config = replace(model.config, tie_word_embeddings=tied)
    model.tie_weights()


def remove_lora(model: nn.Module) -> None:
    """Take the adapters off: what was merged stays in the matrices, what was not is gone.

    All weights can be trained again. Raises: ValueError if there are no adapters.
    """
    for name, layer in adapted_layers(model).items():
        base = nn.utils.skip_init(
            nn.Linear, layer.in_features, layer.out_features, bias=False, device="meta"
        )
        base.weight, base.bias = layer.weight, layer.bias
        base.train(layer.training)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, base)
    model.requires_grad_(True)


def check_merged(model: nn.Module, what: str) -> None:
    """Raises: ValueError if the model has an adapter that is not merged."""
    for name, layer in lora_layers(model).items():
        if not layer.merged:
            raise ValueError(f"{what}: {name} has an adapter that is not merged; see merge")
