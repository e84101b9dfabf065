"""Boxes of tensors: where their values lie, whether they make up a model, and what a mesh leaves each process."""

from __future__ import annotations

import itertools
import math
import operator
import random
from typing import Any

import pytest
import torch
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from outerstep.errors import BadRequest
from outerstep.tiling import (
    Cutout,
    ModelTiling,
    ShardOf,
    box_at,
    check_boxes,
    make_tiling,
    place_of,
    uncovered,
    whole_box,
)
from outerstep.types import MOST_BOXES, Box, ParameterSpec, Tiling


def some_box(source: random.Random) -> Cutout:
    shape = tuple(source.randint(1, 5) for _ in range(source.randint(0, 4)))
    begin = tuple(source.randrange(n) for n in shape)
    return Cutout(shape, begin, tuple(source.randint(1, n - b) for n, b in zip(shape, begin, strict=True)))


def of(name: str, *shape: int) -> ParameterSpec:
    return ParameterSpec(name=name, shape=shape, dtype="float32")


class TestABoxInItsTensor:
    def test_its_stretches_are_where_slicing_finds_its_values(self) -> None:
        source = random.Random(1)
        for _ in range(1000):
            box = some_box(source)
            whole = torch.arange(math.prod(box.shape)).view(box.shape)
            values = whole[tuple(slice(b, b + n) for b, n in zip(box.begin, box.size, strict=True))].reshape(-1)
            start = source.randint(0, box.numel)
            stop = source.randint(start, box.numel)
            found = torch.full((stop - start,), -1)
            for part in box.stretches(start, stop):
                for i in range(part.count):
                    at, place = part.at - start + i * part.length, part.place + i * part.stride
                    found[at : at + part.length] = torch.arange(place, place + part.length)
            assert torch.equal(found, values[start:stop]), box
            place = source.randint(0, whole.numel())
            assert box.before(place) == int((values < place).sum()), (box, place)
            assert (box.first, box.last) == (int(values[0]), int(values[-1]))

    def test_columns_are_copied_all_at_once_and_rows_are_one_run(self) -> None:
        assert len(list(Cutout((100, 8), (0, 2), (100, 3)).stretches(0, 300))) == 1
        assert Cutout((100, 8), (10, 0), (50, 8)).levels == ((400, 1),)
        assert Cutout((4, 6, 8), (0, 0, 2), (4, 6, 3)).levels == ((24, 8), (3, 1))


