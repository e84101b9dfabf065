"""The simulated disk forgives nothing that a real one need not forgive."""

from __future__ import annotations

import errno
import random

import pytest

from outerstep.simulate.disk import Power, PowerCut, SimDisk

SEEDS = range(200)


def do(disk: SimDisk, *operations: str) -> int:
    """Until the power is cut; returns how many were done."""
    for done, operation in enumerate(operations):
        kind, *names = operation.split()
        try:
            match kind:
                case "write":
                    disk.write(names[0], [b"new ", b"bytes"])
                case "sync":
                    disk.sync(names[0])
                case "rename":
                    disk.rename(*names)
                case "remove":
                    disk.remove(names[0])
                case _:
                    disk.sync_folder()
        except PowerCut:
            return done
    return len(operations)


def after_a_cut(seed: int, *operations: str) -> dict[str, bytes]:
    """What is on the disk when these were done, then the power was cut."""
    disk = SimDisk(Power(random.Random(seed)))
    do(disk, *operations)
    disk.power.cut()
    with pytest.raises(PowerCut):
        disk.names()
    disk.restart()
    disk.power.is_off = False
    return {name: bytes(disk.read(name)) for name in disk.names()}


DANCE = ("write .x", "sync .x", "rename .x x", "folder")


def test_what_was_synced_with_its_folder_is_there_for_sure() -> None:
    assert all(after_a_cut(seed, *DANCE) == {"x": b"new bytes"} for seed in SEEDS)


def test_without_the_folder_a_name_may_or_may_not_be_there() -> None:
    found = [after_a_cut(seed, *DANCE[:-1]) for seed in SEEDS]
    assert {frozenset(files) for files in found} == {
        frozenset(),
        frozenset({".x"}),
        frozenset({"x"}),
        frozenset({".x", "x"}),
    }
    assert all(data == b"new bytes" for files in found for data in files.values())


def test_a_name_may_be_there_without_its_bytes_or_with_a_part_of_them() -> None:
    found = {after_a_cut(seed, "write x", "folder")["x"] for seed in SEEDS}
    assert {b"", b"new bytes"} < found
    assert all(b"new bytes".startswith(part) for part in found)


def test_what_was_removed_may_be_back() -> None:
    found = [after_a_cut(seed, *DANCE, "remove x") for seed in SEEDS]
    assert {} in found
    assert {"x": b"new bytes"} in found


def test_the_power_can_go_at_any_single_operation() -> None:
    for number in range(1, 1 + len(DANCE)):
        disk = SimDisk(Power(random.Random(0), operations_left=number))
        assert do(disk, *DANCE) == number - 1
        assert disk.power.is_off


def test_a_full_disk_takes_a_part_and_says_so() -> None:
    disk = SimDisk(Power(random.Random(0), trouble=errno.ENOSPC))
    with pytest.raises(OSError, match="trouble") as raised:
        disk.write("x", [b"many bytes"])
    assert raised.value.errno == errno.ENOSPC
    disk.power.trouble = 0
    disk.write("x", [b"many bytes"])
    assert bytes(disk.read("x")) == b"many bytes"


def test_bytes_whose_sync_failed_are_not_saved_by_the_next_sync() -> None:
    kept, failed = set(), 0
    for seed in SEEDS:
        disk = SimDisk(Power(random.Random(seed)))
        do(disk, "write x", "folder")
        disk.power.trouble = errno.EIO
        try:
            disk.sync("x")
        except OSError:
            failed += 1
            disk.power.trouble = 0
            disk.sync("x")
            disk.restart()
            kept.add(bytes(disk.read("x")))
    assert failed > 20
    assert b"" in kept
