"""Clients of the old protocol, as they are, and the compatibility port of a server for them."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import socket
import struct
from collections.abc import Iterator, Mapping
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
    model: nn.Module | None = None, *, num_workers: int = 1, limits: CompatLimits | None = None, **settings: Any
) -> Iterator[tuple[DiLoCoServer, CompatServer]]:
    state = (model or tiny_model()).state_dict()
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
    wait_until(lambda: server.status()["total_submissions"] == before + 1)
    return sock


def like(tensors: Mapping[str, Tensor], value: float, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: torch.full_like(tensor, value, dtype=dtype) for name, tensor in tensors.items()}


def minus(tensors: Mapping[str, Tensor], value: float) -> dict[str, Tensor]:
    return {name: tensor - value for name, tensor in tensors.items()}


def workers_of(server: DiLoCoServer) -> Any:
    return server.status()["workers"]
