"""Checkpoints: whole or not there, resumed bit for bit, never taken when damaged or foreign."""

import errno
import itertools
import json
import os
import shutil
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from training_runs import (
    END,
    TOKENS,
    C,
    Documents,
    Stop,
    V,
    damaged,
    make,
    needs_unix,
    records,
    same,
    small_disk,
    tiny,
    weights,
    windows_rules,
)

from minillm.deeper.training import checkpoint
from minillm.deeper.training.checkpoint import (
    CheckpointError,
    load_checkpoint,
    load_optimizer_tensors,
    newest_checkpoint,
)
from minillm.deeper.training.documents import DocumentBatches
from minillm.training import WindowBatches


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("stop", [1, 5, 13])
def test_resumed_equals_uninterrupted(tmp_path, fused, stop):
    settings = {"fused": fused, "gradient_accumulation_steps": 2}
    whole = make(tmp_path / "whole", **settings)
    whole.train()
    make(tmp_path / "cut", **settings).train(until=stop)
    resumed = make(tmp_path / "cut", model=tiny(seed=99), **settings)
    assert resumed.resume()
    assert resumed.step == stop
    resumed.train()
    assert same(whole, resumed)
    curves = [
        {r["step"]: r["loss"] for r in records(folder)}
        for folder in (tmp_path / "whole", tmp_path / "cut")
    ]
    assert curves[1].items() >= {k: v for k, v in curves[0].items() if k > stop + 4}.items()


class Turned(nn.Module):
    """A matrix that lies in memory column by column."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(V, 8), nn.Linear(C, V)
        self.mix = nn.Parameter(torch.randn(C, 8).t())

    def forward(self, ids):
        return self.head(torch.tanh(self.embed(ids) @ self.mix))


@pytest.mark.parametrize("fused", [True, False])
def test_moments_lie_in_memory_as_their_parameter(tmp_path, fused):
    """torch's fused kernel takes numbers in the order of the memory, whatever the strides say."""

    def run(folder):
        torch.manual_seed(0)
        return make(folder, model=Turned(), fused=fused, max_lr=1e-2)

    whole = run(tmp_path / "whole")
    whole.train()
    run(tmp_path / "cut").train(until=11)
    resumed = run(tmp_path / "cut")
    assert resumed.resume()
    assert resumed.optimizer.state[resumed.model.mix]["exp_avg"].stride() == (1, 8)
    resumed.train()
    assert same(whole, resumed)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_going_back_forgets_moments_that_came_later(tmp_path, optimizer):
    trainer = make(tmp_path, keep=9, optimizer=optimizer)
    start = trainer.run.save(trainer)  # nothing has moved, so there are no moments
    trainer.resume()
    trainer.train(until=8)
    assert trainer.optimizer.state
    assert trainer.resume(start) and not trainer.optimizer.state
    trainer.train()
    reference = make(optimizer=optimizer)
    reference.train()
    assert same(trainer, reference)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_resuming_keeps_the_order_of_documents(tmp_path, layout):
    def run(folder, resume=False, until=None):
        source = DocumentBatches(
            Documents(), 3, 48, eos_token_id=END, layout=layout, shuffle_buffer=4
        )
        trainer = make(folder, steps=20, source=source)
        assert trainer.resume() == resume
        trainer.train(until)
        return trainer

    whole = run(tmp_path / "a")
    run(tmp_path / "b", until=9)
    assert same(whole, run(tmp_path / "b", resume=True))


def test_forgetting_the_sampler_changes_the_run(tmp_path):
    whole = make(tmp_path / "a")
    whole.train()
    make(tmp_path / "b").train(until=10)
    forgetful = make(tmp_path / "b")
    forgetful.resume()
    forgetful.batches.index = 0
    forgetful.train()
    assert not same(whole, forgetful)


