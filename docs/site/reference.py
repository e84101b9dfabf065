"""The pages of docs/reference/ that are made from the code, as plain Markdown that is committed:

    python docs/site/reference.py          commands, events, errors, metrics, messages, python

A test compares them with the code (tests/unit/test_documentation.py).
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, get_origin

import msgspec
from typer.main import get_command

import outerstep
from outerstep import errors, events
from outerstep.cli import app
from outerstep.wire import messages

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "docs" / "reference"
MADE = "*Made from the code by `python docs/site/reference.py`.*"


def plain(text: str) -> str:
    """Of the terminal's markup: what stands in bold is something to type."""
    text = re.sub(r"(?<!\\)\[bold\](.*?)\[/bold\]", r"`\1`", text)
    text = re.sub(r"(?<!\\)\[/?dim\]", "", text)
    return text.replace(r"\[", "[")


def cell(text: object) -> str:
    return " ".join(str(text).split()).replace("|", r"\|").replace("<", "&lt;")


def code(text: object) -> str:
    return "`" + " ".join(str(text).split()).replace("|", r"\|") + "`"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def prose(thing: Any) -> str:
    """The first paragraph of a docstring."""
    return cell((inspect.getdoc(thing) or "").split("\n\n")[0])


# --- commands ------------------------------------------------------------------------------------------------------


def _commands(command: Any, *path: str) -> Iterator[tuple[str, Any]]:
    yield " ".join(path), command
    for name, below in getattr(command, "commands", {}).items():
        yield from _commands(below, *path, name)


def commands() -> str:
    parts = [
        "# Every command and flag",
        f"{MADE} [The command line](cli.md) explains the commands with examples.",
    ]
    for name, command in _commands(get_command(app), "outerstep"):
        text = plain(inspect.cleandoc(command.help or ""))
        parts += [f"## {name}", text.replace("<", "&lt;")]
        settings = any(parameter.name == "help_all" for parameter in command.params)
        rows = [_row(parameter) for parameter in command.params if not settings or _is_own(parameter)]
        if rows:
            parts.append(table(("argument or flag", "value", "what it is"), rows))
        if settings:
            role = "worker" if name.endswith((" worker", " peer")) else "server"
            parts.append(
                f"And flags for the settings of [a {role}](configuration.md#a-{role}s-settings): `--help-all` lists "
                "those that this command takes."
            )
    return "\n\n".join(parts) + "\n"


def _row(parameter: Any) -> tuple[str, str, str]:
    flags = [*parameter.opts, *parameter.secondary_opts]
    is_flag = parameter.param_type_name == "option"
    name = (
        ", ".join(code(flag) for flag in flags)
        if is_flag
        else code((parameter.metavar or parameter.name.upper()).strip("[]"))
    )
    value = "" if getattr(parameter, "is_flag", False) or not is_flag else (parameter.metavar or "VALUE")
    text = plain(getattr(parameter, "help", None) or "")
    default = parameter.default
    if default not in (None, False, "", []) and not callable(default) and "Default" not in text:
        text = f"{text} Default: {getattr(default, 'value', default)}."
    return name, code(value) if value else "", cell(text)


def _is_own(parameter: Any) -> bool:
    """Of a command that takes settings: what is not one."""
    from outerstep.config import ROLES

    settings = {setting.field for role in ROLES.values() for setting in role.settings}
    return parameter.name not in settings | {"help_all"}


# --- events, errors, metrics ---------------------------------------------------------------------------------------


def _below(kind: type) -> Iterator[type]:
    for each in kind.__subclasses__():
        yield each
        yield from _below(each)


def _fields(kind: type) -> list[str]:
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__[:-1]):
        for name, annotation in vars(each).get("__annotations__", {}).items():
            text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
            if not text.startswith("ClassVar") and get_origin(annotation) is not ClassVar:
                found[name] = text
    return [f"`{name}`: {code(text)}" for name, text in found.items()]


def event_types() -> str:
    rows = [
        (code(kind.kind), code(kind.__name__), "; ".join(_fields(kind)), "" if _inherits(kind) else prose(kind))
        for kind in _below(events.Event)
        if kind.__module__ == events.__name__ and "kind" in vars(kind)
    ]
    return (
        "\n\n".join(
            [
                "# Types of events",
                f"{MADE} [Status and events](status-and-events.md) says when each is told, and what its line in the "
                "event log has; [extending](../extending.md#an-event-sink-of-your-own) how to receive them. All are in "
                "`outerstep.events`.",
                table(("kind", "type", "fields", "what happened"), rows),
            ]
        )
        + "\n"
    )


def _inherits(kind: type) -> bool:
    """A dataclass without a docstring gets its signature as one."""
    return (kind.__doc__ or "").startswith(f"{kind.__name__}(")


