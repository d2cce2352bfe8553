"""LoRA: a change of low rank beside each matrix; the matrices themselves stay as they are.

Explained in notebooks/beyond/14_lora.ipynb. Adapters are stored as the library peft stores them.
"""

# Built from notebooks/beyond/14_lora.ipynb: edit there, then make build.

import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.fence import matches
from minillm.files import read_json, recover, resolve, transaction, write_json, write_tensors
from minillm.pretrained.load import tensors_of
from minillm.pretrained.weights import join_qkv, layer_name, split_qkv

__all__ = [
    "LoRALinear",
    "add_lora",
    "check_merged",
    "linear_layers",
    "load_adapter",
    "lora_disabled",
    "lora_layers",
    "merge",
    "remove_lora",
    "save_adapter",
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
        _check_adapter("a linear layer", base, rank, alpha, dropout)
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


def _check_adapter(name: str, layer: nn.Module, rank: Any, alpha: Any, dropout: Any) -> None:
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


def _meant(names: Iterable[str], targets: str | Collection[str]) -> list[str]:
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
    chosen = _meant(names, targets)
    each = [] if isinstance(targets, str) else targets
    empty = [target for target in each if not _meant(names, [target])]
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

    `targets` are as in peft: the last parts of the names that the layers have in Hugging Face's
    checkpoints, or whole names; a pattern that fits whole names; or "all-linear": all but the head.

    Raises: ValueError, before anything is changed, for targets that are no strings or fit no linear
        layer, a model that has adapters, a rank that a layer cannot have (see `LoRALinear`).
    """
    chosen = _choose(model, targets)
    settings = {"rank": rank, "alpha": alpha, "use_rslora": use_rslora, "dropout": dropout}
    _insert(model, chosen, settings, seed)
    return chosen


def _insert(model: nn.Module, chosen: list[str], settings: Mapping[str, Any], seed: int) -> None:
    """Put `LoRALinear` in the place of the chosen layers. Raises: ValueError before any is."""
    if first := next(iter(lora_layers(model)), None):
        raise ValueError(f"{first} has an adapter already: merge and remove_lora, or remove_lora")
    if hasattr(model, "packed_layers"):
        raise ValueError("a PackedLM only generates: adapters go to the model it was made from")
    layers = linear_layers(model)
    values = [settings[key] for key in ("rank", "alpha", "dropout")]
    for name in chosen:
        for ours in layers[name]:
            _check_adapter(name, model.get_submodule(ours), *values)
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
    layers = _layers_of(model)
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


def _layers_of(model: nn.Module) -> dict[str, LoRALinear]:
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
    layers = _layers_of(model)
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
    layers = _layers_of(model)
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
    for name, layer in _layers_of(model).items():
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


_PREFIX = "base_model.model."  # before every name in peft's files

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Settings that change no number of an adapter once it is trained.
_FREE = {"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"}

_FREE |= {"task_type", "megatron_core", "qalora_group_size", "ensure_weight_tying"}

_FREE |= {"fan_in_fan_out"}  # how the base stores its matrix: peft corrects it too

# Settings that choose among the layers that target_modules names.
_NARROWING = ("exclude_modules", "layers_to_transform", "layers_pattern")


def save_adapter(
    model: nn.Module, folder: str | os.PathLike[str], *, base: str | None = None
) -> None:
    """Write the adapters, and nothing else of the model, as peft does; peft and we can read them.

    `base` is the folder or the repository of the model that they belong to, for peft to find. Saved
    over an older adapter, the new one takes its place as a whole (`minillm.files.transaction`).

    Raises: ValueError, before anything is written, if there are no adapters, if peft's files cannot
        hold them, if one is NaN or infinite, or if the folder holds a model.
    """
    folder, layers = Path(folder), _layers_of(model)
    config: Any = getattr(model, "config", None)
    keys = ("rank", "alpha", "use_rslora")
    settings = {(*(getattr(m, key) for key in keys), m.dropout.p) for m in layers.values()}
    if len(settings) > 1:
        raise ValueError(f"one adapter, one (rank, alpha, use_rslora, dropout): {settings}")
    rank, alpha, use_rslora, dropout = settings.pop()
    tensors: dict[str, Tensor] = {}
    names = {n: parts for n, parts in linear_layers(model).items() if parts[0] in layers}
    for name, parts in names.items():
        if strange := [part for part in parts if part not in layers]:
            raise ValueError(f"{name} is one matrix in a file, and {strange[0]} has no adapter")
        if ".mlp." in name and getattr(getattr(config, "family", None), "experts", None):
            raise ValueError(f"{name}: in a {config.model_type} peft takes it for the experts'")
        first = layers[parts[0]].lora_A
        if any(layers[part].lora_A is not first for part in parts):
            raise ValueError(
                f"{name} is one matrix in a file: {', '.join(parts)} must share lora_A"
            )
        pieces = [layers[part].lora_B.weight.detach().cpu() for part in parts]
        whole = join_qkv(pieces, config) if len(pieces) > 1 else pieces[0]
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = first.weight.detach().cpu().contiguous()
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = whole.contiguous()
    _check_finite(tensors)
    if any(resolve(folder / name).exists() for name in ("config.json", "model.safetensors")):
        message = f"{folder} holds a model: an adapter beside it would be taken for a part of it"
        raise ValueError(message)
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "use_rslora": use_rslora,
        "target_modules": _written_targets(model, list(names)),
        "fan_in_fan_out": getattr(config, "model_type", None) == "gpt2",
        "bias": "none",
        "inference_mode": True,
    }
    size = sum(t.nbytes for t in tensors.values())
    with transaction(folder, remove=["adapter_model.bin"], num_bytes=size) as staging:
        write_json(staging / _CONFIG, content)
        write_tensors(staging / _WEIGHTS, tensors)


def _written_targets(model: nn.Module, names: list[str]) -> list[str]:
    """The last parts of the names if they mean these layers and no others, else whole names."""
    short = sorted({name.rpartition(".")[2] for name in names})
    meant = _meant(linear_layers(model), short)
    return short if sorted(meant) == sorted(names) else sorted(names)


def _check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raises: ValueError that names what is NaN or infinite."""
    if bad := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise ValueError(f"NaN or infinite: {', '.join(bad[:5])}")


def load_adapter(model: nn.Module, folder: str | os.PathLike[str]) -> list[str]:
    """Put the adapter of a folder onto its base model, as `add_lora` does; returns the layers.

    Reads what `save_adapter` and peft write. The model must be the one that the adapter was trained
    on: shapes are compared, and numbers cannot be.

    Raises: ValueError, before anything is changed, for a setting that we do not compute, layers
        that are not those that the settings choose in this model, another shape, weights that are
        missing, unexpected, NaN or integers, a model that has adapters; FileNotFoundError if the
        folder holds no adapter.
    """
    folder = Path(folder)
    with suppress(OSError):  # not ours to write, or in use: then read where it lies
        recover(folder)
    settings, targets, narrowing = _read_settings(folder)
    if not resolve(folder / _WEIGHTS).is_file():
        raise FileNotFoundError(f"{folder} has no {_WEIGHTS}")
    pairs = _read_pairs(model, dict(tensors_of(folder / _WEIGHTS)), folder)
    layers = linear_layers(model)
    meant = _narrowed(_meant(layers, targets), targets, narrowing)
    if missing := [name for name in meant if name not in pairs]:
        which = f"{len(missing)} of {len(meant)} layers that its settings choose in this model"
        raise ValueError(f"{folder}: no weights for {which}, the first {missing[0]}: another base?")
    for name, (a, b) in pairs.items():
        if name not in meant:
            raise ValueError(f"{folder}: weights of {name}, which its target_modules do not name")
        modules = [model.get_submodule(part) for part in layers[name]]
        for module in modules:
            values = (settings["rank"], settings["alpha"], settings["dropout"])
            _check_adapter(name, module, *values)
        rows = sum(module.out_features for module in modules)  # type: ignore[misc]
        wanted = ((settings["rank"], modules[0].in_features), (rows, settings["rank"]))
        if (found := (tuple(a.shape), tuple(b.shape))) != wanted:
            raise ValueError(f"{folder}: A and B of {name} are {found}, not {wanted}")
    _insert(model, list(pairs), settings, seed=0)
    with torch.no_grad():
        for name, (a, b) in pairs.items():
            found_layers: list[Any] = [model.get_submodule(part) for part in layers[name]]
            config: Any = getattr(model, "config", None)
            pieces = split_qkv(b, config) if len(found_layers) > 1 else [b]
            for layer, piece in zip(found_layers, pieces, strict=True):
                layer.lora_A.weight.copy_(a)
                layer.lora_B.weight.copy_(piece)
    return list(pairs)


def _narrowed(
    names: Sequence[str], targets: str | Collection[str], narrowing: Mapping[str, Any]
) -> list[str]:
    """Of the layers that targets mean, those that the further settings leave, as in peft.

    A whole name among the targets means its layer, whatever number that has.
    """
    excluded, numbers, parents = (narrowing[key] for key in _NARROWING)
    without = {*_meant(names, excluded)} if excluded else set()
    kept = [name for name in names if name not in without]
    if not numbers or isinstance(targets, str):
        return kept
    found = [re.compile(rf"(?:^|.*?\.){re.escape(parent)}\.([0-9]+)\.") for parent in parents]
    found = found or [re.compile(r".*?\.[^.]*\.([0-9]+)\.")]
    of_layer = {name: next(filter(None, (p.match(name) for p in found)), None) for name in kept}
    chosen = {name for name, match in of_layer.items() if match and int(match[1]) in numbers}
    return [name for name in kept if name in targets or name in chosen]


def _read_narrowing(content: dict[str, Any]) -> dict[str, Any]:
    """Takes the settings that choose among layers out of a config, numbers and names as lists.

    Raises: ValueError for one of another kind.
    """
    found = {key: content.pop(key, None) or [] for key in _NARROWING}
    excluded, numbers, parents = found.values()
    found["layers_to_transform"] = numbers = [numbers] if type(numbers) is int else numbers
    found["layers_pattern"] = parents = [parents] if isinstance(parents, str) else parents
    names = {"exclude_modules": excluded, "layers_pattern": parents}
    for key, given in names.items():
        if key == "exclude_modules" and isinstance(given, str):
            continue  # a pattern
        if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
            raise ValueError(f"{key} must be names, not {given!r:.60}")
    if not isinstance(numbers, list) or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"layers_to_transform must be numbers of layers, not {numbers!r:.60}")
    return found


