"""A round of a torchft run, as one replica goes through it in its carrying thread:

    meet       the Manager's quorum; a replica that is behind comes out of it healed, with the state of another
    tell       each replica says what it brings, and the digest of its snapshot
    reduce     the contributions to the fragment whose turn it is, to one mean with the same bytes everywhere
               (reduce.py); a replica that brings none (it joins, or was just healed) is sent the mean
    vote       the Manager's: a round counts for a replica when all its processes hold the mean

A vote that fails leaves everything as it was, and the same bytes are offered to the next quorum. Votes are taken by
each replica alone, so one may have a round that another has not: that other one is then behind, is healed at the next
quorum, and reads in the state which of its contributions counted. Nothing is lost by that, and nothing counts twice.

A Δ is the same from whichever anchor: local moves along when the anchor does. So a contribution made before a healing
is still right after it.

In a cluster (../leadership.py) some quorums reduce nothing: the leader brings its record, or a move from above, or has
the others wait for it. What they brought themselves goes to the next. T is ahead of the replica then: a round is
applied to a copy, and handed out when nothing more is to come from above for now.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from ...coordination.layers.replica_life import ReplicaLife
from ...coordination.shared_leases import SharedLeases
from ...coordination.shared_sub_leases import SharedSubLeases
from ...coordination.weights import rank_weights
from ...coordination.worker.units import LeaseRequest
from ...core.codecs import Dither
from ...core.own_outer import outer_everywhere
from ...core.state import FragmentState
from ...core.watch import watched
from ...digest import data_hash
from ...errors import AnchorsDiffer, BadRequest, ModelError, WorkerError
from ...types import LeaseAnswer, LeaseStatement, Participant, Trained, Watched
from ..cluster_part import ClusterPart
from ..encode import Encoded
from ..forms import forms_of
from ..leadership import HANDED_OVER, POLL_S, Aside, KeptRecord, Leadership
from ..members_data import MembersData
from ..protocol import DataVoice
from ..reduce import ReducedMean, Reducer, down_rules, runs_of
from ..terms import Rank, check_pair
from ..update import AnchorUpdate, MeanStep, UpdateChain, WholeAnchor, anchor_hash, apply_to, copies, empty_anchor
from .process_groups import ProcessGroups
from .quorum import Quorum, Quorums, TorchftSettings
from .state import (
    NOTHING,
    ReplicaKinds,
    ReplicaOffer,
    RunSnapshot,
    backend_among,
    held_here,
    leader_among,
    note_counted,
    odd_ones,
    read_snapshot,
)

log = logging.getLogger(__name__)

VOTES = 3  # of one contribution; then training goes on, and its steps go into the next
RECORD_BYTES, RECORD_BYTES_PER_VALUE = 64 << 20, 32  # no leader's record is larger
NO_KINDS = ReplicaKinds()
CHUNK_BYTES = 64 << 20  # of the first weights, on their way through a GPU


@dataclass
class Brought:
    """What a replica comes to a quorum with; one that joins, with nothing. The payload is encoded while the quorum
    forms: `fill` says that it is there, or why its values are worthless (`refused`), or that there will be none."""

    fragment: int
    sequence: int
    steps: int = 0
    samples: int = 0
    tokens: int = 0
    payload: Encoded | None = None
    refused: str = ""
    squares: float = 0.0  # Σ Δ²
    waits: bool = False  # for what the leader of the cluster brings
    trained: tuple[Trained, ...] = ()  # leased units whose last step is in it
    last: bool = False  # at the end of the training: for what becomes of it in the layer above
    dry: bool = False  # nothing leased is left to train: for more of it. The replica adopts nothing meanwhile
    _error: BaseException | None = None
    _filled: threading.Event = field(default_factory=threading.Event)

    def fill(
        self,
        payload: Encoded | None,
        refused: str = "",
        squares: float = 0.0,
        error: BaseException | None = None,
    ) -> None:
        self.payload, self.refused, self.squares, self._error = payload, refused, squares, error
        self._filled.set()

    def wait(self) -> None:
        if not self.is_empty:
            self._filled.wait()
        if self._error is not None:
            raise ModelError(f"the contribution could not be encoded: {self._error}") from self._error

    @property
    def is_empty(self) -> bool:
        return self.fragment == NOTHING

    @property
    def joins(self) -> bool:
        return self.is_empty and not (self.waits or self.last or self.dry)


@dataclass(frozen=True)
class RoundOutcome:
    """What it came to: whether the contribution counted, and the updates, by fragment, in the order to
    apply them."""

    counted: bool
    updates: Mapping[int, AnchorUpdate]
    participants: tuple[Participant, ...] = ()
    bytes_sent: int = 0
    bytes_received: int = 0
    watched: Watched | None = None  # of what this process holds


@dataclass
class ReducingRank:
    """A rank among those who reduce."""

    rank: int
    size: int
    labels: Sequence[str]


@dataclass(frozen=True)
class VotedRound:
    """What came of the meeting, before the vote. `active`: who contributed."""

    turn: int
    mean: ReducedMean | None
    active: tuple[ReplicaOffer, ...] = ()
    weights: tuple[float, ...] = ()
    counted: bool = False
    founds: bool = False  # the run begins with it
    leader: int = 0  # of a cluster: its rank, and whether it did not lead before
    elects: bool = False
    resumes: bool = False  # all come from saved states, and nobody who was there before is left
    brought: BroughtAside | None = None  # by the leader; then there is no mean


@dataclass(frozen=True)
class BroughtAside:
    """`said`: by the leader, if there was one. `moved`: by fragment, T′ and its hash. `ends`: all are at the end of
    their training."""

    said: ReplicaOffer | None
    moved: Mapping[int, tuple[dict[str, Tensor], str]]
    ends: bool


class Rounds:
    """Used by the carrying thread alone, and between two rounds by the training thread."""

    def __init__(
        self,
        own: Rank,
        instance: str,
        settings: TorchftSettings,
        groups: ProcessGroups,
        tensors: Mapping[str, Tensor],
        anchors: Mapping[str, Tensor],
        leadership: Leadership | None = None,
        kinds: ReplicaKinds = NO_KINDS,
    ) -> None:
        """`leadership`: the replicas are together a cluster of a layer above. `kinds`: what the others are told of this
        replica."""
        self._kinds = kinds
        self._term = self._own_term = 0  # how often a leader was chosen, as far as is known; when it was this replica
        manifest = held_here(own.manifest, tensors)
        self.own, self.plan, self._label = own, own.plan, own.label
        self.forms = forms_of(own.plan, manifest)
        self.ahead: dict[str, Tensor] | None = None  # anchors in host memory that the replica has not adopted yet
        self.outer = outer_everywhere(settings.outer, tensors)
        roles = {spec.name: spec.role for spec in own.manifest.parameters}
        self.states = [
            FragmentState({name: roles[name] for name in names}, anchors, self.outer, index=f)
            for f, names in enumerate(own.plan.fragments)
        ]
        self.run_id = ""
        self.life = ReplicaLife()  # told of what happens; nothing is decided by it
        self._came_from = ""  # where in its life it was when it asked for the last quorum
        self._counted: list[dict[str, int]] = [{} for _ in self.states]
        self.healed_from: dict[str, Any] | None = None  # the worker's part of a state
        self._instance, self._settings = instance, settings
        self._groups, self._tensors, self._anchors = groups, tensors, anchors
        self._down = down_rules(own.plan, manifest)
        self._reducers: dict[int, tuple[tuple[object, ...], Reducer]] = {}  # and who reduces there
        run = [own.manifest, own.plan, own.outer]
        self._terms = data_hash([msgspec.msgpack.encode(run, order="deterministic")])
        self._offers: list[ReplicaOffer] = []  # of the last quorum
        self._leadership = leadership
        self.cluster = ClusterPart.fresh(len(self.forms)) if leadership is not None else None
        self.record = KeptRecord()
        self._aside: Aside | None = None  # what this replica, if it leads, has brought to the last quorum
        self._most_record_bytes = RECORD_BYTES + RECORD_BYTES_PER_VALUE * sum(t.numel() for t in tensors.values())
        self.drain = ""  # why the leader has all replicas end
        self.doubts = False  # by the leader's last word: unsent steps in a saved state may count above already
        self._voice: DataVoice | None = None
        self.leases: SharedLeases | None = None
        self.data: MembersData | None = None  # of a cluster
        self._data_lock = threading.Lock()  # the training thread draws while the carrying one decides
        self._said: tuple[LeaseStatement, ...] = ()  # of leased data, at the last meeting
        self._not_held: set[int] = set()  # fragments of which the replica does not hold what is ahead

    @property
    def versions(self) -> dict[int, int]:
        """(`ClusterMembers`.)"""
        return {fragment: state.version for fragment, state in enumerate(self.states)}

    @property
    def offers(self) -> Sequence[ReplicaOffer]:
        """Of the last quorum."""
        return self._offers

    @property
    def snapshot(self) -> RunSnapshot:
        """Where this replica is, as it tells the others."""
        versions, hashes = [s.version for s in self.states], [s.anchor_hash for s in self.states]
        counted = [dict(counted) for counted in self._counted]
        data, digest = (None, "") if self.leases is None else (self.leases.kept, self.leases.digest)
        return RunSnapshot(self.run_id, versions, hashes, counted, self.cluster, data, digest)

    def _be_at(self, snapshot: RunSnapshot, anchors: dict[str, Tensor] | None) -> None:
        self.run_id, self.ahead = snapshot.run_id, anchors
        self._not_held = set() if anchors is None else set(range(len(self.forms)))
        if self._leadership is not None:
            self.cluster = snapshot.cluster or ClusterPart.fresh(len(self.forms))
        self._counted = [dict(counted) for counted in snapshot.counted]
        if self.leases is not None:
            with self._data_lock:
                self.leases.go_on_from(snapshot.data)
        for state, version, digest in zip(self.states, snapshot.versions, snapshot.hashes, strict=True):
            state.arrive(version, digest, self._anchors if anchors is None else anchors)

    def caught_up(self) -> None:
        """The replica has adopted all anchors that it was given."""
        self._be_at(self.snapshot, None)

    # --- one exchange ---------------------------------------------------------------------------------------------

    def run(self, brought: Brought, quorums: Quorums, look: Callable[[], None]) -> RoundOutcome:
        """Until it counted or was left out. A few votes may fail; a replica that joins asks until it is in."""
        failed = 0
        while True:
            if self._leadership is not None:
                self._leadership.pause()
                if brought.dry and self._leadership.leads and self.data is not None:
                    self.data.news(POLL_S)
                if self._leadership.is_closed:  # else one that waits for its leader would meet the others for ever
                    raise WorkerError("this replica has left its cluster")
            self.life.meets()
            self._came_from = self.life.place
            quorum = quorums.meet(look)
            self.life.met(quorum.size, healed=quorum.healed is not None, heals=quorum.heals)
            brought.wait()
            owed = self._owed()
            made = self._attempt(brought, quorums, quorum)
            if quorums.vote() and made is not None:
                self.life.agreed()
                if self._leadership is None:
                    return self._agree(brought, made)
                outcome = self._agree_in_cluster(self._leadership, brought, made, quorums, look)
                if outcome is not None:
                    return outcome
                failed = 0
                continue
            self.life.failed()
            self._put_back(owed)
            if made is not None and made.founds:
                self._be_at(RunSnapshot.fresh(len(self.forms)), None)
            self._groups.drop()  # the others must not wait for us there
            failed += 1
            if failed >= VOTES and not brought.joins:
                if not brought.is_empty:
                    log.warning(
                        "%d votes on fragment %d failed; its steps go into the next round", failed, brought.fragment
                    )
                return self._left_out(brought)
            quorums.rest()

    def _attempt(self, brought: Brought, quorums: Quorums, quorum: Quorum) -> VotedRound | None:
        """None: something broke, which the vote will say."""
        counted = False
        try:
            if quorum.healed is not None and not quorums.errored:
                self._heal(quorum.healed)
            counted = not brought.is_empty and self.snapshot.counts(brought.fragment, self._instance, brought.sequence)
            return self._meet(brought, quorums, counted)
        except (RuntimeError, OSError, AssertionError) as error:  # torch's and torchft's, of broken connections
            log.info("the round failed: %s", error)
            quorums.report(error)
            return None

    def _meet(self, brought: Brought, quorums: Quorums, counted: bool) -> VotedRound:
        self._offers = offers = self._tell(brought, quorums, counted)
        self._check_terms(offers)
        self._groups.settle(backend_among(offers))
        founds = all(offer.fresh for offer in offers)
        if founds:
            self._found()
        else:
            self._judge([offer.digest for offer in offers], quorums)
        turn = self.snapshot.turn
        leader, elects = 0, False
        if self._leadership is not None:
            others = (offer for offer in offers if offer.instance != self._instance)
            self.life.heard(ends=brought.last, another_ends=any(offer.last for offer in others))
            leader, leads = leader_among(offers)
            self._term = max(self._term, *(offer.term for offer in offers))
            elects, ends = not leads, all(offer.last for offer in offers)
            said = offers[leader] if leads else None
            self.drain = said.drain if said is not None else self.drain
            self.doubts = said.doubts if said is not None else self.doubts
            if not founds and (ends or any(offer.waits or offer.aside for offer in offers)):
                moved = self._bring(self._leadership, leader, said) if said is not None and said.aside else {}
                made = BroughtAside(said, moved, ends)
                return VotedRound(turn, None, counted=counted, leader=leader, elects=elects, brought=made)
        active = [rank for rank, offer in enumerate(offers) if offer.fragment == turn]
        if not active:
            resumes = not founds and all(offer.joins for offer in offers)
            return VotedRound(turn, None, counted=counted, founds=founds, leader=leader, elects=elects, resumes=resumes)
        weights = rank_weights([offers[rank] for rank in active], self._settings.weight_by)
        mean = self._reduce(turn, active, weights, brought)
        counted = counted or self._groups.rank in active
        return VotedRound(
            turn, mean, tuple(offers[rank] for rank in active), weights, counted, leader=leader, elects=elects
        )

    def _tell(self, brought: Brought, quorums: Quorums, counted: bool) -> list[ReplicaOffer]:
        idle = counted or bool(brought.refused) or brought.is_empty
        if self._voice is not None and self.leases is not None:
            self._said = self._voice.say(self.leased, self.plan.sync_every, self.leases.turn)
        own = ReplicaOffer(
            worker_id=self.own.worker_id,
            label=self._label,
            instance=self._instance,
            run_id=self.own.run_id,
            terms=self._terms,
            joins=brought.joins,
            fresh=self.ahead is None and not self.run_id,
            digest=self.snapshot.digest,
            fragment=NOTHING if idle else brought.fragment,
            sequence=brought.sequence,
            steps=brought.steps,
            samples=brought.samples,
            tokens=brought.tokens,
            trouble=quorums.errored,
            accelerator=self._kinds.accelerator,
            backends=self._kinds.backends,
            place=self._kinds.place,
            record=self.record.digest,
            waits=brought.waits,
            last=brought.last,
            data=self._said,
            trained=() if idle else brought.trained,
            dry=brought.dry,
        )
        if self._leadership is not None:
            reaches, up_bytes_per_s = self._leadership.reach()
            own = msgspec.structs.replace(
                own, reaches=reaches, up_bytes_per_s=up_bytes_per_s, came_from=self._came_from
            )
        if self._leadership is not None and self._leadership.leads:
            own = self._as_leader(self._leadership, own)
        heard = self._groups.exchange(msgspec.msgpack.encode(own), self._settings.transfer_timeout_s)
        offers = [msgspec.msgpack.decode(one, type=ReplicaOffer) for one in heard]
        for offer in offers:
            if offer.trouble:
                raise RuntimeError(f"{offer.worker_id} cannot take part: {offer.trouble}")
        return offers

    def _check_terms(self, offers: Sequence[ReplicaOffer]) -> None:
        """Does everybody mean the same run? A replica that differs from those that were there before says why and ends;
        they go on without it."""
        if len({offer.terms for offer in offers}) == 1:
            return
        heard = self._groups.exchange(msgspec.msgpack.encode(self.own), self._settings.transfer_timeout_s)
        judge = next((rank for rank, offer in enumerate(offers) if not offer.joins), 0)
        first = msgspec.msgpack.decode(heard[judge], type=Rank)
        check_pair(first, self.own, "two replicas", (f"replica {first.label}", f"replica {self.own.label}"))
        odd = next(offer for offer in offers if offer.terms != offers[judge].terms)
        raise RuntimeError(f"replica {odd.label} wants another run, and is left out")

    # --- is it the same everywhere? -------------------------------------------------------------------------------

    def compare(self, quorums: Quorums) -> None:
        """After a round was adopted: has everybody the same anchors now? Whoever died meanwhile is not waited for;
        the next meeting compares again."""
        try:
            heard = self._groups.exchange(self.snapshot.digest.encode(), self._settings.quorum_timeout_s)
        except (RuntimeError, OSError, AssertionError) as error:
            log.info("the anchors were not compared: %s", error)
            return
        try:
            self._judge([one.decode() for one in heard], quorums)
        except RuntimeError as error:
            log.info("%s", error)

    def _judge(self, digests: Sequence[str], quorums: Quorums) -> None:
        odd = odd_ones(digests)
        if not odd:
            return
        who = " and ".join(self._offers[rank].label for rank in odd)
        message = f"{who} {'holds' if len(odd) == 1 else 'hold'} other anchors than the rest, at {self._place}"
        if self._settings.on_divergence == "stop":
            raise AnchorsDiffer(f"{message}; on_divergence='repair' goes on with what most of them hold")
        log.warning("%s; healing", message)
        if self._groups.rank in odd:
            quorums.step = 0  # so that the next quorum heals this replica
        raise RuntimeError(message)

    @property
    def _place(self) -> str:
        return "versions " + ", ".join(map(str, self.snapshot.versions))

    # --- the mean -------------------------------------------------------------------------------------------------

    def _reduce(self, turn: int, active: list[int], weights: tuple[float, ...], brought: Brought) -> ReducedMean | None:
        groups = self._groups
        groups.members = active
        mean: ReducedMean | None = None
        if groups.rank in active:
            assert brought.payload is not None
            brought.payload.wait()
            version = self.states[turn].version + 1
            run_id = self.run_id
            mean = self._reducer(turn, active).reduce(
                self._groups.here(brought.payload.data),
                weights,
                lambda name: Dither.of(run_id, turn, version, name),
                brought.squares,
            )
        else:
            for _ in range(runs_of(self.forms[turn], len(active)) + 1):
                groups.swap([], [])
        groups.members = range(groups.size)
        idle = [rank for rank in groups.members if rank not in active]
        if not idle:
            return mean
        if mean is None:
            size_bytes = self.forms[turn].update.size_bytes
            mean = ReducedMean(groups.take(size_bytes), 0, size_bytes, norm=0.0, norms=())
            groups.swap([], [(active[0], mean.frame)])
        else:
            groups.swap([(rank, mean.frame) for rank in idle] if groups.rank == active[0] else [], [])
        return mean

    def _reducer(self, fragment: int, active: Sequence[int]) -> Reducer:
        """What its codec owed of the mean is lost when others reduce than before: each holds another slice then."""
        circle = (self._groups.rank, self._groups.backend, *(self._offers[rank].instance for rank in active))
        kept = self._reducers.get(fragment)
        if kept is not None and kept[0] == circle:
            return kept[1]
        labels = [self._offers[rank].label for rank in active]
        own = ReducingRank(active.index(self._groups.rank), len(active), labels)
        reducer = Reducer(fragment, self.forms[fragment], self._down, self._groups, own)
        self._reducers[fragment] = circle, reducer
        return reducer

    def _owed(self) -> list[tuple[Reducer, dict[str, Tensor]]]:
        turn = self._reducers.get(self.snapshot.turn)
        return [] if turn is None else [(turn[1], {name: e.clone() for name, e in turn[1].left_out.items()})]

    def _put_back(self, owed: list[tuple[Reducer, dict[str, Tensor]]]) -> None:
        for reducer, left_out in owed:
            reducer.left_out = left_out

    # --- what comes of it -----------------------------------------------------------------------------------------

    def _agree(self, brought: Brought, made: VotedRound) -> RoundOutcome:
        turn, mean = made.turn, made.mean
        stepped = None
        if mean is not None:
            state = self.states[turn]
            stepped = MeanStep(mean.frame, self.forms[turn], state)
            state.arrive(state.version + 1, "")  # its hash is known when the step was applied
            self._not_held.add(turn)
            self._counted[turn] = note_counted(self._counted[turn], made.active)
        self._decide_data(made)
        participants = tuple(
            Participant(worker_id=offer.worker_id, sequence=offer.sequence, weight=weight)
            for offer, weight in zip(made.active, made.weights, strict=True)
        )
        if self.ahead is not None:
            if stepped is not None:
                self._step_ahead(turn, stepped)
                self._groups.give_back(stepped.frame)
            updates = {} if brought.dry else self._all_ahead(brought.fragment)
        elif stepped is not None:
            updates = {turn: stepped}
        else:
            updates = {brought.fragment: self._as_it_is(brought.fragment)}
        sent, received = (mean.bytes_sent, mean.bytes_received) if mean is not None else (0, 0)
        seen = None
        if mean is not None and mean.norms:
            seen = watched(math.sqrt(brought.squares), mean.norms, made.weights, mean.norm)
        return RoundOutcome(made.counted, updates, participants, sent, received, seen)

    def share_data(self, voice: DataVoice) -> None:
        self._voice = voice
        if self._leadership is None:
            self.leases = SharedLeases(voice.datasets)
        else:
            self.leases = leases = SharedSubLeases(voice.datasets)
            self.data = MembersData(leases)

    @property
    def holds_all(self) -> bool:
        """Does the replica hold all that was agreed?"""
        return not self._not_held

    def leased(self, request: LeaseRequest) -> LeaseAnswer:
        assert self.leases is not None
        with self._data_lock:
            return self.leases.answer(self.own.worker_id, request)

    def data_progress(self) -> list[dict[str, Any]]:
        assert self.leases is not None
        with self._data_lock:
            return self.leases.progress()

    def _decide_data(self, made: VotedRound) -> None:
        """All replicas that have this round decide the same. (One that has not is healed, with the table.)"""
        if self._voice is None or self.leases is None:
            return
        offers, leases = self._offers, self.leases
        members = {offer.worker_id: offer.instance for offer in offers}
        said = {offer.worker_id: offer.data for offer in offers}
        brought = {offer.worker_id: offer.trained for offer in made.active}
        round_ = made.turn, self.states[made.turn].version
        with self._data_lock:
            if not isinstance(leases, SharedSubLeases):
                events = leases.decide(members, said, brought, round_, len(self.states))
            else:
                if offers[self._groups.rank].joins and not all(offer.joins for offer in offers):
                    leases.confirm()  # those that were there have not begun anew
                news = offers[made.leader].news if offers[made.leader].leads else ()
                round_ = round_ if made.active else (0, 0)  # what its version made done may be named above already
                events = leases.decide(members, said, brought, round_, len(self.states), news=news)
        if self.data is not None:
            self.data.has_decided()
        self._voice.decided(self._said, events)

    def _left_out(self, brought: Brought) -> RoundOutcome:
        if brought.dry:
            return RoundOutcome(False, {})
        if self.ahead is not None:
            return RoundOutcome(False, self._all_ahead(brought.fragment))
        if brought.is_empty:
            return RoundOutcome(False, {})
        return RoundOutcome(False, {brought.fragment: self._as_it_is(brought.fragment)})

    def _as_it_is(self, fragment: int) -> AnchorUpdate:
        """Nothing has changed."""
        form = self.forms[fragment]
        return UpdateChain((), form.update, form.codecs, self.states[fragment].anchor_hash)

    def _all_ahead(self, last: int) -> dict[int, AnchorUpdate]:
        """Whole anchors of all fragments that the replica does not hold, that of the contribution at the end."""
        assert self.ahead is not None
        wanted = self._not_held | ({last} if last != NOTHING else set())
        order = sorted(wanted, key=lambda fragment: (fragment == last, fragment))
        return {f: WholeAnchor(self._values(self.ahead, f), self.states[f].anchor_hash) for f in order}

    def _step_ahead(self, fragment: int, update: MeanStep) -> None:
        """The outer step, on anchors that the replica does not hold yet."""
        assert self.ahead is not None
        apply_to(update, self.ahead)
        self.states[fragment].anchor_hash = update.digest

    # --- a cluster ------------------------------------------------------------------------------------------------

    def _as_leader(self, leadership: Leadership, own: ReplicaOffer) -> ReplicaOffer:
        own = msgspec.structs.replace(
            own,
            leads=True,
            term=self._own_term,
            holds=leadership.holds,
            ended=leadership.has_ended,
            drain=leadership.ends_because,
            yields=leadership.yields,
            settled=leadership.is_settled,
            named=leadership.named,
            doubts=leadership.doubts,  # after `holds`: a leader releases the others when it knows
            news=self.data.news() if self.data is not None else (),
        )
        self._aside = aside = leadership.aside
        if aside is None:
            return own
        size_bytes = aside.record.data.numel()
        return msgspec.structs.replace(
            own,
            record=aside.record.digest,
            aside=aside.kind,
            size_bytes=size_bytes,
            serial=aside.serial,
            moving=aside.fragments,
        )

    def _bring(
        self, leadership: Leadership, leader: int, said: ReplicaOffer
    ) -> dict[int, tuple[dict[str, Tensor], str]]:
        """What the leader brings, from it to all: its record, to be held from now on whatever the vote says; and T′."""
        own = self._aside if self._groups.rank == leader else None
        if any(offer.record != said.record for offer in self._offers):
            self.record = self._take_record(leader, said, own)
        elif own is not None:  # the others hold it, or there are none
            self.record = own.record
        held = self._groups.exchange(self.record.digest.encode(), self._settings.transfer_timeout_s)
        if any(one.decode() != said.record for one in held):
            raise RuntimeError("not every replica holds the leader's record")
        if not set(said.moving) <= set(range(len(self.forms))):
            raise RuntimeError(f"{said.worker_id} moves fragments that there are not")
        return {fragment: self._take_move(leader, fragment, own) for fragment in said.moving}

    def _take_record(self, leader: int, said: ReplicaOffer, own: Aside | None) -> KeptRecord:
        if not 0 < said.size_bytes <= self._most_record_bytes:
            raise RuntimeError(f"{said.worker_id} wants its record of {said.size_bytes} bytes to be held")
        data = own.record.data if own is not None else torch.empty(said.size_bytes, dtype=torch.uint8)
        self._spread(data, leader)
        return own.record if own is not None else KeptRecord(data)

    def _take_move(self, leader: int, fragment: int, own: Aside | None) -> tuple[dict[str, Tensor], str]:
        """T′ of this fragment. The leader makes it from T as it is now."""
        data, views = empty_anchor(self.forms[fragment])
        if own is not None:
            assert own.moved is not None
            moved = own.moved(self._values(self._anchors if self.ahead is None else self.ahead, fragment))
            for name, view in views.items():
                view.copy_(moved[name])
        self._spread(data, leader)
        if not all(bool(view.isfinite().all()) for view in views.values()):
            raise RuntimeError("a move from above must be of finite numbers")
        return views, anchor_hash(views.values())

    def _agree_in_cluster(
        self, leadership: Leadership, brought: Brought, made: VotedRound, quorums: Quorums, look: Callable[[], None]
    ) -> RoundOutcome | None:
        """None: there is more to come before this replica's own contribution, or before it goes on."""
        if leadership.leads and self._groups.rank != made.leader:
            log.warning("%s leads this cluster from now on", self._offers[made.leader].label)
            leadership.step_down(HANDED_OVER)
        if self.ahead is None:
            self._be_at(self.snapshot, copies(self._anchors))
            self._not_held.clear()
        if made.brought is not None:
            return self._move_on(leadership, brought, made, made.brought)
        outcome = self._agree(brought, made)
        assert self.cluster is not None
        assert self.ahead is not None
        if made.active and made.turn == 0:
            self.cluster = self.cluster.after_round(made.active)
        if made.active:
            leadership.published(self._values(self.ahead, made.turn), {made.turn: self.states[made.turn].version})
        if made.elects:
            self._elect(leadership, made)
        elif made.active and made.turn == 0:
            leadership.round_closed()
        if not self._holds_after(leadership, made):
            return outcome
        waiting = Brought(NOTHING, brought.sequence, waits=True)
        self.run(waiting, quorums, look)
        return outcome if brought.dry else replace(outcome, updates=self._all_ahead(brought.fragment))

    def _elect(self, leadership: Leadership, made: VotedRound) -> None:
        if self._groups.rank == made.leader and not leadership.leads:
            assert self.ahead is not None
            log.warning("this replica leads its cluster from now on")
            self._term += 1
            self._own_term = self._term
            leadership.lead(self.ahead, is_new=made.founds, resumes=made.resumes)

    def _holds_after(self, leadership: Leadership, made: VotedRound) -> bool:
        """Does the leader want the others to wait, now that it knows of the round?"""
        if made.elects:
            return leadership.wait_s > 0.0 or made.resumes
        try:
            heard = self._groups.exchange(b"1" if leadership.holds else b"0", self._settings.transfer_timeout_s)
        except (RuntimeError, OSError, AssertionError) as error:
            log.info("the leader was not heard: %s", error)
            return False
        return heard[made.leader] == b"1"

    def _move_on(
        self, leadership: Leadership, brought: Brought, made: VotedRound, aside: BroughtAside
    ) -> RoundOutcome | None:
        said = aside.said
        assert self.ahead is not None
        assert self.cluster is not None
        for fragment, (values, digest) in aside.moved.items():
            assert said is not None
            self.ahead |= values
            state = self.states[fragment]
            state.arrive(state.version + 1, digest, self.ahead)
            self.cluster = self.cluster.after_move(fragment, said.serial, state.version)
            self._not_held.add(fragment)
            leadership.published(values, {fragment: state.version})
        if made.elects:
            self._elect(leadership, made)
        elif said is not None and said.aside:
            if self._groups.rank == made.leader and self._aside is not None:
                leadership.brought(self._aside)
        elif aside.ends:
            leadership.end()
        goes_on = said is not None and (said.ended if aside.ends else not said.holds)
        if made.elects:
            goes_on = not aside.ends and leadership.wait_s == 0.0
        if not goes_on or not brought.is_empty:
            return None
        return RoundOutcome(False, {} if brought.dry else self._all_ahead(NOTHING))

    # --- where a replica begins -----------------------------------------------------------------------------------

    def _heal(self, state: Mapping[str, Any]) -> None:
        """From here on this replica stands where the others do; it takes the anchors over when it lands."""
        snapshot = read_snapshot(state)
        self._check_table(snapshot)
        anchors, momentum, worker = state["anchors"], state["momentum"], state["worker"]
        log.warning("healed: from versions %s to %s", self.snapshot.versions, snapshot.versions)
        self.healed_from = None if self.run_id else worker  # a replica with an optimizer's state keeps it
        if self._leadership is not None:
            self._leadership.step_down()
            self.record = KeptRecord(state.get("record"))
        self.begin_at(snapshot, copies(anchors), copies(momentum))  # into memory that may be written to

    def _check_table(self, snapshot: RunSnapshot) -> None:
        """Before anything is changed. What is wrong there the vote will say, and the next quorum heals anew."""
        try:
            if self.leases is not None:
                self.leases.check(snapshot.data)
        except BadRequest as error:
            raise RuntimeError(f"the state to heal from cannot be used: {error.message}") from error

    def begin_at(self, snapshot: RunSnapshot, anchors: dict[str, Tensor], momentum: dict[str, Tensor]) -> None:
        for name, tensor in self._tensors.items():
            if name not in anchors or anchors[name].shape != tensor.shape:
                raise WorkerError(f"the state to go on from is of another model: {name!r} is not in it as it is here")
        self._be_at(snapshot, anchors)
        self.outer.momentum.tensors = momentum
        self._reducers.clear()

    def _found(self) -> None:
        """Nobody has a state: the run begins with the weights of the first replica."""
        anchors: dict[str, Tensor] = {}
        for form in self.forms:
            data, views = empty_anchor(form)
            for name, view in views.items() if self._groups.rank == 0 else ():
                view.copy_(self._tensors[name].detach())
            self._spread(data, 0)
            anchors |= views
        begin = RunSnapshot.fresh(len(self.forms))
        begin.run_id = self._offers[0].run_id
        begin.hashes = [anchor_hash(self._values(anchors, f).values()) for f in range(len(self.forms))]
        self.begin_at(begin, anchors, {})

    def _spread(self, data: Tensor, source: int) -> None:
        """From this rank to all others."""
        groups = self._groups
        is_source = groups.rank == source
        for begin in range(0, data.numel(), CHUNK_BYTES):
            here = data[begin : begin + CHUNK_BYTES]
            there = here.to(groups.device)
            others = [(rank, there) for rank in range(groups.size) if rank != source]
            groups.swap(others if is_source else [], [] if is_source else [(source, there)])
            if there is not here:
                here.copy_(there)

    def _values(self, anchors: Mapping[str, Tensor], fragment: int) -> dict[str, Tensor]:
        return {name: anchors[name] for name in self.plan.fragments[fragment]}
