"""The server's decisions: one method per message, no I/O.

    answer  = coordinator.offer(message, now)     # or raises a Refused
    effects = coordinator.take_effects()          # carry them out in order

A contribution passes through four states. One place in the code ends each state:

    offered ──(room granted)──▶ sending ──(commit, checked)──▶ accepted ──(round closes)──▶ agreed
       └── stale, fenced, duplicate, unknown: refused by name

Exactly once: for each worker id and fragment, the ledger keeps the last accepted sequence with its payload hash. The
same key with the same hash gets the same answer again. The same key with another hash is refused. An older sequence is
superseded.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from dataclasses import replace as replace_fields
from typing import Any, Literal

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from ... import events
from ...defaults import RECENT_LOSSES
from ...errors import (
    Absurd,
    BadRequest,
    Closing,
    FutureRound,
    MissingParts,
    PlanMismatch,
    Refused,
    StaleRound,
    TooOld,
    UnknownWorker,
)
from ...screens import LEAST_CONTRIBUTORS, NormScreen, Size
from ...tiling import Cutting, ModelTiling
from ...types import (
    Agreement,
    Commit,
    CommitAnswer,
    ContributionKey,
    Control,
    ControlAnswer,
    FromMember,
    GetPart,
    Heartbeat,
    HeartbeatAnswer,
    Join,
    JoinAnswer,
    Lease,
    LeaseAnswer,
    Leave,
    LeaveAnswer,
    Manifest,
    OfContribution,
    Offer,
    OfferAnswer,
    Participant,
    Plan,
    Poll,
    PollAnswer,
    PutPart,
    PutPartAnswer,
)
from ...versions import check_spoken
from ..autoconfig.collected import lacks_link
from ..autoconfig.layer_plan import LayerDecision
from ..autoconfig.steering import SteeredRun, Steering
from ..sub_leases import LayerLeases
from ..weights import UsualWeight, reported, staleness_factor
from .admission import (
    check_accepted,
    check_age,
    check_identity,
    check_offer,
    check_received,
    check_same_offer,
    check_same_part,
    check_sections,
    check_tiling,
    other_run,
)
from .claims import PATIENCE_S, ClaimedWork, allowed, settle
from .effects import Accumulate, AllLeft, AskAgain, CloseRound, DropUpload, Effect, StopServer
from .lives import Lives
from .membership import BLAMELESS, OFFENCE_KINDS, Conduct, KnownWorker, Membership, local_steps
from .naming import Naming
from .plan import Settled, changed, check_manifest, check_wishes
from .quotas import QuotaLimits, Quotas
from .remembered import LEAP, Acceptance, Remembered, WorkerRecord, changes_in
from .rounds import MOST_REFUSALS, Closed, Fragment, RoundRules, RoundVerdict, TokenBudget
from .tilings import Tilings
from .turns import ASK_AGAIN_S, ASK_AGAIN_SOON_S
from .uploads import Upload, Uploads

TILING_PER_JOIN = 1 << 14  # the weight of a tiling that costs as much as a join
BUDGET_SPENT = "the token budget is spent"
THE_LAYER_ABOVE = "the layer above"  # members wait for it until `withheld_until` at most


class Coordinator:
    """The server's state machine: members, rounds, uploads, the plan and the ledger."""

    lives_type: type[Lives] = Lives
    leases_type: type[LayerLeases] = LayerLeases

    def __init__(
        self,
        *,
        run_id: str,
        rules: RoundRules,
        heartbeat_timeout_s: float,
        pool_bytes: int,
        part_size_bytes: int,
        token_budget: int | None = None,
        drain_timeout_s: float = 600.0,
        quotas: QuotaLimits = QuotaLimits(),  # noqa: B008 - frozen
        session_secret: bytes = b"",
        require_identity: bool = False,
    ) -> None:
        self.run_id = run_id
        self.rules = rules
        self.members = Membership(heartbeat_timeout_s=heartbeat_timeout_s, session_secret=session_secret)
        self.require_identity = require_identity
        self.uploads = Uploads(capacity_bytes=pool_bytes, part_size_bytes=part_size_bytes)
        self.quotas = Quotas(quotas)
        self.tilings = Tilings()
        self.fragments: list[Fragment] = []
        self.plan: Plan | None = None
        self.codecs: tuple[str, ...] = ()  # of all plans so far: contributions in flight may use any of them
        self.manifest: Manifest | None = None
        self.model_bytes = 0
        self.settled: Settled | None = None
        self.naming: Naming | None = None  # None: a worker has sent a manifest, or nobody has joined yet
        self.refitted_from: int | None = None  # if the manifest has changed: the version that was cut then
        self._unfit_before = 0  # plans of earlier revisions have other fragments
        self.started = False
        self.total_accepted = 0
        self.total_too_few = 0  # rounds without an effect, because too few contributors had trained
        self.budget = TokenBudget(token_budget)
        self.closing = ""  # why the run is ending
        self.drain_timeout_s = drain_timeout_s
        self.stop_at: float | None = None
        self.next_plan: Plan | None = None
        self.outer_momentum: float | None = None  # reported to each worker that joins; None = unknown
        self.now = 0.0  # the time of the last message or tick
        self.withheld_until = 0.0  # until then the newest version is withheld: one from the layer above follows it
        self.wakes_sooner = False  # True: there is a deadline before the time that `next_wake` returned
        self._wakes_at = math.inf
        self.remembers = False  # True: each closing round carries the state to store
        self.steering: Steering | None = None  # chooses the plan, if the operator has named a target
        self._first_join_at: float | None = None
        self.losses: deque[float] = deque(maxlen=RECENT_LOSSES)  # of the last rounds, oldest first
        self._summaries: dict[tuple[int, int], events.RoundSummary] = {}  # of closed rounds, until they are published
        self._effects: list[Effect] = []
        self.lives = self.lives_type(self.members, asynchronous=rules.asynchronous)
        self.leases = self.leases_type()
        self._trained: dict[tuple[int, int], list[events.Event]] = {}  # of closed rounds, until they are published

    def take_effects(self) -> list[Effect]:
        """The pending effects. Workers that wait for room get the room that has become free."""
        if self.uploads.queued:
            self.uploads.call_up(self.now)
        effects, self._effects = [*self._effects, *map(AskAgain, self.uploads.take_to_ask())], []
        waits_above = any(self._holds_back(fragment, self.now) for fragment in self.fragments)
        return [*effects, *self.lives.heard(effects, self.fragments, waits_above=waits_above)]

    @property
    def sync_round(self) -> int:
        """How many rounds every fragment has completed."""
        return min((f.published.version for f in self.fragments), default=0)

    # --- joining and leaving --------------------------------------------------------------------------------------

    def check_join(
        self, message: Join, now: float, *, vouched: bool = False, token: str = "", tiling: ModelTiling | None = None
    ) -> ModelTiling | None:
        """Refuse a join, or return the content of the worker's sections. This changes nothing: a refused worker must
        not have settled what the run trains. (The arguments are those of `join`.)"""
        self._check_fits(message, vouched)
        self.check_quotas(message, now, vouched=vouched, token=token)
        self.members.check_joins(message, now, vouched=vouched)
        tiling = self._tiling_of(message, tiling)
        self._check_tiling_room(message, tiling, token)
        return tiling

    def _check_fits(self, message: Join, vouched: bool) -> None:
        """The checks that do not depend on the present members."""
        check_spoken(message.protocol, "this worker")
        if self.require_identity:
            check_identity(message, vouched=vouched)
        if message.run_id not in (None, self.run_id):
            raise other_run(message.run_id, self.run_id)
        if self.closing and not self.members.knows(message):
            raise Closing(f"the run is coming to its end: {self.closing}", hint="restart the server to resume the run")
        if self.naming is not None and message.manifest is not None:
            return  # this manifest will settle what others are compared with
        if self.settled is not None and self.plan is not None and self.manifest is not None:
            check_wishes(self.settled, self.next_plan or self.plan, message.wishes)
            if message.manifest is not None:
                check_manifest(self.manifest, message.manifest, by_name=True)

    def fix(
        self,
        *,
        plan: Plan,
        settled: Settled,
        manifest: Manifest,
        fragments: Sequence[Fragment],
        naming: Naming | None = None,
    ) -> None:
        """Fix the first accepted manifest and its plan for the rest of the run. `naming`: no worker has sent a
        manifest, and names that are still open may change."""
        self.settled, self.manifest, self.naming = settled, manifest, naming
        self._follow(plan)
        self.model_bytes = self.quotas.model_bytes = 4 * sum(spec.numel for spec in manifest.parameters)
        self.fragments = list(fragments)
        self.budget.fix(len(self.fragments))

    def _follow(self, plan: Plan) -> None:
        """Follow this plan from now on. A new codec changes the usual norm of contributions: a sparse codec sends a
        small part of each difference, and its remainder goes with the first contribution of the next codec. So the norm
        screens forget what was usual."""
        if self.plan is not None and plan.codec != self.plan.codec:
            for fragment in self.fragments:
                fragment.screen.forget()
        self.plan, self.next_plan = plan, None
        self.uploads.part_size_bytes = plan.part_size_bytes
        self.codecs = tuple(dict.fromkeys((*self.codecs, plan.codec)))

    def refit(
        self,
        *,
        plan: Plan,
        settled: Settled,
        manifest: Manifest,
        fragments: Sequence[Fragment],
        naming: Naming | None,
        kept: int,
    ) -> None:
        """More of the trained names are known. The first `kept` fragments stay as they are. The others have accepted
        nothing yet, so `fragments` replace them."""
        if kept < len(self.fragments):
            self._unfit_before = plan.revision
        for fragment in fragments if self.started else ():
            fragment.round.expected = set(self.members.awaited_ids(self.now))
        assert self.naming is not None
        self.refitted_from = self.naming.first
        everything = [*self.fragments[:kept], *fragments]
        self.fix(plan=plan, settled=settled, manifest=manifest, fragments=everything, naming=naming)

    def join(
        self, message: Join, now: float, *, vouched: bool = False, token: str = "", tiling: ModelTiling | None = None
    ) -> JoinAnswer:
        """Admit a worker. `vouched`: something other than a key proves that the sender owns the id (membership.py).
        `token`: the name of the sender's token. `tiling`: the message's tiling, if `check_tiling` has checked it."""
        self._check_fits(message, vouched)
        self.now = now
        if self.check_quotas(message, now, vouched=vouched, token=token):  # an attempt costs, whatever its result
            is_newcomer, cost = self.members.is_newcomer(message.worker_id), 1.0
            if tiling is not None:  # checking a large tiling takes as long as many joins
                cost += tiling.weight / TILING_PER_JOIN
            self.quotas.charge("joins", token, message.worker_id, now, is_newcomer=is_newcomer, amount=cost)
        assert self.plan is not None, "fix() comes before the first join"
        assert self.manifest is not None
        before, tiling = self.members.live_ids, self._tiling_of(message, tiling)
        self._check_tiling_room(message, tiling, token)
        worker, arrived = self.members.join(message, now, vouched=vouched)
        worker.protocol, worker.token, worker.plan_revision = message.protocol, token, self.plan.revision
        if arrived:
            if worker.worker_id in before:
                # The old process is fenced, and its uploads and orders are lost. No round waits for this worker now,
                # unless the new process has the old one's steps.
                worker.commands.clear()
                self._forget(worker, still_expected=message.continues)
                if not message.continues:
                    self._effects += self.leases.gone(worker.worker_id)
            self.leases.joined(worker.worker_id, message.instance)
            self._first_join_at = now if self._first_join_at is None else self._first_join_at
            self._effects.append(events.WorkerJoined(worker.worker_id, worker.hostname, worker.incarnation))
            for fragment in self.fragments:
                # Expected from the next round on; in the open round only if it waits for nobody else.
                if self.started and not fragment.round.expected and not fragment.round.participants:
                    fragment.round.expected.add(worker.worker_id)
            if self.closing:  # it was declared dead, and may contribute what it has
                self.members.order(worker.worker_id, "drain", self.closing)
            self._start_if_ready(now)
            self._close_rounds(now)
        worker.tiling, worker.has_said_shape = self.tilings.shared(tiling) if tiling is not None else None, True
        return JoinAnswer(
            run_id=self.run_id,
            incarnation=worker.incarnation,
            plan=self.plan,
            manifest=self.manifest,
            fragments=tuple(worker.state_of(i, f.published.version) for i, f in enumerate(self.fragments)),
            session=worker.session if message.proof is not UNSET else UNSET,
            outer_momentum=UNSET if self.outer_momentum is None else self.outer_momentum,
        )

    def check_quotas(self, message: Join, now: float, *, vouched: bool = False, token: str = "") -> bool:
        """Refuse a join beyond the quota. Does this join cost anything? A repeated join does not, and no worker pays
        for a join that another sends under its id."""
        self.members.check_owner(message, vouched)
        if self.members.is_here(message):
            return False
        is_newcomer = self.members.is_newcomer(message.worker_id)
        self.quotas.check("records", token, message.worker_id, now, is_newcomer=is_newcomer)
        self.quotas.check("joins", token, message.worker_id, now, is_newcomer=is_newcomer)
        return True

    def _tiling_of(self, message: Join, checked: ModelTiling | None) -> ModelTiling | None:
        """The checked tiling. It is fixed for one start of a worker, because contributions in flight depend on it."""
        worker, told = self.members.find(message.worker_id), message.tiling
        known = worker.tiling if worker is not None and worker.instance == message.instance else None
        if known is not None:
            if told is UNSET or told != known.tiling:
                raise BadRequest(f"worker {message.worker_id!r} joined before with another tiling", hint="restart it")
            return known
        if told is UNSET:
            return None
        if message.manifest is None:
            raise BadRequest("a tiling must come with the manifest that it cuts, got no manifest")
        return checked or check_tiling(message)

    def _check_tiling_room(self, message: Join, tiling: ModelTiling | None, token: str) -> None:
        if tiling is not None and self.members.is_newcomer(message.worker_id):
            self.tilings.check_room(tiling, token, message.worker_id, self.members)

    def charge_hashing(self, worker_id: str, size_bytes: int, now: float) -> None:
        """Charge a group for the hashing of its sections. Refuse it if the group, or newcomers with its token, have
        used too much of that lately."""
        worker = self.members.find(worker_id)
        if worker is None or not size_bytes:
            return
        self.quotas.check("hashed", worker.token, worker_id, now, is_newcomer=worker.is_newcomer)
        self.quotas.charge(
            "hashed", worker.token, worker_id, now, is_newcomer=worker.is_newcomer, amount=float(size_bytes)
        )

    def cutting(self, message: Offer | Poll) -> Cutting:
        """How the message's sections are cut."""
        if message.tiled is not True:
            return message.sections
        worker = self.members.find(message.worker_id)
        if worker is not None and worker.tiling is None and not worker.has_said_shape:
            raise UnknownWorker(
                f"worker {message.worker_id!r} has not said what it holds since this server started", hint="join again"
            )
        if worker is None or worker.tiling is None or self.plan is None:
            raise BadRequest(f"worker {message.worker_id!r} has joined without a tiling", hint="join again, with it")
        return worker.tiling.fragment(self.plan.fragments[message.fragment])

    def charge_record(self, worker_id: str, now: float) -> None:
        """Charge the worker for a record of a join, a leave or a lease."""
        worker = self.members.find(worker_id)
        if worker is not None:
            self.quotas.charge("records", worker.token, worker_id, now, is_newcomer=worker.is_newcomer)

    def revoke(self, valid: Collection[str], now: float) -> None:
        """Remove all workers whose token is no longer valid."""
        for worker in [one for one in self.members if one.live and one.token and one.token not in valid]:
            gone = events.WorkerLeft(worker.worker_id, f"its token {worker.token!r} was revoked, or has expired")
            self.remove(worker, gone, now)

    def heartbeat(self, message: Heartbeat, now: float) -> HeartbeatAnswer:
        worker = self._heard(message, now)
        return HeartbeatAnswer(
            sync_round=self.sync_round,
            sync_every=self.local_steps(worker),
            commands=tuple(worker.commands.values()),
            num_workers=self.num_workers,
            num_registered=len(self.members.live_ids),
            measure_link=True if self.steering is not None and lacks_link(worker) else UNSET,
        )

    @property
    def num_workers(self) -> int:
        """How many workers the run counts on. Before the start: as many as the operator announced. Afterwards: the live
        workers, but at least as many as a round needs."""
        live = len(self.members.live_ids)
        return max(live, self.rules.floor if self.started else self.rules.num_workers)

    def local_steps(self, worker: KnownWorker) -> int | None:
        """Dynamic local updates: H for this worker, from its speed relative to the fastest. None = the plan's H."""
        if not self.rules.dylu or self.plan is None or worker.steps_per_second <= 0.0:
            return None
        base = max(self.rules.dylu_base or self.plan.sync_every, len(self.fragments))
        return local_steps(worker.steps_per_second, self.members.fastest, base, least=len(self.fragments))

    def leave(self, message: Leave, now: float) -> LeaveAnswer:
        """Remove a worker that leaves. A repeated message must not fail."""
        try:
            worker = self._heard(message, now)
        except UnknownWorker:
            return LeaveAnswer()
        was_live = worker.live
        self.remove(worker, events.WorkerLeft(worker.worker_id, message.reason), now)
        if was_live and not self.members.live_ids:
            self._effects.append(AllLeft(message.reason, events.mean_loss(one.loss for one in self.members)))
        return LeaveAnswer()

    def lease(self, message: Lease, now: float) -> LeaseAnswer:
        """Lease data to a worker (leases.py). Some leases need a record; writing it is charged then."""
        worker = self._heard(message, now)
        worker.conduct.check(worker.worker_id, now)
        self.quotas.check("records", worker.token, worker.worker_id, now, is_newcomer=worker.is_newcomer)
        data, is_known = message.dataset, message.dataset.name in self.leases.tables
        answer = self.leases.lease(message, now, self.members.live_ids)
        if not is_known:
            facts = (data.samples, data.unit_samples, data.epochs, data.seed, data.shuffle)
            self._effects.append(events.DataLeased(data.name, worker.worker_id, *facts))
        return answer

    # --- a contribution -------------------------------------------------------------------------------------------

    def offer(self, message: Offer, now: float) -> OfferAnswer:
        assert self.plan is not None
        worker = self._heard(message, now)
        fragment = self._fragment(message.fragment)
        accepted = worker.entry_of(message)
        if accepted is not None:
            return OfferAnswer(state="accepted", version=accepted.version)
        if message.loss is not UNSET:
            worker.loss = message.loss
        upload = self.uploads.by_key.get(message.key)
        if self.naming is not None or worker.plan_revision < self._unfit_before:
            self._settle_names(worker)
        with self._refusals_noted(worker, fragment, now):
            try:
                worker.conduct.check(worker.worker_id, now)
                check_offer(message, fragment, self.plan, self.rules, self.codecs, self.cutting(message))
            except Refused:
                self.uploads.unqueue(worker.worker_id, message.fragment)  # this key will not be offered again
                raise
            if upload is not None:
                check_same_offer(message, upload.offer)
        if upload is not None:
            upload.heard_at, upload.is_told = now, True
        elif (early_s := worker.claimant(message.fragment).free_at - now) > 0.0 and self.rules.takes_late:
            return OfferAnswer(state="wait", retry_after_s=early_s)  # the worker pushes too often
        else:
            self._check_costs(worker, message, now)
            for other in self.uploads.of(worker.worker_id, message.fragment):
                self.drop(other.key)
            upload = self.uploads.request(message, now, is_newcomer=worker.is_newcomer)
        if upload is None and self._drop_lapsed(now):
            upload = self.uploads.request(message, now, is_newcomer=worker.is_newcomer)
        if upload is None:
            return OfferAnswer(state="wait", retry_after_s=self.uploads.wait_s(message.key, now))
        return OfferAnswer(state="send", missing=upload.missing)

    def _drop_lapsed(self, now: float) -> bool:
        """Drop idle uploads that occupy room for which others wait. Their workers offer again when they wake up."""
        lapsed = self.uploads.take_lapsed(now)
        for other in lapsed:
            self._effects.append(events.UploadDropped(other.offer.worker_id, other.offer.fragment))
            self.drop(other.key)
        return bool(lapsed)

    def _settle_names(self, worker: KnownWorker) -> None:
        """Fix the plan's names at the first contribution that uses them. Refuse a worker that joined before the names
        changed."""
        if worker.plan_revision < self._unfit_before:
            raise PlanMismatch(
                f"what the run trains was settled after {worker.worker_id!r} had joined without a manifest",
                hint="register again: the answer has the plan and the parameters",
            )
        if self.naming is not None and not self.naming.named:
            self.naming = replace_fields(self.naming, named=len(self.fragments), whole=True)

    def _check_costs(self, worker: KnownWorker, message: Offer, now: float) -> None:
        """Refuse another contribution of this worker if it has used up a quota."""
        token, worker_id, quotas, is_newcomer = worker.token, worker.worker_id, self.quotas, worker.is_newcomer
        if worker.was_refused:  # otherwise nothing was charged
            quotas.check("refused", token, worker_id, now, is_newcomer=is_newcomer)
        if quotas.limits.bytes is not None:
            quotas.check("bytes", token, worker_id, now, is_newcomer=is_newcomer)
        if is_newcomer:
            quotas.open_upload(token, message.key, self.uploads.is_open)

    def begin_part(self, message: PutPart, now: float) -> Upload | PutPartAnswer:
        """The upload that the part belongs to, or the answer if the part has already arrived."""
        worker = self._heard(message, now)
        fragment = self._fragment(message.fragment)
        if worker.entry_of(message) is not None:
            return PutPartAnswer(state="duplicate")
        upload = self._sending(worker, message, now)
        with self._refusals_noted(worker, fragment, now):
            upload.check_part(message.part)
            upload.heard_at = now
            stored = upload.part_hashes.get(message.part)
            if stored is None:
                return upload
            check_same_part(message, stored)
        return PutPartAnswer(state="duplicate")

    def part_arrived(self, message: PutPart, now: float) -> PutPartAnswer:
        """The part's bytes are stored and have the announced hash."""
        begun = self.begin_part(message, now)
        if isinstance(begun, Upload):
            if self.quotas.limits.bytes is not None:
                begin, end = begun.parts.range(message.part)
                worker = self._heard(message, now)
                self.quotas.charge(
                    "bytes", worker.token, worker.worker_id, now, is_newcomer=worker.is_newcomer, amount=end - begin
                )
            begun.part_hashes[message.part] = message.hash
            return PutPartAnswer(state="stored")
        return begun

    def begin_commit(self, message: Commit, now: float) -> Upload | CommitAnswer:
        """The whole contribution, to be checked; or the earlier answer if the contribution was accepted before."""
        assert self.plan is not None
        worker = self._heard(message, now)
        fragment = self._fragment(message.fragment)
        accepted = worker.entry_of(message)
        with self._refusals_noted(worker, fragment, now):
            if accepted is not None:
                check_accepted(message, accepted.payload_hash)
                return CommitAnswer(version=accepted.version)
            upload = self._sending(worker, message, now)
            upload.heard_at = now
            check_received(message, upload.payload_hash())
            check_offer(upload.offer, fragment, self.plan, self.rules, self.codecs, self.cutting(upload.offer))
            return upload

    def accept(self, message: Commit, now: float, norm: float | None = None) -> CommitAnswer:
        """Count a checked contribution (shapes, finite values) once, unless its round has closed meanwhile or the
        contribution is absurdly large. `norm`: ‖Δ‖."""
        begun = self.begin_commit(message, now)
        if isinstance(begun, CommitAnswer):
            return begun
        offer, rules, worker = begun.offer, self.rules, self._heard(message, now)
        fragment = self.fragments[offer.fragment]
        round_, plausible = fragment.round, self._plausible(worker, offer, fragment, now)
        size = Size(norm, plausible.steps) if norm is not None and offer.steps and rules.norm_screen else None
        look_again = size is not None and self._check_size(worker, offer, fragment, size, now)
        keep = look_again or not rules.aggregation.is_plain
        staleness = fragment.staleness(offer.base_version)
        raw = reported(plausible, rules.weight_by)
        weight = fragment.usual.bounded(raw, rules.weight_by, rules.max_weight_ratio)
        weight *= staleness_factor(staleness) if rules.weigh_staleness else 1.0
        already = sum(voice.weight for voice in round_.voices(offer.worker_id))
        weight = min(weight, max(fragment.usual.most(rules.weight_by, rules.max_weight_ratio) - already, 0.0))
        participant = Participant(
            worker_id=offer.worker_id, sequence=offer.sequence, weight=weight, staleness=staleness, norm=norm
        )
        entry = Acceptance(sequence=offer.sequence, payload_hash=message.payload_hash, version=round_.version)
        learned = len(worker.zeros) < len(self.fragments)
        worker.enter(offer, entry, staleness, norm)
        if learned and len(worker.zeros) == len(self.fragments):
            self._effects.append(events.NothingLearned(worker.worker_id, offer.steps))
        work = ClaimedWork(offer.steps, offer.samples, offer.tokens)
        round_.count(participant, rules, now, reported=raw, work=work, size=size, kept=keep)
        round_.size_bytes += offer.size_bytes
        if self.leases.tables:
            self.leases.accept(offer, round_.version, now)
        more = ClaimedWork(plausible.steps, plausible.samples, plausible.tokens)
        fragment.done = ClaimedWork(*map(sum, zip(fragment.done, more, strict=True)))
        self.total_accepted += 1
        self.uploads.complete(begun.key)
        scale = fragment.usual.relative(weight, rules.weight_by)
        first = len(round_.participants) == 1
        self._effects.append(
            Accumulate(
                begun.key,
                round_.version,
                weight,
                scale,
                offer.base_version,
                offer.codec,
                self.cutting(offer),
                first=first,
                keep=keep,
            )
        )
        answer = CommitAnswer(version=round_.version)
        self.close_if_ready(fragment, now)
        return answer

    def _plausible(self, worker: KnownWorker, offer: Offer, fragment: Fragment, now: float) -> Offer:
        """The offer, with steps, samples and tokens bounded by what closed rounds make plausible."""
        elapsed_s, most_per_s = now - worker.claimant(offer.fragment).last_at, self.rules.max_tokens_per_s
        bounded = {
            unit: int(
                allowed(getattr(offer, unit), fragment.rates.limit(worker.worker_id, unit, most_per_s), elapsed_s)
            )
            for unit in ("steps", "samples", "tokens")
        }
        return replace(offer, **bounded)

    def _settle_claims(self, fragment: Fragment, now: float) -> None:
        """Decide how many of the claimed tokens count when a round closes."""
        index, round_ = fragment.published.fragment, fragment.round
        for worker in filter(None, map(self.members.find, round_.contributors)):
            worker.claims[index] = worker.claimant(index)
        live = [worker for worker in self.members if worker.live]
        known = {worker.worker_id: worker.claims[index] for worker in self.members if index in worker.claims}
        silent = {w.worker_id for w in live if index not in w.claims and now - w.joined_at < PATIENCE_S}
        fragment.rates, counted = settle(
            round_.claims,
            known,
            live={worker.worker_id for worker in live},
            others_come=bool(silent & self.members.awaited_ids(now)),
            most_per_s=self.rules.max_tokens_per_s,
            push_ratio=self.rules.max_weight_ratio,
        )
        round_.tokens = [float(tokens) for tokens in counted]
        for claim, tokens in zip(round_.claims, counted, strict=True) if index == 0 else ():  # all see the same tokens
            member = self.members.find(claim.worker_id)
            if member is not None:
                member.tokens += tokens
            if tokens < claim.work.tokens:
                self._effects.append(events.ClaimBounded(claim.worker_id, int(claim.work.tokens), tokens))

    def reject(self, key: ContributionKey, refusal: Refused, now: float) -> None:
        """The driver has checked the content and found it invalid: refuse the contribution for good."""
        if self.uploads.by_key.get(key) is None:
            return
        self._refuse(key, refusal)
        self.turn_away(key.worker_id, [key.fragment], refusal, now)

    def turn_away(self, worker_id: str, fragments: Sequence[int], refusal: Refused, now: float) -> None:
        """The driver has refused this worker's contribution to these fragments. Together they are one offence."""
        worker = self.members.find(worker_id)
        if worker is not None:
            for i, fragment in enumerate(fragments):
                self._note_refusal(worker, self.fragments[fragment], refusal, now, is_offence=i == 0)

    def _refuse(self, key: ContributionKey, refusal: Refused) -> None:
        """Refuse a complete contribution for its content."""
        self.drop(key)
        self._effects.append(events.ContributionRefused(key.worker_id, key.fragment, refusal.message))

    def _sending(self, worker: KnownWorker, message: OfContribution, now: float) -> Upload:
        """The upload that the message belongs to, if the worker may send it."""
        worker.conduct.check(worker.worker_id, now)
        upload = self.uploads.by_key.get(message.key)
        if upload is None:
            raise MissingParts(f"contribution {message.key} is not on offer", hint="offer it (again)")
        return upload

    def _check_size(self, worker: KnownWorker, offer: Offer, fragment: Fragment, size: Size, now: float) -> bool:
        """Refuse a contribution far larger than usual for this fragment. If that refuses half of the workers, the run
        has changed: the screen forgets what was usual, and the workers are not blamed. True: keep the contribution
        until its round closes, to check it again. That takes at least three workers, and room for all contributions of
        a round: with less room, the last upload would wait for the first and the first for the last."""
        screen, workers = fragment.screen, max(self.rules.num_workers, len(self.members.live_ids))
        enough = workers >= LEAST_CONTRIBUTORS and not self.rules.asynchronous
        needed_bytes = workers * sum(one.max_payload_bytes(1, offer.codec) for one in self.fragments)
        try:
            look_again = screen.check(offer.worker_id, size, self.rules.norm_screen)
            return look_again and enough and needed_bytes <= self.uploads.capacity_bytes
        except Absurd as refusal:
            is_news = screen.note_refused(offer.worker_id, fragment.round.version)
            self._refuse(offer.key, refusal)
            if screen.has_changed(len(self.members.live_ids)):
                self._effects.append(events.ScreenForgotten(offer.fragment, "half of the workers were refused by it"))
                for other in self.members:
                    if other.worker_id in screen.refused:
                        other.conduct.forgive(refusal)
                screen.forget()
                fragment.round.refusals.clear()
            else:
                self._note_refusal(worker, fragment, refusal, now, is_offence=is_news)
            raise

    @contextmanager
    def _refusals_noted(self, worker: KnownWorker, fragment: Fragment, now: float) -> Iterator[None]:
        try:
            yield
        except Refused as refusal:
            self._note_refusal(worker, fragment, refusal, now)
            raise

    def _note_refusal(
        self, worker: KnownWorker, fragment: Fragment, refusal: Refused, now: float, *, is_offence: bool = True
    ) -> None:
        """Count a refusal, and an offence if it is one. Whatever the reason, a round stops waiting for a worker that it
        has refused too often; otherwise the others would wait for ever. (While a round is closing, there is nothing to
        rebase on yet, so a worker may be refused as late more than once.)"""
        round_ = fragment.round
        is_late = isinstance(refusal, StaleRound | TooOld) and fragment.published.version < round_.version - 1
        if is_late or isinstance(refusal, BLAMELESS):
            return
        if not isinstance(refusal, StaleRound | TooOld | FutureRound):  # refused for its content, not for its time
            worker.was_refused = True
            self.quotas.charge("refused", worker.token, worker.worker_id, now, is_newcomer=worker.is_newcomer)
        if is_offence and isinstance(refusal, OFFENCE_KINDS):
            self._note_offence(worker, refusal, now)
        if worker.conduct.is_quarantined(now) or not round_.refuse(worker.worker_id):
            return
        counted_out = f"refused {MOST_REFUSALS} times, so the round closes without it unless it brings a good one first"
        refusal.hint = f"{refusal.hint}; {counted_out}" if refusal.hint else counted_out
        index = fragment.published.fragment
        self._effects.append(events.WorkerCountedOut(worker.worker_id, index, round_.version, refusal.message))
        self.close_if_ready(fragment, now)

    def _note_offence(self, worker: KnownWorker, refusal: Refused, now: float) -> None:
        """Note an offence. A worker that offends too often is quarantined: its unfinished uploads are dropped, and no
        round waits for it."""
        one_too_many = worker.conduct.offend(refusal, now)
        self._effects.append(events.OffenceNoted(worker.worker_id, refusal.code, worker.conduct.total))
        if one_too_many:
            self.members.quarantined(worker)
            left_s = round(worker.conduct.until - now)
            self._effects.append(events.WorkerQuarantined(worker.worker_id, left_s, worker.conduct.reason))
            self._forget(worker)
            self._close_rounds(now)

    # --- a round ends, an agreement begins ------------------------------------------------------------------------

    def close_if_ready(self, fragment: Fragment, now: float) -> None:
        """Close the open round if it may close. This is the only place where a round ends."""
        verdict = self.verdict(fragment, now, says_why=False)
        if not verdict.close:
            self.wakes_sooner |= verdict.wake_at is not None and verdict.wake_at < self._wakes_at
            return
        index, contributors = fragment.published.fragment, fragment.round.contributors
        turned_away = frozenset() if self.rules.aggregation.is_plain else self._turned_away(fragment, now)
        self._settle_claims(fragment, now)
        began_at, size_bytes = fragment.round.first_at, fragment.round.size_bytes
        closed = fragment.close(self.rules, self.members.awaited_ids(now), len(turned_away))
        self.members.round_closed(index, contributors)
        self.budget.add(index, closed.tokens, now)
        self._summaries[index, closed.version] = events.RoundSummary(
            waited_s=now - (now if began_at is None else began_at),
            size_bytes=size_bytes,
            tokens=self.budget.total,
            share=self.budget.share if self.budget.limit is not None else None,
            seconds_left=self.budget.seconds_left if self.budget.limit is not None else None,
        )
        outer_lr = None if self.plan is None or self.plan.outer_lr is UNSET else self.plan.outer_lr
        if self.next_plan is not None:
            self._follow(self.next_plan)
        left_out = self._left_out(index, closed) if closed.outliers or closed.too_few else frozenset()
        if self.leases.tables:
            without = {key.worker_id for key in left_out}
            told = self.leases.closed(index, closed.version, without, len(self.fragments))
            self._trained[index, closed.version] = told
        remembered = self.remember() if self.remembers else None
        self._effects.append(
            CloseRound(index, closed.version, closed.participants, remembered, left_out, turned_away, outer_lr=outer_lr)
        )
        for upload in self.uploads.of(fragment=index):
            try:
                check_age(upload.offer, fragment, self.rules)
            except Refused:
                self.drop(upload.key)  # its worker learns of it at its next message; the room is free now
        for offer in self.uploads.waiting(index) if self.uploads.queued else ():
            try:
                check_age(offer, fragment, self.rules)
            except Refused:
                self.uploads.unqueue(offer.worker_id, index)
        if self.budget.limit is not None:
            self._check_budget(now)
        if fragment.moves_next is not None:
            self._move_if_free(fragment)

    def move_from_above(self, index: int, upper_version: int) -> None:
        """The layer above has agreed on a version of this fragment. It becomes our next version: now if the open round
        has accepted nothing, otherwise directly after that round closes."""
        self._fragment(index).moves_next = upper_version
        self._move_if_free(self.fragments[index])

    def _move_if_free(self, fragment: Fragment) -> None:
        if fragment.moves_next is not None and not fragment.round.participants:
            version = fragment.move(self.rules.max_staleness)
            remembered = self.remember() if self.remembers else None
            self._effects.append(CloseRound(fragment.published.fragment, version, (), remembered, from_above=True))

    def _close_rounds(self, now: float) -> None:
        for fragment in self.fragments:
            self.close_if_ready(fragment, now)

    def verdict(self, fragment: Fragment, now: float, *, says_why: bool = True) -> RoundVerdict:
        """Whether the fragment's open round may close, and if not, what it waits for."""
        turned_away = 0 if self.rules.aggregation.is_plain else len(self._turned_away(fragment, now))
        live = self.members.awaited_ids(now)
        return fragment.round.verdict(
            self.rules, now, started=self.started, live=live, turned_away=turned_away, says_why=says_why
        )

    def waiting_for(self, fragment: Fragment, now: float, verdict: RoundVerdict | None = None) -> str:
        """What the open round waits for, in words. If a worker in it may be dead, this says until when the round waits.
        `verdict`: the round's verdict, if it is already known."""
        verdict, open_round = verdict or self.verdict(fragment, now), fragment.round
        silent = "" if verdict.stuck else self.members.perhaps_dead(open_round.expected - open_round.contributors, now)
        return f"{verdict.waiting_for}; {silent}" if verdict.waiting_for and silent else verdict.waiting_for

    def silence(self, now: float) -> str:
        """Which workers may be dead, and when each counts as dead; "" = none."""
        return self.members.perhaps_dead(self.members.live_ids, now)

    def _turned_away(self, fragment: Fragment, now: float) -> frozenset[str]:
        """The live workers that an aggregation rule must count as missing from the open round: they are in quarantine,
        or their contribution was refused for its size, or refused too often."""
        version, refused = fragment.round.version, fragment.screen.refused
        too_large = {worker_id for worker_id, last in refused.items() if last == version}
        quarantined = {worker.worker_id for worker in self.members if worker.conduct.is_quarantined(now)}
        found = (too_large | quarantined | fragment.round.counted_out) & self.members.live_ids
        return frozenset(found - fragment.round.contributors)

    def _left_out(self, fragment: int, closed: Closed) -> frozenset[ContributionKey]:
        """The contributions that a closed round left out; all of them if too few workers had trained."""
        if closed.too_few:
            self.total_too_few += 1
            rule = self.rules.aggregation
            self._effects.append(events.TooFewTrained(fragment, closed.version, closed.too_few, rule.fewest, rule.name))
        for outlier in closed.outliers:
            worker_id = outlier.participant.worker_id
            self._count_left_out(worker_id)
            self._effects.append(events.ContributionLeftOut(worker_id, fragment, closed.version, outlier.facts))
        run_id, left_out = self.run_id, [outlier.participant for outlier in closed.outliers]
        return frozenset(
            ContributionKey(run_id=run_id, worker_id=p.worker_id, fragment=fragment, sequence=p.sequence)
            for p in left_out
        )

    def note_verdict(self, fragment: int, version: int, refused: Mapping[str, str], unused: Sequence[str]) -> None:
        """The driver has combined a round. `refused`: worker id → why a screen that reads values refused its
        contribution. `unused`: workers whose contribution the rule did not choose. These share one event, because Krum
        leaves out all but one in every round."""
        for worker_id in (*refused, *unused):
            self._count_left_out(worker_id)
        for worker_id, why in refused.items():
            self._effects.append(events.ContributionLeftOut(worker_id, fragment, version, {"why": why}))
        if unused:
            rule = self.rules.aggregation.name
            self._effects.append(events.ContributionsNotChosen(fragment, version, list(unused), rule))

    def _count_left_out(self, worker_id: str) -> None:
        worker = self.members.find(worker_id)
        if worker is not None:
            worker.left_out += 1

    def published(self, agreement: Agreement, now: float) -> None:
        """The driver has taken the outer step and stored the result: from now on anybody may learn of it. An agreement
        without participants is allowed."""
        fragment = self.fragments[agreement.fragment]
        assert agreement.version == fragment.published.version + 1, "agreements are published in order"
        fragment.published = agreement
        summary = self._summaries.pop((agreement.fragment, agreement.version), None)
        if summary is not None:  # the newest losses: a worker reports its loss with its offer
            members = [self.members.find(p.worker_id) for p in agreement.participants]
            losses = tuple(member.loss if member is not None else None for member in members)
            summary = replace_fields(summary, losses=losses)
            if agreement.fragment == 0 and summary.loss is not None:
                self.losses.append(summary.loss)
        self._effects.append(events.VersionPublished(agreement, summary))
        self._effects += self._trained.pop((agreement.fragment, agreement.version), [])
        self.close_if_ready(fragment, now)

    def poll(self, message: Poll, now: float) -> PollAnswer:
        worker = self._heard(message, now)
        fragment = self._fragment(message.fragment)
        check_sections(message.sections, fragment, self.cutting(message))
        last_sequence, plan = worker.last_sequence(message.fragment), self.plan
        # A worker that waits for something newer than the open round holds an agreement that a resume has undone.
        is_new = fragment.published.version > message.after or message.after >= fragment.round.version
        if self._holds_back(fragment, now) and message.after == fragment.published.version - 1:
            return PollAnswer(
                agreement=None,
                last_sequence=last_sequence,
                waiting_for=THE_LAYER_ABOVE,
                retry_after_s=ASK_AGAIN_SOON_S,
            )
        if is_new:
            newer = plan if plan is not None and plan.revision != message.plan_revision else None
            above = tuple(v for v in fragment.above if v <= fragment.published.version)
            agreement = replace(fragment.published, above=above) if above else fragment.published
            return PollAnswer(agreement=agreement, last_sequence=last_sequence, plan=newer)
        verdict = self.verdict(fragment, now)
        wanted = tuple(
            (i, other.round.version)
            for i, other in enumerate(self.fragments)
            if other is not fragment
            and other.round.wants(worker.worker_id, self.rules)
            and not worker.conduct.is_quarantined(now)
        )
        return PollAnswer(
            agreement=None,
            last_sequence=last_sequence,
            waiting_for=self.waiting_for(fragment, now, verdict)[:256],
            stuck=verdict.stuck,
            wanted=wanted,
            retry_after_s=ASK_AGAIN_SOON_S if wanted else ASK_AGAIN_S,
        )

    def _holds_back(self, fragment: Fragment, now: float) -> bool:
        """Must members wait for a version from above before their next steps? Not once the open round has accepted a
        contribution (from a newcomer, or a late one): the version from above can enter only after that round, and the
        round waits for the very members that would be held back."""
        return now < self.withheld_until and not fragment.round.participants

    def get_part(self, message: GetPart, now: float) -> None:
        """Check that this worker may fetch. (The driver has the bytes and knows how long it keeps them.)"""
        self._heard(message, now)
        self._fragment(message.fragment)

    # --- time -----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Declare silent workers dead, and apply deadlines that have passed."""
        self.now = now
        for worker in self.members.silent(now):
            self.members.total_deaths += 1
            self.remove(worker, events.WorkerDied(worker.worker_id, round(now - worker.last_seen, 1)), now)
        if not self.started:
            self._start_if_ready(now)
        if self.uploads.queued:
            self._drop_lapsed(now)
        self._close_rounds(now)
        if self.stop_at is not None:
            self._stop_if_done(now)

    def next_wake(self, now: float) -> float | None:
        """When `tick` will next have something to decide (None = only after a message)."""
        moments = [self.members.next_death(), self.stop_at]
        if not self.started and self._first_join_at is not None and self.rules.start_deadline_s is not None:
            moments.append(self._first_join_at + self.rules.start_deadline_s)
        moments += [self.verdict(fragment, now).wake_at for fragment in self.fragments]
        found = min((m for m in moments if m is not None and m > now), default=None)
        self._wakes_at, self.wakes_sooner = math.inf if found is None else found, False
        return found

    # --- an operator's orders, and the end ------------------------------------------------------------------------

    def control(self, message: Control, now: float) -> ControlAnswer:
        """Carry out an operator's order. (The driver itself carries out `save`.)"""
        match message.kind:
            case "kick":
                [worker] = self._named(message)
                worker.kicked = message.reason or "an operator removed it"
                self.remove(worker, events.WorkerKicked(worker.worker_id, message.reason), now)
                return ControlAnswer(done=f"{worker.worker_id} is out of the run; it may join again after a restart")
            case "pardon":
                [worker] = self._named(message)
                offences = worker.conduct.total
                worker.conduct.clear()
                self._effects.append(events.WorkerPardoned(worker.worker_id, offences, message.reason))
                return ControlAnswer(
                    done=f"{worker.worker_id} has a clean slate and takes part again from the next round"
                )
            case "release":
                [worker] = self._named(message)
                keys, worker.keys = len(worker.keys), ()
                if worker.live:  # its session is void: a worker that is still there joins again and owns the id again
                    self.remove(worker, events.WorkerLeft(worker.worker_id, "an operator released its id"), now)
                self._effects.append(events.WorkerReleased(worker.worker_id, keys, message.reason))
                return ControlAnswer(
                    done=f"{worker.worker_id} no longer belongs to a key; the next start that brings a key owns it"
                )
            case "drain" | "sync":
                workers = [worker.worker_id for worker in self._named(message)]
                self.order(workers, message.kind, message.reason or "an operator asked for it")
                what = "contribute and leave" if message.kind == "drain" else "contribute"
                return ControlAnswer(done=f"{', '.join(workers)} will {what} at the next step after the next heartbeat")
            case "lead":
                return self._name_leader(message)
            case "plan":
                if self.plan is None:
                    raise BadRequest("there is no plan to change before the first worker has joined")
                self.next_plan = changed(self.next_plan or self.plan, message.changes)
                revision, stated = changes_in(self.next_plan.revision), msgspec.to_builtins(message.changes)
                self._effects.append(events.PlanChanged(revision, {k: v for k, v in stated.items() if v is not None}))
                return ControlAnswer(done=f"plan revision {revision} holds from the next round that closes")
            case "budget":
                self.budget.limit = message.tokens or None
                self.budget.announced = False
                if self.closing == BUDGET_SPENT:
                    self.closing, self.stop_at = "", None
                    withdrawn = self.members.withdraw(BUDGET_SPENT)
                    self._effects.append(events.DrainWithdrawn(withdrawn, "the token budget was raised"))
                self._check_budget(now)
                limit = f"ends at {message.tokens} tokens" if message.tokens else "has no end"
                return ControlAnswer(done=f"the run {limit}; {self.budget.total} are in the model")
            case "forget":
                if message.dataset is UNSET:
                    raise BadRequest(
                        "the order must name the dataset to forget, got none", hint="`outerstep data` lists them"
                    )
                table = self.leases.forget(message.dataset)
                self._effects.append(events.DataForgotten(message.dataset, table.owner, table.done.total))
                return ControlAnswer(
                    done=f"{message.dataset} is forgotten; the next worker that requests it describes it again"
                )
            case "shutdown":
                self._finish(message.reason or "an operator asked for it", now)
                self._stop_if_done(now)
                return ControlAnswer(done="the workers will contribute and leave, then the server stops")
            case "save":
                raise BadRequest("save is carried out by the server itself")

    def _name_leader(self, message: Control) -> ControlAnswer:
        [cluster] = self._named(message)
        able, leader = cluster.facts.members if cluster.facts is not None else (), message.leader
        is_led_by_a_member = cluster.facts is not None and bool(cluster.facts.leader)
        if not is_led_by_a_member:
            raise BadRequest(f"{cluster.worker_id} is not a cluster, or its server leads it: no member can lead it")
        if leader is UNSET or leader not in able:
            got = "nobody" if leader is UNSET else leader
            raise BadRequest(f"the leader of {cluster.worker_id} must be one of {', '.join(able)}, got {got}")
        reason = message.reason or "an operator asked for it"
        self.members.order_leader(cluster.worker_id, leader, reason)
        self._effects.append(events.LeaderOrdered(cluster.worker_id, leader, reason))
        return ControlAnswer(done=f"{cluster.worker_id} will be led by {leader} after its next round, if {leader} can")

    def _named(self, message: Control) -> list[KnownWorker]:
        """The worker that an order names, or all live workers if it names none. A pardon or a release may name an
        absent worker."""
        live = sorted((worker for worker in self.members if worker.live), key=lambda worker: worker.worker_id)
        names = ", ".join(worker.worker_id for worker in live) or "none"
        if message.worker_id is None:
            if message.kind not in ("drain", "sync"):
                raise BadRequest(f"{message.kind} needs a worker id; live: {names}")
            if not live:
                raise UnknownWorker("no worker is live")
            return live
        worker = self.members.find(message.worker_id)
        absent_too = message.kind in ("pardon", "release")
        if worker is None and absent_too:
            raise UnknownWorker(f"no worker {message.worker_id!r} is known; live: {names}")
        if worker is None or not (worker.live or absent_too):
            raise UnknownWorker(f"no live worker {message.worker_id!r}; live: {names}")
        return [worker]

    def order(self, worker_ids: Sequence[str], kind: Literal["drain", "sync"], reason: str) -> None:
        for worker_id in worker_ids:
            self.members.order(worker_id, kind, reason)
        ordered = events.DrainOrdered if kind == "drain" else events.SyncOrdered
        self._effects.append(ordered(list(worker_ids), reason))

    def _finish(self, reason: str, now: float) -> None:
        """End the run: admit no new worker, let all workers contribute and leave, then stop."""
        self.closing = self.closing or reason
        self.stop_at = now + self.drain_timeout_s
        self.order(sorted(self.members.live_ids), "drain", reason)
        if not self.started:  # no worker will join any more, so the present ones need not wait for others
            self._start_if_ready(now)
            self._close_rounds(now)

    def _check_budget(self, now: float) -> None:
        """End the run if the model has seen enough tokens."""
        if self.budget.is_spent and not self.budget.announced:
            self.budget.announced = True
            self._effects.append(events.BudgetSpent(self.budget.total, self.budget.limit))
            self._finish(BUDGET_SPENT, now)

    def _stop_if_done(self, now: float) -> None:
        """Stop an ending run when all workers have left, or when their time is over."""
        if self.stop_at is not None and (not self.members.live_ids or now >= self.stop_at):
            self.stop_at = None
            self._effects.append(StopServer(self.closing))

    # --- the controller's orders ----------------------------------------------------------------------------------

    @property
    def steered(self) -> SteeredRun:
        """The run, as the controller sees it."""
        live = tuple(member for member in self.members if member.live)
        is_open = self.naming is None and not self.closing
        return SteeredRun(self.next_plan or self.plan, self.manifest, self.settled, live, self.sync_round, is_open)

    def steer(self, decision: LayerDecision) -> bool:
        """Carry out the controller's decision. True: there is a new plan to store."""
        assert self.steering is not None, "nobody has named a target"
        plan, told = self.steering.carry_out(self.steered, decision)
        self._effects += told
        if plan is None:
            return False
        self.next_plan = plan
        self._follow_deadline(self.steering)
        return True

    def _follow_deadline(self, steering: Steering) -> None:
        if steering.round_deadline_s is not None:
            self.rules = replace_fields(self.rules, round_deadline_s=steering.round_deadline_s)

    # --- over a restart of the server -----------------------------------------------------------------------------

    def remember(self) -> Remembered:
        """The state that must survive a restart, as of the last decision."""
        assert self.plan is not None, "nobody has joined yet"
        assert self.settled is not None
        plan = self.next_plan or self.plan
        in_open_rounds = sum(len(fragment.round.participants) for fragment in self.fragments)
        return Remembered(
            run_id=self.run_id,
            manifest=None if self.refitted_from is None else self.manifest,
            plan=plan,
            versions=tuple(fragment.round.version - 1 for fragment in self.fragments),
            ledger={worker.worker_id: worker.record() for worker in self.members},
            totals={
                "total_submissions": self.total_accepted - in_open_rounds,
                "total_worker_deaths": self.members.total_deaths,
                "rounds_too_few": self.total_too_few,
                **{f"tokens_{fragment}": tokens for fragment, tokens in self.budget.per_fragment.items()},
            },
            facts={
                "started": self.started,
                "last_command": self.members.last_command,
                "token_budget": self.budget.limit,
                "live": sorted(self.members.live_ids),
                "settled": asdict(self.settled),
                "usual_weights": [asdict(fragment.usual) for fragment in self.fragments],
                "usual_tokens": [asdict(fragment.usual_tokens) for fragment in self.fragments],
                "kicked": {worker.worker_id: worker.kicked for worker in self.members if worker.kicked},
                "norms": [fragment.screen.remembered() for fragment in self.fragments],
                **({} if self.steering is None else self.steering.remembered()),
                **({} if self.codecs == (plan.codec,) else {"codecs": list(self.codecs)}),
                **({"data": self.leases.remembered()} if self.leases.tables else {}),
                **({} if self.naming is None else {"naming": asdict(self.naming)}),
                **({} if self.refitted_from is None else {"refitted_from": self.refitted_from}),
                **(
                    {"above": [[list(fragment.above), fragment.upper_version] for fragment in self.fragments]}
                    if any(fragment.above for fragment in self.fragments)
                    else {}
                ),
                "conduct": {
                    worker.worker_id: worker.conduct.remembered(self.now)
                    for worker in self.members
                    if worker.conduct.total
                },
            },
        )

    def resume(
        self,
        ledger: Mapping[str, WorkerRecord],
        totals: Mapping[str, int | float],
        facts: Mapping[str, Any],
        now: float,
        *,
        expect_back: bool = True,
        first_incarnation: int = 1,
    ) -> None:
        """Restore the remembered state. Plan and fragments must be fixed, and nobody may have joined yet.
        `expect_back`: earlier workers get the usual time to return, so that no round closes with the first of them.
        `first_incarnation`: if joins may have been forgotten, a number above all that may have been given since, say
        the time in seconds. Two starts of a worker with the same number could not be distinguished."""
        self.members.first_incarnation = first_incarnation
        self.total_accepted = int(totals.get("total_submissions", 0))
        self.members.total_deaths = int(totals.get("total_worker_deaths", 0))
        self.total_too_few = int(totals.get("rounds_too_few", 0))
        self.budget.per_fragment = {i: int(totals.get(f"tokens_{i}", 0)) for i in range(len(self.fragments))}
        for fragment, usual in zip(self.fragments, facts.get("usual_weights", []), strict=False):
            fragment.usual = UsualWeight(**usual)
        for fragment, usual in zip(self.fragments, facts.get("usual_tokens", []), strict=False):
            fragment.usual_tokens = UsualWeight(**usual)
        for fragment, norms in zip(self.fragments, facts.get("norms", []), strict=False):
            fragment.screen = NormScreen.resumed(norms)
        for fragment, (above, upper_version) in zip(self.fragments, facts.get("above", []), strict=False):
            fragment.above, fragment.upper_version = [int(version) for version in above], int(upper_version)
        self.codecs = tuple(dict.fromkeys((*map(str, facts.get("codecs", ())), *self.codecs)))
        self.members.last_command = int(facts.get("last_command", 0)) + LEAP
        live = set(facts.get("live", ())) if expect_back else set()
        for worker_id, record in ledger.items():
            worker = KnownWorker.recorded(worker_id, record, now)
            worker.live = worker_id in live
            worker.kicked = facts.get("kicked", {}).get(worker_id, "")
            worker.conduct = Conduct.resumed(facts.get("conduct", {}).get(worker_id, {}), now)
            self.members.restore(worker)
        if self.steering is not None:
            self.steering.resume(facts)
            self._follow_deadline(self.steering)
        claimable_until, forgetful = now + self.members.return_s, first_incarnation > 1
        self.leases.resume(facts.get("data", ()), claimable_until, self.members.live_ids, forgetful=forgetful)
        if facts.get("started", False):
            self.started = True
            for fragment in self.fragments:
                fragment.round.expected = set(self.members.awaited_ids(now))
        for worker in self.members:
            if worker.live:
                self.lives.resume(worker, started=self.started)
        if self.budget.limit is None:
            self.budget.limit = facts.get("token_budget")
        self._check_budget(now)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _heard(self, message: FromMember, now: float) -> KnownWorker:
        if message.run_id != self.run_id:
            raise other_run(message.run_id, self.run_id)
        self.now = now
        return self.members.heard(message, now)

    def _fragment(self, index: int) -> Fragment:
        if index >= len(self.fragments):
            raise BadRequest(f"fragment {index} does not exist: the plan has {len(self.fragments)}")
        return self.fragments[index]

    def _start_if_ready(self, now: float) -> None:
        if self.started:
            return
        live = self.members.live_ids
        if (live and self.closing) or self.rules.may_start(len(live), self._first_join_at, now):
            self.started = True
            for fragment in self.fragments:
                fragment.round.expected = set(self.members.awaited_ids(now))
            self._effects.append(events.RunStarted(sorted(live)))

    def remove(self, worker: KnownWorker, event: events.Event, now: float) -> None:
        """Remove a worker that left, died or was kicked, as `event` says."""
        self.members.gone(worker)
        self._effects.append(event)
        self._forget(worker)
        self._effects += self.leases.gone(worker.worker_id)
        self._close_rounds(now)
        self._stop_if_done(now)

    def _forget(self, worker: KnownWorker, *, still_expected: bool = False) -> None:
        """Drop this worker's unfinished uploads, and let no open round wait for it. Accepted contributions stay."""
        worker.tiling = None  # it sends the tiling again when it joins
        for upload in self.uploads.of(worker.worker_id):
            self.drop(upload.key)
        self.uploads.unqueue(worker.worker_id)
        for fragment in () if still_expected else self.fragments:
            fragment.round.expected.discard(worker.worker_id)

    def drop(self, key: ContributionKey) -> None:
        """Drop a contribution that will never be accepted."""
        self.uploads.drop(key)
        self._effects.append(DropUpload(key))
