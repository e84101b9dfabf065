"""The server's aggregate is the aggregator's, bit for bit: the same rules, read from encoded bytes, block by block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from outerstep.coordination.server.rounds import Aggregation
from outerstep.core.codecs.recipe import WHOLE, Recipe
from outerstep.core.outer import Nesterov
from outerstep.core.robust import RobustAggregator
from outerstep.server.store import Addend, FragmentStore, rule_of
from outerstep.topology.encode import encode_frame
from outerstep.types import ParameterSpec, Participant
from outerstep.wire.frames import rows_of
from support import make_frame

SHAPES: dict[str, tuple[int, ...]] = {"w": (70, 301), "b": (4097,), "scalar": (), "empty": (0, 3), "a": (3,)}
WORKERS = ("e", "c", "a", "f", "b", "d")  # as they come; they are taken in the order of their names
RULES: list[dict[str, Any]] = [
    {"aggregation": "mean", "cosine_screen": True},
    {"aggregation": "trimmed_mean"},
    {"aggregation": "trimmed_mean", "trim_fraction": 0.34},
    {"aggregation": "median"},
    {"aggregation": "krum"},
    {"aggregation": "multi_krum"},
    {"aggregation": "geometric_median", "aggregation_iterations": 5},
    {"aggregation": "centered_clipping"},
    {"aggregation": "centered_clipping", "clip_radius": 40.0, "aggregation_iterations": 2},
    {"aggregation": "trimmed_mean", "bucket_size": 2},
    {"aggregation": "geometric_median", "bucket_size": 2, "cosine_screen": True},
]
EVERYBODY = (Participant(worker_id="a", sequence=1, weight=1.0),)


def drawn(seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    own, common = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(99)
    return {
        name: scale * (torch.randn(shape, generator=own) + 0.4 * torch.randn(shape, generator=common))
        for name, shape in SHAPES.items()
    }


def make_store(settings: Aggregation, codec: Recipe = WHOLE, **facts: Any) -> FragmentStore:
    specs = [ParameterSpec(name=name, shape=shape, dtype="float32") for name, shape in SHAPES.items()]
    keeps = rule_of(settings).needs_centre
    return FragmentStore(0, specs, drawn(1000), codec, WHOLE, 64, keeps_centre=keeps, **facts)


def mean_of(store: FragmentStore, version: int) -> dict[str, Tensor]:
    return {name: values.clone() for name, values in store.down.by_name(store._sums[version].values).items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    for name in SHAPES:
        assert torch.equal(left[name].view(-1).view(torch.int32), right[name].view(-1).view(torch.int32)), name


def aggregator_for(settings: Aggregation) -> RobustAggregator:
    rule = rule_of(Aggregation(**{**vars(settings), "bucket_size": 1}))
    return RobustAggregator(rule, cosine_screen=settings.cosine_screen, bucket_size=settings.bucket_size)


@pytest.mark.parametrize("weights", [[1.0] * 6, [1.0, 2.5, 0.7, 1.0, 3.0, 1.1]], ids=["equal", "weighted"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_round_after_round_it_is_what_the_aggregator_makes(rule: dict[str, Any], weights: list[float]) -> None:
    """Of the last two rounds one contribution is far too large: the server's norm screen said so, or the aggregator's
    own did."""
    settings = Aggregation(**rule)
    if settings.aggregation == "krum":
        weights = [1.0] * 6
    store, aggregator, outer = make_store(settings), aggregator_for(settings), Nesterov()
    for version in range(1, 5):
        attacker = 2 if version > 2 else None
        deltas = [drawn(100 * version + i, 1000.0 if i == attacker else 1.0) for i in range(6)]
        offered = {
            worker: None if i == attacker else Addend(make_frame(delta), weight)
            for i, (worker, delta, weight) in enumerate(zip(WORKERS, deltas, weights, strict=True))
        }
        verdict = store.combine(version, settings, offered, f"seed {version}")
        expected = aggregator.aggregate(deltas, weights, worker_ids=WORKERS, fragment=0, seed=f"seed {version}")
        same(mean_of(store, version), expected)
        assert aggregator.verdict is not None
        assert verdict.accepted == aggregator.verdict.accepted
        assert verdict.unused == aggregator.verdict.unused
        assert ("a" in verdict.accepted) == (attacker is None)
        store.publish(store.close(version, outer), EVERYBODY)
        assert not store._sums


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4", "sparse64"])
def test_it_reads_what_was_encoded(codec: str) -> None:
    settings = Aggregation("centered_clipping")
    recipe = Recipe.parse(codec)
    store, aggregator = make_store(settings, recipe), aggregator_for(settings)
    specs = [ParameterSpec(name=name, shape=shape, dtype="float32") for name, shape in SHAPES.items()]
    codecs = {spec.name: recipe.codec(spec) for spec in specs}
    offered: dict[str, Addend | None] = {}
    decoded = []
    for i, worker in enumerate(WORKERS):
        frame, values = encoded(store, codecs, drawn(i))
        offered[worker] = Addend(frame, 1.0)
        decoded.append(values)
    store.combine(1, settings, offered, "")
    same(mean_of(store, 1), aggregator.aggregate(decoded, worker_ids=WORKERS))


def encoded(store: FragmentStore, codecs: dict[str, Any], delta: dict[str, Tensor]) -> tuple[memoryview, Any]:
    """A contribution's bytes, and the values that they stand for."""
    frame, values = encode_frame(delta, store.uplink().layout, codecs), {}
    data = torch.frombuffer(frame, dtype=torch.uint8)
    for name, shape in SHAPES.items():
        out = torch.empty(shape).reshape(-1)
        store.decoder(1).read(data, name, 0, out.numel(), out)
        values[name] = out.view(shape)
    return frame, values


