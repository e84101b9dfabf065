"""Models and loops as they are: tied, frozen and half-precision parameters, buffers, skipped steps, Accelerate."""

from __future__ import annotations

import accelerate
import pytest
import torch
from torch import Tensor, nn

from outerstep.errors import ManifestMismatch
from outerstep.server import DiLoCoServer
from outerstep.topology.update import anchor_tree
from outerstep.worker import DiLoCoWorker
from support import Ledger, assert_same, in_threads, memory_worker, params_of, tiny_model, train_steps

PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec": "fp32"}


def serve(model: nn.Module, num_workers: int = 1, **settings: object) -> DiLoCoServer:
    server = DiLoCoServer(model.state_dict(), num_workers=num_workers, port=0, **{**PLAIN, **settings})
    server.service.start()
    return server


# --- parameters -----------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.probe = nn.Linear(4, 2).requires_grad_(False)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight


def test_tied_weights_travel_once_and_stay_tied() -> None:
    model = Tied()
    server = serve(model, sync_every=1)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    with memory_worker(server, "w", model, optimizer):
        before = model.table.weight.detach().clone()
        model.table.weight.grad = torch.ones(7, 4)
        optimizer.step()
    manifest = server.service.coordinator.manifest
    assert manifest is not None
    assert [spec.name for spec in manifest.parameters] == ["table.weight"]
    assert manifest.aliases == {"head.weight": "table.weight"}
    assert manifest.frozen == ("probe.weight", "probe.bias")
    assert model.head.weight is model.table.weight
    after = server.get_global_params()
    assert torch.equal(after["head.weight"], after["table.weight"])
    torch.testing.assert_close(after["table.weight"], before - 1.0)
    assert torch.equal(after["probe.weight"], model.probe.weight)


def test_what_is_frozen_after_the_start_stays_in_the_exchange_and_adds_nothing() -> None:
    """The manifest is what the model was when the worker started."""
    model = tiny_model()
    server = serve(model, sync_every=2)
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.5}]
    groups.append({"params": model[4].parameters()})
    optimizer = torch.optim.SGD(groups, lr=0.05)
    with memory_worker(server, "w", model, optimizer):
        for module in (model[0], model[2]):  # type: ignore[index]
            module.requires_grad_(False)
        train_steps(model, optimizer, 4, seed=1)
    start, after = params_of(tiny_model()), server.get_global_params()
    assert_same({n: after[n] for n in start if n[0] in "02"}, {n: start[n] for n in start if n[0] in "02"})
    assert not torch.equal(after["4.weight"], start["4.weight"])
    assert_same(params_of(model), after)


@pytest.mark.slow
def test_a_compiled_model_trains_under_the_plain_names() -> None:
    plain, inner = tiny_model(), tiny_model()
    server = serve(plain, num_workers=2, sync_every=2)
    compiled = torch.compile(inner, backend="eager")

    def work(name: str, model: nn.Module, seed: int) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with memory_worker(server, name, model, optimizer):
            source = torch.Generator().manual_seed(seed)
            for _ in range(4):
                for param in model.parameters():
                    param.grad = torch.randn(param.shape, generator=source)
                optimizer.step()

    in_threads(lambda: work("plain", plain, 1), lambda: work("compiled", compiled, 2))  # type: ignore[arg-type]
    assert_same(params_of(plain), params_of(inner))
    assert_same(params_of(inner), server.get_global_params())


