"""What a journal record says: the coordinator as of a decision, and what replays the round that was decided.

head       {"remembered": …, "round": null}                a note: only membership or orders have changed
           {"remembered": …, "round": {kind, fragment, version, participants, anchor_hash, …}}
payload    kind "mean":    the flat fp32 mean that the outer optimizer stepped along, as long as the fragment
           kind "pushes":  the contributions as they came, one after the other (Delayed Nesterov)
           kind "nothing": none; everybody was there, and nobody had trained
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ..coordination.server.remembered import Remembered
from ..core.views import bytes_of
from ..durable.journal import Record
from ..errors import ModelError
from ..pool import private_memory
from ..types import Count, Hash, Participant, Plain, Positive
from .publish import NextVersion
from .store import Addend

Scale = Annotated[float, Meta(ge=0.0)]


class Push(Plain, frozen=True):
    """One contribution of the payload, in their order."""

    size_bytes: Count
    scale: Scale
    base: Count | None
    sections: Positive


class RoundRecord(Plain, frozen=True):
    kind: Literal["mean", "pushes", "nothing"]
    fragment: Count
    version: Positive
    participants: tuple[Participant, ...]
    anchor_hash: Hash
    pushes: tuple[Push, ...] = ()


class Head(Plain, frozen=True):
    remembered: Remembered
    round: RoundRecord | None = None


def note(remembered: Remembered) -> bytes:
    return msgspec.json.encode(Head(remembered=remembered))


def of_round(
    remembered: Remembered,
    fragment: int,
    made: NextVersion,
    participants: tuple[Participant, ...],
    pushes: Sequence[Addend] | None,
) -> tuple[bytes, list[memoryview]]:
    """Head and payload. `pushes`: None = the outer optimizer steps from the mean."""
    if pushes is not None:
        kind, payload = "pushes", [push.payload for push in pushes]
    elif made.mean is not None:
        kind, payload = "mean", [bytes_of(made.mean)]
    else:
        kind, payload = "nothing", []
    round_ = RoundRecord(
        kind=kind,  # type: ignore[arg-type]  # one of the three above
        fragment=fragment,
        version=made.version,
        participants=participants,
        anchor_hash=made.result()[0],
        pushes=tuple(
            Push(size_bytes=len(push.payload), scale=push.weight, base=push.base, sections=push.sections)
            for push in pushes or ()
        ),
    )
    return msgspec.json.encode(Head(remembered=remembered, round=round_)), payload


def read(record: Record) -> Head:
    try:
        return msgspec.json.decode(record.head, type=Head)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ModelError(
            f"journal record {record.serial} is not what this version of outerstep writes: {error}; "
            "use the version that wrote it, or resume a saved state by its path to give up what came after it"
        ) from error


def addends(round_: RoundRecord, payload: memoryview) -> list[Addend]:
    """The contributions of a record, in memory that may be written to, as it was when they came."""
    memory, made, begin = private_memory(max(len(payload), 1)), [], 0
    memory[: len(payload)] = payload
    for push in round_.pushes:
        made.append(Addend(memory[begin : begin + push.size_bytes], push.scale, push.base, push.sections))
        begin += push.size_bytes
    if begin != len(payload):
        raise ModelError(f"the pushes of a record must be as long as its payload, {len(payload)} bytes, got {begin}")
    return made
