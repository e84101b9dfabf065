"""Which HTTP/1.1 server should the parameter server use?

The claim measured: reading strict heads with `h11` and bodies with our own `recv_into` loop moves bytes as fast as the
standard library's threaded server, and refuses malformed heads that the standard library lets through.

Four servers, each in a process of its own, one thread per connection, upload bodies read into a preallocated buffer:

    bare     no HTTP: a 5-byte frame head, then `recv_into` / `sendall`. The reference of the same minute.
    stdlib   `ThreadingHTTPServer`, body by `rfile.readinto`.
    h11      a fresh `h11.Connection` per request for the head; the body never passes through h11.
    h11+own  the same with three rules of our own on the head (see `breaks_own_rules`).

The clients are `http.client`, one process per connection. Workloads: 16 MiB PUT, 16 MiB GET, 200-byte JSON POST.
Variants are interleaved and repeated, medians reported, ratios taken within a repeat: the machine may be noisy.

    python bench/http_service.py                  # about a minute
    python bench/http_service.py --quick          # a quarter of the bytes
    python bench/http_service.py --json out.json  # every single run, the machine and the commit

Loopback only. GB = 1e9 bytes. On loopback the sender's thread does part of the receiver's kernel work, so compare CPU
seconds between variants, not between directions.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.client
import http.server
import json
import multiprocessing
import queue
import random
import re
import resource
import socket
import socketserver
import statistics
import struct
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import h11
import rich.box
from rich.console import Console
from rich.table import Table

from provenance import provenance

HOST = "127.0.0.1"
PART_BYTES = 16 * 2**20
SLICE_BYTES = 2**20  # what one `sendall` is given: a socket timeout then bounds a slice, not the whole body
HEAD_READ_BYTES = 16 * 2**10
HANG_S = 120.0  # a helper process silent for this long is taken for dead; never a measurement
BARE_HEAD = struct.Struct("!cI")  # what follows (U upload, D download, J json), bytes

SMALL_BODY = json.dumps({"worker": "w0", "round": 7, "pad": "x" * 161}).encode()
SMALL_ANSWER = b'{"ok":true}'


@functools.cache
def part() -> memoryview:
    """The same 16 MiB in every process; random, so that a misplaced block changes the checksum."""
    return memoryview(random.Random(0).randbytes(PART_BYTES))


# --- what all servers share -------------------------------------------------------------------------------------------

_buffers: queue.SimpleQueue[bytearray] = queue.SimpleQueue()


@contextlib.contextmanager
def upload_buffer() -> Iterator[memoryview]:
    """A preallocated 16 MiB buffer whose pages are already mapped: page faults are not what we compare."""
    try:
        buffer = _buffers.get_nowait()
    except queue.Empty:
        buffer = bytearray(part())
    try:
        yield memoryview(buffer)
    finally:
        _buffers.put(buffer)


def answer(method: str, target: str, body: memoryview) -> bytes | memoryview:
    """The application: the same few instructions behind every server."""
    if target == "/json":
        json.loads(bytes(body))
        return SMALL_ANSWER
    if target == "/digest":
        return b"%08x" % zlib.crc32(body)
    return part() if method == "GET" else b"ok"


def recv_exactly(sock: socket.socket, view: memoryview) -> bool:
    """Fill `view` from the socket; False if the peer closed first."""
    while view:
        count = sock.recv_into(view)
        if count == 0:
            return False
        view = view[count:]
    return True


def send_slices(send: Callable[[memoryview], object], payload: bytes | memoryview) -> None:
    view = memoryview(payload)
    for start in range(0, len(view), SLICE_BYTES):
        send(view[start : start + SLICE_BYTES])


# --- the servers ------------------------------------------------------------------------------------------------------


class BareHandler(socketserver.BaseRequestHandler):
    """No HTTP at all: what sockets and threads cost by themselves."""

    def handle(self) -> None:
        sock: socket.socket = self.request
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = bytearray(BARE_HEAD.size)
        with upload_buffer() as buffer:
            while recv_exactly(sock, memoryview(head)):
                kind, size_bytes = BARE_HEAD.unpack(head)
                if kind == b"D":
                    send_slices(sock.sendall, part()[:size_bytes])
                    continue
                body = buffer[:size_bytes]
                if not recv_exactly(sock, body):
                    return
                sock.sendall(answer("POST", "/json" if kind == b"J" else "/part", body))


class StdlibHandler(http.server.BaseHTTPRequestHandler):
    """The standard library as it comes; `/accepts` answers as soon as a head has reached our code."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # buffered: head and small body leave in one packet; slices larger than the buffer pass it by

    def handle(self) -> None:
        with upload_buffer() as self.buffer:
            super().handle()

    def respond(self) -> None:
        if self.path == "/accepts":
            self.close_connection = True
            self.send(b"accepted")
            return
        body = self.buffer[: int(self.headers.get("Content-Length", "0"))]
        if self.rfile.readinto(body) != len(body):
            self.close_connection = True
            return
        self.send(answer(self.command, self.path, body))

    do_GET = do_PUT = do_POST = respond  # noqa: N815

    def send(self, payload: bytes | memoryview) -> None:
        self.send_response_only(200)  # without Date and Server, as the h11 variant
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        send_slices(self.wfile.write, payload)

    def log_message(self, *args: object) -> None:
        """Silence: logging is not what we compare."""


