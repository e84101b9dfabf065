"""A disk that is full or broken: nobody is told of a round that is not on it, and it goes on by itself."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from amounts import mostly_slow
from outerstep.coordination.backoff import Backoff
from outerstep.errors import Busy, ServerError
from outerstep.server import DiLoCoServer
from outerstep.types import Poll, PollAnswer
from outerstep.wire.http_transport import HttpTransport
from outerstep.wire.memory import MemoryTransport
from outerstep.worker import DiLoCoWorker
from ports import free_port
from support import HandClient, Ledger, Relocatable, count, in_threads, kill, make_frame, wait_until

FACTS: dict[str, Any] = {"codec": "fp32", "sync_every": 2, "outer_lr": 1.0, "outer_momentum": 0.0}


class BadDisk:
    """While `broken`, one kind of call on files in the folder raises an error."""

    def __init__(self, folder: Path, call: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.broken = False
        self.failed = 0
        original = getattr(os, call)

        def fail(target: Any, *arguments: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target)
            if self.broken and str(path).startswith(str(folder)):
                self.failed += 1
                raise OSError(number, os.strerror(number))
            return original(target, *arguments)

        monkeypatch.setattr(os, call, fail)


@pytest.mark.row("F11")
@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
@pytest.mark.parametrize("number", mostly_slow([errno.ENOSPC, errno.EIO], [errno.ENOSPC]), ids=["full", "broken"])
def test_a_round_that_cannot_be_written_is_announced_when_it_can(
    call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outerstep.coordination.server.commits.DISK_RETRIES", Backoff(0.05, 0.05))
    server = DiLoCoServer(Ledger().state_dict(), 1, port=0, save_dir=str(tmp_path), **FACTS)
    server.service.start()
    client, newcomer = HandClient(Relocatable(server.service)), HandClient(MemoryTransport(server.service), "new")
    client.join()
    disk = BadDisk(tmp_path, call, number, monkeypatch)
    disk.broken = True
    client.contribute(make_frame({"cells": -torch.ones(2)}))
    wait_until(lambda: disk.failed > 1)  # it has been tried again
    why = f"the server cannot write to {tmp_path}: {os.strerror(number)}"
    assert why in str(server.status()["trouble"])
    assert server.sync_round == 0
    answer = client.transport.call(Poll(**client.session.head, fragment=0, after=0, wait_s=0.0))
    assert isinstance(answer, PollAnswer)
    assert answer.agreement is None
    assert why[:200] in answer.waiting_for
    with monkeypatch.context() as hurried:  # only while nothing can come of waiting: a sound disk may be slow
        hurried.setattr("outerstep.server.service.NOTE_PATIENCE_S", 0.05)
        hurried.setattr("outerstep.server.publish.MOVING_PATIENCE_S", 0.05)
        for _ in range(2):  # a repeated join waits again
            with pytest.raises(Busy, match="not on the server's disk yet: the server cannot write"):
                newcomer.join()
        with pytest.raises(Busy, match="fragment 0 is on its way from version 0"):
            server.get_global_params()  # it moves in place, and is shown to nobody
        with pytest.raises(ServerError, match="saving has to wait"):
            server.save_state()
    disk.broken = False
    wait_until(lambda: server.sync_round == 1)
    wait_until(lambda: server.status()["trouble"] == "")
    assert newcomer.join().incarnation == 1
    expected = server.get_global_params()["cells"].tolist()
    kill(server)
    again = DiLoCoServer(None, 1, port=0, save_dir=str(tmp_path), **FACTS)
    assert (again.sync_round, again.get_global_params()["cells"].tolist()) == (1, expected)
    again.stop()


@pytest.mark.row("F11")
def test_a_stop_in_the_middle_of_it_leaves_the_state_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = DiLoCoServer(Ledger().state_dict(), 1, port=0, save_dir=str(tmp_path), **FACTS)
    server.service.start()
    client = HandClient(Relocatable(server.service))
    client.join()
    disk = BadDisk(tmp_path, "fsync", errno.EIO, monkeypatch)
    disk.broken = True
    payload = make_frame({"cells": -torch.ones(2)})
    client.contribute(payload)
    wait_until(lambda: disk.failed > 0)
    in_threads(server.service.stop, timeout_s=20.0)
    disk.broken = False
    again = DiLoCoServer(None, 1, port=0, save_dir=str(tmp_path), **FACTS)
    again.service.start()
    assert (again.sync_round, again.get_global_params()["cells"].tolist()) == (0, [0.0, 0.0])
    client.transport.move(again)  # type: ignore[attr-defined]
    client.sequence = 0
    client.contribute(payload)  # under the same key: the worker still has it
    wait_until(lambda: again.sync_round == 1)
    assert again.get_global_params()["cells"].tolist() == [1.0, 1.0]
    again.service.stop()


def test_a_run_that_cannot_be_written_down_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outerstep.server.service.NOTE_PATIENCE_S", 0.2)
    server = DiLoCoServer(Ledger().state_dict(), 1, port=0, save_dir=str(tmp_path), **FACTS)
    server.service.start()
    disk = BadDisk(tmp_path, "rename", errno.ENOSPC, monkeypatch)
    disk.broken = True
    client = HandClient(MemoryTransport(server.service))
    with pytest.raises(Busy):
        client.join()
    disk.broken = False
    wait_until(lambda: list(tmp_path.glob("state-round-*")))
    assert client.join().incarnation == 1
    server.service.stop()


# --- a real one, small enough to be filled ------------------------------------------------------------------------

PROGRAM = """
import signal, sys
from outerstep.server import DiLoCoServer
from support import Ledger
server = DiLoCoServer(Ledger().state_dict(), 2, port=int(sys.argv[2]), insecure=True, save_dir=sys.argv[1] + "/run",
                      codec="fp32", sync_every=2, outer_lr=1.0, outer_momentum=0.0, save_every=3)
