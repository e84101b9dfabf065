"""Frames: one layout for given tensors, and a refusal by name for everything else."""

import io
import json
import pickle
import struct
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amounts import cases
from outerstep.errors import BadFrame, BadTensors, Refused, UnsupportedMedia
from outerstep.wire.frames import (
    DATA_ALIGNMENT,
    HEADER_SLACK,
    MAGIC,
    TENSOR_ALIGNMENT,
    Layout,
    check_frame,
    layout,
    parse_frame,
)

FUZZ = cases(300)
Tensors = list[tuple[str, tuple[int, ...], int]]
Row = list[object]

names = st.text(min_size=1, max_size=30)
tensor_lists: st.SearchStrategy[Tensors] = st.lists(
    st.tuples(names, st.lists(st.integers(0, 50), max_size=4).map(tuple), st.integers(0, 200)),
    max_size=8,
    unique_by=lambda tensor: tensor[0],
)

EXPECTED = layout("fp32", [("h.0.weight", (2, 4), 32), ("h.0.bias", (3,), 12), ("head", (1,), 4)])
ROWS: list[Row] = [["h.0.weight", [2, 4], 0, 32], ["h.0.bias", [3], 32, 44], ["head", [1], 48, 52]]
DATA_BYTES = 56
MAX_HEADER_BYTES = HEADER_SLACK * EXPECTED.data_begin


def frame_of(made: Layout, fill: int = 0x5A) -> bytes:
    """The frame of these tensors, every byte of them `fill` and the padding zero."""
    frame = bytearray(made.prefix + bytes(made.size_bytes - made.data_begin))
    for entry in made.entries:
        size = entry.end - entry.begin
        frame[made.data_begin + entry.begin : made.data_begin + entry.end] = bytes([fill]) * size
    return bytes(frame)


def padding_of(made: Layout) -> dict[int, str]:
    """Position in the frame -> the tensor after which it is padding."""
    return {
        made.data_begin + position: entry.name
        for entry in made.entries
        for position in range(entry.end, entry.end + -entry.end % TENSOR_ALIGNMENT)
    }


PADDING = padding_of(EXPECTED)


def with_header(header: object, data_bytes: int = DATA_BYTES) -> bytes:
    """A frame whose header is this JSON value (or this text), padded as it should be."""
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % DATA_ALIGNMENT)
    return MAGIC + struct.pack("<I", len(text)) + text + bytes(data_bytes)


def with_rows(rows: list[Row], codec: str = "fp32", data_bytes: int = DATA_BYTES) -> bytes:
    return with_header({"codec": codec, "tensors": rows}, data_bytes)


def check(frame: bytes | bytearray, expected: Layout = EXPECTED) -> None:
    check_frame(memoryview(frame), expected)


class TestLayout:
    @FUZZ
    @given(codec=st.sampled_from(["fp32", "bf16"]), tensors=tensor_lists)
    def test_a_frame_laid_out_for_some_tensors_is_the_frame_of_those_tensors(
        self, codec: str, tensors: Tensors
    ) -> None:
        made = layout(codec, tensors)
        frame = frame_of(made)
        check(frame, made)
        header = parse_frame(memoryview(frame), max_header_bytes=made.data_begin)
        assert header == made.header
        assert header.codec == codec
        assert [(e.name, e.shape, e.end - e.begin) for e in header.tensors] == tensors
        assert made.places == [(e.name, e.shape, e.begin) for e in header.tensors]
        assert len(frame) == made.size_bytes

    @FUZZ
    @given(tensors=tensor_lists)
    def test_data_and_tensors_begin_where_the_format_says(self, tensors: Tensors) -> None:
        made = layout("fp32", tensors)
        assert made.data_begin % DATA_ALIGNMENT == 0
        borders = [0, *(border for e in made.entries for border in (e.begin, e.end)), made.size_bytes - made.data_begin]
        assert borders == sorted(borders)
        assert all(e.begin % TENSOR_ALIGNMENT == 0 for e in made.entries)
        gaps = [after.begin - before.end for before, after in pairwise(made.entries)]
        assert all(0 <= gap < TENSOR_ALIGNMENT for gap in gaps)

    @FUZZ
    @given(one=tensor_lists, other=tensor_lists)
    def test_frames_of_different_tensors_never_pass_for_each_other(self, one: Tensors, other: Tensors) -> None:
        if one != other:
            with pytest.raises((BadTensors, BadFrame)):
                check(frame_of(layout("fp32", one)), layout("fp32", other))

    def test_the_documented_bytes(self) -> None:
        made = layout("bf16", [("w", (3,), 6)])
        text = b'{"codec":"bf16","tensors":[["w",[3],0,6]]}'
        assert made.prefix == b"OSF1" + struct.pack("<I", 56) + text.ljust(56)
        assert made.size_bytes == 64 + 8

    def test_the_cases_below_differ_from_a_frame_that_is_accepted(self) -> None:
        check(with_rows(ROWS))


