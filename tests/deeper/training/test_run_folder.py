"""The folder of a run: its metrics, and who may work in it."""

import contextlib
import errno
import gc
import json
import os
import shutil

import pytest
import torch
from training_runs import (
    Failing,
    Stop,
    V,
    child,
    damaged,
    make,
    needs_unix,
    read_only,
    records,
    small_disk,
    tiny,
)

from minillm.cli.main import main
from minillm.deeper.training import checkpoint
from minillm.deeper.training.checkpoint import (
    CheckpointError,
    newest_checkpoint,
)
from minillm.deeper.training.run_folder import FolderLock, append_record, check_free


def full_disk(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_new_run_does_not_overwrite_an_old_one(tmp_path):
    def files():  # without the note of who has the folder, which holds a time
        paths = [p for p in tmp_path.rglob("*") if p.is_file() and p.name != ".lock-owner"]
        return {p: p.read_bytes() for p in paths}

    make(tmp_path, log_interval=1).train(until=6)
    before = files()
    new = make(tmp_path)
    with pytest.raises(ValueError, match=r"holds a run: resume it.*step-00000006 and metrics"):
        new.train()
    other = make(tmp_path, max_lr=2e-3)
    with pytest.raises(ValueError, match="max_lr"):
        other.resume()
    with pytest.raises(ValueError, match="holds a run"):  # a refused resume is none
        other.train()
    assert files() == before
    assert new.step == 0
    assert new.resume()
    new.train(until=8)
    new.train()  # the same object may go on as often as it likes
    assert [r["step"] for r in records(tmp_path)] == [*range(1, 7), 8, 12, 16, 20, 24]


def test_records_without_a_checkpoint_are_a_run_too(tmp_path):
    """Killed before its first checkpoint, which is all that is left of it."""
    make(tmp_path, log_interval=1).train(until=3)
    shutil.rmtree(tmp_path / "step-00000003")
    with pytest.raises(ValueError, match=r"holds a run.*\(found metrics\.jsonl\)"):
        make(tmp_path).train()
    assert [r["step"] for r in records(tmp_path)] == [1, 2, 3]
    again = make(tmp_path, log_interval=2)
    assert not again.resume()  # the word that it may be begun anew
    again.train(until=4)
    assert [r["step"] for r in records(tmp_path)] == [2, 4]
    check_free(tmp_path / "nowhere")


def test_metrics_of_repeated_steps_are_written_once(tmp_path):
    make(tmp_path, log_interval=1, keep=9).train(until=12)
    shutil.rmtree(tmp_path / "step-00000012")
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 13, "lo')  # what a kill leaves
    resumed = make(tmp_path, log_interval=1)
    assert resumed.resume() and resumed.step == 10
    resumed.train()
    steps = [r["step"] for r in records(tmp_path)]
    assert steps == list(range(1, 25))


def test_records_cut_within_a_character_or_with_odd_line_ends_are_no_obstacle(tmp_path):
    make(tmp_path, log_interval=1).train(until=12)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1]
    lines[3] = lines[3][:-1] + ', "sample": "a\u2028b"}'.encode()
    cut = '{"step": 12, "sample": "从前'.encode()[:-1]
    path.write_bytes(b"\n".join([*lines, b"3", cut]))
    resumed = make(tmp_path, log_interval=1)
    assert resumed.resume()
    resumed.train()
    kept = path.read_text(encoding="utf-8").split("\n")[:-1]
    assert [json.loads(line)["step"] for line in kept] == list(range(1, 25))
    assert json.loads(kept[3])["sample"] == "a\u2028b"


