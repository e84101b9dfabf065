"""`outerstep status`: what a server is doing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from ..errors import ConfigError, TransportError
from ..wire.http_transport import HttpTransport
from .options import CredentialsFolder, ServerAddress, credentials_folder, server_address

WATCH_S = 1.0


def status(
    seconds: Annotated[
        float | None, typer.Argument(metavar="[SECONDS]", min=0.1, help="With --watch: the interval, if not 1.")
    ] = None,
    server: ServerAddress = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the server's answer as JSON.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second, until Ctrl-C.")] = False,
    credentials: CredentialsFolder = None,
) -> None:
    """Show rounds, workers and what the server waits for."""
    if seconds is not None and not watch:
        raise ConfigError(f"SECONDS needs --watch, got {seconds:g} without it; add --watch")
    if watch and as_json:
        raise ConfigError("--json prints once; leave --watch out")
    transport = HttpTransport(server_address(server), timeout_s=10.0, credentials=credentials_folder(credentials))
    if as_json:
        typer.echo(json.dumps(transport.status(), indent=2))
        return
    console = Console()
    shown = render(transport.status(), transport.address)
    if not watch:
        console.print(shown)
        return
    with Live(shown, console=console, auto_refresh=False, screen=False) as live:
        while True:
            time.sleep(seconds or WATCH_S)
            try:
                shown = render(transport.status(), transport.address)
                live.update(shown, refresh=True)
            except TransportError as error:
                live.update(Group(shown, f"[red]{escape(str(error))}[/red]"), refresh=True)


def render(status: dict[str, Any], address: str) -> RenderableType:
    """The status for people: a few lines of facts, the workers, and what each fragment waits for."""
    if status["mode"] == "gossip":
        return _peer(status, address)
    lines: list[RenderableType] = [
        f"[bold]{address}[/bold]  run {status['run_id']}  {status['mode']}  up {duration(status['uptime_s'])}",
        f"round [bold]{status['sync_round']}[/bold]  {status['total_submissions']} contribution(s)  "
        f"received {size(status['bytes_received'])}, sent {size(status['bytes_sent'])}  "
        f"deaths {status['total_worker_deaths']}",
        f"plan: {_plan(status['plan'] or {})}",
    ]
    more = (_asynchronous(status), _aggregation(status), _tokens(status.get("tokens") or {}))
    lines += [line for line in more if line]
    lines.append(_workers(status["workers"]) if status["workers"] else "no workers at the moment")
    if status["failure"]:
        lines.append(f"[red]{escape(status['failure'])}[/red]")
    if status.get("trouble"):
        lines.append(f"[red]{escape(status['trouble'])}[/red]")
    if status.get("last_save"):
        lines.append(f"last save: {escape(status['last_save'])}")
    if status.get("closing"):
        lines.append(f"[yellow]shutting down: {escape(status['closing'])}[/yellow]")
    for i, fragment in enumerate(status["fragments"]):
        done = ", ".join(fragment["contributed"]) or "nobody yet"
        lines.append(
            f"fragment {i}: version {fragment['version']}{_watched(fragment.get('watched') or {})}; "
            f"contributed: {escape(done)}; waiting for {escape(fragment['waiting_for'])}"
        )
    return Group(*lines)


def _watched(round_: dict[str, float]) -> str:
    """Metrics of the round that made this version (docs/concepts/what-to-watch.md)."""
    shown = {"aggregated_grad_norm": "‖Δ̄‖", "peer_grad_similarity": "similarity", "weight_divergence": "divergence"}
    parts = [f"{word} {round_[name]:.3g}" for name, word in shown.items() if name in round_]
    return f" ({', '.join(parts)})" if parts else ""


def _peer(status: dict[str, Any], address: str) -> RenderableType:
    """The status of a peer of a run without a server."""
    head = f"[bold]{address}[/bold]  peer {escape(status['peer_id'])}  up {duration(status['uptime_s'])}"
    if not status["begun"]:
        return f"{head}  has not joined a run yet"
    table = Table("peer", "address", "step", "steps/s", "loss", "seen", "trouble")
    for member in status["members"]:
        facts = {"step": "", "steps_per_second": 0.0, "loss": None, "last_seen_s": 0.0, "address": "", **member}
        cells = [facts["address"], facts["step"], COLUMNS["steps/s"](facts), COLUMNS["loss"](facts)]
        cells += ["itself" if facts.get("self") else COLUMNS["seen"](facts), facts.get("trouble", "")]
        table.add_row(escape(member["peer_id"]), *(escape(str(cell)) for cell in cells))
    lines: list[RenderableType] = [
        f"{head}  run {status['run_id']}  block {status['height']}",
        f"received {size(status['bytes_received'])}, sent {size(status['bytes_sent'])}",
        table,
    ]
    if not status["is_member"]:
        lines.append("[yellow]it is not a member of the run, or not yet[/yellow]")
    for word, who in (("silent", status["silent"]), ("proven to lie, and expelled", status["expelled"])):
        lines += [f"[red]{word}: {escape(', '.join(who))}[/red]"] if who else []
    lines += [f"[red]{escape(status[what])}[/red]" for what in ("failure", "trouble") if status[what]]
    for i, fragment in enumerate(status["fragments"]):
        lines.append(f"fragment {i}: version {fragment['version']}; waiting for {escape(fragment['waiting_for'])}")
    return Group(*lines)


def _plan(plan: dict[str, Any]) -> str:
    if not plan:
        return "open until the first worker joins"
    text = f"sync_every {plan['sync_every']}, {plan['codec']}, {plan['num_fragments']} fragment(s)"
    if plan.get("fragment_delay"):
        alpha = plan.get("fragment_alpha")
        taken = "carried" if plan.get("fragment_carry") else f"mixed with α {alpha:g}" if alpha else "overwritten"
        text += f", adopted {plan['fragment_delay']} step(s) later and {taken}"
    return text + (f", revision {plan['revision']}" if plan.get("revision") else "")


def _asynchronous(status: dict[str, Any]) -> str:
    """Delayed Nesterov and dynamic local updates, if the run has them."""
    parts = []
    if status.get("dn_buffer_size"):
        parts.append(f"delayed Nesterov: {status['dn_buffered']} of {status['dn_buffer_size']} buffered")
    if status.get("dylu_enabled"):
        base = status.get("dylu_base_sync_every")
        parts.append(f"dynamic local updates: H {base} for the fastest" if base else "dynamic local updates")
    return "  ".join(parts)


def _aggregation(status: dict[str, Any]) -> str:
    """The rule that combines contributions, if it is not the plain mean."""
    rule, too_few = status.get("aggregation", "mean"), status.get("rounds_too_few")
    if rule == "mean":
        return ""
    needs = f"aggregation: {rule}, at least {status['min_workers']} contributions"
    return needs + (f", {too_few} round(s) moved nothing because too few had trained" if too_few else "")


def _tokens(tokens: dict[str, Any]) -> str:
    if not tokens.get("total") and not tokens.get("budget"):
        return ""
    text = f"tokens: {count(tokens['total'])}"
    if tokens.get("budget"):
        text += f" of {count(tokens['budget'])} ({tokens['total'] / tokens['budget']:.1%})"
    if tokens.get("per_second"):
        text += f", {count(tokens['per_second'])}/s"
    if tokens.get("seconds_left") is not None:
        text += f", about {duration(tokens['seconds_left'])} to go"
    return text


# What each column shows of a worker; a column that is empty for all workers is left out.
COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "host": lambda facts: facts["hostname"],
    "step": lambda facts: str(facts["step"]),
    "steps/s": lambda facts: f"{facts['steps_per_second']:.2f}" if facts["steps_per_second"] else "",
    "H": lambda facts: str(facts.get("sync_every") or ""),
    "loss": lambda facts: "" if facts["loss"] is None else f"{facts['loss']:.4f}",
    "‖Δ‖": lambda facts: f"{facts['delta_norm']:.3g}" if facts.get("delta_norm") else "",
    "sent": lambda facts: str(facts.get("contributions") or ""),
    "bytes": lambda facts: size(facts["bytes_received"]) if facts.get("bytes_received") else "",
    "tokens": lambda facts: count(facts["tokens"]) if facts.get("tokens") else "",
    "staleness": lambda facts: str(facts.get("staleness") or ""),
    "trouble": lambda facts: _trouble(facts),
    "seen": lambda facts: f"{facts['last_seen_s']:.0f} s ago",
}


def _trouble(facts: dict[str, Any]) -> str:
    if facts.get("quarantine"):
        return f"quarantine, {duration(facts['quarantine']['left_s'])} left"
    parts = [
        f"{facts[key]} {what}" for key, what in (("offences", "offence(s)"), ("left_out", "left out")) if facts.get(key)
    ]
    return ", ".join(parts)


def _workers(workers: dict[str, dict[str, Any]]) -> Table:
    named = sorted(workers.items())
    columns = {title: [show(facts) for _, facts in named] for title, show in COLUMNS.items()}
    kept = {title: cells for title, cells in columns.items() if any(cells)}
    table = Table("worker")
    for title in kept:
        table.add_column(title, justify="left" if title == "host" else "right")
    for row, (name, _) in enumerate(named):
        table.add_row(escape(name), *(escape(cells[row]) for cells in kept.values()))
    return table


def size(count: int) -> str:
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000.0:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000.0
    return f"{value:.1f} TB"


def count(number: float) -> str:
    """12,345 in full; larger ones in millions, billions, trillions."""
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= scale:
            return f"{number / scale:.2f} {unit}"
    return f"{number:,.0f}"


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
