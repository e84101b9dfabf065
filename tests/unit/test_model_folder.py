"""A model on disk: what is written comes back, and whatever else is found there is refused by name."""

import pickle
import stat
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from outerstep.errors import ModelError
from outerstep.model_folder import (
    INDEX,
    WEIGHTS,
    load_model,
    load_state_dict,
    save_model,
    save_state_dict,
)
from unit.models_on_disk import Tied, Trap, linear, same, write_index


class TestRoundTrip:
    def test_a_model_with_tied_weights_comes_back_whole_and_still_tied(self, tmp_path: Path) -> None:
        saved, loaded = Tied(1), Tied(2)
        assert not same(saved, loaded)
        assert save_model(saved, tmp_path) == tmp_path / WEIGHTS
        load_model(loaded, tmp_path)
        assert same(saved, loaded)
        assert loaded.head.weight is loaded.embed.weight

    def test_tied_tensors_are_written_once_under_their_first_name(self, tmp_path: Path) -> None:
        save_model(Tied(1), tmp_path)
        names = load_file(tmp_path / WEIGHTS).keys()
        assert "embed.weight" in names
        assert "head.weight" not in names

    def test_a_folder_that_kept_the_other_name_of_a_tie_loads_as_well(self, tmp_path: Path) -> None:
        saved, loaded = Tied(1), Tied(2)
        state = dict(saved.state_dict())
        del state["embed.weight"]
        save_file(state, tmp_path / WEIGHTS)
        load_model(loaded, tmp_path)
        assert same(saved, loaded)

    def test_tensors_keep_their_dtypes_and_shapes_on_disk(self, tmp_path: Path) -> None:
        state = {"a": torch.ones(2, 3, dtype=torch.bfloat16), "b": torch.tensor(5), "c": torch.zeros(0, 4)}
        save_state_dict(state, tmp_path)
        found = load_state_dict(tmp_path)
        assert {n: (t.dtype, t.shape) for n, t in found.items()} == {n: (t.dtype, t.shape) for n, t in state.items()}

    def test_equal_values_in_different_memory_are_not_taken_for_ties(self, tmp_path: Path) -> None:
        save_state_dict({"a": torch.ones(3), "b": torch.ones(3), "c": torch.zeros(0), "d": torch.zeros(0)}, tmp_path)
        assert load_state_dict(tmp_path).keys() == {"a", "b", "c", "d"}

    def test_a_tensor_that_is_not_contiguous_comes_back_as_it_looked(self, tmp_path: Path) -> None:
        matrix = torch.arange(6.0).reshape(2, 3)
        save_state_dict({"w": matrix, "w_t": matrix.t()}, tmp_path)
        assert torch.equal(load_state_dict(tmp_path)["w_t"], matrix.t())

    def test_views_that_overlap_are_saved_each_as_it_looks(self, tmp_path: Path) -> None:
        whole = torch.arange(10.0)
        state = {
            "front": whole[:6],
            "back": whole[4:],
            "all": whole,
            "even": whole[::2],
            "table": whole[:6].view(2, 3),
            "repeated": whole[3:4].expand(4),
        }
        save_state_dict(state, tmp_path)
        found = load_state_dict(tmp_path)
        assert found.keys() == state.keys()
        assert all(torch.equal(found[name], state[name]) for name in state)

    def test_a_model_whose_parameters_are_views_of_one_buffer_comes_back(self, tmp_path: Path) -> None:
        """As a flattened model has them."""

        def flattened(start: float) -> nn.Module:
            model, flat = linear(), torch.arange(start, start + 8)
            model[0].weight.data, model[0].bias.data = flat[:6].view(2, 3), flat[6:]
            return model

        saved, loaded = flattened(0.0), flattened(100.0)
        save_model(saved, tmp_path)
        load_model(loaded, tmp_path)
        assert same(saved, loaded)

    def test_a_slice_is_saved_without_the_rest_of_its_memory(self, tmp_path: Path) -> None:
        file = save_state_dict({"w": torch.zeros(1 << 20)[:4]}, tmp_path)
        assert file.stat().st_size < 1000

    def test_folders_are_made_and_old_weights_replaced_without_leftovers(self, tmp_path: Path) -> None:
        place = tmp_path / "a" / "b"
        save_model(linear(), place)
        second = linear()
        save_model(second, str(place))
        loaded = linear()
        load_model(loaded, str(place))
        assert same(second, loaded)
        assert [file.name for file in place.iterdir()] == [WEIGHTS]

    def test_one_file_can_be_named_instead_of_its_folder(self, tmp_path: Path) -> None:
        model = linear()
        file = save_model(model, tmp_path)
        assert torch.equal(load_state_dict(file)["0.weight"], model.state_dict()["0.weight"])

    def test_the_parameters_are_filled_in_place(self, tmp_path: Path) -> None:
        save_model(linear(), tmp_path)
        model = linear()
        before = [p.data_ptr() for p in model.parameters()]
        load_model(model, tmp_path)
        assert [p.data_ptr() for p in model.parameters()] == before
        assert all(p.requires_grad for p in model.parameters())

    def test_the_file_is_readable_for_whom_new_files_are(self, tmp_path: Path) -> None:
        (tmp_path / "plain").touch()
        file = save_model(linear(), tmp_path)
        assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)

    def test_a_tie_named_like_the_formats_own_entry_does_not_hide_it(self, tmp_path: Path) -> None:
        weight = torch.ones(2)
        save_state_dict({"w": weight, "format": weight}, tmp_path)
        with safe_open(tmp_path / WEIGHTS, framework="pt") as file:
            assert file.metadata()["format"] == "pt"

    def test_one_memory_seen_as_two_dtypes_is_no_tie(self, tmp_path: Path) -> None:
        whole = torch.arange(4, dtype=torch.int32)
        save_state_dict({"i": whole, "f": whole.view(torch.float32)}, tmp_path)
        found = load_state_dict(tmp_path)
        assert torch.equal(found["i"], whole)
        assert torch.equal(found["f"], whole.view(torch.float32))

    def test_the_one_name_that_safetensors_cannot_hold_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="'__metadata__' cannot be written"):
            save_state_dict({"__metadata__": torch.ones(1)}, tmp_path)
        assert list(tmp_path.iterdir()) == []