def _read_settings(folder: Path) -> tuple[dict[str, Any], str | list[str], dict[str, Any]]:
    """Rank, alpha and the like, the targets, and what chooses among them, of an adapter's config.

    Raises: ValueError that names each setting that we do not compute or that makes no sense;
        FileNotFoundError if there is no config.
    """
    content, where = read_json(folder / _CONFIG), folder / _CONFIG
    if (kind := content.pop("peft_type", None)) != "LORA":
        raise ValueError(f"{where}: peft_type is {kind!r:.60}, only 'LORA' is read")
    settings = {
        "rank": content.pop("r", 8),  # what is not there has peft's default
        "alpha": content.pop("lora_alpha", 8),
        "use_rslora": content.pop("use_rslora", None) or False,
        "dropout": content.pop("lora_dropout", 0.0),
    }
    targets = content.pop("target_modules", None)
    named = isinstance(targets, list) and all(isinstance(target, str) for target in targets)
    if not targets or not (named or isinstance(targets, str)):
        raise ValueError(f"{where}: target_modules must be names or a pattern, not {targets!r:.60}")
    try:
        narrowing = _read_narrowing(content)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if not isinstance(settings["use_rslora"], bool):
        raise ValueError(f"{where}: use_rslora is {settings['use_rslora']!r:.60}")
    bias, init = content.pop("bias", "none"), content.pop("init_lora_weights", True)
    refused = [f"{k:.60}={v!r:.60}" for k, v in content.items() if v and k not in _FREE]
    if bias not in ("none", None):
        refused.append(f"bias={bias!r:.60}")
    if init not in (True, False, None, "gaussian", "orthogonal"):  # others change the base, too
        refused.append(f"init_lora_weights={init!r:.60}")
    if refused:
        raise ValueError(f"{where}: we do not compute {', '.join(sorted(refused))}")
    return settings, targets, narrowing


