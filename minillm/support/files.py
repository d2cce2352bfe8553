"""Files and folders that are the old ones or the new ones, whatever the moment of a kill.

`replacing` writes one file, `transaction` several of a folder together; files that are not ours
stay. `read_json` reads what a stranger wrote. Written by hand.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, onto the disk.

    Windows opens no folder, and needs no such call: its file systems log renames themselves.
    """
    folder = path.is_dir()
    try:
        handle = os.open(path, os.O_RDONLY if folder else os.O_RDWR)  # Windows: only to write
    except PermissionError:
        if folder:
            return
        raise
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_space(folder: Path, num_bytes: int) -> None:
    """Raises: OSError if the disk of `folder`, which need not exist yet, has less room than that.

    A quota may be smaller than the disk: that only writing can tell.
    """
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    if usage.free < num_bytes and usage.total:  # some network drives say 0 of everything
        message = f"{num_bytes:,} bytes are to be written, and the disk has {usage.free:,} free"
        raise OSError(errno.ENOSPC, message, str(folder))


def _say_where(error: BaseException, path: Path) -> None:
    """Let an OSError name `path` if it names no file: that of a write to a full disk does not."""
    if isinstance(error, OSError) and error.errno is not None and error.filename is None:
        error.filename = str(path)


def _mode(path: Path, fresh: int) -> int:
    """Who may do what with the file of that name, once it is replaced: as before, or as `fresh`."""
    return stat.S_IMODE(path.stat().st_mode if path.is_file() else fresh)


@contextmanager
def replacing(target: Path, *, durable: bool = True) -> Iterator[Path]:
    """A temporary path beside `target` that takes its place if the block succeeds.

    Who may read the older file may read the new one; where there was none, the umask says who.
    Through a symbolic link, as `open` writes, the file that it points at is replaced.

    Args:
        durable: wait until the disk has it, so that a power failure finds the one or the other.
    Raises: ValueError if `target` is there and no file; OSError if it could not be written.
    """
    if target.is_symlink():
        target = Path(os.path.realpath(target))
    if target.exists() and not target.is_file():
        raise ValueError(f"{target} is no file that could be replaced")
    path = target.with_name(f".{secrets.token_hex(8)}.{target.name}")  # writers look at the ending
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        mode = _mode(target, path.stat().st_mode)
        yield path
        if durable:
            sync(path)  # on the disk before it has the name
        os.chmod(path, mode)
        os.replace(path, target)
    except BaseException as error:
        _say_where(error, target)
        with suppress(OSError):
            path.unlink(missing_ok=True)
        raise
    if durable:
        sync(target.parent)


_JOURNAL = ".saving.json"
_STAGING = re.compile(r"\.saving-[0-9a-f]{16}")
_STUB = "A save of this folder was interrupted. minillm's next load or save here completes it.\n"


@dataclass(frozen=True)
class _Journal:
    """A save that was decided on: what is to be done until all its files are in place."""

    staging: str  # the folder inside the folder where the new files wait
    files: list[str]  # all new files
    stubs: list[str]  # those that take the place of older ones
    remove: list[str]  # older files that do not belong to the new ones

    @classmethod
    def of(cls, folder: Path) -> _Journal | None:
        """The folder's journal, None if there is none. Raises: ValueError if it is damaged."""
        path = folder / _JOURNAL
        try:
            text = path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            found = cls(**json.loads(text))
            names = [*found.files, *found.stubs, *found.remove]
            plain = all(Path(name).name == name not in ("", "..") for name in names)
            plain = plain and _STAGING.fullmatch(found.staging) is not None
        except (ValueError, TypeError, RecursionError):
            plain = False
        if not plain or (folder / found.staging).is_symlink():
            raise ValueError(f"{path} is damaged: the save that it tells of cannot be completed")
        if not (folder / found.staging).is_dir():
            if not path.exists():
                return None  # another process has completed it just now
            raise ValueError(f"{folder}: an interrupted save has lost its files, {found.staging}")
        return found


def recover(folder: Path) -> None:
    """Complete a save of `folder` that was interrupted after it was decided on, if there is one.

    Several processes may do so at the same time: whatever one of them has moved, the others skip.
    Raises: ValueError if the journal is damaged; OSError if the folder cannot be written.
    """
    journal = _Journal.of(folder)
    if journal is None:
        return
    staging = folder / journal.staging
    # For readers that know no journal: every older file goes before the first new one comes.
    for name in journal.stubs:
        _move(staging / "stubs" / name, folder / name)
    for name in journal.remove:
        (folder / name).unlink(missing_ok=True)
    sync(folder)
    for name in journal.files:
        _move(staging / name, folder / name)
    sync(folder)
    (folder / _JOURNAL).unlink(missing_ok=True)
    shutil.rmtree(staging, ignore_errors=True)


def _move(source: Path, target: Path) -> None:
    with suppress(FileNotFoundError):  # moved before the interruption, or by another process
        os.replace(source, target)


def resolve(path: Path) -> Path:
    """Where the file of that name lies: at `path`, or where an interrupted save left it.

    For readers that may not write, and so cannot `recover` the folder. A file that the interrupted
    save was about to remove is a path where nothing is.
    """
    journal = _Journal.of(path.parent)
    if journal is not None:
        waiting = path.parent / journal.staging / path.name
        if path.name in journal.remove or (path.name in journal.files and waiting.exists()):
            return waiting
    return path


