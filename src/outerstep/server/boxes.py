"""The hashes of what the ranks of a job hold: of boxes that are cut out of the model's tensors, a piece at a time."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..core.state import bytes_of
from ..digest import LEAF_VALUES, leaves_of, tree_root
from ..tiling import Cutout, FragmentTiling

PIECE_VALUES = 16 * LEAF_VALUES


def box_hashes(params: Mapping[str, Tensor], tiling: FragmentTiling) -> tuple[str, ...]:
    """Per section: the root over the leaves of its boxes (digest.py), each box counting as a tensor."""
    known: dict[tuple[str, Cutout], bytes] = {}  # of boxes that several sections hold
    roots = list[str]()
    for held in tiling.held:
        for name, box in held:
            if (name, box) not in known:
                known[name, box] = _leaves(params[name].reshape(-1), box)
        roots.append(tree_root(b"".join(known[each] for each in held)))
    return tuple(roots)


def _leaves(values: Tensor, box: Cutout) -> bytes:
    found = []
    for start in range(0, box.numel, PIECE_VALUES):
        piece = torch.empty(min(PIECE_VALUES, box.numel - start), device=values.device)
        for part in box.stretches(start, start + piece.numel()):
            here = piece[part.at - start : part.at - start + part.count * part.length].view(part.count, part.length)
            here.copy_(
                values.as_strided((part.count, part.length), (part.stride, 1), values.storage_offset() + part.place)
            )
        found.append(leaves_of(bytes_of(piece)))
    return b"".join(found)