KILLED = """
    import os, random, signal, sys, time
    sys.path.insert(0, sys.argv[1])
    import torch
    from training_runs import END, Documents, make
    from minillm.deeper.training import checkpoint
    from minillm.deeper.training.documents import DocumentBatches

    folder, rng = sys.argv[2], random.Random(4)
    torch.set_num_threads(1)

    def run(name, most=120):
        # a process that takes `most` steps and then waits; the pipe gets a byte for each
        pipe, end = os.pipe()
        child = os.fork()
        if child:
            os.close(end)
            return child, pipe
        source = DocumentBatches(Documents(), 2, 48, eos_token_id=END, shuffle_buffer=3)
        settings = {"checkpoint_interval": 2, "log_interval": 1, "fused": False}
        trainer = make(f"{folder}/{name}", 120, source=source, **settings)
        trainer.resume()
        trainer.on_log = lambda record: os.write(end, b"!")
        trainer.train(until=trainer.step + most)
        if trainer.step < 120:
            signal.pause()
        os._exit(0)

    start = time.perf_counter()
    os.waitpid(run("whole")[0], 0)
    step = (time.perf_counter() - start) / 120
    for _ in range(12):
        child, pipe = run("killed", most=9)
        for _ in range(rng.randint(1, 5)):
            os.read(pipe, 1)
        time.sleep(rng.uniform(0, 3 * step))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        names = [path.name for path in checkpoint.checkpoints(f"{folder}/killed")]
        print(int(names[-1][5:]) if names else 0)
    os.waitpid(run("killed")[0], 0)
    ends = [f"{folder}/{name}/step-00000120" for name in ("whole", "killed")]
    (whole, one), (killed, two) = (checkpoint.load_checkpoint(end) for end in ends)
    assert one["source"] == two["source"] and one["tokens"] == two["tokens"]
    for kind in ("model", "optimizer", "rng"):
        assert whole[kind].keys() == killed[kind].keys()
        assert all(torch.equal(whole[kind][n], killed[kind][n]) for n in whole[kind]), kind
    print("same")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
def test_twelve_kills_change_nothing(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            textwrap.dedent(KILLED),
            str(Path(__file__).parents[2]),
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    *reached, last = done.stdout.split()
    reached = [int(step) for step in reached]
    assert last == "same" and len(reached) == 12
    assert reached == sorted(reached) and 0 < reached[-1] < 120  # killed while it was working
    assert not list(tmp_path.glob("killed/.step-*"))  # nothing half-written is left behind


def test_damaged_checkpoints_say_what_is_wrong(tmp_path):
    path = damaged(tmp_path)
    model = path / "model.safetensors"
    whole = model.read_bytes()
    model.write_bytes(whole[:-7])
    with pytest.raises(CheckpointError, match=rf"has {len(whole) - 7} bytes instead of"):
        load_checkpoint(path)
    model.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="checksum"):
        load_checkpoint(path)
    model.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        load_checkpoint(path)
    model.write_bytes(whole)
    state = (path / "state.json").read_text()
    (path / "state.json").write_text(state[:-5])
    with pytest.raises(CheckpointError, match="cut short"):
        load_checkpoint(path)
    (path / "state.json").write_text(json.dumps({"format": checkpoint.FORMAT, "step": 10}))
    with pytest.raises(CheckpointError, match=r"state\.json says nothing of files"):
        load_checkpoint(path)
    (path / "state.json").write_text(json.dumps({"format": "other", "files": {}}))
    with pytest.raises(CheckpointError, match="another format: 'other'"):
        load_checkpoint(path)
    (path / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"no state\.json"):
        load_checkpoint(path)
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        load_checkpoint(tmp_path / "nowhere")


def unplugged(monkeypatch, number, save):
    """Run `save`, but stop for good before change `number` of the disk; did it come so far?"""
    changes = itertools.count()

    def watched(change):
        def guarded(*args, **kwargs):
            if next(changes) == number:
                raise Stop
            return change(*args, **kwargs)

        return guarded

    with monkeypatch.context() as patch:
        for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync"):
            patch.setattr(os, name, watched(getattr(os, name)))
        patch.setattr(checkpoint, "save_file", watched(checkpoint.save_file))
        try:
            save()
        except Stop:
            return True
    return False


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("steps", [[4, 5], [5, 5], [3, 4, 5]])
def test_a_whole_checkpoint_is_there_at_every_moment(tmp_path, monkeypatch, steps, keep):
    """Stopped before each change of the disk in turn; the same step twice is the hard case."""
    *earlier, last = steps

    def save(step, value):
        tensors = {"model": {"w": torch.full((3,), float(value))}, "rng": {"cpu": torch.ones(2)}}
        checkpoint.save_checkpoint(tmp_path, step, tensors, {"value": value}, keep=keep)

    for number in itertools.count():
        for path in tmp_path.iterdir():
            shutil.rmtree(path)
        for value, step in enumerate(earlier):
            save(step, value)
        stopped = unplugged(monkeypatch, number, lambda: save(last, len(earlier)))
        tensors, state = load_checkpoint(newest_checkpoint(tmp_path))
        found = {(earlier[-1], len(earlier) - 1), (last, len(earlier))}
        assert (state["step"], state["value"]) in found
        assert tensors["model"]["w"].tolist() == [state["value"]] * 3
        save(6, 9)  # the run goes on, and what was left behind is gone
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names[-1] == "step-00000006" and len(names) <= keep
        assert all(name.startswith("step-") for name in names)
        if not stopped:
            assert (state["step"], state["value"]) == (last, len(earlier))
            break
    assert number > 8  # folder, two files, syncs, renames, removals


def test_a_replacement_that_fails_puts_the_old_one_back(tmp_path, monkeypatch):
    path = damaged(tmp_path)
    before = {p.name: p.read_bytes() for p in path.iterdir()}
    rename = os.rename

    def refuse(source, target):
        if ".replaced" not in f"{source}{target}":
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    trainer = make(tmp_path, keep=3)
    trainer.resume()
    monkeypatch.setattr(checkpoint.os, "rename", refuse)
    with pytest.raises(CheckpointError, match="Input/output error"):
        trainer.run.save(trainer)
    assert {p.name: p.read_bytes() for p in path.iterdir()} == before
    assert not list(tmp_path.glob(".step-*"))


def test_the_newest_whole_checkpoint_is_found(tmp_path):
    path = damaged(tmp_path)
    (path / "optimizer.safetensors").write_bytes(b"")
    (tmp_path / ".step-00000099.1").mkdir()  # what a kill leaves
    with pytest.warns(UserWarning, match="passed over.*step-00000010"):
        assert newest_checkpoint(tmp_path) == tmp_path / "step-00000005"
    assert newest_checkpoint(tmp_path / "nowhere") is None
    assert not make(tmp_path / "nowhere").resume()


def test_the_checkpoint_just_written_stays_and_what_a_kill_left_goes(tmp_path):
    """Going on from an older checkpoint, with newer ones in the folder."""
    make(tmp_path, keep=9, checkpoint_interval=5).train()
    (tmp_path / ".step-00000007.1").mkdir()
    for step in (20, 24):
        (tmp_path / f"step-{step:08d}" / "model.safetensors").write_bytes(b"")
    back = make(tmp_path, keep=2, checkpoint_interval=5)
    with pytest.warns(UserWarning, match="passed over"):
        assert back.resume() and back.step == 15
    back.train(until=17)
    names = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert names == [f"step-{step:08d}" for step in (15, 17, 20, 24)]


def test_the_fused_optimizer_counts_on_the_device():
    """torch's fused kernel reads the number of steps there; a plain one counts on the CPU."""
    for fused, device in ((True, "meta"), (False, "cpu")):
        model = nn.Linear(2, 2, device="meta")
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.param_groups[0]["fused"] = fused
        saved = {"weight/step": torch.tensor(3.0), "weight/exp_avg": torch.zeros(2, 2)}
        load_optimizer_tensors(model, optimizer, saved)
        state = optimizer.state[model.weight]
        assert state["step"].device.type == device and state["exp_avg"].device.type == "meta"


