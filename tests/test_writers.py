"""What writes a file: an older one is replaced whole or not at all, and nothing else is left."""

import os
import stat
import sys
import tempfile
from argparse import Namespace
from functools import cache
from pathlib import Path

import nbformat
import pytest
import torch
from interruptions import Interruption

from minillm.beyond.export import onnx_file
from minillm.beyond.export import step as export
from minillm.beyond.lora.adapters import add_lora
from minillm.bpe import BPETokenizer
from minillm.cli import run_info
from minillm.config import ModelConfig
from minillm.deeper.pretrained.adapters import save_adapter
from minillm.deeper.pretrained.folder import write_checkpoint
from minillm.deeper.tokenizer.hf_json import to_hf
from minillm.deeper.tokenizer.wrapped import WrappedTokenizer
from minillm.deeper.training import run_folder
from minillm.deeper.training.checkpoint import CheckpointError, newest_checkpoint, save_checkpoint
from minillm.deeper.training.run_folder import append_record, forget_after
from minillm.deeper.training.token_file import TokenDataset
from minillm.model import CausalLM
from minillm.support.files import recover, replacing, transaction, write_json

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import build
import execute

# Each writes into a folder; what it writes says which of the two times it is, 0 or 1.


def model(time):
    return CausalLM(ModelConfig(260, 8, 1, 2, 8, max_position_embeddings=64), seed=time)


def tokenizer(time):
    return BPETokenizer.train(["a b c", "c d e"][time] * 9, 260)


@cache
def onnx_program():
    """An exported step and what torch makes of it, which takes seconds."""
    program, made, real = export.export_step(model(1), max_length=8), [], torch.onnx.export
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.onnx, "export", lambda *a, **k: made.append(real(*a, **k)) or made[0])
        onnx_file.to_onnx(program, Path(folder, "x.onnx"))
    return program, made[0]


def write_onnx(folder, time):
    pytest.importorskip("onnxscript")
    program, made = onnx_program()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.onnx, "export", lambda *_, **__: made)
        onnx_file.to_onnx(program, folder / "step.onnx")
    if time == 0:
        for path in folder.glob("step.onnx*"):
            path.write_bytes(b"older")


def write_two_onnx_files(folder, time):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnx_file, "_ONE_FILE", 0)
        write_onnx(folder, time)


def write_adapter(folder, time):
    tuned = model(0)
    add_lora(tuned, 2, 4 + time, "all-linear")
    save_adapter(tuned, folder)


def write_checkpoint_of_a_run(folder, time):
    try:
        save_checkpoint(folder, 3, {"model": {"w": torch.full((4,), time)}}, {"time": time})
    except CheckpointError as error:
        raise OSError from error


def write_run_info(folder, time):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_info, "options", lambda a: {"time": a.time})
        run_info.begin_run_info(Namespace(output_dir=folder, resume=False, time=time))


def forget(folder, time):
    if not (folder / "metrics.jsonl").exists():
        lines = "".join(f'{{"step": {i}}}\n' for i in range(9))
        (folder / "metrics.jsonl").write_text(lines, encoding="utf-8")
    forget_after(folder / "metrics.jsonl", 5 - time)


def append(folder, time):
    with pytest.MonkeyPatch.context() as patch:  # it tells, and the run goes on
        patch.setattr(run_folder.warnings, "warn", tell)
        append_record(folder / "metrics.jsonl", {"step": time})


def tell(message, **_):
    raise OSError(message)


def write_notebook(folder, time):
    notebook = nbformat.v4.new_notebook()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execute, "read", lambda path: notebook)
        patch.setattr(execute.NotebookClient, "execute", lambda self: None)
        patch.setattr(execute, "clean", lambda notebook: notebook.metadata.update(time=time))
        execute.execute(folder / "in.ipynb", folder / "out.ipynb")


def write_module(folder, time):
    try:
        build.write(folder / "module.py", f"TIME = {time}\n")
    except build.BuildError as error:
        raise OSError from error


WRITERS = {
    "json": lambda f, time: write_json(f / "x.json", {"time": time}),
    "onnx": write_onnx,
    "onnx of two files": write_two_onnx_files,
    "tokens": lambda f, time: TokenDataset.write(
        f / "x.npy", [[time] * 9, [2]], vocab_size=4, eos_token_id=3
    ),
    "tokenizer": lambda f, time: tokenizer(time).save(f),
    "wrapped tokenizer": lambda f, time: WrappedTokenizer(to_hf(tokenizer(time))).save(f),
    "checkpoint": lambda f, time: write_checkpoint(f, {"time": time}, {"w": torch.zeros(time + 1)}),
    "adapter": write_adapter,
    "checkpoint of a run": write_checkpoint_of_a_run,
    "run.json": write_run_info,
    "records forgotten": forget,
    "record added": append,
    "notebook": write_notebook,
    "module": write_module,
}


