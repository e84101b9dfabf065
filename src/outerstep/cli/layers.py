"""`outerstep layers`: check a file that describes the layers of a run, and say what to type on each machine."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..config import Sourced
from ..config.kinds import shown
from ..config.layers import LayersFile, LayerTable, check_layers, read_layers, starts
from ..config.layers.rules import waits_s
from ..config.layers.starts import server_settings, worker_settings

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="rich", help="Check a file that describes the layers of a run."
)


@app.callback()
def layers() -> None:
    """So that `check` is a word of its own, though it is the only one."""


@app.command()
def check(file: Annotated[str, typer.Argument(metavar="FILE", help="The file, for example layers.toml.")]) -> None:
    """Check the file, and print the layers and the exact command for each machine.

    Every setting of every process is checked as that process would check it at its start.
    """
    described = read_layers(file)
    check_layers(described)
    commands = starts(described)
    console = Console()
    console.print(_layers(described))
    console.print(_clusters(described))
    for start in commands:
        joins = f" (once before: `outerstep join` with the line that the server of {start.joins} printed)"
        typer.echo(f"\nOn {start.where}{joins if start.joins else ''}:\n\n    {start.command}")


def _layers(file: LayersFile) -> Table:
    table = Table("layer", "engine", "every", "outer step", "codec", "fragments", "waits")
    for layer in file.layers:
        clusters = [each for each in file.clusters.values() if each.layer is layer]
        said: dict[str, Sourced] = {}
        for cluster in clusters[:1]:  # what follows from the file is the same for all of them
            is_server = layer.engine == "server"
            said |= server_settings(file, cluster) if is_server else worker_settings(file, cluster)
        said |= layer.said
        waits = sorted({waits_s(file, each) for each in clusters} - {0.0})
        row = (
            layer.name,
            layer.engine,
            _interval(file, layer, said),
            _outer_step(layer, said),
            _of(said, "codec"),
            " ".join(filter(None, [_of(said, "num_fragments"), _delay(said)])),
            ", ".join(f"{wait:g} s" for wait in waits),
        )
        table.add_row(*map(escape, row))
    return table


def _clusters(file: LayersFile) -> Table:
    table = Table("cluster", "layer", "in", "address", "different there")
    for cluster in file.clusters.values():
        own = {f: at for f, at in cluster.said.items() if cluster.layer.said.get(f) != at}
        at = cluster.address.value if cluster.address is not None else ""
        different = ", ".join(f"{field} {shown(each.value)}" for field, each in own.items())
        table.add_row(*map(escape, (cluster.name, cluster.layer.name, cluster.parent, at, different)))
    return table


def _interval(file: LayersFile, layer: LayerTable, said: dict[str, Sourced]) -> str:
    if layer.engine == "ddp":
        return "1 step"
    every = _of(said, "sync_every")
    inner = file.layers[layer.depth + 1 :]
    unit = "rounds" if inner and inner[0].engine != "ddp" else "steps"
    return f"{every} {unit}" if every else ""


def _outer_step(layer: LayerTable, said: dict[str, Sourced]) -> str:
    if layer.engine == "ddp":
        return ""
    lr, momentum, named = _of(said, "outer_lr"), _of(said, "outer_momentum"), _of(said, "outer_optimizer")
    if not named and layer.depth and not lr and not momentum:
        return "mean"
    return " ".join(filter(None, [named or "nesterov", lr and f"η {lr}", momentum and f"μ {momentum}"]))


def _delay(said: dict[str, Sourced]) -> str:
    delay = _of(said, "fragment_delay")
    return f"τ {delay}" if delay else ""


def _of(said: dict[str, Sourced], field: str) -> str:
    """Nothing where it is left at its default."""
    return shown(said[field].value) if field in said and said[field].value is not None else ""
