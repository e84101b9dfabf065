"""`outerstep simulate`: a run of thousands of workers in virtual time, through the machines that ship. No torch."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..errors import ConfigError
from ..installing import install_line
from ..observe.quantities import counted, duration, size
from ..printable import printable

if TYPE_CHECKING:  # a fleet needs the machines of both ends; --help needs none of them
    from ..simulate.fleet.report import FleetReport, LayerReport
    from ..simulate.fleet.scenario import FleetScenario, LayerSetting

COLOURS = {"training": "#1a7f37", "waiting": "#bf8700", "joining": "#0969da", "down": "#57606a"}


def simulate(
    file: Annotated[str, typer.Argument(metavar="FILE", help="TOML file (docs/operating/simulating.md).")],
    seed: Annotated[int | None, typer.Option(min=0, help="Instead of the file's; it fixes everything.")] = None,
    hours: Annotated[float | None, typer.Option(min=0.0, help="Instead of the file's: virtual time.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE", help="Draw what the workers did over time (needs matplotlib).")
    ] = None,
) -> None:
    """Play a run of thousands of workers in virtual time, before there is one.

    Example: [bold]outerstep simulate examples/simulate/eight.toml[/bold]

    The file says which clusters there are, with their links and speeds, and who fails, comes and goes, or lies. What it
    leaves out of the settings is as `outerstep plan` recommends. The coordinators, commits, workers and clusters that
    decide are the ones that ship. At the end every step is accounted for: in the model, lost and why, or under way.
    """
    from .simulate_file import read_scenario

    scenario = read_scenario(file, seed=seed, hours=hours)
    if plot is not None:
        _check_plot(plot)
    began_s = time.process_time()
    report = _played(scenario)
    cpu_s = time.process_time() - began_s
    if plot is not None:
        draw(report, Path(plot))
    if as_json:
        typer.echo(json.dumps({**report.as_plain(), "cpu_s": cpu_s}, indent=2, ensure_ascii=False))
    else:
        show(scenario, report, Console())
        typer.echo(f"simulated in {cpu_s:.1f} s of processor time")
        if plot is not None:
            typer.echo(f"drawn: {plot}")
    if report.broken_count:
        raise typer.Exit(1)


def _played(scenario: FleetScenario) -> FleetReport:
    from ..simulate.fleet.world import FleetWorld

    console = Console(stderr=True)
    if not console.is_terminal:
        return FleetWorld(scenario).run()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"{scenario.workers} workers, {scenario.hours:g} h", total=1.0)
        return FleetWorld(scenario, progress=lambda share: progress.update(task, completed=share)).run()


# --- for people -------------------------------------------------------------------------------------------------------


def show(scenario: FleetScenario, report: FleetReport, console: Console) -> None:
    console.print(
        f"{counted(report.workers, 'worker')} in {counted(report.clusters, 'place')}, "
        f"{scenario.parameters / 1e9:.3g} B parameters, "
        f"{duration(report.duration_s)}, seed {report.seed}"
    )
    if scenario.topology == "hierarchy":
        assert scenario.inside is not None
        console.print(f"inside a cluster: {_said(scenario.inside, 'steps')}", highlight=False)
        console.print(f"between them:     {_said(scenario.across, 'rounds of theirs')}", highlight=False)
    else:
        console.print(f"server: {_said(scenario.across, 'steps')}", highlight=False)
    planned = "" if report.planned is None else f"; planned: {100 * report.planned:.1f} %"
    console.print(f"[bold]Useful work: {100 * report.useful_share:.1f} %[/bold] of all workers' time{planned}")
    console.print(_time_table(report))
    console.print(_layer_table(report.layers))
    console.print(
        f"To and from the top: {size(report.up_bytes)} up, {size(report.down_bytes)} down. "
        f"Failed and restarted: {report.failures}; left and replaced: {report.leaves}."
    )
    if not report.broken_count:
        console.print("[green]Every promise was kept[/green]: each step is in the model once, or it is known why not.")
    for rule in report.broken[:10]:
        console.print(f"[red]broken: {escape(printable(rule))}[/red]")
    if report.broken_count > 10:
        console.print(f"[red]and {report.broken_count - 10} more[/red]")


def _said(setting: LayerSetting, unit: str) -> str:
    parts = [f"every {setting.sync_every} {unit}", setting.codec]
    if setting.num_fragments > 1:
        parts.append(f"{setting.num_fragments} fragments")
    parts.append(f"τ = {setting.delay}" if setting.delay else "blocking")
    if setting.quorum is not None:
        parts.append(f"a round closes with {100 * setting.quorum:g} % and {setting.grace_s:g} s of grace")
    if setting.round_deadline_s is not None:
        parts.append(f"deadline {setting.round_deadline_s:g} s")
    return ", ".join(parts)


def _time_table(report: FleetReport) -> Table:
    steps = report.steps
    table = Table("of all workers' time", "share", "", title="Where it went", title_justify="left")
    rows = [
        (
            "training",
            report.seconds["training"],
            f"{100 * report.own_s / report.total_s:.2g} % of it the exchange's own",
        ),
        ("waiting", report.seconds["waiting"], "for agreements"),
        ("joining", report.seconds["joining"], "downloading the model"),
        ("down", report.seconds["down"], "between a failure and the next start"),
        ("steps in the model", steps.useful, "the useful work"),
        ("steps under way", steps.under_way, "unsent, on their way, or not at the top yet, when the time was over"),
        ("steps lost: died", steps.died, "with their process"),
        ("steps lost: discarded", steps.discarded, "too old, or refused"),
        ("steps lost: overwritten", steps.overwritten, "taken while an agreement was on its way"),
    ]
    for what, seconds, why in rows:
        table.add_row(what, f"{100 * seconds / report.total_s:.2f} %", why)
    return table


def _layer_table(layers: tuple[LayerReport, ...]) -> Table:
    table = Table("layer", "servers", "rounds", "in a round", "staleness", "worst", "deaths", "quarantines")
    for one in layers:
        mean = f"{one.participants:.1f}", f"{one.staleness:.2f}", str(one.worst_staleness)
        table.add_row(one.name, str(one.servers), str(one.rounds), *mean, str(one.deaths), str(one.quarantines))
    table.caption = "staleness: rounds that closed between the weights a contribution began on and the one it is in"
    return table


# --- as a picture -----------------------------------------------------------------------------------------------------


def _check_plot(name: str) -> None:
    """Before an hour's work, not after it."""
    folder = Path(name).parent
    if not folder.is_dir():
        raise ConfigError(f"--plot {shlex.quote(name)} cannot be written: {folder} is no folder")
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ConfigError(f"--plot needs matplotlib; to install it: {install_line('demo')}") from error
    kind = Path(name).suffix.removeprefix(".")
    if kind and kind.lower() not in FigureCanvasBase.filetypes:
        raise ConfigError(f"--plot must be a file of a kind that matplotlib writes, got {kind!r}; e.g. fleet.png")


