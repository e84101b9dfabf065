"""Saved states that are damaged or contradict themselves are refused by name, and the one before is used."""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outerstep.digest import data_hash
from outerstep.errors import ModelError
from outerstep.model_folder import STATE, WEIGHTS, load_checkpoint
from outerstep.server.saved import (
    load_state,
    save_state,
)
from outerstep.server.saved.folder import EXACT, OUTER, TARGET, read_facts
from unit.server.saved_states import assert_same_state, make_state, rewrite


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
