"""Two PCs on one cable, without a default route: `outerstep run` on the first, the line that it prints on the second.

Run inside a user namespace, where networks may be made (test_run.py):

    python two_pcs.py FOLDER paste SCRIPT…
    python two_pcs.py FOLDER discover SCRIPT…

The first PC is this network namespace, the second another one at the far end of a cable. The first command has a
terminal, as its user has; the line is taken from what that shows, and given to a shell on the second. With `discover`
the first announces itself, the second was given the line by `outerstep join` and finds it; every frame on the cable is
kept.
"""

from __future__ import annotations

import os
import pty
import re
import shlex
import socket
import subprocess
import sys
import threading
from pathlib import Path

HERE, THERE = "10.88.0.1", "10.88.0.2"
LINE = re.compile(rb'outerstep run --join "[^"]+" -- [^\r\n]+')
GIVE_UP_S = 700


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def make_second_pc() -> tuple[subprocess.Popen[bytes], list[str]]:
    """A process that keeps its network, and the words in front of a command there."""
    keeper = subprocess.Popen(["unshare", "--net", "sh", "-c", "echo here; exec cat"], stdin=-1, stdout=-1)
    assert keeper.stdout is not None
    assert keeper.stdout.readline() == b"here\n"
    enter = ["nsenter", "--target", str(keeper.pid), "--net", "--"]
    ip("link", "set", "lo", "up")
    ip("link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", str(keeper.pid))
    ip("address", "add", f"{HERE}/24", "dev", "cable")
    ip("link", "set", "cable", "up")
    for words in (("link", "set", "lo", "up"), ("address", "add", f"{THERE}/24", "dev", "cable")):
        subprocess.run([*enter, "ip", *words], check=True)
    subprocess.run([*enter, "ip", "link", "set", "cable", "up"], check=True)
    routes = subprocess.run([*enter, "ip", "route", "show", "default"], capture_output=True, check=True).stdout
    assert routes == b"", "the second PC has a default route"
    return keeper, enter


def environment(folder: Path, mode: str) -> dict[str, str]:
    size = {"COLUMNS": "80"} if mode == "paste" else {"COLUMNS": "120", "LINES": "80"}  # there is room for a QR code
    return {**os.environ, "OUTERSTEP_CREDENTIALS": str(folder / "credentials"), **size}


def keep_frames(file: Path) -> None:
    """All that travels on the cable, until this process ends."""
    every_protocol = 3
    line = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(every_protocol))
    line.bind(("cable", 0))

    def read() -> None:
        with file.open("wb", buffering=0) as out:
            while True:
                out.write(line.recv(1 << 16))

    threading.Thread(target=read, daemon=True).start()


def typed_on(enter: list[str], second: Path, words: list[str], mode: str) -> subprocess.CompletedProcess[bytes]:
    """A busy machine may not answer within one look."""
    for _ in range(5):
        done = subprocess.run(
            [*enter, *words],
            cwd=second,
            env=environment(second, mode),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=GIVE_UP_S,
            check=False,
        )
        if b"no run announces itself" not in done.stdout:
            break
    return done


def main(folder: Path, mode: str, script: list[str]) -> None:
    first, second = folder / "first", folder / "second"
    keeper, enter = make_second_pc()
    master, terminal = pty.openpty()
    words = ["outerstep", "run", "-n", "2", "--", "python", *script]
    if mode == "discover":
        words.insert(2, "--announce")
        keep_frames(folder / "frames.bin")
    one = subprocess.Popen(words, cwd=first, env=environment(first, mode), stdout=terminal, stderr=terminal)
    os.close(terminal)
    shown, found = bytearray(), threading.Event()

    def read() -> None:
        while True:
            try:
                data = os.read(master, 65536)
            except OSError:
                break  # the other end is closed
            if not data:
                break
            shown.extend(data)
            if LINE.search(shown):
                found.set()
        found.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert found.wait(GIVE_UP_S)
    line = LINE.search(shown)
    assert line is not None, shown.decode(errors="replace")
    (folder / "line.txt").write_bytes(line[0])
    words = ["sh", "-c", line[0].decode()]
    if mode == "discover":
        joined = typed_on(enter, second, ["outerstep", "join", shlex.split(line[0].decode())[3]], mode)
        assert joined.returncode == 0, joined.stdout
        words = ["outerstep", "run", "--discover", "--", "python", *script]
    two = typed_on(enter, second, words, mode)
    code = one.wait(GIVE_UP_S)
    reader.join(GIVE_UP_S)
    (folder / "first.log").write_bytes(shown)
    (folder / "second.log").write_bytes(two.stdout)
    keeper.kill()
    keeper.wait()
    print(f"first {code} second {two.returncode} typed {shlex.join(words)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
