"""Absurdly large contributions never enter the model; honest ones always do."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import deque

import pytest

from outerstep.config import ServerConfig
from outerstep.coordination.server.effects import Accumulate
from outerstep.errors import Absurd, ConfigError, Refused
from outerstep.screens import (
    FACTOR,
    FAR,
    MOST_REMEMBERED,
    MOST_STEPS,
    ROUNDS,
    History,
    NormScreen,
    Size,
    Usual,
    check_history,
    norm_screen,
    rate,
    remember,
)
from unit.coordination.builders import Desk, make_key

LIMIT = 2.0
ROOMY = {"max_payload_bytes": 64, "pool_bytes": 1 << 20}


def a_screen(norms: list[float], workers: str = "abc", steps: int = 4) -> NormScreen:
    """After one closed round per norm, in which all workers had it."""
    screen = NormScreen()
    for norm in norms:
        screen.include([(worker, Size(norm, steps)) for worker in workers])
    return screen


def times(screen: NormScreen, norm: float, steps: int = 4) -> float:
    found = screen.times(Size(norm, steps))
    assert found is not None
    return found


def norms_of(desk: Desk, norms: dict[str, float], sequence: int, **changes: int) -> None:
    for worker, norm in norms.items():
        desk.contribute(worker, sequence, norm=norm, **{"base_version": sequence - 1, **changes})


def after_a_round(workers: str) -> Desk:
    """In which everybody's norm was 1."""
    desk = Desk(workers, **ROOMY)
    norms_of(desk, dict.fromkeys(workers, 1.0), 1)
    return desk


# --- how large ------------------------------------------------------------------------------------------------------


def test_as_large_as_usual_is_one() -> None:
    assert times(a_screen([3.0]), 3.0) == pytest.approx(1.0)
    assert times(a_screen([3.0]), 30.0) == pytest.approx(10.0)


def test_only_the_last_rounds_count_as_usual() -> None:
    screen = a_screen([1000.0] * 5 + [1.0] * ROUNDS)
    assert times(screen, 2.0) == pytest.approx(2.0)


@pytest.mark.parametrize("growth", [0.5, 1.0])
@pytest.mark.parametrize("factor", [1 / 16, 1 / 4, 4, 8])
def test_who_took_fewer_or_more_steps_is_not_large_for_that(growth: float, factor: float) -> None:
    """Whether its steps go anywhere (√steps) or agree (steps)."""
    steps = int(64 * factor)
    assert times(a_screen([64.0**growth], steps=64), steps**growth, steps) <= LIMIT


def test_claiming_steps_excuses_little() -> None:
    assert times(a_screen([1.0]), 100.0, steps=10**9) == pytest.approx(100.0 / MOST_STEPS)


def test_with_fewer_than_three_workers_nobody_knows_what_is_usual() -> None:
    assert a_screen([1.0] * ROUNDS, workers="ab").times(Size(1e9, 1)) is None
    one_by_one = NormScreen()
    for worker in "aabbaab":
        one_by_one.include([(worker, Size(1.0, 1))])
    assert one_by_one.usual is None
    one_by_one.include([("c", Size(1.0, 1))])
    assert one_by_one.usual is not None


def test_where_nobody_moved_nothing_is_usual() -> None:
    assert a_screen([0.0] * 3).times(Size(1.0, 1)) is None


def test_a_minority_does_not_shift_what_is_usual() -> None:
    screen = NormScreen()
    for _ in range(ROUNDS):
        screen.include([("a", Size(1.0, 1)), ("b", Size(1.0, 1)), ("c", Size(1e6, 1)), ("d", Size(1e6, 1))])
    assert times(screen, 1e6, 1) == pytest.approx(1e6)


def test_of_very_many_only_some_are_remembered_and_the_median_stays() -> None:
    screen = NormScreen()
    screen.include([(f"w{i}", Size(1.0 + i, 1)) for i in range(1001)])
    [(names, sizes)] = screen.rounds
    assert (len(names), len(sizes)) == (3, MOST_REMEMBERED)
    assert times(screen, 501.0, 1) == pytest.approx(1.0, rel=0.05)


