"""A PC to type `outerstep run` on: a folder with a script and credentials of its own, as a real process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nursery
from support import wait_until


class Pc:
    """`arguments` are the script's. Its processes are ended by their id."""

    def __init__(self, folder: Path, port: int, script: str, *arguments: str, imports: tuple[str, ...] = ()) -> None:
        self.folder, self.log, self._children = folder, folder / "log.txt", list[nursery.Child]()
        folder.mkdir()
        (folder / "train.py").write_text(script)
        self._port, self._arguments, self._imports = port, arguments, imports

    def run(self, *flags: str) -> nursery.Child:
        """The first PC's command."""
        return self.type("-n", "2", "--host", "127.0.0.1", "--port", str(self._port), *flags)

    def join(self, first: Pc) -> nursery.Child:
        """The line that the first one printed."""
        return self.type("--join", first.line())

    def line(self) -> str:
        """For other PCs."""
        file = self.folder / "credentials" / "server" / f"join-{self._port}.txt"
        wait_until(file.exists)
        return file.read_text()

    def type(self, *words: str) -> nursery.Child:
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "OUTERSTEP_CREDENTIALS": str(self.folder / "credentials")}
        environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = ["-m", "outerstep", "run", *words, "--", sys.executable, "train.py", *self._arguments]
        with self.log.open("ab") as log:
            child = nursery.start(command, log=log, env=environ, cwd=self.folder, imports=self._imports)
        self._children.append(child)
        return child

    def said(self) -> str:
        return self.log.read_text()

    def await_said(self, text: str, child: nursery.Child) -> None:
        wait_until(lambda: text in self.said() or child.poll() is not None)
        assert text in self.said(), self.said()

    def script_pids(self) -> list[int]:
        """The processes of its script."""
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                words = (place / "cmdline").read_bytes().split(b"\0")
                mine = b"train.py" in words and b"outerstep" not in words
                if mine and Path(os.readlink(place / "cwd")) == self.folder:
                    found.append(int(place.name))
            except OSError:
                continue
        return found

    def end(self) -> None:
        for child in self._children:
            child.kill()
