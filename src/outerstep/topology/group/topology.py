"""A group of processes is one worker: a torchrun job whose ranks hold the same parameters (DDP).

Rank 0 speaks with the other side; what it learns, and the frames with the update of each anchor, goes to the other
ranks over the job's own network. All of them apply the update and compare the anchor's hash, so all hold the same bits.
sharded.py is the same for ranks that hold different rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import torch

from ...coordination.worker.units import LeaseRequest
from ...digest import data_hash
from ...errors import ModelError
from ...types import LeaseAnswer, Manifest, Participant, Plan, Watched, Wishes
from ..forms import Form, forms_of
from ..payload import KEPT, Memory
from ..protocol import Agreed, Contribution, Joined, Lessor, Orders, Sight, Ticket, Topology, WorkerControl
from ..update import AnchorUpdate, Kind, read_update
from .ranks import Ranks

T = TypeVar("T")


class GroupTicket:
    """An exchange of the group; `own` is rank 0's part in it."""

    def __init__(self, group: GroupTopology, own: Ticket | None) -> None:
        self._group = group
        self._own = own

    def look(self, timeout_s: float) -> Sight:
        return look_together(self._group.ranks, self._own, timeout_s)

    def finish(self, *, reload: bool = False) -> Agreed:
        return self._group.hand_on(lambda: _known(self._own).finish(reload=reload))

    def confirm(self, agreed: Agreed, intact: bool) -> Agreed | None:
        """What went wrong on one rank is mended on all: they apply the same update."""
        group = self._group
        if not all(group.ranks.gather(lambda: intact, bool)):
            return group.hand_on(lambda: _known(_known(self._own).confirm(agreed, False)))
        if self._own is not None:
            return self._own.confirm(agreed, True)
        group.release(agreed)
        return None

    def resume(self, *, stuck_after_s: float | None = None) -> GroupTicket:
        own = self._own
        again = self._group.ranks.check(lambda: own.resume(stuck_after_s=stuck_after_s) if own else None)
        return GroupTicket(self._group, again)

    def pack(self) -> dict[str, Any]:
        return self._own.pack() if self._own is not None else {}

    def cancel(self) -> None:
        if self._own is not None:
            self._own.cancel()


def look_together(ranks: Ranks, own: Ticket | None, timeout_s: float) -> Sight:
    """As rank 0 sees it; and it is over as soon as it failed for anybody."""
    wait_s = timeout_s if ranks.rank == 0 else 0.0
    heard = ranks.gather(lambda: own.look(wait_s) if own is not None else Sight(done=False), Sight)
    failed = any(sight.failed for sight in heard)
    return dataclasses.replace(heard[0], done=heard[0].done or failed, failed=failed)


class AgreedFacts(msgspec.Struct, frozen=True):
    """An `Agreed` without its update, which has frames of these kinds."""

    fragment: int
    version: int
    counted: bool
    too_old: bool
    anchor_hash: str
    participants: tuple[Participant, ...]
    plan: Plan
    above: tuple[int, ...] = ()
    bytes_sent: int = 0
    bytes_received: int = 0
    retries: int = 0
    rejoins: int = 0
    counted_in: int = 0
    refused: str = ""
    steps_lost: int = 0
    watched: Watched | None = None
    kinds: tuple[Kind, ...] = ()

    @classmethod
    def of(cls, agreed: Agreed) -> AgreedFacts:
        facts = {name: getattr(agreed, name) for name in cls.__struct_fields__ if name != "kinds"}
        return cls(kinds=agreed.update.kinds, **facts)

    def with_update(self, update: AnchorUpdate) -> Agreed:
        facts = {name: getattr(self, name) for name in self.__struct_fields__ if name != "kinds"}
        return Agreed(update=update, **facts)


class Welcome(msgspec.Struct, frozen=True):
    """A `Joined`, on its way to the other ranks."""

    worker_id: str
    plan: Plan
    manifest: Manifest
    overtaken: frozenset[int]


class Amount(msgspec.Struct, frozen=True):
    """The training in one rank's share of a contribution."""

    samples: int
    tokens: int


