"""The files of examples/deploy, each by the validator of what it is for; and the commands in them by our own flags.

    systemd       systemd-analyze verify, where the machine has systemd: the unit loads, every directive is known, the
                  program is there
    SLURM         bash -n, shellcheck; every #SBATCH line stands where sbatch reads it
    Kubernetes    the schemas of the API (kubernetes-validate, strict: no field that the API does not have)
    Compose       the schema of the Compose specification (check-jsonschema)

None of it starts a service, a job or a container.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.main import get_command

from outerstep.cli import app

FOLDER = Path(__file__).parents[2] / "examples" / "deploy"
UNITS = sorted(FOLDER.glob("*.service"))
BATCHES = sorted(FOLDER.glob("*.sbatch"))
MANIFESTS = [FOLDER / "kubernetes.yaml", FOLDER / "torchft.yaml"]
COMPOSE = FOLDER / "compose.yaml"
KUBERNETES = "1.30"
INSTALLED = "/opt/outerstep/venv/bin/outerstep"


def named(path: Path) -> str:
    return path.name


def test_every_file_is_checked_by_something() -> None:
    assert sorted(FOLDER.iterdir()) == sorted([*UNITS, *BATCHES, *MANIFESTS, COMPOSE])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="this machine has no systemd to verify units with")
@pytest.mark.parametrize("unit", UNITS, ids=named)
def test_systemd_takes_the_unit(unit: Path, tmp_path: Path) -> None:
    """With the path of the outerstep that is installed here; an unknown directive is only a warning to it."""
    text, ours = unit.read_text(), str(Path(sys.executable).with_name("outerstep"))
    assert INSTALLED in text
    (tmp_path / unit.name).write_text(text.replace(INSTALLED, ours))
    assert _verify(tmp_path / unit.name) == (0, "")
    (tmp_path / unit.name).write_text(text.replace(INSTALLED, ours).replace("TimeoutStopSec", "TimeoutStopsSec"))
    assert "TimeoutStopsSec" in _verify(tmp_path / unit.name)[1]  # it does look


def _verify(unit: Path) -> tuple[int, str]:
    words = ["systemd-analyze", "verify", "--man=no", str(unit)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, "\n".join(line for line in done.stderr.splitlines() if unit.name in line)


@pytest.mark.parametrize("script", BATCHES, ids=named)
def test_a_shell_takes_the_batch_script_and_sbatch_its_options(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([str(shellcheck), str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    lines = script.read_text().splitlines()
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    options = {i: line for i, line in enumerate(lines) if line.startswith("#SBATCH")}
    assert options
    assert max(options) < first_command, "sbatch stops reading options at the first command"
    for line in options.values():
        assert re.match(r"#SBATCH( --[a-z-]+(=[^ ]+)?)+( +#.*)?$", line), line


@pytest.mark.parametrize("manifest", MANIFESTS, ids=named)
def test_the_kubernetes_api_knows_every_field(manifest: Path) -> None:
    documents = list(yaml.safe_load_all(manifest.read_text()))
    for document in documents:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    documents[0]["spec"]["replicaz"] = 1
    with pytest.raises(kubernetes_validate.ValidationError, match="replicaz"):
        kubernetes_validate.validate(documents[0], KUBERNETES, strict=True)


def test_the_compose_specification_knows_every_field(tmp_path: Path) -> None:
    code, said = _compose(COMPOSE, tmp_path)
    assert code == 0, said
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(COMPOSE.read_text().replace("stop_grace_period", "stop_grace_time"))
    code, said = _compose(wrong, tmp_path)
    assert code == 1
    assert "stop_grace_time" in said


def _compose(file: Path, folder: Path) -> tuple[int, str]:
    """PyYAML carries out the `<<` merges, which a schema does not know."""
    merged = folder / "merged.json"
    merged.write_text(json.dumps(yaml.safe_load(file.read_text())))
    words = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(merged)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every command of ours in these files."""
    for unit in UNITS:
        [start] = re.findall(rf"^ExecStart={INSTALLED} (.+)$", unit.read_text(), re.MULTILINE)
        yield unit.name, shlex.split(start)
    for script in BATCHES:
        for line in re.findall(r"^srun outerstep (.+)$", script.read_text(), re.MULTILINE):
            yield script.name, shlex.split(line)
    for manifest in [*MANIFESTS, COMPOSE]:
        for document in yaml.safe_load_all(manifest.read_text()):
            for words in _containers(document):
                if words[0] == "outerstep":
                    yield manifest.name, words[1:]


def _containers(node: Any) -> Iterator[list[str]]:
    if isinstance(node, dict):
        if isinstance(node.get("command"), list):
            yield [*node["command"], *node.get("args", [])]
        for child in node.values():
            yield from _containers(child)
    elif isinstance(node, list):
        for child in node:
            yield from _containers(child)


def test_every_command_in_them_has_flags_that_we_know() -> None:
    found, ours = list(commands()), get_command(app)
    assert {name for name, _ in found} == {
        *(unit.name for unit in UNITS),
        *("worker.sbatch", "kubernetes.yaml", "compose.yaml"),
    }
    for name, words in found:
        command = ours.commands[words[0]]  # type: ignore[attr-defined]
        context = command.make_context(words[0], list(words[1:]))  # raises on a flag that is none
        assert context.params, name
