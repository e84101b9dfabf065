"""Rounds of a server's store, on the host or on a device, and everything that came of them as bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from outerstep.coordination.server.rounds import Aggregation
from outerstep.core.codecs.recipe import WHOLE, Recipe
from outerstep.core.delayed import DelayedNesterov
from outerstep.core.outer import Nesterov
from outerstep.core.own_outer import OuterOptimizer, outer_of
from outerstep.core.state import Outer
from outerstep.server.blocks import Block
from outerstep.server.outer_state import state_of
from outerstep.server.places import DeviceBlocks, Pass
from outerstep.server.store import Addend, FragmentStore, rule_of
from outerstep.threads import ThreadTeam
from outerstep.topology.encode import encode_frame
from outerstep.types import ParameterSpec, Participant

CPU = torch.device("cpu")
SMALL: dict[str, tuple[int, ...]] = {"w": (70, 1001), "mean": (301,), "b": (4097,), "one": (), "v": (30, 1100)}
LARGE: dict[str, tuple[int, ...]] = {"w": (700, 1001), "mean": (301,), "b": (65537,), "one": (), "v": (30, 11000)}
EVERYBODY = (Participant(worker_id="a", sequence=1, weight=1.0, norm=1.0),)


class Signs(OuterOptimizer):
    def update(self, theta: Tensor, g: Tensor, momentum: Tensor, options: Mapping[str, Any]) -> None:
        momentum.mul_(options["momentum"]).add_(g)
        theta.sub_(torch.sign(momentum).mul_(options["lr"]))


OUTERS: dict[str, Callable[[], Outer]] = {
    "nesterov": lambda: Nesterov(portable=True),
    "plain": lambda: Nesterov(1.0, 0.0, portable=True),
    "delayed": lambda: DelayedNesterov(3),
    "own": lambda: outer_of(lambda params: Signs(params, lr=0.01), dict.fromkeys(SMALL.keys() - {"mean"}, ())),
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


def drawn(seed: int, shapes: Mapping[str, tuple[int, ...]] = SMALL) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=source) for name, shape in shapes.items()}


def specs_of(shapes: Mapping[str, tuple[int, ...]]) -> list[ParameterSpec]:
    return [
        ParameterSpec(name=name, shape=shape, dtype="float32", role="average" if name == "mean" else "parameter")
        for name, shape in shapes.items()
    ]


class Rounds:
    """A store on the host or on a device, and what came of its rounds."""

    def __init__(
        self,
        codec: str,
        outer: Outer,
        *,
        device: torch.device | None = None,
        rule: dict[str, Any] | None = None,
        shapes: Mapping[str, tuple[int, ...]] = SMALL,
        device_block: int = 1 << 14,
    ) -> None:
        """`device`: None = the host's threads."""
        self.recipe, self.outer, self.shapes, self.specs = Recipe.parse(codec), outer, shapes, specs_of(shapes)
        self.settings = Aggregation(**(rule or {}))
        self.full: list[str] = []
        self.store = FragmentStore(
            0,
            self.specs,
            drawn(0, shapes),
            self.recipe,
            self.recipe.downlink() if rule is None else WHOLE,
            1024,
            run_id="run",
            max_staleness=2,
            keeps_centre=rule_of(self.settings).needs_centre,
            team=ThreadTeam(2),
            on_full=self.full.append,
        )
        if device is not None:
            self.store.to_device(device, device_block)

    def addends(self, version: int, count: int = 3) -> list[Addend]:
        """Of unequal weights; some of them late, whose buffers are moved along."""
        codecs = {spec.name: self.recipe.codec(spec) for spec in self.specs}
        frames = [
            encode_frame(drawn(10 * version + i, self.shapes), self.store.uplink().layout, codecs) for i in range(count)
        ]
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


class Full:
    """Of all memory that is asked for on the device while blocks are worked on, the `at`-th piece is not to be had."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self.asked, self.at = 0, at
        whole = DeviceBlocks._whole_or_not

        def counted(place: DeviceBlocks, block: Block, room: Tensor, one: Pass) -> None:
            def work(block: Block, room: Tensor) -> Any:
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
