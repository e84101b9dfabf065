"""int8, int4, E3M0 and the two-bit control, against their definition written out value by value."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from amounts import cases
from outerstep.core.codecs import CONTROL_2BIT, E3M0, INT4, INT8, Codec, compiled
from outerstep.core.codecs.blocks import (
    CPU_PIECE_VALUES,
    DEVICE_PIECE_VALUES,
    Scratch,
    block_scales,
    piece_values,
    put_columns,
)

PROPERTY = cases(60)


def nearest_integer(t: float) -> int:
    return round(t)  # Python's own: ties to even


def nearest_half_integer(t: float) -> int:
    return math.floor(t)  # level = code + ½


def nearest_power_of_two(t: float) -> int:
    """Code: 0 … 7 for 0, 1, 2, … 64, and 8 more for the negative ones; of two equally near ones the larger."""
    sizes = [0, 1, 2, 4, 8, 16, 32, 64]
    nearest = min(range(8), key=lambda m: (abs(abs(t) - sizes[m]), -m))
    return nearest - 8 if math.copysign(1, t) < 0 else nearest


def power_of_two(code: int) -> float:
    size = [0, 1, 2, 4, 8, 16, 32, 64][code & 7]
    return -size if code & 8 and size else size


@dataclass(frozen=True)
class Definition:
    codec: Codec
    bits: int
    block: int
    top: float
    code: Callable[[float], int]
    level: Callable[[int], float]


DEFINITIONS = [
    Definition(INT8, 8, 4096, 127, nearest_integer, lambda c: c - 256 if c > 127 else c),
    Definition(INT4, 4, 256, 7, nearest_integer, lambda c: c - 16 if c > 7 else c),
    Definition(E3M0, 4, 256, 64, nearest_power_of_two, power_of_two),
    Definition(CONTROL_2BIT, 2, 256, 1.5, nearest_half_integer, lambda c: (c - 4 if c > 1 else c) + 0.5),
]
every = pytest.mark.parametrize("of", DEFINITIONS, ids=lambda of: of.codec.name)


def bf16(x: float) -> float:
    """The nearest bfloat16 of a positive fp32 number, ties to even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", x))
    low = bits >> 16
    floats = [struct.unpack("<f", struct.pack("<I", b << 16))[0] for b in (low, low + 1)]
    return float(min(zip(floats, (low, low + 1), strict=True), key=lambda f: (abs(f[0] - x), f[1] % 2))[0])


def scale_of(block: np.ndarray, top: float) -> float:
    absmax = float(np.abs(block).max())
    s = bf16(float(np.float32(absmax) * np.float32(1 / top)))
    if not math.isfinite(top * s) or top * s > 3.4028235e38:  # one bf16 step down
        (bits,) = struct.unpack("<I", struct.pack("<f", s if math.isfinite(s) else 3.4e38))
        s = struct.unpack("<f", struct.pack("<I", ((bits >> 16) - 1) << 16))[0]
    return s if s > 2.0**-125 else 0.0


