"""Shared by the block codecs: the cut into pieces, scales, and packing several small codes into a byte.

A block is its scale (bf16, 2 bytes), then its codes. The scale is bf16 so that code × scale is *exact* in fp32 (at most
8 + 8 significant bits): rounded separately or fused, on a CPU or a GPU, in any order, a decoded value has the same bits
everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

SCALE_BYTES = 2
MIN_SCALE = 2.0**-125
"""A scale up to this is stored as 0. Then no product code × scale is subnormal, nor any value that is not rounded to 0:
a machine that flushes subnormal numbers to zero gets the same bits."""
CPU_PIECE_VALUES = 1 << 19  # 2 MiB: small enough for the cache, large enough to hide the cost of some thirty calls
DEVICE_PIECE_VALUES = 1 << 26  # usually whole tensors; bounds the scratch memory of the largest to 256 MiB
FLOAT_MAX = torch.finfo(torch.float32).max


def in_small_pieces(device: torch.device) -> bool:
    """A CPU works in pieces that fit its cache. A GPU takes whole tensors, a compiler one expression."""
    return device.type == "cpu" and not torch.compiler.is_compiling()


class Scratch:
    """Memory for intermediate results, by name. Small pieces reuse the memory of the previous piece: getting fresh
    memory from the system can cost more than the arithmetic."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def like(self, x: Tensor, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor of x's shape with unspecified content."""
        if not in_small_pieces(x.device):
            return torch.empty(x.shape, dtype=dtype, device=x.device)
        kept = self._kept.get(name)
        if kept is None or kept.numel() < x.numel():
            kept = self._kept[name] = torch.empty(x.numel(), dtype=dtype)
        return kept[: x.numel()].view(x.shape)


def piece_values(numel: int, block_values: int, device: torch.device) -> int:
    """How many values to work on at once: whole blocks, or the rest if it is less than one."""
    if torch.compiler.is_compiling():
        return max(numel - numel % block_values, 1)
    size = CPU_PIECE_VALUES if in_small_pieces(device) else DEVICE_PIECE_VALUES
    return max(min(max(size // block_values, 1) * block_values, numel), 1)


def pieces(numel: int, block_values: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """[start, stop) of the pieces, in order: whole blocks, except for the last piece, which is the incomplete block at
    the end, if there is one."""
    whole, step = numel - numel % block_values, piece_values(numel, block_values, device)
    for start in range(0, whole, step):
        yield start, min(start + step, whole)
    if whole < numel:
        yield whole, numel


class BlockDecoder(Protocol):
    @property
    def block_values(self) -> int: ...
    def encoded_bytes(self, numel: int) -> int: ...
    def decode(self, data: Tensor, out: Tensor) -> None: ...


@torch.no_grad()
def add_decoded(codec: BlockDecoder, data: Tensor, out: Tensor, weight: float) -> None:
    """out += weight·decoded, a piece at a time; product and sum are rounded one after the other."""
    scratch = Scratch()
    for start, stop in pieces(out.numel(), codec.block_values, out.device):
        values = scratch.like(out[start:stop], "values")
        codec.decode(data[codec.encoded_bytes(start) : codec.encoded_bytes(stop)], values)
        out[start:stop].add_(values if weight == 1.0 else values.mul_(weight))


def largest_scale(top: float) -> float:
    """The largest bf16 number s with top·s finite in fp32."""
    mantissa, exponent = math.frexp(FLOAT_MAX / top)
    return math.ldexp(math.floor(math.ldexp(mantissa, 8)), exponent - 8)


def block_scales(absmax: Tensor, top: float, *, up: bool = False) -> tuple[Tensor, Tensor]:
    """s = absmax/top in bf16, and 1/s in fp32, from the largest magnitude of each block; `top` is the largest level.

    s is rounded to the nearest, or `up` so that no |x|/s exceeds `top`. s = 0, with 1/s = 0: all values are so small
    that they count as 0. s = NaN: a value is NaN or infinite, and no value of the block decodes to a finite one.
    """
    # Rounded by hand: a compiler may leave out a cast to bf16 and back.
    bits = (absmax * (1.0 / top)).view(torch.int32)
    bits = bits + (0xFFFF if up else (bits >> 16 & 1) + 0x7FFF)
    s = (bits >> 16 << 16).view(torch.float32)
    # For a non-finite value absmax·0 = NaN, which the clamping before would hide.
    s = torch.nn.functional.threshold(s.clamp(max=largest_scale(top)), MIN_SCALE, 0.0) + absmax * 0.0
    # In fp64: its division is correctly rounded everywhere; fp32's is not in every compiled GPU kernel.
    inverse = torch.where(s > 0.0, s.double().reciprocal(), 0.0).float()
    return s.bfloat16(), inverse


def bf16_bytes(column: Tensor) -> Tensor:
    """bf16 [B, 1] → its bytes, uint8 [B, 2], low byte first. By shifts: a compiler may give a single column any stride,
    and then cannot view it as bytes."""
    bits = column.float().view(torch.int32) >> 16
    return torch.cat((bits & 0xFF, bits >> 8 & 0xFF), dim=1).to(torch.uint8)


def put_columns(out: Tensor, *columns: Tensor) -> None:
    """uint8 [B, w1], [B, w2] … beside each other → [B, w1 + w2 + …]."""
    if not in_small_pieces(out.device):
        out.copy_(torch.cat(columns, dim=1))  # one write: a compiler turns several into as many copies of the whole
        return
    begin = 0
    for column in columns:
        out[:, begin : begin + column.shape[1]].copy_(column)
        begin += column.shape[1]


def get_bf16(data: Tensor) -> Tensor:
    """uint8 [B, 2n], at any address → fp32 [B, n]."""
    return data.clone(memory_format=torch.contiguous_format).view(torch.bfloat16).float()


def pack(codes: Tensor, bits: int) -> Tensor:
    """int8 codes of `bits` bits [B, lanes·w] → uint8 [B, w]: lane i, codes [i·w, (i+1)·w), in bits [i·bits, …) of
    the bytes. A byte holds codes of different lanes, not neighbours: whole rows are shifted, none gathered."""
    lanes = codes.view(len(codes), 8 // bits, -1).unbind(1)
    packed = lanes[0]
    for i, lane in enumerate(lanes[1:], 1):
        below = packed & ((1 << i * bits) - 1)  # without the copies of its sign
        packed = below | lane << i * bits
    return packed.view(torch.uint8)


def unpack(data: Tensor, bits: int, scratch: Tensor) -> Tensor:
    """uint8 [B, w] → int8 codes [B, lanes·w], sign-extended from `bits` bits; in `scratch`, if bits < 8."""
    packed = data.view(torch.int8)
    if bits == 8:
        return packed
    for i, lane in enumerate(scratch.view(len(scratch), 8 // bits, -1).unbind(1)):
        torch.bitwise_left_shift(packed, 8 - bits * (i + 1), out=lane)
        lane.bitwise_right_shift_(8 - bits)
    return scratch


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of `count` packed codes."""
    return -(-count * bits // 8)
