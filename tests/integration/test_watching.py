"""What workers of a server are told about their rounds, against the contributions themselves."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outerstep.server import DiLoCoServer
from outerstep.worker import DiLoCoWorker
from outerstep.worker.watching import gradient_norm
from support import Ledger, count, in_threads, kill, memory_worker, record_agreements, tiny_model, train_steps

NAMES = ("pseudo_grad_norm", "peer_grad_similarity", "aggregated_grad_norm", "weight_divergence")


class Seen:
    """Every contribution of a worker, flat, by fragment and in order."""

    def __init__(self, worker: DiLoCoWorker) -> None:
        self.deltas: dict[int, list[Tensor]] = {}
        begin = worker._topology.begin

        def note(contribution: Any, **more: Any) -> Any:
            names = worker.plan.fragments[contribution.fragment]
            found = worker._replica.deltas(names)
            flat = torch.cat([found[name].reshape(-1) for name in names]).double()
            self.deltas.setdefault(contribution.fragment, []).append(flat)
            return begin(contribution, **more)

        worker._topology.begin = note  # type: ignore[method-assign]


def run_together(
    server: DiLoCoServer, workers: int, steps: int, each: Callable[[DiLoCoWorker, int], None] = lambda worker, i: None
) -> tuple[list[dict[str, Any]], list[Seen]]:
    """Their metrics at the end, and what they sent."""

    def work(i: int) -> tuple[dict[str, Any], Seen]:
        model = tiny_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with memory_worker(server, f"w{i}", model, optimizer) as worker:
            seen = Seen(worker)
            for step in range(steps):
                each(worker, i)
                train_steps(model, optimizer, 1, seed=100 * i + step)
        return worker.sync_metrics, seen

    done = in_threads(*(lambda i=i: work(i) for i in range(workers)))
    return [metrics for metrics, _ in done], [seen for _, seen in done]


def expected(lasts: list[Tensor], weights: list[float]) -> tuple[float, float, float]:
    """Similarity, norm of the mean, and divergence, directly."""
    total = sum(weights)
    mean = torch.stack([w * d for w, d in zip(weights, lasts, strict=True)]).sum(0) / total
    pairs = [(i, j) for i, j in itertools.permutations(range(len(lasts)), 2)]
    shares = [float(weights[i] * weights[j] * lasts[i].norm() * lasts[j].norm()) for i, j in pairs]
    cosines = [float(torch.cosine_similarity(lasts[i], lasts[j], dim=0)) for i, j in pairs]
    similarity = sum(s * c for s, c in zip(shares, cosines, strict=True)) / sum(shares)
    apart = sum(w * float((d - mean).square().sum()) for w, d in zip(weights, lasts, strict=True)) / total
    return similarity, float(mean.norm()), apart


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("fragments", [1, 2])
def test_every_worker_is_told_how_the_round_went(codec: str, fragments: int) -> None:
    server = DiLoCoServer(
        tiny_model().state_dict(), num_workers=3, port=0, codec=codec, num_fragments=fragments, sync_every=4
    )
    server.service.start()
    metrics, seen = run_together(server, 3, 8)
    lasts = [torch.cat([one.deltas[f][-1] for f in range(fragments)]) for one in seen]
    similarity, norm, apart = expected(lasts, [1.0, 1.0, 1.0])
    exact = codec == "fp32"
    for worker, last in zip(metrics, lasts, strict=True):
        assert worker["pseudo_grad_norm"] == pytest.approx(float(last.norm()), rel=1e-5 if exact else 0.004)
        assert worker["aggregated_grad_norm"] == pytest.approx(norm, rel=1e-5 if exact else 0.004)
        assert worker["weight_divergence"] == pytest.approx(apart, rel=1e-4 if exact else 0.03)
        # A mean over fragments counts each with its square, which is not quite the whole model's pairs.
        assert worker["peer_grad_similarity"] == pytest.approx(
            similarity, abs=1e-4 if fragments == 1 and exact else 0.05
        )
        assert {name: worker[name] for name in NAMES[1:]} == {name: metrics[0][name] for name in NAMES[1:]}


@pytest.mark.parametrize(
    ("workers", "settings"),
    [
        (3, {"aggregation": "median"}),
        (4, {"aggregation": "trimmed_mean", "trim_fraction": 0.25, "bucket_size": 1}),
        (5, {"aggregation": "krum"}),
        (3, {"aggregation": "centered_clipping", "clip_radius": 0.01, "num_fragments": 2}),
        (5, {"aggregation": "mean", "cosine_screen": True}),
        (6, {"aggregation": "median", "bucket_size": 2}),
    ],
    ids=str,
)
def test_similarity_and_divergence_are_told_under_every_rule(workers: int, settings: dict[str, Any]) -> None:
    """They are the contributions', whatever the rule makes of them; only the aggregate's norm is the rule's."""
    server = DiLoCoServer(
        tiny_model().state_dict(), num_workers=workers, port=0, codec="fp32", sync_every=4, norm_screen=100, **settings
    )
    server.service.start()
    metrics, seen = run_together(server, workers, 8)
    fragments = settings.get("num_fragments", 1)
    lasts = [torch.cat([one.deltas[f][-1] for f in range(fragments)]) for one in seen]
    similarity, norm, apart = expected(lasts, [1.0] * workers)
    for worker in metrics:
        assert worker["peer_grad_similarity"] == pytest.approx(similarity, abs=1e-4 if fragments == 1 else 0.05)
        assert worker["weight_divergence"] == pytest.approx(apart, rel=1e-4)
        is_mean = settings["aggregation"] == "mean"
        assert (worker["aggregated_grad_norm"] == pytest.approx(norm, rel=1e-5)) is is_mean


