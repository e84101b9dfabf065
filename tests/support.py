"""What several tests need: tiny models, workers without sockets, jobs in threads, and clients that speak by hand."""

from __future__ import annotations

import dataclasses
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outerstep.coordination.worker.exchange import Patience, Session
from outerstep.core.codecs import Dither, get_codec
from outerstep.digest import part_count, part_hash, part_range, payload_hash
from outerstep.server import DiLoCoServer
from outerstep.topology.encode import encode_frame
from outerstep.topology.server.topology import ServerTopology
from outerstep.types import (
    PROTOCOL_VERSION,
    Agreement,
    Commit,
    ContributionKey,
    GetPart,
    GetPartAnswer,
    Join,
    JoinAnswer,
    Manifest,
    Offer,
    OfferAnswer,
    Payload,
    Poll,
    PollAnswer,
    PutPart,
)
from outerstep.wire.frames import Layout, layout
from outerstep.wire.memory import MemoryTransport
from outerstep.wire.transport import Transport
from outerstep.worker import DiLoCoWorker

EAGER = Patience(first_backoff_s=0.01, longest_backoff_s=0.05, give_up_after_s=30.0, poll_wait_s=0.2)


@dataclass(frozen=True)
class Eights:
    """A codec that sends multiples of eight, so that all arithmetic is on integers and every sum is exact."""

    name: str = "eights"
    block_values: int = 1
    needs_feedback: bool = False

    def encoded_bytes(self, numel: int) -> int:
        return 4 * numel

    def encode(self, values: Tensor, out: Tensor, dither: Dither | None = None) -> None:
        out.view(torch.int32).copy_((values / 8).round())

    def check(self, data: Tensor, numel: int) -> str:
        return ""

    def decode(self, data: Tensor, out: Tensor) -> None:
        out.copy_(data.view(torch.int32)).mul_(8)

    def decode_add(self, data: Tensor, out: Tensor, weight: float = 1.0) -> None:
        out.add_(data.view(torch.int32) * 8 * weight)


_drawing = threading.Lock()


def tiny_model(seed: int = 0) -> nn.Module:
    """The same weights for the same seed, in whichever thread: the generator is one for all of them."""
    with _drawing:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))


def train_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    """Ordinary training on seeded random data."""
    source = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        inputs = torch.randn(8, 6, generator=source)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


class Ledger(nn.Module):
    """Counters. Each step of worker i adds one to cell i: the model shows which steps are in it, and how often."""

    def __init__(self, cells: int = 2) -> None:
        super().__init__()
        self.cells = nn.Parameter(torch.zeros(cells))


class TwoLedgers(nn.Module):
    """The same twice, for a run with two fragments."""

    def __init__(self, cells: int = 2) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(cells))
        self.second = nn.Parameter(torch.zeros(cells))


def count(model: Ledger | TwoLedgers, optimizer: torch.optim.Optimizer, cell: int, steps: int) -> None:
    """`steps` optimizer steps (with lr = 1) that each add one to `cell`."""
    for _ in range(steps):
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
            param.grad[cell] = -1.0
        optimizer.step()


def in_threads(*jobs: Callable[[], Any], timeout_s: float = 120.0) -> list[Any]:
    """Run jobs side by side; their results in order, or the first exception."""
    results: list[Any] = [None] * len(jobs)
    errors: list[BaseException] = []

    def run(i: int, job: Callable[[], Any]) -> None:
        try:
            results[i] = job()
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i, job), daemon=True) for i, job in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a job is still running"
    return results


def wait_until(condition: Callable[[], object], timeout_s: float = 120.0) -> None:
    """However slow the machine is: this is only for what never happens."""
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, "it never happened"
        time.sleep(0.01)


def record_agreements(server: DiLoCoServer) -> list[Agreement]:
    """Every agreement the server publishes from now on, in order."""
    published: list[Agreement] = []
    announce = server.service.coordinator.published

    def record(agreement: Agreement, now: float) -> None:
        published.append(agreement)
        announce(agreement, now)

    server.service.coordinator.published = record  # type: ignore[method-assign]
    return published


