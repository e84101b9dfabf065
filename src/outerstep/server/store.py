"""The global model of one fragment on the server: contributions in, the outer step, the next version out.

The values are flat fp32 memory in the order of the frame that is sent. They pass through the processor in blocks that
fit its cache: each block is decoded, added, divided, stepped, encoded and hashed while it is there. The threads of a
team share the blocks. A GPU works on larger blocks, one after the other (places.py), and makes the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..coordination.server.rounds import Aggregation
from ..core.aggregate import add_weighted, divide
from ..core.codecs.recipe import Recipe
from ..core.delayed import DelayedNesterov
from ..core.robust import Candidate, Rule, Screening, ScreenVerdict, Tensors, TensorSpan, Zeros, combine, make_rule
from ..core.state import FragmentState, FragmentStep, Outer, bytes_of
from ..core.watch import sum_of_squares
from ..digest import data_hash, tree_hash
from ..errors import ModelError
from ..threads import ThreadTeam, process_team
from ..tiling import Cutting, FragmentTiling
from ..types import ParameterSpec, Participant
from ..wire.frames import Layout, layout, most_bytes, row_pieces, tiled_layout
from .blocks import Block, cut, pieces_of
from .boxes import box_hashes
from .decoding import Decoder, Decoders, UpTensor
from .places import (
    DEVICE_BLOCK_VALUES,
    DeviceBlocks,
    DeviceFull,
    HostBlocks,
    Pass,
    Workplace,
    is_out_of_memory,
    pinned_memory,
)
from .publish import Downlink, NextVersion, Published

PIECE_COST_BYTES = 32 << 10  # in the time that it takes to begin one, so much is hashed
FEW_SECTIONS = 256  # allowed even if a fragment has fewer rows
SLACK_BYTES = 64 << 10  # by so much a frame may be too long and is still read, so that the refusal can name the tensor


@dataclass(frozen=True)
class Addend:
    """A checked contribution: its bytes, its weight, and the version it was computed from (None = the newest). `codec`:
    "" = the store's first codec. `used` is called with the number of bytes read (pool.py)."""

    payload: memoryview
    weight: float
    base: int | None = None
    sections: Cutting = 1
    codec: str = ""
    used: Callable[[int], None] | None = None


@dataclass(frozen=True)
class Uplink:
    """The form of contributions in one codec."""

    codec: str
    tensors: Sequence[UpTensor]

    @property
    def layout(self) -> Layout:
        return layout(self.codec, [(t.name, t.shape, t.codec.encoded_bytes(t.numel)) for t in self.tensors])

    def most_bytes(self, sections: Cutting) -> int:
        sizes = {t.name: t.codec.encoded_bytes for t in self.tensors}
        if not isinstance(sections, int):
            return sum(tiled_layout(self.codec, sizes, sections, i).size_bytes for i in range(sections.sections))
        return most_bytes(self.layout, [(t.name, t.shape, t.codec.encoded_bytes) for t in self.tensors], sections)


@dataclass
class _Sum:
    """Σ w·Δ of an open round, and Σ w. Until the first contribution is added the memory is undefined."""

    values: Tensor
    weight: float = 0.0


class Shelf:
    """Flat fp32 memory kept for reuse: the largest piece of each device."""

    def __init__(self) -> None:
        self._kept: dict[torch.device, Tensor] = {}

    def take(self, numel: int, place: Workplace | None = None) -> Tensor:
        """The values are undefined, but finite in the gaps between tensors, which nobody writes."""
        place = place or HostBlocks(process_team())
        kept = self._kept.pop(place.device, None)
        if kept is None or kept.numel() < numel:
            kept = place.memory(max(numel, 1))
        return kept[:numel]

    def give_back(self, memory: Tensor) -> None:
        whole = memory if memory._base is None else memory._base
        kept = self._kept.get(whole.device)
        if kept is None or kept.numel() < whole.numel():
            self._kept[whole.device] = whole

    def drop(self, device: torch.device) -> None:
        self._kept.pop(device, None)


