"""Runs over torchft: the real lighthouse, a Manager in each replica, gloo between them."""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("RUST_LOG", "warn")
pytest.importorskip("torchft")

from torch.distributed import TCPStore
from torchft.coordination import LighthouseServer

from integration.allreduce_job import SYNC_EVERY, make_model, train
from integration.torchft_job import COMPARED, STEPS
from outerstep.server import DiLoCoServer
from support import in_threads, memory_worker, params_of

pytestmark = pytest.mark.slow

JOB = Path(__file__).with_name("torchft_job.py")
GROUP_JOB = Path(__file__).with_name("torchft_group_job.py")
PATIENCE_S = 120.0


class Process:
    """One of a run, and what it tells."""

    def __init__(self, folder: Path, name: str, command: list[str], **variables: str) -> None:
        self.log = folder / f"{name}.log"
        found = os.pathsep.join([str(JOB.parents[1]), os.environ.get("PYTHONPATH", "")])
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": found, **variables}
        with self.log.open("ab") as log:
            self.child = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, stderr=log, env=environ)
        self._lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            self._lines.put(json.loads(line))
        self._lines.put(None)

    def until(self, wanted: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """The next thing that it tells and that is wanted."""
        while True:
            try:
                told = self._lines.get(timeout=PATIENCE_S)
            except queue.Empty:
                told = None
            assert told is not None, f"{self.log.stem} said nothing more:\n{self.log.read_text()[-4000:]}"
            if wanted(told):
                return told

    def further(self, rounds: int) -> int:
        """The sum of its versions, when it has come so much further."""
        now = self.until(lambda told: "versions" in told)["versions"]
        return int(self.until(lambda told: told.get("versions", 0) >= now + rounds)["versions"])

    def kill(self) -> None:
        self.child.kill()
        self.child.wait(60)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def begin(name: str, *command: str, **variables: str) -> Process:
        started.append(Process(tmp_path, name, list(command), **variables))
        return started[-1]

    yield begin
    for process in started:
        process.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def by_a_server(**settings: Any) -> dict[str, torch.Tensor]:
    """The same training with a server, which adds in the order of the workers' names."""
    server = DiLoCoServer(
        {name: value.clone() for name, value in make_model(100).state_dict().items()},
        num_workers=2, port=0, sync_every=SYNC_EVERY, deterministic=True, **settings,
    )  # fmt: skip
    server.service.start()

    def work(number: int) -> dict[str, torch.Tensor]:
        model, source = make_model(100 + number), torch.Generator().manual_seed(number)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with memory_worker(server, f"rank-{number}", model, optimizer):
            train(model, optimizer, source, STEPS)
        return {**params_of(model), "seen": model.seen.clone()}

    found: dict[str, torch.Tensor] = in_threads(lambda: work(0), lambda: work(1))[0]
    server.service.stop()
    return found


def check_like_a_server(replicas: list[Process], threads: int = 1) -> None:
    """Bit for bit where η and μ are powers of two; elsewhere a server may round a product and a sum at once."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        expected = {name: by_a_server(**settings) for name, settings in COMPARED.items()}
    finally:
        torch.set_num_threads(before)
    for name, by_name in expected.items():
        first, second = (one.until(lambda told, name=name: told.get("compared") == name) for one in replicas)
        assert first["hash"] == second["hash"], name
        assert first["values"] == second["values"], name
        assert first["metrics"]["missed_rounds"] == second["metrics"]["missed_rounds"] == 0
        for key, value in by_name.items():
            tolerance = 0.0 if name == "vanilla" else 1e-6
            torch.testing.assert_close(torch.tensor(first["values"][key]), value, rtol=tolerance, atol=tolerance)


def test_replicas_agree_with_a_server_and_outlive_each_other_the_lighthouse_and_a_straggler(
    tmp_path: Path, start: Callable[..., Process]
) -> None:
    port = free_port()
    beacon = ("-m", "outerstep", "lighthouse", "--port", str(port), "--join-timeout", "2", "--heartbeat-timeout", "1.5")
    job = (str(JOB), "{}", f"127.0.0.1:{port}", str(tmp_path))

    def replica(number: int, begin: str) -> Process:
        return start(f"replica-{number}", *(part.format(number) for part in job), begin)

    lighthouse = start("lighthouse", *beacon)
    first, second = replica(0, "compare"), replica(1, "compare")
    check_like_a_server([first, second])

    first.further(4)
    second.kill()
    first.further(4)  # alone

    second = replica(1, "go on")
    joined = second.until(lambda told: "joined" in told)
    assert min(joined["joined"]) >= 1  # not from the beginning
    assert joined["steps"] - joined["at"] in (0, 1)  # where in its data the other was (it counts after its step)
    assert joined["at"] >= SYNC_EVERY
    assert joined["moments"] > 0  # and its optimizer's state
    both_hold_the_same(first, second)

    lighthouse.kill()
    start("lighthouse", *beacon)
    first.further(4)
    second.further(4)
    both_hold_the_same(first, second)

    (tmp_path / "straggle-1").touch()
    first.further(8)
    second.further(8)
    both_hold_the_same(first, second)

    (tmp_path / "stop").write_text(str(first.further(1) + 8))
    ends = [one.until(lambda told: "end" in told) for one in (first, second)]
    assert ends[0]["end"] == ends[1]["end"]
    assert [one.child.wait(60) for one in (first, second)] == [0, 0]


def both_hold_the_same(first: Process, second: Process) -> None:
    """At the next version that both have."""
    newest = first.further(1)
    hashes: list[dict[int, str]] = [{}, {}]
    for one, seen in zip((first, second), hashes, strict=True):
        told = one.until(lambda told: told.get("versions", 0) >= newest)
        seen[told["versions"]] = told["hash"]
    while not (common := hashes[0].keys() & hashes[1].keys()):
        behind = 0 if max(hashes[0]) < max(hashes[1]) else 1
        told = (first, second)[behind].until(lambda told: "versions" in told)
        hashes[behind][told["versions"]] = told["hash"]
    for version in common:
        assert hashes[0][version] == hashes[1][version]


def test_replicas_of_several_processes_exchange_rank_by_rank_whole_and_sharded(
    tmp_path: Path, start: Callable[..., Process]
) -> None:
    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000, quorum_tick_ms=50, heartbeat_timeout_ms=2000
    )
    address = f"127.0.0.1:{server.address().rpartition(':')[2]}"
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
    processes = {
        (number, rank): start(
            f"group-{number}-{rank}", str(GROUP_JOB), str(number), address, str(tmp_path), RANK=str(rank),
            LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(stores[number].port),
            TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0",
        )
        for number in range(2)
        for rank in range(2)
    }  # fmt: skip
    for process in processes.values():
        assert process.child.wait(PATIENCE_S) == 0, process.log.read_text()[-4000:]
    server.shutdown()
    told = {at: json.loads((tmp_path / f"group-{at[0]}-{at[1]}.json").read_text()) for at in processes}
    assert len({one["ddp"]["hash"] for one in told.values()}) == 1  # every process holds the whole model
    for rank in range(2):
        first, second = told[0, rank]["fsdp2"], told[1, rank]["fsdp2"]
        assert first["hash"] == second["hash"]  # of these rows
        assert first["end"] == second["end"]
        assert sum(second["joined"]) >= 2  # not from the beginning
        assert second["moments"] > 0  # the other's optimizer state,
        assert second["sharded"]  # of these rows
    assert told[0, 0]["fsdp2"]["hash"] != told[0, 1]["fsdp2"]["hash"]