def test_it_survives_a_restart() -> None:
    screen = a_screen([1.0, 2.5, 3.0])
    again = NormScreen.resumed(json.loads(json.dumps(screen.remembered())))
    assert (again.rounds, again.usual) == (screen.rounds, screen.usual)
    assert len(NormScreen.resumed(a_screen([1.0] * (ROUNDS + 2)).remembered()).rounds) == ROUNDS


# --- at commit ------------------------------------------------------------------------------------------------------


def test_what_is_far_too_large_is_refused_naming_norm_median_limit_and_setting() -> None:
    screen = a_screen([1.0])
    screen.check("a", Size(FAR * LIMIT, 4), LIMIT)
    with pytest.raises(Absurd, match=r"1e\+03 times as large as usual: ‖Δ‖ = 1000 in 4 steps, ‖Δ‖/√steps = 500 where "
                       r"the median is 0\.5; at most 20 times is taken \(10 · norm_screen=2\)") as told:  # fmt: skip
        screen.check("a", Size(1000.0, 4), LIMIT)
    assert "reload the agreed weights" in told.value.hint


def test_one_who_is_refused_changes_nothing_for_the_others() -> None:
    desk = after_a_round("abc")
    for sequence in range(2, 20):
        with pytest.raises(Refused):
            desk.contribute("a", sequence, base_version=1, norm=1e4)
    assert desk.coordinator.fragments[0].screen.times(Size(1.0, 1)) == pytest.approx(1.0)
    assert not desk.events("screen_forgotten")


def test_when_half_of_them_are_refused_it_is_the_run_that_has_changed() -> None:
    desk = after_a_round("abcd")
    for worker, is_known in (("a", True), ("b", False)):
        with pytest.raises(Absurd):
            desk.contribute(worker, 2, base_version=1, norm=1e4)
        assert (desk.coordinator.fragments[0].screen.usual is not None) == is_known
    assert desk.events("screen_forgotten")
    assert [m.conduct.total for m in desk.coordinator.members] == [0] * 4
    for worker in "abcd":
        desk.contribute(worker, 3, base_version=1, norm=1e4)
    assert desk.version() == 2


def test_who_is_taken_again_is_not_among_the_refused() -> None:
    desk = after_a_round("abcd")
    for version, worker in enumerate("abc", 1):
        with pytest.raises(Absurd):
            desk.contribute(worker, 2 * version, base_version=version, norm=1e4)
        norms_of(desk, dict.fromkeys("abcd", 1.0), 2 * version + 1, base_version=version)
    assert desk.coordinator.fragments[0].screen.usual is not None


def test_trying_again_in_the_same_round_is_one_offence() -> None:
    desk = after_a_round("abc")
    for sequence in (2, 3, 4, 5):
        with pytest.raises(Absurd):
            desk.contribute("a", sequence, base_version=1, norm=1e4)
    assert [event["count"] for event in desk.events("offence")] == [1]


# --- when a round closes --------------------------------------------------------------------------------------------


def kept(desk: Desk) -> list[bool]:
    return [effect.keep for effect in desk.effects if isinstance(effect, Accumulate)]


def weights(desk: Desk) -> dict[str, float]:
    return {p.worker_id: p.weight for p in desk.closings[-1].participants}


@pytest.mark.parametrize("order", list(itertools.permutations("abc")))
def test_in_the_first_round_an_outlier_is_left_out_whenever_it_came(order: tuple[str, ...]) -> None:
    desk = Desk("abc", **ROOMY)
    norms_of(desk, {worker: {"a": 1.0, "b": 1.5, "c": 4.0}[worker] for worker in order}, 1)
    assert kept(desk) == [True] * 3
    assert weights(desk) == {"a": 1.0, "b": 1.0, "c": 0.0}
    assert desk.closings[-1].left_out == {make_key("c", 1)}
    [told] = desk.events("left_out")
    assert told == {"worker": "c", "fragment": 0, "version": 1, "norm": 4.0, "steps": 1, "times_usual": 2.67}


