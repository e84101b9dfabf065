"""What CI does with failed tests: `tests/unsteady.py`, after real runs of pytest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "unsteady.py"
STEADY = "def test_steady():\n    pass\n"
BROKEN = "def test_broken():\n    assert 1 == 2\n"
ONCE = """
from pathlib import Path
def test_once():
    runs = Path("runs")
    before = len(runs.read_text()) if runs.exists() else 0
    runs.write_text("x" * (before + 1))
    assert before not in {fails}
"""


def run(folder: Path, *tests: str) -> tuple[int, str]:
    for number, text in enumerate(tests):
        (folder / f"test_{number}.py").write_text(text)
    first = subprocess.run(
        [sys.executable, "-m", "pytest", "-q"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert first.returncode == 1, first.stdout + first.stderr
    done = subprocess.run([sys.executable, str(PROGRAM)], cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_one_that_passes_three_times_alone_is_named_and_no_failure(tmp_path: Path) -> None:
    code, said = run(tmp_path, STEADY, ONCE.format(fails={0}))
    assert code == 0
    assert said.splitlines()[-1].startswith("UNSTEADY, failed in the full run and passed alone 3 times of 3: test_1.py")
    assert len((tmp_path / "runs").read_text()) == 4


@pytest.mark.parametrize("fails", [{0, 1}, {0, 3}])
def test_one_that_fails_again_is_a_failure(tmp_path: Path, fails: set[int]) -> None:
    assert run(tmp_path, STEADY, ONCE.format(fails=fails))[0] == 1


def test_one_broken_beside_it_is_a_failure(tmp_path: Path) -> None:
    assert run(tmp_path, BROKEN, ONCE.format(fails={0}))[0] == 1


def test_more_than_three_are_not_run_again(tmp_path: Path) -> None:
    code, said = run(tmp_path, *[ONCE.replace('"runs"', f'"runs{i}"').format(fails={0}) for i in range(4)])
    assert (code, said) == (1, "4 tests failed: too many to be called unsteady (at most 3)\n")


def test_a_run_that_never_came_to_its_tests_is_a_failure(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(PROGRAM)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
