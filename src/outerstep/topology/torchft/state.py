"""What the replicas of a torchft run have in common, and what they tell each other of it.

RunSnapshot which version of each fragment, with which hash, and who is in it: the same everywhere, or something is
            wrong. From it follows whose turn is next, and whether a contribution that nobody confirmed counted.
ReplicaOffer       what a replica brings to a quorum
Snapshots   the part of a healing state that only the training thread can copy
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
import xxhash
from torch import Tensor

from ...coordination.autoconfig.collected import ACCELERATOR, BACKENDS
from ...coordination.autoconfig.members import backend_for
from ...coordination.autoconfig.state import ClusterState
from ...coordination.layers.leadership import MemberInSight, who_leads
from ...coordination.shared_sub_leases import LeaseNews
from ...types import InfoValue, LeaseStatement, Manifest, Trained
from ..cluster_part import ClusterPart
from ..leadership import AsideKind
from ..protocol import Deltas
from ..update import copies
from .process_groups import Backend

FORMAT = 1
REMEMBERED = 1024  # contributors, by fragment: more than ever meet
NOTHING = -1  # instead of a fragment: a replica that joins, or has nothing to contribute, only gets the mean


class RunSnapshot(msgspec.Struct):
    """By fragment; `counted`: by instance of a replica, the sequence of its last contribution that counted. `data`: the
    lease table (coordination/shared_leases.py), and its digest."""

    run_id: str
    versions: list[int]
    hashes: list[str]
    counted: list[dict[str, int]]
    cluster: ClusterPart | None = None
    data: dict[str, Any] | None = None
    data_digest: str = ""

    @classmethod
    def fresh(cls, fragments: int) -> RunSnapshot:
        return cls("", [0] * fragments, [""] * fragments, [{} for _ in range(fragments)])

    @property
    def turn(self) -> int:
        """The fragment that is exchanged next: all take them in the same order, whenever each is due. (What came from a
        layer above was nobody's turn.)"""
        moves = self.cluster.moves if self.cluster is not None else [0] * len(self.versions)
        rounds = [version - moved for version, moved in zip(self.versions, moves, strict=True)]
        return rounds.index(min(rounds))

    @property
    def digest(self) -> str:
        agreed = [self.run_id, self.versions, self.hashes, *([] if self.cluster is None else [self.cluster])]
        agreed += [self.data_digest] if self.data_digest else []
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode(agreed))

    def counts(self, fragment: int, instance: str, sequence: int) -> bool:
        return self.counted[fragment].get(instance, 0) >= sequence


def note_counted(counted: dict[str, int], active: Sequence[ReplicaOffer]) -> dict[str, int]:
    """After a round. The instances that were not in one for longest are forgotten."""
    now = {offer.instance: offer.sequence for offer in active}
    noted = {**{instance: sequence for instance, sequence in counted.items() if instance not in now}, **now}
    return dict(list(noted.items())[-REMEMBERED:])


class ReplicaKinds(msgspec.Struct, frozen=True):
    """What a replica runs on, and what it can speak. `place`: the GPU that its model is on, "" = none."""

    accelerator: str = ""
    backends: tuple[str, ...] = ()
    place: str = ""

    @classmethod
    def told_by(cls, info: Mapping[str, InfoValue], place: str) -> ReplicaKinds:
        backends = tuple(filter(None, str(info.get(BACKENDS, "")).split(",")))
        return cls(str(info.get(ACCELERATOR, "")), backends, place)


class ReplicaOffer(msgspec.Struct, frozen=True):
    """`instance` tells a restarted replica from what it was; `terms` is a hash of the run that it means. `fresh`: it
    has no state at all. `trouble`: why it cannot take part.

    The rest is said in a cluster (leadership.py). `record`: the digest of the leader's record that it holds or, if it
    leads, that all are to hold. `waits`: for what the leader brings. `last`: it is at the end of its training. `leads`:
    and what it brings (`aside`, of so many `size_bytes`, or a move with this `serial` of these `moving` fragments).
    `holds`: the others wait for more to come; `ended`: it has left the layer above. `drain`: why all are to end.
    `term`: how often a leader was chosen, up to this one; of two that think they lead, the last one does. `yields`:
    another may lead from this quorum on; `settled`: also one whose line is faster; `named`: this one, by an
    order. `doubts`: all began from saved states, and what they had not sent then may count above. Every replica tells
    whether it `reaches` the layer above, and how fast (`up_bytes_per_s`); and, for those up there, what its
    `accelerator` is, which `backends` it can speak, which GPU it has (`place`), and where in its life it was
    when it asked for this quorum (`came_from`).

    `data`: what it says of its leased data; `trained`: units that end in its contribution. `dry`: it has none left to
    train, and waits for some; `news`: of the leader, what the layer above says of them."""

    worker_id: str
    label: str
    instance: str
    run_id: str
    terms: str
    joins: bool
    fresh: bool
    digest: str
    fragment: int = NOTHING
    sequence: int = 0
    steps: int = 0
    samples: int = 0
    tokens: int = 0
    trouble: str = ""
    record: str = ""
    waits: bool = False
    last: bool = False
    leads: bool = False
    aside: AsideKind = ""
    size_bytes: int = 0
    serial: int = 0
    moving: tuple[int, ...] = ()
    holds: bool = False
    ended: bool = False
    drain: str = ""
    term: int = 0
    yields: bool = False
    settled: bool = False
    named: str = ""
    doubts: bool = False
    reaches: bool = True
    up_bytes_per_s: float = 0.0
    accelerator: str = ""
    backends: tuple[str, ...] = ()
    place: str = ""
    came_from: str = ""
    data: tuple[LeaseStatement, ...] = ()
    trained: tuple[Trained, ...] = ()
    dry: bool = False
    news: tuple[LeaseNews, ...] = ()


