"""The parameter service: carries out what the coordinator decides.

Two kinds of threads meet here. Connection threads bring messages: under one lock the coordinator decides
(microseconds), outside of it bytes are read, checked and sent. The *rounds* thread (rounds.py) carries out the heavy
effects in the order in which they were decided: decode and add contributions, take the outer step, publish.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace
from torch import Tensor

from ..config import ServerConfig
from ..coordination.server.coordinator import Coordinator
from ..coordination.server.effects import Accumulate, CloseRound, DropUpload, Event, StopServer, is_news
from ..core.delayed import DelayedNesterov
from ..core.robust import ScreenVerdict
from ..durable.run_folder import RunFolder
from ..errors import (
    BadRequest,
    Busy,
    Closing,
    ConfigError,
    Conflict,
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
    Offer,
    Participant,
    Poll,
    PollAnswer,
    PutPart,
    PutPartAnswer,
    Request,
)
from ..wire.messages import MAX_JOIN_BYTES, decode_join, decode_json, place_of
from ..wire.pages import pages
from ..wire.routes import DownloadRoute, MessageRoute, Route, UnreadBody, UploadRoute
from .founding import found_run
from .intake import Intake
from .keeping import Keeper
from .model_state import ModelState
from .outer_state import OptimizerMaker, Outer
from .publish import NextVersion
from .resuming import Found, restore
from .rounds import RoundsThread
from .saved import SavedState
from .status import build_status
from .store import FragmentStore

log = logging.getLogger(__name__)

LONGEST_POLL_S = 20.0
LOUD = ("death", "refused", "kick", "left_out", "too_few", "quarantine", "screen_forgotten")  # events that are warnings


class ParameterService:
    def __init__(
        self,
        config: ServerConfig,
        model: ModelState,
        make_optimizer: OptimizerMaker,
        *,
        run_id: str,
        folder: RunFolder | None = None,
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
        self.coordinator.remembers = folder is not None
        self.stores: list[FragmentStore] = []
        self.failure = ""
        self.trouble = ""  # why nothing can be written at the moment; until it can, no round is announced
        self.heritage: SavedState | None = None  # an imported state that waits for the first worker's manifest
        self.resumed = False
        self._closing = False  # nobody waits here any longer
        self._ended = False  # nothing is taken in any more
        self.started_at = clock()
        self.bytes_sent = 0
        self.make_optimizer = make_optimizer
        self.optimizer: Outer | None = None
        self._on_change = on_change
        self._on_stop = on_stop
        self.events = EventLog(config.event_log)
        self.keeper = Keeper(config, self.events, folder)
        self.changed = threading.Condition()  # its lock guards the coordinator and everything below
        self.intake = Intake(
            config,
            self.coordinator,
            self.changed,
            lambda: self.clock(),
            lambda fragment, sections: self.stores[fragment].decoder(sections),
        )
        self._rounds = RoundsThread(self)
        self.routes = self._make_routes()

    def start(self) -> None:
        coordinator = self.coordinator
        self.events.write("server", run_id=coordinator.run_id, round=coordinator.sync_round, resumed=self.resumed)
        self.keeper.begin(coordinator.run_id)
        self._rounds.start()
        with self.changed:
            if coordinator.plan is not None:
                self._rounds.note()  # under which settings it goes on; and if it went back, from where

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
        sound = not self.failure and not self._rounds.gave_up
        if self.keeper.mode != "none" and sound and versions != self.keeper.saved_versions:
            self._rounds.save("the server stops")
        self.events.write("stop", round=self.coordinator.sync_round)
        self.events.close()
        self.keeper.close()

    # --- messages -------------------------------------------------------------------------------------------------

    def _make_routes(self) -> dict[tuple[str, str], Route]:
        return {
            **pages(self),
            place_of(Join): MessageRoute(Join, self.answer, most_bytes=MAX_JOIN_BYTES, decode=decode_join),
            place_of(Heartbeat): MessageRoute(Heartbeat, self.answer, is_quick=True),
            place_of(Leave): MessageRoute(Leave, self.answer, is_quick=True),
            place_of(Offer): MessageRoute(Offer, self.answer, is_quick=True, decode=self._decode_offer),
            place_of(PutPart): UploadRoute(PutPart, self.put_part),
            place_of(Commit): MessageRoute(Commit, self.answer),
            place_of(Poll): MessageRoute(Poll, self.answer),
            place_of(GetPart): DownloadRoute(GetPart, self.get_part),
            place_of(Control): MessageRoute(Control, self.answer, speaker=None, is_order=True),
        }

    def _decode_offer(self, data: bytes | bytearray) -> Offer:
        """A worker that offers something on top of a version that cannot be is told where the run stands."""
        try:
            return decode_json(data, Offer)
        except BadRequest as error:
            if "base" in error.message:
                hint = f"the run has completed round {self.coordinator.sync_round}"
                raise BadRequest(error.message, hint=hint) from error
            raise

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
                return self._join(request)
            case Heartbeat():
                return self._decide(lambda now: self.coordinator.heartbeat(request, now))
            case Leave():
                return self._leave(request)
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

    def put_part(self, request: PutPart, body: UnreadBody) -> PutPartAnswer:
        self._check_health()
        try:
            return self.intake.put(request, body)
        except Conflict:
            with self.changed:
                self._flush()  # it may have been one too many
            raise

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
        with self.changed:
            answer = self._decide(lambda now: self.coordinator.control(request, now))
            outlives = request.kind in ("kick", "plan", "budget", "shutdown") and self.coordinator.plan is not None
            noted = self._rounds.note() if outlives else 0
        self._rounds.wait_for(noted)
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

    def restore(self, found: Found) -> None:
        """Go on where a saved run was. Before anybody has joined."""
        with self.changed:
            if self.coordinator.plan is not None:
                raise ConfigError("a state is loaded before the first worker joins; make a new server for it")
            restore(self, found.state, found.records, self.clock())
            self.resumed = True
            if found.in_place:
                self.keeper.go_on_from(found.state)

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
                    level = logging.WARNING if effect.kind in LOUD else logging.INFO
                    log.log(level, "%s %s", effect.kind, " ".join(f"{k}={v}" for k, v in effect.facts.items()))
                    if effect.kind != "refused":  # it is written where the answer is given
                        self.events.write(effect.kind, **effect.facts)
        if any(map(is_news, effects)):
            self.changed.notify_all()

    def _join(self, request: Join) -> JoinAnswer:
        """Who has joined is on the disk before it is told so: its incarnation must not be given away twice."""

        def decide(now: float) -> JoinAnswer:
            self.coordinator.check_join(request)
            if self.coordinator.plan is None:
                found_run(self, request)
            return self.coordinator.join(request, now)

        with self.changed:
            before = self._presence(request.worker_id)
            answer = self._decide(decide)
            changed = self._presence(request.worker_id) != before
            noted = self._rounds.note() if changed else self._rounds.noted
        self._rounds.wait_for(noted)
        assert isinstance(answer, JoinAnswer)
        return answer

    def _leave(self, request: Leave) -> Answer:
        """Noted, so that a restarted server does not wait for who has left; but nobody waits for that."""
        with self.changed:
            before = self._presence(request.worker_id)
            answer = self._decide(lambda now: self.coordinator.leave(request, now))
            if self._presence(request.worker_id) != before:
                self._rounds.note()
        return answer

    def _presence(self, worker_id: str) -> tuple[int, bool]:
        member = self.coordinator.members.find(worker_id)
        return (0, False) if member is None else (member.incarnation, member.live)

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
                if answer.agreement is not None or answer.wanted or self.failure or self._closing or self._ended:
                    return answer
                if now >= until:
                    waiting_for = self.trouble[:256] or answer.waiting_for
                    return replace(answer, retry_after_s=0.0, waiting_for=waiting_for)  # it has waited here
                self.changed.wait(until - now)

    def _commit(self, request: Commit) -> CommitAnswer:
        with self.changed:
            try:
                begun = self.coordinator.begin_commit(request, self.clock())
            finally:
                self._flush()
            if isinstance(begun, CommitAnswer):
                return begun
            check_rest = self.intake.conclude(begun)
        try:
            norm = check_rest()
        except Refused as refusal:
            with self.changed:
                self.coordinator.reject(request.key, refusal, self.clock())
                self._flush()
            raise
        answer = self._decide(lambda now: self.coordinator.accept(request, now, norm))
        assert isinstance(answer, CommitAnswer)
        return answer

    # --- for the rounds thread ------------------------------------------------------------------------------------

    def announce(
        self,
        store: FragmentStore,
        made: NextVersion,
        participants: tuple[Participant, ...],
        verdict: ScreenVerdict | None = None,
    ) -> None:
        """The round has its result. Both ends of it at once: whoever is told of a version finds it. `verdict`: of the
        rule that combined it."""
        with self.changed:
            now = self.clock()
            if verdict is not None:
                self.coordinator.note_verdict(store.index, made.version, verdict.refused, verdict.unused)
            self.coordinator.published(store.publish(made, participants, now).agreement, now)
            self._flush()

    @property
    def model_bytes(self) -> int:
        return sum(4 * store.numel for store in self.stores)

    def disk_fails(self, error: OSError) -> None:
        """Nothing can be written: rounds are computed and not announced, joins wait. It is tried again until it can."""
        why = f"the server cannot write to {self.config.save_dir}: {error.strerror or error}; rounds wait until it can"
        with self.changed:
            if why != self.trouble:
                log.error("%s (%s)", why, error)
                self.events.write("disk_fails", why=str(error))
            self.trouble = why

    def disk_works(self) -> None:
        with self.changed:
            if self.trouble:
                log.info("the server can write to %s again", self.config.save_dir)
                self.events.write("disk_works")
            self.trouble = ""

    def fail(self, reason: str) -> None:
        """The model may be half done: say so to everybody and do nothing more."""
        with self.changed:
            self.failure = reason
            self.changed.notify_all()
        for store in self.stores:
            store.down.abandon()

    def _check_health(self) -> None:
        if self._ended and self.coordinator.closing:
            raise Closing(f"the run has come to its end: {self.coordinator.closing}", hint="start the server again")
        if self._ended:
            raise Busy("the server is stopping", hint="ask again when it is back", retry_after_s=1.0)
        if self.failure:
            raise ServerFailed(f"the server has stopped: {self.failure}", hint="restart it; its log has the cause")
