"""Page 18's cells against trl's losses, exhaustive enumeration and closed forms; its tables."""

import csv
import itertools
import json
import math
import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from minillm.sampling import Sampler
from minillm.stories.language import StoryLanguage

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "notebooks" / "beyond" / "18_rewards.ipynb"
TRL = json.loads((ROOT / "tests" / "trl_losses.json").read_text(encoding="utf-8"))
SMALL = """
pool traits: is
shy
brave

pool animals: is
fox
bear
owl

rule story
3- A {trait:traits} {kind:animals} slept.
2- The {kind:animals} ran.
"""


@pytest.fixture
def page(monkeypatch):
    """What the page's cells with the tag `runs` define, anew for each test."""
    monkeypatch.chdir(PAGE.parent)
    names = {}
    for cell in json.loads(PAGE.read_text(encoding="utf-8"))["cells"]:
        if "runs" in cell["metadata"].get("tags", []):
            exec("".join(cell["source"]), names)
    return names


def table(name):
    with (ROOT / "assets" / "rewards" / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def two_tokens(drawn):
    """A model of two tokens that gives token 0, at each place, the log-probability `drawn`."""
    return lambda ids: torch.stack([drawn, torch.log1p(-drawn.exp())], dim=-1)


@pytest.fixture
def small():
    """All texts of a small language: their probabilities and rewards, in float64."""
    language = StoryLanguage(grammar=SMALL)
    texts = sorted(set(language.corpus(2000, seed=0)))
    p = [math.exp(language.score(text)) for text in texts]
    assert len(texts) == 9 and math.isclose(sum(p), 1)
    return p, [float("fox" in text) for text in texts]


@pytest.mark.parametrize("corrected", [False, True])
def test_grpo_is_trls(page, corrected):
    wanted = TRL["grpo, corrected" if corrected else "grpo"]
    drawn = torch.tensor(TRL["drawn"], requires_grad=True)
    page["model"] = two_tokens(torch.tensor(TRL["ref"]))
    ids = torch.zeros(len(drawn), drawn.shape[1] + 1, dtype=torch.long)
    r = torch.tensor(TRL["rewards"])
    loss = page["grpo"](two_tokens(drawn), ids, r, beta=TRL["beta"], size=4, corrected=corrected)
    loss.backward()
    assert loss.item() == pytest.approx(wanted["loss"], rel=1e-5)
    torch.testing.assert_close(drawn.grad, torch.tensor(wanted["gradient"]))


def test_dpo_is_trls(page):
    drawn = torch.tensor(TRL["drawn"], requires_grad=True)
    loss = page["pair_loss"](drawn, torch.tensor(TRL["ref"]), beta=TRL["beta"])
    loss.backward()
    assert loss.item() == pytest.approx(TRL["dpo"]["loss"], rel=1e-5)
    torch.testing.assert_close(drawn.grad, torch.tensor(TRL["dpo"]["gradient"]))


def test_reinforce_is_williams_equation_with_the_others_as_baseline(page):
    drawn = torch.tensor(TRL["drawn"], requires_grad=True)
    ref, r, beta = TRL["ref"], TRL["rewards"], 0.3
    page["model"] = two_tokens(torch.tensor(ref))
    ids = torch.zeros(len(drawn), drawn.shape[1] + 1, dtype=torch.long)
    page["reinforce"](two_tokens(drawn), ids, torch.tensor(r), beta=beta).backward()
    rows = list(zip(r, TRL["drawn"], ref, strict=True))
    v = [reward - beta * (sum(row) - sum(other)) for reward, row, other in rows]
    for i, gradient in enumerate(drawn.grad.tolist()):
        b = sum(v[:i] + v[i + 1 :]) / (len(v) - 1)
        assert gradient == pytest.approx([-(v[i] - b) / len(v)] * drawn.shape[1], rel=1e-4)


def test_the_exact_kl_has_the_same_mean_gradient_and_less_noise(page):
    """Two tokens of a binary alphabet: every batch of two rollouts is enumerated."""
    torch.manual_seed(0)
    weights = torch.randn(3, dtype=torch.float64).requires_grad_()
    page["model"] = lambda ids: torch.zeros(*ids.shape, 2, dtype=torch.float64)

    def policy(ids):  # the second token depends on the first
        first = weights[0].expand(len(ids))
        second = torch.where(ids[:, 1] == 1, weights[1], weights[2])
        logits = torch.stack([first, second], dim=1)
        return torch.stack([torch.zeros_like(logits), logits], dim=-1)

    every = torch.tensor([[0, a, b] for a in (0, 1) for b in (0, 1)])
    reward = torch.tensor([0.0, 1.0, 0.5, 0.0], dtype=torch.float64)
    pi = page["of_drawn"](page["log_probs"](policy, every), every).sum(-1).exp()
    (wanted,) = torch.autograd.grad(
        (pi * reward).sum() - 0.2 * (pi * (pi * 4).log()).sum(), weights, retain_graph=True
    )
    noise = {}
    for loss in ("reinforce", "exact_kl"):
        mean, square = torch.zeros(3, dtype=torch.float64), 0.0
        for i, j in itertools.product(range(4), repeat=2):
            value = page[loss](policy, every[[i, j]], reward[[i, j]], beta=0.2)
            (gradient,) = torch.autograd.grad(-value, weights)
            mean += (pi[i] * pi[j]).detach() * gradient
            square += (pi[i] * pi[j]).item() * gradient.square().sum().item()
        torch.testing.assert_close(mean, wanted)
        noise[loss] = square
    assert noise["exact_kl"] < noise["reinforce"]


def test_the_best_policy_in_closed_form_is_that_of_the_enumeration(page, small):
    p, r = small
    q = sum(a * b for a, b in zip(p, r, strict=True))
    for beta in (0.1, 0.2, 1.0):
        s, kl, J = page["best"](q, beta)
        weights = [a * math.exp(b / beta) for a, b in zip(p, r, strict=True)]
        star = [w / sum(weights) for w in weights]
        assert s == pytest.approx(sum(a for a, b in zip(star, r, strict=True) if b))
        assert kl == pytest.approx(sum(a * math.log(a / b) for a, b in zip(star, p, strict=True)))
        assert pytest.approx(beta * math.log(sum(weights))) == J == pytest.approx(s - beta * kl)
        for seed in range(50):  # and nothing near it is better
            rng = random.Random(seed)
            near = [a * math.exp(rng.gauss(0, 0.3)) for a in star]
            pi = [a / sum(near) for a in near]
            reward = sum(a * b for a, b in zip(pi, r, strict=True))
            assert reward - beta * sum(a * math.log(a / b) for a, b in zip(pi, p, strict=True)) < J


def test_best_of_n_lies_on_the_frontier(page, small):
    """All triples of texts, ties shared out: success and KL of best of three."""
    p, r = small
    q = sum(a * b for a, b in zip(p, r, strict=True))
    pi = Counter()
    for triple in itertools.product(range(len(p)), repeat=3):
        best = [i for i in triple if r[i] == max(r[j] for j in triple)]
        for i in best:
            pi[i] += math.prod(p[j] for j in triple) / len(best)
    s = sum(share for i, share in pi.items() if r[i])
    kl = sum(share * math.log(share / p[i]) for i, share in pi.items())
    assert s == pytest.approx(1 - (1 - q) ** 3)
    assert kl == pytest.approx(page["least_kl"](s, q))
    assert kl < math.log(3) - 2 / 3


def test_pass_at_k_is_the_mean_of_the_estimate_from_draws(page):
    p, n = 0.3, 7
    for k in (1, 2, 5, 7):
        mean = sum(
            math.comb(n, c)
            * p**c
            * (1 - p) ** (n - c)
            * (1 - math.comb(n - c, k) / math.comb(n, k))
            for c in range(n + 1)
        )
        assert page["pass_at"](k, torch.tensor([p, p])) == pytest.approx(mean, rel=1e-5)


def test_no_two_batches_share_random_numbers():
    seeds = [1000 * seed + step for seed in range(3) for step in range(38)] + [900_000, 900_001]
    streams = {Sampler(seed=s).stream(row).initial_seed() for s in seeds for row in range(128)}
    assert len(streams) == 128 * len(seeds)


def test_no_policy_of_the_table_lies_above_the_frontier(page):
    q = float(table("reference")[0]["q"])
    found = table("methods")
    for row in found:
        s, kl = float(row["success"]), float(row["kl"])
        assert kl > page["least_kl"](s, q) - 0.03, row
    three = Counter((row["method"], row["rate"]) for row in found)
    assert {method for (method, _), count in three.items() if count == 3} == {
        row["method"] for row in found
    }
