"""A run of which nobody has said yet what it trains: what the coordinator makes of names that come late."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from outerstep.coordination.server.naming import Naming
from outerstep.coordination.server.plan import Settled
from outerstep.coordination.server.rounds import Fragment
from outerstep.errors import Conflict, PlanMismatch
from outerstep.types import Manifest, ParameterSpec, Wishes
from unit.coordination.builders import MANIFEST, SIZE_BYTES, Desk, make_agreement, make_join, make_plan

FIRST = 3  # the version that every fragment begins with


def unnamed(workers: str = "ab", *, fragments: int = 2) -> Desk:
    desk = Desk(workers, fragments=fragments)
    desk.coordinator.naming = Naming(first=FIRST)
    return desk


def settled(desk: Desk) -> Settled:
    found = desk.coordinator.settled
    assert found is not None
    return found


def refit(desk: Desk, *, kept: int, count: int = 2, revision: int = 1, naming: Naming | None = None) -> list[Fragment]:
    """`count` fragments in all, of which the first `kept` are those that were there."""
    new = [Fragment.at(make_agreement(FIRST, fragment=i), SIZE_BYTES) for i in range(kept, count)]
    manifest = Manifest(parameters=(ParameterSpec(name="z", shape=(5, 2), dtype="float32"),))
    desk.coordinator.refit(
        plan=replace(make_plan(count), revision=revision),
        settled=settled(desk),
        manifest=manifest,
        fragments=new,
        naming=naming,
        kept=kept,
    )
    return new


class TestRefitting:
    def test_the_first_fragments_stay_as_they_are_and_the_others_are_replaced(self) -> None:
        desk = unnamed()
        before = list(desk.coordinator.fragments)
        new = refit(desk, kept=1, count=3)
        assert desk.coordinator.fragments[0] is before[0]
        assert all(ours is made for ours, made in zip(desk.coordinator.fragments[1:], new, strict=True))
        assert desk.coordinator.plan is not None
        assert desk.coordinator.plan.revision == 1
        assert desk.coordinator.manifest is not None
        assert [spec.name for spec in desk.coordinator.manifest.parameters] == ["z"]
        assert desk.coordinator.model_bytes == 4 * 10
        assert desk.coordinator.budget.per_fragment.keys() == {0, 1, 2}

    def test_a_round_that_has_begun_expects_those_that_are_here(self) -> None:
        desk = unnamed("ab")
        refit(desk, kept=1)
        assert (desk.expected(0), desk.expected(1)) == ({"a", "b"}, {"a", "b"})

    def test_one_in_quarantine_is_not_expected_by_it(self) -> None:
        desk = unnamed("ab")
        worker = desk.coordinator.members.find("a")
        assert worker is not None
        conduct = worker.conduct
        while not conduct.is_quarantined(desk.now):
            conduct.offend(Conflict("two faces"), desk.now)
        desk.coordinator.members.quarantined(worker)
        refit(desk, kept=1)
        assert desk.expected(1) == {"b"}

    def test_before_the_start_nobody_is_expected(self) -> None:
        desk = Desk(num_workers=2, fragments=2)
        desk.coordinator.naming = Naming()
        desk.join("a")
        refit(desk, kept=0)
        assert (desk.expected(0), desk.expected(1)) == (set(), set())

    def test_what_an_operator_had_planned_is_part_of_the_new_plan_and_waits_no_longer(self) -> None:
        desk = unnamed()
        desk.coordinator.next_plan = replace(make_plan(2), sync_every=9)
        refit(desk, kept=1)
        assert desk.coordinator.next_plan is None

    def test_what_is_remembered_says_from_which_version_the_new_fragments_begin(self) -> None:
        desk = unnamed()
        assert "refitted_from" not in desk.coordinator.remember().facts
        assert desk.coordinator.remember().manifest is None
        refit(desk, kept=1, naming=Naming(first=FIRST, named=1))
        remembered = desk.coordinator.remember()
        assert remembered.facts["refitted_from"] == FIRST
        assert remembered.manifest == desk.coordinator.manifest
        assert remembered.facts["naming"] == {"first": FIRST, "named": 1, "whole": False, "imported": False}
        refit(desk, kept=2, revision=2)
        assert desk.coordinator.naming is None
        assert "naming" not in desk.coordinator.remember().facts

    def test_who_joined_by_other_fragments_must_join_again_before_it_contributes(self) -> None:
        desk = unnamed()
        refit(desk, kept=1)
        with pytest.raises(PlanMismatch, match="settled after 'a' had joined"):
            desk.offer("a")
        desk.join("a", start=2)
        assert desk.offer("a").state == "send"

    def test_more_fragments_beside_those_that_are_there_concern_nobody_who_joined(self) -> None:
        desk = unnamed(fragments=1)
        refit(desk, kept=1, count=2)
        assert desk.offer("a").state == "send"


class TestNaming:
    def test_a_contribution_by_the_plans_own_names_settles_them(self) -> None:
        desk = unnamed()
        desk.offer("a")
        assert desk.coordinator.naming == Naming(first=FIRST, named=2, whole=True)

    def test_names_that_others_gave_stay_as_they_are(self) -> None:
        desk = unnamed()
        desk.coordinator.naming = Naming(first=FIRST, named=1)
        desk.offer("a")
        assert desk.coordinator.naming == Naming(first=FIRST, named=1)

    def test_a_manifest_is_not_compared_with_what_it_will_settle(self) -> None:
        desk = unnamed()
        other = replace(MANIFEST, parameters=MANIFEST.parameters[:1])
        desk.coordinator.check_join(make_join("c", manifest=other, wishes=Wishes(sync_every=9)), 0.0)
        with pytest.raises(PlanMismatch, match="sync_every"):
            desk.coordinator.check_join(make_join("c", wishes=Wishes(sync_every=9)), 0.0)
