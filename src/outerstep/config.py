"""Settings as frozen dataclasses: every value checked where it is made, every error naming field, value and range."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import msgspec

from .coordination.aggregation import Aggregation, RuleName
from .coordination.rounds import RoundRules
from .errors import ConfigError
from .security import DEFAULT_PORT as DEFAULT_PORT
from .security import parse_address, redact
from .types import Wishes, WorkerId

DEFAULT_HOST = "127.0.0.1"
LABEL = 256  # characters: what a message carries of a name
ALLREDUCE = "allreduce"  # instead of a server's address: the ranks of the job agree among themselves
TORCHFT = "torchft"  # likewise: replicas that meet at a lighthouse do
LIGHTHOUSE_VARIABLE = "TORCHFT_LIGHTHOUSE"  # where torchft itself looks for it
GOSSIP = "gossip"  # likewise: peers that join and leave do
PEERS_ALONE = ("peers", "advertise", "peer_dir", "insecure", "announce", "aggregation", "trim_fraction",
               "cosine_screen", "bucket_size", "min_peers", "liars", "round_deadline_s", "heartbeat_timeout",
               "pattern")  # fmt: skip
MOST = 1 << 53  # no setting is larger; JSON numbers are exact up to here

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Everything a server can be told. None for sync_every, num_fragments, codec, down_codec, fragment_delay,
    fragment_alpha or fragment_carry = the first worker decides."""

    num_workers: int
    host: str = DEFAULT_HOST
    port: int | None = DEFAULT_PORT  # None = the first free one from 8512 on, 0 = any free one
    min_workers: int = 1
    heartbeat_timeout: float = 120.0  # seconds of silence until a worker counts as dead; 0 = never
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
    dylu_enabled: bool = False  # give slower workers fewer steps between exchanges
    dylu_base_sync_every: int | None = None  # H of the fastest worker; None = sync_every
    quorum: int | None = None  # None = all expected workers
    grace_period: float = 0.0  # seconds to wait for more once the quorum is in
    round_deadline_s: float | None = None
    start_deadline_s: float | None = None
    staleness_policy: Literal["log", "weight"] | None = None  # None = log if asynchronous, else weight
    max_staleness: int | None = None  # refuse older ones; None = 4 rounds, asynchronous: 16 per worker
    weight_by: Literal["equal", "samples", "tokens"] = "equal"
    max_weight_ratio: float = 10.0  # no weight further than this factor from the usual one
    norm_screen: float = 2.0  # leave out what is so many times as large as usual (coordination/screen.py); 0 = off
    aggregation: RuleName = "mean"  # how the contributions of a round become one (coordination/aggregation.py)
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
    part_size_bytes: int = 16 << 20
    max_connections: int = 1024
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        _whole(self, 1, "num_workers", "min_workers", "pool_bytes", "max_connections", "part_size_bytes", "keep_saves")
        _whole(self, 1, "bucket_size")
        _whole(self, 1, "attackers", "aggregation_iterations", optional=True)
        _whole(self, 0, "spool_bytes", "save_every")
        _whole(self, 1, "sync_every", "num_fragments", "quorum", "dylu_base_sync_every", "token_budget", optional=True)
        _whole(self, 0, "port", "compat_port", "fragment_delay", "dn_buffer_size", "max_staleness", optional=True)
        _number(self, 0.0, "heartbeat_timeout", "grace_period", "outer_lr", "outer_momentum", "drain_timeout_s")
        _number(self, 1.0, "max_weight_ratio")
        _number(self, 0.0, "norm_screen")
        _number(self, 0.0, "round_deadline_s", "start_deadline_s", optional=True)
        _number(self, 0.0, "fragment_alpha", "trim_fraction", "clip_radius", optional=True)
        check_text(self, "host", optional=False)
        check_text(self, "codec", "down_codec", "spool_dir", "save_dir", "resume", "model_files", "event_log")
        check_text(self, "compat_host", "credentials", "tls_cert", "tls_key", "advertise", "tokenizer")
        _check_label(self, "tokenizer")
        check_one_of(self, (True, False), "embeddings_apart", "nesterov", "async_mode", "dylu_enabled")
        check_one_of(self, (True, False), "insecure", "remote_control", "deterministic", "cosine_screen")
        check_one_of(self, get_args(RuleName), "aggregation")
        check_one_of(self, (True, False, None), "fragment_carry")
        check_one_of(self, ("log", "weight", None), "staleness_policy")
        check_one_of(self, ("round", "checkpoint", "none"), "durability")
        check_one_of(self, ("equal", "samples", "tokens"), "weight_by")
        check_one_of(self, ("contiguous", "strided", "counted"), "fragment_strategy")
        if self.min_workers > self.num_workers:
            raise ConfigError(f"min_workers ({self.min_workers}) must not exceed num_workers ({self.num_workers})")
        if self.quorum is not None and self.quorum > self.num_workers:
            raise ConfigError(f"quorum ({self.quorum}) must not exceed num_workers ({self.num_workers})")
        _check_mixing(self)
        _check_aggregation(self)
        if self.async_mode and self.quorum not in (None, 1):
            raise ConfigError(f"async_mode is quorum 1; got quorum {self.quorum}: leave one of the two out")
        if self.async_mode and self.min_workers > 1:
            raise ConfigError(f"async_mode closes a round with one contribution; got min_workers {self.min_workers}")
        if self.quorum is not None and self.quorum < self.min_workers:
            raise ConfigError(f"quorum ({self.quorum}) must not be below min_workers ({self.min_workers})")
        if self.dn_buffer_size and not self.async_mode:
            raise ConfigError(f"dn_buffer_size ({self.dn_buffer_size}) needs async_mode=True")
        if self.save_every and self.save_dir is None:
            raise ConfigError(f"save_every ({self.save_every}) needs save_dir")
        if 0.0 < self.norm_screen < 1.0:
            raise ConfigError(
                f"norm_screen must be ≥ 1, or 0 for none, got {self.norm_screen:g}: below 1 the usual size is too large"
            )
        if self.durability == "checkpoint" and self.save_dir is None:
            raise ConfigError("durability 'checkpoint' needs save_dir, the folder that the run is kept in")
        if self.durability == "none" and self.save_every:
            raise ConfigError(f"save_every ({self.save_every}) saves by itself, durability 'none' does not: choose one")
        _check_security(self)
        if self.compat_port is not None and self.weight_by != "equal":
            raise ConfigError(
                f"weight_by must be 'equal' with compat_port, got {self.weight_by!r}: clients of the older protocol "
                "report neither samples nor tokens; leave one of the two out"
            )
        if self.spool_dir is not None and not Path(self.spool_dir).is_dir():
            raise ConfigError(f"spool_dir must be a folder, got {self.spool_dir!r}")
        for name in ("port", "compat_port"):
            port = getattr(self, name)
            if port is not None and port > 65535:
                raise ConfigError(f"{name} must be between 0 and 65535, got {port}")
        if not 64 <= self.part_size_bytes <= 16 << 20 or self.part_size_bytes % 64:
            raise ConfigError(
                f"part_size_bytes must be a multiple of 64 between 64 and {16 << 20}, got {self.part_size_bytes}"
            )

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
            grace_s=self.grace_period,
            round_deadline_s=self.round_deadline_s,
            start_deadline_s=self.start_deadline_s,
            max_staleness=self._max_staleness,
            weigh_staleness=self._weighs_staleness,
            weight_by=self.weight_by,
            max_weight_ratio=self.max_weight_ratio,
            norm_screen=self.norm_screen,
            aggregation=self.combining,
            dylu=self.dylu_enabled,
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
        return 16 * self.num_workers if self.async_mode else 4


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """Everything a worker can be told. None = follow the plan of the run, or without a server the usual."""

    server_addr: str  # host:port, a join string, http://host:port for an insecure server; or one of the three above
    credentials: str | None = (
        None  # the folder that `outerstep join` stored what it knows in; None = ~/.config/outerstep
    )
    worker_id: str | None = None  # None = made from host name and process
    sync_every: int | None = None
    num_fragments: int | None = None
    bf16_comm: bool | None = None  # True = bf16, False = fp32 on the wire
    codec: str | None = None  # of contributions, for more than those two; core/codecs/recipe.py
    down_codec: str | None = None  # of agreements
    fragment_delay: int | None = None  # τ, as in ServerConfig
    fragment_alpha: float | None = None
    fragment_carry: bool | None = None
    dylu: bool | None = None  # let the server set this worker's sync_every by its speed; None = if the run does so
    tokenizer: str | None = None  # its name or hash, which must be the run's
    buffers: Literal["average", "local", "server"] = "average"  # persistent floating-point buffers (BatchNorm's, …)
    anchor: Literal["device", "host"] = "device"  # where the anchor is kept: beside the model, or in host memory
    group: Literal["auto", "off"] = "auto"  # the processes of a torchrun job are one worker; off = each is its own
    connections: int = 4  # parts of one exchange that travel at the same time
    heartbeat_interval: float = 30.0
    on_exit: Literal["global", "local"] = "global"  # what `model` holds afterwards: the agreed weights, or its own
    join_timeout_s: float = 120.0
    offline_after_s: float = 30.0  # without an answer from the server: train on, and contribute when it is back
    offline_rounds: int = 4  # so many exchanges may be left open like that; then it waits
    give_up_after_s: float = 7200.0  # without any answer from the server: one clear error
    stalled_after_s: float = 900.0  # without an optimizer step: stop beating, so that the others go on; 0 = never
    exit_patience_s: float = 60.0  # how long a clean exit waits for a round that cannot close; ten times for no server
    handle_signals: bool = True  # on SIGTERM, SIGUSR1 or Ctrl-C: contribute and leave
    preempt_patience_s: float = 20.0  # after such a signal: be gone within so many seconds, or at the next step
    # Without a server (docs/concepts/allreduce.md, torchft.md), what a server would say; all must say the same.
    outer_lr: float | None = None  # 0.7
    outer_momentum: float | None = None  # 0.9
    nesterov: bool | None = None  # True
    weight_by: Literal["equal", "samples", "tokens"] | None = None  # equal
    peer_timeout_s: float = 1800.0  # how long to wait for a rank that is alive and does not exchange
    on_divergence: Literal["stop", "repair"] = "stop"  # anchors that differ end the run, or one of them is taken
    # Where replicas meet at torchft's lighthouse (docs/concepts/torchft.md).
    lighthouse: str | None = None  # host:port; None = TORCHFT_LIGHTHOUSE
    min_replicas: int = 1  # fewer agree on nothing, and wait
    quorum_timeout_s: float = 300.0  # how long one try to meet waits for the others; then it is tried again
    transfer_timeout_s: float = 60.0  # of what a quorum does together: who takes longer is left out
    replica_backend: Literal["gloo", "nccl"] = "gloo"  # what values travel by, from host memory or from GPU to GPU
    # Between peers (docs/concepts/gossip.md). None from `aggregation` on = as the run has it; its founder: the usual.
    peers: str | None = None  # addresses or join strings to join through, with spaces between; None = found a run
    listen: str = "0.0.0.0:0"  # host:port for the other peers; port 0 = any free one
    advertise: str | None = None  # host, or host:port, that others should call; None = found out
    peer_dir: str | None = None  # keeps who this peer is and what it has said; None = a restart is another peer
    insecure: bool = False  # plain HTTP without tokens
    announce: bool = False  # print the join string, and what to type on the next machine
    aggregation: str | None = None  # mean; core/robust
    trim_fraction: float | None = None
    cosine_screen: bool | None = None  # False
    bucket_size: int | None = None  # 1
    min_peers: int | None = None  # 2, or as many as the rule needs
    liars: int | None = None  # 1: so many may say what they like, of more than three times as many
    round_deadline_s: float | None = None  # wait for all that are alive
    heartbeat_timeout: float | None = None  # 30 seconds of silence until a peer counts as dead
    pattern: Literal["all", "pairs", "exponential"] | None = None  # all: who exchanges with whom

    def __post_init__(self) -> None:
        _whole(self, 1, "sync_every", "num_fragments", optional=True)
        _whole(self, 0, "fragment_delay", optional=True)
        _whole(self, 0, "offline_rounds")
        _whole(self, 1, "connections")
        _number(self, 0.0, "heartbeat_interval", "join_timeout_s", "give_up_after_s", "offline_after_s")
        _number(self, 0.0, "exit_patience_s", "stalled_after_s", "preempt_patience_s")
        _number(self, 1.0, "peer_timeout_s", "quorum_timeout_s", "transfer_timeout_s")
        _whole(self, 1, "min_replicas")
        check_one_of(self, ("gloo", "nccl"), "replica_backend")
        _number(self, 0.0, "outer_lr", "outer_momentum", optional=True)
        _whole(self, 1, "bucket_size", "min_peers", optional=True)
        _whole(self, 0, "liars", optional=True)
        _number(self, 0.0, "trim_fraction", "round_deadline_s", "heartbeat_timeout", optional=True)
        check_text(self, "listen", optional=False)
        check_text(self, "peers", "advertise", "peer_dir", "aggregation")
        check_one_of(self, (True, False), "insecure", "announce")
        check_one_of(self, (True, False, None), "cosine_screen")
        check_one_of(self, ("all", "pairs", "exponential", None), "pattern")
        check_one_of(self, ("stop", "repair"), "on_divergence")
        check_one_of(self, ("equal", "samples", "tokens", None), "weight_by")
        check_one_of(self, (True, False, None), "nesterov")
        _number(self, 0.0, "fragment_alpha", optional=True)
        check_one_of(self, (True, False, None), "fragment_carry", "dylu")
        check_one_of(self, ("average", "local", "server"), "buffers")
        _check_mixing(self)
        check_text(self, "server_addr", optional=False)
        check_text(self, "credentials", "tokenizer", "codec", "down_codec", "lighthouse")
        _check_label(self, "tokenizer")
        _check_who_says(self)
        if self.lighthouse is not None:
            parse_lighthouse(self.lighthouse)
        check_one_of(self, (None, True, False), "bf16_comm")
        check_one_of(self, (True, False), "handle_signals")
        check_one_of(self, ("global", "local"), "on_exit")
        check_one_of(self, ("auto", "off"), "group")
        check_one_of(self, ("device", "host"), "anchor")
        if self.worker_id is not None:
            try:
                msgspec.convert(self.worker_id, WorkerId)
            except msgspec.ValidationError as error:
                raise ConfigError(
                    f"worker_id must be 1 to 128 letters, digits, '.', ':', '-' or '_', beginning with a letter, digit "
                    f"or '_'; got {self.worker_id!r}"
                ) from error

    def __repr__(self) -> str:
        """Without the token that a join string holds."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values |= {name: redact(str(values[name])) for name in ("server_addr", "peers") if values[name] is not None}
        return f"WorkerConfig({', '.join(f'{name}={value!r}' for name, value in values.items())})"

    @property
    def has_server(self) -> bool:
        return self.server_addr not in (ALLREDUCE, GOSSIP, TORCHFT)

    @property
    def wishes(self) -> Wishes:
        cast = None if self.bf16_comm is None else ("bf16" if self.bf16_comm else "fp32")
        return Wishes(
            sync_every=self.sync_every,
            codec=self.codec or cast,
            down_codec=self.down_codec,
            num_fragments=self.num_fragments,
            delay=self.fragment_delay,
            alpha=self.fragment_alpha,
            carry=self.fragment_carry,
            tokenizer=self.tokenizer,
        )


def build(kind: type[T], settings: dict[str, Any]) -> T:
    """A config from keyword arguments; an unknown one is answered with the nearest known one."""
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for name in settings:
        if name not in known:
            raise ConfigError(unknown("setting", name, known))
    missing = [f.name for f in fields(kind) if f.default is MISSING and f.name not in settings]  # type: ignore[arg-type]
    if missing:
        raise ConfigError(f"missing setting: {', '.join(missing)}")
    return kind(**settings)


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """That there is no such setting, key or table, and which one may have been meant."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    return f'unknown {what} "{name}"' + (f'; did you mean "{near[0]}"?' if near else f"; known: {', '.join(known)}")


