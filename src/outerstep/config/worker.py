"""What a worker can be told, with a server or without one, and who has the say in what."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import msgspec

from ..errors import ConfigError
from ..security import redact
from ..types import Wishes, WorkerId
from .checks import check_label, check_mixing, check_number, check_one_of, check_text, check_whole

ALLREDUCE = "allreduce"  # instead of a server's address: the ranks of the job agree among themselves
TORCHFT = "torchft"  # likewise: replicas that meet at a lighthouse do
LIGHTHOUSE_VARIABLE = "TORCHFT_LIGHTHOUSE"  # where torchft itself looks for it
GOSSIP = "gossip"  # likewise: peers that join and leave do
PEERS_ALONE = ("peers", "advertise", "peer_dir", "insecure", "announce", "aggregation", "trim_fraction",
               "cosine_screen", "bucket_size", "min_peers", "liars", "round_deadline_s", "heartbeat_timeout",
               "pattern")  # fmt: skip


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
        check_whole(self, 1, "sync_every", "num_fragments", optional=True)
        check_whole(self, 0, "fragment_delay", optional=True)
        check_whole(self, 0, "offline_rounds")
        check_whole(self, 1, "connections")
        check_number(self, 0.0, "heartbeat_interval", "join_timeout_s", "give_up_after_s", "offline_after_s")
        check_number(self, 0.0, "exit_patience_s", "stalled_after_s", "preempt_patience_s")
        check_number(self, 1.0, "peer_timeout_s", "quorum_timeout_s", "transfer_timeout_s")
        check_whole(self, 1, "min_replicas")
        check_one_of(self, ("gloo", "nccl"), "replica_backend")
        check_number(self, 0.0, "outer_lr", "outer_momentum", optional=True)
        check_whole(self, 1, "bucket_size", "min_peers", optional=True)
        check_whole(self, 0, "liars", optional=True)
        check_number(self, 0.0, "trim_fraction", "round_deadline_s", "heartbeat_timeout", optional=True)
        check_text(self, "listen", optional=False)
        check_text(self, "peers", "advertise", "peer_dir", "aggregation")
        if self.peers is not None and not self.peers.split():
            raise ConfigError(
                "peers (--join) is empty: give the join string or the address of a peer, or leave it out to found a run"
            )
        check_one_of(self, (True, False), "insecure", "announce")
        check_one_of(self, (True, False, None), "cosine_screen")
        check_one_of(self, ("all", "pairs", "exponential", None), "pattern")
        check_one_of(self, ("stop", "repair"), "on_divergence")
        check_one_of(self, ("equal", "samples", "tokens", None), "weight_by")
        check_one_of(self, (True, False, None), "nesterov")
        check_number(self, 0.0, "fragment_alpha", optional=True)
        check_one_of(self, (True, False, None), "fragment_carry", "dylu")
        check_one_of(self, ("average", "local", "server"), "buffers")
        check_mixing(self.fragment_alpha, self.fragment_carry)
        check_text(self, "server_addr", optional=False)
        check_text(self, "credentials", "tokenizer", "codec", "down_codec", "lighthouse")
        check_label(self, "tokenizer")
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


def parse_lighthouse(address: str) -> str:
    """host:port, with http:// in front or without."""
    text = address.strip().removeprefix("http://").rstrip("/")
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536 or "/" in text:
        raise ConfigError(f"lighthouse must be host:port, got {address!r}; `outerstep lighthouse` prints it")
    return text
