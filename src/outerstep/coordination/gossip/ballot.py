"""How the members decide on one block: Tendermint's rules (Buchman, Kwon, Milosevic 2018, algorithm 1).

In each *turn* one member, another each time, proposes a block. Every member prevotes it, or none; one that sees a
quorum of prevotes for it is *locked* on it and precommits it; a quorum of precommits decides. A locked member prevotes
nothing else, unless a later turn had a quorum of prevotes for that. So a block that may have been decided
anywhere, as far as a member can tell, is the only one that can be: whatever is lost, late, repeated or dead, and
whatever f members say. Timers only bring about the next turn; they decide nothing.

Nothing here knows what a block means: `judge` says whether this peer is for it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from ...statements import (
    Block,
    ChainState,
    Decision,
    Proposed,
    Signed,
    Voted,
    digest_of_block,
)
from ...types import Plain
from .book import Book
from .chain import attackers_among, follows, quorum_of

Verdict = Literal["good", "bad", "unknown"]
MOST_TURNS_AHEAD = 256  # of others' votes that are kept
TURNS_TOLD = 4


class Judge(Protocol):
    """What the peer around it knows."""

    def judge(self, block: Block) -> Verdict:
        """Is this peer for it? "unknown": not yet."""

    def has_all_of(self, block: Block) -> bool:
        """Are its contributions here? A member that prevotes a block can be asked for them."""

    def make(self, now: float) -> Block | None:
        """What this peer would propose; None: nothing is due."""

    def is_silent(self, key: str, now: float) -> bool: ...


class Bound(Plain, frozen=True):
    """A block that had a quorum of prevotes in a turn."""

    turn: int
    block: Block


class Ballots(Plain, frozen=True):
    """What a peer must not forget of the open ballot if it is restarted."""

    own: tuple[Signed, ...] = ()
    locked: Bound | None = None
    valid: Bound | None = None


@dataclass(frozen=True)
class TurnTimeouts:
    """Seconds that a step of turn t is waited for: first + t·more, at most `most`."""

    first_s: float = 4.0
    more_s: float = 2.0
    most_s: float = 60.0

    def wait_s(self, turn: int) -> float:
        return min(self.first_s + turn * self.more_s, self.most_s)


class Ballot:
    """`key`: this peer's own; None: it only watches."""

    def __init__(
        self,
        state: ChainState,
        book: Book,
        run_id: str,
        key: str | None,
        attackers: int,
        pace: TurnTimeouts,
        judge: Judge,
        kept: Ballots = Ballots(),  # noqa: B008 - frozen
        on_said: Callable[[], None] = lambda: None,
    ) -> None:
        self._state, self._book, self._run_id = state, book, run_id
        self._keys = [member.key for member in state.members]
        self._key = key if key in self._keys else None
        self._attackers = attackers_among(len(self._keys), attackers)
        self._quorum = quorum_of(len(self._keys), attackers)
        self._pace, self._judge, self._on_said = pace, judge, on_said
        self.height = state.height + 1
        self.turn = 0
        self._step: Literal["propose", "prevote", "precommit"] = "propose"
        self._until: float | None = None  # when the step has been waited for long enough
        self._next_turn_at: float | None = None
        self._locked, self._valid = kept.locked, kept.valid
        self._blocks: dict[str, Block] = {}
        self._proposals: dict[int, Proposed] = {}
        self._void: set[int] = set()  # turns whose proposer has said what cannot be
        self._votes: dict[tuple[str, int], dict[str, dict[str, Signed]]] = defaultdict(dict)  # by author, for what
        self._heard: list[tuple[int, Signed, bool]] = []  # in which turn, and is it a proposal?
        self._own: list[Signed] = []
        for bound in (kept.locked, kept.valid):
            if bound is not None:
                self._blocks[digest_of_block(bound.block)] = bound.block
        for signed in kept.own:
            self._recall(signed)

    def _recall(self, signed: Signed) -> None:
        """Something this peer has said before it was restarted."""
        statement = self._book.read(signed)
        if not isinstance(statement, Proposed | Voted) or statement.height != self.height:
            return
        self._own.append(signed)
        self.hear(signed, statement)
        if isinstance(statement, Voted) and statement.turn >= self.turn:
            self.turn = statement.turn
            # After its prevote comes the precommit; after its precommit nothing more in this turn.
            self._step = "prevote" if statement.kind == "prevote" else "precommit"
        elif statement.turn > self.turn:
            self.turn, self._step = statement.turn, "propose"

    # --- hearing --------------------------------------------------------------------------------------------------

    @property
    def statements(self) -> list[Signed]:
        """What was said about this height and may still matter: in the last turns, and in those that bind somebody."""
        bound = {b.turn for b in (self._locked, self._valid) if b is not None}
        return [signed for turn, signed, _ in self._heard if turn > self.turn - TURNS_TOLD or turn in bound]

    @property
    def kept(self) -> Ballots:
        return Ballots(own=tuple(self._own), locked=self._locked, valid=self._valid)

    @property
    def blocks(self) -> list[Block]:
        """Those that it is about."""
        return list(self._blocks.values())

    def hear(self, signed: Signed, statement: Proposed | Voted) -> bool:
        """Of a member. False: it is of no use, or not yet.

        A member that votes for two things is counted for both, once for each block that is known. Some have heard only
        the one vote and some only the other; if one of them is locked because of it, all must come to see what it saw.
        """
        if statement.height != self.height or statement.turn > self.turn + MOST_TURNS_AHEAD:
            return False
        if isinstance(statement, Proposed):
            if not self.turn - TURNS_TOLD < statement.turn <= self.turn + TURNS_TOLD:
                return False
            if statement.turn in self._proposals or signed.author != self.proposer(statement.turn):
                return False
            if not follows(statement.block, self._state):
                return False
            self._proposals[statement.turn] = statement
            self._blocks[digest_of_block(statement.block)] = statement.block
        else:
            votes = self._votes[statement.kind, statement.turn].setdefault(signed.author, {})
            if statement.block in votes or (votes and statement.block and statement.block not in self._blocks):
                return False
            votes[statement.block] = signed
        self._heard.append((statement.turn, signed, isinstance(statement, Proposed)))
        return True

    def skip(self, author: str, turn: int) -> None:
        """What this member proposed in its turn cannot be carried out: nobody need wait for more of it."""
        if turn <= self.turn + MOST_TURNS_AHEAD and author == self.proposer(turn):
            self._void.add(turn)

    def proposer(self, turn: int) -> str:
        return self._keys[(self.height + turn) % len(self._keys)]

    # --- deciding -------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> Decision | None:
        """Do what can be done. What came of it, if it is decided."""
        while True:
            decided = self._decided()
            if decided is not None or self._key is None or not self._once(now):
                return decided

    def _once(self, now: float) -> bool:
        """One rule that applies. False: none does."""
        ahead = self._ahead()
        if ahead > self.turn:
            self._start(ahead)
            return True
        if self._give_turn_up(now):
            self._start(self.turn + 1)
            return True
        if self._step == "propose":
            return self._propose_or_prevote(now)
        if self._step == "prevote":
            return self._precommit(now)
        return self._note_valid()

    def _propose_or_prevote(self, now: float) -> bool:
        proposal = self._proposals.get(self.turn)
        if proposal is None and self.proposer(self.turn) == self._key:
            return self._propose(now)
        if proposal is not None and (verdict := self._verdict(proposal)) is not None:
            self._vote("prevote", verdict)
            self._enter("prevote")
            return True
        if self._until is None and (proposal is not None or self.turn > 0 or self._judge.make(now) is not None):
            self._until = now + self._pace.wait_s(self.turn)
            return True
        is_hopeless = proposal is None and (
            self.turn in self._void or self._judge.is_silent(self.proposer(self.turn), now)
        )
        if self._until is not None and (now >= self._until or is_hopeless):
            self._vote("prevote", "")
            self._enter("prevote")
            return True
        return False

    def _propose(self, now: float) -> bool:
        bound = self._valid
        block = bound.block if bound is not None else self._judge.make(now)
        if block is None:
            return self._pass_on(now)
        self._say(
            Proposed(
                run_id=self._run_id,
                height=self.height,
                turn=self.turn,
                block=block,
                valid_turn=-1 if bound is None else bound.turn,
            )
        )
        return True

    def _pass_on(self, now: float) -> bool:
        """It is our turn, and we have nothing to propose; somebody else may."""
        if self.turn == 0:
            return False
        if self._until is None:
            self._until = now + self._pace.wait_s(self.turn)
            return True
        if now < self._until:
            return False
        self._vote("prevote", "")
        self._enter("prevote")
        return True

    def _verdict(self, proposal: Proposed) -> str | None:
        """What to prevote; None: it cannot be said yet."""
        digest, locked = digest_of_block(proposal.block), self._locked
        if proposal.valid_turn < 0:
            judged = self._judge.judge(proposal.block)
            if judged == "unknown":
                return None
            free = locked is None or digest_of_block(locked.block) == digest
            return digest if judged == "good" and free else ""
        if proposal.valid_turn >= self.turn:
            return ""
        if self._count("prevote", proposal.valid_turn)[digest] < self._quorum:
            return None
        if not self._judge.has_all_of(proposal.block):
            return None
        free = locked is None or locked.turn <= proposal.valid_turn or digest_of_block(locked.block) == digest
        return digest if free else ""

    def _precommit(self, now: float) -> bool:
        counts = self._count("prevote", self.turn)
        winner = self._winner(counts)
        voters = len(self._votes["prevote", self.turn])
        if winner is not None:
            self._locked = self._valid = Bound(turn=self.turn, block=self._blocks[winner])
            self._vote("precommit", winner)
        elif counts[""] >= self._quorum:
            self._vote("precommit", "")
        elif voters >= self._quorum and self._until is None:
            self._until = now + self._pace.wait_s(self.turn)
            return True
        elif self._until is not None and now >= self._until:
            self._vote("precommit", "")
        else:
            return False
        self._enter("precommit")
        return True

    def _note_valid(self) -> bool:
        """Enough were for it after all, though we were not locked on it: then it is what we propose next."""
        winner = self._winner(self._count("prevote", self.turn))
        if winner is None or (self._valid is not None and self._valid.turn >= self.turn):
            return False
        self._valid = Bound(turn=self.turn, block=self._blocks[winner])
        self._on_said()
        return True

    def _give_turn_up(self, now: float) -> bool:
        counts = self._count("precommit", self.turn)
        if counts[""] >= self._quorum:
            return True
        if len(self._votes["precommit", self.turn]) < self._quorum:
            return False
        if self._next_turn_at is None:
            self._next_turn_at = now + self._pace.wait_s(self.turn)
        return now >= self._next_turn_at

    def _decided(self) -> Decision | None:
        for (kind, _), votes in self._votes.items():
            if kind != "precommit":
                continue
            winner = self._winner(_tally(votes))
            if winner is not None:
                chosen = tuple(said[winner] for said in votes.values() if winner in said)
                return Decision(block=self._blocks[winner], votes=chosen)
        return None

    # --- counting -------------------------------------------------------------------------------------------------

    def _count(self, kind: str, turn: int) -> Counter[str]:
        return _tally(self._votes.get((kind, turn), {}))

    def _winner(self, counts: Counter[str]) -> str | None:
        return next((b for b, n in counts.items() if b and n >= self._quorum and b in self._blocks), None)

    def _ahead(self) -> int:
        """The latest turn that more than f members have come to: one of them is honest, and came not alone."""
        latest: dict[str, int] = {}
        for turn, author in self._presences():
            latest[author] = max(turn, latest.get(author, 0))
        turns = sorted(latest.values(), reverse=True)
        return turns[self._attackers] if len(turns) > self._attackers else 0

    def _presences(self) -> Iterator[tuple[int, str]]:
        for turn in self._proposals:
            yield turn, self.proposer(turn)
        for (_, turn), votes in self._votes.items():
            for author in votes:
                yield turn, author

    # --- saying ---------------------------------------------------------------------------------------------------

    def _start(self, turn: int) -> None:
        self.turn = turn
        self._enter("propose")
        self._next_turn_at = None
        self._forget_proposals()

    def _forget_proposals(self) -> None:
        """Of turns long past. A block that binds somebody is proposed again, and one that was decided is told."""
        bound = [b for b in (self._locked, self._valid) if b is not None]
        bound_turns = {b.turn for b in bound}
        past = {t for t in self._proposals if t <= self.turn - TURNS_TOLD and t not in bound_turns}
        self._proposals = {turn: said for turn, said in self._proposals.items() if turn not in past}
        kept = [*(b.block for b in bound), *(said.block for said in self._proposals.values())]
        self._blocks = {digest_of_block(block): block for block in kept}
        self._heard = [one for one in self._heard if one[0] not in past or not one[2]]

    def _enter(self, step: Literal["propose", "prevote", "precommit"]) -> None:
        self._step, self._until = step, None

    def _vote(self, kind: Literal["prevote", "precommit"], block: str) -> None:
        self._say(Voted(run_id=self._run_id, height=self.height, turn=self.turn, kind=kind, block=block))

    def _say(self, statement: Proposed | Voted) -> None:
        signed = self._book.write(statement)
        self._book.enter(signed, statement)
        self._own.append(signed)
        self.hear(signed, statement)
        self._on_said()


def _tally(votes: Mapping[str, Mapping[str, Signed]]) -> Counter[str]:
    return Counter(block for said in votes.values() for block in said)
