"""Boxes: what the ranks of a job hold of a model, whatever its shape.

A *box* is a rectangle in as many dimensions as its tensor has: `begin` and `size` in each. A *tiling* says which boxes
the sections of a job hold. It is right if every value of every tensor is in one box:

    Σ over boxes  Π over dimensions (δ(x − begin) − δ(x − begin − size))   =   Π (δ(x) − δ(x − extent))

Both sides are the derivatives of how often each place is covered, so they are equal if and only if each is covered
once; and they are only a few corners, however large the boxes are. Sections that hold the same box are its `holders`;
the first of them sends it.

The values of a box have an order, row by row, as in a tensor of its own. In the tensor that it is cut from they lie in
*stretches*: runs of the same length at the same distance, which are copied all at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING

import msgspec

from .digest import data_hash
from .errors import BadRequest
from .types import MOST_BOXES, MOST_CUT_DIMENSIONS, MOST_HELD, Box, ParameterSpec, Tiling

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Shape = tuple[int, ...]

READ_VALUES = 1 << 19  # of a tensor that are read at once, of whichever boxes they are
BOX_WEIGHT = 32  # the memory of a box, in that of one of those that hold it
MOST_PIECES, VALUES_PER_PIECE = 1024, 1024  # of a tensor, or so many values in each: it takes time to begin


# --- one box --------------------------------------------------------------------------------------------------------


def whole_box(shape: Shape, *holders: int) -> Box:
    return Box((0,) * len(shape), shape, holders or (0,))


def numel_of(box: Box) -> int:
    return math.prod(box.size)


@dataclass(frozen=True)
class Stretch:
    """`count` runs of `length` values. In the tensor they begin at number `place` and every `stride` from there; in the
    box they follow each other from number `at` on."""

    place: int
    at: int
    count: int
    length: int
    stride: int


@dataclass(frozen=True)
class Cutout:
    """A box in a tensor of this shape."""

    shape: Shape
    begin: Shape
    size: Shape

    @classmethod
    def of(cls, shape: Shape, box: Box) -> Cutout:
        return cls(shape, box.begin, box.size)

    @cached_property
    def numel(self) -> int:
        return math.prod(self.size)

    @cached_property
    def first(self) -> int:
        """The number of its first value in the tensor."""
        return sum(begin * stride for begin, stride in zip(self.begin, self._strides, strict=True))

    @cached_property
    def last(self) -> int:
        return self.first + sum((n - 1) * stride for n, stride in zip(self.size, self._strides, strict=True))

    @cached_property
    def levels(self) -> tuple[tuple[int, int], ...]:
        """(how many, how far apart), the outermost first, and as few as can be: dimensions that are there whole count
        with the one outside of them. The last is the run: its values are neighbours."""
        found: list[tuple[int, int]] = []
        for n, stride in zip(reversed(self.size), reversed(self._strides), strict=True):
            if found and found[0][0] * found[0][1] == stride:
                found[0] = (n * found[0][0], found[0][1])
            elif n > 1:
                found.insert(0, (n, stride))
        return tuple(found) if found and found[-1][1] == 1 else (*found, (1, 1))

    def before(self, place: int) -> int:
        """How many of its values come before number `place` of the tensor."""
        if place >= math.prod(self.shape):
            return self.numel
        count, left = 0, self.numel
        for begin, n, stride in zip(self.begin, self.size, self._strides, strict=True):
            index, place = divmod(place, stride)
            left //= n
            count += min(max(index - begin, 0), n) * left
            if not begin <= index < begin + n:
                break
        return count

    @property
    def pieces(self) -> int:
        """How often a reader must start again: at each stretch, and after every `READ_VALUES` values of the tensor."""
        return math.prod(n for n, _ in self.levels[:-2]) - 1 + (self.last - self.first) // READ_VALUES

    def stretches(self, start: int, stop: int) -> Iterator[Stretch]:
        """Values [start, stop) of the box."""
        if start < stop:
            yield from _walk(self.levels, self.first, start, stop, start)

    @cached_property
    def _strides(self) -> Shape:
        return tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.shape)))


def _walk(levels: Sequence[tuple[int, int]], place: int, start: int, stop: int, at: int) -> Iterator[Stretch]:
    """Values [start, stop) of what begins at `place`; `at`: where the first of them goes."""
    if len(levels) == 1:
        yield Stretch(place + start, at, 1, stop - start, 0)
        return
    inner = math.prod(n for n, _ in levels[1:])
    _, stride = levels[0]
    first, last = start // inner, -(-stop // inner)
    while first < last:
        begin, end = max(start - first * inner, 0), min(stop - first * inner, inner)
        at_first = at + max(first * inner - start, 0)
        rows = stop // inner - first
        if len(levels) == 2 and begin == 0 and rows > 0:
            yield Stretch(place + first * stride, at_first, rows, inner, stride)
            first += rows
            continue
        yield from _walk(levels[1:], place + first * stride, begin, end, at_first)
        first += 1


# --- is it right? ---------------------------------------------------------------------------------------------------


def uncovered(shape: Shape, boxes: Sequence[Box]) -> tuple[Shape, int] | None:
    """A place that is not covered once, and how often it is; None = there is no such place."""
    corners: dict[Shape, int] = {}
    cut = cut_dimensions(shape, boxes)  # in the others all boxes have the same ends

    def add(begin: Shape, size: Shape, sign: int) -> None:
        for ends in product(*([(begin[i], 1), (begin[i] + size[i], -1)] for i in cut)):
            corner = tuple(at for at, _ in ends)
            corners[corner] = corners.get(corner, 0) + sign * math.prod(s for _, s in ends)

    if math.prod(shape):
        add((0,) * len(shape), shape, -1)
    for box in boxes:
        add(box.begin, box.size, 1)
    wrong = min((corner for corner, count in corners.items() if count), default=None)
    if wrong is None:
        return None
    place = dict(zip(cut, wrong, strict=True))
    return tuple(place.get(i, 0) for i in range(len(shape))), 1 + corners[wrong]


def cut_dimensions(shape: Shape, boxes: Iterable[Box]) -> list[int]:
    """In which not every box has the tensor's whole extent."""
    return [i for i, n in enumerate(shape) if any(box.begin[i] or box.size[i] != n for box in boxes)]


