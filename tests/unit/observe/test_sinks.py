"""Where events go: a file that no flood fills, a ring that holds the newest, and sinks that fail."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from outerstep.errors import ConfigError
from outerstep.events import DiskWorks, Event, MessageRefused, RequestRefused, ServerStarted, ServerStopped, WorkerLeft
from outerstep.observe import EventLog, EventRing, FanOut
from outerstep.observe.per_minute import PerMinute
from outerstep.observe.sinks import REFUSALS_PER_MINUTE

REFUSED = MessageRefused("Join", "a", "unauthorized", "no token")


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_flood_of_refusals_is_cut_off_and_counted(tmp_path: Path) -> None:
    now = 1000.0
    with EventLog(str(tmp_path / "events"), clock=lambda: now) as events:
        for _ in range(5000):
            events(REFUSED)
        events(ServerStopped(1))  # other news is not held back
        assert len(lines(tmp_path / "events")) == REFUSALS_PER_MINUTE + 1
        now += 61.0
        events(REFUSED)
        *_, counted, last = lines(tmp_path / "events")
        assert (counted["code"], counted["count"]) == ("suppressed", 5000 - REFUSALS_PER_MINUTE)
        assert last["code"] == "unauthorized"
        for _ in range(100):
            events(REFUSED)
    assert lines(tmp_path / "events")[-1]["count"] == 101 - REFUSALS_PER_MINUTE


@pytest.mark.row("F27")
def test_a_full_disk_is_said_once_and_counted_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    events = EventLog("/dev/full")
    for i in range(3):
        events(ServerStopped(i))
    events.close()
    assert events.lost == 3
    assert caplog.text.count("the event log cannot be written") == 1


def test_a_clock_that_jumps_back_begins_a_new_minute() -> None:
    now = 1000.0
    limit = PerMinute(2, lambda: now)
    assert [limit.admit() for _ in range(3)] == [True, True, False]
    now = 10.0
    assert limit.admit()
    assert limit.take_suppressed() == 1
    assert limit.take_suppressed(everything=True) == 0


def test_a_line_holds_what_it_always_held(tmp_path: Path) -> None:
    with EventLog(str(tmp_path / "events"), clock=lambda: 1763190000.1234) as events:
        for event in (
            ServerStarted("1f", 3, resumed=True),
            MessageRefused("Offer", None, "stale", "too late"),
            RequestRefused("unauthorized", "10.0.0.7", "/v1/join", "r1", "no token"),
            DiskWorks(),
        ):
            events(event)
    assert (tmp_path / "events").read_text().splitlines() == [
        '{"time": 1763190000.123, "event": "server", "run_id": "1f", "round": 3, "resumed": true}',
        '{"time": 1763190000.123, "event": "refused", "request": "Offer", "worker": null, "code": "stale", '
        '"why": "too late"}',
        '{"time": 1763190000.123, "event": "refused", "code": "unauthorized", "peer": "10.0.0.7", '
        '"path": "/v1/join", "request_id": "r1", "why": "no token"}',
        '{"time": 1763190000.123, "event": "disk_works"}',
    ]


def test_a_ring_holds_the_newest_and_says_what_is_new() -> None:
    ring = EventRing(3, clock=lambda: 5.0)
    assert ring.since() == []
    for i in range(5):
        ring(ServerStopped(i))
    assert [(seen.number, seen.time_s, seen.event) for seen in ring.since()] == [
        (3, 5.0, ServerStopped(2)),
        (4, 5.0, ServerStopped(3)),
        (5, 5.0, ServerStopped(4)),
    ]
    assert [seen.number for seen in ring.since(4)] == [5]
    assert ring.since(5) == ring.since(9) == []
    with pytest.raises(ConfigError, match="size=0"):
        EventRing(0)


def test_a_ring_is_emptied_by_the_reader_that_takes_its_events() -> None:
    ring = EventRing(3, clock=lambda: 5.0)
    assert ring.is_empty
    for number in range(5):
        ring(ServerStopped(number))
    assert not ring.is_empty
    assert [(seen.number, seen.time_s) for seen in ring.take()] == [(3, 5.0), (4, 5.0), (5, 5.0)]
    assert ring.is_empty
    assert ring.take() == []


def test_threads_share_a_ring() -> None:
    ring, missed = EventRing(100_000), list[int]()

    def write(who: int) -> None:
        for i in range(1000):
            ring(WorkerLeft(str(who), str(i)))

    def read() -> None:
        last = 0
        while last < 8000:
            for seen in ring.since(last):
                missed.extend(range(last + 1, seen.number))
                last = seen.number

    threads = [threading.Thread(target=write, args=(i,)) for i in range(8)] + [threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    events = [seen.event for seen in ring.since()]
    assert len(events) == 8000
    assert not missed
    for who in "01234567":
        said = [event.reason for event in events if isinstance(event, WorkerLeft) and event.worker == who]
        assert said == [str(i) for i in range(1000)]


def test_a_sink_that_raises_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    got: list[Event] = []

    def fails(event: Event) -> None:
        raise RuntimeError("the pager is out of order")

    tell = FanOut(None, fails, got.append)
    for i in range(3):
        tell(ServerStopped(i))
    assert got == [ServerStopped(i) for i in range(3)]
    assert tell.failures == 3
    assert caplog.text.count("an event sink failed") == 1
    assert "out of order" in caplog.text
