"""The settings of tests/conftest.py, also when pytest is given a notebook alone."""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).parents[1] / "tests" / "conftest.py"))
