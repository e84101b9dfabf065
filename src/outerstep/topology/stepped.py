"""News of an anchor where everybody steps: θ′ = the outer step from θ along the agreed mean g.

    g = decode(what all ranks hold)
    parameters:           buf ← μ·buf + g;   θ′ = θ − η·(g + μ·buf)        core/outer.py, portable_step
    averaged buffers:     θ′ = θ − g                                       the mean of the workers' values

In the same pass over the memory as everything else that happens to a block (news.py). Nobody knows the anchor's hash
beforehand: it is computed here, and the ranks compare theirs afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.outer import Nesterov, portable_step
from .forms import Form
from .news import Kind, Proof

STEP_VALUES = 1 << 16  # 256 KiB: θ, buf, g and what lies between them stay in a core's own cache


@dataclass(frozen=True)
class OuterRule:
    """η and μ of the outer step, and its kind."""

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        Nesterov(self.lr, self.momentum, nesterov=self.nesterov)  # refuses what is out of range


class Momentum:
    """buf by tensor, flat fp32, where the anchor of that tensor is; zeros at first."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def of(self, name: str, numel: int, home: torch.device) -> Tensor:
        kept = self.tensors.get(name)
        if kept is None or kept.device != home:
            self.tensors[name] = torch.zeros(numel, device=home) if kept is None else kept.to(home)
        return self.tensors[name]


class Stepped:
    """`homes`: where the anchors are; `roles`: which tensors are parameters, which averaged buffers."""

    def __init__(
        self,
        frame: Tensor,
        form: Form,
        rule: OuterRule,
        momentum: Momentum,
        homes: Mapping[str, torch.device],
        roles: Mapping[str, str],
    ) -> None:
        self.names = tuple(entry.name for entry in form.update.entries)
        self.kinds: tuple[Kind, ...] = ("update",)
        self.frames: tuple[memoryview, ...] = ()
        self._entries = {entry.name: entry for entry in form.update.entries}
        self._numels = {name: math.prod(entry.shape) for name, entry in self._entries.items()}
        self._data_begin = form.update.data_begin
        self._codecs = form.codecs
        self.frame, self._rule, self._momentum = frame, rule, momentum
        self._homes, self._roles = homes, roles
        self._proof = Proof("")
        self._room = torch.empty(0)

    @property
    def is_proven(self) -> bool:
        """As far as one rank can tell."""
        return True

    @property
    def digest(self) -> str:
        """The anchor's hash, when all blocks were asked for."""
        return self._proof.digest

    @torch.no_grad()
    def theta(self, name: str, start: int, stop: int, held: Tensor, *, in_place: bool = False) -> Tensor:
        g = self._mean(name, start, stop, held.device)
        theta = held if in_place else held.clone()
        if self._roles[name] != "parameter":
            theta.sub_(g)
        else:
            self._step(name, start, stop, theta, g)
        self._proof.feed(theta)
        return theta

    def _step(self, name: str, start: int, stop: int, theta: Tensor, g: Tensor) -> None:
        rule, step = self._rule, STEP_VALUES if theta.device.type == "cpu" else stop - start
        if not rule.momentum:
            portable_step(theta, theta, g, rule.lr, 0.0)
            return
        kept = self._momentum.of(name, self._numels[name], self._homes[name])[start:stop]
        buf = kept.to(theta.device)
        for one in zip(theta.split(step), buf.split(step), g.split(step), strict=True):  # type: ignore[no-untyped-call]
            portable_step(*one, rule.lr, rule.momentum, nesterov=rule.nesterov)
        if buf is not kept:
            kept.copy_(buf)

    def _mean(self, name: str, start: int, stop: int, device: torch.device) -> Tensor:
        """g[start:stop]; who takes news over cuts tensors at borders of every codec's blocks."""
        codec, first = self._codecs[name], self._data_begin + self._entries[name].begin
        data = self.frame[first + codec.encoded_bytes(start) : first + codec.encoded_bytes(stop)]
        if self._room.numel() < stop - start or self._room.device != device:
            self._room = torch.empty(stop - start, device=device)
        g = self._room[: stop - start]
        codec.decode(data.to(device, non_blocking=True), g)
        return g


__all__ = ["Momentum", "OuterRule", "Stepped"]
