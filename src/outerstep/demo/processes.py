"""The demo's processes: a server, workers, plain runs; each is a real process with its own log."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from ..dashboard.logins import CODE_S, link_to
from ..dashboard.tunnel import Tunnel
from ..errors import OuterstepError, TransportError
from ..wire.http_transport import HttpTransport

SERVER_START_S = 60.0
STOP_S = 10.0


class DemoFailed(OuterstepError):
    """One of the demo's processes ended badly."""


@dataclass
class Process:
    """A child process with a log file; `progress` is the file of its training progress, if any."""

    name: str
    command: list[str]
    log: Path
    progress: Path | None = None
    threads: int = 1
    environ: dict[str, str] = field(default_factory=dict)  # additional variables
    apart: bool = False  # Ctrl-C reaches us, not the child
    child: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def environment(self) -> dict[str, str]:
        # The demo ignores this machine's settings for real runs, so that it is the same everywhere.
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("DILOCO_", "OUTERSTEP_"))}
        ours = {"OMP_NUM_THREADS": str(self.threads), "PYTHONUNBUFFERED": "1", "OUTERSTEP_CONFIG": os.devnull}
        return {**plain, **ours, **self.environ}

    def start(self) -> Process:
        with self.log.open("wb") as log:
            self.child = subprocess.Popen(
                self.command, stdout=log, stderr=subprocess.STDOUT, env=self.environment(), start_new_session=self.apart
            )
        return self

    def is_running(self) -> bool:
        """Raises if it ended with an error."""
        assert self.child is not None
        code = self.child.poll()
        if code not in (None, 0):
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
            raise DemoFailed(f"{self.name} ended with exit code {code}; the end of {self.log}:\n{tail}")
        return code is None

    def kill(self) -> None:
        """SIGKILL: it has no time to say anything."""
        if self.child is not None:
            self.child.kill()
            self.child.wait()

    def stop(self) -> None:
        if self.child is None or self.child.poll() is not None:
            return
        self.child.terminate()
        try:
            self.child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()

    def reports(self) -> list[dict[str, Any]]:
        """Its reports so far, one per line; a line still being written is left for the next call."""
        if self.progress is None or not self.progress.exists():
            return []
        text = self.progress.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def python_module(module: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", module, *map(str, arguments)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def wait_for_server(server: Process, address: str, credentials: Path) -> HttpTransport:
    """Wait until the server answers; raise its own error if it exits instead."""
    transport = HttpTransport(address, timeout_s=5.0, credentials=credentials)
    give_up_at = time.monotonic() + SERVER_START_S
    while server.is_running():
        try:
            transport.status()
            return transport
        except TransportError as error:
            if time.monotonic() > give_up_at:
                raise DemoFailed(f"the server did not answer within {SERVER_START_S:g} s: {error}") from error
            time.sleep(0.2)
    raise DemoFailed(f"the server ended before it answered; see {server.log}")


def tell_page(transport: HttpTransport, credentials: Path, console: Console, around: ExitStack) -> None:
    """How a browser gets to the page of this server. A terminal is shown a link, good until `around` ends, without a
    certificate to warn of. A link logs in whoever opens it, so a log file is told how to get one."""
    if not console.is_terminal:
        command = f"outerstep page --server {transport.address} --credentials {credentials} --tunnel"
        console.print(f"In a browser, while it runs: `{command}` prints a link.", soft_wrap=True, highlight=False)
        return
    tunnel = around.enter_context(Tunnel(transport))
    link = link_to(tunnel.address, transport.page_link().code, plain=True)
    about = f"In a browser, while it runs; the link works once, within {CODE_S / 60:.0f} minutes:"
    console.print(f"{about}\n\n    {link}\n", soft_wrap=True, highlight=False)
