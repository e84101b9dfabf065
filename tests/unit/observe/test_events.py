"""The event log under a flood: so many refusals a minute, and how many there were beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outerstep.observe import EventLog
from outerstep.observe.events import REFUSALS_PER_MINUTE
from outerstep.observe.per_minute import PerMinute


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_flood_of_refusals_is_cut_off_and_counted(tmp_path: Path) -> None:
    now = 1000.0
    with EventLog(str(tmp_path / "events"), clock=lambda: now) as events:
        for _ in range(5000):
            events.write("refused", code="unauthorized")
        events.write("round", version=1)  # other news is not held back
        assert len(lines(tmp_path / "events")) == REFUSALS_PER_MINUTE + 1
        now += 61.0
        events.write("refused", code="unauthorized")
        *_, counted, last = lines(tmp_path / "events")
        assert (counted["code"], counted["count"]) == ("suppressed", 5000 - REFUSALS_PER_MINUTE)
        assert last["code"] == "unauthorized"
        for _ in range(100):
            events.write("refused", code="unauthorized")
    assert lines(tmp_path / "events")[-1]["count"] == 101 - REFUSALS_PER_MINUTE


@pytest.mark.row("F27")
def test_a_full_disk_is_said_once_and_counted_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    events = EventLog("/dev/full")
    for i in range(3):
        events.write("round", version=i)
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
