"""What values travel by between replicas of torchft, where that was left open: decided anew in each quorum.

NCCL wants a GPU for each replica. Here a second gloo group stands in for it, with a declared accelerator: what is shown
is when the replicas change from one to the other, together, and that nothing of a round is lost by that.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch

os.environ.setdefault("RUST_LOG", "warn")
pytest.importorskip("torchft")

import torchft
from msgspec.structs import replace
from torchft.coordination import LighthouseServer

from outerstep import DiLoCoWorker
from outerstep.topology.torchft.process_groups import ProcessGroups
from outerstep.topology.torchft.state import ReplicaKinds, ReplicaOffer, backend_among
from support import Ledger, count, in_threads, wait_until


def offer(name: str, place: str, accelerator: str = "nvidia:H100", backends: str = "nccl,gloo") -> ReplicaOffer:
    kinds = {"accelerator": accelerator, "backends": tuple(backends.split(",")), "place": place}
    return replace(ReplicaOffer(name, name, name, "run", "terms", False, False, "digest"), **kinds)


@pytest.mark.parametrize(
    ("second", "chosen"),
    [
        (offer("b", "h2:gpu0"), "nccl"),
        (offer("b", "h1:gpu0"), "gloo"),  # both on one GPU
        (offer("b", ""), "gloo"),  # its model is on a CPU
        (offer("b", "h2:gpu0", backends="gloo"), "gloo"),
        (offer("b", "h2:gpu0", "huawei:910B", "hccl,gloo"), "gloo"),
        (offer("b", "h2:gpu0", "amd:MI300"), "gloo"),  # its NCCL is another library of that name
    ],
)
def test_nccl_if_every_replica_can_and_has_a_gpu_to_itself(second: ReplicaOffer, chosen: str) -> None:
    assert backend_among([offer("a", "h1:gpu0"), second]) == chosen
    assert backend_among([second, offer("a", "h1:gpu0")]) == chosen


@pytest.mark.slow
def test_a_replica_that_cannot_makes_all_fall_back_and_its_leave_takes_them_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settled: dict[str, list[str]] = {name: [] for name in "abc"}
    of_thread: dict[int, str] = {}

    def stand_in(groups: ProcessGroups) -> Any:
        return torchft.ProcessGroupGloo(timeout=groups._timeout)

    settle = ProcessGroups.settle

    def noted(groups: ProcessGroups, backend: Any) -> None:
        settle(groups, backend)
        settled[of_thread[id(groups)]].append(groups.backend)

    monkeypatch.setattr(ProcessGroups, "_make_nccl", stand_in)
    monkeypatch.setattr(ProcessGroups, "settle", noted)
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000, quorum_tick_ms=20, heartbeat_timeout_ms=800
    )
    where = f"127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
    has_met, goes, is_over = (threading.Event() for _ in range(3))
    models = {name: Ledger(3) for name in "abc"}

    def work(own: str, end: threading.Event) -> None:
        model = models[own]
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        worker = DiLoCoWorker(
            model, optimizer, "torchft", worker_id=own, lighthouse=where, sync_every=4, codec="fp32",
            replica_backend="auto", quorum_timeout_s=3.0, transfer_timeout_s=5.0, exit_patience_s=10.0,
            handle_signals=False, min_replicas=1,
        )  # fmt: skip
        topology: Any = worker._topology
        of_thread[id(topology._groups)] = own
        topology._kinds = ReplicaKinds("nvidia:H100", ("nccl", "gloo"), "" if own == "c" else f"host-{own}:gpu")
        with worker:
            while not end.is_set():
                count(model, optimizer, "abc".index(own), 1)
                time.sleep(0.005)

    def last(names: str, backend: str) -> bool:
        return all(settled[name][-2:] == [backend] * 2 for name in names)

    def watch() -> None:
        try:
            wait_until(lambda: last("ab", "nccl"))
            has_met.set()
            wait_until(lambda: last("abc", "gloo"))
            goes.set()
            wait_until(lambda: last("ab", "nccl"))
        finally:
            for event in (has_met, goes, is_over):
                event.set()

    def third() -> None:
        has_met.wait()
        work("c", goes)

    in_threads(watch, lambda: work("a", is_over), lambda: work("b", is_over), third)
    lighthouse.shutdown()
    assert min(models["a"].cells[2], models["b"].cells[2]) > 0, "what the third did is in the others' models"
