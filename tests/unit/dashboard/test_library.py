"""The chart library is fetched once, by its hash; without it a build goes on. The registry is a small real one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from npm_registry import FILES, TARBALL, Registry, archive, write_lock
from outerstep.dashboard import library
from outerstep.dashboard.files import page_files
from outerstep.dashboard.library import ATTEMPTS, REGISTRY, ChartLibrary, LibraryMissing, chart_library, registry_in


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(library, "PAUSE_S", 0.0)


@pytest.fixture
def tarball() -> bytes:
    return archive({**FILES, "more.js": b"not asked for"})


@pytest.fixture
def locked(tmp_path: Path, tarball: bytes) -> ChartLibrary:
    write_lock(tmp_path / "library.json", tarball)
    return chart_library(tmp_path)


@pytest.fixture
def registry(tarball: bytes) -> Iterator[Registry]:
    made = Registry(tarball)
    yield made
    made.close()


def test_it_is_fetched_once_and_holds_the_locked_files_alone(locked: ChartLibrary, registry: Registry) -> None:
    assert not locked.is_here()
    assert locked.place(registry.environ)
    assert {file.name: file.read_bytes() for file in locked.folder.iterdir()} == FILES
    assert not locked.place(registry.environ)
    assert registry.asked == [f"/{TARBALL}"]


def test_a_file_that_was_changed_is_fetched_again(locked: ChartLibrary, registry: Registry) -> None:
    locked.place(registry.environ)
    (locked.folder / "chart.js").write_bytes(b"var chart = 'of somebody else';")
    assert locked.read("chart.js") is None
    assert locked.place(registry.environ)
    assert locked.read("chart.js") == FILES["chart.js"]


def test_a_registry_that_stumbles_is_asked_again(locked: ChartLibrary, tarball: bytes) -> None:
    stumbling = Registry(None, tarball[:-3], tarball)
    assert locked.place(stumbling.environ)
    assert len(stumbling.asked) == 3
    stumbling.close()


def test_what_has_another_hash_is_not_unpacked(locked: ChartLibrary) -> None:
    lying = Registry(archive(dict.fromkeys(FILES, b"evil()")))
    with pytest.raises(LibraryMissing, match=r"its hash must be sha512-.*, got sha512-"):
        locked.place(lying.environ)
    assert len(lying.asked) == ATTEMPTS
    assert not locked.folder.exists()
    lying.close()


def test_without_a_registry_it_is_said_what_is_missing_and_what_to_do(locked: ChartLibrary, registry: Registry) -> None:
    registry.close()
    with pytest.raises(
        LibraryMissing, match=r"chart 1\.0\.0 could not be fetched from http://127.*python -m outerstep"
    ):
        locked.place(registry.environ)


def test_the_registry_is_npms_or_the_one_that_is_named() -> None:
    assert registry_in({}) == REGISTRY
    assert registry_in({"npm_config_registry": "https://npm.example.org/mirror/"}) == "https://npm.example.org/mirror"
    assert registry_in({"NPM_CONFIG_REGISTRY": "http://npm:4873"}) == "http://npm:4873"
    with pytest.raises(LibraryMissing, match="https://"):
        registry_in({"npm_config_registry": "file:///etc"})


def test_this_installation_has_the_library_that_is_locked() -> None:
    """If this fails: python -m outerstep.dashboard.library"""
    locked = chart_library()
    assert locked.is_here()
    assert b"uPlot (v1.6.32)" in (locked.read("uplot.js") or b"")
    assert b"MIT License" in (locked.read("uplot.LICENSE") or b"")


def test_the_command_that_fetches_it_says_nothing_when_it_is_here() -> None:
    """What a new user sees of `make demo` first. A warning of Python's own would be an error here."""
    command = [sys.executable, "-W", "error", "-m", "outerstep.dashboard.library"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_page_without_it_is_served_all_the_same(
    monkeypatch: pytest.MonkeyPatch, locked: ChartLibrary, caplog: pytest.LogCaptureFixture
) -> None:
    lost = ChartLibrary(**{**vars(chart_library()), "folder": locked.folder})
    monkeypatch.setattr("outerstep.dashboard.files.chart_library", lambda: lost)
    served = page_files()
    assert served["/page/uplot.js"](None).status == 404  # type: ignore[arg-type]
    assert "/page/charts.js" in served
    assert "the page has no charts: uPlot is not here. To fetch it: python -m outerstep" in caplog.text
