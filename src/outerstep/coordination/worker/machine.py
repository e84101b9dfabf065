"""The worker's half of a round, without I/O: when a fragment is sent, what is waited for, what becomes of it.

    do(machine.stepped())                       # one optimizer step was taken
    while machine.waiting:
        do(machine.looked({fragment: how its exchange stands, for each of machine.in_sight}))

`do` carries effects out in order (effects.py). After Finish it reports the result to `outcome`, after a move whether
the anchor is the agreed one to `confirmed`, and carries out what those return before it goes on. What goes wrong on the
way ends the wait: `interrupted`. worker/sync.py does it with tensors, simulate/carried.py with sets of steps.

    stepped ──▶ due ──▶ Send ──▶ waiting ──▶ Finish ──▶ outcome ──▶ Adopt, Carry, Mix     our steps are in it
                 │               │  ▲  │                    ├─────▶ Rebase                it came about without us
                 │ with a delay  │  │  └─ nobody answers:   ├─────▶ Adopt (discarded)     our steps are too old for it
                 ▼               │  │     deferred          └─────▶ Adopt, Reload         nobody has any use for them
              training ◀─────────┘  └──── missed: tried again

With a delay τ a fragment is sent after its step and its agreement adopted τ steps later, several at a time if they
overlap; with τ = 0 the worker waits where it is. One code path. An event that asks for a move has changed the state for
it: state and weights change together, or not at all. Otherwise steps that were sent would be sent again.

Weights that somebody else has moved (a checkpoint that was loaded) are not this worker's learning. With the event that
finds them so (`changed`) the worker starts over from its anchor, before anything is sent. A rebase would keep the
foreign difference. What was sent before that stays sent.

The processes of a group (a torchrun job) each run this machine: every decision follows from the step counter and from
what they are told alike, never from a clock. So looks are counted, not timed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from ...errors import ExchangeFailed, Refused, RoundStuck, ServerError, ServerUnreachable, WorkerError
from ...ranges import Ranges
from ...schedule import due_by_step, due_fragment, send_step
from ...types import Plan, plan_of
from .effects import (
    Adopt,
    Carry,
    CatchUp,
    Depart,
    Effect,
    Finish,
    Keep,
    Mix,
    Move,
    Note,
    NoteKind,
    Prove,
    PutOff,
    Rebase,
    Recall,
    Reload,
    Reopen,
    Result,
    Resume,
    Send,
    Sight,
    StartOver,
)

LOOK_EVERY_S = 0.2  # how often a driver looks while it waits
LOOKS_IN_A_CIRCLE = 50  # after so many in vain, what waits for us may wait in a circle
TRIES = 2
EXIT_TRIES = 8
REPAIRS = 3
CHANGES = 5  # of the weights by somebody else, without a step of ours that counted in between


Units = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Work:
    """Training done, counted from the start of the worker. `units`: which of its leased units of data, by the numbers
    that it gave them (units.py), as ranges: a set, of which + and − are union and difference."""

    steps: int = 0
    samples: int = 0
    tokens: int = 0
    units: Units = ()

    def __add__(self, other: Work) -> Work:
        units = tuple(Ranges(self.units) | Ranges(other.units)) if self.units and other.units else ()
        return Work(
            self.steps + other.steps,
            self.samples + other.samples,
            self.tokens + other.tokens,
            units or self.units or other.units,
        )

    def __sub__(self, other: Work) -> Work:
        return Work(
            self.steps - other.steps,
            self.samples - other.samples,
            self.tokens - other.tokens,
            tuple(Ranges(self.units) - Ranges(other.units)) if self.units and other.units else self.units,
        )


@dataclass
class InFlight:
    """An exchange under way: what was done when it was sent, and the step at which its agreement is to be adopted.

    `kept`: there is a copy of what was sent. `deferred`: training went on without its agreement; it is settled when the
    fragment is due again. `overtaken`: the local weights were given up meanwhile; what was sent is in them no more, and
    `work` is what was done by then. `catches_up`: it brings no contribution, but what a restarted worker has missed."""

    work: Work
    land_at: int
    kept: bool = False
    deferred: bool = False
    overtaken: bool = False
    catches_up: bool = False


@dataclass
class Progress:
    """One fragment: the version we hold, how much of our work is in it, the version under our oldest unsent step, and
    the exchange under way. `late_in`: the round after that version in which our last contribution counts, with the
    data units `late_units`; 0 = none."""

    version: int
    counted: Work
    oldest_base: int
    in_flight: InFlight | None = None
    late_in: int = 0
    late_units: Units = ()


@dataclass
class Cycle:
    """Step `step` of a cycle of `sync_every`. `assigned`: this worker's own H, from its next cycle on; None = the
    plan's."""

    step: int
    sync_every: int
    assigned: int | None = None

    def steps_to_due(self, plan: Plan) -> int:
        """Until one after which a fragment is due. (The last one is, after the last step of the cycle.)"""
        return min(step for step in due_by_step(self.sync_every, len(plan.fragments)) if step > self.step) - self.step

    def advance(self, plan: Plan) -> int | None:
        """One step more, and after the last a new cycle. The fragment that is due now, if one is."""
        self.step += 1
        due = due_by_step(self.sync_every, len(plan.fragments)).get(self.step)
        if self.step >= self.sync_every:
            self.begin(plan)
        return due

    def begin(self, plan: Plan) -> None:
        self.step = 0
        self.sync_every = self.assigned or plan.sync_every


