"""`outerstep data`: what it says of a run in layers."""

from __future__ import annotations

from rich.console import Console

from outerstep.cli.data import render
from outerstep.observe.status import DataStatus

TOP = DataStatus(
    name="train",
    samples=96,
    unit_samples=4,
    epochs=1,
    units=24,
    done=10,
    leased=6,
    done_by={"east": 10},
    leased_to={"east": 6},
)


def shown(*found: DataStatus, **clusters: int) -> str:
    console = Console(width=120, color_system=None)
    with console.capture() as captured:
        console.print(render(found, clusters))
    return captured.get()


def test_at_the_top_a_cluster_is_told_from_a_worker() -> None:
    assert "east (a cluster of 2)" in shown(TOP, east=2)
    assert "a cluster of" not in shown(TOP)
    assert "layer above" not in shown(TOP)


def test_at_a_clusters_server_it_says_what_was_granted_and_what_is_waited_for() -> None:
    below = DataStatus(name="train", units=24, granted=7, waiting_for="the layer above, which does not answer")
    text = " ".join(shown(below).split())
    assert "leased from the layer above, and not done here: 7; waiting for the layer above, which does not" in text
    assert "waiting for" not in shown(DataStatus(name="train", units=24, granted=7))
