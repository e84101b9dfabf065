"""What the worker's machine makes of an agreement: it adopts, carries, mixes, rebases, discards or reloads."""

from __future__ import annotations

import pytest

from outerstep.coordination.worker.effects import (
    Adopt,
    Carry,
    Mix,
    Note,
    NoteKind,
    PutOff,
    Rebase,
    Reload,
    Send,
    Sight,
    StartOver,
)
from outerstep.coordination.worker.machine import CHANGES, REPAIRS, Work
from outerstep.errors import ExchangeFailed, WorkerError
from outerstep.types import Participant
from unit.coordination.bench_worker import DONE, Bench, acts, kinds, send

SILENT = Sight(done=False, silent_s=11.0)


def deferred(steps_since: int = 2, **plan: object) -> Bench:
    """Four steps were sent and not answered; so many were taken since."""
    bench = Bench([0, 0], sync_every=8, **plan)
    bench.train(4)
    bench.look({0: SILENT})
    bench.train(steps_since)
    bench.machine.sync_all()
    return bench


class TestOurStepsAreInIt:
    def test_the_local_weights_become_the_agreed_ones(self) -> None:
        bench = Bench()
        bench.train(4)
        assert bench.land(0, 1) == [Note("agreed", 0, 1), Adopt(0)]
        assert bench[0].in_flight is None
        assert (bench[0].version, bench[0].oldest_base, bench[0].counted) == (1, 1, Work(4))
        assert (bench.metrics.sync_count, bench.metrics.steps_overwritten) == (1, 0)
        assert not bench.machine.waiting

    def test_steps_taken_meanwhile_are_overwritten_and_counted_as_that(self) -> None:
        bench = Bench(delay=3)
        bench.train(7)
        assert acts(bench.land(0, 1)) == [Adopt(0)]
        assert (bench.metrics.steps_overwritten, bench.unsent()) == (3, 0)

    def test_or_carried_along(self) -> None:
        bench = Bench(delay=3, carry=True)
        bench.train(7)
        assert acts(bench.land(0, 1)) == [Carry(0)]
        assert (bench.metrics.steps_overwritten, bench.unsent()) == (0, 3)
        assert (bench[0].version, bench[0].oldest_base, bench[0].counted) == (1, 1, Work(4))
        assert bench.train() == [send(base=1, keep=True)]

    def test_or_mixed(self) -> None:
        bench = Bench(delay=3, alpha=0.5)
        bench.train(7)
        assert acts(bench.land(0, 1)) == [Mix(0, 0.5)]
        assert (bench.metrics.steps_overwritten, bench.unsent()) == (0, 3)
        assert (bench[0].version, bench[0].oldest_base) == (1, 1)

    def test_without_steps_since_there_is_nothing_to_carry(self) -> None:
        bench = Bench(carry=True)
        bench.train(4)
        assert acts(bench.land(0, 1)) == [Adopt(0)]

    def test_it_says_so_if_they_were_left_out(self) -> None:
        bench = Bench()
        bench.train(4)
        others = Participant(worker_id="v", sequence=1, weight=0.0)
        ours = Participant(worker_id="w", sequence=1, weight=0.0)
        done = bench.land(0, 1, participants=(others, ours))
        assert done == [Note("left out", 0, 1, 4), Note("agreed", 0, 1), Adopt(0)]

    @pytest.mark.parametrize("who", [("v", 0.0), ("w", 1.0)])
    def test_but_not_if_only_others_were_or_they_count(self, who: tuple[str, float]) -> None:
        bench = Bench()
        bench.train(4)
        ours = Participant(worker_id=who[0], sequence=1, weight=who[1])
        assert kinds(bench.land(0, 1, participants=(ours,))) == ["agreed"]

    def test_nor_if_there_were_none(self) -> None:
        bench = Bench()
        bench.machine.finish()
        bench.machine.has_left = False
        bench[0].late_in = 2
        bench.machine.finish()
        ours = Participant(worker_id="w", sequence=1, weight=0.0)
        assert kinds(bench.land(0, 2, participants=(ours,))) == ["agreed"]

    def test_a_late_contribution_is_put_off_until_an_agreement_holds_it(self) -> None:
        bench = Bench()
        bench.train(4)
        assert acts(bench.land(0, 1, counted_in=2)) == [PutOff(0), Adopt(0)]
        assert (bench[0].late_in, bench.unsent(), bench[0].version) == (2, 0, 1)
        bench.train(4)
        assert acts(bench.land(0, 2, counted_in=2)) == [Adopt(0)]
        assert bench[0].late_in == 0

    def test_steps_of_a_late_contribution_that_are_lost_are_counted_as_discarded(self) -> None:
        bench = Bench()
        bench.train(4)
        assert Note("lost", 0, steps=5) in bench.land(0, 1, steps_lost=5)
        assert bench.metrics.steps_discarded == 5


