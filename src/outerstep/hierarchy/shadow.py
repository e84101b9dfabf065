"""A cluster's weights as its worker above sees them.

To the layer above, a cluster is an ordinary worker. Its local weights are T, the outer parameters of the cluster's own
run, and its optimizer steps are the cluster's rounds. So an ordinary worker trains this model, a copy of T, with this
optimizer. The optimizer does nothing, because the members have taken the steps.

    S    the copy that the worker above holds, sends from and adopts into
    B    T at the time of the last copy: S − B is how far agreements from above have moved S since then
    L    T at the newest version of the cluster's run

While S = B, `follow` copies the next T: S = B = L. After an agreement from above has moved S, T moves by the same
difference between two rounds of the cluster, wherever T is by then (`moved`):

    T′ = T + (S − B)        exactly S where T is still B

For a cluster that missed a round, this is the rebase: T keeps what members did meanwhile. For a cluster that was
counted, it is the carry: with S = Θ′ and B the T that was sent, T′ = Θ′ + (T − B).
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..types import Manifest


class Shadow(nn.Module):
    """S, by the names of the run; tied tensors once. `averaged`: the names of statistics. They are not sums of steps,
    so T takes their agreed values as they are."""

    def __init__(
        self, manifest: Manifest, target: Mapping[str, Tensor], versions: Mapping[int, int] | None = None
    ) -> None:
        """`versions`: the versions of the cluster's fragments in `target`."""
        super().__init__()
        self.newest_versions = dict(versions or {})  # in L
        self.versions = dict(self.newest_versions)  # in B: the cluster's own rounds that S contains
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
        """Register the values under their dotted name."""
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
        """Set L: the cluster has a new version. Called from the thread that closes its rounds."""
        with self._lock:
            self.newest_versions |= versions
            for name, values in target.items():
                self.newest[name].copy_(values)

    @torch.no_grad()
    def follow(self) -> None:
        """Set S = B = L. By now T contains every move from above."""
        with self._lock:
            self.versions = dict(self.newest_versions)
            for name in self.names:
                self.before[name].copy_(self.newest[name])
                self.tensors[name].copy_(self.newest[name])

    def moved_names(self, names: Collection[str]) -> list[str]:
        """The names with S ≠ B."""
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
        """Set B = S: T already contains these moves."""
        for name in names:
            self.before[name].copy_(self.tensors[name].detach())

    def forget(self, names: Collection[str]) -> None:
        """Set B = L, so that T becomes S and drops whatever members learned."""
        with self._lock:
            self.versions = dict(self.newest_versions)
            for name in names:
                self.before[name].copy_(self.newest[name])


class RoundsTaken(torch.optim.Optimizer):
    """The optimizer of the worker above. A step is a round that the cluster has closed."""

    def __init__(self, shadow: Shadow) -> None:
        super().__init__(list(shadow.parameters()), {})

    def step(self, closure: Any = None) -> Any:
        """Nothing to do: T has moved, and S has followed."""
