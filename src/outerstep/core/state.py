"""The state of one fragment: what every exchange moves from one version to the next, whoever holds it.

    θ          what everybody holds: the anchor
    T          where the outer optimizer is; the same memory as θ, unless the downlink is coded
    momentum   what the outer rule remembers (outer.py, delayed.py, gossip.py), keyed by parameter name
    version    and the hash of θ
    centre     the last aggregate, for an aggregation rule that starts there

A server holds one per fragment, and so does every peer, rank and replica. An exchange is *collect → combine → step →
publish → adopt*: `robust.combine` makes the aggregate, `step` moves T along it, and whoever publishes or adopts says
where θ is then (`arrive`). The step works on ranges of values, so that a block is decoded, stepped, encoded, hashed and
adopted while it is in the cache.

A version may also come about without contributions: an agreement from a layer above says where T is to be
(`move_to`). The momentum stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .delayed import DelayedNesterov
from .gossip import PairOuter
from .outer import BlockOuter, BlockStep, MomentumBuffers, NamedOptimizer, Nesterov
from .own_outer import OwnOuter

Outer = NamedOptimizer | DelayedNesterov


@dataclass(frozen=True)
class FragmentSnapshot:
    """A fragment's state as plain tensors by name: what a joiner is given, and a saved state holds. `momentum` (flat)
    and `centre` are empty where there is none."""

    version: int
    anchor_hash: str
    theta: Mapping[str, Tensor]
    momentum: Mapping[str, Tensor]
    centre: Mapping[str, Tensor]


class FragmentState:
    """All tensors are fp32, contiguous and keyed by name; `theta` and `target` are views of memory that others hold.
    `roles` names the fragment's tensors in order: parameters are stepped, averaged buffers take the workers' mean.
    `outer`: the rule with its momentum; the fragments of a run share it."""

    def __init__(
        self,
        roles: Mapping[str, str],
        theta: Mapping[str, Tensor],
        outer: Outer | PairOuter | None = None,
        *,
        index: int = 0,
        target: Mapping[str, Tensor] | None = None,
        version: int = 0,
        anchor_hash: str = "",
        centre: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.index, self.roles, self.outer = index, roles, outer
        self.parameters = tuple(name for name, role in roles.items() if role == "parameter")
        self.averaged = tuple(name for name, role in roles.items() if role == "average")
        self.theta = theta
        self.target = theta if target is None else target
        self.version, self.anchor_hash = version, anchor_hash
        self.centre: dict[str, Tensor] = {}
        if centre:
            self.remember(centre)

    @property
    def steps_by_blocks(self) -> bool:
        """Can the rule step ranges of values? Else it steps whole tensors."""
        return isinstance(self.outer, BlockOuter | DelayedNesterov)

    @property
    def steps_alike(self) -> bool:
        """Has a step the same bits on every device?"""
        if isinstance(self.outer, Nesterov):
            return self.outer.portable
        return isinstance(self.outer, OwnOuter | DelayedNesterov)

    # --- step -----------------------------------------------------------------------------------------------------

    def step(self, target: Mapping[str, Tensor] | None = None) -> FragmentStep:
        """The outer step of T, block by block. `target`: where T moves, if that is other memory than it is in."""
        assert isinstance(self.outer, BlockOuter | DelayedNesterov)
        target = self.target if target is None else target
        step = self.outer.begin({name: target[name] for name in self.parameters}, self.index)
        return FragmentStep(self.roles, step, step.done)

    @torch.no_grad()
    def step_whole(self, aggregate: Mapping[str, Tensor], target: Mapping[str, Tensor] | None = None) -> None:
        """The same at once, for an optimizer that steps whole tensors only. It may change the aggregate."""
        target = self.target if target is None else target
        assert self.outer is not None
        assert not isinstance(self.outer, DelayedNesterov | PairOuter)
        self.outer.step({n: target[n] for n in self.parameters}, {n: aggregate[n] for n in self.parameters})
        for name in self.averaged:
            target[name].sub_(aggregate[name])

    @torch.no_grad()
    def move_to(self, values: Mapping[str, Tensor], target: Mapping[str, Tensor] | None = None) -> None:
        """T ← an agreement from above, exactly. What is not named stays where it is."""
        target = self.target if target is None else target
        for name in values.keys() & self.roles.keys():
            target[name].copy_(values[name])

    def remember(self, aggregate: Mapping[str, Tensor]) -> None:
        """The next round's rule starts from a copy of this."""
        for name in self.roles:
            if name in self.centre:
                self.centre[name].copy_(aggregate[name])
            else:
                self.centre[name] = aggregate[name].to(torch.float32, copy=True)

    def arrive(
        self,
        version: int,
        anchor_hash: str,
        theta: Mapping[str, Tensor] | None = None,
        target: Mapping[str, Tensor] | None = None,
    ) -> None:
        """θ is that of this version now, in other memory if that is given."""
        self.version, self.anchor_hash = version, anchor_hash
        if theta is not None:
            self.theta = theta
            self.target = theta if target is None else target

    # --- write and read -------------------------------------------------------------------------------------------

    @property
    def momentum(self) -> dict[str, Tensor]:
        """The buffer of each parameter, flat: zeros where nothing has moved yet, so that all peers have the same."""
        kept, names = self._buffers.flat, self.parameters
        return {name: kept[name] if name in kept else torch.zeros(self.theta[name].numel()) for name in names}

    @property
    def _buffers(self) -> MomentumBuffers:
        assert isinstance(self.outer, BlockOuter | PairOuter)
        return self.outer.momentum

    def write(self, *, momentum: bool = True) -> FragmentSnapshot:
        """The live tensors. `momentum=False`: the rule has none."""
        theta = {name: self.theta[name] for name in self.roles}
        return FragmentSnapshot(self.version, self.anchor_hash, theta, self.momentum if momentum else {}, self.centre)

    def read(self, snapshot: FragmentSnapshot, theta: Mapping[str, Tensor] | None = None) -> None:
        """Take over momentum and centre; θ itself is for whoever adopts it. `theta`: tensors of its shapes, where it
        will be (None = where it is)."""
        places, buffers = self.theta if theta is None else theta, self._buffers
        for name, values in snapshot.momentum.items():
            buffers.of(name, places[name]).copy_(values.view(-1))
        self.centre = {}
        if snapshot.centre:
            self.remember(snapshot.centre)


