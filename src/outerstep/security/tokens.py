"""Tokens: 256 random bits with a prefix that says what they are for.

    run-…      workers join with it, under any free worker id; or it only reads
    worker-…   one worker joins with it, under its own id only
    admin-…    `outerstep control`

The run has one token and so has its operator, and the operator may make more: each has a name, rights, and if wanted an
end and the one worker id that it speaks for. All are in one file, which a running server rereads when it changes. Of
the named ones only the SHA-256 is stored: they are shown once, when they are created. (256 random bits cannot be
guessed, so a slower hash is not needed.)
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import msgspec

from ..errors import ConfigError
from ..types import WorkerId
from .secret_files import locked, read_secret, write_secret

log = logging.getLogger(__name__)

Kind = Literal["run", "admin", "worker"]
Right = Literal["join", "read", "control"]
RIGHTS: dict[str, frozenset[Right]] = {  # of the two tokens that every server has
    "run": frozenset({"join", "read"}),
    "admin": frozenset({"control", "read"}),
}
TOKEN = re.compile(r"(run|admin|worker)-[A-Za-z0-9_-]{43}")


def new_token(kind: Kind) -> str:
    return f"{kind}-{secrets.token_urlsafe(32)}"


def is_token(text: str) -> bool:
    return TOKEN.fullmatch(text) is not None


def digest_of(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


@dataclass(frozen=True)
class NamedToken:
    """One that the operator made. `expires`: in seconds since 1970. `worker`: the only id it speaks for; "" = any free
    one."""

    digest: str = field(repr=False)  # SHA-256, as hexadecimal digits
    rights: tuple[Right, ...] = ("join", "read")
    expires: float | None = None
    worker: str = ""

    def __post_init__(self) -> None:
        _check_digest(self.digest)


@dataclass(frozen=True)
class Replaced:
    """One that was rotated, and stays valid beside its successor of that name for a while."""

    name: str
    until: float


@dataclass(frozen=True)
class Tokens:
    """What the file holds. `named`: by name. `replaced`: by SHA-256."""

    run: str = field(repr=False)
    admin: str = field(repr=False)
    workers: dict[str, str] = field(default_factory=dict, repr=False)  # id -> SHA-256: the named ones that say no more
    named: dict[str, NamedToken] = field(default_factory=dict)
    replaced: dict[str, Replaced] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name in ("run", "admin"):
            if not is_token(getattr(self, name)):
                raise ValueError(f"{name!r} is not a token")
        for digest in (*self.workers.values(), *self.replaced):
            _check_digest(digest)

    @property
    def all_named(self) -> dict[str, NamedToken]:
        return {**{name: NamedToken(digest, worker=name) for name, digest in self.workers.items()}, **self.named}

    def digest(self, name: str) -> str:
        clear = {"run": self.run, "admin": self.admin}.get(name)
        return self.all_named[name].digest if clear is None else digest_of(clear.encode()).hex()

    def with_named(self, named: dict[str, NamedToken]) -> Tokens:
        """A worker's token without anything special is written as releases before 0.3 read it."""
        plain = {name: each.digest for name, each in named.items() if each == NamedToken(each.digest, worker=name)}
        return replace(self, workers=plain, named={name: each for name, each in named.items() if name not in plain})


def _check_digest(digest: str) -> None:
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise ValueError("the digest of a token has 64 hexadecimal digits")


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

    def rotate(self, name: str, *, overlap_s: float = 0.0) -> str:
        """Replace the token of this name ("run", "admin", or one that was made) and return the new one. The old one is
        refused from the next request on, or when `overlap_s` have passed."""
        fresh = ""

        def renewed(held: Tokens) -> Tokens:
            nonlocal fresh
            digest = _existing(held, name)
            if overlap_s > 0.0:
                held = replace(held, replaced={**held.replaced, digest: Replaced(name, time.time() + overlap_s)})
            else:
                held = _without_replaced(held, name)
            if name == "run":
                fresh = new_token("run")
                return replace(held, run=fresh)
            if name == "admin":
                fresh = new_token("admin")
                return replace(held, admin=fresh)
            named = held.all_named
            fresh = new_token(token_kind(named[name].worker, named[name].rights))
            return held.with_named({**named, name: replace(named[name], digest=digest_of(fresh.encode()).hex())})

        self._change(renewed)
        return fresh

    def give(
        self,
        name: str,
        *,
        rights: Collection[Right] = ("join", "read"),
        expires_in_s: float | None = None,
        worker: str = "",
    ) -> str:
        """Create a token of this name; an older one of the name becomes invalid. It is returned but not stored."""
        for text in (name, worker or name):
            _check_id(text)
        if name in ("run", "admin"):
            raise ConfigError(
                f"the name {name!r} is taken by the server's own token; `outerstep token rotate` renews it"
            )
        if not rights or ("control" in rights and "join" in rights):
            raise ConfigError(
                "a token has rights: join or control, and read; one that joins gives no orders. "
                f"Got {','.join(rights) or 'none'}; make two tokens"
            )
        if worker and "join" not in rights:
            raise ConfigError(f"a token for worker {worker!r} must have the right to join, got {','.join(rights)}")
        token = new_token(token_kind(worker, rights))
        made = NamedToken(
            digest_of(token.encode()).hex(),
            tuple(sorted(rights)),
            None if expires_in_s is None else time.time() + expires_in_s,
            worker,
        )

        def with_it(held: Tokens) -> Tokens:
            return _without_replaced(held, name).with_named({**held.all_named, name: made})

        self._change(with_it)
        return token

    def give_worker(self, worker_id: str) -> str:
        """Create a token for this worker alone."""
        return self.give(worker_id, worker=worker_id)

    def revoke(self, name: str) -> None:
        """Refused from the next request on; so are those that it replaced."""

        def without(held: Tokens) -> Tokens:
            if name in ("run", "admin"):
                raise ConfigError(f"a server always has its {name} token; `outerstep token rotate` replaces it at once")
            _existing(held, name)
            others = {each: token for each, token in held.all_named.items() if each != name}
            return _without_replaced(held, name).with_named(others)

        self._change(without)

    def _change(self, change: Callable[[Tokens], Tokens]) -> Tokens:
        with locked(self.path.parent):
            changed, now = change(self.load()), time.time()
            lasting = {digest: each for digest, each in changed.replaced.items() if each.until > now}
            changed = replace(changed, replaced=lasting)
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


def token_kind(worker: str, rights: Collection[str]) -> Kind:
    return "worker" if worker else "admin" if "control" in rights else "run"


def _check_id(text: str) -> None:
    try:
        msgspec.convert(text, WorkerId)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"a worker id, and the name of a token, has 1 to 128 letters, digits, '.', ':', '-' or '_'; got {text!r}"
        ) from error


def _existing(held: Tokens, name: str) -> str:
    """Its digest."""
    if name not in ("run", "admin", *held.all_named):
        known = ", ".join(sorted(held.all_named)) or "none was made"
        raise ConfigError(f"there is no token of the name {name!r}; known: {known}")
    return held.digest(name)


def _without_replaced(held: Tokens, name: str) -> Tokens:
    return replace(held, replaced={digest: each for digest, each in held.replaced.items() if each.name != name})
