"""What a leader needs of the layer below it, whatever that is made of: a server with its workers, or members alone.

A *leader* (leader.py) is a worker of the layer above. It knows the layer that it speaks for by these two protocols, and
nothing of what is behind them:

    Below      what the leader asks for. From the leader's thread, unless it says otherwise
    Hearing    what the leader is told. From any thread of the layer below; the leader never keeps that thread waiting

    below.begin(leader)                                       once
        leader.began(T, is_new)                               T as it is now
        leader.published(T of some names)                     every version since, whoever made it
        leader.round_closed(fragment)                         a round, with members in it
            below.hold(60.0)                                  from within, if the exchange above is due after it
        leader.emptied()                                      nobody is left in the layer
    below.keep(record)                                        before each offer and before each move
    below.move(serial, [0, 1], moved)                         T′ = moved(T), between two rounds
    below.release()                                           members go on

Two things must be durable in the layer below, each for as long as the layer itself: the *record* (the leader's state:
its worker's, S and B) and with each version the *serial number* of the last move from above that is in it. A server has
them in its run's folder; members without a server hold both, each of them. Whoever leads next begins with `kept` and
`moves_known`: a move that the layer knows by its serial number is in T, any other is made again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from ..coordination.layers.between import LayerTerms
from ..coordination.server.claims import ClaimedWork
from ..coordination.sub_leases import LayerLeases
from ..errors import OuterstepError
from ..types import Manifest


class NotKept(OuterstepError):
    """The layer below cannot hold the leader's record: nothing may be offered, and nothing moved."""


class Hearing(Protocol):
    """A leader, as the layer below sees it."""

    def began(self, target: Mapping[str, Tensor], *, is_new: bool, versions: Mapping[int, int] | None = None) -> None:
        """T by name, copied before this returns; `Below.manifest` and `.fragments` are known from now on. `is_new`: the
        layer's own run begins with it: what members learn from now on is to go up. `versions`: of which it is, by
        fragment."""

    def cannot(self, why: str) -> None:
        """This layer can have no layer above; said instead of `began`."""

    def published(self, target: Mapping[str, Tensor], versions: Mapping[int, int] | None = None) -> None:
        """There is a new version of these tensors, copied before this returns. `versions`: which, by fragment."""

    def round_closed(self, fragment: int = 0) -> None:
        """With members in it. (Not told of versions that came from above.) Rounds of the first fragment are the steps
        of the worker above; those are told of before any member can know of the version: `hold` from within keeps it
        from them."""

    def emptied(self) -> None:
        """The last member has left."""


class LeasesBelow(Protocol):
    """The lease tables of the layer below."""

    leases: LayerLeases

    def change(self, change: Callable[[float, Collection[str]], bool]) -> None:
        """With the tables to itself: `change(now, members that are here)`, which says whether they must be recorded."""


class Below(Protocol):
    """The layer below, as its leader sees it."""

    record_may_be_old: bool
    """May `kept` be an earlier record than the last one, with T as it was then? A server's folder has both as they were
    last; a job may be restarted from states that it saved long before."""

    @property
    def data(self) -> LeasesBelow | None:
        """What leases data to the members; None: nothing does."""

    @property
    def terms(self) -> LayerTerms:
        """What is compared with the terms of the layer above. Known from the beginning."""

    @property
    def manifest(self) -> Manifest:
        """Of what is trained."""

    @property
    def fragments(self) -> Sequence[Collection[str]]:
        """Names, by fragment of the layer below. (The layer above has its own.)"""

    def begin(self, leader: Hearing) -> None:
        """Tell this leader of everything that happens from now on. Called once, from any thread."""

    def keep(self, record: Mapping[str, Any]) -> None:
        """Durable in the layer below when this returns: plain values and tensors, nested. The tensors are live, so they
        are copied or written before it returns. Raises NotKept if it could not; the leader tries again."""

    def kept(self) -> dict[str, Any] | None:
        """The last record that was kept, by whoever led then. None: there is none."""

    def moves_known(self) -> dict[int, int]:
        """By fragment of the layer below: the serial number of the last move from above that is in T; 0 = none."""

    def joined(self, *, overtaken: bool) -> None:
        """The cluster has joined the layer above. `overtaken`: that has later contributions than the record knows of. T
        is given up for what was agreed; steps that members hold and have not sent may be in those contributions."""

    def move(
        self, serial: int, fragments: Collection[int], moved: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
    ) -> None:
        """T′ = moved(T) of these fragments, between two rounds, as a version of its own with this serial number.
        Returns when that is durable and every member may know; raises OuterstepError if it never will be."""

    def version(self) -> int:
        """Of the first fragment: the newest that `published` told of."""

    def rounds_since(self, version: int) -> int:
        """How many rounds of the first fragment, with members in them, made the versions after this one."""

    def done(self) -> ClaimedWork:
        """Steps, samples and tokens of those who took part in rounds since `begin`."""

    def hold(self, limit_s: float) -> None:
        """Members are not told of the version that was just made until `release`, or until this much time has passed:
        what comes from above follows it. From within `round_closed`."""

    def release(self) -> None:
        """Nothing comes from above for now. May be said without a `hold`."""

    def name_leader(self, name: str) -> None:
        """An order of the layer above: this member is to lead, if it can. A server is led by itself."""

    def shut_down(self, reason: str) -> None:
        """The run above has ended: so does this one."""
