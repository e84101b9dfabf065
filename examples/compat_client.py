"""A client of the older protocol, with nothing but torch and the standard library.

    outerstep server -m model -n 1 --compat-port 8513 --insecure
    python examples/compat_client.py --server 127.0.0.1:8513 --rounds 3 --worker-id old-1

It does not know what the server's model computes, so it trains on an objective that every model has: make all weights
smaller, ½‖θ‖². Each round is a few steps of plain SGD on a local copy, a pseudo-gradient (global − local) for every
floating-point tensor, and a submit that the server holds open until the round closes.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import math
import socket
import struct

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
LONGEST_ROUND_S = 600.0


class OldClient:
    """The seven endpoints. Like the old clients, it opens a new connection for each request."""

    def __init__(self, server: str, worker_id: str) -> None:
        host, _, port = server.rpartition(":")
        self.host, self.port, self.worker_id = host, int(port), worker_id

    def register(self, sync_every: int) -> Tensors:
        about = {"hostname": socket.gethostname(), "sync_every": sync_every, "bf16_comm": True}
        return load(self._json("/register", {"worker_id": self.worker_id, **about}))

    def submit(self, pseudograds: Tensors) -> Tensors:
        return load(self._request("POST", "/submit_pseudograd", frame({"worker_id": self.worker_id}, pseudograds)))

    def submit_fragment(self, fragment_id: int, pseudograds: Tensors) -> Tensors:
        header = {"worker_id": self.worker_id, "fragment_id": fragment_id}
        return load(self._request("POST", "/submit_fragment_pseudograd", frame(header, pseudograds)))

    def global_params(self) -> Tensors:
        return load(self._request("GET", "/global_params"))

    def heartbeat(self, steps_per_second: float) -> dict[str, object]:
        beat = {"worker_id": self.worker_id, "steps_per_second": steps_per_second}
        return dict(json.loads(self._json("/heartbeat", beat)))

    def deregister(self) -> None:
        self._json("/deregister", {"worker_id": self.worker_id})

    def status(self) -> dict[str, object]:
        return dict(json.loads(self._request("GET", "/status")))

    def _json(self, path: str, message: dict[str, object]) -> bytes:
        return self._request("POST", path, json.dumps(message).encode())

    def _request(self, method: str, path: str, body: bytes | None = None) -> bytes:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=LONGEST_ROUND_S)
        try:
            connection.request(method, path, body=body, headers={"Connection": "close"})
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise SystemExit(f"{method} {path}: {response.status} {data.decode(errors='replace')}")
        return data


def frame(header: dict[str, object], tensors: Tensors) -> bytes:
    """4 bytes of header length, big-endian; the header; the tensors."""
    text = json.dumps(header).encode()
    payload = io.BytesIO()
    torch.save(tensors, payload)
    return struct.pack(">I", len(text)) + text + payload.getvalue()


def load(data: bytes) -> Tensors:
    return dict(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))


def train(params: Tensors, steps: int, lr: float) -> Tensors:
    """SGD on ½‖θ‖², whose gradient is θ; returns the pseudo-gradients global − local, in bf16 for transfer."""
    pseudograds: Tensors = {}
    for name, theta in params.items():
        if theta.is_floating_point():
            local = theta.clone()
            for _ in range(steps):
                local -= lr * local
            pseudograds[name] = (theta - local).to(torch.bfloat16)
    return pseudograds


def norm(params: Tensors) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in params.values() if t.is_floating_point()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True, metavar="HOST:PORT", help="the server's compatibility port")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker-id", default=f"old-{socket.gethostname()}")
    parser.add_argument("--steps", type=int, default=10, help="local steps per round")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument(
        "--fragment",
        nargs="*",
        metavar=("ID", "NAME"),
        help="after the rounds, submit one more fragment: its number and the names of its tensors",
    )
    arguments = parser.parse_args()

    client = OldClient(arguments.server, arguments.worker_id)
    params = client.register(arguments.steps)
    print(f"registered {arguments.worker_id}: {len(params)} tensors, norm {norm(params):.4f}", flush=True)
    try:
        for _ in range(arguments.rounds):
            pseudograds = train(params, arguments.steps, arguments.lr)
            said = client.heartbeat(steps_per_second=1.0)
            print(f"heartbeat: {said['status']}, round {said['sync_round']}", flush=True)
            params = client.submit(pseudograds)
            print(f"submitted, norm {norm(params):.4f}", flush=True)
        if arguments.fragment:
            number, *names = arguments.fragment
            part = train({name: params[name] for name in names}, arguments.steps, arguments.lr)
            params.update(client.submit_fragment(int(number), part))
            print(f"submitted fragment {number}, norm {norm(params):.4f}", flush=True)
        status = client.status()
        newest = client.global_params()
        print(f"status: round {status['sync_round']}, norm of the newest parameters {norm(newest):.4f}", flush=True)
    finally:
        client.deregister()
        print("deregistered", flush=True)


if __name__ == "__main__":
    main()
