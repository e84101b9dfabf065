"""How long do two processes take to agree on 100M values: outerstep, and others that do such a thing?

Measured on the same machine and in the same minutes. The ratios are the others' time to ours: below 1 they are faster.

    outerstep    server and two workers: a whole round as a training loop sees it, outer step included; fp32 and bf16
    gloo         torch.distributed.all_reduce: what a cluster does, without any tolerance for faults
    torchft      DiLoCo's synchronization: the pseudo-gradients by gloo, quorum and commit by its lighthouse
    hivemind     DecentralizedAverager: the all-reduce alone, its search for partners left out
    Flower       one round of FedAvg, nobody trains; by `start_server`, which is deprecated but has the fewest processes

100M fp32 values in ten tensors, two processes, one thread each, loopback. Each of the others runs in an
environment of their own under `bench/.peers/` that this script makes (it sees the torch that is installed here, and
pip may not bring another). What cannot be installed or does not run is listed with the reason.

    python bench/peers.py                     # about ten minutes with all of them, the installations included
    python bench/peers.py --quick             # 10M values
    python bench/peers.py --only gloo torchft
    python bench/peers.py --json peers.json   # every single round, the machine and the commit
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from actors import Server, Worker
from harness import Actor, median, print_table, say, write_json
from internals import codec_settings
from peer_program import run_rounds
from provenance import provenance

HERE = Path(__file__).resolve().parent
FOLDER = HERE / ".peers"
CONSTRAINTS = HERE.parent / "constraints.txt"
INSTALL_S = 400
RUN_S = 400


Rounds = Callable[[], list[float]]
"""Runs a system; the seconds of each round."""


class NotRun(Exception):
    """A system could not be measured, and why."""


@dataclass(frozen=True)
class Peer:
    """A system and the program that measures it; without a requirement it runs in the environment that is here."""

    program: str
    requirement: str = ""


PEERS = {
    "gloo": Peer("peer_gloo.py"),
    "torchft": Peer("peer_torchft.py", "torchft==0.2.0"),
    "hivemind": Peer("peer_hivemind.py", "hivemind"),
    "Flower": Peer("peer_flower.py", "flwr"),
}


# --- ours -------------------------------------------------------------------------------------------------------------


def outerstep_rounds(codec: str, numel: int, rounds: int) -> list[float]:
    size = f"{numel // 1_000_000}M"
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(Actor(Server, size, 2, codec, codec)).ask("address")
        return run_rounds([stack.enter_context(Actor(Worker, size, n, address)) for n in range(2)], rounds)


# --- the others -------------------------------------------------------------------------------------------------------


def environment(name: str, peer: Peer) -> Path:
    """The Python that has it, in an environment that is made once."""
    if not peer.requirement:
        return Path(sys.executable)
    folder = FOLDER / name.lower()
    python, ready = folder / "bin" / "python", folder / "ready"
    if not ready.exists() or ready.read_text() != peer.requirement:
        say(f"{name}: installing {peer.requirement} into {folder}")
        venv.create(folder, with_pip=True, clear=True)
        # What is installed here is seen from there, behind what pip puts there.
        packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        (packages / "host.pth").write_text(sysconfig.get_path("purelib") + "\n")
        pinned = folder / "constraints.txt"
        kept = [line for line in CONSTRAINTS.read_text().splitlines() if line.startswith(("torch==", "numpy=="))]
        pinned.write_text("\n".join(kept) + "\n")
        install = [str(python), "-m", "pip", "install", "--quiet", "-c", str(pinned), peer.requirement]
        _output(install, INSTALL_S, "pip install")
    seen = _output([str(python), "-c", "import torch; print(torch.__version__)"], INSTALL_S, "import torch").strip()
    if seen != torch.__version__:
        raise NotRun(f"its environment has torch {seen}, not {torch.__version__}")
    ready.write_text(peer.requirement)
    return python


def peer_rounds(name: str, peer: Peer, numel: int, rounds: int) -> list[float]:
    command = [str(environment(name, peer)), str(HERE / peer.program), "--values", str(numel), "--rounds", str(rounds)]
    seconds: list[float] = json.loads(_output(command, RUN_S, peer.program).splitlines()[-1])
    return seconds


def version(peer: Peer, name: str) -> str:
    if not peer.requirement:
        return f"torch {torch.__version__}"
    package = peer.requirement.partition("=")[0]
    with contextlib.suppress(NotRun, OSError):
        code = f"import importlib.metadata as m; print(m.version({package!r}))"
        return _output([str(FOLDER / name.lower() / "bin" / "python"), "-c", code], 60, "version").strip()
    return ""


def _output(command: list[str], limit_s: float, what: str) -> str:
    """Standard output of a program; its last words if it fails. Whatever it started ends with it."""
    quiet = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=quiet, start_new_session=True
    )
    try:
        out, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired as late:
        raise NotRun(f"{what}: not done after {limit_s:.0f} s") from late
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its session, which is ours to end
        process.wait()
    if process.returncode != 0:
        words = [line.strip() for line in errors.splitlines() if line.strip() and "WARNING" not in line]
        telling = [line for line in words if "Error" in line or "error" in line]
        raise NotRun(f"{what}: {(telling or words or ['no reason given'])[-1][:200]}")
    return out


# --- measuring and reporting ------------------------------------------------------------------------------------------


def measure(systems: dict[str, Rounds], blocks: int) -> tuple[dict[str, list[list[float]]], dict[str, str]]:
    """Seconds of every round by system and block, and why a system was not run. One after the other, `blocks` times."""
    runs: dict[str, list[list[float]]] = {name: [] for name in systems}
    reasons: dict[str, str] = {}
    for block in range(blocks):
        for name, start in systems.items():
            if name in reasons:
                continue
            say(f"block {block + 1}: {name}")
            try:
                runs[name].append(start())
                say(f"block {block + 1}: {name}: {median(runs[name][-1]):.2f} s")
            except (NotRun, OSError, RuntimeError, subprocess.SubprocessError, ValueError) as error:
                reasons[name] = str(error).strip().splitlines()[-1]
                say(f"{name} was not run: {reasons[name]}")
    return runs, reasons


def summarize(
    runs: dict[str, list[list[float]]], reasons: dict[str, str], versions: dict[str, str]
) -> list[dict[str, Any]]:
    rows = []
    for name, blocks in runs.items():
        row: dict[str, Any] = {"system": name, "version": versions.get(name, ""), "reason": reasons.get(name)}
        if blocks:
            row["seconds"] = median(s for block in blocks for s in block)
            row["fastest_s"] = min(s for block in blocks for s in block)
            for ours in ("outerstep fp32", "outerstep bf16"):
                pairs = list(zip(blocks, runs.get(ours, []), strict=False))
                if pairs:
                    row[f"time_to_{ours}"] = median(median(theirs) / median(mine) for theirs, mine in pairs)
        rows.append(row)
    return rows


def show(report: dict[str, Any]) -> None:
    def cell(row: dict[str, Any], key: str) -> str:
        return f"{row[key]:.2f}" if key in row else ""

    print_table(
        f"Two processes agree on {report['values'] / 1e6:.0f}M fp32 values ({report['down_codec']} down), medians",
        ("system", "version or why not", "s", "fastest", "× outerstep fp32", "× outerstep bf16"),
        (
            (
                row["system"],
                (row["reason"] or row["version"])[:60],
                cell(row, "seconds"),
                cell(row, "fastest_s"),
                cell(row, "time_to_outerstep fp32"),
                cell(row, "time_to_outerstep bf16"),
            )
            for row in report["summary"]
        ),
        words=2,
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time how two processes agree on 100M values, in several systems.")
    parser.add_argument("--quick", action="store_true", help="10M values, one block")
    parser.add_argument("--only", nargs="+", choices=list(PEERS), default=list(PEERS), help="peers (default all)")
    parser.add_argument("--blocks", type=int, help="how often everything is started anew (default 2, quick 1)")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds of a system in each block (default 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round, the summary and the machine here")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    about = provenance("torch")
    numel, rounds = (10_000_000 if arguments.quick else 100_000_000), arguments.rounds
    systems: dict[str, Rounds] = {
        f"outerstep {codec}": partial(outerstep_rounds, codec, numel, rounds) for codec in ("fp32", "bf16")
    }
    systems |= {name: partial(peer_rounds, name, PEERS[name], numel, rounds) for name in arguments.only}
    runs, reasons = measure(systems, arguments.blocks or (1 if arguments.quick else 2))
    versions = {name: version(PEERS[name], name) for name in arguments.only}
    report = {
        "machine": about,
        "values": numel,
        "down_codec": "as up" if "down_codec" in codec_settings("bf16", "bf16") else "fp32",
        "summary": summarize(runs, reasons, versions),
        "seconds": runs,
    }
    show(report)
    write_json(arguments.json, report)


if __name__ == "__main__":
    main()
