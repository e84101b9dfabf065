"""Folders of checkpoints: the newest that can be read is taken and named."""

import logging
from pathlib import Path

import pytest
import torch

from outerstep.errors import ModelError
from outerstep.model_folder import (
    BIN_WEIGHTS,
    STATE,
    WEIGHTS,
    load_checkpoint,
    save_state_dict,
)


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
        with pytest.raises(ModelError, match=r"is not a checkpoint: .* it holds __0_0\.distcp"):
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
