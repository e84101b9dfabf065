"""What a run of some size takes on each machine: memory, disk, journal and traffic. Plain arithmetic, as cost.py.

n parameters, k workers, P fragments; c and d are the bytes per parameter of what goes up and down; everything is fp32
on the server, whatever the workers' models are. Where each part comes from:

    server memory   process + 4n θ + 4n T (coded downlink) + 4n momentum + 4n/P sum of the open round
                    + updates for late workers + a version for slow readers + pool for contributions
    server disk     (kept states + 1) · state + journal + spool
    worker memory   4n anchor + what is under way, on top of what training itself takes

Tests compare the constants with the code that they describe, and the sum with the peak of a real server
(docs/reference/capacity.md says how near it is).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from ..cost import bytes_per_value
from ..server.journal_length import LEAST_JOURNAL_BYTES, MODELS_IN_JOURNAL

FP32_BYTES: Final = 4.0
PROCESS_BYTES: Final = 340 << 20  # VmHWM of a server without a model: Python, torch and its libraries, measured
RING_SHARE: Final = 0.5  # of the whole fragment: the most that updates for late workers take (server/publish.py)
OLDER_HELD: Final = 1  # versions for slow readers beside the newest (server/publish.py)
OLDER_HELD_IF_EXACT: Final = 2
LEAST_POOL_BYTES: Final = 128 << 20  # config/server.py
CONTRIBUTIONS_IN_POOL: Final = 2  # the others wait in the spool file
KEPT_STATES: Final = 3  # ServerConfig.keep_saves
MOST_SPOOL_BYTES: Final = 16 << 30  # ServerConfig.spool_bytes
EXACT: Final = "fp32"
WEIGHT_BYTES: Final = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0}
ADAM_BYTES: Final = 8.0  # two fp32 moments


@dataclass(frozen=True)
class Sizing:
    """What decides about memory and disk. `workers`: that contribute to this server, be they whole clusters. `weights`:
    the dtype of the workers' model. `carries`: steps taken while a fragment travels are kept."""

    parameters: float
    workers: int
    codec: str = "bf16"
    down_codec: str = "bf16"
    num_fragments: int = 1
    delay: int = 0
    weights: str = "bf16"
    carries: bool = False

    @property
    def up_bytes(self) -> float:
        """One contribution of the whole model: c·n."""
        return self.parameters * bytes_per_value(self.codec)

    @property
    def down_bytes(self) -> float:
        """One update of the whole model: d·n. An exact downlink carries θ itself."""
        return self.parameters * bytes_per_value(self.down_codec)

    @property
    def model_bytes(self) -> float:
        """4n: as the server holds it."""
        return FP32_BYTES * self.parameters

    @property
    def is_exact(self) -> bool:
        return self.down_codec.split(",")[0] == EXACT


class _SumOfParts:
    """A sum of named parts, in bytes."""

    @property
    def total_bytes(self) -> float:
        return float(sum(self.by_part.values()))

    @property
    def by_part(self) -> dict[str, float]:
        return {each.name.removesuffix("_bytes"): getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]


# --- the server -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServerMemory(_SumOfParts):
    """At its peak, with everything counted (VmHWM)."""

    process_bytes: float
    weights_bytes: float  # θ
    target_bytes: float  # T
    momentum_bytes: float
    sum_bytes: float
    updates_bytes: float
    reader_bytes: float
    pool_bytes: float


def server_memory(run: Sizing, pool_bytes: float | None = None) -> ServerMemory:
    """It does not depend on k beyond the second worker: the pool has room for two contributions.

    θ, T and momentum    4n each; T is θ itself if the downlink is exact
    sum                  4n/P: fragments take turns, and one piece of memory is used again
    updates              as many as fit into half of the whole, one at least: max(1, ⌊2/d⌋)·d·n
    reader               4n/P for who is in the middle of fetching an older version; twice that if the downlink is exact
    pool                 min(max(2·c·n, 128 MiB), k·c·n)
    """
    whole, fragment = run.model_bytes, run.model_bytes / run.num_fragments
    fits = int(RING_SHARE * whole / run.down_bytes)
    room = max(CONTRIBUTIONS_IN_POOL * run.up_bytes, LEAST_POOL_BYTES) if pool_bytes is None else pool_bytes
    return ServerMemory(
        process_bytes=PROCESS_BYTES,
        weights_bytes=whole,
        target_bytes=0.0 if run.is_exact else whole,
        momentum_bytes=whole,
        sum_bytes=fragment,
        updates_bytes=0.0 if run.is_exact else max(fits, 1) * run.down_bytes,
        reader_bytes=(OLDER_HELD_IF_EXACT if run.is_exact else OLDER_HELD) * fragment,
        pool_bytes=min(room, run.workers * run.up_bytes),
    )


def journal_bytes_per_round(run: Sizing) -> float:
    """min(4n, k·c·n): the mean of the round, or the contributions as they came, whichever has fewer bytes
    (docs/adr/0041-the-smaller-of-two-records.md)."""
    return min(run.model_bytes, run.workers * run.up_bytes)


