"""How a server's command is stopped: gently by the first signal, at once by a second Ctrl-C, or if it has not begun."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from outerstep.cli.stopping import Stopping
from support import in_threads

BUSY = (
    "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 2 * 10**9)"  # no Python runs in the main thread meanwhile
)
WAITING = "import threading; threading.Event().wait()"
COMMAND = """
import sys
from outerstep.cli.stopping import Stopping
with Stopping() as stopping:
    if {gently}:
        stopping.gently(lambda: print("told to stop", file=sys.stderr, flush=True))
    print("ready", file=sys.stderr, flush=True)
    {doing}
"""


class Command:
    def __init__(self, doing: str, *, gently: bool) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-c", COMMAND.format(doing=doing, gently=gently)],
            stderr=subprocess.PIPE,
            text=True,
        )
        self.wait_for("ready")

    def wait_for(self, text: str) -> None:
        assert self.child.stderr is not None
        assert any(text in line for line in self.child.stderr), f"it never said {text!r}"

    def send(self, number: signal.Signals) -> None:
        self.child.send_signal(number)

    def close(self) -> None:
        self.child.kill()
        self.child.communicate()


@pytest.fixture
def commands() -> Iterator[list[Command]]:
    started: list[Command] = []
    yield started
    for command in started:
        command.close()


@pytest.mark.row("F10", "B21")
@pytest.mark.parametrize("doing", [BUSY, WAITING], ids=["busy", "waiting"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_what_has_not_begun_is_ended_at_once(commands: list[Command], doing: str, number: signal.Signals) -> None:
    commands.append(Command(doing, gently=False))  # as while the model is loaded
    commands[0].send(number)
    assert commands[0].child.wait(60) == 128 + number


@pytest.mark.row("B21")
@pytest.mark.parametrize("doing", [BUSY, WAITING], ids=["busy", "waiting"])
def test_the_first_ctrl_c_asks_and_the_second_does_not(commands: list[Command], doing: str) -> None:
    commands.append(Command(doing, gently=True))
    commands[0].send(signal.SIGINT)
    commands[0].wait_for("Once more stops at once.")
    commands[0].wait_for("told to stop")
    commands[0].send(signal.SIGINT)
    commands[0].wait_for("stopped at once")
    assert commands[0].child.wait(60) == 130


@pytest.mark.row("F10")
def test_many_sigterms_are_one_and_ctrl_c_twice_still_works(commands: list[Command]) -> None:
    commands.append(Command(WAITING, gently=True))
    for _ in range(3):
        commands[0].send(signal.SIGTERM)
        commands[0].wait_for("told to stop")
    for _ in range(2):
        commands[0].send(signal.SIGINT)
        commands[0].wait_for("at once")
    assert commands[0].child.wait(60) == 130


def test_afterwards_everything_is_as_it_was() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with Stopping():
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_in_another_thread_nothing_is_installed() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def enter() -> None:
        with Stopping():
            assert signal.getsignal(signal.SIGTERM) == before

    in_threads(enter)