@dataclass
class Metrics:
    """Counters of the exchanges so far. The machine counts the first eight, its driver the others."""

    sync_count: int = 0  # exchanges that counted
    missed_rounds: int = 0  # rounds that closed without us
    steps_discarded: int = 0  # local steps that were too old, or had no round to go to
    reloads: int = 0  # contributions that the server had no use for: we went on from the agreed weights
    steps_overwritten: int = 0  # taken while an agreement was on its way, and replaced by it (delay without carry)
    offline_exchanges: int = 0  # exchanges that were deferred because the server did not answer
    anchor_repairs: int = 0  # anchors that were not the agreed ones, and were fetched again
    outside_changes: int = 0  # weights that moved outside optimizer.step(): we went on from the agreed weights
    sync_retries: int = 0
    reconnections: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds_waiting: float = 0.0
    last_sync_s: float = 0.0


@dataclass
class WorkerState:
    """What a worker must not forget: what it has done, how much of that is agreed on, what is under way. `dropped`:
    units of data that were trained, and whose steps were given up in some fragment; `lost`: whose steps were accepted,
    and the server has forgotten that round."""

    work: Work
    cycle: Cycle
    fragments: list[Progress]
    metrics: Metrics = field(default_factory=Metrics)
    dropped: Units = ()
    lost: Units = ()


@dataclass(frozen=True)
class Offline:
    """What to do when nobody answers: after `after_s` train on, and defer at most `exchanges` like that."""

    after_s: float = 30.0
    exchanges: int = 4


@dataclass
class _Wait:
    """Fragments that are waited for, with the tries left for each; and what comes `then`. `earlier`: of those, the ones
    that were in flight before and have not been looked at. `favours`: those that only others wait for: what was sent
    there is empty."""

    tries: dict[int, int]
    then: Callable[[], list[Effect]]
    may_defer: bool
    last: bool
    earlier: set[int] = field(default_factory=set)
    favours: set[int] = field(default_factory=set)
    looks: int = 0


