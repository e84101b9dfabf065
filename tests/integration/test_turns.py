"""More contributions than there is room for, at a real server: each is sent when its turn comes, and no worker asks
twice. One of release 0.2 comes again until it is its turn."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from outerstep.errors import Busy
from outerstep.server import DiLoCoServer
from outerstep.types import OfferAnswer
from outerstep.wire.http_transport import HttpTransport
from support import HandClient, Ledger, make_frame, wait_until

FRAME = make_frame({"cells": torch.tensor([-1.0, 0.0])})
WORKERS = 12
NEVER_S = 20.0  # a turn that is not told takes so long


@pytest.fixture
def server() -> Iterator[DiLoCoServer]:
    rules: dict[str, Any] = {"num_workers": WORKERS, "codec": "fp32", "down_codec": "fp32", "sync_every": 1}
    room: dict[str, Any] = {"pool_bytes": 2 * len(FRAME), "spool_bytes": 0}
    with DiLoCoServer(Ledger().state_dict(), port=0, heartbeat_timeout=0, **rules, **room) as running:
        yield running


def crowd(server: DiLoCoServer, many: int = WORKERS) -> list[HandClient]:
    made = []
    for i in range(many):
        client = HandClient(HttpTransport(server.address), f"w{i}", server.service.coordinator.manifest)
        client.join()
        client.sequence += 1
        made.append(client)
    return made


def queued(server: DiLoCoServer) -> int:
    return server.service.coordinator.uploads.queued


class Asking:
    """An offer whose answer waits."""

    def __init__(self, client: HandClient, wait_s: float = NEVER_S) -> None:
        self.answer: OfferAnswer | Busy | None = None
        self._client, self._wait_s = client, wait_s
        self.thread = threading.Thread(target=self._ask, daemon=True)
        self.thread.start()

    def _ask(self) -> None:
        try:
            self.answer = self._client.offer(len(FRAME), wait_s=self._wait_s)
        except Busy as refusal:
            self.answer = refusal


def contribute(client: HandClient, asked: Counter[str], wait_s: float | None) -> None:
    facts = {} if wait_s is None else {"wait_s": wait_s}
    while (answer := client.offer(len(FRAME), **facts)).state == "wait":
        asked[client.session.worker_id] += 1
        threading.Event().wait(answer.retry_after_s)
    client.put(FRAME, 0)
    client.commit(FRAME)


def test_with_room_for_two_of_twelve_nobody_is_told_to_wait(server: DiLoCoServer) -> None:
    told: Counter[str] = Counter()
    clients = crowd(server)
    threads = [threading.Thread(target=contribute, args=(client, told, NEVER_S)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert clients[0].poll().version == 1
    assert not told


def test_a_worker_that_does_not_say_how_long_its_answer_may_take_is_told_when_to_come(server: DiLoCoServer) -> None:
    told: Counter[str] = Counter()
    clients = crowd(server)
    for client in clients:
        assert isinstance(client.transport, HttpTransport)
        client.transport.protocol = 1  # as release 0.2 speaks
    threads = [threading.Thread(target=contribute, args=(client, told, None)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert clients[0].poll(trees=False).version == 1


def test_who_waits_is_answered_when_the_room_is_free_and_not_before(server: DiLoCoServer) -> None:
    first, second, third = crowd(server)[:3]
    assert [client.offer(len(FRAME)).state for client in (first, second)] == ["send", "send"]
    asking = Asking(third)
    wait_until(lambda: queued(server) == 1)
    assert asking.answer is None
    first.put(FRAME, 0)
    first.commit(FRAME)
    wait_until(lambda: asking.answer is not None)
    assert isinstance(asking.answer, OfferAnswer)
    assert asking.answer.state == "send"


def test_who_has_waited_as_long_as_it_may_is_told_so(server: DiLoCoServer) -> None:
    first, second, third = crowd(server)[:3]
    assert [client.offer(len(FRAME)).state for client in (first, second)] == ["send", "send"]
    assert third.offer(len(FRAME), wait_s=0.05).state == "wait"
    assert server.service._turns == {}


def test_a_server_that_stops_keeps_nobody_waiting(server: DiLoCoServer) -> None:
    clients = crowd(server)
    assert [client.offer(len(FRAME)).state for client in clients[:2]] == ["send", "send"]
    asking = [Asking(client) for client in clients[2:]]
    wait_until(lambda: queued(server) == len(asking))
    server.service.release_polls()
    wait_until(lambda: all(one.answer is not None for one in asking))
    for one in asking:
        assert isinstance(one.answer, OfferAnswer)
        assert one.answer.state == "wait"


def test_of_two_processes_that_make_the_same_offer_one_gives_up_and_the_other_still_hears_of_its_turn(
    server: DiLoCoServer,
) -> None:
    first, second, job = crowd(server)[:3]
    assert [client.offer(len(FRAME)).state for client in (first, second)] == ["send", "send"]
    turns = server.service._turns
    patient = Asking(job)
    wait_until(lambda: [turn.waiting for turn in turns.values()] == [1])
    hasty = Asking(job, wait_s=0.05)
    hasty.thread.join(60.0)
    assert isinstance(hasty.answer, OfferAnswer)
    assert hasty.answer.state == "wait"
    assert [turn.waiting for turn in turns.values()] == [1]
    assert patient.answer is None
    first.put(FRAME, 0)
    first.commit(FRAME)
    wait_until(lambda: patient.answer is not None)
    assert isinstance(patient.answer, OfferAnswer)
    assert patient.answer.state == "send"
    assert not turns
