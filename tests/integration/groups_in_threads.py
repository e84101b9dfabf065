"""Groups against a real server in memory, with threads for ranks."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from outerstep.server import DiLoCoServer
from outerstep.topology.group.ranks import Ranks
from outerstep.topology.group.sharded import ShardedTopology, Shards
from outerstep.topology.group.topology import GroupTopology
from outerstep.topology.protocol import Agreed, Contribution, Ticket, Topology, anchors_of
from outerstep.topology.server.topology import ServerTopology
from outerstep.types import Answer, Manifest, ParameterSpec, Request, Wishes
from outerstep.wire.frames import rows_of
from outerstep.wire.memory import MemoryTransport
from support import EAGER, memory_topology

SHAPES = {"a": (71, 16), "b": (1, 4), "c": (5,), "whole": (6, 2)}
Meddle = Callable[[int, Request], None]
SHARDED = frozenset({"a", "b", "c"})
MANIFEST = Manifest(parameters=tuple(ParameterSpec(name=n, shape=s, dtype="float32") for n, s in SHAPES.items()))


def make_server(**settings: Any) -> DiLoCoServer:
    source = torch.Generator().manual_seed(0)
    state = {name: torch.randn(shape, generator=source) for name, shape in SHAPES.items()}
    usual = {"num_workers": 1, "port": 0, "part_size_bytes": 64, "codec": "fp32", "sync_every": 1}
    return DiLoCoServer(state, **{**usual, "heartbeat_timeout": 0.0, **settings})


class Wire(MemoryTransport):
    """A transport that tells the test what passes, and does to it what the test wants."""

    def __init__(self, server: DiLoCoServer, rank: int, meddle: Meddle) -> None:
        super().__init__(server.service)
        self._rank, self._meddle = rank, meddle

    def call(self, request: Request, **extra: Any) -> Answer:
        self._meddle(self._rank, request)
        return super().call(request, **extra)


def sharded(
    server: DiLoCoServer,
    ranks: Ranks,
    *,
    section: int | None = None,
    sections: int | None = None,
    meddle: Meddle = lambda rank, request: None,
) -> ShardedTopology:
    """This rank of a group that shards a, b and c by rows, and holds `whole` whole."""
    instance = ranks.tell(lambda: secrets.token_hex(8), str)
    inner = ServerTopology(
        Wire(server, ranks.rank, meddle), worker_id="group", instance=instance, hostname="test", patience=EAGER
    )
    shards = Shards(sections or ranks.size, ranks.rank if section is None else section, SHARDED)
    return ShardedTopology(ranks, inner, shards)


def whole(server: DiLoCoServer, ranks: Ranks, *, meddle: Meddle = lambda rank, request: None) -> GroupTopology:
    """This rank of a group that holds everything on every rank."""
    speaker = memory_topology(server, "group", Wire(server, 0, meddle)) if ranks.rank == 0 else None
    return GroupTopology(ranks, speaker)


def rows_here(whole: dict[str, Tensor], sections: int, section: int) -> dict[str, Tensor]:
    found = {}
    for name, tensor in whole.items():
        rows = rows_of(tuple(tensor.shape), sections, section)
        found[name] = tensor[rows.first_row : rows.first_row + rows.shape[0]] if name in SHARDED else tensor
    return found


def contribution(agreed: Agreed, seed: int, sections: int, section: int, **facts: Any) -> Contribution:
    source = torch.Generator().manual_seed(seed)
    whole = {name: torch.randn(shape, generator=source) for name, shape in SHAPES.items()}
    whole = {name: whole[name] for name in agreed.plan.fragments[agreed.fragment]}
    amounts = {"steps": 1, "samples": 0, "tokens": 0, **facts}
    deltas = rows_here(whole, sections, section)
    return Contribution(agreed.fragment, agreed.version, agreed.version, deltas=deltas, **amounts)


def enter(topology: Topology) -> list[Agreed]:
    """Join; the anchors to begin with."""
    return [agreed for _, agreed in anchors_of(topology, topology.join(MANIFEST, Wishes()))]


def finish(ticket: Ticket) -> Agreed:
    while not ticket.look(0.05).done:
        pass
    return ticket.finish()


def take_over(agreed: Agreed) -> bool:
    """As a worker does, without the worker: ask for everything once, and see whether it was as agreed."""
    for name in agreed.update.names:
        agreed.update.apply(name, 0, SHAPES[name][0] * 1000, torch.empty(0))
    return agreed.update.is_proven


def assert_rows(agreed: Agreed, server: DiLoCoServer, sections: int, section: int) -> None:
    newest = server.get_global_params()
    expected = rows_here({name: newest[name] for name in agreed.anchor}, sections, section)
    for name, theta in agreed.anchor.items():
        assert torch.equal(theta, expected[name]), name
