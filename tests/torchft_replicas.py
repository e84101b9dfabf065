"""Replicas for tests of torchft's DiLoCo, in threads of one process.

`StandInManager` stands in for torchft.Manager: the calls that DiLoCo makes on one, with a shared buffer as the network.
No quorum, no vote, no healing: what needs those takes `with_managers`, with a real lighthouse and gloo.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp, TCPStore
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from support import in_threads

PATIENCE_S = 30.0


class SharedBuffer:
    """What the replicas put in, by the number of the call. A result is complete when all have."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self._offered: dict[int, dict[int, Tensor]] = {}
        self._changed = threading.Condition()

    def put(self, call: int, replica: int, tensor: Tensor) -> None:
        with self._changed:
            self._offered.setdefault(call, {})[replica] = tensor.clone()
            self._changed.notify_all()

    def take(self, call: int) -> list[Tensor]:
        """Everybody's, in the order of the replicas."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._offered[call]) == self.replicas, PATIENCE_S), (
                "a replica is missing"
            )
            return [self._offered[call][replica] for replica in range(self.replicas)]


class StandInManager:
    """One replica's. Every sync is committed."""

    _use_async_quorum = False
    _init_sync = False
    _group_world_size = 1

    def __init__(self, buffer: SharedBuffer, replica: int) -> None:
        self._buffer, self._replica = buffer, replica
        self._calls = 0
        self._step = 0
        self.quorums = 0
        self._user_state_dicts: dict[str, Callable[[], Any]] = {}
        self.loads: dict[str, Callable[[Any], None]] = {}

    def register_state_dict_fn(self, key: str, load: Callable[[Any], None], save: Callable[[], Any]) -> None:
        self.loads[key], self._user_state_dicts[key] = load, save

    def saved(self) -> dict[str, Any]:
        """What a peer that heals would fetch."""
        return {key: save() for key, save in self._user_state_dicts.items()}

    def heal(self, state: dict[str, Any]) -> None:
        for key, load in self.loads.items():
            load(state[key])

    def disallow_state_dict_read(self) -> None: ...

    def allow_state_dict_read(self) -> None: ...

    def start_quorum(self) -> None:
        self.quorums += 1

    def current_step(self) -> int:
        return self._step

    def allreduce(self, tensor: Tensor, should_quantize: bool = False, reduce_op: Any = ReduceOp.AVG) -> Pending:
        self._calls += 1
        self._buffer.put(self._calls, self._replica, tensor)
        return Pending(self._buffer, self._calls, tensor, reduce_op)

    def errored(self) -> None:
        return None

    def should_commit(self) -> bool:
        self._step += 1
        return True


class Pending:
    """An all-reduce on its way: the tensor changes at `wait`, so training may go on in between."""

    def __init__(self, buffer: SharedBuffer, call: int, tensor: Tensor, reduce_op: Any) -> None:
        self._buffer, self._call, self._tensor, self._reduce_op = buffer, call, tensor, reduce_op

    def wait(self) -> bool:
        everybody = torch.stack(self._buffer.take(self._call))
        self._tensor.copy_(everybody.mean(0) if self._reduce_op == ReduceOp.AVG else everybody.amax(0))
        return True


def with_stand_ins(replicas: int, job: Callable[[StandInManager, int], Any]) -> list[Any]:
    """The same job in every replica; the results in their order, or the first exception."""
    buffer = SharedBuffer(replicas)
    managers = [StandInManager(buffer, replica) for replica in range(replicas)]
    return in_threads(*[lambda r=r: job(managers[r], r) for r in range(replicas)])


def with_managers(replicas: int, job: Callable[[Manager, int], Any], **settings: Any) -> list[Any]:
    """The same with real managers, a real lighthouse that waits for all of them, and gloo."""
    with lighthouse(replicas) as address:

        def run(replica: int) -> Any:
            with real_manager(address, f"replica_{replica}", min_replicas=replicas, **settings) as manager:
                return job(manager, replica)

        return in_threads(*[lambda r=r: run(r) for r in range(replicas)])


@contextmanager
def lighthouse(min_replicas: int, join_timeout_ms: int = 200, heartbeat_timeout_ms: int = 5000) -> Iterator[str]:
    server = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=min_replicas,
        join_timeout_ms=join_timeout_ms,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=heartbeat_timeout_ms,
    )
    try:
        yield server.address()
    finally:
        server.shutdown()


@contextmanager
def real_manager(
    lighthouse_addr: str,
    replica_id: str,
    *,
    min_replicas: int = 1,
    init_sync: bool = False,
    state_dict: Callable[[], Any] | None = None,
    load_state_dict: Callable[[Any], None] | None = None,
) -> Iterator[Manager]:
    """Everything said explicitly: two managers of one process must not read the same environment."""
    patience = timedelta(seconds=PATIENCE_S)
    with ExitStack() as stack:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        group = ProcessGroupGloo(timeout=patience)
        manager = Manager(
            pg=group,
            load_state_dict=load_state_dict,
            state_dict=state_dict,
            min_replica_size=min_replicas,
            use_async_quorum=False,
            timeout=patience,
            quorum_timeout=patience,
            connect_timeout=patience,
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=store.port,
            lighthouse_addr=lighthouse_addr,
            replica_id=replica_id,
            port=0,
            hostname="127.0.0.1",
            init_sync=init_sync,
            quorum_retries=3,
        )
        stack.callback(group.shutdown)
        stack.callback(manager.shutdown, wait=False)
        yield manager


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def nesterov(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


def alone() -> StandInManager:
    return StandInManager(SharedBuffer(1), 0)


def anchors(diloco: DiLoCo) -> dict[str, Tensor]:
    found = [fragment.original_parameters for fragment in diloco._fragments]
    return {f"{i} {name}": tensor.clone() for i, fragment in enumerate(found) for name, tensor in fragment.items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)
