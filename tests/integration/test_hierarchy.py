"""Clusters of clusters: each cluster's server is a worker of the server above. The cells of a ledger show which steps
are in a model, and how often."""

from __future__ import annotations

import re
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from outerstep import DiLoCoWorker
from outerstep.errors import ConfigError, TransportError
from outerstep.events import VersionPublished
from outerstep.hierarchy import Cluster
from outerstep.hierarchy import leader as leading
from outerstep.server import DiLoCoServer
from outerstep.wire.memory import MemoryTransport
from support import (
    EAGER,
    Ledger,
    Relocatable,
    count,
    in_threads,
    kill,
    memory_worker,
    tiny_model,
    train_steps,
    wait_until,
)

INSIDE: dict[str, Any] = {"port": 0, "outer_lr": 1.0, "outer_momentum": 0.0, "sync_every": 4}
ACROSS: dict[str, Any] = {"port": 0, "outer_lr": 1.0, "outer_momentum": 0.0}
SUM: dict[str, Any] = {  # whoever takes part in a round: what each cluster did is added
    **ACROSS,
    "codec": "fp32",
    "async_mode": True,
    "dn_buffer_size": 0,
    "heartbeat_timeout_s": 60.0,
}
WORKERS = 4
PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "hierarchy.md"


def make_server(workers: int, settings: dict[str, Any], place: Path | None = None, **more: Any) -> DiLoCoServer:
    saved = {"save_dir": str(place)} if place is not None else {}
    found = place is not None and (place / "run.json").exists()
    server = DiLoCoServer(None if found else Ledger(WORKERS).state_dict(), workers, **{**settings, **saved, **more})
    server.service.start()
    return server


def make_cluster(server: DiLoCoServer, above: DiLoCoServer, name: str, every: int = 2) -> Cluster:
    return Cluster(server, "memory:1", name, every=every, transport=Relocatable(above.service), patience=EAGER).start()


def train(server: DiLoCoServer, cell: int, steps: int, **settings: Any) -> list[float]:
    model = Ledger(WORKERS)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with memory_worker(server, f"w{cell}", model, optimizer, **settings):
        count(model, optimizer, cell, steps)
    return model.cells.tolist()


def cells(server: DiLoCoServer) -> list[float]:
    return server.get_global_params()["cells"].tolist()


class Severable(MemoryTransport):
    """A way to a server that can be cut."""

    is_cut = False

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_cut:
            raise TransportError("nothing passes here")
        return super().call(*args, **kwargs)


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_what_two_clusters_of_two_learn_is_in_the_model_above(codec: str) -> None:
    above = make_server(2, SUM, codec=codec)
    east, west = make_server(2, INSIDE, codec=codec), make_server(2, INSIDE, codec=codec)
    clusters = [make_cluster(east, above, "east"), make_cluster(west, above, "west")]
    in_threads(*(lambda i=i: train(east if i < 2 else west, i, 24) for i in range(WORKERS)))
    in_threads(*(cluster.stop for cluster in clusters))
    # Inside a cluster the mean of two halves what each of them did.
    assert cells(above) == [12.0] * WORKERS
    assert cells(above) in (cells(east), cells(west)), "the last one to leave has it all"
    assert cells(east)[:2] == cells(west)[2:] == [12.0, 12.0]
    assert above.sync_round >= 3
    # Each life has come to its end, as the cluster knows it and as the layer above does.
    assert [cluster.describe().state for cluster in clusters] == ["EXIT", "EXIT"]
    assert {str(member.life.place) for member in above.service.coordinator.members if member.life} == {"EXIT"}
    for server in (east, west, above):
        server.service.stop()


def example_of_the_page() -> str:
    (block,) = re.findall(r"```python\n(.*?DiLoCoServer.*?)```", PAGE.read_text(), flags=re.DOTALL)
    return str(block)


