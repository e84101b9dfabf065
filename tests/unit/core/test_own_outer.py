"""An outer optimizer of one's own: as a torch optimizer, block by block, and by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outerstep
from outerstep.core.outer import Nesterov, OuterRule, TorchOuter
from outerstep.core.own_outer import (
    MOST_TEXT,
    OuterOptimizer,
    OwnOuter,
    as_own_rule,
    has_update,
    named_factory,
    outer_everywhere,
    outer_of,
)
from outerstep.errors import ConfigError

SHAPES = {"w": (3, 5), "b": (7,)}


class Clipped(OuterOptimizer):
    """With an option of its own."""

    def __init__(self, params: Any, lr: float = 0.5, most: float = 1.0) -> None:
        super().__init__(params, lr, most=most)

    def update(self, theta: Tensor, g: Tensor, momentum: Tensor, options: Mapping[str, Any]) -> None:
        momentum.add_(g)
        theta.sub_(momentum.clamp(-options["most"], options["most"]).mul_(options["lr"]))


class Stepping(OuterOptimizer):
    """As one writes a torch optimizer: it steps whole tensors."""

    @torch.no_grad()
    def step(self, pseudo_gradients: Mapping[str, Tensor] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad)


class Family:
    class Inner(OuterOptimizer):
        pass


class Heavy(OuterOptimizer):
    def __init__(self, params: Any, mass: float) -> None:
        super().__init__(params, mass=mass)


def values(seed: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=source) for name, shape in SHAPES.items()}


def test_it_is_a_public_name() -> None:
    assert outerstep.OuterOptimizer is OuterOptimizer
    assert issubclass(OuterOptimizer, torch.optim.Optimizer)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.9, True), (0.9, False), (0.0, False)])
def test_by_itself_it_is_the_rule_that_ships_where_everybody_steps(momentum: float, nesterov: bool) -> None:
    model = nn.ParameterDict(values(0))
    optimizer = OuterOptimizer(model.named_parameters(), 0.7, momentum, nesterov)
    theta, rule = values(0), Nesterov.everywhere(OuterRule(0.7, momentum, nesterov))
    for turn in range(1, 4):
        given = values(turn)
        optimizer.step(given)
        rule.step(theta, values(turn))
        assert all(torch.equal(given[name], values(turn)[name]) for name in SHAPES), "what it was given is the caller's"
    for name, param in model.named_parameters():
        assert torch.equal(param.detach(), theta[name]), name


def test_pseudo_gradients_are_matched_by_name_and_never_by_their_order() -> None:
    model = nn.ParameterDict(values(0))
    OuterOptimizer(model.named_parameters(), 1.0, 0.0).step({"b": values(1)["b"]})
    assert torch.equal(model["w"], values(0)["w"]), "who is not named does not move"
    assert torch.equal(model["b"], values(0)["b"] - values(1)["b"])
    with pytest.raises(ConfigError, match=r"no parameter 'c' \(it has b, w …\): make it with model.named_parameters"):
        OuterOptimizer(model.named_parameters()).step({"c": torch.ones(1)})
    with pytest.raises(ConfigError, match=r"no parameter 'w' \(it was given none\)"):
        OuterOptimizer(model.parameters()).step(values(1))


@pytest.mark.parametrize("cut", [1, 4, 100])
def test_a_subclass_steps_blocks_with_the_bits_of_whole_tensors(cut: int) -> None:
    outer, whole = outer_of(Clipped, SHAPES), TorchOuter(Clipped, SHAPES)
    assert isinstance(outer, OwnOuter)
    theta, expected = values(0), values(0)
    for turn in range(1, 4):
        step, grads = outer.begin(theta), values(turn)
        for name, tensor in theta.items():
            for start in range(0, tensor.numel(), cut):
                block = slice(start, start + cut)
                step.block(name, tensor.view(-1)[block], grads[name].view(-1)[block].clone(), start)
        step.done()
        whole.step(expected, values(turn))
    assert all(torch.equal(theta[name], expected[name]) for name in SHAPES)
    again = outer_of(Clipped, SHAPES)
    again.load_state_dict(outer.state_dict())
    theta_again = {name: tensor.clone() for name, tensor in theta.items()}
    outer.step(theta, values(9))
    again.step(theta_again, values(9))
    assert all(torch.equal(theta[name], theta_again[name]) for name in SHAPES)


def test_each_group_has_its_own_options() -> None:
    def make(params: Any) -> OuterOptimizer:
        first, *rest = params
        return OuterOptimizer([{"params": [first], "lr": 0.25}, {"params": rest}], 1.0, 0.0)

    outer, theta = outer_of(make, SHAPES), values(0)
    outer.step(theta, values(1))
    for name, lr in (("w", 0.25), ("b", 1.0)):
        assert torch.equal(theta[name], values(0)[name] - values(1)[name] * lr)
    with pytest.raises(ConfigError, match="'b' is not"):
        outer_of(lambda params: OuterOptimizer(list(params)[:1]), SHAPES)


def test_one_that_steps_by_itself_is_stepped_as_any_torch_optimizer() -> None:
    assert isinstance(outer_of(Stepping, SHAPES), TorchOuter)
    assert isinstance(outer_of(lambda params: torch.optim.Adam(params), SHAPES), TorchOuter)
    for _ in range(2):  # torch wraps `step` when it makes the first
        made = [kind([nn.Parameter(torch.zeros(1))]) for kind in (OuterOptimizer, Clipped, Stepping)]
        assert [has_update(one) for one in made] == [True, True, False]


def test_a_step_that_takes_pseudo_gradients_gets_them_by_name() -> None:
    class Plain(OuterOptimizer):
        def step(self, pseudo_gradients: Mapping[str, Tensor]) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for name, param in zip(group["param_names"], group["params"], strict=True):
                    if name in pseudo_gradients:
                        param.data.sub_(pseudo_gradients[name], alpha=group["lr"])

    outer, theta = outer_of(lambda params: Plain(params, lr=0.5), SHAPES), values(0)
    outer.step({"b": theta["b"]}, {"b": values(1)["b"]})
    assert torch.equal(theta["b"], values(0)["b"] - 0.5 * values(1)["b"])
    outer.step(theta, values(2))
    assert torch.equal(theta["w"], values(0)["w"] - 0.5 * values(2)["w"])


@pytest.mark.parametrize("wrong", [{"lr": 0.0}, {"lr": float("nan")}, {"momentum": 1.0}])
def test_values_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"outer (lr|momentum) must be"):
        OuterOptimizer([nn.Parameter(torch.zeros(1))], **wrong)  # type: ignore[arg-type]


class TestByName:
    @pytest.mark.parametrize("name", ["adamw", "AdamW", "sgd", "RMSprop"])
    def test_a_class_of_torch(self, name: str) -> None:
        made = named_factory(name, {"lr": 0.25})([nn.Parameter(torch.zeros(1))])
        assert type(made).__name__.lower() == name.lower()
        assert made.param_groups[0]["lr"] == 0.25

    def test_a_class_of_a_module(self) -> None:
        made = named_factory(f"{__name__}:Clipped", {"most": 2.0})([nn.Parameter(torch.zeros(1))])
        assert isinstance(made, Clipped)
        assert made.param_groups[0]["most"] == 2.0

    @pytest.mark.parametrize(
        ("name", "problem"),
        [
            ("adamm", r"nesterov, one of torch.optim \(.*adamw.*\), or module:Class of your own, got 'adamm'"),
            ("optimizer", "got 'optimizer'"),
            ("no_such_module:Rule", "'no_such_module:Rule' cannot be found: No module named"),
            ("math:Rule", "'math:Rule' cannot be found: .*Rule"),
            (":Rule", "':Rule' cannot be found"),
            ("math:pi", "'math:pi' is neither"),
            ("torch.optim:Optimizer", "'torch.optim:Optimizer' is neither"),
        ],
    )
    def test_what_is_none_is_refused_by_name(self, name: str, problem: str) -> None:
        with pytest.raises(ConfigError, match=problem):
            named_factory(name, {})

    def test_options_that_it_has_not_are_refused_by_name(self) -> None:
        with pytest.raises(ConfigError, match=r"outer_optimizer 'adam' cannot be made with lr=0.1 mass=3: .*mass"):
            named_factory("adam", {"lr": 0.1, "mass": 3})([nn.Parameter(torch.zeros(1))])

    def test_without_a_server_it_says_the_same_everywhere(self) -> None:
        name = f"{__name__}:Clipped"
        one, other = (
            as_own_rule(name, options, "here") for options in ({"lr": 1.0, "most": 2}, {"most": 2, "lr": 1.0})
        )
        assert one == other
        assert one.own is not None
        assert one.own.name == f"{name} lr=1.0 most=2"
        assert one.keeps_momentum

    @pytest.mark.parametrize("name", ["adam", f"{__name__}:Stepping"])
    def test_where_everybody_steps_only_an_update_will_do(self, name: str) -> None:
        with pytest.raises(ConfigError, match=f"in a ring everybody takes the outer step.*got '{name}'; use a server"):
            as_own_rule(name, {}, "in a ring")

    def test_a_class_inside_a_class(self) -> None:
        made = named_factory(f"{__name__}:Family.Inner", {})([nn.Parameter(torch.zeros(1))])
        assert isinstance(made, Family.Inner)

    def test_one_that_lacks_an_option_is_refused_saying_what_it_was_given(self) -> None:
        with pytest.raises(ConfigError, match=r"cannot be made with nothing: .*mass"):
            named_factory(f"{__name__}:Heavy", {})([nn.Parameter(torch.zeros(1))])

    def test_what_members_tell_each_other_of_it_is_bounded(self) -> None:
        name = f"{__name__}:Clipped"
        left = MOST_TEXT - len(f"{name} most=")
        assert as_own_rule(name, {"most": "m" * left}, "here").own is not None
        with pytest.raises(ConfigError, match=f"at most {MOST_TEXT} characters, got {MOST_TEXT + 1}"):
            as_own_rule(name, {"most": "m" * (left + 1)}, "here")


class TestEverywhere:
    """Everybody steps its own copy."""

    def test_without_a_rule_of_ones_own_it_is_the_one_that_ships(self) -> None:
        rule = OuterRule(0.5, 0.8)
        theirs, ours = outer_everywhere(rule, values(0)), Nesterov.everywhere(rule)
        assert type(theirs) is type(ours)
        a, b = values(0), values(0)
        for turn in (1, 2):
            theirs.step(a, values(turn))
            ours.step(b, values(turn))
        assert all(torch.equal(a[name], b[name]) for name in SHAPES)

    def test_a_rule_of_ones_own_steps_as_it_does_anywhere(self) -> None:
        everywhere = outer_everywhere(as_own_rule(f"{__name__}:Clipped", {"most": 0.25}, "here"), values(0))
        assert isinstance(everywhere, OwnOuter)
        model, theta = nn.ParameterDict(values(0)), values(0)
        optimizer = Clipped(model.named_parameters(), most=0.25)
        for turn in (1, 2):
            everywhere.step(theta, values(turn))
            optimizer.step(values(turn))
        assert all(torch.equal(theta[name], model[name]) for name in SHAPES)


def test_its_defaults_are_those_of_the_rule_that_ships() -> None:
    [group] = OuterOptimizer([nn.Parameter(torch.zeros(1))]).param_groups
    rule = OuterRule()
    assert (group["lr"], group["momentum"], group["nesterov"]) == (rule.lr, rule.momentum, rule.nesterov)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_pseudo_gradients_of_another_type_move_parameters_of_theirs(dtype: torch.dtype) -> None:
    ours, theirs = nn.ParameterDict(values(0)), nn.ParameterDict(values(0))
    rounded = {name: value.to(dtype) for name, value in values(1).items()}
    OuterOptimizer(ours.named_parameters()).step(rounded)
    OuterOptimizer(theirs.named_parameters()).step({name: value.float() for name, value in rounded.items()})
    assert all(torch.equal(ours[name], theirs[name]) for name in SHAPES)
