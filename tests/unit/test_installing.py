"""The line that installs an extra names where this package came from, everywhere in the same way."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from outerstep.installing import install_line, requirement

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
OF_AN_INDEX = re.compile(r"pip install [^`\n]*[\"']?outerstep\b(?!/)")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize(
    ("origin", "typed"),
    [
        ({"url": "file:///home/me/outerstep", "dir_info": {"editable": True}}, ["-e", "/home/me/outerstep[hf]"]),
        ({"url": "file:///home/me/my%20clone", "dir_info": {}}, ["/home/me/my clone[hf]"]),
        (
            {"url": "file:///tmp/outerstep-0.3-py3-none-any.whl", "archive_info": {}},
            ["outerstep[hf] @ file:///tmp/outerstep-0.3-py3-none-any.whl"],
        ),
        (
            {"url": "https://x.example/o.git", "vcs_info": {"vcs": "git", "commit_id": "ab12"}},
            ["outerstep[hf] @ git+https://x.example/o.git@ab12"],
        ),
        (None, ["outerstep[hf]"]),
    ],
)
def test_it_names_the_clone_the_file_or_the_repository_that_this_package_came_from(
    origin: dict[str, object] | None, typed: list[str]
) -> None:
    said = requirement(None if origin is None else json.dumps(origin), "hf")
    assert shlex.split(said) == typed, "as a shell reads it"


def test_without_an_extra_it_is_the_package_and_pip_may_be_another_pythons() -> None:
    assert requirement(None) == "outerstep"
    assert install_line(pip="python3 -m pip").startswith("python3 -m pip install ")


def test_one_place_in_the_source_decides_the_line() -> None:
    found = {file.name: match[0] for file in SOURCES if (match := OF_AN_INDEX.search(file.read_text()))}
    assert found == {}, "use install_line"


def test_every_extra_that_a_message_names_exists() -> None:
    named = {name for file in SOURCES for name in re.findall(r"install_line\(['\"](\w+)['\"]\)", file.read_text())}
    assert named >= {"lan", "torchft", "demo"}
    assert named <= EXTRAS.keys()


def test_no_page_installs_a_package_of_this_name_from_an_index() -> None:
    found = {file.name: match[0] for file in PAGES if (match := OF_AN_INDEX.search(file.read_text()))}
    assert found == {}, "write pip install -e '.[EXTRA]', from a clone"
    extras = {name for file in PAGES for name in re.findall(r"pip install -e ['\"]\.\[([\w,]+)\]", file.read_text())}
    assert {"hf", "accelerate", "lightning"} <= extras <= EXTRAS.keys()