def rule_of(settings: Aggregation) -> Rule:
    """The aggregation rule of a run; its own defaults hold where the settings say nothing."""
    return make_rule(
        settings.aggregation,
        trim_fraction=settings.trim_fraction,
        attackers=settings.attackers,
        clip_radius=settings.clip_radius,
        iterations=settings.aggregation_iterations,
        bucket_size=settings.bucket_size,
    )


class FragmentStore:
    """The state of one fragment (T, θ, momentum), how workers get it (publish.py), and the sums of its open rounds. One
    thread adds and closes."""

    def __init__(
        self,
        index: int,
        specs: Sequence[ParameterSpec],
        state: Mapping[str, Tensor],
        up: Recipe,
        down: Recipe,
        part_size_bytes: int,
        *,
        version: int = 0,
        max_staleness: int = 0,
        run_id: str = "",
        targets: Mapping[str, Tensor] | None = None,
        statistics: Mapping[int, Mapping[str, Tensor]] | None = None,
        shelf: Shelf | None = None,
        keeps_centre: bool = False,
        centre: Mapping[str, Tensor] | None = None,
        team: ThreadTeam | None = None,
        on_full: Callable[[str], None] = lambda why: None,
        decoders: Decoders | None = None,
    ) -> None:
        """`statistics`: averaged buffers of earlier versions (of any fragment), from an earlier `self.statistics`.
        `keeps_centre`: the run's rule begins each round where the last one ended, at `centre` (by name). `on_full` is
        called with the reason when the fragment has to leave its device. `decoders`: of the run."""
        self.index = index
        self._shelf, self._team, self._on_full = shelf or Shelf(), team or process_team(), on_full
        self._host = HostBlocks(self._team)
        self.place: Workplace = self._host  # where blocks are worked on
        self.down = Downlink(
            index,
            specs,
            state,
            down,
            part_size_bytes,
            version=version,
            run_id=run_id,
            targets=targets,
            centre=centre if keeps_centre and centre and {spec.name for spec in specs} <= centre.keys() else None,
        )
        self.state: FragmentState = self.down.state
        self.payloads, self.part = self.down.payloads, self.down.part  # how workers get it
        self.numel = (self.down.full.size_bytes - self.down.full.data_begin) // 4  # of the flat memory, gaps included
        self.specs, self._first_codec = specs, up.name
        # Never many: the coordinator says which codecs a contribution may have.
        self._uplinks, self._decoders = lru_cache(maxsize=8)(self._uplink), decoders or Decoders()
        self._own = object()  # of which store a decoder is
        self._row_sizes = lru_cache(maxsize=64)(self._max_payload_bytes)
        # Tilings are large: the weak keys let go of one when its worker is gone.
        self._tiled_sizes: WeakKeyDictionary[FragmentTiling, dict[str, int]] = WeakKeyDictionary()
        # Averaged buffers of each version that a late contribution may be based on.
        self.statistics: dict[int, dict[str, Tensor]] = {}
        for earlier, values in (statistics or {}).items():
            if ours := {name: values[name].clone() for name in self.state.averaged if name in values}:
                self.statistics[earlier] = ours
        self.max_staleness = max_staleness
        self._sums: dict[int, _Sum] = {}
        self._blocks = list(cut(self.down.full, self.place.block_values))
        if self.state.averaged:
            self._keep_statistics(version)
        self._keeps_centre = keeps_centre

    @property
    def centre(self) -> Mapping[str, Tensor]:
        """The last round's aggregate by name, for a rule that begins there; empty before the first round."""
        return self.state.centre

    @property
    def max_sections(self) -> int:
        """One per row; a small fragment may have more, which are empty."""
        return max([FEW_SECTIONS, *(spec.shape[0] for spec in self.specs if spec.shape)])

    def uplink(self, codec: str = "") -> Uplink:
        """The form of contributions in this codec; "" = the store's first codec."""
        return self._uplinks(codec or self._first_codec)

    def decoder(self, sections: Cutting, codec: str = "") -> Decoder:
        codec = codec or self._first_codec
        return self._decoders.find(
            (self._own, codec, sections), lambda: Decoder(codec, self.uplink(codec).tensors, sections)
        )

    def max_payload_bytes(self, sections: Cutting, codec: str = "") -> int:
        """The size limit of a contribution cut into these sections."""
        if isinstance(sections, int):
            return self._row_sizes(sections, codec)
        known = self._tiled_sizes.setdefault(sections, {})
        if codec not in known:
            known[codec] = self._max_payload_bytes(sections, codec)
        return known[codec]

    def _max_payload_bytes(self, sections: Cutting, codec: str) -> int:
        return self.uplink(codec).most_bytes(sections) + SLACK_BYTES

    def _uplink(self, codec: str) -> Uplink:
        recipe = Recipe.parse(codec)
        return Uplink(codec, [UpTensor(spec.name, spec.shape, recipe.codec(spec)) for spec in self.specs])

    @property
    def newest(self) -> Published:
        return self.down.newest

    def params(self) -> dict[str, Tensor]:
        """θ by name, as views. Only for the thread that closes rounds."""
        return self.down.params()

    def copy_params(self) -> dict[str, Tensor]:
        """A copy of θ by name, from any thread."""
        with self.down.reading() as published:
            return {name: theta.clone() for name, theta in self.down.params(published).items()}

    def targets_on_host(self) -> dict[str, Tensor]:
        """T by name, as views; as copies if T is on a device. Only for the thread that closes rounds."""
        return {name: target.cpu() for name, target in self.state.target.items()}

    def range_hashes(self, version: int, sections: Cutting, *, trees: bool = True) -> tuple[str, ...] | None:
        """The hash of each section's rows or boxes, made like the anchor's. None: the version is not held any more.
        `trees`: as trees, or the way protocol 1 does. (Two threads that ask at once both compute it.)"""
        with self.down.reading(version) as published:
            if published is None:
                return None
            known = published.section_hashes.get(sections, trees)
            if known is None:
                full = self.down.full
                data = published.frame.view[full.data_begin :]
                rule = tree_hash if trees else data_hash
                if isinstance(sections, int):
                    known = tuple(
                        rule(data[begin:end] for begin, end in row_pieces(full.entries, sections, r, 4))
                        for r in range(sections)
                    )
                else:
                    known = box_hashes(self.down.params(published), sections)
                published.section_hashes.put(sections, trees, known)
            return known

    def hashing_bytes(self, version: int, sections: Cutting, *, trees: bool = True) -> int:
        """What it costs to say the range hashes of this version: as many bytes of values, and as if each place at which
        reading begins were some more. 0 = they are known, or the version is not held."""
        published = self.down.newest
        if published.version != version or published.section_hashes.get(sections, trees) is not None:
            return 0
        pieces = sections * len(self.specs) if isinstance(sections, int) else sections.box_count
        return 4 * self.numel + PIECE_COST_BYTES * pieces

    # --- a contribution -------------------------------------------------------------------------------------------

    def accumulate(self, version: int, addends: Sequence[Addend]) -> None:
        """Add w·Δ of each contribution, in the given order, to the sum of the round that makes `version`."""
        counted = [addend for addend in addends if addend.weight > 0.0]
        if not counted:
            return  # they took part without training
        total = self._sums.get(version)
        if total is None:
            total = self._sums[version] = _Sum(self._take())
        gather, open_sum = _Gather(self, version, counted, total.weight), total

        def prepare() -> Pass:
            values = open_sum.values
            return Pass(
                lambda block, scratch: gather.add(block, values[block.place : block.end], scratch),
                touched=lambda block: [values[block.place : block.end]],
            )

        self._go(prepare)
        total.weight = gather.weight

    def rebase(self, values: Tensor, block: Block | TensorSpan, base: int, targets: Mapping[str, Tensor]) -> None:
        """Turn Δ of an averaged buffer into a difference from the current T, in place: T − l = (T − θ_base) + Δ. A
        buffer is a mean of values, not a sum of steps: the mean of two variances is a variance, but a new variance less
        an old difference need not be one."""
        held = self.statistics.get(base)
        if held is None:
            values.zero_()  # older than any version that is kept: ignore it
            return
        now, then = (tensors[block.name].view(-1)[block.start : block.stop] for tensors in (targets, held))
        values.add_(now).sub_(then.to(values.device))

    def combine(
        self,
        version: int,
        settings: Aggregation,
        contributions: Mapping[str, Addend | None],
        seed: str,
    ) -> ScreenVerdict:
        """The aggregate of these, by a rule that needs all of them at once, in place of the round's mean: `close`
        steps along it. Contributions are read where they are, in memory or in the spool file. Keyed by worker; None: it
        was offered and refused, because it was not finite or the norm screen found it too large. `seed`: of the
        buckets."""
        offered = {worker_id: addend for worker_id, addend in contributions.items() if addend is not None}
        while True:
            values = self._take()
            try:
                with self.place.chosen():
                    verdict = self._combine(version, settings, contributions, offered, values, seed)
                self.place.wait()
                break
            except RuntimeError as error:
                if self.place.is_host or not is_out_of_memory(error):
                    raise
                del values
                self._leave_device(str(error))
        self._set_mean(version, values)
        return verdict

    def _combine(
        self,
        version: int,
        settings: Aggregation,
        contributions: Mapping[str, Addend | None],
        offered: Mapping[str, Addend],
        values: Tensor,
        seed: str,
    ) -> ScreenVerdict:
        weight = next(iter(offered.values())).weight
        sizes = {entry.name: math.prod(entry.shape) for entry in self.down.full.entries}
        return combine(
            [
                *(
                    Candidate[TensorSpan](w, _AddendReader(self, addend, version), addend.weight)
                    for w, addend in offered.items()
                ),
                *(
                    Candidate[TensorSpan](w, Zeros(), weight, refused="before")
                    for w in contributions.keys() - offered.keys()
                ),
            ],
            {name: sizes[name] for name in sorted(sizes)},  # the order in which every aggregator takes them
            Tensors(self.down.by_name(values)),
            rule_of(settings),
            seed=seed,
            screening=Screening(cosine=settings.cosine_screen, arrived=True),
            centre=Tensors(self.centre) if self.centre else None,
            device=self.place.device,
            share=self.place.share,
        )

    def _set_mean(self, version: int, values: Tensor) -> None:
        """Set what the round that makes `version` steps along."""
        if self._keeps_centre:
            self.state.remember(self.down.by_name(values))
        self._sums[version] = _Sum(values, weight=1.0)  # dividing by 1 changes no bit

    # --- the outer step -------------------------------------------------------------------------------------------

    def close(
        self,
        version: int,
        outer: Outer,
        addends: Sequence[Addend] = (),
        now: float = 0.0,
        *,
        keep_mean: bool = False,
    ) -> NextVersion:
        """Take the outer step along the round's mean: of what was accumulated, and of `addends`, which were not. The
        result is still to be published. `outer`: the rule with its momentum. `keep_mean`: keep the mean until then, for
        the journal record that replays the round."""
        self.state.outer = outer
        if not self.place.is_host and not self.state.steps_alike:
            self._leave_device("the outer optimizer has other bits there than on the host")
        counted = [addend for addend in addends if addend.weight > 0.0]
        with torch.no_grad(), self.down.moving(version, now) as made:
            if isinstance(outer, DelayedNesterov):
                self._close_pushed(made, outer.buffer_size, counted)
            else:
                self._close_mean(made, counted, keep_mean=keep_mean)
            made.hash_parts(self._team)
        return made

    def move_to(self, version: int, values: Mapping[str, Tensor], now: float = 0.0) -> NextVersion:
        """Make a version without contributions: an agreement from a layer above says where T is. It is published
        without participants. θ follows as far as the codec can; the rest is in the next update."""
        with torch.no_grad(), self.down.moving(version, now) as made:
            made.from_above = True
            self.state.move_to(values, self.down.by_name(made.target))
            self._follow(made)
            made.hash_parts(self._team)
        return made

    def recall_move(self, version: int, target: memoryview) -> NextVersion:
        """Move T where a layer above had moved it; `target` is from the journal record."""
        return self.move_to(version, self.down.by_name(self._recalled(target)))

    def recall_mean(self, version: int, mean: memoryview) -> None:
        """Set what a closed round stepped along, for `close` to step again; `mean` is from the journal record."""
        self._set_mean(version, self._recalled(mean))

    def _recalled(self, data: memoryview) -> Tensor:
        """Flat fp32 values of the whole fragment, from a journal record."""
        values = self._shelf.take(self.numel, self._host)
        if len(data) != 4 * self.numel:
            raise ModelError(f"a record of fragment {self.index} must have {4 * self.numel} bytes, got {len(data)}")
        bytes_of(values)[:] = data
        return values

    def publish(self, made: NextVersion, participants: tuple[Participant, ...], now: float = 0.0) -> Published:
        published = self.down.publish(made, participants, now)
        if self.state.averaged:
            self._keep_statistics(made.version)
        if made.mean is not None:
            self._shelf.give_back(made.mean)
            made.mean = None
        return published

    def _close_mean(self, made: NextVersion, addends: Sequence[Addend], *, keep_mean: bool) -> None:
        """T ← the outer step from T along the mean."""
        total, by_blocks = self._sums.get(made.version), self.state.steps_by_blocks
        gather = _Gather(self, made.version, addends, total.weight if total is not None else 0.0)
        if total is None and gather.weight and (keep_mean or not by_blocks):
            total = self._sums[made.version] = _Sum(self._take(made))
        if gather.weight == 0.0:  # nobody has trained: only send what the codec had left out
            self._follow(made)
        elif by_blocks:
            self._step_by_blocks(made, gather, total, keep_mean=keep_mean)
        else:
            assert total is not None
            self._step_whole(made, gather, total.values, keep_mean=keep_mean)
        self._sums.pop(made.version, None)
        if total is None:
            return
        if keep_mean:
            made.mean = self._on_host(total.values)
        else:
            self._shelf.give_back(total.values)

    def _step_by_blocks(self, made: NextVersion, gather: _Gather, total: _Sum | None, *, keep_mean: bool) -> None:
        """Do everything that happens to a block while it is in the cache. The step overwrites its input, so a mean that
        is to be kept is copied for it. `total`: the sum so far, or None. What is added to it is gathered in scratch
        memory, as a replay does, because the last digit of Σ g² depends on the alignment of memory."""

        def prepare() -> Pass:
            step = self.state.step(self.down.by_name(made.target))
            mean = total.values if total is not None else None

            def move(block: Block, room: Tensor) -> float | Tensor:
                scratch, spare = room[0, : block.count], room[1]
                g = scratch
                if mean is not None:
                    before = mean[block.place : block.end]
                    g = before if keep_mean else scratch.copy_(before)
                squares = gather.mean(block, g, spare)
                target = made.target[block.place : block.end]
                step.block(block.name, target, scratch.copy_(g) if keep_mean else g, block.start)
                made.move(block, spare)
                return squares

            def touched(block: Block) -> list[Tensor]:
                kept = [mean[block.place : block.end]] if mean is not None and keep_mean else []
                return [*kept, *made.touched(block), *step.remembered(block.name, block.start, block.count)]

            return Pass(move, lambda _, squares: made.add_squares(squares), touched, rows=2)

        self._go(prepare, made)

    def _step_whole(self, made: NextVersion, gather: _Gather, mean: Tensor, *, keep_mean: bool) -> None:
        """Step with an optimizer that only takes whole tensors, and may change its gradients."""
        self._go(
            lambda: Pass(
                lambda block, scratch: gather.mean(block, mean[block.place : block.end], scratch),
                lambda _, squares: made.add_squares(squares),
            )
        )
        self.state.step_whole(self.down.by_name(mean.clone() if keep_mean else mean), self.down.by_name(made.target))
        self._follow(made)

    def _close_pushed(self, made: NextVersion, buffer_size: int, pushes: Sequence[Addend]) -> None:
        """Move T by one contribution after another, as the rule says; θ follows after the last."""
        made.pushes = [push.weight for push in pushes]
        for number, addend in enumerate(pushes, 1):
            self._push(made, addend, buffer_size, follows=number == len(pushes))
        if not pushes:
            self._follow(made)

    def _push(self, made: NextVersion, addend: Addend, buffer_size: int, *, follows: bool) -> None:
        """Move T by one contribution; `follows`: and θ after it."""
        steps, reader = list[FragmentStep](), _AddendReader(self, addend)

        def prepare() -> Pass:
            targets = self.down.by_name(made.target)
            steps.append(step := self.state.step(targets))

            def move(block: Block, room: Tensor) -> None:
                g = room[: block.count]
                reader.read(block, g)
                scale = addend.weight
                if (
                    self.state.roles[block.name] == "average"
                ):  # T + (l − T)/N: between the two, whatever others contributed
                    self.rebase(g, block, made.version - 1 if addend.base is None else addend.base, targets)
                    scale = min(addend.weight, 1.0) / buffer_size
                step.block(block.name, made.target[block.place : block.end], g.mul_(scale), block.start)
                if follows:
                    made.move(block, room)

            def touched(block: Block) -> list[Tensor]:
                return [*made.touched(block), *step.remembered(block.name, block.start, block.count)]

            return Pass(move, touched=touched)

        self._go(prepare, made)
        steps[-1].done()

    def _follow(self, made: NextVersion) -> None:
        """Bring θ to T, as far as the codec can."""
        self._go(lambda: Pass(made.move, touched=made.touched), made)

    # --- on a device, and back --------------------------------------------------------------------------------------

    @torch.no_grad()
    def to_device(self, device: torch.device, block_values: int = DEVICE_BLOCK_VALUES) -> None:
        """Move to the device, between two rounds. If there is no room: stay, and raise torch.OutOfMemoryError."""
        try:
            place, centre = DeviceBlocks(device, block_values), self.state.centre
            self.down.to_device(device)
            if centre:
                self.state.centre = {name: values.to(device) for name, values in centre.items()}
            for total in self._sums.values():
                total.values = total.values.to(device)
        except torch.OutOfMemoryError:
            self._bring_back()
            raise
        if device.type == "cuda":
            self._host.lend_memory = pinned_memory
        self.place, self._blocks = place, list(cut(self.down.full, block_values))

    @torch.no_grad()
    def to_host(self, made: NextVersion | None = None) -> None:
        """Move back, between two rounds or in the middle of `made`. (The momentum follows with the next step.)"""
        if not self.place.is_host:
            device, self.place = self.place.device, self._host
            self._bring_back(made)
            self._shelf.drop(device)
            self._blocks = list(cut(self.down.full, self.place.block_values))

    def _bring_back(self, made: NextVersion | None = None) -> None:
        if self.down.on_device is not None:
            self.down.to_host(made)
        self.state.centre = {name: values.cpu() for name, values in self.state.centre.items()}
        for total in self._sums.values():
            total.values = self._on_host(total.values)

    def _leave_device(self, why: str, made: NextVersion | None = None) -> None:
        self.to_host(made)
        self._on_full(why)

    def device_bytes(self, remembered: int) -> int:
        """The memory needed on a device. `remembered`: how many values per parameter the outer rule keeps."""
        flats = 2 + remembered + (not self.down.is_exact) + self._keeps_centre  # θ and a sum; momentum, T, the centre
        return 4 * self.numel * flats

    @torch.no_grad()
    def _go(self, prepare: Callable[[], Pass], made: NextVersion | None = None) -> None:
        """Pass over all blocks. If the device runs out of memory, the host does the rest."""
        try:
            self.place.go(self._blocks, prepare)
        except DeviceFull as full:
            left = self._blocks[full.done :]
            self._leave_device(str(full), made)
            size = self.place.block_values
            self.place.go([piece for block in left for piece in pieces_of(block, size)], prepare)

    def _take(self, made: NextVersion | None = None) -> Tensor:
        """Flat memory on the device where the blocks are worked on."""
        try:
            return self._shelf.take(self.numel, self.place)
        except torch.OutOfMemoryError as error:
            self._leave_device(str(error), made)
            return self._shelf.take(self.numel, self.place)

    def _on_host(self, values: Tensor) -> Tensor:
        if values.device.type == "cpu" and self.down.on_device is None:
            return values
        here = self._shelf.take(self.numel, self._host).copy_(values)
        self._shelf.give_back(values)
        return here

    def _keep_statistics(self, version: int) -> None:
        theta = self.state.theta
        self.statistics[version] = {n: theta[n].to("cpu", copy=True) for n in self.state.averaged}
        for old in [v for v in self.statistics if v < version - self.max_staleness - 1]:
            del self.statistics[old]


