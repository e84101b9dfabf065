"""One small adapter per topology: how a run of it is opened, how a member of it is made, and what cannot happen in it.

What cannot happen is named with its reason, and shown: `shows` proves that it is refused or absent.
"""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from contract.member import CELLS, Member, Rank, each_until
from outerstep.core.outer import OuterRule
from outerstep.errors import ExchangeFailed, NotFinite, PeerLost, WorkerError
from outerstep.server import DiLoCoServer
from outerstep.topology.allreduce.peers import Peers
from outerstep.topology.allreduce.topology import AllReduceSettings, AllReduceTopology
from outerstep.topology.gossip.node import Node, NodeSettings
from outerstep.topology.gossip.pairs import PairsTopology
from outerstep.topology.gossip.terms import GossipWishes
from outerstep.topology.gossip.topology import GossipSettings, GossipTopology
from outerstep.topology.group.sharded import ShardedTopology, Shards
from outerstep.topology.group.topology import GroupTopology
from outerstep.topology.leadership import ClusterSettings, KeptRecord, Leadership, MakeLeader
from outerstep.topology.payload import Memory, Rooms
from outerstep.topology.protocol import Topology
from outerstep.topology.server.topology import ServerTopology
from outerstep.wire.http_transport import HttpTransport
from outerstep.wire.memory import MemoryTransport
from outerstep.wire.transport import Transport
from support import EAGER, in_threads, wait_until
from thread_ranks import ThreadRanks

PLAIN = OuterRule(lr=1.0, momentum=0.0, nesterov=False)  # θ′ = θ − mean(Δ)
NAMES = "abcd"


class Run:
    """A run that members can be made of. `deadline_s`: a round closes so long after its first contribution, with those
    who have come; `quorum`: or with so many."""

    def __init__(self, members: int, deadline_s: float | None, quorum: int | None, folder: Path) -> None:
        self.members, self.deadline_s, self.quorum, self.folder = members, deadline_s, quorum, folder
        self.first = members  # so many begin it together

    def member(self, number: int, saved: Sequence[Mapping[str, Any]] | None = None) -> Member:
        """Member a, b, c …; or another start of it, from what it saved."""
        ranks = self.ranks(number)
        for index, rank in enumerate(ranks):
            rows = rank.rows.stop - rank.rows.start
            rank.anchors = {"cells": torch.full((rows,), torch.nan)}
            if saved is not None:
                rank.anchors = {name: value.clone() for name, value in saved[index]["anchors"].items()}
                rank.state = saved[index]["topology"]
        return Member(NAMES[number], ranks)

    def ranks(self, number: int) -> list[Rank]:
        raise NotImplementedError

    def tensors(self, number: int) -> dict[str, Tensor]:
        """What the model of a member holds when it comes: a's is what the run begins with, if nobody else says."""
        return {"cells": torch.full((CELLS,), 10.0 * number)}

    def let_in(self, member: Member, there: Sequence[Member]) -> None:
        """One more enters a run that goes on."""
        member.enter()

    def all_in(self, members: Sequence[Member]) -> None:
        """Wait until the next round counts on all of them."""

    def end(self, member: Member) -> None:
        """Its process is gone, without a word."""

    def close(self) -> None: ...


class Adapter:
    """`cannot`: by sentence, why it cannot happen here. `meets_at_exchanges`: who comes is let in at an exchange of the
    others. `restarts_together`: the members are started again all or none. `has_one_anchor`: all members agree on
    one."""

    name = ""
    run: Callable[..., Run]
    cannot: ClassVar[Mapping[str, str]] = {}
    meets_at_exchanges = False
    restarts_together = False
    has_one_anchor = True
    marks: tuple[Any, ...] = ()

    @contextmanager
    def open(
        self, folder: Path, members: int = 2, *, deadline_s: float | None = None, quorum: int | None = None
    ) -> Iterator[Run]:
        run = self.run(members, deadline_s, quorum, folder)
        try:
            yield run
        finally:
            run.close()

    def shows(self, sentence: str, folder: Path) -> None:
        """That what it claims impossible is refused, or absent."""
        raise NotImplementedError(f"{self.name} must show that {sentence!r} cannot happen")


