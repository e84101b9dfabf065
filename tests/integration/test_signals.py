"""Real processes and real signals: preemption, Ctrl-C, and ends that nobody planned."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import nursery
from outerstep.errors import TransportError
from outerstep.model_folder import save_model
from outerstep.server import DiLoCoServer
from outerstep.wire.http_transport import HttpTransport
from ports import free_port
from support import Ledger, wait_until

pytestmark = pytest.mark.slow

Process = nursery.Child | subprocess.Popen[bytes]

NEVER = "1000000"  # steps between two exchanges: only the end of training contributes
LOOP = """
import json, multiprocessing, os, pathlib, signal, sys, time
sys.path.insert(0, {tests!r})
import torch, outerstep
from support import Ledger, count
torch.set_num_threads(1)
name, how = sys.argv[1], sys.argv[2]
folder = pathlib.Path({folder!r})
model, cell, steps, heard = Ledger(), ["left", "right"].index(name), 0, []
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
mine = lambda number, frame: heard.append(number)
if how == "own":
    signal.signal(signal.SIGTERM, mine)
with outerstep.attach(model, optimizer) as worker:
    if how == "forks":
        fork = multiprocessing.get_context("fork")
        ready = fork.Event()
        child = fork.Process(target=lambda: ready.set() or time.sleep(600))
        child.start()
        ready.wait()
        child.terminate()
        child.join()
        heard.append(child.exitcode)
    while not (folder / ("stop-" + name)).exists():
        count(model, optimizer, cell, 1)
        steps += 1
        (folder / (name + ".steps")).write_text(str(steps))
        if how == "polite" and worker.should_stop:
            break
        if steps == 5 and how == "raises":
            raise RuntimeError("no luck")
        if steps == 5 and how == "vanishes":
            os._exit(3)
        if steps == 5 and how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory is out
        time.sleep(0.005)
