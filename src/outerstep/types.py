"""The messages of the protocol, as plain frozen values without behaviour.

Each request is one class here, and so is its answer. The coordinator, the exchange machine, the HTTP service, the
in-memory twin and the simulator all use these classes, so a simulated round differs from a real one only in what
carries the messages. `docs/reference/wire.md` is the same in prose.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import UNSET, Meta, Struct

from .versions import OLDEST_PROTOCOL, Since2
from .versions import PROTOCOL_VERSION as PROTOCOL_VERSION  # a message says it

MOST_SECTIONS = 4096
MOST_FROM_ABOVE = 64  # versions from a layer above that are known as such; older ones count as rounds
MOST_PAYLOADS = 64  # in one agreement: the longest chain of updates the server sends

# Bounds are part of the type: a message that breaks one is refused before any code acts on it.
Count = Annotated[int, Meta(ge=0, le=2**53)]
Positive = Annotated[int, Meta(ge=1, le=2**53)]
Amount = Annotated[int, Meta(ge=0, le=10**12)]  # of samples or tokens in one contribution
Weight = Annotated[float, Meta(ge=0.0, le=1e15)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Norm = Annotated[float, Meta(ge=0.0)]
Mode = Literal["sync", "quorum", "async"]
WeightBy = Literal["equal", "samples", "tokens"]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
Label = Annotated[str, Meta(max_length=256)]
WorkerId = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:\-]*\Z")]
MOST_INFO = 16  # facts that a worker may tell of itself
WHOLE = 2**53  # whole numbers beyond are not the same in every JSON
LONGEST_INFO_NAME, LONGEST_INFO = 64, 256
InfoName = Annotated[str, Meta(min_length=1, max_length=LONGEST_INFO_NAME)]
InfoValue = bool | Annotated[int, Meta(ge=-WHOLE, le=WHOLE)] | float | Annotated[str, Meta(max_length=LONGEST_INFO)]
Info = Annotated[dict[InfoName, InfoValue], Meta(max_length=MOST_INFO)]
"""What a worker tells of itself beside its host (its GPUs, say): shown to people, and no round depends on it."""
RunId = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_\-]+\Z")]
Instance = Annotated[str, Meta(min_length=8, max_length=64, pattern=r"^[A-Za-z0-9_\-]+\Z")]
LONGEST_NAME = 512  # of a tensor, in characters
TensorName = Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]
PartHash = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
Hash = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
Key = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]  # an Ed25519 public key
Nonce = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Signature = Annotated[str, Meta(pattern=r"^[0-9a-f]{128}\Z")]  # Ed25519
SessionSecret = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class Plain(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value: immutable, compared by content; it refuses unknown fields. `SINCE`: the protocol that it came with."""

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


class Plan(Plain, frozen=True):
    """What every worker follows. The coordinator owns it and changes it at round boundaries only; `revision` counts
    changes.

    `codec` encodes contributions, `down_codec` agreements; both are recipes (core/codecs/recipe.py). `delay` is τ: a
    worker adopts an agreement so many steps after it sent its contribution. It then either keeps the steps in between
    (`carry`) or mixes, local = α·local + (1−α)·agreed."""

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


class Join(Plain, frozen=True):
    """A worker introduces itself. `instance` is random at each start of the process; a rejoin names its `run_id`.
    `continues`: it resumes from its own saved state, with the steps it had taken; so rounds that waited for the
    previous process wait for this one. `proof`: of the key that the worker id belongs to; a worker of protocol 1 has
    none. `info`: what it tells of itself, for people."""

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


class JoinedFragment(Plain, frozen=True):
    """A fragment's newest version, and the last sequence accepted from the joining worker, with the version that it
    counts in (possibly a future one)."""

    version: Count
    last_sequence: Count
    counted_in: Count = 0


class JoinAnswer(Plain, frozen=True):
    """`session`: the secret that every later request of this start carries, in a header, if it has proved its key."""

    run_id: RunId
    incarnation: Positive
    plan: Plan
    manifest: Manifest
    fragments: tuple[JoinedFragment, ...]
    session: Since2[SessionSecret] = UNSET


class FromMember(Plain, frozen=True):
    """The head of every request of a joined worker: run, worker and incarnation."""

    run_id: RunId
    worker_id: WorkerId
    incarnation: Positive


