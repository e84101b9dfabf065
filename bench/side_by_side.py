"""Has a change made it slower or larger? The benchmarks of two commits, taking turns in one run on one machine.

    python bench/side_by_side.py --before COMMIT                 # against what lies in the working tree
    python bench/side_by_side.py --before COMMIT --quick         # smaller models
    python bench/side_by_side.py --before FOLDER                 # a folder with src/ and bench/ of another version

Each commit is measured by its own bench/round.py, bench/memory.py and bench/overhead.py, on its own src/. The turns
alternate (before, after, after, before, …), so that whatever else the machine does falls on both. Shown is the median
of each figure's turns, and after ÷ before: for all of them, less is better. A ratio within the spread of the turns of
one version (the last column: largest ÷ smallest, of the version that varies more) says nothing.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from harness import print_table, say, write_json
from provenance import provenance

HERE = Path(__file__).resolve().parents[1]
Figures = dict[str, float]


def of_round(report: dict[str, Any]) -> Figures:
    """Of a variant its fastest round: what else runs on the machine only ever makes one slower."""
    figures: Figures = {}
    for row in report["summary"]:
        if row["variant"] in ("exchange", "round"):
            where = f"{row['variant']}, k = {row['workers']}"
            figures[f"{where}, s"] = row["fastest_s"]
            if row["server_peak_bytes"] is not None:
                figures[f"{where}, server's peak MiB"] = row["server_peak_bytes"] / 2**20
    step = report["outer_step"]
    figures["outer step × fused SGD"] = step["step_to_sgd_fused"]
    figures["closing a round × fused SGD"] = step["close_to_sgd_fused"]
    figures["adding one contribution, ms"] = 1e3 * step["accumulate_s"]
    for row in report["bytes"]:
        up_and_down = row["up_bytes_per_parameter"] + row["down_bytes_per_parameter"]
        figures[f"{row['codec']}/{row['down_codec']}, bytes per parameter"] = up_and_down
    return figures


def of_memory(report: dict[str, Any]) -> Figures:
    return {f"server's peak, k = {row['workers']}, MiB": row["peak_anon_bytes"] / 2**20 for row in report["runs"]}


def of_overhead(report: dict[str, Any]) -> Figures:
    return {f"hook, {row['case']}, µs": row["hook"]["least_us"] for row in report["summary"] if row["hook"]}


BENCHES = {"round": of_round, "memory": of_memory, "overhead": of_overhead}


def measure(tree: Path, bench: str, flags: list[str]) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree / "src"), os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, str(tree / "bench" / f"{bench}.py"), "--json", str(result), *flags]
        done = subprocess.run(command, env=environ, cwd=tree, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{bench}.py of {tree} failed:\n{done.stdout}{done.stderr}")
        return BENCHES[bench](json.loads(result.read_text()))


def tree_of(before: str, folder: Path) -> Path:
    """`before` itself if it is a folder, else src/ and bench/ of that commit, unpacked into `folder`."""
    if Path(before).is_dir():
        return Path(before).resolve()
    archive = subprocess.run(["git", "-C", HERE, "archive", before, "src", "bench"], capture_output=True, check=False)
    if archive.returncode != 0:
        raise SystemExit(f"--before must be a commit of this repository or a folder: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as packed:
        packed.extractall(folder, filter="data")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True, metavar="COMMIT|FOLDER", help="what to compare with")
    parser.add_argument("--only", choices=BENCHES, action="append", help="not all three (may be given twice)")
    parser.add_argument("--turns", type=int, default=4, help="of each version (default 4)")
    parser.add_argument("--workers", default="2", help="for round.py and memory.py (default 2)")
    parser.add_argument("--quick", action="store_true", help="the quick form of each benchmark")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every turn and the machine here")
    args = parser.parse_args()
    machine = provenance("torch")
    with tempfile.TemporaryDirectory() as folder:
        trees = {"before": tree_of(args.before, Path(folder)), "after": HERE}
        turns: dict[str, dict[str, dict[str, list[float]]]] = {}
        for bench in args.only or BENCHES:
            flags = ["--quick"] * args.quick + (["--workers", args.workers] if bench != "overhead" else [])
            seen: dict[str, dict[str, list[float]]] = {"before": {}, "after": {}}
            for turn in range(args.turns):
                for version in list(trees) if turn % 2 == 0 else list(trees)[::-1]:
                    say(f"{bench}.py, turn {turn + 1} of {args.turns}, {version}")
                    for name, value in measure(trees[version], bench, flags).items():
                        seen[version].setdefault(name, []).append(value)
            turns[bench] = seen
            show(bench, seen)
    write_json(args.json, {"machine": machine, "before": args.before, "turns": turns})


def show(bench: str, seen: dict[str, dict[str, list[float]]]) -> None:
    rows = []
    for name, before in seen["before"].items():
        after = seen["after"].get(name)
        if after is None:
            rows.append([name, f"{median(before):.3g}", "", "", ""])
            continue
        spread = max(max(values) / min(values) for values in (before, after))
        ratio = median(after) / median(before)
        rows.append([name, f"{median(before):.4g}", f"{median(after):.4g}", f"{ratio:.3f}", f"{spread:.3f}"])
    print_table(f"{bench}.py", ["what", "before", "after", "after ÷ before", "spread"], rows)


if __name__ == "__main__":
    main()
