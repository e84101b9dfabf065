"""Do many workers slow each other down, or a client that asks for the status?

The claims measured, with 256 workers in synchronous rounds on two cores, beside 8 in the same run:

1. Nobody is refused for good: every contribution of every round is counted.
2. `GET /status` stays usable: its 99th percentile with 256 workers is at most 5 times that with 8.
3. Memory is bounded: contributions of 512 MB a round pass through a pool of 64 MiB.
4. A worker costs the same however many there are: the server's CPU time per worker and round with 256 is at most 1.3
   times that with 8. It is measured in a stretch of its own, while nobody asks for the status.

The server is a real one in a process of its own. The workers are thin: one process for all of them, without torch,
driving the real exchange machine (`coordination/worker/exchange.py`) over non-blocking sockets; 1M parameters, so 2
MB up as bf16 per contribution, and the whole agreement down. They train nothing and contribute again at once, so the
server is never idle: the worst case. In the first stretch of a run a third process asks for the status every 20 ms on
a connection of its own; in the second, nobody does.

    python bench/connections.py                     # about three minutes
    python bench/connections.py --quick             # half a minute
    python bench/connections.py --json out.json     # every latency, the machine and the commit

In the table, *waits* counts offers answered "no room yet, ask again", *refused* every other "no"; p50, p99 and most are
of the status request, RssAnon and CPU (of one core) are the server's, all of the first stretch. *Cost* is its CPU time
per worker and round in the second, *asks* the requests of each worker in each round there.

All processes share two cores (they are pinned to two if there are more), so a latency includes waiting for a core.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import http.client
import json
import os
import random
import secrets
import socket
import statistics
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import rich.box
import xxhash
from rich.console import Console
from rich.table import Table

from child import HANG_S, Helper
from outerstep.coordination.worker.exchange import Call, Exchange, Patience, Session
from outerstep.digest import part_count, part_hash, part_range
from outerstep.errors import Busy, OuterstepError, TransportError
from outerstep.types import PROTOCOL_VERSION, Answer, GetPart, GetPartAnswer, Join, Offer, OfferAnswer, PutPart
from outerstep.wire.frames import layout
from outerstep.wire.messages import HASH_HEADER, PROTOCOL_HEADER, address_of, decode_error, encode_json, written_in
from provenance import provenance

HOST = "127.0.0.1"
CORES = 2
COUNTS = (8, 256)
PARAMETERS = 1_000_000
TENSORS = 10
POOL_BYTES = 64 << 20
PROBE_EVERY_S = 0.02
SCRATCH_BYTES = 256 << 10
CLAIM = 5.0
COST_CLAIM = 1.3


# --- processes --------------------------------------------------------------------------------------------------------


def serve(pipe: Connection, workers: int) -> None:
    """The server process: says its port, stays until the pipe is closed."""
    import torch

    from outerstep import DiLoCoServer

    torch.set_num_threads(1)
    state = {f"layer.{i}": torch.zeros(PARAMETERS // TENSORS) for i in range(TENSORS)}
    settings: dict[str, Any] = {"codec": "bf16", "sync_every": 1, "pool_bytes": POOL_BYTES, "spool_bytes": 0}
    with DiLoCoServer(state, num_workers=workers, min_workers=workers, port=0, insecure=True, **settings) as server:
        gc.collect()
        gc.freeze()  # as `outerstep server` does
        pipe.send(int(server.address.rpartition(":")[2]))
        pipe.recv()


# --- a thin worker ----------------------------------------------------------------------------------------------------


def make_frame() -> memoryview:
    """A contribution: the same small bf16 number everywhere."""
    count = PARAMETERS // TENSORS
    up = layout("bf16", [(f"layer.{i}", (count,), 2 * count) for i in range(TENSORS)])
    frame = bytearray(up.prefix)
    for entry in up.entries:
        frame += bytes(up.data_begin + entry.begin - len(frame))
        frame += b"\x83\x3a" * count
    return memoryview(bytes(frame + bytes(up.size_bytes - len(frame))))


class ThinTransport:
    """HTTP on one non-blocking connection: what is sent is a view, what is received is hashed and forgotten."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._sock: socket.socket | None = None

    async def call(self, call: Call, body: memoryview) -> tuple[Answer, str | None]:
        """The answer, and the hash of the bytes that came with it."""
        method, target, answer_type = address_of(written_in(call.request, PROTOCOL_VERSION))
        try:
            status, headers, data, received = await self._exchange(method, target, body)
        except OSError as error:
            self.close()
            raise TransportError(f"no answer to {method} {target.partition('?')[0]}: {error!r}") from error
        if status != 200:
            raise decode_error(data, status)
        if answer_type is GetPartAnswer:
            return GetPartAnswer(hash=headers[HASH_HEADER.lower()]), received
        return msgspec.json.decode(data, type=answer_type), None

    async def _exchange(
        self, method: str, target: str, body: memoryview
    ) -> tuple[int, dict[str, str], bytes, str | None]:
        loop = asyncio.get_running_loop()
        if self._sock is None:
            self._sock = socket.socket()
            self._sock.setblocking(False)
            await loop.sock_connect(self._sock, (HOST, self._port))
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        length = "" if method == "GET" else f"Content-Length: {len(body)}\r\n"
        head = f"{method} {target} HTTP/1.1\r\nHost: bench\r\n{PROTOCOL_HEADER}: {PROTOCOL_VERSION}\r\n{length}"
        head += "Content-Type: application/json\r\n\r\n"
        if len(body) <= SCRATCH_BYTES:
            await loop.sock_sendall(self._sock, head.encode() + body)
        else:
            await loop.sock_sendall(self._sock, head.encode())
            await loop.sock_sendall(self._sock, body)
        return await self._read_answer(self._sock)

    async def _read_answer(self, sock: socket.socket) -> tuple[int, dict[str, str], bytes, str | None]:
        loop = asyncio.get_running_loop()
        raw = b""
        while (end := raw.find(b"\r\n\r\n")) < 0:
            count = await loop.sock_recv_into(sock, self._scratch)
            if not count:
                raise ConnectionError("closed by the server")
            raw += self._scratch[:count]
        first, *lines = raw[:end].decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        data = raw[end + 4 :]
        left = int(headers["content-length"]) - len(data)
        digest = xxhash.xxh3_64(data)
        is_part = HASH_HEADER.lower() in headers
        while left:
            count = await loop.sock_recv_into(sock, self._scratch[: min(left, SCRATCH_BYTES)])
            if not count:
                raise ConnectionError("closed by the server in the middle of an answer")
            left -= count
            if is_part:
                digest.update(self._scratch[:count])
            else:
                data += self._scratch[:count]
        return int(first.split(" ")[1]), headers, data, digest.hexdigest()

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None


