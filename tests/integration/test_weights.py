"""How much a contribution counts: equally, by samples, by tokens; bounded by what is usual."""

from __future__ import annotations

import pytest
import torch

from outerstep.errors import BadRequest, WorkerError
from outerstep.server import DiLoCoServer
from outerstep.types import Agreement
from outerstep.wire.memory import MemoryTransport
from outerstep.worker import DiLoCoWorker
from support import HandClient, Ledger, count, in_threads, make_frame, memory_worker, record_agreements, wait_until

PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32"}


def weighing_server(num_workers: int = 2, **settings: object) -> DiLoCoServer:
    server = DiLoCoServer(Ledger().state_dict(), num_workers=num_workers, port=0, **{**PLAIN, **settings})
    server.service.start()
    return server


class Pair:
    """Two workers in step. Worker i adds one to cell i at each of its steps, and reports what it is told to."""

    def __init__(self, server: DiLoCoServer) -> None:
        self.server = server
        self.agreements = record_agreements(server)
        self.models = [Ledger(), Ledger()]
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in self.models]
        self.workers: list[DiLoCoWorker] = [
            memory_worker(server, f"w{i}", self.models[i], self.optimizers[i]).start() for i in range(2)
        ]

    def round(self, *reports: dict[str, int], steps: int = 1) -> Agreement:
        def work(i: int) -> None:
            for _ in range(steps):
                self.workers[i].count(**reports[i])
                count(self.models[i], self.optimizers[i], i, 1)

        in_threads(lambda: work(0), lambda: work(1))
        return self.agreements[-1]

    @property
    def cells(self) -> list[float]:
        return self.server.get_global_params()["cells"].tolist()

    def close(self) -> None:
        for worker in self.workers:
            worker.abandon("over")


def weights_of(agreement: Agreement) -> dict[str, float]:
    return {p.worker_id: p.weight for p in agreement.participants}


@pytest.mark.parametrize("unit", ["samples", "tokens"])
def test_who_trained_on_more_counts_for_more(unit: str) -> None:
    pair = Pair(weighing_server(sync_every=2, weight_by=unit))
    first = pair.round({unit: 8}, {unit: 8}, steps=2)
    assert weights_of(first) == {"w0": 1.0, "w1": 1.0}
    assert pair.cells == [1.0, 1.0]
    second = pair.round({unit: 12}, {unit: 4}, steps=2)
    assert weights_of(second) == {"w0": 24.0, "w1": 8.0}  # all that was reported since the last exchange
    assert pair.cells == [1.0 + 0.75 * 2, 1.0 + 0.25 * 2]
    pair.close()


def test_by_default_everybody_counts_the_same_whatever_is_reported() -> None:
    pair = Pair(weighing_server(sync_every=1))
    for reports in ({"tokens": 1000}, {}), ({"samples": 5}, {"samples": 500}):
        assert weights_of(pair.round(*reports)) == {"w0": 1.0, "w1": 1.0}
    assert pair.cells == [1.0, 1.0]
    pair.close()


def test_the_other_unit_does_not_weigh() -> None:
    pair = Pair(weighing_server(sync_every=1, weight_by="tokens"))
    pair.round({"tokens": 10}, {"tokens": 10})
    assert weights_of(pair.round({"tokens": 10, "samples": 99}, {"tokens": 30, "samples": 1})) == {
        "w0": 10.0,
        "w1": 30.0,
    }
    pair.close()


def test_in_the_first_round_everybody_counts_the_same() -> None:
    """Nothing is usual yet, and nobody may decide by an absurd report what will be."""
    pair = Pair(weighing_server(sync_every=1, weight_by="tokens"))
    assert weights_of(pair.round({"tokens": 1}, {"tokens": 1_000_000_000})) == {"w0": 1.0, "w1": 1.0}
    assert pair.cells == [0.5, 0.5]
    pair.close()


def test_a_report_is_bounded_by_what_was_usual_in_closed_rounds() -> None:
    pair = Pair(weighing_server(sync_every=1, weight_by="tokens", max_weight_ratio=4.0))
    pair.round({"tokens": 100}, {"tokens": 100})
    second = pair.round({"tokens": 1}, {"tokens": 1_000_000})
    assert weights_of(second) == {"w0": 25.0, "w1": 400.0}  # 100 / 4 and 100 · 4, whoever came first
    pair.close()


