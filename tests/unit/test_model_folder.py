"""A model on disk: what is written comes back, and whatever else is found there is refused by name."""

import json
import logging
import pickle
import stat
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from outerstep.errors import ModelError
from outerstep.model_folder import (
    BIN_INDEX,
    BIN_WEIGHTS,
    INDEX,
    STATE,
    WEIGHTS,
    load_checkpoint,
    load_model,
    load_state_dict,
    save_model,
    save_state_dict,
)


class Tied(nn.Module):
    """Tied weights, a buffer, a scalar and a bf16 parameter."""

    def __init__(self, seed: int, vocabulary: int = 7) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = nn.Embedding(vocabulary, 4)
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.tensor(0.0))
        self.small = nn.Parameter(torch.zeros(3, 2).to(torch.bfloat16))
        self.head = nn.Linear(4, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        with torch.no_grad():
            for tensor in [*self.parameters(), *self.buffers()]:
                if tensor.is_floating_point():
                    tensor.copy_(torch.randn(tensor.shape, generator=generator))
                else:
                    tensor.fill_(seed)


def same(a: nn.Module, b: nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def linear(rows: int = 2) -> nn.Module:
    return nn.Sequential(nn.Linear(3, rows))


def shard(folder: Path, *parts: dict[str, Tensor]) -> None:
    """The Hugging Face layout: several files and an index of which tensor is where."""
    weight_map: dict[str, str] = {}
    for i, part in enumerate(parts):
        name = f"model-{i + 1:05}-of-{len(parts):05}.safetensors"
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    write_index(folder, {"metadata": {"total_size": 1}, "weight_map": weight_map})


def write_index(folder: Path, index: object) -> None:
    (folder / INDEX).write_text(json.dumps(index))


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


class TestShards:
    def test_a_sharded_folder_loads_like_a_single_file(self, tmp_path: Path) -> None:
        saved, loaded = linear(), linear()
        state = saved.state_dict()
        shard(tmp_path, {"0.weight": state["0.weight"]}, {"0.bias": state["0.bias"]})
        load_model(loaded, tmp_path)
        assert same(saved, loaded)

    def test_a_single_file_wins_over_an_index(self, tmp_path: Path) -> None:
        shard(tmp_path, {"old": torch.ones(1)})
        save_file({"new": torch.ones(1)}, tmp_path / WEIGHTS)
        assert load_state_dict(tmp_path).keys() == {"new"}

    @pytest.mark.row("B19")
    @pytest.mark.parametrize("where", ["../stolen.safetensors", "{absolute}", "sub/x.safetensors", "..", ".", ""])
    def test_an_index_that_points_outside_its_folder_is_refused_by_name(self, tmp_path: Path, where: str) -> None:
        folder = tmp_path / "model"
        (folder / "sub").mkdir(parents=True)
        for file in (tmp_path / "stolen.safetensors", folder / "sub" / "x.safetensors"):
            save_file({"w": torch.ones(1)}, file)  # they exist and are sound: only their place is wrong
        where = where.format(absolute=tmp_path / "stolen.safetensors")
        write_index(folder, {"weight_map": {"w": where}})
        with pytest.raises(ModelError, match="points outside its folder") as refusal:
            load_state_dict(folder)
        assert repr(where[:80]) in str(refusal.value)
        assert INDEX in str(refusal.value)

    def test_shards_that_are_links_load_as_in_a_hugging_face_cache(self, tmp_path: Path) -> None:
        snapshot, blobs = tmp_path / "snapshots" / "main", tmp_path / "blobs"
        snapshot.mkdir(parents=True)
        blobs.mkdir()
        saved, loaded = linear(), linear()
        state = saved.state_dict()
        shard(snapshot, {"0.weight": state["0.weight"]}, {"0.bias": state["0.bias"]})
        for i, file in enumerate(sorted(snapshot.iterdir())):  # the index too
            file.rename(blobs / f"{i:064x}")
            file.symlink_to(Path("../../blobs") / f"{i:064x}")
        load_model(loaded, snapshot)
        assert same(saved, loaded)

    def test_a_link_to_nothing_is_a_missing_shard(self, tmp_path: Path) -> None:
        shard(tmp_path, {"a": torch.ones(1)})
        file = tmp_path / "model-00001-of-00001.safetensors"
        file.unlink()
        file.symlink_to(tmp_path / "gone")
        with pytest.raises(ModelError, match=r"names 'model-00001-of-00001\.safetensors', which is missing"):
            load_state_dict(tmp_path)

    @pytest.mark.parametrize("name", ["a\0b", "\0", "x" * 256, "x" * 100_000], ids=lambda name: repr(name)[:20])
    def test_a_shard_name_that_no_file_can_have_is_refused_in_short(self, tmp_path: Path, name: str) -> None:
        write_index(tmp_path, {"weight_map": {"w": name}})
        with pytest.raises(ModelError, match="points outside its folder") as refusal:
            load_state_dict(tmp_path)
        assert repr(name[:80]) in str(refusal.value)
        assert len(str(refusal.value)) < len(str(tmp_path)) + 200

    @pytest.mark.parametrize(
        "name", ["x" * 255, "\ud800", " ", "a\nb", "~", "*", "C:\\x", 3, 1.5, True, None], ids=repr
    )
    def test_any_other_odd_shard_name_is_one_that_is_missing(self, tmp_path: Path, name: object) -> None:
        write_index(tmp_path, {"weight_map": {"w": name}})
        with pytest.raises(ModelError, match="which is missing") as refusal:
            load_state_dict(tmp_path)
        assert f"{INDEX} names {name!r}" in str(refusal.value)

    def test_a_folder_in_place_of_a_shard_is_one_that_is_missing(self, tmp_path: Path) -> None:
        (tmp_path / "one.safetensors").mkdir()
        write_index(tmp_path, {"weight_map": {"w": "one.safetensors"}})
        with pytest.raises(ModelError, match=r"names 'one\.safetensors', which is missing"):
            load_state_dict(tmp_path)

    def test_a_missing_shard_is_named(self, tmp_path: Path) -> None:
        shard(tmp_path, {"a": torch.ones(1)}, {"b": torch.ones(1)})
        (tmp_path / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(ModelError, match=r"names 'model-00002-of-00002\.safetensors', which is missing"):
            load_state_dict(tmp_path)

    def test_a_tensor_that_no_shard_holds_is_named(self, tmp_path: Path) -> None:
        save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors")
        write_index(tmp_path, {"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}})
        with pytest.raises(ModelError, match=r"names tensors that no shard holds: \['b'\]"):
            load_state_dict(tmp_path)

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "not json",
            "[]",
            "{}",
            "3",
            '{"weight_map": []}',
            '{"weight_map": 3}',
            '{"weight_map": {"a": ["x"]}}',
            '{"weight_map": {"a": "x", "b": 3}}',
            '{"weight_map": ' + "9" * 5000 + "}",
            "[" * 100_000,
            "[" * 100_000 + "]" * 100_000,
            '{"weight_map": ' * 100_000,
            '{"weight_map": {"a": ' + "[" * 100_000 + "]" * 100_000 + "}}",
        ],
        ids=lambda text: repr(text)[:40],
    )
    def test_an_index_that_is_none_is_refused_by_name(self, tmp_path: Path, text: str) -> None:
        (tmp_path / INDEX).write_text(text)
        with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json is not an index of shards"):
            load_state_dict(tmp_path)

    def test_an_index_that_is_not_text_is_refused_by_name(self, tmp_path: Path) -> None:
        (tmp_path / INDEX).write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ModelError, match="is not an index of shards"):
            load_state_dict(tmp_path)


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
        class Trap:
            def __reduce__(self) -> tuple[object, ...]:
                return Path.touch, (tmp_path / "sprung",)

        name = "one.safetensors" if sharded else WEIGHTS
        (tmp_path / name).write_bytes(pickle.dumps(Trap()))
        if sharded:
            write_index(tmp_path, {"weight_map": {"w": name}})
        with pytest.raises(ModelError, match=f"{name} cannot be read as safetensors"):
            load_state_dict(tmp_path)
        assert not (tmp_path / "sprung").exists()

    def test_another_model_is_refused_naming_what_is_missing_and_what_is_unknown(self, tmp_path: Path) -> None:
        save_model(linear(), tmp_path)
        model = nn.Sequential(nn.Identity(), nn.Linear(3, 2))
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(ModelError, match=r"another model's: missing \['1.weight', '1.bias'\], unknown \['0\.") as e:
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


class Trap:
    """Unpickled, it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.file,)


class TestTorchFiles:
    @pytest.mark.parametrize("legacy", [False, True])
    def test_a_folder_that_has_nothing_else_is_read(self, tmp_path: Path, legacy: bool) -> None:
        saved, loaded = Tied(1), Tied(2)
        torch.save(saved.state_dict(), tmp_path / BIN_WEIGHTS, _use_new_zipfile_serialization=not legacy)
        load_model(loaded, tmp_path)
        assert same(saved, loaded)

    def test_shards_are_read(self, tmp_path: Path) -> None:
        saved, loaded = linear(), linear()
        weight_map = {}
        for i, (name, tensor) in enumerate(saved.state_dict().items()):
            weight_map[name] = f"pytorch_model-{i}.bin"
            torch.save({name: tensor}, tmp_path / weight_map[name])
        (tmp_path / BIN_INDEX).write_text(json.dumps({"weight_map": weight_map}))
        load_model(loaded, tmp_path)
        assert same(saved, loaded)

    def test_safetensors_come_first_and_the_pickle_is_not_even_opened(self, tmp_path: Path) -> None:
        save_state_dict({"w": torch.ones(1)}, tmp_path)
        (tmp_path / BIN_WEIGHTS).write_bytes(b"broken")
        assert load_state_dict(tmp_path).keys() == {"w"}

    @pytest.mark.parametrize("legacy", [False, True])
    @pytest.mark.parametrize("sharded", [False, True])
    def test_code_in_it_is_refused_and_not_run(self, tmp_path: Path, legacy: bool, sharded: bool) -> None:
        name = "one.bin" if sharded else BIN_WEIGHTS
        if sharded:
            (tmp_path / BIN_INDEX).write_text(json.dumps({"weight_map": {"w": name}}))
        held = {"w": torch.ones(1), "x": Trap(tmp_path / "sprung")}
        torch.save(held, tmp_path / name, _use_new_zipfile_serialization=not legacy)
        with pytest.raises(ModelError, match=rf"{name} was not imported: .* other than tensors and plain values"):
            load_state_dict(tmp_path)
        assert not (tmp_path / "sprung").exists()

    def test_an_index_of_safetensors_cannot_lead_to_a_pickle(self, tmp_path: Path) -> None:
        torch.save({"w": torch.ones(1)}, tmp_path / "one.bin")
        write_index(tmp_path, {"weight_map": {"w": "one.bin"}})
        with pytest.raises(ModelError, match="must not lead to a pickle"):
            load_state_dict(tmp_path)

    @pytest.mark.parametrize("where", ["../stolen.bin", "/etc/hostname", "..", "sub/x.bin", ""])
    def test_an_index_that_points_outside_its_folder_is_refused(self, tmp_path: Path, where: str) -> None:
        (tmp_path / BIN_INDEX).write_text(json.dumps({"weight_map": {"w": where}}))
        with pytest.raises(ModelError, match="points outside its folder"):
            load_state_dict(tmp_path)

    @pytest.mark.parametrize(
        ("held", "reason"),
        [
            ({"model": {"w": torch.ones(1)}, "step": 3}, "got a dict at 'model'"),
            ({"w": torch.ones(1), "step": 3}, "got a int at 'step'"),
            ({0: torch.ones(1)}, "at 0"),
            ([torch.ones(1)], "must map names to tensors, got a list"),
            ({"w": torch.ones(3).to_sparse()}, "at 'w'"),
            ({"w": torch.zeros(1).expand(1 << 40)}, "at 'w'"),
        ],
    )
    def test_anything_but_names_and_tensors_is_refused(self, tmp_path: Path, held: object, reason: str) -> None:
        torch.save(held, tmp_path / BIN_WEIGHTS)
        with pytest.raises(ModelError, match=reason):
            load_state_dict(tmp_path)

    def test_a_broken_file_is_refused_by_name(self, tmp_path: Path) -> None:
        (tmp_path / BIN_WEIGHTS).write_bytes(b"not a file of torch.save")
        with pytest.raises(ModelError, match=r"pytorch_model\.bin"):
            load_state_dict(tmp_path)


class TestCheckpoints:
    def test_a_folder_with_weights_is_taken_as_it_is(self, tmp_path: Path) -> None:
        save_state_dict({"w": torch.ones(1)}, tmp_path)
        save_state_dict({"w": torch.zeros(1)}, tmp_path / "checkpoint-5")
        state, place = load_checkpoint(tmp_path)
        assert (float(state["w"]), place) == (1.0, tmp_path)

    def test_weights_in_its_model_folder_are_found(self, tmp_path: Path) -> None:
        (tmp_path / "optimizer.pt").write_bytes(b"not looked at")
        torch.save({"w": torch.ones(1)}, tmp_path / "x")
        (tmp_path / "model").mkdir()
        (tmp_path / "x").rename(tmp_path / "model" / BIN_WEIGHTS)
        state, place = load_checkpoint(tmp_path)
        assert (float(state["w"]), place) == (1.0, tmp_path / "model")

    def test_the_newest_by_number_is_taken_and_named(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        for step in (9, 100, 20):
            save_state_dict({"w": torch.tensor(float(step))}, tmp_path / f"checkpoint-{step}")
        save_state_dict({"w": torch.tensor(-1.0)}, tmp_path / "checkpoint-999-notes")
        (tmp_path / "checkpoint-1000").touch()
        with caplog.at_level(logging.INFO):
            state, place = load_checkpoint(tmp_path)
        assert (float(state["w"]), place.name) == (100.0, "checkpoint-100")
        assert "using checkpoint" in caplog.text
        assert "checkpoint-100" in caplog.text

    def test_one_that_cannot_be_read_is_passed_over_and_named(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        save_state_dict({"w": torch.ones(1)}, tmp_path / "checkpoint-1")
        file = save_state_dict({"w": torch.zeros(1)}, tmp_path / "checkpoint-2")
        file.write_bytes(file.read_bytes()[:-1])
        (tmp_path / "checkpoint-3").mkdir()  # its writer had not begun
        state, place = load_checkpoint(tmp_path)
        assert (float(state["w"]), place.name) == (1.0, "checkpoint-1")
        assert "checkpoint-2 is skipped" in caplog.text
        assert "checkpoint-3 is skipped" in caplog.text

    def test_if_none_can_be_read_each_is_named(self, tmp_path: Path) -> None:
        for step in (1, 2):
            (tmp_path / f"checkpoint-{step}").mkdir()
            (tmp_path / f"checkpoint-{step}" / WEIGHTS).write_bytes(b"")
        with pytest.raises(ModelError, match=r"no checkpoint in .* can be read: .*checkpoint-2.*checkpoint-1"):
            load_checkpoint(tmp_path)

    def test_where_there_is_none_the_error_says_what_is_there(self, tmp_path: Path) -> None:
        (tmp_path / "__0_0.distcp").touch()
        with pytest.raises(ModelError, match=r"is no checkpoint: .* it holds __0_0\.distcp"):
            load_checkpoint(tmp_path)
        with pytest.raises(ModelError, match=r"no checkpoint at .*nowhere"):
            load_checkpoint(tmp_path / "nowhere")

    def test_a_state_json_of_somebody_else_is_no_reason_to_refuse(self, tmp_path: Path) -> None:
        save_state_dict({"w": torch.ones(1)}, tmp_path)
        (tmp_path / STATE).write_text('{"epoch": 3}')
        assert load_checkpoint(tmp_path)[0].keys() == {"w"}

    @pytest.mark.parametrize("target", ["../elsewhere", "/", "checkpoint-7", "latest"])
    def test_a_link_called_latest_leads_nowhere_but_to_a_checkpoint_beside_it(
        self, tmp_path: Path, target: str
    ) -> None:
        save_state_dict({"w": torch.zeros(1)}, tmp_path / "elsewhere")
        runs = tmp_path / "runs"
        save_state_dict({"w": torch.ones(1)}, runs / "checkpoint-1")
        (runs / "latest").symlink_to(target)
        assert load_checkpoint(runs)[1] == runs / "checkpoint-1"
