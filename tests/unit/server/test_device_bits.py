"""What a store does on a device has the bits of what its threads do in host memory: of θ, T, momentum, the update, the
mean and the hash; also if the device has no room for the rest of a round. (The device is this CPU, unless there is a
GPU: tests/integration/test_cuda.py.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from device_rounds import CPU, OUTERS, RULES, SMALL, Full, Rounds, drawn, same
from outerstep import digest
from outerstep.core.codecs import CODECS
from outerstep.core.outer import Nesterov, TorchOuter
from outerstep.server import blocks, decoding, places, publish
from outerstep.server.store import Addend
from outerstep.topology.encode import encode_frame
from outerstep.types import GetPart

BLOCK = 4096
DEVICE_BLOCK = 4 * BLOCK


@pytest.fixture(autouse=True)
def _many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (blocks, decoding):
        monkeypatch.setattr(module, "BLOCK_VALUES", BLOCK)
    for module in (publish, places):
        monkeypatch.setattr(module, "LEAF_VALUES", 1024)
    monkeypatch.setattr(digest, "LEAF_BYTES", 4 * 1024)


# --- the same bits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outer", OUTERS)
@pytest.mark.parametrize("codec", [*CODECS, "int4+stochastic", "bf16+stochastic", "int4,norms=fp32"])
def test_rounds_of_means_have_the_same_bits(codec: str, outer: str) -> None:
    here, there = (Rounds(codec, OUTERS[outer](), device=device) for device in (None, CPU))
    for version in (1, 2, 3):
        same(there.mean_round(version, keep_mean=version == 2), here.mean_round(version, keep_mean=version == 2))
    assert not there.store.place.is_host


@pytest.mark.parametrize("codec", ["fp32", "int4", "sparse64"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rounds_of_other_rules_have_the_same_bits_and_the_same_verdicts(rule: dict[str, Any], codec: str) -> None:
    here, there = (Rounds(codec, Nesterov(portable=True), device=device, rule=rule) for device in (None, CPU))
    for version in (1, 2):
        same(there.rule_round(version), here.rule_round(version))


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_a_version_from_above_and_one_of_nothing_have_the_same_bits(codec: str) -> None:
    found = []
    for device in (None, CPU):
        run = Rounds(codec, Nesterov(portable=True), device=device)
        run.mean_round(1)
        run.store.publish(run.store.move_to(2, drawn(7)), ())
        found.append([run.state(), run.publish(3, [])])
    assert found[0] == found[1]


def test_a_store_may_go_there_and_back_between_any_two_rounds() -> None:
    here, there = (Rounds("int4", Nesterov(portable=True), device=device) for device in (None, CPU))
    for version in range(1, 6):
        same(there.mean_round(version), here.mean_round(version))
        if there.store.place.is_host:
            there.store.to_device(CPU, DEVICE_BLOCK)
        else:
            there.store.to_host()


def test_a_step_that_differs_between_devices_is_taken_on_the_host() -> None:
    run = Rounds("int4", Nesterov(), device=CPU)
    expected = Rounds("int4", Nesterov()).mean_round(1)
    assert run.mean_round(1) == expected
    assert run.store.place.is_host
    assert run.full == ["the outer optimizer has other bits there than on the host"]
    whole = Rounds(
        "int4",
        TorchOuter(
            lambda params: torch.optim.Adam(params, lr=0.01), {n: shape for n, shape in SMALL.items() if n != "mean"}
        ),
        device=CPU,
    )
    whole.mean_round(1)
    assert whole.store.place.is_host


# --- no room in the middle of it --------------------------------------------------------------------------------------


@pytest.mark.parametrize("outer", OUTERS)
@pytest.mark.parametrize("codec", ["fp32", "int4", "sparse64"])
def test_wherever_the_memory_ends_the_round_has_its_bits(
    codec: str, outer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Rounds(codec, OUTERS[outer]())
    expected = [here.mean_round(version, keep_mean=version == 2) for version in (1, 2, 3)]
    with monkeypatch.context() as patched:
        counted = Full(patched, at=0)
        undisturbed = Rounds(codec, OUTERS[outer](), device=CPU)
        for version in (1, 2, 3):
            undisturbed.mean_round(version)
    assert counted.asked > 30
    for at in range(1, counted.asked + 1, 3):
        with monkeypatch.context() as patched:
            Full(patched, at)
            run = Rounds(codec, OUTERS[outer](), device=CPU)
            for version in (1, 2, 3):
                same(run.mean_round(version, keep_mean=version == 2), expected[version - 1])
        assert run.store.place.is_host
        assert run.full == ["CUDA out of memory (as a test has it)"]


@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_a_reader_keeps_its_version_while_the_device_is_left(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Rounds(codec, Nesterov(portable=True), device=CPU)
    run.mean_round(1)
    request = GetPart(run_id="run", worker_id="w", incarnation=1, fragment=0, version=1, part=0, kind="full")
    announced, lent = run.store.part(request, 0.0)
    before = bytes(lent)
    Full(monkeypatch, at=9)
    here = Rounds(codec, Nesterov(portable=True))
    here.mean_round(1)
    same(run.mean_round(2), here.mean_round(2))
    assert run.store.place.is_host
    assert bytes(lent) == before
    assert announced == digest.part_hash(lent)


@pytest.mark.parametrize("rule", [RULES[1], RULES[6]], ids=str)
def test_a_rule_that_finds_no_room_is_begun_again_on_the_host(
    rule: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = (Rounds("int8", Nesterov(portable=True), device=device, rule=rule) for device in (None, CPU))
    same(there.rule_round(1), here.rule_round(1))
    share, calls = there.store.place.share, list[int]()

    def full(work_blocks: Any, new_room: Any, work: Any, seal: Any) -> None:
        calls.append(len(work_blocks))
        share(work_blocks[:1], new_room, work, seal)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(there.store.place, "share", full)
    same(there.rule_round(2), here.rule_round(2))
    assert calls
    assert there.store.place.is_host


# --- what others read -------------------------------------------------------------------------------------------------


def test_a_frame_is_filled_when_it_is_asked_for_and_before_its_values_move_on() -> None:
    run = Rounds("int4", Nesterov(portable=True), device=CPU)
    here = Rounds("int4", Nesterov(portable=True))
    for version in (1, 2):
        run.mean_round(version)
        here.mean_round(version)
    newest = run.store.newest
    assert run.store.payloads(2, "w", 0, None, 0.0) == here.store.payloads(2, "w", 0, None, 0.0)
    lent = newest.lend("w", 0, 0.0)
    assert lent == here.store.newest.lend("w", 0, 0.0)
    with run.store.down.reading(2) as held:
        assert held is newest
        before = bytes(newest.frame.view)
        run.mean_round(3)
        assert bytes(newest.frame.view) == before
    assert run.store.range_hashes(3, 4) is not None
    here.mean_round(3)
    assert run.store.range_hashes(3, 4) == here.store.range_hashes(3, 4)
    assert run.store.down.flat_hash(3) == here.store.down.flat_hash(3)


def test_what_is_not_finite_is_named() -> None:
    run = Rounds("fp32", Nesterov(3e38, 0.0, portable=True), device=CPU)
    frame = encode_frame(
        {n: torch.full(s, 1e18) for n, s in SMALL.items()},
        run.store.uplink().layout,
        {s.name: run.recipe.codec(s) for s in run.specs},
    )
    with pytest.raises(FloatingPointError, match="tensor 'w' of version 1 not finite"):
        run.store.close(1, run.outer, [Addend(frame, 1.0)])
