"""Two processes on gloo give the numbers of one; started by torchrun, and by hand for speed."""

import json
import os
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from training_runs import two_processes

from minillm.cli.main import main
from minillm.deeper.training import checkpoint, distributed
from minillm.deeper.training.checkpoint import CheckpointError
from minillm.deeper.training.trainer import RunConfig, Trainer

RATE = 6e-3
OPTIONS = f"""
    --steps 6 --device cpu --hidden-size 32 --layers 2 --batch-size 4 --eval-interval 0
    --held-out 4 --lr {RATE} --warmup 2 --log-interval 1 --context-length 256 --quiet
    --gradient-accumulation-steps 2 --checkpoint-interval 3
""".split()

KINDS = {
    "ddp": [],  # without asking
    "fsdp": ["--parallel", "fsdp"],
    "muon": ["--parallel", "ddp", "--optimizer", "muon"],
}

WORKER = """
    import faulthandler, os, shutil
    from minillm.deeper.training import distributed
    from minillm.cli.main import main

    faulthandler.dump_traceback_later(200, exit=True)  # whoever waits in vain says where
    distributed.stop = lambda: None  # one group serves all commands
    codes = []
    for argv in arguments:
        if argv[0] != "cut":
            codes.append(main(argv))
        elif distributed.world().rank == 0:  # a copy of a run without its last checkpoint
            shutil.copytree(argv[1], argv[2])
            shutil.rmtree(argv[2] + "/step-00000006")
    pipe.send(codes)
    distributed.barrier()
    os._exit(0)
"""


