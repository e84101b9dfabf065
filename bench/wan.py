"""How much of its time does a worker lose to a slow link?

The claims measured, over an emulated link of 100 Mbit/s and 50 ms (bench/links.py, which is measured first):

1. Streaming, that is several fragments and a delay, keeps the training loop waiting for less than 1 % of the time,
   where exchanging the whole model at once (`blocking`) costs more than 10 %.
2. Over a long fat link, on which one connection carries no more than its window per round trip, several connections
   multiply the speed of an exchange.
3. A worker with default settings finds by itself how many connections fill such a link, and uses few on a shorter one.
4. A small model is exchanged in two round trips; on loopback, in a few milliseconds.

Two workers and a server, each a process, each worker behind a link of its own. A worker trains a real model (a
perceptron that learns another one) with SGD; each step is stretched to a fixed time, as if an accelerator computed it
and left the host idle, so that all modes have the same work and the machine's own speed matters little.

    waiting     `sync_metrics["seconds_waiting"]`, as a share of the wall-clock time
    in hook     all that the worker does in the training thread: waiting, and beside it taking the pseudo-gradient,
                encoding, hashing and adopting; as a share of the same. That part of it is the host's speed, not the
                link's: here two workers, two links and a server share what cores there are.

    python bench/wan.py                       # about ten minutes, most of it asleep
    python bench/wan.py --only defaults       # about four: the last claim
    python bench/wan.py --quick               # about two
    python bench/wan.py --json out.json       # every run, the machine and the commit
    python bench/wan.py --mbit 50 --rtt-ms 200 --steps-per-cycle 800    # another link
"""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import rich.box
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.hooks import RemovableHandle

from child import Helper
from links import HANG_S, Link, Seen, emulated, validate
from outerstep import DiLoCoServer, DiLoCoWorker
from outerstep.coordination.worker.exchange import Patience
from outerstep.lanes import MOST
from outerstep.topology.payload import KEPT, Memory
from outerstep.topology.server.build import OTHER_CONNECTIONS
from outerstep.topology.server.topology import ServerTopology
from outerstep.types import Answer, GetPart, PutPart, Request
from outerstep.wire.http_transport import HttpTransport
from provenance import provenance

LAYERS, WIDTH, BATCH = 6, 1024, 8  # 6.3M parameters
WORKERS = 2
FAT_LINK = Link(mbit_per_s=400, rtt_ms=100, window_bytes=512 << 10)  # one connection: 42 Mbit/s
FAT_LAYERS = 10
FAT_PART_BYTES = 1 << 20
CONNECTIONS = (1, 4, 8)
PARTS = ("modes", "connections", "defaults", "small")
LINKS = {  # that a worker has to find its way on
    "long, small windows": FAT_LINK,
    "long": Link(mbit_per_s=400, rtt_ms=100),
    "shorter": Link(mbit_per_s=100, rtt_ms=50),
}
ANY_WINDOW_BYTES = 32 << 20  # what the link itself carries: of one connection that no window holds back
LARGE_LAYERS = 100  # 105M parameters: 210 MB as bf16
TABLE_WIDTH = 140


def make_model(layers: int) -> nn.Module:
    torch.manual_seed(0)
    blocks: list[nn.Module] = []
    for _ in range(layers):
        blocks += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*blocks)


def serve(pipe: Connection, layers: int, settings: dict[str, Any]) -> None:
    """The server process: says its address, stays until the pipe is closed."""
    torch.set_num_threads(1)
    with DiLoCoServer(make_model(layers).state_dict(), port=0, insecure=True, **settings) as server:
        pipe.send(server.address)
        with contextlib.suppress(EOFError):
            pipe.recv()


# --- streaming against blocking ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mode:
    name: str
    fragments: int
    delay: int


@dataclass(frozen=True)
class Loop:
    """How a worker trains."""

    step_s: float
    steps_per_cycle: int
    steps: int


@dataclass(frozen=True)
class Run:
    """One worker of one mode."""

    mode: str
    worker: str
    steps: int
    wall_s: float
    waiting_s: float
    in_hook_s: float
    longest_hook_s: float
    exchanges: int
    retries: int
    steps_overwritten: int
    bytes_sent: int
    bytes_received: int
    first_loss: float
    last_loss: float

    @property
    def waiting_share(self) -> float:
        return self.waiting_s / self.wall_s

    @property
    def in_hook_share(self) -> float:
        return self.in_hook_s / self.wall_s


