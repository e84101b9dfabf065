"""What a server or a peer says of itself: `GET /status`, as a value (docs/reference/status-and-events.md).

Both have a `Status`: which run, how long, what is wrong, how much travelled, where each fragment is and what it waits
for, and who takes part (`participants`). What only one of them has is in its own type.

    status = read_status(transport.status())
    [fragment.waiting_for for fragment in status.fragments]

Every field but `mode` has a default: an older server, which says less, can be read too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct, field

from ..errors import ProtocolMismatch

PEER_MODE = "gossip"


class MemberStatus(Struct, frozen=True, kw_only=True):
    """A worker, or a peer. None: not known (yet)."""

    step: int | None = None
    steps_per_second: float | None = None
    loss: float | None = None
    last_seen_s: float | None = None  # seconds since it was heard from


class QuarantineStatus(Struct, frozen=True, kw_only=True):
    left_s: float
    reason: str = ""


class WorkerStatus(MemberStatus, frozen=True, kw_only=True):
    """A worker, as its server knows it."""

    hostname: str = ""
    incarnation: int = 0
    protocol: int | None = None  # that is spoken with it
    sync_every: int | None = None
    staleness: int = 0
    contributions: int = 0
    bytes_received: int = 0
    tokens: int = 0
    commands: list[str] = []
    delta_norm: float | None = None
    left_out: int = 0
    offences: int = 0
    quarantine: QuarantineStatus | None = None
    joined_s: float = 0.0
    info: dict[str, bool | int | float | str] = {}  # what it tells of itself


class PeerMemberStatus(MemberStatus, frozen=True, kw_only=True):
    """A member of a run without a server, as another knows it."""

    peer_id: str
    address: str = ""
    height: int = 0
    wants: str = ""
    trouble: str = ""
    is_self: bool = field(default=False, name="self")


class FragmentStatus(Struct, frozen=True, kw_only=True):
    version: int
    waiting_for: str = ""


class ServerFragmentStatus(FragmentStatus, frozen=True, kw_only=True):
    anchor_hash: str = ""
    last_participants: list[str] = []
    watched: dict[str, float] = {}
    contributed: list[str] = []
    expected: list[str] = []


class PlanStatus(Struct, frozen=True, kw_only=True):
    sync_every: int
    codec: str
    down_codec: str = ""
    num_fragments: int = 1
    fragment_delay: int = 0
    fragment_alpha: float = 0.0
    fragment_carry: bool = False
    revision: int = 0
    said_by: dict[str, str] = {}


class TokensStatus(Struct, frozen=True, kw_only=True):
    total: int = 0
    budget: int | None = None
    per_second: float = 0.0
    seconds_left: float | None = None


class Status(Struct, frozen=True, kw_only=True):
    """What servers and peers share. `failure`: why it has stopped for good; `trouble`: why it has to wait. `plan` None:
    it is open, or not known here. `connections`: those of the port, by state."""

    mode: str
    run_id: str = ""
    uptime_s: float = 0.0
    failure: str = ""
    trouble: str = ""
    bytes_received: int = 0
    bytes_sent: int = 0
    plan: PlanStatus | None = None
    fragments: Sequence[FragmentStatus] = []
    connections: dict[str, int] = {}

    @property
    def participants(self) -> Mapping[str, MemberStatus]:
        """Who takes part, by id."""
        raise NotImplementedError


class AboveStatus(Struct, frozen=True, kw_only=True):
    """What a cluster's server says of the layer above. `failure`: why the cluster is on its own."""

    cluster: str
    address: str = ""
    joined: bool = False
    versions: list[int] = []  # that it holds, by fragment of the run up there
    exchanges: int = 0
    missed_rounds: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    failure: str = ""


class ServerStatus(Status, frozen=True, kw_only=True):
    outerstep: str = ""
    above: AboveStatus | None = None  # None: this is the top
    durability: str = "none"
    save_dir: str | None = None
    journal: dict[str, int] | None = None
    last_save: str = ""
    started: bool = False
    closing: str = ""
    sync_round: int = 0
    num_workers: int = 0
    min_workers: int = 1
    heartbeat_timeout: float = 0.0
    total_worker_deaths: int = 0
    total_submissions: int = 0
    pending_submissions: list[str] = []
    quorum: int | None = None
    grace_period: float = 0.0
    dn_buffer_size: int = 0
    dn_buffered: int = 0
    dylu_enabled: bool = False
    dylu_base_sync_every: int | None = None
    max_staleness: int = 0
    weight_by: str = "equal"
    norm_screen: float = 0.0
    aggregation: str = "mean"
    rounds_too_few: int = 0
    tokens: TokensStatus = TokensStatus()
    num_parameters: int | None = None
    pool_held_bytes: int = 0
    pool_memory_bytes: int = 0
    pool_spooled_bytes: int = 0
    pool_queue: int = 0
    readers: int = 0  # of the model, at this moment
    workers: dict[str, WorkerStatus] = {}
    fragments: Sequence[ServerFragmentStatus] = []

    @property
    def participants(self) -> Mapping[str, MemberStatus]:
        return self.workers


class PeerStatus(Status, frozen=True, kw_only=True):
    peer_id: str
    address: str = ""
    begun: bool = False
    protocol: int | None = None  # the run's
    height: int = 0
    is_member: bool = False
    versions: list[int] = []
    members: list[PeerMemberStatus] = []
    silent: list[str] = []
    expelled: list[str] = []
    proven_to_lie: list[str] = []
    refused: dict[str, int] = {}  # by name: how often it said, answered or sent what cannot be
    is_short_of_peers: bool = False
    held_bytes: int = 0
    spooled_bytes: int = 0
    fetches: dict[str, int] = {}
    conversations: int = 0

    @property
    def participants(self) -> Mapping[str, MemberStatus]:
        return {member.peer_id: member for member in self.members}


def read_status(said: Mapping[str, Any]) -> ServerStatus | PeerStatus:
    """From what a server or a peer answered."""
    try:
        if said.get("mode") == PEER_MODE:
            return msgspec.convert(said, PeerStatus)
        return msgspec.convert(said, ServerStatus)
    except msgspec.ValidationError as error:
        raise ProtocolMismatch(
            f"the status is not what this version of outerstep reads: {error}",
            hint="install the same version on both sides, or read it with --json",
        ) from error
