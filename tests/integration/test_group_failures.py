"""Groups, with threads for ranks: what if one of them fails, and what they may say."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from integration.groups_in_threads import (
    MANIFEST,
    assert_rows,
    contribution,
    enter,
    finish,
    make_server,
    sharded,
    take_over,
    whole,
)
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
from outerstep.topology.group.ranks import Ranks, rebuild
from outerstep.topology.group.ranks import describe as describe_error
from outerstep.topology.group.sharded import ShardedTopology
from outerstep.topology.protocol import Agreed, Ticket, anchors_of
from outerstep.types import Agreement, Manifest, ParameterSpec, PutPart, Request, Wishes
from outerstep.wire.memory import MemoryTransport
from outerstep.worker.connect import find_ranks
from support import HandClient, memory_topology, tiny_model
from thread_ranks import failures, in_ranks


@pytest.fixture
def server() -> Iterator[DiLoCoServer]:
    with make_server() as made:
        yield made


class TestFailures:
    def test_a_rank_whose_rows_are_not_finite_stops_all(self, server: DiLoCoServer) -> None:
        def job(ranks: Ranks) -> None:
            topology = sharded(server, ranks)
            anchor = enter(topology)[0]
            sent = contribution(anchor, 1, 2, ranks.rank)
            if ranks.rank == 1:
                sent.deltas["a"][0] = float("inf")
            finish(topology.begin(sent))

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
            anchor = enter(topology)[0]
            finish(topology.begin(contribution(anchor, 1, 3, ranks.rank)))

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
            anchor = enter(topology)[0]
            ticket: Ticket = topology.begin(contribution(anchor, 1, 2, ranks.rank))
            with pytest.raises(ExchangeFailed, match="a bug"):
                finish(ticket)
            down.clear()
            sight = ticket.look(0.0)
            assert sight.done
            assert sight.failed
            return finish(ticket.resume())

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
                fetched.update._values["a"][0, 0] += damages.pop()
            return fetched

        def job(ranks: Ranks) -> list[bool]:
            topology = sharded(server, ranks)
            ((ticket, agreed),) = anchors_of(topology, topology.join(MANIFEST, Wishes()))
            first = take_over(agreed)
            whole = ticket.confirm(agreed, first)
            assert whole is not None
            assert_rows(whole, server, 2, ranks.rank)
            second = take_over(whole)
            assert ticket.confirm(whole, second) is None
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