class TimedSGD(torch.optim.SGD):
    """Notes how long whatever is hooked into it takes after each step."""

    def register_step_post_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        self.in_hook_s: list[float] = []

        def timed(*arguments: Any) -> None:
            began_at = time.perf_counter()
            hook(*arguments)
            self.in_hook_s.append(time.perf_counter() - began_at)

        return super().register_step_post_hook(timed)


def train(pipe: Connection, mode: Mode, loop: Loop, name: str, address: str) -> None:
    """The worker process: joins, says so, trains when told to, reports."""
    torch.set_num_threads(1)
    model, data = make_model(LAYERS), torch.Generator().manual_seed(hash(name) % 1000)
    teacher = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    optimizer = TimedSGD(model.parameters(), lr=0.5, momentum=0.9)
    losses: list[float] = []
    with DiLoCoWorker(model, optimizer, f"http://{address}", worker_id=name) as worker:
        pipe.send("ready")
        pipe.recv()
        began_at = time.perf_counter()
        for _ in range(loop.steps):
            due_at = time.perf_counter() + loop.step_s
            inputs = torch.randn(BATCH, WIDTH, generator=data)
            with torch.no_grad():
                targets = teacher(inputs)
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            losses.append(float(loss.detach()))
            time.sleep(max(due_at - time.perf_counter(), 0.0))
            optimizer.step()
            optimizer.zero_grad()
        wall_s = time.perf_counter() - began_at
        metrics: dict[str, Any] = dict(worker.sync_metrics)
        pipe.send(
            Run(
                mode=mode.name,
                worker=name,
                steps=loop.steps,
                wall_s=wall_s,
                waiting_s=metrics["seconds_waiting"],
                in_hook_s=sum(optimizer.in_hook_s),
                longest_hook_s=max(optimizer.in_hook_s),
                exchanges=metrics["sync_count"],
                retries=metrics["sync_retries"],
                steps_overwritten=metrics["steps_overwritten"],
                bytes_sent=metrics["bytes_sent"],
                bytes_received=metrics["bytes_received"],
                first_loss=statistics.mean(losses[:10]),
                last_loss=statistics.mean(losses[-10:]),
            )
        )


def measure_mode(mode: Mode, link: Link, loop: Loop) -> list[Run]:
    settings = {
        "num_workers": WORKERS,
        "sync_every": loop.steps_per_cycle,
        "num_fragments": mode.fragments,
        "fragment_delay": mode.delay,
    }
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Helper(serve, LAYERS, settings))
        address = server.hear()
        helpers = []
        for i in range(WORKERS):
            through = stack.enter_context(emulated(link, address))
            helpers.append(stack.enter_context(Helper(train, mode, loop, f"worker-{i}", through)))
        for helper in helpers:
            helper.hear()
        for helper in helpers:
            helper.pipe.send("go")
        return [helper.hear(HANG_S + 10 * loop.steps * loop.step_s) for helper in helpers]


# --- several connections ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transfer:
    """The parts of one exchange in one direction: bytes, and seconds from the first request to the last answer.
    `connections`: parts at a time, at most."""

    connections: int
    direction: str
    size_bytes: int
    seconds: float

    @property
    def mbit_per_s(self) -> float:
        return self.size_bytes * 8 / 1e6 / self.seconds


