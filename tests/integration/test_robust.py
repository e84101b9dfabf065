"""A server with a robust rule: one attacker of five, over real HTTP; who was left out is told; kills change nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from amounts import mostly_slow
from outerstep.core.robust import RobustAggregator
from outerstep.digest import part_hash, payload_hash
from outerstep.errors import NotFinite, PlanMismatch
from outerstep.server import DiLoCoServer
from outerstep.server.store import rule_of
from outerstep.types import Commit, Participant, PutPart
from outerstep.wire.http_transport import HttpTransport
from outerstep.wire.memory import MemoryTransport
from support import (
    HandClient,
    Ledger,
    Relocatable,
    assert_same,
    count,
    in_threads,
    kill,
    make_frame,
    memory_worker,
    params_of,
    tiny_model,
    wait_until,
)

PLAIN: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32", "port": 0}
WORKERS = "abcde"
ATTACKER = "c"
RULES: dict[str, dict[str, Any]] = {
    "trimmed_mean": {"aggregation": "trimmed_mean", "trim_fraction": 0.2},
    "median": {"aggregation": "median"},
    "krum": {"aggregation": "krum"},
    "multi_krum": {"aggregation": "multi_krum"},
    "geometric_median": {"aggregation": "geometric_median"},
    "centered_clipping": {"aggregation": "centered_clipping"},
    "median of buckets": {"aggregation": "median", "bucket_size": 2, "deterministic": True},
    "mean and cosines": {"cosine_screen": True},
}


def delta(worker: str, version: int, factor: float = 1.0) -> dict[str, Tensor]:
    own = torch.Generator().manual_seed(100 * version + ord(worker))
    common = torch.Generator().manual_seed(version)
    return {
        name: factor * (torch.randn(p.shape, generator=own) + torch.randn(p.shape, generator=common))
        for name, p in params_of(tiny_model()).items()
    }


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


def contribute(server: DiLoCoServer, clients: dict[str, HandClient], deltas: dict[str, dict[str, Tensor]]) -> None:
    """One round, in the reverse order of the names."""
    version = server.sync_round
    for worker in sorted(deltas, reverse=True):
        clients[worker].contribute(make_frame(deltas[worker]), base_version=version, oldest_base=version)
    wait_until(lambda: server.sync_round == version + 1)


def by_hand(server: DiLoCoServer, workers: str = WORKERS) -> dict[str, HandClient]:
    clients = {worker: HandClient(Relocatable(server.service), worker) for worker in workers}
    for client in clients.values():
        client.join()
    return clients


def weights(participants: tuple[Participant, ...]) -> dict[str, float]:
    return {p.worker_id: p.weight for p in participants}


def left_out(server: DiLoCoServer) -> dict[str, int]:
    workers: dict[str, dict[str, Any]] = server.status()["workers"]  # type: ignore[assignment]
    return {worker: facts["left_out"] for worker, facts in workers.items() if facts["left_out"]}


@pytest.fixture
def over_http(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[DiLoCoServer, dict[str, HandClient]]]:
    settings = {**PLAIN, "insecure": True, "event_log": str(tmp_path / "events.jsonl"), **request.param}
    with DiLoCoServer(tiny_model().state_dict(), num_workers=5, **settings) as server:
        clients = {worker: HandClient(HttpTransport(f"http://{server.address}"), worker) for worker in WORKERS}
        for client in clients.values():
            client.join()
        yield server, clients
        for client in clients.values():
            client.transport.close()


@pytest.mark.parametrize("over_http", RULES.values(), ids=RULES, indirect=True)
def test_screens_and_rule_make_what_the_aggregator_makes_bit_for_bit(
    over_http: tuple[DiLoCoServer, dict[str, HandClient]],
) -> None:
    """With an attacker a thousand times too large in the first round, which the norm screen leaves out."""
    server, clients = over_http
    asked = server.config.combining
    aggregator = RobustAggregator(
        rule_of(type(asked)(**{**vars(asked), "bucket_size": 1})),
        cosine_screen=asked.cosine_screen,
        bucket_size=asked.bucket_size,
    )
    expected = params_of(tiny_model())
    for version in (1, 2):
        factors = {worker: 1000.0 if worker == ATTACKER and version == 1 else 1.0 for worker in WORKERS}
        deltas = {worker: delta(worker, version, factors[worker]) for worker in WORKERS}
        contribute(server, clients, deltas)
        made = aggregator.aggregate(list(deltas.values()), worker_ids=list(deltas), fragment=0, seed=f"0/{version}")
        expected = {name: value - made[name] for name, value in expected.items()}
        assert_same(server.get_global_params(), expected)
        assert aggregator.verdict is not None
        out = {*aggregator.verdict.refused, *aggregator.verdict.unused}
        assert (ATTACKER in aggregator.verdict.refused) == (version == 1)
        agreement = clients["a"].poll()
        assert weights(agreement.participants) == {w: 0.0 if w in out else 1.0 for w in reversed(WORKERS)}
    assert left_out(server)[ATTACKER] >= 1
    assert server.status()["pool_held_bytes"] == 0


@pytest.mark.parametrize(
    "over_http",
    [{**RULES[name], "norm_screen": 0.0} for name in RULES if name != "mean and cosines"],
    ids=[name for name in RULES if name != "mean and cosines"],
    indirect=True,
)
def test_with_no_screen_in_front_the_rule_withstands_it_alone(
    over_http: tuple[DiLoCoServer, dict[str, HandClient]],
) -> None:
    server, clients = over_http
    before = server.get_global_params()
    deltas = {worker: delta(worker, 1, 1000.0 if worker == ATTACKER else 1.0) for worker in WORKERS}
    contribute(server, clients, deltas)
    after = server.get_global_params()
    moved = flat({name: before[name] - after[name] for name in before})
    honest = [flat(deltas[worker]) for worker in WORKERS if worker != ATTACKER]
    assert float(moved.norm()) < 2 * max(float(each.norm()) for each in honest)
    assert float(torch.cosine_similarity(moved, torch.stack(honest).mean(0), dim=0)) > 0.5
    if server.config.aggregation in ("krum", "multi_krum"):
        assert ATTACKER in left_out(server)


@pytest.mark.parametrize("over_http", [{"norm_screen": 0.0}], ids=["mean"], indirect=True)
def test_and_the_plain_mean_does_not(over_http: tuple[DiLoCoServer, dict[str, HandClient]]) -> None:
    server, clients = over_http
    before = server.get_global_params()
    contribute(server, clients, {w: delta(w, 1, 1000.0 if w == ATTACKER else 1.0) for w in WORKERS})
    after = server.get_global_params()
    moved = flat({name: before[name] - after[name] for name in before})
    assert float(moved.norm()) > 100 * float(flat(delta("a", 1)).norm())


@pytest.mark.parametrize("over_http", [{"cosine_screen": True}], ids=["cosines"], indirect=True)
def test_a_flipped_contribution_is_left_out_by_its_cosine_and_everybody_can_see_it(
    over_http: tuple[DiLoCoServer, dict[str, HandClient]], tmp_path: Path
) -> None:
    server, clients = over_http
    contribute(server, clients, {w: delta(w, 1, -1.0 if w == ATTACKER else 1.0) for w in WORKERS})
    honest = [delta(w, 1) for w in WORKERS if w != ATTACKER]
    mean = {name: torch.stack([each[name] for each in honest]).mean(0) for name in honest[0]}
    for name, value in params_of(tiny_model()).items():
        torch.testing.assert_close(server.get_global_params()[name], value - mean[name])
    assert left_out(server) == {ATTACKER: 1}
    assert weights(clients["a"].poll().participants)[ATTACKER] == 0.0
    status = server.status()
    assert (status["aggregation"], status["min_workers"]) == ("mean with the cosine screen", 5)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    [told] = [event for event in events if event["event"] == "left_out"]
    assert told["worker"] == ATTACKER
    assert "its cosine with the mean of the others is" in told["why"]
    assert [event["event"] for event in events].index("left_out") < [e["event"] for e in events].index("round")


@pytest.mark.parametrize("over_http", [RULES["krum"]], ids=["krum"], indirect=True)
def test_whom_krum_did_not_choose_is_told_in_one_line(
    over_http: tuple[DiLoCoServer, dict[str, HandClient]], tmp_path: Path
) -> None:
    server, clients = over_http
    contribute(server, clients, {w: delta(w, 1) for w in WORKERS})
    found = weights(clients["a"].poll().participants)
    [chosen] = [worker for worker, weight in found.items() if weight]
    assert sorted(left_out(server)) == sorted(set(WORKERS) - {chosen})
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    [told] = [event for event in events if event["event"] == "not_chosen"]
    assert told["workers"] == sorted(set(WORKERS) - {chosen})


# --- kills ----------------------------------------------------------------------------------------------------------


KILLS: dict[str, dict[str, Any]] = {
    **{name: RULES[name] for name in ("krum", "centered_clipping", "median of buckets", "mean and cosines")},
    "two fragments": {"aggregation": "centered_clipping", "num_fragments": 2},
    "int8 down": {"aggregation": "centered_clipping", "down_codec": "int8"},
    "a torch optimizer": {
        "aggregation": "centered_clipping",
        "outer_optimizer_factory": lambda params: torch.optim.Adam(params, lr=0.01),
        "outer_lr": None,
        "outer_momentum": None,
    },
    "a quorum": {"aggregation": "centered_clipping", "quorum": 4},
}


@pytest.mark.row("F29")
@pytest.mark.parametrize("kind", mostly_slow(KILLS, ["krum", "centered_clipping", "two fragments"]))
def test_a_run_killed_between_rounds_equals_the_uninterrupted_one_bit_for_bit(kind: str, tmp_path: Path) -> None:
    """Centered clipping begins each round where the last one ended: from the journal, and from checkpoints."""
    settings = {**PLAIN, "outer_momentum": 0.9, "sync_every": 2, "save_every": 3, **KILLS[kind]}

    def start(folder: Path) -> DiLoCoServer:
        fresh = not (folder / "run.json").exists()
        server = DiLoCoServer(tiny_model().state_dict(), 5, save_dir=str(folder), **settings)
        if fresh:
            server.service.coordinator.run_id = "run"
        server.service.start()
        return server

    def run(folder: Path, kills: tuple[int, ...], stops: tuple[int, ...]) -> list[tuple[str, ...]]:
        server = start(folder)
        clients = {worker: HandClient(Relocatable(server.service), worker) for worker in WORKERS}
        for client in clients.values():
            client.join()
        hashes = []
        for version in range(1, 9):
            plan = server.service.coordinator.plan
            assert plan is not None
            for worker in WORKERS if kind != "a quorum" else WORKERS[version % 2 : 4 + version % 2]:
                whole = delta(worker, version, 1000.0 if worker == ATTACKER and version == 1 else 1.0)
                clients[worker].sequence = version
                for fragment, names in enumerate(plan.fragments):
                    by_fragment(clients[worker], make_frame({n: whole[n] for n in names}), fragment, version - 1)
            wait_until(lambda version=version, server=server: server.sync_round == version)
            hashes.append(tuple(store.newest.agreement.anchor_hash for store in server.service.stores))
            if version in kills or version in stops:
                kill(server) if version in kills else server.service.stop()
                server = start(folder)
                for client in clients.values():
                    client.transport.move(server)  # type: ignore[attr-defined]
                assert tuple(store.newest.agreement.anchor_hash for store in server.service.stores) == hashes[-1]
        server.service.stop()
        return hashes

    assert run(tmp_path / "interrupted", (1, 2, 4, 6), (5, 7)) == run(tmp_path / "smooth", (), ())


def by_fragment(client: HandClient, payload: memoryview, fragment: int, base: int) -> None:
    """Offer, parts, commit, under the client's sequence."""
    head = {**client.session.head, "fragment": fragment, "sequence": client.sequence}
    client.offer(len(payload), fragment=fragment, base_version=base, oldest_base=base)
    client.transport.call(PutPart(**head, part=0, hash=part_hash(payload)), body=payload)
    client.transport.call(Commit(**head, payload_hash=payload_hash([part_hash(payload)])))


