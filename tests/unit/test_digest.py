"""Hashes of parts, of payloads and of anchors."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outerstep.digest import (
    LEAF_BYTES,
    TreeHasher,
    data_hash,
    hash_like,
    leaf_count,
    leaves_of,
    part_count,
    part_hash,
    part_range,
    payload_hash,
    tree_hash,
)

PROPERTY = settings(deadline=None)


def pattern(size: int, seed: int = 0) -> bytes:
    """Bytes that do not repeat within a leaf."""
    return random.Random(seed).randbytes(size)


SIZES = [0, 4, LEAF_BYTES - 4, LEAF_BYTES, LEAF_BYTES + 4, 3 * LEAF_BYTES + 1000]


class TestTrees:
    def test_a_root_is_over_the_hashes_of_leaves_that_end_with_their_tensor(self) -> None:
        one, other = pattern(2 * LEAF_BYTES + 8), pattern(12, seed=1)
        pieces = [one[:LEAF_BYTES], one[LEAF_BYTES : 2 * LEAF_BYTES], one[2 * LEAF_BYTES :], other]
        expected = data_hash(bytes.fromhex(part_hash(piece)) for piece in pieces)
        assert tree_hash([one, other]) == "t" + expected

    def test_nothing_has_no_leaves(self) -> None:
        assert tree_hash([]) == tree_hash([b"", b""]) == "t" + data_hash([])

    @pytest.mark.parametrize("size", SIZES)
    def test_a_tensor_has_as_many_leaves_as_it_is_cut_into(self, size: int) -> None:
        assert len(leaves_of(pattern(size))) == 8 * leaf_count(size)

    @pytest.mark.parametrize("sizes", [SIZES, SIZES[::-1]], ids=["growing", "shrinking"])
    @pytest.mark.parametrize("piece", [1000, LEAF_BYTES // 2, LEAF_BYTES, LEAF_BYTES + 4, 10 * LEAF_BYTES])
    def test_a_root_does_not_depend_on_the_pieces_in_which_tensors_come(self, sizes: list[int], piece: int) -> None:
        tensors, hasher = [pattern(size, seed) for seed, size in enumerate(sizes)], TreeHasher()
        for tensor in tensors:
            hasher.next_tensor()
            for begin in range(0, len(tensor), piece):
                hasher.update(tensor[begin : begin + piece])
        assert hasher.hexdigest() == hasher.hexdigest() == tree_hash(tensors)

    def test_leaves_may_be_made_elsewhere_and_come_when_they_are_needed(self) -> None:
        tensors, hasher, asked = [pattern(LEAF_BYTES + 4, seed) for seed in range(3)], TreeHasher(), []
        for number, tensor in enumerate(tensors):
            hasher.next_tensor()
            if number == 1:
                hasher.promise(lambda: asked.append("leaves") or leaves_of(tensors[1]))
            else:
                hasher.update(tensor)
        assert asked == []
        assert hasher.hexdigest() == hasher.hexdigest() == tree_hash(tensors)
        assert asked == ["leaves"]

    def test_values_that_change_places_or_tensors_change_the_root(self) -> None:
        data = pattern(2 * LEAF_BYTES)
        swapped = data[LEAF_BYTES:] + data[:LEAF_BYTES]
        cut = [data[:LEAF_BYTES], data[LEAF_BYTES:]]
        assert (
            len({tree_hash([data]), tree_hash([swapped]), tree_hash([data[: LEAF_BYTES + 4], data[LEAF_BYTES + 4 :]])})
            == 3
        )
        assert tree_hash(cut) == tree_hash([data])  # a border between leaves: names and shapes are the manifest's

    def test_the_form_of_a_hash_tells_its_rule(self) -> None:
        data = [pattern(100), pattern(50, seed=1)]
        for rule in (data_hash, tree_hash):
            assert hash_like(rule(data), data) == rule(data)


class TestHashes:
    @pytest.mark.parametrize(
        ("data", "expected"),
        [(b"", "2d06800538d394c2"), (b"abc", "78af5f94892f3950")],
    )
    def test_a_part_has_the_published_xxh3_64(self, data: bytes, expected: str) -> None:
        assert part_hash(data) == expected

    @pytest.mark.parametrize(
        ("data", "expected"),
        [(b"", "99aa06d3014798d86001c324468d497f"), (b"abc", "06b05ab6733a618578af5f94892f3950")],
    )
    def test_data_has_the_published_xxh3_128(self, data: bytes, expected: str) -> None:
        assert data_hash([data]) == expected

    def test_a_payload_is_the_hash_of_its_parts_hashes(self) -> None:
        hashes = [part_hash(b"one"), part_hash(b"two")]
        assert payload_hash(hashes) == data_hash([bytes.fromhex(hashes[0]), bytes.fromhex(hashes[1])])

    def test_the_order_and_the_number_of_parts_matter(self) -> None:
        a, b = part_hash(b"one"), part_hash(b"two")
        assert len({payload_hash(parts) for parts in ([], [a], [b], [a, b], [b, a], [a, a])}) == 6

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview], ids=lambda kind: kind.__name__)
    def test_any_buffer_of_the_same_bytes_has_the_same_hash(self, kind: type) -> None:
        assert part_hash(kind(b"12345")) == part_hash(b"12345")
        assert data_hash([kind(b"12345")]) == data_hash([b"12345"])

    @PROPERTY
    @given(st.binary(min_size=1, max_size=500), st.data())
    def test_one_flipped_bit_changes_every_hash_above_it(self, data: bytes, draw: st.DataObject) -> None:
        flipped = bytearray(data)
        flipped[draw.draw(st.integers(0, len(data) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
        assert part_hash(flipped) != part_hash(data)
        assert payload_hash([part_hash(flipped)]) != payload_hash([part_hash(data)])
        assert data_hash([flipped]) != data_hash([data])

    @PROPERTY
    @given(st.binary(max_size=500), st.lists(st.integers(0, 500), max_size=6))
    def test_a_data_hash_does_not_depend_on_how_the_data_was_cut(self, data: bytes, cuts: list[int]) -> None:
        borders = sorted([0, len(data), *(cut for cut in cuts if cut < len(data))])
        assert data_hash(data[a:b] for a, b in pairwise(borders)) == data_hash([data])

    @PROPERTY
    @given(st.binary(max_size=200))
    def test_hashes_are_lower_case_hex_of_fixed_length(self, data: bytes) -> None:
        for found, digits in [(part_hash(data), 16), (payload_hash([part_hash(data)]), 32), (data_hash([data]), 32)]:
            assert len(found) == digits
            assert set(found) <= set("0123456789abcdef")


class TestParts:
    @PROPERTY
    @given(size=st.integers(0, 2000), part_size=st.integers(1, 300))
    def test_parts_follow_each_other_and_cover_the_payload(self, size: int, part_size: int) -> None:
        ranges = [part_range(part, size, part_size) for part in range(part_count(size, part_size))]
        assert [i for begin, end in ranges for i in range(begin, end)] == list(range(size))
        assert all(end - begin == part_size for begin, end in ranges[:-1])
        assert all(0 < end - begin <= part_size for begin, end in ranges[-1:])

    @pytest.mark.parametrize(("size", "count"), [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2), (128, 2), (129, 3)])
    def test_the_last_part_may_be_short(self, size: int, count: int) -> None:
        assert part_count(size, 64) == count
