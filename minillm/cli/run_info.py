"""run.json: what a run was asked for, from its beginning, and what came of it, at its end.

Written by hand.
"""

import argparse
from contextlib import suppress
from pathlib import Path
from typing import Any

from minillm.support.files import read_json, write_json

RUN_INFO = "run.json"
# the settings of RunConfig are compared with those in the checkpoint
FIXED = (
    *("family", "hidden_size", "layers", "heads", "kv_heads", "intermediate_size"),
    *("context_length", "rope_theta", "init_from", "deck_cards", "exact_targets"),
    *("head_dim", "dropout"),
)


def options(a: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, as JSON can hold it."""
    skip = ("command", "quiet", "resume", "config")
    return {k: str(v) if isinstance(v, Path) else v for k, v in vars(a).items() if k not in skip}


def read_run_info(path: Path) -> dict[str, Any]:
    """What a run.json holds. Raises: ValueError if it does not hold the options of a run."""
    info = read_json(path, nan=True)
    asked = info.get("options")
    if not isinstance(asked, dict) or not isinstance(asked.get("corpus"), str):
        raise ValueError(f"{path} does not say what the run was asked for")
    return info


def check_same_run(a: argparse.Namespace) -> None:
    """Raises: ValueError if the run in the folder began with another model or other texts."""
    from minillm.support.checks.kinds import check_settings

    path = a.output_dir / RUN_INFO
    if not path.exists():
        return
    try:
        saved = read_run_info(path)["options"]
    except ValueError as error:
        raise ValueError(f"{error}: remove it to resume without the comparison") from None
    both = []
    for given in (saved, options(a)):
        corpus = Path(given["corpus"]).name  # its folder may have moved
        fixed = {name: given.get(name) or None for name in FIXED}  # a dropout of 0 is none
        both.append({"corpus": corpus, **fixed})
    check_settings(*both)


def begin_run_info(a: argparse.Namespace) -> None:
    """Write down what was asked for; a run that is resumed has done so before."""
    path = a.output_dir / RUN_INFO
    if not (a.resume and path.exists()):
        write_json(path, {"options": options(a)})


def finish_run_info(
    a: argparse.Namespace, figures: dict[str, Any], history: list[dict[str, Any]]
) -> dict[str, Any]:
    """Add what came of it; a run that had already ended keeps its old results."""
    path = a.output_dir / RUN_INFO
    old: dict[str, Any] = {}
    if not history:
        with suppress(FileNotFoundError, ValueError):  # none, or a damaged one
            old = read_run_info(path)
    took = {"seconds": old.get("seconds", figures["seconds"])}
    info = {**old, "options": options(a), **figures, **took, **(history[-1] if history else {})}
    write_json(path, info)
    return info
