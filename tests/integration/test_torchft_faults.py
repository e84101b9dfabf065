"""What goes wrong between replicas of a torchft run, with two of them in one process: a real lighthouse, Managers and
gloo; what breaks is broken by hand."""

from __future__ import annotations

import builtins
import contextlib
import copy
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

os.environ.setdefault("RUST_LOG", "warn")
pytest.importorskip("torchft")

from torch.distributed import TCPStore
from torchft.coordination import LighthouseServer

from faults.proxy import Proxy
from outerstep import DiLoCoWorker
from outerstep.coordination.layers.replica_life import ReplicaLife
from outerstep.errors import AnchorsDiffer, ConfigError, OuterstepError, PlanMismatch
from outerstep.topology.torchft.process_groups import ProcessGroups
from outerstep.topology.torchft.quorum import Quorums
from outerstep.topology.torchft.rounds import RoundOutcome, Rounds, VotedRound
from outerstep.topology.update import MeanStep, anchor_hash
from support import Ledger, count, in_threads, tiny_model, train_steps, wait_until

pytestmark = pytest.mark.slow

H = 4


@pytest.fixture(scope="module")
def lighthouse() -> Iterator[str]:
    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=500, quorum_tick_ms=20, heartbeat_timeout_ms=1000
    )
    yield f"127.0.0.1:{server.address().rpartition(':')[2]}"
    server.shutdown()


def make(
    lighthouse: str, name: str, model: nn.Module, optimizer: torch.optim.Optimizer, **settings: Any
) -> DiLoCoWorker:
    usual = {
        "sync_every": H, "codec": "fp32", "min_replicas": 2, "quorum_timeout_s": 5.0, "transfer_timeout_s": 10.0,
        "exit_patience_s": 20.0, "handle_signals": False,
    }  # fmt: skip
    return DiLoCoWorker(model, optimizer, "torchft", worker_id=name, lighthouse=lighthouse, **{**usual, **settings})


