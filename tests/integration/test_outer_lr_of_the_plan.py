"""η follows the controller's plan: from a round boundary on, with the bits of torch's SGD at that η, and so again when
the journal is replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from msgspec import UNSET

from outerstep.coordination.autoconfig import LayerDecision, LayerPlan
from outerstep.server import DiLoCoServer
from outerstep.server.persistence import read_record
from outerstep.server.resuming import newest_state
from outerstep.server.server import optimizer_of_settings
from support import Ledger, count, kill, memory_worker

STEPS, USUAL = 4, 0.7


def serve(place: Path, **more: Any) -> DiLoCoServer:
    """With a controller whose decisions are the test's."""
    said = {"port": 0, "sync_every": STEPS, "outer_momentum": 0.9, "codec": "fp32", "target_utilization": 0.5, **more}
    is_there = (place / "run.json").exists()
    server = DiLoCoServer(None if is_there else Ledger(2).state_dict(), 1, save_dir=str(place), **said)
    server.service.start()
    controller = server.service._controller
    assert controller is not None
    controller.stop()
    return server


def decide(server: DiLoCoServer, outer_lr: float, timeout_s: float = 20.0) -> None:
    """In force from the next round that closes, so that the one after it is the first to step with it."""
    coordinator = server.service.coordinator
    with server.service.changed:
        now, steering = coordinator.plan, coordinator.steering
        assert now is not None
        assert steering is not None
        plan = LayerPlan(
            layer="top",
            revision=1,
            from_round=0,
            sync_every=STEPS,
            codec=now.codec,
            down_codec=now.down_codec,
            num_fragments=1,
            delay=0,
            carry=False,
            outer_lr=outer_lr,
            timeout_s=timeout_s,
            backend="",
            route="star",
            assignments=(),
        )
        assert coordinator.steer(LayerDecision(plan=plan, cause="policy", reason="the test says so"))


class Reference:
    """torch's SGD with Nesterov momentum, along what one worker that takes `STEPS` steps contributes."""

    def __init__(self) -> None:
        self.cells = torch.nn.Parameter(torch.zeros(2))
        self.optimizer = torch.optim.SGD([self.cells], lr=1.0, momentum=0.9, nesterov=True)

    def round(self, outer_lr: float) -> list[float]:
        anchor = self.cells.detach().clone()
        local = anchor.clone()
        for _ in range(STEPS):
            local[0] += 1.0
        self.cells.grad = anchor - local
        self.optimizer.param_groups[0]["lr"] = outer_lr
        self.optimizer.step()
        return self.cells.tolist()


def cells(server: DiLoCoServer) -> list[float]:
    return server.get_global_params()["cells"].tolist()


def train(server: DiLoCoServer, decisions: dict[int, float]) -> list[list[float]]:
    """One worker, a round for each of `decisions`; η is decided before the round, 0 = nothing. It does not leave, which
    would save a state, and so leave nothing to replay."""
    model, seen = Ledger(2), list[list[float]]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    worker = memory_worker(server, "w", model, optimizer).start()
    for outer_lr in decisions.values():
        if outer_lr:
            decide(server, outer_lr)
        count(model, optimizer, 0, STEPS)
        seen.append(cells(server))
    topology: Any = worker._topology
    topology.leave = lambda reason: topology.close()
    worker.abandon("killed")
    return seen


def test_a_decided_outer_lr_holds_from_a_round_boundary_and_is_replayed_with_the_same_bits(tmp_path: Path) -> None:
    server, reference = serve(tmp_path), Reference()
    assert server.service.coordinator.steering is not None
    seen = train(server, {1: 0.0, 2: 0.5, 3: 0.0, 4: 0.9, 5: 0.0, 6: 0.0})
    assert seen == [reference.round(lr) for lr in (USUAL, USUAL, 0.5, 0.5, 0.9, 0.9)]
    journal = server.service.writer.journal
    assert journal is not None
    rounds = [head.round for record in journal.after(0) if (head := read_record(record)).round is not None]
    assert [one.outer_lr for one in rounds] == [None, None, 0.5, 0.5, 0.9, 0.9]
    kill(server)
    assert newest_state(tmp_path, optimizer_of_settings).params["cells"].tolist() == seen[-1], "for an export"
    again = serve(tmp_path)
    assert cells(again) == seen[-1]
    plan = again.service.coordinator.plan
    assert plan is not None
    assert (plan.outer_lr, plan.round_deadline_s) == (0.9, 20.0)
    assert train(again, {7: 0.0}) == [reference.round(0.9)], "the momentum and the last η survive"
    kill(again)


def test_what_the_operator_says_now_wins_over_what_was_decided(tmp_path: Path) -> None:
    server, reference = serve(tmp_path), Reference()
    assert train(server, {1: 0.5, 2: 0.0}) == [reference.round(USUAL), reference.round(0.5)]
    kill(server)
    again = serve(tmp_path, outer_lr=0.25, round_deadline_s=7.0)
    plan = again.service.coordinator.plan
    assert plan is not None
    assert (plan.outer_lr, plan.round_deadline_s) == (UNSET, 7.0)
    assert train(again, {3: 0.9, 4: 0.0}) == [reference.round(0.25), reference.round(0.25)], "nor does a decision"
    assert again.service.coordinator.rules.round_deadline_s == 7.0
    kill(again)


def test_an_optimizer_of_another_kind_keeps_its_own_rate(tmp_path: Path) -> None:
    server = DiLoCoServer(Ledger(2).state_dict(), 1, port=0, target_utilization=0.5, outer_optimizer="adam")
    steering = server.service.coordinator.steering
    assert steering is not None
    assert "outer_lr" in steering.settings.said