signal.signal(signal.SIGTERM, lambda *_: server.request_stop())
server.run()
"""


def may_mount() -> bool:
    return (
        subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode == 0
    )


class SmallDisk:
    """A server whose folder is a file system of its own, of half a megabyte, which only its process sees; a second
    start lies on a new one, so that it is restarted within the same."""

    def __init__(self, place: Path) -> None:
        self.place = place / "disk"
        self.place.mkdir()
        (place / "server.py").write_text(PROGRAM)
        self.port = free_port()
        self._log = (place / "server.log").open("ab")
        self._room = subprocess.Popen(
            ["unshare", "-rm", "sh", "-c", f"mount -t tmpfs -o size=512k none {self.place} && echo ready && exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._room.stdout is not None
        assert self._room.stdout.readline() == b"ready\n"
        self.inside = Path(f"/proc/{self._room.pid}/root{self.place}")
        self.server = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        tests = str(Path(__file__).parents[1])
        environ = {**os.environ, "PYTHONPATH": f"{tests}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
        script = [sys.executable, str(self.place.parent / "server.py"), str(self.place), str(self.port)]
        enter = ["nsenter", f"--target={self._room.pid}", "--user", "--mount", "--preserve-credentials"]
        self.server = subprocess.Popen([*enter, *script], stdout=self._log, stderr=self._log, env=environ)
        wait_until(lambda: self.server.poll() is not None or self.health() is not None)
        assert self.server.poll() is None, (self.place.parent / "server.log").read_text()
        return self.server

    def fill(self) -> None:
        def write_on(filler: Any) -> None:
            while filler.write(bytes(4096)):
                pass

        with (self.inside / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="No space left"):
            write_on(filler)

    def make_room(self) -> None:
        (self.inside / "filler").unlink()

    def status(self) -> dict[str, Any]:
        return HttpTransport(f"http://127.0.0.1:{self.port}", timeout_s=5.0).status()

    def health(self) -> tuple[int, bytes] | None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/healthz", timeout=5.0) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as refusal:
            return refusal.code, refusal.read()
        except OSError:
            return None

    def close(self) -> None:
        for child in (self.server, self._room):
            child.kill()
            child.wait()
        self._log.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    if not may_mount():
        pytest.skip("no file system can be mounted here")
    made = SmallDisk(tmp_path)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.row("F11")
def test_a_disk_that_fills_up_stops_the_rounds_and_not_the_run(small_disk: SmallDisk) -> None:
    models = [Ledger(), Ledger()]
    done = threading.Event()

    def train(i: int) -> None:
        optimizer = torch.optim.SGD(models[i].parameters(), lr=1.0)
        address = f"http://127.0.0.1:{small_disk.port}"
        with DiLoCoWorker(models[i], optimizer, address, worker_id="ab"[i], exit_patience_s=120.0):
            for _ in range(10):
                count(models[i], optimizer, i, 2)
            done.wait(200.0)
            for _ in range(40):
                count(models[i], optimizer, i, 2)

    def disturb() -> None:
        wait_until(lambda: small_disk.status()["sync_round"] == 10)
        small_disk.fill()
        done.set()
        wait_until(lambda: "No space left on device" in small_disk.status()["trouble"])
        assert small_disk.status()["sync_round"] == 10
        assert small_disk.health() == (503, b'{"status":"waiting for its disk"}')
        small_disk.server.send_signal(signal.SIGTERM)  # a stop meanwhile is a clean one
        assert small_disk.server.wait(30.0) == 0
        small_disk.make_room()
        small_disk.start()
        assert small_disk.status()["sync_round"] >= 10
        wait_until(lambda: small_disk.status()["sync_round"] >= 12)
        small_disk.fill()
        wait_until(lambda: small_disk.status()["trouble"])
        small_disk.make_room()
        wait_until(lambda: not small_disk.status()["trouble"])
        assert small_disk.health() == (200, b'{"status":"ok"}')

    in_threads(disturb, lambda: train(0), lambda: train(1), timeout_s=200.0)
    assert [model.cells.tolist() for model in models] == [[50.0, 50.0]] * 2  # 100 steps of each, half of each counted
