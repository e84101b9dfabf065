"""What becomes of a contribution that is taken: what is counted, kept and told of it."""

from __future__ import annotations

import pytest
from msgspec import UNSET

from outerstep.coordination.server.claims import Claimant
from outerstep.coordination.server.rounds import MOST_REFUSALS
from outerstep.errors import Absurd, TooLarge
from outerstep.types import MemberFacts
from unit.coordination.builders import SIZE_BYTES, Desk, make_heartbeat, make_join
from unit.coordination.speaking import accumulated


class TestWhatIsNoted:
    def test_the_norm_and_the_age_are_told_of_it_and_of_its_worker(self) -> None:
        desk = Desk("ab", quorum=1)
        desk.contribute("a", norm=2.0)
        desk.contribute("b", norm=3.0)
        assert [(p.norm, p.staleness) for made in desk.closings for p in made.participants] == [(2.0, 0), (3.0, 1)]
        assert {one.worker_id: (one.delta_norm, one.staleness) for one in desk.coordinator.members} == {
            "a": (2.0, 0),
            "b": (3.0, 1),
        }

    def test_what_was_done_for_a_fragment_adds_up_over_its_contributions(self) -> None:
        desk = Desk("ab", fragments=2)
        desk.contribute("a", steps=3, samples=5, tokens=7)
        desk.contribute("b", steps=10, samples=20, tokens=30)
        assert desk.coordinator.fragments[0].done[:3] == (13, 25, 37)
        assert desk.coordinator.fragments[1].done[:3] == (0, 0, 0)


class TestWhatIsClaimed:
    def test_a_worker_is_measured_by_the_others_and_not_by_itself(self) -> None:
        desk = Desk("abcz", heartbeat_timeout_s=0.0, weight_by="tokens", max_weight_ratio=1000.0)
        claims = {"a": 100, "b": 200, "c": 300, "z": 100_000}
        for version in range(3):
            desk.later(10.0)
            for worker, tokens in claims.items():
                desk.contribute(worker, version + 1, base_version=version, tokens=tokens)
        weights = [participant.weight for participant in desk.closings[-1].participants]
        assert weights == [100.0, 200.0, 300.0, 4 * 200.0], "the median of a, b and c, four times"

    def test_no_more_weighs_than_the_operator_believes_possible(self) -> None:
        desk = Desk("a", weight_by="tokens", max_tokens_per_s=5.0, max_weight_ratio=1000.0)
        for version in range(2):
            desk.later(10.0, alive="a")
            desk.contribute("a", version + 1, base_version=version, tokens=10_000)
        assert desk.coordinator.fragments[0].done.tokens == 2 * 50


class TestLookingAgain:
    """A contribution is kept until its round closes, if there is room for everybody's."""

    @staticmethod
    def is_kept(pool_bytes: int) -> bool:
        desk = Desk("abc", pool_bytes=pool_bytes)
        for fragment in desk.coordinator.fragments:
            fragment.max_payload_bytes = lambda sections, codec: sections * SIZE_BYTES
        desk.contribute("a", norm=1.0)
        return accumulated(desk)[0].keep

    def test_it_takes_room_for_one_of_each_worker(self) -> None:
        assert self.is_kept(3 * SIZE_BYTES)
        assert not self.is_kept(3 * SIZE_BYTES - 1)

    def test_one_that_brought_a_good_one_since_is_not_counted_among_the_refused(self) -> None:
        desk = Desk("abcd")
        for worker in "abcd":
            desk.contribute(worker, norm=1.0)
        with pytest.raises(Absurd):
            desk.contribute("a", 2, base_version=1, norm=1e6)
        desk.contribute("a", 3, base_version=1, norm=1.0)
        with pytest.raises(Absurd):
            desk.contribute("b", 2, base_version=1, norm=1e6)
        assert not desk.events("screen_forgotten"), "one of four is refused, and not half"
        with pytest.raises(Absurd):
            desk.contribute("c", 2, base_version=1, norm=1e6)
        assert desk.events("screen_forgotten"), "now it is half of them"


