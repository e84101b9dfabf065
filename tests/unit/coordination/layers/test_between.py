"""What a layer and the one around it must be to each other."""

from __future__ import annotations

import math

import pytest

from outerstep.config import ServerConfig
from outerstep.config.worker import TorchftConfig
from outerstep.coordination.layers.between import (
    LayerTerms,
    check_inner_momentum,
    check_patience,
    too_patient,
    wait_for_above_s,
    warnings_about,
)
from outerstep.defaults import OUTER_PATIENCE
from outerstep.errors import ConfigError

MEAN = LayerTerms(momentum=0.0, waits_s=60.0)


def test_momentum_inside_is_refused_before_anybody_was_asked_unless_somebody_insists() -> None:
    check_inner_momentum(0.0, insists=False)
    check_inner_momentum(0.9, insists=True)
    with pytest.raises(ConfigError, match=r"outer_momentum must be 0 in a cluster, got 0.9: .*inner_momentum=True"):
        check_inner_momentum(0.9, insists=False)
    with pytest.raises(ConfigError, match=r"must be left out in a cluster, got 'adamw', which may have momentum"):
        check_inner_momentum(math.nan, "adamw", insists=False)


@pytest.mark.parametrize(
    ("inside", "outside", "says"),
    [
        (MEAN, LayerTerms(momentum=0.9, waits_s=120.0), None),
        (LayerTerms(0.9, 60.0), LayerTerms(momentum=0.0, waits_s=120.0), None),
        (
            LayerTerms(0.9, 60.0),
            LayerTerms(momentum=0.5, waits_s=120.0),
            "one level only, got 0.9 .*and 0.5 in the run",
        ),
        (LayerTerms(0.9, 60.0), LayerTerms(momentum=math.nan, waits_s=120.0), None),  # it has not said
        (LayerTerms(math.nan, 60.0), LayerTerms(momentum=0.5, waits_s=120.0), "may use some in this cluster and 0.5"),
        (MEAN, LayerTerms(0.9, 60.0), r"timeout .* must be below heartbeat_timeout_s .*, got 60 and 60 s.*restart"),
        (LayerTerms(0.0, math.inf), LayerTerms(0.9, 60.0), "got inf and 60 s"),
        (MEAN, LayerTerms(0.9, math.inf), None),
        (
            LayerTerms(0.0, math.inf, member_leads=True),
            LayerTerms(0.9, math.inf),
            "got inf and inf s: else one dead member holds up the run above",
        ),
        (MEAN, LayerTerms(0.9, 120.0, 60.0), r"timeout .* must be below round_deadline_s .*, got 60 and 60 s"),
        (LayerTerms(0.0, 9.0, 70.0), LayerTerms(0.9, 120.0, 60.0), "round_deadline_s must be below .*got 70 and 60 s"),
        (LayerTerms(0.0, 9.0, 50.0), LayerTerms(0.9, 120.0, 60.0), None),
    ],
)
def test_what_the_layer_above_tells_is_held_against_the_clusters_own(
    inside: LayerTerms, outside: LayerTerms, says: str | None
) -> None:
    found = warnings_about(inside, outside)
    if says is None:
        assert found == []
    else:
        assert len(found) == 1
        with pytest.raises(ConfigError, match=says):
            raise ConfigError(found[0])


def test_both_may_be_wrong() -> None:
    assert len(warnings_about(LayerTerms(0.9, 120.0), LayerTerms(0.9, 120.0))) == 2


SERVER, REPLICAS = LayerTerms(0.0, 60.0), LayerTerms(0.0, 60.0, member_leads=True)


@pytest.mark.parametrize(
    ("inside", "outside", "says"),
    [
        (LayerTerms(0.0, math.inf), LayerTerms(0.9, 60.0), r"got inf and 60 s: else one dead member stops the cluster"),
        (
            REPLICAS,
            LayerTerms(0.9, 60.0),
            r"transfer_timeout_s\) must be below .*got 60 and 60 s: .* a leader that has",
        ),
        (SERVER, LayerTerms(0.9, 120.0, 60.0), r"below round_deadline_s of the run above, got 60 and 60 s: .*restart"),
        (LayerTerms(0.0, 9.0, 70.0), LayerTerms(0.9, 120.0, 60.0), r"round_deadline_s must be .*got 70 and 60 s"),
        (SERVER, LayerTerms(0.9, 50.0, 40.0), r"below round_deadline_s of the run above, got 60 and 40 s"),
    ],
)
def test_a_cluster_that_would_be_given_up_for_one_dead_member_is_refused(
    inside: LayerTerms, outside: LayerTerms, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        check_patience(inside, outside)
    assert len(warnings_about(inside, outside)) >= 1, "later it is warned of"


@pytest.mark.parametrize(
    ("inside", "outside"),
    [
        (SERVER, LayerTerms(0.9, 60.0)),  # its server says that the cluster lives, whoever it waits for
        (LayerTerms(0.0, math.inf), LayerTerms(0.9, math.inf)),  # nobody gives up anybody
        (REPLICAS, LayerTerms(0.9, math.inf)),
        (SERVER, LayerTerms(0.9, 120.0, 60.0, is_decided=True)),  # which may be another with the next round
        (LayerTerms(0.9, 60.0), LayerTerms(0.9, 120.0)),
    ],
)
def test_what_cannot_cost_a_cluster_its_place_is_no_reason_to_refuse_it(
    inside: LayerTerms, outside: LayerTerms
) -> None:
    check_patience(inside, outside)


def test_what_the_layers_inside_one_another_wait_by_default_is_refused_nowhere() -> None:
    waits_s = ServerConfig(num_workers=1).heartbeat_timeout_s
    top, inner = LayerTerms(0.9, waits_s), LayerTerms(0.0, waits_s / OUTER_PATIENCE)
    check_patience(inner, top)
    check_patience(inner, inner)  # three layers, by flags
    check_patience(LayerTerms(0.0, TorchftConfig().transfer_timeout_s, member_leads=True), top)


@pytest.mark.parametrize(
    ("deadline_s", "waits_s"), [(None, 60.0), (0.0, 60.0), (59.0, 60.0), (61.0, 61.0), (600.0, 600.0), (601.0, 600.0)]
)
def test_members_wait_as_long_as_a_round_above_takes_within_bounds(deadline_s: float | None, waits_s: float) -> None:
    assert wait_for_above_s(60.0, LayerTerms(deadline_s=deadline_s)) == waits_s
    assert wait_for_above_s(0.5, LayerTerms(deadline_s=None)) == 0.5, "a second is not more than nothing"


def test_each_setting_that_is_too_long_is_found_with_what_it_is_too_long_beside() -> None:
    found = too_patient(LayerTerms(0.0, 120.0, 70.0), LayerTerms(0.9, 120.0, 60.0, is_decided=True))
    assert [(one.name, one.value, one.beside, one.limit) for one in found] == [
        ("timeout", 120.0, "timeout", 120.0),
        ("timeout", 120.0, "round_deadline_s", 60.0),
        ("round_deadline_s", 70.0, "round_deadline_s", 60.0),
    ]
    slow, late, *_ = warnings_about(LayerTerms(0.0, 120.0, 70.0), LayerTerms(0.0, 120.0, 60.0, is_decided=True))
    assert "holds up the run above" in slow
    assert "costs the whole cluster its place in a round" in late
