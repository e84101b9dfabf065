"""A worker without a model, for the contract: it holds an anchor and what it has learned since, and does with a ticket
what every worker does. This is all that a topology may count on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from outerstep.topology.protocol import Agreed, Contribution, Joined, Ticket, Topology
from outerstep.types import Manifest, ParameterSpec, Wishes
from support import in_threads

T = TypeVar("T")

CELLS = 8
MANIFEST = Manifest(parameters=(ParameterSpec(name="cells", shape=(CELLS,), dtype="float32"),))
OTHER_MANIFEST = Manifest(parameters=(ParameterSpec(name="cells", shape=(CELLS, 2), dtype="float32"),))
WISHES = Wishes(codec="fp32", sync_every=1, num_fragments=1)
REPAIRS = 3
PATIENCE_S = 30.0  # for a busy machine
ALONE_S = 0.5  # for which a member waits for the others to come out of their exchange
# (Less than any deadline of a round: one that has missed a round must come back before the next closes without it.)


@dataclass
class Rank:
    """One process of a member: its way to the others, and its rows of the anchor."""

    make: Callable[[dict[str, Tensor]], Topology]
    rows: slice = field(default_factory=lambda: slice(0, CELLS))
    anchors: dict[str, Tensor] = field(default_factory=dict)
    state: Mapping[str, Any] | None = None  # of an earlier start
    ticket: Ticket | None = None
    _topology: Topology | None = None

    @property
    def topology(self) -> Topology:
        """Made where it is first asked for: some meet the others already then."""
        if self._topology is None:
            self._topology = self.make(self.anchors)
            if self.state is not None:
                self._topology.load_state_dict(self.state)
        return self._topology

    def settle(self, ticket: Ticket, *, reload: bool = True) -> Agreed:
        """Wait for an agreement, and adopt it with all that came with it."""
        give_up_at = time.monotonic() + PATIENCE_S
        while not (sight := ticket.look(0.02)).done:
            assert time.monotonic() < give_up_at, (
                f"the round never closed; it waits for {sight.waiting_for or 'nobody'}"
            )
        agreed = ticket.finish(reload=reload)
        for one in (*agreed.also, agreed):
            self.adopt(ticket, one)
        return agreed

    def adopt(self, ticket: Ticket, agreed: Agreed) -> None:
        for _ in range(REPAIRS):
            theta, update = self.anchors["cells"], agreed.update
            half = theta.numel() // 2
            for start, stop in ((0, half), (half, theta.numel())):
                theta[start:stop] = update.apply("cells", start, stop, theta[start:stop])
            repair = ticket.confirm(agreed, update.is_proven)
            if repair is None:
                return
            agreed = repair
        raise AssertionError("the anchor could not be repaired")


class Member:
    """`counted`: by version, what of this member is in it."""

    def __init__(self, name: str, ranks: list[Rank]) -> None:
        self.name, self.ranks = name, ranks
        self.version = self.oldest_base = 0
        self.unsent, self.sent = torch.zeros(CELLS), torch.zeros(CELLS)
        self.counted: dict[int, Tensor] = {}
        self.met: set[str] = set()  # in the last exchange

    def everywhere(self, job: Callable[[Rank], T]) -> T:
        """On all ranks at once, as the processes of a job do it; rank 0's result."""
        if len(self.ranks) == 1:
            return job(self.ranks[0])
        results: list[T] = in_threads(*[lambda rank=rank: job(rank) for rank in self.ranks])
        return results[0]

    @property
    def anchor(self) -> Tensor:
        whole = torch.full((CELLS,), torch.nan)
        for rank in self.ranks:
            before, here = whole[rank.rows].clone(), rank.anchors["cells"]
            assert bool(before.isnan().all()) or torch.equal(before, here), (
                "the ranks of a member hold different values"
            )
            whole[rank.rows] = here
        return whole

    # --- its life -------------------------------------------------------------------------------------------------

    def join(self, manifest: Manifest = MANIFEST, wishes: Wishes = WISHES) -> Joined:
        return self.everywhere(lambda rank: rank.topology.join(manifest, wishes))

    def catch_up(self) -> Agreed:
        agreed = self.everywhere(lambda rank: rank.settle(rank.topology.catch_up(0)))
        if agreed.counted:  # the run has later steps of this member than its state knows of
            self.unsent = torch.zeros(CELLS)
        self.version = self.oldest_base = agreed.version
        return agreed

    def enter(self) -> Member:
        self.join()
        self.catch_up()
        return self

    def learn(self, cell: int, amount: float = 1.0) -> Member:
        self.unsent[cell] += amount
        return self

    def begin(self, *, owes_nothing: bool = False) -> None:
        self.sent = self.unsent.clone()

        def begin(rank: Rank) -> None:
            deltas = {"cells": -self.sent[rank.rows]}  # anchor − local
            steps = 0 if owes_nothing else 1
            contribution = Contribution(0, self.version, self.oldest_base, steps, 0, 0, deltas, owes_nothing)
            rank.ticket = rank.topology.begin(contribution)

        self.everywhere(begin)

    def finish(self, *, reload: bool = True) -> Agreed:
        agreed = self.everywhere(lambda rank: rank.settle(_there(rank.ticket), reload=reload))
        self.version = agreed.version
        self.met = {participant.worker_id for participant in agreed.participants}
        if agreed.refused:
            self.unsent = torch.zeros(CELLS)
        elif agreed.counted:
            self.unsent = self.unsent - self.sent
            self.counted[agreed.counted_in] = self.sent
        if agreed.counted or agreed.refused:
            self.oldest_base = agreed.version
        return agreed

    def exchange(self) -> Agreed:
        self.begin()
        return self.finish()

    def leave(self, reason: str = "done") -> None:
        self.everywhere(lambda rank: rank.topology.leave(reason))

    # --- accidents ------------------------------------------------------------------------------------------------

    def damage(self) -> None:
        """A bit of the anchor is not what it was."""
        self.ranks[-1].anchors["cells"][0] += 1.0

    def save(self, *, under_way: bool = False) -> list[dict[str, Any]]:
        """What the process of each rank writes to its checkpoint."""

        def saved(rank: Rank) -> dict[str, Any]:
            return {
                "anchors": {name: value.clone() for name, value in rank.anchors.items()},
                "topology": _copy(rank.topology.state_dict([0] if under_way else [])),
                "exchange": _copy(_there(rank.ticket).pack()) if under_way else None,
            }

        return [saved(rank) for rank in self.ranks]


