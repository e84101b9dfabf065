"""What does durability cost: every round is on disk before a worker hears of it?

Three servers, each in a process of its own with two thin clients (thin_client.py), take turns of five rounds: with
durability "none", "checkpoint" (a state every fifth round, which is how often "round" writes one by itself) and
"round". A state falls into the middle of a turn. Measured is the wall time of a round as the clients see it, from the
first byte up to the last byte down, and what the kernel says that the server's process wrote. Beside it, the floor: as
many bytes as a record has, written to a file in pieces of 1 MiB, synced and renamed.

A state is written after its round was announced, and the next round waits for it: the median is a round without one,
the mean has them in it.

    python bench/journal.py                     # 103M parameters, about three minutes
    python bench/journal.py --quick             # 8M
    python bench/journal.py --codec int4        # a record holds the contributions then, which are smaller than the mean
    python bench/journal.py --folder /mnt/disk  # on that disk; /tmp is often memory
    python bench/journal.py --json journal.json
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from actors import Server
from harness import Actor, print_table, say, together, wall_s, write_json
from internals import write_frame
from models import count
from provenance import provenance
from thin_client import ThinClient

STATE_EVERY = 5
WARM_UP = 2  # rounds
WORKERS = 2
PIECE_BYTES = 1 << 20
DURABILITIES: dict[str, dict[str, Any]] = {
    "none": {},
    "checkpoint": {"durability": "checkpoint", "save_every": STATE_EVERY},
    "round": {"durability": "round"},
}


def written_bytes(pid: int) -> int:
    """What this process has caused to be sent to a disk, or to be about to."""
    for line in Path(f"/proc/{pid}/io").read_text().splitlines():
        if line.startswith("write_bytes:"):
            return int(line.split()[1])
    raise KeyError("write_bytes")


class Run:
    """A server and its clients."""

    def __init__(self, stack: contextlib.ExitStack, size: str, codec: str, durability: str, folder: Path) -> None:
        settings = dict(DURABILITIES[durability])
        if settings:
            settings["save_dir"] = str(folder / durability)
        self.durability = durability
        self.server = stack.enter_context(Actor(Server, size, WORKERS, codec, codec, **settings))
        self.clients = [stack.enter_context(Actor(ThinClient, number)) for number in range(WORKERS)]
        joined = together(self.clients, "join", self.server.ask("address"))[0].value
        frame = folder / "frame"
        frame.exists() or write_frame(frame, joined)
        together(self.clients, "load", str(frame))
        for _ in range(WARM_UP):
            together(self.clients, "round")
        self.seconds: list[float] = []
        self._written_before = written_bytes(self.server.pid)

    def take_turn(self) -> None:
        for _ in range(STATE_EVERY):
            self.seconds.append(wall_s(together(self.clients, "round")))

    def result(self) -> dict[str, Any]:
        written = written_bytes(self.server.pid) - self._written_before
        return {
            "durability": self.durability,
            "seconds": self.seconds,
            "median_s": statistics.median(self.seconds),
            "mean_s": statistics.fmean(self.seconds),
            "written_bytes_per_round": written / len(self.seconds),
        }


def floor_s(folder: Path, size_bytes: int, times: int) -> list[float]:
    """Write, sync and rename so many bytes."""
    piece, seconds = memoryview(os.urandom(PIECE_BYTES)), []
    for number in range(times):
        began_s = time.monotonic()
        descriptor = os.open(folder / "floor.unfinished", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for begin in range(0, size_bytes, PIECE_BYTES):
            os.write(descriptor, piece[: min(PIECE_BYTES, size_bytes - begin)])
        os.fsync(descriptor)
        os.close(descriptor)
        os.rename(folder / "floor.unfinished", folder / f"floor-{number}")
        seconds.append(time.monotonic() - began_s)
        (folder / f"floor-{number}").unlink()
    return seconds


def measure(size: str, codec: str, turns: int, folder: Path) -> list[dict[str, Any]]:
    with contextlib.ExitStack() as stack:
        runs = [Run(stack, size, codec, durability, folder) for durability in DURABILITIES]
        for number in range(turns):
            for run in runs:
                run.take_turn()
                last = ", ".join(f"{seconds:.2f}" for seconds in run.seconds[-STATE_EVERY:])
                say(f"turn {number + 1}, {run.durability}: {last} s")
        return [run.result() for run in runs]


def show(report: dict[str, Any]) -> None:
    numel, plain = report["parameters"], report["runs"][0]
    print_table(
        f"A round of {numel / 1e6:.0f}M parameters with {WORKERS} clients, {report['codec']} both ways, by durability",
        ("durability", "median s", "mean s", "beside none", "written per round, MB", "bytes per parameter"),
        (
            (
                row["durability"],
                f"{row['median_s']:.2f}",
                f"{row['mean_s']:.2f}",
                f"{row['median_s'] - plain['median_s']:+.2f} s, mean {row['mean_s'] - plain['mean_s']:+.2f} s",
                f"{row['written_bytes_per_round'] / 1e6:.0f}",
                f"{row['written_bytes_per_round'] / numel:.1f}",
            )
            for row in report["runs"]
        ),
    )
    floor = statistics.median(report["floor_s"])
    size = report["record_bytes"]
    say(f"the floor, {size / 1e6:.0f} MB written, synced and renamed: {floor:.2f} s, {size / floor / 1e6:.0f} MB/s")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure what durability costs per round, in seconds and bytes.")
    parser.add_argument("--quick", action="store_true", help="8M parameters and one turn instead of 103M and three")
    parser.add_argument("--params", choices=("8M", "103M"), help="size of the model (default 103M)")
    parser.add_argument("--codec", default="bf16", help="of both directions (default bf16)")
    parser.add_argument("--turns", type=int, help="turns of five rounds for each (default 3, quick 1)")
    parser.add_argument("--folder", type=Path, help="where the runs are kept (default: a temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round and the machine here")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    about = provenance("torch")
    size = arguments.params or ("8M" if arguments.quick else "103M")
    turns = arguments.turns or (1 if arguments.quick else 3)
    numel, tensors = count(size)
    with tempfile.TemporaryDirectory(prefix="outerstep-bench-", dir=arguments.folder) as folder:
        runs = measure(size, arguments.codec, turns, Path(folder))
        floor = floor_s(Path(folder), 4 * numel, 3)
    report = {
        "machine": about,
        "parameters": numel,
        "tensors": tensors,
        "codec": arguments.codec,
        "record_bytes": 4 * numel,
        "floor_s": floor,
        "runs": runs,
    }
    show(report)
    write_json(arguments.json, report)


if __name__ == "__main__":
    main()
