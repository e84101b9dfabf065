"""What a layer above agrees on enters a run as a version of its own: everybody holds it, nobody loses a step."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outerstep.server import DiLoCoServer
from support import Ledger, Relocatable, count, in_threads, kill, memory_worker, wait_until

SUM: dict[str, Any] = {"port": 0, "outer_lr": 1.0, "outer_momentum": 0.0, "sync_every": 4}
OTHERS = 2  # the cell in which steps from other clusters are counted


def others_learned(steps: int) -> Any:
    def move(target: Mapping[str, Tensor]) -> dict[str, Tensor]:
        moved = {name: values.clone() for name, values in target.items()}
        moved["cells"][OTHERS] += steps
        return moved

    return move


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_everybody_holds_it_and_nobody_loses_a_step(codec: str) -> None:
    with DiLoCoServer(Ledger(3).state_dict(), 2, codec=codec, insecure=True, host="127.0.0.1", **SUM) as server:
        asked = threading.Event()

        def train(cell: int) -> list[float]:
            model = Ledger(3)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            with memory_worker(server, f"w{cell}", model, optimizer) as worker:
                count(model, optimizer, cell, 4)
                count(model, optimizer, cell, 2)
                if cell == 0:  # between its steps; the other is anywhere before its next contribution, which would
                    published = server.service.move_from_above(0, 1, others_learned(100))  # have to be waited for
                    asked.set()
                    assert published.wait(60.0)
                assert asked.wait(60.0)
                count(model, optimizer, cell, 6)
                assert worker.sync_metrics["missed_rounds"] == 0
                assert worker.sync_metrics["steps_discarded"] == 0
            return model.cells.tolist()

        first, second = in_threads(lambda: train(0), lambda: train(1))
        assert first == second == server.get_global_params()["cells"].tolist() == [6.0, 6.0, 100.0]
        assert server.sync_round == 4


def test_a_killed_server_still_has_it_and_a_worker_that_was_away_gets_it(tmp_path: Path) -> None:
    settings = {**SUM, "codec": "bf16", "save_dir": str(tmp_path)}
    server = DiLoCoServer(Ledger(3).state_dict(), 1, **settings)
    server.service.start()
    transport, model = Relocatable(server.service), Ledger(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with memory_worker(server, "w", model, optimizer, transport) as worker:
        count(model, optimizer, 0, 6)
        for upper_version in (1, 2):
            assert server.service.move_from_above(0, upper_version, others_learned(1000)).wait(60.0)
        before = server.get_global_params()["cells"]
        kill(server)
        server = DiLoCoServer(None, 1, **settings)
        server.service.start()
        assert torch.equal(server.get_global_params()["cells"], before)
        assert server.service.coordinator.fragments[0].upper_version == 2
        transport.move(server)
        count(model, optimizer, 0, 2)
        wait_until(lambda: server.sync_round == 4)
        assert worker.sync_metrics["versions"] == [4]
        count(model, optimizer, 0, 1)
    assert model.cells.tolist() == server.get_global_params()["cells"].tolist() == [9.0, 0.0, 2000.0]
    kill(server)
