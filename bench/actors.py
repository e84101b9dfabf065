"""outerstep's own server and worker as actors of a benchmark (harness.py)."""

from __future__ import annotations

from typing import Any

from internals import codec_settings
from models import Nudge, fill, make
from outerstep import DiLoCoServer, DiLoCoWorker

STEPS = 2  # between two exchanges: one that moves the weights, one that does not and is due


class Server:
    """Without TLS and tokens unless `tls`: what is beside it here has neither."""

    def __init__(
        self, size: str, workers: int, up: str = "bf16", down: str = "bf16", *, tls: bool = False, **settings: Any
    ) -> None:
        state = fill(make(size)).state_dict()
        settings |= {"port": 0, "sync_every": STEPS, "insecure": not tls, **codec_settings(up, down)}
        self._server = DiLoCoServer(state, workers, **settings)
        self._server.start()

    def address(self) -> str:
        """For a worker or a transport: all that it needs to know."""
        return f"http://{self._server.address}" if self._server.config.insecure else self._server.access.join_string

    def close(self) -> None:
        self._server.stop()


class Worker:
    """Around a model that nobody trains."""

    def __init__(self, size: str, number: int, address: str) -> None:
        model = make(size)
        self._optimizer = Nudge(model)
        self._worker = DiLoCoWorker(model, self._optimizer, address, worker_id=f"worker-{number}")

    def join(self) -> None:
        self._worker.start()

    def train(self) -> None:
        self._optimizer.step()

    def exchange(self) -> None:
        """The step that is due."""
        self._optimizer.step()

    def digest(self) -> float:
        return float(sum(parameter.detach().double().sum() for parameter in self._worker.model.parameters()))

    def close(self) -> None:
        self._worker.abandon("done")
