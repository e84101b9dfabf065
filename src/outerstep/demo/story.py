"""What changed in a demo of clusters and why, read from the event logs of its servers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..types import THE_SERVER
from .stage import DECIDED, LoggedEvent

TOP = "top"

NOTICEABLE = 0.05  # of a share: two clusters' intervals need not hold exactly the same number of samples
MEMBERSHIP = ("join", "leave", "death", "kick")
COLORS = ("#1f6feb", "#2da44e", "#c78a3b", "#8250df", "#cf222e", "#57606a")
MARKED = 80  # points of a line, at most


@dataclass(frozen=True)
class RoundShares:
    """How much each member counted in one round."""

    time: float
    place: str
    version: int
    of: dict[str, float]

    def __str__(self) -> str:
        return ", ".join(f"{name} {share:.0%}" for name, share in self.of.items())


@dataclass(frozen=True)
class Changed:
    """One line of the story."""

    time: float
    place: str
    what: str
    before: str
    after: str
    why: str


@dataclass(frozen=True)
class PlanMade:
    """A plan that a controller has made. `utilization`: what it expects of it; None = not known."""

    time: float
    place: str
    cause: str
    reason: str
    changes: dict[str, str]
    utilization: float | None


def decisions(told: list[LoggedEvent]) -> list[PlanMade]:
    """Those that changed something."""
    facts = ("cause", "reason", "changes", "utilization")
    return [
        PlanMade(one.time, one.place, *(one.facts[name] for name in facts))
        for one in told
        if one.kind == DECIDED and one.facts["changes"]
    ]


def shares(told: list[LoggedEvent], place: str) -> list[RoundShares]:
    """Round by round."""
    found = []
    for one in told:
        if one.place == place and one.kind == "round" and one.facts["fragment"] == 0 and one.facts["workers"]:
            weights = dict(zip(one.facts["workers"], one.facts["weights"], strict=True))
            total = sum(weights.values()) or 1.0
            of = {name: weight / total for name, weight in sorted(weights.items())}
            found.append(RoundShares(one.time, place, one.facts["version"], of))
    return found


def what_changed(told: list[LoggedEvent], places: list[str], until: float) -> list[Changed]:
    """Who came and went while it trained, how the shares in a round moved; each with its reason."""
    found = [line for one in told for line in _lines(one)]
    for place in places:
        rounds = shares(told, place)
        for before, after in pairwise(rounds):
            if _differ(before.of, after.of):
                why = _why_shares(told, places, before, after)
                found.append(Changed(after.time, place, "shares", str(before), str(after), why))
    return sorted((one for one in found if 0.0 < one.time < until), key=lambda one: one.time)


def _lines(one: LoggedEvent) -> list[Changed]:
    if one.kind in MEMBERSHIP:
        came = one.kind == "join"
        name: str = one.facts["worker"]
        return [Changed(one.time, one.place, "member", "–" if came else name, name if came else "–", reason_of(one))]
    if one.kind == DECIDED:
        return [
            Changed(one.time, one.place, what, *_before_and_after(change), _decided(one))
            for field, change in one.facts["changes"].items()
            if (what := _named(field, one.place)) is not None
        ]
    return []


def _named(field: str, place: str) -> str | None:
    """At the top, member by member is too much: their shares are told anyway."""
    if field == "assignments":
        return "steps × batch" if place != TOP else None
    return field


def _before_and_after(change: str) -> tuple[str, str]:
    before, _, after = change.replace(f" → {THE_SERVER}", "").partition(" → ")
    return before, after


def reason_of(one: LoggedEvent) -> str:
    """Why, in the words of the server that logged it."""
    worker = one.facts.get("worker", "")
    if one.kind == "death":
        return f"{worker} has been silent for {one.facts['silent_s']:.1f} s"
    if one.kind == "join":
        times = one.facts["incarnation"]
        return f"{worker} has joined" + (f", for the {_ordinal(times)} time" if times > 1 else "")
    return f"{worker}: {one.facts.get('reason') or 'done'}"


def _ordinal(number: int) -> str:
    return {2: "second", 3: "third"}.get(number, f"{number}th")


def _differ(before: dict[str, float], after: dict[str, float]) -> bool:
    names = before.keys() | after.keys()
    return before.keys() != after.keys() or any(abs(before[n] - after[n]) > NOTICEABLE for n in names)


def _why_shares(told: list[LoggedEvent], places: list[str], before: RoundShares, after: RoundShares) -> str:
    """The last event since the round before the last that can move a share: of this round's own members, inside one of
    them, or a plan."""
    rounds = [one.time for one in shares(told, after.place) if one.time < before.time]
    since = max(rounds, default=float("-inf"))
    for one in reversed([one for one in told if since <= one.time <= after.time]):
        if one.kind == DECIDED and one.place == after.place and one.facts["changes"]:
            return _decided(one)
        if one.kind in MEMBERSHIP and one.place == after.place:
            if one.facts["worker"] in before.of.keys() ^ after.of.keys():
                return reason_of(one)
        elif one.kind in MEMBERSHIP and one.place in after.of and one.place in places:
            return f"inside {one.place}: {reason_of(one)}"
    return "their rounds held other numbers of samples"


def _decided(one: LoggedEvent) -> str:
    cause, reason = one.facts["cause"], one.facts["reason"]
    return str(reason) if cause == "members" else f"{cause}: {reason}"  # who came or went needs no heading


def print_changes(changes: list[Changed], console: Console) -> None:
    table = Table(title="what changed, and why: from the servers' event logs")
    for heading in ("at", "where", "what changed", "why"):
        table.add_column(heading, justify="right" if heading == "at" else "left", overflow="fold")
    for (time, place, why), lines in groupby(changes, key=lambda one: (one.time, one.place, one.why)):
        table.add_row(f"{time:.0f} s", place, "\n".join(f"{x.what}: {x.before} → {x.after}" for x in lines), why)
    console.print(table)


# --- the picture ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    label: str
    points: list[tuple[float, float]]
    stepped: bool = False


@dataclass(frozen=True)
class Panel:
    title: str
    curves: list[Curve]
    logarithmic: bool = False
    bounds: tuple[float, float] | None = None


def plot_panels(panels: list[Panel], moments: list[tuple[float, str]], file: Path) -> Path | None:
    """Panels over one axis of time, with `moments` marked, as PNG; None if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(
        len(panels), 1, sharex=True, squeeze=False, figsize=(9, 1.2 + 2.3 * len(panels)), layout="constrained"
    )
    for axes, panel in zip(grid[:, 0], panels, strict=True):
        _draw(axes, panel)
        for at, _ in moments:
            axes.axvline(at, color="#57606a", linewidth=1.0, linestyle="--")
    for at, words in moments:
        grid[0, 0].annotate(
            words, (at, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 3), textcoords="offset points",
            ha="center", fontsize=8,
        )  # fmt: skip
    grid[-1, 0].set_xlabel("seconds")
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
    return file


def _draw(axes: Any, panel: Panel) -> None:
    for number, curve in enumerate(panel.curves):
        if not curve.points:
            continue
        times, values = zip(*curve.points, strict=True)
        color = COLORS[number % len(COLORS)]
        width = 3.6 if curve.stepped and number == 0 else 1.6  # what lies under another line still shows
        if curve.stepped:
            marker = "." if len(times) <= MARKED else ""  # of many points the line says it all
            axes.step(times, values, where="post", color=color, linewidth=width, marker=marker, label=curve.label)
        else:
            axes.plot(times, values, color=color, linewidth=width, label=curve.label)
    if panel.logarithmic:
        axes.set_yscale("log")
        axes.yaxis.get_major_locator().set_params(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0))
        axes.yaxis.set_major_formatter("{x:g}")  # 20, not 2 × 10¹
        axes.minorticks_off()
    if panel.bounds is not None:
        axes.set_ylim(*panel.bounds)
    axes.set_ylabel(panel.title, fontsize=9)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