def draw(report: FleetReport, file: Path) -> None:
    """What the workers did, and how much of it is in the model so far."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    hours = [each.at_s / 3600.0 for each in report.moments]
    figure, (doing, useful) = pyplot.subplots(2, 1, figsize=(9, 6), sharex=True, layout="constrained")
    kinds = list(COLOURS)
    shares = [[100.0 * each.doing[kind] / report.workers for each in report.moments] for kind in kinds]
    doing.stackplot(hours, *shares, labels=kinds, colors=[COLOURS[kind] for kind in kinds])
    doing.set_ylabel("workers, %")
    doing.set_ylim(0.0, 100.0)
    doing.legend(loc="lower left", fontsize=8)
    doing.set_title(
        f"{report.workers} workers, {report.duration_s / 3600.0:g} h, seed {report.seed}: "
        f"{100 * report.useful_share:.1f} % useful work",
        fontsize=10,
    )
    ran = [(each.at_s, each.in_model_s) for each in report.moments if each.at_s > 0.0]
    so_far = [100.0 * done / (report.workers * at) for at, done in ran]
    useful.plot([at / 3600.0 for at, _ in ran], so_far, label="so far")
    if report.planned is not None:
        useful.axhline(100.0 * report.planned, color="#57606a", linewidth=1.0, linestyle=":", label="planned")
    useful.legend(loc="lower right", fontsize=8)
    useful.set_xlim(hours[0], hours[-1])
    useful.set_ylabel("time so far that is in a model, %")
    useful.set_xlabel("hours")
    useful.set_ylim(0.0, 100.0)
    try:
        figure.savefig(file, dpi=130)
    except (OSError, ValueError) as error:  # ValueError: a format that matplotlib does not write
        raise ConfigError(f"--plot {shlex.quote(str(file))} cannot be written: {error}") from error
    finally:
        pyplot.close(figure)
