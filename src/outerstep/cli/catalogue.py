"""The commands of `outerstep`: their names, their sentences, and the file of each, which is imported when it is typed.

`outerstep --help` and the shell's completion of a first word need the names and the sentences only. They are written
here once more, so that nothing else is imported for them; a test compares them with the commands' own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

# The end of each --help; docs/reference/exit-codes.md says more.
MISTAKE = "2 = a mistake in the arguments or settings, or the server refused; 130 = Ctrl-C"
CODES = f"Exit codes: 0 = done; {MISTAKE}."
SERVER_CODES = (
    "Exit codes: 0 = stopped as it was told to (SIGTERM, Ctrl-C, shutdown, the budget's end), and saved; 1 = it had "
    "failed, or could not save; 2 = a mistake in the arguments or settings; 130 = a second Ctrl-C; 143 = SIGTERM "
    "before it listened."
)
WORKER_CODES = (
    "Exit codes: the script's own, whatever they are; 143 = SIGTERM and 130 = Ctrl-C, if its loop did not end by "
    "itself; 2 = it was not started: a mistake in the arguments or settings, or the server does not let it in."
)
RUN_CODES = (
    "Exit codes: the script's own; 1 = it ended well, but the server could not save; 2 = it was not "
    "started: a mistake in the arguments or settings, or the server does not let it in; 130 = a second Ctrl-C."
)
DOCTOR_CODES = f"Exit codes: 0 = nothing failed; 1 = something did; {MISTAKE}."
WRAPS = {"allow_interspersed_args": False}  # what follows the script's name is the script's


@dataclass(frozen=True)
class CommandEntry:
    """A command that can be typed: the function of its name in the file of its name, or that file's `app`, a group."""

    name: str
    sentence: str
    epilog: str | None = CODES
    context: dict[str, Any] = field(default_factory=dict)

    def stub(self) -> TyperCommand:
        """What a list of commands shows of it."""
        return TyperCommand(self.name, help=self.sentence)

    def load(self) -> Any:
        """The command itself."""
        module = import_module(f".{self.name}", __package__)
        around = typer.Typer(rich_markup_mode="rich", add_completion=False)
        around.callback()(_nothing)  # so that one command alone is a group, too
        if hasattr(module, "app"):
            around.add_typer(module.app, name=self.name)
        else:
            around.command(self.name, epilog=self.epilog, context_settings=self.context)(getattr(module, self.name))
        return get_command(around).commands[self.name]  # type: ignore[attr-defined]


def _nothing() -> None:
    pass


CATALOGUE = (
    CommandEntry("run", "Train on two PCs, with one command on each.", RUN_CODES, WRAPS),
    CommandEntry("server", "Hold the global model and take the workers' contributions.", SERVER_CODES),
    CommandEntry("join", "Store a server's join string, so that its address is enough from then on."),
    CommandEntry("worker", "Start a training script as a worker of a run.", WORKER_CODES, WRAPS),
    CommandEntry(
        "peer", "Start a training script as a peer: no server, the peers agree among themselves.", WORKER_CODES, WRAPS
    ),
    CommandEntry("invite", "Invite a peer to the run that was founded in a folder, and print its invitation."),
    CommandEntry("repair", "Look through a peer's folder, and take out what cannot be carried out."),
    CommandEntry("lighthouse", "Start torchft's lighthouse, at which the replicas of a run meet."),
    CommandEntry("status", "Show rounds, workers and what the server waits for."),
    CommandEntry("data", "Show the data that a run leases to its workers: what is done, leased, given back and lost."),
    CommandEntry("page", "Print a link that shows a run in a browser. It logs in one browser, once."),
    CommandEntry("export", "Write the newest agreed model as a folder that from_pretrained loads."),
    CommandEntry("plan", "Choose settings before a run: what will it cost, and what do I type?"),
    CommandEntry("simulate", "Play a run of thousands of workers in virtual time, before there is one."),
    CommandEntry("doctor", "Look for anything that would keep a server or a worker from working here.", DOCTOR_CODES),
    CommandEntry(
        "demo", "Train one small GPT with workers, and by default a server, as real processes, and compare.", None
    ),
    CommandEntry("control", "Tell a running server what to do.", None),
    CommandEntry("token", "Show, create, replace and revoke tokens.", None),
    CommandEntry("config", "Show the settings, or write a file of them.", None),
    CommandEntry("layers", "Check a file that describes the layers of a run.", None),
)


class CommandsOnDemand(Mapping[str, Any]):
    """Name → command. A command is made when it is asked for, once."""

    def __init__(self, catalogue: tuple[CommandEntry, ...]) -> None:
        self._entries = {entry.name: entry for entry in catalogue}
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = self._entries[name].load()
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def stub(self, name: str) -> TyperCommand | None:
        entry = self._entries.get(name)
        return None if entry is None else entry.stub()


class CatalogueGroup(TyperGroup):
    """`outerstep` itself. A list of its commands loads none of them; a command that is typed is loaded."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "commands": CommandsOnDemand(CATALOGUE)})

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return self.commands.stub(cmd_name)  # type: ignore[attr-defined]

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, found, rest = super().resolve_command(ctx, args)
        return name, found if name is None else self.commands[name], rest