class TimedTransport:
    """Notes when parts travel."""

    def __init__(self, inner: HttpTransport) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._spans: dict[str, list[tuple[float, float, int]]] = {"up": [], "down": []}

    @property
    def address(self) -> str:
        return self._inner.address

    @property
    def protocol(self) -> int:
        return self._inner.protocol

    def call(
        self,
        request: Request,
        *,
        body: memoryview | None = None,
        into: memoryview | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        began_at = time.perf_counter()
        answer = self._inner.call(request, body=body, into=into, timeout_s=timeout_s)
        carried = body if isinstance(request, PutPart) else into if isinstance(request, GetPart) else None
        if carried is not None:
            direction = "up" if isinstance(request, PutPart) else "down"
            with self._lock:
                self._spans[direction].append((began_at, time.perf_counter(), len(carried)))
        return answer

    def spread(self, connections: int, *, up: bool) -> None:
        self._inner.spread(connections, up=up)

    def status(self) -> dict[str, object]:
        return self._inner.status()

    def close(self) -> None:
        self._inner.close()

    def take(self) -> list[Transfer]:
        with self._lock:
            spans, self._spans = self._spans, {"up": [], "down": []}
        return [
            Transfer(
                _most_at_a_time(parts),
                direction,
                sum(size for _, _, size in parts),
                max(end for _, end, _ in parts) - min(begin for begin, _, _ in parts),
            )
            for direction, parts in spans.items()
            if parts
        ]


def _most_at_a_time(spans: list[tuple[float, float, int]]) -> int:
    moments = sorted([(begin, 1) for begin, _, _ in spans] + [(end, -1) for _, end, _ in spans])
    return max(accumulate(change for _, change in moments))


def measure_connections(exchanges: int, log: Console) -> list[Transfer]:
    """The same model, exchanged by a worker that has more and more connections."""
    transfers: list[Transfer] = []
    settings = {"num_workers": 1, "sync_every": 1, "num_fragments": 1, "part_size_bytes": FAT_PART_BYTES}
    with (
        Helper(serve, FAT_LAYERS, settings) as server,
        emulated(FAT_LINK, server.hear()) as address,
    ):
        for connections in CONNECTIONS:
            for transfer in exchange_often(f"http://{address}", FAT_LAYERS, connections, exchanges):
                transfers.append(replace(transfer, connections=connections))
            log.print(f"{connections} connection(s): {_speeds(transfers[-2:])}", highlight=False)
    return transfers


def measure_defaults(link: Link, exchanges: int, layers: int, log: Console) -> list[Transfer]:
    """A larger model by default settings, from a worker that knows nothing of its link."""
    settings = {"num_workers": 1, "sync_every": 1, "num_fragments": 1}
    with Helper(serve, layers, settings) as server, emulated(link, server.hear()) as address:
        transfers = exchange_often(f"http://{address}", layers, None, exchanges)
    for i in range(0, len(transfers), 2):
        lanes = ", ".join(str(transfer.connections) for transfer in transfers[i : i + 2])
        log.print(f"{link}: {_speeds(transfers[i : i + 2])}; parts at a time: {lanes}", highlight=False)
    return transfers


def exchange_often(server: str, layers: int, connections: int | None, exchanges: int) -> list[Transfer]:
    model, transfers = make_model(layers), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    kept_connections = (connections or MOST) + OTHER_CONNECTIONS
    transport = TimedTransport(HttpTransport(server, kept_connections=kept_connections))
    topology = ServerTopology(
        transport,
        worker_id=f"with-{connections}",
        instance=secrets.token_hex(8),
        hostname="bench",
        patience=Patience(calls_in_flight=connections),
        memory=Memory(KEPT),
    )
    with DiLoCoWorker(model, optimizer, server, topology=topology):
        transport.take()  # what joining fetched
        for _ in range(exchanges):
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            optimizer.step()
            transfers += transport.take()
    return transfers


def serve_small(pipe: Connection, settings: dict[str, Any]) -> None:
    with DiLoCoServer(nn.Linear(999, 1).state_dict(), port=0, insecure=True, **settings) as server:
        pipe.send(server.address)
        with contextlib.suppress(EOFError):
            pipe.recv()


def measure_small(link: Link | None, exchanges: int) -> list[float]:
    """Seconds that a blocking exchange of 1,000 parameters takes, from the call of the hook to its end. Without a link:
    on loopback."""
    took_s = []
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(Helper(serve_small, {"num_workers": 1, "sync_every": 1})).hear()
        if link is not None:
            address = stack.enter_context(emulated(link, address))
        model = nn.Linear(999, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with DiLoCoWorker(model, optimizer, f"http://{address}"):
            for _ in range(exchanges):
                for param in model.parameters():
                    param.grad = torch.ones_like(param)
                began_at = time.perf_counter()
                optimizer.step()
                took_s.append(time.perf_counter() - began_at)
    return took_s


def _spread(took_s: list[float]) -> str:
    fastest, *_, slow = statistics.quantiles(took_s, n=20)
    return f"{fastest * 1e3:.1f} in the fastest twentieth, {slow * 1e3:.1f} in the slowest"


def _speeds(transfers: list[Transfer]) -> str:
    return ", ".join(f"{t.mbit_per_s:.0f} Mbit/s {t.direction}" for t in transfers)


# --- reporting --------------------------------------------------------------------------------------------------------


def modes_table(runs: list[Run], modes: list[Mode], title: str) -> Table:
    made = Table(title=title, box=rich.box.SIMPLE_HEAD)
    for column in ("mode", "fragments", "delay", "steps", "wall", "waiting", "in hook", "longest", "loss"):
        made.add_column(column, justify="left" if column == "mode" else "right")
    for mode in modes:
        of_mode = [run for run in runs if run.mode == mode.name]

        def worst(fact: Callable[[Run], float], of_mode: list[Run] = of_mode) -> float:
            return max(fact(run) for run in of_mode)

        made.add_row(
            mode.name,
            str(mode.fragments),
            str(mode.delay),
            str(of_mode[0].steps),
            f"{worst(lambda run: run.wall_s):.1f} s",
            f"{worst(lambda run: run.waiting_share):.2%}",
            f"{worst(lambda run: run.in_hook_share):.2%}",
            f"{worst(lambda run: run.longest_hook_s) * 1e3:.0f} ms",
            f"{of_mode[0].first_loss:.3f} → {worst(lambda run: run.last_loss):.3f}",
        )
    return made


def connections_table(transfers: list[Transfer], seen: str) -> Table:
    made = Table(title=f"An exchange over {FAT_LINK}; one connection: {seen}", box=rich.box.SIMPLE_HEAD)
    for column in ("connections", "up", "down", "× one, up", "× one, down"):
        made.add_column(column, justify="right")

    def speed(connections: int, direction: str) -> float:
        return statistics.median(
            t.mbit_per_s for t in transfers if (t.connections, t.direction) == (connections, direction)
        )

    for connections in CONNECTIONS:
        cells = [speed(connections, direction) for direction in ("up", "down")]
        ratios = [speed(connections, direction) / speed(1, direction) for direction in ("up", "down")]
        made.add_row(str(connections), *(f"{cell:.0f} Mbit/s" for cell in cells), *(f"{ratio:.1f}" for ratio in ratios))
    return made


def defaults_table(by_default: dict[str, list[Transfer]], bare: dict[str, Seen]) -> Table:
    title = "Exchanges by default settings: the first one, then the median of the later half"
    made = Table(title=title, box=rich.box.SIMPLE_HEAD)
    for column in (
        "link",
        "window",
        "bytes",
        "bare, up",
        "bare, down",
        "first",
        "up",
        "of the link",
        "down",
        "of the link",
    ):
        made.add_column(column, justify="left" if column == "link" else "right")
    for name, transfers in by_default.items():
        link, seen = LINKS[name], bare[name]
        cells = [
            str(link),
            f"{link.window_bytes >> 10} KiB",
            f"{seen.up_mbit_per_s:.0f}",
            f"{seen.down_mbit_per_s:.0f}",
        ]
        cells.insert(2, f"{transfers[0].size_bytes / 1e6:.0f} MB")
        cells.append(", ".join(f"{t.mbit_per_s:.0f} {t.direction}" for t in transfers[:2]))
        for direction in ("up", "down"):
            found = [t.mbit_per_s for t in transfers if t.direction == direction]
            speed = statistics.median(found[len(found) // 2 :])
            cells += [f"{speed:.0f} Mbit/s", f"{speed / link.mbit_per_s:.2f}"]
        made.add_row(*cells)
    return made


def _facts(transfer: Transfer) -> dict[str, Any]:
    return {**asdict(transfer), "mbit_per_s": transfer.mbit_per_s}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure what a slow link costs a worker.")
    parser.add_argument("--quick", action="store_true", help="one cycle a mode, one exchange a number of connections")
    parser.add_argument("--mbit", type=float, default=100.0, help="Mbit/s each way (default 100)")
    parser.add_argument("--rtt-ms", type=float, default=50.0, help="round trip (default 50)")
    parser.add_argument("--step-ms", type=float, default=50.0, help="what a step takes at least (default 50)")
    parser.add_argument("--steps-per-cycle", type=int, default=240, help="H (default 240)")
    parser.add_argument("--fragments", type=int, default=4, help="of the streaming mode (default 4)")
    parser.add_argument("--delay", type=int, help="τ of the streaming mode (default: five sixths of a fragment's slot)")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS, help="what to measure (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run, the summary and the machine here")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    log, out, about = Console(stderr=True), Console(width=TABLE_WIDTH), provenance("torch")
    torch.set_num_threads(1)
    link = Link(arguments.mbit, arguments.rtt_ms)
    seen, fat_seen = validate(link), validate(FAT_LINK)
    log.print(f"the link, as measured: {seen}", highlight=False)
    slot = arguments.steps_per_cycle // arguments.fragments
    delay = slot * 5 // 6 if arguments.delay is None else arguments.delay
    modes = [Mode("blocking", 1, 0), Mode("streaming", arguments.fragments, delay)]
    if not arguments.quick:
        modes.insert(1, Mode("in pieces", arguments.fragments, 0))
    cycles = 1 if arguments.quick else 3
    # A few steps more than whole cycles: what was sent at the end of the last one is taken over too.
    loop = Loop(arguments.step_ms / 1e3, arguments.steps_per_cycle, cycles * arguments.steps_per_cycle + delay + 1)
    runs: list[Run] = []
    for mode in modes if "modes" in arguments.only else []:
        log.print(f"{mode.name}: {loop.steps} steps of {arguments.step_ms:g} ms", highlight=False)
        runs += measure_mode(mode, link, loop)
    transfers: list[Transfer] = []
    if "connections" in arguments.only:
        transfers = measure_connections(1 if arguments.quick else 3, log)
    by_default: dict[str, list[Transfer]] = {}
    bare: dict[str, Seen] = {}
    most_layers, exchanges = (LARGE_LAYERS // 4, 2) if arguments.quick else (LARGE_LAYERS, 6)
    for name, each in LINKS.items() if "defaults" in arguments.only else []:
        bare[name] = validate(replace(each, window_bytes=ANY_WINDOW_BYTES), seconds=4.0)
        layers = int(most_layers * each.mbit_per_s / FAT_LINK.mbit_per_s)  # as long as on the others
        by_default[name] = measure_defaults(each, exchanges, layers, log)
    millions = sum(param.numel() for param in make_model(LAYERS).parameters()) / 1e6
    title = f"{WORKERS} workers, {millions:.1f}M parameters, H = {loop.steps_per_cycle}, over {link}, measured: {seen}"
    small_s: list[float] = []
    loopback_s: list[float] = []
    if "small" in arguments.only:
        small_s = measure_small(FAT_LINK, 5 if arguments.quick else 21)
        out.print(f"1,000 parameters over {FAT_LINK}: {statistics.median(small_s):.3f} s, {max(small_s):.3f} at most")
        loopback_s = measure_small(None, 50 if arguments.quick else 201)
        out.print(f"1,000 parameters on loopback: {statistics.median(loopback_s) * 1e3:.1f} ms, {_spread(loopback_s)}")
    if runs:
        out.print(modes_table(runs, modes, title))
    if transfers:
        out.print(connections_table(transfers, str(fat_seen)))
    if by_default:
        out.print(defaults_table(by_default, bare))
    if arguments.json:
        report = {
            "machine": about,
            "link": {"asked": asdict(link), "seen": seen.as_json()},
            "loop": asdict(loop),
            "modes": [asdict(mode) for mode in modes],
            "runs": [{**asdict(r), "waiting_share": r.waiting_share, "in_hook_share": r.in_hook_share} for r in runs],
            "fat_link": {"asked": asdict(FAT_LINK), "seen": fat_seen.as_json()},
            "transfers": [_facts(t) for t in transfers],
            "small_s": small_s,
            "small_loopback_s": loopback_s,
            "by_default": {
                name: {
                    "link": asdict(LINKS[name]),
                    "bare": bare[name].as_json(),
                    "transfers": [_facts(t) for t in found],
                }
                for name, found in by_default.items()
            },
        }
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
        log.print(f"wrote {arguments.json}")


if __name__ == "__main__":
    main()
