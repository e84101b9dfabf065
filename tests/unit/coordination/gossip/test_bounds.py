"""What a peer can have others keep, carry and decide is bounded, by bytes and by author."""

from __future__ import annotations

import tracemalloc

import msgspec
import pytest

from outerstep.coordination.gossip import GossipPeer, GossipRules, Keepsake, bounds, chain, heard
from outerstep.coordination.gossip.bounds import Shares, in_turn, those_that_fit
from outerstep.simulate.gossip import Registry
from outerstep.statements import (
    AnyStatement,
    Beat,
    ChainState,
    Change,
    Converse,
    Member,
    Offered,
    Proof,
    Proposed,
    Round,
    Signed,
    Voted,
    body_of,
)
from outerstep.wire.messages import MAX_JOIN_BYTES, decode_json, encode_json

RUN, SIZE, BASE = "a-run", 100, "0" * 32
MIB = 1 << 20


class World:
    """Peers that talk by hand, and whoever else has a key."""

    def __init__(self, count: int, rules: GossipRules) -> None:
        self.registry, self.now, self.rules = Registry(), 0.0, rules
        pairs = [self.registry.enter(f"p{i}") for i in range(count)]
        members = tuple(Member(peer_id=f"p{i}", key=key) for i, (key, _) in enumerate(pairs))
        state = chain.found(members[0], 1)
        state = chain.after(Change(height=1, parent=state.tip, members=chain.in_order(members)), state)
        self.peers = [self.start(f"p{i}", state) for i in range(count)]

    def start(self, name: str, state: ChainState) -> GossipPeer:
        key, sign = self.registry.enter(name)
        member, kept = Member(peer_id=name, key=key), Keepsake(run_id=RUN, state=state)
        peer = GossipPeer(RUN, member, sign, self.registry.verify, self.rules, kept, [SIZE], self.now)
        peer.belong(self.now)
        peer.hold_anchor(0, 0, BASE)
        return peer

    def say(self, name: str, statement: AnyStatement) -> Signed:
        key, sign = self.registry.enter(name)
        body = body_of(statement)
        return Signed(author=key, body=body, signature=sign(body))

    def talk(self, *peers: GossipPeer, times: int = 4) -> None:
        """Everything they say travels as JSON within the limits of the wire."""
        talking = list(peers) or self.peers
        for _ in range(times):
            self.now += 0.5
            for one in talking:
                one.tick(self.now)
                for other in talking:
                    if other is not one:
                        said = one.say_to(other.state.height)
                        is_sampled = len(talking) <= 10 or other is talking[0]
                        other.hear(through_the_wire(said) if is_sampled else said, self.now)

    def round(self, *peers: GossipPeer) -> None:
        """One that all of them contribute to."""
        talking = list(peers) or self.peers
        version = talking[0].state.versions[0]
        for i, peer in enumerate(talking):
            digest = f"{version:032x}{i:032x}"
            peer.hold_anchor(0, version, BASE)
            peer.offer(0, digest, BASE, self.now, steps=1)
        for _ in range(40):
            self.talk(*talking, times=1)
            for peer in talking:
                for digest in peer.wanted():
                    peer.hold(digest, self.now, good=True)
            if all(peer.state.versions[0] == version + 1 for peer in talking):
                return
        pytest.fail("the round was not decided: " + talking[0].waiting_for(0, self.now))

    def members(self, peer: GossipPeer) -> list[str]:
        return [member.peer_id for member in peer.state.members]


def through_the_wire(said: Converse) -> Converse:
    data = encode_json(said)
    assert len(data) <= MAX_JOIN_BYTES
    return decode_json(data, Converse)


def told(*statements: Signed, proofs: tuple[Proof, ...] = ()) -> Converse:
    return Converse(run_id=RUN, sender="x", height=0, statements=statements, proofs=proofs)


def offered(digest: str = "a" * 64, sequence: int = 1) -> Offered:
    return Offered(
        run_id=RUN, fragment=0, version=1, sequence=sequence, digest=digest, size_bytes=SIZE, base_hash=BASE, steps=1
    )


def beat(name: str, number: int = 1, **facts: object) -> Beat:
    facts = {"address": f"{name}:1", **facts}
    return Beat(run_id=RUN, peer_id=name, incarnation=1, number=number, **facts)  # type: ignore[arg-type]


