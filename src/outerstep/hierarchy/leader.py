"""The leader of a cluster: the thread that is a worker of the layer above. coordination/layers/machine.py decides what
the leader does next; this file carries it out on tensors and sockets.

To the layer above, the cluster is an ordinary worker, and this thread trains it. The model is a copy of T, and a step
is a round of the cluster (shadow.py has the arithmetic, docs/concepts/hierarchy.md the picture). The leader does not
know what the cluster is made of (below.py).

The rounds below can continue without the leader: a contribution to the layer above is a copy, and an agreement of that
layer enters as a version of its own between two rounds. It pays for members to wait for that version, up to a limit.
So they learn of the round that precedes an exchange only together with the agreement of that exchange, and take their
next steps from there.

Before each offer and before each move from above, the layer below stores the leader's record:

    worker     the worker's state
    shadow     S
    before     B, where it differs from S: the move in progress
    serial     the number of that move, or of the next one
    moved      the last move in T, by fragment
    version    the version of the layer below
    data       the leases from above (coordination/layers/sub_leasing.py), and which versions of the layer below the
               last contribution contains
    rounds     how many rounds up to that version are not steps of the worker above yet

The next leader resumes from the record as a worker does. If the layer below knows the serial number of a move, T
contains that move; otherwise the leader repeats it. So a contribution counts once and an agreement moves T once,
whenever a leader dies.
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
    True: "it sends nothing up until this succeeds",
    False: "its own rounds continue without the layer above",
}
EXIT_PATIENCE_S = 60.0
EXIT_FACTOR = 0.5  # a cluster that stops loses nothing if nobody answers: the record has what it has sent
LARGEST = 1e30  # the largest weight; a sum of a few of them is still finite
WAIT_S = 60.0


class Leader:
    """The thread that speaks for a cluster. `above`: the address or join string of the server above, or several of
    them, separated by commas, if that server may move. `via`: servers that relay to it (wire/relay.py). `name`: this
    cluster's name there, for the whole run. `every`: rounds of this cluster between two exchanges above; None = as the
    plan above says. `wait_s`: how long members wait for an exchange above before their next steps; 0 = not at all;
    None = 60, or as long as the run above gives a round."""

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
        """`transport`, `patience`: replace HTTP, for tests. `facts`: what the cluster reports about itself.
        `hostname`: the host that the cluster speaks from; None = any of its machines may lead, and the next leader
        fences the last. (The server above refuses a name that is in use on another host while it hears from that
        host.)"""
        self._facts, self._hostname = facts, hostname or name
        self.below, self.name = below, name
        self._above, self._every, self._credentials, self._transport = above, every, credentials, transport
        self._via = tuple(via)
        self._patience = patience or Patience(give_up_after_s=float(NEVER))
        self._news = threading.Condition()  # guards the machine
        self._follows_wait = wait_s is None
        self.machine = ClusterMachine(WAIT_S if wait_s is None else wait_s)
        self._pace = RoundPace()
        self._counted = NOTHING  # the members' work up to the last round that is a step of the worker
        self._saved: dict[str, Any] | None = None  # the record, after it was read
        self._ways: WaysUp | None = None  # if there are several
        self._warnings: list[str] = []  # contradictions between this layer and the one above
        self._planned_leader: str | None = None  # as the last plan named it
        self._is_awaited = True  # members may wait until the leader has joined, or has failed to
        self._is_silent = False  # the leader has stood down
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
        """Contribute the rest, adopt the agreement, leave the layer above. Call this before the layer below stops."""
        with self._news:
            self.machine.stop()
            self._news.notify_all()
        self._thread.join()

    def stand_down(self, why: str) -> None:
        """Fall silent, because another process leads from now on. Do not even leave: the cluster stays. The new leader
        finds in the record what may have been sent."""
        with self._news:
            self._is_silent = True
            if self._topology is not None:
                self._topology.fall_silent()
        self._alone(why)

    @property
    def is_at_rest(self) -> bool:
        """The cluster has joined the layer above, and no exchange is in progress."""
        return self.machine.is_idle

    @property
    def failure(self) -> str:
        """Why the cluster has lost the layer above. "" = it has not."""
        return self.machine.failure

    @property
    def worker(self) -> DiLoCoWorker | None:
        """The worker that the layer above sees. None until the cluster has joined."""
        return self._worker

    def describe(self) -> AboveStatus:
        """What the cluster's status shows about the layer above."""
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
        """Carry out the task and report the result. At worst an error costs the cluster the layer above: its own run
        must continue."""
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
        """Go on alone. A last task that failed is not retried."""
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
        """Carry out the task, then report it."""
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
                log.warning("the layer above has told cluster %s to finish: its workers will finish, too", self.name)
                self.below.shut_down("the layer above has ended its run")
            case Rest(seconds):
                with self._news:
                    self._news.wait_for(lambda: machine.is_stopping or machine.failure, seconds)
            case GoAlone(why):
                if self._is_silent:
                    log.warning("cluster %s is led by another process now: %s", self.name, why)
                else:
                    log.error("cluster %s continues alone, without the layer above: %s", self.name, why)
                self._end_leasing()
                if self._worker is not None:
                    self._worker.abandon(why)
                self._with_data(lambda data: data.lost(why))
                self._release()
        with self._news:
            machine.done()

    # --- up ----------------------------------------------------------------------------------------------------------

    def _join(self, *, resumes: bool) -> bool:
        """Join the layer above. True: the record holds contributions that may or may not have been counted."""
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
            fragment_carry=True,  # members keep the steps that they take while an agreement is in progress
            exit_patience_s=EXIT_PATIENCE_S,
        )
        worker.on_sent, worker.describe_units = self._sent, self._describe
        saved, has_record = self._saved["worker"] if self._saved is not None else None, self._saved is not None
        was_here, gives_up = saved is not None, saved is not None and not resumes
        if gives_up:
            log.warning("the cluster's run does not match its record: it starts from the agreement of the layer above")
            saved = None
        if saved is not None:
            worker.load_state_dict(saved)
        is_first = has_record and not gives_up and saved is None  # according to the record
        worker.start()
        if not was_here:
            self._check_patience(worker, topology)
        self._worker, self._saved = worker, None  # from here on the record contains what the worker sends
        overtaken = set(topology.overtaken)
        if is_first and self.below.record_may_be_old and topology.has_contributed:
            overtaken = set(range(len(worker.plan.fragments)))
        for fragment in overtaken:
            log.warning(
                "no remaining member recorded the cluster's last contribution: the cluster resumes from the agreement"
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
        """Act with exclusive access to the cluster's lease tables. Never call this with `_news` held: the layer below
        holds the tables when it reports to the leader."""
        below, data = self.below.data, self._data
        if below is None or data is None:
            return

        def change(now: float, live: Collection[str]) -> bool:
            act(data)
            noted, data.to_note = data.to_note, False
            return noted

        below.change(change)

    def _lease(self, worker: DiLoCoWorker) -> None:
        """Start to lease data from the layer above for the members."""
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
        """Stop leasing. The cluster is about to leave the layer above."""
        if self._lease_thread is not None:
            self._lease_thread.end()

    def _describe(self, units: Units) -> tuple[Trained, ...]:
        found: list[Trained] = []
        self._with_data(lambda data: found.extend(data.describe(units)))
        return tuple(found)

    def _check_patience(self, worker: DiLoCoWorker, topology: UpwardTopology) -> None:
        """Refuse contradictory patience before the cluster's first join is recorded. A later contradiction is a
        warning."""
        try:
            check_patience(self.below.terms, topology.terms_above(worker.plan))
        except ConfigError as error:
            worker.abandon(str(error))  # the layer above must not wait for it
            raise

    def _compare(self, plan: Plan) -> None:
        """Compare this layer's terms with those of the layer above. Log each contradiction once."""
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
        if self._topology is not None and self._transport is None:  # left over from a failed attempt to join
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
        """What the cluster reports to the layer above."""
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
        """Follow the plan and the operator. The plan may name the way to send. A new leader is named by an operator, or
        by a plan whose choice differs from the last plan's. (The plan that this process found at its join may be older
        than the choice of this process as leader.)"""
        assert self._topology is not None
        mine = next((each for each in worker.plan.assignments or () if each.cluster == self.name), None)
        if self._ways is not None:
            self._ways.order(mine.sends_to if mine is not None else None)
        named, self._topology.named = self._topology.named, ""
        if mine is not None:
            is_new = self._planned_leader is not None and mine.leader != self._planned_leader
            named, self._planned_leader = named or (mine.leader if is_new else ""), mine.leader
        if named:
            log.warning("cluster %s was told that %s must lead it", self.name, printable(named))
            self.below.name_leader(named)

    def _step(self, worker: DiLoCoWorker, rounds: int) -> None:
        """Take one step for each round that has closed since the last look, up to the first exchange: it sends all of
        them."""
        assert self._topology is not None
        begun = self._topology.begun
        for _ in range(rounds):
            worker.optimizer.step()
            if self._topology.begun > begun:
                return

    def _has_rest(self, worker: DiLoCoWorker) -> bool:
        """Does S differ from Θ?"""
        assert self._shadow is not None
        agreed = worker.state_dict()["anchors"]
        return any(not torch.equal(s.detach(), agreed[name].to(s.dtype)) for name, s in self._shadow.tensors.items())

    def _sent(self) -> None:
        """Store the record of a contribution that is ready, in the middle of an exchange, before it is offered."""
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
        """Count the members' work in closed rounds."""
        assert self._topology is not None
        before, done = self._counted, self.below.done()
        self._topology.steps_taken, self._counted = int(done.steps), done
        worker.count(samples=int(done.samples - before.samples), tokens=int(done.tokens - before.tokens))

    # --- down --------------------------------------------------------------------------------------------------------

    def _moving(self) -> list[int]:
        """The fragments of the layer below in which S ≠ B. Raises MoveRefused, before any record contains S, if a model
        cannot hold S: it would stop every later leader."""
        shadow = self._shadow
        assert shadow is not None
        moved = {fragment: shadow.moved_names(names) for fragment, names in enumerate(self.below.fragments)}
        for name in (name for names in moved.values() for name in names):
            if not bool((shadow.tensors[name].abs() <= LARGEST).all()):
                raise MoveRefused(
                    f"values from the layer above must be finite and at most {LARGEST:g}, got others in {name!r}"
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
        version = self.below.version()  # read before the rounds: one round too many does less harm than one too few
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
            log.warning("the cluster's record is of another model: it starts from the agreement of the layer above")
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
        with self._news:  # later rounds are reported later: one too many does less harm than one too few
            rounds = saved.get("rounds", 0) + self.below.rounds_since(saved["version"])
            self.machine.restored(self._moving(), rounds=rounds)
