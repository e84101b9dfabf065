"""What the server trains: a model until the first worker joins; then a plan, and the fragments that hold the model."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import torch
from msgspec import UNSET
from msgspec.structs import replace
from torch import Tensor

from ..config import ServerConfig
from ..coordination.server.coordinator import Coordinator
from ..coordination.server.naming import Naming
from ..coordination.server.plan import Settled, settle
from ..coordination.server.remembered import Remembered
from ..coordination.server.rounds import Fragment
from ..core.codecs.recipe import Recipe
from ..core.delayed import DelayedNesterov
from ..core.fragments import FragmentManager, check_cycle
from ..errors import ConfigError, PlanMismatch
from ..lanes import part_size
from ..observe.status import AboveStatus
from ..pool import private_memory
from ..threads import ThreadTeam, process_team
from ..types import Control, Join, Manifest, Plan, Wishes
from .decoding import Decoders
from .model_state import ModelState
from .outer_state import OptimizerMaker, Outer, momentum_of, recall, state_of
from .places import device_of, free_bytes, pinned_memory, release, working_bytes
from .saved import ServerState
from .store import SLACK_BYTES, FragmentStore, Shelf, rule_of

log = logging.getLogger(__name__)


def read_codecs(up: str, down: str) -> tuple[Recipe, Recipe]:
    """What the two settings mean. Raises ConfigError if one of them means nothing."""
    codec = Recipe.parse(up)
    if down == "same":
        return codec, codec.downlink()
    down_codec = Recipe.parse(down)
    for rule in down_codec.rules:
        if rule.codec.needs_feedback:
            raise ConfigError(f"down_codec must send every value, got {rule.codec.name}; int4 is the smallest")
        if rule.feedback:
            raise ConfigError(f"down_codec {down!r}: leave +feedback out, the server always keeps what it left out")
    return codec, down_codec


def check_wished_codecs(config: ServerConfig, wishes: Wishes) -> None:
    """A worker may choose among the codecs that train; those for experiments are the operator's."""
    for name, flag in (("codec", "--codec"), ("down_codec", "--down-codec")):
        wished = getattr(wishes, name)
        if getattr(config, name) is None and wished not in (None, "same") and (coarse := Recipe.parse(wished).coarse):
            raise PlanMismatch(
                f"a worker's {name} must be one to train with, got {wished!r}: {coarse} is too coarse",
                hint=f"if that is meant, start the server with {flag} {wished}",
            )


def draw_up(config: ServerConfig, settled: Settled, manifest: Manifest, named: Sequence[Sequence[str]] = ()) -> Plan:
    """What was settled, applied to this model. `named`: the first fragments, as others have cut them. Raises
    ConfigError if it cannot be."""
    codec, down_codec = read_codecs(settled.codec, settled.down_codec)
    check_cycle(settled.sync_every, settled.num_fragments)
    fragments = FragmentManager(
        manifest.parameters,
        settled.num_fragments,
        strategy=config.fragment_strategy,
        embeddings_apart=config.embeddings_apart,
        named=named,
    ).fragments
    return Plan(
        sync_every=settled.sync_every,
        codec=codec.name,
        down_codec=down_codec.name,
        fragments=tuple(tuple(names) for names in fragments),
        part_size_bytes=config.part_size_bytes or part_size(largest_contribution(manifest, fragments, codec)),
        max_staleness=config.rules.max_staleness,
        heartbeat_timeout_s=config.heartbeat_timeout_s,
        round_deadline_s=UNSET if config.round_deadline_s is None else config.round_deadline_s,
        mode=config.rules.mode,
        delay=settled.delay,
        alpha=settled.alpha,
        carry=settled.carry,
        tokenizer=settled.tokenizer,
        weight_by=config.weight_by,
        dylu=config.dylu,
    )


def largest_contribution(manifest: Manifest, fragments: Sequence[Sequence[str]], codec: Recipe) -> int:
    """In bytes, of one fragment."""
    sizes = {spec.name: codec.codec(spec).encoded_bytes(spec.numel) for spec in manifest.parameters}
    return max((sum(sizes[name] for name in names) for names in fragments), default=0)


def check_room(config: ServerConfig, plan: Plan, manifest: Manifest) -> None:
    """The deterministic mode adds nothing before a round closes, and a rule that compares contributions needs them all:
    those of everybody must have room until then, or the last would wait for the first and the first for the last."""
    size = contribution_bytes(plan.codec, manifest)
    needed, room = config.num_workers * size, config.room_bytes
    keeps = "deterministic" if config.deterministic else f"aggregation {config.combining.name!r}"
    if (config.deterministic or not config.combining.is_plain) and needed > room:
        raise ConfigError(
            f"{keeps} keeps all contributions until their round closes: {config.num_workers} workers with {size} "
            f"bytes each need {needed}, pool_bytes and spool_bytes make {room}; raise spool_bytes"
        )


