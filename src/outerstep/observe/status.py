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

    state: str = ""  # of its life (docs/concepts/lifecycle.md), with the sub-step; "" = not known
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


class ClusterStatus(Struct, frozen=True, kw_only=True):
    """What a worker, or a cluster's leader for its cluster, tells of itself. `batch_size` and `step_s`: of one unit,
    which has `unit_steps` training steps. None: not known (yet). `leader`: the member that speaks for the cluster, if
    it may be any of them. `states`: where in its life each member is (docs/concepts/lifecycle.md), as the leader has
    heard of it last."""

    address: str = ""
    size: int = 1
    members: list[str] = []
    machine: str = ""
    accelerators: list[str] = []
    backends: list[str] = []
    data_location: str = ""
    batch_size: int | None = None
    step_s: float | None = None
    unit_steps: int = 1
    leader: str = ""
    states: dict[str, str] = {}


class LinkStatus(Struct, frozen=True, kw_only=True):
    """One direction of a link, as one of its ends has measured it (the median of the last five)."""

    source: str
    target: str
    bytes_per_s: float
    latency_s: float = 0.0
    age_s: float = 0.0
    measured_by: str = ""


class LayerPlanStatus(Struct, frozen=True, kw_only=True):
    """The controller's plan in force. `local_steps`, `batch_sizes`, `sends_to` and `leaders`: by member."""

    revision: int
    from_round: int
    sync_every: int
    codec: str
    down_codec: str = ""
    num_fragments: int = 1
    delay: int = 0
    outer_lr: float = 0.0
    timeout_s: float = 0.0
    backend: str = ""
    route: str = "star"
    local_steps: dict[str, int] = {}
    batch_sizes: dict[str, int] = {}
    sends_to: dict[str, str] = {}
    leaders: dict[str, str] = {}


class DecisionStatus(Struct, frozen=True, kw_only=True):
    """`changes`: field → "before → after". `not_believed`: what was left out of it, and why. `not_planned_for`: members
    whose links are so slow that rounds close without them."""

    round: int
    revision: int
    cause: str
    reason: str
    changes: dict[str, str] = {}
    utilization: float | None = None
    meets_target: bool = False
    not_believed: list[str] = []
    not_planned_for: list[str] = []


class LayerStatus(Struct, frozen=True, kw_only=True):
    """What the controller does in this layer. `plan` None: nothing was decided yet. `last`: the newest decision, also
    if it changes nothing; `decisions`: those that did, the newest last."""

    layer: str
    target_utilization: float
    utilization: float | None = None  # that is expected
    plan: LayerPlanStatus | None = None
    last: DecisionStatus | None = None
    decisions: list[DecisionStatus] = []


class DataStatus(Struct, frozen=True, kw_only=True):
    """A dataset that the run leases: how far it is, in units of `unit_samples` samples (docs/concepts/data.md)."""

    name: str
    samples: int = 0
    unit_samples: int = 1
    epochs: int = 0  # 0 = without end
    seed: int = 0
    shuffle: bool = True
    units: int = 0  # of all epochs; 0 = without end
    done: int = 0
    leased: int = 0
    free: int = 0  # given back, and not leased again yet
    lost: int = 0
    spent: int = 0
    repeated: int = 0
    done_by: dict[str, int] = {}
    leased_to: dict[str, int] = {}
    units_per_second: float = 0.0  # of those who train now
    granted: int | None = None  # to this cluster by the layer above, and not done here; None: this run has none above
    waiting_for: str = ""  # what workers that want units are granted none for


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
    closes_in_s: float | None = None  # whoever is missing then; None = there is no such moment (yet)


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


class WayStatus(Struct, frozen=True, kw_only=True):
    """One of several ways to the layer above: an address, or an address and the relay in between. `ordered`: the plan
    of the layer above names it. Rates are 0 where nothing is known."""

    way: str
    used: bool = False
    works: bool = True
    ordered: bool = False
    up_bytes_per_s: float = 0.0
    down_bytes_per_s: float = 0.0
    latency_s: float = 0.0


class AboveStatus(Struct, frozen=True, kw_only=True):
    """What a cluster's server says of the layer above. `failure`: why the cluster is on its own. `warnings`: what is
    wrong between its terms and those of the layer above. `ways`: if there are several."""

    cluster: str
    address: str = ""
    joined: bool = False
    state: str = ""  # of the cluster, as a worker there (docs/concepts/lifecycle.md); "" = not known
    versions: list[int] = []  # that it holds, by fragment of the run up there
    exchanges: int = 0
    missed_rounds: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    failure: str = ""
    warnings: list[str] = []
    ways: list[WayStatus] = []


class ServerStatus(Status, frozen=True, kw_only=True):
    outerstep: str = ""
    above: AboveStatus | None = None  # None: this is the top
    device: str = "cpu"  # where the model is, and the outer step is taken
    device_left: str = ""  # why it is not where the settings say
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
    losses: list[float] = []  # of the last rounds, the mean of what their workers reported; the newest last
    tokens: TokensStatus = TokensStatus()
    num_parameters: int | None = None
    pool_held_bytes: int = 0
    pool_memory_bytes: int = 0
    pool_spooled_bytes: int = 0
    pool_queue: int = 0
    readers: int = 0  # of the model, at this moment
    clusters: dict[str, ClusterStatus] = {}
    links: list[LinkStatus] = []
    layer: LayerStatus | None = None  # None: nothing is chosen by itself
    data: list[DataStatus] = []
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
    losses: list[float] = []  # of the last rounds, the mean of what this peer knows of its contributors; newest last
    data: list[DataStatus] = []
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
