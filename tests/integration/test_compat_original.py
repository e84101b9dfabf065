"""The compatibility port as the original's own client sees it: it knows fields, ids and errors of the server that it
was written for, and nothing of this one.

`OriginalClient` is written from the original's guide (its seven calls, their fields) and from what it does with an
answer: it takes fields by their names, prints what stands under `error`, and of a refused JSON request nothing but
the status line.
"""

from __future__ import annotations

import http.client
import json
import socket
import struct
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from clusters import Cluster
from integration.old_clients import Answered, OldClient, like, loaded, minus, saved, serving
from outerstep.compat import CompatServer
from outerstep.compat.heard import FILE, HeardAnswers
from outerstep.compat.names import id_of
from outerstep.errors import BadRequest, ConfigError, ServerUnreachable, TransportError
from outerstep.server import DiLoCoServer
from outerstep.topology.server.client import DiLoCoClient, as_info
from outerstep.types import Control, Join
from outerstep.wire.http_transport import HttpTransport
from outerstep.wire.memory import MemoryTransport
from outerstep.wire.messages import decode_json
from ports import free_port
from support import assert_same, in_threads, tiny_model, wait_until

PLAIN: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0}


class OriginalClient:
    def __init__(self, address: str) -> None:
        self.address = address

    def register(self, worker_id: str, **info: object) -> dict[str, Tensor]:
        said = {"worker_id": worker_id, "hostname": "machine-a", **info}
        return loaded(self._request("/register", json.dumps(said).encode()))

    def submit(self, worker_id: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        header = json.dumps({"worker_id": worker_id}).encode()
        body = struct.pack("!I", len(header)) + header + saved(tensors)
        try:
            return loaded(self._request("/submit_pseudograd", body))
        except urllib.error.HTTPError as error:
            said = json.loads(error.read())
            raise ConnectionError(f"Server returned HTTP {error.code}: {said.get('error', said)}") from error

    def heartbeat(self, worker_id: str, steps_per_second: float = 0.0) -> dict[str, Any]:
        beat = {"worker_id": worker_id, "steps_per_second": steps_per_second}
        return dict(json.loads(self._request("/heartbeat", json.dumps(beat).encode())))

    def deregister(self, worker_id: str) -> None:
        self._request("/deregister", json.dumps({"worker_id": worker_id}).encode())

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self._request("/status")))

    def _request(self, path: str, body: bytes | None = None) -> bytes:
        with urllib.request.urlopen(f"http://{self.address}{path}", data=body, timeout=60) as answer:
            data: bytes = answer.read()
            return data


@pytest.fixture(scope="module")
def run() -> Iterator[tuple[DiLoCoServer, OriginalClient]]:
    with serving(num_workers=2) as (server, compat):
        client = OriginalClient(compat.address)
        client.register("old", sync_every=7, bf16_comm=True, gpu_names=["A", "B"])
        yield server, client


# --- what it reads --------------------------------------------------------------------------------------------------


def test_the_status_has_the_fields_of_the_original(run: tuple[DiLoCoServer, OriginalClient]) -> None:
    _, client = run
    before = time.time()
    client.heartbeat("old", 2.5)
    first, second = client.status(), client.status()
    assert (first["status"], first["mode"], first["sync_round"]) == ("running", "sync", 0)
    assert (first["num_workers"], first["num_registered"], first["fragment_submissions"]) == (2, 1, 0)
    assert first["pending_submissions"] == []
    assert first["started_at"] == second["started_at"] <= before
    assert 0.0 < first["uptime_seconds"] <= second["uptime_seconds"] < 3600.0
    worker = first["workers"]["old"]
    assert (worker["sync_round"], worker["last_sync_server_round"], worker["steps_per_second"]) == (0, 0, 2.5)
    assert first["started_at"] <= worker["registered_at"] <= before <= worker["last_heartbeat"] + 0.1
    assert worker["registered_at"] == second["workers"]["old"]["registered_at"]


