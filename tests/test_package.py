"""What importing costs, what it must not import, and the wheel: all of it, anywhere."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


HEAVY = (
    "matplotlib",
    "transformers",
    "tokenizers",
    "tiktoken",
    "torch._dynamo",
    "jinja2",
    "IPython",
    "gguf",
)

OPTIONAL = ("matplotlib", "transformers", "tokenizers", "tiktoken", "jinja2", "IPython")
OPTIONAL += ("huggingface_hub", "nbformat", "nbclient", "gguf")


@pytest.mark.parametrize(
    "module", ["minillm", "minillm.bpe", "minillm.stories.language", "minillm.ngram"]
)
def test_light_modules_need_no_torch(module):
    out = run(f"import sys, {module}; print(sorted(m for m in sys.modules if '.' not in m))")
    assert "'torch'" not in out
    assert not [name for name in HEAVY if f"'{name}'" in out]


def test_the_whole_package_leaves_optional_libraries_alone():
    code = (
        "import sys, minillm\n"
        "for name in minillm.__all__: getattr(minillm, name)\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    assert run(code).strip() == "[]"


def test_every_public_name_resolves_and_none_is_a_module():
    import types

    import minillm

    assert len(minillm.__all__) == len(set(minillm.__all__)) > 20
    for name in minillm.__all__:
        assert not isinstance(getattr(minillm, name), types.ModuleType)
        assert name in dir(minillm)
    with pytest.raises(AttributeError, match="nonsense"):
        minillm.nonsense


def test_nothing_is_unpickled():
    for path in [*ROOT.glob("minillm/**/*.py"), *ROOT.glob("tools/*.py")]:
        text = path.read_text(encoding="utf-8")
        assert "import pickle" not in text
        for call in re.findall(r"torch\.load\((.*)", text):
            assert "weights_only=True" in call, path.name


IMPORT_ALL = f"""
import importlib, pkgutil, sys
for name in {OPTIONAL!r}:
    sys.modules[name] = None  # as if it were not installed
import minillm
names = [m.name for m in pkgutil.walk_packages(minillm.__path__, "minillm.")]
names.remove("minillm.exercises")  # it says where the graders are: see below
for name in names:
    importlib.import_module(name)
print(minillm.__file__, *names, sep="\\n")
"""


def build_wheel(folder: Path) -> Path:
    """The wheel of a copy of the sources, built without the network."""
    pytest.importorskip("setuptools", minversion="77", reason="the build backend, setuptools 77")
    copy = folder / "source"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "minillm", copy / "minillm", ignore=ignore)
    pip(
        *("wheel", "--no-index", "--no-build-isolation", "--no-deps"),
        *("--wheel-dir", str(folder), str(copy)),
    )
    return next(folder.glob("*.whl"))


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}  # sees this tree
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_wheel_in_a_fresh_environment_imports_every_module(tmp_path):
    """Only the needed libraries are lent to it: the optional ones are hidden."""
    wheel = build_wheel(tmp_path)
    sources = {p.relative_to(ROOT).as_posix() for p in (ROOT / "minillm").rglob("*.py")}
    sources = {name for name in sources if not name.startswith("minillm/exercises/")}
    grammars = {p.relative_to(ROOT).as_posix() for p in (ROOT / "minillm").rglob("*.txt")}
    packed = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    assert packed == sources | grammars | {"minillm/py.typed"}
    assert {Path(name).name for name in grammars} == {"en.txt", "zh.txt"}

    fresh, outside = tmp_path / "fresh", tmp_path / "outside"
    outside.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(fresh)], check=True)
    python = fresh / ("Scripts" if os.name == "nt" else "bin") / "python"
    pip("--python", str(python), "install", "--no-index", "--no-deps", str(wheel))
    # The libraries of this environment come last; its .pth files, an editable install among
    # them, are not read.
    libraries = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    code = f"import sys; sys.path += {sorted(libraries)!r}\n" + IMPORT_ALL
    code += "from minillm import StoryLanguage; print(len(StoryLanguage('zh').corpus(1, seed=0)))\n"
    code += "try: from minillm.exercises.plotting import figure\n"
    code += "except ImportError as error: print(error, file=sys.stderr)\n"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, cwd=outside, env=environment
    )
    assert done.returncode == 0, done.stderr
    file, *names, stories = done.stdout.split()
    assert Path(file).is_relative_to(fresh) and stories == "1"
    dotted = {name.removesuffix(".py").removesuffix("/__init__") for name in sources}
    dotted.remove("minillm/exercises")
    assert {"minillm", *names} == {name.replace("/", ".") for name in dotted}
    assert "clone it, and run `pip install --editable .` there" in done.stderr


def test_an_editable_install_has_the_graders():
    assert "check" in run("from minillm import exercises; print(dir(exercises))")
