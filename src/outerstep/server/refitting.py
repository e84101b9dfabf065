"""Settle what a run trains that has begun without a manifest (coordination/server/naming.py): the model is cut again,
all but the fragments that somebody has named.

The rounds thread rests meanwhile, and the lock is held: what it does next, and every message, sees the new cut. Nothing
is lost by it. A fragment that nobody has named has taken nothing in.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from msgspec.structs import replace as replace_fields

from ..coordination.server.naming import Naming, fitting, same_fragments, stated
from ..coordination.server.plan import Settled, changed, settle_again
from ..errors import ConfigError, PlanMismatch
from ..types import Join, Manifest, Plan, Wishes
from .model_state import ModelState
from .outer_state import recall, state_of
from .run import Run, base_sync_every, check_wished_codecs, draw_up, fragment_of
from .store import FragmentStore

log = logging.getLogger(__name__)

CHANGEABLE = ("sync_every", "codec", "delay", "alpha", "carry")  # of a plan, by an operator's order


def settle_by_manifest(run: Run, request: Join) -> None:
    """The first worker with a manifest joins clients that had none: it settles what they left open."""
    offered, (plan, manifest, settled, naming) = request.manifest, _standing(run)
    assert offered is not None
    named = plan.fragments[: naming.named]
    model = _whole(run).named_for([spec.name for spec in offered.parameters], offered.aliases)
    model.check(offered, _untrained(run, named, naming))
    fixed = ("codec", "down_codec", *(("num_fragments",) if naming.whole else ())) if named else ()
    settled = settle_again(
        settled,
        run.config.wishes,
        request.wishes,
        request.worker_id,
        base_sync_every=base_sync_every(run.config),
        fixed=fixed,
    )
    offered = fitting(manifest, [name for names in named for name in names], offered, whole=naming.whole)
    if named:
        parameters = sum(spec.role == "parameter" for spec in offered.parameters)
        settled = replace(settled, num_fragments=_count(settled, named, parameters))
    try:
        check_wished_codecs(run.config, request.wishes)
        _refit(run, model, offered, settled, named, None, said=request.wishes)
    except ConfigError as error:
        raise PlanMismatch(str(error)) from error
    log.info("%s settles what is trained: %d tensors", request.worker_id, len(offered.parameters))


def settle_by_submission(run: Run, fragment: int | None, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """A client that brought no manifest has sent these tensors: they are what is trained there. False: they are not of
    this model, or cannot be cut like that; then nothing is settled, and the submission does not fit."""
    plan, manifest, settled, naming = _standing(run)
    named, model = plan.fragments[: naming.named], _whole(run)
    taken = {name for names in named for name in names}
    if not named:
        model = model.named_for(list(shapes))
    said = stated(model.manifest(), shapes, model.counters())
    names = tuple(spec.name for spec in said.parameters) if said is not None else ()
    if said is None:
        return False
    if fragment is None:
        if not taken <= set(names):
            return False
        settled = replace(settled, num_fragments=_count(settled, named, len(names)))
        naming = replace(naming, named=settled.num_fragments, whole=True)
    else:
        if taken & set(names) or (fragment >= settled.num_fragments and not _is_default(settled)):
            return False
        if named:
            aliases = {**manifest.aliases, **said.aliases}
            said = Manifest(parameters=manifest.parameters + said.parameters, aliases=aliases)
        if _is_default(settled):
            settled = replace(settled, num_fragments=fragment + 1)
        named, naming = (*named, names), replace(naming, named=fragment + 1)
    try:
        _refit(run, model, said, settled, named, naming, count=None if fragment is None else len(named))
    except (ConfigError, PlanMismatch) as error:
        log.warning("a submission does not settle what is trained: %s", error)
        return False
    log.info("a client's submission settles what is trained: %d tensors", len(said.parameters))
    return True


def recut(
    run: Run, stores: list[FragmentStore], before: tuple[Plan, Manifest], after: tuple[Plan, Manifest], first: int
) -> list[FragmentStore]:
    """The stores of the plan that came after, all but those that are the same. The model has the values of the rest."""
    kept = 0
    if before[0].down_codec == after[0].down_codec:
        kept = same_fragments((before[0].fragments, before[1]), (after[0].fragments, after[1]))
    return run.make_stores(*after, (first,) * len(after[0].fragments), kept=stores[:kept])


def _refit(
    run: Run,
    model: ModelState,
    manifest: Manifest,
    settled: Settled,
    named: Sequence[Sequence[str]],
    naming: Naming | None,
    said: Wishes = Wishes(),  # noqa: B008 - frozen
    count: int | None = None,
) -> None:
    """`count`: so many fragments for now, as far as they are named."""
    coordinator, (plan, has, _, standing) = run.coordinator, _standing(run)
    made = draw_up(run.config, replace(settled, num_fragments=count or settled.num_fragments), manifest, named)
    made = replace_fields(made, part_size_bytes=plan.part_size_bytes)  # what was published is cut so
    if named or coordinator.next_plan is not None:  # an operator may have changed it
        before = coordinator.next_plan or plan
        stays = {what: getattr(before, what) for what in CHANGEABLE if getattr(said, what) is None}
        made = replace_fields(made, **stays)
    made = changed(replace_fields(made, revision=(coordinator.next_plan or plan).revision), Wishes())
    optimizer = run.make_optimizer(run.config, manifest)
    recall(optimizer, state_of(run.optimizer), {spec.name for spec in manifest.parameters})
    had, run.model = run.model, model
    try:
        stores = recut(run, run.stores, (plan, has), (made, manifest), standing.first)
    except BaseException:
        run.model = had
        raise
    kept = sum(store in run.stores for store in stores)
    run.optimizer, run.stores = optimizer, stores
    fragments = [fragment_of(store) for store in stores[kept:]]
    coordinator.refit(plan=made, settled=settled, manifest=manifest, fragments=fragments, naming=naming, kept=kept)
    model.forget_trained(manifest)
    run.take_device()


def _standing(run: Run) -> tuple[Plan, Manifest, Settled, Naming]:
    coordinator = run.coordinator
    assert coordinator.plan is not None
    assert coordinator.manifest is not None
    assert coordinator.settled is not None
    assert coordinator.naming is not None
    return coordinator.plan, coordinator.manifest, coordinator.settled, coordinator.naming


def _whole(run: Run) -> ModelState:
    assert run.coordinator.manifest is not None
    trained = {name: theta for store in run.stores for name, theta in store.params().items()}
    return run.model.with_lent(trained, run.coordinator.manifest)


def _untrained(run: Run, named: Sequence[Sequence[str]], naming: Naming) -> set[str]:
    """What nobody has moved: if it is tied to something that was, it has other values by now."""
    if not named and not naming.imported:
        return set()
    moved = {name for names in named for name in names} | set(state_of(run.optimizer).by_name)
    return {spec.name for spec in _whole(run).manifest().parameters} - moved


def _count(settled: Settled, named: Sequence[Sequence[str]], tensors: int) -> int:
    """How many fragments there are: as was said; else so many that each is as long as the first that was named."""
    left = tensors - sum(map(len, named))
    if not named or (not _is_default(settled) and settled.num_fragments > len(named)):
        return settled.num_fragments
    return max(len(named) + 1, -(-tensors // len(named[0]))) if left else len(named)


def _is_default(settled: Settled) -> bool:
    """Has nobody said how many fragments there are?"""
    return settled.said_by.get("num_fragments") == "the default"