class TestWhetherEachValueIsInOneBox:
    def test_a_gap_and_an_overlap_are_found_where_they_begin(self) -> None:
        upper, lower = Box((0, 0), (2, 4), (0,)), Box((2, 0), (2, 4), (1,))
        assert uncovered((4, 4), [upper, lower]) is None
        assert uncovered((4, 4), [upper]) == ((2, 0), 0)
        assert uncovered((4, 4), [upper, Box((1, 2), (3, 2), (1,)), Box((2, 0), (2, 2), (2,))]) == ((1, 2), 2)
        assert uncovered((), [Box((), (), (0,))]) is None
        assert uncovered((), []) == ((), 0)
        assert uncovered((0, 3), []) is None

    def test_corners_say_what_counting_every_value_says(self) -> None:
        source = random.Random(2)
        for _ in range(1000):
            shape = tuple(source.randint(1, 3) for _ in range(2))
            boxes = []
            for _ in range(source.randint(0, 3)):
                begin = tuple(source.randrange(n) for n in shape)
                size = tuple(source.randint(1, n - b) for n, b in zip(shape, begin, strict=True))
                boxes.append(Box(begin, size, (0,)))
            count = torch.zeros(shape)
            for box in boxes:
                count[tuple(slice(b, b + n) for b, n in zip(box.begin, box.size, strict=True))] += 1
            wrong = uncovered(shape, boxes)
            assert (wrong is None) == bool((count == 1).all()), boxes
            if wrong is not None:
                assert count[wrong[0]] == wrong[1] != 1

    @pytest.mark.parametrize(
        ("boxes", "why"),
        [
            ([Box((0,), (4, 4), (0,))], "dimensions"),
            ([Box((0, 0), (5, 4), (0,))], "outside of the tensor"),
            ([Box((0, 0), (4, 4), (2,))], "sections below 2"),
            ([Box((0, 0), (4, 4), (0, 0))], "each once"),
            ([Box((0, 0), (2, 4), (0,)), Box((2, 0), (2, 4), (0,))], "holds two boxes of 'w'"),
            ([Box((0, 0), (2, 4), (0,))], r"value \[2, 0\] of 'w' is in no box"),
            ([Box((0, 0), (3, 4), (0,)), Box((2, 0), (2, 4), (1,))], r"value \[2, 0\] of 'w' is in 2 boxes"),
        ],
    )
    def test_what_is_wrong_is_named(self, boxes: list[Box], why: str) -> None:
        with pytest.raises(BadRequest, match=why):
            check_boxes("w", (4, 4), boxes, sections=2)

    def test_a_tensor_that_is_cut_in_five_dimensions_is_refused_before_its_corners_are_counted(self) -> None:
        halves = [Box((i,) * 5, (1,) * 5, (i,)) for i in range(2)]
        with pytest.raises(BadRequest, match="more than 4 dimensions"):
            check_boxes("w", (2,) * 5, halves, sections=2)

    @pytest.mark.parametrize(
        ("shape", "boxes"),
        [
            ((1 << 18, 4096), [Box((0, i), (1 << 18, 1), (i,)) for i in range(4096)]),
            (
                (64, 64, 3, 3),
                [Box((0, 0, a, b), (64, 64, 2 - a // 2, 2 - b // 2), (a + b // 2,)) for a in (0, 2) for b in (0, 2)],
            ),
        ],
    )
    def test_what_would_be_read_in_crumbs_is_refused(self, shape: tuple[int, ...], boxes: list[Box]) -> None:
        """A column of one value, or a corner of each kernel: a server would take a thousand times as long for it."""
        with pytest.raises(BadRequest, match="too small pieces"):
            check_boxes("w", shape, boxes, sections=4096)

    def test_what_jobs_hold_is_read_in_few_pieces(self) -> None:
        for shape, parts in [
            ((1 << 18, 4096), (64, 64)),
            ((256, 2048, 768), (1, 16, 8)),
            ((512, 512, 3, 3), (8, 8, 1, 1)),
        ]:
            size = tuple(n // part for n, part in zip(shape, parts, strict=True))
            places = list(itertools.product(*map(range, parts)))
            begins = [tuple(map(operator.mul, place, size)) for place in places]
            check_boxes("w", shape, [Box(begin, size, (i,)) for i, begin in enumerate(begins)], sections=4096)


class TestATiling:
    def tiling(self, *patterns: tuple[Box, ...], tensors: tuple[int, ...]) -> Tiling:
        return Tiling(sections=2, patterns=patterns, tensors=tensors)

    def test_it_is_of_all_tensors_and_a_pattern_is_of_one_shape(self) -> None:
        halves = (Box((0,), (2,), (0,)), Box((2,), (2,), (1,)))
        good = ModelTiling(self.tiling(halves, tensors=(0, 0)), [of("a", 4), of("b", 4)])
        assert [[name for name, _ in sent] for sent in good.fragment(("b", "a")).sent] == [["b", "a"]] * 2
        assert good.fragment(("a",)) is good.fragment(("a",))
        for tensors, specs, why in [
            ((0,), [of("a", 4), of("b", 4)], "of 1 tensors, the manifest has 2"),
            ((1,), [of("a", 4)], "pattern 1; there are 1"),
            ((0, 0), [of("a", 4), of("b", 2, 2)], "'b' is"),
        ]:
            with pytest.raises(BadRequest, match=why):
                ModelTiling(self.tiling(halves, tensors=tensors), specs)
        with pytest.raises(BadRequest, match="does not say who holds 'c'"):
            good.fragment(("c",))

    def test_empty_tensors_of_any_shape_may_have_the_same_pattern_or_two_alike(self) -> None:
        """A journal holds it as it is said of a fragment, where patterns that are alike are one."""
        specs = [of("a", 0, 4), of("b", 0, 8)]
        made = ModelTiling(self.tiling((), (), tensors=(0, 1)), specs).fragment(("a", "b")).as_said()
        assert ModelTiling(made, specs).tiling.patterns == ((),)
        with pytest.raises(BadRequest, match="'c' is"):
            ModelTiling(self.tiling((), tensors=(0, 0)), [of("a", 0, 4), of("c", 1)])

    def test_its_size_is_bounded(self) -> None:
        everywhere = tuple(Box((i,), (1,), (i, *(s for s in range(512) if s != i))) for i in range(1))
        many = Tiling(sections=512, patterns=(everywhere,), tensors=(0,) * 1025)
        with pytest.raises(BadRequest, match="more than 524288 boxes"):
            ModelTiling(many, [of(f"t{i}", 1) for i in range(1025)])
        box = whole_box((1,), 0)
        with pytest.raises(BadRequest, match=str(MOST_BOXES)):
            ModelTiling(Tiling(sections=1, patterns=((box,) * 4096,) * 17, tensors=()), [])

    def test_it_has_no_pattern_that_is_of_no_tensor(self) -> None:
        """Nobody would look at one, and it could be as large as a message."""
        everywhere = (Box((0,), (1,), tuple(range(2))),)
        with pytest.raises(BadRequest, match="pattern 1 is of no tensor"):
            ModelTiling(self.tiling(everywhere, everywhere, tensors=(0,)), [of("a", 1)])

    def test_of_sections_that_hold_the_same_one_sends_and_large_boxes_are_shared_out(self) -> None:
        shapes: dict[str, tuple[int, ...]] = {"small": (4,), "big": (1 << 16,), "other": (1 << 16,)}
        everything: dict[str, Any] = {name: ((0,), shape) for name, shape in shapes.items()}
        tiling = make_tiling(shapes, [everything, {**everything, "small": ((0,), (0,))}])
        fragment = ModelTiling(tiling, [of(name, *shape) for name, shape in shapes.items()]).fragment(tuple(shapes))
        assert [[name for name, _ in sent] for sent in fragment.sent] == [["small", "other"], ["big"]]
        assert [[name for name, _ in held] for held in fragment.held] == [["small", "big", "other"], ["big", "other"]]
        assert fragment.as_said() == tiling


class TestWhatAMeshLeavesAProcess:
    @pytest.mark.parametrize(
        ("mesh", "torchs", "ours"),
        [
            ((3,), (Shard(0),), (ShardOf(0),)),
            ((3,), (Shard(1),), (ShardOf(1),)),
            ((2, 3), (Replicate(), Shard(1)), (None, ShardOf(1))),
            ((2, 2), (Shard(0), Shard(0)), (ShardOf(0), ShardOf(0))),
            ((2, 2), (Shard(0), Shard(1)), (ShardOf(0), ShardOf(1))),
            ((2, 2), (_StridedShard(0, split_factor=2), Shard(0)), (ShardOf(0, 2), ShardOf(0))),
            ((2, 2, 2), (Replicate(), _StridedShard(0, split_factor=2), Shard(0)), (None, ShardOf(0, 2), ShardOf(0))),
            ((2, 2, 2), (Shard(0), Shard(1), Shard(0)), (ShardOf(0), ShardOf(1), ShardOf(0))),
        ],
    )
    def test_it_is_what_torch_computes(self, mesh: Any, torchs: Any, ours: Any) -> None:
        for shape in [(8, 6), (7, 5), (2, 9), (1, 1), (12, 4)]:
            for coordinate in map(list, torch.cartesian_prod(*map(torch.arange, mesh)).view(-1, len(mesh)).tolist()):
                size, begin = _compute_local_shape_and_global_offset(shape, mesh, coordinate, torchs)
                box = box_at(place_of(shape, mesh, coordinate, ours))
                assert box is not None
                assert box[1] == tuple(size), (shape, coordinate)
                if math.prod(size):
                    assert box[0] == tuple(begin), (shape, coordinate)

    def test_what_is_in_two_pieces_is_no_box(self) -> None:
        assert box_at(place_of((8,), (2,), [0], [ShardOf(0, 2)])) is None