def test_with_a_history_what_is_usual_is_added_at_once_and_an_outlier_waits() -> None:
    desk = Desk("abc", **ROOMY)
    norms_of(desk, {"a": 1.0, "b": 1.0, "c": 1.0}, 1)
    desk.effects.clear()
    norms_of(desk, {"a": 1.0, "b": 4.0, "c": 1.9}, 2)
    assert kept(desk) == [False, True, False]
    assert desk.closings[-1].left_out == {make_key("b", 2)}
    assert desk.coordinator.fragments[0].screen.times(Size(4.0, 1)) == pytest.approx(4.0)  # the outlier is not in it


def test_what_is_far_too_large_is_refused_and_the_round_goes_on_without_it() -> None:
    desk = Desk("abc", **ROOMY)
    norms_of(desk, {"a": 1.0, "b": 1.0, "c": 1.0}, 1)
    with pytest.raises(Absurd):
        norms_of(desk, {"c": 1000.0}, 2)
    assert desk.dropped == [make_key("c", 2)]
    norms_of(desk, {"a": 1.0, "b": 1.0}, 2)
    assert desk.version() == 1
    desk.contribute("c", 3, base_version=1, norm=1.0)  # it reloaded
    assert weights(desk) == {"a": 1.0, "b": 1.0, "c": 1.0}


