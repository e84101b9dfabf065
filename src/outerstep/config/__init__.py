"""What a server and a worker can be told: the settings, their checks, and where each value came from. No torch in here.

    server.py     ServerConfig
    worker.py     WorkerConfig, with one section for each topology
    setting.py    a field that also says its flags, its panel in --help, and a sentence
    effects.py    what a setting needs to have an effect, and what becomes of one that has none
    kinds.py      what a field's type says: its range, and how the text of a flag or a variable becomes a value
    checks.py     every value against its kind
    outer_step.py the outer step of a server, and of a worker without one
    keywords.py   a config from flat keywords, with an answer to a misspelt one
    table.py      the two roles, with all that is derived from their settings
    sources.py    a flag, else an environment variable, else a TOML file (toml_file.py), else the default
    reference.py  the tables of docs/reference/configuration.md

found  = resolve(SERVER, {"num_workers": Sourced(2, "flag --num-workers")})
config = make_config(SERVER, found)            # a ServerConfig; its errors say where the bad value came from
found["heartbeat_timeout_s"].source              # "outerstep.toml:12"
"""

from __future__ import annotations

from ..security import DEFAULT_PORT
from .effects import TOPOLOGIES, WITHOUT_SERVER
from .keywords import build, settings_of, unknown, values_of, with_current_names
from .outer_step import SHIPPED, check_momentum_inside, check_outer_step, is_named, outer_arguments, with_named_class
from .server import DEFAULT_HOST, ServerCommand, ServerConfig
from .setting import Setting
from .sources import (
    CONFIG_VARIABLE,
    NOT_SET,
    Sourced,
    environment_for,
    make_command,
    make_config,
    naming_sources,
    resolve,
    warnings_about,
)
from .table import OF_PEERS, ROLES, SERVER, WORKER, OwnDefaults, Role
from .worker import (
    LIGHTHOUSE_VARIABLE,
    ServerlessConfig,
    WorkerCommand,
    WorkerConfig,
    check_topology_name,
    parse_lighthouse,
)

__all__ = [
    "CONFIG_VARIABLE",
    "DEFAULT_HOST",
    "DEFAULT_PORT",
    "LIGHTHOUSE_VARIABLE",
    "NOT_SET",
    "OF_PEERS",
    "ROLES",
    "SERVER",
    "SHIPPED",
    "TOPOLOGIES",
    "WITHOUT_SERVER",
    "WORKER",
    "OwnDefaults",
    "Role",
    "ServerCommand",
    "ServerConfig",
    "ServerlessConfig",
    "Setting",
    "Sourced",
    "WorkerCommand",
    "WorkerConfig",
    "build",
    "check_momentum_inside",
    "check_outer_step",
    "check_topology_name",
    "environment_for",
    "is_named",
    "make_command",
    "make_config",
    "naming_sources",
    "outer_arguments",
    "parse_lighthouse",
    "resolve",
    "settings_of",
    "unknown",
    "values_of",
    "warnings_about",
    "with_current_names",
    "with_named_class",
]
