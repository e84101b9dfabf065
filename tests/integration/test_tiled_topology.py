"""Jobs whose ranks hold boxes, against a real server in memory, with threads for ranks."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from msgspec import UNSET
from msgspec.structs import replace
from torch import Tensor

from integration.groups_in_threads import Wire, finish
from outerstep import tiling
from outerstep.coordination.server.quotas import QuotaLimits, Quotas
from outerstep.errors import BadRequest, ModelError, QuotaExceeded, TransportError
from outerstep.events import WorkerDied
from outerstep.server import DiLoCoServer, store
from outerstep.server.boxes import box_hashes
from outerstep.server.persistence import RecordedPush, RoundRecord, recorded_addends
from outerstep.server.store import Addend, Uplink
from outerstep.tiling import FragmentTiling, ModelTiling, Place, make_tiling
from outerstep.topology.group import tiled as tiled_module
from outerstep.topology.group.ranks import Ranks
from outerstep.topology.group.tiled import TiledTopology
from outerstep.topology.protocol import Agreed, Contribution, anchors_of
from outerstep.topology.server.topology import ServerTopology
from outerstep.topology.update import anchor_tree
from outerstep.types import (
    Join,
    JoinAnswer,
    Manifest,
    Offer,
    OfferAnswer,
    ParameterSpec,
    Poll,
    PollAnswer,
    Request,
    Tiling,
    Wishes,
)
from outerstep.wire.memory import MemoryTransport
from support import EAGER, memory_topology
from thread_ranks import ThreadRanks, failures, in_ranks

SHAPES: dict[str, tuple[int, ...]] = {"wide": (24, 1040), "deep": (7, 3, 300), "bias": (41,), "scale": ()}
MANIFEST = Manifest(parameters=tuple(ParameterSpec(name=n, shape=s, dtype="float32") for n, s in SHAPES.items()))
Held = Mapping[str, Place]


def all_of(*names: str, **others: Place) -> dict[str, Place]:
    return {name: ((0,) * len(SHAPES[name]), SHAPES[name]) for name in names} | others


JOBS: dict[str, list[dict[str, Place]]] = {
    "columns, unevenly": [
        all_of("bias", "scale", wide=((0, 0), (24, 333)), deep=((0, 0, 0), (7, 1, 300))),
        all_of("bias", "scale", wide=((0, 333), (24, 707)), deep=((0, 1, 0), (7, 2, 300))),
    ],
    "rows and columns": [
        all_of(
            "scale",
            wide=((12 * i, 520 * j), (12, 520)),
            deep=((4 * i, 0, 150 * j), (4 - i, 3, 150)),
            bias=((21 * i,), (21 - i,)),
        )
        for i in range(2)
        for j in range(2)
    ],
    "stages, and one parameter that both hold": [all_of("wide", "scale"), all_of("deep", "bias", "scale")],
    "three dimensions": [
        {"wide": ((0, 0), (24, 1040)), "deep": ((0, i, 100 * j), (7, 1, 100)), "scale": ((), ())}
        | ({"bias": ((0,), (41,))} if i == j == 0 else {})
        for i in range(3)
        for j in range(3)
    ],
}


def cut(whole: Mapping[str, Tensor], held: Held) -> dict[str, Tensor]:
    return {
        name: whole[name][tuple(slice(b, b + n) for b, n in zip(*held[name], strict=True))].contiguous()
        for name in whole
        if name in held
    }


def manifest_of(held: Held) -> Manifest:
    return Manifest(parameters=tuple(spec for spec in MANIFEST.parameters if spec.name in held))


def tiled(
    server: DiLoCoServer, ranks: Ranks, held: Held, meddle: Callable[[int, Request], None] = lambda rank, request: None
) -> TiledTopology:
    instance = ranks.tell(lambda: secrets.token_hex(8), str)
    wire = Wire(server, ranks.rank, meddle)
    inner = ServerTopology(wire, worker_id="job", instance=instance, hostname="test", patience=EAGER)
    return TiledTopology(ranks, inner, held)


def server_of(**settings: Any) -> DiLoCoServer:
    state = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    usual = {"num_workers": 1, "port": 0, "part_size_bytes": 4096, "sync_every": 1, "heartbeat_timeout": 0.0}
    return DiLoCoServer(state, **{**usual, "outer_lr": 0.5, "outer_momentum": 0.5, **settings})


def deltas(seed: int, *, exact: bool) -> dict[str, Tensor]:
    """`exact`: ±7 everywhere, which int4 sends as they are, however they are cut into blocks."""
    source = torch.Generator().manual_seed(seed)
    if exact:
        return {name: torch.randint(0, 2, shape, generator=source) * 14.0 - 7.0 for name, shape in SHAPES.items()}
    return {name: torch.randn(shape, generator=source) for name, shape in SHAPES.items()}


def contribution(agreed: Agreed, values: Mapping[str, Tensor]) -> Contribution:
    ours = {name: values[name] for name in agreed.plan.fragments[agreed.fragment] if name in values}
    return Contribution(agreed.fragment, agreed.version, agreed.version, steps=1, samples=0, tokens=0, deltas=ours)


def assert_held(agreed: Agreed, anchors: dict[str, Tensor], server: DiLoCoServer, held: Held) -> None:
    """Adopt it, block by block: then this rank has the server's values, and the hash says so."""
    for name in agreed.update.names:
        flat = anchors.setdefault(name, torch.zeros(held[name][1])).view(-1)
        half = flat.numel() // 3 // 256 * 256
        for start, stop in ((0, half), (half, flat.numel())):
            theta = agreed.update.apply(name, start, stop, flat[start:stop])
            flat[start:stop] = theta
    assert agreed.update.is_proven
    newest = cut(server.get_global_params(), held)
    for name in agreed.update.names:
        assert torch.equal(anchors[name], newest[name]), name


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int4+feedback"])
def test_every_rank_holds_its_boxes_of_the_servers_model_bit_for_bit(job: str, codec: str) -> None:
    with server_of(codec=codec, num_fragments=2, sync_every=2) as server:

        def run(ranks: Ranks) -> None:
            held, anchors = JOBS[job][ranks.rank], dict[str, Tensor]()
            topology = tiled(server, ranks, held)
            joined = topology.join(manifest_of(held), Wishes())
            found = [agreed for _, agreed in anchors_of(topology, joined)]
            for agreed in found:
                assert_held(agreed, anchors, server, held)
            for seed in range(3):
                for fragment in range(2):
                    sent = contribution(found[fragment], cut(deltas(seed, exact=False), held))
                    found[fragment] = finish(topology.begin(sent))
                    assert found[fragment].counted
                    assert_held(found[fragment], anchors, server, held)
            topology.leave("done")

        in_ranks(len(JOBS[job]), run)
        assert server.sync_round == 3


