"""One fragment state: the step on ranges, an agreement from above, out and in again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outerstep.core.delayed import DelayedNesterov
from outerstep.core.outer import Nesterov, OuterRule, TorchOuter
from outerstep.core.state import FragmentState, Outer

ROLES = {"w": "parameter", "b": "parameter", "mean": "average", "fixed": "server"}
SHAPES: dict[str, tuple[int, ...]] = {"w": (5, 7), "b": (3,), "mean": (4,), "fixed": (2,)}


def drawn(seed: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=source) for name, shape in SHAPES.items()}


def state(outer: Outer) -> FragmentState:
    return FragmentState(ROLES, drawn(0), outer)


def step(of: FragmentState, aggregate: dict[str, Tensor], cut: int) -> None:
    taken = of.step()
    for name, g in aggregate.items():
        flat = of.target[name].view(-1)
        for start in range(0, flat.numel(), cut):
            stop = min(start + cut, flat.numel())
            taken.block(name, flat[start:stop], g.view(-1)[start:stop].clone(), start)
    taken.done()


@pytest.mark.parametrize("outer", [lambda: Nesterov(), lambda: Nesterov(portable=True), lambda: DelayedNesterov(2)])
def test_the_bits_do_not_depend_on_how_tensors_are_cut(outer) -> None:  # type: ignore[no-untyped-def]
    coarse, fine = state(outer()), state(outer())
    for turn in range(4):
        step(coarse, drawn(turn), 100)
        step(fine, drawn(turn), 2)
    for name in SHAPES:
        assert torch.equal(coarse.theta[name], fine.theta[name]), name


def test_parameters_are_stepped_averaged_buffers_take_the_mean_and_the_servers_stay() -> None:
    by_blocks, whole = state(Nesterov(1.0, 0.0)), state(Nesterov(1.0, 0.0))
    aggregate, before = drawn(1), drawn(0)
    step(by_blocks, aggregate, 3)
    whole.step_whole(aggregate)
    for name in ("w", "b", "mean"):
        assert torch.equal(by_blocks.theta[name], before[name] - aggregate[name]), name
        assert torch.equal(whole.theta[name], by_blocks.theta[name]), name
    for one in (by_blocks, whole):
        assert torch.equal(one.theta["fixed"], before["fixed"])


def test_an_optimizer_of_torch_steps_whole_tensors() -> None:
    sgd = TorchOuter(
        lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True),
        {name: SHAPES[name] for name in ("w", "b")},
    )
    ours, torchs = state(Nesterov()), state(sgd)
    assert ours.steps_by_blocks
    assert not torchs.steps_by_blocks
    for turn in range(3):
        step(ours, drawn(turn), 4)
        torchs.step_whole(drawn(turn))
    for name in SHAPES:
        assert torch.equal(ours.theta[name], torchs.theta[name]), name


def test_an_agreement_from_above_moves_the_target_and_leaves_the_momentum() -> None:
    one = state(Nesterov())
    step(one, drawn(1), 10)
    momentum, above = {name: buf.clone() for name, buf in one.momentum.items()}, drawn(2)
    one.move_to({name: above[name] for name in ("w", "mean")})
    assert torch.equal(one.target["w"], above["w"])
    assert torch.equal(one.target["mean"], above["mean"])
    assert torch.equal(one.target["fixed"], drawn(0)["fixed"])
    for name, buf in one.momentum.items():
        assert torch.equal(buf, momentum[name]), name


def test_what_is_written_and_read_goes_on_with_the_same_bits() -> None:
    outer = Nesterov.everywhere(OuterRule())
    first = state(outer)
    for turn in range(3):
        step(first, drawn(turn), 10)
    first.remember(drawn(2))
    first.arrive(3, "abc")
    snapshot = first.write()
    assert (snapshot.version, snapshot.anchor_hash) == (3, "abc")
    second = FragmentState(
        ROLES, {name: theta.clone() for name, theta in snapshot.theta.items()}, Nesterov.everywhere(OuterRule())
    )
    second.read(snapshot)
    assert all(torch.equal(second.centre[name], drawn(2)[name]) for name in SHAPES)
    for one in (first, second):
        step(one, drawn(9), 7)
    for name in SHAPES:
        assert torch.equal(first.theta[name], second.theta[name]), name
    for name, buf in first.momentum.items():
        assert torch.equal(buf, second.momentum[name]), name


def test_to_be_asked_for_the_momentum_changes_no_later_step() -> None:
    asked, other = (state(Nesterov.everywhere(OuterRule())) for _ in range(2))
    assert all(not buf.any() for buf in asked.momentum.values())
    assert not asked.outer.state_dict()  # type: ignore[union-attr]  # nothing was made by asking
    for one in (asked, other):
        step(one, drawn(1), 10)
    for name in SHAPES:
        assert torch.equal(asked.theta[name], other.theta[name]), name
