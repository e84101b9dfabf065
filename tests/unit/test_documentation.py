"""The documentation is true as far as a program can tell: links, commands, flags, and what is made from the code."""

from __future__ import annotations

import functools
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from typer.main import get_command

from outerstep.cli import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
FENCE = re.compile(r"^ *(```+|~~~+) *(\w*)")
LINK = re.compile(r"\]\(([^)\s]+)\)")
STARTS = re.compile(r"(?:^|\s)(?:\S*/)?outerstep (?=[a-z-])")
WRAPPERS = {"run", "worker", "peer"}  # what follows the flags is the user's own command
ENDS = {"|", "||", "&&", ";", "&", ">", ">>", "<", "2>&1", "…", "--"}


def lines(page: Path) -> Iterator[tuple[int, str, str | None]]:
    """Number, text, and the language of the block of code that it is in (None: prose)."""
    fence: str | None = None
    language = ""
    for number, line in enumerate(page.read_text().splitlines(), 1):
        match = FENCE.match(line)
        if fence is None and match:
            fence, language = match[1], match[2]
        elif fence is not None and match and match[1].startswith(fence):
            fence = None
        else:
            yield number, line, None if fence is None else language


@functools.cache
def anchors(page: Path) -> set[str]:
    """As a forge makes them from headings: a repeated one gets a number."""
    found: dict[str, int] = {}
    made = set()
    for _, line, language in lines(page):
        if language is not None or not re.match(r"#{1,6} ", line):
            continue
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line.lstrip("#").strip()).replace("`", "").lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        made.add(slug if slug not in found else f"{slug}-{found[slug]}")
        found[slug] = found.get(slug, 0) + 1
    return made


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_to_something_that_is_there(name: str) -> None:
    page, broken = ROOT / name, []
    for number, line, language in lines(page):
        for link in () if language is not None else LINK.findall(re.sub(r"`[^`]*`", "", line)):
            place, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", place):
                continue
            target = (page.parent / place).resolve() if place else page
            is_missing = anchor and target.suffix == ".md" and target.exists() and anchor not in anchors(target)
            if not target.exists() or is_missing:
                broken.append(f"line {number}: {link}")
    assert not broken


@functools.cache
def program() -> Any:
    return get_command(app)


def commands_in(page: Path) -> Iterator[tuple[int, list[str]]]:
    """What a reader would type after `outerstep`, from blocks of commands."""
    left = ""
    for number, line, language in lines(page):
        if language not in ("bash", "console", "sh"):
            continue
        if language == "console":
            if not line.startswith("$ "):
                continue
            line = line[2:]
        line = left + line
        left = ""
        if line.endswith("\\"):
            left = line[:-1]
            continue
        found = STARTS.search(line)
        if found is None or line.lstrip().startswith("#"):
            continue
        words = shlex.shlex(line[found.end() :].replace("'", "’"), posix=False, punctuation_chars=False)
        words.whitespace_split, words.commenters, words.quotes = True, "#", '"'
        yield number, list(words)


def misspelt(words: list[str]) -> str:
    """ "": every command and flag exists."""
    command, path = program(), ["outerstep"]
    while words and hasattr(command, "commands"):
        word = words.pop(0)
        if word.startswith("-"):
            known = {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)}
            if word.partition("=")[0] not in {*known, "-h", "--help"}:
                return f"{' '.join(path)} has no {word}"
            takes = next((one for one in command.params if word in one.opts), None)
            if takes is not None and not getattr(takes, "is_flag", True) and "=" not in word and words:
                words.pop(0)
            continue
        if word in ENDS:
            return ""
        if "|" in word or word.isupper():  # one of several; a placeholder
            return ""
        if word not in command.commands:
            return f"{' '.join(path)} has no {word}"
        command = command.commands[word]
        path.append(word)
    known = {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)} | {"-h", "--help"}
    for word in words:
        if word in ENDS or word.startswith(("#", ">", "|")):
            break
        flag = word.partition("=")[0]
        if re.match(r"--?[a-zA-Z]", flag) and flag not in known:
            return f"{' '.join(path)} has no {flag}"
    return ""


