"""What `outerstep server --above` takes for its outer step and its patience, if nobody says otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from outerstep.cli.server import inside_a_cluster
from outerstep.config import SERVER, Sourced, make_command, resolve
from outerstep.errors import ConfigError


def inside(**said: Any) -> dict[str, Any]:
    flags = {name: Sourced(value, "flag") for name, value in {"num_workers": 2, "above": "h:1", **said}.items()}
    found = resolve(SERVER, flags, environ={})
    made = inside_a_cluster(found, make_command(SERVER, found))
    return {name: made[name].value for name in ("outer_lr", "outer_momentum", "heartbeat_timeout_s")}


def test_a_cluster_averages_and_is_half_as_patient_as_a_top() -> None:
    assert inside() == {"outer_lr": 1.0, "outer_momentum": 0.0, "heartbeat_timeout_s": 60.0}
    said = {"outer_lr": 0.5, "outer_momentum": 0.9, "heartbeat_timeout_s": 200.0}
    assert inside(**said, inner_momentum=True) == said


def test_momentum_that_nobody_insists_on_is_refused_before_the_server_starts() -> None:
    with pytest.raises(ConfigError, match=r"outer_momentum must be 0 in a cluster, got 0.9: .*--inner-momentum"):
        inside(outer_momentum=0.9)
