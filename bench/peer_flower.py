"""A Flower server averages the weights of two clients (FedAvg over gRPC). Started by peers.py.

A round is from the moment the server picks its clients until it has the mean: the weights go down, come back as they
were, and are averaged. Nobody trains, nobody evaluates. `start_server` and `start_client` are deprecated but
still there, and Flower's shortest way: one server process, one per client, nothing in between.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import Any

import torch

from harness import HOST, Actor, say
from models import fill, make

CLIENTS = 2
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"


class Server:
    def __init__(self, port: int, rounds: int) -> None:
        self._port, self._rounds = port, rounds

    def run(self) -> list[float]:
        """All rounds; seconds of each, without the first, which warms up."""
        from flwr.server import ServerConfig, start_server
        from flwr.server.strategy import FedAvg

        seconds: list[float] = []

        class Timed(FedAvg):  # type: ignore[misc]
            def configure_fit(self, *args: Any, **kwargs: Any) -> Any:
                self.begun_s = time.monotonic()
                return super().configure_fit(*args, **kwargs)

            def aggregate_fit(self, *args: Any, **kwargs: Any) -> Any:
                made = super().aggregate_fit(*args, **kwargs)
                seconds.append(time.monotonic() - self.begun_s)
                say(f"  round {len(seconds) - 1}: {seconds[-1]:.3f} s")
                return made

        start_server(
            server_address=f"{HOST}:{self._port}",
            config=ServerConfig(num_rounds=self._rounds + 1),
            strategy=Timed(min_fit_clients=CLIENTS, min_available_clients=CLIENTS, fraction_evaluate=0.0),
        )
        if len(seconds) != self._rounds + 1:
            raise RuntimeError(f"Flower finished {len(seconds)} of {self._rounds + 1} rounds")
        return seconds[1:]

    def close(self) -> None:
        pass


class Client:
    def __init__(self, port: int, size: str) -> None:
        self._port = port
        self._model = fill(make(size))

    def run(self) -> None:
        from flwr.client import NumPyClient, start_client

        params = list(self._model.parameters())

        class Trainer(NumPyClient):  # type: ignore[misc]
            def get_parameters(self, config: Any) -> Any:
                return [param.detach().numpy() for param in params]

            @torch.no_grad()
            def fit(self, parameters: Any, config: Any) -> Any:
                for param, values in zip(params, parameters, strict=True):
                    param.copy_(torch.from_numpy(values))
                return self.get_parameters(config), 1, {}

        start_client(server_address=f"{HOST}:{self._port}", client=Trainer().to_client(), insecure=True)

    def close(self) -> None:
        pass


def main(numel: int, rounds: int) -> list[float]:
    with socket.create_server((HOST, 0)) as probe:  # it cannot say which port it took
        port = int(probe.getsockname()[1])
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Actor(Server, port, rounds))
        server.tell("run")
        for _ in range(CLIENTS):
            stack.enter_context(Actor(Client, port, f"{numel // 1_000_000}M")).tell("run")
        seconds: list[float] = server.hear().value
        return seconds


if __name__ == "__main__":
    from peer_program import started_by_peers

    started_by_peers(main)
