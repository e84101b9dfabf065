"""Members that hold one table and are a cluster: what their leader hears above, all decide alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from outerstep.coordination.layers.sub_leasing import SubLeasing
from outerstep.coordination.leases import LeaseTable
from outerstep.coordination.shared_leases import SharedLeases
from outerstep.coordination.shared_sub_leases import HeardLeases, LeaseNews, SharedSubLeases, SharedSubTable
from outerstep.coordination.worker.machine import Cycle, Metrics, Progress, Work, WorkerState
from outerstep.coordination.worker.units import LeaseRequest
from outerstep.errors import BadRequest
from outerstep.ranges import NONE, Ranges
from outerstep.types import Dataset, LeaseAnswer, LeaseStatement, Trained

MEMBERS = {"a": "1", "b": "1"}


class Cluster:
    """Two members with a table each, and the machine of the one that leads. The layer above is played by the test."""

    def __init__(self, fragments: int = 1, **of_data: Any) -> None:
        self.dataset = Dataset(**{"name": "train", "samples": 100, "unit_samples": 1, **of_data})
        self.fragments, self.now = fragments, 0.0
        self.leases = {name: SharedSubLeases([self.dataset]) for name in MEMBERS}
        self.leads("a")
        self.decides()  # each says how fast it is

    def leads(self, name: str) -> None:
        self.heard = HeardLeases(self.leases[name])
        self.machine = SubLeasing(self.heard)

    @property
    def table(self) -> SharedSubTable:
        return self.leases["a"].tables["train"]

    def due(self) -> LeaseRequest | None:
        self.now += 60.0
        found = self.machine.due(self.now, ())
        return found[0] if found else None

    def hears(self, *granted: tuple[int, int], **more: Any) -> LeaseRequest:
        request = self.due()
        assert request is not None
        self.machine.answered(request, LeaseAnswer(granted=granted, **{"state": "more", **more}), self.now)
        return request

    def decides(
        self, version: int = 0, fragment: int = 0, news: tuple[LeaseNews, ...] | None = None, **brought: Any
    ) -> None:
        said = {
            name: (
                LeaseStatement(
                    dataset="train", holds=tuple(self.table.held.get(name, NONE)), pace=2.0, turn=self.leases[name].turn
                ),
            )
            for name in MEMBERS
        }
        named = {name: (Trained(dataset="train", places=places),) for name, places in brought.items()}
        news = self.heard.news if news is None else news
        for one in self.leases.values():
            one.decide(MEMBERS, said, named, (fragment, version), self.fragments, news=news)
        assert len({one.digest for one in self.leases.values()}) == 1, "all decide alike"
        self.heard.decided(self.leases["a"], self.now)

    def named(self, versions: dict[int, int]) -> tuple[Trained, ...]:
        return self.machine.describe(self.machine.followed(versions))


def gave_up(steps: int) -> WorkerState:
    """As the worker above is when it has discarded so many steps."""
    return WorkerState(Work(), Cycle(0, 4), [Progress(0, Work(), 0)], metrics=Metrics(steps_discarded=steps))


def test_what_the_leader_is_granted_members_hold_when_they_have_decided() -> None:
    cluster = Cluster()
    assert cluster.leases["b"].answer("b", a_request(cluster)).state == "more"
    cluster.hears((0, 10))
    assert cluster.table.granted == NONE
    cluster.decides()
    assert cluster.table.granted == Ranges([(0, 10)])
    assert sum(places.total for places in cluster.table.held.values()) == 10
    assert cluster.heard.news == ()


def a_request(cluster: Cluster, *holds: tuple[int, int]) -> LeaseRequest:
    return LeaseRequest(cluster.dataset, 1, 1, holds, (), 0, True, 0.0)


def test_what_nobody_has_decided_on_is_the_clusters_already() -> None:
    cluster = Cluster()
    cluster.hears((0, 2))
    cluster.decides()
    cluster.decides(1, a=((0, 1),))
    assert cluster.hears((2, 6)).holds == ((0, 2),), "done here, and not sent, is held as well"
    request = cluster.due()
    assert request is None or request.holds == ((0, 6),)


def test_members_that_have_trained_all_and_brought_nothing_yet_are_not_taken_for_supplied() -> None:
    """Else ranks that wait for data in the middle of a round would wait for ever."""
    cluster = Cluster()
    cluster.hears((0, 6))
    cluster.decides()
    holds = {name: tuple(cluster.table.held[name]) for name in MEMBERS}
    said = {
        name: (LeaseStatement(dataset="train", holds=theirs, untrained=0, pace=0.5, turn=cluster.leases[name].turn),)
        for name, theirs in holds.items()
    }
    for one in cluster.leases.values():
        one.decide(MEMBERS, said, {})
    cluster.heard.decided(cluster.leases["a"], cluster.now)
    request = cluster.due()
    assert request is not None
    assert (request.want > 0, request.waits, request.untrained) == (True, True, 0)


def test_news_that_is_heard_again_changes_nothing() -> None:
    cluster = Cluster()
    cluster.hears((0, 10))
    news = cluster.heard.news
    cluster.decides()
    cluster.decides(1, a=((0, 2),))
    cluster.decides(2, news=news)
    assert cluster.table.done == Ranges([(0, 2)])
    assert cluster.table.granted == Ranges([(2, 10)])


def test_places_are_named_with_the_version_that_made_them_done() -> None:
    cluster = Cluster()
    cluster.hears((0, 10))
    cluster.decides()
    cluster.decides(1, a=((0, 2),))
    cluster.decides(2, a=((2, 3),))
    assert cluster.named({0: 1}) == (Trained(dataset="train", places=((0, 2),)),)
    assert cluster.named({0: 2}) == (Trained(dataset="train", places=((2, 3),)),)
    cluster.machine.kept({0: 1})
    cluster.decides(3)
    assert list(cluster.table.to_tell) == [(0, 2)]


def test_what_the_layer_above_takes_a_member_may_still_bring() -> None:
    cluster = Cluster()
    cluster.hears((0, 4))
    cluster.decides()
    mine = cluster.table.held["a"]
    cluster.hears(void=((0, 4),))
    cluster.decides()
    answer = cluster.leases["a"].answer("a", a_request(cluster, *mine))
    assert (Ranges(answer.void), cluster.table.granted) == (mine, NONE)
    cluster.decides(1, a=tuple(mine))
    assert cluster.named({0: 1}) == (Trained(dataset="train", places=tuple(mine)),)


def test_members_are_through_when_they_have_decided_that_nothing_is_left_above() -> None:
    cluster = Cluster()
    cluster.hears((0, 2))
    cluster.decides()
    cluster.decides(1, a=((0, 1),), b=((1, 2),))
    cluster.hears(state="over")
    assert cluster.leases["a"].answer("a", a_request(cluster)).state == "more"
    cluster.decides()
    assert cluster.leases["a"].answer("a", a_request(cluster)).state == "over"
    cluster.decides(
        news=(LeaseNews(dataset="train", number=cluster.table.heard + 1, kind="granted", places=((5, 6),)),)
    )
    assert {cluster.leases["a"].answer(name, a_request(cluster)).state for name in MEMBERS} == {"more"}


def test_a_successor_does_not_hold_what_its_predecessor_has_not_passed_on() -> None:
    cluster = Cluster()
    cluster.hears((0, 4))
    cluster.decides()
    cluster.hears((4, 8))
    assert cluster.heard.sub_tables["train"].granted == Ranges([(0, 8)])
    state = json.loads(json.dumps(cluster.machine.state()))
    cluster.leads("b")
    cluster.machine.load_state(state)
    request = cluster.due()
    assert request is not None
    assert request.holds == ((0, 4),)


def test_torn_units_are_given_up_by_all_with_what_was_agreed_above() -> None:
    cluster = Cluster(fragments=2)
    cluster.hears((0, 4))
    cluster.decides()
    mine = tuple(cluster.table.held["a"])
    cluster.decides(1, fragment=0, a=mine)
    cluster.machine.followed({0: 1, 1: 0})
    cluster.machine.exchanged(gave_up(3))
    cluster.decides(1, fragment=1, a=mine)
    assert cluster.table.spent == Ranges(mine), "half of them is in nothing any more"
    assert [one.places for one in cluster.named({0: 1, 1: 1})] == [()]


def test_members_hear_of_what_keeps_the_layer_above_from_leasing() -> None:
    cluster = Cluster()
    request = cluster.due()
    assert request is not None
    cluster.machine.failed(request, cluster.now, BadRequest("no such dataset"))
    cluster.decides()
    assert cluster.leases["b"].trouble == "no such dataset"
    cluster.hears((0, 2))
    cluster.decides()
    assert cluster.leases["b"].trouble == ""
    cluster.machine.lost("it was kicked")
    cluster.decides()
    assert cluster.leases["b"].trouble == "it was kicked"


def test_what_saved_states_hold_is_confirmed_above_before_anybody_trains_it() -> None:
    cluster = Cluster()
    cluster.hears((0, 20))
    cluster.decides()
    for one in cluster.leases.values():
        one.go_on_from(json.loads(json.dumps(one.kept)))
        one.doubt()
    cluster.leads("a")
    assert not cluster.leases["b"].is_confirmed
    request = cluster.hears(void=((0, 5),))
    assert (request.holds, request.waits) == (((0, 20),), True), "it asks although it has enough"
    cluster.decides()
    assert cluster.leases["b"].is_confirmed
    assert cluster.table.granted == Ranges([(5, 20)])


def test_a_worker_above_that_goes_on_uses_no_number_twice() -> None:
    """The machine of that worker knows those of before as agreed on."""
    cluster = Cluster()
    cluster.hears((0, 10))
    cluster.decides()
    cluster.decides(1, a=((0, 3),))
    assert cluster.machine.followed({0: 1}) == ((0, 3),)
    cluster.machine.begin({0: 1}, gives_up=True)
    cluster.decides(2, a=((3, 5),))
    assert cluster.machine.followed({0: 2}) == ((3, 5),)


def test_one_that_went_on_from_an_older_state_is_counted_when_it_brings_what_is_done() -> None:
    table = LeaseTable(Dataset(name="train", samples=10, unit_samples=1))
    table._hand_over("east", Ranges([(0, 4)]))
    for version in (1, 2, 3):
        if version > 1:
            table.started_again("east")
        table.accept("east", 0, version, ((0, 4),), 0.0)
        table.closed(0, version, (), 1)
    assert (table.done, table.repeated) == (Ranges([(0, 4)]), 4), "once: who says so for ever is not believed"


def test_a_unit_that_was_given_up_is_done_by_whoever_is_leased_it_next() -> None:
    """Also if it was that member's before, and another had brought it."""
    cluster = Cluster()
    cluster.hears((0, 1))
    cluster.decides()
    cluster.table.held, cluster.table.lapsed = {"b": Ranges([(0, 1)])}, {"a": Ranges([(0, 1)])}
    table = cluster.table
    table.open(MEMBERS, 5.0, may_lie=False)
    table.accept("b", 0, 1, ((0, 1),), 5.0)
    table.closed(0, 1, (), 1)
    assert table.overtaken == {"a": Ranges([(0, 1)])}
    table.grant(Ranges([(0, 1)]))
    table._hand_over("a", Ranges([(0, 1)]))
    table.accept("a", 0, 2, ((0, 1),), 6.0)
    table.closed(0, 2, (), 1)
    assert (table.done, table.held, table.repeated) == (Ranges([(0, 1)]), {}, 0)


