"""Saved states: what is saved comes back bit for bit, the newest whole one is found, and nothing else is touched."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import stat
import struct
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from amounts import cases
from outerstep.digest import data_hash
from outerstep.errors import ConfigError, ModelError
from outerstep.model_folder import STATE, WEIGHTS, load_checkpoint, load_model, load_state_dict
from outerstep.server.saved import (
    OptimizerState,
    SavedState,
    load_state,
    save_state,
)
from outerstep.server.saved.folder import EXACT, OUTER, TARGET, read_facts
from outerstep.types import Manifest, ParameterSpec
from unit.server.saved_states import assert_same_state, make_state, plan_of


def names_in(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def rewrite(place: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what state.json says, with a hash that fits: somebody who knows the format."""
    envelope = json.loads((place / STATE).read_bytes())
    change(envelope["state"])
    raw = msgspec.json.encode(envelope["state"])
    envelope["state"], envelope["hash"] = msgspec.Raw(raw), data_hash([raw])
    (place / STATE).write_bytes(msgspec.json.encode(envelope))


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
        state = SavedState(run_id="r", params={}, rest={"w": torch.ones(3)})
        assert_same_state(load_state(save_state(state, tmp_path)), state)

    def test_views_into_one_frame_are_saved_as_they_look(self, tmp_path: Path) -> None:
        """As the server keeps a fragment."""
        frame = torch.arange(12.0)
        params = {"a": frame[:6].view(2, 3), "b": frame[6:], "overlap": frame[3:9]}
        state = SavedState(
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
        state = SavedState(
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
            SavedState(
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

    def test_files_are_readable_for_whom_new_files_are(self, tmp_path: Path) -> None:
        (tmp_path / "plain").touch()
        place = save_state(make_state(), tmp_path / "saves")
        assert {stat.S_IMODE(file.stat().st_mode) for file in place.iterdir()} == {
            stat.S_IMODE((tmp_path / "plain").stat().st_mode)
        }


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
def states(draw: st.DrawFn) -> SavedState:
    names = draw(st.lists(NAMES | ODD, unique=True, min_size=1, max_size=8))
    cut = draw(st.integers(1, len(names)))
    trained, others = names[:cut], names[cut:]
    params = {name: draw(tensors(torch.float32, draw(SHAPES))) for name in trained}
    specs = tuple(ParameterSpec(name=n, shape=tuple(t.shape), dtype=draw(KEPT)) for n, t in params.items())
    aliases = {others.pop(): trained[0]} if others and draw(st.booleans()) else {}
    middle = draw(st.integers(0, len(trained)))
    return SavedState(
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
def test_any_state_comes_back_bit_for_bit(state: SavedState) -> None:
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


class TestFolderOfStates:
    def test_the_newest_are_kept_and_the_older_deleted(self, tmp_path: Path) -> None:
        for round_ in range(1, 6):
            save_state(make_state(round_, versions=(round_, round_)), tmp_path, keep=2)
        assert names_in(tmp_path) == {"state-round-00000004", "state-round-00000005", "latest"}
        assert os.readlink(tmp_path / "latest") == "state-round-00000005"
        assert_same_state(load_state(tmp_path), make_state(5, versions=(5, 5)))

    def test_a_second_state_of_a_round_gets_a_name_of_its_own_and_is_the_newer(self, tmp_path: Path) -> None:
        save_state(make_state(1), tmp_path)
        assert save_state(make_state(2), tmp_path).name == "state-round-00000002-1"
        assert save_state(make_state(3), tmp_path).name == "state-round-00000002-2"
        assert_same_state(load_state(tmp_path), make_state(3))

    def test_after_going_back_the_new_states_are_newer_than_those_given_up(self, tmp_path: Path) -> None:
        for round_ in (7, 8, 9):
            save_state(make_state(round_, versions=(round_, round_)), tmp_path)
        save_state(make_state(70, versions=(7, 7)), tmp_path)
        assert_same_state(load_state(tmp_path), make_state(70, versions=(7, 7)))
        save_state(make_state(80, versions=(8, 8)), tmp_path, keep=2)
        assert names_in(tmp_path) == {"state-round-00000007-1", "state-round-00000008-1", "latest"}

    def test_a_clock_that_went_back_makes_no_difference(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        save_state(make_state(1), tmp_path)
        monkeypatch.setattr(time, "time_ns", lambda: 1_000_000_000)
        save_state(make_state(2, versions=(3, 1)), tmp_path)
        assert_same_state(load_state(tmp_path), make_state(2, versions=(3, 1)))
        save_state(make_state(3, versions=(3, 1)), tmp_path, keep=1)
        assert names_in(tmp_path) == {"state-round-00000001-1", "latest"}

    def test_what_is_not_ours_is_left_alone(self, tmp_path: Path) -> None:
        other_run = save_state(make_state(run_id="other"), tmp_path)
        elsewhere = save_state(make_state(9), tmp_path / "elsewhere")
        (tmp_path / "state-round-00000000").mkdir()  # ours by name alone
        (tmp_path / "state-round-1").mkdir()
        (tmp_path / ".state-round-00000001.saving-notes").mkdir()
        (tmp_path / "notes.txt").write_text("mine")
        (tmp_path / "state-round-00000001").symlink_to(elsewhere)
        (tmp_path / ".state-round-00000005.saving").symlink_to(elsewhere)
        before = names_in(tmp_path)
        for round_ in (10, 11, 12):
            save_state(make_state(versions=(round_, round_)), tmp_path, keep=1)
        assert names_in(tmp_path) == before | {"state-round-00000012", "latest"}
        assert_same_state(load_state(other_run), make_state(run_id="other"))
        assert_same_state(load_state(elsewhere), make_state(9))

    def test_a_folder_called_latest_is_not_replaced(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        (tmp_path / "latest").mkdir()
        (tmp_path / "latest" / "thesis").touch()
        save_state(make_state(), tmp_path)
        assert (tmp_path / "latest" / "thesis").exists()
        assert "latest is not a link of ours" in caplog.text
        assert_same_state(load_state(tmp_path), make_state())

    def test_a_damaged_state_neither_counts_nor_is_deleted(self, tmp_path: Path) -> None:
        good = save_state(make_state(1, versions=(3, 1)), tmp_path)
        bad = save_state(make_state(2, versions=(3, 2)), tmp_path)
        (bad / OUTER).unlink()
        save_state(make_state(3, versions=(3, 3)), tmp_path, keep=2)
        assert good.is_dir()
        assert bad.is_dir()

    def test_what_a_save_that_was_cut_off_left_is_removed(self, tmp_path: Path) -> None:
        for name in (".state-round-00000001.saving", ".state-round-00000001-2.deleting"):
            (tmp_path / name).mkdir(parents=True)
            (tmp_path / name / "half").touch()
        save_state(make_state(), tmp_path)
        assert names_in(tmp_path) == {"state-round-00000002", "latest"}

    def test_a_second_save_at_the_same_time_is_refused(self, tmp_path: Path) -> None:
        descriptor = os.open(tmp_path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            with pytest.raises(ModelError, match=r"another save into .* is under way"):
                save_state(make_state(), tmp_path)
        finally:
            os.close(descriptor)
        save_state(make_state(), tmp_path)

    def test_the_documented_file_name_finds_the_states_beside_it(self, tmp_path: Path) -> None:
        save_state(make_state(), tmp_path)
        assert_same_state(load_state(tmp_path / "diloco_server_state_latest.pt"), make_state())
        with pytest.raises(ModelError, match=r"no saved state at .*other\.pt"):
            load_state(tmp_path / "other.pt")

    @pytest.mark.parametrize("name", ["", "nowhere", "nowhere/diloco_server_state_latest.pt"])
    def test_where_there_is_no_state_the_error_says_what_there_should_be(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(ModelError, match="no saved state"):
            load_state(tmp_path / name)


def damage_truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def damage_flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def damage_empty(file: Path) -> None:
    file.write_bytes(b"")


def damage_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


class TestDamage:
    @pytest.mark.row("F12")
    @pytest.mark.parametrize("damage", [damage_truncate, damage_flip, damage_empty, damage_fifo, Path.unlink])
    @pytest.mark.parametrize("name", [WEIGHTS, EXACT, TARGET, OUTER, STATE, "config.json"])
    def test_the_previous_state_is_used_and_the_damaged_one_named(
        self, tmp_path: Path, name: str, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
    ) -> None:
        model, saves = tmp_path / "model", tmp_path / "saves"
        model.mkdir()
        (model / "config.json").write_text("{}")
        save_state(make_state(1, dtype="bfloat16"), saves, model_files=model)
        newest = save_state(make_state(2, versions=(4, 4), dtype="bfloat16"), saves, model_files=model)
        damage(newest / name)
        with caplog.at_level(logging.WARNING):
            assert_same_state(load_state(saves), make_state(1, dtype="bfloat16"))
        assert "saved state state-round-00000004 is skipped" in caplog.text
        assert str(newest / name) in caplog.text
        with pytest.raises(ModelError, match="saved state"):
            load_state(newest)

    def test_no_byte_of_the_json_can_change_unnoticed(self, tmp_path: Path) -> None:
        place = save_state(make_state(), tmp_path)
        facts, data = read_facts(place), (place / STATE).read_bytes()
        refused = 0
        for i in range(len(data)):
            (place / STATE).write_bytes(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :])
            try:
                assert read_facts(place) == facts, i
            except ModelError:
                refused += 1
        assert refused == len(data)

    @pytest.mark.row("F12")
    def test_if_no_state_is_whole_each_is_named(self, tmp_path: Path) -> None:
        for round_ in (1, 2):
            damage_flip(save_state(make_state(versions=(3, round_)), tmp_path) / WEIGHTS)
        (tmp_path / "state-round-00000003").mkdir()
        with pytest.raises(ModelError, match=r"no state in .* can be used") as refusal:
            load_state(tmp_path)
        for round_ in (1, 2, 3):
            assert f"state-round-0000000{round_}" in str(refusal.value)

    @pytest.mark.row("B19")
    def test_another_runs_state_does_not_step_in(self, tmp_path: Path) -> None:
        save_state(make_state(run_id="other"), tmp_path)
        damage_flip(save_state(make_state(), tmp_path) / WEIGHTS)
        with pytest.raises(ModelError, match="it is of run other, the newest of run run-1"):
            load_state(tmp_path)

    @pytest.mark.row("B19")
    @pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "..", "", "sub/x", "a\0b"])
    def test_a_list_that_points_outside_its_folder_is_refused(self, tmp_path: Path, name: str) -> None:
        place = save_state(make_state(), tmp_path)
        (tmp_path / "secret").write_bytes(b"")
        entry = {"size_bytes": 0, "hash": data_hash([])}
        rewrite(place, lambda state: state["files"].update({name: entry}))
        with pytest.raises(ModelError, match="points outside its folder"):
            load_state(place)

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda s: s["params"].append("more"), "names tensor 'more', which is in none of its files"),
            (lambda s: s["params"].pop(), "have different names"),
            (lambda s: s["manifest"]["parameters"][0].update(shape=[4, 5]), r"got \[5, 4\], the manifest has \[4, 5\]"),
            (lambda s: s["manifest"]["parameters"][0].update(dtype="float16"), "float32, the manifest torch.float16"),
            (lambda s: s["versions"].append(1), "2 fragments but 3 versions"),
            (lambda s: s["versions"].__setitem__(0, 1), "it is not in the model"),
            (lambda s: s["versions"].__setitem__(0, -1), r"Expected `int` >= 0 - at `\$\.versions\[0\]`"),
            (lambda s: s.update(surprise=1), "unknown field `surprise`"),
            (lambda s: s["files"].pop(OUTER), "which is in none of its files"),
            (lambda s: s["ledger"].update({"../x": s["ledger"]["left"]}), "ledger"),
        ],
    )
    def test_what_contradicts_itself_is_refused(
        self, tmp_path: Path, change: Callable[[dict[str, Any]], object], reason: str
    ) -> None:
        place = save_state(make_state(), tmp_path)
        rewrite(place, change)
        with pytest.raises(ModelError, match=reason) as refusal:
            load_state(place)
        assert place.name in str(refusal.value)

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            (b'{"format":"outerstep-state","version":2,"hash":"%s","state":{}}' % (b"0" * 32), "format version 2"),
            (b'{"format":"another","version":1,"hash":"%s","state":{}}' % (b"0" * 32), "'another'"),
            (b'{"format":"outerstep-state","version":1,"hash":"x","state":' + b"[" * 100_000, "cannot be read"),
            (b"[]", "cannot be read"),
            (b"\x80\x04pickle", "cannot be read"),
        ],
    )
    def test_other_formats_are_refused(self, tmp_path: Path, text: bytes, reason: str) -> None:
        (tmp_path / STATE).write_bytes(text)
        with pytest.raises(ModelError, match=reason):
            load_state(tmp_path)

    def test_a_hostile_safetensors_header_is_refused(self, tmp_path: Path) -> None:
        place = save_state(make_state(), tmp_path)
        data = struct.pack("<Q", 1 << 60) + b"{}"
        (place / WEIGHTS).write_bytes(data)
        rewrite(place, lambda s: s["files"].update({WEIGHTS: {"size_bytes": len(data), "hash": data_hash([data])}}))
        with pytest.raises(ModelError, match="cannot be read as safetensors"):
            load_state(place)


