"""The header of a model that is read: written and read back, and refused where it says what cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outerstep.errors import TransportError
from outerstep.wire.model_file import LENGTH_BYTES, ModelFacts, StoredTensor, header_bytes, read_header, write_header

FACTS = ModelFacts(
    run_id="run",
    round=3,
    versions=(3, 4),
    hashes=("0" * 32, "1" * 32),
    fragments=(("a",), ("b", "c")),
    rest=("steps",),
    rest_hash="2" * 32,
    dtypes={"a": "bfloat16"},
    aliases={"tied": "a"},
)
TENSORS = [
    StoredTensor("steps", "I64", ()),
    StoredTensor("a", "F32", (2, 3)),
    StoredTensor("b", "F32", (0,)),
    StoredTensor("c", "F32", (1,)),
]


def text_of(facts: ModelFacts = FACTS) -> bytes:
    return write_header(facts, TENSORS)[LENGTH_BYTES:]


def test_it_is_read_as_it_was_written() -> None:
    data = write_header(FACTS, TENSORS)
    assert header_bytes(data[:LENGTH_BYTES]) == len(data) - LENGTH_BYTES
    assert len(data) % 8 == 0
    header = read_header(data[LENGTH_BYTES:])
    assert (header.facts, list(header.tensors), header.data_begin) == (FACTS, TENSORS, len(data))
    assert header.size_bytes == len(data) + 8 + 24 + 4
    assert header.places["c"] == (len(data) + 32, len(data) + 36)


def edited(change: Callable[[dict[str, Any], dict[str, Any]], None]) -> bytes:
    held = json.loads(text_of())
    facts = json.loads(held["__metadata__"]["outerstep"])
    change(held, facts)
    held["__metadata__"]["outerstep"] = json.dumps(facts)
    return json.dumps(held).encode()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda held, facts: held["c"].update(data_offsets=[36, 40]), "gaps and overlaps"),
        (lambda held, facts: held["a"].update(data_offsets=[0, 24]), "gaps and overlaps"),
        (lambda held, facts: held["a"].update(dtype="F31"), "safetensors does not know"),
        (lambda held, facts: held["a"].update(shape=[-1]), "cannot be read"),
        (lambda held, facts: held["a"].update(shape=[2**53, 2**53, 2**53]), "gaps and overlaps"),
        (lambda held, facts: held.update({"": held.pop("a")}), "cannot be read"),
        (lambda held, facts: held.update(more={"dtype": "U8", "shape": [0], "data_offsets": [36, 36]}), "facts name"),
        (lambda held, facts: facts.update(fragments=[["a"], ["b", "c", "c"]]), "facts name"),
        (lambda held, facts: facts.update(versions=[1]), "a version and a hash for each"),
        (lambda held, facts: facts.update(rest_hash=None), "belong together"),
        (lambda held, facts: facts.update(run_id="../x"), "cannot be read"),
        (lambda held, facts: facts.update(unknown=1), "cannot be read"),
        (lambda held, facts: held["a"].update(dtype="U32"), "not in F32"),
    ],
)
def test_what_cannot_be_is_refused(change: Callable[[dict[str, Any], dict[str, Any]], None], said: str) -> None:
    with pytest.raises(TransportError, match=said):
        read_header(edited(change))


@given(st.binary(max_size=64) | st.integers(0, 400).map(lambda at: text_of()[:at] + b"\0" + text_of()[at + 1 :]))
def test_odd_bytes_are_refused(data: bytes) -> None:
    """A zero byte belongs nowhere in JSON."""
    with pytest.raises(TransportError):
        read_header(data)
