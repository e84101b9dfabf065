"""Processes that begin with torch in memory: real ones, with a process id, signals and an exit code of their own.

A process that trains spends four seconds of computation on its imports, and there are hundreds of them in these tests.
So one process has done the imports, and every other is forked from it and goes on as `python ARGUMENTS` would: its own
environment, folder, log and argv. Nothing else happens in the first one; it has no threads.

    child = start(["-m", "outerstep", "server", …], log=file, cwd=folder, env=environ)     like subprocess.Popen

What torch reads from the environment while it is imported (ATEN_CPU_CAPABILITY) cannot be set for such a process.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

IMPORTS = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "outerstep.cli", "outerstep.worker")
"""What takes long. (An optimizer imports torch._dynamo at its first step.)"""
MOST_BYTES = 1 << 17  # of an order: the environment is the large part of it


class Child:
    """What tests use of a subprocess.Popen."""

    def __init__(self, report: int) -> None:
        self._report = report
        self.returncode: int | None = None
        self.pid = self._read()

    def _read(self) -> int:
        data = os.read(self._report, 4)
        assert data, "whoever waits for the process is gone"
        return int.from_bytes(data, "little")

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and _is_readable(self._report, timeout):
            self.returncode = os.waitstatus_to_exitcode(self._read())
            os.close(self._report)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _is_readable(fd: int, timeout_s: float | None) -> bool:
    """By poll: select knows no descriptor above 1023, and a process of many tests may have that many."""
    looking = select.poll()
    looking.register(fd, select.POLLIN)
    return bool(looking.poll(None if timeout_s is None else 1e3 * timeout_s))


def start(
    arguments: Sequence[str | Path],
    *,
    log: IO[bytes],
    env: Mapping[str, str],
    cwd: Path | None = None,
    imports: tuple[str, ...] = (),
) -> Child:
    """`python ARGUMENTS`, stdout and stderr into `log`. `imports`: what else takes long, for those that need it."""
    order = {"arguments": [str(a) for a in arguments], "env": dict(env), "cwd": str(cwd or Path.cwd())}
    read, write = os.pipe()
    socket.send_fds(_door(imports), [json.dumps(order).encode()], [log.fileno(), write])
    os.close(write)
    return Child(read)


@functools.cache
def _door(imports: tuple[str, ...] = ()) -> socket.socket:
    """To the process with the imports, which is started when it is first needed and ends with this one."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, __file__, str(there.fileno()), *imports]
    process = subprocess.Popen(
        command,
        pass_fds=[there.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    there.close()

    def close() -> None:
        here.close()
        process.terminate()  # a process that a test forked may hold the door open
        process.wait()

    atexit.register(close)
    return here


# --- inside ---------------------------------------------------------------------------------------------------------


def main() -> None:
    """Take orders until the door closes. Returns in each new process too, when its program is over: Python then ends it
    as it ends any other, with all that it does about exit codes, exceptions and threads."""
    for name in (*IMPORTS, *sys.argv[2:]):
        __import__(name)
    gc.collect()
    gc.freeze()  # or every new process would make its own copy of what its collector only looks at
    door = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who waits for a process is not waited for
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    while True:
        data, fds, _, _ = socket.recv_fds(door, MOST_BYTES, 2)
        if not data:
            return
        if os.fork() == 0:
            door.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _wait_for_a_new_one(fds[1])
            _go_on_as(json.loads(data), fds[0])
            return
        for fd in fds:
            os.close(fd)


def _wait_for_a_new_one(report: int) -> None:
    """Returns in the new process only."""
    pid = os.fork()
    if pid == 0:
        os.close(report)
        return
    os.write(report, pid.to_bytes(4, "little"))
    _, status = os.waitpid(pid, 0)
    os.write(report, status.to_bytes(4, "little"))
    os._exit(0)


def _go_on_as(order: dict[str, Any], log: int) -> None:
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    random.seed()
    first, *others = order["arguments"]
    if first == "-m":
        sys.path[0] = order["cwd"]
        sys.argv = others
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(first).parent)
        sys.argv = [first, *others]
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    main()
