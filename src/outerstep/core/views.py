"""Tensors over bytes and bytes of tensors, without copying."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor


def fp32_views(
    buffer: memoryview, places: Iterable[tuple[str, tuple[int, ...], int]], first_byte: int
) -> dict[str, Tensor]:
    """fp32 tensors by name over the memory of `buffer`; `places` are (name, shape, offset after `first_byte`)."""
    views: dict[str, Tensor] = {}
    for name, shape, offset in places:
        count = math.prod(shape)
        if count == 0:  # frombuffer refuses to make nothing
            views[name] = torch.empty(shape)
            continue
        flat = torch.frombuffer(buffer, dtype=torch.float32, count=count, offset=first_byte + offset)
        views[name] = flat.view(shape)
    return views


def bytes_of(tensor: Tensor) -> memoryview:
    """The values in host memory (copied there if they are elsewhere)."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data
