"""`outerstep data --export`: which sample came into the model by whom, from the event logs of those who were there."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from outerstep.cli.data import say_all, write_export
from outerstep.errors import ConfigError
from outerstep.observe.status import DataStatus

FACTS: dict[str, Any] = {
    "name": "train", "samples": 12, "unit_samples": 2, "epochs": 1, "seed": 0, "shuffle": False, "units": 6,
}  # fmt: skip


def log_of(place: Path, *events: dict[str, Any]) -> Path:
    place.write_text("".join(json.dumps({"time": 1.0, "dataset": "train", **event}) + "\n" for event in events))
    return place


def done(worker: str, version: int, *places: tuple[int, int]) -> dict[str, Any]:
    return {"event": "data", "worker": worker, "version": version, "places": places}


def export(folder: Path, *logs: Path) -> tuple[tuple[int, int], list[tuple[int, str]]]:
    found = write_export(folder / "out.csv", logs, [DataStatus(**FACTS)])
    rows = list(csv.DictReader((folder / "out.csv").read_text().splitlines()))
    return found, sorted((int(row["sample"]), row["worker"]) for row in rows)


def test_logs_of_two_peers_say_the_same_once_and_fill_each_others_gaps(tmp_path: Path) -> None:
    a = log_of(tmp_path / "a", done("a", 1, (0, 1)), done("b", 2, (1, 2)), done("a", 3, (2, 3)))
    b = log_of(tmp_path / "b", {"event": "data_unseen", "places": [[0, 2]]}, done("a", 3, (2, 3)), done("b", 4, (3, 4)))
    names = ["a", "a", "b", "b", "a", "a", "b", "b"]
    assert export(tmp_path, a, b) == ((8, 0), list(enumerate(names)))
    assert export(tmp_path, b) == ((8, 4), list(enumerate(["", "", "", "", *names[4:]])))


def test_what_was_trained_twice_is_listed_twice(tmp_path: Path) -> None:
    a = log_of(tmp_path / "a", done("a", 1, (0, 1)), done("b", 2, (0, 1)))
    assert export(tmp_path, a) == ((4, 0), [(0, "a"), (0, "b"), (1, "a"), (1, "b")])


LEASED = {
    "event": "data_leased",
    "worker": "a",
    "samples": 6,
    "unit_samples": 3,
    "epochs": 1,
    "seed": 0,
    "shuffle": False,
}


def test_a_servers_log_says_by_itself_what_the_dataset_is(tmp_path: Path) -> None:
    log = log_of(tmp_path / "log", LEASED, done("a", 1, (0, 1)))
    assert say_all([log])
    assert write_export(tmp_path / "out.csv", [log], []) == (3, 0)
    assert not say_all([log_of(tmp_path / "peer", done("a", 1, (0, 1)))])
    assert not say_all([log_of(tmp_path / "empty")])


def test_a_dataset_that_was_forgotten_and_said_anew_is_the_newest_from_there_on(tmp_path: Path) -> None:
    log = log_of(tmp_path / "log", LEASED, done("a", 1, (0, 1)), {**LEASED, "unit_samples": 1}, done("b", 2, (0, 1)))
    assert export(tmp_path, log)[1] == [(0, "a"), (0, "b"), (1, "a"), (2, "a")]


@pytest.mark.parametrize("line", ["[1]", "no json", '{"event": "data_leased", "dataset": "train", "samples": "x"}'])
def test_a_line_that_is_no_event_is_named(tmp_path: Path, line: str) -> None:
    log = tmp_path / "log"
    log.write_text(line + "\n")
    with pytest.raises(ConfigError, match=r"line 1 of .*log is no event"):
        write_export(tmp_path / "out.csv", [log], [])
