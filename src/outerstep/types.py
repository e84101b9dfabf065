"""The messages of the protocol, as plain frozen values without behaviour.

Each request is one class here, and so is its answer. The coordinator, the exchange machine, the HTTP service, the
in-memory twin and the simulator all use these classes, so a simulated round differs from a real one only in what
carries the messages. `docs/reference/wire.md` is the same in prose.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from msgspec import UNSET, Meta, Struct
from msgspec.structs import replace

from .versions import OLDEST_PROTOCOL, Since2
from .versions import PROTOCOL_VERSION as PROTOCOL_VERSION  # a message says it

MOST_SECTIONS = 4096
MOST_HELD = 1 << 19  # boxes that the sections of a job hold, all tensors together
MOST_BOXES = 1 << 16  # in all patterns of a tiling
MOST_DIMENSIONS = 8  # of a tensor that is held in boxes
MOST_CUT_DIMENSIONS = 4  # of those, in which it is cut
MOST_FROM_ABOVE = 64  # versions from a layer above that are known as such; older ones count as rounds
MOST_CARRIED_BYTES = 1 << 20  # that travel with an offer, or with the answer to a poll
MOST_PAYLOADS = 64  # in one agreement: the longest chain of updates the server sends
MOST_ASSIGNED = 1024  # members that a plan has an assignment for; in a larger run all follow `sync_every`
MOST_REPORTED = 64  # members or links that one heartbeat tells of
MOST_KINDS, LONGEST_KIND = 16, 64  # of accelerators or of backends
LONGEST_PLACE = 64  # where a group is in its life, in words
MOST_IN_CLUSTER, MOST_UNIT_STEPS = 10**6, 10**9
MOST_DATASETS = 16  # that a run leases
MOST_RANGES = 256  # of units of one dataset, in one message
MOST_WANTED = 1 << 16  # units, in one lease
THE_SERVER = "the server"  # as the end of a link; no worker id has a blank in it

# Bounds are part of the type: a message that breaks one is refused before any code acts on it.
Count = Annotated[int, Meta(ge=0, le=2**53)]
Positive = Annotated[int, Meta(ge=1, le=2**53)]
Amount = Annotated[int, Meta(ge=0, le=10**12)]  # of samples or tokens in one contribution
Weight = Annotated[float, Meta(ge=0.0, le=1e15)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Norm = Annotated[float, Meta(ge=0.0)]
LearningRate = Annotated[float, Meta(gt=0.0, le=1e3)]
Momentum = Annotated[float, Meta(ge=0.0, lt=1.0)]
Mode = Literal["sync", "quorum", "async"]
WeightBy = Literal["equal", "samples", "tokens"]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
Label = Annotated[str, Meta(max_length=256)]
WorkerId = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:\-]*\Z")]
LinkEnd = Annotated[str, Meta(max_length=128, pattern=rf"^({THE_SERVER}|[A-Za-z0-9_][A-Za-z0-9_.:\-]*)\Z")]
Kinds = Annotated[tuple[Annotated[str, Meta(max_length=LONGEST_KIND)], ...], Meta(max_length=MOST_KINDS)]
MOST_INFO = 16  # facts that a worker may tell of itself
WHOLE = 2**53  # whole numbers beyond are not the same in every JSON
LONGEST_INFO_NAME, LONGEST_INFO = 64, 256
InfoName = Annotated[str, Meta(min_length=1, max_length=LONGEST_INFO_NAME)]
InfoValue = bool | Annotated[int, Meta(ge=-WHOLE, le=WHOLE)] | float | Annotated[str, Meta(max_length=LONGEST_INFO)]
Info = Annotated[dict[InfoName, InfoValue], Meta(max_length=MOST_INFO)]
"""What a worker tells of itself beside its host (its GPUs, say): shown to people, and no round depends on it."""
DatasetName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:\-]*\Z")]
RunId = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_\-]+\Z")]
Instance = Annotated[str, Meta(min_length=8, max_length=64, pattern=r"^[A-Za-z0-9_\-]+\Z")]
LONGEST_NAME = 512  # of a tensor, in characters
TensorName = Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]
CarriedBytes = Annotated[int, Meta(ge=1, le=MOST_CARRIED_BYTES)]
PartHash = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
Hash = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
AnchorHash = Annotated[str, Meta(pattern=r"^t?[0-9a-f]{32}\Z")]  # with the t, a tree's root (digest.py)
Section = Annotated[int, Meta(ge=0, lt=MOST_SECTIONS)]
Key = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]  # an Ed25519 public key
Nonce = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Signature = Annotated[str, Meta(pattern=r"^[0-9a-f]{128}\Z")]  # Ed25519
SessionSecret = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class Plain(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """A value: immutable, compared by content; it refuses unknown fields. It is made of values, so it is in no
    cycle, and the garbage collector need not look at it. `SINCE`: the protocol that it came with."""

    SINCE: ClassVar[int] = OLDEST_PROTOCOL


# --- the model and the plan ---------------------------------------------------------------------------------------


class ParameterSpec(Plain, frozen=True):
    """One exchanged tensor. `block` names its layer ("" = none), so that fragments follow layers; `embedding` marks
    embedding tables, which may get their own fragment. An exchanged buffer has another role: "average" (the workers'
    mean replaces it at each round) or "server" (every worker uses the server's)."""

    name: TensorName
    shape: tuple[Count, ...]
    dtype: Label
    block: Label = ""
    embedding: bool = False
    role: Literal["parameter", "average", "server"] = "parameter"

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


class Manifest(Plain, frozen=True):
    """Describes a worker's model. Tied parameters appear once; `aliases` maps every other name to the kept one."""

    parameters: tuple[ParameterSpec, ...]
    aliases: dict[TensorName, TensorName] = {}
    buffers: tuple[TensorName, ...] = ()
    frozen: tuple[TensorName, ...] = ()


class Wishes(Plain, frozen=True):
    """Requested plan settings. None = follow the plan."""

    sync_every: Positive | None = None
    codec: Label | None = None
    down_codec: Label | None = None
    num_fragments: Positive | None = None
    delay: Count | None = None
    alpha: Share | None = None
    carry: bool | None = None
    tokenizer: Label | None = None


class Assignment(Plain, frozen=True):
    """One member's part of a plan. In a round it takes `local_steps` units, `larger_batches` of them with one sample
    more than `batch_size`, so that the samples of all add up exactly. `delay`: the plan's, or less where it takes few
    steps. `leader` speaks for it, if it is a cluster ("" = nobody can); `sends_to` is the centre, or the cluster that
    relays for it."""

    SINCE: ClassVar[int] = 2

    cluster: Label
    leader: Label
    sends_to: Label
    local_steps: Positive
    batch_size: Positive
    larger_batches: Count = 0
    delay: Count = 0

    @property
    def samples(self) -> int:
        return self.local_steps * self.batch_size + self.larger_batches

    def batch_of(self, step: int) -> int:
        """Of one step of a round, from 0."""
        return self.batch_size + (step < self.larger_batches)


Assignments = Annotated[tuple[Assignment, ...], Meta(max_length=MOST_ASSIGNED)]


class Plan(Plain, frozen=True):
    """What every worker follows. The coordinator owns it and changes it at round boundaries only; `revision` counts
    changes.

    `codec` encodes contributions, `down_codec` agreements; both are recipes (core/codecs/recipe.py). `delay` is τ: a
    worker adopts an agreement so many steps after it sent its contribution. It then either keeps the steps in between
    (`carry`) or mixes, local = α·local + (1−α)·agreed. `assignments`: what each member does instead of `sync_every`
    and `delay`, sorted by name; a member that is not among them follows those (`plan_of`). `round_deadline_s`: how long
    a round waits after its first contribution, and `outer_lr`: η of the outer step, if the controller chose it; both
    are the server's to carry out, and told because a cluster's own patience follows the one."""

    sync_every: Positive
    codec: Label
    fragments: tuple[tuple[TensorName, ...], ...]
    part_size_bytes: Positive
    max_staleness: Count
    heartbeat_timeout_s: Seconds  # 0 = nobody is ever declared dead
    down_codec: Label = "fp32"  # as in runs from before there was a choice
    mode: Mode = "sync"
    delay: Count = 0
    alpha: Share = 0.0
    carry: bool = False
    weight_by: WeightBy = "equal"
    dylu: bool = False
    tokenizer: Label = ""  # its name or hash, if given: for comparison
    revision: Count = 0
    assignments: Since2[Assignments] = UNSET
    round_deadline_s: Since2[Seconds] = UNSET  # none
    outer_lr: Since2[LearningRate] = UNSET  # as the server was told


def assignment_of(plan: Plan, worker_id: str) -> Assignment | None:
    return next((each for each in plan.assignments or () if each.cluster == worker_id), None)


def plan_of(plan: Plan, worker_id: str) -> Plan:
    """The plan as this worker carries it out: a function of the two and of nothing else, so that nobody reads the same
    revision in another way."""
    mine = assignment_of(plan, worker_id)
    return plan if mine is None else replace(plan, sync_every=mine.local_steps, delay=mine.delay)


# --- membership ---------------------------------------------------------------------------------------------------


class AskNonce(Plain, frozen=True):
    """Asks for something to sign, before a join: between the two ends of the wire, and nobody else's business."""

    SINCE: ClassVar[int] = 2

    worker_id: WorkerId


class NonceAnswer(Plain, frozen=True):
    SINCE: ClassVar[int] = 2

    nonce: Nonce


class JoinProof(Plain, frozen=True):
    """The worker's key, and the server's nonce as it has signed it (security/joining.py)."""

    SINCE: ClassVar[int] = 2

    key: Key
    nonce: Nonce
    signature: Signature


class Box(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A rectangle of a tensor: indices [begin, begin + size) of each dimension. `holders`: the sections that hold it;
    the first sends it."""

    SINCE: ClassVar[int] = 2

    begin: Annotated[tuple[Count, ...], Meta(max_length=MOST_DIMENSIONS)]
    size: Annotated[tuple[Positive, ...], Meta(max_length=MOST_DIMENSIONS)]
    holders: Annotated[tuple[Section, ...], Meta(min_length=1, max_length=MOST_SECTIONS)]


class Tiling(Plain, frozen=True):
    """What the sections of a job hold of its model (tiling.py). A pattern is the boxes of one tensor; `tensors` has the
    number of each tensor's pattern, in the manifest's order."""

    SINCE: ClassVar[int] = 2

    sections: Annotated[int, Meta(ge=1, le=MOST_SECTIONS)]
    patterns: Annotated[
        tuple[Annotated[tuple[Box, ...], Meta(max_length=MOST_SECTIONS)], ...], Meta(max_length=MOST_BOXES)
    ]
    tensors: Annotated[tuple[Count, ...], Meta(max_length=10**6)]


class Join(Plain, frozen=True):
    """A worker introduces itself. `instance` is random at each start of the process; a rejoin names its `run_id`.
    `continues`: it resumes from its own saved state, with the steps it had taken; so rounds that waited for the
    previous process wait for this one. `proof`: of the key that the worker id belongs to; a worker of protocol 1 has
    none. `info`: what it tells of itself, for people. `tiling`: what each section of its contributions holds, if they
    are not cut by rows."""

    protocol: Count
    worker_id: WorkerId
    instance: Instance
    hostname: Label = ""
    manifest: Manifest | None = None  # None = as the run has it
    wishes: Wishes = Wishes()
    run_id: RunId | None = None
    continues: bool = False
    proof: Since2[JoinProof] = UNSET
    info: Since2[Info] = UNSET
    tiling: Since2[Tiling] = UNSET


class JoinedFragment(Plain, frozen=True):
    """A fragment's newest version, and the last sequence accepted from the joining worker, with the version that it
    counts in (possibly a future one)."""

    version: Count
    last_sequence: Count
    counted_in: Count = 0


class JoinAnswer(Plain, frozen=True):
    """`session`: the secret that every later request of this start carries, in a header, if it has proved its key. A
    cluster compares `outer_momentum` with its own (not said: of an optimizer by name, which may have some)."""

    run_id: RunId
    incarnation: Positive
    plan: Plan
    manifest: Manifest
    fragments: tuple[JoinedFragment, ...]
    session: Since2[SessionSecret] = UNSET
    outer_momentum: Since2[Momentum] = UNSET


class FromMember(Plain, frozen=True):
    """The head of every request of a joined worker: run, worker and incarnation."""

    run_id: RunId
    worker_id: WorkerId
    incarnation: Positive


class Command(Plain, frozen=True):
    """An order to one worker; every heartbeat answer carries it until a heartbeat acknowledges it.

    drain: contribute what you have, adopt the agreement, leave. sync: contribute every fragment now. lead: a cluster is
    to be led by its member `leader` (only clusters are told so)."""

    id: Positive
    kind: Literal["drain", "sync", "lead"]
    reason: Label = ""
    leader: Since2[Label] = UNSET


class MeasuredLink(Plain, frozen=True):
    """One direction of a link, as the member that tells of it has measured it. One end is that member."""

    SINCE: ClassVar[int] = 2

    source: LinkEnd
    target: LinkEnd
    bytes_per_s: Annotated[float, Meta(ge=0.0, le=1e15)]
    latency_s: Seconds = 0.0
    age_s: Seconds = 0.0


class MemberFacts(Plain, frozen=True):
    """What a worker tells of itself that may change; what does not is in `Join.info`. The server keeps the last of it
    for each of thousands, so it is small. `batch_size`: samples of one
    unit, 0 = not known. A cluster tells more: its `members` (the first of them, if they are many) and their number
    (`size`), their `accelerators`, the `backends` that all of them can speak, and the training steps that one unit of
    it has, which is a round. If its leader may be any of them: who leads now, and how fast the line of each is that is
    told of (`reach`, bytes per second, 0 = not measured). `states`: where in its life each member is that is told of.
    `relays`: it passes bytes on for other clusters; `via`: the one that passes its own bytes on now ("" = none)."""

    SINCE: ClassVar[int] = 2

    batch_size: Amount = 0
    size: Annotated[int, Meta(ge=1, le=MOST_IN_CLUSTER)] = 1
    unit_steps: Annotated[int, Meta(ge=1, le=MOST_UNIT_STEPS)] = 1
    members: Annotated[tuple[WorkerId, ...], Meta(max_length=MOST_REPORTED)] = ()
    accelerators: Kinds = ()
    backends: Kinds = ()
    links: Annotated[tuple[MeasuredLink, ...], Meta(max_length=MOST_REPORTED)] = ()
    leader: Label = ""
    relays: bool = False
    via: Label = ""
    reach: Annotated[tuple[Annotated[float, Meta(ge=0.0, le=1e15)], ...], Meta(max_length=MOST_REPORTED)] = ()
    states: Annotated[tuple[Annotated[str, Meta(max_length=LONGEST_PLACE)], ...], Meta(max_length=MOST_REPORTED)] = ()


class Heartbeat(FromMember, frozen=True):
    """`steps_per_second` over training time only; 0 = not known yet. `acknowledged`: commands that the worker has
    executed, or will at the next step. `facts`: for the controller, and for people."""

    step: Count
    steps_per_second: Annotated[float, Meta(ge=0.0, le=1e9)]
    loss: float | None = None
    acknowledged: tuple[Positive, ...] = ()
    facts: Since2[MemberFacts] = UNSET


class HeartbeatAnswer(Plain, frozen=True):
    """`sync_every`: this worker's own H from now on (dynamic local updates), if it differs from the plan's.
    `num_workers`: how many the run reckons with; `num_registered`: how many are live. `measure_link`: nothing has
    travelled between the two ends for long, so let a few bytes do."""

    sync_round: Count
    sync_every: Positive | None = None
    commands: tuple[Command, ...] = ()
    num_workers: Since2[Count] = UNSET
    num_registered: Since2[Count] = UNSET
    measure_link: Since2[bool] = UNSET


class Leave(FromMember, frozen=True):
    reason: Label = ""


class LeaveAnswer(Plain, frozen=True):
    pass


# --- data ---------------------------------------------------------------------------------------------------------

Places = Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=MOST_RANGES)]
"""Ranges [begin, end) of places (coordination/leases.py)."""


class Dataset(Plain, frozen=True):
    """What a run leases to its workers, the same for all of them. `samples` (or shards) are cut into units of
    `unit_samples`, the last one of an epoch shorter. `epochs`: 0 = without end. `shuffle`: in an order of their own in
    each epoch, drawn from `seed`. `fingerprint`: of its contents, for comparison.

    `again`: units whose worker is gone are leased once more; otherwise nothing is ever leased twice. `dropped`: what
    becomes of units whose steps were trained and then given up (too old, overwritten, screened out)."""

    SINCE: ClassVar[int] = 2

    name: DatasetName
    samples: Positive
    unit_samples: Positive
    epochs: Annotated[int, Meta(ge=0, le=10**6)] = 1
    seed: Count = 0
    shuffle: bool = True
    fingerprint: Label = ""
    again: bool = True
    dropped: Literal["spent", "again"] = "spent"

    @property
    def units(self) -> int:
        """In one epoch."""
        return -(-self.samples // self.unit_samples)


class Lease(FromMember, frozen=True):
    """ "I want so many units more." `number` counts this start's requests for this dataset: a repeated one gets the
    same answer. `holds`: all places that it was leased and that are not in agreements it has adopted; what the server
    believes it holds beyond that is not there, and goes back. `dropped`: places whose steps it has given up since the
    last request. `untrained`: how many of those that it holds it has not trained; `waits`: it has none left to draw;
    `pace`: units per second. `goes_back`: it has resumed from a state that is older than what it had sent, and trains
    once more what came in between of units that it has begun."""

    SINCE: ClassVar[int] = 2

    dataset: Dataset
    number: Positive
    want: Annotated[int, Meta(ge=0, le=MOST_WANTED)]
    holds: Places = ()
    dropped: Places = ()
    untrained: Count = 0
    waits: bool = False
    pace: Annotated[float, Meta(ge=0.0, le=1e9)] = 0.0
    goes_back: bool = False


class LeaseAnswer(Plain, frozen=True):
    """`granted`: places, to be trained in this order. `void`: what the worker said it holds, and does not: it leaves
    out what it has not trained of it. more: ask again when they are used up, or after `retry_after_s`. over: nothing
    is left to lease. (Others may give something back: a worker that still trains asks again.) `waiting_for`: what
    nothing was granted for, in words, if it is not that others have it."""

    SINCE: ClassVar[int] = 2

    state: Literal["more", "over"]
    granted: Places = ()
    void: Places = ()
    retry_after_s: Seconds = 0.0
    waiting_for: Label = ""


class Trained(Plain, frozen=True):
    """The units of one dataset whose last step is in a contribution. `begun`: units of which it holds a part, and whose
    last step is still to come; of a cluster, units that it may hold a part of: some fragments of the cluster's own have
    them already. They are named when all have. `continued`: of both, those of which earlier contributions to the same
    fragment hold a part. `torn`: units of which it holds a part, and whose other parts are in no model: whoever trains
    them begins anew."""

    SINCE: ClassVar[int] = 2

    dataset: DatasetName
    places: Places
    begun: Places = ()
    continued: Places = ()
    torn: Places = ()


class LeaseStatement(Plain, frozen=True):
    """What a member of a run without a server says of one dataset (coordination/shared_leases.py). `holds`, `dropped`,
    `untrained`: as in `Lease`; `spare`: what it holds and has not drawn; `pace`: units that it trains from one exchange
    to the next. `turn`: of the last decision that it knew of."""

    SINCE: ClassVar[int] = 2

    dataset: DatasetName
    holds: Places = ()
    spare: Places = ()
    dropped: Places = ()
    untrained: Count = 0
    pace: Annotated[float, Meta(ge=0.0, le=1e9)] = 0.0
    turn: Count = 0


# --- one exchange -------------------------------------------------------------------------------------------------


class ContributionKey(Plain, frozen=True):
    """The identity of a contribution, fixed when it is begun and never relabelled."""

    run_id: RunId
    worker_id: WorkerId
    fragment: Count
    sequence: Positive

    def __str__(self) -> str:
        return f"{self.worker_id}/fragment {self.fragment}/#{self.sequence}"


class OfContribution(FromMember, frozen=True):
    """The head of every request about one contribution."""

    fragment: Count
    sequence: Positive

    @property
    def key(self) -> ContributionKey:
        return ContributionKey(
            run_id=self.run_id, worker_id=self.worker_id, fragment=self.fragment, sequence=self.sequence
        )


class Offer(OfContribution, frozen=True):
    """ "I have a contribution." `oldest_base` is the version under its oldest unsent step (≤ base_version). `steps`,
    `samples` and `tokens` say how much training is in it; the server computes its weight from them. A group of
    processes that each hold some rows of every tensor sends it in sections, one frame each (wire/frames.py);
    `section_bytes` are their sizes, which add up to `size_bytes`. Empty = one section. `follows`: the sequence of an
    earlier contribution that no agreement held by this worker includes (0 = none). A restarted server that has
    forgotten it must get it first, because it accepts no older sequence afterwards. `loss`: the worker's last, if it
    knows one; shown with the round. `data`: leased units whose last step is in it. `wait_s`: so long the answer may
    take while there is no room. `tiled`: the sections are those of the worker's tiling, and not by rows."""

    base_version: Count
    oldest_base: Count
    steps: Count
    codec: Label
    size_bytes: Positive
    samples: Amount = 0
    tokens: Amount = 0
    section_bytes: Annotated[tuple[Positive, ...], Meta(max_length=MOST_SECTIONS)] = ()
    follows: Count = 0
    loss: Since2[float] = UNSET
    data: Since2[Annotated[tuple[Trained, ...], Meta(max_length=MOST_DATASETS)]] = UNSET
    wait_s: Since2[Seconds] = UNSET
    tiled: Since2[bool] = UNSET

    @property
    def sections(self) -> int:
        return len(self.section_bytes) or 1


class OfferAnswer(Plain, frozen=True):
    """send: these parts are missing. wait: no room yet, retry. accepted: it already counts (a repeated offer)."""

    state: Literal["send", "wait", "accepted"]
    missing: tuple[Count, ...] = ()
    version: Count = 0
    retry_after_s: Seconds = 0.0


class PutPart(OfContribution, frozen=True):
    """Carries the bytes of one part as its body."""

    part: Count
    hash: PartHash


class PutPartAnswer(Plain, frozen=True):
    state: Literal["stored", "duplicate"]


class Commit(OfContribution, frozen=True):
    """ "That was all." The payload hash is over the parts' hashes (digest.py)."""

    payload_hash: Hash


class CompleteOffer(Offer, frozen=True, kw_only=True):
    """An offer that brings all of its contribution along: one part of at most `MOST_CARRIED_BYTES`, its body, with this
    hash. It stands for an offer, the part and a commit, and each of them is decided as if it came alone."""

    SINCE: ClassVar[int] = 2

    size_bytes: CarriedBytes
    hash: PartHash


class CompleteOfferAnswer(OfferAnswer, frozen=True):
    """accepted: it is here, checked, and counts. wait, send: the part was not read, and the contribution goes on as
    after a plain offer."""

    SINCE: ClassVar[int] = 2


class CommitAnswer(Plain, frozen=True):
    """Accepted: it counts in the agreement with this version."""

    version: Positive


class Participant(Plain, frozen=True):
    """One contribution inside an agreement. Staleness 0 = computed from the preceding agreement. `weight` is the weight
    it counted with, staleness included. `norm` is ‖Δ‖, if known."""

    worker_id: WorkerId
    sequence: Positive
    weight: Weight
    staleness: Count = 0
    norm: Norm | None = None


class Watched(Plain, frozen=True):
    """The metrics of a round (core/watch.py). None = unknown or undefined (the similarity of a single contribution).

    `pseudo_grad_norm`: ‖Δ‖ of the worker's own contribution. `peer_grad_similarity`: the mean cosine between two
    contributions. `aggregated_grad_norm`: ‖Δ̄‖ of the aggregate. `weight_divergence`: the variance of the weights
    between the workers, summed over the parameters, just before they agreed."""

    pseudo_grad_norm: Norm | None = None
    peer_grad_similarity: Annotated[float, Meta(ge=-1.0, le=1.0)] | None = None
    aggregated_grad_norm: Norm | None = None
    weight_divergence: Annotated[float, Meta(ge=0.0)] | None = None


class Payload(Plain, frozen=True):
    """A frame to fetch in parts. "full" is the whole anchor of this version, in fp32. "update" is the encoded
    difference from the previous version."""

    version: Count
    kind: Literal["full", "update"]
    size_bytes: Positive
    hash: Hash  # over the parts' hashes (digest.py)


class Agreement(Plain, frozen=True):
    """The result of a round. `payloads` lead to it: one "full", or a chain of "update"s from the version that the
    requester holds, to be added in order; both give the same bits. `anchor_hash` is over the fragment's fp32 values,
    however they travelled; `range_hashes`, for a group that asked, over the rows of each section. `watched`: the
    metrics of the round that are the same for all workers. `above`: the recent versions, up to this one, that no round
    made: they came from a layer above, and make no step older."""

    fragment: Count
    version: Count
    anchor_hash: AnchorHash
    participants: tuple[Participant, ...] = ()
    watched: Watched | None = None
    payloads: Annotated[tuple[Payload, ...], Meta(max_length=MOST_PAYLOADS)] = ()
    range_hashes: tuple[AnchorHash, ...] = ()
    above: Since2[Annotated[tuple[Count, ...], Meta(max_length=MOST_FROM_ABOVE)]] = UNSET

    @property
    def size_bytes(self) -> int:
        """Of all payloads to fetch."""
        return sum(payload.size_bytes for payload in self.payloads)


class Poll(FromMember, frozen=True):
    """ "Is there an agreement newer than `after`?" Answered when there is, or after at most `wait_s`. `held` and
    `held_hash` are the version and the hash of the anchor we hold: the server may send the updates from there instead
    of a snapshot. `sections` > 1 also asks for the hash of each section's rows; `plan_revision` is that of the plan we
    follow. `takes_bytes`: payloads of at most so many bytes may come with the answer. `trees`: hashes of anchors may be
    trees. `tiled`: the hashes are of what each section of the worker's tiling holds."""

    fragment: Count
    after: Annotated[int, Meta(ge=-1, le=2**53)]
    held: Count = 0
    held_hash: AnchorHash | None = None  # None = send a snapshot
    wait_s: Seconds = 0.0
    sections: Annotated[int, Meta(ge=1, le=MOST_SECTIONS)] = 1
    plan_revision: Count = 0
    takes_bytes: Since2[CarriedBytes] = UNSET
    trees: Since2[bool] = UNSET
    tiled: Since2[bool] = UNSET


class PollAnswer(Plain, frozen=True):
    """`last_sequence`: the last contribution of this worker to this fragment that the server has accepted. A worker
    that was told "accepted" and then sees a smaller number knows that the server lost its contribution, and resends it.
    `stuck`: the open round cannot close unless more workers join. `wanted`: (fragment, version) of other rounds that
    wait for this worker; if it is blocked, it contributes to them too, so that two workers at different fragments never
    wait for each other. `plan`: the run's plan, if it changed since the revision in the poll. `carried_bytes`: all
    payloads of the agreement, each of one part, come with the answer, one after the other."""

    agreement: Agreement | None
    last_sequence: Count
    waiting_for: Label = ""
    stuck: bool = False
    wanted: tuple[tuple[Count, Positive], ...] = ()
    retry_after_s: Seconds = 0.0
    plan: Plan | None = None
    carried_bytes: Since2[CarriedBytes] = UNSET


class GetPart(FromMember, frozen=True):
    """Requests one part of a payload; the answer's body is the bytes."""

    fragment: Count
    version: Count
    part: Count
    kind: Literal["full", "update"] = "full"


class GetPartAnswer(Plain, frozen=True):
    """Comes with the bytes: the hash that the sender computed. The receiver computes its own and compares."""

    hash: PartHash


# --- the operator -------------------------------------------------------------------------------------------------


class Control(Plain, frozen=True):
    """An operator's order to the server.

    save: write the state now. kick: remove a worker; it must be restarted to rejoin. drain: let a worker (or all)
    contribute and leave. sync: let a worker (or all) contribute at once. plan: apply `changes` at the next round.
    budget: end at so many tokens (0 = no end). pardon: clear a worker's offences, which ends its quarantine. release:
    forget the keys that a worker id belongs to; the next start that brings a key owns it. forget: forget the leased
    dataset `dataset`; the next worker that asks for it says what it is. lead: let a cluster be led by its member
    `leader`. shutdown: drain all, save, stop."""

    SINCE_KIND: ClassVar[Mapping[str, int]] = {"release": 2, "forget": 2, "lead": 2}

    kind: Literal["save", "kick", "pardon", "release", "forget", "drain", "sync", "lead", "plan", "budget", "shutdown"]
    worker_id: WorkerId | None = None
    reason: Label = ""
    changes: Wishes = Wishes()
    tokens: Count = 0
    leader: Since2[WorkerId] = UNSET
    dataset: Since2[DatasetName] = UNSET


class ControlAnswer(Plain, frozen=True):
    """What was done, as text."""

    done: str


Request = Join | Heartbeat | Leave | Lease | Offer | CompleteOffer | PutPart | Commit | Poll | GetPart | Control
Answer = (
    JoinAnswer
    | HeartbeatAnswer
    | LeaveAnswer
    | LeaseAnswer
    | OfferAnswer
    | CompleteOfferAnswer
    | PutPartAnswer
    | CommitAnswer
    | PollAnswer
    | GetPartAnswer
    | ControlAnswer
)
