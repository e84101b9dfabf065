"""The way up: no contribution is offered to the layer above before the cluster's own disk holds it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..events import RoundReport
from ..topology.protocol import Contribution, Joined, Ticket
from ..topology.server.topology import ServerTopology
from ..types import Answer, Manifest, Offer, Request, Wishes
from ..wire.transport import Transport


class HeldOffers:
    """A transport that lets offers pass only while it is `open`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.open = threading.Event()
        self.open.set()
        self.show_session, self.status, self.close = transport.show_session, transport.status, transport.close

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
        return self._transport.call(request, body=body, into=into, timeout_s=timeout_s)


class UpwardTopology:
    """A server topology whose contributions say how many steps the cluster's members took for them, and are held back
    until `let_go`. (To the worker's machine a step is a round of the cluster.)"""

    def __init__(self, make: Callable[[Transport], ServerTopology], transport: Transport, manifest: Manifest) -> None:
        """`manifest`: of the cluster's run, which knows what its members' model is beside the copy that is sent."""
        self._held = HeldOffers(transport)
        self._server = make(self._held)
        self.begun = 0  # contributions
        self.steps_taken = 0  # by the members, since this process began
        self._counted: dict[int, int] = {}  # of those, by fragment: in an agreement that we hold
        self._sent: dict[int, int] = {}  # or in the last contribution
        server = self._server
        self._manifest = manifest
        self.catch_up, self.leave, self.reopen = server.catch_up, server.leave, server.reopen
        self.state_dict, self.load_state_dict = server.state_dict, server.load_state_dict
        self.heartbeat, self.orders, self.close = server.heartbeat, server.orders, server.close

    def join(self, manifest: Manifest | None, wishes: Wishes) -> Joined:
        return self._server.join(self._manifest, wishes)

    def begin(self, contribution: Contribution, *, stuck_after_s: float | None = None) -> Ticket:
        fragment, done = contribution.fragment, self.steps_taken
        steps = max(done - self._counted.get(fragment, 0), contribution.steps)
        self._sent[fragment] = done
        self.begun += 1
        self._held.open.clear()
        try:
            return self._server.begin(replace(contribution, steps=steps), stuck_after_s=stuck_after_s)
        except BaseException:
            self.let_go()
            raise

    def let_go(self) -> None:
        """What was begun may be offered."""
        self._held.open.set()

    def reported(self, event: Any) -> None:
        """A round of the layer above: what counts is not sent again."""
        if isinstance(event, RoundReport) and event.counted and event.fragment in self._sent:
            self._counted[event.fragment] = self._sent[event.fragment]
