"""The states of a cluster's members, as the server above shows them."""

from __future__ import annotations

import pytest

from outerstep.cli.status import _members
from outerstep.coordination.layers.lifecycle import PLACES, known_place
from outerstep.observe.status import ClusterStatus
from outerstep.server.controlling import clusters_of
from outerstep.types import LONGEST_PLACE, Heartbeat, MemberFacts
from unit.coordination.builders import Desk

SYNC, DRAINS = "TRAINING (sync)", "DRAINING (survivor's commit)"


def shown(*states: str) -> dict[str, str]:
    """Of a cluster whose leader tells of the members x, y and z."""
    desk = Desk("ab")
    facts = MemberFacts(size=3, members=("x", "y", "z"), states=states)
    desk.coordinator.heartbeat(Heartbeat(**desk.head("a"), step=1, steps_per_second=1.0, facts=facts), desk.now)
    clusters = clusters_of(desk.coordinator, {})
    assert clusters["b"].states == {}, "it has told nothing"
    return clusters["a"].states


def test_each_member_has_the_state_that_its_leader_has_told_of() -> None:
    assert shown(SYNC, DRAINS, "INIT") == {"x": SYNC, "y": DRAINS, "z": "INIT"}


@pytest.mark.parametrize("said", ["TRAINING (asleep)", "training", "\x1b[31mTRAINING", "[red]IDLE", ""])
def test_what_is_no_place_in_a_life_is_not_shown(said: str) -> None:
    assert shown(said, SYNC) == {"y": SYNC}, "nor is one of whom nothing was told"


def test_more_states_than_members_are_nobodys() -> None:
    assert shown(SYNC, SYNC, SYNC, DRAINS) == {"x": SYNC, "y": SYNC, "z": SYNC}


def test_every_place_fits_into_the_message() -> None:
    assert all(known_place(str(place)) and len(str(place)) <= LONGEST_PLACE for place in PLACES)


def test_the_table_of_workers_has_the_state_of_each_member() -> None:
    cluster = ClusterStatus(size=2, members=["x", "y"], leader="x", states={"x": SYNC, "y": DRAINS})
    assert _members(cluster) == "2: x TRAINING, y DRAINING, led by x"
    assert _members(ClusterStatus(size=2, members=["x", "y"])) == "2: x, y"
