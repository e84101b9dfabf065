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
from dataclasses import dataclass

from ..errors import (
    BadRequest,
    Conflict,
    FutureRound,
    MissingParts,
    OtherRun,
    PlanMismatch,
    ProtocolMismatch,
    Refused,
    StaleRound,
    Superseded,
    TooLarge,
    TooOld,
    UnknownWorker,
)
from ..types import (
    PROTOCOL_VERSION,
    Agreement,
    Commit,
    CommitAnswer,
    ContributionKey,
    FragmentState,
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
from .effects import Accumulate, CloseRound, DropUpload, Effect, Event
from .membership import Accepted, Member, Membership
from .plan import Settled, check_manifest, check_wishes
from .rounds import Round, RoundRules, Verdict
from .uploads import Upload, Uploads

ASK_AGAIN_S = 0.5


@dataclass
class Fragment:
    """One fragment: its newest agreement, and the round that is open on top of it."""

    published: Agreement
    round: Round
    max_payload_bytes: int


class Coordinator:
    def __init__(
        self,
        *,
        run_id: str,
        rules: RoundRules,
        heartbeat_timeout_s: float,
        pool_bytes: int,
        part_size_bytes: int,
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
        if message.protocol != PROTOCOL_VERSION:
            raise ProtocolMismatch(
                f"this worker speaks protocol {message.protocol}, the server speaks {PROTOCOL_VERSION}",
                hint="install the same version of outerstep on both",
            )
        if message.run_id is not None:
            self._check_run(message.run_id)
        if self.settled is not None and self.manifest is not None:
            check_wishes(self.settled, message.wishes)
            if message.manifest is not None:
                check_manifest(self.manifest, message.manifest)

    def fix(
        self,
        *,
        plan: Plan,
        settled: Settled,
        manifest: Manifest,
        agreements: Sequence[Agreement],
        max_payload_bytes: Sequence[int],
    ) -> None:
        """The first accepted manifest and the plan made from it hold for the rest of the run."""
        self.plan, self.settled, self.manifest = plan, settled, manifest
        self.fragments = [
            Fragment(agreement, Round(agreement.version + 1, set()), limit)
            for agreement, limit in zip(agreements, max_payload_bytes, strict=True)
        ]

    def join(self, message: Join, now: float) -> JoinAnswer:
        self.check_join(message)
        assert self.plan is not None, "fix() comes before the first join"
        assert self.manifest is not None
        before = self.members.live_ids
        member, arrived = self.members.join(message, now)
        if arrived:
            if member.worker_id in before:
                # The old process is fenced; what it had in hand is lost, so nobody waits for it in this round.
                self._forget(member)
            self._first_join_at = now if self._first_join_at is None else self._first_join_at
            self._event("join", worker=member.worker_id, host=member.hostname, incarnation=member.incarnation)
            for fragment in self.fragments:
                # Expected from the next round on; at once only where there is nobody else left to wait for.
                if self.started and not fragment.round.expected and not fragment.round.participants:
                    fragment.round.expected.add(member.worker_id)
            self._start_if_ready(now)
            self._evaluate_all(now)
        return JoinAnswer(
            run_id=self.run_id,
            incarnation=member.incarnation,
            plan=self.plan,
            manifest=self.manifest,
            fragments=tuple(
                FragmentState(version=f.published.version, last_sequence=member.last_sequence(i))
                for i, f in enumerate(self.fragments)
            ),
        )

    def heartbeat(self, message: Heartbeat, now: float) -> HeartbeatAnswer:
        self._heard(message, now)
        return HeartbeatAnswer(sync_round=self.sync_round)

    def leave(self, message: Leave, now: float) -> LeaveAnswer:
        """Leaving twice is leaving: a repeated message must not fail."""
        try:
            member = self._heard(message, now)
        except UnknownWorker:
            return LeaveAnswer()
        self._remove(member, now, "leave", reason=message.reason)
        return LeaveAnswer()

    # --- a contribution -------------------------------------------------------------------------------------------

    def offer(self, message: Offer, now: float) -> OfferAnswer:
        member = self._heard(message, now)
        fragment = self._fragment(message.fragment)
        accepted = self._accepted(member, message)
        if accepted is not None:
            return OfferAnswer(state="accepted", version=accepted.version)
        try:
            self._check_offer(message, fragment)
        except Refused:
            self.uploads.unqueue(member.worker_id, message.fragment)  # it will not come back under this key
            raise
        upload = self.uploads.get(message.key)
        if upload is not None and upload.offer != message:
            raise Conflict(
                f"contribution {message.key} was offered before with other facts",
                hint="a key is fixed when its contribution is begun; use the next sequence for a new one",
            )
        if upload is None:
            for other in self.uploads.of_worker(member.worker_id):
                if other.offer.fragment == message.fragment:
                    self._drop(other.offer.key)
            upload = self.uploads.request(message, now)
        if upload is None:
            return OfferAnswer(state="wait", retry_after_s=ASK_AGAIN_S)
        return OfferAnswer(state="send", missing=upload.missing)

    def begin_part(self, message: PutPart, now: float) -> Upload | PutPartAnswer:
        """Where the part belongs; or, if it is here already, the answer."""
        member = self._heard(message, now)
        self._fragment(message.fragment)
        if self._accepted(member, message) is not None:
            return PutPartAnswer(state="duplicate")
        upload = self._sending(message)
        upload.check_part(message.part)
        stored = upload.part_hashes.get(message.part)
        if stored is None:
            return upload
        if stored != message.hash:
            raise Conflict(f"part {message.part} of {message.key} was stored with hash {stored}, not {message.hash}")
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
        accepted = self._accepted(member, message)
        if accepted is not None:
            if accepted.payload_hash != message.payload_hash:
                raise Conflict(
                    f"contribution {message.key} was accepted with payload {accepted.payload_hash}; "
                    f"this one is {message.payload_hash}",
                    hint="a key is fixed when its contribution is begun; use the next sequence for a new one",
                )
            return CommitAnswer(version=accepted.version)
        upload = self._sending(message)
        received = upload.payload_hash()
        if received != message.payload_hash:
            raise Conflict(
                f"contribution {message.key}: the parts received make {received}, not {message.payload_hash}",
                hint="parts of two different payloads were sent under one key",
            )
        self._check_offer(upload.offer, fragment)
        return upload

    def accept(self, message: Commit, now: float) -> CommitAnswer:
        """The contribution was checked (shapes, finite values): it counts, once, unless its round closed meanwhile."""
        begun = self.begin_commit(message, now)
        if isinstance(begun, CommitAnswer):
            return begun
        offer = begun.offer
        fragment = self.fragments[offer.fragment]
        round_ = fragment.round
        member = self._heard(message, now)
        member.accepted[offer.fragment] = Accepted(offer.sequence, message.payload_hash, round_.version)
        self.total_accepted += 1
        self.uploads.finish(offer.key)
        round_.count(
            Participant(
                worker_id=offer.worker_id,
                sequence=offer.sequence,
                weight=offer.weight,
                staleness=round_.version - 1 - offer.base_version,
            ),
            self.rules,
            now,
        )
        self._effects.append(Accumulate(offer.key, round_.version, offer.weight))
        answer = CommitAnswer(version=round_.version)
        self._evaluate(fragment, now)
        return answer

    def reject(self, key: ContributionKey, reason: str) -> None:
        """The driver looked inside and found it unfit."""
        if self.uploads.get(key) is not None:
            self._drop(key)
            self._event("refused", worker=key.worker_id, fragment=key.fragment, reason=reason)

    def freed(self, key: ContributionKey) -> None:
        """The driver has freed the bytes of an accepted contribution."""
        self.uploads.freed(key)

    # --- an agreement ---------------------------------------------------------------------------------------------

    def published(self, agreement: Agreement, now: float) -> None:
        """The driver has taken the outer step and holds what it made: from now on anybody may be told."""
        fragment = self.fragments[agreement.fragment]
        assert agreement.version == fragment.published.version + 1, "agreements are published in order"
        fragment.published = agreement
        self._event(
            "round",
            fragment=agreement.fragment,
            version=agreement.version,
            workers=[p.worker_id for p in agreement.participants],
        )
        self._evaluate(fragment, now)

    def poll(self, message: Poll, now: float) -> PollAnswer:
        member = self._heard(message, now)
        fragment = self._fragment(message.fragment)
        last_sequence = member.last_sequence(message.fragment)
        if fragment.published.version > message.after:
            return PollAnswer(agreement=fragment.published, last_sequence=last_sequence)
        verdict = self._verdict(fragment, now)
        return PollAnswer(
            agreement=None,
            last_sequence=last_sequence,
            waiting_for=verdict.waiting_for[:256],
            stuck=verdict.stuck,
            wanted=tuple(
                (i, other.round.version)
                for i, other in enumerate(self.fragments)
                if other is not fragment and other.round.wants(member.worker_id, self.rules)
            ),
            retry_after_s=ASK_AGAIN_S,
        )

    def get_part(self, message: GetPart, now: float) -> None:
        """May this worker fetch? (The driver has the bytes, and knows how long it keeps them.)"""
        self._heard(message, now)
        self._fragment(message.fragment)

    # --- time -----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Declare the silent dead, let deadlines pass."""
        for member in self.members.silent(now):
            self.members.total_deaths += 1
            self._remove(member, now, "death", silent_s=round(now - member.last_seen, 1))
        self._start_if_ready(now)
        self._evaluate_all(now)

    def next_wake(self, now: float) -> float | None:
        """When `tick` would next have something to decide (None = only after a message)."""
        moments = [self.members.next_death()]
        if not self.started and self._first_join_at is not None and self.rules.start_deadline_s is not None:
            moments.append(self._first_join_at + self.rules.start_deadline_s)
        moments += [self._verdict(fragment, now).wake_at for fragment in self.fragments]
        return min((m for m in moments if m is not None and m > now), default=None)

    def waiting_for(self, fragment: Fragment, now: float) -> str:
        """Why this fragment's open round has not closed, in words."""
        return self._verdict(fragment, now).waiting_for

    # --- inside ---------------------------------------------------------------------------------------------------

    def _heard(self, message: FromMember, now: float) -> Member:
        self._check_run(message.run_id)
        return self.members.heard(message, now)

    def _check_run(self, run_id: str) -> None:
        if run_id != self.run_id:
            raise OtherRun(
                f"this server holds run {self.run_id}, not {run_id}",
                hint="restart the worker to join the new run from its beginning",
            )

    def _fragment(self, index: int) -> Fragment:
        if index >= len(self.fragments):
            raise BadRequest(f"fragment {index} does not exist: the plan has {len(self.fragments)}")
        return self.fragments[index]

    @staticmethod
    def _accepted(member: Member, message: OfContribution) -> Accepted | None:
        """The ledger's entry if this very key was accepted. An older key than the last one is superseded."""
        entry = member.accepted.get(message.fragment)
        if entry is None or message.sequence > entry.sequence:
            return None
        if message.sequence < entry.sequence:
            raise Superseded(
                f"contribution {message.key} is older than the last accepted one (#{entry.sequence})",
                hint="continue from the sequence that the join answer names",
            )
        return entry

    def _sending(self, message: OfContribution) -> Upload:
        upload = self.uploads.get(message.key)
        if upload is None:
            raise MissingParts(f"contribution {message.key} is not on offer", hint="offer it (again)")
        return upload

    def _check_offer(self, offer: Offer, fragment: Fragment) -> None:
        """Is it encoded with the run's codec, not too large, and not too old?"""
        assert self.plan is not None
        if offer.codec != self.plan.codec:
            raise PlanMismatch(f"contribution is encoded as {offer.codec!r}; the run uses {self.plan.codec!r}")
        if offer.size_bytes > fragment.max_payload_bytes:
            raise TooLarge(
                f"contribution of {offer.size_bytes} bytes; fragment {offer.fragment} as {self.plan.codec} "
                f"takes at most {fragment.max_payload_bytes}"
            )
        self._check_age(offer, fragment)

    def _check_age(self, offer: Offer, fragment: Fragment) -> None:
        newest = fragment.round.version - 1  # of the open round: one more than published while a round is closing
        if offer.base_version > fragment.published.version or offer.oldest_base > offer.base_version:
            raise FutureRound(
                f"fragment {offer.fragment} is at version {fragment.published.version}; "
                f"got base_version {offer.base_version}, oldest_base {offer.oldest_base}",
                hint="0 ≤ oldest_base ≤ base_version ≤ current version",
            )
        if offer.base_version < newest and not self.rules.takes_late:
            raise StaleRound(
                f"round {offer.base_version + 1} of fragment {offer.fragment} closed without this contribution; "
                f"it is at version {newest}",
                hint="fetch the newest anchor and rebase",
            )
        if newest - offer.oldest_base > self.rules.max_staleness:
            raise TooOld(
                f"the oldest step in this contribution was taken on version {offer.oldest_base}, "
                f"{newest - offer.oldest_base} before the newest; max_staleness is {self.rules.max_staleness}",
                hint="discard it and adopt the newest anchor",
            )

    def _start_if_ready(self, now: float) -> None:
        """The run starts when all configured workers are live, or at the start deadline with at least min_workers."""
        if self.started:
            return
        live = self.members.live_ids
        overdue = (
            self.rules.start_deadline_s is not None
            and self._first_join_at is not None
            and now - self._first_join_at >= self.rules.start_deadline_s
        )
        if len(live) >= self.rules.num_workers or (overdue and len(live) >= max(1, self.rules.min_workers)):
            self.started = True
            for fragment in self.fragments:
                fragment.round.expected = set(live)
            self._event("start", workers=sorted(live))

    def _verdict(self, fragment: Fragment, now: float) -> Verdict:
        return fragment.round.verdict(self.rules, now, started=self.started, live=self.members.live_ids)

    def _evaluate_all(self, now: float) -> None:
        for fragment in self.fragments:
            self._evaluate(fragment, now)

    def _evaluate(self, fragment: Fragment, now: float) -> None:
        """The one place where a round ends."""
        closing = fragment.round
        if not self._verdict(fragment, now).close:
            return
        index = fragment.published.fragment
        self._effects.append(CloseRound(index, closing.version, tuple(closing.participants)))
        fragment.round = Round(closing.version + 1, set(self.members.live_ids))
        for upload in self.uploads.of_fragment(index):
            try:
                self._check_age(upload.offer, fragment)
            except Refused:
                self._drop(upload.offer.key)  # its worker will be told so at its next message; the room is free now

    def _remove(self, member: Member, now: float, kind: str, **facts: object) -> None:
        self.members.gone(member)
        self._event(kind, worker=member.worker_id, **facts)
        self._forget(member)
        self._evaluate_all(now)

    def _forget(self, member: Member) -> None:
        """Keep nothing unfinished of this worker, and let no open round wait for it. What was accepted stays."""
        for upload in self.uploads.of_worker(member.worker_id):
            self._drop(upload.offer.key)
        self.uploads.unqueue(member.worker_id)
        for fragment in self.fragments:
            fragment.round.expected.discard(member.worker_id)

    def _drop(self, key: ContributionKey) -> None:
        self.uploads.drop(key)
        self._effects.append(DropUpload(key))

    def _event(self, kind: str, **facts: object) -> None:
        self._effects.append(Event(kind, facts))
