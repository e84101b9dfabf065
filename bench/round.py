"""What does a round cost, and how much of it is more than moving the bytes?

Measured: how the exchange of contributions compares with the same bytes over bare sockets, and a whole round with that
of a server which moves `torch.save` files.

A model of 103M parameters in 112 tensors; k workers, each a process, beside the server on the same machine and over its
loopback; bf16 in both directions, as far as the server has a setting for it. In one run, taking turns:

    bare        the bytes alone: k clients send the size of a contribution, wait for each other, receive the size of an
                agreement (bare_sockets.py)
    exchange    the same by the protocol: k clients with an encoded contribution upload it; the round closes, which is
                not counted; all fetch the agreement (thin_client.py)
    round       k real workers: from the barrier before the step that is due until the last of them has adopted, so
                with delta, encoding, aggregation, outer step and adopting
    torch.save  the same round of the straightforward server (torch_save_server.py): bf16 up, fp32 down

and beside them the bytes that one worker's round takes on the socket with each codec, and the outer step alone.

    python bench/round.py                          # k = 2 and 4; some minutes on two cores
    python bench/round.py --workers 2,4,8,16       # leaves out what does not fit into memory, and says so
    python bench/round.py --quick                  # 8M parameters
    python bench/round.py --json round.json        # every single round, the machine and the commit

GB = 1e9 bytes. On loopback everybody shares the cores, so a round's time is close to the CPU time of all processes
divided by the cores: machines of their own do better.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from actors import Server, Worker
from bare_sockets import BareClient, BareServer
from harness import (
    Actor,
    MemoryWatch,
    Relay,
    available_bytes,
    cpu_s,
    median,
    print_table,
    say,
    together,
    wall_s,
    write_json,
)
from internals import OuterStep, codec_settings, write_frame
from models import count
from provenance import provenance
from thin_client import ThinClient
from torch_save_server import TorchSaveServer, TorchSaveWorker

CODECS = (("fp32", "fp32"), ("bf16", "bf16"), ("int8", "int8"), ("int4", "int4"), ("sparse64", "int4"))
# What variants take at most, in bytes per parameter, to leave out in time what does not fit.
WORKER_BYTES, SERVER_BYTES, HELD_BYTES = 18, 24, 8
PROCESS_BYTES = 200 << 20


@dataclass(frozen=True, kw_only=True)
class Run:
    """One round of one variant."""

    variant: str
    workers: int
    block: int
    seconds: float
    up_s: float | None = None
    down_s: float | None = None
    bytes: int | None  # payloads of all workers, both ways
    server_cpu_s: float
    clients_cpu_s: float
    server_peak_bytes: int | None = None  # anonymous memory, over the rounds of the block so far

    @property
    def gb_per_s(self) -> float | None:
        return self.bytes / self.seconds / 1e9 if self.bytes else None


@dataclass(frozen=True)
class Setting:
    size: str
    rounds: int
    folder: Path
    tls: bool

    @property
    def frame_file(self) -> Path:
        return self.folder / "frame"


# --- the variants -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def started(server: Actor, make: Callable[[int, Any], Actor], workers: int, where: str) -> Iterator[list[Actor]]:
    """A server and its k clients, made with what the server says about `where` it listens."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(server)
        place = server.ask(where)
        yield [stack.enter_context(make(number, place)) for number in range(workers)]


class Meter:
    """CPU seconds of the server and of everybody else, since it was made."""

    def __init__(self, server: Actor, clients: list[Actor]) -> None:
        self._pids = [server.pid], [client.pid for client in clients]
        self._before = self._now()

    def _now(self) -> tuple[float, float]:
        servers, clients = self._pids
        return sum(map(cpu_s, servers)), sum(map(cpu_s, clients))

    def used(self) -> dict[str, float]:
        now = self._now()
        return {"server_cpu_s": now[0] - self._before[0], "clients_cpu_s": now[1] - self._before[1]}


def phases(variant: str, clients: list[Actor], server: Actor, between: Callable[[], object]) -> dict[str, Any]:
    """All upload; `between`, which is not timed; all fetch. The facts of a `Run`."""
    meter = Meter(server, clients)
    up_s = wall_s(together(clients, "upload"))
    between()
    down_s = wall_s(together(clients, "fetch"))
    return {"variant": variant, "seconds": up_s + down_s, "up_s": up_s, "down_s": down_s, **meter.used()}


