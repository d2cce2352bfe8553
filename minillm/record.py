"""run.json: what a run was asked for, from its beginning, and what came of it, at its end.

Used by `minillm.commands`; written by hand, not built.
"""

from __future__ import annotations

from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from typing import Any

from minillm.training.data import check_settings
from minillm.utils import read_json, write_json

__all__ = ["begin", "check_same", "finish", "options"]

NAME = "run.json"
# the settings of TrainConfig are compared with those in the checkpoint
FIXED = ["family", "hidden_size", "layers", "heads", "kv_heads", "intermediate_size"]
FIXED += ["context_length", "rope_theta", "init_from", "deck_cards", "exact_targets"]


def options(a: Namespace) -> dict[str, Any]:
    """What was asked for, as JSON can hold it."""
    skip = ("command", "quiet", "resume")
    return {k: str(v) if isinstance(v, Path) else v for k, v in vars(a).items() if k not in skip}


def check_same(a: Namespace) -> None:
    """Raises: ValueError if the run in the folder began with another model or other texts."""
    path = a.out / NAME
    if not path.exists():
        return
    try:
        saved = read_json(path).get("options")
        if not isinstance(saved, dict) or not isinstance(saved.get("corpus"), str):
            raise ValueError(f"{path} does not say what the run was asked for")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{error}: remove it to resume without the comparison") from None
    both = []
    for given in (saved, options(a)):
        corpus = Path(given["corpus"]).name  # its folder may have moved
        both.append({"corpus": corpus, **{name: given.get(name) for name in FIXED}})
    check_settings(*both)


def begin(a: Namespace) -> None:
    """Write down what was asked for, unless the run has begun before."""
    if not (a.out / NAME).exists():
        write_json(a.out / NAME, {"options": options(a)})


def finish(a: Namespace, figures: dict[str, Any], history: list[dict[str, Any]]) -> dict[str, Any]:
    """Add what came of it; a run that had already ended keeps its old results."""
    old: dict[str, Any] = {}
    if not history:
        with suppress(FileNotFoundError, ValueError, RecursionError):  # none, or a damaged one
            old = read_json(a.out / NAME)
    took = {"seconds": old.get("seconds", figures["seconds"])}
    run_info = {**old, "options": options(a), **figures, **took, **(history[-1] if history else {})}
    write_json(a.out / NAME, run_info)
    return run_info
