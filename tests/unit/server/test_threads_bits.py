"""Any number of threads gives the same bits: of θ, T, the update, the mean, norms and hashes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from outerstep import digest
from outerstep.coordination.server.rounds import Aggregation
from outerstep.core.codecs import CODECS
from outerstep.core.codecs.recipe import WHOLE, Recipe
from outerstep.core.delayed import DelayedNesterov
from outerstep.core.outer import Nesterov, TorchOuter
from outerstep.core.robust import combining, streams
from outerstep.core.state import Outer
from outerstep.server import blocks, decoding, publish
from outerstep.server.publish import NextVersion
from outerstep.server.store import Addend, FragmentStore, rule_of
from outerstep.threads import ThreadTeam
from outerstep.topology.encode import encode_frame
from outerstep.types import ParameterSpec, Participant

COUNTS = [1, 2, 3, 8]
SHAPES: dict[str, tuple[int, ...]] = {"w": (70, 1001), "mean": (301,), "b": (4097,), "one": (), "v": (30, 1100)}
ROLES = {"mean": "average"}
SPECS = [
    ParameterSpec(name=name, shape=shape, dtype="float32", role=ROLES.get(name, "parameter"))  # type: ignore[arg-type]
    for name, shape in SHAPES.items()
]
EVERYBODY = (Participant(worker_id="a", sequence=1, weight=1.0),)
OUTERS: dict[str, Any] = {
    "nesterov": Nesterov,
    "portable": lambda: Nesterov(portable=True),
    "delayed": lambda: DelayedNesterov(2),
    "torch": lambda: TorchOuter(
        lambda params: torch.optim.Adam(params, lr=0.01), {n: s for n, s in SHAPES.items() if n not in ROLES}
    ),
}
RULES: list[dict[str, Any]] = [
    {"aggregation": "mean", "cosine_screen": True},
    {"aggregation": "trimmed_mean"},
    {"aggregation": "median"},
    {"aggregation": "krum"},
    {"aggregation": "multi_krum"},
    {"aggregation": "geometric_median"},
    {"aggregation": "centered_clipping"},
    {"aggregation": "trimmed_mean", "bucket_size": 2},
]


@pytest.fixture(autouse=True)
def _many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (blocks, decoding):
        monkeypatch.setattr(module, "BLOCK_VALUES", 4096)
    monkeypatch.setattr(publish, "LEAF_VALUES", 1024)
    monkeypatch.setattr(digest, "LEAF_BYTES", 4 * 1024)
    monkeypatch.setattr(combining, "cut", lambda sizes, rows: streams.cut(sizes, rows, stack_values=rows * 4096))


def drawn(seed: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=source) for name, shape in SHAPES.items()}


def contribution(of: FragmentStore, recipe: Recipe, seed: int) -> memoryview:
    return encode_frame(drawn(seed), of.uplink().layout, {spec.name: recipe.codec(spec) for spec in SPECS})


def seen(of: FragmentStore, made: NextVersion) -> dict[str, Any]:
    """Everything that came of a round, as bytes."""
    mean = made.mean.numpy().tobytes() if made.mean is not None else b""
    squares, update = made.squares, bytes(made.update.view) if made.update is not None else b""
    published = of.publish(made, EVERYBODY)
    tensors = {**of.state.theta, **{f"T {name}": values for name, values in of.state.target.items()}}
    return {
        "mean": mean,
        "squares": squares,
        "update": update,
        "part hashes": (made.anchor_hash, made.part_hashes),
        "agreement": published.agreement,
        **{name: values.numpy().tobytes() for name, values in tensors.items()},
    }


def rounds_of_means(count: int, codec: str, outer: Outer) -> list[dict[str, Any]]:
    """Two rounds: contributions that are added when they come, and one when the round closes."""
    recipe, pushed = Recipe.parse(codec), isinstance(outer, DelayedNesterov)
    made = FragmentStore(0, SPECS, drawn(0), recipe, recipe.downlink(), 1024, run_id="run", team=ThreadTeam(count))
    found = []
    for version in (1, 2):
        addends = [Addend(contribution(made, recipe, 10 * version + i), 1.0 + 0.3 * i) for i in range(3)]
        norms = [made.decoder(1).check(addend.payload) for addend in addends]
        if not pushed:
            made.accumulate(version, addends[:1])
            made.accumulate(version, addends[1:2])
        rest = addends if pushed else addends[2:]
        closed = made.close(version, outer, rest, keep_mean=version == 2 and not pushed)
        found.append({"norms": norms, **seen(made, closed)})
    return found


@pytest.mark.parametrize("outer", OUTERS)
@pytest.mark.parametrize("codec", CODECS)
def test_a_round_of_means_has_the_same_bits(codec: str, outer: str) -> None:
    expected = rounds_of_means(1, codec, OUTERS[outer]())
    for count in COUNTS[1:]:
        assert rounds_of_means(count, codec, OUTERS[outer]()) == expected, count


@pytest.mark.parametrize("codec", ["int4+stochastic", "bf16+stochastic"])
def test_a_round_with_stochastic_rounding_has_the_same_bits(codec: str) -> None:
    expected = rounds_of_means(1, codec, Nesterov())
    for count in COUNTS[1:]:
        assert rounds_of_means(count, codec, Nesterov()) == expected, count


def rounds_of_rules(count: int, rule: dict[str, Any], codec: str) -> list[dict[str, Any]]:
    settings, recipe, outer = Aggregation(**rule), Recipe.parse(codec), Nesterov()
    keeps = rule_of(settings).needs_centre
    made = FragmentStore(0, SPECS, drawn(0), recipe, WHOLE, 1024, keeps_centre=keeps, team=ThreadTeam(count))
    found = []
    for version in (1, 2):
        offered = {f"w{i}": Addend(contribution(made, recipe, 10 * version + i), 1.0) for i in range(6)}
        verdict = made.combine(version, settings, offered, f"seed {version}")
        found.append({"verdict": verdict, "mean norm": verdict.mean_norm, **seen(made, made.close(version, outer))})
    return found


@pytest.mark.parametrize("codec", ["fp32", "int4", "sparse64"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_round_of_another_rule_has_the_same_bits(rule: dict[str, Any], codec: str) -> None:
    expected = rounds_of_rules(1, rule, codec)
    for count in COUNTS[1:]:
        assert rounds_of_rules(count, rule, codec) == expected, count


def test_a_version_from_above_has_the_same_bits() -> None:
    found = []
    for count in COUNTS:
        recipe = Recipe.parse("int8")
        made = FragmentStore(0, SPECS, drawn(0), recipe, recipe.downlink(), 1024, team=ThreadTeam(count))
        found.append(seen(made, made.move_to(1, drawn(1))))
    assert found == found[:1] * len(COUNTS)
