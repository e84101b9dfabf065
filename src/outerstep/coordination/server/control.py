"""What an operator may ask of a run, and what comes of it."""

from __future__ import annotations

import msgspec

from ...errors import BadRequest, UnknownWorker
from ...types import Control, ControlAnswer, Plan, Wishes
from .coordinator import BUDGET_SPENT, Coordinator
from .membership import Member
from .plan import changed


def carry_out(coordinator: Coordinator, message: Control, now: float) -> ControlAnswer:
    """Everything but `save`, which is the driver's own business."""
    match message.kind:
        case "kick":
            member = _live(coordinator, message)
            kick(coordinator, member, message.reason, now)
            return ControlAnswer(done=f"{member.worker_id} is out of the run; a new start of it may join again")
        case "pardon":
            member = pardon(coordinator, message)
            return ControlAnswer(done=f"{member.worker_id} has a clean sheet, and takes part from the next round on")
        case "drain" | "sync":
            workers = _those(coordinator, message)
            coordinator.order(workers, message.kind, message.reason or "an operator asked for it")
            what = "contribute and leave" if message.kind == "drain" else "contribute"
            return ControlAnswer(done=f"{', '.join(workers)} will {what} at the next step after the next heartbeat")
        case "plan":
            if coordinator.plan is None:
                raise BadRequest("there is no plan to change before the first worker has joined")
            plan = change_plan(coordinator, coordinator.plan, message.changes)
            return ControlAnswer(done=f"plan revision {plan.revision} holds from the next round that closes")
        case "budget":
            coordinator.budget.limit = message.tokens or None
            coordinator.budget.announced = False
            if coordinator.closing == BUDGET_SPENT:
                coordinator.closing, coordinator.stop_at = "", None
                coordinator.commands.withdraw(BUDGET_SPENT)
            coordinator.check_budget(now)
            limit = f"ends at {message.tokens} tokens" if message.tokens else "has no end"
            return ControlAnswer(done=f"the run {limit}; {coordinator.budget.total} are in the model")
        case "shutdown":
            coordinator.finish(message.reason or "an operator asked for it", now)
            coordinator.stop_if_done(now)
            return ControlAnswer(done="the workers will contribute and leave, then the server stops")
        case "save":
            raise BadRequest("save is carried out by the server itself")


def kick(coordinator: Coordinator, member: Member, reason: str, now: float) -> None:
    member.kicked = reason or "an operator removed it"
    coordinator.remove(member, now, "kick", reason=reason)


def pardon(coordinator: Coordinator, message: Control) -> Member:
    """Nothing is held against it any more. It need not be here at the moment."""
    if message.worker_id is None:
        raise BadRequest(f"pardon needs a worker id; live: {_names(coordinator)}")
    member = coordinator.members.find(message.worker_id)
    if member is None:
        raise UnknownWorker(f"no worker {message.worker_id!r} is known; live: {_names(coordinator)}")
    offences = member.conduct.total
    member.conduct.clear()
    coordinator.event("pardon", worker=member.worker_id, offences=offences, reason=message.reason)
    return member


def change_plan(coordinator: Coordinator, plan: Plan, changes: Wishes) -> Plan:
    """It holds from the next round that closes on; workers get it with that round's agreement."""
    coming = changed(coordinator.next_plan or plan, changes)
    coordinator.next_plan = coming
    stated = {name: value for name, value in msgspec.to_builtins(changes).items() if value is not None}
    coordinator.event("plan", revision=coming.revision, **stated)
    return coming


def _live(coordinator: Coordinator, message: Control) -> Member:
    if message.worker_id is None:
        raise BadRequest(f"{message.kind} needs a worker id; live: {_names(coordinator)}")
    member = coordinator.members.find(message.worker_id)
    if member is None or not member.live:
        raise UnknownWorker(f"no live worker {message.worker_id!r}; live: {_names(coordinator)}")
    return member


def _those(coordinator: Coordinator, message: Control) -> list[str]:
    """The worker that is named, or all."""
    if message.worker_id is not None:
        return [_live(coordinator, message).worker_id]
    everybody = sorted(coordinator.members.live_ids)
    if not everybody:
        raise UnknownWorker("no worker is live")
    return everybody


def _names(coordinator: Coordinator) -> str:
    return ", ".join(sorted(coordinator.members.live_ids)) or "none"
