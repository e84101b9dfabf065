"""A script that `outerstep run` started hands its model over where it attaches: whole, once, and with its own names."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from outerstep.attached import INITIAL_VARIABLE
from outerstep.model_folder import load_state_dict
from outerstep.worker.initial import hand_over_initial
from support import assert_same, tiny_model


def test_nobody_is_handed_anything_unless_somebody_waits(tmp_path: Path) -> None:
    hand_over_initial(tiny_model(), {})
    hand_over_initial(tiny_model(), {INITIAL_VARIABLE: ""})
    assert list(tmp_path.iterdir()) == []


def test_the_first_that_attaches_brings_the_model_and_no_second_changes_it(tmp_path: Path) -> None:
    first = tiny_model(1)
    hand_over_initial(first, {INITIAL_VARIABLE: str(tmp_path)})
    hand_over_initial(tiny_model(2), {INITIAL_VARIABLE: str(tmp_path)})
    assert_same(load_state_dict(tmp_path), first.state_dict())
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_what_is_around_the_model_is_not_in_its_names(tmp_path: Path) -> None:
    model = tiny_model()
    hand_over_initial(torch.nn.DataParallel(torch.compile(model)), {INITIAL_VARIABLE: str(tmp_path)})
    assert load_state_dict(tmp_path).keys() == model.state_dict().keys()


def test_the_configuration_of_a_pretrained_model_comes_along(tmp_path: Path) -> None:
    class Config:
        def save_pretrained(self, folder: str) -> None:
            (Path(folder) / "config.json").write_text("{}")

    class Pretrained(nn.Linear):
        config = Config()

    hand_over_initial(Pretrained(2, 2), {INITIAL_VARIABLE: str(tmp_path)})
    assert (tmp_path / "config.json").is_file()


def test_what_a_module_keeps_beside_tensors_is_left_to_each_script(tmp_path: Path) -> None:
    class Counting(torch.nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 3}

    hand_over_initial(Counting(2, 2), {INITIAL_VARIABLE: str(tmp_path)})
    assert load_state_dict(tmp_path).keys() == {"weight", "bias"}