class WorkerMachine:
    """`plan`: the run's, as this worker carries it out. `offline` may be replaced at any time. `has_left`: the last
    exchange is over."""

    def __init__(self, worker_id: str, plan: Plan, work: Work = Work(), offline: Offline = Offline()) -> None:  # noqa: B008 - frozen
        self._worker_id = worker_id
        self.plan = plan_of(plan, worker_id)
        self.offline = offline
        self.state = WorkerState(work, Cycle(0, self.plan.sync_every), [])
        self.has_left = False
        self._wait: _Wait | None = None
        self._landing: deque[Callable[[], list[Effect]]] = deque()  # each but the last ends in a move
        self._repairs = 0
        self._deferrals = 0  # since the server was last heard from
        self._keep_local = False
        self._changes = 0  # by somebody else, since steps of ours counted

    # --- what can be asked ----------------------------------------------------------------------------------------

    @property
    def waiting(self) -> tuple[int, ...]:
        """The fragments that are waited for."""
        return tuple(self._wait.tries) if self._wait is not None else ()

    @property
    def in_sight(self) -> tuple[int, ...]:
        """Those, and the others on whose exchanges a decision may depend."""
        others = (f for f, flight in self.in_flight.items() if not flight.deferred and f not in self.waiting)
        return (*self.waiting, *others)

    @property
    def in_flight(self) -> dict[int, InFlight]:
        flights = ((fragment, progress.in_flight) for fragment, progress in enumerate(self.state.fragments))
        return {fragment: flight for fragment, flight in flights if flight is not None}

    def unsent(self, fragment: int) -> Work:
        """What was done and is in no agreement that we hold."""
        return self.state.work - self.state.fragments[fragment].counted

    @property
    def exchanges_next(self) -> bool:
        """Will the next step send or adopt anything?"""
        cycle, step = self.state.cycle, self.state.work.steps + 1
        due = due_fragment(cycle.step + 1, cycle.sync_every, len(self.plan.fragments))
        return due is not None or any(not f.deferred and step >= f.land_at for f in self.in_flight.values())

    @property
    def quiet_steps(self) -> int:
        """So many steps can be taken from here of which none sends or adopts anything."""
        steps = self.state.work.steps
        lands = (flight.land_at - steps for flight in self.in_flight.values() if not flight.deferred)
        return max(min((self.state.cycle.steps_to_due(self.plan), *lands)) - 1, 0)

    def _open_fragments(self) -> list[int]:
        """Those with steps that no agreement holds, or with an exchange still open."""
        return [i for i, p in enumerate(self.state.fragments) if p.in_flight is not None or self.unsent(i).steps > 0]

    # --- beginning ------------------------------------------------------------------------------------------------

    def joined(self, anchors: Sequence[Result]) -> list[Effect]:
        """Without a state of its own: begin with the newest anchor of every fragment, where the others are in their
        cycle."""
        self.state.fragments = [Progress(anchor.version, self.state.work, anchor.version) for anchor in anchors]
        self._landing.extend(partial(list[Effect], (Adopt(anchor.fragment),)) for anchor in anchors)
        self._landing.append(self._fall_in)
        return self._land()

    def _fall_in(self) -> list[Effect]:
        """Go where the others are: the fragment with the lowest version is the next to be sent."""
        versions = [progress.version for progress in self.state.fragments]
        self.state.cycle.step = send_step(versions.index(min(versions)) - 1, self.plan.sync_every, len(versions))
        return []

    def resumed(self, saved: WorkerState, overtaken: Collection[int], forgotten: Collection[int] = ()) -> list[Effect]:
        """From a saved state, whose anchors are in place. `overtaken`: the fragments of which the server has later
        contributions than the state knows of; `forgotten`: of which it lacks the one that was to count in a later
        round. worker/saved.py says what becomes of each fragment."""
        self.state = deepcopy(saved)
        behind = {i for i, fragment in enumerate(saved.fragments) if fragment.in_flight is None} | set(overtaken)
        effects: list[Effect] = []
        for i, progress in enumerate(self.state.fragments):
            progress.in_flight, progress.late_in, progress.late_units = None, 0, ()
            if i in behind:
                progress.in_flight = InFlight(self.state.work, self.state.work.steps, catches_up=True)
                effects.append(CatchUp(i))
            else:
                effects += self._reopen(i, saved.fragments[i], forgotten)
        then = partial(self._caught_up, saved, behind, overtaken, forgotten)
        return effects + self._wait_for(sorted(behind), then, tries=1)

    def _caught_up(
        self, saved: WorkerState, behind: Collection[int], overtaken: Collection[int], forgotten: Collection[int]
    ) -> list[Effect]:
        # (The server may have been restarted meanwhile, and forgotten what overtook us.)
        dropped = {i for i in overtaken if self.state.fragments[i].counted == self.state.work}
        effects = [e for i in sorted(set(behind) - dropped) for e in self._reopen(i, saved.fragments[i], forgotten)]
        if dropped:
            self.state.cycle.begin(self.plan)
            self._fall_in()
        return effects

    def _reopen(self, fragment: int, saved: Progress, forgotten: Collection[int]) -> list[Effect]:
        """Carry on with what was sent and is in no agreement that we hold, in the order in which it was. A server that
        has forgotten it may have closed that round without it."""
        progress, effects = self.state.fragments[fragment], list[Effect]()
        if saved.late_in > progress.version or fragment in forgotten:
            progress.late_in = max(saved.late_in, progress.version + 1)
            progress.late_units = saved.late_units
            effects.append(Reopen(fragment, late=True))
        if saved.in_flight is not None:
            progress.in_flight = deepcopy(saved.in_flight)
            effects.append(Reopen(fragment))
        return effects

    # --- training -------------------------------------------------------------------------------------------------

    def count(self, samples: int, tokens: int, units: Units = ()) -> None:
        self.state.work += Work(0, samples, tokens, units)

    def trained(self, steps: int) -> None:
        """So many quiet steps were taken: the same as `stepped` for each, for a driver whose steps take no time."""
        assert 0 <= steps <= self.quiet_steps, "a step that sends or adopts is told by itself"
        work = self.state.work
        self.state.work = Work(work.steps + steps, work.samples, work.tokens, work.units)
        self.state.cycle.step += steps

    def stepped(self, *, changed: bool = False) -> list[Effect]:
        """One optimizer step was taken: adopt what is to be adopted now, then send what is due. `changed`: on weights
        that somebody else had moved, so it is dropped with the others."""
        state, work = self.state, self.state.work
        state.work = work = Work(work.steps + 1, work.samples, work.tokens, work.units)
        start_over = self._start_over("changed outside") if changed else []
        due = state.cycle.advance(self.plan)
        flights = enumerate(progress.in_flight for progress in state.fragments)
        ready = [f for f, flight in flights if flight and not flight.deferred and work.steps >= flight.land_at]
        if due is None and not ready:  # most steps
            return start_over
        return start_over + self._wait_for(ready, partial(self._send_due, due), tries=1, may_defer=True)

    def _send_due(self, due: int | None) -> list[Effect]:
        if due is None:
            return []
        deferred = self.state.fragments[due].in_flight is not None
        # A worker with few steps of its own must still adopt a fragment before it is sent again.
        delay = min(self.plan.delay, self.state.cycle.sync_every - 1)
        if delay == 0:
            # A worker that missed the only fragment's round sends again at once; with several, the next slot comes
            # soon enough. What was deferred is settled first, which is no try of this exchange.
            tries = (TRIES if len(self.state.fragments) == 1 else 1) + deferred
            return self._wait_for([due], list[Effect], tries=tries, may_defer=True)
        then = partial(self._send, due, land_at=self.state.work.steps + delay)
        return self._wait_for([due], then, tries=1, may_defer=True) if deferred else then()

    def sync_all(self, *, changed: bool = False) -> list[Effect]:
        """Every fragment that holds unsent steps, now; a new cycle begins."""
        self.state.cycle.begin(self.plan)
        fragments = self._open_fragments()
        start_over = self._start_over("changed outside") if changed else []
        return start_over + self._wait_for(fragments, list[Effect], tries=TRIES)

    def _start_over(self, kind: NoteKind) -> list[Effect]:
        """Somebody else has moved the local weights: give them up, with every step that was not sent. (The worker takes
        part in the exchange that comes now, without any: others may wait for it.) A script that
        moves them again and again would never contribute anything; it is told so."""
        self._changes += 1
        if self._changes == CHANGES and kind == "changed outside":
            raise WorkerError(
                f"the weights were changed outside optimizer.step() {CHANGES} times, and each time this worker's steps "
                "were dropped before they could be contributed. If the script edits its weights on purpose (clipping, "
                "projection, averaging), let it do so inside `with worker.own_change():`; outside_changes='keep' sends "
                "every change as this worker's own learning"
            )
        steps = self._unoffered_steps()
        self.state.metrics.outside_changes += 1
        self.state.metrics.steps_discarded += steps
        self._forget_local()
        return [Note(kind, steps=steps), StartOver()]

    def _unoffered_steps(self) -> int:
        """Steps that are in no contribution: of the fragment that has most of them."""
        offered = (p.in_flight.work if p.in_flight is not None else p.counted for p in self.state.fragments)
        return max((self.state.work - work).steps for work in offered)

    def _forget_local(self) -> None:
        """The local weights are the anchor's again. What is in flight was sent all the same."""
        for progress in self.state.fragments:
            progress.oldest_base = progress.version
            flight = progress.in_flight
            self._drop(self.state.work - (flight.work if flight is not None else progress.counted))
            if flight is not None:
                progress.counted += self.state.work - flight.work  # done since: neither here nor there
                flight.work, flight.overtaken = self.state.work, True
            else:
                progress.counted = self.state.work

    def _send(self, fragment: int, *, land_at: int | None = None, last: bool = False) -> list[Effect]:
        """What is unsent, unless something is in flight there. Its agreement is adopted at step `land_at`; None =
        now."""
        progress, unsent = self.state.fragments[fragment], self.unsent(fragment)
        if progress.in_flight is not None:
            return []
        keep = land_at is not None
        progress.in_flight = InFlight(self.state.work, self.state.work.steps if land_at is None else land_at, kept=keep)
        amount = (unsent.steps, unsent.samples, unsent.tokens)
        made = Send(fragment, progress.version, progress.oldest_base, *amount, keep=keep, last=last, units=unsent.units)
        return [made]

    def dropped(self, fragment: int, *, late: bool = False) -> None:
        """What was to be in flight there never was, or never will count: its steps are unsent. `late`: what was to
        count in a round to come."""
        progress = self.state.fragments[fragment]
        if late:
            self._lose(progress)
            progress.late_in, progress.late_units = 0, ()
        elif progress.in_flight is not None:
            self._not_counted(progress, progress.in_flight)
            progress.in_flight = None

    def _not_counted(self, progress: Progress, flight: InFlight) -> None:
        """What was in flight is unsent again, if it is still in the local weights."""
        if flight.overtaken:
            self.state.metrics.steps_discarded += (flight.work - progress.counted).steps
            self._drop(flight.work - progress.counted)
            progress.counted = flight.work

    def _lose(self, progress: Progress) -> None:
        """What was to count in a round to come never will."""
        self.state.lost = tuple(Ranges(self.state.lost) | Ranges(progress.late_units))

    def _drop(self, work: Work) -> None:
        """It will never be in an agreement of this worker's, in some fragment."""
        if work.units:
            self.state.dropped = tuple(Ranges(self.state.dropped) | Ranges(work.units))

    # --- waiting --------------------------------------------------------------------------------------------------

    def _wait_for(
        self,
        fragments: Collection[int],
        then: Callable[[], list[Effect]],
        *,
        tries: int,
        may_defer: bool = False,
        last: bool = False,
    ) -> list[Effect]:
        """Contribute to these fragments if they are not under way yet, wait for their agreements, adopt them.

        While it waits, others may be waiting for this worker at other fragments: it contributes to those too, so that
        nobody waits in a circle. With `may_defer` a server that does not answer is not waited for: training goes on,
        up to a limit. A worker that is asked to go waits for its `last` exchanges only, and not for long."""
        if not fragments:
            return then()
        self._wait = _Wait(dict.fromkeys(fragments, tries), then, may_defer, last)
        return [effect for fragment in fragments for effect in self._begin(self._wait, fragment)]

    def _begin(self, wait: _Wait, fragment: int) -> list[Effect]:
        """Send what is unsent; or carry on with what is under way already."""
        if self.state.fragments[fragment].in_flight is None:
            return self._send(fragment, last=wait.last)
        if wait.last:
            return [Resume(fragment, last=True)]
        wait.earlier.add(fragment)
        return []

    def looked(
        self, sights: Mapping[int, Sight], *, asked_to_leave: bool = False, out_of_time: bool = False
    ) -> list[Effect]:
        """How the exchanges `in_sight` stand. `asked_to_leave`: by a signal; `out_of_time`: and it should have left."""
        wait = self._wait
        assert wait is not None, "nothing is waited for"
        wait.looks += 1
        earlier, wait.earlier = wait.earlier, set()
        # Favours first: a worker that leaves is gone when the last of its own has landed.
        over = sorted((f for f in wait.tries if sights[f].done), key=lambda f: f not in wait.favours)
        if over:
            if not wait.favours.issuperset(over):  # favours never end where somebody is quick: they are no progress
                wait.looks = 0
            return [Resume(f) if f in earlier and sights[f].failed else Finish(f) for f in over]
        is_silent = all(sights[fragment].silent_s > self.offline.after_s for fragment in wait.tries)
        if wait.may_defer and is_silent and self._deferrals < self.offline.exchanges:
            self._deferrals += 1
            self.state.metrics.offline_exchanges += 1
            return [*self._defer(wait.tries), Note("deferred", steps=self._deferrals), *self._end_wait()]
        if wait.looks > LOOKS_IN_A_CIRCLE and not wait.last and wait.tries.keys() <= wait.favours:
            # It has helped for long, and nothing of its own is left: train on, and settle the rest when it is due.
            return [*self._defer(wait.tries), *self._end_wait()]
        if asked_to_leave and not wait.last:
            return [*self._defer(wait.tries), *self._end_wait()]
        if out_of_time:
            return [*self._defer(self.in_flight), Note("out of time"), *self._depart(gone=True)]
        wanted = {one for fragment in wait.tries for one in sights[fragment].wanted}
        return [effect for fragment, version in sorted(wanted) for effect in self._wanted(fragment, version, sights)]

    def _wanted(self, fragment: int, version: int, sights: Mapping[int, Sight]) -> list[Effect]:
        """A round of another fragment waits for us. What is in flight there comes when its time has come, not before;
        unless its round closed without it, for then nothing of ours is in the one that waits. Nor does it if the
        agreement is here already: if we have stood still for long, somebody may wait there for what we send next, and
        we, directly or not, for that somebody."""
        wait, progress = self._wait, self.state.fragments[fragment]
        assert wait is not None
        if progress.version >= version or fragment in wait.tries:
            return []
        if progress.in_flight is not None and not progress.in_flight.deferred:
            sight = sights[fragment]
            if not sight.missed and not (sight.done and wait.looks > LOOKS_IN_A_CIRCLE):
                return []
        wait.tries[fragment] = 1
        if progress.in_flight is None and self.unsent(fragment).steps == 0:
            wait.favours.add(fragment)
        return self._begin(wait, fragment)

    def _defer(self, fragments: Iterable[int]) -> list[Effect]:
        """Training goes on without their agreements."""
        effects: list[Effect] = []
        for fragment in fragments:
            flight = self.in_flight[fragment]
            flight.deferred = True
            if not flight.kept:
                flight.kept = True
                effects.append(Keep(fragment))
        return effects

    def _end_wait(self) -> list[Effect]:
        wait, self._wait = self._wait, None
        assert wait is not None
        return wait.then()

    def failed(self, fragment: int, cause: BaseException | None) -> None:
        """Its exchange ended without a result. If it was refused, it never counted and never will: nothing is in
        doubt."""
        if isinstance(cause, Refused) and not isinstance(cause, ServerError):
            self.dropped(fragment)

    def interrupted(self, error: BaseException) -> list[Effect]:
        """Ctrl-C, or an exchange that cannot be mended. What was sent may count all the same: it stays in flight, and
        is settled before anything new is sent. At the end of training a round that cannot close, or a server that is
        gone, is no error: the worker departs."""
        wait, self._wait = self._wait, None
        self._landing.clear()
        if wait is None:
            return []
        effects = self._defer(self.in_flight)
        if wait.last and isinstance(error, RoundStuck):
            return [*effects, Note("stuck", why=str(error)), *self._depart()]
        if wait.last and isinstance(error, ServerUnreachable):
            return [*effects, Note("unreachable", why=str(error)), *self._depart(gone=True)]
        return effects

    # --- what an exchange came to ---------------------------------------------------------------------------------

    def outcome(self, result: Result) -> list[Effect]:
        """The agreement of an exchange that is over."""
        notes = self._heard(result)
        # (What is in flight where `also` brings an agreement stays right: a Δ is the same from whichever anchor.)
        self._landing.extend(partial(self._rebase, other) for other in result.also)
        if result.refused:
            self._landing += (partial(self._refused, result), self._reload)
        else:
            self._landing.append(partial(self._settle, result))
        self._landing.append(partial(self._landed, result.fragment))
        return notes + self._land()

    def confirmed(self, fragment: int, repair: Result | None) -> list[Effect]:
        """The anchor was moved. None: it is the agreed one. Else it is fetched whole, to be rebased on."""
        if repair is None:
            self._repairs = 0
            return self._land()
        progress = self.state.fragments[fragment]
        mended = Note("mended", fragment, progress.version)
        self._repairs += 1
        self.state.metrics.anchor_repairs += 1
        if self._repairs == REPAIRS:
            self._repairs = 0
            raise ExchangeFailed(f"fragment {fragment}: even whole, what the server sends has not the hash it names")
        notes = self._heard(repair)
        progress.version = repair.version
        if self.unsent(fragment).steps == 0:
            progress.oldest_base = repair.version
        return [mended, *notes, Rebase(fragment)]

    def _land(self) -> list[Effect]:
        """On to the next move, whose state changes with it."""
        effects: list[Effect] = []
        while self._landing and not any(isinstance(effect, Move) for effect in effects):
            effects += self._landing.popleft()()
        return effects

    def _heard(self, result: Result) -> list[Effect]:
        """What comes with an agreement, whatever is made of it. A new H holds from the next cycle on."""
        notes: list[Effect] = []
        self._deferrals = 0
        if result.steps_lost:
            self.state.metrics.steps_discarded += result.steps_lost
            self._lose(self.state.fragments[result.fragment])
            notes.append(Note("lost", result.fragment, steps=result.steps_lost))
        if result.plan.revision != self.plan.revision:
            mine = plan_of(result.plan, self._worker_id)
            if replace(mine, revision=self.plan.revision) != self.plan:  # else the server was restarted
                notes.append(Note("plan"))
            self.plan = mine
            if self.state.cycle.step == 0:
                self.state.cycle.begin(self.plan)
        return notes

    def _landed(self, fragment: int) -> list[Effect]:
        """If some of our steps are not in the agreement, they go into the next round: at once, or in their turn."""
        wait = self._wait
        assert wait is not None
        if self.unsent(fragment).steps > 0 and wait.tries[fragment] > 1:
            wait.tries[fragment] -= 1
            return self._begin(wait, fragment)
        del wait.tries[fragment]
        # A worker that leaves has done enough for others when nothing of its own is left. Otherwise a worker
        # that waits for it at one fragment would wait for it at the next, and so on without end.
        is_over = wait.tries.keys() <= wait.favours if wait.last else not wait.tries
        return self._end_wait() if is_over else []

    # --- what is made of it: each changes the state, and says how the weights move with it --------------------------

    def _settle(self, result: Result) -> list[Effect]:
        progress = self.state.fragments[result.fragment]
        flight, progress.in_flight = progress.in_flight, None
        assert flight is not None
        progress.late_in, progress.late_units = 0, ()
        if flight.catches_up:
            return self._catch_up(result)
        if result.counted_in > result.version:
            progress.late_in, progress.late_units = result.counted_in, (flight.work - progress.counted).units
            return [PutOff(result.fragment), *self._adopt(flight, result)]
        if result.counted:
            return self._adopt(flight, result)
        self.state.metrics.missed_rounds += 1
        self._not_counted(progress, flight)
        if self._too_old(result):
            return self._discard(result)
        missed = Note("missed", result.fragment, result.version, self.unsent(result.fragment).steps)
        return [missed, *self._rebase(result)]

    def _adopt(self, flight: InFlight, result: Result) -> list[Effect]:
        """What we sent is in the agreement (or in a round still open). The steps taken since then are kept, mixed or
        replaced, as the plan says; those taken while nobody answered are always kept."""
        fragment, progress, notes = result.fragment, self.state.fragments[result.fragment], list[Effect]()
        sent, since = (flight.work - progress.counted).steps, (self.state.work - flight.work).steps
        progress.counted = flight.work
        progress.oldest_base = result.version
        self.state.metrics.sync_count += 1
        self._changes = 0 if sent else self._changes
        if sent and any(p.worker_id == self._worker_id and not p.weight for p in result.participants):
            notes.append(Note("left out", fragment, result.version, sent))
        keeps = since > 0 and (self.plan.carry or flight.deferred)
        if keeps and flight.deferred:
            progress.oldest_base = progress.version  # they were taken on the version we held all the while
            if self._too_old(result):
                return [*notes, *self._discard(result)]
        progress.version = result.version
        notes.append(Note("agreed", fragment, result.version))
        if keeps:
            return [*notes, Rebase(fragment) if flight.overtaken else Carry(fragment)]
        if self.plan.alpha > 0.0:
            return [*notes, Mix(fragment, self.plan.alpha)]
        self._drop(self.state.work - flight.work)
        progress.counted = self.state.work
        self.state.metrics.steps_overwritten += since
        return [*notes, Adopt(fragment)]

    def _rebase(self, result: Result) -> list[Effect]:
        """It came about without us: our unsent steps are kept, and are as old as they are."""
        progress = self.state.fragments[result.fragment]
        progress.version = result.version
        progress.oldest_base = min(progress.oldest_base, result.version)
        return [Rebase(result.fragment)]

    def _begin_at(self, result: Result) -> list[Effect]:
        """What was agreed, and nothing of our own."""
        progress = self.state.fragments[result.fragment]
        progress.version = progress.oldest_base = result.version
        self._drop(self.unsent(result.fragment))
        progress.counted = self.state.work
        return [Adopt(result.fragment)]

    def _too_old(self, result: Result) -> bool:
        """Are our unsent steps? What came from a layer above made them no older."""
        oldest_base = self.state.fragments[result.fragment].oldest_base
        age = result.version - oldest_base - sum(oldest_base < version <= result.version for version in result.above)
        return result.too_old or age > self.plan.max_staleness

    def _discard(self, result: Result) -> list[Effect]:
        """Our unsent steps are of an age at which they would do harm: start again from what was agreed."""
        unsent = self.unsent(result.fragment).steps
        self.state.metrics.steps_discarded += unsent
        return [Note("discarded", result.fragment, result.version, unsent), *self._begin_at(result)]

    def _catch_up(self, result: Result) -> list[Effect]:
        """What was agreed while this worker was away."""
        fragment, unsent = result.fragment, self.unsent(result.fragment).steps
        if result.counted:
            return [Note("overtaken", fragment, result.version, unsent), *self._begin_at(result)]
        if result.unchanged:
            return [Prove(fragment)]
        if unsent and self._too_old(result):
            return self._discard(result)
        caught_up = [Note("caught up", fragment, result.version, unsent), *self._rebase(result)]
        if not unsent:
            self.state.fragments[fragment].oldest_base = result.version
        return caught_up

    def _refused(self, result: Result) -> list[Effect]:
        """Nobody has any use for what we sent, and what is wrong with one fragment seldom stops there: give the local
        weights up, all of them, and go on from what was agreed."""
        progress = self.state.fragments[result.fragment]
        progress.in_flight, progress.version = None, result.version
        self.state.metrics.reloads += 1
        self.state.metrics.steps_discarded += self._unoffered_steps()
        return [Note("refused", result.fragment, result.version, why=result.refused), Adopt(result.fragment)]

    def _reload(self) -> list[Effect]:
        self._forget_local()
        return [Reload()]

    # --- leaving --------------------------------------------------------------------------------------------------

    def finish(self, *, keep_local: bool = False, changed: bool = False) -> list[Effect]:
        """The end of training: contribute the remaining steps. What finds no round any more is counted as discarded. If
        there is no server any more, the model keeps this worker's own weights: they are all there is."""
        self._keep_local = keep_local
        waited_for = self._open_fragments()  # by others, even if there is nothing to contribute to them any more
        effects = self._start_over("changed at the end") if changed else []
        for fragment, progress in enumerate(self.state.fragments):
            # What counts in a round to come is worth waiting for, where nothing more is to be sent anyway.
            # (It goes along with what is in flight after it.)
            if progress.late_in and progress.in_flight is None and self.unsent(fragment).steps == 0:
                progress.in_flight = InFlight(self.state.work, self.state.work.steps)
                self.state.metrics.sync_count -= 1  # it was counted before
                effects.append(Recall(fragment))
        left = sorted({*waited_for, *self._open_fragments()})
        if left:
            effects.append(Note("leaving"))
        return effects + self._wait_for(left, self._depart, tries=EXIT_TRIES, last=True)

    def _depart(self, *, gone: bool = False) -> list[Effect]:
        self._wait, self.has_left = None, True
        self.state.metrics.steps_discarded += max((self.unsent(f).steps for f in self._open_fragments()), default=0)
        return [Depart("own" if self._keep_local else "as they are" if gone else "agreed")]
