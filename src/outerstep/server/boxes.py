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
    known: dict[tuple[str, int], tuple[bytes, int]] = {}  # of boxes that several sections hold: and how many to come
    roots = list[str]()
    for section in range(tiling.sections):
        leaves = list[bytes]()
        for name, pattern, i in tiling.held.numbers(section):
            found, left = known.pop((name, i), (b"", 0))
            if not left:
                found, left = _leaves(params[name].reshape(-1), pattern.cutouts[i]), len(pattern.boxes[i].holders)
            if left > 1:
                known[name, i] = found, left - 1
            leaves.append(found)
        roots.append(tree_root(b"".join(leaves)))
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
