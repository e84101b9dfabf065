"""What a process needs to go on at the server where an earlier start of the same worker was: as plain values, and back.

A contribution under way is kept whole, its facts and its encoded bytes: it is sent again under the same key, and the
server tells whether it has it already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import torch
from msgspec import UNSET, Meta

from ...coordination.worker.exchange import Held, MemberFields, overtaken
from ...errors import ConfigError
from ...types import Count, Offer, Plain, RunId, WorkerId
from ...wire.frames import Layout
from ..payload import Memory, OutgoingFrame

FACTS = ("incarnation", "sequence", "base_version", "oldest_base", "steps", "samples", "tokens", "codec", "size_bytes")
NOT_PROVEN = Held(0, "")
ProvenHash = Annotated[str, Meta(pattern=r"^(t?[0-9a-f]{32})?\Z")]  # as an AnchorHash, or nothing


class SavedSequence(Plain, frozen=True):
    """The last sequence that was used, and the anchor that is held, if it was proven (hash "" = it was not)."""

    sequence: Count
    version: Count
    anchor_hash: ProvenHash


class SavedTopology(Plain, frozen=True):
    """Beside the contributions under way, which their tickets are packed into. `sync_every`: this worker's own H, as
    the server assigned it (0 = none). `session`: the secret of the start that wrote it; "" = it had none."""

    worker_id: WorkerId
    run_id: RunId
    fragments: tuple[SavedSequence, ...]
    feedback: dict[str, Any]
    sync_every: Count = 0
    session: Annotated[str, Meta(max_length=64)] = ""

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> SavedTopology:
        try:
            return msgspec.convert(state, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"this is not the state of a worker: {error}") from error

    @property
    def sequences(self) -> list[int]:
        return [fragment.sequence for fragment in self.fragments]

    @property
    def held(self) -> dict[int, Held]:
        return {i: Held(f.version, f.anchor_hash) for i, f in enumerate(self.fragments) if f.anchor_hash}

    def overtaken(self, last_sequences: Sequence[int]) -> frozenset[int]:
        """The fragments of which the server has accepted later contributions than this state knows of."""
        if len(last_sequences) != len(self.fragments):
            raise ConfigError(
                f"the state has {len(self.fragments)} fragments, the run has {len(last_sequences)}: "
                "it is not a state of this run"
            )
        return overtaken(self.sequences, last_sequences)


def write_fragments(sequences: Sequence[int], held: Mapping[int, Held]) -> list[dict[str, int | str]]:
    anchors = [held.get(i, NOT_PROVEN) for i in range(len(sequences))]
    return [
        {"sequence": sequence, "version": anchor.version, "anchor_hash": anchor.hash}
        for sequence, anchor in zip(sequences, anchors, strict=True)
    ]


def pack(offer: Offer, payload: OutgoingFrame) -> dict[str, Any]:
    """The bytes are the live ones."""
    payload.wait()
    facts = {name: getattr(offer, name) for name in FACTS}
    data = {} if offer.data is UNSET else {"data": msgspec.to_builtins(offer.data)}
    return {**facts, **data, "section_bytes": list(offer.section_bytes), "bytes": payload.data}


def is_without_bytes(packed: Mapping[str, Any]) -> bool:
    """Was it cut for another shape? (A process that sends nothing packs nothing at all.)"""
    return "sequence" in packed and "bytes" not in packed


def unpack_offer(packed: Mapping[str, Any], head: MemberFields, fragment: int) -> Offer:
    """As it was made, by the incarnation that made it. (The exchange that sends it now says so itself.)"""
    facts = {name: packed[name] for name in (*FACTS, "section_bytes", "data") if name in packed}
    try:
        return msgspec.convert({**head, **facts, "fragment": fragment}, Offer)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"the saved contribution to fragment {fragment} cannot be sent again: {error}; in a group each process "
            "loads the state that it saved"
        ) from error


def unpack_payload(
    packed: Mapping[str, Any], layout: Layout | None, part_size_bytes: int, first_part: int, memory: Memory
) -> OutgoingFrame:
    """The same bytes in memory of their own."""
    payload = OutgoingFrame(layout, part_size_bytes, first_part, memory=memory)
    data = packed["bytes"]
    if layout is None:
        return payload
    prefix = payload.data[: layout.data_begin]
    if data.dtype != torch.uint8 or data.shape != payload.data.shape or not data[: len(prefix)].cpu().equal(prefix):
        raise ConfigError(
            f"the saved contribution ({packed.get('codec')}, {data.numel()} bytes) is not one of this run "
            f"({layout.header.codec}, {layout.size_bytes} bytes); start without load_state_dict"
        )
    payload.data.copy_(data)
    payload.written(layout.size_bytes)
    return payload
