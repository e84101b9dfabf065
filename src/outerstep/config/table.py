"""Every setting of a server and of a worker, once: its field, its flags, its panel in --help, and a sentence.

Flags, environment variables, TOML keys, `outerstep config`, and the tables in docs/reference/configuration.md are all
made from these rows; types and defaults are those of the config dataclasses. A new field needs a row here, or a test
fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..defaults import OUTER_LR, OUTER_MOMENTUM, PEER_HEARTBEAT_TIMEOUT_S, SYNC_EVERY
from .checks import check_one_of, check_text
from .keywords import settings_of
from .kinds import Kind, defaults_of, kinds_of, shown
from .server import ServerConfig
from .worker import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class ServerCommand:
    """What `outerstep server` is told beside a ServerConfig."""

    model: str | None = None
    from_checkpoint: bool = False

    def __post_init__(self) -> None:
        check_text(self, "model")
        check_one_of(self, (True, False), "from_checkpoint")


@dataclass(frozen=True, kw_only=True)
class WorkerCommand:
    """What `outerstep worker` is told beside a WorkerConfig."""

    devices: str | None = None

    def __post_init__(self) -> None:
        check_text(self, "devices")


@dataclass(frozen=True)
class Setting:
    """One row. `unset` says what None means. A switch, "--async", also has its opposite, "--no-async"."""

    field: str
    flags: str
    panel: str
    help: str
    unset: str = ""

    @property
    def flag(self) -> str:
        """The one that errors and `config show` name."""
        return next(flag for flag in self.flags.split() if flag.startswith("--"))

    @property
    def opposite(self) -> str:
        """Of a switch."""
        return f"--no-{self.flag.removeprefix('--')}"


@dataclass(frozen=True)
class Role:
    """Who is being told: the server or a worker."""

    name: str
    config: type[Any]
    command: type[Any]
    settings: tuple[Setting, ...]
    documented: dict[str, str]  # field -> the variable that training scripts already know

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
        if setting.field not in self.defaults:
            return "Required."
        value = self.defaults[setting.field]
        return f"Default: {setting.unset if value is None else shown(value)}."

    def variables(self, field: str) -> tuple[str, ...]:
        """The environment variables of a field; the first is the one that is written for a training script."""
        names = [f"OUTERSTEP_{name.upper()}" for name in (field, *self.old_names(field))]
        return (self.documented[field], *names) if field in self.documented else tuple(names)

    def old_names(self, field: str) -> list[str]:
        """Names of earlier versions, which are still accepted."""
        return [old for old, current in self.config.OLD_NAMES.items() if current == field]


ROUNDS, ASYNC, STREAMING, OUTER = "Rounds", "Asynchronous", "Streaming", "Outer step"
MODEL, SAVING, NETWORK, SECURITY, LIMITS = "Model", "Saving", "Network", "Security", "Limits"
AGGREGATION = "Robust aggregation"
JOINING, EXCHANGES, PATIENCE = "Joining", "Exchanges", "Patience"
NO_SERVER, PEERS, REPLICAS = "Without a server", "Between peers", "torchft"

FIRST_WORKER = "the first worker's wish, else"
AS_THE_RUN = "as the run has it"

SERVER_SETTINGS = (
    Setting("model", "-m --model", MODEL,
            "Folder with model.safetensors, or shards and their index; outerstep.save_model writes one.",
            "none, which needs a run to go on with"),
    Setting("from_checkpoint", "-c --from-checkpoint", MODEL, "The model is a training checkpoint."),
    Setting("num_workers", "-n --num-workers", ROUNDS, "Workers that the first round waits for."),
    Setting("sync_every", "--sync-every", ROUNDS, "H: local steps between two exchanges.",
            f"{FIRST_WORKER} {SYNC_EVERY}"),
    Setting("min_workers", "--min-workers", ROUNDS, "No round closes with fewer contributions."),
    Setting("quorum", "--quorum", ROUNDS, "Contributions that close a round.", "all expected workers"),
    Setting("grace_s", "--grace --grace-period", ROUNDS, "Seconds to wait for more once the quorum is in."),
    Setting("round_deadline_s", "--round-deadline", ROUNDS,
            "Close a round so many seconds after its first contribution.", "wait for all that are alive"),
    Setting("start_deadline_s", "--start-deadline", ROUNDS,
            "Start without the missing workers after so many seconds.", "wait for num_workers"),
    Setting("heartbeat_timeout_s", "--heartbeat-timeout", ROUNDS,
            "Seconds of silence until a worker counts as dead; 0 = never."),
    Setting("tokenizer", "--tokenizer", ROUNDS,
            "The tokenizer's name or hash: a worker that names another is refused.",
            "the first worker's word, else not looked at"),
    Setting("weight_by", "--weight-by", ROUNDS, "What a contribution's weight is: equal for all, or its size."),
    Setting("max_weight_ratio", "--max-weight-ratio", ROUNDS,
            "No weight is further than this factor from the usual one."),
    Setting("norm_screen", "--norm-screen", ROUNDS,
            "Leave contributions out that are so many times as large as usual; 0 = none."),
    Setting("token_budget", "--token-budget", ROUNDS,
            "When so many tokens are in the model, the workers are told to finish.", "no end"),
    Setting("aggregation", "--aggregation", AGGREGATION,
            "How the contributions of a round become one: mean, or to withstand bad ones trimmed_mean, median, krum, "
            "multi_krum, geometric_median or centered_clipping."),
    Setting("trim_fraction", "--trim-fraction", AGGREGATION,
            "Of trimmed_mean: how many of the smallest and of the largest values are left out, as a part of all.",
            "0.2, and at least one"),
    Setting("attackers", "--attackers", AGGREGATION, "f of krum and multi_krum: how many bad ones to withstand.", "1"),
    Setting("clip_radius", "--clip-radius", AGGREGATION,
            "Of centered_clipping: nobody pulls farther than this from the last aggregate.",
            "the median distance to it"),
    Setting("aggregation_iterations", "--aggregation-iterations", AGGREGATION,
            "Of geometric_median and centered_clipping.", "32 and 3"),
    Setting("bucket_size", "--bucket-size", AGGREGATION,
            "Average random groups of so many contributions before the rule; 1 = do not, 2 is usual."),
    Setting("cosine_screen", "--cosine-screen", AGGREGATION,
            "Leave out what points away from the mean of the others; needs five contributions."),
    Setting("async_mode", "--async", ASYNC, "Every contribution is a round of its own: nobody waits."),
    Setting("dn_buffer_size", "--dn-buffer-size", ASYNC,
            "N of Delayed Nesterov: momentum takes part at every Nth contribution; 0 = off, which diverged in our "
            "measurement.", "num_workers if asynchronous"),
    Setting("dylu", "--dylu", ASYNC,
            "Dynamic local updates: slower workers take fewer steps between exchanges."),
    Setting("dylu_base_sync_every", "--dylu-base-sync-every", ASYNC, "H of the fastest worker.", "sync_every"),
    Setting("staleness_policy", "--staleness-policy", ASYNC,
            "weight: late contributions count less; log: they are only noted.", "log if asynchronous, else weight"),
    Setting("max_staleness", "--max-staleness", ASYNC,
            "Refuse contributions that are more rounds old.", "4, asynchronous: 16 per worker"),
    Setting("num_fragments", "--num-fragments --fragments", STREAMING,
            "Exchange the model in so many pieces.", f"{FIRST_WORKER} 1"),
    Setting("fragment_strategy", "--fragment-strategy", STREAMING,
            "contiguous: neighbouring layers together; strided: layer i in fragment i mod P; counted: as many tensors "
            "in each, as clients of the older protocol cut."),
    Setting("embeddings_apart", "--embeddings-apart", STREAMING, "Give the embedding tables a fragment of their own."),
    Setting("fragment_delay", "--fragment-delay", STREAMING,
            "τ: steps between sending a fragment and taking its agreement over.",
            f"{FIRST_WORKER} 0 for one fragment and up to 5 for several"),
    Setting("fragment_alpha", "--fragment-alpha", STREAMING,
            "α: how much of the local copy is kept then.", f"{FIRST_WORKER} 0"),
    Setting("fragment_carry", "--fragment-carry", STREAMING,
            "Keep the steps taken meanwhile instead of mixing.", f"{FIRST_WORKER} only if τ is above a tenth of H"),
    Setting("codec", "--codec", STREAMING,
            "How contributions travel: fp32, bf16, int8, int4, e3m0 or sparse64, with +feedback or +stochastic if you "
            "like; \"int4,embeddings=int8,norms=fp32\" sets some tensors apart.", f"{FIRST_WORKER} bf16"),
    Setting("down_codec", "--down-codec", STREAMING,
            "How agreements travel: the same, but not sparse; fp32 sends the weights, any other the change.",
            "the one that goes with --codec"),
    Setting("deterministic", "--deterministic", OUTER,
            "Add contributions in the order of their workers' names, so that a repeated run has the same bits."),
    Setting("outer_lr", "--outer-lr", OUTER, "η of the outer step."),
    Setting("outer_momentum", "--outer-momentum", OUTER, "μ of the outer step."),
    Setting("nesterov", "--nesterov", OUTER, "Nesterov or plain momentum."),
    Setting("save_dir", "--save-dir", SAVING,
            "Folder that the run is kept in; a run that lies there is gone on with.",
            "outerstep-run; from Python, or with --durability none: nothing is kept"),
    Setting("durability", "--durability", SAVING,
            "round: every round is on disk before a worker hears of it; checkpoint: only saved states are; none: only "
            "those that you ask for."),
    Setting("model_files", "--model-files", SAVING,
            "Folder whose configuration and tokenizer go with every saved model.", "the model's own"),
    Setting("save_every", "--save-every", SAVING,
            "Save a state every so many rounds too; 0 = when asked to, at the end, and when the journal is long."),
    Setting("keep_saves", "--keep-saves", SAVING, "Saved states to keep; older ones are deleted."),
    Setting("resume", "--resume", SAVING,
            "Go on from a saved state, or the newest in a folder; by itself: with the run in --save-dir or not at all.",
            "the run in --save-dir, else a new one"),
    Setting("event_log", "--event-log", SAVING, "File to append events to, as JSON lines.", "none"),
    Setting("host", "--host", NETWORK,
            "Address to listen on; 0.0.0.0 = all of this machine's, so that other machines can join."),
    Setting("port", "--port", NETWORK, "Port to listen on; 0 = any free one, none = the first from 8512 on.",
            "the first free one from 8512 on"),
    Setting("compat_port", "--compat-port", NETWORK,
            "Serve the documented torch.save endpoints on this port too, in plain HTTP without tokens.", "off"),
    Setting("compat_host", "--compat-host", NETWORK,
            "Where that port listens; whoever reaches it can change the model.",
            "127.0.0.1, with --insecure as --host"),
    Setting("advertise", "--advertise", NETWORK,
            "Host, or host:port, that the join string names.", "--host, for 0.0.0.0 this machine's address"),
    Setting("credentials", "--credentials", SECURITY,
            "Folder with the server's certificate and tokens.", "~/.config/outerstep"),
    Setting("tls_cert", "--tls-cert", SECURITY, "Certificate to show, as a PEM file.", "one made at the first start"),
    Setting("tls_key", "--tls-key", SECURITY, "Its private key, as a PEM file.", "one made at the first start"),
    Setting("insecure", "--insecure", SECURITY,
            "Plain HTTP without tokens: whoever reaches the port can join and read and change the model."),
    Setting("remote_control", "--remote-control", SECURITY,
            "Take control from other machines too, with the admin token."),
    Setting("max_connections", "--max-connections", LIMITS, "Connections open at the same time."),
    Setting("pool_bytes", "--pool-bytes", LIMITS, "Memory for contributions on their way in, in bytes."),
    Setting("spool_bytes", "--spool-bytes", LIMITS, "Disk for them when that is full, in bytes; 0 = none."),
    Setting("spool_dir", "--spool-dir", LIMITS, "Where on disk.", "/var/tmp"),
    Setting("part_size_bytes", "--part-size-bytes", LIMITS, "Size of the parts that payloads travel in."),
    Setting("drain_timeout_s", "--drain-timeout", LIMITS, "Seconds that a shutdown waits for the workers to finish."),
)  # fmt: skip

WORKER_SETTINGS = (
    Setting("topology", "--topology", JOINING,
            "With whom to agree: server = through a server; allreduce = the ranks of the job among themselves; gossip "
            "= peers that join and leave; torchft = replicas that meet at a lighthouse; or the name of a topology that "
            "the script registers."),
    Setting("server_addr", "--server", JOINING,
            "The server's host:port, or its whole join string; http://host:port for a server started with --insecure; "
            "the other topologies have none.", "none"),
    Setting("credentials", "--credentials", JOINING,
            "Folder that `outerstep join` stored what it knows in.", "~/.config/outerstep"),
    Setting("worker_id", "--worker-id", JOINING, "A name that survives restarts.", "made from host and process"),
    Setting("heartbeat_interval_s", "--heartbeat-interval", JOINING, "Seconds between signs of life."),
    Setting("join_timeout_s", "--join-timeout", JOINING, "Seconds to wait for a server that does not answer yet."),
    Setting("devices", "-d --devices", JOINING, "CUDA_VISIBLE_DEVICES for the script.", "as it is"),
    Setting("sync_every", "--sync-every", EXCHANGES, "H: local steps between two exchanges.", AS_THE_RUN),
    Setting("dylu", "--dylu", EXCHANGES,
            "Let the server set this worker's sync_every by its speed.", "if the run does so"),
    Setting("num_fragments", "--num-fragments --fragments", EXCHANGES,
            "Exchange the model in so many pieces.", AS_THE_RUN),
    Setting("bf16_comm", "--bf16", EXCHANGES, "Send bf16, or with --no-bf16 fp32.", AS_THE_RUN),
    Setting("codec", "--codec", EXCHANGES,
            "How contributions travel, if more is to be said than --bf16 can.", AS_THE_RUN),
    Setting("down_codec", "--down-codec", EXCHANGES, "How agreements travel.", AS_THE_RUN),
    Setting("fragment_delay", "--fragment-delay", EXCHANGES,
            "τ: steps between sending a fragment and taking its agreement over.", AS_THE_RUN),
    Setting("fragment_alpha", "--fragment-alpha", EXCHANGES,
            "α: how much of the local copy is kept then.", AS_THE_RUN),
    Setting("fragment_carry", "--fragment-carry", EXCHANGES,
            "Keep the steps taken meanwhile instead of mixing.", AS_THE_RUN),
    Setting("tokenizer", "--tokenizer", EXCHANGES,
            "The tokenizer's name or hash, which must be the run's.", "not looked at"),
    Setting("buffers", "--buffers", EXCHANGES,
            "Persistent floating-point buffers (BatchNorm's): the workers' mean, each its own, or the server's."),
    Setting("anchor", "--anchor", EXCHANGES,
            "Keep the last agreed weights beside the model, or in host memory if a GPU has no room for them."),
    Setting("group", "--group", EXCHANGES, "Be one worker with the other ranks of a torchrun job, or on one's own."),
    Setting("connections", "--connections", EXCHANGES,
            "Parts of one exchange that travel at the same time, each on a connection of its own."),
    Setting("on_exit", "--on-exit", EXCHANGES, "What the model holds afterwards: the agreed weights or its own."),
    Setting("offline_after_s", "--offline-after", PATIENCE,
            "After so many seconds without an answer: train on, and contribute when the server is back."),
    Setting("offline_rounds", "--offline-rounds", PATIENCE, "So many exchanges may be left open like that."),
    Setting("give_up_after_s", "--give-up-after", PATIENCE, "End with an error after so many seconds without one."),
    Setting("stalled_after_s", "--stalled-after", PATIENCE,
            "Without an optimizer step for so many seconds: stop beating, so that the others go on; 0 = never."),
    Setting("exit_patience_s", "--exit-patience", PATIENCE,
            "Seconds that a clean exit waits for a round that cannot close."),
    Setting("handle_signals", "--handle-signals", PATIENCE,
            "On SIGTERM, SIGUSR1 or Ctrl-C: contribute what is left at the next step, and leave."),
    Setting("preempt_patience_s", "--preempt-patience", PATIENCE,
            "Be gone within so many seconds of such a signal, or at the next step if that is later."),
    Setting("outer_lr", "--outer-lr", NO_SERVER, "η of the outer step.", f"{OUTER_LR}, with a server as it says"),
    Setting("outer_momentum", "--outer-momentum", NO_SERVER,
            "μ of the outer step.", f"{OUTER_MOMENTUM}, with a server as it says"),
    Setting("nesterov", "--nesterov", NO_SERVER,
            "Nesterov or plain momentum.", "Nesterov, with a server as it says"),
    Setting("weight_by", "--weight-by", NO_SERVER,
            "What a contribution's weight is: equal for all, or its size.", "equal, with a server as it says"),
    Setting("peer_timeout_s", "--peer-timeout", NO_SERVER,
            "Seconds to wait for a rank that is alive and does not come to an exchange."),
    Setting("on_divergence", "--on-divergence", NO_SERVER,
            "If anchors differ that should be the same: stop, or go on with rank 0's (torchft: what most hold)."),
    Setting("lighthouse", "--lighthouse", REPLICAS,
            "host:port of the lighthouse (`outerstep lighthouse`) that torchft's replicas meet at.",
            "TORCHFT_LIGHTHOUSE"),
    Setting("min_replicas", "--min-replicas", REPLICAS, "So many replicas must take part for an exchange to count."),
    Setting("quorum_timeout_s", "--quorum-timeout", REPLICAS,
            "Seconds that one try to meet the other replicas waits; then it is tried again."),
    Setting("transfer_timeout_s", "--transfer-timeout", REPLICAS,
            "Seconds for what the replicas of a quorum do together; who takes longer is left out of it."),
    Setting("replica_backend", "--replica-backend", REPLICAS,
            "What values travel by between replicas: gloo from host memory, or nccl from GPU to GPU."),
    Setting("peers", "--join", PEERS,
            "Peers to join through: addresses or join strings, several with spaces between.", "none: found a run"),
    Setting("listen", "--listen", PEERS, "host:port on which the other peers reach this one; port 0 = any free one."),
    Setting("advertise", "--advertise", PEERS,
            "Host, or host:port, that the others should call.", "found out"),
    Setting("peer_dir", "--peer-dir", PEERS,
            "Folder that keeps who this peer is and what it has said.",
            "none, a restart is then another peer; `outerstep peer`: outerstep-peer"),
    Setting("insecure", "--insecure", PEERS,
            "Plain HTTP without tokens: whoever reaches a peer's port can join and read and change the model."),
    Setting("announce", "--announce", PEERS,
            "Print the join string and what to type on the next machine; `outerstep peer` does unless told not to."),
    Setting("aggregation", "--aggregation", PEERS,
            "How contributions become one: mean, trimmed_mean, median, krum, multi_krum, geometric_median or "
            "centered_clipping.", "as the run has it, founder: mean"),
    Setting("trim_fraction", "--trim-fraction", PEERS,
            "Of trimmed_mean: how much is cut off at each end.", "a fifth, and at least one"),
    Setting("cosine_screen", "--cosine-screen", PEERS,
            "Leave out what points away from the mean of the others (five peers or more).",
            "as the run has it, founder: off"),
    Setting("bucket_size", "--bucket-size", PEERS,
            "2 averages random pairs before the rule.", "as the run has it, founder: 1"),
    Setting("min_peers", "--min-peers", PEERS,
            "No round is made of fewer contributions.", "as the run has it, founder: 2, or what the rule needs"),
    Setting("attackers", "--attackers --liars", PEERS,
            "Peers that may say what they like, of more than three times as many.", "as the run has it, founder: 1"),
    Setting("round_deadline_s", "--round-deadline", PEERS,
            "A round waits so many seconds after its first contribution.", "as the run has it, founder: for all alive"),
    Setting("heartbeat_timeout_s", "--heartbeat-timeout", PEERS,
            "Seconds of silence until a peer counts as dead.", f"{AS_THE_RUN}, founder: {PEER_HEARTBEAT_TIMEOUT_S:g}"),
    Setting("pattern", "--pattern", PEERS,
            "Who exchanges with whom: all with all, or each round with one other, drawn at random or in turn.",
            "as the run has it, founder: all"),
)  # fmt: skip

SERVER = Role("server", ServerConfig, ServerCommand, SERVER_SETTINGS, {})
WORKER = Role(
    "worker",
    WorkerConfig,
    WorkerCommand,
    WORKER_SETTINGS,
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
