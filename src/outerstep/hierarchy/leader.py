"""The leader of a cluster: the thread that is a worker of the layer above. What it does next is decided in
coordination/layers/machine.py; here it is carried out, on tensors and sockets.

To the layer above, the cluster is a worker like any other, and this thread trains it: its model is a copy of T, its
steps are the cluster's rounds (shadow.py has the arithmetic, docs/concepts/hierarchy.md the picture). What the cluster
is made of the leader does not know (below.py).

The rounds below can go on without it: a contribution to the layer above is a copy, and what is agreed there enters as
a version of its own between two rounds. For their own good members wait for it, up to a limit: the round after which
the cluster exchanges is told to them together with what comes of that, so that they take their next steps from there.

Before each offer and before each move from above the layer below keeps the leader's record:

    worker     the worker's state
    shadow     S
    before     B, where it differs from S: a move that is under way
    serial     the number of that move, or of the next one
    moved      by fragment: the last move that is in T
    version    of the layer below
    data       of the leases above (coordination/layers/sub_leasing.py), and which versions of the layer below are in
               what was sent
    rounds     up to that version that are no steps of the worker above yet

Whoever leads next resumes from it as a worker does. A move that the layer below knows by its serial number is in T; any
other is made again. So a contribution counts once and an agreement moves T once, whenever the leader dies.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from ..coordination.layers.between import check_patience, wait_for_above_s, warnings_about
from ..coordination.layers.machine import ClusterMachine, RecordFacts
from ..coordination.layers.pace import RoundPace
from ..coordination.layers.sub_leasing import SubLeasing
from ..coordination.layers.tasks import (
    ClusterTask,
    ContributeRest,
    EndBelow,
    FollowBelow,
    GoAlone,
    JoinAbove,
    KeepRecord,
    LeaveAbove,
    LetGo,
    MarkMoved,
    MoveBelow,
    ReadRecord,
    ReleaseMembers,
    Rest,
    Restore,
    SettleAbove,
    TakeRest,
    TakeRounds,
    Withdraw,
)
from ..coordination.server.claims import NOTHING
from ..coordination.worker.exchange import Patience
from ..coordination.worker.machine import Units
from ..coordination.worker.units import LeaseRequest
from ..errors import ConfigError, ExchangeFailed, Fenced, Kicked, OuterstepError
from ..lanes import MOST
from ..observe.status import AboveStatus
from ..printable import printable
from ..security import redact
from ..topology.leadership import MoveRefused
from ..topology.payload import KEPT, Memory
from ..topology.server.build import OTHER_CONNECTIONS
from ..topology.server.topology import ServerTopology
from ..types import LeaseAnswer, MemberFacts, Plan, Trained
from ..wire.transport import Transport
from ..worker import DiLoCoWorker
from .below import Below, NotKept
from .lease_thread import LeaseThread
from .offers import UpwardTopology
from .shadow import RoundsTaken, Shadow
from .ways_up import WaysUp, transport_up

log = logging.getLogger(__name__)

LOOK_S = 0.5
NEVER = 1 << 30
MEANWHILE = {
    True: "nothing is sent up until that works",
    False: "its own rounds go on without the layer above",
}
EXIT_PATIENCE_S = 60.0
EXIT_FACTOR = 0.5  # a cluster that stops loses nothing if nobody answers: the record has what it has sent
LARGEST = 1e30  # of a weight; the sum of a few of them is still a number
WAIT_S = 60.0


class Leader:
    """`above`: the address or join string of the server above, or several, with commas between, where it may have been
    moved to. `via`: servers that relay to it (wire/relay.py). `name`: of this cluster there, for as long as the run
    lasts. `every`: rounds of this cluster between two exchanges up there; None = as that run's plan says. `wait_s`: how
    long members wait for an exchange up there before they take their next steps; 0 = not at all; None = 60, or as long
    as the run there gives a round."""

    def __init__(
        self,
        below: Below,
        above: str,
        name: str,
        *,
        every: int | None = None,
        wait_s: float | None = None,
        via: Sequence[str] = (),
        credentials: str | None = None,
        transport: Transport | None = None,
        patience: Patience | None = None,
        facts: Callable[[], MemberFacts] = MemberFacts,
        hostname: str | None = None,
    ) -> None:
        """`transport`, `patience`: another way up than HTTP, for tests. `facts`: what is told of the cluster there.
        `hostname`: where it speaks from; None = it may be led from any of its machines, so that one of them fences the
        other. (A name that is in use on another host is refused for as long as the server above hears from there.)"""
        self._facts, self._hostname = facts, hostname or name
        self.below, self.name = below, name
        self._above, self._every, self._credentials, self._transport = above, every, credentials, transport
        self._via = tuple(via)
        self._patience = patience or Patience(give_up_after_s=float(NEVER))
        self._news = threading.Condition()  # the machine is asked and told under it
        self._follows_wait = wait_s is None
        self.machine = ClusterMachine(WAIT_S if wait_s is None else wait_s)
        self._pace = RoundPace()
        self._counted = NOTHING  # what the members had done at the last of their rounds that are steps of the worker
        self._saved: dict[str, Any] | None = None  # the record that was read
        self._ways: WaysUp | None = None  # where there are several
        self._warnings: list[str] = []  # what is wrong between this layer and the one above
        self._planned_leader: str | None = None  # by the last plan that was looked at
        self._is_awaited = True  # members may wait until it has joined, or found nobody
        self._is_silent = False  # it has stood down
        self._shadow: Shadow | None = None
        self._is_new = False  # the layer's run began with this leader
        self._worker: DiLoCoWorker | None = None
        self._data = SubLeasing(below.data.leases) if below.data is not None else None
        self._lease_thread: LeaseThread | None = None
        self._topology: UpwardTopology | None = None
        self._thread = threading.Thread(target=self._live, name="outerstep-cluster", daemon=True)

    def __enter__(self) -> Leader:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> Leader:
        self.below.begin(self)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Contribute what is left, take over what is agreed, leave the layer above. Before the layer below stops."""
        with self._news:
            self.machine.stop()
            self._news.notify_all()
        self._thread.join()

    def stand_down(self, why: str) -> None:
        """Another process leads from now on: say nothing more, not even goodbye, for the cluster stays. What may have
        been sent is in the record, where that one finds it."""
        with self._news:
            self._is_silent = True
            if self._topology is not None:
                self._topology.fall_silent()
        self._alone(why)

    @property
    def is_at_rest(self) -> bool:
        """It has joined the layer above, and nothing is under way."""
        return self.machine.is_idle

    @property
    def failure(self) -> str:
        """Why the cluster is on its own; "" = it is not."""
        return self.machine.failure

    @property
    def worker(self) -> DiLoCoWorker | None:
        """What the cluster is to the layer above; None before it has joined."""
        return self._worker

    def describe(self) -> AboveStatus:
        """For the cluster's status."""
        worker = self._worker
        facts: dict[str, Any] = worker.sync_metrics if worker is not None else {}
        return AboveStatus(
            cluster=self.name,
            address=redact(self._above),
            joined=worker is not None and not self.failure,
            state=self.machine.life.place,
            versions=facts.get("versions", []),
            exchanges=facts.get("sync_count", 0),
            missed_rounds=facts.get("missed_rounds", 0),
            bytes_sent=facts.get("bytes_sent", 0),
            bytes_received=facts.get("bytes_received", 0),
            failure=self.failure,
            warnings=list(self._warnings),
            ways=self._ways.describe() if self._ways is not None else [],
        )

    # --- what happens below; in the threads of that layer ------------------------------------------------------------

    def began(self, target: Mapping[str, Tensor], *, is_new: bool, versions: Mapping[int, int] | None = None) -> None:
        with self._news:
            self._shadow, self._is_new = Shadow(self.below.manifest, target, versions), is_new
            if self._data is not None:
                self._data.begin(versions or {})
            self.machine.began(is_new=is_new)
            self._news.notify_all()

    def cannot(self, why: str) -> None:
        self._alone(why)

    def published(self, target: Mapping[str, Tensor], versions: Mapping[int, int] | None = None) -> None:
        assert self._shadow is not None
        self._shadow.published(target, versions or {})

    def round_closed(self, fragment: int = 0) -> None:
        with self._news:
            if fragment:
                self.machine.other_closed()
                return
            exchanges_next = self.machine.is_idle and self._worker is not None and self._worker.exchanges_next
            hold_s = self.machine.round_closed(exchanges_next=exchanges_next)
            self._pace.closed(time.monotonic(), held=hold_s > 0.0)
            if hold_s > 0.0:
                self.below.hold(hold_s)
            self._news.notify_all()

    def emptied(self) -> None:
        with self._news:
            self.machine.emptied()
            self._news.notify_all()

    # --- the thread --------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        while not self.machine.is_over:
            with self._news:
                task = self.machine.next()
                lets_go = self._is_awaited and (self.machine.is_idle or isinstance(task, Rest))
                if task is None and not self.machine.is_over and not lets_go:
                    self._news.wait(LOOK_S)
            if lets_go:
                self._is_awaited = False
                self._release()
            if task is not None:
                self._carry_out(task)
        self._end_leasing()
        if self._worker is None and self._topology is not None:  # a worker closes it when it leaves
            self._topology.close()

    def _carry_out(self, task: ClusterTask) -> None:
        """And report it. What goes wrong is the cluster's loss of the layer above at worst: its own run must go on."""
        try:
            self._do(task)
        except (Fenced, Kicked, ConfigError, MoveRefused) as error:
            self._lose(task, str(error))
        except (OuterstepError, OSError) as error:
            log.warning("cluster %s: %s; %s", self.name, error, MEANWHILE[isinstance(task, KeepRecord)])
            with self._news:
                self.machine.failed(str(error))
        except Exception as error:
            log.exception("the cluster has lost the layer above")
            self._lose(task, f"{type(error).__name__}: {error}")

    def _release(self) -> None:
        with self._news:
            self._pace.released(time.monotonic())
        self.below.release()

    def _lose(self, task: ClusterTask, why: str) -> None:
        """What cannot be done at the very end is not tried again."""
        if isinstance(task, GoAlone):
            with self._news:
                self.machine.failed(why)
        else:
            self._alone(why)

    def _alone(self, why: str) -> None:
        with self._news:
            self.machine.lost(why)
            self._news.notify_all()

    def _do(self, task: ClusterTask) -> None:
        """Reports only once it is carried out."""
        machine, shadow = self.machine, self._shadow
        match task:
            case JoinAbove(resumes):
                unsettled = self._join(resumes=resumes)
                with self._news:
                    machine.joined(self._moving(), unsettled=unsettled)
                return
            case ReadRecord():
                self._read()
                return
            case Restore(is_in):
                self._restore(is_in)
                return
            case SettleAbove() | ContributeRest() | TakeRounds() | TakeRest() | LeaveAbove():
                self._exchange(task)
                return
            case KeepRecord():
                self._write()
            case FollowBelow():
                self._follow()
            case LetGo():
                assert self._topology is not None
                self._topology.let_go()
            case Withdraw(why):
                assert self._topology is not None
                self._topology.withdraw(NotKept(why))
            case MoveBelow(serial, fragments):
                self._move(serial, fragments)
            case MarkMoved():
                assert shadow is not None
                shadow.is_in(shadow.names)
            case ReleaseMembers():
                self._release()
            case EndBelow():
                log.warning("the layer above has told cluster %s to finish: its workers are told so too", self.name)
                self.below.shut_down("the layer above has ended its run")
            case Rest(seconds):
                with self._news:
                    self._news.wait_for(lambda: machine.is_stopping or machine.failure, seconds)
            case GoAlone(why):
                if self._is_silent:
                    log.warning("cluster %s is led by another process now: %s", self.name, why)
                else:
                    log.error("cluster %s goes on alone, without the layer above: %s", self.name, why)
                self._end_leasing()
                if self._worker is not None:
                    self._worker.abandon(why)
                self._with_data(lambda data: data.lost(why))
                self._release()
        with self._news:
            machine.done()

    # --- up ----------------------------------------------------------------------------------------------------------

    def _join(self, *, resumes: bool) -> bool:
        """Says whether contributions in the record may be counted, or not."""
        shadow = self._shadow
        assert shadow is not None
        topology = self._connect()
        with self._news:
            self._topology = topology
            if self._is_silent:
                topology.fall_silent()
        worker = DiLoCoWorker(
            shadow,
            RoundsTaken(shadow),
            None,
            self._every,
            self.name,
            topology=topology,
            event_sink=topology.reported,
            buffers="average" if shadow.averaged else "local",
            handle_signals=False,
            stalled_after_s=0.0,
            offline_rounds=NEVER,
            fragment_carry=True,  # what the members do while an agreement is under way is theirs
            exit_patience_s=EXIT_PATIENCE_S,
        )
        worker.on_sent, worker.describe_units = self._sent, self._describe
        saved, has_record = self._saved["worker"] if self._saved is not None else None, self._saved is not None
        was_here, gives_up = saved is not None, saved is not None and not resumes
        if gives_up:
            log.warning("the cluster's run is not where it was: it begins with what the layer above has agreed on")
            saved = None
        if saved is not None:
            worker.load_state_dict(saved)
        is_first = has_record and not gives_up and saved is None  # as far as the record knows
        worker.start()
        if not was_here:
            self._check_patience(worker, topology)
        self._worker, self._saved = worker, None  # from here on what it sends is written down with its state
        overtaken = set(topology.overtaken)
        if is_first and self.below.record_may_be_old and topology.has_contributed:
            overtaken = set(range(len(worker.plan.fragments)))
        for fragment in overtaken:
            log.warning(
                "what this cluster sent last was recorded by nobody that is left: it goes on from the agreement"
            )
            shadow.forget(worker.plan.fragments[fragment])
        if gives_up or overtaken or not (has_record or self._is_new):
            self._with_data(lambda data: data.begin(shadow.versions, gives_up=True))
        self._lease(worker)
        self._compare(worker.plan)
        self.below.joined(overtaken=gives_up or bool(overtaken))
        log.info("cluster %s has joined %s", self.name, redact(self._above))
        return saved is not None and any(fragment["contributions"] for fragment in saved["fragments"])

    # --- data --------------------------------------------------------------------------------------------------------

    def _with_data(self, act: Callable[[SubLeasing], object]) -> None:
        """With the cluster's lease tables to itself. Not with `_news` held: the layer below holds the tables when it
        tells its news."""
        below, data = self.below.data, self._data
        if below is None or data is None:
            return

        def change(now: float, live: Collection[str]) -> bool:
            act(data)
            noted, data.to_note = data.to_note, False
            return noted

        below.change(change)

    def _lease(self, worker: DiLoCoWorker) -> None:
        """From now on the layer above is asked for what members train."""
        state = worker.machine_state
        self._with_data(lambda data: data.exchanged(state))
        below, data = self.below.data, self._data
        if below is not None and data is not None and self._lease_thread is None:
            self._lease_thread = LeaseThread(data, below.change, self._ask_above).start()

    def _ask_above(self, request: LeaseRequest) -> LeaseAnswer:
        topology = self._topology
        if topology is None or self._is_silent:
            raise ExchangeFailed("this cluster has not joined the layer above")
        return topology.lease(request)

    def _end_leasing(self) -> None:
        """Before it leaves the layer above."""
        if self._lease_thread is not None:
            self._lease_thread.end()

    def _describe(self, units: Units) -> tuple[Trained, ...]:
        found: list[Trained] = []
        self._with_data(lambda data: found.extend(data.describe(units)))
        return tuple(found)

    def _check_patience(self, worker: DiLoCoWorker, topology: UpwardTopology) -> None:
        """Before anything says that this cluster was in the run above: once it was, a contradiction is warned of."""
        try:
            check_patience(self.below.terms, topology.terms_above(worker.plan))
        except ConfigError as error:
            worker.abandon(str(error))  # nobody above is to wait for it
            raise

    def _compare(self, plan: Plan) -> None:
        """This layer's terms with those that the one above has told: what is wrong is said when it is new."""
        assert self._topology is not None
        above = self._topology.terms_above(plan)
        if self._follows_wait:
            self.machine.wait_s = wait_for_above_s(WAIT_S, above)
        found = warnings_about(self.below.terms, above)
        for warning in found:
            if warning not in self._warnings:
                log.warning("cluster %s: %s", self.name, warning)
        self._warnings = found

    def _connect(self) -> UpwardTopology:
        if self._topology is not None and self._transport is None:  # of an attempt to join that failed
            self._topology.close()
        transport = self._transport or transport_up(
            self._above,
            self._via,
            kept_connections=(self._patience.calls_in_flight or MOST) + OTHER_CONNECTIONS,
            credentials=self._credentials,
        )
        self._ways = transport if isinstance(transport, WaysUp) else None

        def make(held: Transport) -> ServerTopology:
            return ServerTopology(
                held,
                worker_id=self.name,
                instance=secrets.token_hex(8),
                hostname=self._hostname,
                patience=self._patience,
                memory=Memory(KEPT),
                facts=self._tell,
                exit_factor=EXIT_FACTOR,
            )

        return UpwardTopology(make, transport, self.below.manifest, lambda: self._pace.per_s)

    def _tell(self) -> MemberFacts:
        """What the layer above hears of this cluster."""
        facts = self._facts()
        if self._ways is None:
            return facts
        links, via = self._ways.told(self.name)
        return replace(facts, links=links, via=via)

    def _exchange(self, task: SettleAbove | ContributeRest | TakeRounds | TakeRest | LeaveAbove) -> None:
        worker = self._worker
        assert worker is not None
        match task:
            case TakeRounds(rounds):
                self._count(worker)
                self._step(worker, rounds)
            case TakeRest():
                self._count(worker)
                self._step(worker, int(self._has_rest(worker)))
            case LeaveAbove():
                self._end_leasing()
                worker.stop()
            case _:
                worker.force_sync()
        facts: dict[str, Any] = worker.sync_metrics
        state = worker.machine_state
        self._with_data(lambda data: data.exchanged(state))
        self._compare(worker.plan)
        with self._news:
            self._obey(worker)
            told_to_end = self._topology is not None and bool(self._topology.told_to_end)
            self.machine.exchanged(self._moving(), deferred=facts["offline_exchanges"], told_to_end=told_to_end)

    def _obey(self, worker: DiLoCoWorker) -> None:
        """Which way to send: as the plan says, if it says anything. Who is to lead: an operator's word, or a plan that
        names another than the one before. (The one that this process found when it joined may be older than its own
        choice.)"""
        assert self._topology is not None
        mine = next((each for each in worker.plan.assignments or () if each.cluster == self.name), None)
        if self._ways is not None:
            self._ways.order(mine.sends_to if mine is not None else None)
        named, self._topology.named = self._topology.named, ""
        if mine is not None:
            is_new = self._planned_leader is not None and mine.leader != self._planned_leader
            named, self._planned_leader = named or (mine.leader if is_new else ""), mine.leader
        if named:
            log.warning("cluster %s is to be led by %s", self.name, printable(named))
            self.below.name_leader(named)

    def _step(self, worker: DiLoCoWorker, rounds: int) -> None:
        """So many rounds have closed since the last look. However many: what they did goes up at once."""
        assert self._topology is not None
        begun = self._topology.begun
        for _ in range(rounds):
            worker.optimizer.step()
            if self._topology.begun > begun:
                return

    def _has_rest(self, worker: DiLoCoWorker) -> bool:
        """Is S anywhere else than Θ?"""
        assert self._shadow is not None
        agreed = worker.state_dict()["anchors"]
        return any(not torch.equal(s.detach(), agreed[name].to(s.dtype)) for name, s in self._shadow.tensors.items())

    def _sent(self) -> None:
        """A contribution is ready to be offered, in the middle of an exchange: first its record is kept."""
        with self._news:
            self.machine.sent()
        withdrawn = False
        while self.machine.is_offering:
            with self._news:
                task = self.machine.next()
            assert task is not None
            withdrawn = isinstance(task, Withdraw)
            self._carry_out(task)
        if withdrawn:
            raise NotKept(self.machine.failure)

    def _count(self, worker: DiLoCoWorker) -> None:
        """What the members have done, as far as rounds have taken it in."""
        assert self._topology is not None
        before, done = self._counted, self.below.done()
        self._topology.steps_taken, self._counted = int(done.steps), done
        worker.count(samples=int(done.samples - before.samples), tokens=int(done.tokens - before.tokens))

    # --- down --------------------------------------------------------------------------------------------------------

    def _moving(self) -> list[int]:
        """The fragments of the layer below in which S ≠ B. Raises MoveRefused before any record says so if S is nothing
        that a model can hold: it would stop whoever takes it over."""
        shadow = self._shadow
        assert shadow is not None
        moved = {fragment: shadow.moved_names(names) for fragment, names in enumerate(self.below.fragments)}
        for name in (name for names in moved.values() for name in names):
            if not bool((shadow.tensors[name].abs() <= LARGEST).all()):
                raise MoveRefused(
                    f"what came from the layer above must be numbers, got NaN, Inf or absurd ones in {name!r}"
                )
        return [fragment for fragment, names in moved.items() if names]

    def _move(self, serial: int, fragments: Collection[int]) -> None:
        assert self._shadow is not None
        self.below.move(serial, fragments, self._shadow.moved)

    def _follow(self) -> None:
        assert self._shadow is not None
        assert self._worker is not None
        with self._worker.own_change():
            self._shadow.follow()
        versions, units = self._shadow.versions, list[tuple[int, int]]()
        self._with_data(lambda data: units.extend(data.followed(versions)))
        self._worker.trained(tuple(units))

    # --- what must survive -------------------------------------------------------------------------------------------

    def _write(self) -> None:
        shadow, worker, machine = self._shadow, self._worker, self.machine
        assert shadow is not None
        version = self.below.version()  # before the rounds are: rather one of them too many than one too few
        versions, leased = dict(shadow.versions), dict[str, Any]()
        self._with_data(lambda data: leased.update(data.state()))
        self.below.keep(
            {
                "data": leased,
                "worker": worker.state_dict() if worker is not None else None,
                "serial": machine.serial,
                "moved": machine.moved,
                "version": version,
                "rounds": machine.rounds,
                "shadow": dict(shadow.tensors),
                "before": {name: shadow.before[name] for name in shadow.moved_names(shadow.names)},
            }
        )
        self._with_data(lambda data: data.kept(versions))

    def _read(self) -> None:
        shadow, saved = self._shadow, self.below.kept()
        assert shadow is not None
        if saved is not None and saved["shadow"].keys() != set(shadow.names):
            log.warning("the cluster's record is of another model: it begins with what the layer above has agreed on")
            saved = None
        self._saved, facts = saved, None
        if saved is not None:
            moved = {int(fragment): serial for fragment, serial in saved["moved"].items()}
            facts = RecordFacts(saved["serial"], moved, has_joined=saved["worker"] is not None)
        known = self.below.moves_known()
        with self._news:
            self.machine.found(facts, known)

    def _restore(self, is_in: Collection[int]) -> None:
        shadow, saved = self._shadow, self._saved
        assert shadow is not None
        assert saved is not None
        with torch.no_grad():
            for name in shadow.names:
                shadow.tensors[name].copy_(saved["shadow"][name])
                shadow.before[name].copy_(saved["before"].get(name, saved["shadow"][name]))
        for fragment, names in enumerate(self.below.fragments):
            if fragment in is_in:
                shadow.is_in(names)
        if saved.get("data"):
            self._with_data(lambda data: data.load_state(saved["data"]))
            shadow.versions = dict(self._data.versions) if self._data is not None else {}
        with self._news:  # what closes from here on is told afterwards: rather one of them too many than one too few
            rounds = saved.get("rounds", 0) + self.below.rounds_since(saved["version"])
            self.machine.restored(self._moving(), rounds=rounds)
