"""Who has left stays away, whatever was still on its way; and how many parts travel at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outerstep.errors import ExchangeFailed, TransportError
from outerstep.lanes import FEWEST, UNMEASURED, lanes
from outerstep.server import DiLoCoServer
from outerstep.topology.server.link import ServerLink
from outerstep.types import THE_SERVER, Answer, Join, Leave, Request, Wishes
from outerstep.wire.memory import MemoryTransport
from outerstep.wire.pipeline import CALLERS
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


class Spreading(MemoryTransport):
    """Notes over how many connections parts are to go."""

    def __init__(self, server: DiLoCoServer) -> None:
        super().__init__(server.service)
        self.told: list[tuple[int, bool]] = []

    def spread(self, connections: int, *, up: bool) -> None:
        self.told.append((connections, up))


class TestPartsAtATime:
    def measured(
        self, server: DiLoCoServer, *, up: float, down: float, latency_s: float
    ) -> tuple[ServerLink, Spreading]:
        """Bytes per second; 0 = never measured."""
        transport = Spreading(server)
        link = ServerLink(transport, "a")
        for source, target, rate in (("a", THE_SERVER, up), (THE_SERVER, "a", down)):
            link.meter.answered(source, target, latency_s)
            for share in (0.5, 1.0, 0.7):  # the best of them is what the link carries
                if rate:
                    link.meter.transferred(source, target, 1 << 20, (1 << 20) / (share * rate), now=1.0)
        return link, transport

    def test_near_by_each_part_has_a_connection_of_its_own(self, server: DiLoCoServer) -> None:
        link, transport = self.measured(server, up=1e9, down=1e9, latency_s=0.001)
        assert link.parts_at_a_time(up=True, parts=0, connections=None) == FEWEST
        assert link.parts_at_a_time(up=True, parts=100, connections=9) == 9
        assert transport.told == [(0, True)] * 2

    def test_over_a_long_link_they_follow_each_other_on_as_many_as_each_way_needs(self, server: DiLoCoServer) -> None:
        link, transport = self.measured(server, up=50e6, down=25e6, latency_s=0.05)
        up, down = lanes(50e6, 0.1), lanes(25e6, 0.1)
        assert up > down > FEWEST
        assert link.parts_at_a_time(up=True, parts=0, connections=None) == CALLERS * up
        assert link.parts_at_a_time(up=False, parts=0, connections=None) == CALLERS * down
        assert transport.told == [(up, True), (down, False)]

    def test_a_way_that_was_never_measured_is_taken_to_be_like_the_other(self, server: DiLoCoServer) -> None:
        link, _ = self.measured(server, up=0.0, down=50e6, latency_s=0.05)
        assert link.parts_at_a_time(up=True, parts=0, connections=None) == CALLERS * lanes(50e6, 0.1)

    def test_as_many_connections_as_the_user_says_and_no_more(self, server: DiLoCoServer) -> None:
        link, transport = self.measured(server, up=50e6, down=50e6, latency_s=0.05)
        assert link.parts_at_a_time(up=True, parts=100, connections=2) == CALLERS * 2
        assert transport.told == [(2, True)]

    def test_a_transport_that_cannot_spread_gets_no_more_parts_than_connections(self, server: DiLoCoServer) -> None:
        link = ServerLink(MemoryTransport(server.service), "a")
        for source, target in (("a", THE_SERVER), (THE_SERVER, "a")):
            link.meter.answered(source, target, 0.05)
        assert link.parts_at_a_time(up=True, parts=0, connections=None) == UNMEASURED

    def test_a_few_more_connections_are_used_where_the_last_parts_would_else_travel_almost_alone(
        self, server: DiLoCoServer
    ) -> None:
        link, transport = self.measured(server, up=40e6, down=40e6, latency_s=0.05)
        assert lanes(40e6, 0.1) == 16
        assert link.parts_at_a_time(up=True, parts=51, connections=None) == CALLERS * 17
        assert transport.told == [(17, True)]