def test_another_rule_at_a_later_start_does_not_change_what_was(tmp_path: Path) -> None:
    settings = {**PLAIN, "save_dir": str(tmp_path)}
    first = DiLoCoServer(tiny_model().state_dict(), 5, aggregation="median", **settings)
    first.service.start()
    clients = by_hand(first)
    for version in (1, 2):
        contribute(first, clients, {w: delta(w, version) for w in WORKERS})
    agreed = first.get_global_params()
    kill(first)
    second = DiLoCoServer(None, 5, aggregation="centered_clipping", **settings)
    assert_same(second.get_global_params(), agreed)
    second.service.start()
    for client in clients.values():
        client.transport.move(second)  # type: ignore[attr-defined]
    contribute(second, clients, {w: delta(w, 3) for w in WORKERS})
    made = {name: agreed[name] - value for name, value in second.get_global_params().items()}
    assert 0.0 < float(flat(made).norm()) < 2 * float(flat(delta("a", 3)).norm())
    second.service.stop()


# --- memory, and who is too few -------------------------------------------------------------------------------------


def test_contributions_wait_in_the_spool_and_not_in_memory() -> None:
    server = DiLoCoServer(tiny_model().state_dict(), 5, pool_bytes=1, aggregation="median", **PLAIN)
    server.service.start()
    clients = by_hand(server)
    for worker in "abcd":
        clients[worker].contribute(make_frame(delta(worker, 1)))
    status = server.status()
    assert (status["pool_memory_bytes"], status["pool_spooled_bytes"]) == (0, 4 * len(make_frame(delta("a", 1))))
    clients["e"].contribute(make_frame(delta("e", 1)))
    wait_until(lambda: server.sync_round == 1)
    assert server.status()["pool_spooled_bytes"] == 0
    expected = torch.stack([flat(delta(w, 1)) for w in WORKERS]).median(0).values
    assert torch.equal(flat(server.get_global_params()), flat(params_of(tiny_model())) - expected)
    server.service.stop()


