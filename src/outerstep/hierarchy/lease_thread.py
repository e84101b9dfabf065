"""The thread that leases data from the layer above for a cluster's members. coordination/layers/sub_leasing.py decides
what to request and what to do with the answer. The tables belong to the cluster's server.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection

from ..coordination.layers.sub_leasing import SubLeasing
from ..coordination.worker.units import LeaseRequest
from ..errors import Busy, OuterstepError, Refused, ServerError, Superseded, UnknownWorker
from ..types import LeaseAnswer

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.2
AFTER_TROUBLE_S = 5.0
PASSING = (Busy, ServerError, Superseded, UnknownWorker)  # the next request may be answered

Change = Callable[[float, Collection[str]], bool]
"""(now, live members) → must the tables be recorded?"""


class LeaseThread:
    """The thread. `change_leases` calls its argument with exclusive access to the tables. `ask` sends a request to the
    layer above and waits for the answer."""

    def __init__(
        self,
        machine: SubLeasing,
        change_leases: Callable[[Change], None],
        ask: Callable[[LeaseRequest], LeaseAnswer],
    ) -> None:
        self._machine, self._change, self._ask = machine, change_leases, ask
        self._ended = threading.Event()
        self._said: dict[str, str] = {}  # by dataset: the last error that was logged
        self._thread = threading.Thread(target=self._live, name="outerstep-leases-above", daemon=True)

    def start(self) -> LeaseThread:
        self._thread.start()
        return self

    def end(self) -> None:
        self._ended.set()

    def _live(self) -> None:
        while not self._ended.wait(LOOK_EVERY_S):
            due: list[LeaseRequest] = []

            def look(now: float, live: Collection[str], due: list[LeaseRequest] = due) -> bool:
                due += self._machine.due(now, live)
                return self._take_note()

            try:
                self._change(look)
                for request in due:
                    self._lease(request)
            except Exception:
                log.exception("the cluster cannot lease data from the layer above for now")
                self._ended.wait(AFTER_TROUBLE_S)

    def _lease(self, request: LeaseRequest) -> None:
        name = request.dataset.name
        try:
            answer = self._ask(request)
        except OuterstepError as error:
            is_final = isinstance(error, Refused) and not isinstance(error, PASSING)
            if not self._ended.is_set() and self._said.get(name) != str(error):
                log.log(logging.WARNING if is_final else logging.INFO, "no lease of %r from above: %s", name, error)
                self._said[name] = str(error)
            refusal = error if is_final and isinstance(error, Refused) else None

            def fail(now: float, live: Collection[str]) -> bool:
                self._machine.failed(request, now, refusal)
                return False

            self._change(fail)
            return
        self._said.pop(name, None)

        def take(now: float, live: Collection[str]) -> bool:
            self._machine.answered(request, answer, now)
            return self._take_note()

        self._change(take)

    def _take_note(self) -> bool:
        noted, self._machine.to_note = self._machine.to_note, False
        return noted
