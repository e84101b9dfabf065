"""Replay a seeded schedule and tell what happens: `python -m outerstep.simulate [--gossip | --hierarchy] SEED`."""

from __future__ import annotations

import argparse

from .gossip import GossipHistory, run_gossip
from .gossip_scenario import GossipScenario
from .hierarchy import HierarchyHistory, run_hierarchy
from .hierarchy_scenario import HierarchyScenario
from .history import History
from .scenario import Scenario
from .world import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m outerstep.simulate", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--gossip", action="store_true", help="peers without a server instead of workers with one")
    parser.add_argument("--hierarchy", action="store_true", help="clusters of clusters")
    given, log = parser.parse_args(), list[str]()
    drawn: Scenario | GossipScenario | HierarchyScenario
    history: History | GossipHistory | HierarchyHistory
    if given.gossip:
        drawn = GossipScenario.drawn(given.seed)
        history = run_gossip(drawn, given.seed, log=log)
    elif given.hierarchy:
        drawn = HierarchyScenario.drawn(given.seed)
        history = run_hierarchy(drawn, given.seed, log=log)
    else:
        drawn = Scenario.drawn(given.seed)
        history = run(drawn, given.seed, log=log)
    print(drawn)
    print("\n".join(log))
    print(f"{history.round_count} rounds in {history.virtual_s:.0f} virtual seconds; {dict(history.faults)}")
    print("\n".join(f"violated: {rule}" for rule in history.violations) or "every promise was kept")
    return 1 if history.violations else 0


if __name__ == "__main__":
    raise SystemExit(main())