def _read_pairs(
    model: nn.Module, tensors: dict[str, Tensor], folder: Path
) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of each layer.

    Raises: ValueError for weights that are missing, unexpected, NaN, integers or another base's.
    """
    known, config = linear_layers(model), getattr(model, "config", None)
    embedding = layer_name("model.embed_tokens", config)
    bases = {"lm_head": "lm_head", embedding: "model.embed_tokens"}
    for key in list(tensors):  # beside an adapter of the head peft writes the head itself
        name = re.sub(r"(\.base_layer)?\.weight$", "", key.removeprefix(_PREFIX))
        if name in bases:
            ours = model.get_submodule(bases[name]).get_parameter("weight")
            if not torch.equal(tensors[key].to(ours), ours):
                raise ValueError(f"{folder}: {key} is not the model's: it has another base")
            del tensors[key]
    pattern = re.compile(re.escape(_PREFIX) + r"(.+)\.lora_[AB]\.weight")
    found = {key: pattern.fullmatch(key) for key in tensors}
    if strange := [key for key, match in found.items() if match is None]:
        raise ValueError(f"{folder}: unexpected: {', '.join(sorted(strange)[:5])}")
    names = sorted({match[1] for match in found.values() if match})
    if absent := [name for name in names if name not in known]:
        which = f"{len(absent)} of {len(names)} layers, the first {absent[0]}"
        raise ValueError(f"{folder}: an adapter for linear layers that are not there: {which}")
    keys = [f"{_PREFIX}{name}.lora_{part}.weight" for name in names for part in "AB"]
    if missing := [key for key in keys if key not in tensors]:
        raise ValueError(f"{folder}: missing: {', '.join(missing[:5])}")
    if not names:
        raise ValueError(f"{folder / _WEIGHTS} holds no adapter")
    if other := [f"{key} is {t.dtype}" for key, t in tensors.items() if t.dtype not in _DTYPES]:
        raise ValueError(f"{folder}: no numbers of 16 to 64 bits: {', '.join(other[:5])}")
    _check_finite(tensors)
    it = iter(tensors[key] for key in keys)
    return dict(zip(names, zip(it, it, strict=True), strict=True))
