"""The inner loops of the block codecs, value by value, to be compiled (compiled.py).

Each works on whole tensors, one block after the other, and gives the bits of the torch expressions in scaled.py and
sparse.py. A block is read from memory once: everything between its values and its bytes stays in the first cache.

This is the part of Python and numpy that numba compiles, and it runs without numba too, slowly: tests compare it with
the torch expressions that way. Two things must be spelled out for the compiler. A float literal is fp64 there and a sum
of two int32 is int64, so constants are named with their types and results are cut to 32 bits; and bits are read as
numbers by two views of one array, because a single value has no view.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .blocks import MIN_SCALE

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Bytes = NDArray[np.uint8]
Ints = NDArray[np.int32]

F32, I32, U8 = np.float32, np.int32, np.uint8

CHUNK = 4096  # of a sparse codec
GROUPS = 512  # into which its chunk is cut, as many as values can be kept

_ZERO, _HALF, _THIRD = F32(0.0), F32(0.5), F32(1.0 / 3.0)
_ONE_AND_A_HALF_2_23 = F32(12582912.0)  # t + this has t in its last bits, rounded to the nearest, ties to even
_MIN_SCALE = F32(MIN_SCALE)
_MAGNITUDE, _ORDER = I32(0x7FFFFFFF), I32(0x7FFFF000)
_INFINITY, _NAN = I32(0x7F800000), I32(0x7FC00000)
_BF16_MAX = 3.3895313892515355e38


# --- one scale per block: int8, int4, E3M0 ----------------------------------------------------------------------------


def encode_scaled(
    x: Floats, out: Bytes, block: int, lanes: int, powers: bool, per_top: np.float32, largest: np.float32
) -> None:
    """`lanes`: codes in a byte, 1 or 2. `powers`: the levels are powers of two (E3M0), else integers. `per_top`: 1/top
    in fp32; `largest`: the largest scale."""
    pair = np.empty(2, np.float32)
    pair_bits = pair.view(np.int32)
    t = np.empty(block + lanes, np.float32)
    bits = t.view(np.int32)
    x_bits = x.view(np.int32)
    at = 0
    for start in range(0, x.size, block):
        count = min(block, x.size - start)
        width = (count + lanes - 1) // lanes
        scale, inverse = _scale(x_bits[start : start + count], per_top, largest, pair, pair_bits)
        pair[0] = scale
        _put_bf16(pair_bits[0], out[at : at + 2])
        _codes(x[start : start + count], inverse, powers, t[: width * lanes], bits[: width * lanes])
        _pack(bits[: width * lanes], lanes, out[at + 2 : at + 2 + width])
        at += 2 + width


def _scale(
    x_bits: Ints, per_top: np.float32, largest: np.float32, pair: Floats, pair_bits: Ints
) -> tuple[np.float32, np.float32]:
    """As `blocks.block_scales`. The bits of |x| order as |x| does, NaN on top: a maximum of integers needs no care for
    it."""
    top = I32(0)
    for i in range(x_bits.size):
        top = max(top, x_bits[i] & _MAGNITUDE)
    pair_bits[0] = top
    absmax = pair[0]
    pair[1] = absmax * per_top
    rounded = pair_bits[1] + ((pair_bits[1] >> I32(16)) & I32(1)) + I32(0x7FFF)
    pair_bits[1] = I32(I32(rounded >> I32(16)) << I32(16))
    scale = pair[1]
    if scale > largest:
        scale = largest
    if not scale > _MIN_SCALE:
        scale = _ZERO
    scale = scale + absmax * _ZERO  # NaN for a value that is not finite
    inverse = _ZERO
    if scale > _ZERO:
        inverse = F32(np.float64(1.0) / np.float64(scale))
    return scale, inverse


def _put_bf16(bits: np.int32, out: Bytes) -> None:
    """The upper half of fp32 bits, low byte first. Every NaN has one form: processors differ in the sign they give
    it."""
    if (bits & _MAGNITUDE) > _INFINITY:
        bits = _NAN
    out[0] = (bits >> I32(16)) & I32(0xFF)
    out[1] = (bits >> I32(24)) & I32(0xFF)


def _codes(x: Floats, inverse: np.float32, powers: bool, t: Floats, bits: Ints) -> None:
    """The codes of x/scale, each in the low bits of `bits`, which is the memory of `t`. What is left at the end gets
    the code of 0."""
    if powers:
        for i in range(x.size):
            v = x[i] * inverse
            t[i] = np.copysign(max(abs(v * _THIRD), _HALF), v) + v  # as `grids.PowersOfTwo.codes`
        for i in range(x.size, t.size):
            t[i] = _HALF
        for i in range(t.size):
            bits[i] = (((bits[i] >> I32(23)) - I32(126)) & I32(7)) | ((bits[i] >> I32(28)) & I32(8))
    else:
        for i in range(x.size):
            t[i] = x[i] * inverse + _ONE_AND_A_HALF_2_23
        for i in range(x.size, t.size):
            t[i] = _ONE_AND_A_HALF_2_23


def _pack(codes: Ints, lanes: int, out: Bytes) -> None:
    """As `blocks.pack`."""
    if lanes == 1:
        for i in range(out.size):
            out[i] = codes[i] & I32(0xFF)
    else:
        low, high = codes[: out.size], codes[out.size :]
        for i in range(out.size):
            out[i] = (low[i] & I32(0xF)) | I32((high[i] & I32(0xF)) << I32(4))


def decode_scaled(data: Bytes, out: Floats, block: int, lanes: int, powers: bool) -> None:
    pair = np.empty(2, np.float32)
    at = 0
    for start in range(0, out.size, block):
        count = min(block, out.size - start)
        width = (count + lanes - 1) // lanes
        _decode_block(data[at : at + 2 + width], out[start : start + count], lanes, powers, pair)
        at += 2 + width


def add_scaled(data: Bytes, out: Floats, block: int, lanes: int, powers: bool, weight: np.float32) -> None:
    """out += weight·decoded; product and sum are rounded one after the other."""
    pair = np.empty(2, np.float32)
    values = np.empty(block, np.float32)
    at = 0
    for start in range(0, out.size, block):
        count = min(block, out.size - start)
        width = (count + lanes - 1) // lanes
        v, o = values[:count], out[start : start + count]
        _decode_block(data[at : at + 2 + width], v, lanes, powers, pair)
        for i in range(count):
            o[i] = o[i] + v[i] * weight
        at += 2 + width


def _decode_block(data: Bytes, out: Floats, lanes: int, powers: bool, pair: Floats) -> None:
    pair.view(np.int32)[0] = I32(I32(data[0]) << I32(16)) | I32(I32(data[1]) << I32(24))
    scale, packed = pair[0], data[2:].view(np.int8)
    bits = 8 // lanes
    right = I32(32 - bits)
    for lane in range(lanes):
        left = I32(32 - bits * (lane + 1))
        o = out[lane * packed.size : min((lane + 1) * packed.size, out.size)]
        if powers:
            for i in range(o.size):
                code = I32(I32(packed[i]) << left) >> right
                sign = code >> I32(3)  # −1 or 0
                o[i] = F32(((I32(64) >> (~code & I32(7))) ^ sign) - sign) * scale
        else:
            for i in range(o.size):
                o[i] = F32(I32(I32(packed[i]) << left) >> right) * scale


# --- the largest of a chunk: sparse -----------------------------------------------------------------------------------


def encode_sparse(x: Floats, out: Bytes, k: int) -> None:
    """Equal magnitudes have a fixed order and sums a fixed tree, as in sparse.py."""
    keys = np.empty(CHUNK, np.int32)
    groups = np.empty(GROUPS, np.int32)
    index = np.empty(CHUNK, np.int32)
    rooms = np.empty((3, GROUPS), np.float64)
    bins = np.empty(GROUPS + 4, np.int32)
    single = np.empty(1, np.float32)
    x_bits = x.view(np.int32)
    at = 0
    for start in range(0, x.size, CHUNK):
        count = min(CHUNK, x.size - start)
        kept = min(k, count)
        _largest(x_bits[start : start + count], kept, keys, groups, index)
        for i in range(kept):
            rooms[0, i] = x[start + index[i]]
        _two_bits(rooms, kept, bins, single, out[at : at + 8])
        at += 8
        half = (kept + 1) // 2
        for i in range(half):
            a = index[i]
            b = index[i + half] if i + half < kept else I32(0)
            out[at + i] = a & I32(0xFF)
            out[at + half + i] = (a >> I32(8)) | I32((b & I32(0xF)) << I32(4))
            out[at + 2 * half + i] = b >> I32(4)
        at += 3 * half
        quarter = (kept + 3) // 4
        bins[kept : 4 * quarter] = 0
        for i in range(quarter):
            low = bins[i] | I32(bins[i + quarter] << I32(2))
            high = I32(bins[i + 2 * quarter] << I32(4)) | I32(bins[i + 3 * quarter] << I32(6))
            out[at + i] = low | high
        at += quarter


def _largest(x_bits: Ints, k: int, keys: Ints, groups: Ints, index: Ints) -> None:
    """As `sparse.largest`: the indices, ascending, of the k values with the largest keys."""
    n = x_bits.size
    for i in range(n):
        keys[i] = (x_bits[i] & _ORDER) | I32(n - 1 - i)
    found = 0
    if n == CHUNK:
        # Only groups whose maximum is among the k largest maxima can hold one.
        groups[:] = keys[:GROUPS]
        for row in range(1, CHUNK // GROUPS):
            members = keys[row * GROUPS : (row + 1) * GROUPS]
            for g in range(GROUPS):
                groups[g] = max(groups[g], members[g])
        least = _kth_largest(groups, k)
        some = 0
        for g in range(GROUPS):
            if groups[g] >= least:
                groups[some] = g
                some += 1
        for row in range(CHUNK // GROUPS):
            for j in range(some):
                i = row * GROUPS + groups[j]
                if keys[i] >= least:
                    index[found] = i
                    keys[found] = keys[i]  # found ≤ i: nothing is overwritten that is still to be read
                    found += 1
    else:
        for i in range(n):
            index[i] = i
        found = n
    least = _kth_largest(keys[:found], k)
    kept = 0
    for j in range(found):
        if keys[j] >= least:
            index[kept] = index[j]
            kept += 1


def _kth_largest(keys: Ints, k: int) -> np.int32:
    """The k-th largest of keys that are ≥ 0 and all different, bit by bit from the top: the largest T that at least k
    of them reach. No order of the keys makes it slow."""
    found = I32(0)
    for bit in range(30, -1, -1):
        tried = found | I32(1 << bit)
        reached = I32(0)
        for i in range(keys.size):
            reached = I32(reached + I32(keys[i] >= tried))
        if reached >= k:
            found = I32(tried)
    return found


def _two_bits(rooms: Doubles, k: int, bins: Ints, single: Floats, out: Bytes) -> None:
    """As `sparse.two_bits`: rooms[0, :k] holds the values; their bins, and the bytes of the bins' means."""
    v, d, room = rooms[0], rooms[1], rooms[2]
    room[:k] = v[:k]
    total = _tree_sum(room, k)
    mean = total / k
    for i in range(k):
        d[i] = v[i] - mean
        room[i] = d[i] * d[i]
    edge = np.sqrt(_tree_sum(room, k) / k) * 1.5
    for i in range(k):
        bins[i] = I32(d[i] >= -edge) + I32(d[i] >= 0.0) + I32(d[i] >= edge)
    for b in range(4):
        members = 0
        for i in range(k):
            is_member = bins[i] == b
            members += is_member
            room[i] = (1.0 if is_member else 0.0) * v[i]
        mean = _tree_sum(room, k) / max(members, 1)
        if mean > _BF16_MAX:
            mean = _BF16_MAX
        elif mean < -_BF16_MAX:
            mean = -_BF16_MAX
        single[0] = mean + total * 0.0  # NaN for a value that is not finite
        bits = single.view(np.int32)[0]
        if (bits & _MAGNITUDE) <= _INFINITY:
            bits = I32(bits + ((bits >> I32(16)) & I32(1)) + I32(0x7FFF))
        _put_bf16(bits, out[2 * b : 2 * b + 2])