def test_too_little_room_for_all_contributions_is_said_at_once() -> None:
    server = DiLoCoServer(Ledger().state_dict(), 3, pool_bytes=20, spool_bytes=0, aggregation="median", **PLAIN)
    with pytest.raises(PlanMismatch, match=r"aggregation 'median' keeps all contributions .*3 workers .* need 24"):
        HandClient(MemoryTransport(server.service)).join()


def test_with_too_few_the_round_waits_and_says_for_whom() -> None:
    server = DiLoCoServer(tiny_model().state_dict(), 5, aggregation="trimmed_mean", trim_fraction=0.25, **PLAIN)
    server.service.start()
    clients = by_hand(server)
    for worker in "abc":
        clients[worker].contribute(make_frame(delta(worker, 1)))
    for worker in "de":
        server.service.coordinator.members.gone(server.service.coordinator.members.find(worker))  # type: ignore[arg-type]
        server.service.coordinator.fragments[0].round.expected.discard(worker)
    server.service.tick(server.service.clock())
    [fragment] = server.status()["fragments"]  # type: ignore[misc]
    assert fragment["waiting_for"] == "at least 4 (trimmed_mean): 3 contributed, 0 more alive"
    assert server.sync_round == 0
    clients["d"].join()
    clients["d"].contribute(make_frame(delta("d", 1)))
    wait_until(lambda: server.sync_round == 1)
    server.service.stop()


