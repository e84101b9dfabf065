"""`outerstep demo`: see it work on this machine."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


class DemoTopology(StrEnum):
    """How the workers agree."""

    SERVER = "server"
    ALLREDUCE = "allreduce"
    GOSSIP = "gossip"


def demo(
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Worker processes, each with its own data. [dim]Default: 2; peers: 3.[/dim]"),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each worker.")] = 600,
    sync_every: Annotated[int, typer.Option(min=1, help="H: steps between exchanges.")] = 25,
    seed: Annotated[int, typer.Option(help="Of the initial weights and the data order.")] = 0,
    topology: Annotated[
        DemoTopology,
        typer.Option(help="How the workers agree: through a server, or without one, as ranks or as peers."),
    ] = DemoTopology.SERVER,
    folder: Annotated[Path, typer.Option(help="Where logs, model, plot and results go.")] = Path("outerstep-demo"),
) -> None:
    """Train one small GPT with workers, and by default a server, as real processes, and compare.

    Nothing is downloaded: the text is the Python standard library's own source. By default it takes a few minutes
    on two cores, and ends with a table, a plot and a model that loads.
    """
    from ..demo.run import DemoSettings, run_demo

    count = workers or (3 if topology is DemoTopology.GOSSIP else 2)
    run_demo(DemoSettings(folder, count, steps, sync_every, seed, topology.value), Console())
