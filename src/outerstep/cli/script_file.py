"""Is the script that Python is to run there? Python would say so itself, and the command behind it something else."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from ..errors import ConfigError

PYTHON = re.compile(r"(python|pythonw|pypy)[0-9.]*(\.exe)?\Z")


def check_script(words: Sequence[str]) -> None:
    """Of a command that begins with Python; any other is left alone."""
    if not PYTHON.match(os.path.basename(words[0])):
        return
    script = next((word for word in words[1:] if not word.startswith("-")), None)
    before = words[1] if len(words) > 1 else ""
    if script is None or before in ("-m", "-c", "-") or not script.endswith(".py") or Path(script).exists():
        return
    there = sorted(path.name for path in Path(script).parent.glob("*.py")) if Path(script).parent.is_dir() else []
    near = difflib.get_close_matches(Path(script).name, there, n=1)
    remedy = f"did you mean {near[0]!r}?" if near else "copy it here, or start this command in its folder"
    raise ConfigError(f"there is no {script!r} in {os.getcwd()}: {remedy}")
