"""`make quick`: which tests a change asks for, what git calls changed, and the limit."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import quick  # noqa: E402


@pytest.mark.parametrize(
    "file, tests",
    [
        ("minillm/rope.py", "test_rope.py"),
        ("minillm/model.py", "test_model.py"),
        (
            "minillm/training.py",
            "training/test_begin.py training/test_data.py training/test_evaluation.py "
            "training/test_loss.py training/test_optim.py training/test_train.py "
            "training/test_training_on_a_device.py",
        ),
        ("tools/build.py", "test_build.py"),
        ("tests/test_rope.py", "test_rope.py"),
        ("minillm/beyond/families/gemma.py", "test_model.py deeper/pretrained/test_load.py"),
        ("minillm/deeper/caches/__init__.py", "test_package.py"),
        (
            "minillm/exercises/rope.py",
            "exercises/test_exercises_05.py exercises/test_exercises.py exercises/test_frozen.py",
        ),
        (
            "minillm/exercises/flash_attention.py",
            "exercises/test_exercises_03_flash_attention.py exercises/test_exercises.py "
            "exercises/test_frozen.py",
        ),
        ("tests/exercises/frozen/wrong_05.py", "exercises/test_frozen.py"),
        ("notebooks/05_rope.ipynb", "test_notebooks.py test_links.py"),
        ("notebooks/solutions/05_rope.ipynb", "test_notebooks.py test_links.py test_solutions.py"),
        ("README.md", "test_notebooks.py test_links.py"),
        ("assets/course.png", ""),
        ("tests/gone.py", ""),
    ],
)
def test_what_a_file_asks_for(file, tests):
    wanted = [f"tests/{name}" for name in tests.split()]
    assert quick.tests_of(ROOT, file) == wanted
    assert all((ROOT / name).is_file() for name in wanted)


def test_a_file_without_a_test_of_its_own(tmp_path):
    texts = {
        "minillm/part.py": "",
        "minillm/user.py": "from minillm import part",
        "minillm/circle.py": "import minillm.part, minillm.circle",
        "minillm/stranger.py": "from minillm import parts",
        "minillm/named.py": "",
        "tests/shared.py": "",
        "tests/test_user.py": "from minillm import named",
        "tests/test_stranger.py": "",
        "tests/test_circle.py": "import shared",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    wanted = ["tests/test_circle.py", "tests/test_user.py"]
    assert quick.tests_of(tmp_path, "minillm/part.py") == wanted
    assert quick.tests_of(tmp_path, "minillm/named.py") == ["tests/test_user.py"]
    assert quick.tests_of(tmp_path, "tests/shared.py") == ["tests/test_circle.py"]
    page = tmp_path / "notebooks/deeper/01_page.ipynb"
    page.parent.mkdir(parents=True)
    page.write_text('"from minillm.named import x"', encoding="utf-8")
    assert quick.also_naming(tmp_path, ["minillm/named.py", "a.png", "tests/shared.py"]) == [
        *("notebooks/deeper/01_page.ipynb", "tests/test_circle.py", "tests/test_user.py")
    ]


def test_every_file_of_the_package_is_known_to_a_test():
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "minillm").rglob("*.py")]
    assert [file for file in files if not quick.tests_of(ROOT, file)] == []


@pytest.fixture
def repository(tmp_path):
    """A commit on main, one on a branch, and what is not committed."""

    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    def write(*names):
        for name in names:
            (tmp_path / name).write_text(name + str(len(list(tmp_path.iterdir()))))

    git("init", "-q", "-b", "main")
    write("kept.py", "edited.py", "gone.py", ".gitignore")
    (tmp_path / ".gitignore").write_text("ignored.py")
    git("add", ".")
    git("commit", "-qm", "one")
    git("checkout", "-qb", "branch")
    write("of_the_branch.py")
    git("add", ".")
    git("commit", "-qm", "two")
    write("edited.py", "new.py", "ignored.py", "staged.py")
    git("add", "staged.py")
    (tmp_path / "gone.py").unlink()
    return tmp_path


def test_what_has_changed(repository):
    now = ["edited.py", "gone.py", "new.py", "staged.py"]
    assert quick.changed(repository) == now
    assert quick.changed(repository, "main") == sorted([*now, "of_the_branch.py"])
    with pytest.raises(ValueError, match="git merge-base elsewhere HEAD"):
        quick.changed(repository, "elsewhere")


def test_it_runs_them_and_begins_none_after_the_limit(tmp_path):
    """In a process of its own: of three tests, two are always asked for, and one of them fails."""
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_a.py").write_text("def test_one(): assert 0\ndef test_two(): pass\n")
    (tests / "test_b.py").write_text("def test_three(): pass\n")
    code = f"""
import sys; sys.path.insert(0, {str(ROOT / "tools")!r})
import quick
from pathlib import Path
quick.ALWAYS = ["tests/test_a.py"]
quick.changed = lambda root, *words: ["tests/test_a.py", "assets/x.png", *words]
quick.also_naming = lambda *_: ["notebooks/page.ipynb", "tests/test_a.py", "tests/test_z.py"]
sys.exit(quick.main(sys.argv[2:], Path({str(tmp_path)!r}), float(sys.argv[1])))
"""
    for words, status, said in (
        (["3600", "tests/test_b.py"], 1, "1 failed, 2 passed"),
        (["-1"], 0, "2 skipped"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=tmp_path
        )
        assert (done.returncode, said in done.stdout) == (status, True), done.stdout + done.stderr
        assert "assets/x.png: no unit test" in done.stdout
        assert "(pages; `make test` runs all): notebooks/page.ipynb\n" in done.stdout
        assert "(name a changed file; `make test` runs all): tests/test_z.py\n" in done.stdout
        late = "(not begun after -1 seconds; `make test` runs all): tests/test_a.py (2 tests)\n"
        assert (late in done.stdout) == (words == ["-1"])


def test_what_always_runs_exists():
    for name in quick.ALWAYS:
        file, _, test = name.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert f"def {test}" in text