class TestAfterASilence:
    def test_steps_taken_since_are_kept_whatever_the_plan_says(self) -> None:
        bench = deferred(2, alpha=0.5)
        done = bench.land(0, 1)
        assert acts(done)[0] == Carry(0)
        assert (bench.unsent(), bench[0].version) == (2, 1)

    def test_they_are_as_old_as_the_version_they_were_taken_on(self) -> None:
        bench = deferred(2)
        assert bench.land(0, 2)[-1] == send(0, base=2, oldest=0, steps=2)

    def test_and_discarded_if_that_is_too_old(self) -> None:
        bench = deferred(2)
        done = bench.land(0, 3)
        assert done == [Note("discarded", 0, 3, 2), Adopt(0)]
        assert (bench.metrics.steps_discarded, bench.metrics.sync_count, bench.unsent()) == (2, 1, 0)
        assert (bench[0].version, bench[0].oldest_base) == (3, 3)

    def test_without_steps_since_they_are_not(self) -> None:
        bench = deferred(0)
        assert acts(bench.land(0, 9)) == [Adopt(0)]
        assert (bench[0].version, bench[0].oldest_base) == (9, 9)


class TestItCameAboutWithoutUs:
    def test_the_unsent_steps_are_kept_for_the_next_round(self) -> None:
        bench = Bench([0, 0])
        bench.train(2)
        assert bench.miss(0, 1) == [Note("missed", 0, 1, 2), Rebase(0)]
        assert (bench[0].version, bench[0].oldest_base, bench.unsent()) == (1, 0, 2)
        assert (bench.metrics.missed_rounds, bench.metrics.sync_count) == (1, 0)

    def test_and_stay_as_old_as_they_are_however_often_that_happens(self) -> None:
        """The age limit holds for a worker that keeps missing rounds."""
        bench = Bench()
        bench.train(4)
        assert bench.miss(0, 1)[-1] == send(base=1, oldest=0)
        bench.miss(0, 2)
        assert bench[0].oldest_base == 0
        bench.train(4)
        assert bench.miss(0, 3) == [Note("discarded", 0, 3, 8), Adopt(0)]
        assert bench.metrics.steps_discarded == 8

    @pytest.mark.parametrize(("version", "kept"), [(2, True), (3, False)])
    def test_up_to_max_staleness(self, version: int, kept: bool) -> None:
        bench = Bench(max_staleness=2)
        bench.train(4)
        assert (bench.miss(0, version)[1] == Rebase(0)) is kept
        assert bench.unsent() == (4 if kept else 0)

    @pytest.mark.parametrize(
        ("above", "kept"), [((), False), ((1,), True), ((3,), True), ((0, 4), False), ((1, 2, 3), True)]
    )
    def test_versions_from_a_layer_above_make_them_no_older(self, above: tuple[int, ...], kept: bool) -> None:
        bench = Bench(max_staleness=2)
        bench.train(4)
        assert (bench.miss(0, 3, above=above)[1] == Rebase(0)) is kept

    def test_what_the_server_calls_too_old_is_too_old(self) -> None:
        bench = Bench()
        bench.train(4)
        assert bench.miss(0, 1, too_old=True) == [Note("discarded", 0, 1, 4), Adopt(0)]
        assert (bench[0].version, bench[0].oldest_base, bench[0].counted) == (1, 1, Work(4))
        assert (bench.metrics.steps_discarded, bench.metrics.missed_rounds) == (4, 1)

    def test_a_server_that_lost_rounds_takes_the_steps_with_it(self) -> None:
        bench = Bench([5])
        bench.train(4)
        bench.miss(0, 3)
        assert (bench[0].version, bench[0].oldest_base) == (3, 3)


class TestAgreementsThatComeAlong:
    def test_they_are_adopted_first_one_by_one(self) -> None:
        bench = Bench([0, 0, 0], sync_every=6)
        bench.train(2)
        bench.look({0: DONE})
        machine = bench.machine
        agreed = bench.came(0, 1, also=(bench.came(1, 4), bench.came(2, 3)))
        assert machine.outcome(agreed) == [Rebase(1)]
        assert (bench[1].version, bench[1].oldest_base, bench.flight(0).work) == (4, 0, Work(2))
        assert machine.confirmed(1, None) == [Rebase(2)]
        assert machine.confirmed(2, None) == [Note("agreed", 0, 1), Adopt(0)]
        assert machine.confirmed(0, None) == []
        assert not machine.waiting

    def test_what_is_in_flight_there_stays_in_flight(self) -> None:
        bench = Bench([0, 0], delay=3)
        bench.train(5)
        flight = bench.flight(1)
        bench.land(0, 1, also=(bench.came(1, 1),))
        assert bench.flight(1) is flight
        assert bench[1].version == 1


