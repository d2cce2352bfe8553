"""Kernels of pages as copies of one process in which torch is loaded already.

A page is a kernel of its own, and before its first cell a kernel spends seconds on the same imports
as the others: a tenth of `make test`. On Linux nbval's kernels are forked instead, each with the
environment and the folder that nbval names; elsewhere they start as ever. None of minillm is
loaded beforehand. `tools/execute.py`, Jupyter, and the tests of both start kernels as ever, too.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from unittest import mock

# `torch.optim` loads torch._dynamo, `AutoTokenizer` half of transformers. None starts a thread.
MODULES = ("torch", "torch._dynamo", "transformers.models.auto", "matplotlib.pyplot")


class Mother:
    """The process that is copied. It ends with this one, and its copies with it."""

    def __init__(self, modules: Sequence[str] = MODULES) -> None:
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        # -P: no folder of ours on the path
        self.process = subprocess.Popen([sys.executable, "-P", __file__, *modules], **pipes)
        atexit.register(self.close)

    def ask(self, question: Any) -> Any:
        """The answer. Raises: RuntimeError if there is none, for she has died."""
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"tests/forked_kernels.py ended with {self.process.wait()}")
        return json.loads(answer)

    def launch_kernel(self, cmd: list[str], *, env: dict, cwd: Any = None, **_: Any) -> Kernel:
        """As jupyter_client's function of that name; streams are not handed on."""
        argv = cmd[cmd.index("ipykernel_launcher") :]
        return Kernel(self, self.ask({"argv": argv, "env": env, "cwd": str(cwd or os.getcwd())}))

    def close(self) -> None:
        atexit.unregister(self.close)
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


class Kernel:
    """What jupyter_client asks of a process."""

    stdin = stdout = stderr = returncode = None

    def __init__(self, mother: Mother, pid: int) -> None:
        self.mother, self.pid = mother, pid

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.mother.ask(self.pid)
        return self.returncode

    def wait(self) -> int:
        while self.poll() is None:
            time.sleep(0.05)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def install() -> None:
    """From now on nbval's kernels are forked, if this is Linux."""
    if sys.platform != "linux":
        return
    import nbval.kernel
    from jupyter_client.provisioning import local_provisioner

    start, mothers = nbval.kernel.start_new_kernel, []

    def start_new_kernel(**options: Any) -> Any:
        if not mothers:
            mothers.append(Mother())
        with mock.patch.object(local_provisioner, "launch_kernel", mothers[0].launch_kernel):
            return start(**options)

    nbval.kernel.start_new_kernel = start_new_kernel


# What follows runs in the process that is copied, and in its copies


def become_kernel(argv: list[str], env: dict[str, str], cwd: str) -> None:
    os.environ.clear()
    os.environ.update(env, JPY_PARENT_PID=str(os.getppid()))
    os.chdir(cwd)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    sys.argv = argv
    random.seed()  # as in a process that is new; torch has drawn nothing yet
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    from ipykernel import kernelapp

    kernelapp.launch_new_instance()


def serve(modules: list[str]) -> None:
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    for name in ("ipykernel.kernelapp", "ipykernel.ipkernel", *modules):
        with suppress(ImportError):  # a page that needs it says so
            importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork copies one thread only"
    gc.freeze()
    for line in sys.stdin:
        question = json.loads(line)
        if isinstance(question, int):  # has it ended?
            pid, status = os.waitpid(question, os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if not answer:
                os.setpgid(0, 0)
                try:
                    become_kernel(**question)
                finally:
                    os._exit(0)
            os.setpgid(answer, answer)  # whoever comes first: signals go to the group
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1:])
