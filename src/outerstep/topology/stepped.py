"""The update of an anchor where everybody steps: θ′ = the outer step from θ along the agreed mean g.

    g = decode(what all ranks hold)
    parameters:           buf ← μ·buf + g;   θ′ = θ − η·(g + μ·buf)        core/outer.py, portable_step
    averaged buffers:     θ′ = θ − g                                       the mean of the workers' values

In the same pass over the memory as everything else that happens to a block (update.py). Nobody knows the anchor's hash
beforehand: it is computed here, and the ranks compare theirs afterwards.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from ..core.outer import OuterRule, portable_step
from .forms import Form
from .update import AnchorProof, Kind

STEP_VALUES = 1 << 16  # 256 KiB: θ, buf, g and what lies between them stay in a core's own cache


class Momentum:
    """buf by tensor, flat fp32, where the anchor of that tensor is; zeros at first."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def of(self, name: str, numel: int, home: torch.device) -> Tensor:
        kept = self.tensors.get(name)
        if kept is None or kept.device != home:
            self.tensors[name] = torch.zeros(numel, device=home) if kept is None else kept.to(home)
        return self.tensors[name]


class OwnStep(ABC):
    """The update that comes of a step which everybody takes alone, where its own anchor is: `_move` says which.
    `homes`: where the anchors are; `roles`: which tensors are parameters, which averaged buffers."""

    kinds: tuple[Kind, ...] = ("update",)
    frames: tuple[memoryview, ...] = ()

    def __init__(
        self, form: Form, momentum: Momentum, homes: Mapping[str, torch.device], roles: Mapping[str, str]
    ) -> None:
        self._numels = {entry.name: math.prod(entry.shape) for entry in form.full.entries}
        self.names = tuple(self._numels)
        self._momentum, self._homes, self._roles = momentum, homes, roles
        self._proof = AnchorProof("")

    @property
    def is_proven(self) -> bool:
        """As far as one can tell alone."""
        return True

    @property
    def digest(self) -> str:
        """The anchor's hash, when all blocks were asked for."""
        return self._proof.digest

    @torch.no_grad()
    def apply(self, name: str, start: int, stop: int, held: Tensor, *, in_place: bool = False) -> Tensor:
        theta = held if in_place else held.clone()
        self._move(name, start, stop, theta)
        self._proof.feed(theta)
        return theta

    @abstractmethod
    def _move(self, name: str, start: int, stop: int, theta: Tensor) -> None:
        """θ[start:stop] ← θ′[start:stop]"""

    @contextmanager
    def _buf(self, name: str, start: int, stop: int, device: torch.device) -> Iterator[Tensor]:
        """buf[start:stop] on `device`, to be changed there."""
        kept = self._momentum.of(name, self._numels[name], self._homes[name])[start:stop]
        buf = kept.to(device)
        yield buf
        if buf is not kept:
            kept.copy_(buf)


class Stepped(OwnStep):
    """θ′ along the mean in `frame`."""

    def __init__(
        self,
        frame: Tensor,
        form: Form,
        rule: OuterRule,
        momentum: Momentum,
        homes: Mapping[str, torch.device],
        roles: Mapping[str, str],
    ) -> None:
        super().__init__(form, momentum, homes, roles)
        self.frame, self._rule = frame, rule
        self._begins = {entry.name: form.update.data_begin + entry.begin for entry in form.update.entries}
        self._codecs = form.codecs
        self._room = torch.empty(0)

    def _move(self, name: str, start: int, stop: int, theta: Tensor) -> None:
        g, rule = self._mean(name, start, stop, theta.device), self._rule
        if self._roles[name] != "parameter":
            theta.sub_(g)
        elif not rule.momentum:
            portable_step(theta, theta, g, rule.lr, 0.0)
        else:
            step = STEP_VALUES if theta.device.type == "cpu" else stop - start
            with self._buf(name, start, stop, theta.device) as buf:
                for one in zip(theta.split(step), buf.split(step), g.split(step), strict=True):  # type: ignore[no-untyped-call]
                    portable_step(*one, rule.lr, rule.momentum, nesterov=rule.nesterov)

    def _mean(self, name: str, start: int, stop: int, device: torch.device) -> Tensor:
        """g[start:stop]; whoever applies an update cuts tensors at borders of every codec's blocks."""
        codec, first = self._codecs[name], self._begins[name]
        data = self.frame[first + codec.encoded_bytes(start) : first + codec.encoded_bytes(stop)]
        if self._room.numel() < stop - start or self._room.device != device:
            self._room = torch.empty(stop - start, device=device)
        g = self._room[: stop - start]
        codec.decode(data.to(device, non_blocking=True), g)
        return g


__all__ = ["Momentum", "OuterRule", "OwnStep", "Stepped"]