def test_foreign_checkpoints_are_refused(tmp_path):
    path = damaged(tmp_path)
    other = make(tmp_path, model=nn.Sequential(nn.Embedding(V, 8), nn.Linear(8, V)))
    with pytest.raises(CheckpointError, match=r"missing 0\.weight.*unexpected embed\.weight"):
        other.resume(path)
    wider = tiny()
    wider.mix = nn.Linear(C, C + 1)
    with pytest.raises(CheckpointError, match=r"mix\.weight is \(16, 16\), the model's is \(17"):
        make(tmp_path, model=wider).resume(path)
    with pytest.raises(ValueError, match=r"max_lr: saved 0\.001, now 0\.002"):
        make(tmp_path, max_lr=2e-3).resume(path)
    with pytest.raises(ValueError, match="batch_size: saved 4, now 5"):
        make(tmp_path, source=WindowBatches(TOKENS, 5, 12, seed=3)).resume(path)


def test_a_refused_resume_changes_nothing(tmp_path):
    path = damaged(tmp_path)
    batches = WindowBatches(TOKENS, 5, 12, seed=3)
    other_source = make(tmp_path / "one", source=batches, model=tiny(seed=5))
    model = nn.Sequential(nn.Embedding(V, 8), nn.Linear(8, V))
    other_model = make(tmp_path / "two", model=model)
    for trainer, error in ((other_source, ValueError), (other_model, CheckpointError)):
        trainer.train(until=2)
        before, state = weights(trainer), trainer.batches.state_dict()
        moments = [m.clone() for s in trainer.optimizer.state.values() for m in s.values()]
        with pytest.raises(error):
            trainer.resume(path)
        assert all(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))
        after = [m for s in trainer.optimizer.state.values() for m in s.values()]
        assert all(torch.equal(a, b) for a, b in zip(moments, after, strict=True))
        assert trainer.batches.state_dict() == state and trainer.step == 2