def replaced(index: int, **changes: object) -> list[Row]:
    fields = ("name", "shape", "begin", "end")
    return [
        [changes.get(f, v) for f, v in zip(fields, row, strict=True)] if i == index else row
        for i, row in enumerate(ROWS)
    ]


class TestBrokenOffsets:
    @pytest.mark.row("B08")
    @pytest.mark.parametrize(
        ("frame", "message"),
        [
            (with_rows(replaced(1, begin=24)), "'h.0.bias' .*overlaps the one before it"),
            (with_rows(replaced(1, begin=0)), "'h.0.bias' .*overlaps the one before it"),
            (with_rows(replaced(1, begin=40)), "'h.0.bias' .*leaves a hole before it"),
            (with_rows(replaced(2, begin=44, end=48)), "'head' .*must begin at 48"),
            (with_rows(replaced(0, begin=8, end=40)), "'h.0.weight' .*leaves a hole before it: it must begin at 0"),
            (with_rows(replaced(1, end=16)), "'h.0.bias' at .32, 16."),
            (with_rows(replaced(2, name="h.0.bias")), "'h.0.bias' appears twice"),
            (with_rows(ROWS, data_bytes=DATA_BYTES + 8), "trailing bytes: the tensors take 56 bytes, the frame has 64"),
            (with_rows(ROWS, data_bytes=DATA_BYTES + 1), "trailing bytes"),
            (with_rows(ROWS, data_bytes=DATA_BYTES - 1), "too few bytes"),
            (with_rows(replaced(2, end=2**53)), "too few bytes"),
            (with_rows([]), "trailing bytes: the tensors take 0 bytes"),
        ],
    )
    def test_a_frame_whose_offsets_do_not_add_up_is_refused_naming_the_tensor(self, frame: bytes, message: str) -> None:
        with pytest.raises(BadFrame, match=message) as refusal:
            check(frame)
        assert refusal.value.status == 400


class TestPadding:
    def test_there_is_padding_behind_tensors_inside_and_at_the_end(self) -> None:
        assert set(PADDING.values()) == {"h.0.bias", "head"}
        assert len(PADDING) == 8

    @pytest.mark.parametrize(("position", "name"), PADDING.items())
    @pytest.mark.parametrize("value", [0x01, 0x20, 0x80, 0xFF])
    def test_padding_that_is_not_zero_is_refused_naming_the_tensor_before_it(
        self, position: int, name: str, value: int
    ) -> None:
        frame = bytearray(frame_of(EXPECTED))
        frame[position] = value
        with pytest.raises(BadFrame, match=f"^the padding after tensor '{name}' is not zero$") as refusal:
            check(frame)
        assert refusal.value.status == 400

    @FUZZ
    @given(tensors=tensor_lists, data=st.data())
    def test_no_byte_of_padding_goes_unseen_in_any_frame(self, tensors: Tensors, data: st.DataObject) -> None:
        made = layout("fp32", tensors)
        padding = padding_of(made)
        if padding:
            position = data.draw(st.sampled_from(sorted(padding)))
            frame = bytearray(frame_of(made))
            frame[position] = data.draw(st.integers(1, 255))
            with pytest.raises(BadFrame) as refusal:
                check(frame, made)
            assert refusal.value.message == f"the padding after tensor {padding[position]!r} is not zero"


