"""Tensors over bytes and bytes of tensors."""

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amounts import cases
from outerstep.core.state import bytes_of, fp32_views
from outerstep.wire.frames import layout

Place = tuple[str, tuple[int, ...], int]
PLACES: list[Place] = [("matrix", (2, 3), 0), ("nothing", (0, 4), 24), ("scalar", (), 24), ("vector", (3,), 32)]
FIRST_BYTE = 64
DATA_BYTES = 44


def buffer_of(first_byte: int = FIRST_BYTE) -> memoryview:
    """Head of `first_byte` bytes, then the numbers 0, 1, 2, …"""
    return memoryview(bytearray(bytes(first_byte) + struct.pack("<11f", *range(DATA_BYTES // 4))))


class TestViews:
    def test_each_tensor_has_its_name_shape_type_and_values(self) -> None:
        views = fp32_views(buffer_of(), PLACES, FIRST_BYTE)
        assert list(views) == ["matrix", "nothing", "scalar", "vector"]
        assert {name: tuple(view.shape) for name, view in views.items()} == {n: shape for n, shape, _ in PLACES}
        assert all(view.dtype == torch.float32 for view in views.values())
        assert views["matrix"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
        assert views["scalar"].item() == 6.0
        assert views["vector"].tolist() == [8.0, 9.0, 10.0]

    @pytest.mark.parametrize("first_byte", [0, 64, 128])
    def test_offsets_count_from_the_first_byte(self, first_byte: int) -> None:
        views = fp32_views(buffer_of(first_byte), PLACES, first_byte)
        assert views["vector"].tolist() == [8.0, 9.0, 10.0]

    def test_what_is_written_into_a_view_is_in_the_buffer(self) -> None:
        buffer = buffer_of()
        views = fp32_views(buffer, PLACES, FIRST_BYTE)
        views["matrix"][1, 2] = -1.5
        views["scalar"].fill_(-2.5)
        assert struct.unpack_from("<f", buffer, FIRST_BYTE + 20) == (-1.5,)
        assert struct.unpack_from("<f", buffer, FIRST_BYTE + 24) == (-2.5,)

    def test_what_is_written_into_the_buffer_is_in_the_view(self) -> None:
        buffer = buffer_of()
        views = fp32_views(buffer, PLACES, FIRST_BYTE)
        struct.pack_into("<f", buffer, FIRST_BYTE + 32, 77.0)
        assert views["vector"].tolist() == [77.0, 9.0, 10.0]

    def test_two_rounds_of_views_see_the_same_memory(self) -> None:
        buffer = buffer_of()
        fp32_views(buffer, PLACES, FIRST_BYTE)["vector"].mul_(2.0)
        assert fp32_views(buffer, PLACES, FIRST_BYTE)["vector"].tolist() == [16.0, 18.0, 20.0]

    @pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (2, 0, 3)])
    @pytest.mark.parametrize("offset", [0, 40, DATA_BYTES])
    def test_a_tensor_without_values_has_a_view_wherever_it_lies(self, shape: tuple[int, ...], offset: int) -> None:
        view = fp32_views(buffer_of(), [("w", shape, offset)], FIRST_BYTE)["w"]
        assert (tuple(view.shape), view.dtype, view.numel()) == (shape, torch.float32, 0)

    def test_a_buffer_of_nothing_can_hold_tensors_of_nothing(self) -> None:
        assert fp32_views(memoryview(bytearray()), [("w", (0, 2), 0)], 0)["w"].shape == (0, 2)
        assert fp32_views(memoryview(bytearray()), [], 0) == {}

    def test_the_memory_outlives_the_name_of_its_buffer(self) -> None:
        buffer = buffer_of()
        view = fp32_views(buffer, PLACES, FIRST_BYTE)["vector"]
        del buffer
        assert view.tolist() == [8.0, 9.0, 10.0]

    def test_a_place_beyond_the_buffer_is_refused_rather_than_read(self) -> None:
        with pytest.raises(ValueError, match="buffer"):
            fp32_views(buffer_of(), [("w", (4,), 32)], FIRST_BYTE)

    @cases(100)
    @given(st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=6), st.integers(0, 2**31))
    def test_what_bytes_of_wrote_into_a_frame_the_views_read_back(
        self, shapes: list[tuple[int, ...]], seed: int
    ) -> None:
        source = torch.Generator().manual_seed(seed)
        tensors = {f"w{i}": torch.randn(shape, generator=source) for i, shape in enumerate(shapes)}
        made = layout("fp32", [(n, tuple(t.shape), 4 * t.numel()) for n, t in tensors.items()])
        frame = memoryview(bytearray(made.size_bytes))
        for name, shape, offset in made.places:
            begin = made.data_begin + offset
            frame[begin : begin + 4 * math.prod(shape)] = bytes_of(tensors[name])
        views = fp32_views(frame, made.places, made.data_begin)
        assert views.keys() == tensors.keys()
        assert all(torch.equal(views[name], tensors[name]) for name in tensors)


class TestBytes:
    def test_they_are_the_values_in_order(self) -> None:
        assert bytes(bytes_of(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))) == struct.pack("<4f", 1, 2, 3, 4)

    def test_a_contiguous_tensor_is_not_copied(self) -> None:
        tensor = torch.zeros(3)
        found = bytes_of(tensor)
        tensor[1] = 5.0
        assert bytes(found) == struct.pack("<3f", 0, 5, 0)

    @pytest.mark.parametrize(
        "tensor",
        [
            torch.arange(6.0).reshape(2, 3).t(),
            torch.arange(12.0)[::3],
            torch.arange(12.0).reshape(3, 4)[:, 1:3],
            torch.ones(1).expand(4),
            torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        ],
        ids=["transposed", "every third", "columns", "expanded", "permuted"],
    )
    def test_a_tensor_that_is_not_contiguous_is_read_as_it_looks(self, tensor: torch.Tensor) -> None:
        assert not tensor.is_contiguous()
        values = tensor.flatten().tolist()
        assert bytes(bytes_of(tensor)) == struct.pack(f"<{len(values)}f", *values)

    def test_a_scalar_has_the_bytes_of_its_value(self) -> None:
        assert bytes(bytes_of(torch.tensor(1.5))) == struct.pack("<f", 1.5)

    @pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
    def test_a_tensor_without_values_has_no_bytes(self, shape: tuple[int, ...]) -> None:
        assert bytes(bytes_of(torch.zeros(shape))) == b""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8])
    def test_every_type_has_its_own_bytes(self, dtype: torch.dtype) -> None:
        tensor = torch.tensor([1, 2, 3], dtype=dtype)
        found = bytes_of(tensor)
        assert found.nbytes == 3 * tensor.element_size()
        assert torch.equal(torch.frombuffer(bytearray(found), dtype=dtype), tensor)

    def test_a_parameter_that_wants_gradients_can_be_read(self) -> None:
        assert bytes(bytes_of(torch.nn.Parameter(torch.ones(2)))) == struct.pack("<2f", 1, 1)
