"""A disk that fills up while something is written, past the check in advance: nothing is lost."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from full_disk import WRITERS
from training_runs import needs_unix

SCRIPT = Path(__file__).parents[1] / "full_disk.py"
OWN_MOUNTS = ["unshare", "--user", "--map-root-user", "--mount"]


def may_mount():
    """Whether this system lets a process mount a file system that it alone sees."""
    try:
        return subprocess.run([*OWN_MOUNTS, "true"], capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.fixture(scope="module", params=[pytest.param("limit", marks=needs_unix), "tmpfs"])
def found(request, tmp_path_factory):
    """What came of each writer at each size, and what the system says of a disk that is full."""
    if request.param == "tmpfs" and not may_mount():
        pytest.skip("no file system of one's own can be mounted here")
    command = [sys.executable, SCRIPT, request.param, tmp_path_factory.mktemp("disk")]
    command = OWN_MOUNTS + command if request.param == "tmpfs" else command
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    full = {"limit": errno.EFBIG, "tmpfs": errno.ENOSPC}[request.param]
    return [json.loads(line) for line in done.stdout.splitlines()], os.strerror(full)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_disk_that_fills_up_meanwhile_loses_nothing_and_is_named(found, writer):
    tries, full = found
    *refused, written = [one for one in tries if one["writer"] == writer]
    assert len(refused) > 1 and written["said"] is None
    for one in refused:
        assert one["same"], one
        assert full in one["said"] and one["folder"] in one["said"], one
        assert one["again"] is None and one["end"] == written["end"], one
