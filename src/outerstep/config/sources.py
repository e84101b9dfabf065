"""Flag > environment > layers file > TOML file > default, for each setting by itself; and where each came from."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..attached import ATTACHED_VARIABLE, INITIAL_VARIABLE
from ..errors import ConfigError
from ..security import JOIN_VARIABLE, is_join_string, parse_join_string, redact
from .checks import check_value
from .effects import WITHOUT_SERVER, Needs, without_effect
from .keywords import build, settings_of, unknown, with_current_names
from .kinds import kinds_of, write
from .table import ROLES, Role
from .toml_file import FILE_NAME, read_file

CONFIG_VARIABLE = "OUTERSTEP_CONFIG"
DEFAULT, NOT_SET = "default", "not set"
HERE = ("flag ", "keyword ", "`")  # how the sources begin that speak for one start alone
TYPO_RATIO = 0.85  # a variable this similar to one of ours is a slip; others may belong to somebody else


@dataclass(frozen=True)
class Sourced:
    """A value, and who said so: "flag --sync-every", "OUTERSTEP_SYNC_EVERY", "outerstep.toml:12", "default"."""

    value: Any
    source: str

    @property
    def is_said(self) -> bool:
        return self.source not in (DEFAULT, NOT_SET)

    @property
    def is_of_this_start(self) -> bool:
        """A flag or a keyword; a variable and a line of the file may be there for other commands too."""
        return self.source.startswith(HERE)


def resolve(
    role: Role,
    said: Mapping[str, Sourced],
    *,
    environ: Mapping[str, str] | None = None,
    file: str | None = None,
    layers: Mapping[str, Sourced] | None = None,
) -> dict[str, Sourced]:
    """Every setting of `role`. `said` is what flags or keywords state; `file` is --config; `layers` what --layers says
    of this process (layers/starts.py), which goes before the file."""
    environ = os.environ if environ is None else environ
    said = with_current_names(role.config, said)
    for field in said:
        if field not in role.by_field:
            raise ConfigError(unknown("setting", field, role.by_field))
    _check_variables(environ)
    path = config_path(environ, file)
    in_file = {} if path is None else read_file(path)[role.name]
    levels = [
        said,
        {field: at for field in role.by_field if (at := _from_environment(role, field, environ, said)) is not None},
        layers or {},
        {field: Sourced(value, f"{path}:{line}") for field, (value, line) in in_file.items() if field in role.by_field},
        {field: _default(role, field) for field in role.defaults if field in role.by_field},
    ]
    found = {
        field: next((level[field] for level in levels if field in level), Sourced(None, NOT_SET))
        for field in role.by_field
    }
    if "topology" in role.by_field:
        join = environ.get(JOIN_VARIABLE)
        levels.insert(-1, {"server_addr": Sourced(join.strip(), JOIN_VARIABLE)} if join else {})
        found["topology"], found["server_addr"] = _topology_and_address(levels)
    return found


def _default(role: Role, field: str) -> Sourced:
    """A command's own default counts as said: it holds for the script or the server that the command starts, whose
    default may be another."""
    source = f"default of {role.own.command}" if field in role.own.values else DEFAULT
    return Sourced(role.defaults[field], source)


def _topology_and_address(levels: Sequence[Mapping[str, Sourced]]) -> tuple[Sourced, Sourced]:
    """An address and a topology without a server exclude each other: the one with more say holds. The level with most
    say comes first."""
    topology = address = None
    for level in levels:
        named, at = level.get("topology"), level.get("server_addr")
        if at is not None and at.value in WITHOUT_SERVER and (named is None or named.value == at.value):
            named, at = at, None  # an address used to name a topology too
        if at is not None and at.value is None:
            at = None
        if named is not None and topology is None and named.value in WITHOUT_SERVER and address is None:
            if at is not None:
                raise ConfigError(
                    f"topology {named.value!r} ({named.source}) has no server, got server_addr ({at.source}) too: "
                    "leave one of the two out"
                )
            return named, Sourced(None, DEFAULT)
        if named is not None and named.value not in WITHOUT_SERVER:
            topology = topology or named
        address = address or at
    assert topology is not None  # the default has one
    return topology, address or Sourced(None, NOT_SET if topology.value == "server" else DEFAULT)


def config_path(environ: Mapping[str, str], file: str | None = None) -> Path | None:
    """--config, else OUTERSTEP_CONFIG, else outerstep.toml in the working directory if there is one."""
    named = file or environ.get(CONFIG_VARIABLE)
    if named:
        return Path(named)
    return Path(FILE_NAME) if Path(FILE_NAME).is_file() else None


def make_config(role: Role, found: Mapping[str, Sourced]) -> Any:
    """The config that these values make; an error says where the value it complains about came from."""
    for field in role.config_fields:
        if found[field].source == NOT_SET:
            variables = " or ".join(role.variables(field))
            raise ConfigError(
                f"{field} is not set: give {role.by_field[field].flag}, or set {variables}, or write {field} under "
                f"[{role.name}] in {FILE_NAME}"
            )
    return _build(role.config, found)


def make_command(role: Role, found: Mapping[str, Sourced]) -> Any:
    """What the command is told beside its config, checked in the same way."""
    return _build(role.command, found)


def _build(kind: type[Any], found: Mapping[str, Sourced]) -> Any:
    aside, kinds = _set_aside(kind, found), kinds_of(kind)
    with naming_sources(found):
        for field in aside:
            check_value(field, found[field].value, kinds[field])
        return build(kind, {field: found[field].value for field in settings_of(kind) if field not in aside})


def warnings_about(role: Role, found: Mapping[str, Sourced]) -> list[str]:
    """One line for each setting that a variable or the file states and that has no effect in the chosen mode."""
    aside = _set_aside(role.config, found) | _set_aside(role.command, found)
    return [
        f"{field} ({found[field].value!r}, {found[field].source}) is left out: it needs {needs.text}, and has no "
        "effect here"
        for field, needs in aside.items()
    ]


def _set_aside(kind: type[Any], found: Mapping[str, Sourced]) -> dict[str, Needs]:
    """The settings without an effect that are no reason to refuse the start."""
    fields = settings_of(kind)
    idle = without_effect(fields, {field: found[field].value for field in fields})
    return {field: needs for field, needs in idle.items() if not found[field].is_of_this_start}


@contextmanager
def naming_sources(found: Mapping[str, Sourced]) -> Iterator[None]:
    """A ConfigError raised inside gets the sources of the settings that it names."""
    try:
        yield
    except ConfigError as error:
        words = set(re.findall(r"\w+", str(error)))
        sources = [f"{field}: {at.source}" for field, at in found.items() if at.is_said and field in words]
        if not sources:
            raise
        raise ConfigError(f"{error} ({', '.join(sources)})") from error


def environment_for(role: Role, found: Mapping[str, Sourced], environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for a child process, in which it finds what was said here, each under one name only."""
    child = dict(environ)
    for field in role.config_fields:
        if found[field].is_said:
            first, *others = role.variables(field)
            child[first] = write(found[field].value)
            for other in others:
                child.pop(other, None)
    if "topology" in found and not found["topology"].is_said:
        child.pop(role.variables("topology")[0], None)  # an address had more say
    if "topology" in found and found["topology"].value in WITHOUT_SERVER:
        first, *others = role.variables("server_addr")
        child[first] = found["topology"].value  # for a script that reads it and hands it to DiLoCoWorker itself
        for other in others:
            child.pop(other, None)
    elif "server_addr" in found and is_join_string(str(found["server_addr"].value)):
        # The script may print where it trains; what it must not print goes under a name of its own.
        access = parse_join_string(found["server_addr"].value)
        child[role.variables("server_addr")[0]] = access.address
        child[JOIN_VARIABLE] = access.join_string
    return child


