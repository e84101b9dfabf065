"""Servers that kill themselves at a chosen call to the disk; a program that starts one after the other.

    python kill_points.py PORT LOG      # a plan per line on standard input, what became of it on standard output

Each server is a fork of this process, which has imported everything: a start takes a fraction of a second. In it every
call that changes the run's folder is counted, and at the one that the plan names it sends itself SIGKILL: before the
call, or in the middle of a write. Nothing in the package knows of this.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from outerstep.server import DiLoCoServer
from support import tiny_model

BY_DESCRIPTOR = ("write", "pwrite", "fsync")
BY_PATH = ("rename", "replace", "unlink", "rmdir", "mkdir", "symlink")
SETTINGS: dict[str, Any] = {
    "insecure": True,
    "sync_every": 2,
    "codec": "fp32",
    "down_codec": "int8",
    "deterministic": True,
    "save_every": 1,
    "keep_saves": 2,
}


class KillPoint:
    """`call`: which of those that touch `folder`, as the log names them, None = never; `nth` of its kind, from 1.
    `how`: "before" it, or after "half" of a write."""

    def __init__(self, folder: str, log: str, call: str | None, nth: int, how: str) -> None:
        self._folder, self._call, self._nth, self._how = os.path.realpath(folder), call, nth, how
        self._count = 0
        self._lock = threading.Lock()
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._write = os.write

    def watch(self) -> None:
        for name in (*BY_DESCRIPTOR, *BY_PATH):
            setattr(os, name, self._watched(name, getattr(os, name)))

    def _watched(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(target: Any, *arguments: Any, **options: Any) -> Any:
            path = self._path(name, target, arguments, options)
            if path.startswith(self._folder) and self._is_now(f"{name} {path.removeprefix(self._folder)}"):
                if self._how == "half":
                    original(target, memoryview(arguments[0])[: len(arguments[0]) // 2], *arguments[1:])
                os.kill(os.getpid(), signal.SIGKILL)
            return original(target, *arguments, **options)

        return call

    @staticmethod
    def _path(name: str, target: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
        if name in BY_DESCRIPTOR:
            return os.readlink(f"/proc/self/fd/{target}")
        path = os.fspath(arguments[0] if name == "symlink" else target)
        if options.get("dir_fd") is not None:
            return os.path.join(os.readlink(f"/proc/self/fd/{options['dir_fd']}"), path)
        return os.path.realpath(os.path.dirname(path)) + "/" + os.path.basename(path)

    def _is_now(self, what: str) -> bool:
        """Numbers in names differ from round to round, those of a secret's temporary file each time: they do not tell
        calls apart."""
        call = re.sub(r"\d+(-\d+)?", "#", re.sub(r"(?<=\.key\.)[0-9a-f]+", "#", what))
        with self._lock:
            self._write(self._log, f"{call}\n".encode())
            self._count += call == self._call
            return call == self._call and self._count == self._nth


def serve(folder: str, port: int) -> None:
    torch.set_num_threads(1)
    server = DiLoCoServer(tiny_model().state_dict(), 2, port=port, save_dir=folder, **SETTINGS)
    signal.signal(signal.SIGTERM, lambda *_: server.request_stop())
    server.run()


def main() -> None:
    port, log = int(sys.argv[1]), sys.argv[2]
    for line in sys.stdin:
        plan = json.loads(line)
        child = os.fork()
        if child == 0:
            sys.stdin.close()
            KillPoint(log=log, **plan).watch()
            serve(plan["folder"], port)
            os._exit(0)
        print(json.dumps({"started": child}), flush=True)
        print(json.dumps({"ended": os.waitpid(child, 0)[1]}), flush=True)


if __name__ == "__main__":
    main()
