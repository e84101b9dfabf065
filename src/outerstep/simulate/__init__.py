"""Virtual time, links and faults around the real state machines of both ends.

Nothing here decides anything about rounds: the simulated server drives the coordinator and its commits, the simulated
workers the worker's machine and its exchanges, the very code that ships. A seed fixes everything, so the seed of a
failure replays it.

    history = run(Scenario.drawn(seed), seed)
    assert not history.violations
"""

from .history import History
from .scenario import Scenario
from .world import run

__all__ = ["History", "Scenario", "run"]
