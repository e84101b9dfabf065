"""What a release consists of, in dist/: source distribution, wheel, bill of materials (CycloneDX). `make release`.

1. The source distribution is built from the clone, the wheel from the source distribution, as an installer would.
2. `twine check --strict`: an index would accept and show them.
3. The wheel is installed in a clean environment, which holds what it declares to depend on and nothing else; the
   command line runs there. torch and the others are links into the environment that this runs in: nothing is
   downloaded.
4. The bill of materials lists that environment, and the chart library that the wheel brings along.

Nothing is uploaded.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any

from cyclonedx.schema import OutputFormat, SchemaVersion
from cyclonedx.validation import make_schemabased_validator
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
NAME = "outerstep"


def run(*command: str | Path, cwd: Path | None = None) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # clean is clean
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=environ, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def build(clone: Path, place: Path) -> tuple[Path, Path]:
    """Source distribution and wheel."""
    hatchling = [sys.executable, "-m", "hatchling", "build"]
    run(*hatchling, "-t", "sdist", "-d", place, cwd=clone)
    [packed] = place.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as unpacked:
        with tarfile.open(packed) as tar:
            tar.extractall(unpacked, filter="data")
        [source] = Path(unpacked).iterdir()
        run(*hatchling, "-t", "wheel", "-d", place, cwd=source)
    [wheel] = place.glob("*.whl")
    return packed, wheel


def needed(requirements: list[str]) -> dict[str, Distribution]:
    """What these ask for, directly or not, as it is installed here; markers and extras are looked at."""
    found: dict[str, Distribution] = {}
    looked: set[tuple[str, str]] = set()
    left = [(Requirement(text), "") for text in requirements]
    while left:
        asked, extra = left.pop()
        if asked.marker is not None and not asked.marker.evaluate({"extra": extra}):
            continue
        name = re.sub(r"[-_.]+", "-", asked.name).lower()
        found[name] = distribution(name)
        for wanted in {"", *asked.extras}:
            if (name, wanted) not in looked:
                looked.add((name, wanted))
                left += [(Requirement(text), wanted) for text in found[name].requires or []]
    return found


def clean_environment(place: Path, wheel: Path) -> Path:
    """The Python of an environment with the wheel in it, and with what it declares to need, and nothing else."""
    venv.create(place, with_pip=False, symlinks=True)
    python = place / "bin" / "python"
    [packages] = place.glob("lib/python*/site-packages")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    [metadata] = packages.glob(f"{NAME}-*.dist-info/METADATA")
    declared = re.findall(r"^Requires-Dist: (.*)$", metadata.read_text(), re.MULTILINE)
    for each in needed(declared).values():
        for top in {file.parts[0] for file in each.files or []} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(each.locate_file(top))))
    return python


def bill_of_materials(python: Path, library: dict[str, Any]) -> dict[str, Any]:
    """Of the environment, by cyclonedx-py; and of the chart library, which no Python metadata names."""
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible", "--mc-type", "library"]
    made: dict[str, Any] = json.loads(run(*command, "--pyproject", ROOT / "pyproject.toml", python))
    name = str(library["name"]).lower()
    reference = f"pkg:npm/{name}@{library['version']}"
    hashes = [{"alg": "SHA-256", "content": file["sha256"]} for file in library["files"].values()]
    made["components"].append(
        {
            "type": "library",
            "bom-ref": reference,
            "name": name,
            "version": library["version"],
            "purl": reference,
            "licenses": [{"license": {"id": "MIT"}}],
            "components": [
                {"type": "file", "bom-ref": f"{reference}#{file}", "name": file, "hashes": [hash_]}
                for file, hash_ in zip(library["files"], hashes, strict=True)
            ],
        }
    )
    root = made["metadata"]["component"]["bom-ref"]
    for each in made["dependencies"]:
        if each["ref"] == root:
            each["dependsOn"] = sorted([*each.get("dependsOn", []), reference])
    made["dependencies"].append({"ref": reference})
    wrong = make_schemabased_validator(OutputFormat.JSON, SchemaVersion.V1_6).validate_str(json.dumps(made))
    if wrong is not None:
        raise SystemExit(f"the bill of materials is not valid: {wrong}")
    return made


def main() -> None:
    place = ROOT / "dist"
    shutil.rmtree(place, ignore_errors=True)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    packed, wheel = build(ROOT, place)
    run(sys.executable, "-m", "twine", "check", "--strict", packed, wheel)
    with tempfile.TemporaryDirectory() as folder:
        python = clean_environment(Path(folder), wheel)
        said = run(python.with_name(NAME), "--version").strip()
        if said != f"{NAME} {version}":
            raise SystemExit(f"the installed command must say '{NAME} {version}', got '{said}'")
        library = json.loads((ROOT / "src" / NAME / "dashboard" / "library.json").read_text())
        bill = place / f"{NAME}-{version}.cdx.json"
        bill.write_text(json.dumps(bill_of_materials(python, library), indent=2) + "\n")
    for file in (packed, wheel, bill):
        print(f"{file.relative_to(ROOT)}  {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