def exchange_runs(setting: Setting, workers: int, block: int) -> Iterator[Run]:
    """Bare sockets and the protocol, in turns."""
    server = Actor(Server, setting.size, workers, tls=setting.tls)
    with started(server, lambda number, _: Actor(ThinClient, number), workers, "address") as thin:
        joined = [client.ask("join", server.ask("address")) for client in thin]
        up_bytes = setting.frame_file.stat().st_size if setting.frame_file.exists() else 0
        up_bytes = up_bytes or write_frame(setting.frame_file, joined[0])
        together(thin, "load", str(setting.frame_file))
        for _ in range(2):  # the first agreement comes whole; the second tells how large the others are
            together(thin, "upload")
            down_bytes = together(thin, "commit")[0].value.size_bytes
            together(thin, "fetch")
        total = workers * (up_bytes + down_bytes)
        bare_server = Actor(BareServer, workers, up_bytes, down_bytes, tls=setting.tls)

        def client(_: int, port: int) -> Actor:
            return Actor(BareClient, str(setting.frame_file), down_bytes, port, tls=setting.tls)

        with started(bare_server, client, workers, "port") as bare:
            phases("bare", bare, bare_server, bool)
            for _ in range(setting.rounds):
                for facts in (
                    phases("bare", bare, bare_server, bool),
                    phases("exchange", thin, server, lambda: together(thin, "commit")),
                ):
                    yield Run(workers=workers, block=block, bytes=total, **facts)


def round_runs(setting: Setting, workers: int, block: int, total: int | None) -> Iterator[Run]:
    server = Actor(Server, setting.size, workers, tls=setting.tls)
    size = setting.size
    with started(server, lambda number, address: Actor(Worker, size, number, address), workers, "address") as clients:
        together(clients, "join")
        yield from timed_rounds("round", clients, server, setting, block, total)


def torch_save_runs(setting: Setting, workers: int, block: int, _: int | None) -> Iterator[Run]:
    """Its files are larger than the payloads of the others, so only its time is compared."""
    server = Actor(TorchSaveServer, setting.size, workers)
    size = setting.size
    with started(server, lambda _, port: Actor(TorchSaveWorker, size, port), workers, "port") as clients:
        together(clients, "join")
        yield from timed_rounds("torch.save", clients, server, setting, block, None)


def timed_rounds(
    variant: str, workers: list[Actor], server: Actor, setting: Setting, block: int, total: int | None
) -> Iterator[Run]:
    with MemoryWatch(server.pid) as memory:
        for number in range(setting.rounds + 1):
            together(workers, "train")
            meter = Meter(server, workers)
            seconds = wall_s(together(workers, "exchange"))
            facts: dict[str, Any] = {"server_peak_bytes": memory.peak_anon_bytes, **meter.used()}
            if number > 0:  # the first one warms up
                yield Run(variant=variant, workers=len(workers), block=block, seconds=seconds, bytes=total, **facts)


def too_large(variant: str, workers: int, size: str) -> str:
    """Why a variant is left out; "" if there is room for it."""
    numel, _ = count(size)
    needed = workers * (WORKER_BYTES * numel + PROCESS_BYTES) + SERVER_BYTES * numel
    if variant == "torch.save":
        needed += workers * HELD_BYTES * numel
    free = available_bytes()
    return f"needs about {needed / 2**30:.0f} GiB, {free / 2**30:.0f} are free" if needed > free else ""


def measure(setting: Setting, workers: list[int], blocks: int) -> tuple[list[Run], list[str]]:
    """All variants, for every number of workers, `blocks` times: each block has a few rounds of each."""
    runs: list[Run] = []
    left_out: list[str] = []
    for block in range(blocks):
        for k in workers:
            made = list(told(exchange_runs(setting, k, block)))
            runs += made
            others = {"round": round_runs} | ({} if setting.tls else {"torch.save": torch_save_runs})
            for variant, start in others.items():
                if why := too_large(variant, k, setting.size):
                    left_out.append(f"{variant} with {k} workers: {why}")
                    say(left_out[-1])
                else:
                    runs += told(start(setting, k, block, made[0].bytes))
    return runs, list(dict.fromkeys(left_out))


