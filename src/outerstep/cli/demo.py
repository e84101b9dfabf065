"""`outerstep demo`: see it work on this machine."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..errors import ConfigError


class DemoTopology(StrEnum):
    """How the workers agree."""

    SERVER = "server"
    ALLREDUCE = "allreduce"
    GOSSIP = "gossip"


class DemoWord(StrEnum):
    """A demo of leased data, or of clusters."""

    DATA = "data"
    HIERARCHY = "hierarchy"
    LEAVE = "leave"
    RETURN = "return"
    JOIN = "join"
    BANDWIDTH = "bandwidth"


WORKERS, PEERS = 2, 3
ONLY_PLAIN = ("workers", "steps", "sync_every", "topology")
ONLY_CLUSTERS = ("quick", "namespaces")


def demo(
    context: typer.Context,
    word: Annotated[
        DemoWord | None,
        typer.Argument(
            help="Another demo: [bold]data[/bold], leased data, while workers, a loader process and the server are "
            "killed. Of clusters: [bold]hierarchy[/bold], two clusters of two; [bold]leave[/bold], a group "
            "dies inside one; [bold]return[/bold], and comes back; [bold]join[/bold], a new cluster comes, and one of "
            "another vendor; [bold]bandwidth[/bold], the link gets ten times slower and back.",
            show_default=False,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Worker processes, each with its own data. [dim]Default: {WORKERS}; peers: {PEERS}.[/dim]",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each worker.")] = 600,
    sync_every: Annotated[int, typer.Option(min=1, help="H: steps between exchanges.")] = 25,
    seed: Annotated[int, typer.Option(help="Of the initial weights and the data order.")] = 0,
    topology: Annotated[
        DemoTopology,
        typer.Option(help="How the workers agree: through a server, or without one, as ranks or as peers."),
    ] = DemoTopology.SERVER,
    folder: Annotated[
        Path, typer.Option(help="Where logs, model, plot and results go; those of a demo with a word in a subfolder.")
    ] = Path("outerstep-demo"),
    quick: Annotated[bool, typer.Option("--quick", help="A demo with a word, shorter.")] = False,
    namespaces: Annotated[
        bool | None,
        typer.Option(
            "--namespaces/--no-namespaces",
            help="Give each cluster a network namespace of its own. [dim]Default: where this machine allows it.[/dim]",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Train one small GPT with workers, and by default a server, as real processes, and compare.

    Nothing is downloaded: the text is the Python standard library's own source. By default it takes a few minutes
    on two cores, and ends with a table, a plot and a model that loads.

    With a word it is a demo of clusters: servers and groups as real processes, with a slow link between them. It ends
    with what changed and why, and a plot. With [bold]data[/bold] it ends with a ledger of every unit of the data.
    """
    _check_belongs(context, word)
    if word is DemoWord.DATA:
        if namespaces is not None:
            raise ConfigError("--namespaces belongs to the demos of clusters; leave it out here")
        _ledger(seed, folder / word.value, quick)
        return
    if word is not None:
        _clusters(word, seed, folder / word.value, quick, namespaces)
        return
    from ..demo.run import DemoSettings, run_demo

    count = workers or (PEERS if topology is DemoTopology.GOSSIP else WORKERS)
    run_demo(DemoSettings(folder, count, steps, sync_every, seed, topology.value), Console())


def _ledger(seed: int, folder: Path, quick: bool) -> None:
    from ..demo.ledger import QUICK_UNITS, UNITS, LedgerSettings, run_ledger

    run_ledger(LedgerSettings(folder, seed, QUICK_UNITS if quick else UNITS), Console())


def _clusters(word: DemoWord, seed: int, folder: Path, quick: bool, namespaces: bool | None) -> None:
    from ..demo.sites import enter_namespace, is_inside_namespace, why_no_namespaces

    separate, why_shared = is_inside_namespace(), ""
    if not separate:
        why_shared = why_no_namespaces() if namespaces is not False else "as --no-namespaces asks"
        if not why_shared:
            enter_namespace()
        if namespaces:
            raise ConfigError(
                f"namespaces cannot be made on this machine ({why_shared}); use --no-namespaces, or leave it out"
            )
    from ..demo.scenes import run_scene
    from ..demo.stage import StageSettings

    run_scene(word.value, StageSettings(folder, seed, separate, why_shared), quick, Console())


def _check_belongs(context: typer.Context, word: DemoWord | None) -> None:
    """An option that would be ignored is a mistake."""
    for name in ONLY_CLUSTERS if word is None else ONLY_PLAIN:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            what = "a demo of clusters, for example `outerstep demo hierarchy`" if word is None else "`outerstep demo`"
            raise ConfigError(f"--{name.replace('_', '-')} belongs to {what}; leave it out here")
