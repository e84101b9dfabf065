"""A cluster's data: what it was granted above, leases on, has done, and says of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outerstep.coordination.layers.sub_leasing import HAS_NONE, IS_SILENT, SubLeasing
from outerstep.coordination.sub_leases import LayerLeases, SubLeaseTable
from outerstep.coordination.worker.machine import Cycle, Metrics, Progress, Work, WorkerState
from outerstep.coordination.worker.units import LeaseRequest
from outerstep.errors import BadRequest, Busy, PlanMismatch
from outerstep.ranges import NONE, Ranges
from outerstep.types import Dataset, Lease, LeaseAnswer, Offer, Trained


def make_dataset(**changes: Any) -> Dataset:
    return Dataset(**{"name": "train", "samples": 100, "unit_samples": 1, "epochs": 1, **changes})


class Cluster:
    """Its tables and its machine; members and the layer above are played by the test."""

    def __init__(self, fragments: int = 1, **of_data: Any) -> None:
        self.leases, self.fragments = LayerLeases(), fragments
        self.machine, self.dataset, self.now = SubLeasing(self.leases), make_dataset(**of_data), 0.0
        self.live: set[str] = set()
        self.numbers: dict[str, int] = {}

    @property
    def table(self) -> SubLeaseTable:
        return self.leases.sub_tables["train"]

    def ask(self, member: str, want: int = 4, holds: tuple[tuple[int, int], ...] = (), **said: Any) -> LeaseAnswer:
        self.live.add(member)
        number = self.numbers[member] = self.numbers.get(member, 0) + 1
        said = {"run_id": "run", "incarnation": 1, "waits": not holds, **said}
        message = Lease(worker_id=member, dataset=self.dataset, number=number, want=want, holds=holds, **said)
        return self.leases.lease(message, self.now, self.live)

    def due(self) -> LeaseRequest | None:
        self.now += 60.0
        found = self.machine.due(self.now, self.live)
        return found[0] if found else None

    def hears(self, *granted: tuple[int, int], **more: Any) -> LeaseRequest:
        request = self.due()
        assert request is not None
        said = {"state": "more", **more}
        self.machine.answered(request, LeaseAnswer(granted=granted, **said), self.now)
        return request

    def closes(self, member: str, version: int, *places: tuple[int, int], fragment: int = 0) -> None:
        self.table.accept(member, fragment, version, places, self.now)
        self.table.closed(fragment, version, (), self.fragments)

    def brings_a_part(self, member: str, *begun: tuple[int, int], version: int = 1) -> None:
        offer = Offer(
            run_id="run", worker_id=member, incarnation=1, fragment=0, sequence=1, size_bytes=0, base_version=0,
            oldest_base=0, codec="fp32", steps=1, data=(Trained(dataset="train", places=(), begun=begun),),
        )  # fmt: skip
        self.leases.accept(offer, version, self.now)
        self.leases.closed(0, version, (), self.fragments)

    def gives_up_what_it_sent(self) -> None:
        self.machine.followed({0: 2, 1: 0})
        self.machine.exchanged(state(given_up=1))

    def named(self, versions: dict[int, int]) -> tuple[Trained, ...]:
        return self.machine.describe(self.machine.followed(versions))

    def restarted(self) -> Cluster:
        other = Cluster(self.fragments)
        facts = json.loads(json.dumps(self.leases.remembered()))
        other.leases.resume(facts, self.now + 10.0, self.live, forgetful=False)
        other.machine.load_state(json.loads(json.dumps(self.machine.state())))
        other.dataset, other.now, other.live = self.dataset, self.now, self.live
        return other


def test_a_member_waits_for_what_the_layer_above_has_not_granted_and_is_told_so() -> None:
    cluster = Cluster()
    answer = cluster.ask("a")
    assert (answer.state, answer.granted, answer.waiting_for) == ("more", (), "the layer above")
    request = cluster.hears()
    assert (request.want > 0, request.waits, request.holds) == (True, True, ())
    assert cluster.ask("a").waiting_for == HAS_NONE
    cluster.hears(waiting_for="the layer above it")
    assert cluster.ask("a").waiting_for == f"{HAS_NONE}: the layer above it"
    failed = cluster.due()
    assert failed is not None
    cluster.machine.failed(failed, cluster.now)
    assert cluster.ask("a").waiting_for == IS_SILENT
    cluster.hears((7, 9))
    assert cluster.ask("a").granted == ((7, 9),)
    assert cluster.ask("b").granted == (), "nothing is leased that was not granted"


def test_more_than_was_asked_for_and_places_that_are_none_are_not_taken() -> None:
    cluster = Cluster()
    cluster.ask("a")
    request = cluster.hears((90, 100), (1 << 40, 1 << 41))
    assert cluster.table.granted == Ranges([(90, 90 + request.want)])
    assert request.want < 10


def test_what_is_done_in_a_version_is_named_when_what_is_sent_holds_that_version() -> None:
    cluster = Cluster()
    cluster.ask("a")
    cluster.hears((0, 4))
    cluster.ask("a", 4)
    cluster.closes("a", 1, (0, 1))
    cluster.closes("a", 2, (1, 2))
    assert cluster.table.done.total == 2
    assert cluster.named({0: 1}) == (Trained(dataset="train", places=((0, 1),)),)
    assert cluster.named({0: 1}) == ()
    assert cluster.hears().holds == ((0, 4),), "the layer above is told of all that no agreement of it has"
    assert cluster.named({0: 2}) == (Trained(dataset="train", places=((1, 2),)),)


def test_a_restarted_cluster_names_what_its_record_does_not_know_and_nothing_else() -> None:
    cluster = Cluster()
    cluster.ask("a")
    cluster.hears((0, 4))
    cluster.ask("a", 3)
    cluster.closes("a", 1, (0, 1))
    cluster.named({0: 1})
    cluster.machine.kept({0: 1})
    cluster.closes("a", 2, (1, 2))
    again = cluster.restarted()
    assert again.named({0: 2}) == (Trained(dataset="train", places=((1, 2),)),)
    request = again.due()
    assert request is not None
    assert request.holds == ((0, 4),)
    assert again.table.unclaimed == Ranges([(3, 4)]), "it may have been leased since the record"
    assert again.ask("a", 0, holds=((2, 3), (3, 4))).void == ()
    assert again.table.held["a"] == Ranges([(2, 4)])


def test_after_a_restart_what_lies_ready_is_leased_as_soon_as_all_members_have_said_what_they_hold() -> None:
    cluster = Cluster()
    cluster.ask("a")
    cluster.ask("b")
    cluster.hears((0, 6))
    cluster.ask("a", 1)
    again = cluster.restarted()
    assert again.ask("a", 2, holds=((0, 1),)).granted == (), "it may be b's"
    assert again.ask("b", 2).granted == ()
    assert again.ask("b", 2).granted == ((1, 3),)


def state(given_up: int = 0, units: Any = ()) -> WorkerState:
    progress = Progress(0, Work(), 0)
    return WorkerState(Work(units=units), Cycle(0, 1), [progress], Metrics(steps_discarded=given_up))


@pytest.mark.parametrize("dropped", ["spent", "again"])
def test_a_unit_of_which_a_part_was_given_up_is_given_up(dropped: str) -> None:
    cluster = Cluster(fragments=2, dropped=dropped)
    cluster.ask("a")
    cluster.hears((0, 4))
    cluster.ask("a", 3)
    cluster.closes("a", 1, (0, 1), fragment=0)
    assert cluster.named({0: 1, 1: 0}) == (Trained(dataset="train", places=(), begun=((0, 1),)),)
    cluster.closes("a", 1, (0, 2), fragment=1)  # the other part of unit 0, and the first of unit 1
    assert cluster.table.done == Ranges([(0, 1)])
    cluster.machine.exchanged(state(given_up=3))
    if dropped == "spent":
        assert cluster.table.given_up == Ranges([(0, 1)])
        assert cluster.hears().dropped == ((0, 1),)
        assert cluster.table.given_up == NONE
    else:
        assert cluster.table.free == Ranges([(0, 1)])
        assert cluster.table.repeated == 1
    cluster.closes("a", 2, (1, 2), fragment=0)
    assert 1 in cluster.table.done, "of unit 1 nothing was given up: it came after what was sent"


def test_what_was_taken_away_members_may_still_bring_and_it_is_named() -> None:
    cluster = Cluster()
    cluster.ask("a")
    cluster.hears((0, 4))
    assert cluster.ask("a", 2).granted == ((0, 2),)
    cluster.ask("b", 4)
    cluster.hears(void=((1, 4),))
    assert cluster.table.granted == Ranges([(0, 1)])
    assert cluster.ask("a", 0, holds=((0, 2),)).void == ((1, 2),)
    cluster.closes("a", 1, (0, 2))
    assert cluster.named({0: 1}) == (Trained(dataset="train", places=((0, 2),)),)


def test_what_nobody_trains_any_more_goes_back() -> None:
    cluster = Cluster()
    cluster.ask("a")
    cluster.hears((0, 4))
    cluster.ask("a", 1)
    cluster.live.clear()
    cluster.leases.gone("a")
    request = cluster.due()
    assert request is not None
    assert request.holds == ((0, 1),), "what it may still bring stays"
    assert cluster.machine.to_note


def test_the_end_is_told_when_the_layer_above_has_nothing_left_since_somebody_waits() -> None:
    cluster = Cluster()
    cluster.ask("a")
    cluster.hears((0, 1))
    cluster.ask("a", 1)
    assert cluster.ask("a", 1, holds=((0, 1),)).state == "more"
    cluster.hears(state="over")
    assert cluster.ask("a", 1, holds=((0, 1),)).state == "over"
    cluster.now += 1.0
    assert cluster.ask("b", 1).state == "more", "by now the layer above may have something again"
    cluster.hears(state="over")
    assert cluster.ask("b", 1).state == "over"


def test_one_way_units_are_never_leased_twice_and_each_lease_is_recorded() -> None:
    cluster = Cluster(again=False)
    cluster.ask("a")
    cluster.hears((0, 4))
    cluster.leases.take_note()
    assert cluster.ask("a", 4).granted == ((0, 4),)
    assert cluster.leases.take_note()
    cluster.live.clear()
    cluster.leases.gone("a")
    assert cluster.table.lost == Ranges([(0, 4)])
    request = cluster.due()
    assert request is None or request.holds == ((0, 4),), "the layer above must not call them lost yet"
    assert cluster.ask("b", 4).granted == ()


def test_what_cannot_be_leased_on_is_refused_by_name() -> None:
    cluster = Cluster()
    cluster.leases.goes_back = True
    with pytest.raises(BadRequest, match="records checkpoints"):
        cluster.ask("a")
    cluster.leases.goes_back = False
    cluster.ask("a")
    request = cluster.due()
    assert request is not None
    cluster.machine.failed(request, cluster.now, PlanMismatch("another seed"))
    with pytest.raises(PlanMismatch, match="another seed"):
        cluster.ask("a")
    cluster.hears((0, 1))
    assert cluster.ask("a", 1).granted == ((0, 1),), "when the layer above has changed its mind, so has the cluster"
    cluster.machine.lost("it was fenced")
    with pytest.raises(BadRequest, match="has lost it: it was fenced"):
        cluster.ask("a")


def test_a_table_of_a_server_alone_is_no_clusters_and_the_other_way_round() -> None:
    cluster = Cluster()
    cluster.leases.is_below = False
    cluster.ask("a")
    cluster.leases.is_below = True
    with pytest.raises(PlanMismatch, match="leased by this server alone"):
        cluster.ask("a")
    cluster.leases.forget("train")
    cluster.ask("a")
    cluster.leases.is_below = False
    with pytest.raises(Busy, match="has not begun to speak"):
        cluster.ask("a")


def test_a_dataset_that_is_forgotten_below_goes_back() -> None:
    cluster = Cluster()
    cluster.ask("a")
    cluster.hears((0, 4))
    cluster.leases.forget("train")
    assert cluster.hears().holds == ()
    assert cluster.due() is None, "once"
    cluster.ask("a")
    assert cluster.hears((0, 4)).holds == ()
    assert cluster.table.granted == Ranges([(0, 4)])


def test_an_offer_says_of_what_it_may_hold_a_part() -> None:
    """A server in the middle gives it up with its own model."""
    site = Cluster(fragments=2)
    site.ask("east")
    site.hears((0, 4))
    site.ask("east", 2)
    site.brings_a_part("east", (0, 1))
    site.gives_up_what_it_sent()
    assert site.table.given_up == Ranges([(0, 1)])


def test_nobody_tears_a_unit_that_it_was_never_leased() -> None:
    """A unit of which somebody begun a part may be given up: a liar that names those of others would have them trained
    in vain."""
    site = Cluster(fragments=2)
    site.ask("east")
    site.hears((0, 8))
    site.ask("east", 2)
    site.ask("west", 2)
    site.brings_a_part("liar", (0, 8))
    site.brings_a_part("west", (0, 3), (6, 8), version=2)  # of which (2, 3) is its own
    site.gives_up_what_it_sent()
    assert site.table.given_up == Ranges([(2, 3)])
    assert site.table.held == {"east": Ranges([(0, 2)]), "west": Ranges([(3, 4)])}


def test_after_a_restart_a_part_is_of_whoever_says_that_it_holds_the_unit() -> None:
    site = Cluster(fragments=2)
    site.ask("east")
    site.hears((0, 4))
    site.ask("east", 2)
    again = site.restarted()
    again.brings_a_part("east", (1, 3))
    assert again.table.held["east"] == Ranges([(0, 3)]), "it was not known to hold unit 2"
    again.gives_up_what_it_sent()
    assert again.table.given_up == Ranges([(1, 3)])
