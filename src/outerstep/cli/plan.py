"""`outerstep plan`: which settings suit these sites and links, what they cost, and what to type. Needs no torch."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..coordination.cost import MEASURED, NOMINAL, NONE, Line
from ..coordination.failures import NEVER, Failures, RoundClosing
from ..coordination.planning import Choice, Option, Proposal, Situation, propose
from ..coordination.planning.guide import MEASURED_ON
from ..coordination.planning.planner import NEARLY_EQUAL, utilization_by_interval
from ..coordination.planning.situation import LOCAL_NETWORK, MOST_WORKERS, Engine
from ..errors import ConfigError
from ..installing import install_line
from ..observe.quantities import counted, duration, size
from ..observe.status import read_status
from ..printable import printable
from . import units
from .plan_scenario import pool_bytes, write_scenario
from .plan_sources import COMMAND_LINE, Source, from_file, from_status, site
from .status import count
from .which_server import CredentialsFolder, credentials_folder

LINKS = "Sites and links"
FAILING = "Failures"
FIXED = "What if (left out: the planner chooses)"
OUTPUT = "Output"
TIMEOUT_S = 10.0


def plan(
    file: Annotated[
        str | None,
        typer.Argument(metavar="[FILE]", help="TOML file of sites that differ (docs/operating/planning.md)."),
    ] = None,
    params: Annotated[str | None, typer.Option("--params", help="Size of the model: 7B, 150M.")] = None,
    from_server: Annotated[
        str | None,
        typer.Option("--from", metavar="HOST:PORT", help="Take what a running server has measured."),
    ] = None,
    sites: Annotated[
        int, typer.Option("--sites", min=1, max=MOST_WORKERS, rich_help_panel=LINKS, help="Places that train.")
    ] = 2,
    workers_per_site: Annotated[
        int, typer.Option(min=1, rich_help_panel=LINKS, help="Workers that share a site's line.")
    ] = 1,
    link: Annotated[
        str | None, typer.Option(rich_help_panel=LINKS, help="Each site's line, both directions: 200mbit, 1gbit.")
    ] = None,
    link_up: Annotated[str | None, typer.Option(rich_help_panel=LINKS, help="From the site.")] = None,
    link_down: Annotated[str | None, typer.Option(rich_help_panel=LINKS, help="To the site.")] = None,
    latency: Annotated[
        str, typer.Option(rich_help_panel=LINKS, help="There and back, as ping shows it: 50ms.")
    ] = "20ms",
    step_time: Annotated[
        str | None, typer.Option(rich_help_panel=LINKS, help="One optimizer step of one worker: 3s, 200ms.")
    ] = None,
    server_link: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=LINKS,
            help="What the server's own access carries in all. [dim]Default: more than all sites together send.[/dim]",
        ),
    ] = None,
    lan: Annotated[
        str | None,
        typer.Option(rich_help_panel=LINKS, help="Between the workers of a site. [dim]Default: 10gbit.[/dim]"),
    ] = None,
    server_lan: Annotated[
        str | None,
        typer.Option(rich_help_panel=LINKS, help="Of a site's own server. [dim]Default: as --lan.[/dim]"),
    ] = None,
    server_speed: Annotated[
        float,
        typer.Option(min=0.01, max=1000.0, help="How often as fast as two processor cores each server is."),
    ] = 1.0,
    failures_per_hour: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=FAILING, help="Share of the workers that die within an hour: 5%. [dim]Default: none.[/dim]"
        ),
    ] = None,
    restart_after: Annotated[
        str | None,
        typer.Option(rich_help_panel=FAILING, help="How long until each is back. [dim]Default: 10min.[/dim]"),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Of the workers' weights: bf16, fp16 or fp32; for memory. [dim]Default: bf16.[/dim]"),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Share of the time that is to be spent on training. [dim]Default: 95%.[/dim]")
    ] = None,
    sync_every: Annotated[int | None, typer.Option(min=1, rich_help_panel=FIXED, help="H: this interval.")] = None,
    codec: Annotated[str | None, typer.Option(rich_help_panel=FIXED, help="This codec, both ways.")] = None,
    fragments: Annotated[int | None, typer.Option(min=1, rich_help_panel=FIXED, help="So many fragments.")] = None,
    delay: Annotated[
        int | None, typer.Option(min=0, rich_help_panel=FIXED, help="τ: this delay; 0 = blocking.")
    ] = None,
    inside: Annotated[
        str | None,
        typer.Option(rich_help_panel=FIXED, help="Inside a site, in a hierarchy: server or allreduce."),
    ] = None,
    inside_every: Annotated[
        int | None, typer.Option(min=1, rich_help_panel=FIXED, help="And every so many steps there.")
    ] = None,
    ideal: Annotated[
        bool, typer.Option("--ideal", rich_help_panel=FIXED, help="Count bytes and lines alone, no work of ours.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", rich_help_panel=OUTPUT, help="Print everything as JSON.")] = False,
    plot: Annotated[
        str | None,
        typer.Option(metavar="FILE", rich_help_panel=OUTPUT, help="Draw utilization over H (needs matplotlib)."),
    ] = None,
    scenario: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=OUTPUT,
            help="Write what is recommended for [bold]outerstep simulate[/bold].",
        ),
    ] = None,
    credentials: CredentialsFolder = None,
) -> None:
    """Choose settings before a run: what will it cost, and what do I type?

    Example: [bold]outerstep plan --params 7B --sites 4 --link 200mbit --latency 50ms --step-time 3s[/bold]

    For each topology that makes sense and each codec it looks for the shortest interval H that leaves the target for
    training, with the same model of cost as a server with --target-utilization. It recommends one, says why and what it
    takes, and prints the commands. With --failures-per-hour it counts what each topology loses to workers that die;
    --scenario writes a file with which `outerstep simulate` plays a day of it. What you fix under "What if" stays as it
    is.
    """
    if file is not None and from_server is not None:
        raise ConfigError(f"one source at a time: {file} or --from {from_server}")
    said: dict[str, Any] = {"workers": workers_per_site, "latency": latency, "step_time": step_time}
    said |= {"link": link, "up": link_up, "down": link_down}
    given = {key: value for key, value in said.items() if value is not None}
    if from_server is not None:
        source = _ask(from_server, credentials_folder(credentials))
    elif file is not None:
        source = from_file(file, given)
    else:
        source = Source(sites=tuple(_sites(sites, given)))
    situation = _situation(
        source,
        params=params,
        dtype=dtype,
        target=target,
        server_link=server_link,
        lan=lan,
        server_lan=server_lan,
        choice=Choice(sync_every, codec, fragments, delay, _engine(inside), inside_every),
        ideal=ideal,
        server_speed=server_speed,
        failures_per_hour=failures_per_hour,
        restart_after=restart_after,
    )
    proposal = propose(situation)
    now = None if source.now is None else _as_it_is(situation, source.now)
    if plot is not None:
        draw(proposal, Path(plot))
    if scenario is not None:
        write_scenario(Path(scenario), situation, proposal.recommended)
    if as_json:
        typer.echo(json.dumps(as_plain(proposal, now), indent=2, ensure_ascii=False))
        return
    show(proposal, now, source.assumed, Console())
    if plot is not None:
        typer.echo(f"drawn: {plot}")
    if scenario is not None:
        typer.echo(f"written; to play a day of it: outerstep simulate {shlex.quote(scenario)}")


def _sites(number: int, given: Mapping[str, Any]) -> Iterator[Any]:
    for flag, keys in (("--link (or --link-up and --link-down)", ("link", "up")), ("--step-time", ("step_time",))):
        if not any(key in given for key in keys):
            raise ConfigError(
                f"a plan needs {flag}; e.g. --link 200mbit --step-time 3s, or a FILE, or --from HOST:PORT"
            )
    for i in range(1, number + 1):
        yield site({**given, "name": f"site{i}"}, COMMAND_LINE)


def _ask(address: str, credentials: str | None) -> Source:
    from ..wire.http_transport import HttpTransport

    transport = HttpTransport(address, timeout_s=TIMEOUT_S, credentials=credentials)
    return from_status(read_status(transport.status()), transport.address)


def _engine(said: str | None) -> Engine | None:
    match said:
        case None | "server" | "allreduce":
            return said
        case _:
            raise ConfigError(f"--inside must be server or allreduce, got {said!r}")


def _situation(source: Source, *, choice: Choice, ideal: bool, server_speed: float, **flags: str | None) -> Situation:
    """What the command line says goes before what a file or a server says."""
    parameters = units.parameters(flags["params"], "--params") if flags["params"] else source.parameters
    if parameters is None:
        raise ConfigError("a plan needs the size of the model; e.g. --params 7B")
    target = units.share(flags["target"], "--target") if flags["target"] else source.target
    server = units.rate(flags["server_link"], "--server-link") if flags["server_link"] else source.server_bytes_per_s
    local = units.rate(flags["lan"], "--lan") if flags["lan"] else source.local_bytes_per_s
    site_server = units.rate(flags["server_lan"], "--server-lan") if flags["server_lan"] else 0.0
    said = flags["failures_per_hour"]
    per_hour = source.failures_per_hour if said is None else units.share(said, "--failures-per-hour", zero=True)
    said = flags["restart_after"]
    restart_s = source.restart_s if said is None else units.seconds(said, "--restart-after")
    if restart_s is not None and per_hour is None:
        raise ConfigError("a restart follows a failure: give --failures-per-hour with --restart-after, e.g. 5%")
    usual = NONE if ideal else MEASURED if source.is_measured else NOMINAL
    return Situation(
        parameters=parameters,
        sites=source.sites,
        server_in_bytes_per_s=server or 0.0,
        server_out_bytes_per_s=server or 0.0,
        local=LOCAL_NETWORK if local is None else Line(local, LOCAL_NETWORK.latency_s),
        server_local_bytes_per_s=site_server,
        weights=flags["dtype"] or source.dtype or "bf16",
        target_utilization=0.95 if target is None else target,
        choice=choice,
        overheads=usual.with_servers(server_speed),
        failures=Failures(per_hour or 0.0, NEVER.restart_s if restart_s is None else restart_s),
    )


def _as_it_is(situation: Situation, now: Choice) -> Option:
    """What the setting in force is expected to give."""
    return propose(dataclasses.replace(situation, choice=now)).recommended


# --- what to type -----------------------------------------------------------------------------------------------------


def commands(situation: Situation, option: Option) -> list[tuple[str, str]]:
    """(Where, what)."""
    outer = f"--outer-lr {option.outer_lr:g}"
    model = "outerstep server -m MODEL_DIR --host 0.0.0.0"
    joins = ("each other machine, once", "outerstep join    # with the line that the server prints")
    if option.topology == "gossip":
        first = f"outerstep peer --sync-every {option.sync_every} --codec {option.codec} {outer} -- python train.py"
        return [
            ("the first machine", first),
            ("the others", "outerstep peer --join 'outerstep://…' -- python train.py    # the line that it prints"),
        ]
    if option.topology == "all-reduce":
        return [
            (
                "every machine",
                f"outerstep worker --server allreduce --sync-every {option.sync_every} --codec {option.codec} {outer} "
                f"-- torchrun --nnodes {option.members} --rdzv-endpoint HOST:29500 --rdzv-backend c10d train.py",
            )
        ]
    if option.inside is None:
        streamed = f" --fragments {option.num_fragments} --fragment-delay {option.delay}" if option.delay else ""
        interval, balanced = option.sync_every, ""
        if situation.slowest_step_s > NEARLY_EQUAL * situation.fastest_step_s:
            # DyLU counts in the steps of the fastest, the planner in those of the middle one.
            interval = round(option.sync_every * situation.middle_step_s / situation.fastest_step_s)
            balanced = " --dylu"
        closes = _closes(option.closing) + _spools(option.members, option)
        return [
            (
                "the server",
                f"{model} -n {option.members} --sync-every {interval} --codec {option.codec}"
                f"{streamed} {outer}{balanced}{closes}",
            ),
            joins,
            ("and there", "outerstep worker --server HOST:8512 -- python train.py"),
        ]
    inside, every = option.inside, f"--above TOP:8512 --cluster NAME --above-every {option.inside.above_every}"
    top = (
        "the top",
        f"{model} -n {option.members} --sync-every {inside.above_every} --codec {option.codec} {outer}",
    )
    if option.delay:
        top = top[0], f"{top[1]} --fragments 1 --fragment-delay {option.delay}"
    top = top[0], top[1] + _closes(option.closing) + _spools(option.members, option)
    sizes = sorted({each.workers for each in situation.sites})
    called = {  # where sites differ, each has a line of its own kind
        size: "NAME its own"
        if len(sizes) == 1
        else "NAME: " + ", ".join(each.name for each in situation.sites if each.workers == size)
        for size in sizes
    }
    if inside.engine == "allreduce":
        below = [
            (
                f"each site, {called[size]}",
                f"outerstep worker --server allreduce --sync-every {inside.sync_every} --codec {inside.codec} {every} "
                f"-- torchrun --nproc-per-node {size} train.py"
                + (f"    # or --nnodes: {size} ranks in all" if size > 1 else ""),
            )
            for size in sizes
        ]
        return [top, ("each site, once, where rank 0 runs", joins[1]), *below]
    return [
        top,
        ("each site's server, once", joins[1]),
        *(
            (
                f"each site's server, {called[size]}",
                f"{model} -n {size} --sync-every {inside.sync_every} --codec {inside.codec} {every}"
                f"{_closes(inside.closing.of(size, sizes[-1]))}{_spools(size, option)}",
            )
            for size in sizes
        ),
        ("each worker, once", "outerstep join    # with the line that its site's server prints"),
        ("and there", "outerstep worker --server SITE:8512 -- python train.py"),
    ]


def _closes(closing: RoundClosing) -> str:
    return "" if closing.quorum is None else f" --quorum {closing.quorum} --grace {closing.grace_s:g}"


def _spools(members: int, option: Option) -> str:
    """Room for a round of contributions, where what is usual is less: without it members take turns."""
    needed = pool_bytes(members, option.up_bytes)
    return "" if needed is None else f" --spool-bytes {needed}"


# --- for people -------------------------------------------------------------------------------------------------------


def show(proposal: Proposal, now: Option | None, assumed: tuple[str, ...], console: Console) -> None:
    situation, best = proposal.situation, proposal.recommended
    console.print(_heading(situation))
    for each in assumed:
        console.print(f"[yellow]{escape(printable(each))}[/yellow]")
    console.print(_table(proposal, now))
    console.print(
        f"[bold]Recommended: {_name(best)}[/bold]" if best.meets_target else f"[bold]The best: {_name(best)}[/bold]"
    )
    for reason in proposal.reasons:
        console.print(f"  · {escape(printable(reason))}", soft_wrap=True)
    console.print(_needs(best))
    console.print("[bold]To type[/bold]")
    for where, what in commands(situation, best):
        console.print(f"  [dim]# {escape(where)}[/dim]", soft_wrap=True)
        console.print(f"  {escape(what)}", soft_wrap=True, highlight=False)
    if situation.choice == Choice() and best.inside is None and best.topology == "server":
        console.print(
            f"  [dim]# or let the server measure and choose: --target-utilization {situation.target_utilization:g} "
            "instead of the settings[/dim]",
            soft_wrap=True,
        )
    console.print(f"[dim]{_assumptions(situation)}[/dim]", soft_wrap=True)


def _heading(situation: Situation) -> str:
    first, alike = situation.sites[0], len({dataclasses.replace(s, name="") for s in situation.sites}) == 1
    sites, workers = counted(len(situation.sites), "site"), counted(situation.workers, "worker")
    what = f"{count(situation.parameters)} parameters, {sites}, {workers}"
    if not alike:
        return what
    rates = f"{_mbit(first.up_bytes_per_s)} up, {_mbit(first.down_bytes_per_s)} down"
    return f"{what}; each line {rates}, {1000 * first.round_trip_s:g} ms; {first.step_s:g} s a step"


def _mbit(bytes_per_s: float) -> str:
    mbit = 8e-6 * bytes_per_s
    return f"{mbit / 1000:g} Gbit/s" if mbit >= 1000 else f"{mbit:.3g} Mbit/s"


def _name(option: Option) -> str:
    pieces = "1 fragment" if option.num_fragments == 1 else f"{option.num_fragments} fragments"
    how = f"{pieces}, τ = {option.delay}" if option.delay else "blocking"
    inside = f", inside every {option.inside.sync_every} by {option.inside.engine}" if option.inside else ""
    return f"{option.topology}, H = {option.sync_every}, {option.codec}, {how}{inside}"


def _table(proposal: Proposal, now: Option | None) -> Table:
    table = Table()
    for title in (
        "",
        "topology",
        "H",
        "codec",
        "fragments",
        "τ",
        "utilization",
        "round",
        "waits",
        "up",
        "down",
        "loss ×*",
    ):
        table.add_column(title, justify="left" if title in ("", "topology", "codec") else "right", no_wrap=True)
    rows = [("→" if each is proposal.recommended else "", each) for each in proposal.options]
    for mark, each in [*rows, *([("now", now)] if now is not None else [])]:
        inside = f" ({each.inside.sync_every} inside)" if each.inside else ""
        style = "bold" if mark == "→" else "" if each.meets_target else "dim"
        table.add_row(
            mark,
            each.topology + inside,
            str(each.sync_every),
            each.codec,
            str(each.num_fragments),
            str(each.delay),
            f"{100 * each.utilization:.1f} %",
            _time(each.round_s),
            _time(each.waiting_s),
            size(round(each.up_bytes)),
            size(round(each.down_bytes)),
            "?" if each.loss_ratio is None else f"{each.loss_ratio:.2f}",
            style=style,
        )
    table.caption = f"bytes: of one member and round · * {MEASURED_ON}"
    return table


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 100.0 else duration(seconds)


def _needs(option: Option) -> Table:
    table = Table("", "takes", "of that", title="What it takes", title_justify="left", show_header=False)
    if option.server is not None:
        server = option.server
        table.add_row("server, memory", size(round(server.memory.total_bytes)), _parts(server.memory.by_part))
        table.add_row("server, disk", size(round(server.disk.total_bytes)), _parts(server.disk.by_part))
        table.add_row("journal, a round", size(round(server.journal_bytes)), "with --durability round, the default")
        traffic = server.traffic
        table.add_row(
            "server, a round",
            f"{size(round(traffic.in_bytes))} in, {size(round(traffic.out_bytes))} out",
            f"{_mbit(traffic.bytes_per_s(option.round_s))} on average",
        )
    worker = option.worker
    table.add_row("worker, memory", f"{size(round(worker.memory.added_bytes))} more", _parts(worker.memory.by_part))
    table.add_row("worker, disk", f"{size(round(worker.disk_bytes))} more", "in each checkpoint that the script saves")
    table.add_row(
        "staleness", f"{option.staleness.news_steps} steps", "the age of what a worker knows of the others, at most"
    )
    return table


def _parts(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {size(round(value))}" for name, value in parts.items() if value)


def _assumptions(situation: Situation) -> str:
    server = (
        f"the server's access carries {_mbit(situation.server_in_bytes_per_s)}"
        if situation.server_in_bytes_per_s
        else "the server's own access limits nobody (--server-link)"
    )
    work = (
        "no work of server and workers is counted (--ideal)"
        if situation.overheads == NONE
        else "work of server and workers as measured on two processor cores"
    )
    return f"Assumed: {server}; {work}; links carry what they promise."


# --- for programs, and as a picture -----------------------------------------------------------------------------------


def as_plain(proposal: Proposal, now: Option | None) -> dict[str, Any]:
    situation = proposal.situation
    options = [_plain(each) for each in proposal.options]
    return {
        "situation": dataclasses.asdict(situation),
        "recommended": options[0],
        "reasons": list(proposal.reasons),
        "commands": [{"where": where, "command": what} for where, what in commands(situation, proposal.recommended)],
        "options": options,
        "now": None if now is None else _plain(now),
        "loss_ratio_is": MEASURED_ON,
    }


def _plain(option: Option) -> dict[str, Any]:
    plain = dataclasses.asdict(option)
    plain["waiting_s"] = option.waiting_s
    for who in (plain["server"], plain["worker"]):
        for part in ("memory", "disk"):
            if who is not None and part in who:
                who[part]["total_bytes"] = sum(who[part].values())
    return plain


def draw(proposal: Proposal, file: Path) -> None:
    """Utilization over the interval, for each codec and way of a server; other topologies as points."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(f"--plot needs matplotlib; to install it: {install_line('demo')}") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for option in proposal.options:
        if option.topology == "server":
            curve = utilization_by_interval(proposal.situation, option)
            way = f"{option.num_fragments} fragments, τ = {option.delay}" if option.delay else "blocking"
            shape = "-" if option.delay else "--"
            axes.plot(*zip(*curve, strict=True), shape, label=f"{option.codec}, {way}")
        else:
            axes.plot([option.sync_every], [option.utilization], "o", label=_name(option), markersize=4)
    best = proposal.recommended
    axes.plot([best.sync_every], [best.utilization], "k*", markersize=14, label=f"recommended: {_name(best)}")
    axes.axhline(proposal.situation.target_utilization, color="#57606a", linewidth=1.0, linestyle=":")
    axes.set_xscale("log")
    axes.set_xlabel("H, steps between two exchanges")
    axes.set_ylabel("share of the time spent on training")
    axes.set_ylim(0.0, 1.02)
    axes.set_title(_heading(proposal.situation), fontsize=9)
    axes.legend(fontsize=7)
    try:
        figure.savefig(file, dpi=130)
    except (OSError, ValueError) as error:  # ValueError: a format that matplotlib does not write
        raise ConfigError(f"--plot {shlex.quote(str(file))} cannot be written: {error}") from error
    finally:
        pyplot.close(figure)
