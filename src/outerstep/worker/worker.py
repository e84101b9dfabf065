"""DiLoCoWorker: two lines around a training loop.

with DiLoCoWorker(model, optimizer, "192.168.1.100:8512", sync_every=500) as diloco:
    for batch in data:
        loss = model(batch).loss
        loss.backward()
        optimizer.step()          # every 500th step exchanges what was learned
        optimizer.zero_grad()
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..attached import note_attached
from ..config import WorkerConfig, build
from ..coordination.worker.machine import Offline, Units, Work, WorkerState
from ..data.leased import Leased, LeasedData
from ..defaults import METRICS_FOLDER
from ..errors import ConfigError, ModelError, OuterstepError, WorkerError
from ..events import EventSink, RoundReport, WorkerLeft, WorkerStarted
from ..observe import EventLog, FanOut
from ..observe.loggers import Loggers, check_installed
from ..observe.quantities import counted, duration, size
from ..observe.sinks import METRICS_FILE, MetricsFile
from ..observe.story import Story
from ..schedule import due_fragment
from ..topology.protocol import Divided, LossTeller, Orders, Topology, Tracked, WorkerControl
from ..types import Dataset, MemberFacts, Plan, Trained, assignment_of
from . import saved
from .advice import Advice, AdviceObserver
from .connect import connect, find_ranks, make_identity
from .ending import report_end
from .initial import hand_over_initial
from .inner import InnerState, Stateful
from .optimizers import check_optimizer, steps_in_backward
from .outside import OutsideWatch
from .recut import recut
from .reload import forget_non_finite
from .replica import Replica
from .saved import SavedWorker
from .signals import Interrupts
from .sync import Synchronizer

log = logging.getLogger(__name__)

_attached: WeakSet[torch.optim.Optimizer] = WeakSet()
CUSTOM = "custom"  # the name of a topology that was given as an object
RoundObserver = Callable[[RoundReport], object]
SPEED_MEMORY = 0.95  # of the running mean of a step's duration


class DiLoCoWorker:
    """Trains as before, and every `sync_every` optimizer steps agrees with the other workers.

    None for sync_every, bf16_comm and num_fragments means: as the run's plan says (500, bf16 and one fragment if nobody
    says otherwise). `topology`: "server", "allreduce", "gossip", "torchft", a name that was registered, or an object.
    Every other keyword is a setting of `WorkerConfig`. A clean end of the `with` block contributes the
    remaining steps and leaves the agreed weights in `model`; an exception leaves without contributing.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        server_addr: str | None = None,
        sync_every: int | None = None,
        worker_id: str | None = None,
        bf16_comm: bool | None = None,
        heartbeat_interval_s: float | None = None,
        num_fragments: int | None = None,
        dylu: bool | None = None,
        *,
        topology: Topology | str | None = None,
        stateful: Mapping[str, Stateful] | None = None,
        event_sink: EventSink | None = None,
        on_round: RoundObserver | None = None,
        data: Leased | Sequence[Leased] = (),
        data_part: tuple[int, int] | None = None,
        **settings: Any,
    ) -> None:
        """`event_sink` gets each event (events.py), `on_round` the report of each round. `data`: samplers of what the
        run leases to this worker (outerstep.data). `data_part`: (i, n), this process trains part i of n of that, in
        jobs in which several train the same samples (tensor-parallel, pipeline). `stateful`: what a worker that
        replaces another must know too, by name: a scheduler, a sampler, anything with state_dict() and
        load_state_dict(). Only where workers heal from each other (docs/concepts/torchft.md)."""
        note_attached()
        given = None if isinstance(topology, str) else topology
        if given is not None:
            topology = None if server_addr is not None else CUSTOM
        stated = {
            "topology": topology,
            "server_addr": server_addr,
            "sync_every": sync_every,
            "worker_id": worker_id,
            "bf16_comm": bf16_comm,
            "heartbeat_interval_s": heartbeat_interval_s,
            "num_fragments": num_fragments,
            "dylu": dylu,
        }
        stated = {name: value for name, value in stated.items() if value is not None}
        self.config = build(WorkerConfig, {**stated, **settings})
        check_optimizer(optimizer)
        self.model = model
        self.optimizer = _innermost(optimizer)
        in_backward = steps_in_backward(model, self.optimizer)  # then weights move between two calls of step()
        self._watches = self.config.outside_changes == "adopt" and not in_backward
        self._ranks = ranks = find_ranks(self.config) if given is None else None
        make_replica = partial(Replica, model, self.config.buffers, anchor=self.config.anchor)
        self._replica = make_replica() if ranks is None else ranks.check(make_replica)
        self._saved: SavedWorker | None = None
        identity = make_identity(self.config, ranks)
        self.worker_id = identity.worker_id
        inner = InnerState(model, self.optimizer, self._replica.tensors, stateful or {}, self._work_so_far)
        self._events = FanOut(event_sink)
        self._story = Story(self.config.total_steps)
        check_installed(self.config.log_to)
        self._loggers: Loggers | None = None
        self._event_log: EventLog | None = None
        self._advice, self._on_advice = Advice(self.worker_id), list[AdviceObserver]()
        if on_round is not None:
            self.on_round(on_round)
        self._topology = given or connect(self.config, identity, self._replica, ranks, inner, self._events, self._facts)
        self._control: WorkerControl | None = self._topology if isinstance(self._topology, WorkerControl) else None
        self._interrupts = Interrupts(self.config.preempt_patience_s)
        self._sync: Synchronizer | None = None
        self._watch: OutsideWatch | None = None
        leased = (data,) if isinstance(data, Leased) else tuple(data)
        self._data = self._lease([one.spec for one in leased], data_part) if leased else None
        for one in leased:
            one.belongs_to(self._data)
        self._counts_samples = False  # the script does; else those of leased data are counted as they come
        self._has_met = False  # whether the processes of a group have compared what they saw since the start
        self._hooks: list[RemovableHandle] = []
        self._heart: threading.Thread | None = None
        self._ending = threading.Event()
        self._beat_now = threading.Event()
        self._clock: Callable[[], float] = time.perf_counter
        self._resumed_at = 0.0
        self._step_s = 0.0
        self._last_loss: float | None = None
        self._progress_at = time.monotonic()
        self._in_exchange = False
        self._in_hook = False
        self.should_stop = False  # the run wants this worker to end: it has contributed and left
        self.on_sent: Callable[[], None] = lambda: None  # a new contribution is part of `state_dict`
        self.describe_units: Callable[[Units], tuple[Trained, ...]] = lambda units: ()  # of `trained`, for an offer

    # --- life -----------------------------------------------------------------------------------------------------

    def start(self) -> DiLoCoWorker:
        """Join, load the global weights into the model, hook into the optimizer."""
        if self._sync is not None:
            raise WorkerError("this worker was started before; make a new one")
        if self.optimizer in _attached:
            raise ModelError("this optimizer already has a DiLoCoWorker attached; stop that one first")
        self._check_saved()
        if self.config.topology == "server":
            hand_over_initial(self.model)
        if self._data is not None:
            if self._saved is not None and self._saved.data:
                self._data.load_state(self._saved.data)
            self._data.join(self._topology)
        joined = self._topology.join(self._replica.manifest, self.config.wishes)
        self._sync = Synchronizer(
            self._topology,
            self._replica,
            joined,
            Offline(self.config.server.patience_s, self.config.server.offline_rounds),
            self._interrupts if self._ranks is None else None,  # a group leaves together, by no clock of one process
            on_reload=self._reloaded,
            saved=self._saved,
            events=self._events,
            on_sent=self._sent,
            loss=lambda: self._last_loss,
            story=self._story,
            describe=self._data.describe if self._data is not None else self.describe_units,
        )
        if self._data is not None:
            self._data.resumed(goes_back=bool(joined.overtaken))
            self._data.start(self._topology, self._sync.machine.state, self._share)
        if self._watches:
            changed = self._saved is not None and self._saved.changed
            self._watch = OutsideWatch(self._replica, self.optimizer, changed=changed)
            self._hooks.append(self.optimizer.register_step_pre_hook(self._before_step))
        self._saved = None  # its tensors are in place
        plan = self._sync.machine.plan
        _attached.add(self.optimizer)
        self._hooks.append(self.optimizer.register_step_post_hook(self._after_step))
        self._resumed_at = self._clock()
        interval_s = self._heartbeat_interval_s(plan)
        if interval_s > 0 and self._control is not None:
            beat = partial(self._beat, self._control, interval_s)
            self._heart = threading.Thread(target=beat, name="outerstep-heartbeat", daemon=True)
            self._heart.start()
        if self.config.handle_signals:
            self._interrupts.install()
        log.info("worker %s joined %s: %s", self.worker_id, self.config.place, _describe(plan))
        state = self._sync.machine.state
        versions = [progress.version for progress in state.fragments]
        self._story.began(state.work.steps)
        if self._ranks is None or self._ranks.rank == 0:
            self._keep_metrics()
        self._events(WorkerStarted(self.worker_id, self.config.place, state.work.steps, versions))
        self._sync.report()
        if self.config.server.dylu and not plan.dylu:
            log.warning(
                "this worker asked for dynamic local updates, but the run has none (start the server with --dylu)"
            )
        return self

    def stop(self) -> None:
        """A clean end: contribute the remaining steps, wait for the agreement, leave. Safe to call twice."""
        if self._sync is None or self._ending.is_set():
            self._unhook()
            return
        self._in_exchange = True
        self._interrupts.at_safe_point()
        try:
            self._sync.finish(
                keep_local=self.config.on_exit == "local",
                patience_s=self.config.exit_patience_s,
                changed=self._is_changed(),
            )
            self._sync.report()
        finally:
            self.should_stop = self.should_stop or bool(self._interrupts.asked)
            self._detach(self._interrupts.reason or "done")
        versions = [progress.version for progress in self._sync.machine.state.fragments]
        reason = self._interrupts.reason or "done"
        ended = report_end(
            self.config,
            self.model,
            self._replica,
            versions,
            self._last_loss,
            reason,
            is_alone=self._ranks is None,
        )
        if ended is not None:
            self._events(ended)
        else:
            self._sum_up(self._sync, reason)

    def _keep_metrics(self) -> None:
        """In the folder of a peer, or in the metrics folder, which several workers may share."""
        config, peer_dir = self.config, self.config.gossip.peer_dir
        place = Path(config.metrics_dir or METRICS_FOLDER) / self.worker_id
        if config.metrics_dir is None and peer_dir is not None:
            place = Path(peer_dir)
        if config.metrics_dir is not None or peer_dir is not None:
            self._events.add(MetricsFile(place / METRICS_FILE))
        if config.event_log is not None:
            self._event_log = EventLog(config.event_log)
            self._events.add(self._event_log)
        if config.log_to is not None:
            self._loggers = Loggers(config.log_to, place, config.place, self.worker_id)
            for sink in self._loggers.sinks:
                self._events.add(sink)

    def _sum_up(self, sync: Synchronizer, reason: str) -> None:
        """The last line; where there is no server, the end of the run is told instead (ending.py)."""
        metrics, rounds = sync.machine.state.metrics, min((p.version for p in sync.machine.state.fragments), default=0)
        loss = "" if self._last_loss is None else f", last loss {self._last_loss:.4g}"
        moved = size(metrics.bytes_sent + metrics.bytes_received)
        waited = duration(metrics.seconds_waiting)
        place, at = self.config.place, ""
        if self.config.server_addr is not None:  # the leader of a cluster brings a topology of its own
            at = f". The agreed model is in this process and on the server at {place}: `outerstep export` saves it"
        log.info(
            "%s after %d steps and round %d%s; waited %s in all, %s moved%s",
            "done" if reason == "done" else f"ended ({reason})",
            sync.machine.state.work.steps,
            rounds,
            loss,
            waited,
            moved,
            at,
        )

    def abandon(self, reason: str) -> None:
        """Leave at once, contributing nothing. The model keeps what it holds."""
        if self._sync is not None and not self._ending.is_set():
            self._detach(reason)
        self._unhook()

    def _detach(self, reason: str) -> None:
        self._ending.set()
        self._beat_now.set()
        self._unhook()
        _attached.discard(self.optimizer)
        if self._sync is not None:
            self._sync.cancel()
        if self._data is not None:
            self._data.end()
        self._topology.leave(reason)
        self._events(WorkerLeft(self.worker_id, reason))
        if self._loggers is not None:
            self._loggers.close()
        if self._event_log is not None:
            self._event_log.close()

    def _unhook(self) -> None:
        """Not from within the hook: torch is walking over its hooks then. There it stays, and does nothing more; and
        signals still come to us, for until the loop has ended a second one must not kill what the first asked to end.
        """
        if self._hooks and not self._in_hook:
            for hook in self._hooks:
                hook.remove()
            self._interrupts.restore()

    def __enter__(self) -> DiLoCoWorker:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.stop()
        else:
            self.abandon(f"{type(error).__name__}: {error}".removesuffix(": "))

    # --- what users ask for ---------------------------------------------------------------------------------------

    def force_sync(self) -> None:
        """Exchange every fragment now, under the run's usual deadline."""
        self._in_exchange = True
        try:
            self._started.sync_all(changed=self._is_changed())
            self._started.report()
        finally:
            self._in_exchange = False
            if self._watch is not None:
                self._watch.record(anew=True, closely=True)
            self._progress_at = time.monotonic()
            self._resumed_at = self._clock()

    def on_round(self, observer: RoundObserver) -> None:
        """Call `observer(report)` in the training thread whenever an agreement was adopted, or a round was missed. What
        it raises is logged, and training goes on."""
        self._events.add(lambda event: observer(event) if isinstance(event, RoundReport) else None)

    def on_recommendation(self, observer: AdviceObserver) -> None:
        """Call `observer(recommendation)` in the training thread when the run's controller has a batch size for this
        worker, and what goes with it. It is for the script to follow or not. What it raises is logged."""
        self._on_advice.append(observer)

    def count(self, *, samples: int = 0, tokens: int = 0) -> None:
        """Report what the last batch held, before `optimizer.step()`: for runs that weigh by it or have a token budget.
        Any number of calls per step; they add up."""
        if samples < 0 or tokens < 0:
            raise WorkerError(f"samples and tokens must be ≥ 0, got {samples} and {tokens}")
        self._counts_samples = self._counts_samples or samples > 0
        self._started.machine.count(int(samples), int(tokens))

    @property
    def machine_state(self) -> WorkerState:
        return self._started.machine.state

    def trained(self, units: Units) -> None:
        """These units of leased data are in the weights now, by numbers that `describe_units` knows: for a worker whose
        data others train (hierarchy/leader.py)."""
        self._started.machine.count(0, 0, units)

    def global_weights(self) -> AbstractContextManager[None]:
        """`with worker.global_weights(): evaluate(model)` evaluates the last agreed model instead of the local one."""
        self._started  # noqa: B018 - an anchor exists only after start()
        return self._by_us(self._replica.global_weights)

    def own_change(self) -> AbstractContextManager[None]:
        """`with worker.own_change(): clip(model)` changes weights outside `optimizer.step()` on purpose: the change is
        this worker's learning, and is sent. After any other change the worker continues from the agreed weights
        (outside.py). `@worker.own_change()` does the same for each call of a function."""
        self._started  # noqa: B018 - before start() any weights may be loaded
        return self._by_us(nullcontext)

    @contextmanager
    def _by_us(self, writing: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """What changed before is still somebody else's."""
        if self._watch is not None:
            self._watch.look()
        try:
            with writing():
                yield
        finally:
            if self._watch is not None:
                self._watch.record(anew=True)

    def state_dict(self) -> dict[str, Any]:
        """What a restart needs beside the model and the optimizer, to go on exactly: where in the cycle it is, the
        anchor, what the codec owes, the contributions under way. Plain tensors, numbers and text; the live tensors, so
        save them before the next step. In a group each process has its own. worker/saved.py says what a restart does
        with it."""
        if self._watch is not None and not self._in_exchange:  # in an exchange we move the weights ourselves
            self._watch.look(closely=True)
        state = self._started.state_dict(self.worker_id, changed=self._watch is not None and self._watch.changed)
        return state if self._data is None else state | {"data": self._data.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before the start, into a worker of the same run and worker_id (a worker that was given no id takes it from
        the state), whose model and optimizer have been loaded from the same checkpoint."""
        if self._sync is not None:
            raise WorkerError("load_state_dict comes before the worker is started: build, load, then start it")
        self._load(saved.read(state, self._replica))

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """The same from the states of all processes of a job of another shape, in the order of their ranks: this one
        takes what it holds. Its model and optimizer have been loaded from the same checkpoint, too; nobody can compare
        them with the states."""
        if self._sync is not None:
            raise WorkerError("load_state_dicts comes before the worker is started: build, load, then start it")
        rank = self._ranks.rank if self._ranks is not None else 0
        self._load(saved.read(recut(states, self._replica, rank), self._replica))

    def _load(self, loaded: SavedWorker) -> None:
        if self.config.worker_id not in (None, loaded.worker_id):
            raise ConfigError(
                f"the state is of worker {loaded.worker_id!r}, this is {self.config.worker_id!r}, of whom the server "
                f"cannot tell what it has contributed; start with worker_id={loaded.worker_id!r}, or without the state"
            )
        self._topology.load_state_dict(loaded.topology)
        self._saved, self.worker_id = loaded, loaded.worker_id

    def _check_saved(self) -> None:
        """On every rank alike: either all go on from what they saved together, or none."""
        if self._ranks is not None:
            if len(set(self._ranks.gather(lambda: saved.signature(self._saved), str))) > 1:
                raise ConfigError(
                    "the processes of this group were given states of different moments, or some of them none; each "
                    "loads the state that it saved, of the same step"
                )
            self._ranks.check(self._check_local)
        else:
            self._check_local()

    def _check_local(self) -> None:
        if self._saved is not None:
            saved.check_local(self._saved, self._replica)

    @property
    def plan(self) -> Plan:
        return self._started.machine.plan

    @property
    def exchanges_next(self) -> bool:
        """Will the next step exchange something, and wait for it?"""
        machine = self._started.machine
        cycle, fragments = machine.state.cycle, len(machine.plan.fragments)
        is_due = due_fragment(cycle.step + 1, cycle.sync_every, fragments) is not None
        return is_due and machine.plan.delay == 0 and not machine.in_flight

    @property
    def sync_every(self) -> int:
        """H: this worker's own under dynamic local updates, else the plan's."""
        return self._started.machine.state.cycle.sync_every

    @property
    def sync_metrics(self) -> dict[str, float | int | str | list[int] | None]:
        """Counters of the exchanges so far (`Metrics`), and how the last ones went (watching.py)."""
        machine, metrics = self._started.machine, self._started.machine.state.metrics
        return {
            "worker_id": self.worker_id,
            "local_step": machine.state.work.steps,
            "samples": machine.state.work.samples,
            "tokens": machine.state.work.tokens,
            "sync_every": machine.state.cycle.sync_every,
            "versions": [progress.version for progress in machine.state.fragments],
            "steps_per_second": round(self.steps_per_second, 4),
            **{name: getattr(metrics, name) for name in metrics.__dataclass_fields__},
            **self._started.watching.metrics,
            **({"state": self._topology.life_state} if isinstance(self._topology, Tracked) else {}),
        }

    @property
    def data_progress(self) -> list[dict[str, Any]]:
        """How far the leased data is, where the members hold the table themselves; of a run with a server,
        `outerstep data` shows it."""
        return [] if self._data is None else self._data.progress()

    @property
    def steps_per_second(self) -> float:
        """Over training time only: waiting for a round makes nobody slow."""
        return 1.0 / self._step_s if self._step_s > 0.0 else 0.0

    @property
    def last_loss(self) -> float | None:
        """Set it if you like, to a number or a tensor with one: it is shown in the server's status, and watched."""
        return self._last_loss

    @last_loss.setter
    def last_loss(self, loss: float | torch.Tensor | None) -> None:
        value = None if loss is None else float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        self._last_loss = value if value is not None and math.isfinite(value) else None
        if self._sync is not None:
            self._sync.watching.reported(self._last_loss, self._sync.machine.state.work.steps)

    # --- inside ---------------------------------------------------------------------------------------------------

    @property
    def _started(self) -> Synchronizer:
        if self._sync is None:
            raise WorkerError("this worker has not been started: use `with DiLoCoWorker(…)` or call start()")
        return self._sync

    def _work_so_far(self) -> Work:
        """Of one that waits for the others to join, nothing yet."""
        return self._sync.machine.state.work if self._sync is not None else Work()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        assert self._watch is not None
        if not self._ending.is_set():
            self._watch.look()

    def _is_changed(self, *, closely: bool = True) -> bool:
        """Has somebody else moved the weights? The processes of a group say so together, if it is so for one."""
        watch = self._watch
        if watch is None:
            return False
        if closely:
            watch.look(closely=True)
        self._has_met = True
        return watch.changed if self._ranks is None else any(self._ranks.gather(lambda: watch.changed, bool))

    def _sent(self) -> None:
        """A contribution is on its way, and the loss that goes with it: the server shows both as one round."""
        topology = self._topology
        if self._last_loss is not None and not (isinstance(topology, LossTeller) and topology.tells_loss):
            self._beat_now.set()
        self.on_sent()

    def _reloaded(self) -> None:
        """The agreed weights have replaced the local ones."""
        forget_non_finite(self.optimizer)
        if self._watch is not None:
            self._watch.changed = False

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        assert self._sync is not None
        if self._ending.is_set():
            self._interrupts.insist()
            return
        # A GradScaler that found an overflow leaves `step` out; but a fused optimizer it calls all the same, with what
        # it found, and lets it do nothing.
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            return
        self._in_hook = True
        try:
            self._exchange_and_obey(self._sync)
        finally:
            self._in_hook = False

    def _exchange_and_obey(self, sync: Synchronizer) -> None:
        now = self._clock()
        took_s = now - self._resumed_at
        self._step_s = took_s if self._step_s == 0.0 else SPEED_MEMORY * self._step_s + (1 - SPEED_MEMORY) * took_s
        self._in_exchange = True
        # (The processes of a group compare what they saw where they meet anyway, and at their first step.)
        compares = self._ranks is None or not self._has_met or sync.machine.exchanges_next
        exchanged = True
        if self._data is not None:
            samples, units = self._data.stepped()
            sync.machine.count(0 if self._counts_samples else samples, 0, units)
        try:
            exchanged = sync.stepped(changed=compares and self._is_changed(closely=False))
        finally:
            self._in_exchange = False
            self._progress_at = time.monotonic()
            if self._watch is not None:  # from here on it is a change if the weights move
                self._watch.record(anew=exchanged, closely=exchanged)
        if exchanged:
            if self._data is not None:
                self._data.exchanged(sync.machine.state)
            ranks, sections = self._ranks, self._replica.shards.sections
            divided = self._topology.holders if isinstance(self._topology, Divided) else None
            holders = self._replica.by_id(divided) if divided is not None else None
            alone = ranks is None or (sections == 1 and divided is None)
            gather = None if alone or ranks is None else lambda own: ranks.gather(lambda: own, float)
            sync.watching.exchanged(self.optimizer, sync.machine.state.work, gather, sections, holders)
            sync.report()
            if sync.machine.plan.revision != self._advice.revision:
                self._pass_on_advice(sync)
        orders = self._control.orders(at_exchange=exchanged) if self._control is not None else Orders()
        drain = self._asked_to_leave(exchanged) or orders.drain
        if self.config.server.dylu is not False:
            sync.machine.state.cycle.assigned = orders.sync_every
        if drain:
            log.warning("told to finish (%s): contributing what is left, then leaving", drain)
            self.should_stop = True
            self.stop()
        elif orders.sync:
            self.force_sync()
        if exchanged or drain or orders.sync:
            self._resumed_at = self._clock()
            self._beat_now.set()  # the server's status shows where we are
        else:
            self._resumed_at = now

    def _pass_on_advice(self, sync: Synchronizer) -> None:
        advice = self._advice.heard(sync.machine.plan, self.optimizer, self._facts().batch_size)
        if advice is None:
            return
        log.info("recommended: %s", advice.reason)
        for observer in self._on_advice:
            try:
                observer(advice)
            except Exception:  # the training goes on
                log.exception("on_recommendation failed")

    def _facts(self) -> MemberFacts:
        """What a heartbeat tells of this worker. All processes of a job have batches of the same size."""
        size = 1 if self._ranks is None else self._ranks.size
        batch_size = 0 if self._sync is None else self._sync.watching.batch_size
        return MemberFacts(batch_size=max(size * batch_size, 0), size=size)

    def _lease(self, datasets: Sequence[Dataset], part: tuple[int, int] | None) -> LeasedData:
        has_own = self._replica.is_data_parallel and not isinstance(self._topology, Divided)
        return LeasedData(datasets, self._ranks, self._events, part, has_own_samples=has_own)

    def _share(self, ahead: int) -> int | None:
        """Of the run's global batch: the samples of a step of this process. So many lie between it and the next one."""
        mine = assignment_of(self._started.machine.plan, self.worker_id)
        if mine is None:
            return None
        assert self._data is not None
        cycle = self._started.machine.state.cycle
        return -(-mine.batch_of((cycle.step + ahead) % cycle.sync_every) // self._data.parts)

    def _asked_to_leave(self, exchanged: bool) -> str:
        """Has a signal said so? The processes of a group leave at the same step, so there it is asked where all of them
        meet; if that is too far off, this process ends alone, as it would have without us."""
        if self._ranks is None:
            return self._interrupts.reason
        if exchanged:
            asked = max(self._ranks.gather(lambda: int(self._interrupts.asked), int))
            if asked:
                self._interrupts.ask(asked)
                return self._interrupts.reason
        elif self._interrupts.is_late:
            self._interrupts.insist()
        return ""

    def _heartbeat_interval_s(self, plan: Plan) -> float:
        """Three beats within the server's patience: a default interval must not get anyone evicted."""
        if plan.heartbeat_timeout_s > 0 and self.config.heartbeat_interval_s > 0:
            return min(self.config.heartbeat_interval_s, plan.heartbeat_timeout_s / 3)
        return self.config.heartbeat_interval_s

    def _beat(self, control: WorkerControl, interval_s: float) -> None:
        """A worker is alive if it trains, not if it has a thread: a hung loop stops beating, so that the others
        continue without it. If it wakes up, it rejoins by itself."""
        sync, limit_s, was_stalled = self._sync, self.config.stalled_after_s, False
        assert sync is not None
        self._beat_now.set()  # the first one at once: the server knows nothing of us yet
        while True:
            self._beat_now.wait(interval_s)
            self._beat_now.clear()
            if self._ending.is_set():
                return
            idle_s = time.monotonic() - self._progress_at
            is_stalled = limit_s > 0 and not self._in_exchange and idle_s > limit_s
            if is_stalled and not was_stalled:
                log.warning(
                    "no optimizer step for %.0f s (stalled_after_s=%g): the server will go on without us",
                    idle_s,
                    limit_s,
                )
            was_stalled = is_stalled
            if is_stalled:
                continue
            try:
                control.heartbeat(sync.machine.state.work.steps, self.steps_per_second, self._last_loss)
            except OuterstepError as error:
                # The exchange has its own patience and raises what cannot be mended; a missed beat is not an error.
                log.debug("heartbeat: %s", error)


def _innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Accelerate and others wrap the optimizer; its steps, and only those really taken, happen in the wrapped one."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    return optimizer


def _describe(plan: Plan) -> str:
    return f"sync_every={plan.sync_every}, {counted(len(plan.fragments), 'fragment')}, {plan.codec}"
