"""Agreements as workers fetch them, message by message: updates where they lead somewhere, the whole elsewhere."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outerstep.core.codecs.recipe import Recipe
from outerstep.core.manifest import describe
from outerstep.core.state import bytes_of, fp32_views
from outerstep.digest import part_hash, tree_hash
from outerstep.errors import Superseded
from outerstep.server import DiLoCoServer
from outerstep.types import Agreement, Heartbeat, ParameterSpec, Payload
from outerstep.wire.frames import layout
from outerstep.wire.memory import MemoryTransport
from support import HandClient, Ledger, TwoLedgers, in_threads, make_frame, wait_until


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(60, 40), nn.Linear(40, 50), nn.LayerNorm(50), nn.Linear(50, 3))


MANIFEST = describe(make_model())[1]
SPECS = MANIFEST.parameters


def deltas(seed: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {spec.name: 0.1 * torch.randn(spec.shape, generator=source) for spec in SPECS}


def start(num_workers: int = 1, model: nn.Module | None = None, **settings: Any) -> DiLoCoServer:
    facts = {"codec": "fp32", "port": 0, "part_size_bytes": 1024, "sync_every": 2, **settings}
    server = DiLoCoServer((model or make_model()).state_dict(), num_workers, **facts)
    server.service.start()
    return server


class Anchored(HandClient):
    """Holds an anchor, and follows the agreements."""

    def __init__(self, server: DiLoCoServer, worker_id: str, recipe: str) -> None:
        super().__init__(MemoryTransport(server.service), worker_id, MANIFEST)
        self._server, self.recipe = server, Recipe.parse(recipe)
        self.anchor: dict[str, Tensor] = {}
        self.version, self.hash = 0, None

    def join_and_follow(self) -> Anchored:
        self.join()
        self.follow()
        return self

    def follow(self) -> Agreement:
        agreement = self.poll(self.version, self.hash)
        for payload in agreement.payloads:
            self._take(payload, self.fetch(payload))
        self.version, self.hash = agreement.version, tree_hash(bytes_of(self.anchor[spec.name]) for spec in SPECS)
        assert self.hash == agreement.anchor_hash
        return agreement

    def _take(self, payload: Payload, frame: memoryview) -> None:
        def size(spec: ParameterSpec) -> int:
            return 4 * spec.numel if payload.kind == "full" else self.recipe.codec(spec).encoded_bytes(spec.numel)

        name = "fp32" if payload.kind == "full" else self.recipe.name
        found = layout(name, [(spec.name, spec.shape, size(spec)) for spec in SPECS])
        assert frame[: found.data_begin] == found.prefix
        if payload.kind == "full":
            self.anchor = fp32_views(frame, found.places, found.data_begin)
            return
        for spec, entry in zip(SPECS, found.entries, strict=True):
            data = frame[found.data_begin + entry.begin : found.data_begin + entry.end]
            encoded = torch.frombuffer(data, dtype=torch.uint8)
            self.recipe.codec(spec).decode_add(encoded, self.anchor[spec.name].view(-1))

    def step(self, seed: int) -> None:
        self.contribute(make_frame(deltas(seed)), base_version=self.version, oldest_base=self.version)
        wait_until(lambda: self._server.sync_round > self.version)


MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "asynchronous": {"async_mode": True, "dn_buffer_size": 2},
    "every push steps": {"async_mode": True, "dn_buffer_size": 0, "outer_momentum": 0.5},
    "deterministic": {"deterministic": True},
    "a torch optimizer": {"outer_optimizer_factory": lambda params: torch.optim.AdamW(params, lr=0.01)},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recipe", ["bf16", "int8+stochastic", "int4,embeddings=int8,norms=fp32", "e3m0"])
def test_whoever_follows_and_whoever_comes_late_hold_the_same(mode: str, recipe: str) -> None:
    server = start(down_codec=recipe, **MODES[mode])
    follower = Anchored(server, "follower", recipe).join_and_follow()
    for version in range(1, 6):
        follower.step(version)
        assert [payload.kind for payload in follower.follow().payloads] == ["update"]
        late = Anchored(server, "follower", recipe)
        late.session = follower.session  # the same worker, with nothing in hand
        assert [payload.kind for payload in late.follow().payloads] == ["full"]
        assert tree_hash(bytes_of(late.anchor[spec.name]) for spec in SPECS) == follower.hash
    now = server.get_global_params()
    assert all(torch.equal(now[name], anchor) for name, anchor in follower.anchor.items())
    server.service.stop()


def test_who_holds_the_newest_is_sent_nothing() -> None:
    server = start(down_codec="bf16")
    follower = Anchored(server, "w", "bf16").join_and_follow()
    follower.step(1)
    follower.follow()
    assert follower.poll(follower.version, follower.hash).payloads == ()
    server.service.stop()


def test_an_exact_downlink_is_always_whole() -> None:
    server = start(down_codec="fp32")
    follower = Anchored(server, "w", "fp32").join_and_follow()
    for version in range(1, 4):
        follower.step(version)
        assert [payload.kind for payload in follower.follow().payloads] == ["full"]
    server.service.stop()


@pytest.mark.slow
@pytest.mark.parametrize("down", ["bf16", "fp32"])
def test_a_reader_of_the_whole_never_sees_bytes_that_change(down: str) -> None:
    """Three read as fast as they can while rounds close; whatever they were told to fetch, they get, or nothing."""
    server = start(down_codec=down, num_workers=4, quorum=1)
    worker = Anchored(server, "w", down).join_and_follow()
    readers = [HandClient(MemoryTransport(server.service), f"r{i}") for i in range(3)]
    for reader in readers:
        reader.join()
    over, read, superseded = threading.Event(), [], []

    def keep_reading(reader: HandClient) -> Callable[[], None]:
        def job() -> None:
            while not over.is_set():
                agreement = reader.poll()
                (payload,) = agreement.payloads
                try:
                    frame = reader.fetch(payload)  # compares every part, and all of them, with what was announced
                except Superseded:
                    superseded.append(agreement.version)
                    continue
                views = layout("fp32", [(spec.name, spec.shape, 4 * spec.numel) for spec in SPECS])
                params = fp32_views(frame, views.places, views.data_begin)
                assert tree_hash(bytes_of(params[spec.name]) for spec in SPECS) == agreement.anchor_hash
                read.append(agreement.version)

        return job

    def work() -> None:
        try:
            for version in range(1, 40):
                worker.step(version)
                worker.follow()
        finally:
            over.set()

    in_threads(work, *(keep_reading(reader) for reader in readers))
    assert len(set(read)) > 3
    assert len(server.service.stores[0].down.held_versions) <= 2
    server.service.stop()


class TestNobodyIsHeldUp:
    def test_while_one_fragment_steps_the_other_is_sent_and_fetched(self) -> None:
        stepping, go_on = threading.Event(), threading.Event()

        class Slow(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:
                if any(param.grad is not None and param.numel() == 2 for param in self.param_groups[0]["params"]):
                    stepping.set()
                    assert go_on.wait(30)
                super().step()

        server = start(2, TwoLedgers(), num_fragments=2, outer_optimizer_factory=lambda params: Slow(params, lr=1.0))
        stepping.clear()
        clients = [HandClient(MemoryTransport(server.service), f"w{i}") for i in range(2)]
        go_on.set()  # (it steps once, on trial)
        for client in clients:
            client.join()
        go_on.clear()
        stepping.clear()
        for client in clients:
            client.contribute(make_frame({"first": torch.ones(2)}))
        assert stepping.wait(30)  # the rounds thread stands in the middle of fragment 0
        other = clients[0]
        answer = other.transport.call(Heartbeat(**other.session.head, step=1, steps_per_second=0.0))
        assert answer.sync_round == 0
        payload = make_frame({"second": torch.ones(2)})
        assert other.offer(len(payload), fragment=1).state == "send"
        (whole,) = other.poll(fragment=1).payloads
        assert len(other.fetch(whole, fragment=1)) == whole.size_bytes
        assert server.status()["started"]
        go_on.set()
        wait_until(lambda: server.service.stores[0].newest.version == 1)
        server.service.stop()

    def test_a_file_that_takes_long_to_make_keeps_its_own_sender_waiting_alone(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
    ) -> None:
        payload = make_frame({"cells": torch.ones(2)})
        server = start(2, Ledger(), pool_bytes=len(payload), spool_dir=str(tmp_path))
        first, second = (HandClient(MemoryTransport(server.service), name) for name in ("first", "second"))
        for client in (first, second):
            client.join()
            client.sequence = 1
            client.offer(len(payload))
        first.put(payload, 0)
        making, go_on = threading.Event(), threading.Event()

        def slow(*args: int) -> None:
            making.set()
            assert go_on.wait(30)

        monkeypatch.setattr("os.posix_fallocate", slow)

        def wait_and_see() -> None:
            assert making.wait(30)
            assert first.commit(payload).version == 1  # under way: messages, rounds, everybody else's parts
            assert server.status()["pending_submissions"] == ["first"]
            go_on.set()

        in_threads(lambda: second.put(payload, 0), wait_and_see)
        assert second.commit(payload).version == 1
        wait_until(lambda: server.sync_round == 1)
        server.service.stop()

    def test_a_contribution_that_is_dropped_while_its_room_is_made_leaves_nothing(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
    ) -> None:
        payload = make_frame({"cells": torch.ones(2)})
        server = start(1, Ledger(), pool_bytes=1, spool_dir=str(tmp_path))
        client = HandClient(MemoryTransport(server.service))
        client.join()
        client.sequence = 1
        client.offer(len(payload))
        making, go_on = threading.Event(), threading.Event()

        def slow(*args: int) -> None:
            making.set()
            assert go_on.wait(30)

        monkeypatch.setattr("os.posix_fallocate", slow)
        again = HandClient(MemoryTransport(server.service))

        def restart() -> None:
            assert making.wait(30)
            again.join()  # a new start of the same worker: what the old one sent is dropped
            go_on.set()

        def put() -> str:
            try:
                client.put(payload, 0)
            except Exception as error:  # noqa: BLE001 - compared below
                return type(error).__name__
            return ""

        assert in_threads(put, restart)[0] == "MissingParts"
        assert server.status()["pool_spooled_bytes"] == 0
        monkeypatch.undo()
        again.contribute(payload)
        wait_until(lambda: server.sync_round == 1)
        server.service.stop()


def test_after_a_round_no_sum_and_no_contribution_is_left() -> None:
    server = start(3, codec="bf16")
    clients = [Anchored(server, f"w{i}", "bf16").join_and_follow() for i in range(3)]
    store = server.service.stores[0]
    for version in range(1, 4):
        for i, client in enumerate(clients):
            frame = make_frame(deltas(10 * version + i), "bf16")
            client.contribute(frame, base_version=version - 1, oldest_base=version - 1, codec="bf16")
        wait_until(lambda version=version: server.sync_round == version)
        assert store._sums == {}
        assert server.status()["pool_held_bytes"] == 0
        assert server.service.intake.pool.memory_bytes == 0
        for client in clients:
            client.follow()
    assert server.service.intake.pool.mapped_bytes <= 3 * len(frame)  # rooms are used again
    server.service.stop()


def test_part_hashes_of_what_is_lent_are_those_announced() -> None:
    server = start(down_codec="int8")
    follower = Anchored(server, "w", "int8").join_and_follow()
    follower.step(1)
    (payload,) = follower.poll(0, follower.hash).payloads
    assert all(part_hash(follower.get(payload, part)) for part in range(3))
    server.service.stop()


def test_the_memory_that_the_server_was_given_is_let_go_when_the_run_begins() -> None:
    arrays = {name: tensor.numpy().copy() for name, tensor in make_model().state_dict().items()}
    watched = [weakref.ref(array) for array in arrays.values()]
    server = DiLoCoServer({name: torch.from_numpy(array) for name, array in arrays.items()}, 1, port=0)
    del arrays
    gc.collect()
    assert all(ref() is not None for ref in watched)
    HandClient(MemoryTransport(server.service), manifest=MANIFEST).join()
    gc.collect()
    assert all(ref() is None for ref in watched)
