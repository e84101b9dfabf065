"""The same computation in a process that uses other vectors of the CPU, with one thread and with two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def computed_elsewhere(module: str, expression: str, capability: str, **environ: str) -> set[str]:
    """What is printed of `expression`, in which `t` is the test module of that file: one line, if threads do not
    matter."""
    code = (
        f"import sys, torch; sys.path[:0] = sys.argv[1:]; import {Path(module).stem} as t\n"
        "print(torch.backends.cpu.get_cpu_capability())\n"
        f"for n in (1, 2):\n    torch.set_num_threads(n); print({expression})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(module).parent), str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        env=os.environ | {"ATEN_CPU_CAPABILITY": capability} | environ,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    used, *printed = done.stdout.splitlines()
    assert used.lower() == capability or capability != "default"
    assert len(printed) == 2
    return set(printed)