class TestRefused:
    @pytest.mark.row("B19")
    def test_a_missing_folder_is_named_with_the_remedy(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"no model at .*/nowhere: .*save_model writes one"):
            load_state_dict(tmp_path / "nowhere")

    def test_a_file_that_is_no_model_folder_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "model.bin").write_bytes(b"x")
        with pytest.raises(ModelError, match=r"no model at .*/model\.bin"):
            load_state_dict(tmp_path / "model.bin")

    def test_an_empty_folder_is_named_with_what_it_lacks(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=rf"has neither {WEIGHTS} nor {INDEX}"):
            load_state_dict(tmp_path)

    @pytest.mark.parametrize("keep", [0, 4, 8, 60, -1], ids=lambda keep: f"first {keep} bytes")
    def test_a_truncated_file_is_refused_by_name(self, tmp_path: Path, keep: int) -> None:
        file = save_model(linear(), tmp_path)
        file.write_bytes(file.read_bytes()[:keep])
        with pytest.raises(ModelError, match=r"model\.safetensors cannot be read as safetensors"):
            load_state_dict(tmp_path)

    @pytest.mark.parametrize("sharded", [False, True])
    def test_a_pickle_in_place_of_the_weights_is_refused_and_not_run(self, tmp_path: Path, sharded: bool) -> None:
        name = "one.safetensors" if sharded else WEIGHTS
        (tmp_path / name).write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
        if sharded:
            write_index(tmp_path, {"weight_map": {"w": name}})
        with pytest.raises(ModelError, match=f"{name} cannot be read as safetensors"):
            load_state_dict(tmp_path)
        assert not (tmp_path / "sprung").exists()

    def test_another_model_is_refused_naming_what_is_missing_and_what_is_unknown(self, tmp_path: Path) -> None:
        save_model(linear(), tmp_path)
        model = nn.Sequential(nn.Identity(), nn.Linear(3, 2))
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(
            ModelError, match=r"holds another model: missing \['1.weight', '1.bias'\], unknown \['0\."
        ) as e:
            load_model(model, tmp_path)
        assert str(tmp_path) in str(e.value)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())

    def test_a_tensor_of_another_shape_is_refused_showing_both(self, tmp_path: Path) -> None:
        save_state_dict({"weight": torch.zeros(4, 3)}, tmp_path)
        with pytest.raises(ModelError, match=r"'weight': the folder has \[4, 3\], the model \[3, 4\]"):
            load_model(nn.Linear(4, 3, bias=False), tmp_path)

    @pytest.mark.parametrize("wrong", ["0.weight", "0.bias", "1.weight", "1.bias"])
    def test_one_wrong_shape_leaves_the_whole_model_untouched(self, tmp_path: Path, wrong: str) -> None:
        def model() -> nn.Module:
            return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))

        state = dict(model().state_dict())
        state[wrong] = torch.zeros(5)
        save_state_dict(state, tmp_path)
        target = model()
        before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
        with pytest.raises(ModelError, match=rf"'{wrong}': the folder has \[5\], the model \["):
            load_model(target, tmp_path)
        assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())

    def test_a_scalar_does_not_spread_over_a_whole_tensor(self, tmp_path: Path) -> None:
        save_state_dict({"weight": torch.tensor(1.0)}, tmp_path)
        with pytest.raises(ModelError, match=r"'weight': the folder has \[\], the model \[3, 4\]"):
            load_model(nn.Linear(4, 3, bias=False), tmp_path)

    def test_a_model_without_memory_is_refused_with_the_remedy(self, tmp_path: Path) -> None:
        """Copying into it would be no error, and nothing would be loaded."""
        save_model(linear(), tmp_path)
        model = linear().to("meta")
        with pytest.raises(ModelError, match=r"'0\.\w+' is on the meta device: .*\(to_empty\)"):
            load_model(model, tmp_path)
        load_model(model.to_empty(device="cpu"), tmp_path)
        assert torch.equal(model.state_dict()["0.weight"], load_state_dict(tmp_path)["0.weight"])

    def test_a_model_of_which_one_part_has_no_memory_is_left_untouched(self, tmp_path: Path) -> None:
        def model(device: str) -> nn.Module:
            return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, device=device))

        save_model(model("cpu"), tmp_path)
        target = model("meta")
        before = target[0].weight.detach().clone()
        with pytest.raises(ModelError, match=r"'1\.\w+' is on the meta device"):
            load_model(target, tmp_path)
        assert torch.equal(target[0].weight, before)
