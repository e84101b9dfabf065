"""What an offer must look like to be taken: its form, its sections, its size, its age."""

from __future__ import annotations

from typing import Any

import pytest

from outerstep.coordination.server.admission import check_offer
from outerstep.coordination.server.rounds import Fragment, OpenRound, RoundRules
from outerstep.errors import BadRequest, FutureRound, PlanMismatch, StaleRound, TooLarge, TooOld
from unit.coordination.builders import make_agreement, make_offer, make_plan

NEWEST = 9
LEAST_BYTES = 100  # of a contribution in one section; each further one adds as much


def check(*, quorum: int | None = None, closing: bool = False, **offer: Any) -> None:
    """`closing`: a round is closed, and its agreement not published yet."""
    published = NEWEST - 1 if closing else NEWEST
    fragment = Fragment.at(make_agreement(published), lambda sections, codec: LEAST_BYTES * sections, max_sections=3)
    fragment.round = OpenRound(NEWEST + 1, set())
    facts = {"base_version": published, "size_bytes": 60, **offer}
    check_offer(make_offer(**facts), fragment, make_plan(), RoundRules(2, quorum=quorum, max_staleness=4))


class TestItsForm:
    def test_it_is_in_the_codec_of_the_run(self) -> None:
        check()
        with pytest.raises(PlanMismatch, match="encoded as 'int8'; the run uses 'fp32'"):
            check(codec="int8")

    def test_its_sections_make_up_its_size(self) -> None:
        check(section_bytes=(20, 40))
        for sections in ((20, 30), (30, 40)):
            with pytest.raises(BadRequest, match=rf"sections of {sum(sections)} bytes in a contribution of 60"):
                check(section_bytes=sections)

    def test_there_are_no_more_sections_than_rows(self) -> None:
        check(section_bytes=(20, 20, 20))
        with pytest.raises(BadRequest, match="4 sections are too many: fragment 0 has fewer rows"):
            check(section_bytes=(15, 15, 15, 15))

    def test_a_fragment_that_is_not_said_to_have_rows_comes_in_one_section(self) -> None:
        fragment = Fragment.at(make_agreement(0), LEAST_BYTES)
        assert (fragment.max_sections, fragment.max_payload_bytes(7, "fp32")) == (1, LEAST_BYTES)

    @pytest.mark.parametrize(("sections", "limit"), [((), 100), ((1,), 200), ((1, 1), 300)])
    def test_each_section_adds_what_it_may_be_large(self, sections: tuple[int, ...], limit: int) -> None:
        def sized(size: int) -> dict[str, Any]:
            return {"size_bytes": size, "section_bytes": (*sections, size - sum(sections)) if sections else ()}

        check(**sized(limit))
        with pytest.raises(TooLarge, match=rf"of {limit + 1} bytes; fragment 0 as fp32 takes at most {limit}"):
            check(**sized(limit + 1))


class TestItsAge:
    def test_without_a_quorum_only_the_newest_base_will_do(self) -> None:
        check(base_version=NEWEST)
        with pytest.raises(StaleRound, match=f"round {NEWEST} of fragment 0 closed without this .*at version {NEWEST}"):
            check(base_version=NEWEST - 1)

    def test_with_one_an_older_base_will_do_up_to_the_limit(self) -> None:
        check(quorum=1, base_version=NEWEST - 4)
        with pytest.raises(TooOld, match=rf"taken on version {NEWEST - 5}, 5 before the newest; max_staleness is 4"):
            check(quorum=1, base_version=NEWEST - 5)

    def test_the_oldest_step_counts_however_new_the_base_is(self) -> None:
        check(base_version=NEWEST, oldest_base=NEWEST - 4)
        with pytest.raises(TooOld):
            check(base_version=NEWEST, oldest_base=NEWEST - 5)

    @pytest.mark.parametrize(("base", "oldest"), [(NEWEST + 1, NEWEST + 1), (NEWEST, NEWEST + 1)])
    def test_nothing_comes_from_the_future(self, base: int, oldest: int) -> None:
        with pytest.raises(FutureRound, match=rf"at version {NEWEST}; got base_version {base}, oldest_base {oldest}"):
            check(base_version=base, oldest_base=oldest)

    def test_what_is_not_published_cannot_be_a_base_yet_and_makes_the_one_before_it_old(self) -> None:
        with pytest.raises(FutureRound):
            check(closing=True, base_version=NEWEST)
        with pytest.raises(StaleRound):
            check(closing=True, base_version=NEWEST - 1)
        check(closing=True, quorum=1, base_version=NEWEST - 1)


@pytest.mark.parametrize(("codec", "limit"), [("fp32", 100), ("int8", 25)])
def test_how_large_it_may_be_depends_on_its_codec_and_not_on_the_plans(codec: str, limit: int) -> None:
    """One that was encoded by an earlier plan is as large as that codec makes it."""
    bytes_of = {"fp32": 100, "int8": 25}
    fragment = Fragment.at(make_agreement(NEWEST), lambda sections, codec: bytes_of[codec])
    fragment.round = OpenRound(NEWEST + 1, set())
    plan, rules = make_plan(), RoundRules(2)
    offers = [make_offer(base_version=NEWEST, size_bytes=size, codec=codec) for size in (limit, limit + 1)]
    check_offer(offers[0], fragment, plan, rules, ["int8"])
    with pytest.raises(TooLarge, match=f"as {codec} takes at most {limit}"):
        check_offer(offers[1], fragment, plan, rules, ["int8"])
