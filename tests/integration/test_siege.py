"""A port that strangers can reach: whatever they do there, workers train on, and memory and threads stay as they were.

Limits are small here, so that nothing takes minutes; what they are in earnest is in wire/limits.py."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from outerstep.security import Credentials, parse_address
from outerstep.security.tls import pinning_context
from outerstep.server import DiLoCoServer
from outerstep.wire.http_transport import HttpTransport
from outerstep.wire.limits import ServiceLimits
from outerstep.wire.messages import MAX_JOIN_BYTES
from outerstep.worker import DiLoCoWorker
from support import HandClient, Ledger, count, make_frame, wait_until

SMALL = {
    "window_s": 1.2,
    "stall_s": 4.0,
    "stranger_s": 3.0,
    "idle_s": 3.0,
    "settling_s": 0.2,
    "free_refusals": 50,
    "refusals_per_s": 0.1,
    "penalty_s": 0.05,
}
HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(range(32))  # the beginning of a TLS handshake


class Fortress:
    """A secure server with small limits."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.credentials = Credentials(folder / "credentials")
        self.server = DiLoCoServer(
            Ledger(cells=4096).state_dict(),
            port=0,
            credentials=str(self.credentials.folder),
            **{"num_workers": 1, "sync_every": 1, "codec": "fp32", **settings},
        ).start()
        self.address = self.server.address
        self.where = parse_address(self.address)

    def plain(self) -> socket.socket:
        return socket.create_connection(self.where, timeout=30)

    def secured(self) -> socket.socket:
        return pinning_context().wrap_socket(self.plain())

    def transport(self) -> HttpTransport:
        return HttpTransport(self.address, credentials=self.credentials.folder)

    def half_a_body(self) -> socket.socket:
        """With a valid token: the beginning of a message that never ends."""
        sock = self.secured()
        token = self.credentials.tokens.load().run
        sock.sendall(
            f"POST /v1/offer HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
            "Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{".encode()
        )
        return sock

    @property
    def seen(self) -> dict[str, int]:
        assert self.server._http is not None
        return self.server._http._connections.summary()


@pytest.fixture
def fortress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fortress]:
    monkeypatch.setattr("outerstep.server.server.ServiceLimits", partial(ServiceLimits, **SMALL))
    made = Fortress(tmp_path)
    yield made
    made.server.stop()


class Healthy:
    """A worker that trains in a thread of its own until it is told to stop."""

    def __init__(self, fortress: Fortress) -> None:
        self._fortress, self._over = fortress, threading.Event()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._train, daemon=True)

    def __enter__(self) -> Healthy:
        self._thread.start()
        self.goes_on(3)
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        assert self.failure is None

    def goes_on(self, rounds: int) -> None:
        """So many more rounds close."""
        target = self._fortress.server.sync_round + rounds
        wait_until(lambda: self.failure is not None or self._fortress.server.sync_round >= target)
        assert self.failure is None

    def _train(self) -> None:
        model = Ledger(cells=4096)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        try:
            with DiLoCoWorker(
                model,
                optimizer,
                self._fortress.address,
                worker_id="healthy",
                credentials=str(self._fortress.credentials.folder),
            ) as worker:
                while not self._over.is_set():
                    count(model, optimizer, 0, 1)
                    time.sleep(0.002)
                assert worker.sync_metrics["steps_discarded"] == 0
        except BaseException as error:  # noqa: BLE001 - told by goes_on
            self.failure = error


def connection_threads() -> int:
    return sum(thread.name == "outerstep-connection" for thread in threading.enumerate())


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def drip(socks: list[socket.socket], over: threading.Event) -> None:
    """A byte of a head now and then."""
    head = iter(b"GET /status HTTP/1.1\r\nX: " + b"y" * 10_000)
    while not over.wait(0.1):
        byte = bytes([next(head)])
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.send(byte)