def test_ranks_pass_on_what_they_fetched_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or each would need as much memory again for what is on its way."""
    monkeypatch.setattr(tiled_module, "PASSED_ON_BYTES", 1)
    job, most, swap = JOBS["rows and columns"], list[int](), ThreadRanks.swap

    def noted(ranks: ThreadRanks, outgoing: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        most.append(sum(data.numel() for data in outgoing))
        return swap(ranks, outgoing, sizes)

    monkeypatch.setattr(ThreadRanks, "swap", noted)
    with server_of(codec="bf16", down_codec="bf16") as server:

        def run(ranks: Ranks) -> None:
            held, anchors = job[ranks.rank], dict[str, Tensor]()
            topology = tiled(server, ranks, held)
            ((_, agreed),) = anchors_of(topology, topology.join(manifest_of(held), Wishes()))
            assert_held(agreed, anchors, server, held)
            agreed = finish(topology.begin(contribution(agreed, cut(deltas(1, exact=True), held))))
            assert_held(agreed, anchors, server, held)

        in_ranks(4, run)
    assert len(most) > 40
    assert max(most) <= 4096  # a part


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int4+feedback"])
def test_all_shapes_make_the_history_that_a_single_process_makes(codec: str) -> None:
    """Of values that are exact however they are cut."""

    def model(server: DiLoCoServer) -> str:
        params = server.get_global_params()
        return anchor_tree(params[name] for name in SHAPES)

    def alone(server: DiLoCoServer) -> list[str]:
        plain = memory_topology(server, "job")
        joined = plain.join(MANIFEST, Wishes())
        ((_, agreed),) = anchors_of(plain, joined)
        found = []
        for seed in range(3):
            agreed = finish(plain.begin(contribution(agreed, deltas(seed, exact=True))))
            found.append(model(server))
        return found

    def together(server: DiLoCoServer, job: list[dict[str, Place]]) -> list[str]:
        def run(ranks: Ranks) -> list[str]:
            held = job[ranks.rank]
            topology = tiled(server, ranks, held)
            ((_, agreed),) = anchors_of(topology, topology.join(manifest_of(held), Wishes()))
            found = []
            for seed in range(3):
                agreed = finish(topology.begin(contribution(agreed, cut(deltas(seed, exact=True), held))))
                found.append(model(server))
            return found

        return in_ranks(len(job), run)[0]

    with server_of(codec=codec, down_codec="bf16") as server:
        expected = alone(server)
    for job in JOBS.values():
        with server_of(codec=codec, down_codec="bf16") as server:
            assert together(server, job) == expected


def test_all_ranks_together_send_one_model_and_fetch_one() -> None:
    job, model = JOBS["rows and columns"], 4 * sum(torch.Size(shape).numel() for shape in SHAPES.values())
    with server_of(codec="fp32", down_codec="fp32") as server:

        def run(ranks: Ranks) -> tuple[int, int, int]:
            held = job[ranks.rank]
            topology = tiled(server, ranks, held)
            ((_, agreed),) = anchors_of(topology, topology.join(manifest_of(held), Wishes()))
            joined_with = agreed.bytes_received
            agreed = finish(topology.begin(contribution(agreed, cut(deltas(1, exact=True), held))))
            return agreed.bytes_sent, agreed.bytes_received, joined_with

        amounts = in_ranks(4, run)
    headers = 4 * 512
    for total in map(sum, zip(*amounts, strict=True)):
        assert model <= total + 8 <= model + headers  # a part with nothing but a header is not fetched
    assert all(sent < 0.3 * model and received < 0.3 * model for sent, received, _ in amounts)


@pytest.mark.parametrize(
    ("job", "why"),
    [
        ([all_of("wide", "deep"), all_of("bias", wide=((0, 0), (12, 1040)))], "'wide' is in 2 boxes"),
        ([all_of("deep"), {"wide": ((0, 0), (24, 1000))}], "value [0, 1000] of 'wide' is in no box"),
    ],
)
def test_ranks_that_do_not_hold_the_model_once_are_refused_by_name_before_anything_is_sent(
    job: list[dict[str, Place]], why: str
) -> None:
    with server_of() as server:
        said: list[Request] = []

        def run(ranks: Ranks) -> None:
            held = job[ranks.rank]
            tiled(server, ranks, held, lambda rank, request: said.append(request)).join(manifest_of(held), Wishes())

        for error in failures(2, run):
            assert isinstance(error, ModelError)
            assert why in str(error)
        assert not said


def test_stages_that_disagree_about_a_parameter_are_refused_by_name() -> None:
    with server_of() as server:

        def run(ranks: Ranks) -> None:
            shape = (4, ranks.rank + 1)
            manifest = Manifest(parameters=(ParameterSpec(name="0.weight", shape=shape, dtype="float32"),))
            tiled(server, ranks, {"0.weight": ((0, 0), shape)}).join(manifest, Wishes())

        for error in failures(2, run):
            assert "ranks 0 and 1 hold different models: '0.weight'" in str(error)


def test_a_journals_record_says_how_a_contribution_was_cut() -> None:
    specs = list(MANIFEST.parameters)
    tiling = make_tiling(SHAPES, JOBS["rows and columns"])
    fragment = ModelTiling(tiling, specs).fragment(tuple(SHAPES))
    push = RecordedPush(size_bytes=3, scale=1.0, base=0, sections=4, codec="fp32", tiling=fragment.as_said())
    record = RoundRecord(kind="pushes", fragment=0, version=1, participants=(), anchor_hash="0" * 32, pushes=(push,))
    (found,) = recorded_addends(record, memoryview(b"abc"), specs)
    assert isinstance(found, Addend)
    assert not isinstance(found.sections, int)
    assert found.sections.as_said() == fragment.as_said()


def test_a_server_refuses_by_name_what_speaks_of_a_tiling_that_it_was_not_told() -> None:
    with server_of(codec="fp32") as server:
        plain = memory_topology(server, "plain")
        plain.join(MANIFEST, Wishes())
        head = plain.session.head
        facts = {"fragment": 0, "base_version": 0, "oldest_base": 0, "steps": 1, "codec": "fp32", "tiled": True}
        for request in (
            Poll(**head, fragment=0, after=-1, sections=4, tiled=True),
            Offer(**head, **facts, sequence=1, size_bytes=4096, section_bytes=(1024,) * 4),
        ):
            with pytest.raises(BadRequest, match="joined without a tiling"):
                MemoryTransport(server.service).call(request)


def test_a_start_of_a_worker_has_one_tiling_and_as_many_sections_as_it_says() -> None:
    with server_of(codec="fp32") as server:
        transport = MemoryTransport(server.service)
        tilings = [make_tiling(SHAPES, JOBS[name]) for name in ("rows and columns", "columns, unevenly")]
        join = Join(protocol=2, worker_id="job", instance="0123456789", manifest=MANIFEST, tiling=tilings[0])
        answer = transport.call(join)
        assert isinstance(answer, JoinAnswer)
        assert transport.call(join) == answer
        for other in (tilings[1], UNSET):
            with pytest.raises(BadRequest, match="joined before with another tiling"):
                transport.call(replace(join, tiling=other))
        who = {"run_id": answer.run_id, "worker_id": "job", "incarnation": answer.incarnation}
        with pytest.raises(BadRequest, match="got 3 sections; the worker's tiling has 4"):
            transport.call(Poll(**who, fragment=0, after=-1, sections=3, tiled=True))
        with pytest.raises(BadRequest, match="must come with the manifest"):
            transport.call(replace(join, worker_id="other", manifest=None))


def test_a_join_that_is_refused_settles_nothing() -> None:
    """Not what is trained, nor how; a worker of another shape begins the run as it likes."""
    with server_of(codec=None) as server:
        transport, told = MemoryTransport(server.service), make_tiling(SHAPES, JOBS["rows and columns"])
        join = Join(protocol=2, worker_id="job", instance="0123456789", wishes=Wishes(codec="int8"))
        with pytest.raises(BadRequest, match="must come with the manifest"):
            transport.call(replace(join, tiling=told))
        quotas = server.service.coordinator.quotas
        quotas.charge("joins", "", "others", server.service.clock(), is_newcomer=True, amount=10**6)
        with pytest.raises(QuotaExceeded):
            transport.call(join)
        assert server.service.coordinator.plan is None
        assert server.service.run.stores == []
        server.service.coordinator.quotas = Quotas(QuotaLimits())
        answer = transport.call(replace(join, worker_id="other", wishes=Wishes(codec="bf16")))
        assert isinstance(answer, JoinAnswer)
        assert answer.plan.codec == "bf16"


class JobByHand:
    """A job that joins and polls; it never trains."""

    def __init__(self, server: DiLoCoServer, worker: str, told: Tiling) -> None:
        self.transport = MemoryTransport(server.service)
        answer = self.transport.call(
            Join(protocol=2, worker_id=worker, instance="0123456789", manifest=MANIFEST, tiling=told)
        )
        assert isinstance(answer, JoinAnswer)
        self.head = {"run_id": answer.run_id, "worker_id": worker, "incarnation": answer.incarnation}
        self.sections = told.sections

    def hashes(self) -> tuple[str, ...]:
        answer = self.transport.call(Poll(**self.head, fragment=0, after=-1, sections=self.sections, tiled=True))
        assert isinstance(answer, PollAnswer)
        assert answer.agreement is not None
        return answer.agreement.range_hashes


def of_its_own(column: int) -> Tiling:
    """No two of these are alike."""
    return make_tiling(
        SHAPES,
        [
            all_of("bias", "scale", "deep", wide=((0, 0), (24, column))),
            all_of("bias", "scale", "deep", wide=((0, column), (24, 1040 - column))),
        ],
    )


def test_a_model_is_hashed_once_for_each_shape_and_version_however_many_jobs_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashed = list[object]()

    def counted(params: Mapping[str, Tensor], cutting: FragmentTiling) -> tuple[str, ...]:
        hashed.append(cutting)
        return box_hashes(params, cutting)

    monkeypatch.setattr(store, "box_hashes", counted)
    with server_of(codec="fp32") as server:
        jobs = [JobByHand(server, f"job-{i}", of_its_own(4 + i // 2)) for i in range(24)]
        for _ in range(3):
            found = [job.hashes() for job in jobs]
        assert len(hashed) == 12
        assert found[::2] == found[1::2]
        assert len(set(found)) == 12


def test_newcomers_cannot_have_a_server_hash_without_end_and_a_worker_that_contributed_is_not_kept_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store, "PIECE_COST_BYTES", 1 << 20)
    with server_of(codec="fp32", max_hashed_per_minute=1 << 22) as server:

        def contribute(ranks: Ranks) -> None:
            held = JOBS["columns, unevenly"][ranks.rank]
            topology = tiled(server, ranks, held)
            ((_, agreed),) = anchors_of(topology, topology.join(manifest_of(held), Wishes()))
            for _ in range(2):
                agreed = finish(topology.begin(contribution(agreed, cut(deltas(1, exact=True), held))))
            if ranks.rank == 0:
                flood()
            ranks.check(lambda: None)
            agreed = finish(topology.begin(contribution(agreed, cut(deltas(2, exact=True), held))))
            assert agreed.counted
            topology.leave("done")

        refused = list[QuotaExceeded]()

        def flood() -> None:
            for i in range(40):
                try:
                    JobByHand(server, f"idle-{i}", of_its_own(1 + i)).hashes()
                except QuotaExceeded as refusal:
                    refused.append(refusal)

        in_ranks(2, contribute)
        assert 30 <= len(refused) < 40
        assert "bytes hashed for the processes of groups a minute (max_hashed_per_minute)" in refused[0].message


def test_nobody_waits_for_the_lock_while_a_tiling_is_checked_and_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of half a million boxes it takes a second, and whoever has a token may bring them."""
    with server_of(codec="fp32") as server:
        transport, done = MemoryTransport(server.service), list[tuple[str, bool]]()

        def noted(what: str, work: Callable[..., Any]) -> Callable[..., Any]:
            def noting(*args: Any) -> Any:
                if not isinstance(args[-1], int) or what == "checked":
                    done.append((what, server.service.changed._is_owned()))  # type: ignore[attr-defined]  # mine?
                return work(*args)

            return noting

        monkeypatch.setattr(tiling, "check_boxes", noted("checked", tiling.check_boxes))
        monkeypatch.setattr(Uplink, "most_bytes", noted("measured", Uplink.most_bytes))
        told = make_tiling(SHAPES, JOBS["rows and columns"])
        answer = transport.call(
            Join(protocol=2, worker_id="job", instance="0123456789", manifest=MANIFEST, tiling=told)
        )
        assert isinstance(answer, JoinAnswer)
        who = {"run_id": answer.run_id, "worker_id": "job", "incarnation": answer.incarnation}
        facts = {"fragment": 0, "sequence": 1, "base_version": 0, "oldest_base": 0, "steps": 1, "codec": "fp32"}
        offer = Offer(**who, **facts, size_bytes=4096, section_bytes=(1024,) * 4, tiled=True)
        assert isinstance(transport.call(offer), OfferAnswer)
        assert {what for what, _ in done} == {"checked", "measured"}
        assert not any(is_locked for _, is_locked in done)


