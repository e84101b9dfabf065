"""Delayed Nesterov: the outer step of the asynchronous mode, where pseudo-gradients come one by one.

    state: m = 0, D = 0, n = 0                              N = buffer size, usually the number of workers
    on pseudo-gradient g:
        D ← D + g;  n ← n + 1
        n < N:  θ ← θ − ε·g/N
        n = N:  m ← β·m + D/N;  θ ← θ − ε·(β·m + g/N);  D ← 0;  n ← 0

(Liu et al. 2024, "Asynchronous Local-SGD Training for Language Modeling".) Each push moves the weights at once, by its
own N-th; the momentum moves them with every N-th push only. N pushes are one step of `outer.Nesterov` on their mean, to
rounding. Momentum on every push instead adds it N times for the same work, and diverges.

A push with a weight or an age is scaled by the caller, before it comes here: g ← (w / running mean of w)·g, and times
`coordination.weights.staleness_factor`.

Products and sums are rounded one after the other (no fused multiply-add), so that the bits depend neither on how a
parameter is cut into blocks nor on the machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from ..errors import ConfigError
from .aggregate import divisor
from .outer import OptimizerFactory, OuterRule, build_optimizer, groups_of
from .own_outer import OuterOptimizer


class DelayedState(TypedDict):
    tensors: dict[str, dict[str, Tensor]]  # name -> {"momentum_buffer": m, "buffered": D}, flat fp32
    counts: dict[str, int]  # fragment (as text, for JSON) -> n
    buffer_size: int


class DelayedNesterov:
    """The rule in the module's docstring; m and D by parameter name, n by fragment (the names pushed together).

    m and D are two flat fp32 tensors per parameter, made when it is first pushed, where it is; a parameter without
    momentum needs neither. `rates` gives parameters their own ε and β; the others have `lr` and `momentum`.
    """

    def __init__(
        self,
        buffer_size: int,
        lr: float = OuterRule.lr,
        momentum: float = OuterRule.momentum,
        *,
        rates: Mapping[str, OuterRule] | None = None,
    ) -> None:
        if buffer_size < 1:
            raise ConfigError(
                f"buffer_size must be at least 1, got {buffer_size}; the number of workers is the usual choice"
            )
        self.buffer_size = buffer_size
        self._default = OuterRule(lr, momentum)
        self._rates = dict(rates or {})
        self._buffers: dict[str, _Buffers] = {}
        self._counts: dict[int, int] = {}

    @classmethod
    def from_sgd(
        cls, buffer_size: int, factory: OptimizerFactory, shapes: Mapping[str, tuple[int, ...]]
    ) -> DelayedNesterov:
        """With the ε and β of each parameter group of the `torch.optim.SGD` that `factory` builds."""
        params, optimizer = build_optimizer(factory, shapes, "meta")
        if type(optimizer) not in (torch.optim.SGD, OuterOptimizer):  # a subclass may step by a rule of its own
            raise ConfigError(
                "Delayed Nesterov is a form of SGD with Nesterov momentum and needs outer_optimizer_factory to return "
                f"torch.optim.SGD, got {type(optimizer).__name__}; use SGD, or the synchronous mode"
            )
        for index, group in enumerate(optimizer.param_groups):
            _check_group(index, group)
        rates = {
            name: OuterRule(float(group["lr"]), float(group["momentum"]))
            for name, group in groups_of(params, optimizer).items()
        }
        return cls(buffer_size, rates=rates)

    def buffered(self, fragment: int) -> int:
        """n: how many pushes of this fragment its D holds."""
        return self._counts.get(fragment, 0)

    def push(self, fragment: int, params: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> None:
        """One pseudo-gradient of a fragment: moves `params` (fp32, contiguous) in place."""
        push = self.begin(params, fragment)
        for name, theta in params.items():
            push.block(name, theta.view(-1), grads[name].reshape(-1))
        push.done()

    def begin(self, params: Mapping[str, Tensor], fragment: int = 0) -> DelayedStep:
        """The same block by block, for whoever decodes a contribution a cache-sized block at a time."""
        for name, theta in params.items():
            if not self._rate(name).momentum:
                continue
            kept = self._buffers.get(name)
            if kept is None:
                self._buffers[name] = _Buffers(_zeros(theta), _zeros(theta))
            elif kept.momentum.device != theta.device:
                self._buffers[name] = _Buffers(kept.momentum.to(theta.device), kept.buffered.to(theta.device))
        return DelayedStep(self, fragment)

    @property
    def momentum(self) -> float:
        """The largest β of a parameter."""
        return max(rate.momentum for rate in (*self._rates.values(), self._default))

    def _rate(self, name: str) -> OuterRule:
        return self._rates.get(name, self._default)

    def state_dict(self) -> DelayedState:
        """The tensors are the live ones."""
        return {
            "tensors": {
                name: {"momentum_buffer": kept.momentum, "buffered": kept.buffered}
                for name, kept in self._buffers.items()
            },
            "counts": {str(fragment): n for fragment, n in self._counts.items()},
            "buffer_size": self.buffer_size,
        }

    def load_state_dict(self, state: DelayedState) -> None:
        """Replace everything that was here with copies of what `state` holds."""
        saved_size, counts = state["buffer_size"], {int(key): n for key, n in state["counts"].items()}
        wrong = {fragment: n for fragment, n in counts.items() if not 0 <= n < saved_size}
        if wrong:
            raise ConfigError(f"the saved counts must be in [0, buffer_size = {saved_size}), got {wrong}")
        unfinished = {fragment: n for fragment, n in counts.items() if n}
        if saved_size != self.buffer_size and unfinished:
            raise ConfigError(
                f"buffer_size can change only while no push is buffered; the state was saved with {saved_size}, has "
                f"pushes buffered ({_shown(unfinished)}), and buffer_size is {self.buffer_size} now; finish the "
                f"buffer first, or use buffer_size = {saved_size}"
            )
        self._counts = counts
        self._buffers = {
            name: _Buffers(entry["momentum_buffer"].clone(), entry["buffered"].clone())
            for name, entry in state["tensors"].items()
        }


class DelayedStep:
    """One pseudo-gradient on its way in, a `BlockStep`; made by `DelayedNesterov.begin`. `completes`: it is the N-th of
    its buffer."""

    def __init__(self, rule: DelayedNesterov, fragment: int) -> None:
        self._rule, self._fragment = rule, fragment
        self.completes = rule.buffered(fragment) + 1 == rule.buffer_size

    @torch.no_grad()
    def block(self, name: str, theta: Tensor, g: Tensor, start: int = 0) -> None:
        rate, size = self._rule._rate(name), self._rule.buffer_size
        by = divisor(size, g.device)
        share = g / by
        if rate.momentum:
            kept = self._rule._buffers[name]
            m, d = kept.momentum.narrow(0, start, len(g)), kept.buffered.narrow(0, start, len(g))
            d.add_(g)
            if self.completes:
                m.mul_(rate.momentum).add_(d / by)
                share.add_(m * rate.momentum)
                d.zero_()
        theta.sub_(share.mul_(rate.lr))

    def remembered(self, name: str, start: int, count: int) -> list[Tensor]:
        if not self._rule._rate(name).momentum:
            return []
        kept = self._rule._buffers[name]
        return [kept.momentum[start : start + count], kept.buffered[start : start + count]]

    def done(self) -> None:
        """All blocks are in: n advances, or begins again after the N-th."""
        self._rule._counts[self._fragment] = 0 if self.completes else self._rule.buffered(self._fragment) + 1


@dataclass(frozen=True)
class _Buffers:
    momentum: Tensor  # m
    buffered: Tensor  # D


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros(like.numel(), dtype=torch.float32, device=like.device)


def _check_group(index: int, group: Mapping[str, object]) -> None:
    """Refuse what the rule has no place for, rather than leave it out in silence. Without momentum it has no place for
    Nesterov's either: each push moves the weights by its N-th, and that is all."""
    remedies = {
        "nesterov": (group["nesterov"] or not group["momentum"], "set nesterov=True, or momentum=0"),
        "dampening": (not group.get("dampening"), "set dampening=0"),
        "weight_decay": (not group.get("weight_decay"), "decay the weights in the inner optimizer"),
        "maximize": (not group.get("maximize"), "set maximize=False"),
    }
    for option, (fits, remedy) in remedies.items():
        if not fits:
            raise ConfigError(
                "Delayed Nesterov needs SGD with Nesterov momentum, or with none, and nothing else; "
                f"parameter group {index} has {option}={group[option]}; {remedy}"
            )


def _shown(counts: Mapping[int, int]) -> str:
    return ", ".join(f"fragment {fragment}: {n}" for fragment, n in sorted(counts.items()))
