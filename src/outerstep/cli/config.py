"""`outerstep config`: which settings hold and where each came from; a settings file to start with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..config import NOT_SET, ROLES, SERVER, WORKER, Role, make_command, make_config, resolve, warnings_about
from ..config.kinds import shown
from ..config.toml_file import FILE_NAME
from ..errors import ConfigError
from ..security import redact
from .options import ConfigFile, Found, takes_settings
from .server import with_run_folder

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="Show the settings, or write a file of them.")
show_app = typer.Typer(
    rich_markup_mode="rich",
    help="Show every setting, its value, and where that came from.\n\n"
    "After [bold]server[/bold] or [bold]worker[/bold] all flags of that command are understood, as it would.",
)
app.add_typer(show_app, name="show")

AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]


@show_app.callback(invoke_without_command=True)
def show_both(context: typer.Context, as_json: AsJson = False, config_file: ConfigFile = None) -> None:
    if context.invoked_subcommand is not None:
        if as_json or config_file:
            raise ConfigError(f"write --json and --config after {context.invoked_subcommand!r}")
        return
    found = {role.name: resolve(role, {}, file=config_file) for role in ROLES.values()}
    if as_json:
        typer.echo(json.dumps({name: _plain(these) for name, these in found.items()}, indent=2))
    else:
        for name, these in found.items():
            _print(ROLES[name], these)
    for name, these in found.items():
        _check(ROLES[name], these)


@show_app.command("server")
@takes_settings(SERVER)
def show_server(found: Found, as_json: AsJson = False) -> None:
    """What `outerstep server` would run with."""
    _show(SERVER, found, as_json)


@show_app.command("worker")
@takes_settings(WORKER)
def show_worker(found: Found, as_json: AsJson = False) -> None:
    """What `outerstep worker` would hand to the training script."""
    _show(WORKER, found, as_json)


@app.command()
def init(
    file: Annotated[Path, typer.Argument(help="The file to write; - = print it.")] = Path(FILE_NAME),
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
) -> None:
    """Write a settings file with every setting, its meaning and its default, commented out."""
    from ..config.reference import commented_toml

    if file == Path("-"):
        typer.echo(commented_toml(), nl=False)
        return
    if file.exists() and not force:
        raise ConfigError(f"{file} is there already: choose another name, or --force")
    file.write_text(commented_toml(), encoding="utf-8")
    typer.echo(f"wrote {file}; `outerstep config show` says what it changes once you have edited it")


def _show(role: Role, found: Found, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(_plain(found), indent=2))
    else:
        _print(role, found)
    _check(role, found)


def _plain(found: Found) -> dict[str, dict[str, object]]:
    return {field: {"value": _public(field, at.value), "source": at.source} for field, at in found.items()}


def _public(field: str, value: object) -> object:
    """A join string is shown without its token."""
    return redact(value) if field == "server_addr" and isinstance(value, str) else value


def _print(role: Role, found: Found) -> None:
    """What somebody said stands out from what is left at its default."""
    table = Table("setting", "value", "from", title=f"[{role.name}]".replace("[", r"\["), title_justify="left")
    for field, at in found.items():
        unset = "" if at.source == NOT_SET else role.by_field[field].unset
        value = unset if at.value is None else shown(_public(field, at.value))
        style = "bold" if at.is_said else "yellow" if at.source == NOT_SET else "dim"
        table.add_row(field, escape(value), escape(at.source), style=style)
    Console().print(table)


def _check(role: Role, found: Found) -> None:
    """Values that contradict each other or are out of range are an error here too; a missing one is shown as such."""
    found = with_run_folder(found) if role is SERVER else found
    make_command(role, found)
    if all(found[field].source != NOT_SET for field in role.config_fields):
        make_config(role, found)
    for warning in warnings_about(role, found):
        typer.secho(f"warning: {warning}", fg="yellow", err=True)
