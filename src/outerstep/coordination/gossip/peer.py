"""One peer's side of every conversation: what it hears, what it concludes, what it says.

Nothing is sent to anybody in particular. A peer tells each other peer, whenever they talk, all it knows of the open
ballot, the open rounds and who is alive, its own and what it heard: `say_to`. What is lost is said again, what cannot
get through directly comes through a third. `stirred` says that it has something new of its own to tell.

Three rules of order, for the code around it:
  - `keepsake` is written down for good before anybody is told anything (`say_to`) or anything is taken (`take`), if it
    has changed: a peer that has forgotten what it said may say something else, which would prove that it lies;
  - bytes of contributions are fetched by digest (`wanted`) from any peer that has them, and then told of (`hold`);
  - decided blocks are taken in order (`take`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from msgspec import UNSET

from ...events import Event
from ...statements import (
    MOST_DECISIONS,
    MOST_PEERS,
    MOST_STATEMENTS,
    Beat,
    ChainState,
    Converse,
    Decision,
    Member,
    Offered,
    Ownership,
    Proof,
    Proposed,
    Round,
    Signed,
    Voted,
    Withdrawal,
)
from ...types import LeaseStatement, Plain, Positive, Trained
from ...versions import Since2
from . import bounds, chain
from .ballot import Ballot, Ballots
from .blocks import Blocks
from .book import Book, Sign, Verify
from .heard import Acquaintances, HeardOffer, Offers, digests_of, signed_in
from .meaning import (
    CanCall,
    anywhere,
    leased_datasets,
    wrong_with_beat,
    wrong_with_block,
    wrong_with_offer,
    wrong_with_state,
)
from .refusals import GossipRefusals
from .rules import GossipRules

REMEMBERED_DECISIONS = 64


class Keepsake(Plain, frozen=True):
    """What a peer must not forget if it is restarted: where the run was, and everything it has said that it may not
    say differently. `incarnation`: how often it was started. `abstains_at`: a height at which it has forgotten what it
    said, so that it says nothing there (`outerstep repair`)."""

    run_id: str
    state: ChainState
    incarnation: int = 1
    ballots: Ballots = Ballots()
    sequences: tuple[int, ...] = ()  # of its contributions, by fragment
    abstains_at: Since2[Positive] = UNSET


class GossipPeer:
    """`member`: who this peer is. `sizes`: how many bytes a contribution to each fragment has."""

    def __init__(
        self,
        run_id: str,
        member: Member,
        sign: Sign,
        verify: Verify,
        rules: GossipRules,
        keepsake: Keepsake,
        sizes: Sequence[int],
        now: float,
        *,
        address: str = "",
        fingerprint: str | None = None,
        invitation: str = "",
        can_call: CanCall = anywhere,
        owner: Ownership | None = None,
    ) -> None:
        self.run_id, self.member, self.rules = run_id, member, rules
        self.state = keepsake.state
        self.incarnation = keepsake.incarnation
        self._abstains_at = keepsake.abstains_at
        self.book = Book(run_id, member.key, sign, verify, rules.protocol, len(self.state.versions), rules.inviter)
        self.book.attend_to(self._keys)
        self.address, self.fingerprint = address, fingerprint
        self._owner = owner if owner is not None and rules.protocol >= 2 else UNSET
        self._invitation = invitation if rules.inviter else ""
        self.wants: str = "watch"
        self.stirred = True
        self.refusals = GossipRefusals()
        self._can_call = can_call
        self._offers = Offers(tuple(sizes))
        self._sequences = list(keepsake.sequences or (0,) * len(self.state.versions))
        self._offered: dict[int, int] = {}  # the version that this process last contributed to, by fragment
        self._decisions: deque[tuple[Decision, int]] = deque(maxlen=REMEMBERED_DECISIONS)  # and its bytes
        self._taken: deque[tuple[Decision, tuple[Event, ...]]] = deque()
        self.told: tuple[Event, ...] = ()  # of leased data: what came of the block that was taken last
        self.unseen: list[Event] = []  # and what others decided where this peer leapt
        self._others = Acquaintances(self.state.members, now, rules.heartbeat_timeout_s)
        self._rounds: list[Round] = []
        self._convicted_at: dict[str, int] = {}  # key -> height, for how long a proof is passed on
        self.anchors: dict[int, tuple[int, str]] = {}
        self._progress: tuple[int, float, float | None] = (0, 0.0, None)
        self._number = 0
        self._blocks = Blocks(self, rules, self.book, self._offers, self._others, can_call, now)
        self._ballot = self._open_ballot(keepsake.ballots)
        self._beat(now)

    # --- what it is told --------------------------------------------------------------------------------------------

    def hear(self, told: Converse, now: float, teller: str = "") -> None:
        """What another peer said. Nothing in it is believed because of who said it. `teller`: who that is, if it is
        known; else as it calls itself."""
        if told.run_id != self.run_id:
            return
        teller = teller or told.sender
        for decision in told.decisions:
            if decision.block.height == self.state.height + 1:
                self._settle(decision, now, teller)
        for proof in told.proofs:
            self._convict(proof, teller)
        withdrawn = () if told.withdrawn is UNSET else told.withdrawn
        for withdrawal in withdrawn:
            self._withdraw(withdrawal, teller)
        height = self.state.height
        news = [signed for signed in told.statements if not self.book.is_settled(signed, height)]
        for signed in news:
            if self._listen(signed, now, teller):
                self.book.settle(signed, height)
        if news or told.decisions or told.proofs or withdrawn:
            self._advance(now)

    def _listen(self, signed: Signed, now: float, teller: str) -> bool:
        """False: it may mean more when it is said again."""
        statement = self.book.read(signed)
        if statement is None:
            self.refusals.note(teller, "passed on what nobody signed, or what is no statement of this run")
            return True
        if isinstance(statement, Beat):
            return self._greet(signed, statement, now)
        if signed.author not in self._keys or not self._is_near(signed, statement):
            return True
        self.book.enter(signed, statement)
        if signed.author in self.book.proofs and signed.author not in self._convicted_at:
            self._convicted_at[signed.author] = self.state.height
            self.stirred = True
        if isinstance(statement, Offered):
            self._offers.hear(signed, statement, self.state.versions[statement.fragment], now)
            return True
        if isinstance(statement, Proposed):
            wrong = wrong_with_block(statement.block, self.state, self.book)
            if wrong:
                self._refuse(signed.author, wrong)
                self._ballot.skip(signed.author, statement.turn)
                return True
        return self._ballot.hear(signed, statement)

    def _greet(self, signed: Signed, beat: Beat, now: float) -> bool:
        if signed.author == self.member.key:
            return True
        wrong = wrong_with_beat(beat, len(self.state.versions), self._can_call)
        if wrong:
            self._refuse(signed.author, wrong)
        else:
            self._others.greet(signed, beat, now)
        return True

    def _is_near(self, signed: Signed, statement: Offered | Proposed | Voted) -> bool:
        if not isinstance(statement, Offered):
            return statement.height == self._ballot.height
        wrong = wrong_with_offer(statement, len(self.state.versions))
        if wrong:
            self._refuse(signed.author, wrong)
        return not wrong

    def _refuse(self, author: str, why: str) -> None:
        """It has signed this itself."""
        self.refusals.note(self.name_of(author), why)

    def name_of(self, key: str) -> str:
        """A member's id; else the first digits of its key."""
        return next((member.peer_id for member in self.state.members if member.key == key), key[:16])

    def _convict(self, proof: Proof, teller: str) -> None:
        if proof.first.author in self.book.proofs or proof.first.author not in self._keys:
            return
        if self.book.convict(proof):
            self._convicted_at.setdefault(proof.first.author, self.state.height)
            self.stirred = True
        else:
            self.refusals.note(teller, "passed on a proof that proves nothing")

    def _withdraw(self, withdrawal: Withdrawal, teller: str) -> None:
        if any(member.key == withdrawal.key for member in self.state.expelled):
            return
        if self.book.withdraw(withdrawal):
            self.stirred = True
        else:
            self.refusals.note(teller, "passed on a withdrawal that the inviter did not sign")

    def hold(self, digest: str, now: float, *, good: bool) -> None:
        """The bytes with this digest are here; `good`: they can be used."""
        self._offers.hold(digest, good=good)
        self._advance(now)

    def progressed(self, digest: str, now: float) -> None:
        """Some bytes of it came."""
        self._offers.progressed(digest, now)

    def hold_anchor(self, fragment: int, version: int, anchor_hash: str) -> None:
        """This version of a fragment was adopted, and has this hash."""
        self.anchors[fragment] = (version, anchor_hash)

    def note_progress(self, step: int, steps_per_second: float, loss: float | None) -> None:
        self._progress = (step, steps_per_second, loss)

    def tick(self, now: float) -> None:
        """At least as often as it is to beat."""
        self._others.forget(now)
        self._beat(now)
        self._advance(now)

    # --- what it does -----------------------------------------------------------------------------------------------

    def offer(
        self,
        fragment: int,
        digest: str,
        base_hash: str,
        now: float,
        *,
        steps: int,
        samples: int = 0,
        tokens: int = 0,
        data: tuple[LeaseStatement, ...] = (),
        trained: tuple[Trained, ...] = (),
    ) -> Offered:
        """Contribute to the fragment's next round. The bytes are here already."""
        self._sequences[fragment] += 1
        says = Offered(
            run_id=self.run_id,
            fragment=fragment,
            version=self.state.versions[fragment] + 1,
            sequence=self._sequences[fragment],
            digest=digest,
            size_bytes=self._offers.sizes[fragment],
            base_hash=base_hash,
            steps=steps,
            samples=samples,
            tokens=tokens,
            data=data or UNSET,
            trained=trained or UNSET,
        )
        signed = self.book.write(says)
        self.book.enter(signed, says)
        self._offers.hold(digest, good=True)
        self._offers.hear(signed, says, self.state.versions[fragment], now)
        self._offered[fragment] = says.version
        self.stirred = True
        self._advance(now)
        return says

    def belong(self, now: float) -> None:
        """Ask to be a member, or to stay one."""
        self._want("belong", now)

    def leave(self, now: float) -> None:
        self._want("leave", now)

    def _want(self, wish: str, now: float) -> None:
        self.wants = wish
        self.stirred = True
        self._beat(now)
        self._advance(now)

    def take(self) -> Decision | None:
        """The next decided block that was not taken yet."""
        decision, self.told = self._taken.popleft() if self._taken else (None, ())
        return decision

    # --- what it says -----------------------------------------------------------------------------------------------

    def say_to(self, height: int) -> Converse:
        """All that a peer at this height may need."""
        statements = [self._own_beat, *self._others.statements()]
        if height == self.state.height:
            statements += self._ballot.statements
            statements += self._offers.statements()
        return Converse(
            run_id=self.run_id,
            sender=self.member.peer_id,
            height=self.state.height,
            statements=tuple(
                bounds.those_that_fit(
                    [(signed, bounds.size_of(signed)) for signed in bounds.in_turn(statements, self.member.key)],
                    bounds.MOST_BYTES_TOLD,
                    MOST_STATEMENTS,
                )
            ),
            proofs=self._proofs_to_tell(),
            decisions=self._decisions_after(height),
            withdrawn=tuple(self.book.withdrawn.values())[:MOST_PEERS] or UNSET,
        )

    def _proofs_to_tell(self) -> tuple[Proof, ...]:
        """Those against members first."""
        keys = sorted(self._convicted_at, key=lambda key: key not in self._keys)
        sized = [(self.book.proofs[key], bounds.proof_bytes(self.book.proofs[key])) for key in keys]
        return tuple(bounds.those_that_fit(sized, bounds.MOST_PROOF_BYTES_TOLD, bounds.MOST_MEMBERS))

    def _decisions_after(self, height: int) -> tuple[Decision, ...]:
        """One after the other, as far as they are remembered, and fit."""
        told: list[Decision] = []
        room = bounds.MOST_DECISION_BYTES
        for decision, size_bytes in self._decisions:
            room -= size_bytes if decision.block.height > height else 0
            if decision.block.height == height + len(told) + 1 and room >= 0 and len(told) < MOST_DECISIONS:
                told.append(decision)
        return tuple(told)

    @property
    def keepsake(self) -> Keepsake:
        return Keepsake(
            run_id=self.run_id,
            state=self.state,
            incarnation=self.incarnation,
            ballots=self._ballot.kept,
            sequences=tuple(self._sequences),
            abstains_at=self._abstains_at if self._abstains_at == self.state.height + 1 else UNSET,
        )

    def _beat(self, now: float) -> None:
        self._number += 1
        step, steps_per_second, loss = self._progress
        fragments = range(len(self.state.versions))
        whole = all(f in self.anchors for f in fragments)
        self._own_beat = self.book.write(
            Beat(
                run_id=self.run_id,
                peer_id=self.member.peer_id,
                incarnation=self.incarnation,
                number=self._number,
                address=self.address or self.member.peer_id,
                fingerprint=self.fingerprint,
                wants=self.wants,  # type: ignore[arg-type]  # one of three words
                height=self.state.height,
                held=tuple(self.anchors[f] for f in fragments) if whole else (),
                step=step,
                steps_per_second=steps_per_second,
                loss=loss,
                owner=self._owner,
                invitation=self._invitation or UNSET,
            )
        )

    # --- what others can see ----------------------------------------------------------------------------------------

    @property
    def is_member(self) -> bool:
        return self.member.key in self._keys

    @property
    def is_full(self) -> bool:
        """Are there as many members as there can be?"""
        return len(self.state.members) >= bounds.MOST_MEMBERS

    @property
    def is_expelled(self) -> bool:
        return any(m.key == self.member.key for m in self.state.expelled)

    @property
    def contacts(self) -> dict[str, Beat]:
        """The latest beat of everybody else that was heard of, by key."""
        return {key: known.beat for key, known in self._others.items()}

    def beats(self) -> tuple[Signed, ...]:
        """The latest beats of the members, as they have signed them, and its own: they say where everybody is."""
        known = [self._others.get(member.key) for member in self.state.members]
        return (self._own_beat, *(one.signed for one in known if one is not None))

    def silent_s(self, key: str, now: float) -> float:
        """How long ago something new was heard of this peer."""
        return self._others.silent_s(key, now)

    def wanted(self) -> dict[str, tuple[int, str]]:
        """Digests whose bytes are missing, with their size and the key of their author. (What is of no use any more is
        forgotten; if it is of use again, and its bytes were kept, say `hold` again.)"""
        return {digest: (says.size_bytes, author) for digest, (says, author) in self.missing().items()}

    def missing(self) -> dict[str, tuple[Offered, str]]:
        """The same: digest → what was offered, and the key of its author."""
        missing = {
            offer.says.digest: (offer.says, offer.signed.author)
            for offer in self._offers
            if offer.condition == "missing" and offer.signed.author not in self.book.proofs
        }
        for block in self._blocks_in_question():
            for signed, says in signed_in(block):
                right_size = (
                    says.fragment < len(self._offers.sizes) and says.size_bytes == self._offers.sizes[says.fragment]
                )
                if right_size and self._offers.condition(says.digest) == "missing":
                    missing.setdefault(says.digest, (says, signed.author))
        return missing

    def needed(self) -> set[str]:
        """Digests of the open rounds and of each fragment's last two: their bytes are kept for other peers."""
        blocks = [*self._ballot.blocks, *self.recent_rounds()]
        rounds = [b for b in blocks if isinstance(b, Round) and b.version > self.state.versions[b.fragment] - 2]
        return {offer.says.digest for offer in self._offers} | {d for block in rounds for d in digests_of(block)}

    def rounds_waiting(self) -> frozenset[tuple[int, int]]:
        """(fragment, version) of the rounds that others have contributed to, and this peer has not."""
        waiting = set()
        for fragment, version in enumerate(self.state.versions):
            offers = self._offers.of_round(fragment, version + 1, self.state.members)
            if offers and self.member.key not in offers and self.is_member:
                waiting.add((fragment, version + 1))
        return frozenset(waiting)

    def rounds_offered(self) -> frozenset[int]:
        """The fragments to whose open round this process has contributed. (What the one before it offered counts, if
        others have it, until this one offers something newer.)"""
        return frozenset(f for f, v in enumerate(self.state.versions) if self._offered.get(f) == v + 1)

    def recent_rounds(self) -> list[Round]:
        """The last decided ones, two or more of each fragment, in order."""
        return self._rounds

    def is_silent(self, key: str, now: float) -> bool:
        """Has nothing new been heard of this member for too long?"""
        return self._blocks.is_silent(key, now)

    def is_short_of_peers(self, now: float) -> bool:
        """Can nothing be decided, because too few are there?"""
        return self._blocks.is_short_of_peers(now)

    def waiting_for(self, fragment: int, now: float) -> str:
        """What the open round of a fragment waits for, in words."""
        members, heard = self.state.members, self._blocks.heard_from(now)
        quorum = chain.quorum_of(len(members), self.rules.attackers)
        if not self.is_member and self.is_full:
            return f"a place: the run has {len(members)} members, the most there can be; one of them has to leave first"
        if not self.is_member:
            return "the other peers, to take this one in"
        if len(members) < self.rules.min_peers:
            needed = f"{len(members)} have joined, {self.rules.min_peers} are needed (min_peers)"
            return f"more peers: {needed}. Start one, or stop this one: it keeps its weights"
        if len(heard) < quorum:
            silent = [m.peer_id for m in members if m.peer_id not in heard]
            return f"{', '.join(silent)}: {len(heard)} of {len(members)} peers are heard of, {quorum} must agree"
        offers = self._offers.of_round(fragment, self.state.versions[fragment] + 1, members)
        missing = [m.peer_id for m in members if m.key not in offers]
        own = offers.get(self.member.key)
        apart = [m.peer_id for m in members if own and m.key in offers and not _start_alike(offers[m.key], own)]
        if apart and not missing:
            return (
                f"enough peers with the same anchor: {', '.join(apart)} started from another one than this peer; if "
                "that does not change, restart the peers that hold the wrong one"
            )
        return ", ".join(missing) or "the others' agreement"

    # --- deciding ---------------------------------------------------------------------------------------------------

    @property
    def _keys(self) -> set[str]:
        return {member.key for member in self.state.members}

    def _open_ballot(self, kept: Ballots = Ballots()) -> Ballot:  # noqa: B008 - frozen
        return Ballot(
            self.state,
            self.book,
            self.run_id,
            self.member.key if self._abstains_at != self.state.height + 1 else None,
            self.rules.attackers,
            self.rules.pace,
            self._blocks,
            kept,
            on_said=self._said,
        )

    def _said(self) -> None:
        self.stirred = True

    def _advance(self, now: float) -> None:
        self._blocks.now = now
        while (decision := self._ballot.advance(now)) is not None:
            self._settle(decision, now)

    def _settle(self, decision: Decision, now: float, teller: str = "") -> None:
        """One more block is decided; if `teller` is somebody else, only if that can be seen."""
        if teller:
            wrong = wrong_with_block(decision.block, self.state, self.book)
            if wrong or not chain.is_decided(decision, self.state, self.book, self.rules.attackers):
                self.refusals.note(teller, f"passed on a decision that was not made: it {wrong or 'has no quorum'}")
                return
        self.state, told = chain.carry_out(decision.block, self.state, self.rules.attackers)
        self._remember(decision)
        self._taken.append((decision, told))
        self._others.changed(self.state.members, now)
        self.book.attend_to(self._keys)
        if isinstance(decision.block, Round):
            self._rounds = [*self._rounds, decision.block][-2 * len(self.state.versions) :]
        self._forget_convicts()
        for member in self.state.expelled:
            self.book.withdrawn.pop(member.key, None)
        self._ballot = self._open_ballot()
        # What it offered before it was let in counts once it is.
        self._offers.prune(self.state.versions, {*self._keys, self.member.key}, self.recent_rounds())
        self.stirred = True
        self._beat(now)

    def _remember(self, decision: Decision) -> None:
        """For those that are behind."""
        self._decisions.append((decision, bounds.decision_bytes(decision)))
        while sum(size_bytes for _, size_bytes in self._decisions) > bounds.MOST_DECISION_BYTES:
            self._decisions.popleft()

    def _forget_convicts(self) -> None:
        """Those that are members no more, once everybody has had time to hear why."""
        passed_on = self.state.height - 2 * (self.rules.attackers + 1)  # a round and a change at each
        for key in [k for k, height in self._convicted_at.items() if height < passed_on and k not in self._keys]:
            del self._convicted_at[key]
            self.book.proofs.pop(key, None)

    def leap(self, state: ChainState, now: float) -> bool:
        """Go on from here, as more than f members say that the run stands here: the blocks in between are forgotten by
        those that decided them. What this peer has said about earlier heights binds it no more. False: nobody can go on
        from there."""
        wrong = wrong_with_state(state, len(self.state.versions), leased_datasets(self.state))
        if state.height <= self.state.height or wrong:
            return False
        for _, told in self._taken:  # decided here, and not acted on before
            self.unseen += told
        self.unseen += chain.unseen(self.state, state)
        self.state = state
        self._decisions.clear()
        self._taken.clear()
        self._rounds = []
        self._others.changed(state.members, now)
        self.book.attend_to(self._keys)
        self._ballot = self._open_ballot()
        self._offers.prune(state.versions, {*self._keys, self.member.key}, [])
        self.stirred = True
        self._beat(now)
        return True

    def _blocks_in_question(self) -> list[Round]:
        """Rounds that are voted on, and the last that were decided: their contributions are needed."""
        open_rounds = [block for block in self._ballot.blocks if isinstance(block, Round)]
        return open_rounds + [block for block in self.recent_rounds() if not self._is_behind(block)]

    def _is_behind(self, block: Round) -> bool:
        """Does this peer hold it already, or what came after it?"""
        version, _ = self.anchors.get(block.fragment, (0, ""))
        return version >= block.version


def _start_alike(one: HeardOffer, other: HeardOffer) -> bool:
    return one.says.base_hash == other.says.base_hash
