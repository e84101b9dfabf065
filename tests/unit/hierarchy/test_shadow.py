"""A cluster's weights as its worker above sees them: how T follows the copy, and the copy T."""

from __future__ import annotations

import torch

from outerstep.hierarchy.shadow import RoundsTaken, Shadow
from outerstep.types import Manifest, ParameterSpec

MANIFEST = Manifest(
    parameters=(
        ParameterSpec(name="layers.0.weight", shape=(3,), dtype="bfloat16"),
        ParameterSpec(name="bias", shape=(2,), dtype="float32"),
        ParameterSpec(name="layers.0.norm.mean", shape=(2,), dtype="float32", role="average"),
    )
)
WEIGHT, BIAS, MEAN = MANIFEST.parameters[0].name, "bias", MANIFEST.parameters[2].name


def make() -> Shadow:
    target = {WEIGHT: torch.tensor([1.0, 2.0, 3.0]), BIAS: torch.zeros(2), MEAN: torch.ones(2)}
    return Shadow(MANIFEST, target)


def move(shadow: Shadow, name: str, by: float) -> None:
    """As an agreement from above does."""
    with torch.no_grad():
        shadow.tensors[name] += by


def test_it_is_a_model_with_the_names_of_the_run() -> None:
    shadow = make()
    assert {name for name, _ in shadow.named_parameters()} == {WEIGHT, BIAS}
    assert {name for name, _ in shadow.named_buffers()} == {MEAN}
    assert all(tensor.dtype == torch.float32 for tensor in shadow.tensors.values())
    assert len(RoundsTaken(shadow).param_groups[0]["params"]) == 2


def test_where_t_stands_still_it_goes_exactly_where_the_copy_is() -> None:
    shadow = make()
    with torch.no_grad():
        shadow.tensors[WEIGHT].copy_(torch.tensor([0.1, 0.2, 0.3]))
    moved = shadow.moved({WEIGHT: torch.tensor([1.0, 2.0, 3.0])})
    assert torch.equal(moved[WEIGHT], torch.tensor([0.1, 0.2, 0.3]))


def test_what_members_learned_meanwhile_is_kept() -> None:
    shadow = make()
    move(shadow, WEIGHT, 10.0)
    moved = shadow.moved({WEIGHT: torch.tensor([1.0, 2.5, 4.0])})  # 0, a half and one more than when it was sent
    assert moved[WEIGHT].tolist() == [11.0, 12.5, 14.0]


def test_statistics_are_taken_as_they_were_agreed() -> None:
    shadow = make()
    move(shadow, MEAN, 1.0)
    assert shadow.moved({MEAN: torch.tensor([5.0, 6.0])})[MEAN].tolist() == [2.0, 2.0]


def test_only_what_was_moved_is_handed_down() -> None:
    shadow = make()
    assert not shadow.moved_names(shadow.names)
    move(shadow, BIAS, 1.0)
    assert shadow.moved_names(shadow.names) == [BIAS]
    shadow.is_in([BIAS])
    assert not shadow.moved_names(shadow.names)
    assert shadow.tensors[BIAS].tolist() == [1.0, 1.0], "the copy itself stays where it is"


def test_it_follows_the_newest_version_only_when_it_is_told_to() -> None:
    shadow = make()
    shadow.published({BIAS: torch.tensor([7.0, 8.0])}, {})
    assert shadow.tensors[BIAS].tolist() == [0.0, 0.0]
    shadow.follow()
    assert shadow.tensors[BIAS].tolist() == shadow.before[BIAS].tolist() == [7.0, 8.0]
    assert shadow.tensors[WEIGHT].tolist() == [1.0, 2.0, 3.0]


def test_a_cluster_that_nobody_remembers_takes_what_was_agreed() -> None:
    shadow = make()
    shadow.published({WEIGHT: torch.tensor([5.0, 5.0, 5.0])}, {})
    with torch.no_grad():
        shadow.tensors[WEIGHT].copy_(torch.tensor([7.0, 8.0, 9.0]))
    shadow.forget([WEIGHT])
    moved = shadow.moved({WEIGHT: torch.tensor([5.0, 5.0, 5.0])})
    assert torch.equal(moved[WEIGHT], torch.tensor([7.0, 8.0, 9.0]))
