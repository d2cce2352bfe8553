"""A kernel that was forked is as one that was begun: nothing of another page is in it."""

import sys
import time
from contextlib import contextmanager
from unittest import mock

import nbval.kernel
import psutil
import pytest
import warm_kernel
from jupyter_client.provisioning import local_provisioner

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kernels are forked on Linux only")

STATE = """
import os, random, signal, sys, threading
import numpy, torch, matplotlib.pyplot as plt
print(os.getcwd(), sys.path, sys.flags, sys.argv[1:2], os.getpgrp() == os.getpid())
print({name: value for name, value in os.environ.items() if name != "JPY_PARENT_PID"})
print(sorted(globals()))
print(torch.get_num_threads(), torch.get_default_dtype())
print(plt.get_backend(), dict(plt.rcParams), plt.get_fignums())
print([thread.name for thread in threading.enumerate()])
print([name for name in sys.modules if "minillm" in name])
print({number: signal.getsignal(number) for number in signal.Signals})
"""
LEFT_BEHIND = """
import builtins, os, random, torch, minillm.rope, matplotlib.pyplot as plt, numpy as np
builtins.print, torch.mine, np.mine, os.environ["MINE"] = None, 1, 2, "3"
torch.manual_seed(1), torch.set_default_dtype(torch.float64), plt.rcParams.update({"font.size": 40})
os.chdir("/"), plt.plot([1, 2])
"""


@contextmanager
def kernel(tmp_path, warm=True):
    """A page's kernel, and what a cell prints there."""
    launch = warm_kernel.launch_kernel if warm else local_provisioner.launch_kernel
    with mock.patch.object(local_provisioner, "launch_kernel", launch):
        running = nbval.kernel.RunningKernel("python3", cwd=str(tmp_path))

    def printed(cell):
        asked, text = running.execute_cell_input(cell), ""
        while True:
            message = running.get_message("iopub", timeout=60)
            content = message["content"]
            if message["parent_header"].get("msg_id") == asked:
                text += content.get("text", "") + content.get("ename", "")
                if content.get("execution_state") == "idle":
                    return text

    try:
        yield running, printed
    finally:
        if running.is_alive():
            running.stop()


def gone(pid):
    for _ in range(500):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.01)
    return False


def test_the_next_page_finds_what_an_ordinary_kernel_shows(tmp_path):
    with kernel(tmp_path, warm=False) as (_, printed):
        wanted = printed(STATE)
    with kernel(tmp_path) as (_, printed):
        printed(LEFT_BEHIND)
        with kernel(tmp_path) as (_, beside):
            assert beside(STATE).splitlines() == wanted.splitlines()


def test_what_nobody_seeded_is_drawn_anew(tmp_path):
    draw = (
        "import random, torch, numpy\nfor f in (random.random, numpy.random.rand):\n    print(f())"
    )
    draws = []
    for _ in range(2):
        with kernel(tmp_path) as (_, printed):
            draws.append(printed(draw + "\nprint(torch.rand(1).item())").split())
    assert len(set(draws[0] + draws[1])) == 6


def test_a_cell_can_be_interrupted_and_a_kernel_ends_with_all_it_began(tmp_path):
    begin = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)"
    with kernel(tmp_path) as (running, printed):
        asked = running.execute_cell_input("print('on its way', flush=True)\nwhile True: pass")
        while running.get_message("iopub", timeout=60)["msg_type"] != "stream":
            pass
        running.interrupt()
        running.await_reply(asked, timeout=60)
        running.await_idle(asked, timeout=60)
        child, pid = int(printed(begin)), running.km.provisioner.pid
        assert running.is_alive() and psutil.pid_exists(child)
        running.stop()
        assert gone(child) and gone(pid)
