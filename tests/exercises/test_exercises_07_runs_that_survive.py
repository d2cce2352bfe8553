"""The graders of 07_runs_that_survive accept right answers and say what is wrong with others."""

import copy
import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

from minillm.deeper.training.run import Run
from minillm.deeper.training.trainer import Trainer
from minillm.exercises import grade
from minillm.exercises.runs_that_survive import KILLED
from minillm.training import TrainConfig, WindowBatches


class Snapshot:
    def __init__(self, model, optimizer):
        self.model = copy.deepcopy(model.state_dict())
        self.optimizer = copy.deepcopy(optimizer.state_dict())
        self.place = torch.get_rng_state()

    def put_back(self, model, optimizer):
        model.load_state_dict(self.model)
        optimizer.load_state_dict(copy.deepcopy(self.optimizer))
        torch.set_rng_state(self.place)


class ThroughBytes:
    """Another right answer: everything through a file format."""

    def __init__(self, model, optimizer):
        self.file = tempfile.TemporaryFile()  # noqa: SIM115
        state = {"m": model.state_dict(), "o": optimizer.state_dict(), "r": torch.get_rng_state()}
        torch.save(state, self.file)

    def put_back(self, model, optimizer):
        self.file.seek(0)
        state = torch.load(self.file, weights_only=True)
        model.load_state_dict(state["m"])
        optimizer.load_state_dict(state["o"])
        torch.set_rng_state(state["r"])


class Itself(Snapshot):
    def __init__(self, model, optimizer):
        super().__init__(model, optimizer)
        self.model = model.state_dict()


class OnlyWeights(Snapshot):
    def put_back(self, model, optimizer):
        model.load_state_dict(self.model)
        torch.set_rng_state(self.place)


class NoBuffers(Snapshot):
    def put_back(self, model, optimizer):
        super().put_back(model, optimizer)
        with torch.no_grad():
            for buffer in model.buffers():
                buffer.zero_()


class NoRandom(Snapshot):
    def put_back(self, model, optimizer):
        model.load_state_dict(self.model)
        optimizer.load_state_dict(copy.deepcopy(self.optimizer))


class MomentsItself(Snapshot):
    def __init__(self, model, optimizer):
        super().__init__(model, optimizer)
        self.optimizer = optimizer.state_dict()


class OnceOnly(Snapshot):
    def put_back(self, model, optimizer):
        model.load_state_dict(self.model)
        optimizer.load_state_dict(self.optimizer)
        torch.set_rng_state(self.place)


class Reseeds(Snapshot):
    def __init__(self, model, optimizer):
        super().__init__(model, optimizer)
        torch.manual_seed(0)
        self.place = torch.get_rng_state()


class Nothing(Snapshot):
    def put_back(self, model, optimizer):
        pass


