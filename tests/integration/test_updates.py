"""Encoded both ways: a few bytes a parameter, the same bits everywhere, and every step of a worker counted once."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amounts import mostly_slow
from outerstep.core.codecs import CODECS
from outerstep.server import DiLoCoServer
from outerstep.topology.update import anchor_tree
from outerstep.worker import DiLoCoWorker
from support import Eights, Ledger, assert_same, count, in_threads, memory_worker, params_of

RECIPES = ["bf16", "bf16+stochastic", "int8", "int4", "int4+feedback", "e3m0", "sparse64", "int4,norms=fp32"]


class Wide(nn.Module):
    """Enough values that headers do not count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(400, 700)
        self.first, self.norm = nn.Linear(700, 300), nn.BatchNorm1d(300)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    for _ in range(number):
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=source)
        optimizer.step()


def run(server: DiLoCoServer, workers: int, number: int, **settings: Any) -> list[DiLoCoWorker]:
    """So many workers, so many steps each; they still hold what they held when they left."""

    def work(i: int) -> DiLoCoWorker:
        model = Wide()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with DiLoCoWorker(model, optimizer, server.address, worker_id=f"w{i}", buffers="average", **settings) as worker:
            steps(model, optimizer, number, seed=i)
        return worker

    return in_threads(*(lambda i=i: work(i) for i in range(workers)))


@pytest.mark.parametrize("streaming", [{}, {"num_fragments": 3, "fragment_delay": 1}])
@pytest.mark.parametrize("codec", mostly_slow(RECIPES, ["bf16", "int4+feedback"]))
def test_all_workers_hold_the_servers_bits(codec: str, streaming: dict[str, Any]) -> None:
    settings = {"codec": codec, "sync_every": 4, "part_size_bytes": 1 << 16, **streaming}
    with DiLoCoServer(Wide().state_dict(), num_workers=2, port=0, **settings) as server:
        workers = run(server, 2, 19)
        newest: Any = server.status()["fragments"]
        for worker in workers:
            anchors = worker._replica.anchors
            for names, fragment in zip(worker.plan.fragments, newest, strict=True):
                assert anchor_tree(anchors[name] for name in names) == fragment["anchor_hash"]
            assert worker.sync_metrics["anchor_repairs"] == 0
            assert_same(params_of(worker.model), {name: anchors[name] for name in params_of(worker.model)})


@pytest.mark.parametrize(("codec", "most"), [("fp32", 8.1), ("bf16", 4.05), ("int8", 2.1), ("int4", 1.1)])
def test_bytes_a_parameter_up_and_down(codec: str, most: float) -> None:
    with DiLoCoServer(Wide().state_dict(), num_workers=1, port=0, codec=codec, sync_every=1) as server:
        worker = run(server, 1, 5)[0]
        size = sum(tensor.numel() for tensor in worker._replica.tensors.values())
        travelled = int(worker.sync_metrics["bytes_sent"]) + int(worker.sync_metrics["bytes_received"])  # type: ignore[arg-type]
        assert 0.9 * most < travelled / size / 5 < most


def test_sparse_contributions_are_small() -> None:
    with DiLoCoServer(Wide().state_dict(), num_workers=1, port=0, codec="sparse64", sync_every=1) as server:
        worker = run(server, 1, 5)[0]
        size = sum(tensor.numel() for tensor in worker._replica.tensors.values())
        assert int(worker.sync_metrics["bytes_sent"]) / size / 5 < 0.05  # type: ignore[arg-type]


class TestLedger:
    """Whole numbers, and a codec that sends multiples of eight: what is not applied is owed."""

    @pytest.fixture(autouse=True)
    def eights(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(CODECS, "eights", Eights())

    def owed(self, worker: DiLoCoWorker, cells: int = 2) -> Tensor:
        e = worker._topology._feedback.residual("cells")  # type: ignore[attr-defined]
        return torch.zeros(cells) if e is None else e

    def test_two_workers_owe_what_is_not_in_the_model(self) -> None:
        settings = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec": "eights+feedback", "down_codec": "fp32"}
        with DiLoCoServer(Ledger().state_dict(), num_workers=2, port=0, sync_every=3, **settings) as server:

            def work(i: int) -> DiLoCoWorker:
                model = Ledger()
                optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
                with memory_worker(server, f"w{i}", model, optimizer) as worker:
                    count(model, optimizer, i, 17)
                return worker

            workers = in_threads(lambda: work(0), lambda: work(1))
            # Each round halves what a worker sends; its Δ is minus its steps.
            cells = server.get_global_params()["cells"]
            for i, worker in enumerate(workers):
                assert 2 * float(cells[i]) - float(self.owed(worker)[i]) == 17
                assert float(self.owed(worker)[i]) != 0

    def test_asynchronous_workers_owe_too(self) -> None:
        settings = {"async_mode": True, "outer_momentum": 0.0, "outer_lr": 1.0, "dn_buffer_size": 1}
        with DiLoCoServer(
            Ledger().state_dict(),
            num_workers=2,
            port=0,
            sync_every=2,
            codec="eights+feedback",
            down_codec="fp32",
            **settings,
        ) as server:
            turn = threading.Barrier(2)

            def work(i: int) -> DiLoCoWorker:
                model = Ledger()
                optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
                with memory_worker(server, f"w{i}", model, optimizer) as worker:
                    turn.wait(30)
                    count(model, optimizer, i, 13 + i)
                return worker

            workers = in_threads(lambda: work(0), lambda: work(1))
            cells = server.get_global_params()["cells"]
            for i, worker in enumerate(workers):
                assert float(cells[i]) - float(self.owed(worker)[i]) == 13 + i
