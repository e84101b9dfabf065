"""Peers in one process, with real decisions and real tensors between them."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from outerstep import DiLoCoWorker
from outerstep.config import WorkerConfig
from outerstep.peer import Node, NodeSettings
from outerstep.server import DiLoCoServer
from outerstep.topology.news import anchor_hash
from outerstep.worker import connect
from support import in_threads, memory_worker, params_of, tiny_model, train_steps

SYNC_EVERY = 3
PATIENCE_S = 240.0  # for a busy machine


class Around:
    """Whoever is called "a" founds; the others join through it. Their nodes are real ones, on the loopback."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self._founded = threading.Event()
        self._place = ""

    def make_node(self, config: WorkerConfig, peer_id: str) -> Node:
        if peer_id != "a":
            assert self._founded.wait(60)
        settings = NodeSettings(
            peer_id=peer_id,
            listen="127.0.0.1:0",
            join=(self._place,) if peer_id != "a" else (),
            insecure=True,
            beat_every_s=0.5,
        )
        node = self.nodes[peer_id] = Node(settings)
        if peer_id == "a":
            self._place = node.join_string
            self._founded.set()
        return node

    def close(self) -> None:
        for node in self.nodes.values():
            node.stop()


@pytest.fixture
def around(monkeypatch: pytest.MonkeyPatch) -> Iterator[Around]:
    found = Around()
    monkeypatch.setattr(connect, "make_node", found.make_node)
    yield found
    found.close()


def make_worker(peer_id: str, model: nn.Module | None = None, **settings: Any) -> DiLoCoWorker:
    model = tiny_model(ord(peer_id[0])) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if peer_id == "a":
        settings = {"sync_every": SYNC_EVERY, "codec": "fp32", **settings}
    return DiLoCoWorker(
        model, optimizer, "gossip", worker_id=peer_id, handle_signals=False, exit_patience_s=5.0, **settings
    )


def hash_of(worker: DiLoCoWorker) -> str:
    return anchor_hash(worker._replica.anchors[name] for names in worker.plan.fragments for name in names)


def run(
    peer_id: str, rounds: int, *, tell: Callable[[DiLoCoWorker], None] = lambda worker: None, **settings: Any
) -> list[str]:
    """Train so many rounds; the anchor's hash after each."""
    hashes = []
    with make_worker(peer_id, **settings) as worker:
        tell(worker)
        for number in range(rounds):
            train_steps(worker.model, worker.optimizer, SYNC_EVERY, seed=100 * ord(peer_id[0]) + number)
            hashes.append(hash_of(worker))
    return hashes


def together(ids: str, rounds: int, **settings: Any) -> list[list[str]]:
    """All of them, in every round."""
    first = {"min_peers": len(ids), **settings}
    return in_threads(*(lambda p=p: run(p, rounds, **(first if p == "a" else {})) for p in ids), timeout_s=PATIENCE_S)


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int4+feedback", "sparse64", "int8+stochastic"])
def test_all_peers_hold_the_same_bits_after_every_round(around: Around, codec: str) -> None:
    found = together("abc", 3, codec=codec)
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == 3


@pytest.mark.parametrize(
    ("rule", "peers"),
    [
        ("trimmed_mean", 4),
        ("median", 4),
        ("krum", 5),
        ("multi_krum", 5),
        ("geometric_median", 4),
        ("centered_clipping", 4),
    ],
)
def test_each_rule_agrees_on_all_peers_with_an_attacker_among_them(around: Around, rule: str, peers: int) -> None:
    ids = "abcdef"[:peers]
    monstrous = threading.Event()

    def attack(data: memoryview) -> memoryview:
        """Δ·1000: in fp32 the values lie behind the header as they are."""
        copy = memoryview(bytearray(data))
        (length,) = struct.unpack_from("<I", data, 4)
        torch.frombuffer(copy, dtype=torch.float32, offset=8 + length).mul_(1000.0)
        monstrous.set()
        return copy

    def corrupt(worker: DiLoCoWorker) -> None:
        node = around.nodes[ids[-1]]
        offer = node.offer
        node.offer = lambda fragment, data, **facts: offer(fragment, attack(data), **facts)  # type: ignore[method-assign]

    jobs = [lambda p=p: run(p, 2, **({"aggregation": rule, "min_peers": peers} if p == "a" else {})) for p in ids[:-1]]
    found = in_threads(*jobs, lambda: run(ids[-1], 2, tell=corrupt), timeout_s=PATIENCE_S)
    assert monstrous.is_set()
    assert all(hashes == found[0] for hashes in found)


def by_a_server(rounds: int, peers: str, **settings: Any) -> dict[str, torch.Tensor]:
    """The same training with a server, which adds in the order of the workers' names."""
    server = DiLoCoServer(
        dict(tiny_model(ord("a")).state_dict()), len(peers), port=0, sync_every=SYNC_EVERY, codec="fp32",
        deterministic=True, **settings,
    )  # fmt: skip
    server.service.start()

    def work(peer_id: str) -> None:
        model = tiny_model(ord("a"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with memory_worker(server, peer_id, model, optimizer):
            for number in range(rounds):
                train_steps(model, optimizer, SYNC_EVERY, seed=100 * ord(peer_id) + number)

    in_threads(*(lambda p=p: work(p) for p in peers), timeout_s=PATIENCE_S)
    return server.get_global_params()


@pytest.mark.parametrize("outer", [{}, {"outer_lr": 0.3, "outer_momentum": 0.7, "nesterov": False}])
def test_the_mean_of_all_has_the_bits_of_a_deterministic_server(around: Around, outer: dict[str, Any]) -> None:
    models = {p: tiny_model(ord("a")) for p in "abc"}
    first = {"min_peers": 3, **outer}
    in_threads(
        *(lambda p=p: run(p, 4, model=models[p], **(first if p == "a" else {})) for p in "abc"), timeout_s=PATIENCE_S
    )
    expected = by_a_server(4, "abc", **outer)
    for model in models.values():
        for name, value in params_of(model).items():
            assert torch.equal(value, expected[name]), name