@pytest.mark.slow
@pytest.mark.row("F17")
def test_two_hundred_that_stand_still_and_a_flood_of_garbage_harm_nobody(fortress: Fortress) -> None:
    with Healthy(fortress) as worker, contextlib.ExitStack() as stack:
        threads, memory, over = connection_threads(), resident_bytes(), threading.Event()

        def besiege(make: Callable[[], socket.socket]) -> list[socket.socket]:
            return [stack.enter_context(make()) for _ in range(50)]

        def half_a_handshake() -> socket.socket:
            sock = fortress.plain()
            sock.sendall(HELLO)
            return sock

        silent = besiege(fortress.plain)
        half_open = besiege(half_a_handshake)
        bodies = besiege(fortress.half_a_body)
        dripping = besiege(fortress.secured)
        dripper = threading.Thread(target=drip, args=(dripping, over), daemon=True)
        dripper.start()
        worker.goes_on(5)
        wait_until(lambda: connection_threads() <= threads + 8)
        over.set()
        dripper.join()
        for sock in (*silent, *half_open, *bodies, *dripping):
            with contextlib.suppress(OSError):  # reset is closed, too
                assert not sock.recv(4096)
        seen = fortress.seen
        assert seen["slow_closed"] >= 90, seen  # bodies that stopped, heads that dripped
        ended = ("slow_closed", "strangers_closed", "strangers_dropped", "handshakes_failed")
        assert sum(seen.get(how, 0) for how in ended) >= 200, seen

        rng = random.Random(17)
        for _ in range(300):
            sock = stack.enter_context(fortress.plain())
            with contextlib.suppress(OSError):
                sock.sendall(rng.randbytes(rng.randint(1, 500)))
        worker.goes_on(5)
        wait_until(lambda: connection_threads() <= threads + 8)
        more = fortress.seen
        assert more["handshakes_failed"] > seen["handshakes_failed"]
        assert more["turned_away"] > 0, more  # after so many they are not even listened to
        worker.goes_on(5)
        assert resident_bytes() - memory < 64 << 20


@pytest.mark.row("F17")
def test_workers_keep_their_room_however_many_strangers_hold_on(tmp_path: Path) -> None:
    """With limits as they are by default; but for few connections in all."""
    fortress = Fortress(tmp_path, max_connections=40)
    try:
        with Healthy(fortress) as worker, contextlib.ExitStack() as stack:
            for _ in range(200):
                stack.enter_context(contextlib.suppress(OSError))
                stack.enter_context(fortress.plain())
            wait_until(lambda: fortress.seen.get("turned_away", 0) + fortress.seen.get("strangers_dropped", 0) >= 180)
            assert fortress.seen["strangers"] <= 20
            worker.goes_on(5)
            assert fortress.seen["open"] <= 40
    finally:
        fortress.server.stop()


@pytest.mark.slow
def test_guessing_tokens_becomes_slow_and_a_worker_still_gets_in(fortress: Fortress) -> None:
    def guess() -> None:
        with contextlib.suppress(OSError), fortress.secured() as sock:
            sock.sendall(b"GET /status HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer run-guess\r\n\r\n")
            sock.recv(4096)

    for _ in range(120):
        guess()
    assert fortress.seen["refusals_delayed"] > 0
    client = HandClient(fortress.transport(), "late")
    client.join()
    assert client.contribute(make_frame({"cells": torch.ones(4096)})).version == 1


@pytest.mark.slow
def test_idle_connections_are_closed_and_their_owners_do_not_notice(fortress: Fortress) -> None:
    transport = fortress.transport()
    transport.status()
    wait_until(lambda: fortress.seen["open"] == 0)
    assert transport.status()["connections"]["open"] == 1  # type: ignore[index]


# --- memory -----------------------------------------------------------------------------------------------------------


def join_head(fortress: Fortress, length: int) -> bytes:
    token = fortress.credentials.tokens.load().run
    return (
        f"POST /v1/join HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


def test_what_is_only_announced_takes_no_memory(fortress: Fortress) -> None:
    """Sixty times 32 MiB, of which nothing comes."""
    before = resident_bytes()
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(fortress.secured()).sendall(join_head(fortress, MAX_JOIN_BYTES))
        assert fortress.transport().status()["failure"] == ""
        assert resident_bytes() - before < 256 << 20


def test_too_many_large_messages_at_a_time_are_told_to_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = partial(ServiceLimits, message_bytes=4 << 20)
    monkeypatch.setattr("outerstep.server.server.ServiceLimits", limits)
    fortress = Fortress(tmp_path)
    try:
        with fortress.secured() as sock:
            body = b" " * (8 << 20)
            sock.sendall(join_head(fortress, len(body)))
            with contextlib.suppress(OSError):
                sock.sendall(body)
            assert b"503" in sock.recv(4096)
        HandClient(fortress.transport(), "small").join()  # and what was taken is given back
        with fortress.secured() as sock:
            body = json.dumps({"worker_id": "x" * (3 << 20)}).encode()
            sock.sendall(join_head(fortress, len(body)) + body)
            assert b"400" in sock.recv(4096)
    finally:
        fortress.server.stop()