def test_the_status_counts_rounds_and_fragments() -> None:
    with serving(num_workers=1, num_fragments=2, sync_every=4, quorum=1, grace_period=0.0) as (server, compat):
        client, old = OriginalClient(compat.address), OldClient(compat.address, "a")
        start = old.register()
        for _ in range(2):
            client.submit("a", like(start, 1.0))
        status = client.status()
        assert status["fragment_submissions"] == 4
        assert (status["mode"], status["quorum"], server.status()["mode"]) == ("sync", 1, "quorum")
        assert status["workers"]["a"]["sync_round"] == status["workers"]["a"]["last_sync_server_round"] == 2


def test_a_heartbeat_says_how_many_there_are(run: tuple[DiLoCoServer, OriginalClient]) -> None:
    _, client = run
    expected = {"status": "ok", "sync_round": 0, "num_workers": 2, "num_registered": 1}
    assert client.heartbeat("old", 2.5) == expected
    client.register("b")
    client.register("c")  # one more than was announced
    assert client.heartbeat("old", 2.5) == {**expected, "num_workers": 3, "num_registered": 3}
    client.deregister("b")
    client.deregister("c")
    assert client.heartbeat("old", 2.5) == {**expected, "num_workers": 1}


def test_errors_are_text_where_the_client_looks_for_text(run: tuple[DiLoCoServer, OriginalClient]) -> None:
    server, client = run
    with pytest.raises(ConnectionError) as caught:
        client.submit("stranger", like(server.get_global_params(), 1.0))
    assert str(caught.value) == (
        "Server returned HTTP 404: worker 'stranger' is not registered with this server. "
        "POST /register first; it answers with the parameters"
    )
    with pytest.raises(urllib.error.HTTPError) as refused:  # of this it prints nothing but the status line
        client.heartbeat("stranger")
    assert str(refused.value).startswith("HTTP Error 404: unknown_worker: worker 'stranger' is not registered")
    said = json.loads(refused.value.read())
    assert (said["code"], said["hint"][:14]) == ("unknown_worker", "POST /register")
    assert said["error"] == f"{said['message']}. {said['hint']}"


# --- what it says ---------------------------------------------------------------------------------------------------

ODD = [
    "worker my host",
    "../../etc/passwd",
    "naïve/Ω",
    "a\n\x1b[2Jb",
    "-flag",
    "x" * 256,
    "C:\\run 1",
    ":",
    "\u202eevil",
]


def test_any_text_is_a_worker_id_and_comes_back_as_it_was_said() -> None:
    with serving(num_workers=1) as (server, compat):
        client = OriginalClient(compat.address)
        for round_, worker_id in enumerate(ODD, start=1):
            start = client.register(worker_id)
            assert client.heartbeat(worker_id)["status"] == "ok"
            assert_same(client.submit(worker_id, like(start, 1.0)), minus(start, 1.0))
            assert list(client.status()["workers"]) == [worker_id]
            (known,) = server.service.coordinator.members.live_ids
            assert known == id_of(worker_id)
            assert known.isascii()
            assert known.replace("-", "_").replace(".", "_").replace(":", "_").isidentifier() or known[0].isdigit()
            client.deregister(worker_id)
            assert server.sync_round == round_
    assert len({id_of(worker_id) for worker_id in [*ODD, "worker_my_host"]}) == len(ODD) + 1
    assert id_of("worker_host.local-1:2") == "worker_host.local-1:2"


def test_nobody_is_another_by_choosing_what_his_id_comes_to() -> None:
    with serving(num_workers=2) as (_, compat):
        client = OriginalClient(compat.address)
        start = client.register("my worker")
        for said in (
            partial(client.register, id_of("my worker")),
            partial(client.heartbeat, id_of("my worker")),
            partial(client.deregister, id_of("my worker")),
        ):
            with pytest.raises(urllib.error.HTTPError, match="stands for that of another client") as caught:
                said()
            assert caught.value.code == 403
        with pytest.raises(ConnectionError, match="stands for that of another client"):
            client.submit(id_of("my worker"), like(start, 1.0))
        assert list(client.status()["workers"]) == ["my worker"]


