"""Settings as frozen dataclasses: every value checked where it is made, every error naming field, value and range.

    server.py    what a server can be told
    worker.py    what a worker can be told
    checks.py    the checks of single values that both are made of
    keywords.py  a config from keyword arguments, with an answer to misspelt ones

Where the values come from (flags, environment, files) is the business of outerstep/settings.
"""

from __future__ import annotations

from ..security import DEFAULT_PORT
from .checks import check_one_of, check_text
from .keywords import build, unknown
from .server import DEFAULT_HOST, ServerConfig
from .worker import ALLREDUCE, GOSSIP, LIGHTHOUSE_VARIABLE, TORCHFT, WorkerConfig, parse_lighthouse

__all__ = [
    "ALLREDUCE",
    "DEFAULT_HOST",
    "DEFAULT_PORT",
    "GOSSIP",
    "LIGHTHOUSE_VARIABLE",
    "TORCHFT",
    "ServerConfig",
    "WorkerConfig",
    "build",
    "check_one_of",
    "check_text",
    "parse_lighthouse",
    "unknown",
]
