"""How the families name, turn and fuse their weights: read into our names, and written back.

Used by `minillm.deeper.pretrained.load`; written by hand. Most use our names as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from minillm.config import ModelConfig

# What a weight may be written in. Of 8 bits nobody knows what they are to be multiplied with.
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_TRANSPOSED = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")  # GPT-2 stores (in, out)


# Buffers and modules that some files carry and no logit needs.
_IGNORED = re.compile(r"(\.attn\.(masked_)?bias|rotary_emb\.inv_freq)$")


# Of a model that also sees pictures: how files name the part for texts, and what else is there.
_TEXT = re.compile(r"^(model\.language_model|language_model\.model)\.|^language_model\.(?=lm_head)")
_PICTURES = re.compile(r"^(model\.)?(vision_tower|multi_modal_projector|visual|mtp)\.")


def _names(config: ModelConfig) -> list[tuple[str, str]]:
    """Parts of names of weights, ours and theirs; most families use ours."""
    names = config.family.names
    return list(names(config) if callable(names) else names)


def _rename(name: str, pairs: list[tuple[str, str]]) -> str:
    for old, new in pairs:
        name = name.replace(old, new)
    return name


def layer_name(name: str, config: Any) -> str:
    """A layer's name in its family's checkpoints; of a model that is none of ours, the name itself.

    In GPT-2 and Falcon q_proj, k_proj and v_proj are one layer.
    """
    if not hasattr(config, "family"):
        return name
    if config.model_type in ("gpt2", "falcon"):
        name = re.sub(r"\.self_attn\.[qkv]_proj$", ".self_attn.qkv", name)
    return _rename(f"{name}.", _names(config)).removesuffix(".")


def check_apart(names: Iterable[tuple[str, str]]) -> None:
    """Raises: ValueError if of these pairs (a file's name of a weight, ours) two are one to us."""
    first: dict[str, str] = {}
    for theirs, ours in names:
        if (other := first.setdefault(ours, theirs)) != theirs:
            raise ValueError(f"{other} and {theirs} are one weight to us, {ours}")


def read_weights(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Tensors of a checkpoint under our names: renamed, turned, split; what no logit needs is out.

    Raises: ValueError if a head that should be tied differs from the embedding, or if two tensors
        are one to us.
    """
    pairs = [(theirs, ours) for ours, theirs in _names(config)]
    found: dict[str, Tensor] = {}
    read: list[tuple[str, str]] = []  # names, theirs and ours
    for name, tensor in tensors.items():
        theirs = name
        if _IGNORED.search(name) or _is_extra_layer(name, config):
            continue
        if config.model_type.endswith("_text"):
            if _PICTURES.match(name):
                continue
            name = _TEXT.sub(lambda found: "model." if found[1] else "", name)
        if config.model_type == "gpt2":
            tensor = tensor.t() if _TRANSPOSED.search(name) and tensor.dim() == 2 else tensor
            name = name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"
        name = _rename(name.replace("backbone.embedding.", "backbone.embeddings."), pairs)
        if (
            ".shared_experts." in name
            and not tensor.numel()
            and not getattr(config, "n_shared_experts", 0)
        ):
            continue  # transformers makes an empty block of them
        if ".self_attn.qkv." in name:
            pieces = zip("qkv", split_qkv(tensor, config), strict=True)
            parts = {name.replace("qkv", f"{part}_proj"): piece for part, piece in pieces}
        else:
            parts = {name: tensor}
        found |= parts
        read += [(theirs, ours) for ours in parts]
    check_apart(read)
    _join_experts(found, config)
    if config.tie_word_embeddings and "lm_head.weight" in found:
        head = found.pop("lm_head.weight")  # alone in some files: save_model keeps one name of two
        if not torch.equal(found.setdefault("model.embed_tokens.weight", head), head):
            raise ValueError("tie_word_embeddings, but lm_head.weight differs from the embedding")
    # pieces and turned matrices lie in another one's memory, where fused optimizers would write
    return {name: tensor.contiguous() for name, tensor in found.items()}


def write_weights(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The inverse of `read_weights`: a checkpoint's tensors from ours."""
    state = dict(state)
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    _split_experts(state)
    fused: dict[str, Tensor] = {}
    for name, tensor in state.items():
        part = re.search(r"\.self_attn\.([qkv])_proj\.", name)
        if part and config.model_type in ("gpt2", "falcon"):
            if part[1] == "q":
                parts = [state[name.replace("q_proj", f"{p}_proj")] for p in "qkv"]
                fused[name.replace("q_proj", "qkv")] = join_qkv(parts, config)
            continue
        fused[name] = tensor
    pairs, out = _names(config), {}
    for name, tensor in fused.items():
        name = _rename(name, pairs)
        turn = config.model_type == "gpt2" and _TRANSPOSED.search(name)
        out[name] = (tensor.t() if turn else tensor).contiguous()
    return out


def _is_extra_layer(name: str, config: ModelConfig) -> bool:
    """DeepSeek-V3's files end with layers that predict further tokens."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    extra = layer is not None and int(layer[1]) >= config.num_hidden_layers
    return extra and config.model_type == "deepseek_v3"


_EXPERT = re.compile(r"(.*\.mlp\.experts)\.([0-9]+)\.((?:gate|up|down)_proj)\.weight")


def _join_experts(found: dict[str, Tensor], config: ModelConfig) -> None:
    """One tensor of all experts of a layer for each tensor of one; those joined already stay.

    Raises: ValueError that names what a layer lacks, and what is of another shape.
    """
    each = {name: match for name in found if (match := _EXPERT.fullmatch(name))}
    for layer in dict.fromkeys(match[1] for match in each.values()):
        stacks = []
        for part in ("gate_proj", "up_proj", "down_proj"):
            number = getattr(config, "num_experts", 0) or 0  # that may be any
            wanted = (f"{layer}.{e}.{part}.weight" for e in range(number))
            if missing := [*islice((name for name in wanted if name not in found), 20)]:
                raise ValueError(f"missing: {', '.join(missing)}, of {number} experts")
            names = [f"{layer}.{e}.{part}.weight" for e in range(number)]
            if wrong := [name for name in names if found[name].dtype not in DTYPES]:
                kind = "not floating-point numbers of 16 to 64 bits"
                raise ValueError(f"{wrong[0]} holds {found[wrong[0]].dtype}, {kind}")
            shape = found[names[0]].shape if names else ()
            if wrong := [name for name in names if found[name].shape != shape]:
                other = f"{wrong[0]} is {tuple(found[wrong[0]].shape)}"
                raise ValueError(f"{other}, that of expert 0 is {tuple(shape)}")
            stacks.append([found.pop(name) for name in names])
        if joined := sorted({f"{layer}.{n}" for n in ("gate_up_proj", "down_proj")} & found.keys()):
            raise ValueError(f"{joined[0]} is there, and beside it that of each expert")
        if all(stacks):
            gates, ups, downs = map(torch.stack, stacks)
            if gates.shape != ups.shape:
                shapes = f"{tuple(gates.shape[1:])} and {tuple(ups.shape[1:])}"
                raise ValueError(f"{layer}: gate_proj and up_proj are {shapes}")
            found[f"{layer}.gate_up_proj"] = torch.cat([gates, ups], dim=1)
            found[f"{layer}.down_proj"] = downs


def _split_experts(state: dict[str, Tensor]) -> None:
    """The inverse of `_join_experts`."""
    for name in [name for name in state if name.endswith(".mlp.experts.gate_up_proj")]:
        layer = name.removesuffix(".gate_up_proj")
        gates, ups = state.pop(name).chunk(2, dim=1)
        downs = state.pop(f"{layer}.down_proj")
        for e, parts in enumerate(zip(gates, ups, downs, strict=True)):
            for part, tensor in zip(("gate", "up", "down"), parts, strict=True):
                state[f"{layer}.{e}.{part}_proj.weight"] = tensor


def _groups(config: ModelConfig) -> tuple[int, int]:
    """Groups, and queries in each: fused rows hold a group's queries, then its key, then its value.

    GPT-2 fuses all queries, all keys and all values: one group.
    """
    if config.model_type == "gpt2":
        return 1, config.num_attention_heads
    groups = config.num_key_value_heads or config.num_attention_heads
    return groups, config.num_attention_heads // groups


def split_qkv(fused: Tensor, config: ModelConfig) -> list[Tensor]:
    """The rows of queries, of keys and of values of GPT-2's and Falcon's fused matrices.

    Shape: ((H + 2 G) D, ...) -> q (H D, ...), k and v (G D, ...).
    Raises: ValueError for another number of rows.
    """
    groups, queries = _groups(config)
    keys = queries if config.model_type == "gpt2" else 1
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    rows = [queries * head_dim, keys * head_dim, keys * head_dim]
    wanted, found = groups * sum(rows), fused.shape[0] if fused.dim() else 0
    if found != wanted:
        raise ValueError(f"query_key_value has {found} rows, the config wants {wanted}")
    pieces = fused.unflatten(0, (groups, sum(rows))).split(rows, dim=1)
    return [piece.flatten(0, 1) for piece in pieces]


def join_qkv(parts: list[Tensor], config: ModelConfig) -> Tensor:
    """The inverse of `split_qkv`."""
    groups, _ = _groups(config)
    return torch.cat([p.unflatten(0, (groups, -1)) for p in parts], dim=1).flatten(0, 1)
