"""DiLoCoClient: the server, by hand. For programs that have pseudo-gradients but no training loop of ours around them.

client = DiLoCoClient("192.168.1.100:8512")
params = client.register("my_worker", {"hostname": "machine-a"})
params = client.submit_pseudogradients("my_worker", pseudograds)      # waits for the round
client.deregister("my_worker")
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ...attached import note_attached
from ...errors import ConfigError, ExchangeFailed
from ...types import Plan, Wishes
from ...wire.http_transport import HttpTransport
from ...wire.transport import Transport
from ..protocol import Agreed, Contribution, Joined, anchors_of
from .exchange import ServerTicket
from .topology import ServerTopology

TRIES = 4


class DiLoCoClient:
    """A pseudo-gradient is `global − local` (the sign of plain SGD's gradient), by parameter name."""

    def __init__(self, server_addr: str, *, timeout: float = 30.0, transport: Transport | None = None) -> None:
        note_attached()
        self._transport = transport or HttpTransport(server_addr, timeout_s=timeout)
        self._seats: dict[str, _Seat] = {}

    def register(self, worker_id: str, info: Mapping[str, object] | None = None, **wishes: object) -> dict[str, Tensor]:
        """Join and get the global parameters. `wishes`: sync_every, codec, num_fragments, if you care."""
        hostname = str((info or {}).get("hostname", socket.gethostname()))
        topology = ServerTopology(
            self._transport, worker_id=worker_id, instance=secrets.token_hex(8), hostname=hostname
        )
        seat = _Seat(topology, topology.join(None, Wishes(**wishes)))  # type: ignore[arg-type]
        self._seats[worker_id] = seat
        return seat.params()

    def plan(self, worker_id: str) -> Plan:
        return self._seat(worker_id).joined.plan

    def submit_pseudogradients(
        self, worker_id: str, pseudograds: Mapping[str, Tensor], *, steps: int = 1, samples: int = 0, tokens: int = 0
    ) -> dict[str, Tensor]:
        """Contribute every fragment to its open round; returns the new global parameters when the rounds close.
        `steps`, `samples` and `tokens`: how much training is in it; the run may weigh by them."""
        seat = self._seat(worker_id)
        work = _Work(steps, samples, tokens)
        tickets = [seat.begin(f, pseudograds, work) for f in range(len(seat.anchors))]
        for fragment, ticket in enumerate(tickets):
            seat.settle(fragment, ticket.finish(), pseudograds, work)
        return seat.params()

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
        seat = self._seat(worker_id)
        if not 0 <= fragment_id < len(seat.anchors):
            raise ConfigError(f"fragment {fragment_id} does not exist: the plan has {len(seat.anchors)}")
        work = _Work(steps, samples, tokens)
        ticket = seat.begin(fragment_id, pseudograds, work)
        seat.settle(fragment_id, ticket.finish(), pseudograds, work)
        return dict(seat.anchors[fragment_id].anchor)

    def get_global_params(self, worker_id: str) -> dict[str, Tensor]:
        """The newest global parameters this client holds for `worker_id`."""
        return self._seat(worker_id).params()

    def heartbeat(self, worker_id: str, steps_per_second: float = 0.0, step: int = 0) -> int | None:
        """A sign of life. Returns how many steps to take between exchanges, if the run gives each worker its own."""
        topology = self._seat(worker_id).topology
        topology.heartbeat(step, steps_per_second, None)
        return topology.orders(at_exchange=False).sync_every

    def deregister(self, worker_id: str) -> None:
        self._seat(worker_id).topology.leave("deregistered")
        del self._seats[worker_id]

    def get_status(self) -> dict[str, object]:
        return self._transport.status()

    def close(self) -> None:
        self._transport.close()

    def _seat(self, worker_id: str) -> _Seat:
        seat = self._seats.get(worker_id)
        if seat is None:
            raise ConfigError(f"worker {worker_id!r} is not registered with this client; call register first")
        return seat


@dataclass(frozen=True)
class _Work:
    """How much training is in a contribution."""

    steps: int
    samples: int
    tokens: int


class _Seat:
    """One registered worker: its place at the server, and the anchors it holds."""

    def __init__(self, topology: ServerTopology, joined: Joined) -> None:
        self.topology = topology
        self.joined = joined
        self.anchors: list[Agreed] = [agreed for _, agreed in anchors_of(topology, joined)]

    def params(self) -> dict[str, Tensor]:
        return {name: theta for agreed in self.anchors for name, theta in agreed.anchor.items()}

    def begin(self, fragment: int, pseudograds: Mapping[str, Tensor], work: _Work) -> ServerTicket:
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

    def settle(self, fragment: int, agreed: Agreed, pseudograds: Mapping[str, Tensor], work: _Work) -> None:
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
