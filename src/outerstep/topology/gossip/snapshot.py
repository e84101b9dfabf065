"""The state of a fragment as bytes, for a peer that joins.

    length of the head, uint32 little-endian
    head: msgpack, padded with spaces to a multiple of 64
    θ, fp32 · buf, fp32, if the outer step has momentum · the last aggregate, fp32, if the rule starts from it

Tensors come in the order of the fragment, each at a multiple of 8. Peers with the same version have the same bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from typing import Annotated

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from ...core.state import FragmentSnapshot, bytes_of, fp32_views
from ...errors import BadFrame, ConfigError
from ...screens import History, check_history
from ...types import Count, Hash, Plain
from ..forms import Form
from ..update import anchor_hash

_LENGTH = struct.Struct("<I")
ALIGNMENT = 64
MOST_HEAD_BYTES = 1 << 20
SECTIONS = 3  # θ, buf, the last aggregate
ABSURD = 1e18  # above any honest norm of a difference of weights; sums and momentum of smaller values stay finite


class SnapshotHead(Plain, frozen=True):
    version: Count
    anchor_hash: Hash
    history: Annotated[tuple[tuple[float, ...], ...], Meta(max_length=64)] = ()
    has_momentum: bool = False
    has_centre: bool = False


def write_snapshot(form: Form, snapshot: FragmentSnapshot, history: History = ()) -> memoryview:
    """Write a snapshot. `history`: what the norm screen remembers."""
    head = msgspec.msgpack.encode(
        SnapshotHead(
            version=snapshot.version,
            anchor_hash=snapshot.anchor_hash,
            history=history,
            has_momentum=bool(snapshot.momentum),
            has_centre=bool(snapshot.centre),
        )
    )
    head += b" " * (-(_LENGTH.size + len(head)) % ALIGNMENT)
    sections = [section for section in (snapshot.theta, snapshot.momentum, snapshot.centre) if section]
    size = _section_bytes(form)
    data = memoryview(bytearray(_LENGTH.size + len(head) + size * len(sections)))
    data[: _LENGTH.size] = _LENGTH.pack(len(head))
    data[_LENGTH.size : _LENGTH.size + len(head)] = head
    for number, section in enumerate(sections):
        first = _LENGTH.size + len(head) + number * size
        for name, _, offset in form.full.places:
            if name in section and section[name].numel():
                values = bytes_of(section[name])
                data[first + offset : first + offset + len(values)] = values
    return data


def read_snapshot(form: Form, data: memoryview, parameters: Collection[str]) -> tuple[FragmentSnapshot, History]:
    """Read a snapshot, or refuse it (BadFrame) if it is not one of this fragment. `parameters`: those with momentum."""
    if len(data) < _LENGTH.size:
        raise BadFrame(f"a fragment's snapshot has at least {_LENGTH.size} bytes, got {len(data)}")
    (length,) = _LENGTH.unpack_from(data)
    if length > min(MOST_HEAD_BYTES, len(data) - _LENGTH.size):
        raise BadFrame(f"the head of a fragment's snapshot cannot have {length} bytes of {len(data)}")
    begin, size = _LENGTH.size + length, _section_bytes(form)
    try:
        head = msgspec.msgpack.decode(bytes(data[_LENGTH.size : begin]).rstrip(b" "), type=SnapshotHead)
        check_history({"": head.history} if head.history else {})
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ConfigError) as error:
        raise BadFrame(f"the head of a fragment's snapshot: {error}") from error
    sections = 1 + head.has_momentum + head.has_centre
    if len(data) != begin + sections * size:
        raise BadFrame(f"a fragment's snapshot has {begin + sections * size} bytes, got {len(data)}")
    views = [fp32_views(data, form.full.places, begin + number * size) for number in range(sections)]
    if anchor_hash(views[0].values()) != head.anchor_hash:
        raise BadFrame("the anchor in a fragment's snapshot does not have the hash that its head names")
    for section in views:
        odd = next((n for n in parameters if n in section and not section[n].abs().le(ABSURD).all()), None)
        if odd is not None:
            raise BadFrame(f"a fragment's snapshot holds NaN, Inf or absurd values in {odd!r}")
    momentum = {n: v.reshape(-1) for n, v in views[1].items() if n in parameters} if head.has_momentum else {}
    centre = views[-1] if head.has_centre else {}
    return FragmentSnapshot(head.version, head.anchor_hash, views[0], momentum, centre), head.history


def most_bytes(form: Form) -> int:
    """The size limit of a snapshot of the fragment."""
    return _LENGTH.size + MOST_HEAD_BYTES + SECTIONS * _section_bytes(form)


def _section_bytes(form: Form) -> int:
    return form.full.size_bytes - form.full.data_begin


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", torch.float32) for name, tensor in tensors.items()}
