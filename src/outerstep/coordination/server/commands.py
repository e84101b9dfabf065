"""Orders on their way to workers. They ride on heartbeat answers, again and again, until a heartbeat says "got it"."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from ...types import Command


class Commands:
    def __init__(self) -> None:
        self._pending: dict[str, dict[int, Command]] = {}
        self.last_id = 0  # saved with the run: a resumed server must not give an old number to a new order

    def issue(self, worker_id: str, kind: Literal["drain", "sync"], reason: str) -> None:
        """The same order twice is one order."""
        pending = self._pending.setdefault(worker_id, {})
        if any(command.kind == kind for command in pending.values()):
            return
        self.last_id += 1
        pending[self.last_id] = Command(id=self.last_id, kind=kind, reason=reason)

    def pending(self, worker_id: str) -> tuple[Command, ...]:
        return tuple(self._pending.get(worker_id, {}).values())

    def acknowledge(self, worker_id: str, ids: Iterable[int]) -> None:
        pending = self._pending.get(worker_id)
        if pending is None:
            return
        for id_ in ids:
            pending.pop(id_, None)
        if not pending:
            del self._pending[worker_id]

    def withdraw(self, reason: str) -> None:
        """What was ordered for this reason need not be done any more (by those who have not heard of it yet)."""
        for worker_id, pending in list(self._pending.items()):
            self.acknowledge(worker_id, [id_ for id_, command in pending.items() if command.reason == reason])

    def forget(self, worker_id: str) -> None:
        """It is gone: what it was told is void."""
        self._pending.pop(worker_id, None)