class ThinWorker:
    """Joins, then contributes the same frame to round after round."""

    def __init__(self, name: str, port: int, frame: memoryview, tally: Counter[str]) -> None:
        join = Join(protocol=PROTOCOL_VERSION, worker_id=name, instance=secrets.token_hex(8), hostname="bench")
        self._session = Session(join)
        self._transport = ThinTransport(port)
        self._frame, self._tally = frame, tally
        self._rng = random.Random(name)
        self._part_hashes: tuple[str, ...] = ()
        self._sequence = 0
        self.version = -1

    async def join(self) -> None:
        exchange = Exchange(self._session, fragment=0, after=-1, now=time.monotonic(), patience=self._patience)
        await self._carry(exchange)
        size = self._session.joined.plan.part_size_bytes
        parts = [self._frame[slice(*part_range(i, len(self._frame), size))] for i in range(self._parts)]
        self._part_hashes = tuple(part_hash(part) for part in parts)

    async def contribute(self) -> None:
        self._sequence += 1
        offer = Offer(
            **self._session.head,
            fragment=0,
            sequence=self._sequence,
            base_version=self.version,
            oldest_base=self.version,
            steps=1,
            codec="bf16",
            size_bytes=len(self._frame),
        )
        exchange = Exchange(
            self._session,
            fragment=0,
            after=self.version,
            now=time.monotonic(),
            offer=offer,
            part_hashes=self._part_hashes,
            patience=self._patience,
            rng=self._rng,
        )
        await self._carry(exchange)
        assert exchange.outcome is not None
        self._tally["counted" if exchange.outcome.counted else "missed"] += 1

    @property
    def _patience(self) -> Patience:
        return Patience(calls_in_flight=1, give_up_after_s=HANG_S)

    @property
    def _parts(self) -> int:
        return part_count(len(self._frame), self._session.joined.plan.part_size_bytes)

    async def _carry(self, exchange: Exchange) -> None:
        """One call at a time, on the one connection."""
        while not exchange.done:
            calls = exchange.calls(time.monotonic())
            if not calls:
                await asyncio.sleep(max(exchange.wake_at - time.monotonic(), 0.001))
            for call in calls:
                await self._perform(exchange, call)
        self._tally["retries"] += exchange.retries
        if exchange.failure is not None:
            raise exchange.failure
        assert exchange.outcome is not None
        self.version = exchange.outcome.agreement.version

    async def _perform(self, exchange: Exchange, call: Call) -> None:
        self._tally["requests"] += 1
        try:
            answer, received_hash = await self._transport.call(call, self._body(call))
        except OuterstepError as error:
            self._tally["busy" if isinstance(error, Busy) else f"refused: {type(error).__name__}"] += 1
            exchange.failed(call, error, time.monotonic())
            return
        if isinstance(answer, OfferAnswer) and answer.state == "wait":
            self._tally["told to wait"] += 1
        exchange.answered(call, answer, time.monotonic(), received_hash=received_hash)

    def _body(self, call: Call) -> memoryview:
        request = call.request
        if isinstance(request, PutPart):
            size = self._session.joined.plan.part_size_bytes
            return self._frame[slice(*part_range(request.part, len(self._frame), size))]
        return memoryview(b"" if isinstance(request, GetPart) else encode_json(written_in(request, PROTOCOL_VERSION)))


