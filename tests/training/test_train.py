"""The loop: its gradients, records and refusals; a plain loop as oracle."""

import math
import subprocess
import sys
import textwrap
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training_runs import TOKENS, Tiny, V, tiny

from minillm.training import (
    TrainConfig,
    WindowBatches,
    cosine_schedule,
    cross_entropy,
    decay_groups,
    gradients,
    train,
)


def windows(seed=3):
    return WindowBatches(TOKENS, 4, 12, seed=seed)


def ragged(generator):
    """Eight rows, of which two have fewer targets that count."""
    x = torch.randint(V, (8, 10), generator=generator)
    y = x.roll(-1, 1)
    y[0, 2:] = y[3, 5:] = -100
    return x, y


def test_train_equals_a_plain_loop():
    ours, model = tiny().double(), tiny().double()
    config = TrainConfig(12, warmup_steps=4, log_interval=4, weight_decay=0.2, max_norm=0.5)
    history = train(ours, windows(), config)
    source, losses, norms = windows(), [], []
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(decay_groups(model, 0.2), betas=(0.9, 0.95), eps=1e-8)
    for step in range(12):
        for group in optimizer.param_groups:
            group["lr"] = cosine_schedule(step, 1e-3, 1e-4, 4, 12)
        x, y = next(source)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        losses.append(loss.item())
    for p, q in zip(ours.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-10)
    assert [r["step"] for r in history] == [4, 8, 12]
    for i, record in enumerate(history):
        assert record["loss"] == pytest.approx(np.mean(losses[4 * i : 4 * i + 4]), rel=1e-5)
        assert record["tokens"] == 48 * record["step"]
        assert record["grad_norm"] == pytest.approx(norms[4 * i + 3], rel=1e-5)
        assert record["lr"] == cosine_schedule(4 * i + 3, 1e-3, 1e-4, 4, 12)


