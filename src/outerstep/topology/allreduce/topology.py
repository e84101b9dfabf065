"""Contributions become agreements among the workers themselves: every rank of a process group is a worker.

All ranks exchange after the same step. They tell each other what they are about to exchange (peers.py), reduce their
contributions to one mean that has the same bytes everywhere (reduce.py), take the outer step each on its own copy with
arithmetic that gives the same bits on every machine (core/state.py), and compare the hash of what came out.

Exchanges are carried by one thread, in the order in which they were begun, over a process group of its own: training
and the user's collectives go on meanwhile. They are also adopted in that order, so that all ranks confer in one.

The ranks may be together one worker of a layer above (cluster.py). Then that thread takes the outer step itself, on a
copy, and an exchange begins when the one before was adopted: what comes from above may move every fragment.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import msgspec
import torch
from torch import Tensor

from ...coordination.shared_leases import SharedLeases, terms_of
from ...coordination.shared_sub_leases import LeaseNews, SharedSubLeases
from ...coordination.weights import rank_weights
from ...coordination.worker.units import LeaseRequest
from ...core.codecs import Dither
from ...core.feedback import ErrorFeedback
from ...core.outer import OuterRule
from ...core.own_outer import outer_everywhere
from ...core.state import FragmentState
from ...core.watch import watched
from ...digest import data_hash
from ...errors import AnchorsDiffer, ConfigError, RoundStuck, WorkerError
from ...types import LeaseAnswer, LeaseStatement, Manifest, Participant, Plan, Trained, WeightBy, Wishes
from ..carrying import CarryingThread, step_aside
from ..encode import Encoded, Squares, as_deltas, sender_to_peers, write_at
from ..forms import forms_of
from ..leadership import POLL_S, ClusterSettings
from ..members_data import MembersData
from ..protocol import Agreed, Contribution, DataVoice, FinishedTicket, Joined, Orders, Sight
from ..reduce import ReducedMean, Reducer, down_rules
from ..terms import (
    ExchangeHeader,
    Rank,
    check_headers,
    check_loaded,
    check_loaded_table,
    check_terms,
    draw_up,
    introduction,
)
from ..update import AnchorUpdate, MeanStep, WholeAnchor, anchor_hash, apply_to, copies, empty_anchor
from .cluster import (
    LEADER,
    LONGEST_WORDS,
    DataWord,
    NewAnchor,
    RankCluster,
    SavedCluster,
    loaded_terms,
    wait_for_device,
)
from .peers import Links, Peers, make_links, peers_of_job

log = logging.getLogger(__name__)

T = TypeVar("T")
NOT_YET_S = 0.001  # so that nobody waits in a tight loop for an exchange whose turn has not come
ALL_RANKS = "ranks"  # hold the leases together
LOOK_S = 1.0  # how often a thread that waits looks whether everybody is still there


@dataclass(frozen=True)
class AllReduceSettings:
    """What a server would say. `timeout_s`: how long to wait for a rank that is alive and does not come."""

    outer: OuterRule
    weight_by: WeightBy
    timeout_s: float
    on_divergence: Literal["stop", "repair"]


class AllReduceTicket:
    """An exchange in its turn."""

    def __init__(
        self, topology: AllReduceTopology, contribution: Contribution, sequence: int, stuck_after_s: float | None
    ) -> None:
        self._topology = topology
        self.fragment, self.data = contribution.fragment, contribution.data
        self.said: tuple[LeaseStatement, ...] = ()  # of leased data, in a cluster
        self.sequence = sequence
        self.base_version = contribution.base_version
        self.stuck_after_s = stuck_after_s
        self.mean: ReducedMean | None = None
        self.ahead: dict[int, NewAnchor] = {}  # in a cluster: what is to be adopted
        self.drain = ""  # and why all ranks are to end
        self.weights: tuple[float, ...] = ()
        self.error: BaseException | None = None
        self.waiting_for = ""
        self.done = threading.Event()

    def look(self, timeout_s: float) -> Sight:
        """Over is what can be adopted: not before those that were begun before it."""
        is_next = self._topology.is_next(self)
        if not is_next:
            time.sleep(NOT_YET_S)
        done = self.done.wait(timeout_s if is_next else 0.0) and (is_next or self.error is not None)
        if not done:
            self._topology.look_after(self)
        return Sight(done, waiting_for=self.waiting_for, failed=done and self.error is not None)

    def finish(self, *, reload: bool = False) -> Agreed:
        """(`reload`: nobody here refuses a contribution and goes on without it.)"""
        while not self.done.wait(LOOK_S):  # in slices, so that Ctrl-C gets through
            self._topology.look_after(self)
        if self.error is not None:
            raise self.error
        return self._topology.settle(self)

    def confirm(self, agreed: Agreed, intact: bool) -> Agreed | None:
        return self._topology.compare(agreed, intact)

    def resume(self, *, stuck_after_s: float | None = None) -> AllReduceTicket:
        """It continues by itself, or it has failed for good."""
        return self

    def pack(self) -> dict[str, Any]:
        """No server keeps a contribution for a rank that is away."""
        return {}

    def cancel(self) -> None:
        """Too late: the others count on it. A rank that leaves says so, and they stop."""


class AllReduceTopology:
    def __init__(
        self,
        *,
        worker_id: str,
        hostname: str,
        tensors: Mapping[str, Tensor],
        anchors: Mapping[str, Tensor],
        settings: AllReduceSettings,
        peers: Peers | None = None,
        links: Links | None = None,
        cluster: ClusterSettings | None = None,
    ) -> None:
        """`tensors`: the model's by name, of which rank 0's are what the run begins with; `anchors`: where the last
        agreed ones are found. `peers`, `links`: the ranks and what carries bytes between them; None = those of the
        default process group. `cluster`: the ranks are together one worker of a layer above."""
        self._worker_id, self._hostname = worker_id, hostname
        self._tensors, self._anchors = tensors, anchors
        self._settings = settings
        self._peers = peers or peers_of_job(settings.timeout_s)
        with self._others_told():
            self._links = links or make_links(self._peers, tensors, settings.timeout_s)
        self._feedback, self._outer = ErrorFeedback(), outer_everywhere(settings.outer, tensors)
        self._states: list[FragmentState] = []
        self._versions: tuple[int, ...] = ()  # of a loaded state
        self._loaded: dict[str, Tensor] | None = None  # anchors of a loaded state
        self._left_out: Mapping[str, Tensor] = {}  # of the means, likewise
        self._begins: dict[int, Agreed] = {}  # what the run begins with, or goes on from
        self._reducers: list[Reducer] = []
        self._ranks: list[Rank] = []
        self._begun = self._landed = 0
        self._cluster_settings, self._cluster = cluster, None  # type: ClusterSettings | None, RankCluster | None
        self._loaded_state: Mapping[str, Any] | None = None
        self._due: deque[Callable[[], None]] = deque()  # in a cluster: exchanges whose turn has not come,
        self._unadopted: set[int] | None = None  # and the fragments of the one under way that were not adopted yet
        self._momentum_held: dict[str, Tensor] = {}  # that of the one under way, before its step
        self._drain = ""
        self._voice: DataVoice | None = None
        self._leases: SharedLeases | None = None
        self._data_below: MembersData | None = None  # in a cluster
        self._thread = CarryingThread("outerstep-allreduce")
        self._thread.submit(lambda: step_aside(self._links.device)).result()

    # --- membership -----------------------------------------------------------------------------------------------

    def join(self, manifest: Manifest | None, wishes: Wishes) -> Joined:
        """Compare what everybody means to do, and begin with rank 0's weights."""
        assert manifest is not None
        with self._others_told():
            plan = draw_up(wishes, self._settings.weight_by, manifest, self._worker_id)
            if self._loaded is not None:
                check_loaded(plan, self._versions, self._loaded.keys())
            own = self._introduction(manifest, plan)
            heard = self._peers.exchange("join", msgspec.msgpack.encode(own))
            self._ranks = [msgspec.msgpack.decode(one, type=Rank) for one in heard]
            check_terms(self._ranks)
            self._decide_data((0, 0), (), plan, self._say(plan))
            self._peers.labels = [f"rank {number}, {one.label}" for number, one in enumerate(self._ranks)]
            forms, rules = forms_of(plan, manifest), down_rules(plan, manifest)
            roles = {spec.name: spec.role for spec in manifest.parameters}
            self._states = [
                FragmentState(
                    {n: roles[n] for n in names}, self._anchors, self._outer, index=f, version=own.versions[f]
                )
                for f, names in enumerate(plan.fragments)
            ]
            self._reducers = [Reducer(f, form, rules, self._links, self._peers) for f, form in enumerate(forms)]
            for reducer in self._reducers:
                reducer.left_out = {n: e for n, e in self._left_out.items() if n in plan.fragments[reducer.fragment]}
            begin = self._loaded if self._loaded is not None else self._tensors
            self._begins = self._in_turn(lambda: {f: self._spread(f, begin, plan) for f in range(len(forms))})
            overtaken = self._join_above(manifest, plan, self._cluster_settings) if self._cluster_settings else ()
        self._loaded = self._loaded_state = None
        return Joined(self._worker_id, plan, manifest, frozenset(overtaken))

    def _join_above(self, manifest: Manifest, plan: Plan, settings: ClusterSettings) -> frozenset[int]:
        """What the layer above has agreed on is what the ranks begin with. Returns the fragments of which unsent steps
        in a loaded state are to be dropped."""
        state, forms = self._loaded_state, [reducer.form for reducer in self._reducers]
        saved = SavedCluster(state, len(forms)) if state is not None and "cluster" in state else None
        if self._data_below is not None and plan.delay:
            raise ConfigError(
                f"fragment_delay must be 0 in an all-reduce job that leases data from a layer above, got {plan.delay}: "
                "its ranks draw in step only if nothing is under way meanwhile"
            )
        cluster = self._cluster = RankCluster(
            settings, self._ranks, forms, self._peers, self._links, saved, self._data_below
        )
        begins = {f: NewAnchor(one.version, one.anchor, one.anchor_hash) for f, one in self._begins.items()}
        moved = self._in_turn(lambda: cluster.begin(manifest, begins, is_new=state is None))
        overtaken = cluster.doubtful(moved)
        for fragment in moved.keys() | overtaken:
            anchor = moved.get(fragment) or begins[fragment]
            self._begins[fragment] = self._agreed(fragment, anchor, plan, counted=fragment in overtaken)
        cluster.adopted()
        self._drain = cluster.word.drain
        return overtaken

    def _agreed(self, fragment: int, anchor: NewAnchor, plan: Plan, *, counted: bool = False) -> Agreed:
        """In a cluster: an anchor that is to be adopted whole."""
        assert self._cluster is not None
        return Agreed(
            fragment=fragment,
            version=anchor.version,
            counted=counted,
            update=WholeAnchor(anchor.values, anchor.digest),
            anchor_hash=anchor.digest,
            above=self._cluster.cluster.above[fragment],
            plan=plan,
        )

    def _introduction(self, manifest: Manifest, plan: Plan) -> Rank:
        own = introduction(self._worker_id, self._hostname, self._peers.size, manifest, plan, self._settings.outer)
        momentum = self._outer.momentum.tensors
        if self._voice is not None:
            own = msgspec.structs.replace(own, outer={**own.outer, **terms_of(self._voice.datasets)})
        if self._cluster_settings is not None:
            terms = loaded_terms(self._cluster_settings, self._loaded_state)
            own = msgspec.structs.replace(own, outer={**own.outer, **terms})
        return msgspec.structs.replace(
            own,
            versions=self._versions or (0,) * len(plan.fragments),
            momentum_hash=anchor_hash(momentum[name] for name in sorted(momentum)) if momentum else "",
        )

    def heartbeat(self, step: int, steps_per_second: float, loss: float | None) -> None:
        """Nobody collects them; the ranks see each other's pulses."""
        self._links.memory.rest()

    def orders(self, *, at_exchange: bool) -> Orders:
        """What the layer above asks of a cluster comes with an agreement: all obey after the same step."""
        return Orders(drain=self._drain)

    def part(self, patience_s: float) -> list[FinishedTicket]:
        """(`Parting`.) What is left goes up, and what is agreed comes down."""
        cluster = self._cluster
        if cluster is None:
            return []
        anchors, versions = self._anchors, [state.version for state in self._states]
        with self._others_told():
            try:
                ahead = self._in_turn(lambda: cluster.end(anchors, versions, patience_s))
            except RoundStuck as error:
                log.warning("%s; leaving without the others", error)
                return []
        plan = self._ranks[self._peers.rank].plan
        self._unadopted = set(ahead)
        return [FinishedTicket(self._agreed(f, ahead[f], plan), self.compare) for f in sorted(ahead)]

    def leave(self, reason: str) -> None:
        if self._cluster is not None:
            self._cluster.close()
        self._thread.stop()
        self._peers.leave(reason)

    # --- exchanges ------------------------------------------------------------------------------------------------

    def begin(self, contribution: Contribution, *, stuck_after_s: float | None = None) -> AllReduceTicket:
        """Encode now (the weights will change); the rest happens when the exchanges before it are over."""
        self._begun += 1
        ticket = AllReduceTicket(self, contribution, self._begun, stuck_after_s)
        if self._cluster is not None:
            ticket.said = self._say()
        squares = Squares()
        with self._others_told():
            payload = self._encode(contribution, ticket.sequence, squares)
        work = partial(self._exchange, ticket, contribution, payload, squares)
        if self._cluster is None:
            self._thread.submit(work)
        else:
            self._due.append(work)
            self._carry_next()
        return ticket

    def _carry_next(self) -> None:
        """In a cluster: when the one before was adopted."""
        if self._unadopted is None and self._due:
            self._unadopted = set()
            self._thread.submit(self._due.popleft())

    def _encode(self, contribution: Contribution, sequence: int, squares: Squares) -> Encoded:
        """This rank's frame, on the links' device, or on its way there."""
        fragment, deltas = contribution.fragment, as_deltas(contribution.deltas)
        form = self._reducers[fragment].form
        if contribution.owes_nothing:
            self._feedback.forget(fragment, form.rules)
        sender = sender_to_peers(
            form, fragment, deltas, self._feedback, run_id=self._run_id, worker_id=self._worker_id, sequence=sequence
        )
        return write_at(self._links, form.up, replace(sender, squares=squares))

    def _exchange(
        self, ticket: AllReduceTicket, contribution: Contribution, payload: Encoded, squares: Squares
    ) -> None:
        """In the carrying thread."""
        try:
            ticket.waiting_for = "the other ranks"
            headers = self._confer(contribution, ticket)
            ticket.weights = rank_weights(headers, self._settings.weight_by)
            version, fragment = contribution.base_version + 1, contribution.fragment
            payload.wait()
            ticket.mean = self._reducers[fragment].reduce(
                payload.data,
                ticket.weights,
                lambda name: Dither.of(self._run_id, fragment, version, name),
                squares.total(),
            )
            if self._cluster is not None:
                self._step_ahead(self._cluster, ticket, ticket.mean, headers)
        except BaseException as error:  # noqa: BLE001 - it surfaces in finish(), in the training thread
            self._peers.fail(error)
            ticket.error = error
        finally:
            payload.release()
            ticket.waiting_for = ""
            ticket.done.set()

    def _confer(self, contribution: Contribution, ticket: AllReduceTicket) -> list[ExchangeHeader]:
        """Is everybody about to exchange the same?"""
        own = ExchangeHeader(
            fragment=contribution.fragment,
            base_version=contribution.base_version,
            steps=contribution.steps,
            samples=contribution.samples,
            tokens=contribution.tokens,
            last=ticket.stuck_after_s is not None,
            started_over=contribution.owes_nothing,
            data=data_hash([msgspec.json.encode([contribution.data, ticket.said])]) if contribution.data else "",
            news=self._news(),
        )
        heard = self._peers.exchange("exchange", msgspec.msgpack.encode(own), stuck_after_s=ticket.stuck_after_s)
        headers = [msgspec.msgpack.decode(one, type=ExchangeHeader) for one in heard]
        check_headers(headers)
        return headers

    def _step_ahead(
        self, cluster: RankCluster, ticket: AllReduceTicket, mean: ReducedMean, headers: list[ExchangeHeader]
    ) -> None:
        """The outer step, on a copy; then what comes from above after it."""
        fragment = ticket.fragment
        state = self._states[fragment]
        wait_for_device(self._anchors)
        values = copies({name: self._anchors[name] for name in state.roles})
        state.arrive(state.version, state.anchor_hash, values)
        if self._settings.outer.keeps_momentum:
            momentum = self._outer.momentum
            self._momentum_held = {name: momentum.of(name, values[name]).clone() for name in state.parameters}
        update = MeanStep(mean.frame, self._reducers[fragment].form, state)
        apply_to(update, values)
        state.arrive(state.version, state.anchor_hash, self._anchors)
        self._links.give_back(mean.frame)
        made = NewAnchor(state.version + 1, values, update.digest)
        if self._is_odd("round", fragment, made.version, made.digest):
            self._spread_momentum(fragment)
            values = self._rank_0s(fragment, values)
            made = NewAnchor(made.version, values, anchor_hash(values.values()))
        plan = self._ranks[self._peers.rank].plan
        self._decide_data((fragment, made.version), ticket.data, plan, ticket.said, headers[LEADER].news)
        versions = [one.version for one in self._states]
        ticket.ahead = cluster.after_round(fragment, made, self._anchors, versions, list(headers))
        ticket.drain = cluster.word.drain

    def is_next(self, ticket: AllReduceTicket) -> bool:
        """Have all that were begun before it been adopted?"""
        return ticket.sequence == self._landed + 1

    def settle(self, ticket: AllReduceTicket) -> Agreed:
        """What became of an exchange that is over."""
        assert ticket.mean is not None
        self._landed = ticket.sequence
        if self._feedback.is_used:
            self._feedback.settle(ticket.fragment, ticket.sequence, counted=True)
        mean, plan = ticket.mean, self._ranks[self._peers.rank].plan
        update: AnchorUpdate
        above, others = tuple[int, ...](), tuple[Agreed, ...]()
        if self._cluster is None:
            if mean.frame.is_cuda:  # it was made on another stream
                mean.frame.record_stream(torch.cuda.current_stream(mean.frame.device))
            update = MeanStep(mean.frame, self._reducers[ticket.fragment].form, self._states[ticket.fragment])
            version = ticket.base_version + 1
        else:
            own = self._agreed(ticket.fragment, ticket.ahead[ticket.fragment], plan)
            update, version, above = own.update, own.version, own.above
            others = tuple(self._agreed(f, a, plan) for f, a in ticket.ahead.items() if f != ticket.fragment)
            self._unadopted, self._drain = set(ticket.ahead), ticket.drain
        if self._cluster is None:
            self._decide_data((ticket.fragment, version), ticket.data, plan, self._say())
        participants = tuple(
            Participant(worker_id=rank.worker_id, sequence=ticket.sequence, weight=weight, norm=norm)
            for rank, weight, norm in zip(self._ranks, ticket.weights, mean.norms, strict=True)
        )
        return Agreed(
            fragment=ticket.fragment,
            version=version,
            counted=True,
            update=update,
            participants=participants,
            above=above,
            bytes_sent=mean.bytes_sent,
            bytes_received=mean.bytes_received,
            plan=plan,
            counted_in=version,
            also=others,
            watched=watched(mean.norms[self._peers.rank], mean.norms, ticket.weights, mean.norm),
        )

    def look_after(self, ticket: AllReduceTicket) -> None:
        """The carrying thread may wait in an operation that does not know of a dead rank: then it is left there."""
        try:
            self._peers.check()
        except WorkerError as error:
            ticket.error = ticket.error or error
            ticket.done.set()

    # --- leased data (SharesData) -------------------------------------------------------------------------------------

    @property
    def data_part(self) -> tuple[int, int]:
        return self._peers.rank, self._peers.size

    def share_data(self, voice: DataVoice) -> None:
        self._voice = voice
        if self._cluster_settings is None:
            self._leases = SharedLeases(voice.datasets)
        else:
            self._leases = leases = SharedSubLeases(voice.datasets)
            self._data_below = MembersData(leases)
        kept = (self._loaded_state or {}).get("data")
        check_loaded_table(self._leases, kept)
        self._leases.go_on_from(kept)
        if kept is not None and isinstance(self._leases, SharedSubLeases):
            self._leases.doubt()

    def is_admitted(self) -> bool:
        """In a cluster that goes on from saved states not before the layer above has said what is still theirs."""
        if not isinstance(self._leases, SharedSubLeases) or self._leases.is_confirmed or self._drain:
            return True
        self.wait_for_data()
        return False

    def leased(self, request: LeaseRequest) -> LeaseAnswer:
        assert self._leases is not None
        return self._leases.answer(ALL_RANKS, request)

    def data_progress(self) -> list[dict[str, Any]]:
        assert self._leases is not None
        return self._leases.progress()

    def wait_for_data(self) -> str | None:
        """In a cluster all ranks have nothing left at the same point, and meet there until the layer above has leased
        them something."""
        leases = self._leases
        if self._cluster is None or not isinstance(leases, SharedSubLeases):
            return None
        with self._others_told():
            said = self._say()
            word = self._in_turn(lambda: self._meet_for_data(said))
        if leases.trouble:
            raise WorkerError(f"the layer above leases nothing more to these ranks: {leases.trouble}")
        self._drain = word.drain or self._drain
        return None if word.drain else word.waiting_for

    def _meet_for_data(self, said: tuple[LeaseStatement, ...]) -> DataWord:
        """In the carrying thread, which is not in an exchange: nothing is drawn meanwhile."""
        cluster, own = self._cluster, DataWord()
        assert cluster is not None
        if self._peers.rank == LEADER:
            assert self._data_below is not None
            news = self._data_below.news(POLL_S)
            own = DataWord(news, self._data_below.waiting_for, cluster.leadership.ends_because[:LONGEST_WORDS])
        heard = self._peers.exchange("data", msgspec.msgpack.encode(own))
        word = msgspec.msgpack.decode(heard[LEADER], type=DataWord)
        self._decide_data((0, 0), (), self._ranks[self._peers.rank].plan, said, word.news)
        return word

    def _news(self) -> tuple[LeaseNews, ...]:
        """On the rank that leads the cluster."""
        return self._data_below.news() if self._data_below is not None and self._peers.rank == LEADER else ()

    def _say(self, plan: Plan | None = None) -> tuple[LeaseStatement, ...]:
        """Of what it has drawn and trained: at the same step on all ranks, so all say the same."""
        if self._voice is None or self._leases is None:
            return ()
        plan = plan or self._ranks[self._peers.rank].plan
        return self._voice.say(self.leased, plan.sync_every, self._leases.turn)

    def _decide_data(
        self,
        round_: tuple[int, int],
        trained: tuple[Trained, ...],
        plan: Plan,
        said: tuple[LeaseStatement, ...],
        news: tuple[LeaseNews, ...] = (),
    ) -> None:
        """The ranks train every unit together, in step: they are one holder of leases, and all of them decide the
        same. (In a cluster the carrying thread does, before its leader hears of the round.)"""
        if self._voice is None or self._leases is None:
            return
        leases, who, fragments = self._leases, {ALL_RANKS: ""}, len(plan.fragments)
        statements, brought = {ALL_RANKS: said}, {ALL_RANKS: trained}
        if isinstance(leases, SharedSubLeases):
            events = leases.decide(who, statements, brought, round_, fragments, news=news)
        else:
            events = leases.decide(who, statements, brought, round_, fragments)
        if self._data_below is not None:
            self._data_below.has_decided()
        self._voice.decided(said, events)

    # --- the anchor -------------------------------------------------------------------------------------------------

    def compare(self, agreed: Agreed, intact: bool) -> Agreed | None:
        """Everybody compares the hash of its anchor with rank 0's."""
        with self._others_told():
            digest, state = agreed.update.digest, self._states[agreed.fragment]
            state.arrive(agreed.version, digest)
            is_odd = self._is_odd("hash", agreed.fragment, agreed.version, digest)
            if isinstance(agreed.update, MeanStep):
                self._links.give_back(agreed.update.frame)
            if is_odd:
                return self._in_turn(lambda: self._repair(agreed))
            if self._cluster is not None and self._unadopted is not None:
                self._adopted(self._cluster, self._unadopted, agreed.fragment)
            return None

    def _adopted(self, cluster: RankCluster, unadopted: set[int], fragment: int) -> None:
        unadopted.discard(fragment)
        if not unadopted:
            cluster.adopted()
            self._momentum_held, self._unadopted = {}, None
            self._carry_next()

    def _is_odd(self, kind: str, fragment: int, version: int, digest: str) -> bool:
        """Has any rank another anchor than rank 0?"""
        heard = self._peers.exchange(kind, f"{fragment} {version} {digest}".encode())
        odd = [rank for rank, one in enumerate(heard) if one != heard[0]]
        if not odd:
            return False
        who = " and ".join(f"{self._peers.labels[rank]} ({heard[rank].decode()})" for rank in odd)
        message = (
            f"fragment {fragment}, version {version}: {who} {'holds' if len(odd) == 1 else 'hold'} another anchor than "
            f"{self._peers.labels[0]} ({heard[0].decode()})"
        )
        if self._settings.on_divergence == "stop":
            raise AnchorsDiffer(f"{message}; on_divergence='repair' goes on with rank 0's")
        log.warning("%s; going on with rank 0's", message)
        return True

    def _repair(self, agreed: Agreed) -> Agreed:
        """Rank 0's anchor and momentum of a fragment, on every rank."""
        self._spread_momentum(agreed.fragment)
        repaired = self._spread(agreed.fragment, self._anchors, agreed.plan)
        return replace(repaired, above=agreed.above)

    def _spread_momentum(self, fragment: int) -> None:
        state = self._states[fragment]
        for name in state.parameters if self._settings.outer.keeps_momentum else ():
            kept = self._outer.momentum.of(name, state.theta[name])
            host = kept.cpu().contiguous()
            self._links.spread(host.view(torch.uint8))
            kept.copy_(host)

    def _rank_0s(self, fragment: int, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rank 0's values of a fragment, on every rank."""
        form = self._reducers[fragment].form
        data, views = empty_anchor(form)
        for name, view in views.items() if self._peers.rank == 0 else ():
            view.copy_(values[name].detach())
        self._links.spread(data[form.full.data_begin :])
        return views

    def _spread(self, fragment: int, values: Mapping[str, Tensor], plan: Plan) -> Agreed:
        """The same as an update."""
        views = self._rank_0s(fragment, values)
        digest = anchor_hash(views.values())
        return Agreed(
            fragment=fragment,
            version=self._states[fragment].version,
            update=WholeAnchor(views, digest),
            anchor_hash=digest,
            plan=plan,
        )

    # --- what must not be forgotten -------------------------------------------------------------------------------

    def state_dict(self, under_way: Collection[int]) -> dict[str, Any]:
        """Anchor and momentum too: there is no server that keeps them."""
        return {
            "rank": self._peers.rank,
            "size": self._peers.size,
            "versions": [state.version for state in self._states],
            "anchors": dict(self._anchors),
            "momentum": {**self._outer.momentum.flat, **self._momentum_held},
            "feedback": self._feedback.state_dict(under_way),
            "left_out": {name: e for reducer in self._reducers for name, e in reducer.left_out.items()},
            **({"data": self._leases.kept} if self._leases is not None else {}),
            **({**self._cluster.state_dict(), "under_way": sorted(under_way)} if self._cluster is not None else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        here, saved = (self._peers.rank, self._peers.size), (state["rank"], state["size"])
        self._versions, self._loaded_state = tuple(state["versions"]), state
        self._loaded = {name: value.clone() for name, value in state["anchors"].items()}
        self._outer.momentum.load(state["momentum"])
        if here == saved:
            self._feedback.load_state_dict(state["feedback"])
            self._left_out = {name: value.clone() for name, value in state["left_out"].items()}
        elif state["feedback"]["residuals"] or state["left_out"]:
            log.warning(
                "the state is of rank %d of %d, this is rank %d of %d: what its codec had left out is lost",
                *saved,
                *here,
            )

    def catch_up(self, fragment: int) -> FinishedTicket:
        """Nobody went on without this rank: what all go on from is rank 0's anchor, which is this one's too."""
        return FinishedTicket(self._begins.pop(fragment), self.compare)

    def reopen(self, fragment: int, packed: Mapping[str, Any], *, late: bool = False) -> None:
        """What was under way was lost with the process: its steps are unsent."""

    # --- inside ---------------------------------------------------------------------------------------------------

    @property
    def _run_id(self) -> str:
        return self._ranks[0].run_id

    def _in_turn(self, work: Callable[[], T]) -> T:
        """Have the carrying thread do this, after what was begun before; wait for it."""
        done = self._thread.submit(work)
        while not wait([done], LOOK_S).done:
            self._peers.check()
        return done.result()

    @contextmanager
    def _others_told(self) -> Iterator[None]:
        """What goes wrong inside is the end of the run: nobody shall wait for this rank."""
        try:
            yield
        except BaseException as error:
            self._peers.fail(error)
            raise
