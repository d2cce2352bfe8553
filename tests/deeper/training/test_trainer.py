"""The trainer: the steps of `train`, undone, resumed; a plain loop as oracle."""

import copy
import functools
import json
import math
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training_runs import (
    TOKENS,
    Failing,
    Letters,
    Listed,
    Stop,
    Tiny,
    V,
    make,
    records,
    same,
    tiny,
    weights,
)

from minillm.deeper.training import trainer as trainer_module
from minillm.deeper.training.checkpoint import load_checkpoint
from minillm.deeper.training.run import Run
from minillm.deeper.training.trainer import RunConfig, Trainer, token_byte_lengths
from minillm.support.device import rng_state, set_rng_state
from minillm.training import (
    AdamW,
    TrainConfig,
    WindowBatches,
    cosine_schedule,
    decay_groups,
    get_batch,
    train,
)


def test_a_step_without_targets_leaves_the_weights_and_goes_on():
    x, y = torch.ones(2, 3, dtype=torch.long), torch.full((2, 3), -100)
    trainer = make(source=Listed([(x, y), (x, y)]), steps=2, log_interval=1, weight_decay=0.0)
    before = weights(trainer)
    history = trainer.train()
    assert [record["step"] for record in history] == [1, 2]
    assert not any("loss" in record for record in history)  # 0 would be a very good one
    assert all(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))


def test_a_loss_is_that_of_the_steps_that_had_targets():
    x, none = torch.ones(2, 3, dtype=torch.long), torch.full((2, 3), -100)
    batches = [(x, x), (x, none), (x, none), (x, none), (x, none), (x, x)]
    trainer = make(source=Listed(batches), steps=6, log_interval=2)
    (first, middle, last), nats = trainer.train(), []
    assert "loss" not in middle and first["tokens"] == middle["tokens"] == 6
    alone = make(source=Listed(batches), steps=6, log_interval=1)
    nats = [record.get("loss") for record in alone.train()]
    assert nats == [first["loss"], None, None, None, None, last["loss"]]
    taken = make(source=Listed([(x, none)]), steps=1)
    taken.validate = lambda model: {"loss": 1.0}
    with pytest.raises(ValueError, match="validate returned loss"):
        taken.train()


@pytest.mark.parametrize("optimizer", ["Muon", "adam", "", None])
def test_an_optimizer_misspelt_is_refused(optimizer):
    with pytest.raises(ValueError, match=f"optimizer {optimizer!r} is unknown: .* adamw, muon"):
        RunConfig(9, warmup_steps=2, optimizer=optimizer)


def test_muon_goes_with_the_fused_adamw_only():
    with pytest.raises(ValueError, match="muon goes with torch's AdamW, not with fused=False"):
        RunConfig(9, optimizer="muon", fused=False)


def test_a_model_must_return_logits_alone():
    class Pair(Tiny):
        def forward(self, ids):
            return super().forward(ids), None

    trainer = make(model=Pair())
    with pytest.raises(TypeError, match=r"return its logits \(B, T, V\), a tensor, not a tuple"):
        trainer.train()
    assert trainer.step == 0 and trainer.batches.index == 0


