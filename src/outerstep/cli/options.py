"""Flags from the table of settings: a command says which role it is for and gets every value with its source."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer
from rich.markup import escape

from ..config import SERVER, WORKER, Role, Setting, Sourced, resolve
from ..errors import ConfigError
from ..security import DEFAULT_PORT

Found = Mapping[str, Sourced]
FILE_PANEL = "Settings"

ConfigFile = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="FILE",
        rich_help_panel=FILE_PANEL,
        help="TOML file with these settings. [dim]Default: OUTERSTEP_CONFIG, else outerstep.toml if it exists.[/dim]",
    ),
]
ServerAddress = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="HOST:PORT",
        help="The server's address. [dim]Default: DILOCO_SERVER, the settings file's server_addr, "
        f"OUTERSTEP_JOIN, else 127.0.0.1:{DEFAULT_PORT}.[/dim]",
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


def takes_settings(role: Role) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The decorated `command(found, **own)` becomes a typer command with its own parameters, a flag for every setting
    of `role`, and --config (handed on to a `config_file` of its own). `found` is what they, the environment and the
    file say together."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**arguments: Any) -> None:
            said = {}
            for setting in role.settings:
                given = arguments.pop(setting.field)
                if given not in (None, []):
                    said[setting.field] = _read(role, setting, given)
            file = arguments["config_file"] if wants_file else arguments.pop("config_file")
            command(resolve(role, said, file=file), **arguments)

        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        wants_file = any(parameter.name == "config_file" for parameter in own)
        flags = [_parameter(setting.field, _annotation(role, setting)) for setting in role.settings]
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [*parameters, *flags, *([] if wants_file else [_parameter("config_file", ConfigFile)])]
        )
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def server_address(flag: str | None) -> str:
    """Which server `status` and `control` talk to: that of the worker's settings on this machine."""
    said = {} if flag is None else {"server_addr": Sourced(flag, "flag --server")}
    return resolve(WORKER, said)["server_addr"].value or f"127.0.0.1:{DEFAULT_PORT}"


def credentials_folder(flag: str | None) -> str | None:
    """Where `join`, `status` and `control` look: as a worker on this machine would, else as its server would."""
    return flag or resolve(WORKER, {})["credentials"].value or resolve(SERVER, {})["credentials"].value


def server_credentials(flag: str | None) -> str | None:
    return flag or resolve(SERVER, {})["credentials"].value


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _annotation(role: Role, setting: Setting) -> Any:
    """A switch is a switch; every other value comes as text and is read as a variable's would be, "none" included."""
    kind = role.kinds[setting.field]
    help_ = f"{escape(setting.sentence)} [dim]{escape(role.default_text(setting))}[/dim]"
    if kind.base is bool:
        *short, long = setting.flags.split()
        flags = [*short, f"{long}/{setting.opposite}"]
        return Annotated[bool | None, typer.Option(*flags, help=help_, rich_help_panel=setting.panel)]
    return Annotated[
        list[str] | None if setting.repeats else str | None,
        typer.Option(*setting.flags.split(), metavar=kind.metavar, help=help_, rich_help_panel=setting.panel),
    ]


def _read(role: Role, setting: Setting, given: str | bool | list[str]) -> Sourced:
    given = " ".join(given) if isinstance(given, list) else given
    if isinstance(given, bool):
        return Sourced(given, f"flag {setting.flag if given else setting.opposite}")
    try:
        return Sourced(role.kinds[setting.field].parse(given), f"flag {setting.flag}")
    except ValueError as error:
        raise ConfigError(f"{setting.flag} {given!r} is not a valid {setting.field}: {error}") from error
