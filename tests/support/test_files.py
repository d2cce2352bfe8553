"""Files written whole or not at all, alone and together, also by Windows' rules; JSON read."""

import json
import math
import os
import shutil

import pytest
from interruptions import Interruption, Stopped, windows

from minillm.support.files import (
    check_space,
    read_json,
    recover,
    replacing,
    resolve,
    sync,
    transaction,
    write_json,
)


def save(folder, text, names=("a", "b"), **options):
    with transaction(folder, **options) as staging:
        for name in names:
            (staging / name).write_text(f"{text} {name}", encoding="utf-8")


def texts(folder):
    return {p.name: p.read_text(encoding="utf-8") for p in sorted(folder.iterdir())}


def test_files_take_their_places_together(tmp_path):
    folder = tmp_path / "not" / "there" / "yet"
    save(folder, "old", ("a", "b", "c1", "c2"))
    (folder / "README").write_text("mine", encoding="utf-8")
    save(folder, "new", remove=("c[0-9]", "none", "a"))
    assert texts(folder) == {"README": "mine", "a": "new a", "b": "new b"}
    if os.name == "posix":
        assert {p.stat().st_mode & 0o777 for p in (folder / "a", folder / "b")} == {0o644}


def test_a_block_that_raises_leaves_nothing(tmp_path):
    save(tmp_path, "old")
    with pytest.raises(ZeroDivisionError), transaction(tmp_path) as staging:
        (staging / "a").write_text("new", encoding="utf-8")
        raise ZeroDivisionError
    assert texts(tmp_path) == {"a": "old a", "b": "old b"}


def test_a_transaction_inside_another(tmp_path):
    save(tmp_path, "old")
    with transaction(tmp_path) as staging:
        save(staging, "new")
        assert texts(staging) == {"a": "new a", "b": "new b"}
    assert texts(tmp_path) == {"a": "new a", "b": "new b"}


@pytest.mark.parametrize("how", ["stops", "fails", "interrupted"])
def test_an_interrupted_transaction_is_all_or_nothing(how, tmp_path, monkeypatch):
    """Twice in a row, too: the second one is cut as well, at each of its calls."""
    outcomes = set()
    with Interruption(None).at_work(monkeypatch) as counted:
        save(tmp_path / "counted", "old")
        counted.count = 0
        save(tmp_path / "counted", "new")
    for n in range(1, counted.count + 1):
        for m in (5, 45):
            folder = tmp_path / f"{n}-{m}"
            save(folder, "old", ("a", "b", "c"))
            for text, cut in (("new", n), ("newer", m)):
                with (
                    Interruption(cut, how).at_work(monkeypatch),
                    pytest.raises((Stopped, OSError, KeyboardInterrupt)),
                ):
                    save(folder, text, remove=("c",))
                    raise KeyboardInterrupt
            before = {name: resolve(folder / name) for name in ("a", "b", "c")}
            before = {k: p.read_text(encoding="utf-8") for k, p in before.items() if p.exists()}
            recover(folder)
            after = {p.name: p.read_text(encoding="utf-8") for p in folder.glob("[abc]")}
            assert after == before
            outcomes.add(after["a"])
            assert after["b"] == after["a"][:-1] + "b" and ("c" in after) == (after["a"] == "old a")
            save(folder, "last", remove=("c",))
            assert texts(folder) == {"a": "last a", "b": "last b"}
            shutil.rmtree(folder)
    assert outcomes == {"old a", "new a", "newer a"}


def interrupted(folder, monkeypatch):
    """A folder whose journal stands, and whose new files wait."""
    save(folder, "old")
    real = os.replace

    def once(source, target):
        real(source, target)
        raise Stopped

    with monkeypatch.context() as p, pytest.raises(Stopped):
        p.setattr(os, "replace", once)
        save(folder, "new")
    return json.loads((folder / ".saving.json").read_text(encoding="utf-8"))


