"""What a server can be told, and which values do not go together."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, Literal, get_args

from ..coordination.server.rounds import Aggregation, RoundRules, RuleName
from ..coordination.weights import MAX_WEIGHT_RATIO
from ..defaults import OUTER_LR, OUTER_MOMENTUM, PART_SIZE_BYTES
from ..errors import ConfigError
from ..screens import FACTOR
from ..security import DEFAULT_PORT, parse_address
from ..types import Wishes
from .checks import check_label, check_mixing, check_number, check_one_of, check_text, check_whole

DEFAULT_HOST = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Everything a server can be told. None for sync_every, num_fragments, codec, down_codec, fragment_delay,
    fragment_alpha or fragment_carry = the first worker decides."""

    OLD_NAMES: ClassVar = {
        "heartbeat_timeout": "heartbeat_timeout_s",
        "grace_period": "grace_s",
        "dylu_enabled": "dylu",
    }

    num_workers: int
    host: str = DEFAULT_HOST
    port: int | None = DEFAULT_PORT  # None = the first free one from 8512 on, 0 = any free one
    min_workers: int = RoundRules.min_workers
    heartbeat_timeout_s: float = 120.0  # of silence until a worker counts as dead; 0 = never
    sync_every: int | None = None
    num_fragments: int | None = None
    codec: str | None = None  # of contributions; core/codecs/recipe.py
    down_codec: str | None = None  # of agreements; None or "same" = the one that goes with `codec`
    deterministic: bool = False  # add contributions in the order of their workers' names, whenever they came
    fragment_strategy: Literal["contiguous", "strided", "counted"] = "contiguous"
    embeddings_apart: bool = False
    fragment_delay: int | None = None  # τ: steps between sending a fragment and taking its agreement over
    fragment_alpha: float | None = None  # α: how much of the local copy is kept then
    fragment_carry: bool | None = None  # or keep the steps taken meanwhile
    async_mode: bool = False  # every contribution is a round of its own
    dn_buffer_size: int | None = None  # N of Delayed Nesterov; None = num_workers if asynchronous; 0 = off
    dylu: bool = False  # give slower workers fewer steps between exchanges
    dylu_base_sync_every: int | None = None  # H of the fastest worker; None = sync_every
    quorum: int | None = None  # None = all expected workers
    grace_s: float = RoundRules.grace_s  # to wait for more once the quorum is in
    round_deadline_s: float | None = None
    start_deadline_s: float | None = None
    staleness_policy: Literal["log", "weight"] | None = None  # None = log if asynchronous, else weight
    max_staleness: int | None = None  # refuse older ones; None = 4 rounds, asynchronous: 16 per worker
    weight_by: Literal["equal", "samples", "tokens"] = "equal"
    max_weight_ratio: float = MAX_WEIGHT_RATIO  # no weight further than this factor from the usual one
    norm_screen: float = (
        FACTOR  # leave out what is so many times as large as usual; 0 = off (docs/operating/screens.md)
    )
    aggregation: RuleName = "mean"  # how the contributions of a round become one (coordination/server/rounds.py)
    trim_fraction: float | None = None  # of trimmed_mean, at each end; None = a fifth, and at least one
    attackers: int | None = None  # f of krum and multi_krum; None = 1
    clip_radius: float | None = None  # ρ of centered_clipping; None = the median distance to the last aggregate
    aggregation_iterations: int | None = None  # None = 32 for geometric_median, 3 for centered_clipping
    bucket_size: int = 1  # 2 = random pairs are averaged before the rule sees them
    cosine_screen: bool = False  # leave out what points away from the mean of the others
    tokenizer: str | None = None  # its name or hash, which every worker that names one must share
    token_budget: int | None = None  # when so many tokens are in the model, the workers are told to finish
    model_files: str | None = None  # the model's folder: its configuration and tokenizer go with every saved model
    save_dir: str | None = None  # the run's folder; what lies there is gone on with
    durability: Literal["round", "checkpoint", "none"] = "round"  # without a save_dir nothing is kept
    save_every: int = 0  # rounds; 0 = only when asked to
    keep_saves: int = 3
    resume: str | None = None  # a saved state, or a folder of them; save_dir itself = there must be a run
    event_log: str | None = None  # a file of JSON lines
    drain_timeout_s: float = 600.0  # how long a shutdown waits for the workers to finish
    compat_port: int | None = None  # `outerstep server` serves the documented torch.save endpoints there
    compat_host: str | None = None  # where that port listens; None = host if insecure, else 127.0.0.1
    insecure: bool = False  # plain HTTP without tokens
    credentials: str | None = None  # the folder with certificate and tokens; None = ~/.config/outerstep
    tls_cert: str | None = None  # a certificate of one's own choice, PEM; None = the one in `credentials`
    tls_key: str | None = None
    advertise: str | None = None  # the host, or host:port, that the join string names; None = host, or found out
    remote_control: bool = False  # take control from other machines than the server's own
    pool_bytes: int = 512 << 20  # of memory for contributions on their way in
    spool_bytes: int = 16 << 30  # and of disk, when that is full; 0 = none
    spool_dir: str | None = None  # None = /var/tmp
    part_size_bytes: int = PART_SIZE_BYTES
    max_connections: int = 1024
    outer_lr: float = OUTER_LR
    outer_momentum: float = OUTER_MOMENTUM
    nesterov: bool = True

    def __post_init__(self) -> None:
        _check_values(self)
        _check_together(self)

    @property
    def wishes(self) -> Wishes:
        return Wishes(
            sync_every=self.sync_every,
            codec=self.codec,
            down_codec=self.down_codec,
            num_fragments=self.num_fragments,
            delay=self.fragment_delay,
            alpha=self.fragment_alpha,
            carry=self.fragment_carry,
            tokenizer=self.tokenizer,
        )

    @property
    def keeps(self) -> Literal["round", "checkpoint", "none"]:
        """The durability in force."""
        return "none" if self.save_dir is None else self.durability

    @property
    def delayed_nesterov(self) -> int:
        """N of Delayed Nesterov; 0 = the outer optimizer steps at every round."""
        if not self.async_mode:
            return 0
        return self.num_workers if self.dn_buffer_size is None else self.dn_buffer_size

    @property
    def rules(self) -> RoundRules:
        return RoundRules(
            num_workers=self.num_workers,
            min_workers=self.min_workers,
            quorum=1 if self.async_mode else self.quorum,
            asynchronous=self.async_mode,
            grace_s=self.grace_s,
            round_deadline_s=self.round_deadline_s,
            start_deadline_s=self.start_deadline_s,
            max_staleness=self._max_staleness,
            weigh_staleness=self._weighs_staleness,
            weight_by=self.weight_by,
            max_weight_ratio=self.max_weight_ratio,
            norm_screen=self.norm_screen,
            aggregation=self.combining,
            dylu=self.dylu,
            dylu_base=self.dylu_base_sync_every,
        )

    @property
    def combining(self) -> Aggregation:
        """How the contributions of a round become one."""
        return Aggregation(**{field.name: getattr(self, field.name) for field in fields(Aggregation)})

    @property
    def _weighs_staleness(self) -> bool:
        return (self.staleness_policy or ("log" if self.async_mode else "weight")) == "weight"

    @property
    def _max_staleness(self) -> int:
        if self.max_staleness is not None:
            return self.max_staleness
        return 16 * self.num_workers if self.async_mode else RoundRules.max_staleness


