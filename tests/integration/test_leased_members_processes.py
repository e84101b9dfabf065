"""Leased data of clusters without a server, each process real: their members hold one table, and a server above leases
to them. Members are killed, and every unit is accounted for."""

from __future__ import annotations

import csv
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from clusters import SAMPLE_CELLS, Cluster
from nursery import Child, start
from outerstep.cli.data import write_export
from outerstep.observe.status import DataStatus
from outerstep.ranges import Ranges
from ranks import Ranks
from support import wait_until

pytestmark = pytest.mark.slow

UNIT = 4  # as shared_data_job.py has it
UNITS = SAMPLE_CELLS // UNIT
SAVE_EVERY = 3
JOB = str(Path(__file__).parent / "shared_data_job.py")
TOP = ("-n", "2", "--codec", "fp32", "--heartbeat-timeout", "60", "--outer-lr", "2", "--outer-momentum", "0")


def job(folder: Path, top: Cluster, cluster: str, die_at: int) -> Ranks:
    """Two ranks that are a cluster."""
    said = {"above": top.address, "cluster": cluster, "above_every": 2, "above_wait_s": 5, "peer_timeout_s": 60}
    settings = {f"JOB_{field.upper()}": str(value) for field, value in said.items()}
    logs = [folder / f"{cluster}-{rank}.out" for rank in range(2)]
    return Ranks([JOB, "allreduce", str(folder), str(SAMPLE_CELLS), str(die_at), "0.02"], logs, settings=settings)


