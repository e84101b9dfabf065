"""A saved state, cut for another shape: every value comes from who held it, and what is owed from who sent it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outerstep.errors import ConfigError, ModelError
from outerstep.tiling import Place
from outerstep.topology.group.sharded import Shards
from outerstep.worker.recut import describe_places, recut
from outerstep.worker.replica import Replica

WHOLE = {"0.weight": torch.arange(24.0).view(4, 6), "0.bias": torch.arange(100.0, 104.0)}


class Piece(nn.Module):
    """A parameter in the shape that is here, of a tensor that is larger."""

    def __init__(self, here: dict[str, Place]) -> None:
        super().__init__()
        self.add_module("0", nn.Module())
        for name, (_, size) in here.items():
            getattr(self, "0").register_parameter(name.removeprefix("0."), nn.Parameter(torch.zeros(size)))


def replica_of(here: dict[str, Place], rows: tuple[int, int] | None = None) -> Replica:
    replica = Replica(Piece(here))
    specs = [
        type(spec)(name=spec.name, shape=tuple(WHOLE[spec.name].shape), dtype=spec.dtype)
        for spec in replica.manifest.parameters
    ]
    replica.manifest = type(replica.manifest)(parameters=tuple(specs))
    sections, section = rows or (1, 0)
    replica.shards = Shards(sections, section, frozenset(), by_rows=rows is not None, places=here)
    return replica


def cut(whole: Tensor, place: Place) -> Tensor:
    return whole[tuple(slice(b, b + n) for b, n in zip(*place, strict=True))].contiguous()


def state_of(
    here: dict[str, Place], *, owes: bool, samples: int, rows: tuple[int, int] | None = None
) -> dict[str, Any]:
    held = {name: cut(WHOLE[name], place) for name, place in here.items()}
    owed = {name: -values.flatten() for name, values in held.items()} if owes else {}
    work = {"steps": 5, "samples": samples, "tokens": 2 * samples, "units": []}
    under_way = {"awaited": True, "exchange": {"sequence": 3, "bytes": torch.zeros(1)}, "work": work, "sent": held}
    return {
        "format": 2,
        "work": work,
        "fragments": [{"version": 2, "counted": {**work, "samples": 1}, "contributions": [under_way]}],
        "anchors": held,
        "local_hash": "0" * 32,
        "topology": {
            "run_id": "r",
            "feedback": {"residuals": owed, "pending": {"0": {"sequence": 3, "left_over": owed}}},
        },
        **describe_places(replica_of(here, rows)),
    }


COLUMNS: list[dict[str, Place]] = [
    {"0.weight": ((0, 0), (4, 2)), "0.bias": ((0,), (4,))},
    {"0.weight": ((0, 2), (4, 4)), "0.bias": ((0,), (4,))},
]
STAGES: list[dict[str, Place]] = [{"0.weight": ((0, 0), (4, 6))}, {"0.bias": ((0,), (4,))}]
SQUARES: list[dict[str, Place]] = [
    {"0.weight": ((2 * i, 3 * j), (2, 3)), "0.bias": ((2 * i,), (2,))} for i in range(2) for j in range(2)
]
ALONE: list[dict[str, Place]] = [{name: ((0,) * values.dim(), tuple(values.shape)) for name, values in WHOLE.items()}]
SHAPES = {"columns": COLUMNS, "stages": STAGES, "squares": SQUARES, "alone": ALONE}


@pytest.mark.parametrize("before", SHAPES)
@pytest.mark.parametrize("after", SHAPES)
def test_from_each_shape_to_each_other_every_process_gets_what_it_holds(before: str, after: str) -> None:
    """And the sum of all samples is what it was."""
    first = {name: next(n for n, here in enumerate(SHAPES[before]) if name in here) for name in WHOLE}
    states = [state_of(here, owes=True, samples=10 + n) for n, here in enumerate(SHAPES[before])]
    for n, state in enumerate(states):  # of the bias, which some hold twice, one sends it and owes
        for owed in (state["topology"]["feedback"]["residuals"],):
            if before == "columns" and first["0.bias"] != n:
                owed.pop("0.bias", None)
    made = [recut(states, replica_of(here), rank) for rank, here in enumerate(SHAPES[after])]
    for state, here in zip(made, SHAPES[after], strict=True):
        (under_way,) = state["fragments"][0]["contributions"]
        feedback = state["topology"]["feedback"]
        for name, place in here.items():
            expected = cut(WHOLE[name], place)
            assert torch.equal(state["anchors"][name], expected)
            assert torch.equal(under_way["sent"][name], expected)
            assert torch.equal(feedback["residuals"][name], -expected.flatten())
            assert torch.equal(feedback["pending"]["0"]["left_over"][name], -expected.flatten())
        assert under_way["exchange"] == {"sequence": 3}
        assert feedback["pending"]["0"]["sequence"] == 3
        assert state["work"]["steps"] == 5
    for what, each in (("samples", 1), ("tokens", 2)):
        before_all = sum(state["work"][what] for state in states)
        assert sum(state["work"][what] for state in made) == before_all == each * sum(range(10, 10 + len(states)))


def test_what_rows_owe_of_a_tensor_that_all_hold_is_a_share_of_it() -> None:
    here: list[dict[str, Place]] = [{"0.weight": ((2 * r, 0), (2, 6)), "0.bias": ((0,), (4,))} for r in range(2)]
    states = [state_of(place, owes=True, samples=1, rows=(2, r)) for r, place in enumerate(here)]
    for r, state in enumerate(states):
        owed = state["topology"]["feedback"]["residuals"]
        owed["0.bias"] = owed["0.bias"][2 * r : 2 * r + 2]
        state["topology"]["feedback"]["pending"] = {}
    made = recut(states, replica_of(ALONE[0]), 0)
    assert torch.equal(made["topology"]["feedback"]["residuals"]["0.bias"], -WHOLE["0.bias"])


def test_states_that_are_not_all_there_or_not_of_one_step_are_refused_by_name() -> None:
    states = [state_of(here, owes=False, samples=1) for here in SQUARES]
    with pytest.raises(ConfigError, match=r"none holds value \[2, 0\] of '0.weight'"):
        recut(states[:2], replica_of(ALONE[0]), 0)
    states[1]["work"] = {**states[1]["work"], "steps": 6}
    with pytest.raises(ConfigError, match="different steps"):
        recut(states, replica_of(ALONE[0]), 0)
    with pytest.raises(ConfigError, match="got none"):
        recut([], replica_of(ALONE[0]), 0)
    with pytest.raises(ConfigError, match="not the states of the processes"):
        recut([{"work": 1}], replica_of(ALONE[0]), 0)
    leased = [{**state_of(ALONE[0], owes=False, samples=1), "data": {"units": 1}}]
    with pytest.raises(ConfigError, match="leased data"):
        recut(leased, replica_of(ALONE[0]), 0)


def test_a_state_of_another_model_is_refused_by_name() -> None:
    state = state_of(ALONE[0], owes=False, samples=1)
    state["places"]["shapes"]["0.weight"] = [6, 4]
    with pytest.raises(ModelError, match=r"'0.weight' is \[6, 4\] in it"):
        recut([state], replica_of(ALONE[0]), 0)
