"""A thread that carries exchanges beside training."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import torch

T = TypeVar("T")


class CarryingThread:
    """Does one thing after the other, in the order in which they are submitted; nobody waits for it at the end of the
    process."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._carry, name=name, daemon=True).start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        done: Future[T] = Future()
        self._work.put(partial(_fulfil, done, work))
        return done

    def stop(self) -> None:
        """After what was submitted before."""
        self._work.put(None)

    def _carry(self) -> None:
        while (work := self._work.get()) is not None:
            work()


def _fulfil(promise: Future[T], work: Callable[[], T]) -> None:
    """Do it; what it makes, or what goes wrong, is for whoever asks for the result."""
    try:
        promise.set_result(work())
    except BaseException as error:  # noqa: BLE001 - raised in the thread that asks
        promise.set_exception(error)


def step_aside(device: torch.device) -> None:
    """What this thread has a GPU do from now on goes beside the training's own stream."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
