"""What MkDocs is told beside mkdocs.yml, so that the pages stay as a forge shows them.

- `folder/*` in the navigation stands for every page of a folder, by file name.
- A link that leaves docs/ goes to a page of the site (CHANGELOG.md …) or to a copy of the file in it.
- A diagram in Mermaid, which a forge draws, becomes a table of its arrows: to draw it here, a browser would have to
  fetch three megabytes of script.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

PROJECT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)#\s]+)((?:#[^)\s]*)?)(\))")
MERMAID = re.compile(r"^```mermaid\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ARROW = re.compile(r"^ *(\S+) --> (\S+?)(?:: (.*))?$", re.MULTILINE)
LABEL = re.compile(r"^ *(\w+): (.+)$", re.MULTILINE)
FENCE = re.compile(r"^( *)(```+|~~~+)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.nav = _unfold(config.nav, Path(config.docs_dir))
    return config


def _unfold(entry: Any, docs: Path) -> Any:
    if isinstance(entry, list):
        return [_unfold(one, docs) for one in entry]
    if isinstance(entry, dict):
        return {name: _unfold(below, docs) for name, below in entry.items()}
    if isinstance(entry, str) and entry.endswith("/*"):
        return sorted(path.relative_to(docs).as_posix() for path in (docs / entry[:-2]).glob("*.md"))
    return entry


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Pages and files from outside docs/ that something links to."""
    from mkdocs.structure.files import File

    root = Path(config.docs_dir).parent
    for name in PROJECT_PAGES:
        files.append(File.generated(config, f"project/{name}", content=(root / name).read_text()))
    style = Path(config.docs_dir) / "site" / "site.css"
    files.append(File.generated(config, "assets/site.css", abs_src_path=str(style)))
    for path in sorted(_linked_outside(files, root)):
        files.append(File.generated(config, _copy_of(path, root), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    root = Path(config.docs_dir).parent
    here = page.file.src_uri
    folder = root if here.startswith("project/") else (Path(config.docs_dir) / here).parent

    def rewritten(match: re.Match[str]) -> str:
        target = _place_in_site((folder / match[2]).resolve(), root)
        if target is None:
            return match[0]
        return f"{match[1]}{posixpath.relpath(target, posixpath.dirname(here) or '.')}{match[3]}{match[4]}"

    markdown = without_mermaid(markdown)
    return "\n".join(LINK.sub(rewritten, line) if is_prose else line for line, is_prose in _lines(markdown))


def without_mermaid(markdown: str) -> str:
    """Each diagram of states as a table: from, what happens, to."""

    def rows(match: re.Match[str]) -> str:
        arrows = ARROW.findall(match[1])
        ends = {"[*]": "(outside)", **dict(LABEL.findall(match[1]))}
        lines = [f"| {ends.get(a, a)} | {what.strip()} | {ends.get(b, b)} |" for a, b, what in arrows]
        return "\n".join(["| from | when | to |", "|---|---|---|", *lines])

    return MERMAID.sub(rows, markdown)


def _place_in_site(path: Path, root: Path) -> str | None:
    """Where a link to this file or folder of the repository goes."""
    docs = root / "docs"
    if path == root / "README.md":
        return "index.md"
    if path.parent == root and path.name in PROJECT_PAGES:
        return f"project/{path.name}"
    if path.is_dir():
        first = sorted(path.glob("*.md")) or sorted(file for file in path.iterdir() if file.is_file())
        return _place_in_site(first[0], root) if first else None
    if path.is_relative_to(docs):
        return path.relative_to(docs).as_posix()
    return _copy_of(path, root) if path.is_file() and path.is_relative_to(root) else None


def _copy_of(path: Path, root: Path) -> str:
    """A browser shows text; a file that ends in .md would become a page."""
    return f"files/{path.relative_to(root).as_posix()}.txt"


def _linked_outside(files: Files, root: Path) -> set[Path]:
    found = set()
    for file in files.documentation_pages():
        folder = root if file.src_uri.startswith("project/") else (root / "docs" / file.src_uri).parent
        for line, is_prose in _lines(file.content_string):
            for match in LINK.finditer(line) if is_prose else ():
                target = (folder / match[2]).resolve()
                place = _place_in_site(target, root)
                if place is not None and place.startswith("files/"):
                    found.add(root / place.removeprefix("files/").removesuffix(".txt"))
    return found


def _lines(markdown: str) -> list[tuple[str, bool]]:
    """Each line, and whether it is prose: links in a block of code are code."""
    found, fence = [], ""
    for line in markdown.split("\n"):
        match = FENCE.match(line)
        if match and (not fence or match[2].startswith(fence)):
            fence = "" if fence else match[2]
            found.append((line, False))
        else:
            found.append((line, not fence))
    return found
