"""DiLoCoClient: the server, by hand. For programs that have pseudo-gradients but no training loop of ours around them.

client = DiLoCoClient("192.168.1.100:8512")
params = client.register("my_worker", {"hostname": "machine-a"})
params = client.submit_pseudogradients("my_worker", pseudograds)      # waits for the round
client.deregister("my_worker")
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from msgspec import UNSET
from torch import Tensor

from ...attached import note_attached
from ...coordination.backoff import Backoff
from ...defaults import JOIN_TIMEOUT_S
from ...errors import ConfigError, ExchangeFailed, TransportError
from ...printable import printable
from ...types import LONGEST_INFO, LONGEST_INFO_NAME, MOST_INFO, WHOLE, InfoValue, Plan, Wishes
from ...wire.http_transport import HttpTransport
from ...wire.transport import Transport
from ..protocol import Agreed, Contribution, Joined, anchors_of
from .exchange import ServerTicket
from .reading import read_model
from .topology import ServerTopology

log = logging.getLogger(__name__)

TRIES = 4
RETRIES = 3
LONGEST_PAUSE_S = 60.0
T = TypeVar("T")


class DiLoCoClient:
    """A pseudo-gradient is `global − local` (the sign of plain SGD's gradient), by parameter name.

    `max_retries`: how often a request that got no answer is sent again, after `retry_delay` seconds, and twice as long
    each time; None = 3 times, and to register for as long as a worker would try (join_timeout). A submit does not count
    its tries: it is the same contribution however often it is sent, and outlasts a restart of the server.
    """

    def __init__(
        self,
        server_addr: str,
        timeout: float = 30.0,
        max_retries: int | None = None,
        retry_delay: float = 1.0,
        *,
        transport: Transport | None = None,
    ) -> None:
        if max_retries is not None and max_retries < 0:
            raise ConfigError(f"max_retries must be >= 0, got {max_retries}")
        if not 0.0 < retry_delay < 3600.0:
            raise ConfigError(f"retry_delay must be a number of seconds > 0, got {retry_delay}")
        note_attached()
        self._transport = transport or HttpTransport(server_addr, timeout_s=timeout)
        self._retries = RETRIES if max_retries is None else max_retries
        self._retry_delay_s = retry_delay
        self._join_timeout_s = JOIN_TIMEOUT_S if max_retries is None else sum(self._pauses())
        self._workers: dict[str, _RegisteredWorker] = {}

    def register(self, worker_id: str, info: Mapping[str, object] | None = None, **wishes: object) -> dict[str, Tensor]:
        """Join and get the global parameters. `info`: what the status is to show of this worker, `hostname` first of
        all. `wishes`: sync_every, codec, num_fragments, if you care."""
        told = dict(info or {})
        hostname = str(told.pop("hostname", socket.gethostname()))
        topology = ServerTopology(
            self._transport,
            worker_id=worker_id,
            instance=secrets.token_hex(8),
            hostname=hostname,
            join_timeout_s=self._join_timeout_s,
            info=as_info(told),
        )
        worker = _RegisteredWorker(topology, topology.join(None, Wishes(**wishes)))  # type: ignore[arg-type]
        self._workers[worker_id] = worker
        return worker.params()

    def plan(self, worker_id: str) -> Plan:
        return self._worker(worker_id).joined.plan

    def submit_pseudogradients(
        self, worker_id: str, pseudograds: Mapping[str, Tensor], *, steps: int = 1, samples: int = 0, tokens: int = 0
    ) -> dict[str, Tensor]:
        """Contribute every fragment to its open round; returns the new global parameters when the rounds close.
        `steps`, `samples` and `tokens`: how much training is in it; the run may weigh by them."""
        worker = self._worker(worker_id)
        work = _TrainingAmount(steps, samples, tokens)
        tickets = [worker.begin(f, pseudograds, work) for f in range(len(worker.anchors))]
        for fragment, ticket in enumerate(tickets):
            worker.settle(fragment, ticket.finish(), pseudograds, work)
        return worker.params()

    def submit_fragment_pseudogradients(
        self,
        worker_id: str,
        fragment_id: int,
        pseudograds: Mapping[str, Tensor],
        *,
        steps: int = 1,
        samples: int = 0,
        tokens: int = 0,
    ) -> dict[str, Tensor]:
        """The same for one fragment. All clients must take the fragments in the same order: one that waits at another
        fragment than the rest keeps them waiting too, until the run's round deadline."""
        worker = self._worker(worker_id)
        if not 0 <= fragment_id < len(worker.anchors):
            raise ConfigError(f"fragment {fragment_id} does not exist: the plan has {len(worker.anchors)}")
        work = _TrainingAmount(steps, samples, tokens)
        ticket = worker.begin(fragment_id, pseudograds, work)
        worker.settle(fragment_id, ticket.finish(), pseudograds, work)
        return dict(worker.anchors[fragment_id].anchor)

    def get_global_params(self, worker_id: str | None = None) -> dict[str, Tensor]:
        """The newest model that the run has agreed on, by every name that it has for its tensors, fp32. Nobody is
        registered, and no round waits for this. With a `worker_id`: what this client holds for that worker."""
        if worker_id is not None:
            return self._worker(worker_id).params()
        transport = self._transport
        if not isinstance(transport, HttpTransport):
            raise ConfigError("without a worker_id the model is read over HTTP: make this client with the address")
        model = self._retried(lambda: read_model(transport))
        assert model is not None, "nothing is known here"
        return {name: t.float() if t.is_floating_point() else t for name, t in model.tensors().items()}

    def heartbeat(self, worker_id: str, steps_per_second: float = 0.0, step: int = 0) -> dict[str, object]:
        """A sign of life. The answer has `status`, `sync_round`, `num_workers` (how many the run reckons with) and
        `num_registered` (how many are live); `recommended_sync_every`, if the run gives this worker a number of steps
        of its own; and `drain` or `sync` with a reason, if it is to finish, or to exchange now."""
        topology = self._worker(worker_id).topology
        self._retried(lambda: topology.heartbeat(step, steps_per_second, None))
        heard, orders = topology.last_heard, topology.orders(at_exchange=False)
        answer: dict[str, object] = {"status": "ok"}
        if heard is not None:  # None: it was taken for dead, and has joined again instead
            counts = {"num_workers": heard.num_workers, "num_registered": heard.num_registered}
            answer["sync_round"] = heard.sync_round
            answer |= {name: count for name, count in counts.items() if count is not UNSET}
        if orders.sync_every is not None:
            answer["recommended_sync_every"] = orders.sync_every
        return answer | {name: why for name, why in (("drain", orders.drain), ("sync", orders.sync)) if why}

    def deregister(self, worker_id: str) -> None:
        self._worker(worker_id).topology.leave("deregistered")
        del self._workers[worker_id]

    def get_status(self) -> dict[str, object]:
        return self._retried(self._transport.status)

    def close(self) -> None:
        self._transport.close()

    def _retried(self, ask: Callable[[], T]) -> T:
        """Repeat a request that gets no answer."""
        for pause_s in self._pauses():
            try:
                return ask()
            except TransportError as error:
                log.warning("%s; trying again in %.1f s", error, pause_s)
                time.sleep(pause_s)
        return ask()

    def _pauses(self) -> list[float]:
        """In seconds, before each further attempt."""
        backoff = Backoff(self._retry_delay_s, LONGEST_PAUSE_S)
        return [backoff.longest_pause_s(failures) for failures in range(self._retries)]

    def _worker(self, worker_id: str) -> _RegisteredWorker:
        worker = self._workers.get(worker_id)
        if worker is None:
            raise ConfigError(f"worker {worker_id!r} is not registered with this client; call register first")
        return worker


def as_info(told: Mapping[str, object]) -> dict[str, InfoValue]:
    """What a worker tells of itself, as it may be kept and shown: a few facts, short, of a kind that every terminal can
    print. A list or a mapping becomes its JSON; what is too long is cut, and what is too much is left out."""
    facts = {
        printable(name[:LONGEST_INFO_NAME])[:LONGEST_INFO_NAME]: _as_fact(value)
        for name, value in list(told.items())[:MOST_INFO]
    }
    if len(told) > MOST_INFO:
        log.warning("of %d facts that a worker tells of itself the first %d are kept", len(told), MOST_INFO)
    return {name: fact for name, fact in facts.items() if name}


def _as_fact(value: object) -> InfoValue:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) <= WHOLE else f"{value:#x}"[:LONGEST_INFO]
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, list | tuple | dict):
        try:
            value = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):  # of something that JSON has no word for: as Python writes it
            value = repr(value)
    return printable(str(value)[:LONGEST_INFO])[:LONGEST_INFO]


