"""The line of each round, and of what else happens: as text, on a real terminal (a pty), and as JSON."""

from __future__ import annotations

import json
import logging
import os
import pty
import sys
from collections.abc import Iterator
from typing import TextIO

import pytest

from outerstep.cli.countdown import AGAIN_S, Countdown
from outerstep.events import (
    BudgetSpent,
    Event,
    OffenceNoted,
    RoundReport,
    RoundSummary,
    RunStarted,
    VersionPublished,
    WorkerDied,
    WorkerJoined,
    WorkerLeft,
)
from outerstep.observe.log_lines import WAITING, JsonFormatter, PrintableFormatter
from outerstep.observe.story import Story, StoryLine
from outerstep.observe.terminal import TerminalHandler, level_for, make_handler
from outerstep.printable import json_line
from outerstep.types import Agreement, Participant


def published(version: int, workers: str = "ab", fragment: int = 0, **summary: object) -> VersionPublished:
    taken = tuple(Participant(worker_id=who, sequence=1, weight=1.0) for who in workers)
    agreed = Agreement(fragment=fragment, version=version, anchor_hash="0" * 32, participants=taken)
    return VersionPublished(agreed, RoundSummary(**summary))  # type: ignore[arg-type]


def report(step: int, loss: float | None, **changes: object) -> RoundReport:
    facts: dict[str, object] = {
        "worker": "left",
        "step": step,
        "fragment": 0,
        "version": 1,
        "adoption": "adopted",
        "counted": True,
        "participants": (),
        "steps_sent": 1,
        "steps_discarded": 0,
        "bytes_sent": 500_000,
        "bytes_received": 200_000,
        "waited_s": 0.13,
        "metrics": {"inner_loss": loss},
    }
    return RoundReport(**{**facts, **changes})  # type: ignore[arg-type]


def test_a_worker_is_told_where_a_version_without_participants_came_from() -> None:
    assert "round 5 · from the layer above · loss 1.2" in str(
        StoryLine(Story(), report(25, 1.2, version=5, from_above=(5,)))
    )
    assert "round 6 · loss 1.2" in str(StoryLine(Story(), report(30, 1.2, version=6, from_above=(5,))))


def test_a_round_is_told_as_the_documentation_shows_it() -> None:
    story = Story()
    str(StoryLine(story, published(7, losses=(1.4, 1.36))))
    line = StoryLine(story, published(8, losses=(1.3, 1.28), waited_s=0.13, size_bytes=700_000))
    assert str(line) == "round 8 · a + b · loss 1.29 ↓ · waited 0.1 s · 700.0 kB"


def test_the_arrow_says_where_the_loss_goes_and_an_unknown_loss_has_none() -> None:
    story = Story()
    lines = [
        str(StoryLine(story, published(i, losses=(loss,)))) for i, loss in enumerate((2.0, 3.0, 3.0001, None, 2.0))
    ]
    assert ["↑" in line for line in lines] == [False, True, False, False, False]
    assert ["→" in line for line in lines] == [False, False, True, False, False]
    assert "loss" not in lines[3]
    assert "↓" in lines[4]


def test_a_line_is_put_into_words_when_it_is_shown_and_once_for_all_logs() -> None:
    story = Story()
    str(StoryLine(story, published(1, losses=(3.0,))))
    StoryLine(story, published(2, losses=(1.0,)))  # no log shows it: the next is compared with what was shown
    line = StoryLine(story, published(3, losses=(2.0,)))
    assert [str(line), "".join(text for text, _ in line.pieces)] == [str(line)] * 2
    assert "loss 2 ↓" in str(line)


def test_fragments_are_named_where_there_are_several_and_many_workers_are_counted() -> None:
    story = Story()
    assert "fragment" not in str(StoryLine(story, published(1)))
    assert "· fragment 1 ·" in str(StoryLine(story, published(1, fragment=1)))
    assert "· fragment 0 ·" in str(StoryLine(story, published(2)))
    assert "· a + b + c + d + 2 more ·" in str(StoryLine(story, published(3, workers="fedcba")))


def test_the_end_is_told_where_it_is_known() -> None:
    line = str(StoryLine(Story(), published(1, losses=(), share=0.42, seconds_left=192.0)))
    assert line.endswith("· 42 % · 3m12s left")
    now = [100.0]
    story = Story(total_steps=1000, clock=lambda: now[0])
    assert str(StoryLine(story, report(100, 1.0))).endswith("· step 100 of 1,000")
    story.began(100)
    now[0] += 60.0
    assert str(StoryLine(story, report(200, 1.0))).endswith("· step 200 of 1,000 · 8m00s left")
    assert str(StoryLine(story, report(1000, 1.0))).endswith("· step 1,000 of 1,000")


def test_a_worker_hears_what_became_of_its_steps() -> None:
    line = str(StoryLine(Story(), report(10, 1.0, counted=False, steps_discarded=3)))
    assert line.endswith("waited 0.1 s · 700.0 kB · without this worker · 3 steps lost")


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (WorkerJoined("left", "vm", 1), "left joined (vm)"),
        (WorkerLeft("left", "done"), "left left: it is done"),
        (WorkerLeft("left", "KeyError"), "left left: KeyError"),
        (WorkerDied("left", 120.4), "left has been silent for 120 s and counts as dead"),
        (RunStarted(["a", "b"]), "the first round begins with a, b"),
        (BudgetSpent(1234567, 1), "the token budget is spent: 1,234,567 tokens"),
        (OffenceNoted("left", "absurd", 2), "offence worker=left code=absurd count=2"),  # any other: as in the log
        (WorkerJoined("a\x1b[31m\nb", "h\x07", 1), "a\\u001b[31m\\nb joined (h\\u0007)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Event) else "",
)
def test_what_happens_is_a_sentence(event: Event, said: str) -> None:
    assert str(StoryLine(Story(), event)) == said