class TestBrokenHeaders:
    @pytest.mark.parametrize(
        "header",
        [
            b"not json",
            b"",
            b"\xff\xfe{}",
            b"null",
            b"[]",
            b"{}",
            b"[" * 1000,
            b'{"codec":"fp32","codec":"fp32","tensors":[]}',
            b'{"codec":"fp32","tensors":[["w",[1],0,NaN]]}',
            b'{"codec":"fp32","tensors":[["w",[1],0,1e999]]}',
            {"codec": "fp32"},
            {"tensors": ROWS},
            {"codec": "fp32", "tensors": ROWS, "dtype": "F32"},
            {"codec": 4, "tensors": ROWS},
            {"codec": "x" * 257, "tensors": ROWS},
            {"codec": "fp32", "tensors": {"head": [1, 0, 4]}},
            {"codec": "fp32", "tensors": [["head", [1], 0]]},
            {"codec": "fp32", "tensors": [["head", [1], 0, 4, 0]]},
            {"codec": "fp32", "tensors": [["", [1], 0, 4]]},
            {"codec": "fp32", "tensors": [["n" * 513, [1], 0, 4]]},
            {"codec": "fp32", "tensors": [["head", [-1], 0, 4]]},
            {"codec": "fp32", "tensors": [["head", [1.0], 0, 4]]},
            {"codec": "fp32", "tensors": [["head", [True], 0, 4]]},
            {"codec": "fp32", "tensors": [["head", [1], -8, -4]]},
            {"codec": "fp32", "tensors": [["head", [1], 0, 2**64]]},
            {"codec": "fp32", "tensors": [["head", [1], 0, 10**400]]},
            {"codec": "fp32", "tensors": [["head", [1], "0", "4"]]},
        ],
        ids=lambda header: repr(header)[:60],
    )
    def test_a_header_that_is_not_one_is_refused_as_a_bad_frame(self, header: object) -> None:
        with pytest.raises(BadFrame, match=r"frame header: (not|JSON is nested)"):
            check(with_header(header))

    @pytest.mark.parametrize("length", [0xFFFFFFFF, 2**31, len(frame_of(EXPECTED)) - 7])
    def test_a_header_longer_than_its_frame_is_refused_before_anything_is_read(self, length: int) -> None:
        frame = MAGIC + struct.pack("<I", length) + frame_of(EXPECTED)[8:]
        with pytest.raises(BadFrame, match=f"the header says {length} bytes"):
            check(frame)

    @pytest.mark.parametrize("header", [b"[" * 100_000, b" " * 100_000, b'{"codec":"' + b"x" * 100_000], ids=repr)
    def test_a_header_far_longer_than_these_tensors_need_is_refused_unread(self, header: bytes) -> None:
        frame = with_header(header)
        length = struct.unpack_from("<I", frame, 4)[0]
        with pytest.raises(
            BadFrame, match=f"the header says {length} bytes; at most {MAX_HEADER_BYTES} make sense here"
        ):
            check(frame)

    def test_a_header_is_read_up_to_its_cap_and_not_one_byte_further(self) -> None:
        frame = memoryview(frame_of(EXPECTED))
        length = EXPECTED.data_begin - 8
        assert parse_frame(frame, max_header_bytes=length) == EXPECTED.header
        with pytest.raises(BadFrame, match=f"the header says {length} bytes; at most {length - 1} make sense here"):
            parse_frame(frame, max_header_bytes=length - 1)

    @pytest.mark.parametrize(
        "text",
        [
            json.dumps({"codec": "fp32", "tensors": ROWS}).encode(),
            json.dumps({"codec": "fp32", "tensors": ROWS}, indent=1).encode(),
            json.dumps({"tensors": ROWS, "codec": "fp32"}, separators=(",", ":")).encode(),
            b" " + EXPECTED.prefix[8:].rstrip(),
            EXPECTED.prefix[8:].rstrip() + b"\n",
            EXPECTED.prefix[8:].replace(b"fp32", b"\\u0066p32"),
            EXPECTED.prefix[8:] + b" " * DATA_ALIGNMENT,
        ],
        ids=["spaces", "lines", "other order", "space before", "line feed after", "escape", "more padding"],
    )
    def test_a_header_that_says_the_same_in_other_bytes_is_refused(self, text: bytes) -> None:
        frame = with_header(text)
        assert parse_frame(memoryview(frame), max_header_bytes=MAX_HEADER_BYTES) == EXPECTED.header
        with pytest.raises(BadFrame, match="says the right things, but not as the format writes them: compact JSON"):
            check(frame)

    def test_data_that_begins_off_its_alignment_is_refused(self) -> None:
        text = EXPECTED.prefix[8:] + b" "
        frame = MAGIC + struct.pack("<I", len(text)) + text + bytes(DATA_BYTES)
        with pytest.raises(BadFrame, match="multiple of 64, got"):
            check(frame)

    @pytest.mark.parametrize("frame", [b"", b"OSF1", b"OSF1\0\0\0"])
    def test_a_frame_shorter_than_its_fixed_head_is_refused(self, frame: bytes) -> None:
        with pytest.raises(BadFrame, match=f"at least 8 bytes, got {len(frame)}"):
            check(frame)

    @pytest.mark.parametrize("start", [b"OSF2", b"\0\0\0\0", b"GGUF", b"osf1"])
    def test_another_magic_is_refused_showing_both(self, start: bytes) -> None:
        with pytest.raises(BadFrame, match="begins with b'OSF1', got b"):
            check(start + frame_of(EXPECTED)[4:])


