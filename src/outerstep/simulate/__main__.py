"""Replay a seeded schedule and tell what happens: `python -m outerstep.simulate SEED`."""

from __future__ import annotations

import argparse

from .scenario import Scenario
from .world import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m outerstep.simulate", description=__doc__)
    parser.add_argument("seed", type=int)
    seed = parser.parse_args().seed
    scenario, log = Scenario.drawn(seed), list[str]()
    print(scenario)
    history = run(scenario, seed, log=log)
    print("\n".join(log))
    print(f"{history.round_count} rounds in {history.virtual_s:.0f} virtual seconds; {dict(history.faults)}")
    print("\n".join(f"violated: {rule}" for rule in history.violations) or "every promise was kept")
    return 1 if history.violations else 0


if __name__ == "__main__":
    raise SystemExit(main())
