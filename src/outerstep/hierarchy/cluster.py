"""A cluster: a server and its workers that together are one worker of the layer above.

    with DiLoCoServer(…) as server, Cluster(server, above="10.0.0.1:8512", name="east"):
        server.wait()

The server *is* the cluster's leader: it alone speaks to the layer above, from a thread of its own. Its workers need not
know. Their rounds can go on without it: a contribution to the layer above is a copy, and what is agreed there enters as
a version of its own between two of their rounds (shadow.py has the arithmetic, docs/concepts/hierarchy.md the picture).
For their own good they wait for it, up to a limit: the round after which the cluster exchanges is told to its members
together with what comes of that, so that they take their next steps from there.

If the server is restarted, the cluster resumes as a worker does. What it needs is in its run's folder, written before
each offer and before each move from above:

    above.safetensors    the worker's state; S; and, where S ≠ B, B and the serial number that this move has

A move that the run's journal knows by its serial number is in T; any other is made again. So a contribution counts once
and an agreement moves T once, whenever the process dies.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..coordination.server.claims import NOTHING
from ..coordination.worker.exchange import Patience
from ..errors import ConfigError, Fenced, Kicked, OuterstepError
from ..events import Event, VersionPublished, WorkerDied, WorkerLeft
from ..observe.status import AboveStatus
from ..security import redact
from ..server import DiLoCoServer
from ..server.store import FragmentStore
from ..topology.payload import KEPT, Memory
from ..topology.server.build import OTHER_CONNECTIONS
from ..topology.server.topology import ServerTopology
from ..types import Control, Manifest
from ..wire.http_transport import HttpTransport
from ..wire.transport import Transport
from ..worker import DiLoCoWorker
from .offers import UpwardTopology
from .shadow import RoundsTaken, Shadow
from .state_file import read_state, write_state

log = logging.getLogger(__name__)

STATE_FILE = "above.safetensors"
LOOK_S = 0.5
AGAIN_S = 5.0  # after the layer above, or the disk, was not there
NEVER = 1 << 30
EXIT_PATIENCE_S = 60.0
WAIT_S = 60.0


class Cluster:
    """`above`: the address or join string of the server above. `name`: of this cluster there, for as long as the run
    lasts. `every`: rounds of this cluster between two exchanges up there; None = as that run's plan says. `wait_s`: how
    long members wait for an exchange up there before they take their next steps; 0 = not at all."""

    def __init__(
        self,
        server: DiLoCoServer,
        above: str,
        name: str,
        *,
        every: int | None = None,
        wait_s: float = WAIT_S,
        credentials: str | None = None,
        transport: Transport | None = None,
        patience: Patience | None = None,
    ) -> None:
        """`transport`, `patience`: another way up than HTTP, for tests."""
        self._server, self._service, self.name = server, server.service, name
        self._above, self._every, self._credentials, self._transport = above, every, credentials, transport
        self._patience = patience or Patience(give_up_after_s=float(NEVER))
        folder = server.service.writer.folder
        self._file: Path | None = folder.place / STATE_FILE if folder is not None else None
        self._news = threading.Condition()
        self._stopping = False
        self._wait_s, self._may_wait, self._deferred = wait_s, True, 0
        self._is_empty = False  # the last worker has left
        self._is_new = False  # the cluster's run begins in this process
        self._rounds = self._seen = 0  # closed since this process began; and of those, steps of the worker above
        self._counted = NOTHING  # what the members had done at the last of them
        self._serial = 1  # of the next move from above
        self._moved: dict[int, int] = {}  # by fragment of the cluster: the last that is in T
        self._version = 0  # of the cluster's first fragment: the rounds up to it are steps of the worker above
        self._shadow: Shadow | None = None
        self._worker: DiLoCoWorker | None = None
        self._topology: UpwardTopology | None = None
        self.failure = ""  # why the cluster is on its own
        self._thread = threading.Thread(target=self._live, name="outerstep-cluster", daemon=True)

    def __enter__(self) -> Cluster:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> Cluster:
        self._service.events.add(self._heard)
        self._service.run.describe_above = self.describe
        with self._service.changed:
            if self._service.coordinator.plan is None:
                self._service.run.on_open, self._is_new = self._copy, True
        if self._service.coordinator.plan is not None:
            self._service.between_rounds(self._copy)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Contribute what is left, take over what is agreed, leave the layer above. Before the server stops."""
        with self._news:
            self._stopping = True
            self._news.notify_all()
        self._thread.join()

    @property
    def worker(self) -> DiLoCoWorker | None:
        """What the cluster is to the layer above; None before it has joined."""
        return self._worker

    def describe(self) -> AboveStatus:
        """For the server's status."""
        worker = self._worker
        facts: dict[str, Any] = worker.sync_metrics if worker is not None else {}
        return AboveStatus(
            cluster=self.name,
            address=redact(self._above),
            joined=worker is not None and not self.failure,
            versions=facts.get("versions", []),
            exchanges=facts.get("sync_count", 0),
            missed_rounds=facts.get("missed_rounds", 0),
            bytes_sent=facts.get("bytes_sent", 0),
            bytes_received=facts.get("bytes_received", 0),
            failure=self.failure,
        )

    # --- what happens in the cluster; in its server's threads --------------------------------------------------------

    def _heard(self, event: Event) -> None:
        if isinstance(event, VersionPublished) and event.agreement.participants and event.agreement.fragment == 0:
            with self._news:
                self._hold_back()
                self._rounds += 1
                self._is_empty = False
                self._news.notify_all()
        elif isinstance(event, WorkerLeft | WorkerDied) and not self._service.coordinator.members.live_ids:
            with self._news:
                self._is_empty = True
                self._news.notify_all()

    def _hold_back(self) -> None:
        """If this round is the one after which the cluster exchanges above, its members wait for what comes of that,
        up to a limit: steps that are taken meanwhile would be steps from weights that are about to move."""
        worker = self._worker
        if (
            worker is None
            or not self._wait_s
            or not self._may_wait
            or self._seen < self._rounds
            or not worker.exchanges_next
        ):
            return
        self._service.coordinator.withheld_until = self._service.clock() + self._wait_s

    def _release(self, worker: DiLoCoWorker) -> None:
        """The exchange is over, or there was none. If nobody answered, the members do not wait for the next one."""
        facts: dict[str, Any] = worker.sync_metrics
        deferred = facts["offline_exchanges"]
        self._may_wait, self._deferred = deferred == self._deferred, deferred
        with self._service.changed:
            self._service.coordinator.withheld_until = 0.0
            self._service.changed.notify_all()

    def _copy(self) -> None:
        """T as it is now; from here on it is told of every version. In a new run that is the model it begins with: what
        the members learn before the cluster has joined goes up with its first contribution."""
        manifest = self._service.coordinator.manifest
        assert manifest is not None
        if self._service.coordinator.naming is not None:  # what is trained may still change
            self._alone("its first worker brought no manifest (an older client); let an outerstep worker join first")
            return
        target: dict[str, Tensor] = {}
        for store in self._service.stores:
            target |= store.state.target
        with self._news:
            self._shadow = Shadow(manifest, target)
            self._service.run.on_published = self._published
            self._news.notify_all()

    def _published(self, store: FragmentStore) -> None:
        assert self._shadow is not None
        self._shadow.published(store.state.target)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            with self._news:  # until the first worker says what is trained
                self._news.wait_for(lambda: self._stopping or self.failure or self._shadow is not None)
            while not self._stopping and not self.failure and self._worker is None:
                self._try_to_join()
            if self._worker is not None:
                self._train(self._worker)
        except (Fenced, Kicked) as error:
            self._alone(str(error))
        except Exception as error:  # the cluster's own run must go on
            log.exception("the cluster has lost the layer above")
            self._alone(f"{type(error).__name__}: {error}")

    def _alone(self, why: str) -> None:
        self.failure = why
        log.error("cluster %s goes on alone, without the layer above: %s", self.name, why)
        if self._worker is not None:
            self._worker.abandon(why)

    def _try_to_join(self) -> None:
        try:
            self._join()
        except (OuterstepError, OSError) as error:
            if isinstance(error, Fenced | Kicked | ConfigError):
                raise
            log.warning(
                "cluster %s cannot join %s: %s; its own rounds go on, and it tries again", self.name, self._above, error
            )
            with self._news:
                self._news.wait_for(lambda: self._stopping, AGAIN_S)

    def _join(self) -> None:
        manifest, shadow = self._service.coordinator.manifest, self._shadow
        assert manifest is not None
        assert shadow is not None
        saved = self._resume(shadow)
        topology = self._topology = self._connect(manifest)
        worker = DiLoCoWorker(
            shadow,
            RoundsTaken(shadow),
            None,
            self._every,
            self.name,
            topology=topology,
            event_sink=topology.reported,
            buffers="average" if shadow.averaged else "local",
            handle_signals=False,
            stalled_after_s=0.0,
            offline_rounds=NEVER,
            fragment_carry=True,  # what the members do while an agreement is under way is theirs
            exit_patience_s=EXIT_PATIENCE_S,
        )
        worker.on_sent = self._sent
        if saved is not None:
            worker.load_state_dict(saved)
        worker.start()
        self._worker = worker  # from here on what it sends is written down with its state
        if saved is not None and any(fragment["contributions"] for fragment in saved["fragments"]):
            worker.force_sync()  # S is still what was sent: what becomes of that is settled first
        log.info("cluster %s has joined %s", self.name, self._above)
        self._hand_down()
        self._write()

    def _connect(self, manifest: Manifest) -> UpwardTopology:
        transport = self._transport or HttpTransport(
            self._above,
            kept_connections=self._patience.calls_in_flight + OTHER_CONNECTIONS,
            credentials=self._credentials,
        )

        def make(held: Transport) -> ServerTopology:
            return ServerTopology(
                held,
                worker_id=self.name,
                instance=secrets.token_hex(8),
                hostname=socket.gethostname(),
                patience=self._patience,
                memory=Memory(KEPT),
            )

        return UpwardTopology(make, transport, manifest)

    def _train(self, worker: DiLoCoWorker) -> None:
        """As a training loop does; its steps are rounds."""
        assert self._shadow is not None
        assert self._topology is not None
        while not worker.should_stop:
            with self._news:
                self._news.wait_for(lambda: self._stopping or self._is_empty or self._rounds > self._seen, LOOK_S)
                rounds, is_over, is_stopping = self._rounds, self._is_empty, self._stopping
                self._is_empty = False
            if self._seen < rounds:
                self._follow()
                self._count(worker)
                self._step(worker, rounds - self._seen)
                self._seen = rounds
                self._hand_down()
                self._release(worker)
            if is_stopping:
                break
            if is_over and not worker.should_stop:  # nobody trains here: let the others have what there is
                worker.force_sync()
                self._hand_down()
        worker.stop()
        self._hand_down()
        if worker.should_stop:
            log.warning("the layer above has told cluster %s to finish: its workers are told so too", self.name)
            self._service.answer(Control(kind="shutdown", reason="the layer above has ended its run"))

    def _step(self, worker: DiLoCoWorker, rounds: int) -> None:
        """So many rounds have closed since the last look. However many: what they did goes up at once."""
        assert self._topology is not None
        begun = self._topology.begun
        for _ in range(rounds):
            worker.optimizer.step()
            if worker.should_stop or self._topology.begun > begun:
                return

    def _follow(self) -> None:
        assert self._shadow is not None
        with self._service.changed:
            self._version = self._service.coordinator.fragments[0].published.version
        assert self._worker is not None
        with self._worker.own_change():
            self._shadow.follow()

    def _count(self, worker: DiLoCoWorker) -> None:
        """What the members have done, as far as rounds have taken it in."""
        assert self._topology is not None
        before, done = self._counted, self._service.coordinator.fragments[0].done
        self._topology.steps_taken, self._counted = int(done.steps), done
        worker.count(samples=int(done.samples - before.samples), tokens=int(done.tokens - before.tokens))

    # --- down --------------------------------------------------------------------------------------------------------

    def _hand_down(self) -> None:
        """Where agreements from above have moved S, T moves as far, between two rounds: it is a version of its own."""
        shadow, plan = self._shadow, self._service.coordinator.plan
        assert shadow is not None
        assert plan is not None
        moving = {f: names for f, names in enumerate(plan.fragments) if shadow.moved_names(names)}
        if not moving:
            return
        self._write()
        self._move(moving)
        self._follow()

    def _move(self, moving: Iterable[int]) -> None:
        shadow = self._shadow
        assert shadow is not None
        published = {f: self._service.move_from_above(f, self._serial, shadow.moved) for f in moving}
        for fragment, event in published.items():
            while not event.wait(LOOK_S):
                if self._service.failure:
                    raise OuterstepError(f"the cluster's server has failed: {self._service.failure}")
            self._moved[fragment] = self._serial
        self._serial += 1

    # --- what must survive -------------------------------------------------------------------------------------------

    def _sent(self) -> None:
        """A contribution is ready to be offered: first it is made durable."""
        assert self._topology is not None
        self._write()
        self._topology.let_go()

    def _write(self) -> None:
        """Until it is on the disk; the cluster's rounds go on meanwhile."""
        shadow, worker = self._shadow, self._worker
        if self._file is None or shadow is None:
            return
        state = {
            "worker": worker.state_dict() if worker is not None else None,
            "serial": self._serial,
            "moved": self._moved,
            "version": self._version,
            "shadow": dict(shadow.tensors),
            "before": {name: shadow.before[name] for name in shadow.moved_names(shadow.names)},
        }
        while True:
            try:
                write_state(self._file, state)
                return
            except OSError as error:
                log.error("the cluster's state cannot be written: %s; nothing is sent up until it can", error)
            with self._news:
                if self._news.wait_for(lambda: self._stopping, AGAIN_S):
                    return

    def _resume(self, shadow: Shadow) -> dict[str, Any] | None:
        """The worker's state, with S and B as they were; None = it joins anew."""
        saved = read_state(self._file) if self._file is not None else None
        known = {f: fragment.upper_version for f, fragment in enumerate(self._service.coordinator.fragments)}
        self._serial, self._moved = max(known.values()) + 1, known
        if saved is None:
            if self._is_new:
                self._write()  # what its members learn from now on is not lost if it dies before it has joined
            return None
        if saved["shadow"].keys() != set(shadow.names) or any(known[int(f)] < n for f, n in saved["moved"].items()):
            log.warning("the cluster's run is not where it was: it begins with what the layer above has agreed on")
            return None
        with torch.no_grad():
            for name in shadow.names:
                shadow.tensors[name].copy_(saved["shadow"][name])
                shadow.before[name].copy_(saved["before"].get(name, saved["shadow"][name]))
        plan = self._service.coordinator.plan
        assert plan is not None
        for fragment, names in enumerate(plan.fragments):
            if known[fragment] >= saved["serial"]:
                shadow.is_in(names)
        self._version = saved["version"]
        self._rounds += self._service.coordinator.fragments[0].staleness(self._version)
        left = [fragment for fragment, names in enumerate(plan.fragments) if shadow.moved_names(names)]
        if left:  # it died between the two: the move is made now
            self._serial = saved["serial"]
            self._move(left)
            shadow.is_in(shadow.names)
        return dict(saved["worker"]) if saved["worker"] is not None else None
