"""Which optimizers a worker can count the steps of.

A worker hooks into `optimizer.step()`. One that steps *in backward*, parameter by parameter as each gradient is ready,
has moved the weights before anybody calls `step()`. There are two kinds, which are told apart here:

    a container    one optimizer for all, whose `step()` comes once per step, after backward, and does little or
                   nothing (torchtitan's). Its hook is at the right place. The weights move between two of its steps,
                   which is learning here and not somebody's edit
    single ones    an optimizer per parameter, which steps in the midst of a backward: refused. After it the other
                   parameters have not moved yet, so no exchange could be complete
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import ModelError


def check_optimizer(optimizer: object) -> None:
    """Refused by name if nobody can tell when it has stepped."""
    if hasattr(optimizer, "register_step_post_hook"):
        return
    kind = type(optimizer)
    raise ModelError(
        f"the optimizer {kind.__module__}.{kind.__qualname__} has no step hooks (register_step_post_hook), so nobody "
        "can tell when it has stepped: give a torch.optim.Optimizer, or derive one from it whose step() calls yours"
    )


def steps_in_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Do parameters of the model move while gradients are computed? Refuses an optimizer of single parameters that does
    it."""
    hooked = [name for name, param in model.named_parameters() if _has_hook(param)]
    for name, param in model.named_parameters():
        if any(own is optimizer for own in getattr(param, "_in_backward_optimizers", ())):
            raise ModelError(
                f"this {type(optimizer).__name__} steps {name!r} in backward, when the other parameters have not moved "
                "yet: give the worker an optimizer of all of them whose step() is called after backward"
            )
    return bool(hooked)


def _has_hook(param: Any) -> bool:
    """Something runs when its gradient is ready: an optimizer in backward, or what cannot be told from one."""
    return bool(getattr(param, "_in_backward_optimizers", None) or getattr(param, "_post_accumulate_grad_hooks", None))
