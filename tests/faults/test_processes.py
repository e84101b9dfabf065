"""Faults of real processes: killed, frozen, replaced, hung, cut off; signals by process id, a server as it is typed.

tests/integration/test_processes.py has the simplest of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from clusters import Cluster
from faults.proxy import Flow, Proxy
from nursery import start
from ports import free_port
from support import wait_until

pytestmark = pytest.mark.slow


@pytest.mark.row("F02")
def test_of_a_worker_killed_in_the_middle_of_an_upload_nothing_is_applied_and_nothing_kept(tmp_path: Path) -> None:
    flags = ["-n", "2", "--sync-every", "5", "--heartbeat-timeout", "3", "--codec", "fp32"]
    with (
        Cluster(tmp_path, *flags, "--part-size-bytes", "65536", model="wide") as cluster,
        Proxy(cluster.address) as line,
    ):
        size = (tmp_path / "initial" / "model.safetensors").stat().st_size

        def stand_still(flow: Flow, piece: bytes) -> bytes:
            if line.carried["up"] > size // 2:
                line.passing.clear()
            return piece

        line.up = stand_still
        cluster.worker("left")
        right = cluster.worker("right", line.address)
        wait_until(lambda: not line.passing.is_set())  # half of its contribution is on its way, and stands still
        wait_until(lambda: cluster.status()["pending_submissions"] == ["left"])
        assert cluster.status()["pool_held_bytes"] >= size - 4096
        received = cluster.status()["bytes_received"]
        assert size < received < 2 * size  # left's, and some parts of right's

        right.kill()
        right.wait()
        wait_until(lambda: cluster.round() >= 2)
        assert [event["worker"] for event in cluster.events("death")] == ["right"]
        assert {worker for event in cluster.events("round") for worker in event["workers"]} == {"left"}
        (tmp_path / "stop").touch()
        wait_until(lambda: cluster.status()["workers"] == {})
        assert cluster.status()["pool_held_bytes"] == 0


@pytest.mark.row("F03")
def test_who_is_killed_after_its_contribution_was_accepted_is_counted_once_and_restarts_from_the_new_weights(
    tmp_path: Path,
) -> None:
    with Cluster(tmp_path, "-n", "2", "--sync-every", "20", "--heartbeat-timeout", "60") as cluster:
        left, right = cluster.worker("left"), cluster.worker("right")
        wait_until(lambda: cluster.round() >= 1)
        left.send_signal(signal.SIGSTOP)
        wait_until(lambda: cluster.status()["pending_submissions"] == ["right"])  # it is in, and waits for left
        closed = cluster.round()

        right.kill()
        right.wait()
        again = cluster.worker("right")
        wait_until(lambda: cluster.status()["workers"]["right"]["incarnation"] == 2)
        left.send_signal(signal.SIGCONT)
        wait_until(lambda: cluster.round() >= closed + 3)
        keys = {e["version"]: list(zip(e["workers"], e["sequences"], strict=True)) for e in cluster.events("round")}
        assert {worker for worker, _ in keys[closed]} == {worker for worker, _ in keys[closed + 3]} == {"left", "right"}
        assert ("right", closed + 1) in keys[closed + 1]  # what it had sent before it was killed
        counted = [key for of_round in keys.values() for key in of_round]
        assert len(set(counted)) == len(counted)
        began = (tmp_path / "right.began").read_text().split()
        assert len(began) == 2
        assert began[0] != began[1]  # not from where the run began
        assert left.poll() is again.poll() is None


@pytest.mark.row("F07")
def test_when_its_replacement_is_at_work_a_frozen_worker_that_wakes_up_is_fenced(tmp_path: Path) -> None:
    with Cluster(tmp_path, "-n", "2", "--sync-every", "20", "--heartbeat-timeout", "60") as cluster:
        cluster.worker("left")
        old = cluster.worker("right")
        wait_until(lambda: cluster.round() >= 1)
        old.send_signal(signal.SIGSTOP)
        new = cluster.worker("right")
        wait_until(lambda: cluster.status()["workers"]["right"]["incarnation"] == 2)
        replaced_at = cluster.round()
        old.send_signal(signal.SIGCONT)
        assert old.wait(60) != 0
        assert "was started again" in cluster.log("right")
        wait_until(lambda: cluster.round() >= replaced_at + 3)
        assert cluster.participants() == ["left", "right"]
        assert new.poll() is None
        assert cluster.status()["workers"]["right"]["incarnation"] == 2


@pytest.mark.row("F09")
def test_while_the_server_is_away_workers_train_to_their_limit_and_come_back_without_a_stampede(
    tmp_path: Path,
) -> None:
    every, rounds = 10, 2
    with (
        Cluster(tmp_path, "-n", "2", "--sync-every", str(every), "--heartbeat-timeout", "0") as cluster,
        Proxy(cluster.address) as line,
    ):
        names, patience = ("left", "right"), {"offline_after_s": 0.5, "offline_rounds": rounds}
        children = [cluster.worker(name, line.address, heartbeat_interval=1.0, **patience) for name in names]
        wait_until(lambda: cluster.round() >= 1)
        line.is_open = False
        line.cut_all()
        before, knocked = {name: cluster.steps(name) for name in names}, line.accepted
        wait_until(lambda: all(cluster.steps(name) >= before[name] + rounds * every for name in names))
        trained = {name: cluster.steps(name) for name in names}
        heard = line.accepted
        wait_until(lambda: line.accepted >= heard + 2)  # they keep asking, and do not train beyond the limit
        for name in names:
            assert cluster.steps(name) <= before[name] + (rounds + 2) * every, trained
        # Tries are apart by a back-off that doubles, and by the heartbeats: a handful, not thousands.
        assert line.accepted - knocked <= 60
        away_at, accepted = cluster.round(), line.accepted
        line.is_open = True
        wait_until(lambda: cluster.round() >= away_at + 3)
        assert cluster.participants() == ["left", "right"]
        assert line.accepted - accepted <= 2 * 10  # each makes the few connections it always has
        assert cluster.status()["total_worker_deaths"] == 0
        assert {worker["incarnation"] for worker in cluster.status()["workers"].values()} == {1}
        (tmp_path / "stop").touch()
        assert [child.wait(60) for child in children] == [0, 0], cluster.log("left") + cluster.log("right")


@pytest.mark.row("F25")
def test_a_worker_whose_loop_hangs_is_left_behind_though_its_process_lives(tmp_path: Path) -> None:
    with Cluster(tmp_path, "-n", "2", "--sync-every", "20", "--heartbeat-timeout", "3") as cluster:
        cluster.worker("left", heartbeat_interval=0.5)
        right = cluster.worker("right", heartbeat_interval=0.5, stalled_after_s=1.0)
        wait_until(lambda: cluster.round() >= 1)
        (tmp_path / "right.hang").touch()
        wait_until(lambda: [event["worker"] for event in cluster.events("death")] == ["right"])
        hung_at = cluster.round()
        wait_until(lambda: cluster.round() >= hung_at + 2)
        assert cluster.participants() == ["left"]
        assert right.poll() is None
        assert "no optimizer step for" in cluster.log("right")


@pytest.mark.row("F27")
def test_a_full_disk_under_the_event_log_leaves_the_run_alone(tmp_path: Path) -> None:
    with Cluster(tmp_path, "-n", "1", "--sync-every", "5", event_log="/dev/full") as cluster:
        worker = cluster.worker("w")
        wait_until(lambda: cluster.round() >= 3)
        (tmp_path / "stop").touch()
        assert worker.wait(60) == 0, cluster.log("w")
        cluster.server.send_signal(signal.SIGTERM)
        assert cluster.server.wait(30) == 0, cluster.log("server")
        assert cluster.log("server").count("the event log cannot be written") == 1
        assert "Traceback" not in cluster.log("server")


@pytest.mark.row("F27")
@pytest.mark.parametrize("where", ["/dev/full", "closed"])
def test_a_server_whose_log_cannot_be_written_goes_on(tmp_path: Path, where: str) -> None:
    with Cluster(tmp_path, "-n", "1", "--sync-every", "5") as cluster:
        cluster.server.kill()  # in its place one whose words go nowhere
        cluster.server.wait()
        cluster.address = f"127.0.0.1:{free_port()}"
        words = ["server", "-m", str(tmp_path / "initial"), "-n", "1", "--sync-every", "5"]
        if where == "closed":
            read, said = os.pipe()
            os.close(read)
        else:
            said = os.open("/dev/full", os.O_WRONLY)
        with os.fdopen(said, "wb") as log:
            arguments = ["-m", "outerstep", *words, "--port", cluster.address.split(":")[1]]
            server = start(arguments, log=log, cwd=tmp_path, env=os.environ)
        cluster.children.append(server)
        cluster.server = server
        cluster.transport = type(cluster.transport)(cluster.address)
        wait_until(cluster.answers)
        worker = cluster.worker("w")
        wait_until(lambda: cluster.round() >= 2)
        (tmp_path / "stop").touch()
        assert worker.wait(60) == 0, cluster.log("w")
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
