"""The server's process is killed at each single call that changes its disk. What a worker was told stays true."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outerstep.coordination.worker.exchange import Patience
from outerstep.server import DiLoCoServer
from outerstep.server.saved import load_state
from outerstep.topology.protocol import Agreed
from outerstep.topology.server.topology import ServerTopology
from outerstep.topology.update import anchor_tree
from outerstep.wire.http_transport import HttpTransport
from outerstep.wire.memory import MemoryTransport
from outerstep.wire.transport import Transport
from outerstep.worker import DiLoCoWorker
from ports import free_port
from support import assert_same, params_of, tiny_model, train_steps, wait_until

from .kill_points import SETTINGS

pytestmark = pytest.mark.slow

WRITES_RECORD = "write /journal/record-#.unfinished"
CLEARING_UP: list[dict[str, Any]] = [  # killed in the middle, and then again while what that left is removed
    {"call": call, "nth": 1, "how": "before"}
    for call in (
        "rename /journal/record-#.unfinished",
        "unlink /journal/record-#.unfinished",
        "rename /.state-round-#.saving",
        "unlink /.state-round-#.saving/state.json",
        "unlink /.state-round-#.deleting/state.json",
        "rmdir /.state-round-#.deleting",
    )
]
TESTS = Path(__file__).parents[1]
IMPATIENT = Patience(first_backoff_s=0.02, longest_backoff_s=0.1, give_up_after_s=100.0, poll_wait_s=0.5)
NEVER: dict[str, Any] = {"call": None, "nth": 1, "how": "before"}


class Watching(ServerTopology):
    """A worker's way to the server that keeps each anchor it was given: what it saw must never become untrue."""

    def __init__(self, transport: Transport, worker_id: str) -> None:
        super().__init__(
            transport, worker_id=worker_id, instance=secrets.token_hex(8), hostname="test", patience=IMPATIENT
        )
        self.seen: dict[int, str] = {}

    def adopted(self, agreed: Agreed, intact: bool) -> Agreed | None:
        assert self.seen.setdefault(agreed.version, agreed.anchor_hash) == agreed.anchor_hash, "history was rewritten"
        assert agreed.version >= max(self.seen), "an agreement was taken back"
        return super().adopted(agreed, intact)


