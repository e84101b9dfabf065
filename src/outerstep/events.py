"""What happens in a run, one type per kind of event, for people and programs to look at.

    def notice(event: Event) -> None:
        if isinstance(event, WorkerDied):
            page(f"{event.worker} has been silent for {event.silent_s:.0f} s")

    DiLoCoServer(…, event_sink=notice)          # or DiLoCoWorker(…, event_sink=notice)

Servers, peers and workers tell an `EventSink` what happens to them: any callable that takes an event. Those in observe/
write a file, or remember the newest events. `kind` and `facts` are the line of an event in the event log
(docs/reference/status-and-events.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, Protocol

from .printable import printable
from .types import Agreement, Participant, Watched

DONE = ("", "done", "deregistered")  # why a worker leaves when nothing is wrong


@dataclass(frozen=True)
class Event:
    """Something an operator would want to know. `kind` names it in the log."""

    kind: ClassVar[str]

    @property
    def facts(self) -> dict[str, Any]:
        """By name. One that may be unknown (its default is "") is left out then."""
        held = {each.name: (getattr(self, each.name), each.default) for each in fields(self)}
        return {name: value for name, (value, default) in held.items() if not value == default == ""}

    def __str__(self) -> str:
        """For people, on one line."""
        return printable(" ".join([self.kind, *(f"{name}={value}" for name, value in self.facts.items())]))


def known(watched: Watched) -> dict[str, float]:
    """The metrics of a round that are known, by name, to six digits, for display."""
    found = {name: getattr(watched, name) for name in watched.__struct_fields__}
    return {name: float(f"{value:.6g}") for name, value in found.items() if value is not None}


class EventSink(Protocol):
    """Takes events, from any thread, sometimes with a lock of the sender's held: it returns soon, and does not wait for
    the sender. What it raises is logged, and stops nobody."""

    def __call__(self, event: Event, /) -> object: ...


# --- members ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerJoined(Event):
    kind = "join"
    worker: str
    host: str
    incarnation: int


@dataclass(frozen=True)
class WorkerLeft(Event):
    kind = "leave"
    worker: str
    reason: str


@dataclass(frozen=True)
class WorkerDied(Event):
    kind = "death"
    worker: str
    silent_s: float


@dataclass(frozen=True)
class DataLeased(Event):
    """A worker was the first to ask for this dataset: from now on the run leases it. With these facts an event log says
    by itself which samples its units are."""

    kind = "data_leased"
    dataset: str
    worker: str
    samples: int
    unit_samples: int
    epochs: int
    seed: int
    shuffle: bool


@dataclass(frozen=True)
class UnitsDone(Event):
    """Leased units of data are in the model: version `version` holds the last of their steps. `places`: ranges."""

    kind = "data"
    dataset: str
    worker: str
    version: int
    places: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class UnitsRepeated(Event):
    """A first part of these units was in the model, and nobody went on with it: version `version` holds what this
    worker has trained of them, from their beginning or from an earlier sample. `places`: ranges."""

    kind = "data_repeated"
    dataset: str
    worker: str
    version: int
    places: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class UnitsReturned(Event):
    """What a worker that is gone had leased: to be leased `again`, or lost."""

    kind = "data_returned"
    dataset: str
    worker: str
    places: tuple[tuple[int, int], ...]
    again: bool


@dataclass(frozen=True)
class UnitsUnseen(Event):
    """A peer was not there when these units were decided to be done: before it came, or while it was away. The event
    logs of others say by whom. `places`: ranges."""

    kind = "data_unseen"
    dataset: str
    places: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class DataForgotten(Event):
    """An operator let the run forget what a dataset is. `owner`: who was the first to ask for it; `done`: units."""

    kind = "data_forgotten"
    dataset: str
    owner: str
    done: int


@dataclass(frozen=True)
class PeerExpelled(Event):
    """It is proven to have lied."""

    kind = "expelled"
    worker: str


@dataclass(frozen=True)
class PeerStopped(Event):
    """Its last word. `cause`: "machine" (disk, memory, system) or "bug"; nothing that others say stops a peer."""

    kind = "peer_stopped"
    cause: str
    why: str


@dataclass(frozen=True)
class WorkerKicked(Event):
    kind = "kick"
    worker: str
    reason: str


@dataclass(frozen=True)
class OffenceNoted(Event):
    kind = "offence"
    worker: str
    code: str
    count: int


@dataclass(frozen=True)
class WorkerQuarantined(Event):
    kind = "quarantine"
    worker: str
    seconds: int
    reason: str


@dataclass(frozen=True)
class WorkerPardoned(Event):
    kind = "pardon"
    worker: str
    offences: int
    reason: str


@dataclass(frozen=True)
class WorkerReleased(Event):
    """`keys`: how many its id belonged to."""

    kind = "release"
    worker: str
    keys: int
    reason: str


@dataclass(frozen=True)
class GroupStateChanged(Event):
    """What a worker is doing, by its life's table (docs/concepts/lifecycle.md). `before`: "" = it is new."""

    kind = "state"
    worker: str
    state: str
    before: str = ""


