"""Where and when a number was measured: the part of a result that every benchmark writes."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def provenance(*packages: str) -> dict[str, Any]:
    """The machine, the versions of `packages`, the commit and the date. Call it before the run: the load is others'."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in packages},
        "commit": git_commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "load_average": os.getloadavg(),
    }


def cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def git_commit() -> str | None:
    """None outside a repository or before its first commit; marked if the source differs from it."""
    here = ["git", "-C", str(Path(__file__).parent)]
    with contextlib.suppress(OSError):
        commit = _output([*here, "rev-parse", "--verify", "--quiet", "HEAD"])
        changed = commit and _output([*here, "status", "--porcelain", "--", ":/src", ":/bench/*.py"])
        return f"{commit}, with changes" if changed else commit or None
    return None


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
