"""The example's layers as they are typed: three servers and two workers, each a process started with the same file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from clusters import Cluster
from support import wait_until

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "layers.toml"
HERE = ("--host", "127.0.0.1", "--advertise", "127.0.0.1")  # flags win over the file


def test_the_example_runs_with_one_file_and_a_name_for_each_process(tmp_path: Path) -> None:
    places = {name: tmp_path / name for name in ("world", "east", "west")}
    for place in places.values():
        place.mkdir()
    world = Cluster(places["world"], "--layers", str(EXAMPLE), "--cluster", "world", *HERE, "--sync-every", "2")
    runs = [world]
    try:
        for name in ("east", "west"):
            said = ["--above", world.address, "--sync-every", "5", "-n", "1"]
            said += ["--relay"] if name == "east" else ["--via", runs[1].address]
            runs.append(Cluster(places[name], "--layers", str(EXAMPLE), "--cluster", name, *HERE, *said))
        workers = []
        for run, name in zip(runs[1:], ("east", "west"), strict=True):
            command = ["worker", "--layers", str(EXAMPLE), "--cluster", name, "--server", run.address]
            script = str(run.folder / "train.py")
            words = ["-m", "outerstep", *command, "--worker-id", "w", "--", sys.executable, script, "w"]
            workers.append(run.spawn("w", words))
        wait_until(lambda: world.round() >= 2)
        assert world.participants() == ["east", "west"]
        status = runs[1].status()
        assert status["above"]["cluster"] == "east"
        assert status["above"]["address"] == world.address
        ways = [f"{world.address}", f"{world.address} via {runs[1].address}"]
        wait_until(lambda: all(way["up_bytes_per_s"] for way in runs[2].status()["above"]["ways"]))  # both were probed
        assert [way["way"] for way in runs[2].status()["above"]["ways"] if way["works"]] == ways
        for run in runs:
            (run.folder / "stop").touch()
        assert [worker.wait(60) for worker in workers] == [0, 0]
        assert (places["east"] / "outerstep-run-east" / "run.json").exists()
    finally:
        for run in runs:
            run.close()
