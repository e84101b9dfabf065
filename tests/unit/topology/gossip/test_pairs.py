"""Rounds of two among peers in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from outerstep import DiLoCoWorker
from outerstep.errors import ConfigError, PlanMismatch
from support import in_threads, params_of, train_steps, wait_until
from unit.topology.gossip.test_gossip import PATIENCE_S, SYNC_EVERY, Around, around, make_worker  # noqa: F401 - a fixture


def start(ids: str, around: Around, **settings: Any) -> list[DiLoCoWorker]:  # noqa: F811
    """All of them, members of each other's run."""
    first = make_worker("a", min_peers=len(ids), **settings)
    workers = [first, *(make_worker(p, pattern=settings["pattern"]) for p in ids[1:])]
    for worker in workers:
        worker.start()
    wait_until(lambda: all(len(node.peer.state.members) == len(ids) for node in around.nodes.values()))
    return workers


def rounds(workers: list[DiLoCoWorker], count: int, *, still: bool = False) -> None:
    def run(worker: DiLoCoWorker) -> None:
        for number in range(count):
            if still:
                for _ in range(SYNC_EVERY):
                    for p in worker.model.parameters():
                        p.grad = torch.zeros_like(p)
                    worker.optimizer.step()
            else:
                train_steps(worker.model, worker.optimizer, SYNC_EVERY, seed=100 * ord(worker.worker_id) + number)

    in_threads(*(lambda w=w: run(w) for w in workers), timeout_s=PATIENCE_S)


def spread(workers: list[DiLoCoWorker]) -> float:
    """The largest distance between two of them, over all values."""
    everything = torch.stack([torch.cat([a.reshape(-1) for a in w._replica.anchors.values()]) for w in workers])
    return float((everything.max(0).values - everything.min(0).values).max())


def stop(workers: list[DiLoCoWorker]) -> None:
    in_threads(*(worker.stop for worker in workers), timeout_s=PATIENCE_S)


def test_the_exponential_graph_ends_with_the_mean_of_all_after_log2_n_rounds_of_standing_still(
    around: Around,  # noqa: F811
) -> None:
    workers = start("abcd", around, pattern="exponential")
    rounds(workers, 2)
    assert spread(workers) > 0.0
    mean = {n: torch.stack([w._replica.anchors[n] for w in workers]).mean(0) for n in workers[0]._replica.anchors}
    rounds(workers, 2, still=True)
    assert spread(workers) < 1e-6
    for name, value in params_of(workers[2].model).items():
        torch.testing.assert_close(value, mean[name])
    stop(workers)


@pytest.mark.slow
def test_pairs_learn_together_and_say_how_far_they_are_apart(around: Around) -> None:  # noqa: F811
    workers = start("abcd", around, pattern="pairs")
    seen: list[float] = []
    for worker in workers:
        settle = worker._topology.settle  # type: ignore[attr-defined]

        def watching(ticket: Any, *, reload: bool, settle: Any = settle) -> Any:
            agreed = settle(ticket, reload=reload)
            if agreed.watched is not None and agreed.watched.weight_divergence is not None:
                seen.append(agreed.watched.weight_divergence)
            return agreed

        worker._topology.settle = watching  # type: ignore[attr-defined]
    rounds(workers, 6)
    assert len(seen) >= 20
    assert max(seen) > 0.0
    apart = spread(workers)
    rounds(workers, 8, still=True)
    assert spread(workers) < 0.5 * apart  # the pull brings them together
    assert all(w.sync_metrics["sync_count"] == 14 for w in workers)
    stop(workers)


def test_who_has_lost_its_partner_goes_on_alone(around: Around) -> None:  # noqa: F811
    workers = start("ab", around, pattern="pairs", round_deadline_s=1.0)
    rounds(workers, 1)
    around.nodes["b"].stop()
    rounds(workers[:1], 1)
    assert workers[0].sync_metrics["versions"] == [2]
    for worker in workers:
        worker.abandon("over")


SPOILS: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda data: b"\0",
    "cut off": lambda data: data[:-8],
    "NaN for weights": lambda data: data[:-64] + b"\xff" * 64,
    "no length": lambda data: b"\xff" * 8 + data[8:],
    "a head that nests": lambda data: data.replace(b"version", b"\x91" * 7),
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("spoil", SPOILS)
def test_what_a_partner_publishes_is_read_with_care(around: Around, spoil: str) -> None:  # noqa: F811
    workers = start("ab", around, pattern="pairs", round_deadline_s=2.0)
    liar = workers[1]._topology
    honest = liar.snapshot  # type: ignore[attr-defined]

    def lie(fragment: int) -> tuple[int, memoryview] | None:
        shown = honest(fragment)
        return shown and (shown[0], memoryview(bytearray(SPOILS[spoil](bytes(shown[1])))))

    liar.snapshot = lie  # type: ignore[attr-defined]
    rounds(workers, 2)
    assert workers[0].sync_metrics["versions"] == [2]
    assert all(value.isfinite().all() for value in params_of(workers[0].model).values())
    assert around.nodes["a"].status().refused.get("b", 0) >= 1
    assert not around.nodes["a"].failure
    for worker in workers:
        worker.abandon("over")


def test_what_needs_all_is_refused_in_pairs(around: Around) -> None:  # noqa: F811
    for settings, said in (
        ({"aggregation": "median"}, "aggregation=median compares the contributions of many"),
        ({"cosine_screen": True, "min_peers": 5}, "cosine_screen=True"),
        ({"liars": 1}, "attackers=1 is for pattern='all'"),
    ):
        with pytest.raises(ConfigError, match=said):
            make_worker("a", pattern="pairs", **settings).start()


def test_a_joiner_must_know_the_pattern(around: Around) -> None:  # noqa: F811
    with make_worker("a", pattern="pairs"):
        with pytest.raises(PlanMismatch, match="--pattern pairs"):
            make_worker("b").start()
        with pytest.raises(PlanMismatch, match="pattern=exponential, but the run has pattern=pairs"):
            make_worker("b", pattern="exponential").start()
