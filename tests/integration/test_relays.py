"""Other ways to the layer above, over real sockets with TLS: a link is cut, a relay dies, the server is moved."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from faults.proxy import Link, Proxy, pass_on
from outerstep.cli.status import _above
from outerstep.coordination.layers.routing import Routing, WayUp
from outerstep.coordination.server.plan import changed
from outerstep.hierarchy import Cluster
from outerstep.hierarchy.ways_up import WaysUp, transport_up
from outerstep.server import DiLoCoServer
from outerstep.types import THE_SERVER, Assignment, MemberFacts, Wishes
from outerstep.wire.http_transport import HttpTransport
from ports import free_port
from support import EAGER, Ledger, count, memory_worker, wait_until

INSIDE: dict[str, Any] = {"port": 0, "outer_lr": 1.0, "outer_momentum": 0.0, "sync_every": 4, "codec": "fp32"}
SUM: dict[str, Any] = {  # whoever takes part in a round: what each cluster did is added
    "outer_lr": 1.0,
    "outer_momentum": 0.0,
    "codec": "fp32",
    "async_mode": True,
    "dn_buffer_size": 0,
}
CELLS = 2
SIDE = Link(mbit_per_s=40.0, rtt_s=0.02)
Train = Callable[[int], None]


def a_server(port: int = 0, place: Path | None = None) -> DiLoCoServer:
    saved = {"save_dir": str(place)} if place is not None else {}
    found = place is not None and (place / "run.json").exists()
    return DiLoCoServer(None if found else Ledger(CELLS).state_dict(), 1, port, **SUM, **saved).start()


def cells(server: DiLoCoServer) -> list[float]:
    return server.get_global_params()["cells"].tolist()


class Site:
    """A cluster with one worker, cell `cell` of the ledger."""

    def __init__(self, name: str, cell: int, above: str, **settings: Any) -> None:
        self.server = DiLoCoServer(Ledger(CELLS).state_dict(), 1, **INSIDE).start()
        self.cluster = Cluster(self.server, above, name, every=2, patience=EAGER, **settings).start()
        self._cell, self._model = cell, Ledger(CELLS)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1.0)
        self._worker = memory_worker(self.server, "w", self._model, self._optimizer)
        self._worker.start()
        self.steps = 0

    def train(self, steps: int) -> None:
        count(self._model, self._optimizer, self._cell, steps)
        self.steps += steps

    def stop(self) -> None:
        self._worker.stop()
        self.cluster.stop()
        self.server.stop()


def used(ways: WaysUp) -> WayUp:
    return ways._routing.current


class Sites:
    """East relays. West's straight way is a line that can be cut; its other one, through east, is slower than that."""

    def __init__(self, link: Link | None = None, side: Link = SIDE) -> None:
        self.top = a_server()
        self.line = Proxy(self.top.address, link=link)
        self.east = Site("east", 0, self.top.address, relay=True)
        self.side = Proxy(self.east.server.address, link=side)
        self.straight = WayUp(self.top.address)
        self.through_east = WayUp(self.top.address, self.east.server.address)
        self.ways = WaysUp(Routing([self.top.address], [self.east.server.address]), self._connect)
        self.west = Site("west", 1, self.top.address, transport=self.ways)

    def _connect(self, way: WayUp) -> HttpTransport:
        if not way.relay:
            return HttpTransport(self.line.address)
        return HttpTransport(way.server, relay=HttpTransport(self.side.address))

    def cut(self) -> None:
        self.line.is_open = False
        self.line.up = self.line.down = lambda flow, piece: None
        self.line.cut_all()

    def mend(self) -> None:
        self.line.up = self.line.down = pass_on
        self.line.is_open = True

    def exchanges(self) -> int:
        return self.west.cluster.describe().exchanges

    def close(self) -> None:
        self.ways.close()
        self.line.__exit__()
        self.side.__exit__()
        self.top.stop()


@pytest.fixture
def sites() -> Iterator[Sites]:
    made = Sites()
    yield made
    made.close()


def test_a_cut_link_is_gone_around_and_taken_again_when_it_is_back(sites: Sites) -> None:
    west = sites.west
    west.train(16)
    wait_until(lambda: sites.exchanges() >= 1)
    assert used(sites.ways) == sites.straight
    assert sites.ways.describe()[0].used

    sites.cut()
    before, carried = sites.exchanges(), sites.line.carried["up"]
    west.train(16)
    sites.east.train(16)
    wait_until(lambda: sites.exchanges() > before)
    assert used(sites.ways) == sites.through_east
    assert sites.line.carried["up"] == carried, "nothing went straight"
    said = west.server.status()["above"]["ways"]
    assert [(way["used"], way["works"]) for way in said] == [(False, False), (True, True)]
    shown = _above(west.cluster.describe())
    assert shown.startswith(f"cluster west of {sites.top.address} via {sites.east.server.address}: ")

    sites.mend()
    wait_until(lambda: (sites.ways._choose([]), used(sites.ways) == sites.straight)[1])
    before = sites.exchanges()
    west.train(8)
    wait_until(lambda: sites.exchanges() > before)
    assert sites.line.carried["up"] > carried
    west.stop()
    sites.east.stop()
    assert cells(sites.top) == [sites.east.steps, west.steps], "every step once"


