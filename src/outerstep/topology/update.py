"""The update of an anchor: what leads from the one that is held, θ, to the one that was agreed on, θ′.

    WholeAnchor    θ′ itself, in fp32
    UpdateChain    θ′ = θ + d₁ + d₂ + …       every d decoded and every sum rounded as the server did it
    MeanStep       θ′ = the outer step from θ along the agreed mean, where everybody steps its own copy (core/state.py)
    StepChain      several of those, one after the other

A worker applies it block by block, in order. A block fits into the cache: there it is decoded, stepped, hashed and
written to the local weights and to the anchor, all in one pass over the memory. At the end the hash tells whether the
anchor is the agreed one; where everybody steps, nobody knows that hash beforehand, and the members compare theirs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Protocol

import torch
import xxhash
from torch import Tensor

from ..coordination.worker.exchange import Held
from ..core.codecs import Codec
from ..core.state import FragmentState, bytes_of, fp32_views
from ..digest import TreeHasher, data_hash, is_tree, tree_hash
from ..errors import ExchangeFailed, Refused
from ..types import Agreement
from ..wire.frames import Layout, check_frame
from .device import STAGED_BYTES, DeviceLeaves, HostCopies, hashes_there, staged
from .forms import Form

Kind = Literal["full", "update"]

CPU_BLOCK_VALUES = 1 << 20  # 4 MiB: it stays in the cache from the first touch to the last
DEVICE_BLOCK_VALUES = 1 << 23  # 32 MiB: a GPU is busy while Python tells it what comes next; little beside the model


def cuts(numel: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """[start, stop) of the blocks of a tensor."""
    size = CPU_BLOCK_VALUES if device.type == "cpu" else DEVICE_BLOCK_VALUES
    for start in range(0, numel, size):
        yield start, min(start + size, numel)


class AnchorUpdate(Protocol):
    @property
    def names(self) -> Sequence[str]:
        """The fragment's tensors, in its order."""

    def apply(self, name: str, start: int, stop: int, held: Tensor, *, in_place: bool = False) -> Tensor:
        """θ′[start:stop] of a tensor, flat fp32 on the device of `held`, which is θ[start:stop] and, `in_place`, may be
        overwritten. To be called for all tensors and blocks, each once and in order (a step moves its momentum along).
        The result must not be changed, and is valid until the next call."""

    @property
    def is_proven(self) -> bool:
        """Were all blocks applied, and do they have the agreed hash, as far as one member can tell alone?"""

    @property
    def digest(self) -> str:
        """The hash of all blocks that were applied."""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of the frames."""

    @property
    def frames(self) -> Sequence[memoryview]:
        """The frames that it was read from."""


class AnchorProof:
    """The hash of an anchor, over its blocks as they come, by the same rule as the expected hash."""

    def __init__(self, expected: str = "") -> None:
        """`expected`: "" = not known; then the hash is over the values one after the other, as it is among members that
        compare theirs."""
        self.expected = expected
        self._hasher = TreeHasher() if expected and is_tree(expected) else xxhash.xxh3_128()
        self._name: str | None = None
        self._copies: HostCopies | None = None  # from the first block that is copied from a GPU
        self._on_device: DeviceLeaves | None = None  # or that is hashed there

    def feed(self, name: str, values: Tensor) -> None:
        """Values of this tensor; those of one tensor come one after the other."""
        if not values.numel():
            return
        if name != self._name:
            self._name = name
            if isinstance(self._hasher, TreeHasher):
                self._flush()
                self._hasher.next_tensor()
        if values.device.type == "cpu":
            self._flush()
            self._hasher.update(bytes_of(values))
        elif isinstance(self._hasher, TreeHasher) and hashes_there(values.device):
            if self._on_device is None:
                self._on_device = DeviceLeaves(self._hasher)
            self._on_device.put(values)
        else:
            if self._copies is None:
                self._copies = HostCopies(lambda copied: self._hasher.update(bytes_of(copied)))
            self._copies.put(values)

    @property
    def digest(self) -> str:
        """The hash of all blocks so far."""
        self._flush()
        return self._hasher.hexdigest()

    def _flush(self) -> None:
        if self._copies is not None:
            self._copies.flush()
        if self._on_device is not None:
            self._on_device.flush()


@dataclass(frozen=True)
class Extent:
    """What a process holds of a tensor: its values from number `first` on. `hashed`: the ones that the hash is over;
    None = all of them."""

    first: int = 0
    hashed: range | None = None

    def feed(self, proof: AnchorProof, name: str, start: int, block: Tensor) -> None:
        """`block`: values from number `start` on of those held."""
        if self.hashed is not None:
            block = block[max(self.hashed.start - start, 0) : max(self.hashed.stop - start, 0)]
        proof.feed(name, block)


ALL = Extent()


class WholeAnchor:
    """θ′ by name: contiguous fp32 tensors in host memory."""

    def __init__(
        self,
        values: Mapping[str, Tensor],
        expected: str,
        extents: Mapping[str, Extent] | None = None,
        frames: Sequence[memoryview] = (),
    ) -> None:
        self.names = tuple(values)
        self.kinds: tuple[Kind, ...] = ("full",)
        self.frames = frames
        self._values = values
        self._extents = extents or {}
        self._proof = AnchorProof(expected)
        self._is_checked = False

    @property
    def is_proven(self) -> bool:
        return self._proof.digest == self._proof.expected

    @property
    def digest(self) -> str:
        return self._proof.digest

    def apply(self, name: str, start: int, stop: int, held: Tensor, *, in_place: bool = False) -> Tensor:
        block = self._values[name].view(-1)[start:stop].to(held.device, non_blocking=True)
        self._extents.get(name, ALL).feed(self._proof, name, start, block)
        return block

    def checked(self) -> Mapping[str, Tensor]:
        """The whole anchor, by name; ExchangeFailed if its hash is another than the one announced."""
        if not self._is_checked:
            proof = AnchorProof(self._proof.expected)
            for name, theta in self._values.items():
                self._extents.get(name, ALL).feed(proof, name, 0, theta.view(-1))
            if proof.digest != proof.expected:
                raise ExchangeFailed(f"what the server sent does not have the hash {proof.expected} that it announced")
            self._is_checked = True
        return self._values


Cutter = Callable[[int, int], Tensor]
"""(begin, end) → those bytes of a frame, uint8."""


class UpdateChain:
    """A chain of encoded differences, the oldest first; an empty one if the held anchor is the agreed one."""

    def __init__(
        self,
        cutters: Sequence[Cutter],
        layout: Layout,
        codecs: Mapping[str, Codec],
        expected: str,
        extents: Mapping[str, Extent] | None = None,
        frames: Sequence[memoryview] = (),
    ) -> None:
        self.names = tuple(entry.name for entry in layout.entries)
        self.kinds: tuple[Kind, ...] = tuple("update" for _ in cutters)
        self.frames = frames
        self._cutters = cutters
        self._entries = {entry.name: entry for entry in layout.entries}
        self._data_begin = layout.data_begin
        self._codecs = codecs
        self._extents = extents or {}
        self._proof = AnchorProof(expected)
        self._scratch: dict[str, Tensor] = {}
        self._is_begun = False

    @property
    def is_proven(self) -> bool:
        return self._proof.digest == self._proof.expected

    @property
    def digest(self) -> str:
        return self._proof.digest

    @torch.no_grad()
    def apply(self, name: str, start: int, stop: int, held: Tensor, *, in_place: bool = False) -> Tensor:
        if held.device.type == "cuda" and not self._is_begun:
            self._begin(held.device)
        extent = self._extents.get(name, ALL)
        theta = held
        room = held if in_place else self._room("theta", stop - start, held.device)
        entry, codec = self._entries[name], self._codecs[name]
        begin, end = extent.first + start, extent.first + stop  # in the whole tensor
        first, last = covering(codec, begin, end, math.prod(entry.shape))
        offset = self._data_begin + entry.begin
        for cutter in self._cutters:
            data = cutter(offset + codec.encoded_bytes(first), offset + codec.encoded_bytes(last))
            d = self._room("d", last - first, held.device)
            codec.decode(data.to(held.device, non_blocking=True), d)
            theta = torch.add(theta, d[begin - first : end - first], out=room)
        extent.feed(self._proof, name, start, theta)
        return theta

    def _begin(self, device: torch.device) -> None:
        """Small frames are copied to the GPU whole, while it still trains; large ones block by block."""
        self._is_begun = True
        if 0 < sum(map(len, self.frames)) <= STAGED_BYTES:
            self._cutters = [_slicer(staged(frame, device)) for frame in self.frames]

    def _room(self, name: str, numel: int, device: torch.device) -> Tensor:
        kept = self._scratch.get(name)
        if kept is None or kept.numel() < numel or kept.device != device:
            kept = self._scratch[name] = torch.empty(numel, device=device)
        return kept[:numel]


class OwnStep(ABC):
    """The update that a step makes which every member takes by itself; `_move` is that step."""

    kinds: tuple[Kind, ...] = ("update",)
    frames: tuple[memoryview, ...] = ()
    is_proven = True  # as far as one can tell alone

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._proof = AnchorProof()

    @property
    def digest(self) -> str:
        return self._proof.digest

    @torch.no_grad()
    def apply(self, name: str, start: int, stop: int, held: Tensor, *, in_place: bool = False) -> Tensor:
        theta = held if in_place else held.clone()
        self._move(name, start, stop, theta)
        self._proof.feed(name, theta)
        return theta

    @abstractmethod
    def _move(self, name: str, start: int, stop: int, theta: Tensor) -> None:
        """θ[start:stop] ← θ′[start:stop], and what is remembered of these values with it."""


class MeanStep(OwnStep):
    """The outer step along the mean in `frame`, which all members hold."""

    def __init__(self, frame: Tensor, form: Form, state: FragmentState) -> None:
        super().__init__(tuple(state.roles))
        self.frame, self._step = frame, state.step()
        self._begins = {entry.name: form.update.data_begin + entry.begin for entry in form.update.entries}
        self._codecs = form.codecs
        self._room = torch.empty(0)

    def _move(self, name: str, start: int, stop: int, theta: Tensor) -> None:
        codec, first = self._codecs[name], self._begins[name]  # tensors are cut at borders of every codec's blocks
        data = self.frame[first + codec.encoded_bytes(start) : first + codec.encoded_bytes(stop)]
        if self._room.numel() < stop - start or self._room.device != theta.device:
            self._room = torch.empty(stop - start, device=theta.device)
        g = self._room[: stop - start]
        codec.decode(data.to(theta.device, non_blocking=True), g)
        self._step.block(name, theta, g, start)


class StepChain:
    """Any number of steps, the oldest first, each with the hash of the anchor that the other members took it from."""

    frames: tuple[memoryview, ...] = ()

    def __init__(self, names: Sequence[str], steps: Sequence[tuple[str, OwnStep]] = ()) -> None:
        self.names = tuple(names)
        self.kinds: tuple[Kind, ...] = tuple("update" for _ in steps)
        self._steps = steps
        self._held = AnchorProof()

    @property
    def is_proven(self) -> bool:
        """Did each step but the first start where the one before it ended, on the other members too? (Where the first
        starts is known before.)"""
        return all(base == before.digest for (_, before), (base, _) in pairwise(self._steps))

    @property
    def digest(self) -> str:
        return self._steps[-1][1].digest if self._steps else self._held.digest

    def apply(self, name: str, start: int, stop: int, held: Tensor, *, in_place: bool = False) -> Tensor:
        if not self._steps:
            self._held.feed(name, held)
        theta = held
        for number, (_, step) in enumerate(self._steps):
            theta = step.apply(name, start, stop, theta, in_place=in_place or number > 0)
        return theta


def covering(codec: Codec, start: int, stop: int, numel: int) -> tuple[int, int]:
    """The values of the codec's blocks that cover [start, stop) of a tensor of `numel`."""
    block = codec.block_values
    return start - start % block, min(-(-stop // block) * block, numel)


def leads_on(agreement: Agreement, held: Held | None) -> bool:
    """Is it this whole version, or what leads there from the held anchor?"""
    frames = [(payload.kind, payload.version) for payload in agreement.payloads]
    if frames == [("full", agreement.version)]:
        return True
    if not frames and held is not None:
        return held == Held(agreement.version, agreement.anchor_hash)
    return held is not None and frames == [("update", v) for v in range(held.version + 1, agreement.version + 1)]


def read_update(
    form: Form, kinds: Sequence[Kind], frames: Sequence[memoryview], expected: str
) -> WholeAnchor | UpdateChain:
    """The update in these frames: one "full" or any number of "update"s. `expected` is the agreed anchor's hash."""
    layout = form.full if "full" in kinds else form.update
    try:
        for frame in frames:
            check_frame(frame, layout)
    except Refused as error:
        raise ExchangeFailed(f"the server sent something else than this fragment: {error}") from error
    if "full" in kinds:
        return WholeAnchor(fp32_views(frames[0], layout.places, layout.data_begin), expected, frames=frames)
    cutters = [_slicer(torch.frombuffer(frame, dtype=torch.uint8)) for frame in frames]
    return UpdateChain(cutters, layout, form.codecs, expected, frames=frames)


def _slicer(data: Tensor) -> Cutter:
    return lambda begin, end: data[begin:end]


def apply_to(update: AnchorUpdate, tensors: Mapping[str, Tensor]) -> None:
    """Apply the whole update to these tensors, which hold θ before and θ′ after."""
    for name in update.names:
        flat = tensors[name].view(-1)
        for start, stop in cuts(flat.numel(), flat.device):
            update.apply(name, start, stop, flat[start:stop], in_place=True)


def empty_anchor(form: Form) -> tuple[Tensor, dict[str, Tensor]]:
    """An empty frame for a whole anchor, and the tensors in it by name."""
    data = torch.empty(form.full.size_bytes, dtype=torch.uint8)
    return data, fp32_views(data.numpy().data, form.full.places, form.full.data_begin)


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in host memory."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def anchor_hash(tensors: Iterable[Tensor]) -> str:
    """The identity of an anchor among members that step by themselves: over its fp32 values in the fragment's order."""
    return data_hash(bytes_of(tensor) for tensor in tensors if tensor.numel())


def anchor_tree(tensors: Iterable[Tensor]) -> str:
    """The identity of a server's anchor (digest.py)."""
    return tree_hash(bytes_of(tensor) for tensor in tensors if tensor.numel())


def values_hash(tensors: Iterable[Tensor]) -> str:
    """The hash of these tensors' values, in any dtype and on any device."""
    proof = AnchorProof()
    for tensor in tensors:
        flat = tensor.reshape(-1).view(torch.uint8)
        for start, stop in cuts(flat.numel(), flat.device):
            proof.feed("", flat[start:stop])
    return proof.digest
