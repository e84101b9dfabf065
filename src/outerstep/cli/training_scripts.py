"""A training command, looked at before anything is started: each likely mistake in it is one line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from ..errors import ConfigError
from ..installing import install_line
from .script_file import PYTHON
from .worker import find_program

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
        _check_python(program, words)
    return program


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
