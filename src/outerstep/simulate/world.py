"""One simulated run: start everything, let the faults happen, wait for calm, see rounds go on, end cleanly."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from typing import Any

from msgspec import convert

from ..coordination.layers.lifecycle import GroupState
from ..types import Control, Wishes
from .agenda import Agenda
from .history import History
from .network import Conditions, Network
from .scenario import Fault, Scenario
from .server import CODECS, SimServer
from .server_liar import SimLiar
from .storage import Machine
from .worker import SimSaved, SimWorker

CALM_LIMIT_S = 3_000.0
"""Virtual seconds after the last fault within which every worker must have been counted in another round."""

TRAINING_LIMIT_S = 400.0
"""And from then on, within which the server must know each of them as training."""


def run(scenario: Scenario, seed: int, **options: Any) -> History:
    """Options: those of `World`."""
    return World(scenario, seed, **options).run()


class World:
    """`log`: filled with what happens, in words."""

    def __init__(
        self,
        scenario: Scenario,
        seed: int,
        *,
        server_type: type[SimServer] = SimServer,
        worker_type: type[SimWorker] = SimWorker,
        log: list[str] | None = None,
    ) -> None:
        self.scenario = scenario
        self.rng = random.Random(f"world {seed}")
        self.agenda = Agenda()
        self.history = History(may_go_back=scenario.durability == "checkpoint", log=log, clock=lambda: self.agenda.now)
        self.machine = Machine(random.Random(f"disk {seed}"))
        self.network = Network(self.agenda, self.rng)
        self.network.conditions = self._weather()
        self.server = server_type(scenario, self.agenda, self.history, self.machine)
        self._worker_type = worker_type
        self._starts = 0
        self.everyone: list[SimWorker] = []
        self.current = [self._start(i) for i in range(scenario.workers)]
        if scenario.liar:
            SimLiar(scenario, self.agenda, self.server)
            self.history.faults[f"liar_{scenario.liar}"] += 1
        for fault in scenario.faults:
            self.agenda.at(fault.at_s, self._inject(fault))

    def run(self) -> History:
        agenda, history = self.agenda, self.history
        agenda.run_until(lambda: agenda.now >= self.scenario.calm_after_s, limit_s=self.scenario.calm_after_s + 1.0)
        self._calm()
        before = self._exchanges()
        limit_s = agenda.now + CALM_LIMIT_S
        if not agenda.run_until(lambda: self._all_advanced(before), limit_s=limit_s):
            history.violated(f"no progress after the faults stopped: {before} exchanges, then {self._exchanges()}")
            return self._close()
        if not agenda.run_until(self._all_train, limit_s=agenda.now + TRAINING_LIMIT_S):
            history.violated(f"in calm not everybody trains: {self._lives()}")
        survivors = [worker for worker in self.everyone if worker.alive]
        for worker in survivors:
            worker.leave_when_done()
        if not agenda.run_until(lambda: all(not w.alive for w in survivors), limit_s=agenda.now + CALM_LIMIT_S):
            history.violated("a clean exit never ended")
        agenda.run_until(lambda: False, limit_s=agenda.now + 2.0)  # an outer step may still be under way
        self.server.crash(0.0)  # whatever happened before: what was promised is on the disk
        agenda.run_until(lambda: self.server.is_up, limit_s=agenda.now + 1.0)
        self._check_nothing_lost([worker for worker in self.everyone if worker.left])
        self._check_tokens()
        self.history.check_beliefs()
        return self._close()

    def _calm(self) -> None:
        """No more faults. (Who is down comes back when its time is over.)"""
        self.history.say("it is calm")
        self.network.conditions = Conditions()
        self.network.cut.clear()
        self.machine.power.trouble, self.machine.power.operations_left = 0, None

    def _close(self) -> History:
        self.history.virtual_s = self.agenda.now
        self.history.faults["lost"] += self.network.lost
        self.history.faults["repeated"] += self.network.repeated
        self.history.faults["damaged"] += self.network.damaged
        self.history.faults["disk_failed"] += self.machine.power.failed
        return self.history

    def _exchanges(self) -> list[int]:
        """Per worker id, over all its starts: how often a round counted it (or told it to discard)."""
        done = [0] * self.scenario.workers
        for worker in self.everyone:
            done[worker.index] += worker.exchanges_done
        return done

    def _all_advanced(self, before: list[int]) -> bool:
        return all(now > then for now, then in zip(self._exchanges(), before, strict=True))

    def _lives(self) -> dict[str, str]:
        """Where each worker is in its life, as the server knows it."""
        members = self.server.coordinator.members
        found = {worker.worker_id: members.find(worker.worker_id) for worker in self.current}
        return {name: str(one.life.place) if one and one.life else "not known" for name, one in found.items()}

    def _all_train(self) -> bool:
        return all(place.startswith(GroupState.TRAINING) for place in self._lives().values())

    def _weather(self) -> Conditions:
        return Conditions(loss=self.scenario.loss, repeat=self.scenario.repeat, damage=self.scenario.damage)

    def _start(self, index: int, saved: SimSaved | None = None) -> SimWorker:
        self._starts += 1
        first_step = 1_000_000 * self._starts  # steps are named for ever
        place = (self.scenario, self.agenda, self.network, self.server, self.history, self.rng)
        worker = self._worker_type(index, self._starts, first_step, *place, saved)
        self.everyone.append(worker)
        return worker

    def _inject(self, fault: Fault) -> Callable[[], None]:
        def act() -> None:
            worker = self.current[fault.worker]
            link = f"w{fault.worker}"
            directions = {
                "cut": {(link, "server"), ("server", link)},
                "cut_up": {(link, "server")},
                "cut_down": {("server", link)},
            }
            self.history.faults[fault.kind] += 1
            self.history.say(f"fault: {fault}")
            match fault.kind:
                case "server_crash" | "power_cut" | "disk_full" | "disk_error" | "damaged_checkpoint":
                    self._strike_server(fault)
                case "crash":
                    worker.kill()
                    self.agenda.after(fault.lasts_s, lambda: self._restart_crashed(fault.worker, worker))
                case "pause":
                    worker.pause(fault.lasts_s)
                case "replace":
                    # The old one wakes up after its replacement has started, so that has none of its steps.
                    worker.pause(fault.lasts_s)
                    self.current[fault.worker] = self._start(fault.worker)
                case "kick" | "drain" | "sync" | "new_plan":
                    self._order(fault)
                case "load":
                    worker.load()
                case "bad_weather":
                    self.network.conditions = Conditions(delay_s=0.5, loss=0.4, repeat=0.3, damage=0.05)
                    self.agenda.after(fault.lasts_s, lambda: setattr(self.network, "conditions", self._weather()))
                case _:
                    cut = directions[fault.kind]
                    self.network.cut |= cut
                    self.agenda.after(fault.lasts_s, lambda: self.network.cut.difference_update(cut))

        return act

    def _strike_server(self, fault: Fault) -> None:
        power = self.machine.power
        match fault.kind:
            case "server_crash":
                self.server.refuses = self.rng.random() < 0.5
                self.server.crash(fault.lasts_s)
            case "power_cut":
                power.operations_left = fault.operation
            case "damaged_checkpoint":
                if self.server.is_up and not self.machine.damage_newest():
                    self.history.faults["damaged_checkpoint"] -= 1
            case _:
                power.trouble = errno.ENOSPC if fault.kind == "disk_full" else errno.EIO
                self.agenda.after(fault.lasts_s, lambda: setattr(power, "trouble", 0))

    def _order(self, fault: Fault) -> None:
        """An operator speaks up. A worker that leaves for it is started again."""
        coordinator = self.server.coordinator
        worker_id = f"w{fault.worker}"
        if fault.kind == "new_plan":
            codec = CODECS[
                (fault.worker + 1) % len(CODECS)
            ]  # not drawn: the rest of a seed's schedule stays what it was
            order = Control(kind="plan", changes=Wishes(sync_every=self.scenario.sync_every + 1, codec=codec))
        else:
            order = convert({"kind": fault.kind, "worker_id": worker_id}, Control)
        if not self.server.is_up or (order.worker_id and worker_id not in coordinator.members.live_ids):
            return
        self.server.handle(order, [], lambda answer: None)
        if fault.kind in ("kick", "drain"):
            told = self.current[fault.worker]
            self.agenda.after(fault.lasts_s, lambda: self._restart_when_gone(fault.worker, told))

    def _restart_crashed(self, index: int, crashed: SimWorker) -> None:
        """From its saved state, unless another start came between: what that sent holds none of the state's steps."""
        if not self.current[index].alive:
            self.current[index] = self._start(index, crashed.saved if self.current[index] is crashed else None)

    def _restart_when_gone(self, index: int, told: SimWorker) -> None:
        """It goes when the order reaches it or it finds itself kicked; unless a later start replaced it anyway."""
        if told is not self.current[index]:
            return
        if not told.alive:
            self.current[index] = self._start(index)
        elif self.agenda.now < self.scenario.calm_after_s + CALM_LIMIT_S / 2:
            self.agenda.after(2.0, lambda: self._restart_when_gone(index, told))

    def _check_tokens(self) -> None:
        """Nobody has claimed more than it can have done. (A second counts for each contribution, however soon it
        comes: hence the factor.)"""
        total, most_per_s = self.server.coordinator.budget.total, self.scenario.rules.max_tokens_per_s
        if most_per_s is not None and total > 2.0 * most_per_s * self.agenda.now * (self.scenario.workers + 1):
            self.history.violated(f"{total} tokens are said to be in the model after {self.agenda.now:.0f} s")

    def _check_nothing_lost(self, leavers: list[SimWorker]) -> None:
        """Every step of a process that ended cleanly has been applied, or it is known why not. (A process that resumed
        from a saved state has steps of the one before it, which may have given them up since.)"""
        known = self.history.gone.union(self.history.applied, *(w.discarded | w.abandoned for w in self.everyone))
        for worker in leavers:
            vanished = worker.own - known
            if vanished:
                fragment, step = min(vanished)
                self.history.violated(f"step {step} of fragment {fragment} vanished")