def test_foreign_moments_are_refused_before_any_is_taken():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[model.bias]["exp_avg"] = torch.ones(2)
    saved = {"weight/exp_avg": torch.zeros(2, 2), "wait/exp_avg": torch.zeros(2, 2)}
    with pytest.raises(CheckpointError, match="optimizer state of 'wait', which the model"):
        load_optimizer_tensors(model, optimizer, saved)
    assert [*optimizer.state] == [model.bias]


class Odd(WindowBatches):
    """A source whose state is no JSON."""

    def state_dict(self):
        return {**super().state_dict(), "index": np.int64(self.index)}


def test_what_can_never_be_saved_is_told_at_the_first_checkpoint(tmp_path):
    """Not after days of warnings; and nothing half-written is left."""
    twin = tiny()
    twin.head = nn.Linear(C, V, bias=False)
    twin.head.weight.data = twin.embed.weight.data  # two parameters, one memory
    odd = Odd(TOKENS, 4, 12, seed=3)
    for name, kind in (("twin", {"model": twin}), ("odd", {"source": odd})):
        trainer = make(tmp_path / name, **kind)
        error = {"twin": "share memory", "odd": "int64 is not JSON"}[name]
        with pytest.raises(CheckpointError, match=rf"(?s)write .*step-00000005.*{error}") as found:
            trainer.train()
        assert found.value.permanent and trainer.step == 5
        assert not list((tmp_path / name).glob(".step*"))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_buffered_run_resumes_exactly_and_only_with_its_settings(tmp_path, optimizer):
    def run(folder, **settings):
        source = DocumentBatches(Documents(), 3, 48, eos_token_id=END, shuffle_buffer=4)
        return make(folder, 20, source=source, optimizer=optimizer, **settings)

    whole, again = (run(tmp_path / name, gradient_accumulation_steps=2) for name in "ab")
    whole.train(), run(tmp_path / "b", gradient_accumulation_steps=2).train(until=9)
    with pytest.raises(ValueError, match="gradient_accumulation_steps: saved 2, now 1"):
        run(tmp_path / "b").resume()
    other = run(tmp_path / "b", gradient_accumulation_steps=2)
    other.batches.settings["shuffle_buffer"] = 5
    with pytest.raises(ValueError, match="shuffle_buffer: saved 4, now 5"):
        other.resume()
    assert again.resume() and again.step == 9
    again.train()
    assert same(whole, again)


