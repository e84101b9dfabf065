"""What the tilings of all workers together may take, and that equal ones are one."""

from __future__ import annotations

import gc

import pytest

from outerstep.coordination.server.tilings import MOST_OF_NEWCOMERS, Tilings
from outerstep.errors import QuotaExceeded
from outerstep.tiling import ModelTiling
from outerstep.types import MOST_HELD, Box, ParameterSpec, Tiling
from unit.coordination.builders import Desk, make_join

SECTIONS, TENSORS = 512, MOST_HELD // 512
SPECS = [ParameterSpec(name=f"t{i}", shape=(512,), dtype="float32") for i in range(TENSORS)]


def tiling(number: int = 0) -> ModelTiling:
    """As large as they come; two with other numbers differ in who holds what."""
    boxes = tuple(Box((i,), (1,), ((i + number) % SECTIONS,)) for i in range(SECTIONS))
    return ModelTiling(Tiling(sections=SECTIONS, patterns=(boxes,), tensors=(0,) * TENSORS), SPECS)


class Site(Desk):
    def hold(self, worker: str, held: ModelTiling, *, token: str = "site") -> None:
        self.coordinator.tilings.check_room(held, token, worker, self.coordinator.members)
        answer = self.coordinator.join(make_join(worker), self.now, token=token)
        self.incarnations[worker] = answer.incarnation
        self.carry_out()
        member = self.coordinator.members.find(worker)
        assert member is not None
        member.tiling = self.coordinator.tilings.shared(held)

    def held_by(self, worker: str) -> ModelTiling | None:
        member = self.coordinator.members.find(worker)
        assert member is not None
        return member.tiling


def test_jobs_that_hold_the_same_share_one_and_it_goes_with_the_last() -> None:
    desk = Site()
    desk.hold("a", tiling())
    desk.hold("b", tiling())
    desk.hold("c", tiling(1))
    assert desk.held_by("a") is desk.held_by("b") is not desk.held_by("c")
    desk.leave("a")
    desk.leave("b")
    gc.collect()
    assert len(desk.coordinator.tilings._known) == 1


def test_two_with_the_same_digest_that_say_different_things_stay_two() -> None:
    tilings, first, second = Tilings(), tiling(), tiling(1)
    second.__dict__["digest"] = first.digest
    assert tilings.shared(first) is first
    assert tilings.shared(second) is second


def test_of_the_same_boxes_of_other_tensors_nothing_is_shared() -> None:
    others = [ParameterSpec(name=f"u{i}", shape=(512,), dtype="float32") for i in range(TENSORS)]
    first, tilings = tiling(), Tilings()
    second = ModelTiling(first.tiling, others)
    assert tilings.shared(first) is not tilings.shared(second)


class TestRoom:
    def fill(self, desk: Site) -> int:
        """As many as a token's newcomers may have."""
        count = MOST_OF_NEWCOMERS // tiling().weight
        for i in range(count):
            desk.hold(f"w{i}", tiling(i))
        return count

    def test_newcomers_with_one_token_share_it_and_those_of_another_have_their_own(self) -> None:
        desk = Site()
        count = self.fill(desk)
        with pytest.raises(QuotaExceeded, match="newcomers with the token 'site' may hold") as refused:
            desk.hold("more", tiling(count))
        assert refused.value.retry_after_s > 0.0
        desk.hold("elsewhere", tiling(count), token="other")

    def test_what_is_known_already_takes_none(self) -> None:
        desk = Site()
        self.fill(desk)
        desk.hold("the-same", tiling(0))

    def test_a_worker_that_has_contributed_needs_none_of_theirs(self) -> None:
        desk = Site(num_workers=1)
        desk.hold("a", tiling(100))
        desk.contribute("a")
        count = self.fill(desk)
        with pytest.raises(QuotaExceeded):
            desk.hold("more", tiling(count))
        assert desk.held_by("a") is not None

    def test_one_that_leaves_makes_room(self) -> None:
        desk = Site()
        count = self.fill(desk)
        desk.leave("w0")
        desk.hold("more", tiling(count))

    def test_the_largest_has_room_where_there_is_no_other(self) -> None:
        boxes = tuple(Box((i,), (1,), (i,)) for i in range(4096))
        specs = [ParameterSpec(name=f"t{i}", shape=(4096,), dtype="float32") for i in range(16)]
        largest = ModelTiling(Tiling(sections=4096, patterns=(boxes,) * 16, tensors=tuple(range(16))), specs)
        assert largest.weight > MOST_OF_NEWCOMERS
        Site().hold("a", largest)
