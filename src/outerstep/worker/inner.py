"""What a worker has beside its anchor, for one who takes its place or joins it (topology/torchft/): the optimizer's
state, the buffers that are not exchanged, how much was trained, and what the user gave it to take along.

Copies in host memory, and nothing but tensors, numbers, text and their containers: it is read by another process, which
runs no code that it finds in there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..coordination.worker.machine import Work
from ..errors import ConfigError


class Stateful(Protocol):
    """A sampler, a scheduler: whatever has these two."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> object: ...


class InnerState:
    """`work`: how much this worker has trained so far."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        exchanged: Mapping[str, Tensor],
        stateful: Mapping[str, Stateful],
        work: Callable[[], Work],
    ) -> None:
        self._optimizer, self._stateful, self._work = optimizer, stateful, work
        self._buffers = {name: buffer for name, buffer in model.named_buffers() if name not in exchanged}
        for name, one in stateful.items():
            _copied(_states(name, one), f"stateful[{name!r}]")

    def state(self) -> dict[str, Any]:
        work = self._work()
        return {
            "work": [work.steps, work.samples, work.tokens],
            "optimizer": _copied(self._optimizer.state_dict(), "the optimizer's state"),
            "buffers": _copied(self._buffers, "the model's buffers"),
            "stateful": {name: _copied(_states(name, one), name) for name, one in self._stateful.items()},
        }

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> tuple[int, int, int]:
        """Of another worker of the same run."""
        self._optimizer.load_state_dict(self._sharded(state["optimizer"]))
        for name, buffer in self._buffers.items():
            if name in state["buffers"]:
                buffer.copy_(state["buffers"][name])
        for name, one in self._stateful.items():
            if name not in state["stateful"]:
                raise ConfigError(f"stateful[{name!r}] is not known to the other workers: give all the same")
            one.load_state_dict(state["stateful"][name])
        steps, samples, tokens = state["work"]
        return steps, samples, tokens

    def _sharded(self, state: dict[str, Any]) -> dict[str, Any]:
        """What belongs to a sharded parameter (FSDP2) was sent as plain rows, and is of its kind again."""
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        for index, kept in state["state"].items():
            param = params[int(index)]
            if hasattr(param, "to_local"):
                rows = param.to_local().shape
                for name, value in kept.items():
                    if isinstance(value, Tensor) and value.shape == rows and value.dim():
                        kept[name] = _like(param, value)
        return state


def _like(param: Any, rows: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    local = rows.to(param.to_local().device)
    sharded: Tensor = DTensor.from_local(
        local, param.device_mesh, param.placements, shape=param.shape, stride=param.stride()
    )
    return sharded


def _states(name: str, one: Stateful) -> dict[str, Any]:
    if not hasattr(one, "state_dict") or not hasattr(one, "load_state_dict"):
        raise ConfigError(f"stateful[{name!r}] must have state_dict() and load_state_dict(), got {type(one).__name__}")
    return one.state_dict()


def _copied(value: Any, what: str) -> Any:
    """In host memory, whatever is not plain refused."""
    if isinstance(value, Tensor):
        local: Tensor = value.to_local() if hasattr(value, "to_local") else value
        return local.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _copied(one, what) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(one, what) for one in value)
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)  # of numpy's numbers some are Python's too, but are not read as such
    if value is None:
        return None
    raise ConfigError(
        f"{what} must be tensors, numbers, text and lists or dicts of them to travel to another worker, "
        f"got a {type(value).__name__}"
    )
