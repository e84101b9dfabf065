"""A command that does not outlive the process that started it: if that one is killed, it gets SIGTERM.

Run by itself, without the package, in place of the command, which it becomes:

    python -I -S tether.py PID COMMAND…

Linux has a word for it (prctl's PR_SET_PDEATHSIG), which holds across exec. Elsewhere the command is simply started.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def tethered(words: list[str]) -> list[str]:
    """The command to start from the main thread of this process."""
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), *words]


def main(parent: int, words: list[str]) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it ended before this was said
            sys.exit(128 + signal.SIGTERM)
    os.execv(words[0], words)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
