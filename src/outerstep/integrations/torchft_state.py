"""The complete state that a healing replica needs: model, inner optimizer, anchors, outer optimizers, all copied.

torchft fetches this state over HTTP while its owner keeps training. A live tensor would be read half changed; with a
part missing the healed replica would send θ_peer − l_own, which is nobody's pseudo-gradient.

A sharded tensor (FSDP2) travels as this rank's part, to the same rank of the other group: a DTensor's description of
its mesh belongs to its own job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from ..errors import ModelError


def local_part(tensor: Tensor) -> Tensor:
    """The tensor, or this rank's part of a sharded one; the memory is shared."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _copied(state: Any) -> Any:
    """The same structure with every tensor copied to host memory; of a sharded one, this rank's part."""
    return tree_map(lambda leaf: local_part(leaf).to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf, state)


class HealingState:
    """Saves and loads the state. Both sides have the same model and the same number of ranks."""

    def __init__(
        self,
        model: nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        anchors: Sequence[Mapping[str, Tensor]],
        outer_optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self._model, self._inner = model, inner_optimizer
        self._anchors, self._outer = anchors, outer_optimizers

    def save(self) -> dict[str, Any]:
        for optimizer in (self._inner, *self._outer):
            _check_sharding(optimizer)
        state: dict[str, Any] = _copied(
            {
                "model": self._model.state_dict(),
                "inner_optimizer": self._inner.state_dict(),
                "anchors": [dict(anchor) for anchor in self._anchors],
                "outer_optimizers": [optimizer.state_dict() for optimizer in self._outer],
            }
        )
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        ours = self._model.state_dict()
        theirs = {name: _like(value, ours.get(name)) for name, value in state["model"].items()}
        self._model.load_state_dict(theirs)
        _load_optimizer(self._inner, state["inner_optimizer"])
        for optimizer, saved in zip(self._outer, state["outer_optimizers"], strict=True):
            _load_optimizer(optimizer, saved)
        for anchor, loaded in zip(self._anchors, state["anchors"], strict=True):
            if anchor.keys() != loaded.keys():
                raise ModelError("the replica that this one heals from has other fragments: use the same on all")
            for name, tensor in anchor.items():
                tensor.copy_(loaded[name])


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    params = _params(optimizer)
    state = {
        index: {key: _like_state(value, params[index]) for key, value in entry.items()}
        for index, entry in saved["state"].items()
    }
    optimizer.load_state_dict({**saved, "state": state})


def _params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters in the order of a state dict's numbers."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def _like_state(value: Any, param: Tensor) -> Any:
    """An optimizer's state of a sharded parameter is sharded like it, except counters. The optimizer keeps the tensor,
    so it gets a copy: the received memory may be read-only."""
    if not isinstance(value, Tensor):
        return value
    is_shard = value.dim() > 0 and value.shape == local_part(param).shape
    return _like(value.clone(), param) if is_shard else value.clone()


def _like(value: Any, template: Any) -> Any:
    """This rank's part as a tensor sharded like `template`; anything else unchanged."""
    if not isinstance(template, DTensor):
        return value
    return DTensor.from_local(
        value.to(template.device),
        template.device_mesh,
        template.placements,
        run_check=False,
        shape=template.shape,
        stride=template.stride(),
    )


def _check_sharding(optimizer: torch.optim.Optimizer) -> None:
    for param in _params(optimizer):
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, DTensor) and (
                not isinstance(param, DTensor) or (value.shape, value.placements) != (param.shape, param.placements)
            ):
                raise ModelError(
                    f"{type(optimizer).__name__} shards {key!r} unlike its parameter ({value.placements}): "
                    "a replica could not heal. Use an optimizer whose state has its parameters' shape"
                )
