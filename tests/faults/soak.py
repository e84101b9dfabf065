"""A long storm over a real run: everything is killed, frozen, restarted and cut off at random, over TLS.

    python tests/faults/soak.py --minutes 60 --seed 7
    python tests/faults/soak.py --hostile           # meanwhile a token holder says everything there is to say

A server and workers run as processes, each worker behind a line of its own (proxy.py). Then it is calm: rounds must go
on with everybody, all must end cleanly, and the histories (histories.py) must keep every promise. The seed draws the
storm, not what the machine makes of it.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

from faults.histories import Facts, read_lines, violations  # noqa: E402
from faults.proxy import Flapping, Proxy, pass_on  # noqa: E402
from outerstep.errors import OuterstepError  # noqa: E402
from outerstep.model_folder import save_model  # noqa: E402
from outerstep.wire.http_transport import HttpTransport  # noqa: E402
from ports import free_port  # noqa: E402
from support import Ledger  # noqa: E402

SYNC_EVERY = 20
CALM_ROUNDS = 3
CALM_S = 300.0  # until then they must have been made
STOP_S = 120.0

TRAIN = """
import json, os, pathlib, sys, time
sys.path.insert(0, {tests!r})
import torch, outerstep
from outerstep.topology.update import anchor_hash
from support import Ledger, count
torch.set_num_threads(1)
name, cell, cells, stop = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), pathlib.Path("stop")
model = Ledger(cells)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
with open(f"{{name}}.seen", "a", buffering=1) as seen, outerstep.attach(model, optimizer) as worker:
    known = -1
    while not stop.exists() and not worker.should_stop:
        count(model, optimizer, cell, 1)
        version = worker.sync_metrics["versions"][0]
        if version != known:
            known = version
            with worker.global_weights():
                facts = {{"hash": anchor_hash([model.cells.detach()]), "cells": model.cells.tolist()}}
            print(json.dumps({{"version": version, "pid": os.getpid(), **facts}}), file=seen)
        time.sleep(0.01)
"""


class Worker:
    """One worker id: its line, its present process, and those that were left behind frozen."""

    def __init__(self, storm: Storm, index: int) -> None:
        self.storm, self.index, self.name = storm, index, f"w{index}"
        self.line = Proxy(storm.address)
        self.process: subprocess.Popen[bytes] | None = None
        self.frozen: list[subprocess.Popen[bytes]] = []
        self.ended_by_us: set[int] = set()

    def start(self) -> None:
        script = [str(self.storm.folder / "train.py"), self.name, str(self.index), str(len(self.storm.names))]
        settings = {"heartbeat_interval": 1.0, "offline_after_s": 2.0, "offline_rounds": 1000, "join_timeout_s": 600.0}
        environ = {f"OUTERSTEP_{name.upper()}": str(value) for name, value in settings.items()}
        environ |= {"DILOCO_SERVER": self.line.address, "DILOCO_WORKER_ID": self.name}
        self.process = self.storm.spawn(self.name, script, **environ)

    @property
    def is_at_work(self) -> bool:
        """It runs, and has joined: a process that joins after its replacement would be taken for the newer one."""
        if self.process is None or self.process.poll() is not None:
            return False
        return any(fact["pid"] == self.process.pid for fact in read_lines(self.storm.folder / f"{self.name}.seen"))

    def end(self, how: signal.Signals) -> None:
        assert self.process is not None
        self.ended_by_us.add(self.process.pid)
        self.process.send_signal(signal.SIGCONT)
        self.process.send_signal(how)

    def replace(self) -> None:
        """The old process stays, frozen; when it wakes up it is fenced, and ends."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        self.ended_by_us.add(self.process.pid)
        self.frozen.append(self.process)
        self.start()

    def thaw(self) -> None:
        for process in self.frozen:
            process.send_signal(signal.SIGCONT)
        self.frozen.clear()

    def mend(self) -> None:
        """Running, awake and reachable."""
        self.line.is_open, self.line.up, self.line.down = True, pass_on, pass_on
        self.line.passing.set()
        self.thaw()
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)
        if self.process.poll() is not None:
            self.start()

    def odd_end(self) -> str:
        """How its present process ended, if nobody ended it."""
        assert self.process is not None
        code = self.process.poll()
        if code is None or self.process.pid in self.ended_by_us:
            return ""
        return f"{self.name} ended by itself with exit code {code}; see {self.storm.folder / self.name}.log"


