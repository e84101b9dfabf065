"""What a layer and the one around it must be to each other."""

from __future__ import annotations

import math

import pytest

from outerstep.coordination.layers.between import LayerTerms, check_inner_momentum, warnings_about
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
        (LayerTerms(math.nan, 60.0), LayerTerms(momentum=0.5, waits_s=120.0), "may have some in this cluster and 0.5"),
        (MEAN, LayerTerms(0.9, 60.0), r"timeout .* must be below heartbeat_timeout_s .*, got 60 and 60 s.*raise"),
        (LayerTerms(0.0, math.inf), LayerTerms(0.9, 60.0), "got inf and 60 s"),
        (MEAN, LayerTerms(0.9, math.inf), None),
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
