"""What the block codecs share: the cut into pieces, scales, and several small codes in a byte.

A block is its scale (bf16, 2 bytes), then its codes. The scale is bf16 so that code × scale is *exact* in fp32 (at most
8 + 8 significant bits): rounded separately or fused, on a CPU or a GPU, in whatever order, a decoded value has the same
bits everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

SCALE_BYTES = 2
MIN_SCALE = 2.0**-125
"""A scale that is not larger is stored as 0. Then no product code × scale is subnormal, nor any value that is not
rounded to 0: a machine that flushes subnormal numbers to zero gets the same bits."""
CPU_PIECE_VALUES = 1 << 19  # 2 MiB: small enough for the cache, large enough to hide the cost of some thirty calls
DEVICE_PIECE_VALUES = 1 << 26  # whole tensors, as a rule; bounds the scratch memory of the largest ones to 256 MiB
FLOAT_MAX = torch.finfo(torch.float32).max


def piece_values(numel: int, block_values: int, device: torch.device) -> int:
    """How many values to work on at once: whole blocks, or less than one if there is no more."""
    size = CPU_PIECE_VALUES if device.type == "cpu" else DEVICE_PIECE_VALUES
    return max(min(max(size // block_values, 1) * block_values, numel), 1)


def pieces(numel: int, block_values: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """[start, stop) of pieces to be worked on one after the other: whole blocks, except for the last piece, which is
    the incomplete block at the end, if there is one."""
    whole, step = numel - numel % block_values, piece_values(numel, block_values, device)
    for start in range(0, whole, step):
        yield start, min(start + step, whole)
    if whole < numel:
        yield whole, numel


class Decoder(Protocol):
    @property
    def block_values(self) -> int: ...
    def encoded_bytes(self, numel: int) -> int: ...
    def decode(self, data: Tensor, out: Tensor) -> None: ...


@torch.no_grad()
def add_decoded(codec: Decoder, data: Tensor, out: Tensor, weight: float) -> None:
    """out += weight·decoded, a piece at a time; product and sum are rounded one after the other."""
    scratch = out.new_empty(piece_values(out.numel(), codec.block_values, out.device))
    for start, stop in pieces(out.numel(), codec.block_values, out.device):
        values = scratch[: stop - start]
        codec.decode(data[codec.encoded_bytes(start) : codec.encoded_bytes(stop)], values)
        out[start:stop].add_(values if weight == 1.0 else values.mul_(weight))


def largest_scale(top: float) -> float:
    """The largest bf16 number s with top·s finite in fp32."""
    mantissa, exponent = math.frexp(FLOAT_MAX / top)
    return math.ldexp(math.floor(math.ldexp(mantissa, 8)), exponent - 8)


def block_scales(absmax: Tensor, top: float, *, up: bool = False) -> tuple[Tensor, Tensor]:
    """s = absmax/top in bf16, and 1/s in fp32, from the largest magnitude of each block; `top` is the largest level.

    s is rounded to the nearest, or `up` so that no |x|/s exceeds `top`. s = 0, and then 1/s = 0: all values are so
    small that they count as 0. s = NaN: one value is NaN or infinite, and no value of the block comes out finite.
    """
    # Rounded by hand: a compiler may leave out a cast to bf16 and back.
    bits = (absmax * (1.0 / top)).view(torch.int32)
    bits = bits + (0xFFFF if up else (bits >> 16 & 1) + 0x7FFF)
    s = (bits >> 16 << 16).view(torch.float32)
    # A value that is not finite: absmax·0 = NaN, which the limits before it would have hidden.
    s = torch.nn.functional.threshold(s.clamp(max=largest_scale(top)), MIN_SCALE, 0.0) + absmax * 0.0
    # By way of fp64: its division is rounded correctly everywhere, that of fp32 not in every compiled GPU kernel.
    inverse = torch.where(s > 0.0, s.double().reciprocal(), 0.0).float()
    return s.bfloat16(), inverse


def put_bf16(numbers: Tensor, out: Tensor) -> None:
    """bf16 [B, n] → uint8 [B, 2n], at any address."""
    out.copy_(numbers.contiguous().view(torch.uint8).view(out.shape))


def get_bf16(data: Tensor) -> Tensor:
    """uint8 [B, 2n], at any address → fp32 [B, n]."""
    return data.clone(memory_format=torch.contiguous_format).view(torch.bfloat16).float()


def pack(codes: Tensor, bits: int, out: Tensor) -> None:
    """int8 codes of `bits` bits [B, lanes·w] → uint8 [B, w]: lane i, codes [i·w, (i+1)·w), in bits [i·bits, …) of
    the bytes. Not neighbours in one byte, but halves: whole rows are shifted, nothing is gathered. Overwrites codes."""
    lanes = codes.view(len(codes), 8 // bits, -1).unbind(1)
    target = out.view(torch.int8)
    target.copy_(lanes[-1] if bits == 8 else lanes[-1].bitwise_left_shift_(8 - bits))
    for i, lane in enumerate(lanes[:-1]):
        target |= lane.bitwise_and_((1 << bits) - 1).bitwise_left_shift_(i * bits)


def unpack(data: Tensor, bits: int, scratch: Tensor) -> Tensor:
    """uint8 [B, w] → int8 codes [B, lanes·w], sign-extended from `bits` bits; in `scratch`, unless they lie ready."""
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
