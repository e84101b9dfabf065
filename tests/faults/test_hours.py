"""Single hardships in virtual time, each with a story: what one row of the table of faults promises, seen closely."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from outerstep.coordination.server.rounds import RoundRules
from outerstep.simulate import History, Scenario
from outerstep.simulate.network import Conditions
from outerstep.simulate.scenario import Fault
from outerstep.simulate.world import World

HOUR_S = 3_600.0
THREE = Scenario(rules=RoundRules(num_workers=3, round_deadline_s=20.0), calm_after_s=200.0)


def told(scenario: Scenario, *, seed: int = 7, story: Callable[[World], None] = lambda world: None) -> World:
    """A run that ends well."""
    log: list[str] = []
    world = World(scenario, seed, log=log)
    story(world)
    world.run()
    assert not world.history.violations, "\n".join([*log[-40:], *world.history.violations])
    return world


def contributors(history: History, fragment: int = 0) -> list[set[str]]:
    """Of each round."""
    return [{key.worker_id for key, _ in made.contents} for made in history.rounds[fragment]]


def cut_off(world: World, *links: str) -> None:
    world.network.cut |= {pair for link in links for pair in ((link, "server"), ("server", link))}


def versions(world: World) -> int:
    return world.server.coordinator.fragments[0].published.version


@pytest.mark.row("F01")
def test_a_worker_killed_in_its_local_steps_is_not_waited_for_beyond_the_deadline() -> None:
    scenario = replace(THREE, faults=(Fault("crash", 33.0, 60.0, worker=1),), heartbeat_timeout_s=600.0)
    world = told(scenario)
    without = [names for names in contributors(world.history) if "w1" not in names]
    assert without, "rounds went on without it"
    assert all(names == {"w0", "w2"} for names in without)
    assert contributors(world.history)[-2] == {"w0", "w1", "w2"}


@pytest.mark.row("F03")
def test_a_worker_killed_after_it_was_accepted_counts_once_and_returns_to_the_new_weights() -> None:
    def story(world: World) -> None:
        def kill_when_accepted() -> None:
            member = world.server.coordinator.members.find("w0")
            if member is not None and member.last_sequence(0) == 3:
                world.current[0].kill()
                world.agenda.after(10.0, lambda: world.current.__setitem__(0, world._start(0)))
            else:
                world.agenda.after(0.01, kill_when_accepted)

        world.agenda.at(1.0, kill_when_accepted)

    world = told(THREE, story=story)
    counted = [key for made in world.history.rounds[0] for key, _ in made.contents if key.worker_id == "w0"]
    assert [key.sequence for key in counted].count(3) == 1
    assert counted[3].sequence == 4, "the new process goes on with the next sequence"


@pytest.mark.row("F04")
def test_lost_answers_change_nothing_but_the_time_it_takes() -> None:
    """Every request arrives, and every other answer is lost."""

    def story(world: World) -> None:
        flip = iter(range(10**9))
        send = world.network.send

        def lossy(source: str, target: str, deliver: Callable[[bool], None]) -> None:
            if source != "server" or next(flip) % 2:
                send(source, target, deliver)
            else:
                world.network.lost += 1

        world.network.send = lossy  # type: ignore[method-assign]

    world = told(replace(THREE, rules=RoundRules(num_workers=3)), story=story)
    assert world.network.lost > 50
    assert all(names == {"w0", "w1", "w2"} for names in contributors(world.history)[:-1])


@pytest.mark.row("F05")
def test_when_every_message_comes_twice_and_in_any_order_each_step_counts_once() -> None:
    def story(world: World) -> None:
        always = Conditions(delay_s=1.0, repeat=1.0)
        world.network.conditions = always
        world.agenda.at(0.0, lambda: setattr(world.network, "conditions", always))

    world = told(THREE, story=story)
    assert world.network.repeated > 200
    assert len(contributors(world.history)) > 3


@pytest.mark.row("F06")
@pytest.mark.parametrize("quorum", [None, 2])
def test_a_late_contribution_is_rebased_or_counts_in_the_next_round(quorum: int | None) -> None:
    """w2 is three times as slow as the others, who do not wait for it."""
    rules = RoundRules(num_workers=3, quorum=quorum, round_deadline_s=3.0, max_staleness=8)
    world = told(replace(THREE, rules=rules, step_s=(1.0, 1.0, 3.0)))
    made = world.history.rounds[0]
    staleness = [p.staleness for made_here in world.server._newest for p in made_here.participants]
    assert world.history.faults["late"] == 0 if quorum is None else world.history.faults["late"] > 3
    assert staleness
    if quorum is None:
        missed = sum("w2" not in names for names in contributors(world.history))
        assert missed > 3, "the rounds closed without it"
    steps = {step for one in made for key, names in one.contents for step in names if key.worker_id == "w2"}
    slow = world.current[2]
    assert len(steps) == slow.steps_taken - slow.first_step, "and none of its steps was lost"


@pytest.mark.row("F07")
def test_the_old_process_is_fenced_when_it_wakes_up() -> None:
    world = told(replace(THREE, faults=(Fault("replace", 30.0, 40.0, worker=1),)))
    old, new = [worker for worker in world.everyone if worker.worker_id == "w1"]
    assert not old.alive
    assert not old.left
    assert new.left
    sources = {step[1] > new.first_step for f, step in world.history.applied if step[0] == "w1"}
    assert sources == {False, True}, "what the old one contributed before counts; then the new one's"


@pytest.mark.slow
@pytest.mark.row("F09")
def test_a_server_that_was_away_for_an_hour_is_not_run_over() -> None:
    """Twenty workers train on to their limit and wait; when it is back, they do not all come at once."""
    workers, gone_at, back_at = 20, 60.0, 60.0 + HOUR_S
    scenario = Scenario(
        rules=RoundRules(num_workers=workers, quorum=15, max_staleness=64),
        workers=workers,
        step_s=(1.0,),
        offline_exchanges=4,
        heartbeat_timeout_s=60.0,
        heartbeat_every_s=15.0,
        faults=(Fault("server_crash", gone_at, HOUR_S),),
        calm_after_s=back_at,
    )
    taken: list[int] = []

    def story(world: World) -> None:
        count = lambda: taken.extend(worker.steps_taken - worker.first_step for worker in world.everyone)  # noqa: E731
        world.agenda.at(back_at, count)

    world = told(scenario, story=story)
    assert len(taken) == workers, "nobody gave up"
    assert min(taken) >= gone_at / 2 + scenario.offline_exchanges * scenario.sync_every, "they went on to their limit"
    assert max(taken) <= gone_at + (1 + scenario.offline_exchanges) * scenario.sync_every, "and no further"
    per_second = Counter(int(moment) for moment in world.history.requests)
    before = max(count for second, count in per_second.items() if second < gone_at)
    after = [per_second[int(back_at) + second] for second in range(60)]
    assert sum(after) > workers
    assert max(after) <= 1.5 * before, "no more at once than in an ordinary round"
    assert after[0] <= before / 2, "they come one after the other"


@pytest.mark.row("F13")
def test_the_others_go_on_while_one_is_cut_off_for_three_rounds_and_it_comes_back() -> None:
    world = told(replace(THREE, faults=(Fault("cut", 30.0, 80.0, worker=0),)))
    alone = [i for i, names in enumerate(contributors(world.history)) if "w0" not in names]
    assert len(alone) >= 3
    assert any("w0" in names for names in contributors(world.history)[alone[-1] :])


@pytest.mark.row("F13")
@pytest.mark.parametrize("kind", ["cut_up", "cut_down"])
def test_a_link_that_is_cut_in_one_direction_heals(kind: str) -> None:
    world = told(replace(THREE, faults=(Fault(kind, 30.0, 60.0, worker=0),)))
    assert world.network.lost
    assert contributors(world.history)[-2] == {"w0", "w1", "w2"}


@pytest.mark.row("F13")
def test_below_min_workers_nothing_closes_and_status_says_why() -> None:
    seen: list[tuple[int, str]] = []

    def story(world: World) -> None:
        def look() -> None:
            coordinator = world.server.coordinator
            seen.append((versions(world), coordinator.verdict(coordinator.fragments[0], world.agenda.now).waiting_for))

        world.agenda.at(30.0, lambda: cut_off(world, "w0", "w1"))
        for moment in (60.0, 110.0):
            world.agenda.at(moment, look)
        world.agenda.at(120.0, world.network.cut.clear)

    world = told(replace(THREE, rules=RoundRules(num_workers=3, min_workers=2)), story=story)
    (version, why), (later, still) = seen
    assert version == later
    assert why == still == "at least 2 (min_workers): 1 contributed, 0 more alive"
    assert world.history.round_count > version + 3, "all heal"


@pytest.mark.row("F14")
def test_a_link_that_flaps_for_an_hour_makes_progress_and_sends_few_bytes_twice() -> None:
    def story(world: World) -> None:
        def flap(link: str, is_up: bool) -> None:
            pair = {(link, "server"), ("server", link)}
            is_over = world.agenda.now > HOUR_S - 20.0
            world.network.cut = world.network.cut - pair if is_up or is_over else world.network.cut | pair
            if not is_over:
                world.agenda.after(world.rng.uniform(2.0, 15.0), lambda: flap(link, not is_up))

        for i in range(3):
            world.agenda.at(10.0 + i, lambda link=f"w{i}": flap(link, False))  # type: ignore[misc]

    world = told(replace(THREE, parts=8, calm_after_s=HOUR_S), story=story)
    history = world.history
    assert world.network.lost > 1_000
    assert history.round_count > 50
    times_each = sum(history.sent.values()) / len(history.sent)
    assert 1.0 < times_each <= 2.0, "no byte more than twice on average"


@pytest.mark.row("F18")
def test_a_joiner_in_the_middle_of_a_round_counts_from_the_next() -> None:
    seen: list[tuple[bool, set[str]]] = []

    def story(world: World) -> None:
        world.current[2].kill()

        def join() -> None:
            world.current[2] = world._start(2)
            look(world.server.coordinator.fragments[0].round.version)

        def look(version: int) -> None:
            coordinator = world.server.coordinator
            if "w2" in coordinator.members.live_ids:
                open_round = coordinator.fragments[0].round
                seen.append((open_round.version == version, set(open_round.expected)))
            else:
                world.agenda.after(0.01, lambda: look(version))

        world.agenda.at(33.0, join)

    rules = RoundRules(num_workers=2)
    world = told(replace(THREE, rules=rules), story=story)
    assert seen == [(True, {"w0", "w1"})], "the open round does not wait for it"
    assert {"w0", "w1", "w2"} in contributors(world.history)


@pytest.mark.row("F18")
def test_a_graceful_leave_shrinks_the_barrier_at_once() -> None:
    seen: list[float] = []

    def story(world: World) -> None:
        def leave() -> None:
            world.current[2].leave_when_done()
            watch()

        def watch() -> None:
            if world.everyone[2].left:
                expected = world.server.coordinator.fragments[0].round.expected
                assert "w2" not in expected
                seen.append(world.agenda.now)
                world.current[2] = world._start(2)
            else:
                world.agenda.after(0.1, watch)

        world.agenda.at(33.0, leave)

    told(replace(THREE, rules=RoundRules(num_workers=3), heartbeat_timeout_s=1e6), story=story)
    assert seen


@pytest.mark.row("F18")
def test_when_all_die_and_return_no_step_is_taken_from_nothing() -> None:
    faults = tuple(Fault("crash", 30.0 + i, 60.0, worker=i) for i in range(3))
    world = told(replace(THREE, faults=faults))
    assert len(world.everyone) == 6
    assert all(contributors(world.history))


@pytest.mark.row("F19")
def test_two_hundred_workers_that_join_within_a_second_all_get_in() -> None:
    workers = 200
    scenario = Scenario(
        rules=RoundRules(num_workers=workers),
        workers=workers,
        step_s=(1.0, 1.1, 0.9),
        sync_every=4,
        pool_parts=40,
        heartbeat_timeout_s=60.0,
        heartbeat_every_s=20.0,
        calm_after_s=1.0,
    )
    world = told(scenario)
    assert len(world.everyone) == workers, "none was started twice"
    assert len(contributors(world.history)[0]) == workers
    assert all(worker.left for worker in world.everyone)


@pytest.mark.row("F21")
def test_of_a_contribution_that_was_damaged_on_its_way_only_that_part_is_sent_again() -> None:
    def story(world: World) -> None:
        damaging = Conditions(damage=0.1)
        world.agenda.at(0.0, lambda: setattr(world.network, "conditions", damaging))

    world = told(replace(THREE, parts=8), story=story)
    sent = world.history.sent
    assert world.network.damaged > 10
    extra = sum(sent.values()) - len(sent)
    assert 0 < extra <= world.network.damaged
