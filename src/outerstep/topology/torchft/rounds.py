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
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor

from ...coordination.weights import rank_weights
from ...core.codecs import Dither
from ...core.own_outer import outer_everywhere
from ...core.state import FragmentState, fp32_views
from ...core.watch import watched
from ...digest import data_hash
from ...errors import AnchorsDiffer, ModelError, WorkerError
from ...types import Participant, Watched
from ..encode import Encoded
from ..forms import forms_of
from ..reduce import ReducedMean, Reducer, down_rules, runs_of
from ..terms import Rank, check_pair
from ..update import AnchorUpdate, MeanStep, UpdateChain, WholeAnchor, anchor_hash, cuts
from .process_groups import ProcessGroups
from .quorum import Quorum, Quorums, TorchftSettings
from .state import NOTHING, ReplicaOffer, RunSnapshot, copies, held_here, odd_ones, read_snapshot

log = logging.getLogger(__name__)

VOTES = 3  # of one contribution; then training goes on, and its steps go into the next
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
        if not self.joins:
            self._filled.wait()
        if self._error is not None:
            raise ModelError(f"the contribution could not be encoded: {self._error}") from self._error

    @property
    def joins(self) -> bool:
        return self.fragment == NOTHING


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
    ) -> None:
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
        self._counted: list[dict[str, int]] = [{} for _ in self.states]
        self.healed_from: dict[str, Any] | None = None  # the worker's part of a state
        self._instance, self._settings = instance, settings
        self._groups, self._tensors, self._anchors = groups, tensors, anchors
        self._down = down_rules(own.plan, manifest)
        self._reducers: dict[int, tuple[tuple[object, ...], Reducer]] = {}  # and who reduces there
        run = [own.manifest, own.plan, own.outer]
        self._terms = data_hash([msgspec.msgpack.encode(run, order="deterministic")])
        self._offers: list[ReplicaOffer] = []  # of the last quorum

    @property
    def snapshot(self) -> RunSnapshot:
        """Where this replica is, as it tells the others."""
        versions, hashes = [s.version for s in self.states], [s.anchor_hash for s in self.states]
        return RunSnapshot(self.run_id, versions, hashes, [dict(counted) for counted in self._counted])

    def _be_at(self, snapshot: RunSnapshot, anchors: dict[str, Tensor] | None) -> None:
        self.run_id, self.ahead = snapshot.run_id, anchors
        self._counted = [dict(counted) for counted in snapshot.counted]
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
            quorum = quorums.meet(look)
            brought.wait()
            owed = self._owed()
            made = self._attempt(brought, quorums, quorum)
            if quorums.vote() and made is not None:
                return self._agree(brought, made)
            self._put_back(owed)
            if made is not None and made.founds:
                self._be_at(RunSnapshot.fresh(len(self.forms)), None)
            self._groups.drop()  # the others must not wait for us there
            failed += 1
            if failed >= VOTES and not brought.joins:
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
            counted = not brought.joins and self.snapshot.counts(brought.fragment, self._instance, brought.sequence)
            return self._meet(brought, quorums, counted)
        except (RuntimeError, OSError, AssertionError) as error:  # torch's and torchft's, of broken connections
            log.info("the round failed: %s", error)
            quorums.report(error)
            return None

    def _meet(self, brought: Brought, quorums: Quorums, counted: bool) -> VotedRound:
        self._offers = offers = self._tell(brought, quorums, counted)
        self._check_terms(offers)
        founds = all(offer.fresh for offer in offers)
        if founds:
            self._found()
        else:
            self._judge([offer.digest for offer in offers], quorums)
        turn = self.snapshot.turn
        active = [rank for rank, offer in enumerate(offers) if offer.fragment == turn]
        if not active:
            return VotedRound(turn, None, counted=counted, founds=founds)
        weights = rank_weights([offers[rank] for rank in active], self._settings.weight_by)
        mean = self._reduce(turn, active, weights, brought)
        counted = counted or self._groups.rank in active
        return VotedRound(turn, mean, tuple(offers[rank] for rank in active), weights, counted)

    def _tell(self, brought: Brought, quorums: Quorums, counted: bool) -> list[ReplicaOffer]:
        idle = counted or bool(brought.refused) or brought.joins
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
        )
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
                brought.payload.data, weights, lambda name: Dither.of(run_id, turn, version, name), brought.squares
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
        circle = (self._groups.rank, *(self._offers[rank].instance for rank in active))
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
            self._counted[turn] = {offer.instance: offer.sequence for offer in made.active}
        participants = tuple(
            Participant(worker_id=offer.worker_id, sequence=offer.sequence, weight=weight)
            for offer, weight in zip(made.active, made.weights, strict=True)
        )
        if self.ahead is not None:
            if stepped is not None:
                self._step_ahead(turn, stepped)
                self._groups.give_back(stepped.frame)
            updates = self._all_ahead(brought.fragment)
        elif stepped is not None:
            updates = {turn: stepped}
        else:
            updates = {brought.fragment: self._as_it_is(brought.fragment)}
        sent, received = (mean.bytes_sent, mean.bytes_received) if mean is not None else (0, 0)
        seen = None
        if mean is not None and mean.norms:
            seen = watched(math.sqrt(brought.squares), mean.norms, made.weights, mean.norm)
        return RoundOutcome(made.counted, updates, participants, sent, received, seen)

    def _left_out(self, brought: Brought) -> RoundOutcome:
        if self.ahead is not None:
            return RoundOutcome(False, self._all_ahead(brought.fragment))
        return RoundOutcome(False, {brought.fragment: self._as_it_is(brought.fragment)})

    def _as_it_is(self, fragment: int) -> AnchorUpdate:
        """Nothing has changed."""
        form = self.forms[fragment]
        return UpdateChain((), form.update, form.codecs, self.states[fragment].anchor_hash)

    def _all_ahead(self, last: int) -> dict[int, AnchorUpdate]:
        """Whole anchors of all fragments, that of the contribution at the end."""
        assert self.ahead is not None
        order = sorted(range(len(self.forms)), key=lambda fragment: (fragment == last, fragment))
        return {f: WholeAnchor(self._values(self.ahead, f), self.states[f].anchor_hash) for f in order}

    def _step_ahead(self, fragment: int, update: MeanStep) -> None:
        """The outer step, on anchors that the replica does not hold yet."""
        assert self.ahead is not None
        for name in update.names:
            flat = self.ahead[name].view(-1)
            for start, stop in cuts(flat.numel(), flat.device):
                update.apply(name, start, stop, flat[start:stop], in_place=True)
        self.states[fragment].anchor_hash = update.digest

    # --- where a replica begins -----------------------------------------------------------------------------------

    def _heal(self, state: Mapping[str, Any]) -> None:
        """From here on this replica stands where the others do; it takes the anchors over when it lands."""
        snapshot = read_snapshot(state)
        anchors, momentum, worker = state["anchors"], state["momentum"], state["worker"]
        log.warning("healed: from versions %s to %s", self.snapshot.versions, snapshot.versions)
        self.healed_from = None if self.run_id else worker  # a replica with an optimizer's state keeps it
        self.begin_at(snapshot, copies(anchors), copies(momentum))  # into memory that may be written to

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
            data = torch.empty(form.full.size_bytes, dtype=torch.uint8)
            views = fp32_views(data.numpy().data, form.full.places, form.full.data_begin)
            for name, view in views.items() if self._groups.rank == 0 else ():
                view.copy_(self._tensors[name].detach())
            self._spread(data)
            anchors |= views
        begin = RunSnapshot.fresh(len(self.forms))
        begin.run_id = self._offers[0].run_id
        begin.hashes = [anchor_hash(self._values(anchors, f).values()) for f in range(len(self.forms))]
        self.begin_at(begin, anchors, {})

    def _spread(self, data: Tensor) -> None:
        groups = self._groups
        for begin in range(0, data.numel(), CHUNK_BYTES):
            here = data[begin : begin + CHUNK_BYTES]
            there = here.to(groups.device)
            first = groups.rank == 0
            others = [(rank, there) for rank in range(1, groups.size)]
            groups.swap(others if first else [], [] if first else [(0, there)])
            if there is not here:
                here.copy_(there)

    def _values(self, anchors: Mapping[str, Tensor], fragment: int) -> dict[str, Tensor]:
        return {name: anchors[name] for name in self.plan.fragments[fragment]}