@contextmanager
def transaction(
    folder: Path,
    *,
    remove: Iterable[str] = (),
    num_bytes: int = 0,
    release: Callable[[], object] | None = None,
) -> Iterator[Path]:
    """A new empty folder, whose files take their places in `folder` together if the block succeeds.

    1. The block writes the new files into a folder of its own, inside `folder`. They are forced
       onto the disk. Up to here, an interruption leaves the older files as they were.
    2. A journal with the names of the files is renamed to `.saving.json`. From this one step on,
       the new files count: `recover` completes the save, in whatever place it is interrupted, and
       `resolve` finds the new files where they lie. The journal goes last.
    3. Every older file of those names is replaced by a line of text that no reader takes for its
       format, those named in `remove` go, and only then the new files come: readers that know
       nothing of the journal find an error in between, and never older files beside new ones.

    Other files stay, and so does who may read a file; of a new one, the umask says who. A symbolic
    link gives way to a file: what it points at may belong to others, too. An earlier save that was
    interrupted is completed first, or what it left is removed. One process at a time may save into
    a folder. Transactions may lie in each other.

    Args:
        remove: Names of older files that do not belong beside the new ones, or patterns of names.
        num_bytes: How many bytes will be written, if that is known: checked against the disk.
        release: Called if an older file cannot be replaced, as on Windows if it is open or mapped;
            then it is tried once more.
    Raises: OSError if something could not be written; its note says if that was after step 2.
    """
    if folder.exists():
        _complete(folder, release)
        for left in folder.glob(".saving-*"):
            if _STAGING.fullmatch(left.name):
                shutil.rmtree(left, ignore_errors=True)
    check_space(folder, num_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    staging = folder / f".saving-{secrets.token_hex(8)}"
    staging.mkdir()
    try:
        yield staging
        _decide(folder, staging, remove)
    except BaseException as error:
        _say_where(error, folder)
        if not _is_decided(folder, staging):
            shutil.rmtree(staging, ignore_errors=True)
        raise
    try:
        sync(folder)
        _complete(folder, release)
    except OSError as error:
        error.add_note(f"All is saved, but not in place: the next load or save in {folder} goes on")
        raise


def _complete(folder: Path, release: Callable[[], object] | None) -> None:
    """As `recover`; what holds an older file open is asked to let go of it."""
    try:
        recover(folder)
    except PermissionError:
        if release is None:
            raise
        release()
        recover(folder)


def _decide(folder: Path, staging: Path, remove: Iterable[str]) -> None:
    """Steps 1 and 2 of a transaction, once its files are written."""
    files = sorted(path.name for path in staging.iterdir())
    fresh = staging.stat().st_mode & 0o666  # of a folder, too, the umask has said who
    for name in files:
        sync(staging / name)
        os.chmod(staging / name, _mode(folder / name, fresh))
    stubs = [name for name in files if (folder / name).exists()]
    (staging / "stubs").mkdir()
    for name in stubs:
        (staging / "stubs" / name).write_text(_STUB, encoding="utf-8")
    old = {path.name for pattern in remove for path in folder.glob(pattern)}
    journal = _Journal(staging.name, files, stubs, sorted(old - {*files}))
    path = staging / _JOURNAL
    path.write_text(json.dumps(asdict(journal)), encoding="utf-8")
    sync(path)
    sync(staging)
    os.replace(path, folder / _JOURNAL)


def _is_decided(folder: Path, staging: Path) -> bool:
    """Whether the journal stands: an interruption may come just after the rename, too."""
    return (folder / _JOURNAL).exists() and not (staging / _JOURNAL).exists()


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs. Raises: KeyError with the first key that is there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        times = Counter(key for key, _ in pairs)
        raise KeyError(next(key for key in times if times[key] > 1))
    return found


def _no_nan(constant: str) -> float:
    """Infinity or -Infinity. Raises: ValueError for NaN."""
    if constant == "NaN":
        raise ValueError("it holds NaN, which is no number")
    return float(constant)


# A value in brackets takes up to 30 times its bytes in memory. The largest tokenizers that were
# published have 33 MB and 2 million values.
MOST_BYTES, _MOST_VALUES = 1 << 26, 1 << 22


def parse_json(data: bytes, where: str | Path, *, nan: bool = False) -> dict[str, Any]:
    """The object that these bytes of `where` hold; all JSON that strangers wrote is read here.

    Raises: ValueError if they hold something else, more than 64 MiB or 4 million values, NaN
        (unless `nan`), or an object with a key twice: which value is meant, nobody can know.
    """
    if len(data) > MOST_BYTES or sum(map(data.count, (b"[", b"{", b","))) > _MOST_VALUES:
        most = f"{MOST_BYTES:,} bytes and about {_MOST_VALUES:,} values"
        raise ValueError(f"{where} is not read: {len(data):,} bytes, and {most} are allowed")
    try:
        constants = float if nan else _no_nan
        content = json.loads(
            data.decode(), object_pairs_hook=_each_key_once, parse_constant=constants
        )
    except KeyError as error:
        raise ValueError(f"{where} holds the key {error.args[0]!r:.60} twice") from None
    except ValueError as error:
        raise ValueError(f"{where} is not whole JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{where} is not read: its brackets are nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError(f"{where} holds a {type(content).__name__}, not an object")
    return content


def read_json(path: Path, *, nan: bool = False) -> dict[str, Any]:
    """The object that a file holds, also where an interrupted save has not put it in place yet.

    Raises: FileNotFoundError if there is no file; ValueError as `parse_json`.
    """
    found = resolve(path)
    if not found.is_file():
        raise FileNotFoundError(f"{path.parent} has no {path.name}")
    with open(found, "rb") as file:
        return parse_json(file.read(MOST_BYTES + 1), path, nan=nan)


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a safetensors file. Raises: OSError if the disk does not take it."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}") from error


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write `data`, keys in order, in place of what was there."""
    with replacing(path) as temporary:
        text = json.dumps(data, ensure_ascii=False, indent=2, sort_keys=True)
        temporary.write_text(text + "\n", encoding="utf-8")
