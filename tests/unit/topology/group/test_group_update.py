"""A group takes updates over on every rank: frames handed on (DDP), or the parts that cover a rank's rows (FSDP2)."""

from __future__ import annotations

import copy
import secrets
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amounts import mostly_slow
from outerstep.core.codecs import CODECS
from outerstep.errors import ConfigError
from outerstep.server import DiLoCoServer
from outerstep.topology.group.ranks import Ranks
from outerstep.topology.group.sharded import ShardedTopology, Shards
from outerstep.topology.group.topology import GroupTopology
from outerstep.topology.protocol import Agreed, Contribution, Ticket
from outerstep.topology.server.topology import ServerTopology
from outerstep.types import Join, Manifest, ParameterSpec, Request, Wishes
from outerstep.wire.frames import rows_of
from outerstep.wire.memory import MemoryTransport
from outerstep.wire.transport import Transport
from outerstep.worker import DiLoCoWorker
from outerstep.worker.replica import Replica
from support import EAGER, Eights, assert_same, params_of
from thread_ranks import failures, in_ranks
from unit.topology.one_fragment import OneFragment

SHAPES = {"a": (71, 160), "b": (1, 4), "c": (5000,), "whole": (60, 20)}
SHARDED = frozenset({"a", "b", "c"})
MANIFEST = Manifest(parameters=tuple(ParameterSpec(name=n, shape=s, dtype="float32") for n, s in SHAPES.items()))


def topology_of(transport: Transport, instance: str) -> ServerTopology:
    return ServerTopology(transport, worker_id="group", instance=instance, hostname="test", patience=EAGER)


