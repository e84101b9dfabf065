"""`outerstep status --watch` on a real terminal (a pty), against a real server: it follows the run, goes on while the
server is away, and ends by Ctrl-C."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from outerstep.server import DiLoCoServer
from outerstep.worker import DiLoCoWorker
from ports import free_port
from support import tiny_model, train_steps, wait_until

pytestmark = pytest.mark.slow
COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Watching:
    """The command, and all that it has shown so far."""

    def __init__(self, address: str, folder: Path) -> None:
        master, terminal = pty.openpty()
        words = ["-m", "outerstep", "status", "--server", f"http://{address}", "--watch", "0.1"]
        env = {**os.environ, "COLUMNS": "160", "LINES": "50", "TERM": "xterm", "HOME": str(folder)}
        self.process = subprocess.Popen([sys.executable, *words], env=env, stdout=terminal, stderr=terminal)
        os.close(terminal)
        self._master, self._data = master, bytearray()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 65536)
            except OSError:  # the other end is closed
                return
            self._data.extend(data)

    def await_shown(self, text: str, since: int = 0) -> int:
        """Returns how much was shown by then."""
        wait_until(lambda: text in self.shown(since) or self.process.poll() is not None)
        assert text in self.shown(since), self.shown()
        return len(self._data)

    def shown(self, since: int = 0) -> str:
        return COLOURS.sub("", self._data[since:].decode(errors="replace"))

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        os.close(self._master)


@pytest.fixture
def server() -> Iterator[DiLoCoServer]:
    with DiLoCoServer(tiny_model().state_dict(), num_workers=1, port=free_port(), insecure=True, codec="fp32") as made:
        yield made


def test_it_follows_the_run_goes_on_without_the_server_and_ends_by_ctrl_c(server: DiLoCoServer, tmp_path: Path) -> None:
    watching = Watching(server.address, tmp_path)
    try:
        seen = watching.await_shown("no workers at the moment")
        model = tiny_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with DiLoCoWorker(model, optimizer, f"http://{server.address}", sync_every=1, worker_id="left") as worker:
            for loss in (3.0, 2.0, 1.0):
                worker.last_loss = loss
                train_steps(model, optimizer, 1, seed=1)
            seen = watching.await_shown("round 3", seen)
            watching.await_shown("left", seen)
            watching.await_shown("loss 1  █▅▁", seen)
        address = server.address
        server.stop()
        seen = watching.await_shown("no answer from", seen)
        assert "round 3" in watching.shown(seen - 4000), "what was last known stays"
        port = int(address.rpartition(":")[2])
        with DiLoCoServer(tiny_model().state_dict(), num_workers=1, port=port, insecure=True):
            watching.await_shown("no workers at the moment", seen)
            watching.process.send_signal(signal.SIGINT)
            assert watching.process.wait(60) == 130
        assert "Traceback" not in watching.shown()
    finally:
        watching.end()
