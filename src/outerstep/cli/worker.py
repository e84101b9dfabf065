"""`outerstep worker`: start a training script as a worker."""

from __future__ import annotations

import os
import shutil
from typing import Annotated

import typer

from ..errors import ConfigError
from ..wire.http_transport import parse_address


def worker(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND…", help="The training command, after --: python train.py …")
    ],
    server: Annotated[str, typer.Option(help="The server's host:port.", envvar="DILOCO_SERVER")],
    sync_every: Annotated[
        int | None, typer.Option(min=1, help="Local steps between exchanges. Left out: as the run has it.")
    ] = None,
    worker_id: Annotated[str | None, typer.Option(help="A name that survives restarts. Left out: made up.")] = None,
    bf16: Annotated[
        bool | None, typer.Option("--bf16/--no-bf16", help="Send bf16 or fp32. Left out: as the run has it.")
    ] = None,
    heartbeat_interval: Annotated[float | None, typer.Option(min=0, help="Seconds between signs of life.")] = None,
    num_fragments: Annotated[
        int | None,
        typer.Option(
            "--num-fragments", "--fragments", min=1, help="Exchange the model in pieces. Left out: as the run has it."
        ),
    ] = None,
    devices: Annotated[str | None, typer.Option("-d", "--devices", help="CUDA_VISIBLE_DEVICES for the script.")] = None,
) -> None:
    """Start a training script as a worker of a run.

    The script itself joins, with two lines: [bold]with outerstep.attach(model, optimizer):[/bold] around its loop.
    This command only tells it where, through the DILOCO_* environment variables.
    """
    parse_address(server)
    settings = {
        "DILOCO_SERVER": server,
        "DILOCO_SYNC_EVERY": sync_every,
        "DILOCO_BF16_COMM": None if bf16 is None else int(bf16),
        "DILOCO_HEARTBEAT_INTERVAL": heartbeat_interval,
        "DILOCO_NUM_FRAGMENTS": num_fragments,
        "DILOCO_WORKER_ID": worker_id,
        "CUDA_VISIBLE_DEVICES": devices,
    }
    environ = {**os.environ, **{name: str(value) for name, value in settings.items() if value is not None}}
    program = shutil.which(command[0])
    if program is None:
        raise ConfigError(f"command not found: {command[0]!r}; write the training command after --")
    # The script takes this process's place: its signals and its exit code are its own.
    os.execve(program, command, environ)
