"""What a store does on a device has the bits of what its threads do in host memory: of θ, T, momentum, the update, the
mean and the hash; also if the device has no room for the rest of a round. (The device is this CPU, unless there is a
GPU: tests/integration/test_cuda.py.)"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from outerstep import digest
from outerstep.coordination.server.rounds import Aggregation
from outerstep.core.codecs import CODECS
from outerstep.core.codecs.recipe import WHOLE, Recipe
from outerstep.core.delayed import DelayedNesterov
from outerstep.core.outer import Nesterov, TorchOuter
from outerstep.core.own_outer import OuterOptimizer, outer_of
from outerstep.core.state import Outer
from outerstep.server import blocks, decoding, places, publish
from outerstep.server.outer_state import state_of
from outerstep.server.places import DeviceBlocks, Pass
from outerstep.server.store import Addend, FragmentStore, rule_of
from outerstep.threads import ThreadTeam
from outerstep.topology.encode import encode_frame
from outerstep.types import GetPart, ParameterSpec, Participant

BLOCK = 4096
DEVICE_BLOCK = 4 * BLOCK
CPU = torch.device("cpu")
SHAPES: dict[str, tuple[int, ...]] = {"w": (70, 1001), "mean": (301,), "b": (4097,), "one": (), "v": (30, 1100)}
ROLES = {"mean": "average"}
SPECS = [
    ParameterSpec(name=name, shape=shape, dtype="float32", role=ROLES.get(name, "parameter"))  # type: ignore[arg-type]
    for name, shape in SHAPES.items()
]
EVERYBODY = (Participant(worker_id="a", sequence=1, weight=1.0, norm=1.0),)
STEPPED = {n: s for n, s in SHAPES.items() if n not in ROLES}


class Signs(OuterOptimizer):
    def update(self, theta: Tensor, g: Tensor, momentum: Tensor, options: Mapping[str, Any]) -> None:
        momentum.mul_(options["momentum"]).add_(g)
        theta.sub_(torch.sign(momentum).mul_(options["lr"]))


OUTERS: dict[str, Callable[[], Outer]] = {
    "nesterov": lambda: Nesterov(portable=True),
    "plain": lambda: Nesterov(1.0, 0.0, portable=True),
    "delayed": lambda: DelayedNesterov(3),
    "own": lambda: outer_of(lambda params: Signs(params, lr=0.01), STEPPED),
}
RULES: list[dict[str, Any]] = [
    {"aggregation": "mean", "cosine_screen": True},
    {"aggregation": "trimmed_mean"},
    {"aggregation": "median"},
    {"aggregation": "krum"},
    {"aggregation": "multi_krum"},
    {"aggregation": "geometric_median"},
    {"aggregation": "centered_clipping"},
    {"aggregation": "trimmed_mean", "bucket_size": 2},
]


@pytest.fixture(autouse=True)
def _many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (blocks, decoding):
        monkeypatch.setattr(module, "BLOCK_VALUES", BLOCK)
    for module in (publish, places):
        monkeypatch.setattr(module, "LEAF_VALUES", 1024)
    monkeypatch.setattr(digest, "LEAF_BYTES", 4 * 1024)


def drawn(seed: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=source) for name, shape in SHAPES.items()}


class Run:
    """A store on the host or on a device, and what came of its rounds."""

    def __init__(self, codec: str, outer: Outer, *, on_device: bool, rule: dict[str, Any] | None = None) -> None:
        self.recipe, self.outer = Recipe.parse(codec), outer
        self.settings = Aggregation(**(rule or {}))
        self.full: list[str] = []
        self.store = FragmentStore(
            0,
            SPECS,
            drawn(0),
            self.recipe,
            self.recipe.downlink() if rule is None else WHOLE,
            1024,
            run_id="run",
            max_staleness=2,
            keeps_centre=rule_of(self.settings).needs_centre,
            team=ThreadTeam(2),
            on_full=self.full.append,
        )
        if on_device:
            self.store.to_device(CPU, DEVICE_BLOCK)

    def addends(self, version: int, count: int = 3) -> list[Addend]:
        """Of unequal weights; some of them late, whose buffers are moved along."""
        codecs = {spec.name: self.recipe.codec(spec) for spec in SPECS}
        frames = [encode_frame(drawn(10 * version + i), self.store.uplink().layout, codecs) for i in range(count)]
        return [Addend(frame, 1.0 + 0.3 * i, max(version - 1 - i, 0)) for i, frame in enumerate(frames)]

    def mean_round(self, version: int, *, keep_mean: bool = False) -> dict[str, Any]:
        rest, pushed = self.addends(version), isinstance(self.outer, DelayedNesterov)
        if not pushed:
            self.store.accumulate(version, rest[:1])
            self.store.accumulate(version, rest[1:2])
        return self.publish(version, rest if pushed else rest[2:], keep_mean=keep_mean and not pushed)

    def rule_round(self, version: int) -> dict[str, Any]:
        offered = {addend_id(i): one for i, one in enumerate(self.addends(version, 6))}
        offered = {name: Addend(one.payload, 1.0) for name, one in offered.items()}
        verdict = self.store.combine(version, self.settings, offered, f"seed {version}")
        return {"verdict": verdict, **self.publish(version, [])}

    def publish(self, version: int, addends: list[Addend], *, keep_mean: bool = False) -> dict[str, Any]:
        made = self.store.close(version, self.outer, addends, keep_mean=keep_mean)
        mean = made.mean.numpy().tobytes() if made.mean is not None else b""
        squares = made.squares
        agreement = self.store.publish(made, EVERYBODY).agreement
        update = bytes(made.update.view) if made.update is not None else b""
        return {"mean": mean, "update": update, "hash": agreement.anchor_hash, "squares": squares, **self.state()}

    def state(self) -> dict[str, Any]:
        store = self.store
        tensors = {**store.copy_params(), **{f"T {n}": t for n, t in store.targets_on_host().items()}}
        kept = state_of(self.outer).on_host().by_name
        tensors |= {f"{key} of {name}": t for name, entry in kept.items() for key, t in entry.items()}
        tensors |= {f"centre {n}": t for n, t in store.centre.items()}
        tensors |= {f"{n} of {v}": t for v, held in store.statistics.items() for n, t in held.items()}
        return {name: values.cpu().numpy().tobytes() for name, values in tensors.items()}


def addend_id(i: int) -> str:
    return f"w{i}"


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Σ g² is only watched: its last digit may be a device's own."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == (pytest.approx(value, rel=1e-5) if name == "squares" else value), name


# --- the same bits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outer", OUTERS)
@pytest.mark.parametrize("codec", [*CODECS, "int4+stochastic", "bf16+stochastic", "int4,norms=fp32"])
def test_rounds_of_means_have_the_same_bits(codec: str, outer: str) -> None:
    here, there = (Run(codec, OUTERS[outer](), on_device=on_device) for on_device in (False, True))
    for version in (1, 2, 3):
        same(there.mean_round(version, keep_mean=version == 2), here.mean_round(version, keep_mean=version == 2))
    assert not there.store.place.is_host


@pytest.mark.parametrize("codec", ["fp32", "int4", "sparse64"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rounds_of_other_rules_have_the_same_bits_and_the_same_verdicts(rule: dict[str, Any], codec: str) -> None:
    here, there = (Run(codec, Nesterov(portable=True), on_device=on_device, rule=rule) for on_device in (False, True))
    for version in (1, 2):
        same(there.rule_round(version), here.rule_round(version))


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_a_version_from_above_and_one_of_nothing_have_the_same_bits(codec: str) -> None:
    found = []
    for on_device in (False, True):
        run = Run(codec, Nesterov(portable=True), on_device=on_device)
        run.mean_round(1)
        run.store.publish(run.store.move_to(2, drawn(7)), ())
        found.append([run.state(), run.publish(3, [])])
    assert found[0] == found[1]


def test_a_store_may_go_there_and_back_between_any_two_rounds() -> None:
    here, there = (Run("int4", Nesterov(portable=True), on_device=on_device) for on_device in (False, True))
    for version in range(1, 6):
        same(there.mean_round(version), here.mean_round(version))
        if there.store.place.is_host:
            there.store.to_device(CPU, DEVICE_BLOCK)
        else:
            there.store.to_host()


def test_a_step_that_differs_between_devices_is_taken_on_the_host() -> None:
    run = Run("int4", Nesterov(), on_device=True)
    expected = Run("int4", Nesterov(), on_device=False).mean_round(1)
    assert run.mean_round(1) == expected
    assert run.store.place.is_host
    assert run.full == ["the outer optimizer has other bits there than on the host"]
    whole = Run("int4", TorchOuter(lambda params: torch.optim.Adam(params, lr=0.01), STEPPED), on_device=True)
    whole.mean_round(1)
    assert whole.store.place.is_host


# --- no room in the middle of it --------------------------------------------------------------------------------------


class Full:
    """Of all memory that is asked for on the device while blocks are worked on, the `at`-th piece is not to be had."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self.asked, self.at = 0, at
        whole = DeviceBlocks._whole_or_not

        def counted(place: DeviceBlocks, block: blocks.Block, room: Tensor, one: Pass) -> None:
            def work(block: blocks.Block, room: Tensor) -> Any:
                made = one.work(block, room)
                self.ask()  # after everything was changed: all of it must be put back
                return made

            self.ask()  # before anything is
            whole(place, block, room, Pass(work, one.seal, one.touched, one.rows))

        monkeypatch.setattr(DeviceBlocks, "_whole_or_not", counted)

    def ask(self) -> None:
        self.asked += 1
        if self.asked == self.at:
            raise torch.OutOfMemoryError("CUDA out of memory (as a test has it)")


