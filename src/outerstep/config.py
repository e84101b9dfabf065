"""Settings as frozen dataclasses: every value checked where it is made, every error naming field, value and range."""

from __future__ import annotations

import difflib
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from .coordination.rounds import RoundRules
from .errors import ConfigError
from .types import Wishes, WorkerId

DEFAULT_PORT = 8512
DEFAULT_HOST = "127.0.0.1"
MOST = 1 << 53  # no setting is larger; JSON numbers are exact up to here

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Everything a server can be told. None for sync_every, num_fragments or codec = the first worker decides."""

    num_workers: int
    host: str = DEFAULT_HOST
    port: int | None = DEFAULT_PORT  # None = the first free one from 8512 on, 0 = any free one
    min_workers: int = 1
    heartbeat_timeout: float = 120.0  # seconds of silence until a worker counts as dead; 0 = never
    sync_every: int | None = None
    num_fragments: int | None = None
    codec: str | None = None
    fragment_strategy: Literal["contiguous", "strided"] = "contiguous"
    embeddings_apart: bool = False
    quorum: int | None = None  # None = all expected workers
    grace_period: float = 0.0
    round_deadline_s: float | None = None
    start_deadline_s: float | None = None
    max_staleness: int = 4
    pool_bytes: int = 2 << 30  # of memory for contributions on their way in
    spool_bytes: int = 16 << 30  # and of disk, when that is full; 0 = none
    spool_dir: str | None = None  # None = /var/tmp
    part_size_bytes: int = 16 << 20
    max_connections: int = 1024
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        _whole(self, 1, "num_workers", "min_workers", "pool_bytes", "max_connections", "part_size_bytes")
        _whole(self, 0, "max_staleness", "spool_bytes")
        _whole(self, 1, "sync_every", "num_fragments", "quorum", optional=True)
        _whole(self, 0, "port", optional=True)
        _number(self, 0.0, "heartbeat_timeout", "grace_period", "outer_lr", "outer_momentum")
        _number(self, 0.0, "round_deadline_s", "start_deadline_s", optional=True)
        _text(self, "host", "codec", "spool_dir")
        _one_of(self, (True, False), "embeddings_apart", "nesterov")
        _one_of(self, ("contiguous", "strided"), "fragment_strategy")
        if self.min_workers > self.num_workers:
            raise ConfigError(f"min_workers ({self.min_workers}) must not exceed num_workers ({self.num_workers})")
        if self.quorum is not None and self.quorum > self.num_workers:
            raise ConfigError(f"quorum ({self.quorum}) must not exceed num_workers ({self.num_workers})")
        if self.spool_dir is not None and not Path(self.spool_dir).is_dir():
            raise ConfigError(f"spool_dir must be a folder, got {self.spool_dir!r}")
        if self.port is not None and self.port > 65535:
            raise ConfigError(f"port must be between 0 and 65535, got {self.port}")
        if not 64 <= self.part_size_bytes <= 16 << 20 or self.part_size_bytes % 64:
            raise ConfigError(
                f"part_size_bytes must be a multiple of 64 between 64 and {16 << 20}, got {self.part_size_bytes}"
            )

    @property
    def wishes(self) -> Wishes:
        return Wishes(sync_every=self.sync_every, codec=self.codec, num_fragments=self.num_fragments)

    @property
    def rules(self) -> RoundRules:
        return RoundRules(
            num_workers=self.num_workers,
            min_workers=self.min_workers,
            quorum=self.quorum,
            grace_s=self.grace_period,
            round_deadline_s=self.round_deadline_s,
            start_deadline_s=self.start_deadline_s,
            max_staleness=self.max_staleness,
        )


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """Everything a worker can be told. None = follow the plan of the run."""

    server_addr: str
    worker_id: str | None = None  # None = made from host name and process
    sync_every: int | None = None
    num_fragments: int | None = None
    bf16_comm: bool | None = None  # True = bf16, False = fp32 on the wire
    heartbeat_interval: float = 30.0
    on_exit: Literal["global", "local"] = "global"  # what `model` holds afterwards: the agreed weights, or its own
    join_timeout_s: float = 120.0
    give_up_after_s: float = 900.0  # without any answer from the server
    stalled_after_s: float = 900.0  # without an optimizer step: stop beating, so that the others go on; 0 = never
    exit_patience_s: float = 60.0  # how long a clean exit waits for a round that cannot close

    def __post_init__(self) -> None:
        _whole(self, 1, "sync_every", "num_fragments", optional=True)
        _number(
            self, 0.0, "heartbeat_interval", "join_timeout_s", "give_up_after_s", "exit_patience_s", "stalled_after_s"
        )
        _text(self, "server_addr")
        _one_of(self, (None, True, False), "bf16_comm")
        _one_of(self, ("global", "local"), "on_exit")
        if self.worker_id is not None:
            try:
                msgspec.convert(self.worker_id, WorkerId)
            except msgspec.ValidationError as error:
                raise ConfigError(
                    f"worker_id must be 1 to 128 letters, digits, '.', ':', '-' or '_', beginning with a letter, digit "
                    f"or '_'; got {self.worker_id!r}"
                ) from error

    @property
    def wishes(self) -> Wishes:
        codec = None if self.bf16_comm is None else ("bf16" if self.bf16_comm else "fp32")
        return Wishes(sync_every=self.sync_every, codec=codec, num_fragments=self.num_fragments)


def build(kind: type[T], settings: dict[str, Any]) -> T:
    """A config from keyword arguments; an unknown one is answered with the nearest known one."""
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            suggestion = f'; did you mean "{near[0]}"?' if near else f"; known: {', '.join(known)}"
            raise ConfigError(f'unknown setting "{name}"{suggestion}')
    missing = [f.name for f in fields(kind) if f.default is MISSING and f.name not in settings]  # type: ignore[arg-type]
    if missing:
        raise ConfigError(f"missing setting: {', '.join(missing)}")
    return kind(**settings)


def _whole(config: object, least: int, *names: str, optional: bool = False) -> None:
    for name in names:
        value = getattr(config, name)
        if value is None and optional:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{name} must be a whole number ≥ {least}, got {value!r}")
        if not least <= value <= MOST:
            raise ConfigError(f"{name} must be ≥ {least}, got {_shown(value)}")


def _number(config: object, least: float, *names: str, optional: bool = False) -> None:
    for name in names:
        value = getattr(config, name)
        if value is None and optional:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{name} must be a number ≥ {least:g}, got {value!r}")
        if not least <= value <= MOST:  # also false for nan
            raise ConfigError(f"{name} must be ≥ {least:g}, got {_shown(value)}")


def _shown(value: float) -> str:
    """The value, and that it is too large if that is what is wrong with it."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits, which is too large"
    return f"{value}, which is too large" if value > MOST else f"{value}"


def _text(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{name} must be text, got {value!r}")


def _one_of(config: object, allowed: tuple[object, ...], *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not any(value is choice or (isinstance(value, str) and value == choice) for choice in allowed):
            raise ConfigError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
