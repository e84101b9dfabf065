"""Codecs that only change the number type: fp32 (4 bytes a value, exact) and bf16 (2 bytes, round to nearest even)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class CastCodec:
    name: str
    dtype: torch.dtype
    block_values: int = 1

    def encoded_bytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    def encode(self, values: Tensor, out: Tensor) -> None:
        out.view(self.dtype).copy_(values)

    def decode(self, data: Tensor, out: Tensor) -> None:
        out.copy_(data.view(self.dtype))


FP32 = CastCodec("fp32", torch.float32)
BF16 = CastCodec("bf16", torch.bfloat16)