def test_a_run_does_not_change_its_optimizer(tmp_path):
    path = damaged(tmp_path)
    with pytest.raises(ValueError, match="optimizer: saved 'adamw', now 'muon'"):
        make(tmp_path, optimizer="muon").resume(path)
    make(tmp_path / "muon", optimizer="muon").train(until=3)
    with pytest.raises(ValueError, match="optimizer: saved 'muon', now 'adamw'"):
        make(tmp_path / "muon").resume()


@needs_unix
def test_a_full_disk_loses_nothing_that_was_whole(tmp_path):
    trainer = make(tmp_path, steps=20)
    trainer.train(until=10)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*.safetensors")}
    with (
        pytest.warns(UserWarning, match=r"step-00000015.*training goes on"),
        pytest.raises(CheckpointError, match=r"could not write .*step-00000020"),
        small_disk(3000),
    ):
        trainer.train()
    assert trainer.step == 20
    assert {p: p.read_bytes() for p in tmp_path.rglob("*.safetensors")} == before
    assert not list(tmp_path.glob(".step*"))
    again = make(tmp_path, steps=20)  # room again: the run goes on from what was whole
    assert again.resume() and again.step == 10
    again.train()
    assert same(again, trainer) and newest_checkpoint(tmp_path).name == "step-00000020"


@pytest.mark.parametrize("call", ["mkdir", "fsync", "rename"])
def test_a_file_system_that_turns_read_only_loses_nothing(tmp_path, monkeypatch, call):
    path = damaged(tmp_path)
    trainer = make(tmp_path, keep=3)
    assert trainer.resume() and trainer.step == 10

    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        trainer.on_log = lambda record: patch.setattr(checkpoint.os, call, refuse)
        with (
            pytest.warns(UserWarning, match="Read-only file system; training goes on"),
            pytest.raises(CheckpointError, match="step-00000016"),
        ):
            trainer.train(until=16)
    assert newest_checkpoint(tmp_path) == path
    assert not list(tmp_path.glob(".step-*"))


def test_tied_weights_are_saved_once_and_tied_after_loading(tmp_path):
    path = damaged(tmp_path)
    tensors, state = load_checkpoint(path)
    assert sorted(tensors["model"]) == sorted(
        ["embed.weight", "mix.weight", "mix.bias", "norm.weight", "norm.bias", "seen"]
    )
    assert state["step"] == 10 and state["config"]["steps"] == 24
    model = tiny(seed=5)
    checkpoint.load_model_tensors(model, tensors["model"])
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.head.weight, tensors["model"]["embed.weight"])


def test_nothing_is_unpickled(tmp_path):
    kinds = {p.suffix for p in damaged(tmp_path).iterdir()}
    assert kinds == {".safetensors", ".json"}


