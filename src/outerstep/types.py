"""The words of the system as plain, frozen values: what both ends say to each other, and nothing that does anything.

Each request of the protocol is one class here, and so is its answer. The coordinator, the exchange machine, the HTTP
service, the in-memory twin and the simulator all use these same classes, so a simulated round and a real one differ in
who carries the message and in nothing else. `docs/reference/wire.md` is the same thing in prose.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

PROTOCOL_VERSION = 1
MOST_SECTIONS = 4096
MOST_PAYLOADS = 64  # in one agreement: the longest chain of updates that anybody is sent

# Bounds are part of the type: a message that breaks one is refused before anybody acts on it.
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
RunId = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_\-]+\Z")]
Instance = Annotated[str, Meta(min_length=8, max_length=64, pattern=r"^[A-Za-z0-9_\-]+\Z")]
TensorName = Annotated[str, Meta(min_length=1, max_length=512)]
PartHash = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
Hash = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]


class Plain(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value: immutable, compared by content, refusing fields it does not know."""


# --- the model and the plan ---------------------------------------------------------------------------------------


class ParameterSpec(Plain, frozen=True):
    """One tensor that is exchanged. `block` names the layer it belongs to ("" = none), so that fragments follow layers;
    `embedding` tells the tables, which may get a fragment of their own. A buffer that is exchanged has another role:
    "average" (the workers' mean replaces it at each round) or "server" (everybody takes the server's)."""

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
    """What a worker's model is. Tied parameters appear once; `aliases` maps each other name to the one that is kept."""

    parameters: tuple[ParameterSpec, ...]
    aliases: dict[TensorName, TensorName] = {}
    buffers: tuple[TensorName, ...] = ()
    frozen: tuple[TensorName, ...] = ()


class Wishes(Plain, frozen=True):
    """What somebody wants the plan to say. None = whatever the plan says."""

    sync_every: Positive | None = None
    codec: Label | None = None
    down_codec: Label | None = None
    num_fragments: Positive | None = None
    delay: Count | None = None
    alpha: Share | None = None
    carry: bool | None = None
    tokenizer: Label | None = None


class Plan(Plain, frozen=True):
    """What every worker follows. Owned by the coordinator, changed at round boundaries only; `revision` counts changes.

    `codec` is what contributions travel in, `down_codec` what agreements do: recipes (core/codecs/recipe.py). `delay`
    is τ: an agreement is taken over so many steps after its contribution was sent. Then the worker either keeps the
    steps it took meanwhile (`carry`) or mixes, local = α·local + (1−α)·agreed."""

    sync_every: Positive
    codec: Label
    fragments: tuple[tuple[TensorName, ...], ...]
    part_size_bytes: Positive
    max_staleness: Count
    heartbeat_timeout_s: Seconds  # 0 = nobody is ever declared dead
    down_codec: Label = "fp32"  # what runs had before there was a choice
    mode: Mode = "sync"
    delay: Count = 0
    alpha: Share = 0.0
    carry: bool = False
    weight_by: WeightBy = "equal"
    dylu: bool = False
    tokenizer: Label = ""  # its name or hash, if somebody named it: for comparing
    revision: Count = 0


# --- membership ---------------------------------------------------------------------------------------------------


class Join(Plain, frozen=True):
    """A worker introduces itself. `instance` is drawn at each start of the process; a re-join names its `run_id`.
    `continues`: it goes on from a saved state of its own, with the steps it had taken; so the rounds that waited for
    the process before it wait for this one."""

    protocol: Count
    worker_id: WorkerId
    instance: Instance
    hostname: Label = ""
    manifest: Manifest | None = None  # None = as the run has it
    wishes: Wishes = Wishes()
    run_id: RunId | None = None
    continues: bool = False


class JoinedFragment(Plain, frozen=True):
    """Where a fragment stands: its newest version, and the last sequence accepted from the worker that asks, with the
    version that it counts in (which may be still to come)."""

    version: Count
    last_sequence: Count
    counted_in: Count = 0


class JoinAnswer(Plain, frozen=True):
    run_id: RunId
    incarnation: Positive
    plan: Plan
    manifest: Manifest
    fragments: tuple[JoinedFragment, ...]


class FromMember(Plain, frozen=True):
    """The head of everything a joined worker sends: which run, who, and which start of it."""

    run_id: RunId
    worker_id: WorkerId
    incarnation: Positive


class Command(Plain, frozen=True):
    """An order to one worker; it comes with every heartbeat answer until a heartbeat acknowledges it.

    drain: contribute what you have, take over the agreement, leave. sync: contribute every fragment now."""

    id: Positive
    kind: Literal["drain", "sync"]
    reason: Label = ""


class Heartbeat(FromMember, frozen=True):
    """`steps_per_second` over training time only; 0 = not known yet. `acknowledged`: commands that were carried out
    or will be at the next step."""

    step: Count
    steps_per_second: Annotated[float, Meta(ge=0.0, le=1e9)]
    loss: float | None = None
    acknowledged: tuple[Positive, ...] = ()


class HeartbeatAnswer(Plain, frozen=True):
    """`sync_every`: this worker's own H from now on (dynamic local updates), if it is to differ from the plan's."""

    sync_round: Count
    sync_every: Positive | None = None
    commands: tuple[Command, ...] = ()


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
    """The head of everything that concerns one contribution."""

    fragment: Count
    sequence: Positive

    @property
    def key(self) -> ContributionKey:
        return ContributionKey(
            run_id=self.run_id, worker_id=self.worker_id, fragment=self.fragment, sequence=self.sequence
        )


