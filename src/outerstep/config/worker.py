"""What a worker can be told: the topology it exchanges through, a section for each of them, and what all share."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import msgspec

from ..defaults import JOIN_TIMEOUT_S, OUTER_LR, OUTER_MOMENTUM, PEER_HEARTBEAT_TIMEOUT_S
from ..errors import ConfigError
from ..lanes import FEWEST, MOST
from ..security import redact, shown_address
from ..types import Count, Positive, Wishes, WorkerId
from .checks import Checked, check_label, check_loggers, check_mixing, wishes_of
from .effects import TOPOLOGIES, WITHOUT_SERVER, Needs, with_topology
from .keywords import unknown, values_of
from .kinds import AtLeastOne, NotNegative
from .outer_step import check_momentum_inside, check_outer_step, is_named, with_named_class
from .setting import ABOVE, EXCHANGES, JOINING, NO_SERVER, OBSERVING, PATIENCE, PEERS, REPLICAS, row, setting

LIGHTHOUSE_VARIABLE = "TORCHFT_LIGHTHOUSE"  # where torchft itself looks for it
AS_THE_RUN = "as the run has it"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")
MOST_RETRIES = 20  # at twice the distance each time: twelve days
TYPO_RATIO = 0.75  # a name this similar to one of ours is a slip; any other may be the user's own topology


SERVER_ONLY, SERVER_OR_REPLICAS = with_topology("server"), with_topology("server", "torchft")
SERVER_OR_PEERS = with_topology("server", "gossip")
REPLICAS_OR_RANKS = with_topology("torchft", "allreduce")
WITH_ABOVE = Needs("above", lambda c: REPLICAS_OR_RANKS.holds(c) and c.above is not None)
SERVER_PEERS_OR_ABOVE = Needs(
    f"{SERVER_OR_PEERS.text}, or above", lambda c: SERVER_OR_PEERS.holds(c) or WITH_ABOVE.holds(c)
)
NO_SERVER_TO_SAY = replace(
    with_topology(*WITHOUT_SERVER), text=f"{with_topology(*WITHOUT_SERVER).text} (else it is the server's to say)"
)


# fmt: off
@dataclass(frozen=True, kw_only=True)
class WorkerCommand(Checked):
    """What `outerstep worker` is told beside a WorkerConfig."""

    devices: str | None = setting(None, JOINING,
        "CUDA_VISIBLE_DEVICES for the script.", "as it is", flags="-d --devices")


@dataclass(frozen=True, kw_only=True)
class ServerLinkConfig(Checked):
    """topology="server": how this worker deals with its server."""

    dylu: bool | None = setting(None, EXCHANGES,
        "Let the server set this worker's sync_every by its speed.", "if the run does so", needs=SERVER_ONLY)
    connections: Positive | None = setting(None, EXCHANGES,
        "Connections that the parts of one exchange travel over at the same time.",
        f"as bandwidth × round trip needs, {FEWEST} to {MOST}",
        needs=SERVER_ONLY)
    offline_after_s: NotNegative = setting(30.0, PATIENCE,
        "Seconds without an answer after which to train on alone, and contribute when the server is back.",
        needs=Needs(f"{SERVER_OR_REPLICAS.text}, and no max_sync_retries",
            lambda c: SERVER_OR_REPLICAS.holds(c) and c.max_sync_retries is None))
    offline_rounds: Count = setting(4, PATIENCE, "How many exchanges may stay open like that.",
        needs=SERVER_OR_REPLICAS)
    max_sync_retries: Count | None = setting(None, PATIENCE,
        "The same patience as a number of attempts, 2, 4, 8 s and so on apart.", "--offline-after",
        needs=SERVER_OR_REPLICAS)

    @property
    def patience_s(self) -> float:
        """Seconds without an answer after which the worker trains on."""
        retries = self.max_sync_retries
        return self.offline_after_s if retries is None else 2.0 ** (min(retries, MOST_RETRIES) + 1) - 2.0


@dataclass(frozen=True, kw_only=True)
class ServerlessConfig(Checked):
    """Every topology without a server: what a server would decide. All workers must say the same."""

    outer_lr: NotNegative | None = setting(None, NO_SERVER,
        "η of the outer step.", f"{OUTER_LR}", needs=NO_SERVER_TO_SAY)
    outer_momentum: NotNegative | None = setting(None, NO_SERVER,
        "μ of the outer step.", f"{OUTER_MOMENTUM}", needs=NO_SERVER_TO_SAY)
    nesterov: bool | None = setting(None, NO_SERVER,
        "Nesterov or plain momentum.", "Nesterov", needs=NO_SERVER_TO_SAY)
    outer_optimizer: str | None = setting(None, NO_SERVER,
        "Takes the outer step: nesterov, or module:Class of your own, an outerstep.OuterOptimizer.",
        "nesterov", needs=NO_SERVER_TO_SAY)
    outer_options: str | None = setting(None, NO_SERVER,
        "What that class is made with: KEY=VALUE, several with spaces between, or the flag again.",
        "its own defaults", flags="--outer-option", needs=NO_SERVER_TO_SAY, repeats=True)
    weight_by: Literal["equal", "samples", "tokens"] | None = setting(None, NO_SERVER,
        "What a contribution's weight is: equal for all, or its size.", "equal", needs=NO_SERVER_TO_SAY)
    on_divergence: Literal["stop", "repair"] = setting("stop", NO_SERVER,
        "If anchors differ that should be the same: stop, or continue with rank 0's (torchft: what most hold).",
        needs=with_topology("allreduce", "torchft"))


@dataclass(frozen=True, kw_only=True)
class AllReduceConfig(Checked):
    """topology="allreduce" (docs/concepts/allreduce.md)."""

    peer_timeout_s: AtLeastOne = setting(1800.0, NO_SERVER,
        "Seconds to wait for a rank that is alive and does not exchange.", needs=with_topology("allreduce"))


@dataclass(frozen=True, kw_only=True)
class TorchftConfig(Checked):
    """topology="torchft": replicas that meet at a lighthouse (docs/concepts/torchft.md)."""

    lighthouse: str | None = setting(None, REPLICAS,
        "host:port of the lighthouse (`outerstep lighthouse`) that torchft's replicas meet at.", "TORCHFT_LIGHTHOUSE")
    min_replicas: Positive = setting(1, REPLICAS, "How many replicas must take part for an exchange to count.")
    quorum_timeout_s: AtLeastOne = setting(300.0, REPLICAS,
        "Seconds that one attempt to meet the other replicas waits; then the worker tries again.")
    transfer_timeout_s: AtLeastOne = setting(60.0, REPLICAS,
        "Seconds for what the replicas of a quorum do together; a slower replica is left out.")
    replica_backend: Literal["gloo", "nccl", "auto"] = setting("gloo", REPLICAS,
        "What values travel by between replicas: gloo from host memory, nccl from GPU to GPU, or auto: nccl in each "
        "quorum whose replicas all can.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lighthouse is not None:
            parse_lighthouse(self.lighthouse)


@dataclass(frozen=True, kw_only=True)
class LayerAboveConfig(Checked):
    """Members without a server, torchft replicas or the ranks of an all-reduce job, that are together one worker of a
    server (docs/concepts/hierarchy.md)."""

    above: str | None = setting(None, ABOVE,
        "The replicas or ranks are together one worker of the server there: its host:port, or join string.",
        "none: they are a run of their own", needs=REPLICAS_OR_RANKS)
    cluster: str | None = setting(None, ABOVE,
        "The name of this cluster up there, the same on each replica or rank.", "none; above needs it",
        needs=WITH_ABOVE)
    above_every: Positive | None = setting(None, ABOVE,
        "Rounds of the cluster between two exchanges up there.", "as the run above says", needs=WITH_ABOVE)
    above_wait_s: NotNegative = setting(120.0, ABOVE,
        "Seconds that members wait for an exchange up there before they take their next steps; 0 = they do not.",
        needs=WITH_ABOVE)
    inner_momentum: bool = setting(False, ABOVE,
        "Insist on an outer_momentum above 0 in the cluster: right if the run above has none; if it has some, too, "
        "log and status warn.", needs=WITH_ABOVE)


@dataclass(frozen=True, kw_only=True)
class GossipConfig(Checked):
    """topology="gossip" (docs/concepts/gossip.md). None from `aggregation` on = as the run has it; a founder: the
    usual."""

    peers: str | None = setting(None, PEERS,
        "Peers to join through: addresses or join strings, several with spaces between.",
        "none: found a run", flags="--join")
    listen: str = setting("0.0.0.0:0", PEERS,
        "host:port on which the other peers reach this one; port 0 = any free one.")
    advertise: str | None = setting(None, PEERS, "Host, or host:port, that the others should call.", "found out")
    peer_dir: str | None = setting(None, PEERS,
        "Folder that keeps this peer's identity and what it has said.",
        "none, a restart is then another peer; `outerstep peer`: outerstep-peer")
    insecure: bool = setting(False, PEERS,
        "Plain HTTP without tokens: anyone who reaches a peer's port can join, and read and change the model.")
    page: bool = setting(True, PEERS, "Show the run in a browser, at /page on the peer's port.")
    announce: bool = setting(False, PEERS,
        "Print the join string and what to type on the next machine; `outerstep peer` does unless told not to.")
    aggregation: str | None = setting(None, PEERS,
        "How contributions become one: mean, trimmed_mean, median, krum, multi_krum, geometric_median or "
        "centered_clipping.", "as the run has it, founder: mean")
    trim_fraction: NotNegative | None = setting(None, PEERS,
        "Of trimmed_mean: how much is cut off at each end.", "a fifth, and at least one")
    cosine_screen: bool | None = setting(None, PEERS,
        "Leave out contributions that point away from the mean of the others (five peers or more).",
        "as the run has it, founder: off")
    bucket_size: Positive | None = setting(None, PEERS,
        "2 averages random pairs before the rule.", "as the run has it, founder: 1")
    min_peers: Positive | None = setting(None, PEERS,
        "No round is made of fewer contributions.", "as the run has it, founder: 2, or what the rule needs")
    attackers: Count | None = setting(None, PEERS,
        "How many peers may lie; a run withstands fewer than a third.",
        "as the run has it, founder: 1", flags="--attackers --liars")
    round_deadline_s: NotNegative | None = setting(None, PEERS,
        "Seconds that a round waits after its first contribution.", "as the run has it, founder: for all alive")
    heartbeat_timeout_s: NotNegative | None = setting(None, PEERS,
        "Seconds of silence until a peer counts as dead.", f"{AS_THE_RUN}, founder: {PEER_HEARTBEAT_TIMEOUT_S:g}")
    pattern: Literal["all", "pairs", "exponential"] | None = setting(None, PEERS,
        "Who exchanges with whom: all with all, or each round with one other, drawn at random or in turn.",
        "as the run has it, founder: all")
    protocol: Positive | None = setting(None, PEERS,
        "Protocol of the run; 1 lets peers of release 0.2 join it.", "as the run has it, founder: the newest")
    invite_only: bool | None = setting(None, PEERS,
        "Let only peers belong to the run that the founder has invited with `outerstep invite`.",
        "as the run has it, founder: off")
    invitation: str | None = setting(None, PEERS,
        "What `outerstep invite` printed for this peer.", "none, or that in the peer's folder")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.peers is not None and not self.peers.split():
            raise ConfigError(
                "peers (--join) is empty: give the join string or the address of a peer, or leave it out to found a run"
            )


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(Checked):
    """Everything a worker can be told. None = follow the plan of the run, or without a server the usual.

    `build(WorkerConfig, {"topology": "gossip", "min_peers": 3})` takes every setting by its name, wherever it stands.
    """

    OLD_NAMES: ClassVar = {
        "heartbeat_interval": "heartbeat_interval_s",
        "heartbeat_timeout": "heartbeat_timeout_s",
        "liars": "attackers",
    }

    topology: str = setting("server", JOINING,
        "Who takes part in an exchange: server = workers of one server; allreduce = the ranks of the job among "
        "themselves; gossip = peers that join and leave; torchft = replicas that meet at a lighthouse; or the "
        "name of a topology that the script registers.")
    server_addr: str | None = field(metadata=row(JOINING,
        "The server's host:port, or its whole join string; http://host:port for a server started with --insecure.",
        "none; topology server needs it", flags="--server"))
    credentials: str | None = setting(None, JOINING,
        "Folder in which `outerstep join` stores tokens and fingerprints.", "~/.config/outerstep",
        needs=SERVER_PEERS_OR_ABOVE)
    worker_id: str | None = setting(None, JOINING, "A name that survives restarts.", "made from host and process")
    heartbeat_interval_s: NotNegative = setting(30.0, JOINING, "Seconds between signs of life.")
    join_timeout_s: NotNegative = setting(JOIN_TIMEOUT_S, JOINING,
        "Seconds to wait for a server that does not answer yet.", needs=with_topology("server", "gossip", "torchft"))
    sync_every: Positive | None = setting(None, EXCHANGES, "H: local steps between two exchanges.", AS_THE_RUN)
    num_fragments: Positive | None = setting(None, EXCHANGES,
        "Number of pieces in which the model is exchanged.", AS_THE_RUN, flags="--num-fragments --fragments")
    bf16_comm: bool | None = setting(None, EXCHANGES, "Send bf16, or with --no-bf16 fp32.", AS_THE_RUN, flags="--bf16")
    codec: str | None = setting(None, EXCHANGES,
        "Encoding of contributions, in place of --bf16.", AS_THE_RUN)
    down_codec: str | None = setting(None, EXCHANGES, "How agreements travel.", AS_THE_RUN,
        needs=with_topology("server", "allreduce", "torchft"))
    fragment_delay: Count | None = setting(None, EXCHANGES,
        "τ: steps between sending a fragment and adopting its agreement.", AS_THE_RUN)
    fragment_alpha: NotNegative | None = setting(None, EXCHANGES,
        "α: how much of the local copy is kept then.", AS_THE_RUN)
    fragment_carry: bool | None = setting(None, EXCHANGES,
        "Keep the steps taken in between instead of mixing.", AS_THE_RUN)
    tokenizer: str | None = setting(None, EXCHANGES,
        "The tokenizer's name or hash, which must be the run's.", "not checked")
    buffers: Literal["average", "local", "server"] = setting("average", EXCHANGES,
        "Persistent floating-point buffers (BatchNorm's): the workers' mean, each its own, or the server's.")
    anchor: Literal["device", "host"] = setting("device", EXCHANGES,
        "Keep the last agreed weights beside the model, or in host memory if a GPU has no room for them.")
    group: Literal["auto", "off"] = setting("auto", EXCHANGES,
        "Be one worker together with the other ranks of a torchrun job, or each rank its own.",
        needs=with_topology("server", "gossip", "torchft"))
    on_exit: Literal["global", "local"] = setting("global", EXCHANGES,
        "What the model holds afterwards: the agreed weights or its own.")
    outside_changes: Literal["adopt", "keep"] = setting("adopt", EXCHANGES,
        "Weights that moved outside optimizer.step() (a checkpoint was loaded): adopt the agreed weights in their "
        "place, or keep them and send the difference as learned.")
    log_json: bool = setting(False, OBSERVING,
        "Write outerstep's log as JSON, one object per line, instead of text for people.")
    event_log: str | None = setting(None, OBSERVING,
        "File to append events to, as JSON lines: without a server it says who has trained which data.", "none")
    total_steps: Positive | None = setting(None, OBSERVING,
        "Optimizer steps that the script will take in all: the log then shows progress and time left.",
        "not said")
    log_to: str | None = setting(None, OBSERVING,
        "Write metrics there, too, with commas between: tensorboard, wandb, mlflow, trackio, otel; each is an extra.",
        "nowhere but metrics.jsonl")
    metrics_dir: str | None = setting(None, OBSERVING,
        "Folder for metrics.jsonl, and for what --log-to writes.",
        "peer_dir, else `outerstep worker`: outerstep-metrics; from Python: none is written")
    give_up_after_s: NotNegative = setting(7200.0, PATIENCE,
        "Seconds without an answer after which to end with an error.", needs=SERVER_OR_REPLICAS)
    stalled_after_s: NotNegative = setting(900.0, PATIENCE,
        "Seconds without an optimizer step after which heartbeats stop, so that the others continue; 0 = never.",
        needs=SERVER_OR_PEERS)
    exit_patience_s: NotNegative = setting(60.0, PATIENCE,
        "Seconds that a clean exit waits for a round that cannot close.")
    handle_signals: bool = setting(True, PATIENCE,
        "On SIGTERM, SIGUSR1 or Ctrl-C: contribute what is left at the next step, and leave.")
    preempt_patience_s: NotNegative = setting(20.0, PATIENCE,
        "Leave within this many seconds of such a signal, or at the next step if that is later.")
    # fmt: on
    server: ServerLinkConfig = ServerLinkConfig()
    serverless: ServerlessConfig = ServerlessConfig()
    allreduce: AllReduceConfig = AllReduceConfig()
    torchft: TorchftConfig = TorchftConfig()
    layer_above: LayerAboveConfig = LayerAboveConfig()
    gossip: GossipConfig = GossipConfig()

    def __post_init__(self) -> None:
        if self.worker_id is not None:
            try:
                msgspec.convert(self.worker_id, WorkerId)
            except msgspec.ValidationError as error:
                raise ConfigError(
                    f"worker_id must be 1 to 128 letters, digits, '.', ':', '-' or '_', beginning with a letter, digit "
                    f"or '_'; got {self.worker_id!r}"
                ) from error
        super().__post_init__()
        check_mixing(self.fragment_alpha, self.fragment_carry)
        check_label(self, "tokenizer")
        check_loggers(self.log_to)
        if self.codec is not None and self.bf16_comm is not None:
            raise ConfigError(
                f"bf16_comm is short for codec, got both (codec={self.codec!r}): leave one of the two out"
            )
        _check_topology(self)

    def __repr__(self) -> str:
        """Without the token that a join string holds."""
        values = values_of(self)
        secret = [name for name in ("server_addr", "peers", "above") if values[name] is not None]
        values |= {name: redact(str(values[name])) for name in secret}
        return f"WorkerConfig({', '.join(f'{name}={value!r}' for name, value in values.items())})"

    @property
    def place(self) -> str:
        """Where this worker joins, for people: the server's address, or the topology. It holds no token."""
        return shown_address(self.server_addr) if self.server_addr is not None else self.topology

    @property
    def wishes(self) -> Wishes:
        cast = None if self.bf16_comm is None else ("bf16" if self.bf16_comm else "fp32")
        return wishes_of(self, codec=self.codec or cast)

    @staticmethod
    def current_spelling(settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings in which server_addr is an address. It used to name a topology too: server_addr="gossip"."""
        settings = with_named_class(settings)
        address, topology = settings.get("server_addr"), settings.get("topology")
        named = isinstance(address, str) and address in WITHOUT_SERVER and topology in (None, address)
        settings = {**settings, "topology": address, "server_addr": None} if named else dict(settings)
        if settings.get("topology", "server") != "server":
            settings.setdefault("server_addr", None)
        return settings


def _check_topology(config: WorkerConfig) -> None:
    """A server has an address, and nothing else has one."""
    name = config.topology
    if name == "server":
        if config.server_addr is None:
            raise ConfigError(
                "server_addr must be text, got None: give the server's address, or a topology without a server: "
                f"{', '.join(WITHOUT_SERVER)}"
            )
    elif name in WITHOUT_SERVER:
        if config.server_addr is not None:
            raise ConfigError(
                f"topology {name!r} has no server, got server_addr {redact(config.server_addr)!r}: leave one of the "
                "two out"
            )
        check_outer_step(config.serverless)
        _check_above(config)
        if config.gossip.pattern in ("pairs", "exponential") and is_named(config.serverless):
            raise ConfigError(
                f"outer_optimizer {config.serverless.outer_optimizer!r} steps along what all agree on, and with "
                f"pattern={config.gossip.pattern!r} two peers step by a rule of their own: leave one of the two out"
            )
    else:
        check_topology_name(name)


def _check_above(config: WorkerConfig) -> None:
    """What goes together with a layer above (docs/concepts/hierarchy.md)."""
    outer, told, transfer_s = config.serverless, config.layer_above, config.torchft.transfer_timeout_s
    if told.above is None:
        return
    if told.cluster is None:
        raise ConfigError(
            "above needs the name of this cluster up there, the same on every replica or rank, got none: say "
            "cluster='NAME'"
        )
    try:
        msgspec.convert(told.cluster, WorkerId)
    except msgspec.ValidationError as error:
        raise ConfigError(f"cluster must be a name as worker_id is, got {told.cluster!r}: {error}") from error
    if config.topology == "torchft" and 0.0 < told.above_wait_s <= transfer_s:
        raise ConfigError(
            f"transfer_timeout_s must be below above_wait_s, got {transfer_s:g} and "
            f"{told.above_wait_s:g}: one replica that dies in a transfer would use up the whole wait for the layer "
            "above; lower the one or raise the other"
        )
    check_momentum_inside(outer, insists=told.inner_momentum)


def check_topology_name(name: str) -> None:
    """May a user's own topology be called that?"""
    if difflib.get_close_matches(name, TOPOLOGIES, n=1, cutoff=TYPO_RATIO):
        raise ConfigError(unknown("topology", name, TOPOLOGIES))
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"topology must be {', '.join(TOPOLOGIES)}, or a name of letters, digits, '_', '.' and '-', got {name!r}"
        )


def parse_lighthouse(address: str) -> str:
    """host:port, with http:// in front or without."""
    text = address.strip().removeprefix("http://").rstrip("/")
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536 or "/" in text:
        raise ConfigError(f"lighthouse must be host:port, got {address!r}; `outerstep lighthouse` prints it")
    return text