# --- a server ---------------------------------------------------------------------------------------------------------


class ServerRun(Run):
    more: ClassVar[Mapping[str, Any]] = {"codec": "fp32"}

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.server = DiLoCoServer(
            {"cells": torch.zeros(CELLS)}, self.members, sync_every=1,
            port=0, heartbeat_timeout=0.0, round_deadline_s=self.deadline_s, quorum=self.quorum, min_workers=1,
            norm_screen=0.0, insecure=True, **{"outer_lr": 1.0, "outer_momentum": 0.0, **self.more},
        )  # fmt: skip
        self.server.start()

    def close(self) -> None:
        self.server.stop()

    def transport(self) -> Transport:
        return MemoryTransport(self.server.service)

    def way(self, number: int, instance: str | None = None) -> ServerTopology:
        return ServerTopology(
            self.transport(),
            worker_id=NAMES[number],
            instance=instance or secrets.token_hex(8),
            hostname="test",
            patience=EAGER,
        )

    def ranks(self, number: int) -> list[Rank]:
        return [Rank(lambda anchors: self.way(number))]


class HttpRun(ServerRun):
    def transport(self) -> Transport:
        return HttpTransport(f"http://{self.server.address.removeprefix('http://')}")


class GroupRun(ServerRun):
    """Every member is a job of two ranks that hold the same."""

    def ranks(self, number: int) -> list[Rank]:
        meeting, table = threading.Barrier(2), [None] * 2
        ranks = [ThreadRanks(rank, meeting, table) for rank in range(2)]
        return [
            Rank(lambda anchors, r=r: GroupTopology(r, self.way(number) if r.rank == 0 else None))  # type: ignore[misc]
            for r in ranks
        ]


class ShardedRun(ServerRun):
    """Every member is a job of two ranks that hold half of the rows each."""

    def ranks(self, number: int) -> list[Rank]:
        meeting, table = threading.Barrier(2), [None] * 2
        instance, half = secrets.token_hex(8), CELLS // 2

        def make(rank: ThreadRanks) -> Callable[[dict[str, Tensor]], Topology]:
            shards = Shards(2, rank.rank, frozenset({"cells"}))
            return lambda anchors: ShardedTopology(rank, self.way(number, instance), shards)

        ranks = [ThreadRanks(rank, meeting, table) for rank in range(2)]
        return [Rank(make(r), slice(r.rank * half, (r.rank + 1) * half)) for r in ranks]


class Server(Adapter):
    name, run = "server", ServerRun


class Http(Adapter):
    name, run = "server over HTTP", HttpRun


class Group(Adapter):
    name, run = "group", GroupRun


class Sharded(Adapter):
    name, run = "sharded group", ShardedRun
    cannot: ClassVar = {
        "is refused": "ranks that hold different rows give nothing up alone: a contribution without use is an error on "
        "all of them"
    }

    def shows(self, sentence: str, folder: Path) -> None:
        with self.open(folder, 1) as run:
            member = run.member(0).enter().learn(0, float("nan"))
            member.begin()
            with pytest.raises(ExchangeFailed) as caught:
                member.finish(reload=True)
            assert isinstance(caught.value.__cause__, NotFinite)


# --- ranks ------------------------------------------------------------------------------------------------------------


class ThreadLinks:
    """What carries bytes between ranks that are threads."""

    memory, pinned, device = Memory(), False, torch.device("cpu")

    def __init__(self, rank: int, size: int, boxes: dict[tuple[int, int], queue.SimpleQueue[Tensor]]) -> None:
        self.bytes_sent = self.bytes_received = 0
        rooms = Rooms(self.device, self.memory)
        self.take, self.give_back = rooms.take, rooms.give_back
        self._rank, self._size, self._boxes = rank, size, boxes

    def swap(self, out: Sequence[tuple[int, Tensor]], into: Sequence[tuple[int, Tensor]]) -> None:
        for rank, data in out:
            self._boxes[self._rank, rank].put(data.clone())
            self.bytes_sent += data.nbytes
        for rank, data in into:
            data.copy_(self._boxes[rank, self._rank].get(timeout=30))
            self.bytes_received += data.nbytes

    def spread(self, data: Tensor) -> None:
        others = [(rank, data) for rank in range(1, self._size)]
        self.swap(others if self._rank == 0 else [], [(0, data)] if self._rank else [])