def contribution_bytes(codec: str, manifest: Manifest) -> int:
    """To the whole model, without headers."""
    recipe = Recipe.parse(codec)
    return sum(recipe.codec(spec).encoded_bytes(spec.numel) for spec in manifest.parameters)


@dataclass
class FromAbove:
    """An agreement of a layer above, on its way into the model: `move(T)` is T′, by name. It is asked for between two
    rounds, so it is told where T is then."""

    move: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
    published: threading.Event = field(default_factory=threading.Event)


@dataclass
class Run:
    """`imported`: a state that waits for the manifest of the first worker, which says what of it is trained."""

    config: ServerConfig
    coordinator: Coordinator
    model: ModelState
    make_optimizer: OptimizerMaker
    optimizer: Outer | None = None
    stores: list[FragmentStore] = field(default_factory=list)
    imported: ServerState | None = None
    from_above: dict[int, FromAbove] = field(default_factory=dict)  # what a layer above has agreed on, by fragment
    describe_above: Callable[[], AboveStatus | None] = lambda: None  # the layer above, if there is one
    _contribution_bytes: tuple[str, int, int] | None = None  # of this codec and manifest
    on_open: Callable[[], None] = lambda: None  # the plan is fixed, and no round has closed since
    device_left: str = ""  # why the fragments are not on the device that the settings name
    on_device_left: Callable[[str], None] = lambda why: None
    on_published: Callable[[FragmentStore], None] = lambda store: None  # there is a new version; T stays meanwhile

    @cached_property
    def decoders(self) -> Decoders:
        """For contributions to any fragment."""
        return Decoders()

    @cached_property
    def team(self) -> ThreadTeam:
        """What works on the fragments' blocks."""
        return process_team() if self.config.threads is None else ThreadTeam(self.config.threads)

    @cached_property
    def device(self) -> torch.device | None:
        """Where the fragments are to be, if not in host memory. Refused, if there is no such device here."""
        return device_of(self.config.device)

    @property
    def device_name(self) -> str:
        """Where they are."""
        return self.config.device if self.device is not None and not self.device_left else "cpu"

    @property
    def memory(self) -> Callable[[int], memoryview]:
        """What makes memory for contributions."""
        return private_memory if self.device is None else pinned_memory

    def take_device(self) -> None:
        """Bring the fragments to where the settings want them, if there is room. Between two rounds."""
        device = self.device
        new = [store for store in self.stores if store.place.is_host]
        if device is None or self.device_left or not new:
            return
        needed = sum(store.device_bytes(_remembered(self.optimizer)) for store in new)
        needed += working_bytes(is_plain=self.config.combining.is_plain)
        free = free_bytes(device)
        if needed > free:
            why = f"the run needs {needed >> 20} MiB of memory on {self.config.device}, {free >> 20} MiB are free"
            self._leave_device(why)
            return
        try:
            for store in new:
                store.to_device(device)
        except torch.OutOfMemoryError as error:
            self._leave_device(str(error))
            return
        log.info("the model is on %s: up to %d MiB of its memory", self.config.device, needed >> 20)

    def _leave_device(self, why: str) -> None:
        """For all fragments: what one of them left has no room for the others. Until the next start."""
        if self.device_left or self.device is None:
            return
        self.device_left = why
        for store in self.stores:
            store.to_host()
        release(self.device)
        log.warning("%s is left, the server works on the CPU from now on: %s", self.config.device, why)
        self.on_device_left(why)

    def start(self, request: Join) -> None:
        """The first worker is here: its model and its wishes settle what the settings left open. If it brings no
        manifest, everything is trained until somebody says otherwise."""
        config, imported = self.config, self.imported
        settled = settle(config.wishes, request.wishes, request.worker_id, base_sync_every=base_sync_every(config))
        brought, model, untrained = request.manifest, self.model, set[str]()
        if brought is not None:
            model = model.named_for([spec.name for spec in brought.parameters], brought.aliases)
        if imported is not None:
            untrained = imported.params.keys() - imported.optimizer.by_name.keys()
        manifest = brought or model.manifest()
        model.check(manifest, untrained)
        before, self.model = self.model, model
        first = imported.round if imported is not None else 0
        try:
            check_wished_codecs(config, request.wishes)
            plan = draw_up(config, settled, manifest)
            optimizer = self.make_optimizer(config, manifest)
            if imported is not None:
                recall(optimizer, imported.optimizer, {spec.name for spec in manifest.parameters})
            stores = self.make_stores(plan, manifest, (first,) * len(plan.fragments))
        except ConfigError as error:
            self.model = before
            raise PlanMismatch(str(error)) from error
        naming = None if brought is not None else Naming(first, imported=imported is not None)
        self.open(plan, settled, manifest, optimizer, stores, naming)
        self.imported = None  # it is in the stores now; a second copy would only take room

    def pool_memory_bytes(self) -> int:
        """For contributions, before they go to the spool file: by default two fit, so that one may come while the other
        is added. More would make what the server needs grow with the number of workers."""
        config, plan, manifest = self.config, self.coordinator.plan, self.coordinator.manifest
        if config.pool_bytes is not None or not config.spool_bytes or plan is None or manifest is None:
            return config.least_pool_bytes
        if self._contribution_bytes is None or self._contribution_bytes[:2] != (plan.codec, id(manifest)):
            self._contribution_bytes = plan.codec, id(manifest), contribution_bytes(plan.codec, manifest)
        return max(2 * (self._contribution_bytes[2] + SLACK_BYTES), config.least_pool_bytes)

    def read_order(self, order: Control) -> Control:
        """An operator's order, with the canonical name of the codec that it wishes. Refused, if there is no such codec
        here, or no room for it."""
        wished, coordinator = order.changes.codec, self.coordinator
        if order.kind != "plan" or wished is None:
            return order
        try:
            codec, _ = read_codecs(wished, "same")
            if coordinator.plan is not None and coordinator.manifest is not None:
                check_room(self.config, replace(coordinator.plan, codec=codec.name), coordinator.manifest)
        except ConfigError as error:
            raise PlanMismatch(f"codec cannot be {wished!r} in this run: {error}") from error
        return replace(order, changes=replace(order.changes, codec=codec.name))

    def make_stores(
        self,
        plan: Plan,
        manifest: Manifest,
        versions: Sequence[int],
        targets: Mapping[str, Tensor] | None = None,
        statistics: Mapping[int, Mapping[str, Tensor]] | None = None,
        centre: Mapping[str, Tensor] | None = None,
        kept: Sequence[FragmentStore] = (),
    ) -> list[FragmentStore]:
        """The model, cut as the plan says, each fragment at its version. `kept`: the first of them, as they are."""
        config = self.config
        check_room(config, plan, manifest)
        up, down = Recipe.parse(plan.codec), Recipe.parse(plan.down_codec)
        specs = {spec.name: spec for spec in manifest.parameters}
        initial, shelf = self.model.initial(manifest), Shelf()
        stores = [
            FragmentStore(
                i,
                [specs[name] for name in names],
                initial,
                up,
                down,
                plan.part_size_bytes,
                version=version,
                max_staleness=plan.max_staleness,
                run_id=self.coordinator.run_id,
                targets=targets,
                statistics=statistics,
                shelf=shelf,
                keeps_centre=rule_of(config.combining).needs_centre,
                centre=centre,
                team=self.team,
                on_full=self._leave_device,
                decoders=self.decoders,
            )
            for i, (names, version) in enumerate(zip(plan.fragments, versions, strict=True))
            if i >= len(kept)
        ]
        for store in stores:
            store.down.follows_means = config.combining.aggregation == "mean"
        return [*kept, *stores]

    def open(
        self,
        plan: Plan,
        settled: Settled,
        manifest: Manifest,
        optimizer: Outer,
        stores: list[FragmentStore],
        naming: Naming | None = None,
    ) -> None:
        """From now on there is something to contribute to."""
        self.optimizer, self.stores = optimizer, stores
        self.coordinator.outer_momentum = momentum_of(optimizer)
        fragments = [fragment_of(store) for store in stores]
        self.coordinator.fix(plan=plan, settled=settled, manifest=manifest, fragments=fragments, naming=naming)
        self.model.forget_trained(manifest)
        self.take_device()
        _return_free_memory()
        self.on_open()

    def snapshot(self, remembered: Remembered) -> ServerState:
        """Between two rounds: all rounds that `remembered` knows of are in the model, and no later one is."""
        statistics: dict[int, dict[str, Any]] = {}
        for store in self.stores:
            for version, values in store.statistics.items():
                statistics.setdefault(version, {}).update(values)
        return ServerState(
            run_id=remembered.run_id,
            params={name: theta for store in self.stores for name, theta in store.params().items()},
            targets={name: target for store in self.stores for name, target in store.down.targets().items()},
            statistics=statistics,
            centre={name: values.cpu() for store in self.stores for name, values in store.centre.items()},
            rest=self.model.rest(),
            manifest=self.coordinator.manifest,
            plan=remembered.plan,
            versions=remembered.versions,
            optimizer=state_of(self.optimizer).on_host(),
            ledger=remembered.ledger,
            totals=remembered.totals,
            facts={
                **remembered.facts,
                "watched": [msgspec.to_builtins(s.newest.agreement.watched) for s in self.stores],
            },
        )


def _remembered(optimizer: Outer | None) -> int:
    """How many values of each the outer rule remembers, at most."""
    return 2 if isinstance(optimizer, DelayedNesterov) else 1


def fragment_of(store: FragmentStore) -> Fragment:
    return Fragment.at(store.newest.agreement, store.max_payload_bytes, store.max_sections, 4 * store.numel)


def base_sync_every(config: ServerConfig) -> int | None:
    return config.dylu_base_sync_every if config.dylu else None


def _return_free_memory() -> None:
    """What was freed stays with the process, for the thread that had it: after the model was copied to where it will
    live, that may be as much as the model. (With the C library of Linux; elsewhere nothing happens.)"""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
