"""A training command, looked at before anything is started: each likely mistake in it is one line."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import ConfigError
from ..installing import install_line
from .worker import find_program

PYTHON = re.compile(r"(python|pythonw|pypy)[0-9.]*(\.exe)?\Z")
TRY_S = 60.0
HAS_US = "import importlib.util, sys; sys.exit(importlib.util.find_spec('outerstep') is None)"


def check_command(words: Sequence[str]) -> str:
    """The program that `words` begins with. Raises if it cannot be started, or is sure to be none that trains."""
    first = words[0]
    if first.endswith(".py") and not os.access(first, os.X_OK):
        raise ConfigError(f"{first!r} is no program: write `-- python {' '.join(words)}`")
    if first == "outerstep":
        raise ConfigError(
            f"the training command is missing: after -- comes yours, as in `-- python train.py`, got {first!r}"
        )
    typed = list(words)
    program = find_program(typed, typed)
    if PYTHON.match(os.path.basename(first)):
        _check_script(words)
        _check_python(program, words)
    return program


def _check_script(words: Sequence[str]) -> None:
    script = next((word for word in words[1:] if not word.startswith("-")), None)
    before = words[1] if len(words) > 1 else ""
    if script is None or before in ("-m", "-c", "-") or not script.endswith(".py") or Path(script).exists():
        return
    there = sorted(path.name for path in Path(script).parent.glob("*.py")) if Path(script).parent.is_dir() else []
    near = difflib.get_close_matches(Path(script).name, there, n=1)
    remedy = f"did you mean {near[0]!r}?" if near else "copy it here, or start this command in its folder"
    raise ConfigError(f"there is no {script!r} in {os.getcwd()}: {remedy}")


def _check_python(program: str, words: Sequence[str]) -> None:
    """`python` may be another one than this command's own."""
    if os.path.realpath(program) == os.path.realpath(sys.executable) and os.path.dirname(program) == os.path.dirname(
        sys.executable
    ):
        return
    try:
        asked = subprocess.run([program, "-c", HAS_US], capture_output=True, timeout=TRY_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return  # the start itself will say what is wrong with it
    if asked.returncode == 1:
        raise ConfigError(
            f"{words[0]!r} is {program}, which has no outerstep: write `-- {sys.executable} {' '.join(words[1:])}`, or "
            f"`{install_line(pip=f'{program} -m pip')}`"
        )
