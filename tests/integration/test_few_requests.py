"""A small model is exchanged in two requests: the contribution goes with its offer, the agreement comes with the answer
to the poll. Counted at a real server; what may go wrong with it, message by message."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from outerstep.digest import part_hash, payload_hash
from outerstep.errors import BadRequest, Conflict, HashMismatch, NotFinite, OuterstepError, ProtocolMismatch, TooLarge
from outerstep.events import Event, MessageRefused, RequestRefused
from outerstep.hierarchy.offers import HeldOffers
from outerstep.server import DiLoCoServer
from outerstep.topology.protocol import Contribution
from outerstep.types import (
    MOST_CARRIED_BYTES,
    Answer,
    CompleteOffer,
    CompleteOfferAnswer,
    Poll,
    PollAnswer,
    Wishes,
)
from outerstep.wire.http_transport import HttpTransport
from outerstep.wire.memory import MemoryTransport
from outerstep.wire.transport import Transport
from support import HandClient, Ledger, count, make_frame, memory_topology, memory_worker, wait_until

RUN: dict[str, Any] = {"num_workers": 1, "outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32", "down_codec": "fp32"}
FRAME = make_frame({"cells": torch.tensor([-1.0, 0.0])})


class Counting(HttpTransport):
    """Counts what travels, by method and path: also what is said again."""

    seen: Counter[str]

    def _exchange(self, method: str, target: str, *rest: Any) -> Any:
        self.seen[f"{method} {target.partition('?')[0]}"] += 1
        return super()._exchange(method, target, *rest)


@pytest.fixture
def server() -> Iterator[DiLoCoServer]:
    with DiLoCoServer(Ledger().state_dict(), port=0, sync_every=1, **RUN) as running:
        yield running


def transports(server: DiLoCoServer) -> list[Transport]:
    return [HttpTransport(server.address), MemoryTransport(server.service)]


def complete(client: HandClient, body: memoryview = FRAME, **changes: Any) -> Any:
    """The next contribution with its offer; the answer."""
    facts: dict[str, Any] = {
        **client.session.head,
        "fragment": 0,
        "sequence": client.sequence,
        "base_version": 0,
        "oldest_base": 0,
        "steps": 1,
        "codec": "fp32",
        "size_bytes": len(FRAME),
        "hash": part_hash(FRAME),
        **changes,
    }
    return client.transport.call(CompleteOffer(**facts), body=body)


def joined(transport: Transport) -> HandClient:
    client = HandClient(transport)
    client.join()
    client.sequence += 1
    return client


def test_a_blocking_exchange_of_a_small_model_is_two_requests(server: DiLoCoServer) -> None:
    """And no heartbeat on its way: the loss goes with the offer."""
    model = Ledger()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    transport = Counting(server.address)
    transport.seen = Counter()
    with memory_worker(server, "w", model, optimizer, transport) as worker:
        worker.last_loss = 2.5
        count(model, optimizer, 0, 3)
        del transport.seen["POST /v1/heartbeat"]  # one by one beside the exchanges: they are signs of life
        assert transport.seen == {
            "POST /v1/nonce": 1,
            "POST /v1/join": 1,
            "POST /v1/poll": 1 + 3,  # the first brings the model
            "PUT /v1/offer": 3,
        }
        assert model.cells.tolist() == [3.0, 0.0]
    assert server.get_global_params()["cells"].tolist() == [3.0, 0.0]


def test_the_loss_of_a_round_is_known_without_a_heartbeat(server: DiLoCoServer) -> None:
    topology = memory_topology(server, "w")
    topology.join(None, Wishes())
    deltas = {"cells": torch.tensor([-1.0, 0.0])}
    topology.begin(Contribution(0, 0, 0, 1, 0, 0, deltas, loss=0.25)).finish()
    member = server.service.coordinator.members.find("w")
    assert member is not None
    assert member.loss == 0.25
    assert topology.tells_loss
    topology.leave("done")


class TestOneMessage:
    """A complete offer, said by hand over HTTP and in memory."""

    @pytest.fixture(params=["http", "memory"])
    def client(self, request: pytest.FixtureRequest, server: DiLoCoServer) -> HandClient:
        return joined(transports(server)[request.param == "memory"])

    def test_a_repeated_one_counts_once(self, server: DiLoCoServer, client: HandClient) -> None:
        first, second = complete(client), complete(client)
        assert first == second == CompleteOfferAnswer(state="accepted", version=1)
        wait_until(lambda: server.service.coordinator.sync_round == 1)
        assert complete(client) == first
        assert server.get_global_params()["cells"].tolist() == [1.0, 0.0]

    def test_it_is_the_same_contribution_as_one_in_parts(self, client: HandClient) -> None:
        client.offer(len(FRAME))
        assert complete(client).state == "accepted"
        assert client.commit(FRAME).version == 1

    def test_the_same_key_with_other_bytes_is_refused(self, client: HandClient) -> None:
        complete(client)
        other = make_frame({"cells": torch.tensor([-5.0, 0.0])})
        with pytest.raises(Conflict, match="was accepted with payload"):
            complete(client, other, hash=part_hash(other))

    def test_damaged_bytes_are_refused_and_may_come_again(self, server: DiLoCoServer, client: HandClient) -> None:
        damaged = bytearray(FRAME)
        damaged[-1] ^= 1
        with pytest.raises(HashMismatch):
            complete(client, memoryview(damaged))
        assert server.service.coordinator.total_accepted == 0
        assert complete(client).state == "accepted"

    def test_values_are_checked_as_in_any_contribution(self, server: DiLoCoServer, client: HandClient) -> None:
        events = list[Event]()
        server.service.events.add(events.append)
        bad = make_frame({"cells": torch.tensor([float("nan"), 0.0])})
        with pytest.raises(NotFinite):
            complete(client, bad, hash=part_hash(bad))
        assert server.service.coordinator.total_accepted == 0
        told = [event for event in events if isinstance(event, MessageRefused | RequestRefused)]
        assert [getattr(event, "request", "") for event in told] == ["CompleteOffer"]

    def test_the_body_has_the_size_that_is_offered(self, client: HandClient) -> None:
        with pytest.raises(BadRequest, match="part 0 has"):
            complete(client, FRAME[:-8])

    def test_an_agreement_comes_with_the_answer_to_a_poll(self, client: HandClient) -> None:
        complete(client)
        poll = Poll(**client.session.head, fragment=0, after=0, wait_s=20.0, takes_bytes=MOST_CARRIED_BYTES)
        into = memoryview(bytearray(MOST_CARRIED_BYTES))
        answer = client.transport.call(poll, into=into)
        assert isinstance(answer, PollAnswer)
        assert answer.agreement is not None
        [payload] = answer.agreement.payloads
        assert answer.carried_bytes == payload.size_bytes
        assert payload_hash([part_hash(into[: payload.size_bytes])]) == payload.hash

    @pytest.mark.parametrize("takes", [{}, {"takes_bytes": 16}], ids=["nothing", "less"])
    def test_nothing_comes_along_with_whoever_takes_less(self, client: HandClient, takes: dict[str, int]) -> None:
        complete(client)
        answer = client.transport.call(
            Poll(**client.session.head, fragment=0, after=0, wait_s=20.0, **takes),
            into=memoryview(bytearray(16)) if takes else None,
        )
        assert isinstance(answer, PollAnswer)
        assert not answer.carried_bytes

    def test_a_lost_answer_changes_nothing(self, server: DiLoCoServer) -> None:
        transport, model = MemoryTransport(server.service), Ledger()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with memory_worker(server, "w", model, optimizer, transport, heartbeat_interval_s=0.0):
            transport.drop_answers = 1
            count(model, optimizer, 0, 1)
            transport.drop_requests = 1
            count(model, optimizer, 0, 1)
        assert server.get_global_params()["cells"].tolist() == [2.0, 0.0]
        assert server.service.coordinator.total_accepted == 2


def test_a_body_over_the_limit_is_refused_before_it_is_read(server: DiLoCoServer) -> None:
    client = joined(HttpTransport(server.address))
    with pytest.raises(TooLarge):
        complete(client, memoryview(bytearray(MOST_CARRIED_BYTES + 1)))


def test_protocol_1_has_no_such_offer(server: DiLoCoServer) -> None:
    client = joined(MemoryTransport(server.service, protocol=1))
    with pytest.raises(ProtocolMismatch):
        complete(client)


def test_a_worker_of_protocol_1_is_served_as_before(server: DiLoCoServer) -> None:
    model = Ledger()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with memory_worker(server, "w", model, optimizer, MemoryTransport(server.service, protocol=1)):
        count(model, optimizer, 0, 2)
    assert server.get_global_params()["cells"].tolist() == [2.0, 0.0]


def test_a_held_offer_takes_its_contribution_nowhere(server: DiLoCoServer) -> None:
    """What a cluster has not kept yet is not sent up, whichever way."""
    held = HeldOffers(MemoryTransport(server.service))
    client, answers = joined(held), list[Answer]()
    held.open.clear()
    thread = threading.Thread(target=lambda: answers.append(complete(client)), daemon=True)
    thread.start()
    thread.join(0.2)
    assert not answers
    assert server.service.coordinator.total_accepted == 0
    held.open.set()
    thread.join(20)
    assert answers == [CompleteOfferAnswer(state="accepted", version=1)]


def test_a_withdrawn_offer_takes_its_contribution_nowhere(server: DiLoCoServer) -> None:
    held = HeldOffers(MemoryTransport(server.service))
    client = joined(held)
    held.refusal = OuterstepError("another leads")
    with pytest.raises(OuterstepError, match="another leads"):
        complete(client)
    assert server.service.coordinator.total_accepted == 0
