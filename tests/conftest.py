"""Settings for every test and, through the environment, for the notebook kernels of nbval."""

import os

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
from hypothesis import settings

# Hypothesis: no per-example deadline (machines are shared), the same examples on each run. The
# workflow asks for more of them, other ones each time, and prints how to repeat one that fails.
settings.register_profile("minillm", deadline=None, derandomize=True, max_examples=100)
settings.register_profile(
    "workflow", deadline=None, derandomize=False, max_examples=500, print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "minillm"))


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
