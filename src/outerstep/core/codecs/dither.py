"""Random numbers for stochastic rounding that depend only on (seed, position).

A generator's stream depends on the device and on earlier draws. A hash of the position does not: a CPU and a GPU, the
whole tensor at once or block by block, a retry or a replay get the same numbers.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

_RUN_BITS = 24  # positions are hashed 2²⁴ at a time, each run of them under keys of its own
_FIRST, _SECOND, _THIRD = 0x7FEB352D, 0x846CA68B, 0x9E3779B1


@dataclass(frozen=True)
class Dither:
    """Uniform numbers for values [first, …) of a tensor."""

    seed: int
    first: int = 0

    @classmethod
    def of(cls, run_id: str, fragment: int, version: int, tensor: str) -> Dither:
        """The numbers of one tensor of one fragment's version in one run."""
        text = "\0".join((run_id, str(fragment), str(version), tensor))
        return cls(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"))

    def after(self, count: int) -> Dither:
        """The same numbers, starting `count` values later."""
        return replace(self, first=self.first + count)

    def bits(self, count: int, device: torch.device) -> Tensor:
        """int32 [count], uniform in [0, 2¹⁶)."""
        parts, begin, end = [], self.first, self.first + count
        while begin < end:
            run, offset = begin >> _RUN_BITS, begin & (1 << _RUN_BITS) - 1
            stop = min(end - begin + offset, 1 << _RUN_BITS)
            keys = hashlib.blake2b(f"{self.seed} {run}".encode(), digest_size=8).digest()
            position = torch.arange(offset, stop, dtype=torch.int32, device=device)
            parts.append(_hash(position, keys))
            begin += stop - offset
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def unit(noise: Tensor) -> Tensor:
    """int32 in [0, 2¹⁶) → fp32 in (0, 1): odd multiples of 2⁻¹⁷, so that n + u < n + 1 in fp32 too for |n| < 128."""
    return noise.float().add_(0.5).mul_(2.0**-16)


def _hash(x: Tensor, keys: bytes) -> Tensor:
    """The upper 16 bits of a 32-bit mix of x (multiply, fold, multiply, fold; int32 arithmetic wraps around)."""
    x = x ^ _int32(int.from_bytes(keys[:4], "little"))
    for constant, fold in ((_FIRST, 15), (_SECOND, 16)):
        x = x * _int32(constant)
        x = x ^ (x >> fold & (1 << 32 - fold) - 1)
    x = (x ^ _int32(int.from_bytes(keys[4:], "little"))) * _int32(_THIRD)
    return x >> 16 & 0xFFFF


def _int32(value: int) -> int:
    """The same 32 bits as a signed number."""
    return value - (1 << 32) if value >= 1 << 31 else value
