"""Which decided rounds can still be taken over."""

from __future__ import annotations

from outerstep.statements import ChainState, Change, Decision, Member, Offered, Round, Signed, body_of
from outerstep.topology.gossip.node.contributions import DecidedRounds

ANNA, BERT = Member(peer_id="anna", key="a" * 64), Member(peer_id="bert", key="b" * 64)
STATE = ChainState(height=0, tip="0" * 64, members=(ANNA,), versions=(0, 0))


def offer(member: Member, fragment: int, version: int) -> Signed:
    says = Offered(
        run_id="r",
        fragment=fragment,
        version=version,
        sequence=version,
        digest=(member.key[0] + str(fragment) + str(version)).ljust(64, "0"),
        size_bytes=8,
        base_hash="0" * 32,
        steps=1,
    )
    return Signed(author=member.key, body=body_of(says), signature=bytes(64))


def decide(block: Round | Change) -> Decision:
    return Decision(block=block, votes=(offer(ANNA, 0, 1),))


def round_of(fragment: int, version: int, *members: Member) -> Decision:
    offers = tuple(offer(member, fragment, version) for member in members)
    head = {"height": 1, "parent": "0" * 64, "base_hash": "0" * 32}
    return decide(Round(**head, fragment=fragment, version=version, offers=offers))  # type: ignore[arg-type]


def test_offers_go_by_the_names_that_their_authors_had_then() -> None:
    rounds = DecidedRounds(STATE)
    rounds.add(decide(Change(height=1, parent="0" * 64, members=(ANNA, BERT))))
    rounds.add(round_of(0, 1, ANNA, BERT))
    rounds.add(decide(Change(height=3, parent="0" * 64, members=(ANNA,))))
    taken = rounds.find(0, 1)
    assert taken is not None
    assert [(name, key) for name, key, _ in taken.offers] == [("anna", ANNA.key), ("bert", BERT.key)]


def test_the_last_two_of_each_fragment_are_kept() -> None:
    rounds = DecidedRounds(STATE)
    for version in (1, 2, 3):
        rounds.add(round_of(0, version, ANNA))
    rounds.add(round_of(1, 1, ANNA))
    assert [rounds.is_lost(0, version) for version in (1, 2, 3, 4)] == [True, False, False, False]
    assert not rounds.is_lost(1, 1)
    assert len(rounds.needed()) == 3
    assert rounds.versions == [3, 1]


def test_what_is_released_is_served_but_wanted_no_more() -> None:
    rounds = DecidedRounds(STATE)
    rounds.add(round_of(0, 1, ANNA, BERT))
    assert rounds.wanted().keys() == rounds.needed()
    taken = rounds.find(0, 1)
    assert taken is not None
    taken.is_released = True
    assert rounds.wanted() == {}
    assert len(rounds.needed()) == 2


def test_a_round_whose_bytes_nobody_has_is_lost() -> None:
    rounds = DecidedRounds(STATE)
    rounds.add(round_of(0, 1, ANNA, BERT))
    rounds.lose(next(iter(rounds.needed())))
    assert rounds.is_lost(0, 1)
    assert rounds.wanted() == {}


def test_after_a_leap_everything_before_is_lost() -> None:
    rounds = DecidedRounds(STATE)
    rounds.leap(ChainState(height=90, tip="0" * 64, members=(ANNA, BERT), versions=(40, 41)))
    assert rounds.is_lost(0, 40)
    assert rounds.is_lost(1, 41)
    assert not rounds.is_lost(0, 41)


def test_all_up_to_a_version_are_released_at_once_however_far_it_is() -> None:
    """A liar may name any version: nobody counts up to it."""
    rounds = DecidedRounds(STATE)
    for version in (1, 2):
        rounds.add(round_of(0, version, ANNA))
    rounds.add(round_of(1, 1, ANNA))
    rounds.release(0, 1)
    assert [rounds.find(0, version).is_released for version in (1, 2)] == [True, False]  # type: ignore[union-attr]
    rounds.release(0, 2**53)
    assert rounds.wanted().keys() == {says.digest for _, _, says in rounds.find(1, 1).offers}  # type: ignore[union-attr]
