"""The server's decisions: one method per message, no I/O.

    answer  = coordinator.offer(message, now)     # or raises a Refused
    effects = coordinator.take_effects()          # to be carried out in order

A contribution goes through four states, each left in one place:

    offered ──(room granted)──▶ sending ──(commit, checked)──▶ accepted ──(round closes)──▶ agreed
       └── stale, fenced, duplicate, unknown: refused by name

Exactly once: the ledger keeps, per worker id and fragment, the last accepted sequence with its payload hash. The same
key with the same hash gets the same answer again; with another hash it is refused; an older sequence is superseded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ...errors import BadRequest, MissingParts, Refused, UnknownWorker
from ...types import (
    Agreement,
    Commit,
    CommitAnswer,
    ContributionKey,
    FromMember,
    GetPart,
    Heartbeat,
    HeartbeatAnswer,
    Join,
    JoinAnswer,
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
from .admission import (
    check_accepted,
    check_age,
    check_form,
    check_join,
    check_received,
    check_run,
    check_same_offer,
    check_same_part,
)
from .budget import TokenBudget
from .commands import Commands
from .effects import Accumulate, CloseRound, DropUpload, Effect, Event, StopServer
from .fragment import Fragment
from .membership import Accepted, Member, Membership
from .pacing import local_steps
from .plan import Settled
from .policing import (
    check_size,
    conflicts_noted,
    leave_out,
    must_wait,
    note_offence,
    request_room,
    size_of,
    turned_away,
)
from .polling import ASK_AGAIN_S, ASK_AGAIN_SOON_S, answer_poll
from .remembered import remember
from .rounds import RoundRules, Verdict
from .uploads import Upload, Uploads
from .weights import bounded, discount, relative, reported

BUDGET_SPENT = "the token budget is spent"


class Coordinator:
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
    ) -> None:
        self.run_id = run_id
        self.rules = rules
        self.members = Membership(heartbeat_timeout_s=heartbeat_timeout_s)
        self.uploads = Uploads(capacity_bytes=pool_bytes, part_size_bytes=part_size_bytes)
        self.fragments: list[Fragment] = []
        self.plan: Plan | None = None
        self.manifest: Manifest | None = None
        self.settled: Settled | None = None
        self.started = False
        self.total_accepted = 0
        self.total_too_few = 0  # rounds that moved nothing, because too few of those there had trained
        self.budget = TokenBudget(token_budget)
        self.commands = Commands()
        self.closing = ""  # why the run is coming to its end
        self.drain_timeout_s = drain_timeout_s
        self.stop_at: float | None = None
        self.next_plan: Plan | None = None
        self.now = 0.0  # when it last heard or looked
        self.remembers = False  # each round that closes says what to keep of the coordinator
        self._first_join_at: float | None = None
        self._effects: list[Effect] = []

    def take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    @property
    def sync_round(self) -> int:
        """Rounds that every fragment has completed."""
        return min((f.published.version for f in self.fragments), default=0)

    # --- joining and leaving --------------------------------------------------------------------------------------

    def check_join(self, message: Join) -> None:
        """Everything about a join that does not depend on who is here."""
        check_join(self, message)

    def fix(self, *, plan: Plan, settled: Settled, manifest: Manifest, fragments: Sequence[Fragment]) -> None:
        """The first accepted manifest and the plan made from it hold for the rest of the run."""
        self.plan, self.settled, self.manifest = plan, settled, manifest
        self.fragments = list(fragments)
        self.budget.fix(len(self.fragments))

    def join(self, message: Join, now: float) -> JoinAnswer:
        self.check_join(message)
        self.now = now
        assert self.plan is not None, "fix() comes before the first join"
        assert self.manifest is not None
        before = self.members.live_ids
        member, arrived = self.members.join(message, now)
        if arrived:
            if member.worker_id in before:
                # The old process is fenced; what it had in hand or was told is lost. Nobody waits for it now, unless
                # the new one has its steps.
                self.commands.forget(member.worker_id)
                self._forget(member, still_expected=message.continues)
            self._first_join_at = now if self._first_join_at is None else self._first_join_at
            self.event("join", worker=member.worker_id, host=member.hostname, incarnation=member.incarnation)
            for fragment in self.fragments:
                # Expected from the next round on; at once only where there is nobody else left to wait for.
                if self.started and not fragment.round.expected and not fragment.round.participants:
                    fragment.round.expected.add(member.worker_id)
            if self.closing:  # it was thought dead, and may bring what it has
                self.commands.issue(member.worker_id, "drain", self.closing)
            self._start_if_ready(now)
            self._evaluate_all(now)
        return JoinAnswer(
            run_id=self.run_id,
            incarnation=member.incarnation,
            plan=self.plan,
            manifest=self.manifest,
            fragments=tuple(member.state_of(i, f.published.version) for i, f in enumerate(self.fragments)),
        )

    def heartbeat(self, message: Heartbeat, now: float) -> HeartbeatAnswer:
        member = self._heard(message, now)
        self.commands.acknowledge(member.worker_id, message.acknowledged)
        return HeartbeatAnswer(
            sync_round=self.sync_round,
            sync_every=self.local_steps(member),
            commands=self.commands.pending(member.worker_id),
        )

    def local_steps(self, member: Member) -> int | None:
        """Dynamic local updates: H for this worker, by its speed beside the fastest. None = as the plan says."""
        if not self.rules.dylu or self.plan is None or member.steps_per_second <= 0.0:
            return None
        base = max(self.rules.dylu_base or self.plan.sync_every, len(self.fragments))
        return local_steps(member.steps_per_second, self.members.fastest, base, least=len(self.fragments))

    def leave(self, message: Leave, now: float) -> LeaveAnswer:
        """Leaving twice is leaving: a repeated message must not fail."""
        try:
            member = self._heard(message, now)
        except UnknownWorker:
            return LeaveAnswer()
        self.remove(member, now, "leave", reason=message.reason)
        return LeaveAnswer()

    # --- a contribution -------------------------------------------------------------------------------------------

    def offer(self, message: Offer, now: float) -> OfferAnswer:
        member = self._heard(message, now)
        fragment = self._fragment(message.fragment)
        accepted = member.entry_of(message)
        if accepted is not None:
            return OfferAnswer(state="accepted", version=accepted.version)
        try:
            member.conduct.check(member.worker_id, now)
            reported(message, self.rules)
            self._check_offer(message, fragment)
        except Refused:
            self.uploads.unqueue(member.worker_id, message.fragment)  # it will not come back under this key
            raise
        upload = self.uploads.get(message.key)
        if upload is not None:
            with conflicts_noted(self, member):
                check_same_offer(message, upload.offer)
            upload.heard_at = now
        else:
            for other in self.uploads.of_worker(member.worker_id):
                if other.offer.fragment == message.fragment:
                    self.drop(other.offer.key)
            upload = request_room(self, message, now)
        if upload is None:
            soon = self.uploads.is_near(message.key)
            return OfferAnswer(state="wait", retry_after_s=ASK_AGAIN_SOON_S if soon else ASK_AGAIN_S)
        return OfferAnswer(state="send", missing=upload.missing)

    def begin_part(self, message: PutPart, now: float) -> Upload | PutPartAnswer:
        """Where the part belongs; or, if it is here already, the answer."""
        member = self._heard(message, now)
        self._fragment(message.fragment)
        if member.entry_of(message) is not None:
            return PutPartAnswer(state="duplicate")
        member.conduct.check(member.worker_id, now)
        upload = self._sending(message)
        upload.check_part(message.part)
        upload.heard_at = now
        stored = upload.part_hashes.get(message.part)
        if stored is None:
            return upload
        with conflicts_noted(self, member):
            check_same_part(message, stored)
        return PutPartAnswer(state="duplicate")

    def part_arrived(self, message: PutPart, now: float) -> PutPartAnswer:
        """Its bytes are in place and have the hash that was announced."""
        begun = self.begin_part(message, now)
        if isinstance(begun, Upload):
            begun.part_hashes[message.part] = message.hash
            return PutPartAnswer(state="stored")
        return begun

    def begin_commit(self, message: Commit, now: float) -> Upload | CommitAnswer:
        """The whole contribution, ready to be checked; or, if it was accepted before, the same answer as then."""
        member = self._heard(message, now)
        fragment = self._fragment(message.fragment)
        accepted = member.entry_of(message)
        with conflicts_noted(self, member):
            if accepted is not None:
                check_accepted(message, accepted.payload_hash)
                return CommitAnswer(version=accepted.version)
            member.conduct.check(member.worker_id, now)
            upload = self._sending(message)
            upload.heard_at = now
            check_received(message, upload.payload_hash())
        self._check_offer(upload.offer, fragment)
        return upload

    def accept(self, message: Commit, now: float, norm: float | None = None) -> CommitAnswer:
        """The contribution was checked (shapes, finite values), and ‖Δ‖ is `norm`: it counts, once, unless its round
        closed meanwhile or it is absurdly large."""
        begun = self.begin_commit(message, now)
        if isinstance(begun, CommitAnswer):
            return begun
        offer = begun.offer
        fragment = self.fragments[offer.fragment]
        size = size_of(self, offer, norm)
        check_size(self, offer, size, now)
        round_ = fragment.round
        member = self._heard(message, now)
        member.accepted[offer.fragment] = Accepted(offer.sequence, message.payload_hash, round_.version)
        self.total_accepted += 1
        self.uploads.finish(offer.key)
        staleness = round_.version - 1 - offer.base_version
        raw = reported(offer, self.rules)
        plain = bounded(raw, fragment.usual, self.rules)
        weight = plain * discount(staleness, self.rules)
        participant = Participant(
            worker_id=offer.worker_id, sequence=offer.sequence, weight=weight, staleness=staleness, norm=norm
        )
        keep = must_wait(self, fragment, size)
        round_.count(participant, self.rules, now, reported=raw, tokens=offer.tokens, size=size, kept=keep)
        member.contributed(offer, staleness, norm)
        scale = relative(weight, fragment.usual, self.rules)
        first = len(round_.participants) == 1
        added = Accumulate(offer.key, round_.version, weight, scale, offer.base_version, offer.sections, first, keep)
        self._effects.append(added)
        answer = CommitAnswer(version=round_.version)
        self._evaluate(fragment, now)
        return answer

    def reject(self, key: ContributionKey, refusal: Refused, now: float) -> None:
        """The driver looked inside and found it unfit."""
        member = self.members.find(key.worker_id)
        if self.discard(key, refusal) and member is not None:
            note_offence(self, member, refusal, now)

    def discard(self, key: ContributionKey, refusal: Refused) -> bool:
        """It will never be accepted. False: it was not on offer."""
        if self.uploads.get(key) is None:
            return False
        self.drop(key)
        self.event("refused", worker=key.worker_id, fragment=key.fragment, reason=refusal.message)
        return True

    def freed(self, key: ContributionKey) -> None:
        """The driver has freed the bytes of an accepted contribution."""
        self.uploads.freed(key)

    # --- an agreement ---------------------------------------------------------------------------------------------

    def published(self, agreement: Agreement, now: float) -> None:
        """The driver has taken the outer step and holds what it made: from now on anybody may be told."""
        fragment = self.fragments[agreement.fragment]
        assert agreement.version == fragment.published.version + 1, "agreements are published in order"
        fragment.published = agreement
        taken, watched = agreement.participants, agreement.watched
        self.event(
            "round",
            fragment=agreement.fragment,
            version=agreement.version,
            workers=[p.worker_id for p in taken],
            sequences=[p.sequence for p in taken],
            staleness=[p.staleness for p in taken],
            **({} if watched is None else {"norms": [float(f"{p.norm or 0.0:.6g}") for p in taken], **watched.known}),
        )
        self._evaluate(fragment, now)

    def poll(self, message: Poll, now: float) -> PollAnswer:
        member = self._heard(message, now)
        fragment = self._fragment(message.fragment)
        fragment.check_sections(message.sections)
        return answer_poll(self, member, fragment, message, now)

    def get_part(self, message: GetPart, now: float) -> None:
        """May this worker fetch? (The driver has the bytes, and knows how long it keeps them.)"""
        self._heard(message, now)
        self._fragment(message.fragment)

    # --- time -----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Declare the silent dead, let deadlines pass."""
        self.now = now
        for member in self.members.silent(now):
            self.members.total_deaths += 1
            self.remove(member, now, "death", silent_s=round(now - member.last_seen, 1))
        self._start_if_ready(now)
        self._evaluate_all(now)
        self.stop_if_done(now)

    def next_wake(self, now: float) -> float | None:
        """When `tick` would next have something to decide (None = only after a message)."""
        moments = [self.members.next_death(), self.stop_at]
        if not self.started and self._first_join_at is not None and self.rules.start_deadline_s is not None:
            moments.append(self._first_join_at + self.rules.start_deadline_s)
        moments += [self.verdict(fragment, now).wake_at for fragment in self.fragments]
        return min((m for m in moments if m is not None and m > now), default=None)

    def waiting_for(self, fragment: Fragment, now: float) -> str:
        """Why this fragment's open round has not closed, in words."""
        return self.verdict(fragment, now).waiting_for

    # --- the operator's hand (control.py) -------------------------------------------------------------------------

    def order(self, worker_ids: Sequence[str], kind: Literal["drain", "sync"], reason: str) -> None:
        for worker_id in worker_ids:
            self.commands.issue(worker_id, kind, reason)
        self.event(kind, workers=list(worker_ids), reason=reason)

    # --- inside ---------------------------------------------------------------------------------------------------

    def finish(self, reason: str, now: float) -> None:
        """Take nobody new, let everybody contribute and leave, then stop."""
        self.closing = self.closing or reason
        self.stop_at = now + self.drain_timeout_s
        self.order(sorted(self.members.live_ids), "drain", reason)
        if not self.started:  # nobody new will come: what those here have done is not to wait for more of them
            self._start_if_ready(now)
            self._evaluate_all(now)

    def check_budget(self, now: float) -> None:
        """Enough tokens are in the model: the run has come to its end."""
        if self.budget.is_spent and not self.budget.announced:
            self.budget.announced = True
            self.event("budget_spent", tokens=self.budget.total, limit=self.budget.limit)
            self.finish(BUDGET_SPENT, now)

    def stop_if_done(self, now: float) -> None:
        """The run is ending: stop when everybody has left, or has had time enough."""
        if self.stop_at is not None and (not self.members.live_ids or now >= self.stop_at):
            self.stop_at = None
            self._effects.append(StopServer(self.closing))

    def _heard(self, message: FromMember, now: float) -> Member:
        check_run(message.run_id, self.run_id)
        self.now = now
        return self.members.heard(message, now)

    def _fragment(self, index: int) -> Fragment:
        if index >= len(self.fragments):
            raise BadRequest(f"fragment {index} does not exist: the plan has {len(self.fragments)}")
        return self.fragments[index]

    def _sending(self, message: OfContribution) -> Upload:
        upload = self.uploads.get(message.key)
        if upload is None:
            raise MissingParts(f"contribution {message.key} is not on offer", hint="offer it (again)")
        return upload

    def _check_offer(self, offer: Offer, fragment: Fragment) -> None:
        assert self.plan is not None
        fragment.check_sections(offer.sections)
        check_form(offer, self.plan, fragment.max_payload_bytes(offer.sections))
        self._check_age(offer, fragment)

    def _check_age(self, offer: Offer, fragment: Fragment) -> None:
        newest = fragment.round.version - 1
        check_age(offer, published=fragment.published.version, newest=newest, rules=self.rules)

    def _start_if_ready(self, now: float) -> None:
        if self.started:
            return
        live = self.members.live_ids
        if (live and self.closing) or self.rules.may_start(len(live), self._first_join_at, now):
            self.started = True
            for fragment in self.fragments:
                fragment.round.expected = set(self.members.awaited_ids(now))
            self.event("start", workers=sorted(live))

    def verdict(self, fragment: Fragment, now: float) -> Verdict:
        live, refused = self.members.awaited_ids(now), len(turned_away(self, fragment, now))
        return fragment.round.verdict(self.rules, now, started=self.started, live=live, turned_away=refused)

    def _evaluate_all(self, now: float) -> None:
        for fragment in self.fragments:
            self._evaluate(fragment, now)

    def _evaluate(self, fragment: Fragment, now: float) -> None:
        """The one place where a round ends."""
        if not self.verdict(fragment, now).close:
            return
        index, contributors = fragment.published.fragment, fragment.round.contributors
        refused = turned_away(self, fragment, now)
        closed = fragment.close(self.rules, self.members.awaited_ids(now), len(refused))
        self.members.round_closed(index, contributors)
        self.budget.add(index, closed.tokens, now)
        if self.next_plan is not None:
            self.plan, self.next_plan = self.next_plan, None
        left_out = leave_out(self, index, closed)
        remembered = remember(self) if self.remembers else None
        self._effects.append(CloseRound(index, closed.version, closed.participants, remembered, left_out, refused))
        for upload in self.uploads.of_fragment(index):
            try:
                self._check_age(upload.offer, fragment)
            except Refused:
                self.drop(upload.offer.key)  # its worker will be told so at its next message; the room is free now
        self.check_budget(now)

    def remove(self, member: Member, now: float, kind: str, **facts: object) -> None:
        self.members.gone(member)
        self.event(kind, worker=member.worker_id, **facts)
        self.commands.forget(member.worker_id)
        self._forget(member)
        self._evaluate_all(now)
        self.stop_if_done(now)

    def set_aside(self, member: Member, now: float) -> None:
        """It stays, but nothing is taken from it for a while."""
        self._forget(member)
        self._evaluate_all(now)

    def _forget(self, member: Member, *, still_expected: bool = False) -> None:
        """Keep nothing unfinished of this worker, and let no open round wait for it. What was accepted stays."""
        for upload in self.uploads.of_worker(member.worker_id):
            self.drop(upload.offer.key)
        self.uploads.unqueue(member.worker_id)
        for fragment in () if still_expected else self.fragments:
            fragment.round.expected.discard(member.worker_id)

    def drop(self, key: ContributionKey) -> None:
        self.uploads.drop(key)
        self._effects.append(DropUpload(key))

    def event(self, kind: str, **facts: object) -> None:
        self._effects.append(Event(kind, facts))
