"""One TOML file that describes the layers of a run: who agrees with whom, how often, and how.

    [layers.world]                     # outermost first; the top has an address
    address = "203.0.113.1:8512"
    sync_every = 8

    [layers.rooms]                     # each of its clusters is one worker of the layer above
    sync_every = 50

    [clusters.east]
    address = "203.0.113.2:8512"

    tables.py      what the file says, each value with its line
    rules.py       what the layers must be to each other: engines, parents, timeouts, momentum
    starts.py      the settings of each process, and the command that starts it
    parameters.py  the tables of docs/reference/layers.md

A layer's table takes the settings of what it is made of: of a server, or of a worker without one. A cluster's table
says what is different there. Flags and variables win over the file.
"""

from __future__ import annotations

from .rules import check_layers
from .starts import Start, settings_for, starts
from .tables import ClusterTable, LayersFile, LayerTable, read_layers

__all__ = [
    "ClusterTable",
    "LayerTable",
    "LayersFile",
    "Start",
    "check_layers",
    "read_layers",
    "settings_for",
    "starts",
]