@dataclass(frozen=True)
class Worked:
    """What the workers of one count did together."""

    rounds: int
    seconds: float
    tally: dict[str, int]


def work(pipe: Connection, workers: int, port: int, least_s: float, least_rounds: int) -> None:
    """The process of all thin workers: joins, says so, works each time it is told to, and reports."""
    assert "torch" not in sys.modules
    asyncio.run(_work_together(pipe, workers, port, least_s, least_rounds))


async def _work_together(pipe: Connection, workers: int, port: int, least_s: float, least_rounds: int) -> None:
    tally: Counter[str] = Counter()
    frame = make_frame()
    crew = [ThinWorker(f"thin-{i:03d}", port, frame, tally) for i in range(workers)]
    await asyncio.gather(*(worker.join() for worker in crew))
    pipe.send("joined")
    while pipe.recv() == "go":
        tally.clear()
        pipe.send(await _work_for(crew, tally, least_s, least_rounds))


async def _work_for(crew: list[ThinWorker], tally: Counter[str], least_s: float, least_rounds: int) -> Worked:
    """So many rounds of all of them. All end at the same version, and begin the next time with that."""
    began_at = time.monotonic()
    first, last = crew[0].version, 1 << 53

    async def go_on(worker: ThinWorker) -> None:
        nonlocal last
        while worker.version < last:
            await worker.contribute()
            if time.monotonic() - began_at > least_s and worker.version - first >= least_rounds:
                last = min(last, worker.version + 1)  # one round more for all: then nobody waits for who has ended

    await asyncio.gather(*(go_on(worker) for worker in crew))
    return Worked(last - first, time.monotonic() - began_at, dict(tally))


