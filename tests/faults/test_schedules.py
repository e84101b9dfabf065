"""Thousands of seeded fault schedules over the real state machines of both ends, in virtual time.

Each schedule draws a run (workers, fragments, quorum, deadlines, pool) and a storm of faults, lets it blow over, and
checks: no step is applied twice, none vanishes, rounds are monotone, no round closes with too few contributions, all
holders of a version hold the same bits, workers were told the truth about their contributions, and rounds go on once it
is calm.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from outerstep.coordination.coordinator import Coordinator
from outerstep.coordination.exchange import Outcome
from outerstep.coordination.membership import Member
from outerstep.coordination.rounds import RoundRules
from outerstep.simulate import History, Scenario, run
from outerstep.simulate.worker import LocalFragment, SimFlight, SimWorker
from outerstep.types import Commit, CommitAnswer, FromMember, OfContribution, Offer, OfferAnswer

QUICK, FULL = 200, 2_000


def run_seeds(seeds: range, **parts: Any) -> tuple[list[str], Counter[str], int]:
    violations: list[str] = []
    faults: Counter[str] = Counter()
    rounds = 0
    for seed in seeds:
        history = run(Scenario.drawn(seed), seed, **parts)
        violations += [f"seed {seed}: {line}" for line in history.violations]
        faults += history.faults
        rounds += sum(map(len, history.rounds.values()))
    return violations, faults, rounds


def check_seeds(seeds: range) -> None:
    violations, faults, rounds = run_seeds(seeds)
    assert not violations, "\n".join(violations[:10])
    kinds = {"crash", "pause", "replace", "cut", "cut_up", "cut_down", "bad_weather", "lost", "repeated", "damaged"}
    kinds |= {"kick", "drain", "sync", "new_plan", "parked"}
    assert kinds <= faults.keys(), f"never fired: {kinds - faults.keys()}"
    assert rounds > len(seeds)


def test_two_hundred_schedules_keep_every_promise() -> None:
    check_seeds(range(QUICK))


@pytest.mark.slow
def test_two_thousand_schedules_keep_every_promise() -> None:
    check_seeds(range(QUICK, FULL))


def test_the_schedules_cover_every_mode() -> None:
    drawn = [Scenario.drawn(seed) for seed in range(QUICK)]
    covered = {(s.rules.mode, s.fragments > 1, s.delay > 0) for s in drawn}
    modes = ("sync", "quorum", "async")
    assert covered == {(mode, split, late) for mode in modes for split in (False, True) for late in (False, True)}
    assert any(s.rules.dylu and s.fragments > 1 and s.rules.mode == "sync" for s in drawn)
    assert any(s.delay * s.fragments > s.sync_every for s in drawn), "several fragments in flight"


def test_a_seed_replays_exactly() -> None:
    def facts(history: History) -> tuple[object, ...]:
        return history.applied, history.rounds, history.hashes, history.faults, history.virtual_s

    for seed in range(20):
        assert facts(run(Scenario.drawn(seed), seed)) == facts(run(Scenario.drawn(seed), seed))


def test_without_faults_every_round_has_everybody() -> None:
    scenario = Scenario(rules=RoundRules(num_workers=3), calm_after_s=100.0)
    history = run(scenario, 1)
    assert not history.violations
    assert sum(history.faults.values()) == 0
    steps_per_round = Counter(key.sequence for key in history.applied.values())
    assert all(count == 3 * scenario.sync_every for count in list(steps_per_round.values())[:-1])


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


class ForgivesFences(Coordinator):
    """Listens to old incarnations of a worker."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        heard = self.members.heard

        def lenient(message: FromMember, now: float) -> Member:
            member = next((m for m in self.members if m.worker_id == message.worker_id), None)
            return member if member is not None else heard(message, now)

        self.members.heard = lenient  # type: ignore[method-assign]


class LeaksRoom(Coordinator):
    """Keeps the room of uploads that can never be accepted any more."""

    def _drop(self, key: Any) -> None:
        self.uploads._by_key.pop(key, None)


class StepsFromNothing(Coordinator):
    """Closes a round at its deadline whatever has come in."""

    def tick(self, now: float) -> None:
        super().tick(now)
        if now > 30.0 and self.started and self.fragments:
            fragment = self.fragments[0]
            if not fragment.round.participants and fragment.published.version == fragment.round.version - 1:
                fragment.round.participants = []
                fragment.round.verdict = lambda *a, **k: type("V", (), {"close": True})()  # type: ignore[method-assign]
                self._evaluate(fragment, now)


class OverwritesUnsent(SimWorker):
    """Takes an agreement it is not in as if it were: its own steps are gone."""

    def _adopt(self, fragment: LocalFragment, outcome: Outcome) -> None:
        super()._adopt(fragment, outcome)
        fragment.unsent = []


class SendsTwice(SimWorker):
    """Keeps its steps after they were counted, and sends them again."""

    def _adopt(self, fragment: LocalFragment, outcome: Outcome) -> None:
        super()._adopt(fragment, outcome)
        if outcome.counted:
            fragment.unsent = [(self.worker_id, self.steps_taken)]


class DiscardsWhatItCarries(SimWorker):
    """Forgets the steps it took while its contribution was under way."""

    def _land(self, index: int, flight: SimFlight, outcome: Outcome) -> bool:
        super()._land(index, flight, outcome)
        self.fragments[index].unsent = []
        return True


class ForgetsWhatItParked(SimWorker):
    """Sends everything anew when the server is back, though what was under way may count."""

    def _take_off(self, index: int, *, land_at: int) -> None:
        flight = self._flights.get(index)
        if flight is not None and flight.parked:
            del self._flights[index]
        super()._take_off(index, land_at=land_at)


@pytest.mark.parametrize(
    ("bug", "symptom"),
    [
        ({"coordinator_type": CountsDuplicates}, "applied twice"),
        ({"coordinator_type": ForgivesFences}, "gave up: Superseded|vanished|applied twice"),
        ({"coordinator_type": LeaksRoom}, "no progress"),
        ({"coordinator_type": StepsFromNothing}, "closed with 0 contributions"),
        ({"worker_type": OverwritesUnsent}, "vanished"),
        ({"worker_type": SendsTwice}, "applied twice"),
        ({"worker_type": DiscardsWhatItCarries}, "vanished"),
        ({"worker_type": ForgetsWhatItParked}, "applied twice"),
    ],
    ids=lambda value: next(iter(value.values())).__name__ if isinstance(value, dict) else "",
)
def test_a_planted_bug_is_caught(bug: dict[str, Callable[..., Any]], symptom: str) -> None:
    for seed in range(QUICK):
        history = run(Scenario.drawn(seed), seed, **bug)
        if history.violations:
            assert any(re.search(symptom, line) for line in history.violations), history.violations[:3]
            return
    pytest.fail(f"{QUICK} schedules did not notice")
