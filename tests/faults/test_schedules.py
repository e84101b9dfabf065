"""Thousands of seeded fault schedules over the real state machines of both ends and the real journal, in virtual time.

Each schedule draws a run (workers, fragments, quorum, deadlines, pool) and a storm of faults of workers, links, server
and disk, lets it blow over, and checks: no step is applied twice, none vanishes, rounds are monotone, no round closes
with too few contributions, all holders of a version hold the same bits, workers were told the truth about their
contributions, rounds go on once it is calm, every worker's life keeps to its table and ends up in training, and a
restarted server has every agreement that it ever told anybody about.
A failure names its seed; `python -m outerstep.simulate SEED` replays it and tells what happens.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from amounts import mostly_schedules
from outerstep.coordination.layers.lifecycle import EDGES, GroupState, Happening, Lifecycle, targets
from outerstep.coordination.server.commits import Commits, CutJournal, TakeStep, Task, WriteCheckpoint, WriteRecord
from outerstep.coordination.server.coordinator import Coordinator
from outerstep.coordination.server.effects import CloseRound
from outerstep.coordination.server.lives import Lives
from outerstep.coordination.server.membership import KnownWorker
from outerstep.coordination.server.rounds import Fragment, RoundRules
from outerstep.coordination.server.uploads import Upload
from outerstep.coordination.worker.effects import Adopt, Carry, Effect, Result
from outerstep.coordination.worker.exchange import Outcome
from outerstep.coordination.worker.machine import InFlight, Progress, WorkerMachine
from outerstep.durable.disk import Disk
from outerstep.durable.journal import Journal, Record
from outerstep.events import WorkerDied
from outerstep.simulate import History, Scenario, run
from outerstep.simulate.carried import SimSent
from outerstep.simulate.history import StepName
from outerstep.simulate.server import SimServer
from outerstep.simulate.worker import Named, SimFragment, SimWorker
from outerstep.types import (
    Commit,
    CommitAnswer,
    CompleteOffer,
    CompleteOfferAnswer,
    FromMember,
    OfContribution,
    Offer,
    OfferAnswer,
)

QUICK, FULL, AT_ONCE = 300, 5_000, 500
KINDS = {"crash", "pause", "replace", "cut", "cut_up", "cut_down", "bad_weather", "lost", "repeated", "damaged"}
KINDS |= {"kick", "drain", "sync", "new_plan", "load", "deferred", "late", "resumed", "overtaken"}
KINDS |= {"server_crash", "power_cut", "died_writing", "disk_full", "disk_error", "held_back", "disk_failed"}
KINDS |= {"checkpoint", "survived", "damaged_checkpoint", "liar_voices", "liar_refused", "from_above"}
KINDS |= {"earlier_codec", "kept_for_record", "held_offers"}
MOVES = {"INIT to TRAINING", "TRAINING to IDLE", "IDLE to REJOIN", "REJOIN to TRAINING", "TRAINING to DRAINING"}
MOVES |= {"TRAINING to EXIT", "DRAINING to EXIT"}


def check_seeds(seeds: range) -> None:
    violations: list[str] = []
    faults, moves = Counter[str](), Counter[str]()
    rounds = 0
    for seed in seeds:
        history = run(Scenario.drawn(seed), seed)
        violations += [f"python -m outerstep.simulate {seed}: {line}" for line in history.violations]
        faults += history.faults
        moves += history.moves
        rounds += history.round_count
    assert not violations, "\n".join(violations[:10])
    assert faults.keys() >= KINDS, f"never fired: {KINDS - faults.keys()}"
    assert moves.keys() >= MOVES, f"never seen: {MOVES - moves.keys()}"
    assert rounds > len(seeds)


@pytest.mark.row("F01", "F03", "F04", "F05", "F06", "F07", "F18", "F21", "F28")
def test_three_hundred_schedules_keep_every_promise() -> None:
    check_seeds(range(QUICK))


@pytest.mark.slow
@pytest.mark.parametrize("first", mostly_schedules(range(QUICK, FULL, AT_ONCE)))
def test_five_thousand_schedules_keep_every_promise(first: int) -> None:
    check_seeds(range(first, min(first + AT_ONCE, FULL)))


@pytest.mark.parametrize(
    "seed",
    [
        406,  # a server that had lost a contribution had taken its number from another start, and said that it has it
        709,  # the server died between the confirmation of a late contribution and the acceptance of the next
        715,  # workers that left did each other favours without end
        1336,  # with a delay, two workers waited for each other with each other's agreement in hand
        1399,  # a server that went back gave two starts of a worker the same number
        2154,  # a worker was fenced by its own re-join
        2724,  # a late contribution that was too old was believed to be counted
        3775,  # a worker that left recalled a late contribution while another was in flight
    ],
)
def test_what_was_found_once_stays_mended(seed: int) -> None:
    assert not run(Scenario.drawn(seed), seed).violations


def test_the_schedules_cover_every_mode() -> None:
    drawn = [Scenario.drawn(seed) for seed in range(QUICK)]
    covered = {(s.rules.mode, s.fragments > 1, s.delay > 0) for s in drawn}
    modes = ("sync", "quorum", "async")
    assert covered == {(mode, split, late) for mode in modes for split in (False, True) for late in (False, True)}
    assert any(s.rules.dylu and s.fragments > 1 and s.rules.mode == "sync" for s in drawn)
    assert any(s.delay * s.fragments > s.sync_every for s in drawn), "several fragments in flight"


def test_in_every_mode_the_server_dies() -> None:
    met: set[tuple[object, ...]] = set()
    for seed in range(QUICK):
        scenario = Scenario.drawn(seed)
        for kind in {fault.kind for fault in scenario.faults} & {"server_crash", "power_cut"}:
            met.add((kind, scenario.rules.mode, scenario.fragments > 1, scenario.delay > 0, scenario.carry))
    yes_no = (False, True)
    modes = ("sync", "quorum", "async")
    every = {("power_cut", mode, f, d, c) for mode in modes for f in yes_no for d in yes_no for c in yes_no}
    assert every <= met, every - met
    assert {(kind, mode) for kind, mode, *_ in met} >= {("server_crash", mode) for mode in modes}
    assert {s.rules.mode for s in map(Scenario.drawn, range(QUICK)) if s.durability == "checkpoint"} == set(modes)


def test_a_seed_replays_exactly() -> None:
    def facts(log: list[str], history: History) -> tuple[object, ...]:
        return log, history.applied, history.rounds, history.faults, history.virtual_s

    for seed in range(20):
        first, second = list[str](), list[str]()
        one = facts(first, run(Scenario.drawn(seed), seed, log=first))
        assert one == facts(second, run(Scenario.drawn(seed), seed, log=second))


def test_without_faults_every_round_has_everybody() -> None:
    scenario = Scenario(rules=RoundRules(num_workers=3), calm_after_s=100.0)
    history = run(scenario, 1)
    assert not history.violations
    happened = {kind for kind, count in history.faults.items() if count} - {"kept_for_record"}
    assert happened == {"checkpoint", "server_died"}, "at the very end"
    steps_per_round = Counter(key.sequence for key in history.applied.values())
    assert all(count == 3 * scenario.sync_every for count in list(steps_per_round.values())[:-1])


@pytest.mark.parametrize(("fragments", "slow_steps"), [(1, 2), (3, 3)])
def test_dynamic_local_updates_follow_speeds_that_are_far_apart(fragments: int, slow_steps: int) -> None:
    rules = RoundRules(num_workers=2, quorum=1, asynchronous=True, dylu=True, max_staleness=1000)
    history = run(
        Scenario(
            rules=rules, workers=2, fragments=fragments, sync_every=130, step_s=(0.5, 0.5 * 65), calm_after_s=5_000.0
        ),
        1,
    )
    assert not history.violations
    steps = Counter(key for (fragment, _), key in history.applied.items() if fragment == 0)
    slow = [steps[key] for key in sorted(steps, key=lambda key: key.sequence) if key.worker_id == "w1"]
    fast = [steps[key] for key in sorted(steps, key=lambda key: key.sequence) if key.worker_id == "w0"]
    # The first cycle began before anybody knew its speed, and its last steps are in the second contribution of a
    # fragment; the last contribution ends with the run.
    assert set(slow[2:-1]) == {slow_steps}
    assert set(fast[2:-1]) == {130}


# --- planted bugs: the schedules must notice -------------------------------------------------------------------------


class CountsDuplicates(Coordinator):
    """Forgets that it has accepted a key: a repeated contribution is taken again."""

    def offer(self, message: Offer, now: float) -> OfferAnswer:
        self._forget_key(message)
        return super().offer(message, now)

    def accept(self, message: Commit, now: float) -> CommitAnswer:
        self._forget_key(message)
        return super().accept(message, now)

    def _forget_key(self, message: OfContribution) -> None:
        member = self.members.find(message.worker_id)
        if member is not None:
            member.accepted.pop(message.fragment, None)


class HearsEveryVoice(Coordinator):
    """Takes as many contributions of a worker into one round as it sends."""

    def offer(self, message: Offer, now: float) -> OfferAnswer:
        with mock.patch("outerstep.coordination.server.admission.check_voice"):
            return super().offer(message, now)

    def begin_commit(self, message: Commit, now: float) -> Upload | CommitAnswer:
        with mock.patch("outerstep.coordination.server.admission.check_voice"):
            return super().begin_commit(message, now)


class WaitsForTheRefused(Coordinator):
    """Goes on waiting for a worker, however often it refuses what that brings."""

    def _note_refusal(self, *args: Any, **how: Any) -> None:
        pass


class BelievesEveryClaim(Coordinator):
    """Counts tokens as they are claimed."""

    def _settle_claims(self, fragment: Fragment, now: float) -> None:
        pass


class ForgivesFences(Coordinator):
    """Listens to old incarnations of a worker."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        heard = self.members.heard

        def lenient(message: FromMember, now: float) -> KnownWorker:
            member = next((m for m in self.members if m.worker_id == message.worker_id), None)
            return member if member is not None else heard(message, now)

        self.members.heard = lenient  # type: ignore[method-assign]


