"""Nodes over real sockets with tiny payloads, for tests: a topology that counts instead of training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outerstep.coordination.gossip import GossipRules
from outerstep.coordination.gossip.ballot import TurnTimeouts
from outerstep.digest import data_hash
from outerstep.events import Event
from outerstep.topology.gossip.node import DecidedRound, Node, NodeSettings, Terms
from support import wait_until

RULES = GossipRules(min_peers=2, heartbeat_timeout_s=1.5, pace=TurnTimeouts(first_s=0.6, more_s=0.3, most_s=3.0))
SIZES = (64, 40)
BEAT_S = 0.1
SHORT = 30.0


class Adding:
    """The simplest topology: a fragment's anchor is a row of bytes, an agreement adds every contribution to it."""

    def __init__(self, sizes: tuple[int, ...] = SIZES) -> None:
        self.lock = threading.Lock()
        self.versions = [0] * len(sizes)
        self.anchors = [bytes(size) for size in sizes]
        self.refuse: Callable[[memoryview], str] = lambda data: ""

    def check(self, fragment: int, data: memoryview) -> str:
        return self.refuse(data)

    def snapshot(self, fragment: int) -> tuple[int, memoryview] | None:
        with self.lock:
            return self.versions[fragment], memoryview(self.anchors[fragment])

    def most_snapshot_bytes(self, fragment: int) -> int:
        return len(self.anchors[fragment])

    def hash(self, fragment: int) -> str:
        return data_hash([self.anchors[fragment]])

    def adopt(self, fragment: int, version: int, anchor: bytes) -> None:
        with self.lock:
            self.versions[fragment], self.anchors[fragment] = version, anchor

    def add(self, fragment: int, decided: DecidedRound) -> None:
        total = list(self.anchors[fragment])
        for _, _, data in decided.contributions:
            total = [(a + b) % 256 for a, b in zip(total, data, strict=True)]
        self.adopt(fragment, decided.block.version, bytes(total))


class Peer:
    """A node and the topology above it. Everything is done by hand, in the thread of the test."""

    def __init__(self, name: str, *, join: tuple[str, ...] = (), rules: GossipRules = RULES, **settings: Any) -> None:
        self.name, self.rules = name, rules
        self.topology = Adding()
        chosen = {"listen": "127.0.0.1:0", "beat_every_s": BEAT_S, "part_size_bytes": 16, **settings}
        self.events: list[Event] = []
        self.node = Node(NodeSettings(peer_id=name, join=join, **chosen), event_sink=self.events.append)

    def found(self) -> Peer:
        assert self.node.ask_terms(SHORT) is None
        self.begin(None)
        self.hold_all()
        self.node.belong()
        return self

    def join(self) -> Peer:
        """Up to where it is a member."""
        terms = self.node.ask_terms(SHORT)
        assert terms is not None
        assert terms.document == b"terms"
        self.begin(terms)
        self.heal()
        self.node.belong()
        wait_until(lambda: self.node.peer.is_member)
        return self

    def begin(self, terms: Terms | None) -> None:
        self.node.begin(b"terms", self.rules, SIZES, self.topology, terms=terms)

    def heal(self) -> None:
        """Take every fragment whole from the others."""
        for fragment in range(len(SIZES)):
            version, data = self.node.fetch_snapshot(fragment, patience_s=SHORT)
            self.topology.adopt(fragment, version, bytes(data))
        self.hold_all()

    def hold_all(self) -> None:
        for fragment in range(len(SIZES)):
            self.node.hold_anchor(fragment, self.topology.versions[fragment], self.topology.hash(fragment))

    def offer(self, fragment: int, value: int) -> None:
        said = self.node.offer(
            fragment,
            memoryview(bytes([value]) * SIZES[fragment]),
            base_version=self.topology.versions[fragment],
            base_hash=self.topology.hash(fragment),
            steps=1,
        )
        assert said is not None

    def take(self, fragment: int) -> DecidedRound:
        """The round after what it holds, once it is decided and here."""
        version = self.topology.versions[fragment] + 1
        found: list[DecidedRound] = []

        def is_here() -> bool:
            decided = self.node.round_of(fragment, version)
            found.extend([decided] if decided is not None else [])
            return bool(found)

        wait_until(is_here)
        self.topology.add(fragment, found[0])
        self.node.release(fragment, version)
        self.node.hold_anchor(fragment, version, self.topology.hash(fragment))
        return found[0]


def start_peers(count: int, folder: Path | None = None, **settings: Any) -> list[Peer]:
    """`count` members of one run: "a" founds it, each other joins through the one before."""
    peers: list[Peer] = []
    for name in "abcdefgh"[:count]:
        own = {**settings, "folder": str(folder / name)} if folder is not None else settings
        if not peers:
            peers.append(Peer(name, **own).found())
        else:
            peers.append(Peer(name, join=(peers[-1].node.join_string,), **own).join())
    wait_until(lambda: all(len(peer.node.peer.state.members) == count for peer in peers))
    return peers


def stop_peers(peers: list[Peer]) -> None:
    for peer in peers:
        peer.node.stop()


def agree(peers: list[Peer], fragment: int = 0) -> list[DecidedRound]:
    """One round that all of them contribute to and take over."""
    for i, peer in enumerate(peers):
        peer.offer(fragment, i + 1)
    return [peer.take(fragment) for peer in peers]
