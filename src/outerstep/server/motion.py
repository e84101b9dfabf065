"""θ on its way from one version to the next: follow T, encode, apply, hash, check, in one pass over the memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import xxhash
from torch import Tensor

from ..core.codecs import Dither
from ..core.watch import watched
from ..digest import data_hash
from ..types import Participant, Watched
from ..wire.frames import Layout
from .blocks import BLOCK_VALUES, Block
from .published import Frame, PartHasher

if TYPE_CHECKING:
    from .downlink import Downlink


class Motion:
    """`target` is T, flat: move a block of it, then call `follow` for that block; all blocks, in their order. (Or
    `move` them in any order, and `seal` them in theirs.)"""

    def __init__(
        self, down: Downlink, version: int, before: Frame, frame: Frame, target: Tensor, update: Frame | None
    ) -> None:
        """θ from `before` to `frame`, which may be the same; the encoded step goes to `update` (None = θ is T)."""
        self.version, self.frame, self.update = version, frame, update
        self.in_place = frame is before
        self.mean: Tensor | None = None  # what T moved along, if it is to be kept until this is published
        self.pushes: Sequence[float] | None = None  # how much each counted, if it moved along one after the other
        self._squares = 0.0  # Σ g² of what T moved along at once
        self._down = down
        self._old, self._new = before.data(down.full, torch.float32), frame.data(down.full, torch.float32)
        self._anchor = xxhash.xxh3_128()
        self._scratch = torch.empty(BLOCK_VALUES)
        if update is None:
            if not self.in_place:
                self._new.copy_(self._old)
            self.target = self._new
            return
        self.target = target
        self._encoded = update.data(down.update, torch.uint8)
        self._begins = {entry.name: entry.begin for entry in down.update.entries}
        self._hasher = PartHasher(update.view, down.part_size_bytes)

    def along(self, squares: float) -> None:
        """T moved along a block of the mean with this Σ g²."""
        self._squares += squares

    def watched(self, participants: Sequence[Participant]) -> Watched | None:
        """How the round went, as far as it is the same for all workers. Of several pushes that each moved T by itself
        there is no aggregate, so nothing is known; of one it is that push."""
        counted = [p for p in participants if p.weight > 0.0]
        norms = [p.norm for p in counted if p.norm is not None]
        if self.pushes is None:
            is_mean = self._down.follows_means and len(norms) == len(counted)
            return watched(None, norms, [p.weight for p in counted], math.sqrt(self._squares), is_mean=is_mean)
        if len(norms) == len(self.pushes) == 1:
            return watched(None, norms, self.pushes, self.pushes[0] * norms[0], is_mean=False)
        return None

    def follow(self, block: Block) -> None:
        """T is where it should be in this block: bring θ there, as far as the codec can."""
        self.move(block, self._scratch)
        self.seal(block)

    def move(self, block: Block, room: Tensor) -> None:
        """That, without its hashes: of any block at any time. `room` is for a block. (Under no_grad.)"""
        theta = self._new[block.place : block.end]
        if self.update is not None:
            self._send(block, theta, room[: block.count])
        if not _is_finite(theta):
            raise FloatingPointError(f"the outer step made tensor {block.name!r} of version {self.version} not finite")

    def seal(self, block: Block) -> None:
        """Hash a block that was moved; one after the other, in their order."""
        if self.update is not None:
            codec = self._down.rules[block.name].codec
            self._hasher.advance(
                self._down.update.data_begin + self._begins[block.name] + codec.encoded_bytes(block.stop)
            )
        begin = self._down.full.data_begin
        self._anchor.update(self.frame.view[begin + 4 * block.place : begin + 4 * block.end])

    def _send(self, block: Block, theta: Tensor, d: Tensor) -> None:
        rule = self._down.rules[block.name]
        old = self._old[block.place : block.end]
        torch.sub(self.target[block.place : block.end], old, out=d)
        first = self._begins[block.name] + rule.codec.encoded_bytes(block.start)
        end = self._begins[block.name] + rule.codec.encoded_bytes(block.stop)
        encoded = self._encoded[first:end]
        dither = None
        if rule.stochastic:
            dither = Dither.of(self._down.run_id, self._down.index, self.version, block.name).after(block.start)
        rule.codec.encode(d, encoded, dither)
        rule.codec.decode(encoded, d)
        torch.add(old, d, out=theta)

    def result(self) -> tuple[str, tuple[str, ...]]:
        """The anchor's hash, and those of the update's parts."""
        if self.update is None:
            return self._anchor.hexdigest(), ()
        self._hasher.advance(len(self.update.view))
        return self._anchor.hexdigest(), tuple(self._hasher.hashes)


def fp32_hash(frame: memoryview, of: Layout) -> str:
    """Of the values alone, without header and gaps: the anchor's hash."""
    return data_hash(frame[of.data_begin + entry.begin : of.data_begin + entry.end] for entry in of.entries)


def _is_finite(values: Tensor) -> bool:
    """A sum of squares is many times cheaper than isfinite(), and not finite if one of its values is not."""
    return math.isfinite(torch.dot(values, values)) or bool(torch.isfinite(values).all())
