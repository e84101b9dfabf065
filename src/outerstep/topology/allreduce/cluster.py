"""The ranks of a job that are together one worker of a layer above (docs/concepts/hierarchy.md).

Rank 0 leads: a thread of its process is the worker up there (../leadership.py). After each round all ranks meet, and
rank 0 has the word:

    round     ──▶ T is known and compared ──▶ the leader hears of it ──▶ word: wait │ T′ of these fragments │ go on
                                                                           ▲                  │
                                                                           └──────────────────┘

A round is applied to a copy, and handed to the training thread with all that came from above after it. So a version
from above lies between two rounds, at the same place on every rank, and everybody has the bits that rank 0 sent.

A rank that dies ends the job. What must survive that is in the states that the ranks save: where T is, by its serial
numbers, on each; on rank 0 also the leader's record. A state has the newest record that is no newer than T in it: the
leader may be ahead of the training thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from ...coordination.shared_sub_leases import LeaseNews
from ...digest import data_hash
from ...errors import ConfigError
from ...types import Manifest
from ..cluster_part import ClusterPart, ReportedWork
from ..forms import Form
from ..leadership import Aside, ClusterSettings, KeptRecord, Leadership
from ..members_data import MembersData
from ..terms import Rank
from ..update import anchor_hash, copies, empty_anchor
from .peers import Links, Peers

log = logging.getLogger(__name__)

LEADER = 0
LONGEST_WORDS = 1000


class LeaderWord(msgspec.Struct, frozen=True):
    """What rank 0 says to all. `moving`: T′ of these fragments follows, a move with this `serial`. `holds`: more is to
    come. `ended`: it has left the layer above. `drain`: why all are to end. `doubts`: unsent steps
    in the ranks' saved states may count above already."""

    holds: bool = False
    serial: int = 0
    moving: tuple[int, ...] = ()
    ended: bool = False
    drain: str = ""
    doubts: bool = False


class DataWord(msgspec.Struct, frozen=True):
    """What rank 0 says when the ranks have nothing left to train: `news` of the layer above, what is waited for, and
    `drain` as above."""

    news: tuple[LeaseNews, ...] = ()
    waiting_for: str = ""
    drain: str = ""


@dataclass(frozen=True)
class NewAnchor:
    """θ′ of a fragment, in host memory."""

    version: int
    values: Mapping[str, Tensor]
    digest: str


class SavedCluster:
    """What a saved state has of a cluster."""

    def __init__(self, state: Mapping[str, Any], fragments: int) -> None:
        try:
            self.part = msgspec.json.decode(state["cluster"], type=ClusterPart)
        except (msgspec.MsgspecError, TypeError) as error:
            raise ConfigError(f"the state is not one of a cluster: {error}; start without load_state_dict") from error
        if {len(self.part.moves), len(self.part.serials), len(self.part.above)} != {fragments}:
            raise ConfigError(f"the state of the cluster must have {fragments} fragments, got {len(self.part.moves)}")
        self.record = KeptRecord(state["record"].clone())
        self.under_way = frozenset(state["under_way"])


@dataclass(frozen=True)
class ToldRank:
    """(`MemberTold`.) The ranks of a job are all alike, and rank 0 leads: nobody asks for more."""

    worker_id: str
    accelerator: str = ""
    backends: tuple[str, ...] = ()
    up_bytes_per_s: float = 0.0
    came_from: str = ""


