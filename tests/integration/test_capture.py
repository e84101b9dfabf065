"""What somebody on the path sees: a recorder between worker and server keeps every byte of a round, both ways."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from outerstep.errors import Unauthorized
from outerstep.security import Access, Credentials, parse_address
from outerstep.security.tokens import new_token
from outerstep.server import DiLoCoServer
from outerstep.types import Control, Heartbeat, Leave, Wishes
from outerstep.wire.http_transport import HttpTransport
from outerstep.wire.messages import PLACES, address_of, encode_json
from outerstep.worker import DiLoCoWorker
from support import HandClient, tiny_model, train_steps

WRONG = new_token("run")
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
        texts.extend([f"{method} {target} HTTP/1.1".encode(), encode_json(request), bytes(how.get("body") or b"")])
        answer = call(self, request, **how)
        texts.extend([encode_json(answer), bytes(how.get("into") or b"")])
        return answer

    status = HttpTransport.status

    def recording_status(self: HttpTransport) -> dict[str, object]:
        texts.append(b"GET /status HTTP/1.1")
        answer = status(self)
        texts.append(json.dumps(answer, separators=(",", ":")).encode())
        return answer

    monkeypatch.setattr(HttpTransport, "call", recording)
    monkeypatch.setattr(HttpTransport, "status", recording_status)
    return texts


def a_round(address: str, **settings: Any) -> None:
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCoWorker(model, optimizer, address, worker_id="observed", heartbeat_interval=0, **settings):
        train_steps(model, optimizer, 2, seed=1)


def everything(address: str, credentials: str) -> None:
    """A worker's whole life, and what an operator says and is told: join, upload, fetch, heartbeat, status, control,
    and a stranger's try."""
    a_round(address, credentials=credentials)
    transport = HttpTransport(address, credentials=credentials)
    client = HandClient(transport, "by-hand")
    client.join()
    agreement = client.poll()
    client.fetch(agreement.payloads[0])
    head = client.session.head
    transport.call(Heartbeat(**head, step=7, steps_per_second=3.0, loss=1.25))
    assert transport.status()["sync_round"] == 1
    transport.call(Control(kind="plan", changes=Wishes(sync_every=77), reason="an operator's secret reason"))
    transport.call(Control(kind="pardon", worker_id="by-hand"))
    transport.call(Leave(**head, reason="a worker's secret reason"))
    known = Credentials(credentials).find(address)
    assert known is not None
    stranger = HttpTransport(Access(*parse_address(address), WRONG, known.fingerprint).join_string)
    with pytest.raises(Unauthorized):
        stranger.status()
    transport.close()


def test_nothing_of_a_run_can_be_read_on_the_way(tmp_path: Path, said: list[bytes]) -> None:
    credentials = str(tmp_path / "c")
    with DiLoCoServer(tiny_model().state_dict(), 1, port=0, sync_every=2, credentials=credentials) as server:
        recorder = Recorder(server.address)
        everything(recorder.address, credentials)
        recorder.close()
        weights = [p.numpy().tobytes() for p in server.get_global_params().values()]
        tokens = Credentials(credentials).tokens.load()
    spoken = [target.split()[1].split(b"?")[0] for target in said if target.endswith(b" HTTP/1.1")]
    asked = {b"/v1/" + path for path in (b"join", b"offer", b"part", b"poll", b"heartbeat", b"leave")}
    assert asked | {b"/status", b"/v1/control"} <= set(spoken)
    shown = [b"Authorization: Bearer " + token.encode() for token in (tokens.run, tokens.admin, WRONG)]
    secrets = set().union(*(windows(text) for text in (*said, *weights, *shown)))
    assert len(secrets) > 2000
    seen = recorder.windows()
    assert len(seen) > 2000
    assert not secrets & seen


@pytest.mark.row("B01")
def test_without_a_token_nothing_but_the_health_answers(tmp_path: Path) -> None:
    """Every path that there is, and some that there are not, for every method."""
    with DiLoCoServer(tiny_model().state_dict(), 1, port=0, credentials=str(tmp_path / "c")) as server:
        asked = {path for _, path, _ in PLACES.values()} | {
            "/status",
            "/healthz",
            "/",
            "/v1",
            "/metrics",
            "/v1/nothing",
        }
        answers: dict[int, set[tuple[str, str]]] = {}
        for path in sorted(asked):
            for method in ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
                connection = HttpTransport(server.access.join_string)._new_connection(20.0)
                connection.request(method, path)
                answers.setdefault(connection.getresponse().status, set()).add((method, path))
                connection.close()
    assert answers.pop(200) == {("GET", "/healthz")}
    assert answers.keys() == {401}


def test_in_plain_text_the_recorder_reads_it_all(said: list[bytes]) -> None:
    """The same without TLS: it shows that the recorder would have seen it."""
    with DiLoCoServer(tiny_model().state_dict(), 1, port=0, sync_every=2, insecure=True) as server:
        recorder = Recorder(server.address)
        a_round(f"http://{recorder.address}")
        recorder.close()
    frame = max(said, key=len)
    assert windows(frame) & recorder.windows()
    assert b"PUT /v1/offer" in b"".join(recorder.seen)
    assert b"Authorization" not in b"".join(recorder.seen)
