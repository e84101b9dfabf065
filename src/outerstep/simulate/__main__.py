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
    drawn, log = (GossipScenario if given.gossip else Scenario).drawn(given.seed), list[str]()
    print(drawn)
    play = run_gossip if isinstance(drawn, GossipScenario) else run
    history = play(drawn, given.seed, log=log)  # type: ignore[arg-type]  # each takes its own kind of scenario
    print("\n".join(log))
    print(f"{history.round_count} rounds in {history.virtual_s:.0f} virtual seconds; {dict(history.faults)}")
    print("\n".join(f"violated: {rule}" for rule in history.violations) or "every promise was kept")
    return 1 if history.violations else 0


if __name__ == "__main__":
    raise SystemExit(main())
