"""The layer below a leader, made of members without a server: torchft replicas, or ranks of an all-reduce job.
One of the members leads. All of them hold what must survive the leader (topology/leadership.py).

torchft      Every replica holds the record, and each move from above reaches all replicas at a separate quorum. If the
             leader dies, the next quorum chooses another replica. It joins the layer above under the cluster's name,
             which fences the old leader, settles the contributions in flight, and continues.
all-reduce   Rank 0 leads, and the job ends if a rank dies. The record is part of rank 0's saved state, so a job that
             restarts from its states does what a new leader does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..coordination.autoconfig.collected import MOST_SAMPLES
from ..coordination.autoconfig.trust import FASTEST_BYTES_PER_S
from ..coordination.layers.between import LayerTerms
from ..coordination.layers.lifecycle import known_place
from ..coordination.server.claims import ClaimedWork
from ..topology.cluster_part import ClusterPart
from ..topology.leadership import ClusterMembers, ClusterSettings, KeptRecord, Leadership, MakeLeader, NotLeading
from ..types import LONGEST_KIND, MOST_IN_CLUSTER, MOST_KINDS, MOST_REPORTED, MOST_UNIT_STEPS, Manifest, MemberFacts
from .below import Hearing, LeasesBelow, NotKept
from .leader import Leader
from .reach import ReachProbe
from .state_file import pack, unpack

log = logging.getLogger(__name__)

RECORD, DONE = "record", "done"  # the leader's own record, and the cluster's progress


class MembersBelow:
    """(`Below`.) For one term of leadership: a replica that is chosen again starts another term."""

    record_may_be_old = True  # it may be from a state that a script has saved, or all who held the newest have died

    def __init__(
        self,
        leadership: Leadership,
        members: ClusterMembers,
        manifest: Manifest,
        target: Mapping[str, Tensor],
        is_new: bool,
        terms: LayerTerms = LayerTerms(),  # noqa: B008 - frozen
    ) -> None:
        self.terms = terms
        self._leadership, self._members, self._term = leadership, members, leadership.term
        self.manifest = manifest
        self.fragments: Sequence[Collection[str]] = members.plan.fragments
        self._target, self._is_new = target, is_new
        self._record, self._versions = members.record, dict(members.versions)
        self.data: LeasesBelow | None = members.data.begin() if members.data is not None else None
        self._since = self._part

    @property
    def _part(self) -> ClusterPart:
        part = self._members.cluster
        assert part is not None
        return part

    def begin(self, leader: Hearing) -> None:
        leader.began(self._target, is_new=self._is_new, versions=self._versions)

    def keep(self, record: Mapping[str, Any]) -> None:
        part = self._part
        done = [part.rounds, part.steps, part.samples, part.tokens]
        kept = KeptRecord(torch.frombuffer(bytearray(pack({RECORD: record, DONE: done})), dtype=torch.uint8))
        try:
            self._leadership.keep(self._term, kept)
        except NotLeading as error:
            raise NotKept(str(error)) from error
        self._record = kept

    def kept(self) -> dict[str, Any] | None:
        if not self._record.data.numel():
            return None
        whole = unpack(self._record.data.numpy().tobytes(), "the record of the cluster's last leader")
        names = ("rounds", "steps", "samples", "tokens")
        self._since = ClusterPart((), (), (), **dict(zip(names, map(int, whole[DONE]), strict=True)))
        record: dict[str, Any] = whole[RECORD]
        return record

    def moves_known(self) -> dict[int, int]:
        return dict(enumerate(self._part.serials))

    def joined(self, *, overtaken: bool) -> None:
        self._leadership.joined(self._term, overtaken=overtaken)

    def move(
        self, serial: int, fragments: Collection[int], moved: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
    ) -> None:
        try:
            self._leadership.move(self._term, self._record, serial, fragments, moved)
        except NotLeading as error:
            raise NotKept(str(error)) from error

    def version(self) -> int:
        """Counted in rounds, because `rounds_since` is its only use."""
        return self._part.rounds

    def rounds_since(self, version: int) -> int:
        return max(0, self._part.rounds - version)

    def done(self) -> ClaimedWork:
        now, since = self._part, self._since
        return ClaimedWork(now.steps - since.steps, now.samples - since.samples, now.tokens - since.tokens)

    def hold(self, limit_s: float) -> None:
        self._leadership.hold(limit_s)

    def release(self) -> None:
        self._leadership.release(self._term)

    def name_leader(self, name: str) -> None:
        if self._leadership.keeps_here:
            log.warning("rank 0 always leads an all-reduce job: the order to let another rank lead is ignored")
            return
        self._leadership.name(self._term, name)

    def shut_down(self, reason: str) -> None:
        self._leadership.shut_down(self._term, reason)

    def facts(self) -> MemberFacts:
        """What the leader reports to the layer above: what members said at their last meeting, within the bounds of
        the message."""
        offers, part = sorted(self._members.offers, key=lambda offer: offer.worker_id), self._part
        spoken = [{one[:LONGEST_KIND] for one in offer.backends} for offer in offers]
        common = set.intersection(*spoken) if spoken else set[str]()
        kinds = sorted({offer.accelerator[:LONGEST_KIND] for offer in offers if offer.accelerator})
        told = offers[:MOST_REPORTED]
        return MemberFacts(
            batch_size=min(part.samples // max(part.rounds, 1), MOST_SAMPLES),
            size=min(max(len(offers), 1), MOST_IN_CLUSTER),
            unit_steps=min(self._members.plan.sync_every, MOST_UNIT_STEPS),
            members=tuple(offer.worker_id for offer in told),
            accelerators=tuple(kinds)[:MOST_KINDS],
            backends=tuple(sorted(common))[:MOST_KINDS],
            leader=self._members.own.worker_id,
            reach=tuple(
                min(offer.up_bytes_per_s, FASTEST_BYTES_PER_S) if offer.up_bytes_per_s > 0.0 else 0.0  # NaN is neither
                for offer in told
            ),
            states=tuple(known_place(offer.came_from) for offer in told),
        )


def as_cluster(
    above: str,
    name: str,
    *,
    every: int | None,
    wait_s: float,
    credentials: str | None,
    terms: LayerTerms,
    any_may_lead: bool = True,
) -> ClusterSettings:
    """The settings that make members without a server one worker of the server `above`. `any_may_lead`: every member
    measures its line."""

    probe = ReachProbe(above, credentials) if any_may_lead else None

    def lead(leadership: Leadership, members: ClusterMembers, manifest: Manifest) -> MakeLeader:
        if probe is not None:
            probe.start()

        def make(target: Mapping[str, Tensor], is_new: bool) -> Leader:
            below = MembersBelow(leadership, members, manifest, target, is_new, terms)
            return Leader(
                below, above, name, every=every, wait_s=wait_s, credentials=credentials, facts=below.facts
            ).start()

        return make

    settings = ClusterSettings(
        wait_s=wait_s, terms={"cluster": name, "above_every": every or 0, "above_wait_s": wait_s}, lead=lead
    )
    return settings if probe is None else replace(settings, reach=probe.reach, close=probe.close)
