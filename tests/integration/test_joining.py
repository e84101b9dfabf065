"""Two users' machines as real processes: a server, `outerstep join`, a worker; and nobody else learns the token."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from outerstep.model_folder import save_model
from outerstep.security import Credentials, parse_join_string
from outerstep.wire.http_transport import HttpTransport
from ports import free_port
from support import tiny_model, wait_until

pytestmark = pytest.mark.slow

SCRIPT = """
import os, pathlib, sys, time, torch, outerstep
sys.path.insert(0, {tests!r})
from support import tiny_model, train_steps
torch.set_num_threads(1)
model = tiny_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with outerstep.attach(model, optimizer) as worker:
    print(worker.config, worker, os.environ["DILOCO_SERVER"], flush=True)
    train_steps(model, optimizer, 4, seed=1)
    while not pathlib.Path("enough").exists():
        time.sleep(0.05)
"""


class Machines:
    """Processes of one server's user and of another user, each with a configuration folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        save_model(tiny_model(), folder / "model")
        (folder / "train.py").write_text(SCRIPT.format(tests=str(Path(__file__).parents[1])))
        self.children: list[subprocess.Popen[bytes]] = []
        self.seen_in_argv: set[str] = set()

    def spawn(self, user: str, name: str, *words: str, stdin: str = "", **how: object) -> subprocess.Popen[bytes]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("DILOCO_", "OUTERSTEP_"))}
        environ = {**clean, "OMP_NUM_THREADS": "1", "XDG_CONFIG_HOME": str(self.folder / user)}
        with (self.folder / f"{name}.log").open("ab") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "outerstep", *words],
                **{"stdin": subprocess.PIPE, "stdout": log, "stderr": log, "cwd": self.folder, "env": environ, **how},
            )
        self.children.append(child)
        assert child.stdin is not None
        child.stdin.write(stdin.encode())
        child.stdin.close()
        return child

    def look_at_argv(self) -> None:
        """What `ps` shows to every user of the machine."""
        for child in self.children:
            with contextlib.suppress(OSError):
                self.seen_in_argv.add(Path(f"/proc/{child.pid}/cmdline").read_text().replace("\0", " "))

    def credentials(self, user: str) -> Credentials:
        return Credentials(self.folder / user / "outerstep")

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def ended(self, child: subprocess.Popen[bytes], name: str) -> str:
        while child.poll() is None:
            self.look_at_argv()
            try:
                child.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
        assert child.returncode == 0, self.log(name)
        return self.log(name)

    def end(self) -> None:
        for child in self.children:
            if child.poll() is None:
                child.kill()
                child.wait()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    made = Machines(tmp_path)
    yield made
    made.end()


def test_another_machine_joins_trains_and_the_token_is_nowhere_to_be_seen(machines: Machines) -> None:
    server = machines.spawn(
        "alice", "server", "server", "-m", "model", "-n", "1", "--sync-every", "2", "--port", str(machines.port),
        "--event-log", "events.jsonl",
    )  # fmt: skip
    wait_until(lambda: server.poll() is not None or "outerstep join -" in machines.log("server"))
    where = re.search(r"the line in (\S+)", machines.log("server"))
    assert where is not None, machines.log("server")
    join_string = Path(where[1]).read_text()
    access = parse_join_string(join_string)

    # Bob knows nothing yet, is told, and then needs the address alone.
    refused = machines.spawn("bob", "early", "status", "--server", machines.address)
    assert refused.wait(60) == 2
    assert "give its join string to `outerstep join -`" in machines.log("early")
    joined = machines.ended(machines.spawn("bob", "join", "join", "-", stdin=join_string), "join")
    assert f"outerstep worker --server {machines.address}" in joined
    worker = machines.spawn("bob", "worker", "worker", "--server", machines.address, "--", sys.executable, "train.py")
    transport = HttpTransport(machines.address, credentials=machines.credentials("bob").folder)
    wait_until(lambda: worker.poll() is not None or transport.status()["sync_round"] == 2)
    machines.look_at_argv()
    shown = machines.ended(machines.spawn("bob", "status", "status", "--server", machines.address), "status")
    assert "round 2" in shown
    (machines.folder / "enough").touch()
    machines.ended(worker, "worker")

    # Control is Alice's alone.
    words = ("control", "--server", machines.address, "budget", "0")
    assert machines.spawn("bob", "bobs-order", *words).wait(60) == 2
    assert "no admin token" in machines.log("bobs-order")
    assert "no end" in machines.ended(machines.spawn("alice", "order", *words), "order")

    server.send_signal(signal.SIGTERM)
    machines.ended(server, "server")
    tokens = machines.credentials("alice").tokens.load()
    assert access.token == tokens.run
    public = [*machines.folder.glob("*.log"), machines.folder / "events.jsonl"]
    assert len(public) == 8
    assert len(machines.seen_in_argv) >= 5
    for text in [*(file.read_text() for file in public), *machines.seen_in_argv]:
        assert tokens.run[4:] not in text
        assert tokens.admin[6:] not in text


def test_on_a_terminal_the_join_string_is_shown_and_in_no_file_that_others_read(machines: Machines) -> None:
    near, far = pty.openpty()
    server = machines.spawn(
        "alice", "server", "server", "-m", "model", "-n", "1", "--host", "0.0.0.0", "--port", str(machines.port),
        "--event-log", "events.jsonl", stderr=far, stdout=far,
    )  # fmt: skip
    os.close(far)
    screen: list[str] = []

    def watch() -> None:
        try:
            while data := os.read(near, 4096):
                screen.append(data.decode())
        except OSError:
            pass  # the other end was closed

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    line = re.compile(r"^outerstep://\S+$", re.MULTILINE)
    wait_until(lambda: server.poll() is not None or line.search("".join(screen).replace("\r", "")))
    found = line.findall("".join(screen).replace("\r", ""))
    assert len(found) == 1, "".join(screen)
    assert HttpTransport(found[0]).status()["num_workers"] == 1
    server.send_signal(signal.SIGTERM)
    assert server.wait(30) == 0
    watching.join(20)
    assert "".join(screen).count(parse_join_string(found[0]).token) == 1
    assert "outerstep://" not in (machines.folder / "events.jsonl").read_text()
    os.close(near)
