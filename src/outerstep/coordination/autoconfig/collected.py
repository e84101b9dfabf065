"""What a server has collected of its members, as the controller is told it.

A member tells of itself: what does not change when it joins (`Join.info`), what does with its heartbeats
(`MemberFacts`). The server has measured what arrived (`LinkMeter`). Nothing here is judged by its meaning except
latencies: only a member can tell its own, so with three members or more it counts at most `FAR` times the median.
Everything else is trust.py's to judge.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median, median_low
from typing import Final

from msgspec.structs import replace

from ...types import (
    LONGEST_KIND,
    MOST_IN_CLUSTER,
    MOST_KINDS,
    MOST_REPORTED,
    MOST_UNIT_STEPS,
    THE_SERVER,
    InfoValue,
    Label,
    MemberFacts,
    Plain,
    Plan,
    plan_of,
)
from ..server.membership import KnownWorker
from .members import BETWEEN_ALL
from .state import ClusterState, LeaderCandidate, LinkReport
from .trust import FAR

LEAST_LATENCY_S: Final = 0.001  # below, nobody is slow
NO_FACTS: Final = MemberFacts()
MEASURED_FOR_S: Final = 300.0  # half as long as a measurement is believed
MOST_SAMPLES: Final = 10**12

# The facts of `Join.info` that the controller reads. Others are for people.
ACCELERATOR: Final = "accelerator"
BACKENDS: Final = "backends"
DATA: Final = "data_location"
MACHINE: Final = "machine"


class ClusterFacts(Plain, frozen=True):
    """What is known of one member, for people."""

    size: int
    members: tuple[Label, ...]
    machine: Label
    accelerators: tuple[Label, ...]
    backends: tuple[Label, ...]
    data_location: Label
    batch_size: int | None
    step_s: float | None
    unit_steps: int
    leader: Label


def facts_of(member: KnownWorker) -> ClusterFacts:
    said, info = member.facts or NO_FACTS, member.info
    return ClusterFacts(
        size=said.size,
        members=said.members,
        machine=_text(info, MACHINE),
        accelerators=said.accelerators or _words(info, ACCELERATOR),
        backends=said.backends or _words(info, BACKENDS) or (BETWEEN_ALL,),
        data_location=_text(info, DATA),
        batch_size=said.batch_size or None,
        step_s=1.0 / member.steps_per_second if member.steps_per_second > 0.0 else None,
        unit_steps=said.unit_steps,
        leader=said.leader if said.leader in said.members else "",
    )


def cluster_of(member: KnownWorker) -> ClusterState:
    """What it has not told yet is 0, which nobody believes: the others' median counts instead."""
    known, said = facts_of(member), member.facts or NO_FACTS
    rates = dict(zip(known.members, said.reach, strict=False))
    return ClusterState(
        name=member.worker_id,
        step_s=known.step_s or 0.0,
        batch_size=known.batch_size or 1,
        size=known.size,
        accelerators=known.accelerators,
        backends=known.backends,
        data_location=known.data_location,
        candidates=tuple(LeaderCandidate(name=name, bytes_per_s=rates.get(name, 0.0)) for name in known.members),
        leader=known.leader,
        relays=said.relays,
    )


def facts_of_cluster(members: Sequence[KnownWorker], plan: Plan | None) -> MemberFacts:
    """What a cluster's leader tells of it, from what its members have told. Its unit is a round of theirs. Whatever
    they claim, it is within the bounds of the message: else it is refused above, and the cluster seems dead there."""
    known = {member.worker_id: facts_of(member) for member in members}
    steps = {name: plan_of(plan, name).sync_every if plan is not None else 1 for name in known}
    accelerators = sorted({one for each in known.values() for one in each.accelerators})
    common = set.intersection(*(set(each.backends) for each in known.values())) if known else set[str]()
    samples = [steps[name] * (each.batch_size or 0) for name, each in known.items()]
    return MemberFacts(
        batch_size=min(sum(samples), MOST_SAMPLES) if all(samples) else 0,
        size=min(max(sum(each.size for each in known.values()), 1), MOST_IN_CLUSTER),
        unit_steps=min(plan.sync_every, MOST_UNIT_STEPS) if plan is not None else 1,
        members=tuple(sorted(known))[:MOST_REPORTED],
        accelerators=tuple(accelerators)[:MOST_KINDS],
        backends=tuple(sorted(common))[:MOST_KINDS],
    )


def unit_steps_of(members: Iterable[KnownWorker]) -> int:
    """Training steps in one unit of the layer: 1, or the rounds of its clusters. Of the middle one: no single member
    moves it."""
    return median_low([(member.facts or NO_FACTS).unit_steps for member in members] or [1])


def links_of(
    members: Sequence[KnownWorker], measured: Iterable[LinkReport], heard_before_s: Mapping[str, float]
) -> tuple[LinkReport, ...]:
    """The server's own measurements of links with these members, and theirs. `heard_before_s`: how long ago each told
    of its own, which is so much older by now. What comes through a relay says nothing of the straight line."""
    names = {member.worker_id for member in members}
    relayed = {member.worker_id for member in members if (member.facts or NO_FACTS).via}
    told = [
        LinkReport(
            source=link.source,
            target=link.target,
            measured_by=member.worker_id,
            bytes_per_s=link.bytes_per_s,
            latency_s=link.latency_s,
            age_s=link.age_s + max(heard_before_s.get(member.worker_id, 0.0), 0.0),
        )
        for member in members
        for link in (member.facts or NO_FACTS).links
    ]
    latency_s = {
        (report.source, report.target): report.latency_s
        for report in told
        if THE_SERVER in (report.source, report.target) and report.measured_by in (report.source, report.target)
    }
    own = [
        replace(report, latency_s=latency_s.get((report.source, report.target), report.latency_s))
        for report in measured
        if {report.source, report.target} <= {*names, THE_SERVER} and not {report.source, report.target} & relayed
    ]
    usual = [latency for latency in latency_s.values() if 0.0 <= latency < float("inf")]
    if len(names) < 3 or not usual:
        return (*own, *told)
    most_s = FAR * max(median(usual), LEAST_LATENCY_S)
    return tuple(replace(report, latency_s=min(report.latency_s, most_s)) for report in (*own, *told))


def lacks_link(member: KnownWorker) -> bool:
    """Whether it has measured nothing for long, in one direction at least."""
    known = {(one.source, one.target) for one in (member.facts or NO_FACTS).links if one.age_s <= MEASURED_FOR_S}
    return not {(member.worker_id, THE_SERVER), (THE_SERVER, member.worker_id)} <= known


def _text(info: Mapping[str, InfoValue], name: str) -> str:
    value = info.get(name, "")
    return value if isinstance(value, str) else ""


def _words(info: Mapping[str, InfoValue], name: str) -> tuple[str, ...]:
    """Comma-separated."""
    found = (word.strip()[:LONGEST_KIND] for word in _text(info, name).split(","))
    return tuple(word for word in found if word)[:MOST_KINDS]
