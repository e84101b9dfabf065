"""`outerstep doctor`: what is wrong with this machine, or with the path to a server, and what to do about it."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..config import SERVER, WORKER, resolve
from ..lanes import MOST
from ..printable import printable
from ..security import Credentials
from ..wire.http_transport import HttpTransport
from .checks import Say, find_way, look_at_machine, look_at_server
from .join import LONGEST_CHARS
from .verdicts import Finding
from .which_server import CredentialsFolder, credentials_folder

TIMEOUT_S = 30.0
SPOOL = "/var/tmp"  # where the server keeps contributions that do not fit in memory, by default
STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(
    server: Annotated[
        str | None,
        typer.Argument(
            metavar="[SERVER]",
            help="HOST:PORT, or a join string (- = read it from standard input). Left out: only this machine.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    save_dir: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Where a server on this machine would save. [dim]Default: its setting.[/dim]"),
    ] = None,
    credentials: CredentialsFolder = None,
) -> None:
    """Look for anything that would keep a server or a worker from working here.

    Checks versions, GPUs, disks and limits of this machine; with SERVER also the whole path there: name, port,
    certificate, token, clock, latency, bandwidth, and how long an exchange of the run's model takes. Exit code 1 if
    something failed; a warning is not a failure.
    """
    if server == "-":
        server = sys.stdin.readline(LONGEST_CHARS).strip()
    console = Console()
    with console.status("") if console.is_terminal and not as_json else _Silent() as progress:
        found = []
        for finding in _look(server, save_dir, credentials_folder(credentials), progress.update):
            found.append(finding)
            if not as_json:
                console.print(_row(finding))
    failed = [finding for finding in found if finding.level == "fail"]
    if as_json:
        typer.echo(json.dumps({"ok": not failed, "findings": [dataclasses.asdict(f) for f in found]}, indent=2))
    elif server is None:
        typer.echo("The path to a server was not checked: `outerstep doctor HOST:PORT`.")
    if failed:
        raise typer.Exit(1)


def _look(server: str | None, save_dir: str | None, credentials: str | None, say: Say) -> Iterator[Finding]:
    settings, worker = resolve(SERVER, {}), resolve(WORKER, {})
    known = Credentials(credentials)
    way = find_way(server, known) if server is not None else None  # a typo in it is reported before anything else
    folders = {
        "save_dir": save_dir or settings["save_dir"].value,
        "spool": settings["spool_dir"].value or SPOOL,
        "credentials": str(known.folder),
    }
    yield from look_at_machine(say, {what: folder for what, folder in folders.items() if folder}, known)
    if server is not None and way is not None:
        yield from look_at_server(
            say,
            way,
            lambda: HttpTransport(server, timeout_s=TIMEOUT_S, kept_connections=MOST, credentials=credentials),
            worker["connections"].value,
        )


def _row(finding: Finding) -> Table:
    row = Table.grid(padding=(0, 1))
    row.add_column(width=4)
    row.add_column(width=11)
    row.add_column(overflow="fold")
    style = STYLES[finding.level]
    row.add_row(f"[{style}]{finding.level}[/{style}]", finding.check, escape(printable(finding.found)))
    if finding.remedy:
        row.add_row("", "", f"[dim]→[/dim] {escape(printable(finding.remedy))}")
    return row


class _Silent:
    """Replaces the progress line."""

    def __enter__(self) -> _Silent:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def update(self, text: str) -> None:
        pass
