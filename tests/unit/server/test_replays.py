"""A round replayed from its contributions has the bits of the round itself: θ, T, the update, the norms, the hash."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from outerstep import digest
from outerstep.core.codecs import CODECS
from outerstep.core.codecs.recipe import Recipe
from outerstep.core.outer import Nesterov, TorchOuter
from outerstep.core.state import Outer
from outerstep.server import blocks, decoding, publish
from outerstep.server.persistence import smaller_than_mean
from outerstep.server.publish import NextVersion
from outerstep.server.store import Addend, FragmentStore
from outerstep.topology.encode import encode_frame
from outerstep.types import ParameterSpec, Participant

SHAPES: dict[str, tuple[int, ...]] = {"w": (30, 501), "mean": (301,), "one": ()}
ROLES = {"mean": "average"}
SPECS = [
    ParameterSpec(name=name, shape=shape, dtype="float32", role=ROLES.get(name, "parameter"))  # type: ignore[arg-type]
    for name, shape in SHAPES.items()
]
OUTERS: dict[str, Callable[[], Outer]] = {
    "nesterov": Nesterov,
    "torch": lambda: TorchOuter(
        lambda params: torch.optim.Adam(params, lr=0.01), {n: s for n, s in SHAPES.items() if n not in ROLES}
    ),
}
GROUPS = [(0, 0), (0, 1), (0, 1, 2), (0, 3), (0, 2, 4)]
"""Where what was added together at one time ends. What is left is added when the round closes."""


@pytest.fixture(autouse=True)
def _many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (blocks, decoding):
        monkeypatch.setattr(module, "BLOCK_VALUES", 4096)
    monkeypatch.setattr(publish, "LEAF_VALUES", 1024)
    monkeypatch.setattr(digest, "LEAF_BYTES", 4 * 1024)


def drawn(seed: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=source) for name, shape in SHAPES.items()}


def make_store(recipe: Recipe) -> FragmentStore:
    return FragmentStore(0, SPECS, drawn(0), recipe, recipe.downlink(), 1024, run_id="run", max_staleness=2)


def contributions(of: FragmentStore, recipe: Recipe, version: int) -> list[Addend]:
    """Of unequal weights, one of nothing; some of them late, whose buffers are moved along."""
    codecs = {spec.name: recipe.codec(spec) for spec in SPECS}
    made = [encode_frame(drawn(10 * version + i), of.uplink().layout, codecs) for i in range(4)]
    bases = [max(version - 1 - i, 0) for i in range(4)]
    return [Addend(payload, 0.7 * i, base) for i, (payload, base) in enumerate(zip(made, bases, strict=True))]


def seen(of: FragmentStore, made: NextVersion) -> dict[str, Any]:
    update = bytes(made.update.view) if made.update is not None else b""
    published = of.publish(made, (Participant(worker_id="a", sequence=1, weight=1.0),))
    tensors = {**of.state.theta, **{f"T {name}": values for name, values in of.state.target.items()}}
    return {
        "squares": made.squares,
        "update": update,
        "hashes": (made.anchor_hash, made.part_hashes),
        "agreement": published.agreement,
        **{name: values.numpy().tobytes() for name, values in tensors.items()},
    }


def rounds(recipe: Recipe, outer: Outer, ends: Sequence[int], *, backwards: bool = False) -> list[dict[str, Any]]:
    made, found = make_store(recipe), []
    for version in (1, 2, 3):
        addends = contributions(made, recipe, version)[:: -1 if backwards else 1]
        for begin, end in pairwise(ends):
            made.accumulate(version, addends[begin:end])
        found.append(seen(made, made.close(version, outer, addends[ends[-1] :])))
    return found


@pytest.mark.parametrize("outer", OUTERS)
@pytest.mark.parametrize("codec", [*CODECS, "int4+stochastic"])
def test_it_does_not_matter_who_was_added_together_with_whom(codec: str, outer: str) -> None:
    recipe = Recipe.parse(codec)
    replayed = rounds(recipe, OUTERS[outer](), (0,))
    for ends in GROUPS:
        assert rounds(recipe, OUTERS[outer](), ends) == replayed, ends


def test_it_does_matter_in_which_order() -> None:
    recipe = Recipe.parse("int4")
    assert rounds(recipe, Nesterov(), (0,)) != rounds(recipe, Nesterov(), (0,), backwards=True)


@pytest.mark.parametrize(
    ("codec", "count", "smaller"),
    [
        ("fp32", 1, False),
        ("bf16", 1, True),
        ("bf16", 2, False),
        ("int8", 3, True),
        ("int8", 4, False),
        ("int4", 6, True),
        ("int4", 8, False),
    ],
)
def test_few_contributions_are_smaller_than_their_mean(codec: str, count: int, smaller: bool) -> None:
    recipe = Recipe.parse(codec)
    made = make_store(recipe)
    addend = contributions(made, recipe, 1)[1]
    assert smaller_than_mean([addend] * count, made.numel) == smaller


def test_of_those_that_count_nothing_no_record_is_made() -> None:
    recipe = Recipe.parse("int4")
    made = make_store(recipe)
    nothing, something, *_ = contributions(made, recipe, 1)
    assert not smaller_than_mean([nothing], made.numel)
    assert smaller_than_mean([*[nothing] * 9, something], made.numel)
