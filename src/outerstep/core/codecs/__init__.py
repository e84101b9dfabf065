"""What travels: tensors as bytes, and back.

A codec turns a flat fp32 tensor into bytes, block by block: `block_values` values are coded independently of all
others, so the bytes of values [a, b) are exactly [encoded_bytes(a), encoded_bytes(b)) whenever a and b fall on block
borders (or b is the end). That lets the receiver decode and add in cache-sized pieces, and the sender
encode while it sends.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ...errors import ConfigError
from .cast import BF16, FP32


class Codec(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def block_values(self) -> int:
        """Values per independent block."""

    def encoded_bytes(self, numel: int) -> int:
        """Size of `numel` values, known beforehand: limits can be checked before anything is read."""

    def encode(self, values: Tensor, out: Tensor) -> None:
        """fp32 [n] → uint8 [encoded_bytes(n)], on the same device."""

    def decode(self, data: Tensor, out: Tensor) -> None:
        """uint8 [encoded_bytes(n)] → fp32 [n]."""


CODECS: dict[str, Codec] = {codec.name: codec for codec in (FP32, BF16)}


def get_codec(name: str) -> Codec:
    codec = CODECS.get(name)
    if codec is None:
        raise ConfigError(f"unknown codec {name!r}; known: {', '.join(sorted(CODECS))}")
    return codec


__all__ = ["BF16", "CODECS", "FP32", "Codec", "get_codec"]
