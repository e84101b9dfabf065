"""What the server says of a round that it has closed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outerstep.core.codecs.recipe import Recipe
from outerstep.core.delayed import DelayedNesterov
from outerstep.core.outer import Nesterov
from outerstep.server.store import Addend, FragmentStore
from outerstep.types import ParameterSpec, Participant, Watched
from support import make_frame

SPECS = [ParameterSpec(name="w", shape=(3,), dtype="float32")]


def make_store() -> FragmentStore:
    return FragmentStore(0, SPECS, {"w": torch.zeros(3)}, Recipe.parse("fp32"), Recipe.parse("fp32"), 1 << 20)


def addend(values: Tensor, weight: float = 1.0) -> Addend:
    return Addend(make_frame({"w": values}), weight)


def took_part(*facts: tuple[float, float | None]) -> tuple[Participant, ...]:
    """(weight, norm) of each."""
    return tuple(Participant(worker_id=f"w{i}", sequence=1, weight=w, norm=n) for i, (w, n) in enumerate(facts))


X, Y = torch.tensor([3.0, 0.0, 0.0]), torch.tensor([0.0, 4.0, 0.0])


def test_what_was_added_before_and_what_the_step_adds_are_one_mean() -> None:
    for early in range(3):
        store = make_store()
        store.accumulate(1, [addend(X), addend(Y)][:early])
        made = store.close(1, Nesterov(), [addend(X), addend(Y)][early:])
        agreement = store.publish(made, took_part((1.0, 3.0), (1.0, 4.0))).agreement
        assert agreement.watched == Watched(
            peer_grad_similarity=0.0, aggregated_grad_norm=2.5, weight_divergence=(9 + 16) / 2 - 6.25
        )


def test_a_round_that_is_replayed_from_its_mean_is_seen_alike() -> None:
    first, again = make_store(), make_store()
    made = first.close(1, Nesterov(), [addend(X), addend(Y)], keep_mean=True)
    assert made.mean is not None
    kept, everybody = made.mean.clone(), took_part((1.0, 3.0), (1.0, 4.0))
    again.recall_mean(1, memoryview(kept.numpy()).cast("B"))
    told = [first.publish(made, everybody), again.publish(again.close(1, Nesterov()), everybody)]
    assert told[0].agreement.watched == told[1].agreement.watched


def test_where_norms_are_not_known_or_it_is_no_mean_only_the_aggregate_is_told() -> None:
    for norms, means in (((3.0, None), True), ((3.0, 4.0), False)):
        store = make_store()
        store.down.follows_means = means
        made = store.close(1, Nesterov(), [addend(X), addend(Y)])
        told = store.publish(made, took_part(*((1.0, norm) for norm in norms))).agreement.watched
        assert told == Watched(aggregated_grad_norm=2.5)


@pytest.mark.parametrize(("pushes", "expected"), [(1, Watched(aggregated_grad_norm=6.0)), (2, None)])
def test_of_pushes_only_one_alone_is_an_aggregate(pushes: int, expected: Watched | None) -> None:
    store = make_store()
    made = store.close(1, DelayedNesterov(2), [addend(X, 2.0), addend(Y)][:pushes])
    assert store.publish(made, took_part((1.0, 3.0), (1.0, 4.0))[:pushes]).agreement.watched == expected


def test_a_round_in_which_nobody_trained_moved_nothing() -> None:
    store = make_store()
    made = store.close(1, Nesterov(), [addend(torch.zeros(3), 0.0)])
    assert store.publish(made, took_part((0.0, 0.0))).agreement.watched == Watched(aggregated_grad_norm=0.0)