def test_what_a_client_tells_of_itself_is_kept_and_shown() -> None:
    with serving(num_workers=1) as (server, compat):
        client = OriginalClient(compat.address)
        told = {"num_gpus": 2, "gpu_names": ["A 100", "B"], "odd\x1b[2J": "x\ny", "address": "8.8.8.8", "speed": 1.5}
        client.register("my worker", **told, worker_note="z" * 1000)
        expected = {
            "address": "127.0.0.1",
            "worker_id": "my worker",
            "num_gpus": 2,
            "gpu_names": '["A 100", "B"]',
            "odd\\u001b[2J": "x\\ny",
            "speed": 1.5,
            "worker_note": "z" * 256,
        }
        assert client.status()["workers"]["my worker"]["info"] == expected
        workers = server.status()["workers"]
        assert isinstance(workers, dict)
        assert workers[id_of("my worker")]["info"] == expected
        client.register("many", **{f"fact_{i}": i for i in range(100)})
        info = client.status()["workers"]["many"]["info"]
        assert info == {"address": "127.0.0.1", **{f"fact_{i}": i for i in range(15)}}


@pytest.mark.parametrize(
    ("said", "operator", "plan"),
    [
        ({"sync_every": 7, "bf16_comm": True}, {}, (7, "bf16", "fp32")),
        ({"sync_every": 7, "bf16_comm": False}, {}, (7, "fp32", "fp32")),
        ({}, {}, (500, "fp32", "fp32")),
        ({"sync_every": 7, "bf16_comm": False}, {"sync_every": 9, "codec": "bf16"}, (9, "bf16", "bf16")),
        ({"sync_every": 7, "bf16_comm": True}, {"down_codec": "bf16"}, (7, "bf16", "bf16")),
        ({"sync_every": "often"}, {}, (500, "fp32", "fp32")),
        ({"sync_every": 2}, {"num_fragments": 4}, (500, "fp32", "fp32")),  # fewer than one per fragment
    ],
)
def test_the_first_client_settles_what_the_operator_left_open(
    said: dict[str, object], operator: dict[str, object], plan: tuple[int, str, str]
) -> None:
    state = tiny_model().state_dict()
    with DiLoCoServer(state, num_workers=2, port=0, **PLAIN, **operator) as server, CompatServer(server, 0) as compat:
        OriginalClient(compat.address).register("a", **said)
        settled = server.typed_status().plan
        assert settled is not None
        assert (settled.sync_every, settled.codec, settled.down_codec) == plan
        OriginalClient(compat.address).register("b", sync_every=11)  # and who comes later is taken as it is
        assert server.typed_status().plan == settled


def test_full_precision_comes_back_where_nobody_asked_for_less() -> None:
    state = tiny_model().state_dict()
    with DiLoCoServer(state, num_workers=1, port=0, **PLAIN) as server, CompatServer(server, 0) as compat:
        client = OriginalClient(compat.address)
        start = client.register("a", sync_every=5)
        third = like(start, 1.0 / 3.0)
        got = client.submit("a", third)
        assert_same(got, {name: start[name] - third[name] for name in start})
        assert_same(got, server.get_global_params())


