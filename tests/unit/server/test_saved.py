"""Saved states: what is saved comes back bit for bit, and what could not be is refused."""

from __future__ import annotations

import stat
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from amounts import cases
from outerstep.errors import ConfigError, ModelError
from outerstep.model_folder import WEIGHTS, load_model, load_state_dict
from outerstep.server.saved import (
    OptimizerState,
    ServerState,
    load_state,
    save_state,
)
from outerstep.server.saved.folder import EXACT, TARGET
from outerstep.types import Manifest, ParameterSpec
from unit.server.saved_states import assert_same_state, make_state, names_in, plan_of, rewrite


class TestRoundTrip:
    def test_everything_comes_back_bit_for_bit_and_in_its_order(self, tmp_path: Path) -> None:
        state = make_state()
        place = save_state(state, tmp_path)
        assert place == tmp_path / "state-round-00000002"
        assert_same_state(load_state(place), state)
        assert_same_state(load_state(tmp_path), state)
        assert_same_state(load_state(tmp_path / "latest"), state)

    def test_tensors_that_share_memory_are_stored_once_and_share_it_again(self, tmp_path: Path) -> None:
        place = save_state(make_state(), tmp_path)
        assert "frozen.again" not in load_file(place / WEIGHTS)
        rest = load_state(place).rest
        assert rest["frozen"].data_ptr() == rest["frozen.again"].data_ptr()

    def test_a_run_that_nobody_joined_comes_back(self, tmp_path: Path) -> None:
        state = ServerState(run_id="r", params={}, rest={"w": torch.ones(3)})
        assert_same_state(load_state(save_state(state, tmp_path)), state)

    def test_views_into_one_frame_are_saved_as_they_look(self, tmp_path: Path) -> None:
        """As the server keeps a fragment."""
        frame = torch.arange(12.0)
        params = {"a": frame[:6].view(2, 3), "b": frame[6:], "overlap": frame[3:9]}
        state = ServerState(
            run_id="r", params=params, optimizer=OptimizerState("x", {"a": {"m": frame[:6], "n": frame[:6]}})
        )
        assert_same_state(load_state(save_state(state, tmp_path)), state)

    def test_a_model_in_bf16_is_saved_as_bf16_and_the_fp32_values_are_not_lost(self, tmp_path: Path) -> None:
        state = make_state(dtype="bfloat16")
        place = save_state(state, tmp_path)
        model = load_state_dict(place)
        assert all(torch.equal(model[name], state.params[name].to(torch.bfloat16)) for name in state.params)
        assert not torch.equal(model["h.0.weight"].float(), state.params["h.0.weight"]), "bf16 must have lost something"
        assert_same_state(load_state(place), state)

    def test_a_state_from_before_there_were_targets_has_none(self, tmp_path: Path) -> None:
        state = replace(make_state(), targets={})
        place = save_state(state, tmp_path)
        assert not (place / TARGET).exists()
        rewrite(place, lambda facts: facts.pop("targets"))
        assert_same_state(load_state(place), state)

    def test_a_target_must_be_of_a_trained_tensor_and_of_its_shape(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"a target for 'norm.mean', which is not trained"):
            save_state(replace(make_state(), targets={"norm.mean": torch.zeros(4)}), tmp_path)
        with pytest.raises(ModelError, match=r"target of 'h.0.scale' must be float32 \[\], got torch.float32 \[2\]"):
            save_state(replace(make_state(), targets={"h.0.scale": torch.zeros(2)}), tmp_path)

    def test_what_is_fp32_is_not_stored_twice(self, tmp_path: Path) -> None:
        assert not (save_state(make_state(), tmp_path) / EXACT).exists()

    def test_an_exchanged_counter_is_whole_in_the_model_and_exact_in_the_state(self, tmp_path: Path) -> None:
        params = {"count": torch.tensor(6.9999995)}
        spec = ParameterSpec(name="count", shape=(), dtype="int64")
        state = ServerState(
            run_id="r", params=params, manifest=Manifest(parameters=(spec,)), plan=plan_of(("count",)), versions=(1,)
        )
        place = save_state(state, tmp_path)
        assert torch.equal(load_state_dict(place)["count"], torch.tensor(7))
        assert_same_state(load_state(place), state)

    def test_a_dtype_that_safetensors_does_not_have_is_saved_as_fp32(self, tmp_path: Path) -> None:
        place = save_state(make_state(dtype="float3_of_tomorrow"), tmp_path)
        assert load_state_dict(place)["h.0.weight"].dtype == torch.float32
        assert_same_state(load_state(place), make_state(dtype="float3_of_tomorrow"))

    def test_the_model_part_loads_into_a_model_that_ties_its_weights(self, tmp_path: Path) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed = nn.Embedding(5, 4)
                self.head = nn.Linear(4, 5, bias=False)
                self.head.weight = self.embed.weight
                self.register_buffer("seen", torch.tensor(3))

        weight = torch.randn(5, 4)
        spec = ParameterSpec(name="embed.weight", shape=(5, 4), dtype="float32")
        manifest = Manifest(parameters=(spec,), aliases={"head.weight": "embed.weight"}, buffers=("seen",))
        place = save_state(
            ServerState(
                run_id="r",
                params={"embed.weight": weight},
                rest={"seen": torch.tensor(9)},
                manifest=manifest,
                plan=plan_of(("embed.weight",)),
                versions=(1,),
            ),
            tmp_path,
        )
        model = Model()
        load_model(model, place)
        assert torch.equal(model.head.weight, weight)
        assert model.seen == 9
        with safe_open(place / WEIGHTS, framework="pt") as file:
            assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}

    def test_folder_and_files_are_their_owners_alone(self, tmp_path: Path) -> None:
        place = save_state(make_state(), tmp_path / "saves")
        assert {stat.S_IMODE(folder.stat().st_mode) for folder in (place, place.parent)} == {0o700}
        assert {stat.S_IMODE(file.stat().st_mode) for file in place.iterdir()} == {0o600}


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30).filter("__metadata__".__ne__)
ODD = st.sampled_from(["format", "a b", "a\x1fb", "0 a", "ä/../é", "'\"\\", "a\0", "\n", "None", "0"])
SHAPES = st.sampled_from([(), (0,), (1,), (3,), (2, 0), (2, 3), (1, 1, 2)])
KEPT = st.sampled_from(["float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "complex64", "?"])
ANY_DTYPE = st.sampled_from(
    [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool, torch.uint8]
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text('aé\n"', max_size=5)
)


@st.composite
def tensors(draw: st.DrawFn, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Any bits: NaNs with a payload, infinities, subnormal numbers."""
    if dtype is torch.bool:
        return torch.tensor(draw(st.integers(0, 1)) == 1).expand(shape).clone()
    template = torch.zeros(shape, dtype=dtype)
    size = template.numel() * template.element_size()
    data = bytearray(draw(st.binary(min_size=size, max_size=size)))
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if size else template


@st.composite
def states(draw: st.DrawFn) -> ServerState:
    names = draw(st.lists(NAMES | ODD, unique=True, min_size=1, max_size=8))
    cut = draw(st.integers(1, len(names)))
    trained, others = names[:cut], names[cut:]
    params = {name: draw(tensors(torch.float32, draw(SHAPES))) for name in trained}
    specs = tuple(ParameterSpec(name=n, shape=tuple(t.shape), dtype=draw(KEPT)) for n, t in params.items())
    aliases = {others.pop(): trained[0]} if others and draw(st.booleans()) else {}
    middle = draw(st.integers(0, len(trained)))
    return ServerState(
        run_id="r",
        params=params,
        rest={name: draw(tensors(draw(ANY_DTYPE), draw(SHAPES))) for name in others},
        manifest=Manifest(parameters=specs, aliases=aliases),
        plan=plan_of(tuple(trained[:middle]), tuple(trained[middle:])),
        versions=(draw(st.integers(0, 2**53)), 1),
        optimizer=OptimizerState(
            draw(NAMES),
            {
                name: {
                    **{
                        key: draw(tensors(draw(ANY_DTYPE), draw(SHAPES)))
                        for key in draw(st.sets(NAMES | ODD, max_size=2))
                    },
                    "number": draw(SCALARS),
                }
                for name in draw(st.sets(st.sampled_from(trained)))
            },
            draw(st.dictionaries(NAMES, SCALARS | st.lists(SCALARS, max_size=2), max_size=2)),
        ),
        totals=draw(st.dictionaries(NAMES, st.integers(-5, 2**60) | st.floats(-1e300, 1e300), max_size=2)),
    )


@cases(150)
@given(states())
def test_any_state_comes_back_bit_for_bit(state: ServerState) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert_same_state(load_state(save_state(state, folder)), state)


class TestRefusedToSave:
    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"totals": {"loss": float("nan")}}, r"does not fit into JSON: .*totals.* numbers must be finite"),
            ({"totals": {"loss": float("inf")}}, r"does not fit into JSON: .*totals.* numbers must be finite"),
            ({"facts": {"pair": (1, 2)}}, "does not fit into JSON: facts would come back changed"),
            ({"facts": {1: "one"}}, "does not fit into JSON: facts would come back changed"),
            ({"facts": {"a": object()}}, "does not fit into JSON: .*object"),
            ({"facts": {"a": "\ud800"}}, "does not fit into JSON"),
            ({"run_id": "../elsewhere"}, "does not fit into JSON: .*run_id"),
            ({"params": {}}, r"different names: \['embed.weight'"),
            ({"rest": {"embed.weight": torch.ones(1)}}, "'embed.weight' is both trained and not"),
            ({"rest": {"head.weight": torch.ones(1)}}, "'head.weight' is both trained and not"),
            ({"rest": {"__metadata__": torch.ones(1)}}, "cannot be written as safetensors"),
            ({"rest": {"z": torch.ones(1, dtype=torch.complex128)}}, "cannot be written as safetensors"),
            ({"versions": (3,)}, "2 fragments but 1 versions"),
            ({"plan": None}, "manifest and plan are fixed together"),
            ({"plan": plan_of(("embed.weight",), ("h.0.weight",))}, "fragments are not the manifest's parameters"),
            ({"versions": (2, 2)}, "'left' has a contribution to version 3 of fragment 0, which is at 2"),
            ({"optimizer": OptimizerState("x", {"gone": {}})}, r"\['gone'\], which are not trained"),
            (
                {"optimizer": OptimizerState("x", {"embed.weight": {"s": float("nan")}})},
                "JSON: optimizer would come back changed",
            ),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
    )
    def test_what_could_not_be_loaded_again_is_refused_and_leaves_nothing(
        self, tmp_path: Path, changes: dict[str, Any], reason: str
    ) -> None:
        save_state(make_state(1), tmp_path)
        before = names_in(tmp_path)
        with pytest.raises(ModelError, match=reason):
            save_state(replace(make_state(), **changes), tmp_path)
        assert names_in(tmp_path) == before
        assert_same_state(load_state(tmp_path), make_state(1))

    def test_params_must_be_fp32_and_have_the_manifests_shape(self, tmp_path: Path) -> None:
        state = make_state()
        for wrong, reason in (
            (torch.ones(4, 4, dtype=torch.bfloat16), "'h.0.weight' must be float32, got torch.bfloat16"),
            (torch.ones(2, 8), r"'h.0.weight': got \[2, 8\], the manifest has \[4, 4\]"),
        ):
            with pytest.raises(ModelError, match=reason):
                save_state(replace(state, params={**state.params, "h.0.weight": wrong}), tmp_path)

    def test_at_least_one_state_is_kept(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="keep must be ≥ 1, got 0"):
            save_state(make_state(), tmp_path, keep=0)
