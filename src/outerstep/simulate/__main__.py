"""Replay a seeded schedule and tell what happens: `python -m outerstep.simulate [--gossip] SEED`."""

from __future__ import annotations

import argparse

from .gossip import run_gossip
from .gossip_scenario import GossipScenario
from .scenario import Scenario
from .world import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m outerstep.simulate", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--gossip", action="store_true", help="peers without a server instead of workers with one")
    given = parser.parse_args()
    violations = _replay_gossip(given.seed) if given.gossip else _replay(given.seed)
    print("\n".join(f"violated: {rule}" for rule in violations) or "every promise was kept")
    return 1 if violations else 0


def _replay(seed: int) -> list[str]:
    scenario, log = Scenario.drawn(seed), list[str]()
    print(scenario)
    history = run(scenario, seed, log=log)
    print("\n".join(log))
    print(f"{history.round_count} rounds in {history.virtual_s:.0f} virtual seconds; {dict(history.faults)}")
    return history.violations


def _replay_gossip(seed: int) -> list[str]:
    scenario, log = GossipScenario.drawn(seed), list[str]()
    print(scenario)
    history = run_gossip(scenario, seed, log=log)
    print("\n".join(log))
    print(f"{history.rounds} rounds in {history.virtual_s:.0f} virtual seconds; {dict(history.faults)}")
    return history.violations


if __name__ == "__main__":
    raise SystemExit(main())
