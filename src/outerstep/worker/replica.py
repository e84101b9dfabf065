"""The local copy of the model, and the anchor it departed from. If the model is sharded (FSDP2), both are this
process's rows of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn

from ..core.manifest import BufferPolicy, describe
from ..core.pseudogradient import adopt, carry, mix, pseudo_gradient, rebase
from ..errors import ModelError
from ..topology.sharded import Shards


class Replica:
    """The tensors that are exchanged by name (tied ones once), and their fp32 anchors on the same device."""

    def __init__(self, model: nn.Module, buffers: BufferPolicy = "local") -> None:
        model = _unwrapped(model)
        self.shards = Shards(1, 0, frozenset())
        self._reshard: Callable[[], None] = lambda: None
        if dist.is_available() and dist.is_initialized():
            from .shards import Locals, find_shards, reshard

            self._reshard = partial(reshard, model)
            self._reshard()  # so that the model's parameters are those that the optimizer holds
            tensors, self.manifest = describe(model, buffers)
            self.shards = find_shards(model, tensors)
            self.tensors: Mapping[str, Tensor] = Locals(tensors)
        else:
            self.tensors, self.manifest = describe(model, buffers)
        on_meta = next((name for name, p in self.tensors.items() if p.is_meta), None)
        if on_meta is not None:
            raise ModelError(
                f"parameter {on_meta!r} is on the meta device: give the model real memory first (to_empty)"
            )
        if not self.tensors:
            raise ModelError("the model has no trainable parameters (requires_grad=True): there is nothing to exchange")
        odd = next((name for name, p in self.tensors.items() if not p.is_floating_point()), None)
        if odd is not None:
            raise ModelError(f"parameter {odd!r} has dtype {self.tensors[odd].dtype}: only floating point is exchanged")
        self.anchors: dict[str, Tensor] = {}
        self._statistics = {spec.name for spec in self.manifest.parameters if spec.role != "parameter"}

    def deltas(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: pseudo_gradient(self.anchors[name], self.tensors[name]) for name in names}

    def adopt(self, agreed: Mapping[str, Tensor]) -> None:
        """Our steps are in it (or there were none): local = anchor = θ′."""
        for name, theta in agreed.items():
            adopt(self.tensors[name], theta)
        self._written(agreed)

    def rebase(self, agreed: Mapping[str, Tensor]) -> None:
        """It came about without us: move along, keep our unsent steps."""
        steps, statistics = self._apart(agreed)
        for name, theta in steps.items():
            rebase(self.tensors[name], self.anchors[name], theta)
        self._written(steps)
        self.adopt(statistics)

    def carry(self, agreed: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> None:
        """It holds what we sent; what we did since then stays ours."""
        steps, statistics = self._apart(agreed)
        for name, theta in steps.items():
            carry(self.tensors[name], self.anchors[name], theta, sent[name])
        self._written(steps)
        self.adopt(statistics)

    def mix(self, agreed: Mapping[str, Tensor], alpha: float) -> None:
        """It holds what we sent; of what we did since then, α stays."""
        for name, theta in agreed.items():
            mix(self.tensors[name], theta.to(self.tensors[name].device), alpha)
        self._written(agreed)

    def _written(self, agreed: Mapping[str, Tensor]) -> None:
        """The local weights were moved: the anchor follows, and no copy of what they were is used any more."""
        self.set_anchor(agreed)
        self._reshard()

    def _apart(self, agreed: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Parameters, and buffers: a statistic forgets by itself, and l + (θ′ − θ) of a variance may be negative, so it
        is never carried along but taken as it was agreed."""
        steps = {name: theta for name, theta in agreed.items() if name not in self._statistics}
        return steps, {name: theta for name, theta in agreed.items() if name in self._statistics}

    def set_anchor(self, agreed: Mapping[str, Tensor]) -> None:
        for name, theta in agreed.items():
            anchor = self.anchors.get(name)
            if anchor is None:
                self.anchors[name] = theta.to(self.tensors[name].device, copy=True)
            else:
                anchor.copy_(theta)

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """Inside, the model holds the anchor; afterwards its own weights again."""
        own = {name: p.detach().clone() for name, p in self.tensors.items()}
        try:
            for name, param in self.tensors.items():
                adopt(param, self.anchors[name])
            self._reshard()
            yield
        finally:
            self.restore(own)

    def restore(self, own: Mapping[str, Tensor]) -> None:
        for name, tensor in self.tensors.items():
            adopt(tensor, own[name])
        self._reshard()


def _unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module: torch.compile and DDP wrap it and would prefix every name."""
    while True:
        inner = getattr(model, "_orig_mod", model)
        if isinstance(inner, nn.parallel.DistributedDataParallel):
            inner = inner.module
        if inner is model:
            return model
        model = inner
