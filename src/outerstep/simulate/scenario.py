"""What is to happen: the run's settings and the faults, drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal

from ..coordination.server.rounds import RoundRules

LIARS: tuple[Literal["", "voices", "refused"], ...] = ("", "", "voices", "", "refused")
ABOVE_EVERY_S = (0.0, 0.0, 0.0, 17.0, 8.0)
MOST_TOKENS_PER_S = 50.0  # of each worker


@dataclass(frozen=True)
class Fault:
    """At `at_s`, for `lasts_s`: crash, pause, replace, cut, cut_up, cut_down (a worker's link), bad_weather; load
    (other weights, into a worker's model); or an operator: kick, drain, sync, new_plan; or the server: server_crash,
    power_cut (at the operation number `operation` of its disk from then on), disk_full, disk_error, damaged_checkpoint
    (found at its next start)."""

    kind: str
    at_s: float
    lasts_s: float
    worker: int = 0
    operation: int = 0


@dataclass(frozen=True)
class Scenario:
    rules: RoundRules
    workers: int = 3
    fragments: int = 1
    sync_every: int = 6
    delay: int = 0
    carry: bool = True
    offline_after_s: float = 20.0
    offline_exchanges: int = 0
    step_s: tuple[float, ...] = (1.0, 1.0, 1.0)
    parts: int = 2
    pool_parts: int = 64
    kept_updates: int = 2  # so far behind a worker may be and still be sent what it missed instead of everything
    heartbeat_timeout_s: float = 15.0
    heartbeat_every_s: float = 4.0
    loss: float = 0.0
    repeat: float = 0.0
    damage: float = 0.0
    faults: tuple[Fault, ...] = ()
    calm_after_s: float = 0.0  # no fault lasts longer than this
    patient_exit_s: float = 40.0
    save_every: int = 0  # steps after which a worker saves its state, from which a restart resumes; 0 = never
    durability: Literal["round", "checkpoint"] = "round"
    checkpoint_every: int = 4  # rounds
    restart_s: float = 5.0  # after a power cut
    liar: Literal["", "voices", "refused"] = ""  # one more worker, that lies (server_liar.py)
    above_every_s: float = 0.0  # how often a layer above moves the model; 0 = there is none

    @staticmethod
    def drawn(seed: int) -> Scenario:
        """A run with faults of every kind."""
        rng = random.Random(f"scenario {seed}")
        workers = rng.randint(1, 4)
        asynchronous = rng.random() < 0.2
        quorum = 1 if asynchronous else rng.choice([None, None, max(1, workers - 1), 1])
        rules = RoundRules(
            num_workers=workers,
            min_workers=1 if quorum == 1 else rng.choice([1, 1, min(2, workers)]),
            quorum=quorum,
            asynchronous=asynchronous,
            dylu=rng.random() < 0.3,
            grace_s=rng.choice([0.0, 2.0]),
            round_deadline_s=rng.choice([None, 10.0, 20.0]),
            start_deadline_s=rng.choice([None, 25.0]),
            max_staleness=rng.choice([1, 2, 4]) * (4 if asynchronous else 1),
            max_tokens_per_s=MOST_TOKENS_PER_S,
        )
        storm_s = rng.uniform(20.0, 90.0)
        kinds = ["crash", "pause", "replace", "cut", "cut_up", "cut_down", "bad_weather"]
        kinds += ["cut", "kick", "drain", "sync", "new_plan"]
        faults = tuple(
            Fault(rng.choice(kinds), rng.uniform(0.0, storm_s), rng.uniform(1.0, 40.0), rng.randrange(workers))
            for _ in range(rng.randint(1, 6))
        )
        fragments = rng.choice([1, 1, 2, 3])
        sync_every = rng.randint(fragments, 8)
        return (
            Scenario(
                rules=rules,
                workers=workers,
                fragments=fragments,
                sync_every=sync_every,
                delay=rng.choice([0, 0, min(1, sync_every - 1), sync_every - 1]),
                carry=rng.random() < 0.7,
                offline_after_s=rng.choice([8.0, 20.0]),
                offline_exchanges=rng.choice([0, 1, 4]),
                step_s=tuple(rng.choice([0.5, 1.0, 1.0, 3.0]) for _ in range(workers)),
                parts=rng.randint(1, 3),
                pool_parts=rng.choice([1, 3, 64]),
                kept_updates=seed % 4,  # not drawn: the rest of a seed's scenario stays what it was
                save_every=(0, 4, 1, 3)[seed // 4 % 4],
                liar=LIARS[seed // 2 % len(LIARS)],
                above_every_s=ABOVE_EVERY_S[seed // 3 % len(ABOVE_EVERY_S)],
                loss=rng.choice([0.0, 0.05, 0.2]),
                repeat=rng.choice([0.0, 0.1, 0.5]),
                damage=rng.choice([0.0, 0.02]),
                faults=faults,
                calm_after_s=max((f.at_s + f.lasts_s for f in faults), default=0.0),
            )
            .with_server_faults(seed, storm_s)
            .with_loads(seed, storm_s)
        )

    def with_loads(self, seed: int, storm_s: float) -> Scenario:
        """Drawn apart from the rest too. Fewer than would end a worker."""
        rng = random.Random(f"loads {seed}")
        count = rng.randint(1, 3) if seed % 5 in (2, 3) else 0
        loads = (Fault("load", rng.uniform(0.0, storm_s), 0.0, rng.randrange(self.workers)) for _ in range(count))
        faults = self.faults + tuple(loads)
        return replace(self, faults=faults, calm_after_s=max((f.at_s + f.lasts_s for f in faults), default=0.0))

    def with_server_faults(self, seed: int, storm_s: float) -> Scenario:
        """Drawn apart from the rest, which stays what it was: in most runs the server dies, or its disk does not work
        for a while, or both."""
        rng = random.Random(f"server {seed}")
        faults: list[Fault] = []
        kinds = ["server_crash", "server_crash", "power_cut", "power_cut", "power_cut", "disk_full", "disk_error"]
        for _ in range(rng.choice([0, 1, 1, 2, 3])):
            kind = rng.choice(kinds)
            lasts_s = rng.uniform(60.0, 400.0) if rng.random() < 0.08 else rng.uniform(0.5, 20.0)
            faults.append(Fault(kind, rng.uniform(0.0, 1.5 * storm_s), lasts_s, operation=rng.randint(1, 24)))
            if kind == "server_crash" and rng.random() < 0.2:
                faults.append(Fault("damaged_checkpoint", faults[-1].at_s - 0.01, 0.0))
        return replace(
            self,
            faults=self.faults + tuple(faults),
            calm_after_s=max((f.at_s + f.lasts_s for f in (*self.faults, *faults)), default=0.0),
            durability="checkpoint" if rng.random() < 0.1 else "round",
            checkpoint_every=rng.choice([1, 2, 3, 8, 50]),
            restart_s=rng.choice([0.5, 5.0, 20.0]),
        )
