"""A cluster's weights as its worker above sees them.

To the layer above, a cluster is a worker like any other: its local weights are T, where the cluster's own outer
optimizer is, and its optimizer steps are the cluster's rounds. So an ordinary worker trains this model, a copy of T,
with this optimizer, which does nothing: the steps were taken by others.

    S    the copy that the worker above holds, sends from and adopts into
    B    T as it was when it was last copied: S − B is what agreements from above have moved since then
    L    T as of the newest version of the cluster's run

While S = B, `follow` takes the next T over: S = B = L. When an agreement from above has moved S, T is moved by as much
between two rounds of the cluster, wherever T is by then (`moved`):

    T′ = T + (S − B)        exactly S where T is still B

That is the rebase of a worker that missed a round (T keeps what its members did meanwhile), and the carry of one that
was counted: with S = Θ′ and B the T that was sent, T′ = Θ′ + (T − B).
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..types import Manifest


class Shadow(nn.Module):
    """S, by the names of the run; tied tensors once. `averaged`: the names of the statistics, which are no sums of
    steps: T takes them over as they were agreed."""

    def __init__(
        self, manifest: Manifest, target: Mapping[str, Tensor], versions: Mapping[int, int] | None = None
    ) -> None:
        """`versions`: of the cluster's fragments, in `target`."""
        super().__init__()
        self.newest_versions = dict(versions or {})  # in L
        self.versions = dict(self.newest_versions)  # in B: what S holds of the cluster's own rounds
        self.names = tuple(spec.name for spec in manifest.parameters)
        self.averaged = frozenset(spec.name for spec in manifest.parameters if spec.role != "parameter")
        self._lock = threading.Lock()
        self.newest = {name: target[name].to(torch.float32, copy=True) for name in self.names}  # L
        self.before = {name: values.clone() for name, values in self.newest.items()}  # B
        for name in self.names:
            self._place(name, self.newest[name].clone())
        own = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        self.tensors: dict[str, Tensor] = {name: own[name] for name in self.names}  # S

    def _place(self, name: str, values: Tensor) -> None:
        """Under its dotted name."""
        *path, leaf = name.split(".")
        module: nn.Module = self
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        if name in self.averaged:
            module.register_buffer(leaf, values)
        else:
            module.register_parameter(leaf, nn.Parameter(values))

    def published(self, target: Mapping[str, Tensor], versions: Mapping[int, int]) -> None:
        """The cluster has made a version: L. From the thread that closes its rounds."""
        with self._lock:
            self.newest_versions |= versions
            for name, values in target.items():
                self.newest[name].copy_(values)

    @torch.no_grad()
    def follow(self) -> None:
        """S = B = L: every move from above is in T by now."""
        with self._lock:
            self.versions = dict(self.newest_versions)
            for name in self.names:
                self.before[name].copy_(self.newest[name])
                self.tensors[name].copy_(self.newest[name])

    def moved_names(self, names: Collection[str]) -> list[str]:
        """Those with S ≠ B."""
        return [name for name in names if not torch.equal(self.tensors[name], self.before[name])]

    @torch.no_grad()
    def moved(self, target: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """T′ of these tensors."""
        made = {}
        for name, t in target.items():
            s, b = self.tensors[name], self.before[name]
            made[name] = s.clone() if name in self.averaged else torch.where(t == b, s, t + (s - b))
        return made

    def is_in(self, names: Collection[str]) -> None:
        """T has these moves already."""
        for name in names:
            self.before[name].copy_(self.tensors[name].detach())

    def forget(self, names: Collection[str]) -> None:
        """B = T: T is to become S, whatever was learned."""
        with self._lock:
            self.versions = dict(self.newest_versions)
            for name in names:
                self.before[name].copy_(self.newest[name])


class RoundsTaken(torch.optim.Optimizer):
    """Its step is a round that the cluster has closed."""

    def __init__(self, shadow: Shadow) -> None:
        super().__init__(list(shadow.parameters()), {})

    def step(self, closure: Any = None) -> Any:
        """Nothing to do: T has moved, and S has followed it."""