def test_trainer_with_accumulation_takes_the_step_of_the_big_batch(generator):
    x = torch.randint(V, (8, 10), generator=generator)
    y = x.clone()
    y[0, 2:] = -100
    y[3, 5:] = -100

    def run(batches, accumulation):
        trainer = make(
            steps=2,
            model=tiny(dropout=0.0).double(),
            source=Listed(batches * 2),
            gradient_accumulation_steps=accumulation,
            log_interval=1,
        )
        trainer.train()
        return trainer

    big = run([(x, y)], 1)
    small = run([(x[i : i + 2], y[i : i + 2]) for i in range(0, 8, 2)], 4)
    for a, b in zip(weights(big), weights(small), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    for a, b in zip(big.history, small.history, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-10)
        assert a["tokens"] == b["tokens"]


def test_trainer_equals_a_plain_loop():
    trainer = make(steps=12, weight_decay=0.2, max_norm=0.5, model=tiny().double())
    history = trainer.train()
    model, source = tiny().double(), WindowBatches(TOKENS, 4, 12, seed=3)
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(decay_groups(model, 0.2), betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step in range(12):
        for group in optimizer.param_groups:
            group["lr"] = cosine_schedule(step, 1e-3, 1e-4, 4, 12)
        x, y = next(source)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    for p, q in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-10)
    assert [r["step"] for r in history] == [4, 8, 12]
    for i, record in enumerate(history):
        assert record["loss"] == pytest.approx(np.mean(losses[4 * i : 4 * i + 4]), rel=1e-5)
        assert record["tokens"] == 48 * record["step"]


def test_a_record_has_the_norm_of_its_last_step():
    alone = make(steps=4, model=tiny(dropout=0.0))
    norms = [alone.one_step()[3] for _ in range(4)]
    history = make(steps=4, model=tiny(dropout=0.0), log_interval=2).train()
    assert [record["grad_norm"] for record in history] == norms[1::2]


def test_a_model_in_use_is_trained_with_its_dropout():
    trainer = make(steps=2, model=tiny(dropout=0.5).eval(), log_interval=1)
    other = make(steps=2, model=tiny(dropout=0.5), log_interval=1)
    assert [r["loss"] for r in trainer.train()] == [r["loss"] for r in other.train()]
    assert trainer.model.training


def test_a_step_that_is_undone_is_forgotten_by_the_balance():
    class Balance:
        settings: ClassVar[dict] = {}
        forgot = False

        def __call__(self, targets):
            raise KeyError("a loss that fails")

        def forget(self):
            self.forgot = True

    trainer = make(steps=1, model=tiny())
    trainer.balance = Balance()
    with pytest.raises(KeyError):
        trainer.train()
    assert trainer.balance.forgot


def test_our_optimizer_and_the_fused_one_agree():
    ours, fused = (make(fused=fused, model=tiny().double()) for fused in (False, True))
    ours.train(), fused.train()
    assert isinstance(ours.optimizer, AdamW) and isinstance(fused.optimizer, torch.optim.AdamW)
    for a, b in zip(weights(ours), weights(fused), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_learns_in_bfloat16_and_keeps_float32_weights():
    model = tiny(dropout=0.0)
    x = torch.arange(V)[None].repeat(4, 1)
    source = Listed([(x[:, :-1], x[:, 1:])] * 60)
    trainer = make(steps=60, model=model, source=source, precision="bfloat16", max_lr=3e-2)
    history = trainer.train()
    assert history[-1]["loss"] < 0.2 < 2 < history[0]["loss"]
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_validation_samples_and_bytes_go_into_the_records(tmp_path):
    calls, logged = [], []
    lengths = torch.full((V,), 3)

    def validate(model):
        calls.append(model.training)
        torch.rand(5)  # validation may draw: training does not notice
        return {"bits": 1.5}

    trainer = make(tmp_path, steps=10, eval_interval=4)
    trainer.validate, trainer.sample = validate, lambda model: "once"
    trainer.token_bytes, trainer.on_log = lengths, logged.append
    trainer.train()
    plain = make(steps=10)
    plain.train()
    assert same(trainer, plain)
    assert calls == [False] * 3 and trainer.model.training
    lines = records(tmp_path)
    assert lines == trainer.history == logged
    assert [r.get("bits") for r in lines] == [1.5, 1.5, 1.5] and lines[0]["sample"] == "once"
    for record in lines:
        nats_per_byte = record["loss"] / 3 / math.log(2)
        assert record["bits_per_byte"] == pytest.approx(nats_per_byte, rel=1e-6)
        assert record["tokens_per_second"] > 0 and record["grad_norm"] > 0


class Bytes:
    """Byte counts on a device, which take no index from elsewhere."""

    device = torch.device("meta")

    def __getitem__(self, index):
        assert index.device == self.device
        return torch.full(index.shape, 2)


def test_bytes_are_counted_where_their_numbers_lie(monkeypatch):
    trainer = make(steps=1)
    trainer.token_bytes = Bytes()
    (record,) = trainer.train()
    assert record["bits_per_byte"] == pytest.approx(record["loss"] / 2 / math.log(2), rel=1e-6)


@pytest.mark.parametrize("names", [["loss"], ["step", "tokens", "held_out"]])
def test_validation_does_not_overwrite_the_run(tmp_path, names):
    trainer = make(tmp_path, steps=8, eval_interval=4)
    trainer.validate = lambda model: dict.fromkeys(names, 7.0)
    clash = ", ".join(name for name in names if name != "held_out")
    with pytest.raises(ValueError, match=f"validate returned {clash}: the run records that"):
        trainer.train()
    assert records(tmp_path) == trainer.history == []
    trainer.validate = lambda model: 7.0  # renamed: the run goes on
    assert [r["validation"] for r in trainer.train()] == [7.0]


def test_a_new_run_leaves_the_random_numbers_alone(monkeypatch):
    """And does not look at GPUs that it does not use."""

    def refuse(*_):
        raise AssertionError("not ours")

    for name in ("device_count", "get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    before = torch.get_rng_state()
    first = make(model=Tiny())
    torch.set_rng_state(before)
    model = Tiny()
    before = torch.get_rng_state()
    second = make(model=model)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.rng["cpu"], second.rng["cpu"])


def test_the_progress_bar_shows_loss_speed_and_time_left(capsys):
    trainer = make(steps=8)
    trainer.progress = True
    trainer.train()
    shown = capsys.readouterr().err
    assert "8/8" in shown and "tokens/s" in shown and "loss" in shown and "<00:00" in shown


@pytest.mark.parametrize("error", [Stop, ValueError])
def test_the_bar_ends_when_training_does(monkeypatch, capsys, error):
    bars = []

    class Bar(trainer_module.tqdm):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.closed = 0
            bars.append(self)

        def close(self):
            self.closed += 1
            super().close()

    monkeypatch.setattr(trainer_module, "tqdm", Bar)
    trainer = make(steps=8)
    trainer.progress = True
    trainer.batches = Failing(trainer.batches, at=3, error=error)
    with pytest.raises(error):
        trainer.train()
    assert bars[0].closed == 1 and capsys.readouterr().err.endswith("\n")
    trainer.train()
    assert len(bars) == 2 and bars[1].closed == 1
    assert "8/8" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["source", "forward", "backward", "validate", "record"])
def test_training_goes_on_exactly_after_an_interrupt(place):
    """Ctrl-C, then `train()` again, as in a notebook."""
    calls = []

    def once(*_):
        calls.append(place)
        if len(calls) == 6:
            if place != "record":
                torch.rand(7)  # whatever it was doing with random numbers
            raise Stop

    trainer = make(steps=12, gradient_accumulation_steps=2, log_interval=1, eval_interval=1)
    if place == "source":
        trainer.batches = Failing(trainer.batches, at=6, error=Stop)
    elif place == "forward":
        trainer.model.norm.register_forward_hook(once)
    elif place == "backward":
        trainer.model.mix.weight.register_hook(once)
    elif place == "validate":
        trainer.validate = lambda model: once() or 0.0
    else:
        trainer.on_log = once
    with pytest.raises(Stop):
        trainer.train()
    assert 2 <= trainer.step <= 6 and trainer.model.mix.weight.grad is None
    trainer.train()
    reference = make(steps=12, gradient_accumulation_steps=2)
    reference.train()
    assert trainer.step == 12 and same(trainer, reference)


def test_a_run_broken_off_while_the_weights_moved_must_be_resumed(tmp_path):
    trainer = make(tmp_path, steps=12, checkpoint_interval=4, fused=False)
    step, weight = trainer.optimizer.step, trainer.model.mix.weight

    def half_a_step():
        if trainer.step == 6:
            weight.data.add_(1.0)
            raise Stop
        step()

    trainer.optimizer.step = half_a_step
    with pytest.raises(Stop):
        trainer.train()
    trainer.optimizer.step = step
    with pytest.raises(RuntimeError, match=r"step 6 was broken off.*resume\(\)"):
        trainer.train()
    assert trainer.resume() and trainer.step == 4
    trainer.train()
    reference = make(steps=12, fused=False)
    reference.train()
    assert same(trainer, reference)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps must be a whole number from 1 to .*, not 0"),
        ({"steps": 2.5}, "steps must be a whole number from 1 to .*, not 2.5"),
        ({"steps": 5, "gradient_accumulation_steps": 0}, "_steps must be a whole number from 1"),
        ({"steps": 5, "warmup_steps": -1}, "warmup_steps must be a whole number from 0 .*, not -1"),
        ({"steps": 5, "max_norm": 0.0}, "max_norm must be positive, not 0.0"),
        ({"steps": 5, "precision": "float16"}, "precision 'float16'"),
        ({"steps": 5, "parallel": "pipes"}, "parallel 'pipes'"),
        (
            {"steps": 5, "weight_decay": -0.1},
            "weight_decay must be a number of at least 0, not -0.1",
        ),
        (
            {"steps": 5, "weight_decay": math.nan},
            "weight_decay must be a number of at least 0, not nan",
        ),
        ({"steps": 5, "max_lr": math.inf}, "max_lr must be a number of at least 0, not inf"),
        (
            {"steps": 5, "betas": (0.9, 1.0)},
            r"betas must be a list, each a number from 0 .*, not \(0.9, 1.0\)",
        ),
        ({"steps": 5, "log_interval": 0}, "log_interval must be a whole number from 1 .*, not 0"),
        (
            {"steps": 5, "eval_interval": 0.5},
            "eval_interval must be a whole number from 0 .*, not 0.5",
        ),
        ({"steps": 5, "max_lr": 1e-5, "min_lr": 1e-4}, "min_lr 0.0001 must be .* max_lr, 1e-05"),
        ({"steps": 5, "min_lr": -1e-4}, "min_lr -0.0001 must be from 0"),
        ({"steps": 5, "precision": "fp16"}, "precision 'fp16' is unknown: .* float32, bfloat16$"),
        ({"steps": 5, "parallel": "pp"}, "parallel 'pp' is unknown: .* ddp, fsdp, tensor$"),
    ],
)
def test_config_refuses_values_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"checkpoint_interval": -1}, "checkpoint_interval -1 is no count"),
        ({"checkpoint_interval": 0.5}, "checkpoint_interval 0.5 is no count"),
        ({"keep": 0}, "keep 0: checkpoints are counts from 1"),
        ({"folder": ""}, "the folder of a run must have a name, not ''"),
        ({"folder": None}, "the folder of a run must have a name, not None"),
    ],
)
def test_a_run_refuses_values_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        Run(**{"folder": "somewhere", **settings})


