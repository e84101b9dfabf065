"""A group takes updates over on every rank: frames handed on (DDP), or the parts that cover a rank's rows (FSDP2)."""

from __future__ import annotations

import secrets
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outerstep.core.codecs import CODECS
from outerstep.topology import Agreed, Contribution
from outerstep.topology.group import GroupTopology
from outerstep.topology.ranks import Ranks
from outerstep.topology.server import ServerTopology
from outerstep.topology.sharded import ShardedTopology, Shards
from outerstep.types import Manifest, ParameterSpec, Wishes
from outerstep.wire.sections import rows_of
from outerstep.worker import DiLoCoWorker
from outerstep.worker.replica import Replica
from support import EAGER, Eights, assert_same, params_of
from thread_ranks import in_ranks
from unit.topology.one_fragment import OneFragment

SHAPES = {"a": (71, 160), "b": (1, 4), "c": (5000,), "whole": (60, 20)}
SHARDED = frozenset({"a", "b", "c"})
MANIFEST = Manifest(parameters=tuple(ParameterSpec(name=n, shape=s, dtype="float32") for n, s in SHAPES.items()))


def topology_of(server: OneFragment, instance: str) -> ServerTopology:
    return ServerTopology(server, worker_id="group", instance=instance, hostname="test", patience=EAGER)