def check_boxes(name: str, shape: Shape, boxes: Sequence[Box], sections: int) -> None:
    """Do these boxes make up a tensor of this shape, each held by sections that there are?"""
    held, sent = set[int](), set[int]()
    for box in boxes:
        if len(box.begin) != len(shape) or len(box.size) != len(shape):
            raise BadRequest(f"a box of {name!r} has {len(box.begin)} dimensions, the tensor {len(shape)}")
        if any(b + n > extent for b, n, extent in zip(box.begin, box.size, shape, strict=True)):
            raise BadRequest(f"box {shown(box)} of {name!r} is outside of the tensor, which is {list(shape)}")
        if max(box.holders) >= sections or len(set(box.holders)) < len(box.holders):
            raise BadRequest(f"box {shown(box)} of {name!r} must be held by sections below {sections}, each once")
        if box.holders[0] in sent or not held.isdisjoint(box.holders):
            raise BadRequest(f"a section holds two boxes of {name!r}; it must hold one at most")
        sent.add(box.holders[0])
        held.update(box.holders)
    if len(cut_dimensions(shape, boxes)) > MOST_CUT_DIMENSIONS:
        raise BadRequest(f"{name!r} is cut in more than {MOST_CUT_DIMENSIONS} dimensions")
    pieces, most = sum(Cutout.of(shape, box).pieces for box in boxes), math.prod(shape) // VALUES_PER_PIECE
    if pieces > max(most, MOST_PIECES):
        raise BadRequest(
            f"the boxes of {name!r} would be read in too small pieces: {pieces}, at most {max(most, MOST_PIECES)}",
            hint="shard it in fewer or in earlier dimensions",
        )
    wrong = uncovered(shape, boxes)
    if wrong is not None:
        place, count = wrong
        how = "in no box" if count == 0 else f"in {count} boxes"
        raise BadRequest(
            f"value {list(place)} of {name!r} is {how}; each value must be in one",
            hint="ranks that hold the same values must hold exactly the same box of them",
        )


