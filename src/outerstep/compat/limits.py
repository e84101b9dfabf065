"""How much a client may send, and how long it may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MAX_HEADER_BYTES = 64 * 1024
"""Of the JSON header in front of a submitted payload."""

RECORD_BYTES = 1024
"""What a tensor takes in a torch.save file besides its values and its name: two zip headers, padding, pickle."""
SPARE_BYTES = 1 << 20


@dataclass(frozen=True)
class CompatLimits:
    max_connections: int = 256
    max_workers: int = 64  # registered at a time; a held submit keeps a copy of its payload
    idle_s: float = 120.0  # between two requests on one connection
    stall_s: float = 30.0  # without a byte, inside a request or an answer
    slowest_bytes_per_s: int = 16 * 1024  # slower than this, over stall_s of waiting for the client, and it is cut off
    max_body_bytes: int | None = None  # None = as much as the run's model can need


def body_limit_bytes(sizes: Mapping[str, int]) -> int:
    """The most that a pseudo-gradient of the whole model takes as torch.save writes it, aliases and buffers included.
    `sizes`: bytes of each entry of the model's state dict, as the server sends them (floats as fp32)."""
    values = sum(sizes.values())
    names = sum(RECORD_BYTES + 4 * len(name.encode()) for name in sizes)
    return 4 + MAX_HEADER_BYTES + values + names + SPARE_BYTES
