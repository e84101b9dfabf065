"""Workers that are started before their server."""

from __future__ import annotations

from typing import Any

import pytest

from outerstep.coordination.backoff import Backoff
from outerstep.coordination.worker.exchange import Patience
from outerstep.errors import TransportError
from outerstep.server import DiLoCoServer
from outerstep.types import Answer, Request, Wishes
from outerstep.wire.memory import MemoryTransport
from support import Ledger, memory_topology


def test_a_worker_that_came_before_its_server_asks_again_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers of a new run wait for the last; it must not sleep for half a minute when the server is there."""
    pauses = list[float]()

    def noted(patience: Patience, failures: int, rng: object) -> float:
        pauses.append(Backoff(patience.first_backoff_s, patience.longest_backoff_s).longest_pause_s(failures - 1))
        return 0.0

    class Early(MemoryTransport):
        def call(self, request: Request, **more: Any) -> Answer:
            if len(pauses) < 12:
                raise TransportError("connection refused")
            return super().call(request, **more)

    monkeypatch.setattr(Patience, "backoff_s", noted)
    with DiLoCoServer(Ledger().state_dict(), num_workers=1, port=0) as server:
        topology = memory_topology(server, "early", Early(server.service), Patience())
        topology.join(None, Wishes())
        topology.leave("done")
    assert pauses[:4] == [0.5, 1.0, 2.0, 4.0]
    assert max(pauses) == 5.0
    assert len(pauses) == 12
