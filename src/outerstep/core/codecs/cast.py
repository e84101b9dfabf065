"""Codecs that only change the number type: fp32 (4 bytes a value, exact) and bf16 (2 bytes).

bf16 rounds to the nearest, ties to even. With dither it rounds up or down at random, so that the expected value is
unchanged: 16 random bits are added to the 16 that are cut off. NaN and infinities are unchanged; as always in bf16, a
finite value above 3.3895e38 can become infinite.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .blocks import add_decoded, pieces
from .dither import Dither


@dataclass(frozen=True)
class CastCodec:
    name: str
    dtype: torch.dtype
    block_values: int = 1
    needs_feedback: bool = False

    def encoded_bytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    @torch.no_grad()
    def encode(self, values: Tensor, out: Tensor, dither: Dither | None = None) -> None:
        if dither is None or self.dtype == torch.float32:  # nothing is rounded in fp32
            out.view(self.dtype).copy_(values)
            return
        for start, stop in pieces(values.numel(), 1, values.device):
            target = out[self.encoded_bytes(start) : self.encoded_bytes(stop)].view(torch.int16)
            target.copy_(_dithered_bf16(values[start:stop], dither.after(start)))

    @torch.no_grad()
    def decode(self, data: Tensor, out: Tensor) -> None:
        out.copy_(data.view(self.dtype))

    @torch.no_grad()
    def decode_add(self, data: Tensor, out: Tensor, weight: float = 1.0) -> None:
        if weight == 1.0:
            out.add_(data.view(self.dtype))  # a bf16 number is an fp32 number: only the sum is rounded
        else:
            add_decoded(self, data, out, weight)

    def check(self, data: Tensor, numel: int) -> str:
        return ""


def _dithered_bf16(values: Tensor, dither: Dither) -> Tensor:
    """The upper halves of the values' bits, after adding random lower halves; int32, to be cut to 16 bits."""
    bits = values.view(torch.int32)
    is_number = (bits & 0x7F800000) != 0x7F800000  # in NaN, a carry could run into the sign and make it 0
    quiet_nan = ((bits & 0x7FFFFF) != 0) & ~is_number
    return (bits + dither.bits(values.numel(), values.device) * is_number >> 16) | (quiet_nan * 0x40)


FP32 = CastCodec("fp32", torch.float32)
BF16 = CastCodec("bf16", torch.bfloat16)
