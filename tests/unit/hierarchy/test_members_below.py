"""Members without a server, as the leader of their cluster tells of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec
import torch

from outerstep.hierarchy.members_below import MembersBelow
from outerstep.topology.cluster_part import ClusterPart
from outerstep.topology.leadership import KeptRecord, Leadership
from outerstep.types import Manifest, MemberFacts, ParameterSpec, Plan

PLAN = Plan(
    sync_every=4,
    codec="fp32",
    fragments=(("w",),),
    part_size_bytes=1,
    max_staleness=0,
    heartbeat_timeout_s=0.0,
)


@dataclass
class Told:
    worker_id: str
    accelerator: str = ""
    backends: tuple[str, ...] = ("gloo",)
    up_bytes_per_s: float = 0.0
    came_from: str = ""


@dataclass
class Members:
    offers: list[Told]
    plan: Plan = PLAN
    cluster: ClusterPart | None = field(default_factory=lambda: ClusterPart.fresh(1))
    record: KeptRecord = field(default_factory=KeptRecord)
    versions: dict[int, int] = field(default_factory=lambda: {0: 0})
    data: None = None

    @property
    def own(self) -> Told:
        return self.offers[0]


def facts_of(*offers: Told) -> MemberFacts:
    manifest = Manifest(parameters=(ParameterSpec(name="w", shape=(2,), dtype="float32"),))
    below = MembersBelow(Leadership(0.0), Members(list(offers)), manifest, {"w": torch.zeros(2)}, True)
    return below.facts()


def test_whatever_members_claim_of_themselves_the_layer_above_can_read() -> None:
    """Else it would refuse every heartbeat, and the cluster would seem dead there."""
    long = "b" * 1000
    claims = [math.nan, math.inf, -math.inf, -1.0, 1e300, 5e6]
    offers = [Told(f"m{i}", "a" * 1000, (long, "gloo"), claim) for i, claim in enumerate(claims)]
    told = facts_of(*offers)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=MemberFacts) == told
    assert msgspec.json.decode(msgspec.json.encode(told), type=MemberFacts) == told
    assert told.reach[0] == told.reach[2] == told.reach[3] == 0.0
    assert told.reach[5] == 5e6
