"""Each way in which torchft's DiLoCo fails without a word: in the bare library, and refused, mended or noticed by ours.

If a test of the bare library fails, torchft has changed, and the refusal beside it may go.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torchft", reason="torchft has no wheel for this platform")

from torchft import manager as torchft_manager
from torchft.local_sgd import DiLoCo

from outerstep.errors import AnchorsDiffer, ConfigError, ModelError
from outerstep.integrations import torchft_checks
from outerstep.integrations.torchft import CheckedDiLoCo, _fragments, make_diloco
from support import Ledger, assert_same, count, params_of, tiny_model, train_steps
from torchft_replicas import alone, anchors, nesterov, same, sgd, with_managers, with_stand_ins

# --------------------------------------------------------------------- one outer optimizer, several fragments


def _with_a_shared_optimizer(kind: Callable[..., DiLoCo]) -> Callable[[Any, int], tuple[dict[str, Tensor], int]]:
    def job(manager: Any, replica: int) -> tuple[dict[str, Tensor], int]:
        model = tiny_model()
        optimizer = sgd(model)
        shared = nesterov(model.parameters())
        diloco = kind(model, manager, list(_fragments(model, 2)), optimizer, shared)
        with diloco:
            train_steps(model, optimizer, 8, seed=replica)
        return anchors(diloco), manager.current_step()

    return job


def test_the_bare_library_lets_replicas_drift_apart_by_a_shared_outer_optimizer() -> None:
    job = _with_a_shared_optimizer(lambda _, *args: DiLoCo(*args, sync_every=2))
    (first, rounds), (second, _) = with_stand_ins(2, job)
    assert rounds == 8
    assert not same(first, second)


def test_replicas_that_drift_apart_by_a_shared_outer_optimizer_are_noticed() -> None:
    def checked(model: nn.Module, manager: Any, fragments: list[nn.Module], inner: Any, outer: Any) -> DiLoCo:
        return CheckedDiLoCo(
            model,
            manager=manager,
            model_fragments=fragments,
            inner_optimizer=inner,
            outer_optimizer=outer,
            sync_every=2,
        )

    with pytest.raises(AnchorsDiffer):
        with_stand_ins(2, _with_a_shared_optimizer(checked))


def test_a_shared_outer_optimizer_is_refused() -> None:
    model = tiny_model()
    shared = nesterov(model.parameters())
    with pytest.raises(ConfigError, match=r"must be a function .* got a SGD: one optimizer for several fragments"):
        make_diloco(alone(), model, sgd(model), sync_every=2, num_fragments=2, outer_optimizer=shared)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"must return an optimizer of the . parameters it is given"):
        make_diloco(alone(), model, sgd(model), sync_every=2, num_fragments=2, outer_optimizer=lambda _: shared)


# ------------------------------------------------------------------------------------------------ buckets


def test_the_bare_library_leaves_tensors_unreduced_that_need_a_second_bucket() -> None:
    def job(manager: Any, replica: int) -> tuple[dict[str, Tensor], int]:
        model = tiny_model()
        optimizer = sgd(model)
        outer = nesterov(model.parameters())
        cap = {"use_bucketization": True, "bucket_cap_mb": 160 / (1 << 20)}  # of 256 bytes
        with DiLoCo(manager, [model], optimizer, outer, sync_every=2, **cap):
            train_steps(model, optimizer, 2, seed=replica)
        return params_of(model), manager.current_step()

    (first, rounds), (second, _) = with_managers(2, job)
    assert rounds == 1
    assert [name for name in first if torch.equal(first[name], second[name])] == ["2.weight", "2.bias"]  # the last one


def test_a_bucket_smaller_than_a_fragment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1024, 1025)
    with pytest.raises(ConfigError, match="bucket_cap_mb must hold a whole fragment, 5 MiB here, got 4"):
        make_diloco(alone(), model, sgd(model), sync_every=2, use_bucketization=True, bucket_cap_mb=4)
    monkeypatch.setenv("TORCHFT_USE_BUCKETIZATION", "True")
    with pytest.raises(ConfigError, match="bucket_cap_mb"):
        make_diloco(alone(), model, sgd(model), sync_every=2, bucket_cap_mb=4)


def test_buckets_hold_a_whole_fragment_and_change_nothing() -> None:
    def job(buckets: bool) -> Callable[[Any, int], dict[str, Tensor]]:
        def run(manager: Any, replica: int) -> dict[str, Tensor]:
            model = tiny_model()
            optimizer = sgd(model)
            with make_diloco(manager, model, optimizer, sync_every=2, num_fragments=2, use_bucketization=buckets):
                train_steps(model, optimizer, 4, seed=replica)
            return params_of(model)

        return run

    plain, bucketed = with_stand_ins(2, job(False))[0], with_managers(2, job(True))[0]
    assert_same(plain, bucketed)


# -------------------------------------------------------------------------------------------- quantization


@pytest.mark.skipif(torchft_manager.IS_TRITON_AVAILABLE, reason="about what happens without triton")
def test_the_bare_library_quantizes_nothing_without_triton() -> None:
    def job(quantize: bool) -> Callable[[Any, int], dict[str, Tensor]]:
        def run(manager: Any, replica: int) -> dict[str, Tensor]:
            model = tiny_model()
            optimizer = sgd(model)
            outer = nesterov(model.parameters())
            with DiLoCo(manager, [model], optimizer, outer, sync_every=2, should_quantize=quantize):
                train_steps(model, optimizer, 2, seed=replica)
            return params_of(model)

        return run

    assert_same(with_managers(2, job(True))[0], with_stand_ins(2, job(False))[0])


@pytest.mark.skipif(torch.accelerator.is_available(), reason="about what happens without a GPU")
def test_the_bare_library_never_commits_what_it_quantizes_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with triton installed: the failure comes before its kernels, and is swallowed with the step."""
    monkeypatch.setattr(torchft_manager, "IS_TRITON_AVAILABLE", True)
    monkeypatch.setattr(torchft_manager, "allreduce_quantized", None, raising=False)

    def job(manager: Any, replica: int) -> tuple[dict[str, Tensor], int]:
        model = tiny_model()
        optimizer = sgd(model)
        outer = nesterov(model.parameters())
        with DiLoCo(manager, [model], optimizer, outer, sync_every=2, should_quantize=True):
            train_steps(model, optimizer, 4, seed=replica)
        return params_of(model), manager.current_step()

    (params, steps), _ = with_managers(2, job)
    assert steps == 0
    assert_same(params, params_of(tiny_model()))


