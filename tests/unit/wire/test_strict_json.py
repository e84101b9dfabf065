"""JSON as we accept it: whatever is wrong is a BadRequest, and nothing else."""

import json
import math
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amounts import cases
from outerstep.errors import BadRequest
from outerstep.types import Count, Label, Plain
from outerstep.wire.messages import MAX_DEPTH, convert, decode_json, encode_json

FUZZ = cases(300)
LEVELS = 100_000


class Note(Plain, frozen=True):
    text: Label = ""
    count: Count = 0
    values: tuple[float, ...] = ()
    inner: "Note | None" = None


notes = st.recursive(
    st.none(),
    lambda inner: st.builds(
        Note,
        text=st.text(max_size=50),
        count=st.integers(0, 2**53),
        values=st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=4).map(tuple),
        inner=inner,
    ),
    max_leaves=5,
).filter(lambda note: note is not None)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["text", "count", "values", "inner"]) | st.text(max_size=5), inner, max_size=4
        )
    ),
    max_leaves=12,
)


def nested(levels: int, opening: bytes = b"[", closing: bytes = b"]") -> bytes:
    return opening * levels + closing * levels


def refused_or_note(data: bytes) -> Note | None:
    """Any exception that is not a BadRequest comes through and fails the test."""
    try:
        return decode_json(data, Note)
    except BadRequest:
        return None


class TestAccepted:
    @FUZZ
    @given(notes)
    def test_a_message_survives_encoding_and_decoding(self, note: Note) -> None:
        assert decode_json(encode_json(note), Note) == note

    def test_bytes_may_come_as_a_memoryview(self) -> None:
        assert decode_json(memoryview(b'{"count": 3}'), Note) == Note(count=3)

    def test_missing_fields_take_their_defaults(self) -> None:
        assert decode_json(b" {} ", Note) == Note()

    @pytest.mark.parametrize("text", ["[" * 200, "}" * 60 + "{" * 120, '"[' * 60, "\\" * 60 + "[" * 60, "[\\"])
    def test_brackets_inside_strings_do_not_count_as_levels(self, text: str) -> None:
        assert decode_json(json.dumps({"text": text}).encode(), Note).text == text

    @pytest.mark.parametrize(
        "data", [b'{"text": "\\ud83d\\ude00"}', b'{"text": "\\uD83D\\uDE00"}', '{"text": "😀"}'.encode()]
    )
    def test_a_whole_character_may_be_written_in_two_halves(self, data: bytes) -> None:
        assert decode_json(data, Note).text == "😀"

    def test_an_escaped_backslash_is_not_half_a_character(self) -> None:
        assert decode_json(b'{"text": "\\\\ud800"}', Note).text == "\\ud800"

    def test_siblings_do_not_count_as_levels(self) -> None:
        assert decode_json(b"[" + b"[]," * 1000 + b"[]]", list) == [[]] * 1001

    def test_the_documented_depth_is_accepted_and_one_more_is_not(self) -> None:
        assert decode_json(nested(MAX_DEPTH), list)
        with pytest.raises(BadRequest, match=f"nested deeper than {MAX_DEPTH} levels"):
            decode_json(nested(MAX_DEPTH + 1), list)