class Pair(threading.Thread):
    """Two workers that train for so many rounds, each in a thread."""

    def __init__(self, transports: list[Transport], rounds: int) -> None:
        super().__init__(daemon=True)
        self.topologies = [Watching(transport, name) for transport, name in zip(transports, "ab", strict=True)]
        self.models = [tiny_model(1), tiny_model(2)]
        self.rounds = rounds
        self.error: BaseException | None = None

    def run(self) -> None:
        threads = [threading.Thread(target=self._train, args=(i,), daemon=True) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _train(self, i: int) -> None:
        model = self.models[i]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        worker = DiLoCoWorker(model, optimizer, "memory:1", worker_id="ab"[i], topology=self.topologies[i])
        try:
            worker.start()
            for step in range(SETTINGS["sync_every"] * self.rounds):
                train_steps(model, optimizer, 1, seed=2 * step + i)
        except BaseException as error:
            self.error = error
            raise

    @property
    def seen(self) -> dict[int, str]:
        first, second = (topology.seen for topology in self.topologies)
        assert all(first[version] == second[version] for version in first.keys() & second.keys())
        return {**first, **second}


def uninterrupted(rounds: int, folder: Path, run_id: str) -> tuple[dict[int, str], dict[str, Tensor]]:
    """What the same workers are told by a server that nobody kills, and its momentum at the end."""
    server = DiLoCoServer(tiny_model().state_dict(), 2, port=0, save_dir=str(folder), **SETTINGS)
    server.service.coordinator.run_id = run_id
    server.service.start()
    pair = Pair([MemoryTransport(server.service) for _ in "ab"], rounds)
    pair.start()
    pair.join()
    server.service.stop()
    return pair.seen, momentum(folder)


def momentum(folder: Path) -> dict[str, Tensor]:
    return {name: entry["momentum_buffer"] for name, entry in load_state(folder).optimizer.by_name.items()}


class Keeper:
    """Starts servers by plan, one after the other, on one port."""

    def __init__(self, place: Path) -> None:
        self.folder, self.calls_log = place / "run", place / "calls"
        self.log = place / "servers.log"
        self.port = free_port()
        self.stderr = self.log.open("wb")
        environ = {**os.environ, "PYTHONPATH": f"{TESTS}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("kill_points.py")), str(self.port), self.calls_log],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            env=environ,
            text=True,
        )
        self.child = 0

    def transports(self) -> list[Transport]:
        return [HttpTransport(f"http://127.0.0.1:{self.port}", timeout_s=5.0) for _ in "ab"]

    def start(self, plan: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({**plan, "folder": str(self.folder)}) + "\n")
        self.process.stdin.flush()
        self.child = self._told("started")

    def ended(self) -> int:
        """The wait status of the server that was started last."""
        return self._told("ended")

    def _told(self, what: str) -> int:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        return int(json.loads(line)[what])

    def calls(self) -> list[str]:
        """Of the server that was started last, each as kill_points.py names it."""
        return self.calls_log.read_text().splitlines()

    def status(self) -> dict[str, Any]:
        return self.transports()[0].status()  # type: ignore[attr-defined, no-any-return]

    def stop(self) -> None:
        os.kill(self.child, signal.SIGTERM)
        assert self.ended() == 0, self.log.read_text()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.stderr.close()


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    made = Keeper(tmp_path)
    yield made
    made.close()


def points(calls: list[str]) -> list[dict[str, Any]]:
    """Before each call, and in the middle of each that writes."""
    plans: list[dict[str, Any]] = []
    for i, call in enumerate(calls):
        facts = {"call": call, "nth": calls[: i + 1].count(call)}
        plans += [{**facts, "how": how} for how in (("before", "half") if call.startswith("write ") else ("before",))]
    return plans


def one_round(keeper: Keeper, pair: Pair) -> list[str]:
    """The calls of a server from its start to the end of the checkpoint behind its first round: up to its third record,
    for the first says that it is back. It ends cleanly: the next start finds nothing half done."""
    keeper.start(NEVER)
    before = max(pair.seen, default=0)
    wait_until(lambda: max(pair.seen, default=0) > before + 2)
    calls = keeper.calls()
    keeper.stop()
    records = [i for i, call in enumerate(calls) if call == "rename /journal/record-#.unfinished"]
    return calls[: next(i for i in range(records[1], len(calls)) if calls[i] == WRITES_RECORD)]


@pytest.mark.row("F08")
def test_killed_at_each_call_of_a_commit_and_of_a_checkpoint_no_agreement_is_lost(
    keeper: Keeper, tmp_path: Path
) -> None:
    rounds = 80
    pair = Pair(keeper.transports(), rounds)
    pair.start()
    one_round(keeper, pair)  # it founds the run
    calls = one_round(keeper, pair)
    assert {"write", "fsync", "rename", "replace", "unlink"} <= {call.split()[0] for call in calls}
    for plan in points(calls) + CLEARING_UP:
        keeper.start(plan)
        assert keeper.ended() == signal.SIGKILL, plan
        assert pair.error is None
    keeper.start(NEVER)
    pair.join(100.0)
    assert not pair.is_alive()
    assert pair.error is None
    keeper.stop()
    compare(keeper, pair, tmp_path)


def compare(keeper: Keeper, pair: Pair, tmp_path: Path) -> None:
    """With a run that nobody killed: all that was seen, the momentum, and the workers' own copies."""
    saved = load_state(keeper.folder)
    assert saved.versions == (pair.rounds,)
    seen, momentum_then = uninterrupted(pair.rounds, tmp_path / "uninterrupted", saved.run_id)
    assert pair.seen == seen
    assert len(seen) > pair.rounds - 2
    assert_same(momentum(keeper.folder), momentum_then)
    for model in pair.models:
        assert anchor_tree(params_of(model).values()) == seen[pair.rounds]
        assert_same(params_of(model), saved.params)


@pytest.mark.row("F08")
def test_killed_at_each_call_while_the_run_is_founded_it_begins_all_the_same(keeper: Keeper, tmp_path: Path) -> None:
    def begin(place: Path, plan: dict[str, Any]) -> list[str]:
        keeper.folder = place / "run"
        pair = Pair(keeper.transports(), rounds=2)
        pair.start()
        keeper.start(plan)
        if plan["call"] is not None:
            assert keeper.ended() == signal.SIGKILL, plan
            keeper.start(NEVER)
        pair.join(60.0)
        assert not pair.is_alive(), (keeper.ended(), keeper.log.read_text())
        assert pair.error is None
        keeper.stop()
        compare(keeper, pair, place)
        return keeper.calls()

    first = begin(tmp_path / "smooth", NEVER)
    founding = first[: first.index(WRITES_RECORD)]  # run.json and the first checkpoint
    for number, plan in enumerate(points(founding)):
        begin(tmp_path / str(number), plan)
