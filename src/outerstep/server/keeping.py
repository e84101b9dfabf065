"""From a running server to a saved state, and back.

A state is taken between two rounds: θ, T, outer state and ledger of the rounds that have closed. What an open round has
accepted is not in it; its workers keep what they sent until they hold an agreement, and send it again.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from ..config import ServerConfig
from ..coordination.plan import Settled, changed
from ..coordination.remembered import LEAP, Remembered, resume
from ..core.delayed import DelayedNesterov
from ..core.outer import Nesterov, OuterOptimizer
from ..errors import ConfigError, ModelError, PlanMismatch, ServerError
from ..observe import EventLog
from ..types import Plan, Wishes
from .founding import read_codecs
from .model_state import ModelState
from .saved import OptimizerState, SavedState, save_state

if TYPE_CHECKING:
    from .service import ParameterService

log = logging.getLogger(__name__)


class Keeper:
    """Writes states into `save_dir`. A save that fails is news, but no reason to stop training."""

    def __init__(self, config: ServerConfig, events: EventLog) -> None:
        self._config = config
        self._events = events
        self.saved_round = 0
        self.saved_versions: tuple[int, ...] = ()
        self.last = ""  # where the last one lies, or why it does not

    def is_due(self, sync_round: int) -> bool:
        every = self._config.save_every
        return bool(every) and sync_round > self.saved_round and sync_round % every == 0

    def keep(self, state: SavedState, reason: str) -> Path | ServerError:
        config = self._config
        assert config.save_dir is not None
        model_files = Path(config.model_files) if config.model_files is not None else None
        try:
            path = save_state(state, config.save_dir, model_files=model_files, keep=config.keep_saves)
        except (OSError, ModelError) as error:
            log.error("saving failed: %s; the run goes on", error)
            self._events.write("save_failed", reason=reason, why=str(error))
            self.last = f"failed: {error}"
            return ServerError(f"saving failed: {error}", hint="make room in save_dir, then save again")
        log.info("saved round %d as %s", state.round, path)
        self._events.write("save", reason=reason, round=state.round, path=str(path))
        self.last, self.saved_round, self.saved_versions = str(path), state.round, state.versions
        return path


def snapshot(service: ParameterService, remembered: Remembered) -> SavedState:
    """Called in the rounds thread when all rounds that `remembered` knows of are in the model, and no later one is."""
    return SavedState(
        run_id=remembered.run_id,
        params={name: theta for store in service.stores for name, theta in store.params().items()},
        targets={name: target for store in service.stores for name, target in store.down.targets().items()},
        rest=service.model.rest(),
        manifest=service.coordinator.manifest,
        plan=remembered.plan,
        versions=remembered.versions,
        optimizer=_remembered(service.optimizer),
        ledger=remembered.ledger,
        totals=remembered.totals,
        facts=remembered.facts,
    )


def restore(service: ParameterService, saved: SavedState, now: float) -> None:
    """Before anybody has joined."""
    coordinator = service.coordinator
    coordinator.run_id = saved.run_id
    service.model = ModelState({**saved.rest, **saved.params})
    if saved.plan is None or saved.manifest is None:
        service.heritage = saved  # the first worker to join says which of it is trained
        coordinator.total_accepted = int(saved.totals.get("total_submissions", 0))
        return
    plan, settled = _plan_now(service, saved.plan), _settled(saved)
    optimizer = service.make_optimizer(saved.manifest)
    recall(optimizer, saved.optimizer)
    service.found(
        plan=plan,
        settled=settled,
        manifest=saved.manifest,
        versions=saved.versions,
        optimizer=optimizer,
        targets=saved.targets,
    )
    expect_back = service.config.heartbeat_timeout > 0
    resume(coordinator, saved.ledger, saved.totals, saved.facts, now, expect_back=expect_back)
    log.info("resumed run %s at round %d", saved.run_id, saved.round)


def recall(optimizer: OuterOptimizer | DelayedNesterov, saved: OptimizerState, names: set[str] | None = None) -> None:
    """Give the optimizer back what it remembered (of these names). Another kind of optimizer is refused."""
    by_name = {n: entry for n, entry in saved.by_name.items() if names is None or n in names}
    kind = _kind(optimizer)
    if saved.kind not in ("none", "old", kind) and by_name:
        raise ConfigError(
            f"the state was saved with the outer optimizer {saved.kind!r}, now it is {kind!r}; "
            "resume with the same (async_mode, dn_buffer_size, outer_optimizer_factory)"
        )
    if isinstance(optimizer, DelayedNesterov):
        if saved.kind == kind:
            optimizer.load_state_dict({**saved.facts, "tensors": by_name})  # type: ignore[typeddict-item]
        elif by_name:
            log.warning("the imported momentum is of another rule than Delayed Nesterov and was left out")
        return
    if isinstance(optimizer, Nesterov):
        by_name = {name: entry for name, entry in by_name.items() if "momentum_buffer" in entry}
    optimizer.load_state_dict(by_name)


def _remembered(optimizer: OuterOptimizer | DelayedNesterov | None) -> OptimizerState:
    if optimizer is None:
        return OptimizerState("none")
    if isinstance(optimizer, DelayedNesterov):
        state = optimizer.state_dict()
        facts = {"counts": state["counts"], "buffer_size": state["buffer_size"]}
        return OptimizerState(_kind(optimizer), dict(state["tensors"]), facts)
    return OptimizerState(_kind(optimizer), optimizer.state_dict())


def _kind(optimizer: OuterOptimizer | DelayedNesterov) -> str:
    return {"DelayedNesterov": "delayed_nesterov", "Nesterov": "nesterov"}.get(type(optimizer).__name__, "torch")


def _plan_now(service: ParameterService, saved: Plan) -> Plan:
    """The saved plan under today's settings: what was said anew is a change, as far as it can change."""
    wishes = service.config.wishes
    has = {"num_fragments": len(saved.fragments), "codec": saved.codec, "down_codec": saved.down_codec}
    said = {**{name: getattr(wishes, name) for name in has}, "part_size_bytes": service.config.part_size_bytes}
    if said["codec"] is not None:
        said["codec"] = read_codecs(said["codec"], "same")[0].name
    if said["down_codec"] is not None:
        said["down_codec"] = read_codecs(saved.codec, said["down_codec"])[1].name
    for name, value in {**has, "part_size_bytes": saved.part_size_bytes}.items():
        if said[name] not in (None, value):
            raise ConfigError(f"the saved run has {name}={value}, which cannot change; the settings say {said[name]}")
    stated = {n: v for n, v in msgspec.to_builtins(wishes).items() if v is not None and n not in has}
    news = {name: value for name, value in stated.items() if value != getattr(saved, name)}
    for name, value in news.items():
        log.info("the settings change %s of the saved run from %s to %s", name, getattr(saved, name), value)
    try:
        plan = changed(saved, Wishes(**news)) if news else saved
    except PlanMismatch as error:
        raise ConfigError(f"the settings do not fit the saved run: {error.message}") from error
    return replace(
        plan,
        max_staleness=service.coordinator.rules.max_staleness,
        heartbeat_timeout_s=service.config.heartbeat_timeout,
        mode=service.coordinator.rules.mode,
        weight_by=service.config.weight_by,
        dylu=service.config.dylu_enabled,
        revision=plan.revision + LEAP,
    )


def _settled(saved: SavedState) -> Settled:
    facts: dict[str, Any] = saved.facts.get("settled", {})
    try:
        return msgspec.convert(facts, Settled)
    except msgspec.ValidationError as error:
        raise ModelError(f"the saved state does not say how its plan was settled: {error}") from error