def change(
    state: ChainState,
    members: tuple[Member, ...],
    applied: tuple[Signed, ...] = (),
    proofs: tuple[Proof, ...] = (),
) -> Change:
    return Change(height=state.height + 1, parent=state.tip, members=members, applied=applied, proofs=proofs)


def proposed(block: Change, turn: int) -> Proposed:
    return Proposed(run_id=RUN, height=block.height, turn=turn, block=block)


def contradiction(world: World, name: str) -> Proof:
    return Proof(first=world.say(name, offered("a" * 64)), second=world.say(name, offered("b" * 64)))


@pytest.fixture
def world() -> World:
    return World(4, GossipRules(heartbeat_timeout_s=10.0))


class TestProofs:
    def test_proofs_against_strangers_are_not_kept_and_silence_nobody(self, world: World) -> None:
        """A key is free: two statements that contradict each other can be had by the thousand."""
        for i in range(200):
            proofs = tuple(contradiction(world, f"nobody {64 * i + j}") for j in range(2))
            for peer in world.peers:
                peer.hear(told(proofs=proofs), world.now)
        assert not any(peer.book.proofs for peer in world.peers)
        world.round()

    def test_statements_too_long_for_a_proof_expel_nobody_and_stop_nobody(self, world: World) -> None:
        """A proof of two proposals of a mebibyte would make a block that nobody can read."""
        liar, state = world.peers[3], world.peers[0].state
        turn = next(t for t in range(4) if world.peers[0]._ballot.proposer(t) == liar.member.key)
        for junk in ("1", "2"):
            applied = (world.say("x", beat("x", held=((0, junk * 32),) * 25_000)),)
            said = world.say("p3", proposed(change(state, state.members, applied), turn))
            assert 900_000 < len(said.body) < MIB
            for peer in world.peers[:3]:
                peer.hear(told(said), world.now)
        assert not any(peer.book.proofs for peer in world.peers)
        world.round()

    def test_as_many_liars_are_expelled_at_a_time_as_fit_into_a_block(self) -> None:
        world = World(10, GossipRules(heartbeat_timeout_s=1000.0, attackers=3))
        honest, liars = world.peers[:7], ("p7", "p8", "p9")
        state = honest[0].state
        for name in liars:
            long = [change(state, state.members[:9], padding(world, junk)) for junk in "12"]
            key = world.registry.enter(name)[0]
            turn = next(t for t in range(10) if honest[0]._ballot.proposer(t) == key)
            said = [world.say(name, proposed(block, turn)) for block in long]
            assert all(100_000 < len(one.body) < bounds.MOST_PROVEN_BYTES for one in said)
            assert honest[0].book.convict(Proof(first=said[0], second=said[1]))
            honest[0]._convicted_at[key] = state.height
        made = honest[0]._blocks.make(world.now)
        assert isinstance(made, Change)
        assert 1 <= len(made.proofs) < 3  # the others wait for the next
        for _ in range(20):
            world.talk(*honest, times=1)
            if all(len(peer.state.members) == 7 for peer in honest):
                break
        for peer in honest:
            assert world.members(peer) == [f"p{i}" for i in range(7)]
            assert [member.peer_id for member in peer.state.expelled] == list(liars)
        world.round(*honest)


def padding(world: World, junk: str) -> tuple[Signed, ...]:
    """Something to make a block long."""
    facts = {"loss": float(junk), "address": "𝄞" * 256, "fingerprint": "𝄞" * 180}
    return tuple(world.say(f"pad {i}", beat(f"x{i}", **facts)) for i in range(64))


