"""What a run's histories must say, whatever it went through: the server's event log, and what each worker has seen.

    round    {"event": "round", "version": 7, "workers": ["w0", "w1"], "sequences": [3, 4], …}      by the server
    seen     {"version": 7, "hash": "…", "cells": [12.0, 8.0]}                                      by a worker

In the model that is trained, worker i adds one to cell i at each step, and the outer step adopts the mean. So a round
of n contributions moves cell i by (steps of worker i) / n, and by nothing if worker i is not in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Facts = dict[str, Any]

NEARLY = 1e-3  # of a step: thirds are not exact in fp32


def read_lines(file: Path) -> list[Facts]:
    """JSON lines; a process may have been killed in the middle of one."""
    found: list[Facts] = []
    for line in file.read_text(errors="replace").splitlines() if file.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def violations(events: Sequence[Facts], seen: Iterable[Facts], workers: Sequence[str]) -> list[str]:
    """Everything that is wrong; none if the promises were kept."""
    seen = list(seen)
    return [
        *_counted_twice(events),
        *_out_of_order(events),
        *_different_bits(seen),
        *_wrong_sums(events, seen, workers),
    ]


def _counted_twice(events: Sequence[Facts]) -> list[str]:
    """Exactly once: a contribution is in one round at most, whoever was killed in between."""
    found: list[str] = []
    version_of: dict[tuple[str, int], int] = {}
    for event in _rounds(events):
        for key in zip(event["workers"], event["sequences"], strict=True):
            if key in version_of:
                found.append(f"{key[0]} #{key[1]} counts in version {version_of[key]} and in {event['version']}")
            version_of[key] = event["version"]
    return found


def _out_of_order(events: Sequence[Facts]) -> list[str]:
    """Versions grow by one. Only the word about a round may be missing, where the server was killed behind it."""
    found: list[str] = []
    last, restarted = 0, False
    for event in events:
        if event["event"] == "server":
            restarted = True
        elif event["event"] == "round":
            step = event["version"] - last
            if step != 1 and not (restarted and step == 2):
                found.append(f"version {event['version']} follows version {last}")
            last, restarted = event["version"], False
    return found


def _different_bits(seen: Sequence[Facts]) -> list[str]:
    """Whoever has seen a version has seen the same bits: nothing that was agreed is ever agreed anew."""
    hashes: dict[int, str] = {}
    return [
        f"version {fact['version']} was seen as {hashes[fact['version']]} and as {fact['hash']}"
        for fact in seen
        if hashes.setdefault(fact["version"], fact["hash"]) != fact["hash"]
    ]


def _wrong_sums(events: Sequence[Facts], seen: Sequence[Facts], workers: Sequence[str]) -> list[str]:
    """Between two versions the model moves by whole steps of those who are in the round, and by nobody else's."""
    found: list[str] = []
    cells = {0: [0.0] * len(workers)} | {fact["version"]: fact["cells"] for fact in seen}
    for event in _rounds(events):
        before, after = cells.get(event["version"] - 1), cells.get(event["version"])
        if before is None or after is None:
            continue
        for i, worker in enumerate(workers):
            steps = (after[i] - before[i]) * len(event["workers"])
            whole = abs(steps - round(steps)) < NEARLY * max(abs(after[i]), 1.0) and steps > -NEARLY
            if not whole or (worker not in event["workers"] and round(steps) != 0):
                found.append(
                    f"version {event['version']} moved the cell of {worker} by {steps:g} steps: {event['workers']}"
                )
    return found


def _rounds(events: Sequence[Facts]) -> list[Facts]:
    return [event for event in events if event["event"] == "round"]