def shown(box: Box) -> str:
    """As one slices: [0:4, 8:16]."""
    return "[" + ", ".join(f"{b}:{b + n}" for b, n in zip(box.begin, box.size, strict=True)) + "]"


# --- a whole model ----------------------------------------------------------------------------------------------------


class Pattern:
    """The boxes of tensors of one shape. A job has few patterns and many tensors: what is known of a box is here,
    once."""

    def __init__(self, shape: Shape, boxes: tuple[Box, ...]) -> None:
        self.shape, self.boxes = shape, boxes
        self.cutouts = tuple(Cutout.of(shape, box) for box in boxes)

    @cached_property
    def by_sender(self) -> tuple[int, ...]:
        """The numbers of the boxes, by the sections that send them."""
        return tuple(sorted(range(len(self.boxes)), key=lambda i: self.boxes[i].holders[0]))

    def seats(self, most: int | None) -> tuple[NDArray[np.uint16], NDArray[np.uint32]]:
        """Sections that hold a box, at most so many of each, and which box that is."""
        import numpy as np

        seats = [(section, i) for i, box in enumerate(self.boxes) for section in box.holders[:most]]
        return np.array([s for s, _ in seats], np.uint16), np.array([i for _, i in seats], np.uint32)


class SectionBoxes:
    """Per section its boxes, (name, box), in the fragment's order. All sections together have as many as there are
    sections times tensors: so each is a pair of small numbers, and what is shown of it is made when it is asked for."""

    def __init__(self, sections: int, tensors: Sequence[tuple[str, Pattern]], most: int | None) -> None:
        import numpy as np  # here, because commands that meet no tiling need not wait for it

        self._tensors = tensors
        seats = {pattern: pattern.seats(most) for _, pattern in tensors}
        none = np.zeros(0, np.uint16), np.zeros(0, np.uint32)
        where = np.concatenate([none[0], *(seats[pattern][0] for _, pattern in tensors)])
        order = np.argsort(where, kind="stable")
        counts = [len(seats[pattern][0]) for _, pattern in tensors]
        self._which = np.repeat(np.arange(len(tensors), dtype=np.uint32), counts)[order]
        self._boxes = np.concatenate([none[1], *(seats[pattern][1] for _, pattern in tensors)])[order]
        self._ends = np.searchsorted(where[order], np.arange(sections), side="right")

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, section: int) -> tuple[tuple[str, Cutout], ...]:
        return tuple((name, pattern.cutouts[box]) for name, pattern, box in self.numbers(section))

    def __iter__(self) -> Iterator[tuple[tuple[str, Cutout], ...]]:
        return (self[section] for section in range(len(self)))

    def numbers(self, section: int) -> Iterator[tuple[str, Pattern, int]]:
        """The same by name, pattern, and number of the box in it."""
        first, past = int(self._ends[section - 1]) if section else 0, int(self._ends[section])
        which, boxes = self._which[first:past].tolist(), self._boxes[first:past].tolist()
        return ((*self._tensors[i], box) for i, box in zip(which, boxes, strict=True))


@dataclass(frozen=True, eq=False)
class FragmentTiling:
    """The boxes of one fragment's tensors, in its order. Compared by identity: jobs that hold the same have the same
    one (`Tilings`)."""

    sections: int
    tensors: tuple[tuple[str, Pattern], ...]

    def as_said(self) -> Tiling:
        """As it is written down, where patterns that are alike are one."""
        numbers = dict[tuple[Box, ...], int]()
        number = {pattern: numbers.setdefault(pattern.boxes, len(numbers)) for pattern in self.patterns}
        tensors = tuple(number[pattern] for _, pattern in self.tensors)
        return Tiling(sections=self.sections, patterns=tuple(numbers), tensors=tensors)

    @property
    def patterns(self) -> Iterable[Pattern]:
        return dict.fromkeys(pattern for _, pattern in self.tensors)

    @cached_property
    def sent(self) -> SectionBoxes:
        """What each section sends."""
        return SectionBoxes(self.sections, self.tensors, most=1)

    @cached_property
    def held(self) -> SectionBoxes:
        """What each section holds."""
        return SectionBoxes(self.sections, self.tensors, most=None)

    @cached_property
    def box_count(self) -> int:
        """Of all tensors, each box once."""
        return sum(len(pattern.boxes) for _, pattern in self.tensors)


