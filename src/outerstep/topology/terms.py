"""What the ranks of a run without a server must agree on, before they begin and before each exchange.

Nobody is there to be asked. So each draws up the run from its own settings and model, all say what they drew up, and
the first difference is refused by name, on every rank alike.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from ..coordination.server.plan import check_manifest, settle
from ..coordination.shared_leases import SharedLeases
from ..coordination.shared_sub_leases import LeaseNews
from ..core.codecs.recipe import Recipe
from ..core.fragments import FragmentManager, check_cycle
from ..core.outer import OuterRule
from ..defaults import PART_SIZE_BYTES
from ..errors import BadRequest, ConfigError, ManifestMismatch, OutOfStep, PlanMismatch
from ..types import Manifest, Plan, WeightBy, Wishes

MAX_STALENESS = 4  # rounds that a worker's own steps may wait, after a wait that was interrupted


class Rank(msgspec.Struct, frozen=True):
    """How a rank introduces itself."""

    worker_id: str
    hostname: str
    pid: int
    run_id: str  # rank 0's is the run's
    size: int
    manifest: Manifest
    plan: Plan
    outer: dict[str, float | bool | str]  # the settings of the outer step, by name
    versions: tuple[int, ...]  # of each fragment: 0, or where a loaded state goes on
    momentum_hash: str

    @property
    def label(self) -> str:
        return f"{self.worker_id} (process {self.pid} on {self.hostname})"


def introduction(worker_id: str, hostname: str, size: int, manifest: Manifest, plan: Plan, rule: OuterRule) -> Rank:
    """Of one that goes on from no state."""
    return Rank(
        worker_id=worker_id,
        hostname=hostname,
        pid=os.getpid(),
        run_id=os.urandom(8).hex(),
        size=size,
        manifest=manifest,
        plan=plan,
        outer=_outer_settings(rule),
        versions=(),
        momentum_hash="",
    )


def _outer_settings(rule: OuterRule) -> dict[str, float | bool | str]:
    if rule.own is not None:
        return {"outer_optimizer": rule.own.name}
    return {"outer_lr": rule.lr, "outer_momentum": rule.momentum, "nesterov": rule.nesterov}


def draw_up(wishes: Wishes, weight_by: WeightBy, manifest: Manifest, worker_id: str) -> Plan:
    """The plan of a run that only workers have a say in. Raises ConfigError or PlanMismatch if it cannot be."""
    settled = settle(Wishes(), wishes, worker_id)
    codec = Recipe.parse(settled.codec)
    down = codec.downlink() if settled.down_codec == "same" else Recipe.parse(settled.down_codec)
    for rule in down.rules:
        if rule.codec.needs_feedback:
            raise ConfigError(f"down_codec must send every value, got {rule.codec.name}; int4 is the smallest")
        if rule.feedback:
            raise ConfigError(f"down_codec {settled.down_codec!r}: say +feedback in codec, it holds for both ways")
    check_cycle(settled.sync_every, settled.num_fragments)
    odd = next((spec.name for spec in manifest.parameters if spec.role == "server"), None)
    if odd is not None:
        raise ConfigError(
            f"buffers='server' needs a server, and {odd!r} is a buffer: use buffers='average' or buffers='local'"
        )
    return Plan(
        sync_every=settled.sync_every,
        codec=codec.name,
        down_codec=down.name,
        fragments=tuple(map(tuple, FragmentManager(manifest.parameters, settled.num_fragments).fragments)),
        part_size_bytes=PART_SIZE_BYTES,
        max_staleness=MAX_STALENESS,
        heartbeat_timeout_s=0.0,
        delay=settled.delay,
        alpha=settled.alpha,
        carry=settled.carry,
        weight_by=weight_by,
    )


def check_loaded(plan: Plan, versions: Sequence[int], names: Collection[str]) -> None:
    """Is a loaded state, with these versions and tensors, of this model and cut in the same way?"""
    missing = [name for fragment in plan.fragments for name in fragment if name not in names]
    if missing or len(versions) != len(plan.fragments):
        raise ConfigError(
            f"the loaded state has {len(versions)} fragments and this run {len(plan.fragments)}; of this model it "
            f"lacks {', '.join(missing[:3]) or 'nothing'}: load a state of the same model and num_fragments"
        )


def check_loaded_table(leases: SharedLeases, kept: Mapping[str, Any] | None) -> None:
    """Is the lease table of a loaded state one that these members can go on from?"""
    try:
        leases.check(kept)
    except BadRequest as error:
        raise ConfigError(
            f"the loaded state does not fit: {error.message}; load a state of the same data, or give the new data "
            "another name"
        ) from error


def check_terms(ranks: Sequence[Rank]) -> None:
    """Refuse what is not the same everywhere, naming the first rank that differs from rank 0, and in what."""
    for number, other in enumerate(ranks[1:], 1):
        check_pair(ranks[0], other, f"ranks 0 and {number}", ("rank 0", f"rank {number}"))


def check_pair(first: Rank, other: Rank, both: str, names: tuple[str, str]) -> None:
    """The same of two of them, and what to call them."""
    try:
        check_manifest(first.manifest, other.manifest)
    except ManifestMismatch as error:
        raise ManifestMismatch(
            f"{both} hold different models; {names[1]} against {names[0]}: " + error.message.partition(": ")[2],
            hint=f"all {names[0].split()[0]}s must build the same model, in the same dtype",
        ) from None
    for what, ours, theirs in _differences(first, other):
        raise PlanMismatch(
            f"{both} want different runs: {what} is {ours} on {names[0]}, {theirs} on {names[1]}",
            hint=f"give every {names[0].split()[0]} the same {what}",
        )


def _differences(first: Rank, other: Rank) -> list[tuple[str, object, object]]:
    ours, theirs = (
        {
            **msgspec.structs.asdict(one.plan),
            **one.outer,
            "versions (of the loaded state)": one.versions,
            "momentum (of the loaded state)": one.momentum_hash,
        }
        for one in (first, other)
    )
    every = {**ours, **theirs}
    return [(what, ours.get(what), theirs.get(what)) for what in every if ours.get(what) != theirs.get(what)]


class ExchangeHeader(msgspec.Struct, frozen=True):
    """What a rank is about to exchange. `last`: it is at the end of its training; `started_over`: it has dropped steps
    since its last exchange. `data`: digest of the leased units that end in it, each of which each rank has trained its
    part of, and of what the rank says of its data. `news`: of the first rank of a cluster, what the layer above says of
    it."""

    fragment: int
    base_version: int
    steps: int
    samples: int
    tokens: int
    last: bool
    started_over: bool = False
    data: str = ""
    news: tuple[LeaseNews, ...] = ()


def check_headers(headers: Sequence[ExchangeHeader]) -> None:
    """Is everybody about to exchange the same? (At the end a rank may have skipped steps, whose gradients overflowed. A
    rank that started over has dropped some.)"""
    counts_steps = not any(header.last or header.started_over for header in headers)
    for rank, other in enumerate(headers):
        if _subject(other) != _subject(headers[0]) or (counts_steps and other.steps != headers[0].steps):
            raise OutOfStep(
                f"the ranks are not at the same step: rank 0 offers {_shown(headers[0])}, rank {rank} {_shown(other)}; "
                "all ranks must take the same number of optimizer steps, and force_sync() and the end of training must "
                "come after the same one"
            )


def _subject(header: ExchangeHeader) -> tuple[object, ...]:
    """What must be the same on all ranks in any case."""
    return header.fragment, header.base_version, header.last, header.data


def _shown(header: ExchangeHeader) -> str:
    end = " at the end of its training" if header.last else ""
    data = f" with units {header.data[:8]}" if header.data else ""
    return f"fragment {header.fragment} after {header.steps} steps on version {header.base_version}{data}{end}"
