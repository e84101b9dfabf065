"""The outer step: the built-in rule, and any torch optimizer in its place."""

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from amounts import cases
from other_vectors import computed_elsewhere
from outerstep.core.outer import (
    STEP_VALUES,
    MomentumBuffers,
    NamedOptimizer,
    Nesterov,
    OptimizerFactory,
    OuterRule,
    State,
    TorchOuter,
    build_optimizer,
    check_factory,
    portable_step,
)
from outerstep.errors import ConfigError

SHAPES: dict[str, tuple[int, ...]] = {"a": (3, 7), "b": (33,), "c": ()}


class Counting(torch.optim.Optimizer):
    """Keeps a number, a word and nothing at all beside its tensor, and steps by the number."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["count"] = state.get("count", 0) + 1
                state["mode"] = "odd" if state["count"] % 2 else "even"
                state["unused"] = None
                state["sum"] = state.get("sum", torch.zeros_like(param)) + param.grad
                param.add_(state["sum"], alpha=(-1.0 if state["mode"] == "odd" else 0.25) / state["count"])


FACTORIES: dict[str, OptimizerFactory] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True),
    "sgd with decay": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, weight_decay=0.1),
}
BUILDERS: dict[str, Callable[[], NamedOptimizer]] = {
    "built-in": Nesterov,
    "built-in, plain momentum": lambda: Nesterov(0.5, 0.5, nesterov=False),
    **{name: lambda factory=factory: TorchOuter(factory, SHAPES) for name, factory in FACTORIES.items()},
}
every_optimizer = pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS.keys())
RESUMABLE: dict[str, OptimizerFactory] = {
    **FACTORIES,
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "counting": Counting,
}
every_resumable_factory = pytest.mark.parametrize("factory", RESUMABLE.values(), ids=RESUMABLE.keys())
every_factory = pytest.mark.parametrize("factory", FACTORIES.values(), ids=FACTORIES.keys())


def values(seed: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def only(tensors: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: tensors[name] for name in names}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def same_state(a: State, b: State) -> bool:
    """Same names and keys; tensors bit for bit, the rest by value."""
    return a.keys() == b.keys() and all(
        a[name].keys() == b[name].keys() and all(same_value(a[name][key], b[name][key]) for key in a[name])
        for name in a
    )


def same_value(a: object, b: object) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)


def only_state(state: State, *names: str) -> State:
    return {name: state[name] for name in names}


def torchs_own(
    factory: OptimizerFactory, start: dict[str, Tensor], grads: list[dict[str, Tensor]]
) -> dict[str, Tensor]:
    """What torch makes of the same gradients when nobody stands in between."""
    params = {name: nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    optimizer = factory(list(params.values()))
    for grad in grads:
        for name, param in params.items():
            param.grad = grad[name].clone()
        optimizer.step()
    return {name: param.detach() for name, param in params.items()}


class TestEveryOuterOptimizer:
    @every_optimizer
    def test_it_moves_the_callers_tensors_in_place_and_leaves_the_gradients_alone(
        self, build: Callable[[], NamedOptimizer]
    ) -> None:
        params, grads = values(0), values(1)
        before, memory = copied(params), {name: p.data_ptr() for name, p in params.items()}
        build().step(params, grads)
        assert {name: p.data_ptr() for name, p in params.items()} == memory
        assert not any(torch.equal(params[name], before[name]) for name in params)
        assert same(grads, values(1))

    @every_optimizer
    def test_it_remembers_no_memory_of_the_callers_gradients(self, build: Callable[[], NamedOptimizer]) -> None:
        first, second = build(), build()
        reused, fresh = values(0), values(0)
        buffer = values(1)
        first.step(reused, buffer)
        second.step(fresh, values(1))
        for name, tensor in values(2).items():
            buffer[name].copy_(tensor)  # the server reuses the memory of its sums
        first.step(reused, buffer)
        second.step(fresh, values(2))
        assert same(reused, fresh)

    @every_optimizer
    def test_a_fragment_steps_alone_and_its_state_with_it(self, build: Callable[[], NamedOptimizer]) -> None:
        together, params = build(), values(0)
        alone = {"a": build(), "b": build()}
        expected = values(0)
        for turn, name in enumerate(["a", "b", "a", "a", "b"]):
            grads = values(10 + turn)
            others = copied({n: p for n, p in params.items() if n != name})
            together.step(only(params, name), only(grads, name))
            alone[name].step(only(expected, name), only(grads, name))
            assert same({n: params[n] for n in others}, others)
        assert same(params, expected)
        assert together.state_dict().keys() == {"a", "b"}

    @every_optimizer
    def test_state_is_found_by_name_whatever_the_order(self, build: Callable[[], NamedOptimizer]) -> None:
        forwards, backwards = values(0), values(0)
        first, second = build(), build()
        for seed in (1, 2, 3):
            grads = values(seed)
            first.step(forwards, grads)
            second.step(only(backwards, "c", "b", "a"), only(grads, "b", "a", "c"))
        assert same(forwards, backwards)

    @every_optimizer
    def test_a_fresh_one_has_no_state(self, build: Callable[[], NamedOptimizer]) -> None:
        assert build().state_dict() == {}

    @every_optimizer
    def test_a_reloaded_one_continues_identically(self, build: Callable[[], NamedOptimizer]) -> None:
        params, optimizer = values(0), build()
        optimizer.step(params, values(1))
        optimizer.step(only(params, "a"), only(values(2), "a"))  # fragments at different rounds
        restored, resumed = copied(params), build()
        resumed.load_state_dict({name: copied(entry) for name, entry in optimizer.state_dict().items()})
        for seed in (3, 4):
            optimizer.step(params, values(seed))
            resumed.step(restored, values(seed))
        assert same(params, restored)
        for name, entry in optimizer.state_dict().items():
            assert same(resumed.state_dict()[name], entry)

    @every_optimizer
    def test_loading_copies_so_that_two_of_them_never_share_state(self, build: Callable[[], NamedOptimizer]) -> None:
        params, optimizer = values(0), build()
        optimizer.step(params, values(1))
        saved = {name: copied(entry) for name, entry in optimizer.state_dict().items()}
        build_two = build()
        build_two.load_state_dict(optimizer.state_dict())
        build_two.step(copied(params), values(2))
        assert all(same(optimizer.state_dict()[name], entry) for name, entry in saved.items())

    @every_optimizer
    def test_the_state_it_shows_is_the_live_one(self, build: Callable[[], NamedOptimizer]) -> None:
        params, optimizer = values(0), build()
        optimizer.step(params, values(1))
        shown = optimizer.state_dict()["a"]
        before = copied(shown)
        optimizer.step(params, values(2))
        assert not any(torch.equal(shown[key], before[key]) for key in before)


class TestNesterov:
    @cases(40)
    @given(
        seed=st.integers(0, 2**31),
        numel=st.integers(1, 200),
        lr=st.floats(0.01, 2.0),
        rule=st.sampled_from([(0.9, True), (0.5, True), (0.9, False), (0.0, False)]),
    )
    def test_it_is_torchs_sgd_bit_for_bit(self, seed: int, numel: int, lr: float, rule: tuple[float, bool]) -> None:
        momentum, nesterov = rule
        shapes: dict[str, tuple[int, ...]] = {"w": (numel,), "s": ()}
        grads = [values(seed + i, shapes) for i in range(1, 5)]
        params, optimizer = values(seed, shapes), Nesterov(lr, momentum, nesterov=nesterov)
        for grad in grads:
            optimizer.step(params, grad)

        def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, lr=lr, momentum=momentum, nesterov=nesterov, foreach=False)

        assert same(params, torchs_own(sgd, values(seed, shapes), grads))

    @pytest.mark.parametrize(
        ("momentum", "nesterov", "first", "second"),
        [
            (0.5, True, -0.75, -1.625),  # buf 1 then 1.5: −½·(1 + ½), −½·(1 + ¾)
            (0.5, False, -0.5, -1.25),  # −½·1, −½·1.5
            (0.0, True, -0.5, -1.0),
        ],
    )
    def test_two_steps_by_hand(self, momentum: float, nesterov: bool, first: float, second: float) -> None:
        params, grads = {"w": torch.zeros(1)}, {"w": torch.ones(1)}
        optimizer = Nesterov(0.5, momentum, nesterov=nesterov)
        optimizer.step(params, grads)
        assert params["w"].item() == first
        optimizer.step(params, grads)
        assert params["w"].item() == second

    def test_the_default_is_the_papers(self) -> None:
        assert Nesterov().rule == OuterRule(0.7, 0.9, True)

    def test_lr_one_without_momentum_is_plain_averaging(self) -> None:
        params = {"w": torch.tensor([8.0, 3.0])}
        Nesterov(1.0, 0.0).step(params, {"w": torch.tensor([2.0, -1.0])})
        assert params["w"].tolist() == [6.0, 4.0]

    def test_without_momentum_there_is_nothing_to_remember(self) -> None:
        optimizer = Nesterov(0.7, 0.0)
        optimizer.step(values(0), values(1))
        assert optimizer.state_dict() == {}

    @pytest.mark.parametrize("lr", [0.0, -0.1, float("nan"), float("inf"), -float("inf")])
    def test_a_learning_rate_that_is_not_positive_and_finite_is_refused(self, lr: float) -> None:
        with pytest.raises(ConfigError, match=rf"^outer lr must be a number > 0, got {lr}$"):
            Nesterov(lr)

    @pytest.mark.parametrize("momentum", [1.0, -0.1, 2.0, float("nan")])
    def test_a_momentum_out_of_range_is_refused(self, momentum: float) -> None:
        with pytest.raises(ConfigError, match=rf"momentum must be in \[0, 1\), got {momentum}"):
            Nesterov(0.7, momentum)


class TestTorchOuter:
    @every_factory
    def test_it_equals_the_optimizer_on_its_own_bit_for_bit(self, factory: OptimizerFactory) -> None:
        params, optimizer = values(0), TorchOuter(factory, SHAPES)
        grads = [values(seed) for seed in range(1, 6)]
        for grad in grads:
            optimizer.step(params, grad)
        assert same(params, torchs_own(factory, values(0), grads))

    def test_sgd_equals_the_built_in_rule_bit_for_bit(self) -> None:
        ours, theirs = values(0), values(0)
        built_in, wrapped = Nesterov(0.7, 0.9), TorchOuter(FACTORIES["sgd"], SHAPES)
        for seed in range(1, 6):
            built_in.step(ours, values(seed))
            wrapped.step(theirs, values(seed))
        assert same(ours, theirs)
        assert same(built_in.state_dict()["a"], wrapped.state_dict()["a"])

    def test_it_follows_the_caller_to_other_memory(self) -> None:
        optimizer = TorchOuter(FACTORIES["sgd"], SHAPES)
        params = values(0)
        optimizer.step(params, values(1))
        left, moved = copied(params), copied(params)
        optimizer.step(moved, values(2))
        assert same(params, left)
        assert not same(moved, left)

    @every_resumable_factory
    def test_it_resumes_identically_whatever_the_optimizer_remembers(self, factory: OptimizerFactory) -> None:
        params, optimizer = values(0), TorchOuter(factory, SHAPES)
        optimizer.step(params, values(1))
        optimizer.step(only(params, "a"), only(values(2), "a"))  # fragments at different rounds
        restored, resumed = copied(params), TorchOuter(factory, SHAPES)
        resumed.load_state_dict(optimizer.state_dict())
        for seed in (3, 4, 5):
            optimizer.step(params, values(seed))
            resumed.step(restored, values(seed))
        assert same(params, restored)
        assert same_state(optimizer.state_dict(), resumed.state_dict())

    def test_what_is_no_tensor_is_kept_too(self) -> None:
        optimizer, resumed = TorchOuter(Counting, SHAPES), TorchOuter(Counting, SHAPES)
        params = values(0)
        optimizer.step(params, values(1))
        optimizer.step(only(params, "a"), only(values(2), "a"))
        resumed.load_state_dict(optimizer.state_dict())
        found = {name: (e["count"], e["mode"], e["unused"]) for name, e in resumed.state_dict().items()}
        assert found == {"a": (2, "even", None), "b": (1, "odd", None), "c": (1, "odd", None)}

    @every_resumable_factory
    def test_loading_replaces_what_was_there_and_merges_nothing(self, factory: OptimizerFactory) -> None:
        """An optimizer that went its own way for a while forgets all of it: fragments, keys and values."""
        saved = TorchOuter(factory, SHAPES)
        saved.step(only(values(0), "a", "b"), only(values(1), "a", "b"))
        state = only_state(saved.state_dict(), "a")
        used = TorchOuter(factory, SHAPES)
        for seed in (2, 3):
            used.step(values(0), values(seed))
        used.load_state_dict(state)
        assert same_state(used.state_dict(), state)
        used.load_state_dict({})
        assert used.state_dict() == {}

    def test_the_built_in_one_replaces_as_well(self) -> None:
        saved, used = Nesterov(), Nesterov()
        saved.step(only(values(0), "a"), only(values(1), "a"))
        used.step(values(0), values(2))
        used.load_state_dict(saved.state_dict())
        assert same_state(used.state_dict(), saved.state_dict())

    def test_adams_state_is_kept_whole_by_parameter_name(self) -> None:
        optimizer = TorchOuter(FACTORIES["adam"], SHAPES)
        optimizer.step(only(values(0), "b"), only(values(1), "b"))
        state = optimizer.state_dict()
        assert state.keys() == {"b"}
        assert state["b"].keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert state["b"]["exp_avg"].shape == SHAPES["b"]

    @pytest.mark.parametrize("made", [None, [], torch.optim.SGD, "sgd"], ids=["None", "list", "class", "text"])
    def test_a_factory_that_makes_no_optimizer_is_refused_with_an_example(self, made: object) -> None:
        def factory(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
            return made  # type: ignore[return-value]

        with pytest.raises(
            ConfigError, match=rf"must return a torch\.optim\.Optimizer, got {type(made).__name__}"
        ) as e:
            check_factory(factory)
        assert "lambda params: torch.optim.SGD" in str(e.value)

    @every_factory
    def test_a_good_factory_passes_the_check(self, factory: OptimizerFactory) -> None:
        check_factory(factory)


class TestPortable:
    """The form for ranks that each step their own copy."""

    @staticmethod
    def run(lr: float, momentum: float, nesterov: bool, portable: bool) -> Tensor:
        """Ten steps of half a million values, made from integers alone."""
        index = torch.arange(500_000)
        theta, buf = (index * 2654435761 % 2**24).float() * 2.0**-24, torch.zeros(len(index))
        rule = Nesterov(lr, momentum, nesterov=nesterov)
        for i in range(10):
            g = ((index + i) * 40503 % 2**20 - 2**19).float() * 2.0**-22
            if portable:
                portable_step(theta, buf, g, lr, momentum, nesterov=nesterov)
            else:
                rule.step({"theta": theta}, {"theta": g})
        return theta

    @pytest.mark.parametrize("nesterov", [True, False])
    @pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.5), (0.5, 0.25), (2.0, 0.0)])
    def test_with_powers_of_two_it_has_the_bits_of_the_usual_form(
        self, lr: float, momentum: float, nesterov: bool
    ) -> None:
        assert torch.equal(self.run(lr, momentum, nesterov, True), self.run(lr, momentum, nesterov, False))

    @pytest.mark.parametrize("nesterov", [True, False])
    def test_else_it_differs_by_roundings_only(self, nesterov: bool) -> None:
        usual, portable = self.run(0.7, 0.9, nesterov, False), self.run(0.7, 0.9, nesterov, True)
        assert (usual - portable).abs().max() <= 1e-6 * usual.abs().max()

    @classmethod
    def digest(cls) -> str:
        return hashlib.sha256(cls.run(0.7, 0.9, True, True).numpy().tobytes()).hexdigest()

    @pytest.mark.slow
    @pytest.mark.parametrize("capability", ["default", "avx2"])
    def test_neither_vectors_nor_threads_change_a_bit(self, capability: str) -> None:
        assert computed_elsewhere(__file__, "t.TestPortable.digest()", capability) == {self.digest()}


class TestMomentumBuffers:
    def test_a_buffer_begins_as_fp32_zeros_whatever_the_parameter_is_made_of(self) -> None:
        buffer = MomentumBuffers().of("w", torch.ones(2, 3, dtype=torch.bfloat16))
        assert buffer.dtype == torch.float32
        assert buffer.tolist() == [0.0] * 6

    def test_it_is_the_same_memory_every_time(self) -> None:
        buffers, like = MomentumBuffers(), torch.ones(3)
        buffers.of("w", like).fill_(2.0)
        assert buffers.of("w", like).tolist() == [2.0, 2.0, 2.0]
        assert buffers.of("w", like).data_ptr() == buffers.tensors["w"].data_ptr()

    def test_it_is_where_the_parameter_is_and_follows_it(self) -> None:
        buffers, elsewhere = MomentumBuffers(), torch.empty(3, device="meta")
        assert buffers.of("new", elsewhere).device == elsewhere.device
        buffers.of("moved", torch.ones(3))
        assert buffers.of("moved", elsewhere).device == elsewhere.device
        assert buffers.tensors["moved"].device == elsewhere.device

    def test_what_is_loaded_is_a_contiguous_copy(self) -> None:
        buffers, given = MomentumBuffers(), torch.arange(6.0).view(2, 3).t()
        buffers.load({"w": given})
        given.zero_()
        assert buffers.flat["w"].tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]


class TestTheSameBitsEverywhere:
    """`Nesterov.everywhere`: the rule of a run in which everybody steps its own copy."""

    @pytest.mark.parametrize("nesterov", [True, False])
    @pytest.mark.parametrize("momentum", [0.0, 0.8])
    def test_it_steps_as_portable_step_does_with_the_rules_numbers(self, momentum: float, nesterov: bool) -> None:
        rule = OuterRule(0.3, momentum, nesterov)
        theta, expected, buf = values(0), values(0), {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        outer = Nesterov.everywhere(rule)
        for turn in (1, 2):
            outer.step(theta, values(turn))
            for name, g in values(turn).items():
                portable_step(expected[name], buf[name], g, rule.lr, rule.momentum, nesterov=rule.nesterov)
        assert same(theta, expected)

    def test_a_block_longer_than_a_cut_moves_whole(self) -> None:
        count = STEP_VALUES + 5
        theta, g = torch.zeros(count), torch.full((count,), -1.0)
        Nesterov.everywhere(OuterRule(0.5, 0.5)).step({"w": theta}, {"w": g})
        assert torch.equal(theta, torch.full((count,), 0.75))

    def test_a_block_begins_at_the_first_value_unless_said_otherwise(self) -> None:
        said, unsaid = ({"w": torch.zeros(4)} for _ in range(2))
        outers = Nesterov(0.5, 0.5), Nesterov(0.5, 0.5)
        outers[0].begin(said).block("w", said["w"], torch.ones(4), 0)
        outers[1].begin(unsaid).block("w", unsaid["w"], torch.ones(4))
        assert same(said, unsaid)


def test_the_parameters_given_to_a_factory_want_no_gradient_of_their_own() -> None:
    seen: list[bool] = []

    def factory(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        params = list(params)
        seen.extend(param.requires_grad for param in params)
        return torch.optim.SGD(params, lr=0.1)

    TorchOuter(factory, SHAPES)
    assert seen == [False, False, False]


def test_a_step_that_takes_whatever_it_is_given_is_given_nothing() -> None:
    class Wrapped(torch.optim.SGD):
        def step(self, *args: Any, **more: Any) -> None:  # type: ignore[override]
            assert not args
            super().step(*args, **more)

    theta = {"w": torch.ones(2)}
    TorchOuter(lambda params: Wrapped(params, lr=1.0), {"w": (2,)}).step(theta, {"w": torch.ones(2)})
    assert theta["w"].tolist() == [0.0, 0.0]


def test_parameters_are_made_where_they_are_asked_for() -> None:
    for device in ("cpu", "meta"):
        params, _ = build_optimizer(lambda all_: torch.optim.SGD(all_, lr=1.0), {"w": (2, 3)}, device)
        assert (params["w"].device.type, tuple(params["w"].shape)) == (device, (2, 3))


def test_a_factory_that_fails_is_named_as_the_setting_it_comes_from() -> None:
    def failing(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        raise ValueError("no")

    with pytest.raises(
        ConfigError, match=r"^outer_optimizer_factory makes an optimizer that cannot step by itself: no"
    ):
        check_factory(failing)
    with pytest.raises(ConfigError, match=r"^outer_optimizer makes"):
        check_factory(failing, "outer_optimizer")
