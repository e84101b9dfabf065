"""The planner: before a run, from a model, sites and links to settings and what they take.

    situation.py   what it is told                      planner.py   options, and which one
    capacity.py    memory, disk, journal, staleness     guide.py     what settings cost in loss, as measured

Seconds come from ../cost.py and settings from ../autoconfig/search.py: the controller of a run asks the same functions.
"""

from .capacity import Run, server_needs, worker_needs
from .planner import Option, Proposal, propose
from .situation import Choice, Site, Situation

__all__ = ["Choice", "Option", "Proposal", "Run", "Site", "Situation", "propose", "server_needs", "worker_needs"]
