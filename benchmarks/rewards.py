"""The runs behind beyond/18_rewards: each method at several rates, three seeds, and the controls.

    OMP_NUM_THREADS=1 python benchmarks/rewards.py            all parts
    OMP_NUM_THREADS=1 python benchmarks/rewards.py sums foxes  these only

Runs the cells of the page that carry the tag `runs`, so that page and tables come from the same
lines, and writes assets/rewards/: reference.csv (q), methods.csv (success and KL of each policy,
and where the KL lies), sums.csv (pass@k), foxes.csv (pay for every fox). Rows that a file holds
already are skipped; who wants them anew removes it first. Twelve minutes of CPU time on one thread.
"""

import csv
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "notebooks" / "beyond" / "18_rewards.ipynb"
FOLDER = ROOT / "assets" / "rewards"
SEEDS = 0, 1, 2
Row = dict[str, Any]


def page() -> dict[str, Any]:
    """What the tagged cells of the page define."""
    names: dict[str, Any] = {}
    for cell in json.loads(PAGE.read_text(encoding="utf-8"))["cells"]:
        if "runs" in cell["metadata"].get("tags", []):
            code = compile("".join(cell["source"]), f"{PAGE.name}, cell {cell['id']}", "exec")
            exec(code, names)
    return names


def rows_of(file: str) -> list[Row]:
    path = FOLDER / file
    return list(csv.DictReader(path.open(encoding="utf-8"))) if path.exists() else []


def add(file: str, keys: Row, make: Callable[[], Row]) -> None:
    """A row to the file unless it has one with these keys."""
    rows = rows_of(file)
    if any(all(row[k] == str(v) for k, v in keys.items()) for row in rows):
        return
    found = keys | {k: f"{v:.4f}" if isinstance(v, float) else v for k, v in make().items()}
    with (FOLDER / file).open("a", newline="", encoding="utf-8") as target:
        writer = csv.DictWriter(target, found, lineterminator="\n")
        if not rows:
            writer.writeheader()
        writer.writerow(found)
    print(file, found, flush=True)


def reference(names: dict[str, Any]) -> None:
    """reference.csv: q, the share of foxes in 65,536 rollouts of the model."""

    def row() -> Row:
        with torch.no_grad():
            parts = [names["rollouts"](names["model"], 1024, 800_000 + i) for i in range(64)]
        return {"q": torch.cat([names["hero_is_fox"](ids) for ids in parts]).mean().item()}

    add("reference.csv", {"rollouts": 65536}, row)


def point(names: dict[str, Any], method: str, train: Any, rate: float, seed: int) -> None:
    """One row of methods.csv."""

    def row() -> Row:
        policy = train(rate=rate, seed=seed)
        success, kl = names["measure"](policy)
        before, at, after = names["by_place"](policy)
        return {"success": success, "kl": kl, "before": before, "at": at, "after": after}

    add("methods.csv", {"method": method, "rate": rate, "seed": seed}, row)


def best_rate(method: str, beta: float) -> float:
    """The rate with the best mean J, over the seeds that all its rates have."""
    found: dict[float, list[float]] = {}
    for row in rows_of("methods.csv"):
        if row["method"] == method:
            J = float(row["success"]) - beta * float(row["kl"])
            found.setdefault(float(row["rate"]), []).append(J)
    least = min(map(len, found.values()))
    return max(found, key=lambda rate: sum(found[rate][:least]))


def methods(names: dict[str, Any]) -> None:
    """Each method at its rates; those that learn from one set of draws search it on seed 0."""
    learn, fit = names["learn"], names["fit"]
    for method, train, loss, rates, seeds in [
        ("reinforce", learn, "reinforce", [2.5e-4, 5e-4, 7e-4, 1e-3], SEEDS),
        ("winners", fit, "winners", [1e-4, 2e-4, 4e-4, 8e-4], SEEDS[:1]),
        ("dpo", fit, "dpo", [3e-5, 6e-5, 1.2e-4], SEEDS[:1]),
        ("grpo", learn, "grpo", [2.5e-4, 5e-4, 1e-3], SEEDS),
        ("dpo, soft labels", fit, "soft_labels", [2e-4, 4e-4, 8e-4], SEEDS[:1]),
    ]:
        for rate in rates:
            for seed in seeds:
                point(names, method, partial(train, names[loss]), rate, seed)
        for seed in SEEDS:
            best = best_rate(method, names["BETA"])
            point(names, method, partial(train, names[loss]), best, seed)


