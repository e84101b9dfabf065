"""A worker that trains leased data without a server, for tests: the batches that it trained are in FOLDER/NAME.log.

    python shared_data_job.py TOPOLOGY FOLDER SAMPLES DIE_AT STEP_S    # DIE_AT: SIGKILL after that step, 0 = never

Model and worker are saved after each step (or each so many, as it says) if FOLDER/saves exists; the job resumes from
them. JOB_ABOVE, JOB_CLUSTER and so on are settings of a worker whose peers are a cluster. At the end it tells what
the lease table holds, and the model's cells.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outerstep import DiLoCoWorker
from outerstep.data import LeasedLoader, LeasedSampler

torch.set_num_threads(1)
topology, folder = sys.argv[1], Path(sys.argv[2])
samples, die_at, step_s = int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])
name = os.environ.get("NAME") or f"{os.environ['JOB_CLUSTER']}{os.environ['RANK']}"


def place_to_join(folder: Path) -> str:
    while not (folder / "join").exists():
        time.sleep(0.05)
    return (folder / "join").read_text()


settings: dict[str, dict[str, Any]] = {
    "allreduce": {"outer_lr": 2.0},  # each of two ranks trains its part of a unit, and the mean halves it
    "gossip": {
        "listen": "127.0.0.1:0",
        "insecure": True,
        "heartbeat_timeout_s": 3.0,
        "min_peers": 1,
        "peers": place_to_join(folder) if topology == "gossip" and name != "a" else None,
        "heartbeat_interval": 0.5,
        "peer_dir": str(folder / f"peer-{name}"),
    },
    "torchft": {"lighthouse": os.environ.get("LIGHTHOUSE"), "min_replicas": 1, "quorum_timeout_s": 3.0},
}
model = nn.ParameterDict({"cells": nn.Parameter(torch.zeros(samples))})
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
checkpoint = folder / f"{name}.pt"
saved = torch.load(checkpoint, weights_only=False) if checkpoint.exists() else None
if saved is not None:
    model.load_state_dict(saved["model"])
data = LeasedSampler(samples, unit_samples=4, seed=3)
loader = LeasedLoader(list(range(samples)), data, batch_size=2)  # type: ignore[arg-type]
outer = {"codec": "fp32", "outer_lr": 1.0, "outer_momentum": 0.0, "sync_every": 4}
above = ("above", "cluster", "above_every", "above_wait_s", "peer_timeout_s", "transfer_timeout_s")
known = {field: os.environ[f"JOB_{field.upper()}"] for field in above if f"JOB_{field.upper()}" in os.environ}
layers = {field: said if field in above[:2] else json.loads(said) for field, said in known.items()}
own_id = {} if topology == "allreduce" else {"worker_id": name}  # a rank has its number
worker = DiLoCoWorker(
    model,
    optimizer,
    topology,
    **own_id,
    data=data,
    event_log=str(folder / f"{name}.events"),
    exit_patience_s=10.0,
    **{**outer, **settings[topology], **layers},
)
if saved is not None:
    worker.load_state_dict(saved["worker"])
saves = folder / "saves"
save_every = int(saves.read_text() or 1) if saves.exists() else 1
with worker:
    if topology == "gossip" and name == "a":
        (folder / "joining").write_text(worker._topology._node.join_string)  # type: ignore[attr-defined]
        (folder / "joining").rename(folder / "join")
    for step, batch in enumerate(loader):
        grad = torch.zeros(samples)
        grad[batch] = -1.0
        model["cells"].grad = grad
        optimizer.step()
        with (folder / f"{name}.log").open("a") as file:
            print(*batch.tolist(), file=file)
        if (folder / "saves").exists() and step % save_every == save_every - 1:
            torch.save({"model": model.state_dict(), "worker": worker.state_dict()}, checkpoint)
        if step + 1 == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(step_s)
print(json.dumps({"name": name, "ledger": worker.data_progress[0], "cells": model["cells"].tolist()}), flush=True)
if topology == "allreduce":
    os._exit(0)  # with gloo some versions of torch abort in an ordinary exit
