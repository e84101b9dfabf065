"""A model on a GPU: the anchor lies beside it, contributions are encoded there, and the bits are the server's."""

from __future__ import annotations

import pytest
import torch

from outerstep.server import DiLoCoServer
from outerstep.topology.server import anchor_hash
from outerstep.worker import DiLoCoWorker
from support import assert_same, in_threads, params_of, tiny_model, train_steps

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def cuda_steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    source = torch.Generator(device="cuda").manual_seed(seed)
    for _ in range(steps):
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=source, device="cuda").to(param.dtype)
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_two_gpu_workers_hold_the_servers_bits(dtype: torch.dtype, codec: str) -> None:
    settings = {"codec": codec, "sync_every": 4, "num_fragments": 2}
    with DiLoCoServer(tiny_model().to(dtype).state_dict(), num_workers=2, port=0, **settings) as server:

        def work(i: int) -> DiLoCoWorker:
            model = tiny_model().to("cuda", dtype)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            with DiLoCoWorker(model, optimizer, server.address, worker_id=f"w{i}") as worker:
                cuda_steps(model, optimizer, 19, seed=i)
            return worker

        workers = in_threads(lambda: work(0), lambda: work(1))
        newest = [fragment["anchor_hash"] for fragment in server.status()["fragments"]]  # type: ignore[attr-defined]
        for worker in workers:
            anchors = worker._replica.anchors
            assert all(anchor.is_cuda and anchor.dtype == torch.float32 for anchor in anchors.values())
            held = [anchor_hash(anchors[name] for name in names) for names in worker.plan.fragments]
            assert held == newest
            for name, param in worker._replica.tensors.items():
                assert torch.equal(param.detach(), anchors[name].to(dtype))


def test_global_weights_and_a_mixed_pair_of_gpu_and_cpu() -> None:
    with DiLoCoServer(tiny_model().state_dict(), num_workers=2, port=0, sync_every=5) as server:

        def on_gpu() -> dict[str, torch.Tensor]:
            model = tiny_model().cuda()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            with DiLoCoWorker(model, optimizer, server.address, worker_id="gpu") as worker:
                cuda_steps(model, optimizer, 7, seed=1)
                local = params_of(model)
                with worker.global_weights():
                    assert not torch.equal(params_of(model)["0.weight"], local["0.weight"])
                assert_same(params_of(model), local)
                cuda_steps(model, optimizer, 8, seed=2)
            return {name: value.cpu() for name, value in params_of(model).items()}

        def on_cpu() -> dict[str, torch.Tensor]:
            model = tiny_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            with DiLoCoWorker(model, optimizer, server.address, worker_id="cpu"):
                train_steps(model, optimizer, 15, seed=3)
            return params_of(model)

        first, second = in_threads(on_gpu, on_cpu)
        assert_same(first, second)
        assert_same(first, server.get_global_params())