# --- half precision -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_model_has_fp32_anchors_and_learns(dtype: torch.dtype) -> None:
    def loss_of(weights: dict[str, Tensor]) -> float:
        inputs = torch.randn(256, 6, generator=torch.Generator().manual_seed(9))
        with torch.no_grad():
            outputs = torch.func.functional_call(tiny_model(), weights, inputs)
            return float((outputs - inputs.sum(1, keepdim=True)).square().mean())

    start = tiny_model().to(dtype)
    server = serve(start, num_workers=2, sync_every=10, outer_lr=0.7, outer_momentum=0.5)

    def work(i: int) -> DiLoCoWorker:
        model = tiny_model().to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        with memory_worker(server, f"w{i}", model, optimizer) as worker:
            source = torch.Generator().manual_seed(i)
            for _ in range(60):
                inputs = torch.randn(8, 6, generator=source).to(dtype)
                (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return worker

    for worker in in_threads(lambda: work(0), lambda: work(1)):
        anchors = worker._replica.anchors
        assert all(anchor.dtype == torch.float32 for anchor in anchors.values())
        assert anchor_tree(anchors.values()) == server.service.stores[0].newest.agreement.anchor_hash
        for name, param in worker.model.named_parameters():
            assert torch.equal(param, anchors[name].to(dtype))
    assert server.sync_round == 6
    after = server.get_global_params()
    assert any(not torch.equal(value, value.to(dtype).float()) for value in after.values())  # finer than the model
    assert loss_of(after) < 0.7 * loss_of({n: p.float() for n, p in params_of(start).items()})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_model_that_has_not_moved_contributes_exactly_nothing(dtype: torch.dtype) -> None:
    """Though the anchor is not a number that it could hold."""
    state = {name: value + 1e-5 * torch.rand_like(value) for name, value in tiny_model().state_dict().items()}
    server = DiLoCoServer(state, num_workers=1, port=0, sync_every=1, **PLAIN)
    server.service.start()
    model = tiny_model().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with memory_worker(server, "w", model, optimizer):
        train_steps_in(model, optimizer, dtype, 3)
    assert server.sync_round == 3
    assert [member.delta_norm for member in server.service.coordinator.members] == [0.0]
    assert_same(server.get_global_params(), state)


def train_steps_in(model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(2, 6, dtype=dtype)).sum().backward()
        optimizer.step()


# --- buffers --------------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """A BatchNorm whose statistics a worker sees, and one weight to count steps with."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2, affine=False, momentum=1.0)  # the statistics are those of the last batch
        self.weight = nn.Parameter(torch.zeros(1))


def step(model: Normed, optimizer: torch.optim.Optimizer, batch: list[float]) -> None:
    model.norm(torch.tensor([[x, 2 * x] for x in batch]))
    model.weight.grad = torch.full((1,), -1.0)
    optimizer.step()


def normed(server: DiLoCoServer, name: str, **settings: object) -> tuple[Normed, torch.optim.Optimizer, DiLoCoWorker]:
    model = Normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, optimizer, memory_worker(server, name, model, optimizer, **settings).start()


BATCHES = [[1.0, 3.0], [5.0, 11.0]]  # means 2 and 8, (unbiased) variances 2 and 18; twice and four times that beside


def one_round(server: DiLoCoServer, policy: str) -> list[Normed]:
    workers = [normed(server, f"w{i}", buffers=policy) for i in range(2)]

    def work(i: int) -> Normed:
        model, optimizer, worker = workers[i]
        step(model, optimizer, BATCHES[i])
        worker.abandon("over")
        return model

    return in_threads(lambda: work(0), lambda: work(1))


def test_averaged_statistics_become_the_workers_mean_at_every_round() -> None:
    """Whatever the outer optimizer does with parameters: a statistic has no momentum and no learning rate."""
    server = serve(Normed(), num_workers=2, sync_every=1, outer_lr=0.3, outer_momentum=0.9)
    for model in one_round(server, "average"):
        assert model.norm.running_mean.tolist() == [5.0, 10.0]  # type: ignore[union-attr]
        assert model.norm.running_var.tolist() == [10.0, 40.0]  # type: ignore[union-attr]
        assert int(model.norm.num_batches_tracked) == 1  # type: ignore[arg-type]
    assert server.get_global_params()["norm.running_mean"].tolist() == [5.0, 10.0]


def test_local_statistics_are_left_alone() -> None:
    server = serve(Normed(), num_workers=2, sync_every=1)
    models = one_round(server, "local")
    assert [model.norm.running_mean.tolist() for model in models] == [[2.0, 4.0], [8.0, 16.0]]  # type: ignore[union-attr]
    assert server.get_global_params()["norm.running_mean"].tolist() == [0.0, 0.0]


def test_the_servers_statistics_are_everybodys() -> None:
    start = Normed()
    start.norm.running_mean.copy_(torch.tensor([0.5, 0.25]))  # type: ignore[union-attr]
    server = serve(start, num_workers=2, sync_every=1)
    for model in one_round(server, "server"):
        assert model.norm.running_mean.tolist() == [0.5, 0.25]  # type: ignore[union-attr]
    assert server.get_global_params()["norm.running_mean"].tolist() == [0.5, 0.25]


@pytest.mark.parametrize("first", ["average", "server", "local"])
@pytest.mark.parametrize("second", ["average", "server", "local"])
def test_workers_that_treat_buffers_differently_are_refused_by_tensor_and_setting(first: str, second: str) -> None:
    server = serve(Normed(), num_workers=2)
    normed(server, "w0", buffers=first)[2].abandon("over")
    if first == second:
        normed(server, "w1", buffers=second)[2].abandon("over")
        return
    with pytest.raises(ManifestMismatch, match=r"'norm\.running_mean'.*the workers' `buffers` setting"):
        normed(server, "w1", buffers=second)


TINY = [0.0, 1e-4]  # a batch of almost no variance


def least_variance(model: Normed) -> float:
    return float(model.norm.running_var.min())  # type: ignore[union-attr]


def test_a_missed_round_makes_no_variance_negative() -> None:
    """The agreed variance fell from 1 to almost 0, and so did the late one's own: 0 + (0 − 1) would be −1."""
    server = serve(Normed(), num_workers=1, sync_every=2)
    first, optimizer, first_worker = normed(server, "w0")
    late, late_optimizer, late_worker = normed(server, "w1")
    for _ in range(2):
        step(first, optimizer, TINY)
    step(late, late_optimizer, TINY)
    in_threads(
        lambda: step(late, late_optimizer, TINY),  # round 1 is over: it moves along and is in round 2
        lambda: [step(first, optimizer, TINY) for _ in range(2)],
    )
    assert late_worker.sync_metrics["missed_rounds"] == 1
    assert min(least_variance(first), least_variance(late)) >= 0.0
    assert float(server.get_global_params()["norm.running_var"].min()) >= 0.0
    for worker in (first_worker, late_worker):
        worker.abandon("over")


def test_carrying_steps_along_makes_no_variance_negative() -> None:
    """One worker sent 18, the other almost 0: agreed on 9. The first now has almost 0: 9 + (0 − 18) would be −9."""
    server = serve(Normed(), num_workers=2, sync_every=2, fragment_delay=1, fragment_carry=True)
    workers = [normed(server, f"w{i}") for i in range(2)]

    def work(i: int, batches: list[list[float]]) -> float:
        model, optimizer, worker = workers[i]
        for batch in batches:
            step(model, optimizer, batch)
        worker.abandon("over")
        return least_variance(model)

    found = in_threads(lambda: work(0, [TINY, [3.0, 9.0], TINY]), lambda: work(1, [TINY, TINY, TINY]))
    assert found == pytest.approx([9.0, 9.0])  # as agreed


# --- steps that were not taken --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_step_that_the_scaler_skipped_does_not_count(fused: bool) -> None:
    """A fused optimizer is called all the same, and told to do nothing."""
    model = Ledger()
    server = serve(model, sync_every=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))

    def scaled_step(gradient: float) -> None:
        scaler.scale((model.cells * torch.tensor([gradient, 0.0])).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    with memory_worker(server, "w", model, optimizer) as worker:
        for gradient in (-1.0, float("inf"), -1.0, float("inf"), float("inf"), -1.0):
            scaled_step(gradient)
        assert worker.sync_metrics["local_step"] == 3
        assert server.sync_round == 0
        scaled_step(-1.0)
        assert server.sync_round == 1
    assert len(calls) == (7 if fused else 4)
    assert server.get_global_params()["cells"].tolist() == [4.0, 0.0]


# --- Accelerate -----------------------------------------------------------------------------------------------------


@pytest.fixture
def accelerator() -> accelerate.Accelerator:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    return accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)