class TestFilesBesideTheModel:
    def test_settings_and_tokenizer_go_along_but_no_code_and_no_weights(self, tmp_path: Path) -> None:
        model, saves = tmp_path / "model", tmp_path / "saves"
        (model / "sub.json").mkdir(parents=True)
        wanted = {"config.json", "generation_config.json", "merges.txt", "spiece.model", "chat_template.jinja"}
        for name in (*wanted, "modeling.py", "model.safetensors.index.json", "pytorch_model.bin", STATE, ".git.txt"):
            (model / name).write_text(name)
        (model / WEIGHTS).write_text("old weights")
        with open(model / "huge.json", "wb") as file:
            file.truncate((64 << 20) + 1)
        os.mkfifo(model / "pipe.json")
        place = save_state(make_state(), saves, model_files=model)
        assert names_in(place) == wanted | {WEIGHTS, TARGET, OUTER, STATE}
        assert (place / "config.json").read_text() == "config.json"
        assert_same_state(load_state(place), make_state())

    def test_links_to_elsewhere_are_not_followed(self, tmp_path: Path) -> None:
        model = tmp_path / "model"
        model.mkdir()
        (tmp_path / "secret").write_text("key")
        (model / "config.json").symlink_to(tmp_path / "secret")
        (model / "real.txt").write_text("x")
        (model / "vocab.txt").symlink_to("real.txt")
        (model / "gone.txt").symlink_to("nothing")
        place = save_state(make_state(), tmp_path / "saves", model_files=model)
        assert names_in(place) == {WEIGHTS, TARGET, OUTER, STATE, "real.txt", "vocab.txt"}

    def test_links_of_a_hugging_face_cache_are_followed(self, tmp_path: Path) -> None:
        snapshot, blobs = tmp_path / "models--x" / "snapshots" / "abc", tmp_path / "models--x" / "blobs"
        snapshot.mkdir(parents=True)
        blobs.mkdir()
        (blobs / "1234").write_text("{}")
        (snapshot / "config.json").symlink_to("../../blobs/1234")
        (snapshot / "other.json").symlink_to("/etc/hostname")
        place = save_state(make_state(), tmp_path / "saves", model_files=snapshot)
        assert (place / "config.json").read_text() == "{}"
        assert not (place / "other.json").exists()

    def test_a_model_folder_that_is_gone_does_not_cost_the_state(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        save_state(make_state(), tmp_path / "saves", model_files=tmp_path / "gone")
        assert "the files beside the model are not saved" in caplog.text
        assert_same_state(load_state(tmp_path / "saves"), make_state())

    def test_a_saved_state_can_be_the_model_of_the_next_run(self, tmp_path: Path) -> None:
        model = tmp_path / "model"
        model.mkdir()
        (model / "config.json").write_text("{}")
        first = save_state(make_state(1), tmp_path / "a", model_files=model)
        second = save_state(make_state(2), tmp_path / "b", model_files=first)
        assert (second / "config.json").read_text() == "{}"
        assert_same_state(load_state(second), make_state(2))


class TestAsACheckpoint:
    def test_the_model_of_a_saved_state_is_a_checkpoint(self, tmp_path: Path) -> None:
        save_state(make_state(1, versions=(3, 1)), tmp_path)
        place = save_state(make_state(2), tmp_path)
        for path in (tmp_path, place):
            state, found = load_checkpoint(path)
            assert found == place
            assert torch.equal(state["h.0.weight"], make_state(2).params["h.0.weight"])

    @pytest.mark.parametrize("name", [WEIGHTS, STATE])
    def test_a_damaged_one_is_passed_over(self, tmp_path: Path, name: str) -> None:
        save_state(make_state(1, versions=(3, 1)), tmp_path)
        damage_truncate(save_state(make_state(2), tmp_path) / name)
        state, found = load_checkpoint(tmp_path)
        assert found.name == "state-round-00000001"
        assert torch.equal(state["h.0.weight"], make_state(1).params["h.0.weight"])

    def test_flipped_weights_are_noticed(self, tmp_path: Path) -> None:
        place = save_state(make_state(), tmp_path)
        data = bytearray((place / WEIGHTS).read_bytes())
        data[-1] ^= 1
        (place / WEIGHTS).write_bytes(data)
        with pytest.raises(ModelError, match=r"is damaged: its hash is not the one in state\.json"):
            load_checkpoint(place)