class LeaksRoom(Coordinator):
    """Keeps the room of uploads that can never be accepted any more."""

    def drop(self, key: Any) -> None:
        self.uploads.by_key.pop(key, None)


class StepsFromNothing(Coordinator):
    """Closes a round at its deadline whatever has come in."""

    def tick(self, now: float) -> None:
        super().tick(now)
        if now > 30.0 and self.started and self.fragments:
            fragment = self.fragments[0]
            if not fragment.round.participants and fragment.published.version == fragment.round.version - 1:
                fragment.round.participants = []
                fragment.round.verdict = lambda *a, **k: type("V", (), {"close": True})()  # type: ignore[method-assign]
                self.close_if_ready(fragment, now)


class RemembersOpenRounds(Coordinator):
    """Writes into its ledger what an open round has accepted: a restarted server believes that it has it."""

    def accept(self, message: Commit, now: float) -> CommitAnswer:
        answer = super().accept(message, now)
        for member in self.members:
            member.closed = dict(member.accepted)
        return answer


class ForgetsTheFolder(Journal):
    """Syncs the bytes of a record, and not that it has a name."""

    def __init__(self, disk: Disk) -> None:
        super().__init__(disk)
        self._disk = _NeverSyncsTheFolder(disk)


class _NeverSyncsTheFolder:
    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)

    def sync_folder(self) -> None:
        pass


