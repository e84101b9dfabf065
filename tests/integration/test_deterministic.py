"""The same contributions give the same bits, whoever came first."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

from outerstep.errors import ConfigError, PlanMismatch
from outerstep.server import DiLoCoServer
from outerstep.wire.memory import MemoryTransport
from support import HandClient, Ledger, make_frame, params_of, tiny_model, wait_until

WORKERS = ("a", "b", "c")


def delta(worker: str, round_: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(100 * round_ + ord(worker))
    return {name: torch.randn(value.shape, generator=source) for name, value in params_of(tiny_model()).items()}


def run(orders: list[tuple[str, ...]], **settings: Any) -> str:
    """One round per order of arrival; the hash of the last anchor."""
    facts = {"codec": "fp32", "port": 0, "part_size_bytes": 64, "sync_every": 2, **settings}
    server = DiLoCoServer(tiny_model().state_dict(), len(WORKERS), **facts)
    server.service.coordinator.run_id = "run"  # rounding at random depends on it
    server.service.start()
    clients = {worker: HandClient(MemoryTransport(server.service), worker) for worker in WORKERS}
    for client in clients.values():
        client.join()
    for version, order in enumerate(orders, 1):
        base = version - 1
        for worker in order:
            frame = make_frame(delta(worker, version))
            amount = {"a": 100, "b": 900, "c": 12_345}[worker]
            clients[worker].contribute(frame, base_version=base, oldest_base=base, samples=amount, tokens=amount)
            if not settings.get("deterministic"):  # so that they are added one by one, in this order
                wait_until(lambda: server.service.intake.pool.memory_bytes == 0)
        wait_until(lambda version=version: server.sync_round == version)
    server.service.stop()
    assert server.service.stores[0]._sums == {}
    return server.service.stores[0].newest.agreement.anchor_hash


KINDS: dict[str, dict[str, Any]] = {
    "equal": {},
    "weighted": {"weight_by": "samples"},
    "bf16 down": {"down_codec": "bf16"},
    "int4 down, at random": {"down_codec": "int4+stochastic"},
    "with a quorum": {"quorum": 3},
    "a torch optimizer": {"outer_optimizer_factory": lambda params: torch.optim.AdamW(params, lr=0.01)},
    "spooled": {"pool_bytes": 1},
}


@pytest.mark.row("F05")
@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_arrival_makes_no_difference(kind: str) -> None:
    some = list(permutations(WORKERS))
    orders = [[some[0], some[0], some[0]], [some[5], some[3], some[1]], [some[2], some[4], some[5]]]
    found = {run(order, deterministic=True, **KINDS[kind]) for order in orders}
    assert len(found) == 1


def test_without_the_mode_it_does() -> None:
    """Sums of three numbers depend on their order: otherwise the test above would show nothing."""
    orders = [[order] for order in permutations(WORKERS)]
    assert len({run(order, down_codec="fp32", norm_screen=0.0) for order in orders}) > 1


def test_nothing_is_added_before_the_round_closes() -> None:
    server = DiLoCoServer(Ledger().state_dict(), 2, port=0, codec="fp32", deterministic=True)
    server.service.start()
    first, second = (HandClient(MemoryTransport(server.service), name) for name in "ab")
    for client in (first, second):
        client.join()
    payload = make_frame({"cells": torch.ones(2)})
    first.contribute(payload)
    assert server.status()["pool_memory_bytes"] == server.status()["pool_held_bytes"] == len(payload)
    assert server.service.stores[0]._sums == {}
    second.contribute(payload)
    wait_until(lambda: server.sync_round == 1)
    assert server.status()["pool_memory_bytes"] == server.status()["pool_held_bytes"] == 0
    server.service.stop()


def test_too_little_room_for_all_contributions_is_said_at_once() -> None:
    settings: dict[str, Any] = {"port": 0, "codec": "fp32", "deterministic": True}
    server = DiLoCoServer(Ledger().state_dict(), 3, pool_bytes=20, spool_bytes=0, **settings)
    with pytest.raises(PlanMismatch, match="3 workers with 8 bytes each need 24, pool_bytes and spool_bytes make 20"):
        HandClient(MemoryTransport(server.service)).join()


def test_too_little_room_is_said_when_a_run_is_resumed_too(tmp_path: Any) -> None:
    settings: dict[str, Any] = {"port": 0, "codec": "fp32", "save_dir": str(tmp_path)}
    server = DiLoCoServer(Ledger().state_dict(), 3, **settings)
    HandClient(MemoryTransport(server.service)).join()
    server.stop()
    with pytest.raises(ConfigError, match="raise spool_bytes"):
        DiLoCoServer(None, 3, deterministic=True, pool_bytes=20, spool_bytes=0, **settings)
