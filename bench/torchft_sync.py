"""What does an exchange over torchft cost by our topology, beside torchft's own DiLoCo?

The bounds: no slower and no more memory, on 25M and 100M parameters, measured in one run.

    torchft's DiLoCo      torchft.local_sgd.DiLoCo, one fragment: all-reduce by gloo, quorum and commit by its own
    ours, fp32 and bf16   DiLoCoWorker(…, "torchft"): the same lighthouse and gloo, one fragment, nothing hidden by a
                          delay; with error checks (finite values, the anchors' hashes) that the other does not have

Two replicas each, in processes of their own with one thread; the one real lighthouse. Measured is the step that is due,
from a barrier until the slower replica is done with it, and the most anonymous memory of a replica from joining to the
last exchange (model, anchor, outer state and buffers; no gradients and no inner optimizer's state). Blocks of rounds of
each variant alternate, with fresh processes for each, so that whatever else this machine does meets all of them. CPU
seconds are the busier replica's, all threads: what a machine that does other things tells least about is the time on
the clock. Ratios are of medians: below 1 we are faster, or smaller.

    python bench/torchft_sync.py                     # about four minutes; needs torchft, and 10 GB of memory for 100M
    python bench/torchft_sync.py --quick             # 8M parameters, one block
    python bench/torchft_sync.py --json torchft.json
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Actor, MemoryWatch, median, print_table, say, together, wall_s, write_json
from models import Nudge, count, fill, make
from peer_torchft import Lighthouse, Replica
from provenance import provenance

THEIRS = "torchft's DiLoCo"
OURS = {"ours, fp32": "fp32", "ours, bf16": "bf16"}


class Theirs(Replica):
    def timed(self) -> float:
        return cpu_of(self.exchange)


def cpu_of(exchange: Callable[[], None]) -> float:
    """CPU seconds of it, all threads."""
    before = time.process_time()
    exchange()
    return time.process_time() - before


class Ours:
    """A replica by our topology, around a model that nobody trains."""

    def __init__(self, number: int, lighthouse: str, size: str, codec: str) -> None:
        from outerstep import DiLoCoWorker

        model = fill(make(size))
        self._optimizer = Nudge(model)
        self._worker = DiLoCoWorker(
            model,
            self._optimizer,
            "torchft",
            worker_id=f"replica-{number}",
            lighthouse=lighthouse,
            sync_every=2,
            codec=codec,
            min_replicas=2,
            heartbeat_interval=0,
        )

    def join(self) -> None:
        self._worker.start()

    def train(self) -> None:
        self._optimizer.step()

    def exchange(self) -> None:
        """The step that is due."""
        before = self._worker.sync_metrics["sync_count"]
        self._optimizer.step()
        if self._worker.sync_metrics["sync_count"] == before:
            raise RuntimeError("this round did not count")

    def timed(self) -> float:
        return cpu_of(self.exchange)

    def digest(self) -> float:
        return float(sum(parameter.detach().double().sum() for parameter in self._worker.model.parameters()))

    def close(self) -> None:
        self._worker.abandon("done")


def block(name: str, address: str, size: str, rounds: int) -> dict[str, Any]:
    """Seconds of each round after the first, CPU seconds of the busier replica, and the larger one's peak."""
    kind: Any = Ours if name in OURS else Theirs
    more = (OURS[name],) if name in OURS else ()
    with contextlib.ExitStack() as stack:
        replicas = [stack.enter_context(Actor(kind, n, address, size, *more, start="spawn")) for n in range(2)]
        together(replicas, "digest")
        watches = [stack.enter_context(MemoryWatch(replica.pid)) for replica in replicas]
        together(replicas, "join")
        seconds, cpu_s = [], []
        for _ in range(rounds + 1):
            together(replicas, "train")
            spans = together(replicas, "timed")
            seconds.append(wall_s(spans))
            cpu_s.append(max(span.value for span in spans))
        for watch in watches:
            watch.stop()  # before the digest, whose fp64 copies are neither's own
        peak = max(watch.peak_anon_bytes for watch in watches)
        ends = {span.value for span in together(replicas, "digest")}
        if len(ends) != 1:
            raise RuntimeError(f"{name}: the replicas ended with different values: {ends}")
    say(f"{size}, {name}: median {median(seconds[1:]):.3f} s, at most {peak / 1e9:.2f} GB")
    return {"variant": name, "size": size, "seconds": seconds[1:], "cpu_s": cpu_s[1:], "peak_bytes": peak}


def summary(blocks: list[dict[str, Any]], sizes: list[str]) -> list[dict[str, Any]]:
    rows = []
    for size in sizes:
        for name in (THEIRS, *OURS):
            seconds, cpu_s, peak = _of(blocks, size, name)
            their_seconds, their_cpu_s, their_peak = _of(blocks, size, THEIRS)
            rows.append(
                {
                    "size": size,
                    "variant": name,
                    "seconds": median(seconds),
                    "fastest_s": min(seconds),
                    "of_theirs": median(seconds) / median(their_seconds),
                    "fastest_of_theirs": min(seconds) / min(their_seconds),
                    "cpu_s": median(cpu_s),
                    "cpu_of_theirs": median(cpu_s) / median(their_cpu_s),
                    "peak_bytes": peak,
                    "peak_of_theirs": peak / their_peak,
                }
            )
    return rows


def _of(blocks: list[dict[str, Any]], size: str, name: str) -> tuple[list[float], list[float], int]:
    found = [one for one in blocks if (one["size"], one["variant"]) == (size, name)]
    seconds, cpu_s = ([one for block in found for one in block[what]] for what in ("seconds", "cpu_s"))
    return seconds, cpu_s, max(one["peak_bytes"] for one in found)


def main() -> None:
    parser = argparse.ArgumentParser(description="An exchange by our torchft topology, beside torchft's own DiLoCo.")
    parser.add_argument("--quick", action="store_true", help="8M parameters, one block of three rounds")
    parser.add_argument("--sizes", nargs="+", default=["25M", "100M"], metavar="SIZE")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round, the summary and the machine here")
    options = parser.parse_args()
    sizes, blocks, rounds = (["8M"], 1, 3) if options.quick else (options.sizes, options.blocks, 5)
    about = provenance("torch", "torchft")
    found = []
    with Actor(Lighthouse, start="spawn") as lighthouse:
        address = lighthouse.ask("address")
        for size in sizes:
            for _ in range(blocks):
                for name in (THEIRS, *OURS):
                    found.append(block(name, address, size, rounds))
    rows = summary(found, sizes)
    print_table(
        "Two replicas agree over torchft and gloo, one thread each",
        ("parameters", "variant", "median s", "fastest s", "÷ torchft's", "fastest", "CPU s", "÷", "peak GB", "÷"),
        [
            (
                row["size"],
                row["variant"],
                f"{row['seconds']:.3f}",
                f"{row['fastest_s']:.3f}",
                f"{row['of_theirs']:.2f}",
                f"{row['fastest_of_theirs']:.2f}",
                f"{row['cpu_s']:.3f}",
                f"{row['cpu_of_theirs']:.2f}",
                f"{row['peak_bytes'] / 1e9:.2f}",
                f"{row['peak_of_theirs']:.2f}",
            )
            for row in rows
        ],
        words=2,
    )
    parameters = {size: count(size)[0] for size in sizes}
    write_json(options.json, {"machine": about, "parameters": parameters, "summary": rows, "blocks": found})


if __name__ == "__main__":
    main()