def _from_environment(
    role: Role, field: str, environ: Mapping[str, str], said: Mapping[str, Sourced]
) -> Sourced | None:
    """The documented DILOCO_* name comes first; a second name that says something else is an error, unless a flag has
    `said` it already."""
    if field in said:
        return None
    kind = role.kinds[field]
    found: Sourced | None = None
    for variable in role.variables(field):
        text = environ.get(variable)
        if text is None or (not text and not kind.optional):
            continue
        try:
            here = Sourced(kind.parse(text), variable)
        except ValueError as error:
            raise ConfigError(redact(f"{variable}={text!r} is not a valid {field}: {error}")) from error
        if found is None:
            found = here
        elif found.value != here.value:
            raise ConfigError(
                redact(
                    f"{found.source}={environ[found.source]!r} and {variable}={text!r} contradict each other: unset one"
                )
            )
    return found


def _check_variables(environ: Mapping[str, str]) -> None:
    known = {name for role in ROLES.values() for field in role.by_field for name in role.variables(field)}
    known |= {CONFIG_VARIABLE, JOIN_VARIABLE, ATTACHED_VARIABLE, INITIAL_VARIABLE}
    for name in environ:
        if name.startswith(("OUTERSTEP_", "DILOCO_")) and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=TYPO_RATIO)
            if near:
                raise ConfigError(f'unknown environment variable "{name}"; did you mean "{near[0]}"?')
