"""A server and a worker in one process, whose metrics go to the loggers that are named.

python logger_job.py NAMES
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from outerstep.observe.loggers.sink import LoggerSink
from outerstep.server import DiLoCoServer
from outerstep.worker import DiLoCoWorker
from support import tiny_model, train_steps, wait_until

LoggerSink.__init__.__kwdefaults__["close_s"] = 200.0  # a busy machine may take its time to open them
logging.basicConfig(level=logging.WARNING)
names = sys.argv[1]
model = tiny_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
plain = {"insecure": True, "port": 0, "codec": "fp32"}
with DiLoCoServer(model.state_dict(), num_workers=1, save_dir="run", log_to=names, **plain) as server:
    if os.environ["WANDB_MODE"] == "offline":
        import wandb

        wait_until(lambda: wandb.run is not None)  # the server's, which the worker finds, as it would a script's own
    with DiLoCoWorker(
        *(model, optimizer, f"http://{server.address}"),
        sync_every=2,
        worker_id="left",
        metrics_dir="metrics",
        log_to=names,
    ) as worker:
        for step in range(6):
            worker.last_loss = 6.0 - step
            train_steps(model, optimizer, 1, seed=step)
print(f"rounds {server.sync_round}, lost {server.service.loggers.lost}")
