"""Starting the command line imports what the typed command needs, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from outerstep.cli import app
from outerstep.cli.catalogue import CATALOGUE

PROGRAM = "import sys; sys.argv[0] = 'outerstep'; from outerstep.cli import main; main()"
LISTED = (  # what prints: the program, and no command
    "import sys, json\n"
    "sys.argv = ['outerstep', *sys.argv[1:]]\n"
    "from outerstep.cli import main\n"
    "try: main()\n"
    "except SystemExit: pass\n"
    "print(json.dumps(sorted(sys.modules)), file=sys.stderr)\n"
)
HEAVY = {"torch", "numpy", "cryptography", "msgspec", "h11", "ssl", "xxhash", "zeroconf", "segno", "matplotlib"}
PLANNED = ("--params", "7B", "--sites", "4", "--workers-per-site", "4", "--link", "200mbit", "--step-time", "3s")
ONE_WORD = {"outerstep", "outerstep.cli", "outerstep.cli.catalogue", "outerstep.errors", "outerstep.printable"}


def loaded(*words: str, **environ: str) -> set[str]:
    """The modules that are loaded when `outerstep WORDS` has ended."""
    command = [sys.executable, "-c", LISTED, *words]
    done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=60)
    return set(json.loads(done.stderr.splitlines()[-1]))


def ours(modules: set[str]) -> set[str]:
    return {name for name in modules if name.partition(".")[0] == "outerstep"}


@pytest.mark.parametrize("words", [["--help"], ["--version"], []], ids=" ".join)
def test_help_and_version_import_no_command(words: list[str]) -> None:
    modules = loaded(*words)
    assert ours(modules) == ONE_WORD
    assert not HEAVY & modules


def test_the_version_needs_no_terminal_library() -> None:
    assert "rich" not in loaded("--version")


@pytest.mark.parametrize("name", [entry.name for entry in CATALOGUE])
def test_a_command_imports_no_torch_to_say_what_it_does(name: str) -> None:
    modules = loaded(name, "--help")
    assert f"outerstep.cli.{name}" in modules
    assert not {"torch", "numpy", "matplotlib", "zeroconf", "segno"} & modules


@pytest.mark.parametrize(
    ("words", "without"),
    [
        (["status", "--server", "127.0.0.1:9"], {"cli.server", "cli.run", "events", "coordination.autoconfig"}),
        (["config", "show"], {"cli.run", "events", "wire.http_transport", "coordination.autoconfig"}),
        (["server", "--help"], {"cli.run", "cli.status", "events", "wire.http_transport", "coordination.autoconfig"}),
        (["layers", "check", "/nowhere"], {"cli.server", "wire.http_transport"}),
        (["export", "--help"], {"cli.server", "events"}),
        (["status", "--help"], {"config", "security", "wire", "coordination", "events"}),
        (["plan", "--help"], {"config", "security", "wire", "events", "simulate", "coordination.server.coordinator"}),
        (
            ["plan", *PLANNED],
            {"config", "security", "wire", "events", "simulate", "coordination.server.coordinator"},
        ),
        (["simulate", "--help"], {"config", "security", "wire", "events", "simulate", "coordination"}),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_a_command_does_not_import_the_rooms_of_others(words: list[str], without: set[str]) -> None:
    assert not {f"outerstep.{name}" for name in without} & loaded(*words)


def test_the_catalogue_says_what_the_commands_say() -> None:
    """The same sentence stands twice: here it is compared."""
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert list(commands) == [entry.name for entry in CATALOGUE]
    for entry in CATALOGUE:
        command = commands[entry.name]
        assert command.help.split("\n\n")[0] == entry.sentence, entry.name
        assert command.name == entry.name


def test_every_command_of_the_folder_is_in_the_catalogue() -> None:
    """A file whose name is a function or an `app` of its own is a command."""
    folder = Path(sys.modules["outerstep.cli"].__file__ or "").parent
    files = {path.stem for path in folder.glob("*.py") if f"def {path.stem}(" in path.read_text()}
    apps = {path.stem for path in folder.glob("*.py") if path.stem != "__init__" and "\napp = " in path.read_text()}
    assert {entry.name for entry in CATALOGUE} == files | apps


def test_a_misspelt_command_is_told_the_right_one() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, "sever"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "'server'" in done.stderr


def completed(shell: str, *words: str) -> str:
    """What the shell's script gets for the last word."""
    line = " ".join(["outerstep", *words])
    asked = {
        "_OUTERSTEP_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words)),
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, **asked}, capture_output=True, text=True, timeout=60
    )
    return done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_and_flags(shell: str) -> None:
    assert "server" in completed(shell, "ser")
    assert "worker" not in completed(shell, "ser")
    assert "pardon" in completed(shell, "control", "par")
    assert "--watch" in completed(shell, "status", "--wa")
    assert "--fragment-delay" in completed(shell, "server", "--fragment-"), "also one that only --help-all shows"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_its_script(shell: str) -> None:
    asked = {"_OUTERSTEP_COMPLETE": f"source_{shell}"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, **asked}, capture_output=True, text=True, timeout=60
    )
    assert f"_OUTERSTEP_COMPLETE=complete_{shell}" in done.stdout


def test_completing_a_first_word_imports_no_command() -> None:
    asked = {"_OUTERSTEP_COMPLETE": "complete_bash", "COMP_WORDS": "outerstep st", "COMP_CWORD": "1"}
    assert ours(loaded(**asked)) == ONE_WORD


def test_bash_completes_as_it_is_typed(tmp_path: Path) -> None:
    """In bash itself, with the script that `--show-completion` prints there."""
    program = tmp_path / "outerstep"
    program.write_text(f"#!{sys.executable}\n{PROGRAM}\n")
    program.chmod(0o755)
    typed = (
        'eval "$(_OUTERSTEP_COMPLETE=source_bash outerstep)"\n'
        "COMP_WORDS=(outerstep do); COMP_CWORD=1\n"
        "$(complete -p outerstep | sed -E 's/.*-F ([^ ]+) .*/\\1/') outerstep do outerstep\n"
        'echo "${COMPREPLY[@]}"\n'
    )
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", typed], env={**os.environ, **path}, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["doctor"], done.stderr
