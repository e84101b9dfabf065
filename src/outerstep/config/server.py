"""What a server can be told, and which values do not go together."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar, Literal

from ..coordination.server.quotas import QuotaLimits
from ..coordination.server.rounds import OWN_RULES, WHOSE, Aggregation, RoundRules, RuleName
from ..coordination.weights import MAX_WEIGHT_RATIO
from ..defaults import OUTER_LR, OUTER_MOMENTUM, PART_SIZE_BYTES, SYNC_EVERY
from ..errors import ConfigError
from ..screens import FACTOR
from ..security import DEFAULT_PORT, is_join_string, parse_address
from ..types import Count, Positive, Wishes
from .checks import Checked, check_label, check_loggers, check_mixing, wishes_of
from .effects import Needs
from .kinds import AtLeastOne, NotNegative
from .outer_step import BY_NAME, SHIPPED, check_outer_step, with_named_class
from .setting import (
    ABOVE,
    AGGREGATION,
    ASYNC,
    CONTROLLER,
    LIMITS,
    MODEL,
    NETWORK,
    OBSERVING,
    OUTER,
    ROUNDS,
    SAVING,
    SECURITY,
    STREAMING,
    row,
    setting,
)

DEFAULT_HOST = "127.0.0.1"
LEAST_POOL_BYTES = 128 << 20  # contributions to small models come faster without files
POOL_BYTES_ALONE = 512 << 20  # without files
FIRST_WORKER = "the first worker's wish, else"

QUORUM = Needs("quorum or async_mode (--async)", lambda c: c.quorum is not None or c.async_mode)
SEVERAL = Needs("num_fragments above 1", lambda c: c.num_fragments != 1)
TARGET = Needs("target_utilization", lambda c: c.target_utilization is not None)
PLACE = Needs("save_dir", lambda c: c.save_dir is not None)


def _of_rules(field: str) -> Needs:
    rules = WHOSE[field]
    return Needs(f"aggregation {' or '.join(rules)}", lambda c: c.aggregation in rules)


@dataclass(frozen=True, kw_only=True)
class ServerCommand(Checked):
    """What `outerstep server` is told beside a ServerConfig."""

    # fmt: off
    model: str | None = setting(None, MODEL,
        "Folder with model.safetensors, or shards and their index; outerstep.save_model writes one.",
        "none; --save-dir or --resume must then hold a run", flags="-m --model")
    from_checkpoint: bool = setting(False, MODEL, "The model is a training checkpoint.", flags="-c --from-checkpoint",
        needs=Needs("model (-m)", lambda c: c.model is not None))
    above: str | None = setting(None, ABOVE,
        "This server and its workers are together one worker of the server there: its host:port, or join string; with "
        "commas between, the places it may have been moved to.",
        "none: this is the top")
    via: str | None = setting(None, ABOVE,
        "Servers that relay to the one above, as host:port with commas between: taken if the straight way is cut, or "
        "slower by a quarter.", "the straight way only", needs=Needs("above", lambda c: c.above is not None))
    relay: bool = setting(False, ABOVE,
        "Relay for other clusters that have joined this server: pass their bytes on, as they are, to the server above.",
        needs=Needs("above", lambda c: c.above is not None))
    cluster: str | None = setting(None, ABOVE,
        "The name of this cluster up there, which survives restarts.", "this machine's name",
        needs=Needs("above", lambda c: c.above is not None))
    above_every: Positive | None = setting(None, ABOVE,
        "Rounds of this cluster between two exchanges up there.", "as the run above says",
        needs=Needs("above", lambda c: c.above is not None))
    above_wait_s: NotNegative | None = setting(None, ABOVE,
        "Seconds that workers wait for an exchange up there before they take their next steps; 0 = they do not.",
        "60, or as long as the run above gives a round",
        needs=Needs("above", lambda c: c.above is not None))
    log_json: bool = setting(False, OBSERVING,
        "Write the log as JSON, one object per line, instead of text for people.")
    inner_momentum: bool = setting(False, ABOVE,
        "Insist on an outer_momentum above 0 in this cluster: right if the run above has none; if it has some, too, "
        "log and status warn.",
        needs=Needs("above", lambda c: c.above is not None))
    # fmt: on

    def __post_init__(self) -> None:
        super().__post_init__()
        for given in (self.above, self.via):
            for address in re.split(r"[,\s]+", given) if given is not None else ():
                if not is_join_string(address):
                    parse_address(address)


@dataclass(frozen=True, kw_only=True)
class ServerConfig(Checked):
    """Everything a server can be told."""

    OLD_NAMES: ClassVar = {
        "heartbeat_timeout": "heartbeat_timeout_s",
        "grace_period": "grace_s",
        "dylu_enabled": "dylu",
        "save_every_n_rounds": "save_every",
    }
    own_words: ClassVar = {"aggregation": OWN_RULES}

    # fmt: off
    num_workers: Positive = field(
        metadata=row(ROUNDS, "Workers that the first round waits for; later ones go on with those that are alive.",
            flags="-n --num-workers"))
    sync_every: Positive | None = setting(None, ROUNDS,
        "H: local steps between two exchanges.", f"{FIRST_WORKER} {SYNC_EVERY}")
    min_workers: Positive = setting(RoundRules.min_workers, ROUNDS,
        "No round closes with fewer contributions, also when workers died or left.")
    quorum: Positive | None = setting(None, ROUNDS, "Contributions that close a round.", "all expected workers")
    grace_s: NotNegative = setting(RoundRules.grace_s, ROUNDS,
        "Seconds to wait for more once the quorum is in.", flags="--grace --grace-period", needs=QUORUM)
    round_deadline_s: NotNegative | None = setting(None, ROUNDS,
        "Close a round this many seconds after its first contribution.", "wait for all that are alive",
        needs=Needs("rounds that wait: no async_mode, or grace_s", lambda c: not c.async_mode or c.grace_s))
    start_deadline_s: NotNegative | None = setting(None, ROUNDS,
        "Start without the missing workers after this many seconds.", "wait for num_workers",
        needs=Needs("a start that waits: no async_mode", lambda c: not c.async_mode))
    heartbeat_timeout_s: NotNegative = setting(120.0, ROUNDS,
        "Seconds of silence until a worker counts as dead; 0 = never.")
    tokenizer: str | None = setting(None, ROUNDS,
        "The tokenizer's name or hash: a worker that names another is refused.",
        "the first worker's, else not checked")
    weight_by: Literal["equal", "samples", "tokens"] = setting("equal", ROUNDS,
        "What a contribution's weight is: equal for all, or its size.")
    max_weight_ratio: AtLeastOne = setting(MAX_WEIGHT_RATIO, ROUNDS,
        "No weight is further than this factor from the usual one.")
    max_tokens_per_s: AtLeastOne | None = setting(None, ROUNDS,
        "Of the tokens, samples and steps that a worker claims, so many count, times the seconds since its last "
        "contribution.", "4 times the median of the others; a lone worker is not bounded", flags="--max-tokens-per-s")
    norm_screen: NotNegative = setting(FACTOR, ROUNDS,
        "Leave out contributions that are so many times as large as usual; 0 = none.")
    token_budget: Positive | None = setting(None, ROUNDS,
        "Tokens after which the workers are told to finish.", "no end")
    aggregation: RuleName = setting("mean", AGGREGATION,
        "How the contributions of a round become one: mean, or to withstand bad ones trimmed_mean, median, krum, "
        "multi_krum, geometric_median or centered_clipping.")
    trim_fraction: NotNegative | None = setting(None, AGGREGATION,
        "Of trimmed_mean: the fraction of values left out at each end.",
        "0.2, and at least one", needs=_of_rules("trim_fraction"))
    attackers: Positive | None = setting(None, AGGREGATION,
        "f of krum and multi_krum: how many bad ones to withstand.", "1", needs=_of_rules("attackers"))
    clip_radius: NotNegative | None = setting(None, AGGREGATION,
        "Of centered_clipping: no contribution pulls farther than this from the last aggregate.",
        "the median distance to it", needs=_of_rules("clip_radius"))
    aggregation_iterations: Positive | None = setting(None, AGGREGATION,
        "How often the rule improves its result.", "32 and 3", needs=_of_rules("aggregation_iterations"))
    bucket_size: Positive = setting(1, AGGREGATION,
        "Average random groups of so many contributions before the rule; 1 = do not, 2 is usual.",
        needs=Needs("an aggregation other than mean", lambda c: c.aggregation != "mean"))
    cosine_screen: bool = setting(False, AGGREGATION,
        "Leave out contributions that point away from the mean of the others; needs five contributions.")
    async_mode: bool = setting(False, ASYNC, "Every contribution is a round of its own: nobody waits.", flags="--async")
    dn_buffer_size: Count | None = setting(None, ASYNC,
        "N of Delayed Nesterov: momentum takes part at every Nth contribution; 0 = off, which diverged in our "
        "measurement.", "num_workers if asynchronous",
        needs=Needs("async_mode (--async)", lambda c: c.async_mode or c.dn_buffer_size == 0))
    dylu: bool = setting(False, ASYNC, "Dynamic local updates: slower workers take fewer steps between exchanges.")
    dylu_base_sync_every: Positive | None = setting(None, ASYNC, "H of the fastest worker.", "sync_every",
        needs=Needs("dylu", lambda c: c.dylu))
    staleness_policy: Literal["log", "weight"] | None = setting(None, ASYNC,
        "weight: late contributions count less; log: they are only noted.", "log if asynchronous, else weight",
        needs=QUORUM)
    max_staleness: Count | None = setting(None, ASYNC,
        "Refuse contributions that are more rounds old.", "4, asynchronous: 16 per worker")
    num_fragments: Positive | None = setting(None, STREAMING,
        "Number of pieces in which the model is exchanged.", f"{FIRST_WORKER} 1", flags="--num-fragments --fragments")
    fragment_strategy: Literal["contiguous", "strided", "counted"] = setting("contiguous", STREAMING,
        "contiguous: neighbouring layers together; strided: layer i in fragment i mod P; counted: as many tensors "
        "in each, as clients of the older protocol cut.", needs=SEVERAL)
    embeddings_apart: bool = setting(False, STREAMING, "Give the embedding tables a fragment of their own.",
        needs=SEVERAL)
    fragment_delay: Count | None = setting(None, STREAMING,
        "τ: steps between sending a fragment and adopting its agreement.",
        f"{FIRST_WORKER} 0 for one fragment and up to 5 for several")
    fragment_alpha: NotNegative | None = setting(None, STREAMING,
        "α: how much of the local copy is kept then.", f"{FIRST_WORKER} 0")
    fragment_carry: bool | None = setting(None, STREAMING,
        "Keep the steps taken in between instead of mixing.", f"{FIRST_WORKER} only if τ is above a tenth of H")
    codec: str | None = setting(None, STREAMING,
        "How contributions travel: fp32, bf16, int8, int4, e3m0 or sparse64, with +feedback or +stochastic if you "
        "like; \"int4,embeddings=int8,norms=fp32\" sets some tensors apart.", f"{FIRST_WORKER} bf16")
    down_codec: str | None = setting(None, STREAMING,
        "How agreements travel: the same, but not sparse; fp32 sends the weights, any other the change.",
        "the one that goes with --codec")
    deterministic: bool = setting(False, OUTER,
        "Add contributions in the order of their workers' names, so that a repeated run has the same bits.")
    outer_optimizer: str = setting(SHIPPED, OUTER,
        "Takes the outer step: nesterov; a class of torch.optim, such as adamw; or module:Class of your own.")
    outer_options: str | None = setting(None, OUTER,
        "What an outer optimizer by name is made with: KEY=VALUE, several with spaces between, or the flag again.",
        "its own defaults", flags="--outer-option", needs=BY_NAME, repeats=True)
    outer_lr: NotNegative | None = setting(None, OUTER,
        "η of the outer step.", f"{OUTER_LR}; of another outer_optimizer its own")
    outer_momentum: NotNegative | None = setting(None, OUTER,
        "μ of the outer step.", f"{OUTER_MOMENTUM}; of another outer_optimizer its own")
    nesterov: bool | None = setting(None, OUTER,
        "Nesterov or plain momentum.", "Nesterov; of another outer_optimizer its own")
    target_utilization: NotNegative | None = setting(None, CONTROLLER,
        "Share of the time that is to be spent on training; sync_every, codec, fragment_delay and more are then chosen "
        "by what is measured, again and again.", "nothing is chosen by itself")
    least_sync_every: Positive | None = setting(None, CONTROLLER,
        "No shorter interval is chosen.", "10 steps", needs=TARGET)
    most_sync_every: Positive | None = setting(None, CONTROLLER,
        "No longer interval is chosen.", "500 steps; 100 for small models with four members or more", needs=TARGET)
    global_batch: Count = setting(0, CONTROLLER,
        "Samples of one round, of all members together, that batch sizes are recommended for; 0 = as they are.",
        needs=TARGET)
    policy: str | None = setting(None, CONTROLLER,
        "A policy of your own, MODULE:FUNCTION, asked before the controller.", "none", needs=TARGET)
    save_dir: str | None = setting(None, SAVING,
        "Folder that keeps the run; a run found there is resumed.",
        "outerstep-run; from Python, or with --durability none: nothing is kept")
    durability: Literal["round", "checkpoint", "none"] = setting("round", SAVING,
        "round: every round is on disk before a worker hears of it; checkpoint: only saved states are; none: only "
        "those that you ask for.", needs=Needs("save_dir", lambda c: c.save_dir is not None or c.durability == "none"))
    model_files: str | None = setting(None, SAVING,
        "Folder whose configuration and tokenizer go with every saved model.", "the model's own")
    save_every: Count = setting(0, SAVING,
        "Save a state every so many rounds too; 0 = when asked to, at the end, and when the journal is long.",
        needs=PLACE)
    keep_saves: Positive = setting(3, SAVING, "Saved states to keep; older ones are deleted.", needs=PLACE)
    resume: str | None = setting(None, SAVING,
        "Resume from a saved state, or the newest in a folder; without a value: the run in --save-dir, which must "
        "exist.", "the run in --save-dir, else a new one")
    event_log: str | None = setting(None, SAVING, "File to append events to, as JSON lines.", "none")
    log_to: str | None = setting(None, OBSERVING,
        "Write metrics there, too, with commas between: tensorboard, wandb, mlflow, trackio, otel; each is an extra.",
        "nowhere but metrics.jsonl")
    host: str = setting(DEFAULT_HOST, NETWORK,
        "Address to listen on; 0.0.0.0 = all of this machine's, so that other machines can join.")
    port: Count | None = setting(DEFAULT_PORT, NETWORK,
        "Port to listen on; 0 = any free one, none = the first from 8512 on.", "the first free one from 8512 on")
    compat_port: Count | None = setting(None, NETWORK,
        "Serve the documented torch.save endpoints on this port too, in plain HTTP without tokens.", "off")
    compat_host: str | None = setting(None, NETWORK,
        "Where that port listens; anyone who reaches it can change the model.", "127.0.0.1, with --insecure as --host",
        needs=Needs("compat_port", lambda c: c.compat_port is not None))
    advertise: str | None = setting(None, NETWORK,
        "Host, or host:port, that the join string names.", "--host, for 0.0.0.0 this machine's address")
    credentials: str | None = setting(None, SECURITY,
        "Folder with the server's certificate and tokens.", "~/.config/outerstep")
    tls_cert: str | None = setting(None, SECURITY, "Certificate to show, as a PEM file.", "one made at the first start")
    tls_key: str | None = setting(None, SECURITY, "Its private key, as a PEM file.", "one made at the first start")
    insecure: bool = setting(False, SECURITY,
        "Plain HTTP without tokens: anyone who reaches the port can join, and read and change the model.")
    remote_control: bool = setting(False, SECURITY,
        "Take control from other machines and from the page too, with the admin token.")
    page: bool = setting(True, NETWORK, "Show the run in a browser, at /page (`outerstep page` prints a link).")
    require_identity: bool = setting(False, SECURITY,
        "Refuse workers that have neither a key nor a token of their own, as those of outerstep 0.2.")
    max_connections: Positive = setting(1024, LIMITS, "Connections open at the same time.")
    max_joins_per_minute: Positive = setting(QuotaLimits.joins, LIMITS,
        "Joins of newcomers with one token, of which one worker has a tenth; four minutes' worth at once.")
    max_records_per_minute: Positive = setting(QuotaLimits.records, LIMITS,
        "Records that their coming and going makes in the journal, of which one worker has a tenth.")
    max_refused_per_minute: Positive = setting(QuotaLimits.refused, LIMITS,
        "Contributions of theirs that are refused for what they are, of which one worker has a tenth.")
    max_bytes_per_minute: Positive | None = setting(None, LIMITS,
        "Bytes of contributions that newcomers with one token may send, and as many each other worker.", "any number")
    max_hashed_per_minute: Positive = setting(QuotaLimits.hashed, LIMITS,
        "Bytes that are hashed for jobs of newcomers with one token, and as many for each other worker; or one model.")
    max_open_uploads: Positive = setting(QuotaLimits.open_uploads, LIMITS,
        "Contributions of newcomers with one token that may be on their way in.")
    pool_bytes: Positive | None = setting(None, LIMITS,
        "Memory for contributions on their way in, in bytes.",
        "two of the whole model, 128 MiB at least; 512 MiB without a spool")
    spool_bytes: Count = setting(16 << 30, LIMITS, "Disk for them when that is full, in bytes; 0 = none.")
    spool_dir: str | None = setting(None, LIMITS, "Where on disk.", "/var/tmp",
        needs=Needs("spool_bytes above 0", lambda c: c.spool_bytes != 0))
    threads: Positive | None = setting(None, LIMITS,
        "Threads that check, add up and close, and as many that look at what arrives.",
        "the cores it may use, or OMP_NUM_THREADS; 2 at least")
    device: str = setting("cpu", LIMITS,
        "Where the model is kept and the outer step taken: cpu, cuda, or cuda:1 of several; a GPU gives the bits of "
        "the CPU, which goes on where the GPU has no room.")
    part_size_bytes: Positive | None = setting(None, LIMITS, "Size of the parts that payloads travel in.",
        "1 to 16 MiB, by the largest fragment")
    drain_timeout_s: NotNegative = setting(600.0, LIMITS, "Seconds that a shutdown waits for the workers to finish.")
    # fmt: on

    def __post_init__(self) -> None:
        super().__post_init__()
        check_label(self, "tokenizer")
        check_loggers(self.log_to)
        _check_together(self)

    current_spelling = staticmethod(with_named_class)

    @property
    def wishes(self) -> Wishes:
        return wishes_of(self)

    @property
    def least_pool_bytes(self) -> int:
        """Memory for contributions, as far as it is known before there is a model."""
        if self.pool_bytes is not None:
            return self.pool_bytes
        return LEAST_POOL_BYTES if self.spool_bytes else POOL_BYTES_ALONE

    @property
    def room_bytes(self) -> int:
        """For contributions in memory and on disk."""
        return self.least_pool_bytes + self.spool_bytes

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
            max_tokens_per_s=self.max_tokens_per_s,
            norm_screen=self.norm_screen,
            aggregation=self.combining,
            dylu=self.dylu,
            dylu_base=self.dylu_base_sync_every,
        )

    @property
    def quotas(self) -> QuotaLimits:
        return QuotaLimits(
            joins=self.max_joins_per_minute,
            records=self.max_records_per_minute,
            refused=self.max_refused_per_minute,
            bytes=self.max_bytes_per_minute,
            open_uploads=self.max_open_uploads,
            hashed=self.max_hashed_per_minute,
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


def _check_together(config: ServerConfig) -> None:
    """What goes with what; and ranges that are more than a lower end."""
    if config.min_workers > config.num_workers:
        raise ConfigError(f"min_workers ({config.min_workers}) must not exceed num_workers ({config.num_workers})")
    if config.quorum is not None and config.quorum > config.num_workers:
        raise ConfigError(f"quorum ({config.quorum}) must not exceed num_workers ({config.num_workers})")
    check_mixing(config.fragment_alpha, config.fragment_carry)
    check_outer_step(config)
    _check_aggregation(config)
    if config.async_mode and config.quorum not in (None, 1):
        raise ConfigError(f"async_mode is quorum 1; got quorum {config.quorum}: leave one of the two out")
    if config.async_mode and config.min_workers > 1:
        raise ConfigError(f"async_mode closes a round with one contribution; got min_workers {config.min_workers}")
    if config.quorum is not None and config.quorum < config.min_workers:
        raise ConfigError(f"quorum ({config.quorum}) must not be below min_workers ({config.min_workers})")
    if 0.0 < config.norm_screen < 1.0:
        raise ConfigError(
            f"norm_screen must be ≥ 1, or 0 for none, got {config.norm_screen:g}: below 1 the usual size is too large"
        )
    if config.durability == "none" and config.save_every:
        raise ConfigError(f"save_every ({config.save_every}) saves by itself, durability 'none' does not: choose one")
    _check_security(config)
    _check_controller(config)
    if config.compat_port is not None and config.weight_by != "equal":
        raise ConfigError(
            f"weight_by must be 'equal' with compat_port, got {config.weight_by!r}: clients of the older protocol "
            "report neither samples nor tokens; leave one of the two out"
        )
    if not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", config.device):
        raise ConfigError(f"device must be cpu, cuda or cuda:N, got {config.device!r}")
    if config.spool_dir is not None and not Path(config.spool_dir).is_dir():
        raise ConfigError(f"spool_dir must be a folder, got {config.spool_dir!r}")
    for name in ("port", "compat_port"):
        port = getattr(config, name)
        if port is not None and port > 65535:
            raise ConfigError(f"{name} must be between 0 and 65535, got {port}")
    size = config.part_size_bytes
    if size is not None and (not 64 <= size <= PART_SIZE_BYTES or size % 64):
        raise ConfigError(f"part_size_bytes must be a multiple of 64 between 64 and {PART_SIZE_BYTES}, got {size}")


def _check_controller(config: ServerConfig) -> None:
    target, least, most = config.target_utilization, config.least_sync_every, config.most_sync_every
    if target is not None and not 0.0 < target < 1.0:
        raise ConfigError(f"target_utilization must lie between 0 and 1, got {target:g}; 0.95 is usual")
    for name in ("async_mode", "dylu"):
        if target is not None and getattr(config, name):
            raise ConfigError(
                f"target_utilization and {name} do not go together: the controller gives each worker its number of "
                "steps by itself, for rounds that all take part in; leave one of the two out"
            )
    if least is not None and most is not None and least > most:
        raise ConfigError(f"least_sync_every ({least}) must not exceed most_sync_every ({most})")


def _check_security(config: ServerConfig) -> None:
    if (config.tls_cert is None) != (config.tls_key is None):
        raise ConfigError(
            f"tls_cert and tls_key go together, got {config.tls_cert!r} and {config.tls_key!r}: give both or neither"
        )
    if config.insecure and config.tls_cert is not None:
        raise ConfigError("insecure is plain HTTP, tls_cert is TLS: leave one of the two out")
    if config.advertise is not None:
        parse_address(config.advertise)


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