def told(runs: Iterator[Run]) -> Iterator[Run]:
    for run in runs:
        rate = f", {run.gb_per_s:.2f} GB/s" if run.gb_per_s else ""
        say(f"block {run.block + 1}, k = {run.workers}, {run.variant}: {run.seconds:.3f} s{rate}")
        yield run


# --- bytes on the socket, and the outer step --------------------------------------------------------------------------


def bytes_on_the_socket(size: str) -> list[dict[str, Any]]:
    """Of one worker's second round, counted between it and the server, with every pair of codecs."""
    numel, _ = count(size)
    rows: list[dict[str, Any]] = []
    for up, down in CODECS:
        row: dict[str, Any] = {"codec": up, **codec_settings(up, down)}
        try:
            up_bytes, down_bytes = one_round_counted(size, up, down)
            row |= {"up_bytes_per_parameter": up_bytes / numel, "down_bytes_per_parameter": down_bytes / numel}
            say(f"{up} up, {row.get('down_codec', 'fp32')} down: {(up_bytes + down_bytes) / numel:.3f} bytes/parameter")
        except RuntimeError as error:
            row["refused"] = str(error).strip().splitlines()[-1].partition(": ")[2]
            say(f"{up} up: {row['refused']}")
        rows.append(row)
    return rows


def one_round_counted(size: str, up: str, down: str) -> tuple[int, int]:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Actor(Server, size, 1, up, down))
        relay = stack.enter_context(Relay(server.ask("address")))
        worker = stack.enter_context(Actor(Worker, size, 0, relay.address))
        worker.ask("join")
        for _ in range(2):
            worker.ask("train")
            before = relay.up_bytes, relay.down_bytes
            worker.ask("exchange")
        return relay.up_bytes - before[0], relay.down_bytes - before[1]


def outer_step(setting: Setting, repeats: int) -> dict[str, float]:
    """Medians in seconds, and ratios to fused SGD within a repeat."""
    with Actor(OuterStep, setting.size, str(setting.frame_file)) as actor:
        seconds = [actor.ask("measure") for _ in range(repeats + 1)][1:]
    made = {f"{name}_s": median(run[name] for run in seconds) for name in seconds[0]}
    for name in ("step", "close"):
        made[f"{name}_to_sgd_fused"] = median(run[name] / run["sgd_fused"] for run in seconds)
    return made


# --- reporting --------------------------------------------------------------------------------------------------------


def summarize(runs: list[Run]) -> list[dict[str, Any]]:
    """Medians; ratios are of a block's medians, and the median over the blocks: a slow minute slows both."""
    rows = []
    for k in sorted({run.workers for run in runs}):
        for variant in ("bare", "exchange", "round", "torch.save"):
            mine = [run for run in runs if run.workers == k and run.variant == variant]
            if mine:
                rows.append(
                    {
                        "workers": k,
                        "variant": variant,
                        "seconds": median(run.seconds for run in mine),
                        "fastest_s": min(run.seconds for run in mine),
                        "gb_per_s": median(run.gb_per_s or 0.0 for run in mine) or None,
                        "rate_to_bare": time_ratio(runs, k, "bare", variant) if mine[0].bytes else None,
                        "time_to_torch_save": time_ratio(runs, k, variant, "torch.save"),
                        "server_cpu_s_per_worker": median(run.server_cpu_s / k for run in mine),
                        "client_cpu_s_per_worker": median(run.clients_cpu_s / k for run in mine),
                        "server_peak_bytes": max((run.server_peak_bytes or 0 for run in mine), default=0) or None,
                    }
                )
    return rows


def time_ratio(runs: list[Run], workers: int, variant: str, other: str) -> float | None:
    """time(variant) / time(other). For the same bytes, time(bare) / time(x) is rate(x) / rate(bare)."""
    ratios = []
    for block in {run.block for run in runs}:
        cell = [run for run in runs if run.workers == workers and run.block == block]
        mine = [run.seconds for run in cell if run.variant == variant]
        theirs = [run.seconds for run in cell if run.variant == other]
        if mine and theirs:
            ratios.append(median(mine) / median(theirs))
    return median(ratios) if ratios else None


