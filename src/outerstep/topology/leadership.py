"""Between the replicas of a cluster and the one of them that leads it (docs/concepts/hierarchy.md).

A cluster of replicas is one worker of a layer above, and one replica speaks for it: the *leader*, whose own thread is a
worker up there. It exchanges between quorums and never inside one, so that nobody who meets waits for the layer above.
It needs the other replicas for two things only, and brings each to a quorum of its own:

    record    what must survive the leader: bytes that every replica holds from then on
    move      an agreement from above: T′ of some fragments, a version of its own that nobody contributed to

The ranks of an all-reduce job are led in the same way. Rank 0 leads, a meeting of all ranks is what a quorum is here,
and the record stays with rank 0, whose saved state has it (allreduce/cluster.py).

A replica has a `Leadership`, whether it leads or not. The carrying thread looks there for what the leader brings, says
there what came of it, and finds out for how long the replicas are to wait before they take their next steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from ..digest import data_hash
from ..errors import OuterstepError
from ..types import Manifest, Plan
from .cluster_part import ClusterPart
from .members_data import MembersData

POLL_S = 1.0  # while the replicas wait, the leader comes to a quorum at least so often: no lighthouse leaves it out
LOOK_S = 0.5
SETTLED_S = 300.0  # that a leader leads at least before it gives way to a faster line
BEGIN_S = 60.0  # that a leader may take to join the layer above, if members resume from saved states or end meanwhile

FELL_BEHIND = "this replica fell behind the others: whoever they choose leads the cluster"
LEAVES = "this replica leaves: another leads the cluster"
HANDED_OVER = "another replica leads the cluster from now on"

AsideKind = Literal["", "record", "move"]
Reach = Callable[[], tuple[bool, float]]
Moved = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


class NotLeading(OuterstepError):
    """This replica does not lead its cluster any more, or is about to end."""


class MoveRefused(OuterstepError):
    """What the leader brings is nothing that a model can hold."""


class ClusterLeader(Protocol):
    """The leader in this process, as its replica sees it."""

    def published(self, target: Mapping[str, Tensor], versions: Mapping[int, int]) -> None:
        """There is a new version of these tensors. `versions`: which, by fragment."""

    def round_closed(self, fragment: int = 0) -> None:
        """With replicas in it; told after `published`."""

    def stop(self) -> None:
        """Exchange what is left and leave the layer above. Returns when that is over."""

    def stand_down(self, why: str) -> None:
        """Say nothing more: another leads, or will. Returns at once."""

    @property
    def is_at_rest(self) -> bool:
        """It has joined the layer above, and nothing is under way."""


class KeptRecord:
    """The leader's record as every replica holds it; empty if there is none."""

    def __init__(self, data: Tensor | None = None) -> None:
        self.data = torch.empty(0, dtype=torch.uint8) if data is None else data
        self.digest = data_hash([self.data.numpy().tobytes()]) if self.data.numel() else ""


@dataclass(frozen=True)
class Aside:
    """What the leader brings: its record, or with `moved` a move of these fragments."""

    kind: AsideKind
    record: KeptRecord
    serial: int = 0
    fragments: tuple[int, ...] = ()
    moved: Moved | None = None


class NamedMember(Protocol):
    @property
    def worker_id(self) -> str: ...


class MemberTold(NamedMember, Protocol):
    """What a member says of itself; nothing at all is allowed."""

    @property
    def accelerator(self) -> str: ...

    @property
    def backends(self) -> tuple[str, ...]: ...

    @property
    def up_bytes_per_s(self) -> float: ...

    @property
    def came_from(self) -> str:
        """Where in its life it was before they met; "" = it has none."""


class ClusterMembers(Protocol):
    """What a leader reads of the members that it leads."""

    @property
    def own(self) -> NamedMember:
        """The one that leads."""

    @property
    def offers(self) -> Sequence[MemberTold]:
        """What all said when they met last."""

    @property
    def plan(self) -> Plan: ...

    @property
    def cluster(self) -> ClusterPart | None: ...

    @property
    def record(self) -> KeptRecord:
        """The last that was kept."""

    @property
    def versions(self) -> Mapping[int, int]:
        """Of the fragments, as the cluster has them."""

    @property
    def data(self) -> MembersData | None:
        """What a layer above leases to them; None: nothing."""


