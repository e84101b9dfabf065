"""A simulated leader's leases: the machine that ships (SubLeasing) asks the simulated layer above.

(hierarchy/lease_thread.py does the same over sockets.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Protocol

from ..coordination.layers.sub_leasing import GrantedTables, SubLeasing
from ..coordination.worker.units import LeaseRequest
from ..errors import OuterstepError
from ..types import Answer, LeaseAnswer
from .agenda import Agenda

LOOK_S, ANSWER_S = 0.5, 6.0

Ask = Callable[[LeaseRequest, Callable[[Answer | OuterstepError], None]], None]


class SimDataBelow(Protocol):
    """A layer below that leases data to its members."""

    @property
    def leases(self) -> GrantedTables: ...

    def members_here(self) -> Collection[str]: ...

    def note_leases(self) -> None:
        """What the tables say is to be recorded."""


class SimLeaseAsking:
    """One request at a time; what is not answered for a while has failed."""

    machine_type: type[SubLeasing] = SubLeasing

    def __init__(
        self, below: SimDataBelow, agenda: Agenda, later: Callable[[float, Callable[[], None]], None], ask: Ask
    ) -> None:
        self.machine = self.machine_type(below.leases)
        self._below, self._agenda, self._later, self._ask = below, agenda, later, ask
        self._asked: LeaseRequest | None = None
        self._waiting: list[LeaseRequest] = []

    def look(self) -> None:
        if self._asked is None and not self._waiting:
            self._waiting = self.machine.due(self._agenda.now, self._below.members_here())
            self._note()
        if self._asked is None and self._waiting:
            self._asked = request = self._waiting.pop(0)
            self._ask(request, partial(self._answered, request))
            self._later(ANSWER_S, lambda: self._answered(request, OuterstepError("no answer")))
        self._later(LOOK_S, self.look)

    def _answered(self, request: LeaseRequest, answer: Answer | OuterstepError) -> None:
        if request is not self._asked:
            return
        self._asked = None
        if isinstance(answer, LeaseAnswer):
            self.machine.answered(request, answer, self._agenda.now)
        else:
            self.machine.failed(request, self._agenda.now)
        self._note()

    def _note(self) -> None:
        if self.machine.to_note:
            self.machine.to_note = False
            self._below.note_leases()