facts = dict(steps=steps, cells=model.cells.tolist(), heard=heard, should_stop=worker.should_stop)
facts["restored"] = signal.getsignal(signal.SIGTERM) == (mine if how == "own" else signal.SIG_DFL)
(folder / (name + ".json")).write_text(json.dumps(facts))
"""


class Run:
    """A server and workers "left" and "right" as processes; each step of theirs adds one to a cell of their own. The
    outer step is "adopt the mean", so that the model shows which steps are in it. Everything is ended by its id."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        save_model(Ledger(), folder / "initial")
        (folder / "train.py").write_text(LOOP.format(tests=str(Path(__file__).parents[1]), folder=str(folder)))
        self.address = f"127.0.0.1:{free_port()}"
        self.transport = HttpTransport(self.address)
        self.children: list[Process] = []

    def server(self, *flags: str) -> Process:
        plain = ["--codec", "fp32", "--outer-lr", "1", "--outer-momentum", "0"]
        named = ["-m", str(self.folder / "initial"), "--port", self.address.split(":")[1]]
        words = ["server", *named, *plain, "--event-log", str(self.folder / "events"), *flags]
        with self.log_file("server").open("ab") as log:
            child = nursery.start(["-m", "outerstep", *words], log=log, env=os.environ, cwd=self.folder)
        self.children.append(child)
        wait_until(lambda: self._answers(child))
        return child

    def worker(self, name: str, how: str, **settings: object) -> Process:
        """The script with what `outerstep worker` hands it."""
        environ = {f"OUTERSTEP_{field.upper()}": str(value) for field, value in settings.items()}
        environ |= {"DILOCO_SERVER": self.address, "DILOCO_WORKER_ID": name}
        with self.log_file(name).open("ab") as log:
            child = nursery.start(
                [self.folder / "train.py", name, how], log=log, env={**os.environ, **environ}, cwd=self.folder
            )
        return self._trains(name, child)

    def typed(self, name: str, how: str, *flags: str) -> Process:
        """`outerstep worker` itself, which becomes the script."""
        words = ["-m", "outerstep", "worker", "--server", self.address, "--worker-id", name, *flags, "--"]
        with self.log_file(name).open("ab") as log:
            child = subprocess.Popen(
                [sys.executable, *words, sys.executable, self.folder / "train.py", name, how],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                cwd=self.folder,
            )
        return self._trains(name, child)

    def _trains(self, name: str, child: Process) -> Process:
        self.children.append(child)
        wait_until(lambda: child.poll() is not None or self.steps(name) >= 5)
        return child

    def _answers(self, child: Process) -> bool:
        assert child.poll() is None, self.log("server")
        try:
            return bool(self.transport.status())
        except TransportError:
            return False

    def pending(self) -> list[str]:
        return self.transport.status()["pending_submissions"]  # type: ignore[return-value]

    def round(self) -> int:
        return int(self.transport.status()["sync_round"])  # type: ignore[call-overload]

    def steps(self, name: str) -> int:
        file = self.folder / f"{name}.steps"
        return int(file.read_text() or 0) if file.exists() else 0

    def tell_to_stop(self, name: str) -> None:
        (self.folder / f"stop-{name}").touch()

    def facts(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder / f"{name}.json").read_text())

    def log_file(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def log(self, name: str) -> str:
        return self.log_file(name).read_text()

    def ended(self, child: Process, name: str) -> int:
        try:
            return child.wait(60)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{name} does not end:\n{self.log(name)}")

    def left_because(self, name: str) -> str:
        """What the worker told the server when it left."""
        events = [json.loads(line) for line in (self.folder / "events").read_text().splitlines()]
        return next((e["reason"] for e in events if e["event"] == "leave" and e["worker"] == name), "it has not left")

    def close(self) -> None:
        self.transport.close()
        for child in self.children:
            if child.poll() is None:
                child.kill()
                child.wait()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.close()


# --- a worker -------------------------------------------------------------------------------------------------------


@pytest.mark.row("F10")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
def test_a_preempted_worker_contributes_its_steps_and_its_loop_ends_by_itself(run: Run, number: signal.Signals) -> None:
    run.server("-n", "2", "--sync-every", NEVER)
    left, right = run.worker("left", "polite"), run.worker("right", "polite")
    left.send_signal(number)
    wait_until(lambda: run.pending() == ["left"])
    run.tell_to_stop("right")
    assert run.ended(left, "left") == 0
    assert run.ended(right, "right") == 0
    facts, other = run.facts("left"), run.facts("right")
    assert facts["should_stop"]
    assert facts["cells"] == [facts["steps"] / 2, other["steps"] / 2]  # every step, once, and the agreed weights
    assert run.left_because("left") == f"interrupted by {number.name}"
    assert run.left_because("right") == "done"


@pytest.mark.row("F10")
def test_a_loop_that_goes_on_after_sigterm_is_ended_at_its_next_step(run: Run) -> None:
    run.server("-n", "1", "--sync-every", NEVER)
    left = run.typed("left", "stubborn")
    left.send_signal(signal.SIGTERM)
    assert run.ended(left, "left") == 128 + signal.SIGTERM
    assert run.left_because("left") == "interrupted by SIGTERM"
    assert run.round() == 1  # what it had was contributed


@pytest.mark.row("F10")
def test_after_a_notice_the_loop_may_go_on_and_a_second_notice_does_not_kill_it(run: Run) -> None:
    run.server("-n", "1", "--sync-every", NEVER)
    left = run.worker("left", "stubborn")
    left.send_signal(signal.SIGUSR1)
    wait_until(lambda: run.round() == 1)
    left.send_signal(signal.SIGUSR1)
    seen = run.steps("left")
    wait_until(lambda: run.steps("left") > seen + 5)
    run.tell_to_stop("left")
    assert run.ended(left, "left") == 0
    assert run.left_because("left") == "interrupted by SIGUSR1"
    assert run.round() == 1


@pytest.mark.row("F10", "F03")
def test_a_worker_preempted_while_it_waits_for_a_round_leaves_in_time_and_counts_once(run: Run) -> None:
    run.server("-n", "2", "--sync-every", "20", "--heartbeat-timeout", "0")
    left = run.worker("left", "polite", preempt_patience_s=1)
    right = run.worker("right", "polite")
    wait_until(lambda: run.round() >= 1)
    right.send_signal(signal.SIGSTOP)  # so the round cannot close
    wait_until(lambda: run.pending() == ["left"])
    left.send_signal(signal.SIGTERM)
    assert run.ended(left, "left") == 0  # although the round is still open
    facts = run.facts("left")
    assert facts["should_stop"]
    assert run.left_because("left") == "interrupted by SIGTERM"
    right.send_signal(signal.SIGCONT)
    wait_until(lambda: run.pending() == [] and run.round() >= 2)
    run.tell_to_stop("right")
    assert run.ended(right, "right") == 0
    assert run.facts("right")["cells"][0] == facts["steps"] / 2  # all of them, once: the rounds it was in had two


@pytest.mark.row("B21")
def test_the_first_ctrl_c_contributes_and_then_interrupts(run: Run) -> None:
    run.server("-n", "1", "--sync-every", NEVER)
    left = run.typed("left", "stubborn")
    left.send_signal(signal.SIGINT)
    assert run.ended(left, "left") == -signal.SIGINT  # KeyboardInterrupt, at a step; a shell shows 130
    assert "Ctrl-C: contributing what is left" in run.log("left")
    assert run.left_because("left") == "interrupted by Ctrl-C"
    assert run.round() == 1


@pytest.mark.row("B21")
def test_the_second_ctrl_c_waits_for_nothing(run: Run) -> None:
    run.server("-n", "2", "--sync-every", NEVER)
    left = run.worker("left", "polite", preempt_patience_s=600)
    left.send_signal(signal.SIGINT)
    wait_until(lambda: "Once more stops at once" in run.log("left") and run.pending() == ["left"])
    left.send_signal(signal.SIGINT)  # the second worker has never come: this one would wait for ten minutes
    assert run.ended(left, "left") == -signal.SIGINT
    assert run.left_because("left") == "interrupted by Ctrl-C"


@pytest.mark.row("F10")
def test_a_handler_of_the_users_own_is_called_and_keeps_its_say(run: Run) -> None:
    run.server("-n", "1", "--sync-every", NEVER)
    left = run.worker("left", "own")
    left.send_signal(signal.SIGTERM)
    wait_until(lambda: run.round() == 1)
    seen = run.steps("left")
    wait_until(lambda: run.steps("left") > seen + 5)  # its handler does not end the process, so nor do we
    run.tell_to_stop("left")
    assert run.ended(left, "left") == 0
    facts = run.facts("left")
    assert facts["heard"] == [signal.SIGTERM]
    assert facts["restored"]


def test_without_our_handlers_sigterm_does_what_it_always_did(run: Run) -> None:
    run.server("-n", "1", "--sync-every", NEVER)
    left = run.typed("left", "polite", "--no-handle-signals")
    left.send_signal(signal.SIGTERM)
    assert run.ended(left, "left") == -signal.SIGTERM
    assert run.left_because("left") == "it has not left"


def test_a_forked_process_can_be_terminated_and_handlers_are_restored(run: Run) -> None:
    run.server("-n", "1", "--sync-every", NEVER)
    left = run.worker("left", "forks")
    run.tell_to_stop("left")
    assert run.ended(left, "left") == 0
    assert run.facts("left")["heard"] == [-signal.SIGTERM]
    assert run.facts("left")["restored"]


@pytest.mark.row("F24")
def test_an_exception_keeps_its_exit_code_and_is_the_reason_to_leave(run: Run) -> None:
    run.server("-n", "1", "--sync-every", NEVER)
    assert run.ended(run.worker("left", "raises"), "left") == 1
    assert run.left_because("left") == "RuntimeError: no luck"
    assert run.round() == 0  # and nothing was contributed


@pytest.mark.row("F24")
@pytest.mark.parametrize(("how", "code"), [("vanishes", 3), ("is killed", -signal.SIGKILL)])
def test_an_end_without_a_word_keeps_its_exit_code_and_is_noticed_by_silence(run: Run, how: str, code: int) -> None:
    run.server("-n", "1", "--sync-every", NEVER, "--heartbeat-timeout", "1")
    assert run.ended(run.worker("left", how), "left") == code
    wait_until(lambda: run.transport.status()["total_worker_deaths"] == 1)
    assert run.left_because("left") == "it has not left"


# --- a server -------------------------------------------------------------------------------------------------------


@pytest.mark.row("F10", "B21")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_server_that_is_told_to_stop_saves_and_its_worker_goes_on_with_the_next_one(
    run: Run, number: signal.Signals
) -> None:
    saves = str(run.folder / "saves")
    server = run.server("-n", "1", "--sync-every", "20", "--save-dir", saves)
    left = run.worker("left", "polite")
    wait_until(lambda: run.round() >= 2)
    server.send_signal(number)
    assert run.ended(server, "server") == 0
    said = "SIGTERM" if number == signal.SIGTERM else "Ctrl-C"
    assert f"{said}: finishing what was decided, then stopping." in run.log("server")
    saved = int((run.folder / "saves" / "latest").resolve().name.split("-")[2])  # state-round-00000002
    assert left.poll() is None
    run.server("-n", "1", "--save-dir", saves, "--resume", saves)
    assert run.round() >= saved >= 2
    wait_until(lambda: run.round() >= saved + 2)  # the worker came back by itself
    run.tell_to_stop("left")
    assert run.ended(left, "left") == 0, run.log("left")
    facts = run.facts("left")
    assert facts["cells"] == [facts["steps"], 0.0]  # no step is lost and none is in it twice


def test_a_handler_may_ask_a_server_to_stop_in_the_middle_of_its_wait() -> None:
    """Where a signal finds the main thread with the lock that its wait takes, and a handler that took it would hang."""
    server = DiLoCoServer(Ledger().state_dict(), 1, port=0, insecure=True)
    asked: list[str] = []

    def handler(frame: FrameType, event: str, _: object) -> object:
        in_wait = frame.f_code is threading.Condition.wait.__code__ and "waiter" in frame.f_locals
        if in_wait and event == "line" and not asked:
            asked.append("in the wait")
            server.request_stop()
        return handler

    sys.settrace(handler)
    try:
        server.wait()
    finally:
        sys.settrace(None)
    assert asked
    server.stop()


def hold_a_request_open(address: str) -> socket.socket:
    """A server that stops lets a request finish, for some seconds; this one is not going to."""
    host, port = address.split(":")
    client = socket.create_connection((host, int(port)))
    client.sendall(b"POST /v1/join HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n")
    assert client.recv(100).startswith(b"HTTP/1.1 100")  # it is being served
    return client


@pytest.mark.row("B21")
def test_the_second_ctrl_c_stops_a_server_at_once(run: Run) -> None:
    run.transport = HttpTransport(f"http://{run.address}")
    server = run.server("-n", "1", "--insecure")
    with hold_a_request_open(run.address):
        server.send_signal(signal.SIGINT)
        wait_until(lambda: "Once more stops at once." in run.log("server"))
        server.send_signal(signal.SIGINT)
        assert run.ended(server, "server") == 130
    assert "stopped at once" in run.log("server")
