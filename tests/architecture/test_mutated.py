"""`make mutants` changes every decision: each file of the pure rooms belongs to one of its rooms, with its tests."""

from __future__ import annotations

import fnmatch
from collections import Counter
from pathlib import Path

import mutants

SOURCES = mutants.ROOT / "src" / "outerstep"
PURE = [file for room in ("coordination", "core") for file in sorted((SOURCES / room).rglob("*.py"))]


def rooms_of(file: Path) -> list[str]:
    path = file.relative_to(mutants.ROOT).as_posix()
    return [name for name, room in mutants.ROOMS.items() if any(fnmatch.fnmatch(path, one) for one in room.files)]


def test_every_file_of_the_pure_rooms_is_changed_in_one_room() -> None:
    assert len(PURE) > 100, "the files were not found"
    files = {file.relative_to(mutants.ROOT).as_posix(): rooms_of(file) for file in PURE if file.stem != "__init__"}
    wrong = {path: rooms for path, rooms in files.items() if len(rooms) != 1 and path not in mutants.UNCHANGED}
    assert not wrong, f"name each in `files` of one room of tests/mutants.py, and its tests beside: {wrong}"
    assert {path: files[path] for path in mutants.UNCHANGED} == {path: [] for path in mutants.UNCHANGED}


def test_every_room_has_files_and_tests() -> None:
    changed = Counter(name for file in PURE for name in rooms_of(file))
    for name, room in mutants.ROOMS.items():
        assert changed[name], f"{name} changes nothing"
        missing = [test for test in room.tests if not any(mutants.ROOT.glob(test))]
        assert not missing, f"{name} runs tests that are not there: {missing}"


def page(*modules: tuple[str, int, int]) -> str:
    """Of modules with so many changes, of which so many were killed."""
    rows = [f"| {name} | {all_} | {killed} | x | 0 | {all_ - killed} | 0 | 0 |" for name, all_, killed in modules]
    said = [f"**{name.split()[0]}**\n\n- Open\n  - `{name}`" for name, all_, killed in modules if all_ > killed]
    head = "| module | changes | killed | share | explained | open | wording | not run |\n|---|" + 7 * "--:|"
    return "\n".join([head, *rows, "\n### Survivors\n", "\n\n".join(said)]) + "\n"


def test_a_run_of_some_modules_leaves_what_the_page_says_of_the_others() -> None:
    old = page(("core.a", 10, 9), ("core.b", 10, 5), ("core.c §", 4, 4), ("all", 24, 18))
    made = mutants.merged(old, page(("core.b §", 20, 20), ("all", 20, 20)))
    names = [line.split(" | ")[0] for line in made.splitlines() if line.startswith("| ")]
    assert names == ["| module", "| core.a", "| core.b §", "| core.c §", "| all"]
    assert "| all | 34 | 33 | 97.1% | 0 | 1 | 0 | 0 |" in made
    assert "**core.a**\n\n- Open\n  - `core.a`" in made
    assert "**core.b**" not in made, "its survivors are killed"
    assert mutants.merged(made, page(("core.b §", 20, 20), ("all", 20, 20))) == made