class TestWhole:
    def run(self, ranks: Ranks, server: OneFragment, steps: int, spoil: int | None = None) -> DiLoCoWorker:
        """A worker of three ranks that hold the same; at step `spoil`, one of them loses a bit of its anchor."""
        model = nn.Sequential(nn.Linear(50, 30), nn.Linear(30, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        speaker = topology_of(server, secrets.token_hex(8)) if ranks.rank == 0 else None
        worker = DiLoCoWorker(
            model, optimizer, "none:1", topology=GroupTopology(ranks, speaker), heartbeat_interval=0.0
        )
        with worker:
            source = torch.Generator().manual_seed(1)
            for step in range(steps):
                for param in model.parameters():
                    param.grad = torch.randn(param.shape, generator=source)
                if step == spoil and ranks.rank == 1:
                    worker._replica.anchors["0.weight"][0, 0] += 1.0
                optimizer.step()
        return worker

    def server(self, codec: str = "bf16") -> OneFragment:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(50, 30), nn.Linear(30, 3))
        return OneFragment(params_of(model), Replica(model).manifest, codec=codec, down_codec="int8")

    def test_rank_0_hands_the_updates_on(self) -> None:
        server = self.server()
        workers = in_ranks(3, lambda ranks: self.run(ranks, server, 4))
        for worker in workers:
            assert_same(worker._replica.anchors, server.theta)
            assert_same(params_of(worker.model), server.theta)
        assert [poll.held_hash for poll in server.polls] == [None, *(server.hashes[i] for i in range(4))]
        assert [w.sync_metrics["bytes_received"] > 0 for w in workers] == [True, False, False]

    def test_what_one_rank_has_lost_is_mended_on_all(self) -> None:
        server = self.server()
        workers = in_ranks(3, lambda ranks: self.run(ranks, server, 4, spoil=2))
        for worker in workers:
            assert_same(worker._replica.anchors, server.theta)
            assert worker.sync_metrics["anchor_repairs"] == 1

    def test_only_rank_0_owes_anything(self) -> None:
        server = self.server("int4+feedback")
        states = [worker.state_dict() for worker in in_ranks(2, lambda ranks: self.run(ranks, server, 3))]
        assert set(states[0]["topology"]["feedback"]["residuals"]) == set(server.theta)
        assert states[1]["topology"] == {}


class Rank:
    """One rank of a sharded group, with its rows of the anchor; without a model."""

    def __init__(self, ranks: Ranks, server: OneFragment) -> None:
        instance = ranks.tell(lambda: secrets.token_hex(8), str)
        self.sections, self.section = ranks.size, ranks.rank
        self.topology = ShardedTopology(
            ranks, topology_of(server, instance), Shards(self.sections, self.section, SHARDED)
        )
        self.anchors = {name: torch.empty(tensor.shape) for name, tensor in self.cut(server.theta).items()}
        self.agreed = self.topology.join(MANIFEST, Wishes()).anchors[0]
        assert self.take(self.agreed) is None

    def cut(self, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, tensor in whole.items():
            rows = rows_of(tuple(tensor.shape), self.sections, self.section)
            found[name] = tensor[rows.first_row : rows.first_row + rows.shape[0]] if name in SHARDED else tensor
        return found

    def take(self, agreed: Agreed) -> Agreed | None:
        for name in agreed.news.names:
            flat = self.anchors[name].view(-1)
            half = flat.numel() // 2
            for start, stop in ((0, half), (half, flat.numel())):
                if stop > start:
                    flat[start:stop] = agreed.news.theta(name, start, stop, flat[start:stop])
        return self.topology.confirm(agreed, agreed.news.is_proven)

    def contribute(self, whole: dict[str, Tensor]) -> Agreed | None:
        version = self.agreed.version
        ticket = self.topology.begin(Contribution(0, version, version, 1, 0, 0, self.cut(whole)))
        while not ticket.look(0.05).done:
            pass
        self.agreed = self.topology.finish(ticket)
        assert self.agreed.counted
        return self.take(self.agreed)


def some(seed: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {name: torch.randint(-9, 10, shape, generator=source).float() for name, shape in SHAPES.items()}


def sharded_server(**settings: Any) -> OneFragment:
    usual = {"codec": "bf16", "down_codec": "int8", "part_size_bytes": 256}
    return OneFragment(some(0), MANIFEST, **{**usual, **settings})


class TestSharded:
    @pytest.mark.parametrize("size", [2, 3])
    @pytest.mark.parametrize("down_codec", ["int8", "int4", "bf16"])
    def test_each_rank_fetches_the_blocks_that_cover_its_rows(self, size: int, down_codec: str) -> None:
        server = sharded_server(down_codec=down_codec)

        def job(ranks: Ranks) -> int:
            rank = Rank(ranks, server)
            received = 0
            for i in range(3):
                assert rank.contribute(some(i)) is None
                ranks.check(lambda: assert_same(rank.anchors, rank.cut(server.theta)))
                assert rank.agreed.news.kinds == ("update",)
                received += rank.agreed.bytes_received
            return received

        received = in_ranks(size, job)
        assert all(0 < one < 3 * server.form.update.size_bytes for one in received)
        asked = [poll for poll in server.polls if poll.held_hash is not None]
        assert asked
        assert all(poll.held_hash == server.hashes[poll.held] for poll in asked)

    def test_a_chain_and_a_chain_of_nothing(self) -> None:
        server = sharded_server(down_codec="int4")

        def payloads(poll: Any) -> list[tuple[str, int]]:
            while server.version < 2:  # ours, and one more
                server.move(some(7))
            return server.as_agreed(poll)

        def job(ranks: Ranks) -> list[int]:
            rank = Rank(ranks, server)
            server.payloads = payloads
            ticket = rank.topology.begin(Contribution(0, 0, 0, 1, 0, 0, rank.cut(some(1))))
            lengths = []
            for _ in range(2):
                while not ticket.look(0.05).done:
                    pass
                agreed = rank.topology.finish(ticket)
                assert rank.take(agreed) is None
                ranks.check(lambda: assert_same(rank.anchors, rank.cut(server.theta)))
                lengths.append(len(agreed.news.kinds))
                ticket = rank.topology.resume(ticket)
            ticket.cancel()
            return lengths

        assert in_ranks(2, job) == [[2, 0]] * 2

    def test_what_one_rank_has_lost_is_mended_on_all(self) -> None:
        server = sharded_server()

        def job(ranks: Ranks) -> None:
            rank = Rank(ranks, server)
            if ranks.rank == 1:
                rank.anchors["a"][3, 3] += 1.0
            whole = rank.contribute(some(1))
            assert whole is not None
            assert whole.news.kinds == ("full",)
            assert rank.take(whole) is None
            ranks.check(lambda: assert_same(rank.anchors, rank.cut(server.theta)))

        in_ranks(2, job)

    def test_a_chain_from_elsewhere_is_not_applied(self) -> None:
        server = sharded_server()

        def payloads(poll: Any) -> list[tuple[str, int]]:
            return server.as_agreed(poll) if poll.held_hash is None else []

        def job(ranks: Ranks) -> None:
            rank = Rank(ranks, server)
            server.payloads = payloads
            assert rank.contribute(some(1)) is None
            ranks.check(lambda: assert_same(rank.anchors, rank.cut(server.theta)))
            assert rank.agreed.news.kinds == ("full",)

        in_ranks(2, job)

    def test_each_owner_owes_for_its_rows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Together the same as one process would, on whole numbers; and a restart finds out what became of the last."""
        monkeypatch.setitem(CODECS, "eights", Eights())
        server = sharded_server(codec="eights+feedback", down_codec="fp32")
        total = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        for i in range(4):
            for name, delta in some(i).items():
                total[name] += delta

        def job(ranks: Ranks) -> dict[str, Tensor]:
            rank = Rank(ranks, server)
            for i in range(3):
                assert rank.contribute(some(i)) is None
            version = rank.agreed.version
            rank.topology.begin(Contribution(0, version, version, 1, 0, 0, rank.cut(some(3)))).cancel()
            state = rank.topology.state_dict({0: rank.cut(some(3))})
            ranks.check(lambda: None)
            again = Rank.__new__(Rank)
            again.sections, again.section = rank.sections, rank.section
            instance = ranks.tell(lambda: secrets.token_hex(8), str)
            inner = topology_of(server, instance)
            again.topology = ShardedTopology(ranks, inner, Shards(ranks.size, ranks.rank, SHARDED))
            again.topology.load_state_dict(state)
            again.topology.join(MANIFEST, Wishes())
            found = {name: inner._feedback.residual(name) for name in SHAPES}
            return {name: e for name, e in found.items() if e is not None}

        residuals = in_ranks(2, job)
        for name in SHAPES:
            applied = sum((one[name] for one in server.applied), torch.zeros(SHAPES[name]))
            e = torch.cat([found[name].view(-1) for found in residuals if name in found])
            assert torch.equal(applied.view(-1) + e, total[name].view(-1)), name
