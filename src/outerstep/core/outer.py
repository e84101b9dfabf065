"""The outer step.

    buf = μ·buf + g                 first call: buf = g
    θ   = θ − η·(g + μ·buf)         Nesterov, with the updated buf

where g is the weighted mean of the workers' pseudo-gradients. It is the rule of `torch.optim.SGD(nesterov=True)`, bit
for bit: tests/golden compares ten rounds. (Douillard et al. 2023, "DiLoCo", use η = 0.7, μ = 0.9.)

Parameters and state are fp32 and keyed by name, never by position: a fragment steps alone, and its momentum with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..errors import ConfigError

State = dict[str, dict[str, Any]]
"""parameter name -> what its optimizer remembers"""

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class OuterOptimizer(Protocol):
    def step(self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> None:
        """Move `params` (fp32) in place. The names of one fragment, or of all."""

    def state_dict(self) -> State:
        """By parameter name; the tensors are the live ones."""

    def load_state_dict(self, state: State) -> None: ...


class Nesterov:
    """SGD with (Nesterov) momentum, as in the module's docstring; `nesterov=False` gives θ − η·buf. `portable`: with
    the bits of `portable_step` instead of torch's."""

    def __init__(
        self, lr: float = 0.7, momentum: float = 0.9, *, nesterov: bool = True, portable: bool = False
    ) -> None:
        if not 0.0 < lr < math.inf:
            raise ConfigError(f"outer lr must be a number > 0, got {lr}")
        if not 0.0 <= momentum < 1.0:
            raise ConfigError(f"outer momentum must be in [0, 1), got {momentum}")
        self.lr, self.momentum, self.nesterov, self.portable = lr, momentum, nesterov, portable
        self._buf: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> None:
        step = self.begin()
        for name, theta in params.items():
            step.block(name, theta, grads[name].reshape(-1).clone())

    def begin(self) -> NesterovStep:
        """The same in blocks, for whoever has a cache-sized block of the mean at a time. It cannot be undone: after the
        first block, θ and buf are consistent again only when all blocks are in."""
        return NesterovStep(self)

    def state_dict(self) -> State:
        return {name: {"momentum_buffer": buf} for name, buf in self._buf.items()}

    def load_state_dict(self, state: State) -> None:
        kept = {name: entry["momentum_buffer"] for name, entry in state.items()}
        self._buf = {name: buf.clone(memory_format=torch.contiguous_format) for name, buf in kept.items()}


class NesterovStep:
    """One step on its way; made by `Nesterov.begin`. The bits do not depend on how the parameters are cut."""

    def __init__(self, rule: Nesterov) -> None:
        self._rule = rule
        self._flat: dict[str, tuple[Tensor, Tensor | None, bool]] = {}  # θ, buf; is it the parameter's first step?

    def open(self, params: Mapping[str, Tensor]) -> None:
        """All parameters that will step, beforehand: then blocks of them may come from several threads."""
        for name, theta in params.items():
            self._open(name, theta)

    def block(self, name: str, theta: Tensor, g: Tensor, start: int = 0) -> None:
        """Values [start, start + |g|) of a parameter, counted in its flat form. (Under no_grad; it is called often.)

        theta: the whole parameter, fp32 and contiguous, of any shape; only this block of it moves. g: fp32, flat; it is
        overwritten.
        """
        rule, stop = self._rule, start + g.numel()
        flat, buf, is_first = self._flat.get(name) or self._open(name, theta)
        flat = flat[start:stop]
        if rule.portable:
            kept = flat if buf is None else buf[start:stop]  # (without momentum it is not looked at)
            portable_step(flat, kept, g, rule.lr, rule.momentum, nesterov=rule.nesterov)
            return
        if buf is None:
            flat.add_(g, alpha=-rule.lr)
            return
        buf = buf[start:stop]
        if is_first:
            buf.copy_(g)
        else:
            buf.mul_(rule.momentum).add_(g)
        flat.add_(g.add_(buf, alpha=rule.momentum) if rule.nesterov else buf, alpha=-rule.lr)

    def _open(self, name: str, theta: Tensor) -> tuple[Tensor, Tensor | None, bool]:
        """A parameter of which this is the first block."""
        buf, is_first = self._rule._buf.get(name), False
        if buf is None and self._rule.momentum:
            buf, is_first = torch.zeros_like(theta) if self._rule.portable else torch.empty_like(theta), True
            self._rule._buf[name] = buf
        found = self._flat[name] = (theta.view(-1), None if buf is None else buf.view(-1), is_first)
        return found


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

    Only the parameters of the fragment that steps get a gradient; optimizers skip the others, momentum and all.
    """

    def __init__(self, factory: OptimizerFactory, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._params, self._optimizer = build_optimizer(factory, shapes)

    @torch.no_grad()
    def step(self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> None:
        for name, theta in params.items():
            self._params[name].data = theta  # the optimizer works on the caller's memory
            self._params[name].grad = grads[name]
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
    factory: OptimizerFactory, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    """What `factory` makes of parameters of these shapes, and the parameters by name; their values are zeros."""
    params = {name: nn.Parameter(torch.zeros(shape), requires_grad=False) for name, shape in shapes.items()}
    optimizer = factory(list(params.values()))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"outer_optimizer_factory must return a torch.optim.Optimizer, got {type(optimizer).__name__}; "
            "for example: lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)"
        )
    return params, optimizer


def check_factory(factory: OptimizerFactory) -> None:
    """Take a step with one tiny parameter, so that a mistake shows at start and not in the first round."""
    probe = {"probe": torch.zeros(2, 2)}
    try:
        TorchOuter(factory, {"probe": (2, 2)}).step(probe, {"probe": torch.ones(2, 2)})
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"outer_optimizer_factory makes an optimizer that cannot step by itself: {error}") from error
