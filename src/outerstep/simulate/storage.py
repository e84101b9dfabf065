"""What a simulated server has on its disk: the real journal, and checkpoints of one small file each."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec

from ..coordination.server.commits import WriteCheckpoint, newest_first, superseded
from ..coordination.server.remembered import Remembered
from ..digest import data_hash
from ..durable.journal import Journal
from ..types import Participant, Plain
from .disk import Power, SimDisk
from .history import Contents

_CONTENTS = msgspec.json.Decoder(Contents)
CHECKPOINTS = 2


class SimVersion(Plain, frozen=True):
    """What a round made of a fragment."""

    fragment: int
    version: int
    anchor_hash: str
    participants: tuple[Participant, ...] = ()


class SimRecord(Plain, frozen=True):
    """The head of a record. round None: a note, only the coordinator changed."""

    remembered: Remembered
    round: SimVersion | None


class SimCheckpoint(Plain, frozen=True):
    """`includes`: the serial number of the last record in it."""

    includes: int
    remembered: Remembered
    fragments: tuple[SimVersion, ...]


_RECORD = msgspec.json.Decoder(SimRecord)
_CHECKPOINT = msgspec.json.Decoder(SimCheckpoint)


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


class SimStorage:
    """Of one start of the server."""

    def __init__(self, machine: Machine, journal_type: type[Journal] = Journal) -> None:
        self._disk = machine.states
        self.journal = journal_type(machine.journal)
        self._kept = {name: int(name[6:]) for name in self._disk.names() if len(name) == 22}  # their serial numbers

    def append(self, remembered: Remembered, round_: SimVersion | None, contents: Contents) -> None:
        self.journal.append(
            msgspec.json.encode(SimRecord(remembered=remembered, round=round_)), [encoded(contents)] if round_ else []
        )

    def checkpoint(self, task: WriteCheckpoint, fragments: tuple[SimVersion, ...]) -> None:
        """May fail half-way, and be tried again or not."""
        self.journal.begin_after(task.includes)
        state = SimCheckpoint(includes=task.includes, remembered=task.remembered, fragments=fragments)
        data, serial = msgspec.json.encode(state), 1 + max(self._kept.values(), default=0)
        name = f"state-{serial:016}"
        self._disk.write(name + ".new", [data_hash([data]).encode(), data])
        self._disk.sync(name + ".new")
        self._disk.rename(name + ".new", name)
        self._disk.sync_folder()
        for old in superseded(self._kept, CHECKPOINTS - 1):
            self._disk.remove(old)
            del self._kept[old]
        self._kept[name] = serial

    def load(self) -> tuple[SimCheckpoint, list[tuple[SimRecord, Contents]]] | None:
        """The newest checkpoint that is whole, and what happened since. None: nobody was told of a run."""
        for name in newest_first(self._kept):
            data = bytes(self._disk.read(name))
            if data_hash([data[32:]]).encode() != data[:32]:
                self._disk.remove(name)
                del self._kept[name]
                continue
            state = _CHECKPOINT.decode(data[32:])
            self.journal.begin_after(state.includes)
            records = [
                (_RECORD.decode(record.head), decoded(record.payload)) for record in self.journal.after(state.includes)
            ]
            return state, records
        return None


def encoded(contents: Contents) -> bytes:
    return msgspec.json.encode(contents)


def decoded(payload: memoryview) -> Contents:
    return _CONTENTS.decode(payload) if payload else []
