"""Virtual time, links and faults around the real state machines of both ends.

Nothing here decides anything about rounds: the simulated server and workers drive `coordination.Coordinator` and
`coordination.Exchange`, the very code that ships. A seed fixes everything, so the seed of a failure replays it.

    history = run(Scenario.drawn(seed), seed)
    assert not history.violations
"""

from .history import History
from .scenario import Scenario
from .world import run

__all__ = ["History", "Scenario", "run"]
