"""What a simulated server keeps on its disk: the real journal, and checkpoints in one small file each.

The order is that of the real server: a record is durable before anybody is told; a checkpoint names the last record it
includes; the journal is cut only so far that the checkpoint before the newest can still be brought up to date.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec

from ..coordination.server.remembered import Remembered
from ..digest import data_hash
from ..durable.journal import Journal
from ..types import Participant, Plain
from .disk import Power, SimDisk
from .history import Contents

_CONTENTS = msgspec.json.Decoder(Contents)
CHECKPOINTS = 2


class Made(Plain, frozen=True):
    """What a round made of a fragment."""

    fragment: int
    version: int
    anchor_hash: str
    participants: tuple[Participant, ...] = ()


class Head(Plain, frozen=True):
    """Of a record. round None: a note, only the coordinator changed."""

    remembered: Remembered
    round: Made | None


class Checkpoint(Plain, frozen=True):
    """`serial`: of the last record that it includes."""

    serial: int
    remembered: Remembered
    fragments: tuple[Made, ...]


_HEAD = msgspec.json.Decoder(Head)
_CHECKPOINT = msgspec.json.Decoder(Checkpoint)


@dataclass
class Machine:
    """The server's: it outlives the server's process."""

    rng: random.Random
    power: Power = field(init=False)
    journal: SimDisk = field(init=False)
    states: SimDisk = field(init=False)

    def __post_init__(self) -> None:
        self.power = Power(self.rng)
        self.journal, self.states = SimDisk(self.power), SimDisk(self.power)

    def damage_newest(self) -> bool:
        """Something happens to the newest checkpoint, if it is not the only one."""
        names = [name for name in self.states.names() if not name.endswith(".new")]
        if len(names) > 1:
            self.states.damage(names[-1])
        return len(names) > 1

    def restart(self) -> None:
        self.power.is_off, self.power.operations_left = False, None
        self.journal.restart()
        self.states.restart()


class Keeper:
    """Of one start of the server."""

    def __init__(self, machine: Machine, journal_type: type[Journal] = Journal) -> None:
        self._disk = machine.states
        self.journal = journal_type(machine.journal)
        self._kept = [int(name[6:]) for name in self._disk.names() if len(name) == 22]  # their serials, ascending
        self.rounds_since = 0  # the newest checkpoint

    def round(self, remembered: Remembered, made: Made, contents: Contents) -> None:
        self.journal.append(msgspec.json.encode(Head(remembered=remembered, round=made)), [encoded(contents)])

    def note(self, remembered: Remembered) -> None:
        self.journal.append(msgspec.json.encode(Head(remembered=remembered, round=None)))

    def checkpoint(self, remembered: Remembered, fragments: tuple[Made, ...]) -> None:
        """May fail half-way, and be tried again or not."""
        serial = self.journal.last
        if serial in self._kept:
            return
        data = msgspec.json.encode(Checkpoint(serial=serial, remembered=remembered, fragments=fragments))
        name = f"state-{serial:016}"
        self._disk.write(name + ".new", [data_hash([data]).encode(), data])
        self._disk.sync(name + ".new")
        self._disk.rename(name + ".new", name)
        self._disk.sync_folder()
        self._kept.append(serial)
        self.rounds_since = 0
        for old in self._kept[:-CHECKPOINTS]:
            self._disk.remove(f"state-{old:016}")
            self._kept.remove(old)
        self.journal.cut(self._kept[0])

    def load(self) -> tuple[Checkpoint, list[tuple[Head, Contents]]]:
        """The newest checkpoint that is whole, and what happened since."""
        for serial in self._kept[::-1]:
            data = bytes(self._disk.read(f"state-{serial:016}"))
            if data_hash([data[32:]]).encode() != data[:32]:
                self._kept.remove(serial)
                self._disk.remove(f"state-{serial:016}")
                continue
            self.journal.begin_after(serial)
            records = [(_HEAD.decode(record.head), decoded(record.payload)) for record in self.journal.after(serial)]
            return _CHECKPOINT.decode(data[32:]), records
        raise AssertionError(f"no checkpoint is whole: {self._disk.names()}")


def encoded(contents: Contents) -> bytes:
    return msgspec.json.encode(contents)


def decoded(payload: memoryview) -> Contents:
    return _CONTENTS.decode(payload) if payload else []