def backend_among(offers: Sequence[ReplicaOffer]) -> Backend:
    """What values travel by in this quorum, where that was left open: NCCL if every replica can speak it and has a GPU
    to itself, all of one vendor; else gloo. All replicas apply it to the same offers."""
    places = [offer.place for offer in offers]
    if "" in places or len(set(places)) < len(places):
        return "gloo"
    clusters = [
        ClusterState(name=offer.worker_id, step_s=1.0, accelerators=(offer.accelerator,), backends=offer.backends)
        for offer in offers
    ]
    return "nccl" if backend_for(clusters) == "nccl" else "gloo"


def leader_among(offers: Sequence[ReplicaOffer]) -> tuple[int, bool]:
    """The rank that leads from this quorum on, and whether it has led before. All replicas apply the same rule
    (coordination/layers/leadership.py) to the same offers. A leader that brings something, or is in the middle of an
    exchange, goes on. Of those that were there before, if there are any: a newcomer knows nothing yet."""
    leading = sorted((rank for rank, offer in enumerate(offers) if offer.leads), key=lambda rank: -offers[rank].term)
    now = offers[leading[0]] if leading else None
    if now is not None and (now.aside or not (now.yields or now.last)):
        return leading[0], True
    known = [rank for rank, offer in enumerate(offers) if not offer.joins] or list(range(len(offers)))
    chosen = who_leads(
        [_in_sight(offers[rank]) for rank in known],
        named=now.named if now is not None else "",
        leading=now.worker_id if now is not None else "",
        compares_lines=now is not None and now.settled,
    )
    if now is not None and chosen == now.worker_id:
        return leading[0], True
    return next(rank for rank in known if offers[rank].worker_id == chosen), False


def _in_sight(offer: ReplicaOffer) -> MemberInSight:
    return MemberInSight(offer.worker_id, offer.reaches, offer.last, offer.up_bytes_per_s)


def odd_ones(digests: Sequence[str]) -> list[int]:
    """The ranks that differ from most; of two that differ, the second."""
    usual = Counter(digests).most_common(1)[0][0]  # of equally many, the first that was met
    return [rank for rank, digest in enumerate(digests) if digest != usual]


class Snapshots:
    """A copy of what the training thread changes at every step, made by itself when somebody asks for it."""

    def __init__(self, make: Callable[[], dict[str, Any]], changed: threading.Condition) -> None:
        """`changed` is notified when one is wanted: the training thread may be waiting there."""
        self._make = make
        self._changed = changed
        self._made: dict[str, Any] | None = None
        self._error: BaseException | None = None
        self.wanted = False

    def ask(self, timeout_s: float) -> dict[str, Any]:
        """From another thread."""
        with self._changed:
            self.wanted = True
            self._changed.notify_all()
            served = self._changed.wait_for(lambda: not self.wanted, timeout_s)
            self.wanted = False
            made, error = self._made, self._error
            self._made = self._error = None
        if not served or made is None:
            why = error or f"the training loop came to no step within {timeout_s:g} s"
            raise RuntimeError(f"the state to heal from could not be copied: {why}") from error
        return made

    def serve(self) -> None:
        """In the training thread, between two steps; costs nothing if nobody asks."""
        if not self.wanted:
            return
        made, error = None, None
        try:
            made = self._make()
        except BaseException as caught:  # noqa: BLE001 - it is the healing that fails of it, not the training
            error = caught
        with self._changed:
            self._made, self._error, self.wanted = made, error, False
            self._changed.notify_all()


class Measured:
    """Deltas that are looked at on their way: are all of them numbers, and of a size that can be added up?"""

    def __init__(self, deltas: Deltas) -> None:
        self._deltas = deltas
        self._squares: dict[torch.device, Tensor] = {}

    def block(self, name: str, start: int, stop: int) -> Tensor:
        block = self._deltas.block(name, start, stop)
        square = torch.dot(block, block)  # while it is in the cache
        self._squares[block.device] = self._squares.get(block.device, torch.zeros((), device=block.device)) + square
        return block

    def device(self, name: str) -> torch.device:
        return self._deltas.device(name)

    def home(self, name: str) -> torch.device:
        return self._deltas.home(name)

    @property
    def squares(self) -> float:
        """Σ Δ²."""
        return sum(float(square) for square in self._squares.values())


def write_state(
    snapshot: RunSnapshot,
    anchors: Mapping[str, Tensor],
    momentum: Mapping[str, Tensor],
    worker: dict[str, Any],
    record: Tensor | None = None,
) -> dict[str, Any]:
    """All that a replica needs to go on from here, in copies: the training does not stand still meanwhile. What this
    replica's codec still owes is not among it: it sends that itself, and nobody may send it twice."""
    return {
        "format": FORMAT,
        "standing": msgspec.json.encode(snapshot).decode(),
        "anchors": copies(anchors),
        "momentum": copies(momentum),
        "worker": worker,
        **({} if record is None else {"record": record.clone()}),
    }


def read_snapshot(state: Mapping[str, Any]) -> RunSnapshot:
    if state.get("format") != FORMAT:
        raise RuntimeError(f"a state to heal from has format {FORMAT}, got {state.get('format')!r}: another version")
    return msgspec.json.decode(state["standing"], type=RunSnapshot)


def held_here(manifest: Manifest, tensors: Mapping[str, Tensor]) -> Manifest:
    """The manifest of what this process holds: of sharded tensors, its rows."""
    parameters = tuple(
        msgspec.structs.replace(spec, shape=tuple(tensors[spec.name].shape)) for spec in manifest.parameters
    )
    return msgspec.structs.replace(manifest, parameters=parameters)