class Command(Plain, frozen=True):
    """An order to one worker; every heartbeat answer carries it until a heartbeat acknowledges it.

    drain: contribute what you have, adopt the agreement, leave. sync: contribute every fragment now."""

    id: Positive
    kind: Literal["drain", "sync"]
    reason: Label = ""


class Heartbeat(FromMember, frozen=True):
    """`steps_per_second` over training time only; 0 = not known yet. `acknowledged`: commands that the worker has
    executed, or will at the next step."""

    step: Count
    steps_per_second: Annotated[float, Meta(ge=0.0, le=1e9)]
    loss: float | None = None
    acknowledged: tuple[Positive, ...] = ()


class HeartbeatAnswer(Plain, frozen=True):
    """`sync_every`: this worker's own H from now on (dynamic local updates), if it differs from the plan's.
    `num_workers`: how many the run reckons with; `num_registered`: how many are live."""

    sync_round: Count
    sync_every: Positive | None = None
    commands: tuple[Command, ...] = ()
    num_workers: Since2[Count] = UNSET
    num_registered: Since2[Count] = UNSET


class Leave(FromMember, frozen=True):
    reason: Label = ""


class LeaveAnswer(Plain, frozen=True):
    pass


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
    forgotten it must get it first, because it accepts no older sequence afterwards."""

    base_version: Count
    oldest_base: Count
    steps: Count
    codec: Label
    size_bytes: Positive
    samples: Amount = 0
    tokens: Amount = 0
    section_bytes: Annotated[tuple[Positive, ...], Meta(max_length=MOST_SECTIONS)] = ()
    follows: Count = 0

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
    anchor_hash: Hash
    participants: tuple[Participant, ...] = ()
    watched: Watched | None = None
    payloads: Annotated[tuple[Payload, ...], Meta(max_length=MOST_PAYLOADS)] = ()
    range_hashes: tuple[Hash, ...] = ()
    above: Since2[Annotated[tuple[Count, ...], Meta(max_length=MOST_FROM_ABOVE)]] = UNSET

    @property
    def size_bytes(self) -> int:
        """Of all payloads to fetch."""
        return sum(payload.size_bytes for payload in self.payloads)


class Poll(FromMember, frozen=True):
    """ "Is there an agreement newer than `after`?" Answered when there is, or after at most `wait_s`. `held` and
    `held_hash` are the version and the hash of the anchor we hold: the server may send the updates from there instead
    of a snapshot. `sections` > 1 also asks for the hash of each section's rows; `plan_revision` is that of the plan we
    follow."""

    fragment: Count
    after: Annotated[int, Meta(ge=-1, le=2**53)]
    held: Count = 0
    held_hash: Hash | None = None  # None = send a snapshot
    wait_s: Seconds = 0.0
    sections: Annotated[int, Meta(ge=1, le=MOST_SECTIONS)] = 1
    plan_revision: Count = 0


class PollAnswer(Plain, frozen=True):
    """`last_sequence`: the last contribution of this worker to this fragment that the server has accepted. A worker
    that was told "accepted" and then sees a smaller number knows that the server lost its contribution, and resends it.
    `stuck`: the open round cannot close unless more workers join. `wanted`: (fragment, version) of other rounds that
    wait for this worker; if it is blocked, it contributes to them too, so that two workers at different fragments never
    wait for each other. `plan`: the run's plan, if it changed since the revision in the poll."""

    agreement: Agreement | None
    last_sequence: Count
    waiting_for: Label = ""
    stuck: bool = False
    wanted: tuple[tuple[Count, Positive], ...] = ()
    retry_after_s: Seconds = 0.0
    plan: Plan | None = None


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
    forget the keys that a worker id belongs to; the next start that brings a key owns it. shutdown: drain all, save,
    stop."""

    kind: Literal["save", "kick", "pardon", "release", "drain", "sync", "plan", "budget", "shutdown"]
    worker_id: WorkerId | None = None
    reason: Label = ""
    changes: Wishes = Wishes()
    tokens: Count = 0


class ControlAnswer(Plain, frozen=True):
    """What was done, as text."""

    done: str


Request = Join | Heartbeat | Leave | Offer | PutPart | Commit | Poll | GetPart | Control
Answer = (
    JoinAnswer
    | HeartbeatAnswer
    | LeaveAnswer
    | OfferAnswer
    | PutPartAnswer
    | CommitAnswer
    | PollAnswer
    | GetPartAnswer
    | ControlAnswer
)
