"""A mistake in what was typed, told in one line: the rule, the value, and what to type instead."""

from __future__ import annotations

import re
from typing import Any

ADDRESS = re.compile(r"[\w.-]+:\d+")
UNREACHABLE = re.compile(r"no answer from (\S+?):? to ")


def usage_line(error: Any, words: list[str]) -> str:
    """`error`: of typer. `words`: what was typed behind `outerstep`."""
    message = str(error.format_message()).strip().rstrip(".")
    message = message[:1].lower() + message[1:].replace(": Value error, ", ": ", 1)  # the parser's own words
    return message if message.endswith("?") else f"{message}; {_remedy(error, error.ctx, words)}"


def _remedy(error: Any, context: Any, words: list[str]) -> str:
    if context is None:  # the option was the last word
        return f"outerstep {words[0]} --help lists what it takes"
    path, parent = _path(context), context.parent
    option = getattr(error, "option_name", None)
    if option is not None and parent is not None and option in _options(parent.command):
        return f"it goes before {context.info_name}: {_path(parent)} {option} … {context.info_name}"
    address = next((word for word in words if ADDRESS.fullmatch(word)), None)
    if "extra argument" in error.format_message() and address and "--server" in _options(context.command):
        return f"an address goes behind --server: {path} --server {address}"
    return f"{path} --help lists what it takes"


def _path(context: Any) -> str:
    return "outerstep" if context.parent is None else f"{_path(context.parent)} {context.info_name}"


def _options(command: Any) -> set[str]:
    return {name for parameter in command.params for name in parameter.opts}


def unreachable_line(message: str) -> str:
    """With what to do about a server that does not answer."""
    found = UNREACHABLE.match(message)
    if found is None:
        return message
    return f"{message}; is it running there? `outerstep doctor {found[1]}` says what keeps this machine from it"
