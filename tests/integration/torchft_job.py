"""One replica of a torchft run: `python torchft_job.py NUMBER LIGHTHOUSE FOLDER BEGIN`, started by test_torchft.py.

First the runs that are compared with a server's; then one that goes on until the folder says at which versions to stop,
and tells its version and hash after every exchange. What it tells are lines of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from integration.allreduce_job import SYNC_EVERY, anchors_hash, make_model, train
from outerstep import DiLoCoWorker

COMPARED: dict[str, dict[str, Any]] = {
    "vanilla": {"codec": "fp32", "outer_lr": 1.0, "outer_momentum": 0.5},
    "streaming": {"codec": "fp32", "num_fragments": 4, "fragment_delay": 1, "fragment_carry": False},
}
STEPS = 3 * SYNC_EVERY + 2
PATIENCE = {"quorum_timeout_s": 3.0, "transfer_timeout_s": 20.0, "exit_patience_s": 20.0}
LONGER_THAN_A_QUORUM_S = 5.0


def tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


class Position:
    """Where in its data a replica is."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def compare(number: int, lighthouse: str) -> None:
    """Each replica begins with weights of its own; the run begins with the first one's."""
    for name, settings in COMPARED.items():
        model, source = make_model(100 + number), torch.Generator().manual_seed(number)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        worker = DiLoCoWorker(
            model, optimizer, "torchft", sync_every=SYNC_EVERY, worker_id=f"rank-{number}", lighthouse=lighthouse,
            min_replicas=2, **PATIENCE, **settings,
        )  # fmt: skip
        with worker:
            train(model, optimizer, source, STEPS)
        values = {key: value.tolist() for key, value in model.state_dict().items()}
        tell(compared=name, hash=anchors_hash(worker), values=values, metrics=worker.sync_metrics)


def go_on(number: int, lighthouse: str, folder: Path) -> None:
    model, source, position = make_model(100 + number), torch.Generator().manual_seed(number), Position()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    worker = DiLoCoWorker(
        model, optimizer, "torchft", sync_every=SYNC_EVERY, num_fragments=2, fragment_delay=1, codec="int8+feedback",
        worker_id=f"rank-{number}", lighthouse=lighthouse, stateful={"data": position}, **PATIENCE,
    )  # fmt: skip
    with worker:
        moments = [state["exp_avg_sq"].sum().item() for state in optimizer.state.values()]
        tell(joined=worker.sync_metrics["versions"], at=position.at, moments=len(moments), steps=local_steps(worker))
        told: object = None
        while not (stop := folder / "stop").exists() or versions(worker) < int(stop.read_text() or 1 << 30):
            train(model, optimizer, source, 1)
            position.at += 1
            if (told_now := (versions(worker), anchors_hash(worker))) != told:
                told = told_now
                tell(versions=told[0], hash=told[1])
            straggle = folder / f"straggle-{number}"
            if straggle.exists():
                straggle.unlink()
                time.sleep(LONGER_THAN_A_QUORUM_S)
            time.sleep(0.01)  # so that there are rounds enough for what is done to them
    tell(end=anchors_hash(worker), metrics=worker.sync_metrics)


def versions(worker: DiLoCoWorker) -> int:
    return sum(worker.sync_metrics["versions"])  # type: ignore[arg-type]


def local_steps(worker: DiLoCoWorker) -> Any:
    return worker.sync_metrics["local_step"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    own, where, place, begin = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4]
    if begin == "compare":
        compare(own, where)
    go_on(own, where, place)