class TestMemory:
    def test_garbage_is_not_kept(self, world: World) -> None:
        peer = world.peers[0]
        with Growth() as grown:
            for i in range(600):
                body = i.to_bytes(4, "big") + bytes(200_000)
                peer.hear(told(Signed(author=f"{i:064x}", body=body, signature=bytes(64))), world.now)
            assert grown() < MIB
        assert peer.book.size_bytes < MIB

    @pytest.mark.parametrize("name", ["p3", "somebody"], ids=["a member's", "a stranger's"])
    def test_large_statements_are_not_kept_though_they_are_signed(self, world: World, name: str) -> None:
        peer = world.peers[0]
        with Growth() as grown:
            for i in range(3):
                peer.hear(told(world.say(name, beat("x", number=i + 1, held=((i, BASE),) * 20_000))), world.now)
            assert grown() < MIB
        world.round()

    def test_of_many_small_ones_the_newest_of_each_author_are_kept(self, world: World) -> None:
        peer = world.peers[0]
        with Growth() as grown:
            for i in range(1, 3_000):
                peer.hear(told(world.say("p3", offered(f"{i:064x}", sequence=i))), world.now)
                peer.hear(told(world.say(f"stranger {i % 100}", beat("s", number=i))), world.now)
            assert grown() < 4 * MIB
        assert peer.book.size_bytes <= 2 * 2 * (bounds.KEPT_BYTES + bounds.KEPT_BYTES_PER_FRAGMENT)
        first = world.say("p2", offered("c" * 64))
        peer.hear(told(first), world.now)
        assert peer.book.is_settled(first, peer.state.height)  # what others say is kept none the less

    def test_proposals_and_votes_of_turns_far_ahead_are_bounded(self, world: World) -> None:
        peer, state = world.peers[0], world.peers[0].state
        with Growth() as grown:
            block = change(state, state.members[:3], padding(world, "1"))
            for turn in range(300):
                for kind in ("prevote", "precommit"):
                    vote = Voted(run_id=RUN, height=block.height, turn=turn, kind=kind, block="")  # type: ignore[arg-type]
                    peer.hear(told(world.say("p3", vote)), world.now)
                if peer._ballot.proposer(turn) == world.peers[3].member.key:
                    peer.hear(told(world.say("p3", proposed(block, turn))), world.now)
            assert grown() < 4 * MIB
        through_the_wire(peer.say_to(peer.state.height))
        world.round()

    def test_decisions_are_remembered_by_bytes(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bounds, "MOST_DECISION_BYTES", 20_000)
        for _ in range(20):
            world.round()
        peer = world.peers[0]
        assert sum(size for _, size in peer._decisions) <= 20_000
        heights = [d.block.height for d in peer.say_to(peer.state.height - 3).decisions]
        assert heights == [peer.state.height - 2, peer.state.height - 1, peer.state.height]
        assert peer.say_to(0).decisions == ()


class Growth:
    """How many bytes more there are than in the beginning."""

    def __enter__(self) -> Growth:
        tracemalloc.start()
        self._began = tracemalloc.get_traced_memory()[0]
        return self

    def __call__(self) -> int:
        return tracemalloc.get_traced_memory()[0] - self._began

    def __exit__(self, *error: object) -> None:
        tracemalloc.stop()


class TestWhatIsTold:
    def test_who_says_much_keeps_nobody_elses_from_being_told(self) -> None:
        def said(author: str, count: int) -> list[Signed]:
            return [Signed(author=author, body=b"%d" % i, signature=bytes(64)) for i in range(count)]

        statements = [*said("liar", 5000), *said("one", 3), *said("own", 2), *said("two", 1)]
        chosen = those_that_fit([(one, 100) for one in in_turn(statements, "own")], 2000, 4096)
        assert len(chosen) == 20
        assert [one.author for one in chosen[:5]] == ["own", "own", "liar", "one", "two"]
        assert sum(one.author == "one" for one in chosen) == 3

    def test_what_does_not_fit_is_passed_over(self) -> None:
        assert those_that_fit([("a", 5), ("b", 50), ("c", 5)], 10, 10) == ["a", "c"]
        assert those_that_fit([("a", 1), ("b", 1), ("c", 1)], 10, 2) == ["a", "b"]
        assert those_that_fit([("a", 4), ("b", 7), ("c", 6), ("d", 1)], 10, 10) == ["a", "c"]
        assert in_turn([], "own") == []


