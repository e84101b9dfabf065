"""The local copy of the model, and the anchor it departed from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from ..core.manifest import describe
from ..core.pseudogradient import adopt, carry, pseudo_gradient, rebase
from ..errors import ModelError


class Replica:
    """Trainable parameters by name (tied ones once), and their fp32 anchors on the same device."""

    def __init__(self, model: nn.Module) -> None:
        model = getattr(model, "_orig_mod", model)  # torch.compile wraps the module and would prefix every name
        self.params, self.manifest = describe(model)
        on_meta = next((name for name, p in self.params.items() if p.is_meta), None)
        if on_meta is not None:
            raise ModelError(
                f"parameter {on_meta!r} is on the meta device: give the model real memory first (to_empty)"
            )
        if not self.params:
            raise ModelError("the model has no trainable parameters (requires_grad=True): there is nothing to exchange")
        odd = next((name for name, p in self.params.items() if not p.is_floating_point()), None)
        if odd is not None:
            raise ModelError(f"parameter {odd!r} has dtype {self.params[odd].dtype}: only floating point is exchanged")
        self.anchors: dict[str, Tensor] = {}

    def deltas(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: pseudo_gradient(self.anchors[name], self.params[name]) for name in names}

    def adopt(self, agreed: Mapping[str, Tensor]) -> None:
        """Our steps are in it (or there were none): local = anchor = θ′."""
        for name, theta in agreed.items():
            adopt(self.params[name], theta)
        self.set_anchor(agreed)

    def rebase(self, agreed: Mapping[str, Tensor]) -> None:
        """It came about without us: move along, keep our unsent steps."""
        for name, theta in agreed.items():
            rebase(self.params[name], self.anchors[name], theta)
        self.set_anchor(agreed)

    def carry(self, agreed: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> None:
        """It holds what we sent; what we did since then stays ours."""
        for name, theta in agreed.items():
            carry(self.params[name], self.anchors[name], theta, sent[name])
        self.set_anchor(agreed)

    def set_anchor(self, agreed: Mapping[str, Tensor]) -> None:
        for name, theta in agreed.items():
            anchor = self.anchors.get(name)
            if anchor is None:
                self.anchors[name] = theta.to(self.params[name].device, copy=True)
            else:
                anchor.copy_(theta)

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """Inside, the model holds the anchor; afterwards its own weights again."""
        own = {name: p.detach().clone() for name, p in self.params.items()}
        try:
            for name, param in self.params.items():
                adopt(param, self.anchors[name])
            yield
        finally:
            for name, param in self.params.items():
                adopt(param, own[name])
