"""A worker of a given speed that trains leased samples, for tests: it sleeps after each batch, which is one unit.

python paced_job.py FOLDER SAMPLES UNIT SECONDS      # it begins when FOLDER/go is there
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import outerstep
from outerstep.data import LeasedLoader, LeasedSampler

torch.set_num_threads(1)
folder, samples, unit, seconds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
model = nn.ParameterDict({"cells": nn.Parameter(torch.zeros(samples))})
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
data = LeasedSampler(samples, unit_samples=unit)
loader = LeasedLoader(list(range(samples)), data, batch_size=unit)  # type: ignore[arg-type]
with outerstep.attach(model, optimizer, data=data):
    (folder / f"{os.environ['OUTERSTEP_WORKER_ID']}.here").touch()
    while not (folder / "go").exists():
        time.sleep(0.02)
    for batch in loader:
        grad = torch.zeros(samples)
        grad[batch] = -1.0
        model["cells"].grad = grad
        time.sleep(seconds)
        optimizer.step()