class AllReduceRun(Run):
    outer: ClassVar[OuterRule] = PLAIN
    cluster: ClassVar[ClusterSettings | None] = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._starts = 0
        self.begin_anew()

    def begin_anew(self) -> None:
        """All ranks are started again: they meet at a store of their own."""
        self._store, self._starts = HashStore(), self._starts + 1
        pairs = [(one, other) for one in range(self.members) for other in range(self.members)]
        self._boxes: dict[tuple[int, int], queue.SimpleQueue[Tensor]] = {pair: queue.SimpleQueue() for pair in pairs}

    def ranks(self, number: int) -> list[Rank]:
        store, boxes = self._store, self._boxes

        def make(anchors: dict[str, Tensor]) -> Topology:
            peers = Peers(store, number, self.members, name="contract", timeout_s=2.0)
            return AllReduceTopology(
                worker_id=NAMES[number],
                hostname="test",
                tensors=self.tensors(number),
                anchors=anchors,
                settings=AllReduceSettings(self.outer, "equal", timeout_s=2.0, on_divergence="repair"),
                peers=peers,
                links=ThreadLinks(number, self.members, boxes),  # type: ignore[arg-type]
                cluster=self.cluster,
            )

        return [Rank(make)]


class QuietLeader:
    """Has joined a layer above that never agrees on anything."""

    def __init__(self, leadership: Leadership) -> None:
        leadership.keep(leadership.term, KeptRecord(torch.ones(1, dtype=torch.uint8)))
        leadership.joined(leadership.term, overtaken=False)
        leadership.release(leadership.term)

    def published(self, target: Mapping[str, Tensor], versions: Mapping[int, int]) -> None: ...

    def round_closed(self, fragment: int = 0) -> None: ...

    def stop(self) -> None: ...

    def stand_down(self, why: str) -> None: ...


def lead_quietly(leadership: Leadership, members: object, manifest: object) -> MakeLeader:
    return lambda target, is_new: QuietLeader(leadership)


class RankClusterRun(AllReduceRun):
    cluster = ClusterSettings(wait_s=30.0, terms={"cluster": "east"}, lead=lead_quietly)


class AllReduce(Adapter):
    name, run, restarts_together = "all-reduce", AllReduceRun, True
    cannot: ClassVar = {
        "joins later": "the ranks of a process group are fixed when it is made: a run does not begin without one, and "
        "one that comes later finds it over",
        "misses a round": "a round is a collective of all ranks: it waits for one that is away, and then ends the run",
        "is late": "a round is a collective of all ranks: none of them can come after it",
        "is refused": "the mean needs everybody's contribution: NaN from one rank ends the run for all",
        "leaves": "a round is a collective of all ranks: one that has left ends the run of the others",
        "carries on": "no server keeps a contribution for a rank that is away",
    }

    def shows(self, sentence: str, folder: Path) -> None:
        with self.open(folder) as run:
            a, b = run.member(0), run.member(1)
            if sentence == "joins later":
                with pytest.raises(PeerLost, match="rank 1 did not come"):
                    a.enter()
                with pytest.raises(PeerLost, match=r"rank 0.* failed: PeerLost"):
                    b.enter()
                return
            in_threads(a.enter, b.enter)
            if sentence == "leaves":
                b.leave()
                with pytest.raises(PeerLost, match="has left the run"):
                    a.exchange()
            elif sentence in ("misses a round", "is late"):
                a.begin()
                with pytest.raises(PeerLost, match="did not come"):
                    a.finish()
            elif sentence == "is refused":
                b.learn(0, float("nan"))
                for error in in_threads(lambda: failure_of(a.exchange), lambda: failure_of(b.exchange)):
                    assert isinstance(error, WorkerError)
                    assert "NaN or Inf" in str(error)
            else:
                in_threads(a.begin, b.begin)
                nothing_is_packed(a, b)
                in_threads(a.finish, b.finish)