def test_a_restarted_server_remembers_how_its_last_round_went(tmp_path: Path) -> None:
    def make() -> DiLoCoServer:
        made = DiLoCoServer(
            tiny_model().state_dict(), num_workers=3, port=0, codec="fp32", sync_every=4, aggregation="median",
            save_dir=str(tmp_path),
        )  # fmt: skip
        made.service.start()
        return made

    server = make()
    run_together(server, 3, 4)
    [told] = server.status()["fragments"]  # type: ignore[misc]
    kill(server)  # what it knows is in its journal
    [again] = make().status()["fragments"]  # type: ignore[misc]
    assert again["watched"] == told["watched"]
    assert told["watched"].keys() == set(NAMES[1:])


def test_contributions_count_with_their_weights() -> None:
    server = DiLoCoServer(
        tiny_model().state_dict(), num_workers=2, port=0, codec="fp32", weight_by="samples", sync_every=4
    )
    server.service.start()
    metrics, seen = run_together(server, 2, 8, lambda worker, i: worker.count(samples=1 + 2 * i))
    similarity, norm, apart = expected([one.deltas[0][-1] for one in seen], [1.0, 3.0])
    for worker in metrics:
        assert worker["peer_grad_similarity"] == pytest.approx(similarity, abs=1e-4)
        assert worker["aggregated_grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert worker["weight_divergence"] == pytest.approx(apart, rel=1e-4)


@pytest.mark.parametrize("factory", [None, lambda params: torch.optim.SGD(params, lr=0.7)])
def test_the_servers_status_and_events_tell_the_same(tmp_path: Path, factory: Any) -> None:
    log = tmp_path / "events.jsonl"
    server = DiLoCoServer(
        tiny_model().state_dict(), num_workers=2, port=0, codec="fp32", sync_every=4, event_log=str(log),
        outer_optimizer_factory=factory,
    )  # fmt: skip
    server.service.start()
    [metrics, _], seen = run_together(server, 2, 4)
    [fragment] = server.status()["fragments"]  # type: ignore[misc]
    assert fragment["watched"] == {name: pytest.approx(metrics[name], rel=1e-5) for name in NAMES[1:]}
    server.service.stop()
    [told] = [event for event in map(json.loads, log.read_text().splitlines()) if event["event"] == "round"]
    assert {name: told[name] for name in NAMES[1:]} == fragment["watched"]
    norms = dict(zip(told["workers"], told["norms"], strict=True))
    assert norms == {f"w{i}": pytest.approx(float(one.deltas[0][-1].norm()), rel=1e-5) for i, one in enumerate(seen)}


def test_a_lone_worker_is_similar_to_nobody_and_has_not_gone_apart() -> None:
    server = DiLoCoServer(tiny_model().state_dict(), num_workers=1, port=0, codec="fp32", sync_every=4)
    server.service.start()
    [metrics], [seen] = run_together(server, 1, 4)
    norm = pytest.approx(float(seen.deltas[0][-1].norm()), rel=1e-5)
    assert [metrics[name] for name in NAMES] == [norm, None, norm, pytest.approx(0.0, abs=1e-6)]


def test_in_an_asynchronous_run_each_push_is_an_aggregate_of_its_own() -> None:
    server = DiLoCoServer(Ledger().state_dict(), num_workers=2, port=0, codec="fp32", async_mode=True, sync_every=3)
    server.service.start()
    model = Ledger()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with memory_worker(server, "w", model, optimizer) as worker:
        count(model, optimizer, 0, 3)
        metrics = worker.sync_metrics
    assert [metrics[name] for name in NAMES] == [3.0, None, 3.0, None]


def test_a_contribution_that_was_left_out_is_in_no_mean_but_its_norm_is_known() -> None:
    server = DiLoCoServer(
        Ledger(4).state_dict(), num_workers=4, port=0, codec="fp32", sync_every=1, outer_lr=1.0, outer_momentum=0.0
    )
    server.service.start()
    agreements = record_agreements(server)

    def work(cell: int) -> dict[str, Any]:
        model = Ledger(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=100.0 if cell == 3 else 1.0)
        with memory_worker(server, f"w{cell}", model, optimizer) as worker:
            count(model, optimizer, cell, 1)
            return worker.sync_metrics

    metrics = in_threads(*(lambda cell=cell: work(cell) for cell in range(4)))
    assert [p.weight for p in sorted(agreements[0].participants, key=lambda p: p.worker_id)] == [1.0, 1.0, 1.0, 0.0]
    assert [one["pseudo_grad_norm"] for one in metrics] == [1.0, 1.0, 1.0, 100.0]
    for one in metrics:
        assert one["aggregated_grad_norm"] == pytest.approx(3**-0.5)
        assert one["weight_divergence"] == pytest.approx(1 - 1 / 3)
        assert one["peer_grad_similarity"] == pytest.approx(0.0, abs=1e-6)


def test_the_gradient_norm_is_taken_at_the_steps_that_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    server = DiLoCoServer(tiny_model().state_dict(), num_workers=1, port=0, sync_every=3)
    server.service.start()
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with memory_worker(server, "w", model, optimizer) as worker:

        def look(*args: Any) -> float | None:
            looks.append(worker._started.machine.state.work.steps)
            return gradient_norm(*args)

        monkeypatch.setattr("outerstep.worker.watching.gradient_norm", look)
        expected_norm = 0.0
        for step in range(1, 8):
            model(torch.ones(2, 6) * step).square().sum().backward()
            if step % 3 == 0:
                expected_norm = float(torch.cat([p.grad.reshape(-1) for p in model.parameters()]).norm())
            optimizer.step()
            optimizer.zero_grad()
            assert worker.sync_metrics["inner_grad_norm"] == (pytest.approx(expected_norm) if step >= 3 else None)
    assert looks == [3, 6]


@pytest.mark.parametrize("reports_first", [True, False])
def test_the_loss_after_a_sync_is_the_first_of_the_agreed_weights(reports_first: bool) -> None:
    server = DiLoCoServer(Ledger(1).state_dict(), num_workers=1, port=0, codec="fp32", sync_every=3)
    server.service.start()
    model = Ledger(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses: list[tuple[int, float]] = []
    with memory_worker(server, "w", model, optimizer) as worker:
        for step in range(5):
            loss = float(model.cells.detach().sum())  # computed here, of the weights as they are
            losses.append((step, loss))
            if reports_first:
                worker.last_loss = loss
            count(model, optimizer, 0, 1)
            if not reports_first:
                worker.last_loss = loss
        metrics = worker.sync_metrics
    assert metrics["loss_after_sync"] == losses[3][1]
    assert losses[3][1] not in (losses[2][1], losses[4][1])
    before = losses[0][1]
    for _, loss in losses[1 : 3 if reports_first else 2]:
        before = 0.9 * before + 0.1 * loss
    assert metrics["loss_before_sync"] == pytest.approx(before)