def _check_values(config: ServerConfig) -> None:
    """Each by itself: what it may be, and in which range."""
    check_whole(
        config, 1, "num_workers", "min_workers", "pool_bytes", "max_connections", "part_size_bytes", "keep_saves"
    )
    check_whole(config, 1, "bucket_size")
    check_whole(config, 1, "attackers", "aggregation_iterations", optional=True)
    check_whole(config, 0, "spool_bytes", "save_every")
    check_whole(
        config, 1, "sync_every", "num_fragments", "quorum", "dylu_base_sync_every", "token_budget", optional=True
    )
    check_whole(config, 0, "port", "compat_port", "fragment_delay", "dn_buffer_size", "max_staleness", optional=True)
    check_number(config, 0.0, "heartbeat_timeout_s", "grace_s", "outer_lr", "outer_momentum", "drain_timeout_s")
    check_number(config, 1.0, "max_weight_ratio")
    check_number(config, 0.0, "norm_screen")
    check_number(config, 0.0, "round_deadline_s", "start_deadline_s", optional=True)
    check_number(config, 0.0, "fragment_alpha", "trim_fraction", "clip_radius", optional=True)
    check_text(config, "host", optional=False)
    check_text(config, "codec", "down_codec", "spool_dir", "save_dir", "resume", "model_files", "event_log")
    check_text(config, "compat_host", "credentials", "tls_cert", "tls_key", "advertise", "tokenizer")
    check_label(config, "tokenizer")
    check_one_of(config, (True, False), "embeddings_apart", "nesterov", "async_mode", "dylu")
    check_one_of(config, (True, False), "insecure", "remote_control", "deterministic", "cosine_screen")
    check_one_of(config, get_args(RuleName), "aggregation")
    check_one_of(config, (True, False, None), "fragment_carry")
    check_one_of(config, ("log", "weight", None), "staleness_policy")
    check_one_of(config, ("round", "checkpoint", "none"), "durability")
    check_one_of(config, ("equal", "samples", "tokens"), "weight_by")
    check_one_of(config, ("contiguous", "strided", "counted"), "fragment_strategy")


