"""Adapters of a whole model: which layers get one, switched off, merged in, taken out, removed.

Shown in notebooks/beyond/14_lora.ipynb, which builds the layer (`beyond.lora.lora`); in files:
`minillm.deeper.pretrained.adapters`.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from minillm.beyond.lora.lora import LoRALinear
from minillm.support.checks.adapters import check_adapter
from minillm.support.checks.words import our_words
from minillm.support.fence import matches


def linear_layers(model: nn.Module) -> dict[str, list[str]]:
    """The linear layers by their names in the family's checkpoints, and what we call them.

    Both are the same but for GPT-2 and Falcon, whose one matrix for queries, keys and values is
    three of ours.
    Raises: ValueError for a packed model.
    """
    from minillm.deeper.pretrained.weights import layer_name

    if hasattr(model, "packed_layers"):
        raise ValueError("a PackedLM only generates: adapters go to the model it was made from")
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


@our_words
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

        add_lora(model, rank=8, alpha=16, targets=["q_proj", "v_proj"])
        print(f"{model.num_parameters(only_trainable=True):,} numbers learn")

    `use_rslora` divides by the root of the rank instead of the rank, `dropout` drops inputs of the
    adapters while training, `seed` is that of their first draw.

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
        layer.merged_matrix(name)
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
