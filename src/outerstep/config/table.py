"""The two that settings are for, the server and a worker, with all that is derived from their settings."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .keywords import settings_of
from .kinds import Kind, defaults_of, kinds_of, shown
from .server import ServerCommand, ServerConfig
from .setting import PANELS, Setting
from .worker import WorkerCommand, WorkerConfig


@dataclass(frozen=True)
class Role:
    """Who is being told: the server or a worker."""

    name: str
    config: type[Any]
    command: type[Any]
    documented: dict[str, str]  # field -> the variable that training scripts already know
    without: frozenset[str] = frozenset()  # settings that are not for it

    @cached_property
    def settings(self) -> tuple[Setting, ...]:
        """By panel, as --help shows them."""
        every = {**settings_of(self.config), **settings_of(self.command)}
        found = []
        for name, field in every.items():
            if name not in self.without:
                flags = field.metadata["flags"] or f"--{name.removesuffix('_s').replace('_', '-')}"
                found.append(Setting(name, **{**field.metadata, "flags": flags}))
        return tuple(sorted(found, key=lambda setting: PANELS.index(setting.panel)))

    @cached_property
    def by_field(self) -> dict[str, Setting]:
        return {setting.field: setting for setting in self.settings}

    @cached_property
    def kinds(self) -> dict[str, Kind]:
        return {**kinds_of(self.config), **kinds_of(self.command)}

    @cached_property
    def defaults(self) -> dict[str, Any]:
        return {**defaults_of(self.config), **defaults_of(self.command)}

    @cached_property
    def config_fields(self) -> tuple[str, ...]:
        return tuple(settings_of(self.config))

    @cached_property
    def command_fields(self) -> tuple[str, ...]:
        return tuple(settings_of(self.command))

    def default_text(self, setting: Setting) -> str:
        """For --help and the reference."""
        value = self.defaults.get(setting.field)
        if value is None and not setting.unset:
            return "Required."
        return f"Default: {setting.unset if value is None else shown(value)}."

    def variables(self, field: str) -> tuple[str, ...]:
        """The environment variables of a field; the first is the one that is written for a training script."""
        names = [f"OUTERSTEP_{name.upper()}" for name in (field, *self.old_names(field))]
        return (self.documented[field], *names) if field in self.documented else tuple(names)

    def old_names(self, field: str) -> list[str]:
        """Names of earlier versions, which are still accepted."""
        return [old for old, current in self.config.OLD_NAMES.items() if current == field]


SERVER = Role("server", ServerConfig, ServerCommand, {})
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
)
ROLES = {role.name: role for role in (SERVER, WORKER)}
