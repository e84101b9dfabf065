"""What of the coordinator survives the server's process, as plain data (`Coordinator.remember` and `.resume`).

It is taken when a round is *decided*, in the order of the decisions: what it says holds once every round decided so far
has been carried out, and nothing in it belongs to a round that is still open. A worker that contributed to an open
round keeps what it sent until it holds an agreement, and sends it again under the same key to the restarted server.
"""

from __future__ import annotations

from typing import Any

from msgspec import field

from ...types import Count, Hash, Info, Instance, Key, Label, Manifest, Plain, Plan, Positive, RunId, WorkerId

LEAP = 1_000_000
"""Numbers that only grow continue so much higher after a resume: those given since the snapshot are taken. And a
worker's sequence may grow by no more at a time, so that nobody brings it to its end."""


def changes_in(revision: int) -> int:
    """How often the plan of this revision has been changed: what a person wants to know, without the leaps."""
    return revision % LEAP


class Acceptance(Plain, frozen=True):
    """The last contribution of a worker to a fragment that was accepted: on disk, of closed rounds only. Hash None: not
    known any more."""

    sequence: Positive
    payload_hash: Hash | None
    version: Count


class WorkerRecord(Plain, frozen=True, omit_defaults=True):
    """One worker id: its last start, the starts before it (fenced), by fragment what it has had accepted, the keys that
    it belongs to, the name of the token that it joined with, and what it tells of itself."""

    instance: Instance
    hostname: Label
    incarnation: Positive
    retired: tuple[Instance, ...]
    accepted: dict[Count, Acceptance]
    keys: tuple[Key, ...] = ()
    token: Label = ""
    info: Info = field(default_factory=dict)


class Remembered(Plain, frozen=True):
    """A coordinator between two rounds. `versions` is per fragment. `totals` and `facts`: numbers, and JSON."""

    run_id: RunId
    plan: Plan
    versions: tuple[Count, ...]
    ledger: dict[WorkerId, WorkerRecord]
    totals: dict[str, int | float]
    facts: dict[str, Any]
    manifest: Manifest | None = None  # None = as it was; it changes only while it is being named (naming.py)
