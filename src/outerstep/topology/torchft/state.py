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

from ...types import Manifest
from ..protocol import Deltas

FORMAT = 1
NOTHING = -1  # instead of a fragment: a replica that joins, or has nothing to contribute, only gets the mean


class RunSnapshot(msgspec.Struct):
    """By fragment; `counted`: the sequence of each replica's contribution to its last round."""

    run_id: str
    versions: list[int]
    hashes: list[str]
    counted: list[dict[str, int]]

    @classmethod
    def fresh(cls, fragments: int) -> RunSnapshot:
        return cls("", [0] * fragments, [""] * fragments, [{} for _ in range(fragments)])

    @property
    def turn(self) -> int:
        """The fragment that is exchanged next: all take them in the same order, whenever each is due."""
        return self.versions.index(min(self.versions))

    @property
    def digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode([self.run_id, self.versions, self.hashes]))

    def counts(self, fragment: int, instance: str, sequence: int) -> bool:
        return self.counted[fragment].get(instance) == sequence


class ReplicaOffer(msgspec.Struct, frozen=True):
    """`instance` tells a restarted replica from what it was; `terms` is a hash of the run that it means. `fresh`: it
    has no state at all. `trouble`: why it cannot take part."""

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
    snapshot: RunSnapshot, anchors: Mapping[str, Tensor], momentum: Mapping[str, Tensor], worker: dict[str, Any]
) -> dict[str, Any]:
    """All that a replica needs to go on from here, in copies: the training does not stand still meanwhile. What this
    replica's codec still owes is not among it: it sends that itself, and nobody may send it twice."""
    return {
        "format": FORMAT,
        "standing": msgspec.json.encode(snapshot).decode(),
        "anchors": copies(anchors),
        "momentum": copies(momentum),
        "worker": worker,
    }


def read_snapshot(state: Mapping[str, Any]) -> RunSnapshot:
    if state.get("format") != FORMAT:
        raise RuntimeError(f"a state to heal from has format {FORMAT}, got {state.get('format')!r}: another version")
    return msgspec.json.decode(state["standing"], type=RunSnapshot)


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """In host memory of their own."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def held_here(manifest: Manifest, tensors: Mapping[str, Tensor]) -> Manifest:
    """The manifest of what this process holds: of sharded tensors, its rows."""
    parameters = tuple(
        msgspec.structs.replace(spec, shape=tuple(tensors[spec.name].shape)) for spec in manifest.parameters
    )
    return msgspec.structs.replace(manifest, parameters=parameters)
