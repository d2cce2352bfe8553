"""Kernels that are copies of one process: what is loaded they share, and nothing else."""

import os
import sys
from unittest import mock

import pytest
from forked_kernels import Mother
from jupyter_client.manager import start_new_kernel
from jupyter_client.provisioning import local_provisioner

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="on Linux kernels are forked")

LOOK = """
import os, random, sys
print(os.getpid(), os.getcwd(), os.environ.get("PAGE"), "fractions" in sys.modules,
    "minillm" in sys.modules, "mine" in globals(), random.random())
mine = 1
"""


@pytest.fixture(scope="module")
def mother():
    mother = Mother(["fractions", "no_such_module"])
    yield mother
    mother.close()


def started(mother, folder, **names):
    options = {"kernel_name": "python3", "cwd": folder, "env": {**os.environ, **names}}
    with mock.patch.object(local_provisioner, "launch_kernel", mother.launch_kernel):
        return start_new_kernel(**options)


def printed(client, code):
    texts = []

    def keep(message):
        texts.append(message["content"].get("text", ""))

    reply = client.execute_interactive(code, output_hook=keep, timeout=60)
    assert reply["content"]["status"] == "ok"
    return "".join(texts).split()


def test_each_is_a_process_of_its_own_with_its_folder_environment_and_names(mother, tmp_path):
    found = []
    for page in ("one", "two"):
        (tmp_path / page).mkdir()
        manager, client = started(mother, tmp_path / page, PAGE=page)
        found.append(printed(client, LOOK))
        client.stop_channels()
        manager.shutdown_kernel()
        assert not manager.has_kernel
    (pid, *one, draw), (other, *two, another) = found
    assert pid != other and draw != another
    assert one == [str(tmp_path / "one"), "one", "True", "False", "False"]
    assert two == [str(tmp_path / "two"), "two", "True", "False", "False"]


def test_one_that_dies_is_seen_and_the_next_one_lives(mother, tmp_path):
    manager, client = started(mother, tmp_path)
    kernel = manager.provisioner.process
    assert kernel.poll() is None
    kernel.kill()
    assert kernel.wait() == -9 and not manager.is_alive()
    client.stop_channels()
    manager, client = started(mother, tmp_path)
    assert printed(client, "print(6 * 7)") == ["42"]
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def test_without_the_process_that_is_copied_the_error_says_so():
    mother = Mother(["fractions"])
    mother.process.kill()
    mother.process.wait()
    with pytest.raises(RuntimeError, match="ended with -9"):
        mother.ask(1)
    mother.close()
