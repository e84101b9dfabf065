"""`outerstep status`: what a server is doing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from ..errors import ConfigError, TransportError
from ..observe.status import (
    AboveStatus,
    MemberStatus,
    PeerStatus,
    PlanStatus,
    ServerStatus,
    TokensStatus,
    WorkerStatus,
    read_status,
)
from ..printable import printable
from ..versions import PROTOCOL_VERSION
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
                live.update(Group(shown, f"[red]{_escaped(str(error))}[/red]"), refresh=True)


def render(said: Mapping[str, Any], address: str) -> RenderableType:
    """The status for people: a few lines of facts, the workers, and what each fragment waits for."""
    status = read_status(said)
    if isinstance(status, PeerStatus):
        return _peer(status, address)
    lines: list[RenderableType] = [
        f"[bold]{_escaped(address)}[/bold]  run {_escaped(status.run_id)}  {_escaped(status.mode)}  "
        f"up {duration(status.uptime_s)}",
        f"round [bold]{status.sync_round}[/bold]  {status.total_submissions} contribution(s)  "
        f"received {size(status.bytes_received)}, sent {size(status.bytes_sent)}  deaths {status.total_worker_deaths}",
        f"plan: {_escaped(_plan(status.plan))}",
    ]
    more = _above(status.above), _asynchronous(status), _aggregation(status), _tokens(status.tokens)
    lines += [_escaped(line) for line in more if line]
    lines.append(_workers(status.workers) if status.workers else "no workers at the moment")
    lines += [f"[red]{_escaped(what)}[/red]" for what in (status.failure, status.trouble) if what]
    if status.last_save:
        lines.append(f"last save: {_escaped(status.last_save)}")
    if status.closing:
        lines.append(f"[yellow]shutting down: {_escaped(status.closing)}[/yellow]")
    for i, fragment in enumerate(status.fragments):
        done = ", ".join(fragment.contributed) or "nobody yet"
        lines.append(
            f"fragment {i}: version {fragment.version}{_watched(fragment.watched)}; "
            f"contributed: {_escaped(done)}; waiting for {_escaped(fragment.waiting_for)}"
        )
    return Group(*lines)


def _escaped(text: str) -> str:
    """As it is: a terminal obeys nothing in it, and rich takes none of it for markup, which [fe80::1] looks like."""
    return escape(printable(text))


def _watched(round_: Mapping[str, float]) -> str:
    """Metrics of the round that made this version (docs/concepts/what-to-watch.md)."""
    shown = {"aggregated_grad_norm": "‖Δ̄‖", "peer_grad_similarity": "similarity", "weight_divergence": "divergence"}
    parts = [f"{word} {round_[name]:.3g}" for name, word in shown.items() if name in round_]
    return f" ({', '.join(parts)})" if parts else ""


def _peer(status: PeerStatus, address: str) -> RenderableType:
    """The status of a peer of a run without a server."""
    head = f"[bold]{_escaped(address)}[/bold]  peer {_escaped(status.peer_id)}  up {duration(status.uptime_s)}"
    if not status.begun:
        return f"{head}  has not joined a run yet"
    table = Table("peer", "address", "step", "steps/s", "loss", "seen", "trouble")
    for member in status.members:
        seen = "itself" if member.is_self else _seen(member)
        cells = [member.peer_id, member.address, _step(member), _speed(member), _loss(member), seen, member.trouble]
        table.add_row(*map(_escaped, cells))
    spoken = "" if status.protocol is None else f"  protocol {status.protocol}"
    lines: list[RenderableType] = [
        f"{head}  run {_escaped(status.run_id)}{spoken}  block {status.height}",
        f"received {size(status.bytes_received)}, sent {size(status.bytes_sent)}",
        table,
    ]
    if not status.is_member:
        lines.append("[yellow]it is not a member of the run, or not yet[/yellow]")
    for word, who in (("silent", status.silent), ("expelled (proven to lie, or no longer invited)", status.expelled)):
        lines += [f"[red]{word}: {_escaped(', '.join(who))}[/red]"] if who else []
    if status.refused:
        counts = ", ".join(f"{who} {count}" for who, count in sorted(status.refused.items()))
        lines.append(f"[yellow]said, answered or sent what cannot be: {_escaped(counts)}[/yellow]")
    lines += [f"[red]{_escaped(what)}[/red]" for what in (status.failure, status.trouble) if what]
    for i, fragment in enumerate(status.fragments):
        lines.append(f"fragment {i}: version {fragment.version}; waiting for {_escaped(fragment.waiting_for)}")
    return Group(*lines)


def _above(above: AboveStatus | None) -> str:
    if above is None:
        return ""
    where = f"cluster {above.cluster} of {above.address}"
    if above.failure:
        return f"{where}: on its own, {above.failure}"
    if not above.joined:
        return f"{where}: not joined yet"
    versions = ", ".join(map(str, above.versions))
    return (
        f"{where}: version {versions} there, {above.exchanges} exchange(s), "
        f"sent {size(above.bytes_sent)}, received {size(above.bytes_received)}"
    )


def _plan(plan: PlanStatus | None) -> str:
    if plan is None:
        return "open until the first worker joins"
    text = f"sync_every {plan.sync_every}, {plan.codec}, {plan.num_fragments} fragment(s)"
    if plan.fragment_delay:
        alpha = plan.fragment_alpha
        taken = "carried" if plan.fragment_carry else f"mixed with α {alpha:g}" if alpha else "overwritten"
        text += f", adopted {plan.fragment_delay} step(s) later and {taken}"
    return text + (f", changed {plan.revision} time(s) (revision {plan.revision})" if plan.revision else "")


def _asynchronous(status: ServerStatus) -> str:
    """Delayed Nesterov and dynamic local updates, if the run has them."""
    parts = []
    if status.dn_buffer_size:
        parts.append(f"delayed Nesterov: {status.dn_buffered} of {status.dn_buffer_size} buffered")
    if status.dylu_enabled:
        base = status.dylu_base_sync_every
        parts.append(f"dynamic local updates: H {base} for the fastest" if base else "dynamic local updates")
    return "  ".join(parts)


def _aggregation(status: ServerStatus) -> str:
    """The rule that combines contributions, if it is not the plain mean."""
    if status.aggregation == "mean":
        return ""
    needs = f"aggregation: {status.aggregation}, at least {status.min_workers} contributions"
    too_few = status.rounds_too_few
    return needs + (f", {too_few} round(s) moved nothing because too few had trained" if too_few else "")


def _tokens(tokens: TokensStatus) -> str:
    if not tokens.total and not tokens.budget:
        return ""
    text = f"tokens: {count(tokens.total)}"
    if tokens.budget:
        text += f" of {count(tokens.budget)} ({tokens.total / tokens.budget:.1%})"
    if tokens.per_second:
        text += f", {count(tokens.per_second)}/s"
    if tokens.seconds_left is not None:
        text += f", about {duration(tokens.seconds_left)} to go"
    return text


def _step(member: MemberStatus) -> str:
    return "" if member.step is None else str(member.step)


def _speed(member: MemberStatus) -> str:
    return f"{member.steps_per_second:.2f}" if member.steps_per_second else ""


def _loss(member: MemberStatus) -> str:
    return "" if member.loss is None else f"{member.loss:.4f}"


def _seen(member: MemberStatus) -> str:
    return f"{member.last_seen_s or 0.0:.0f} s ago"


MOST_FACTS = 48  # characters

# What each column shows of a worker; a column that is empty for all workers is left out.
COLUMNS: dict[str, Callable[[WorkerStatus], str]] = {
    "host": lambda worker: worker.hostname,
    "says": lambda worker: _facts(worker.info),
    "protocol": lambda worker: str(worker.protocol) if (worker.protocol or PROTOCOL_VERSION) < PROTOCOL_VERSION else "",
    "step": _step,
    "steps/s": _speed,
    "H": lambda worker: str(worker.sync_every or ""),
    "loss": _loss,
    "‖Δ‖": lambda worker: f"{worker.delta_norm:.3g}" if worker.delta_norm else "",
    "sent": lambda worker: str(worker.contributions or ""),
    "bytes": lambda worker: size(worker.bytes_received) if worker.bytes_received else "",
    "tokens": lambda worker: count(worker.tokens) if worker.tokens else "",
    "staleness": lambda worker: str(worker.staleness or ""),
    "trouble": lambda worker: _trouble(worker),
    "seen": _seen,
}


def _facts(info: Mapping[str, bool | int | float | str]) -> str:
    """What it tells of itself, as far as a column is wide; --json has all of it."""
    text = ", ".join(f"{name} {fact}" for name, fact in info.items())
    return text if len(text) <= MOST_FACTS else f"{text[: MOST_FACTS - 1]}…"


def _trouble(worker: WorkerStatus) -> str:
    if worker.quarantine is not None:
        return f"quarantine, {duration(worker.quarantine.left_s)} left"
    counts = ((worker.offences, "offence(s)"), (worker.left_out, "left out"))
    return ", ".join(f"{number} {what}" for number, what in counts if number)


def _workers(workers: Mapping[str, WorkerStatus]) -> Table:
    named = sorted(workers.items())
    columns = {title: [show(worker) for _, worker in named] for title, show in COLUMNS.items()}
    kept = {title: cells for title, cells in columns.items() if any(cells)}
    table = Table("worker")
    for title in kept:
        table.add_column(title, justify="left" if title in ("host", "says") else "right")
    for row, (name, _) in enumerate(named):
        table.add_row(_escaped(name), *(_escaped(cells[row]) for cells in kept.values()))
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
