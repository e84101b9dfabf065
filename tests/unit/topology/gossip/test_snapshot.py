"""What a joiner is given, and what is looked at before anybody votes for a contribution."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outerstep.core.state import FragmentSnapshot
from outerstep.errors import BadFrame
from outerstep.topology.encode import encode_frame
from outerstep.topology.forms import Form, forms_of
from outerstep.topology.gossip.snapshot import read_snapshot, write_snapshot
from outerstep.topology.gossip.state import Contents
from outerstep.topology.update import anchor_hash
from outerstep.types import Manifest, ParameterSpec, Plan

SHAPES = {"w": (3, 5), "b": (7,), "none": (0,)}


def form_of(codec: str = "fp32") -> Form:
    specs = tuple(ParameterSpec(name=name, shape=shape, dtype="float32") for name, shape in SHAPES.items())
    plan = Plan(
        sync_every=1,
        codec=codec,
        fragments=(tuple(SHAPES),),
        part_size_bytes=64,
        max_staleness=0,
        heartbeat_timeout_s=0,
    )
    return forms_of(plan, Manifest(parameters=specs))[0]


def tensors(seed: int) -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=source) for name, shape in SHAPES.items()}


HISTORY = ((0.5, 1.5), (2.0,))


def snapshot() -> FragmentSnapshot:
    anchor = tensors(0)
    momentum = {name: values.reshape(-1) for name, values in tensors(1).items()}
    return FragmentSnapshot(7, anchor_hash(anchor.values()), anchor, momentum, tensors(2))


def test_a_snapshot_comes_back_as_it_was_and_equal_ones_have_equal_bytes() -> None:
    form, wanted = form_of(), snapshot()
    data = write_snapshot(form, wanted, HISTORY)
    assert data == write_snapshot(form, snapshot(), HISTORY)
    found, history = read_snapshot(form, data, SHAPES)
    assert (found.version, found.anchor_hash, history) == (7, wanted.anchor_hash, HISTORY)
    for kind in ("theta", "momentum", "centre"):
        for name, values in getattr(wanted, kind).items():
            assert torch.equal(getattr(found, kind)[name], values)


@pytest.mark.parametrize("place", [0, 2, 10, 200, -7])
def test_a_snapshot_with_a_changed_byte_is_refused_or_names_another_state(place: int) -> None:
    form = form_of()
    data = write_snapshot(form, snapshot(), HISTORY)
    data[place] ^= 0x55
    try:
        found, history = read_snapshot(form, data, SHAPES)
    except BadFrame:
        return
    assert write_snapshot(form, found, history) == data  # momentum has no hash of its own: the whole's digest covers it


def test_a_snapshot_that_is_cut_or_of_another_fragment_is_refused() -> None:
    form, data = form_of(), write_snapshot(form_of(), snapshot(), HISTORY)
    for wrong in (
        data[:3],
        data[:40],
        data[:-8],
        memoryview(bytearray(b"\xff" * 64)),
        memoryview(bytearray(bytes(data) + b"\0" * 8)),
    ):
        with pytest.raises(BadFrame):
            read_snapshot(form, wrong, SHAPES)


@pytest.mark.parametrize("section", ["theta", "momentum", "centre"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_snapshot_that_would_spoil_the_model_is_refused(section: str, value: float) -> None:
    wanted = snapshot()
    getattr(wanted, section)["b"][3] = value
    data = write_snapshot(form_of(), replace(wanted, anchor_hash=anchor_hash(wanted.theta.values())), HISTORY)
    with pytest.raises(BadFrame, match="NaN, Inf or absurd values in 'b'"):
        read_snapshot(form_of(), data, SHAPES)
    read_snapshot(form_of(), data, [name for name in SHAPES if name != "b"])  # a buffer may hold what it likes


def test_a_contribution_is_looked_at_before_anybody_votes_for_it() -> None:
    form = form_of()
    contents, codecs = Contents(form), {name: rule.codec for name, rule in form.rules.items()}
    good = encode_frame(tensors(3), form.up, codecs)
    assert contents.check(good) == ""
    for value, said in ((float("nan"), "'b' holds NaN or Inf"), (float("inf"), "NaN or Inf"), (1e30, "absurd")):
        bad = tensors(3)
        bad["b"][3] = value
        assert said in contents.check(encode_frame(bad, form.up, codecs))
    assert contents.check(good[:-8]) != ""
    assert "pickle" in contents.check(memoryview(bytearray(b"\x80\x04" + bytes(good[2:]))))
