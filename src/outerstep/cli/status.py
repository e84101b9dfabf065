"""`outerstep status`: what a server is doing."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from ..config import DEFAULT_PORT
from ..errors import TransportError
from ..wire.http_transport import HttpTransport

WATCH_S = 1.0


def status(
    server: Annotated[
        str, typer.Option(help="The server's host:port.", envvar="DILOCO_SERVER")
    ] = f"127.0.0.1:{DEFAULT_PORT}",
    as_json: Annotated[bool, typer.Option("--json", help="Print the server's answer as JSON.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Stay and refresh every second, until Ctrl-C.")] = False,
) -> None:
    """Show rounds, workers and what the server waits for."""
    transport = HttpTransport(server, timeout_s=10.0)
    if as_json:
        typer.echo(json.dumps(transport.status(), indent=2))
        return
    console = Console()
    if not watch:
        console.print(render(transport.status(), transport.address))
        return
    shown = render(transport.status(), transport.address)
    with Live(shown, console=console, auto_refresh=False, screen=False) as live:
        while True:
            time.sleep(WATCH_S)
            try:
                shown = render(transport.status(), transport.address)
            except TransportError as error:
                shown = Group(shown, f"[red]{error}[/red]")
            live.update(shown, refresh=True)


def render(status: dict[str, Any], address: str) -> RenderableType:
    """The status as a person reads it: one line of facts, the workers, and why nothing happens if nothing does."""
    plan = status["plan"] or {}
    settled = (
        f"sync_every {plan['sync_every']}, {plan['codec']}, {plan['num_fragments']} fragment(s)" if plan else "open"
    )
    head = (
        f"[bold]{address}[/bold]  run {status['run_id']}  {status['mode']}  up {duration(status['uptime_s'])}\n"
        f"round [bold]{status['sync_round']}[/bold]  plan: {settled}  "
        f"received {size(status['bytes_received'])}, sent {size(status['bytes_sent'])}, "
        f"deaths {status['total_worker_deaths']}"
    )
    workers = Table("worker", "host", "step", "steps/s", "loss", "seen", title=None)
    for name, facts in sorted(status["workers"].items()):
        loss = "" if facts["loss"] is None else f"{facts['loss']:.4f}"
        speed = f"{facts['steps_per_second']:.2f}" if facts["steps_per_second"] else ""
        workers.add_row(
            escape(name),
            escape(facts["hostname"]),
            str(facts["step"]),
            speed,
            loss,
            f"{facts['last_seen_s']:.0f} s ago",
        )
    lines: list[RenderableType] = [head, workers if status["workers"] else "no workers at the moment"]
    if status["failure"]:
        lines.append(f"[red]{escape(status['failure'])}[/red]")
    for i, fragment in enumerate(status["fragments"]):
        done = ", ".join(fragment["contributed"]) or "nobody yet"
        lines.append(
            f"fragment {i}: version {fragment['version']}; contributed: {escape(done)}; "
            f"waiting for {escape(fragment['waiting_for'])}"
        )
    return Group(*lines)


def size(count: int) -> str:
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000.0:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000.0
    return f"{value:.1f} TB"


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
