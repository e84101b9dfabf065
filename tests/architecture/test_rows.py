"""The tables of docs/operating/faults.md and the tests belong together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import rows

FOUND = rows.read_rows(rows.PAGE.read_text())
PROOFS = rows.find_proofs()


def test_the_page_has_every_row_in_order() -> None:
    assert list(FOUND) == [f"F{i:02}" for i in range(1, 31)] + [f"B{i:02}" for i in range(1, 22)]
    assert all(FOUND.values())


def test_a_test_names_only_rows_that_there_are() -> None:
    assert {proof.row for proof in PROOFS} <= FOUND.keys()


def test_every_row_has_a_test() -> None:
    assert rows.missing_rows(FOUND, PROOFS) == []


def test_marks_are_found_on_functions_classes_and_parameters(tmp_path: Path) -> None:
    (tmp_path / "test_made_up.py").write_text(
        "import pytest, subprocess\n"
        '@pytest.mark.row("F01", "F02")\ndef test_one(): ...\n'
        '@pytest.mark.row("B01")\nclass TestSome:\n    def test_two(self): ...\n'
        '    @pytest.mark.row("B02", level="WAN")\n    def test_three(self): ...\n'
        '@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.row("B03"))])\ndef test_four(x): ...\n'
    )
    found = [(proof.row, proof.test, proof.level) for proof in rows.find_proofs(tmp_path)]
    assert found == [
        ("F01", "test_one", "processes"),
        ("F02", "test_one", "processes"),
        ("B03", "test_four", "processes"),
        ("B01", "test_two", "processes"),
        ("B01", "test_three", "processes"),
        ("B02", "test_three", "WAN"),
    ]


def test_the_script_prints_both_sides_and_says_what_is_missing() -> None:
    done = subprocess.run([sys.executable, rows.__file__], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "test_bad_inputs.py::test_bad_json_is_400" in done.stdout
    assert "no test" not in done.stdout
