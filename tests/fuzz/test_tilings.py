"""Whatever a worker says of what its processes hold: it is refused by name, or every value has one sender."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuzz.cases import cases, spoiled
from outerstep.errors import BadRequest
from outerstep.tiling import ModelTiling, make_tiling
from outerstep.types import ParameterSpec, Tiling
from outerstep.wire.messages import decode_json, encode_json

SHAPES: dict[str, tuple[int, ...]] = {"w": (4, 6), "b": (6,), "scale": (), "none": (0, 2)}
SPECS = [ParameterSpec(name=name, shape=shape, dtype="float32") for name, shape in SHAPES.items()]
GOOD = make_tiling(
    SHAPES,
    [
        {"w": ((0, 0), (4, 3)), "b": ((0,), (6,)), "scale": ((), ())},
        {"w": ((0, 3), (4, 3)), "b": ((0,), (6,))},
    ],
)
PLAIN: dict[str, Any] = msgspec.to_builtins(GOOD)


def check(tiling: Tiling) -> None:
    try:
        found = ModelTiling(tiling, SPECS).fragment(tuple(SHAPES))
    except BadRequest as refusal:
        assert refusal.message
        return
    for name, shape in SHAPES.items():
        sent = torch.zeros(shape)
        for boxes in found.sent:
            for other, box in boxes:
                if other == name:
                    sent[tuple(slice(b, b + n) for b, n in zip(box.begin, box.size, strict=True))] += 1
        assert bool((sent == 1).all()), name
    said = found.as_said()
    again = ModelTiling(said, SPECS).fragment(tuple(SHAPES))
    assert list(again.sent) == list(found.sent)
    assert list(again.held) == list(found.held)
    assert again.as_said() == said
    for section in range(found.sections):
        ours = [
            (name, i)
            for name, pattern in found.tensors
            for i, box in enumerate(pattern.boxes)
            if section in box.holders
        ]
        assert [(name, i) for name, _, i in found.held.numbers(section)] == ours
        assert {name for name, _ in found.sent[section]} <= {name for name, _ in ours}


def test_the_right_one_is_taken() -> None:
    assert ModelTiling(decode_json(encode_json(GOOD), Tiling), SPECS).sections == 2


@cases(400)
@given(
    st.integers(1, 4),
    st.lists(
        st.lists(
            st.tuples(
                st.lists(st.integers(0, 7), max_size=3),
                st.lists(st.integers(1, 7), max_size=3),
                st.lists(st.integers(0, 4), min_size=1, max_size=3),
            ),
            max_size=3,
        ),
        max_size=4,
    ),
    st.lists(st.integers(0, 4), max_size=5),
)
def test_any_numbers_are_refused_by_name_or_make_up_the_model(
    sections: int, patterns: list[Any], tensors: list[int]
) -> None:
    check(msgspec.convert({"sections": sections, "patterns": patterns, "tensors": tensors}, Tiling))


@cases(400)
@given(st.data())
def test_a_right_one_that_was_spoiled_is_refused_or_still_makes_up_the_model(data: st.DataObject) -> None:
    try:
        tiling = decode_json(data.draw(spoiled(encode_json(PLAIN))), Tiling)
    except BadRequest:
        return
    check(tiling)