class TestRefused:
    @pytest.mark.row("B15")
    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (b'{"values": [NaN]}', "NaN is not a number"),
            (b'{"values": [Infinity]}', "Infinity is not a number"),
            (b'{"values": [-Infinity]}', "-Infinity is not a number"),
            (b'{"values": [1e999]}', "1e999 is out of range"),
            (b'{"values": [-1e999]}', "-1e999 is out of range"),
            (b'{"values": [nan]}', "not acceptable JSON"),
            (b'{"count": 1, "count": 1}', "'count' appears twice"),
            (b'{"inner": {"text": "", "text": ""}}', "'text' appears twice"),
            (b'{"count": 1, "\\u0063ount": 2}', "'count' appears twice"),
            (b'{"text": "\xff"}', "utf-8"),
            (b'{"text": "\xc0\xaf"}', "utf-8"),
            (b'{"text": "\xed\xa0\x80"}', "utf-8"),
            (b"\xef\xbb\xbf{}", "BOM"),
            ('{"text": "x"}'.encode("utf-16"), "utf-8"),
            (b'{"text": "a\nb"}', "control character"),
            (b"", "Expecting value"),
            (b"{", "not acceptable JSON"),
            (b'{"text": "', "not acceptable JSON"),
            (b'{"text": "\\', "not acceptable JSON"),
            (b"{} {}", "Extra data"),
            (b"{'count': 1}", "not acceptable JSON"),
            (b'{"count": 1,}', "not acceptable JSON"),
            (b'{"count": 0x10}', "not acceptable JSON"),
        ],
    )
    def test_what_is_not_strict_json_is_refused_saying_why(self, data: bytes, message: str) -> None:
        with pytest.raises(BadRequest, match=message):
            decode_json(data, Note)

    @pytest.mark.row("B15")
    @pytest.mark.parametrize(
        "data",
        [
            b"[" * LEVELS,
            nested(LEVELS),
            b'{"inner":' * LEVELS,
            nested(LEVELS, b'{"inner":', b"}"),
            b'[{"a":' * LEVELS,
            b'["]",' * LEVELS,
            b'["\\"]",' * LEVELS,
        ],
        ids=["open lists", "lists", "open objects", "objects", "both", "closing in strings", "escaped quotes"],
    )
    def test_a_hundred_thousand_levels_are_refused(self, data: bytes) -> None:
        with pytest.raises(BadRequest, match=f"nested deeper than {MAX_DEPTH} levels"):
            decode_json(data, Note)

    def test_closing_brackets_in_advance_buy_no_depth(self) -> None:
        with pytest.raises(BadRequest, match="not acceptable JSON"):
            decode_json(b"]" * LEVELS + b"[" * LEVELS, Note)

    @pytest.mark.parametrize("digits", [20, 400, 5000])
    @pytest.mark.parametrize("sign", ["", "-"])
    @pytest.mark.parametrize("field", ['"count": {}', '"inner": {{"count": {}}}'])
    def test_an_integer_of_any_size_out_of_range_is_refused(self, digits: int, sign: str, field: str) -> None:
        with pytest.raises(BadRequest):
            decode_json(("{" + field.format(sign + "9" * digits) + "}").encode(), Note)

    @pytest.mark.parametrize("digits", [400, 5000])
    def test_an_integer_too_large_for_a_float_is_refused(self, digits: int) -> None:
        with pytest.raises(BadRequest):
            decode_json(('{"values": [' + "9" * digits + "]}").encode(), Note)

    @pytest.mark.parametrize(
        ("value", "where"),
        [
            ({"cuont": 1}, "cuont"),
            ({"count": "1"}, r"\$\.count"),
            ({"count": 1.0}, r"\$\.count"),
            ({"count": True}, r"\$\.count"),
            ({"count": None}, r"\$\.count"),
            ({"count": -1}, r"\$\.count"),
            ({"count": 2**53 + 1}, r"\$\.count"),
            ({"text": 5}, r"\$\.text"),
            ({"text": "x" * 257}, r"\$\.text"),
            ({"values": "12"}, r"\$\.values"),
            ({"values": [1, "2"]}, r"\$\.values"),
            ({"inner": {"inner": {"count": -1}}}, r"\$\.inner\.inner\.count"),
            ([], "array"),
            ("text", "str"),
            (5, "int"),
            (None, "null"),
        ],
    )
    def test_a_value_of_the_wrong_shape_is_refused_saying_where(self, value: object, where: str) -> None:
        with pytest.raises(BadRequest, match=f"^not a Note: .*{where}"):
            decode_json(json.dumps(value).encode(), Note)

    @pytest.mark.parametrize(
        "data",
        [
            b'{"text": "\\ud800"}',
            b'{"text": "\\uDFFF"}',
            b'{"text": "a\\uD83Db"}',
            b'{"text": "\\ude00\\ud83d"}',
            b'{"text": "\\ud83d\\\\ude00"}',
            b'{"inner": {"text": "\\ud83d"}}',
            b'{"\\ud800": 1}',
            b'{"inner": {"\\udc00": 1}}',
        ],
        ids=repr,
    )
    def test_half_a_character_is_refused_as_key_and_as_value(self, data: bytes) -> None:
        with pytest.raises(BadRequest, match=r"^not acceptable JSON: .*surrogates not allowed"):
            decode_json(data, Note)

    @pytest.mark.parametrize("kind", [dict, Note])
    def test_half_a_character_is_refused_whatever_the_kind_would_allow(self, kind: type) -> None:
        with pytest.raises(BadRequest, match="surrogates not allowed"):
            decode_json(b'{"\\ud800": "\\udc00"}', kind)