class TestWhatIsSaid:
    def test_a_refusal_without_a_hint_gets_one_when_it_is_the_last(self) -> None:
        desk = Desk("ab")
        for number in range(1, MOST_REFUSALS + 1):
            with pytest.raises(TooLarge) as refused:
                desk.offer("a", size_bytes=1 << 21)
            assert refused.value.hint.startswith("refused 3 times" if number == MOST_REFUSALS else "")
        assert not refused.value.hint.startswith(";")

    def test_one_that_pushes_too_often_waits_for_less_than_a_second_too(self) -> None:
        desk = Desk("ab", quorum=1)
        worker = desk.coordinator.members.find("a")
        assert worker is not None
        worker.claims[0] = Claimant(desk.now, free_at=desk.now + 0.5)
        answer = desk.offer("a")
        assert (answer.state, answer.retry_after_s) == ("wait", 0.5)
        desk.now += 0.5
        assert desk.offer("a").state == "send"

    def test_a_part_that_begins_to_arrive_is_a_sign_of_life(self) -> None:
        desk = Desk("ab")
        desk.offer("a")
        desk.now += 9.0
        desk.coordinator.begin_part(desk.part_message("a", 0), desk.now)
        desk.later(9.0, alive="b")
        assert desk.live == {"a", "b"}

    def test_so_much_of_whom_a_round_waits_for_is_said_and_no_more(self) -> None:
        desk = Desk(num_workers=4)
        for letter in "abcd":
            desk.join(letter * 120)
        desk.contribute("a" * 120)
        assert len(desk.poll("a" * 120).waiting_for) == 256

    def test_the_heartbeat_answer_tells_how_many_the_run_reckons_with_and_how_many_are_here(self) -> None:
        desk = Desk(num_workers=3)
        desk.join("a")
        answer = desk.heartbeat("a")
        assert (answer.num_workers, answer.num_registered) == (3, 1)

    def test_a_slow_worker_takes_a_step_for_each_fragment_at_least(self) -> None:
        desk = Desk("ab", fragments=3, dylu=True, dylu_base=9)
        for worker, speed in {"a": 1000.0, "b": 1.0}.items():
            known = desk.coordinator.members.find(worker)
            assert known is not None
            known.steps_per_second = speed
        assert desk.coordinator.members.fastest == 1000.0
        slow = desk.coordinator.members.find("b")
        assert slow is not None
        assert desk.coordinator.local_steps(slow) == 3

    def test_a_model_in_another_order_of_parameters_is_the_same(self) -> None:
        desk = Desk("a")
        manifest = desk.coordinator.manifest
        assert manifest is not None
        turned = type(manifest)(parameters=manifest.parameters[::-1], aliases=manifest.aliases)
        desk.coordinator.check_join(make_join("b", manifest=turned), 0.0)

    def test_while_only_more_workers_can_help_nobody_is_named_as_silent(self) -> None:
        desk = Desk("abc", min_workers=3)
        desk.contribute("b")
        desk.leave("c")
        desk.now += 8.0
        assert desk.expected() == {"a", "b"}
        said = desk.coordinator.waiting_for(desk.coordinator.fragments[0], desk.now)
        assert said.startswith("at least 3")
        assert "silent" not in said


class TestFacts:
    def test_what_a_worker_last_told_of_itself_is_known_with_the_time(self) -> None:
        desk = Desk("a")
        worker = desk.coordinator.members.find("a")
        assert worker is not None
        facts = MemberFacts()
        desk.coordinator.heartbeat(make_heartbeat("a", facts=facts), desk.now)
        assert (worker.facts, worker.facts_at) == (facts, desk.now)
        desk.coordinator.heartbeat(make_heartbeat("a"), desk.now + 1.0)
        assert (worker.facts, worker.facts_at) == (facts, desk.now), "one that tells nothing changes nothing"

    def test_nobody_is_asked_to_measure_its_link_unless_somebody_steers(self) -> None:
        assert Desk("a").heartbeat("a").measure_link is UNSET


def test_how_large_a_contribution_may_be_is_asked_of_its_codec() -> None:
    desk = Desk("a")
    limits = {"fp32": SIZE_BYTES - 1}
    desk.coordinator.fragments[0].max_payload_bytes = lambda sections, codec: limits[codec]
    with pytest.raises(TooLarge):
        desk.offer("a")
    limits["fp32"] = SIZE_BYTES
    assert desk.offer("a").state == "send"
