"""Groups against a real server in memory, with threads for ranks: what they exchange."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from integration.groups_in_threads import (
    MANIFEST,
    SHAPES,
    SHARDED,
    assert_rows,
    contribution,
    enter,
    finish,
    make_server,
    sharded,
    take_over,
    whole,
)
from outerstep.errors import (
    ExchangeFailed,
)
from outerstep.server import DiLoCoServer
from outerstep.topology.group.ranks import Ranks
from outerstep.topology.protocol import Agreed, Joined, Sight, Topology, anchors_of
from outerstep.types import GetPart, Offer, PutPart, Request, Wishes
from outerstep.wire.frames import rows_of
from support import memory_topology, wait_until
from thread_ranks import failures, in_ranks


@pytest.fixture
def server() -> Iterator[DiLoCoServer]:
    with make_server() as made:
        yield made


class TestSharded:
    @pytest.mark.parametrize("size", [2, 3, 8])
    def test_every_rank_holds_its_rows_of_the_servers_model_bit_for_bit(self, size: int) -> None:
        with make_server(num_fragments=2, sync_every=2) as server:

            def job(ranks: Ranks) -> None:
                topology = sharded(server, ranks)
                anchors = enter(topology)
                for seed in range(3):
                    for fragment in range(2):
                        assert_rows(anchors[fragment], server, size, ranks.rank)
                        sent = contribution(anchors[fragment], seed, size, ranks.rank)
                        anchors[fragment] = finish(topology.begin(sent))
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
            agreed = enter(plain)[0]
            for seed in range(2):
                agreed = finish(plain.begin(contribution(agreed, seed, 1, 0)))

            def job(ranks: Ranks) -> None:
                topology = sharded(server, ranks)
                mine = enter(topology)[0]
                for seed in range(2):
                    mine = finish(topology.begin(contribution(mine, seed, 3, ranks.rank)))
                assert mine.anchor_hash == agreed.anchor_hash

            in_ranks(3, job)

    def test_nobody_fetches_or_sends_the_whole_model(self, server: DiLoCoServer) -> None:
        def job(ranks: Ranks) -> tuple[int, int]:
            topology = sharded(server, ranks)
            anchor = enter(topology)[0]
            agreed = finish(topology.begin(contribution(anchor, 1, 4, ranks.rank)))
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
            anchor = enter(topology)[0]
            sent = contribution(anchor, 1, 2, section, samples=10 + ranks.rank)
            agreed = finish(topology.begin(sent))
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
            anchor = enter(topology)[0]
            sections = 2 if make is sharded else 1
            facts = {"samples": 8 * (ranks.rank + 1), "tokens": 100}
            finish(topology.begin(contribution(anchor, 1, sections, ranks.rank % sections, **facts)))

        for make in (sharded, whole):
            in_ranks(2, partial(job, make=make))
            assert offered == {(24, 200)}
            offered.clear()

    def test_parts_that_the_server_lost_are_sent_again_by_whoever_has_them(self) -> None:
        with make_server(heartbeat_timeout=5.0) as server:
            once = threading.Lock()

            def rank_1_is_done() -> bool:
                (upload,) = server.service.coordinator.uploads.of("group")
                return upload.part_hashes.keys() >= set(upload.parts.of_section(1))

            def meddle(rank: int, request: Request) -> None:
                """When rank 1 has sent everything and rank 0 has not, the worker is declared dead."""
                if rank == 0 and isinstance(request, PutPart) and once.acquire(blocking=False):
                    wait_until(rank_1_is_done)
                    server.service.tick(server.service.clock() + 100.0)

            def job(ranks: Ranks) -> Agreed:
                topology = sharded(server, ranks, meddle=meddle)
                anchor = enter(topology)[0]
                agreed = finish(topology.begin(contribution(anchor, 1, 2, ranks.rank)))
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
            theirs = enter(other)[0]
            once, moved_on = threading.Lock(), threading.Event()

            def move_on() -> None:
                agreed = theirs
                for seed in range(4):
                    agreed = finish(other.begin(contribution(agreed, seed, 1, 0)))
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
                anchor = enter(topology)[0]
                agreed = finish(topology.begin(contribution(anchor, 1, 2, ranks.rank)))
                assert_rows(agreed, server, 2, ranks.rank)
                return agreed

            assert [agreed.version for agreed in in_ranks(2, job)] == [5, 5]
            assert moved_on.is_set()

    def test_a_round_that_closed_without_the_group_is_known_to_all_ranks(self) -> None:
        with make_server(num_workers=2, round_deadline_s=0.01, min_workers=1) as server:
            other = memory_topology(server, "other")

            def job(ranks: Ranks) -> Agreed:
                topology = sharded(server, ranks)
                anchor = enter(topology)[0]
                if ranks.rank == 0:
                    theirs = enter(other)[0]
                    finish(other.begin(contribution(theirs, 5, 1, 0)))
                agreed = finish(topology.begin(contribution(anchor, 1, 2, ranks.rank)))
                assert_rows(agreed, server, 2, ranks.rank)
                return agreed

            assert [(a.version, a.counted) for a in in_ranks(2, job)] == [(1, False), (1, False)]


class TestWhole:
    def test_all_ranks_hold_what_rank_0_fetched(self, server: DiLoCoServer) -> None:
        def job(ranks: Ranks) -> tuple[Joined, Agreed]:
            topology = whole(server, ranks)
            joined = topology.join(MANIFEST, Wishes())
            ((_, anchor),) = anchors_of(topology, joined)
            agreed = finish(topology.begin(contribution(anchor, 1, 1, 0)))
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
            ((ticket, agreed),) = anchors_of(topology, topology.join(MANIFEST, Wishes()))
            first = take_over(agreed)
            again = ticket.confirm(agreed, first)
            assert again is not None
            second = take_over(again)
            assert ticket.confirm(again, second) is None
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
            enter(whole(server, ranks))

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
                anchor = enter(topology)[0]
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
