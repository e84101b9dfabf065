"""An outer optimizer of one's own: `OuterOptimizer`, to be used as it is or with another `update`.

    class SignDescent(outerstep.OuterOptimizer):
        def update(self, theta, g, momentum, options):
            theta.sub_(g.sign_().mul_(options["lr"]))

It is a `torch.optim.Optimizer`, so it stands wherever one may. Because `update` moves each value by itself, it also
steps blocks (a server's, while they are in the cache), and everybody's own copy where there is no server; any other
torch optimizer steps whole tensors, in a server.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from ..defaults import OUTER_LR, OUTER_MOMENTUM
from ..errors import ConfigError
from .outer import (
    BlockOuter,
    NamedOptimizer,
    Nesterov,
    OptimizerFactory,
    OuterRule,
    OwnRule,
    TorchOuter,
    build_optimizer,
    groups_of,
    portable_step,
)

MOST_TEXT = 256  # what members tell each other of it


class OuterOptimizer(torch.optim.Optimizer):
    """buf ← μ·buf + g;  θ ← θ − η·(g + μ·buf): torch's SGD(nesterov=True), rounded alike on every machine.

    torch's own may or may not fuse a product with a sum, depending on the processor's vector width: copies on different
    machines would drift apart by roundings.

    `params`: parameters, or (name, parameter) pairs as `model.named_parameters()` gives them, for `step` by name. A
    subclass has another `update`, and passes options of its own on to this constructor by keyword.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
        lr: float = OUTER_LR,
        momentum: float = OUTER_MOMENTUM,
        nesterov: bool = True,
        **options: Any,
    ) -> None:
        OuterRule(lr, momentum, nesterov)  # refuses values out of range
        super().__init__(params, {"lr": lr, "momentum": momentum, "nesterov": nesterov, **options})

    def update(self, theta: Tensor, g: Tensor, momentum: Tensor, options: Mapping[str, Any]) -> None:
        """Move `theta` along the pseudo-gradient `g`, in place.

        theta, g, momentum: fp32, of one shape and device: a parameter, or a range of its values. `momentum` is zeros at
        first, and what this leaves in it is there the next time; g may be overwritten. `options`: the parameter's group
        ("lr", …). Each value moves by itself. Several threads may call it at the same time, with different ranges. For
        the same bits on every machine: no `alpha=`, no fused operation, no sum over values.
        """
        portable_step(theta, momentum, g, options["lr"], options["momentum"], nesterov=options["nesterov"])

    @torch.no_grad()
    def step(self, pseudo_gradients: Mapping[str, Tensor] | None = None) -> None:  # type: ignore[override]
        """`pseudo_gradients`: anchor − local, by the names that the parameters were given with. Left out: each
        parameter's `grad`, which is overwritten."""
        given = None if pseudo_gradients is None else self._by_parameter(pseudo_gradients)
        for group in self.param_groups:
            for param in group["params"]:
                g = param.grad if given is None else given.get(param)
                if g is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(param)
                self.update(param, g, state["momentum_buffer"], group)

    def _by_parameter(self, pseudo_gradients: Mapping[str, Tensor]) -> dict[nn.Parameter, Tensor]:
        groups = self.param_groups
        known = {n: p for group in groups for n, p in zip(group.get("param_names", ()), group["params"], strict=False)}
        odd = next((name for name in pseudo_gradients if name not in known), None)
        if odd is not None:
            had = f"it has {', '.join(list(known)[:3])} …" if known else "it was given none"
            raise ConfigError(
                f"pseudo-gradients are matched by name, and this optimizer has no parameter {odd!r} ({had}): make it "
                "with model.named_parameters()"
            )
        return {
            known[n]: g.detach().to(known[n].device, known[n].dtype, copy=True) for n, g in pseudo_gradients.items()
        }


class OwnOuter(BlockOuter):
    """A user's `OuterOptimizer`, block by block."""

    def __init__(self, params: Mapping[str, nn.Parameter], optimizer: OuterOptimizer) -> None:
        super().__init__()
        self.name = type(optimizer).__name__
        self.update = optimizer.update
        self.options = groups_of(params, optimizer)

    def begin(self, params: Mapping[str, Tensor], fragment: int = 0) -> OwnBlockStep:
        return OwnBlockStep(self, params)


