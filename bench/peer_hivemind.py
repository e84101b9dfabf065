"""Two peers average their tensors by hivemind's DecentralizedAverager. Started by peers.py.

Peers first look for each other, for a second or more by design; hivemind's own optimizer does that ahead of time, while
training goes on. So it is not counted here: a round is the all-reduce, from the trigger to the averaged tensors.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from typing import Any

import torch

from harness import HOST, Actor
from models import fill, make
from peer_program import run_rounds

PATIENCE_S = 60.0
ASK_S = 0.02


class Peer:
    def __init__(self, number: int, friends: list[str], size: str) -> None:
        import hivemind

        multiprocessing.set_start_method("fork", force=True)  # it cannot do with another

        self._dht = hivemind.DHT(host_maddrs=[f"/ip4/{HOST}/tcp/0"], initial_peers=friends, start=True)
        model = fill(make(size))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(number)
        self._averager = hivemind.averaging.DecentralizedAverager(
            averaged_tensors=[p.detach() for p in model.parameters()],
            dht=self._dht,
            prefix="bench",
            target_group_size=2,
            min_matchmaking_time=2.0,
            request_timeout=1.0,
            start=True,
        )
        self._step: Any = None

    def addresses(self) -> list[str]:
        return [str(address) for address in self._dht.get_visible_maddrs()]

    def join(self) -> None:
        """The averager joined when it was made."""

    def train(self) -> None:
        """Find the group."""
        self._step = self._averager.step(wait=False, require_trigger=True, timeout=PATIENCE_S)
        while self._step.stage.name in ("IDLE", "LOOKING_FOR_GROUP"):
            time.sleep(ASK_S)

    def exchange(self) -> None:
        self._step.allow_allreduce()
        if self._step.result(timeout=PATIENCE_S) is None:
            raise RuntimeError("hivemind's all-reduce failed")

    def digest(self) -> float:
        with self._averager.get_tensors() as tensors:
            return float(sum(tensor.double().sum() for tensor in tensors))

    def close(self) -> None:
        self._averager.shutdown()
        self._dht.shutdown()


def main(numel: int, rounds: int) -> list[float]:
    size = f"{numel // 1_000_000}M"
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(Actor(Peer, 0, [], size, start="spawn", has_children=True))
        friends = first.ask("addresses")
        second = stack.enter_context(Actor(Peer, 1, friends, size, start="spawn", has_children=True))
        return run_rounds([first, second], rounds)


if __name__ == "__main__":
    from peer_program import started_by_peers

    started_by_peers(main)
