"""One mean out of everybody's contribution, and who computes what of it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from amounts import mostly_slow
from outerstep.core.aggregate import weighted_mean
from outerstep.core.codecs import Dither
from outerstep.core.codecs.recipe import Recipe
from outerstep.errors import WorkerError
from outerstep.topology.allreduce.peers import Peers
from outerstep.topology.encode import encode_frame
from outerstep.topology.forms import Form, forms_of
from outerstep.topology.payload import Memory, Rooms
from outerstep.topology.reduce import ReducedMean, Reducer, slices_of
from outerstep.types import Manifest, ParameterSpec, Plan
from support import in_threads

SHAPES: dict[str, tuple[int, ...]] = {"wte": (300, 41), "norm": (41,), "empty": (0, 3), "w": (123, 77), "scalar": ()}
SPECS = tuple(ParameterSpec(name=n, shape=s, dtype="float32", embedding=n == "wte") for n, s in SHAPES.items())
RECIPES = ["fp32", "bf16", "int8", "int4", "e3m0", "sparse64", "int4,embeddings=int8,norms=fp32"]


def make_form(recipe: str) -> tuple[Form, dict[str, Any]]:
    up = Recipe.parse(recipe)
    down = up.downlink()
    plan = Plan(
        sync_every=1, codec=up.name, down_codec=down.name, fragments=(tuple(SHAPES),), part_size_bytes=64,
        max_staleness=0, heartbeat_timeout_s=0.0,
    )  # fmt: skip
    return forms_of(plan, Manifest(parameters=SPECS))[0], {spec.name: down.rule(spec) for spec in SPECS}


class ThreadLinks:
    """A carrier between the threads of a test, over a table."""

    def __init__(self, peers: Peers, table: dict[tuple[int, int], list[Tensor]], meeting: threading.Barrier) -> None:
        self.device = torch.device("cpu")
        self.bytes_sent = self.bytes_received = 0
        rooms = Rooms(self.device, Memory())
        self.take, self.give_back = rooms.take, rooms.give_back
        self._rank, self._table, self._meeting = peers.rank, table, meeting

    def swap(self, out: Sequence[tuple[int, Tensor]], into: Sequence[tuple[int, Tensor]]) -> None:
        for rank, data in out:
            self._table.setdefault((self._rank, rank), []).append(data)
            self.bytes_sent += data.nbytes
        self._meeting.wait(20)
        for rank, data in into:
            data.copy_(self._table[rank, self._rank].pop(0))
            self.bytes_received += data.nbytes
        self._meeting.wait(20)


def deltas(seed: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=source) for name, shape in SHAPES.items()}


def reducers(recipe: str, count: int) -> list[Reducer]:
    form, rules = make_form(recipe)
    store, table, meeting = HashStore(), {}, threading.Barrier(count)
    peers = [Peers(store, rank, count, name="test", timeout_s=30.0) for rank in range(count)]
    return [Reducer(0, form, rules, ThreadLinks(p, table, meeting), p) for p in peers]


def reduce(ranks: list[Reducer], contributions: list[dict[str, Tensor]], weights: list[float]) -> list[Tensor]:
    return [mean.frame[ranks[0].form.update.data_begin :] for mean in means(ranks, contributions, weights)]


def means(ranks: list[Reducer], contributions: list[dict[str, Tensor]], weights: list[float]) -> list[ReducedMean]:
    form = ranks[0].form
    codecs = {name: rule.codec for name, rule in form.rules.items()}
    frames = [torch.frombuffer(encode_frame(one, form.up, codecs), dtype=torch.uint8) for one in contributions]

    def work(rank: int) -> ReducedMean:
        squares = sum(float(tensor.double().square().sum()) for tensor in contributions[rank].values())
        return ranks[rank].reduce(frames[rank], weights, lambda name: Dither(0), squares)

    return in_threads(*[lambda r=r: work(r) for r in range(len(ranks))])


def decoded(form: Form, data: Tensor) -> dict[str, Tensor]:
    out = {entry.name: torch.empty(entry.shape) for entry in form.update.entries}
    for entry in form.update.entries:
        form.codecs[entry.name].decode(data[entry.begin : entry.end], out[entry.name].view(-1))
    return out


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_slices_are_the_frame_and_every_value_is_in_one_of_them(recipe: str, count: int) -> None:
    form, _ = make_form(recipe)
    slices = slices_of(form, count)
    assert len(slices) == count
    for edges, layout in ((lambda s: s.up, form.up), (lambda s: s.down, form.update)):
        assert edges(slices[0])[0] == layout.data_begin
        assert edges(slices[-1])[1] == layout.size_bytes
        assert all(edges(a)[1] == edges(b)[0] for a, b in pairwise(slices))
    values = [(p.name, i) for s in slices for p in s.pieces for i in range(p.start, p.stop)]
    assert values == [(name, i) for name, shape in SHAPES.items() for i in range(torch.Size(shape).numel())]


def test_the_slices_are_of_about_the_same_size() -> None:
    form, _ = make_form("int4")
    sizes = [end - begin for begin, end in (one.up for one in slices_of(form, 4))]
    assert max(sizes) - min(sizes) <= 2 * 130


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [3.0, 1.0, 4.5]])
def test_the_mean_is_the_same_bytes_everywhere_and_that_of_what_was_sent_in_order(
    recipe: str, weights: list[float]
) -> None:
    ranks, contributions = reducers(recipe, 3), [deltas(seed) for seed in range(3)]
    form = ranks[0].form
    first, *others = reduce(ranks, contributions, weights)
    places = [(e.begin, e.end) for e in form.update.entries]
    assert all(torch.equal(first[a:b], other[a:b]) for other in others for a, b in places)
    found = decoded(form, first)
    for name in SHAPES:
        codec, down = form.rules[name].codec, form.codecs[name]
        sent = []
        for one in contributions:
            data = torch.empty(codec.encoded_bytes(one[name].numel()), dtype=torch.uint8)
            codec.encode(one[name].view(-1), data)
            sent.append(torch.empty(one[name].numel()))
            codec.decode(data, sent[-1])
        mean = weighted_mean(sent, weights)
        if not form.rules[name].feedback or down.name == "fp32":
            data = torch.empty(down.encoded_bytes(mean.numel()), dtype=torch.uint8)
            down.encode(mean, data)
            down.decode(data, mean)
        assert torch.allclose(found[name].view(-1), mean, rtol=2**-8 if form.rules[name].feedback else 0.0, atol=0.0)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_everybody_knows_the_norms_of_all_contributions_and_of_their_mean(count: int) -> None:
    contributions = [deltas(seed) for seed in range(count)]
    flat = [torch.cat([tensor.reshape(-1) for tensor in one.values()]) for one in contributions]
    found = means(reducers("fp32", count), contributions, [2.0, 1.0, 1.0][:count])
    assert all((one.norm, one.norms) == (found[0].norm, found[0].norms) for one in found)
    assert found[0].norm == pytest.approx(float(weighted_mean(flat, [2.0, 1.0, 1.0][:count]).norm()), rel=1e-5)
    assert found[0].norms == pytest.approx([float(one.norm()) for one in flat], rel=1e-5)


def test_with_feedback_what_the_mean_leaves_out_goes_with_the_next_one() -> None:
    ranks, contributions = reducers("int4+feedback", 2), [deltas(0), deltas(0)]
    codec = ranks[0].form.rules["w"].codec
    data = torch.empty(codec.encoded_bytes(contributions[0]["w"].numel()), dtype=torch.uint8)
    codec.encode(contributions[0]["w"].view(-1), data)
    sent = torch.empty(contributions[0]["w"].numel())
    codec.decode(data, sent)
    total = torch.zeros(SHAPES["w"]).view(-1)
    for _ in range(4):
        total += decoded(ranks[0].form, reduce(ranks, contributions, [1.0, 1.0])[0])["w"].view(-1)
    owed = torch.cat([rank.left_out["w"] for rank in ranks if "w" in rank.left_out])
    assert torch.allclose(total + owed, 4 * sent, atol=1e-5)


def test_each_rank_sends_its_contribution_and_its_mean_once_less_its_own_slice() -> None:
    ranks = reducers("int8", 3)
    reduce(ranks, [deltas(seed) for seed in range(3)], [1.0] * 3)
    form = ranks[0].form
    slices = slices_of(form, 3)
    for rank, one in enumerate(ranks):
        up = sum(s.up[1] - s.up[0] for r, s in enumerate(slices) if r != rank)
        down = 2 * (slices[rank].down[1] - slices[rank].down[0])
        watched = 2 * 16  # two numbers to each of the others
        assert one._links.bytes_sent == up + down + watched


@pytest.mark.parametrize("recipe", ["fp32", "int8"])
def test_a_value_that_is_not_finite_is_refused_naming_its_rank_and_tensor(recipe: str) -> None:
    contributions = [deltas(0), deltas(1)]
    contributions[1]["w"][100, 3] = float("inf")
    ranks = reducers(recipe, 2)

    def caught(rank: int, frame: Tensor) -> str:
        try:
            ranks[rank].reduce(frame, [1.0, 1.0], lambda name: Dither(0))
        except WorkerError as error:
            ranks[rank]._links._meeting.abort()
            return str(error)
        except threading.BrokenBarrierError:
            pass
        return ""

    form = ranks[0].form
    codecs = {name: rule.codec for name, rule in form.rules.items()}
    frames = [torch.frombuffer(encode_frame(one, form.up, codecs), dtype=torch.uint8) for one in contributions]
    said = in_threads(*[lambda r=r: caught(r, frames[r]) for r in range(2)])
    assert any("rank 1 contributed NaN or Inf in tensor 'w'" in one for one in said)


def test_large_values_are_finite() -> None:
    big = [{name: torch.full(shape, 3e19) for name, shape in SHAPES.items()} for _ in range(2)]
    ranks = reducers("fp32", 2)
    assert decoded(ranks[0].form, reduce(ranks, big, [1.0, 1.0])[0])["w"].eq(3e19).all()


@pytest.mark.parametrize("recipe", [*RECIPES, "int4+feedback", "int8+feedback+stochastic"])
@pytest.mark.parametrize("run_bytes", mostly_slow([50, 150], [150]))
def test_run_by_run_the_mean_is_the_same_also_what_is_owed_of_it(
    recipe: str, run_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, weights = reducers(recipe, 3), [1.0, 2.0, 1.0]
    monkeypatch.setattr("outerstep.topology.reduce.RUN_BYTES", run_bytes)
    cut = reducers(recipe, 3)
    assert cut[0]._count > 1
    for seed in (0, 10):
        contributions = [deltas(seed + rank) for rank in range(3)]
        for one, other in zip(reduce(whole, contributions, weights), reduce(cut, contributions, weights), strict=True):
            for entry in whole[0].form.update.entries:
                assert torch.equal(one[entry.begin : entry.end], other[entry.begin : entry.end])
    for one, other in zip(whole, cut, strict=True):
        assert one.left_out.keys() == other.left_out.keys()
        assert all(torch.equal(one.left_out[name], other.left_out[name]) for name in one.left_out)
