"""The compatibility port: who is here, who is gone, who is told to go."""

from __future__ import annotations

import json
import socket
from functools import partial

import pytest

from integration.old_clients import (
    PLAIN,
    Answered,
    OldClient,
    answer_of,
    begin_submit,
    like,
    minus,
    one_client,
    response_of,
    serving,
    two_clients,
    workers_of,
)
from outerstep.compat import CompatServer
from outerstep.compat.server import keepalive_s
from outerstep.errors import ConfigError
from outerstep.server import DiLoCoServer
from outerstep.types import Control
from outerstep.wire.sockets import probe_often
from support import assert_same, tiny_model, wait_until

# --- life and death -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_client_that_hung_up_while_it_waited_dies_of_silence_and_its_contribution_stays() -> None:
    with two_clients(heartbeat_timeout=2.0) as (server, a, b, start):
        begin_submit(server, a, a.whole(like(start, 2.0))).close()

        def b_beats_until_a_is_dead() -> bool:
            b.post_json("/heartbeat", worker_id="b", steps_per_second=1.0)
            return server.status()["total_worker_deaths"] == 1

        wait_until(b_beats_until_a_is_dead)
        assert list(workers_of(server)) == ["b"]
        assert_same(b.submit(like(start, 4.0)), minus(start, 3.0))  # the mean of both
        a.post_json("/heartbeat", worker_id="a", steps_per_second=2.0)  # and it may come back
        assert sorted(workers_of(server)) == ["a", "b"]


def test_a_client_that_waits_is_alive_without_heartbeats() -> None:
    with serving(num_workers=2, heartbeat_timeout=1.0) as (server, compat):
        a, b = OldClient(compat.address, "a"), OldClient(compat.address, "b")
        start = a.register()
        waiting = begin_submit(server, a, a.whole(like(start, 1.0)))
        quiet = OldClient(compat.address, "quiet")
        quiet.register()
        wait_until(lambda: server.status()["total_worker_deaths"] == 1)  # the timeout passes for who only keeps silent
        assert list(workers_of(server)) == ["a"]
        b.register()
        b.submit(like(start, 1.0))
        assert response_of(waiting)[0] == 200
        waiting.close()


@pytest.mark.parametrize(("heartbeat_timeout_s", "noticed_after_s"), [(120.0, 60), (16.0, 8), (2.0, 4), (0.0, 60)])
def test_the_kernel_notices_that_a_waiting_clients_machine_is_gone(
    heartbeat_timeout_s: float, noticed_after_s: int
) -> None:
    with socket.socket() as sock:
        probe_often(sock, keepalive_s(heartbeat_timeout_s))
        option = partial(sock.getsockopt, socket.IPPROTO_TCP)
        after = option(socket.TCP_KEEPIDLE) + option(socket.TCP_KEEPCNT) * option(socket.TCP_KEEPINTVL)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert after == noticed_after_s


def test_heartbeats_report_speed_and_round() -> None:
    with one_client() as (server, client, params):
        client.submit(like(params, 1.0))
        answer = json.loads(client.post_json("/heartbeat", worker_id="a", steps_per_second=3.5))
        assert answer == {"status": "ok", "sync_round": 1, "num_workers": 1, "num_registered": 1}
        assert workers_of(server)["a"]["steps_per_second"] == 3.5
        assert workers_of(server)["a"]["hostname"] == "machine-a"


def test_leaving_twice_is_leaving_and_shrinks_the_barrier() -> None:
    with two_clients() as (server, a, b, start):
        waiting = begin_submit(server, a, a.whole(like(start, 1.0)))
        for _ in range(2):
            assert json.loads(b.post_json("/deregister", worker_id="b")) == {"status": "ok"}
        assert_same(answer_of(waiting), minus(start, 1.0))
        with pytest.raises(Answered, match="404"):
            b.submit(like(start, 1.0))


def test_who_deregisters_while_it_waits_is_told_so_and_does_not_come_back() -> None:
    with two_clients() as (server, a, _, start):
        waiting = begin_submit(server, a, a.whole(like(start, 1.0)))
        a.post_json("/deregister", worker_id="a")
        assert response_of(waiting)[0] == 404
        waiting.close()
        assert list(workers_of(server)) == ["b"]


def test_an_id_that_lives_on_another_machine_is_refused() -> None:
    with serving() as (_, compat):
        OldClient(compat.address, "a").register()
        with pytest.raises(Answered) as caught:
            OldClient(compat.address, "a", hostname="machine-b").register()
        assert caught.value.status == 409
        assert caught.value.error["code"] == "id_in_use"


def test_status_has_all_that_the_servers_own_has() -> None:
    with one_client() as (server, client, _):
        got = json.loads(client.call("GET", "/status"))
        assert got.keys() > server.status().keys()
        assert got["heartbeat_timeout"] == 120.0
        assert got["min_workers"] == 1
        assert got["total_worker_deaths"] == 0
        assert list(got["workers"]) == ["a"]


def test_who_waits_when_the_server_stops_is_told_to_come_back() -> None:
    with DiLoCoServer(tiny_model().state_dict(), num_workers=2, port=0, **PLAIN) as server:
        compat = CompatServer(server, 0).start()
        a = OldClient(compat.address, "a")
        waiting = begin_submit(server, a, a.whole(like(a.register(), 1.0)))
        compat.stop()
        compat.stop()
        status, data = response_of(waiting)
        waiting.close()
        assert status == 503
        assert json.loads(data)["code"] == "busy"