def test_gradients_of_pieces_are_those_of_the_whole(generator):
    x, y = ragged(generator)
    whole, pieces = tiny(dropout=0.0).double(), tiny(dropout=0.0).double()
    parts = [(x[i : i + 2], y[i : i + 2]) for i in range(0, 8, 2)]
    one = gradients(whole, iter([(x, y)]), TrainConfig(1, max_norm=0.1))
    config = TrainConfig(1, max_norm=0.1, gradient_accumulation_steps=4)
    four = gradients(pieces, iter(parts), config)
    assert one[1] == four[1] == int((y != -100).sum()) == 80 - 13
    for a, b in zip(one, four, strict=True):
        assert float(a) == pytest.approx(float(b), rel=1e-10)
    reference = tiny(dropout=0.0).double()
    cross_entropy(reference(x), y).backward()
    loss = cross_entropy(reference(x), y).item()
    assert float(one[0]) / 67 == pytest.approx(loss, rel=1e-10)
    norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    assert float(norm) == pytest.approx(float(one[2]), rel=1e-10)
    models = [m.parameters() for m in (whole, pieces, reference)]
    for p, q, r in zip(*models, strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(p.grad, r.grad, rtol=1e-4, atol=1e-9)


def test_gradients_begin_at_zero():
    model, again = tiny(dropout=0.0), tiny(dropout=0.0)
    for _ in range(2):
        gradients(model, windows(), TrainConfig(1))
    gradients(again, windows(), TrainConfig(1))
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_a_batch_without_targets_leaves_the_weights():
    x, y = torch.ones(2, 3, dtype=torch.long), torch.full((2, 3), -100)
    model, before = tiny(), tiny()
    config = TrainConfig(2, log_interval=1, weight_decay=0.0)
    assert ["loss" in r for r in train(model, [(x, y)], config)] == [False, False]
    for p, q in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(p, q)


def test_the_training_does_not_notice_that_it_is_looked_at():
    calls, logged = [], []

    def validate(model):
        calls.append((model.training, torch.is_grad_enabled()))
        torch.rand(5)
        return {"bits": torch.tensor(1.5)}

    quiet, looking = tiny(dropout=0.5), tiny(dropout=0.5).eval()  # trained with its dropout
    config = TrainConfig(10, warmup_steps=2, log_interval=4, eval_interval=3)
    plain = train(quiet, windows(), TrainConfig(10, warmup_steps=2, log_interval=1))
    history = train(looking, windows(), config, validate=validate, on_log=logged.append)
    for p, q in zip(quiet.parameters(), looking.parameters(), strict=True):
        assert torch.equal(p, q)
    assert calls == [(False, False)] * 4 and looking.training and history == logged
    assert [r["step"] for r in history] == [3, 4, 6, 8, 9, 10]
    assert [r.get("bits") for r in history] == [1.5, None, 1.5, None, 1.5, 1.5]
    assert history[0]["loss"] == pytest.approx(np.mean([r["loss"] for r in plain[:3]]), rel=1e-5)
    assert all(0 < a["seconds"] <= b["seconds"] for a, b in pairwise(history))


def test_one_number_is_called_validation():
    history = train(tiny(), windows(), TrainConfig(3), validate=lambda model: 7)
    assert [r["validation"] for r in history] == [7.0]


def test_a_number_that_is_not_finite_stops_before_a_weight_moves():
    class Poisoned(Tiny):
        calls = 0

        def forward(self, ids):
            self.calls += 1
            return super().forward(ids) * (math.nan if self.calls == 4 else 1.0)

    torch.manual_seed(0)
    model, records, weights = Poisoned(), [], []

    def on_log(record):
        records.append(record)
        weights.append([p.detach().clone() for p in model.parameters()])

    config = TrainConfig(9, warmup_steps=2, log_interval=1)
    with pytest.raises(FloatingPointError, match=r"^step 3: loss nan, gradient norm nan$"):
        train(model, windows(), config, on_log=on_log)
    assert [r["step"] for r in records] == [1, 2, 3]
    assert all(map(torch.equal, weights[-1], model.parameters()))


def test_a_list_a_loader_and_a_generator_train_as_a_source_does():
    source = windows()
    batches = [next(source) for _ in range(8)]
    pairs = [(x, y) for batch in batches for x, y in zip(*batch, strict=True)]
    loader = torch.utils.data.DataLoader(pairs, batch_size=4)
    config = TrainConfig(8, warmup_steps=2, log_interval=1)
    expected = [r["loss"] for r in train(tiny(), windows(), config)]
    for other in (batches, (batch for batch in batches), loader):
        assert [r["loss"] for r in train(tiny(), other, config)] == expected


X = TOKENS[None, :9]


@pytest.mark.parametrize(
    ("model", "batches", "config", "message"),
    [
        (None, [(X, X)], TrainConfig(2), "model must be an nn.Module, .*, not None"),
        (tiny(), [(X, X)], 100, r"config must be a TrainConfig, .*, not 100"),
        (tiny(), "a story", TrainConfig(2), r"batches must give \(inputs, targets\), not be"),
        (tiny(), ["once"], TrainConfig(2), r"a batch must be \(inputs, targets\), not 'once'"),
        (tiny(), iter([(X, X)]), TrainConfig(2), "the batches ended after 1: a generator gives"),
        (tiny(), [(X, X + V)], TrainConfig(2), "targets .* outside the vocabulary of 23"),
        (tiny(), [(X, X[:, :5])], TrainConfig(2), r"logits \(1, 9, 23\) do not fit targets"),
    ],
)
def test_what_makes_no_training_is_refused(model, batches, config, message):
    with pytest.raises(ValueError, match=message):
        train(model, batches, config)


def test_settings_that_need_a_trainer_are_not_passed_over():
    from minillm.deeper.training.trainer import RunConfig

    for settings in ({"precision": "bfloat16"}, {"compile": True}):
        (name,) = settings
        with pytest.raises(ValueError, match=rf"train knows no {name}=.*: Trainer\(model, batches"):
            train(tiny(), windows(), RunConfig(2, **settings))
    assert train(tiny(), windows(), RunConfig(2, fused=False))


@pytest.mark.parametrize("names", [["loss"], ["step", "tokens", "held_out"]])
def test_validation_does_not_overwrite_a_record(names):
    clash = ", ".join(name for name in names if name != "held_out")
    with pytest.raises(ValueError, match=f"validate returned {clash}: the run records that"):
        train(tiny(), windows(), TrainConfig(2), validate=lambda model: dict.fromkeys(names, 7.0))


def test_the_rate_falls_to_a_tenth_unless_another_end_is_given():
    for max_lr in (1e-3, 5e-5, 0.0):
        config = TrainConfig(30, max_lr=max_lr, warmup_steps=20)
        assert [config.learning_rate(step) for step in (19, 30)] == [max_lr, max_lr / 10]
    assert TrainConfig(30).learning_rate(30) == 1e-4  # as it was when this was the default
    assert TrainConfig(30, min_lr=0.0).learning_rate(30) == 0.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps must be a whole number from 1 to .*, not 0"),
        ({"steps": 5, "gradient_accumulation_steps": 0}, "_steps must be a whole number from 1"),
        ({"steps": 5, "warmup_steps": -1}, "warmup_steps must be a whole number from 0 .*, not -1"),
        ({"steps": 5, "max_norm": 0.0}, "max_norm must be positive, not 0.0"),
        ({"steps": 5, "max_lr": math.inf}, "max_lr must be a number of at least 0, not inf"),
        ({"steps": 5, "betas": (0.9, 1.0)}, r"betas must be a list, .*, not \(0.9, 1.0\)"),
        ({"steps": 5, "max_lr": 1e-5, "min_lr": 1e-4}, "min_lr 0.0001 must be .* max_lr, 1e-05"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**settings)


def test_a_setting_of_a_run_is_told_where_it_is():
    for name in ("precision", "optimizer", "fused", "parallel", "compile"):
        with pytest.raises(TypeError, match=rf"TrainConfig has no {name}; .*RunConfig\({name}="):
            TrainConfig(9, **{name: 1})


def test_train_needs_the_core_alone():
    code = """
        import sys
        import torch
        from minillm.training import TrainConfig, WindowBatches, train

        train(torch.nn.Embedding(9, 9), WindowBatches(torch.arange(9), 2, 4), TrainConfig(2))
        print(*sorted(name for name in sys.modules if name.startswith("minillm")))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    ours = {name.removeprefix("minillm.") for name in done.stdout.split()} - {"minillm"}
    assert ours - {"bpe", "training"} == {name for name in ours if name.startswith("support")}