class Offer(OfContribution, frozen=True):
    """ "I have a contribution." `oldest_base` is the version under its oldest unsent step (≤ base_version). `steps`,
    `samples` and `tokens` say how much training is in it; the server makes its weight from them. A group of processes
    that each hold some rows of every tensor sends it in sections, one frame each (wire/frames.py); `section_bytes`
    are their sizes, which add up to `size_bytes`. None named = one section. `follows`: the sequence of an earlier one
    that no agreement its worker holds includes (0 = none); a server that was restarted and has forgotten that one must
    be sent it first, for it takes no older sequence afterwards."""

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
    """send: these parts are missing. wait: no room yet, ask again. accepted: it is in already (a repeated offer)."""

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
    """One contribution inside an agreement. Staleness 0 = it was computed from the agreement just before. `weight` is
    what it counted with, staleness included. `norm` is ‖Δ‖, as far as it is known."""

    worker_id: WorkerId
    sequence: Positive
    weight: Weight
    staleness: Count = 0
    norm: Norm | None = None


class Watched(Plain, frozen=True):
    """How a round went (core/watch.py). None = not known, or there is no such thing (a similarity of one).

    `pseudo_grad_norm`: ‖Δ‖ of the worker's own contribution. `peer_grad_similarity`: the mean cosine between two
    contributions. `aggregated_grad_norm`: ‖Δ̄‖ of what came out. `weight_divergence`: the variance of the weights
    between the workers, summed over the parameters, just before they agreed."""

    pseudo_grad_norm: Norm | None = None
    peer_grad_similarity: Annotated[float, Meta(ge=-1.0, le=1.0)] | None = None
    aggregated_grad_norm: Norm | None = None
    weight_divergence: Annotated[float, Meta(ge=0.0)] | None = None

    @property
    def known(self) -> dict[str, float]:
        """By name, to six digits, for people."""
        found = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: float(f"{value:.6g}") for name, value in found.items() if value is not None}


class Payload(Plain, frozen=True):
    """Bytes to be fetched in parts: a frame. "full" is the anchor of this version, whole, in fp32. "update" is the
    encoded difference to it from the version before."""

    version: Count
    kind: Literal["full", "update"]
    size_bytes: Positive
    hash: Hash  # over the parts' hashes (digest.py)


class Agreement(Plain, frozen=True):
    """What a round produced. `payloads` lead to it: one "full", or from the version that the asker holds a chain of
    "update"s, to be added one after the other; either way the same bits come out. `anchor_hash` is over the fragment's
    fp32 values, however they were carried; `range_hashes`, for a group that asked, over the rows of each section.
    `watched`: how the round went, as far as it is the same for everybody."""

    fragment: Count
    version: Count
    anchor_hash: Hash
    participants: tuple[Participant, ...] = ()
    watched: Watched | None = None
    payloads: Annotated[tuple[Payload, ...], Meta(max_length=MOST_PAYLOADS)] = ()
    range_hashes: tuple[Hash, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Of all that is to be fetched."""
        return sum(payload.size_bytes for payload in self.payloads)


class Poll(FromMember, frozen=True):
    """ "Is there an agreement newer than `after`?" Answered when there is, or after at most `wait_s`. `held` and
    `held_hash` are the version and the hash of the anchor we hold: what leads from there to the newest may be sent
    instead of all of it. `sections` > 1 asks for the hash of each section's rows beside the hash of all;
    `plan_revision` is that of the plan we follow."""

    fragment: Count
    after: Annotated[int, Meta(ge=-1, le=2**53)]
    held: Count = 0
    held_hash: Hash | None = None  # None = send the whole
    wait_s: Seconds = 0.0
    sections: Annotated[int, Meta(ge=1, le=MOST_SECTIONS)] = 1
    plan_revision: Count = 0


class PollAnswer(Plain, frozen=True):
    """`last_sequence`: the last contribution of this worker to this fragment that the server has accepted; a worker
    that was told "accepted" and then sees a smaller number knows that the server lost it, and sends it again.
    `stuck`: the open round cannot close unless more workers join. `wanted`: (fragment, version) of other rounds that
    wait for this worker; if it stands still while it waits, it contributes to them too, so that two workers at
    different fragments never wait for each other. `plan`: the run's plan, if it changed since the asker's."""

    agreement: Agreement | None
    last_sequence: Count
    waiting_for: Label = ""
    stuck: bool = False
    wanted: tuple[tuple[Count, Positive], ...] = ()
    retry_after_s: Seconds = 0.0
    plan: Plan | None = None


class GetPart(FromMember, frozen=True):
    """Asks for one part of a payload; the answer's body is the bytes."""

    fragment: Count
    version: Count
    part: Count
    kind: Literal["full", "update"] = "full"


class GetPartAnswer(Plain, frozen=True):
    """Beside the bytes: the hash the sender computed. The receiver computes its own and compares."""

    hash: PartHash


# --- the operator -------------------------------------------------------------------------------------------------


class Control(Plain, frozen=True):
    """An operator's order to the server.

    save: write the state now. kick: remove a worker, which cannot come back without a new start. drain: let a worker
    (or all) contribute and leave. sync: let a worker (or all) contribute at once. plan: change what `changes` states,
    at the next round. budget: end at so many tokens (0 = no end). pardon: hold nothing against a worker any more, which
    ends its quarantine. shutdown: drain all, save, stop."""

    kind: Literal["save", "kick", "pardon", "drain", "sync", "plan", "budget", "shutdown"]
    worker_id: WorkerId | None = None
    reason: Label = ""
    changes: Wishes = Wishes()
    tokens: Count = 0


class ControlAnswer(Plain, frozen=True):
    """What was done, in words."""

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