class RankCluster(AllReduce):
    name, run = "all-reduce in a cluster", RankClusterRun


# --- torchft ----------------------------------------------------------------------------------------------------------


class NoInner:
    """A member of the contract has no optimizer."""

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: Mapping[str, Any]) -> tuple[int, int, int]:
        return 0, 0, 0


class TorchftRun(Run):
    outer: ClassVar[OuterRule] = PLAIN

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        from torchft.coordination import LighthouseServer

        self.first = self.least = min(self.members, 2)
        self._lighthouse = LighthouseServer(
            bind="127.0.0.1:0", min_replicas=self.least, join_timeout_ms=5000, quorum_tick_ms=20,
            heartbeat_timeout_ms=2000,
        )  # fmt: skip

    def close(self) -> None:
        self._lighthouse.shutdown()

    def let_in(self, member: Member, there: Sequence[Member]) -> None:
        """It is healed at a quorum of the others; they exchange together, as none of them finds a quorum alone."""
        is_in = threading.Event()

        def be_there() -> None:
            while not is_in.is_set():
                in_threads(*[one.exchange for one in there])

        def come() -> None:
            try:
                member.enter()
            finally:
                is_in.set()

        in_threads(be_there, come)

    def all_in(self, members: Sequence[Member]) -> None:
        """The lighthouse closes a quorum as soon as those of the last one are there again, so that a newcomer may miss
        it; and a replica alone finds none."""
        if len(members) > self.least:
            names = {member.name for member in members}
            each_until(lambda: all(member.met == names for member in members), members)

    def ranks(self, number: int) -> list[Rank]:
        from outerstep.topology.torchft.topology import TorchftSettings, TorchftTopology

        def make(anchors: dict[str, Tensor]) -> Topology:
            return TorchftTopology(
                worker_id=NAMES[number],
                hostname="test",
                instance=secrets.token_hex(8),
                tensors=self.tensors(number),
                anchors=anchors,
                settings=TorchftSettings(
                    lighthouse=self._lighthouse.address().split("//")[-1],
                    outer=self.outer,
                    weight_by="equal",
                    min_replicas=self.least,
                    backend="gloo",
                    quorum_timeout_s=20.0,
                    transfer_timeout_s=20.0,
                    join_timeout_s=60.0,
                    give_up_after_s=60.0,
                    on_divergence="repair",
                ),
                inner=NoInner(),
            )

        return [Rank(make)]

    def end(self, member: Member) -> None:
        member.leave("killed")


class Torchft(Adapter):
    name, run, meets_at_exchanges = "torchft", TorchftRun, True
    marks = (pytest.mark.slow,)
    cannot: ClassVar = {
        "is late": "a quorum counts those who are in it: a replica that comes after it brings its steps to the next",
        "carries on": "no server keeps a contribution for a replica that is away",
    }

    def shows(self, sentence: str, folder: Path) -> None:
        with self.open(folder) as run:
            a, b = run.member(0), run.member(1)
            in_threads(a.enter, b.enter)
            if sentence == "is late":
                agreed = in_threads(a.learn(0).exchange, b.learn(1).exchange)
                assert all(one.counted_in <= one.version for one in agreed)
            else:
                in_threads(a.begin, b.begin)
                nothing_is_packed(a, b)
                in_threads(a.finish, b.finish)


# --- peers ------------------------------------------------------------------------------------------------------------


