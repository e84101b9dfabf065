"""The results of loss.py: one file of runs, and the table made of it.

A file holds the settings that all its runs share, the calls that made it (machine, commit, date), and the runs: a row's
fields, its seed, its final loss and how it got there. A bound counts as met if the mean of the paired differences is
within it, or within it plus two standard errors, and is then marked so.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from outerstep.core.codecs import bytes_per_value, get_codec

Run = dict[str, Any]
Report = dict[str, Any]

BOUND = 0.3  # percent of the loss with fp32
MIN_SEEDS = 3  # with fewer, a difference is not judged


def read(file: Path) -> Report:
    report: Report = json.loads(file.read_text())
    return report


def merged(old: Report, new: Report) -> Report:
    """Both in one; a row and seed that is in both is taken from the new one."""
    if old["settings"] != new["settings"]:
        sys.exit(f"the runs of one table share their settings, got {old['settings']} and {new['settings']}")
    there = {(run["name"], run["seed"]) for run in new["runs"]}
    kept = [run for run in old["runs"] if (run["name"], run["seed"]) not in there]
    added = [{**run, "call": run["call"] + len(old["calls"])} for run in new["runs"]]
    return {"settings": new["settings"], "calls": old["calls"] + new["calls"], "runs": kept + added}


def differences(runs: list[Run], of: str) -> list[float]:
    """To fp32, in percent, of each seed that has both."""
    reference = {run["seed"]: run["loss"] for run in runs if run["name"] == "fp32"}
    return [
        100.0 * (run["loss"] / reference[run["seed"]] - 1.0)
        for run in runs
        if run["name"] == of and run["seed"] in reference
    ]


def verdict(meant_to: str, seeds: int, mean: float, error: float) -> str:
    if meant_to == "show":
        return ""
    if seeds < MIN_SEEDS:
        return "too few seeds"
    if meant_to == "fail":
        return "no, as it must be" if mean > BOUND + 2.0 * error else "**not visibly worse**"
    if mean <= BOUND:
        return "yes"
    return "yes, within noise" if mean <= BOUND + 2.0 * error else "**no**"


def markdown(report: Report) -> str:
    """Losses in nats per byte, mean over the seeds; differences to fp32 of the same seed: mean ± its standard error."""
    runs = sorted(report["runs"], key=lambda run: run["seed"])
    seeds = len({run["seed"] for run in runs})
    lines = [
        f"| row | up, down | bytes a value | η, μ | loss, {seeds} seeds | difference to fp32, % | by seed "
        f"| within {BOUND:g} % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(run["name"] for run in report["runs"]):
        lines.append(line([run for run in runs if run["name"] == name], differences(runs, name), report["settings"]))
    told = ", ".join(f"{name} {value}" for name, value in report["settings"].items())
    return "\n".join([*lines, "", f"Settings: {told}."])


def line(runs: list[Run], found: list[float], settings: dict[str, Any]) -> str:
    """Of one row."""
    row, loss = runs[0], statistics.fmean(run["loss"] for run in runs)
    mean = statistics.fmean(found) if found else math.nan
    error = statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else math.nan
    lr, momentum = row["outer"] or (settings["outer_lr"], settings["outer_momentum"])
    is_reference = row["name"] == "fp32"
    cells = [
        row["name"],
        f"{row['up']}{' + e' if row['feedback'] else ''}, {row['down']}",
        ", ".join(f"{bytes_per_value(get_codec(codec)):.3g}" for codec in (row["up"], row["down"])),
        f"{lr:g}, {momentum:g}",
        f"{loss:.4f}",
        "" if is_reference else f"{mean:+.2f} ± {error:.2f}",
        "" if is_reference else " ".join(f"{each:+.2f}" for each in found),
        verdict(row["meant_to"], len(found), mean, error),
    ]
    return "| " + " | ".join(cells) + " |"
