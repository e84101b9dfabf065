"""A late contribution counts in a round after the agreement that its worker takes; until it holds that one, it is not
safe, and the worker keeps it: a server that is killed meanwhile is sent it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outerstep.server import DiLoCoServer
from outerstep.topology.protocol import Agreed, Contribution
from outerstep.topology.server.exchange import ServerTicket
from outerstep.topology.server.topology import ServerTopology
from outerstep.types import Wishes
from outerstep.wire.memory import MemoryTransport
from support import Ledger, in_threads, memory_topology, wait_until

FACTS: dict[str, Any] = {"codec": "fp32", "port": 0, "quorum": 2, "outer_lr": 1.0, "outer_momentum": 0.0}


class Relocatable(MemoryTransport):
    def move(self, server: DiLoCoServer) -> None:
        self._service = server.service


class Three:
    """Workers a, b and c at a server that waits for two. c is late once: its first contribution counts in round 2."""

    def __init__(self, place: Path, **settings: Any) -> None:
        self.settings = {**FACTS, **settings}
        self.server = DiLoCoServer(Ledger().state_dict(), 3, save_dir=str(place), **self.settings)
        self.server.service.start()
        self.transports = [Relocatable(self.server.service) for _ in range(3)]
        self.a, self.b, self.c = (
            memory_topology(self.server, name, transport)
            for name, transport in zip("abc", self.transports, strict=True)
        )
        for topology in (self.a, self.b, self.c):
            topology.join(None, Wishes(sync_every=2))
        in_threads(lambda: self.send(self.a, 0), lambda: self.send(self.b, 0))
        self.late = self.begin(self.c, 0)
        agreed = self.late.finish()
        assert (agreed.version, agreed.counted, agreed.counted_in) == (1, True, 2)

    def begin(self, topology: ServerTopology, base: int) -> ServerTicket:
        return topology.begin(Contribution(0, base, base, 2, 0, 0, {"cells": torch.tensor([-2.0, 0.0])}))

    def send(self, topology: ServerTopology, base: int) -> Agreed:
        return self.begin(topology, base).finish()

    def accepted(self, worker_id: str) -> int:
        member = self.server.service.coordinator.members.find(worker_id)
        return member.last_sequence(0) if member is not None else 0

    def kill_the_server(self, place: Path) -> None:
        """What is saved is round 1, with nothing of round 2."""
        self.server.service.stop()
        self.server = DiLoCoServer(None, 3, resume=str(place), **self.settings)
        self.server.service.start()
        for transport in self.transports:
            transport.move(self.server)


def who(agreed: Agreed) -> list[tuple[str, int]]:
    return sorted((p.worker_id, p.sequence) for p in agreed.participants)


@pytest.mark.row("F06")
@pytest.mark.parametrize("killed", [False, True])
def test_it_is_in_the_next_round_whether_or_not_the_server_was_killed(killed: bool, tmp_path: Path) -> None:
    three = Three(tmp_path)
    if killed:
        three.kill_the_server(tmp_path)
    second = three.begin(three.c, 1)
    wait_until(lambda: three.accepted("c") == 2)
    agreed, _ = in_threads(second.finish, lambda: three.send(three.a, 1))
    assert who(agreed) == [("a", 2), ("c", 1), ("c", 2)]
    assert (agreed.version, agreed.steps_lost) == (2, 0)
    assert (second.bytes_sent > three.late.bytes_sent) == killed, "both travelled, or only the second"
    assert three.late.payload is not None
    assert len(three.late.payload.data) == 0, "it is safe now, and not kept any longer"


def test_a_worker_that_leaves_first_sees_it_into_a_round(tmp_path: Path) -> None:
    three = Three(tmp_path)
    three.kill_the_server(tmp_path)
    again = three.late.resume(stuck_after_s=30.0)
    wait_until(lambda: three.accepted("c") == 1)
    agreed, _ = in_threads(again.finish, lambda: three.send(three.a, 1))
    assert who(agreed) == [("a", 2), ("c", 1)]


def test_one_that_is_too_old_for_the_restarted_server_is_reported_as_lost(tmp_path: Path) -> None:
    three = Three(tmp_path, max_staleness=1)
    three.kill_the_server(tmp_path)
    in_threads(lambda: three.send(three.a, 1), lambda: three.send(three.b, 1))
    in_threads(lambda: three.send(three.a, 2), lambda: three.send(three.b, 2))
    agreed = three.send(three.c, 2)
    assert (agreed.counted, agreed.steps_lost) == (True, 2)