def _check_together(config: ServerConfig) -> None:
    """What goes with what; and ranges that are more than a lower end."""
    if config.min_workers > config.num_workers:
        raise ConfigError(f"min_workers ({config.min_workers}) must not exceed num_workers ({config.num_workers})")
    if config.quorum is not None and config.quorum > config.num_workers:
        raise ConfigError(f"quorum ({config.quorum}) must not exceed num_workers ({config.num_workers})")
    check_mixing(config.fragment_alpha, config.fragment_carry)
    _check_aggregation(config)
    if config.async_mode and config.quorum not in (None, 1):
        raise ConfigError(f"async_mode is quorum 1; got quorum {config.quorum}: leave one of the two out")
    if config.async_mode and config.min_workers > 1:
        raise ConfigError(f"async_mode closes a round with one contribution; got min_workers {config.min_workers}")
    if config.quorum is not None and config.quorum < config.min_workers:
        raise ConfigError(f"quorum ({config.quorum}) must not be below min_workers ({config.min_workers})")
    if config.dn_buffer_size and not config.async_mode:
        raise ConfigError(f"dn_buffer_size ({config.dn_buffer_size}) needs async_mode=True")
    if config.save_every and config.save_dir is None:
        raise ConfigError(f"save_every ({config.save_every}) needs save_dir")
    if 0.0 < config.norm_screen < 1.0:
        raise ConfigError(
            f"norm_screen must be ≥ 1, or 0 for none, got {config.norm_screen:g}: below 1 the usual size is too large"
        )
    if config.durability == "checkpoint" and config.save_dir is None:
        raise ConfigError("durability 'checkpoint' needs save_dir, the folder that the run is kept in")
    if config.durability == "none" and config.save_every:
        raise ConfigError(f"save_every ({config.save_every}) saves by itself, durability 'none' does not: choose one")
    _check_security(config)
    if config.compat_port is not None and config.weight_by != "equal":
        raise ConfigError(
            f"weight_by must be 'equal' with compat_port, got {config.weight_by!r}: clients of the older protocol "
            "report neither samples nor tokens; leave one of the two out"
        )
    if config.spool_dir is not None and not Path(config.spool_dir).is_dir():
        raise ConfigError(f"spool_dir must be a folder, got {config.spool_dir!r}")
    for name in ("port", "compat_port"):
        port = getattr(config, name)
        if port is not None and port > 65535:
            raise ConfigError(f"{name} must be between 0 and 65535, got {port}")
    if not 64 <= config.part_size_bytes <= PART_SIZE_BYTES or config.part_size_bytes % 64:
        raise ConfigError(
            f"part_size_bytes must be a multiple of 64 between 64 and {PART_SIZE_BYTES}, got {config.part_size_bytes}"
        )


def _check_security(config: ServerConfig) -> None:
    if (config.tls_cert is None) != (config.tls_key is None):
        raise ConfigError(
            f"tls_cert and tls_key go together, got {config.tls_cert!r} and {config.tls_key!r}: give both or neither"
        )
    if config.insecure and config.tls_cert is not None:
        raise ConfigError("insecure is plain HTTP, tls_cert is TLS: leave one of the two out")
    if config.advertise is not None:
        parse_address(config.advertise)
    if config.compat_host is not None and config.compat_port is None:
        raise ConfigError(f"compat_host ({config.compat_host!r}) needs compat_port")


def _check_aggregation(config: ServerConfig) -> None:
    weigh = f"weight_by {config.weight_by!r}" if config.weight_by != "equal" else ""
    if not weigh and config.quorum is not None and config._weighs_staleness:
        weigh = "a quorum with staleness_policy 'weight', by which late ones count less ('log' leaves them equal)"
    config.combining.check_run(
        num_workers=config.num_workers,
        quorum=config.quorum,
        asynchronous=config.async_mode,
        weigh=weigh,
        norm_screen=config.norm_screen,
    )
