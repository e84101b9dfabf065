"""Lease tables that another member tells, or that lie in a state. Whatever is in one: it is refused by name, or all go
on deciding with it."""

from __future__ import annotations

import copy
import json
import random
from functools import cache
from typing import Any, TypeVar

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from fuzz.cases import cases, spoiled
from fuzz.grammar import Grammar
from outerstep.coordination.shared_leases import SharedLeases
from outerstep.errors import BadRequest
from outerstep.ranges import NONE
from outerstep.types import Dataset, LeaseStatement, Trained

MEMBERS = ("a", "b", "c", "liar")
PLAYED = 24
T = TypeVar("T")
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 3, 2**31, 2**52, 2**53, 2**53 + 1, 2**63, 2**64, -(2**63), 0.5, 1e-320, 1e9, 1e308, -0.0,
    float("nan"), float("inf"), "", "a", "0", "99", "liar", "\ud800", "x" * 300, [], [[]], [[0, 0]], [[0, 1]], [[5, 2]],
    [[0, 2**53]], [[-5, 5]], [[0.5, 2]], {}, {"a": []}, {"a": [[0, 3]]}, {"0": [[0, 3]]}, {"-1": []}, {"x": [[1, 2]]},
)  # fmt: skip


@cache
def played(seed: int) -> SharedLeases:
    """As a run of some blocks leaves it, with members that come and go, and in some of them a liar."""
    rng = random.Random(seed)
    leases = SharedLeases([
        Dataset(name=name, samples=rng.choice([20, 200]), unit_samples=rng.choice([1, 3]), epochs=rng.choice([0, 1, 2]),
                again=rng.random() < 0.7, dropped=rng.choice(["spent", "again"]))
        for name in ("train", "more")[: rng.randint(1, 2)]
    ])  # fmt: skip
    fragments = rng.randint(1, 2)
    for turn in range(rng.randint(1, 12)):
        here = {name: rng.choice("12") for name in MEMBERS if rng.random() < 0.8} or {"a": "1"}
        said = {name: tuple(honest(leases, name, one) for one in leases.tables) for name in here if rng.random() < 0.9}
        brought = {
            name: tuple(
                Trained(dataset=one, places=tuple(table.held.get(name, NONE).first(rng.randint(0, 6))))
                for one, table in leases.tables.items()
            )
            for name in said
        }
        leases.decide(here, said, brought, (turn % fragments, turn + 1), fragments)
    return leases


def honest(leases: SharedLeases, name: str, dataset: str) -> LeaseStatement:
    held = leases.tables[dataset].held.get(name, NONE)
    spare = held - held.first(4)
    return LeaseStatement(dataset=dataset, holds=tuple(held), spare=tuple(spare), pace=3.0, turn=leases.turn)


def places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in it at which something else could stand."""
    found = [path]
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        found += places_in(one, (*path, key))
    return found


def altered(draw: st.DrawFn, kept: Any) -> Any:
    """Some values replaced: by odd ones, by others of the same table, by a little more or less."""
    kept = copy.deepcopy(kept)
    for _ in range(draw(st.integers(1, 3))):
        at, other = (draw(st.sampled_from(places_in(kept))) for _ in range(2))
        if not at:
            continue
        *above, last = at
        inner = kept
        for key in above:
            inner = inner[key]
        how = draw(st.sampled_from(["odd", "other", "nudge", "gone", "new"]))
        if how == "odd":
            inner[last] = copy.deepcopy(draw(st.sampled_from(ODD)))
        elif how == "other":
            source = kept
            for key in other:
                source = source[key]
            inner[last] = copy.deepcopy(source)
        elif how == "nudge" and isinstance(inner[last], int | float):
            inner[last] += draw(st.sampled_from([-3, -1, 1, 2, 1000, 2**40]))
        elif how == "gone" and isinstance(inner, dict):
            del inner[last]
        elif how == "new" and isinstance(inner, dict):
            inner[draw(st.sampled_from(["liar", "z", "0", "7", "free"]))] = copy.deepcopy(inner[last])
    return kept


def drawn(grammar: Grammar, kind: type[T]) -> T:
    return msgspec.convert(grammar.draw(kind), kind)


def goes_on(leases: SharedLeases, rng: random.Random) -> None:
    """Six decisions, of which some statements are anything that their type allows; and each table can be told."""
    known = {"dataset": [*leases.tables], "turn": [leases.turn]}
    grammar = Grammar(rng, known, oddity=0.0)
    for turn in range(6):
        here = {name: rng.choice("12") for name in (*MEMBERS, "new") if rng.random() < 0.8} or {"a": "1"}
        said = {
            name: tuple(
                honest(leases, name, one) if rng.random() < 0.5 else drawn(grammar, LeaseStatement)
                for one in leases.tables
            )
            for name in here
        }
        brought = {name: (drawn(grammar, Trained),) for name in here if rng.random() < 0.7}
        leases.decide(here, said, brought, (turn % 2, turn + 1), 2)
        leases.progress()
        assert SharedLeases.decode(leases.encode()).digest == leases.digest


@cases(500)
@given(st.data(), st.integers(0, PLAYED - 1), st.integers(0, 2**32))
def test_a_table_with_other_values_in_it_is_refused_or_all_go_on(data: st.DataObject, seed: int, chance: int) -> None:
    kept = json.loads(played(seed).encode())
    told = json.dumps(data.draw(st.composite(lambda draw: altered(draw, kept))())).encode()
    try:
        leases = SharedLeases.decode(told)
    except BadRequest as error:
        assert "lease table cannot be read" in error.message
        return
    goes_on(leases, random.Random(chance))


@cases(300)
@given(st.data(), st.integers(0, PLAYED - 1), st.integers(0, 2**32))
def test_a_table_whose_bytes_are_spoiled_is_refused_or_all_go_on(data: st.DataObject, seed: int, chance: int) -> None:
    told = data.draw(spoiled(played(seed).encode()))
    try:
        leases = SharedLeases.decode(told)
    except BadRequest:
        return
    goes_on(leases, random.Random(chance))


@cases(200)
@given(st.integers(0, PLAYED - 1), st.integers(0, 2**32))
def test_whatever_is_said_of_a_right_table_all_go_on(seed: int, chance: int) -> None:
    goes_on(SharedLeases.decode(played(seed).encode()), random.Random(chance))
