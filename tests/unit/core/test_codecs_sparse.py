"""The sparse codec against its definition, and what it makes of bytes that break its rules."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from amounts import cases
from outerstep.core.codecs import SPARSE64, Dither, SparseCodec
from outerstep.core.codecs.sparse import pack_indices, tree_sum, two_bits, unpack_indices
from outerstep.errors import ConfigError

PROPERTY = cases(60)
CHUNK = 4096


def encoded(codec: SparseCodec, values: Tensor) -> Tensor:
    out = torch.empty(codec.encoded_bytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, out)
    return out


def decoded(codec: SparseCodec, data: Tensor, numel: int) -> Tensor:
    out = torch.full((numel,), 9.0)
    codec.decode(data, out)
    return out


def twelve_bits(x: float) -> int:
    """|x| cut to 12 significant bits, as a number that orders alike."""
    return int(struct.unpack("<I", struct.pack("<f", abs(x)))[0]) >> 12


def defined(chunk: list[float], k: int) -> dict[int, float]:
    """index -> value, by the definition: the k largest, four bins, the mean of each."""
    chosen = sorted(sorted(range(len(chunk)), key=lambda i: (-twelve_bits(chunk[i]), i))[:k])
    mean = math.fsum(chunk[i] for i in chosen) / len(chosen)
    width = 6 * math.sqrt(math.fsum((chunk[i] - mean) ** 2 for i in chosen) / len(chosen)) / 4
    bins: dict[int, list[int]] = {}
    for i in chosen:
        number = math.floor((chunk[i] - mean) / width) if width else 0
        bins.setdefault(max(-2, min(1, number)), []).append(i)
    return {i: math.fsum(chunk[j] for j in members) / len(members) for members in bins.values() for i in members}


@PROPERTY
@given(
    k=st.sampled_from([1, 3, 64, 101]),
    numel=st.integers(1, 300) | st.sampled_from([4095, 4096, 8193]),
    exponent=st.integers(-60, 60),
    seed=st.integers(0, 2**31),
)
def test_it_sends_the_largest_values_as_the_mean_of_their_bin(k: int, numel: int, exponent: int, seed: int) -> None:
    codec = SparseCodec(k)
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    back = decoded(codec, encoded(codec, values), numel)
    for begin in range(0, numel, CHUNK):
        expected = defined(values[begin : begin + CHUNK].tolist(), k)
        got = back[begin : begin + CHUNK]
        assert set(got.nonzero().flatten().tolist()) <= expected.keys()
        for i, mean in expected.items():
            assert got[i].item() == pytest.approx(mean, rel=2.0**-8)


@pytest.mark.parametrize(("k", "size"), [(64, 120), (128, 232), (1, 12), (512, 904)])
def test_a_chunk_takes_four_means_and_fourteen_bits_a_value(k: int, size: int) -> None:
    assert SparseCodec(k).encoded_bytes(CHUNK) == size


def test_a_short_chunk_sends_all_it_has() -> None:
    assert SPARSE64.encoded_bytes(5) == 8 + 9 + 2
    values = torch.tensor([1.0, 1.0, -3.0, -3.0, 0.5])
    assert (decoded(SPARSE64, encoded(SPARSE64, values), 5) != 0).all()


def test_of_equal_values_the_first_are_chosen() -> None:
    codec, values = SparseCodec(5), torch.ones(CHUNK)
    values[::2] = -1.0
    assert decoded(codec, encoded(codec, values), CHUNK).nonzero().flatten().tolist() == [0, 1, 2, 3, 4]
    values[4000] = 1.0 + 2.0**-12  # not larger to 12 bits
    values[4001] = 1.0 + 2.0**-11
    assert decoded(codec, encoded(codec, values), CHUNK).nonzero().flatten().tolist() == [0, 1, 2, 3, 4001]


def test_large_values_far_apart_are_kept_and_the_rest_is_zero() -> None:
    values = torch.full((2 * CHUNK,), 1e-3)
    values[[7, 4095, 4096]] = torch.tensor([5.0, -5.0, 2.0])
    back = decoded(SparseCodec(2), encoded(SparseCodec(2), values), 2 * CHUNK)
    assert back[[7, 4095, 4096]].tolist() == [5.0, -5.0, 2.0]
    assert (back != 0).sum() == 4  # and of the second chunk one small one


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_chunk_of_zeros_comes_back_as_zeros(zero: float) -> None:
    data = encoded(SPARSE64, torch.full((CHUNK,), zero))
    assert SPARSE64.check(data, CHUNK) == ""
    assert (decoded(SPARSE64, data, CHUNK) == 0).all()


@pytest.mark.parametrize("huge", [3e38, 3.4028234663852886e38])
def test_the_largest_numbers_stay_finite(huge: float) -> None:
    values = torch.full((CHUNK,), huge)
    values[::3] = -huge
    back = decoded(SPARSE64, encoded(SPARSE64, values), CHUNK)
    assert back.isfinite().all()
    assert back[0].item() == pytest.approx(-huge, rel=0.01)


def test_subnormal_numbers_do_no_harm() -> None:
    values = torch.full((100,), 1e-42)
    assert decoded(SPARSE64, encoded(SPARSE64, values), 100).abs().max() <= 1e-40


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_not_finite_spoils_its_chunk_and_no_other(value: float) -> None:
    values = torch.randn(3 * CHUNK, generator=torch.Generator().manual_seed(1))
    values[CHUNK + 9] = value
    back = decoded(SPARSE64, encoded(SPARSE64, values), 3 * CHUNK).view(3, CHUNK)
    assert back.isfinite().all(1).tolist() == [True, False, True]
    assert back[1].isnan().sum() == 64


def with_indices(codec: SparseCodec, numel: int, index: list[int]) -> Tensor:
    """A chunk that says `index`."""
    data = encoded(codec, torch.randn(numel, generator=torch.Generator().manual_seed(2)))
    kept = min(codec.k, numel)
    data[8 : 8 + 3 * -(-kept // 2)] = pack_indices(torch.tensor([index]))[0]
    return data


@pytest.mark.parametrize(
    ("numel", "index"),
    [
        (CHUNK, [3, 3, 5, 7]),  # twice the same
        (CHUNK, [3, 9, 5, 7]),  # not ascending
        (CHUNK, [4095, 0, 1, 2]),
        (100, [1, 2, 3, 100]),  # beyond the end
        (100, [1, 2, 3, 4095]),
    ],
)
def test_indices_that_break_the_rules_are_found_and_do_no_harm(numel: int, index: list[int]) -> None:
    codec = SparseCodec(4)
    data = with_indices(codec, numel, index)
    assert f"must ascend and be below {numel}" in codec.check(data, numel)
    out = torch.full((numel + 5000,), 7.0)
    codec.decode(data, out[:numel])
    assert set(out[:numel].nonzero().flatten().tolist()) == {i for i in index if i < numel}
    codec.decode_add(data, out[:numel])
    assert (out[numel:] == 7.0).all()


def test_indices_within_the_rules_pass() -> None:
    assert SparseCodec(4).check(with_indices(SparseCodec(4), CHUNK, [0, 1, 4094, 4095]), CHUNK) == ""
    assert SparseCodec(4).check(with_indices(SparseCodec(4), 100, [0, 1, 98, 99]), 100) == ""


def test_a_broken_chunk_is_found_behind_good_ones() -> None:
    good = encoded(SPARSE64, torch.randn(3 * CHUNK, generator=torch.Generator().manual_seed(4)))
    assert SPARSE64.check(good, 3 * CHUNK) == ""
    bad = good.clone()
    bad[2 * 120 + 8 : 2 * 120 + 104] = 0
    assert SPARSE64.check(bad, 3 * CHUNK) != ""


@PROPERTY
@given(index=st.lists(st.integers(0, CHUNK - 1), min_size=1, max_size=20))
def test_packed_indices_come_back(index: list[int]) -> None:
    packed = pack_indices(torch.tensor([index]))
    assert packed.shape == (1, 3 * -(-len(index) // 2))
    assert unpack_indices(packed, len(index)).tolist() == [index]


@PROPERTY
@given(numbers=st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=70))
def test_the_tree_adds_everything_once(numbers: list[int]) -> None:
    assert tree_sum(torch.tensor([numbers], dtype=torch.float64)).tolist() == [[sum(numbers)]]


def test_stochastic_rounding_is_refused() -> None:
    with pytest.raises(ConfigError, match="'sparse64' has no stochastic rounding"):
        SPARSE64.encode(torch.ones(4), torch.empty(SPARSE64.encoded_bytes(4), dtype=torch.uint8), Dither(1))


def test_the_bins_end_at_one_and_a_half_deviations() -> None:
    values = [-3.0, -1.0, -1.0, 0.0, 0.0, 1.0, 1.0, 3.0]  # mean 0, deviation √2.75, edge 2.49
    means, bins = two_bits(torch.tensor([values]))
    assert bins.tolist() == [[0, 1, 1, 2, 2, 2, 2, 3]]
    assert means.tolist() == [[-3.0, -1.0, 0.5, 3.0]]


def test_a_value_on_an_edge_belongs_to_the_bin_above() -> None:
    exact = torch.tensor([[-1.5, 1.5, -1.5, 1.5, 0.0, 0.0, 0.0, 0.0, 0.0]])  # deviation exactly 1, edge 1.5
    assert two_bits(exact)[1].tolist() == [[1, 3, 1, 3, 2, 2, 2, 2, 2]]