def test_the_pages_python_example_is_one_worker_above_and_nothing_is_wrong_between_the_two(tmp_path: Path) -> None:
    """As it is typed, but for the address of the top and of this server, its folder, and what it does meanwhile."""
    above = DiLoCoServer(
        Ledger(WORKERS).state_dict(), 1, port=0, insecure=True, credentials=str(tmp_path), sync_every=2
    )
    seen: list[DiLoCoServer] = []

    def meanwhile(server: DiLoCoServer) -> None:
        seen.append(server)
        cluster = server.service.run.describe_above
        in_threads(*(lambda i=i: train(server, i, 24, sync_every=2) for i in range(2)))
        wait_until(lambda: (told := cluster()) is not None and told.exchanges > 0)
        assert (told := cluster()) is not None
        assert (told.joined, told.failure, told.warnings) == (True, "", [])

    text, typed_here = example_of_the_page(), {"every=8": "every=2", "server.wait()": "meanwhile(server)"}
    with above:
        typed_here["num_workers=2"] = f"num_workers=2, port=0, insecure=True, credentials={str(tmp_path)!r}"
        typed_here['"TOP:8512"'] = repr(f"http://{above.address}")
        for typed, here in typed_here.items():
            assert typed in text, "the page has changed: change what is typed here"
            text = text.replace(typed, here)
        exec(text, {"model": Ledger(WORKERS), "meanwhile": meanwhile})
    assert len(seen) == 1


def test_a_cluster_from_python_with_momentum_of_its_own_is_refused_unless_somebody_insists() -> None:
    east = make_server(1, {"port": 0})  # as DiLoCoServer is by itself: η 0.7, μ 0.9
    with pytest.raises(ConfigError, match=r"outer_momentum must be 0 in a cluster, got 0.9: .*inner_momentum=True"):
        Cluster(east, "memory:1", "east")
    above = make_server(1, {"port": 0, "heartbeat_timeout_s": 240.0})
    way = Relocatable(above.service)
    insisting = Cluster(east, "memory:1", "east", every=2, transport=way, patience=EAGER, inner_momentum=True).start()
    train(east, 0, 8, sync_every=2)
    assert ["0.9 in this cluster and 0.9 in the run above" in said for said in insisting.describe().warnings] == [True]
    insisting.stop()
    for server in (east, above):
        kill(server)


@pytest.mark.parametrize(
    ("factory", "refusal"),
    [
        (lambda params: torch.optim.SGD(params, lr=1.0), ""),
        (lambda params: torch.optim.SGD(params, lr=1.0, momentum=0.5), "got 0.5"),
        (lambda params: torch.optim.AdamW(params), "may have momentum"),
    ],
)
def test_a_clusters_own_optimizer_is_looked_at_for_momentum(factory: Any, refusal: str) -> None:
    server = DiLoCoServer(Ledger(WORKERS).state_dict(), 1, port=0, outer_optimizer_factory=factory)
    if refusal:
        with pytest.raises(ConfigError, match=refusal):
            Cluster(server, "memory:1", "east")
    else:
        Cluster(server, "memory:1", "east")


# --- a cluster's server dies wherever it may --------------------------------------------------------------------------


def before(cluster: Cluster, name: str, die: Any) -> None:
    setattr(cluster, name, die)


def after(cluster: Cluster, name: str, die: Any) -> None:
    carry_out = getattr(cluster, name)

    def both(*args: Any) -> None:
        carry_out(*args)
        die()

    setattr(cluster, name, both)


