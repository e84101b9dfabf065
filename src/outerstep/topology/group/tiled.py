"""A job of any shape is one worker: its ranks hold boxes of the parameters (tensor-parallel, FSDP2 and both together),
or parameters of their own (pipeline stages).

As in sharded.py each rank sends what it holds, rank 0 commits, and nothing gathers the whole model. What differs:

    join    the ranks tell each other what they hold. Ranks that hold the same are one section; of a box that several
            sections hold, one sends it. The server is told who holds what (`Join.tiling`), and hashes it likewise.
    fetch   a column of a matrix is in every part of a frame, so parts are no ranks' own. Each part comes over the slow
            network once, to one of the ranks that need some of it; these pass on to each other, over the job's own
            network, the bytes that each needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import torch
from torch import Tensor

from ...coordination.worker.exchange import Piece, Share
from ...core.codecs import FP32, Codec
from ...core.codecs.recipe import Recipe
from ...digest import data_hash, part_count
from ...errors import BadRequest, ExchangeFailed, ModelError
from ...tiling import ModelTiling, Place, make_tiling
from ...types import Agreement, Manifest, Offer, ParameterSpec, Tiling, Wishes
from ...wire.frames import Layout, tiled_layout
from ..encode import Excerpt
from ..forms import Form
from ..payload import OutgoingFrame
from ..protocol import Joined
from ..server.topology import ServerTopology
from ..update import AnchorProof, Kind, WholeAnchor
from .covering import NeededBytes
from .ranks import Ranks
from .sharded import Entered, Fetched, ShardedTopology, Shards
from .topology import GroupTopology

KEPT_LAYOUTS = 256
PASSED_ON_BYTES = 16 << 20  # of what a rank has fetched, that it passes on at a time: a part at least


class HeldModel(msgspec.Struct, frozen=True):
    """What one rank holds, and of which model: (begin, size) of each tensor that is here."""

    manifest: Manifest
    places: dict[str, Place]


class TiledTopology(ShardedTopology):
    """`places`: what this rank holds of each of its tensors."""

    def __init__(self, ranks: Ranks, inner: ServerTopology, places: Mapping[str, Place]) -> None:
        self.ranks = ranks
        self._inner = inner
        self._places = dict(places)
        self._speaker = GroupTopology(ranks, inner if ranks.rank == 0 else None)
        self._sections: list[int] = []  # of each rank
        self._layout_of = lru_cache(KEPT_LAYOUTS)(self._make_layout)
        self.holders: dict[str, int] = {}  # by tensor: how many ranks hold what we hold of it

    # --- joining --------------------------------------------------------------------------------------------------

    def join(self, manifest: Manifest | None, wishes: Wishes) -> Joined:
        assert manifest is not None
        told = self.ranks.gather(lambda: HeldModel(manifest, self._places), HeldModel)
        whole = self.ranks.check(lambda: merge([each.manifest for each in told]))
        each = [each.places for each in told]
        held = list(dict.fromkeys(map(_key, each)))
        self._sections = [held.index(_key(places)) for places in each]
        firsts = [each[self._sections.index(section)] for section in range(len(held))]
        shapes = {spec.name: spec.shape for spec in whole.parameters}
        tiling = make_tiling(shapes, firsts)
        self._tiling = self.ranks.check(lambda: check_tiling(tiling, whole.parameters))
        self.holders = {name: sum(places.get(name) == mine for places in each) for name, mine in self._places.items()}
        self._shards = Shards(len(held), self._sections[self.ranks.rank], frozenset(self._places))
        self._owners = [self._sections.index(section) for section in range(len(held))]
        sent = self._tiling.fragment(tuple(shapes)).sent[self._shards.section] if self._owns else ()
        self._inner.keep_owed({name: range(box.numel) for name, box in sent})
        self._inner.tiling = tiling
        entered = self.ranks.tell(lambda: self._enter(whole, wishes), Entered)
        if self.ranks.rank != 0:
            self._inner.follow(entered.join, entered.answer)
        answer = entered.answer
        self._specs = {spec.name: spec for spec in answer.manifest.parameters}  # a rank's may say less about a tensor
        return Joined(entered.join.worker_id, answer.plan, answer.manifest, self._inner.overtaken)

    def _enter(self, manifest: Manifest, wishes: Wishes) -> Entered:
        entered = super()._enter(manifest, wishes)
        if not self._inner.takes_tilings:
            self._inner.leave("the server is too old for this job's shape")
            raise ModelError(
                "the server is of release 0.2, which takes contributions that are whole or cut by rows (DDP, "
                "fully_shard over one mesh dimension); update the server, or give this job one of those shapes"
            )
        return entered

    # --- contributing ---------------------------------------------------------------------------------------------

    def _layout(self, form: Form, section: int) -> Layout:
        return self._layout_of(tuple(entry.name for entry in form.up.entries), form.up.header.codec, section)

    def _make_layout(self, names: tuple[str, ...], codec: str, section: int) -> Layout:
        recipe = Recipe.parse(codec)
        sizes = {name: recipe.codec(self._specs[name]).encoded_bytes for name in names}
        return tiled_layout(codec, sizes, self._tiling.fragment(names), section)

    def _unpack(self, fragment: int, packed: Mapping[str, Any]) -> tuple[Offer, OutgoingFrame]:
        offer, payload = super()._unpack(fragment, packed)
        return msgspec.structs.replace(offer, tiled=True), payload

    def _excerpts(self, form: Form) -> dict[str, Excerpt]:
        """`whole` makes the noise of each box its own: so many values of the tensor are in boxes before it."""
        found, section = dict[str, Excerpt](), self._shards.section
        for name, pattern in self._tiling.fragment([entry.name for entry in form.up.entries]).tensors:
            before = 0
            for box in pattern.boxes:
                if box.holders[0] == section:
                    found[name] = Excerpt(whole=before)
                before += torch.Size(box.size).numel()
        return found

    def _share(self, parts: range, *, speaks: bool) -> Share:
        return Share(self._shards.sections, parts, speaks, tiled=True)

    # --- taking over ----------------------------------------------------------------------------------------------

    def _fetch(self, agreement: Agreement) -> Fetched | None:
        """The parts that are ours to fetch."""
        layout, _ = self._frame(agreement)
        count = len(agreement.payloads)
        if agreement.size_bytes != count * layout.size_bytes or len(agreement.range_hashes) != self._shards.sections:
            raise ExchangeFailed(
                f"the server announces {agreement.size_bytes} bytes and {len(agreement.range_hashes)} hashes for "
                f"fragment {agreement.fragment}; it has {count * layout.size_bytes} and {self._shards.sections}"
            )
        ours = self._parts_of(agreement)[self.ranks.rank]
        pieces = tuple(Piece(i, part) for i in range(count) for part in ours)
        got = self._get(agreement, pieces) if pieces else None
        return None if pieces and got is None else Fetched(None, got)

    def _pass_on(self, agreement: Agreement, fetched: Fetched) -> Fetched:
        """Everybody gets the bytes that it needs, some parts at a time: what is on its way takes no memory to speak of
        beside what arrives."""
        layout, _ = self._frame(agreement)
        count, got = len(agreement.payloads), fetched.got
        parts, size = self._parts_of(agreement), self._inner.session.joined.plan.part_size_bytes
        needs = self._needs(agreement)
        mine = needs[self._sections[self.ranks.rank]]
        frames = [torch.frombuffer(got.frames[i], dtype=torch.uint8) for i in range(count)] if got is not None else []
        buffers = self.ranks.check(lambda: [torch.empty(mine.size_bytes, dtype=torch.uint8) for _ in range(count)])
        at_once = max(PASSED_ON_BYTES // (size * max(count, 1)), 1)
        for first in range(0, max(map(len, parts)), at_once):
            ranges = [_ranges(each[first : first + at_once], size, layout.size_bytes) for each in parts]
            self._swap(needs, ranges, [frame[first * size :] for frame in frames], buffers)
        proof = agreement.range_hashes[self._shards.section]
        if any(payload.kind == "full" for payload in agreement.payloads):
            values = {name: buffers[0][slice(*place)].view(torch.float32) for name, place in mine.places.items()}
            empty = torch.empty(0)
            shaped = {name: values.get(name, empty).view(self._places[name][1]) for name in self._names(layout)}
            return Fetched(WholeAnchor(shaped, proof), got)
        return Fetched(BoxChain(self._names(layout), buffers, mine, proof), got)

    def _swap(
        self,
        needs: Sequence[NeededBytes],
        ranges: Sequence[Sequence[tuple[int, int]]],
        frames: Sequence[Tensor],
        buffers: Sequence[Tensor],
    ) -> None:
        """Of each frame the bytes in `ranges`, by rank, from who has them to who needs them. `frames` begin with ours,
        one after the other; `buffers` get what we need."""
        mine = needs[self._sections[self.ranks.rank]]

        def outgoing(rank: int) -> Tensor:
            theirs, ours = needs[self._sections[rank]], ranges[self.ranks.rank]
            each = sum(theirs.before(end) - theirs.before(begin) for begin, end in ours)
            data, at = torch.empty(len(buffers) * each, dtype=torch.uint8), 0
            for frame in frames:
                place = 0
                for begin, end in ours:
                    at += theirs.collect(frame, begin - place, begin, end, data[at:])
                    place += end - begin
            return data

        sizes = [len(buffers) * sum(mine.before(end) - mine.before(begin) for begin, end in each) for each in ranges]
        made = self.ranks.check(lambda: [outgoing(rank) for rank in range(self.ranks.size)])
        arrived = self.ranks.swap(made, sizes)
        for data, each in zip(arrived, ranges, strict=True):
            at = 0
            for buffer in buffers:
                for begin, end in each:
                    first, last = mine.before(begin), mine.before(end)
                    buffer[first:last] = data[at : at + last - first]
                    at += last - first

    def _names(self, layout: Layout) -> tuple[str, ...]:
        """What is here of a fragment, in its order."""
        return tuple(entry.name for entry in layout.entries if entry.name in self._places)

    def _frame(self, agreement: Agreement) -> tuple[Layout, dict[str, Codec]]:
        form = self._inner.forms[agreement.fragment]
        if any(payload.kind == "full" for payload in agreement.payloads):
            return form.full, dict.fromkeys(form.codecs, FP32)
        return form.update, dict(form.codecs)

    def _needs(self, agreement: Agreement) -> list[NeededBytes]:
        """Of each section."""
        layout, codecs = self._frame(agreement)
        tiling = self._tiling.fragment([entry.name for entry in layout.entries])
        return [NeededBytes(held, layout, codecs) for held in tiling.held]

    def _parts_of(self, agreement: Agreement) -> list[list[int]]:
        """Per rank, the parts that it fetches, of each payload: of those that need some of a part, the one with the
        fewest so far. A part that nobody needs (a header) is left out."""
        layout, _ = self._frame(agreement)
        size = self._inner.session.joined.plan.part_size_bytes
        count = part_count(layout.size_bytes, size)
        touched = [needs.parts(count, size) for needs in self._needs(agreement)]
        found: list[list[int]] = [[] for _ in range(self.ranks.size)]
        for part in range(count):
            takers = [rank for rank, section in enumerate(self._sections) if touched[section][part]]
            if takers:
                min((found[rank] for rank in takers), key=len).append(part)
        return found


class BoxChain:
    """A chain of encoded differences, the oldest first, as `UpdateChain`; of what a rank holds in boxes."""

    frames: tuple[memoryview, ...] = ()

    def __init__(self, names: Sequence[str], payloads: Sequence[Tensor], needs: NeededBytes, expected: str) -> None:
        self.names = tuple(names)
        self.kinds: tuple[Kind, ...] = tuple("update" for _ in payloads)
        self._payloads, self._needs = payloads, needs
        self._proof = AnchorProof(expected)
        self._scratch: dict[str, Tensor] = {}

    @property
    def is_proven(self) -> bool:
        return self._proof.digest == self._proof.expected

    @property
    def digest(self) -> str:
        return self._proof.digest

    @torch.no_grad()
    def apply(self, name: str, start: int, stop: int, held: Tensor, *, in_place: bool = False) -> Tensor:
        theta, stop = held, min(stop, start + held.numel())
        if start < stop:
            room = held if in_place else self._room("theta", stop - start, held.device)
            first, last = self._needs.places[name]
            for payload in self._payloads:
                d = self._needs.of[name].decode(
                    payload[first:last], start, stop, self._room("d", stop - start, held.device)
                )
                theta = torch.add(theta, d, out=room)
        self._proof.feed(name, theta)
        return theta

    def _room(self, name: str, numel: int, device: torch.device) -> Tensor:
        kept = self._scratch.get(name)
        if kept is None or kept.numel() < numel or kept.device != device:
            kept = self._scratch[name] = torch.empty(numel, device=device)
        return kept[:numel]


class RankShape(msgspec.Struct, frozen=True):
    """How one rank holds its model: its tensors' names, and if they are cut by rows, into how many."""

    by_rows: bool
    sections: int
    names: str