@dataclass(frozen=True)
class _TrainingAmount:
    """How much training is in a contribution."""

    steps: int
    samples: int
    tokens: int


class _RegisteredWorker:
    """One registered worker: its place at the server, and the anchors it holds."""

    def __init__(self, topology: ServerTopology, joined: Joined) -> None:
        self.topology = topology
        self.joined = joined
        self.anchors: list[Agreed] = [agreed for _, agreed in anchors_of(topology, joined)]

    def params(self) -> dict[str, Tensor]:
        return {name: theta for agreed in self.anchors for name, theta in agreed.anchor.items()}

    def begin(self, fragment: int, pseudograds: Mapping[str, Tensor], work: _TrainingAmount) -> ServerTicket:
        names = self.joined.plan.fragments[fragment]
        missing = [name for name in names if name not in pseudograds]
        known = {name for fragment_names in self.joined.plan.fragments for name in fragment_names}
        unknown = [name for name in pseudograds if name not in known]
        if missing or unknown:
            raise ConfigError(f"pseudo-gradients do not fit the model: missing {missing[:3]}, unknown {unknown[:3]}")
        version = self.anchors[fragment].version
        deltas = {name: pseudograds[name] for name in names}
        return self.topology.begin(
            Contribution(fragment, version, version, work.steps, work.samples, work.tokens, deltas)
        )

    def settle(self, fragment: int, agreed: Agreed, pseudograds: Mapping[str, Tensor], work: _TrainingAmount) -> None:
        """Take the agreement over. If the round had closed without us, the same steps go into the next one: a rebased
        pseudo-gradient is the same pseudo-gradient."""
        for _ in range(TRIES):
            self.anchors[fragment] = agreed
            if agreed.counted:
                return
            agreed = self.begin(fragment, pseudograds, work).finish()
        if not agreed.counted:
            raise ExchangeFailed(f"fragment {fragment}: {TRIES} rounds closed without this contribution")
        self.anchors[fragment] = agreed
