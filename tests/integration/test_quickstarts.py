"""The quick starts of the user guide, typed as they are written but for the program's name.

What differs, because a test has no second machine: 192.168.1.100:8512 is this machine and a free port, path/to/model is
a tiny model, `forgather` is a stand-in that trains it (its arguments are checked), and a small module with a `.loss`
takes the place of the language model in the Python snippets.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nursery
from outerstep.errors import OuterstepError, TransportError
from outerstep.model_folder import load_state_dict, save_model
from outerstep.wire.http_transport import HttpTransport
from ports import free_port
from support import assert_same, tiny_model, wait_until

pytestmark = pytest.mark.slow

TESTS = str(Path(__file__).parents[1])

FORGATHER = """#!{python}
import json, os, pathlib, sys, time
sys.path.insert(0, {tests!r})
import torch, outerstep
from outerstep.config.keywords import values_of
from support import tiny_model, train_steps

torch.set_num_threads(1)
name = os.environ["STAND_IN"]
model = tiny_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with outerstep.attach(model, optimizer) as worker:
    train_steps(model, optimizer, 1000, seed=ord(name[0]))
    while not pathlib.Path("enough").exists():  # it stays in the run, for others to look at
        time.sleep(0.05)
outerstep.save_model(model, f"trained-{{name}}")
facts = {{
    "arguments": sys.argv[1:],
    "metrics": worker.sync_metrics,
    "config": {{n: values_of(worker.config)[n] for n in ("sync_every", "dylu", "num_fragments", "bf16_comm")}},
    "devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
}}
pathlib.Path(f"{{name}}.json").write_text(json.dumps(facts, default=str))
"""

MY_MODEL = """
import sys
sys.path.insert(0, {tests!r})
import torch
from types import SimpleNamespace
from support import tiny_model

torch.set_num_threads(1)

class MyModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = tiny_model()

    def forward(self, batch):
        return SimpleNamespace(loss=(self.net(batch) - batch.sum(1, keepdim=True)).square().mean())
"""


class Desk:
    """A folder to type commands in; every process it starts is ended by its id."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"127.0.0.1:{free_port()}"
        self.children: dict[str, nursery.Child] = {}
        (folder / "path" / "to").mkdir(parents=True)
        save_model(tiny_model(), folder / "path" / "to" / "model")
        save_model(tiny_model(), folder / "model")
        program = folder / "bin" / "forgather"
        program.parent.mkdir()
        program.write_text(FORGATHER.format(python=sys.executable, tests=TESTS))
        program.chmod(0o755)

    def type(self, text: str, name: str) -> nursery.Child:
        """Start what a person would type, with this machine's address and port where the guide has its own."""
        port = self.address.split(":")[1]
        line = text.replace("192.168.1.100:8512", self.address).replace("host:8512", self.address)
        words = shlex.split(line.replace("\\\n", " "))
        assert words[0] == "outerstep"
        if words[1] == "server":
            words = [port if word == "8512" else word for word in words]
            words += [] if "--port" in words else ["--port", port]
        return self.start(["-m", *words], name)

    def python(self, code: str, name: str) -> nursery.Child:
        port = self.address.split(":")[1]
        code = code.replace("192.168.1.100:8512", self.address).replace("port=8512", f"port={port}")
        (self.folder / f"{name}.py").write_text(MY_MODEL.format(tests=TESTS) + code)
        return self.start([f"{name}.py"], name)

    def start(self, arguments: list[str], name: str) -> nursery.Child:
        """`python ARGUMENTS`."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("DILOCO_", "OUTERSTEP_"))}
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        environ = {**clean, "OMP_NUM_THREADS": "1", "PATH": path, "STAND_IN": name, "COLUMNS": "120"}
        with (self.folder / f"{name}.log").open("ab") as log:
            child = nursery.start(arguments, log=log, env=environ, cwd=self.folder)
        self.children[name] = child
        return child

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def ended(self, name: str, code: int = 0) -> str:
        assert self.children[name].wait(120) == code, self.log(name)
        return self.log(name)

    def status(self) -> dict[str, Any]:
        try:
            return HttpTransport(self.address, timeout_s=5.0).status()
        except (TransportError, OuterstepError):
            return {}

    def wait_for_server(self, name: str = "server") -> None:
        wait_until(lambda: self.children[name].poll() is not None or self.status())
        assert self.status(), self.log(name)

    def wait_for_rounds(self, rounds: int, submissions: int = 0) -> None:
        def there() -> bool:
            for name, child in self.children.items():
                assert child.poll() in (None, 0), self.log(name)
            status = self.status()
            return status.get("sync_round", 0) >= rounds and status.get("total_submissions", 0) >= submissions

        wait_until(there, timeout_s=120.0)

    def facts(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder / f"{name}.json").read_text())

    def end(self) -> None:
        for child in self.children.values():
            if child.poll() is None:
                child.terminate()
        for child in self.children.values():
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    made.end()


SYNC_SERVER = r"""outerstep server \
    -m path/to/model \
    -n 2 \
    --port 8512