def test_quantization_that_would_not_happen_or_never_commit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    monkeypatch.setattr(torchft_manager, "IS_TRITON_AVAILABLE", False)
    with pytest.raises(ConfigError, match="needs triton, which is not installed"):
        make_diloco(alone(), model, sgd(model), sync_every=2, should_quantize=True)
    monkeypatch.setattr(torchft_manager, "IS_TRITON_AVAILABLE", True)
    with pytest.raises(ConfigError, match=r"the whole model on CUDA, got \['cpu'\]: no step would ever be committed"):
        make_diloco(alone(), model, sgd(model), sync_every=2, should_quantize=True)


# ------------------------------------------------------------------------------------- bf16, buffers, strangers


def test_the_bare_library_takes_the_outer_step_in_bf16() -> None:
    """θ = 256, one step of 2 per round, η = 1/4: half a unit per round, which bf16 rounds away every time."""

    def after_eight_rounds(dtype: torch.dtype) -> list[float]:
        model = Ledger().to(dtype)
        with torch.no_grad():
            model.cells.fill_(256.0)
        optimizer = sgd(model, lr=2.0)
        outer = torch.optim.SGD(model.parameters(), lr=0.25)
        with DiLoCo(alone(), [model], optimizer, outer, sync_every=1):
            count(model, optimizer, cell=0, steps=8)
        return list(model.cells.tolist())

    assert after_eight_rounds(torch.bfloat16) == [256.0, 256.0]
    assert after_eight_rounds(torch.float32) == [260.0, 256.0]


def test_a_bf16_model_is_refused() -> None:
    model = tiny_model().to(torch.bfloat16)
    with pytest.raises(ModelError, match=r"must be float32, got torch.bfloat16 for '0.weight'.*autocast"):
        make_diloco(alone(), model, sgd(model), sync_every=2)