# --- a table that another tells ------------------------------------------------------------------------------------


def played() -> SharedSubLeases:
    cluster = Cluster()
    cluster.hears((0, 10))
    cluster.decides()
    cluster.decides(1, a=((0, 2),))
    return cluster.leases["a"]


def test_a_member_that_heals_holds_the_same_table() -> None:
    leases = played()
    other = SharedSubLeases([leases.tables["train"].dataset])
    other.go_on_from(json.loads(json.dumps(leases.kept)))
    assert other.digest == leases.digest


LIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a place that was not granted": (lambda table: table["held"].update(c=[[50, 60]]), "granted"),
    "a place in two hands": (lambda table: table["held"].update(c=table["held"]["b"]), "twice"),
    "a place that is done and free": (lambda table: table["sets"].update(done=[[0, 4]]), "twice"),
    "granted and nowhere": (lambda table: table["above"].update(granted=[[2, 30]]), "granted"),
    "a place beyond the last": (lambda table: table["above"].update(to_tell=[[0, 1, [[0, 1000]]]]), "never leased"),
    "a version that is none": (lambda table: table["above"].update(to_tell=[[0, -1, [[0, 1]]]]), "to_tell"),
    "news that was never said": (lambda table: table["above"].update(heard=-1), "heard"),
    "no layer above": (lambda table: table.pop("above"), "without|never leased"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_table_that_cannot_be_is_refused_and_nothing_is_changed(lie: str) -> None:
    spoil, why = LIES[lie]
    leases = played()
    kept, before = json.loads(json.dumps(leases.kept)), leases.digest
    spoil(kept["tables"][0])
    with pytest.raises(BadRequest, match=why):
        leases.go_on_from(kept)
    assert leases.digest == before


def test_members_without_a_layer_above_do_not_go_on_from_such_a_table() -> None:
    leases = played()
    alone = SharedLeases([leases.tables["train"].dataset])
    with pytest.raises(BadRequest, match="with a layer above"):
        alone.go_on_from(json.loads(json.dumps(leases.kept)))
