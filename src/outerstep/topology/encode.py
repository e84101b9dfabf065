"""From pseudo-gradients to a frame, block by block: Δ, what is owed of earlier ones, encoded into its place, hashed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ..core.codecs import Codec, Dither
from ..core.codecs.recipe import CodecRule
from ..core.feedback import ErrorFeedback
from ..core.watch import sum_of_squares
from ..wire.frames import Entry, Layout
from .device import Ferry
from .forms import Form
from .payload import Memory, OutgoingFrame
from .protocol import Deltas
from .update import cuts

CPU = torch.device("cpu")


class ReadyDeltas:
    """Deltas that are ready, by name."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._flat: tuple[str, Tensor] = ("", torch.empty(0))

    def block(self, name: str, start: int, stop: int) -> Tensor:
        if self._flat[0] != name:
            self._flat = name, self._tensors[name].detach().reshape(-1)
        return self._flat[1][start:stop].float()

    def device(self, name: str) -> torch.device:
        return self._tensors[name].device

    def home(self, name: str) -> torch.device:
        return self._tensors[name].device


def as_deltas(deltas: Deltas | Mapping[str, Tensor]) -> Deltas:
    return ReadyDeltas(deltas) if isinstance(deltas, Mapping) else deltas


@dataclass(frozen=True)
class Excerpt:
    """What is sent of a tensor: the values from number `whole` of it on, which is number `held` of those held."""

    whole: int = 0
    held: int = 0


ALL = Excerpt()


class Squares:
    """Σ x² of values that come in blocks. On a GPU it is added up there, and waited for only when it is needed."""

    def __init__(self) -> None:
        self._here = 0.0
        self._there: list[Tensor] = []

    def add(self, values: Tensor) -> None:
        if values.device.type == "cpu":
            self._here += sum_of_squares(values)
        else:
            self._there.append(torch.dot(values, values))

    def total(self) -> float:
        """To be asked when the values are known to be complete."""
        return self._here + sum(float(one) for one in self._there)


@dataclass(frozen=True)
class Sender:
    """Encodes one contribution. `squares`: adds up its size, if that is wanted."""

    fragment: int
    deltas: Deltas
    rules: Mapping[str, CodecRule]
    feedback: ErrorFeedback
    dither: Callable[[str], Dither]
    excerpts: Mapping[str, Excerpt]
    squares: Squares | None = None

    def encode(self, entry: Entry, start: int, stop: int, out: Tensor) -> None:
        """Encode values [start, stop) of those sent into `out`, on the deltas' device."""
        name, excerpt = entry.name, self.excerpts.get(entry.name, ALL)
        rule = self.rules[name]
        delta = self.deltas.block(name, excerpt.held + start, excerpt.held + stop)
        dither = self.dither(name).after(excerpt.whole + start) if rule.stochastic else None
        if not rule.feedback and not (self.feedback.is_used and self.feedback.owes(name)):
            if self.squares is not None:
                self.squares.add(delta)
            rule.codec.encode(delta, out, dither)
            return
        self.feedback.encode(
            self.fragment,
            name,
            start,
            delta,
            rule.codec,
            out,
            numel=math.prod(entry.shape),
            home=self.deltas.home(name),
            dither=dither,
            keeps=rule.feedback,
        )
        if self.squares is not None:  # of what is sent: it may be a small part of Δ, and much of earlier ones
            sent = torch.empty(stop - start, device=out.device)
            rule.codec.decode(out, sent)
            self.squares.add(sent)


def sender_to_peers(
    form: Form,
    fragment: int,
    deltas: Deltas,
    feedback: ErrorFeedback,
    *,
    run_id: str,
    worker_id: str,
    sequence: int,
) -> Sender:
    """A sender where there is no server: it sends whole tensors, with noise that no other contribution has."""
    if form.feeds_back or feedback.is_used:
        feedback.begin(fragment, sequence)
    return Sender(
        fragment=fragment,
        deltas=deltas,
        rules=form.rules,
        feedback=feedback,
        dither=lambda name: Dither.of(run_id, fragment, sequence, f"{worker_id}/{name}"),
        excerpts={},
    )


def write_frame(payload: OutgoingFrame, layout: Layout, sender: Sender) -> None:
    """Fill the payload, from front to back; what is encoded on a GPU arrives later, beside the training. A block
    holds whole blocks of every codec, so that the bytes of one follow those of the other."""
    devices = {entry.name: sender.deltas.device(entry.name) for entry in layout.entries}
    ferry = None if all(device.type == "cpu" for device in devices.values()) else Ferry(payload)
    try:
        for entry in layout.entries:
            codec, offset = sender.rules[entry.name].codec, layout.data_begin + entry.begin
            for start, stop in cuts(math.prod(entry.shape), devices[entry.name]):
                begin, end = offset + codec.encoded_bytes(start), offset + codec.encoded_bytes(stop)
                if ferry is None:
                    sender.encode(entry, start, stop, payload.data[begin:end])
                    payload.written(end)
                else:
                    ferry.put(devices[entry.name], begin, end, partial(sender.encode, entry, start, stop))
        if ferry is None:
            payload.written(layout.size_bytes)
        else:
            ferry.put(CPU, layout.size_bytes, layout.size_bytes, lambda _: None)
    finally:
        if ferry is not None:
            ferry.close()


@dataclass
class OnDevice:
    """A frame that a GPU has written at that event: the counterpart of OutgoingFrame where nothing leaves the GPU."""

    data: Tensor
    encoded: torch.cuda.Event

    def wait(self) -> None:
        torch.cuda.current_stream(self.data.device).wait_event(self.encoded)

    def release(self) -> None:
        """Its memory goes with it."""


def write_on_device(layout: Layout, sender: Sender, device: torch.device) -> OnDevice:
    """Encode deltas that are on this GPU into a frame there."""
    frame = torch.empty(layout.size_bytes, dtype=torch.uint8, device=device)
    for entry in layout.entries:
        codec, first = sender.rules[entry.name].codec, layout.data_begin + entry.begin
        for start, stop in cuts(math.prod(entry.shape), device):
            out = frame[first + codec.encoded_bytes(start) : first + codec.encoded_bytes(stop)]
            sender.encode(entry, start, stop, out)
    return OnDevice(frame, torch.cuda.current_stream(device).record_event())


Encoded = OutgoingFrame | OnDevice


class Place(Protocol):
    """Where a frame is to be written; `payload.Rooms`, or what bytes travel by (allreduce/peers.py)."""

    device: torch.device
    memory: Memory
    pinned: bool


def write_at(place: Place, layout: Layout, sender: Sender) -> Encoded:
    """Encode a frame at this place; it may still be on its way there."""
    if place.device.type != "cpu":
        return write_on_device(layout, sender, place.device)
    payload = OutgoingFrame(layout, layout.size_bytes, memory=place.memory, pinned=place.pinned, hashed=False)
    write_frame(payload, layout, sender)
    return payload


def encode_frame(tensors: Mapping[str, Tensor], layout: Layout, codecs: Mapping[str, Codec]) -> memoryview:
    """The frame of these tensors, in host memory, all at once."""
    payload = OutgoingFrame(layout, layout.size_bytes, memory=Memory())
    rules = {name: CodecRule(codec) for name, codec in codecs.items()}
    write_frame(payload, layout, Sender(0, ReadyDeltas(tensors), rules, ErrorFeedback(), lambda _: Dither(0), {}))
    return payload.read(0)