def with_batch_norm() -> nn.Module:
    return nn.Sequential(tiny_model(), nn.BatchNorm1d(1))


def test_the_bare_library_leaves_each_replica_its_own_buffers() -> None:
    def job(manager: Any, replica: int) -> dict[str, Tensor]:
        model = with_batch_norm()
        optimizer = sgd(model)
        with DiLoCo(manager, [model], optimizer, nesterov(model.parameters()), sync_every=2):
            train_steps(model, optimizer, 2, seed=replica)
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    first, second = with_stand_ins(2, job)
    assert [name for name in first if not torch.equal(first[name], second[name])] == ["1.running_mean", "1.running_var"]


def test_buffers_that_would_stay_apart_are_refused_unless_that_is_meant() -> None:
    model = with_batch_norm()
    with pytest.raises(ModelError, match=r"never synchronizes buffers, and the model has 2 \('1.running_mean'"):
        make_diloco(alone(), model, sgd(model), sync_every=2)
    assert make_diloco(alone(), model, sgd(model), sync_every=2, buffers="local")
    with pytest.raises(ConfigError, match="buffers must be 'refuse' or 'local'"):
        make_diloco(alone(), model, sgd(model), sync_every=2, buffers="average")  # type: ignore[arg-type]


def test_a_group_whose_ranks_would_heal_from_different_groups_is_refused() -> None:
    model, manager = tiny_model(), alone()
    manager._group_world_size = 2
    with pytest.raises(ModelError, match=r"every parameter must be sharded .*'0\.weight' is not"):
        make_diloco(manager, model, sgd(model), sync_every=2)
    manager._init_sync = True
    with pytest.raises(ConfigError, match="init_sync must be False with 2 ranks per replica"):
        make_diloco(manager, model, sgd(model), sync_every=2)


def test_an_optimizer_of_parameters_outside_the_model_is_refused() -> None:
    model, other = tiny_model(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(ModelError, match="trains 2 parameters that are not in the model"):
        make_diloco(alone(), model, optimizer, sync_every=2)


def test_a_wrapped_optimizer_is_refused() -> None:
    class Container(torch.optim.SGD):
        """Its state dict is by parameter name, as torchtitan's."""

        def state_dict(self) -> dict[str, Any]:
            return {"state.0.weight.momentum": 0.0}

    model = tiny_model()
    with pytest.raises(ModelError, match="must be the torch optimizer itself, got a Container around it"):
        make_diloco(alone(), model, Container(model.parameters(), lr=0.1), sync_every=2)
    wrapper = sgd(model)
    wrapper.optimizer = sgd(model)  # type: ignore[attr-defined]  # as accelerate's
    with pytest.raises(ModelError, match="must be the torch optimizer itself"):
        make_diloco(alone(), model, wrapper, sync_every=2)


def test_a_parameter_without_a_dimension_is_refused_by_name() -> None:
    model = nn.ParameterDict({"scale": nn.Parameter(torch.tensor(1.0))})
    with pytest.raises(ModelError, match="'scale' has no dimension"):
        make_diloco(alone(), model, sgd(model), sync_every=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sync_every": 3, "num_fragments": 2}, "must be a multiple of num_fragments with torchft, got 3 and 2"),
        ({"sync_every": 1, "num_fragments": 2}, "must be at least num_fragments"),
        ({"sync_every": 4, "num_fragments": 2, "fragment_delay": 2}, r"below sync_every / num_fragments \(2\).*got 2"),
        ({"sync_every": 4, "fragment_alpha": 1.5}, "between 0 and 1, got 1.5"),
        ({"sync_every": 4, "outer_lr": 0.0}, "outer lr must be a number > 0"),
        ({"sync_every": 4, "outer_momentum": 1.0}, r"outer momentum must be in \[0, 1\)"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    model = tiny_model()
    with pytest.raises(ConfigError, match=message):
        make_diloco(alone(), model, sgd(model), **settings)


def test_another_version_of_torchft_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchft_checks, "version", lambda _: "0.3.0")
    model = tiny_model()
    with pytest.raises(ConfigError, match=r"torchft must be 0\.2\.0, got 0.3.0"):
        make_diloco(alone(), model, sgd(model), sync_every=2)
