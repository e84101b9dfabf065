"""The global model of one fragment: contributions in, the outer step, the next version out.

Everything is flat fp32 memory in the order of the frame that is sent, and goes through the processor in blocks that fit
its cache: decoded, added, divided, stepped, encoded and hashed while it is there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..coordination.server.aggregation import Aggregation
from ..core.aggregate import add_weighted, divide
from ..core.codecs.recipe import Recipe
from ..core.delayed import DelayedNesterov, Push
from ..core.outer import Nesterov, NesterovStep, OuterOptimizer
from ..core.robust import ScreenVerdict
from ..core.watch import sum_of_squares
from ..digest import data_hash
from ..errors import ModelError
from ..types import GetPart, ParameterSpec, Participant, Payload
from ..wire.frames import layout, most_bytes, row_pieces
from .blocks import BLOCK_VALUES, Block, cut, hand_in_hand
from .combining import Contribution, combine
from .decoding import Decoder, UpTensor
from .downlink import Downlink
from .motion import Motion
from .pool import Shelf, bytes_of
from .published import Published

GROUP_SIZES = 8  # kept range hashes per version: nobody can make us remember them for every number of sections
FEW_SECTIONS = 256  # however few rows a fragment has
SLACK_BYTES = 64 << 10  # a frame that is a little too long is read, so that the refusal can name the tensor


@dataclass(frozen=True)
class Addend:
    """A checked contribution: its bytes, how much it counts, the version it was computed from (None = the newest)."""

    payload: memoryview
    weight: float
    base: int | None = None
    sections: int = 1


@dataclass
class _Sum:
    """Σ w·Δ of an open round, and Σ w. Its memory holds nothing before the first contribution is in."""

    values: Tensor
    weight: float = 0.0


class FragmentStore:
    """T and θ of one fragment (downlink.py) and the sums of its open rounds. One thread adds and closes."""

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
    ) -> None:
        """`statistics`: averaged buffers of earlier versions (of any fragment), as `self.statistics` had them.
        `keeps_centre`: the run's rule begins each round where the last ended; `centre`, by name, is that place."""
        self.index = index
        self._shelf = shelf or Shelf()
        self.down = Downlink(
            index, specs, state, down, part_size_bytes, version=version, run_id=run_id, targets=targets
        )
        tensors = [UpTensor(spec.name, spec.shape, up.codec(spec)) for spec in specs]
        self._tensors = [(tensor.name, tensor.shape, tensor.codec.encoded_bytes) for tensor in tensors]
        self.up = layout(up.name, [(name, shape, size(math.prod(shape))) for name, shape, size in self._tensors])
        self.decoder = lru_cache(maxsize=4)(lambda sections: Decoder(up.name, tensors, sections))
        self.max_payload_bytes = lru_cache(maxsize=64)(self._most_bytes)
        self._roles = {spec.name: spec.role for spec in specs}
        self._averaged = [name for name, role in self._roles.items() if role == "average"]
        self.statistics: dict[int, dict[str, Tensor]] = {}  # averaged buffers, of as many versions as may be stale
        for earlier, values in (statistics or {}).items():
            if ours := {name: values[name].clone() for name in self._averaged if name in values}:
                self.statistics[earlier] = ours
        self.max_staleness = max_staleness
        self._sums: dict[int, _Sum] = {}
        self._blocks = list(cut(self.down.full))
        self._keep_statistics(version)
        self._keeps_centre = keeps_centre
        self._centre: Tensor | None = None  # the last aggregate, flat
        if keeps_centre and centre and self._roles.keys() <= centre.keys():  # not before this fragment's first round
            self._centre = torch.zeros(self.numel)
            for name, place in self._by_name(self._centre).items():
                place.copy_(centre[name])

    @property
    def centre(self) -> dict[str, Tensor]:
        """The last round's aggregate by name, for a rule that begins there; nothing before the first."""
        return {} if self._centre is None else self._by_name(self._centre)

    @property
    def numel(self) -> int:
        """Of the flat memory, gaps included."""
        return (self.down.full.size_bytes - self.down.full.data_begin) // 4

    def _most_bytes(self, sections: int) -> int:
        """Of a contribution that comes in so many sections."""
        return most_bytes(self.up, self._tensors, sections) + SLACK_BYTES

    @property
    def max_sections(self) -> int:
        """As many as there are rows; a few more may be empty."""
        return max([FEW_SECTIONS, *(shape[0] for _, shape, _ in self._tensors if shape)])

    @property
    def newest(self) -> Published:
        return self.down.newest

    def params(self) -> dict[str, Tensor]:
        """θ by name: views, for the thread that closes rounds."""
        return self.down.params()

    def copy_params(self) -> dict[str, Tensor]:
        """A copy of θ by name, from any thread."""
        with self.down.reading() as published:
            return {name: theta.clone() for name, theta in self.down.params(published).items()}

    def payloads(
        self, version: int, worker_id: str, held: int, held_hash: str | None, now: float
    ) -> tuple[Payload, ...] | None:
        return self.down.payloads(version, worker_id, held, held_hash, now)

    def part(self, request: GetPart, now: float) -> tuple[str, memoryview]:
        return self.down.part(request, now)

    def range_hashes(self, version: int, sections: int) -> tuple[str, ...] | None:
        """Per section the hash of its rows, by the rule of the anchor's; None if the version is not held any more. Two
        who ask at once compute the same."""
        with self.down.reading(version) as published:
            if published is None:
                return None
            known = published.range_hashes.get(sections)
            if known is None:
                full = self.down.full
                data = published.frame.view[full.data_begin :]
                known = tuple(
                    data_hash(data[begin:end] for begin, end in row_pieces(full.entries, sections, r, 4))
                    for r in range(sections)
                )
                if len(published.range_hashes) < GROUP_SIZES:
                    published.range_hashes[sections] = known
            return known

    # --- a contribution -------------------------------------------------------------------------------------------

    def check(self, payload: memoryview, sections: int = 1) -> float:
        """Refuse a payload with the wrong tensors or with NaN or Inf, naming them. Returns ‖Δ‖."""
        return self.decoder(sections).check(payload)

    def accumulate(self, version: int, addends: Sequence[Addend]) -> None:
        """Add w·Δ of each to the sum of the round that makes `version`, in their order."""
        counted = [addend for addend in addends if addend.weight > 0.0]
        if not counted:
            return  # they were there, and brought nothing
        total = self._sums.get(version)
        if total is None:
            total = self._sums[version] = _Sum(self._shelf.take(self.numel))
        readers, scratch = self._readers(counted), torch.empty(BLOCK_VALUES)
        for block in self._blocks:
            out = total.values[block.place : block.end]
            self._gather(block, out, readers, version, scratch, onto=total.weight > 0.0)
        total.weight = _with(total.weight, counted)

    def _readers(self, addends: Sequence[Addend]) -> list[_Reader]:
        return [_Reader(self.decoder(addend.sections), addend) for addend in addends]

    def _gather(
        self, block: Block, out: Tensor, readers: Sequence[_Reader], version: int, scratch: Tensor, *, onto: bool
    ) -> None:
        """out (+)= Σ w·Δ of this block; `scratch` has room for one."""
        for i, reader in enumerate(readers):
            first = i == 0 and not onto
            values = out if first else scratch[: block.count]
            reader.read(block, values)
            addend = reader.addend
            self._rebase_if_late(values, block, addend, version)
            if not first:
                add_weighted(out, values, addend.weight)
            elif addend.weight != 1.0:
                values.mul_(addend.weight)

    def _rebase_if_late(self, values: Tensor, block: Block, addend: Addend, version: int) -> None:
        if addend.base is not None and addend.base < version - 1 and self._roles[block.name] == "average":
            self._rebase(values, block, addend.base, self.down.target)

    def _rebase(self, values: Tensor, block: Block, base: int, target: Tensor) -> None:
        """Δ of a buffer against T as it is now, in place: T − l = (T − θ_base) + Δ. Buffers are means of values and not
        sums of steps: a mean of two variances is one, but an old difference taken off a new one need not be."""
        held = self.statistics.get(base)
        if held is None:
            values.zero_()  # older than anything we know: it says nothing
            return
        values.add_(target[block.place : block.end]).sub_(held[block.name].view(-1)[block.start : block.stop])

    def combine(
        self,
        version: int,
        settings: Aggregation,
        contributions: Mapping[str, Addend | None],
        seed: str,
    ) -> ScreenVerdict:
        """The aggregate of these, by a rule that needs all of them, in the place of the round's mean: `close` steps
        along it. By worker; None = it was offered, and refused by a screen."""
        values = self._shelf.take(self.numel)
        verdict = combine(
            settings,
            [
                Contribution(worker_id, addend.weight, self._rebased(addend, version))
                for worker_id, addend in contributions.items()
                if addend is not None
            ],
            [worker_id for worker_id, addend in contributions.items() if addend is None],
            self.down.full,
            values,
            self._centre,
            seed,
        )
        self._set_mean(version, values)
        return verdict

    def _rebased(self, addend: Addend, version: int) -> Callable[[Block, Tensor], None]:
        decoder, data = self.decoder(addend.sections), torch.frombuffer(addend.payload, dtype=torch.uint8)

        def read(block: Block, out: Tensor) -> None:
            decoder.read(data, block.name, block.start, block.stop, out)
            self._rebase_if_late(out, block, addend, version)

        return read

    def _set_mean(self, version: int, values: Tensor) -> None:
        """What the round that makes `version` steps along, whole."""
        if self._keeps_centre:
            self._centre = values.clone() if self._centre is None else self._centre.copy_(values)
        self._sums[version] = _Sum(values, weight=1.0)  # to divide by one changes no bit

    # --- the outer step -------------------------------------------------------------------------------------------

    def close(
        self,
        version: int,
        optimizer: OuterOptimizer | DelayedNesterov,
        addends: Sequence[Addend] = (),
        now: float = 0.0,
        *,
        keep_mean: bool = False,
    ) -> Motion:
        """The step from the round's mean, what was accumulated and then `addends`, which were not; to be published.
        `keep_mean`: the motion holds it until then, for whoever writes down what replays the round."""
        counted = [addend for addend in addends if addend.weight > 0.0]
        with torch.no_grad(), self.down.moving(version, now) as motion:
            if isinstance(optimizer, DelayedNesterov):
                self._close_pushed(motion, optimizer, counted)
            else:
                self._close_mean(motion, optimizer, counted, keep_mean=keep_mean)
        return motion

    def recall_mean(self, version: int, mean: memoryview) -> None:
        """What a closed round stepped along, as its motion had it: `close` that round once more."""
        values = self._shelf.take(self.numel)
        if len(mean) != 4 * self.numel:
            raise ModelError(f"the mean of fragment {self.index} must have {4 * self.numel} bytes, got {len(mean)}")
        bytes_of(values)[:] = mean
        self._set_mean(version, values)

    def publish(self, made: Motion, participants: tuple[Participant, ...], now: float = 0.0) -> Published:
        published = self.down.publish(made, participants, now)
        self._keep_statistics(made.version)
        if made.mean is not None:
            self._shelf.give_back(made.mean)
            made.mean = None
        return published

    def _close_mean(
        self, motion: Motion, optimizer: OuterOptimizer, addends: Sequence[Addend], *, keep_mean: bool
    ) -> None:
        """T ← the optimizer's step from T along the mean."""
        total = self._sums.pop(motion.version, None)
        weight = _with(total.weight if total is not None else 0.0, addends)
        by_blocks = isinstance(optimizer, Nesterov)
        mean = total.values if total is not None else None
        if mean is None and weight and (keep_mean or not by_blocks):
            mean = self._shelf.take(self.numel)
        gather = _Gather(self._readers(addends), weight, onto=total is not None)
        if weight == 0.0:  # everybody was there, nobody had trained: what the codec left out can go now
            self._follow(motion)
        elif isinstance(optimizer, Nesterov):
            self._step_by_blocks(motion, optimizer.begin(), gather, mean, keep_mean=keep_mean)
        else:
            assert mean is not None
            self._step_whole(motion, optimizer, gather, mean, keep_mean=keep_mean)
        if keep_mean:
            motion.mean = mean
        elif mean is not None:
            self._shelf.give_back(mean)

    def _step_by_blocks(
        self, motion: Motion, step: NesterovStep, gather: _Gather, mean: Tensor | None, *, keep_mean: bool
    ) -> None:
        """Everything that happens to a block, while it is in the cache. The step overwrites what it is given: a mean
        that is to be kept it gets as a copy."""
        targets = self._by_name(motion.target)
        step.open({name: targets[name] for name, role in self._roles.items() if role == "parameter"})

        def move(block: Block, room: Tensor) -> float:
            scratch, spare = room[0, : block.count], room[1]
            g = mean[block.place : block.end] if mean is not None else scratch
            self._gather(block, g, gather.readers, motion.version, spare, onto=gather.onto)
            divide(g, gather.weight)
            squares = sum_of_squares(g)
            role = self._roles[block.name]
            if role == "parameter":
                step.block(block.name, targets[block.name], scratch.copy_(g) if keep_mean else g, block.start)
            elif role == "average":  # a buffer is not optimized: the mean of the workers' values replaces it
                motion.target[block.place : block.end].sub_(g)
            motion.move(block, spare)
            return squares

        def seal(block: Block, squares: float) -> None:
            motion.along(squares)
            motion.seal(block)

        hand_in_hand(self._blocks, lambda: torch.empty(2, BLOCK_VALUES), move, seal)

    def _step_whole(
        self, motion: Motion, optimizer: OuterOptimizer, gather: _Gather, mean: Tensor, *, keep_mean: bool
    ) -> None:
        """With an optimizer of which we only know that it steps whole tensors. It may change its gradients."""
        scratch = torch.empty(BLOCK_VALUES)
        for block in self._blocks:
            g = mean[block.place : block.end]
            self._gather(block, g, gather.readers, motion.version, scratch, onto=gather.onto)
            divide(g, gather.weight)
            motion.along(sum_of_squares(g))
        params, grads = self._by_name(motion.target), self._by_name(mean.clone() if keep_mean else mean)
        trained = [name for name, role in self._roles.items() if role == "parameter"]
        optimizer.step({name: params[name] for name in trained}, {name: grads[name] for name in trained})
        for name in self._averaged:
            params[name].sub_(grads[name])
        self._follow(motion)

    def _close_pushed(self, motion: Motion, rule: DelayedNesterov, pushes: Sequence[Addend]) -> None:
        """T ← T moved by each contribution as the rule says, one by one; θ follows the last."""
        targets, scratch = self._by_name(motion.target), torch.empty(BLOCK_VALUES)
        motion.pushes = [push.weight for push in pushes]
        for number, reader in enumerate(self._readers(pushes), 1):
            push = rule.begin(self.index)
            for block in self._blocks:
                values = scratch[: block.count]
                reader.read(block, values)
                self._push(push, rule, motion, block, values, reader.addend, targets)
                if number == len(pushes):
                    motion.follow(block)
            push.done()
        if not pushes:
            self._follow(motion)

    def _push(
        self,
        push: Push,
        rule: DelayedNesterov,
        motion: Motion,
        block: Block,
        values: Tensor,
        addend: Addend,
        targets: Mapping[str, Tensor],
    ) -> None:
        role = self._roles[block.name]
        if role == "parameter":
            push.block(block.name, targets[block.name], values.mul_(addend.weight), block.start)
        elif role == "average":  # T + (l − T)/N: between the two, whatever the others did meanwhile
            base = motion.version - 1 if addend.base is None else addend.base
            self._rebase(values, block, base, motion.target)
            values.mul_(min(addend.weight, 1.0) / rule.buffer_size)
            motion.target[block.place : block.end].sub_(values)

    def _follow(self, motion: Motion) -> None:
        for block in self._blocks:
            motion.follow(block)

    def _by_name(self, flat: Tensor) -> dict[str, Tensor]:
        return {e.name: flat[e.begin // 4 : e.end // 4].view(e.shape) for e in self.down.full.entries}

    def _keep_statistics(self, version: int) -> None:
        if self._averaged:
            params = self.params()
            self.statistics[version] = {name: params[name].clone() for name in self._averaged}
            for old in [v for v in self.statistics if v < version - self.max_staleness - 1]:
                del self.statistics[old]


class _Reader:
    """The values of one contribution, block by block."""

    def __init__(self, decoder: Decoder, addend: Addend) -> None:
        self.addend = addend
        self._decoder = decoder
        self._data = torch.frombuffer(addend.payload, dtype=torch.uint8)

    def read(self, block: Block, out: Tensor) -> None:
        self._decoder.read(self._data, block.name, block.start, block.stop, out)


@dataclass(frozen=True)
class _Gather:
    """What makes a round's mean: contributions that were not added yet, Σ w with theirs, and whether it is `onto` a sum
    of others."""

    readers: Sequence[_Reader]
    weight: float
    onto: bool


def _with(weight: float, addends: Sequence[Addend]) -> float:
    """Σ w, one after the other: its bits must not depend on who was added together with whom."""
    for addend in addends:
        weight += addend.weight
    return weight
