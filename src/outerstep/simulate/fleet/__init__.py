"""Thousands of workers for days, in virtual time, through the machines that ship (docs/operating/simulating.md).

report = run_fleet(FleetScenario(…))
assert not report.broken
"""

from .report import FleetReport
from .scenario import FleetScenario
from .world import run_fleet

__all__ = ["FleetReport", "FleetScenario", "run_fleet"]
