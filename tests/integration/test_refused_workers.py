"""A live worker that is refused again and again keeps nobody waiting, whatever it is refused for. Over real sockets, at
the native and at the compatibility port."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.old_clients import (
    Answered,
    OldClient,
    answer_of,
    begin_submit,
    like,
    loaded,
    minus,
    serving,
    submission,
    workers_of,
)
from outerstep.errors import Absurd, BadRequest, FutureRound, PlanMismatch, Refused, TooLarge
from outerstep.server import DiLoCoServer
from outerstep.wire.http_transport import HttpTransport
from support import HandClient, Ledger, assert_same, make_frame, wait_until

FRAME = make_frame({"cells": torch.tensor([1.0, 0.0])})


@contextlib.contextmanager
def four(folder: Path, **settings: Any) -> Iterator[tuple[DiLoCoServer, dict[str, HandClient]]]:
    facts = {"num_workers": 4, "codec": "fp32", "insecure": True, "heartbeat_timeout_s": 0.0}
    facts["event_log"] = str(folder / "events.jsonl")
    with DiLoCoServer(Ledger().state_dict(), port=0, **{**facts, **settings}) as server:
        clients = {worker: HandClient(HttpTransport(f"http://{server.address}"), worker) for worker in "abcz"}
        for client in clients.values():
            client.join()
        yield server, clients
        for client in clients.values():
            client.transport.close()


def offered(**changes: Any) -> Callable[[HandClient], object]:
    return lambda client: client.contribute(FRAME, **changes)


def short_part(client: HandClient) -> None:
    client.sequence += 1
    client.offer(len(FRAME))
    client.put(FRAME, 0, body=FRAME[:-1])


BAD: dict[str, tuple[type[Refused], Callable[[HandClient], object]]] = {
    "another codec": (PlanMismatch, offered(codec="int8")),
    "too many bytes": (TooLarge, lambda client: client.offer(1 << 30, sequence=1)),
    "too many sections": (BadRequest, offered(section_bytes=(1,) * 99)),
    "a version that does not exist": (FutureRound, offered(base_version=7, oldest_base=7)),
    "a part of another length": (BadRequest, short_part),
}


@pytest.mark.parametrize(("kind", "send"), BAD.values(), ids=BAD.keys())
def test_the_others_go_on_after_its_third_refusal(
    tmp_path: Path, kind: type[Refused], send: Callable[[HandClient], object]
) -> None:
    with four(tmp_path) as (server, clients):
        for worker in "abc":
            clients[worker].contribute(FRAME)
        for hint in ("", "", "closes without it"):
            with pytest.raises(kind) as told:
                send(clients["z"])
            assert hint in told.value.hint
        wait_until(lambda: server.sync_round == 1)
        assert '"counted_out"' in (tmp_path / "events.jsonl").read_text()
        for worker in "abcz":  # it is expected in the next one, as ever
            clients[worker].contribute(FRAME, base_version=1, oldest_base=1)
        wait_until(lambda: server.sync_round == 2)
        assert {p.worker_id for p in clients["a"].poll().participants} == set("abcz")


def test_so_they_do_when_it_is_fifty_times_too_large_again_and_again(tmp_path: Path) -> None:
    """Which is one offence in a round, however often it is tried."""
    with four(tmp_path) as (server, clients):
        for worker in "abcz":
            clients[worker].contribute(FRAME)
        wait_until(lambda: server.sync_round == 1)
        for worker in "abc":
            clients[worker].contribute(FRAME, base_version=1, oldest_base=1)
        for _ in range(3):
            with pytest.raises(Absurd):
                clients["z"].contribute(make_frame({"cells": torch.tensor([50.0, 0.0])}), base_version=1, oldest_base=1)
        wait_until(lambda: server.sync_round == 2)


# --- the compatibility port -----------------------------------------------------------------------------------------


def wrong_shape(client: OldClient, start: dict[str, torch.Tensor]) -> bytes:
    return client.whole({**like(start, 1.0), "0.bias": torch.ones(6)})


OLD: dict[str, Callable[[OldClient, dict[str, torch.Tensor]], bytes]] = {
    "wrong shape": wrong_shape,
    "not torch.save": lambda client, start: submission({"worker_id": client.worker_id}, b"hello, world"),
    "no payload": lambda client, start: submission({"worker_id": client.worker_id}, b""),
    "NaN": lambda client, start: client.whole(like(start, float("nan"))),
}


@pytest.mark.parametrize("make", OLD.values(), ids=OLD.keys())
def test_old_clients_go_on_without_one_that_is_refused_three_times(
    make: Callable[[OldClient, dict[str, torch.Tensor]], bytes],
) -> None:
    with serving(num_workers=3, heartbeat_timeout_s=0.0) as (server, compat):
        a, b, z = (OldClient(compat.address, name) for name in "abz")
        start = a.register()
        b.register()
        z.register()
        waiting = [begin_submit(server, client, client.whole(like(start, 1.0))) for client in (a, b)]
        for _ in range(3):
            with pytest.raises(Answered):
                z.call("POST", "/submit_pseudograd", make(z, start))
        wait_until(lambda: server.sync_round == 1)
        for sock in waiting:
            assert_same(answer_of(sock), minus(start, 1.0))


def test_what_an_old_client_is_refused_for_is_held_against_it() -> None:
    """As at the native port: the third unusable payload is one too many."""
    with serving(num_workers=1, num_fragments=2) as (server, compat):
        z = OldClient(compat.address, "z")
        start = z.register()
        for offences in (1, 2, 3):  # though each is for two fragments
            with pytest.raises(Answered) as told:
                z.call("POST", "/submit_pseudograd", wrong_shape(z, start))
            assert told.value.status == 422
            assert workers_of(server)["z"]["offences"] == offences
        with pytest.raises(Answered) as told:
            z.submit(like(start, 1.0))
        assert (told.value.status, told.value.error["code"]) == (403, "quarantined")


def test_an_old_client_whose_contribution_is_left_out_is_told_in_its_answer(caplog: pytest.LogCaptureFixture) -> None:
    with serving(num_workers=3) as (server, compat):
        a, b, z = (OldClient(compat.address, name) for name in "abz")
        start = a.register()
        b.register()
        z.register()
        waiting = [begin_submit(server, client, client.whole(like(start, 1.0))) for client in (a, b)]
        connection = http.client.HTTPConnection(z.host, z.port, timeout=60)
        connection.request("POST", "/submit_pseudograd", body=z.whole(like(start, 9.0)))
        response = connection.getresponse()
        assert_same(loaded(response.read()), minus(start, 1.0))
        assert response.headers["X-Outerstep-Left-Out"] == "fragment 0 of version 1"
        connection.close()
        for sock in waiting:
            with sock:
                answer = http.client.HTTPResponse(sock)
                answer.begin()
                assert "X-Outerstep-Left-Out" not in answer.headers
    assert "z: its contribution to fragment 0 of version 1 was left out" in caplog.text