class Leadership:
    """`make_leader(T, is_new)` makes this replica the leader, and starts it."""

    def __init__(
        self,
        wait_s: float,
        reach: Reach = lambda: (True, 0.0),
        *,
        keep_here: Callable[[KeptRecord], None] | None = None,
    ) -> None:
        """`wait_s`: how long the replicas wait for the layer above, at the most; 0 = not at all. `reach`: whether this
        replica reaches it, and its bytes per second, 0 = not measured. `keep_here`: keeps the record, where the other
        members need not hold it; None = it is brought to them."""
        self.wait_s = wait_s
        self.reach = reach
        self.named = ""  # who is to lead, by an order that this replica has heard as the leader
        self._leads_since = 0.0
        self._keep_here = keep_here
        self.make_leader: Callable[[Mapping[str, Tensor], bool], ClusterLeader] | None = None
        self._changed = threading.Condition()
        self._leader: ClusterLeader | None = None
        self._term = 0  # how often this replica has begun to lead
        self._aside: Aside | None = None
        self._held_until = 0.0
        self._has_begun = threading.Event()  # it has joined the layer above, or tried in vain
        self._ending: threading.Thread | None = None
        self._is_closed = False
        self._ends_because = ""
        self._refused: tuple[Aside, str] | None = None
        self.resumes = False  # all members began from saved states: so is the record from one, and may be old
        self._has_joined = False  # the layer above; and then
        self._is_overtaken = False  # it has later contributions than the record: what members did is among them

    # --- for the carrying thread ----------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        return self._leader is not None

    @property
    def aside(self) -> Aside | None:
        """What is to be brought to the next quorum."""
        return self._aside

    @property
    def is_closed(self) -> bool:
        """The replica has left."""
        return self._is_closed

    @property
    def holds(self) -> bool:
        """Should the replicas wait?"""
        return self.leads and time.monotonic() < self._held_until

    @property
    def yields(self) -> bool:
        """May another lead from the next quorum on? In the middle of an exchange nothing would be lost either, but what
        was sent of it would be sent again."""
        leader = self._leader
        if leader is None or self._aside is not None or self._ending is not None:
            return False
        return (leader.is_at_rest and not self.holds) or not self.reach()[0]

    @property
    def is_settled(self) -> bool:
        """Has it led for long enough that a faster line counts?"""
        return self.leads and time.monotonic() - self._leads_since >= SETTLED_S

    @property
    def has_ended(self) -> bool:
        """Has the leader left the layer above?"""
        return self._ending is not None and not self._ending.is_alive()

    @property
    def doubts(self) -> bool:
        """May steps that were unsent in the members' saved states count in the layer above? It has later contributions
        than the record, or does not answer."""
        return self.resumes and (self._is_overtaken or not self._has_joined)

    @property
    def ends_because(self) -> str:
        """Why every replica is to end; "" = it need not."""
        return self._ends_because

    def pause(self) -> None:
        """Before a quorum: while the replicas wait, and the leader has nothing to say to them yet."""
        with self._changed:
            if self.leads and self._aside is None and (self.holds or self._ending is not None):
                self._changed.wait_for(self._has_news, POLL_S)

    def _has_news(self) -> bool:
        waits = self.holds or (self._ending is not None and not self.has_ended)
        return self._aside is not None or self._is_closed or not waits

    def lead(self, target: Mapping[str, Tensor], *, is_new: bool, resumes: bool = False) -> None:
        """Nobody led, and this replica was chosen: the others wait until it has joined the layer above. `resumes`: for
        a minute at least, because all began from saved states and must know what became of what they had sent."""
        assert self.make_leader is not None
        with self._changed:
            self._term += 1
            self._leads_since = time.monotonic()
            self._held_until = self._leads_since + max(self.wait_s, BEGIN_S if resumes else 0.0)
            self.named, self.resumes, self._has_joined, self._is_overtaken = "", resumes, False, False
            self._has_begun.clear()
        leader = self.make_leader(target, is_new)
        with self._changed:
            if not self._is_closed:
                self._leader = leader
                return
        leader.stand_down(LEAVES)  # the replica left meanwhile, and nobody else would tell it

    def published(self, target: Mapping[str, Tensor], versions: Mapping[int, int]) -> None:
        if self._leader is not None:
            self._leader.published(target, versions)

    def round_closed(self, fragment: int = 0) -> None:
        if self._leader is not None:
            self._leader.round_closed(fragment)

    def brought(self, aside: Aside) -> None:
        """Every replica has it."""
        with self._changed:
            if self._aside is aside:
                self._aside = None
                self._changed.notify_all()

    def refuse(self, aside: Aside, why: str) -> None:
        """No replica can have it: whoever brings it is told so."""
        with self._changed:
            if self._aside is aside:
                self._aside, self._refused = None, (aside, why)
                self._changed.notify_all()

    def end(self) -> None:
        """All replicas are at the end of their training: what is left goes up, and comes down."""
        leader = self._leader
        if leader is None or self._ending is not None:
            return

        def run() -> None:
            self._has_begun.wait(BEGIN_S)
            leader.stop()
            with self._changed:
                self._changed.notify_all()

        self._ending = threading.Thread(target=run, name="outerstep-cluster-end", daemon=True)
        self._ending.start()

    def step_down(self, why: str = FELL_BEHIND) -> None:
        """Another leads, or may. This replica begins anew if it is chosen again."""
        leader, self._leader = self._leader, None
        with self._changed:
            self._term += 1
            self._aside, self._held_until, self._ending = None, 0.0, None
            self._changed.notify_all()
        if leader is not None:
            leader.stand_down(why)

    def close(self) -> None:
        """The replica leaves."""
        ended = self.has_ended
        with self._changed:
            leader, self._leader = self._leader, None
            self._is_closed = True
            self._term += 1
            self._changed.notify_all()
        if leader is not None and not ended:
            leader.stand_down(LEAVES)

    @property
    def keeps_here(self) -> bool:
        return self._keep_here is not None

    # --- for the leader, from its own thread ----------------------------------------------------------------------

    @property
    def term(self) -> int:
        """A leader asks for things in the name of the term that it was chosen for."""
        return self._term

    def keep(self, term: int, record: KeptRecord) -> None:
        """Returns when every replica of a quorum holds it; raises NotLeading."""
        if self._keep_here is None:
            self._bring(term, Aside("record", record))
            return
        with self._changed:
            self._check(term)
        self._keep_here(record)

    def joined(self, term: int, *, overtaken: bool) -> None:
        with self._changed:
            if term == self._term:
                self._has_joined, self._is_overtaken = True, overtaken

    def move(self, term: int, kept: KeptRecord, serial: int, fragments: Collection[int], moved: Moved) -> None:
        """Returns when T has moved; raises NotLeading. `kept`: the record that says so, which is brought along to
        whoever does not hold it."""
        self._bring(term, Aside("move", kept, serial, tuple(fragments), moved))

    def _bring(self, term: int, aside: Aside) -> None:
        with self._changed:
            self._check(term)
            self._aside = aside
            self._changed.notify_all()
            while self._aside is aside:
                self._changed.wait(LOOK_S)
                self._check(term)
            if self._refused is not None and self._refused[0] is aside:
                raise MoveRefused(self._refused[1])

    def _check(self, term: int) -> None:
        if self._is_closed or term != self._term:
            raise NotLeading("this replica does not lead its cluster any more")

    def shut_down(self, term: int, reason: str) -> None:
        """The run above has ended: every replica is to end."""
        with self._changed:
            if term == self._term:
                self._ends_because = reason

    def name(self, term: int, name: str) -> None:
        """An order: this replica is to lead, as soon as it can."""
        with self._changed:
            if term == self._term:
                self.named = name

    def hold(self, limit_s: float) -> None:
        with self._changed:
            self._held_until = time.monotonic() + limit_s

    def release(self, term: int) -> None:
        with self._changed:
            if term == self._term:
                self._held_until = 0.0
                self._has_begun.set()
                self._changed.notify_all()


MakeLeader = Callable[[Mapping[str, Tensor], bool], ClusterLeader]


@dataclass(frozen=True)
class ClusterSettings:
    """The members are together one worker of a layer above. `terms`: what all of them must say alike, by name.
    `lead`: gives a leadership the maker of its leader (hierarchy/members_below.py). `reach`: whether this member
    reaches the layer above, and how fast; `close` ends the looking."""

    wait_s: float
    terms: Mapping[str, float | bool | str]
    lead: Callable[[Leadership, ClusterMembers, Manifest], MakeLeader]
    reach: Reach = lambda: (True, 0.0)
    close: Callable[[], None] = lambda: None
