"""A worker with a valid token that wants to count for more than one: it sends many contributions into one round, and
claims more tokens than there are. Over real sockets, at the native and at the compatibility port."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.old_clients import OldClient, answer_of, like, minus
from integration.old_clients import begin_submit as begin
from integration.old_clients import serving as compat_serving
from outerstep.errors import StaleRound
from outerstep.security.credentials import Credentials
from outerstep.server import DiLoCoServer
from outerstep.wire.http_transport import HttpTransport
from support import HandClient, Ledger, assert_same, make_frame, wait_until

HONEST, LIAR = "abc", "z"
MANY = 99
TOKENS = 1000
BUDGET = 1_000_000


@contextlib.contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[tuple[DiLoCoServer, dict[str, HandClient]]]:
    """A secure server, and four workers that hold its token."""
    credentials = Credentials(folder / "credentials")
    facts = {"num_workers": 4, "outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32", "token_budget": BUDGET}
    with DiLoCoServer(
        Ledger().state_dict(), port=0, credentials=str(credentials.folder), **{**facts, **settings}
    ) as server:
        clients = {
            worker: HandClient(HttpTransport(server.address, credentials=credentials.folder), worker)
            for worker in HONEST + LIAR
        }
        for client in clients.values():
            client.join()
        yield server, clients
        for client in clients.values():
            client.transport.close()


def send(client: HandClient, cell: int, version: int, tokens: int = TOKENS) -> None:
    """One step towards this cell."""
    payload = make_frame({"cells": torch.eye(2)[cell]})
    client.contribute(payload, base_version=version, oldest_base=version, tokens=tokens)


def send_many(client: HandClient, version: int) -> int:
    """As often as it is taken."""
    taken = 0
    for _ in range(MANY):
        try:
            send(client, 1, version)
            taken += 1
        except StaleRound:
            client.sequence -= 1
    return taken


def run_rounds(folder: Path, *, lies: bool, weight_by: str) -> tuple[list[float], int]:
    """Four rounds: the model, and the tokens in it."""
    with serving(folder, weight_by=weight_by) as (server, clients):
        for version in range(4):
            if lies and version == 1:
                assert send_many(clients[LIAR], version) == 1
            else:
                send(clients[LIAR], 1, version, 10**12 if lies and version == 3 else TOKENS)
            for worker in HONEST:
                send(clients[worker], 0, version)
            wait_until(lambda version=version: server.sync_round == version + 1)  # type: ignore[misc]
        status = server.service.status()
        assert status.closing == "", "the budget is not spent"
        return server.get_global_params()["cells"].tolist(), status.tokens.total


@pytest.mark.parametrize("weight_by", ["equal", "tokens"])
def test_99_contributions_and_a_trillion_tokens_move_model_and_budget_like_one_honest_one(
    tmp_path: Path, weight_by: str
) -> None:
    """A claim counts up to four times what the others do in the same time, and weighs as much as it counts. (However
    long this machine took between two messages: at most `max_weight_ratio` times what is usual.)"""
    honest, honest_tokens = run_rounds(tmp_path / "honest", lies=False, weight_by=weight_by)
    moved, tokens = run_rounds(tmp_path / "lies", lies=True, weight_by=weight_by)
    assert honest == [-3.0, -1.0]
    assert honest_tokens == 4 * 4 * TOKENS
    assert honest_tokens <= tokens <= honest_tokens + 9 * TOKENS
    most = 1 / 4 if weight_by == "equal" else 10 / 13  # of the last round
    assert -1.0 - most + 1 / 4 - 1e-6 <= moved[1] <= -1.0
    assert sum(moved) == pytest.approx(-4.0)


def test_99_contributions_at_the_compatibility_port_move_the_model_like_one_honest_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An old client that leaves and comes back is a new start each time, and submits again to the same round."""
    monkeypatch.setattr("outerstep.compat.endpoints.LOOK_EVERY_S", 0.02)
    with compat_serving(num_workers=4) as (server, compat):
        clients = {worker: OldClient(compat.address, worker) for worker in HONEST + LIAR}
        start = {worker: client.register() for worker, client in clients.items()}["a"]
        body = clients[LIAR].whole(like(start, -1.0))
        held = [begin(server, clients[LIAR], body)]
        for _ in range(1, MANY):
            clients[LIAR].post_json("/deregister", worker_id=LIAR)
            clients[LIAR].register()
            held.append(clients[LIAR].begin(body))
        waiting = [begin(server, clients[worker], clients[worker].whole(like(start, 1.0))) for worker in HONEST]
        answers = [answer_of(sock) for sock in waiting]
        for sock in held:
            sock.close()
        assert_same(answers[0], minus(start, 0.5))
