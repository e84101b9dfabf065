"""Which server a command talks to, and where this machine keeps tokens and fingerprints: two flags, and what holds
without them. The settings are read when one of these functions is asked, so that --help needs none of them."""

from __future__ import annotations

from typing import Annotated

import typer

from ..defaults import SERVER_PORT

ServerAddress = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="HOST:PORT",
        help="The server's address. [dim]Default: DILOCO_SERVER, the settings file's server_addr, "
        f"OUTERSTEP_JOIN, else 127.0.0.1:{SERVER_PORT}.[/dim]",
    ),
]
CredentialsFolder = Annotated[
    str | None,
    typer.Option(
        "--credentials",
        metavar="DIR",
        help="Folder with tokens and fingerprints. "
        "[dim]Default: OUTERSTEP_CREDENTIALS, else ~/.config/outerstep.[/dim]",
    ),
]


def server_address(flag: str | None) -> str:
    """Which server `status` and `control` talk to: that of the worker's settings on this machine."""
    from ..config import WORKER, Sourced, resolve

    said = {} if flag is None else {"server_addr": Sourced(flag, "flag --server")}
    return resolve(WORKER, said)["server_addr"].value or f"127.0.0.1:{SERVER_PORT}"


def credentials_folder(flag: str | None) -> str | None:
    """Where `join`, `status` and `control` look: as a worker on this machine would, else as its server would."""
    from ..config import SERVER, WORKER, resolve

    return flag or resolve(WORKER, {})["credentials"].value or resolve(SERVER, {})["credentials"].value


def server_credentials(flag: str | None) -> str | None:
    """Where a server on this machine looks."""
    from ..config import SERVER, resolve

    return flag or resolve(SERVER, {})["credentials"].value