@pytest.mark.parametrize("shape", ["linear", "from nothing", "restart", "cosine", "decay"])
@pytest.mark.parametrize("workers", ["abc", "abcdefgh"])
def test_no_schedule_of_the_learning_rate_leaves_an_honest_worker_out(shape: str, workers: str) -> None:
    """Norms follow the learning rate of their round, with the noise between workers that training shows."""
    schedules = {
        "linear": [2.0 * k + 1.0 for k in range(40)],
        "from nothing": [1e-6, *(float(k) for k in range(1, 40))],
        "restart": [1.0 + 0.1 * (k % 20) if k % 20 else 4.0 for k in range(60)],
        "cosine": [1e-3 + 0.5 * (1 + math.cos(math.pi * (k % 20) / 20)) for k in range(60)],
        "decay": [0.9**k for k in range(60)],
    }
    rng, desk, sequences = random.Random(shape + workers), Desk(workers, **ROOMY), dict.fromkeys(workers, 0)
    refused = 0
    for version, learning_rate in enumerate(schedules[shape]):
        waiting = deque(workers)
        while waiting:
            worker = waiting.popleft()
            sequences[worker] += 1
            try:
                norm = learning_rate * rng.uniform(0.8, 1.25)
                desk.contribute(worker, sequences[worker], base_version=version, norm=norm)
            except Absurd:  # usual was a thousandth of it: it reloads, and sends its next when the others have sent
                refused += 1
                waiting.append(worker)
    assert desk.version() == len(schedules[shape])
    assert not desk.events("left_out")
    assert not desk.events("quarantine")
    forgotten = len(desk.events("screen_forgotten"))
    assert (refused, forgotten) == (((len(workers) + 1) // 2, 1) if shape == "from nothing" else (0, 0))


def test_steps_without_training_and_an_unset_screen_are_not_looked_at() -> None:
    desk = Desk("abc", **ROOMY, norm_screen=0.0)
    norms_of(desk, {"a": 1.0, "b": 1.0, "c": 1e9}, 1)
    assert kept(desk) == [False] * 3
    assert not desk.closings[-1].left_out
    desk = Desk("abc", **ROOMY)
    norms_of(desk, {"a": 1.0, "b": 1.0, "c": 1e9}, 1, steps=0)
    assert kept(desk) == [False] * 3


def test_where_there_is_no_room_to_keep_them_only_what_is_far_too_large_is_refused() -> None:
    """Else the last would wait for the first, and the first for the last."""
    desk = Desk("abc", max_payload_bytes=64, pool_bytes=2 * 64)
    norms_of(desk, {"a": 1.0, "b": 1.0, "c": 4.0}, 1)
    assert kept(desk) == [False] * 3
    assert not desk.closings[-1].left_out
    with pytest.raises(Absurd):
        norms_of(desk, {"c": 1000.0}, 2)


def test_asynchronous_rounds_have_the_first_limit_alone() -> None:
    desk = Desk("abc", **ROOMY, asynchronous=True, quorum=1)
    for version, worker in enumerate("abcabc"):
        desk.contribute(worker, version // 3 + 1, base_version=version, norm=1.0)
    desk.contribute("a", 3, base_version=6, norm=10.0)
    with pytest.raises(Absurd):
        desk.contribute("b", 3, base_version=7, norm=50.0)
    assert not any(kept(desk))
    assert desk.version() == 7


def test_what_a_server_leaves_out_the_aggregator_would_refuse_too() -> None:
    """One screen in two places. With as many steps in all and odd counts, so that a median is one of them."""
    assert ServerConfig(num_workers=3).norm_screen == FACTOR
    rng, strict = random.Random(11), 0
    for _ in range(500):
        history: History = ()
        screen = NormScreen()
        for _ in range(rng.choice([0, 1, 3])):
            usual = [10 ** rng.uniform(-0.2, 0.2) for _ in range(3)]
            history = remember(history, tuple(usual))
            screen.include((str(i), Size(each, 1)) for i, each in enumerate(usual))
        rates = [10 ** rng.uniform(-0.5, 1.0) for _ in range(rng.choice([3, 5, 7]))]
        ours = screen.left_out([(str(i), Size(each, 1)) for i, each in enumerate(rates)], LIMIT)
        theirs = norm_screen(rates, history)
        assert ours.keys() <= theirs.keys()
        assert ours.keys() == theirs.keys() or history
        strict += ours.keys() != theirs.keys()
    assert strict  # they are two


def test_the_lower_median_is_never_left_out() -> None:
    rng = random.Random(7)
    for _ in range(500):
        taken = [(str(i), Size(10 ** rng.uniform(-6, 6), rng.randint(1, 500))) for i in range(rng.randint(3, 9))]
        assert len(NormScreen().left_out(taken, LIMIT)) < len(taken)
        assert Usual.of([size for _, size in taken]) is not None


# --- among peers ----------------------------------------------------------------------------------------------------


class TestNormScreen:
    def test_more_than_twice_the_usual_is_refused_and_the_reason_named(self) -> None:
        refused = norm_screen([1.0, 2.0, 2.1, 0.1], ((1.0, 1.0), (1.0,)))
        assert refused == {2: "its ‖Δ‖/√steps is 2.1, more than 2 times the usual 1"}

    def test_without_history_the_rounds_own_median_counts(self) -> None:
        assert norm_screen([1.0, 1.0, 1.0, 5.0]).keys() == {3}

    @pytest.mark.parametrize("rates", [[], [7.0], [1.0, 1000.0]])
    def test_fewer_than_three_are_not_screened(self, rates: list[float]) -> None:
        assert norm_screen(rates) == norm_screen(rates, ((0.001,),)) == {}

    def test_a_majority_that_has_grown_is_no_attack(self) -> None:
        """While the learning rate warms up, each round is several times longer than the one before."""
        assert norm_screen([3.0, 3.1, 2.9, 300.0], ((1.0, 1.0, 1.0),)).keys() == {3}

    def test_warming_up_never_ends_in_a_dead_end(self) -> None:
        history: History = ()
        for n in range(1, 20):
            rates = [3.0**n * each for each in (0.9, 1.0, 1.1)]
            assert norm_screen(rates, history) == {}
            history = remember(history, tuple(rates))

    def test_half_is_not_a_majority(self) -> None:
        assert norm_screen([1.0, 1.0, 9.0, 9.0], ((1.0,),)).keys() == {2, 3}

    def test_after_rounds_of_zeros_the_first_real_one_is_accepted(self) -> None:
        assert norm_screen([1.0, 1.0, 1.0], ((0.0, 0.0, 0.0),)) == {}
        assert norm_screen([0.0, 0.0, 0.0]) == {}

    def test_more_steps_may_go_farther(self) -> None:
        assert rate(6.0, 9) == rate(2.0, 1) == 2.0
        with pytest.raises(ConfigError, match="at least one step in it, got 0"):
            rate(1.0, 0)

    def test_eight_rounds_are_remembered_and_empty_ones_are_not(self) -> None:
        history: History = ()
        for n in range(20):
            history = remember(history, (float(n),))
            history = remember(history, ())
        assert history == tuple((float(n),) for n in range(20 - ROUNDS, 20))

    def test_a_saved_history_is_checked(self) -> None:
        check_history({"0": ((1.0, 2.0), (0.0,)), "1": ((1.0,),) * ROUNDS})
        for wrong in (((math.nan,),), ((math.inf,),), ((-1.0,),), ((),), ((1.0,),) * (ROUNDS + 1)):
            with pytest.raises(ConfigError, match="norm history of fragment 0 must be"):
                check_history({"0": wrong})


class TestAtTheLimitsThemselves:
    def test_a_rate_of_exactly_the_limit_is_taken(self) -> None:
        assert norm_screen([1.0, 1.0, FACTOR]) == {}
        assert set(norm_screen([1.0, 1.0, FACTOR * 1.001])) == {2}

    def test_half_of_a_round_is_no_majority(self) -> None:
        history: History = ((1.0, 1.0, 1.0),)
        assert set(norm_screen([1.0, 1.0, 9.0, 9.0], history)) == {2, 3}
        assert norm_screen([1.0, 9.0, 9.0], history) == {}

    def test_rates_at_the_limit_make_no_majority_that_has_grown(self) -> None:
        history: History = ((1.0, 1.0, 1.0),)
        assert set(norm_screen([2.0, 2.0, 2.0, 3.9], history)) == {3}

    def test_medians_of_zero_are_nothing_to_compare_with(self) -> None:
        assert Usual.of([Size(0.0, 4)] * 3) is None
        assert Usual.of([Size(1.0, 4)] * 3) is not None

    def test_what_is_exactly_at_the_limit_need_not_be_looked_at_again(self) -> None:
        screen = a_screen([1.0, 1.0])
        assert screen.check("a", Size(LIMIT, 4), LIMIT) is False
        assert screen.check("a", Size(LIMIT * 1.001, 4), LIMIT) is True

    def test_one_that_is_taken_is_not_counted_among_the_refused_any_more(self) -> None:
        screen = a_screen([1.0, 1.0])
        screen.note_refused("a", 1)
        screen.check("a", Size(1.0, 4), LIMIT)
        assert screen.refused == {}

    def test_two_workers_are_too_few_to_leave_one_out(self) -> None:
        taken: list[tuple[str, Size | None]] = [("a", Size(1.0, 1)), ("a", Size(1.0, 1)), ("b", Size(99.0, 1))]
        assert NormScreen().left_out(taken, LIMIT) == {}
        assert set(NormScreen().left_out([*taken, ("c", Size(1.0, 1))], LIMIT)) == {2}

    def test_a_round_as_large_as_can_be_remembered_is_remembered_whole(self) -> None:
        screen = NormScreen()
        sizes = [Size(float(i), 1) for i in range(1, MOST_REMEMBERED + 1)]
        screen.include((f"w{i}", size) for i, size in enumerate(sizes))
        assert list(screen.rounds[0][1]) == sizes

    def test_of_a_larger_one_the_smallest_the_largest_and_evenly_between(self) -> None:
        screen = NormScreen()
        sizes = [Size(float(i), 1) for i in range(2 * MOST_REMEMBERED - 1)]
        screen.include((f"w{i}", size) for i, size in enumerate(sizes))
        assert list(screen.rounds[0][1]) == sizes[::2]