class ModelTiling:
    """A tiling with the names and shapes that it is about, checked."""

    def __init__(self, tiling: Tiling, parameters: Sequence[ParameterSpec]) -> None:
        self.tiling, self.sections = tiling, tiling.sections
        numbers, patterns = self._checked(tiling, parameters), dict[tuple[int, Shape], Pattern]()
        self._of = dict[str, Pattern]()
        for spec, i in zip(parameters, numbers, strict=True):
            if (i, spec.shape) not in patterns:
                patterns[i, spec.shape] = Pattern(spec.shape, tiling.patterns[i])
            self._of[spec.name] = patterns[i, spec.shape]
        self._fragments: dict[tuple[str, ...], FragmentTiling] = {}

    @cached_property
    def weight(self) -> int:
        """What it takes of a server's memory: some bytes for all that the sections hold, some hundred for a box of a
        pattern."""
        held = [sum(len(box.holders) for box in boxes) for boxes in self.tiling.patterns]
        return sum(held[i] for i in self.tiling.tensors) + BOX_WEIGHT * sum(map(len, self.tiling.patterns))

    @cached_property
    def digest(self) -> str:
        """Of what is said, and of which tensors."""
        names = "\0".join(f"{name} {pattern.shape}" for name, pattern in self._of.items())
        return data_hash([msgspec.msgpack.encode(self.tiling), names.encode()])

    def says_the_same(self, other: ModelTiling) -> bool:
        return self.tiling == other.tiling and self._shapes() == other._shapes()

    def _shapes(self) -> list[tuple[str, Shape]]:
        return [(name, pattern.shape) for name, pattern in self._of.items()]

    def fragment(self, names: Sequence[str]) -> FragmentTiling:
        """The same object for the same names."""
        key = tuple(names)
        odd = next((name for name in key if name not in self._of), None)
        if odd is not None:
            raise BadRequest(f"the tiling does not say who holds {odd!r}", hint="join again, with the whole model")
        if key not in self._fragments:
            if len(self._fragments) == MOST_FRAGMENTS:
                self._fragments.clear()
            self._fragments[key] = FragmentTiling(self.sections, tuple((name, self._of[name]) for name in key))
        return self._fragments[key]

    @staticmethod
    def _checked(tiling: Tiling, parameters: Sequence[ParameterSpec]) -> tuple[int, ...]:
        """Each pattern is looked at once: what covers one shape covers no other, unless they are empty."""
        if len(tiling.tensors) != len(parameters):
            raise BadRequest(f"the tiling is of {len(tiling.tensors)} tensors, the manifest has {len(parameters)}")
        shapes: dict[int, Shape] = {}
        sizes = [sum(len(box.holders) for box in boxes) for boxes in tiling.patterns]
        left, boxes = MOST_HELD, sum(map(len, tiling.patterns))
        if boxes > MOST_BOXES:
            raise BadRequest(f"the patterns of a tiling have at most {MOST_BOXES} boxes, got {boxes}")
        for spec, i in zip(parameters, tiling.tensors, strict=True):
            if i >= len(tiling.patterns):
                raise BadRequest(f"the tiling of {spec.name!r} is pattern {i}; there are {len(tiling.patterns)}")
            left -= sizes[i]
            if left < 0:
                raise BadRequest(
                    f"the sections hold more than {MOST_HELD} boxes in all",
                    hint="divide the job into several workers, or hold fewer tensors on every rank",
                )
            if i not in shapes or not tiling.patterns[i]:
                check_boxes(spec.name, spec.shape, tiling.patterns[i], tiling.sections)
            elif shapes[i] != spec.shape:
                raise BadRequest(f"pattern {i} is of {list(shapes[i])}, and {spec.name!r} is {list(spec.shape)}")
            shapes[i] = spec.shape
        unused = next((i for i in range(len(tiling.patterns)) if i not in shapes), None)
        if unused is not None:
            raise BadRequest(f"pattern {unused} is of no tensor; leave it out")
        return tiling.tensors