@dataclass(frozen=True)
class GroupStateUnclear(Event):
    """Something happened to it that the table does not know: a bug. Its state is not shown until it joins again."""

    kind = "state_unclear"
    worker: str
    why: str


# --- contributions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UploadDropped(Event):
    kind = "upload_dropped"
    worker: str
    fragment: int


@dataclass(frozen=True)
class ContributionLeftOut(Event):
    """`why`, or its norm and steps and how many times as large as usual it is."""

    kind = "left_out"
    worker: str
    fragment: int
    version: int
    found: Mapping[str, Any]

    @property
    def facts(self) -> dict[str, Any]:
        return {"worker": self.worker, "fragment": self.fragment, "version": self.version, **self.found}


@dataclass(frozen=True)
class WorkerCountedOut(Event):
    """It was refused too often in this round, which does not wait for it any more."""

    kind = "counted_out"
    worker: str
    fragment: int
    version: int
    why: str


@dataclass(frozen=True)
class ClaimBounded(Event):
    """A worker claims more tokens than it can have seen. What does not count now is held for its next contributions."""

    kind = "claim_bounded"
    worker: str
    claimed: int
    counted: int


@dataclass(frozen=True)
class NothingLearned(Event):
    """Zeros: the worker has trained, and the last pseudo-gradient of every fragment is zero. Said once, until one is
    not. `steps`: in the last of them."""

    kind = "zeros"
    worker: str
    steps: int
    why: str = field(default="is its optimizer the one that its model trains with?", init=False)


@dataclass(frozen=True)
class ContributionsNotChosen(Event):
    kind = "not_chosen"
    fragment: int
    version: int
    workers: list[str]
    aggregation: str


@dataclass(frozen=True)
class ScreenForgotten(Event):
    kind = "screen_forgotten"
    fragment: int
    why: str


# --- refusals ---------------------------------------------------------------------------------------------------------


class Refusal(Event):
    """Strangers can cause these, and many of them: a sink may have to count instead of keeping each."""

    kind = "refused"


@dataclass(frozen=True)
class ContributionRefused(Refusal):
    """Its content cannot be used."""

    worker: str
    fragment: int
    reason: str


@dataclass(frozen=True)
class MessageRefused(Refusal):
    """By the service: what a worker asks for cannot be. `token`: the name of the one that was shown."""

    request: str
    worker: str | None
    code: str
    why: str
    token: str = ""
    address: str = ""


@dataclass(frozen=True)
class RequestRefused(Refusal):
    """At the port: no valid token, no such path, no message. `token`: the name of the one that was shown, if it is
    valid. `worker`: for whom the request speaks, if it came to that."""

    code: str
    peer: str
    path: str
    request_id: str
    why: str
    token: str = ""
    worker: str = ""


@dataclass(frozen=True)
class RefusalsSuppressed(Refusal):
    """So many more, within a minute."""

    code: str = field(default="suppressed", init=False)
    count: int = field(kw_only=True)


