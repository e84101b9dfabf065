"""The agreed model is read by those who take no part: over real sockets, whole or by fragment, while rounds close."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_safetensors
from torch import Tensor, nn

from outerstep.errors import Busy, Forbidden, NotFound, TransportError, Unauthorized
from outerstep.security import parse_address
from outerstep.server import DiLoCoServer, reading
from outerstep.topology.server.client import DiLoCoClient
from outerstep.topology.server.reading import read_files, read_model
from outerstep.wire.http_transport import HttpTransport
from outerstep.wire.routes import Reply
from sites import Site
from support import in_threads, intercept, memory_worker, tiny_model, train_steps, wait_until
from unit.models_on_disk import Tied

BIG = 1 << 21  # values: what does not fit into the buffers of a socket


@contextlib.contextmanager
def serving(model: nn.Module, **settings: Any) -> Iterator[DiLoCoServer]:
    facts = {"sync_every": 1, "codec": "fp32", "port": 0, "insecure": True, "num_workers": 1, **settings}
    with DiLoCoServer(model.state_dict(), **facts) as server:
        yield server


def transport_to(server: DiLoCoServer) -> HttpTransport:
    return HttpTransport(f"http://{server.address}")


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Every parameter moves."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def assert_model(got: dict[str, Tensor], server: DiLoCoServer) -> None:
    expected = server.get_global_params()
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name].float() if got[name].is_floating_point() else got[name], tensor), name


class TestOneReader:
    def test_reads_the_model_before_anybody_has_joined(self) -> None:
        with serving(Tied(3)) as server:
            model = read_model(transport_to(server))
            assert model is not None
            assert_model(model.tensors(), server)
            assert model.header.facts.round == 0
            with pytest.raises(NotFound, match="nobody has joined yet"):
                read_model(transport_to(server), fragment=0)

    def test_gets_the_newest_and_registers_nobody(self) -> None:
        """Tied tensors, buffers, a parameter in bf16; in three fragments."""
        model = Tied(3)
        with serving(model, num_fragments=3, sync_every=3) as server:
            with memory_worker(server, "w", model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1)):
                for _ in range(6):
                    step(model, optimizer)
            client = DiLoCoClient(f"http://{server.address}")
            assert_model(client.get_global_params(), server)
            assert not server.status()["workers"]
            assert [m.worker_id for m in server.service.coordinator.members] == ["w"]
            read = read_model(transport_to(server))
            assert read is not None
            facts = read.header.facts
            assert facts.versions == tuple(store.newest.version for store in server.service.stores)
            assert facts.round == server.sync_round > 0
            assert facts.dtypes == {"small": "bfloat16"}
            assert_model({**load_safetensors(bytes(read.file)), "head.weight": read.tensors()["head.weight"]}, server)
            for fragment, names in enumerate(facts.fragments):
                part = read_model(transport_to(server), fragment=fragment)
                assert part is not None
                assert part.header.facts.fragments == (names,)
                kept = {stored.name for stored in part.header.tensors}
                assert kept == set(names)
                assert all(torch.equal(part.tensors()[name], read.tensors()[name]) for name in names)
            with pytest.raises(NotFound, match="fragment 3 does not exist"):
                read_model(transport_to(server), fragment=3)

    def test_an_evaluation_loop_is_told_that_nothing_is_newer(self) -> None:
        model = tiny_model()
        with serving(model) as server:
            transport = transport_to(server)
            first = read_model(transport)
            assert first is not None
            assert read_model(transport, known=first.etag) is None
            with memory_worker(server, "w", model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1)):
                train_steps(model, optimizer, 1, seed=1)
            second = read_model(transport, known=first.etag)
            assert second is not None
            assert second.etag != first.etag
            assert read_model(transport, known=f'"x", W/{second.etag}') is None

    def test_the_head_says_what_it_is(self) -> None:
        with serving(tiny_model()) as server:
            answer = transport_to(server).read("/v1/model")
            assert answer is not None
            headers, body = answer
            assert headers["Outerstep-Round"] == "0"
            assert headers["Outerstep-Versions"] == ""
            assert len(headers["Outerstep-Hash"]) == 32
            assert int(headers["Content-Length"]) == len(body)
            assert json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])["__metadata__"]["format"] == "pt"

    def test_gets_the_files_beside_the_model_that_are_its_own(self, tmp_path: Path) -> None:
        for name in ("config.json", "tokenizer.json", "secrets.json", "notes.txt", "state.json"):
            (tmp_path / name).write_text(json.dumps({"name": name}))
        with serving(tiny_model(), model_files=str(tmp_path)) as server:
            found = read_files(transport_to(server))
            assert {name: json.loads(data)["name"] for name, data in found.items()} == {
                "config.json": "config.json",
                "tokenizer.json": "tokenizer.json",
            }
            for name in ("secrets.json", "../config.json", "/etc/passwd", ""):
                with pytest.raises(NotFound, match="no such file"):
                    transport_to(server).read(f"/v1/model/files?name={name}")


def test_it_takes_a_token_that_may_read(tmp_path: Path) -> None:
    site = Site(tmp_path)
    try:
        reader = site.with_token(site.tokens.give("evaluation", rights=["read"]))
        assert read_model(reader) is not None
        joiner = site.with_token(site.tokens.give("site-a", rights=["join"]))
        for path in ("/v1/model", "/v1/model/files"):
            with pytest.raises(Forbidden, match="'site-a' does not have the right to read"):
                joiner.read(path)
        with pytest.raises(Unauthorized):
            site.with_token("run-" + "x" * 43).read("/v1/model")
    finally:
        site.server.stop()


def test_what_is_read_while_rounds_close_is_one_version_of_each_fragment() -> None:
    model, over = tiny_model(), threading.Event()
    with serving(model, num_fragments=2, sync_every=2) as server:
        rounds: list[int] = []

        def train() -> None:
            with memory_worker(server, "w", model, optimizer := torch.optim.SGD(model.parameters(), lr=0.01)):
                while not over.is_set():
                    train_steps(model, optimizer, 2, seed=1)

        def read() -> None:
            try:
                transport = transport_to(server)
                while len(set(rounds)) < 5:
                    got = read_model(transport)  # which checks every fragment's hash
                    assert got is not None
                    rounds.append(got.header.facts.round)
            finally:
                over.set()

        in_threads(train, read)
        assert rounds == sorted(rounds)
        wait_until(lambda: server.typed_status().readers == 0)


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(BIG))


@contextlib.contextmanager
def slow_reader(server: DiLoCoServer) -> Iterator[socket.socket]:
    """One that asks for the model, and takes nothing of it."""
    before = server.service.readers.count
    with socket.create_connection(parse_address(server.address), timeout=60) as sock:
        sock.sendall(b"GET /v1/model HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        wait_until(lambda: server.service.readers.count > before)
        yield sock


class TestManyReaders:
    def test_slow_ones_hold_back_no_round_and_little_memory_and_make_way(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("outerstep.topology.server.reading.TRIES", 1)
        model, now = Large(), 0.0
        with serving(model) as server, contextlib.ExitStack() as stack:
            server.service.readers.clock = lambda: now
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with memory_worker(server, "w", model, optimizer):
                stack.enter_context(slow_reader(server))  # of version 0
                step(model, optimizer)
                oldest = stack.enter_context(slow_reader(server))  # of version 1
                step(model, optimizer)
                with pytest.raises(Busy, match="still reading earlier versions"):
                    read_model(transport_to(server))
                assert server.sync_round == 2, "no round waits for a reader"
                now += reading.TURN_S
                newest = read_model(transport_to(server))  # the first of the two has made way
                assert newest is not None
                assert_model(newest.tensors(), server)
            assert server.service.readers.count == 1
            oldest.close()
            wait_until(lambda: server.service.readers.count == 0)

    def test_one_address_with_one_token_has_a_few_places(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("outerstep.topology.server.reading.TRIES", 1)
        with serving(Large()) as server, contextlib.ExitStack() as stack:
            for _ in range(reading.MOST_OF_ONE):
                stack.enter_context(slow_reader(server))
            with pytest.raises(Busy, match=f"{reading.MOST_OF_ONE} readers from one address"):
                read_model(transport_to(server))
            assert server.typed_status().readers == reading.MOST_OF_ONE

    def test_a_reader_whose_token_is_revoked_gets_no_more(self) -> None:
        with serving(Large()) as server, slow_reader(server) as sock:
            server.service.readers.revoke({"another"})
            wait_until(lambda: server.service.readers.count == 0)
            received = 0
            with contextlib.suppress(OSError):
                while piece := sock.recv(1 << 20):
                    received += len(piece)
            assert received < 4 * BIG


class TestADishonestServer:
    """What a reader gets is checked before it is kept."""

    def read_with(self, change: Any) -> None:
        with serving(tiny_model()) as server:
            honest = server.service.read_model

            def lie(request: Any) -> Reply:
                reply = honest(request)
                return replace(change(reply), over=reply.over)

            intercept(server.service, honest, lie)
            read_model(transport_to(server))

    def test_flips_a_bit(self) -> None:
        def change(reply: Reply) -> Reply:
            data = bytearray(b"".join(reply.rest))
            data[5] ^= 1
            return replace(reply, rest=[memoryview(data)])

        with pytest.raises(TransportError, match="arrived damaged: what is not trained does not have the hash"):
            self.read_with(change)

    def test_sends_more_than_its_header_says(self) -> None:
        with pytest.raises(TransportError, match="header says"):
            self.read_with(lambda reply: replace(reply, rest=[*reply.rest, memoryview(b"more")]))

    def test_states_another_hash(self) -> None:
        def change(reply: Reply) -> Reply:
            return replace(reply, headers=(("Outerstep-Hash", "0" * 32),))

        with pytest.raises(TransportError, match="another hash"):
            self.read_with(change)

    @pytest.mark.parametrize("length", [0, 1, 1 << 40, 2**64 - 1])
    def test_names_a_length_that_no_header_has(self, length: int) -> None:
        with pytest.raises(TransportError, match="the model's header has"):
            self.read_with(lambda reply: replace(reply, body=length.to_bytes(8, "little") + bytes(reply.body[8:])))