class TellsFirst(Commits):
    """Announces a round, then writes it down."""

    def _tasks_of(self, number: int, closing: CloseRound) -> list[Task]:
        return sorted(super()._tasks_of(number, closing), key=lambda task: isinstance(task, WriteRecord))


class MovesWithoutARecord(Commits):
    """Writes down what rounds have made, and not what came from a layer above."""

    def _tasks_of(self, number: int, closing: CloseRound) -> list[Task]:
        tasks = super()._tasks_of(number, closing)
        return [task for task in tasks if not (closing.from_above and isinstance(task, WriteRecord))]


class ForgetsWhatItFreed(Commits):
    """Makes records of the contributions that are still there, though others were in the sum."""

    def _tasks_of(self, number: int, closing: CloseRound) -> list[Task]:
        tasks = super()._tasks_of(number, closing)
        return [replace(task, freed=False) if isinstance(task, TakeStep) else task for task in tasks]


class RecordsInAnotherOrder(Commits):
    """Makes records of contributions, but not in the order in which they were added."""

    def _tasks_of(self, number: int, closing: CloseRound) -> list[Task]:
        tasks = super()._tasks_of(number, closing)
        return [replace(task, added=task.added[::-1]) if isinstance(task, TakeStep) else task for task in tasks]


class CutsTooFar(Commits):
    """Cuts the journal up to the newest checkpoint: the one before it is of no use any more."""

    def _include(self, made: WriteCheckpoint) -> CutJournal:
        super()._include(made)
        return CutJournal(made.includes)


class ReplaysNothing(Journal):
    """Resumes from its newest checkpoint, whatever happened since."""

    def after(self, serial: int) -> Iterator[Record]:
        yield from ()


class OverwritesUnsent(WorkerMachine):
    """Takes an agreement that it is not in as if it were: its own steps are gone."""

    def _rebase(self, result: Result) -> list[Effect]:
        return self._begin_at(result)


