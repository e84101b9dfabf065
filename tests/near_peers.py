"""Peers without sockets: a node that speaks with the others of its `Neighbourhood` by direct calls.

It has peer/node.py's surface and the real decisions (coordination/gossip); bytes are handed over, nothing is kept on
disk. A test can silence a peer, cut it off, or make it lie.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from outerstep.coordination.gossip import GossipPeer, GossipRules, Keepsake, chain
from outerstep.statements import ChainState, Member, Offered, Round, statement_of
from outerstep.topology.peering import Callbacks, Terms

PUMP_S = 0.01


@dataclass(frozen=True)
class NearTerms:
    run_id: str
    document: bytes
    state: ChainState


@dataclass(frozen=True)
class NearRound:
    block: Round
    contributions: tuple[tuple[str, Offered, memoryview], ...]


@dataclass
class Neighbourhood:
    nodes: list[NearNode] = field(default_factory=list)
    cut: set[frozenset[str]] = field(default_factory=set)  # pairs that do not hear each other

    def add(self, peer_id: str, *, founds: bool = False) -> NearNode:
        return NearNode(self, peer_id, founds=founds)

    def reach(self, one: NearNode) -> list[NearNode]:
        return [
            other
            for other in self.nodes
            if other is not one and other.is_alive and frozenset((one.peer_id, other.peer_id)) not in self.cut
        ]

    def close(self) -> None:
        for node in self.nodes:
            node.die()


class NearNode:
    def __init__(self, around: Neighbourhood, peer_id: str, *, founds: bool) -> None:
        self.peer_id, self.join_string = peer_id, f"near:{peer_id}"
        self._around, self._founds = around, founds
        self._key = Ed25519PrivateKey.generate()
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self.is_alive = False
        self.is_silent = False  # it hears, and is not heard
        self.bytes: dict[str, memoryview] = {}
        self.rounds: dict[tuple[int, int], Round] = {}
        self.document = b""
        self.sent = self.received = 0
        self.tampered: Callable[[memoryview], memoryview] = lambda data: data
        self._thread = threading.Thread(target=self._pump, daemon=True)

    # --- what a topology asks ---------------------------------------------------------------------------------------

    def ask_terms(self, patience_s: float) -> NearTerms | None:
        if self._founds:
            return None
        give_up_at = time.monotonic() + patience_s
        while time.monotonic() < give_up_at:
            for other in self._around.reach(self):
                with other.lock:
                    return NearTerms(other.peer.run_id, other.document, other.peer.state)
            time.sleep(PUMP_S)
        raise TimeoutError("nobody is there")

    def begin(
        self,
        document: bytes,
        rules: GossipRules,
        sizes: Sequence[int],
        callbacks: Callbacks,
        *,
        terms: Terms | None,
        versions: Sequence[int] = (),
    ) -> None:
        self.document, self._callbacks = document, callbacks
        member = Member(peer_id=self.peer_id, key=self._key.public_key().public_bytes_raw().hex())
        state = chain.found(member, len(sizes), tuple(versions)) if terms is None else terms.state
        run_id = "near" if terms is None else terms.run_id
        self.peer = GossipPeer(
            run_id, member, self._key.sign, verify, rules, Keepsake(run_id=run_id, state=state), sizes, time.monotonic()
        )
        self.is_alive = True
        self._around.nodes.append(self)
        self._thread.start()

    def belong(self) -> None:
        with self.lock:
            self.peer.belong(time.monotonic())

    def hold_anchor(self, fragment: int, version: int, anchor_hash: str) -> None:
        with self.lock:
            self.peer.hold_anchor(fragment, version, anchor_hash)

    def offer(
        self,
        fragment: int,
        data: memoryview,
        *,
        base_version: int,
        base_hash: str,
        steps: int,
        samples: int = 0,
        tokens: int = 0,
    ) -> Offered | None:
        data = self.tampered(data)
        digest = sha256(data).hexdigest()
        with self.lock:
            if self.peer.state.versions[fragment] != base_version:
                return None
            self.bytes[digest] = data
            return self.peer.offer(
                fragment, digest, base_hash, time.monotonic(), steps=steps, samples=samples, tokens=tokens
            )

    def block_of(self, fragment: int, version: int) -> Round | None:
        with self.lock:
            return self.rounds.get((fragment, version))

    def round_of(self, fragment: int, version: int) -> NearRound | None:
        with self.lock:
            block = self.rounds.get((fragment, version))
            if block is None:
                return None
            found = []
            for signed in block.offers:
                says = statement_of(signed.body)
                assert isinstance(says, Offered)
                if says.digest not in self.bytes:
                    return None
                found.append((self._names[signed.author], says, self.bytes[says.digest]))
            return NearRound(block, tuple(found))

    def is_lost(self, fragment: int, version: int) -> bool:
        with self.lock:
            return self.peer.state.versions[fragment] > version + 1 and self.round_of(fragment, version) is None

    def release(self, fragment: int, version: int) -> None:
        with self.lock:
            for old in [key for key in self.rounds if key[0] == fragment and key[1] < version - 1]:
                del self.rounds[old]

    def fetch_whole(self, fragment: int, *, patience_s: float) -> tuple[int, memoryview]:
        give_up_at = time.monotonic() + patience_s
        while time.monotonic() < give_up_at:
            wholes = [other._callbacks.whole(fragment) for other in self._around.reach(self)]
            here = [whole for whole in wholes if whole is not None]
            if here:
                return max(here, key=lambda whole: whole[0])
            time.sleep(PUMP_S)
        raise TimeoutError("nobody has it")

    def watch(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait(timeout_s)

    def note_progress(self, step: int, steps_per_second: float, loss: float | None) -> None:
        with self.lock:
            self.peer.note_progress(step, steps_per_second, loss)

    def traffic(self) -> tuple[int, int]:
        return self.sent, self.received

    def leave(self, reason: str, patience_s: float) -> None:
        with self.lock:
            self.peer.leave(time.monotonic())
        give_up_at = time.monotonic() + patience_s
        while time.monotonic() < give_up_at:
            with self.lock:
                others = [m for m in self.peer.state.members if m.peer_id != self.peer_id]
                if not self.peer.is_member or not others or len(others) < len(self.peer.state.members) // 2:
                    break
            if not self._around.reach(self):
                break
            time.sleep(PUMP_S)
        self.die()

    # --- the way about ------------------------------------------------------------------------------------------------

    def die(self) -> None:
        """At once."""
        self.is_alive = False

    @property
    def _names(self) -> dict[str, str]:
        known = {key: beat.peer_id for key, beat in self.peer.contacts.items()}
        return known | {self.peer.member.key: self.peer_id}

    def _pump(self) -> None:
        while self.is_alive:
            with self.lock:
                self.peer.tick(time.monotonic())
            if not self.is_silent:
                for other in self._around.reach(self):
                    self._tell(other)
            self._fetch()
            with self._changed:
                while (decision := self.peer.take()) is not None:
                    if isinstance(decision.block, Round):
                        self.rounds[decision.block.fragment, decision.block.version] = decision.block
                self._changed.notify_all()
            time.sleep(PUMP_S)

    def _tell(self, other: NearNode) -> None:
        with other.lock:
            height = other.peer.state.height
        with self.lock:
            said = self.peer.say_to(height)
        with other.lock:
            other.peer.hear(said, time.monotonic())

    def _fetch(self) -> None:
        with self.lock:
            wanted = list(self.peer.wanted())
        for digest in wanted:
            for other in self._around.reach(self):
                data = other.bytes.get(digest)
                if data is not None:
                    good = not self._callbacks.check(
                        0 if len(self.peer.state.versions) == 1 else self._of(digest), data
                    )
                    other.sent += len(data)
                    self.received += len(data)
                    with self.lock:
                        self.bytes[digest] = data
                        self.peer.hold(digest, time.monotonic(), good=good)
                    break

    def _of(self, digest: str) -> int:
        """The fragment that it belongs to."""
        for offer in self.peer._offers:
            if offer.says.digest == digest:
                return offer.says.fragment
        return 0


def verify(key: str, body: bytes, signature: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(signature, body)
    except (InvalidSignature, ValueError):
        return False
    return True
