"""A run of the command line that is killed after checkpoints, and resumed: as if nobody had."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

from minillm.cli.main import main
from minillm.deeper.training.checkpoint import checkpoints, load_checkpoint

# `python -m minillm train ...`, which says when it comes to the place of its death, and waits there
CHILD = """
    import os, runpy, sys
    from minillm.deeper.training import checkpoint, run_folder

    place = sys.argv.pop(1)

    def stops(module, name, *, before=None, after=None):
        real = getattr(module, name)

        def watched(*args, **kwargs):
            if before is not None and before(*args):
                die()
            found = real(*args, **kwargs)
            if after is not None and after(*args):
                die()
            return found

        setattr(module, name, watched)

    def die():
        print("here", flush=True)
        sys.stdin.read()

    if place == "after a checkpoint":
        stops(checkpoint, "save_checkpoint", after=lambda folder, step, *_: step == 8)
    elif place == "between two":
        stops(run_folder, "append_record", after=lambda path, record: record["step"] == 9)
    elif place == "while one is written":
        stops(checkpoint, "sync", before=lambda path: ".step-00000012" in path.parent.name)
    else:  # the journal of the tokenizer came before the training
        trained = lambda new: new.name == ".saving.json" and checkpoint.checkpoints(new.parent)
        stops(os, "replace", after=lambda old, new: trained(new))
    runpy.run_module("minillm", run_name="__main__", alter_sys=True)
"""
# where it dies, and the step of the last record and the checkpoints that are there then
PLACES = {
    "after a checkpoint": (6, ["step-00000004", "step-00000008"]),
    "between two": (9, ["step-00000004", "step-00000008"]),
    "while one is written": (12, [".step-00000012.", "step-00000004", "step-00000008"]),
    "after the last, while the model is saved": (14, ["step-00000012", "step-00000014"]),
}


def command(folder, *more):
    words = ["train", "--output-dir", folder, "--corpus", folder.parent / "corpus.txt", "--quiet"]
    words += ["--device", "cpu", "--hidden-size", 16, "--layers", 1, "--heads", 2, "--steps", 14]
    words += ["--context-length", 32, "--batch-size", 2, "--vocab-size", 300, "--warmup", 2]
    words += ["--checkpoint-interval", 4, "--log-interval", 3, "--eval-interval", 0, *more]
    return [str(word) for word in words]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a corpus, and in it a run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("runs")
    texts = [f"{n} fish, two fish, red fish, blue fish{'!' * (n % 7)}" for n in range(200)]
    (folder / "corpus.txt").write_text("<|endoftext|>".join(texts), encoding="utf-8")
    assert main(command(folder / "whole")) == 0
    return folder


@pytest.fixture(scope="module")
def processes(folder):
    """A process for each place, all started at once."""
    found = {
        place: subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(CHILD), place, *command(folder / place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for place in PLACES
    }
    yield found
    for process in found.values():
        process.kill()
        process.communicate()


def lines(folder):
    """The records of a run, without what depends on the machine's speed."""
    speed = ("seconds", "tokens_per_second")
    found = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in speed} for line in found]


def files(folder):
    """What a run leaves, by name, but for checkpoints and what holds a time or a folder's name."""
    changing = ("run.json", "metrics.jsonl", ".lock-owner")
    found = [path for path in folder.iterdir() if path.is_file() and path.name not in changing]
    return {path.name: path.read_bytes() for path in found}


@pytest.mark.parametrize("place", PLACES)
def test_a_run_that_is_killed_and_resumed_is_as_one_that_was_not(folder, processes, place):
    killed, whole, process = folder / place, folder / "whole", processes[place]
    deadline = threading.Timer(900, process.kill)
    deadline.start()
    assert process.stdout.readline() == "here\n", process.communicate()[1]
    deadline.cancel()
    process.kill()
    process.wait(timeout=900)
    assert process.returncode == (-signal.SIGKILL if os.name == "posix" else 1)
    last, found = PLACES[place]
    names = sorted(path.name.replace(str(process.pid), "") for path in killed.glob("*step-*"))
    assert names == found and lines(killed)[-1]["step"] == last
    assert (killed / ".saving.json").exists() == (last == 14)
    assert main(command(killed, "--resume")) == 0
    assert lines(killed) == lines(whole)
    assert files(killed) == files(whole)
    for one, two in zip(checkpoints(killed), checkpoints(whole), strict=True):
        (ours, state), (theirs, wanted) = load_checkpoint(one), load_checkpoint(two)
        assert state == wanted and ours.keys() == theirs.keys()
        for kind, tensors in theirs.items():
            assert ours[kind].keys() == tensors.keys()
            assert all(torch.equal(ours[kind][name], t) for name, t in tensors.items()), kind
