"""Rules that combine contributions: how many they need, who cannot have them, and that no round closes with less."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import pytest

from outerstep.config import ServerConfig
from outerstep.coordination.server.effects import Accumulate
from outerstep.coordination.server.rounds import Aggregation, RoundVerdict, RuleName
from outerstep.core.robust import RULES, RobustAggregator
from outerstep.errors import Absurd, ConfigError, Conflict
from outerstep.server.store import rule_of
from unit.coordination.builders import Desk, make_key

SETTINGS: list[dict[str, Any]] = [
    {"aggregation": name, "bucket_size": size, "cosine_screen": cosine, **more}
    for name in RULES
    for size in ((1,) if name == "mean" else (1, 2, 3))
    for cosine in (False, True)
    for more in {
        "trimmed_mean": [{}, {"trim_fraction": 0.2}, {"trim_fraction": 1 / 49}, {"trim_fraction": 0.45}],
        "krum": [{}, {"attackers": 2}],
        "multi_krum": [{}, {"attackers": 3}],
        "centered_clipping": [{}, {"clip_radius": 2.0, "aggregation_iterations": 1}],
    }.get(name, [{}])
    if (name, cosine) != ("mean", False)
]


def test_the_names_are_those_of_the_rules() -> None:
    assert get_args(RuleName) == tuple(RULES)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_round_needs_as_many_as_the_aggregator_does(settings: dict[str, Any]) -> None:
    """The numbers are worked out twice, here without tensors: they must agree."""
    asked = Aggregation(**settings)
    plain = rule_of(Aggregation(**{**settings, "bucket_size": 1}))
    aggregator = RobustAggregator(plain, cosine_screen=asked.cosine_screen, bucket_size=asked.bucket_size)
    assert asked.fewest == aggregator.min_peers
    assert not asked.is_plain


def test_the_plain_mean_needs_one() -> None:
    assert (Aggregation().fewest, Aggregation().is_plain, Aggregation().name) == (1, True, "mean")


class TestSettings:
    def server(self, num_workers: int = 8, **settings: Any) -> ServerConfig:
        return ServerConfig(num_workers=num_workers, **settings)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            (
                {"num_workers": 4, "aggregation": "trimmed_mean", "trim_fraction": 0.2},
                r"'trimmed_mean' needs at least 5 contributions in a round: a trim_fraction of 0.2 trims nothing of 4, "
                r"⌊0.2·4⌋ = 0, got num_workers 4; raise num_workers to 5, or trim_fraction to 0.25",
            ),
            (
                {"aggregation": "trimmed_mean", "trim_fraction": 0.2, "quorum": 4},
                r"trims nothing of 4, ⌊0.2·4⌋ = 0, got quorum 4; raise quorum to 5",
            ),
            (
                {"num_workers": 6, "aggregation": "krum", "attackers": 2},
                r"'krum' needs at least 7 contributions .*\(2·attackers \+ 3, attackers is 2\), got num_workers 6",
            ),
            (
                {"num_workers": 4, "aggregation": "median", "bucket_size": 2},
                r"'median over buckets of 2' needs at least 5 .*\(4 are 2 buckets, bucket_size is 2\), got num_wor",
            ),
            (
                {"num_workers": 6, "aggregation": "multi_krum", "attackers": 2},
                r"'multi_krum' needs at least 7 contributions .*\(2·attackers \+ 3, attackers is 2\), got num_worker",
            ),
            (
                {"num_workers": 3, "aggregation": "trimmed_mean", "trim_fraction": 0.3},
                r"trims nothing of 3, ⌊0.3·3⌋ = 0, got num_workers 3; raise num_workers to 4, or trim_fraction to 0.33",
            ),
            (
                {"num_workers": 4, "aggregation": "trimmed_mean", "trim_fraction": 0.25, "cosine_screen": True},
                r"needs at least 5 contributions in a round \(cosine_screen: .*; raise num_workers to 5, or use an",
            ),
            (
                {"num_workers": 2, "aggregation": "median"},
                r"'median' needs at least 3 contributions in a round, got num_workers 2; raise .* to 3, or use another",
            ),
            (
                {"num_workers": 4, "cosine_screen": True},
                r"'mean with the cosine screen' needs at least 5 .*refuse honest ones\), got num_workers 4",
            ),
            ({"trim_fraction": 0.2}, r"trim_fraction is for aggregation 'trimmed_mean', got 0.2 with 'mean'"),
            ({"aggregation": "median", "attackers": 1}, r"attackers is for aggregation 'krum' and 'multi_krum', got 1"),
            ({"aggregation": "krum", "clip_radius": 1.0}, r"clip_radius is for aggregation 'centered_clipping'"),
            ({"aggregation": "median", "aggregation_iterations": 3}, r"aggregation_iterations is for aggregation"),
            ({"aggregation": "trimmed_mean", "trim_fraction": 0.5}, r"above 0 and below 0.5 .*got 0.5"),
            ({"aggregation": "trimmed_mean", "trim_fraction": 0.0}, r"above 0 and below 0.5 .*got 0"),
            ({"aggregation": "centered_clipping", "clip_radius": 0.0}, r"clip_radius must be above 0, got 0"),
            ({"bucket_size": 2}, r"bucket_size 2 averages some before a rule sees them, and aggregation is 'mean'"),
            ({"aggregation": "krum", "attackers": 0}, r"attackers must be ≥ 1, got 0"),
            ({"aggregation": "kurm"}, r"aggregation must be one of 'mean', .*got 'kurm'"),
            ({"aggregation": "median", "async_mode": True}, r"'median' compares .*async_mode has one in each"),
            ({"cosine_screen": True, "async_mode": True}, r"'mean with the cosine screen' compares .*async_mode"),
            ({"cosine_screen": True, "norm_screen": 0.0}, r"cosine_screen needs the norm screen .*got norm_screen 0"),
            ({"aggregation": "krum", "weight_by": "tokens"}, r"'krum' .* cannot weigh them, got weight_by 'tokens'"),
            ({"aggregation": "krum", "quorum": 6}, r"'krum' .*got a quorum with staleness_policy 'weight'"),
        ],
        ids=lambda value: str(value) if isinstance(value, dict) else "",
    )
    def test_what_could_never_work_is_refused_by_name(self, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            self.server(**settings)

    @pytest.mark.parametrize(
        "settings",
        [
            {"aggregation": "trimmed_mean", "trim_fraction": 0.2, "num_workers": 5},
            {"aggregation": "krum", "quorum": 6, "staleness_policy": "log"},
            {"aggregation": "multi_krum", "weight_by": "tokens", "quorum": 6},
            {"aggregation": "mean"},
            {"aggregation": "centered_clipping", "clip_radius": 0.5},
            {"aggregation": "centered_clipping", "clip_radius": 1.5, "bucket_size": 2, "cosine_screen": True},
        ],
        ids=str,
    )
    def test_and_what_can_is_taken(self, settings: dict[str, Any]) -> None:
        config = self.server(**settings)
        assert config.rules.aggregation == config.combining

    def test_the_floor_of_a_run_is_what_the_rule_needs(self) -> None:
        krum = self.server(aggregation="krum", attackers=2).rules
        assert (krum.min_workers, krum.floor, krum.floor_is) == (1, 7, "krum")
        more = self.server(aggregation="krum", min_workers=8).rules
        assert (more.floor, more.floor_is) == (8, "min_workers")


# --- rounds ---------------------------------------------------------------------------------------------------------

MEDIAN = Aggregation(aggregation="median")


def weights(desk: Desk) -> list[tuple[str, float]]:
    return [(p.worker_id, p.weight) for p in desk.closings[-1].participants]


def contribute(desk: Desk, workers: Sequence[str], sequence: int = 1, **changes: Any) -> None:
    for worker in workers:
        desk.contribute(worker, sequence, **changes)


def test_everything_is_kept_until_the_round_closes_whatever_its_size() -> None:
    desk = Desk("abcd", aggregation=MEDIAN)
    contribute(desk, "abcd", norm=1.0)
    contribute(desk, "abcd", 2, norm=1.0, base_version=1)
    assert [effect.keep for effect in desk.effects if isinstance(effect, Accumulate)] == [True] * 8


def test_no_round_closes_with_fewer_than_the_rule_needs() -> None:
    desk = Desk("abcd", aggregation=MEDIAN, round_deadline_s=5.0)
    contribute(desk, "ab")
    desk.leave("c")
    desk.later(60.0, alive="abd")
    assert not desk.closings
    assert desk.poll("a").waiting_for == "contributions of d"
    desk.leave("d")
    assert desk.poll("a").waiting_for == "at least 3 (median): 2 contributed, 0 more alive"
    assert desk.poll("a").stuck
    desk.join("e")
    desk.contribute("e")
    assert desk.closed == [(1, "abe")]


def test_nor_does_a_run_start_with_fewer_at_the_start_deadline() -> None:
    desk = Desk("ab", num_workers=4, start_deadline_s=5.0, aggregation=MEDIAN)
    desk.later(6.0, alive="ab")
    assert not desk.coordinator.started
    desk.join("c")
    assert desk.coordinator.started


def test_who_has_not_trained_does_not_make_up_the_number() -> None:
    """Three are there, two have trained: while a fourth may come the round waits for it, deadline or not."""
    desk = Desk("abcd", aggregation=MEDIAN, round_deadline_s=5.0)
    contribute(desk, "ab")
    desk.contribute("c", steps=0)
    desk.later(6.0, alive="abcd")
    assert not desk.closings
    waiting = RoundVerdict(False, None, "contributions of d: median needs 3 with training in them")
    assert desk.coordinator.verdict(desk.coordinator.fragments[0], desk.now) == waiting
    assert desk.poll("a").waiting_for == waiting.waiting_for
    desk.contribute("d")
    assert weights(desk) == [("a", 1.0), ("b", 1.0), ("c", 0.0), ("d", 1.0)]
    assert desk.coordinator.total_too_few == 0


@pytest.mark.parametrize(("trained", "closes"), [("", True), ("a", False), ("ab", False), ("abc", True)])
def test_some_training_is_worth_waiting_for_more_and_none_is_not(trained: str, closes: bool) -> None:
    desk = Desk("abcd", aggregation=MEDIAN, round_deadline_s=5.0)
    for worker in "abc":
        desk.contribute(worker, steps=1 if worker in trained else 0)
    desk.later(6.0, alive="abcd")
    assert bool(desk.closings) is closes


def test_if_nobody_else_can_come_the_round_moves_nothing_and_says_so() -> None:
    desk = Desk("abc", aggregation=MEDIAN)
    contribute(desk, "ab", norm=1.0, tokens=100)
    desk.contribute("c", steps=0)
    [closing] = desk.closings
    assert weights(desk) == [("a", 0.0), ("b", 0.0), ("c", 0.0)]
    assert closing.left_out == {make_key("a", 1), make_key("b", 1)}
    [told] = desk.events("too_few")
    assert told == {"fragment": 0, "version": 1, "trained": 2, "needed": 3, "aggregation": "median"}
    why = "2 had trained, and median needs 3"
    assert desk.events("left_out") == [
        {"worker": worker, "fragment": 0, "version": 1, "why": why} for worker in ("a", "b")
    ]
    assert desk.coordinator.total_too_few == 1
    assert desk.coordinator.budget.total == 0
    assert not desk.coordinator.fragments[0].screen.rounds


def test_one_that_trained_alone_is_too_few_as_well() -> None:
    desk = Desk("abc", aggregation=MEDIAN)
    desk.contribute("a")
    contribute(desk, "bc", steps=0)
    assert weights(desk) == [("a", 0.0), ("b", 0.0), ("c", 0.0)]
    assert [event["trained"] for event in desk.events("too_few")] == [1]


def test_every_round_that_moves_nothing_is_counted_and_so_is_what_was_left_out_of_it() -> None:
    desk = Desk("abc", aggregation=MEDIAN)
    for sequence in (1, 2):
        desk.contribute("a", sequence, base_version=sequence - 1)
        for worker in "bc":
            desk.contribute(worker, sequence, base_version=sequence - 1, steps=0)
    assert desk.coordinator.total_too_few == 2
    assert [desk.coordinator.members.find(worker).left_out for worker in "abc"] == [2, 0, 0]  # type: ignore[union-attr]


def test_a_round_in_which_nobody_trained_is_no_news() -> None:
    desk = Desk("abc", aggregation=MEDIAN)
    contribute(desk, "abc", steps=0)
    assert desk.closed == [(1, "abc")]
    assert not desk.events("too_few")
    assert not desk.closings[0].left_out


def late_and_current(**current: Any) -> Desk:
    """A quorum closed round 1 without "d", whose contribution to it came late; now it has a newer one too."""
    desk = Desk("abcd", aggregation=MEDIAN, quorum=3, weigh_staleness=False)
    contribute(desk, "abc")
    desk.contribute("d", base_version=0)
    desk.contribute("d", 2, base_version=1, **current)
    for worker in "ab":
        desk.contribute(worker, 2, base_version=1)
    return desk


def test_a_late_contribution_beside_the_current_one_is_left_out_of_a_rule() -> None:
    desk = late_and_current()
    assert [(p.worker_id, p.weight) for p in desk.closings[-1].participants] == [
        *(("d", 0.0), ("d", 1.0)),
        *(("a", 1.0), ("b", 1.0)),
    ]
    assert desk.closings[-1].left_out == {make_key("d", 1)}
    [told] = desk.events("left_out")
    assert told["why"] == "it was late, and its worker has a newer one in the round"


def test_and_the_contribution_that_counts_is_the_last_with_training_in_it() -> None:
    desk = late_and_current(steps=0)
    assert [p.weight for p in desk.closings[-1].participants] == [1.0, 0.0, 1.0, 1.0]
    assert not desk.events("left_out")


def test_the_norm_screen_still_stands_in_front() -> None:
    desk = Desk("abcd", aggregation=MEDIAN)
    contribute(desk, "abc", norm=1.0)
    desk.contribute("d", norm=5.0)
    assert weights(desk) == [("a", 1.0), ("b", 1.0), ("c", 1.0), ("d", 0.0)]
    assert desk.closings[0].left_out == {make_key("d", 1)}


@pytest.mark.parametrize(("norm_screen", "left_out"), [(0.0, ""), (1.0, "d"), (6.0, "")])
def test_as_strict_as_it_was_set(norm_screen: float, left_out: str) -> None:
    desk = Desk("abcd", aggregation=MEDIAN, norm_screen=norm_screen)
    contribute(desk, "abc", norm=1.0)
    desk.contribute("d", norm=1.5)
    assert [event["worker"] for event in desk.events("left_out")] == list(left_out)


def quarantine(desk: Desk, worker: str) -> None:
    """Three offences, each the same key with other bytes."""
    desk.offer(worker)
    for _ in range(3):
        with pytest.raises(Conflict):
            desk.offer(worker, size_bytes=1)
    desk.carry_out()
    assert desk.events("quarantine")[-1]["worker"] == worker


def test_a_worker_in_quarantine_does_not_stop_the_others() -> None:
    """It is one of those that the rule withstands: while it is here it counts as offered and refused."""
    desk = Desk("abc", aggregation=MEDIAN)
    quarantine(desk, "c")
    contribute(desk, "ab")
    [closing] = desk.closings
    assert (desk.closed, closing.turned_away) == ([(1, "ab")], {"c"})
    assert weights(desk) == [("a", 1.0), ("b", 1.0)]
    desk.leave("c")
    contribute(desk, "ab", 2, base_version=1)
    assert len(desk.closings) == 1
    assert desk.poll("a", after=1).waiting_for == "at least 3 (median): 2 contributed, 0 more alive"


def test_but_only_a_minority_of_such() -> None:
    desk = Desk("abcde", aggregation=Aggregation(aggregation="krum"))
    for worker in "cde":
        quarantine(desk, worker)
    contribute(desk, "ab")
    assert not desk.closings
    assert desk.poll("a").waiting_for == "at least 3 (krum): 2 contributed, 0 more alive"


def test_nor_does_one_that_is_refused_for_its_size_again_and_again() -> None:
    """At the deadline the round closes, and the refused one was offered."""
    desk = Desk("abcd", aggregation=Aggregation(aggregation="trimmed_mean", trim_fraction=0.25), round_deadline_s=5.0)
    contribute(desk, "abcd", norm=1.0)
    for sequence in (2, 3):
        with pytest.raises(Absurd):
            desk.contribute("d", sequence, base_version=1, norm=1e6)
    contribute(desk, "abc", 2, base_version=1, norm=1.0)
    assert len(desk.closings) == 1
    desk.later(6.0, alive="abcd")
    assert (desk.closed[-1], desk.closings[-1].turned_away) == ((2, "abc"), {"d"})
    contribute(desk, "abc", 3, base_version=2, norm=1.0)
    desk.later(6.0, alive="abcd")
    assert len(desk.closings) == 2  # this time it brought nothing
    assert desk.poll("a", after=2).waiting_for == "contributions of d"


def test_what_the_rule_found_is_counted_and_told() -> None:
    desk = Desk("abcde", aggregation=Aggregation(aggregation="krum"))
    desk.coordinator.note_verdict(0, 1, {"a": "its cosine is low"}, ("b", "c"))
    desk.carry_out()
    assert {m.worker_id: m.left_out for m in desk.coordinator.members} == {"a": 1, "b": 1, "c": 1, "d": 0, "e": 0}
    assert desk.events("left_out") == [{"worker": "a", "fragment": 0, "version": 1, "why": "its cosine is low"}]
    assert desk.events("not_chosen") == [{"fragment": 0, "version": 1, "workers": ["b", "c"], "aggregation": "krum"}]
