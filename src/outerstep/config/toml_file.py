"""`outerstep.toml`: tables [server] and [worker], keys as the fields are called. Errors name file and line."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .keywords import other_names, unknown, with_current_names
from .table import ROLES

FILE_NAME = "outerstep.toml"


def read_file(path: Path) -> dict[str, dict[str, tuple[Any, int]]]:
    """role -> field -> (value, line). Every key of every table is checked, whichever role is asking."""
    text, tables = parse_toml(path)
    found: dict[str, dict[str, tuple[Any, int]]] = {name: {} for name in ROLES}
    for name, table in tables.items():
        at = f"{path}:{line_of(text, name)}"
        if name not in ROLES:
            if not isinstance(table, dict):
                homes = " or ".join(f"[{role.name}]" for role in ROLES.values() if name in role.by_field)
                raise ConfigError(f"{at}: {name} is in no table; write it under {homes or '[server] or [worker]'}")
            raise ConfigError(f"{at}: {unknown('table', name, ROLES)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{at}: [{name}] must be a table, got {table!r}")
        role = ROLES[name]
        lined = {field: (value, line_of(text, field, name)) for field, value in table.items()}
        try:
            lined = with_current_names(role.config, lined)
        except ConfigError as error:
            other = next(field for field in lined if field in other_names(role.config))
            raise ConfigError(f"{path}:{lined[other][1]}: {error}") from error
        for field, (value, line) in lined.items():
            if field not in role.by_field:
                elsewhere = [other.name for other in ROLES.values() if field in other.by_field]
                hint = f'key "{field}" belongs in [{elsewhere[0]}]' if elsewhere else None
                raise ConfigError(f"{path}:{line}: {hint or unknown('key', field, role.by_field)}")
            if role.kinds[field].optional and value == "none":  # TOML has no null
                value = None
            found[name][field] = value, line
    return found


def line_of(text: str, key: str, table: str = "") -> int:
    """The line that says `key` in `table` ("" = at the top, or the table's own head). tomllib does not tell; this scan
    is not a parser, but what it reads has been parsed already, and it only has to find the line a person looks for."""
    name = rf"""["']?{re.escape(key)}["']?"""
    lines = text.splitlines()
    current = ""
    for number, line in enumerate(lines, start=1):
        head = re.match(r"""\s*\[\s*["']?([^"'\]]+?)["']?\s*\]""", line)
        if head:
            current = head[1]
            if not table and current == key:
                return number
        elif current == table and re.match(rf"\s*{name}\s*[=.]", line):
            return number
        elif table and re.match(rf"""\s*["']?{re.escape(table)}["']?\s*[.=].*\b{name}\s*=""", line):
            return number  # server.sync_every = 5, or server = {sync_every = 5}
    return 1


def parse_toml(path: Path) -> tuple[str, dict[str, Any]]:
    """The file's text, and what it holds. An error names the line."""
    try:
        text = path.read_text(encoding="utf-8")
        return text, tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"config file {path} is not UTF-8: {error}") from error
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        at = f"{path}:{place[1]}" if place else f"{path}"
        raise ConfigError(f"{at}: not TOML: {error}") from error
