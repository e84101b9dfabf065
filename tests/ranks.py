"""The ranks of a torch.distributed job on this machine, each a process, as torchrun starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.distributed import TCPStore

from nursery import Child, start


class Ranks:
    """As many as there are logs, with a store that outlives them as torchrun's does; they end with it. `environ`: what
    each has of its own that torch reads while it is imported."""

    def __init__(
        self,
        arguments: Sequence[str],
        logs: Sequence[Path],
        environ: Sequence[Mapping[str, str]] | None = None,
        *,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """`settings`: variables that all of them have."""
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = {
            "WORLD_SIZE": str(len(logs)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "OMP_NUM_THREADS": "1",
            **(settings or {}),
        }
        self.processes: list[Child | subprocess.Popen[bytes]] = []
        for rank, file in enumerate(logs):
            env = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with file.open("wb") as log:
                if environ is None:
                    self.processes.append(start(arguments, log=log, env=env))
                else:
                    command = [sys.executable, *arguments]
                    own = {**env, **environ[rank]}
                    self.processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=own))

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait(60)
