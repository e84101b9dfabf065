"""A worker's saved state, cut for another shape: of the states of all processes of a job, what one process of the next
needs, which may be a job of another mesh, other stages, or a single process.

    anchor, what was sent    of each tensor the box that is here, put together from the boxes that were there
    what the codec owes      likewise, from those that sent the box; who does not send it now forgets it when it joins
    samples and tokens       the sum of all, on rank 0
    a contribution under way its bytes are cut as the job was that made it. If the server has it, it is claimed under
                             its key; if not, its steps come again with the next one. It is never sent twice

The weights themselves and the optimizer's state are the script's to load (torch.distributed.checkpoint does that).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from ..errors import ConfigError, ModelError
from ..tiling import Place, uncovered
from ..types import Box
from ..wire.frames import rows_of
from .replica import Replica

Amounts = dict[str, Any]


class SavedPlaces(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which part of each tensor the process held whose state it is, and the shape of all of it. `rows`: (n, r) if it
    sent section r of n, by rows; None = it sent what it held."""

    places: dict[str, Place]
    shapes: dict[str, tuple[int, ...]]
    rows: tuple[int, int] | None = None


def describe_places(replica: Replica) -> dict[str, Any]:
    """To be saved with the state; nothing for a process that is a worker of its own."""
    shards = replica.shards
    if not shards.places:
        return {}
    rows = [shards.sections, shards.section] if shards.by_rows and shards.sections > 1 else None
    shapes = {spec.name: list(spec.shape) for spec in replica.manifest.parameters}
    places = {name: [list(begin), list(size)] for name, (begin, size) in shards.places.items()}
    return {"places": {"places": places, "shapes": shapes, "rows": rows}}


def recut(states: Sequence[Mapping[str, Any]], replica: Replica, rank: int) -> dict[str, Any]:
    """The state of process `rank`, which holds what `replica` says."""
    if not states:
        raise ConfigError("the states of all processes of the earlier job are needed, got none")
    if any(state.get("data") for state in states):
        raise ConfigError(
            "a state with leased data belongs to the shape it was saved in: start in that shape, or without the state"
        )
    try:
        cutter = _Cutter([_places_of(state) for state in states], _here(replica))
        first, topologies = states[0], [state["topology"] for state in states]
        topology = next(one for one in topologies if one)  # of a DDP job only rank 0 has any
        return {
            **{name: value for name, value in first.items() if name != "places"},
            "work": _sum([state["work"] for state in states], rank),
            "fragments": [
                _fragment([state["fragments"][i] for state in states], cutter, rank)
                for i in range(len(first["fragments"]))
            ],
            "anchors": cutter.tensors([state["anchors"] for state in states], everything=True),
            "local_hash": replica.local_hash(),  # nobody can compare it: the hashes were of other boxes
            "topology": {**topology, "feedback": _feedback([one.get("feedback") or {} for one in topologies], cutter)},
        }
    except (KeyError, IndexError, TypeError, StopIteration, msgspec.ValidationError) as error:
        raise ConfigError(f"these are not the states of the processes of one worker: {error!r}") from error


def _here(replica: Replica) -> dict[str, tuple[Place, tuple[int, ...]]]:
    whole = {spec.name: spec.shape for spec in replica.manifest.parameters}
    places = replica.shards.places
    return {name: (places.get(name, ((0,) * len(shape), shape)), shape) for name, shape in whole.items()}


def _places_of(state: Mapping[str, Any]) -> SavedPlaces:
    told = state.get("places")
    if told:
        return msgspec.convert(told, SavedPlaces)
    shapes = {name: tuple(anchor.shape) for name, anchor in state["anchors"].items()}
    return SavedPlaces({name: ((0,) * len(shape), shape) for name, shape in shapes.items()}, shapes)


