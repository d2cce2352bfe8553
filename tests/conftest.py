"""Settings for every test and, through the environment, for the notebook kernels of nbval."""

import math
import os
import sys
from collections import Counter

# Two busy-waiting OpenMP threads on shared cores can be a hundred times slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MINILLM_DEVICE", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Python 3.13 colours tracebacks, and Jupyter asks for colours on behalf of its children.
os.environ["PYTHON_COLORS"] = "0"
# What torch.compile compiles is small: a pool of processes for it, each with a torch, costs more.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Of Python 3.13.0, and of no other, torch says when it compiles that it may be slower with it.
os.environ.setdefault("PYTHONWARNINGS", "ignore:Guards may run slower:RuntimeWarning")

import pytest
import torch
import warm_kernel
from hypothesis import settings

# Hypothesis: no per-example deadline (machines are shared), the same examples on each run. The
# workflow asks for more of them, other ones each time, and prints how to repeat one that fails.
settings.register_profile("minillm", deadline=None, derandomize=True, max_examples=100)
settings.register_profile(
    "workflow", deadline=None, derandomize=False, max_examples=500, print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "minillm"))

KEPT = "minillm/seconds"  # in pytest's cache


class LongestFirst:
    """Where processes share the files (`-n 2`), those that took longest last time begin.

    A long one that comes last keeps one process busy while the others have nothing to do. Where
    nothing is known yet, pages, which are long, come before tests.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.took: Counter[str] = Counter()
        self.leads = not hasattr(config, "workerinput")
        config.option.loadscopereorder = False  # xdist's own order: first what has most tests

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        took = config.cache.get(KEPT, {})

        def seconds(item: pytest.Item) -> tuple[float, bool]:
            file = item.nodeid.partition("::")[0]
            return took.get(file, math.inf), file.startswith("notebooks/")

        items.sort(key=seconds, reverse=True)  # equals stay as they are, and so a file's tests

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.took[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        cache, to_its_end = session.config.cache, exitstatus in (0, pytest.ExitCode.TESTS_FAILED)
        if self.leads and to_its_end:
            cache.set(KEPT, cache.get(KEPT, {}) | self.took)


def pytest_configure(config: pytest.Config) -> None:
    shared = hasattr(config, "workerinput") or config.getoption("dist", "no") != "no"
    if shared and hasattr(config, "cache"):  # `-p no:cacheprovider` leaves it out
        config.pluginmanager.register(LongestFirst(config))


def pytest_sessionstart(session: pytest.Session) -> None:
    one_thread = sys.platform == "linux" and os.environ["OMP_NUM_THREADS"] == "1"
    if one_thread and session.config.pluginmanager.hasplugin("nbval"):
        warm_kernel.use()  # only here: `pytest notebooks/05_rope.ipynb` reads no tests/conftest.py


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` skip, with the reason, where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):  # a parameter may be called so too
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def generator() -> torch.Generator:
    """A seeded generator of random numbers."""
    return torch.Generator().manual_seed(0)
