"""The worker's end of HTTP: `http.client`, a few kept-alive connections, bodies from and to the caller's own memory."""

from __future__ import annotations

import http.client
import logging
import ssl
import threading
from collections import deque
from collections.abc import Iterator

import msgspec

from ..errors import BadRequest, ConfigError, TransportError
from ..types import Answer, GetPartAnswer, Poll, Request
from . import strict_json
from .messages import BYTES_TYPE, HASH_HEADER, JSON_TYPE, MAX_JOIN_BYTES, address_of, decode_error

log = logging.getLogger(__name__)

SLICE_BYTES = 1 << 20
DEFAULT_PORT = 8512


def parse_address(address: str) -> tuple[str, int]:
    """ "host", "host:port" or "[v6]:port" → (host, port)."""
    text = address.strip().removeprefix("http://").rstrip("/")
    if "://" in text:
        raise ConfigError(f"server address {address!r}: write host:port; the server speaks plain HTTP")
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":") or str(DEFAULT_PORT)
    elif text.count(":") > 1:
        raise ConfigError(f"server address {address!r}: write an IPv6 address as [address]:port")
    else:
        host, _, port = text.partition(":")
        port = port or str(DEFAULT_PORT)
    try:
        host.encode("idna")  # what the socket will do with it
    except UnicodeError:
        host = ""
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"server address must be host:port, got {address!r}; for example 192.168.1.100:{DEFAULT_PORT}"
        )
    return host, int(port)


class HttpTransport:
    """Thread-safe: each call borrows a connection, and returns it if the server keeps it open. At most
    `kept_connections` stay open between calls."""

    def __init__(
        self, address: str, *, timeout_s: float = 30.0, kept_connections: int = 8, tls: ssl.SSLContext | None = None
    ) -> None:
        self._host, self._port = parse_address(address)
        self._tls = tls
        self._timeout_s = timeout_s
        self._kept_connections = kept_connections
        self._idle: deque[http.client.HTTPConnection] = deque()
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        return f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"

    def call(
        self,
        request: Request,
        *,
        body: memoryview | None = None,
        into: memoryview | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        method, target, answer_type = address_of(request)
        limit_s = (timeout_s or self._timeout_s) + (request.wait_s if isinstance(request, Poll) else 0.0)
        if body is not None:
            payload, content_type = body, BYTES_TYPE
        else:
            payload, content_type = memoryview(b"" if method == "GET" else strict_json.encode(request)), JSON_TYPE
        status, headers, data = self._exchange(method, target, payload, content_type, into, limit_s)
        if status != 200:
            raise decode_error(data, status)
        if answer_type is GetPartAnswer:
            return GetPartAnswer(hash=headers.get(HASH_HEADER, ""))
        try:
            return msgspec.json.decode(data, type=answer_type)
        except msgspec.DecodeError as error:
            raise TransportError(f"{self.address} answered {target} with something else: {error}") from error

    def status(self) -> dict[str, object]:
        status, _, data = self._exchange("GET", "/status", memoryview(b""), JSON_TYPE, None, self._timeout_s)
        if status != 200:
            raise decode_error(data, status)
        try:
            return strict_json.decode(data, dict)
        except BadRequest as error:
            raise decode_error(data, status) from error  # somebody else's page: it says what came instead

    def close(self) -> None:
        with self._lock:
            while self._idle:
                self._idle.pop().close()

    # --- one exchange ---------------------------------------------------------------------------------------------

    def _exchange(
        self,
        method: str,
        target: str,
        payload: memoryview,
        content_type: str,
        into: memoryview | None,
        timeout_s: float,
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """A kept-alive connection may have been closed by the server meanwhile: then once more, on a new one. Every
        request of this protocol may be repeated."""
        while True:
            connection, reused = self._borrow(timeout_s)
            try:
                return self._talk(connection, method, target, payload, content_type, into)
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if reused and not isinstance(error, TimeoutError):
                    continue
                what = str(error) or type(error).__name__
                raise TransportError(
                    f"no answer from {self.address} to {method} {target.split('?')[0]}: {what}"
                ) from error

    def _borrow(self, timeout_s: float) -> tuple[http.client.HTTPConnection, bool]:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is None or connection.sock is None:
            return self._new_connection(timeout_s), False
        connection.sock.settimeout(timeout_s)
        return connection, True

    def _new_connection(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        return http.client.HTTPSConnection(self._host, self._port, timeout=timeout_s, context=self._tls)

    def _talk(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        target: str,
        payload: memoryview,
        content_type: str,
        into: memoryview | None,
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        headers = {"Content-Type": content_type}
        if method != "GET":
            headers["Content-Length"] = str(len(payload))
        connection.request(method, target, body=_slices(payload) if len(payload) else None, headers=headers)
        response = connection.getresponse()
        data = b""
        if into is not None and response.status == 200:
            self._fill(response, into)
        else:
            data = response.read(MAX_JOIN_BYTES)
        response.read()  # the end of the message, so that the connection can be used again
        if response.will_close or len(self._idle) >= self._kept_connections:
            connection.close()
        else:
            with self._lock:
                self._idle.append(connection)
        return response.status, response.headers, data

    @staticmethod
    def _fill(response: http.client.HTTPResponse, into: memoryview) -> None:
        rest = into
        while rest:
            count = response.readinto(rest)
            if count == 0:
                raise http.client.IncompleteRead(b"", len(rest))
            rest = rest[count:]


def _slices(payload: memoryview) -> Iterator[memoryview]:
    """A socket timeout bounds one `sendall` in total: in slices it bounds the silence instead."""
    for start in range(0, len(payload), SLICE_BYTES):
        yield payload[start : start + SLICE_BYTES]