# --- a restart of the server ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_clients_go_on_over_a_killed_server_and_no_cycle_is_lost(tmp_path: Path) -> None:
    """They know nothing of it: each submits what it trained meanwhile, and does not register again. One of them moves
    as it did before, to the last bit."""
    address = f"127.0.0.1:{free_port()}"
    flags = ["-n", "2", "--outer-lr", "1", "--outer-momentum", "0"]
    flags += ["--compat-port", address.split(":")[1], "--save-dir", str(tmp_path / "run")]
    with Cluster(tmp_path, *flags) as cluster:
        client, names = OriginalClient(address), ("old a", "b")

        def is_there() -> bool:
            assert cluster.server.poll() is None, cluster.log("server")
            try:
                return bool(client.status())
            except OSError:
                return False

        wait_until(is_there)
        start = client.register("old a", sync_every=3)
        client.register("b", sync_every=3)
        first = in_threads(*(partial(client.submit, name, like(start, 1.0)) for name in names))
        assert_same(first[0], minus(start, 1.0))

        heard = tmp_path / "run" / FILE
        wait_until(lambda: heard.exists() and heard.read_text().count('"0":1') == 2)  # both have their answer
        cluster.server.kill()
        cluster.server.wait()
        cluster.start_server(*flags)

        wait_until(is_there)
        status = client.status()
        assert sorted(status["workers"]) == ["b", "old a"]
        assert status["workers"]["b"]["info"]["sync_every"] == 3
        assert client.heartbeat("b", 1.0)["num_registered"] == 2
        second = in_threads(
            lambda: client.submit("old a", like(start, 1.0)), lambda: client.submit("b", like(start, 5.0))
        )
        for got in second:
            assert_same(got, minus(minus(start, 1.0), 3.0))  # the mean of both: nobody was left out
        status = client.status()
        assert (status["sync_round"], status["total_submissions"]) == (2, 4)
        assert status["workers"]["b"]["last_sync_server_round"] == 2
        assert status["total_worker_deaths"] == 0


def restarted(folder: Path, num_workers: int, **settings: Any) -> tuple[DiLoCoServer, CompatServer]:
    """A server on this folder, from its state if there is one."""
    state = tiny_model().state_dict()
    server = DiLoCoServer(
        state, num_workers=num_workers, port=0, save_dir=str(folder), **{**PLAIN, "codec": "fp32", **settings}
    )
    return server.start(), CompatServer(server, 0).start()


@pytest.mark.parametrize("fragments", [1, 2])
def test_what_is_in_the_model_is_not_taken_again_by_the_server_after(tmp_path: Path, fragments: int) -> None:
    """The round closed, and the server stopped before the answer got out: who never heard it submits the same again."""
    server, compat = restarted(tmp_path, 2, num_fragments=fragments, sync_every=4)
    try:
        a, b = OldClient(compat.address, "a"), OldClient(compat.address, "b")
        start = a.register()
        b.register()
        lost = begin_submit_all(server, a, a.whole(like(start, 1.0)), fragments)
        assert_same(b.submit(like(start, 3.0)), minus(start, 2.0))
        lost.close()
    finally:
        compat.stop()
        server.stop()
    server, compat = restarted(tmp_path, 2)
    try:
        a, b = OldClient(compat.address, "a"), OldClient(compat.address, "b")
        assert_same(a.submit(like(start, 1.0)), minus(start, 2.0))  # at once, and nothing is counted
        assert server.status()["total_submissions"] == 2 * fragments
        both = in_threads(lambda: a.submit(like(start, 5.0)), lambda: b.submit(like(start, 7.0)))
        for got in both:
            assert_same(got, minus(minus(start, 2.0), 6.0))
        assert server.status()["total_submissions"] == 4 * fragments
    finally:
        compat.stop()
        server.stop()


