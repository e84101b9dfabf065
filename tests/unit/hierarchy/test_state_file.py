"""A cluster's state: written whole or not at all, for its owner alone, and read back as it was."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch

from outerstep.errors import ModelError
from outerstep.hierarchy.state_file import read_state, write_state

SHARED = torch.arange(8.0)
STATE = {
    "serial": 3,
    "worker": {"fragments": [{"names": ["a"], "sent": {"a": SHARED[:4]}}], "session": "secret", "none": None},
    "shadow": {"a": SHARED, "again": SHARED, "bytes": torch.tensor([1, 2], dtype=torch.uint8), "empty": torch.empty(0)},
}


def test_it_comes_back_as_it_was(tmp_path: Path) -> None:
    write_state(tmp_path / "state", STATE)
    found = read_state(tmp_path / "state")
    assert found is not None
    assert (found["serial"], found["worker"]["session"], found["worker"]["none"]) == (3, "secret", None)
    assert torch.equal(found["worker"]["fragments"][0]["sent"]["a"], SHARED[:4])
    for name, values in STATE["shadow"].items():  # type: ignore[attr-defined]
        assert torch.equal(found["shadow"][name], values), name


def test_there_may_be_none(tmp_path: Path) -> None:
    assert read_state(tmp_path / "state") is None


def test_it_is_its_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_state(tmp_path / "state", STATE)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o600


def test_what_cannot_be_written_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_state(tmp_path / "state", STATE)

    def refuse(*args: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="full"):
        write_state(tmp_path / "state", {**STATE, "serial": 4})
    found = read_state(tmp_path / "state")
    assert found is not None
    assert found["serial"] == 3


@pytest.mark.parametrize("content", [b"", b"not safetensors at all", b"\xff" * 64])
def test_anything_else_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state").write_bytes(content)
    with pytest.raises(ModelError, match=r"is not the state of a cluster.*move it away"):
        read_state(tmp_path / "state")
