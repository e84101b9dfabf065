"""Codecs: tensors to bytes, and back.

A codec turns a flat fp32 tensor into bytes, block by block: `block_values` values are coded independently of all
others, so the bytes of values [a, b) are exactly [encoded_bytes(a), encoded_bytes(b)) whenever a and b fall on block
borders (or b is the end). So the receiver can decode and add in cache-sized pieces, and the sender can encode while it
sends.

A CPU and a GPU give the same bytes and the same values, with any number of threads and any vector width.
"""

from __future__ import annotations

import re
from typing import Protocol

from torch import Tensor

from ...errors import ConfigError
from .cast import BF16, FP32
from .dither import Dither
from .scaled import CONTROL_2BIT, E3M0, INT4, INT8
from .sparse import SPARSE64, SPARSE128, SparseCodec


class Codec(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def block_values(self) -> int:
        """Values per independent block."""

    @property
    def needs_feedback(self) -> bool:
        """Whether training needs error feedback (core/feedback.py) with it: what it leaves out is sent later."""

    def encoded_bytes(self, numel: int) -> int:
        """Size of `numel` values, known in advance: limits can be checked before anything is read."""

    def encode(self, values: Tensor, out: Tensor, dither: Dither | None = None) -> None:
        """fp32 [n] → uint8 [encoded_bytes(n)], on the same device. Rounds to the nearest, or at random with `dither`.
        Non-finite values never become finite."""

    def check(self, data: Tensor, numel: int) -> str:
        """What is wrong with these encoded_bytes(numel) bytes; "" if they are valid."""

    def decode(self, data: Tensor, out: Tensor) -> None:
        """uint8 [encoded_bytes(n)] → fp32 [n]. Safe on any bytes; meaningful if `check` finds nothing."""

    def decode_add(self, data: Tensor, out: Tensor, weight: float = 1.0) -> None:
        """out += weight·decoded, for bytes in which `check` finds nothing; a sparse codec touches only what was sent.
        Product and sum are rounded one after the other."""


CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (FP32, BF16, INT8, INT4, E3M0, SPARSE64, SPARSE128, CONTROL_2BIT)
}


def get_codec(name: str) -> Codec:
    """The codec of that name; sparseK exists for every K that the codec allows."""
    codec = CODECS.get(name)
    if codec is None and (sparse := re.fullmatch(r"sparse([1-9][0-9]{0,3})", name)):
        return SparseCodec(int(sparse[1]))
    if codec is None:
        known = ", ".join(sorted(CODECS))
        raise ConfigError(f"unknown codec {name!r}; known: {known}; outerstep.register_codec adds one of your own")
    return codec


def bytes_per_value(codec: Codec) -> float:
    """Of a tensor of whole blocks."""
    return codec.encoded_bytes(codec.block_values) / codec.block_values


__all__ = [
    "BF16",
    "CODECS",
    "CONTROL_2BIT",
    "E3M0",
    "FP32",
    "INT4",
    "INT8",
    "SPARSE64",
    "SPARSE128",
    "Codec",
    "Dither",
    "SparseCodec",
    "bytes_per_value",
    "get_codec",
]
