"""The sockets of the compatibility port: the standard library's threaded server, with limits around it.

A thread per connection is what the protocol wants: a submit is held open for as long as its round takes. While it is
held, the connection is watched, so that a client that hung up (or whose machine is gone: TCP keep-alive) is not kept
alive by its own open request.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import logging
import secrets
import selectors
import socket
import socketserver
import struct
import termios
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler

from ..config import DEFAULT_HOST
from ..errors import (
    BadRequest,
    ConfigError,
    LengthRequired,
    MethodNotAllowed,
    NotFound,
    OuterstepError,
    Refused,
    ServerError,
    TooLarge,
    UnsupportedMedia,
)
from ..server import DiLoCoServer
from ..wire.messages import JSON_TYPE, MAX_JSON_BYTES, encode_error
from .desk import Answer, CallerGone, Desk
from .limits import MAX_HEADER_BYTES, CompatLimits
from .seat import as_refusal

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 16 * 1024
READ_BYTES = 64 * 1024
SLICE_BYTES = 1 << 20
PARTING_S = 5.0
BACKLOG = 128
KEEPALIVE_PROBES = 3
LONGEST_KEEPALIVE_S = 15


class CompatServer:
    """Serves the old protocol for `server`, which must be started, on a port of its own (0 = any free one).

    There is no authentication and no encryption in that protocol, so it listens on 127.0.0.1 unless another `host` is
    named, or `server` is insecure itself: then where `server` does. Stop it before `server`.
    """

    def __init__(
        self,
        server: DiLoCoServer,
        port: int,
        host: str | None = None,
        *,
        limits: CompatLimits = CompatLimits(),  # noqa: B008 - frozen
    ) -> None:
        if server.config.weight_by != "equal":
            raise ConfigError(
                f"the compatibility protocol needs a server with weight_by='equal', got {server.config.weight_by!r}: "
                "its clients report neither samples nor tokens"
            )
        self._host = host or (server.config.host if server.config.insecure else DEFAULT_HOST)
        self._desk = Desk(server, limits)
        try:
            self._listener = _Listener(self._host, port, self._desk, limits, server.config.heartbeat_timeout)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {self._host}:{port} for the compatibility protocol: {error.strerror}; "
                "choose another compat_port, or stop what uses it"
            ) from error
        self._thread = threading.Thread(target=self._listen, name="outerstep-compat", daemon=True)
        self._stopped = False

    @property
    def address(self) -> str:
        port = self._listener.server_address[1]
        return f"[{self._host}]:{port}" if ":" in self._host else f"{self._host}:{port}"

    def start(self) -> CompatServer:
        self._thread.start()
        log.warning(
            "the compatibility protocol is served on %s, without authentication or encryption: whoever reaches it can "
            "change the model",
            self.address,
        )
        return self

    def stop(self, *, patience_s: float = 5.0) -> None:
        """Send everybody away who waits, and close. Safe to call twice."""
        if self._stopped:
            return
        self._stopped = True
        self._desk.close()
        if self._thread.is_alive():
            self._listener.shutdown()
            self._thread.join()
        self._listener.close(patience_s)

    def _listen(self) -> None:
        self._listener.serve_forever(poll_interval=0.1)

    def __enter__(self) -> CompatServer:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()


class _Listener(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = BACKLOG

    def __init__(self, host: str, port: int, desk: Desk, limits: CompatLimits, heartbeat_timeout_s: float) -> None:
        self.desk = desk
        self.limits = limits
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self._open: dict[socket.socket, bool] = {}  # -> is a request being served?
        self._lock = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Connection)

    def verify_request(self, request: object, client_address: object) -> bool:
        assert isinstance(request, socket.socket)
        with self._lock:
            if len(self._open) >= self.limits.max_connections:
                log.warning("refused a connection: %d are open (max_connections)", len(self._open))
                return False
            self._open[request] = False
            return True

    def shutdown_request(self, request: object) -> None:
        assert isinstance(request, socket.socket)
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        log.exception("a connection of the compatibility port failed")

    def busy(self, sock: socket.socket, is_busy: bool) -> None:
        with self._lock:
            if sock in self._open:
                self._open[sock] = is_busy

    def close(self, patience_s: float) -> None:
        """Let requests finish for a while, then close all connections."""
        self.server_close()
        give_up_at = time.monotonic() + patience_s
        while time.monotonic() < give_up_at and any(list(self._open.values())):
            time.sleep(0.02)
        with self._lock:
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)


class _Source(io.RawIOBase):
    """What comes in, within the time allowed for it: so long without a byte, and so long in all."""

    def __init__(self, sock: socket.socket, stall_s: float) -> None:
        self._sock = sock
        self._stall_s = stall_s
        self._until = 0.0

    def allow(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("too slow")
        self._sock.settimeout(min(left_s, self._stall_s))
        return self._sock.recv_into(buffer)


class _Connection(BaseHTTPRequestHandler):
    """One client's connection: requests one after the other."""

    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # of a line that says none: it gets a head, too
    disable_nagle_algorithm = True
    server_version = "outerstep-compat"
    sys_version = ""
    server: _Listener

    # --- the connection -------------------------------------------------------------------------------------------

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._limits = self.server.limits
        self._source = _Source(self.connection, self._limits.stall_s)
        self.rfile = self._reader = io.BufferedReader(self._source, READ_BYTES)
        self._ended: Callable[[bool], None] | None = None  # of our last answer
        self._left = 0  # bytes of the request's body that have not been read
        self._length = 0
        self._expects_continue = False
        notice_death(self.connection, self.server.heartbeat_timeout_s)

    def handle(self) -> None:
        try:
            super().handle()
            self._part()
        except (OSError, CallerGone) as error:
            log.debug("connection ended: %s", error)
        finally:
            self._end_answer(arrived=False)

    def handle_one_request(self) -> None:
        self.close_connection = True
        self._source.allow(self._limits.idle_s)
        if not self._reader.peek(1):
            self._closed()
            return
        self._end_answer(arrived=True)  # it speaks again, so it has read the last one
        self._source.allow(self._limits.stall_s)
        self.raw_requestline = self._reader.readline(MAX_LINE_BYTES + 1)
        if len(self.raw_requestline) > MAX_LINE_BYTES:
            self.requestline, self.request_version, self.command = "", "", ""
            self.send_error(414)
        elif self.parse_request():
            self.server.busy(self.connection, True)
            try:
                self._serve()
            finally:
                self.server.busy(self.connection, False)

    def _closed(self) -> None:
        """It closed its side. In good order, with everything acknowledged, means that the answer arrived: a client that
        closes on unread bytes resets the connection instead."""
        self._end_answer(arrived=_all_acknowledged(self.connection))

    def _end_answer(self, *, arrived: bool) -> None:
        if self._ended is not None:
            self._ended(arrived)
            self._ended = None

    def _part(self) -> None:
        """Closing with unread bytes resets the connection and may destroy our answer on its way: read a little first.
        And a client that has our answer closes its side: then we know."""
        if self._left:
            self.connection.shutdown(socket.SHUT_WR)
        if self._left or self._ended is not None:
            self._source.allow(PARTING_S)
            while self._reader.read1(SLICE_BYTES):
                pass
            self._closed()

    # --- one request ----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        request_id = secrets.token_hex(6)
        try:
            answer = self._answer()
        except OuterstepError as error:
            refusal = as_refusal(error)
            log.info("%s refused: %s %s [%s]", self.path[:64], refusal.code, refusal, request_id)
            self._refuse(refusal, request_id)
        except (OSError, CallerGone):
            raise
        except Exception as error:  # the last line of defence of a thread that serves strangers
            log.exception("%s failed [%s]", self.path[:64], request_id)
            failure = ServerError(
                f"internal error ({type(error).__name__})", hint=f"see the server's log: {request_id}"
            )
            self._refuse(failure, request_id)
        else:
            self._send(200, answer.body.data, [("Content-Type", answer.body.kind)], answer)

    def _answer(self) -> Answer:
        self._measure_body()
        path = self.path.partition("?")[0]
        desk = self.server.desk
        simple: dict[str, tuple[str, Callable[[bytes], Answer]]] = {
            "/register": ("POST", desk.register),
            "/heartbeat": ("POST", desk.heartbeat),
            "/deregister": ("POST", desk.deregister),
            "/global_params": ("GET", desk.global_params),
            "/status": ("GET", desk.status),
        }
        submits = {"/submit_pseudograd": desk.submit, "/submit_fragment_pseudograd": desk.submit_fragment}
        if path not in simple and path not in submits:
            raise NotFound(
                f"no such path: {path[:128]}",
                hint=f"this is the compatibility port; it has {', '.join([*simple, *submits])}",
            )
        method = simple[path][0] if path in simple else "POST"
        if self.command != method:
            raise MethodNotAllowed(f"{self.command} is not allowed on {path}", allow=method)
        if method == "POST" and self.headers.get("Content-Length") is None:
            self.close_connection = True
            raise LengthRequired(f"{method} {path} needs a Content-Length")
        if path in simple:
            self._check_size(MAX_JSON_BYTES, f"the body of {path}")
            return simple[path][1](self._read(self._length))
        self._check_size(self.server.desk.max_body_bytes, "a submission", "the size of the run's model sets this limit")
        header_bytes = struct.unpack(">I", self._read(4))[0]
        most = min(self._left, MAX_HEADER_BYTES)
        if header_bytes > most:
            raise BadRequest(
                f"the header's length is given as {header_bytes} bytes; at most {most} fit",
                hint="a submission is 4 bytes of header length (big-endian), the JSON header, the torch.save payload",
            )
        return submits[path](self._read(header_bytes), self._left, self)

    def _measure_body(self) -> None:
        """How much follows the head; unreadable kinds of bodies are refused here, and the connection closed."""
        lengths = self.headers.get_all("Content-Length", [])
        self._length = self._left = 0
        if len(lengths) > 1 or not all(length.isascii() and length.isdigit() for length in lengths):
            self._left = 1
            raise BadRequest("Content-Length must be one number")
        if "Transfer-Encoding" in self.headers:
            self._left = 1
            raise LengthRequired("Transfer-Encoding is not taken", hint="send Content-Length")
        self._length = self._left = int(lengths[0][:20]) if lengths else 0
        if self.headers.get("Content-Encoding", "identity") != "identity":
            raise UnsupportedMedia("compressed bodies are not taken", hint="send without Content-Encoding")

    def _check_size(self, limit_bytes: int, what: str, hint: str = "") -> None:
        if self._length > limit_bytes:
            raise TooLarge(f"{what} has {self._length} bytes; at most {limit_bytes} are taken", hint=hint)

    def _read(self, size_bytes: int) -> bytes:
        data = bytearray(size_bytes)
        self.read_into(memoryview(data))
        return bytes(data)

    def read_into(self, view: memoryview) -> None:
        """The next bytes of the body: `desk.Caller`."""
        if len(view) > self._left:
            raise BadRequest(f"the body has {self._length} bytes, which is too few for what it should hold")
        if self._expects_continue:
            self._expects_continue = False
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._source.allow(self._limits.stall_s + len(view) / self._limits.slowest_bytes_per_s)
        got = self._reader.readinto(view)
        self._left -= got
        if got < len(view):
            raise BadRequest(f"the body ended {self._left} bytes short of its announced {self._length}")

    def is_gone(self) -> bool:
        """Has the client closed the connection? (A client that closes only its own direction counts as gone, too.)"""
        with selectors.DefaultSelector() as selector:
            selector.register(self.connection, selectors.EVENT_READ)
            if not selector.select(0):
                return False
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    # --- what goes out --------------------------------------------------------------------------------------------

    def _refuse(self, refusal: Refused, request_id: str) -> None:
        headers = [("Content-Type", JSON_TYPE)]
        if isinstance(refusal, MethodNotAllowed):
            headers.append(("Allow", refusal.allow))
        if refusal.retry_after_s:
            headers.append(("Retry-After", str(max(1, round(refusal.retry_after_s)))))
        self._send(refusal.status, memoryview(encode_error(refusal, request_id)), headers, None)

    def _send(self, status: int, body: memoryview, headers: list[tuple[str, str]], answer: Answer | None) -> None:
        if self._left:  # the rest of a body that was refused is not the next request
            self.close_connection = True
        self.connection.settimeout(self._limits.stall_s)
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command == "HEAD":
            return
        for start in range(0, len(body), SLICE_BYTES):  # a timeout bounds each slice, not the whole
            if answer is not None and start + SLICE_BYTES >= len(body):
                answer.handed()  # before the client can act on it
                self._ended = answer.ended
            self.connection.sendall(body[start : start + SLICE_BYTES])

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """A head that cannot be parsed. (The base class would answer with a page for people.)"""
        self.close_connection = True
        self._left = 1
        what = message or "the request line is too long"
        refusal = BadRequest(f"not HTTP/1.1 as we take it: {what}"[:256])
        self._send(code, memoryview(encode_error(refusal, "")), [("Content-Type", JSON_TYPE)], None)

    def handle_expect_100(self) -> bool:
        self._expects_continue = True  # said when the body has been found acceptable
        return True

    def log_message(self, format: str, *args: object) -> None:
        log.debug("%s %s", self.address_string(), format % args)


def notice_death(sock: socket.socket, heartbeat_timeout_s: float) -> None:
    """Let the kernel find out within half a heartbeat timeout that the other machine is gone."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    every_s = min(max(int(heartbeat_timeout_s / 2 / (1 + KEEPALIVE_PROBES)), 1), LONGEST_KEEPALIVE_S)
    if heartbeat_timeout_s == 0:  # nobody is ever declared dead, but a connection may be
        every_s = LONGEST_KEEPALIVE_S
    for option, value in (
        ("TCP_KEEPIDLE", every_s),
        ("TCP_KEEPINTVL", every_s),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _all_acknowledged(sock: socket.socket) -> bool:
    """Has the other side's kernel taken every byte we sent?"""
    try:
        (queued,) = struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))
    except OSError:
        return False
    return bool(queued == 0)