class _AddendReader:
    """The values of one contribution, block by block. `version`: the one that is made from it; if the contribution is
    based on an earlier one than the version before, its averaged buffers are rebased (`FragmentStore.rebase`)."""

    def __init__(self, store: FragmentStore, addend: Addend, version: int | None = None) -> None:
        self._store, self._decoder = store, store.decoder(addend.sections, addend.codec)
        self._data = torch.frombuffer(addend.payload, dtype=torch.uint8)
        is_late = version is not None and addend.base is not None and addend.base < version - 1
        self._late_base = addend.base if is_late else None
        self._used, self._bytes_per_value = addend.used, len(addend.payload) / max(store.numel, 1)

    def read(self, block: Block | TensorSpan, out: Tensor) -> None:
        place = self._store.place
        bring = None if place.is_host else place.bring
        self._decoder.read(self._data, block.name, block.start, block.stop, out, bring)
        if self._used is not None:
            self._used(int(self._bytes_per_value * (block.stop - block.start)))
        if self._late_base is not None and self._store.state.roles[block.name] == "average":
            self._store.rebase(out, block, self._late_base, self._store.state.target)


class _Gather:
    """Contributions to the round that makes `version`, added to a sum of weight `onto` (0 = none). `weight` is Σ w
    including theirs. It is added up one by one, so that its bits do not depend on which were added together."""

    def __init__(self, store: FragmentStore, version: int, addends: Sequence[Addend], onto: float) -> None:
        self._weighted = [(_AddendReader(store, addend, version), addend.weight) for addend in addends]
        self._onto, self.weight = onto > 0.0, onto
        for addend in addends:
            self.weight += addend.weight

    def add(self, block: Block, out: Tensor, scratch: Tensor) -> None:
        """out (+)= Σ w·Δ of this block; `scratch` has room for one."""
        for i, (reader, weight) in enumerate(self._weighted):
            first = i == 0 and not self._onto
            values = out if first else scratch[: block.count]
            reader.read(block, values)
            if not first:
                add_weighted(out, values, weight)
            elif weight != 1.0:
                values.mul_(weight)

    def mean(self, block: Block, out: Tensor, scratch: Tensor) -> float | Tensor:
        """The mean: the sum divided by Σ w. Returns Σ g² for the metrics; its last digit may differ between devices."""
        self.add(block, out, scratch)
        divide(out, self.weight)
        if out.device.type == "cpu":
            return sum_of_squares(out)
        norm: Tensor = torch.linalg.vector_norm(out, dtype=torch.float64)
        return norm.square()