@pytest.mark.parametrize("given", ["prepared", "plain"])
def test_with_accelerate_only_real_optimizer_steps_count(accelerator: accelerate.Accelerator, given: str) -> None:
    plain_model = tiny_model()
    plain_optimizer = torch.optim.SGD(plain_model.parameters(), lr=0.05)
    server = serve(plain_model, sync_every=3)
    model, optimizer = accelerator.prepare(plain_model, plain_optimizer)
    with memory_worker(server, "w", model, optimizer if given == "prepared" else plain_optimizer) as worker:
        for batch in range(24):
            with accelerator.accumulate(model):
                inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(batch))
                accelerator.backward((model(inputs) - inputs.sum(1, keepdim=True)).square().mean())
                optimizer.step()  # a real one every fourth time
                optimizer.zero_grad()
        assert worker.sync_metrics["local_step"] == 6
        assert server.sync_round == 2
    assert_same(params_of(plain_model), server.get_global_params())


def test_an_accelerated_worker_and_a_plain_one_share_a_run(accelerator: accelerate.Accelerator) -> None:
    start, wrapped = tiny_model(), tiny_model()
    server = serve(start, num_workers=2, sync_every=1)
    accelerated, optimizer = accelerator.prepare(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.05))

    def with_accelerate() -> None:
        with memory_worker(server, "accelerated", accelerated, optimizer):
            for seed in range(8):  # two steps of four batches
                with accelerator.accumulate(accelerated):
                    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
                    accelerator.backward((accelerated(inputs) - inputs.sum(1, keepdim=True)).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()

    def without() -> None:
        own = torch.optim.SGD(start.parameters(), lr=0.05)
        with memory_worker(server, "plain", start, own):
            train_steps(start, own, 2, seed=9)

    in_threads(with_accelerate, without)
    assert server.sync_round == 2
    assert_same(params_of(wrapped), params_of(start))
