"""`outerstep token`: the tokens of this user's server. Works on its files; a running server notices at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from ..errors import ConfigError
from ..security import DEFAULT_PORT, Access, Credentials, parse_address
from ..security.credentials import outward_host
from ..security.identity import own_fingerprint
from .options import CredentialsFolder, server_credentials

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
WorkerName = Annotated[str, typer.Option("--worker", metavar="WORKER", help="The worker's id.")]


@app.command()
def show(address: Address = None, admin: Admin = False, credentials: CredentialsFolder = None) -> None:
    """Print the join string."""
    _print(_folder(credentials), address, admin=admin)


@app.command()
def new(worker: WorkerName, address: Address = None, credentials: CredentialsFolder = None) -> None:
    """Give a worker its own token, and print its join string, once.

    From then on its id needs this token. A previous token of this worker becomes invalid.
    """
    folder = _folder(credentials)
    token = folder.tokens.give_worker(worker)
    for access in _accesses(folder, address):
        typer.echo(replace(access, token=token, admin="").join_string)
    typer.echo(f"start it with --worker-id {worker}", err=True)


@app.command()
def rotate(address: Address = None, admin: Admin = False, credentials: CredentialsFolder = None) -> None:
    """Replace the run's token, or with --admin the admin token, and print the new join string.

    The old one is refused from the next request on. Running workers keep training, and say so; each resumes exchanging
    once `outerstep join` on its machine has the new string.
    """
    folder = _folder(credentials)
    tokens = folder.tokens.rotate("admin" if admin else "run")
    for _, access in folder.join_files():
        folder.write_join_file(replace(access, token=tokens.run))
    _print(folder, address, admin=admin)


@app.command()
def revoke(worker: WorkerName, credentials: CredentialsFolder = None) -> None:
    """Revoke a worker's own token. (Its id then accepts the run's token again.)"""
    _folder(credentials).tokens.take_from_worker(worker)
    typer.echo(f"the token of {worker} is revoked; if its holder also has the run's token, rotate that one too")


@app.command("list")
def list_(credentials: CredentialsFolder = None) -> None:
    """Name the workers that have their own tokens."""
    for worker in sorted(_folder(credentials).tokens.load().workers):
        typer.echo(worker)


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