class GroupTopology:
    """`speaker` is rank 0's way to the others; the other ranks have none."""

    def __init__(self, ranks: Ranks, speaker: Topology | None) -> None:
        assert (speaker is not None) == (ranks.rank == 0)
        self.ranks = ranks
        self._speaker = speaker
        self._control: WorkerControl | None = speaker if isinstance(speaker, WorkerControl) else None
        self._forms: list[Form] = []
        self._orders = Orders()
        self._memory = Memory(KEPT)

    def join(self, manifest: Manifest | None, wishes: Wishes) -> Joined:
        assert manifest is not None
        check_same_model(self.ranks, manifest)
        welcome = self.ranks.tell(lambda: self._join(manifest, wishes), Welcome)
        self._forms = forms_of(welcome.plan, welcome.manifest)
        return Joined(welcome.worker_id, welcome.plan, welcome.manifest, welcome.overtaken)

    def _join(self, manifest: Manifest, wishes: Wishes) -> Welcome:
        joined = _known(self._speaker).join(manifest, wishes)
        return Welcome(joined.worker_id, joined.plan, joined.manifest, joined.overtaken)

    # --- exchanges: rank 0's, of which all hear -------------------------------------------------------------------

    def catch_up(self, fragment: int) -> GroupTicket:
        return self._ticket(lambda speaker: speaker.catch_up(fragment))

    def begin(self, contribution: Contribution, *, stuck_after_s: float | None = None) -> GroupTicket:
        """Rank 0's parameters are everybody's; the samples and tokens are everybody's own."""
        amounts = self.ranks.gather(lambda: Amount(contribution.samples, contribution.tokens), Amount)
        whole = of_all(contribution, amounts)
        return self._ticket(lambda speaker: speaker.begin(whole, stuck_after_s=stuck_after_s))

    def reopen(self, fragment: int, packed: Mapping[str, Any], *, late: bool = False) -> GroupTicket | None:
        speaker = self._speaker
        own = self.ranks.check(lambda: speaker.reopen(fragment, packed, late=late) if speaker is not None else None)
        return GroupTicket(self, own) if self.ranks.tell(lambda: own is not None, bool) else None

    def _ticket(self, make: Callable[[Topology], Ticket | None]) -> GroupTicket:
        speaker = self._speaker
        return GroupTicket(self, self.ranks.check(lambda: make(speaker) if speaker is not None else None))

    def hand_on(self, find: Callable[[], Agreed]) -> Agreed:
        """What rank 0 finds out, and the update that came with it, on every rank."""
        found: list[Agreed] = []

        def facts_of() -> AgreedFacts:
            found.append(find())
            return AgreedFacts.of(found[0])

        facts = self.ranks.tell(facts_of, AgreedFacts)
        form, update = self._forms[facts.fragment], found[0].update if found else None
        sizes = [(form.full if kind == "full" else form.update).size_bytes for kind in facts.kinds]
        frames = [self._memory.take(size) for size in sizes] if update is None else update.frames
        self.ranks.spread(torch.frombuffer(frame, dtype=torch.uint8) for frame in frames)
        here = self.ranks.check(lambda: update or read_update(form, facts.kinds, frames, facts.anchor_hash))
        if update is None:
            facts = msgspec.structs.replace(facts, bytes_sent=0, bytes_received=0, retries=0, rejoins=0)
        return facts.with_update(here)

    def release(self, agreed: Agreed) -> None:
        self._memory.recycle(agreed.update.frames, self._forms[agreed.fragment].update.size_bytes)

    # --- control --------------------------------------------------------------------------------------------------

    def heartbeat(self, step: int, steps_per_second: float, loss: float | None) -> None:
        """From a thread of its own, so without a word to the other ranks: they train in step with rank 0."""
        self._memory.rest()
        if self._control is not None:
            self._control.heartbeat(step, steps_per_second, loss)

    def orders(self, *, at_exchange: bool) -> Orders:
        """All ranks must obey at the same step; they confer only where they have just conferred anyway."""
        if not at_exchange:
            return dataclasses.replace(self._orders, drain="", sync="")
        control = self._control
        self._orders = self.ranks.tell(lambda: control.orders(at_exchange=True) if control else Orders(), Orders)
        return self._orders

    def lease(self, request: LeaseRequest) -> LeaseAnswer:
        """Rank 0 asks, from a thread of its own; data/leased.py tells the others what it drew."""
        speaker = _known(self._speaker)
        assert isinstance(speaker, Lessor), "a group has a server"
        return speaker.lease(request)

    # --- what must not be forgotten -------------------------------------------------------------------------------

    def state_dict(self, under_way: Collection[int]) -> dict[str, Any]:
        """Rank 0's; the others have nothing to remember."""
        return self._speaker.state_dict(under_way) if self._speaker is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._speaker is not None:
            self._speaker.load_state_dict(state)

    def leave(self, reason: str) -> None:
        if self._speaker is not None:
            self._speaker.leave(reason)


def _known(value: T | None) -> T:
    assert value is not None, "rank 0 has a part in every exchange"
    return value


def check_same_model(ranks: Ranks, manifest: Manifest) -> None:
    """All ranks must mean the same tensors: a job that splits its layers over ranks is not one worker."""
    prints = ranks.gather(lambda: data_hash([msgspec.msgpack.encode(manifest)]), str)
    odd = next((rank for rank, one in enumerate(prints) if one != prints[0]), None)
    if odd is not None:
        raise ModelError(
            f"ranks 0 and {odd} hold different models (names, shapes or dtypes); the ranks of one worker must hold the "
            "same parameters, whole (DDP) or in shards (FSDP2). Ranks that are workers of their own: group='off'"
        )


def of_all(contribution: Contribution, amounts: Sequence[Amount]) -> Contribution:
    """The same contribution with every rank's samples and tokens."""
    samples, tokens = sum(a.samples for a in amounts), sum(a.tokens for a in amounts)
    return dataclasses.replace(contribution, samples=samples, tokens=tokens)
