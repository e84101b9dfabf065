"""What the benchmarks with several processes share: actors, barriers, and what the kernel says about a process.

An *actor* is an object that lives in a process of its own. The parent calls its methods by name over a pipe:

    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Actor(Client, address)) for _ in range(4)]
        together(clients, "connect")
        seconds = wall_s(together(clients, "upload"))

`together` is the barrier: nobody is told to begin before everybody has answered the call before. Times come from the
processes themselves, by the one monotonic clock of the machine; the slowest counts, from the first one's start.

Every process has one thread for arithmetic: several torch processes with more than that on few cores stall each other.
Everything listens on 127.0.0.1 and port 0.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import socket
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import rich.box
from rich.console import Console
from rich.table import Table

HOST = "127.0.0.1"
HANG_S = 300.0  # an actor silent for so long is taken for dead; never a measurement
SAMPLE_S = 0.01
RELAY_BYTES = 1 << 18
PRELOADED = ["torch", "torch._dynamo", "outerstep.server", "outerstep.worker"]  # an optimizer needs the second

os.environ["OMP_NUM_THREADS"] = "1"  # for the children; their torch is not loaded yet
_log = Console(stderr=True)


def say(line: str) -> None:
    """A line of progress, with the time: who waits for minutes wants to see that something happens."""
    _log.print(f"{time.strftime('%H:%M:%S')} {line}", markup=False, highlight=False)


# --- actors -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """One call of an actor's method: what it returned, when it began and when it ended."""

    value: Any
    start_s: float
    end_s: float


def wall_s(spans: Sequence[Span]) -> float:
    """From the first one's start to the last one's end."""
    return max(span.end_s for span in spans) - min(span.start_s for span in spans)


class Actor:
    """An object of `kind` in a process of its own; leaving the context closes the object and ends the process.

    `start` "forkserver" is quick, because torch is imported once for all; "spawn" has nothing of anybody else in its
    memory, for where that is measured.
    """

    def __init__(
        self,
        kind: Callable[..., Any],
        *args: object,
        start: Literal["forkserver", "spawn"] = "forkserver",
        has_children: bool = False,  # then it must end by itself: nobody ends its children for it
        **settings: object,
    ) -> None:
        context: Any = multiprocessing.get_context(start)
        if start == "forkserver":
            context.set_forkserver_preload(PRELOADED)
        self.name = getattr(kind, "__name__", str(kind))
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_live, args=(partial(kind, *args, **settings), theirs), daemon=not has_children
        )
        self._process.start()
        theirs.close()
        self._made = False

    def __enter__(self) -> Actor:
        return self

    def __exit__(self, failed: object, *exc: object) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(timeout=0.5 if failed else 10)  # after a failure it may be in the middle of a call
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def tell(self, method: str, *args: object) -> None:
        """Begin a call; `hear` its end."""
        if not self._made:
            self._receive()  # its constructor is done
            self._made = True
        self._pipe.send((method, args))

    def hear(self) -> Span:
        answer = self._receive()
        assert isinstance(answer, Span)
        return answer

    def ask(self, method: str, *args: object) -> Any:
        self.tell(method, *args)
        return self.hear().value

    def _receive(self) -> Any:
        ready = multiprocessing.connection.wait([self._pipe, self._process.sentinel], HANG_S)
        if self._pipe not in ready and not self._pipe.poll():
            what = f"said nothing for {HANG_S:.0f} s" if not ready else f"ended with {self._process.exitcode}"
            raise RuntimeError(f"{self.name} (process {self._process.pid}) {what}")
        answer = self._pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(f"{self.name} (process {self._process.pid}) failed:\n{answer}")
        return answer


def together(actors: Sequence[Actor], method: str, *args: object) -> list[Span]:
    """The same call to all of them at once."""
    for actor in actors:
        actor.tell(method, *args)
    return [actor.hear() for actor in actors]


def _live(make: Callable[[], Any], pipe: multiprocessing.connection.Connection) -> None:
    """The process of an actor. Whatever goes wrong is the parent's to raise."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    try:
        actor = make()
        pipe.send(None)
        while (order := pipe.recv()) is not None:
            method, given = order
            start_s = time.monotonic()
            value = getattr(actor, method)(*given)
            pipe.send(Span(value, start_s, time.monotonic()))
        actor.close()
    except (EOFError, KeyboardInterrupt):
        pass  # the parent is gone
    except Exception:  # noqa: BLE001 - told to the parent
        with contextlib.suppress(OSError):
            pipe.send(traceback.format_exc())


# --- what the kernel knows --------------------------------------------------------------------------------------------


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process so far, those that have ended included; to a hundredth."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def status_bytes(pid: int, field: str) -> int:
    """A line of /proc/PID/status that counts memory: RssAnon, RssFile, VmHWM, …"""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def available_bytes() -> int:
    """Memory that can be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise KeyError("MemAvailable")


class MemoryWatch:
    """The most anonymous memory (RssAnon: heap and private mappings, no file pages) that a process had at a time.

    It is sampled every 10 ms. What a shorter peak could add is bounded by `most_resident_bytes`, which the kernel keeps
    exactly (VmHWM, reset at the start) but with the pages of libraries and other files in it.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.peak_anon_bytes = 0
        self.most_resident_bytes = 0

    def __enter__(self) -> MemoryWatch:
        with contextlib.suppress(OSError):
            Path(f"/proc/{self._pid}/clear_refs").write_text("5")
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        if not self._end.is_set():
            self._end.set()
            self._thread.join()
            with contextlib.suppress(OSError, KeyError):
                self.most_resident_bytes = status_bytes(self._pid, "VmHWM")

    def _watch(self) -> None:
        with contextlib.suppress(OSError, KeyError):  # the process has ended
            while not self._end.wait(SAMPLE_S):
                self.peak_anon_bytes = max(self.peak_anon_bytes, status_bytes(self._pid, "RssAnon"))


class Relay:
    """A door in front of a server that counts what goes through its sockets, heads and all, in either direction."""

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("http://").rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server((HOST, 0), backlog=128)
        self.address = f"http://{HOST}:{self._listener.getsockname()[1]}"
        self.up_bytes = 0
        self.down_bytes = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                for sock in (near, far):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._pass_on, args=(near, far, True), daemon=True).start()
                threading.Thread(target=self._pass_on, args=(far, near, False), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, is_up: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(RELAY_BYTES):
                with self._lock:
                    self.up_bytes += len(data) if is_up else 0
                    self.down_bytes += 0 if is_up else len(data)
                target.sendall(data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


# --- reporting --------------------------------------------------------------------------------------------------------


def median(values: Iterable[float]) -> float:
    return statistics.median(list(values))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1) -> None:
    """The first `words` columns are words, the others numbers."""
    table = Table(title=title, box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < words else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    out = Console()
    Console(width=out.width if out.is_terminal else 120).print(table)


def write_json(file: Path | None, report: dict[str, Any]) -> None:
    if file is not None:
        file.write_text(json.dumps(report, indent=2) + "\n")
        say(f"wrote {file}")
