"""Kernels for nbval that have loaded torch, matplotlib and transformers (Linux only).

One process loads them and waits. For each page it forks: the child becomes the page's kernel, which
knows of no other page's. Forked is only a process of a single thread: a lock that another thread
holds at that moment is held for ever.

    python tests/warm_kernel.py    reads a line of JSON a kernel, and answers with its process id
"""

import json
import os
import signal
import subprocess
import sys
import time
from unittest import mock


class Kernel:
    """What jupyter_client asks of a `Popen`, for a process that another one has begun."""

    stdin = stdout = stderr = None

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return 0
        return None

    def wait(self) -> int:
        while self.poll() is None:
            time.sleep(0.01)
        return 0

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


warm: subprocess.Popen | None = None


def launch_kernel(cmd: list[str], *, env: dict[str, str], cwd: str, **popen: object) -> Kernel:
    """In place of jupyter_client's, which begins a Python for each kernel."""
    global warm
    if warm is None or warm.poll() is not None:
        usual = {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}  # as ipykernel sets it
        warm = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env | usual,
            text=True,
            start_new_session=True,
        )
    print(json.dumps({"argv": cmd[2:], "env": env, "cwd": cwd}), file=warm.stdin, flush=True)
    return Kernel(int(warm.stdout.readline()))


def use() -> None:
    """Let nbval, and it alone, begin its kernels here."""
    import nbval.plugin
    from jupyter_client.provisioning import local_provisioner

    class RunningKernel(nbval.plugin.RunningKernel):
        def __init__(self, *args: object, **kwargs: object) -> None:
            with mock.patch.object(local_provisioner, "launch_kernel", launch_kernel):
                super().__init__(*args, **kwargs)

    nbval.plugin.RunningKernel = RunningKernel


def main() -> None:
    import gc

    del sys.path[0]  # this folder, where no page looks
    os.environ["JPY_PARENT_PID"] = str(os.getpid())  # kernels end when this process does

    import matplotlib.pyplot  # noqa: F401
    import numpy as np
    import torch._dynamo  # every optimizer does
    import transformers.modeling_utils  # noqa: F401
    from ipykernel import kernelapp, zmqshell  # noqa: F401

    gc.freeze()  # no kernel goes through what is loaded here, nor copies it by doing so
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a kernel that has ended leaves no zombie
    for line in sys.stdin:
        assert len(os.listdir("/proc/self/task")) == 1, "a process of several threads forks"
        pid = os.fork()
        if pid:
            os.setpgid(pid, pid)  # what it begins ends with it
            print(pid, flush=True)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        asked = json.loads(line)
        os.environ.clear()
        os.environ |= asked["env"]
        os.chdir(asked["cwd"])
        torch.default_generator.seed(), np.random.seed()  # other ones in each kernel, as ever
        sys.argv = asked["argv"]
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nowhere, stream)
        return kernelapp.launch_new_instance()


if __name__ == "__main__":
    main()
