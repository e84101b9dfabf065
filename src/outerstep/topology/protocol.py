"""How contributions become an agreement: three small protocols, and the values that pass through them.

    joined = topology.join(manifest, wishes)
    ticket = topology.catch_up(fragment)            # the anchor to begin with, or what leads to the newest
    ticket = topology.begin(contribution)           # returns at once, training may go on
    agreed = ticket.finish()                        # waits
    repair = ticket.confirm(agreed, intact)         # the worker has adopted its update; this is what came of it

A `Topology` is how a worker reaches the others; a `Ticket` is one exchange. A topology that is also a `WorkerControl`
has somebody that asks for signs of life and gives orders. tests/contract is the specification of all three;
docs/extending.md adds a topology.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..coordination.worker.effects import Sight
from ..coordination.worker.exchange import Orders
from ..coordination.worker.units import LeaseRequest
from ..events import Event
from ..types import (
    Dataset,
    LeaseAnswer,
    LeaseStatement,
    Manifest,
    Participant,
    Plan,
    Trained,
    Watched,
    Wishes,
)
from .update import AnchorUpdate, WholeAnchor


class Deltas(Protocol):
    """Pseudo-gradients that are made when they are asked for."""

    def block(self, name: str, start: int, stop: int) -> Tensor:
        """Δ[start:stop], flat fp32; not to be changed, and gone with the next call."""

    def device(self, name: str) -> torch.device:
        """Where it comes from."""

    def home(self, name: str) -> torch.device:
        """Where what belongs to this tensor is kept."""


@dataclass(frozen=True)
class Contribution:
    """What a worker offers for one fragment. `oldest_base`: the version under its oldest unsent step. `owes_nothing`:
    what the codec left out of earlier ones is not to be sent any more. `loss`: the worker's last, if it knows one.
    `data`: leased units whose last step is in it."""

    fragment: int
    base_version: int
    oldest_base: int
    steps: int
    samples: int
    tokens: int
    deltas: Deltas | Mapping[str, Tensor]
    owes_nothing: bool = False
    loss: float | None = None
    data: tuple[Trained, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """What it gets back: the update to the newest anchor, and whether the contribution counts in it or in a round still
    open."""

    fragment: int
    version: int
    update: AnchorUpdate
    plan: Plan  # of the run, as it is now
    counted: bool = False
    too_old: bool = False
    anchor_hash: str = ""  # "" if it is known only when the update was applied
    participants: tuple[Participant, ...] = ()
    above: tuple[int, ...] = ()  # recent versions that no round made: they came from a layer above
    bytes_sent: int = 0
    bytes_received: int = 0
    retries: int = 0
    rejoins: int = 0
    counted_in: int = 0  # the version that holds the contribution; above `version` if it was late
    refused: str = ""  # why the contribution never will: the local weights are to be replaced by the anchor
    steps_lost: int = 0  # of a late contribution that a restarted server had forgotten, and would not have again
    watched: Watched | None = None  # how the round went (core/watch.py)
    also: tuple[Agreed, ...] = ()  # of other fragments, which a healed replica gets all at once: to be adopted first

    @property
    def unchanged(self) -> bool:
        """It is the anchor that the worker holds already."""
        return not self.update.kinds

    @property
    def anchor(self) -> Mapping[str, Tensor]:
        """By name, fp32 in host memory. For a caller that confirms nothing, and therefore is always sent the whole."""
        assert isinstance(self.update, WholeAnchor), "only what changed was sent"
        return self.update.checked()


@dataclass(frozen=True)
class Joined:
    worker_id: str
    plan: Plan
    manifest: Manifest  # the run's
    overtaken: frozenset[int] = frozenset()  # fragments with later contributions than the loaded state knows of
    last_sequences: tuple[int, ...] = ()  # by fragment, of the last contribution that the server has; () = no server
    work: tuple[int, int, int] = (0, 0, 0)  # steps, samples and tokens before, of the one it was healed from


class Ticket(Protocol):
    """One exchange of one fragment."""

    def look(self, timeout_s: float) -> Sight:
        """How it stands, when it is over or after `timeout_s`."""

    def finish(self, *, reload: bool = False) -> Agreed:
        """Wait for the agreement. `reload`: if the other side has no use for the contribution (NaN, absurd values,
        quarantine), that is no error: the newest anchor comes back whole, and says why (`refused`)."""

    def confirm(self, agreed: Agreed, intact: bool) -> Agreed | None:
        """The worker has adopted what `finish` gave it, or one of `also`, or an earlier repair; `intact`: the anchor
        has the agreed hash. None: so it is everywhere, and the next update may build on it. Else the repair: the whole
        of the newest anchor, to be rebased on and confirmed in turn."""

    def resume(self, *, stuck_after_s: float | None = None) -> Ticket:
        """Carry an exchange on that failed, or is to have another limit, under the same key: whether it counted is
        settled by asking again."""

    def pack(self) -> dict[str, Any]:
        """The contribution as plain values, for `Topology.reopen` in another process."""

    def cancel(self) -> None:
        """Nobody waits for it any more."""


class Topology(Protocol):
    """How a worker reaches the others."""

    def join(self, manifest: Manifest | None, wishes: Wishes) -> Joined: ...

    def catch_up(self, fragment: int) -> Ticket:
        """Once per fragment after joining: what leads to the newest anchor. Without a loaded state that is the whole of
        it. With one, it is what was agreed since; where the state is overtaken, the agreement that holds the last
        contribution is waited for, and said to be counted."""

    def begin(self, contribution: Contribution, *, stuck_after_s: float | None = None) -> Ticket:
        """Returns as soon as the weights may change. `stuck_after_s`: give up when too few workers are alive for the
        round to close for so long. It is given with a worker's last contribution, and then the worker stays for the
        very round that holds it."""

    def reopen(self, fragment: int, packed: Mapping[str, Any], *, late: bool = False) -> Ticket | None:
        """After joining with a loaded state: carry a packed contribution on, under the same key and with the same
        bytes. `late`: it was said to count in a round to come, so it goes along with the fragment's next exchange.
        None: it never counted and never will; its steps are unsent."""

    def leave(self, reason: str) -> None: ...

    def state_dict(self, under_way: Collection[int]) -> dict[str, Any]:
        """What this process must not forget when it is restarted, beside the contributions under way (`Ticket.pack`):
        of these fragments there is one that is awaited."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before joining."""


