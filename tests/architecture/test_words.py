"""One word per thing: class names are unique across the rooms, and file names say what is inside."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import outerstep

SOURCE = Path(outerstep.__file__).parent

NO_NAMES = {
    "begun",
    "books",
    "crew",
    "desk",
    "door",
    "going_on",
    "holdings",
    "landing",
    "lines",
    "motion",
    "news",
    "seat",
    "standing",
    "wholes",
}
"""Words that were names once, and told a reader nothing."""


def classes() -> dict[str, list[str]]:
    """Class name → the files that define it. A leading underscore makes no other name of it."""
    found: dict[str, list[str]] = defaultdict(list)
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(file.relative_to(SOURCE).as_posix())
    return found


def test_every_class_name_has_one_meaning() -> None:
    repeated = {name: files for name, files in classes().items() if len(files) > 1}
    assert not repeated, f"rename all but one of each: {repeated}"


def test_file_names_say_what_is_inside() -> None:
    files = {file.relative_to(SOURCE).as_posix() for file in SOURCE.rglob("*.py") if file.stem in NO_NAMES}
    assert not files, f"these names do not say what is inside: {sorted(files)}"


def test_class_names_say_what_is_inside() -> None:
    named = {
        name: files for name, files in classes().items() if name.lower() in {name.replace("_", "") for name in NO_NAMES}
    }
    assert not named, f"these names do not say what is inside: {named}"