class Storm:
    """The run, and what is done to it."""

    def __init__(self, folder: Path, workers: int, seed: int, *, compat_port: int | None = None) -> None:
        self.folder, self.random, self.compat_port = folder, random.Random(seed), compat_port
        self.names = [f"w{i}" for i in range(workers)]
        self.address = f"127.0.0.1:{free_port()}"
        self.done: Counter[str] = Counter()
        self.problems: list[str] = []
        self._children: list[subprocess.Popen[bytes]] = []
        self._later: list[tuple[float, Callable[[], None]]] = []
        save_model(Ledger(workers), folder / "model")
        (folder / "train.py").write_text(TRAIN.format(tests=str(TESTS)))
        self.transport = HttpTransport(self.address, timeout_s=5.0, credentials=folder / "credentials")
        self.server = self.start_server()
        self._wait(lambda: self.status() is not None, "the server never answered")
        self.workers = [Worker(self, i) for i in range(workers)]
        for worker in self.workers:
            worker.start()

    def spawn(self, name: str, arguments: list[str], **environ: str) -> subprocess.Popen[bytes]:
        own = {"OMP_NUM_THREADS": "1", "OUTERSTEP_CREDENTIALS": str(self.folder / "credentials"), **environ}
        with (self.folder / f"{name}.log").open("ab") as log:
            child = subprocess.Popen(
                [sys.executable, *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env={**os.environ, **own},
            )
        self._children.append(child)
        return child

    def start_server(self) -> subprocess.Popen[bytes]:
        """The same command each time: it goes on with the run that lies in its folder."""
        flags = ["-m", "model", "-n", len(self.names), "--port", self.address.split(":")[1], "--save-dir", "run"]
        flags += ["--sync-every", SYNC_EVERY, "--round-deadline", 3, "--heartbeat-timeout", 6, "--start-deadline", 10]
        flags += ["--outer-lr", 1, "--outer-momentum", 0, "--codec", "fp32", "--event-log", "events.jsonl"]
        flags += ["--compat-port", self.compat_port] if self.compat_port is not None else []
        self.server = self.spawn("server", ["-m", "outerstep", "server", *map(str, flags)])
        return self.server

    def status(self) -> dict[str, Any] | None:
        try:
            return self.transport.status()
        except OuterstepError:
            return None

    def round(self) -> int:
        status = self.status()
        return -1 if status is None else int(status["sync_round"])

    # --- the storm ------------------------------------------------------------------------------------------------

    def rage(self, seconds: float) -> None:
        """One misfortune after the other, to whoever is up; what has ended is started again a little later."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._strike()
            time.sleep(self.random.uniform(0.2, 3.0))
            self._do_what_is_due()
            self._restart_what_ended()

    def _strike(self) -> None:
        worker = self.random.choice(self.workers)
        kinds: list[dict[str, Callable[[], None]]] = [
            {
                "line cut": worker.line.cut_all,
                "line closed": lambda: self._close(worker),
                "line flapping": lambda: self._flap(worker),
                "line stalled": lambda: self._stall(worker),
            }
        ]
        if worker.is_at_work:
            kinds.append(
                {
                    "worker killed": lambda: worker.end(signal.SIGKILL),
                    "worker told to end": lambda: worker.end(signal.SIGTERM),
                    "worker frozen": lambda: self._freeze(worker),
                    "worker replaced": worker.replace,
                }
            )
        if self.status() is not None:
            kinds.append(
                {
                    "server killed": lambda: self._end_server(signal.SIGKILL),
                    "server told to end": lambda: self._end_server(signal.SIGTERM),
                    "server frozen": self._freeze_server,
                }
            )
        strikes = self.random.choice(kinds)
        kind = self.random.choice(sorted(strikes))
        strikes[kind]()
        self.done[kind] += 1

    def _after(self, least_s: float, most_s: float, then: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + self.random.uniform(least_s, most_s), then))

    def _freeze(self, worker: Worker) -> None:
        process = worker.process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        self._after(0.5, 8.0, lambda: process.send_signal(signal.SIGCONT))

    def _close(self, worker: Worker) -> None:
        worker.line.is_open = False
        worker.line.cut_all()
        self._after(0.5, 8.0, lambda: setattr(worker.line, "is_open", True))

    def _flap(self, worker: Worker) -> None:
        worker.line.up = worker.line.down = Flapping(self.random.randrange(1 << 30), 500, 6000)
        self._after(2.0, 6.0, lambda: worker.line.__dict__.update(up=pass_on, down=pass_on))

    def _stall(self, worker: Worker) -> None:
        worker.line.passing.clear()
        self._after(0.5, 5.0, worker.line.passing.set)

    def _end_server(self, how: signal.Signals) -> None:
        self.server.send_signal(signal.SIGCONT)
        self.server.send_signal(how)

    def _freeze_server(self) -> None:
        server = self.server
        server.send_signal(signal.SIGSTOP)
        self._after(0.5, 4.0, lambda: server.send_signal(signal.SIGCONT))

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        due = [then for at, then in self._later if at <= now]
        self._later = [(at, then) for at, then in self._later if at > now]
        for then in due:
            then()
        for worker in self.workers:
            if worker.frozen and self.random.random() < 0.2:
                worker.thaw()

    def _restart_what_ended(self) -> None:
        if self.server.poll() is not None and self.random.random() < 0.5:
            if self.server.returncode not in (0, -signal.SIGKILL, -signal.SIGTERM):
                self.problems.append(f"the server ended with exit code {self.server.returncode}; see server.log")
            self.start_server()
        for worker in self.workers:
            assert worker.process is not None
            if worker.process.poll() is not None and self.random.random() < 0.5:
                if odd := worker.odd_end():
                    self.problems.append(odd)
                worker.start()

    # --- afterwards -----------------------------------------------------------------------------------------------

    def calm(self) -> None:
        """All faults stop. Rounds go on, with everybody."""
        for _, then in self._later:
            then()
        self._later.clear()
        self.server.send_signal(signal.SIGCONT)
        if self.server.poll() is not None:
            self.start_server()
        for worker in self.workers:
            worker.mend()
        self._wait(lambda: self.status() is not None, "the server did not come back")
        calm_at = self.round()
        self._wait(lambda: self.round() >= calm_at + CALM_ROUNDS, "no rounds after the storm")
        self._wait(self._all_together, "not everybody is in the rounds after the storm")

    def _all_together(self) -> bool:
        for worker in self.workers:  # one that was told to end before the calm may end in it
            assert worker.process is not None
            if worker.process.poll() is not None:
                worker.start()
        status = self.status()
        return status is not None and sorted(status["fragments"][0]["last_participants"]) == self.names

    def finish(self) -> None:
        (self.folder / "stop").touch()
        for worker in self.workers:
            assert worker.process is not None
            code = _wait_for(worker.process)
            if code != 0:
                self.problems.append(f"{worker.name} ended with exit code {code} after the storm")
        status = self.status()
        if status is None or status["pool_held_bytes"] or status["failure"]:
            self.problems.append(f"the server is not well after the storm: {status}")
        self.server.send_signal(signal.SIGTERM)
        if (code := _wait_for(self.server)) != 0:
            self.problems.append(f"the server ended with exit code {code} after the storm")

    def close(self) -> None:
        for child in self._children:
            if child.poll() is None:
                child.send_signal(signal.SIGCONT)
                child.kill()
                child.wait()
        for worker in self.workers:
            worker.line.__exit__()

    def seen(self) -> list[Facts]:
        return [fact for name in self.names for fact in read_lines(self.folder / f"{name}.seen")]

    def _wait(self, condition: Callable[[], object], complaint: str) -> None:
        give_up_at = time.monotonic() + CALM_S
        while not condition():
            if time.monotonic() > give_up_at:
                self.problems.append(f"{complaint} within {CALM_S:g} s")
                return
            time.sleep(0.2)


def _wait_for(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        return None


def summary(storm: Storm, minutes: float) -> list[str]:
    events = read_lines(storm.folder / "events.jsonl")
    rounds = [event for event in events if event["event"] == "round"]
    facts = {
        "minutes of storm": f"{minutes:g}",
        "misfortunes": sum(storm.done.values()),
        **{f"  {kind}": count for kind, count in sorted(storm.done.items())},
        "starts of the server": sum(event["event"] == "server" for event in events),
        "joins of workers": sum(event["event"] == "join" for event in events),
        "workers declared dead": sum(event["event"] == "death" for event in events),
        "rounds": len(rounds),
        "contributions counted": sum(len(event["workers"]) for event in rounds),
        "versions seen by workers": len(storm.seen()),
    }
    return [f"{what:<28} {value}" for what, value in facts.items()]


def _speak(storm: Storm, seed: int, over: threading.Event) -> None:
    """In a thread of its own: a frozen server lets whoever speaks to it wait."""
    from fuzz.hostile import Insider  # which is built on this module

    # Whoever is first owns an id: the workers have theirs before somebody else may take them.
    storm._wait(lambda: storm.round() >= 1 and all(one.is_at_work for one in storm.workers), "no round was made")
    try:
        insider = Insider(random.Random(seed), storm.address, storm.folder)
        while not over.wait(0.02):
            insider.speak()
            storm.done["hostile messages"] = insider.messages
            if insider.messages % 30 == 0:
                insider.look_around()
    except Exception as error:  # noqa: BLE001 - in a thread: what it was is a problem of the storm
        storm.problems.append(f"the hostile client was answered what nobody may be: {error!r}")


def main() -> int:
    parser = argparse.ArgumentParser(description="A storm over a real run, and whether the promises were kept.")
    parser.add_argument("--minutes", type=float, default=1.0, help="how long it rages (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="which storm (default 0)")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--hostile", action="store_true", help="with a hostile token holder beside the workers")
    parser.add_argument("--folder", type=Path, help="where logs and states are kept (default: a temporary one)")
    arguments = parser.parse_args()
    folder = (arguments.folder or Path(tempfile.mkdtemp(prefix="outerstep-soak-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    storm, over = Storm(folder, arguments.workers, arguments.seed), threading.Event()
    try:
        if arguments.hostile:
            threading.Thread(target=_speak, args=(storm, arguments.seed, over), daemon=True).start()
        storm.rage(60.0 * arguments.minutes)
        over.set()
        storm.calm()
        storm.finish()
    finally:
        storm.close()
    found = storm.problems + violations(read_lines(folder / "events.jsonl"), storm.seen(), storm.names)
    print("\n".join(summary(storm, arguments.minutes)))
    print(f"logs, events and states: {folder}")
    for problem in found:
        print(f"VIOLATED: {problem}")
    print("every promise was kept" if not found else f"{len(found)} violations; the storm's seed was {arguments.seed}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
