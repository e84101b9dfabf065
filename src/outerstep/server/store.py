"""The global model: one flat fp32 store per fragment, laid out as the frame that is sent.

A published version is a frame in memory that never changes again: serving it is a slice, and nobody can read one that
is half replaced. The next version is a new frame; the outer step writes into it, then it is hashed and published.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.linalg import vector_norm

from ..core.aggregate import RunningMean
from ..core.codecs import FP32
from ..core.codecs.recipe import Recipe
from ..core.delayed import DelayedNesterov
from ..core.outer import OuterOptimizer
from ..core.views import fp32_views
from ..digest import data_hash, part_count, part_hash, part_range, payload_hash
from ..errors import NotFinite
from ..types import Agreement, ParameterSpec, Participant, Payload
from ..wire.frames import Entry, Layout, check_frame, layout
from ..wire.sections import row_pieces, rows_of, section_layout, section_overhead_bytes
from .pool import private_memory

log = logging.getLogger(__name__)

BLOCK_VALUES = 1 << 18  # 1 MiB of fp32: decoded, checked and added while it is in the cache
KEPT_VERSIONS = 2  # the newest, and the one before it for whoever is in the middle of it
READING_S = 60.0  # who has not asked for a part for this long has stopped reading
GROUP_SIZES = 8  # kept range hashes per version: nobody can make us remember them for every number of sections
ABSURD = 1e18  # no honest difference of weights; sums and momentum of values below it stay finite in fp32
FEW_SECTIONS = 256  # however few rows a fragment has
SLACK_BYTES = 64 << 10  # a frame that is a little too long is read, so that the refusal can name the tensor


@dataclass(frozen=True)
class Published:
    """One version of one fragment, ready to be served."""

    agreement: Agreement
    frame: memoryview
    part_hashes: tuple[str, ...]
    range_hashes: dict[int, tuple[str, ...]] = field(default_factory=dict)  # by number of sections, as far as asked


@dataclass(frozen=True)
class Pushed:
    """A contribution for a rule that takes them one by one."""

    payload: memoryview
    scale: float
    base: int  # the version it was computed from
    sections: int = 1


class FragmentStore:
    """θ of one fragment, the sums of its open rounds, and its last published versions."""

    def __init__(
        self,
        index: int,
        specs: list[ParameterSpec],
        state: dict[str, Tensor],
        codec: Recipe,
        part_size_bytes: int,
        version: int = 0,
        max_staleness: int = 0,
    ) -> None:
        self.index = index
        self._codec_name = codec.name
        self._codecs = {spec.name: codec.codec(spec) for spec in specs}
        self._shapes = [(spec.name, spec.shape) for spec in specs]
        self._part_size_bytes = part_size_bytes
        self.down = layout(FP32.name, [(s.name, s.shape, FP32.encoded_bytes(s.numel)) for s in specs])
        self.up = layout(codec.name, [(s.name, s.shape, self._codecs[s.name].encoded_bytes(s.numel)) for s in specs])
        self._roles = {spec.name: spec.role for spec in specs}
        self._averaged = [name for name, role in self._roles.items() if role == "average"]
        self._statistics: dict[int, dict[str, Tensor]] = {}  # averaged buffers, of as many versions as may be stale
        self._max_staleness = max_staleness
        self._sums: dict[int, RunningMean] = {}
        self._versions: dict[int, Published] = {}
        self._last_read: dict[int, float] = {}
        frame = _new_frame(self.down)
        for name, theta in fp32_views(frame, self.down.places, self.down.data_begin).items():
            theta.copy_(state[name])
        self._publish(frame, version, ())

    @property
    def max_payload_bytes(self) -> int:
        return self.up.size_bytes + SLACK_BYTES

    @property
    def max_sections(self) -> int:
        """As many as there are rows; a few more may be empty."""
        return max([FEW_SECTIONS, *(shape[0] for _, shape in self._shapes if shape)])

    @property
    def section_overhead_bytes(self) -> int:
        return section_overhead_bytes(self.up)

    @property
    def newest(self) -> Published:
        return self._versions[max(self._versions)]

    def read(self, version: int, now: float) -> Published | None:
        """A version that is still held; it will be held on while it is being read."""
        if version in self._versions:
            self._last_read[version] = now
        return self._versions.get(version)

    def forget_old(self, now: float) -> None:
        """Hold the newest two, and one older version if somebody is in the middle of it: a slow reader must be able to
        finish what it began, and memory must not grow with the number of readers."""
        newest = max(self._versions)
        older = [v for v in self._versions if v <= newest - KEPT_VERSIONS]
        read = {v: self._last_read[v] for v in older if now - self._last_read.get(v, -math.inf) < READING_S}
        pinned = max(read, key=read.__getitem__, default=None)
        for version in older:
            if version != pinned:
                del self._versions[version]
                self._last_read.pop(version, None)

    def params(self) -> dict[str, Tensor]:
        """θ by name: read-only views of the newest version."""
        return fp32_views(self.newest.frame, self.down.places, self.down.data_begin)

    def range_hashes(self, published: Published, sections: int) -> tuple[str, ...]:
        """Per section the hash of its rows, by the rule of the anchor's. A published frame never changes, so this
        needs no lock; two who ask at once compute the same."""
        known = published.range_hashes.get(sections)
        if known is None:
            data = published.frame[self.down.data_begin :]
            known = tuple(
                data_hash(data[begin:end] for begin, end in row_pieces(self.down.entries, sections, r, 4))
                for r in range(sections)
            )
            if len(published.range_hashes) < GROUP_SIZES:
                published.range_hashes[sections] = known
        return known

    # --- a contribution -------------------------------------------------------------------------------------------

    def check(self, payload: memoryview, sections: int = 1) -> float:
        """Refuse a payload with the wrong tensors or with NaN or Inf, naming them. Returns ‖Δ‖."""
        squares = 0.0
        for section, up, frame in self._sections(payload, sections):
            check_frame(frame, up)
            for entry in up.entries:
                # A norm is many times cheaper than isfinite(), and not finite exactly if one of its values is not.
                norms = [float(vector_norm(block, dtype=torch.float64)) for _, block in self._blocks(frame, up, entry)]
                squares += sum(norm * norm for norm in norms)
                largest = max(norms, default=0.0)
                if not all(map(math.isfinite, norms)) or largest > ABSURD:
                    where = f" in section {section} of {sections}" if sections > 1 else ""
                    what = f"values of about {largest:.0e}, which is absurd" if math.isfinite(largest) else "NaN or Inf"
                    raise NotFinite(
                        f"tensor {entry.name!r} holds {what}{where}",
                        hint="the contribution was not applied; lower the learning rate, or reload the model",
                    )
        return math.sqrt(squares)

    def accumulate(
        self, payload: memoryview, version: int, weight: float, *, base: int | None = None, sections: int = 1
    ) -> None:
        """Add w·Δ to the sum of the round that makes `version`, block by block. Δ was computed from version `base`
        (None = the newest)."""
        total = self._sums.get(version)
        if total is None:
            total = self._sums[version] = RunningMean((self.down.size_bytes - self.down.data_begin) // 4)
        if weight == 0.0:
            return  # it was there, and brought nothing
        places = {entry.name: entry.begin // 4 for entry in self.down.entries}
        newest = self.params()
        for name, start, block in self._values(payload, sections):
            if base is not None and base < version - 1 and self._roles[name] == "average":
                self._rebase(block, name, start, base, newest)
            total.add(places[name] + start, block, weight)
        total.count(weight)

    def _push(self, params: dict[str, Tensor], pushed: Pushed, rule: DelayedNesterov) -> None:
        """Move θ by scale·Δ as the rule says, block by block."""
        push = rule.begin(self.index)
        for name, start, block in self._values(pushed.payload, pushed.sections):
            if self._roles[name] == "parameter":
                push.block(name, params[name], block.mul_(pushed.scale), start)
            elif self._roles[name] == "average":  # θ + (l − θ)/N: between the two, whatever the others did meanwhile
                self._rebase(block, name, start, pushed.base, params)
                block.mul_(min(pushed.scale, 1.0) / rule.buffer_size)
                params[name].view(-1)[start : start + block.numel()].sub_(block)
        push.done()

    def _rebase(self, block: Tensor, name: str, start: int, base: int, now: Mapping[str, Tensor]) -> None:
        """Δ of a buffer against θ as it is now, in place: θ_now − l = (θ_now − θ_base) + Δ. Buffers are means of values
        and not sums of steps: a mean of two variances is one, but an old difference taken off a new one need not be."""
        held = self._statistics.get(base)
        if held is None:
            block.zero_()  # older than anything we know: it says nothing
            return
        piece = slice(start, start + block.numel())
        block.add_(now[name].view(-1)[piece]).sub_(held[name].view(-1)[piece])

    def _sections(self, payload: memoryview, sections: int) -> Iterator[tuple[int, Layout, memoryview]]:
        """(number, layout, frame) of each section; whatever is left over goes to the last, whose check will say so."""
        begin = 0
        tensors = [(name, shape, self._codecs[name].encoded_bytes) for name, shape in self._shapes]
        for section in range(sections):
            up = section_layout(self._codec_name, tensors, sections, section) if sections > 1 else self.up
            end = begin + up.size_bytes if section < sections - 1 else len(payload)
            yield section, up, payload[begin:end]
            begin = end

    def _values(self, payload: memoryview, sections: int) -> Iterator[tuple[str, int, Tensor]]:
        """(tensor, index in it, values) of a checked payload, block by block."""
        shapes = dict(self._shapes)
        for section, up, frame in self._sections(payload, sections):
            for entry in up.entries:
                first = rows_of(shapes[entry.name], sections, section).first_value
                for start, block in self._blocks(frame, up, entry):
                    yield entry.name, first + start, block

    def _blocks(self, frame: memoryview, up: Layout, entry: Entry) -> Iterator[tuple[int, Tensor]]:
        """The tensor's values, decoded a cache-sized block at a time into one scratch tensor: (first index, values)."""
        codec, numel = self._codecs[entry.name], math.prod(entry.shape)
        per_block = max(BLOCK_VALUES // codec.block_values, 1) * codec.block_values
        scratch = torch.empty(min(numel, per_block))
        begin = up.data_begin + entry.begin
        for start in range(0, numel, per_block):
            stop = min(start + per_block, numel)
            first, last = codec.encoded_bytes(start), codec.encoded_bytes(stop)
            data = torch.frombuffer(frame, dtype=torch.uint8, count=last - first, offset=begin + first)
            codec.decode(data, scratch[: stop - start])
            yield start, scratch[: stop - start]

    # --- the outer step -------------------------------------------------------------------------------------------

    def close(self, version: int, participants: tuple[Participant, ...], optimizer: OuterOptimizer) -> Published:
        """θ′ from θ and the round's mean, published as `version`."""
        total = self._sums.pop(version)
        if total.weight == 0.0:  # everybody was there, nobody had trained
            return self._publish(self.newest.frame, version, participants)
        mean = total.result()
        frame = self._next_frame()
        params = fp32_views(frame, self.down.places, self.down.data_begin)
        grads = {entry.name: mean[entry.begin // 4 : entry.end // 4].view(entry.shape) for entry in self.down.entries}
        trained = [name for name, role in self._roles.items() if role == "parameter"]
        optimizer.step({name: params[name] for name in trained}, {name: grads[name] for name in trained})
        for name, role in self._roles.items():
            if role == "average":  # a buffer is not optimized: the mean of the workers' values replaces it
                params[name].sub_(grads[name])
        return self._publish_finite(frame, version, participants)

    def close_pushed(
        self,
        version: int,
        participants: tuple[Participant, ...],
        pushes: list[Pushed],
        rule: DelayedNesterov,
    ) -> Published:
        """θ′ from θ and the round's contributions, one by one."""
        frame = self._next_frame()
        params = fp32_views(frame, self.down.places, self.down.data_begin)
        for push in pushes:
            if push.scale > 0.0:
                self._push(params, push, rule)
        return self._publish_finite(frame, version, participants)

    def _next_frame(self) -> memoryview:
        """A copy of the newest version, to be moved."""
        frame = _new_frame(self.down)
        frame[self.down.data_begin :] = self.newest.frame[self.down.data_begin :]
        return frame

    def _publish_finite(self, frame: memoryview, version: int, participants: tuple[Participant, ...]) -> Published:
        if not _is_finite(torch.frombuffer(frame, dtype=torch.float32, offset=self.down.data_begin)):
            raise FloatingPointError(f"the outer step made fragment {self.index} version {version} not finite")
        return self._publish(frame, version, participants)

    def _publish(self, frame: memoryview, version: int, participants: tuple[Participant, ...]) -> Published:
        size = self.down.size_bytes
        hashes = tuple(
            part_hash(frame[slice(*part_range(i, size, self._part_size_bytes))])
            for i in range(part_count(size, self._part_size_bytes))
        )
        agreement = Agreement(
            fragment=self.index,
            version=version,
            anchor_hash=data_hash(_pieces(frame, self.down)),
            participants=participants,
            payloads=(Payload(version=version, kind="full", size_bytes=size, hash=payload_hash(hashes)),),
        )
        made = Published(agreement, frame, hashes)
        self._versions[version] = made
        if self._averaged:
            params = fp32_views(frame, self.down.places, self.down.data_begin)
            self._statistics[version] = {name: params[name].clone() for name in self._averaged}
            self._statistics.pop(version - self._max_staleness - 2, None)
        return made


def _is_finite(flat: Tensor) -> bool:
    """Block by block: in fp64 as a whole it would need twice its own size."""
    blocks = (flat[start : start + BLOCK_VALUES] for start in range(0, flat.numel(), BLOCK_VALUES))
    return all(math.isfinite(vector_norm(block, dtype=torch.float64)) for block in blocks)


def _new_frame(of: Layout) -> memoryview:
    """Fresh memory with the header in place."""
    frame = private_memory(of.size_bytes)
    frame[: of.data_begin] = of.prefix
    return frame


def _pieces(frame: memoryview, of: Layout) -> Iterator[memoryview]:
    """The values alone, without header and gaps: what the anchor's hash is over."""
    for entry in of.entries:
        yield frame[of.data_begin + entry.begin : of.data_begin + entry.end]
