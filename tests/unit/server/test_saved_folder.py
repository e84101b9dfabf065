"""A folder of saved states: the newest whole one is found, and nothing else is touched."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest

from outerstep.errors import ModelError
from outerstep.model_folder import STATE, WEIGHTS
from outerstep.server.saved import (
    load_state,
    save_state,
)
from outerstep.server.saved.folder import OUTER, TARGET
from unit.server.saved_states import assert_same_state, make_state, names_in


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
