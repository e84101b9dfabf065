"""`outerstep token`: the tokens of this user's server. Works on its files; a running server notices at once."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import Annotated

import typer

from ..errors import ConfigError
from ..security import DEFAULT_PORT, Access, Credentials, parse_address
from ..security.credentials import outward_host
from ..security.identity import own_fingerprint
from ..security.tokens import Right
from .which_server import CredentialsFolder, server_credentials

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Show, create, replace and revoke tokens.\n\n"
    "Run it on the server's machine, as the user who runs the server. The output of these commands is secret.",
)

Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="The server's address as the workers see it. [dim]Default: as it was last started.[/dim]",
    ),
]
Admin = Annotated[bool, typer.Option("--admin", help="The admin token, for `outerstep control` from elsewhere.")]
Name = Annotated[str | None, typer.Argument(metavar="[NAME]", help="The token's name, as `outerstep token list` says.")]
WorkerName = Annotated[
    str | None, typer.Option("--worker", metavar="WORKER", help="The worker's id: the token speaks for no other.")
]
Rights = Annotated[
    str, typer.Option("--rights", metavar="RIGHTS", help="What it is good for: join and read, or control and read.")
]
Expires = Annotated[
    str | None, typer.Option("--expires", metavar="TIME", help="Until when: 30d, 12h, 90m. [dim]Default: no end.[/dim]")
]
Overlap = Annotated[
    str | None,
    typer.Option(
        "--overlap", metavar="TIME", help="Let the old one stay valid for so long: 1d, 12h, 90m. [dim]Default: 0.[/dim]"
    ),
]


@app.command()
def show(address: Address = None, admin: Admin = False, credentials: CredentialsFolder = None) -> None:
    """Print the join string."""
    _print(_folder(credentials), address, admin=admin)


@app.command()
def new(
    name: Name = None,
    worker: WorkerName = None,
    rights: Rights = "join,read",
    expires: Expires = None,
    address: Address = None,
    credentials: CredentialsFolder = None,
) -> None:
    """Make a token of a name, or for one worker, and print its join string, once.

    A worker's id needs this token from then on. A previous token of the name becomes invalid.
    """
    chosen = name or worker
    if chosen is None:
        raise ConfigError("a new token needs a NAME, or --worker WORKER, whose name it then has")
    folder = _folder(credentials)
    lasts_s = None if expires is None else _seconds(expires, "--expires")
    token = folder.tokens.give(chosen, rights=_rights(rights), expires_in_s=lasts_s, worker=worker or "")
    _print_token(folder, address, token)
    if worker is not None:
        typer.echo(f"start it with --worker-id {worker}", err=True)


@app.command()
def rotate(
    name: Name = None,
    address: Address = None,
    admin: Admin = False,
    overlap: Overlap = None,
    credentials: CredentialsFolder = None,
) -> None:
    """Replace the run's token, with --admin the admin token, or the one of a NAME; print the new join string.

    Without --overlap the old one is refused from the next request on. Running workers keep training, and say so; each
    resumes exchanging once `outerstep join` on its machine has the new string.
    """
    if admin and name is not None:
        raise ConfigError(f"one token at a time: --admin or {name}")
    folder, chosen = _folder(credentials), name or ("admin" if admin else "run")
    fresh = folder.tokens.rotate(chosen, overlap_s=0.0 if overlap is None else _seconds(overlap, "--overlap"))
    if chosen == "run":
        for _, access in folder.join_files():
            folder.write_join_file(replace(access, token=fresh))
    _print_token(folder, address, fresh)


@app.command()
def revoke(name: Name = None, worker: WorkerName = None, credentials: CredentialsFolder = None) -> None:
    """Revoke a token by its name: it is refused from the next request on. (Its worker's id then takes the run's.)

    Workers that joined with it are out of the run at once.
    """
    chosen = name or worker
    if chosen is None:
        raise ConfigError("which one? Give the NAME that `outerstep token list` shows, or --worker WORKER")
    _folder(credentials).tokens.revoke(chosen)
    typer.echo(f"the token of {chosen} is revoked; if its holder also has the run's token, rotate that one too")


@app.command("list")
def list_(credentials: CredentialsFolder = None) -> None:
    """Name the tokens that were made: rights, worker, and when they end."""
    tokens = _folder(credentials).tokens.load()
    for name, token in sorted(tokens.all_named.items()):
        facts = [",".join(token.rights), *([f"for worker {token.worker}"] if token.worker else [])]
        if token.expires is not None:
            facts.append(f"{'until' if token.expires > time.time() else 'expired'} {_date(token.expires)}")
        typer.echo("  ".join([name, *facts]))
    for old in tokens.replaced.values():
        typer.echo(f"{old.name}  replaced, valid until {_date(old.until)}")


def _rights(text: str) -> list[Right]:
    known: dict[str, Right] = {"join": "join", "read": "read", "control": "control"}
    stated = [right.strip() for right in text.split(",") if right.strip()]
    for right in stated:
        if right not in known:
            raise ConfigError(f"--rights: a right is join, read or control, got {right!r}")
    return [known[right] for right in stated]


def _seconds(text: str, flag: str) -> float:
    found = re.fullmatch(r"([0-9]{1,6})([smhd])", text.strip())
    if found is None:
        raise ConfigError(f"{flag} must be a number with s, m, h or d, such as 30d or 12h, got {text!r}")
    return int(found[1]) * {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}[found[2]]


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def _folder(flag: str | None) -> Credentials:
    folder = Credentials(server_credentials(flag))
    if not folder.tokens.path.exists():
        raise ConfigError(
            f"no server has been started with the credentials in {folder.folder}: start one, or pass its --credentials"
        )
    return folder


def _print(folder: Credentials, address: str | None, *, admin: bool) -> None:
    for access in _accesses(folder, address):
        typer.echo(replace(access, token="").join_string if admin else access.join_string)


def _print_token(folder: Credentials, address: str | None, token: str) -> None:
    for access in _accesses(folder, address):
        is_admin = token.startswith("admin-")
        typer.echo(replace(access, token="" if is_admin else token, admin=token if is_admin else "").join_string)


def _accesses(folder: Credentials, address: str | None) -> list[Access]:
    """One for each port that a server was last started on, or one for the given address."""
    tokens, started = folder.tokens.load(), [access for _, access in folder.join_files()]
    if address is not None:
        host, port = parse_address(address)
        pins = [access.fingerprint for access in started if access.port == port] or [_pin(folder)]
        started = [Access(host, port, fingerprint=pins[0])]
    if not started:
        started = [Access(outward_host(), DEFAULT_PORT, fingerprint=_pin(folder))]
    return [replace(access, token=tokens.run, admin=tokens.admin) for access in started]


def _pin(folder: Credentials) -> str:
    try:
        return own_fingerprint(folder.server_folder)
    except FileNotFoundError as error:
        raise ConfigError("the server has no certificate of its own yet: start it once") from error
