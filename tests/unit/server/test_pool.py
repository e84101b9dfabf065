"""Rooms: memory first, then files; used again, and never by two at once."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest

from outerstep.pool import LET_GO_BYTES, Pool, watched
from outerstep.server.store import Shelf


def test_a_room_that_was_given_back_is_used_again() -> None:
    pool = Pool(memory_bytes=1 << 20, spool_bytes=0)
    room = pool.take(1000)
    room.view[:4] = b"mine"
    pool.give_back(room)
    del room
    again = pool.take(900)
    assert bytes(again.view[:4]) == b"mine"
    assert len(again.view) == 900
    assert pool.mapped_bytes == 1000
    assert pool.memory_bytes == 900


def test_memory_that_somebody_still_looks_at_is_not_used_again() -> None:
    pool = Pool(memory_bytes=1 << 20, spool_bytes=0)
    room = pool.take(1000)
    looking = room.view[10:20]
    looking[:] = b"0123456789"
    pool.give_back(room)
    del room
    other = pool.take(1000)
    other.view[:] = b"x" * 1000
    assert bytes(looking) == b"0123456789"
    del looking
    gc.collect()
    assert bytes(pool.take(1000).view[10:20]) == b"0123456789"


def test_in_use_and_idle_memory_stay_within_the_limit(tmp_path: Path) -> None:
    pool = Pool(memory_bytes=1000, spool_bytes=1 << 20, spool_dir=str(tmp_path))
    for size in (400, 900, 100, 500, 1000, 350, 350, 300):
        rooms = [pool.take(size) for _ in range(3)]
        assert pool.mapped_bytes <= 1000
        assert sum(len(room.view) for room in rooms if not room.on_disk) == pool.memory_bytes <= 1000
        for room in rooms:
            pool.give_back(room)
        del rooms, room
    assert pool.memory_bytes == pool.spooled_bytes == 0


def test_files_are_used_again_too(tmp_path: Path) -> None:
    pool = Pool(memory_bytes=1, spool_bytes=1 << 20, spool_dir=str(tmp_path))
    room = pool.take(5000)
    assert room.on_disk
    room.view[:4] = b"file"
    pool.give_back(room)
    del room
    assert bytes(pool.take(5000).view[:4]) == b"file"


def test_a_room_is_not_much_larger_than_what_is_in_it() -> None:
    pool = Pool(memory_bytes=1 << 20, spool_bytes=0)
    room = pool.take(100_000)
    pool.give_back(room)
    del room
    assert pool.take(100)
    assert pool.mapped_bytes == 100_100


def test_a_room_that_could_not_be_made_counts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(memory_bytes=1, spool_bytes=1 << 20, spool_dir=str(tmp_path))

    def full(*args: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        pool.take(5000)
    assert pool.spooled_bytes == 0
    monkeypatch.undo()
    assert pool.take(5000).on_disk


def test_while_one_file_is_made_others_find_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(memory_bytes=1000, spool_bytes=1 << 20, spool_dir=str(tmp_path))
    begun, go_on = threading.Event(), threading.Event()

    def slow(*args: int) -> None:
        begun.set()
        assert go_on.wait(30)

    monkeypatch.setattr("os.posix_fallocate", slow)
    made: list[bool] = []
    thread = threading.Thread(target=lambda: made.append(pool.take(5000).on_disk))
    thread.start()
    assert begun.wait(30)
    assert not pool.take(500).on_disk
    assert not made
    go_on.set()
    thread.join(30)
    assert made == [True]


def test_a_view_is_gone_when_its_last_slice_is() -> None:
    gone: list[bool] = []
    view = watched(memoryview(bytearray(100)), lambda: gone.append(True))
    piece = view[10:20][2:4].toreadonly()
    del view
    assert not gone
    del piece
    assert gone == [True]


def test_the_shelf_keeps_one_piece_of_memory_the_largest() -> None:
    shelf = Shelf()
    small, large = shelf.take(10), shelf.take(1000)
    addresses = small.data_ptr(), large.data_ptr()
    shelf.give_back(large)
    shelf.give_back(small)
    assert shelf.take(500).data_ptr() == addresses[1]
    assert shelf.take(10).data_ptr() not in addresses


def resident_file_bytes() -> int:
    """Of this process: the pages of files in its memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    shared = [line for line in lines if line.startswith(("RssFile:", "RssShmem:"))]
    return sum(int(line.split()[1]) for line in shared) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="/proc says what is resident")
def test_what_files_hold_is_let_go_of_and_comes_back(tmp_path: Path) -> None:
    """Ten times as much as is held at a time, written and then read, and none of it lost."""
    size, piece = 4 * LET_GO_BYTES, 1 << 20
    pool = Pool(memory_bytes=1, spool_bytes=1 << 30, spool_dir=str(tmp_path))
    rooms = [pool.take(size) for _ in range(3)]
    before, most = resident_file_bytes(), 0
    for begin in range(0, size, piece):
        for number, room in enumerate(rooms):
            assert room.used is not None
            room.view[begin : begin + piece] = bytes([1 + number + begin // piece]) * piece
            room.used(piece)
            most = max(most, resident_file_bytes())
    for begin in range(0, size, piece):
        for number, room in enumerate(rooms):
            assert bytes(room.view[begin : begin + piece]) == bytes([1 + number + begin // piece]) * piece
            assert room.used is not None
            room.used(piece)
            most = max(most, resident_file_bytes())
    assert most - before < 2 * LET_GO_BYTES


def test_memory_is_not_let_go_of() -> None:
    assert Pool(memory_bytes=1000, spool_bytes=0).take(10).used is None


def test_a_limit_that_changes_holds_from_then_on(tmp_path: Path) -> None:
    limits = [1000]
    pool = Pool(memory_bytes=lambda: limits[-1], spool_bytes=1 << 20, spool_dir=str(tmp_path))
    first = pool.take(800)
    assert (first.on_disk, pool.take(800).on_disk) == (False, True)
    limits.append(2000)
    assert not pool.take(800).on_disk