class TestWhole:
    def run(self, ranks: Ranks, server: OneFragment, steps: int, spoil: int | None = None) -> DiLoCoWorker:
        """A worker of three ranks that hold the same; at step `spoil`, one of them loses a bit of its anchor."""
        with self.build(ranks, server) as worker:
            self.train(worker, range(steps), spoil if ranks.rank == 1 else None)
        return worker

    def build(self, ranks: Ranks, server: OneFragment) -> DiLoCoWorker:
        model = nn.Sequential(nn.Linear(50, 30), nn.Linear(30, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        speaker = topology_of(server, secrets.token_hex(8)) if ranks.rank == 0 else None
        worker = DiLoCoWorker(
            model, optimizer, "none:1", topology=GroupTopology(ranks, speaker), heartbeat_interval=0.0
        )
        worker._ranks = ranks
        return worker

    def train(self, worker: DiLoCoWorker, steps: range, spoil: int | None = None) -> None:
        for step in steps:
            source = torch.Generator().manual_seed(step)
            for param in worker.model.parameters():
                param.grad = torch.randn(param.shape, generator=source)
            if step == spoil:
                worker._replica.anchors["0.weight"][0, 0] += 1.0
            worker.optimizer.step()

    @pytest.mark.parametrize("whose", ["its own", "rank 0's"])
    def test_it_goes_on_from_its_checkpoints(self, whose: str) -> None:
        """Each rank from its own state, or all from rank 0's: here they hold the same."""
        straight, server = self.server("int4+feedback"), self.server("int4+feedback")
        in_ranks(2, lambda ranks: self.run(ranks, straight, 6))
        states: dict[int, dict[str, Any]] = {}

        def job(ranks: Ranks) -> DiLoCoWorker:
            first = self.build(ranks, server).start()
            self.train(first, range(3))
            state = {"model": params_of(first.model), "worker": first.state_dict()}
            ranks.check(lambda: states.update({ranks.rank: copy.deepcopy(state)}))
            first.abandon("killed")
            again = self.build(ranks, server)
            saved = states[ranks.rank if whose == "its own" else 0]
            again.model.load_state_dict(saved["model"])
            again.load_state_dict(saved["worker"])
            again.start()
            self.train(again, range(3, 6))
            again.stop()
            return again

        for worker in in_ranks(2, job):
            assert_same(worker._replica.anchors, straight.theta)
            assert_same(params_of(worker.model), straight.theta)
        assert server.last_sequence == straight.last_sequence == 6

    def test_states_of_different_moments_are_refused_on_every_rank(self) -> None:
        server = self.server()
        heard: list[Request] = []

        def job(ranks: Ranks) -> None:
            worker = self.build(ranks, server).start()
            self.train(worker, range(2))
            state = worker.state_dict()
            worker.abandon("killed")
            again = self.build(ranks, server)
            again.model.load_state_dict(params_of(worker.model))
            if ranks.rank == 0:
                again.load_state_dict(state)
            ranks.check(lambda: setattr(server, "before", heard.append))
            again.start()

        for error in failures(2, job):
            assert isinstance(error, ConfigError)
            assert "states of different moments, or some of them none" in str(error)
        assert not any(isinstance(request, Join) for request in heard)

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

    def __init__(self, ranks: Ranks, transport: Transport) -> None:
        instance = ranks.tell(lambda: secrets.token_hex(8), str)
        self.sections, self.section = ranks.size, ranks.rank
        self.topology = ShardedTopology(
            ranks, topology_of(transport, instance), Shards(self.sections, self.section, SHARDED)
        )
        self.anchors = {name: torch.empty(tensor.shape) for name, tensor in self.cut(some(0)).items()}
        self.topology.join(MANIFEST, Wishes())
        assert self.settle(self.topology.catch_up(0)) is None

    def cut(self, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, tensor in whole.items():
            rows = rows_of(tuple(tensor.shape), self.sections, self.section)
            found[name] = tensor[rows.first_row : rows.first_row + rows.shape[0]] if name in SHARDED else tensor
        return found

    def take(self, ticket: Ticket, agreed: Agreed) -> Agreed | None:
        for name in agreed.update.names:
            flat = self.anchors[name].view(-1)
            half = flat.numel() // 2
            for start, stop in ((0, half), (half, flat.numel())):
                if stop > start:
                    flat[start:stop] = agreed.update.apply(name, start, stop, flat[start:stop])
        return ticket.confirm(agreed, agreed.update.is_proven)

    def contribute(self, whole: dict[str, Tensor]) -> Agreed | None:
        version = self.agreed.version
        ticket = self.topology.begin(Contribution(0, version, version, 1, 0, 0, self.cut(whole)))
        self.ticket = ticket
        mended = self.settle(ticket)
        assert self.agreed.counted
        return mended

    def settle(self, ticket: Ticket) -> Agreed | None:
        while not ticket.look(0.05).done:
            pass
        self.agreed = ticket.finish()
        return self.take(ticket, self.agreed)

    def again(self, ranks: Ranks, transport: Transport, state: dict[str, Any]) -> Rank:
        """Another start of it, which holds the same rows of the anchor; not joined yet."""
        made = Rank.__new__(Rank)
        made.sections, made.section = self.sections, self.section
        made.anchors = {name: anchor.clone() for name, anchor in self.anchors.items()}
        instance = ranks.tell(lambda: secrets.token_hex(8), str)
        made.topology = ShardedTopology(
            ranks, topology_of(transport, instance), Shards(self.sections, self.section, SHARDED)
        )
        made.topology.load_state_dict(state)
        return made


def some(seed: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {name: torch.randint(-9, 10, shape, generator=source).float() for name, shape in SHAPES.items()}


def sharded_server(**settings: Any) -> OneFragment:
    usual = {"codec": "bf16", "down_codec": "int8", "part_size_bytes": 256}
    return OneFragment(some(0), MANIFEST, **{**usual, **settings})


class Closable(MemoryTransport):
    closed = 0

    def close(self) -> None:
        self.closed += 1
        super().close()


class TestSharded:
    def test_every_rank_closes_its_own_way_when_it_leaves(self) -> None:
        settings = {"codec": "bf16", "sync_every": 1, "heartbeat_timeout": 0.0}
        with DiLoCoServer(some(0), num_workers=1, port=0, **settings) as server:

            def job(ranks: Ranks) -> int:
                transport = Closable(server.service)
                Rank(ranks, transport).topology.leave("done")
                return transport.closed

            assert in_ranks(2, job) == [1, 1]
            assert not server.service.coordinator.members.live_ids

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
                assert rank.agreed.update.kinds == ("update",)
                received += rank.agreed.bytes_received
            return received

        received = in_ranks(size, job)
        assert all(0 < one < 3 * server.form.update.size_bytes for one in received)
        asked = [poll for poll in server.polls if poll.held_hash is not None]
        assert asked
        assert all(poll.held_hash == server.hashes[poll.held] for poll in asked)

    def test_so_it_is_with_a_real_server(self) -> None:
        state = some(0)
        settings = {"codec": "int4", "part_size_bytes": 256, "sync_every": 1, "heartbeat_timeout": 0.0}
        with DiLoCoServer(state, num_workers=1, port=0, **settings) as server:

            def job(ranks: Ranks) -> list[tuple[str, ...]]:
                rank, kinds = Rank(ranks, MemoryTransport(server.service)), []
                for i in range(3):
                    assert rank.contribute(some(i)) is None
                    kinds.append(rank.agreed.update.kinds)
                    ranks.check(lambda: assert_same(rank.anchors, rank.cut(server.get_global_params())))
                return kinds

            assert in_ranks(2, job) == [[("update",)] * 3] * 2

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
                agreed = ticket.finish()
                assert rank.take(ticket, agreed) is None
                ranks.check(lambda: assert_same(rank.anchors, rank.cut(server.theta)))
                lengths.append(len(agreed.update.kinds))
                ticket = ticket.resume()
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
            assert whole.update.kinds == ("full",)
            assert rank.take(rank.ticket, whole) is None
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
            assert rank.agreed.update.kinds == ("full",)

        in_ranks(2, job)

    @pytest.mark.parametrize("size", mostly_slow([2, 3], [2]))
    @pytest.mark.parametrize("arrived", [False, True])
    def test_a_restart_carries_on_with_its_rows(
        self, size: int, arrived: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each owner owes for its rows, together the same as one process would, on whole numbers; what was under way is
        sent again from every rank, and counts once."""
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
            ticket = rank.topology.begin(Contribution(0, version, version, 1, 0, 0, rank.cut(some(3))))
            while arrived and not ticket.look(0.05).done:
                pass
            ticket.cancel()
            state, packed = rank.topology.state_dict([0]), ticket.pack()
            again = rank.again(ranks, server, state)
            assert not again.topology.join(MANIFEST, Wishes()).overtaken
            again.settle(again.topology.reopen(0, packed))
            ranks.check(lambda: assert_same(again.anchors, again.cut(server.theta)))
            again.settle(again.topology.catch_up(0))
            assert again.agreed.update.kinds == ()
            assert not again.agreed.counted
            found = {name: again.topology._inner._feedback.residual(name) for name in SHAPES}
            return {name: e for name, e in found.items() if e is not None}

        residuals = in_ranks(size, job)
        assert len(server.applied) == server.last_sequence == 4
        for name in SHAPES:
            applied = sum((one[name] for one in server.applied), torch.zeros(SHAPES[name]))
            e = torch.cat([found[name].view(-1) for found in residuals if name in found])
            assert torch.equal(applied.view(-1) + e, total[name].view(-1)), name

    def test_a_state_that_was_overtaken_owes_nothing_on_any_rank(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(CODECS, "eights", Eights())
        server = sharded_server(codec="eights+feedback", down_codec="fp32")

        def job(ranks: Ranks) -> None:
            rank = Rank(ranks, server)
            assert rank.contribute(some(1)) is None
            state = rank.topology.state_dict([])
            assert rank.contribute(some(2)) is None
            again = rank.again(ranks, server, state)
            assert again.topology.join(MANIFEST, Wishes()).overtaken == {0}
            again.settle(again.topology.catch_up(0))
            assert again.agreed.counted
            ranks.check(lambda: assert_same(again.anchors, again.cut(server.theta)))
            assert not again.topology._inner._feedback._residuals

        in_ranks(2, job)