def _tree_sum(x: Doubles, n: int) -> float:
    """As `sparse.tree_sum`; overwrites x, which has room for one more than n if n is odd and above 1."""
    while n > 1:
        if n % 2:
            x[n] = 0.0
            n += 1
        n //= 2
        for i in range(n):
            x[i] = x[i] + x[n + i]
    return float(x[0])


def add_sparse(data: Bytes, out: Floats, k: int, weight: np.float32, keep: bool) -> None:
    """out += weight·decoded where something was sent; `keep=False`: out ← decoded, zeros elsewhere. An index beyond the
    end is ignored."""
    book = np.empty(4, np.float32)
    book_bits = book.view(np.int32)
    at = 0
    for start in range(0, out.size, CHUNK):
        count = min(CHUNK, out.size - start)
        kept = min(k, count)
        o = out[start : start + count]
        for b in range(4):
            low, high = I32(data[at + 2 * b]), I32(data[at + 2 * b + 1])
            book_bits[b] = I32(low << I32(16)) | I32(high << I32(24))
        half, quarter = (kept + 1) // 2, (kept + 3) // 4
        indices, bins = data[at + 8 : at + 8 + 3 * half], data[at + 8 + 3 * half : at + 8 + 3 * half + quarter]
        if not keep:
            o[:] = _ZERO
        for i in range(kept):
            place = _index(indices, i, half)
            value = book[(bins[i % quarter] >> U8(2 * (i // quarter))) & U8(3)]
            if place < count:
                o[place] = o[place] + value * weight if keep else value
        at += 8 + 3 * half + quarter


def unordered_sparse(data: Bytes, size: int, k: int) -> int:
    """Where the first chunk begins whose indices do not ascend or reach beyond the end; -1 if there is none."""
    at = 0
    for start in range(0, size, CHUNK):
        count = min(CHUNK, size - start)
        kept = min(k, count)
        half, quarter = (kept + 1) // 2, (kept + 3) // 4
        indices = data[at + 8 : at + 8 + 3 * half]
        before = -1
        for i in range(kept):
            place = _index(indices, i, half)
            if place <= before or place >= count:
                return start
            before = place
        at += 8 + 3 * half + quarter
    return -1


def _index(indices: Bytes, i: int, half: int) -> int:
    """As `sparse.unpack_indices`: number i of those in three rows of `half` bytes."""
    one, next_row = np.int64(indices[i]), np.int64(indices[half + i])
    if i < half:
        return int(one | (next_row & 0xF) << 8)
    return int(one >> 4 | next_row << 4)


HELPERS: tuple[Any, ...] = (
    _scale,
    _put_bf16,
    _codes,
    _pack,
    _decode_block,
    _largest,
    _kth_largest,
    _two_bits,
    _tree_sum,
    _index,
)
"""Called by the others, the innermost last."""