def told(log: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads([line for line in log.read_text().splitlines() if line[:7] == '{"name"'][-1])
    return found


def rows_of(export: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(export.read_text().splitlines()))


def test_two_jobs_of_two_ranks_share_an_epoch_and_go_on_from_their_states(tmp_path: Path) -> None:
    """East dies when it has contributed what its states do not know of, west with steps that nobody has."""
    (tmp_path / "saves").write_text(str(SAVE_EVERY))
    top = Cluster(tmp_path, *TOP, model="samples")
    dies_at = {"east": 8, "west": 11}
    first = [job(tmp_path, top, name, at) for name, at in dies_at.items()]
    again: list[Ranks] = []
    try:
        assert [each.wait(90) for one in first for each in one.processes] == [-signal.SIGKILL] * 4
        again = [job(tmp_path, top, name, 0) for name in dies_at]
        ends = [each.wait(120) for one in again for each in one.processes]
        assert ends == [0] * 4, "\n".join((tmp_path / f"{name}-0.out").read_text()[-3000:] for name in dies_at)
        wait_until(lambda: not top.status()["data"][0]["leased"])

        [above] = top.status()["data"]
        assert (above["units"], above["done"], above["leased"], above["free"]) == (UNITS, UNITS, 0, 0)
        assert above["done_by"].keys() == {"east", "west"}
        done = [Ranges(event["places"]) for event in top.events("data")]
        assert sum(each.total for each in done) == UNITS - above["spent"]

        last = {name: told(tmp_path / f"{name}-0.out") for name in dies_at}
        drawn = Counter(
            int(sample)
            for name in dies_at
            for rank in range(2)
            for sample in (tmp_path / f"{name}{rank}.log").read_text().split()
        )
        assert drawn.keys() == set(range(SAMPLE_CELLS)), "no sample was missed"
        twice = sum(count - 1 for count in drawn.values())
        counted = above["repeated"] + sum(one["ledger"]["repeated"] for one in last.values())
        unsaved = sum(at % SAVE_EVERY for at in dies_at.values())
        assert twice <= UNIT * (counted + unsaved), "and what was trained once more died with its ranks, or is counted"
        newest = max((one["cells"] for one in last.values()), key=lambda cells: sum(cell > 0.0 for cell in cells))
        assert all(cell > 0.0 for cell in newest), "what is done is in the model"

        logs = [tmp_path / "events.jsonl"]
        assert write_export(tmp_path / "above.csv", logs, [DataStatus(**above)])[1] == 0
        assert {row["worker"] for row in rows_of(tmp_path / "above.csv")} == {"east", "west"}
        assert Counter(int(row["sample"]) for row in rows_of(tmp_path / "above.csv")) == Counter(range(SAMPLE_CELLS))
        west = DataStatus(**last["west"]["ledger"])
        write_export(tmp_path / "west.csv", [tmp_path / "west0.events"], [west])
        listed = Counter(int(row["sample"]) for row in rows_of(tmp_path / "west.csv"))
        assert {row["worker"] for row in rows_of(tmp_path / "west.csv")} == {"ranks"}
        assert len(listed) >= UNIT * west.done_by["ranks"], "a cluster's own log says what it has decided to be done"
    finally:
        for one in [*first, *again]:
            one.close()
        top.close()


def test_a_torchft_cluster_whose_leader_is_killed_trains_each_unit_of_the_layer_above(tmp_path: Path) -> None:
    pytest.importorskip("torchft")
    from torchft_replicas import lighthouse

    top = Cluster(tmp_path, "-n", "1", *TOP[2:], model="samples")
    jobs: list[Child] = []

    def replica(name: str, die_at: int, address: str) -> Child:
        said = {"above": top.address, "cluster": "east", "above_every": 2, "above_wait_s": 8, "transfer_timeout_s": 5}
        settings = {f"JOB_{field.upper()}": str(value) for field, value in said.items()}
        environ = {**os.environ, **settings, "OMP_NUM_THREADS": "1", "NAME": name, "LIGHTHOUSE": address}
        with (tmp_path / f"{name}.out").open("ab") as log:
            arguments = [JOB, "torchft", str(tmp_path), str(SAMPLE_CELLS), str(die_at), "0.05"]
            jobs.append(start(arguments, log=log, env=environ))
        return jobs[-1]

    try:
        with lighthouse(1, heartbeat_timeout_ms=1000) as address:
            place = address.removeprefix("http://")
            a, b = replica("a", 18, place), replica("b", 0, place)
            assert a.wait(90) == -signal.SIGKILL
            again = replica("a", 0, place)
            assert [b.wait(150), again.wait(90)] == [0, 0], (tmp_path / "b.out").read_text()[-3000:]
        wait_until(lambda: not top.status()["data"][0]["leased"])
        [above] = top.status()["data"]
        assert (above["units"], above["done"], above["leased"], above["free"]) == (UNITS, UNITS, 0, 0)
        assert above["done_by"].keys() == {"east"}
        last = max((told(tmp_path / f"{name}.out") for name in "ab"), key=lambda one: one["ledger"]["done"])
        assert last["ledger"]["done_by"].keys() == {"a", "b"}
        assert all(cell > 0.0 for cell in last["cells"]), "what is done is in the model"
        logs = [tmp_path / f"{name}.events" for name in "ab"]
        status = DataStatus(**last["ledger"])
        assert write_export(tmp_path / "east.csv", logs, [status])[1] == 0, (
            "what one was not there for, the other knows"
        )
        rows = rows_of(tmp_path / "east.csv")
        assert {int(row["sample"]) for row in rows} == set(range(SAMPLE_CELLS))
        assert {row["worker"] for row in rows} == {"a", "b"}
        drawn = Counter(int(sample) for name in "ab" for sample in (tmp_path / f"{name}.log").read_text().split())
        assert drawn.keys() == set(range(SAMPLE_CELLS)), "no sample was missed"
        twice = sum(count - 1 for count in drawn.values())
        counted = above["repeated"] + last["ledger"]["repeated"]
        assert twice <= UNIT * counted + 2 * 8 + UNIT, (
            "what the dead one had trained since its last round, or is counted"
        )
    finally:
        for one in jobs:
            if one.poll() is None:
                one.kill()
        top.close()