class TestShares:
    def test_who_takes_more_loses_its_own(self) -> None:
        shares: Shares[int, str] = Shares(10 * (bounds.ENTRY_BYTES + 100))
        shares.put("b", 0, "b's", 100)
        for i in range(100):
            shares.put("a", i, "a's", 100)
        assert shares.get("b", 0) == "b's"
        assert [i for i in range(100) if shares.get("a", i)] == list(range(90, 100))
        assert shares.size_bytes == 11 * (bounds.ENTRY_BYTES + 100)

    def test_the_same_again_takes_its_place_and_what_is_larger_than_a_share_is_not_kept(self) -> None:
        shares: Shares[int, str] = Shares(10 * (bounds.ENTRY_BYTES + 100))
        for value in ("old", "new"):
            shares.put("a", 1, value, 100)
        shares.put("a", 2, "huge", 20 * bounds.ENTRY_BYTES)
        assert (shares.get("a", 1), shares.get("a", 2)) == ("new", None)
        assert shares.size_bytes == bounds.ENTRY_BYTES + 100
        shares.put("b", 1, "b's", 100)
        shares.keep_only({"b"})
        assert (shares.get("a", 1), shares.get("b", 1)) == (None, "b's")
        assert shares.size_bytes == bounds.ENTRY_BYTES + 100

    def test_one_as_large_as_a_share_is_kept(self) -> None:
        shares: Shares[int, str] = Shares(bounds.ENTRY_BYTES + 100)
        shares.put("a", 1, "fits", 100)
        assert (shares.get("a", 1), shares.get("a", 2), shares.get("b", 1)) == ("fits", None, None)
        shares.put("a", 2, "does not", 101)
        assert (shares.get("a", 1), shares.get("a", 2)) == ("fits", None)


