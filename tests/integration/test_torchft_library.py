"""torchft's own DiLoCo, by `make_diloco`: what it computes, its sign, and the comparison after every sync."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torchft", reason="torchft has no wheel for this platform")

from torchft import local_sgd
from torchft.local_sgd import DiLoCo

from outerstep import OuterOptimizer
from outerstep.core.outer import portable_step
from outerstep.core.pseudogradient import pseudo_gradient
from outerstep.errors import AnchorsDiffer
from outerstep.integrations.torchft import _fragments, make_diloco
from support import Ledger, assert_same, count, in_threads, params_of, tiny_model, train_steps
from torchft_replicas import (
    StandInManager,
    adamw,
    anchors,
    lighthouse,
    nesterov,
    real_manager,
    same,
    sgd,
    with_managers,
    with_stand_ins,
)

WAYS = pytest.mark.parametrize("replicas", [with_stand_ins, with_managers], ids=["stand-in", "lighthouse and gloo"])


# ------------------------------------------------------------------------------------------------ what it should do


@WAYS
def test_two_replicas_take_four_inner_steps_and_two_outer_rounds(replicas: Callable[..., list[Any]]) -> None:
    def job(manager: Any, replica: int) -> tuple[dict[str, Tensor], list[Tensor], int]:
        model = tiny_model()
        optimizer = adamw(model)
        with make_diloco(manager, model, optimizer, sync_every=2) as diloco:
            train_steps(model, optimizer, 4, seed=replica)
        states = [s for fragment in diloco._fragments for s in fragment._outer_optimizer.state.values()]
        return params_of(model), [state["momentum_buffer"] for state in states], manager.current_step()

    (first, momentum, rounds), (second, _, _) = replicas(2, job)
    assert_same(first, second)
    assert rounds == 2
    assert len(momentum) == len(first)
    assert all(buf.any() for buf in momentum)
    start = params_of(tiny_model())
    assert all(not torch.equal(first[name], start[name]) for name in start)
    assert_same(first, _two_rounds_by_hand())


def _two_rounds_by_hand() -> dict[str, Tensor]:
    """The same two rounds by core/: so the sign is the one of core/pseudogradient.py."""
    models = [tiny_model(), tiny_model()]
    optimizers = [adamw(model) for model in models]
    theta = params_of(models[0])
    momentum = {name: torch.zeros_like(value) for name, value in theta.items()}
    sources = [_batches(seed) for seed in (0, 1)]
    for _ in range(2):
        for model, optimizer, source in zip(models, optimizers, sources, strict=True):
            for _ in range(2):
                inputs = next(source)
                (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        locals_ = [params_of(model) for model in models]
        for name, value in theta.items():
            deltas = [pseudo_gradient(value, local[name]) for local in locals_]
            portable_step(value, momentum[name], torch.stack(deltas).mean(0), 0.7, 0.9)
        for model in models:
            model.load_state_dict(theta)
    return theta


def _batches(seed: int) -> Iterator[Tensor]:
    source = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(8, 6, generator=source)


@WAYS
@pytest.mark.parametrize("settings", [{"num_fragments": 4}, {"num_fragments": 4, "fragment_delay": 1}], ids=str)
def test_fragments_end_equal_on_all_replicas(replicas: Callable[..., list[Any]], settings: dict[str, Any]) -> None:
    def job(manager: Any, replica: int) -> tuple[Any, ...]:
        model = tiny_model()
        optimizer = adamw(model)
        with make_diloco(manager, model, optimizer, sync_every=8, fragment_alpha=0.25, **settings) as diloco:
            train_steps(model, optimizer, 16, seed=replica)
        before = params_of(model)
        diloco.take_global_weights()
        return anchors(diloco), before, params_of(model), manager.current_step()

    (first, own, taken, rounds), (second, its_own, its_taken, _) = replicas(2, job)
    assert rounds == 8  # each of four fragments twice
    assert_same(first, second)
    assert not same(own, its_own)  # α, and steps since a fragment's last sync
    assert_same(taken, its_taken)
    assert [value.tolist() for value in taken.values()] == [value.tolist() for value in first.values()]
    started = [value for fragment in _fragments(tiny_model(), 4) for _, value in fragment.named_parameters()]
    assert all(not torch.equal(a, b) for a, b in zip(first.values(), started, strict=True))


def test_every_trainable_parameter_is_in_exactly_one_fragment() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 4)
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.head = nn.Linear(4, 5)
            self.head.weight = self.table.weight
            self.layers[1].bias.requires_grad_(False)

    model = Tied()
    held = [id(p) for fragment in _fragments(model, 3) for p in fragment.parameters()]
    assert sorted(held) == sorted({id(p) for p in model.parameters() if p.requires_grad})


# ------------------------------------------------------------------------------------------------------------ the sign


def learned() -> list[float]:
    """Two replicas count two steps each, replica i in cell i; the outer step is "adopt the mean"."""

    def job(manager: Any, replica: int) -> list[float]:
        model = Ledger()
        optimizer = sgd(model, lr=1.0)
        with make_diloco(manager, model, optimizer, sync_every=2, outer_lr=1.0, outer_momentum=0.0):
            count(model, optimizer, replica, steps=2)
        return list(model.cells.tolist())

    first, second = with_stand_ins(2, job)
    assert first == second
    return first


def test_the_outer_step_goes_towards_what_the_replicas_learned() -> None:
    assert learned() == [1.0, 1.0]


def test_a_torchft_with_the_other_sign_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    take = local_sgd._StreamingDiLoCoFragment._save_grads

    def inverted(self: Any) -> None:
        take(self)
        for name in self._grads:
            self._grads[name] = -self._grads[name]

    monkeypatch.setattr(local_sgd._StreamingDiLoCoFragment, "_save_grads", inverted)
    assert learned() == [-1.0, -1.0]


def test_the_outer_optimizer_is_torchs_nesterov() -> None:
    ours, theirs = nn.Parameter(torch.ones(1000)), nn.Parameter(torch.ones(1000))
    portable, plain = OuterOptimizer([ours], 0.5, 0.5), torch.optim.SGD([theirs], lr=0.5, momentum=0.5, nesterov=True)
    for seed in range(5):
        gradient = torch.randn(1000, generator=torch.Generator().manual_seed(seed))
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        portable.step()
        plain.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


# ----------------------------------------------------------------------------------- comparing, after every sync


def test_replicas_that_begin_unequal_stop_with_an_error() -> None:
    """init_sync=False says that they are equal; torchft believes it."""

    def raised(manager: Any, replica: int) -> str:
        model = tiny_model(seed=replica)
        optimizer = sgd(model)
        with (
            pytest.raises(AnchorsDiffer, match=r"after outer step 1 .* fragment 0 differ .* init_sync=False") as caught,
            make_diloco(manager, model, optimizer, sync_every=2),
        ):
            train_steps(model, optimizer, 4, seed=replica)
        return str(caught.value)

    assert len(with_managers(2, raised)) == 2

    def bare(manager: Any, replica: int) -> tuple[dict[str, Tensor], int]:
        model = tiny_model(seed=replica)
        optimizer = sgd(model)
        with DiLoCo(manager, [model], optimizer, nesterov(model.parameters()), sync_every=2):
            train_steps(model, optimizer, 4, seed=replica)
        return params_of(model), manager.current_step()

    (first, rounds), (second, _) = with_stand_ins(2, bare)
    assert rounds == 2
    assert not same(first, second)


def test_a_replica_that_did_not_commit_is_not_an_error() -> None:
    """It is a step behind, and torchft heals it at its next sync."""

    def job(manager: StandInManager, replica: int) -> dict[str, Tensor]:
        model = Ledger()
        optimizer = sgd(model, lr=1.0)
        if replica == 1:
            manager.should_commit = lambda: False  # type: ignore[method-assign]
        with make_diloco(manager, model, optimizer, sync_every=2) as diloco:
            count(model, optimizer, replica, steps=2)
        return anchors(diloco)

    committed, behind = with_stand_ins(2, job)
    assert not same(committed, behind)


def test_a_peer_lost_before_the_comparison_costs_only_the_comparison(caplog: pytest.LogCaptureFixture) -> None:
    with lighthouse(
        1, join_timeout_ms=20_000, heartbeat_timeout_ms=1000
    ) as address:  # whoever heartbeats is waited for

        def job(replica: int) -> int:
            model = Ledger()
            optimizer = sgd(model, lr=1.0)
            with real_manager(address, f"replica_{replica}") as manager:
                diloco = make_diloco(manager, model, optimizer, sync_every=1)
                if replica == 1:
                    diloco._compare = lambda fragment: manager._pg.abort()  # type: ignore[method-assign]
                while manager.num_participants() < 2:
                    manager.start_quorum()
                with diloco:
                    count(model, optimizer, replica, steps=1)
                    if replica == 0:
                        count(model, optimizer, replica, steps=1)
                return manager.current_step()

        with caplog.at_level(logging.WARNING, "outerstep"):
            assert in_threads(lambda: job(0), lambda: job(1)) == [2, 1]
    assert "a peer was lost before the replicas were compared" in caplog.text
