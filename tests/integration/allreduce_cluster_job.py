"""One rank of an all-reduce job that is a cluster of a server: `allreduce_cluster_job.py LIFE CELL FOLDER`.

Each step adds 2 to the rank's own cell of a ledger, which is 1 in the mean of two ranks. Every third step the rank
saves its state; a job of a later life goes on from the newest that all its ranks have of the one before (`AFTER`). Rank
0 writes down what it contributes to the layer above, and kills its process where it is told to (`DEATH`), once the test
has armed it.
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
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

import outerstep
from clusters import LEDGER_CELLS
from outerstep.hierarchy.leader import Leader
from outerstep.topology.update import anchor_hash
from support import Ledger, count

STEP = 2.0
SAVE_EVERY = 3


class Job:
    def __init__(self, life: str, cell: int, folder: Path) -> None:
        self.life, self.cell, self.folder, self.rank = life, cell, folder, int(os.environ["RANK"])
        self.after, self.death = os.environ.get("AFTER", ""), os.environ.get("DEATH", "").split()
        self.steps = self.saved = 0
        self.model = Ledger(LEDGER_CELLS)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=STEP)
        self.worker = outerstep.attach(self.model, self.optimizer)

    # --- states -------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        state = {"model": self.model.state_dict(), "worker": self.worker.state_dict(), "steps": self.steps}
        file = self.folder / f"{self.life}-{self.steps:06}.{self.rank}"
        unfinished = file.with_name(f"unfinished-{file.name}")
        torch.save(state, unfinished)
        unfinished.rename(file)
        self.saved += 1

    def load(self) -> None:
        both = [{file.stem for file in self.folder.glob(f"{self.after}-*.{rank}")} for rank in (0, 1)]
        newest = max(both[0] & both[1])
        state = torch.load(self.folder / f"{newest}.{self.rank}", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.worker.load_state_dict(state["worker"])
        if self.rank == 0:
            (self.folder / f"{self.after}.resumed").write_text(str(state["steps"]))

    # --- rank 0 -------------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Note what is contributed, and die where it is wanted."""
        sent = Leader._sent

        def noted(leader: Leader) -> None:
            assert leader._shadow is not None
            with (self.folder / f"{self.life}.offers").open("a") as file:
                print(json.dumps(leader._shadow.tensors["cells"].tolist()), file=file)
            sent(leader)

        Leader._sent = noted  # type: ignore[method-assign]
        if not self.death:
            return
        when, name = self.death[:2]
        carry_out = getattr(Leader, name)

        def doomed(leader: Leader, *args: Any) -> None:
            if when == "before":
                self.die(leader)
            carry_out(leader, *args)
            if when == "after":
                self.die(leader)

        setattr(Leader, name, doomed)

    def die(self, leader: Leader) -> None:
        if not (self.folder / f"{self.life}.armed").exists():
            return
        if "saved" in self.death:  # training goes on meanwhile
            enough = self.saved + 2
            while self.saved < enough:
                time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    def is_over(self) -> bool:
        """At the round across that the test names; as rank 0 sees it."""
        said = torch.zeros(1)
        if self.rank == 0 and (self.folder / "stop").exists():
            leader = self.worker._topology._cluster.leadership._leader  # type: ignore[attr-defined]
            said[0] = leader.worker.sync_metrics["versions"][0] >= int((self.folder / "stop").read_text() or 1 << 30)
        dist.broadcast(said, src=0)
        return bool(said)

    def run(self) -> None:
        if self.rank == 0:
            self.watch()
        if self.after:
            self.load()
        with self.worker as worker:
            while not self.is_over():
                self.step()
                if self.steps % SAVE_EVERY == 0:
                    self.save()
                time.sleep(0.02)
            self.step()  # so that everybody has something left to say
        anchors = worker._replica.anchors["cells"]
        told = {"hash": anchor_hash([anchors]), "cells": self.model.cells.tolist(), "steps": self.steps}
        (self.folder / f"{self.life}-{self.rank}.end").write_text(json.dumps(told))

    def step(self) -> None:
        count(self.model, self.optimizer, self.cell, 1)
        self.steps += 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Job(sys.argv[1], int(sys.argv[2]) + int(os.environ["RANK"]), Path(sys.argv[3])).run()
    sys.stdout.flush()
    os._exit(0)  # with gloo some versions of torch abort in an ordinary exit
