"""What a peer says it waits for."""

from __future__ import annotations

from outerstep.coordination.gossip import GossipPeer, GossipRules, Keepsake, chain
from outerstep.simulate.gossip import Registry
from outerstep.statements import ChainState, Change, Member

RUN, SIZE = "a-run", 100


def make_peers(count: int, rules: GossipRules) -> list[GossipPeer]:
    registry = Registry()
    pairs = [registry.enter(f"p{i}") for i in range(count)]
    members = tuple(Member(peer_id=f"p{i}", key=key) for i, (key, _) in enumerate(pairs))
    state: ChainState = chain.found(members[0], 1)
    state = chain.after(Change(height=1, parent=state.tip, members=members), state)
    return [
        GossipPeer(RUN, member, sign, registry.verify, rules, Keepsake(run_id=RUN, state=state), [SIZE], 0.0)
        for member, (_, sign) in zip(members, pairs, strict=True)
    ]


def talk(peers: list[GossipPeer], now: float) -> None:
    for _ in range(6):
        for one in peers:
            one.tick(now)
            for other in peers:
                if other is not one:
                    other.hear(one.say_to(other.state.height), now)
                    for digest in other.wanted():
                        other.hold(digest, now, good=True)


def test_two_peers_with_the_same_anchor_agree() -> None:
    peers = make_peers(2, GossipRules())
    for i, peer in enumerate(peers):
        peer.belong(0.0)
        peer.hold_anchor(0, 0, "0" * 32)
        peer.offer(0, str(i) * 64, "0" * 32, 0.0, steps=1)
    talk(peers, 1.0)
    assert [peer.state.versions for peer in peers] == [(1,), (1,)]


def test_two_peers_with_different_anchors_agree_on_nothing_and_say_why() -> None:
    peers = make_peers(2, GossipRules())
    for i, peer in enumerate(peers):
        peer.belong(0.0)
        peer.hold_anchor(0, 0, str(i) * 32)
        peer.offer(0, str(i) * 64, str(i) * 32, 0.0, steps=1)
    talk(peers, 1.0)
    assert [peer.state.versions for peer in peers] == [(0,), (0,)]
    assert "p1 started from another one than this peer" in peers[0].waiting_for(0, 1.0)


def test_of_three_the_one_with_another_anchor_is_left_out_and_the_others_go_on() -> None:
    peers = make_peers(3, GossipRules(round_deadline_s=10.0))
    for i, peer in enumerate(peers):
        base = "f" * 32 if i == 2 else "0" * 32
        peer.belong(0.0)
        peer.hold_anchor(0, 0, base)
        peer.offer(0, str(i) * 64, base, 0.0, steps=1)
    talk(peers, 1.0)
    assert [peer.state.versions for peer in peers] == [(1,)] * 3
    decided = peers[2].recent_rounds()[0]
    assert decided.base_hash == "0" * 32
    assert len(decided.offers) == 2


def test_too_few_are_heard_of() -> None:
    peers = make_peers(4, GossipRules(heartbeat_timeout_s=10.0))
    talk(peers[:2], 100.0)
    assert "2 of 4 peers are heard of, 3 must agree" in peers[0].waiting_for(0, 100.0)


def two_that_belong() -> list[GossipPeer]:
    peers = make_peers(2, GossipRules())
    for peer in peers:
        peer.belong(0.0)
        peer.hold_anchor(0, 0, "0" * 32)
    return peers


def test_a_round_waits_for_whoever_has_not_contributed_to_it() -> None:
    one, other = two_that_belong()
    one.offer(0, "1" * 64, "0" * 32, 0.0, steps=1)
    assert (one.rounds_offered(), one.rounds_waiting()) == (frozenset({0}), frozenset())
    assert (other.rounds_offered(), other.rounds_waiting()) == (frozenset(), frozenset())
    other.hear(one.say_to(other.state.height), 1.0)
    assert (other.rounds_offered(), other.rounds_waiting()) == (frozenset(), frozenset({(0, 1)}))
    other.offer(0, "2" * 64, "0" * 32, 1.0, steps=1)
    assert (other.rounds_offered(), other.rounds_waiting()) == (frozenset({0}), frozenset())


def test_a_decided_round_is_taken_once_and_its_bytes_are_kept_for_others() -> None:
    peers = two_that_belong()
    for i, peer in enumerate(peers):
        peer.offer(0, str(i) * 64, "0" * 32, 0.0, steps=1)
        assert str(i) * 64 in peer.needed()
    talk(peers, 1.0)
    for peer in peers:
        taken = []
        while (decision := peer.take()) is not None:
            taken.append(decision)
        assert len(taken) == 1
        assert peer.take() is None
        assert peer.needed() == {"0" * 64, "1" * 64}
        assert peer.rounds_offered() == frozenset()


def test_a_member_is_silent_after_the_timeout_and_the_others_are_too_few_alone() -> None:
    peers = make_peers(2, GossipRules(heartbeat_timeout_s=10.0))
    talk(peers, 1.0)
    one, other = peers
    assert not one.is_silent(other.member.key, 11.0)
    assert not one.is_short_of_peers(11.0)
    assert one.is_silent(other.member.key, 11.1)
    assert one.is_short_of_peers(11.1)


def test_a_peer_that_leaves_is_let_go_and_those_that_stay_decide_alone() -> None:
    peers = make_peers(3, GossipRules())
    for peer in peers:
        peer.belong(0.0)
        peer.hold_anchor(0, 0, "0" * 32)
    talk(peers, 1.0)
    peers[2].leave(2.0)
    talk(peers, 3.0)
    assert [[m.peer_id for m in peer.state.members] for peer in peers] == [["p0", "p1"]] * 3
    assert [peer.is_member for peer in peers] == [True, True, False]


def test_a_peer_that_was_away_for_long_resumes_from_what_the_others_say() -> None:
    peers = make_peers(2, GossipRules())
    ahead = peers[0].state
    for height in (2, 3):
        ahead = chain.after(Change(height=height, parent=ahead.tip, members=ahead.members), ahead)
    peers[0].leap(ahead, 5.0)
    assert (peers[0].state, peers[0].take(), peers[0].recent_rounds()) == (ahead, None, [])
    before = peers[1].state
    peers[0].leap(before, 6.0)
    assert peers[0].state == ahead, "never back"