# --- who looks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """What the prober saw: seconds per status request, and the largest of what the server told or used."""

    latencies_s: list[float]
    pool_bytes: int
    rss_anon_bytes: int
    status_bytes: int
    server_cpu_s: float


def probe(pipe: Connection, port: int, server_pid: int) -> None:
    """The process that asks for the status until told to stop."""
    connection = http.client.HTTPConnection(HOST, port, timeout=HANG_S)
    latencies: list[float] = []
    pool_bytes = rss_bytes = status_bytes = 0
    cpu_s = cpu_time_s(server_pid)
    while not pipe.poll():
        began_at = time.perf_counter()
        connection.request("GET", "/status")
        data = connection.getresponse().read()
        latencies.append(time.perf_counter() - began_at)
        status_bytes = len(data)
        pool_bytes = max(pool_bytes, json.loads(data)["pool_held_bytes"])
        rss_bytes = max(rss_bytes, rss_anon_bytes(server_pid))
        time.sleep(PROBE_EVERY_S)
    pipe.send(Seen(latencies, pool_bytes, rss_bytes, status_bytes, cpu_time_s(server_pid) - cpu_s))


def rss_anon_bytes(pid: int) -> int:
    """Private memory that is really there; 0 where the system does not say."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def cpu_time_s(pid: int) -> float:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


# --- measuring --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """`worked`: with somebody that asks for the status; `alone`: without, and the server's CPU time meanwhile."""

    workers: int
    worked: Worked
    seen: Seen
    alone: Worked
    alone_cpu_s: float

    @property
    def expected(self) -> int:
        return self.workers * (self.worked.rounds + self.alone.rounds)

    @property
    def counted(self) -> int:
        return self.worked.tally.get("counted", 0) + self.alone.tally.get("counted", 0)

    @property
    def cost_ms(self) -> float:
        return 1e3 * self.alone_cpu_s / (self.workers * self.alone.rounds)

    @property
    def asks(self) -> float:
        return self.alone.tally["requests"] / (self.workers * self.alone.rounds)

    def latency_ms(self, quantile: float) -> float:
        """The smallest latency that at least this share of the requests did not exceed."""
        ordered = sorted(self.seen.latencies_s)
        return ordered[min(int(quantile * len(ordered)), len(ordered) - 1)] * 1e3


def measure(workers: int, least_s: float, least_rounds: int) -> Run:
    with Helper(serve, workers) as server:
        port = server.hear()
        assert server.process.pid is not None
        with Helper(work, workers, port, least_s, least_rounds) as crew:
            crew.hear()
            with Helper(probe, port, server.process.pid) as prober:
                crew.pipe.send("go")
                worked = crew.hear(HANG_S + least_s)
                seen = prober.ask("stop")
            cpu_s = cpu_time_s(server.process.pid)
            crew.pipe.send("go")
            alone = crew.hear(HANG_S + least_s)
            cpu_s = cpu_time_s(server.process.pid) - cpu_s
            crew.pipe.send("end")
            return Run(workers, worked, seen, alone, cpu_s)


