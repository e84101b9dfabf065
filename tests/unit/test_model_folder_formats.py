"""Models on disk as Hugging Face and torch write them, in one file or several: they load, or are refused by name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from outerstep.errors import ModelError
from outerstep.model_folder import (
    BIN_INDEX,
    BIN_WEIGHTS,
    INDEX,
    WEIGHTS,
    load_model,
    load_state_dict,
    save_state_dict,
)
from unit.models_on_disk import Tied, Trap, linear, same, shard, write_index


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
