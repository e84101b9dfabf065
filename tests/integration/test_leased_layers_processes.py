"""Leased data through two levels as it is typed: three servers and four training scripts, each a process. A worker and
the server of its cluster are killed."""

from __future__ import annotations

import csv
import itertools
import signal
from collections import Counter
from pathlib import Path

import pytest

from clusters import SAMPLE_CELLS, Cluster
from outerstep.ranges import Ranges
from support import wait_until

pytestmark = pytest.mark.slow

UNIT = 4  # as leased_job.py has it
UNITS = SAMPLE_CELLS // UNIT
JOB = str(Path(__file__).parent / "leased_job.py")


def test_every_unit_is_accounted_for_when_a_worker_and_its_clusters_server_are_killed(tmp_path: Path) -> None:
    places = {name: tmp_path / name for name in ("top", "east", "west")}
    for place in places.values():
        place.mkdir()
    common = ["-n", "2", "--codec", "fp32", "--heartbeat-timeout"]
    top = Cluster(places["top"], *common, "120", model="samples")
    flags = {
        name: [*common, "60", "--sync-every", "2", "--above-every", "2", "--above-wait", "2", "--above", top.address]
        for name in ("east", "west")
    }
    runs = {name: Cluster(places[name], *said, "--cluster", name, model="samples") for name, said in flags.items()}
    east = runs["east"]

    def job(name: str, worker: str, die_at: int) -> object:
        arguments = [JOB, str(places[name]), str(SAMPLE_CELLS), "2", str(die_at), "0", "samples"]
        settings = {"OUTERSTEP_WORKER_ID": worker, "DILOCO_SERVER": runs[name].address, "OMP_NUM_THREADS": "1"}
        return runs[name].spawn(f"job-{worker}", arguments, **settings)

    try:
        left = job("east", "left", 5)
        others = [job("east", "right", 0), job("west", "left", 0), job("west", "right", 0)]
        assert left.wait(120) == -signal.SIGKILL  # type: ignore[attr-defined]
        east.server.kill()
        assert east.server.wait() == -signal.SIGKILL
        east.start_server(*flags["east"], "--cluster", "east")
        wait_until(east.answers)
        others.append(job("east", "left", 0))
        assert [each.wait(180) for each in others] == [0] * 4, [  # type: ignore[attr-defined]
            log.read_text()[-2000:] for name in ("east", "west") for log in places[name].glob("job-*.log")
        ]
        below = {name: run.status()["data"][0] for name, run in runs.items()}
        for run in runs.values():
            run.server.send_signal(signal.SIGTERM)
        assert [run.server.wait(120) for run in runs.values()] == [0, 0], [run.log("server") for run in runs.values()]

        [above] = top.status()["data"]
        assert (above["units"], above["done"], above["leased"], above["free"]) == (UNITS, UNITS, 0, 0)
        assert above["done_by"].keys() == {"east", "west"}
        assert sum(above["done_by"].values()) + above["spent"] == UNITS
        told = [Ranges(event["places"]) for event in top.events("data")]
        assert sum(each.total for each in told) == UNITS - above["spent"]

        drawn = Counter(
            itertools.chain.from_iterable(
                map(int, (places[name] / f"{worker}.log").read_text().split())
                for name in runs
                for worker in ("left", "right")
            )
        )
        assert drawn.keys() == set(range(SAMPLE_CELLS)), "no sample was missed"
        twice = sum(count - 1 for count in drawn.values())
        counted = above["repeated"] + sum(each["repeated"] for each in below.values())
        assert twice <= UNIT * counted, "and what was trained once more was counted"

        export = tmp_path / "samples.csv"
        log = str(places["top"] / "events.jsonl")
        asked = ["-m", "outerstep", "data", "--server", top.address, "--export", str(export), "--events", log]
        assert top.spawn("export", asked).wait(60) == 0, top.log("export")
        rows = list(csv.DictReader(export.read_text().splitlines()))
        assert Counter(int(row["sample"]) for row in rows) == Counter(range(SAMPLE_CELLS))
        assert {row["worker"] for row in rows} == {"east", "west"}
    finally:
        for run in (top, *runs.values()):
            run.close()