def contents(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.mark.parametrize("how", ["fails", "interrupted"])
@pytest.mark.parametrize("kind", WRITERS)
def test_an_older_file_is_replaced_whole_or_not_at_all(kind, how, tmp_path, monkeypatch):
    """The disk is full, or Ctrl-C is pressed, at each call that writes."""
    write, whole = WRITERS[kind], []
    if kind == "record added" and how == "interrupted":
        pytest.skip("a line cut short by Ctrl-C is dropped when the run is resumed")
    for time in (0, 1):
        write(tmp_path, time)
        whole.append(contents(tmp_path))
    assert whole[0] != whole[1]
    outcomes, n, counted = set(), 0, None
    while counted is None or n <= counted.count:
        folder, n = tmp_path / f"{n}", n + 1
        folder.mkdir()
        for name, data in whole[0].items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)
        with (
            Interruption(n, how).at_work(monkeypatch) as counted,
            pytest.raises((OSError, KeyboardInterrupt)),
        ):
            write(folder, 1)
            raise KeyboardInterrupt  # what failed was of no importance
        recover(folder)
        newest_checkpoint(folder)
        # half a checkpoint has a name of its own, and goes with the next one
        found = {k: v for k, v in contents(folder).items() if not k.startswith(".step-")}
        assert found in whole, (n, sorted(found))
        outcomes.add(whole.index(found))
    assert {*outcomes} == {0, 1}


class Full:
    """A file's beginning, after which the disk is full."""

    def __init__(self, write):
        self.write = write

    def __call__(self, path):
        self.write(path)
        data = Path(path).read_bytes()
        Path(path).write_bytes(data[: len(data) // 2])
        raise OSError("no space left")


def test_an_onnx_file_survives_a_writer_that_fails_halfway(tmp_path, monkeypatch):
    write_onnx(tmp_path, 0)
    before = contents(tmp_path)
    real = torch.onnx.ONNXProgram.save

    def save(self, path, **options):
        Full(lambda p: real(self, p, **options))(path)

    monkeypatch.setattr(torch.onnx.ONNXProgram, "save", save)
    with pytest.raises(OSError, match="no space left"):
        write_onnx(tmp_path, 1)
    assert contents(tmp_path) == before


def test_an_onnx_file_of_two_parts_runs(tmp_path):
    session = pytest.importorskip("onnxruntime").InferenceSession
    found = []
    for write in (write_onnx, write_two_onnx_files):
        write(tmp_path, 1)
        step = session(str(tmp_path / "step.onnx"), providers=["CPUExecutionProvider"])
        keys, values = export.DecodingStep(model(1), max_length=8).empty()
        inputs = {"input_ids": torch.tensor([[5]]), "position": torch.tensor([0])}
        inputs |= {"keys": keys, "values": values}
        found.append(step.run(None, {name: x.numpy() for name, x in inputs.items()})[0])
    assert (found[0] == found[1]).all()
    assert sorted(contents(tmp_path)) == ["step.onnx", "step.onnx.data"]


# Who may read a file, links, and what is no file


def modes(folder):
    return {p.name: stat.S_IMODE(p.stat().st_mode) for p in folder.iterdir() if p.is_file()}


def write_two(folder):
    with transaction(folder) as staging:
        write_json(staging / "a", {})
        save_adapter_like(staging / "b")


def save_adapter_like(path):
    """As safetensors does, whose files are closed to others."""
    path.write_text("b", encoding="utf-8")
    path.chmod(0o600)


@pytest.mark.skipif(os.name == "nt", reason="needs the permissions of a Unix system")
@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_a_new_file_has_the_mode_of_the_umask_and_a_replaced_one_keeps_its_own(umask, tmp_path):
    before = os.umask(umask)
    try:
        for _ in range(2):
            write_two(tmp_path)
            write_json(tmp_path / "c", {})
            assert set(modes(tmp_path).values()) == {0o666 & ~umask}
        for mode in (0o640, 0o444, 0o755):
            for path in tmp_path.iterdir():
                path.chmod(mode)
            write_two(tmp_path)
            write_json(tmp_path / "c", {"mode": mode})
            assert modes(tmp_path) == dict.fromkeys("abc", mode)
    finally:
        os.umask(before)


@pytest.mark.skipif(os.name == "nt", reason="links need a permission there")
def test_one_file_is_written_through_a_link_and_a_folder_of_files_in_its_place(tmp_path):
    here, far = tmp_path / "here", tmp_path / "far"
    here.mkdir()
    far.mkdir()
    for name in ("a", "b", "c"):
        (far / name).write_text("old", encoding="utf-8")
        (here / name).symlink_to(Path("..", "far", name))
    (here / "new").symlink_to(far / "new")  # points at nothing yet
    for name in ("c", "new"):
        write_json(here / name, {})
        assert (here / name).is_symlink() and (far / name).read_bytes() == b"{}\n"
    write_two(here)
    assert not (here / "a").is_symlink() and not (here / "b").is_symlink()
    assert {(far / name).read_bytes() for name in "ab"} == {b"old"}
    assert sorted(contents(far)) == ["a", "b", "c", "new"]


def test_what_is_no_file_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match=r"x is no file that could be replaced"):
        (tmp_path / "x").mkdir()
        with replacing(tmp_path / "x"):
            raise AssertionError
    if hasattr(os, "mkfifo"):  # it stands for all devices: a mistake here must not replace one
        os.mkfifo(tmp_path / "y")
        with pytest.raises(ValueError, match="y is no file that could be replaced"):
            write_json(tmp_path / "y", {})
    assert {*os.listdir(tmp_path)} <= {"x", "y"}
