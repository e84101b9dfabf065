"""Peers of which some train on a GPU and some on a CPU: the anchors have the same bits after every round."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from outerstep.topology.update import anchor_hash
from outerstep.worker import DiLoCoWorker
from support import in_threads, tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

STEPS, SYNC_EVERY = 6, 2


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int4+feedback"])
def test_peers_on_gpu_and_cpu_hold_the_same_bits(codec: str, place: str) -> None:
    founded, where = threading.Event(), list[str]()

    def peer(name: str, device: str) -> list[str]:
        settings: dict[str, Any] = {"insecure": True, "listen": "127.0.0.1:0", "handle_signals": False, "anchor": place}
        if name == "a":
            settings |= {"sync_every": SYNC_EVERY, "codec": codec, "min_peers": 3}
        else:
            assert founded.wait(60)
            settings["peers"] = where[0]
        model: nn.Module = tiny_model(ord(name)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        worker = DiLoCoWorker(model, optimizer, "gossip", worker_id=name, **settings)
        if name == "a":
            where.append(worker._topology._node.join_string)  # type: ignore[attr-defined]
            founded.set()
        source, hashes = torch.Generator(device=device).manual_seed(ord(name)), list[str]()
        with worker:
            for step in range(1, STEPS + 1):
                for parameter in model.parameters():
                    parameter.grad = torch.randn(parameter.shape, generator=source, device=device)
                optimizer.step()
                if step % SYNC_EVERY == 0:
                    hashes.append(anchor_hash(worker._replica.anchors.values()))
        return hashes

    found = in_threads(
        *(lambda n=name, d=device: peer(n, d) for name, device in (("a", "cuda"), ("b", "cpu"), ("c", "cuda")))
    )
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == STEPS // SYNC_EVERY