class H11Handler(socketserver.BaseRequestHandler):
    """h11 parses the head and makes the response head; the body loop is ours."""

    own_rules = False

    def handle(self) -> None:
        sock: socket.socket = self.request
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        carry: bytes | None = b""  # bytes read past the end of the previous request
        with upload_buffer() as buffer:
            while carry is not None:
                http = h11.Connection(h11.SERVER)
                try:
                    carry = self.serve_one(http, sock, carry, buffer)
                except h11.RemoteProtocolError as error:
                    respond_h11(http, sock, error.error_status_hint, b"refused")
                    return

    def serve_one(self, http: h11.Connection, sock: socket.socket, carry: bytes, buffer: memoryview) -> bytes | None:
        """One request; returns the bytes that belong to the next, or None when the connection is to be closed."""
        read = self.read_head(http, sock, carry)
        if read is None:
            return None
        request, beyond = read
        target = request.target.decode()
        if target == "/accepts":
            respond_h11(http, sock, 200, b"accepted")
            return None
        headers = dict(request.headers)
        body = buffer[: int(headers.get(b"content-length", b"0"))]
        here = min(len(beyond), len(body))
        body[:here] = beyond[:here]
        if not recv_exactly(sock, body[here:]):
            return None
        respond_h11(http, sock, 200, answer(request.method.decode(), target, body))
        return None if headers.get(b"connection") == b"close" else beyond[here:]

    def read_head(self, http: h11.Connection, sock: socket.socket, carry: bytes) -> tuple[h11.Request, bytes] | None:
        """The request and the bytes that came with its head; None at a clean end of the connection."""
        raw = carry
        if carry:
            http.receive_data(carry)
        while (event := http.next_event()) is h11.NEED_DATA:  # bounded: h11 refuses heads over 16 KiB
            data = sock.recv(HEAD_READ_BYTES)
            raw += data
            http.receive_data(data)
        if not isinstance(event, h11.Request):
            return None
        beyond = http.trailing_data[0]
        if self.own_rules and breaks_own_rules(raw[: len(raw) - len(beyond)], event):
            raise h11.RemoteProtocolError("refused by our own rules", error_status_hint=400)
        return event, beyond


class H11OwnRulesHandler(H11Handler):
    own_rules = True


def breaks_own_rules(head: bytes, request: h11.Request) -> bool:
    """What h11 lets through, as RFC 9112 allows: bare LF, folded lines, and any Transfer-Encoding.

    Our body loop knows Content-Length only, so a chunked request must never reach it: h11 lets Transfer-Encoding win
    over Content-Length, and reading it by Content-Length instead is how requests are smuggled.
    """
    bare_lf = head.count(b"\n") != head.count(b"\r\n")
    folded = b"\n " in head or b"\n\t" in head
    return bare_lf or folded or any(name == b"transfer-encoding" for name, _ in request.headers)


