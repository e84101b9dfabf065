"""Groups against a real server in memory, with threads for ranks: what they exchange, and what if one of them fails."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from outerstep.config import WorkerConfig
from outerstep.core.manifest import describe
from outerstep.digest import data_hash
from outerstep.errors import (
    BadRequest,
    ConfigError,
    ExchangeFailed,
    Kicked,
    ManifestMismatch,
    ModelError,
    NotFinite,
    RoundStuck,
    StaleRound,
    TooLarge,
    TransportError,
    WorkerError,
)
from outerstep.server import DiLoCoServer
from outerstep.topology import Agreed, Contribution, Joined, Sight, Ticket, Topology
from outerstep.topology.group import GroupTopology
from outerstep.topology.ranks import Ranks, rebuild
from outerstep.topology.ranks import describe as describe_error
from outerstep.topology.server import ServerTopology
from outerstep.topology.sharded import ShardedTopology, Shards
from outerstep.types import Agreement, Answer, GetPart, Manifest, Offer, ParameterSpec, PutPart, Request, Wishes
from outerstep.wire.memory import MemoryTransport
from outerstep.wire.sections import rows_of
from outerstep.worker.connect import find_ranks
from support import EAGER, HandClient, memory_topology, tiny_model, wait_until
from thread_ranks import failures, in_ranks

SHAPES = {"a": (71, 16), "b": (1, 4), "c": (5,), "whole": (6, 2)}
Meddle = Callable[[int, Request], None]
SHARDED = frozenset({"a", "b", "c"})
MANIFEST = Manifest(parameters=tuple(ParameterSpec(name=n, shape=s, dtype="float32") for n, s in SHAPES.items()))


@pytest.fixture
def server() -> Iterator[DiLoCoServer]:
    with make_server() as made:
        yield made


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


def finish(topology: Topology, ticket: Ticket) -> Agreed:
    while not ticket.look(0.05).done:
        pass
    return topology.finish(ticket)


def take_over(agreed: Agreed) -> bool:
    """As a worker does, without the worker: ask for everything once, and see whether it was as agreed."""
    for name in agreed.news.names:
        agreed.news.theta(name, 0, SHAPES[name][0] * 1000, torch.empty(0))
    return agreed.news.is_proven


def assert_rows(agreed: Agreed, server: DiLoCoServer, sections: int, section: int) -> None:
    newest = server.get_global_params()
    expected = rows_here({name: newest[name] for name in agreed.anchor}, sections, section)
    for name, theta in agreed.anchor.items():
        assert torch.equal(theta, expected[name]), name


class TestSharded:
    @pytest.mark.parametrize("size", [2, 3, 8])
    def test_every_rank_holds_its_rows_of_the_servers_model_bit_for_bit(self, size: int) -> None:
        with make_server(num_fragments=2, sync_every=2) as server:

            def job(ranks: Ranks) -> None:
                topology = sharded(server, ranks)
                anchors = list(topology.join(MANIFEST, Wishes()).anchors)
                for seed in range(3):
                    for fragment in range(2):
                        assert_rows(anchors[fragment], server, size, ranks.rank)
                        sent = contribution(anchors[fragment], seed, size, ranks.rank)
                        anchors[fragment] = finish(topology, topology.begin(sent))
                        assert anchors[fragment].counted
                        assert anchors[fragment].version == seed + 1
                for agreed in anchors:
                    assert_rows(agreed, server, size, ranks.rank)
                topology.leave("done")

            in_ranks(size, job)
            assert server.sync_round == 3

    def test_it_moves_the_model_as_one_process_would(self, server: DiLoCoServer) -> None:
        with make_server() as alone:
            plain = memory_topology(alone, "plain")
            agreed = plain.join(MANIFEST, Wishes()).anchors[0]
            for seed in range(2):
                agreed = finish(plain, plain.begin(contribution(agreed, seed, 1, 0)))

            def job(ranks: Ranks) -> None:
                topology = sharded(server, ranks)
                mine = topology.join(MANIFEST, Wishes()).anchors[0]
                for seed in range(2):
                    mine = finish(topology, topology.begin(contribution(mine, seed, 3, ranks.rank)))
                assert mine.anchor_hash == agreed.anchor_hash

            in_ranks(3, job)

    def test_nobody_fetches_or_sends_the_whole_model(self, server: DiLoCoServer) -> None:
        def job(ranks: Ranks) -> tuple[int, int]:
            topology = sharded(server, ranks)
            anchor = topology.join(MANIFEST, Wishes()).anchors[0]
            agreed = finish(topology, topology.begin(contribution(anchor, 1, 4, ranks.rank)))
            return agreed.bytes_sent, agreed.bytes_received

        whole = 4 * sum(torch.Size(shape).numel() for shape in SHAPES.values())
        held_whole = 4 * torch.Size(SHAPES["whole"]).numel()
        for rank, (sent, received) in enumerate(in_ranks(4, job)):
            share = 4 * sum(rows_of(SHAPES[name], 4, rank).numel for name in SHARDED)
            share_sent = share + 4 * rows_of(SHAPES["whole"], 4, rank).numel
            header = 64 * 4
            assert share_sent <= sent <= share_sent + header + 8 * len(SHAPES)
            # A part has 64 bytes, and each of the tensors may begin and end within one.
            assert share + held_whole <= received <= share + held_whole + 2 * 64 * len(SHAPES)
            assert received < whole / 2

    def test_ranks_that_hold_the_same_rows_send_them_once(self, server: DiLoCoServer) -> None:
        def job(ranks: Ranks) -> int:
            section = ranks.rank % 2
            topology = sharded(server, ranks, section=section, sections=2)
            anchor = topology.join(MANIFEST, Wishes()).anchors[0]
            sent = contribution(anchor, 1, 2, section, samples=10 + ranks.rank)
            agreed = finish(topology, topology.begin(sent))
            assert_rows(agreed, server, 2, section)
            return agreed.bytes_sent

        sent = in_ranks(4, job)
        assert all(sent[:2])
        assert sent[2:] == [0, 0]

    def test_samples_and_tokens_are_everybodys(self, server: DiLoCoServer) -> None:
        offered: set[tuple[int, int]] = set()

        def meddle(rank: int, request: Request) -> None:
            if isinstance(request, Offer):
                offered.add((request.samples, request.tokens))

        def job(ranks: Ranks, make: Callable[..., Topology]) -> None:
            topology = make(server, ranks, meddle=meddle)
            anchor = topology.join(MANIFEST, Wishes()).anchors[0]
            sections = 2 if make is sharded else 1
            facts = {"samples": 8 * (ranks.rank + 1), "tokens": 100}
            finish(topology, topology.begin(contribution(anchor, 1, sections, ranks.rank % sections, **facts)))

        for make in (sharded, whole):
            in_ranks(2, partial(job, make=make))
            assert offered == {(24, 200)}
            offered.clear()

    def test_parts_that_the_server_lost_are_sent_again_by_whoever_has_them(self) -> None:
        with make_server(heartbeat_timeout=5.0) as server:
            once = threading.Lock()

            def rank_1_is_done() -> bool:
                (upload,) = server.service.coordinator.uploads.of_worker("group")
                return upload.part_hashes.keys() >= set(upload.parts.of_section(1))

            def meddle(rank: int, request: Request) -> None:
                """When rank 1 has sent everything and rank 0 has not, the worker is declared dead."""
                if rank == 0 and isinstance(request, PutPart) and once.acquire(blocking=False):
                    wait_until(rank_1_is_done)
                    server.service.tick(server.service.clock() + 100.0)

            def job(ranks: Ranks) -> Agreed:
                topology = sharded(server, ranks, meddle=meddle)
                anchor = topology.join(MANIFEST, Wishes()).anchors[0]
                agreed = finish(topology, topology.begin(contribution(anchor, 1, 2, ranks.rank)))
                assert_rows(agreed, server, 2, ranks.rank)
                return agreed

            for agreed in in_ranks(2, job):
                assert agreed.counted
                assert agreed.version == 1
            assert server.status()["total_worker_deaths"] == 1
            assert server.status()["total_submissions"] == 1

    def test_if_the_version_is_replaced_while_one_rank_fetches_all_take_the_newest(self) -> None:
        with make_server(async_mode=True) as server:
            other = memory_topology(server, "other")
            theirs = other.join(MANIFEST, Wishes()).anchors[0]
            once, moved_on = threading.Lock(), threading.Event()

            def move_on() -> None:
                agreed = theirs
                for seed in range(4):
                    agreed = finish(other, other.begin(contribution(agreed, seed, 1, 0)))
                for store in server.service.stores:  # nobody has asked for a part for so long
                    store.down.forget_old(server.service.clock() + 1000.0)
                moved_on.set()

            def meddle(rank: int, request: Request) -> None:
                if rank == 1 and isinstance(request, GetPart) and request.version == 1:
                    if once.acquire(blocking=False):
                        move_on()
                    moved_on.wait(30)

            def job(ranks: Ranks) -> Agreed:
                topology = sharded(server, ranks, meddle=meddle)
                anchor = topology.join(MANIFEST, Wishes()).anchors[0]
                agreed = finish(topology, topology.begin(contribution(anchor, 1, 2, ranks.rank)))
                assert_rows(agreed, server, 2, ranks.rank)
                return agreed

            assert [agreed.version for agreed in in_ranks(2, job)] == [5, 5]
            assert moved_on.is_set()

    def test_a_round_that_closed_without_the_group_is_known_to_all_ranks(self) -> None:
        with make_server(num_workers=2, round_deadline_s=0.01, min_workers=1) as server:
            other = memory_topology(server, "other")

            def job(ranks: Ranks) -> Agreed:
                topology = sharded(server, ranks)
                anchor = topology.join(MANIFEST, Wishes()).anchors[0]
                if ranks.rank == 0:
                    theirs = other.join(MANIFEST, Wishes()).anchors[0]
                    finish(other, other.begin(contribution(theirs, 5, 1, 0)))
                agreed = finish(topology, topology.begin(contribution(anchor, 1, 2, ranks.rank)))
                assert_rows(agreed, server, 2, ranks.rank)
                return agreed

            assert [(a.version, a.counted) for a in in_ranks(2, job)] == [(1, False), (1, False)]


class TestFailures:
    def test_a_rank_whose_rows_are_not_finite_stops_all(self, server: DiLoCoServer) -> None:
        def job(ranks: Ranks) -> None:
            topology = sharded(server, ranks)
            anchor = topology.join(MANIFEST, Wishes()).anchors[0]
            sent = contribution(anchor, 1, 2, ranks.rank)
            if ranks.rank == 1:
                sent.deltas["a"][0] = float("inf")
            finish(topology, topology.begin(sent))

        for error in failures(2, job):
            assert isinstance(error, ExchangeFailed)
            assert isinstance(error.__cause__, NotFinite)
            assert "'a' holds NaN or Inf in section 1 of 2" in str(error)

    def test_what_the_server_refuses_one_rank_all_hear_of(self, server: DiLoCoServer) -> None:
        def meddle(rank: int, request: Request) -> None:
            if rank == 2 and isinstance(request, PutPart):
                raise Kicked("an operator removed it")

        def job(ranks: Ranks) -> None:
            topology = sharded(server, ranks, meddle=meddle)
            anchor = topology.join(MANIFEST, Wishes()).anchors[0]
            finish(topology, topology.begin(contribution(anchor, 1, 3, ranks.rank)))

        found = failures(3, job)
        assert [type(error.__cause__) for error in found] == [Kicked] * 3
        assert len({str(error) for error in found}) == 1

    def test_an_exchange_that_failed_for_one_rank_is_carried_on_by_all(self, server: DiLoCoServer) -> None:
        down = threading.Event()
        down.set()

        def meddle(rank: int, request: Request) -> None:
            if rank == 1 and isinstance(request, PutPart) and down.is_set():
                raise RuntimeError("a bug")

        def job(ranks: Ranks) -> Agreed:
            topology = sharded(server, ranks, meddle=meddle)
            anchor = topology.join(MANIFEST, Wishes()).anchors[0]
            ticket: Ticket = topology.begin(contribution(anchor, 1, 2, ranks.rank))
            with pytest.raises(ExchangeFailed, match="a bug"):
                finish(topology, ticket)
            down.clear()
            assert ticket.look(0.0).done
            assert ticket.failed
            return finish(topology, topology.resume(ticket))

        for agreed in in_ranks(2, job):
            assert agreed.counted
        assert server.status()["total_submissions"] == 1

    def test_a_byte_that_changed_at_one_rank_is_found_by_its_range_hash_and_mended_on_all(
        self, server: DiLoCoServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fetch, damages = ShardedTopology._fetch, [1]

        def damaged(topology: ShardedTopology, agreement: Agreement) -> Any:
            fetched: Any = fetch(topology, agreement)
            if topology._shards.section == 1 and damages:
                fetched.news._values["a"][0, 0] += damages.pop()
            return fetched

        def job(ranks: Ranks) -> list[bool]:
            topology = sharded(server, ranks)
            agreed = topology.join(MANIFEST, Wishes()).anchors[0]
            first = take_over(agreed)
            whole = topology.confirm(agreed, first)
            assert whole is not None
            assert_rows(whole, server, 2, ranks.rank)
            second = take_over(whole)
            assert topology.confirm(whole, second) is None
            return [first, second]

        monkeypatch.setattr(ShardedTopology, "_fetch", damaged)
        assert in_ranks(2, job) == [[True, True], [False, True]]

    def test_a_refusal_at_join_is_said_by_all_ranks_as_the_server_said_it(self, server: DiLoCoServer) -> None:
        memory_topology(server, "first").join(MANIFEST, Wishes())
        other = Manifest(parameters=(*MANIFEST.parameters[:-1], ParameterSpec(name="x", shape=(2,), dtype="float32")))
        for make in (lambda ranks: sharded(server, ranks), lambda ranks: whole(server, ranks)):
            for error in failures(2, lambda ranks, make=make: make(ranks).join(other, Wishes())):
                assert isinstance(error, ManifestMismatch)

    def test_ranks_with_different_models_are_not_one_worker(self, server: DiLoCoServer) -> None:
        def job(ranks: Ranks) -> None:
            whole(server, ranks).join(describe(tiny_model())[1] if ranks.rank else MANIFEST, Wishes())

        for error in failures(3, job):
            assert isinstance(error, ModelError)
            assert "ranks 0 and 1 hold different models" in str(error)

    def test_sections_that_nobody_holds_are_refused(self, server: DiLoCoServer) -> None:
        for error in failures(2, lambda ranks: sharded(server, ranks, sections=3)):
            assert isinstance(error, ModelError)
            assert "sections [0, 1] of 3" in str(error)


class TestWhole:
    def test_all_ranks_hold_what_rank_0_fetched(self, server: DiLoCoServer) -> None:
        def job(ranks: Ranks) -> tuple[Joined, Agreed]:
            topology = whole(server, ranks)
            joined = topology.join(MANIFEST, Wishes())
            agreed = finish(topology, topology.begin(contribution(joined.anchors[0], 1, 1, 0)))
            return joined, agreed

        found = in_ranks(3, job)
        newest = server.get_global_params()
        for joined, agreed in found:
            assert joined.worker_id == "group"
            assert joined.plan == found[0][0].plan
            assert agreed.counted
            assert list(agreed.anchor) == list(found[0][1].anchor)
            assert all(torch.equal(theta, newest[name]) for name, theta in agreed.anchor.items())
        assert [agreed.bytes_received > 0 for _, agreed in found] == [True, False, False]

    def test_an_anchor_that_changed_on_its_way_to_a_rank_is_mended_on_all(self, server: DiLoCoServer) -> None:
        def job(ranks: Ranks) -> list[bool]:
            spread, damages = ranks.spread, [1] if ranks.rank == 2 else []

            def damaged(tensors: Any) -> None:
                held = list(tensors)
                spread(held)
                if damages:
                    held[0][-12] += damages.pop()

            ranks.spread = damaged  # type: ignore[method-assign]
            topology = whole(server, ranks)
            agreed = topology.join(MANIFEST, Wishes()).anchors[0]
            first = take_over(agreed)
            again = topology.confirm(agreed, first)
            assert again is not None
            second = take_over(again)
            assert topology.confirm(again, second) is None
            return [first, second]

        assert in_ranks(3, job) == [[True, True], [True, True], [False, True]]

    def test_a_frame_that_is_none_on_one_rank_stops_all(self, server: DiLoCoServer) -> None:
        def job(ranks: Ranks) -> None:
            spread = ranks.spread

            def damaged(tensors: Any) -> None:
                held = list(tensors)
                spread(held)
                held[0][0] += ranks.rank == 2

            ranks.spread = damaged  # type: ignore[method-assign]
            whole(server, ranks).join(MANIFEST, Wishes())

        for error in failures(3, job):
            assert isinstance(error, ExchangeFailed)
            assert "something else than this fragment" in str(error)

    def test_orders_reach_all_ranks_at_the_same_exchange_and_the_pace_stays(self, server: DiLoCoServer) -> None:
        def job(ranks: Ranks) -> list[str | int | None]:
            topology = whole(server, ranks)
            topology.join(MANIFEST, Wishes())
            if ranks.rank == 0:
                server.service.coordinator.order(["group"], "drain", "enough")
                topology.heartbeat(1, 1.0, None)
            before = topology.orders(at_exchange=False)
            at = topology.orders(at_exchange=True)
            return [before.drain, at.drain, topology.orders(at_exchange=False).drain]

        assert in_ranks(2, job) == [["", "enough", ""]] * 2

    def test_a_rank_that_has_nothing_to_say_waits_for_rank_0(self) -> None:
        with make_server(num_workers=2) as server:

            def job(ranks: Ranks) -> Sight:
                topology = whole(server, ranks)
                anchor = topology.join(MANIFEST, Wishes()).anchors[0]
                ticket = topology.begin(contribution(anchor, 1, 1, 0))
                while True:
                    sight = ticket.look(0.05)
                    if sight.waiting_for:
                        ticket.cancel()
                        return sight

            first, second = in_ranks(2, job)
            assert first == second
            assert not first.done
            assert "2 workers to join" in first.waiting_for


class TestOffers:
    """What a worker may say about sections."""

    @pytest.fixture
    def client(self, server: DiLoCoServer) -> HandClient:
        found = HandClient(MemoryTransport(server.service))
        memory_topology(server, "first").join(MANIFEST, Wishes())
        found.join()
        found.sequence += 1
        return found

    def test_sections_must_add_up(self, client: HandClient) -> None:
        with pytest.raises(BadRequest, match="sections of 300 bytes in a contribution of 400"):
            client.offer(400, section_bytes=(100, 200))

    def test_each_section_may_add_a_header_and_no_more(self, client: HandClient, server: DiLoCoServer) -> None:
        store = server.service.stores[0]
        limit = store.max_payload_bytes(2)
        assert client.offer(limit, section_bytes=(8, limit - 8)).state == "send"
        client.sequence += 1
        with pytest.raises(TooLarge):
            client.offer(limit + 8, section_bytes=(8, limit))

    def test_parts_are_numbered_section_by_section(self, client: HandClient) -> None:
        assert client.offer(138, section_bytes=(65, 1, 72)).missing == (0, 1, 2, 3, 4)


class TestConnecting:
    def test_a_rank_that_does_not_talk_to_the_others_yet_is_told_to(self) -> None:
        environ = {"RANK": "1", "WORLD_SIZE": "4"}
        with pytest.raises(ConfigError, match="one of 4"):
            find_ranks(WorkerConfig(server_addr="x:1"), environ)
        assert find_ranks(WorkerConfig(server_addr="x:1", group="off"), environ) is None

    @pytest.mark.parametrize("environ", [{}, {"RANK": "0", "WORLD_SIZE": "1"}, {"WORLD_SIZE": "4"}], ids=str)
    def test_a_process_on_its_own_is_a_worker_of_its_own(self, environ: dict[str, str]) -> None:
        assert find_ranks(WorkerConfig(server_addr="x:1"), environ) is None


class TestRanks:
    @pytest.mark.parametrize(
        "error",
        [
            StaleRound("it closed", hint="rebase", retry_after_s=2.0),
            RoundStuck("it waits for b"),
            TransportError("reset"),
            ModelError("no"),
        ],
        ids=lambda error: type(error).__name__,
    )
    def test_a_failure_keeps_its_class_and_words(self, error: Exception) -> None:
        copy = rebuild(describe_error(error))
        assert type(copy) is type(error)
        assert str(copy) == str(error)
        assert vars(copy) == vars(error)

    def test_a_cause_travels_too(self) -> None:
        try:
            raise ExchangeFailed("outer") from StaleRound("inner")
        except ExchangeFailed as failure:
            copy = rebuild(describe_error(failure))
        assert isinstance(copy.__cause__, StaleRound)

    def test_what_is_not_ours_becomes_a_worker_error(self) -> None:
        copy = rebuild(describe_error(ZeroDivisionError("by zero")))
        assert type(copy) is WorkerError
        assert "ZeroDivisionError: by zero" in str(copy)

    def test_if_several_fail_all_raise_the_lowest_ranks_failure(self) -> None:
        def job(ranks: Ranks) -> None:
            def make() -> str:
                if ranks.rank == 1:
                    raise StaleRound("one")
                if ranks.rank == 2:
                    raise ModelError("two")
                return "fine"

            ranks.gather(make, str)

        assert [type(error) for error in failures(3, job)] == [StaleRound] * 3

    def test_the_rank_that_failed_raises_its_own_exception(self) -> None:
        mine = KeyError("mine")

        def job(ranks: Ranks) -> None:
            ranks.check(lambda: (_ for _ in ()).throw(mine) if ranks.rank == 1 else None)

        found = failures(2, job)
        assert found[1] is mine
        assert isinstance(found[0], WorkerError)

    def test_values_arrive_in_the_order_of_the_ranks(self) -> None:
        words = in_ranks(3, lambda ranks: ranks.gather(lambda: "x" * ranks.rank * 1000, str))
        assert words == [["", "x" * 1000, "x" * 2000]] * 3
        assert data_hash([words[0][2].encode()]) == data_hash([b"x" * 2000])
