"""Anchors in host memory on their way to a GPU and back, with a GPU that is none: who waits for whom."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from outerstep.topology import device as device_module
from outerstep.topology.device import ANCHOR_SLOTS, Shuttle


class Gpu:
    """Its streams do at once what they are told, and write down what they wait for."""

    type = "cuda"

    def __init__(self) -> None:
        self.log: list[str] = []
        self.slots = self.made = 0

    def stream(self, name: str) -> Any:
        return SimpleNamespace(
            name=name,
            wait_event=lambda event: self.log.append(f"{name} waits for {event.of}"),
            wait_stream=lambda other: self.log.append(f"{name} waits for {other.name}"),
            synchronize=lambda: self.log.append(f"the host waits for {name}"),
        )

    def new_stream(self, device: object) -> Any:
        self.made += 1
        return self.stream(("in", "out")[self.made - 1])

    def event(self) -> Any:
        event = SimpleNamespace(of="nothing")

        def record(stream: Any) -> None:
            event.of = f"{stream.name} {sum(line.startswith('training waits') for line in self.log)}"

        event.record = record
        return event

    def empty(self, count: int, **kind: Any) -> Tensor:
        self.slots += 1
        return torch.empty(count).as_subclass(OnGpu)


GPU = Gpu()


class OnGpu(Tensor):
    @property
    def device(self) -> Any:
        return GPU

    def record_stream(self, stream: Any) -> None: ...


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    GPU.__init__()  # type: ignore[misc]

    @contextmanager
    def using(stream: Any) -> Iterator[None]:
        yield

    cuda = SimpleNamespace(
        current_stream=lambda device: GPU.stream("training"), Stream=GPU.new_stream, Event=GPU.event, stream=using
    )
    monkeypatch.setattr(device_module, "torch", SimpleNamespace(empty=GPU.empty, cuda=cuda))
    return GPU


def test_blocks_come_and_go_in_a_few_slots_each_after_what_it_held_has_left(gpu: Gpu) -> None:
    shuttle, host = Shuttle(), torch.arange(60.0)
    for number in range(6):
        block = host[10 * number : 10 * number + 10]
        held = shuttle.bring(block, gpu)  # type: ignore[arg-type]
        assert held.tolist() == [10.0 * number + i for i in range(10)]
        shuttle.take_back(held.mul_(2.0), block)
    shuttle.wait()
    assert host.tolist() == [2.0 * i for i in range(60)]
    assert gpu.slots == ANCHOR_SLOTS
    waits = [line for line in gpu.log if line.startswith("in waits")]
    # A fresh slot may be memory that the training still uses; later it is free when its earlier block went back.
    assert waits[:3] == [f"in waits for training {number}" for number in range(3)]
    assert waits[3:] == [f"in waits for out {number}" for number in (1, 2, 3)]
    assert gpu.log[-1] == "the host waits for out"


def test_what_was_made_elsewhere_goes_back_by_way_of_the_slot(gpu: Gpu) -> None:
    shuttle, host = Shuttle(), torch.zeros(10)
    held = shuttle.bring(host, gpu)  # type: ignore[arg-type]
    made = (held + 1.0).as_subclass(OnGpu)
    shuttle.take_back(made, host)
    assert host.tolist() == [1.0] * 10
    assert held.tolist() == [1.0] * 10  # so what made it may be overwritten at once


def test_what_is_only_read_is_let_go_when_the_training_has_read_it(gpu: Gpu) -> None:
    shuttle, host = Shuttle(), torch.zeros(10)
    for _ in range(4):
        shuttle.bring(host, gpu)  # type: ignore[arg-type]
        shuttle.dismiss(gpu)  # type: ignore[arg-type]
    assert [line for line in gpu.log if line.startswith("in waits")][3] == "in waits for training 1"


def test_a_larger_block_gets_a_larger_slot(gpu: Gpu) -> None:
    shuttle = Shuttle()
    for count in (10, 10, 10, 20, 10):
        assert shuttle.bring(torch.ones(count), gpu).tolist() == [1.0] * count  # type: ignore[arg-type]
        shuttle.dismiss(gpu)  # type: ignore[arg-type]
    assert gpu.slots == ANCHOR_SLOTS + 1


def test_nothing_travels_on_a_host() -> None:
    values = torch.ones(5)
    assert Shuttle().bring(values, torch.device("cpu")) is values