def weights_when_they_come_in_this_order(order: list[int]) -> list[dict[str, float]]:
    server = weighing_server(weight_by="tokens", max_weight_ratio=2.0)
    clients = [HandClient(MemoryTransport(server.service), f"w{i}") for i in range(2)]
    agreements = record_agreements(server)
    for client in clients:
        client.join()
    payload = make_frame({"cells": torch.ones(2)})
    for round_, reports in enumerate([(10, 10), (1000, 1), (7, 7)]):
        for i in order:
            clients[i].contribute(payload, base_version=round_, oldest_base=round_, tokens=reports[i])
        wait_until(lambda version=round_ + 1: server.sync_round == version)  # type: ignore[misc]
    return [weights_of(agreement) for agreement in agreements]


def test_who_comes_first_in_a_round_does_not_change_the_weights_of_the_others() -> None:
    """The bound is from closed rounds alone."""
    found = weights_when_they_come_in_this_order([0, 1])
    assert found == weights_when_they_come_in_this_order([1, 0])
    assert found[1] == {"w0": 20.0, "w1": 5.0}


def test_a_worker_that_reports_nothing_is_told_which_call_is_missing() -> None:
    server = weighing_server(num_workers=1, sync_every=3, weight_by="tokens")
    model = Ledger()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    worker = memory_worker(server, "w", model, optimizer).start()
    with pytest.raises(WorkerError, match=r"weighs contributions by tokens.*3 steps.*worker\.count\(tokens=…\)"):
        count(model, optimizer, 0, 3)
    assert model.cells.tolist() == [3.0, 0.0]  # its weights are as they were
    worker.count(tokens=30)  # better late than never
    count(model, optimizer, 0, 3)
    assert server.get_global_params()["cells"].tolist() == [6.0, 0.0]
    worker.stop()


def test_the_server_refuses_a_contribution_without_the_report_too() -> None:
    server = weighing_server(num_workers=1, weight_by="samples")
    client = HandClient(MemoryTransport(server.service))
    client.join()
    with pytest.raises(BadRequest, match=r"weighs contributions by samples.*reports none") as caught:
        client.contribute(make_frame({"cells": torch.ones(2)}), tokens=5)
    assert "worker.count(samples=…)" in caught.value.hint
    assert server.sync_round == 0


@pytest.mark.parametrize("weight_by", ["equal", "tokens"])
def test_a_contribution_without_a_step_in_it_weighs_nothing(weight_by: str) -> None:
    """It is there only so that the others need not wait; whatever it holds does not reach the model."""
    server = weighing_server(weight_by=weight_by)
    agreements = record_agreements(server)
    clients = [HandClient(MemoryTransport(server.service), f"w{i}") for i in range(2)]
    for client in clients:
        client.join()
    clients[0].contribute(make_frame({"cells": torch.full((2,), 100.0)}), steps=0)
    clients[1].contribute(make_frame({"cells": torch.ones(2)}), steps=3, tokens=1)
    wait_until(lambda: server.sync_round == 1)
    assert weights_of(agreements[0]) == {"w0": 0.0, "w1": 1.0}
    assert server.get_global_params()["cells"].tolist() == [-1.0, -1.0]


def test_a_round_in_which_nobody_has_trained_leaves_the_model_as_it_is() -> None:
    server = weighing_server(num_workers=1, outer_momentum=0.9)
    client = HandClient(MemoryTransport(server.service))
    client.join()
    client.contribute(make_frame({"cells": torch.ones(2)}), steps=0)
    wait_until(lambda: server.sync_round == 1)
    assert server.get_global_params()["cells"].tolist() == [0.0, 0.0]


def test_asynchronous_pushes_are_scaled_by_their_weight_beside_the_usual_one() -> None:
    """g ← (w / mean of w)·g; N = 2, no momentum."""
    server = weighing_server(async_mode=True, sync_every=1, weight_by="tokens")
    models = [Ledger(), Ledger()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in models]
    workers = [memory_worker(server, f"w{i}", models[i], optimizers[i]).start() for i in range(2)]

    def push(cell: int, tokens: int) -> None:
        workers[cell].count(tokens=tokens)
        count(models[cell], optimizers[cell], cell, 1)

    push(0, 16)  # the first of all: counts as one, whatever it says
    assert server.get_global_params()["cells"].tolist() == [0.5, 0.0]
    push(1, 32)  # twice the usual 16
    assert server.get_global_params()["cells"].tolist() == [0.5, 1.0]
    push(0, 12)  # half of the usual 24
    assert server.get_global_params()["cells"].tolist() == [0.75, 1.0]
    for worker in workers:
        worker.abandon("over")
