"""A hierarchy as it is typed: three servers and four training scripts, each a process. One server is killed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from clusters import Cluster
from outerstep.model_folder import load_state_dict
from support import wait_until

pytestmark = pytest.mark.slow


def test_two_clusters_of_two_outlive_their_servers_and_end_with_the_same_weights(tmp_path: Path) -> None:
    places = {name: tmp_path / name for name in ("top", "east", "west")}
    for place in places.values():
        place.mkdir()
    top = Cluster(places["top"], "-n", "2", "--codec", "fp32")
    flags = {
        name: [
            "-n",
            "2",
            "--codec",
            "fp32",
            "--sync-every",
            "5",
            "--above-every",
            "2",
            "--above",
            top.address,
            "--above-wait",
            "2",
        ]
        for name in ("east", "west")
    }
    clusters = {
        name: Cluster(places[name], *said, "--cluster", name, "--heartbeat-timeout", "30")
        for name, said in flags.items()
    }
    east, west = clusters.values()
    try:
        workers = [run.worker(name) for run in (east, west) for name in ("left", "right")]
        wait_until(lambda: top.round() >= 2)
        assert top.participants() == ["east", "west"]

        east.server.kill()
        east.server.wait()
        east.start_server(*flags["east"], "--cluster", "east", "--heartbeat-timeout", "30")
        wait_until(east.answers)
        before = top.round()
        wait_until(lambda: top.round() >= before + 2)
        assert top.participants() == ["east", "west"]

        top.server.kill()
        top.server.wait()
        closed = east.round()
        wait_until(lambda: east.round() >= closed + 2)  # its own rounds do not wait for the layer above
        top.start_server("-n", "2", "--codec", "fp32")
        wait_until(top.answers)
        before = top.round()
        wait_until(lambda: top.round() >= before + 2)

        for place in (places["east"], places["west"]):
            (place / "stop").touch()
        assert [worker.wait(60) for worker in workers] == [0] * 4
        for run in (east, west):
            run.server.send_signal(signal.SIGTERM)
        assert [run.server.wait(90) for run in (east, west)] == [0, 0], east.log("server") + west.log("server")
        top.server.send_signal(signal.SIGTERM)
        assert top.server.wait(60) == 0, top.log("server")
        models = [load_state_dict(place / "outerstep-run" / "latest") for place in places.values()]
        for name, weights in models[0].items():
            assert all(torch.equal(weights, other[name]) for other in models[1:]), name
    finally:
        for run in (top, east, west):
            run.close()


def test_three_levels_train_one_model_and_send_less_the_higher_they_are(tmp_path: Path) -> None:
    """A top, two sites, a room in each, a worker in each room."""
    runs: dict[str, Cluster] = {}

    def begin(name: str, *flags: str) -> Cluster:
        (tmp_path / name).mkdir()
        runs[name] = Cluster(tmp_path / name, "--codec", "fp32", *flags)
        return runs[name]

    def under(above: str, name: str, sync_every: int) -> Cluster:
        said = ["-n", "1", "--sync-every", str(sync_every), "--above", runs[above].address, "--cluster", name]
        return begin(name, *said, "--above-every", "2", "--heartbeat-timeout", "30")

    try:
        top = begin("top", "-n", "2")
        rooms = [under(under("top", f"site-{i}", 2).folder.name, f"room-{i}", 3) for i in range(2)]
        workers = [room.worker("w") for room in rooms]
        wait_until(lambda: top.round() >= 3)
        assert top.participants() == ["site-0", "site-1"]
        rounds = {name: run.round() for name, run in runs.items()}
        sent = {name: runs[name].status()["above"]["bytes_sent"] for name in ("room-0", "site-0")}
        assert rounds["room-0"] > rounds["site-0"] > rounds["top"]
        assert sent["room-0"] > sent["site-0"] > 0

        for room in rooms:
            (room.folder / "stop").touch()
        assert [worker.wait(60) for worker in workers] == [0, 0]
        for level in ("room", "site", "top"):
            ending = [run for name, run in runs.items() if name.startswith(level)]
            for run in ending:
                run.server.send_signal(signal.SIGTERM)
            assert [run.server.wait(90) for run in ending] == [0] * len(ending), ending[0].log("server")
        last = top.events("round")[-1]["workers"]  # a site that left first has not heard of the other's last round
        assert last
        ends = [runs[name].folder / "outerstep-run" / "latest" for name in ("top", *last)]
        models = [load_state_dict(end) for end in ends]  # (a room has left before its site's last exchange)
        for name, weights in models[0].items():
            assert all(torch.equal(weights, other[name]) for other in models[1:]), name
    finally:
        for run in runs.values():
            run.close()
