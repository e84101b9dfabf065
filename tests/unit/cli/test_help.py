"""What --help says of a default is what the command does."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from outerstep.cli import app, demo, peer, server, worker
from outerstep.cli.first_pc import FirstPc
from outerstep.config import NOT_SET, Sourced
from outerstep.config.kinds import shown
from outerstep.demo import run as demo_run
from typed import typed

STATED = re.compile(r"\[dim\](?:Default: (?P<default>.*)|Required)\.\[/dim\]\Z")
ALTERNATIVES = re.compile(r"[;,:] ")
LINES = {  # the shortest that is accepted
    "run": "run -- true",
    "server": "server -m model -n 2",
    "worker": "worker --server 127.0.0.1:1 -- true",
    "peer": "peer -- true",
}


class Seen(Exception):
    """Thrown by the command's first deed, with the settings that it was about to act on."""


@pytest.fixture(autouse=True)
def _nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith(("DILOCO_", "OUTERSTEP_")):
            monkeypatch.delenv(name)

    def seen(found: Any, *_: Any) -> None:
        raise Seen(found)

    monkeypatch.setattr(FirstPc, "run", lambda self: seen(self._found))
    monkeypatch.setattr(server, "make_server", seen)
    for module in (worker, peer):
        monkeypatch.setattr(module, "script_environment", seen)


def commands(command: Any, *path: str) -> Iterator[tuple[str, Any]]:
    """Every command that can be typed; typer has a click of its own."""
    if not hasattr(command, "commands"):
        yield " ".join(path), command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, *path, name)


COMMANDS = dict(commands(get_command(app)))
WITH_SETTINGS = sorted(name for name, one in COMMANDS.items() if any(p.name == "help_all" for p in one.params))


def acted_on(name: str) -> dict[str, Sourced]:
    if name.startswith("config show "):
        said = json.loads(typed([*name.split(), "--json"]).output)
        return {field: Sourced(**at) for field, at in said.items()}
    result = typed(shlex.split(LINES[name]))
    assert isinstance(result.exception, Seen), (result.exception, result.output)
    found: dict[str, Sourced] = result.exception.args[0]
    return found


@pytest.mark.parametrize("name", WITH_SETTINGS)
def test_a_default_in_help_is_the_one_that_holds(name: str) -> None:
    found, compared = acted_on(name), 0
    for parameter in COMMANDS[name].params:
        if parameter.name not in found:
            continue
        stated, at = STATED.search(parameter.help), found[parameter.name]
        assert stated is not None, (parameter.name, parameter.help)
        if stated["default"] is None:
            assert at.source.startswith("flag ") or at.source == NOT_SET, f"{parameter.name} is required, got {at}"
        elif not at.source.startswith("flag ") and at.value is not None:
            texts = [stated["default"], *ALTERNATIVES.split(stated["default"])]  # "none; `outerstep peer`: this"
            assert shown(at.value).replace("[", r"\[") in texts, (parameter.name, stated["default"], at)
            compared += 1
    assert compared > 10


def test_every_command_with_settings_is_compared() -> None:
    assert {*WITH_SETTINGS} == {*LINES, "config show server", "config show worker"}


def test_run_says_what_two_pcs_need() -> None:
    said = " ".join(typed(["run", "--help"], env={"COLUMNS": "250", "NO_COLOR": "1"}).output.split())
    assert re.search(r"--num-workers -n INTEGER [^│]* Default: 2\.", said)
    assert re.search(r"--host TEXT [^│]* Default: 0\.0\.0\.0\.", said)
    assert re.search(r"--model -m TEXT [^│]* Default: the script's own model\.", said)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_default_is_stated_once(name: str) -> None:
    """By the parser, which knows it, or in words where no value could stand."""
    for parameter in COMMANDS[name].params:
        text = getattr(parameter, "help", None) or ""
        if "Default:" in text:
            assert parameter.default is None, (name, parameter.name)
        if "Required" in text:
            assert name in WITH_SETTINGS, (name, parameter.name)


@pytest.mark.parametrize(("words", "count"), [("", 2), ("--topology gossip", 3)])
def test_a_demo_has_as_many_workers_as_help_says(words: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(demo_run, "run_demo", lambda settings, console: made.append(settings))
    assert typed(["demo", *words.split()]).exit_code == 0
    assert made[0].workers == count
    [workers] = [p for p in COMMANDS["demo"].params if p.name == "workers"]
    assert f"Default: {demo.WORKERS}; peers: {demo.PEERS}." in workers.help
    assert count in (demo.WORKERS, demo.PEERS)
