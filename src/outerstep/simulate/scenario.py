"""What is to happen: the run's settings and the faults, drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from ..coordination.rounds import RoundRules


@dataclass(frozen=True)
class Fault:
    """At `at_s`, for `lasts_s`: crash, pause, replace, cut, cut_up, cut_down (a worker's link), or bad_weather."""

    kind: str
    at_s: float
    lasts_s: float
    worker: int


@dataclass(frozen=True)
class Scenario:
    rules: RoundRules
    workers: int = 3
    fragments: int = 1
    sync_every: int = 6
    step_s: tuple[float, ...] = (1.0, 1.0, 1.0)
    parts: int = 2
    pool_parts: int = 64
    heartbeat_timeout_s: float = 15.0
    heartbeat_every_s: float = 4.0
    loss: float = 0.0
    repeat: float = 0.0
    damage: float = 0.0
    faults: tuple[Fault, ...] = ()
    calm_after_s: float = 0.0  # no fault lasts longer than this
    patient_exit_s: float = 40.0

    @staticmethod
    def drawn(seed: int) -> Scenario:
        """A run with faults of every kind."""
        rng = random.Random(f"scenario {seed}")
        workers = rng.randint(1, 4)
        quorum = rng.choice([None, None, max(1, workers - 1), 1])
        rules = RoundRules(
            num_workers=workers,
            min_workers=rng.choice([1, 1, min(2, workers)]),
            quorum=quorum,
            grace_s=rng.choice([0.0, 2.0]),
            round_deadline_s=rng.choice([None, 10.0, 20.0]),
            start_deadline_s=rng.choice([None, 25.0]),
            max_staleness=rng.choice([1, 2, 4]),
        )
        storm_s = rng.uniform(20.0, 90.0)
        kinds = ["crash", "pause", "replace", "cut", "cut_up", "cut_down", "bad_weather"]
        faults = tuple(
            Fault(rng.choice(kinds), rng.uniform(0.0, storm_s), rng.uniform(1.0, 40.0), rng.randrange(workers))
            for _ in range(rng.randint(1, 6))
        )
        fragments = rng.choice([1, 1, 2, 3])
        return Scenario(
            rules=rules,
            workers=workers,
            fragments=fragments,
            sync_every=rng.randint(fragments, 8),
            step_s=tuple(rng.choice([0.5, 1.0, 1.0, 3.0]) for _ in range(workers)),
            parts=rng.randint(1, 3),
            pool_parts=rng.choice([1, 3, 64]),
            loss=rng.choice([0.0, 0.05, 0.2]),
            repeat=rng.choice([0.0, 0.1, 0.5]),
            damage=rng.choice([0.0, 0.02]),
            faults=faults,
            calm_after_s=max((f.at_s + f.lasts_s for f in faults), default=0.0),
        )
