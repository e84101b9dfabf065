"""One replica of a torchft cluster that is a worker of a server: `torchft_cluster_job.py CELL FOLDER`, by attach().

Each step adds 2 to the replica's own cell of a ledger. Beside the model it writes down what was agreed on, a line of
JSON for each round (`CELL.rounds`), who led at its first meeting (`CELL.met`), since when it leads (`CELL.leads`), a
line for each time that it had its cluster wait for the layer above (`CELL.holds`), and at the end what it holds
(`CELL.end`). While there is a file `CLUSTER.cut`, no leader of that cluster gets through to the layer above.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import outerstep
from clusters import LEDGER_CELLS
from outerstep.hierarchy.leader import Leader
from outerstep.topology.leadership import Leadership
from outerstep.topology.torchft.rounds import RoundOutcome, Rounds, VotedRound
from outerstep.topology.update import anchor_hash
from support import Ledger, count

STEP = 2.0


def is_over(worker: outerstep.DiLoCoWorker, folder: Path, cell: int) -> bool:
    """Directly after an exchange across a replica stands still while the test asks for it: if all do, they can end with
    one round each."""
    pause, stop = folder / "pause", folder / "stop"
    newest = worker.sync_metrics["versions"][0]  # type: ignore[index]
    if worker._topology._rounds.cluster.above[0][-1:] != (newest,) or not pause.exists():  # type: ignore[attr-defined]
        return False
    (folder / f"{cell}.ready").touch()
    while pause.exists() and not stop.exists():
        time.sleep(0.02)
    return stop.exists()


def write_down(cell: int, folder: Path) -> None:
    agree, agree_in_cluster = Rounds._agree, Rounds._agree_in_cluster
    lead, hold, join = Leadership.lead, Leadership.hold, Leader._join

    def noted(rounds: Rounds, brought: Any, made: VotedRound) -> RoundOutcome:
        """Before anything of this version goes anywhere."""
        if made.active:
            seen = {offer.instance: offer.steps for offer in made.active}
            with (folder / f"{cell}.rounds").open("a") as file:
                now = time.monotonic()
                line = {"run": rounds.run_id, "version": rounds.snapshot.versions[0] + 1, "active": seen, "at": now}
                print(json.dumps(line), file=file)
        return agree(rounds, brought, made)

    def met(rounds: Rounds, leadership: Leadership, brought: Any, made: VotedRound, *args: Any) -> RoundOutcome | None:
        file = folder / f"{cell}.met"
        if not file.exists():
            file.write_text(rounds.offers[made.leader].instance)
        return agree_in_cluster(rounds, leadership, brought, made, *args)

    def told(leadership: Leadership, *args: Any, **more: Any) -> None:
        lead(leadership, *args, **more)
        (folder / f"{cell}.leads").write_text(str(time.monotonic()))

    def held(leadership: Leadership, limit_s: float) -> None:
        with (folder / f"{cell}.holds").open("a") as file:
            print(limit_s, file=file)
        hold(leadership, limit_s)

    def joined(leader: Leader, **more: Any) -> bool:
        while (folder / f"{leader.name}.cut").exists() and not leader.failure:
            time.sleep(0.02)
        return join(leader, **more)

    Rounds._agree, Rounds._agree_in_cluster = noted, met  # type: ignore[method-assign]
    Leadership.lead, Leadership.hold, Leader._join = told, held, joined  # type: ignore[method-assign]


def main(cell: int, folder: Path) -> None:
    write_down(cell, folder)
    model = Ledger(LEDGER_CELLS)
    optimizer = torch.optim.SGD(model.parameters(), lr=STEP)
    with outerstep.attach(model, optimizer) as worker:
        (folder / f"{cell}.instance").write_text(worker._topology._instance)  # type: ignore[attr-defined]
        while not is_over(worker, folder, cell):
            count(model, optimizer, cell, 1)
            time.sleep(0.05)
        count(model, optimizer, cell, 1)  # so that everybody has something left to say
    anchors = worker._replica.anchors["cells"]
    told = {"hash": anchor_hash([anchors]), "cells": model.cells.tolist(), "metrics": worker.sync_metrics}
    (folder / f"{cell}.end").write_text(json.dumps(told))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]))
