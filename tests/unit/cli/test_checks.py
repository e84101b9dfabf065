"""How `outerstep doctor` finds out: disks, cores, drivers, rates."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from outerstep.cli import checks
from outerstep.cli.checks import FIRST_BYTES, find_gpus, look_at_secrets, nvidia_driver, rate, try_disk
from outerstep.wire.pages import MAX_BYTES


class Wire:
    """Takes bytes at a rate, in a time of its own."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s, self.now, self.sizes = bytes_per_s, 0.0, list[int]()

    def transfer(self, size: int) -> None:
        self.sizes.append(size)
        self.now += size / self.bytes_per_s

    def clock(self) -> float:
        return self.now


@pytest.mark.parametrize("bytes_per_s", [12_500.0, 1.25e6, 1.25e9])
def test_a_rate_is_measured_on_slow_and_fast_lines(bytes_per_s: float) -> None:
    wire = Wire(bytes_per_s)
    assert rate(wire.transfer, 1, wire.clock) == pytest.approx(bytes_per_s)


def test_a_slow_line_is_not_kept_busy_for_long_and_a_fast_one_is_asked_for_more() -> None:
    slow, fast = Wire(12_500.0), Wire(1e9)
    rate(slow.transfer, 1, slow.clock)
    rate(fast.transfer, 1, fast.clock)
    assert slow.sizes == [FIRST_BYTES]
    assert fast.sizes[-1] == MAX_BYTES


def test_several_connections_add_up() -> None:
    wire = Wire(1e6)  # one after the other in its own time: four of them take four times as long
    assert rate(wire.transfer, 4, wire.clock) == pytest.approx(1e6)


def test_a_disk_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    found = try_disk("save_dir", str(tmp_path))
    assert found.error is None
    assert found.free_bytes > 0
    assert found.fsync_s > 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_tried_where_it_would_be_made(tmp_path: Path) -> None:
    found = try_disk("save_dir", str(tmp_path / "a" / "b"))
    assert found.tried == str(tmp_path)
    assert not (tmp_path / "a").exists()


def test_a_folder_that_takes_no_files_is_an_error() -> None:
    assert try_disk("save_dir", "/proc/outerstep").error is not None


def test_the_driver_is_what_the_kernel_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "DRIVER_FILE", tmp_path / "version")
    assert nvidia_driver() == ""
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 2024\n")
    assert nvidia_driver() == "550.54.15"
    (tmp_path / "version").write_text("something else\n")
    assert nvidia_driver() == "of unknown version"


def test_a_torch_that_cannot_use_its_gpus_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def no(index: int) -> tuple[int, int]:
        raise RuntimeError("CUDA driver version is insufficient\nand more")

    cuda = SimpleNamespace(device_count=lambda: 1, mem_get_info=no, get_device_name=lambda index: "x")
    torch = SimpleNamespace(version=SimpleNamespace(cuda="13.0", hip=None), cuda=cuda)
    found = find_gpus(torch)
    assert (found.built_for, found.devices, found.error) == ("CUDA 13.0", [], "CUDA driver version is insufficient")
    plain = SimpleNamespace(version=SimpleNamespace(cuda=None, hip=None), cuda=cuda)
    assert find_gpus(plain).built_for == ""


def test_secrets_are_looked_at_as_strictly_as_where_they_are_used(tmp_path: Path) -> None:
    folder = tmp_path / "outerstep"
    assert look_at_secrets(folder).level == "ok"
    folder.mkdir(mode=0o700)
    secret = folder / "known_servers.json"
    secret.touch(mode=0o600)
    assert look_at_secrets(folder).level == "ok"
    secret.chmod(0o640)
    assert look_at_secrets(folder).remedy == f"chmod 600 {secret}"
    secret.chmod(0o600)
    folder.chmod(0o777)
    assert look_at_secrets(folder).remedy == f"chmod 700 {folder}"