class TestOtherTensors:
    @pytest.mark.row("B09")
    @pytest.mark.parametrize(
        ("frame", "message"),
        [
            (with_rows(ROWS[:2], data_bytes=48), "'head' is missing"),
            (with_rows([*ROWS, ["extra", [1], 56, 60]], data_bytes=64), "'extra' is unknown"),
            (with_rows(replaced(2, name="haed")), "'head' is missing; 'haed' is unknown"),
            (with_rows(replaced(0, shape=[4, 2])), r"'h.0.weight': got \[4, 2\], run has \[2, 4\]"),
            (with_rows(replaced(0, shape=[8])), r"'h.0.weight': got \[8\], run has \[2, 4\]"),
            (with_rows(replaced(2, shape=[])), r"'head': got \[\], run has \[1\]"),
            (with_rows(replaced(2, end=50)), "'head': got 2 bytes, fp32 takes 4"),
            (with_rows(ROWS, codec="bf16"), "encoded as 'bf16', run has 'fp32'"),
        ],
    )
    def test_tensors_that_are_not_this_fragments_are_refused_by_name(self, frame: bytes, message: str) -> None:
        with pytest.raises(BadTensors, match=message) as refusal:
            check(frame)
        assert refusal.value.status == 422

    def test_tensors_in_another_order_are_refused(self) -> None:
        one, other = layout("fp32", [("a", (1,), 4), ("b", (1,), 4)]), layout("fp32", [("b", (1,), 4), ("a", (1,), 4)])
        with pytest.raises(BadTensors, match="in another order"):
            check(frame_of(one), other)

    def test_of_many_differences_the_first_few_are_named_and_the_rest_counted(self) -> None:
        expected = layout("fp32", [(f"w{i}", (1,), 4) for i in range(10)])
        with pytest.raises(BadTensors, match="'w0' is missing; 'w1' is missing; 'w2' is missing; and 7 more"):
            check(frame_of(layout("fp32", [])), expected)


def saved_by_torch() -> bytes:
    buffer = io.BytesIO()
    torch.save({"w": torch.zeros(2)}, buffer)
    return buffer.getvalue()


