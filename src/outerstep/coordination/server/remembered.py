"""What the coordinator has to remember to go on after the server was killed, as plain data, and back.

It is taken when a round is *decided*, in the order of the decisions: what it says holds once every round decided so far
has been carried out, and nothing in it belongs to a round that is still open. A worker that contributed to an open
round keeps what it sent until it holds an agreement, and sends it again under the same key to the restarted server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ...types import Count, Hash, Instance, Label, Manifest, Plain, Plan, Positive, RunId, WorkerId
from .membership import Accepted, Member
from .offences import Conduct
from .screen import NormScreen
from .weights import UsualWeight

if TYPE_CHECKING:
    from .coordinator import Coordinator

LEAP = 1_000_000
"""Numbers that only grow go on so much higher after a resume: those given since then are taken."""


class Acceptance(Plain, frozen=True):
    """The last contribution of a worker to a fragment that a closed round holds. Hash None: not known any more."""

    sequence: Positive
    payload_hash: Hash | None
    version: Count


class WorkerRecord(Plain, frozen=True):
    """One worker id: its last start, the starts before it (fenced), and by fragment what it has had accepted."""

    instance: Instance
    hostname: Label
    incarnation: Positive
    retired: tuple[Instance, ...]
    accepted: dict[Count, Acceptance]


class Remembered(Plain, frozen=True):
    """A coordinator between two rounds. `versions` is per fragment. `totals` and `facts`: numbers, and JSON."""

    run_id: RunId
    plan: Plan
    versions: tuple[Count, ...]
    ledger: dict[WorkerId, WorkerRecord]
    totals: dict[str, int | float]
    facts: dict[str, Any]
    manifest: Manifest | None = None  # it never changes: None = as it was


def remember(coordinator: Coordinator) -> Remembered:
    """As of the last decision."""
    assert coordinator.plan is not None, "nobody has joined yet"
    assert coordinator.settled is not None
    fragments = coordinator.fragments
    in_open_rounds = sum(len(fragment.round.participants) for fragment in fragments)
    return Remembered(
        run_id=coordinator.run_id,
        plan=coordinator.next_plan or coordinator.plan,
        versions=tuple(fragment.round.version - 1 for fragment in fragments),
        ledger=ledger_of(coordinator.members),
        totals={
            "total_submissions": coordinator.total_accepted - in_open_rounds,
            "total_worker_deaths": coordinator.members.total_deaths,
            "rounds_too_few": coordinator.total_too_few,
            **{f"tokens_{fragment}": tokens for fragment, tokens in coordinator.budget.per_fragment.items()},
        },
        facts={
            "started": coordinator.started,
            "last_command": coordinator.commands.last_id,
            "token_budget": coordinator.budget.limit,
            "live": sorted(coordinator.members.live_ids),
            "settled": asdict(coordinator.settled),
            "usual_weights": [asdict(fragment.usual) for fragment in fragments],
            "usual_tokens": [asdict(fragment.usual_tokens) for fragment in fragments],
            "kicked": {member.worker_id: member.kicked for member in coordinator.members if member.kicked},
            "norms": [fragment.screen.remembered() for fragment in fragments],
            "conduct": {
                member.worker_id: member.conduct.remembered(coordinator.now)
                for member in coordinator.members
                if member.conduct.total
            },
        },
    )


def resume(
    coordinator: Coordinator,
    ledger: Mapping[str, WorkerRecord],
    totals: Mapping[str, int | float],
    facts: Mapping[str, Any],
    now: float,
    *,
    expect_back: bool = True,
    first_incarnation: int = 1,
) -> None:
    """Into a coordinator whose plan and fragments are fixed, and that nobody has joined. `expect_back`: who was here is
    expected back, and given the usual time: a round must not close with the first to return. `first_incarnation`: if
    joins may have been forgotten, a number above all that were given since (say, the time in seconds): two starts of a
    worker that hold the same number would not be told apart."""
    coordinator.members.first_incarnation = first_incarnation
    coordinator.total_accepted = int(totals.get("total_submissions", 0))
    coordinator.members.total_deaths = int(totals.get("total_worker_deaths", 0))
    coordinator.total_too_few = int(totals.get("rounds_too_few", 0))
    budget = coordinator.budget
    budget.per_fragment = {i: int(totals.get(f"tokens_{i}", 0)) for i in range(len(coordinator.fragments))}
    for fragment, usual in zip(coordinator.fragments, facts.get("usual_weights", []), strict=False):
        fragment.usual = UsualWeight(**usual)
    for fragment, usual in zip(coordinator.fragments, facts.get("usual_tokens", []), strict=False):
        fragment.usual_tokens = UsualWeight(**usual)
    for fragment, norms in zip(coordinator.fragments, facts.get("norms", []), strict=False):
        fragment.screen = NormScreen.resumed(norms)
    coordinator.commands.last_id = int(facts.get("last_command", 0)) + LEAP
    live = set(facts.get("live", ())) if expect_back else set()
    for member in members_of(ledger, now):
        member.live = member.worker_id in live
        member.kicked = facts.get("kicked", {}).get(member.worker_id, "")
        member.conduct = Conduct.resumed(facts.get("conduct", {}).get(member.worker_id, {}), now)
        coordinator.members.restore(member)
    if facts.get("started", False):
        coordinator.started = True
        for fragment in coordinator.fragments:
            fragment.round.expected = set(coordinator.members.awaited_ids(now))
    if budget.limit is None:
        budget.limit = facts.get("token_budget")
    coordinator.check_budget(now)


def ledger_of(members: Iterable[Member]) -> dict[str, WorkerRecord]:
    """Of closed rounds only. If the ledger named what an open round has accepted, a worker that sends it again to the
    restarted server would be told "accepted", and its steps would be lost."""
    return {
        member.worker_id: WorkerRecord(
            instance=member.instance,
            hostname=member.hostname,
            incarnation=member.incarnation,
            retired=tuple(member.retired),
            accepted={
                fragment: Acceptance(
                    sequence=entry.sequence, payload_hash=entry.payload_hash or None, version=entry.version
                )
                for fragment, entry in member.closed.items()
            },
        )
        for member in members
    }


def members_of(ledger: Mapping[str, WorkerRecord], now: float) -> list[Member]:
    """The ledger's workers, known but not live: each comes back by joining."""
    members = []
    for worker_id, record in ledger.items():
        member = Member(worker_id, record.instance, record.hostname, record.incarnation, now, now, live=False)
        member.retired.extend(record.retired)
        member.closed = {f: Accepted(a.sequence, a.payload_hash or "", a.version) for f, a in record.accepted.items()}
        member.accepted = dict(member.closed)
        members.append(member)
    return members