"""
ASYNC_SERVER = r"""outerstep server \
    -m path/to/model \
    -n 3 \
    --async \
    --dn-buffer-size 3 \
    --dylu \
    --dylu-base-sync-every 500
"""
MACHINE_A = r"""outerstep worker \
    --server 192.168.1.100:8512 \
    --sync-every 500 \
    -p my_project -t train.yaml \
    train
"""
MACHINE_B = r"""outerstep worker \
    --server 192.168.1.100:8512 \
    --sync-every 500 \
    --dylu \
    --heartbeat-interval 30 \
    -d 0 \
    -p my_project -t train.yaml \
    train
"""
STREAMING = r"""outerstep worker \
    --server 192.168.1.100:8512 \
    --sync-every 500 \
    --num-fragments 4 \
    -p my_project -t train.yaml \
    train
"""
STATUS = "outerstep status --server 192.168.1.100:8512"


def test_a_synchronous_server_two_workers_and_status(desk: Desk) -> None:
    desk.type(SYNC_SERVER, "server")
    desk.wait_for_server()
    desk.type(MACHINE_A, "a")
    desk.type(MACHINE_B, "b")
    desk.wait_for_rounds(2)
    desk.type(STATUS, "status")
    shown = desk.ended("status")
    for words in ("sync", "sync_every 500, bf16, 1 fragment", "steps/s", "waiting for"):
        assert words in shown
    (desk.folder / "enough").touch()
    desk.ended("a")
    desk.ended("b")
    a, b = desk.facts("a"), desk.facts("b")
    assert a["arguments"] == b["arguments"] == ["-p", "my_project", "-t", "train.yaml", "train"]
    assert a["config"] == {"sync_every": 500, "dylu": None, "num_fragments": None, "bf16_comm": None}
    assert (b["config"]["dylu"], b["devices"]) == (True, "0")
    trained_a, trained_b = (load_state_dict(desk.folder / f"trained-{name}") for name in "ab")
    initial = load_state_dict(desk.folder / "model")
    assert all(not trained_a[name].equal(initial[name]) for name in initial)
    assert_same(trained_a, trained_b)


def test_an_asynchronous_server_with_delayed_nesterov_and_dynamic_local_updates(desk: Desk) -> None:
    desk.type(ASYNC_SERVER, "server")
    desk.wait_for_server()
    for name in "abc":
        desk.type(MACHINE_B, name)
    desk.wait_for_rounds(1, submissions=6)
    desk.type(STATUS, "status")
    shown = desk.ended("status")
    for words in ("async", "contributions", "of 3 buffered", "dynamic local updates: H 500 for the fastest"):
        assert words in shown
    (desk.folder / "enough").touch()
    for name in "abc":
        desk.ended(name)
    status = desk.status()
    assert status["mode"] == "async"
    assert status["dn_buffer_size"] == 3
    assert status["dylu_enabled"] is True
    assert status["dylu_base_sync_every"] == 500


@pytest.mark.parametrize(
    "server",
    [
        "outerstep server -m model -n 3 --async --dn-buffer-size 3",
        "outerstep server -m model -n 3 --async --dylu --dylu-base-sync-every 500",
        "outerstep server -m model -n 2 --outer-lr 0.5 --outer-momentum 0.95",
        "outerstep server -m model -n 2 --no-nesterov",
    ],
)
def test_the_other_server_lines_start_and_stop_on_ctrl_c(desk: Desk, server: str) -> None:
    child = desk.type(server, "server")
    desk.wait_for_server()
    assert desk.status()["mode"] == ("async" if "--async" in server else "sync")
    child.send_signal(signal.SIGINT)
    desk.ended("server")


def test_a_worker_with_dynamic_local_updates_and_the_single_word_train(desk: Desk) -> None:
    desk.type("outerstep server -m model -n 1 --async --dylu --dylu-base-sync-every 500", "server")
    desk.wait_for_server()
    desk.type("outerstep worker --server host:8512 --sync-every 500 --dylu -- train", "a")
    (desk.folder / "enough").touch()
    desk.ended("a")
    assert desk.facts("a")["arguments"] == ["train"]
    assert desk.facts("a")["metrics"]["sync_count"] == 2


def test_a_streaming_worker(desk: Desk) -> None:
    desk.type(SYNC_SERVER, "server")
    desk.wait_for_server()
    desk.type(STREAMING, "a")
    desk.type(STREAMING, "b")
    desk.wait_for_rounds(2)
    (desk.folder / "enough").touch()
    desk.ended("a")
    desk.ended("b")
    status = desk.status()
    assert status["plan"]["num_fragments"] == 4
    assert len(status["fragments"]) == 4
    assert all(fragment["version"] >= 2 for fragment in status["fragments"])


WORKER_SNIPPET = """
dataloader = [torch.randn(8, 6) for _ in range(1000)]

import torch
from outerstep import DiLoCoWorker

model = MyModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

