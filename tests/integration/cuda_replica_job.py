"""One of two replicas with their models on a device: `python cuda_replica_job.py NUMBER WHERE TOPOLOGY BACKEND DEVICE`,
started by test_cuda_replicas.py. Prints the anchor's hash after every exchange, by setting, as one line of JSON.

Two processes share the one GPU. NCCL refuses that on one host, so each says that it is on a host of its own
(NCCL_HOSTID); its bytes travel through sockets then.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from outerstep import DiLoCoWorker
from outerstep.topology.update import anchor_hash

SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {"codec": "fp32"},
    "bf16, streamed": {"codec": "bf16", "num_fragments": 2, "fragment_delay": 1, "fragment_carry": True},
    "int4+feedback": {"codec": "int4+feedback"},
    "fp32, anchor on the host": {"codec": "fp32", "anchor": "host"},
}
ROUNDS, SYNC_EVERY = 3, 4
PATIENCE = {"quorum_timeout_s": 20.0, "transfer_timeout_s": 60.0, "exit_patience_s": 60.0}
WIDTH = 257
POWER_OF_TWO = 0.0625  # as learning rate: the product is exact, so a step has the same bits on every device


def make_model(number: int) -> nn.Module:
    torch.manual_seed(100 + number)
    return nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)])


def hashes(number: int, where: str, topology: str, backend: str, device: str, settings: dict[str, Any]) -> list[str]:
    model, source = make_model(number).to(device), torch.Generator().manual_seed(number)
    optimizer = torch.optim.SGD(model.parameters(), lr=POWER_OF_TWO)
    more: dict[str, Any] = {}
    if topology == "torchft":
        more = {"lighthouse": where, "min_replicas": 2, "replica_backend": backend, **PATIENCE}
    worker = DiLoCoWorker(
        model, optimizer, topology, worker_id=f"replica-{number}", sync_every=SYNC_EVERY, **more, **settings
    )
    found: list[str] = []
    with worker:
        for step in range(1, ROUNDS * SYNC_EVERY + 1):
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=source).to(device)
            optimizer.step()
            if step % SYNC_EVERY == 0:
                found.append(anchor_hash(anchor.cpu() for anchor in worker._replica.anchors.values()))
    return [*found, anchor_hash(parameter.detach().cpu() for parameter in model.parameters())]


def main() -> None:
    number, where, topology, backend, device = int(sys.argv[1]), *sys.argv[2:6]
    torch.set_num_threads(1)
    if topology == "allreduce":
        place = {"init_method": f"tcp://{where}", "rank": number, "world_size": 2}
        dist.init_process_group(f"cpu:gloo,cuda:{backend}" if device == "cuda" else "gloo", **place)
    found = {name: hashes(number, where, topology, backend, device, settings) for name, settings in SETTINGS.items()}
    print(json.dumps(found), flush=True)
    if topology == "allreduce":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