@dataclass(frozen=True)
class ServerDisk(_SumOfParts):
    """The most that there is at a time."""

    states_bytes: float
    journal_bytes: float
    spool_bytes: float


def state_bytes(run: Sizing) -> float:
    """One saved state: the model in the workers' dtype b, its fp32 values where that is another, T and momentum:
    b·n + (4n) + (4n) + 4n."""
    b = WEIGHT_BYTES[run.weights]
    values = FP32_BYTES if b < FP32_BYTES else 0.0
    target = 0.0 if run.is_exact else FP32_BYTES
    return run.parameters * (b + values + target + FP32_BYTES)


def server_disk(run: Sizing) -> ServerDisk:
    """states: those kept and the one that is being written.
    journal: a state is due after 4 · 4n bytes of records (64 MiB at least), and records are kept back to the state
             before the last: 2 · (max(4 · 4n, 64 MiB) + one record)
    spool:   contributions that find no room in memory: min(k·c·n − pool, 16 GiB); others wait to be sent."""
    record = journal_bytes_per_round(run)
    return ServerDisk(
        states_bytes=(KEPT_STATES + 1) * state_bytes(run),
        journal_bytes=2 * (max(MODELS_IN_JOURNAL * run.model_bytes, LEAST_JOURNAL_BYTES) + record),
        spool_bytes=min(run.workers * run.up_bytes - server_memory(run).pool_bytes, MOST_SPOOL_BYTES),
    )


@dataclass(frozen=True)
class Traffic:
    """Of one round, over the server's own access."""

    in_bytes: float
    out_bytes: float

    def bytes_per_s(self, round_s: float) -> float:
        """The busier direction, on average."""
        return max(self.in_bytes, self.out_bytes) / round_s


def server_traffic(run: Sizing) -> Traffic:
    """k·c·n in, k·d·n out."""
    return Traffic(run.workers * run.up_bytes, run.workers * run.down_bytes)


# --- a worker ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerMemory(_SumOfParts):
    """`training_bytes` is the script's own: weights, gradients, AdamW. The rest comes with outerstep."""

    training_bytes: float
    anchor_bytes: float
    sent_bytes: float
    arriving_bytes: float
    kept_steps_bytes: float
    feedback_bytes: float

    @property
    def added_bytes(self) -> float:
        return self.total_bytes - self.training_bytes


def worker_memory(run: Sizing) -> WorkerMemory:
    """training    2b·n + 8n: weights and gradients of b bytes, two fp32 moments; activations come on top
    anchor         4n, on the device if it fits there, else in the host's memory
    sent           c·n/P of every fragment under way: at most one, unless the delay is longer than the way to the next
    arriving       d·n/P; at joining the whole, 4n, before anything else is there
    kept steps     4n/P, with carry: the weights as they were sent
    feedback       4n, if the codec has error feedback"""
    fragments, b = run.num_fragments, WEIGHT_BYTES[run.weights]
    return WorkerMemory(
        training_bytes=run.parameters * (2 * b + ADAM_BYTES),
        anchor_bytes=run.model_bytes,
        sent_bytes=run.up_bytes / fragments,
        arriving_bytes=run.down_bytes / fragments,
        kept_steps_bytes=run.model_bytes / fragments if run.carries else 0.0,
        feedback_bytes=run.model_bytes if "+feedback" in run.codec or run.codec.startswith("sparse") else 0.0,
    )


def worker_disk_bytes(run: Sizing) -> float:
    """Of a saved worker (`state_dict`, into the script's own checkpoint) beside weights and optimizer: anchor and, with
    error feedback, what was left out: 4n (+ 4n)."""
    return run.model_bytes + worker_memory(run).feedback_bytes


# --- all of it --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServerNeeds:
    """`journal_bytes`: of one round."""

    memory: ServerMemory
    disk: ServerDisk
    traffic: Traffic
    journal_bytes: float


@dataclass(frozen=True)
class WorkerNeeds:
    memory: WorkerMemory
    disk_bytes: float


def server_needs(run: Sizing) -> ServerNeeds:
    return ServerNeeds(server_memory(run), server_disk(run), server_traffic(run), journal_bytes_per_round(run))


def worker_needs(run: Sizing) -> WorkerNeeds:
    return WorkerNeeds(worker_memory(run), worker_disk_bytes(run))


# --- staleness --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Staleness:
    """`news_steps`: the oldest that a worker's knowledge of the others gets, in its own steps: H + τ, just before it
    adopts. `adopted_late_steps`: τ, taken on weights without the agreement. `versions`: between the anchor of a
    contribution and the version that it goes into; 0 if rounds wait for everybody."""

    news_steps: int
    adopted_late_steps: int
    versions: float


def staleness(sync_every: int, delay: int, workers: int, *, asynchronous: bool = False) -> Staleness:
    """Asynchronous, equal speeds: while a worker takes its H steps each of the others publishes once, so k − 1
    versions."""
    return Staleness(sync_every + delay, delay, float(workers - 1) if asynchronous else 0.0)
