"""Which parameter is in which fragment, and which fragment is due when."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from amounts import cases
from outerstep.core.fragments import FragmentManager, Strategy, check_cycle
from outerstep.core.manifest import block_of
from outerstep.errors import ConfigError
from outerstep.schedule import due_fragment, send_step
from outerstep.types import ParameterSpec

STRATEGIES: list[Strategy] = ["contiguous", "strided", "counted"]
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
PROPERTY = cases(200)


def spec(name: str, numel: int = 10, *, embedding: bool = False) -> ParameterSpec:
    return ParameterSpec(name=name, shape=(numel,), dtype="float32", block=block_of(name), embedding=embedding)


def layers(count: int, numel: int = 10) -> list[ParameterSpec]:
    return [spec(f"h.{i}.{part}", numel) for i in range(count) for part in ("weight", "bias")]


def sizes(specs: list[ParameterSpec], fragments: list[list[str]]) -> list[int]:
    numel = {s.name: s.numel for s in specs}
    return [sum(numel[name] for name in names) for names in fragments]


@st.composite
def models(draw: st.DrawFn) -> list[ParameterSpec]:
    """Embedding, layers of one to four parameters of any size, something after them."""
    found = [spec("embed.weight", draw(st.integers(1, 5000)), embedding=True)] if draw(st.booleans()) else []
    for i, parts in enumerate(draw(st.lists(st.integers(1, 4), max_size=12))):
        found += [spec(f"h.{i}.p{j}", draw(st.integers(1, 2000))) for j in range(parts)]
    found += [spec(f"tail{i}", numel) for i, numel in enumerate(draw(st.lists(st.integers(1, 500), max_size=3)))]
    return found or [spec("w")]


@st.composite
def splits(draw: st.DrawFn) -> tuple[list[ParameterSpec], FragmentManager]:
    specs = draw(models())
    manager = FragmentManager(
        specs,
        draw(st.integers(1, len(specs))),
        strategy=draw(st.sampled_from(STRATEGIES)),
        embeddings_apart=draw(st.booleans()),
    )
    return specs, manager


class TinyTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(3))
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight
        self.probe = nn.Parameter(torch.zeros(5), requires_grad=False)


class TestEverySplit:
    @PROPERTY
    @given(splits())
    def test_every_parameter_is_in_exactly_one_fragment_and_no_fragment_is_empty(
        self, split: tuple[list[ParameterSpec], FragmentManager]
    ) -> None:
        specs, manager = split
        assert len(manager.fragments) == manager.num_fragments
        assert all(manager.fragments)
        assert sorted(n for names in manager.fragments for n in names) == sorted(s.name for s in specs)

    @PROPERTY
    @given(splits())
    def test_the_models_order_is_kept_inside_each_fragment(
        self, split: tuple[list[ParameterSpec], FragmentManager]
    ) -> None:
        specs, manager = split
        order = [s.name for s in specs]
        for names in manager.fragments:
            assert names == [name for name in order if name in set(names)]

    @PROPERTY
    @given(splits())
    def test_the_fragment_of_a_parameter_is_the_one_that_lists_it(
        self, split: tuple[list[ParameterSpec], FragmentManager]
    ) -> None:
        specs, manager = split
        assert manager.param_to_fragment.keys() == {s.name for s in specs}
        assert all(name in manager.fragments[p] for name, p in manager.param_to_fragment.items())

    @every_strategy
    def test_one_fragment_is_the_whole_model(self, strategy: Strategy) -> None:
        specs = [spec("embed", embedding=True), *layers(3), spec("norm")]
        manager = FragmentManager(specs, 1, strategy=strategy, embeddings_apart=True)
        assert manager.fragments == [[s.name for s in specs]]

    @every_strategy
    def test_more_fragments_than_layers_cuts_inside_the_layers(self, strategy: Strategy) -> None:
        manager = FragmentManager(layers(2), 4, strategy=strategy)
        assert sorted(manager.fragments) == [["h.0.bias"], ["h.0.weight"], ["h.1.bias"], ["h.1.weight"]]

    @every_strategy
    @pytest.mark.parametrize("count", [-1, 0, 7])
    def test_a_number_of_fragments_that_parameters_cannot_fill_is_refused(self, strategy: Strategy, count: int) -> None:
        with pytest.raises(ConfigError, match=rf"between 1 and the number of trainable parameters \(6\), got {count}"):
            FragmentManager(layers(3), count, strategy=strategy)

    def test_a_module_is_taken_as_it_is_tied_parameters_once_and_frozen_ones_not_at_all(self) -> None:
        model = TinyTransformer()
        manager = FragmentManager(model, 2)
        names = [name for fragment in manager.fragments for name in fragment]
        assert names == [name for name, p in model.named_parameters() if p.requires_grad]
        assert "probe" not in names
        assert "head.weight" not in names

    def test_a_model_without_trainable_parameters_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"trainable parameters \(0\)"):
            FragmentManager(nn.Linear(2, 2).requires_grad_(False), 1)


class TestContiguous:
    @PROPERTY
    @given(models(), st.data())
    def test_neighbours_stay_together(self, specs: list[ParameterSpec], data: st.DataObject) -> None:
        fragments = FragmentManager(specs, data.draw(st.integers(1, len(specs)))).fragments
        assert [name for names in fragments for name in names] == [s.name for s in specs]

    @PROPERTY
    @given(st.integers(1, 60), st.data())
    def test_equal_layers_are_shared_out_as_evenly_as_whole_layers_can_be(
        self, count: int, data: st.DataObject
    ) -> None:
        num_fragments = data.draw(st.integers(1, count))
        specs = layers(count)
        found = sizes(specs, FragmentManager(specs, num_fragments).fragments)
        assert max(found) == 20 * math.ceil(count / num_fragments)
        assert min(found) == 20 * (count // num_fragments)

    @PROPERTY
    @given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.data())
    def test_no_fragment_exceeds_its_share_by_more_than_the_largest_layer(
        self, numels: list[int], data: st.DataObject
    ) -> None:
        specs = [spec(f"h.{i}.weight", numel) for i, numel in enumerate(numels)]
        num_fragments = data.draw(st.integers(1, len(specs)))
        found = sizes(specs, FragmentManager(specs, num_fragments).fragments)
        assert max(found) <= sum(numels) / num_fragments + max(numels)

    def test_balance_is_by_bytes_not_by_the_number_of_parameters(self) -> None:
        specs = [spec("big", 900), *(spec(f"small{i}", 100) for i in range(9))]
        assert FragmentManager(specs, 2).fragments == [["big"], [f"small{i}" for i in range(9)]]

    def test_layers_are_not_cut_when_there_are_enough_of_them(self) -> None:
        fragments = FragmentManager(layers(4), 3).fragments
        assert all(len({block_of(name) for name in names}) * 2 == len(names) for names in fragments)


class TestStrided:
    @PROPERTY
    @given(st.integers(1, 40), st.integers(1, 40))
    def test_layer_i_goes_to_fragment_i_mod_p(self, count: int, num_fragments: int) -> None:
        num_fragments = min(num_fragments, count)
        manager = FragmentManager(layers(count), num_fragments, strategy="strided")
        for name, fragment in manager.param_to_fragment.items():
            assert fragment == int(name.split(".")[1]) % num_fragments

    def test_what_belongs_to_no_layer_goes_to_the_lightest_largest_first(self) -> None:
        specs = [spec("small", 5), *layers(3), spec("large", 30)]  # layers: 40 bytes' worth in fragment 0, 20 in 1
        manager = FragmentManager(specs, 2, strategy="strided")
        assert manager.param_to_fragment["large"] == 1
        assert manager.param_to_fragment["small"] == 0
        assert manager.fragments[0][0] == "small"


class TestCounted:
    @PROPERTY
    @given(models(), st.data())
    def test_equally_many_in_order_and_the_first_ones_one_more(
        self, specs: list[ParameterSpec], data: st.DataObject
    ) -> None:
        count = data.draw(st.integers(1, len(specs)))
        fragments = FragmentManager(specs, count, strategy="counted").fragments
        assert [name for names in fragments for name in names] == [s.name for s in specs]
        each, longer = divmod(len(specs), count)
        assert [len(names) for names in fragments] == [each + 1] * longer + [each] * (count - longer)


class TestEmbeddingsApart:
    SPECS = (spec("wte", 100, embedding=True), *layers(6), spec("wpe", 50, embedding=True), spec("norm"))

    @every_strategy
    @pytest.mark.parametrize("count", [2, 3, 5])
    def test_the_tables_get_the_first_fragment_to_themselves(self, strategy: Strategy, count: int) -> None:
        manager = FragmentManager(self.SPECS, count, strategy=strategy, embeddings_apart=True)
        assert manager.fragments[0] == ["wte", "wpe"]
        assert len(manager.fragments) == count

    @every_strategy
    def test_the_rest_is_split_as_if_there_were_no_tables(self, strategy: Strategy) -> None:
        rest = [s for s in self.SPECS if not s.embedding]
        apart = FragmentManager(self.SPECS, 4, strategy=strategy, embeddings_apart=True)
        assert apart.fragments[1:] == FragmentManager(rest, 3, strategy=strategy).fragments

    @every_strategy
    def test_the_tables_of_a_module_are_found_by_what_they_are(self, strategy: Strategy) -> None:
        """Not by their name, and a tied table counts once, under the name that is kept."""
        model = TinyTransformer()
        model.positions = nn.Embedding(8, 4)
        manager = FragmentManager(model, 3, strategy=strategy, embeddings_apart=True)
        assert manager.fragments[0] == ["embed.weight", "positions.weight"]
        rest = [name for fragment in manager.fragments[1:] for name in fragment]
        assert sorted(rest) == sorted(name for name, _ in model.h.named_parameters(prefix="h"))

    def test_the_tables_of_a_module_stay_with_their_neighbours_unless_asked_for(self) -> None:
        assert len(FragmentManager(TinyTransformer(), 2).fragments[0]) > 1

    def test_a_frozen_table_is_in_no_fragment(self) -> None:
        model = TinyTransformer()
        model.embed.requires_grad_(False)
        manager = FragmentManager(model, 2, embeddings_apart=True)
        assert manager.fragments == FragmentManager(model, 2).fragments
        assert "embed.weight" not in manager.param_to_fragment

    def test_they_stay_with_their_neighbours_unless_asked_for(self) -> None:
        assert FragmentManager(self.SPECS, 2).fragments[0] != ["wte", "wpe"]

    def test_a_model_without_tables_is_split_as_usual(self) -> None:
        specs = layers(5)
        assert FragmentManager(specs, 3, embeddings_apart=True).fragments == FragmentManager(specs, 3).fragments


class TestBlocks:
    @pytest.mark.parametrize(
        ("name", "block"),
        [
            ("h.3.attn.weight", "h.3"),
            ("transformer.layers.11.mlp.2.bias", "transformer.layers.11"),
            ("0.weight", "0"),
            ("embed.weight", ""),
            ("conv2d.weight", ""),
            ("head", ""),
        ],
    )
    def test_a_layer_is_the_name_up_to_the_first_number(self, name: str, block: str) -> None:
        assert block_of(name) == block


class TestSchedule:
    @PROPERTY
    @given(sync_every=st.integers(1, 3000), parts=st.integers(1, 3000), cycle=st.integers(0, 1000))
    def test_over_any_cycle_each_fragment_is_sent_exactly_once_after_its_step(
        self, sync_every: int, parts: int, cycle: int
    ) -> None:
        num_fragments = min(parts, sync_every)
        expected = {(p + 1) * sync_every // num_fragments: p for p in range(num_fragments)}
        due = {step: due_fragment(cycle * sync_every + step, sync_every, num_fragments) for step in _steps(sync_every)}
        assert {step: p for step, p in due.items() if p is not None} == expected

    @PROPERTY
    @given(sync_every=st.integers(1, 3000), parts=st.integers(1, 3000))
    def test_sends_are_spread_evenly_over_the_cycle(self, sync_every: int, parts: int) -> None:
        num_fragments = min(parts, sync_every)
        steps = [send_step(p, sync_every, num_fragments) for p in range(-1, num_fragments)]
        gaps = {after - before for before, after in pairwise(steps)}
        assert gaps <= {sync_every // num_fragments, math.ceil(sync_every / num_fragments)}
        assert (steps[0], steps[-1]) == (0, sync_every)

    def test_three_fragments_of_600_steps_are_sent_at_200_400_and_600(self) -> None:
        manager = FragmentManager(layers(3), 3)
        due = {step: manager.get_fragment_schedule(step, 600) for step in _steps(1200)}
        assert {step: p for step, p in due.items() if p is not None} == {
            200: 0,
            400: 1,
            600: 2,
            800: 0,
            1000: 1,
            1200: 2,
        }

    def test_the_first_of_four_fragments_is_due_at_200_of_800(self) -> None:
        assert FragmentManager(layers(4), 4).get_fragment_schedule(200, 800) == 0

    def test_a_whole_model_is_due_at_the_end_of_each_cycle_only(self) -> None:
        assert [step for step in _steps(30) if due_fragment(step, 10, 1) is not None] == [10, 20, 30]

    @pytest.mark.parametrize("step", [0, -1, -10])
    def test_nothing_is_due_before_the_first_step(self, step: int) -> None:
        assert due_fragment(step, 10, 2) is None

    def test_a_cycle_shorter_than_its_fragments_is_refused_showing_both(self) -> None:
        check_cycle(4, 4)
        with pytest.raises(ConfigError, match=r"sync_every \(3\) must be at least num_fragments \(4\)"):
            check_cycle(3, 4)


def _steps(count: int) -> range:
    return range(1, count + 1)


def test_tables_are_a_fragment_of_their_own_if_the_rest_just_fills_the_others() -> None:
    specs = [spec("e", embedding=True), spec("a"), spec("f", embedding=True), spec("b")]
    assert FragmentManager(specs, 3, embeddings_apart=True).fragments == [["e", "f"], ["a"], ["b"]]


def test_else_they_are_dealt_with_the_rest() -> None:
    specs = [spec("e", embedding=True), spec("f", embedding=True), spec("a"), spec("b")]
    assert FragmentManager(specs, 4, embeddings_apart=True).fragments == [["e"], ["f"], ["a"], ["b"]]


def test_the_pseudo_gradients_of_one_fragment() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).bfloat16()
    manager = FragmentManager(model, 2)
    before = {name: param.detach().float().clone() for name, param in model.named_parameters()}
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.5)
    now = {name: param.detach().float() for name, param in model.named_parameters()}
    for fragment in range(2):
        found = manager.compute_fragment_pseudogradients(fragment, before, model, bf16_comm=False)
        assert list(found) == manager.fragments[fragment]
        assert all(torch.equal(delta, before[name] - now[name]) for name, delta in found.items()), "anchor − local"
        assert {delta.dtype for delta in found.values()} == {torch.float32}
    as_sent = manager.compute_fragment_pseudogradients(0, before, model)
    assert {delta.dtype for delta in as_sent.values()} == {torch.bfloat16}


@pytest.mark.parametrize("wrong", [-1, 2])
def test_the_pseudo_gradients_of_no_fragment_are_refused(wrong: int) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    with pytest.raises(ConfigError, match=f"fragment_id must be between 0 and 1, got {wrong}"):
        FragmentManager(model, 2).compute_fragment_pseudogradients(wrong, model.state_dict(), model)
    with pytest.raises(ConfigError, match=r"fragment 0 holds '0\.(weight|bias)', which is not in both model and"):
        FragmentManager(model, 2).compute_fragment_pseudogradients(0, {}, model)


def test_counted_fragments_count_parameters_and_buffers_stay_with_their_module() -> None:
    kinds = [("a.w", "parameter"), ("n.w", "parameter"), ("z.w", "parameter"), ("n.mean", "average"), ("x", "average")]
    specs = [ParameterSpec(name=n, shape=(2,), dtype="float32", role=role) for n, role in kinds]  # type: ignore[arg-type]
    assert FragmentManager(specs, 3, strategy="counted").fragments == [["a.w"], ["n.w", "n.mean"], ["z.w", "x"]]
    assert FragmentManager(specs, 2, strategy="counted").fragments == [["a.w", "n.w", "n.mean"], ["z.w", "x"]]
    with pytest.raises(ConfigError, match=r"number of trainable parameters \(3\), got 4"):
        FragmentManager(specs, 4, strategy="counted")


def test_fragments_that_others_have_named_stay_and_the_rest_is_counted_out() -> None:
    specs = [ParameterSpec(name=name, shape=(2,), dtype="float32") for name in "abcdefg"]
    assert FragmentManager(specs, 3, named=[["c", "a", "b"]]).fragments == [["c", "a", "b"], ["d", "e"], ["f", "g"]]
    buffer = ParameterSpec(name="mean", shape=(2,), dtype="float32", role="average")
    assert FragmentManager([*specs[:1], buffer], 1, named=[["a"]]).fragments == [["a"], ["mean"]]
    with pytest.raises(ConfigError, match="1 parameters are left for 2 more"):
        FragmentManager(specs[:3], 3, named=[["a", "b"]])
    assert FragmentManager(specs[:3], 2, named=[["c"], ["a", "b"]]).fragments == [["c"], ["a", "b"]]


def test_a_buffer_stays_with_its_own_module_in_a_tree_of_them() -> None:
    kinds = [("m.a.w", "parameter"), ("m.b.w", "parameter"), ("m.b.mean", "average")]
    specs = [ParameterSpec(name=n, shape=(2,), dtype="float32", role=role) for n, role in kinds]  # type: ignore[arg-type]
    assert FragmentManager(specs, 2, strategy="counted").fragments == [["m.a.w"], ["m.b.w", "m.b.mean"]]


def test_unless_they_are_counted_buffers_may_be_fragments() -> None:
    buffer = ParameterSpec(name="mean", shape=(10,), dtype="float32", role="average")
    assert FragmentManager([spec("w"), buffer], 2).fragments == [["w"], ["mean"]]