def trained(
    lighthouse: str, name: str, steps: int, spoil: Callable[[int, nn.Module], None] | None = None, **settings: Any
) -> DiLoCoWorker:
    model = tiny_model(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    worker = make(lighthouse, name, model, optimizer, **settings)
    with worker:
        for step in range(steps):
            if spoil is not None:
                spoil(step, model)
            train_steps(model, optimizer, 1, seed=step)
    return worker


def anchors(worker: DiLoCoWorker) -> str:
    return anchor_hash(worker._replica.anchors[name] for names in worker.plan.fragments for name in names)


class Accounts:
    """Whose steps went into which round."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._rounds: dict[int, dict[str, int]] = {}  # by version
        agree = Rounds._agree

        def noted(rounds: Rounds, brought: Any, made: VotedRound) -> RoundOutcome:
            if made.active:
                seen = {offer.worker_id: offer.steps for offer in made.active}
                assert self._rounds.setdefault(rounds.snapshot.versions[0], seen) == seen
            return agree(rounds, brought, made)

        monkeypatch.setattr(Rounds, "_agree", noted)

    @property
    def rounds(self) -> list[dict[str, int]]:
        return list(self._rounds.values())

    def steps_of(self, name: str) -> int:
        return sum(one.get(name, 0) for one in self.rounds)

    def expected(self, name: str) -> float:
        """In a ledger, with η = 1 and no momentum."""
        return sum(one.get(name, 0) / len(one) for one in self.rounds)


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("codec", ["fp32", "int8+feedback"])
def test_a_round_that_failed_on_one_replica_loses_no_step_and_counts_none_twice(
    lighthouse: str, monkeypatch: pytest.MonkeyPatch, where: str, codec: str
) -> None:
    """Before the mean is there both vote against it; afterwards the other has it, and this one must find out."""
    accounts = Accounts(monkeypatch)
    reduce, failed = Rounds._reduce, []

    def breaking(rounds: Rounds, *args: Any) -> Any:
        fails = rounds.own.worker_id == "b" and rounds.snapshot.versions == [1] and not failed
        if fails and where == "before":
            failed.append(1)
            raise RuntimeError("the line broke")
        mean = reduce(rounds, *args)
        if fails:
            failed.append(1)
            raise RuntimeError("the line broke")
        return mean

    monkeypatch.setattr(Rounds, "_reduce", breaking)

    steps = [5 * H if where == "before" else 6 * H, 5 * H]  # the healing takes b a round

    def work(cell: int) -> DiLoCoWorker:
        model = Ledger()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        worker = make(lighthouse, "ab"[cell], model, optimizer, codec=codec, outer_lr=1.0, outer_momentum=0.0)
        with worker:
            count(model, optimizer, cell, steps[cell])
        return worker

    first, second = in_threads(lambda: work(0), lambda: work(1))
    assert failed
    assert [accounts.steps_of("a"), accounts.steps_of("b")] == steps
    assert anchors(first) == anchors(second)
    exact = 0.0 if codec == "fp32" else 0.1
    cells = second._replica.anchors["cells"].tolist()
    assert cells == pytest.approx([accounts.expected("a"), accounts.expected("b")], abs=exact)
    assert first.sync_metrics["steps_discarded"] == second.sync_metrics["steps_discarded"] == 0


def test_votes_that_keep_failing_leave_the_steps_for_a_later_round(
    lighthouse: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    accounts = Accounts(monkeypatch)
    vote, votes = Quorums.vote, []

    def stubborn(quorums: Quorums) -> bool:
        votes.append(1)
        if 2 <= len(votes) <= 4:  # the first is that of joining
            quorums.report(RuntimeError("no"))
        return vote(quorums)

    monkeypatch.setattr(Quorums, "vote", stubborn)
    seen: list[str] = []
    for name in ("met", "agreed", "failed"):
        happens = getattr(ReplicaLife, name)

        def noted(life: ReplicaLife, *args: Any, _happens: Any = happens, **more: Any) -> None:
            _happens(life, *args, **more)
            seen.append(life.place)

        monkeypatch.setattr(ReplicaLife, name, noted)
    model = Ledger(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    settings = {"codec": "int8+feedback", "outer_lr": 1.0, "outer_momentum": 0.0, "min_replicas": 1}
    with make(lighthouse, "a", model, optimizer, **settings) as worker:
        count(model, optimizer, 0, 3 * H)
    assert worker.sync_metrics["missed_rounds"] == 1
    syncs, back = "TRAINING (sync)", "ROLLBACK (reconfigure)"
    assert seen[:9] == [syncs, "TRAINING (compute)", syncs, back, syncs, back, syncs, back, syncs]
    assert worker.sync_metrics["state"] == "EXIT"
    assert accounts.rounds == [{"a": 2 * H}, {"a": H}] or accounts.rounds == [{"a": H}, {"a": H}, {"a": H}]
    assert worker._replica.anchors["cells"].item() == pytest.approx(3 * H, abs=0.1)


def crooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replica b gets one value of its second anchor wrong by the least bit."""
    straight = MeanStep.apply
    workers: list[int] = []

    def apply(update: MeanStep, name: str, start: int, stop: int, held: Tensor, *, in_place: bool = False) -> Tensor:
        block = straight(update, name, start, stop, held, in_place=in_place)
        if getattr(update, "of_b", False) and name == "0.weight" and len(workers) < 1:
            workers.append(1)
            block.view(torch.int32)[5] += 1
            update._proof._hasher.update(b"as it would have been")
        return block

    agree = Rounds._agree

    def noted(rounds: Rounds, brought: Any, made: VotedRound) -> RoundOutcome:
        outcome = agree(rounds, brought, made)
        for one in outcome.updates.values():
            if isinstance(one, MeanStep):
                one.of_b = rounds.own.worker_id == "b"  # type: ignore[attr-defined]
        return outcome

    monkeypatch.setattr(MeanStep, "apply", apply)
    monkeypatch.setattr(Rounds, "_agree", noted)


def test_anchors_that_differ_stop_the_run_on_every_replica(lighthouse: str, monkeypatch: pytest.MonkeyPatch) -> None:
    crooked(monkeypatch)

    def work(name: str) -> str:
        with pytest.raises(AnchorsDiffer) as caught:
            trained(lighthouse, name, H)  # the very last exchange is compared too
        return str(caught.value)

    said = in_threads(lambda: work("a"), lambda: work("b"))
    assert said[0] == said[1]
    assert said[0].startswith("b (process ")
    assert "on_divergence='repair'" in said[0]


def test_anchors_that_differ_can_be_repaired(lighthouse: str, monkeypatch: pytest.MonkeyPatch) -> None:
    crooked(monkeypatch)
    settings = {"on_divergence": "repair"}
    first, second = in_threads(
        lambda: trained(lighthouse, "a", 4 * H, **settings), lambda: trained(lighthouse, "b", 4 * H, **settings)
    )
    assert anchors(first) == anchors(second)
    assert first.sync_metrics["versions"] == second.sync_metrics["versions"]


def test_a_replica_whose_weights_went_bad_begins_anew_and_the_others_never_see_them(lighthouse: str) -> None:
    def spoil(step: int, model: nn.Module) -> None:
        if step == 2 * H - 1:
            with torch.no_grad():
                model[0].weight[1, 1] = float("nan")  # type: ignore[index, operator]

    first, second = in_threads(lambda: trained(lighthouse, "a", 4 * H), lambda: trained(lighthouse, "b", 4 * H, spoil))
    assert anchors(first) == anchors(second)
    assert second.sync_metrics["reloads"] == 1
    assert all(value.isfinite().all() for value in first._replica.anchors.values())


def test_who_means_another_run_is_refused_and_the_others_go_on(lighthouse: str) -> None:
    def odd() -> str:
        with pytest.raises(PlanMismatch) as caught:
            trained(lighthouse, "z", 4 * H, sync_every=2 * H, min_replicas=1)
        return str(caught.value)

    *others, said = in_threads(lambda: trained(lighthouse, "a", 10 * H), lambda: trained(lighthouse, "b", 10 * H), odd)
    assert anchors(others[0]) == anchors(others[1])
    assert "sync_every is 4 on replica a" in said or "sync_every is 4 on replica b" in said
    assert "8 on replica z" in said


def test_a_saved_run_goes_on_where_it_was(lighthouse: str) -> None:
    def work(name: str, state: dict[str, Any] | None) -> dict[str, Any]:
        model = tiny_model(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        worker = make(lighthouse, name, model, optimizer)
        if state is not None:
            model.load_state_dict(state["model"])
            worker.load_state_dict(state["worker"])
        worker.start()
        train_steps(model, optimizer, H + 1, seed=ord(name))
        kept = {
            "model": {key: value.clone() for key, value in model.state_dict().items()},
            "worker": {**worker.state_dict(), "anchors": {n: a.clone() for n, a in worker._replica.anchors.items()}},
        }
        kept["worker"]["topology"]["anchors"] = kept["worker"]["anchors"]
        kept["worker"]["topology"]["momentum"] = {
            n: m.clone() for n, m in kept["worker"]["topology"]["momentum"].items()
        }
        worker.abandon("for the test") if state is None else worker.stop()
        return kept

    before = in_threads(lambda: work("a", None), lambda: work("b", None))
    after = in_threads(lambda: work("a", before[0]), lambda: work("b", before[1]))
    assert before[0]["worker"]["topology"]["versions"] == [1]
    assert after[0]["worker"]["topology"]["versions"] == after[1]["worker"]["topology"]["versions"] == [2]
    assert after[0]["worker"]["topology"]["hashes"] == after[1]["worker"]["topology"]["hashes"]
    assert after[0]["worker"]["topology"]["run_id"] == before[0]["worker"]["topology"]["run_id"]


@pytest.mark.parametrize("later", [0, H], ids=["newest state", "old state"])
def test_a_replica_that_resumes_from_its_state_sends_no_step_twice_and_loses_none(
    lighthouse: str, monkeypatch: pytest.MonkeyPatch, later: int
) -> None:
    """`later`: the steps that it took after it had saved; with those it contributed once more."""
    accounts, is_over = Accounts(monkeypatch), threading.Event()

    def first_life() -> dict[str, Any]:
        model, optimizer, worker = ledger_replica("a")
        with contextlib.suppress(Killed), worker:
            count(model, optimizer, 0, H + 2)
            state = copy.deepcopy({"model": model.state_dict(), "worker": worker.state_dict()})
            count(model, optimizer, 0, later)
            raise Killed
        return state

    def second_life(state: dict[str, Any]) -> None:
        model, optimizer, worker = ledger_replica("a")
        model.load_state_dict(state["model"])
        worker.load_state_dict(state["worker"])
        with worker:
            count(model, optimizer, 0, 3 * H)

    def ledger_replica(name: str) -> tuple[Ledger, torch.optim.Optimizer, DiLoCoWorker]:
        model = Ledger(2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        plain = {"outer_lr": 1.0, "outer_momentum": 0.0, "min_replicas": 1}
        return model, optimizer, make(lighthouse, name, model, optimizer, **plain)

    def lives_of_a() -> None:
        try:
            state, seen = first_life(), len(accounts.rounds)
            wait_until(lambda: len(accounts.rounds) > seen + 1)  # the other goes on without it
            second_life(state)
        finally:
            is_over.set()

    def life_of_b() -> list[float]:
        model, optimizer, worker = ledger_replica("b")
        with worker:
            while not is_over.is_set():
                count(model, optimizer, 1, 1)
                time.sleep(0.01)
        return worker._replica.anchors["cells"].tolist()

    _, cells = in_threads(lives_of_a, life_of_b)
    assert accounts.steps_of("a") == (2 * H if later else H + 2) + 3 * H
    assert cells == pytest.approx([accounts.expected("a"), accounts.expected("b")])


class Killed(Exception):
    """The training loop of a replica ends here."""


def test_without_torchft_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "topology.torchft.build" or name.partition(".")[0] == "torchft":
            raise ModuleNotFoundError("No module named 'torchft'", name="torchft")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match=r"pip install .*\[torchft\]"):
        make("127.0.0.1:1", "a", tiny_model(), torch.optim.SGD(tiny_model().parameters()))


def test_no_lighthouse_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(OuterstepError, match=r"no lighthouse at 127.0.0.1:1 .*outerstep lighthouse"):
        make("127.0.0.1:1", "a", model, optimizer, join_timeout_s=0.0).start()
    with pytest.raises(ConfigError, match="TORCHFT_LIGHTHOUSE"):
        DiLoCoWorker(model, optimizer, "torchft")


def test_training_goes_on_while_the_lighthouse_is_away(lighthouse: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outerstep.topology.torchft.quorum.CONNECT_S", 1.0)
    accounts = Accounts(monkeypatch)
    model = Ledger(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    line = Proxy(lighthouse)
    worker = make(
        line.address, "a", model, optimizer, min_replicas=1, outer_lr=1.0, outer_momentum=0.0,
        offline_after_s=0.3, offline_rounds=2, quorum_timeout_s=1.0,
    )  # fmt: skip
    with line, worker:
        count(model, optimizer, 0, H)
        line.is_open = False
        line.cut_all()
        count(model, optimizer, 0, 2 * H)  # without anybody
        assert worker.sync_metrics["offline_exchanges"] == 2
        line.is_open = True
        count(model, optimizer, 0, H)
    assert accounts.steps_of("a") == 4 * H
    assert worker._replica.anchors["cells"].item() == 4 * H


def test_all_at_once_carries_the_same_bytes_as_one_by_one() -> None:
    """The way of NCCL, over gloo: three replicas, of which one brings nothing."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def work(rank: int) -> list[list[int]]:
        lines = ProcessGroups("gloo", torch.device("cpu"), 20.0)
        lines.configure(f"127.0.0.1:{store.port}/test", "x", rank, 3)
        lines.members = [0, 2]
        if rank == 1:
            lines._swap_all_at_once([], [])
            return []
        other = 1 - [0, 2].index(rank)
        out = [
            (other, torch.arange(5, dtype=torch.uint8) + 10 * rank),
            (other, torch.tensor([rank], dtype=torch.uint8)),
        ]
        into = [(other, torch.zeros(5, dtype=torch.uint8)), (other, torch.zeros(1, dtype=torch.uint8))]
        lines._swap_all_at_once(out, into)
        return [data.tolist() for _, data in into]

    got = in_threads(*(lambda rank=rank: work(rank) for rank in range(3)))
    assert got == [[[20, 21, 22, 23, 24], [2]], [], [[0, 1, 2, 3, 4], [0]]]
