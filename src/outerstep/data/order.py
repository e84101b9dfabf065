"""Which samples a place stands for: an order of each epoch's own, drawn from the seed, without a table.

    position i of epoch e  ─▶  sample  π_{seed, e}(i)

π is a Feistel network over the smallest square of a power of two that holds all samples; what falls outside goes round
again (cycle walking). So it is a permutation of exactly the samples, any process computes any part of it alone, and a
billion samples take no memory. Integers only: the same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..digest import data_hash
from ..types import Dataset

Indices = NDArray[np.uint64]

ROUNDS = 6
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def epoch_of(dataset: Dataset, place: int) -> int:
    return place // dataset.units


def samples_of(dataset: Dataset, place: int) -> list[int]:
    """The samples (or shards) of one unit, in the order in which they are trained."""
    epoch, unit = divmod(place, dataset.units)
    begin = unit * dataset.unit_samples
    positions = np.arange(begin, min(begin + dataset.unit_samples, dataset.samples), dtype=np.uint64)
    if not dataset.shuffle:
        return [int(i) for i in positions]
    return [int(i) for i in permuted(positions, dataset.samples, keys(dataset.seed, epoch))]


def part_of(samples: Sequence[int], rank: int, ranks: int) -> list[int]:
    """One rank's samples of a unit. All ranks must take as many steps, so of a unit that cannot be shared evenly the
    first samples are trained by two of them."""
    short = -len(samples) % ranks
    even = [*samples, *(samples[i % len(samples)] for i in range(short))]
    return even[rank::ranks]


def keys(seed: int, epoch: int) -> list[int]:
    """One per round."""
    return [int(data_hash([f"{seed}/{epoch}/{i}".encode()])[:16], 16) for i in range(ROUNDS)]


def permuted(positions: Indices, count: int, round_keys: list[int]) -> Indices:
    """π of each position; all are below `count`."""
    half = np.uint64(max((max(count - 1, 1).bit_length() + 1) // 2, 1))
    limit = np.uint64(count)
    out = _network(positions, half, round_keys)
    while (outside := out >= limit).any():
        out[outside] = _network(out[outside], half, round_keys)
    return out


def _network(values: Indices, half: np.uint64, round_keys: list[int]) -> Indices:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in round_keys:
        mixed = right + np.uint64(key)
        mixed ^= mixed >> np.uint64(30)
        mixed *= _MIX_1
        mixed ^= mixed >> np.uint64(27)
        mixed *= _MIX_2
        mixed ^= mixed >> np.uint64(31)
        left, right = right, left ^ (mixed & mask)
    made: Indices = (left << half) | right
    return made
