"""Whose token a request shows. It is checked before anything else about the request is looked at."""

from __future__ import annotations

import hmac
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, Protocol

from ..errors import Forbidden, Unauthorized
from .tokens import TokenFile, Tokens, digest_of

NEW_STRING = (
    "get the join string from the server (`outerstep token show` on its machine) and give it to `outerstep join -` here"
)


@dataclass(frozen=True)
class Caller:
    """Whose token it was. `reserved`: worker ids that have tokens of their own."""

    kind: Literal["anybody", "run", "worker", "admin"]
    worker_id: str = ""
    reserved: Collection[str] = ()

    def check_speaks_for(self, worker_id: str) -> None:
        if self.kind == "admin":
            raise Forbidden(
                "the admin token is for control and status; workers do not join with it",
                hint="use the join string that `outerstep token show` prints",
            )
        if self.kind == "worker" and worker_id != self.worker_id:
            raise Forbidden(
                f"this token belongs to worker {self.worker_id!r}, the request speaks for {worker_id!r}",
                hint=f"start with --worker-id {self.worker_id}, or use the token of {worker_id}",
            )
        if self.kind == "run" and worker_id in self.reserved:
            raise Forbidden(
                f"worker {worker_id!r} has a token of its own; the run's token does not speak for it",
                hint="join with the worker's own join string, or choose another --worker-id",
            )

    def check_operates(self) -> None:
        if self.kind not in ("admin", "anybody"):
            raise Forbidden(
                "control needs the admin token",
                hint="run `outerstep control` on the server's machine as the user who runs the server",
            )


class Guard(Protocol):
    def admit(self, authorization: str | None) -> Caller:
        """From the Authorization header, decoded as latin-1; raises Unauthorized."""


class OpenGuard:
    """`--insecure`: everybody may do everything."""

    def admit(self, authorization: str | None) -> Caller:
        return Caller("anybody")


class TokenGuard:
    """Takes what is in the token file at that moment. The presented token is hashed, and its digest compared with every
    digest there is, each in constant time: how long it takes says nothing about how much of it was right."""

    def __init__(self, file: TokenFile) -> None:
        self._file = file
        self._of: Tokens | None = None
        self._known: list[tuple[bytes, Caller]] = []

    def admit(self, authorization: str | None) -> Caller:
        known = self._digests()
        scheme, _, token = (authorization or "").partition(" ")
        presented = digest_of(token.encode("latin-1", "replace"))
        found: Caller | None = None
        for expected, caller in known:
            if hmac.compare_digest(presented, expected):
                found = caller
        if found is not None and scheme.lower() == "bearer":
            return found
        if authorization is None:
            raise Unauthorized("this server wants a token, and the request has none", hint=NEW_STRING)
        raise Unauthorized("this token is not valid here, or no longer", hint=NEW_STRING)

    def _digests(self) -> list[tuple[bytes, Caller]]:
        tokens = self._file.current()
        if tokens is not self._of:
            reserved = frozenset(tokens.workers)
            known = [
                (digest_of(tokens.run.encode()), Caller("run", reserved=reserved)),
                (digest_of(tokens.admin.encode()), Caller("admin")),
            ]
            known += [(bytes.fromhex(d), Caller("worker", worker_id)) for worker_id, d in tokens.workers.items()]
            self._known, self._of = known, tokens
        return self._known
