"""`outerstep status`: what a server is doing."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from ..errors import ConfigError, TransportError
from ..observe.quantities import counted, duration, size, sparkline
from ..observe.status import (
    AboveStatus,
    ClusterStatus,
    LayerStatus,
    LinkStatus,
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
from .which_server import CredentialsFolder, ServerAddress, credentials_folder, server_address

WATCH_S = 1.0
SHORTEST_S = 0.1


def status(
    interval: Annotated[
        str | None, typer.Argument(metavar="[SECONDS]", help="With --watch: the interval, if not 1.")
    ] = None,
    server: ServerAddress = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the server's answer as JSON.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second, until Ctrl-C.")] = False,
    credentials: CredentialsFolder = None,
) -> None:
    """Show rounds, workers and what the server waits for."""
    seconds = None if interval is None else _seconds(interval)
    if seconds is not None and not watch:
        raise ConfigError(f"SECONDS needs --watch, got {seconds:g} without it; add --watch")
    if watch and as_json:
        raise ConfigError("--json prints once; leave --watch out")
    from ..wire.http_transport import HttpTransport

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


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        remedy = f"; an address goes behind --server: outerstep status --server {text}" if ":" in text else ""
        raise ConfigError(f"SECONDS must be a number, got {text!r}{remedy}") from None
    if not SHORTEST_S <= seconds < math.inf:
        raise ConfigError(f"SECONDS must be ≥ {SHORTEST_S:g}, got {text}")
    return seconds


def render(said: Mapping[str, Any], address: str) -> RenderableType:
    """The status for people: a few lines of facts, the workers, and what each fragment waits for."""
    status = read_status(said)
    if isinstance(status, PeerStatus):
        return _peer(status, address)
    lines: list[RenderableType] = [
        f"[bold]{_escaped(address)}[/bold]  run {_escaped(status.run_id)}  {_escaped(status.mode)}  "
        f"up {duration(status.uptime_s)}",
        *_troubles(status),
        f"round [bold]{status.sync_round}[/bold]  {counted(status.total_submissions, 'contribution')}  "
        f"received {size(status.bytes_received)}, sent {size(status.bytes_sent)}  deaths {status.total_worker_deaths}",
        f"plan: {_escaped(_plan(status.plan))}",
    ]
    lines += _losses(status.losses)
    more = _above(status.above), _asynchronous(status), _aggregation(status), _tokens(status.tokens)
    lines += [_escaped(line) for line in more if line]
    lines += [_escaped(line) for line in _layer(status.layer)]
    lines.append(_workers(status.workers, status.clusters) if status.workers else "no workers at the moment")
    if status.links:
        lines.append(_links(status.links))
    if status.last_save:
        lines.append(f"last save: {_escaped(status.last_save)}")
    for i, fragment in enumerate(status.fragments):
        done = ", ".join(fragment.contributed) or "nobody yet"
        lines.append(
            f"fragment {i}: version {fragment.version}{_watched(fragment.watched)}; "
            f"contributed: {_escaped(done)}; waiting for {_escaped(fragment.waiting_for)}"
        )
    return Group(*lines)


def _troubles(status: ServerStatus) -> list[str]:
    """What wants a look, above everything else: red has gone wrong, yellow may."""
    lines = [f"[bold red]{_escaped(what)}[/bold red]" for what in (status.failure, status.trouble) if what]
    if status.device_left:
        lines.append(f"[yellow]works on the CPU: {_escaped(status.device_left)}[/yellow]")
    if status.closing:
        lines.append(f"[yellow]shutting down: {_escaped(status.closing)}[/yellow]")
    if status.above is not None and status.above.failure:
        lines.append(f"[bold red]the layer above: {_escaped(status.above.failure)}[/bold red]")
    if status.above is not None:
        lines += [f"[yellow]the layer above: {_escaped(warning)}[/yellow]" for warning in status.above.warnings]
    timeout_s = status.heartbeat_timeout
    for name, worker in sorted(status.workers.items()):
        silent_s = worker.last_seen_s or 0.0
        if timeout_s and silent_s > timeout_s / 2:
            left_s = max(timeout_s - silent_s, 0.0)
            silence = f"{name} has been silent for {silent_s:.0f} s; in {left_s:.0f} s it counts as dead"
            lines.append(f"[yellow]{_escaped(silence)}[/yellow]")
        if worker.quarantine is not None:
            held = f"{name} is in quarantine, {duration(worker.quarantine.left_s)} left: {worker.quarantine.reason}"
            lines.append(f"[yellow]{_escaped(held)}[/yellow]")
    return lines


def _losses(losses: Sequence[float]) -> list[str]:
    """The newest, and a curve of the last rounds."""
    if not losses:
        return []
    reach = (
        f"[dim]{counted(len(losses), 'round')}, {max(losses):.4g} to {min(losses):.4g}[/dim]" if len(losses) > 1 else ""
    )
    return [f"loss [bold]{losses[-1]:.4g}[/bold]  {sparkline(losses)}  {reach}"]


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
    troubles = _peer_troubles(status)
    if not status.begun:
        return "\n".join([f"{head}  has not joined a run yet", *troubles])
    table = Table("peer", "address", "step", "steps/s", "loss", "seen", "trouble")
    for member in status.members:
        seen = "itself" if member.is_self else _seen(member)
        cells = [member.peer_id, member.address, _step(member), _speed(member), _loss(member), seen, member.trouble]
        table.add_row(*map(_escaped, cells))
    spoken = "" if status.protocol is None else f"  protocol {status.protocol}"
    lines: list[RenderableType] = [
        f"{head}  run {_escaped(status.run_id)}{spoken}  block {status.height}",
        *troubles,
        f"received {size(status.bytes_received)}, sent {size(status.bytes_sent)}",
        *_losses(status.losses),
        table,
    ]
    for i, fragment in enumerate(status.fragments):
        lines.append(f"fragment {i}: version {fragment.version}; waiting for {_escaped(fragment.waiting_for)}")
    return Group(*lines)


def _peer_troubles(status: PeerStatus) -> list[str]:
    """As of a server: what wants a look, above everything else."""
    lines = [f"[bold red]{_escaped(what)}[/bold red]" for what in (status.failure, status.trouble) if what]
    if status.begun and not status.is_member:
        lines.append("[yellow]it is not a member of the run, or not yet[/yellow]")
    if status.is_short_of_peers:
        lines.append("[yellow]too few peers are there to decide anything[/yellow]")
    for word, who in (("silent", status.silent), ("expelled (proven to lie, or no longer invited)", status.expelled)):
        lines += [f"[red]{word}: {_escaped(', '.join(who))}[/red]"] if who else []
    if status.refused:
        counts = ", ".join(f"{who} {count}" for who, count in sorted(status.refused.items()))
        lines.append(f"[yellow]said, answered or sent what cannot be: {_escaped(counts)}[/yellow]")
    return lines


def _above(above: AboveStatus | None) -> str:
    if above is None:
        return ""
    way = next((each.way for each in above.ways if each.used), above.address)
    where = f"cluster {above.cluster} of {way}"
    if above.failure:
        return f"{where}: on its own, {above.failure}"
    if not above.joined:
        return f"{where}: not joined yet"
    versions = ", ".join(map(str, above.versions))
    return (
        f"{where}: {above.state}{', ' if above.state else ''}version {versions} there, "
        f"{counted(above.exchanges, 'exchange')}, sent {size(above.bytes_sent)}, received {size(above.bytes_received)}"
    )


def _plan(plan: PlanStatus | None) -> str:
    if plan is None:
        return "open until the first worker joins"
    text = f"sync_every {plan.sync_every}, {plan.codec}, {counted(plan.num_fragments, 'fragment')}"
    if plan.fragment_delay:
        alpha = plan.fragment_alpha
        taken = "carried" if plan.fragment_carry else f"mixed with α {alpha:g}" if alpha else "overwritten"
        text += f", adopted {counted(plan.fragment_delay, 'step')} later and {taken}"
    return text + (f", changed {counted(plan.revision, 'time')} (revision {plan.revision})" if plan.revision else "")


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
    return needs + (f", {counted(too_few, 'round')} moved nothing because too few had trained" if too_few else "")


def _layer(layer: LayerStatus | None) -> list[str]:
    """What the controller has chosen, and why."""
    if layer is None:
        return []
    expected = "not known yet" if layer.utilization is None else f"{layer.utilization:.1%} expected"
    lines = [f"controller of {layer.layer}: target {layer.target_utilization:.1%}, {expected}"]
    if layer.plan is not None:
        plan = layer.plan
        lines.append(
            f"  plan {plan.revision} from round {plan.from_round}: every {plan.sync_every}, {plan.codec}, delay "
            f"{plan.delay}, rounds wait {plan.timeout_s:g} s, {plan.backend or 'no common backend'}, {plan.route}"
        )
    shown = [*layer.decisions[-SHOWN_DECISIONS:], *([layer.last] if layer.last is not None else [])]
    for made in dict.fromkeys((one.round, one.cause, one.reason) for one in shown):
        lines.append(f"  round {made[0]}, {made[1]}: {made[2]}")
    doubts = layer.last.not_believed if layer.last is not None else []
    return lines + [f"  not believed: {doubt}" for doubt in doubts[:SHOWN_DECISIONS]]


def _links(links: Sequence[LinkStatus]) -> Table:
    table = Table("link", "rate", "latency", "measured by", "age")
    for link in sorted(links, key=lambda one: (one.source, one.target, one.measured_by))[:SHOWN_LINKS]:
        ends, rate = f"{link.source} → {link.target}", f"{8 * link.bytes_per_s / 1e6:,.3g} Mbit/s"
        cells = ends, rate, f"{1000 * link.latency_s:.3g} ms", link.measured_by, f"{link.age_s:.0f} s"
        table.add_row(*map(_escaped, cells))
    if len(links) > SHOWN_LINKS:
        table.add_row(f"and {len(links) - SHOWN_LINKS} more (--json)", "", "", "", "")
    return table


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
FOR_MACHINES = ("backends", "machine")  # of what a worker tells: --json has them
SHOWN_DECISIONS = 3
SHOWN_LINKS = 32

# What each column shows of a worker; a column that is empty for all workers is left out.
COLUMNS: dict[str, Callable[[WorkerStatus], str]] = {
    "state": lambda worker: worker.state,
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


def _members(cluster: ClusterStatus | None) -> str:
    if cluster is None or not cluster.members:
        return ""
    led = f", led by {cluster.leader}" if cluster.leader else ""
    states = {name: place.partition(" ")[0] for name, place in cluster.states.items()}
    members = (f"{name} {states[name]}" if name in states else name for name in cluster.members)
    return f"{cluster.size}: {', '.join(members)}{led}"


def _facts(info: Mapping[str, bool | int | float | str]) -> str:
    """What it tells of itself, as far as a column is wide; --json has all of it."""
    text = ", ".join(f"{name} {fact}" for name, fact in info.items() if name not in FOR_MACHINES)
    return text if len(text) <= MOST_FACTS else f"{text[: MOST_FACTS - 1]}…"


def _trouble(worker: WorkerStatus) -> str:
    if worker.quarantine is not None:
        return f"quarantine, {duration(worker.quarantine.left_s)} left"
    counts = ((worker.offences, counted(worker.offences, "offence")), (worker.left_out, f"{worker.left_out} left out"))
    return ", ".join(text for number, text in counts if number)


def _workers(workers: Mapping[str, WorkerStatus], clusters: Mapping[str, ClusterStatus]) -> Table:
    named = sorted(workers.items())
    columns = {title: [show(worker) for _, worker in named] for title, show in COLUMNS.items()}
    columns["members"] = [_members(clusters.get(name)) for name, _ in named]
    kept = {title: cells for title, cells in columns.items() if any(cells)}
    table = Table("worker")
    for title in kept:
        table.add_column(title, justify="left" if title in ("state", "host", "says") else "right")
    for row, (name, _) in enumerate(named):
        table.add_row(_escaped(name), *(_escaped(cells[row]) for cells in kept.values()))
    return table


def count(number: float) -> str:
    """12,345 in full; larger ones in millions, billions, trillions."""
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= scale:
            return f"{number / scale:.2f} {unit}"
    return f"{number:,.0f}"
