"""What `make release` makes: it installs where nothing else is, trains there, and its bill of materials is right."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = PROJECT["version"]
SCRIPT = """
import torch, outerstep
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with outerstep.attach(model, optimizer, sync_every=5):
    for _ in range(20):
        model(torch.ones(1, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
outerstep.save_model(model, "trained")
"""


def release_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("outerstep_release", ROOT / ".ci" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Released:
    """A release, and an environment with nothing but its wheel and what that declares to need."""

    script: ModuleType
    packed: Path
    wheel: Path
    python: Path

    def run(self, *words: str, cwd: Path) -> str:
        """As on a machine of somebody else: no variable of ours."""
        environ = {
            "HOME": str(cwd),
            "PATH": f"{self.python.parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "LANG": "C.UTF-8",
        }
        done = subprocess.run(words, cwd=cwd, env=environ, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Released:
    script, place = release_script(), tmp_path_factory.mktemp("release")
    packed, wheel = script.build(ROOT, place)
    return Released(script, packed, wheel, script.clean_environment(place / "clean", wheel))


@pytest.mark.slow
def test_an_index_would_take_it(released: Released) -> None:
    said = released.script.run(
        sys.executable, "-m", "twine", "check", "--strict", str(released.packed), str(released.wheel)
    )
    assert said.count("PASSED") == 2


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(released: Released) -> None:
    with zipfile.ZipFile(released.wheel) as file:
        tops = {Path(name).parts[0] for name in file.namelist()}
        assert "outerstep/py.typed" in file.namelist()
        assert "outerstep/dashboard/vendor/uplot.js" in file.namelist()
    assert tops == {"outerstep", f"outerstep-{VERSION}.dist-info"}


@pytest.mark.slow
def test_the_source_distribution_brings_what_a_reader_needs(released: Released) -> None:
    with tarfile.open(released.packed) as tar:
        inside = {name.partition("/")[2] for name in tar.getnames()}
    assert {"CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "SECURITY.md", "docs/start.md"} <= inside


@pytest.mark.slow
def test_it_trains_where_nothing_but_what_it_declares_is_installed(released: Released, tmp_path: Path) -> None:
    assert released.run("outerstep", "--version", cwd=tmp_path) == f"outerstep {VERSION}\n"
    place = released.run("python", "-c", "import outerstep; print(outerstep.__file__)", cwd=tmp_path)
    assert Path(place.strip()).is_relative_to(released.python.parents[1]), "not the one of these tests"
    with pytest.raises(AssertionError, match=r"No module named .*pytest"):
        released.run("python", "-c", "import pytest", cwd=tmp_path)
    every = "import outerstep; print(*[getattr(outerstep, name).__name__ for name in outerstep.__all__])"
    assert released.run("python", "-c", every, cwd=tmp_path).split()
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["run", "-n", "1", "--host", "127.0.0.1", "--port", "0", "--", "python", "train.py"]
    said = released.run("outerstep", *words, cwd=tmp_path)
    assert re.search(r"round 4 · ", said), said
    assert list((tmp_path / "trained").glob("*.safetensors"))


@pytest.mark.slow
def test_the_bill_of_materials_lists_what_an_installation_holds(released: Released, tmp_path: Path) -> None:
    library = json.loads((ROOT / "src" / "outerstep" / "dashboard" / "library.json").read_text())
    bill: dict[str, Any] = released.script.bill_of_materials(released.python, library)
    listed = {part["name"].lower().replace("_", "-"): part for part in bill["components"]}
    ask = "from importlib.metadata import distributions as d; print(*[x.metadata['Name'] for x in d()])"
    installed = {name.lower().replace("_", "-") for name in released.run("python", "-c", ask, cwd=tmp_path).split()} - {
        "outerstep"
    }
    assert listed.keys() == {*installed, "uplot"}
    assert bill["metadata"]["component"]["name"] == "outerstep"
    assert bill["metadata"]["component"]["version"] == VERSION
    declared = {re.split(r"[<>=\[; ]", text)[0] for text in PROJECT["dependencies"]}
    assert declared <= listed.keys()
    for name in declared:
        assert listed[name]["licenses"], name
        assert listed[name]["purl"].startswith(f"pkg:pypi/{name}@"), name
    assert listed["uplot"]["purl"] == f"pkg:npm/uplot@{library['version']}"


def test_the_citation_is_valid_and_of_this_version(tmp_path: Path) -> None:
    file = ROOT / "CITATION.cff"
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.citation-file-format", str(file)]
    done = subprocess.run(check, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    cited = yaml.safe_load(file.read_text())
    assert cited["version"] == VERSION
    assert cited["license"] == PROJECT["license"]
    assert [author["name"] for author in cited["authors"]] == ["The outerstep developers"]


def test_the_newest_entry_of_the_changelog_is_this_version() -> None:
    entries = re.findall(r"^## (\d+\.\d+(?:\.\d+)?)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert VERSION.startswith(entries[0])
    parts = [tuple(map(int, entry.split("."))) for entry in entries]
    assert parts == sorted(parts, reverse=True)
    assert len(set(parts)) == len(parts)
