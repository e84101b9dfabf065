"""Sections: whatever the shapes and the number of ranks, every value is in one section, and its place is known."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amounts import cases
from outerstep.core.codecs import get_codec
from outerstep.digest import Parts, part_count, part_range
from outerstep.wire.frames import layout, most_bytes, row_pieces, rows_of, section_layout

PROPERTY = cases(200)
shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
counts = st.integers(1, 12)


def fp32_bytes(numel: int) -> int:
    return 4 * numel


class TestRows:
    @PROPERTY
    @given(shapes, counts)
    def test_sections_hold_every_value_once_and_in_order(self, shape: tuple[int, ...], sections: int) -> None:
        found: list[int] = []
        for section in range(sections):
            rows = rows_of(shape, sections, section)
            found += range(rows.first_value, rows.first_value + rows.numel)
        assert found == list(range(math.prod(shape)))

    @PROPERTY
    @given(st.integers(0, 40), st.integers(1, 3), counts)
    def test_they_are_the_rows_that_torch_gives_each_rank(self, height: int, width: int, sections: int) -> None:
        whole = torch.arange(height * width).view(height, width)
        chunks = list(whole.chunk(sections)) if height else []
        for section in range(sections):
            rows = rows_of((height, width), sections, section)
            ours = whole[rows.first_row : rows.first_row + rows.shape[0]]
            theirs = chunks[section] if section < len(chunks) else whole[:0]
            assert torch.equal(ours, theirs)

    def test_a_tensor_without_dimensions_belongs_to_the_first(self) -> None:
        assert [rows_of((), 3, section).numel for section in range(3)] == [1, 0, 0]


def in_fp32(tensors: list[tuple[str, tuple[int, ...]]]) -> list[tuple[str, tuple[int, ...], Callable[[int], int]]]:
    return [(name, shape, fp32_bytes) for name, shape in tensors]


class TestLayouts:
    @PROPERTY
    @given(st.lists(shapes, min_size=1, max_size=5), counts, st.sampled_from(["fp32", "int4", "int8", "sparse64"]))
    def test_all_sections_together_are_no_larger_than_the_limit_allows(
        self, found: list[tuple[int, ...]], sections: int, codec: str
    ) -> None:
        encoded_bytes = get_codec(codec).encoded_bytes
        tensors = [(f"t{i}", shape, encoded_bytes) for i, shape in enumerate(found)]
        whole = layout(codec, [(name, shape, encoded_bytes(math.prod(shape))) for name, shape, _ in tensors])
        size = sum(section_layout(codec, tensors, sections, r).size_bytes for r in range(sections))
        limit = most_bytes(whole, tensors, sections)
        assert size <= limit <= size + sections * (64 + len(tensors) + whole.data_begin)
        assert most_bytes(whole, tensors, 1) == whole.size_bytes

    def test_what_a_sparse_codec_needs_for_small_shares_is_counted(self) -> None:
        """Of 4096 values in one piece 64 are sent; cut into 64 pieces, of each."""
        sparse = get_codec("sparse64")
        tensors = [("t", (4096, 1), sparse.encoded_bytes)]
        whole = layout("sparse64", [("t", (4096, 1), sparse.encoded_bytes(4096))])
        size = sum(section_layout("sparse64", tensors, 64, r).size_bytes for r in range(64))
        assert size - 64 * whole.data_begin > 60 * (whole.size_bytes - whole.data_begin)
        assert size <= most_bytes(whole, tensors, 64)

    @PROPERTY
    @given(st.lists(shapes, min_size=1, max_size=5))
    def test_one_section_is_the_whole_frame(self, found: list[tuple[int, ...]]) -> None:
        tensors = [(f"t{i}", shape) for i, shape in enumerate(found)]
        whole = layout("fp32", [(name, shape, fp32_bytes(math.prod(shape))) for name, shape in tensors])
        assert section_layout("fp32", in_fp32(tensors), 1, 0) == whole

    @PROPERTY
    @given(st.lists(shapes, min_size=1, max_size=5), counts)
    def test_the_pieces_of_all_sections_are_the_data_of_the_whole(
        self, found: list[tuple[int, ...]], sections: int
    ) -> None:
        whole = layout("fp32", [(f"t{i}", shape, fp32_bytes(math.prod(shape))) for i, shape in enumerate(found)])
        pieces = [piece for r in range(sections) for piece in row_pieces(whole.entries, sections, r, 4)]
        covered = sorted(i for begin, end in pieces for i in range(begin, end))
        assert covered == [i for entry in whole.entries for i in range(entry.begin, entry.end)]


class TestParts:
    @PROPERTY
    @given(st.lists(st.integers(1, 500), min_size=1, max_size=6), st.integers(1, 120))
    def test_parts_cover_the_payload_and_none_crosses_a_section(self, sizes: list[int], part_size: int) -> None:
        parts = Parts(tuple(sizes), part_size)
        ranges = [parts.range(part) for part in range(parts.count)]
        assert [i for begin, end in ranges for i in range(begin, end)] == list(range(sum(sizes)))
        for section in range(len(sizes)):
            begin = sum(sizes[:section])
            assert len(parts.of_section(section)) == part_count(sizes[section], part_size)
            for part in parts.of_section(section):
                assert begin <= parts.range(part)[0] < parts.range(part)[1] <= begin + sizes[section]

    @PROPERTY
    @given(st.integers(1, 2000), st.integers(1, 300))
    def test_one_section_is_cut_as_ever(self, size: int, part_size: int) -> None:
        parts = Parts((size,), part_size)
        assert parts.count == part_count(size, part_size)
        for part in range(parts.count):
            assert parts.range(part) == part_range(part, size, part_size)

    def test_each_section_has_its_own_short_last_part(self) -> None:
        parts = Parts((10, 3, 8), 8)
        assert [parts.range(part) for part in range(parts.count)] == [(0, 8), (8, 10), (10, 13), (13, 21)]


@pytest.mark.parametrize("sections", [2, 3, 5])
def test_fewer_rows_than_ranks_leaves_the_last_ones_empty(sections: int) -> None:
    assert [rows_of((1, 4), sections, r).shape for r in range(sections)] == [(1, 4)] + [(0, 4)] * (sections - 1)
