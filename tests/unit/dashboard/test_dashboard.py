"""The page's side of a server: what it keeps while nobody watches, and what it shows to somebody who comes late."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from outerstep.dashboard.dashboard import SHARE, SOONEST_S, UNWATCHED_S, UPDATE_S, Dashboard
from outerstep.dashboard.streams import COMMENT, COMMENT_S
from outerstep.events import WorkerLeft
from outerstep.observe.status import ServerStatus
from outerstep.wire.http_request import HttpRequest
from outerstep.wire.routes import PlainRoute


class Unwatched:
    """A dashboard whose thread is not started, at a time that the test says. `status_s`: the CPU time of a status."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, status_s: float = 0.0) -> None:
        self.now, self.asked, self.status_s = 100.0, 0, status_s
        clock = SimpleNamespace(
            monotonic=lambda: self.now, thread_time=lambda: self.asked * self.status_s, time=time.time
        )
        monkeypatch.setattr("outerstep.dashboard.dashboard.time", clock)
        self.page = Dashboard(self._status)

    def _status(self) -> ServerStatus:
        self.asked += 1
        return ServerStatus(mode="sync")

    def watch(self) -> socket.socket:
        """What a browser holds of a stream."""
        ours, theirs = socket.socketpair()
        self.page.streams.reserve()
        self.page.streams.add(ours, lambda: True)
        theirs.setblocking(False)
        return theirs

    def state(self) -> dict[str, Any]:
        route = self.page.routes["GET", "/page/state"]
        assert isinstance(route, PlainRoute)
        return cast("dict[str, Any]", json.loads(bytes(route.handler(cast(HttpRequest, None)).body)))


def test_what_happened_while_nobody_watched_is_shown_to_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    unwatched = Unwatched(monkeypatch)
    unwatched.page.happened(WorkerLeft("left", "done"))
    assert unwatched.asked == 0, "an event alone costs nothing"
    assert [told["worker"] for told in unwatched.state()["told"]] == ["left"]
    unwatched.page.happened(WorkerLeft("right", "done"))
    unwatched.now += UPDATE_S
    assert [told["worker"] for told in unwatched.state()["told"]] == ["left", "right"]


def test_those_who_ask_often_are_shown_the_last_update(monkeypatch: pytest.MonkeyPatch) -> None:
    unwatched = Unwatched(monkeypatch)
    for _ in range(5):
        unwatched.state()
        unwatched.now += UPDATE_S / 10
    assert unwatched.asked == 1


def test_the_thread_updates_seldom_while_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    unwatched = Unwatched(monkeypatch)
    waited: list[float] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        unwatched.now += seconds

    monkeypatch.setattr(unwatched.page.streams, "wait", wait)
    for _ in range(4):
        unwatched.page._turn()
        unwatched.page.happened(WorkerLeft("left", "done"))
    assert waited == [0.0, UNWATCHED_S, UNWATCHED_S, UNWATCHED_S]
    assert unwatched.asked == 4


@pytest.mark.parametrize(("every_s", "updates_per_s"), [(0.1, 1.0 / SOONEST_S), (None, 1.0 / UPDATE_S)])
def test_the_thread_wakes_no_more_often_than_the_soonest_update_and_tells_an_event_within_that_time(
    monkeypatch: pytest.MonkeyPatch, every_s: float | None, updates_per_s: float
) -> None:
    """Events in quick succession are told together; where there are none the thread still sleeps as long."""
    watched, turns, span_s = Unwatched(monkeypatch), 0, 60.0
    poll = watched.page.streams.wait
    reader = watched.watch()
    waiting: list[tuple[float, str]] = []

    def wait(seconds: float) -> None:
        until = watched.now + seconds
        while every_s is not None and watched.now + every_s <= until:
            watched.now += every_s
            waiting.append((watched.now, f"w{watched.now:.3f}"))
            watched.page.happened(WorkerLeft(waiting[-1][1], "done"))
        watched.now = until
        poll(0.0)

    watched.page._turn()
    monkeypatch.setattr(watched.page.streams, "wait", wait)
    watched.asked, late = 0, [0.0]
    while watched.now < 100.0 + span_s:
        watched.page._turn()
        turns += 1
        with contextlib.suppress(BlockingIOError):
            heard = reader.recv(1 << 20)
            late += [watched.now - at for at, name in waiting if name.encode() in heard]
            waiting = [(at, name) for at, name in waiting if name.encode() not in heard]
    assert turns <= 1.2 * span_s / SOONEST_S + 2, "a look at the streams every few seconds, and no more"
    assert watched.asked == pytest.approx(span_s * updates_per_s, rel=0.1)
    assert max(late) <= SOONEST_S + 1e-6
    assert all(watched.now - at <= SOONEST_S + 1e-6 for at, _ in waiting), "every event is told"
    watched.page.stop()


def test_a_stream_is_never_without_bytes_for_longer_than_a_comment_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run with so many workers that the page rests for most of a minute after each update."""
    status_s = 3.0 * COMMENT_S * SHARE
    watched = Unwatched(monkeypatch, status_s=status_s)
    poll = watched.page.streams.wait

    def wait(seconds: float) -> None:
        watched.now += seconds
        poll(0.0)

    monkeypatch.setattr(watched.page.streams, "wait", wait)
    reader = watched.watch()
    heard: list[tuple[float, bytes]] = []
    while watched.now < 100.0 + 20.0 * COMMENT_S:
        watched.page._turn()
        with contextlib.suppress(BlockingIOError):
            heard.append((watched.now, reader.recv(1 << 20)))
    gaps = [after - before for (before, _), (after, _) in pairwise(heard)]
    assert max(gaps) <= COMMENT_S + 1e-6
    assert min(gaps[1:]) > COMMENT_S / 2.0, "nor is a comment sent sooner than it must be"
    comments = sum(data == COMMENT for _, data in heard)
    updates = sum(b"event: update" in data for _, data in heard)
    assert (comments >= 10, updates >= 5) == (True, True), (comments, updates)
    watched.page.stop()
