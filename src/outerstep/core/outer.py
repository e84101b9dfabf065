"""The outer step.

    buf = μ·buf + g                 first call: buf = g
    θ   = θ − η·(g + μ·buf)         Nesterov, with the updated buf

where g is the weighted mean of the workers' pseudo-gradients. It is the rule of `torch.optim.SGD(nesterov=True)`, bit
for bit: tests/golden compares ten rounds. (Douillard et al. 2023, "DiLoCo", use η = 0.7, μ = 0.9.)

Parameters and state are fp32 and keyed by name, never by position: a fragment steps alone, and its momentum with it.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..defaults import OUTER_LR, OUTER_MOMENTUM
from ..errors import ConfigError

State = dict[str, dict[str, Any]]
"""parameter name -> what its optimizer remembers"""

STEP_VALUES = 1 << 16  # 256 KiB: θ, buf, g and what lies between them stay in a core's own cache

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class NamedOptimizer(Protocol):
    """What takes the outer step: parameters and state by name."""

    def step(self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> None:
        """Move `params` (fp32) in place. The names of one fragment, or of all."""

    def state_dict(self) -> State:
        """By parameter name; the tensors are the live ones."""

    def load_state_dict(self, state: State) -> None: ...


@dataclass(frozen=True)
class OwnRule:
    """An `OuterOptimizer` of the user's (own_outer.py): how all members of a run call it, options and all, and what
    makes it."""

    name: str
    factory: OptimizerFactory = field(compare=False, repr=False)


@dataclass(frozen=True)
class OuterRule:
    """η and μ of the outer step, and whether its momentum is Nesterov's; or a user's `own` rule, which has its own."""

    lr: float = OUTER_LR
    momentum: float = OUTER_MOMENTUM
    nesterov: bool = True
    own: OwnRule | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.lr < math.inf:
            raise ConfigError(f"outer lr must be a number > 0, got {self.lr}")
        if not 0.0 <= self.momentum < 1.0:
            raise ConfigError(f"outer momentum must be in [0, 1), got {self.momentum}")

    @property
    def keeps_momentum(self) -> bool:
        """Does a step go by earlier ones?"""
        return bool(self.momentum) or self.own is not None


class BlockStep(Protocol):
    """One step on its way, block by block. It cannot be undone: after the first block, θ and what the rule remembers
    are consistent again only when all blocks are in and `done` was called."""

    def block(self, name: str, theta: Tensor, g: Tensor, start: int = 0) -> None:
        """Move values [start, start + |g|) of a parameter, counted in its flat form. (Under no_grad; called often.)

        theta: those values, flat fp32, on any device; g: likewise, and overwritten. Several threads may call it at the
        same time, with different blocks.
        """

    def remembered(self, name: str, start: int, count: int) -> list[Tensor]:
        """What the rule remembers of values [start, start + count) of a parameter: live and flat, for whoever may have
        to put it back. (Nothing, where it remembers nothing of each value.)"""

    def done(self) -> None:
        """All blocks are in."""


class MomentumBuffers:
    """One fp32 buffer per parameter, keyed by name, on the device where that parameter's anchor lives."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def of(self, name: str, like: Tensor) -> Tensor:
        """The buffer of a parameter, flat; zeros at first. `like` has its shape and device."""
        kept = self.tensors.get(name)
        if kept is None or kept.device != like.device:
            kept = (
                torch.zeros(like.shape, dtype=torch.float32, device=like.device)
                if kept is None
                else kept.to(like.device)
            )
            self.tensors[name] = kept
        return kept.view(-1)

    @property
    def flat(self) -> dict[str, Tensor]:
        """The live buffers, as `load` takes them."""
        return {name: kept.view(-1) for name, kept in self.tensors.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace everything with copies."""
        self.tensors = {n: kept.clone(memory_format=torch.contiguous_format) for n, kept in tensors.items()}


class BlockOuter(ABC):
    """An outer rule that moves ranges of values, each by itself, and remembers one buffer per parameter. So it can step
    a block while it is in the cache, and everybody's own copy."""

    def __init__(self) -> None:
        self.momentum = MomentumBuffers()

    @abstractmethod
    def begin(self, params: Mapping[str, Tensor], fragment: int = 0) -> BlockStep:
        """A step of these parameters, block by block; the bits do not depend on how they are cut."""

    @torch.no_grad()
    def step(self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> None:
        step = self.begin(params)
        for name, theta in params.items():
            step.block(name, theta.view(-1), grads[name].reshape(-1).clone())
        step.done()

    def state_dict(self) -> State:
        return {name: {"momentum_buffer": buf} for name, buf in self.momentum.tensors.items()}

    def load_state_dict(self, state: State) -> None:
        self.momentum.load({name: entry["momentum_buffer"] for name, entry in state.items()})


class Nesterov(BlockOuter):
    """SGD with (Nesterov) momentum, as in the module's docstring; `nesterov=False` gives θ − η·buf. `portable`: with
    the bits of `portable_step` instead of torch's."""

    def __init__(
        self,
        lr: float = OuterRule.lr,
        momentum: float = OuterRule.momentum,
        *,
        nesterov: bool = OuterRule.nesterov,
        portable: bool = False,
    ) -> None:
        super().__init__()
        self.rule, self.portable = OuterRule(lr, momentum, nesterov), portable

    @classmethod
    def everywhere(cls, rule: OuterRule) -> Nesterov:
        """For a run in which everybody steps its own copy: the same bits on every machine."""
        return cls(rule.lr, rule.momentum, nesterov=rule.nesterov, portable=True)

    def begin(self, params: Mapping[str, Tensor], fragment: int = 0) -> NesterovStep:
        first = params.keys() - self.momentum.tensors.keys()
        buf = {name: self.momentum.of(name, theta) for name, theta in params.items()} if self.rule.momentum else {}
        return NesterovStep(self.rule, self.portable, first, buf)


@dataclass(frozen=True, eq=False)
class NesterovStep:
    """A `BlockStep`; made by `Nesterov.begin`. `_first`: the parameters that move for the first time. torch sets their
    buffer, where `portable_step` adds to zeros."""

    _rule: OuterRule
    _portable: bool
    _first: Set[str]
    _buf: Mapping[str, Tensor]

    def block(self, name: str, theta: Tensor, g: Tensor, start: int = 0) -> None:
        rule = self._rule
        if not rule.momentum:
            if self._portable:
                theta.sub_(g.mul_(rule.lr))
            else:
                theta.add_(g, alpha=-rule.lr)
            return
        kept = self._buf[name][start : start + g.numel()]
        buf = kept.to(theta.device)  # the same memory, unless the anchor is elsewhere
        if self._portable:
            cut = STEP_VALUES if theta.device.type == "cpu" else max(g.numel(), 1)
            for one in zip(theta.split(cut), buf.split(cut), g.split(cut), strict=True):  # type: ignore[no-untyped-call]
                portable_step(*one, rule.lr, rule.momentum, nesterov=rule.nesterov)
        else:
            if name in self._first:
                buf.copy_(g)
            else:
                buf.mul_(rule.momentum).add_(g)
            theta.add_(g.add_(buf, alpha=rule.momentum) if rule.nesterov else buf, alpha=-rule.lr)
        if buf is not kept:
            kept.copy_(buf)

    def remembered(self, name: str, start: int, count: int) -> list[Tensor]:
        return [self._buf[name][start : start + count]] if self._rule.momentum else []

    def done(self) -> None:
        """Nothing is counted."""


@torch.no_grad()
def portable_step(theta: Tensor, buf: Tensor, g: Tensor, lr: float, momentum: float, *, nesterov: bool = True) -> None:
    """The rule of `Nesterov` where everybody steps its own copy: the same bits on every machine.

        buf ← μ·buf + g;    θ ← θ − η·(g + μ·buf)         every product and every sum rounded by itself

    `add(…, alpha=…)` and fused optimizers may round the two at once, and do so or not by the width of a processor's
    vectors. With μ and η powers of two the products are exact, and this has the bits of `Nesterov` too.

    theta, buf, g: fp32 of one shape and device; θ and buf (zeros at first) move in place, g is overwritten.
    """
    if momentum:
        buf.mul_(momentum).add_(g)
        g = g.add_(buf * momentum) if nesterov else g.copy_(buf)
    theta.sub_(g.mul_(lr))


class TorchOuter:
    """Any `torch.optim` optimizer as the outer one: `factory(parameters)` builds it, once, over all parameters.

    Only the parameters of the fragment that steps get a gradient; optimizers skip the others, momentum and all. One
    whose `step` takes pseudo-gradients gets them by name, and finds the names in its groups ("param_names").
    """

    def __init__(self, factory: OptimizerFactory, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._params, self._optimizer = build_optimizer(factory, shapes)
        self.name = type(self._optimizer).__name__
        _, *taken = inspect.signature(type(self._optimizer).step).parameters.values()
        self._takes_names = any(one.name == "pseudo_gradients" and one.default is one.empty for one in taken)
        names = {param: name for name, param in self._params.items()}
        for group in self._optimizer.param_groups if self._takes_names else ():
            group.setdefault("param_names", [names[param] for param in group["params"]])

    @property
    def momentum(self) -> float | None:
        """The largest of torch's SGD; None: another optimizer, which may have some under another name."""
        if type(self._optimizer) is not torch.optim.SGD:
            return None
        return max(float(group["momentum"]) for group in self._optimizer.param_groups)

    @torch.no_grad()
    def step(self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> None:
        for name, theta in params.items():
            self._params[name].data = theta  # the optimizer works on the caller's memory
            self._params[name].grad = grads[name]
        if self._takes_names:
            self._optimizer.step({name: grads[name] for name in params})  # type: ignore[call-overload]
        else:
            self._optimizer.step()
        for name in params:
            self._params[name].grad = None

    def state_dict(self) -> State:
        states = {name: self._optimizer.state.get(param) for name, param in self._params.items()}
        return {name: dict(entry) for name, entry in states.items() if entry}

    def load_state_dict(self, state: State) -> None:
        self._optimizer.state.clear()
        for name, entry in state.items():
            copied = {key: value.clone() if isinstance(value, Tensor) else value for key, value in entry.items()}
            self._optimizer.state[self._params[name]] = copied


def build_optimizer(
    factory: OptimizerFactory, shapes: Mapping[str, tuple[int, ...]], device: str = "cpu"
) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    """What `factory` makes of parameters of these shapes, and the parameters by name; their values are zeros."""
    params = {n: nn.Parameter(torch.zeros(shape, device=device), requires_grad=False) for n, shape in shapes.items()}
    optimizer = factory(list(params.values()))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"outer_optimizer_factory must return a torch.optim.Optimizer, got {type(optimizer).__name__}; "
            "for example: lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)"
        )
    return params, optimizer


def groups_of(params: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """The parameter group of each parameter, by name: its learning rate and other options."""
    groups = {param: group for group in optimizer.param_groups for param in group["params"]}
    left_out = [name for name, param in params.items() if param not in groups]
    if left_out:
        raise ConfigError(
            f"every parameter must be in a group of the outer optimizer, {left_out[0]!r} is not "
            f"({len(left_out)} in all); give them a group, or freeze them in the model"
        )
    return {name: groups[param] for name, param in params.items()}


def check_factory(factory: OptimizerFactory, what: str = "outer_optimizer_factory") -> None:
    """Take a step with one tiny parameter, so that a mistake shows at start and not in the first round."""
    probe = {"probe": torch.zeros(2, 2)}
    try:
        TorchOuter(factory, {"probe": (2, 2)}).step(probe, {"probe": torch.ones(2, 2)})
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{what} makes an optimizer that cannot step by itself: {error}") from error
