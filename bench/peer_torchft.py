"""Two replicas synchronize by torchft's DiLoCo: lighthouse, a manager each, gloo between them. Started by peers.py."""

from __future__ import annotations

import contextlib
import datetime

import torch
from torch.distributed import TCPStore

from harness import HOST, Actor
from models import Nudge, fill, make
from peer_program import run_rounds

PATIENCE = datetime.timedelta(seconds=120)


class Lighthouse:
    def __init__(self) -> None:
        from torchft.coordination import LighthouseServer

        self._server = LighthouseServer(bind=f"{HOST}:0", min_replicas=2, join_timeout_ms=10_000, quorum_tick_ms=50)

    def address(self) -> str:
        """It names the machine, which need not resolve."""
        return f"http://{HOST}:{self._server.address().rpartition(':')[2]}"

    def close(self) -> None:
        self._server.shutdown()


class Replica:
    """The state that a rejoining replica would be given is left out: nobody dies here."""

    def __init__(self, number: int, lighthouse: str, size: str) -> None:
        from torchft import Manager, ProcessGroupGloo

        self._model = fill(make(size))
        self._optimizer = Nudge(self._model)
        self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=PATIENCE),
            load_state_dict=lambda state: None,
            state_dict=dict,
            min_replica_size=2,
            use_async_quorum=False,
            timeout=PATIENCE,
            quorum_timeout=PATIENCE,
            connect_timeout=PATIENCE,
            rank=0,
            world_size=1,
            store_addr=HOST,
            store_port=self._store.port,
            lighthouse_addr=lighthouse,
            replica_id=f"replica-{number}",
            port=0,
            hostname=HOST,
            init_sync=False,  # both begin with the same weights
        )
        self._stack = contextlib.ExitStack()

    def join(self) -> None:
        from torchft.local_sgd import DiLoCo

        outer = torch.optim.SGD(self._model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        diloco = DiLoCo(self._manager, [self._model], self._optimizer, outer, sync_every=2, pin_memory=False)
        self._stack.enter_context(diloco)

    def train(self) -> None:
        self._optimizer.step()

    def exchange(self) -> None:
        before = self._manager.current_step()
        self._optimizer.step()
        if self._manager.current_step() == before:
            raise RuntimeError("torchft did not commit this round")

    def digest(self) -> float:
        return float(sum(p.detach().double().sum() for p in self._model.parameters()))

    def close(self) -> None:
        self._stack.close()
        self._manager.shutdown(wait=False)


def main(numel: int, rounds: int) -> list[float]:
    size = f"{numel // 1_000_000}M"
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(Actor(Lighthouse)).ask("address")
        replicas = [stack.enter_context(Actor(Replica, number, address, size)) for number in range(2)]
        return run_rounds(replicas, rounds)


if __name__ == "__main__":
    from peer_program import started_by_peers

    started_by_peers(main)