class Books:
    """Who was in every round of a run over ledgers, and with how many steps. Worker i of `workers` counts in cell i."""

    def __init__(self, server: DiLoCoServer, workers: Sequence[str]) -> None:
        self._server, self._workers = server, list(workers)
        self._steps: dict[ContributionKey, int] = {}
        self.agreements = record_agreements(server)
        take_offer = server.service.coordinator.offer

        def note(offer: Offer, now: float) -> OfferAnswer:
            self._steps[offer.key] = offer.steps
            return take_offer(offer, now)

        server.service.coordinator.offer = note  # type: ignore[method-assign]

    def steps_of(self, worker: str) -> int:
        """Those in the model, of a run with one fragment."""
        return sum(
            self._steps[key]
            for agreement in self.agreements
            for p in agreement.participants
            for key in self._steps
            if (key.worker_id, key.sequence) == (p.worker_id, p.sequence) == (worker, p.sequence)
        )

    def audit(self, buffer_size: int | None = None) -> dict[str, list[int]]:
        """Each worker's steps that are in the model, by fragment; the model itself must say the same. The outer step is
        "adopt the mean", or with a buffer size Delayed Nesterov without momentum."""
        plan = self._server.service.coordinator.plan
        assert plan is not None
        steps = {worker: [0] * len(plan.fragments) for worker in self._workers}
        expected = {name: [0.0] * len(self._workers) for names in plan.fragments for name in names}
        for agreement in self.agreements:
            total = buffer_size or sum(p.weight for p in agreement.participants)
            for p in agreement.participants:
                key = ContributionKey(
                    run_id=self._server.run_id,
                    worker_id=p.worker_id,
                    fragment=agreement.fragment,
                    sequence=p.sequence,
                )
                steps[p.worker_id][agreement.fragment] += self._steps[key]
                for name in plan.fragments[agreement.fragment]:
                    expected[name][self._workers.index(p.worker_id)] += self._steps[key] * p.weight / total
        assert {name: value.tolist() for name, value in self._server.get_global_params().items()} == expected
        return steps


def memory_topology(
    server: DiLoCoServer, worker_id: str, transport: Transport | None = None, patience: Patience = EAGER
) -> ServerTopology:
    """A worker's way to a server without sockets."""
    return ServerTopology(
        transport or MemoryTransport(server.service),
        worker_id=worker_id,
        instance=secrets.token_hex(8),
        hostname="test",
        patience=patience,
    )


class Relocatable(MemoryTransport):
    """A way to the server that can be pointed at another one."""

    def move(self, server: DiLoCoServer) -> None:
        self._service = server.service


def kill(server: DiLoCoServer) -> None:
    """As if its process had ended between two writes to the disk: nothing more is saved, and its folder is free."""
    service = server.service
    service._ended = True
    service._rounds.stop()
    service.writer.close()


def memory_worker(
    server: DiLoCoServer,
    worker_id: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    transport: Transport | None = None,
    patience: Patience = EAGER,
    **settings: Any,
) -> DiLoCoWorker:
    topology = memory_topology(server, worker_id, transport, patience)
    return DiLoCoWorker(model, optimizer, "memory:1", worker_id=worker_id, topology=topology, **settings)


def intercept(service: Any, handler: Callable[..., Any], by: Callable[..., Any]) -> None:
    """From now on the routes of a service that called `handler` call `by`."""
    for place, route in list(service.routes.items()):
        if route.handler == handler:
            service.routes[place] = dataclasses.replace(route, handler=by)


