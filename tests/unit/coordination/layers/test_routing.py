"""Which way a cluster takes to the layer above, decided from what happened on each."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outerstep.coordination.layers.routing import ANSWERS, KEPT_S, PROBE_S, Routing, WayUp

TOP, NEXT, EAST, NORTH = "top:1", "next:1", "east:1", "north:1"
STRAIGHT, VIA_EAST, VIA_NORTH = WayUp(TOP), WayUp(TOP, EAST), WayUp(TOP, NORTH)
MB = 1e6


def measured(routing: Routing, way: WayUp, bytes_per_s: float, now: float = 0.0, latency_s: float = 0.0) -> None:
    for _ in range(5):  # a median of five
        routing.answered(way, now, latency_s)
        routing.moved(way, now, (1 << 20) / bytes_per_s, up_bytes=1 << 20)
        routing.moved(way, now, (1 << 20) / bytes_per_s, down_bytes=1 << 20)


class TestACutLink:
    def test_the_next_call_goes_through_a_relay_and_comes_back_when_the_link_does(self) -> None:
        routing = Routing([TOP], [EAST])
        assert routing.best(0.0) == STRAIGHT
        routing.failed(STRAIGHT, 1.0)
        assert routing.best(1.0, [STRAIGHT]) == VIA_EAST
        assert routing.reason == "no answer on top:1"
        routing.answered(VIA_EAST, 2.0)
        for _ in range(ANSWERS - 1):
            routing.answered(STRAIGHT, 3.0)
            assert routing.best(3.0) == VIA_EAST, "one answer may be luck"
        routing.answered(STRAIGHT, 4.0)
        assert routing.best(4.0) == STRAIGHT

    def test_if_everything_is_cut_each_way_has_its_turn(self) -> None:
        routing = Routing([TOP], [EAST, NORTH])
        tried = []
        for now in range(6):
            way = routing.best(float(now))
            assert way is not None
            tried.append(way)
            routing.failed(way, float(now))
        assert tried == [STRAIGHT, VIA_EAST, VIA_NORTH] * 2

    def test_a_call_that_failed_on_every_way_is_told_so(self) -> None:
        routing = Routing([TOP], [EAST])
        for way in routing.ways:
            routing.failed(way, 0.0)
        assert routing.best(0.0, routing.ways) is None

    def test_a_relay_that_dies_gives_way_to_the_straight_one(self) -> None:
        routing = Routing([TOP], [EAST])
        measured(routing, STRAIGHT, MB)
        measured(routing, VIA_EAST, 10 * MB)
        assert routing.best(0.0) == VIA_EAST
        routing.failed(VIA_EAST, 1.0)
        assert routing.best(1.0, [VIA_EAST]) == STRAIGHT

    def test_calls_that_were_cut_together_are_one_failure(self) -> None:
        one, four = Routing([TOP], [EAST]), Routing([TOP], [EAST])
        one.failed(STRAIGHT, 10.0, since=5.0)
        for now in (10.0, 10.1, 10.2, 10.3):
            four.failed(STRAIGHT, now, since=5.0)
        assert one.due(11.0)[:1] == four.due(11.0)[:1] == [STRAIGHT]


class TestAPlan:
    def test_the_way_that_it_names_is_taken_at_once_and_left_when_it_names_another(self) -> None:
        routing = Routing([TOP], [EAST, NORTH])
        for way in routing.ways:
            measured(routing, way, MB)
        assert routing.best(0.0) == STRAIGHT
        routing.order(EAST)
        assert (routing.best(1.0), routing.reason) == (VIA_EAST, "the plan says so")
        assert [view.is_ordered for view in routing.views()] == [False, True, False]
        routing.order(NORTH)
        assert routing.best(2.0) == VIA_NORTH
        routing.order("")
        assert routing.best(3.0) == STRAIGHT
        routing.order(EAST)
        assert routing.best(4.0) == VIA_EAST
        routing.order(None)
        assert routing.best(5.0) == STRAIGHT, "no plan: as ever"

    def test_a_way_that_nobody_knows_is_no_order(self) -> None:
        routing = Routing([TOP], [EAST])
        routing.order("elsewhere:1")
        assert routing.best(0.0) == STRAIGHT
        assert not any(view.is_ordered for view in routing.views())

    def test_it_may_name_a_way_that_is_slower_but_not_by_far(self) -> None:
        for factor, taken in ((1.0, VIA_EAST), (1.9, VIA_EAST), (2.1, STRAIGHT), (50.0, STRAIGHT)):
            routing = Routing([TOP], [EAST])
            measured(routing, STRAIGHT, factor * MB)
            measured(routing, VIA_EAST, MB)
            routing.order(EAST)
            assert routing.best(0.0) == taken, factor

    def test_a_cut_way_is_gone_around_whatever_the_plan_says_and_taken_again(self) -> None:
        routing = Routing([TOP], [EAST])
        routing.order(EAST)
        assert routing.best(0.0) == VIA_EAST
        routing.failed(VIA_EAST, 1.0)
        assert routing.best(1.0, [VIA_EAST]) == STRAIGHT
        for now in (2.0, 3.0):
            routing.answered(VIA_EAST, now)
        assert routing.best(4.0) == VIA_EAST

    def test_a_plan_and_a_measurement_that_disagree_do_not_make_it_waver(self) -> None:
        routing = Routing([TOP], [EAST])
        routing.order(EAST)
        changes, way = 0, routing.best(0.0)
        for minute in range(200):
            measured(routing, VIA_EAST, MB, 60.0 * minute)
            measured(routing, STRAIGHT, (1.9 if minute % 2 else 2.1) * MB, 60.0 * minute)
            new = routing.best(60.0 * minute)
            changes, way = changes + (new != way), new or way
        assert changes <= 1

    def test_what_was_measured_is_told_with_its_age(self) -> None:
        routing = Routing([TOP], [EAST, NORTH])
        measured(routing, VIA_EAST, MB, now=10.0, latency_s=0.2)
        routing.moved(STRAIGHT, 12.0, 1.0, up_bytes=1 << 20)
        [told] = routing.measured(15.0)
        assert told.view.way == VIA_EAST, "of the straight one nothing has come down yet"
        assert (told.up_age_s, told.down_age_s) == (5.0, 5.0)
        assert round(told.view.up_bytes_per_s) == round(told.view.down_bytes_per_s) == MB


class TestASlowLink:
    def test_another_way_is_taken_if_it_is_a_quarter_faster_and_only_then(self) -> None:
        for factor, taken in ((1.0, STRAIGHT), (1.2, STRAIGHT), (1.3, VIA_EAST), (10.0, VIA_EAST)):
            routing = Routing([TOP], [EAST])
            measured(routing, STRAIGHT, MB)
            measured(routing, VIA_EAST, factor * MB)
            assert routing.best(0.0) == taken, factor

    def test_the_straight_way_is_kept_where_nothing_is_known_of_the_others(self) -> None:
        routing = Routing([TOP], [EAST])
        measured(routing, STRAIGHT, 1.0)
        assert routing.best(0.0) == STRAIGHT

    def test_the_straight_way_is_not_left_while_nothing_is_known_of_it(self) -> None:
        routing = Routing([TOP], [EAST])
        measured(routing, VIA_EAST, 100 * MB)
        routing.answered(STRAIGHT, 0.0, 0.1)
        assert routing.best(0.0) == STRAIGHT

    def test_latency_counts_too(self) -> None:
        routing = Routing([TOP], [EAST])
        measured(routing, STRAIGHT, 100 * MB, latency_s=3.0)
        measured(routing, VIA_EAST, 100 * MB, latency_s=0.01)
        assert routing.best(0.0) == VIA_EAST

    def test_it_goes_back_when_the_straight_way_is_as_good_again_but_not_at_once(self) -> None:
        routing = Routing([TOP], [EAST])
        measured(routing, STRAIGHT, MB)
        measured(routing, VIA_EAST, 10 * MB)
        assert routing.best(0.0) == VIA_EAST
        measured(routing, STRAIGHT, 10 * MB, 1.0)
        assert routing.best(KEPT_S - 1.0) == VIA_EAST
        assert routing.best(KEPT_S + 1.0) == STRAIGHT

    def test_between_two_links_that_are_nearly_alike_it_does_not_waver(self) -> None:
        routing = Routing([TOP], [EAST])
        changes, way = 0, STRAIGHT
        for minute in range(200):
            measured(routing, STRAIGHT, MB, 60.0 * minute)
            measured(routing, VIA_EAST, (1.2 if minute % 2 else 1.3) * MB, 60.0 * minute)
            new = routing.best(60.0 * minute)
            changes, way = changes + (new != way), new or way
        assert changes <= 1


class TestAMovedServer:
    def test_the_next_address_is_tried_when_no_way_leads_to_the_first(self) -> None:
        routing = Routing([TOP, NEXT], [EAST])
        for way in (STRAIGHT, VIA_EAST):
            assert routing.best(0.0) == way
            routing.failed(way, 0.0)
        assert routing.best(1.0) == WayUp(NEXT)

    def test_it_never_goes_back_to_an_older_copy_while_the_new_one_answers(self) -> None:
        routing = Routing([TOP, NEXT])
        routing.failed(STRAIGHT, 0.0)
        assert routing.best(0.0) == WayUp(NEXT)
        routing.answered(WayUp(NEXT), 1.0)
        measured(routing, STRAIGHT, 100 * MB, 2.0)
        measured(routing, WayUp(NEXT), MB, 2.0)
        assert routing.best(3.0) == WayUp(NEXT)


class TestProbes:
    def test_a_way_that_works_is_probed_each_minute_and_a_cut_one_sooner_and_more_and_more_seldom(self) -> None:
        routing = Routing([TOP], [EAST])
        for way in routing.ways:
            measured(routing, way, MB)
        assert routing.due(PROBE_S - 1.0) == []
        assert routing.due(PROBE_S) == routing.ways
        routing.failed(STRAIGHT, 0.0)
        assert routing.due(1.0) == [STRAIGHT]
        for _ in range(9):
            routing.failed(STRAIGHT, 0.0)
        assert routing.due(29.0) == []
        assert routing.due(30.0) == [STRAIGHT]

    def test_small_calls_do_not_take_the_place_of_a_probe(self) -> None:
        """A way whose calls are all small would never be measured, and its rival always."""
        routing = Routing([TOP], [EAST])
        for second in range(100):
            routing.answered(STRAIGHT, float(second), 0.001)
            routing.moved(STRAIGHT, float(second), 0.001, up_bytes=2000)
        assert STRAIGHT in routing.due(100.0)

    def test_a_cut_way_that_has_answered_once_is_asked_again_soon(self) -> None:
        routing = Routing([TOP], [EAST])
        for _ in range(9):
            routing.failed(STRAIGHT, 0.0)
        routing.answered(STRAIGHT, 30.0)
        routing.moved(STRAIGHT, 30.0, 0.1, up_bytes=1 << 20)  # as a probe does
        assert STRAIGHT in routing.due(31.0)

    def test_a_probe_that_is_refused_is_an_answer_and_is_not_repeated_at_once(self) -> None:
        routing = Routing([TOP], [EAST])
        routing.probed_in_vain(STRAIGHT, 0.0)
        assert STRAIGHT not in routing.due(PROBE_S - 1.0)
        assert routing.best(0.0) == STRAIGHT
        assert routing.views()[0].is_whole

    def test_a_place_the_server_may_be_moved_to_is_left_alone_until_it_is_needed(self) -> None:
        routing = Routing([TOP, NEXT], [EAST])
        assert routing.due(0.0) == [STRAIGHT, VIA_EAST]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["failed", "answered", "moved", "best"]), st.integers(0, 9)))
)
def test_whatever_happens_there_is_a_way_and_it_is_one_of_those_given(story: list[tuple[int, str, int]]) -> None:
    routing = Routing([TOP, NEXT], [EAST, NORTH])
    now = 0.0
    for number, what, seconds in story:
        way, now = routing.ways[number], now + seconds
        if what == "failed":
            routing.failed(way, now)
        elif what == "answered":
            routing.answered(way, now, seconds / 10)
        elif what == "moved":
            routing.moved(way, now, seconds + 0.1, up_bytes=1 << 20)
        assert routing.best(now) in routing.ways
        avoided = routing.best(now, [way])
        assert avoided in routing.ways
        assert avoided != way
        assert sum(view.is_used for view in routing.views()) == 1
