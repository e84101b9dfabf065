"""Who has left stays away, whatever was still on its way."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outerstep.errors import ExchangeFailed, TransportError
from outerstep.server import DiLoCoServer
from outerstep.topology.server.link import ServerLink
from outerstep.types import Answer, Join, Leave, Request, Wishes
from outerstep.wire.memory import MemoryTransport
from support import Ledger, memory_topology
from unit.coordination.builders import make_join


class Between(MemoryTransport):
    """Something happens while an answer is on its way back."""

    happens: Callable[[Request], None] = staticmethod(lambda request: None)

    def call(self, request: Request, **buffers: object) -> Answer:
        answer = super().call(request, **buffers)  # type: ignore[arg-type]
        self.happens(request)
        return answer


@pytest.fixture
def server() -> DiLoCoServer:
    made = DiLoCoServer(Ledger().state_dict(), num_workers=1, port=0, sync_every=2)
    made.service.start()
    return made


def live(server: DiLoCoServer) -> frozenset[str]:
    return server.service.coordinator.members.live_ids


def test_a_join_that_overtakes_the_goodbye_is_taken_back(server: DiLoCoServer) -> None:
    transport = Between(server.service)
    link = ServerLink(transport, "a")
    link.call(make_join("a"))
    assert live(server) == {"a"}

    def leave(request: Request) -> None:
        if isinstance(request, Join):
            link.is_shut = True

    transport.happens = leave
    link.call(make_join("a"))
    assert not live(server)


def test_nobody_joins_through_a_link_that_is_shut(server: DiLoCoServer) -> None:
    link = ServerLink(MemoryTransport(server.service), "a")
    link.is_shut = True
    with pytest.raises(ExchangeFailed, match="has left"):
        link.call(make_join("a"))


def test_a_goodbye_that_cannot_be_said_is_left_to_silence(server: DiLoCoServer) -> None:
    transport = Between(server.service)
    link = ServerLink(transport, "a")

    def happens(request: Request) -> None:
        link.is_shut = True
        if isinstance(request, Leave):
            raise TransportError("gone")

    transport.happens = happens
    link.call(make_join("a"))


def test_a_worker_that_left_sends_no_more_heartbeats(server: DiLoCoServer) -> None:
    topology = memory_topology(server, "a")
    topology.join(None, Wishes())
    topology.leave("done")
    assert not live(server)
    topology.heartbeat(1, 1.0, None)
    assert not live(server)
