"""Real processes, real signals: a worker is killed or frozen in the middle of a round, and comes back."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from clusters import Cluster
from outerstep.model_folder import load_state_dict
from outerstep.topology.update import anchor_tree
from support import tiny_model, wait_until

pytestmark = pytest.mark.slow


@pytest.mark.row("F01")
def test_a_killed_worker_is_left_behind_and_its_restart_joins_the_next_round(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "-n", "2", "--sync-every", "20", "--heartbeat-timeout", "3", "--log-json")
    try:
        left, right = cluster.worker("left"), cluster.worker("right")
        wait_until(lambda: cluster.round() >= 2)
        assert cluster.participants() == ["left", "right"]

        right.send_signal(signal.SIGKILL)  # in its local steps, or wherever it happens to be
        right.wait()
        killed_at = cluster.round()
        wait_until(lambda: cluster.status()["total_worker_deaths"] == 1)
        wait_until(lambda: cluster.round() >= killed_at + 3)
        assert cluster.participants() == ["left"]
        assert left.poll() is None

        cluster.worker("right")
        wait_until(lambda: cluster.participants() == ["left", "right"])
        assert cluster.status()["workers"]["right"]["incarnation"] == 2
        assert cluster.status()["total_worker_deaths"] == 1

        (tmp_path / "stop").touch()
        for child in cluster.children[1:]:
            if child is not right:
                assert child.wait(60) == 0, cluster.log("left") + cluster.log("right")
        assert cluster.status()["workers"] == {}
        # Both hold an agreed model: whoever left last holds the server's newest anchor, bit for bit.
        newest = cluster.status()["fragments"][0]["anchor_hash"]
        names = [name for name, _ in tiny_model().named_parameters()]
        saved = [load_state_dict(tmp_path / worker) for worker in ("left", "right")]
        assert newest in [anchor_tree(state[name] for name in names) for state in saved]
        cluster.server.send_signal(signal.SIGTERM)
        assert cluster.server.wait(30) == 0, cluster.log("server")
        # Every line of the server's log is a JSON object, from its greeting to its last word.
        lines = [json.loads(line) for line in cluster.log("server").splitlines()]
        assert {"join", "start", "round", "death", "leave"} <= {line.get("event") for line in lines}
        assert [line["worker"] for line in lines if line.get("event") == "death"] == ["right"]
        assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
        assert "round 1 · left + right · waited " in cluster.log("left")
        assert "done after " in cluster.log("left")
    finally:
        cluster.close()


@pytest.mark.row("F01")
def test_a_frozen_worker_does_not_hold_up_the_round_beyond_its_deadline(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "-n", "2", "--sync-every", "20", "--round-deadline", "0.5", "--heartbeat-timeout", "0")
    try:
        cluster.worker("left")
        right = cluster.worker("right")
        wait_until(lambda: cluster.round() >= 2)
        right.send_signal(signal.SIGSTOP)
        frozen_at = cluster.round()
        wait_until(lambda: cluster.round() >= frozen_at + 3)
        assert cluster.status()["total_worker_deaths"] == 0
        assert "right" in cluster.status()["fragments"][0]["expected"]  # late, not dead
        right.send_signal(signal.SIGCONT)
        wait_until(lambda: cluster.participants() == ["left", "right"])  # it rebased and is counted again
        assert cluster.status()["workers"]["right"]["incarnation"] == 1
    finally:
        cluster.close()


def test_the_first_round_waits_for_the_second_process(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "-n", "2", "--sync-every", "5")
    try:
        cluster.worker("left")
        wait_until(lambda: cluster.status()["pending_submissions"] == ["left"])
        assert cluster.round() == 0
        assert "2 workers to join" in cluster.status()["fragments"][0]["waiting_for"]
        cluster.worker("right")
        wait_until(lambda: cluster.round() >= 1)
        wait_until(lambda: "INFO round 1 · left + right · waited " in cluster.log("server"))
    finally:
        cluster.close()
