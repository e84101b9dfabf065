"""What a topology asks of the node that speaks with the other peers (peer/node.py): bytes and decisions, no tensors."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

from ..coordination.gossip import GossipPeer, GossipRules
from ..statements import ChainState, Offered, Round


class Terms(Protocol):
    """Of a run that is there already; `document` is what its founder wrote (gossip_terms.py)."""

    @property
    def run_id(self) -> str: ...

    @property
    def document(self) -> bytes: ...

    @property
    def state(self) -> ChainState: ...


class Callbacks(Protocol):
    """What a node asks of the topology, from threads of its own."""

    def check(self, fragment: int, data: memoryview) -> str:
        """Why this contribution cannot be used; "" if it can."""

    def whole(self, fragment: int) -> tuple[int, memoryview] | None:
        """The newest version that is held and all that belongs to it, as it was at one moment; None: not now."""


class DecidedRound(Protocol):
    """A round whose contributions are here: (peer id, what it said, the bytes), in the order of the ids."""

    @property
    def block(self) -> Round: ...

    @property
    def contributions(self) -> tuple[tuple[str, Offered, memoryview], ...]: ...


class Node(Protocol):
    @property
    def peer_id(self) -> str: ...

    @property
    def join_string(self) -> str: ...

    @property
    def lock(self) -> threading.RLock | threading.Condition | Any:
        """Guards `peer`."""

    @property
    def peer(self) -> GossipPeer: ...

    def ask_terms(self, patience_s: float) -> Terms | None:
        """Of the run that the peers to join, or those remembered, are in. None: there is none, found one."""

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
        """Speak from now on. `terms` None: found a run; `versions`: where a saved state goes on."""

    def belong(self) -> None:
        """The anchors are held: be a member, be awaited."""

    def hold_anchor(self, fragment: int, version: int, anchor_hash: str) -> None: ...

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
        """None: the fragment has moved on from `base_version` meanwhile."""

    def round_of(self, fragment: int, version: int) -> DecidedRound | None:
        """None: not decided, or some of its bytes are not here (yet)."""

    def block_of(self, fragment: int, version: int) -> Round | None:
        """What was decided, whether its bytes are here or not; None: not decided, or too long ago."""

    def is_lost(self, fragment: int, version: int) -> bool:
        """It is decided, but its bytes cannot be had any more."""

    def release(self, fragment: int, version: int) -> None:
        """It was taken over."""

    def fetch_whole(self, fragment: int, *, patience_s: float) -> tuple[int, memoryview]: ...

    def watch(self, timeout_s: float) -> None:
        """Wait until something has changed."""

    def note_progress(self, step: int, steps_per_second: float, loss: float | None) -> None: ...

    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received so far."""

    def leave(self, reason: str, patience_s: float) -> None: ...


__all__ = ["Callbacks", "DecidedRound", "Node", "Terms"]
