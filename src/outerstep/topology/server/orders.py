"""What the server asks of a worker with its answers to heartbeats, until the training thread gets to it."""

from __future__ import annotations

import dataclasses
import threading

from ...types import HeartbeatAnswer
from ..protocol import Orders

NO_ORDERS = Orders()


class OrderBook:
    """Written by the heartbeat's thread, read by the training's. A command comes again until our "got it" arrives, and
    is obeyed once."""

    def __init__(self) -> None:
        self._asked = NO_ORDERS
        self._lock = threading.Lock()
        self._seen: set[int] = set()  # commands that were passed on
        self._obeyed: set[int] = set()  # and those the server has not been told about yet

    @property
    def acknowledged(self) -> tuple[int, ...]:
        return tuple(self._obeyed)

    @property
    def sync_every(self) -> int | None:
        return self._asked.sync_every

    @sync_every.setter
    def sync_every(self, assigned: int | None) -> None:
        with self._lock:
            self._asked = dataclasses.replace(self._asked, sync_every=assigned)

    def heard(self, answer: HeartbeatAnswer, acknowledged: tuple[int, ...]) -> None:
        with self._lock:
            self._asked = dataclasses.replace(self._asked, sync_every=answer.sync_every)
            self._obeyed -= set(acknowledged)
            for command in answer.commands:
                if command.id not in self._seen:
                    self._seen.add(command.id)
                    reason = command.reason or command.kind
                    if command.kind == "drain":
                        self._asked = dataclasses.replace(self._asked, drain=reason)
                    else:
                        self._asked = dataclasses.replace(self._asked, sync=reason)
                self._obeyed.add(command.id)

    def take(self) -> Orders:
        if self._asked is NO_ORDERS:
            return NO_ORDERS
        with self._lock:
            asked = self._asked
            self._asked = dataclasses.replace(asked, drain="", sync="")
            return asked
