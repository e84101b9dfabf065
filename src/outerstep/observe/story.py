"""The story of a run, a line for each thing that happens, for people at a terminal.

    round 8 · left + right · loss 1.29 ↓ · waited 0.1 s · 0.7 MB · 42 % · 3m12s left

    log.info("%s", StoryLine(story, event))

A line is made of pieces with a meaning (good, bad, a warning, a name, an aside). A terminal gives each its colour
(terminal.py); anywhere else a line is its text. It is put into words when a log shows it: where nobody reads along, a
round costs no words.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ..events import (
    DONE,
    BudgetSpent,
    Event,
    ExchangeDeferred,
    PlanDecided,
    RoundDecided,
    RoundReport,
    RoundSummary,
    RunEnded,
    RunStarted,
    StateSaved,
    VersionPublished,
    WorkerDied,
    WorkerJoined,
    WorkerLeft,
)
from ..printable import printable
from .quantities import counted, duration, size

Meaning = Literal["", "name", "good", "bad", "warning", "aside"]
Piece = tuple[str, Meaning]
BETWEEN: Piece = (" · ", "aside")
FROM_ABOVE = ["from the layer above"]  # in place of the participants that such a version does not have
SHOWN_NAMES = 4
SAME = 1e-3  # relative: a loss that moved less has not moved


@dataclass(frozen=True)
class StoryLine:
    """An event, as the next line of a story. As text: its pieces, one behind the other."""

    story: Story
    event: Event

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The same for every log that shows the line."""
        return tuple((printable(text), meaning) for text, meaning in self.story.tell(self.event))

    def __str__(self) -> str:
        return "".join(text for text, _ in self.pieces)


class Story:
    """Tells events in the order in which they are shown. It remembers the last loss, to say where it goes, and with
    `total_steps` how far the training of this process is. One for each process; not for several threads at once."""

    def __init__(self, total_steps: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._total_steps, self._clock = total_steps, clock
        self._loss: float | None = None
        self._streams = False  # there are several fragments
        self._began: tuple[float, int] | None = None  # when, and at which step

    def began(self, step: int) -> None:
        """Training begins at this step: from here on it is known how fast it is."""
        self._began = self._clock(), step

    def tell(self, event: Event) -> list[Piece]:
        match event:
            case VersionPublished(agreement, summary):
                who = _unique([p.worker_id for p in agreement.participants])
                if summary is None or not who:
                    return self._round(agreement.fragment, agreement.version, who or FROM_ABOVE, None)
                rest = [*_waited(summary.waited_s), (size(summary.size_bytes), ""), *_end(summary)]
                return self._round(agreement.fragment, agreement.version, who, summary.loss, rest)
            case RoundReport():
                who = _unique([p.worker_id for p in event.participants])
                rest = [*_waited(event.waited_s), (size(event.bytes_sent + event.bytes_received), "")]
                if not event.counted and event.steps_sent:
                    rest.append(("without this worker", "warning"))
                if event.steps_discarded:
                    rest.append((f"{event.steps_discarded} steps lost", "bad"))
                rest += self._progress(event.step)
                if not who and event.version in event.from_above:
                    who = FROM_ABOVE
                return self._round(event.fragment, event.version, who, event.metrics.get("inner_loss"), rest)
            case RoundDecided(fragment, version, workers):
                return self._round(fragment, version, _unique(workers), None)
        return _sentence(event) or [(str(event), "")]

    def _round(
        self, fragment: int, version: int, who: Sequence[str], loss: float | None, rest: Sequence[Piece] = ()
    ) -> list[Piece]:
        self._streams = self._streams or fragment > 0
        parts: list[list[Piece]] = [[(f"round {version}", "name")]]
        if self._streams:
            parts.append([(f"fragment {fragment}", "")])
        if who:
            parts.append([(joined(who, " + "), "")])
        if loss is not None:
            parts.append([(f"loss {loss:.4g}", ""), *self._direction(loss)])
        parts += [[piece] for piece in rest]
        return [piece for i, part in enumerate(parts) for piece in ([BETWEEN] if i else []) + part]

    def _direction(self, loss: float) -> list[Piece]:
        before, self._loss = self._loss, loss
        if before is None:
            return []
        if abs(loss - before) <= SAME * abs(before):
            return [(" →", "")]
        return [(" ↓", "good")] if loss < before else [(" ↑", "warning")]

    def _progress(self, step: int) -> list[Piece]:
        """How far, and how long still: by what was needed for each step so far, waiting included."""
        total = self._total_steps
        if total is None:
            return []
        shown: list[Piece] = [(f"step {step:,} of {total:,}", "")]
        if self._began is not None and total > step > self._began[1]:
            each_s = (self._clock() - self._began[0]) / (step - self._began[1])
            shown.append((f"{duration((total - step) * each_s)} left", ""))
        return shown


def _sentence(event: Event) -> list[Piece]:
    """For what happens often, or matters most."""
    match event:
        case WorkerJoined(worker, host):
            return [(worker, "name"), (" joined", "good"), (f" ({host})" if host else "", "aside")]
        case WorkerLeft(worker, reason):
            why = ": it is done" if reason in DONE else f": {reason}"
            return [(worker, "name"), (" left", "" if reason in DONE else "warning"), (why, "aside")]
        case WorkerDied(worker, silent_s):
            return [(worker, "name"), (f" has been silent for {silent_s:.0f} s and counts as dead", "bad")]
        case RunStarted(workers):
            return [("the first round begins", "good"), (f" with {joined(workers, ', ')}", "")]
        case BudgetSpent(tokens):
            return [("the token budget is spent", "good"), (f": {tokens:,} tokens", "")]
        case StateSaved(reason, _, path):
            return [(f"saved {path}", "aside"), (f" ({reason})" if reason else "", "aside")]
        case PlanDecided(_, revision, from_round, _, reason):
            return [(f"plan {revision}", "name"), (f" from round {from_round}: {reason}", "")]
        case ExchangeDeferred(worker, exchanges):
            return [(worker, "name"), (f" trains on alone, {counted(exchanges, 'exchange')} deferred", "warning")]
        case RunEnded():
            return [(event.said, "good" if event.reason in DONE else "warning")]
    return []


def _waited(seconds: float) -> list[Piece]:
    return [(f"waited {seconds:.1f} s" if seconds < 100.0 else f"waited {duration(seconds)}", "")]


def _end(summary: RoundSummary) -> list[Piece]:
    """How far the run is, if its end is known."""
    if summary.share is None:
        return []
    shown: list[Piece] = [(f"{100 * summary.share:.0f} %", "")]
    if summary.seconds_left is not None:
        shown.append((f"{duration(summary.seconds_left)} left", ""))
    return shown


def _unique(names: Sequence[str]) -> list[str]:
    return sorted(set(names))


def joined(names: Sequence[str], between: str) -> str:
    """The first few, and how many more."""
    shown = between.join(names[:SHOWN_NAMES])
    return shown if len(names) <= SHOWN_NAMES else f"{shown}{between}{len(names) - SHOWN_NAMES} more"
