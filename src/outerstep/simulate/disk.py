"""A disk with two images: what a process sees, and what is there after the power was cut.

Bytes become durable by `sync`, names by `sync_folder`. A power cut drops the rest, or keeps any part of it: a disk may
write whatever it likes whenever it likes. So a file may be there under its new name although the folder was never
synced, a name may be there without its bytes, and of bytes that were never synced any first part may be there.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..digest import Buffer


class PowerCut(Exception):
    """From here on nothing happens any more. (Not an OSError: no process sees it.)"""


@dataclass
class Power:
    """What may happen to all disks of a machine. `trouble`: every operation may fail like this (an errno, 0 = none)."""

    rng: random.Random
    trouble: int = 0
    operations_left: int | None = None  # until the power is cut; None = it is not going to be
    is_off: bool = False
    failed: int = 0  # operations, by trouble

    def begin(self) -> bool:
        """An operation that changes something. True: it happens, and it is the last one before the lights go out."""
        if self.is_off:
            raise PowerCut
        if self.operations_left is None:
            return False
        self.operations_left -= 1
        if self.operations_left > 0:
            return False
        self.cut()
        if self.rng.random() < 0.5:
            raise PowerCut
        return True

    def fails(self, chance: float) -> bool:
        failing = bool(self.trouble) and self.rng.random() < chance
        self.failed += failing
        return failing

    def cut(self) -> None:
        self.is_off, self.operations_left = True, None


@dataclass(eq=False)
class _File:
    """`synced`: what is on the disk for sure; None = it was never synced."""

    data: bytes = b""
    synced: bytes | None = None
    is_lost: bool = False  # a sync failed: the next one believes that there is nothing to do


@dataclass
class SimDisk:
    """One folder (`durable.disk.Disk`)."""

    power: Power
    _names: dict[str, _File] = field(default_factory=dict)
    _synced: dict[str, _File] = field(default_factory=dict)
    _meanwhile: dict[str, list[_File | None]] = field(default_factory=dict)  # what each name was since then

    def names(self) -> list[str]:
        self._check_power()
        return sorted(self._names)

    def read(self, name: str) -> memoryview:
        self._check_power()
        return memoryview(self._file(name).data)

    def write(self, name: str, pieces: Iterable[Buffer]) -> None:
        last = self.power.begin()
        file = self._names.get(name)
        if file is None:
            file = _File()
            self._call(name, file)
        data = b"".join(bytes(piece) for piece in pieces)
        file.is_lost = False
        file.data = data
        if last or self.power.fails(1.0 if self.power.trouble == errno.ENOSPC else 0.5):
            file.data = data[: self.power.rng.randrange(len(data) + 1)]
            self._end(last)

    def sync(self, name: str) -> None:
        last = self.power.begin()
        file = self._file(name)
        if self.power.fails(0.5):
            file.is_lost = True
            self._end(last)
        if not file.is_lost:
            file.synced = file.data
        if last:
            raise PowerCut

    def rename(self, old: str, new: str) -> None:
        last = self.power.begin()
        file = self._file(old)
        if self.power.fails(0.3):
            self._end(last)
        self._call(new, file)
        self._call(old, None)
        if last:
            raise PowerCut

    def remove(self, name: str) -> None:
        last = self.power.begin()
        self._file(name)
        if self.power.trouble == errno.EIO and self.power.fails(0.3):
            self._end(last)
        self._call(name, None)
        if last:
            raise PowerCut

    def sync_folder(self) -> None:
        last = self.power.begin()
        if self.power.fails(0.5):
            self._end(last)
        self._synced = dict(self._names)
        self._meanwhile.clear()
        if last:
            raise PowerCut

    def restart(self) -> None:
        """The power is back: what the disk kept is all there is."""
        rng = self.power.rng
        kept: dict[str, _File] = {}
        for name in sorted(self._synced.keys() | self._meanwhile.keys()):
            states = [self._synced.get(name), *self._meanwhile.get(name, ())]
            file = states[0] if rng.random() < 0.5 else rng.choice(states)
            if file is not None:
                kept[name] = file
        for file in dict.fromkeys(kept.values()):
            self._settle(file)
        self._names, self._synced, self._meanwhile = dict(kept), dict(kept), {}

    def damage(self, name: str) -> None:
        """Years later: a byte has changed where nobody looked."""
        file = self._file(name)
        changed = bytearray(file.data)
        changed[len(changed) // 2] ^= 1
        file.data = file.synced = bytes(changed)

    def _settle(self, file: _File) -> None:
        """Never half of what was synced; of what was not, any part."""
        rng = self.power.rng
        if file.data != file.synced:
            part = file.data[: rng.randrange(len(file.data) + 1)]
            file.data = rng.choice([file.synced if file.synced is not None else b"", part, file.data])
        file.synced, file.is_lost = file.data, False

    def _call(self, name: str, file: _File | None) -> None:
        self._meanwhile.setdefault(name, []).append(file)
        if file is None:
            self._names.pop(name, None)
        else:
            self._names[name] = file

    def _file(self, name: str) -> _File:
        if name not in self._names:
            raise FileNotFoundError(errno.ENOENT, "no such file", name)
        return self._names[name]

    def _end(self, last: bool) -> None:
        """Of an operation that was not completed."""
        if last:
            raise PowerCut
        raise OSError(self.power.trouble, "simulated trouble")

    def _check_power(self) -> None:
        if self.power.is_off:
            raise PowerCut
