"""The outer step through the whole stack (client, wire, server), against torch's own SGD, bit for bit."""

from __future__ import annotations

import pytest
import torch

from outerstep.server import DiLoCoServer
from outerstep.topology.protocol import Agreed, Contribution
from outerstep.types import Wishes
from support import assert_same, in_threads, memory_topology, params_of, tiny_model

ROUNDS = 10


def deltas_of(worker: int, round_: int, names: list[str], shapes: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(1000 * worker + round_)
    return {name: 0.1 * torch.randn(shapes[name], generator=source) for name in names}


def run_rounds(server: DiLoCoServer, fragments: int) -> list[list[Agreed]]:
    """Two workers contribute seeded random deltas for ten rounds; what worker 0 was answered."""
    shapes = {name: p.shape for name, p in tiny_model().named_parameters()}

    def work(worker: int) -> list[list[Agreed]]:
        topology = memory_topology(server, f"w{worker}")
        joined = topology.join(None, Wishes(codec="fp32", num_fragments=fragments, sync_every=fragments))
        answers = []
        for round_ in range(ROUNDS):
            agreed = []
            for f, names in enumerate(joined.plan.fragments):
                deltas = deltas_of(worker, round_, list(names), shapes)
                agreed.append(topology.begin(Contribution(f, round_, round_, 1, 0, 0, deltas)).finish())
            answers.append(agreed)
        return answers

    histories = in_threads(lambda: work(0), lambda: work(1))
    for ours, theirs in zip(*histories, strict=True):
        for left, right in zip(ours, theirs, strict=True):
            assert (left.version, left.anchor_hash) == (right.version, right.anchor_hash)
            assert left.counted
            assert_same(left.anchor, right.anchor)
    return histories[0]


@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize(
    "settings", [{"lr": 0.7, "momentum": 0.9, "nesterov": True}, {"lr": 1.0, "momentum": 0.5, "nesterov": True}]
)
@pytest.mark.parametrize("own", [True, False], ids=["our Nesterov", "torch factory"])
def test_ten_rounds_equal_torch_sgd_bit_for_bit(fragments: int, settings: dict[str, float], own: bool) -> None:
    model = tiny_model()
    if own:
        outer = {"outer_lr": settings["lr"], "outer_momentum": settings["momentum"]}
    else:
        outer = {"outer_optimizer_factory": lambda params: torch.optim.SGD(params, **settings, foreach=False)}
    server = DiLoCoServer(model.state_dict(), num_workers=2, port=0, **outer)
    server.service.start()
    history = run_rounds(server, fragments)

    reference = {name: torch.nn.Parameter(value) for name, value in params_of(model).items()}
    sgd = torch.optim.SGD(reference.values(), **settings, foreach=False)
    shapes = {name: p.shape for name, p in reference.items()}
    for round_ in range(ROUNDS):
        for agreed in history[round_]:
            names = list(agreed.anchor)
            first, second = (deltas_of(worker, round_, names, shapes) for worker in (0, 1))
            for name in names:
                reference[name].grad = (first[name] + second[name]) / 2
        sgd.step()
        got = {name: value for agreed in history[round_] for name, value in agreed.anchor.items()}
        assert_same(got, {name: reference[name].detach() for name in got})
    assert_same(server.get_global_params(), {name: p.detach() for name, p in reference.items()})
    server.service.stop()