def test_a_journal_is_believed_only_about_its_own_folder(tmp_path, monkeypatch):
    folder, outside = tmp_path / "f", tmp_path / "outside"
    outside.write_text("not yours", encoding="utf-8")
    journal = interrupted(folder, monkeypatch)
    for change in (
        *({key: ["../outside"]} for key in ("files", "stubs", "remove")),
        *({key: [name]} for key in ("files", "remove") for name in ("", ".", "..", 5, None)),
        *({"staging": name} for name in ("..", ".", "../f", ".saving-x", "", 5, None)),
        {"more": 1},
    ):
        write_json(folder / ".saving.json", {**journal, **change})
        for call in (recover, lambda f: resolve(f / "a"), save_again):
            with pytest.raises(ValueError, match=r"\.saving\.json is damaged"):
                call(folder)
    for text in ("", "[]", "{}", "5", "[" * 100_000):
        (folder / ".saving.json").write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=r"\.saving\.json is damaged"):
            recover(folder)
    write_json(folder / ".saving.json", journal)
    staging = folder / journal["staging"]
    staging.rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"an interrupted save has lost its files, \.saving-"):
        recover(folder)
    try:
        staging.symlink_to(tmp_path / "elsewhere")
    except OSError:
        pytest.skip("this system makes no links")
    with pytest.raises(ValueError, match=r"\.saving\.json is damaged"):
        recover(folder)
    staging.unlink()
    (tmp_path / "elsewhere").rename(staging)
    recover(folder)
    assert texts(folder) == {"a": "new a", "b": "new b"}
    assert outside.read_text(encoding="utf-8") == "not yours"


def save_again(folder):
    save(folder, "again")


def test_two_processes_that_complete_the_same_save(tmp_path, monkeypatch):
    """One is stopped anywhere, the other runs through, and the first goes on."""
    real = os.replace
    for n in range(1, 5):
        folder = tmp_path / str(n)
        interrupted(folder, monkeypatch)
        calls = []

        def slow(source, target, n=n, calls=calls, folder=folder):
            calls.append(target)
            if len(calls) == n:
                recover(folder)
                save(folder, "third")
            real(source, target)

        with monkeypatch.context() as p:
            p.setattr(os, "replace", slow)
            recover(folder)
        assert texts(folder) == {"a": "third a", "b": "third b"}


def test_what_cannot_be_replaced_is_asked_to_let_go(tmp_path, monkeypatch):
    save(tmp_path, "old")
    real, held = os.replace, {"a"}

    def replace(source, target):
        if os.path.basename(target) in held:
            raise PermissionError(13, "Access is denied", str(target))
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(PermissionError) as caught:
        save(tmp_path, "new")
    assert caught.value.__notes__ == [
        f"All is saved, but not in place: the next load or save in {tmp_path} goes on"
    ]
    assert resolve(tmp_path / "a").read_text(encoding="utf-8") == "new a"
    with pytest.raises(PermissionError):
        save(tmp_path, "newer")
    save(tmp_path, "newest", release=held.clear)
    assert texts(tmp_path) == {"a": "newest a", "b": "newest b"}


def test_space_is_asked_of_the_disk_that_will_hold_the_folder(tmp_path, monkeypatch):
    free = shutil.disk_usage(tmp_path).free
    check_space(tmp_path / "not" / "there", 10)
    with pytest.raises(OSError, match=r"2,000,000,000,000,000 bytes are to be written.* free"):
        check_space(tmp_path / "not" / "there", 2 * 10**15)
    with pytest.raises(OSError, match="bytes are to be written"):
        save(tmp_path / "new", "text", num_bytes=free + 10**15)
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, 0))
    check_space(tmp_path, 10)  # a drive that does not say


