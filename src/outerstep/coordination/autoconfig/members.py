"""What follows from who is in a layer: each cluster's share of the samples, its leader, and the group's backend."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from ...types import Assignment
from ..layers.leadership import MemberInSight, who_leads
from .state import ClusterState, LayerState
from .trust import Believed

BY_VENDOR: Final = ("nccl", "hccl")  # fast, and between accelerators of one vendor only
BETWEEN_ALL: Final = "gloo"


def backend_for(clusters: Sequence[ClusterState]) -> str:
    """A vendor's own library if all have it and are of that vendor; else gloo. "" if somebody cannot speak that
    either. (AMD's library goes by the name nccl, too, so a common name is not enough.)"""
    common = set.intersection(*(set(cluster.backends) for cluster in clusters))
    vendors = {_vendor(accelerator) for cluster in clusters for accelerator in cluster.accelerators}
    if len(vendors) == 1 and all(cluster.accelerators for cluster in clusters):
        for backend in BY_VENDOR:
            if backend in common:
                return backend
    return BETWEEN_ALL if BETWEEN_ALL in common else ""


def _vendor(accelerator: str) -> str:
    """ "nvidia-h100", "NVIDIA H100", "nvidia:H100" → "nvidia"."""
    return re.split(r"[-_:\s]", accelerator.lower(), maxsplit=1)[0]


def in_words(before: Iterable[str], clusters: Sequence[ClusterState]) -> str:
    """Who has come and gone since a plan for these, and what newcomers mean for the backend: for people."""
    known, now = set(before), {cluster.name: cluster for cluster in clusters}
    came, gone = sorted(now.keys() - known), sorted(known - now.keys())
    said = [f"{_listed(names)} {what}" for names, what in ((came, "joined"), (gone, "left")) if names]
    old = [cluster for cluster in clusters if cluster.name in known]
    if came and old and backend_for(old) != backend_for(clusters):
        said += [f"{name} {_speech(now[name])}" for name in came if backend_for(old) != backend_for([*old, now[name]])]
    return "; ".join(said)


def _listed(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last} have" if first else f"{last} has"


def _speech(cluster: ClusterState) -> str:
    runs = f"runs on {', '.join(cluster.accelerators)}" if cluster.accelerators else "has no accelerator"
    return f"{runs} and speaks {', '.join(cluster.backends) or 'nothing'}"


def leader_for(cluster: ClusterState, now: str) -> str:
    """By the rule that is the cluster's own, too (layers/leadership.py). `now`: by the plan in force. A cluster that
    says who leads it has applied that rule itself, with its own patience. "" if nobody can lead. A candidate's own word
    about its line moves nothing but this."""
    sights = [MemberInSight(each.name, bytes_per_s=each.bytes_per_s) for each in cluster.candidates]
    names = [each.name for each in sights]
    if cluster.leader in names:
        return cluster.leader
    return who_leads(sights, leading=now if now in names else min(names, default="")) or ""


def delay_of(delay: int, sync_every: int, num_fragments: int, local_steps: int) -> int:
    """The plan's delay for a cluster that takes `local_steps` where the middle one takes `sync_every`: about as long in
    time."""
    return min(-(-delay * local_steps // sync_every), longest_delay(num_fragments, local_steps))


def longest_delay(num_fragments: int, local_steps: int) -> int:
    """No fragment is adopted after the next one was sent."""
    return min(local_steps // num_fragments, local_steps - 1)


def assignments_for(
    layer: LayerState,
    believed: Sequence[Believed],
    local_steps: Mapping[str, int],
    delays: Mapping[str, int],
    parents: Mapping[str, str],
) -> tuple[Assignment, ...]:
    """Sorted by name. Their samples are the global batch that was asked, exactly, unless memory or the number of steps
    forbids it; without one, batches stay as they are."""
    leads = {each.cluster: each.leader for each in layer.plan.assignments} if layer.plan else {}
    members = {cluster.name: cluster for cluster in layer.clusters}
    samples = {each.name: local_steps[each.name] * each.batch_size for each in believed}
    if layer.global_batch:
        least = {each.name: local_steps[each.name] for each in believed}  # a step has one sample at least
        most = {
            each.name: least[each.name] * each.most_batch_size or max(layer.global_batch, least[each.name])
            for each in believed
        }
        samples = apportioned(layer.global_batch, samples, least, most)
    return tuple(
        Assignment(
            cluster=name,
            leader=leader_for(members[name], leads.get(name, "")),
            sends_to=parents[name],
            local_steps=local_steps[name],
            batch_size=samples[name] // local_steps[name],
            larger_batches=samples[name] % local_steps[name],
            delay=delays[name],
        )
        for name in sorted(samples)
    )


def apportioned(
    total: int, weights: Mapping[str, int], least: Mapping[str, int], most: Mapping[str, int]
) -> dict[str, int]:
    """`total` divided in proportion to the weights, each within its bounds, whole numbers that add up to it. What a
    bound cuts off goes to the others. If the bounds allow no such division, each gets its nearest bound."""
    names = sorted(weights)
    shares = {name: min(max(total * weights[name] // sum(weights.values()), least[name]), most[name]) for name in names}
    for _ in range(2 * len(names) + 1):
        missing = total - sum(shares.values())
        free = [n for n in names if (shares[n] < most[n] if missing > 0 else shares[n] > least[n])]
        if not missing or not free:
            break
        weight = sum(weights[n] for n in free)
        moved = {n: abs(missing) * weights[n] // weight for n in free}
        for name in free[: abs(missing) - sum(moved.values())]:
            moved[name] += 1
        for name in free:
            room = most[name] - shares[name] if missing > 0 else shares[name] - least[name]
            shares[name] += min(moved[name], room) * (1 if missing > 0 else -1)
    return shares
