"""Where settings come from: a flag, else an environment variable, else a TOML file, else the default.

found  = resolve(SERVER, {"num_workers": Sourced(2, "flag --num-workers")})
config = make_config(SERVER, found)            # a ServerConfig; its errors say where the bad value came from
found["heartbeat_timeout"].source              # "outerstep.toml:12"

The same for every field of `ServerConfig` and `WorkerConfig`; `table.py` names each of them once. No torch in here.
"""

from .sources import (
    CONFIG_VARIABLE,
    NOT_SET,
    Sourced,
    environment_for,
    make_command,
    make_config,
    naming_sources,
    resolve,
)
from .table import ROLES, SERVER, WORKER, Role, ServerCommand, Setting, WorkerCommand

__all__ = [
    "CONFIG_VARIABLE",
    "NOT_SET",
    "ROLES",
    "SERVER",
    "WORKER",
    "Role",
    "ServerCommand",
    "Setting",
    "Sourced",
    "WorkerCommand",
    "environment_for",
    "make_command",
    "make_config",
    "naming_sources",
    "resolve",
]
