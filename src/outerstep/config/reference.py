"""The table of settings for readers: as Markdown for the documentation, and as a TOML file to fill in.

python -m outerstep.config.reference docs/reference/configuration.md docs/reference/layers.md   # renews their tables
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from .keywords import other_names
from .layers.parameters import markdown_tables
from .setting import Setting
from .table import ROLES, Role
from .toml_file import FILE_NAME

EXAMPLES = {"num_workers": 2, "server_addr": "127.0.0.1:8512"}  # for what must be said


def markdown_table(role: Role) -> str:
    """One row per setting, in the order of --help."""
    lines = ["| setting | flag | variables | what it is |", "|---|---|---|---|"]
    for setting in role.settings:
        opposite = [setting.opposite] if role.kinds[setting.field].base is bool else []
        flags = ", ".join(f"`{flag}`" for flag in [*setting.flags.split(), *opposite])
        variables = ", ".join(f"`{name}`" for name in role.variables(setting.field))
        text = f"{setting.sentence} {role.default_text(setting)}".replace("|", "\\|")
        lines.append(f"| `{setting.field}` | {flags} | {variables} | {text} |")
    return "\n".join(lines)


def renew(page: str) -> str:
    """A page with its tables as the code has them, each between its two marks."""
    settings = {f"{role.name} settings": markdown_table(role) for role in ROLES.values()}
    settings |= {"needs": _needs(), "other names": _other_names()}
    tables = settings if "<!-- needs -->" in page else markdown_tables()
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", re.DOTALL)
        assert pattern.search(page), f"the page has no {begin} … {end}"
        text = f"{begin}\n{table}\n{end}"
        page = pattern.sub(lambda _, text=text: text, page)  # type: ignore[misc]
    return page


def _needs() -> str:
    """What has an effect only together with something else, by what that is."""
    lines = ["| role | needs | settings |", "|---|---|---|"]
    for role in ROLES.values():
        groups: dict[str, list[str]] = {}
        for setting in role.settings:
            if setting.needs is not None:
                groups.setdefault(setting.needs.text, []).append(f"`{setting.field}`")
        lines += [f"| {role.name} | {text} | {', '.join(names)} |" for text, names in groups.items()]
    return "\n".join(lines)


def _other_names() -> str:
    rows = [(role.name, *names) for role in ROLES.values() for names in other_names(role.config).items()]
    lines = ["| role | other name | name |", "|---|---|---|"]
    return "\n".join(lines + [f"| {role} | `{other}` | `{current}` |" for role, other, current in rows])


def commented_toml() -> str:
    """Every setting with its default, commented out: the file changes nothing until a line is uncommented."""
    lines = [f"# {FILE_NAME}: uncomment what you want to change. Flags and environment variables win over this file."]
    for role in ROLES.values():
        lines += ["", f"[{role.name}]"]
        for setting in role.settings:
            kind = role.kinds[setting.field]
            choices = f" ({', '.join(kind.choices)})" if kind.choices else ""
            lines += ["", f"# {setting.sentence}{choices} {role.default_text(setting)}"]
            lines.append(f"# {setting.field} = {_toml(role, setting)}")
    return "\n".join(lines) + "\n"


def _toml(role: Role, setting: Setting) -> str:
    """The default as a TOML value; an example where there is none."""
    value = role.defaults.get(setting.field, EXAMPLES.get(setting.field))
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(renew(Path(name).read_text()))
