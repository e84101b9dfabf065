"""Where a model's layers begin and end, and that fragments do not cut through them."""

from __future__ import annotations

import pytest
from torch import nn

from outerstep.core.fragments import FragmentManager, Strategy
from outerstep.core.manifest import BufferPolicy, describe


class Block(nn.Module):
    """A transformer's layer, with a list of experts and a running statistic inside."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
        self.norm = nn.BatchNorm1d(4)


class Listed(nn.Module):
    """Layers in a ModuleList, as most people write them."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(4, 11)


class Named(nn.Module):
    """Layers under names of their own, told by `_no_split_modules` as Hugging Face models do."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.first = Block()
        self.middle = Block()
        self.last = Block()


class Staged(nn.Module):
    """Lists of lists: the stages are no layers, what they are made of is."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(Block() for _ in range(3)) for _ in range(2))
        self.downsample = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))


def blocks_of(model: nn.Module, buffers: BufferPolicy = "local") -> dict[str, str]:
    return {spec.name: spec.block for spec in describe(model, buffers)[1].parameters}


def test_an_item_of_a_module_list_is_a_layer_with_everything_inside() -> None:
    blocks = blocks_of(Listed(2))
    assert set(blocks.values()) == {"", "layers.0", "layers.1"}
    assert blocks["layers.1.experts.0.weight"] == "layers.1"
    assert blocks["embed.weight"] == blocks["head.bias"] == ""


def test_a_layer_that_is_not_to_be_split_is_found_by_its_class() -> None:
    blocks = blocks_of(Named())
    assert {blocks[name] for name in blocks if name != "embed.weight"} == {"first", "middle", "last"}
    assert blocks["middle.experts.1.weight"] == "middle"


def test_the_hint_is_found_on_an_inner_module_too() -> None:
    """A PEFT or classification wrapper around the model that carries the hint."""
    wrapped = nn.Sequential()
    wrapped.add_module("base", Named())
    assert blocks_of(wrapped)["base.first.attention.weight"] == "base.first"


def test_a_stage_made_of_layers_is_not_taken_for_one() -> None:
    blocks = set(blocks_of(Staged()).values())
    assert blocks == {f"stages.{s}.{i}" for s in range(2) for i in range(3)} | {"downsample.0", "downsample.1"}


def test_a_layers_buffers_belong_to_it() -> None:
    assert blocks_of(Named(), "average")["last.norm.running_var"] == "last"


@pytest.mark.parametrize("strategy", ["contiguous", "strided"])
@pytest.mark.parametrize("model", [Listed(), Named(), Staged()], ids=lambda model: type(model).__name__)
@pytest.mark.parametrize("buffers", ["local", "average"])
def test_no_layer_is_split_while_there_are_as_many_layers_as_fragments(
    model: nn.Module, strategy: Strategy, buffers: BufferPolicy
) -> None:
    specs = describe(model, buffers)[1].parameters
    layers = {spec.block for spec in specs} - {""}
    for count in range(1, len(layers) + 1):
        manager = FragmentManager(specs, count, strategy=strategy)
        for layer in layers:
            homes = {manager.param_to_fragment[spec.name] for spec in specs if spec.block == layer}
            assert len(homes) == 1, (count, layer)


def test_strided_layers_go_round_and_contiguous_ones_stay_together() -> None:
    specs = describe(Listed(), "average")[1].parameters

    def homes(strategy: Strategy) -> list[int]:
        manager = FragmentManager(specs, 3, strategy=strategy)
        return [manager.param_to_fragment[f"layers.{i}.attention.weight"] for i in range(6)]

    assert homes("strided") == [0, 1, 2, 0, 1, 2]
    assert homes("contiguous") == sorted(homes("contiguous"))
