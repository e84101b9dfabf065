"""The demo of leased data: workers, a loader process and the server are killed, and every unit is accounted for.

One epoch, two workers that resume from what they saved, and a guest that is killed and never comes back. What is told
at the end comes from the server: what it says is done, and what it wrote into its event log.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, cast

from rich.console import Console
from rich.table import Table

from ..errors import TransportError
from ..events import UnitsDone, UnitsRepeated, UnitsReturned
from ..model_folder import load_state_dict, save_model
from ..ranges import NONE, Ranges
from ..wire.http_transport import HttpTransport
from .leased_member import DATASET
from .member import SMALL, held_out_loss
from .model import build_model
from .processes import DemoFailed, Process, free_port, python_module, tell_page, wait_for_server

UNIT_SAMPLES = 20  # not a multiple of a batch, so that contributions end in the middle of units, too
UNITS, QUICK_UNITS = 500, 300
SYNC_EVERY = 8
DEAD_AFTER_S = 6.0
PATIENCE_S = 240.0  # without a unit more, something is wrong
LOOK_S = 0.2
LEFT, RIGHT, GUEST = "left", "right", "guest"


@dataclass(frozen=True)
class LedgerSettings:
    folder: Path
    seed: int = 0
    units: int = UNITS
    pace_s: float = 0.05


@dataclass
class Ledger:
    """What became of the units of an epoch: also as results.json. `done`: by worker; `returned`: given back by it;
    `repeated`: trained by it though a part of them was in the model; `starts`: how often each process was started."""

    units: int
    done: dict[str, int]
    returned: dict[str, int]
    repeated: dict[str, int]
    counted_again: int  # by the server: those, and what was trained whole once more
    lost: int
    spent: int
    starts: dict[str, int]
    moments: list[tuple[float, str]]
    missing: list[int] = field(default_factory=list)  # places that no worker is said to have done
    twice: list[int] = field(default_factory=list)  # places that two events call done
    samples: int = 0  # of the exported list
    loss_before: float = 0.0
    loss: float = 0.0

    @property
    def verdict(self) -> str:
        total = sum(self.done.values())
        if self.missing or total != self.units or self.lost or self.spent:
            what = f"{total} of {self.units} units are said to be done, {self.lost} lost, {self.spent} spent"
            return f"Not every unit is accounted for ({what}; missing: {self.missing[:10]}): this must not happen."
        again = f"{self.counted_again} of them, or a part of them, came in once more, and were counted"
        return f"Every one of {self.units} units is in the model; {again if self.counted_again else 'none twice'}."


def run_ledger(settings: LedgerSettings, console: Console) -> Ledger:
    """Play it, and print what became of every unit."""
    console.print(
        f"Two workers and a guest share one epoch of {settings.units} units. A worker, a loader process and the server "
        f"are killed (SIGKILL) and started again; the guest is killed for good.\n"
        f"Everything is written to [bold]{settings.folder}[/bold].",
        highlight=False,
    )
    play = _Play(settings, console)
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _interrupt) if is_main else None
    try:
        play.go()
        ledger = play.ledger()
    finally:
        play.end()
        if is_main:
            signal.signal(signal.SIGTERM, before)
    (settings.folder / "results.json").write_text(json.dumps(asdict(ledger) | {"verdict": ledger.verdict}, indent=2))
    _tell(ledger, settings.folder, console)
    return ledger


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


class _Play:
    """The processes, and what is done to them."""

    def __init__(self, settings: LedgerSettings, console: Console) -> None:
        self._settings, self._console, self._folder = settings, console, settings.folder
        self._folder.mkdir(parents=True, exist_ok=True)
        for old in (*self._folder.glob("*.jsonl*"), *self._folder.glob("*.log"), *self._folder.glob("*.pt")):
            old.unlink()
        shutil.rmtree(self._folder / "run", ignore_errors=True)
        save_model(build_model(settings.seed, SMALL), self._folder / "initial")
        self._port, self._around = free_port(), ExitStack()
        self._processes: list[Process] = []  # all that ever were
        self._running: dict[str, Process] = {}
        self._starts: dict[str, int] = {}
        self._moments: list[tuple[float, str]] = []
        self._began_at = time.monotonic()
        self._transport: HttpTransport | None = None
        self._data: dict[str, Any] = {"done": 0}  # as the server says

    # --- what is done ---------------------------------------------------------------------------------------------

    def go(self) -> None:
        units = self._settings.units
        self._start_server()
        for name in (LEFT, RIGHT, GUEST):
            self._start(name)
        self._until(lambda: self._data["done"] >= units // 12 and self._has_loaders(RIGHT))
        self._kill(GUEST, "the guest is killed, for good")
        self._until(lambda: self._data["done"] >= units // 6)
        self._kill(LEFT, "left is killed")
        self._start(LEFT)
        self._until(lambda: self._has_trained(LEFT) and self._data["done"] >= units // 3)
        self._kill_loader(RIGHT)
        self._start(RIGHT)
        self._until(lambda: self._has_trained(RIGHT) and self._data["done"] >= units // 2)
        self._kill("server", "the server is killed")
        self._start_server()
        self._until(lambda: not self._running.keys() - {"server"})

    def _start_server(self) -> None:
        command = python_module(
            "outerstep", "server", "-m", self._folder / "initial", "-n", 2, "--host", "127.0.0.1", "--port", self._port,
            "--save-dir", self._folder / "run", "--durability", "round", "--event-log", self._events,
            "--sync-every", SYNC_EVERY, "--heartbeat-timeout", DEAD_AFTER_S, "--codec", "fp32",
        )  # fmt: skip
        environ = {"OUTERSTEP_CREDENTIALS": str(self._credentials)}
        server = self._begin("server", command, environ, None)
        transport = wait_for_server(server, f"127.0.0.1:{self._port}", self._credentials)
        if self._transport is None:
            tell_page(transport, self._credentials, self._console, self._around)
        else:
            self._transport.close()
        self._transport = transport

    @property
    def _credentials(self) -> Path:
        return self._folder.absolute() / "credentials"

    @property
    def _events(self) -> Path:
        return self._folder / "events.jsonl"

    def _start(self, name: str) -> None:
        progress = self._folder / f"{name}-{self._starts.get(name, 0) + 1}.jsonl"
        settings = self._settings
        command = python_module(
            "outerstep.demo.leased_member", "--folder", self._folder, "--name", name, "--seed", settings.seed,
            "--samples", settings.units * UNIT_SAMPLES, "--unit", UNIT_SAMPLES, "--pace", settings.pace_s,
            "--progress", progress,
        )  # fmt: skip
        environ = {
            "DILOCO_SERVER": f"127.0.0.1:{self._port}",
            "DILOCO_WORKER_ID": name,
            "DILOCO_HEARTBEAT_INTERVAL": "1",
            "OUTERSTEP_CREDENTIALS": str(self._credentials),
            "OUTERSTEP_IDENTITY_DIR": str(self._folder.absolute() / "identities"),
        }
        self._begin(name, command, environ, progress)

    def _begin(self, name: str, command: list[str], environ: dict[str, str], progress: Path | None) -> Process:
        number = self._starts[name] = self._starts.get(name, 0) + 1
        process = Process(name, command, self._folder / f"{name}-{number}.log", progress, environ=environ, apart=True)
        self._processes.append(process)
        self._running[name] = process
        return process.start()

    def _kill(self, name: str, what: str) -> None:
        self._running.pop(name).kill()
        self._tell(what)

    def _kill_loader(self, name: str) -> None:
        """PyTorch ends a job whose loader process has died."""
        process = self._running.pop(name)
        os.kill(self._loaders(process)[0], signal.SIGKILL)
        self._tell(f"a loader process of {name} is killed: PyTorch ends the worker with an error")
        assert process.child is not None
        give_up_at = time.monotonic() + PATIENCE_S
        while (code := process.child.poll()) is None:
            if time.monotonic() > give_up_at:
                raise DemoFailed(f"{name} did not end, though a loader process of it was killed; see {process.log}")
            time.sleep(LOOK_S)
        if code == 0:
            raise DemoFailed(f"{name} had ended before its loader process was killed; see {process.log}")

    def _loaders(self, process: Process) -> list[int]:
        reports = process.reports()
        return [int(pid) for pid in reports[-1]["loaders"]] if reports else []

    def _has_loaders(self, name: str) -> bool:
        return bool(self._loaders(self._running[name]))

    def _has_trained(self, name: str) -> bool:
        """Since its last start."""
        if name not in self._running:
            raise DemoFailed(f"the epoch was over before {name} was back; see {self._folder}")
        return bool(self._running[name].reports())

    def _tell(self, what: str) -> None:
        done = f"{self._data['done']} of {self._settings.units} units done"
        self._moments.append((time.monotonic() - self._began_at, what))
        self._console.print(f"{self._moments[-1][0]:5.0f} s  {done}: {what}", highlight=False)

    def _until(self, is_so: Callable[[], bool]) -> None:
        moved_at = time.monotonic()
        while True:
            before = self._data["done"]
            self._look()
            if is_so():
                return
            moved_at = time.monotonic() if self._data["done"] != before else moved_at
            if time.monotonic() - moved_at > PATIENCE_S:
                raise DemoFailed(f"no unit more was done within {PATIENCE_S:g} s; see {self._folder}")
            time.sleep(LOOK_S)

    def _look(self) -> None:
        assert self._transport is not None
        for name, process in list(self._running.items()):
            if not process.is_running():
                if name == "server":
                    raise DemoFailed(f"the server ended too soon; see {process.log}")
                del self._running[name]
        try:
            found = cast(list[dict[str, Any]], self._transport.status()["data"])
        except TransportError:
            return  # it is asked again
        self._data = next((one for one in found if one["name"] == DATASET), self._data)

    def end(self) -> None:
        """Nobody is left behind."""
        for process in self._processes:
            process.kill()
        self._around.close()
        if self._transport is not None:
            self._transport.close()

    # --- what is told ---------------------------------------------------------------------------------------------

    def _export(self) -> int:
        """As a user does it. How many samples it lists, each once."""
        table = self._folder / "samples.csv"
        command = python_module(
            "outerstep", "data", "--server", f"127.0.0.1:{self._port}", "--credentials", self._credentials,
            "--export", table, "--events", self._events,
        )  # fmt: skip
        process = self._begin("export", command, {}, None)
        assert process.child is not None
        process.child.wait(PATIENCE_S)
        process.is_running()
        with table.open(newline="") as file:
            return len({row["sample"] for row in csv.DictReader(file)})

    def ledger(self) -> Ledger:
        self._look()
        data = self._data
        samples = self._export()
        self._running["server"].stop()
        done = _events(self._events, UnitsDone.kind)
        returned = _events(self._events, UnitsReturned.kind)
        repeated = _events(self._events, UnitsRepeated.kind)
        everything, twice = NONE, NONE
        for places in (each for theirs in done.values() for each in theirs):
            everything, twice = everything | places, twice | (everything & places)
        return Ledger(
            units=data["units"],
            done=data["done_by"],
            returned=_totals(returned),
            repeated=_totals(repeated),
            counted_again=data["repeated"],
            lost=data["lost"],
            spent=data["spent"],
            starts=self._starts,
            moments=self._moments,
            missing=list((Ranges([(0, data["units"])]) - everything).numbers()),
            twice=list(twice.numbers()),
            samples=samples,
            loss_before=held_out_loss(load_state_dict(self._folder / "initial")),
            loss=held_out_loss(load_state_dict(self._folder / "run" / "latest")),
        )


def _events(log: Path, kind: str) -> dict[str, list[Ranges]]:
    """By worker, the places of each event."""
    found: dict[str, list[Ranges]] = {}
    for line in log.read_text().splitlines():
        event: dict[str, Any] = json.loads(line)
        if event["event"] == kind:
            found.setdefault(event["worker"], []).append(Ranges(event["places"]))
    return found


def _totals(events: Mapping[str, list[Ranges]]) -> dict[str, int]:
    return {worker: sum(places.total for places in theirs) for worker, theirs in events.items()}


def _tell(ledger: Ledger, folder: Path, console: Console) -> None:
    table = Table(title="the ledger: units, as the server says and its event log")
    for heading in ("worker", "started", "done", "given back", "a part once more"):
        table.add_column(heading, justify="left" if heading == "worker" else "right")
    for name in (LEFT, RIGHT, GUEST):
        counts = (ledger.starts, ledger.done, ledger.returned, ledger.repeated)
        table.add_row(name, *(str(each.get(name, 0)) for each in counts))
    sums = (ledger.done, ledger.returned, ledger.repeated)
    table.add_row("all", "", *(str(sum(each.values())) for each in sums), style="bold")
    console.print(table)
    console.print(f"held-out loss, nats per byte: {ledger.loss_before:.3f} → {ledger.loss:.3f}", highlight=False)
    console.print(ledger.verdict, highlight=False)
    console.print(f"which sample came in by whom: {folder / 'samples.csv'}  logs: {folder}", highlight=False)
