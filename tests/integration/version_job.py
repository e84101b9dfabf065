"""One end as a process: `python version_job.py server|worker|peer NAME FOLDER SETTINGS`, started by test_versions.py.

It runs with today's code or with release 0.2, as PYTHONPATH says: so it uses only what both have. A worker or a peer
trains for ROUNDS rounds and notes, after each, its version and the hash of its weights. While FOLDER/pause is there, it
waits in the middle.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import outerstep
from outerstep import DiLoCoServer, DiLoCoWorker

ROUNDS = 4
SYNC_EVERY = 2


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))


def place_to_join(folder: Path) -> str:
    while not (folder / "join").exists():
        time.sleep(0.05)
    return (folder / "join").read_text()


def show_place(folder: Path, join_string: str) -> None:
    (folder / "joining").write_text(join_string)
    (folder / "joining").rename(folder / "join")


def serve(folder: Path, settings: dict[str, Any]) -> None:
    server = DiLoCoServer(
        make_model().state_dict(), num_workers=2, min_workers=2, host="127.0.0.1", sync_every=SYNC_EVERY,
        codec="fp32", credentials=str(folder / "server-credentials"), **{"port": 0, **settings},
    )  # fmt: skip
    with server:
        show_place(folder, server.access.join_string)
        while not (folder / "stop").exists():
            time.sleep(0.05)


def train(name: str, folder: Path, worker: DiLoCoWorker) -> None:
    source = torch.Generator().manual_seed(ord(name[0]))
    with (folder / f"{name}.jsonl").open("a", buffering=1) as notes, worker:
        if worker.config.topology == "gossip" and not (folder / "join").exists():
            show_place(folder, worker._topology._node.join_string)  # type: ignore[attr-defined]
        version = worker.sync_metrics["versions"][0]  # of a peer that comes back, that of its folder
        while version < ROUNDS:
            for _ in range(SYNC_EVERY):
                inputs = torch.randn(8, 6, generator=source)
                (worker.model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
                worker.optimizer.step()
                worker.optimizer.zero_grad()
            digest = hashlib.sha256()
            for param in worker.model.parameters():
                digest.update(param.detach().numpy().tobytes())
            version = worker.sync_metrics["versions"][0]
            notes.write(json.dumps({"version": version, "hash": digest.hexdigest()}) + "\n")
            while version == ROUNDS // 2 and (folder / "pause").exists():
                time.sleep(0.05)
        if worker.config.topology == "server":  # the other ends first: a test looks at them
            while not (folder / "leave").exists():
                time.sleep(0.05)


def main() -> None:
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    role, name, folder, settings = sys.argv[1], sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4])
    print("outerstep from", Path(outerstep.__file__).parent, flush=True)
    if role == "server":
        serve(folder, settings)
        return
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    own = {"worker_id": name, "credentials": str(folder / f"{name}-credentials"), **settings}
    if role == "worker":
        train(name, folder, DiLoCoWorker(model, optimizer, place_to_join(folder), **own))
        return
    peers = None if settings or (folder / name / "run.json").exists() else place_to_join(folder)
    at = {"peer_dir": str(folder / name), "listen": "127.0.0.1:0"}
    train(name, folder, DiLoCoWorker(model, optimizer, "gossip", peers=peers, **at, **own))


if __name__ == "__main__":
    main()
