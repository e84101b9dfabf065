"""Optimizers that step in backward are told from those that nobody can tell the steps of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from outerstep.errors import ModelError
from outerstep.worker.optimizers import check_optimizer, steps_in_backward


class Stepper:
    """Steps, and tells nobody."""

    def step(self) -> None: ...


class Container(torch.optim.Optimizer):
    """As torchtitan's: one optimizer for each parameter, which steps when its gradient is there."""

    def __init__(self, model: nn.Module) -> None:
        each = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}
        super().__init__(list(each), {})

        def step(param: torch.Tensor) -> None:
            each[param].step()  # type: ignore[index]
            each[param].zero_grad()

        for param in each:
            param.register_post_accumulate_grad_hook(step)

    def step(self, closure: Any = None) -> None: ...


def test_an_optimizer_without_a_step_hook_is_refused_by_its_name() -> None:
    with pytest.raises(ModelError, match=r"test_optimizers\.Stepper has no step hooks"):
        check_optimizer(Stepper())
    check_optimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1, fused=False))


def test_an_ordinary_one_does_not_step_in_backward_and_a_container_does() -> None:
    model = nn.Linear(2, 2)
    assert not steps_in_backward(model, torch.optim.AdamW(model.parameters()))
    assert steps_in_backward(model, Container(model))


def test_one_of_a_single_parameter_that_steps_in_backward_is_refused_by_name() -> None:
    model = nn.Linear(2, 2)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    single = model.bias._in_backward_optimizers[0]
    with pytest.raises(ModelError, match="steps 'bias' in backward"):
        steps_in_backward(model, single)
    assert steps_in_backward(model, torch.optim.SGD(model.parameters(), lr=0.0))