def test_a_round_of_too_few_who_trained_moves_nothing_is_counted_and_survives(tmp_path: Path) -> None:
    settings = {**PLAIN, "save_dir": str(tmp_path), "aggregation": "median"}
    server = DiLoCoServer(tiny_model().state_dict(), 3, **settings)
    server.service.start()
    clients = by_hand(server, "abc")
    clients["a"].contribute(make_frame(delta("a", 1)), steps=0)
    for worker in "bc":
        clients[worker].contribute(make_frame(delta(worker, 1)))
    wait_until(lambda: server.sync_round == 1)
    assert_same(server.get_global_params(), params_of(tiny_model()))
    assert server.status()["rounds_too_few"] == 1
    assert left_out(server) == {"b": 1, "c": 1}
    kill(server)
    again = DiLoCoServer(None, 3, **settings)
    assert (again.sync_round, again.status()["rounds_too_few"]) == (1, 1)
    assert_same(again.get_global_params(), params_of(tiny_model()))
    again.stop()


def test_a_worker_that_sends_nothing_but_nan_does_not_stop_the_others() -> None:
    """Five are enough for a trim of 0.2, and four would not be: the one in quarantine is the one that is trimmed."""
    server = DiLoCoServer(tiny_model().state_dict(), 5, aggregation="trimmed_mean", trim_fraction=0.2, **PLAIN)
    server.service.start()
    clients = by_hand(server)
    for _ in range(3):
        with pytest.raises(NotFinite):
            clients[ATTACKER].contribute(make_frame(delta(ATTACKER, 1, float("nan"))))
    deltas = {w: delta(w, 1) for w in WORKERS}
    aggregator = RobustAggregator(trim_fraction=0.2)
    spoiled = {**deltas, ATTACKER: delta(ATTACKER, 1, float("nan"))}
    made = aggregator.aggregate(list(spoiled.values()), worker_ids=list(spoiled))
    del deltas[ATTACKER]
    contribute(server, clients, deltas)
    assert_same(
        server.get_global_params(), {name: value - made[name] for name, value in params_of(tiny_model()).items()}
    )
    server.service.stop()


def test_workers_train_and_leave_under_a_rule() -> None:
    """The median of 1, 1 and 1 in each worker's own cell is 0: with a common cell it is what all did."""
    server = DiLoCoServer(Ledger(4).state_dict(), 3, sync_every=2, aggregation="median", **PLAIN)
    server.service.start()

    def train(worker: str) -> Tensor:
        model = Ledger(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with memory_worker(server, worker, model, optimizer):
            count(model, optimizer, 3, 6)
        return model.cells.detach().clone()

    found = in_threads(*(lambda worker=worker: train(worker) for worker in "abc"))
    assert [cells.tolist() for cells in found] == [[0.0, 0.0, 0.0, 6.0]] * 3
    server.service.stop()
