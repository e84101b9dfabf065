"""A journal is there whole or not at all, whatever the disk does."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from outerstep.digest import Buffer
from outerstep.durable.disk import FolderDisk
from outerstep.durable.journal import Journal
from outerstep.errors import ModelError


def contents(journal: Journal, after: int = 0) -> list[tuple[int, bytes, bytes]]:
    return [(record.serial, record.head, bytes(record.payload)) for record in journal.after(after)]


def a_journal(place: Path, count: int = 3) -> Journal:
    journal = Journal(FolderDisk(place))
    for i in range(1, count + 1):
        assert journal.append(b"head %d" % i, [b"pay", b"load %d" % i]) == i
    return journal


def test_records_come_back_in_order_with_their_bytes(tmp_path: Path) -> None:
    a_journal(tmp_path / "new" / "folder")
    again = Journal(FolderDisk(tmp_path / "new" / "folder"))
    assert again.last == 3
    assert contents(again) == [(i, b"head %d" % i, b"payload %d" % i) for i in (1, 2, 3)]
    assert contents(again, after=2) == [(3, b"head 3", b"payload 3")]
    assert again.append(b"") == 4
    assert contents(again, after=3) == [(4, b"", b"")]


def test_a_cut_forgets_the_oldest_and_numbers_go_on(tmp_path: Path) -> None:
    journal = a_journal(tmp_path)
    whole = journal.size_bytes
    journal.cut(2)
    assert 0 < journal.size_bytes < whole
    assert [record.serial for record in Journal(FolderDisk(tmp_path)).after(2)] == [3]
    journal.cut(3)
    again = Journal(FolderDisk(tmp_path))
    again.begin_after(3)
    assert again.append(b"") == 4


@pytest.mark.parametrize("change", ["truncated", "empty", "flipped", "longer"])
def test_a_damaged_record_is_refused_by_name(tmp_path: Path, change: str) -> None:
    a_journal(tmp_path)
    file = tmp_path / "record-0000000000000002"
    data = bytearray(file.read_bytes())
    changed = {"truncated": data[:-1], "empty": b"", "longer": data + b"x"}
    data[len(data) // 2] ^= 1
    file.write_bytes(changed.get(change, data))
    records = Journal(FolderDisk(tmp_path)).after(0)
    assert next(records).serial == 1
    with pytest.raises(ModelError, match=r"record-0000000000000002 is damaged.*resume a saved state by its path"):
        next(records)


def test_a_missing_record_is_noticed(tmp_path: Path) -> None:
    a_journal(tmp_path)
    (tmp_path / "record-0000000000000002").unlink()
    with pytest.raises(ModelError, match="record 2 is missing, record 3 is there"):
        contents(Journal(FolderDisk(tmp_path)))


def test_what_was_not_finished_is_swept_away(tmp_path: Path) -> None:
    a_journal(tmp_path, 1)
    (tmp_path / "record-0000000000000002.unfinished").write_bytes(b"half a rec")
    assert Journal(FolderDisk(tmp_path)).last == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["record-0000000000000001"]


class FailingDisk(FolderDisk):
    """Fails at the operations named, once."""

    failing = ""

    def _fail(self, operation: str) -> None:
        if operation == self.failing:
            self.failing = ""
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, name: str, pieces: Iterable[Buffer]) -> None:
        every = list(pieces)
        super().write(name, every[:1])
        self._fail("write")
        super().write(name, every)

    def sync(self, name: str) -> None:
        self._fail("sync")
        super().sync(name)

    def rename(self, old: str, new: str) -> None:
        self._fail("rename")
        super().rename(old, new)

    def sync_folder(self) -> None:
        self._fail("sync_folder")
        super().sync_folder()


@pytest.mark.parametrize("operation", ["write", "sync", "rename", "sync_folder"])
def test_an_append_that_failed_can_be_tried_again(tmp_path: Path, operation: str) -> None:
    disk = FailingDisk(tmp_path)
    journal = Journal(disk)
    journal.append(b"first")
    disk.failing = operation
    with pytest.raises(OSError, match="No space"):
        journal.append(b"second", [b"x" * 100])
    assert disk.failing == "", "the fault fired"
    assert journal.last == 1
    assert journal.append(b"second", [b"x" * 100]) == 2
    assert contents(Journal(FolderDisk(tmp_path))) == [(1, b"first", b""), (2, b"second", b"x" * 100)]