def test_what_only_a_run_can_do_says_so(tmp_path):
    with pytest.raises(ValueError, match=r"no run to resume: .*run=Run\(folder\)"):
        make().resume()
    run = Run(tmp_path)
    for _ in range(2):  # the folder is the first one's, though the part is the same
        second = make(steps=4)
        second.run = run
        if not run.metrics.exists():
            second.train()
    with pytest.raises(ValueError, match="holds a run: resume it"):
        second.train()


def test_random_numbers_of_a_mac(monkeypatch):
    kept = [torch.ones(3, dtype=torch.uint8)]
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: kept[-1])
    monkeypatch.setattr(torch.mps, "set_rng_state", kept.append)
    device = torch.device("mps")
    state = rng_state(device)
    assert torch.equal(state["mps"], kept[0]) and torch.equal(state["cpu"], torch.get_rng_state())
    kept.append(torch.zeros(3, dtype=torch.uint8))
    set_rng_state(state, device)
    assert torch.equal(kept[-1], kept[0])
    set_rng_state({"cpu": state["cpu"]}, device)  # as a run on a CPU wrote it
    assert len(kept) == 3


def test_nan_stops_with_the_step_and_a_saved_state(tmp_path):
    class Poisoned(WindowBatches):
        def __next__(self):
            x, y = super().__next__()
            if self.index == 8:
                with torch.no_grad():
                    poison["model"].scale.fill_(float("nan"))
            return x, y

    class Scaled(Tiny):
        def __init__(self):
            super().__init__()
            self.scale = torch.ones(())

        def forward(self, ids):
            return super().forward(ids) * self.scale

    torch.manual_seed(0)
    poison = {"model": Scaled()}
    trainer = make(tmp_path, model=poison["model"], source=Poisoned(TOKENS, 4, 12, seed=3))
    with pytest.raises(FloatingPointError, match=r"step 7: loss nan.*step-00000007"):
        trainer.train()
    tensors, state = load_checkpoint(tmp_path / "step-00000007")
    assert all(t.isfinite().all() for t in tensors["model"].values())
    assert state["source"]["index"] == 7  # the batch that did it is drawn again
    assert trainer.batches.index == 7 and trainer.model.mix.weight.grad is None
    torch.manual_seed(0)
    healthy = make(tmp_path, model=Scaled())
    assert healthy.resume() and healthy.step == 7
    healthy.train()
    reference = make()
    reference.train()
    assert same(healthy, reference)