with DiLoCoWorker(
    model=model,
    optimizer=optimizer,
    server_addr="192.168.1.100:8512",
    sync_every=500,
    bf16_comm=True,
) as diloco:
    # Train normally - DiLoCo syncs happen automatically every 500 optimizer steps
    for batch in dataloader:
        loss = model(batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    # Access sync metrics
    print(diloco.sync_metrics)
"""

STREAMING_SNIPPET = """
model = MyModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

class trainer:
    @staticmethod
    def train():
        for _ in range(1000):
            model(torch.randn(8, 6)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

from outerstep import DiLoCoWorker

with DiLoCoWorker(
    model=model,
    optimizer=optimizer,
    server_addr="192.168.1.100:8512",
    sync_every=500,
    num_fragments=4,       # Split model into 4 fragments
) as diloco:
    trainer.train()        # Fragment syncs happen in background
print(diloco.sync_metrics)
"""

SYNC_SERVER_SNIPPET = """
model = MyModel()

from outerstep import DiLoCoServer

state_dict = model.state_dict()

# Synchronous server (default)
server = DiLoCoServer(
    model_state_dict=state_dict,
    num_workers=3,
    port=8512,
    outer_optimizer_factory=lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True),
)
server.run()
"""

ASYNC_SERVER_SNIPPET = """
model = MyModel()

from outerstep import DiLoCoServer

state_dict = model.state_dict()

# Asynchronous server with DN momentum and DyLU
server = DiLoCoServer(
    model_state_dict=state_dict,
    num_workers=3,
    port=8512,
    async_mode=True,
    dn_buffer_size=3,
    dylu_enabled=True,
    dylu_base_sync_every=500,
)
server.run()
"""

BACKGROUND_SNIPPET = """
from outerstep import DiLoCoServer

server = DiLoCoServer(model_state_dict=MyModel().state_dict(), num_workers=1, port=8512)
# Or start in background
server.start()
# ... do other things ...
print(server.status()["mode"])
server.stop()
"""

CLIENT_SNIPPET = """
from outerstep import DiLoCoClient

client = DiLoCoClient("192.168.1.100:8512")

# Register and get initial params
params = client.register("my_worker", {"hostname": "machine-a"})

pseudograds = {name: torch.ones_like(p) for name, p in params.items()}

# Submit pseudo-gradients (blocks until all workers sync)
new_params = client.submit_pseudogradients("my_worker", pseudograds)

# Other operations
status = client.get_status()
client.heartbeat("my_worker", steps_per_second=3.5)
client.deregister("my_worker")

print(status["sync_round"], status["workers"]["my_worker"]["hostname"])
assert all((params[name] - new_params[name] - 1.33).abs().max() < 0.01 for name in params)  # 0.7 · 1.9
"""

FRAGMENT_SNIPPET = """
model = MyModel()

from outerstep import FragmentManager

fm = FragmentManager(model, num_fragments=4)

# Query fragment contents
print(fm.fragments[0])           # List of param names in fragment 0
print(fm.param_to_fragment)      # Dict: param_name -> fragment_id

# Check sync schedule
frag_id = fm.get_fragment_schedule(local_step=200, sync_every=800)
print("due:", frag_id)
"""


def serve_my_model(desk: Desk, workers: int) -> None:
    code = f"from outerstep import DiLoCoServer\nDiLoCoServer(MyModel().state_dict(), {workers}, port=8512).run()\n"
    desk.python(code, "server")
    desk.wait_for_server()


@pytest.mark.parametrize(("snippet", "fragments"), [(WORKER_SNIPPET, 1), (STREAMING_SNIPPET, 4)], ids=["plain", "4"])
def test_the_worker_as_an_object(desk: Desk, snippet: str, fragments: int) -> None:
    serve_my_model(desk, 1)
    desk.python(snippet, "worker")
    assert "sync_count" in desk.ended("worker")
    status = desk.status()
    assert status["sync_round"] == 2
    assert len(status["fragments"]) == fragments


@pytest.mark.parametrize(
    ("snippet", "mode"), [(SYNC_SERVER_SNIPPET, "sync"), (ASYNC_SERVER_SNIPPET, "async")], ids=["sync", "async"]
)
def test_the_server_as_an_object(desk: Desk, snippet: str, mode: str) -> None:
    child = desk.python(snippet, "server")
    desk.wait_for_server()
    status = desk.status()
    assert (status["mode"], status["num_workers"]) == (mode, 3)
    for name in "abc":
        desk.python(WORKER_SNIPPET, name)
    for name in "abc":
        desk.ended(name)
    assert desk.status()["total_submissions"] >= 6
    child.send_signal(signal.SIGINT)
    desk.ended("server")


def test_the_server_in_the_background(desk: Desk) -> None:
    desk.python(BACKGROUND_SNIPPET, "server")
    assert "sync" in desk.ended("server")


def test_the_client_as_an_object(desk: Desk) -> None:
    serve_my_model(desk, 1)
    desk.python(CLIENT_SNIPPET, "client")
    assert "1 machine-a" in desk.ended("client")


def test_the_fragment_manager(desk: Desk) -> None:
    desk.python(FRAGMENT_SNIPPET, "fragments")
    said = desk.ended("fragments")
    assert "due: 0" in said
    assert "net.0.weight" in said
