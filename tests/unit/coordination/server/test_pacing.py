"""How many local steps a worker takes."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outerstep.coordination.server.membership import local_steps
from outerstep.errors import ConfigError
from outerstep.types import Heartbeat
from unit.coordination.builders import Desk

speeds = st.floats(min_value=1e-6, max_value=1e6)
NOT_SPEEDS = [0.0, -1.0, math.nan, math.inf, -math.inf]


class TestLocalSteps:
    def test_the_steps_are_in_the_ratio_of_the_speeds(self) -> None:
        assert [local_steps(v, 6.0, 60) for v in (1.0, 1.0, 2.0, 6.0)] == [10, 10, 20, 60]
        assert [local_steps(v, 3.0, 50) for v in (1.0, 2.0)] == [16, 33]

    @given(speed=speeds, base=st.integers(1, 10**6))
    def test_the_fastest_takes_exactly_base(self, speed: float, base: int) -> None:
        assert local_steps(speed, speed, base) == base

    @given(speed=speeds, fastest=speeds, base=st.integers(1, 10**6))
    def test_the_result_is_the_exact_floor_within_a_billionth(self, speed: float, fastest: float, base: int) -> None:
        exact = Fraction(speed) / Fraction(fastest) * base
        least = max(1, math.floor(exact * (1 - Fraction(1, 10**8))))
        most = max(1, math.floor(exact * (1 + Fraction(1, 10**8))))
        assert min(base, least) <= local_steps(speed, fastest, base) <= min(base, most)

    @given(steps=st.integers(1, 10**4), base=st.integers(1, 10**4), fastest=speeds)
    def test_a_speed_meant_for_a_whole_number_of_steps_loses_none(self, steps: int, base: int, fastest: float) -> None:
        steps = min(steps, base)
        assert local_steps(steps / base * fastest, fastest, base) == steps

    def test_a_product_a_hair_below_a_whole_number_loses_no_step(self) -> None:
        assert math.floor(0.29 / 1.0 * 100) == 28, "the trap that this test is about"
        assert local_steps(0.29, 1.0, 100) == 29
        assert local_steps(0.7, 1.0, 10) == 7
        assert local_steps(0.289999, 1.0, 100) == 28, "what is really below stays below"

    def test_a_worker_faster_than_the_fastest_known_takes_base(self) -> None:
        assert local_steps(10.0, 5.0, 50) == 50
        assert local_steps(1e300, 1e-300, 50) == 50

    def test_nobody_takes_fewer_than_least(self) -> None:
        assert local_steps(1e-300, 1e300, 50) == 1
        assert local_steps(1.0, 100.0, 50, least=5) == 5
        assert local_steps(1.0, 100.0, 5, least=5) == 5

    @given(a=speeds, b=speeds, fastest=speeds, base=st.integers(1, 10**6))
    def test_a_faster_worker_never_takes_fewer(self, a: float, b: float, fastest: float, base: int) -> None:
        slow, fast = sorted((a, b))
        assert local_steps(slow, fastest, base) <= local_steps(fast, fastest, base)

    @pytest.mark.parametrize("wrong", NOT_SPEEDS)
    def test_what_is_not_a_speed_is_refused(self, wrong: float) -> None:
        with pytest.raises(ConfigError, match="speed must be a finite number"):
            local_steps(wrong, 1.0, 50)
        with pytest.raises(ConfigError, match="fastest must be a finite number"):
            local_steps(1.0, wrong, 50)

    @pytest.mark.parametrize(("base", "least"), [(0, 1), (-5, 1), (5, 0), (5, 6)])
    def test_bounds_that_contradict_each_other_are_refused(self, base: int, least: int) -> None:
        with pytest.raises(ConfigError, match=f"least={least}, base={base}"):
            local_steps(1.0, 1.0, base, least)


class TestDynamicLocalUpdates:
    """What the coordinator says in its answers to heartbeats."""

    @staticmethod
    def beat(desk: Desk, worker: str, speed: float) -> int | None:
        message = Heartbeat(**desk.head(worker), step=1, steps_per_second=speed)
        return desk.coordinator.heartbeat(message, desk.now).sync_every

    def test_a_slower_worker_takes_fewer_steps_and_the_fastest_the_plans(self) -> None:
        desk = Desk("ab", dylu=True)
        assert self.beat(desk, "a", 8.0) == 4
        assert self.beat(desk, "b", 2.0) == 1
        assert self.beat(desk, "a", 8.0) == 4

    def test_or_as_many_as_the_server_names_for_the_fastest(self) -> None:
        desk = Desk("ab", dylu=True, dylu_base=100)
        assert self.beat(desk, "a", 8.0) == 100
        assert self.beat(desk, "b", 0.8) == 10

    def test_nobody_takes_fewer_steps_than_there_are_fragments(self) -> None:
        desk = Desk("ab", fragments=3, dylu=True, dylu_base=2)
        assert self.beat(desk, "a", 8.0) == 3
        assert self.beat(desk, "b", 0.1) == 3

    @pytest.mark.parametrize(("fast", "slow"), [(65.0, 1.0), (64.0, 1.0), (6500.0, 1.0), (2.0, 0.001)])
    @pytest.mark.parametrize("third", [None, 1.0, 3.0])
    def test_speeds_may_be_far_apart(self, fast: float, slow: float, third: float | None) -> None:
        desk = Desk("abc", fragments=2, dylu=True, dylu_base=1000)
        if third is not None:
            self.beat(desk, "c", third * slow)
        self.beat(desk, "b", slow)
        assert self.beat(desk, "a", fast) == 1000
        assert self.beat(desk, "b", slow) == max(2, math.floor(slow / fast * 1000))
        if third is not None:
            assert self.beat(desk, "c", third * slow) == max(2, math.floor(third * slow / fast * 1000))

    def test_a_worker_whose_speed_is_not_known_follows_the_plan(self) -> None:
        desk = Desk("ab", dylu=True)
        assert self.beat(desk, "a", 8.0) == 4
        assert self.beat(desk, "b", 0.0) is None
        assert self.beat(desk, "b", 0.5) == 1  # slower than a step in a second is a speed, too

    def test_without_them_everybody_does(self) -> None:
        assert self.beat(Desk("a"), "a", 8.0) is None
