"""The compatibility port over real HTTP: old clients in a run, retries, hang-ups, and everything that is refused."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import socket
import struct
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outerstep.compat import CompatLimits, CompatServer
from outerstep.compat.seat import Seat
from outerstep.compat.server import notice_death
from outerstep.errors import ConfigError
from outerstep.server import DiLoCoServer
from outerstep.types import Control
from outerstep.worker import DiLoCoWorker
from support import assert_same, in_threads, params_of, tiny_model, train_steps, wait_until

PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32"}


class Answered(Exception):
    """Anything but 200."""

    def __init__(self, status: int, error: dict[str, Any], headers: Mapping[str, str]) -> None:
        super().__init__(f"{status} {error}")
        self.status, self.error, self.headers = status, error, headers


def saved(tensors: object, **how: Any) -> bytes:
    sink = io.BytesIO()
    torch.save(tensors, sink, **how)
    return sink.getvalue()


def loaded(data: bytes) -> dict[str, Tensor]:
    tensors = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    assert isinstance(tensors, dict)
    return tensors


def submission(header: dict[str, object], payload: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack(">I", len(text)) + text + payload


class OldClient:
    """Speaks the old protocol as its clients do: a new connection for each request, closed when the answer is read."""

    def __init__(self, address: str, worker_id: str, hostname: str = "machine-a") -> None:
        self.host, port = address.rsplit(":", 1)
        self.port = int(port)
        self.worker_id = worker_id
        self.hostname = hostname

    def call(self, method: str, path: str, body: bytes | None = None, **headers: str) -> bytes:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        try:
            connection.request(method, path, body=body, headers={"Connection": "close", **headers})
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise Answered(response.status, json.loads(data)["error"], dict(response.headers))
        return data

    def post_json(self, path: str, **fields: object) -> bytes:
        return self.call("POST", path, json.dumps(fields).encode())

    def register(self) -> dict[str, Tensor]:
        return loaded(self.post_json("/register", worker_id=self.worker_id, hostname=self.hostname, gpus=2))

    def submit(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return loaded(self.call("POST", "/submit_pseudograd", self.whole(tensors)))

    def whole(self, tensors: Mapping[str, Tensor]) -> bytes:
        return submission({"worker_id": self.worker_id}, saved(dict(tensors)))

    def submit_fragment(self, fragment: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        header = {"worker_id": self.worker_id, "fragment_id": fragment}
        return loaded(self.call("POST", "/submit_fragment_pseudograd", submission(header, saved(dict(tensors)))))

    def begin(self, path: str, body: bytes) -> socket.socket:
        """Send a request and do not wait for its answer."""
        sock = socket.create_connection((self.host, self.port), timeout=60)
        sock.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        return sock


def response_of(sock: socket.socket) -> tuple[int, bytes]:
    response = http.client.HTTPResponse(sock)
    response.begin()
    return response.status, response.read()


@contextlib.contextmanager
def serving(
    model: nn.Module | None = None, *, num_workers: int = 1, limits: CompatLimits | None = None, **settings: Any
) -> Iterator[tuple[DiLoCoServer, str]]:
    state = (model or tiny_model()).state_dict()
    with (
        DiLoCoServer(state, num_workers=num_workers, port=0, **{**PLAIN, **settings}) as server,
        CompatServer(server, 0, limits=limits or CompatLimits()) as compat,
    ):
        yield server, compat.address


def like(tensors: Mapping[str, Tensor], value: float, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: torch.full_like(tensor, value, dtype=dtype) for name, tensor in tensors.items()}


def minus(tensors: Mapping[str, Tensor], value: float) -> dict[str, Tensor]:
    return {name: tensor - value for name, tensor in tensors.items()}


def workers_of(server: DiLoCoServer) -> Any:
    return server.status()["workers"]


# --- rounds -------------------------------------------------------------------------------------------------------


def test_two_old_clients_agree_round_after_round() -> None:
    with serving(num_workers=2) as (server, address):
        clients = [OldClient(address, name) for name in ("a", "b")]
        params = [client.register() for client in clients]
        assert_same(params[0], params_of(tiny_model()))
        assert_same(params[0], params[1])
        for round_ in range(1, 4):
            deltas = [like(params[0], 0.5, torch.bfloat16), like(params[1], 1.5)]
            params = in_threads(*(partial(c.submit, d) for c, d in zip(clients, deltas, strict=True)))
            assert_same(params[0], params[1])
            assert server.sync_round == round_
            if round_ == 1:
                assert_same(params[0], minus(params_of(tiny_model()), 1.0))  # the mean of both
        assert_same(params[0], server.get_global_params())
        assert_same(loaded(clients[0].call("GET", "/global_params")), params[0])


def test_a_client_that_sends_the_same_bytes_every_round_counts_every_time() -> None:
    with serving() as (server, address):
        client = OldClient(address, "a")
        start = client.register()
        zero = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
        ones = {**zero, "0.bias": torch.ones(5)}
        for round_ in range(1, 6):
            got = client.submit(ones)
            assert server.sync_round == round_
        expected = start["0.bias"]
        for _ in range(5):
            expected = expected - 1.0
        assert torch.equal(got["0.bias"], expected)


def test_the_same_bytes_count_again_on_a_connection_that_is_kept() -> None:
    with serving() as (server, address):
        client = OldClient(address, "a")
        body = client.whole(like(client.register(), 1.0))
        kept = http.client.HTTPConnection(client.host, client.port, timeout=60)
        for round_ in range(1, 4):
            kept.request("POST", "/submit_pseudograd", body=body)
            assert kept.getresponse().read()
            assert server.sync_round == round_
        kept.close()


def test_fragments_are_exchanged_one_at_a_time() -> None:
    with serving(num_workers=2, num_fragments=2, sync_every=4) as (server, address):
        clients = [OldClient(address, name) for name in ("a", "b")]
        start = clients[0].register()
        clients[1].register()
        plan = server.service.coordinator.plan
        assert plan is not None
        for fragment, names in enumerate(plan.fragments):
            delta = like({name: start[name] for name in names}, 1.0)
            got = in_threads(*(partial(client.submit_fragment, fragment, delta) for client in clients))
            assert_same(got[0], {name: start[name] - 1.0 for name in names})
            assert_same(got[0], got[1])
        assert server.sync_round == 1
        whole = in_threads(
            *(partial(client.submit, like(start, 1.0)) for client in clients)
        )  # a forced sync of everything
        assert_same(whole[0], minus(minus(start, 1.0), 1.0))
        assert server.sync_round == 2


def test_a_client_that_cuts_its_model_by_the_number_of_tensors_fits_a_run_that_does() -> None:
    names = list(params_of(tiny_model()))
    for strategy, fits in (("counted", True), ("contiguous", False)):
        with serving(num_fragments=4, sync_every=4, fragment_strategy=strategy) as (_, address):
            client = OldClient(address, "a")
            start = client.register()
            first = {name: torch.ones_like(start[name]) for name in names[:2]}  # six tensors in four: 2, 2, 1, 1
            if fits:
                assert_same(client.submit_fragment(0, first), {name: start[name] - 1.0 for name in first})
            else:
                with pytest.raises(Answered, match="fragment-strategy counted") as caught:
                    client.submit_fragment(0, first)
                assert caught.value.status == 422


def test_an_old_client_and_a_modern_worker_hold_the_same_bits() -> None:
    with serving(num_workers=2, outer_lr=0.7, outer_momentum=0.9, codec="bf16") as (server, address):
        old, finished = OldClient(address, "old"), threading.Event()

        def modern() -> dict[str, Tensor]:
            model = tiny_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            with DiLoCoWorker(model, optimizer, server.address, worker_id="modern", sync_every=3):
                train_steps(model, optimizer, 9, seed=1)
                finished.wait(60)
                return params_of(model)

        def ancient() -> dict[str, Tensor]:
            wait_until(lambda: server.status()["plan"] is not None)  # the modern worker says what H is
            model = tiny_model()
            held = old.register()
            for round_ in range(3):
                model.load_state_dict(held)
                train_steps(model, torch.optim.SGD(model.parameters(), lr=0.05), 3, seed=10 + round_)
                local = params_of(model)
                held = old.submit({name: (held[name] - local[name]).bfloat16() for name in held})
            finished.set()
            return held

        got = in_threads(modern, ancient)
        assert server.sync_round == 3
        assert_same(got[0], got[1])
        assert not torch.equal(got[1]["0.weight"], tiny_model().state_dict()["0.weight"])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 3, bias=False)
        self.last = nn.Linear(3, 3, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("count", torch.tensor(7))


def test_tied_names_and_counters_travel_but_are_not_contributed() -> None:
    with serving(Tied()) as (server, address):
        client = OldClient(address, "a")
        start = client.register()
        assert list(start) == ["count", "first.weight", "last.weight"]
        assert torch.equal(start["first.weight"], start["last.weight"])
        assert int(start["count"]) == 7
        got = client.submit({name: torch.ones_like(tensor) for name, tensor in start.items()})
        assert torch.equal(got["first.weight"], start["first.weight"] - 1.0)
        assert torch.equal(got["last.weight"], got["first.weight"])
        assert int(got["count"]) == 7
        client.submit({"first.weight": torch.ones(3, 3)})  # nor need they
        assert server.sync_round == 2


# --- retries ------------------------------------------------------------------------------------------------------


def test_a_submit_repeated_while_the_first_waits_is_counted_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    take = Seat.take

    def note(seat: Seat, *submitted: Any) -> Any:
        pieces = take(seat, *submitted)
        taken.append(seat.worker_id)
        return pieces

    monkeypatch.setattr(Seat, "take", note)
    with serving(num_workers=2) as (server, address):
        a, b = OldClient(address, "a"), OldClient(address, "b")
        start = a.register()
        b.register()
        body = a.whole(like(start, 1.0))
        waiting = [a.begin("/submit_pseudograd", body)]
        wait_until(lambda: server.status()["total_submissions"] == 1)
        waiting += [a.begin("/submit_pseudograd", body), a.begin("/submit_pseudograd", a.whole(like(start, 9.0)))]
        wait_until(lambda: taken == ["a"] * 3)  # a repeat that comes after the round has closed is the next one's
        assert "the second time with other values; the first counts" in caplog.text
        result = b.submit(like(start, 1.0))
        assert_same(result, minus(start, 1.0))
        for sock in waiting:
            status, data = response_of(sock)
            assert status == 200
            assert_same(loaded(data), result)
            sock.close()
        assert server.status()["total_submissions"] == 2
        assert server.sync_round == 1


@pytest.mark.parametrize("lose", ["reset", "closed unread", "closed too early"])
def test_a_submit_whose_answer_was_lost_is_answered_again_and_counted_once(lose: str) -> None:
    with serving(num_workers=2) as (server, address):
        a, b = OldClient(address, "a"), OldClient(address, "b")
        start = a.register()
        b.register()
        body = a.whole(like(start, 1.0))
        lost = a.begin("/submit_pseudograd", body)
        wait_until(lambda: server.status()["total_submissions"] == 1)
        if lose == "closed too early":
            lost.close()
        result = b.submit(like(start, 1.0))
        if lose == "closed unread":
            assert lost.recv(1)  # the answer is here, or on its way, and nobody will read it to the end
            lost.close()
        elif lose == "reset":
            lost.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            lost.close()
        assert_same(loaded(a.call("POST", "/submit_pseudograd", body)), result)
        assert server.status()["total_submissions"] == 2
        assert server.sync_round == 1


def test_a_submit_cut_off_before_its_round_closed_is_taken_up_again() -> None:
    with serving(num_workers=2) as (server, address):
        a, b = OldClient(address, "a"), OldClient(address, "b")
        start = a.register()
        b.register()
        body = a.whole(like(start, 1.0))
        lost = a.begin("/submit_pseudograd", body)
        wait_until(lambda: server.status()["total_submissions"] == 1)
        lost.close()
        assert_same(a.register(), start)  # what old clients do next: the round is still open, so nothing is new
        results = in_threads(
            lambda: loaded(a.call("POST", "/submit_pseudograd", body)), lambda: b.submit(like(start, 1.0))
        )
        assert_same(results[0], results[1])
        assert_same(results[0], minus(start, 1.0))
        assert server.status()["total_submissions"] == 2


def test_who_registers_again_after_the_round_closed_contributes_to_the_next() -> None:
    with serving(num_workers=2) as (server, address):
        a, b = OldClient(address, "a"), OldClient(address, "b")
        start = a.register()
        b.register()
        lost = a.begin("/submit_pseudograd", a.whole(like(start, 1.0)))
        wait_until(lambda: server.status()["total_submissions"] == 1)
        lost.close()
        assert_same(b.submit(like(start, 1.0)), minus(start, 1.0))
        assert_same(a.register(), minus(start, 1.0))
        results = in_threads(lambda: a.submit(like(start, 3.0)), lambda: b.submit(like(start, 3.0)))
        assert_same(results[0], minus(minus(start, 1.0), 3.0))
        assert server.status()["total_submissions"] == 4


# --- life and death -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_client_that_hung_up_while_it_waited_dies_of_silence_and_its_contribution_stays() -> None:
    with serving(num_workers=2, heartbeat_timeout=2.0) as (server, address):
        a, b = OldClient(address, "a"), OldClient(address, "b")
        start = a.register()
        b.register()
        hung_up = a.begin("/submit_pseudograd", a.whole(like(start, 2.0)))
        wait_until(lambda: server.status()["total_submissions"] == 1)
        hung_up.close()

        def b_beats_until_a_is_dead() -> bool:
            b.post_json("/heartbeat", worker_id="b", steps_per_second=1.0)
            return server.status()["total_worker_deaths"] == 1

        wait_until(b_beats_until_a_is_dead)
        assert list(workers_of(server)) == ["b"]
        assert_same(b.submit(like(start, 4.0)), minus(start, 3.0))  # the mean of both
        a.post_json("/heartbeat", worker_id="a", steps_per_second=2.0)  # and it may come back
        assert sorted(workers_of(server)) == ["a", "b"]


def test_a_client_that_waits_is_alive_without_heartbeats() -> None:
    with serving(num_workers=2, heartbeat_timeout=1.0) as (server, address):
        a, b = OldClient(address, "a"), OldClient(address, "b")
        start = a.register()
        waiting = a.begin("/submit_pseudograd", a.whole(like(start, 1.0)))
        wait_until(lambda: server.status()["total_submissions"] == 1)
        quiet = OldClient(address, "quiet")
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
        notice_death(sock, heartbeat_timeout_s)
        option = partial(sock.getsockopt, socket.IPPROTO_TCP)
        after = option(socket.TCP_KEEPIDLE) + option(socket.TCP_KEEPCNT) * option(socket.TCP_KEEPINTVL)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert after == noticed_after_s


def test_heartbeats_report_speed_and_round() -> None:
    with serving() as (server, address):
        client = OldClient(address, "a")
        params = client.register()
        client.submit(like(params, 1.0))
        answer = json.loads(client.post_json("/heartbeat", worker_id="a", steps_per_second=3.5))
        assert answer == {"status": "ok", "sync_round": 1}
        assert workers_of(server)["a"]["steps_per_second"] == 3.5
        assert workers_of(server)["a"]["hostname"] == "machine-a"


def test_leaving_twice_is_leaving_and_shrinks_the_barrier() -> None:
    with serving(num_workers=2) as (server, address):
        a, b = OldClient(address, "a"), OldClient(address, "b")
        start = a.register()
        b.register()
        waiting = a.begin("/submit_pseudograd", a.whole(like(start, 1.0)))
        wait_until(lambda: server.status()["total_submissions"] == 1)
        for _ in range(2):
            assert json.loads(b.post_json("/deregister", worker_id="b")) == {"status": "ok"}
        status, data = response_of(waiting)
        waiting.close()
        assert status == 200
        assert_same(loaded(data), minus(start, 1.0))
        with pytest.raises(Answered, match="404"):
            b.submit(like(start, 1.0))


def test_who_deregisters_while_it_waits_is_told_so_and_does_not_come_back() -> None:
    with serving(num_workers=2) as (server, address):
        a, b = OldClient(address, "a"), OldClient(address, "b")
        start = a.register()
        b.register()
        waiting = a.begin("/submit_pseudograd", a.whole(like(start, 1.0)))
        wait_until(lambda: server.status()["total_submissions"] == 1)
        a.post_json("/deregister", worker_id="a")
        assert response_of(waiting)[0] == 404
        waiting.close()
        assert list(workers_of(server)) == ["b"]


def test_an_id_that_lives_on_another_machine_is_refused() -> None:
    with serving() as (_, address):
        OldClient(address, "a").register()
        with pytest.raises(Answered) as caught:
            OldClient(address, "a", hostname="machine-b").register()
        assert caught.value.status == 409
        assert caught.value.error["code"] == "id_in_use"


def test_status_is_the_servers_own() -> None:
    with serving() as (server, address):
        client = OldClient(address, "a")
        client.register()
        got = json.loads(client.call("GET", "/status"))
        assert got.keys() == server.status().keys()
        assert got["heartbeat_timeout"] == 120.0
        assert got["min_workers"] == 1
        assert got["total_worker_deaths"] == 0
        assert list(got["workers"]) == ["a"]


def test_who_waits_when_the_server_stops_is_told_to_come_back() -> None:
    with DiLoCoServer(tiny_model().state_dict(), num_workers=2, port=0, **PLAIN) as server:
        compat = CompatServer(server, 0).start()
        a = OldClient(compat.address, "a")
        waiting = a.begin("/submit_pseudograd", a.whole(like(a.register(), 1.0)))
        wait_until(lambda: server.status()["total_submissions"] == 1)
        compat.stop()
        compat.stop()
        status, data = response_of(waiting)
        waiting.close()
        assert status == 503
        assert json.loads(data)["error"]["code"] == "busy"


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
    with serving() as (server, address):
        port = int(address.rsplit(":", 1)[1])
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}"):
            CompatServer(server, port)


# --- orders -------------------------------------------------------------------------------------------------------


def order(server: DiLoCoServer, kind: str, worker_id: str | None = None) -> None:
    server.service.answer(Control(kind=kind, worker_id=worker_id))  # type: ignore[arg-type]


def test_who_is_told_to_finish_leaves_with_its_next_heartbeat_and_may_register_again() -> None:
    with serving(num_workers=2) as (server, address):
        a, b = OldClient(address, "a"), OldClient(address, "b")
        start = a.register()
        b.register()
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
        waiting = a.begin("/submit_pseudograd", a.whole(like(start, 1.0)))
        wait_until(lambda: server.status()["total_submissions"] == 2)  # the open round waits for b alone
        assert_same(b.submit(like(start, 3.0)), minus(minus(start, 1.0), 2.0))
        assert response_of(waiting)[0] == 200
        waiting.close()


def test_who_is_told_to_finish_while_it_trains_is_told_when_it_submits() -> None:
    with serving(num_workers=2) as (server, address):
        a, b = OldClient(address, "a"), OldClient(address, "b")
        start = a.register()
        b.register()
        order(server, "drain", "a")
        with pytest.raises(Answered, match="told to finish") as caught:
            a.submit(like(start, 5.0))
        assert (caught.value.status, caught.value.error["code"]) == (503, "closing")
        assert list(workers_of(server)) == ["b"]
        assert server.status()["total_submissions"] == 0
        assert json.loads(a.post_json("/deregister", worker_id="a")) == {"status": "ok"}


def test_who_is_told_to_finish_while_it_waits_gets_its_answer_first() -> None:
    with serving(num_workers=2) as (server, address):
        a, b = OldClient(address, "a"), OldClient(address, "b")
        start = a.register()
        b.register()
        waiting = a.begin("/submit_pseudograd", a.whole(like(start, 1.0)))
        wait_until(lambda: server.status()["total_submissions"] == 1)
        order(server, "drain", "a")
        assert json.loads(a.post_json("/heartbeat", worker_id="a", steps_per_second=1.0))["status"] == "ok"
        with pytest.raises(Answered, match=r"is to finish .* nothing more is taken from it"):
            a.submit(like(start, 9.0))
        assert_same(b.submit(like(start, 3.0)), minus(start, 2.0))
        status, data = response_of(waiting)
        waiting.close()
        assert status == 200
        assert_same(loaded(data), minus(start, 2.0))
        wait_until(lambda: list(workers_of(server)) == ["b"])


def test_a_shutdown_does_not_wait_for_old_clients_that_cannot_hear_of_it() -> None:
    with serving(num_workers=2, drain_timeout_s=3600.0) as (server, address):
        waits, trains = OldClient(address, "waits"), OldClient(address, "trains")
        start = waits.register()
        trains.register()
        waiting = waits.begin("/submit_pseudograd", waits.whole(like(start, 1.0)))
        wait_until(lambda: server.status()["total_submissions"] == 1)
        order(server, "shutdown")
        with pytest.raises(Answered, match="closing"):
            trains.post_json("/heartbeat", worker_id="trains", steps_per_second=1.0)
        status, data = response_of(waiting)
        waiting.close()
        assert status == 200
        assert_same(loaded(data), minus(start, 1.0))
        server.wait()  # it stops by itself
        assert workers_of(server) == {}
        with pytest.raises(Answered, match="closing"):
            trains.register()


def test_an_order_to_exchange_now_is_let_pass() -> None:
    with serving() as (server, address):
        client = OldClient(address, "a")
        start = client.register()
        order(server, "sync", "a")
        for _ in range(2):
            assert json.loads(client.post_json("/heartbeat", worker_id="a"))["status"] == "ok"
        assert server.service.coordinator.commands.pending("a") == ()
        assert_same(client.submit(like(start, 1.0)), minus(start, 1.0))


def test_who_was_removed_comes_back_by_leaving_first() -> None:
    with serving() as (server, address):
        client = OldClient(address, "a")
        client.register()
        order(server, "kick", "a")
        for again in (client.register, lambda: client.post_json("/heartbeat", worker_id="a")):
            with pytest.raises(Answered, match="kicked") as caught:
                again()
            assert caught.value.status == 403
        client.post_json("/deregister", worker_id="a")
        client.register()
        assert list(workers_of(server)) == ["a"]


# --- bad input ----------------------------------------------------------------------------------------------------


def good(client: OldClient) -> dict[str, Tensor]:
    return like(params_of(tiny_model()), 1.0)


def changed(**tensors: Tensor | None) -> Callable[[OldClient], bytes]:
    def make(client: OldClient) -> bytes:
        made = {**good(client), **{name.replace("_", "."): tensor for name, tensor in tensors.items()}}
        return client.whole({name: tensor for name, tensor in made.items() if tensor is not None})

    return make


def raw(payload: Callable[[], bytes]) -> Callable[[OldClient], bytes]:
    return lambda client: submission({"worker_id": client.worker_id}, payload())


def bomb() -> bytes:
    sink = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(saved(like(params_of(tiny_model()), 1.0)))) as source,
        zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for entry in source.infolist():
            target.writestr(entry.filename, bytes(50 << 20) if "/data/0" in entry.filename else source.read(entry))
    return sink.getvalue()


class RunsCode:
    def __reduce__(self) -> tuple[object, ...]:
        return exec, ("raise SystemExit('code of a stranger was run')",)


NAN = torch.full((5,), float("nan"))
BAD: list[tuple[str, int, str, Callable[[OldClient], bytes]]] = [
    ("nothing", 400, "too few", lambda c: b""),
    ("too short for a header", 400, "too few", lambda c: b"\0\0"),
    ("header longer than the body", 400, "at most", lambda c: struct.pack(">I", 999) + b"{}"),
    ("huge header", 400, "at most", lambda c: struct.pack(">I", 2**32 - 1) + bytes(100_000)),
    ("header not JSON", 400, "JSON", lambda c: struct.pack(">I", 3) + b"{a}" + saved(good(c))),
    ("header not UTF-8", 400, "JSON", lambda c: struct.pack(">I", 2) + b"\xff\xfe" + saved(good(c))),
    ("header without id", 400, "worker_id", lambda c: submission({}, saved(good(c)))),
    ("id not text", 400, "worker_id", lambda c: submission({"worker_id": 3}, saved(good(c)))),
    ("id with a slash", 400, "worker_id", lambda c: submission({"worker_id": "a/b"}, saved(good(c)))),
    ("key twice", 400, "twice", lambda c: struct.pack(">I", 33) + b'{"worker_id":"a","worker_id":"a"}'),
    ("unregistered", 404, "/register", lambda c: submission({"worker_id": "stranger"}, saved(good(c)))),
    ("no payload", 400, "payload", lambda c: submission({"worker_id": c.worker_id}, b"")),
    ("not torch.save", 415, "torch.save", raw(lambda: b"hello, world")),
    ("a pickle of before", 415, "before 1.6", raw(lambda: saved({}, _use_new_zipfile_serialization=False))),
    ("code", 415, "exec", raw(lambda: saved({"0.weight": RunsCode()}))),
    ("zip bomb", 413, "unpacked", raw(bomb)),
    ("a list", 415, "torch.save", raw(lambda: saved([torch.ones(2)]))),
    ("truncated archive", 415, "torch.save", raw(lambda: saved({"a": torch.ones(9)})[:-30])),
    ("NaN", 422, "'0.bias'", changed(**{"0_bias": NAN})),
    ("missing", 422, "'0.bias' is missing", changed(**{"0_bias": None})),
    ("unknown", 422, "'9.bias' is not in", changed(**{"9_bias": torch.ones(3)})),
    ("wrong shape", 422, "got [6], run has [5]", changed(**{"0_bias": torch.ones(6)})),
    ("wrong dtype", 422, "got float64", changed(**{"0_bias": torch.ones(5, dtype=torch.float64)})),
    ("sparse", 422, "'0.bias' is sparse", changed(**{"0_bias": torch.ones(5).to_sparse()})),
    ("meta", 422, "'0.bias' is on the meta", changed(**{"0_bias": torch.ones(5, device="meta")})),
]


@pytest.fixture(scope="module")
def run() -> Iterator[tuple[DiLoCoServer, OldClient]]:
    with serving() as (server, address):
        client = OldClient(address, "a")
        client.register()
        yield server, client


@pytest.mark.parametrize(("status", "says", "make"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_a_bad_submission_is_refused_by_name_and_nothing_is_counted(
    run: tuple[DiLoCoServer, OldClient], status: int, says: str, make: Callable[[OldClient], bytes]
) -> None:
    server, client = run
    with pytest.raises(Answered) as caught:
        client.call("POST", "/submit_pseudograd", make(client))
    assert caught.value.status == status
    assert caught.value.error.keys() == {"code", "message", "hint", "request_id", "retry_after_s"}
    assert says in caught.value.error["message"] + caught.value.error["hint"]
    assert server.sync_round == 0
    assert server.status()["total_submissions"] == 0
    assert server.service.failure == ""


def fragment_body(client: OldClient, fragment: object) -> bytes:
    return submission({"worker_id": client.worker_id, "fragment_id": fragment}, saved(good(client)))


REQUESTS: list[tuple[str, str, str, Callable[[OldClient], bytes | None], dict[str, str], int, str]] = [
    ("unknown path", "POST", "/v1/join", lambda c: b"{}", {}, 404, "/register"),
    ("wrong method", "GET", "/register", lambda c: None, {}, 405, "POST"),
    ("wrong method", "PUT", "/status", lambda c: b"", {}, 405, "GET"),
    ("bad JSON", "POST", "/register", lambda c: b"{", {}, 400, "JSON"),
    ("deep JSON", "POST", "/register", lambda c: b"[" * 100_000, {}, 400, "nested"),
    ("no id", "POST", "/register", lambda c: b'{"hostname": "x"}', {}, 400, "worker_id"),
    ("empty id", "POST", "/deregister", lambda c: b'{"worker_id": ""}', {}, 400, "worker_id"),
    ("infinite speed", "POST", "/heartbeat", lambda c: b'{"worker_id":"a","steps_per_second":1e999}', {}, 400, "range"),
    ("no speed", "POST", "/heartbeat", lambda c: b'{"worker_id":"a","steps_per_second":NaN}', {}, 400, "NaN"),
    ("backwards", "POST", "/heartbeat", lambda c: b'{"worker_id":"a","steps_per_second":-1}', {}, 400, ">= 0"),
    ("stranger's heart", "POST", "/heartbeat", lambda c: b'{"worker_id":"stranger"}', {}, 404, "/register"),
    ("compressed", "POST", "/register", lambda c: b"{}", {"Content-Encoding": "gzip"}, 415, "compressed"),
    ("chunked", "POST", "/register", lambda c: b"{}", {"Transfer-Encoding": "chunked"}, 411, "Content-Length"),
    ("two lengths", "POST", "/register", lambda c: b"{}", {"Content-length": "5, 6"}, 400, "one number"),
    ("signed length", "POST", "/register", lambda c: b"{}", {"Content-Length": "+2"}, 400, "one number"),
    ("large JSON", "POST", "/register", lambda c: b"{}", {"Content-Length": str(2 << 20)}, 413, "1048576"),
    ("no such fragment", "POST", "/submit_fragment_pseudograd", lambda c: fragment_body(c, 1), {}, 400, "plan has 1"),
    ("fragment −1", "POST", "/submit_fragment_pseudograd", lambda c: fragment_body(c, -1), {}, 400, "fragment_id"),
    ("fragment true", "POST", "/submit_fragment_pseudograd", lambda c: fragment_body(c, True), {}, 400, "fragment_id"),
    ("fragment none", "POST", "/submit_fragment_pseudograd", lambda c: c.whole(good(c)), {}, 400, "fragment_id"),
]


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "says"),
    [row[1:] for row in REQUESTS],
    ids=[row[0] for row in REQUESTS],
)
def test_a_bad_request_is_refused_by_name(
    run: tuple[DiLoCoServer, OldClient],
    method: str,
    path: str,
    body: Callable[[OldClient], bytes | None],
    headers: dict[str, str],
    status: int,
    says: str,
) -> None:
    _, client = run
    with pytest.raises(Answered) as caught:
        client.call(method, path, body(client), **headers)
    assert caught.value.status == status
    assert says in str(caught.value.error) + str(caught.value.headers)


def test_a_length_is_required(run: tuple[DiLoCoServer, OldClient]) -> None:
    _, client = run
    with socket.create_connection((client.host, client.port), timeout=60) as sock:
        sock.sendall(b"POST /register HTTP/1.1\r\nHost: x\r\n\r\n")
        assert response_of(sock)[0] == 411


def test_a_body_over_the_limit_is_refused_before_a_byte_of_it_is_sent(run: tuple[DiLoCoServer, OldClient]) -> None:
    _, client = run
    with socket.create_connection((client.host, client.port), timeout=60) as sock:
        sock.sendall(b"POST /submit_pseudograd HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
        status, data = response_of(sock)
    assert status == 413
    assert "at most" in json.loads(data)["error"]["message"]


def test_a_client_that_asks_first_is_told_to_go_on_only_if_its_body_is_acceptable(
    run: tuple[DiLoCoServer, OldClient],
) -> None:
    _, client = run
    body = json.dumps({"worker_id": "a", "steps_per_second": 1.0}).encode()
    head = "POST /heartbeat HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    with socket.create_connection((client.host, client.port), timeout=60) as sock:
        sock.sendall((head % len(body)).encode())
        assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(body)
        assert response_of(sock)[0] == 200
    with socket.create_connection((client.host, client.port), timeout=60) as sock:
        sock.sendall((head % (1 << 30)).encode())
        assert response_of(sock)[0] == 413


def test_a_body_shorter_than_announced_is_refused(run: tuple[DiLoCoServer, OldClient]) -> None:
    server, client = run
    body = client.whole(good(client))
    with socket.create_connection((client.host, client.port), timeout=60) as sock:
        sock.sendall(f"POST /submit_pseudograd HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        sock.sendall(body[:-10])
        sock.shutdown(socket.SHUT_WR)
        status, data = response_of(sock)
    assert status == 400
    assert "10 bytes short" in json.loads(data)["error"]["message"]
    assert server.status()["total_submissions"] == 0


@pytest.mark.parametrize(
    "head", [b"hello\r\n\r\n", b"\x16\x03\x01\x02\r\n\r\n", b"GET " + b"x" * 20_000, b"GET / HTTP/9.9\r\n\r\n"]
)
def test_what_is_not_http_gets_an_answer_in_the_same_form(run: tuple[DiLoCoServer, OldClient], head: bytes) -> None:
    _, client = run
    with socket.create_connection((client.host, client.port), timeout=60) as sock:
        sock.sendall(head)
        status, data = response_of(sock)
    assert status in (400, 414, 505)
    assert json.loads(data)["error"]["code"] == "bad_request"


def test_a_connection_that_stalls_inside_a_body_is_closed() -> None:
    with serving(limits=CompatLimits(stall_s=0.2)) as (server, address):
        client = OldClient(address, "a")
        body = client.whole(like(client.register(), 1.0))
        with socket.create_connection((client.host, client.port), timeout=60) as sock:
            sock.sendall(f"POST /submit_pseudograd HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode())
            sock.sendall(body[:-10])
            assert sock.recv(1) == b""
        assert server.status()["total_submissions"] == 0
        client.submit(like(client.register(), 1.0))  # the port is as well as before
        assert server.sync_round == 1


def test_connections_beyond_the_limit_are_closed_at_once() -> None:
    with serving(limits=CompatLimits(max_connections=2)) as (_, address):
        host, port = address.split(":")
        held = [socket.create_connection((host, int(port)), timeout=60) for _ in range(2)]
        for sock in held:  # each is served
            sock.sendall(b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n")
            assert response_of(sock)[0] == 200
        with socket.create_connection((host, int(port)), timeout=60) as extra:
            assert extra.recv(1) == b""
        for sock in held:
            sock.close()


def test_more_workers_than_the_limit_wait_until_one_is_gone() -> None:
    with serving(limits=CompatLimits(max_workers=1)) as (_, address):
        a, b = OldClient(address, "a"), OldClient(address, "b")
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
    with (
        DiLoCoServer(
            tiny_model().state_dict(), num_workers=1 if answered else 2, port=0, heartbeat_timeout=1.0, **PLAIN
        ) as server,
        CompatServer(server, 0, limits=CompatLimits(max_workers=1)) as compat,
    ):
        a, b, desk = OldClient(compat.address, "a"), OldClient(compat.address, "b"), compat._desk
        start = a.register()
        crashed = a.begin("/submit_pseudograd", a.whole(like(start, 1.0)))
        wait_until(lambda: server.status()["total_submissions"] == 1)
        if answered:
            assert crashed.recv(1)
        crashed.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        crashed.close()
        wait_until(lambda: server.status()["total_worker_deaths"] == 1)
        assert not desk._seats["a"].is_idle
        b.register()
        assert list(desk._seats) == ["b"]
        wait_until(lambda: desk._pool.memory_bytes == 0)
        with pytest.raises(Answered, match=r"404.*/register"):
            a.submit(like(start, 1.0))


def test_no_model_is_kept_for_a_client_whose_answer_was_lost() -> None:
    with (
        DiLoCoServer(tiny_model().state_dict(), num_workers=1, port=0, **PLAIN) as server,
        CompatServer(server, 0) as compat,
    ):
        client, desk = OldClient(compat.address, "a"), compat._desk
        start = client.register()
        body = client.whole(like(start, 1.0))
        lost = client.begin("/submit_pseudograd", body)
        assert lost.recv(1)
        lost.close()
        (piece,) = desk._seats["a"]._pieces.values()
        wait_until(lambda: not piece.is_held)
        assert (piece.settled, piece.version, piece.agreed) == (True, 1, None)
        assert_same(loaded(client.call("POST", "/submit_pseudograd", body)), minus(start, 1.0))
        assert server.status()["total_submissions"] == 1


def test_a_submission_of_several_fragments_is_taken_whole_or_not_at_all() -> None:
    with serving(num_fragments=2, sync_every=2) as (server, address):
        client = OldClient(address, "a")
        start = client.register()
        names = server.service.coordinator.plan.fragments[1]  # type: ignore[union-attr]
        delta = like(start, 1.0)
        delta[names[-1]] = torch.full_like(delta[names[-1]], float("inf"))
        with pytest.raises(Answered, match="not_finite"):
            client.submit(delta)
        assert server.status()["total_submissions"] == 0
        assert_same(client.submit(like(start, 1.0)), minus(start, 1.0))


def test_nothing_is_kept_of_a_submission_whose_answer_arrived() -> None:
    with (
        DiLoCoServer(tiny_model().state_dict(), num_workers=1, port=0, **PLAIN) as server,
        CompatServer(server, 0) as compat,
    ):
        client, desk = OldClient(compat.address, "a"), compat._desk
        params = client.register()
        for _ in range(3):
            params = client.submit(like(params, 0.1))
        with pytest.raises(Answered):
            client.call("POST", "/submit_pseudograd", client.whole({"x": torch.ones(1)}))
        wait_until(lambda: desk._seats["a"].is_idle)
        wait_until(lambda: desk._pool.memory_bytes == 0)
        assert not desk._bodies


def test_a_body_that_comes_drop_by_drop_is_cut_off() -> None:
    limits = CompatLimits(stall_s=0.5, slowest_bytes_per_s=1 << 30)
    with serving(limits=limits) as (server, address):
        client = OldClient(address, "a")
        body = client.whole(like(client.register(), 1.0))
        with socket.create_connection((client.host, client.port), timeout=0.05) as slow:
            slow.sendall(f"POST /submit_pseudograd HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode())
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


# --- the example --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_example_client_trains_reports_and_leaves() -> None:
    script = Path(__file__).parents[2] / "examples" / "compat_client.py"
    with serving(num_workers=2, num_fragments=2, sync_every=10) as (server, address):
        server_side = OldClient(address, "b")
        server_side.register()
        command = [sys.executable, str(script), "--server", address, "--rounds", "2", "--worker-id", "old-1"]
        part = [name for name in params_of(tiny_model()) if name.startswith("0.")]
        with subprocess.Popen([*command, "--fragment", "0", *part], stdout=subprocess.PIPE, text=True) as example:
            wait_until(lambda: "old-1" in workers_of(server))
            names = server.service.coordinator.plan.fragments[0]  # type: ignore[union-attr]
            assert list(names) == part
            params = like(params_of(tiny_model()), 0.0)
            server_side.submit(params)
            server_side.submit(params)
            last = server_side.submit_fragment(0, {name: params[name] for name in part})
            out, _ = example.communicate(timeout=60)
        assert example.returncode == 0, out
        assert "registered old-1: 6 tensors" in out
        assert out.count("heartbeat: ok, round ") == 2
        assert out.count("submitted, norm") == 2
        assert "submitted fragment 0" in out
        assert "status: round 2" in out
        assert out.rstrip().endswith("deregistered")
        assert list(workers_of(server)) == ["b"]
        assert_same(last, {name: server.get_global_params()[name] for name in part})
        assert float(last["0.weight"].norm()) < float(tiny_model().state_dict()["0.weight"].norm())