def parse_lighthouse(address: str) -> str:
    """host:port, with http:// in front or without."""
    text = address.strip().removeprefix("http://").rstrip("/")
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536 or "/" in text:
        raise ConfigError(f"lighthouse must be host:port, got {address!r}; `outerstep lighthouse` prints it")
    return text


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


def _check_mixing(config: ServerConfig | WorkerConfig) -> None:
    alpha = config.fragment_alpha
    if alpha is not None and alpha > 1.0:
        raise ConfigError(f"fragment_alpha must be between 0 and 1, got {alpha:g}")
    if alpha and config.fragment_carry:
        raise ConfigError(
            f"fragment_carry keeps the local steps whole, fragment_alpha={alpha:g} mixes them: choose one"
        )


def _check_who_says(config: WorkerConfig) -> None:
    """What a server decides is not a worker's to say; without one, somebody must, and some things cannot be had."""
    if config.codec is not None and config.bf16_comm is not None:
        raise ConfigError(f"bf16_comm is short for codec, got both (codec={config.codec!r}): leave one of the two out")
    if config.has_server:
        for name in ("outer_lr", "outer_momentum", "nesterov", "weight_by"):
            if getattr(config, name) is not None:
                raise ConfigError(
                    f"{name} is the server's to say, got {getattr(config, name)!r} for a worker: start the server with "
                    f"it, or train without one (server_addr={ALLREDUCE!r}, {GOSSIP!r} or {TORCHFT!r})"
                )
    elif config.dylu:
        raise ConfigError(
            f"dylu needs a server: without one (server_addr={config.server_addr!r}) all take the same steps"
        )
    if config.server_addr != GOSSIP:
        for name in PEERS_ALONE:
            if getattr(config, name) not in (None, False):
                raise ConfigError(
                    f"{name} is for peers, and server_addr is {redact(config.server_addr)!r}: say "
                    f"server_addr={GOSSIP!r}, or leave it out"
                )


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


def check_text(config: object, *names: str, optional: bool = True) -> None:
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, str) and not (value is None and optional):
            raise ConfigError(f"{name} must be text, got {value!r}")


def _check_label(config: object, name: str) -> None:
    value = getattr(config, name)
    if value is not None and not 1 <= len(value) <= LABEL:
        raise ConfigError(f"{name} must be 1 to {LABEL} characters, got {len(value)}; a hash of it will do")


def check_one_of(config: object, allowed: tuple[object, ...], *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not any(value is choice or (isinstance(value, str) and value == choice) for choice in allowed):
            raise ConfigError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