def test_a_contribution_in_sections_is_the_same_contribution() -> None:
    settings = Aggregation("geometric_median")
    deltas = {worker: drawn(i) for i, worker in enumerate(WORKERS)}
    whole, mixed = make_store(settings), make_store(settings)
    whole.combine(1, settings, {w: Addend(make_frame(d), 1.0) for w, d in deltas.items()}, "")
    cut = {
        w: Addend(in_sections(d, 3), 1.0, sections=3) if w in "ad" else Addend(make_frame(d), 1.0)
        for w, d in deltas.items()
    }
    mixed.combine(1, settings, cut, "")
    same(mean_of(mixed, 1), mean_of(whole, 1))


def in_sections(delta: dict[str, Tensor], sections: int) -> memoryview:
    """The rows of every tensor dealt out to so many sections, one frame after the other."""
    frames = []
    for section in range(sections):
        shares = {}
        for name, tensor in delta.items():
            rows = rows_of(tuple(tensor.shape), sections, section)
            shares[name] = tensor.reshape(-1)[rows.first_value : rows.first_value + rows.numel].view(rows.shape)
        frames.append(make_frame(shares))
    return memoryview(bytearray(b"".join(frames)))


def test_where_centered_clipping_was_is_known_to_who_goes_on() -> None:
    settings = Aggregation("centered_clipping")
    first = make_store(settings)
    first.combine(1, settings, {w: Addend(make_frame(drawn(i)), 1.0) for i, w in enumerate(WORKERS)}, "")
    first.publish(first.close(1, Nesterov()), EVERYBODY)
    second = make_store(settings, version=1, centre=first.centre)
    same(second.centre, first.centre)
    for store in (first, second):
        offered = {w: Addend(make_frame(drawn(50 + i)), 1.0) for i, w in enumerate(WORKERS)}
        store.combine(2, settings, offered, "")
    same(mean_of(second, 2), mean_of(first, 2))
    fresh = make_store(settings, version=1)
    assert fresh.centre == {}
    fresh.combine(2, settings, offered, "")
    assert not torch.equal(mean_of(fresh, 2)["w"], mean_of(first, 2)["w"])


def test_late_averaged_buffers_are_taken_as_values() -> None:
    """The median of 0.2 (late: computed from 1.0), 0.6 and 0.4; of their differences it would be another."""
    spec = ParameterSpec(name="var", shape=(1,), dtype="float32", role="average")
    store = FragmentStore(0, [spec], {"var": torch.tensor([1.0])}, WHOLE, WHOLE, 64, max_staleness=4)
    settings = Aggregation("median")

    def bring(version: int, *values: tuple[float, float, int]) -> None:
        offered = {
            str(i): Addend(make_frame({"var": torch.tensor([anchor - local])}), 1.0, base)
            for i, (anchor, local, base) in enumerate(values)
        }
        store.combine(version, settings, offered, "")
        store.publish(store.close(version, Nesterov()), EVERYBODY)

    bring(1, (1.0, 0.5, 0), (1.0, 0.5, 0), (1.0, 0.5, 0))
    assert float(store.params()["var"]) == pytest.approx(0.5)
    bring(2, (1.0, 0.2, 0), (0.5, 0.6, 1), (0.5, 0.4, 1))
    assert float(store.params()["var"]) == pytest.approx(0.4)
