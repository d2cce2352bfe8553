"""A small model, small sources of batches, short runs and processes, for tests of training."""

import contextlib
import errno
import json
import multiprocessing
import os
import random
import signal
import socket
import textwrap
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from minillm.deeper.training.checkpoint import newest_checkpoint
from minillm.deeper.training.run import Run
from minillm.deeper.training.trainer import RunConfig, Trainer
from minillm.training import TrainConfig, WindowBatches

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

needs_unix = pytest.mark.skipif(resource is None, reason="needs the limits of a Unix system")
V, C = 23, 16


class Tiny(nn.Module):
    """Ids to logits, with tied weights, a buffer, a vector parameter and dropout."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, C)
        self.mix = nn.Linear(C, C)
        self.norm = nn.LayerNorm(C)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(C, V, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, ids):
        return self.head(self.drop(self.norm(torch.tanh(self.mix(self.embed(ids))))))


def tiny(seed=0, dropout=0.1):
    torch.manual_seed(seed)
    return Tiny(dropout)


TOKENS = torch.randint(V, (5000,), generator=torch.Generator().manual_seed(1))


def records(folder):
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def make(folder=None, steps=24, *, model=None, source=None, **settings):
    run = {"checkpoint_interval": 5}
    run |= {k: settings.pop(k) for k in ("checkpoint_interval", "keep") if k in settings}
    config = RunConfig(steps, **{"warmup_steps": 4, "log_interval": 4, **settings})
    part = None if folder is None else Run(folder, **run)
    batches = source or WindowBatches(TOKENS, 4, 12, seed=3)
    return Trainer(tiny() if model is None else model, batches, config, run=part, progress=False)


def weights(trainer):
    return [p.detach().clone() for p in trainer.model.state_dict().values()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(weights(a), weights(b), strict=True))


class Documents:
    """Random documents of 5 to 40 tokens below 20; number i depends on i alone."""

    def __init__(self):
        self.index = 0

    def __next__(self):
        self.index += 1
        rng = random.Random(self.index)
        return [self.index % 20, *(rng.randrange(20) for _ in range(rng.randrange(4, 40)))]

    def state_dict(self):
        return {"index": self.index}

    def load_state_dict(self, state):
        self.index = state["index"]


END = 22


class Language:
    """A language of letters: `sample(rng)` as StoryLanguage has it."""

    def sample(self, rng):
        text = "".join(rng.choice("abcdeé") for _ in range(rng.randrange(3, 12)))
        return type("Story", (), {"text": text})


class Letters:
    """A byte tokenizer with an end token: the least that `evaluate` needs."""

    special_tokens = types.MappingProxyType({"<end>": 256})
    vocab_size, eos_token_id = 257, 256

    def encode_ordinary(self, text):
        return list(text.encode())

    def decode_bytes(self, ids):
        return bytes(ids)


class Listed:
    """A source of given batches."""

    def __init__(self, batches):
        self.batches, self.index = batches, 0

    def __next__(self):
        self.index += 1
        return self.batches[self.index - 1]

    def state_dict(self):
        return {"index": self.index}

    def load_state_dict(self, state):
        self.index = state["index"]


class Stop(BaseException):
    """What Ctrl-C is: no Exception."""


class Failing:
    """A source that fails once, at batch `at`."""

    def __init__(self, source, at, error):
        self.source, self.at, self.error = source, at, error

    def __next__(self):
        batch = next(self.source)
        if self.source.index == self.at and self.error:
            error, self.error = self.error, None
            raise error
        return batch

    def state_dict(self):
        return self.source.state_dict()

    def load_state_dict(self, state):
        self.source.load_state_dict(state)


def damaged(folder):
    """A run of 10 steps whose newest checkpoint is handed back."""
    make(folder, keep=3).train(until=10)
    return newest_checkpoint(folder)


@contextlib.contextmanager
def small_disk(size):
    """No file may grow beyond `size` bytes in here, as on a disk that is nearly full.

    Only in here: pytest itself may be writing its report into a file.
    """
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)


class Killed(WindowBatches):
    """Windows, until the machine is switched off at batch 12."""

    def __next__(self):
        if self.index == 12:
            raise Stop
        return super().__next__()


@contextlib.contextmanager
def read_only(folder):
    """Nobody may write into `folder` in here; root, who may always, is somebody else meanwhile."""
    modes = {path: path.stat().st_mode for path in [folder, *folder.rglob("*")]}
    root = os.geteuid() == 0
    for path in modes:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        if root:
            os.seteuid(65534)
        yield
    finally:
        if root:
            os.seteuid(0)
        for path, mode in modes.items():
            path.chmod(mode)


def in_use(path):
    """Whether this process has a file open or mapped: `path`, or one below it."""
    text, links = str(path.resolve()), Path("/proc/self/fd")
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    held = [line.split(maxsplit=5)[-1].strip() for line in maps]
    for link in links.iterdir():
        with contextlib.suppress(OSError):
            held.append(os.readlink(link))
    return any(name == text or name.startswith(f"{text}/") for name in held)


@contextlib.contextmanager
def windows_rules(monkeypatch):
    """Files as Windows has them: folders cannot be opened, fsync wants a handle that may write,
    what is open or mapped cannot be renamed or replaced."""
    import fcntl

    real = {name: getattr(os, name) for name in ("open", "fsync", "rename", "replace")}

    def opened(path, *args, **kwargs):
        if isinstance(path, str | os.PathLike) and os.path.isdir(path) and "dir_fd" not in kwargs:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real["open"](path, *args, **kwargs)

    def fsync(handle):
        number = handle if isinstance(handle, int) else handle.fileno()
        if not fcntl.fcntl(number, fcntl.F_GETFL) & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EBADF, "Bad file descriptor")
        real["fsync"](handle)

    def moved(name):
        def move(source, target, **kwargs):
            for path in (Path(source), Path(target)):
                if in_use(path):
                    raise PermissionError(errno.EACCES, "used by another process", str(path))
            if name == "rename" and os.path.exists(target):
                raise FileExistsError(errno.EEXIST, "File exists", str(target))
            real[name](source, target, **kwargs)

        return move

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", opened)
        patch.setattr(os, "fsync", fsync)
        for name in ("rename", "replace"):
            patch.setattr(os, name, moved(name))
        yield


# Forks of a process that has imported all this once; it has trained nothing, so they may.
CHILDREN = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")
CHILDREN.set_forkserver_preload(["minillm.cli.main", "torch._dynamo", "pytest"])


def run_code(pipe, code, arguments, settings):
    os.environ.update(settings)
    exec(textwrap.dedent(code), {"pipe": pipe, "arguments": arguments})


def child(code, arguments, **settings):
    """A process that runs this code, and our end of its pipe."""
    ours, pipe = CHILDREN.Pipe()
    process = CHILDREN.Process(target=run_code, args=(pipe, code, arguments, settings))
    process.start()
    pipe.close()
    return process, ours


def two_processes(code, *arguments):
    """What each of the two that torchrun would start sends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = [child(code, arguments, RANK=str(r), LOCAL_RANK=str(r), **group) for r in range(2)]
    found = [ours.recv() for _, ours in started]
    for process, _ in started:
        process.join(900)
        assert process.exitcode == 0
    return found


def learns_and_resumes_bit_for_bit(make_model, folder):
    """A short training learns; one that is stopped and resumed ends with the same weights."""
    text = torch.arange(400) % 7 + torch.arange(400) // 7 % 5

    def trainer(run=None):
        settings = TrainConfig(30, max_lr=1e-2, warmup_steps=2, log_interval=1)
        batches = WindowBatches(text, 4, 16)
        return Trainer(make_model(), batches, settings, run=run, progress=False)

    whole = trainer()
    losses = [record["loss"] for record in whole.train()]
    assert losses[-1] < losses[0] / 2
    first = trainer(Run(folder))
    first.train(until=12)
    second = trainer(Run(folder))
    assert second.resume() and second.step == 12
    second.train()
    for key, value in whole.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[key], value), key
