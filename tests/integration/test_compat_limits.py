"""The compatibility port: how much, how many, how slowly, and what is kept of it."""

from __future__ import annotations

import socket
import struct

import pytest
import torch

from integration.old_clients import (
    Answered,
    OldClient,
    begin_submit,
    head_of,
    like,
    loaded,
    minus,
    one_client,
    response_of,
    serving,
)
from outerstep.compat import CompatLimits
from support import assert_same, wait_until


def test_a_connection_that_stalls_inside_a_body_is_closed() -> None:
    with one_client(limits=CompatLimits(stall_s=0.2)) as (server, client, start):
        body = client.whole(like(start, 1.0))
        with client.connection() as sock:
            sock.sendall(head_of(len(body)))
            sock.sendall(body[:-10])
            assert sock.recv(1) == b""
        assert server.status()["total_submissions"] == 0
        client.submit(like(client.register(), 1.0))  # the port is as well as before
        assert server.sync_round == 1


def test_connections_beyond_the_limit_are_closed_at_once() -> None:
    with serving(limits=CompatLimits(max_connections=2)) as (_, compat):
        client = OldClient(compat.address, "a")
        held = [client.connection() for _ in range(2)]
        for sock in held:  # each is served
            sock.sendall(b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n")
            assert response_of(sock)[0] == 200
        with client.connection() as extra:
            assert extra.recv(1) == b""
        for sock in held:
            sock.close()


def test_more_workers_than_the_limit_wait_until_one_is_gone() -> None:
    with serving(limits=CompatLimits(max_workers=1)) as (_, compat):
        a, b = OldClient(compat.address, "a"), OldClient(compat.address, "b")
        a.register()
        a.register()
        with pytest.raises(Answered, match="max_workers") as caught:
            b.register()
        assert caught.value.status == 503
        assert int(caught.value.headers["Retry-After"]) > 0
        a.post_json("/deregister", worker_id="a")
        b.register()


@pytest.mark.parametrize("answered", [False, True])
def test_a_client_that_is_gone_gives_its_place_and_its_memory_to_the_next(answered: bool) -> None:
    settings = {"num_workers": 1 if answered else 2, "heartbeat_timeout": 1.0}
    with serving(limits=CompatLimits(max_workers=1), **settings) as (server, compat):
        a, b, endpoints = OldClient(compat.address, "a"), OldClient(compat.address, "b"), compat._endpoints
        start = a.register()
        crashed = begin_submit(server, a, a.whole(like(start, 1.0)))
        if answered:
            assert crashed.recv(1)
        crashed.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        crashed.close()
        wait_until(lambda: server.status()["total_worker_deaths"] == 1)
        assert not endpoints._clients["a"].is_idle
        b.register()
        assert list(endpoints._clients) == ["b"]
        wait_until(lambda: endpoints._pool.memory_bytes == 0)
        with pytest.raises(Answered, match=r"404.*/register"):
            a.submit(like(start, 1.0))


def test_no_model_is_kept_for_a_client_whose_answer_was_lost() -> None:
    with serving() as (server, compat):
        client, endpoints = OldClient(compat.address, "a"), compat._endpoints
        start = client.register()
        body = client.whole(like(start, 1.0))
        lost = client.begin(body)
        assert lost.recv(1)
        lost.close()
        (submission,) = endpoints._clients["a"]._submissions.values()
        wait_until(lambda: not submission.is_held)
        assert (submission.settled, submission.version, submission.agreed) == (True, 1, None)
        assert_same(loaded(client.call("POST", "/submit_pseudograd", body)), minus(start, 1.0))
        assert server.status()["total_submissions"] == 1


def test_a_submission_of_several_fragments_is_taken_whole_or_not_at_all() -> None:
    with one_client(num_fragments=2, sync_every=2) as (server, client, start):
        names = server.service.coordinator.plan.fragments[1]  # type: ignore[union-attr]
        delta = like(start, 1.0)
        delta[names[-1]] = torch.full_like(delta[names[-1]], float("inf"))
        with pytest.raises(Answered, match="not_finite"):
            client.submit(delta)
        assert server.status()["total_submissions"] == 0
        assert_same(client.submit(like(start, 1.0)), minus(start, 1.0))


def test_nothing_is_kept_of_a_submission_whose_answer_arrived() -> None:
    with serving() as (_, compat):
        client, endpoints = OldClient(compat.address, "a"), compat._endpoints
        params = client.register()
        for _ in range(3):
            params = client.submit(like(params, 0.1))
        with pytest.raises(Answered):
            client.call("POST", "/submit_pseudograd", client.whole({"x": torch.ones(1)}))
        wait_until(lambda: endpoints._clients["a"].is_idle)
        wait_until(lambda: endpoints._pool.memory_bytes == 0)
        assert not endpoints._bodies


def test_a_body_that_comes_drop_by_drop_is_cut_off() -> None:
    limits = CompatLimits(stall_s=0.5, slowest_bytes_per_s=1 << 30)
    with one_client(limits=limits) as (server, client, start):
        body = client.whole(like(start, 1.0))
        with client.connection(timeout_s=0.05) as slow:
            slow.sendall(head_of(len(body)))
            sent = 0
            while sent < len(body):
                try:
                    slow.sendall(body[sent : sent + 1])  # never silent for long
                    sent += 1
                    if slow.recv(1) == b"":
                        break
                except TimeoutError:
                    continue
                except OSError:
                    break
            assert sent < len(body)
        assert server.status()["total_submissions"] == 0
