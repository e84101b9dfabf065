"""The initial weights of a run, handed by its first worker to the server that `outerstep run` starts beside it.

The way is a folder on this machine that only its user can write to. Nothing that arrives over the network ever becomes
the model that all workers start from (docs/adr/0035-the-first-script-brings-the-model.md).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
from torch import Tensor, nn

from ..attached import INITIAL_VARIABLE
from ..model_folder import WEIGHTS, save_state_dict
from .replica import unwrapped


def hand_over_initial(model: nn.Module, environ: Mapping[str, str] = os.environ) -> None:
    """Write the model where `outerstep run` waits for it, unless it is there already. Of a group every process calls
    this: the shards of a tensor are on all of them."""
    folder = environ.get(INITIAL_VARIABLE)
    if not folder or (Path(folder) / WEIGHTS).exists():
        return
    model = unwrapped(model)
    # What a module keeps beside tensors (`get_extra_state`) is not the run's.
    state = {name: _whole(value) for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    if dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
        return
    for part in (getattr(model, "config", None), getattr(model, "generation_config", None)):
        if callable(save := getattr(part, "save_pretrained", None)):
            save(folder)
    save_state_dict(state, folder)  # last, and at once: this file is the sign that all is there


def _whole(tensor: Tensor) -> Tensor:
    gather = getattr(tensor, "full_tensor", None)  # of a DTensor (FSDP2): all ranks meet in it
    whole: Tensor = gather() if gather is not None else tensor
    return whole
