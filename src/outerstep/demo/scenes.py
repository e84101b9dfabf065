"""The demos of clusters, one function each: what is done to the run. What it does then is its own affair.

hierarchy    two clusters of two
leave        a group dies inside a cluster
return       and comes back
join         a cluster joins, and one of another vendor
bandwidth    the link across gets ten times slower, and as fast as before
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..installing import install_line
from ..model_folder import load_state_dict
from .ends import End, verdict
from .link import Link
from .member import BATCH_SIZE, held_out_loss
from .processes import Process
from .stage import Stage, StageSettings
from .story import Changed, Curve, Panel, PlanMade, decisions, plot_panels, print_changes, shares, what_changed

GROUPS = ["left", "right"]
CLUSTERS = ["east", "west"]
SETTLED, SETTLED_QUICK = 12, 5  # rounds after which the controller may change its mind, and does if it must
MOST_ROUNDS = 40  # that a demo waits for a decision
UTILIZATION_OVER_S = 12.0
BITS = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}


@dataclass
class SceneResults:
    """What a demo leaves: also as results.json."""

    word: str
    loss_before: float
    loss: float
    rounds: int
    inside_bytes: int
    across_bytes: int
    hashes: dict[str, str]
    changes: list[Changed]
    moments: list[tuple[float, str]] = field(default_factory=list)
    decisions: list[PlanMade] = field(default_factory=list)
    expected: list[tuple[float, float]] = field(default_factory=list)  # utilization, by the top's plan in force
    utilization: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # as each group measured it
    recommended: dict[str, list[int]] = field(default_factory=dict)  # batch sizes that each group was told
    networks: dict[str, str] = field(default_factory=dict)  # by place, as the kernel names them
    shared_because: str = ""  # why clusters have no network of their own
    picture: str = ""


def run_scene(word: str, settings: StageSettings, quick: bool, console: Console) -> SceneResults:
    """Play it, print what happened, draw it."""
    scene = SCENES[word]
    settings = scene.adapt(settings, quick)
    networks = "in a network of its own" if settings.separate else f"on the loopback ({settings.why_shared})"
    console.print(
        f"{scene.about} Across: {settings.link}, each cluster {networks}.\n"
        f"Everything is written to [bold]{settings.folder}[/bold].",
        highlight=False,
    )
    with Stage(settings, console) as stage:
        moments = scene.play(stage, quick)
        ends = stage.finish()
        ended = _ended(word, stage, ends, moments)
    _tell(ended, ends, stage, console)
    return ended


# --- what is done -----------------------------------------------------------------------------------------------------


def _begin(stage: Stage, rounds: int) -> None:
    stage.start_top(len(CLUSTERS))
    stage.add_clusters(dict.fromkeys(CLUSTERS, GROUPS))
    stage.act("two clusters of two", rounds)


def play_hierarchy(stage: Stage, quick: bool) -> list[tuple[float, str]]:
    _begin(stage, 3 if quick else 40)
    return []


def play_leave(stage: Stage, quick: bool) -> list[tuple[float, str]]:
    _begin(stage, 2 if quick else 12)
    stage.kill_group("east", "right")
    moments = [(stage.now, "killed")]
    stage.act("east/right is killed", 2 if quick else 12, after=lambda: stage.has_planned_for("east", "left"))
    return moments


def play_return(stage: Stage, quick: bool) -> list[tuple[float, str]]:
    moments = play_leave(stage, quick)
    stage.add_group("east", "right")
    moments.append((stage.now, "started again"))
    stage.act("east/right is started again", 2 if quick else 14, after=lambda: stage.has_planned_for("east", *GROUPS))
    return moments


def play_join(stage: Stage, quick: bool) -> list[tuple[float, str]]:
    """Clusters of one group: what is to be seen is between them."""
    stage.start_top(len(CLUSTERS))
    stage.add_clusters({name: ["left"] for name in CLUSTERS}, accelerator="nvidia:H100")
    stage.act("two clusters (nvidia:H100)", 3 if quick else 12)
    moments = []
    for name, accelerator in (("north", "nvidia:H100"), ("south", "huawei:910B")):
        moments.append((stage.now, f"{name} ({accelerator})"))
        stage.add_clusters({name: ["left"]}, accelerator)
        stage.act(f"{name} joins ({accelerator})", 3 if quick else 12)
    return moments


def play_bandwidth(stage: Stage, quick: bool) -> list[tuple[float, str]]:
    """Each phase lasts until interval and codec have both followed, within limits, and some rounds more."""
    rounds = 3 if quick else 12
    stage.start_top(len(CLUSTERS))
    stage.add_clusters({name: ["left"] if quick else GROUPS for name in CLUSTERS})
    stage.act("two clusters", SETTLED_QUICK if quick else SETTLED)
    moments = []
    usual = stage.settings.link
    for factor, words in ((0.1, "a tenth"), (1.0, "as before")):
        stage.set_link(replace(usual, mbit_per_s=usual.mbit_per_s * factor))
        moments.append((stage.now, f"bandwidth: {words}"))
        stage.act(f"bandwidth: {words}", rounds, after=_followed(stage, cheaper=factor < 1.0))
    return moments


def _followed(stage: Stage, *, cheaper: bool) -> Callable[[], bool]:
    """Whether exchanges are both rarer and smaller than now (`cheaper`), or both more frequent and more exact, or the
    controller has had time enough."""
    (interval, bits), limit = _plan_across(stage), stage.round + MOST_ROUNDS

    def followed() -> bool:
        new_interval, new_bits = _plan_across(stage)
        both = (
            (new_interval > interval and new_bits < bits) if cheaper else (new_interval < interval and new_bits > bits)
        )
        return both or stage.round >= limit

    return followed


def _plan_across(stage: Stage) -> tuple[int, int]:
    """Its interval, and the bits of its codec."""
    plan = stage.status["plan"]
    return plan["sync_every"], bits_of(plan["codec"])


def bits_of(codec: str) -> int:
    """0 = a codec that no demo uses."""
    return BITS.get(codec.split("+")[0], 0)


def _steered(settings: StageSettings, quick: bool) -> StageSettings:
    return replace(settings, target=0.8, pace_s=0.03, inside_every=8, across_every=2)


def _slow(settings: StageSettings, quick: bool) -> StageSettings:
    """A link on which the shortest interval needs no smaller codec, and a tenth of which needs both: a longer interval
    and a smaller codec."""
    link = Link(mbit_per_s=15.0, rtt_ms=10.0)
    return replace(settings, target=0.75, pace_s=0.03, inside_every=8, across_every=5 if quick else 6, link=link)


def _as_it_is(settings: StageSettings, quick: bool) -> StageSettings:
    return settings


def _shared_inside(settings: StageSettings, quick: bool) -> StageSettings:
    """What a round inside holds is to stay the same, whoever brings it."""
    return replace(settings, inside_batch=len(GROUPS) * settings.inside_every * BATCH_SIZE)


@dataclass(frozen=True)
class DemoScene:
    about: str
    play: Callable[[Stage, bool], list[tuple[float, str]]]
    adapt: Callable[[StageSettings, bool], StageSettings] = _as_it_is


SCENES = {
    "hierarchy": DemoScene("Two clusters of two groups train one model.", play_hierarchy),
    "leave": DemoScene("Two clusters of two groups; one group is killed (SIGKILL).", play_leave, _shared_inside),
    "return": DemoScene("Two clusters of two groups; one group is killed and comes back.", play_return, _shared_inside),
    "join": DemoScene("Two clusters; a third joins, and a fourth of another vendor.", play_join, _steered),
    "bandwidth": DemoScene("Two clusters of two; the link across changes.", play_bandwidth, _slow),
}


# --- what is told -----------------------------------------------------------------------------------------------------


def _ended(word: str, stage: Stage, ends: dict[str, End], moments: list[tuple[float, str]]) -> SceneResults:
    told = stage.told()
    ended = SceneResults(
        word=word,
        loss_before=held_out_loss(load_state_dict(stage.folder / "initial")),
        loss=held_out_loss(stage.weights()),
        rounds=len(shares(told, "top")),
        inside_bytes=stage.inside_bytes,
        across_bytes=stage.across_bytes,
        hashes={name: end.weights for name, end in ends.items()},
        changes=what_changed(told, ["top", *stage.clusters], stage.ended_at - stage.began_at),
        moments=moments,
        decisions=decisions(told),
        expected=_expected(stage),
        utilization={process.name: _utilization(process, stage) for process in stage.ever},
        recommended={
            process.name: [report["recommended"] for report in process.reports() if "recommended" in report]
            for process in stage.ever
        },
        networks={"top": stage.network, **{cluster.name: cluster.site.network for cluster in stage.clusters.values()}},
        shared_because=stage.settings.why_shared,
    )
    ended.picture = str(_plot(ended, stage) or "")
    (stage.folder / "results.json").write_text(json.dumps(asdict(ended), indent=2))
    return ended


def _plot(ended: SceneResults, stage: Stage) -> Path | None:
    told = stage.told()
    losses = [
        Curve(process.name, [(r["time"] - stage.began_at, r["loss"]) for r in process.reports() if "loss" in r])
        for process in stage.ever
    ]
    panels = [Panel("training loss", losses)]
    places = ["top", *stage.clusters] if stage.settings.target is None else ["top"]
    for place in places:
        rounds = shares(told, place)
        names = sorted({name for one in rounds for name in one.of})
        curves = [Curve(name, [(one.time, one.of.get(name, 0.0)) for one in rounds], stepped=True) for name in names]
        panels.append(Panel(f"share in a round\n{place}", curves, bounds=(-0.05, 1.05)))
    if stage.settings.target is not None:
        panels += _chosen(stage, ended)
    return plot_panels(panels, ended.moments, stage.folder / f"{ended.word}.png")


def _expected(stage: Stage) -> list[tuple[float, float]]:
    """What the top's controller said, when that changed."""
    found: list[tuple[float, float]] = []
    for at, said in stage.seen:
        share = (said.get("layer") or {}).get("utilization")
        if share is not None and at > stage.began_at and (not found or found[-1][1] != share):
            found.append((at - stage.began_at, share))
    return found