class TestAnAnchorThatIsNotTheAgreedOne:
    def test_is_fetched_whole_and_rebased_on(self) -> None:
        bench = Bench()
        bench.train(4)
        bench.look({0: DONE})
        machine = bench.machine
        machine.outcome(bench.came(0, 1))
        assert machine.confirmed(0, bench.came(0, 2)) == [Note("mended", 0, 1), Rebase(0)]
        assert (bench[0].version, bench[0].oldest_base, bench.metrics.anchor_repairs) == (2, 2, 1)
        assert machine.waiting == (0,)
        assert machine.confirmed(0, None) == []
        assert not machine.waiting

    def test_with_unsent_steps_as_old_as_they_are(self) -> None:
        bench = Bench([0, 0])
        bench.train(2)
        bench.look({0: DONE})
        bench.machine.outcome(bench.came(0, 1, counted=False))
        bench.machine.confirmed(0, bench.came(0, 2, steps_lost=1))
        assert (bench[0].version, bench[0].oldest_base, bench.metrics.steps_discarded) == (2, 0, 1)

    def test_but_not_for_ever(self) -> None:
        bench = Bench()
        bench.train(4)
        bench.look({0: DONE})
        bench.machine.outcome(bench.came(0, 1))
        for _ in range(REPAIRS - 1):
            bench.machine.confirmed(0, bench.came(0, 1))
        with pytest.raises(ExchangeFailed, match="fragment 0: even whole"):
            bench.machine.confirmed(0, bench.came(0, 1))
        assert bench.metrics.anchor_repairs == REPAIRS

    def test_each_anchor_has_as_many_repairs(self) -> None:
        bench = Bench()
        for version in range(1, 3 * REPAIRS):
            bench.train(4)
            bench.look({0: DONE})
            bench.machine.outcome(bench.came(0, version))
            bench.machine.confirmed(0, bench.came(0, version))
            bench.machine.confirmed(0, None)

    def test_after_too_many_the_next_may_be_repaired_again(self) -> None:
        bench = Bench()
        bench.train(4)
        for _ in range(2):
            bench.machine.sync_all()
            bench.look({0: DONE})
            bench.machine.outcome(bench.came(0, 1))
            for _ in range(REPAIRS - 1):
                bench.machine.confirmed(0, bench.came(0, 1))
            with pytest.raises(ExchangeFailed) as failure:
                bench.machine.confirmed(0, bench.came(0, 1))
            bench.machine.interrupted(failure.value)
            bench.train(4)


