"""A process of a benchmark and the pipe to it, for scripts whose processes are functions (harness.py: objects).

No torch: the clients of connections.py have none.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

HANG_S = 300.0


@dataclass(frozen=True)
class Failure:
    traceback: str


class Helper:
    """A process of ours and the pipe to it; leaving the context ends it."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_guarded, args=(target, theirs, arguments), daemon=True)
        self.process.start()
        theirs.close()

    def __enter__(self) -> Helper:
        return self

    def __exit__(self, *exc: object) -> None:
        self.pipe.close()
        self.process.join(timeout=20)
        self.process.kill()

    def hear(self, timeout_s: float = HANG_S) -> Any:
        if not self.pipe.poll(timeout_s):
            raise RuntimeError(f"a process said nothing for {timeout_s:g} s")
        said = self.pipe.recv()
        if isinstance(said, Failure):
            raise RuntimeError(said.traceback)
        return said

    def ask(self, question: object) -> Any:
        self.pipe.send(question)
        return self.hear()


def _guarded(target: Callable[..., None], pipe: Connection, arguments: tuple[object, ...]) -> None:
    try:
        target(pipe, *arguments)
    except EOFError:
        pass  # the parent is done with us
    except Exception:  # noqa: BLE001 - the parent raises it
        pipe.send(Failure(traceback.format_exc()))