def error_types() -> str:
    rows = []
    for kind in [errors.OuterstepError, *_below(errors.OuterstepError)]:
        if kind.__module__ != errors.__name__ or kind.__name__.startswith("_"):
            continue
        refused = issubclass(kind, errors.Refused) and kind is not errors.Refused
        http = (code(kind.code), str(kind.status)) if refused else ("", "")  # type: ignore[attr-defined]
        rows.append((code(kind.__name__), code(kind.__mro__[1].__name__), *http, prose(kind)))
    return (
        "\n\n".join(
            [
                "# Errors",
                f"{MADE} All are in `outerstep.errors`, and everything that outerstep raises on purpose is an "
                "`OuterstepError`. Those with a code travel over the wire: the server answers with that HTTP status, "
                "and the other end raises the same type. [Troubleshooting](../operating/troubleshooting.md) and "
                "[when something is odd](../start.md#when-something-is-odd) say what to do.",
                table(("error", "is a", "code", "HTTP", "what it means"), rows),
            ]
        )
        + "\n"
    )


def metric_names() -> str:
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "integration")]
    from test_metrics import ALL  # every value is known in these: no metric is missing

    rows = [
        (code(family.name), family.kind, ", ".join(code(label) for label, _ in family.samples[0][0]), cell(family.help))
        for family in sorted(ALL.values(), key=lambda one: one.name)
    ]
    return (
        "\n\n".join(
            [
                "# Metrics",
                f"{MADE} `GET /metrics` of a server or a peer; [monitoring](../operating/monitoring.md) says how to "
                "have Prometheus collect them.",
                table(("metric", "kind", "labels", "what it is"), rows),
            ]
        )
        + "\n"
    )


# --- messages ------------------------------------------------------------------------------------------------------


def message_types() -> str:
    routes = [(method, path, kind, answer) for kind, (method, path, answer) in messages.PLACES.items()]
    parts = [
        "# Messages",
        f"{MADE} [The wire](wire.md) says how they travel, what is forbidden, and how versions differ. A message is "
        "strict: an unknown field, a missing one, or one of another type is refused by name.",
        table(
            ("request", "message", "answer"),
            [
                (
                    code(f"{method} {path}"),
                    f"[`{kind.__name__}`](#{kind.__name__.lower()})",
                    f"[`{answer.__name__}`](#{answer.__name__.lower()})",
                )
                for method, path, kind, answer in routes
            ],
        ),
    ]
    shown = list(dict.fromkeys(kind for _, _, asked, answer in routes for kind in (asked, answer)))
    for kind in shown:
        rows = []
        for field in msgspec.structs.fields(kind):
            said = (vars(each).get("__annotations__", {}) for each in kind.__mro__)
            text = next(annotations[field.name] for annotations in said if field.name in annotations)
            rows.append((code(field.encode_name), code(text), "yes" if field.required else ""))
        parts += [f"## {kind.__name__}", inspect.cleandoc(vars(kind).get("__doc__") or "").replace("<", "&lt;")]
        parts.append(table(("field", "type", "required"), rows) if rows else "It has no fields.")
    return "\n\n".join(parts) + "\n"


# --- the Python interface ------------------------------------------------------------------------------------------


def python_names() -> str:
    parts = [
        "# The Python interface",
        f"{MADE} These names are what `outerstep` exports; others may change. Settings that are keywords: "
        "[configuration](configuration.md).",
    ]
    for name in outerstep.__all__:
        thing = getattr(outerstep, name)
        parts += [f"## {name}", "```python\n" + _declared(name, thing) + "\n```", _documented(thing)]
        if inspect.isclass(thing) and not issubclass(thing, BaseException):
            for own, value in vars(thing).items():
                function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
                if own.startswith("_") or not (inspect.isfunction(function) or isinstance(value, property)):
                    continue
                said = _documented(value).split("\n\n")[0]
                shown = own if isinstance(value, property) else own + _signature(function)
                parts.append(f"- `{shown}`" + (f"  \n  {' '.join(said.split())}" if said else ""))
    return "\n\n".join(parts) + "\n"


def _declared(name: str, thing: Any) -> str:
    if not inspect.isclass(thing):
        return f"def {name}{_signature(thing)}"
    if issubclass(thing, BaseException):
        return f"class {name}({', '.join(base.__name__ for base in thing.__bases__)})"
    return f"class {name}{_signature(thing)}"


def _signature(thing: Any) -> str:
    text = str(inspect.signature(thing)).replace("(self, ", "(").replace("(self)", "()")
    return re.sub(r"<([\w.]+)[^>]*>", r"\1", text.replace("'", ""))


def _documented(thing: Any) -> str:
    text = inspect.getdoc(thing) or ""
    return "" if text == inspect.getdoc(object) else _as_markdown(text)


def _as_markdown(text: str) -> str:
    """Docstrings are Markdown already, but for an angle bracket and a list that is aligned by blanks."""
    return re.sub(r"<(?=[A-Za-z/])", "&lt;", text)


PAGES = {
    "commands.md": commands,
    "events.md": event_types,
    "errors.md": error_types,
    "metrics.md": metric_names,
    "messages.md": message_types,
    "python.md": python_names,
}


def main() -> None:
    for name, make in PAGES.items():
        (PLACE / name).write_text(make())


if __name__ == "__main__":
    main()
