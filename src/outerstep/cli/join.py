"""`outerstep join`: read a server's join string, check that it works, store it."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from ..errors import ConfigError, NotBegun, TransportError
from ..security import JOIN_VARIABLE, Access, Credentials, mended, parse_address, parse_join_string
from ..wire.http_transport import HttpTransport
from .discovery import find_known
from .which_server import CredentialsFolder, credentials_folder

TIMEOUT_S = 10.0
LONGEST_CHARS = 4096


def join(
    string: Annotated[
        str | None,
        typer.Argument(
            metavar="[JOIN_STRING|-]",
            help="The line that the server printed; - = read it from standard input. Left out: OUTERSTEP_JOIN, or a "
            "prompt. [dim]Other users of this machine can see an argument while the command runs, and your shell "
            "history keeps it.[/dim]",
            show_default=False,
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Check it with the server before storing it.")
    ] = True,
    discover: Annotated[
        bool,
        typer.Option(
            "--discover",
            help="Look for runs that announce themselves on this network; store the new address of one that is known.",
        ),
    ] = False,
    credentials: CredentialsFolder = None,
) -> None:
    """Store a server's join string, so that its address is enough from then on.

    Afterwards [bold]outerstep worker --server HOST:PORT[/bold], [bold]outerstep status[/bold] and
    [bold]DiLoCoWorker(…, "HOST:PORT")[/bold] find the token and the certificate's fingerprint by themselves.
    """
    folder = Credentials(credentials_folder(credentials))
    if discover:
        access, is_peer = find_known(credentials_folder(credentials)), False
    else:
        access, is_peer = parse_join_string(mended(_read(string))), False
    if check:
        access, is_peer = _check(access)
    folder.remember(access)
    typer.echo(f"{access.address} is known now (in {folder.known_file}, which only you can read)")
    if is_peer:
        typer.echo(f"\n    outerstep status --server {access.address}")
        typer.echo(f"    outerstep peer --join {access.address} -- python train.py\n")
    elif access.token:
        typer.echo(f"\n    outerstep worker --server {access.address} -- python train.py\n")


def _read(string: str | None) -> str:
    if string == "-":
        return sys.stdin.readline(LONGEST_CHARS)
    if string is not None:
        return string
    if os.environ.get(JOIN_VARIABLE):
        return os.environ[JOIN_VARIABLE]
    if not sys.stdin.isatty():
        raise ConfigError("no join string: pass `-` and send it to standard input, or set OUTERSTEP_JOIN")
    return str(typer.prompt("The join string that the server printed", hide_input=True))


def _check(access: Access) -> tuple[Access, bool]:
    """Check that the server answers. Returns the one of its addresses that does, and whether it is a peer of a run
    without a server."""
    transport = HttpTransport(access.join_string, timeout_s=TIMEOUT_S)
    try:
        status = transport.status()
    except NotBegun as error:
        typer.echo(f"{transport.address} answers: {error.message}")
        return access.at(*parse_address(transport.address)), False
    except TransportError as error:
        raise TransportError(f"{error}. Nothing was stored; --no-check stores it without asking the server") from error
    finally:
        transport.close()
    access, is_peer = access.at(*parse_address(transport.address)), status.get("mode") == "gossip"
    if not is_peer:
        at = f"run {status['run_id']}, round {status['sync_round']}"
    elif status["begun"]:
        at = f"peer {status['peer_id']} of run {status['run_id']}, height {status['height']}"
    else:
        at = f"peer {status['peer_id']} of a run that has not begun"
    typer.echo(f"{access.address} answers: {at}")
    return access, is_peer