# --- rounds and the run -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServerStarted(Event):
    kind = "server"
    run_id: str
    round: int
    resumed: bool


@dataclass(frozen=True)
class RunStarted(Event):
    kind = "start"
    workers: list[str]


@dataclass(frozen=True)
class TooFewTrained(Event):
    kind = "too_few"
    fragment: int
    version: int
    trained: int
    needed: int
    aggregation: str


@dataclass(frozen=True)
class RoundSummary:
    """What a round that closed was like. `losses`: what its contributors last reported, in the order of the agreement.
    `waited_s`: from its first contribution to its last, which is how long the first one waited. `size_bytes`: of its
    contributions. `tokens`: in the model now; `share`: how much of the token budget that is, and `seconds_left` until
    it is spent; None = there is none, or no rate yet."""

    losses: tuple[float | None, ...] = ()
    waited_s: float = 0.0
    size_bytes: int = 0
    tokens: int = 0
    share: float | None = None
    seconds_left: float | None = None

    @property
    def loss(self) -> float | None:
        """The mean of those that are known."""
        return mean_loss(self.losses)

    @property
    def facts(self) -> dict[str, Any]:
        said = {
            "loss": _short(self.loss),
            "losses": [_short(loss) for loss in self.losses],
            "waited_s": round(self.waited_s, 3),
            "bytes": self.size_bytes,
        }
        if self.tokens:
            said["tokens"] = self.tokens
        if self.share is not None:
            said["share"] = _short(self.share)
        if self.seconds_left is not None:
            said["seconds_left"] = round(self.seconds_left, 1)
        return said


def mean_loss(losses: Iterable[float | None]) -> float | None:
    """Of those that are known; None = none is, or they are too large to be added up."""
    found = [loss for loss in losses if loss is not None]
    mean = math.fsum(loss / len(found) for loss in found) if found else math.nan
    return mean if math.isfinite(mean) else None


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


@dataclass(frozen=True)
class VersionPublished(Event):
    """`summary` None: no round made this version (it came from a layer above), or its server was restarted since."""

    kind = "round"
    agreement: Agreement
    summary: RoundSummary | None = None

    @property
    def facts(self) -> dict[str, Any]:
        taken, watched = self.agreement.participants, self.agreement.watched
        norms = {} if watched is None else {"norms": [float(f"{p.norm or 0.0:.6g}") for p in taken], **known(watched)}
        return {
            "fragment": self.agreement.fragment,
            "version": self.agreement.version,
            "hash": self.agreement.anchor_hash,
            "workers": [p.worker_id for p in taken],
            "sequences": [p.sequence for p in taken],
            "staleness": [p.staleness for p in taken],
            "weights": [float(f"{p.weight:.6g}") for p in taken],
            **norms,
            **(self.summary.facts if self.summary is not None else {}),
        }


@dataclass(frozen=True)
class RoundDecided(Event):
    """By peers without a server: whose contributions it is made of."""

    kind = "round"
    fragment: int
    version: int
    workers: list[str]


@dataclass(frozen=True)
class PlanChanged(Event):
    kind = "plan"
    revision: int
    stated: Mapping[str, Any]

    @property
    def facts(self) -> dict[str, Any]:
        return {"revision": self.revision, **self.stated}


@dataclass(frozen=True)
class PlanDecided(Event):
    """The controller has decided: `changes` says from what to what ({} = nothing changes, and `reason` says why not);
    it holds from round `from_round` on. `utilization`: what it expects, as a share of the time; None = not known."""

    kind = "plan_decided"
    layer: str
    revision: int
    from_round: int
    cause: str
    reason: str
    changes: Mapping[str, str]
    utilization: float | None = None


@dataclass(frozen=True)
class BudgetSpent(Event):
    kind = "budget_spent"
    tokens: int
    limit: int | None


@dataclass(frozen=True)
class WorkersOrdered(Event):
    workers: list[str]
    reason: str


@dataclass(frozen=True)
class DrainOrdered(WorkersOrdered):
    kind = "drain"


