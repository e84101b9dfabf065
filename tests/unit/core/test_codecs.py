"""Tensors as bytes, and back."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from amounts import cases, mostly_slow
from outerstep.core.codecs import BF16, CODECS, FP32, Codec, blocks, bytes_per_value, get_codec
from outerstep.core.codecs.cast import CastCodec
from outerstep.errors import ConfigError

PROPERTY = cases(100)
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


def once_decoded(codec: Codec, values: Tensor) -> Tensor:
    return decoded(codec, encoded(codec, values), values.numel())


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


class TestEveryCodec:
    @pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4", "e3m0", "control-2bit", "sparse64", "sparse100"])
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
    @given(seed=st.integers(0, 2**31), blocks=st.tuples(*[st.integers(0, 3)] * 3), tail=st.integers(0, 300))
    def test_blocks_are_coded_independently_of_all_others(
        self, codec: Codec, seed: int, blocks: tuple[int, int, int], tail: int
    ) -> None:
        numel = sum(blocks) * codec.block_values + tail % codec.block_values
        values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
        whole = encoded(codec, values)
        a = blocks[0] * codec.block_values
        for b in (a + blocks[1] * codec.block_values, numel):
            piece = whole[codec.encoded_bytes(a) : codec.encoded_bytes(b)]
            assert torch.equal(encoded(codec, values[a:b]), piece)
            assert same_bits(decoded(codec, piece.clone(), b - a), decoded(codec, whole, numel)[a:b].clone())

    @all_codecs
    def test_a_tensor_of_several_pieces_is_the_sum_of_its_blocks(
        self, codec: Codec, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        values = torch.randn(20_011, generator=torch.Generator().manual_seed(3))
        whole = encoded(codec, values)
        monkeypatch.setattr(blocks, "CPU_PIECE_VALUES", 5000)
        assert torch.equal(encoded(codec, values), whole)
        assert same_bits(decoded(codec, whole, 20_011), once_decoded(codec, values))

    @pytest.mark.parametrize("codec", [c for c in CODECS.values() if not c.needs_feedback], ids=lambda c: c.name)
    @PROPERTY
    @given(values=finite_or_infinite)
    def test_coding_what_was_decoded_changes_nothing_more(self, codec: Codec, values: list[float]) -> None:
        once = once_decoded(codec, fp32(values))
        assert same_bits(once_decoded(codec, once), once)

    @all_codecs
    @pytest.mark.parametrize("offset", [64, 63])
    def test_it_writes_into_and_reads_from_the_middle_of_a_frame(self, codec: Codec, offset: int) -> None:
        if isinstance(codec, CastCodec) and offset % 2:
            pytest.skip("a cast needs its own alignment, which frames give")
        values = torch.arange(5.0)
        size = codec.encoded_bytes(5)
        frame = torch.full((64 + size + 64,), 0xAA, dtype=torch.uint8)
        codec.encode(values, frame[offset : offset + size])
        anchor = torch.full((9,), -1.0)
        codec.decode(frame[offset : offset + size], anchor[2:7])
        assert anchor.tolist() == [-1.0, -1.0, *once_decoded(codec, values).tolist(), -1.0, -1.0]
        assert (frame[:offset] == 0xAA).all()
        assert (frame[offset + size :] == 0xAA).all()

    @all_codecs
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    @pytest.mark.parametrize("position", [0, -1])
    def test_a_value_that_is_not_finite_stays_so_and_can_be_found_by_the_receiver(
        self, codec: Codec, value: float, position: int
    ) -> None:
        values = torch.ones(codec.block_values + 3)
        values[position] = value
        back = once_decoded(codec, values)
        assert not back.isfinite().all()
        healthy = slice(codec.block_values, None) if position == 0 else slice(0, codec.block_values)
        assert back[healthy].isfinite().all()  # the other block does not suffer

    @all_codecs
    @PROPERTY
    @given(numel=st.integers(0, 5000), seed=st.integers(0, 2**31))
    def test_any_bytes_of_the_right_length_can_be_checked_and_decoded(
        self, codec: Codec, numel: int, seed: int
    ) -> None:
        source = torch.Generator().manual_seed(seed)
        data = torch.randint(0, 256, (codec.encoded_bytes(numel),), dtype=torch.uint8, generator=source)
        room = torch.full((numel + 4096,), 7.0)
        received = data.clone()
        assert isinstance(codec.check(data, numel), str)
        codec.decode(data, room[:numel])
        codec.decode_add(data, room[:numel])
        assert (room[numel:] == 7.0).all()
        assert torch.equal(data, received)

    @all_codecs
    @PROPERTY
    @given(numel=st.integers(0, 9000), weight=st.sampled_from([1.0, 0.3, 2.0]), seed=st.integers(0, 2**31))
    def test_adding_what_is_decoded_is_decoding_and_adding(
        self, codec: Codec, numel: int, weight: float, seed: int
    ) -> None:
        source = torch.Generator().manual_seed(seed)
        values, total = torch.randn(numel, generator=source), torch.randn(numel, generator=source)
        data = encoded(codec, values)
        assert codec.check(data, numel) == ""
        expected = total + decoded(codec, data, numel) * weight
        codec.decode_add(data, total, weight)
        assert same_bits(total, expected)

    @pytest.mark.parametrize("codec", mostly_slow(CODECS.values(), [CODECS["int4"]]), ids=CODECS.keys())
    def test_it_can_be_compiled_as_one_graph_with_the_same_bits(self, codec: Codec) -> None:
        values = torch.randn(4096 + 37, generator=torch.Generator().manual_seed(5))
        torch.compiler.reset()
        compiled = torch.compile(codec.encode, fullgraph=True, dynamic=False, backend="aot_eager")
        out = torch.empty(codec.encoded_bytes(values.numel()), dtype=torch.uint8)
        compiled(values, out)
        assert torch.equal(out, encoded(codec, values))

    def test_the_sizes_are_those_of_the_documentation(self) -> None:
        table = Path(__file__).parents[3].joinpath("docs/reference/codecs.md").read_text()
        for name, codec in CODECS.items():
            assert f"| `{name}` | {bytes_per_value(codec):.5g} |" in table, (name, bytes_per_value(codec))

    @pytest.mark.parametrize(
        ("name", "needs"), [("sparse64", True), ("sparse7", True), ("int4", False), ("bf16", False)]
    )
    def test_it_says_whether_it_needs_error_feedback(self, name: str, needs: bool) -> None:
        assert get_codec(name).needs_feedback is needs

    def test_an_unknown_one_is_refused_listing_the_known_ones(self) -> None:
        with pytest.raises(ConfigError, match=r"unknown codec 'zip'; known: .*bf16.*fp32"):
            get_codec("zip")

    @pytest.mark.parametrize("name", ["sparse513", "sparse9999"])
    def test_a_sparse_one_that_would_keep_too_much_is_refused(self, name: str) -> None:
        with pytest.raises(ConfigError, match="keeps 1 to 512 of 4096 values"):
            get_codec(name)

    @pytest.mark.parametrize(
        "name", ["sparse", "sparse0", "sparse064", "sparse-1", "sparse64 ", "sparse10000", "SPARSE64"]
    )
    def test_a_name_has_one_spelling(self, name: str) -> None:
        with pytest.raises(ConfigError, match="unknown codec"):
            get_codec(name)


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
