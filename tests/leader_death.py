"""The death of the process that leads a cluster, at a moment of its leader's work, played within the test's process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from outerstep.hierarchy.leader import Leader


@dataclass(frozen=True)
class Moment:
    """Before or after the leader does this. `offering`: in the middle of a contribution, or not; None = whenever."""

    method: str
    is_before: bool
    offering: bool | None = None


class LeaderDeath:
    """Comes once, to the first leader that reaches the moment after `is_armed` is set. `end` breaks what only this kind
    of cluster has, its connections to the other members; False = this one leads no more, so that it is not its turn."""

    def __init__(self, moment: Moment, is_armed: threading.Event, end: Callable[[Leader], bool]) -> None:
        self._moment, self._is_armed, self._end = moment, is_armed, end
        self._turn = threading.Lock()
        self.has_come = threading.Event()

    def prepare(self, monkeypatch: pytest.MonkeyPatch) -> None:
        moment, carry_out = self._moment, getattr(Leader, self._moment.method)

        def doomed(leader: Leader, *args: Any) -> Any:
            is_now = self._is_armed.is_set() and moment.offering in (None, leader.machine.is_offering)
            if moment.is_before and is_now:
                self._come(leader)
            result = carry_out(leader, *args)
            if not moment.is_before and is_now:
                self._come(leader)
            return result

        monkeypatch.setattr(Leader, moment.method, doomed)

    def _come(self, leader: Leader) -> None:
        if not self._turn.acquire(blocking=False):
            return
        if not self._end(leader):
            self._turn.release()
            return
        silence(leader)
        self.has_come.set()
        threading.Event().wait()  # for ever: none of its threads does anything more


def silence(leader: Leader) -> None:
    """Ends its heartbeats without a goodbye. Else they would go on after the test, in the process of the next ones."""
    worker = leader.worker
    if worker is not None and worker._heart is not None:
        worker._ending.set()
        worker._beat_now.set()
        worker._heart.join()