@dataclass(frozen=True)
class DrainWithdrawn(WorkersOrdered):
    """Before these workers had heard of it."""

    kind = "drain_withdrawn"


@dataclass(frozen=True)
class SyncOrdered(WorkersOrdered):
    kind = "sync"


@dataclass(frozen=True)
class LeaderOrdered(Event):
    """A cluster is to be led by this member of it."""

    kind = "lead"
    cluster: str
    leader: str
    reason: str


@dataclass(frozen=True)
class ControlReceived(Event):
    """From an operator, with the token of this name, from there. (What is refused is a Refusal, too.)"""

    kind = "control"
    command: str
    worker: str | None
    reason: str
    token: str = ""
    address: str = ""


@dataclass(frozen=True)
class RunEnded(Event):
    """All workers have left, the last one for this reason; more may come. `loss`: the mean of those that they last
    reported. `model`: where it is ("" = nothing is kept on disk)."""

    kind = "ended"
    round: int
    loss: float | None
    reason: str
    model: str = ""

    @property
    def said(self) -> str:
        """For people, on one line."""
        how = "finished" if self.reason in DONE else f"all workers have left (the last one: {self.reason})"
        loss = "" if self.loss is None else f", last reported loss {self.loss:.4g}"
        return printable(f"{how} after round {self.round}{loss}")


@dataclass(frozen=True)
class ServerStopped(Event):
    kind = "stop"
    round: int


# --- a worker's own ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerStarted(Event):
    """It has joined. `place`: the address, or the name of the topology. `versions`: of the anchors it begins with."""

    kind = "worker"
    worker: str
    place: str
    step: int
    versions: list[int]


@dataclass(frozen=True)
class WeightsChanged(Event):
    """Outside `optimizer.step()`, by step `step` of this worker: it continues from the agreed weights, without those
    of its steps that were not sent."""

    kind = "outside_change"
    worker: str
    step: int
    steps_dropped: int


@dataclass(frozen=True)
class ExchangeDeferred(Event):
    """Nobody answers; training goes on. `exchanges`: so many are deferred now."""

    kind = "deferred"
    worker: str
    exchanges: int


Adoption = Literal["adopted", "rebased", "mixed", "carried", "discarded", "reloaded"]


@dataclass(frozen=True)
class RoundReport(Event):
    """An agreement on a fragment has become this worker's anchor.

    `adoption`: what became of the local weights. They are the agreed ones ("adopted"), mixed with those ("mixed"), or
    keep the steps since the contribution was sent ("carried"). The round closed without this worker, whose steps go
    into the next ("rebased") or were too old for that ("discarded"); nobody had any use for them ("reloaded").

    `counted`: this worker's contribution is in the agreement, or in a round still open. `waited_s`: how long training
    stood still for it. `step`: the worker's optimizer steps so far. `metrics`: docs/concepts/what-to-watch.md.
    `from_above`: the recent versions, up to this one, that a layer above made."""

    kind = "report"
    worker: str
    step: int
    fragment: int
    version: int
    adoption: Adoption
    counted: bool
    participants: tuple[Participant, ...]
    steps_sent: int
    steps_discarded: int
    bytes_sent: int
    bytes_received: int
    waited_s: float
    metrics: Mapping[str, float | None]
    from_above: tuple[int, ...] = ()

    @property
    def facts(self) -> dict[str, Any]:
        return {**super().facts, "participants": [p.worker_id for p in self.participants]}


# --- the disk ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StateSaved(Event):
    kind = "save"
    reason: str
    round: int
    path: str


@dataclass(frozen=True)
class SaveFailed(Event):
    kind = "save_failed"
    reason: str
    why: str


@dataclass(frozen=True)
class DiskFails(Event):
    """Rounds wait until it works again."""

    kind = "disk_fails"
    why: str


@dataclass(frozen=True)
class DiskWorks(Event):
    kind = "disk_works"


@dataclass(frozen=True)
class DeviceLeft(Event):
    """The server was to work on this device, and works in host memory instead."""

    kind = "device_left"
    device: str
    why: str