class TestMemory:
    @pytest.mark.parametrize(
        "piece",
        [b"x", b"[", b"]", b"{[", b"\\n", b'\\"', b"\\\\", b"a\\t", "é".encode(), "😀".encode(), b"\\ud83d\\ude00"],
        ids=repr,
    )
    def test_a_string_of_four_mib_costs_a_few_times_its_size(self, piece: bytes) -> None:
        text = b'"' + piece * ((4 << 20) // len(piece)) + b'"'
        tracemalloc.start()
        try:
            found = decode_json(memoryview(text), str)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert found == json.loads(text)
        assert peak < 10 * len(text)

    @pytest.mark.parametrize("piece", [b"x", b"\\n", b'\\"'], ids=repr)
    def test_a_string_that_never_ends_costs_no_more(self, piece: bytes) -> None:
        text = b'"' + piece * ((4 << 20) // len(piece))
        tracemalloc.start()
        try:
            with pytest.raises(BadRequest, match="Unterminated string"):
                decode_json(memoryview(text), str)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 10 * len(text)


class TestText:
    def test_numbers_may_come_as_text_only_where_there_is_nothing_else(self) -> None:
        assert convert({"count": "3"}, Note, from_text=True) == Note(count=3)
        with pytest.raises(BadRequest, match=r"Expected `int`, got `str` - at `\$\.count`"):
            convert({"count": "3"}, Note)

    @pytest.mark.parametrize("text", ["", "-1", "three", "nan", "1_0", " 3", "9" * 400, "9" * 5000, str(2**53 + 1)])
    def test_text_that_is_no_number_of_the_range_is_refused(self, text: str) -> None:
        with pytest.raises(BadRequest):
            convert({"count": text}, Note, from_text=True)


class TestFuzz:
    @FUZZ
    @given(st.binary(max_size=200))
    def test_arbitrary_bytes_raise_nothing_but_a_bad_request(self, data: bytes) -> None:
        refused_or_note(data)

    @FUZZ
    @given(st.text(alphabet='[]{}",:\\ntu0123456789eE.+- countvalues', max_size=100))
    def test_arbitrary_json_letters_raise_nothing_but_a_bad_request(self, text: str) -> None:
        refused_or_note(text.encode())

    @FUZZ
    @given(json_values)
    def test_arbitrary_json_is_a_note_or_refused(self, value: object) -> None:
        """Python's own encoder writes NaN and Infinity, so those come by too."""
        found = refused_or_note(json.dumps(value).encode())
        if found is not None:
            assert isinstance(value, dict)
            assert value.keys() <= {"text", "count", "values", "inner"}
            assert all(math.isfinite(number) for number in found.values)

    @FUZZ
    @given(notes, st.data())
    def test_a_changed_byte_is_a_note_or_refused(self, note: Note, data: st.DataObject) -> None:
        text = bytearray(encode_json(note))
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
        refused_or_note(bytes(text))

    @FUZZ
    @given(notes, st.data())
    def test_a_cut_message_is_always_refused(self, note: Note, data: st.DataObject) -> None:
        text = encode_json(note)
        assert refused_or_note(text[: data.draw(st.integers(0, len(text) - 1))]) is None
