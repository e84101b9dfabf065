"""One peer as a process: `python gossip_job.py PEER_ID FOLDER [die|lie]`, started by test_gossip.py.

It trains until it holds the version in FOLDER/stop, and notes every version that it comes to with its anchor's hash.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from outerstep import DiLoCoWorker
from outerstep.errors import PeerLost
from outerstep.statements import Converse, Offered, Signed
from outerstep.topology.gossip.node import Node
from outerstep.topology.update import anchor_hash
from support import tiny_model, train_steps

SYNC_EVERY = 2
DIES_FROM = 2  # the version that it contributes to


def place_to_join(folder: Path) -> str:
    while not (folder / "join").exists():
        time.sleep(0.05)
    return (folder / "join").read_text()


def fail_in(how: str, folder: Path) -> None:
    """Spoil what this peer offers: it dies as soon as the others can have heard of it; or, when FOLDER/lie is there, it
    says something else under the same key."""
    offer = Node.offer

    def spoiled(node: Node, fragment: int, data: memoryview, **facts: Any) -> Offered | None:
        says = offer(node, fragment, data, **facts)
        if says is not None and how == "die" and says.version >= DIES_FROM:
            with node.lock:
                node.shared.wait(lambda: False, 0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        if says is not None and how == "lie" and (folder / "lie").exists():
            with node.lock:
                tell_too(node, node.peer.book.write(replace(says, digest="0" * 64)))
        return says

    Node.offer = spoiled  # type: ignore[method-assign]


def tell_too(node: Node, lie: Signed) -> None:
    say_to = node.peer.say_to

    def say(height: int) -> Converse:
        said = say_to(height)
        return replace(said, statements=(*said.statements, lie))

    node.peer.say_to = say  # type: ignore[method-assign]


def main() -> None:
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    peer_id, folder, how = sys.argv[1], Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else ""
    fail_in(how, folder)
    is_back = (folder / peer_id / "run.json").exists()
    model = tiny_model(ord(peer_id))
    founds = {"sync_every": SYNC_EVERY, "codec": "int8", "min_peers": 3, "heartbeat_timeout": 4.0}
    worker = DiLoCoWorker(
        model, torch.optim.SGD(model.parameters(), lr=0.05), "gossip", worker_id=peer_id,
        peers=None if peer_id == "a" or is_back else place_to_join(folder), peer_dir=str(folder / peer_id),
        listen="127.0.0.1:0", credentials=str(folder / "credentials"), heartbeat_interval=0.5, exit_patience_s=5.0,
        **(founds if peer_id == "a" else {}),
    )  # fmt: skip
    with (folder / f"{peer_id}.jsonl").open("a", buffering=1) as notes:

        def note(**facts: Any) -> None:
            notes.write(json.dumps(facts) + "\n")

        try:
            with worker:
                if peer_id == "a":
                    (folder / "joining").write_text(worker._topology._node.join_string)  # type: ignore[attr-defined]
                    (folder / "joining").rename(folder / "join")
                note(joined=worker.sync_metrics["versions"][0], capability=torch.backends.cpu.get_cpu_capability())
                train_to_the_end(worker, folder, note)
                note(metrics=worker.sync_metrics)
        except PeerLost as error:
            note(lost=str(error))


def train_to_the_end(worker: DiLoCoWorker, folder: Path, note: Any) -> None:
    stop, number = folder / "stop", 0
    while True:
        train_steps(worker.model, worker.optimizer, SYNC_EVERY, seed=number)
        number += 1
        version = worker.sync_metrics["versions"][0]
        held = anchor_hash(worker._replica.anchors[name] for name in worker.plan.fragments[0])
        expelled = [m.peer_id for m in worker._topology._node.peer.state.expelled]  # type: ignore[attr-defined]
        note(version=version, hash=held, expelled=expelled)
        if stop.exists() and version >= int(stop.read_text() or 1 << 30):
            return


if __name__ == "__main__":
    main()