MOST_FRAGMENTS = 4096  # a plan has no more; those of an earlier plan may be among them

Cutting = int | FragmentTiling
"""How a contribution is cut into sections: by rows into so many, or as a tiling says."""


def sections_of(cutting: Cutting) -> int:
    return cutting if isinstance(cutting, int) else cutting.sections


# --- what a rank holds ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardOf:
    """How one dimension of a mesh places a tensor: it shards dimension `dim`; `interleaved` > 1: each of so many chunks
    of it by itself, as if the mesh dimensions that follow had been first (FSDP2 on top of TP)."""

    dim: int
    interleaved: int = 1


Span = tuple[int, int]


def place_of(
    shape: Shape, mesh: Shape, coordinate: Sequence[int], placements: Sequence[ShardOf | None]
) -> list[list[Span]]:
    """Per dimension, the ranges of indices that are at this place of the mesh. None = the mesh dimension replicates."""
    spans: list[list[Span]] = [[(0, extent)] for extent in shape]
    for n, r, placement in zip(mesh, coordinate, placements, strict=True):
        if placement is not None:
            here = spans[placement.dim]
            chunks = _chunks(here, placement.interleaved)
            spans[placement.dim] = _joined(span for chunk in chunks for span in _chunks(chunk, n)[r])
    return spans


def box_at(spans: Sequence[Sequence[Span]]) -> tuple[Shape, Shape] | None:
    """(begin, size), if they make one box; a size may be 0."""
    if any(len(each) > 1 for each in spans):
        return None
    ends = [each[0] if each else (0, 0) for each in spans]
    return tuple(b for b, _ in ends), tuple(e - b for b, e in ends)


def _chunks(spans: Sequence[Span], count: int) -> list[list[Span]]:
    """As torch.chunk: ⌈n / count⌉ each, fewer or none at the end."""
    total = sum(end - begin for begin, end in spans)
    size = -(-total // count)
    return [_part(spans, min(i * size, total), min((i + 1) * size, total)) for i in range(count)]


def _part(spans: Sequence[Span], start: int, stop: int) -> list[Span]:
    found, before = list[Span](), 0
    for begin, end in spans:
        first, last = max(start - before, 0), min(stop - before, end - begin)
        if first < last:
            found.append((begin + first, begin + last))
        before += end - begin
    return found


def _joined(spans: Iterable[Span]) -> list[Span]:
    found: list[Span] = []
    for begin, end in spans:
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return found


Place = tuple[Shape, Shape]
"""(begin, size) of what a rank holds of a tensor."""

LARGE_VALUES = 1 << 16
"""A box of so many values that several sections hold is sent by whoever sends least so far; a smaller one by the first,
so that layers that are alike have the same pattern."""


def make_tiling(shapes: Mapping[str, Shape], held: Sequence[Mapping[str, Place]]) -> Tiling:
    """The tiling of a job whose section s holds `held[s]`. Not checked (`ModelTiling` does)."""
    sending, patterns, tensors = [0] * len(held), dict[tuple[Box, ...], int](), list[int]()
    for name in shapes:
        holders: dict[Place, list[int]] = {}
        for section, places in enumerate(held):
            if name in places and 0 not in places[name][1]:
                holders.setdefault(places[name], []).append(section)
        boxes = list[Box]()
        for (begin, size), sections in sorted(holders.items()):
            numel = Cutout(shapes[name], begin, size).numel
            first = sections[0]
            if numel >= LARGE_VALUES:
                first = min(sections, key=sending.__getitem__)
            sending[first] += numel
            boxes.append(Box(begin, size, (first, *(s for s in sections if s != first))))
        tensors.append(patterns.setdefault(tuple(boxes), len(patterns)))
    return Tiling(sections=len(held), patterns=tuple(patterns), tensors=tuple(tensors))