def test_if_the_relay_dies_too_the_clusters_rounds_go_on_and_nothing_is_lost(sites: Sites) -> None:
    west = sites.west
    west.train(8)
    wait_until(lambda: sites.exchanges() >= 1)
    sites.cut()
    before = sites.exchanges()
    west.train(8)
    wait_until(lambda: used(sites.ways) == sites.through_east and sites.exchanges() > before)

    sites.east.train(8)
    sites.east.stop()
    before = sites.exchanges()
    # Its worker need not wait for what does not come.
    west.cluster.machine.wait_s, west.cluster._follows_wait = 0.1, False
    rounds = west.server.sync_round
    west.train(8)
    assert west.server.sync_round >= rounds + 2, "its own rounds go on"

    sites.mend()
    west.train(8)
    wait_until(lambda: sites.exchanges() > before)
    west.stop()
    assert cells(sites.top) == [sites.east.steps, west.steps]


def test_a_slow_link_is_gone_around_too() -> None:
    sites = Sites(Link(mbit_per_s=1.0, rtt_s=0.3))
    try:
        sites.west.train(8)
        wait_until(lambda: (sites.ways._choose([]), used(sites.ways) == sites.through_east)[1])
        slow, fast = sites.ways.describe()
        assert slow.works, "it is slow, not cut"
        assert slow.up_bytes_per_s < fast.up_bytes_per_s
        sites.west.train(8)
        sites.west.stop()
        sites.east.stop()
        assert cells(sites.top) == [0.0, 16.0]
    finally:
        sites.close()


def test_a_plan_names_the_way_and_is_made_from_what_was_measured_of_each() -> None:
    sites = Sites(Link(mbit_per_s=8.0, rtt_s=0.05), Link(mbit_per_s=8.0, rtt_s=0.05))
    west, service = sites.west, sites.top.service

    def plan(sends_to: str) -> None:
        mine = Assignment(cluster="west", leader="", sends_to=sends_to, local_steps=2, batch_size=1)
        with service.changed:
            now = service.coordinator.next_plan or service.coordinator.plan
            service.coordinator.next_plan = changed(now, Wishes(), (mine,))

    def trains_until(holds: Callable[[], bool]) -> None:
        wait_until(lambda: (west.train(8), holds())[1])

    def facts() -> MemberFacts:
        known = service.coordinator.members.find("west")
        return (known.facts if known is not None else None) or MemberFacts()

    try:
        trains_until(lambda: {("west", "east"), ("east", "west")} <= {(x.source, x.target) for x in facts().links})
        assert facts().via == ""
        assert service.coordinator.members.find("east").facts.relays
        plan("east")
        trains_until(lambda: used(sites.ways) == sites.through_east and facts().via == "east")
        assert [way.ordered for way in west.cluster.describe().ways] == [False, True]
        straight = [link for link in facts().links if link.target == THE_SERVER]
        assert straight, "the way that is not in use is measured, too"
        plan(THE_SERVER)
        trains_until(lambda: used(sites.ways) == sites.straight and facts().via == "")
        west.stop()
        sites.east.stop()
        assert cells(sites.top) == [0.0, west.steps], "every step once"
    finally:
        sites.close()


def test_a_cluster_follows_its_layer_above_to_another_address(tmp_path: Path) -> None:
    first, second = free_port(), free_port()
    above = f"127.0.0.1:{first},127.0.0.1:{second}"
    top = a_server(first, tmp_path / "run")
    east = Site("east", 0, above)
    east.train(16)
    wait_until(lambda: east.cluster.describe().exchanges >= 1)
    top.stop()
    shutil.move(tmp_path / "run", tmp_path / "moved")  # as to another machine

    east.cluster.machine.wait_s, east.cluster._follows_wait = 0.1, False
    east.train(16)
    top = a_server(second, tmp_path / "moved")
    before = east.cluster.describe().exchanges
    east.train(16)
    wait_until(lambda: east.cluster.describe().exchanges > before)
    assert [way.way for way in east.cluster.describe().ways if way.used] == [f"127.0.0.1:{second}"]
    east.stop()
    assert cells(top) == [east.steps, 0.0]
    top.stop()


def test_one_address_is_one_transport_without_a_thread_that_probes() -> None:
    made = transport_up("127.0.0.1:9", kept_connections=1, credentials=None)
    assert isinstance(made, HttpTransport)
    made.close()
