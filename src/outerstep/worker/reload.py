"""What the optimizer must forget when the agreed weights replace the local ones."""

from __future__ import annotations

import logging

import torch

from ..observe.quantities import counted

log = logging.getLogger(__name__)


def forget_non_finite(optimizer: torch.optim.Optimizer) -> None:
    """A NaN in the weights is one in Adam's moments too, and from there it would be back at the next step. What the
    optimizer knows of such a parameter is forgotten; it starts there as at the first step."""
    spoiled = [parameter for parameter, state in optimizer.state.items() if not all(map(_is_finite, state.values()))]
    for parameter in spoiled:
        optimizer.state[parameter].clear()
    if spoiled:
        log.warning(
            "the optimizer's state of %s held NaN or Inf, and was forgotten", counted(len(spoiled), "parameter")
        )


def _is_finite(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return True
    local = value.to_local() if hasattr(value, "to_local") else value  # of a sharded one, our rows
    return bool(torch.isfinite(local).all())