MOMENTS = {
    "before it has joined": (after, "_write", 1),
    "when it has joined": (after, "_write", 2),
    "before it is durable that it sends": (before, "_write", 3),
    "before it sends": (after, "_write", 3),
    "after it has sent": (after, "_sent", 1),
    "before it is durable what was agreed": (before, "_write", 4),
    "before what was agreed is in its model": (before, "_move", 1),
    "after what was agreed is in its model": (after, "_move", 1),
    "after it has sent again": (after, "_sent", 2),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_no_step_is_lost_or_counted_twice_when_a_clusters_server_dies(moment: str, tmp_path: Path) -> None:
    above, west = make_server(2, SUM), make_server(1, INSIDE, codec="fp32")
    settings = {**INSIDE, "codec": "fp32"}
    east = make_server(1, settings, tmp_path)
    when, name, times = MOMENTS[moment]
    way = Relocatable(above.service)
    doomed = Cluster(east, "memory:1", "east", every=2, wait_s=0.2, transport=way, patience=EAGER)
    left, is_dead = times, threading.Event()

    def die(*args: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            is_dead.set()
            threading.Event().wait()  # for ever
        if when is before:
            getattr(Cluster, name)(doomed, *args)

    when(doomed, name, die)
    doomed.start()
    steps = 64
    model, transport = Ledger(WORKERS), Relocatable(east.service)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    other = make_cluster(west, above, "west")

    def train_east() -> None:
        nonlocal east
        clusters = [doomed]
        with memory_worker(east, "e", model, optimizer, transport):
            for _ in range(steps):
                count(model, optimizer, 0, 1)
                if is_dead.is_set() and len(clusters) == 1:
                    kill(east)
                    east = make_server(1, settings, tmp_path)
                    transport.move(east)
                    clusters.append(make_cluster(east, above, "east"))
        wait_until(lambda: clusters[-1].describe().state.startswith("TRAINING"))
        clusters[-1].stop()
        assert clusters[-1].describe().state == "EXIT"
        assert len(clusters) == 2, "it never came to that"

    def train_west() -> None:
        train(west, 1, steps)
        other.stop()

    in_threads(train_east, train_west)
    assert cells(above) == [64.0, 64.0, 0.0, 0.0]
    assert (cells(east)[0], cells(west)[1]) == (64.0, 64.0)
    for server in (east, west, above):
        kill(server)


def test_a_cluster_that_is_stopped_with_a_bad_disk_offers_nothing(tmp_path: Path) -> None:
    """What it could not write down it would send a second time after a restart."""
    above = make_server(1, SUM)
    settings = {**INSIDE, "codec": "fp32"}
    east = make_server(1, settings, tmp_path)
    cluster = make_cluster(east, above, "east", every=100)
    in_the_way = tmp_path / ".above.safetensors.unfinished"
    model, transport = Ledger(WORKERS), Relocatable(east.service)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with memory_worker(east, "e", model, optimizer, transport):
        count(model, optimizer, 0, 16)
        wait_until(lambda: cluster.worker is not None)
        in_the_way.mkdir()
    in_threads(cluster.stop)
    assert cells(above) == [0.0] * WORKERS
    assert "cannot be written" in cluster.failure
    assert not cluster.describe().joined
    assert cluster.describe().state == "IDLE"
    wait_until(lambda: not above.service.coordinator.members.live_ids)

    in_the_way.rmdir()
    kill(east)
    east = make_server(1, settings, tmp_path)
    again = make_cluster(east, above, "east", every=100)
    wait_until(lambda: again.worker is not None)
    in_threads(again.stop)
    assert cells(above) == cells(east) == [16.0, 0.0, 0.0, 0.0]
    for server in (east, above):
        kill(server)


def test_a_cluster_that_is_stopped_while_nobody_answers_above_leaves_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leading, "DiLoCoWorker", partial(DiLoCoWorker, offline_after_s=0.5))
    monkeypatch.setattr(leading, "EXIT_FACTOR", 0.5 / leading.EXIT_PATIENCE_S)
    above = make_server(1, SUM)
    settings = {**INSIDE, "codec": "fp32"}
    east = make_server(1, settings, tmp_path)
    way = Severable(above.service)
    cluster = Cluster(east, "memory:1", "east", every=2, wait_s=0.2, transport=way, patience=EAGER).start()
    train(east, 0, 24)
    wait_until(lambda: cells(above)[0] > 0.0)
    way.is_cut = True
    train(east, 0, 24)
    in_threads(cluster.stop)
    assert cluster.describe().state in ("EXIT", "IDLE")
    kill(east)

    east = make_server(1, settings, tmp_path)
    assert cells(above)[0] < 48.0, "it came to nothing that could be lost"
    again = make_cluster(east, above, "east")
    wait_until(lambda: again.describe().joined)
    in_threads(again.stop)
    assert cells(above) == cells(east) == [48.0, 0.0, 0.0, 0.0]
    for server in (east, above):
        kill(server)


# --- other shapes -----------------------------------------------------------------------------------------------------


def test_three_levels_are_the_same_rule_twice() -> None:
    """Two sites of two rooms each, with a worker in each room."""
    top = make_server(2, SUM)
    sites = [make_server(2, {**SUM, "sync_every": 1}) for _ in range(2)]
    rooms = [make_server(1, INSIDE, codec="fp32") for _ in range(WORKERS)]
    above = [make_cluster(site, top, f"site-{i}", every=1) for i, site in enumerate(sites)]
    inside = [make_cluster(room, sites[i // 2], f"room-{i}", every=1) for i, room in enumerate(rooms)]
    in_threads(*(lambda i=i: train(rooms[i], i, 16) for i in range(WORKERS)))
    in_threads(*(cluster.stop for cluster in inside))
    in_threads(*(cluster.stop for cluster in above))
    assert cells(top) == [16.0] * WORKERS
    assert cells(sites[0])[:2] == cells(sites[1])[2:] == [16.0, 16.0]
    for server in (*rooms, *sites, top):
        server.service.stop()


def test_the_server_above_dies_and_the_clusters_rounds_go_on(tmp_path: Path) -> None:
    above = make_server(2, SUM, tmp_path)
    servers = [make_server(1, INSIDE, codec="fp32") for _ in range(2)]
    ways = [Relocatable(above.service) for _ in servers]
    clusters = [
        Cluster(server, "memory:1", f"c{i}", every=2, wait_s=0.5, transport=ways[i], patience=EAGER).start()
        for i, server in enumerate(servers)
    ]
    half, back = threading.Barrier(3), threading.Event()

    def work(i: int) -> None:
        model = Ledger(WORKERS)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with memory_worker(servers[i], f"w{i}", model, optimizer):
            count(model, optimizer, i, 24)
            half.wait(60.0)
            count(model, optimizer, i, 24)  # nobody is there above
            half.wait(60.0)
            assert back.wait(60.0)
            count(model, optimizer, i, 16)
        clusters[i].stop()

    def restart() -> None:
        nonlocal above
        half.wait(60.0)
        kill(above)
        half.wait(60.0)
        assert all(server.sync_round >= 12 for server in servers), "their rounds did not wait"
        above = make_server(2, SUM, tmp_path)
        for way in ways:
            way.move(above)
        back.set()

    in_threads(lambda: work(0), lambda: work(1), restart)
    assert cells(above) == [64.0, 64.0, 0.0, 0.0]
    assert (cells(servers[0])[0], cells(servers[1])[1]) == (64.0, 64.0)
    for server in (*servers, above):
        kill(server)


@pytest.mark.parametrize("codec", ["int8+feedback", "bf16"])
def test_fragments_that_differ_between_the_levels_end_with_the_same_bits(codec: str) -> None:
    """Two fragments inside, three across with a delay; what codecs round is in the next update, on every level. Each
    cluster's record is made in the middle of an exchange."""
    model = tiny_model().state_dict()
    above = DiLoCoServer(model, 2, **{**ACROSS, "codec": codec, "num_fragments": 3, "fragment_delay": 1})
    inside = [DiLoCoServer(model, 2, **{**INSIDE, "codec": codec, "num_fragments": 2}) for _ in range(2)]
    for server in (above, *inside):
        server.service.start()
    clusters = [make_cluster(server, above, f"c{i}", every=3) for i, server in enumerate(inside)]

    def learn(i: int) -> None:
        own = tiny_model()
        optimizer = torch.optim.SGD(own.parameters(), lr=0.01)
        with memory_worker(inside[i // 2], f"w{i}", own, optimizer):
            train_steps(own, optimizer, 48, seed=i)

    in_threads(*(lambda i=i: learn(i) for i in range(WORKERS)))
    in_threads(*(cluster.stop for cluster in clusters))
    agreed = {name: anchor for store in above.service.stores for name, anchor in store.params().items()}
    held = [cluster._worker._replica.anchors for cluster in clusters]
    assert any(all(torch.equal(one[name], anchor) for name, anchor in agreed.items()) for one in held), (
        "the last has it"
    )
    moved = [store.newest.version for server in (above, *inside) for store in server.service.stores]
    assert min(moved) >= 3, moved
    # T of every cluster is what the layer above has agreed on: all that its members learned has gone up.
    for cluster in clusters:
        for name, target in cluster._shadow.newest.items():
            torch.testing.assert_close(target, cluster._worker._replica.anchors[name], rtol=0, atol=1e-6)
    for server in (*inside, above):
        server.service.stop()


def test_what_is_agreed_above_is_handed_down_fragment_by_fragment_as_it_arrives() -> None:
    """Each of three fragments is in the members' model before the next one is offered above."""
    model = tiny_model().state_dict()
    above = DiLoCoServer(model, 1, **{**ACROSS, "outer_lr": 0.5, "codec": "fp32", "num_fragments": 3})
    inside = DiLoCoServer(model, 1, **{**INSIDE, "codec": "fp32", "num_fragments": 3})
    for server in (above, inside):
        server.service.start()
    cluster = make_cluster(inside, above, "c0", every=3)
    happened: list[tuple[str, Any]] = []
    move, below = cluster.below.move, cluster.below

    def moves(serial: int, fragments: Any, moved: Any) -> None:
        move(serial, fragments, moved)
        happened.append(("moved", tuple(fragments)))

    below.move = moves  # type: ignore[method-assign]
    above.service.events.add(
        lambda event: (
            happened.append(("agreed", event.agreement.fragment)) if isinstance(event, VersionPublished) else None
        )
    )
    own = tiny_model()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.01)
    with memory_worker(inside, "w", own, optimizer):
        wait_until(lambda: cluster.worker is not None)
        train_steps(own, optimizer, 48, seed=0)
        wait_until(lambda: len(happened) >= 6)
        seen = list(happened)
    in_threads(cluster.stop)
    first = seen.index(("agreed", 0))
    assert seen[first : first + 6] == [
        step for fragment in range(3) for step in (("agreed", fragment), ("moved", (fragment,)))
    ], seen
    for server in (inside, above):
        server.service.stop()


def test_members_take_their_next_steps_from_what_was_agreed_above() -> None:
    """A cluster of one beside another: after each interval its worker sees the other's steps at once."""
    above = make_server(2, {**ACROSS, "codec": "fp32", "outer_lr": 2.0, "heartbeat_timeout_s": 60.0})
    assert steps_of_the_other(above, wait_s=60.0) == [[8.0, 16.0, 24.0, 32.0]] * 2
    assert cells(above) == [32.0, 32.0, 0.0, 0.0]
    kill(above)


def test_members_that_do_not_wait_take_their_next_steps_without_what_was_agreed_above() -> None:
    above = make_server(2, SUM)
    seen = steps_of_the_other(above, wait_s=0.0, cut_at_first=True)
    assert [each[0] for each in seen] == [0.0, 0.0]
    assert cells(above) == [32.0, 32.0, 0.0, 0.0]
    kill(above)


def steps_of_the_other(above: DiLoCoServer, *, wait_s: float, cut_at_first: bool = False) -> list[list[float]]:
    """Two clusters of one worker train four intervals of eight steps. What each has of the other's steps after each
    interval. `cut_at_first`: nothing passes to the server above during the first."""
    servers = [make_server(1, INSIDE, codec="fp32") for _ in range(2)]
    ways = [Severable(above.service) for _ in servers]
    clusters = [
        Cluster(server, "memory:1", f"c{i}", every=2, wait_s=wait_s, transport=ways[i], patience=EAGER).start()
        for i, server in enumerate(servers)
    ]
    seen: list[list[float]] = [[], []]
    meet = threading.Barrier(2)

    def work(i: int) -> None:
        model = Ledger(WORKERS)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with memory_worker(servers[i], f"w{i}", model, optimizer):
            wait_until(lambda: clusters[i].worker is not None)
            meet.wait(60.0)
            ways[i].is_cut = cut_at_first
            for _ in range(4):
                count(model, optimizer, i, 8)
                seen[i].append(model.cells[1 - i].item())
                ways[i].is_cut = False
        clusters[i].stop()

    in_threads(lambda: work(0), lambda: work(1))
    for server in servers:
        kill(server)
    return seen
