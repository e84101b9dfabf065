"""What a look at the weights sees, and what it takes for unchanged."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from outerstep.worker.outside import LOOKED_AT, OutsideWatch
from outerstep.worker.replica import Replica


class Watched:
    """`deep` layers and their optimizer. `on_host` False: as if values were on a device that must be waited for."""

    def __init__(self, deep: int = 2, *, on_host: bool = True, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(deep))).to(dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.watch = OutsideWatch(Replica(self.model), self.optimizer)
        if not on_host:
            self.watch._on_host = False
            self.watch.record()
        self.watch._closely = False

    def step(self) -> None:
        for param in self.model.parameters():
            param.grad = torch.ones_like(param)
        self.optimizer.step()
        self.watch.record()

    def looked(self, *, closely: bool = False) -> bool:
        self.watch.look(closely=closely)
        return self.watch.changed


hosts = pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])


@hosts
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_steps_are_no_change(on_host: bool, dtype: torch.dtype) -> None:
    seen = Watched(on_host=on_host, dtype=dtype)
    for _ in range(3):
        assert not seen.looked(closely=True)
        seen.step()
    assert not seen.looked()


@hosts
@pytest.mark.parametrize("deep", [1, 2, 40])
def test_a_load_is_one_in_a_model_of_any_size(on_host: bool, deep: int) -> None:
    seen = Watched(deep, on_host=on_host)
    seen.step()
    seen.model.load_state_dict({name: value + 1e-3 for name, value in seen.model.state_dict().items()})
    assert seen.looked()


def test_a_look_costs_the_same_in_a_model_of_any_size() -> None:
    assert len(Watched(40).watch._looked) == LOOKED_AT


@hosts
def test_the_first_and_the_last_matrix_are_among_those_looked_at(on_host: bool) -> None:
    for index in (0, -2):
        seen = Watched(40, on_host=on_host)
        with torch.no_grad():
            list(seen.model.parameters())[index].add_(1.0)
        assert seen.looked()


@hosts
def test_without_a_matrix_vectors_are_looked_at(on_host: bool) -> None:
    seen = Watched(on_host=on_host)
    norm = nn.LayerNorm(3)
    seen.watch = OutsideWatch(Replica(norm), torch.optim.SGD(norm.parameters(), lr=1.0))
    norm.load_state_dict({name: value + 1.0 for name, value in norm.state_dict().items()})
    assert seen.looked()


def test_what_counters_do_not_show_the_values_do() -> None:
    seen = Watched()
    for param in seen.model.parameters():
        param.data.add_(1.0)
    assert seen.looked()


def test_on_a_device_only_a_close_look_shows_it() -> None:
    seen = Watched(on_host=False)
    for param in seen.model.parameters():
        param.data.add_(1.0)
    assert not seen.looked()
    assert seen.looked(closely=True)


@hosts
def test_the_first_look_after_an_exchange_is_a_close_one(on_host: bool) -> None:
    seen = Watched(on_host=on_host)
    seen.watch.record(anew=True, closely=True)
    for param in seen.model.parameters():
        param.data.add_(1.0)
    assert seen.looked()


def swap(model: nn.Module, back: Callable[[torch.Tensor], torch.Tensor]) -> None:
    own = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict({name: value + 1.0 for name, value in own.items()})
    model.load_state_dict({name: back(value) for name, value in own.items()})


@hosts
def test_swapped_out_and_back_is_no_change_nor_is_a_rounding_error(on_host: bool) -> None:
    seen = Watched(on_host=on_host)
    swap(seen.model, lambda value: value)
    assert not seen.looked()
    seen.step()
    swap(seen.model, lambda value: (value + 0.1) - 0.1)
    assert not seen.looked()


def test_other_memory_with_the_same_values_is_no_change_and_is_looked_at_from_then_on() -> None:
    seen = Watched()
    for param in seen.model.parameters():
        param.data = param.data.clone()
    assert not seen.looked()
    seen.step()
    for param in seen.model.parameters():
        param.data.add_(1.0)
    assert seen.looked()


def test_weights_that_are_not_finite_are_compared_too() -> None:
    seen = Watched()
    with torch.no_grad():
        for param in seen.model.parameters():
            param.fill_(float("nan"))
    seen.watch.record()
    assert not seen.looked(closely=True)
    with torch.no_grad():
        for param in seen.model.parameters():
            param.fill_(float("inf"))
    assert seen.looked()


def test_other_layouts_and_shapes() -> None:
    model = nn.Module()
    model.image = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    model.scale = nn.Parameter(torch.tensor(1.0))
    model.empty = nn.Parameter(torch.zeros(0, 3))
    watch = OutsideWatch(Replica(model), torch.optim.SGD(model.parameters(), lr=1.0))
    watch.look()
    assert not watch.changed
    model.image.data.add_(1.0)
    watch.look()
    assert watch.changed


def test_statistics_change_in_every_forward_pass_and_are_not_looked_at() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    watch = OutsideWatch(Replica(model, "average"), torch.optim.SGD(model.parameters(), lr=1.0))
    model(torch.randn(4, 3))
    watch.look(closely=True)
    assert not watch.changed


def test_an_optimizer_of_other_parameters_has_nothing_to_look_at() -> None:
    model = nn.Linear(3, 3)
    watch = OutsideWatch(Replica(model), torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0))
    with torch.no_grad():
        model.weight.add_(1.0)
    watch.look(closely=True)
    assert not watch.changed