@pytest.mark.parametrize("weight_by", ["samples", "tokens"])
def test_a_run_that_weighs_by_what_old_clients_do_not_say_has_no_such_port(weight_by: str) -> None:
    server = DiLoCoServer(tiny_model().state_dict(), num_workers=1, port=0, weight_by=weight_by)
    with pytest.raises(ConfigError, match=f"weight_by='equal', got '{weight_by}'.* neither samples nor tokens"):
        CompatServer(server, 0)


@pytest.mark.parametrize(
    ("insecure", "named", "listens"),
    [(False, None, "127.0.0.1"), (True, None, "0.0.0.0"), (False, "0.0.0.0", "0.0.0.0")],
)
def test_the_network_reaches_it_only_where_somebody_said_so(insecure: bool, named: str | None, listens: str) -> None:
    server = DiLoCoServer(tiny_model().state_dict(), num_workers=1, host="0.0.0.0", port=0, insecure=insecure)
    with server, CompatServer(server, 0, named) as compat:
        assert compat.address.rsplit(":", 1)[0] == listens


def test_a_server_in_python_is_told_how_to_open_the_port() -> None:
    with pytest.raises(ConfigError, match=r"compat_port=8600 is for `outerstep server`.*CompatServer\(server, port\)"):
        DiLoCoServer(tiny_model().state_dict(), num_workers=1, port=0, compat_port=8600)


def test_a_port_that_is_taken_is_named() -> None:
    with serving() as (server, compat):
        port = int(compat.address.rsplit(":", 1)[1])
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}"):
            CompatServer(server, port)


# --- orders -------------------------------------------------------------------------------------------------------


def order(server: DiLoCoServer, kind: str, worker_id: str | None = None) -> None:
    server.service.answer(Control(kind=kind, worker_id=worker_id))  # type: ignore[arg-type]


def test_who_is_told_to_finish_leaves_with_its_next_heartbeat_and_may_register_again() -> None:
    with two_clients() as (server, a, b, start):
        order(server, "drain", "a")
        for _ in range(2):
            with pytest.raises(Answered, match=r"told to finish \(an operator asked for it\)") as caught:
                a.post_json("/heartbeat", worker_id="a", steps_per_second=1.0)
            assert (caught.value.status, caught.value.error["code"]) == (503, "closing")
        with pytest.raises(Answered, match="closing"):
            a.submit(like(start, 5.0))
        assert list(workers_of(server)) == ["b"]
        assert_same(b.submit(like(start, 1.0)), minus(start, 1.0))  # nobody waits for it
        a.register()
        waiting = begin_submit(server, a, a.whole(like(start, 1.0)))  # the open round waits for b alone
        assert_same(b.submit(like(start, 3.0)), minus(minus(start, 1.0), 2.0))
        assert response_of(waiting)[0] == 200
        waiting.close()


def test_who_is_told_to_finish_while_it_trains_is_told_when_it_submits() -> None:
    with two_clients() as (server, a, _, start):
        order(server, "drain", "a")
        with pytest.raises(Answered, match="told to finish") as caught:
            a.submit(like(start, 5.0))
        assert (caught.value.status, caught.value.error["code"]) == (503, "closing")
        assert list(workers_of(server)) == ["b"]
        assert server.status()["total_submissions"] == 0
        assert json.loads(a.post_json("/deregister", worker_id="a")) == {"status": "ok"}


def test_who_is_told_to_finish_while_it_waits_gets_its_answer_first() -> None:
    with two_clients() as (server, a, b, start):
        waiting = begin_submit(server, a, a.whole(like(start, 1.0)))
        order(server, "drain", "a")
        assert json.loads(a.post_json("/heartbeat", worker_id="a", steps_per_second=1.0))["status"] == "ok"
        with pytest.raises(Answered, match=r"is to finish .* nothing more is taken from it"):
            a.submit(like(start, 9.0))
        assert_same(b.submit(like(start, 3.0)), minus(start, 2.0))
        assert_same(answer_of(waiting), minus(start, 2.0))
        wait_until(lambda: list(workers_of(server)) == ["b"])


def test_a_shutdown_does_not_wait_for_old_clients_that_cannot_hear_of_it() -> None:
    with serving(num_workers=2, drain_timeout_s=3600.0) as (server, compat):
        waits, trains = OldClient(compat.address, "waits"), OldClient(compat.address, "trains")
        start = waits.register()
        trains.register()
        waiting = begin_submit(server, waits, waits.whole(like(start, 1.0)))
        order(server, "shutdown")
        with pytest.raises(Answered, match="closing"):
            trains.post_json("/heartbeat", worker_id="trains", steps_per_second=1.0)
        assert_same(answer_of(waiting), minus(start, 1.0))
        server.wait()  # it stops by itself
        assert workers_of(server) == {}
        with pytest.raises(Answered, match="closing"):
            trains.register()


def test_an_order_to_exchange_now_is_let_pass() -> None:
    with one_client() as (server, client, start):
        order(server, "sync", "a")
        for _ in range(2):
            assert json.loads(client.post_json("/heartbeat", worker_id="a"))["status"] == "ok"
        worker = server.service.coordinator.members.find("a")
        assert worker is not None
        assert not worker.commands
        assert_same(client.submit(like(start, 1.0)), minus(start, 1.0))


def test_who_was_removed_comes_back_by_leaving_first() -> None:
    with one_client() as (server, client, _):
        order(server, "kick", "a")
        for again in (client.register, lambda: client.post_json("/heartbeat", worker_id="a")):
            with pytest.raises(Answered, match="kicked") as caught:
                again()
            assert caught.value.status == 403
        client.post_json("/deregister", worker_id="a")
        client.register()
        assert list(workers_of(server)) == ["a"]