# --- as JSON ----------------------------------------------------------------------------------------------------------


def record(message: str, *args: object, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("outerstep.x", level, __file__, 1, message, args, None)


def test_a_record_is_one_json_object_with_the_facts_of_its_event() -> None:
    told = StoryLine(Story(), WorkerDied("left\n", 9.0))
    line = JsonFormatter().format(record("%s", told))
    assert "\n" not in line
    said = json.loads(line)
    assert said["time"] > 1e9
    assert {k: v for k, v in said.items() if k != "time"} == {
        "level": "info",
        "logger": "outerstep.x",
        "message": "left\\n has been silent for 9 s and counts as dead",
        "event": "death",
        "worker": "left\n",
        "silent_s": 9.0,
    }
    try:
        raise ValueError("a\nb")
    except ValueError:
        failed = record("no")
        failed.exc_info = sys.exc_info()
    assert "ValueError: a\nb" in json.loads(JsonFormatter().format(failed))["trace"]


def test_json_is_strict() -> None:
    line = json_line({"a": float("nan"), "b": [float("inf"), 1.5], "c": {1: object}, "d": "\x1b\u2028"})
    assert json.loads(line) == {"a": None, "b": [None, 1.5], "c": {"1": str(object)}, "d": "\x1b\u2028"}
    assert line.isprintable()


# --- on a terminal ----------------------------------------------------------------------------------------------------


MARK = "<end>"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, TextIO]]:
    """A real one: where to read what it was told, and where to write."""
    ours, theirs = pty.openpty()
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60")
    with os.fdopen(theirs, "w") as stream:
        yield ours, stream
    os.close(ours)


def shown(terminal: tuple[int, TextIO]) -> str:
    """All that it was told since the last look: a mark of ours behind it says that this is the end."""
    heard = b""
    terminal[1].write(MARK)
    terminal[1].flush()
    while MARK.encode() not in heard:
        heard += os.read(terminal[0], 1 << 16)
    return heard.decode().removesuffix(MARK)


def test_a_terminal_gets_colours_and_a_countdown_that_is_gone_when_it_is_over(terminal: tuple[int, TextIO]) -> None:
    handler = make_handler(prefix="outerstep: ", stream=terminal[1])
    assert isinstance(handler, TerminalHandler)
    assert level_for(handler) == WAITING
    handler.handle(record("left has been silent for %d s%s", 61, "!" * 100, level=WAITING))
    first = shown(terminal)
    assert first.startswith("\r\x1b[2K")
    assert "left has been silent for 61 s" in first
    assert "\n" not in first, "it stays on its line"
    assert first.count("!") < 60, "and within it"
    handler.handle(record("left has been silent for %d s", 62, level=WAITING))
    assert shown(terminal).startswith("\r\x1b[2K")
    story = Story()
    str(StoryLine(story, published(1, losses=(2.0,))))
    handler.handle(record("%s", StoryLine(story, published(2, losses=(1.0,)))))
    line = shown(terminal)
    assert line.startswith("\r\x1b[2K"), "the countdown makes way"
    assert "\x1b[32m ↓" in line
    assert "\x1b[1mround 2" in line
    handler.handle(record("bad: %s", "\x1b]0;owned\x07", level=logging.WARNING))
    warned = shown(terminal)
    assert "\x1b[33mbad: \\u001b]0;owned\\u0007" in warned
    assert not warned.startswith("\r\x1b[2K"), "there was nothing to clear"


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_colour_where_none_is_wanted(
    terminal: tuple[int, TextIO], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    handler = make_handler(stream=terminal[1])
    for level in (WAITING, logging.WARNING):
        if level >= handler.level:
            handler.handle(record("round %d", 2, level=level))
    said = shown(terminal)
    assert "round 2" in said
    assert "\x1b[3" not in said
    assert "\x1b[1m" not in said


def test_a_file_gets_plain_lines_and_no_countdown() -> None:
    handler = make_handler(plain="%(levelname)s %(message)s")
    assert not isinstance(handler, TerminalHandler)
    assert isinstance(handler.formatter, PrintableFormatter)
    assert level_for(handler) == handler.level == logging.INFO
    assert isinstance(make_handler(as_json=True).formatter, JsonFormatter)


def test_a_terminal_that_is_gone_stops_nobody(terminal: tuple[int, TextIO]) -> None:
    handler = make_handler(stream=terminal[1])
    terminal[1].close()
    handler.handle(record("round 1"))
    handler.handle(record("waiting", level=WAITING))


def test_a_countdown_is_told_at_once_and_then_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(WAITING)
    now, silent = [0.0], ["left has been silent for 60 s"]
    countdown = Countdown(lambda: silent[0], clock=lambda: now[0])
    for _ in range(int(AGAIN_S) + 1):
        countdown.look()
        now[0] += 1.0
    silent[0] = ""
    countdown.look()
    levels = [each.levelno for each in caplog.records]
    assert levels.count(WAITING) == AGAIN_S + 2
    assert levels.count(logging.INFO) == 2
    assert caplog.records[-1].getMessage() == "", "which clears the line"
    silent[0] = "right has been silent for 60 s"
    countdown.look()
    assert caplog.records[-1].levelno == logging.INFO