def respond_h11(http: h11.Connection, sock: socket.socket, status: int, payload: bytes | memoryview) -> None:
    head = http.send(h11.Response(status_code=status, headers=[("Content-Length", str(len(payload)))]))
    assert head is not None
    if len(payload) <= HEAD_READ_BYTES:  # one packet for a small answer, no copy of a large one
        sock.sendall(head + bytes(payload))
    else:
        sock.sendall(head)
        send_slices(sock.sendall, payload)


class TcpServer(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 1024


class StdlibServer(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024


SERVERS: dict[str, tuple[type[socketserver.TCPServer], type[socketserver.BaseRequestHandler]]] = {
    "bare": (TcpServer, BareHandler),
    "stdlib": (StdlibServer, StdlibHandler),
    "h11": (TcpServer, H11Handler),
    "h11+own": (TcpServer, H11OwnRulesHandler),
}


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def serve(variant: str, control: Connection) -> None:
    """The server process: says its port, then its CPU seconds whenever asked, until told to stop."""
    server_type, handler = SERVERS[variant]
    part()
    with server_type((HOST, 0), handler) as server, contextlib.suppress(EOFError):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        control.send(server.server_address[1])
        while control.recv() == "cpu":
            control.send(cpu_s())
        server.shutdown()


# --- the clients ------------------------------------------------------------------------------------------------------


class HttpClient:
    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection(HOST, port, timeout=HANG_S)
        self.buffer = memoryview(bytearray(PART_BYTES))

    def request(self, method: str, target: str, body: bytes | memoryview | None = None) -> http.client.HTTPResponse:
        self.connection.request(method, target, body=body)
        response = self.connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{method} {target}: want status 200, got {response.status}")
        return response

    def upload(self) -> None:
        self.request("PUT", "/part", part()).read()

    def download(self) -> memoryview:
        response = self.request("GET", "/part")
        rest = self.buffer
        while rest and (count := response.readinto(rest)):
            rest = rest[count:]
        if rest:
            raise RuntimeError(f"download: {len(rest)} of {PART_BYTES} bytes missing")
        response.close()
        return self.buffer

    def small(self) -> None:
        if self.request("POST", "/json", SMALL_BODY).read() != SMALL_ANSWER:
            raise RuntimeError("POST /json: wrong answer")

    def verify(self) -> None:
        """Both directions carry the right bytes: else a speed means nothing."""
        want = b"%08x" % zlib.crc32(part())
        if (got := self.request("PUT", "/digest", part()).read()) != want:
            raise RuntimeError(f"upload arrived damaged: want checksum {want!r}, got {got!r}")
        if self.download() != part():
            raise RuntimeError("download arrived damaged")

    def close(self) -> None:
        self.connection.close()


class BareClient:
    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection((HOST, port), timeout=HANG_S)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buffer = memoryview(bytearray(PART_BYTES))

    def receive(self, size_bytes: int) -> memoryview:
        view = self.buffer[:size_bytes]
        if not recv_exactly(self.sock, view):
            raise RuntimeError("bare server closed the connection")
        return view

    def upload(self) -> None:
        self.sock.sendall(BARE_HEAD.pack(b"U", PART_BYTES))
        self.sock.sendall(part())
        self.receive(len(b"ok"))

    def download(self) -> None:
        self.sock.sendall(BARE_HEAD.pack(b"D", PART_BYTES))
        self.receive(PART_BYTES)

    def small(self) -> None:
        self.sock.sendall(BARE_HEAD.pack(b"J", len(SMALL_BODY)))
        self.sock.sendall(SMALL_BODY)
        self.receive(len(SMALL_ANSWER))

    def verify(self) -> None:
        self.download()
        if self.buffer != part():
            raise RuntimeError("download arrived damaged")

    def close(self) -> None:
        self.sock.close()


@dataclass(frozen=True)
class Job:
    """What one client process does over one connection."""

    variant: str
    port: int
    workload: str  # a method of the clients
    count: int


def client(control: Connection) -> None:
    """The client process: per job connect, warm up, say ready, wait for go, work, report (start, end) or the error."""
    with contextlib.suppress(EOFError):
        while (job := control.recv()) is not None:
            try:
                control.send(run_job(job, control))
            except Exception:  # noqa: BLE001  the parent raises it
                control.send(traceback.format_exc())


def run_job(job: Job, control: Connection) -> tuple[float, float]:
    peer = BareClient(job.port) if job.variant == "bare" else HttpClient(job.port)
    with contextlib.closing(peer):
        operation = getattr(peer, job.workload)
        operation()
        control.send("ready")
        control.recv()
        start = time.monotonic()  # one clock for all processes of a machine
        for _ in range(job.count):
            operation()
        return start, time.monotonic()


# --- measuring --------------------------------------------------------------------------------------------------------


class Helper:
    """A process of ours and the pipe to it; leaving the context ends it."""

    def __init__(self, target: Callable[..., None], *args: object, farewell: object) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.farewell = farewell
        self.process = context.Process(target=target, args=(*args, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def __enter__(self) -> Helper:
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):
            self.pipe.send(self.farewell)
        self.process.join(timeout=5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def ask(self, message: object) -> Any:
        self.pipe.send(message)
        return self.hear()

    def hear(self) -> Any:
        if not self.pipe.poll(HANG_S):
            raise RuntimeError(f"process {self.process.pid} said nothing for {HANG_S:.0f} s")
        return self.pipe.recv()


@dataclass(frozen=True)
class Workload:
    name: str  # a method of the clients
    title: str
    count: int  # operations of one run, all connections together
    variants: tuple[str, ...]

    @property
    def is_bulk(self) -> bool:
        return self.name != "small"


@dataclass(frozen=True)
class Run:
    workload: str
    connections: int
    variant: str
    repeat: int
    wall_s: float
    server_cpu_s: float
    operations: int
    rate: float  # GB/s, or requests per second
    cpu: float  # server CPU seconds per GB, or microseconds per request


def workloads(total_mib: int, requests: int) -> list[Workload]:
    parts = total_mib * 2**20 // PART_BYTES
    return [
        Workload("upload", "PUT", parts, ("bare", "stdlib", "h11")),
        Workload("download", "GET", parts, ("bare", "stdlib", "h11")),
        Workload("small", "POST", requests, ("bare", "stdlib", "h11", "h11+own")),
    ]


def hear_or_raise(helper: Helper) -> Any:
    if isinstance(message := helper.hear(), str) and message != "ready":
        raise RuntimeError(f"a client process failed:\n{message}")
    return message


def measure(
    workload: Workload, variant: str, repeat: int, server: Helper, port: int, clients: list[Helper], connections: int
) -> Run:
    active = clients[:connections]
    per_client = workload.count // connections
    for helper in active:
        helper.pipe.send(Job(variant, port, workload.name, per_client))
    for helper in active:
        hear_or_raise(helper)
    cpu_before_s = server.ask("cpu")
    for helper in active:
        helper.pipe.send("go")
    spans = [hear_or_raise(helper) for helper in active]
    server_cpu_s = server.ask("cpu") - cpu_before_s
    wall_s = max(end for _, end in spans) - min(start for start, _ in spans)
    operations = per_client * connections
    amount = operations * PART_BYTES / 1e9 if workload.is_bulk else operations
    cpu = server_cpu_s / amount * (1 if workload.is_bulk else 1e6)
    return Run(workload.name, connections, variant, repeat, wall_s, server_cpu_s, operations, amount / wall_s, cpu)


def measure_all(
    plan: list[Workload],
    connections: list[int],
    repeats: int,
    servers: dict[str, tuple[Helper, int]],
    clients: list[Helper],
    log: Console,
) -> list[Run]:
    runs: list[Run] = []
    total = repeats * len(connections) * sum(len(workload.variants) for workload in plan)
    for repeat in range(repeats):
        for workload in plan:
            for count in connections:
                shift = repeat % len(workload.variants)  # nobody is always first
                for variant in workload.variants[shift:] + workload.variants[:shift]:
                    server, port = servers[variant]
                    run = measure(workload, variant, repeat, server, port, clients, count)
                    runs.append(run)
                    log.print(
                        f"[{len(runs)}/{total}] repeat {repeat + 1}, {workload.title} × {count}, {variant}: "
                        f"{show_rate(run.rate, workload)}",
                        markup=False,
                        highlight=False,
                    )
    return runs


# --- strictness -------------------------------------------------------------------------------------------------------

_POST = b"POST /accepts HTTP/1.1\r\nHost: x\r\n"
MALFORMED: dict[str, bytes] = {
    "(well-formed, for control)": _POST + b"Content-Length: 5\r\n\r\nhello",
    "two differing Content-Length": _POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    "Content-Length and Transfer-Encoding": _POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "negative Content-Length": _POST + b"Content-Length: -5\r\n\r\nhello",
    "Content-Length: 1_0 (Python's int takes it)": _POST + b"Content-Length: 1_0\r\n\r\nhellohello",
    "space before the colon": _POST + b"Content-Length : 5\r\n\r\nhello",
    "bare LF line ends, folded line": b"POST /accepts HTTP/1.1\nHost: x\nX-Note: a\n b\nContent-Length: 5\n\nhello",
    "folded line (CRLF)": _POST + b"X-Note: a\r\n b\r\nContent-Length: 5\r\n\r\nhello",
    "NUL in a header value": _POST + b"X-Note: a\x00b\r\nContent-Length: 5\r\n\r\nhello",
    "one header of 200 KB": _POST + b"X-Note: " + b"a" * 200_000 + b"\r\n\r\n",
    "200 KB in headers of 2 KB": _POST + b"".join(b"X-%d: %s\r\n" % (i, b"a" * 2048) for i in range(98)) + b"\r\n",
    "no Host": b"POST /accepts HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello",
    "HTTP/0.9 request line": b"GET /accepts\r\n\r\n",
}


def probe(port: int, request: bytes) -> str:
    """`accepted` if the head reached the application, else the status it was refused with."""
    reply = b""
    with socket.create_connection((HOST, port), timeout=5) as sock:
        # A server that refuses early resets the connection under the sender; its answer can still be read.
        with contextlib.suppress(OSError):
            sock.sendall(request)
            sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            while data := sock.recv(65536):
                reply += data
    if b"accepted" in reply:
        return "accepted"
    status = re.match(rb"HTTP/1\.[01] (\d{3})|.*?Error code: (\d{3})", reply, re.DOTALL)
    return (status[1] or status[2]).decode() if status else "closed without an answer"


def probe_all(servers: dict[str, tuple[Helper, int]]) -> dict[str, dict[str, str]]:
    variants = [variant for variant in servers if variant != "bare"]
    return {
        name: {variant: probe(servers[variant][1], request) for variant in variants}
        for name, request in MALFORMED.items()
    }


# --- reporting --------------------------------------------------------------------------------------------------------


def show_rate(rate: float, workload: Workload) -> str:
    return f"{rate:.2f} GB/s" if workload.is_bulk else f"{rate:,.0f} /s"


def paired_ratio(runs: list[Run], variant: str, other: str) -> float | None:
    """Median over repeats of rate(variant) / rate(other), each within one repeat: a slow minute slows both."""
    rates = {(run.variant, run.repeat): run.rate for run in runs}
    pairs = [(rate, rates.get((other, repeat))) for (name, repeat), rate in rates.items() if name == variant]
    ratios = [mine / theirs for mine, theirs in pairs if theirs]
    return statistics.median(ratios) if ratios else None


def summarize(plan: list[Workload], runs: list[Run]) -> list[dict[str, Any]]:
    rows = []
    for workload in plan:
        for connections in sorted({run.connections for run in runs}):
            cell = [run for run in runs if run.workload == workload.name and run.connections == connections]
            for variant in workload.variants:
                mine = [run for run in cell if run.variant == variant]
                rates = [run.rate for run in mine]
                rows.append(
                    {
                        "workload": workload.name,
                        "connections": connections,
                        "variant": variant,
                        "unit": "GB/s" if workload.is_bulk else "requests/s",
                        "rate_median": statistics.median(rates),
                        "rate_min": min(rates),
                        "rate_max": max(rates),
                        "ratio_to_bare": paired_ratio(cell, variant, "bare"),
                        "ratio_to_stdlib": paired_ratio(cell, variant, "stdlib"),
                        "cpu_unit": "server CPU-s/GB" if workload.is_bulk else "server CPU-µs/request",
                        "cpu_median": statistics.median(run.cpu for run in mine),
                    }
                )
    return rows


def speed_table(plan: list[Workload], rows: list[dict[str, Any]], repeats: int) -> Table:
    by_name = {workload.name: workload for workload in plan}
    title = f"HTTP servers on loopback, bodies of 16 MiB (POST: {len(SMALL_BODY)} B), median of {repeats}"
    table = Table(title=title, box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("load", "server", "rate", "min–max", "× bare", "× stdlib", "server CPU"):
        table.add_column(column, justify="left" if column in ("load", "server") else "right", no_wrap=True)
    for row in rows:
        workload = by_name[row["workload"]]
        low, high = row["rate_min"], row["rate_max"]
        table.add_row(
            f"{workload.title} × {row['connections']}",
            row["variant"],
            show_rate(row["rate_median"], workload),
            f"{low:.2f}–{high:.2f}" if workload.is_bulk else f"{low:,.0f}–{high:,.0f}",
            f"{row['ratio_to_bare']:.2f}",
            f"{row['ratio_to_stdlib']:.2f}",
            f"{row['cpu_median']:.2f} s/GB" if workload.is_bulk else f"{row['cpu_median']:.0f} µs/req",
            end_section=row["variant"] == workload.variants[-1],
        )
    return table


def strictness_table(verdicts: dict[str, dict[str, str]]) -> Table:
    table = Table(title="Malformed heads: refused with a status, or accepted", box=rich.box.SIMPLE_HEAD)
    table.add_column("request head")
    variants = list(next(iter(verdicts.values())))
    for variant in variants:
        table.add_column(variant)
    for name, verdict in verdicts.items():
        table.add_row(name, *(verdict[variant] for variant in variants))
    return table


# --- command line -----------------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare HTTP/1.1 servers for the parameter server, on loopback.")
    parser.add_argument("--quick", action="store_true", help="128 MiB and 1000 requests a run instead of 512 and 4000")
    parser.add_argument("--repeats", type=int, default=5, help="repeats of every run (default 5)")
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 4], help="client connections (default 1 4)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run, the summary and the machine here")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    plan = workloads(128, 1000) if arguments.quick else workloads(512, 4000)
    log = Console(stderr=True)
    about = provenance("h11")
    with contextlib.ExitStack() as stack:
        helpers = {name: stack.enter_context(Helper(serve, name, farewell="stop")) for name in SERVERS}
        servers = {name: (helper, helper.hear()) for name, helper in helpers.items()}
        clients = [stack.enter_context(Helper(client, farewell=None)) for _ in range(max(arguments.connections))]
        for name, (_, port) in servers.items():
            with contextlib.closing(BareClient(port) if name == "bare" else HttpClient(port)) as peer:
                peer.verify()
        verdicts = probe_all(servers)
        runs = measure_all(plan, arguments.connections, arguments.repeats, servers, clients, log)
    rows = summarize(plan, runs)
    out = Console()
    out.print(speed_table(plan, rows, arguments.repeats))
    out.print(strictness_table(verdicts))
    if arguments.json:
        report = {"machine": about, "summary": rows, "strictness": verdicts, "runs": [asdict(run) for run in runs]}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
        log.print(f"wrote {arguments.json}")


if __name__ == "__main__":
    main()
