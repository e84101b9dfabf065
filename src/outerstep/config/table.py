"""The two that settings are for, the server and a worker, with all that is derived from their settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .keywords import other_names, settings_of
from .kinds import Kind, defaults_of, kinds_of, shown
from .server import ServerCommand, ServerConfig
from .setting import PANELS, Setting
from .worker import WorkerCommand, WorkerConfig

# The settings that most people need, as --help groups them. Everything else is behind --help-all.
OF_SERVERS = {
    "The run": ("model", "num_workers", "save_dir", "resume"),
    "Its rounds": ("sync_every", "async_mode", "round_deadline_s", "token_budget"),
    "Where it listens": ("host", "port"),
}
OF_WORKERS = {
    "Who and where": ("server_addr", "worker_id", "devices"),
    "Its exchanges": ("sync_every", "num_fragments", "codec", "topology"),
    "What it shows": ("total_steps", "log_to", "log_json"),
}
OF_PEERS = {
    "Who and where": ("peers", "listen", "advertise", "worker_id", "peer_dir"),
    "Its exchanges": ("sync_every", "min_peers", "aggregation"),
    "What it shows": ("total_steps", "log_to"),
}


@dataclass(frozen=True)
class OwnDefaults:
    """Where the defaults of a `command` differ from its config's: `values`, and what None means there."""

    command: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    unset: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Role:
    """Who is being told: the server or a worker."""

    name: str
    config: type[Any]
    command: type[Any]
    documented: dict[str, str]  # field -> the variable that training scripts already know
    without: frozenset[str] = frozenset()  # settings that are not for it
    essential: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # what --help shows, by group
    own: OwnDefaults = OwnDefaults()

    @cached_property
    def group_of(self) -> dict[str, str]:
        """The group in --help of each setting that people need; --help-all has the others, too."""
        return {name: group for group, names in self.essential.items() for name in names}

    @cached_property
    def settings(self) -> tuple[Setting, ...]:
        """By panel, as --help shows them."""
        every = {**settings_of(self.config), **settings_of(self.command)}
        found = []
        for name, stated in every.items():
            if name not in self.without:
                flags = stated.metadata["flags"] or f"--{name.removesuffix('_s').replace('_', '-')}"
                found.append(Setting(name, **{**stated.metadata, "flags": flags}))
        return tuple(sorted(found, key=lambda setting: PANELS.index(setting.panel)))

    @cached_property
    def by_field(self) -> dict[str, Setting]:
        return {setting.field: setting for setting in self.settings}

    @cached_property
    def kinds(self) -> dict[str, Kind]:
        return {**kinds_of(self.config), **kinds_of(self.command)}

    @cached_property
    def defaults(self) -> dict[str, Any]:
        return {**defaults_of(self.config), **defaults_of(self.command), **self.own.values}

    @cached_property
    def config_fields(self) -> tuple[str, ...]:
        return tuple(settings_of(self.config))

    @cached_property
    def command_fields(self) -> tuple[str, ...]:
        return tuple(settings_of(self.command))

    def default_text(self, setting: Setting) -> str:
        """For --help and the reference."""
        value = self.defaults.get(setting.field)
        unset = self.own.unset.get(setting.field, setting.unset)
        if value is None and not unset:
            return "Required."
        return f"Default: {unset if value is None else shown(value)}."

    def variables(self, field: str) -> tuple[str, ...]:
        """The environment variables of a field; the first is the one that is written for a training script."""
        names = [f"OUTERSTEP_{name.upper()}" for name in (field, *self.other_names(field))]
        return (self.documented[field], *names) if field in self.documented else tuple(names)

    def other_names(self, field: str) -> list[str]:
        """Names of earlier versions, and those that other software uses, which are accepted too."""
        return [other for other, current in other_names(self.config).items() if current == field]


SERVER = Role("server", ServerConfig, ServerCommand, {}, essential=OF_SERVERS)
WORKER = Role(
    "worker",
    WorkerConfig,
    WorkerCommand,
    {
        "server_addr": "DILOCO_SERVER",
        "sync_every": "DILOCO_SYNC_EVERY",
        "bf16_comm": "DILOCO_BF16_COMM",
        "dylu": "DILOCO_DYLU",
        "heartbeat_interval_s": "DILOCO_HEARTBEAT_INTERVAL",
        "num_fragments": "DILOCO_NUM_FRAGMENTS",
        "worker_id": "DILOCO_WORKER_ID",
    },
    essential=OF_WORKERS,
)
ROLES = {role.name: role for role in (SERVER, WORKER)}
