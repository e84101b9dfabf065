"""With η = 1, μ = 0, one worker and fp32 on the wire, outer training is plain training."""

from __future__ import annotations

import torch
from torch import nn

from outerstep.server import DiLoCoServer
from support import memory_worker, params_of, tiny_model, train_steps

IDENTITY = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32", "sync_every": 5}
HALF_ULP = 2.0**-24  # unit roundoff of fp32


class Walk(nn.Module):
    """Weights that move by whole numbers: every difference is exact."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).reshape(3, 4))
        self.bias = nn.Parameter(torch.zeros(4))


def walk(model: Walk, optimizer: torch.optim.Optimizer, steps: int) -> None:
    source = torch.Generator().manual_seed(7)
    for _ in range(steps):
        for param in model.parameters():
            param.grad = torch.randint(-9, 10, param.shape, generator=source).float()
        optimizer.step()


def test_on_whole_numbers_it_equals_the_plain_run_exactly() -> None:
    plain, outer = Walk(), Walk()
    walk(plain, torch.optim.SGD(plain.parameters(), lr=1.0), 23)
    server = DiLoCoServer(outer.state_dict(), num_workers=1, port=0, **IDENTITY)
    server.service.start()
    optimizer = torch.optim.SGD(outer.parameters(), lr=1.0)
    with memory_worker(server, "w", outer, optimizer):
        walk(outer, optimizer, 23)
    for name, value in params_of(plain).items():
        assert torch.equal(value, params_of(outer)[name])
        assert torch.equal(value, server.get_global_params()[name])
    server.service.stop()


def test_on_real_numbers_each_round_is_within_its_rounding_bound() -> None:
    """θ′ = fl(a − fl(a − l)). Two roundings, so |θ′ − l| ≤ u·|a − l|·(1 + u) + u·|θ′|, with u = 2⁻²⁴."""
    model = tiny_model()
    server = DiLoCoServer(model.state_dict(), num_workers=1, port=0, **IDENTITY)
    server.service.start()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    worker = memory_worker(server, "w", model, optimizer)
    with worker:
        for round_ in range(8):
            before = params_of(model)
            train_steps(model, optimizer, 4, seed=round_)
            # A twin takes the fifth step too: it shows the weights between the step and the exchange.
            twin = tiny_model()
            twin.load_state_dict(model.state_dict())
            twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.05)
            train_steps(twin, twin_optimizer, 1, seed=100 + round_)
            local = params_of(twin)
            train_steps(model, optimizer, 1, seed=100 + round_)
            assert worker.sync_metrics["sync_count"] == round_ + 1
            for name, theta in params_of(model).items():
                anchor, ours = before[name].double(), local[name].double()
                bound = HALF_ULP * (anchor - ours).abs() * (1 + HALF_ULP) + HALF_ULP * theta.double().abs()
                assert bool(((theta.double() - ours).abs() <= bound).all()), name
    server.service.stop()


def test_on_real_numbers_forty_steps_stay_close_to_the_plain_run() -> None:
    """Training in between amplifies rounding; on this smooth problem it stays within 1e-6 over eight rounds."""
    plain, outer = tiny_model(), tiny_model()
    train_steps(plain, torch.optim.SGD(plain.parameters(), lr=0.05), 40, seed=3)
    server = DiLoCoServer(outer.state_dict(), num_workers=1, port=0, **IDENTITY)
    server.service.start()
    optimizer = torch.optim.SGD(outer.parameters(), lr=0.05)
    with memory_worker(server, "w", outer, optimizer):
        train_steps(outer, optimizer, 40, seed=3)
    for name, value in params_of(plain).items():
        assert (params_of(outer)[name] - value).abs().max() <= 1e-6
    server.service.stop()
