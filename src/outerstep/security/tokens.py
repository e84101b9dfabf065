"""Tokens: 256 random bits with a prefix that says what they are for.

    run-…      workers join with it, under any free worker id
    worker-…   one worker joins with it, under its own id only
    admin-…    `outerstep control`

They are in one file, which a running server rereads when it changes. Of a worker's token only the SHA-256 is stored: it
is shown once, when it is created. (256 random bits cannot be guessed, so a slower hash is not needed.)
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import msgspec

from ..errors import ConfigError
from ..types import WorkerId
from .secret_files import locked, read_secret, write_secret

log = logging.getLogger(__name__)

Kind = Literal["run", "admin", "worker"]
TOKEN = re.compile(r"(run|admin|worker)-[A-Za-z0-9_-]{43}")


def new_token(kind: Kind) -> str:
    return f"{kind}-{secrets.token_urlsafe(32)}"


def is_token(text: str) -> bool:
    return TOKEN.fullmatch(text) is not None


def digest_of(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


@dataclass(frozen=True)
class Tokens:
    """What the file holds. `workers`: id -> SHA-256 of its token, as hexadecimal digits."""

    run: str = field(repr=False)
    admin: str = field(repr=False)
    workers: dict[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name in ("run", "admin"):
            if not is_token(getattr(self, name)):
                raise ValueError(f"{name!r} is not a token")
        for worker, digest in self.workers.items():
            if not re.fullmatch(r"[0-9a-f]{64}", digest):
                raise ValueError(f"the digest of worker {worker!r} does not have 64 hexadecimal digits")


class TokenFile:
    """The tokens in `path`. `current()` costs one `stat` unless the file changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._seen: tuple[int, int, int] | None = None
        self._tokens: Tokens | None = None

    def ensure(self) -> Tokens:
        """Created at the first start of a server; later starts find it."""
        with locked(self.path.parent):
            if not self.path.exists():
                self._write(Tokens(new_token("run"), new_token("admin")))
        return self.load()

    def load(self) -> Tokens:
        data = read_secret(self.path)
        try:
            return msgspec.json.decode(data, type=Tokens)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(
                f"{self.path} is not a file of tokens: {error}; delete it, and the next start of the server creates "
                "new ones (every worker then needs the new join string)"
            ) from error

    def current(self) -> Tokens:
        """The file's current tokens. If it has become unreadable, the last ones read stay valid: an operator's mistake
        must not stop the run."""
        with self._lock:
            seen = self._look()
            if self._tokens is None or (seen is not None and seen != self._seen):
                self._seen = seen
                try:
                    self._tokens = self.load()
                except (ConfigError, OSError) as error:
                    if self._tokens is None:
                        raise
                    log.warning("the tokens stay as they were: %s", error)
            return self._tokens

    def rotate(self, kind: Literal["run", "admin"]) -> Tokens:
        """A new run or admin token; the old one is refused from the next request on."""
        fresh = new_token(kind)
        return self._change(lambda held: replace(held, run=fresh) if kind == "run" else replace(held, admin=fresh))

    def give_worker(self, worker_id: str) -> str:
        """Create a token for this worker; its old one becomes invalid. It is returned but not stored."""
        try:
            msgspec.convert(worker_id, WorkerId)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"a worker id has 1 to 128 letters, digits, '.', ':', '-' or '_'; got {worker_id!r}"
            ) from error
        token = new_token("worker")
        digest = digest_of(token.encode()).hex()
        self._change(lambda held: replace(held, workers={**held.workers, worker_id: digest}))
        return token

    def take_from_worker(self, worker_id: str) -> None:
        def without(held: Tokens) -> Tokens:
            if worker_id not in held.workers:
                known = ", ".join(sorted(held.workers)) or "no worker has one"
                raise ConfigError(f"worker {worker_id!r} does not have its own token; known: {known}")
            return replace(held, workers={name: d for name, d in held.workers.items() if name != worker_id})

        self._change(without)

    def _change(self, change: Callable[[Tokens], Tokens]) -> Tokens:
        with locked(self.path.parent):
            changed = change(self.load())
            self._write(changed)
        return changed

    def _write(self, tokens: Tokens) -> None:
        write_secret(self.path, msgspec.json.format(msgspec.json.encode(tokens)) + b"\n")

    def _look(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
