"""How much memory does the server need, and does it grow with the number of workers?

Measured: the server's peak in bytes per parameter, and its growth from few workers to many. Contributions on their way
in take memory up to `pool_bytes`, which is the larger part of that growth by default; this run makes the pool small
(two contributions) to see the rest, unless told otherwise.

The server in a process of its own, 103M parameters, bf16; k = 2 and k = 16 workers, which are thin clients
(thin_client.py: they have no model, so sixteen fit on one machine). All upload at once, round after round; midway a
worker joins, fetches the whole model and leaves. Reported is the most *anonymous* memory that the server
had at a time, sampled every 10 ms: heap and private mappings, without the pages of libraries and spool files. "Exact"
is the kernel's own high-water mark with those pages in it: a peak between two samples cannot be above it.

    python bench/memory.py                    # about two minutes
    python bench/memory.py --quick            # 8M parameters, 3 rounds
    python bench/memory.py --pool-mib 2048    # as a server has it by default
    python bench/memory.py --json memory.json
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from pathlib import Path
from typing import Any

from actors import Server
from harness import Actor, MemoryWatch, print_table, say, status_bytes, together, write_json
from internals import write_frame
from models import count
from provenance import provenance
from thin_client import ThinClient


class Empty:
    """What a process has that imported all that a server needs."""

    def look(self) -> None:
        """Nothing to see: its memory is looked at from outside."""

    def close(self) -> None:
        pass


def empty_bytes() -> int:
    with Actor(Empty, start="spawn") as actor:
        actor.ask("look")
        return status_bytes(actor.pid, "RssAnon")


def measure(size: str, workers: int, rounds: int, pool_bytes: int, folder: Path) -> dict[str, Any]:
    """The server's memory over some rounds; the first ones warm up, and are watched too."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Actor(Server, size, workers, start="spawn", pool_bytes=pool_bytes))
        address = server.ask("address")
        clients = [stack.enter_context(Actor(ThinClient, number)) for number in range(workers)]
        joiner = stack.enter_context(Actor(ThinClient, workers))
        joined = together(clients, "join", address)[0].value
        frame = folder / "frame"
        frame.exists() or write_frame(frame, joined)
        together(clients, "load", str(frame))
        idle_bytes = status_bytes(server.pid, "RssAnon")
        memory = stack.enter_context(MemoryWatch(server.pid))
        peaks = []
        for number in range(rounds):
            visits = number == rounds // 2
            if visits:
                joiner.tell("visit", address)
            together(clients, "round")
            fetched = joiner.hear().value if visits else 0
            peaks.append(memory.peak_anon_bytes)
            what = f", a joiner fetched {fetched / 2**20:.0f} MiB" if visits else ""
            say(f"k = {workers}, round {number + 1}: at most {peaks[-1] / 2**20:.0f} MiB so far{what}")
        memory.stop()
        return {
            "workers": workers,
            "idle_bytes": idle_bytes,
            "peak_anon_bytes": memory.peak_anon_bytes,
            "most_resident_bytes": memory.most_resident_bytes,
            "peak_bytes_by_round": peaks,
            "file_bytes_at_the_end": status_bytes(server.pid, "RssFile"),
            "pool_used_bytes": min(pool_bytes, workers * frame.stat().st_size),  # all upload at once
        }


def show(report: dict[str, Any]) -> None:
    numel, empty = report["parameters"], report["empty_bytes"]
    print_table(
        f"The server's memory, {numel / 1e6:.0f}M parameters, a pool of {report['pool_bytes'] / 2**20:.0f} MiB",
        (
            "k",
            "after the joins MiB",
            "peak MiB",
            "exact, files too MiB",
            "peak, bytes per parameter",
            "less empty process and pool",
        ),
        (
            (
                str(row["workers"]),
                f"{row['idle_bytes'] / 2**20:.0f}",
                f"{row['peak_anon_bytes'] / 2**20:.0f}",
                f"{row['most_resident_bytes'] / 2**20:.0f}",
                f"{row['peak_anon_bytes'] / numel:.2f}",
                f"{(row['peak_anon_bytes'] - empty - row['pool_used_bytes']) / numel:.2f}",
            )
            for row in report["runs"]
        ),
    )
    first, last = report["runs"][0], report["runs"][-1]
    growth = last["peak_anon_bytes"] - first["peak_anon_bytes"]
    say(
        f"an empty process has {empty / 2**20:.0f} MiB; from k = {first['workers']} to {last['workers']} the peak grew "
        f"by {growth / 2**20:.0f} MiB, {growth / first['peak_anon_bytes']:.1%}"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the server's peak memory with few and with many workers.")
    parser.add_argument("--quick", action="store_true", help="8M parameters and 3 rounds instead of 103M and 5")
    parser.add_argument("--workers", default="2,16", help="numbers of workers (default 2,16)")
    parser.add_argument("--rounds", type=int, help="rounds for each (default 5, quick 3)")
    parser.add_argument("--pool-mib", type=int, help="pool for contributions on their way in (default: two of them)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the peaks and the machine here")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    about = provenance("torch")
    size = "8M" if arguments.quick else "103M"
    rounds = arguments.rounds or (3 if arguments.quick else 5)
    numel, tensors = count(size)
    pool_bytes = (arguments.pool_mib << 20) if arguments.pool_mib else 2 * (2 * numel + (1 << 20))
    with tempfile.TemporaryDirectory(prefix="outerstep-bench-") as folder:
        runs = [measure(size, int(k), rounds, pool_bytes, Path(folder)) for k in arguments.workers.split(",")]
    report = {
        "machine": about,
        "parameters": numel,
        "tensors": tensors,
        "pool_bytes": pool_bytes,
        "empty_bytes": empty_bytes(),
        "runs": runs,
    }
    show(report)
    write_json(arguments.json, report)


if __name__ == "__main__":
    main()