@needs_unix
def test_metrics_that_cannot_be_written_do_not_stop_the_run(tmp_path):
    trainer = make(tmp_path, steps=20, log_interval=1, checkpoint_interval=0)
    with (
        pytest.warns(UserWarning, match="metrics not written"),
        pytest.raises(CheckpointError, match="step-00000020"),
        small_disk(1500),
    ):
        trainer.train()
    assert trainer.step == 20 and len(trainer.history) == 20


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs the permissions of a Unix system")
@pytest.mark.parametrize("when", ["before", "during"])
def test_a_read_only_folder_loses_nothing(tmp_path, monkeypatch, when):
    path = damaged(tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*.safetensors")}
    monkeypatch.chdir(tmp_path)  # the way there may be closed to others than root
    trainer = make(".", keep=3)
    with contextlib.ExitStack() as stack:
        if when == "before":  # said at once, not after days of training
            stack.enter_context(read_only(tmp_path))
            stack.enter_context(pytest.raises(PermissionError, match=r"metrics\.jsonl"))
        else:
            error = r"could not write step-00000016.*Permission denied"
            stack.enter_context(pytest.raises(CheckpointError, match=error))
            stack.enter_context(pytest.warns(UserWarning, match="step-00000015.*goes on"))
            stack.enter_context(pytest.warns(UserWarning, match="metrics not written"))
            trainer.on_log = lambda record: (
                stack.enter_context(read_only(tmp_path)) if record["step"] == 12 else None
            )
        assert trainer.resume() and trainer.step == 10
        trainer.train(until=16)
    assert trainer.step == {"before": 10, "during": 16}[when]
    assert {p: p.read_bytes() for p in tmp_path.rglob("*.safetensors")} == before
    assert newest_checkpoint(tmp_path) == path and not list(tmp_path.glob(".step-*"))
    again = make(tmp_path, keep=3)  # writable again: nothing was lost
    assert again.resume()
    again.train(until=16)
    assert [r["step"] for r in records(tmp_path)][-2:] == [12, 16]


def test_a_folder_that_cannot_be_written_is_an_error_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("in the way")
    trainer = make(tmp_path / "file", steps=3, checkpoint_interval=0)
    with pytest.raises(OSError, match="file"):
        trainer.train()
    assert trainer.step == 0


def lines(folder):
    """The records of a run, without what depends on the machine's speed."""
    speed = ("seconds", "tokens_per_second")
    return [[(k, v) for k, v in r.items() if k not in speed] for r in records(folder)]


def looked_at(folder, **settings):
    """A run whose checkpoints, records and looks fall on different steps."""
    trainer = make(folder, checkpoint_interval=5, log_interval=4, eval_interval=9, **settings)
    trainer.token_bytes = torch.arange(V)
    trainer.validate = lambda model: {"held_out": float(model.mix.weight.sum())}
    return trainer


@pytest.mark.parametrize("batch", [4, 11, 12, 17, 22])
def test_the_records_of_a_resumed_run_are_those_of_an_uninterrupted_one(tmp_path, batch):
    looked_at(tmp_path / "whole").train()
    killed = looked_at(tmp_path / "cut")
    killed.batches = Failing(killed.batches, at=batch, error=Stop)
    with pytest.raises(Stop):
        killed.train()
    resumed = looked_at(tmp_path / "cut", model=tiny(seed=9))
    assert resumed.resume() == (batch > 5)
    if batch < 5:  # no checkpoint yet: from the start
        resumed = looked_at(tmp_path / "cut")
        assert not resumed.resume()
    resumed.train()
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")
    again = looked_at(tmp_path / "again")  # Ctrl-C, and the same object goes on
    again.batches = Failing(again.batches, at=batch, error=Stop)
    with pytest.raises(Stop):
        again.train()
    again.train()
    assert lines(tmp_path / "again") == lines(tmp_path / "whole")


def test_a_stop_adds_a_record_and_changes_none(tmp_path):
    looked_at(tmp_path / "whole").train()
    looked_at(tmp_path / "cut").train(until=7)
    resumed = looked_at(tmp_path / "cut", model=tiny(seed=9))
    assert resumed.resume()
    resumed.train()
    found = lines(tmp_path / "cut")
    assert [dict(line)["step"] for line in found].count(7) == 1
    assert [line for line in found if dict(line)["step"] != 7] == lines(tmp_path / "whole")


WORKER = """
    from training_runs import make
    from minillm.deeper.training.run_folder import FolderLock

    def hold(record):
        pipe.send("has it")
        pipe.recv()

    def take(folder, how):
        if how == "lock":
            lock = FolderLock(folder)
            lock.acquire()
            hold(None)
        else:
            trainer = make(folder, 4, log_interval=4, checkpoint_interval=1)
            if how == "resume":
                trainer.resume()
            trainer.on_log = hold
            trainer.train()

    for folder, how in arguments:
        pipe.send("ready")
        pipe.recv()
        try:
            take(folder, how)
        except ValueError as error:
            pipe.send(str(error))
"""


@contextlib.contextmanager
def workers(count, *rounds):
    """Processes that begin a run, resume it, or lock its folder, when told so: (folder, how)."""
    found = [child(WORKER, rounds) for _ in range(count)]
    try:
        yield found
    finally:
        for process, _ in found:
            process.kill()
            process.join()


def begin(found):
    """Tell them all, when all are ready."""
    assert {pipe.recv() for _, pipe in found} == {"ready"}
    for _, pipe in found:
        pipe.send("go")


def test_of_processes_that_take_a_folder_at_once_one_gets_it(tmp_path):
    """Three that begin a run, then the same three that resume another."""
    rounds = (tmp_path / "start", "start"), (tmp_path / "resume", "resume")
    make(tmp_path / "resume", 4, log_interval=4, checkpoint_interval=1).train(until=2)
    with workers(3, *rounds) as found:
        for folder, _ in rounds:
            begin(found)
            said = [pipe.recv() for _, pipe in found]
            owner, pipe = found[said.index("has it")]
            said.remove("has it")
            for text in said:
                assert f"{folder} is in use by process {owner.pid} on " in text
            pipe.send("go on")
        for process, _ in found:
            process.join(900)
            assert process.exitcode == 0
    for folder, how in rounds:
        steps = [r["step"] for r in records(folder)]
        assert steps == ([2, 4] if how == "resume" else [4])
        again = make(folder, 4)
        assert again.resume() and again.step == 4


def test_a_kill_frees_the_folder(tmp_path):
    make(tmp_path, 4, log_interval=1).train(until=2)
    before = sorted(p.name for p in tmp_path.iterdir())
    with workers(1, (tmp_path, "lock")) as ((worker, pipe),):
        begin([(worker, pipe)])
        assert pipe.recv() == "has it"
        trainer = make(tmp_path, 4)
        for take in (trainer.resume, trainer.train):
            with pytest.raises(ValueError, match=rf"in use by process {worker.pid} on .* since 20"):
                take()
        assert sorted(p.name for p in tmp_path.iterdir()) == before
        worker.kill()
        worker.join()
        assert trainer.resume()
        trainer.train()


def test_a_command_leaves_a_folder_that_another_process_has(tmp_path, capsys):
    command = [
        "train",
        "--output-dir",
        str(tmp_path),
        "--steps",
        "2",
        "--vocab-size",
        "300",
        "--quiet",
    ]
    command += ["--hidden-size", "16", "--layers", "1", "--heads", "2", "--context-length", "600"]
    command += ["--device", "cpu", "--held-out", "1", "--batch-size", "1"]
    with workers(1, (tmp_path, "lock")) as ((worker, pipe),):
        begin([(worker, pipe)])
        assert pipe.recv() == "has it"
        assert main(command) == 1
        assert f"{tmp_path} is in use by process {worker.pid} on " in capsys.readouterr().err
        assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", ".lock-owner"]
    assert main(command) == 0


def test_who_had_the_folder_meanwhile_is_noticed(tmp_path):
    trainer = make(tmp_path, 12)
    trainer.train(until=2)
    with workers(1, (tmp_path, "lock")) as ((worker, pipe),):
        begin([(worker, pipe)])
        assert pipe.recv() == "has it"
    with pytest.raises(ValueError, match=rf"taken by process {worker.pid} on .* meanwhile"):
        trainer.train()
    assert trainer.resume()
    trainer.train()


def test_a_folder_is_free_after_training_and_after_a_refusal(tmp_path):
    lock = FolderLock(tmp_path)
    trainer = make(tmp_path, 12)
    trainer.train(until=2)
    with pytest.raises(ValueError, match="max_lr"):
        make(tmp_path, 12, max_lr=2e-3).resume()
    with pytest.raises(ValueError, match="holds a run"):
        make(tmp_path, 12).train()
    assert not lock.lock.is_locked
    resumed = make(tmp_path, 12)
    assert resumed.resume() and lock.lock.is_locked
    del resumed
    gc.collect()
    assert not lock.lock.is_locked


def test_every_checkpoint_that_a_full_disk_refuses_is_heard(tmp_path, monkeypatch, capsys):
    """Also where Python has shown a warning of the same words before, or shows none."""
    logged = []

    def run():
        trainer = make(tmp_path, 12, checkpoint_interval=2, log_interval=4)
        trainer.progress, trainer.on_log = True, logged.append
        trainer.resume()
        with pytest.raises(CheckpointError, match=r"step-00000012.*No space left"):
            trainer.train()

    monkeypatch.setattr(checkpoint, "sync", full_disk)
    run()
    run()  # no checkpoint to go on from: the same steps, the same words
    said = capsys.readouterr().err
    for step in (2, 4, 6, 8, 10):
        assert said.count(f"could not write {tmp_path / f'step-{step:08d}'}: [Errno 28]") == 2
    assert said.count("No space left on device; training goes on\n") == 10
    assert [len(record.get("failed_checkpoints", [])) for record in logged] == [1, 2, 2] * 2
    assert "step-00000010: [Errno 28] No space" in logged[-1]["failed_checkpoints"][-1]
    monkeypatch.undo()
    whole = make(tmp_path, 12, checkpoint_interval=2, log_interval=4)
    whole.resume()
    assert not any("failed_checkpoints" in record for record in whole.train())


@needs_unix
def test_a_record_that_half_fits_does_not_spoil_the_next_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_record(path, {"step": 1})
    for step in (2, 3):
        where = rf"metrics\.jsonl, step {step}: .*too large"
        with pytest.warns(UserWarning, match=where), small_disk(50):
            append_record(path, {"step": step, "sample": "a" * 60})
    append_record(path, {"step": 4})
    assert [record["step"] for record in records(tmp_path)] == [1, 4]
