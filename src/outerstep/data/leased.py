"""A worker's leased data: one thread asks for leases ahead of training, the loader draws, the optimizer's steps count.

    sampler ──samples──▶ DataLoader ──batches──▶ the loop ──optimizer.step()──▶ trained

What is decided is decided in coordination/worker/units.py; here are the lock, the thread and the waiting.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from logging import INFO, WARNING
from typing import Any, Protocol, runtime_checkable

import msgspec

from ..coordination.worker.machine import Units, WorkerState
from ..coordination.worker.units import LeasedWork, LeaseRequest
from ..errors import Busy, ConfigError, OuterstepError, Refused, ServerError, Superseded, UnknownWorker, WorkerError
from ..events import Event
from ..printable import printable
from ..topology.group.ranks import Ranks
from ..topology.protocol import Lessor, SharesData
from ..types import Dataset, LeaseAnswer, LeaseStatement, Trained
from .order import epoch_of, part_of, samples_of

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
ADMITTED_S = 0.05
RETRY_S = 2.0
UNHEARD_STEPS = 4
SAY_SO_S = 5.0  # a loop that waits longer than this for data is told why
PASSING = (Busy, ServerError, Superseded, UnknownWorker)  # the next request may be answered


@runtime_checkable
class Leased(Protocol):
    """Something that trains leased data: a sampler (sampler.py)."""

    @property
    def spec(self) -> Dataset: ...

    def belongs_to(self, data: LeasedData | None) -> None: ...


class _DrawnByRank0(msgspec.Struct, frozen=True):
    """What rank 0 drew: a place, and how many samples of a rank's part to leave out."""

    drawn: tuple[int, int] | None


def agreed_part(
    part: tuple[int, int] | None, ranks: Ranks | None, *, has_own_samples: bool
) -> tuple[tuple[int, int], bool]:
    """(i, n), and whether this process counts the samples: of those that train the same part, the lowest rank does.
    `has_own_samples`: as far as can be seen, each process of the group trains samples of its own."""
    if ranks is None:
        if part not in (None, (0, 1)):
            raise ConfigError(f"data_part is for the processes of a job, and this worker is one; leave out {part}")
        return (0, 1), True

    def own() -> tuple[int, int]:
        if part is None and not has_own_samples:
            raise ConfigError(
                "leased data in a job that is cut by other means than FSDP2 (tensor-parallel, pipeline) needs "
                "data_part=(i, n): this process trains part i of n of each unit. Processes that train the same samples "
                "give the same i: (dp_mesh.get_local_rank(), dp_mesh.size()), or (0, 1) if all do"
            )
        return part or (ranks.rank, ranks.size)

    told = ranks.gather(own, tuple[int, int])
    count, parts = told[0][1], [index for index, _ in told]
    if any(other != count for _, other in told) or set(parts) != set(range(count)):
        raise ConfigError(
            f"data_part must have one n in all processes, and each i from 0 to n - 1 in one at least, got {told}; give "
            "each process its rank in the data-parallel mesh and the size of that"
        )
    return told[ranks.rank], parts.index(parts[ranks.rank]) == ranks.rank


