"""An agreement of a layer above becomes a version of its own, between two rounds, and makes nothing older."""

from __future__ import annotations

import pytest

from outerstep.coordination.server.rounds import Fragment
from outerstep.coordination.server.turns import ASK_AGAIN_SOON_S
from outerstep.errors import StaleRound, TooOld
from outerstep.types import MOST_FROM_ABOVE
from unit.coordination.builders import Desk, make_agreement


def move(desk: Desk, upper_version: int = 1, fragment: int = 0) -> None:
    desk.coordinator.move_from_above(fragment, upper_version)
    desk.carry_out()


class TestWhen:
    def test_at_once_while_the_open_round_has_accepted_nothing(self) -> None:
        desk = Desk("ab")
        move(desk)
        assert [(c.version, c.participants, c.from_above) for c in desk.closings] == [(1, (), True)]
        assert desk.version() == 1

    def test_directly_after_the_round_that_has_accepted_something(self) -> None:
        desk = Desk("ab")
        assert desk.contribute("a").version == 1
        move(desk)
        assert desk.closed == [], "a was told that it counts in version 1"
        desk.contribute("b")
        assert [(c.version, c.from_above) for c in desk.closings] == [(1, False), (2, True)]

    def test_only_the_fragment_that_it_is_about_moves(self) -> None:
        desk = Desk("a", fragments=2)
        move(desk, fragment=1)
        assert (desk.version(0), desk.version(1)) == (0, 1)

    def test_of_two_that_wait_the_newer_one_is_taken(self) -> None:
        desk = Desk("ab")
        desk.contribute("a")
        move(desk, 1)
        move(desk, 2)
        desk.contribute("b")
        assert [c.version for c in desk.closings] == [1, 2]
        assert desk.coordinator.fragments[0].upper_version == 2


class TestWhatIsUnderWay:
    def test_a_contribution_counts_in_the_round_that_is_open_then(self) -> None:
        desk = Desk("ab")
        desk.offer("a")
        move(desk)
        for part in range(2):
            desk.put("a", part)
        assert desk.commit("a").version == 2
        desk.contribute("b", base_version=1)
        assert [(c.version, c.from_above) for c in desk.closings] == [(1, True), (2, False)]
        assert [p.staleness for p in desk.closings[-1].participants] == [0, 0]

    def test_those_who_were_expected_still_are(self) -> None:
        desk = Desk("ab")
        move(desk)
        desk.contribute("a")
        assert desk.closed == [(1, "")]
        assert desk.expected() == {"a", "b"}

    def test_a_round_of_ours_still_makes_it_late(self) -> None:
        desk = Desk("ab", round_deadline_s=5.0)
        move(desk)
        desk.contribute("a")
        desk.later(5.0, alive="ab")
        move(desk, 2)
        with pytest.raises(StaleRound):
            desk.offer("b", base_version=1)

    def test_ages_are_counted_in_rounds(self) -> None:
        desk = Desk("ab", quorum=1, max_staleness=1)
        for number in range(1, 4):
            move(desk, number)
        desk.contribute("a", base_version=3)
        move(desk, 4)
        assert desk.contribute("b", base_version=0).version == 6, "one round has closed since version 0"
        assert desk.closings[-1].participants[0].staleness == 1
        with pytest.raises(TooOld, match="taken on version 0, 2 before the newest"):
            desk.offer("a", 2, base_version=0)


class TestWhoIsTold:
    def test_an_agreement_names_the_versions_that_no_round_made(self) -> None:
        desk = Desk("a")
        move(desk)
        desk.contribute("a", base_version=1)
        move(desk, 2)
        agreement = desk.poll("a", after=0).agreement
        assert agreement is not None
        assert (agreement.version, agreement.above) == (3, (1, 3))

    def test_a_run_without_layers_says_nothing_of_them(self) -> None:
        desk = Desk("a")
        desk.contribute("a")
        agreement = desk.poll("a").agreement
        assert agreement == make_agreement(1, participants=desk.closings[0].participants)
        assert "above" not in desk.coordinator.remember().facts

    def test_it_survives_a_restart(self) -> None:
        desk = Desk("a")
        desk.contribute("a")
        move(desk, 7)
        remembered, after = desk.coordinator.remember(), Desk()
        after.coordinator.resume(remembered.ledger, remembered.totals, remembered.facts, after.now)
        fragment = after.coordinator.fragments[0]
        assert (fragment.above, fragment.upper_version) == ([2], 7)


def test_what_is_known_of_them_is_bounded() -> None:
    fragment = Fragment.at(make_agreement(0), 1)
    for upper_version in range(1, 3 * MOST_FROM_ABOVE):
        fragment.moves_next = upper_version
        fragment.move(max_staleness=1)
    assert len(fragment.above) == MOST_FROM_ABOVE
    assert fragment.staleness(0) == 2 * MOST_FROM_ABOVE - 1, "older ones count as rounds"


class TestHoldingBack:
    """While a version from above is about to follow, nobody takes its next steps from the one before it."""

    @staticmethod
    def held_back() -> Desk:
        desk = Desk("a")
        for version in range(2):
            desk.contribute("a", version + 1, base_version=version)
        desk.coordinator.withheld_until = desk.now + 5.0
        return desk

    def test_who_holds_the_version_before_the_newest_waits_and_asks_again_soon(self) -> None:
        answer = self.held_back().poll("a", after=1)
        assert (answer.agreement, answer.last_sequence, answer.waiting_for) == (None, 2, "the layer above")
        assert answer.retry_after_s == ASK_AGAIN_SOON_S

    @pytest.mark.parametrize("after", [-1, 0])
    def test_who_is_further_behind_is_told(self, after: int) -> None:
        assert self.held_back().poll("a", after=after).agreement is not None

    def test_who_holds_the_newest_waits_for_the_round_as_ever(self) -> None:
        answer = self.held_back().poll("a", after=2)
        assert answer.agreement is None
        assert answer.waiting_for == "contributions of a"

    def test_nobody_is_held_back_from_a_round_that_has_accepted_something(self) -> None:
        """A newcomer is not held back and may contribute. The version from above can enter only after that round, which
        waits for those who were held back: each would wait for the other until the time is over."""
        desk = self.held_back()
        desk.join("b")
        desk.contribute("b", base_version=2)
        move(desk, 7)
        assert not [made for made in desk.closings if made.from_above], "it waits for the open round to close"
        assert desk.poll("a", after=1).agreement is not None
        desk.contribute("a", 3, base_version=2)
        assert [(made.version, made.from_above) for made in desk.closings[-2:]] == [(3, False), (4, True)]

    def test_when_the_time_is_over_it_is_told(self) -> None:
        desk = self.held_back()
        desk.now = desk.coordinator.withheld_until
        assert desk.poll("a", after=1).agreement is not None


@pytest.mark.parametrize("remembers", [False, True])
def test_what_is_to_survive_is_written_with_it_if_anything_is(remembers: bool) -> None:
    desk = Desk("ab")
    desk.coordinator.remembers = remembers
    move(desk)
    [made] = desk.closings
    assert (made.remembered is not None) == remembers
    if made.remembered is not None:
        assert made.remembered.versions == (1,)
