"""The topology above a cluster: it holds each offer back until the layer below has stored the leader's record."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from msgspec import UNSET

from ..coordination.layers.between import LayerTerms
from ..coordination.worker.exchange import Orders
from ..errors import ExchangeFailed, OuterstepError
from ..events import RoundReport
from ..topology.protocol import Contribution, Joined, Ticket
from ..topology.server.topology import ServerTopology
from ..types import Answer, Manifest, Offer, Plan, Request, Wishes
from ..wire.transport import Transport


class HeldOffers:
    """A transport that passes offers only while it is `open`. `refusal`: the error with which held offers fail instead.
    `is_silent`: nothing passes any more. A join from here would fence the process that now speaks for the cluster."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.open = threading.Event()
        self.open.set()
        self.refusal: OuterstepError | None = None
        self.is_silent = False
        self.show_session, self.status, self.close = transport.show_session, transport.status, transport.close
        self.probe_up, self.probe_down = getattr(transport, "probe_up", None), getattr(transport, "probe_down", None)
        self.spread = getattr(transport, "spread", None)

    @property
    def address(self) -> str:
        return self._transport.address

    @property
    def protocol(self) -> int:
        return self._transport.protocol

    def call(
        self,
        request: Request,
        *,
        body: memoryview | None = None,
        into: memoryview | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        if isinstance(request, Offer):
            self.open.wait()
            if self.refusal is not None:
                raise self.refusal
        if self.is_silent:
            raise ExchangeFailed("another process speaks for this cluster")
        return self._transport.call(request, body=body, into=into, timeout_s=timeout_s)


class UpwardTopology:
    """A server topology for a cluster. Each contribution carries the steps that the cluster's members took for it, and
    waits for `let_go`. (To the worker's machine, a step is a round of the cluster.)"""

    def __init__(
        self,
        make: Callable[[Transport], ServerTopology],
        transport: Transport,
        manifest: Manifest,
        rounds_per_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`manifest`: that of the cluster's run, which describes the members' whole model and not only the copy that is
        sent. `rounds_per_s`: the members' speed; 0 = unknown."""
        self._rounds_per_s = rounds_per_s
        self._held = HeldOffers(transport)
        self._server = make(self._held)
        self.begun = 0  # contributions
        self.steps_taken = 0  # by the members, since this process started
        self._counted: dict[int, int] = {}  # by fragment: how many of them are in an agreement that we hold
        self._sent: dict[int, int] = {}  # by fragment: how many of them are in the last contribution
        server = self._server
        self._manifest = manifest
        self.catch_up, self.reopen, self.lease = server.catch_up, server.reopen, server.lease
        self.state_dict, self.load_state_dict = server.state_dict, server.load_state_dict
        self.close = server.close
        self.told_to_end = ""  # the reason
        self.named = ""  # the leader that an operator has named

    def join(self, manifest: Manifest | None, wishes: Wishes) -> Joined:
        return self._server.join(self._manifest, wishes)

    @property
    def overtaken(self) -> frozenset[int]:
        """Fragments for which the layer above has later contributions than the loaded state shows."""
        return self._server.overtaken

    def terms_above(self, plan: Plan) -> LayerTerms:
        """The terms of the run above, from its plan and from its answer to our last join."""
        told = self._server.session.joined
        return LayerTerms(
            momentum=math.nan if told.outer_momentum is UNSET else told.outer_momentum,
            waits_s=plan.heartbeat_timeout_s or math.inf,
            deadline_s=None if plan.round_deadline_s is UNSET else plan.round_deadline_s,
            is_decided=plan.assignments is not UNSET or plan.outer_lr is not UNSET,  # only a controller sets these
        )

    @property
    def has_contributed(self) -> bool:
        """Whether the layer above has accepted a contribution of this cluster, from any process."""
        return any(self._server.sequences)

    def orders(self, *, at_exchange: bool) -> Orders:
        """What the server above asks of the cluster. The leader carries out an order to end: members contribute
        first."""
        orders = self._server.orders(at_exchange=at_exchange)
        self.told_to_end = self.told_to_end or orders.drain
        self.named = orders.leader or self.named
        return replace(orders, drain="", leader="")

    def heartbeat(self, step: int, steps_per_second: float, loss: float | None) -> None:
        """Report the members' speed. The machine's own figure only shows how fast it counts their rounds."""
        self._server.heartbeat(step, self._rounds_per_s(), loss)

    @property
    def is_silent(self) -> bool:
        return self._held.is_silent

    def fall_silent(self) -> None:
        """Send nothing more: another process speaks for the cluster, or soon will. From any thread."""
        self._held.is_silent = True
        self._server.close()

    def leave(self, reason: str) -> None:
        if self.is_silent:
            self._server.close()
        else:
            self._server.leave(reason)

    def begin(self, contribution: Contribution, *, stuck_after_s: float | None = None) -> Ticket:
        fragment, done = contribution.fragment, self.steps_taken
        steps = max(done - self._counted.get(fragment, 0), contribution.steps)
        self._sent[fragment] = done
        self.begun += 1
        self._held.refusal = None
        self._held.open.clear()
        try:
            return self._server.begin(replace(contribution, steps=steps), stuck_after_s=stuck_after_s)
        except BaseException:
            self.let_go()
            raise

    def let_go(self) -> None:
        """Let the contributions that were begun be offered."""
        self._held.open.set()

    def withdraw(self, why: OuterstepError) -> None:
        """Fail the contributions that were begun, without an offer."""
        self._held.refusal = why
        self._held.open.set()

    def reported(self, event: Any) -> None:
        """A round of the layer above has ended. Steps that were counted are not sent again."""
        if isinstance(event, RoundReport) and event.counted and event.fragment in self._sent:
            self._counted[event.fragment] = self._sent[event.fragment]