class TestOtherFormats:
    @pytest.mark.row("B07")
    @pytest.mark.parametrize(
        "payload",
        [
            *[pickle.dumps({"w": [1.0, 2.0]}, protocol=p) for p in range(2, pickle.HIGHEST_PROTOCOL + 1)],
            saved_by_torch(),
        ],
        ids=["pickle 2", "pickle 3", "pickle 4", "pickle 5", "torch.save"],
    )
    def test_a_pickle_or_a_torch_file_is_refused_saying_what_is_accepted(self, payload: bytes) -> None:
        with pytest.raises(UnsupportedMedia, match=r"looks like a pickle or a torch\.save file") as refusal:
            check(payload)
        assert refusal.value.status == 415
        assert "OSF1" in refusal.value.hint


def refusal_of(frame: bytes | bytearray) -> Refused | None:
    """What check_frame says; any exception that is not a Refused comes through and fails the test."""
    try:
        check(frame)
    except Refused as refused:
        return refused
    return None


class TestFuzz:
    @FUZZ
    @given(st.binary(max_size=300))
    def test_arbitrary_bytes_are_refused_and_nothing_else_happens(self, data: bytes) -> None:
        assert refusal_of(data) is not None

    @FUZZ
    @given(st.binary(max_size=120), st.integers(0, 200))
    def test_arbitrary_headers_are_refused_as_bad_frames_or_tensors(self, header: bytes, data_bytes: int) -> None:
        assert isinstance(refusal_of(with_header(header, data_bytes)), BadFrame | BadTensors)

    @FUZZ
    @given(position=st.integers(0, EXPECTED.size_bytes - 1), flip=st.integers(1, 255))
    def test_one_changed_byte_is_refused_in_head_and_padding_and_not_looked_at_in_the_data(
        self, position: int, flip: int
    ) -> None:
        frame = bytearray(frame_of(EXPECTED))
        frame[position] ^= flip
        assert (refusal_of(frame) is not None) == (position < EXPECTED.data_begin or position in PADDING)

    @FUZZ
    @given(begin=st.integers(0, EXPECTED.size_bytes), removed=st.integers(0, 60), inserted=st.binary(max_size=60))
    def test_a_piece_cut_out_and_another_put_in_is_refused_unless_only_data_changed(
        self, begin: int, removed: int, inserted: bytes
    ) -> None:
        valid = frame_of(EXPECTED)
        frame = valid[:begin] + inserted + valid[begin + removed :]
        still_valid = len(frame) == len(valid) and frame.startswith(EXPECTED.prefix)
        still_valid = still_valid and not any(frame[position] for position in PADDING)
        assert (refusal_of(frame) is None) == still_valid

    def test_every_truncation_is_refused_as_a_bad_frame(self) -> None:
        valid = frame_of(EXPECTED)
        for size in range(len(valid)):
            assert isinstance(refusal_of(valid[:size]), BadFrame), size

    @FUZZ
    @given(st.binary(min_size=1, max_size=100))
    def test_anything_behind_the_last_tensor_is_refused(self, tail: bytes) -> None:
        refused = refusal_of(frame_of(EXPECTED) + tail)
        assert isinstance(refused, BadFrame)
        assert "trailing bytes" in refused.message

    @FUZZ
    @given(
        st.lists(
            st.tuples(
                st.sampled_from(["h.0.weight", "h.0.bias", "head", "other"]),
                st.lists(st.integers(0, 5), max_size=3),
                st.integers(0, 64),
                st.integers(0, 64),
            ),
            max_size=4,
        )
    )
    def test_made_up_tables_are_refused_naming_what_they_name(
        self, rows: list[tuple[str, list[int], int, int]]
    ) -> None:
        frame = with_rows([list(row) for row in rows])
        if frame.startswith(EXPECTED.prefix):
            return  # hypothesis drew the one good table
        refused = refusal_of(frame)
        assert isinstance(refused, BadFrame | BadTensors)
        named = any(repr(name) in refused.message for name in [*(row[0] for row in rows), "h.0.weight", "head"])
        assert named or "trailing bytes" in refused.message or "too few bytes" in refused.message


@pytest.mark.parametrize("view", [bytes, bytearray, memoryview], ids=lambda view: view.__name__)
def test_any_kind_of_buffer_can_hold_a_frame(view: Callable[[bytes], bytes]) -> None:
    check_frame(memoryview(view(frame_of(EXPECTED))), EXPECTED)
