"""The rounds thread: carries out the coordinator's heavy effects, in the order in which they were decided.

Contributions are added, rounds closed and states saved by this one thread. So a sum never misses a contribution that
was accepted before its round closed, a round ends in one place, and between two rounds nothing moves. It holds no lock
while it works; only the end of a round is announced under the lock that guards the coordinator.
"""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..coordination.effects import Accumulate, CloseRound
from ..coordination.remembered import Remembered, remember
from ..core.delayed import DelayedNesterov
from ..errors import ServerError, ServerFailed
from ..types import ContributionKey
from .keeping import snapshot
from .store import Addend

if TYPE_CHECKING:
    from .service import ParameterService

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Save:
    """Somebody asks for the state to be written, and waits to hear where. `remembered`: as of the decisions before."""

    reason: str
    remembered: Remembered
    done: queue.SimpleQueue[Path | ServerError] = field(default_factory=queue.SimpleQueue)


class RoundsThread:
    def __init__(self, service: ParameterService) -> None:
        self._service = service
        self._pending: dict[int, list[Accumulate]] = {}  # accepted and not added yet, by fragment
        self._work: queue.SimpleQueue[Accumulate | CloseRound | _Save | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._carry_out, name="outerstep-rounds", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, effect: Accumulate | CloseRound) -> None:
        self._work.put(effect)

    def stop(self) -> None:
        """Finish what was decided, then end."""
        self._work.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def save(self, reason: str) -> Path | ServerError:
        """Write the state between two rounds; from any thread."""
        with self._service.changed:  # so that it takes its place among the decisions
            job = _Save(reason, remember(self._service.coordinator))
            if self._thread.is_alive():
                self._work.put(job)
        if not self._thread.is_alive():
            return self._save(reason, job.remembered)
        while True:
            try:
                return job.done.get(timeout=1.0)
            except queue.Empty:
                if not self._thread.is_alive():
                    return ServerFailed(f"the server has stopped: {self._service.failure or 'it was asked to'}")

    # --- in the thread --------------------------------------------------------------------------------------------

    def _carry_out(self) -> None:
        while (effect := self._work.get()) is not None:
            try:
                match effect:
                    case Accumulate():
                        self._pending.setdefault(effect.key.fragment, []).append(effect)
                    case CloseRound():
                        self._close(effect)
                    case _Save():
                        effect.done.put(self._save(effect.reason, effect.remembered))
                if self._work.empty():
                    self._accumulate()
            except Exception as error:  # the model may be half done: say so to everybody and do nothing more
                log.exception("the server cannot go on")
                self._service.fail(f"{type(effect).__name__} failed: {type(error).__name__}: {error}")
                self._disappoint(effect)
                return
        self._disappoint(None)

    def _disappoint(self, last: Accumulate | CloseRound | _Save | None) -> None:
        """This thread ends; nobody who asked for a save may go on waiting for it."""
        left = [last]
        while not self._work.empty():
            left.append(self._work.get())
        for effect in left:
            if isinstance(effect, _Save):
                effect.done.put(ServerFailed(f"the server is stopping: {self._service.failure or 'it was asked to'}"))

    def _accumulate(self) -> None:
        """Nothing else is to be done: add what has come, and free its bytes. Together, so that the sum goes through
        the processor once for all of it; what comes with the end of its round is added by the step itself."""
        if self._keeps_contributions:
            return
        for fragment, pending in self._pending.items():
            waiting = [accepted for accepted in pending if not accepted.keep]
            if not waiting:
                continue
            addends = [self._addend(accepted) for accepted in waiting]
            self._service.stores[fragment].accumulate(waiting[0].version, addends)
            for accepted in waiting:
                self._free(accepted.key)
            self._pending[fragment] = [accepted for accepted in pending if accepted.keep]

    @property
    def _keeps_contributions(self) -> bool:
        """Until their round closes. Delayed Nesterov: its momentum moves with every push, and between two rounds model
        and momentum must belong together. The deterministic mode: their order is known only then."""
        return self._service.config.deterministic or isinstance(self._service.optimizer, DelayedNesterov)

    def _close(self, effect: CloseRound) -> None:
        service, waiting = self._service, self._pending.pop(effect.fragment, [])
        assert service.optimizer is not None
        if service.config.deterministic:
            waiting.sort(key=lambda accepted: (accepted.key.worker_id, accepted.key.sequence))
        taken = [accepted for accepted in waiting if accepted.key not in effect.left_out]
        store, addends = service.stores[effect.fragment], [self._addend(accepted) for accepted in taken]
        made = store.close(effect.version, service.optimizer, addends, service.clock())
        del addends  # their rooms can be used again
        for accepted in waiting:
            self._free(accepted.key)
        service.announce(store, made, effect.participants)
        if effect.remembered is not None and service.keeper.is_due(min(effect.remembered.versions)):
            self._save("periodic", effect.remembered)

    def _addend(self, accepted: Accumulate) -> Addend:
        weight = accepted.scale if isinstance(self._service.optimizer, DelayedNesterov) else accepted.weight
        payload = self._service.intake.payload(accepted.key)
        return Addend(payload, weight, accepted.base_version, accepted.sections)

    def _free(self, key: ContributionKey) -> None:
        with self._service.changed:
            self._service.intake.free(key)
            self._service.coordinator.freed(key)

    def _save(self, reason: str, remembered: Remembered) -> Path | ServerError:
        return self._service.keeper.keep(snapshot(self._service, remembered), reason)
