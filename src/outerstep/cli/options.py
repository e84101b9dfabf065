"""Flags from the table of settings: a command says which role it is for and gets every value with its source."""

from __future__ import annotations

import copy
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer
from rich.markup import escape

from ..config import ROLES, Role, Setting, Sourced, resolve
from ..errors import ConfigError

Found = Mapping[str, Sourced]
FILE_PANEL = "Settings"
HIDES = "_OUTERSTEP_COMPLETE" not in os.environ
"""Whether --help leaves out what few people need. A shell that completes a flag is offered every one."""

ConfigFile = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="FILE",
        rich_help_panel=FILE_PANEL,
        help="TOML file with these settings. [dim]Default: OUTERSTEP_CONFIG, else outerstep.toml if it exists.[/dim]",
    ),
]
LayersFileOption = Annotated[
    str | None,
    typer.Option(
        "--layers",
        metavar="FILE",
        hidden=HIDES,
        rich_help_panel=FILE_PANEL,
        help="TOML file that describes the layers of the run; --cluster says which part of it this is.",
    ),
]


def takes_settings(role: Role, *, example: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The decorated `command(found, **own)` becomes a typer command with its own parameters, a flag for every setting
    of `role`, --config (handed on to a `config_file` of its own) and --layers. `found` is what they, the environment
    and the files say together. `example`: in --help, below the first sentence."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**arguments: Any) -> None:
            arguments.pop("help_all")
            said = {}
            for setting in role.settings:
                given = arguments.pop(setting.field)
                if given not in (None, []):
                    said[setting.field] = _read(role, setting, given)
            file = arguments["config_file"] if wants_file else arguments.pop("config_file")
            layers = _layers(role, said, arguments.pop("layers", None))
            command(resolve(role, said, file=file, layers=layers), **arguments)

        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        wants_file = any(parameter.name == "config_file" for parameter in own)
        first = list(role.group_of)  # in the order in which --help shows them
        ordered = sorted(role.settings, key=lambda s: first.index(s.field) if s.field in first else len(first))
        flags = [_parameter(setting.field, _annotation(role, setting)) for setting in ordered]
        if role in ROLES.values():
            flags.append(_parameter("layers", LayersFileOption))
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
        flags.append(_parameter("help_all", _help_all(role)))
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [*parameters, *flags, *([] if wants_file else [_parameter("config_file", ConfigFile)])]
        )
        sentence, _, rest = (inspect.getdoc(command) or "").partition("\n\n")
        below = f"Example: [bold]{example}[/bold]" if example else ""
        run.__name__, run.__doc__ = command.__name__, "\n\n".join(part for part in (sentence, below, rest) if part)
        return run

    return decorate


def _layers(role: Role, said: dict[str, Sourced], file: str | None) -> dict[str, Sourced]:
    """What the file of --layers says to this process. --cluster is then the name of a part of it."""
    if file is None:
        return {}
    from ..config.layers import settings_for

    given = said.pop("cluster", None)
    if given is None:
        raise ConfigError("--layers needs the part of the file that this is: add --cluster NAME")
    return settings_for(role, file, given.value)


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    default = False if name == "help_all" else None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _annotation(role: Role, setting: Setting) -> Any:
    """A switch is a switch; every other value comes as text and is read as a variable's would be, "none" included. In
    --help are those that people need, in groups of their own; --help-all shows all, in their panels."""
    kind = role.kinds[setting.field]
    group = role.group_of.get(setting.field)
    shown: dict[str, Any] = {"rich_help_panel": group or setting.panel, "hidden": group is None and HIDES}
    help_ = f"{escape(setting.sentence)} [dim]{escape(role.default_text(setting))}[/dim]"
    if kind.base is bool:
        *short, long = setting.flags.split()
        flags = [*short, f"{long}/{setting.opposite}"]
        return Annotated[bool | None, typer.Option(*flags, help=help_, **shown)]
    return Annotated[
        list[str] | None if setting.repeats else str | None,
        typer.Option(*setting.flags.split(), metavar=kind.metavar, help=help_, **shown),
    ]


def _help_all(role: Role) -> Any:
    """The flag that shows every flag."""

    def show(context: typer.Context, wanted: bool) -> None:
        if not wanted:
            return
        order, whole = list(role.by_field), copy.copy(context.command)
        whole.params = [copy.copy(parameter) for parameter in whole.params]
        whole.params.sort(key=lambda one: order.index(one.name) if one.name in role.by_field else -1)
        for parameter in whole.params:
            setting = role.by_field.get(parameter.name or "")
            parameter.hidden = False  # type: ignore[attr-defined]
            if setting is not None:
                parameter.rich_help_panel = setting.panel  # type: ignore[attr-defined]
        typer.echo(whole.get_help(context))
        raise typer.Exit

    help_ = f"Show all {len(role.settings)} settings, by what they are about."
    return Annotated[bool, typer.Option("--help-all", is_eager=True, callback=show, help=help_)]


def _typed(setting: Setting) -> str:
    """Of a setting that has several flags: the one that stands in this command."""
    words = [word.partition("=")[0] for word in sys.argv]
    return next((flag for flag in setting.flags.split() if flag in words), setting.flag)


def _read(role: Role, setting: Setting, given: str | bool | list[str]) -> Sourced:
    given = " ".join(given) if isinstance(given, list) else given
    if isinstance(given, bool):
        return Sourced(given, f"flag {setting.flag if given else setting.opposite}")
    try:
        return Sourced(role.kinds[setting.field].parse(given), f"flag {_typed(setting)}")
    except ValueError as error:
        raise ConfigError(f"{_typed(setting)} {given!r} is not a valid {setting.field}: {error}") from error