class TestSomebodyElseMovedTheWeights:
    """They are given up before anything is sent."""

    def test_between_two_exchanges(self) -> None:
        bench = Bench()
        bench.train(2)
        assert bench.machine.stepped(changed=True) == [Note("changed outside", steps=3), StartOver()]
        assert (bench.metrics.outside_changes, bench.metrics.steps_discarded, bench.unsent()) == (1, 3, 0)
        assert bench.train() == [send(steps=1)]

    def test_at_an_exchange_there_is_nothing_to_contribute(self) -> None:
        bench = Bench()
        bench.train(3)
        done = bench.machine.stepped(changed=True)
        assert done == [Note("changed outside", steps=4), StartOver(), send(steps=0)]
        assert acts(bench.land(0, 1)) == [Adopt(0)]

    def test_what_is_in_flight_counts(self) -> None:
        bench = Bench(delay=2, carry=True)
        bench.train(4)
        assert bench.machine.stepped(changed=True) == [Note("changed outside", steps=1), StartOver()]
        bench.train(1)
        assert acts(bench.land(0, 1)) == [Rebase(0)]
        assert (bench.unsent(), bench[0].counted) == (1, Work(5))

    @pytest.mark.parametrize("event", ["finish", "sync_all"])
    def test_before_a_forced_exchange_and_at_the_end(self, event: str) -> None:
        bench = Bench()
        bench.train(2)
        done = getattr(bench.machine, event)(changed=True)
        kind: NoteKind = "changed at the end" if event == "finish" else "changed outside"
        assert done[:2] == [Note(kind, steps=2), StartOver()]
        (sent,) = [effect for effect in done if isinstance(effect, Send)]
        assert sent.steps == 0, "others may wait for it"

    def test_a_script_that_does_so_all_the_time_is_stopped(self) -> None:
        bench = Bench(sync_every=100)
        for _ in range(CHANGES - 1):
            bench.machine.stepped(changed=True)
        with pytest.raises(WorkerError, match=r"5 times.*own_change.*outside_changes='keep'"):
            bench.machine.stepped(changed=True)

    def test_and_exchanges_without_steps_do_not_excuse_it(self) -> None:
        bench = Bench(sync_every=2)
        for version in range(1, CHANGES // 2 + 1):
            bench.machine.stepped(changed=True)
            bench.machine.stepped(changed=True)
            bench.land(0, version)
        with pytest.raises(WorkerError, match="5 times"):
            bench.machine.stepped(changed=True)

    def test_but_not_one_whose_steps_count_in_between(self) -> None:
        bench = Bench(sync_every=2)
        for version in range(1, 2 * CHANGES):
            bench.machine.stepped(changed=True)
            bench.machine.stepped()
            bench.land(0, version)
        assert bench.metrics.outside_changes == 2 * CHANGES - 1

    def test_when_some_have_counted_it_begins_to_count_anew(self) -> None:
        bench = Bench(sync_every=2 * CHANGES)
        for _ in range(CHANGES - 1):
            bench.machine.stepped(changed=True)
        bench.train(CHANGES + 1)
        bench.land(0, 1)
        for _ in range(CHANGES - 1):
            bench.machine.stepped(changed=True)
        assert bench.metrics.outside_changes == 2 * (CHANGES - 1)

    def test_it_can_be_asked_whether_the_next_step_exchanges(self) -> None:
        bench, seen = Bench(sync_every=6, delay=2), list[bool]()
        for step in range(1, 9):
            seen.append(bench.machine.exchanges_next)
            bench.train(1)
            if step == 8:
                assert bench.machine.waiting == (0,)
        assert seen == [False] * 5 + [True, False, True]


class TestNobodyHasAnyUseForIt:
    def reload(self) -> Bench:
        """Of three fragments one is refused, one is in flight, one is neither."""
        bench = Bench([0, 0, 0], sync_every=6, delay=3, carry=True)
        bench.train(5)
        assert bench.machine.waiting == (0,)
        return bench

    def test_all_local_weights_are_given_up(self) -> None:
        bench = self.reload()
        done = bench.land(0, 1, counted=False, refused="NaN")
        assert done == [Note("refused", 0, 1, why="NaN"), Adopt(0), Reload()]
        assert [bench.unsent(i) for i in range(3)] == [0, 4, 0], "four are in flight"
        assert [bench[i].oldest_base for i in range(3)] == [1, 0, 0]
        assert (bench[0].version, bench[0].in_flight) == (1, None)
        assert (bench.metrics.reloads, bench.metrics.steps_discarded, bench.metrics.missed_rounds) == (1, 5, 0)

    def test_and_training_goes_on(self) -> None:
        bench = self.reload()
        bench.land(0, 1, counted=False, refused="NaN")
        assert not bench.machine.waiting
        assert bench.train() == [send(2, steps=1, keep=True)]

    def test_what_was_sent_of_them_counts_and_what_was_learned_since_is_kept(self) -> None:
        bench = self.reload()
        bench.land(0, 1, counted=False, refused="NaN")
        assert bench.flight(1).overtaken
        bench.train(2)
        assert bench.machine.waiting == (1,)
        assert acts(bench.land(1, 1)) == [Rebase(1)]
        assert bench.unsent(1) == 2

    def test_what_was_sent_of_them_and_missed_its_round_is_lost(self) -> None:
        bench = self.reload()
        bench.land(0, 1, counted=False, refused="NaN")
        bench.train(2)
        assert acts(bench.land(1, 1, counted=False)) == [Rebase(1)]
        assert (bench.unsent(1), bench.metrics.steps_discarded) == (2, 5 + 4)

    def test_and_so_is_what_was_to_be_sent_and_never_was(self) -> None:
        bench = self.reload()
        bench.land(0, 1, counted=False, refused="NaN")
        bench.machine.dropped(1)
        assert (bench.unsent(1), bench.metrics.steps_discarded) == (0, 5 + 4)

    def test_even_if_it_was_deferred(self) -> None:
        bench = deferred(2)
        bench.flight(0).overtaken = True
        assert acts(bench.land(0, 9)) == [Adopt(0)]
        assert bench[0].oldest_base == 9

    def test_a_repair_comes_before_the_reload(self) -> None:
        bench = Bench()
        bench.train(4)
        bench.look({0: DONE})
        machine = bench.machine
        machine.outcome(bench.came(0, 1, counted=False, refused="NaN"))
        assert machine.confirmed(0, bench.came(0, 2)) == [Note("mended", 0, 1), Rebase(0)]
        assert machine.confirmed(0, None) == [Reload()]
        assert (bench[0].version, bench[0].oldest_base, bench.unsent()) == (2, 2, 0)
