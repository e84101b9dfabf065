"""A payload is heard of part by part, in order and whole, whoever writes it and whoever listens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from outerstep.core.codecs import Dither
from outerstep.core.codecs.recipe import Recipe
from outerstep.core.feedback import ErrorFeedback
from outerstep.digest import part_count, part_hash, part_range
from outerstep.threads import process_helpers
from outerstep.topology import device as device_module
from outerstep.topology.device import SLOTS
from outerstep.topology.encode import Excerpt, ReadyDeltas, Sender, write_frame
from outerstep.topology.payload import Memory, OutgoingFrame, PartReady
from outerstep.wire.frames import Layout, check_frame, layout
from support import wait_until

TENSORS = {"c": torch.randn(300_001), "a": torch.randn(3, 100), "none": torch.empty(0, 2), "b": torch.randn(7)}


class Ear:
    def __init__(self) -> None:
        self.heard: list[tuple[int, str]] = []
        self.errors: list[BaseException] = []

    def __call__(self, said: PartReady | BaseException) -> None:
        if isinstance(said, PartReady):
            self.heard.append((said.part, said.hash))
        else:
            self.errors.append(said)


def make(codec: str = "bf16", tensors: dict[str, Tensor] = TENSORS) -> tuple[Layout, Sender]:
    rule = Recipe.parse(codec).usual
    up = layout(codec, [(n, tuple(t.shape), rule.codec.encoded_bytes(t.numel())) for n, t in tensors.items()])
    feedback = ErrorFeedback()
    feedback.begin(0, 1)
    return up, Sender(
        0, ReadyDeltas(tensors), dict.fromkeys(tensors, rule), feedback, lambda n: Dither.of("r", 0, 1, n), {}
    )


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4", "sparse64"])
@pytest.mark.parametrize("part_size_bytes", [64, 4096, 1 << 24])
def test_all_parts_are_told_in_order_with_their_hashes(codec: str, part_size_bytes: int) -> None:
    up, sender = make(codec)
    payload, ear = OutgoingFrame(up, part_size_bytes, first_part=5, memory=Memory()), Ear()
    payload.listen(ear)
    write_frame(payload, up, sender)
    payload.wait()
    frame = payload.data.numpy().data
    check_frame(frame, up)
    count = part_count(len(frame), part_size_bytes)
    parts = [frame[slice(*part_range(i, len(frame), part_size_bytes))] for i in range(count)]
    assert ear.heard == [(5 + i, part_hash(part)) for i, part in enumerate(parts)]
    assert payload.hashes(range(5, 5 + count)) == tuple(part_hash(part) for part in parts)
    assert bytes(payload.read(5 + count - 1)) == bytes(parts[-1])


def test_who_comes_later_hears_of_the_past_and_who_was_there_no_more() -> None:
    up, sender = make()
    payload, first, second = OutgoingFrame(up, 64, memory=Memory()), Ear(), Ear()
    payload.listen(first)
    payload.written(100)
    payload.listen(second)
    write_frame(payload, up, sender)
    assert [part for part, _ in first.heard] == [0]
    assert [part for part, _ in second.heard] == list(range(part_count(up.size_bytes, 64)))


def test_nothing_to_send_is_complete_and_knows_what_it_is_told_of_others() -> None:
    payload, ear = OutgoingFrame(None, 64, memory=Memory()), Ear()
    payload.tell(3, "0" * 16)
    payload.listen(ear)
    assert ear.heard == [(3, "0" * 16)]


def test_rows_are_encoded_as_if_the_whole_tensor_were() -> None:
    """With random rounding too: its numbers go by the place in the whole tensor."""
    whole = {"w": torch.randn(40, 25)}
    up, sender = make("bf16+stochastic", whole)
    payload = OutgoingFrame(up, 1 << 20, memory=Memory())
    write_frame(payload, up, sender)
    for held in (whole["w"], whole["w"][15:35]):  # held whole, and only these rows
        rows, part = make("bf16+stochastic", {"w": whole["w"][15:35]})
        excerpt = Excerpt(whole=15 * 25, held=15 * 25 if len(held) == 40 else 0)
        section = OutgoingFrame(rows, 1 << 20, memory=Memory())
        write_frame(
            section,
            rows,
            Sender(0, ReadyDeltas({"w": held}), part.rules, part.feedback, part.dither, {"w": excerpt}),
        )
        ours = section.data[rows.data_begin : rows.data_begin + 2 * 500]
        assert torch.equal(ours, payload.data[up.data_begin + 2 * 375 : up.data_begin + 2 * 875])


# --- a GPU that is none: the order of things -----------------------------------------------------------------------


class Device:
    """A stand-in whose streams do at once what is queued, and write down what they wait for."""

    type = "cuda"

    def __init__(self) -> None:
        self.log: list[str] = []
        self.buffers = 0

    def stream(self, name: str) -> Any:
        return SimpleNamespace(
            wait_event=lambda event: self.log.append(f"{name} waits for {event.of}"),
            wait_stream=lambda other: self.log.append(f"{name} waits for training"),
        )

    def event(self) -> Any:
        event = SimpleNamespace(of="nothing", synchronize=lambda: None)
        event.record = lambda stream: setattr(event, "of", "a copy")
        return event

    def empty(self, size: int, **kind: Any) -> Tensor:
        self.buffers += 1
        return torch.empty(size, dtype=torch.uint8)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()

    @contextmanager
    def using(stream: Any) -> Iterator[None]:
        yield

    cuda = SimpleNamespace(
        current_stream=lambda device: made.stream("training"),
        Stream=lambda device: made.stream("side"),
        Event=made.event,
        stream=using,
    )
    monkeypatch.setattr(device_module, "torch", SimpleNamespace(empty=made.empty, uint8=torch.uint8, cuda=cuda))
    return made


class OnGpu(ReadyDeltas):
    def __init__(self, tensors: dict[str, Tensor], gpu: Device, names: set[str]) -> None:
        super().__init__(tensors)
        self._gpu, self._names = gpu, names

    def device(self, name: str) -> Any:
        return self._gpu if name in self._names else torch.device("cpu")


@pytest.mark.parametrize("names", [{"a", "b", "c"}, {"b"}])
def test_what_is_encoded_on_a_gpu_is_the_same_frame(gpu: Device, names: set[str]) -> None:
    up, sender = make("int8")
    expected, payload = OutgoingFrame(up, 4096, memory=Memory()), OutgoingFrame(up, 4096, memory=Memory())
    write_frame(expected, up, sender)
    deltas = OnGpu(TENSORS, gpu, names)
    write_frame(payload, up, Sender(0, deltas, sender.rules, sender.feedback, sender.dither, {}))
    payload.wait()
    assert torch.equal(payload.data, expected.data)
    assert gpu.buffers <= SLOTS + 1  # a larger block takes the place of a smaller one
    assert gpu.log[:2] == ["training waits for nothing", "side waits for training"]
    if len(names) > SLOTS:
        assert "training waits for a copy" in gpu.log


def test_an_error_on_the_way_from_a_gpu_is_told(gpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    up, sender = make()
    payload, ear = OutgoingFrame(up, 4096, memory=Memory()), Ear()
    payload.listen(ear)

    def fail() -> None:
        raise RuntimeError("the GPU has fallen off the bus")

    monkeypatch.setattr(gpu, "event", lambda: SimpleNamespace(of="", synchronize=fail, record=lambda stream: None))
    device_module.torch.cuda.Event = gpu.event  # type: ignore[attr-defined]
    write_frame(payload, up, Sender(0, OnGpu(TENSORS, gpu, {"a"}), sender.rules, sender.feedback, sender.dither, {}))
    with pytest.raises(RuntimeError, match="off the bus"):
        payload.wait()
    assert len(ear.errors) == 1
    late = Ear()
    payload.listen(late)
    assert len(late.errors) == 1


def test_an_encoder_that_fails_leaves_no_thread_at_work(gpu: Device) -> None:
    before = process_helpers().busy
    up, sender = make()
    deltas = OnGpu({name: t for name, t in TENSORS.items() if name != "b"}, gpu, {"a"})
    with pytest.raises(KeyError, match="b"):
        write_frame(
            OutgoingFrame(up, 4096, memory=Memory()),
            up,
            Sender(0, deltas, sender.rules, sender.feedback, sender.dither, {}),
        )
    wait_until(lambda: process_helpers().busy == before)


def test_a_frame_begins_no_thread_if_an_earlier_one_did(gpu: Device) -> None:
    up, sender = make()
    started = []
    for _ in range(3):
        payload = OutgoingFrame(up, 4096, memory=Memory())
        deltas = OnGpu(TENSORS, gpu, {"a"})
        write_frame(payload, up, Sender(0, deltas, sender.rules, sender.feedback, sender.dither, {}))
        payload.wait()
        wait_until(lambda: process_helpers().busy == 0)
        started.append(process_helpers().started)
    assert started[0] == started[1] == started[2] > 0
