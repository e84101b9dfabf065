"""A saved state, and the outer optimizer that it meets."""

from __future__ import annotations

import pytest
import torch

from outerstep.core.outer import Nesterov, TorchOuter
from outerstep.errors import ConfigError
from outerstep.server.outer_state import check_kind, state_of
from outerstep.server.saved import OptimizerState


def adam() -> TorchOuter:
    return TorchOuter(lambda params: torch.optim.Adam(params), {"a": (2,)})


def with_memory(state: OptimizerState) -> OptimizerState:
    return OptimizerState(state.kind, {"a": {"momentum_buffer": torch.zeros(2)}}, state.facts)


def test_another_outer_optimizer_is_refused_by_the_names_of_both() -> None:
    with pytest.raises(ConfigError, match="saved with the outer optimizer 'Adam', now it is 'nesterov'; resume"):
        check_kind(Nesterov(), with_memory(state_of(adam())))
    with pytest.raises(ConfigError, match="saved with the outer optimizer 'nesterov', now it is 'Adam'; resume"):
        check_kind(adam(), with_memory(OptimizerState("nesterov")))


def test_a_state_of_an_older_version_says_what_it_knows() -> None:
    with pytest.raises(
        ConfigError, match=r"'torch': a class of torch\.optim, or one of your own, now it is 'nesterov'"
    ):
        check_kind(Nesterov(), with_memory(OptimizerState("torch")))
