"""`outerstep plan --from` a server that runs: real workers, sockets and measurements."""

from __future__ import annotations

import json
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch

from outerstep.server import DiLoCoServer
from outerstep.types import THE_SERVER
from outerstep.worker import DiLoCoWorker
from support import Ledger, count, in_threads, wait_until
from typed import typed

CELLS = 200_000
STEP_S = 0.005


def train(name: str, cell: int, address: str, over: threading.Event) -> None:
    model = Ledger(CELLS)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with DiLoCoWorker(model, optimizer, address, worker_id=name, heartbeat_interval=0.1):
        while not over.is_set():
            time.sleep(STEP_S)
            count(model, optimizer, cell, 1)


@pytest.mark.slow
def test_what_a_running_server_has_measured_is_planned_with() -> None:
    over = threading.Event()
    with DiLoCoServer(
        Ledger(CELLS).state_dict(),
        2,
        port=0,
        insecure=True,
        sync_every=20,
        codec="bf16",
        outer_lr=1.0,
        outer_momentum=0.0,
    ) as server:

        def look() -> dict[str, Any]:
            try:
                wait_until(lambda: _is_measured(server.status()))
                done = typed(["plan", "--from", f"http://{server.address}", "--json"])
                assert done.exit_code == 0, (done.output, done.exception)
                made: dict[str, Any] = json.loads(done.output)
                return made
            finally:
                over.set()

        made, *_ = in_threads(look, *(partial(train, f"w{i}", i, f"http://{server.address}", over) for i in range(2)))
    situation = made["situation"]
    assert situation["parameters"] == CELLS
    assert [site["name"] for site in situation["sites"]] == ["w0", "w1"]
    for site in situation["sites"]:
        assert site["step_s"] >= STEP_S  # what it really takes; asleep for so long at least
        assert site["up_bytes_per_s"] > 0
        assert site["down_bytes_per_s"] > 0
    assert (made["now"]["sync_every"], made["now"]["codec"]) == (20, "bf16")
    assert 0.0 < made["now"]["utilization"] <= 1.0
    assert made["situation"]["overheads"]["connections"] == 0  # slow starts are in rates that were measured


def _is_measured(status: dict[str, Any]) -> bool:
    up = {link["source"] for link in status["links"] if link["target"] == THE_SERVER}
    return up >= {"w0", "w1"} and all(worker["steps_per_second"] for worker in status["workers"].values())
