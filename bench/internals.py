"""The only place where the benchmarks look inside the package; everything else is public, or on the wire."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from models import fill, make
from outerstep import DiLoCoServer
from outerstep.core.codecs.recipe import Recipe
from outerstep.server.blocks import BLOCK_VALUES
from outerstep.server.store import Addend
from outerstep.topology.encode import encode_frame
from outerstep.types import PROTOCOL_VERSION, Join, JoinAnswer
from outerstep.wire.frames import Layout, layout
from outerstep.wire.memory import MemoryTransport


def codec_settings(up: str, down: str) -> dict[str, Any]:
    """As keywords of the server."""
    return {"codec": up, "down_codec": down}


def write_frame(file: Path, joined: JoinAnswer) -> int:
    """A contribution to the first fragment as the run's codec makes it, of values like those of a real one; returns
    its size."""
    recipe = Recipe.parse(joined.plan.codec)
    specs = {spec.name: spec for spec in joined.manifest.parameters}
    chosen = [specs[name] for name in joined.plan.fragments[0]]
    up: Layout = layout(recipe.name, [(s.name, s.shape, recipe.codec(s).encoded_bytes(s.numel)) for s in chosen])
    generator = torch.Generator().manual_seed(1)
    deltas = {s.name: torch.empty(s.shape).normal_(0.0, 1e-3, generator=generator) for s in chosen}
    return file.write_bytes(encode_frame(deltas, up, {s.name: recipe.codec(s) for s in chosen}))


class OuterStep:
    """The server's work between the last contribution and the new version, beside `torch.optim.SGD(fused=True)` on
    tensors of the same shapes. One thread, no sockets."""

    def __init__(self, size: str, frame_file: str) -> None:
        model = fill(make(size))
        self._server = DiLoCoServer(
            model.state_dict(), num_workers=1, port=0, sync_every=2, **codec_settings("bf16", "bf16")
        )
        join = Join(protocol=PROTOCOL_VERSION, worker_id="probe", instance="probeprobe")
        MemoryTransport(self._server.service).call(join)
        self._store = self._server.service.stores[0]
        self._frame = memoryview(bytearray(Path(frame_file).read_bytes()))
        self._params = [p.detach().clone().requires_grad_() for p in model.parameters()]
        for param in self._params:
            param.grad = torch.full_like(param, 1e-3)
        self._sgd = torch.optim.SGD(self._params, lr=0.7, momentum=0.9, nesterov=True, fused=True)
        self._version = self._store.newest.agreement.version

    def measure(self) -> dict[str, float]:
        """Seconds of each, once. `step`: θ and momentum alone. `close`: the mean, the step, the finite check, what is
        sent and its hashes: everything that happens before the workers can be told."""
        self._version += 1
        seconds: dict[str, Any] = {"accumulate": _seconds(self._accumulate), "close": _seconds(self._close)}
        params = {name: theta.clone() for name, theta in self._store.params().items()}
        grads = {name: torch.full_like(theta, 1e-3) for name, theta in params.items()}
        seconds["step"] = _seconds(lambda: self._step(params, grads))
        seconds["sgd_fused"] = _seconds(self._sgd.step)
        return seconds

    def _step(self, params: dict[str, torch.Tensor], grads: dict[str, torch.Tensor]) -> None:
        """θ and momentum, block by block as the server moves them."""
        step = self._server.service.optimizer.begin(params)  # type: ignore[union-attr]
        with torch.no_grad():
            for name, theta in params.items():
                for start in range(0, theta.numel(), BLOCK_VALUES):
                    stop = start + BLOCK_VALUES
                    step.block(name, theta.view(-1)[start:stop], grads[name].view(-1)[start:stop], start)

    def close(self) -> None:
        pass

    def _accumulate(self) -> None:
        self._store.accumulate(self._version, [Addend(self._frame, 1.0, self._version - 1, 1)])

    def _close(self) -> None:
        made = self._store.close(self._version, self._server.service.optimizer)  # type: ignore[arg-type]
        self._store.publish(made, ())


def _seconds(work: Any) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
