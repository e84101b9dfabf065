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


def test_the_target_is_the_anchor_unless_it_is_other_memory() -> None:
    theta, target = drawn(0), drawn(1)
    assert FragmentState(ROLES, theta).target is theta
    assert FragmentState(ROLES, theta, target=target).target is target


def test_a_step_may_move_other_memory_than_the_target_is_in() -> None:
    one, elsewhere = state(Nesterov(1.0, 0.5)), drawn(5)
    taken = one.step({name: tensor.to("meta") for name, tensor in elsewhere.items()})
    assert taken is not None
    assert all(buf.device.type == "meta" for buf in one.momentum.values())  # it is made where the step happens


def test_it_is_fragment_zero_unless_said_otherwise() -> None:
    assert FragmentState(ROLES, drawn(0)).index == 0


def test_a_delayed_rule_counts_the_steps_of_each_fragment_by_itself() -> None:
    outer = DelayedNesterov(3)
    of = [FragmentState({"w": "parameter"}, {"w": torch.zeros(3)}, outer, index=index) for index in range(2)]
    for one in (of[0], of[1], of[1]):
        taken = one.step()
        taken.block("w", one.target["w"], torch.ones(3))
        taken.done()
    assert [outer.buffered(index) for index in range(2)] == [1, 2]


def test_a_range_begins_at_the_first_value_unless_said_otherwise() -> None:
    one = FragmentState({"w": "parameter"}, {"w": torch.zeros(3)}, Nesterov(1.0, 0.5))
    one.step().block("w", one.target["w"], torch.ones(3))
    assert one.momentum["w"].tolist() == [1.0, 1.0, 1.0]


class TestWhatIsRemembered:
    def test_a_centre_that_is_given_is_copied_in_fp32(self) -> None:
        given = {name: tensor.to(torch.bfloat16) for name, tensor in drawn(4).items()}
        one = FragmentState(ROLES, drawn(0), centre=given)
        assert {tensor.dtype for tensor in one.centre.values()} == {torch.float32}
        assert all(torch.equal(one.centre[name], given[name].float()) for name in SHAPES)

    def test_it_is_a_copy_and_the_next_is_copied_over_it(self) -> None:
        one, aggregate = state(Nesterov()), drawn(4)
        one.remember(aggregate)
        aggregate["w"].zero_()
        assert torch.equal(one.centre["w"], drawn(4)["w"])
        memory = one.centre["w"].data_ptr()
        one.remember(drawn(5))
        assert torch.equal(one.centre["w"], drawn(5)["w"])
        assert one.centre["w"].data_ptr() == memory


class TestArriving:
    def test_other_memory_becomes_anchor_and_target(self) -> None:
        one, theta, target = state(Nesterov()), drawn(1), drawn(2)
        one.arrive(1, "a", theta)
        assert one.theta is theta
        assert one.target is theta
        one.arrive(2, "b", theta, target)
        assert one.theta is theta
        assert one.target is target

    def test_without_it_both_stay_where_they_are(self) -> None:
        target = drawn(2)
        one = FragmentState(ROLES, drawn(1), target=target)
        before = one.theta
        one.arrive(7, "c")
        assert (one.version, one.anchor_hash) == (7, "c")
        assert one.theta is before
        assert one.target is target


def test_a_rule_without_momentum_writes_none() -> None:
    one = state(Nesterov())
    assert set(one.write().momentum) == {"w", "b"}
    assert one.write(momentum=False).momentum == {}


def test_momentum_that_is_read_is_made_where_theta_will_be() -> None:
    first, second = state(Nesterov()), state(Nesterov())
    step(first, drawn(1), 10)
    second.read(first.write(), {name: torch.empty(shape, device="meta") for name, shape in SHAPES.items()})
    assert all(buf.device.type == "meta" for buf in second.momentum.values())
