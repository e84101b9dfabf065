"""Which block a peer would propose, and whether it is for one that another proposes.

    Round    when all members that are worth waiting for have contributed, or its deadline is over: of those that
             started from the same anchor, at least `min_peers` and more than half of the members
    Change   when a member is proven to lie, is no longer invited, is silent or wants to leave, or somebody wants to
             come; it goes first

A peer is for a round if all its contributions are here and can be used; for a change if it has seen the reason itself,
or holds the proof. Where it cannot tell yet it waits, and the ballot's timer decides for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from msgspec import UNSET

from ...statements import MOST_PEERS, Beat, Block, ChainState, Change, Member, Offered, Round, Withdrawal
from . import bounds, chain
from .ballot import Verdict
from .book import Book
from .heard import Acquaintance, Acquaintances, Offers, digests_of, offered_in
from .meaning import CanCall, may_be_let_in, wrong_with_block
from .rules import GossipRules


class Self(Protocol):
    """The peer whose view it is."""

    state: ChainState
    member: Member
    wants: str
    anchors: dict[int, tuple[int, str]]


@dataclass
class Blocks:
    peer: Self
    rules: GossipRules
    book: Book
    offers: Offers
    others: Acquaintances
    can_call: CanCall
    now: float

    def make(self, now: float) -> Block | None:
        self.now = now
        if self.is_short_of_peers(now) and len(self.peer.state.members) >= self.rules.min_peers:
            return None
        return self._make_change(now) or self._make_round(now)

    def _make_change(self, now: float) -> Change | None:
        """Who finds no room in it, whether to come or to be expelled, is there again for the next one."""
        going = [m.key for m in self.peer.state.members if self._should_go(m, now)]
        proven = sorted(key for key in going if key in self.book.proofs)
        sized = [(key, bounds.proof_bytes(self.book.proofs[key])) for key in proven]
        expelled = bounds.those_that_fit(sized, bounds.MOST_PROOF_BYTES, bounds.MOST_MEMBERS)
        gone = {*expelled, *(key for key in going if key not in proven)}
        stay = {m.peer_id: m for m in self.peer.state.members if m.key not in gone}
        applied = [] if expelled else self._newcomers(stay, now)
        members = chain.in_order(
            [*stay.values(), *(Member(peer_id=k.beat.peer_id, key=k.signed.author) for k in applied)]
        )
        withdrawn = self._withdrawn()
        if (members == self.peer.state.members and not withdrawn) or not members:
            return None
        return Change(
            height=self.peer.state.height + 1,
            parent=self.peer.state.tip,
            members=members,
            applied=tuple(known.signed for known in applied),
            proofs=tuple(self.book.proofs[key] for key in expelled),
            withdrawn=withdrawn or UNSET,
        )

    def _withdrawn(self) -> tuple[Withdrawal, ...]:
        """Those that no block has named yet."""
        known = {member.key for member in self.peer.state.expelled}
        return tuple(one for key, one in sorted(self.book.withdrawn.items()) if key not in known)[:MOST_PEERS]

    def _newcomers(self, stay: Mapping[str, Member], now: float) -> list[Acquaintance]:
        """The peers to let in: one per id, those heard first before the others, as many as there are places."""
        by_id: dict[str, Acquaintance] = {}
        for key, known in sorted(self.others.items(), key=lambda item: (item[1].since, item[1].beat.peer_id)):
            peer_id = known.beat.peer_id
            if peer_id not in stay and self._may_come(Member(peer_id=peer_id, key=key), known, now):
                by_id.setdefault(peer_id, known)
        sized = [(known, bounds.size_of(known.signed)) for known in by_id.values()]
        most_bytes = max([bounds.MOST_APPLIED_BYTES, *(size for _, size in sized[:1])])
        chosen = bounds.those_that_fit(sized, most_bytes, bounds.MOST_MEMBERS - len(stay))
        return sorted(chosen, key=lambda known: known.beat.peer_id)

    def _should_go(self, member: Member, now: float) -> bool:
        if member.key in self.book.proofs or member.key in self.book.withdrawn:
            return True
        if member.key == self.peer.member.key:
            return self.peer.wants == "leave"
        known = self.others.get(member.key)
        return self.is_silent(member.key, now) or (known is not None and known.beat.wants == "leave")

    def _may_come(self, newcomer: Member, known: Acquaintance, now: float) -> bool:
        if newcomer.key in self._member_keys or newcomer.key in self.book.proofs:
            return False
        is_here = now - known.heard_at <= self.rules.heartbeat_timeout_s
        return is_here and may_be_let_in(newcomer, known.beat, self.peer.state, self.book)

    def _make_round(self, now: float) -> Round | None:
        by_age = sorted(range(len(self.peer.state.versions)), key=lambda f: (self.peer.state.versions[f], f))
        for fragment in by_age:
            block = self._make_round_of(fragment, now)
            if block is not None:
                return block
        return None

    def _make_round_of(self, fragment: int, now: float) -> Round | None:
        version = self.peer.state.versions[fragment] + 1
        offers = self.offers.of_round(fragment, version, self.peer.state.members)
        usable = {k: o for k, o in offers.items() if o.condition == "good" and k not in self.book.proofs}
        base_hash = self._base_hash(fragment, version, [o.says.base_hash for o in usable.values()])
        usable = {k: o for k, o in usable.items() if o.says.base_hash == base_hash}
        if len(usable) < self._least_contributions():
            return None
        first_at = min(o.heard_at for o in offers.values())
        deadline_s = self.rules.round_deadline_s
        is_late = deadline_s is not None and now - first_at > deadline_s
        if not is_late and any(
            self._is_awaited(m, offers.keys() - usable.keys(), usable, now) for m in self.peer.state.members
        ):
            return None
        in_order = [usable[m.key].signed for m in self.peer.state.members if m.key in usable]
        return Round(
            height=self.peer.state.height + 1,
            parent=self.peer.state.tip,
            fragment=fragment,
            version=version,
            base_hash=base_hash,
            offers=tuple(in_order),
        )

    def _base_hash(self, fragment: int, version: int, offered: list[str]) -> str:
        """Of the anchor that most started from; our own breaks a tie."""
        own = self.peer.anchors.get(fragment)
        mine = own[1] if own is not None and own[0] == version - 1 else ""
        return max(sorted(set(offered)), key=lambda h: (offered.count(h), h == mine), default="")

    def _least_contributions(self) -> int:
        return max(self.rules.min_peers, len(self.peer.state.members) // 2 + 1)

    def _is_awaited(self, member: Member, unusable: set[str], usable: Mapping[str, object], now: float) -> bool:
        """Is this member's contribution worth waiting for? Not if it is silent, proven to lie, or what it offered is of
        no use or cannot be got hold of."""
        if member.key in usable or member.key in self.book.proofs or self.is_silent(member.key, now):
            return False
        if member.key not in unusable:
            known = self.others.get(member.key)
            return known is None or known.beat.wants != "leave"
        offers = [o for o in self.offers if o.signed.author == member.key and o.condition == "missing"]
        return any(now - o.tried_at <= self.rules.heartbeat_timeout_s for o in offers)

    def judge(self, block: Block) -> Verdict:
        if wrong_with_block(block, self.peer.state, self.book):
            return "bad"
        return self._judge_round(block) if isinstance(block, Round) else self._judge_change(block)

    def _judge_round(self, block: Round) -> Verdict:
        if len(block.offers) < self._least_contributions():
            return "bad"
        if any(signed.author in self.book.proofs for signed in block.offers):
            return "bad"
        own = self.peer.anchors.get(block.fragment)
        if own is not None and own[0] == block.version - 1 and own[1] != block.base_hash:
            return "bad"  # we hold another anchor; if it is we who are wrong, the others decide without us
        conditions = [self._condition_of(says) for says in offered_in(block)]
        return "bad" if "bad" in conditions else "unknown" if "missing" in conditions else "good"

    def _condition_of(self, says: Offered) -> str:
        return self.offers.condition(says.digest) if says.size_bytes == self.offers.sizes[says.fragment] else "bad"

    def has_all_of(self, block: Block) -> bool:
        return isinstance(block, Change) or all(self.offers.condition(d) == "good" for d in digests_of(block))

    def _judge_change(self, block: Change) -> Verdict:
        keys = {member.key for member in block.members}
        for signed in block.applied:
            beat = self.book.read(signed)
            if not isinstance(beat, Beat) or signed.author not in keys - self._member_keys or not self.can_call(beat):
                return "bad"
            if self.others.has_changed_its_mind(signed.author, beat):
                return "bad"
        proven = {proof.first.author for proof in block.proofs}
        if proven - (self._member_keys - keys):
            return "bad"  # a proof is against a member, which is then one no more
        named = proven | {one.key for one in chain.withdrawn_in(block)}
        leaving = [m for m in self.peer.state.members if m.key not in keys and m.key not in named]
        return "good" if all(self._may_be_let_go(m) for m in leaving) else "unknown"

    def _may_be_let_go(self, member: Member) -> bool:
        """A little sooner than we would have said so ourselves: clocks and links differ."""
        if member.key == self.peer.member.key:
            return self.peer.wants == "leave"
        if member.key in self.book.proofs:
            return True
        known = self.others.get(member.key)
        wants = known.beat.wants if known is not None else "belong"
        return wants == "leave" or self.is_silent(member.key, self.now, patience=0.5)

    @property
    def _member_keys(self) -> set[str]:
        return {member.key for member in self.peer.state.members}

    def is_silent(self, key: str, now: float, patience: float = 1.0) -> bool:
        """Has nothing new been heard of it for too long?"""
        return (
            key != self.peer.member.key and self.others.silent_s(key, now) > patience * self.rules.heartbeat_timeout_s
        )

    def heard_from(self, now: float) -> list[str]:
        """The ids of the members that are not silent, itself included."""
        return [m.peer_id for m in self.peer.state.members if not self.is_silent(m.key, now)]

    def is_short_of_peers(self, now: float) -> bool:
        """Can nothing be decided, because too few are there?"""
        members = len(self.peer.state.members)
        quorum = chain.quorum_of(members, self.rules.attackers)
        return len(self.heard_from(now)) < quorum or members < self.rules.min_peers