def defined_bytes(of: Definition, values: np.ndarray) -> bytes:
    out = b""
    for begin in range(0, len(values), of.block):
        block = values[begin : begin + of.block]
        s = scale_of(block, of.top)
        inverse = np.float32(1 / s) if s else np.float32(0)
        codes = [of.code(float(x * inverse)) for x in block]
        lanes = 8 // of.bits
        width = -(-len(codes) // lanes)
        codes += [of.code(0.0)] * (width * lanes - len(codes))
        mask = (1 << of.bits) - 1
        packed = [sum((codes[j + i * width] & mask) << (i * of.bits) for i in range(lanes)) for j in range(width)]
        out += struct.pack("<f", s)[2:] + bytes(packed)
    return out


def defined_values(of: Definition, data: bytes, numel: int) -> list[float]:
    out: list[float] = []
    lanes, mask = 8 // of.bits, (1 << of.bits) - 1
    while len(out) < numel:
        count = min(of.block, numel - len(out))
        width = -(-count // lanes)
        (s,) = struct.unpack("<f", b"\0\0" + data[:2])
        block = [of.level(data[2 + j] >> (i * of.bits) & mask) * s for i in range(lanes) for j in range(width)]
        out += block[:count]
        data = data[2 + width :]
    assert not data
    return out


def encoded(codec: Codec, values: Tensor) -> Tensor:
    out = torch.empty(codec.encoded_bytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, out)
    return out


def decoded(codec: Codec, values: Tensor) -> Tensor:
    out = torch.empty(values.numel())
    codec.decode(encoded(codec, values), out)
    return out


def scales(of: Definition, values: Tensor) -> Tensor:
    """Each value's scale, read from the bytes."""
    data, step = encoded(of.codec, values), 2 + of.block * of.bits // 8
    each = [data[i : i + 2].clone().view(torch.bfloat16).float() for i in range(0, len(data), step)]
    return torch.cat(each).repeat_interleave(of.block)[: len(values)]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Tails, several blocks, magnitudes from the smallest to the largest, zeros and exact ties among them."""
    numel = draw(st.integers(1, 700) | st.sampled_from([256, 512, 4096, 4097, 8191]))
    source = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values = torch.randn(numel, generator=source) * 2.0 ** draw(st.integers(-126, 124))
    if draw(st.booleans()):
        values *= torch.rand(numel, generator=source) ** 8
    for value in draw(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=3)):
        values[draw(st.integers(0, numel - 1))] = value
    return values


@every
@PROPERTY
@given(values=tensors())
def test_the_bytes_are_those_of_the_definition(of: Definition, values: Tensor) -> None:
    assert bytes(encoded(of.codec, values).tolist()) == defined_bytes(of, values.numpy())


@every
@PROPERTY
@given(numel=st.integers(1, 600), seed=st.integers(0, 2**31))
def test_any_bytes_are_decoded_as_the_definition_says(of: Definition, numel: int, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (of.codec.encoded_bytes(numel),), dtype=torch.uint8, generator=source)
    out = torch.empty(numel)
    of.codec.decode(data, out)
    expected = torch.tensor(defined_values(of, bytes(data.tolist()), numel), dtype=torch.float64).float()
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@every
@PROPERTY
@given(values=tensors())
def test_a_value_comes_back_within_half_the_distance_of_two_levels(of: Definition, values: Tensor) -> None:
    error, scale = (values.double() - decoded(of.codec, values)).abs(), scales(of, values).double()
    distance = torch.maximum(scale, values.double().abs() * (2 / 3)) if of.codec is E3M0 else scale
    flushed = scale == 0
    assert (error[~flushed] <= (distance * (0.5 + 2.0**-15))[~flushed]).all()
    assert (values[flushed].abs() <= of.top * 2.0**-124.9).all()


@every
@pytest.mark.parametrize("zero", [0.0, -0.0, 1e-40, -1e-40, 1e-45])
def test_a_block_of_zeros_or_nearly_so_is_plain_zeros(of: Definition, zero: float) -> None:
    values = torch.full((300,), zero)
    data = encoded(of.codec, values)
    assert data[:2].tolist() == [0, 0]
    assert (decoded(of.codec, values).view(torch.int32) == 0).all()  # +0.0, bit by bit


@pytest.mark.parametrize("of", DEFINITIONS[:3], ids=lambda of: of.codec.name)
def test_a_minus_zero_among_others_becomes_a_zero(of: Definition) -> None:
    values = torch.tensor([1.0, -0.0, 0.0, -1e-30])
    assert decoded(of.codec, values).view(torch.int32)[1:].tolist() == [0, 0, 0]


@every
@pytest.mark.parametrize("huge", [3e38, 3.4028234663852886e38, -3.4028234663852886e38])
def test_the_largest_numbers_stay_finite(of: Definition, huge: float) -> None:
    back = decoded(of.codec, torch.tensor([huge, 1.0, huge / 2]))
    assert back.isfinite().all()
    assert back[0].item() == pytest.approx(huge, rel=0.01)


@every
def test_the_largest_value_of_a_block_is_on_the_top_level(of: Definition) -> None:
    values = torch.randn(64 * of.block, generator=torch.Generator().manual_seed(1))
    back, scale = decoded(of.codec, values), scales(of, values)
    top = (back / scale).view(-1, of.block).abs().amax(1)
    assert (top == of.top).all()


@pytest.mark.parametrize(
    ("t", "back"), [(0.49, 0), (0.5, 1), (1.49, 1), (1.5, 2), (2.9, 2), (3, 4), (47, 32), (49, 64)]
)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_e3m0_rounds_to_the_nearest_power_of_two(t: float, back: float, sign: float) -> None:
    assert decoded(E3M0, torch.tensor([64.0, sign * t])).tolist() == [64.0, sign * back if back else 0.0]


def test_what_int8_and_int4_hold_exactly_comes_back_exactly() -> None:
    for codec, top in ((INT8, 127), (INT4, 7)):
        values = torch.arange(-top, top + 1).float() * 2.0**-10
        assert torch.equal(decoded(codec, values), values)


class TestScales:
    def test_a_scale_is_rounded_to_the_nearest_and_ties_to_even(self) -> None:
        half = 2.0**-8  # of the last bit of bf16, at 1
        found = [1.0 + half, 1.0 + 3 * half, 1.0 + half * 1.01, 1.0 + half * 0.99]
        scales, _ = block_scales(torch.tensor(found).view(-1, 1), 1.0)
        assert scales.view(-1).tolist() == [1.0, 1.0 + 4 * half, 1.0 + 2 * half, 1.0]

    def test_or_up_so_that_no_value_exceeds_the_top(self) -> None:
        scales, _ = block_scales(torch.tensor([[1.0 + 2.0**-20], [1.0]]), 1.0, up=True)
        assert scales.view(-1).tolist() == [1.0 + 2.0**-7, 1.0]


class TestOnADeviceThatTakesWholeTensors:
    ELSEWHERE = torch.device("meta")

    def test_scratch_memory_is_there_with_its_shape_and_type(self) -> None:
        made = Scratch().like(torch.empty(2, 3, device=self.ELSEWHERE), "codes", torch.int8)
        assert (made.device, made.shape, made.dtype) == (self.ELSEWHERE, (2, 3), torch.int8)

    def test_a_piece_is_larger_than_on_a_cpu_and_holds_whole_blocks(self) -> None:
        assert piece_values(1 << 30, 4096, self.ELSEWHERE) == DEVICE_PIECE_VALUES
        assert piece_values(1 << 30, 4096, torch.device("cpu")) == CPU_PIECE_VALUES
        assert piece_values(1 << 30, 3000, torch.device("cpu")) == CPU_PIECE_VALUES // 3000 * 3000
        assert piece_values(1 << 30, CPU_PIECE_VALUES + 1, torch.device("cpu")) == CPU_PIECE_VALUES + 1
        assert piece_values(10, 4096, torch.device("cpu")) == 10
        assert piece_values(1, 4096, torch.device("cpu")) == piece_values(0, 4096, torch.device("cpu")) == 1

    def test_columns_are_written_at_once(self) -> None:
        out = torch.empty(2, 5, dtype=torch.uint8, device=self.ELSEWHERE)
        columns = [torch.empty(2, width, dtype=torch.uint8, device=self.ELSEWHERE) for width in (2, 3)]
        put_columns(out, *columns)
        with pytest.raises(RuntimeError):
            put_columns(out, columns[0])


def test_small_pieces_share_the_memory_of_the_one_before() -> None:
    scratch = Scratch()
    first = scratch.like(torch.empty(8), "t")
    assert scratch.like(torch.empty(8), "t").data_ptr() == first.data_ptr()
    assert scratch.like(torch.empty(2, 3), "t").data_ptr() == first.data_ptr()
    assert scratch.like(torch.empty(8), "other").data_ptr() != first.data_ptr()


@dataclass
class FreshMemory(TorchDispatchMode):
    """How many bytes each result has that is not put where an argument is."""

    sizes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = [t.untyped_storage() for t in tree_leaves(result) if isinstance(t, Tensor)]
        self.sizes += [memory.nbytes() for memory in made if memory.data_ptr() not in given]
        return result


class TestMemory:
    """Getting fresh memory from the system can cost more than the arithmetic."""

    def test_a_grid_works_in_the_memory_it_is_given(self) -> None:
        t, spare, codes = torch.linspace(-64, 64, 512).view(2, 256), torch.empty(2, 256), torch.empty(2, 256).char()
        with FreshMemory() as fresh:
            E3M0.grid.codes(t, spare, codes)
            E3M0.grid.levels(codes, spare)
        assert fresh.sizes == []

    def test_a_codec_takes_scratch_for_one_piece_however_many_there_are(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compiled, "all_kernels", lambda: None)  # in torch: compiled, it needs none worth counting
        values = torch.linspace(-1, 1, 3 * CPU_PIECE_VALUES)
        data = torch.empty(E3M0.encoded_bytes(values.numel()), dtype=torch.uint8)
        with FreshMemory() as fresh:
            E3M0.encode(values, data)
        assert [size for size in fresh.sizes if size >= 4 * CPU_PIECE_VALUES] == [4 * CPU_PIECE_VALUES] * 2
        with FreshMemory() as fresh:
            E3M0.decode(data, values)
        assert [size for size in fresh.sizes if size >= CPU_PIECE_VALUES] == [CPU_PIECE_VALUES]


def test_the_weight_of_what_is_added_is_one_unless_said_otherwise() -> None:
    values, out = torch.tensor([7.0, -3.0, 0.0, 1.0]), torch.ones(4)
    data = torch.empty(INT4.encoded_bytes(4), dtype=torch.uint8)
    INT4.encode(values, data)
    INT4.decode_add(data, out)
    assert out.tolist() == [8.0, -2.0, 1.0, 2.0]
