"""Real processes, real signals: a worker is killed or frozen in the middle of a round, and comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outerstep.demo.processes import free_port
from outerstep.errors import TransportError
from outerstep.model_folder import load_state_dict, save_model
from outerstep.topology.news import anchor_hash
from outerstep.wire.http_transport import HttpTransport
from support import tiny_model, wait_until

pytestmark = pytest.mark.slow

SCRIPT = """
import pathlib, sys, time, torch, outerstep
sys.path.insert(0, {tests!r})
from support import tiny_model, train_steps
torch.set_num_threads(1)
folder = pathlib.Path({folder!r})
model = tiny_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with outerstep.attach(model, optimizer) as worker:
    step = 0
    while not (folder / "stop").exists():
        train_steps(model, optimizer, 1, seed=step)
        step += 1
        time.sleep(0.01)
outerstep.save_model(model, folder / sys.argv[1])
"""


class Cluster:
    """A server process and worker processes; everything is ended by its id."""

    def __init__(self, folder: Path, *server_flags: str) -> None:
        self.folder = folder
        save_model(tiny_model(), folder / "initial")
        (folder / "train.py").write_text(SCRIPT.format(tests=str(Path(__file__).parents[1]), folder=str(folder)))
        self.address = f"127.0.0.1:{free_port()}"
        port = self.address.split(":")[1]
        self.children: list[subprocess.Popen[bytes]] = []
        self.server = self._spawn("server", "server", "-m", str(folder / "initial"), "--port", port, *server_flags)
        self.transport = HttpTransport(self.address)
        wait_until(self._answers)

    def _answers(self) -> bool:
        assert self.server.poll() is None, (self.folder / "server.log").read_text()
        try:
            return bool(self.status())
        except TransportError:
            return False

    def _spawn(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "outerstep", *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                cwd=self.folder,
            )
        self.children.append(child)
        return child

    def worker(self, name: str) -> subprocess.Popen[bytes]:
        script = [sys.executable, str(self.folder / "train.py"), name]
        return self._spawn(name, "worker", "--server", self.address, "--worker-id", name, "--", *script)

    def status(self) -> dict[str, Any]:
        return self.transport.status()

    def round(self) -> int:
        return int(self.status()["sync_round"])

    def participants(self) -> list[str]:
        return sorted(self.status()["fragments"][0]["last_participants"])

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def close(self) -> None:
        self.transport.close()
        for child in self.children:
            if child.poll() is None:
                child.kill()
                child.wait()


def test_a_killed_worker_is_left_behind_and_its_restart_joins_the_next_round(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "-n", "2", "--sync-every", "20", "--heartbeat-timeout", "3")
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
        assert newest in [anchor_hash(state[name] for name in names) for state in saved]
        cluster.server.send_signal(signal.SIGTERM)
        assert cluster.server.wait(30) == 0, cluster.log("server")
    finally:
        cluster.close()


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
        assert "left" in cluster.log("server")
    finally:
        cluster.close()
