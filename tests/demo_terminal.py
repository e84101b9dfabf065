"""`outerstep demo` on a terminal of its own, as somebody types it: what it writes, and a way to end it."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

from support import wait_until

LINK = re.compile(r"http://127\.0\.0\.1:\d+/page#[A-Za-z0-9_-]{32}")


class DemoTerminal:
    """Reads all the time: a terminal that is full would stop the demo."""

    def __init__(self, folder: Path, *words: str) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("DILOCO_", "OUTERSTEP_"))}
        command = [sys.executable, "-m", "outerstep", "demo", *words, "--folder", str(folder)]
        self._ours, theirs = pty.openpty()
        environ = clean | {"TERM": "xterm", "COLUMNS": "80", "LINES": "40", "OMP_NUM_THREADS": "1"}
        self.child = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ, start_new_session=True
        )
        os.close(theirs)
        self.said, self._ending = "", threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def link(self) -> str:
        """The first that it prints."""

        def found() -> re.Match[str] | None:
            assert self.child.poll() is None, self.said
            return LINK.search(self.said)

        wait_until(lambda: found() is not None)
        match = found()
        assert match is not None
        return match.group()

    def interrupt(self) -> int:
        """Ctrl-C; it ends what it has started."""
        self.child.send_signal(signal.SIGINT)
        return self.child.wait(120.0)

    def close(self) -> None:
        if self.child.poll() is None:
            self.interrupt()
        self._ending.set()
        self._reader.join()
        os.close(self._ours)

    def _read(self) -> None:
        while not self._ending.is_set():
            if not select.select([self._ours], [], [], 0.2)[0]:
                continue
            try:
                self.said += os.read(self._ours, 65536).decode(errors="replace")
            except OSError:  # nobody has its other end open any more
                return

    def __enter__(self) -> DemoTerminal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