def replace_file(path, content):
    beside = path.with_name("." + path.name)
    with open(beside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def by_handle(path, content):
    handle, name = tempfile.mkstemp(dir=path.parent)
    os.write(handle, content)
    os.fsync(handle)
    os.close(handle)
    Path(name).replace(path)
    return path


def in_place(path, content):
    path.write_bytes(content)


def in_place_synced(path, content):
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def no_fsync(path, content):
    beside = path.with_name("new")
    beside.write_bytes(content)
    beside.rename(path)


def no_flush(path, content):
    beside = path.with_name("new")
    with open(beside, "wb") as file:
        file.write(content)
        os.fsync(file.fileno())
    os.replace(beside, path)


def elsewhere(path, content):
    with tempfile.TemporaryDirectory() as folder:
        beside = Path(folder) / "new"
        replace_file(beside, content)
        os.replace(beside, path)


def in_a_folder_beside(path, content):
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        beside = Path(folder) / "new"
        replace_file(beside, content)
        os.replace(beside, path)


def old_one_first(path, content):
    path.unlink(missing_ok=True)
    replace_file(path, content)


def keeps_a_copy(path, content):
    replace_file(path, content)
    path.with_name("state.bak").write_bytes(content)


def half(path, content):
    replace_file(path, content[: len(content) // 2])


def wrong_name(path, content):
    path.with_name("state.new").write_bytes(content)


RIGHT = {
    "07_runs_that_survive.1": Snapshot,
    "07_runs_that_survive.2": replace_file,
    "07_runs_that_survive.3": KILLED,
}
WRONG = [
    ("07_runs_that_survive.1", Itself, "keep a copy"),
    ("07_runs_that_survive.1", OnlyWeights, "the optimizer was not put back"),
    ("07_runs_that_survive.1", NoBuffers, "is a buffer"),
    ("07_runs_that_survive.1", NoRandom, "dropout drops other numbers"),
    ("07_runs_that_survive.1", MomentsItself, "moments are those of another step"),
    ("07_runs_that_survive.1", OnceOnly, "put back a second time"),
    ("07_runs_that_survive.1", Reseeds, "making a snapshot changes the run"),
    ("07_runs_that_survive.1", Nothing, "0.weight was not put back"),
    ("07_runs_that_survive.2", in_place, "the file itself is written"),
    ("07_runs_that_survive.2", in_place_synced, "the file itself is changed"),
    ("07_runs_that_survive.2", no_fsync, "before the bytes are forced"),
    ("07_runs_that_survive.2", no_flush, "which flush empties"),
    ("07_runs_that_survive.2", elsewhere, "may be another disk"),
    ("07_runs_that_survive.2", old_one_first, "the old content is gone"),
    ("07_runs_that_survive.2", keeps_a_copy, "left beside the file: state.bak"),
    ("07_runs_that_survive.2", half, "of 15 bytes"),
    ("07_runs_that_survive.2", wrong_name, "as before"),
    ("07_runs_that_survive.3", {**KILLED, "checkpoints": [8, 16, 24]}, "the oldest was removed"),
    ("07_runs_that_survive.3", {**KILLED, "checkpoints": [24, 32]}, "after every 8th step"),
    ("07_runs_that_survive.3", {**KILLED, "first step taken again": 24}, "is in the checkpoint"),
    ("07_runs_that_survive.3", {**KILLED, "first step taken again": 31}, "nowhere but in the log"),
    ("07_runs_that_survive.3", {**KILLED, "steps finished twice": 7}, "was not finished"),
    ("07_runs_that_survive.3", {**KILLED, "records kept": [10, 20, 30]}, "writes its record again"),
    ("07_runs_that_survive.3", {**KILLED, "records kept": 20}, "a list of steps"),
    ("07_runs_that_survive.3", {**KILLED, "records kept": ...}, "not filled in"),
    ("07_runs_that_survive.3", [16, 24], "a dictionary"),
]


class Stub:
    def __init__(self, model, optimizer): ...

    def put_back(self, model, optimizer): ...


def test_a_snapshot_that_keeps_nothing_is_unsolved():
    assert grade("07_runs_that_survive.1", Stub).status == "unsolved"


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("07_runs_that_survive.1", ThroughBytes),
        ("07_runs_that_survive.2", by_handle),
        ("07_runs_that_survive.2", in_a_folder_beside),
    ],
)
def test_other_right_answers(name, answer):
    from minillm.exercises import grade

    assert grade(name, answer).status == "correct", grade(name, answer).message


class Killed(BaseException):
    pass


def test_the_predicted_numbers_are_the_trainers(tmp_path):
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
        batches, run = (
            WindowBatches(torch.arange(90) % 9, 2, 5),
            Run(tmp_path, checkpoint_interval=8),
        )
        return Trainer(model, batches, TrainConfig(100), run=run, progress=False)

    def steps():
        lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["step"] for line in lines]

    killed, calls = make(), []

    def kill(gradient):
        calls.append(None)
        if len(calls) == 31:
            raise Killed

    killed.model[0].weight.register_hook(kill)
    with pytest.raises(Killed):
        killed.train()
    assert killed.step == 30 and steps() == [10, 20, 30]
    found = [int(p.name.removeprefix("step-")) for p in sorted(tmp_path.glob("step-*"))]
    resumed = make()
    assert resumed.resume()
    first = resumed.step + 1
    resumed.train(until=25)
    kept = [step for step in steps() if step < first]
    assert {
        "checkpoints": found,
        "first step taken again": first,
        "steps finished twice": killed.step - first + 1,
        "records kept": kept,
    } == KILLED