class HandClient:
    """Speaks the protocol message by message, so that tests can say things a worker never would."""

    def __init__(
        self,
        transport: Transport,
        worker_id: str = "by-hand",
        manifest: Manifest | None = None,
        **said: Any,
    ) -> None:
        """`said`: what else the join says, or says otherwise."""
        self.transport = transport
        facts: dict[str, Any] = {
            "worker_id": worker_id,
            "instance": secrets.token_hex(8),
            "hostname": "test",
            "manifest": manifest,
            **said,
        }
        self.session = Session(Join(protocol=PROTOCOL_VERSION, **facts))
        self.sequence = 0

    def join(self) -> JoinAnswer:
        answer = self.transport.call(self.session.join_request)
        assert isinstance(answer, JoinAnswer)
        self.session.answer = answer
        self.sequence = answer.fragments[0].last_sequence
        return answer

    def frame(self, tensors: Mapping[str, Tensor], codec: str = "fp32") -> memoryview:
        return make_frame(tensors, codec)

    def offer(self, size_bytes: int, **changes: Any) -> OfferAnswer:
        facts: dict[str, Any] = {
            **self.session.head,
            "fragment": 0,
            "sequence": self.sequence,
            "base_version": 0,
            "oldest_base": 0,
            "steps": 1,
            "codec": "fp32",
            "size_bytes": size_bytes,
            **changes,
        }
        answer = self.transport.call(Offer(**facts))
        assert isinstance(answer, OfferAnswer)
        return answer

    def put(self, payload: memoryview, part: int, body: memoryview | None = None, hash_: str | None = None) -> Any:
        size = self.session.joined.plan.part_size_bytes
        piece = payload[slice(*part_range(part, len(payload), size))]
        request = PutPart(
            **self.session.head, fragment=0, sequence=self.sequence, part=part, hash=hash_ or part_hash(piece)
        )
        return self.transport.call(request, body=piece if body is None else body)

    def commit(self, payload: memoryview) -> Any:
        size = self.session.joined.plan.part_size_bytes
        parts = part_count(len(payload), size)
        hashes = [part_hash(payload[slice(*part_range(i, len(payload), size))]) for i in range(parts)]
        request = Commit(**self.session.head, fragment=0, sequence=self.sequence, payload_hash=payload_hash(hashes))
        return self.transport.call(request)

    def poll(self, held: int = 0, held_hash: str | None = None, **changes: Any) -> Agreement:
        """The newest agreement, for somebody who holds that anchor."""
        facts: dict[str, Any] = {
            **self.session.head,
            "fragment": 0,
            "after": -1,
            "held": held,
            "trees": True,
            **changes,
        }
        answer = self.transport.call(Poll(**facts, held_hash=held_hash))
        assert isinstance(answer, PollAnswer)
        assert answer.agreement is not None
        return answer.agreement

    def get(self, payload: Payload, part: int, fragment: int = 0) -> memoryview:
        begin, end = part_range(part, payload.size_bytes, self.session.joined.plan.part_size_bytes)
        into = memoryview(bytearray(end - begin))
        request = GetPart(**self.session.head, fragment=fragment, version=payload.version, kind=payload.kind, part=part)
        answer = self.transport.call(request, into=into)
        assert isinstance(answer, GetPartAnswer)
        assert answer.hash == part_hash(into)
        return into

    def fetch(self, payload: Payload, fragment: int = 0) -> memoryview:
        """All of its parts, which must make it."""
        count = part_count(payload.size_bytes, self.session.joined.plan.part_size_bytes)
        parts = [self.get(payload, part, fragment) for part in range(count)]
        assert payload_hash([part_hash(part) for part in parts]) == payload.hash
        return memoryview(bytearray(b"".join(parts)))

    def contribute(self, payload: memoryview, **changes: Any) -> Any:
        """Offer, all parts, commit, under the next sequence."""
        self.sequence += 1
        answer = self.offer(len(payload), **changes)
        for part in answer.missing:
            self.put(payload, part)
        return self.commit(payload)


def make_frame(tensors: Mapping[str, Tensor], codec: str = "fp32") -> memoryview:
    coder = get_codec(codec)
    return encode_frame(tensors, make_layout(tensors, codec), dict.fromkeys(tensors, coder))


def make_layout(tensors: Mapping[str, Tensor], codec: str = "fp32") -> Layout:
    coder = get_codec(codec)
    return layout(coder.name, [(n, tuple(t.shape), coder.encoded_bytes(t.numel())) for n, t in tensors.items()])


def params_of(model: nn.Module, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    return found if names is None else {name: found[name] for name in names}


def assert_same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    """Bit for bit."""
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name
