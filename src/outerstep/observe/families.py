"""Metrics of a server or a peer: each a name, a sentence and its samples, made from a status.

`prometheus.py` writes them as text. One place names them all, by Prometheus'
rules: base units as suffixes, `_total` for what only grows. Labels are bounded: so many workers, fragments and links
have samples of their own, whatever the status lists, and `outerstep_samples_left_out` says how many have not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ..events import mean_loss
from .sinks import EventCounts
from .status import LinkStatus, MemberStatus, PeerStatus, ServerStatus, Status, WorkerStatus

Kind = Literal["counter", "gauge"]
Labels = tuple[tuple[str, str], ...]
MOST_WORKERS = 512
MOST_FRAGMENTS = 256
MOST_LINKS = 512
STATES_OF_CONNECTIONS = ("open", "strangers")  # how many there are; what else a port counts has only grown


@dataclass(frozen=True)
class Family:
    """A metric with all its samples."""

    name: str
    kind: Kind
    help: str
    samples: tuple[tuple[Labels, float], ...]


class _Families:
    """Collects them. A value that is not known makes no sample, and a family without samples is none."""

    def __init__(self) -> None:
        self.found: list[Family] = []

    def add(self, kind: Kind, name: str, help_: str, samples: Iterable[tuple[Labels, float | None]]) -> None:
        known = tuple(
            (labels, float(value)) for labels, value in samples if value is not None and not math.isnan(value)
        )
        if known:
            self.found.append(Family(f"outerstep_{name}", kind, help_, known))

    def gauge(self, name: str, help_: str, value: float | None) -> None:
        self.add("gauge", name, help_, [((), value)])

    def counter(self, name: str, help_: str, value: float | None) -> None:
        self.add("counter", name, help_, [((), value)])


def families_of(
    status: ServerStatus | PeerStatus, counts: EventCounts, lost: Mapping[str, int] | None = None
) -> list[Family]:
    """All metrics of a server, or of a peer. `lost`: what loggers could not write, by their names."""
    made = _Families()
    _shared(made, status, counts)
    if isinstance(status, ServerStatus):
        _server(made, status, counts)
    else:
        _peer(made, status)
    made.add("counter", "logger_points_lost_total", "What a logger could not write.", _by("logger", lost or {}))
    left_out = max(len(status.participants) - MOST_WORKERS, 0) + max(len(status.fragments) - MOST_FRAGMENTS, 0)
    if isinstance(status, ServerStatus):
        left_out += max(len(_ends(status.links)) - MOST_LINKS, 0)
    made.gauge("samples_left_out", "Workers, fragments and links that have no samples because they are many.", left_out)
    return made.found


def _shared(made: _Families, status: Status, counts: EventCounts) -> None:
    version = status.outerstep if isinstance(status, ServerStatus) else ""
    info = (("mode", status.mode), ("run_id", status.run_id), ("version", version))
    made.add("gauge", "run_info", "Which run this is; the value is 1.", [(info, 1.0)])
    made.gauge("uptime_seconds", "Seconds since this process began to serve.", status.uptime_s)
    made.gauge("failed", "1 if it has stopped for good and must be restarted.", bool(status.failure))
    made.gauge("troubled", "1 if rounds wait until something works again, usually the disk.", bool(status.trouble))
    made.counter("received_bytes_total", "Bytes of contributions that came in.", status.bytes_received)
    made.counter("sent_bytes_total", "Bytes of agreements and models that went out.", status.bytes_sent)
    shown = list(status.fragments)[:MOST_FRAGMENTS]
    versions = [((("fragment", str(i)),), fragment.version) for i, fragment in enumerate(shown)]
    made.add("gauge", "fragment_version", "The newest agreement on each fragment.", versions)
    _members(made, dict(list(status.participants.items())[:MOST_WORKERS]))
    states, grown = dict[str, int](), dict[str, int]()
    for reason, count in status.connections.items():
        (states if reason in STATES_OF_CONNECTIONS else grown)[reason] = count
    made.add("gauge", "connections", "Connections of the port, by state.", _by("state", states))
    made.add("counter", "connections_closed_total", "Connections closed or refused, by reason.", _by("reason", grown))
    made.add("counter", "events_total", "Events since this start, by kind.", _by("event", counts.events))
    made.add("counter", "refusals_total", "Refused requests and contributions, by code.", _by("code", counts.refusals))


def _members(made: _Families, members: Mapping[str, MemberStatus]) -> None:
    def each(kind: Kind, name: str, help_: str, values: Mapping[str, float | None]) -> None:
        made.add(kind, f"worker_{name}", help_, [((("worker", who),), value) for who, value in values.items()])

    each("gauge", "loss", "The loss that a worker last reported.", {who: one.loss for who, one in members.items()})
    steps = {who: one.step for who, one in members.items()}
    each("counter", "steps_total", "Optimizer steps that a worker has taken.", steps)
    speeds = {who: one.steps_per_second or None for who, one in members.items()}
    each("gauge", "steps_per_second", "Optimizer steps a second, over training time only.", speeds)
    seen = {who: one.last_seen_s for who, one in members.items()}
    each("gauge", "last_seen_seconds", "Seconds since a worker was heard from.", seen)
    workers = {who: one for who, one in members.items() if isinstance(one, WorkerStatus)}
    if not workers:
        return
    counters = {
        "contributions_total": ("Contributions accepted from a worker.", "contributions"),
        "received_bytes_total": ("Bytes of a worker's accepted contributions.", "bytes_received"),
        "tokens_total": ("Tokens that a worker's contributions count for.", "tokens"),
        "left_out_total": ("Contributions of a worker that a screen or a rule left out.", "left_out"),
        "offences_total": ("Offences of a worker (see screens in the documentation).", "offences"),
    }
    for name, (help_, field) in counters.items():
        each("counter", name, help_, {who: getattr(one, field) for who, one in workers.items()})
    stale = {who: one.staleness for who, one in workers.items()}
    each("gauge", "staleness_rounds", "How many rounds old a worker's last contribution was.", stale)
    norms = {who: one.delta_norm for who, one in workers.items()}
    each("gauge", "pseudo_gradient_norm", "Norm of a worker's last contribution.", norms)
    held = {who: float(one.quarantine is not None) for who, one in workers.items()}
    each("gauge", "quarantined", "1 while a worker is in quarantine.", held)


def _server(made: _Families, status: ServerStatus, counts: EventCounts) -> None:
    made.gauge("workers", "Workers that are here.", len(status.workers))
    made.gauge("workers_at_start", "Workers that the first round waits for (-n).", status.num_workers)
    made.gauge("heartbeat_timeout_seconds", "Silence after which a worker counts as dead.", status.heartbeat_timeout)
    made.gauge("closing", "1 if the run is coming to its end.", bool(status.closing))
    made.counter("rounds_total", "Rounds that every fragment has completed, over all starts.", status.sync_round)
    made.counter("contributions_total", "Contributions accepted since this start.", status.total_submissions)
    made.counter(
        "worker_deaths_total", "Workers that fell silent and were counted as dead.", status.total_worker_deaths
    )
    made.counter("rounds_too_few_total", "Rounds that moved nothing: too few had trained.", status.rounds_too_few)
    made.counter("round_wait_seconds_total", "Seconds that first contributions waited for the last.", counts.waited_s)
    made.counter("round_bytes_total", "Bytes of the contributions of all rounds since this start.", counts.round_bytes)
    made.gauge("loss", "Mean of the losses that the workers last reported.", _loss(status))
    made.counter("tokens_total", "Tokens in the model.", status.tokens.total)
    made.gauge("tokens_per_second", "How fast tokens come into the model.", status.tokens.per_second)
    made.gauge("token_budget", "Tokens at which the run ends.", status.tokens.budget)
    made.gauge("token_budget_left_seconds", "Seconds until the budget is spent.", status.tokens.seconds_left)
    made.gauge("pool_held_bytes", "Room that unfinished contributions have.", status.pool_held_bytes)
    made.gauge("pool_memory_bytes", "How much of it is in memory.", status.pool_memory_bytes)
    made.gauge("pool_spooled_bytes", "How much of it is in the spool file.", status.pool_spooled_bytes)
    made.gauge("pool_queue", "Contributions that wait for room.", status.pool_queue)
    made.gauge("model_readers", "Readers of the model at this moment.", status.readers)
    journal = status.journal or {}
    made.gauge("journal_records", "Records in the journal since the last checkpoint.", journal.get("records"))
    made.gauge("journal_bytes", "Size of the journal.", journal.get("size_bytes"))
    if status.plan is not None:
        made.gauge("sync_every_steps", "H: local steps between two exchanges.", status.plan.sync_every)
        made.counter("plan_changes_total", "How often the plan was changed.", status.plan.revision)
    _rounds(made, status)
    _links(made, status.links)
    if status.layer is not None:
        target, expected = status.layer.target_utilization, status.layer.utilization
        made.gauge("utilization_target_ratio", "Share of the time that is to be spent on training.", target)
        made.gauge("utilization_expected_ratio", "Share that the controller expects.", expected)
    if status.above is not None:
        above = status.above
        made.gauge("above_joined", "1 if this cluster has joined the layer above.", above.joined)
        made.gauge("above_failed", "1 if this cluster is on its own for good.", bool(above.failure))
        made.counter("above_exchanges_total", "Exchanges with the layer above.", above.exchanges)
        made.counter("above_sent_bytes_total", "Bytes sent to the layer above.", above.bytes_sent)
        made.counter("above_received_bytes_total", "Bytes received from the layer above.", above.bytes_received)


def _loss(status: ServerStatus) -> float | None:
    return mean_loss(worker.loss for worker in status.workers.values())


def _rounds(made: _Families, status: ServerStatus) -> None:
    shown = list(enumerate(status.fragments))[:MOST_FRAGMENTS]

    def each(name: str, help_: str, values: Mapping[int, float | None]) -> None:
        made.add("gauge", name, help_, [((("fragment", str(i)),), value) for i, value in values.items()])

    each(
        "round_contributors",
        "Workers whose contribution is in the open round.",
        {i: len(f.contributed) for i, f in shown},
    )
    each(
        "round_expected",
        "Workers that the open round waits for, those in it included.",
        {i: len(f.expected) for i, f in shown},
    )
    watched = {
        "aggregated_gradient_norm": ("Norm of the last aggregate.", "aggregated_grad_norm"),
        "gradient_similarity": ("Mean cosine between two contributions of the last round.", "peer_grad_similarity"),
        "weight_divergence": ("Variance of the weights between the workers before they agreed.", "weight_divergence"),
    }
    for name, (help_, field) in watched.items():
        each(name, help_, {i: f.watched.get(field) for i, f in shown})


def _links(made: _Families, links: Iterable[LinkStatus]) -> None:
    shown = list(_ends(links).items())[:MOST_LINKS]
    rates = [((("source", ends[0]), ("target", ends[1])), link.bytes_per_s) for ends, link in shown]
    made.add("gauge", "link_bytes_per_second", "Measured rate of a link, one direction.", rates)
    delays = [((("source", ends[0]), ("target", ends[1])), link.latency_s) for ends, link in shown]
    made.add("gauge", "link_latency_seconds", "Measured latency of a link.", delays)


def _ends(links: Iterable[LinkStatus]) -> dict[tuple[str, str], LinkStatus]:
    """Both ends may have measured it: the newest holds."""
    return {(link.source, link.target): link for link in sorted(links, key=lambda one: -one.age_s)}


def _peer(made: _Families, status: PeerStatus) -> None:
    made.gauge("peers", "Members of the run.", len(status.members))
    made.gauge("peers_silent", "Members that are silent.", len(status.silent))
    made.gauge("peers_expelled", "Peers that are excluded.", len(status.expelled))
    made.gauge("peers_lying", "Peers against which this one holds a proof.", len(status.proven_to_lie))
    made.gauge("member", "1 if this peer belongs to the run.", status.is_member)
    made.gauge("short_of_peers", "1 if too few are present to decide anything.", status.is_short_of_peers)
    made.counter("blocks_total", "Blocks that this peer knows.", status.height)
    made.counter("nonsense_total", "What others said, answered or sent that cannot be.", sum(status.refused.values()))
    made.gauge("held_bytes", "Contributions in memory.", status.held_bytes)
    made.gauge("spooled_bytes", "Contributions on disk.", status.spooled_bytes)
    made.counter("conversations_total", "Conversations with other peers.", status.conversations)


def _by(label: str, counts: Mapping[str, int]) -> list[tuple[Labels, float | None]]:
    return [(((label, name),), float(count)) for name, count in sorted(counts.items())]
