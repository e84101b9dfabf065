"""A server as it starts by itself, with TLS and tokens, and requests to it by hand: bytes in, the answer out."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import re
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from outerstep.security import Access, Credentials, parse_address
from outerstep.security.tls import pinning_context
from outerstep.server import DiLoCoServer
from outerstep.types import PROTOCOL_VERSION, CompleteOffer, PutPart
from outerstep.wire.http_transport import HttpTransport
from outerstep.wire.messages import PROTOCOL_HEADER, SESSION_HEADER, AnyRequest, address_of, encode_json
from support import tiny_model

T = TypeVar("T")


@dataclass(frozen=True)
class Said:
    """An answer: of a refusal the body's "error", of anything else the whole body."""

    status: int
    body: dict[str, Any]
    headers: http.client.HTTPMessage

    @property
    def text(self) -> str:
        """Everything that a person would read."""
        return f"{self.body.get('message', '')}. {self.body.get('hint', '')}"


class Site:
    """A server with credentials and an event log of its own, and what its clients would have been given."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.credentials = Credentials(folder / "credentials")
        self.events_file = folder / "events.jsonl"
        self.server = DiLoCoServer(
            tiny_model().state_dict(),
            port=0,
            credentials=str(self.credentials.folder),
            event_log=str(self.events_file),
            **{"num_workers": 1, "codec": "fp32", **settings},
        ).start()
        self.address = self.server.address
        self.tokens = self.credentials.tokens

    @property
    def run_token(self) -> str:
        return self.tokens.load().run

    def transport(self) -> HttpTransport:
        return HttpTransport(self.address, credentials=self.credentials.folder)

    def with_token(self, token: str) -> HttpTransport:
        return HttpTransport(Access(*parse_address(self.address), token, self.server.access.fingerprint).join_string)

    def ask(self, method: str, path: str, authorization: str | bytes | None = None) -> tuple[int, dict[str, Any]]:
        """One request by hand, over TLS: status and body."""
        with self.connection() as sock:
            head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n".encode()
            if authorization is not None:
                value = authorization if isinstance(authorization, bytes) else authorization.encode()
                head += b"Authorization: " + value + b"\r\n"
            sock.sendall(head + b"\r\n{}")
            return answer(sock)

    def call(
        self, request: AnyRequest, body: bytes | memoryview = b"", *headers: str, sessions: Sequence[str] | None = None
    ) -> Said:
        """A message of the protocol with the right token, and the right session unless others are given."""
        method, target, _ = address_of(request)
        data = bytes(body) if isinstance(request, PutPart | CompleteOffer) else encode_json(request)
        said = f"{PROTOCOL_HEADER}: {PROTOCOL_VERSION}"
        return self.post(target, data, said, *headers, method=method, sessions=sessions)

    def post(
        self, target: str, body: bytes, *headers: str, method: str = "POST", sessions: Sequence[str] | None = None
    ) -> Said:
        """Any bytes with the right token and session, and a true Content-Length unless one is among the headers."""
        lines = [f"{method} {target} HTTP/1.1", "Host: x", f"Authorization: Bearer {self.run_token}", *headers]
        lines += [
            f"{SESSION_HEADER}: {one}" for one in (self._sessions(target, body) if sessions is None else sessions)
        ]
        if not any(header.lower().startswith("content-length") for header in headers):
            lines.append(f"Content-Length: {len(body)}")
        return self.say(("\r\n".join(lines) + "\r\n\r\n").encode() + body)

    def _sessions(self, target: str, body: bytes) -> list[str]:
        """Of the worker that is named."""
        named = re.search(rb'worker_id(?:=|":\s*")([A-Za-z0-9_.:-]+)', target.encode() + b" " + body[:4096])
        member = self.server.service.coordinator.members.find(named[1].decode()) if named else None
        return [] if member is None else [member.session]

    def say(self, data: bytes) -> Said:
        """These bytes and no more, and an orderly end behind them; the answer to them."""
        with socket.create_connection(parse_address(self.address), timeout=20) as sock:
            response = http.client.HTTPResponse(_Heard(_say_all(sock, data)))  # type: ignore[arg-type]
        response.begin()
        found = json.loads(response.read())
        return Said(response.status, found.get("error", found), response.headers)

    @contextlib.contextmanager
    def connection(self) -> Iterator[ssl.SSLSocket]:
        with (
            socket.create_connection(parse_address(self.address), timeout=20) as plain,
            pinning_context().wrap_socket(plain) as secured,
        ):
            yield secured

    def events(self, kind: str) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in self.events_file.read_text().splitlines()]
        return [event for event in found if event["event"] == kind]


class _Heard:
    """What an HTTPResponse reads from."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def _say_all(sock: socket.socket, data: bytes) -> bytes:
    """TLS by hand, because a socket of the ssl module cannot end its own half and go on listening: send `data`, say
    that this was all, return everything that comes back."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = pinning_context().wrap_bio(incoming, outgoing)

    def until_done(step: Callable[[], T]) -> T:
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                flush()
                received = sock.recv(65536)
                incoming.write(received) if received else incoming.write_eof()

    def flush() -> None:
        with contextlib.suppress(OSError):  # it has heard enough, and closed; what it said is still to be read
            sock.sendall(outgoing.read())

    until_done(tls.do_handshake)
    tls.write(data)
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.unwrap()
    flush()
    heard = b""
    with contextlib.suppress(ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionError):
        while piece := until_done(lambda: tls.read(65536)):
            heard += piece
    return heard


def answer(sock: socket.socket) -> tuple[int, dict[str, Any]]:
    response = http.client.HTTPResponse(sock)
    response.begin()
    return response.status, json.loads(response.read())
