"""The layer below a leader, made of a server and its workers. The record is in the run's folder, moves in its journal.

above.safetensors    the leader's record, next to the run's other files
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from torch import Tensor

from ..coordination.autoconfig.collected import facts_of_cluster
from ..coordination.layers.between import LayerTerms
from ..coordination.server.claims import ClaimedWork
from ..errors import OuterstepError
from ..events import Event, VersionPublished, WorkerDied, WorkerLeft
from ..server import DiLoCoServer
from ..server.outer_state import PROBE, momentum_of
from ..server.service import ParameterService
from ..server.store import FragmentStore
from ..types import Control, Manifest, MemberFacts
from .below import Hearing, NotKept
from .state_file import read_state, write_state

STATE_FILE = "above.safetensors"
LOOK_S = 0.5


class ServersLeases:
    """(`LeasesBelow`.)"""

    def __init__(self, service: ParameterService) -> None:
        self.leases, self.change = service.coordinator.leases, service.change_leases


class ServerBelow:
    """(`Below`.) Without a folder there is no record: after a restart, such a cluster starts from the layer above."""

    record_may_be_old = False

    def __init__(self, server: DiLoCoServer) -> None:
        self._service = server.service
        self.data = ServersLeases(server.service)
        folder = server.service.writer.folder
        self._file: Path | None = folder.place / STATE_FILE if folder is not None else None
        self._leader: Hearing | None = None
        self._is_new = False

    @property
    def terms(self) -> LayerTerms:
        run = self._service.run
        momentum = momentum_of(run.optimizer or run.make_optimizer(run.config, PROBE))
        return LayerTerms(
            momentum=math.nan if momentum is None else momentum,
            waits_s=run.config.heartbeat_timeout_s or math.inf,
            deadline_s=self._service.coordinator.rules.round_deadline_s,
        )

    @property
    def manifest(self) -> Manifest:
        manifest = self._service.coordinator.manifest
        assert manifest is not None, "the run has not begun"
        return manifest

    @property
    def fragments(self) -> Sequence[Collection[str]]:
        plan = self._service.coordinator.plan
        assert plan is not None, "the run has not begun"
        return plan.fragments

    # --- what happens in the run; in its server's threads -------------------------------------------------------------

    def begin(self, leader: Hearing) -> None:
        self._leader = leader
        self._service.events.add(self._heard)
        with self._service.changed:
            if self._service.coordinator.plan is None:
                self._service.run.on_open, self._is_new = self._began, True
        if self._service.coordinator.plan is not None:
            self._service.between_rounds(self._began)

    def _heard(self, event: Event) -> None:
        assert self._leader is not None
        if isinstance(event, VersionPublished) and event.agreement.participants:
            self._leader.round_closed(event.agreement.fragment)
        elif isinstance(event, WorkerLeft | WorkerDied) and not self._service.coordinator.members.live_ids:
            self._leader.emptied()

    def _began(self) -> None:
        """Give the leader T. In a new run that is the initial model, so the cluster's first contribution contains
        everything that members learned before the cluster joined."""
        assert self._leader is not None
        if self._service.coordinator.naming is not None:  # the trained names may still change
            self._leader.cannot(
                "its first worker, an older client, sent no manifest; let an outerstep worker join first"
            )
            return
        target: dict[str, Tensor] = {}
        for store in self._service.stores:
            target |= store.targets_on_host()
        versions = {store.index: store.state.version for store in self._service.stores}
        self._leader.began(target, is_new=self._is_new, versions=versions)
        self._service.run.on_published = self._published

    def _published(self, store: FragmentStore) -> None:
        assert self._leader is not None
        self._leader.published(store.targets_on_host(), {store.index: store.state.version})

    # --- what the leader asks for ------------------------------------------------------------------------------------

    def keep(self, record: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        try:
            write_state(self._file, record)
        except OSError as error:
            raise NotKept(f"the cluster's state cannot be written: {error}") from error

    def kept(self) -> dict[str, Any] | None:
        return read_state(self._file) if self._file is not None else None

    def moves_known(self) -> dict[int, int]:
        return {f: fragment.upper_version for f, fragment in enumerate(self._service.coordinator.fragments)}

    def joined(self, *, overtaken: bool) -> None:
        """Nothing to do: the run's journal shows what each worker has sent."""

    def move(
        self, serial: int, fragments: Collection[int], moved: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
    ) -> None:
        for published in [self._service.move_from_above(fragment, serial, moved) for fragment in fragments]:
            while not published.wait(LOOK_S):
                if self._service.failure:
                    raise OuterstepError(f"the cluster's server has failed: {self._service.failure}")

    def version(self) -> int:
        with self._service.changed:
            return self._service.coordinator.fragments[0].published.version

    def rounds_since(self, version: int) -> int:
        return self._service.coordinator.fragments[0].staleness(version)

    def done(self) -> ClaimedWork:
        return self._service.coordinator.fragments[0].done

    def facts(self) -> MemberFacts:
        """What the leader reports to the layer above."""
        with self._service.changed:
            coordinator = self._service.coordinator
            members = [member for member in coordinator.members if member.live]
            facts = facts_of_cluster(members, coordinator.plan)
            lives = {member.worker_id: member.life for member in members}
            states = (str(life.place) if (life := lives[name]) is not None else "" for name in facts.members)
            return replace(facts, states=tuple(states))

    def hold(self, limit_s: float) -> None:
        self._service.coordinator.withheld_until = self._service.clock() + limit_s

    def release(self) -> None:
        with self._service.changed:
            self._service.coordinator.withheld_until = 0.0
            self._service.wake_polls()

    def name_leader(self, name: str) -> None:
        """Nothing to do: the server leads, and its workers do not know the layer above."""

    def shut_down(self, reason: str) -> None:
        self._service.answer(Control(kind="shutdown", reason=reason))
