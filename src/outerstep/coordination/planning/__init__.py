"""The planner: before a run, from a model, sites and links to settings and what they take.

    situation.py   what it is told                      planner.py   options, and which one
    capacity.py    memory, disk, journal, staleness     guide.py     what settings cost in loss, as measured

Seconds come from ../cost.py and settings from ../autoconfig/search.py: the controller of a run asks the same functions.
"""

from .capacity import Sizing, server_needs, worker_needs
from .planner import Option, Proposal, propose
from .situation import Choice, PlannedSite, Situation

__all__ = [
    "Choice",
    "Option",
    "PlannedSite",
    "Proposal",
    "Situation",
    "Sizing",
    "propose",
    "server_needs",
    "worker_needs",
]
