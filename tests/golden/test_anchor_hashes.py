"""After every round each worker's anchor is, bit for bit, the server's: with fp32 and with bf16 on the wire."""

from __future__ import annotations

import pytest
import torch

from amounts import mostly_slow
from outerstep.server import DiLoCoServer
from outerstep.topology.update import anchor_tree
from outerstep.worker import DiLoCoWorker
from support import in_threads, tiny_model, train_steps

STEPS, SYNC_EVERY = 24, 4


@pytest.mark.parametrize("codec", mostly_slow(["fp32", "bf16", "int8", "int4", "e3m0"], ["fp32", "int4"]))
@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32 model", "bf16 model"])
def test_every_anchor_hash_equals_the_servers(codec: str, fragments: int, dtype: torch.dtype) -> None:
    settings = {"codec": codec, "num_fragments": fragments, "sync_every": SYNC_EVERY}
    with DiLoCoServer(tiny_model().to(dtype).state_dict(), num_workers=2, port=0, **settings) as server:
        published: dict[tuple[int, int], str] = {}
        announce = server.service.coordinator.published

        def record(agreement, now: float) -> None:  # type: ignore[no-untyped-def]
            store = server.service.stores[agreement.fragment]
            published[agreement.fragment, agreement.version] = anchor_tree(store.params().values())
            announce(agreement, now)

        server.service.coordinator.published = record  # type: ignore[method-assign]

        def work(i: int) -> int:
            model = tiny_model().to(dtype)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            compared = 0
            with DiLoCoWorker(model, optimizer, server.address, worker_id=f"w{i}") as worker:
                held = list(worker.sync_metrics["versions"])  # type: ignore[arg-type]
                for step in range(STEPS):
                    source = torch.Generator().manual_seed(100 * i + step)
                    for param in model.parameters():
                        param.grad = torch.randn(param.shape, generator=source).to(dtype)
                    optimizer.step()
                    versions = list(worker.sync_metrics["versions"])  # type: ignore[arg-type]
                    for fragment, version in enumerate(versions):
                        if version != held[fragment]:
                            names = worker.plan.fragments[fragment]
                            ours = anchor_tree(worker._replica.anchors[name] for name in names)
                            assert ours == published[fragment, version]
                            for name in names:  # and the model holds it, rounded to its own dtype
                                anchor = worker._replica.anchors[name]
                                assert torch.equal(worker._replica.tensors[name].detach(), anchor.to(dtype))
                            compared += 1
                    held = versions
            return compared

        expected = STEPS // SYNC_EVERY * fragments
        assert in_threads(lambda: work(0), lambda: work(1)) == [expected, expected]


def test_training_together_lowers_the_loss_and_ends_with_one_model() -> None:
    def loss_of(model: torch.nn.Module) -> float:
        inputs = torch.randn(256, 6, generator=torch.Generator().manual_seed(9))
        with torch.no_grad():
            return float((model(inputs) - inputs.sum(1, keepdim=True)).square().mean())

    start = loss_of(tiny_model())
    with DiLoCoServer(tiny_model().state_dict(), num_workers=2, port=0, sync_every=10) as server:

        def work(i: int) -> torch.nn.Module:
            model = tiny_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
            with DiLoCoWorker(model, optimizer, server.address):
                train_steps(model, optimizer, 95, seed=i)
            return model

        first, second = in_threads(lambda: work(0), lambda: work(1))
        for (name, left), right in zip(first.named_parameters(), second.parameters(), strict=True):
            assert torch.equal(left, right), name
            assert torch.equal(left.detach(), server.get_global_params()[name])
        assert loss_of(first) < 0.5 * start