@pytest.mark.parametrize("name", NAMES)
def test_commands_in_blocks_have_these_names_and_flags(name: str) -> None:
    found = ((number, misspelt(words)) for number, words in commands_in(ROOT / name))
    assert [f"line {number}: {what}" for number, what in found if what] == []


def test_a_misspelt_command_or_flag_is_found() -> None:
    """What finds nothing might look at nothing."""
    assert misspelt(["sever", "-m", "x"]) == "outerstep has no sever"
    assert misspelt(["server", "-m", "x", "--fragmints", "4"]) == "outerstep server has no --fragmints"
    assert misspelt(["control", "--server", "h:1", "plan", "--codek=int4"]) == "outerstep control plan has no --codek"
    assert misspelt(["worker", "--server", "h:1", "--", "python", "train.py", "--mine"]) == ""
    assert sum(1 for page in PAGES for _ in commands_in(page)) > 150


def test_make_targets_in_blocks_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        (page.name, match[1])
        for page in PAGES
        for _, line, language in lines(page)
        if language == "bash" and (match := re.match(r"make ([a-z-]+)", line))
    }
    assert len(named) > 5
    assert {target for _, target in named} <= targets, named


class _Lenient(yaml.SafeLoader):
    """Reads the tags of MkDocs' own, without doing what they say."""


_Lenient.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def _entries(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for below in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from _entries(below)


def test_every_page_is_in_the_navigation_of_the_site_once() -> None:
    config = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=_Lenient)
    named = list(_entries(config["nav"]))
    pages = [
        page
        for entry in named
        for page in (DOCS.glob(f"{entry[:-2]}/*.md") if entry.endswith("/*") else [DOCS / entry])
    ]
    inside = [page for page in pages if not page.is_relative_to(DOCS / "project")]
    assert sorted(inside) == sorted(DOCS.rglob("*.md"))
    project = {page.name for page in pages} - {page.name for page in inside}
    assert project == {"CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"}


def test_the_site_asks_no_other_host_for_fonts_scripts_or_pictures() -> None:
    config = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=_Lenient)
    assert config["theme"]["font"] is False
    loaded = re.compile(r"!\[[^\]]*\]\(https?:|<(?:img|script|iframe)[^>]*//")
    for page in DOCS.rglob("*.md"):
        prose = [(number, re.sub(r"`[^`]*`", "", line)) for number, line, language in lines(page) if language is None]
        elsewhere = [number for number, line in prose if loaded.search(line)]
        assert elsewhere == [], page


def test_a_diagram_that_a_browser_would_fetch_a_script_for_becomes_a_table() -> None:
    drawn = "# A\n\n```mermaid\nstateDiagram-v2\n    [*] --> INIT\n    INIT --> EXIT: left, died\n```\n\nEnd.\n"
    made = script("hooks").without_mermaid(drawn)
    assert (
        made
        == "# A\n\n| from | when | to |\n|---|---|---|\n| (outside) |  | INIT |\n| INIT | left, died | EXIT |\n\nEnd.\n"
    )
    for page in DOCS.rglob("*.md"):
        assert "```mermaid" not in script("hooks").without_mermaid(page.read_text()), page


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"documentation_{name}", DOCS / "site" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["commands.md", "events.md", "errors.md", "metrics.md", "messages.md", "python.md"])
def test_the_reference_is_what_the_code_says(name: str) -> None:
    reference = script("reference")
    assert sorted(reference.PAGES) == [
        "commands.md",
        "errors.md",
        "events.md",
        "messages.md",
        "metrics.md",
        "python.md",
    ]
    assert (DOCS / "reference" / name).read_text() == reference.PAGES[name](), "run: python docs/site/reference.py"


def test_a_page_that_loads_from_elsewhere_or_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<img src="https://x.example/1.png"><a href="b.html">b</a><a href="#c">c</a>')
    (tmp_path / "a.css").write_text("@import '//fonts.example/f.css';")
    assert script("check").problems(tmp_path) == [
        "a.html loads https://x.example/1.png",
        "a.html leads to b.html, which is not there",
        "a.html leads to #c, which has no such anchor",
        "a.css loads //fonts.example/f.css",
    ]