def curve(folder):
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def train(out, tokenizer, *more):
    return ["train", "--output-dir", str(out), "--tokenizer", str(tokenizer), *OPTIONS, *more]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs in this process; the same in two, each of them also resumed from its middle."""
    folder = tmp_path_factory.mktemp("runs")
    assert main(["train", "--output-dir", str(folder / "one"), *OPTIONS]) == 0
    assert main(train(folder / "one-muon", folder / "one", *KINDS["muon"])) == 0
    commands = []
    for kind, options in KINDS.items():
        out, resumed = str(folder / kind), str(folder / f"{kind}-resumed")
        commands.append(train(out, folder / "one", *options))
        commands.append(["cut", out, resumed])
        commands.append(train(resumed, folder / "one", *options, "--resume"))
    assert two_processes(WORKER, *commands) == [[0] * 6] * 2
    return folder


def moments(run):
    """The running means of the gradients of the first three steps, by name."""
    step = run / "step-00000003"
    if (step / "sharded").exists():
        dcp_to_torch_save(step / "sharded", run / "whole.pt")
        found = torch.load(run / "whole.pt")["optimizer"]
    else:
        found = load_file(step / "optimizer.safetensors")
    return {name: value for name, value in found.items() if name.endswith("/exp_avg")}


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_give_the_curve_of_one(runs, kind):
    # torch's Muon computes in bfloat16: sums rounded otherwise show in its steps of about 1e-2
    alone, near = ("one-muon", 1e-4) if kind == "muon" else ("one", 1e-5)
    one, two = curve(runs / alone), curve(runs / kind)
    assert [r["step"] for r in two] == [1, 2, 3, 4, 5, 6]
    for a, b in zip(one, two, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=near)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=10 * near)
        assert b["tokens"] == a["tokens"]
    ours, theirs = moments(runs / alone), moments(runs / kind)
    assert ours.keys() == theirs.keys() and ours
    for name in ours:  # up to 0.02 in size, and sums of products: they may differ in rounding alone
        torch.testing.assert_close(theirs[name], ours[name], rtol=10 * near, atol=near / 10)
    ours, theirs = (load_file(runs / name / "model.safetensors") for name in (alone, kind))
    assert ours.keys() == theirs.keys()
    # Adam divides a gradient by its size: where it is next to nothing, as in the rows of rare
    # tokens, rounding is divided by rounding. So a weight may be off by part of a step's length.
    apart = 1e-3 if kind == "muon" else RATE / 100
    for name in ours:
        torch.testing.assert_close(theirs[name], ours[name], rtol=10 * near, atol=apart)


@pytest.mark.parametrize("kind", KINDS)
def test_resuming_in_two_processes_is_exact(runs, kind):
    whole, resumed = (
        load_file(runs / name / "model.safetensors") for name in (kind, f"{kind}-resumed")
    )
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert [r["step"] for r in curve(runs / f"{kind}-resumed")] == [1, 2, 3, 4, 5, 6]


def test_sharded_checkpoints_lie_in_shards(runs):
    shards = sorted(p.name for p in (runs / "fsdp/step-00000006/sharded").glob("*.distcp"))
    assert shards == ["__0_0.distcp", "__1_0.distcp"]
    hidden = sorted(path.name for path in (runs / "fsdp").glob(".*"))
    assert hidden == [".lock", ".lock-owner"]  # nothing half-written is left
    state = checkpoint.read_state(runs / "fsdp/step-00000006")
    assert state["sharded"] and state["processes"] == 2
    assert "sharded/__0_0.distcp" in state["files"]  # so a truncated shard is noticed


def test_a_sharded_checkpoint_is_refused_by_one_process(runs, capsys):
    out = runs / "fsdp-alone"
    shutil.copytree(runs / "fsdp", out)
    assert main(train(out, runs / "one", "--parallel", "fsdp", "--resume")) == 1
    error = capsys.readouterr().err
    assert "is sharded (fsdp), the model is whole (one process or ddp)" in error


def test_one_process_may_go_on_where_two_stopped(runs):
    out = runs / "ddp-alone"
    shutil.copytree(runs / "ddp", out)
    shutil.rmtree(out / "step-00000006")
    assert main(train(out, runs / "one", "--resume")) == 0
    for a, b in zip(curve(runs / "one"), curve(out), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=1e-5)


def test_a_mistake_of_the_first_process_ends_the_command(runs, monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(train(runs / "ddp", runs / "one")) == 1
    assert "ddp holds a run: give --resume to go on" in capsys.readouterr().err


def torchrun(processes, *command):
    """What the documentation says, as a user types it."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "-m", "minillm"]
    done = subprocess.run(
        [sys.executable, *launcher, *command],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("parameters") == 1  # one process speaks
    return done.stderr


def test_torchrun_goes_on_with_another_number_of_processes(runs, tmp_path):
    """Three processes take up the shards of two."""
    out = tmp_path / "out"
    shutil.copytree(runs / "fsdp", out)
    shutil.rmtree(out / "step-00000006")
    errors = torchrun(3, *train(out, runs / "one"), "--parallel", "fsdp", "--resume")
    assert "resumed at step 3" in errors
    assert len(list((out / "step-00000006/sharded").glob("*.distcp"))) == 3
    for a, b in zip(curve(runs / "one"), curve(out), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=1e-5)


# one process: everything does the plain thing


def test_without_torchrun_there_is_one_process(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert distributed.start("cpu") == torch.device("cpu")
    assert distributed.world() == distributed.World(0, 1)
    model = nn.Linear(2, 2)
    assert distributed.wrap(model, "fsdp") is model
    assert not distributed.is_sharded(model)
    value = torch.ones(2)
    assert distributed.sum_over_ranks(value) is value
    with distributed.communicate(model, False):
        pass
    distributed.barrier()
    distributed.stop()
    whole = distributed.whole_tensors(model)
    assert torch.equal(whole["weight"], model.weight) and not whole["weight"].requires_grad


@pytest.fixture
def two_in_name():
    """This process as the first of two, with nobody to talk to."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


class Stack(nn.Module):
    """Calls its blocks, and blocks in lists of blocks, one after the other."""

    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        def run(blocks, x):
            for block in blocks:
                x = run(block, x) if isinstance(block, nn.ModuleList) else block(x)
            return x

        return run(self.blocks, x)


def nested(kind):
    block = nn.Linear(4, 4)
    return {
        "a list in a block": Stack(Stack(block, nn.Linear(4, 4)), Stack(nn.Linear(4, 4))),
        "a list of lists": Stack(nn.ModuleList([block, nn.Linear(4, 4)]), nn.Linear(4, 4)),
        "a block used twice": Stack(block, nn.Linear(4, 4), block),
        "a block without weights": Stack(block, nn.ReLU()),
        "a dict in a list": Stack(block, nn.ModuleDict({"a": nn.Linear(4, 4)})),
    }[kind]


@pytest.mark.parametrize("kind", ["list in a block", "list of lists", "block used twice"])
def test_lists_of_blocks_may_be_nested_and_share_blocks(two_in_name, kind):
    model = nested(f"a {kind}")
    units = [m for m in model.modules() if isinstance(m, nn.Linear)]
    wrapped = distributed.wrap(model, "fsdp")
    wrapped(torch.ones(2, 4)).sum().backward()
    assert all(isinstance(unit, FSDPModule) for unit in [*units, wrapped])
    assert distributed.is_sharded(model)
    shapes = {p.to_local().shape for p in model.parameters()}
    assert shapes == {torch.Size([2, 4]), torch.Size([2])}  # half of each


@pytest.mark.parametrize("kind", ["block without weights", "dict in a list"])
def test_what_has_nothing_to_shard_or_is_not_called_is_left(two_in_name, kind):
    model = distributed.wrap(nested(f"a {kind}"), "fsdp")
    assert all(hasattr(p, "full_tensor") for p in model.parameters())


def test_a_model_on_the_cpu_stays_there(two_in_name, monkeypatch):
    """fully_shard by itself would take a GPU wherever the machine has one."""
    meshes = []

    def fully_shard(module, mesh=None):
        meshes.append(mesh)
        return module

    monkeypatch.setattr(torch.distributed.fsdp, "fully_shard", fully_shard)
    distributed.wrap(Stack(nn.Linear(4, 4)), "fsdp")
    assert [(mesh.device_type, mesh.size()) for mesh in meshes] == [("cpu", 2)] * 2


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_compiled_model_is_wrapped_without_its_shell(two_in_name, parallel):
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    compiled = torch.compile(model, backend="eager")
    trainer = Trainer(compiled, [], RunConfig(2, warmup_steps=1, parallel=parallel))
    assert trainer.model is model and hasattr(trainer.forward, "_orig_mod")
    assert (trainer.forward is compiled) == (parallel == "fsdp")  # which shards in place
    assert [name for name, _ in trainer.model.named_parameters()] == [
        "0.weight",
        "1.weight",
        "1.bias",
    ]


def test_others_wait_while_the_first_process_prepares(monkeypatch):
    started = {}
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(dist, "init_process_group", lambda *a, **k: started.update(k))
    assert distributed.start("cpu") == torch.device("cpu")
    assert started["timeout"] >= timedelta(hours=6)


def test_whole_tensors_are_gathered_one_at_a_time(monkeypatch):
    events = []

    class Shard:
        def full_tensor(self):
            events.append("gather")
            return self

        def detach(self):
            return self

        def cpu(self):
            events.append("move")
            return torch.ones(2)

    monkeypatch.setattr(checkpoint, "model_tensors", lambda model: {"a": Shard(), "b": Shard()})
    assert [*distributed.whole_tensors(nn.Linear(2, 2))] == ["a", "b"]
    assert events == ["gather", "move"] * 2


def test_gradients_are_exchanged_once():
    calls = []

    class Sharded(nn.Module):
        def set_requires_gradient_sync(self, now):
            calls.append(now)

    for now in (False, False, True):
        with distributed.communicate(Sharded(), now):
            pass
    assert calls == [False, False, True]


def test_what_the_first_process_raises_is_raised():
    assert distributed.in_first(lambda: 5) == 5
    with pytest.raises(ValueError, match="in the way"):
        distributed.in_first(lambda: (_ for _ in ()).throw(ValueError("in the way")))


def test_a_checkpoint_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(CheckpointError, match="step-00000001"):
        distributed.save(tmp_path / "file", 1, 2, model, optimizer, {}, {})


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_torchrun_on_gpus(tmp_path, kind):
    """The same command, one process a GPU, bfloat16 and compiled."""
    number = str(torch.cuda.device_count())
    command = ["-m", "torch.distributed.run", "--nproc-per-node", number, "-m", "minillm", "train"]
    options = ["--output-dir", str(tmp_path), *OPTIONS, "--device", "cuda", "--parallel", kind]
    options += ["--batch-size", "16", "--precision", "bfloat16", "--compile"]
    subprocess.run([sys.executable, *command, *options], check=True, cwd=Path(__file__).parents[3])
    losses = [r["loss"] for r in curve(tmp_path)]
    assert losses[-1] < losses[0]
