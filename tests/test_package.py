"""What importing costs, what it must not import, and the README's example."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


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
)


@pytest.mark.parametrize(
    "module", ["minillm", "minillm.tokenizer.bpe", "minillm.stories.language", "minillm.ngram"]
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


def test_readme_example_runs():
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert blocks
    for block in blocks:
        assert run(block)  # prints something


def test_readme_table_names_every_notebook():
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        assert f"notebooks/{path.name}" in README


def test_ci_runs_the_command_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "\nmake test\n" in script and "make test" in README


def test_nothing_is_unpickled():
    for path in [*ROOT.glob("minillm/**/*.py"), *ROOT.glob("tools/*.py")]:
        text = path.read_text(encoding="utf-8")
        assert "import pickle" not in text
        for call in re.findall(r"torch\.load\((.*)", text):
            assert "weights_only=True" in call, path.name