class GossipRun(Run):
    kind: type[GossipTopology] | type[PairsTopology] = GossipTopology
    pattern = "all"
    more: ClassVar[Mapping[str, Any]] = {"min_peers": 1}  # wishes of the founder

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.nodes: dict[str, Node] = {}
        self._founded = threading.Event()

    def ranks(self, number: int) -> list[Rank]:
        name = NAMES[number]

        def make(anchors: dict[str, Tensor]) -> Topology:
            founds = not self._founded.is_set() and number == 0
            if not founds:
                assert self._founded.wait(60)
            others = [node.join_string for peer, node in self.nodes.items() if peer != name]
            settings = NodeSettings(
                peer_id=name, listen="127.0.0.1:0", join=() if founds else tuple(others[:1]), insecure=True,
                beat_every_s=0.2, folder=str(self.folder / name),
            )  # fmt: skip
            node = self.nodes[name] = Node(settings)
            wishes = GossipWishes(
                outer_lr=1.0, outer_momentum=0.0, nesterov=False, attackers=0, heartbeat_timeout_s=60.0,
                round_deadline_s=self.deadline_s, pattern=self.pattern, **self.more,  # type: ignore[arg-type]
            ) if founds else GossipWishes(own_outer=self.more.get("own_outer"))  # fmt: skip
            return self.kind(
                node,
                tensors=self.tensors(number),
                anchors=anchors,
                settings=GossipSettings(wishes, 60.0, leave_patience_s=2.0, announce=lambda node: self._founded.set()),
            )

        return [Rank(make)]

    def all_in(self, members: Sequence[Member]) -> None:
        names = {member.name for member in members}
        for member in members:
            node = self.nodes[member.name]
            wait_until(lambda node=node: {m.peer_id for m in node.peer.state.members} >= names)  # type: ignore[misc]

    def end(self, member: Member) -> None:
        self.nodes[member.name].stop()

    def close(self) -> None:
        for node in self.nodes.values():
            node.stop()


class PairsRun(GossipRun):
    kind, pattern = PairsTopology, "exponential"


class Gossip(Adapter):
    name, run = "gossip", GossipRun
    cannot: ClassVar = {
        "is late": "a round that is decided stays as it is: what comes after it is not counted, and goes into the next",
        "carries on": "no server keeps a contribution for a peer that is away",
    }

    def shows(self, sentence: str, folder: Path) -> None:
        with self.open(folder) as run:
            a, b = run.member(0), run.member(1)
            in_threads(a.enter, b.enter)
            run.all_in([a, b])
            if sentence == "is late":
                agreed = in_threads(a.learn(0).exchange, b.learn(1).exchange)
                assert all(one.counted_in <= one.version for one in agreed)
            else:
                in_threads(a.begin, b.begin)
                nothing_is_packed(a, b)
                in_threads(a.finish, b.finish)


class Pairs(Gossip):
    name, run, has_one_anchor = "pairs", PairsRun, False
    cannot: ClassVar = {
        **Gossip.cannot,
        "misses a round": "there are no rounds of all: a peer whose partner does not come steps alone",
        "heals": "anchors differ from peer to peer: there is none that all agree on, so none that is wrong; what two "
        "of them differ by is averaged",
    }

    def shows(self, sentence: str, folder: Path) -> None:
        if sentence not in ("misses a round", "heals"):
            super().shows(sentence, folder)
            return
        with self.open(folder, deadline_s=0.5) as run:
            a, b = run.member(0), run.member(1)
            in_threads(a.enter, b.enter)
            run.all_in([a, b])
            if sentence == "heals":
                b.damage()
                in_threads(a.exchange, b.exchange)
                assert torch.equal(a.anchor, b.anchor)
                assert a.anchor.tolist() == [0.5] + [0.0] * (CELLS - 1)
                return
            assert a.learn(0).exchange().counted, "b does not come"
            assert a.version == 1
            assert a.anchor.tolist() == [1.0] + [0.0] * (CELLS - 1)


def failure_of(job: Callable[[], object]) -> BaseException:
    try:
        job()
    except WorkerError as error:
        return error
    raise AssertionError("it raised nothing")


def nothing_is_packed(*members: Member) -> None:
    """Whatever is under way is lost with the process: its steps are unsent."""
    for member in members:
        for rank in member.ranks:
            assert rank.ticket is not None
            assert rank.ticket.pack() == {}
            assert rank.topology.reopen(0, {}) is None


ADAPTERS: tuple[Adapter, ...] = (
    Server(),
    Http(),
    Group(),
    Sharded(),
    AllReduce(),
    RankCluster(),
    Torchft(),
    Gossip(),
    Pairs(),
)