class TestHowLongAStatementMayBe:
    def test_a_beat_by_the_number_of_fragments(self) -> None:
        most = bounds.MOST_BEAT_BYTES + 3 * bounds.BEAT_BYTES_PER_FRAGMENT
        assert bounds.is_within_bounds(beat("x"), most, 3)
        assert not bounds.is_within_bounds(beat("x"), most + 1, 3)

    def test_an_offer_by_what_it_says_of_leased_data(self) -> None:
        assert bounds.is_within_bounds(offered(), bounds.MOST_OFFER_BYTES, 1)
        assert not bounds.is_within_bounds(offered(), bounds.MOST_OFFER_BYTES + 1, 1)

    def test_a_round(self, world: World) -> None:
        signed = world.say("p0", offered())
        block = Round(height=1, parent="0" * 64, fragment=0, version=1, base_hash=BASE, offers=(signed,))
        said = Proposed(run_id=RUN, height=1, turn=0, block=block)
        assert bounds.is_within_bounds(said, bounds.MOST_ROUND_BYTES, 1)
        assert not bounds.is_within_bounds(said, bounds.MOST_ROUND_BYTES + 1, 1)

    def test_a_change_as_a_whole_and_by_its_beats_and_proofs(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        applied = (world.say("x", beat("x")), world.say("y", beat("y")))
        proofs = (contradiction(world, "p2"), contradiction(world, "p3"))
        state = world.peers[0].state
        said = proposed(change(state, state.members[:2], applied, proofs), 0)
        spare = 2 * bounds.BEAT_BYTES_PER_FRAGMENT
        assert bounds.is_within_bounds(said, bounds.MOST_CHANGE_BYTES + spare, 2)
        assert not bounds.is_within_bounds(said, bounds.MOST_CHANGE_BYTES + spare + 1, 2)
        beats, proven = sum(map(bounds.size_of, applied)), sum(map(bounds.proof_bytes, proofs))
        monkeypatch.setattr(bounds, "MOST_APPLIED_BYTES", beats - spare)
        monkeypatch.setattr(bounds, "MOST_PROOF_BYTES", proven)
        assert bounds.is_within_bounds(said, 1, 2)
        monkeypatch.setattr(bounds, "MOST_PROOF_BYTES", proven - 1)
        assert not bounds.is_within_bounds(said, 1, 2)
        monkeypatch.setattr(bounds, "MOST_PROOF_BYTES", proven)
        monkeypatch.setattr(bounds, "MOST_APPLIED_BYTES", beats - spare - 1)
        assert not bounds.is_within_bounds(said, 1, 2)

    @pytest.mark.parametrize("longer", [0, 1])
    def test_a_proof_by_the_longer_of_its_two(self, world: World, monkeypatch: pytest.MonkeyPatch, longer: int) -> None:
        short, long = world.say("x", beat("x")), world.say("x", beat("x", address="h" * 50))
        proof = Proof(first=(short, long)[longer], second=(long, short)[longer])
        assert bounds.proof_bytes(proof) == len(short.body) + len(long.body)
        monkeypatch.setattr(bounds, "MOST_PROVEN_BYTES", len(long.body))
        assert bounds.is_short(proof)
        monkeypatch.setattr(bounds, "MOST_PROVEN_BYTES", len(long.body) - 1)
        assert not bounds.is_short(proof)


class TestPlaces:
    def test_no_more_members_than_a_block_can_hold_and_the_next_waits_for_a_place(self) -> None:
        world = World(62, GossipRules(heartbeat_timeout_s=1000.0))
        state, now = world.peers[0].state, world.now
        would_be = [world.start(f"q{i}", state) for i in range(4)]
        for newcomer in would_be:
            through_the_wire(newcomer.say_to(state.height))
            for peer in world.peers:
                peer.hear(newcomer.say_to(state.height), now)
        made = world.peers[0]._blocks.make(now)
        assert isinstance(made, Change)
        assert [m.peer_id for m in made.members if m.peer_id.startswith("q")] == ["q0", "q1"]
        decode_json(encode_json(made), Change)
        assert all(peer._blocks.judge(made) == "good" for peer in world.peers)
        full = chain.after(made, state)
        waits = world.start("q2", full)
        assert waits.is_full
        assert "a place: the run has 64 members, the most there can be" in waits.waiting_for(0, now)

    @pytest.mark.slow
    def test_sixty_four_decide_and_the_sixty_fifth_waits(self) -> None:
        world = World(63, GossipRules(heartbeat_timeout_s=1000.0))
        state = world.peers[0].state
        would_be = [world.start(f"q{i}", state) for i in range(2)]
        for _ in range(6):
            world.talk(*world.peers, *would_be, times=1)
            if all(peer.is_full for peer in world.peers):
                break
        comes, waits = sorted(would_be, key=lambda peer: not peer.is_member)
        assert comes.is_member
        assert not waits.is_member
        assert all(len(peer.state.members) == 64 for peer in world.peers)
        world.round(*world.peers, comes)
        assert "a place" in waits.waiting_for(0, world.now)

    def test_who_was_heard_first_comes_first_and_one_of_each_id(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(bounds, "MOST_MEMBERS", 6)
        peer = world.peers[0]
        for at, (who, name) in enumerate([("k1", "z"), ("k2", "z"), ("k3", "y"), ("k4", "a")]):
            peer.hear(told(world.say(who, beat(name))), world.now + at)
        made = peer._blocks.make(world.now + 4)
        assert isinstance(made, Change)
        assert [m.peer_id for m in made.members] == ["p0", "p1", "p2", "p3", "y", "z"]
        assert [signed.author for signed in made.applied] == [world.registry.enter(k)[0] for k in ("k3", "k1")]

    def test_beats_of_newcomers_fill_a_block_by_bytes(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bounds, "MOST_APPLIED_BYTES", 600)
        peer = world.peers[0]
        for i in range(5):
            peer.hear(told(world.say(f"k{i}", beat(f"q{i}"))), world.now)
        made = peer._blocks.make(world.now)
        assert isinstance(made, Change)
        assert 0 < sum(len(signed.body) for signed in made.applied) <= 600
        assert len(made.members) == 4 + len(made.applied) < 9

    def test_a_block_with_proofs_or_applications_that_change_nothing_is_not_voted_for(self, world: World) -> None:
        peer, state = world.peers[0], world.peers[0].state
        stranger = Member(peer_id="q", key=world.registry.enter("q")[0])
        applied = world.say("q", beat("q"))
        members = chain.in_order([*state.members, stranger])
        block = change(state, members, (applied,))
        assert peer._blocks.judge(block) == "good"
        more = msgspec.structs.replace
        assert peer._blocks.judge(more(block, applied=(applied, world.say("r", beat("r"))))) == "bad"
        assert peer._blocks.judge(more(block, proofs=(contradiction(world, "nobody"),))) == "bad"
        assert peer._blocks.judge(more(block, proofs=(contradiction(world, "p3"),))) == "bad"
        rest = tuple(m for m in state.members if m.peer_id != "p3")
        assert peer._blocks.judge(change(state, rest, proofs=(contradiction(world, "p3"),))) == "good"


class TestForgetting:
    def test_two_hundred_come_and_go_and_a_newcomer_is_admitted(self, world: World) -> None:
        for i in range(200):
            guest = world.start(f"guest{i}", world.peers[0].state)
            everybody = [*world.peers, guest]
            self._until(world, everybody, lambda: guest.is_member)  # noqa: B023
            guest.leave(world.now)
            self._until(world, everybody, lambda: not guest.is_member)  # noqa: B023
            for peer in world.peers:
                while peer.take() is not None:
                    pass
        newcomer = world.start("newcomer", world.peers[0].state)
        self._until(world, [*world.peers, newcomer], lambda: newcomer.is_member)
        assert all("newcomer" in world.members(peer) for peer in world.peers)
        assert all(len(peer.contacts) <= 4 + heard.STRANGERS for peer in world.peers)

    @staticmethod
    def _until(world: World, peers: list[GossipPeer], is_so: object) -> None:
        for _ in range(20):
            world.talk(*peers, times=1)
            if is_so() and len({peer.state.height for peer in peers}) == 1:  # type: ignore[operator]
                return
        pytest.fail("it never happened")

    def test_silent_strangers_are_forgotten_and_nobody_reminds_the_others(self, world: World) -> None:
        world.rules = GossipRules(min_peers=9)
        for i in range(100):
            for peer in world.peers:
                peer._others.greet(world.say(f"k{i}", beat(f"q{i}")), beat(f"q{i}"), world.now)
        assert all(len(peer.contacts) == heard.STRANGERS for peer in world.peers)
        late = beat("late", number=1)
        world.peers[0]._others.greet(world.say("late", late), late, world.now + 1)
        assert world.registry.enter("late")[0] not in world.peers[0].contacts  # they are all there still
        late = beat("late", number=2)
        world.peers[0]._others.greet(world.say("late", late), late, world.now + 11)
        assert world.registry.enter("late")[0] in world.peers[0].contacts
        for peer in world.peers:
            peer._others.forget(world.now + 60)
            assert not peer.contacts

    def test_a_stranger_that_only_watches_takes_no_place(self, world: World) -> None:
        peer = world.peers[0]
        peer.hear(told(world.say("w", beat("w", wants="watch"))), world.now)
        assert not peer.contacts
        world.talk()
        assert len(peer.contacts) == 3

    def test_who_has_left_cannot_be_brought_back_by_what_it_said_before(self, world: World) -> None:
        guest = world.start("guest", world.peers[0].state)
        everybody, old = [*world.peers, guest], guest._own_beat
        self._until(world, everybody, lambda: guest.is_member)
        guest.leave(world.now)
        self._until(world, everybody, lambda: not guest.is_member)
        for wait_s in (0.0, 100.0):
            world.now += wait_s
            world.talk()
            peer = world.peers[0]
            for one in world.peers:
                one.hear(told(old), world.now)
            state = peer.state
            members = chain.in_order([*state.members, guest.member])
            ghost = change(state, members, (old,))
            assert all(one._blocks.judge(ghost) == "bad" for one in world.peers)
            assert peer._blocks.make(world.now) is None
        assert not any(guest.member.key in one.contacts for one in world.peers)
        guest.belong(world.now)  # but it may come again
        self._until(world, everybody, lambda: guest.is_member)

    def test_of_the_expelled_so_many_are_remembered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(chain, "MOST_EXPELLED", 3)
        world = World(8, GossipRules())
        state = world.peers[0].state
        for i in (7, 6, 5, 4, 3):
            rest = tuple(m for m in state.members if m.peer_id != f"p{i}")
            state = chain.after(change(state, rest, proofs=(contradiction(world, f"p{i}"),)), state)
            assert f"p{i}" in [m.peer_id for m in state.expelled]
        assert len(state.expelled) == 3

    def test_proofs_are_forgotten_when_they_have_been_passed_on(self, world: World) -> None:
        honest = world.peers[:3]
        honest[0].hear(told(proofs=(contradiction(world, "p3"),)), world.now)
        self._until(world, honest, lambda: len(honest[0].state.members) == 3)
        assert honest[0].book.proofs
        for _ in range(6):
            world.round(*honest)
        assert not honest[0].book.proofs
        assert honest[0].say_to(0).proofs == ()
