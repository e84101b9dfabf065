"""A contribution is checked and read the same, however it is cut: into blocks, parts or sections."""

from __future__ import annotations

import gc
import math
import tracemalloc
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from amounts import cases
from outerstep.core.codecs import get_codec
from outerstep.errors import BadFrame, BadTensors, NotFinite
from outerstep.server import decoding
from outerstep.server.decoding import Decoder, Decoders, Findings, UpTensor
from outerstep.tiling import ModelTiling
from outerstep.topology.encode import encode_frame
from outerstep.types import Box, ParameterSpec, Tiling
from outerstep.wire.frames import rows_of, section_layout

PROPERTY = cases(60)
CODECS = ["fp32", "bf16", "int8", "int4", "e3m0", "sparse64"]
SHAPES = [(33, 700), (), (5,), (0, 3), (1, 9000), (7, 1)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "BLOCK_VALUES", 4096)


def tensors(codec: str, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[UpTensor]:
    return [UpTensor(f"t{i}", shape, get_codec(codec)) for i, shape in enumerate(shapes)]


def draw(seed: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {f"t{i}": torch.randn(shape, generator=source) for i, shape in enumerate(shapes)}


def encode(values: dict[str, Tensor], codec: str, sections: int = 1) -> memoryview:
    coder, whole = get_codec(codec), bytearray()
    shapes = {name: tuple(value.shape) for name, value in values.items()}
    for section in range(sections):
        up = section_layout(codec, [(n, s, coder.encoded_bytes) for n, s in shapes.items()], sections, section)
        rows = {name: rows_of(shape, sections, section) for name, shape in shapes.items()}
        ours = {n: values[n].reshape(-1)[r.first_value : r.first_value + r.numel] for n, r in rows.items()}
        whole += encode_frame(ours, up, dict.fromkeys(values, coder))
    return memoryview(whole)


def norm_precision(codec: str) -> float:
    """bf16 is looked at as it is, and has the norm that bf16 can hold."""
    return 2**-7 if codec == "bf16" else 1e-5


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("sections", [1, 2, 5, 40])
def test_any_range_of_values_is_read_as_the_whole_is(codec: str, sections: int) -> None:
    payload, decoder = encode(draw(1), codec, sections), Decoder(codec, tensors(codec), sections)
    data = torch.frombuffer(payload, dtype=torch.uint8)
    norm = decoder.check(payload)
    squares = 0.0
    for i, shape in enumerate(SHAPES):
        numel = math.prod(shape)
        if not numel:
            continue
        whole = torch.empty(numel)
        decoder.read(data, f"t{i}", 0, numel, whole)
        squares += float(whole.double().square().sum())
        for start, stop in [(0, 1), (numel - 1, numel), (numel // 3, numel // 2 + 1), (0, numel // 2 + 1)]:
            part = torch.empty(stop - start)
            decoder.read(data, f"t{i}", start, stop, part)
            assert torch.equal(part, whole[start:stop])
    assert norm == pytest.approx(math.sqrt(squares), rel=norm_precision(codec))


class TestArriving:
    @PROPERTY
    @given(
        codec=st.sampled_from(CODECS),
        sections=st.integers(1, 6),
        borders=st.lists(st.integers(1, 200_000), max_size=8),
    )
    def test_what_is_seen_part_by_part_is_what_is_seen_at_once(
        self, codec: str, sections: int, borders: list[int]
    ) -> None:
        payload, decoder = encode(draw(2), codec, sections), Decoder(codec, tensors(codec), sections)
        cuts = sorted({0, len(payload), *(border for border in borders if border < len(payload))})
        seen = [decoder.look(payload, decoder.blocks_inside(begin, end)) for begin, end in pairwise(cuts)]
        looked_at = [block for findings in seen for block in findings.blocks]
        assert len(looked_at) == len(set(looked_at))
        assert len(looked_at) >= decoder.block_count - (len(cuts) - 2)  # all but those across a border
        assert decoder.check(payload, seen) == pytest.approx(decoder.check(payload), rel=norm_precision(codec))

    def test_nothing_is_looked_at_before_all_of_its_bytes_are_there(self) -> None:
        payload, decoder = encode(draw(2), "int8", 3), Decoder("int8", tensors("int8"), 3)
        ends = sorted({decoder.blocks_inside(0, byte).stop: byte for byte in range(len(payload), -1, -1)}.items())
        assert [blocks for blocks, _ in ends] == list(range(decoder.block_count + 1))
        for blocks, byte in ends[1:]:
            damaged = bytearray(payload[:byte]) + b"\xff" * (len(payload) - byte)
            assert decoder.look(memoryview(damaged), range(blocks)).refusal is None

    @pytest.mark.parametrize("where", [0, 4095, 4096, 33 * 700 - 1])
    @pytest.mark.parametrize("part_bytes", [1000, 70_000])
    def test_a_bad_value_is_found_wherever_it_is(self, where: int, part_bytes: int) -> None:
        values = draw(3)
        values["t0"].view(-1)[where] = float("inf")
        payload, decoder = encode(values, "fp32"), Decoder("fp32", tensors("fp32"))
        cuts = [*range(0, len(payload), part_bytes), len(payload)]
        seen = [decoder.look(payload, decoder.blocks_inside(begin, end)) for begin, end in pairwise(cuts)]
        with pytest.raises(NotFinite, match="tensor 't0' holds NaN or Inf"):
            decoder.check(payload, seen)


class TestRefused:
    def test_a_header_of_other_tensors_is_said_before_anything_about_the_values(self) -> None:
        decoder = Decoder("fp32", tensors("fp32"))
        payload = encode(draw(1), "fp32")
        damaged = bytearray(payload)
        at = bytes(payload).index(b'"t0"')
        damaged[at : at + 4] = b'"u0"'
        nan = Findings(range(decoder.block_count), 0.0, NotFinite("tensor 't0' holds NaN or Inf"))
        with pytest.raises(BadTensors, match="'t0' is missing; 'u0' is unknown"):
            decoder.check(memoryview(damaged), [nan])

    def test_bytes_that_a_sparse_codec_cannot_mean(self) -> None:
        payload = bytearray(encode(draw(1, [(1, 8192)]), "sparse64"))
        begin = len(payload) - get_codec("sparse64").encoded_bytes(8192)
        payload[begin + 8 : begin + 16] = b"\xff" * 8  # indices that do not ascend
        with pytest.raises(BadFrame, match="tensor 't0' cannot be decoded: the indices of a chunk must ascend"):
            Decoder("sparse64", tensors("sparse64", [(1, 8192)])).check(memoryview(payload))

    @pytest.mark.parametrize(("value", "words"), [(1e19, "about 1e[+]19, which is absurd"), (math.nan, "NaN or Inf")])
    def test_absurd_values(self, value: float, words: str) -> None:
        values = draw(1)
        values["t4"][0, 4500] = value
        with pytest.raises(NotFinite, match=f"tensor 't4' holds .*{words}"):
            Decoder("bf16", tensors("bf16")).check(encode(values, "bf16"))

    def test_large_values_whose_squares_fp32_cannot_hold_are_taken(self) -> None:
        values = draw(1)
        values["t2"].fill_(1e17)
        norm = Decoder("fp32", tensors("fp32")).check(encode(values, "fp32"))
        assert norm == pytest.approx(math.sqrt(5) * 1e17, rel=1e-6)


def test_thousands_of_sections_take_little_memory() -> None:
    many = Decoder("bf16", tensors("bf16", [(4096, 2)] * 20), 4096)
    assert many._begins.itemsize * len(many._begins) < 1 << 20
    assert many.block_count == 20 * 4096


class TestWhatIsKept:
    def test_decoders_of_all_fragments_have_one_bound_and_the_last_is_always_kept(self) -> None:
        made = list[int]()

        def find(decoders: Decoders, sections: int) -> Decoder:
            def make() -> Decoder:
                made.append(sections)
                return Decoder("fp32", tensors("fp32"), sections)

            return decoders.find(("a store", sections), make)

        decoders = Decoders(most_runs=31 * len(SHAPES))
        kept = [find(decoders, sections) for sections in (10, 20)]
        assert [find(decoders, sections) for sections in (10, 20)] == kept
        assert made == [10, 20]
        find(decoders, 11)
        assert find(decoders, 20) is kept[1]
        find(decoders, 10)
        assert made == [10, 20, 11, 10]
        large = find(decoders, 300)
        assert find(decoders, 300) is large
        find(decoders, 10)
        assert made == [10, 20, 11, 10, 300, 10]

    def test_what_a_tiling_and_its_decoder_take_is_some_bytes_for_each_box(self) -> None:
        """Half a million boxes, the most there may be, were a few hundred megabytes; and each of many workers has its
        own."""
        sections, count = 256, 200
        specs = [ParameterSpec(name=f"t{i}", shape=(sections, 4), dtype="float32") for i in range(count)]
        boxes = tuple(Box((i, 0), (1, 4), (i,)) for i in range(sections))
        tiling = ModelTiling(Tiling(sections=sections, patterns=(boxes,), tensors=(0,) * count), specs)
        parts = [UpTensor(spec.name, spec.shape, get_codec("int4")) for spec in specs]
        gc.collect()
        tracemalloc.start()
        try:
            fragment = tiling.fragment([spec.name for spec in specs])
            decoder = Decoder("int4", parts, fragment)
            assert len(fragment.held[0]) == count
            gc.collect()
            taken, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert decoder.runs == sections * count
        assert taken < 80 * decoder.runs