class RankCluster:
    """(`ClusterMembers`.) Used by the carrying thread, unless a method says otherwise."""

    def __init__(
        self,
        settings: ClusterSettings,
        ranks: Sequence[Rank],
        forms: list[Form],
        peers: Peers,
        links: Links,
        saved: SavedCluster | None,
        data: MembersData | None = None,
    ) -> None:
        """`ranks`: how each introduced itself. `data`: what the layer above leases to them."""
        self.data, self.versions = data, dict[int, int]()
        self.own, self.offers = ranks[peers.rank], [ToldRank(rank.worker_id) for rank in ranks]
        self.plan, self._forms, self._peers, self._links = self.own.plan, forms, peers, links
        self._settings, self._saved = settings, saved
        self.leadership = Leadership(settings.wait_s, keep_here=self._keep)
        self._lock = threading.Lock()
        self.cluster = saved.part if saved is not None else ClusterPart.fresh(len(forms))
        self.record = saved.record if saved is not None else KeptRecord()
        self._adopted = self._kept_at = self.cluster  # T in the training thread; T when the record was kept
        self._fitting = self.record  # the newest that is no newer than that T
        self._lacks_record = saved is not None and not saved.record.data.numel()  # nobody knows what was sent
        self.word = LeaderWord()  # the last
        self._ahead: dict[int, NewAnchor] = {}

    @property
    def _leads(self) -> bool:
        return self._peers.rank == LEADER

    # --- the beginning ------------------------------------------------------------------------------------------------

    def begin(self, manifest: Manifest, anchors: Mapping[int, NewAnchor], *, is_new: bool) -> dict[int, NewAnchor]:
        """With these anchors. Returns those that the layer above has moved. All wait until the cluster has joined it; a
        job that goes on from saved states for a minute at least, for it is to know what became of what it sent."""
        leadership = self.leadership
        self.versions = {fragment: anchor.version for fragment, anchor in anchors.items()}
        if self._leads:
            target = {name: tensor for anchor in anchors.values() for name, tensor in anchor.values.items()}
            leadership.make_leader = self._settings.lead(leadership, self, manifest)
            leadership.lead(target, is_new=is_new, resumes=not is_new)
        self._ahead = {}
        self._listen(dict(anchors))
        return self._ahead

    def doubtful(self, moved: Mapping[int, NewAnchor]) -> frozenset[int]:
        """After `begin` from a saved state: the fragments of which unsent steps in it are to be dropped. All, if the
        layer above has later contributions than the state knows of, or does not answer: the steps may count there. And
        those that have moved while one of their contributions was under way: the state has no way to say both."""
        if self._saved is None:  # it was saved before there was a layer above
            return frozenset()
        if self.word.doubts:
            return frozenset(range(len(self._forms)))
        return frozenset(moved.keys() & self._saved.under_way)

    # --- after a round ------------------------------------------------------------------------------------------------

    def after_round(
        self,
        fragment: int,
        made: NewAnchor,
        anchors: Mapping[str, Tensor],
        versions: list[int],
        done: list[ReportedWork],
    ) -> dict[int, NewAnchor]:
        """`made` is what a round came to, the same everywhere; `anchors` and `versions` are those before it. Returns
        what the training thread is to adopt: that of this fragment, and of others that the layer above has moved."""
        if fragment == 0:
            with self._lock:
                self.cluster = self.cluster.after_round(done)
        self._ahead = {fragment: made}
        self.versions[fragment] = made.version
        if self._leads:
            self.leadership.published(made.values, {fragment: made.version})
            self.leadership.round_closed(fragment)
        self._listen(self._before(anchors, versions))
        return self._ahead

    def end(self, anchors: Mapping[str, Tensor], versions: list[int], patience_s: float) -> dict[int, NewAnchor]:
        """All are at the end of their training: what is left goes up, and what is agreed comes down. Raises RoundStuck
        if the others do not come."""
        self._peers.exchange("end", b"", stuck_after_s=patience_s)
        if self._leads:
            self.leadership.end()
        self._ahead = {}
        self._listen(self._before(anchors, versions), ends=True)
        return self._ahead

    def _before(self, anchors: Mapping[str, Tensor], versions: list[int]) -> dict[int, NewAnchor]:
        return {
            f: NewAnchor(version, {name: anchors[name] for name in names}, "")
            for f, (names, version) in enumerate(zip(self.plan.fragments, versions, strict=True))
        }

    def _listen(self, before: dict[int, NewAnchor], *, ends: bool = False) -> None:
        """To rank 0, until it has nothing more to say."""
        while True:
            self.word, made = self._meet(before)
            for fragment in self.word.moving:
                now = self._ahead.get(fragment) or before[fragment]
                self._ahead[fragment] = self._take(fragment, now.version + 1, made.get(fragment))
                with self._lock:
                    self.cluster = self.cluster.after_move(fragment, self.word.serial, now.version + 1)
                self.versions[fragment] = now.version + 1
            if made:
                for fragment in made:
                    ahead = self._ahead[fragment]
                    self.leadership.published(ahead.values, {fragment: ahead.version})
                assert self.leadership.aside is not None
                self.leadership.brought(self.leadership.aside)
            if self.word.ended if ends else not self.word.holds:
                return

    def _meet(self, before: Mapping[int, NewAnchor]) -> tuple[LeaderWord, dict[int, Mapping[str, Tensor]]]:
        """Rank 0's word; and on rank 0, T′ of the fragments that move."""
        said, made = b"", dict[int, Mapping[str, Tensor]]()
        if self._leads:
            leadership = self.leadership
            leadership.pause()
            # `holds` before `aside`: a leader releases the others after what it brings.
            word = LeaderWord(
                holds=leadership.holds,
                ended=leadership.has_ended,
                drain=leadership.ends_because[:LONGEST_WORDS],
                doubts=leadership.doubts or self._lacks_record,
            )
            aside = leadership.aside
            made = self._make(aside, before) if aside is not None else made
            if aside is not None and made:
                word = msgspec.structs.replace(word, ended=False, serial=aside.serial, moving=tuple(made))
            said = msgspec.msgpack.encode(word)
        heard = self._peers.exchange("word from above", said)
        word = msgspec.msgpack.decode(heard[LEADER], type=LeaderWord)
        if not set(word.moving) <= set(range(len(self._forms))):
            raise RuntimeError(f"rank {LEADER} moves fragments that there are not: {word.moving}")
        return word, made

    def _make(self, aside: Aside, before: Mapping[int, NewAnchor]) -> dict[int, Mapping[str, Tensor]]:
        """T′, from T as it is now."""
        assert aside.moved is not None
        made: dict[int, Mapping[str, Tensor]] = {}
        for fragment in aside.fragments:
            now = self._ahead.get(fragment) or before[fragment]
            made[fragment] = aside.moved(copies(now.values))
            if not all(bool(tensor.isfinite().all()) for tensor in made[fragment].values()):
                self.leadership.refuse(aside, "what came from the layer above must be finite numbers, got NaN or Inf")
                return {}
        return made

    def _take(self, fragment: int, version: int, made: Mapping[str, Tensor] | None) -> NewAnchor:
        """Rank 0's values, on every rank."""
        form = self._forms[fragment]
        data, views = empty_anchor(form)
        for name, view in views.items() if made is not None else ():
            assert made is not None
            view.copy_(made[name])
        self._links.spread(data[form.full.data_begin :])
        return NewAnchor(version, views, anchor_hash(views.values()))

    # --- what must survive --------------------------------------------------------------------------------------------

    def _keep(self, record: KeptRecord) -> None:
        """From the leader's thread."""
        with self._lock:
            self.record, self._kept_at = record, self.cluster
            self._choose()

    def adopted(self) -> None:
        """The training thread holds all that was handed to it; and says so."""
        with self._lock:
            self._adopted = self.cluster
            self._choose()

    def _choose(self) -> None:
        kept, held = self._kept_at, self._adopted
        if kept.rounds <= held.rounds and all(k <= h for k, h in zip(kept.serials, held.serials, strict=True)):
            self._fitting = self.record

    def state_dict(self) -> dict[str, Any]:
        """From the training thread."""
        with self._lock:
            return {"cluster": msgspec.json.encode(self._adopted).decode(), "record": self._fitting.data}

    def close(self) -> None:
        """From the training thread."""
        self.leadership.close()


def loaded_terms(settings: ClusterSettings, state: Mapping[str, Any] | None) -> dict[str, float | bool | str]:
    """What all ranks must say alike: of the cluster, and of the moves from above in their loaded states."""
    moved = data_hash([str(state["cluster"]).encode()]) if state is not None and "cluster" in state else ""
    return {**settings.terms, "moves from above (of the loaded state)": moved}


def wait_for_device(anchors: Mapping[str, Tensor]) -> None:
    """The training thread has moved them on a stream of its own."""
    for device in {tensor.device for tensor in anchors.values() if tensor.is_cuda}:
        torch.cuda.synchronize(device)