def table(runs: list[Run]) -> Table:
    what = f"{PARAMETERS / 1e6:g}M parameters"
    title = f"Synchronous rounds of {what} through a pool of {POOL_BYTES >> 20} MiB, {CORES} cores"
    made = Table(title=title, box=rich.box.SIMPLE_HEAD)
    for column in ("workers", "rounds", "s/round", "counted", "waits", "refused", "p50", "p99", "most"):
        made.add_column(column, justify="right")
    for column in ("pool", "RssAnon", "CPU", "asks", "cost"):
        made.add_column(column, justify="right")
    for run in runs:
        tally = run.worked.tally
        refused = sum(count for what, count in tally.items() if what.startswith(("refused", "busy")))
        made.add_row(
            str(run.workers),
            str(run.worked.rounds),
            f"{run.worked.seconds / run.worked.rounds:.2f}",
            f"{run.counted}/{run.expected}",
            str(tally.get("told to wait", 0)),
            str(refused),
            f"{run.latency_ms(0.5):.1f} ms",
            f"{run.latency_ms(0.99):.1f} ms",
            f"{run.latency_ms(1.0):.0f} ms",
            f"{run.seen.pool_bytes / 2**20:.0f} MiB",
            f"{run.seen.rss_anon_bytes / 2**20:.0f} MiB",
            f"{run.seen.server_cpu_s / run.worked.seconds:.0%}",
            f"{run.asks:.1f}",
            f"{run.cost_ms:.2f} ms",
        )
    return made


def summarize(runs: list[Run]) -> list[dict[str, Any]]:
    return [
        {
            "workers": run.workers,
            "rounds": run.worked.rounds,
            "seconds": run.worked.seconds,
            "counted": run.counted,
            "expected": run.expected,
            "tally": run.worked.tally,
            "status_p50_ms": run.latency_ms(0.5),
            "status_p99_ms": run.latency_ms(0.99),
            "status_most_ms": run.latency_ms(1.0),
            "status_requests": len(run.seen.latencies_s),
            "status_bytes": run.seen.status_bytes,
            "pool_peak_bytes": run.seen.pool_bytes,
            "rss_anon_peak_bytes": run.seen.rss_anon_bytes,
            "server_cpu_s": run.seen.server_cpu_s,
            "alone": asdict(run.alone),
            "alone_server_cpu_s": run.alone_cpu_s,
            "cost_ms": run.cost_ms,
            "asks": run.asks,
        }
        for run in runs
    ]


def verdict(runs: list[Run]) -> str:
    """The claims, by the medians over the repeats."""
    few, many = (
        statistics.median(r.latency_ms(0.99) for r in runs if r.workers == n) for n in (min(COUNTS), max(COUNTS))
    )
    costs = [statistics.median(r.cost_ms for r in runs if r.workers == n) for n in (min(COUNTS), max(COUNTS))]
    lost = sum(run.expected - run.counted for run in runs)
    held = all(run.seen.pool_bytes <= POOL_BYTES for run in runs)
    return (
        f"p99 of the status with {max(COUNTS)} workers: {many / few:.1f} times that with {min(COUNTS)} (claim: at most "
        f"{CLAIM:g}); contributions not counted: {lost}; the pool {'held' if held else 'did NOT hold'}; "
        f"a worker and round costs the server {costs[1]:.2f} ms, {costs[1] / costs[0]:.2f} times what it costs with "
        f"{min(COUNTS)} (claim: at most {COST_CLAIM:g})"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the server with many connections.")
    parser.add_argument("--quick", action="store_true", help="once, 5 s each, instead of three times 12 s")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write every latency, the summary and the machine here"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    about, log = provenance("torch", "h11"), Console(stderr=True)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    repeats, least_s = (1, 5.0) if arguments.quick else (3, 12.0)
    runs: list[Run] = []
    for _ in range(repeats):
        for workers in COUNTS:
            runs.append(measure(workers, least_s, least_rounds=2))
            last = runs[-1]
            log.print(
                f"{workers} workers: {last.worked.rounds} rounds, status p99 {last.latency_ms(0.99):.1f} ms, "
                f"{last.worked.tally}",
                highlight=False,
            )
    out = Console(width=140)
    out.print(table(sorted(runs, key=lambda run: run.workers)))
    out.print(verdict(runs), highlight=False)
    if arguments.json:
        report = {"machine": about, "summary": summarize(runs), "runs": [asdict(run) for run in runs]}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
        log.print(f"wrote {arguments.json}")


if __name__ == "__main__":
    main()
