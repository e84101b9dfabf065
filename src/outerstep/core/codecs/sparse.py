"""The k largest of every 4096 values, with two bits each. Always with error feedback, which keeps the other values.

    chunk of n ≤ 4096 values x, k′ = min(k, n):
      chosen    the k′ values with the largest |x|, compared to 12 significant bits; of equal ones the first
      bins      d = x − mean(chosen), σ² = mean(d²):    d < −1½σ | −1½σ ≤ d < 0 | 0 ≤ d < 1½σ | 1½σ ≤ d
                (four bins of width 6σ/4 around the mean)
      encoded   the mean of the chosen values in each bin (4 × bf16, 0 for an empty bin), then k′ indices of 12 bits,
                ascending, then k′ bin numbers of 2 bits
      decoded   0, and at each index the mean of its bin

(k = 64: 120 bytes for 4096 values. After Sarfi et al. 2025, "SparseLoCo"; statistics are per chunk, so that chunks
stay independent.) Sums run over a fixed tree in fp64, and equal magnitudes have a fixed order, so that a CPU and a GPU
choose and encode alike. A chunk with a NaN or an infinity has four NaN means. Means are limited to the largest bf16
number.

Indices must ascend and be inside the chunk: `check` refuses other bytes. `decode` is still safe on any bytes: an index
beyond the end is ignored; which of two equal ones counts is not specified.

Packing: with h = ⌈k′/2⌉, byte j of three rows of h bytes holds the indices a = j and b = j + h: a's low 8 bits; a's
high 4 and, above them, b's low 4; b's high 8. Bin numbers as in `blocks.pack`. Unused bits of a short chunk are zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ...errors import ConfigError
from .blocks import Scratch, get_bf16, pack, packed_bytes, pieces, put_columns, unpack
from .compiled import kernels_for
from .dither import Dither

CHUNK = 4096
BOOK_BYTES = 4 * 2
BF16_MAX = torch.finfo(torch.bfloat16).max
MAX_KEPT = 512
_GROUP = CHUNK // MAX_KEPT


@dataclass(frozen=True)
class SparseCodec:
    k: int
    block_values: int = CHUNK
    needs_feedback: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.k <= MAX_KEPT:
            raise ConfigError(f"a sparse codec keeps 1 to {MAX_KEPT} of {CHUNK} values, got {self.k}; try sparse64")

    @property
    def name(self) -> str:
        return f"sparse{self.k}"

    def encoded_bytes(self, numel: int) -> int:
        chunks, tail = divmod(numel, CHUNK)
        return chunks * _chunk_bytes(self.k) + (_chunk_bytes(min(self.k, tail)) if tail else 0)

    @torch.no_grad()
    def encode(self, values: Tensor, out: Tensor, dither: Dither | None = None) -> None:
        if dither is not None:
            raise ConfigError(
                f"codec {self.name!r} has no stochastic rounding; its error feedback carries what is left out"
            )
        kernels = kernels_for(values, out)
        if kernels is not None:
            kernels.encode_sparse(values.detach().numpy(), out.numpy(), self.k)
            return
        scratch = Scratch()
        for start, stop in pieces(values.numel(), CHUNK, values.device):
            x = values[start:stop].view(-1, min(stop - start, CHUNK))
            index = largest(x, min(self.k, x.shape[1]), scratch.like(x, "keys", torch.int32))
            book, bins = two_bits(x.gather(1, index))
            codes = pad(bins, (0, -bins.shape[1] % 4))
            rows = self._rows(out, start, stop, len(x))
            put_columns(rows, book.view(torch.uint8), pack_indices(index), pack(codes, 2))

    @torch.no_grad()
    def decode(self, data: Tensor, out: Tensor) -> None:
        kernels = kernels_for(data, out)
        if kernels is not None:
            kernels.add_sparse(data.numpy(), out.detach().numpy(), self.k, np.float32(1.0), False)
            return
        for start, stop in pieces(out.numel(), CHUNK, out.device):
            index, chosen = self._read(data, start, stop)
            if stop - start < CHUNK:  # room for an index beyond the end, which is then dropped
                out[start:stop].copy_(out.new_zeros(1, CHUNK).scatter_(1, index, chosen)[0, : stop - start])
            else:
                out[start:stop].zero_().view(-1, CHUNK).scatter_(1, index, chosen)

    @torch.no_grad()
    def decode_add(self, data: Tensor, out: Tensor, weight: float = 1.0) -> None:
        """out[index] += weight·mean: values that were not sent are not touched. For bytes that pass `check`."""
        kernels = kernels_for(data, out)
        if kernels is not None:
            kernels.add_sparse(data.numpy(), out.detach().numpy(), self.k, np.float32(weight), True)
            return
        for start, stop in pieces(out.numel(), CHUNK, out.device):
            index, chosen = self._read(data, start, stop)
            if weight != 1.0:
                chosen.mul_(weight)
            target, last = out[start:stop].view(len(index), -1), min(stop - start, CHUNK) - 1
            chosen.masked_fill_(index > last, 0.0)
            target.scatter_add_(1, index.clamp_(max=last), chosen)

    @torch.no_grad()
    def check(self, data: Tensor, numel: int) -> str:
        kernels = kernels_for(data)
        if kernels is not None:
            start = kernels.unordered_sparse(data.numpy(), numel, self.k)
            return "" if start < 0 else _unordered(start, min(start + CHUNK, numel))
        for start, stop in pieces(numel, CHUNK, data.device):
            index, size = self._read_indices(data, start, stop), min(stop - start, CHUNK)
            if bool((index[:, -1] >= size).any()) or bool((index[:, 1:] <= index[:, :-1]).any()):
                return _unordered(start, stop)
        return ""

    # --- one piece: B chunks of n values ---------------------------------------------------------------------------

    def _rows(self, data: Tensor, start: int, stop: int, count: int) -> Tensor:
        return data[self.encoded_bytes(start) : self.encoded_bytes(stop)].view(count, -1)

    def _read(self, data: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Indices int64 [B, k′], and their values fp32 [B, k′]."""
        index = self._read_indices(data, start, stop)
        rows, kept = self._rows(data, start, stop, len(index)), index.shape[1]
        packed = rows[:, rows.shape[1] - packed_bytes(kept, 2) :]
        bins = unpack(packed, 2, packed.new_empty((len(rows), 4 * packed.shape[1]), dtype=torch.int8))[:, :kept]
        return index, get_bf16(rows[:, :BOOK_BYTES]).gather(1, (bins & 3).long())

    def _read_indices(self, data: Tensor, start: int, stop: int) -> Tensor:
        chunks, kept = max((stop - start) // CHUNK, 1), min(self.k, stop - start)
        rows = self._rows(data, start, stop, chunks)
        return unpack_indices(rows[:, BOOK_BYTES : rows.shape[1] - packed_bytes(kept, 2)], kept)


def largest(x: Tensor, k: int, keys: Tensor) -> Tensor:
    """fp32 [B, n] → the indices, ascending int64 [B, k], of the k largest |x| in each row.

    The bits of |x| order as |x| does, NaN on top. Their last 12 make room for the position, counted from the end: so no
    two keys are equal, and every machine finds the same k largest. They are built in `keys`, int32 [B, n].
    """
    n = x.shape[1]
    position = torch.arange(n - 1, -1, -1, dtype=torch.int32, device=x.device)
    torch.bitwise_and(x.view(torch.int32), 0x7FFFF000, out=keys).bitwise_or_(position)
    if n == CHUNK:
        # The k largest are in the k groups with the largest maxima: a fraction of the work, and nothing is missed.
        groups = keys.view(-1, _GROUP, n // _GROUP)
        best = groups.amax(1).topk(k, dim=1, sorted=False).indices
        keys = groups.gather(2, best.unsqueeze(1).expand(-1, _GROUP, -1)).flatten(1)
    kept = keys.topk(k, dim=1, sorted=False).values
    return (n - 1 - (kept & 0xFFF)).sort(1).values.long()


def two_bits(v: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 [B, k] → the mean of each bin, bf16 [B, 4], and each value's bin, int8 [B, k]."""
    v, k = v.double(), v.shape[1]
    total = tree_sum(v)
    d = v - total / k
    edge = (tree_sum(d * d) / k).sqrt() * 1.5
    bins = (d >= -edge).to(torch.int8) + (d >= 0.0) + (d >= edge)
    members = torch.stack([bins == b for b in range(4)], dim=1)  # [B, 4, k]
    means = tree_sum(members * v.unsqueeze(1)).squeeze(2) / members.sum(2).clamp_(min=1)
    # For a non-finite value total·0 = NaN, which the clamping would hide.
    return (means.clamp(-BF16_MAX, BF16_MAX) + total * 0.0).float().bfloat16(), bins


def tree_sum(x: Tensor) -> Tensor:
    """Σ over the last dimension (kept, of size 1) in a fixed order: the upper half onto the lower, and again."""
    while x.shape[-1] > 1:
        if x.shape[-1] % 2:
            x = pad(x, (0, 1))
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x


def pack_indices(index: Tensor) -> Tensor:
    """int64 [B, k] below 4096 → uint8 [B, 3·⌈k/2⌉]."""
    a, b = pad(index, (0, index.shape[1] % 2)).view(len(index), 2, -1).unbind(1)
    return torch.cat((a & 0xFF, a >> 8 | (b & 0xF) << 4, b >> 4), dim=1).to(torch.uint8)


def unpack_indices(data: Tensor, k: int) -> Tensor:
    """uint8 [B, 3·⌈k/2⌉] → int64 [B, k] below 4096."""
    low, middle, high = data.long().view(len(data), 3, -1).unbind(1)
    return torch.cat((low | (middle & 0xF) << 8, middle >> 4 | high << 4), dim=1)[:, :k]


def _unordered(start: int, stop: int) -> str:
    return f"the indices of a chunk must ascend and be below {min(stop - start, CHUNK)} (values {start} to {stop})"


def _chunk_bytes(kept: int) -> int:
    return BOOK_BYTES + 3 * packed_bytes(kept, 4) + packed_bytes(kept, 2)


SPARSE64 = SparseCodec(64)
SPARSE128 = SparseCodec(128)
