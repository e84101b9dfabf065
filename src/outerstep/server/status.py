"""What a server says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version

from ..coordination.server.coordinator import Coordinator
from ..coordination.server.membership import KnownWorker
from ..coordination.server.remembered import changes_in
from ..coordination.server.rounds import Fragment, TokenBudget
from ..core.delayed import DelayedNesterov
from ..durable.journal import Journal
from ..events import known
from ..observe.status import (
    DataStatus,
    PlanStatus,
    QuarantineStatus,
    ServerFragmentStatus,
    ServerStatus,
    TokensStatus,
    WorkerStatus,
)
from ..types import Plan, plan_of
from .controlling import clusters_of, layer_of, links_of_run
from .intake import Intake
from .persistence import RunWriter
from .run import Run

VERSION = version("outerstep")  # read once: it is in a file, and the status is made with the lock held


def _tokens(budget: TokenBudget) -> TokensStatus:
    left_s = budget.seconds_left
    return TokensStatus(
        total=budget.total,
        budget=budget.limit,
        per_second=round(budget.per_second, 3),
        seconds_left=None if left_s is None else round(left_s, 1),
    )


def _quarantine(member: KnownWorker, now: float) -> QuarantineStatus | None:
    if not member.conduct.is_quarantined(now):
        return None
    return QuarantineStatus(left_s=round(member.conduct.until - now, 1), reason=member.conduct.reason)


def _journal(journal: Journal | None) -> dict[str, int] | None:
    if journal is None:
        return None
    records, size_bytes = journal.behind(0)
    return {"last": journal.last, "records": records, "size_bytes": size_bytes}


def _buffered_pushes(run: Run) -> int:
    """How many pushes Delayed Nesterov holds back: the most of any fragment."""
    optimizer = run.optimizer
    if not isinstance(optimizer, DelayedNesterov):
        return 0
    return max((optimizer.buffered(store.index) for store in run.stores), default=0)


def _own_steps(plan: Plan | None, member: KnownWorker) -> int | None:
    return plan_of(plan, member.worker_id).sync_every if plan is not None else None


def _closes_in_s(coordinator: Coordinator, fragment: Fragment, now: float) -> float | None:
    at = coordinator.verdict(fragment, now).wake_at
    return None if at is None else round(max(at - now, 0.0), 1)


def build_status(
    run: Run,
    intake: Intake,
    writer: RunWriter,
    now: float,
    *,
    started_at: float,
    failure: str,
    trouble: str,
    bytes_sent: int,
    readers: int,
    addresses: Mapping[str, str],
) -> ServerStatus:
    """Called with the service's lock held."""
    coordinator, config = run.coordinator, run.config
    plan, settled = coordinator.plan, coordinator.settled
    pending = sorted({p.worker_id for f in coordinator.fragments for p in f.round.participants})
    return ServerStatus(
        outerstep=VERSION,
        run_id=coordinator.run_id,
        mode=coordinator.rules.mode,
        uptime_s=round(now - started_at, 1),
        failure=failure,
        trouble=trouble,
        above=run.describe_above(),
        device=run.device_name,
        device_left=run.device_left,
        durability=config.keeps,
        save_dir=config.save_dir,
        journal=_journal(writer.journal),
        last_save=writer.last_save,
        started=coordinator.started,
        closing=coordinator.closing,
        sync_round=coordinator.sync_round,
        num_workers=config.num_workers,
        min_workers=coordinator.rules.floor,
        heartbeat_timeout=config.heartbeat_timeout_s,
        total_worker_deaths=coordinator.members.total_deaths,
        total_submissions=coordinator.total_accepted,
        pending_submissions=pending,
        quorum=coordinator.rules.quorum,
        grace_period=config.grace_s,
        dn_buffer_size=config.delayed_nesterov,
        dn_buffered=_buffered_pushes(run),
        dylu_enabled=config.dylu,
        dylu_base_sync_every=config.dylu_base_sync_every or (plan.sync_every if plan else None),
        max_staleness=coordinator.rules.max_staleness,
        weight_by=config.weight_by,
        norm_screen=config.norm_screen,
        aggregation=coordinator.rules.aggregation.name,
        rounds_too_few=coordinator.total_too_few,
        losses=[float(f"{loss:.6g}") for loss in coordinator.losses],
        tokens=_tokens(coordinator.budget),
        num_parameters=sum(spec.numel for spec in coordinator.manifest.parameters) if coordinator.manifest else None,
        bytes_received=intake.bytes_received,
        bytes_sent=bytes_sent,
        readers=readers,
        clusters=clusters_of(coordinator, addresses),
        links=links_of_run(coordinator, intake.meter, now),
        layer=layer_of(coordinator.steering),
        data=[
            DataStatus(**table.progress(coordinator.members.live_ids, coordinator.now))
            for table in coordinator.leases.tables.values()
        ],
        pool_held_bytes=coordinator.uploads.held_bytes,
        pool_memory_bytes=intake.pool.memory_bytes,
        pool_spooled_bytes=intake.pool.spooled_bytes,
        pool_queue=coordinator.uploads.queued,
        plan=None
        if plan is None or settled is None
        else PlanStatus(
            sync_every=plan.sync_every,
            codec=plan.codec,
            down_codec=plan.down_codec,
            num_fragments=len(plan.fragments),
            fragment_delay=plan.delay,
            fragment_alpha=plan.alpha,
            fragment_carry=plan.carry,
            revision=changes_in(plan.revision),
            said_by=settled.said_by,
        ),
        workers={
            member.worker_id: WorkerStatus(
                state=str(member.life.place) if member.life is not None else "",
                hostname=member.hostname,
                incarnation=member.incarnation,
                protocol=member.protocol,
                step=member.step,
                steps_per_second=member.steps_per_second,
                loss=member.loss,
                sync_every=coordinator.local_steps(member)
                or (plan_of(plan, member.worker_id).sync_every if plan else None),
                staleness=member.staleness,
                contributions=member.contributions,
                bytes_received=member.bytes_received,
                tokens=member.tokens,
                commands=[command.kind for command in member.commands.values()],
                delta_norm=member.delta_norm,
                left_out=member.left_out,
                offences=member.conduct.total,
                quarantine=_quarantine(member, now),
                last_seen_s=round(now - member.last_seen, 1),
                joined_s=round(now - member.joined_at, 1),
                info=member.info,
            )
            for member in coordinator.members
            if member.live
        },
        fragments=[
            ServerFragmentStatus(
                version=fragment.published.version,
                anchor_hash=fragment.published.anchor_hash,
                last_participants=[p.worker_id for p in fragment.published.participants],
                watched=known(fragment.published.watched) if fragment.published.watched is not None else {},
                contributed=sorted(fragment.round.contributors),
                expected=sorted(fragment.round.expected),
                waiting_for=coordinator.waiting_for(fragment, now),
                closes_in_s=_closes_in_s(coordinator, fragment, now),
            )
            for fragment in coordinator.fragments
        ],
    )
