"""`outerstep lighthouse`: where the replicas of a torchft run meet."""

from __future__ import annotations

import os
import socket
import sys
import threading
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ConfigError
from ..installing import install_line
from ..security import is_loopback
from .stopping import Stopping

if TYPE_CHECKING:
    from torchft.coordination import LighthouseServer

DEFAULT_PORT = 29510  # torchft's own
EVERYWHERE = ("0.0.0.0", "::")


def lighthouse(
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 = all of this machine's, on a trusted network.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 = any free one.")] = DEFAULT_PORT,
    min_replicas: Annotated[
        int, typer.Option(min=1, help="Replicas that it takes for a quorum. All of them = nobody begins alone.")
    ] = 1,
    join_timeout_s: Annotated[
        float,
        typer.Option(
            "--join-timeout",
            min=0.0,
            help="Seconds that a quorum waits for a replica that is alive and does not come; then more than half of "
            "all continue without it.",
        ),
    ] = 60.0,
    heartbeat_timeout_s: Annotated[
        float, typer.Option("--heartbeat-timeout", min=0.1, help="Seconds of silence until a replica counts as dead.")
    ] = 5.0,
    tick_s: Annotated[
        float, typer.Option("--tick", min=0.01, help="Seconds between two looks whether there is a quorum.")
    ] = 0.1,
) -> None:
    """Start torchft's lighthouse, at which the replicas of a run meet.

    It holds no model and remembers nothing: it can be restarted at any time, on the same port. Anyone who reaches it
    can join the run, in plain text and without a token: for trusted networks only.
    """
    made = _start(_place(host, port), min_replicas, join_timeout_s, heartbeat_timeout_s, tick_s)
    address = _place(socket.gethostname() if host in EVERYWHERE else host, int(made.address().rpartition(":")[2]))
    alone = " (Only this machine can reach it: --host 0.0.0.0 lets others in.)" if is_loopback(host) else ""
    _say(f"Lighthouse on {address}, for quorums of {min_replicas} or more. On each replica:{alone}\n")
    _say(f"    outerstep worker --topology torchft --lighthouse {address} -- python train.py\n")
    stop = threading.Event()
    with Stopping() as stopping:
        stopping.gently(stop.set)
        stop.wait()
    made.shutdown()


def _start(
    bind: str, min_replicas: int, join_timeout_s: float, heartbeat_timeout_s: float, tick_s: float
) -> LighthouseServer:
    os.environ.setdefault("RUST_LOG", "warn")  # else it reports every tick
    try:
        from torchft.coordination import LighthouseServer
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "torchft":
            raise
        raise ConfigError(
            f"a lighthouse needs the package torchft, which is not installed: {install_line('torchft')}"
        ) from error
    try:
        return LighthouseServer(
            bind=bind,
            min_replicas=min_replicas,
            join_timeout_ms=round(1000 * join_timeout_s),
            quorum_tick_ms=round(1000 * tick_s),
            heartbeat_timeout_ms=round(1000 * heartbeat_timeout_s),
        )
    except (RuntimeError, OSError) as error:
        raise ConfigError(f"no lighthouse on {bind}: {error}; is the port taken? --port chooses another") from error


def _place(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
