"""States to save, and when two of them are the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from outerstep.digest import data_hash
from outerstep.model_folder import STATE
from outerstep.server.saved import Acceptance, OptimizerState, ServerState, WorkerRecord
from outerstep.types import Manifest, ParameterSpec, Plan


def plan_of(*fragments: tuple[str, ...]) -> Plan:
    return Plan(
        sync_every=10,
        codec="fp32",
        fragments=fragments,
        part_size_bytes=1 << 20,
        max_staleness=4,
        heartbeat_timeout_s=120.0,
    )


def make_state(
    seed: int = 0, *, versions: tuple[int, int] = (3, 2), run_id: str = "run-1", dtype: str = "float32"
) -> ServerState:
    """Two fragments, a tied head, a frozen tensor, buffers, momentum, a step count, a ledger."""
    source = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source)

    params = {"embed.weight": draw(5, 4), "h.0.weight": draw(4, 4), "h.0.scale": draw()}
    manifest = Manifest(
        parameters=tuple(ParameterSpec(name=n, shape=tuple(t.shape), dtype=dtype, block="") for n, t in params.items()),
        aliases={"head.weight": "embed.weight"},
        buffers=("norm.mean", "norm.count"),
        frozen=("frozen",),
    )
    frozen = draw(2, 3).to(torch.bfloat16)
    return ServerState(
        run_id=run_id,
        params=params,
        targets={"embed.weight": draw(5, 4), "h.0.scale": draw()},
        rest={"norm.mean": draw(4), "norm.count": torch.tensor(seed), "frozen": frozen, "frozen.again": frozen},
        manifest=manifest,
        plan=plan_of(("embed.weight",), ("h.0.weight", "h.0.scale")),
        versions=versions,
        optimizer=OptimizerState(
            "delayed_nesterov",
            {
                "embed.weight": {"momentum_buffer": draw(5, 4), "delta_sum": draw(5, 4)},
                "h.0.scale": {"momentum_buffer": draw(), "step": 7, "rate": 0.1 + 0.2, "unused": None},
            },
            {"counts": [1, 0], "buffer_size": 2},
        ),
        ledger={
            "left": WorkerRecord(
                instance="a" * 16,
                hostname="here",
                incarnation=2,
                retired=("b" * 16,),
                accepted={
                    0: Acceptance(sequence=4, payload_hash="0f" * 16, version=versions[0]),
                    1: Acceptance(sequence=3, payload_hash=None, version=versions[1]),
                },
            ),
            "right:1": WorkerRecord(instance="c" * 16, hostname="", incarnation=1, retired=(), accepted={}),
        },
        totals={"total_submissions": 11 + seed, "tokens": 2**52, "mean_weight": 1 / 3},
        facts={"said_by": {"sync_every": "the server"}, "speeds": [1.5, None]},
    )


def bits(tensor: Tensor) -> tuple[object, ...]:
    """NaNs compare too."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.zeros(0)
    return tensor.dtype, tuple(tensor.shape), data_hash([data.numpy().tobytes()])


def content(state: ServerState) -> dict[str, object]:
    """All of a state, comparable; names in their order."""
    return {
        "run_id": state.run_id,
        "params": [(name, bits(t)) for name, t in state.params.items()],
        "targets": [(name, bits(t)) for name, t in state.targets.items()],
        "rest": [(name, bits(t)) for name, t in state.rest.items()],
        "manifest": state.manifest,
        "plan": state.plan,
        "versions": state.versions,
        "kind": state.optimizer.kind,
        "by_name": {
            name: {key: bits(v) if isinstance(v, Tensor) else (type(v), v) for key, v in entry.items()}
            for name, entry in state.optimizer.by_name.items()
        },
        "optimizer facts": msgspec.json.encode(state.optimizer.facts),
        "ledger": list(state.ledger.items()),
        "totals": [(name, type(value), value) for name, value in state.totals.items()],
        "facts": msgspec.json.encode(state.facts),
    }


def assert_same_state(left: ServerState, right: ServerState) -> None:
    ours, theirs = content(left), content(right)
    for field in ours:
        assert ours[field] == theirs[field], field


def names_in(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def rewrite(place: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what state.json says, with a hash that fits: somebody who knows the format."""
    envelope = json.loads((place / STATE).read_bytes())
    change(envelope["state"])
    raw = msgspec.json.encode(envelope["state"])
    envelope["state"], envelope["hash"] = msgspec.Raw(raw), data_hash([raw])
    (place / STATE).write_bytes(msgspec.json.encode(envelope))
