"""The coordinator under any order of messages that hypothesis can think of: duplicates, replays, deaths, restarts.

The machine plays all workers and the driver. It believes nothing of what the coordinator says about itself: what was
added to which round is read off the effects.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from amounts import cases
from outerstep.coordination.server.effects import Accumulate, CloseRound, DropUpload
from outerstep.coordination.server.uploads import Upload
from outerstep.digest import payload_hash
from outerstep.errors import Refused
from outerstep.types import (
    Answer,
    Commit,
    CommitAnswer,
    ContributionKey,
    Control,
    FromMember,
    GetPart,
    Heartbeat,
    Join,
    JoinAnswer,
    Leave,
    Offer,
    OfferAnswer,
    Poll,
    PutPart,
    Request,
)
from unit.coordination.builders import (
    PART_BYTES,
    RUN,
    Desk,
    contribution_hashes,
    make_heartbeat,
    make_join,
    make_key,
    make_offer,
)

WORKERS = "abcd"
workers = st.sampled_from(WORKERS)
fragments = st.integers(0, 1)
sizes = st.sampled_from([PART_BYTES, 2 * PART_BYTES, 3 * PART_BYTES])
ahead = st.sampled_from([1, 1, 0, -1])
anything = st.integers(0, 10**6)


class CoordinatorMachine(RuleBasedStateMachine):
    @initialize(
        num_workers=st.integers(1, 3),
        min_workers=st.sampled_from([0, 1, 2, 3]),
        quorum=st.sampled_from([None, 1, 2]),
        grace_s=st.sampled_from([0.0, 3.0]),
        round_deadline_s=st.sampled_from([None, 5.0]),
        start_deadline_s=st.sampled_from([None, 8.0]),
        max_staleness=st.sampled_from([0, 1, 4]),
        heartbeat_timeout_s=st.sampled_from([0.0, 12.0]),
        pool_parts=st.sampled_from([1, 3, 64]),
        present=st.integers(0, 4),
        frees_at_once=st.booleans(),
    )
    def configure(
        self, heartbeat_timeout_s: float, pool_parts: int, present: int, frees_at_once: bool, **rules: Any
    ) -> None:
        self.frees_at_once = frees_at_once
        self.capacity_bytes = pool_parts * PART_BYTES
        self.desk = Desk(
            fragments=2,
            heartbeat_timeout_s=heartbeat_timeout_s,
            pool_bytes=self.capacity_bytes,
            prompt=False,
            **rules,
        )
        self.coordinator = self.desk.coordinator
        self.now = 0.0
        self.starts: Counter[str] = Counter()
        self.instance: dict[str, str] = {}
        self.retired: set[str] = set()
        self.incarnation: dict[str, int] = {}
        self.sequence: Counter[tuple[str, int]] = Counter()
        self.sent: list[Request] = []
        self.offers: list[Offer] = []
        self.work: list[Accumulate | CloseRound] = []  # decided, and not carried out yet
        self.sizes: dict[ContributionKey, int] = {}  # of what was accepted
        self.counted_in: dict[ContributionKey, int] = {}  # which version
        self.answers: dict[ContributionKey, CommitAnswer] = {}
        self.closed = [0, 0]
        self.seen_published = [0, 0]
        for worker in WORKERS[:present]:
            self.join(worker, True, "home")

    # --- what workers do ------------------------------------------------------------------------------------------

    @rule(worker=workers, restarted=st.booleans(), hostname=st.sampled_from(["home", "home", "away"]))
    def join(self, worker: str, restarted: bool, hostname: str) -> None:
        self.starts[worker] += restarted or not self.starts[worker]
        self.deliver(make_join(worker, start=self.starts[worker], hostname=hostname))

    @precondition(lambda self: self.live)
    @rule(who=anything)
    def leave(self, who: int) -> None:
        self.deliver(Leave(**self.head(self.one_of_the_live(who))))

    @precondition(lambda self: self.live)
    @rule(who=anything, fragment=fragments, ahead=ahead, behind=st.integers(-1, 2), size_bytes=sizes)
    def offer(self, who: int, fragment: int, ahead: int, behind: int, size_bytes: int) -> None:
        self.deliver(self.make_offer(self.one_of_the_live(who), fragment, ahead, behind, size_bytes))

    @precondition(lambda self: self.offers)
    @rule(which=anything, part=st.integers(0, 3))
    def send_part(self, which: int, part: int) -> None:
        self.deliver(self.part_of(self.offers[-1 - which % len(self.offers)], part))

    @precondition(lambda self: self.offers)
    @rule(which=anything, other_bytes=st.booleans())
    def commit(self, which: int, other_bytes: bool) -> None:
        self.deliver(self.commit_of(self.offers[-1 - which % len(self.offers)], "other" if other_bytes else ""))

    @precondition(lambda self: self.live)
    @rule(
        who=anything,
        fragment=fragments,
        ahead=ahead,
        behind=st.integers(0, 1),
        size_bytes=sizes,
        flavour=st.sampled_from(["", "", "other"]),
    )
    def contribute(self, who: int, fragment: int, ahead: int, behind: int, size_bytes: int, flavour: str) -> None:
        """The whole of it: a new one, or one more try of an earlier one; perhaps with a commit that lies."""
        offer = self.make_offer(self.one_of_the_live(who), fragment, ahead, behind, size_bytes)
        self.whole_contribution(offer, flavour)

    @precondition(lambda self: self.live)
    @rule(fragment=fragments, absent=workers)
    def all_but_one_contribute(self, fragment: int, absent: str) -> None:
        for worker in self.live:
            if worker != absent:
                self.whole_contribution(self.make_offer(worker, fragment, 1, 0, PART_BYTES))

    @rule(worker=workers, fragment=fragments, after=st.integers(-1, 3))
    def poll(self, worker: str, fragment: int, after: int) -> None:
        self.deliver(Poll(**self.head(worker), fragment=fragment, after=after))
        self.deliver(GetPart(**self.head(worker), fragment=fragment, version=max(after, 0), part=0))

    @precondition(lambda self: self.sent)
    @rule(which=anything)
    def replay(self, which: int) -> None:
        """The network kept a copy of anything ever sent."""
        self.deliver(self.sent[which % len(self.sent)])

    # --- what time and the driver do ------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.1, 3.0, 7.0, 20.0]), alive=st.sets(workers))
    def wait(self, seconds: float, alive: set[str]) -> None:
        self.now += seconds
        for worker in sorted(alive):
            self.deliver(make_heartbeat(worker, incarnation=self.incarnation.get(worker, 1)))
        self.coordinator.tick(self.now)
        self.take_effects()

    @precondition(lambda self: self.work)
    @rule(effects=st.integers(1, 9))
    def carry_out(self, effects: int) -> None:
        for effect in self.work[:effects]:
            if isinstance(effect, Accumulate):
                self.coordinator.uploads.drop(effect.key)
            else:
                self.desk.publish(effect)
        del self.work[:effects]
        self.take_effects()

    @rule(fragment=fragments)
    def all_faults_stop(self, fragment: int) -> None:
        """Whatever has happened: everybody restarts and contributes, and the round completes. (Who lied too often has
        to be pardoned first.)"""
        before = self.closed[fragment]
        for worker in WORKERS:
            self.deliver(Leave(**self.head(worker)))
            self.join(worker, True, "home")
            self.coordinator.control(Control(kind="pardon", worker_id=worker), self.now)
        for worker in WORKERS:
            self.carry_out(len(self.work))
            self.whole_contribution(self.make_offer(worker, fragment, 1, 0, PART_BYTES))
        assert self.closed[fragment] > before

    # --- messages -------------------------------------------------------------------------------------------------

    @property
    def live(self) -> list[str]:
        return sorted(self.coordinator.members.live_ids)

    def one_of_the_live(self, who: int) -> str:
        return self.live[who % len(self.live)]

    def head(self, worker: str) -> dict[str, Any]:
        return {"run_id": RUN, "worker_id": worker, "incarnation": self.incarnation.get(worker, 1)}

    def make_offer(self, worker: str, fragment: int, ahead: int, behind: int, size_bytes: int) -> Offer:
        """`ahead` of the last sequence begun; `behind` the newest version."""
        sequence = max(1, self.sequence[worker, fragment] + ahead)
        self.sequence[worker, fragment] = max(sequence, self.sequence[worker, fragment])
        newest = self.coordinator.fragments[fragment].round.version - 1
        offer = make_offer(
            worker,
            sequence,
            fragment=fragment,
            incarnation=self.incarnation.get(worker, 1),
            base_version=max(0, newest - behind),
            size_bytes=size_bytes,
        )
        self.offers.append(offer)
        return offer

    def part_of(self, offer: Offer, part: int) -> PutPart:
        hashes = contribution_hashes(offer.key, 4 * PART_BYTES)
        return PutPart(**self.head_of(offer), part=part, hash=hashes[part])

    def commit_of(self, offer: Offer, flavour: str = "") -> Commit:
        hashes = contribution_hashes(offer.key, offer.size_bytes, flavour)
        return Commit(**self.head_of(offer), payload_hash=payload_hash(hashes))

    def head_of(self, offer: Offer) -> dict[str, Any]:
        return {
            "run_id": RUN,
            "worker_id": offer.worker_id,
            "incarnation": offer.incarnation,
            "fragment": offer.fragment,
            "sequence": offer.sequence,
        }

    def whole_contribution(self, offer: Offer, flavour: str = "") -> None:
        answer = self.deliver(offer)
        if isinstance(answer, OfferAnswer) and answer.state == "send":
            for part in answer.missing:
                self.deliver(self.part_of(offer, part))
            self.deliver(self.commit_of(offer, flavour))

    # --- the server -----------------------------------------------------------------------------------------------

    def deliver(self, message: Request) -> Answer | None:
        """A refusal is a fine answer; anything else that is raised is a bug."""
        self.sent.append(message)
        try:
            answer = self.answer(message)
        except Refused:
            answer = None
        self.take_effects()
        if answer is not None:
            self.check_answer(message, answer)
        return answer

    def answer(self, message: Request) -> Answer | None:
        coordinator, now = self.coordinator, self.now
        match message:
            case Join():
                return coordinator.join(message, now)
            case Heartbeat():
                return coordinator.heartbeat(message, now)
            case Leave():
                return coordinator.leave(message, now)
            case Offer():
                return coordinator.offer(message, now)
            case PutPart():
                begun = coordinator.begin_part(message, now)
                return coordinator.part_arrived(message, now) if isinstance(begun, Upload) else begun
            case Commit():
                ready = coordinator.begin_commit(message, now)
                if isinstance(ready, CommitAnswer):
                    return ready
                self.sizes[message.key] = ready.offer.size_bytes
                return coordinator.accept(message, now)
            case Poll():
                return coordinator.poll(message, now)
            case GetPart():
                return coordinator.get_part(message, now)

    # --- what must hold -------------------------------------------------------------------------------------------

    def check_answer(self, message: Request, answer: Answer) -> None:
        if isinstance(message, Join) and isinstance(answer, JoinAnswer):
            self.check_join(message, answer)
        elif isinstance(message, FromMember) and not isinstance(message, Leave):
            assert message.incarnation == self.incarnation[message.worker_id], "an older start was not fenced"
            assert message.worker_id in self.live, "who is not live got an answer"
        if isinstance(message, Commit) and isinstance(answer, CommitAnswer):
            assert self.answers.setdefault(message.key, answer) == answer, "the same key got two answers"
            assert self.counted_in[message.key] == answer.version
            sent = payload_hash(contribution_hashes(message.key, self.sizes[message.key]))
            assert message.payload_hash == sent, "a commit of other bytes than were sent was accepted"
        if isinstance(message, Offer) and isinstance(answer, OfferAnswer) and answer.state == "accepted":
            assert self.counted_in[message.key] == answer.version

    def check_join(self, message: Join, answer: JoinAnswer) -> None:
        worker = message.worker_id
        assert message.instance not in self.retired, "a retired instance came back"
        if self.instance.get(worker, message.instance) != message.instance:
            self.retired.add(self.instance[worker])
            assert answer.incarnation == self.incarnation[worker] + 1
        else:
            assert answer.incarnation == self.incarnation.get(worker, 1)
        self.instance[worker], self.incarnation[worker] = message.instance, answer.incarnation
        for fragment, state in enumerate(answer.fragments):
            counted = [k.sequence for k in self.counted_in if (k.worker_id, k.fragment) == (worker, fragment)]
            assert state.last_sequence == max(counted, default=0), "the ledger forgot"

    def take_effects(self) -> None:
        for effect in self.coordinator.take_effects():
            match effect:
                case Accumulate():
                    assert effect.key not in self.counted_in, "a contribution is in two rounds, or in one twice"
                    assert effect.version == self.closed[effect.key.fragment] + 1, "added to a round that is not open"
                    self.counted_in[effect.key] = effect.version
                    if self.frees_at_once:
                        self.coordinator.uploads.drop(effect.key)
                    else:
                        self.work.append(effect)
                case CloseRound():
                    self.check_close(effect)
                    self.work.append(effect)
                case DropUpload():
                    assert effect.key not in self.counted_in, "the bytes of an accepted contribution were dropped"

    def check_close(self, effect: CloseRound) -> None:
        assert effect.version == self.closed[effect.fragment] + 1, "versions are not monotone"
        self.closed[effect.fragment] = effect.version
        floor = max(1, self.coordinator.rules.min_workers)
        assert len({p.worker_id for p in effect.participants}) >= floor, "a step from too few contributions"
        told = [make_key(p.worker_id, p.sequence, effect.fragment) for p in effect.participants]
        added = [k for k, v in self.counted_in.items() if (k.fragment, v) == (effect.fragment, effect.version)]
        assert told == added, "a round tells of other contributions than were added to it"

    @invariant()
    def versions_are_monotone(self) -> None:
        for i, fragment in enumerate(self.coordinator.fragments):
            version = fragment.published.version
            assert self.seen_published[i] <= version <= self.closed[i]
            assert fragment.round.version == self.closed[i] + 1
            self.seen_published[i] = version

    @invariant()
    def only_the_live_are_expected(self) -> None:
        for fragment in self.coordinator.fragments:
            assert fragment.round.expected <= self.coordinator.members.live_ids

    @invariant()
    def the_pool_is_never_overfull(self) -> None:
        uploads = self.coordinator.uploads
        held = [u.offer.size_bytes for i in range(2) for u in uploads.of(fragment=i)]
        held += [self.sizes[effect.key] for effect in self.work if isinstance(effect, Accumulate)]
        assert uploads.held_bytes == sum(held)
        assert sum(held) <= self.capacity_bytes or len(held) == 1

    @invariant()
    def nobody_uploads_two_contributions_to_one_fragment(self) -> None:
        for fragment in range(2):
            senders = [upload.offer.worker_id for upload in self.coordinator.uploads.of(fragment=fragment)]
            assert len(senders) == len(set(senders))

    @invariant()
    def a_deadline_that_has_passed_is_acted_on(self) -> None:
        self.coordinator.tick(self.now)
        self.take_effects()
        for fragment in self.coordinator.fragments:
            assert not self.coordinator.verdict(fragment, self.now).close


TestCoordinatorMachine = CoordinatorMachine.TestCase
TestCoordinatorMachine.settings = cases(400, stateful_step_count=50, derandomize=True)