class SendsTwice(WorkerMachine):
    """Keeps its steps after they were counted, and sends them again."""

    def _adopt(self, flight: InFlight, result: Result) -> list[Effect]:
        return self._rebase(result)


class DiscardsWhatItCarries(WorkerMachine):
    """Forgets the steps it took while its contribution was under way."""

    def _adopt(self, flight: InFlight, result: Result) -> list[Effect]:
        effects = super()._adopt(flight, result)
        self.state.fragments[result.fragment].counted = self.state.work
        return [Adopt(result.fragment) if isinstance(effect, Carry) else effect for effect in effects]


class StaysYoung(WorkerMachine):
    """Calls its unsent steps as young as the version that it was rebased on: no age limit holds for a worker that keeps
    missing rounds."""

    def _rebase(self, result: Result) -> list[Effect]:
        effects = super()._rebase(result)
        self.state.fragments[result.fragment].oldest_base = result.version
        return effects


class MovesTheWeightsAlone(WorkerMachine):
    """Says how the weights move, and forgets to remember it."""

    def _settle(self, result: Result) -> list[Effect]:
        progress = self.state.fragments[result.fragment]
        counted = progress.counted
        effects = super()._settle(result)
        progress.counted = counted
        return effects


class ForgetsWhatItDeferred(WorkerMachine):
    """Sends everything anew when the server is back, though what was under way may count."""

    def _begin(self, wait: Any, fragment: int) -> list[Effect]:
        progress = self.state.fragments[fragment]
        if progress.in_flight is not None and progress.in_flight.deferred:
            progress.in_flight = None
        return super()._begin(wait, fragment)


class NeverBeginsACycleAnew(WorkerMachine):
    """Counts the steps of its first cycle for ever."""

    def stepped(self, *, changed: bool = False) -> list[Effect]:
        cycle = self.state.cycle
        cycle.step = max(cycle.step, 10_000 if self.state.metrics.sync_count else 0)
        cycle.sync_every = 10_001 + self.state.work.steps if self.state.metrics.sync_count else cycle.sync_every
        return super().stepped(changed=changed)


class LetsOthersWait(WorkerMachine):
    """Stands still at one fragment, whoever waits for it at another."""

    def _wanted(self, fragment: int, version: int, sights: Any) -> list[Effect]:
        return []


class SendsWhatOvertookIt(WorkerMachine):
    """Resumes from a state that is older than what was sent since, as if nothing had been."""

    def _catch_up(self, result: Result) -> list[Effect]:
        return self._rebase(result)


class ResumesWithoutItsFlights(WorkerMachine):
    """Forgets on a restart what was under way: those steps are sent again, under another key."""

    def _reopen(self, fragment: int, saved: Progress, forgotten: Collection[int]) -> list[Effect]:
        return []


class LeavesAtOnce(WorkerMachine):
    """Contributes nothing at the end of training."""

    def finish(self, *, keep_local: bool = False, changed: bool = False) -> list[Effect]:
        return self._depart()


class StillCountsWhatItGaveUp(WorkerMachine):
    """Starts over from the anchor, and sends the steps that went with its weights all the same."""

    def _forget_local(self) -> None:
        pass


class ForgetsTheLate(SimWorker):
    """Believes "accepted", though the round is not on any disk yet."""

    def _settle(self, fragment: SimFragment, sent: SimSent[Named], outcome: Outcome) -> Named | None:
        lost = super()._settle(fragment, sent, outcome)
        if fragment.late is sent:
            fragment.late = None
            self._history.told(sent.offer.key, sent.steps, counted=True)
        return lost


class ForgetsWhatCameComplete(SimServer):
    """Says that an offer with its contribution counts, and keeps nothing of it if it was damaged on its way."""

    def _take_complete(self, request: CompleteOffer, body: list[StepName], *, damaged: bool) -> CompleteOfferAnswer:
        return super()._take_complete(request, [] if damaged else body, damaged=False)


class ForgetsTheWayBack(Lives):
    """Its table has no edge from REJOIN to TRAINING."""

    table = targets([e for e in EDGES if (e.source.state, e.target.state) != (GroupState.REJOIN, GroupState.TRAINING)])


class TakesDeathForLeaving(Lives):
    """Feeds the wrong happening to a worker that died."""

    def _break_down(self, worker: KnownWorker, life: Lifecycle) -> None:
        self._feed(worker, Happening.LEFT)


