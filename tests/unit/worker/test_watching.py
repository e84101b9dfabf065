"""Which loss is the first of the agreed weights, and how large the gradients were."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from outerstep.types import Watched
from outerstep.worker.watching import LOSS_MEMORY, Watching, gradient_norm
from support import tiny_model
from thread_ranks import in_ranks


def around_the_sync(watching: Watching) -> tuple[float | None, float | None]:
    return watching.loss_before_sync, watching.loss_after_sync


@pytest.mark.parametrize("began_at", [0, 400])
def test_who_reports_before_the_step_has_the_agreed_weights_in_the_next_report(began_at: int) -> None:
    watching = Watching(began_at)
    for step in range(4):
        watching.reported(10.0 - step, began_at + step)
    watching.adopted(0, None, began_at + 4)
    assert around_the_sync(watching) == (None, None)
    before = watching.inner_loss
    watching.reported(3.0, began_at + 4)
    watching.reported(2.0, began_at + 5)
    assert around_the_sync(watching) == (before, 3.0)


@pytest.mark.parametrize("began_at", [0, 400])
def test_who_reports_after_the_step_reports_one_loss_of_the_old_weights_first(began_at: int) -> None:
    watching = Watching(began_at)
    for step in range(1, 4):
        watching.reported(10.0 - step, began_at + step)
    watching.adopted(0, None, began_at + 4)
    before = watching.inner_loss
    watching.reported(6.0, began_at + 4)  # computed before the step that exchanged
    assert around_the_sync(watching) == (None, None)
    watching.reported(3.0, began_at + 5)
    assert around_the_sync(watching) == (before, 3.0)


def test_who_reports_seldom_is_not_a_report_late() -> None:
    watching = Watching()
    watching.reported(9.0, 10)
    watching.adopted(0, None, 12)
    watching.reported(8.0, 20)
    assert around_the_sync(watching) == (9.0, 8.0)


def test_the_inner_loss_is_a_running_mean() -> None:
    watching = Watching()
    assert watching.inner_loss is None
    expected = 5.0
    for step, loss in enumerate([5.0, 3.0, 4.0]):
        watching.reported(loss, step)
        expected = LOSS_MEMORY * expected + (1 - LOSS_MEMORY) * loss
    assert watching.inner_loss == pytest.approx(expected)


def test_a_loss_that_is_not_finite_is_not_hidden_by_those_before_it() -> None:
    watching = Watching()
    watching.reported(5.0, 0)
    watching.reported(None, 1)
    assert watching.inner_loss is None
    watching.reported(7.0, 2)
    assert watching.inner_loss == 7.0


def test_a_round_without_us_tells_of_the_others_and_keeps_our_last_norm() -> None:
    watching = Watching()
    watching.adopted(0, Watched(pseudo_grad_norm=2.0, aggregated_grad_norm=1.0, weight_divergence=3.0), 4)
    watching.adopted(0, Watched(aggregated_grad_norm=5.0, weight_divergence=0.0), 8)
    watching.adopted(0, None, 12)  # nothing is known of this one
    metrics = watching.metrics
    assert (metrics["pseudo_grad_norm"], metrics["aggregated_grad_norm"]) == (2.0, 5.0)


def test_fragments_are_shown_as_one_model() -> None:
    watching = Watching()
    for fragment, norm in enumerate([3.0, 4.0]):
        watching.adopted(fragment, Watched(pseudo_grad_norm=norm, weight_divergence=norm), 4)
    assert watching.metrics["pseudo_grad_norm"] == 5.0
    assert watching.metrics["weight_divergence"] == 7.0


def test_every_name_is_there_before_anything_is_known() -> None:
    assert Watching().metrics == dict.fromkeys(
        [
            "inner_loss", "inner_grad_norm", "loss_before_sync", "loss_after_sync",
            "pseudo_grad_norm", "peer_grad_similarity", "aggregated_grad_norm", "weight_divergence",
        ]
    )  # fmt: skip


# --- gradients ------------------------------------------------------------------------------------------------------


def with_gradients(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 6)).square().sum().backward()
    return optimizer


def test_the_gradient_norm_is_that_of_all_gradients_together() -> None:
    model = tiny_model()
    optimizer = with_gradients(model)
    flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    assert gradient_norm(optimizer) == pytest.approx(float(flat.double().norm()), rel=1e-6)


def test_a_sparse_gradient_counts() -> None:
    table = nn.Embedding(10, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    table(torch.tensor([1, 1, 4])).sum().backward()
    assert gradient_norm(optimizer) == pytest.approx(math.sqrt(3 * (4 + 1)))


def test_half_precision_is_summed_in_single() -> None:
    weight = nn.Parameter(torch.zeros(300, dtype=torch.bfloat16))
    weight.grad = torch.full((300,), 1.0, dtype=torch.bfloat16)
    assert gradient_norm(torch.optim.SGD([weight], lr=0.1)) == pytest.approx(math.sqrt(300), rel=1e-6)


@pytest.mark.parametrize("grad", [None, 0.0, float("nan"), float("inf")])
def test_gradients_that_are_gone_or_not_finite_have_no_norm(grad: float | None) -> None:
    weight = nn.Parameter(torch.zeros(3))
    weight.grad = None if grad is None else torch.full((3,), grad)
    assert gradient_norm(torch.optim.SGD([weight], lr=0.1)) is None


class Rows(torch.Tensor):
    """What of a DTensor this test needs."""

    def to_local(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


@pytest.mark.parametrize("replicas", [1, 2])
def test_ranks_that_hold_different_rows_know_the_norm_of_all(replicas: int) -> None:
    whole, bias = torch.arange(1.0, 9.0), torch.tensor([10.0])

    def work(ranks: object) -> float | None:
        weight, shared = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(1))
        weight.grad = whole.chunk(2)[ranks.rank % 2].clone().as_subclass(Rows)  # type: ignore[attr-defined]
        shared.grad = bias.clone()
        optimizer = torch.optim.SGD([weight, shared], lr=0.1)
        return gradient_norm(optimizer, lambda own: ranks.gather(lambda: own, float), 2)  # type: ignore[attr-defined]

    expected = float(torch.cat([whole, bias]).norm())
    assert in_ranks(2 * replicas, work) == pytest.approx([expected] * 2 * replicas)