@dataclass(frozen=True, eq=False)
class FragmentStep:
    """One outer step of a fragment on its way, range by range; made by `FragmentState.step`. (Under no_grad.) When the
    last range has moved: `done`."""

    _roles: Mapping[str, str]
    _step: BlockStep
    done: Callable[[], None]

    def block(self, name: str, theta: Tensor, g: Tensor, start: int = 0) -> None:
        """Values [start, start + |g|) of a tensor move in `theta`, which holds them flat on any device; g is
        overwritten."""
        role = self._roles[name]
        if role == "parameter":
            self._step.block(name, theta, g, start)
        elif role == "average":  # a buffer is not optimized: the mean of the workers' values replaces it
            theta.sub_(g)

    def remembered(self, name: str, start: int, count: int) -> list[Tensor]:
        """What the rule remembers of these values, as `BlockStep.remembered`."""
        return self._step.remembered(name, start, count) if self._roles[name] == "parameter" else []


# --- θ is a view of somebody's memory: tensors over bytes and bytes of tensors, without copying ----------------------


def fp32_views(
    buffer: memoryview, places: Iterable[tuple[str, tuple[int, ...], int]], first_byte: int
) -> dict[str, Tensor]:
    """fp32 tensors by name over the memory of `buffer`; `places` are (name, shape, offset after `first_byte`)."""
    views: dict[str, Tensor] = {}
    for name, shape, offset in places:
        count = math.prod(shape)
        if count == 0:  # frombuffer refuses to make nothing
            views[name] = torch.empty(shape)
            continue
        flat = torch.frombuffer(buffer, dtype=torch.float32, count=count, offset=first_byte + offset)
        views[name] = flat.view(shape)
    return views


def bytes_of(tensor: Tensor) -> memoryview:
    """The values in host memory (copied there if they are elsewhere)."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data
