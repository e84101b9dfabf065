"""What a model says about itself."""

import pytest
import torch
from torch import nn

from outerstep.core.manifest import LONGEST_NAME, MAX_BLOCK_NAME, BufferPolicy, block_of, check_name, describe
from outerstep.errors import ModelError
from outerstep.types import Manifest, ParameterSpec
from outerstep.wire.messages import decode_json, encode_json


class Small(nn.Module):
    """A table that is also the head, layers with a buffer each, a frozen probe, and bf16 and scalar parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))
        self.probe = nn.Linear(4, 1).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.bfloat16))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.wte.weight


def specs_of(model: nn.Module) -> dict[str, ParameterSpec]:
    return {spec.name: spec for spec in describe(model)[1].parameters}


def test_the_parameters_come_in_the_models_order_with_shape_and_dtype() -> None:
    model = Small()
    params, manifest = describe(model)
    expected = [(name, tuple(p.shape)) for name, p in model.named_parameters() if p.requires_grad]
    assert [(spec.name, spec.shape) for spec in manifest.parameters] == expected
    assert list(params) == [name for name, _ in expected]
    assert all(params[name] is p for name, p in model.named_parameters() if p.requires_grad)
    dtypes = {spec.name: spec.dtype for spec in manifest.parameters}
    assert dtypes.pop("scale") == "bfloat16"
    assert set(dtypes.values()) == {"float32"}
    assert specs_of(model)["scale"].shape == ()


class TestTied:
    def test_a_tied_parameter_appears_once_and_its_other_name_points_to_the_first(self) -> None:
        params, manifest = describe(Small())
        assert "wte.weight" in params
        assert "head.weight" not in params
        assert manifest.aliases == {"head.weight": "wte.weight"}

    def test_a_whole_module_used_twice_is_tied_name_by_name(self) -> None:
        layer = nn.Linear(2, 2)
        params, manifest = describe(nn.Sequential(layer, nn.Tanh(), layer, layer))
        assert list(params) == ["0.weight", "0.bias"]
        assert manifest.aliases == {
            "2.weight": "0.weight",
            "2.bias": "0.bias",
            "3.weight": "0.weight",
            "3.bias": "0.bias",
        }

    def test_equal_values_are_no_tie(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].load_state_dict(model[0].state_dict())
        assert describe(model)[1].aliases == {}
        assert len(describe(model)[0]) == 4


class TestFrozen:
    def test_frozen_parameters_are_left_out_and_named(self) -> None:
        params, manifest = describe(Small())
        assert manifest.frozen == ("probe.weight", "probe.bias")
        assert not any(name.startswith("probe") for name in params)
        assert not any(spec.name.startswith("probe") for spec in manifest.parameters)

    def test_a_frozen_tie_is_frozen_under_both_its_names(self) -> None:
        model = Small()
        model.wte.requires_grad_(False)
        _, manifest = describe(model)
        assert manifest.frozen == ("wte.weight", "probe.weight", "probe.bias", "head.weight")
        assert manifest.aliases == {}

    def test_a_model_that_is_all_frozen_has_no_parameters(self) -> None:
        params, manifest = describe(nn.Linear(2, 2).requires_grad_(False))
        assert (params, manifest.parameters) == ({}, ())


class TestBlocks:
    def test_a_parameter_knows_its_layer(self) -> None:
        blocks = {name: spec.block for name, spec in specs_of(Small()).items()}
        assert blocks["blocks.0.0.weight"] == blocks["blocks.0.1.bias"] == "blocks.0"
        assert blocks["blocks.1.0.weight"] == "blocks.1"
        assert blocks["wte.weight"] == blocks["scale"] == ""

    def test_a_layers_name_is_cut_to_what_a_message_may_carry(self) -> None:
        name = "deep." * 100 + "3.weight"
        assert block_of(name) == name[:MAX_BLOCK_NAME]


class TestEmbeddings:
    def test_tables_are_flagged_and_nothing_else(self) -> None:
        assert [name for name, spec in specs_of(Small()).items() if spec.embedding] == ["wte.weight"]

    def test_a_tied_table_is_flagged_under_whichever_name_comes_first(self) -> None:
        class HeadFirst(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.head = nn.Linear(4, 7, bias=False)
                self.wte = nn.Embedding(7, 4)
                self.wte.weight = self.head.weight

        _, manifest = describe(HeadFirst())
        assert manifest.aliases == {"wte.weight": "head.weight"}
        assert [(spec.name, spec.embedding) for spec in manifest.parameters] == [("head.weight", True)]

    def test_a_subclass_of_an_embedding_is_one(self) -> None:
        class Scaled(nn.Embedding):
            pass

        assert specs_of(nn.Sequential(Scaled(3, 2)))["0.weight"].embedding


def test_buffers_are_named_and_not_exchanged() -> None:
    params, manifest = describe(Small())
    per_block = ("running_mean", "running_var", "num_batches_tracked")
    assert manifest.buffers == tuple(f"blocks.{i}.1.{name}" for i in range(2) for name in per_block)
    assert not params.keys() & set(manifest.buffers)


@pytest.mark.parametrize("model", [Small(), nn.Linear(2, 3), nn.Identity()], ids=lambda model: type(model).__name__)
def test_a_manifest_survives_the_wire(model: nn.Module) -> None:
    _, manifest = describe(model)
    assert decode_json(encode_json(manifest), Manifest) == manifest


class Statistics(nn.Module):
    """Buffers at the root and below: kept and not kept, floating-point and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("usual", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


@pytest.mark.parametrize("policy", ["average", "server"])
def test_the_buffers_that_a_state_dict_holds_are_exchanged_in_the_role_of_the_policy(policy: BufferPolicy) -> None:
    model = Statistics()
    tensors, manifest = describe(model, policy)
    roles = {spec.name: spec.role for spec in manifest.parameters}
    assert roles == {
        "norm.weight": "parameter",
        "norm.bias": "parameter",
        "usual": policy,
        "norm.running_mean": policy,
        "norm.running_var": policy,
    }
    assert tensors["usual"] is model.usual
    assert tensors["norm.running_mean"] is model.norm.running_mean
    assert manifest.buffers == ("scratch", "norm.num_batches_tracked")


def test_local_buffers_are_only_named() -> None:
    _, manifest = describe(Statistics())
    assert [spec.role for spec in manifest.parameters] == ["parameter", "parameter"]
    assert set(manifest.buffers) == {
        "usual",
        "scratch",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }


def test_only_tables_are_embeddings() -> None:
    assert [name for name, spec in specs_of(Small()).items() if spec.embedding] == ["wte.weight"]
    _, manifest = describe(Statistics(), "average")
    assert not any(spec.embedding for spec in manifest.parameters)


def test_the_items_of_a_list_that_is_the_model_are_its_layers() -> None:
    model = nn.ModuleList(nn.ModuleDict({"deep": nn.Linear(2, 2)}) for _ in range(2))
    assert {spec.block for spec in describe(model)[1].parameters} == {"0", "1"}


class Holding(nn.Module):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(tensor)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((2,), (0,)),
        ((2, 2), (1, 1)),
        ((3, 2), (1, 2)),
        ((2, 2, 2), (1, 2, 3)),
    ],
)
def test_a_parameter_whose_values_share_a_place_is_refused_by_name(
    shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    with pytest.raises(ModelError, match="'w' must have a place in memory for each value"):
        describe(Holding(torch.zeros(64).as_strided(shape, strides)))


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((1, 3), (0, 1)), ((2, 3), (1, 2)), ((2, 2, 2), (1, 2, 4)), ((3, 4), (8, 2)), ((), ())],
)
def test_one_with_a_place_for_each_is_taken_however_they_lie(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    describe(Holding(torch.zeros(64).as_strided(shape, strides)))


def test_a_sparse_parameter_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="'w' must be dense"):
        describe(Holding(torch.eye(3).to_sparse()))


def test_a_name_may_be_as_long_as_the_limit() -> None:
    check_name("n" * LONGEST_NAME)
    with pytest.raises(ModelError, match=f"at most {LONGEST_NAME} characters, got {LONGEST_NAME + 1}"):
        check_name("n" * (LONGEST_NAME + 1))
