"""A run of real processes: a server as it is typed on a command line, and training scripts, each with its log."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nursery import Child, start
from outerstep.errors import TransportError
from outerstep.model_folder import save_model
from outerstep.wire.http_transport import HttpTransport
from ports import free_port
from support import Ledger, tiny_model, wait_until

SCRIPT = """
import os, pathlib, sys, time, torch, outerstep
sys.path.insert(0, {tests!r})
from clusters import build_model
from support import train_steps
from outerstep.topology.update import anchor_hash
torch.set_num_threads(1)
name, folder = sys.argv[1], pathlib.Path({folder!r})
model = build_model({kind!r})
optimizer = torch.optim.SGD(model.parameters(), lr={lr})
with outerstep.attach(model, optimizer) as worker:
    began_with = anchor_hash(p.detach() for p in model.parameters())
    with (folder / f"{{name}}.began").open("a") as file:
        print(began_with, file=file)
    step = 0
    while not (folder / "stop").exists():
        if (folder / f"{{name}}.hang").exists():
            time.sleep(3600)  # the loop hangs; its heartbeat has a thread of its own
        train_steps(model, optimizer, 1, seed=step)
        step += 1
        (folder / f"{{name}}.steps").write_text(str(step))
        time.sleep(0.01)
outerstep.save_model(model, folder / name)
"""


RATES = {"tiny": 0.01, "wide": 1e-6, "ledger": 1.0, "samples": 1.0}
LEDGER_CELLS = 12
SAMPLE_CELLS = 240


def build_model(kind: str) -> nn.Module:
    """The same weights in every process. "wide" has two megabytes, to be sent in many parts; "ledger" counts steps,
    "samples" how often each sample was trained (integration/leased_job.py)."""
    if kind == "tiny":
        return tiny_model()
    if kind == "ledger":
        return Ledger(LEDGER_CELLS)
    if kind == "samples":
        return Ledger(SAMPLE_CELLS)
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 65536), nn.Tanh(), nn.Linear(65536, 1))


class Cluster:
    """A server process and worker processes; everything is ended by its id."""

    def __init__(
        self, folder: Path, *server_flags: str, model: str | nn.Module = "tiny", event_log: str | None = None
    ) -> None:
        """`model`: its kind, or one that other scripts than ours train."""
        self.folder = folder
        kind = model if isinstance(model, str) else "tiny"
        save_model(build_model(model) if isinstance(model, str) else model, folder / "initial")
        tests = str(Path(__file__).parent)
        (folder / "train.py").write_text(SCRIPT.format(tests=tests, folder=str(folder), kind=kind, lr=RATES[kind]))
        self.address = f"127.0.0.1:{free_port()}"
        self.children: list[Child] = []
        self._event_log = event_log or str(folder / "events.jsonl")
        self.server = self.start_server(*server_flags)
        self.transport = HttpTransport(self.address)
        wait_until(self.answers)

    def start_server(self, *flags: str) -> Child:
        port = self.address.split(":")[1]
        words = ["server", "-m", str(self.folder / "initial"), "--port", port, "--event-log", self._event_log, *flags]
        self.server = self.spawn("server", ["-m", "outerstep", *words])
        return self.server

    def answers(self) -> bool:
        assert self.server.poll() is None, (self.folder / "server.log").read_text()
        try:
            return bool(self.status())
        except TransportError:
            return False

    def spawn(self, name: str, arguments: list[str], **environ: str) -> Child:
        with (self.folder / f"{name}.log").open("ab") as log:
            child = start(arguments, log=log, cwd=self.folder, env={**os.environ, **environ})
        self.children.append(child)
        return child

    def worker(self, name: str, address: str | None = None, **settings: object) -> Child:
        """The script itself, so that a signal reaches who trains; settings are worker settings."""
        environ = {f"OUTERSTEP_{field.upper()}": str(value) for field, value in settings.items()}
        environ |= {"DILOCO_SERVER": address or self.address, "DILOCO_WORKER_ID": name}
        return self.spawn(name, [str(self.folder / "train.py"), name], **environ)

    def status(self) -> dict[str, Any]:
        return self.transport.status()

    def round(self) -> int:
        return int(self.status()["sync_round"])

    def participants(self) -> list[str]:
        return sorted(self.status()["fragments"][0]["last_participants"])

    def events(self, kind: str) -> list[dict[str, Any]]:
        text = Path(self._event_log).read_text()
        found = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return [event for event in found if event["event"] == kind]

    def steps(self, name: str) -> int:
        """How many its present process has taken."""
        file = self.folder / f"{name}.steps"
        return int((file.read_text() or "0") if file.exists() else "0")

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def close(self) -> None:
        self.transport.close()
        for child in self.children:
            if child.poll() is None:
                child.kill()
                child.wait()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