def _chosen(stage: Stage, ended: SceneResults) -> list[Panel]:
    """What the top server measured of the links, and what its controller made of it."""
    seen = [(at - stage.began_at, said) for at, said in stage.seen if at > stage.began_at and said.get("plan")]
    links = sorted({(one["source"], one["target"]) for _, said in seen for one in said.get("links", [])})
    measured = [
        Curve(
            f"{source} → {target}",
            [
                (at, one["bytes_per_s"] * 8e-6)
                for at, said in seen
                for one in said["links"]
                if (one["source"], one["target"], one["measured_by"]) == (source, target, "the server")
            ],
        )
        for source, target in links
    ]
    interval = Curve("H, rounds inside", [(at, said["plan"]["sync_every"]) for at, said in seen], stepped=True)
    codec = Curve("codec, bits", [(at, bits_of(said["plan"]["codec"])) for at, said in seen], True)
    target = Curve("target", [(seen[0][0], stage.settings.target or 0.0), (seen[-1][0], stage.settings.target or 0.0)])
    measured_by_groups = [Curve(name, points) for name, points in ended.utilization.items()]
    return [
        Panel("measured links\nMbit/s", [curve for curve in measured if curve.points], logarithmic=True),
        Panel("the plan across", [interval, codec]),
        Panel("utilization", [target, *measured_by_groups], bounds=(0, 1.05)),
    ]


