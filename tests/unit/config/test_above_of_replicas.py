"""Replicas of torchft, or ranks of a job, that are a cluster of a layer above: what must go together."""

from __future__ import annotations

from typing import Any

import pytest

from outerstep.config import WorkerConfig, build
from outerstep.errors import ConfigError
from outerstep.worker.connect import _inner_rule

CLUSTER: dict[str, Any] = {"topology": "torchft", "above": "os1:join-string", "cluster": "east"}


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"cluster": None}, r"above needs the name of this cluster .* say cluster='NAME'"),
        ({"cluster": "no name"}, r"cluster must be a name as worker_id is, got 'no name'"),
        ({"transfer_timeout_s": 90.0, "above_wait_s": 80.0}, "transfer_timeout_s must be below above_wait_s, got 90"),
        ({"above_wait_s": 60.0}, r"must be below above_wait_s, got 60 and 60"),
        ({"outer_momentum": 0.9}, r"outer_momentum must be 0 in a cluster, got 0.9: .*inner_momentum=True"),
        ({"outer_optimizer": "my:Rule"}, r"outer_optimizer must be left out in a cluster, got 'my:Rule'"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_with_the_remedy(said: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(WorkerConfig, {**CLUSTER, **said})


def test_members_that_do_not_wait_need_no_order_of_timeouts() -> None:
    config = build(WorkerConfig, {**CLUSTER, "above_wait_s": 0.0, "transfer_timeout_s": 90.0})
    assert config.layer_above.above_wait_s == 0.0


def test_inside_a_cluster_the_outer_step_is_the_mean_unless_somebody_says_otherwise() -> None:
    rule = _inner_rule(build(WorkerConfig, CLUSTER))
    assert (rule.lr, rule.momentum) == (1.0, 0.0)
    said = {"outer_lr": 0.5, "outer_momentum": 0.9, "inner_momentum": True}
    rule = _inner_rule(build(WorkerConfig, {**CLUSTER, **said}))
    assert (rule.lr, rule.momentum) == (0.5, 0.9)


RANKS: dict[str, Any] = {**CLUSTER, "topology": "allreduce"}


def test_ranks_are_refused_the_same() -> None:
    with pytest.raises(ConfigError, match=r"outer_momentum must be 0 in a cluster, got 0.9: .*inner_momentum=True"):
        build(WorkerConfig, {**RANKS, "outer_momentum": 0.9})
    with pytest.raises(ConfigError, match="above needs the name of this cluster"):
        build(WorkerConfig, {**RANKS, "cluster": None})
    rule = _inner_rule(build(WorkerConfig, RANKS))
    assert (rule.lr, rule.momentum) == (1.0, 0.0)


def test_a_rank_that_dies_ends_the_job_so_there_is_no_timeout_inside_to_be_shorter() -> None:
    assert build(WorkerConfig, {**RANKS, "above_wait_s": 1.0}).layer_above.above_wait_s == 1.0


@pytest.mark.parametrize("topology", ["server", "gossip"])
def test_others_have_no_layer_above(topology: str) -> None:
    said = {**CLUSTER, "topology": topology} | ({"server_addr": "h:1"} if topology == "server" else {})
    with pytest.raises(ConfigError, match=r"above .* needs topology torchft or allreduce"):
        build(WorkerConfig, said)


def test_a_join_string_is_not_shown() -> None:
    config = build(WorkerConfig, {**CLUSTER, "above": "outerstep://secret-token@host:8512#abc"})
    assert "secret-token" not in repr(config)
