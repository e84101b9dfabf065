"""The two protocols between a leader and the layer below it: a server with its workers, or members without a server.

A *leader* (leader.py) is a worker of the layer above. It knows the layer below only through these protocols:

    Below      what the leader calls, from its own thread unless a method says otherwise
    Hearing    what the layer below calls, from any of its threads. The leader never blocks that thread

    below.begin(leader)                                       once
        leader.began(T, is_new)                               the current T
        leader.published(T of some names)                     every later version, whoever made it
        leader.round_closed(fragment)                         a round in which members took part
            below.hold(60.0)                                  inside that call, if an exchange above comes next
        leader.emptied()                                      the last member has left
    below.keep(record)                                        before each offer and before each move
    below.move(serial, [0, 1], moved)                         T′ = moved(T), between two rounds
    below.release()                                           members continue

Two things must be durable in the layer below for as long as the layer exists. One is the *record*: the leader's state,
which is its worker's state, S and B. The other is the *serial number* of the last move from above that each version
contains. A server stores both in its run's folder. Where there is no server, every member holds both. The next leader
starts from `kept` and `moves_known`: if the layer knows the serial number of a move, T contains that move; otherwise
the move is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from ..coordination.layers.between import LayerTerms
from ..coordination.layers.sub_leasing import GrantedTables
from ..coordination.server.claims import ClaimedWork
from ..errors import OuterstepError
from ..types import Manifest


class NotKept(OuterstepError):
    """The layer below cannot store the leader's record, so nothing may be offered or moved."""


class Hearing(Protocol):
    """A leader, as the layer below sees it."""

    def began(self, target: Mapping[str, Tensor], *, is_new: bool, versions: Mapping[int, int] | None = None) -> None:
        """T by name. It is copied before this returns. `Below.manifest` and `.fragments` are known from now on.
        `is_new`: the layer's own run starts with this T, so everything that members learn from now on goes up.
        `versions`: the version of each fragment."""

    def cannot(self, why: str) -> None:
        """This layer cannot have a layer above. Called instead of `began`."""

    def published(self, target: Mapping[str, Tensor], versions: Mapping[int, int] | None = None) -> None:
        """These tensors have a new version. They are copied before this returns. `versions`: by fragment."""

    def round_closed(self, fragment: int = 0) -> None:
        """A round with members in it has closed. (A version that came from above is no round.) Rounds of the first
        fragment are the steps of the worker above. For these, the call comes before any member can learn of the new
        version, so `hold` inside the call keeps the version from the members."""

    def emptied(self) -> None:
        """The last member has left."""


class LeasesBelow(Protocol):
    """The lease tables of the layer below."""

    @property
    def leases(self) -> GrantedTables: ...

    def change(self, change: Callable[[float, Collection[str]], bool]) -> None:
        """Call `change(now, live members)` with exclusive access to the tables. It returns True if they must be
        recorded."""


class Below(Protocol):
    """The layer below, as its leader sees it."""

    record_may_be_old: bool
    """Can `kept` return an older record than the last one, with T of the same time? A server's folder has the last of
    both. A job can be restarted from states that it saved long ago."""

    @property
    def data(self) -> LeasesBelow | None:
        """The tables that lease data to the members. None: there are none."""

    @property
    def terms(self) -> LayerTerms:
        """This layer's terms, to be compared with those of the layer above. Known from the start."""

    @property
    def manifest(self) -> Manifest:
        """The manifest of the trained model."""

    @property
    def fragments(self) -> Sequence[Collection[str]]:
        """The tensor names of each fragment of the layer below. (The layer above has its own fragments.)"""

    def begin(self, leader: Hearing) -> None:
        """Report everything that happens from now on to this leader. Called once, from any thread."""

    def keep(self, record: Mapping[str, Any]) -> None:
        """Store the record, nested plain values and tensors. It is durable when this returns. The tensors are live, so
        they are copied or written first. Raises NotKept if that fails; the leader retries."""

    def kept(self) -> dict[str, Any] | None:
        """The last stored record, whichever leader stored it. None: there is no record."""

    def moves_known(self) -> dict[int, int]:
        """The serial number of the last move from above in T, for each fragment of the layer below. 0: no move."""

    def joined(self, *, overtaken: bool) -> None:
        """The cluster has joined the layer above. `overtaken`: the layer above has later contributions than the record
        shows. The cluster drops T and takes the agreement; those contributions may contain steps that members still
        hold and have not sent."""

    def move(
        self, serial: int, fragments: Collection[int], moved: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
    ) -> None:
        """Set T′ = moved(T) in these fragments, between two rounds, as a version of its own with this serial number.
        Returns when the version is durable and every member may learn of it. Raises OuterstepError if that is
        impossible."""

    def version(self) -> int:
        """The newest version of the first fragment that `published` reported."""

    def rounds_since(self, version: int) -> int:
        """How many of the later versions of the first fragment came from rounds with members in them."""

    def done(self) -> ClaimedWork:
        """Steps, samples and tokens of the members that took part in rounds since `begin`."""

    def hold(self, limit_s: float) -> None:
        """Keep the newest version from the members until `release`, or until this much time has passed: a version from
        above follows it. Called inside `round_closed`."""

    def release(self) -> None:
        """No version from above is coming for now. Allowed without a `hold`."""

    def name_leader(self, name: str) -> None:
        """Carry out an order of the layer above: this member should lead if it can. A server always leads itself."""

    def shut_down(self, reason: str) -> None:
        """End this run, because the run above has ended."""