@pytest.mark.parametrize("settings", [{}, {"num_fragments": 3, "sync_every": 6}], ids=["open", "said"])
def test_a_client_that_streams_goes_on_over_a_restart_in_its_first_cycle(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """The server has not seen all of its fragments then."""
    fragments = [["0.weight", "0.bias"], ["2.weight", "2.bias"], ["4.weight", "4.bias"]]
    held: dict[str, Tensor] = {}
    for turn in ((0, 1), (2, 0, 1)):
        server, compat = restarted(tmp_path, 1, **settings)
        try:
            client = OldClient(compat.address, "a")
            held = held or client.register()
            for fragment in turn:
                part = {name: held[name] for name in fragments[fragment]}
                got = client.submit_fragment(fragment, like(part, 1.0 + fragment))
                assert_same(got, minus(part, 1.0 + fragment))  # the same again, and it counts
                held |= got
            assert_same(server.get_global_params(), held)
        finally:
            compat.stop()
            server.stop()
    assert server.status()["total_submissions"] == 5


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"\xff", b"[" * 100_000, b'{"run_id":"run","heard":{"a":{"0":-1}}}', b'{"run_id":"other","heard":{}}'],
    ids=["empty", "cut", "not text", "deep", "negative", "another run"],
)
def test_what_is_not_known_of_answers_is_taken_for_lost(tmp_path: Path, damage: bytes) -> None:
    before = HeardAnswers(tmp_path, "run")
    before.note("a", {0: 3, 1: 2})
    before.note("a", {1: 3})
    before.note("b", {0: 3})
    before.forget("b")
    after = HeardAnswers(tmp_path, "run")
    assert (after.of("a"), after.of("b")) == ({0: 3, 1: 3}, {})
    (tmp_path / FILE).write_bytes(damage)
    damaged = HeardAnswers(tmp_path, "run")
    assert damaged.of("a") == {}
    damaged.note("a", {0: 4})
    assert HeardAnswers(tmp_path, "run").of("a") == {0: 4}
    HeardAnswers(tmp_path / "gone", "run").note("a", {0: 4})  # a folder that cannot be written: said in the log
    assert not (tmp_path / "gone").exists()


def begin_submit_all(server: DiLoCoServer, client: OldClient, body: bytes, fragments: int) -> socket.socket:
    """A submission of which every fragment waits for its round."""
    sock = client.begin(body)
    wait_until(lambda: server.status()["total_submissions"] == fragments)
    return sock


def test_a_place_that_is_kept_over_a_restart_is_kept_for_its_client(tmp_path: Path) -> None:
    server, compat = restarted(tmp_path, 1)
    try:
        start = OldClient(compat.address, "a").register()
        OldClient(compat.address, "o\nd").register()
        gone = OldClient(compat.address, "gone")
        gone.register()
        gone.post_json("/deregister", worker_id="gone")
    finally:
        compat.stop()
        server.stop()
    server, compat = restarted(tmp_path, 1)
    try:
        elsewhere = http.client.HTTPConnection(
            "127.0.0.1", port_of(compat), timeout=60, source_address=("127.0.0.2", 0)
        )
        elsewhere.request("POST", "/submit_pseudograd", body=OldClient(compat.address, "a").whole(like(start, 9.0)))
        assert elsewhere.getresponse().status == 403
        elsewhere.close()
        with pytest.raises(Answered, match="404"):
            OldClient(compat.address, "gone").submit(like(start, 9.0))
        with pytest.raises(Answered, match="stands for that of another client"):
            OldClient(compat.address, id_of("o\nd")).submit(like(start, 9.0))
        assert sorted(OriginalClient(compat.address).status()["workers"]) == ["a", "o\\nd"]
        OldClient(compat.address, "o\nd").post_json("/deregister", worker_id="o\nd")
        worker = server.service.coordinator.members.find("a")
        assert worker is not None
        assert worker.expected_back  # nobody who may speak for it has done so
        assert_same(OldClient(compat.address, "a").submit(like(start, 1.0)), minus(start, 1.0))
        assert not worker.expected_back
        assert (worker.incarnation, worker.contributions) == (1, 1)
    finally:
        compat.stop()
        server.stop()


def port_of(compat: CompatServer) -> int:
    return int(compat.address.rsplit(":", 1)[1])


# --- the client by that name ----------------------------------------------------------------------------------------