@pytest.mark.skipif(not hasattr(os, "O_DIRECTORY"), reason="Windows needs no emulation")
def test_windows_rules(tmp_path, monkeypatch):
    windows(monkeypatch)
    with pytest.raises(PermissionError):
        os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(ValueError, match="without an encoding"):
        (tmp_path / "x").write_text("text")
    write_json(tmp_path / "x.json", {"a": 1})
    write_json(tmp_path / "x.json", {"a": 2})
    assert read_json(tmp_path / "x.json") == {"a": 2}
    with open(tmp_path / "x.json", "rb") as file, pytest.raises(OSError, match="Bad file"):
        os.fsync(file.fileno())
    sync(tmp_path / "x.json")
    sync(tmp_path)
    for text in ("old", "new"):
        save(tmp_path / "folder", text)
    assert texts(tmp_path / "folder") == {"a": "new a", "b": "new b"}


def test_replacing_leaves_nothing_behind(tmp_path):
    target = tmp_path / "a"
    target.write_text("old", encoding="utf-8")
    with pytest.raises(ZeroDivisionError), replacing(target) as path:
        path.write_text("new", encoding="utf-8")
        raise ZeroDivisionError
    assert texts(tmp_path) == {"a": "old"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not whole JSON"),
        ('{"a": 1', "is not whole JSON"),
        ("[1]", "holds a list, not an object"),
        ("null", "holds a NoneType, not an object"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "is not whole JSON"),
        (b"\xff\xfe{}", "is not whole JSON"),
        ('{"a": 1, "b": 2, "a": 1}', "holds the key 'a' twice"),
        ('{"b": [{"": 1, "c": {}, "": 2}]}', "holds the key '' twice"),
        ('{"a": [1, NaN]}', "is not whole JSON: it holds NaN"),
    ],
)
def test_json_that_is_no_object(text, message, tmp_path):
    data = text if isinstance(text, bytes) else text.encode()
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(ValueError, match=rf"a\.json.* {message}"):
        read_json(tmp_path / "a.json")


def test_the_same_key_in_two_objects_is_no_mistake(tmp_path):
    (tmp_path / "a.json").write_text('{"a": {"a": 1}, "b": [{"a": 2}, {"a": 3}]}', encoding="utf-8")
    assert read_json(tmp_path / "a.json") == {"a": {"a": 1}, "b": [{"a": 2}, {"a": 3}]}


def test_json_that_would_fill_the_memory_is_not_read(tmp_path, monkeypatch):
    """An empty list takes 3 bytes of a file and 64 of memory."""
    monkeypatch.setattr("minillm.support.files.MOST_BYTES", 100)
    monkeypatch.setattr("minillm.support.files._MOST_VALUES", 9)
    for text in ('{"a":[1,2,3,4,5,6,7,8]}', '{"a":"' + "x" * 92 + '"}'):
        (tmp_path / "a.json").write_text(text, encoding="utf-8")
        assert read_json(tmp_path / "a.json") == json.loads(text)
    for text in ('{"a":[1,2,3,4,5,6,7,8,9]}', '{"a":"' + "x" * 93 + '"}'):
        (tmp_path / "a.json").write_text(text, encoding="utf-8")
        message = rf"a\.json is not read: {len(text)} bytes, and 100 bytes and about 9 values are"
        with pytest.raises(ValueError, match=message):
            read_json(tmp_path / "a.json")


def test_infinity_is_a_number_and_nan_may_be_asked_for(tmp_path):
    """transformers writes the limits of a Mamba's steps so; a run's own state may hold a NaN."""
    (tmp_path / "a.json").write_text('{"a": [Infinity, -Infinity]}', encoding="utf-8")
    assert read_json(tmp_path / "a.json") == {"a": [math.inf, -math.inf]}
    (tmp_path / "a.json").write_text('{"a": NaN}', encoding="utf-8")
    assert math.isnan(read_json(tmp_path / "a.json", nan=True)["a"])


def test_json_that_is_not_there(tmp_path):
    for path in (tmp_path / "a.json", tmp_path):
        with pytest.raises(FileNotFoundError, match=f"has no {path.name}"):
            read_json(path)
