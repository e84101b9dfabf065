"""A request as it comes in: its head by h11, its body straight from the socket to its destination.

On top of h11's strictness come four rules: no Transfer-Encoding, no bare LF, no folded lines, no HTTP but 1.x. They
close the gap between what h11 (rightly) tolerates and what a body loop that knows only Content-Length can read.
"""

from __future__ import annotations

from dataclasses import dataclass

import h11

from ..errors import BadRequest, TooLarge
from ..security import is_loopback
from ..versions import OLDEST_PROTOCOL
from .connections import Allowance, Connections
from .sockets import Channel, is_gone, peer_of, shut

HEAD_READ_BYTES = 16 * 1024
SLICE_BYTES = 1 << 20
SMALL_BYTES = 64 << 10


class Gone(Exception):
    """The peer closed the connection, or said nothing for too long."""


class HttpBody:
    """The unread rest of a request. `left`: how many bytes of it. `beyond`: bytes that came together with the head, and
    once the body is read, the beginning of the next request. `expects_continue`: the sender waits for a go-ahead."""

    def __init__(
        self, channel: Channel, length: int, began: bytes, allowance: Allowance, *, expects_continue: bool
    ) -> None:
        self._allowance = allowance
        self._taken = 0
        self._channel = channel
        self._sock = channel.sock
        self.length = self.left = length
        self.beyond = began
        self.expects_continue = expects_continue

    @property
    def is_here(self) -> bool:
        """Has all of it come with the head?"""
        return self.left <= len(self.beyond) and not self.expects_continue

    @property
    def peer(self) -> str:
        """The address of the machine that sends."""
        return peer_of(self._sock)

    @property
    def is_from_here(self) -> bool:
        """From this very machine: over the loopback, or from the address that it was sent to."""
        return is_loopback(self.peer) or self.peer == self._sock.getsockname()[0]

    def check_size(self, limit_bytes: int, what: str, hint: str = "this limit is the protocol's") -> None:
        if self.length > limit_bytes:
            raise TooLarge(f"{what} has {self.length} bytes; at most {limit_bytes} are taken", hint=hint)

    def read_into(self, view: memoryview) -> None:
        if len(view) > self.left:
            raise BadRequest(f"body has {self.length} bytes, {len(view)} expected")
        if self.expects_continue:
            self._channel.send(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.expects_continue = False
        here = min(len(self.beyond), len(view))
        view[:here] = self.beyond[:here]
        self.beyond = self.beyond[here:]
        self.left -= here
        rest = view[here:]
        while rest:
            count = self._channel.receive_into(rest)
            if count == 0:
                raise BadRequest(f"the body ended {self.left} bytes short of its announced {self.length}")
            self.left -= count
            rest = rest[count:]

    def read(self) -> bytearray:
        """All of it. Memory is taken as the bytes come, not as they are announced; `release` gives it back."""
        data = bytearray()
        while self.left:
            count = min(self.left, SLICE_BYTES)
            if self.length > SMALL_BYTES:
                self._allowance.take(count)
                self._taken += count
            piece = bytearray(count)
            self.read_into(memoryview(piece))
            if not self.left and not data:
                return piece
            data += piece
        return data

    def release(self) -> None:
        """The message is not needed any more."""
        if self._taken:
            self._allowance.give_back(self._taken)
            self._taken = 0

    def discard(self) -> None:
        scratch = memoryview(bytearray(min(self.left, SLICE_BYTES)))
        while self.left:
            self.read_into(scratch[: min(self.left, len(scratch))])

    def abort(self) -> None:
        shut(self._sock)

    def is_given_up(self) -> bool:
        """Has the sender hung up, so that nobody waits for the answer?"""
        return is_gone(self._sock)


@dataclass
class HttpRequest:
    """`connections`: all that its port has. `is_admitted`: it has shown a token. `protocol`: the one that it is written
    in. `is_with_service`: its service has it, and notes what it refuses. `token`: the name of the one that it shows;
    `worker`: for whom it speaks."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: HttpBody
    closes: bool  # after it
    connections: Connections
    is_admitted: bool = False
    protocol: int = OLDEST_PROTOCOL
    is_with_service: bool = False
    token: str = ""
    worker: str = ""


def read_request(http: h11.Connection, channel: Channel, began: bytes, connections: Connections) -> HttpRequest:
    """The head, within a turn; the body is still to be read."""
    raw = began
    http.receive_data(began)
    while (event := http.next_event()) is h11.NEED_DATA:  # bounded: h11 refuses heads over 16 KiB
        with channel.away():
            data = channel.receive(HEAD_READ_BYTES)
        raw += data
        http.receive_data(data)
    if not isinstance(event, h11.Request):
        raise Gone("closed between requests")
    beyond = http.trailing_data[0]
    head = raw[: len(raw) - len(beyond)]
    if head.count(b"\n") != head.count(b"\r\n") or b"\n " in head or b"\n\t" in head:
        raise h11.RemoteProtocolError("bare LF or folded line in the head", error_status_hint=400)
    if not event.http_version.startswith(b"1."):
        raise h11.RemoteProtocolError(f"HTTP/{event.http_version.decode()} is not spoken", error_status_hint=400)
    headers: dict[str, str] = {}
    for name, value in event.headers:  # given twice it has both values, and so, of those we look at, none that we take
        key, text = name.decode("latin-1"), value.decode("latin-1")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    if "transfer-encoding" in headers:
        raise h11.RemoteProtocolError("Transfer-Encoding is not taken; send Content-Length", error_status_hint=411)
    path, _, query = event.target.decode("latin-1").partition("?")
    length = int(headers.get("content-length", "0"))  # h11 has checked that it is a number, and only one
    expects_continue = headers.get("expect", "").lower() == "100-continue"
    body = HttpBody(channel, length, beyond, connections.messages, expects_continue=expects_continue)
    method = event.method.decode("latin-1")
    closes = event.http_version == b"1.0" or headers.get("connection", "").lower() == "close"
    return HttpRequest(method, path, query, headers, body, closes, connections)
