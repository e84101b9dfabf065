"""The parameter service: messages come in, the coordinator decides, answers go out.

Three kinds of threads meet here. Connection threads bring messages: under one lock the coordinator decides
(microseconds), outside of it bytes are read, checked and sent. The *rounds* thread (rounds.py) carries out what follows
a decision: add contributions, take the outer step, write, announce. The *health* thread watches the clock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import UNSET
from msgspec.structs import replace
from torch import Tensor

from ..config import ServerConfig
from ..coordination.autoconfig import ControllerState, LayerDecision
from ..coordination.server.admission import check_tiling
from ..coordination.server.commits import Commits, is_news
from ..coordination.server.coordinator import Coordinator
from ..coordination.server.effects import AskAgain, DropUpload, StopServer
from ..coordination.server.membership import KnownWorker
from ..coordination.server.uploads import take_complete
from ..defaults import METRICS_FOLDER, PART_SIZE_BYTES
from ..durable.run_folder import RunFolder
from ..errors import (
    BadRequest,
    Busy,
    Closing,
    ConfigError,
    QuotaExceeded,
    Refused,
    ServerError,
    ServerFailed,
    StaleRound,
    Superseded,
)
from ..events import (
    ContributionLeftOut,
    ContributionRefused,
    ControlReceived,
    DeviceLeft,
    DiskFails,
    DiskWorks,
    Event,
    EventSink,
    GroupStateChanged,
    GroupStateUnclear,
    MessageRefused,
    NothingLearned,
    ScreenForgotten,
    ServerStarted,
    ServerStopped,
    TooFewTrained,
    WorkerCountedOut,
    WorkerDied,
    WorkerKicked,
    WorkerLeft,
    WorkerQuarantined,
)
from ..observe import EventLog, FanOut
from ..observe.families import families_of
from ..observe.loggers import Loggers
from ..observe.prometheus import CONTENT_TYPE, METRICS_PATH, write_metrics
from ..observe.sinks import METRICS_FILE, EventCounts, MetricsFile
from ..observe.status import ServerStatus
from ..observe.story import Story, StoryLine
from ..printable import printable
from ..security import Caller
from ..security.joining import Nonces, check_signature
from ..security.signing import derive_key
from ..tiling import ModelTiling
from ..types import (
    MOST_CARRIED_BYTES,
    Answer,
    AskNonce,
    Commit,
    CommitAnswer,
    CompleteOffer,
    CompleteOfferAnswer,
    ContributionKey,
    Control,
    ControlAnswer,
    FromMember,
    GetPart,
    GetPartAnswer,
    Heartbeat,
    Join,
    Lease,
    Leave,
    NonceAnswer,
    Offer,
    OfferAnswer,
    Poll,
    PollAnswer,
    PutPart,
    PutPartAnswer,
    Request,
)
from ..wire.http_request import HttpRequest
from ..wire.memory import MemoryTransport
from ..wire.messages import MAX_JOIN_BYTES, decode_json, place_of
from ..wire.model_file import MODEL_FILES_PATH, MODEL_PATH
from ..wire.pages import pages
from ..wire.routes import (
    Carrying,
    DownloadRoute,
    MessageRoute,
    PlainRoute,
    Presented,
    Reply,
    Route,
    UnreadBody,
    UploadRoute,
)
from .controlling import ControllerThread, make_steering
from .intake import Intake
from .model_state import ModelState
from .outer_state import PROBE, OptimizerMaker, Outer
from .persistence import RunWriter
from .reading import ModelReaders
from .refitting import settle_by_manifest, settle_by_submission
from .resuming import ResumePoint, restore
from .rounds import RoundsThread
from .run import FromAbove, Run
from .sessions import session_secret
from .status import build_status
from .store import FragmentStore

log = logging.getLogger(__name__)

LONGEST_POLL_S = 20.0
FROM_HERE = Presented(Caller("anybody"))  # within this process
LONGEST_NAP_S = 1.0  # of the health thread
NOTE_PATIENCE_S = 5.0  # how long an answer waits for its record
GONE = (WorkerDied, WorkerKicked, WorkerLeft)
LOUD = (  # events that are warnings
    *(ContributionLeftOut, ContributionRefused, NothingLearned, ScreenForgotten, TooFewTrained),
    *(GroupStateUnclear, WorkerCountedOut, WorkerDied, WorkerKicked, WorkerQuarantined),
)


class HealthMonitor:
    """The thread that notices silent workers and passing deadlines. Calls `tick(now)` at least every `check_interval`
    seconds, and sooner when that says so. Monotonic time only."""

    def __init__(
        self,
        tick: Callable[[float], float | None],
        *,
        check_interval: float = LONGEST_NAP_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tick = tick
        self._check_interval = check_interval
        self._clock = clock
        self._nudge = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="outerstep-health", daemon=True)
        self.start = self._thread.start
        self.nudge = self._nudge.set  # something changed: look at the clock again

    def stop(self) -> None:
        self._stopping = True
        self._nudge.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            now = self._clock()
            wake_at = None
            try:
                wake_at = self._tick(now)
            except Exception:  # a server without this thread would wait for the dead for ever
                log.exception("health check failed; it is repeated")
            nap_s = self._check_interval if wake_at is None else min(self._check_interval, max(wake_at - now, 0.005))
            self._nudge.wait(nap_s)
            self._nudge.clear()


@dataclass
class _Turn:
    """An offer whose answers wait: one for each process of a job that has made it."""

    come: threading.Event = field(default_factory=threading.Event)
    waiting: int = 0


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
        on_stop: Callable[[], None] = lambda: None,
        event_sink: EventSink | None = None,
    ) -> None:
        self.config = config
        self.clock = clock
        self._secret = secret = session_secret(folder)
        self.coordinator = Coordinator(
            run_id=run_id,
            rules=config.rules,
            heartbeat_timeout_s=config.heartbeat_timeout_s,
            pool_bytes=config.room_bytes,
            part_size_bytes=config.part_size_bytes or PART_SIZE_BYTES,
            token_budget=config.token_budget,
            drain_timeout_s=config.drain_timeout_s,
            session_secret=secret,
            require_identity=config.require_identity,
            quotas=config.quotas,
        )
        self._nonces = Nonces()
        self.valid_tokens: Callable[[], Collection[str]] | None = None  # the names of those that are; None = no tokens
        self.coordinator.remembers = folder is not None
        self.run = Run(config, self.coordinator, model, make_optimizer, on_device_left=self._device_left)
        self.failure = ""
        self.trouble = ""  # why nothing can be written at the moment; until it can, no round is announced
        self.resumed = False
        self._closing = False  # nobody waits here any longer
        self._ended = False  # nothing is taken in any more
        self.started_at = clock()
        self.bytes_sent = 0
        self._on_stop = on_stop
        self._event_log = EventLog(config.event_log) if config.event_log is not None else None
        self._story = Story()  # guarded by the lock
        self.counts = EventCounts()
        place = folder.place if folder is not None else None
        self._metrics_file = MetricsFile(place / METRICS_FILE) if place is not None else None
        self.loggers = Loggers(config.log_to, place or Path(METRICS_FOLDER), run_id, "server")
        self.events = FanOut(self._event_log, event_sink, self.counts, self._metrics_file, *self.loggers.sinks)
        self.writer = RunWriter(self.run, self.events, folder)
        lock = threading.RLock()  # guards the coordinator and everything below
        self.changed = threading.Condition(lock)
        self._news = 0  # how often there was something that polls wait for
        self._turns: dict[ContributionKey, _Turn] = {}  # of offers whose answer waits
        self.intake = Intake(
            config,
            self.coordinator,
            self.changed,
            lambda: self.clock(),
            lambda fragment, sections, codec: self.run.stores[fragment].decoder(sections, codec),
            self.run.pool_memory_bytes,
            self.run.memory,
        )
        journal = self.writer.journal
        self._commits = Commits(
            self.coordinator,
            config.keeps,
            save_every=config.save_every,
            keeps_contributions=config.delayed_nesterov > 0,
            deterministic=config.deterministic,
            last_record=journal.last if journal is not None else 0,
        )
        self._rounds = RoundsThread(
            self.run,
            self._commits,
            self.intake,
            self.writer,
            lock,
            lambda: self.clock(),
            flush=self._flush,
            on_disk=self._disk_reports,
            on_failure=self._fail,
        )
        self.addresses: dict[str, str] = {}  # where each worker that joined came from
        self.coordinator.steering = steering = make_steering(config, make_optimizer(config, PROBE))
        self._controller = (
            ControllerThread(steering, self._to_decide_from, self._steer) if steering is not None else None
        )
        if self._controller is not None:
            self.events.add(self._controller.heard)
        self.readers = ModelReaders(self.run, self.changed, lambda: self.clock(), lambda: self.writer.shown_files)
        self.monitor = HealthMonitor(self.tick)
        self.routes = self._make_routes()

    @property
    def stores(self) -> list[FragmentStore]:
        return self.run.stores

    @property
    def optimizer(self) -> Outer | None:
        return self.run.optimizer

    def start(self) -> None:
        coordinator = self.coordinator
        self.events(ServerStarted(coordinator.run_id, coordinator.sync_round, self.resumed))
        if self.writer.folder is not None:  # say which run this is, before anybody is listened to
            self.writer.folder.note(coordinator.run_id, began=self._commits.base is not None)
        self._rounds.start()
        if self._controller is not None:
            self._controller.start()
        with self.changed:
            if coordinator.plan is not None:
                self._commits.note()  # the settings it runs under now; and if it went back, from where
                self._rounds.work.notify()

    def release_polls(self) -> None:
        """Answer all waiting polls: the server is about to stop listening."""
        with self.changed:
            self._closing = True
            self._release()

    def wake_polls(self) -> None:
        """Wake the polls: there is something that they wait for. With the lock held."""
        self._news += 1
        self.changed.notify_all()

    def _release(self) -> None:
        """Let everything that waits look again. With the lock held."""
        self.wake_polls()
        for turn in self._turns.values():
            turn.come.set()
        self._turns.clear()

    def stop(self) -> None:
        """Finish the rounds that were decided, save, then end."""
        with self.changed:
            self._ended = True
            self._release()
        if self._controller is not None:
            self._controller.stop()
        self._rounds.stop()
        self.intake.close()
        if not self.failure and not self._commits.is_saved:
            self._commits.save("the server stops")
            self._rounds.catch_up()
        self.events(ServerStopped(self.coordinator.sync_round))
        if self._event_log is not None:
            self._event_log.close()
        self.loggers.close()
        self.writer.close()

    # --- messages -------------------------------------------------------------------------------------------------

    def _make_routes(self) -> dict[tuple[str, str], Route]:
        return {
            **pages(self),
            place_of(AskNonce): MessageRoute(AskNonce, self.nonce, is_quick=True),
            place_of(Join): MessageRoute(Join, self.join, most_bytes=MAX_JOIN_BYTES, sees_caller=True),
            place_of(Heartbeat): MessageRoute(
                Heartbeat, self.answer, is_quick=True, admit=self.admit, sees_caller=True
            ),
            place_of(Leave): MessageRoute(Leave, self.answer, is_quick=True, admit=self.admit, sees_caller=True),
            place_of(Lease): MessageRoute(Lease, self.answer, admit=self.admit, sees_caller=True),
            place_of(Offer): MessageRoute(
                Offer,
                self.offer,
                waits_away=True,
                decode=self._decode_offer,
                admit=self.admit,
                sees_caller=True,
            ),
            place_of(CompleteOffer): UploadRoute(
                CompleteOffer, self.take_complete, admit=self.admit, most_bytes=MOST_CARRIED_BYTES, sees_caller=True
            ),
            place_of(PutPart): UploadRoute(PutPart, self.put_part, admit=self.admit),
            place_of(Commit): MessageRoute(Commit, self.answer, admit=self.admit, sees_caller=True),
            place_of(Poll): MessageRoute(Poll, self.poll, waits_away=True, admit=self.admit, sees_caller=True),
            place_of(GetPart): DownloadRoute(GetPart, self.get_part, admit=self.admit),
            place_of(Control): MessageRoute(Control, self.answer, speaker=None, is_order=True, sees_caller=True),
            ("GET", METRICS_PATH): PlainRoute(self.metrics, reads=True),
            ("GET", MODEL_PATH): PlainRoute(self.read_model, reads=True),
            ("GET", MODEL_FILES_PATH): PlainRoute(self.readers.file, reads=True),
        }

    def _decode_offer(self, data: bytes | bytearray) -> Offer:
        """A worker that offers something on top of an impossible version is told which round the run has completed."""
        try:
            return decode_json(data, Offer)
        except BadRequest as error:
            if "base" in error.message:
                hint = f"the run has completed round {self.coordinator.sync_round}"
                raise BadRequest(error.message, hint=hint) from error
            raise

    def admit(self, message: FromMember, shown: Presented) -> None:
        """Incarnations are public: whoever speaks for a worker that has a key shows its session, or its own token."""
        caller = shown.caller
        if caller.kind != "worker" or caller.worker_id != message.worker_id:
            self.coordinator.members.check_session(message, shown.session)

    def transport_of(self, worker_id: str) -> MemoryTransport:
        """A transport for a worker that connects through another port of this process and has no key: this server has a
        key for it. So nobody who connects here can take its id, and nobody who connects there can take another's."""
        return MemoryTransport(self, key=derive_key(self._secret, worker_id))

    def is_own(self, worker: KnownWorker) -> bool:
        """Did it connect through such a port, of this process or of the one before it?"""
        return derive_key(self._secret, worker.worker_id).public in worker.keys

    def nonce(self, request: AskNonce) -> NonceAnswer:
        return NonceAnswer(nonce=self._nonces.make())

    def join(self, request: Join, shown: Presented) -> Answer:
        self._check_health()
        try:
            check_signature(request, self._nonces, shown.token)
            worker_id, members = request.worker_id, self.coordinator.members
            vouched = _is_own_token(worker_id, shown) or members.holds_session(worker_id, shown.session)
            tiling = self._check_tiling(request, vouched, shown.caller.name)
            answer = self._decide(request, vouched=vouched, token=shown.caller.name, tiling=tiling)
        except Refused as refusal:
            self._note_refusal(request, refusal, shown)
            raise
        with self.changed:
            member = members.find(worker_id)
            if member is not None and member.live:  # it may have left already
                self.addresses[worker_id] = shown.address
        return answer

    def _check_tiling(self, request: Join, vouched: bool, token: str) -> ModelTiling | None:
        """Not under the lock: it may take a second. So not for a worker that has joined too often."""
        if request.tiling is UNSET:
            return None
        with self.changed:
            self.coordinator.check_quotas(request, self.clock(), vouched=vouched, token=token)
        return check_tiling(request)

    def answer(self, request: Request, shown: Presented = FROM_HERE) -> Answer:
        self._check_health()
        try:
            match request:
                case Join():
                    raise BadRequest("a join comes with what its request shows")
                case Commit():
                    return self._commit(request)
                case Poll():
                    return self._poll(request, shown)
                case Control():
                    who, where = shown.caller.name, shown.address
                    self.events(ControlReceived(request.kind, request.worker_id, request.reason, who, where))
                    if request.kind == "save":
                        return ControlAnswer(done=f"saved as {self.save(request.reason or 'an operator asked for it')}")
                    return self._decide(self.run.read_order(request))
                case CompleteOffer() | PutPart() | GetPart():
                    raise BadRequest(f"{type(request).__name__} carries bytes")
                case Heartbeat() | Leave() | Lease() | Offer():
                    return self._decide(request)
        except Refused as refusal:
            self._note_refusal(request, refusal, shown)
            raise

    def _note_refusal(self, request: Request, refusal: Refused, shown: Presented) -> None:
        is_everyday = isinstance(refusal, Busy | StaleRound | Superseded)  # part of a healthy run's life
        if not is_everyday or isinstance(refusal, QuotaExceeded):
            what, who = type(request).__name__, getattr(request, "worker_id", None)
            token, where = shown.caller.name, shown.address
            self.events(MessageRefused(what, who, refusal.code, str(refusal), token, where))

    def put_part(self, request: PutPart, body: UnreadBody) -> PutPartAnswer:
        self._check_health()
        try:
            return self.intake.put(request, body)
        except Refused:
            with self.changed:
                self._flush()  # it may have been one too many
            raise

    def take_complete(
        self, request: CompleteOffer, body: UnreadBody, shown: Presented = FROM_HERE
    ) -> CompleteOfferAnswer:
        """The body is read once its offer is taken, and the contribution counts when all of it is checked."""
        self._check_health()
        if request.tiled is True:
            self._measure(request)
        try:
            return take_complete(request, self._decide, lambda part: self.put_part(part, body), self._commit)
        except Refused as refusal:
            self._note_refusal(request, refusal, shown)
            raise

    def offer(self, request: Offer, shown: Presented = FROM_HERE) -> OfferAnswer:
        """While there is no room, the answer waits for the worker's turn, for as long as the worker allows."""
        began_at = self.clock()
        until = began_at + min(request.wait_s or 0.0, LONGEST_POLL_S)
        if request.tiled is True:
            self._measure(request)
        while True:
            with self.changed:
                answer = self.answer(request, shown)
                assert isinstance(answer, OfferAnswer)
                now = self.clock()
                left_s = until - now
                if answer.state != "wait" or self._closing:
                    return answer
                if left_s <= 0.0:  # it has waited here
                    return replace(answer, retry_after_s=max(answer.retry_after_s - (now - began_at), 0.0))
                turn = self._turns.setdefault(request.key, _Turn())
                turn.waiting += 1
            with shown.away():
                turn.come.wait(left_s)
            with self.changed:
                turn.waiting -= 1
                # It has not come; and no other process of a job waits for the same.
                if self._turns.get(request.key) is turn and not turn.waiting:
                    del self._turns[request.key]

    def _measure(self, request: Offer) -> None:
        """How large a contribution in boxes may be, once per tiling: before anybody waits for the lock, as half a
        million boxes take a second."""
        with self.changed:
            coordinator = self.coordinator
            if request.fragment >= len(coordinator.fragments) or request.codec not in coordinator.codecs:
                return
            fragment = coordinator.fragments[request.fragment]
            try:
                cutting = coordinator.cutting(request)
            except Refused:  # the decision says why
                return
        fragment.max_payload_bytes(cutting, request.codec)

    def turn_away(self, worker_id: str, fragments: Sequence[int], refusal: Refused) -> None:
        """Refuse what a worker brought by another way than these messages."""
        with self.changed:
            self.coordinator.turn_away(worker_id, fragments, refusal, self.clock())
            self._flush()

    def poll(self, request: Poll, shown: Presented = FROM_HERE) -> PollAnswer | Carrying:
        """The answer; and with it the bytes that lead to the agreement, if the worker takes so many along."""
        answer = self.answer(request, shown)
        assert isinstance(answer, PollAnswer)
        agreement = answer.agreement
        most_bytes = min(request.takes_bytes or 0, self.coordinator.uploads.part_size_bytes)
        if agreement is None or not 0 < agreement.size_bytes <= most_bytes:
            return answer
        pieces, store, now = list[memoryview](), self.run.stores[request.fragment], self.clock()
        for payload in agreement.payloads:
            part = GetPart(
                run_id=request.run_id,
                worker_id=request.worker_id,
                incarnation=request.incarnation,
                fragment=request.fragment,
                version=payload.version,
                kind=payload.kind,
                part=0,
            )
            try:
                pieces.append(store.part(part, now)[1])
            except (Busy, Superseded):  # another version is on its way: the worker asks for the parts, and is told so
                return answer
        with self.changed:
            self.bytes_sent += agreement.size_bytes
        return Carrying(replace(answer, carried_bytes=agreement.size_bytes), pieces)

    def get_part(self, request: GetPart) -> tuple[GetPartAnswer, memoryview]:
        self._check_health()
        with self.changed:
            now = self.clock()
            self.coordinator.get_part(request, now)
        part_hash, data = self.run.stores[request.fragment].part(request, now)
        with self.changed:
            self.bytes_sent += len(data)
        return GetPartAnswer(hash=part_hash), data

    def read_model(self, request: HttpRequest) -> Reply:
        self._check_health()
        reply = self.readers.model(request)
        with self.changed:
            self.bytes_sent += len(reply.body) + sum(map(len, reply.rest))
        return reply

    def status(self) -> ServerStatus:
        with self.changed:
            return build_status(
                self.run,
                self.intake,
                self.writer,
                self.clock(),
                started_at=self.started_at,
                failure=self.failure,
                trouble=self.trouble,
                bytes_sent=self.bytes_sent,
                readers=self.readers.count,
                addresses=self.addresses,
            )

    def silence(self) -> str:
        """Who has not been heard from for long, and when it counts as dead; "" = nobody."""
        with self.changed:
            return self.coordinator.silence(self.clock())

    def metrics(self, request: HttpRequest) -> Reply:
        """For Prometheus."""
        status = replace(self.status(), connections=request.connections.summary())
        lost = {**self.loggers.lost, METRICS_FILE: self._metrics_file.lost if self._metrics_file is not None else 0}
        families = families_of(status, self.counts.copy(), lost)
        return Reply(write_metrics(families), headers=(("Content-Type", CONTENT_TYPE),))

    def save(self, reason: str, place: str = "") -> Path:
        """Write the state between two rounds, into save_dir or a copy as `place`. Returns its path."""
        self._check_health()  # a server that failed may have moved half of its state
        with self.changed:
            if self.config.save_dir is None and not place:
                raise BadRequest("there is no place to save to", hint="start the server with --save-dir FOLDER")
            if self.coordinator.plan is None:
                raise BadRequest("nobody has joined yet: there is nothing to save")
            ticket = self._commits.save(reason, place)
            self._rounds.work.notify()
        self._rounds.catch_up()
        made: Path | ServerError | None = None
        with self._rounds.progress:
            while (made := self._rounds.saves.pop(ticket, None)) is None:
                if not self._rounds.is_alive:
                    raise ServerFailed(f"the server has stopped: {self.failure or 'it was asked to'}")
                if self.trouble:
                    raise ServerError(f"saving has to wait: {self.trouble}")
                self._rounds.progress.wait(1.0)
        if isinstance(made, ServerError):
            raise made
        return made

    def between_rounds(self, look: Callable[[], None]) -> None:
        """Call `look` in the thread that moves the model, so that it stays as it is meanwhile."""
        self._rounds.look(look)

    def move_from_above(
        self, fragment: int, upper_version: int, move: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
    ) -> threading.Event:
        """A layer above has agreed on this version of a fragment: T becomes `move(T)` between two rounds, as a version
        of its own. The event is set when that is durable, and everybody may know."""
        self._check_health()
        with self.changed:
            self.run.from_above[fragment] = moves = FromAbove(move)
            self.coordinator.move_from_above(fragment, upper_version)
            self._flush()
        return moves.published

    def change_leases(self, change: Callable[[float, Collection[str]], bool]) -> None:
        """Let a layer above change what is leased here: at this time, with these workers here. `change` says whether
        that must be recorded; who is leased something from then on hears of it when it is."""
        with self.changed:
            if change(self.clock(), self.coordinator.members.live_ids):
                self._commits.note()
            self._flush()

    def restore(self, found: ResumePoint) -> None:
        """Resume a saved run. Before anybody has joined."""
        with self.changed:
            if self.coordinator.plan is not None:
                raise ConfigError("a state is loaded before the first worker joins; make a new server for it")
            restore(self.run, found.state, found.records, self.clock())
            self.resumed = True
            if self.writer.model_files is None:
                self.writer.model_files = found.state.place
            if found.in_place:
                base, journal = found.base, self.writer.journal
                if journal is not None:
                    journal.begin_after(base)
                size_bytes = journal.behind(base)[1] if journal is not None else 0
                self._commits.resume(base, found.state.round, journal_bytes=size_bytes)

    # --- time -----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> float | None:
        """Returns when the coordinator would next have something to decide; None = only after a message."""
        with self.changed:
            if self.valid_tokens is not None:
                valid = self.valid_tokens()
                self.coordinator.revoke(valid, now)
                self.readers.revoke(valid)
            self.coordinator.tick(now)
            self._flush()
            return self.coordinator.next_wake(now)

    def global_params(self) -> dict[str, Tensor]:
        """A copy of the newest global weights, fp32, by every name the model has for them."""
        return {name: tensor.clone() for name, tensor in self.whole_state({}).items()}

    def whole_state(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The state dict, fp32, with these values of what is trained, and the newest of what is not among them."""
        with self.changed:
            stores, manifest, model = self.run.stores, self.coordinator.manifest, self.run.model
        others = [store for store in stores if not store.state.theta.keys() <= given.keys()]
        newest = {name: theta for store in others for name, theta in store.copy_params().items()}
        return model.with_trained({**newest, **given}, manifest.aliases if manifest is not None else {})

    # --- decisions, under the lock --------------------------------------------------------------------------------

    def _decide(
        self,
        request: Join | Heartbeat | Leave | Lease | Offer | Control,
        *,
        vouched: bool = False,
        token: str = "",
        tiling: ModelTiling | None = None,
    ) -> Answer:
        """The answer, once the record that it depends on is durable. `vouched`, `token`, `tiling`: of a join."""
        with self.changed:
            self._check_health()  # it may have stopped since the message came in
            if isinstance(request, Join):
                self._settle(
                    request,
                    lambda: self.coordinator.check_join(
                        request, self.clock(), vouched=vouched, token=token, tiling=tiling
                    ),
                )
            try:
                answer, record = self._commits.answer(
                    request, self.clock(), vouched=vouched, token=token, tiling=tiling
                )
            finally:
                self._flush()
                if isinstance(request, Join | Leave | Control):  # the clock has others to watch
                    self.monitor.nudge()
        if record > self._commits.written:
            self._wait_for(record)
        return answer

    def _settle(self, request: Join, check: Callable[[], object]) -> None:
        """What nobody has settled yet, this worker settles; but not one that is refused, so that is found out first."""
        if self.coordinator.plan is None:
            check()
            self.run.start(request)
        elif request.manifest is not None and self.coordinator.naming is not None:
            check()
            self._between_tasks()  # others may come meanwhile
            check()
            settle_by_manifest(self.run, request)

    def name_tensors(self, fragment: int | None, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """A client without a manifest has sent these tensors, as a fragment or (None) as the whole model. If nobody has
        said yet what is trained there, that does (coordination/server/naming.py)."""
        with self.changed:
            naming = self.coordinator.naming
            if naming is None or not naming.is_news(fragment):
                return
            self._between_tasks()
            if settle_by_submission(self.run, fragment, shapes):
                self._commits.note()
                self._rounds.work.notify()

    def _between_tasks(self) -> None:
        """Wait until the rounds thread has nothing to do, with the lock held. What it does next sees what changes
        now."""
        self._rounds.catch_up()
        if not self._rounds.progress.wait_for(lambda: self._commits.is_idle, NOTE_PATIENCE_S):
            raise Busy(
                f"what the run trains cannot be settled yet: {self.trouble or self.failure or 'rounds are closing'}",
                hint="ask again",
                retry_after_s=1.0,
            )
        self._check_health()

    def _wait_for(self, record: int) -> None:
        """Wait until this record is durable. Not for ever: the worker is told why it takes so long, and asks again."""
        self._rounds.catch_up()
        with self._rounds.progress:
            if self._rounds.progress.wait_for(lambda: self._commits.written >= record, NOTE_PATIENCE_S):
                return
            why = self.trouble or self.failure or "it is being written"
        raise Busy(f"not on the server's disk yet: {why}", hint="ask again", retry_after_s=1.0)

    def _flush(self) -> None:
        """Carry the coordinator's effects out, in its order. Called with the lock held."""
        effects = self._commits.take_effects()
        for effect in effects:
            match effect:
                case DropUpload():
                    self.intake.free(effect.key)
                case AskAgain():
                    turn = self._turns.pop(effect.key, None)
                    if turn is not None:
                        turn.come.set()
                case StopServer():
                    log.info("stopping: %s", printable(effect.reason))
                    self._on_stop()
                case Event():
                    level = logging.WARNING if isinstance(effect, LOUD) else logging.INFO
                    level = (
                        logging.DEBUG if isinstance(effect, GroupStateChanged) else level
                    )  # others say what caused it
                    log.log(level, "%s", StoryLine(self._story, effect))
                    if isinstance(effect, GONE):
                        self.intake.meter.forget(effect.worker)
                        self.addresses.pop(effect.worker, None)
                    if not isinstance(effect, ContributionRefused):  # told of where the answer is given
                        self.events(effect)
                case _:  # the rounds thread carries it out
                    pass
        if effects or not self._commits.is_idle or self._commits.must_gather:
            self._rounds.work.notify()
        if self.coordinator.wakes_sooner:  # nobody looks at every worker for each message
            self.monitor.nudge()
        if any(map(is_news, effects)):
            self.wake_polls()

    def _poll(self, request: Poll, shown: Presented) -> PollAnswer:
        """With an agreement goes what leads to it, from what the asker holds; a group is told the hash of each
        section's rows too. That may read the whole fragment, so it is done outside of the lock; if another version
        took the place of this one meanwhile, the answer is about that."""
        until = self.clock() + min(request.wait_s, LONGEST_POLL_S)
        while True:
            answer = self._wait_for_news(request, until, shown)
            if answer.agreement is None:
                return answer
            self._check_health()
            store, version = self.run.stores[request.fragment], answer.agreement.version
            payloads = store.payloads(version, request.worker_id, request.held, request.held_hash, self.clock())
            trees = request.trees is True or request.tiled is True
            anchor_hash = answer.agreement.anchor_hash if trees else store.down.flat_hash(version)
            hashes: tuple[str, ...] | None = ()
            if request.sections > 1 or request.tiled is True:  # a group, each process of which holds a part
                with self.changed:
                    cutting = self.coordinator.cutting(request)
                    needed = store.hashing_bytes(version, cutting, trees=trees)
                    self.coordinator.charge_hashing(request.worker_id, needed, self.clock())
                hashes = store.range_hashes(version, cutting, trees=trees)
            if payloads is not None and anchor_hash is not None and hashes is not None:
                told = replace(answer.agreement, anchor_hash=anchor_hash, payloads=payloads, range_hashes=hashes)
                return replace(answer, agreement=told)

    def _wait_for_news(self, request: Poll, until: float, shown: Presented) -> PollAnswer:
        """Answer when there is news, or when time is up."""
        while True:
            with self.changed:
                now, news = self.clock(), self._news
                answer = self.coordinator.poll(request, now)
                if answer.agreement is not None or answer.wanted or self.failure or self._closing or self._ended:
                    return answer
                if now >= until:
                    waiting_for = self.trouble[:256] or answer.waiting_for
                    return replace(answer, retry_after_s=0.0, waiting_for=waiting_for)  # it has waited here
            # Who wakes up takes its turn again when it has let go of the lock: those that have a turn may want that.
            with shown.away(), self.changed:
                if self._news == news:
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
        with self.changed:
            self._check_health()
            try:
                return self.coordinator.accept(request, self.clock(), norm)
            finally:
                self._flush()

    # --- for the controller ------------------------------------------------------------------------------------------

    def _to_decide_from(self) -> ControllerState | None:
        with self.changed:
            steering, now = self.coordinator.steering, self.clock()
            assert steering is not None
            return steering.state(self.coordinator.steered, self.intake.meter.reports(now), now)

    def _steer(self, decision: LayerDecision) -> None:
        with self.changed:
            if self._ended or self.failure:
                return
            if self.coordinator.steer(decision):
                self._commits.note()
            self._flush()

    # --- for the rounds thread ------------------------------------------------------------------------------------

    def _disk_reports(self, error: OSError | None) -> None:
        """While nothing can be written, rounds are computed and not announced, and joins wait."""
        with self.changed:
            why = ""
            if error is not None:
                why = f"the server cannot write to {self.config.save_dir}: {error.strerror or error}; "
                why += "rounds wait until it can"
                if why != self.trouble:
                    log.error("%s (%s)", why, error)
                    self.events(DiskFails(str(error)))
            elif self.trouble:
                log.info("the server can write to %s again", self.config.save_dir)
                self.events(DiskWorks())
            self.trouble = why

    def _device_left(self, why: str) -> None:
        self.events(DeviceLeft(self.config.device, why))

    def _fail(self, reason: str) -> None:
        """The model may be half done: say so to everybody and do nothing more."""
        with self.changed:
            self.failure = reason
            self._release()
        for store in self.run.stores:
            store.down.abandon()

    def _check_health(self) -> None:
        if self._ended and self.coordinator.closing:
            raise Closing(f"the run has come to its end: {self.coordinator.closing}", hint="start the server again")
        if self._ended:
            raise Busy("the server is stopping", hint="ask again when it is back", retry_after_s=1.0)
        if self.failure:
            raise ServerFailed(f"the server has stopped: {self.failure}", hint="restart it; its log has the cause")


def _is_own_token(worker_id: str, shown: Presented) -> bool:
    """A token that was made for this worker alone proves as much as its key."""
    return shown.caller.kind == "worker" and shown.caller.worker_id == worker_id
