"""Host memory for bytes on their way."""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20


def new_bytes(size: int, *, pinned: bool = False) -> Tensor:
    """Host memory, uint8; `pinned` if a GPU is to read or write it. Large pieces are asked for in large pages: page by
    page the system would take longer to hand them out than we need to fill them."""
    if pinned or size < 2 * HUGE_PAGE_BYTES or sys.platform != "linux":
        return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
