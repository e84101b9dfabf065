"""Tensors as bytes, and back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outerstep.core.codecs import BF16, CODECS, FP32, Codec, get_codec
from outerstep.errors import ConfigError

PROPERTY = settings(max_examples=100, deadline=None)
all_codecs = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
finite_or_infinite = st.lists(st.floats(width=32, allow_nan=False), max_size=100)


def fp32(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def encoded(codec: Codec, values: Tensor) -> Tensor:
    out = torch.empty(codec.encoded_bytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, out)
    return out


def decoded(codec: Codec, data: Tensor, numel: int) -> Tensor:
    out = torch.empty(numel)
    codec.decode(data, out)
    return out


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


class TestEveryCodec:
    @pytest.mark.parametrize("name", ["fp32", "bf16"])
    def test_it_is_found_by_its_name(self, name: str) -> None:
        assert get_codec(name).name == name

    @all_codecs
    @PROPERTY
    @given(blocks=st.integers(0, 10_000), rest=st.integers(0, 10_000))
    def test_sizes_add_up_at_block_borders(self, codec: Codec, blocks: int, rest: int) -> None:
        border = blocks * codec.block_values
        assert codec.encoded_bytes(border + rest) == codec.encoded_bytes(border) + codec.encoded_bytes(rest)

    @all_codecs
    @PROPERTY
    @given(seed=st.integers(0, 2**31), blocks=st.tuples(*[st.integers(0, 40)] * 3), tail=st.integers(0, 7))
    def test_blocks_are_coded_independently_of_all_others(
        self, codec: Codec, seed: int, blocks: tuple[int, int, int], tail: int
    ) -> None:
        numel = sum(blocks) * codec.block_values + tail
        values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
        whole = encoded(codec, values)
        a = blocks[0] * codec.block_values
        for b in (a + blocks[1] * codec.block_values, numel):
            piece = whole[codec.encoded_bytes(a) : codec.encoded_bytes(b)]
            assert torch.equal(encoded(codec, values[a:b]), piece)
            assert same_bits(decoded(codec, piece.clone(), b - a), decoded(codec, whole, numel)[a:b].clone())

    @all_codecs
    @PROPERTY
    @given(values=finite_or_infinite)
    def test_coding_what_was_decoded_changes_nothing_more(self, codec: Codec, values: list[float]) -> None:
        once = decoded(codec, encoded(codec, fp32(values)), len(values))
        assert same_bits(decoded(codec, encoded(codec, once), len(values)), once)

    @all_codecs
    def test_it_writes_into_and_reads_from_the_middle_of_a_frame(self, codec: Codec) -> None:
        values = torch.arange(5.0)
        size = codec.encoded_bytes(5)
        frame = torch.full((64 + size + 64,), 0xAA, dtype=torch.uint8)
        codec.encode(values, frame[64 : 64 + size])
        anchor = torch.full((9,), -1.0)
        codec.decode(frame[64 : 64 + size], anchor[2:7])
        assert anchor.tolist() == [-1.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, -1.0, -1.0]
        assert (frame[:64] == 0xAA).all()
        assert (frame[64 + size :] == 0xAA).all()

    @all_codecs
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    def test_a_value_that_is_not_finite_stays_so_and_can_be_found_by_the_receiver(
        self, codec: Codec, value: float
    ) -> None:
        values = torch.ones(codec.block_values + 3)
        values[1] = value
        assert not decoded(codec, encoded(codec, values), values.numel()).isfinite().all()

    def test_an_unknown_one_is_refused_listing_the_known_ones(self) -> None:
        with pytest.raises(ConfigError, match=r"unknown codec 'zip'; known: .*bf16.*fp32"):
            get_codec("zip")


class TestFP32:
    def test_it_takes_four_bytes_a_value(self) -> None:
        assert FP32.encoded_bytes(7) == 28

    @PROPERTY
    @given(bits=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=100))
    def test_every_bit_pattern_comes_back_as_it_was(self, bits: list[int]) -> None:
        values = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
        assert same_bits(decoded(FP32, encoded(FP32, values), len(bits)), values)


class TestBF16:
    def test_it_takes_two_bytes_a_value(self) -> None:
        assert BF16.encoded_bytes(7) == 14

    @PROPERTY
    @given(values=finite_or_infinite)
    def test_it_equals_torchs_own_bfloat16(self, values: list[float]) -> None:
        theirs = fp32(values).to(torch.bfloat16)
        data = encoded(BF16, fp32(values))
        assert torch.equal(data, theirs.view(torch.uint8))
        assert same_bits(decoded(BF16, data, len(values)), theirs.float())

    @pytest.mark.parametrize(
        ("value", "rounded"),
        [
            (1 + 2.0**-8, 1.0),  # a tie, down to the even one
            (1 + 3 * 2.0**-8, 1 + 2.0**-6),  # a tie, up to the even one
            (1 + 2.0**-8 + 2.0**-20, 1 + 2.0**-7),
            (-(1 + 2.0**-8), -1.0),
        ],
    )
    def test_it_rounds_to_the_nearest_and_ties_to_even(self, value: float, rounded: float) -> None:
        assert decoded(BF16, encoded(BF16, fp32([value])), 1).tolist() == [rounded]
