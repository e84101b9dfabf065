"""Weights that moved outside `optimizer.step()`: how a worker notices them at next to no cost.

A script that loads a checkpoint inside the `with` (Hugging Face's `resume_from_checkpoint`, `load_best_model_at_end`)
leaves weights in the model that this worker has not learned. Sent as a pseudo-gradient they would pull the agreed model
to wherever that checkpoint was.

The watch compares two traces. Torch counts the in-place writes to a tensor (`_version`), and every load writes in
place. And a few values are remembered: weights that were swapped out for an evaluation and back again (for their
average, say) have other counters but the same values, and have not changed; weights written through `.data` have other
values but the same counters. A look costs the same for every size of model. So it may miss an edit of one small layer
among many; a load writes to all of them.

    record              after each step, and after each write of our own
    look                before the next step, and before anything is sent

On a GPU, reading a value means waiting for the device. There, values are read only if a counter has moved, or if the
look is a close one: before the first step after an exchange, and at the end.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .replica import Replica

LOOKED_AT = 6  # parameters; each one more makes every step slower
VALUES = 16  # of each parameter
ROUNDING = 2e-6  # relative to the largest value; averaging weights and restoring them changes them by less
NOTHING = torch.empty(0)


class OutsideWatch:
    """Watches the parameters of one optimizer. `changed`: something else has moved them, and nobody has reacted yet."""

    def __init__(self, replica: Replica, optimizer: torch.optim.Optimizer, *, changed: bool = False) -> None:
        """(Only this optimizer may move its parameters; those of other optimizers are not watched.)"""
        self._replica = replica
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        names = replica.parameters_among(held)
        matrices = [name for name in names if replica.tensors[name].dim() > 1]  # norms and biases may never move
        self._names = _spread(matrices or names)
        self.changed = changed
        self.record(anew=True, closely=True)

    def record(self, *, anew: bool = False, closely: bool = False) -> None:
        """Record the weights: they are as they should be. `anew`: they may be in other memory than before; `closely`:
        make the next look a close one."""
        if anew:
            self._find()
        self._closely = closely
        self._versions = [tensor._version for tensor in self._looked]
        self._values = torch.cat(self._spots) if self._spots else NOTHING  # on a GPU without waiting for it

    def look(self, *, closely: bool = False) -> None:
        """Set `changed` if the weights have moved since the last record."""
        if self.changed:
            return
        closely, self._closely = closely or self._closely, False
        moved = [tensor._version for tensor in self._looked] != self._versions
        moved = moved or (bool(self._looked) and self._place != self._looked[0].data_ptr())
        if (
            moved
            or closely
            or (self._on_host and self._spots and not torch.equal(torch.cat(self._spots), self._values))
        ):
            self.changed = self._differs()

    @torch.no_grad()
    def _find(self) -> None:
        tensors = (self._replica.tensors[name] for name in self._names)
        self._looked = [tensor for tensor in tensors if tensor.numel()]
        self._spots = [_middle(tensor) for tensor in self._looked if tensor.device == self._looked[0].device]
        self._on_host = all(spot.device.type == "cpu" for spot in self._spots)
        # Code that gives `.data` other memory seldom does so for one parameter alone.
        self._place = self._looked[0].data_ptr() if self._looked else 0

    def _differs(self) -> bool:
        """Compare all recorded values."""
        self._find()  # they may be in other memory
        now = torch.cat(self._spots) if self._spots else NOTHING
        before, now = self._values.double(), now.double()
        largest = max(before.nan_to_num(posinf=0.0, neginf=0.0).abs().tolist(), default=0.0)
        return not torch.allclose(before, now, rtol=0.0, atol=ROUNDING * largest, equal_nan=True)


def _middle(tensor: Tensor) -> Tensor:
    """A few values from the middle of a tensor, as a view."""
    row = tensor.detach()[tuple(size // 2 for size in tensor.shape[:-1])]
    return row.view(1) if row.dim() == 0 else row[max(0, row.numel() // 2 - VALUES // 2) :][:VALUES]


def _spread(names: Iterable[str]) -> list[str]:
    """The first one, the last one, and some in between."""
    found = list(names)
    if len(found) <= LOOKED_AT:
        return found
    return [found[i * (len(found) - 1) // (LOOKED_AT - 1)] for i in range(LOOKED_AT)]