def _there(ticket: Ticket | None) -> Ticket:
    assert ticket is not None, "nothing was begun"
    return ticket


def _copy(value: Any) -> Any:
    """As it comes back from a file."""
    if isinstance(value, Mapping):
        return {name: _copy(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(one) for one in value]
    return value.clone() if isinstance(value, Tensor) else value


def each_until(settled: Callable[[], bool], members: Sequence[Member], tries: int = 20) -> None:
    """Each exchanges by itself until, at a moment when none of them is in an exchange, it is settled. A member that has
    nothing left to say keeps exchanging with the others: some runs close no round for one alone."""
    changed = threading.Condition()
    inside, done = len(members), False

    def work(member: Member) -> None:
        nonlocal inside, done
        for _ in range(tries):
            member.exchange()
            with changed:
                inside -= 1
                if inside == 0:
                    done = settled()
                    changed.notify_all()
                else:
                    changed.wait(ALONE_S)
                if done:
                    return
                inside += 1
        raise AssertionError(f"{member.name} and the others did not settle in {tries} exchanges")

    in_threads(*[partial(work, member) for member in members])


def expected_anchor(members: list[Member]) -> Tensor:
    """Zeros, and of every version the mean of what counted in it: each step once, wherever it went."""
    anchor = torch.zeros(CELLS)
    for version in sorted({version for member in members for version in member.counted}):
        parts = [member.counted[version] for member in members if version in member.counted]
        anchor = anchor + torch.stack(parts).mean(0)
    return anchor


__all__ = ["CELLS", "MANIFEST", "OTHER_MANIFEST", "WISHES", "Member", "Rank", "each_until", "expected_anchor"]