def is_tiled(ranks: Ranks, shards: Shards) -> bool:
    """Is this job of a shape that neither "each rank holds all" nor "each rank holds some rows of all" describes?"""
    names = data_hash(["\n".join(sorted(shards.places)).encode()])
    told = ranks.gather(lambda: RankShape(shards.by_rows, shards.sections, names), RankShape)
    return any(not each.by_rows or each != told[0] for each in told)


def merge(manifests: Sequence[Manifest]) -> Manifest:
    """The model that these ranks hold together, in the order in which it is met."""
    parameters: dict[str, ParameterSpec] = {}
    where: dict[str, int] = {}
    for rank, manifest in enumerate(manifests):
        for spec in manifest.parameters:
            known = parameters.setdefault(spec.name, spec)
            first = where.setdefault(spec.name, rank)
            if (known.shape, known.dtype, known.role) != (spec.shape, spec.dtype, spec.role):
                raise ModelError(
                    f"ranks {first} and {rank} hold different models: {spec.name!r} is {list(known.shape)} "
                    f"({known.dtype}) on one, {list(spec.shape)} ({spec.dtype}) on the other. The stages of a pipeline "
                    "must name their parameters as the whole model does. Ranks that are workers of their own: "
                    "group='off'"
                )
    aliases = {name: of for manifest in manifests for name, of in manifest.aliases.items()}
    frozen = sorted({name for manifest in manifests for name in manifest.frozen})
    odd = next((name for name in frozen if name in parameters), None)
    if odd is not None:
        raise ModelError(f"{odd!r} is trained on rank {where[odd]} and frozen on another: do the same on all ranks")
    buffers = dict.fromkeys(name for manifest in manifests for name in manifest.buffers)
    return Manifest(
        parameters=tuple(parameters.values()), aliases=aliases, buffers=tuple(buffers), frozen=tuple(frozen)
    )


def check_tiling(tiling: Tiling, parameters: Sequence[ParameterSpec]) -> ModelTiling:
    try:
        return ModelTiling(tiling, parameters)
    except BadRequest as refusal:
        raise ModelError(
            f"the ranks of this job do not hold the model once: {refusal.message}. The processes of one worker must "
            "hold all of the model between them, cut along their device meshes"
        ) from refusal


def _key(places: Mapping[str, Place]) -> tuple[tuple[str, Place], ...]:
    return tuple(sorted(places.items()))


def _ranges(parts: Sequence[int], size: int, total: int) -> list[tuple[int, int]]:
    """[begin, end) in bytes of parts that follow each other."""
    found: list[tuple[int, int]] = []
    for part in parts:
        begin, end = part * size, min((part + 1) * size, total)
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return found
