"""What the outer optimizer remembers: into a saved state, and back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from ..config import ServerConfig
from ..core.delayed import DelayedNesterov
from ..core.outer import BlockOuter, Nesterov, OuterRule, TorchOuter
from ..core.own_outer import OwnOuter
from ..core.state import Outer
from ..errors import ConfigError
from ..types import Manifest, ParameterSpec
from .saved import OptimizerState

log = logging.getLogger(__name__)

OptimizerMaker = Callable[[ServerConfig, Manifest], Outer]

PROBE = Manifest(parameters=(ParameterSpec(name="probe", shape=(2, 2), dtype="float32"),))  # before one is known
OTHER = "torch"  # the kind of all that is not ours; states of older versions do not say its name


def recall(optimizer: Outer, saved: OptimizerState, names: set[str] | None = None) -> None:
    """Give the optimizer back what it remembered (of these names). Another kind of optimizer is refused."""
    check_kind(optimizer, saved)
    by_name = {n: entry for n, entry in saved.by_name.items() if names is None or n in names}
    if isinstance(optimizer, DelayedNesterov):
        if saved.kind == _kind(optimizer):
            optimizer.load_state_dict({**saved.facts, "tensors": by_name})  # type: ignore[typeddict-item]
        elif by_name:
            log.warning("the imported momentum is of another rule than Delayed Nesterov and was left out")
        return
    if isinstance(optimizer, BlockOuter):
        by_name = {name: entry for name, entry in by_name.items() if "momentum_buffer" in entry}
    optimizer.load_state_dict(by_name)


def check_kind(optimizer: Outer, saved: OptimizerState) -> None:
    kind = _kind(optimizer)
    if saved.kind not in ("none", "old", kind) and saved.by_name:
        unnamed = f"{OTHER!r}: a class of torch.optim, or one of your own" if saved.kind == OTHER else repr(saved.kind)
        before = repr(saved.facts["name"]) if "name" in saved.facts else unnamed
        raise ConfigError(
            f"the state was saved with the outer optimizer {before}, now it is {getattr(optimizer, 'name', kind)!r}; "
            "resume with the same (async_mode, dn_buffer_size, outer_optimizer, outer_optimizer_factory)"
        )


def state_of(optimizer: Outer | None) -> OptimizerState:
    """The tensors are the live ones."""
    if optimizer is None:
        return OptimizerState("none")
    if isinstance(optimizer, DelayedNesterov):
        state = optimizer.state_dict()
        facts = {"counts": state["counts"], "buffer_size": state["buffer_size"]}
        return OptimizerState(_kind(optimizer), dict(state["tensors"]), facts)
    named = {"name": optimizer.name} if isinstance(optimizer, TorchOuter | OwnOuter) else {}
    return OptimizerState(_kind(optimizer), optimizer.state_dict(), named)


def rule_told(config: ServerConfig) -> OuterRule:
    """Of the rule that ships, with its defaults for what the settings leave out."""
    said = {"lr": config.outer_lr, "momentum": config.outer_momentum, "nesterov": config.nesterov}
    return OuterRule(**{name: value for name, value in said.items() if value is not None})  # type: ignore[arg-type]


def momentum_of(optimizer: Outer) -> float | None:
    """μ of its step. None: it may have some, under another name."""
    if isinstance(optimizer, Nesterov):
        return optimizer.rule.momentum
    return optimizer.momentum if isinstance(optimizer, DelayedNesterov | TorchOuter) else None


def with_lr(optimizer: Outer, lr: float) -> Outer:
    """The same rule, with the same memory and another η: its momentum is of gradients, so nothing else changes."""
    if not takes_lr(optimizer):
        raise ConfigError(f"only nesterov can be given another outer_lr, got {type(optimizer).__name__}")
    assert isinstance(optimizer, Nesterov)
    if optimizer.rule.lr != lr:
        optimizer.rule = replace(optimizer.rule, lr=lr)
    return optimizer


def takes_lr(optimizer: Outer) -> bool:
    """Can η change while it runs?"""
    return isinstance(optimizer, Nesterov)


def _kind(optimizer: Outer) -> str:
    return {"DelayedNesterov": "delayed_nesterov", "Nesterov": "nesterov"}.get(type(optimizer).__name__, OTHER)


__all__ = [
    "PROBE",
    "OptimizerMaker",
    "Outer",
    "check_kind",
    "momentum_of",
    "recall",
    "rule_told",
    "state_of",
    "takes_lr",
    "with_lr",
]