def show(report: dict[str, Any]) -> None:
    def cell(value: float | None, form: str = "{:.2f}") -> str:
        return "" if value is None else form.format(value)

    print_table(
        f"A round of {report['parameters'] / 1e6:.0f}M parameters, {report['down_codec']} down, medians",
        (
            "k",
            "variant",
            "s",
            "fastest",
            "GB/s",
            "× bare",
            "time / torch.save",
            "CPU s/worker, server",
            "workers",
            "peak GiB",
        ),
        (
            (
                str(row["workers"]),
                row["variant"],
                cell(row["seconds"], "{:.3f}"),
                cell(row["fastest_s"], "{:.3f}"),
                cell(row["gb_per_s"]),
                cell(row["rate_to_bare"]),
                cell(row["time_to_torch_save"]) if row["variant"] == "round" else "",
                cell(row["server_cpu_s_per_worker"]),
                cell(row["client_cpu_s_per_worker"]),
                cell(row["server_peak_bytes"] and row["server_peak_bytes"] / 2**30),
            )
            for row in report["summary"]
        ),
        words=2,
    )
    for line in report["left_out"]:
        say(f"left out: {line}")
    if report["bytes"]:
        print_table(
            "Bytes per parameter of one worker's round, counted on the socket",
            ("up", "down", "up", "down", "both"),
            (
                (
                    row["codec"],
                    row.get("down_codec", "fp32"),
                    *(
                        ("refused", "", "")
                        if "refused" in row
                        else (
                            cell(row["up_bytes_per_parameter"], "{:.3f}"),
                            cell(row["down_bytes_per_parameter"], "{:.3f}"),
                            cell(row["up_bytes_per_parameter"] + row["down_bytes_per_parameter"], "{:.3f}"),
                        )
                    ),
                )
                for row in report["bytes"]
            ),
            words=2,
        )
    if step := report["outer_step"]:
        print_table(
            "The outer step on one thread, beside torch.optim.SGD(fused=True, nesterov=True) on the same tensors",
            ("what", "ms", "× fused SGD"),
            (
                ("SGD(fused=True).step()", cell(step["sgd_fused_s"] * 1e3, "{:.0f}"), ""),
                ("the step alone", cell(step["step_s"] * 1e3, "{:.0f}"), cell(step["step_to_sgd_fused"])),
                ("closing a round", cell(step["close_s"] * 1e3, "{:.0f}"), cell(step["close_to_sgd_fused"])),
                ("adding one contribution", cell(step["accumulate_s"] * 1e3, "{:.0f}"), ""),
            ),
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure rounds on loopback beside bare sockets and torch.save.")
    parser.add_argument("--quick", action="store_true", help="8M parameters, fewer rounds")
    parser.add_argument("--workers", default="2,4", help="numbers of workers (default 2,4)")
    parser.add_argument("--blocks", type=int, help="how often everything is started anew (default 2, quick 1)")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds of a variant in each block (default 3)")
    parser.add_argument("--tls", action="store_true", help="TLS on both sides; no torch.save then, and only rounds")
    parser.add_argument("--only-rounds", action="store_true", help="neither bytes on the socket nor the outer step")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round, the summary and the machine here")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    arguments.only_rounds |= arguments.tls
    torch.set_num_threads(1)
    about = provenance("torch")
    size = "8M" if arguments.quick else "103M"
    numel, tensors = count(size)
    workers = [int(k) for k in arguments.workers.split(",")]
    with tempfile.TemporaryDirectory(prefix="outerstep-bench-") as folder:
        os.environ["OUTERSTEP_CREDENTIALS"] = folder  # not the user's own
        setting = Setting(size, arguments.rounds, Path(folder), arguments.tls)
        runs, left_out = measure(setting, workers, arguments.blocks or (1 if arguments.quick else 2))
        step = {} if arguments.only_rounds else outer_step(setting, 5)
    report = {
        "machine": about,
        "tls": arguments.tls,
        "parameters": numel,
        "tensors": tensors,
        "down_codec": codec_settings("bf16", "bf16").get("down_codec", "fp32"),
        "summary": summarize(runs),
        "left_out": left_out,
        "bytes": [] if arguments.only_rounds else bytes_on_the_socket(size),
        "outer_step": step,
        "runs": [asdict(run) for run in runs],
    }
    show(report)
    write_json(arguments.json, report)


if __name__ == "__main__":
    main()
