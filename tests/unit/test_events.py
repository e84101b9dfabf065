"""What happens in a run: every kind of event has its line, with the fields that the reference lists."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outerstep.events import (
    ContributionLeftOut,
    DrainOrdered,
    Event,
    PlanChanged,
    SyncOrdered,
    VersionPublished,
    WorkerDied,
    WorkerJoined,
)
from outerstep.types import Agreement, Participant, Watched

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "status-and-events.md"


def kinds(of: type[Event] = Event) -> list[str]:
    return [each.kind for each in of.__subclasses__() if "kind" in vars(each)] + [
        kind for each in of.__subclasses__() for kind in kinds(each)
    ]


def test_every_kind_is_one_class_and_in_the_reference() -> None:
    """Only a round is told by two, of a server and of a peer: the same line with other fields."""
    found, reference = kinds(), REFERENCE.read_text()
    assert len(found) > 25
    assert {kind for kind in found if found.count(kind) > 1} == {"round"}
    assert [kind for kind in found if f"`{kind}`" not in reference] == []


@pytest.mark.parametrize(
    ("event", "kind", "facts"),
    [
        (WorkerJoined("a", "home", 2), "join", {"worker": "a", "host": "home", "incarnation": 2}),
        (WorkerDied("a", 9.5), "death", {"worker": "a", "silent_s": 9.5}),
        (DrainOrdered(["a", "b"], "enough"), "drain", {"workers": ["a", "b"], "reason": "enough"}),
        (SyncOrdered(["a"], ""), "sync", {"workers": ["a"], "reason": ""}),
        (PlanChanged(3, {"sync_every": 9}), "plan", {"revision": 3, "sync_every": 9}),
        (
            ContributionLeftOut("a", 0, 4, {"why": "too far"}),
            "left_out",
            {"worker": "a", "fragment": 0, "version": 4, "why": "too far"},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_facts_are_the_fields_in_their_order(event: Event, kind: str, facts: dict[str, object]) -> None:
    assert event.kind == kind
    assert json.dumps(event.facts) == json.dumps(facts)


def test_a_published_version_names_its_contributions_if_it_has_any() -> None:
    taken = (Participant(worker_id="a", sequence=3, weight=1.0, staleness=1, norm=0.12345678),)
    made = Agreement(fragment=1, version=7, anchor_hash="0" * 32, participants=taken)
    plain = {"fragment": 1, "version": 7, "hash": "0" * 32, "workers": ["a"], "sequences": [3], "staleness": [1]}
    plain |= {"weights": [1.0]}
    assert VersionPublished(made).facts == plain
    watched = Agreement(fragment=1, version=7, anchor_hash="0" * 32, participants=taken, watched=Watched())
    assert VersionPublished(watched).facts == {**plain, "norms": [0.123457]}
    alone = Agreement(fragment=0, version=1, anchor_hash="0" * 32, participants=())
    facts = {"fragment": 0, "version": 1, "hash": "0" * 32, "workers": [], "sequences": [], "staleness": []}
    facts |= {"weights": []}
    assert VersionPublished(alone).facts == facts
