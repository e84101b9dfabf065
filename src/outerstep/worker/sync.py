"""The worker's half of a round, on tensors: carries out what the worker's machine decides.

coordination/worker/machine.py decides what is sent, waited for and adopted. This module holds the weights, the tickets
and the log. All of it runs in the training thread; the topology's own threads send and receive.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from functools import partial
from logging import DEBUG, INFO, WARNING
from typing import Any

from torch import Tensor

from ..coordination.server.remembered import changes_in
from ..coordination.worker.effects import (
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
    Resume,
    Send,
    StartOver,
)
from ..coordination.worker.machine import LOOK_EVERY_S, Offline, Units, Work, WorkerMachine
from ..errors import ExchangeFailed
from ..events import Adoption, ExchangeDeferred, NothingLearned, PlanChanged, RoundReport, WeightsChanged
from ..observe import FanOut
from ..observe.log_lines import WAITING
from ..observe.story import Story, StoryLine
from ..topology.protocol import Agreed, Contribution, Joined, Parting, Ticket, Topology, anchors_of
from ..types import Trained
from . import saved as states
from .replica import Replica
from .signals import Interrupts, deferred
from .watching import Watching

log = logging.getLogger(__name__)

SHOW_AFTER_S = 1.0  # a worker that waits longer than this shows so on a terminal, in a line that disappears again;
SAY_SO_S = 5.0  # longer than this, it logs for whom it waits,
SAY_AGAIN_S = 60.0  # again after this, and then each time the wait has doubled

MESSAGES: dict[NoteKind, tuple[int, str]] = {
    "agreed": (
        DEBUG,  # the round's own line says more
        "fragment {fragment} version {version}: {workers}; {up_mb:.1f} MB up, {down_mb:.1f} MB down",
    ),
    "left out": (
        WARNING,
        "fragment {fragment} version {version} was agreed without this worker's {steps} steps: a screen, or the rule "
        "by which the run combines contributions, left them out; the server's event log says why",
    ),
    "missed": (WARNING, "round {version} closed without this worker; {steps} steps go into the next"),
    "discarded": (WARNING, "{steps} local steps were older than max_staleness={plan.max_staleness} and are lost"),
    "lost": (
        WARNING,
        "{steps} steps are lost: the server was restarted before the round that they were late for, and they are too "
        "old for it now",
    ),
    "changed outside": (
        WARNING,
        "the weights were changed outside optimizer.step() (was a checkpoint loaded inside the `with`?). They are not "
        "this worker's learning and are not sent: it continues from the agreed weights, and {steps} local steps are "
        "dropped. Load before the `with`; make edits of your own inside `with worker.own_change():`",
    ),
    "changed at the end": (
        WARNING,
        "the weights were changed outside optimizer.step() after the last step (load_best_model_at_end?). They are not "
        "this worker's learning and are not sent; {steps} local steps are dropped. {left}",
    ),
    "refused": (WARNING, "{why}. Continuing from the agreed weights, version {version}"),
    "mended": (
        WARNING,
        "fragment {fragment}: the anchor was not the one agreed on as version {version}; it was fetched again",
    ),
    "plan": (INFO, "the plan changed: sync_every={plan.sync_every}, delay={plan.delay}"),
    "deferred": (
        WARNING,
        "no answer from the server for {offline.after_s:g} s; training goes on without it ({steps} of at most "
        "{offline.exchanges} exchanges deferred)",
    ),
    "overtaken": (
        WARNING,
        "fragment {fragment}: the server has later steps of this worker than its saved state knows of; the state's "
        "{steps} unsent steps are among them and are dropped. Continuing from version {version}",
    ),
    "caught up": (INFO, "fragment {fragment}: caught up with version {version}, with {steps} unsent steps"),
    "leaving": (INFO, "training is over; contributing what is left"),
    "stuck": (WARNING, "{why}; leaving after {patience_s:g} s. The steps since the last agreement may be lost."),
    "unreachable": (WARNING, "{why}. Leaving with this worker's own weights; its last steps were not contributed."),
    "out of time": (
        WARNING,
        "no time is left to wait for the agreement. What was sent until now still counts if it was sent whole.",
    ),
}


LEFT = {
    False: "The model holds the agreed weights now: save others inside the `with`, or keep them with on_exit='local'",
    True: "The model keeps what it holds, as on_exit='local' says",
}

ADOPTIONS: dict[type[Move], Adoption] = {Adopt: "adopted", Rebase: "rebased", Carry: "carried", Mix: "mixed"}


class Synchronizer:
    """By fragment: `_tickets`, the exchange in flight; `_late`, one that counts in a round to come; `_sent`, a copy of
    what was sent; `_agreed`, what is being adopted, and the ticket that it came with."""

    def __init__(
        self,
        topology: Topology,
        replica: Replica,
        joined: Joined,
        offline: Offline = Offline(),  # noqa: B008 - frozen
        interrupts: Interrupts | None = None,
        on_reload: Callable[[], None] = lambda: None,
        saved: states.SavedWorker | None = None,
        events: FanOut | None = None,
        on_sent: Callable[[], None] = lambda: None,
        loss: Callable[[], float | None] = lambda: None,
        story: Story | None = None,
        describe: Callable[[Units], tuple[Trained, ...]] = lambda units: (),
    ) -> None:
        """`on_reload` is called when the agreed weights have replaced the local ones, `on_sent` when a new contribution
        has become part of `state_dict`. `saved`: the state to resume from. `loss`: gives the last reported loss, which
        goes with each contribution. `describe`: turns numbers of leased units into places of a dataset."""
        self._topology, self._replica, self._on_reload, self._events = topology, replica, on_reload, events or FanOut()
        replica.prepare(joined.plan)
        self._worker_id, self._on_sent, self._loss = joined.worker_id, on_sent, loss
        self._describe = describe
        self._story = story or Story()
        self._reports: list[Callable[..., RoundReport]] = []
        self._driven_at: float | None = None  # None: it is still joining
        self._interrupts = interrupts or Interrupts(0.0)  # without handlers: no signal ever asks
        self._tickets: dict[int, Ticket] = {}
        self._late: dict[int, Ticket] = {}
        self._sent: dict[int, dict[str, Tensor]] = {}
        self._agreed: dict[int, tuple[Ticket, Agreed]] = {}
        self._saved = saved
        self._own: dict[str, Tensor] = {}
        self._zeros: set[int] = set()  # fragments whose last contribution was zero,
        self._still: set[int] = set()  # or would have been without the statistics in it
        self._owes_nothing: set[int] = set()  # fragments whose codec forgets what it left out, at the next contribution
        self._patience_s: float | None = None
        self._weights_left = ""  # by the machine, at the end
        self.machine = WorkerMachine(joined.worker_id, joined.plan, Work(*joined.work), offline)
        self.watching = Watching(self.machine.state.work.steps if saved is None else saved.work.steps)
        if saved is None:
            self._agreed = dict(enumerate(anchors_of(topology, joined)))
            self._land(partial(self.machine.joined, [agreed for _, agreed in self._agreed.values()]))
        else:
            states.check_plan(saved, joined.plan)
            replica.load_anchors(saved.anchors)
            forgotten = saved.forgotten(joined.last_sequences)
            self._drive(partial(self.machine.resumed, saved.state, joined.overtaken, forgotten))
            self._saved = None  # its tensors are in place

    # --- events ---------------------------------------------------------------------------------------------------

    def stepped(self, *, changed: bool = False) -> bool:
        """One optimizer step was taken. Returns whether something was exchanged. `changed`, here and below: the weights
        have moved since the last step, and no step of ours moved them."""
        return self._drive(partial(self.machine.stepped, changed=changed))

    def sync_all(self, *, changed: bool = False) -> None:
        """Exchange every fragment that has unsent steps, now."""
        self._drive(partial(self.machine.sync_all, changed=changed))

    def finish(self, *, keep_local: bool, patience_s: float, changed: bool = False) -> None:
        """End the training: contribute the remaining steps."""
        if keep_local:
            self._own = {name: p.detach().clone() for name, p in self._replica.tensors.items()}
        self._patience_s = patience_s
        self._drive(partial(self.machine.finish, keep_local=keep_local, changed=changed))
        if isinstance(self._topology, Parting) and self._weights_left != "as they are":
            self._part(self._topology, patience_s)

    def _part(self, topology: Parting, patience_s: float) -> None:
        """Everything learned is in the agreement: a further move of the anchor moves the weights as far."""
        tickets = topology.part(patience_s)
        for ticket in tickets:
            agreed = ticket.finish()
            ticket.confirm(agreed, self._replica.adopt(agreed.update))
            self.machine.state.fragments[agreed.fragment].version = agreed.version
        if tickets and self._own:
            self._replica.restore(self._own)

    def cancel(self) -> None:
        """Stop sending. Nothing more will be adopted."""
        for ticket in self._tickets.values():
            ticket.cancel()

    def state_dict(self, worker_id: str, *, changed: bool = False) -> dict[str, Any]:
        under_way = states.UnderWay(self._tickets, self._late, self._sent)
        state = states.write(worker_id, self.machine, self._replica, self._topology, under_way)
        return state | {"changed": True} if changed else state

    def _drive(self, event: Callable[[], list[Effect]]) -> bool:
        """Give the machine an event, carry out its effects, and wait as long as it waits. However that ends, what was
        sent is remembered and the time is counted. Returns whether something was exchanged."""
        machine, waited = self.machine, False
        self._driven_at = began_at = time.monotonic()
        try:
            effects = event()
            waited = bool(machine.waiting)
            self._do(effects)
            say_at_s = SAY_SO_S
            while machine.waiting:
                slice_s = LOOK_EVERY_S / len(machine.waiting)
                sights = {f: self._tickets[f].look(slice_s if f in machine.waiting else 0.0) for f in machine.in_sight}
                reasons = {sight.waiting_for for sight in sights.values()} - {""}
                waited_s = time.monotonic() - began_at
                if reasons and waited_s > SHOW_AFTER_S:
                    log.log(WAITING, "waiting for %s (%.0f s)", " and ".join(sorted(reasons)), waited_s)
                if reasons and waited_s > say_at_s:
                    waiting = f"still waiting ({waited_s:.0f} s)" if say_at_s > SAY_SO_S else "waiting"
                    log.info("%s for %s", waiting, " and ".join(sorted(reasons)))
                    say_at_s = max(SAY_AGAIN_S, 2.0 * say_at_s)
                asked = bool(self._interrupts.asked)
                self._do(machine.looked(sights, asked_to_leave=asked, out_of_time=asked and self._interrupts.is_late))
        except BaseException as error:
            for fragment in machine.in_flight.keys() - self._tickets.keys():
                machine.dropped(fragment)  # it was not sent
            effects = machine.interrupted(error)
            self._do(effects)
            if not any(isinstance(effect, Depart) for effect in effects):
                raise
        finally:
            if waited:
                log.log(WAITING, "")  # it is over
                machine.state.metrics.last_sync_s = time.monotonic() - began_at
                machine.state.metrics.seconds_waiting += machine.state.metrics.last_sync_s
        return waited or bool(effects)

    def report(self) -> None:
        """Report what was adopted since the last report."""
        made, self._reports = self._reports, []
        for make in made:
            report = make(metrics=self.watching.metrics)
            log.info("%s", StoryLine(self._story, report))
            self._events(report)

    # --- effects --------------------------------------------------------------------------------------------------

    def _do(self, effects: list[Effect], intact: bool = True) -> None:
        """Carry out effects. `intact`: a move among them has made the anchor the agreed one."""
        for effect in effects:
            match effect:
                case Send():
                    self._send(effect)
                case Resume(fragment, last):
                    patience_s = self._patience_s if last else None
                    self._tickets[fragment] = self._tickets[fragment].resume(stuck_after_s=patience_s)
                case Finish(fragment):
                    self._finish(fragment)
                case Adopt() | Rebase() | Carry() | Mix() | Prove():
                    ticket, agreed = self._agreed.pop(effect.fragment)
                    repair = ticket.confirm(agreed, intact)
                    if repair is not None:
                        self._hear(ticket, repair)
                    self._land(partial(self.machine.confirmed, effect.fragment, repair))
                case Keep(fragment):
                    self._sent[fragment] = self._replica.deltas(self.machine.plan.fragments[fragment])
                case Recall(fragment):
                    self._tickets[fragment] = self._late[fragment]
                case CatchUp(fragment):
                    self._tickets[fragment] = self._topology.catch_up(fragment)
                case Reopen(fragment, late):
                    self._reopen(fragment, late=late)
                case StartOver():
                    self._replica.adopt_anchor()
                    self._on_reload()
                    self._owes_nothing = set(range(len(self.machine.plan.fragments)))
                case Depart(weights):
                    self._weights_left = weights
                    if weights == "own":
                        self._replica.restore(self._own)
                    elif weights == "agreed":
                        self._replica.adopt_anchor()  # whole, also where it was mixed with the local weights
                case Note():
                    self._tell(effect)
                case PutOff() | Reload():
                    pass  # done in _land

    def _send(self, send: Send) -> None:
        self._tickets.pop(send.fragment, None)
        names = self.machine.plan.fragments[send.fragment]
        (self._still.add if self._replica.moved_statistics_alone(names) else self._still.discard)(send.fragment)
        deltas, sent = self._replica.to_send(names, keep=send.keep)
        contribution = Contribution(
            fragment=send.fragment,
            base_version=send.base_version,
            oldest_base=send.oldest_base,
            steps=send.steps,
            samples=send.samples,
            tokens=send.tokens,
            deltas=deltas,
            owes_nothing=send.fragment in self._owes_nothing,
            loss=self._loss(),
            data=self._describe(send.units),
        )
        self._owes_nothing.discard(send.fragment)
        stuck_after_s = self._patience_s if send.last else None
        self._tickets[send.fragment] = self._topology.begin(contribution, stuck_after_s=stuck_after_s)
        if sent is not None:
            self._sent[send.fragment] = sent
        self._on_sent()

    def _reopen(self, fragment: int, *, late: bool) -> None:
        assert self._saved is not None
        progress = self._saved.fragments[fragment]
        contribution = progress.late if late else progress.awaited
        assert contribution is not None
        ticket = self._topology.reopen(fragment, contribution.exchange, late=late)
        if ticket is None:
            self.machine.dropped(fragment, late=late)
            return
        (self._late if late else self._tickets)[fragment] = ticket
        if not late:  # its copy is empty on a rank that holds nothing of the fragment
            self._sent[fragment] = contribution.sent

    def _finish(self, fragment: int) -> None:
        ticket = self._tickets[fragment]
        try:
            agreed = ticket.finish(reload=True)
        except ExchangeFailed as failure:
            self.machine.failed(fragment, failure.__cause__)
            raise
        self._hear(ticket, agreed)
        self._agreed.update((other.fragment, (ticket, other)) for other in agreed.also)
        self._land(partial(self.machine.outcome, agreed))

    def _hear(self, ticket: Ticket, agreed: Agreed) -> None:
        metrics = self.machine.state.metrics
        metrics.bytes_sent += agreed.bytes_sent
        metrics.bytes_received += agreed.bytes_received
        metrics.sync_retries += agreed.retries
        metrics.reconnections += agreed.rejoins
        self.watching.adopted(agreed.fragment, agreed.watched, self.machine.state.work.steps)
        self._agreed[agreed.fragment] = ticket, agreed

    def _land(self, event: Callable[[], list[Effect]]) -> None:
        """Change state and weights together: Ctrl-C waits until both are done. `intact`: a move of local weights and
        anchor has made the anchor the agreed one."""
        intact, lost_before = True, self.machine.state.metrics.steps_discarded
        sent = {
            fragment: (flight.work - self.machine.state.fragments[fragment].counted).steps
            for fragment, flight in self.machine.in_flight.items()
            if not flight.catches_up
        }
        with deferred():
            effects = event()
            for effect in effects:
                match effect:
                    case PutOff(fragment):
                        self._late[fragment] = self._tickets[fragment]
                    case Reload():
                        self._replica.adopt_anchor()
                        self._on_reload()
                    case Adopt(fragment):
                        intact = self._replica.adopt(self._agreed[fragment][1].update)
                    case Rebase(fragment):
                        intact = self._replica.rebase(self._agreed[fragment][1].update)
                    case Carry(fragment):
                        intact = self._replica.carry(self._agreed[fragment][1].update, self._sent[fragment])
                    case Mix(fragment, alpha):
                        intact = self._replica.mix(self._agreed[fragment][1].update, alpha)
                    case Prove(fragment):
                        intact = self._replica.prove(self._agreed[fragment][1].update)
            for fragment, progress in enumerate(self.machine.state.fragments):
                if progress.in_flight is None:
                    self._tickets.pop(fragment, None)
                    self._sent.pop(fragment, None)
                if not progress.late_in:
                    self._late.pop(fragment, None)
        self._note_round(effects, sent, self.machine.state.metrics.steps_discarded - lost_before)
        self._do(effects, intact)

    def _note_round(self, effects: list[Effect], sent: dict[int, int], discarded: int) -> None:
        """Note what was adopted, for the next report. `sent`: steps that were in flight before."""
        notes = {effect.kind for effect in effects if isinstance(effect, Note)}
        for move in effects:
            if not isinstance(move, Adopt | Rebase | Carry | Mix) or self._driven_at is None or "mended" in notes:
                continue
            how, fragment = ADOPTIONS[type(move)], move.fragment
            agreed, is_over = self._agreed[fragment][1], self.machine.state.fragments[fragment].in_flight is None
            if is_over and agreed.watched is not None and sent.get(fragment, 0):
                self._note_zeros(fragment, agreed.watched.pseudo_grad_norm, sent[fragment])
            self._reports.append(
                partial(
                    RoundReport,
                    worker=self._worker_id,
                    step=self.machine.state.work.steps,
                    fragment=fragment,
                    version=agreed.version,
                    adoption="reloaded" if "refused" in notes else "discarded" if "discarded" in notes else how,
                    counted=agreed.counted,
                    participants=agreed.participants,
                    steps_sent=sent.get(fragment, 0) if is_over else 0,
                    steps_discarded=discarded,
                    bytes_sent=agreed.bytes_sent,
                    bytes_received=agreed.bytes_received,
                    waited_s=time.monotonic() - self._driven_at,
                    from_above=agreed.above,
                )
            )

    def _note_zeros(self, fragment: int, norm: float | None, steps: int) -> None:
        """Warn if no fragment has learned anything: one alone may be frozen. `norm`: of this worker's contribution, if
        it counts in the round. The warning is repeated only after a fragment has learned something."""
        if norm is None:
            return
        learned = len(self._zeros) < len(self.machine.plan.fragments)
        (self._zeros.add if norm == 0.0 or fragment in self._still else self._zeros.discard)(fragment)
        if learned and len(self._zeros) == len(self.machine.plan.fragments):
            log.warning(
                "%d optimizer steps changed no weight of the model: every pseudo-gradient of this worker is zero. "
                "Is the optimizer the one the model trains with? (Or its learning rate is 0.)",
                steps,
            )
            self._events(NothingLearned(self._worker_id, steps))

    def _tell(self, note: Note) -> None:
        facts = dataclasses.asdict(note) | {"plan": self.machine.plan, "offline": self.machine.offline}
        if note.kind == "agreed":
            _, agreed = self._agreed[note.fragment]
            facts["workers"] = ", ".join(p.worker_id for p in agreed.participants)
            facts["up_mb"], facts["down_mb"] = agreed.bytes_sent / 1e6, agreed.bytes_received / 1e6
        elif note.kind == "plan":
            plan = self.machine.plan
            self._events(PlanChanged(changes_in(plan.revision), {"sync_every": plan.sync_every, "delay": plan.delay}))
        elif note.kind in ("changed outside", "changed at the end"):
            self._events(WeightsChanged(self._worker_id, self.machine.state.work.steps, note.steps))
            facts["left"] = LEFT[bool(self._own)]
        elif note.kind == "deferred":
            self._events(ExchangeDeferred(self._worker_id, note.steps))
        level, text = MESSAGES[note.kind]
        log.log(level, "%s", text.format(**facts, patience_s=self._patience_s or 0.0))
