"""What a worker can be told: the topology it exchanges through, a section for each of them, and what all share."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import msgspec

from ..coordination.worker.exchange import Patience
from ..defaults import JOIN_TIMEOUT_S
from ..errors import ConfigError
from ..security import redact
from ..types import Wishes, WorkerId
from .checks import check_label, check_mixing, check_number, check_one_of, check_text, check_whole
from .keywords import unknown, values_of

WITHOUT_SERVER = ("allreduce", "gossip", "torchft")
TOPOLOGIES = ("server", *WITHOUT_SERVER)
LIGHTHOUSE_VARIABLE = "TORCHFT_LIGHTHOUSE"  # where torchft itself looks for it
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")
TYPO_RATIO = 0.75  # a name this similar to one of ours is a slip; any other may be the user's own topology


@dataclass(frozen=True, kw_only=True)
class ServerLinkConfig:
    """topology="server": how this worker deals with its server."""

    connections: int = Patience.calls_in_flight  # parts of one exchange that travel at the same time
    offline_after_s: float = 30.0  # without an answer from the server: train on, and contribute when it is back
    offline_rounds: int = 4  # so many exchanges may stay open like that; then the worker waits
    dylu: bool | None = None  # let the server set this worker's sync_every by its speed; None = if the run does so

    def __post_init__(self) -> None:
        check_whole(self, 1, "connections")
        check_number(self, 0.0, "offline_after_s")
        check_whole(self, 0, "offline_rounds")
        check_one_of(self, (True, False, None), "dylu")


@dataclass(frozen=True, kw_only=True)
class ServerlessConfig:
    """Every topology without a server: what a server would decide. All workers must say the same."""

    outer_lr: float | None = None  # None from here on: the usual, which a server has as its default
    outer_momentum: float | None = None
    nesterov: bool | None = None
    weight_by: Literal["equal", "samples", "tokens"] | None = None
    on_divergence: Literal["stop", "repair"] = "stop"  # anchors that differ end the run, or one of them is taken

    def __post_init__(self) -> None:
        check_number(self, 0.0, "outer_lr", "outer_momentum", optional=True)
        check_one_of(self, (True, False, None), "nesterov")
        check_one_of(self, ("equal", "samples", "tokens", None), "weight_by")
        check_one_of(self, ("stop", "repair"), "on_divergence")


@dataclass(frozen=True, kw_only=True)
class AllReduceConfig:
    """topology="allreduce" (docs/concepts/allreduce.md)."""

    peer_timeout_s: float = 1800.0  # how long to wait for a rank that is alive and does not exchange

    def __post_init__(self) -> None:
        check_number(self, 1.0, "peer_timeout_s")


@dataclass(frozen=True, kw_only=True)
class TorchftConfig:
    """topology="torchft": replicas that meet at a lighthouse (docs/concepts/torchft.md)."""

    lighthouse: str | None = None  # host:port; None = TORCHFT_LIGHTHOUSE
    min_replicas: int = 1  # fewer agree on nothing, and wait
    quorum_timeout_s: float = 300.0  # of one try to meet the others; then the worker tries again
    transfer_timeout_s: float = 60.0  # of what a quorum does together: a slower replica is left out
    replica_backend: Literal["gloo", "nccl"] = "gloo"  # what values travel by, from host memory or from GPU to GPU

    def __post_init__(self) -> None:
        check_text(self, "lighthouse")
        check_whole(self, 1, "min_replicas")
        check_number(self, 1.0, "quorum_timeout_s", "transfer_timeout_s")
        check_one_of(self, ("gloo", "nccl"), "replica_backend")
        if self.lighthouse is not None:
            parse_lighthouse(self.lighthouse)


@dataclass(frozen=True, kw_only=True)
class GossipConfig:
    """topology="gossip" (docs/concepts/gossip.md). None from `aggregation` on = as the run has it; a founder: the
    usual."""

    peers: str | None = None  # addresses or join strings to join through, with spaces between; None = found a run
    listen: str = "0.0.0.0:0"  # host:port for the other peers; port 0 = any free one
    advertise: str | None = None  # host, or host:port, that others should call; None = found out
    peer_dir: str | None = None  # keeps who this peer is and what it has said; None = a restart is another peer
    insecure: bool = False  # plain HTTP without tokens
    announce: bool = False  # print the join string, and what to type on the next machine
    aggregation: str | None = None  # core/robust
    trim_fraction: float | None = None
    cosine_screen: bool | None = None
    bucket_size: int | None = None
    min_peers: int | None = None
    attackers: int | None = None  # so many peers may say what they like, of more than three times as many
    round_deadline_s: float | None = None
    heartbeat_timeout_s: float | None = None  # of silence until a peer counts as dead
    pattern: Literal["all", "pairs", "exponential"] | None = None  # who exchanges with whom

    def __post_init__(self) -> None:
        check_text(self, "listen", optional=False)
        check_text(self, "peers", "advertise", "peer_dir", "aggregation")
        if self.peers is not None and not self.peers.split():
            raise ConfigError(
                "peers (--join) is empty: give the join string or the address of a peer, or leave it out to found a run"
            )
        check_one_of(self, (True, False), "insecure", "announce")
        check_number(self, 0.0, "trim_fraction", "round_deadline_s", "heartbeat_timeout_s", optional=True)
        check_one_of(self, (True, False, None), "cosine_screen")
        check_whole(self, 1, "bucket_size", "min_peers", optional=True)
        check_whole(self, 0, "attackers", optional=True)
        check_one_of(self, ("all", "pairs", "exponential", None), "pattern")


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """Everything a worker can be told. None = follow the plan of the run, or without a server the usual.

    `build(WorkerConfig, {"topology": "gossip", "min_peers": 3})` takes every setting by its name, wherever it stands.
    """

    OLD_NAMES: ClassVar = {
        "heartbeat_interval": "heartbeat_interval_s",
        "heartbeat_timeout": "heartbeat_timeout_s",
        "liars": "attackers",
    }

    topology: str = "server"  # one of TOPOLOGIES, or the name of one's own (worker/connect.py)
    server_addr: str | None  # host:port, a join string, or http://host:port for an insecure server
    credentials: str | None = None  # the folder that `outerstep join` fills; None = ~/.config/outerstep
    worker_id: str | None = None  # None = made from host name and process
    sync_every: int | None = None
    num_fragments: int | None = None
    bf16_comm: bool | None = None  # True = bf16, False = fp32 on the wire
    codec: str | None = None  # of contributions, for more than those two; core/codecs/recipe.py
    down_codec: str | None = None  # of agreements
    fragment_delay: int | None = None  # τ, as in ServerConfig
    fragment_alpha: float | None = None
    fragment_carry: bool | None = None
    tokenizer: str | None = None  # its name or hash, which must be the run's
    buffers: Literal["average", "local", "server"] = "average"  # persistent floating-point buffers (BatchNorm's, …)
    anchor: Literal["device", "host"] = "device"  # where the anchor is kept: beside the model, or in host memory
    group: Literal["auto", "off"] = "auto"  # the processes of a torchrun job are one worker; off = each is its own
    heartbeat_interval_s: float = 30.0
    on_exit: Literal["global", "local"] = "global"  # what `model` holds afterwards: the agreed weights, or its own
    join_timeout_s: float = JOIN_TIMEOUT_S
    give_up_after_s: float = 7200.0  # without any answer from the others: one clear error
    stalled_after_s: float = 900.0  # without an optimizer step: stop beating, so that the others go on; 0 = never
    exit_patience_s: float = 60.0  # how long a clean exit waits for a round that cannot close; ten times for no server
    handle_signals: bool = True  # on SIGTERM, SIGUSR1 or Ctrl-C: contribute and leave
    preempt_patience_s: float = 20.0  # after such a signal: be gone within so many seconds, or at the next step
    server: ServerLinkConfig = ServerLinkConfig()
    serverless: ServerlessConfig = ServerlessConfig()
    allreduce: AllReduceConfig = AllReduceConfig()
    torchft: TorchftConfig = TorchftConfig()
    gossip: GossipConfig = GossipConfig()

    def __post_init__(self) -> None:
        check_whole(self, 1, "sync_every", "num_fragments", optional=True)
        check_whole(self, 0, "fragment_delay", optional=True)
        check_number(self, 0.0, "heartbeat_interval_s", "join_timeout_s", "give_up_after_s")
        check_number(self, 0.0, "exit_patience_s", "stalled_after_s", "preempt_patience_s")
        check_number(self, 0.0, "fragment_alpha", optional=True)
        check_one_of(self, (True, False, None), "fragment_carry")
        check_one_of(self, ("average", "local", "server"), "buffers")
        check_mixing(self.fragment_alpha, self.fragment_carry)
        check_text(self, "topology", optional=False)
        check_text(self, "server_addr", "credentials", "tokenizer", "codec", "down_codec")
        check_label(self, "tokenizer")
        check_one_of(self, (None, True, False), "bf16_comm")
        check_one_of(self, (True, False), "handle_signals")
        check_one_of(self, ("global", "local"), "on_exit")
        check_one_of(self, ("auto", "off"), "group")
        check_one_of(self, ("device", "host"), "anchor")
        if self.codec is not None and self.bf16_comm is not None:
            raise ConfigError(
                f"bf16_comm is short for codec, got both (codec={self.codec!r}): leave one of the two out"
            )
        _check_topology(self)
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
        values = values_of(self)
        values |= {name: redact(str(values[name])) for name in ("server_addr", "peers") if values[name] is not None}
        return f"WorkerConfig({', '.join(f'{name}={value!r}' for name, value in values.items())})"

    @property
    def place(self) -> str:
        """Where this worker joins, for people: the server's address, or the topology. It holds no token."""
        return redact(self.server_addr) if self.server_addr is not None else self.topology

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

    @staticmethod
    def current_spelling(settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings in which server_addr is an address. It used to name a topology too: server_addr="gossip"."""
        address, topology = settings.get("server_addr"), settings.get("topology")
        named = isinstance(address, str) and address in WITHOUT_SERVER and topology in (None, address)
        settings = {**settings, "topology": address, "server_addr": None} if named else dict(settings)
        if settings.get("topology", "server") != "server":
            settings.setdefault("server_addr", None)
        return settings


def _check_topology(config: WorkerConfig) -> None:
    """What a server decides is not a worker's to say; without one, somebody must, and some things cannot be had."""
    name = config.topology
    if name == "server":
        if config.server_addr is None:
            raise ConfigError(
                "server_addr must be text, got None: give the server's address, or a topology without a server: "
                f"{', '.join(WITHOUT_SERVER)}"
            )
        for field in ("outer_lr", "outer_momentum", "nesterov", "weight_by"):
            value = getattr(config.serverless, field)
            if value is not None:
                raise ConfigError(
                    f"{field} is the server's to say, got {value!r} for a worker: start the server with it, or choose "
                    f"a topology without a server: {', '.join(WITHOUT_SERVER)}"
                )
    elif name in WITHOUT_SERVER:
        if config.server_addr is not None:
            raise ConfigError(
                f"topology {name!r} has no server, got server_addr {redact(config.server_addr)!r}: leave one of the "
                "two out"
            )
        if config.server.dylu:
            raise ConfigError(f"dylu needs a server: with topology={name!r} all take the same steps")
    else:
        check_topology_name(name)
    if name in TOPOLOGIES and name != "gossip":
        for field, value in values_of(config.gossip).items():
            if value not in (None, False) and field != "listen":
                raise ConfigError(
                    f"{field} is for peers, and the topology is {name!r}: say topology='gossip', or leave it out"
                )


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
