"""A lease table that somebody told, or that lay in a state: nothing in it is used before it can be meant."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from outerstep.coordination.gossip import chain
from outerstep.coordination.gossip.meaning import wrong_with_state
from outerstep.coordination.shared_leases import SharedLeases
from outerstep.errors import BadRequest, ConfigError
from outerstep.ranges import NONE
from outerstep.statements import Member
from outerstep.topology.terms import check_loaded_table
from outerstep.types import Dataset, LeaseStatement, Trained

TRAIN = Dataset(name="train", samples=40, unit_samples=1)
MEMBERS = {"a": "1", "b": "1"}


def played() -> SharedLeases:
    leases = SharedLeases([TRAIN])
    for turn in range(1, 5):
        held = {name: leases.tables["train"].held.get(name, NONE) for name in MEMBERS}
        said = {
            name: (LeaseStatement(dataset="train", holds=tuple(theirs), pace=2.0, turn=leases.turn),)
            for name, theirs in held.items()
        }
        brought = {name: (Trained(dataset="train", places=tuple(theirs.first(2))),) for name, theirs in held.items()}
        leases.decide(MEMBERS, said, brought if turn > 1 else {}, (0, turn))
    return leases


def told(change: Callable[[dict[str, Any]], object]) -> bytes:
    kept = json.loads(played().encode())
    change(kept)
    return json.dumps(kept).encode()


def of_a(kept: dict[str, Any]) -> dict[str, Any]:
    share: dict[str, Any] = kept["tables"][0]["shares"]["a"]
    return share


LIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a pace without an end": (lambda kept: of_a(kept).update(claimed=1e300), "claimed"),
    "something brought in no time": (lambda kept: of_a(kept).update(brought=3, interval_s=0.0), "no time"),
    "something brought tomorrow": (lambda kept: of_a(kept).update(since=1e6), "no time"),
    "a turn after which none can follow": (lambda kept: kept.update(turn=2**53), "turn"),
    "a place that was never leased": (lambda kept: kept["tables"][0]["held"].update(a=[[0, 99]]), "never leased"),
    "a place in two hands": (
        lambda kept: kept["tables"][0]["held"].update(c=kept["tables"][0]["held"]["b"]),
        "there twice",
    ),
    "a place nowhere": (lambda kept: kept["tables"][0]["held"].pop("b"), "nowhere"),
    "more leased than there is": (lambda kept: kept["tables"][0].update(next=41, reserved=41), "more is leased"),
    "a dataset twice": (lambda kept: kept["tables"].append(kept["tables"][0]), "twice"),
    "no fragment's number": (lambda kept: kept["tables"][0]["covered"].update(a={"-1": [[0, 1]]}), "regex"),
    "units without a number": (lambda kept: kept["tables"][0]["dataset"].update(samples=2**53, epochs=10**6), "units"),
    "spent, and not done": (lambda kept: kept["tables"][0]["sets"].update(spent=[[30, 31]]), "spent"),
    "a gift of tomorrow": (lambda kept: kept["tables"][0]["recent"].update(a=[[99, [[0, 1]]]]), "not made"),
    "a word too many": (lambda kept: kept.update(more=1), "unknown field"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_table_with_a_value_that_cannot_be_there_is_refused_by_name(lie: str) -> None:
    change, why = LIES[lie]
    with pytest.raises(BadRequest, match=f"lease table cannot be read: .*{why}"):
        SharedLeases.decode(told(change))


def test_a_table_as_it_was_told_is_read() -> None:
    assert SharedLeases.decode(told(lambda kept: None)).digest == played().digest


def test_a_run_that_leases_something_else_is_not_this_run() -> None:
    """One peer may say so; whoever believed it would look for a dataset in vain."""
    other = SharedLeases([Dataset(name="other", samples=3, unit_samples=1)])
    state = chain.found(Member(peer_id="a", key="0" * 64), 1, data=other.encode())
    assert wrong_with_state(state, 1) == ""
    assert wrong_with_state(state, 1, [TRAIN]) == "names a run that leases other, not train"
    with pytest.raises(BadRequest, match=r"'other'.*'train'"):
        SharedLeases([TRAIN]).go_on_from(other.kept)


def test_a_table_that_is_refused_changes_nothing() -> None:
    leases = played()
    before = leases.encode()
    with pytest.raises(BadRequest):
        leases.go_on_from(json.loads(told(lambda kept: kept["tables"][0]["held"].pop("b"))))
    assert leases.encode() == before


def test_a_loaded_state_of_other_data_is_refused_with_what_to_do() -> None:
    other = SharedLeases([Dataset(name="train", samples=3, unit_samples=1)])
    with pytest.raises(ConfigError, match=r"loaded state does not fit.*another name"):
        check_loaded_table(played(), other.kept)
    check_loaded_table(played(), None)
    check_loaded_table(played(), played().kept)
