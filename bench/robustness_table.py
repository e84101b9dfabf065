"""The results of robustness.py: the tables made of its runs (the file's form is loss_table.py's).

Numbers are the final perplexity, exp(nats per byte), relative to the clean run of the same seed, in percent: the mean
over the seeds ± its standard error. A bound counts as met if that mean is within it, or within it plus two standard
errors, and is then marked so.
"""

from __future__ import annotations

import math
import statistics

from loss_table import MIN_SEEDS, Report, Run

CLEAN, AGAIN, ALONE, PLAIN = "clean", "clean, again", "seven alone", "plain mean"
RECOMMENDED = "mean + cosine"
DEFAULTS = ("mean", RECOMMENDED, "trimmed_mean")  # what is held to COST_BOUND
ATTACK_BOUND, COST_BOUND = 5.0, 1.0  # percent of the clean perplexity
RUINED = 50.0  # percent; beyond it how much hardly matters


def excesses(runs: list[Run], rule: str, attack: str) -> list[float]:
    """In percent of the clean perplexity, of each seed that has both; infinite where the loss is no number."""
    clean = {run["seed"]: run["loss"] for run in runs if run["rule"] == CLEAN}
    return [
        math.inf if run["loss"] is None else 100.0 * math.expm1(run["loss"] - clean[run["seed"]])
        for run in runs
        if (run["rule"], run["attack"]) == (rule, attack) and run["seed"] in clean
    ]


def shown(found: list[float]) -> str:
    if not found:
        return ""
    if max(found) > RUINED:
        return "ruined" if min(found) > RUINED else f"ruined in {sum(each > RUINED for each in found)} of {len(found)}"
    error = f" ± {standard_error(found):.1f}" if len(found) > 1 else ""
    return f"{statistics.fmean(found):+.1f}{error}"


def standard_error(found: list[float]) -> float:
    return statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else math.nan


def verdict(found: list[float], bound: float) -> str:
    if len(found) < MIN_SEEDS:
        return "too few seeds"
    if max(found) > RUINED:
        return "**no**"
    mean = statistics.fmean(found)
    if mean <= bound:
        return "yes"
    return "yes, within noise" if mean <= bound + 2.0 * standard_error(found) else "**no**"


def markdown(report: Report) -> str:
    runs = sorted(report["runs"], key=lambda run: run["seed"])
    told = ", ".join(f"{name} {value}" for name, value in report["settings"].items())
    clean = [run["loss"] for run in runs if run["rule"] == CLEAN and run["loss"] is not None]
    about = f"Clean: {statistics.fmean(clean):.4f} nats per byte, {len(clean)} seeds. " if clean else ""
    return "\n".join([*cost_table(runs), "", *attack_table(runs), "", f"{about}Settings: {told}."])


def cost_table(runs: list[Run]) -> list[str]:
    lines = [
        f"| nobody hostile | perplexity, % | honest ones refused in | within {COST_BOUND:g} % |",
        "|---|---|---|---|",
    ]
    for rule in dict.fromkeys(run["rule"] for run in runs if not run["attack"] and run["rule"] != CLEAN):
        found = excesses(runs, rule, "")
        refused = statistics.fmean(run["refused_honest"] for run in runs if (run["rule"], run["attack"]) == (rule, ""))
        said = verdict(found, COST_BOUND) if rule in DEFAULTS else ""
        lines.append(f"| {rule} | {shown(found)} | {refused:.0%} of rounds | {said} |")
    return lines


def attack_table(runs: list[Run]) -> list[str]:
    """One line per attack, one column per rule; below them the worst of each column, and whether it is in bounds."""
    attacked = [run for run in runs if run["attack"]]
    attacks = list(dict.fromkeys(run["attack"] for run in attacked))
    rules = list(dict.fromkeys(run["rule"] for run in sorted(attacked, key=lambda run: run["rule"] != PLAIN)))
    found = {(rule, attack): excesses(runs, rule, attack) for rule in rules for attack in attacks}
    columns = ["one of eight sends", *rules, f"attacker refused by {RECOMMENDED} in"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for attack in attacks:
        caught = [run["refused_attacker"] for run in attacked if (run["rule"], run["attack"]) == (RECOMMENDED, attack)]
        share = f"{statistics.fmean(caught):.0%} of rounds" if caught else ""
        lines.append("| " + " | ".join([attack, *(shown(found[rule, attack]) for rule in rules), share]) + " |")
    worst = [
        max((found[rule, attack] for attack in attacks if found[rule, attack]), key=statistics.fmean, default=[])
        for rule in rules
    ]
    said = [f"{shown(each)}: {verdict(each, ATTACK_BOUND)}" for each in worst]
    lines.append("| " + " | ".join([f"**the worst; within {ATTACK_BOUND:g} %?**", *said, ""]) + " |")
    return lines
