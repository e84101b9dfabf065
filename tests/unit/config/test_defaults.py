"""A default that more than one room needs is written down once."""

from __future__ import annotations

import ast
import contextlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import outerstep
from outerstep import defaults
from outerstep.config import ServerConfig, WorkerConfig, settings_of
from outerstep.coordination.gossip import GossipRules
from outerstep.coordination.server.plan import DEFAULTS
from outerstep.core.delayed import DelayedNesterov
from outerstep.core.outer import Nesterov, OuterRule
from outerstep.core.own_outer import OuterOptimizer
from outerstep.server.outer_state import rule_told
from outerstep.topology.gossip.gradient_gossip import GradientGossip
from outerstep.topology.gossip.node import NodeSettings
from outerstep.topology.server.topology import ServerTopology
from outerstep.worker.connect import outer_rule

SOURCE = Path(outerstep.__file__).parent
VALUES = {
    "lr": defaults.OUTER_LR,
    "outer_lr": defaults.OUTER_LR,
    "momentum": defaults.OUTER_MOMENTUM,
    "outer_momentum": defaults.OUTER_MOMENTUM,
    "sync_every": defaults.SYNC_EVERY,
    "inner_steps": defaults.SYNC_EVERY,
    "join_timeout_s": defaults.JOIN_TIMEOUT_S,
    "beat_every_s": defaults.PEER_BEAT_S,
    "part_size_bytes": defaults.PART_SIZE_BYTES,
}
FILES = [file for file in sorted(SOURCE.rglob("*.py")) if file.name != "defaults.py"]


def given_in(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """(name, value) of every field, parameter, variable and dictionary entry that has one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, node.value
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id.lower(), node.value
        elif isinstance(node, ast.arguments):
            named = [*node.posonlyargs, *node.args]
            yield from zip([arg.arg for arg in named[len(named) - len(node.defaults) :]], node.defaults, strict=True)
            yield from ((a.arg, value) for a, value in zip(node.kwonlyargs, node.kw_defaults, strict=True) if value)
        elif isinstance(node, ast.Dict):
            yield from ((key.value, v) for key, v in zip(node.keys, node.values, strict=True) if _is_text(key))


def _is_text(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_no_other_file_writes_the_number(file: Path) -> None:
    for name, value in given_in(ast.parse(file.read_text())):
        if name in VALUES and isinstance(value, ast.Constant | ast.BinOp):
            with contextlib.suppress(NameError):  # then it is not a number, but made from others
                number = eval(compile(ast.Expression(value), file.name, "eval"), {})  # noqa: S307 - our own source
                assert number != VALUES[name], f"line {value.lineno}: import {name} from defaults.py"


def test_whoever_has_the_default_has_the_same() -> None:
    server, worker = settings_of(ServerConfig), settings_of(WorkerConfig)
    for role in (server, worker):
        assert role["outer_lr"].metadata["unset"].startswith(f"{defaults.OUTER_LR}")
        assert role["outer_momentum"].metadata["unset"].startswith(f"{defaults.OUTER_MOMENTUM}")
    assert rule_told(ServerConfig(num_workers=1)) == Nesterov().rule == outer_rule(WorkerConfig.serverless, "here")
    assert Nesterov().rule == OuterRule(defaults.OUTER_LR, defaults.OUTER_MOMENTUM, True)
    assert (inspect.signature(OuterOptimizer).parameters["lr"].default) == defaults.OUTER_LR
    delayed = inspect.signature(DelayedNesterov).parameters
    assert (delayed["lr"].default, delayed["momentum"].default) == (defaults.OUTER_LR, defaults.OUTER_MOMENTUM)
    assert DEFAULTS["sync_every"] == defaults.SYNC_EVERY
    for kind in (ServerTopology, GradientGossip):
        assert inspect.signature(kind).parameters["join_timeout_s"].default == worker["join_timeout_s"].default
    assert NodeSettings("a").part_size_bytes == defaults.PART_SIZE_BYTES
    assert GossipRules().heartbeat_timeout_s == defaults.PEER_HEARTBEAT_TIMEOUT_S
