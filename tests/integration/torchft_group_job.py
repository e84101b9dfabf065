"""One process of a replica of two: `python torchft_group_job.py NUMBER LIGHTHOUSE FOLDER`, with torchrun's variables;
started by test_torchft.py. First DDP, both replicas from the beginning; then FSDP2, the second replica later."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from integration.group_job import make_model, train_step, wrap
from outerstep import DiLoCoWorker
from outerstep.topology.update import anchor_hash
from support import wait_until

SYNC_EVERY = 4
ROUNDS = 3  # together
NEVER = 1 << 30


def run(number: int, lighthouse: str, kind: str, folder: Path) -> dict[str, object]:
    model = wrap(kind, make_model(number))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    source = torch.Generator().manual_seed(10 * number + dist.get_rank())
    begun, until, late = folder / "begun", folder / "until", kind == "fsdp2"
    if late and number == 1:
        wait_until(begun.exists, 120)
    worker = DiLoCoWorker(
        model, optimizer, "torchft", sync_every=SYNC_EVERY, num_fragments=2, lighthouse=lighthouse,
        worker_id=f"replica-{number}", min_replicas=1 if late else 2, quorum_timeout_s=5.0, transfer_timeout_s=30.0,
        exit_patience_s=20.0,
    )  # fmt: skip
    with worker:
        joined = versions_of(worker)
        moments = len(optimizer.state)
        sharded = all(isinstance(state["exp_avg"], DTensor) for state in optimizer.state.values())
        if late and number == 1 and dist.get_rank() == 0:
            until.with_suffix(".new").write_text(str(sum(joined) + 2 * ROUNDS))
            until.with_suffix(".new").rename(until)
        while sum(versions_of(worker)) < (agreed(until) if late else 2 * ROUNDS):
            train_step(model, optimizer, source)
            if late and sum(versions_of(worker)) >= 2:
                begun.touch()
    anchors = anchor_hash(worker._replica.anchors[name] for names in worker.plan.fragments for name in names)
    return {"joined": joined, "moments": moments, "sharded": sharded, "hash": anchors, "end": versions_of(worker)}


def versions_of(worker: DiLoCoWorker) -> list[int]:
    return list(worker.sync_metrics["versions"])  # type: ignore[arg-type]


def agreed(until: Path) -> int:
    """What is written there, if one of the processes of this replica sees it."""
    limit = torch.tensor([int(until.read_text()) if until.exists() else NEVER])
    dist.all_reduce(limit, dist.ReduceOp.MIN)
    return int(limit)


if __name__ == "__main__":
    torch.set_num_threads(1)
    own, where, place = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    dist.init_process_group("gloo")
    told = {kind: run(own, where, kind, place) for kind in ("ddp", "fsdp2")}
    (place / f"group-{own}-{dist.get_rank()}.json").write_text(json.dumps(told))
    dist.destroy_process_group()
