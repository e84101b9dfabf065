"""How much memory does the server need, and does it grow with the number of workers?

Measured: the server's peak in bytes per parameter, and its growth from few workers to many. Contributions on their way
in take memory up to `pool_bytes`; this run gives it room for two of them. `--default` leaves all settings as they are
and keeps the run on disk, as `outerstep server` does, each round before it is announced.

The server in a process of its own, 103M parameters, bf16; k = 2 and k = 16 workers, which are thin clients
(thin_client.py: they have no model, so sixteen fit on one machine). All upload at once, round after round; midway a
worker joins, fetches the whole model and leaves. Reported is the most *anonymous* memory that the server
had at a time, sampled every 10 ms: heap and private mappings, without the pages of libraries and spool files. "Exact"
is the kernel's own high-water mark (VmHWM) with those pages in it, from the start of the process on: a peak between two
samples cannot be above it.

    python bench/memory.py                    # about two minutes
    python bench/memory.py --quick            # 8M parameters, 3 rounds
    python bench/memory.py --pool-mib 2048    # with a pool of that size
    python bench/memory.py --default --workers 2,4,8,16
    python bench/memory.py --default --params 25M --codec int4
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


def measure(size: str, workers: int, rounds: int, codec: str, pool_bytes: int | None, folder: Path) -> dict[str, Any]:
    """The server's memory over some rounds; the first ones warm up, and are watched too. `pool_bytes`: None = all
    settings as they are, with the run on disk."""
    with contextlib.ExitStack() as stack:
        settings: dict[str, Any] = {"pool_bytes": pool_bytes}
        if pool_bytes is None:
            settings = {"save_dir": stack.enter_context(tempfile.TemporaryDirectory(dir=folder))}
        server = stack.enter_context(Actor(Server, size, workers, codec, codec, start="spawn", **settings))
        address = server.ask("address")
        clients = [stack.enter_context(Actor(ThinClient, number)) for number in range(workers)]
        joiner = stack.enter_context(Actor(ThinClient, workers))
        joined = together(clients, "join", address)[0].value
        frame = folder / "frame"
        frame.exists() or write_frame(frame, joined)
        together(clients, "load", str(frame))
        idle_bytes, resident_before = status_bytes(server.pid, "RssAnon"), status_bytes(server.pid, "VmHWM")
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
            "most_resident_bytes": max(memory.most_resident_bytes, resident_before),
            "peak_bytes_by_round": peaks,
            "file_bytes_at_the_end": status_bytes(server.pid, "RssFile"),
            # All upload at once; by default two have room.
            "pool_used_bytes": min(pool_bytes or 2 * frame.stat().st_size, workers * frame.stat().st_size),
        }


def show(report: dict[str, Any]) -> None:
    numel, empty = report["parameters"], report["empty_bytes"]
    print_table(
        f"The server's memory, {numel / 1e6:.0f}M parameters, {report['codec']}, {report['pool']}",
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
    growth = {key: last[key] - first[key] for key in ("peak_anon_bytes", "most_resident_bytes")}
    anon, everything = (f"{more / 2**20:.0f} MiB, {more / first[key]:.1%}" for key, more in growth.items())
    say(
        f"an empty process has {empty / 2**20:.0f} MiB; from k = {first['workers']} to {last['workers']} the peak grew "
        f"by {anon}; with everything counted by {everything}"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the server's peak memory with few and with many workers.")
    parser.add_argument("--quick", action="store_true", help="8M parameters and 3 rounds instead of 103M and 5")
    parser.add_argument("--workers", default="2,16", help="numbers of workers (default 2,16)")
    parser.add_argument("--rounds", type=int, help="rounds for each (default 5, quick 3)")
    parser.add_argument("--params", choices=("8M", "25M", "103M"), help="size of the model (default 103M, quick 8M)")
    parser.add_argument("--codec", default="bf16", help="of both directions (default bf16)")
    parser.add_argument("--pool-mib", type=int, help="pool for contributions on their way in (default: two of them)")
    parser.add_argument("--default", action="store_true", help="all settings as they are, and the run kept on disk")
    parser.add_argument("--folder", type=Path, help="where that is (default: a temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the peaks and the machine here")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    about = provenance("torch")
    size = arguments.params or ("8M" if arguments.quick else "103M")
    rounds = arguments.rounds or (3 if arguments.quick else 5)
    numel, tensors = count(size)
    pool_bytes = (arguments.pool_mib << 20) if arguments.pool_mib else 2 * (2 * numel + (1 << 20))
    chosen = None if arguments.default else pool_bytes
    with tempfile.TemporaryDirectory(prefix="outerstep-bench-", dir=arguments.folder) as folder:
        runs = [
            measure(size, int(k), rounds, arguments.codec, chosen, Path(folder)) for k in arguments.workers.split(",")
        ]
    report = {
        "machine": about,
        "parameters": numel,
        "tensors": tensors,
        "codec": arguments.codec,
        "pool": "all settings as they are" if chosen is None else f"a pool of {chosen / 2**20:.0f} MiB",
        "empty_bytes": empty_bytes(),
        "runs": runs,
    }
    show(report)
    write_json(arguments.json, report)


if __name__ == "__main__":
    main()
