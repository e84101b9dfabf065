"""The judge of the soak test must notice what it is there for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from faults.histories import Facts, read_lines, violations

WORKERS = ["a", "b"]


def round_of(version: int, **sequences: int) -> Facts:
    return {"event": "round", "version": version, "workers": list(sequences), "sequences": list(sequences.values())}


def seen(version: int, *cells: float, bits: str = "") -> Facts:
    return {"version": version, "hash": bits or f"h{version}", "cells": list(cells)}


EVENTS: list[Facts] = [
    {"event": "server"},
    round_of(1, a=1, b=1),
    round_of(2, a=2),
    {"event": "server"},
    round_of(3, a=3, b=2),
]
SEEN: list[Facts] = [seen(0, 0, 0), seen(1, 5, 4), seen(1, 5, 4), seen(2, 15, 4), seen(3, 20, 9)]


def found(events: list[Facts] = EVENTS, facts: list[Facts] = SEEN, **_: Any) -> str:
    return "; ".join(violations(events, facts, WORKERS))


def test_a_run_that_kept_its_promises_has_no_violations() -> None:
    assert found() == ""


def test_a_contribution_in_two_rounds_is_noticed() -> None:
    assert "a #2 counts in version 2 and in 3" in found([*EVENTS[:4], round_of(3, a=2, b=2)])


def test_a_version_that_comes_again_or_is_left_out_is_noticed() -> None:
    assert "version 2 follows version 2" in found([*EVENTS[:4], round_of(2, a=3)])
    assert "version 3 follows version 1" in found([EVENTS[0], EVENTS[1], round_of(3, a=3)])
    assert found([EVENTS[0], EVENTS[1], EVENTS[3], EVENTS[4]]) == ""  # the server was killed before it wrote the word


def test_two_different_models_of_one_version_are_noticed() -> None:
    assert "version 2 was seen as h2 and as other" in found(facts=[*SEEN, seen(2, 15, 4, bits="other")])


def test_steps_of_who_is_not_in_the_round_and_half_steps_are_noticed() -> None:
    assert "moved the cell of b by 3 steps" in found(facts=[seen(1, 5, 4), seen(2, 15, 7)])
    assert "moved the cell of a by 10.5 steps" in found(facts=[seen(1, 5, 4), seen(2, 15.5, 4)])
    assert "moved the cell of a by -5 steps" in found(facts=[seen(1, 5, 4), seen(2, 0, 4)])


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_text('{"version": 1}\n{"vers\n{"version": 2}\n')
    assert read_lines(file) == [{"version": 1}, {"version": 2}]
    assert read_lines(tmp_path / "none") == []
