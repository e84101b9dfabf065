"""Blocks with one scale each: int8, int4, E3M0, and the two-bit control.

    block of n ≤ block_values values x:     s = bf16(max|x| / top)
    encoded:                                s (2 bytes), then ⌈n·bits/8⌉ bytes of codes of x/s on the grid
    decoded:                                level(code)·s, exact in fp32

On an even grid each value decodes to within (½ + 2⁻¹⁵)·s of the original (the 2⁻¹⁵ is the rounding of x/s), on the
powers of two within that part of max(s, ⅔|x|). Zeros stay zeros if the grid has a zero, and −0.0 becomes +0.0. A block
whose scale would be at most 2⁻¹²⁵ decodes to zeros; the largest scales are limited so that a finite block stays finite.
A block with a NaN or an infinity has scale NaN and decodes to all NaN, so that the receiver's finite check refuses it;
its codes are not specified.

Any bytes of the right length can be decoded; at worst they give a large number or NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from .blocks import (
    SCALE_BYTES,
    Scratch,
    add_decoded,
    bf16_bytes,
    block_scales,
    get_bf16,
    largest_scale,
    pack,
    packed_bytes,
    pieces,
    put_columns,
    unpack,
)
from .compiled import CompiledKernels, kernels_for
from .dither import Dither
from .grids import Grid, HalfIntegers, Integers, PowersOfTwo
from .on_device import kernels_on, may_use

TRIAL_BLOCKS = 19
"""Blocks on which the kernels of a GPU are tried: more than one of its programs takes."""


@dataclass(frozen=True)
class ScaledCodec:
    name: str
    bits: int
    block_values: int
    grid: Grid
    needs_feedback: bool = False

    def encoded_bytes(self, numel: int) -> int:
        blocks, tail = divmod(numel, self.block_values)
        whole = blocks * (SCALE_BYTES + packed_bytes(self.block_values, self.bits))
        return whole + (SCALE_BYTES + packed_bytes(tail, self.bits) if tail else 0)

    @torch.no_grad()
    def encode(self, values: Tensor, out: Tensor, dither: Dither | None = None) -> None:
        kernels = self._kernels(values, out)
        if kernels is not None and dither is None:
            limits = map(np.float32, self._limits)
            kernels.encode_scaled(values.detach().numpy(), out.numpy(), *self._shape, *limits)
            return
        there = self._kernels_there(values, out) if dither is None else None
        if there is not None:
            whole = self._whole(values.numel())
            there.encode_scaled(values[:whole], out[: self.encoded_bytes(whole)], *self._shape, *self._limits)
            values, out = values[whole:], out[self.encoded_bytes(whole) :]
        self._encode_by_torch(values, out, dither)

    def _encode_by_torch(self, values: Tensor, out: Tensor, dither: Dither | None = None) -> None:
        scratch = Scratch()
        for start, stop in pieces(values.numel(), self.block_values, values.device):
            x = self._blocks(values[start:stop])
            self._encode(x, self._rows(out, start, stop, len(x)), scratch, dither and dither.after(start))

    @torch.no_grad()
    def decode(self, data: Tensor, out: Tensor) -> None:
        kernels = self._kernels(out, data)
        if kernels is not None:
            kernels.decode_scaled(data.numpy(), out.detach().numpy(), *self._shape)
            return
        there = self._kernels_there(out, data)
        if there is not None:
            whole = self._whole(out.numel())
            there.decode_scaled(data[: self.encoded_bytes(whole)], out[:whole], *self._shape)
            data, out = data[self.encoded_bytes(whole) :], out[whole:]
        self._decode_by_torch(data, out)

    def _decode_by_torch(self, data: Tensor, out: Tensor) -> None:
        scratch = Scratch()
        for start, stop in pieces(out.numel(), self.block_values, out.device):
            target = self._blocks(out[start:stop])
            self._decode(self._rows(data, start, stop, len(target)), target, scratch)
            if target.numel() > stop - start:  # a last block that was padded
                out[start:stop].copy_(target.view(-1)[: stop - start])

    def decode_add(self, data: Tensor, out: Tensor, weight: float = 1.0) -> None:
        kernels = self._kernels(out, data)
        if kernels is not None:
            kernels.add_scaled(data.numpy(), out.detach().numpy(), *self._shape, np.float32(weight))
            return
        there = self._kernels_there(out, data)
        if there is not None:
            whole = self._whole(out.numel())
            there.add_scaled(data[: self.encoded_bytes(whole)], out[:whole], *self._shape, weight)
            data, out = data[self.encoded_bytes(whole) :], out[whole:]
        add_decoded(self, data, out, weight)

    def check(self, data: Tensor, numel: int) -> str:
        return ""

    # --- all at once, compiled (kernels.py) ------------------------------------------------------------------------

    def _kernels(self, values: Tensor, data: Tensor) -> CompiledKernels | None:
        """None: in torch, piece by piece. (fp32 `values` and encoded `data`.)"""
        return kernels_for(values, data) if self._is_known and values.dtype == torch.float32 else None

    @property
    def _is_known(self) -> bool:
        return isinstance(self.grid, Integers | PowersOfTwo) and self.bits >= 4

    @property
    def _shape(self) -> tuple[int, int, bool]:
        return self.block_values, 8 // self.bits, isinstance(self.grid, PowersOfTwo)

    @property
    def _limits(self) -> tuple[float, float]:
        """1/top in fp32, and the largest scale."""
        return float(np.float32(1.0 / self.grid.top)), largest_scale(self.grid.top)

    # --- the same on a GPU (device_kernels.py) ---------------------------------------------------------------------

    def prepare(self, device: torch.device) -> None:
        """Compile now what encodes and decodes there, rather than in the middle of a training."""
        if self._is_known and device.type == "cuda":
            may_use(self.name, self._gives_torchs_bits, device)

    def _kernels_there(self, values: Tensor, data: Tensor) -> Any:
        """For whole blocks; None: in torch."""
        known = self._is_known and values.dtype == torch.float32 and values.numel() >= self.block_values
        return kernels_on(self.name, self._gives_torchs_bits, values, data) if known else None

    def _whole(self, numel: int) -> int:
        return numel - numel % self.block_values

    @torch.no_grad()
    def _gives_torchs_bits(self, kernels: Any, device: torch.device) -> bool:
        """Of values of every magnitude, levels and values half-way between two among them."""
        count = TRIAL_BLOCKS * self.block_values
        drawn = torch.rand(2, count, generator=torch.Generator().manual_seed(count)).to(device)
        halves = (drawn[1] * 4.0 * self.grid.top).round() * 0.5 - self.grid.top
        powers = torch.arange(TRIAL_BLOCKS).mul_(12).sub_(130).double()  # of each block: some count as 0
        magnitude = torch.exp2(powers).float().to(device).repeat_interleave(self.block_values)
        values = torch.where(drawn[0] < 0.5, halves, drawn[1] - 0.5) * magnitude
        size = self.encoded_bytes(count)
        ours, theirs = (torch.full((size,), 0xA5, dtype=torch.uint8, device=device) for _ in range(2))
        kernels.encode_scaled(values, ours, *self._shape, *self._limits)
        self._encode_by_torch(values, theirs)
        if not torch.equal(ours, theirs):
            return False
        mine, its = torch.full_like(values, 7.0), torch.full_like(values, 7.0)
        kernels.decode_scaled(ours, mine, *self._shape)
        self._decode_by_torch(theirs, its)
        if not torch.equal(mine.view(torch.int32), its.view(torch.int32)):
            return False
        weight = -0.3
        kernels.add_scaled(ours, mine, *self._shape, weight)
        decoded = torch.empty_like(its)
        self._decode_by_torch(theirs, decoded)
        its.add_(decoded.mul_(weight))
        return torch.equal(mine.view(torch.int32), its.view(torch.int32))

    # --- one piece: B blocks of n values ---------------------------------------------------------------------------

    def _blocks(self, piece: Tensor) -> Tensor:
        """[B, n]; a last block that does not fill its last byte is padded with zeros, which change no scale."""
        if piece.numel() % self.block_values == 0:
            return piece.view(-1, self.block_values)
        missing = -piece.numel() % (8 // self.bits)
        return (pad(piece, (0, missing)) if missing else piece).view(1, -1)

    def _rows(self, data: Tensor, start: int, stop: int, count: int) -> Tensor:
        return data[self.encoded_bytes(start) : self.encoded_bytes(stop)].view(count, -1)

    def _encode(self, x: Tensor, out: Tensor, scratch: Scratch, dither: Dither | None) -> None:
        absmax = torch.maximum(x.amax(1, keepdim=True), x.amin(1, keepdim=True).neg_())
        scale, inverse = block_scales(absmax, self.grid.top, up=dither is not None)
        t, codes = scratch.like(x, "t"), scratch.like(x, "codes", torch.int8)
        torch.mul(x, inverse, out=t)
        if dither is None:
            self.grid.codes(t, scratch.like(x, "spare"), codes)
        else:
            noise = dither.bits(x.numel(), x.device).view(x.shape)
            self.grid.dithered_codes(t.clamp_(-self.grid.top, self.grid.top), noise, codes)
        put_columns(out, bf16_bytes(scale), pack(codes, self.bits))

    def _decode(self, data: Tensor, out: Tensor, scratch: Scratch) -> None:
        codes = unpack(data[:, SCALE_BYTES:], self.bits, scratch.like(out, "codes", torch.int8))
        self.grid.levels(codes, out)
        out.mul_(get_bf16(data[:, :SCALE_BYTES]))


INT8 = ScaledCodec("int8", bits=8, block_values=4096, grid=Integers(127.0))
INT4 = ScaledCodec("int4", bits=4, block_values=256, grid=Integers(7.0))
E3M0 = ScaledCodec("e3m0", bits=4, block_values=256, grid=PowersOfTwo())
CONTROL_2BIT = ScaledCodec("control-2bit", bits=2, block_values=256, grid=HalfIntegers(1.5))
"""Not for use: four levels without error feedback, to show in an experiment that this is too coarse."""