class OwnBlockStep:
    """A `BlockStep`; made by `OwnOuter.begin`."""

    def __init__(self, outer: OwnOuter, params: Mapping[str, Tensor]) -> None:
        self._outer = outer
        self._buf = {name: outer.momentum.of(name, theta) for name, theta in params.items()}

    def block(self, name: str, theta: Tensor, g: Tensor, start: int = 0) -> None:
        kept = self._buf[name][start : start + g.numel()]
        buf = kept.to(theta.device)  # the same memory, unless the anchor is elsewhere
        self._outer.update(theta, g, buf, self._outer.options[name])
        if buf is not kept:
            kept.copy_(buf)

    def remembered(self, name: str, start: int, count: int) -> list[Tensor]:
        return [self._buf[name][start : start + count]]

    def done(self) -> None:
        """Nothing is counted."""


def outer_of(factory: OptimizerFactory, shapes: Mapping[str, tuple[int, ...]]) -> NamedOptimizer:
    """What `factory` makes, as a server's outer optimizer: by blocks if it can."""
    params, optimizer = build_optimizer(factory, shapes, "meta")
    return OwnOuter(params, optimizer) if has_update(optimizer) else TorchOuter(factory, shapes)


def outer_everywhere(rule: OuterRule, tensors: Mapping[str, Tensor]) -> BlockOuter:
    """For a run in which everybody steps its own copy of these tensors."""
    if rule.own is None:
        return Nesterov.everywhere(rule)
    params, optimizer = build_optimizer(rule.own.factory, {n: tuple(t.shape) for n, t in tensors.items()}, "meta")
    assert has_update(optimizer)  # checked when it was named
    return OwnOuter(params, optimizer)


def has_update(optimizer: torch.optim.Optimizer) -> TypeGuard[OuterOptimizer]:
    """Is it an `OuterOptimizer` whose `update` is all it does? (torch wraps `step` when it makes the first of a
    class.)"""
    return isinstance(optimizer, OuterOptimizer) and (
        inspect.unwrap(type(optimizer).step) is inspect.unwrap(OuterOptimizer.step)
    )


# --- by name --------------------------------------------------------------------------------------------------------


def named_factory(name: str, options: Mapping[str, Any]) -> OptimizerFactory:
    """`name`: module:Class, or a class of torch.optim in any case. It comes from this process's own user, never over
    the wire: a module is imported by it."""
    kind = _class_of(name)

    def make(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        try:
            made: torch.optim.Optimizer = kind(params, **options)
        except (TypeError, ValueError) as error:
            shown = " ".join(f"{key}={value}" for key, value in options.items()) or "nothing"
            raise ConfigError(f"outer_optimizer {name!r} cannot be made with {shown}: {error}") from error
        return made

    return make


def _class_of(name: str) -> Any:
    module, colon, inner = name.partition(":")
    if not colon:
        shipped = {n.lower(): kind for n, kind in vars(torch.optim).items() if _is_optimizer(kind)}
        if name.lower() not in shipped:
            raise ConfigError(
                f"outer_optimizer must be nesterov, one of torch.optim ({', '.join(sorted(shipped))}), or module:Class "
                f"of your own, got {name!r}"
            )
        return shipped[name.lower()]
    try:
        found: Any = import_module(module)
        for part in inner.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"outer_optimizer {name!r} cannot be found: {error}; its module must be installed, or in PYTHONPATH, or "
            "for `outerstep server` in the folder where it is started"
        ) from error
    if not _is_optimizer(found):
        raise ConfigError(
            f"outer_optimizer must name a torch.optim.Optimizer or an outerstep.OuterOptimizer, {name!r} is neither"
        )
    return found


def _is_optimizer(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer


def as_own_rule(name: str, options: Mapping[str, Any], where: str) -> OuterRule:
    """The rule of that name where everybody steps its own copy."""
    factory = named_factory(name, options)
    _, made = build_optimizer(factory, {"probe": (2,)})
    if not has_update(made):
        raise ConfigError(
            f"{where} everybody takes the outer step on its own copy, block by block, and all must get the same bits: "
            f"outer_optimizer must name an outerstep.OuterOptimizer that has an update of its own, got {name!r}; use a "
            "server for it"
        )
    text = " ".join([name, *(f"{key}={value}" for key, value in sorted(options.items()))])
    if len(text) > MOST_TEXT:
        raise ConfigError(f"outer_optimizer with its options has at most {MOST_TEXT} characters, got {len(text)}")
    return OuterRule(own=OwnRule(text, factory))
