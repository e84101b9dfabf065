"""Leased data without a server: the members hold the table together. Real processes; every unit is accounted for."""

from __future__ import annotations

import csv
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from nursery import Child, start
from outerstep.cli.data import write_export
from outerstep.observe.status import DataStatus
from ranks import Ranks

pytestmark = pytest.mark.slow
JOB = str(Path(__file__).parent / "shared_data_job.py")
SAMPLES = 96


def told(log: Path) -> dict[str, Any]:
    lines = [line for line in log.read_text().splitlines() if line.startswith('{"name"')]
    assert lines, log.read_text()[-4000:]
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def trained(folder: Path, name: str) -> list[int]:
    log = folder / f"{name}.log"
    return [int(sample) for sample in log.read_text().split()] if log.exists() else []


def launch(folder: Path, name: str, topology: str, samples: int, die_at: int, step_s: float, **also: str) -> Child:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "NAME": name, **also}
    with (folder / f"{name}.out").open("ab") as log:
        return start([JOB, topology, str(folder), str(samples), str(die_at), str(step_s)], log=log, env=environ)


def test_ranks_share_each_unit_and_go_on_from_their_saved_states_at_the_exact_sample(tmp_path: Path) -> None:
    (tmp_path / "saves").touch()
    logs = [tmp_path / f"out-{rank}" for rank in range(2)]

    def run(die_at: int) -> list[int]:
        ranks = Ranks([JOB, "allreduce", str(tmp_path), str(SAMPLES), str(die_at), "0"], logs, ENVIRON)
        return [process.wait(90) for process in ranks.processes]

    assert run(die_at=6) == [-9, -9]
    assert run(die_at=0) == [0, 0], logs[0].read_text()[-3000:]
    drawn = [trained(tmp_path, f"r{rank}") for rank in range(2)]
    assert len(drawn[0]) == len(drawn[1]) == SAMPLES // 2
    assert sorted(drawn[0] + drawn[1]) == list(range(SAMPLES))
    for log in logs:
        assert told(log)["cells"] == [1.0] * SAMPLES
        assert (told(log)["ledger"]["done"], told(log)["ledger"]["repeated"]) == (SAMPLES // 4, 0)


ENVIRON = [{"NAME": f"r{rank}"} for rank in range(2)]


def test_a_replica_of_torchft_killed_by_sigkill_heals_the_table_and_nothing_is_missed(tmp_path: Path) -> None:
    pytest.importorskip("torchft")
    from torchft_replicas import lighthouse

    with lighthouse(1, heartbeat_timeout_ms=1000) as address:
        where = {"LIGHTHOUSE": address.removeprefix("http://"), "RUST_LOG": "warn"}
        begun = time.monotonic()
        a = launch(tmp_path, "a", "torchft", 400, 0, 0.05, **where)
        b = launch(tmp_path, "b", "torchft", 400, 30, 0.05, **where)
        assert b.wait(60) == -9
        again = launch(tmp_path, "b", "torchft", 400, 0, 0.05, **where)
        assert [a.wait(90), again.wait(90)] == [0, 0], (tmp_path / "a.out").read_text()[-3000:]
        assert time.monotonic() - begun < 120
    last = [told(tmp_path / f"{name}.out") for name in "ab"]
    ledgers = [one["ledger"] for one in last]
    assert max(ledger["done"] for ledger in ledgers) == 100
    assert all(cell > 0.0 for cell in max(last, key=lambda one: one["ledger"]["done"])["cells"]), "nothing is missed"
    times = Counter(trained(tmp_path, "a") + trained(tmp_path, "b"))
    assert set(times) == set(range(400))
    again_ = {sample for sample, count in times.items() if count > 1}
    assert len(again_) <= 2 * 8 + 8, "what the dead one had trained since its last round, and a unit it was in"


def test_of_three_peers_one_is_killed_and_the_others_train_what_it_held(tmp_path: Path) -> None:
    jobs = {name: launch(tmp_path, name, "gossip", 480, 40 if name == "c" else 0, 0.05) for name in "abc"}
    assert jobs["c"].wait(90) == -9
    assert [jobs[name].wait(120) for name in "ab"] == [0, 0], (tmp_path / "a.out").read_text()[-3000:]
    last = [told(tmp_path / f"{name}.out") for name in "ab"]
    newest = max(last, key=lambda one: one["ledger"]["done"])
    assert newest["ledger"]["done"] == 120, newest["ledger"]
    assert set(newest["ledger"]["done_by"]) == set("abc")
    assert all(cell > 0.0 for cell in newest["cells"]), "nothing is missed"
    times = Counter(sample for name in "abc" for sample in trained(tmp_path, name))
    twice = {sample for sample, count in times.items() if count > 1}
    dead = set(trained(tmp_path, "c"))
    assert set(times) == set(range(480))
    logs = [tmp_path / f"{name}.events" for name in "ab"]
    rows, nameless = write_export(tmp_path / "samples.csv", logs, [DataStatus(**newest["ledger"])])
    listed = list(csv.DictReader((tmp_path / "samples.csv").read_text().splitlines()))
    assert nameless == 0, "what b was not there for, a knows"
    assert {int(row["sample"]) for row in listed} == set(range(480))
    assert {row["worker"] for row in listed} == set("abc")
    by_one = write_export(tmp_path / "of-a.csv", logs[:1], [DataStatus(**newest["ledger"])])
    assert by_one == (rows, 0), "the founder was there all the time"
    assert len(twice - dead) <= 4 * newest["ledger"]["repeated"], (
        "what is trained twice was the dead one's, or is counted"
    )
