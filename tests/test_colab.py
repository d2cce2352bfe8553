"""The cell for Colab, run where it takes itself for Colab: clones once, installs, moves nothing."""

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import build  # noqa: E402
import colab  # noqa: E402

PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "minillm"
version = "9.9"
dependencies = ["torch>=2.11,<3", "numpy>=2.0", "{needs}"]
[project.optional-dependencies]
notebooks = ["matplotlib>=3.9", "jupyterlab>=4.2"]
[tool.setuptools]
packages = ["minillm"]
"""


def git(*command: str) -> None:
    who = ["-c", "user.name=n", "-c", "user.email=e@x", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *who, *command], check=True, capture_output=True)


def repository(folder: Path, needs: str) -> str:
    """The address of a bare repository with a small course in it, tagged v1."""
    work, bare = folder / "work", folder / "bare.git"
    for name, text in {
        "pyproject.toml": PROJECT.format(needs=needs),
        "minillm/__init__.py": "WHERE = __file__\n",
        "notebooks/deeper/page.ipynb": "",
    }.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(text)
    git("init", "-q", str(work))
    git("-C", str(work), "add", ".")
    git("-C", str(work), "commit", "-qm", "one")
    git("-C", str(work), "tag", "v1")
    git("clone", "-q", "--bare", str(work), str(bare))
    return bare.as_uri()


@pytest.fixture
def python(tmp_path) -> Path:
    """A Python of its own that sees the packages of this one, but not ours."""
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    packages = Path(sysconfig.get_path("purelib"))
    mirror = tmp_path / "packages"
    mirror.mkdir()
    for path in packages.iterdir():
        if "minillm" not in path.name and not path.name.startswith("distutils-precedence"):
            (mirror / path.name).symlink_to(path)
    (site / "mirror.pth").write_text(f"{mirror}\n")
    return environment / "bin" / "python"


def wheel(folder: Path, name: str, needs: str) -> None:
    folder.mkdir(exist_ok=True)
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: {needs}\n",
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


def run_cell(
    python: Path, address: str, *, there: bool = True, after: str = "", before: str = ""
) -> subprocess.CompletedProcess:
    folder = python.parents[2]
    cell = colab.first_cell(address, "v1", "deeper", str(folder / "content" / "minillm"))
    (folder / "content").mkdir(exist_ok=True)
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "COLAB_RELEASE_TAG")}
    env |= {"COLAB_RELEASE_TAG": "1"} if there else {}
    # no network: wheels from a folder, the build's own tools from here
    env |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder / "wheels")}
    env |= {"PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return subprocess.run(
        [str(python), "-c", before + cell + after],
        capture_output=True, text=True, cwd=folder, env=env,
    )  # fmt: skip


def versions() -> list[str]:
    return [importlib.metadata.version(name) for name in ("torch", "numpy")]


TELL = """
import minillm
from importlib import metadata
print(minillm.WHERE, os.getcwd(), metadata.version("torch"), metadata.version("numpy"))
"""


def test_twice_on_colab_and_nothing_elsewhere(python, tmp_path):
    wheel(tmp_path / "wheels", "littleone", "numpy")
    address = repository(tmp_path, "littleone>=1")
    course = tmp_path / "content" / "minillm"
    elsewhere = run_cell(python, address, there=False, after="print(os.getcwd())")
    assert (elsewhere.returncode, elsewhere.stdout.strip()) == (0, str(tmp_path)), elsewhere.stderr
    assert not course.exists()
    (tmp_path / "content" / "minillm.part").mkdir()  # as an interrupted call leaves it
    expected = [
        f"the course, v1, is in {course}",
        f"{course}/minillm/__init__.py {course}/notebooks/deeper {' '.join(versions())}",
    ]
    for _ in range(2):
        done = run_cell(python, address, after=TELL)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == expected
        (course / "mine.txt").write_text("kept")  # the second call clones nothing anew
    assert (course / "mine.txt").exists()
    # a kernel that begins later finds the package without the cell
    later = subprocess.run(
        [str(python), "-c", "import minillm; print(minillm.WHERE)"],
        capture_output=True, text=True, cwd=tmp_path, env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert later.stdout.strip() == f"{course}/minillm/__init__.py", later.stderr


def test_a_package_that_would_move_numpy_is_refused(python, tmp_path):
    wheel(tmp_path / "wheels", "littleone", "numpy<2")
    done = run_cell(python, repository(tmp_path, "littleone>=1"))
    assert done.returncode == 1
    assert "RuntimeError" in done.stderr and "conflicting dependencies" in done.stderr
    code = "import numpy; print(numpy.__version__)"
    after = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
    assert after.stdout.strip() == versions()[1]


def test_an_old_torch_is_one_sentence(python, tmp_path):
    old = "import importlib.metadata as m; real = m.version\n"
    old += "m.version = lambda name: '2.10.1' if name == 'torch' else real(name)\n"
    done = run_cell(python, repository(tmp_path, "numpy"), before=old)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: torch 2.10.1 is too old for the course, which needs 2.11")


def test_every_page_gets_the_cell_and_stays_as_it_is(tmp_path, capsys):
    assert colab.main(["https://example.org/minillm", "v1", "--to", str(tmp_path)]) == 0
    assert "fetch v1 of https://example.org/minillm" in capsys.readouterr().out
    pages = sorted(tmp_path.rglob("*.ipynb"))
    assert len(pages) > 11
    for path in pages:
        name = path.relative_to(tmp_path)
        first, *rest = build.load(path, "")["cells"]
        assert rest == build.load(ROOT / "notebooks" / name, "")["cells"]
        source = "".join(first["source"])
        compile(source, str(name), "exec")
        shelf = "" if name.parent == Path() else str(name.parent)
        assert f"shelf = Path('/content/minillm'), {shelf!r}" in source
        assert "https://example.org/minillm" in source and "<" + "tag>" not in source
