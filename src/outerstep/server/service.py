"""The parameter service: carries out what the coordinator decides.

Two kinds of threads meet here. Connection threads bring messages: under one lock the coordinator decides
(microseconds), outside of it bytes are read, checked and sent. The *rounds* thread (rounds.py) carries out the heavy
effects in the order in which they were decided: decode and add contributions, take the outer step, publish.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace
from torch import Tensor

from ..config import ServerConfig
from ..coordination.control import carry_out
from ..coordination.coordinator import Coordinator
from ..coordination.effects import Accumulate, CloseRound, DropUpload, Event, StopServer, is_news
from ..coordination.fragment import Fragment
from ..coordination.plan import Settled, settle
from ..core.codecs.recipe import Recipe
from ..core.delayed import DelayedNesterov
from ..core.outer import OuterOptimizer
from ..errors import (
    BadRequest,
    Busy,
    ConfigError,
    PlanMismatch,
    Refused,
    ServerError,
    ServerFailed,
    StaleRound,
    Superseded,
)
from ..observe import EventLog
from ..types import (
    Answer,
    Commit,
    CommitAnswer,
    Control,
    ControlAnswer,
    GetPart,
    GetPartAnswer,
    Heartbeat,
    Join,
    JoinAnswer,
    Leave,
    Manifest,
    Offer,
    Participant,
    Plan,
    Poll,
    PollAnswer,
    PutPart,
    PutPartAnswer,
    Request,
)
from ..wire.service import Body
from .founding import check_room, draw_up
from .intake import Intake
from .keeping import Keeper, recall, restore
from .model_state import ModelState
from .motion import Motion
from .pool import Shelf, return_free_memory
from .rounds import RoundsThread
from .saved import SavedState
from .status import build_status
from .store import FragmentStore

log = logging.getLogger(__name__)

LONGEST_POLL_S = 20.0


class ParameterService:
    def __init__(
        self,
        config: ServerConfig,
        model: ModelState,
        make_optimizer: Callable[[Manifest], OuterOptimizer | DelayedNesterov],
        *,
        run_id: str,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[], None] = lambda: None,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self.model = model
        self.clock = clock
        self.coordinator = Coordinator(
            run_id=run_id,
            rules=config.rules,
            heartbeat_timeout_s=config.heartbeat_timeout,
            pool_bytes=config.pool_bytes + config.spool_bytes,
            part_size_bytes=config.part_size_bytes,
            token_budget=config.token_budget,
            drain_timeout_s=config.drain_timeout_s,
        )
        self.coordinator.remembers = config.save_dir is not None
        self.stores: list[FragmentStore] = []
        self.failure = ""
        self.heritage: SavedState | None = None  # an imported state that waits for the first worker's manifest
        self._closing = False
        self._ended = False  # what would be decided now, nobody would carry out
        self.started_at = clock()
        self.bytes_sent = 0
        self.delta_norms: dict[str, float] = {}  # of each worker's last contribution
        self.make_optimizer = make_optimizer
        self.optimizer: OuterOptimizer | DelayedNesterov | None = None
        self._on_change = on_change
        self._on_stop = on_stop
        self.events = EventLog(config.event_log)
        self.keeper = Keeper(config, self.events)
        self.changed = threading.Condition()  # its lock guards the coordinator and everything below
        self.intake = Intake(
            config,
            self.coordinator,
            self.changed,
            lambda: self.clock(),
            lambda fragment, sections: self.stores[fragment].decoder(sections),
        )
        self._rounds = RoundsThread(self)

    def start(self) -> None:
        coordinator = self.coordinator
        resumed = coordinator.plan is not None or self.heritage is not None
        self.events.write("server", run_id=coordinator.run_id, round=coordinator.sync_round, resumed=resumed)
        self._rounds.start()

    def release_polls(self) -> None:
        """Answer everybody who waits: the server is about to stop listening."""
        with self.changed:
            self._closing = True
            self.changed.notify_all()

    def stop(self) -> None:
        """Finish the rounds that were decided, save, then end."""
        with self.changed:
            self._ended = True
            self.changed.notify_all()
        self._rounds.stop()
        self.intake.close()
        versions = tuple(fragment.published.version for fragment in self.coordinator.fragments)
        if self.config.save_dir is not None and not self.failure and versions != self.keeper.saved_versions:
            self._rounds.save("the server stops")
        self.events.write("stop", round=self.coordinator.sync_round)
        self.events.close()

    # --- messages -------------------------------------------------------------------------------------------------

    def answer(self, request: Request) -> Answer:
        self._check_health()
        try:
            return self._answer(request)
        except Refused as refusal:
            self.note_refusal(request, refusal)
            raise

    def note_refusal(self, request: Request, refusal: Refused) -> None:
        """For the event log; what is part of a healthy run's life is left out."""
        if not isinstance(refusal, Busy | StaleRound | Superseded):
            who = getattr(request, "worker_id", None)
            self.events.write(
                "refused", request=type(request).__name__, worker=who, code=refusal.code, why=str(refusal)
            )

    def _answer(self, request: Request) -> Answer:
        match request:
            case Join():
                return self._decide(lambda now: self._join(request, now))
            case Heartbeat():
                return self._decide(lambda now: self.coordinator.heartbeat(request, now))
            case Leave():
                return self._decide(lambda now: self.coordinator.leave(request, now))
            case Offer():
                return self._decide(lambda now: self.coordinator.offer(request, now))
            case Commit():
                return self._commit(request)
            case Poll():
                return self._poll(request)
            case Control():
                return self._control(request)
            case PutPart() | GetPart():
                raise BadRequest(f"{type(request).__name__} carries bytes")

    def put_part(self, request: PutPart, body: Body) -> PutPartAnswer:
        self._check_health()
        return self.intake.put(request, body)

    def get_part(self, request: GetPart) -> tuple[GetPartAnswer, memoryview]:
        self._check_health()
        with self.changed:
            now = self.clock()
            self.coordinator.get_part(request, now)
        part_hash, data = self.stores[request.fragment].part(request, now)
        with self.changed:
            self.bytes_sent += len(data)
        return GetPartAnswer(hash=part_hash), data

    @property
    def buffered_pushes(self) -> int:
        """How many pushes Delayed Nesterov holds back: the most of any fragment."""
        if not isinstance(self.optimizer, DelayedNesterov):
            return 0
        return max((self.optimizer.buffered(store.index) for store in self.stores), default=0)

    def status(self) -> dict[str, object]:
        with self.changed:
            return build_status(self)

    def _control(self, request: Control) -> ControlAnswer:
        self.events.write("control", command=request.kind, worker=request.worker_id, reason=request.reason)
        if request.kind == "save":
            return ControlAnswer(done=f"saved as {self.save(request.reason or 'an operator asked for it')}")
        answer = self._decide(lambda now: carry_out(self.coordinator, request, now))
        assert isinstance(answer, ControlAnswer)
        return answer

    def save(self, reason: str) -> Path:
        """Write the state between two rounds; returns where it lies."""
        self._check_health()  # a server that failed may have moved half of its state
        with self.changed:
            if self.config.save_dir is None:
                raise BadRequest("there is no place to save to", hint="start the server with --save-dir FOLDER")
            if self.coordinator.plan is None:
                raise BadRequest("nobody has joined yet: there is nothing to save")
        made = self._rounds.save(reason)
        if isinstance(made, ServerError):
            raise made
        return made

    def restore(self, saved: SavedState) -> None:
        """Go on where a saved run was. Before anybody has joined."""
        with self.changed:
            if self.coordinator.plan is not None:
                raise ConfigError("a state is loaded before the first worker joins; make a new server for it")
            restore(self, saved, self.clock())
            self.keeper.saved_round = saved.round

    # --- time -----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        with self.changed:
            self.coordinator.tick(now)
            self._flush()

    def next_wake(self, now: float) -> float | None:
        with self.changed:
            return self.coordinator.next_wake(now)

    def global_params(self) -> dict[str, Tensor]:
        """A copy of the newest global weights, fp32, by every name the model has for them."""
        with self.changed:
            stores, manifest = self.stores, self.coordinator.manifest
        newest = {name: theta for store in stores for name, theta in store.copy_params().items()}
        return self.model.with_trained(newest, manifest.aliases if manifest is not None else {})

    # --- decisions, under the lock --------------------------------------------------------------------------------

    def _decide(self, decide: Callable[[float], Answer]) -> Answer:
        with self.changed:
            self._check_health()  # it may have stopped since the message came in
            try:
                return decide(self.clock())
            finally:
                self._flush()
                self._on_change()

    def _flush(self) -> None:
        """Hand over the coordinator's effects, in its order. Called with the lock held."""
        effects = self.coordinator.take_effects()
        for effect in effects:
            match effect:
                case Accumulate() | CloseRound():
                    self._rounds.put(effect)
                case DropUpload():
                    self.intake.free(effect.key)
                case StopServer():
                    log.info("stopping: %s", effect.reason)
                    self._on_stop()
                case Event():
                    level = logging.WARNING if effect.kind in ("death", "refused", "kick") else logging.INFO
                    log.log(level, "%s %s", effect.kind, " ".join(f"{k}={v}" for k, v in effect.facts.items()))
                    if effect.kind != "refused":  # it is written where the answer is given
                        self.events.write(effect.kind, **effect.facts)
        if any(map(is_news, effects)):
            self.changed.notify_all()

    def _join(self, request: Join, now: float) -> JoinAnswer:
        self.coordinator.check_join(request)
        if self.coordinator.plan is None:
            self._fix_plan(request)
        return self.coordinator.join(request, now)

    def _fix_plan(self, request: Join) -> None:
        """The first worker is here: what its model is and what nobody has settled yet is settled now."""
        settled = settle(
            self.config.wishes,
            request.wishes,
            request.worker_id,
            base_sync_every=self.config.dylu_base_sync_every if self.config.dylu_enabled else None,
        )
        manifest = request.manifest or self.model.manifest()
        self.model.check(manifest)
        heritage = self.heritage
        try:
            plan = draw_up(self.config, settled, manifest)
            optimizer = self.make_optimizer(manifest)
            if heritage is not None:
                recall(optimizer, heritage.optimizer, {spec.name for spec in manifest.parameters})
            first = heritage.round if heritage is not None else 0
            versions = (first,) * len(plan.fragments)
            self.found(plan=plan, settled=settled, manifest=manifest, versions=versions, optimizer=optimizer)
            self.heritage = None  # it is in the stores now; a second copy would only take room
        except ConfigError as error:
            raise PlanMismatch(str(error)) from error

    def found(
        self,
        *,
        plan: Plan,
        settled: Settled,
        manifest: Manifest,
        versions: Sequence[int],
        optimizer: OuterOptimizer | DelayedNesterov,
        targets: Mapping[str, Tensor] | None = None,
    ) -> None:
        """The model and its fragments come to be."""
        check_room(self.config, plan, manifest)
        self.optimizer = optimizer
        up, down = Recipe.parse(plan.codec), Recipe.parse(plan.down_codec)
        specs = {spec.name: spec for spec in manifest.parameters}
        initial, shelf = self.model.initial(manifest), Shelf()
        self.stores = [
            FragmentStore(
                i,
                [specs[name] for name in names],
                initial,
                up,
                down,
                self.config.part_size_bytes,
                version=version,
                max_staleness=plan.max_staleness,
                run_id=self.coordinator.run_id,
                targets=targets,
                shelf=shelf,
            )
            for i, (names, version) in enumerate(zip(plan.fragments, versions, strict=True))
        ]
        self.coordinator.fix(
            plan=plan,
            settled=settled,
            manifest=manifest,
            fragments=[
                Fragment.at(store.newest.agreement, store.max_payload_bytes, store.max_sections)
                for store in self.stores
            ],
        )
        del initial
        self.model.forget_trained(manifest)
        return_free_memory()

    def _poll(self, request: Poll) -> PollAnswer:
        """With an agreement goes what leads to it, from what the asker holds; a group is told the hash of each
        section's rows too. That may read the whole fragment, so it is done outside of the lock; if another version
        took the place of this one meanwhile, the answer is about that."""
        until = self.clock() + min(request.wait_s, LONGEST_POLL_S)
        while True:
            answer = self._wait_for_news(request, until)
            if answer.agreement is None:
                return answer
            self._check_health()
            store, version = self.stores[request.fragment], answer.agreement.version
            payloads = store.payloads(version, request.worker_id, request.held, request.held_hash, self.clock())
            hashes = store.range_hashes(version, request.sections) if request.sections > 1 else ()
            if payloads is not None and hashes is not None:
                return replace(answer, agreement=replace(answer.agreement, payloads=payloads, range_hashes=hashes))

    def _wait_for_news(self, request: Poll, until: float) -> PollAnswer:
        """Answer when there is something new to say, or when it is time."""
        with self.changed:
            while True:
                now = self.clock()
                answer = self.coordinator.poll(request, now)
                if answer.agreement is not None or answer.wanted or self.failure or self._closing:
                    return answer
                if now >= until:
                    return replace(answer, retry_after_s=0.0)  # it has waited here
                self.changed.wait(until - now)

    def _commit(self, request: Commit) -> CommitAnswer:
        with self.changed:
            begun = self.coordinator.begin_commit(request, self.clock())
            if isinstance(begun, CommitAnswer):
                return begun
            check_rest = self.intake.conclude(begun)
        try:
            norm = check_rest()
        except Refused as refusal:
            with self.changed:
                self.coordinator.reject(request.key, refusal.message)
                self._flush()
            raise
        answer = self._decide(lambda now: self.coordinator.accept(request, now))
        assert isinstance(answer, CommitAnswer)
        self.delta_norms[request.worker_id] = norm
        return answer

    # --- for the rounds thread ------------------------------------------------------------------------------------

    def announce(self, store: FragmentStore, made: Motion, participants: tuple[Participant, ...]) -> None:
        """The round has its result. Both ends of it at once: whoever is told of a version finds it."""
        with self.changed:
            now = self.clock()
            self.coordinator.published(store.publish(made, participants, now).agreement, now)
            self._flush()

    def fail(self, reason: str) -> None:
        """The model may be half done: say so to everybody and do nothing more."""
        with self.changed:
            self.failure = reason
            self.changed.notify_all()
        for store in self.stores:
            store.down.abandon()

    def _check_health(self) -> None:
        if self._ended:
            raise Busy("the server is stopping", hint="ask again when it is back", retry_after_s=1.0)
        if self.failure:
            raise ServerFailed(f"the server has stopped: {self.failure}", hint="restart it; its log has the cause")