def test_a_model_compiled_by_the_caller_is_saved_without_its_shell(tmp_path):
    compiled = torch.compile(tiny(), backend="eager")
    trainer = make(tmp_path, steps=8, model=compiled)
    assert trainer.forward is compiled
    trainer.train(until=5)
    saved = load_checkpoint(tmp_path / "step-00000005")[0]
    names = {name.rpartition("/")[0] for name in saved["optimizer"]}
    assert names == {name for name, _ in tiny().named_parameters()}
    plain = make(tmp_path, steps=8, model=tiny(seed=7))
    assert plain.resume()
    trainer.train(), plain.train()
    for a, b in zip(weights(plain), weights(trainer), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_resuming_on_a_gpu_is_exact(tmp_path):
    def run(folder, resume=False, until=None):
        trainer = make(folder, model=tiny().cuda(), precision="bfloat16")
        assert trainer.resume() == resume
        trainer.train(until)
        return trainer

    whole = run(tmp_path / "a")
    run(tmp_path / "b", until=11)
    assert same(whole, run(tmp_path / "b", resume=True))


WRONG = {
    "empty": lambda state: "",
    "no object": lambda state: "[1, 2]",
    "nested": lambda state: "[" * 200_000,
    "format": lambda state: {**state, "format": 5},
    "step": lambda state: {**state, "step": "ten"},
    "negative step": lambda state: {**state, "step": -1},
    "true step": lambda state: {**state, "step": True},
    "files": lambda state: {**state, "files": []},
    "no files": lambda state: {**state, "files": {}},
    "file sizes": lambda state: {**state, "files": {**state["files"], "rng.safetensors": "big"}},
    "outside": lambda state: {**state, "files": {**state["files"], "../../x": [1, 2]}},
    "tokens": lambda state: {**state, "tokens": None},
    "no tokens": lambda state: {k: v for k, v in state.items() if k != "tokens"},
    "source": lambda state: {**state, "source": 7},
    "config": lambda state: {**state, "config": "adamw"},
    "sharded": lambda state: {**state, "sharded": "no"},
    "processes": lambda state: {**state, "processes": "one"},
    "meter": lambda state: {**state, "meter": {"nats": "a"}},
}


@pytest.mark.parametrize("damage", WRONG)
def test_a_damaged_state_is_passed_over_for_the_older_checkpoint(tmp_path, damage):
    path = damaged(tmp_path)
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    wrong = WRONG[damage](state)
    text = wrong if isinstance(wrong, str) else json.dumps(wrong)
    (path / "state.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match="step-00000010"):
        make(tmp_path).resume(path)
    again = make(tmp_path)
    with pytest.warns(UserWarning, match="passed over.*step-00000010"):
        assert again.resume() and again.step == 5
    again.train()
    whole = make()
    whole.train()
    assert same(again, whole)


def test_bytes_that_are_no_text_are_damage(tmp_path):
    path = damaged(tmp_path)
    (path / "state.json").write_bytes(b"\xff\xfe{}")
    with pytest.warns(UserWarning, match="passed over"):
        assert newest_checkpoint(tmp_path).name == "step-00000005"


def test_a_state_that_says_something_twice_is_damage(tmp_path):
    path = damaged(tmp_path)
    text = (path / "state.json").read_text(encoding="utf-8")
    (path / "state.json").write_text(text.replace("{", '{"step": 10, ', 1), encoding="utf-8")
    with pytest.warns(UserWarning, match=r"state\.json holds the key 'step' twice"):
        assert newest_checkpoint(tmp_path).name == "step-00000005"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 50) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def run_of_ten(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ten")
    path = damaged(folder)
    return folder, path, (path / "state.json").read_text(encoding="utf-8")


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_whatever_stands_in_a_state_is_taken_or_refused(run_of_ten, data):
    folder, path, text = run_of_ten
    state = json.loads(text)
    place = state
    while True:
        key = data.draw(st.sampled_from(sorted(place)))
        if not (isinstance(place[key], dict) and place[key] and data.draw(st.booleans())):
            break
        place = place[key]
    place[key] = data.draw(JSON)
    (path / "state.json").write_text(json.dumps(state), encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make(folder)
        try:
            assert trainer.resume() and type(trainer.step) is int
        except (ValueError, CheckpointError):
            assert trainer.step == 0 and trainer.batches.index == 0
        trainer = None
    (path / "state.json").write_text(text, encoding="utf-8")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks into Linux's /proc")
def test_a_run_trains_and_resumes_under_the_file_rules_of_windows(tmp_path, monkeypatch):
    whole = make()
    whole.train()
    with windows_rules(monkeypatch):
        make(tmp_path).train(until=11)
        resumed = make(tmp_path, model=tiny(seed=4))
        assert resumed.resume() and resumed.step == 11
        assert resumed.run.save(resumed).name == "step-00000011"  # over the one that was just read
        resumed.train()
    assert same(whole, resumed)