def controls(names: dict[str, Any]) -> None:
    """Also in methods.csv: one thing changed, at the best rate of what it is compared with."""
    learn, fit = names["learn"], names["fit"]
    for control, train in {
        "winners, weighted": partial(fit, names["weighted"]),
        "winners, 4 times the draws": partial(fit, names["winners"], batches=120),
        "reinforce, 4 times the batch": partial(learn, names["reinforce"], count=512),
        "reinforce, 38 steps": partial(learn, names["reinforce"], steps=38),
        "grpo, not divided": partial(learn, partial(names["grpo"], divide=False)),
        "grpo, corrected": partial(learn, partial(names["grpo"], corrected=True)),
        "reinforce, exact kl": partial(learn, names["exact_kl"]),
    }.items():
        for seed in SEEDS:
            rate = best_rate(control.partition(",")[0], names["BETA"])
            point(names, control, train, rate, seed)
    for seed in SEEDS:  # sure labels at the rate of the soft ones
        rate = best_rate("dpo, soft labels", names["BETA"])
        point(names, "dpo", partial(fit, names["dpo"]), rate, seed)


def sums(names: dict[str, Any]) -> None:
    """sums.csv: pass@k before and after, with rewards, with answers told, with both in turn."""
    practise = names["practise"]

    def row(way: str, rate: float, seed: int) -> Row:
        policy = names["model"]
        first, _, then = way.rpartition(", then ")
        if first:
            policy = practise(names[first], rate=2e-3, seed=10 + seed, steps=40)
        if rate:
            policy = practise(names[then], rate=rate, seed=seed, start=policy)
        p, pairs = names["chances"](policy)
        found = {f"pass@{k}": names["pass_at"](k, p) for k in (1, 4, 16, 64, 256)}
        for pair in sorted(set(pairs)):
            own = p[[other == pair for other in pairs]]
            found["{}+{}".format(*pair)] = own.mean().item()
        return found

    def ways(way: str, rate: float, seed: int) -> None:
        add("sums.csv", {"way": way, "rate": rate, "seed": seed}, partial(row, way, rate, seed))

    ways("before", 0.0, 0)
    for way in ("told", "told, then rewarded", "shuffled, then rewarded", "rewarded"):
        for seed in SEEDS if "then" in way else ():
            ways(way, 0.0, seed)  # where the rewards begin
        for rate in (5e-4, 1e-3, 2e-3):
            ways(way, rate, 0)
        found = [r for r in rows_of("sums.csv") if r["way"] == way and float(r["rate"])]
        found = [r for r in found if r["seed"] == "0"]
        best = float(max(found, key=lambda r: float(r["pass@1"]))["rate"])
        for seed in SEEDS[1:]:
            ways(way, best, seed)


def foxes(names: dict[str, Any]) -> None:
    """foxes.csv: pay for every fox, at two prices."""

    def row(beta: float, seed: int) -> Row:
        policy = names["hack"](beta, seed)
        ids = names["rollouts"](policy, 512, 900_000, 24)
        found = names["texts"](ids)
        return {
            "foxes": names["count_foxes"](ids).mean().item(),
            "success": names["hero_is_fox"](ids).mean().item(),
            "valid": sum(map(names["is_opening"], found)) / len(found),
            "text": found[0],
        }

    for beta in (0.0, 0.2):
        for seed in SEEDS:
            add("foxes.csv", {"beta": beta, "seed": seed}, partial(row, beta, seed))


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    os.chdir(PAGE.parent)
    parts: list[Callable[[dict[str, Any]], None]] = [reference, methods, controls, sums, foxes]
    only = sys.argv[1:]
    for part in parts:
        if not only or part.__name__ in only:
            part(page())


if __name__ == "__main__":
    main()
