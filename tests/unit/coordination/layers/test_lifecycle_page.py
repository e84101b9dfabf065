"""The page about a group's life says what the table says."""

from pathlib import Path

from outerstep.coordination.layers.lifecycle import EDGES, STEPS, GroupState, SubStep
from outerstep.coordination.layers.lifecycle_page import NODES, renew

PAGE = Path(__file__).parents[4] / "docs/concepts/lifecycle.md"


def test_the_page_is_made_from_the_table() -> None:
    page = PAGE.read_text()
    command = "python -m outerstep.coordination.layers.lifecycle_page docs/concepts/lifecycle.md"
    assert page == renew(page), f"run: {command}"


def test_every_edge_is_in_a_diagram() -> None:
    drawn = [line.strip() for line in PAGE.read_text().splitlines() if " --> " in line]
    for edge in EDGES:
        assert any(line.partition(": ")[2].split(", ").count(edge.happening) for line in drawn), edge


def test_every_sub_step_has_a_name_in_the_diagram_that_we_follow() -> None:
    assert NODES.keys() == set(SubStep) - {SubStep.NONE}
    assert {state for state in GroupState if STEPS[state] == (SubStep.NONE,)} == {"INIT", "IDLE", "EXIT"}