@runtime_checkable
class WorkerControl(Protocol):
    """Somebody watches over the workers. A topology may be one of these too; the worker asks."""

    def heartbeat(self, step: int, steps_per_second: float, loss: float | None) -> None:
        """A sign of life, from a thread of its own; whatever comes back is for `orders`."""

    def orders(self, *, at_exchange: bool) -> Orders:
        """What is asked of this worker, for the training thread to carry out. Asked after every step; `at_exchange`
        says that this step exchanged something, so that processes that train in step may confer."""


@runtime_checkable
class LossTeller(Protocol):
    """Its contributions tell the loss to whoever watches. A topology may be one of these too; the worker asks."""

    @property
    def tells_loss(self) -> bool:
        """If not, a heartbeat must."""


@runtime_checkable
class Lessor(Protocol):
    """It leases data (coordination/leases.py). A topology may be one of these too; `outerstep.data` asks."""

    def lease(self, request: LeaseRequest) -> LeaseAnswer:
        """From a thread of its own; waits for the answer."""


class DataVoice(Protocol):
    """What a worker says of its leased data, and hears of it. From any thread."""

    @property
    def datasets(self) -> Sequence[Dataset]: ...

    def say(
        self, answer: Callable[[LeaseRequest], LeaseAnswer], sync_every: int, turn: int
    ) -> tuple[LeaseStatement, ...]:
        """`answer`: what the table says that this worker holds; it is heard first. `turn`: of its last decision."""

    def decided(self, said: Sequence[LeaseStatement], events: Sequence[Event]) -> None:
        """All members have heard this statement; and what came of it."""


@runtime_checkable
class SharesData(Protocol):
    """Its members hold the lease table together (coordination/shared_leases.py). A topology may be one of these too;
    `outerstep.data` asks."""

    @property
    def data_part(self) -> tuple[int, int]:
        """This process's number among those that train each unit together, and how many they are."""

    def share_data(self, voice: DataVoice) -> None:
        """Before joining."""

    def is_admitted(self) -> bool:
        """Is this worker among those who lease? If not, it will be before long, whatever it does."""

    def leased(self, request: LeaseRequest) -> LeaseAnswer:
        """By the own table, as it was decided last: nobody is asked."""

    def wait_for_data(self) -> str | None:
        """Nothing is left to draw here, and more may come: until something may have changed. What is waited for, in
        words; None: it cannot be waited for, because the others wait for this worker's steps. Raises WorkerError if
        nothing will ever come."""

    def data_progress(self) -> list[dict[str, Any]]:
        """Of each dataset, the fields of `DataStatus`."""


@runtime_checkable
class Divided(Protocol):
    """A topology whose processes hold different tensors, or boxes of them."""

    holders: Mapping[str, int]  # by tensor that is here: how many processes hold the same of it


@runtime_checkable
class Parting(Protocol):
    """Those who end together have something left to agree on. A topology may be one of these too; the worker asks."""

    def part(self, patience_s: float) -> Sequence[Ticket]:
        """After this worker's last exchange: what is still to be adopted, by fragment."""


@runtime_checkable
class Tracked(Protocol):
    """It knows where this worker is in its life (coordination/layers/lifecycle.py). A topology may be one of these
    too."""

    @property
    def life_state(self) -> str:
        """With the sub-step; "" = not known."""


class FinishedTicket:
    """An exchange that was over before it began: there is only an anchor to adopt. `confirm` is its topology's."""

    def __init__(self, agreed: Agreed, confirm: Callable[[Agreed, bool], Agreed | None]) -> None:
        self._agreed, self._confirm = agreed, confirm

    def look(self, timeout_s: float) -> Sight:
        return Sight(done=True)

    def finish(self, *, reload: bool = False) -> Agreed:
        return self._agreed

    def confirm(self, agreed: Agreed, intact: bool) -> Agreed | None:
        return self._confirm(agreed, intact)

    def resume(self, *, stuck_after_s: float | None = None) -> FinishedTicket:
        return self

    def pack(self) -> dict[str, Any]:
        return {}

    def cancel(self) -> None:
        """There is nothing to cancel."""


def anchors_of(topology: Topology, joined: Joined) -> list[tuple[Ticket, Agreed]]:
    """The newest anchor of every fragment. All are asked for before the first is waited for."""
    tickets = [topology.catch_up(fragment) for fragment in range(len(joined.plan.fragments))]
    return [(ticket, ticket.finish()) for ticket in tickets]


__all__ = [
    "Agreed",
    "Contribution",
    "DataVoice",
    "Deltas",
    "FinishedTicket",
    "Joined",
    "Lessor",
    "LossTeller",
    "Orders",
    "Parting",
    "SharesData",
    "Sight",
    "Ticket",
    "Topology",
    "Tracked",
    "WorkerControl",
    "anchors_of",
]
