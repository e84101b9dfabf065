"""The journal: what happened since the last checkpoint, one file per record, each there whole or not at all.

    record-0000000000000042     magic · lengths · head (JSON) · payload · xxh3_128 of everything before

A record is written under a name that nobody reads, synced, renamed, and the folder synced; only then `append` returns,
and only then anybody may be told. So there is no half-written record to recognize: what does not have its hash was
damaged afterwards, and is refused by name. Serial numbers have no gaps; a checkpoint says up to which one it includes.

After an error nothing has been appended, and it may be tried again; from the beginning, because bytes whose sync failed
once may be gone although a second sync succeeds.
"""

from __future__ import annotations

import logging
import re
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import xxhash

from ..digest import Buffer
from ..errors import ModelError
from .disk import Disk

log = logging.getLogger(__name__)

MAGIC = b"OSTEPJ01"
_LENGTHS = struct.Struct("<QQ")  # of head and payload
_BEGIN = len(MAGIC) + _LENGTHS.size
_DIGEST = 16
_NAME = re.compile(r"record-(\d{16})\Z")
_UNFINISHED = ".unfinished"


@dataclass(frozen=True)
class Record:
    serial: int
    head: bytes
    payload: memoryview


class Journal:
    """Of one folder. From any thread; one record is written at a time."""

    def __init__(self, disk: Disk, *, ours: bool = True) -> None:
        """`ours`: we alone write here. Otherwise it is only read, and what is unfinished may yet be finished."""
        self._disk = disk
        self._lock = threading.Lock()
        self._sizes: dict[int, int] = {}  # bytes of each record, in the order of their serial numbers
        self._last = 0
        for name in disk.names():
            if name.endswith(_UNFINISHED):
                if ours:
                    disk.remove(name)
            elif found := _NAME.match(name):
                self._sizes[int(found[1])] = len(disk.read(name))
        self._sizes = dict(sorted(self._sizes.items()))
        self._last = max(self._sizes, default=0)

    @property
    def last(self) -> int:
        """The serial number of the newest record, though it may have been cut; 0 = there has been none."""
        return self._last

    @property
    def size_bytes(self) -> int:
        return self.behind(0)[1]

    def behind(self, serial: int) -> tuple[int, int]:
        """How many records there are behind this one, and how many bytes they have. Also while one is written."""
        sizes = [size for number, size in self._sizes.copy().items() if number > serial]
        return len(sizes), sum(sizes)

    def begin_after(self, serial: int) -> None:
        """A checkpoint includes the records up to this one: the next gets a higher number."""
        self._last = max(self._last, serial)

    def append(self, head: bytes, payload: Sequence[Buffer] = ()) -> int:
        """Write a record; when this returns it is durable. Returns its serial number."""
        with self._lock:
            serial = self._last + 1
            name = f"record-{serial:016}"
            body = [memoryview(piece).cast("B") for piece in payload]
            length = sum(map(len, body))
            pieces: list[Buffer] = [MAGIC, _LENGTHS.pack(len(head), length), head, *body]
            digest = xxhash.xxh3_128()
            for piece in pieces:
                digest.update(piece)
            try:
                self._disk.write(name + _UNFINISHED, [*pieces, digest.digest()])
                self._disk.sync(name + _UNFINISHED)
                self._disk.rename(name + _UNFINISHED, name)
                self._disk.sync_folder()
            except OSError:
                with suppress(OSError):  # it is removed at the next start, or overwritten by the next attempt
                    self._disk.remove(name + _UNFINISHED)
                raise
            self._sizes[serial] = _BEGIN + len(head) + length + _DIGEST
            self._last = serial
            return serial

    def after(self, serial: int) -> Iterator[Record]:
        """The records behind a checkpoint that includes everything up to `serial`, each checked before it is given."""
        expected = serial + 1
        for number in list(self._sizes):
            if number <= serial:
                continue
            if number != expected:
                raise ModelError(
                    f"journal record {expected} is missing, record {number} is there: rounds that workers were told "
                    "of are lost; restore the file, or resume a saved state by its path to drop what came after it"
                )
            yield self._read(number)
            expected += 1

    def cut(self, up_to: int) -> None:
        """Forget the records up to this serial number: checkpoints include them. Oldest first, so that a cut which is
        interrupted leaves no gap."""
        with self._lock:
            doomed = [serial for serial in self._sizes if serial <= up_to]
            for serial in doomed:
                try:
                    self._disk.remove(f"record-{serial:016}")
                except OSError as error:
                    log.warning("journal record %d could not be deleted: %s", serial, error)
                    return
                del self._sizes[serial]
            if doomed:
                self._disk.sync_folder()

    def _read(self, serial: int) -> Record:
        name = f"record-{serial:016}"
        data = self._disk.read(name)
        problem = _problem(data)
        if problem:
            raise ModelError(
                f"journal {name} is damaged: {problem}; restore the file from a copy, or resume a saved state by its "
                "path to drop what came after it"
            )
        head_length, length = _LENGTHS.unpack(data[len(MAGIC) : _BEGIN])
        payload_begin = _BEGIN + head_length
        return Record(serial, bytes(data[_BEGIN:payload_begin]), data[payload_begin : payload_begin + length])


def _problem(data: memoryview) -> str:
    """What is wrong with a record; "" = nothing."""
    if len(data) < _BEGIN + _DIGEST or data[: len(MAGIC)] != MAGIC:
        return f"it has {len(data)} bytes and does not begin as a record does"
    head_length, length = _LENGTHS.unpack(data[len(MAGIC) : _BEGIN])
    expected = _BEGIN + head_length + length + _DIGEST
    if len(data) != expected:
        return f"it must have {expected} bytes, got {len(data)}"
    if xxhash.xxh3_128_digest(data[:-_DIGEST]) != data[-_DIGEST:]:
        return "its bytes do not have the hash written at its end"
    return ""