def test_the_native_client_answers_by_the_same_names() -> None:
    with serving(num_workers=2) as (server, _):
        client = DiLoCoClient(server.address, max_retries=2, retry_delay=0.1)
        client.register("w", {"hostname": "machine-a", "num_gpus": 2, "gpu_names": ["A"]})
        assert client.heartbeat("w", steps_per_second=3.5) == {
            "status": "ok",
            "sync_round": 0,
            "num_workers": 2,
            "num_registered": 1,
        }
        workers = client.get_status()["workers"]
        assert isinstance(workers, dict)
        assert workers["w"]["hostname"] == "machine-a"
        assert workers["w"]["info"] == {"num_gpus": 2, "gpu_names": '["A"]'}
        server.service.answer(Control(kind="drain", worker_id="w"))
        assert client.heartbeat("w")["drain"] == "an operator asked for it"
        client.deregister("w")
        client.close()


@pytest.mark.parametrize(
    "info",
    [
        {f"fact_{i}": i for i in range(17)},
        {"x" * 65: 1},
        {"": 1},
        {"long": "x" * 257},
        {"large": 2**53 + 1},
        {"list": [1]},
        {"nothing": None},
    ],
    ids=lambda info: next(iter(info)) or "unnamed",
)
def test_a_join_that_tells_more_than_may_be_kept_is_refused(info: dict[str, object]) -> None:
    join = {"protocol": 2, "worker_id": "w", "instance": "0" * 16}
    assert decode_json(json.dumps({**join, "info": {"gpus": 2, "fast": True, "speed": 1.5}}).encode(), Join).info
    with pytest.raises(BadRequest, match="info"):
        decode_json(json.dumps({**join, "info": info}).encode(), Join)
    assert decode_json(json.dumps({**join, "info": as_info(info)}).encode(), Join)  # but its client makes it fit


class Deaf(MemoryTransport):
    """Nobody answers the first few."""

    def __init__(self, server: DiLoCoServer, lost: int) -> None:
        super().__init__(server.service)
        self.lost, self.asked = lost, 0

    def status(self) -> dict[str, object]:
        self.asked += 1
        if self.asked <= self.lost:
            raise TransportError("no answer")
        return super().status()


@pytest.mark.parametrize(("max_retries", "asked"), [(0, 1), (2, 3), (None, 3)])
def test_a_request_without_an_answer_is_repeated_as_often_as_was_said(max_retries: int | None, asked: int) -> None:
    server = DiLoCoServer(tiny_model().state_dict(), num_workers=1, port=0)
    deaf = Deaf(server, lost=2)
    client = DiLoCoClient("memory", max_retries=max_retries, retry_delay=0.01, transport=deaf)
    if max_retries == 0:
        with pytest.raises(TransportError, match="no answer"):
            client.get_status()
    else:
        assert client.get_status()["sync_round"] == 0
    assert deaf.asked == asked


def test_both_clients_read_the_newest_model_and_register_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(num_workers=1) as (server, compat):
        old, native = OldClient(compat.address, "a"), DiLoCoClient(server.address, retry_delay=0.01)
        newest = old.submit(like(old.register(), 1.0))
        read, lost = HttpTransport.read, iter([True, True, False])

        def lose_two(*asked: Any, **how: Any) -> Any:
            if next(lost, False):
                raise TransportError("no answer")
            return read(*asked, **how)

        monkeypatch.setattr(HttpTransport, "read", lose_two)
        assert_same(native.get_global_params(), newest)
        assert_same(loaded(old.call("GET", "/global_params")), newest)
        assert list(server.service.coordinator.members.live_ids) == ["a"]
        native.close()


def test_a_client_that_may_not_retry_gives_up_on_a_server_that_is_not_there() -> None:
    with pytest.raises(ServerUnreachable, match="no answer from the server"):
        DiLoCoClient(f"http://127.0.0.1:{free_port()}", max_retries=0).register("w")
    with pytest.raises(ConfigError, match="max_retries must be >= 0, got -1"):
        DiLoCoClient("http://127.0.0.1:1", max_retries=-1)
