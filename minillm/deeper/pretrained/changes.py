"""What was changed in a model by hand, which its config cannot tell: it is refused by name.

Written by hand. A file holds a config and weights, and a packed copy holds matrices; an attention
of one's own, a hook or another scale is in neither. `save_pretrained` and `packed` ask here.
"""

import inspect
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

# What changes no score in evaluation: modes, dropout (of our layers and torch's), a warning that
# was given, and which of two equal forms is computed.
_IGNORED_ATTRIBUTES = {"training", "dropout", "p", "max_length", "absorb"}


def check_unchanged(model: Any, built: Any, lost: str, *, hooks: bool = False) -> None:
    """Compare the parts of `model` with those of `built`, which its config alone has made.

    So no table of classes is needed, and every family's parts are known. Compared are classes,
    methods and values set on an instance, shapes, ties, angles of a rotation; not weights. Adapters
    (`minillm.beyond.lora.lora`) are for `check_merged` to judge.

    Args:
        built: may lie on the meta device.
        lost: what would happen to a change, for the message.
        hooks: whether forward hooks are changes, too.
    Raises: ValueError that names the part and says what it is, and what it should be.
    """
    if hasattr(model, "packed_layers"):  # a PackedLM: its copies lie beside the model's own parts
        model, built = (
            nn.ModuleDict({"model": m.model, "lm_head": m.lm_head}) for m in (model, built)
        )
    if hooks and (torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks):
        raise ValueError(f"there is a forward hook for all modules: {lost}")
    parts: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    wanted: dict[str, nn.Module] = dict(built.named_modules(remove_duplicate=False))
    for name in wanted | parts:
        if ".lora_" in name or hasattr(parts.get(name.rpartition(".")[0]), "lora_A"):
            continue
        if change := _change(parts.get(name), wanted.get(name), hooks):
            raise ValueError(f"{name or 'the model'} {change}: {lost}")
    first: dict[Tensor, str] = {}
    for name, weight in built.named_parameters(remove_duplicate=False):
        if (twin := first.setdefault(weight, name)) == name:
            continue
        ours, other = model.get_parameter(name), model.get_parameter(twin)
        if ours is not other and not torch.equal(ours, other):
            raise ValueError(f"{name} differs from {twin}, by the config they are one: {lost}")


def _change(part: nn.Module | None, wanted: nn.Module | None, hooks: bool) -> str | None:
    """What is different in a part, as the end of a sentence."""
    if part is None:
        return f"is not there, its config makes a {type(wanted).__name__}"
    if hooks and (part._forward_hooks or part._forward_pre_hooks):
        by_family = part is not wanted and getattr(wanted, "_forward_hooks", None)
        return "changes its scores, as its family does" if by_family else "has a forward hook"
    if part is wanted or hasattr(part, "lora_A"):
        return None
    if not same_class(type(part), type(wanted)):
        ours, theirs = (f"{type(p).__module__}.{type(p).__qualname__}" for p in (part, wanted))
        return f"is a {ours}, its config makes {'none' if wanted is None else f'a {theirs}'}"
    set_here, by_config = vars(part), vars(wanted)
    for key in set_here.keys() - by_config.keys() - {"_compiled_call_impl"}:
        if hasattr(type(part), key):
            return f"has its own {key} in the place of its class's"
    for key, value in by_config.items():
        found = set_here.get(key)
        if key[0] != "_" and key not in _IGNORED_ATTRIBUTES and not _same(found, value):
            return f"has {key}={found!r:.60}, its config says {value!r:.60}"
    for kind in ("_parameters", "_buffers"):
        for key, tensor in by_config[kind].items():
            found = set_here[kind].get(key)
            shapes = [None if t is None else tuple(t.shape) for t in (found, tensor)]
            if shapes[0] != shapes[1]:
                return f"has {key} {shapes[0]}, its config makes {shapes[1]}"
    for key in part._non_persistent_buffers_set & by_config["_buffers"].keys():
        found, tensor = set_here["_buffers"][key], by_config["_buffers"][key]
        if tensor is None or tensor.is_meta or found.is_meta:
            continue
        if not torch.allclose(found.to(tensor), tensor, rtol=1e-5):  # devices differ in last digits
            return f"has another {key} than its config makes"
    return None


def same_class(ours: type, theirs: type) -> bool:
    """Whether they are one; or, on a page that builds the class itself, the same lines."""
    if ours is theirs or ours.__name__ != theirs.__name__ or ours.__module__ != "__main__":
        return ours is theirs
    here = [c for c in ours.__mro__ if c.__module__ == "__main__"]  # a class and its reopenings
    names = {name for c in (*here, theirs) for name in vars(c)}
    pairs = [(getattr(ours, n, None), getattr(theirs, n)) for n in names if hasattr(theirs, n)]
    with suppress(OSError):
        return all(_lines(a) == _lines(b) for a, b in pairs)
    return False


def _lines(method: Any) -> str | None:
    """The source of a method; None of what is no function. Raises: OSError if there is none."""
    return inspect.getsource(method) if hasattr(method, "__code__") else None


def _same(a: Any, b: Any) -> bool:
    """Equality of settings; a copied model has copies of partial functions, which are not equal."""
    if isinstance(a, partial) and isinstance(b, partial):
        return (a.func, a.args, a.keywords) == (b.func, b.args, b.keywords)
    if hasattr(a, "eos_token_id") and type(a) is type(b):  # configs: what ends a text is no part
        a, b = ({k: v for k, v in vars(c).items() if k[-9:] != "_token_id"} for c in (a, b))
    return a is b or (type(a) is type(b) and bool(a == b))
