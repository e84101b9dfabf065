"""What a peer must hold of a fragment to go on with the others, and its form as bytes: what a joiner is given.

    length of the head, uint32 little-endian
    head: msgpack, padded with spaces to a multiple of 64
    θ, fp32 · buf, fp32, if the outer step has momentum · the last aggregate, fp32, if the rule starts from it

Tensors in the order of the fragment, each at a multiple of 8. All peers with the same version have the same bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from ...core.views import bytes_of, fp32_views
from ...errors import BadFrame, ConfigError
from ...screens import History, check_history
from ...types import Count, Hash, Plain
from ..forms import Form
from ..update import anchor_hash

_LENGTH = struct.Struct("<I")
ALIGNMENT = 64
MOST_HEAD_BYTES = 1 << 20


class Head(Plain, frozen=True):
    version: Count
    anchor_hash: Hash
    history: Annotated[tuple[tuple[float, ...], ...], Meta(max_length=64)] = ()
    has_momentum: bool = False
    has_centre: bool = False


@dataclass(frozen=True)
class Standing:
    """By tensor name; fp32 in host memory. `momentum` and `centre` are empty where there is none."""

    version: int
    anchor_hash: str
    anchor: Mapping[str, Tensor]
    momentum: Mapping[str, Tensor]
    history: History
    centre: Mapping[str, Tensor]


def write_standing(form: Form, standing: Standing) -> memoryview:
    head = msgspec.msgpack.encode(
        Head(
            version=standing.version,
            anchor_hash=standing.anchor_hash,
            history=standing.history,
            has_momentum=bool(standing.momentum),
            has_centre=bool(standing.centre),
        )
    )
    head += b" " * (-(_LENGTH.size + len(head)) % ALIGNMENT)
    sections = [section for section in (standing.anchor, standing.momentum, standing.centre) if section]
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


def read_standing(form: Form, data: memoryview, parameters: Mapping[str, object]) -> Standing:
    """Refuses (BadFrame) what is no such thing, or not of this fragment. `parameters`: the names that have momentum."""
    if len(data) < _LENGTH.size:
        raise BadFrame(f"a fragment's standing has at least {_LENGTH.size} bytes, got {len(data)}")
    (length,) = _LENGTH.unpack_from(data)
    if length > min(MOST_HEAD_BYTES, len(data) - _LENGTH.size):
        raise BadFrame(f"the head of a fragment's standing cannot have {length} bytes of {len(data)}")
    begin, size = _LENGTH.size + length, _section_bytes(form)
    try:
        head = msgspec.msgpack.decode(bytes(data[_LENGTH.size : begin]).rstrip(b" "), type=Head)
        check_history({"": head.history} if head.history else {})
    except (msgspec.MsgspecError, ConfigError) as error:
        raise BadFrame(f"the head of a fragment's standing: {error}") from error
    sections = 1 + head.has_momentum + head.has_centre
    if len(data) != begin + sections * size:
        raise BadFrame(f"a fragment's standing has {begin + sections * size} bytes, got {len(data)}")
    views = [fp32_views(data, form.full.places, begin + number * size) for number in range(sections)]
    if anchor_hash(views[0].values()) != head.anchor_hash:
        raise BadFrame("the anchor in a fragment's standing does not have the hash that its head names")
    momentum = {n: v.reshape(-1) for n, v in views[1].items() if n in parameters} if head.has_momentum else {}
    return Standing(
        version=head.version,
        anchor_hash=head.anchor_hash,
        anchor=views[0],
        momentum=momentum,
        history=head.history,
        centre=views[-1] if head.has_centre else {},
    )


def _section_bytes(form: Form) -> int:
    return form.full.size_bytes - form.full.data_begin


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", torch.float32) for name, tensor in tensors.items()}


__all__ = ["Standing", "on_host", "read_standing", "write_standing"]