class _Cutter:
    def __init__(self, were: Sequence[SavedPlaces], here: Mapping[str, tuple[Place, tuple[int, ...]]]) -> None:
        self._were, self._here = were, here

    def tensors(self, held: Sequence[Mapping[str, Tensor]], *, everything: bool = False) -> dict[str, Tensor]:
        """By name, in the shape that they have here. Not `everything`: of those that there are."""
        found: dict[str, Tensor] = {}
        for name, (place, shape) in self._here.items():
            if not everything and not any(name in each for each in held):
                continue
            parts = [(self._of(number, name, shape), each[name]) for number, each in enumerate(held) if name in each]
            found[name] = _assemble(name, place, parts)
        return found

    def owed(self, held: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The same of what was left out: flat, of what each sent; nothing is owed of what nobody says."""
        found: dict[str, Tensor] = {}
        for name, (place, shape) in self._here.items():
            given = [(number, each[name]) for number, each in enumerate(held) if name in each]
            if not given:
                continue
            if not any(values.numel() for _, values in given):
                found[name] = torch.empty(0)
                continue
            parts = [(self._sent(number, name, shape), values) for number, values in given if values.numel()]
            found[name] = _assemble(name, place, parts, complete=False).reshape(-1)
        return found

    def _of(self, number: int, name: str, shape: tuple[int, ...]) -> Place:
        were = self._were[number]
        if were.shapes[name] != shape:
            raise ModelError(
                f"the state is of another model: {name!r} is {list(were.shapes[name])} in it, {list(shape)} here"
            )
        return were.places[name]

    def _sent(self, number: int, name: str, shape: tuple[int, ...]) -> Place:
        held, rows = self._of(number, name, shape), self._were[number].rows
        if rows is None or held[1] != shape:
            return held
        share = rows_of(shape, *rows)  # a tensor that every rank holds whole is sent in shares
        return ((share.first_row, *(0 for _ in shape[1:])) if shape else (), share.shape if shape else ())


def _assemble(name: str, place: Place, parts: Sequence[tuple[Place, Tensor]], *, complete: bool = True) -> Tensor:
    begin, size = place
    out, found = torch.zeros(size), dict[Place, None]()
    for (its_begin, its_size), values in parts:
        if values.numel() != math.prod(its_size):
            raise ConfigError(f"{name!r} has {values.numel()} values in a state that should have {list(its_size)}")
        first = tuple(map(max, begin, its_begin))
        last = tuple(min(b + n, c + m) for b, n, c, m in zip(begin, size, its_begin, its_size, strict=True))
        extent = tuple(e - b for b, e in zip(first, last, strict=True))
        if any(n <= 0 for n in extent):
            continue
        there = tuple(slice(b - c, b - c + n) for b, c, n in zip(first, its_begin, extent, strict=True))
        here = tuple(slice(b - c, b - c + n) for b, c, n in zip(first, begin, extent, strict=True))
        out[here] = values.detach().view(its_size)[there].float()
        found[tuple(b - c for b, c in zip(first, begin, strict=True)), extent] = None
    missing = uncovered(size, [Box(*each, (0,)) for each in found]) if complete else None
    if missing is not None:
        at = [b + i for b, i in zip(begin, missing[0], strict=True)]
        how = "none" if missing[1] == 0 else "several, which overlap,"
        raise ConfigError(
            f"of the states {how} holds value {at} of {name!r}: load those of all processes, of the same step"
        )
    return out


def _sum(amounts: Sequence[Amounts], rank: int) -> Amounts:
    """Steps are everybody's; samples and tokens are each one's own."""
    for each in amounts:
        if each["steps"] != amounts[0]["steps"]:
            raise ConfigError("the states are of different steps: load those that were saved together")
    total: Callable[[str], int] = lambda what: sum(each[what] for each in amounts) if rank == 0 else 0  # noqa: E731
    return {**amounts[0], "samples": total("samples"), "tokens": total("tokens")}


def _fragment(saved: Sequence[Mapping[str, Any]], cutter: _Cutter, rank: int) -> dict[str, Any]:
    contributions = list(zip(*(each["contributions"] for each in saved), strict=True))
    return {
        **saved[0],
        "counted": _sum([each["counted"] for each in saved], rank),
        "contributions": [_contribution(list(each), cutter, rank) for each in contributions],
    }


def _contribution(saved: list[Mapping[str, Any]], cutter: _Cutter, rank: int) -> dict[str, Any]:
    exchange = next(each["exchange"] for each in saved if each["exchange"])
    return {
        **saved[0],
        "exchange": {"sequence": exchange["sequence"]},
        "work": _sum([each["work"] for each in saved], rank),
        "sent": cutter.tensors([each["sent"] for each in saved]),
    }


def _feedback(saved: Sequence[Mapping[str, Any]], cutter: _Cutter) -> dict[str, Any]:
    keys: Iterator[str] = (key for each in saved for key in each.get("pending", {}))
    pending = {}
    for key in dict.fromkeys(keys):
        each = [one.get("pending", {}).get(key) for one in saved]
        sequence = next(one["sequence"] for one in each if one is not None)
        left_over = cutter.owed([one["left_over"] if one is not None else {} for one in each])
        pending[key] = {"sequence": sequence, "left_over": left_over}
    return {"residuals": cutter.owed([one.get("residuals", {}) for one in saved]), "pending": pending}