class MissesDeaths(Lives):
    """Does not hear that a worker died."""

    def _concerned(self, effect: Any) -> list[KnownWorker]:
        return [] if isinstance(effect, WorkerDied) else super()._concerned(effect)


class LetsThemWait(Lives):
    """Does not see that the round for which a returned worker waits has closed."""

    def _take_in(self, expected: set[str]) -> None:
        lives = {worker.worker_id: worker.life for worker in self._members if worker.life is not None}
        super()._take_in({name for name in expected if name not in lives or lives[name].state is not GroupState.REJOIN})


def lived_by(bug: type[Lives]) -> dict[str, Any]:
    coordinator = type(bug.__name__, (Coordinator,), {"lives_type": bug})
    return {"server_type": type(bug.__name__, (SimServer,), {"coordinator_type": coordinator})}


def served_by(bug: type[Coordinator] | type[Commits] | type[Journal]) -> dict[str, Any]:
    kinds = {Coordinator: "coordinator_type", Commits: "commits_type", Journal: "journal_type"}
    attribute = next(attribute for kind, attribute in kinds.items() if issubclass(bug, kind))
    return {"server_type": type(bug.__name__, (SimServer,), {attribute: bug})}


def decided_by(bug: type[WorkerMachine]) -> dict[str, Any]:
    return {"worker_type": type(bug.__name__, (SimWorker,), {"machine_type": bug})}


@pytest.mark.parametrize(
    ("bug", "symptom"),
    [
        (served_by(CountsDuplicates), "applied twice"),
        (served_by(HearsEveryVoice), "liar has [0-9]+ voices"),
        (served_by(WaitsForTheRefused), "no progress"),
        (served_by(BelievesEveryClaim), "tokens are said to be in the model"),
        (served_by(ForgivesFences), "gave up: Superseded|vanished|applied twice"),
        pytest.param(served_by(LeaksRoom), "no progress", marks=pytest.mark.slow),
        (served_by(StepsFromNothing), "closed with 0 contributions"),
        (served_by(RemembersOpenRounds), "reported as counted, but its steps were not applied"),
        (served_by(MovesWithoutARecord), "was lost, though a worker holds it|record [0-9]+ is missing"),
        (served_by(ForgetsTheFolder), "was lost, though a worker holds it|record [0-9]+ is missing"),
        (served_by(TellsFirst), "was lost, though a worker holds it"),
        (served_by(ForgetsWhatItFreed), "its record would replay"),
        (served_by(RecordsInAnotherOrder), "its record would replay"),
        (served_by(CutsTooFar), "record [0-9]+ is missing|was lost, though a worker holds it"),
        (served_by(ReplaysNothing), "was lost, though a worker holds it"),
        (decided_by(OverwritesUnsent), "vanished"),
        (decided_by(SendsTwice), "applied twice"),
        (decided_by(DiscardsWhatItCarries), "vanished"),
        (decided_by(StaysYoung), "younger than it is"),
        (decided_by(MovesTheWeightsAlone), "believes in"),
        (decided_by(ForgetsWhatItDeferred), "applied twice"),
        (decided_by(NeverBeginsACycleAnew), "no progress"),
        (decided_by(LetsOthersWait), "no progress"),
        pytest.param(decided_by(SendsWhatOvertookIt), "applied twice", marks=pytest.mark.slow),
        (decided_by(ResumesWithoutItsFlights), "applied twice"),
        (decided_by(LeavesAtOnce), "vanished"),
        (decided_by(StillCountsWhatItGaveUp), "believes in"),
        ({"server_type": ForgetsWhatCameComplete}, "reported as counted, but its steps were not applied"),
        (lived_by(ForgetsTheWayBack), "group_ready cannot happen to a group in REJOIN"),
        (lived_by(TakesDeathForLeaving), "left cannot happen to a group in TRAINING"),
        (lived_by(MissesDeaths), "is away, and its life in TRAINING"),
        (lived_by(LetsThemWait), "in calm not everybody trains"),
        pytest.param(
            {"worker_type": ForgetsTheLate},
            "reported as counted, but its steps were not applied",
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: next(iter(value.values())).__name__ if isinstance(value, dict) else "",
)
def test_a_planted_bug_is_caught(bug: dict[str, Any], symptom: str) -> None:
    seen: list[str] = []
    for seed in range(QUICK):
        seen += run(Scenario.drawn(seed), seed, **bug).violations
        if any(re.search(symptom, line) for line in seen):
            return
    pytest.fail(f"{QUICK} schedules did not notice; only {seen[:3]}")
