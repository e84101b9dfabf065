"""The name of this machine's worker in `outerstep run`: the same at each start, and another one than on any other PC.

Many PCs are called "ubuntu". So the host's name is followed by four digits of this user's key, which a restart finds
again. A second worker on the same PC, beside a first that is running, gets a number.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import socket
from pathlib import Path

from ..errors import OuterstepError
from ..security import Credentials

MOST_ON_ONE_MACHINE = 64
LOCKS = "workers"


def take_name(credentials: str | None, *, keep: bool) -> str:
    """The first that no running worker of this user has. It is ours until this process ends; with `keep`, until the
    command that it becomes does."""
    folder = Credentials(credentials)
    host = re.sub(r"[^A-Za-z0-9_.\-]", "-", socket.gethostname()).strip(".-") or "worker"
    name = f"{host[:64]}-{folder.worker_key('outerstep run').public[:4]}"
    try:
        place = folder.folder / LOCKS
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in range(1, MOST_ON_ONE_MACHINE + 1):
            taken = name if number == 1 else f"{name}-{number}"
            if _lock(place / f"{taken}.lock", keep=keep):
                return taken
    except (OSError, OuterstepError):
        pass  # no place for locks: a name that nobody else has
    return f"{name}-{secrets.token_hex(2)}"


def _lock(file: Path, *, keep: bool) -> bool:
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    os.set_inheritable(descriptor, keep)
    return True
