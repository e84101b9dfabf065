"""Groups leave a demo together; if they do not, what they hold is told as it is."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from outerstep.demo.ends import End, verdict
from outerstep.demo.member import AgreementsFromAbove, is_over
from outerstep.events import RoundReport


def report(version: int, *from_above: int) -> RoundReport:
    return RoundReport(
        worker="left", step=5 * version, fragment=0, version=version, adoption="adopted", counted=True,
        participants=(), steps_sent=5, steps_discarded=0, bytes_sent=0, bytes_received=0, waited_s=0.0, metrics={},
        from_above=from_above,
    )  # fmt: skip


def test_a_round_that_a_group_missed_is_no_agreement_from_above(tmp_path: Path) -> None:
    """Held up, its own version jumps by more than one, too: it used to leave an agreement earlier than the others."""
    options = Namespace(cluster="east", until=tmp_path / "until")
    options.until.write_text(json.dumps({"east": 50, "west": 50}))
    seen = AgreementsFromAbove()
    for version, told in ((50, (45, 50)), (53, (45, 50)), (55, (50, 55)), (58, (50, 55))):
        seen(report(version, *told))
        assert not is_over(options, seen)
    seen(report(60, 55, 60))
    assert is_over(options, seen)


def test_nobody_ends_before_it_is_said_when(tmp_path: Path) -> None:
    seen = AgreementsFromAbove()
    seen(report(60, 50, 55, 60))
    assert not is_over(Namespace(cluster="east", until=tmp_path / "until"), seen)


LAST, LATE = "t60", "t61"


def test_all_that_end_at_one_version_are_said_to_have_the_same_weights() -> None:
    ends = {
        "top": End("a", "top", 12, LAST),
        "east": End("a", "east", 60, LAST),
        "east-left": End("a", "east", 60, LAST),
    }
    assert verdict(ends) == "All servers and groups ended with the same weights."


def test_one_that_was_held_up_at_the_end_is_no_fault_and_is_named() -> None:
    ends = {"west": End("a", "west", 60, LAST), "east-left": End("b", "east", 61, LATE)}
    said = verdict(ends)
    assert "west at round 60 of west; east-left at round 61 of east" in said
    assert "must not happen" not in said


def test_different_weights_under_one_version_are_a_fault() -> None:
    ends = {"west": End("a", "west", 60, LAST), "east": End("b", "east", 60, LAST), "top": End("c", "top", 13, LATE)}
    assert verdict(ends) == "west, east hold the same version with different weights: this must not happen."
