"""XXH3-64 of many leaves at once, on a GPU. (Imported only where Triton is: torch brings it for CUDA.)

A leaf is 256 KiB (digest.py). XXH3 reads it in 256 blocks of 16 stripes of 8 lanes of 8 bytes. With v one of these
64-bit values and k = v ⊕ secret, a block adds to the lanes' accumulators

    S[i] = Σ over stripes of  low32(k[i])·high32(k[i]) + v[i ⊕ 1]

which depends on no other block; only what happens between two blocks goes one after the other:

    A ← (A + S) ;  A ← ((A ⊕ A >> 47) ⊕ secret) · prime        (after the last block, the sum alone)

So one kernel makes S of all blocks at the speed of the memory, and a second goes through them, a thread for each leaf
and lane. The last stripe of a leaf has a secret of its own. What becomes of the eight accumulators at the end
(`finish`) is a few hundred bytes of arithmetic for each MiB, done on the host. Arithmetic is modulo 2⁶⁴.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..digest import LEAF_BYTES

LANES, STRIPES, BLOCKS = 8, 16, 256
BLOCKS_PER_PROGRAM = 8
CHAINS_PER_PROGRAM = 64

SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
"""The algorithm's default secret: 192 bytes that its specification gives."""

PRIME32_1, PRIME32_2, PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
PRIME64_1, PRIME64_2, PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
PRIME64_4, PRIME64_5, PRIME_MX1 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5, 0x165667919E3779F9
FIRST = (PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1)
LAST_STRIPE_SECRET, SCRAMBLE_SECRET, FINISH_SECRET = 121, 128, 11  # where in the secret they begin


def _words(offset: int, count: int) -> list[int]:
    return [int.from_bytes(SECRET[offset + 8 * i : offset + 8 * i + 8], "little", signed=True) for i in range(count)]


def _signed(values: tuple[int, ...]) -> list[int]:
    return [value - (1 << 64) if value >> 63 else value for value in values]


def _constants() -> list[int]:
    """Secrets: of a block's stripes, of those of a leaf's last block, of the scrambling. And the first accumulators."""
    usual = [word for stripe in range(STRIPES) for word in _words(8 * stripe, LANES)]
    last = usual[: (STRIPES - 1) * LANES] + _words(LAST_STRIPE_SECRET, LANES)
    return [*usual, *last, *_words(SCRAMBLE_SECRET, LANES), *_signed(FIRST)]


_tables: dict[torch.device, Tensor] = {}


def leaf_accumulators(leaves: Tensor) -> Tensor:
    """The eight accumulators of each leaf at the end: int64 (leaves, 8), on the device of `leaves`, which are whole."""
    words = leaves.view(torch.int64)
    count = words.numel() // (BLOCKS * STRIPES * LANES)
    table = _tables.get(leaves.device)
    if table is None:
        table = _tables[leaves.device] = torch.tensor(_constants(), dtype=torch.int64, device=leaves.device)
    sums = torch.empty(count * BLOCKS * LANES, dtype=torch.int64, device=leaves.device)
    made = torch.empty(count * LANES, dtype=torch.int64, device=leaves.device)
    programs = count * BLOCKS // BLOCKS_PER_PROGRAM
    chains = count * LANES
    grid = (triton.cdiv(chains, CHAINS_PER_PROGRAM),)
    with torch.cuda.device_of(leaves):
        _block_sums[(programs,)](words, table, sums, blocks=BLOCKS_PER_PROGRAM, num_warps=4)
        _chain[grid](sums, table, made, chains, size=CHAINS_PER_PROGRAM, num_warps=2)
    return made.view(count, LANES)


@triton.jit
def _block_sums(words, table, sums, blocks: tl.constexpr):
    """S of `blocks` blocks by each program."""
    block = tl.program_id(0).to(tl.int64) * blocks + tl.arange(0, blocks)[:, None, None]
    stripe, lane = tl.arange(0, 16)[None, :, None], tl.arange(0, 8)[None, None, :]
    first = block * 128 + stripe * 8
    value = tl.load(words + first + lane)
    beside = tl.load(words + first + (lane ^ 1))
    is_last = (block % 256) == 255
    secret = tl.load(table + tl.where(is_last, 128, 0) + stripe * 8 + lane)
    key = (value ^ secret).to(tl.uint64, bitcast=True)
    product = (key & 0xFFFFFFFF) * (key >> 32)
    added = tl.sum(product.to(tl.int64, bitcast=True) + beside, axis=1)
    place = tl.program_id(0).to(tl.int64) * blocks * 8 + tl.arange(0, blocks)[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(sums + place, added)


@triton.jit(do_not_specialize=["chains"])
def _chain(sums, table, made, chains, size: tl.constexpr):
    """The accumulators of `size` (leaf, lane) pairs by each program, from block to block."""
    chain = tl.program_id(0) * size + tl.arange(0, size)
    there = chain < chains
    lane = chain % 8
    first = sums + (chain // 8).to(tl.int64) * 2048 + lane
    secret, held = tl.load(table + 256 + lane), tl.load(table + 264 + lane)
    for block in range(255):
        held += tl.load(first + block * 8, mask=there, other=0)
        high = held.to(tl.uint64, bitcast=True) >> 47
        held = (held ^ high.to(tl.int64, bitcast=True) ^ secret) * 0x9E3779B1
    held += tl.load(first + 2040, mask=there, other=0)
    tl.store(made + chain, held, mask=there)


def finish(accumulators: npt.NDArray[np.int64]) -> bytes:
    """The hashes of the leaves with these accumulators, 8 bytes each, big-endian as digests are."""
    held = accumulators.view(np.uint64)
    secret = np.array(_words(FINISH_SECRET, LANES), dtype=np.int64).view(np.uint64)
    start = (LEAF_BYTES * PRIME64_1) % (1 << 64)
    total = np.full(len(held), start, dtype=np.uint64)
    for i in range(0, LANES, 2):
        total += _folded(held[:, i] ^ secret[i], held[:, i + 1] ^ secret[i + 1])
    total ^= total >> np.uint64(37)
    total *= np.uint64(PRIME_MX1)
    total ^= total >> np.uint64(32)
    return total.astype(">u8").tobytes()


def _folded(a: npt.NDArray[np.uint64], b: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The 128 bits of a·b, the upper half ⊕ the lower."""
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    a_low, a_high, b_low, b_high = a & low, a >> half, b & low, b >> half
    cross = (a_low * b_low >> half) + (a_high * b_low & low) + a_low * b_high
    upper: npt.NDArray[np.uint64] = (a_high * b_low >> half) + (cross >> half) + a_high * b_high
    return upper ^ (a * b)
