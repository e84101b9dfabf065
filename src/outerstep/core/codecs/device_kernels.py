"""The inner loops of the block codecs on a GPU. (Imported only where Triton is: torch brings it for CUDA.)

They give the bits of the torch expressions in scaled.py, as kernels.py does on a CPU, and follow it line by line: each
reads a block once and writes it once, where torch goes through it some twenty times. A program works on whole blocks,
which together are `PROGRAM_VALUES`.

Two things keep the bits. `enable_fp_fusion=False`: a product and the sum after it are rounded one after the other, as
on a CPU. And the one division is made in fp64, where it is rounded correctly on every GPU.

No argument is specialized on: a compiler that made one kernel for addresses that are a multiple of 16 and another for
those that are not would stop a training some time after its start.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .blocks import MIN_SCALE

PROGRAM_VALUES = 4096
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}


def encode_scaled(x: Tensor, out: Tensor, block: int, lanes: int, powers: bool, per_top: float, largest: float) -> None:
    """As `kernels.encode_scaled`, for whole blocks."""
    rows = x.numel() // block
    at_once = PROGRAM_VALUES // block
    with torch.cuda.device_of(x):
        _encode[(triton.cdiv(rows, at_once),)](
            x,
            out,
            rows,
            per_top,
            largest,
            MIN_SCALE,
            block=block,
            lanes=lanes,
            powers=powers,
            at_once=at_once,
            **OPTIONS,
        )


def decode_scaled(data: Tensor, out: Tensor, block: int, lanes: int, powers: bool) -> None:
    _unpack(data, out, block, lanes, powers, 1.0, keep=False)


def add_scaled(data: Tensor, out: Tensor, block: int, lanes: int, powers: bool, weight: float) -> None:
    """out += weight·decoded; product and sum are rounded one after the other."""
    _unpack(data, out, block, lanes, powers, weight, keep=True)


def _unpack(data: Tensor, out: Tensor, block: int, lanes: int, powers: bool, weight: float, *, keep: bool) -> None:
    rows = out.numel() // block
    at_once = PROGRAM_VALUES // block
    with torch.cuda.device_of(out):
        _decode[(triton.cdiv(rows, at_once),)](
            data, out, rows, weight, block=block, lanes=lanes, powers=powers, keep=keep, at_once=at_once, **OPTIONS
        )


@triton.jit(do_not_specialize=["x", "out", "rows", "per_top", "largest", "least"])
def _encode(
    x,
    out,
    rows,
    per_top,
    largest,
    least,
    block: tl.constexpr,
    lanes: tl.constexpr,
    powers: tl.constexpr,
    at_once: tl.constexpr,
):
    width: tl.constexpr = block // lanes
    row = tl.program_id(0).to(tl.int64) * at_once + tl.arange(0, at_once)[:, None]
    there = row < rows
    column = tl.arange(0, width)[None, :]
    low = tl.load(x + row * block + column, mask=there, other=0.0)
    top = tl.max(low.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1, keep_dims=True)
    if lanes == 2:
        high = tl.load(x + row * block + width + column, mask=there, other=0.0)
        top = tl.maximum(top, tl.max(high.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1, keep_dims=True))
    # The scale, in bf16, and 1/scale: as `blocks.block_scales`.
    absmax = top.to(tl.float32, bitcast=True)
    bits = (absmax * per_top).to(tl.int32, bitcast=True)
    bits = ((bits + ((bits >> 16) & 1) + 0x7FFF) >> 16) << 16
    scale = bits.to(tl.float32, bitcast=True)
    scale = tl.where(scale > largest, largest, scale)
    scale = tl.where(scale > least, scale, 0.0)
    is_scale = scale > 0.0
    inverse = tl.where(is_scale, 1.0 / tl.where(is_scale, scale, 1.0).to(tl.float64), 0.0).to(tl.float32)
    bits = scale.to(tl.int32, bitcast=True)
    bits = tl.where(top >= 0x7F800000, 0x7FC00000, bits)  # a value is not finite: nor is the scale
    place = out + row * (2 + width)
    tl.store(place, ((bits >> 16) & 0xFF).to(tl.uint8), mask=there)
    tl.store(place + 1, ((bits >> 24) & 0xFF).to(tl.uint8), mask=there)
    packed = _codes(low * inverse, powers)
    if lanes == 2:
        packed = (packed & 0xF) | ((_codes(high * inverse, powers) & 0xF) << 4)
    tl.store(place + 2 + column, (packed & 0xFF).to(tl.uint8), mask=there)


@triton.jit
def _codes(t, powers: tl.constexpr):
    """As `kernels._codes`: int32, of which the low bits count."""
    if powers:
        more = tl.maximum(tl.abs(t * 0.3333333432674408), 0.5)
        sign = t.to(tl.int32, bitcast=True) & -2147483648
        signed = (more.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
        bits = (signed + t).to(tl.int32, bitcast=True)
        return (((bits >> 23) - 126) & 7) | ((bits >> 28) & 8)
    else:
        return (t + 12582912.0).to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=["data", "out", "rows", "weight"])
def _decode(
    data,
    out,
    rows,
    weight,
    block: tl.constexpr,
    lanes: tl.constexpr,
    powers: tl.constexpr,
    keep: tl.constexpr,
    at_once: tl.constexpr,
):
    """`keep`: add to what is there."""
    width: tl.constexpr = block // lanes
    row = tl.program_id(0).to(tl.int64) * at_once + tl.arange(0, at_once)[:, None]
    there = row < rows
    column = tl.arange(0, width)[None, :]
    place = data + row * (2 + width)
    low_byte = tl.load(place, mask=there, other=0).to(tl.int32)
    high_byte = tl.load(place + 1, mask=there, other=0).to(tl.int32)
    scale = ((low_byte << 16) | (high_byte << 24)).to(tl.float32, bitcast=True)
    packed = tl.load(place + 2 + column, mask=there, other=0).to(tl.int32)
    for lane in tl.static_range(lanes):
        code = (packed << (32 - (8 // lanes) * (lane + 1))) >> (32 - 8 // lanes)
        values = _levels(code, powers) * scale
        target = out + row * block + lane * width + column
        if keep:
            values = tl.load(target, mask=there, other=0.0) + values * weight
        tl.store(target, values, mask=there)


@triton.jit
def _levels(code, powers: tl.constexpr):
    """As `grids.Grid.levels`."""
    if powers:
        sign = code >> 3  # −1 or 0
        return (((64 >> (~code & 7)) ^ sign) - sign).to(tl.float32)
    else:
        return code.to(tl.float32)