class LeasedData:
    """Of one worker. `datasets`: what its samplers are of; `ranks`: the processes of its group. Those train in step, so
    they draw at the same points: rank 0 leases and draws, the others hear of it and train their parts of each unit.
    `part`: (i, n), this process trains part i of n of each unit; None = each of the group has a part of its own, which
    must be so as far as can be seen (`has_own_samples`)."""

    def __init__(
        self,
        datasets: Sequence[Dataset],
        ranks: Ranks | None = None,
        tell: Callable[[Event], None] = lambda event: None,
        part: tuple[int, int] | None = None,
        *,
        has_own_samples: bool = True,
    ) -> None:
        """`tell`: what members without a server have decided."""
        self.datasets, self._tell = tuple(datasets), tell
        self._ranks = ranks
        self._part, self._counts = agreed_part(part, ranks, has_own_samples=has_own_samples)
        self._members: SharesData | None = None  # those who hold the lease table together with this worker
        self._work = LeasedWork(datasets, self._part[1])
        self._changed = threading.Condition()
        self._lessor: Lessor | None = None
        self._failure: OuterstepError | None = None
        self._waiting_for: dict[str, str] = {}  # by dataset, what the last request was granted nothing for
        self._ended = self._is_shared = False
        self._samples = 0  # delivered since the last step
        self._heard_of, self._unheard = False, 0  # was anything delivered? And steps without, though it was drawn
        self._share: Callable[[int], int | None] = lambda ahead: None
        self._loops = {dataset.name: 0 for dataset in datasets}

    @property
    def parts(self) -> int:
        """Into how many each unit is divided: so many processes train samples of their own."""
        return self._part[1]

    # --- life -----------------------------------------------------------------------------------------------------

    def join(self, topology: object) -> None:
        """Before the worker does: where there is no server, those who meet lease together."""
        if isinstance(topology, SharesData) and (self._ranks is None or self._ranks.rank == 0):
            self._members = topology
            if self._ranks is None:
                self._part = topology.data_part
                self._work.ranks = self._part[1]
            topology.share_data(self)

    def say(
        self, answer: Callable[[LeaseRequest], LeaseAnswer], sync_every: int, turn: int
    ) -> tuple[LeaseStatement, ...]:
        """(`DataVoice`.)"""
        with self._changed:
            for name in self._work.holdings:
                self._hear(name, answer)
            return tuple(self._work.statement(name, sync_every, turn) for name in self._work.holdings)

    def decided(self, said: Sequence[LeaseStatement], events: Sequence[Event]) -> None:
        """(`DataVoice`.)"""
        with self._changed:
            self._work.was_decided(said)
        for event in events:
            self._tell(event)

    def _hear(self, name: str, answer: Callable[[LeaseRequest], LeaseAnswer]) -> None:
        """(What was given up is not heard by this: it is in the next statement.)"""
        request = replace(self._work.request(name), dropped=())
        self._work.answered(request, answer(request))

    def expect(self, name: str, step_samples: int) -> None:
        """So many samples are in a step of this process."""
        self._work.holdings[name].step_samples = step_samples

    def start(
        self, lessor: object, state: WorkerState, share: Callable[[int], int | None] = lambda ahead: None
    ) -> None:
        """`share`: as the method of this name."""
        if self._members is not None or (self._ranks is not None and isinstance(lessor, SharesData)):
            self._share, self._is_shared = share, True
            self.exchanged(state)
            return
        if not isinstance(lessor, Lessor):
            raise ConfigError(
                f"{type(lessor).__name__} leases no data; leased data needs a run whose members or server lease it"
            )
        self._lessor, self._share = lessor, share
        self.exchanged(state)
        if self._ranks is not None and self._ranks.rank != 0:
            return
        threading.Thread(target=self._keep_ahead, name="outerstep-leases", daemon=True).start()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def progress(self) -> list[dict[str, Any]]:
        """Of each dataset, as far as this worker knows: where a server leases, only the server does."""
        return [] if self._members is None else self._members.data_progress()

    # --- from the loader ------------------------------------------------------------------------------------------

    def samples(self, name: str) -> Iterator[int]:
        """Of one epoch, or what is left of it for this worker. (What a loop before has drawn and not delivered, because
        it was left early, comes first.)"""
        for samples, skipped in self._units(name):
            yield from samples[skipped:]

    def shards(self, name: str) -> Iterator[int]:
        """As `samples`, where a unit is one shard. Who reads it says how many samples it has."""
        for shards, _ in self._units(name, measured=False):
            yield from shards

    def measured(self, name: str, samples: int) -> int:
        """The next shard was read. How many of its samples to leave out?"""
        with self._changed:
            return self._work.measure(name, samples)

    def _units(self, name: str, *, measured: bool = True) -> Iterator[tuple[list[int], int]]:
        with self._changed:
            self._loops[name] += 1
            loop = self._loops[name]
            self._work.draw_again(name)
        dataset, epoch = self._work.holdings[name].dataset, None
        while loop == self._loops[name]:
            drawn = self._draw(name, epoch, measured=measured)
            if drawn is None:
                return
            place, skipped = drawn
            epoch = epoch_of(dataset, place)
            samples = samples_of(dataset, place)
            yield part_of(samples, *self._part), skipped

    def _draw(self, name: str, epoch: int | None, *, measured: bool) -> tuple[int, int] | None:
        if self._ranks is None:
            return self._draw_alone(name, epoch, measured=measured)
        if not measured:
            raise ConfigError(
                f"{name!r}: the ranks of a group cannot share a shard of unknown size; lease samples, or let each rank "
                "be a worker of its own (group='off')"
            )
        told = self._ranks.tell(lambda: _DrawnByRank0(self._draw_alone(name, epoch, measured=True)), _DrawnByRank0)
        drawn = told.drawn
        if drawn is not None and self._ranks.rank != 0:
            with self._changed:
                self._work.follow(name, *drawn)
        return drawn

    def _draw_alone(self, name: str, epoch: int | None, *, measured: bool) -> tuple[int, int] | None:
        """Waits for a lease, if it must."""
        holding, began_at, said = self._work.holdings[name], time.monotonic(), False
        if self._members is not None:
            return self._draw_shared(self._members, name, epoch, measured=measured)
        with self._changed:
            if self._lessor is None:
                raise WorkerError("leased data belongs to a worker: give it to attach(…, data=…), and start that first")
            while holding.is_waiting and not self._ended:
                if self._failure is not None:
                    raise self._failure
                self._changed.notify_all()
                self._changed.wait(LOOK_EVERY_S)
                if not said and time.monotonic() - began_at > SAY_SO_S:
                    said, why = True, self._waiting_for.get(name, "")
                    log.info("waiting for %s: no unit of %r is leased to this worker", printable(why) or "data", name)
            return self._work.draw(name, epoch, measured=measured)

    def _draw_shared(
        self, members: SharesData, name: str, epoch: int | None, *, measured: bool
    ) -> tuple[int, int] | None:
        """It is through when it has no more, unless more can be waited for."""
        holding, began_at, said = self._work.holdings[name], time.monotonic(), False
        was_admitted = True
        while self._is_shared and not self._ended and not members.is_admitted():
            was_admitted = False
            time.sleep(ADMITTED_S)
        while True:
            with self._changed:
                if not self._is_shared:
                    raise WorkerError(
                        "leased data belongs to a worker: give it to attach(…, data=…), and start that first"
                    )
                if (not holding.queue or not was_admitted) and not self._ended:
                    self._hear(name, members.leased)
                if not holding.is_waiting:
                    return self._work.draw(name, epoch, measured=measured)
            waits_for = members.wait_for_data() if not self._ended else None
            if waits_for is None:
                log.info("%r: this worker has trained its part before the next exchange", name)
                return None
            if not said and time.monotonic() - began_at > SAY_SO_S:
                said = True
                log.info("waiting for %s: no unit of %r is leased to these members", printable(waits_for), name)

    def delivered(self, name: str, samples: int, *, trained: bool = True) -> None:
        """So many more came out of the loader, and are in the next optimizer step. Not `trained`: they are passed
        over."""
        with self._changed:
            new = self._work.deliver(name, samples)
            self._samples += new if trained else 0

    def share(self, ahead: int) -> int | None:
        """How many samples this process is to train in a step: so many lie between it and the one that comes next.
        None: the run has no global batch."""
        return self._share(ahead)

    # --- from the worker, in the training thread ------------------------------------------------------------------

    def stepped(self) -> tuple[int, Units]:
        """The optimizer has stepped: how many samples came out of the loaders since the step before, and the numbers of
        the units that are trained now."""
        with self._changed:
            samples, self._samples = self._samples, 0
            self._heard_of = self._heard_of or samples > 0
            self._unheard += not self._heard_of and self._work.draws
            if self._unheard == UNHEARD_STEPS:
                raise ConfigError(
                    f"{UNHEARD_STEPS} optimizer steps, and no loader said which leased samples came out of it: use a "
                    "LeasedLoader as it is (not prepared or wrapped), or call sampler.delivered(samples) for each batch"
                )
            finished = self._work.stepped(time.monotonic())
            if finished:
                self._changed.notify_all()
            return samples if self._counts else 0, finished

    def describe(self, units: Units) -> tuple[Trained, ...]:
        with self._changed:
            named = self._work.describe(units)
        if self._members is not None:  # who hold the table together count whole units
            return tuple(Trained(dataset=one.dataset, places=one.places) for one in named if one.places)
        return named

    def exchanged(self, state: WorkerState) -> None:
        with self._changed:
            self._work.exchanged(state)
            if self._members is not None:
                for name in self._work.holdings:
                    self._hear(name, self._members.leased)

    def state(self) -> dict[str, Any]:
        with self._changed:
            return self._work.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Before the start."""
        self._work.load_state(state)

    def resumed(self, *, goes_back: bool) -> None:
        """The worker has joined, from a state that is older than what it had sent, or from none such. (Also before the
        start.)"""
        self._work.resumed(goes_back=goes_back)

    # --- the thread that asks -------------------------------------------------------------------------------------

    def _keep_ahead(self) -> None:
        not_before: dict[str, float] = {}
        while True:
            with self._changed:
                if self._ended:
                    return
                now = time.monotonic()
                due = [
                    self._work.request(name)
                    for name, holding in self._work.holdings.items()
                    if holding.is_due and not_before.get(name, 0.0) <= now
                ]
                if not due:
                    self._changed.wait(LOOK_EVERY_S)
            for request in due:
                not_before[request.dataset.name] = time.monotonic() + self._ask(request)

    def _ask(self, request: LeaseRequest) -> float:
        """Returns for how long the next may wait."""
        assert self._lessor is not None
        try:
            answer = self._lessor.lease(request)
        except OuterstepError as error:
            is_final = isinstance(error, Refused) and not isinstance(error, PASSING)
            with self._changed:
                if not self._ended:
                    log.log(WARNING if is_final else INFO, "no lease of %r: %s", request.dataset.name, error)
                    self._failure = error if is_final else None
                self._changed.notify_all()
            return max(getattr(error, "retry_after_s", 0.0), RETRY_S)
        with self._changed:
            self._failure, self._waiting_for[request.dataset.name] = None, answer.waiting_for
            self._work.answered(request, answer)
            self._changed.notify_all()
        return RETRY_S if answer.state == "over" else answer.retry_after_s


__all__ = ["Leased", "LeasedData"]
