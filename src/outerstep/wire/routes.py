"""What a service takes, and on which path: each brings a table of its own.

    routes = {
        place_of(Leave): MessageRoute(Leave, self.answer),          # JSON in, JSON out
        place_of(PutPart): UploadRoute(PutPart, self.put_part),     # facts in the query, bytes in the body
        place_of(GetPart): DownloadRoute(GetPart, self.get_part),   # facts in the query, bytes in the answer
        ("GET", "/healthz"): PlainRoute(health, is_public=True),    # anything else
    }

The HTTP server (http_server.py) and the in-memory twin (memory.py) find the route of a request in that table. A path
that is not in it is a 404.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from msgspec import Struct

from ..errors import MethodNotAllowed, NotFound, Refused
from ..security import Caller
from ..versions import PROTOCOL_VERSION
from .messages import JSON_TYPE, MAX_JSON_BYTES, MAX_PART_BYTES, check_written

if TYPE_CHECKING:
    from .connections import Connection, Connections
    from .http_request import HttpRequest


@dataclass(slots=True)  # one per request: a frozen one takes three times as long to make
class Presented:
    """What a request shows beside its message: whose token it has, the secret of a session ("" = none), where it comes
    from ("" = this process), and the token itself. `away`: to wait in, without the turn to work that it has."""

    caller: Caller
    session: str = field(default="", repr=False)
    address: str = ""
    token: str = field(default="", repr=False)
    away: Callable[[], AbstractContextManager[object]] = nullcontext


Admit = Callable[[Any, Presented], None]
"""Given a message and what its request shows; raises a Refused if that is not enough."""


class UnreadBody(Protocol):
    """A request body that has not been read yet."""

    @property
    def length(self) -> int: ...

    def read_into(self, view: memoryview) -> None:
        """Fill `view` with the next bytes, straight from the wire; raises BadRequest if the sender stops short."""

    def abort(self) -> None:
        """Make a `read_into` that is under way in another thread fail soon."""


@dataclass(frozen=True)
class Reply:
    """`reason`: the words after the status, which is all that some clients show of an error. `handed` is called
    before the last bytes are written; and then `ended`, as soon as it is known whether the client has got them all, or
    that nobody will know. `rest`: what follows the body, from where it lies; `over` is called when all of it is
    written, or never will be. `hand_over`: nothing is written here. It gets the socket, which is its own from then on,
    and no longer counts as a connection of the port."""

    body: bytes | memoryview
    status: int = 200
    headers: tuple[tuple[str, str], ...] = (("Content-Type", JSON_TYPE),)
    reason: bytes = b""
    handed: Callable[[], None] | None = None
    ended: Callable[[bool], None] | None = None
    rest: Sequence[memoryview] = ()
    over: Callable[[], None] | None = None
    hand_over: Callable[[socket.socket], None] | None = None


@dataclass(frozen=True)
class Carrying:
    """An answer, and bytes that come with it."""

    answer: object
    pieces: Sequence[memoryview]

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.pieces))


@dataclass(frozen=True)
class MessageRoute:
    """A message of this `kind` as JSON; the handler returns the answer, one that is `Carrying` bytes, or a whole Reply.
    `speaker`: the field that says for whom it speaks, which the sender's token must allow; `admit`: whatever else it
    must show for that. `is_order`: for operators only. `is_quick`: it is answered without waiting for anything;
    `waits_away`: its handler is away (`Presented.away`) while it waits. `decode`: in place of plain strict JSON.
    `sees_caller`: the handler is also given what the request shows."""

    kind: type[Any]
    handler: Callable[..., object]
    speaker: str | None = "worker_id"
    most_bytes: int = MAX_JSON_BYTES
    is_order: bool = False
    is_quick: bool = False
    waits_away: bool = False
    decode: Callable[[bytes | bytearray], Any] | None = None
    admit: Admit | None = None
    sees_caller: bool = False


@dataclass(frozen=True)
class UploadRoute:
    """At most so many bytes, and what they are in the query string. `sees_caller`: the handler is also given what the
    request shows, and takes note itself of what it refuses."""

    kind: type[Any]
    handler: Callable[..., object]
    speaker: str = "worker_id"
    most_bytes: int = MAX_PART_BYTES
    sees_caller: bool = False
    admit: Admit | None = None


@dataclass(frozen=True)
class DownloadRoute:
    """What is wanted in the query string; the handler returns an answer with the `hash` of the bytes, and the bytes."""

    kind: type[Any]
    handler: Callable[[Any], tuple[Any, memoryview]]
    speaker: str = "worker_id"
    admit: Admit | None = None


@dataclass(frozen=True)
class PlainRoute:
    """A request as it is; the handler may take its time. `is_public`: without a token. `reads`, `joins`: its token must
    have the right to. `opens`: whose request it is, by other means than a token; it raises Unauthorized."""

    handler: Callable[[HttpRequest], Reply]
    is_public: bool = False
    reads: bool = False
    joins: bool = False
    opens: Callable[[HttpRequest], Caller] | None = None


@dataclass(frozen=True)
class TunnelRoute:
    """A connection that begins with CONNECT, as it is and before any TLS: the handler checks it, and has it until it
    ends."""

    handler: Callable[[Connection, Connections], None]


def admit(
    route: MessageRoute | UploadRoute | DownloadRoute, message: Any, shown: Presented, protocol: int = PROTOCOL_VERSION
) -> None:
    """May whoever shows this say so, in that name and in this protocol?"""
    if protocol < PROTOCOL_VERSION:
        check_written(message, protocol)
    if route.speaker is not None:
        shown.caller.check_speaks_for(getattr(message, route.speaker))
    if route.admit is not None:
        route.admit(message, shown)


Route = MessageRoute | UploadRoute | DownloadRoute | PlainRoute | TunnelRoute
TUNNEL: Final = ("CONNECT", "")  # where a table has its TunnelRoute
Routes = Mapping[tuple[str, str], Route]  # (method, path) → route


class Service(Protocol):
    """Anything with messages to answer, and a health and a status to show (pages.py)."""

    @property
    def routes(self) -> Routes: ...

    @property
    def failure(self) -> str:
        """Why it has stopped for good; "" while it has not."""

    @property
    def trouble(self) -> str:
        """Why it has to wait, until it can resume by itself; "" while nothing is wrong."""

    def status(self) -> Struct:
        """A value that is written as JSON; the port fills in its `connections`."""


def no_route(routes: Routes, method: str, path: str) -> Refused:
    """Why there is none."""
    allowed = [m for m, p in routes if p == path]
    if allowed:
        return MethodNotAllowed(f"{method} is not allowed on {path}", allow=", ".join(allowed))
    paths = ", ".join(sorted({p for _, p in routes if p}))
    return NotFound(f"no such path: {path[:128]}", hint=f"this port has {paths}")
