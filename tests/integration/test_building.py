"""The package as it is built: the page's chart library is in it, and a source distribution fetches nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from npm_registry import FILES, Registry, archive, write_lock

ROOT = Path(__file__).parents[2]
PLACE = "outerstep/dashboard/vendor"


@pytest.fixture
def registry() -> Iterator[Registry]:
    made = Registry(archive(FILES))
    yield made
    made.close()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A clone in which nothing has been built yet."""
    place = tmp_path / "clone"
    skip = shutil.ignore_patterns("vendor", "__pycache__")
    shutil.copytree(ROOT / "src" / "outerstep" / "dashboard", place / "src" / "outerstep" / "dashboard", ignore=skip)
    (place / "src" / "outerstep" / "__init__.py").touch()
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, place)
    write_lock((place / "src" / PLACE).parent / "library.json", archive(FILES))
    return place


def build(source: Path, target: str, environ: dict[str, str]) -> tuple[Path, str]:
    """What was built, and what was said meanwhile."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target]
    own = {**os.environ, "no_proxy": "127.0.0.1", **environ}
    done = subprocess.run(command, cwd=source, env=own, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    [made] = (source / "dist").glob("*.tar.gz" if target == "sdist" else "*.whl")
    return made, done.stdout + done.stderr


def library_in(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as file:
        return {Path(name).name: file.read(name) for name in file.namelist() if name.startswith(f"{PLACE}/")}


@pytest.mark.slow
def test_a_wheel_has_the_library_and_one_from_the_source_distribution_fetches_nothing(
    tmp_path: Path, source: Path, registry: Registry
) -> None:
    packed, _ = build(source, "sdist", registry.environ)
    assert len(registry.asked) == 1
    with tarfile.open(packed) as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    [unpacked] = (tmp_path / "unpacked").iterdir()
    shutil.rmtree(unpacked / "dist", ignore_errors=True)
    wheel, _ = build(unpacked, "wheel", registry.environ)
    assert library_in(wheel) == FILES
    assert len(registry.asked) == 1


@pytest.mark.slow
def test_an_editable_install_fetches_it_into_the_clone(source: Path, registry: Registry) -> None:
    build(source, "wheel:editable", registry.environ)
    assert {file.name: file.read_bytes() for file in (source / "src" / PLACE).iterdir()} == FILES


@pytest.mark.slow
def test_without_a_network_it_is_built_all_the_same_and_says_so(source: Path, registry: Registry) -> None:
    registry.close()
    wheel, said = build(source, "wheel", registry.environ)
    assert library_in(wheel) == {}
    assert "chart 1.0.0 could not be fetched from" in said
    assert "python -m outerstep.dashboard.library" in said


@pytest.mark.slow
def test_the_licence_of_the_library_is_in_the_wheel(source: Path) -> None:
    """Of the real one, which this installation has (tests/unit/dashboard/test_library.py)."""
    for name in ("library.json", "vendor"):
        whole = ROOT / "src" / "outerstep" / "dashboard" / name
        if whole.is_dir():
            shutil.copytree(whole, source / "src" / PLACE)
        else:
            shutil.copy(whole, source / "src" / "outerstep" / "dashboard")
    wheel, _ = build(source, "wheel", {})
    assert b"MIT License" in library_in(wheel)["uplot.LICENSE"]
    with zipfile.ZipFile(wheel) as file:
        [listed] = [name for name in file.namelist() if ".dist-info/licenses/" in name and "uplot" in name]
        assert b"Leon Sorokin" in file.read(listed)