def test_a_server_that_knows_no_tilings_is_left_with_words_that_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerTopology, "takes_tilings", False)
    with server_of(codec="fp32") as server:

        def run(ranks: Ranks) -> None:
            held = JOBS["columns, unevenly"][ranks.rank]
            tiled(server, ranks, held).join(manifest_of(held), Wishes())

        for error in failures(2, run):
            assert isinstance(error, ModelError)
            assert "update the server, or give this job one of those shapes" in str(error)
        assert server.status()["workers"] == {}


def test_what_a_worker_holds_is_forgotten_when_it_has_left() -> None:
    with server_of(codec="fp32") as server:

        def run(ranks: Ranks) -> None:
            held = JOBS["columns, unevenly"][ranks.rank]
            topology = tiled(server, ranks, held)
            topology.join(manifest_of(held), Wishes())
            worker = server.service.coordinator.members.find("job")
            assert worker is not None
            assert worker.tiling is not None
            ranks.check(lambda: None)
            topology.leave("done")
            ranks.check(lambda: None)
            assert worker.tiling is None

        in_ranks(2, run)


@pytest.mark.parametrize("codec", ["fp32", "int4+feedback"])
def test_a_job_that_was_thought_dead_joins_again_by_itself_and_says_what_it_holds(codec: str) -> None:
    """Its ranks are the same start of the worker, so nothing is lost."""
    job = JOBS["rows and columns"]
    with server_of(codec=codec) as server:

        def forget() -> None:
            with server.service.changed:
                coordinator = server.service.coordinator
                worker = coordinator.members.find("job")
                assert worker is not None
                coordinator.remove(worker, WorkerDied("job", 9.0), server.service.clock())
                assert worker.tiling is None

        def run(ranks: Ranks) -> None:
            held, anchors = job[ranks.rank], dict[str, Tensor]()
            topology = tiled(server, ranks, held)
            ((_, agreed),) = anchors_of(topology, topology.join(manifest_of(held), Wishes()))
            assert_held(agreed, anchors, server, held)
            for seed in range(3):
                ranks.check(lambda: None)
                if ranks.rank == 0:
                    forget()
                ranks.check(lambda: None)
                agreed = finish(topology.begin(contribution(agreed, cut(deltas(seed, exact=False), held))))
                assert agreed.counted
                assert_held(agreed, anchors, server, held)
                worker = server.service.coordinator.members.find("job")
                assert worker is not None
                assert worker.tiling is not None

        in_ranks(4, run)
        assert server.sync_round == 3


