"""The parameter server that one writes in an afternoon: state dicts by `torch.save` over HTTP. For comparison only.

A worker POSTs its bf16 pseudo-gradients as a `torch.save`d dictionary and waits for the answer. The server
`torch.load`s and holds every submission; when all are in, it averages them, takes a step of
`torch.optim.SGD(nesterov=True)` and answers everybody with a `torch.save` of the fp32 weights. Nothing is done slowly
on purpose: the answer is read into one buffer, loading is `weights_only`, one thread per connection.
"""

from __future__ import annotations

import http.client
import http.server
import io
import threading

import torch
from torch import Tensor

from harness import HOST
from models import Nudge, fill, make


class TorchSaveServer:
    def __init__(self, size: str, workers: int) -> None:
        model = fill(make(size))
        self.params = dict(model.named_parameters())
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        self._workers = workers
        self._submitted: list[dict[str, Tensor]] = []
        self._round = 0
        self._changed = threading.Condition()
        self._http = _Listener((HOST, 0), _Handler)
        self._http.app = self
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def port(self) -> int:
        return int(self._http.server_address[1])

    def close(self) -> None:
        self._http.shutdown()

    def submit(self, deltas: dict[str, Tensor]) -> None:
        """Returns when the round is over."""
        with self._changed:
            self._submitted.append(deltas)
            mine = self._round
            if len(self._submitted) == self._workers:
                self._step()
                self._changed.notify_all()
            else:
                self._changed.wait_for(lambda: self._round > mine)

    def _step(self) -> None:
        for name, param in self.params.items():
            param.grad = torch.stack([deltas[name].float() for deltas in self._submitted]).mean(0)
        self._optimizer.step()
        self._submitted = []
        self._round += 1


class _Listener(http.server.ThreadingHTTPServer):
    app: TorchSaveServer
    request_queue_size = 128


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Listener

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.app.submit(torch.load(io.BytesIO(body), weights_only=True))
        self._answer()

    def _answer(self) -> None:
        payload = saved({name: param.detach() for name, param in self.server.app.params.items()})
        self.send_response(200)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *args: object) -> None:
        """Silence: logging is not what we compare."""


class TorchSaveWorker:
    """The same model and the same steps as the worker it is compared with."""

    def __init__(self, size: str, port: int) -> None:
        self._model = make(size)
        self._optimizer = Nudge(self._model)
        self._connection = http.client.HTTPConnection(HOST, port)

    def join(self) -> None:
        self._adopt(self._request("GET", None))

    def train(self) -> None:
        self._optimizer.step()

    def exchange(self) -> None:
        self._optimizer.step()
        deltas = {name: (self._anchor[name] - p.detach()).bfloat16() for name, p in self._model.named_parameters()}
        self._adopt(self._request("POST", saved(deltas)))

    def close(self) -> None:
        self._connection.close()

    def _request(self, method: str, body: memoryview | None) -> dict[str, Tensor]:
        self._connection.request(method, "/", body=body)
        response = self._connection.getresponse()
        loaded: dict[str, Tensor] = torch.load(io.BytesIO(response.read()), weights_only=True)
        return loaded

    @torch.no_grad()
    def _adopt(self, weights: dict[str, Tensor]) -> None:
        self._anchor = weights
        for name, param in self._model.named_parameters():
            param.copy_(weights[name])


def saved(tensors: dict[str, Tensor]) -> memoryview:
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    return buffer.getbuffer()
