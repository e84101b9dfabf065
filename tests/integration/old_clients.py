"""Clients of the old protocol, as they are, and the compatibility port of a server for them."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from outerstep.compat import CompatLimits, CompatServer
from outerstep.server import DiLoCoServer
from support import tiny_model, wait_until

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
            raise Answered(response.status, json.loads(data), dict(response.headers))
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

    def connection(self, timeout_s: float = 60.0) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=timeout_s)

    def begin(self, body: bytes) -> socket.socket:
        """Submit and do not wait for the answer."""
        sock = self.connection()
        sock.sendall(head_of(len(body)) + body)
        return sock


class OldWorker:
    """A worker of the old protocol, from its guide alone: what it holds of the global model is a snapshot of its own
    parameters by name, so it sends neither buffers nor the second name of a tied tensor. With `num_fragments` it cuts
    its parameters by their number, in the model's order, and sends one group at a time from a thread of its own."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, client: OldClient, sync_every: int, fragments: int = 1
    ) -> None:
        self.model, self.optimizer, self.client = model, optimizer, client
        self.sync_every = sync_every
        names = [name for name, _ in model.named_parameters()]
        each, more = divmod(len(names), fragments)
        ends = [each * (i + 1) + min(i + 1, more) for i in range(fragments)]
        self.fragments = [names[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
        self.syncs = self.reconnections = 0
        self._step = 0
        self._snapshot: dict[str, Tensor] = {}
        self._inflight: Future[dict[str, Tensor]] | None = None
        self._background = ThreadPoolExecutor(1)
        self._apply(client.register())

    def stepped(self) -> None:
        """After each step of the optimizer."""
        self._step += 1
        if len(self.fragments) == 1:
            if self._step == self.sync_every:
                self._sync()
            return
        interval = self.sync_every // len(self.fragments)
        if self._step % interval == 0:
            self._sync_fragment((self._step // interval - 1) % len(self.fragments))

    def stop(self) -> None:
        self._finish_inflight()
        self._background.shutdown()
        self.client.post_json("/deregister", worker_id=self.client.worker_id)

    def _sync(self) -> None:
        self._step = 0
        try:
            answer = self.client.submit(self._pseudogradients(self._snapshot))
        except (Answered, OSError, http.client.HTTPException):
            self.reconnections += 1
            self._snapshot = {name: tensor for name, tensor in self.client.register().items() if name in self._snapshot}
            answer = self.client.submit(self._pseudogradients(self._snapshot))
        self._apply(answer)
        self.syncs += 1

    def _sync_fragment(self, fragment: int) -> None:
        self._finish_inflight()
        mine = self._pseudogradients(self.fragments[fragment])
        self._inflight = self._background.submit(self.client.submit_fragment, fragment, mine)

    def _finish_inflight(self) -> None:
        if self._inflight is not None:
            self._apply(self._inflight.result())
            self._inflight = None
            self.syncs += 1

    def _pseudogradients(self, names: Iterable[str]) -> dict[str, Tensor]:
        local = dict(self.model.named_parameters())
        return {name: (self._snapshot[name] - local[name].detach()).bfloat16() for name in names}

    def _apply(self, params: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, param in self.model.named_parameters():
                if name in params:
                    param.copy_(params[name])
                    self._snapshot[name] = param.detach().clone()
        missing = [name for name, _ in self.model.named_parameters() if name not in self._snapshot]
        assert not missing, f"the server never sent {missing}"


def head_of(size_bytes: int, path: str = "/submit_pseudograd", *lines: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", *lines, f"Content-Length: {size_bytes}", "", ""]).encode()


def response_of(sock: socket.socket) -> tuple[int, bytes]:
    response = http.client.HTTPResponse(sock)
    response.begin()
    return response.status, response.read()


def answer_of(sock: socket.socket) -> dict[str, Tensor]:
    """What a submission that was begun comes to."""
    with sock:
        status, data = response_of(sock)
    assert status == 200
    return loaded(data)


@contextlib.contextmanager
def serving(
    model: nn.Module | Mapping[str, Tensor] | None = None,
    *,
    num_workers: int = 1,
    limits: CompatLimits | None = None,
    **settings: Any,
) -> Iterator[tuple[DiLoCoServer, CompatServer]]:
    model = model or tiny_model()
    state = model.state_dict() if isinstance(model, nn.Module) else model
    with (
        DiLoCoServer(state, num_workers=num_workers, port=0, **{**PLAIN, **settings}) as server,
        CompatServer(server, 0, limits=limits or CompatLimits()) as compat,
    ):
        yield server, compat


@contextlib.contextmanager
def one_client(
    model: nn.Module | None = None, **settings: Any
) -> Iterator[tuple[DiLoCoServer, OldClient, dict[str, Tensor]]]:
    """A run of one old client, and the weights that it was given."""
    with serving(model, **settings) as (server, compat):
        client = OldClient(compat.address, "a")
        yield server, client, client.register()


@contextlib.contextmanager
def two_clients(**settings: Any) -> Iterator[tuple[DiLoCoServer, OldClient, OldClient, dict[str, Tensor]]]:
    """A run of two old clients, and the weights that both were given."""
    with serving(num_workers=2, **settings) as (server, compat):
        a, b = OldClient(compat.address, "a"), OldClient(compat.address, "b")
        start = a.register()
        b.register()
        yield server, a, b, start


def begin_submit(server: DiLoCoServer, client: OldClient, body: bytes) -> socket.socket:
    """A submission that has been counted and waits for its round."""
    before = server.status()["total_submissions"]
    sock = client.begin(body)
    wait_until(lambda: server.status()["total_submissions"] > before)
    return sock


def like(tensors: Mapping[str, Tensor], value: float, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: torch.full_like(tensor, value, dtype=dtype) for name, tensor in tensors.items()}


def minus(tensors: Mapping[str, Tensor], value: float) -> dict[str, Tensor]:
    return {name: tensor - value for name, tensor in tensors.items()}


def workers_of(server: DiLoCoServer) -> Any:
    return server.status()["workers"]
