"""Read the newest agreed model from a server, without joining its run.

model = read_model(HttpTransport("192.168.1.100:8512"))          # needs a token that may read
model.tensors()                                                   # by name, fp32 where it is trained
model = read_model(transport, known=model.etag) or model          # an evaluation loop: only if there is a newer one

Nothing of it is believed before it is checked: the header before the bytes are taken, every fragment's bytes by the
hash that the server states.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ...coordination.backoff import Backoff
from ...digest import data_hash, hash_like
from ...errors import BadRequest, Busy, TransportError
from ...wire.http_transport import HttpTransport
from ...wire.messages import HASH_HEADER, decode_json
from ...wire.model_file import (
    DTYPES,
    LENGTH_BYTES,
    MODEL_FILES_PATH,
    MODEL_PATH,
    FileList,
    ModelHeader,
    header_bytes,
    read_header,
)

SLICE_BYTES = 4 << 20
TRIES = 12  # while the server has no place for one more reader, or a version is on its way
PAUSES = Backoff(0.5, 10.0)

T = TypeVar("T")
MakeRoom = Callable[[int], memoryview]
Progress = Callable[[int, int], object]  # bytes so far, and in all


@dataclass(frozen=True)
class ReadModel:
    """`file`: the bytes of a safetensors file. `etag`: to ask for a newer one with."""

    header: ModelHeader
    file: memoryview
    etag: str = ""

    def stored(self) -> dict[str, Tensor]:
        """Each once, as views of `file`."""
        kept: dict[str, Tensor] = {}
        places = self.header.places
        for stored in self.header.tensors:
            begin, end = places[stored.name]
            dtype: torch.dtype = getattr(torch, DTYPES[stored.dtype])
            flat = torch.frombuffer(self.file[begin:end], dtype=dtype) if end > begin else torch.empty(0, dtype=dtype)
            kept[stored.name] = flat.view(stored.shape)
        return kept

    def tensors(self) -> dict[str, Tensor]:
        """By every name that the model has for them."""
        kept, aliases = self.stored(), self.header.facts.aliases
        return {**kept, **{alias: kept[name] for alias, name in aliases.items() if name in kept}}

    def check(self) -> None:
        """Its bytes are those that the header names the hashes of."""
        facts, places = self.header.facts, self.header.places
        groups = [*zip(facts.fragments, facts.hashes, strict=True)]
        groups += [(facts.rest, facts.rest_hash)] if facts.rest_hash is not None else []
        for number, (names, expected) in enumerate(groups):
            if hash_like(expected, (self.file[slice(*places[name])] for name in names)) != expected:
                what = f"fragment {number}" if number < len(facts.fragments) else "what is not trained"
                raise TransportError(f"the model arrived damaged: {what} does not have the hash {expected}; try again")


class _IncomingModel:
    """A model on its way in: its header is read and checked before there is room for the rest."""

    def __init__(self, make_room: MakeRoom, progress: Progress) -> None:
        self._make_room, self._progress = make_room, progress
        self.header: ModelHeader | None = None
        self.file = memoryview(b"")

    def places(self, size_bytes: int) -> Iterator[memoryview]:
        length = memoryview(bytearray(LENGTH_BYTES))
        yield length
        text = memoryview(bytearray(min(header_bytes(length), size_bytes)))
        yield text
        self.header = header = read_header(text)
        if header.size_bytes != size_bytes:
            raise TransportError(f"the model's header says {header.size_bytes} bytes, {size_bytes} are announced")
        self.file = file = self._make_room(size_bytes)
        file[:LENGTH_BYTES], file[LENGTH_BYTES : header.data_begin] = length, text
        for begin in range(header.data_begin, size_bytes, SLICE_BYTES):
            self._progress(begin, size_bytes)
            yield file[begin : begin + SLICE_BYTES]
        self._progress(size_bytes, size_bytes)


def read_model(
    transport: HttpTransport,
    *,
    fragment: int | None = None,
    known: str = "",
    make_room: MakeRoom = lambda size_bytes: memoryview(bytearray(size_bytes)),
    progress: Progress = lambda done, total: None,
) -> ReadModel | None:
    """The newest agreed model, or one fragment of it; None if what is `known` is still the newest. `make_room`: where
    the file goes. Asks again while the server is busy."""
    incoming = _IncomingModel(make_room, progress)
    path = MODEL_PATH if fragment is None else f"{MODEL_PATH}?fragment={fragment}"
    answer = _ask(lambda: transport.read(path, incoming, known=known))
    if answer is None:
        return None
    headers, header = answer[0], incoming.header
    assert header is not None
    if headers.get(HASH_HEADER) != header.facts.hash:
        raise TransportError(f"{transport.address} states another hash than the model's header has; try again")
    model = ReadModel(header, incoming.file, headers.get("ETag", ""))
    model.check()
    return model


def read_files(transport: HttpTransport) -> dict[str, bytes]:
    """The small files beside the model, by name."""
    found: dict[str, bytes] = {}
    listed = _ask(lambda: transport.read(MODEL_FILES_PATH))
    assert listed is not None
    try:
        entries = decode_json(listed[1], FileList).files
    except BadRequest as error:
        raise TransportError(f"{transport.address} lists the files beside the model as none can be: {error}") from error
    for entry in entries:
        data = memoryview(bytearray(entry.size_bytes))
        transport.read(f"{MODEL_FILES_PATH}?name={entry.name}", data)
        if data_hash([data]) != entry.hash:
            raise TransportError(f"{entry.name} arrived damaged, or was changed meanwhile; try again")
        found[entry.name] = bytes(data)
    return found


def _ask(once: Callable[[], T]) -> T:
    for failures in range(TRIES - 1):
        try:
            return once()
        except Busy:
            time.sleep(PAUSES.pause_s(failures, random.Random()))
    return once()
