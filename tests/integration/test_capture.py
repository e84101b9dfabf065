"""What somebody on the path sees: a recorder between worker and server keeps every byte of a round, both ways."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from outerstep.server import DiLoCoServer
from outerstep.wire import strict_json
from outerstep.wire.http_transport import HttpTransport
from outerstep.wire.messages import address_of
from outerstep.worker import DiLoCoWorker
from support import tiny_model, train_steps

RUN = 8  # bytes in a row that must not be seen


class Recorder:
    """A TCP proxy in front of `address` that remembers everything."""

    def __init__(self, address: str) -> None:
        host, port = address.split(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.seen: list[bytes] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=(one, other), daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(65536):
                self.seen.append(data)
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # one of the two has gone

    def close(self) -> None:
        self._listener.close()

    def windows(self) -> set[bytes]:
        """Every run of bytes that went by, within what was read at once; a run may also span two reads."""
        found: set[bytes] = set()
        for data in [*self.seen, b"".join(self.seen)]:
            found |= windows(data)
        return found


def windows(data: bytes) -> set[bytes]:
    """Runs of few different bytes are left out: zeros say nothing, and turn up by themselves."""
    return {run for i in range(len(data) - RUN + 1) if len(set(run := data[i : i + RUN])) > 2}


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What the worker's transport was given to send and what came back: heads, messages, frames."""
    texts: list[bytes] = []
    call = HttpTransport.call

    def recording(self: HttpTransport, request: Any, **how: Any) -> Any:
        method, target, _ = address_of(request)
        texts.extend(
            [f"{method} {target} HTTP/1.1".encode(), strict_json.encode(request), bytes(how.get("body") or b"")]
        )
        answer = call(self, request, **how)
        texts.extend([strict_json.encode(answer), bytes(how.get("into") or b"")])
        return answer

    monkeypatch.setattr(HttpTransport, "call", recording)
    return texts


def a_round(address: str, **settings: Any) -> None:
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCoWorker(model, optimizer, address, worker_id="observed", heartbeat_interval=0, **settings):
        train_steps(model, optimizer, 2, seed=1)


def test_nothing_of_a_round_can_be_read_on_the_way(tmp_path: Path, said: list[bytes]) -> None:
    with DiLoCoServer(tiny_model().state_dict(), 1, port=0, sync_every=2, credentials=str(tmp_path / "c")) as server:
        recorder = Recorder(server.address)
        a_round(recorder.address, credentials=str(tmp_path / "c"))
        assert server.sync_round == 1
        recorder.close()
        token = server.access.token.encode()
    secrets = set().union(*(windows(text) for text in said), windows(b"Authorization: Bearer " + token))
    assert len(secrets) > 1000
    seen = recorder.windows()
    assert len(seen) > 1000
    assert not secrets & seen
    assert token not in b"".join(recorder.seen)


def test_in_plain_text_the_recorder_reads_it_all(said: list[bytes]) -> None:
    """The same without TLS: it shows that the recorder would have seen it."""
    with DiLoCoServer(tiny_model().state_dict(), 1, port=0, sync_every=2, insecure=True) as server:
        recorder = Recorder(server.address)
        a_round(f"http://{recorder.address}")
        recorder.close()
    frame = max(said, key=len)
    assert windows(frame) & recorder.windows()
    assert b"PUT /v1/part" in b"".join(recorder.seen)
    assert b"Authorization" not in b"".join(recorder.seen)