@pytest.mark.parametrize("outer", OUTERS)
@pytest.mark.parametrize("codec", ["fp32", "int4", "sparse64"])
def test_wherever_the_memory_ends_the_round_has_its_bits(
    codec: str, outer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Run(codec, OUTERS[outer](), on_device=False)
    expected = [here.mean_round(version, keep_mean=version == 2) for version in (1, 2, 3)]
    with monkeypatch.context() as patched:
        counted = Full(patched, at=0)
        undisturbed = Run(codec, OUTERS[outer](), on_device=True)
        for version in (1, 2, 3):
            undisturbed.mean_round(version)
    assert counted.asked > 30
    for at in range(1, counted.asked + 1, 3):
        with monkeypatch.context() as patched:
            Full(patched, at)
            run = Run(codec, OUTERS[outer](), on_device=True)
            for version in (1, 2, 3):
                same(run.mean_round(version, keep_mean=version == 2), expected[version - 1])
        assert run.store.place.is_host
        assert run.full == ["CUDA out of memory (as a test has it)"]


@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_a_reader_keeps_its_version_while_the_device_is_left(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(codec, Nesterov(portable=True), on_device=True)
    run.mean_round(1)
    request = GetPart(run_id="run", worker_id="w", incarnation=1, fragment=0, version=1, part=0, kind="full")
    announced, lent = run.store.part(request, 0.0)
    before = bytes(lent)
    Full(monkeypatch, at=9)
    here = Run(codec, Nesterov(portable=True), on_device=False)
    here.mean_round(1)
    same(run.mean_round(2), here.mean_round(2))
    assert run.store.place.is_host
    assert bytes(lent) == before
    assert announced == digest.part_hash(lent)


@pytest.mark.parametrize("rule", [RULES[1], RULES[6]], ids=str)
def test_a_rule_that_finds_no_room_is_begun_again_on_the_host(
    rule: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = (Run("int8", Nesterov(portable=True), on_device=on_device, rule=rule) for on_device in (False, True))
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


# --- what others read ---------------------------------------------------------------------------------------------------


def test_a_frame_is_filled_when_it_is_asked_for_and_before_its_values_move_on() -> None:
    run = Run("int4", Nesterov(portable=True), on_device=True)
    here = Run("int4", Nesterov(portable=True), on_device=False)
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
    run = Run("fp32", Nesterov(3e38, 0.0, portable=True), on_device=True)
    frame = encode_frame(
        {n: torch.full(s, 1e18) for n, s in SHAPES.items()},
        run.store.uplink().layout,
        {s.name: run.recipe.codec(s) for s in SPECS},
    )
    with pytest.raises(FloatingPointError, match="tensor 'w' of version 1 not finite"):
        run.store.close(1, run.outer, [Addend(frame, 1.0)])