def _utilization(process: Process, stage: Stage) -> list[tuple[float, float]]:
    """Of a group: the share of the time in which it did not wait for an exchange, over some seconds."""
    reports = [r for r in process.reports() if "waited_s" in r]
    found, first = [], 0
    for last, report in enumerate(reports):
        while report["time"] - reports[first]["time"] > UTILIZATION_OVER_S:
            first += 1
        took = report["time"] - reports[first]["time"]
        if last and took > UTILIZATION_OVER_S / 2:
            waited = report["waited_s"] - reports[first]["waited_s"]
            found.append((report["time"] - stage.began_at, 1.0 - min(waited / took, 1.0)))
    return found


def _tell(ended: SceneResults, ends: dict[str, End], stage: Stage, console: Console) -> None:
    if ended.changes:
        print_changes(ended.changes, console)
    groups = max(len(cluster.groups) for cluster in stage.clusters.values())
    table = Table(title=f"after {ended.rounds} rounds across", show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row("held-out loss, nats per byte", f"{ended.loss_before:.3f} → {ended.loss:.3f}")
    table.add_row("bytes inside the clusters", _megabytes(ended.inside_bytes))
    table.add_row("bytes across", _megabytes(ended.across_bytes))
    if ended.word == "hierarchy":
        table.add_row(
            "bytes across without clusters (computed)",
            f"{_megabytes(ended.across_bytes * groups)}: each group its own line",
        )
    for name, value in ended.hashes.items():
        table.add_row(f"weights of {name}", value)
    console.print(table)
    console.print(verdict(ends), highlight=False)
    picture = f"plot: {ended.picture}" if ended.picture else f"plot: {escape(install_line('demo'))} to get one"
    console.print(f"{picture}  logs: {stage.folder}", highlight=False)


def _megabytes(count: float) -> str:
    return f"{count / 1e6:.1f} MB"
