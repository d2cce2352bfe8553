"""Which file a process of `pytest -n 2` begins next: the longest that is left."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

SETTINGS = runpy.run_path(str(Path(__file__).with_name("conftest.py")))
KEPT, LongestFirst = SETTINGS["KEPT"], SETTINGS["LongestFirst"]
A, B, PAGE, C = "tests/test_a.py", "tests/test_b.py", "notebooks/c.ipynb", "tests/test_d.py"


@pytest.fixture
def config():
    """With a cache that is a dictionary."""
    cache: dict = {}
    kept = SimpleNamespace(get=cache.get, set=cache.__setitem__)
    return SimpleNamespace(cache=kept, option=SimpleNamespace(loadscopereorder=True))


def order(config, *files):
    items = [SimpleNamespace(nodeid=f"{file}::{i}") for file in files for i in range(2)]
    LongestFirst(config).pytest_collection_modifyitems(config, items)
    found = [item.nodeid.split("::") for item in items]
    assert [number for _, number in found] == ["0", "1"] * len(files)
    return [file for file, _ in found[::2]]


def test_what_took_longest_is_first_and_what_is_not_known_before_it(config):
    assert order(config, A, B, PAGE, C) == [PAGE, A, B, C]
    config.cache.set(KEPT, {A: 1.5, PAGE: 2, C: 30})
    assert order(config, A, B, PAGE, C) == [B, C, PAGE, A]


def test_only_the_leader_of_a_run_that_came_to_its_end_keeps_what_files_took(config):
    config.cache.set(KEPT, {A: 1, C: 4})
    session = SimpleNamespace(config=config)
    worker = SimpleNamespace(**vars(config), workerinput={})
    for whose, status, wanted in (
        (worker, 0, {A: 1, C: 4}),
        (config, pytest.ExitCode.INTERRUPTED, {A: 1, C: 4}),
        (config, pytest.ExitCode.TESTS_FAILED, {A: 5, C: 4}),
        (config, 0, {A: 5, C: 4}),
    ):
        plugin = LongestFirst(whose)
        for seconds in (2, 3):
            plugin.pytest_runtest_logreport(SimpleNamespace(nodeid=f"{A}::x", duration=seconds))
        plugin.pytest_sessionfinish(session, status)
        assert config.cache.get(KEPT) == wanted
        config.cache.set(KEPT, {A: 1, C: 4})


@pytest.mark.parametrize("dist, shared", [("no", False), ("loadfile", True)])
def test_it_is_there_where_processes_share_the_files(config, dist, shared):
    registered = []
    config.pluginmanager = SimpleNamespace(register=registered.append)
    config.getoption = lambda name, default: dist if name == "dist" else default
    SETTINGS["pytest_configure"](config)
    assert len(registered) == shared and config.option.loadscopereorder is not shared
    config.workerinput = {}
    SETTINGS["pytest_configure"](config)
    assert len(registered) == shared + 1
    del config.cache  # as `-p no:cacheprovider` has it
    SETTINGS["pytest_configure"](config)
    assert len(registered) == shared + 1
