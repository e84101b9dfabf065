"""Who leads a cluster of replicas, what all of them know of the layer above, and how a leader brings what it has."""

from __future__ import annotations

import threading

import pytest
import torch
from msgspec.structs import replace

pytest.importorskip("torchft")

from outerstep.topology.cluster_part import ClusterPart
from outerstep.topology.leadership import KeptRecord, Leadership, NotLeading
from outerstep.topology.torchft.state import ReplicaOffer, RunSnapshot, leader_among
from support import wait_until


def offer(name: str, *, joins: bool = False, leads: bool = False, steps: int = 0) -> ReplicaOffer:
    return ReplicaOffer(name, name, f"i-{name}", "run", "terms", joins, False, "digest", steps=steps, leads=leads)


class SilentLeader:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def published(self, target: object, versions: object) -> None:
        self.heard.append("published")

    def round_closed(self, fragment: int = 0) -> None:
        self.heard.append("round closed")

    def stop(self) -> None:
        self.heard.append("stopped")

    def stand_down(self, why: str) -> None:
        self.heard.append("stood down")

    is_at_rest = True


class TestWhoLeads:
    def test_the_lowest_name_if_nobody_does(self) -> None:
        assert leader_among([offer("c"), offer("b"), offer("d")]) == (1, False)

    def test_who_leads_goes_on_though_a_lower_name_is_there(self) -> None:
        assert leader_among([offer("a"), offer("b", leads=True)]) == (1, True)

    def test_a_newcomer_does_not_lead_those_who_were_there(self) -> None:
        assert leader_among([offer("a", joins=True), offer("b")]) == (1, False)

    def test_a_leader_that_is_free_hands_over_to_whom_it_was_told_to(self) -> None:
        others = [offer("a"), offer("c")]
        for said, rank in (
            ({}, 1),
            ({"yields": True}, 1),
            ({"named": "c"}, 1),
            ({"yields": True, "named": "c"}, 2),
            ({"yields": True, "named": "c", "aside": "record"}, 1),
            ({"yields": True, "named": "gone"}, 1),
        ):
            now = replace(offer("b", leads=True), **said)
            assert leader_among([others[0], now, others[1]]) == (rank, rank == 1), said

    def test_a_leader_that_leaves_hands_over_and_one_that_ends_with_all_others_does_not(self) -> None:
        leaving = replace(offer("a", leads=True), last=True)
        assert leader_among([leaving, offer("b")]) == (1, False)
        assert leader_among([leaving, replace(offer("b"), last=True)]) == (0, True)
        assert leader_among([replace(leaving, aside="move"), offer("b")]) == (0, True)

    def test_a_faster_line_takes_over_from_a_leader_that_has_led_for_long(self) -> None:
        slow = replace(offer("a", leads=True), yields=True, up_bytes_per_s=1e6)
        fast = replace(offer("b"), up_bytes_per_s=1e7)
        assert leader_among([slow, fast]) == (0, True)
        assert leader_among([replace(slow, settled=True), fast]) == (1, False)
        assert leader_among([replace(slow, reaches=False), fast]) == (1, False), "a line that is cut is not waited for"

    def test_of_two_that_think_they_lead_the_last_one_does(self) -> None:
        assert leader_among([replace(offer("a", leads=True), term=1), replace(offer("b", leads=True), term=2)]) == (
            1,
            True,
        )

    def test_where_all_are_new_one_of_them_does(self) -> None:
        assert leader_among([offer("b", joins=True), offer("a", joins=True)]) == (1, False)


class TestWhatAllKnow:
    def test_a_version_from_above_is_nobodys_turn(self) -> None:
        part = ClusterPart.fresh(2).after_move(0, 1, 4)
        assert RunSnapshot("run", [4, 3], ["", ""], [{}, {}], part).turn == 0
        assert RunSnapshot("run", [4, 3], ["", ""], [{}, {}]).turn == 1

    def test_it_is_part_of_what_is_compared(self) -> None:
        part = ClusterPart.fresh(1)
        digests = [RunSnapshot("run", [1], ["h"], [{}], p).digest for p in (None, part, part.after_move(0, 1, 1))]
        assert len(set(digests)) == 3

    def test_rounds_add_up_what_those_in_them_did_and_moves_do_not(self) -> None:
        part = ClusterPart.fresh(1).after_round([offer("a", steps=4), offer("b", steps=3)]).after_move(0, 7, 2)
        assert (part.rounds, part.steps, part.serials, part.moves, part.above) == (1, 7, (7,), (1,), ((2,),))


def leading() -> tuple[Leadership, SilentLeader]:
    leadership, leader = Leadership(wait_s=30.0), SilentLeader()
    leadership.make_leader = lambda target, is_new: leader
    leadership.lead({}, is_new=True)
    return leadership, leader


class TestTheLeader:
    def test_the_others_wait_until_it_has_joined(self) -> None:
        leadership, _ = leading()
        assert leadership.holds
        leadership.release(leadership.term)
        assert not leadership.holds

    def test_what_it_brings_is_there_until_all_have_it(self) -> None:
        leadership, _ = leading()
        record = KeptRecord(torch.arange(4, dtype=torch.uint8))
        thread = threading.Thread(target=leadership.keep, args=(leadership.term, record))
        thread.start()
        wait_until(lambda: leadership.aside is not None)
        aside = leadership.aside
        assert aside is not None
        assert (aside.kind, aside.record) == ("record", record)
        leadership.brought(aside)
        thread.join(10.0)
        assert not thread.is_alive()
        assert leadership.aside is None

    def test_who_fell_behind_stands_down_and_can_bring_nothing_more(self) -> None:
        leadership, leader = leading()
        term, raised = leadership.term, []

        def keep() -> None:
            try:
                leadership.keep(term, KeptRecord(torch.ones(1, dtype=torch.uint8)))
            except NotLeading as error:
                raised.append(error)

        thread = threading.Thread(target=keep)
        thread.start()
        wait_until(lambda: leadership.aside is not None)
        leadership.step_down()
        thread.join(10.0)
        assert raised
        assert leader.heard == ["stood down"]
        assert (leadership.leads, leadership.aside, leadership.holds) == (False, None, False)
        leadership.release(term)  # of a term that is over: nothing happens
        with pytest.raises(NotLeading):
            leadership.keep(term, KeptRecord())

    def test_at_the_end_it_leaves_the_layer_above_once(self) -> None:
        leadership, leader = leading()
        leadership.release(leadership.term)
        leadership.end()
        leadership.end()
        wait_until(lambda: leadership.has_ended)
        leadership.close()
        assert leader.heard == ["stopped"]

    def test_who_is_chosen_while_its_replica_leaves_stands_down_at_once(self) -> None:
        leadership, leader = Leadership(wait_s=30.0), SilentLeader()

        def make(target: object, is_new: bool) -> SilentLeader:
            leadership.close()  # by the training thread, meanwhile
            return leader

        leadership.make_leader = make
        leadership.lead({}, is_new=True)
        assert leader.heard == ["stood down"]
        assert not leadership.leads