def test_a_contribution_that_never_arrived_is_sent_again_as_it_was_after_a_start_in_the_same_shape() -> None:
    job = JOBS["rows and columns"]
    with server_of(codec="int4+feedback") as server, server_of(codec="int4+feedback") as straight:

        def cut_off(rank: int, request: Request) -> None:
            if isinstance(request, Offer):
                raise TransportError("the line is cut")

        def contribute(ranks: Ranks) -> Agreed:
            held = job[ranks.rank]
            topology = tiled(straight, ranks, held)
            ((_, agreed),) = anchors_of(topology, topology.join(manifest_of(held), Wishes()))
            return finish(topology.begin(contribution(agreed, cut(deltas(1, exact=False), held))))

        def send_in_vain(ranks: Ranks) -> tuple[dict[str, Any], dict[str, Any]]:
            held = job[ranks.rank]
            topology = tiled(server, ranks, held, cut_off)
            ((_, agreed),) = anchors_of(topology, topology.join(manifest_of(held), Wishes()))
            ticket = topology.begin(contribution(agreed, cut(deltas(1, exact=False), held)))
            packed, state = ticket.pack(), topology.state_dict([0])
            ticket.cancel()
            return packed, state

        def go_on(ranks: Ranks) -> Agreed:
            held, (packed, state) = job[ranks.rank], saved[ranks.rank]
            topology = tiled(server, ranks, held)
            topology.load_state_dict(state)
            topology.join(manifest_of(held), Wishes())
            ticket = topology.reopen(0, packed)
            assert ticket is not None
            return finish(ticket)

        (expected, *_), saved = in_ranks(4, contribute), in_ranks(4, send_in_vain)
        for agreed in in_ranks(4, go_on):
            assert agreed.counted
            assert agreed.anchor_hash == expected.anchor_hash