def test_compiled_training_agrees(tmp_path, monkeypatch):
    eager = functools.partial(torch.compile, backend="aot_eager")  # no C++ compiler needed
    monkeypatch.setattr(torch, "compile", eager)
    plain = make(steps=3, model=tiny().double())
    compiled = make(tmp_path, steps=3, model=tiny().double(), compile=True)
    assert compiled.forward is not compiled.model
    plain.train(), compiled.train()
    for a, b in zip(weights(plain), weights(compiled), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    assert "embed.weight" in load_checkpoint(tmp_path / "step-00000003")[0]["model"]


@pytest.mark.gpu
def test_tokens_targets_and_byte_counts_may_lie_on_the_gpu():
    plain = make(steps=4, model=tiny().cuda())
    there = make(steps=4, model=tiny().cuda(), source=WindowBatches(TOKENS.cuda(), 4, 12, seed=3))
    targets = get_batch(TOKENS.cuda(), 2, 4, device="cuda")[1]
    source = Listed([(targets, targets)] * 4)
    mixed = make(steps=4, model=tiny().cuda(), source=source)
    for trainer in (plain, there, mixed):
        trainer.token_bytes = torch.full((V,), 2)
        assert trainer.train()[-1]["bits_per_byte"] > 0
    assert same(plain, there)


def test_a_run_from_before_min_lr_could_be_left_out_goes_on(tmp_path):
    make(tmp_path).train(until=5)
    (state,) = tmp_path.glob("*/state.json")
    saved = json.loads(state.read_text(encoding="utf-8"))["config"]
    assert saved["min_lr"] == 1e-4  # the number itself, as older runs have it
    assert make(tmp_path, min_lr=1e-4).resume()
    with pytest.raises(ValueError, match=r"min_lr: saved 0\.0001, now 0\.0002"):
        make(tmp_path, min_lr=2e-4).resume()


def test_a_list_a_loader_and_a_generator_train_as_a_source_does():
    def run(source):
        trainer = make(steps=12, source=source, model=tiny())
        trainer.train()
        return trainer

    source = WindowBatches(TOKENS, 4, 12, seed=3)
    batches = [next(source) for _ in range(12)]
    reference = run(WindowBatches(TOKENS, 4, 12, seed=3))
    pairs = [(x, y) for batch in batches for x, y in zip(*batch, strict=True)]
    loader = torch.utils.data.DataLoader(pairs, batch_size=4)
    for other in (
        batches,
        (batch for batch in batches),
        loader,
        WindowBatches(TOKENS, 4, 12, seed=3),
    ):
        assert same(run(other), reference)
    assert same(run(batches[:5]), run([*batches[:5], *batches[:5], *batches[:2]]))


def test_what_is_no_batches_is_refused():
    for wrong in ("a story", None, 7):
        with pytest.raises(ValueError, match=r"batches must give \(inputs, targets\), not be"):
            Trainer(tiny(), wrong, TrainConfig(2), progress=False)
    with pytest.raises(
        ValueError, match=r"a batch must be \(inputs, targets\), not 'once'; of texts"
    ):
        make(source=["once", "upon"]).train()
    with pytest.raises(ValueError, match="the batches ended after 2: a generator gives its"):
        make(source=(batch for batch in [(TOKENS[None, :4], TOKENS[None, :4])] * 2)).train()


def test_an_undone_step_gets_the_same_plain_batches_again():
    source = WindowBatches(TOKENS, 4, 12, seed=3)
    batches = [next(source) for _ in range(12)]
    calls = []

    def once(*_):
        calls.append(1)
        if len(calls) == 5:
            raise Stop

    trainer = make(steps=6, source=iter(batches), gradient_accumulation_steps=2)
    trainer.model.norm.register_forward_hook(once)
    with pytest.raises(Stop):
        trainer.train()
    assert trainer.step == 2
    trainer.train()
    reference = make(steps=6, source=batches, gradient_accumulation_steps=2)
    reference.train()
    assert same(trainer, reference)


def test_batches_without_a_state_begin_anew_with_a_word(tmp_path):
    source = WindowBatches(TOKENS, 4, 12, seed=3)
    batches = [next(source) for _ in range(24)]
    make(tmp_path, source=batches).train(until=10)
    second = make(tmp_path, source=batches)
    with pytest.warns(
        UserWarning, match="without a state begin from their start; the run had used 10"
    ):
        assert second.resume()
    assert second.step == 10 and torch.equal(next(second.batches)[0], batches[0][0])


@pytest.mark.parametrize("given", ["object", "function"])
def test_optimizer_schedule_and_loss_may_be_handed_in(given):
    def loss_of(logits, targets):
        return F.cross_entropy(logits.mT, targets) + 1e-3 * logits.logsumexp(-1).square().mean()

    model, batches = tiny(dropout=0.0).double(), WindowBatches(TOKENS, 4, 12, seed=3)

    def make_sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

    parts = {"optimizer": make_sgd(model) if given == "object" else make_sgd, "loss": loss_of}
    config = TrainConfig(8, max_norm=1e9, log_interval=8)
    trainer = Trainer(model, batches, config, **parts, progress=False)
    (record,) = trainer.train()
    assert record["lr"] == 0.5  # its own: nobody asked for another
    plain, batches, losses = tiny(dropout=0.0).double(), WindowBatches(TOKENS, 4, 12, seed=3), []
    optimizer = make_sgd(plain)
    for _ in range(8):
        x, y = next(batches)
        loss = loss_of(plain(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert record["loss"] == pytest.approx(np.mean(losses), rel=1e-9)
    for p, q in zip(trainer.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-10)
    rates = Trainer(
        tiny(),
        WindowBatches(TOKENS, 4, 12),
        TrainConfig(3, log_interval=1),
        progress=False,
        schedule=lambda step: 0.1 / (step + 1),
    ).train()
    assert [r["lr"] for r in rates] == [0.1, 0.05, 0.1 / 3]


def test_a_run_resumes_with_its_own_optimizer_and_refuses_another(tmp_path):
    def momentum(model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def plain(model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def trainer(run=None, optimizer=momentum):
        config = TrainConfig(12, log_interval=4)
        batches = WindowBatches(TOKENS, 4, 12)
        return Trainer(tiny(), batches, config, optimizer=optimizer, run=run, progress=False)

    whole = trainer()
    whole.train()
    trainer(Run(tmp_path)).train(until=5)
    with pytest.raises(ValueError, match=r"optimizer: saved '.*momentum', now '.*plain'"):
        trainer(Run(tmp_path), plain).resume()
    second = trainer(Run(tmp_path))
    assert second.resume()
    second.train()
    assert same(second, whole)


def test_token_byte_lengths():
    lengths = token_byte_lengths(Letters())
    assert lengths.tolist() == [1] * 256 + [0] and lengths.dtype == torch.int64


def test_ids_without_a_token_have_no_bytes():
    tokenizer = Letters()
    tokenizer.special_tokens, tokenizer.vocab_size = {"<end>": 258}, 260  # 256, 257, 259: nothing
    assert token_byte_lengths(tokenizer).tolist() == [1] * 256 + [0] * 4


def twice(model, **settings):
    """A model trained by `train`, and a copy of it by a `Trainer`; models and records."""
    config = TrainConfig(9, warmup_steps=3, log_interval=2, **settings)
    other, found = copy.deepcopy(model), []
    batches = [WindowBatches(TOKENS, 4, 12, seed=3) for _ in range(2)]

    def validate(model):
        found.append(model.training)
        return {"drawn": torch.rand(3).sum(), "dropped": model(TOKENS[None, :9]).sum()}

    plain = train(model, batches[0], config, validate=validate)
    trainer = Trainer(other, batches[1], config, validate=validate, progress=False)
    return model, other, plain, trainer.train(), found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"seed": 5, "eval_interval": 3},
        {"gradient_accumulation_steps": 3, "eval_interval": 1, "max_norm": 0.05},
        {"min_lr": 0.0, "max_lr": 0.05, "weight_decay": 0.5, "betas": (0.8, 0.99), "eps": 1e-6},
    ],
)
def test_train_equals_a_trainer_to_the_bit(settings):
    """Losses, norms, rates, what validation finds, and weights; with dropout and accumulation."""
    one, two, plain, records, looks = twice(tiny(dropout=0.3), **settings)
    for p, q in zip(one.state_dict().values(), two.state_dict().values(), strict=True):
        assert torch.equal(p, q)
    clock = ("seconds", "tokens_per_second")
    ours = [{k: v for k, v in record.items() if k not in clock} for record in plain]
    theirs = [{k: v for k, v in record.items() if k not in clock} for record in records]
    assert ours == theirs and [r["step"] for r in ours if r["step"] % 2 == 0] == [2, 4, 6, 8]
    assert looks and not any(looks)


def test_a_trainer_with_the_settings_of_a_run_takes_the_same_steps():
    plain, runs = make(steps=6), make(steps=6)
    plain.config = TrainConfig(6, warmup_steps=4, log_interval=4)
    plain.train(), runs.train()
    assert isinstance(runs.config, RunConfig) and same(plain, runs)


def test_a_subclass_of_the_settings_keeps_its_own_schedule(tmp_path):
    class Constant(TrainConfig):
        def learning_rate(self, step):
            return 0.25

    def trainer(run=None):
        batches = WindowBatches(TOKENS, 4, 12)
        return Trainer(tiny(), batches, Constant(4, log_interval=1), run=run, progress=False)

    whole = trainer()
    assert [record["lr"] for record in whole.train()] == [0.25] * 4
    trainer(Run(tmp_path)).train(until=2)
    second = trainer(Run(tmp_path))
    assert second.resume()
    second.train()
    assert same(second, whole)


def test_slopes_that_lay_there_before_are_no_part_of_the_first_step():
    touched, fresh = make(steps=2), make(steps=2)
    for p in touched.model.parameters():
        p.grad = torch.ones_like(p)
    touched.train(), fresh.train()
    assert same(touched, fresh)
