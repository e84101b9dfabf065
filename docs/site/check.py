"""Does the built site ask another host for anything, or lead to a page that is not there? `make docs` runs it."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
ELSEWHERE = re.compile(r"^(?:[a-z]+:)?//", re.IGNORECASE)
OF_A_STYLE = re.compile(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')\s]+)")


class Seen(HTMLParser):
    """What a page loads, where it leads, and the anchors in it."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.led: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag in LOADS and given.get("rel") != "canonical":
            self.loaded += [given[LOADS[tag]]] if LOADS[tag] in given else []
        if tag == "a" and "href" in given:
            self.led.append(given["href"])
        if "mermaid" in given.get("class", ""):
            self.loaded.append("//unpkg.com/mermaid")  # what the theme would do for it


def problems(site: Path) -> list[str]:
    pages = {}
    for file in sorted(site.rglob("*.html")):
        pages[file] = Seen()
        pages[file].feed(file.read_text())
    found = []
    for file, seen in pages.items():
        name = file.relative_to(site)
        found += [f"{name} loads {link}" for link in seen.loaded if ELSEWHERE.match(link)]
        for link in [*seen.loaded, *seen.led]:
            place, anchor = urldefrag(link)
            if ":" in place.split("/")[0] or ELSEWHERE.match(place) or place.startswith("/"):
                continue
            target = (file.parent / unquote(place)).resolve() if place else file
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                found.append(f"{name} leads to {link}, which is not there")
            elif anchor and target in pages and unquote(anchor) not in pages[target].anchors | {"__top"}:
                found.append(f"{name} leads to {link}, which has no such anchor")
    for style in site.rglob("*.css"):
        found += [f"{style.relative_to(site)} loads {link}" for link in OF_A_STYLE.findall(style.read_text())]
    return found


def main() -> None:
    found = problems(Path(sys.argv[1]))
    for line in found:
        print(line)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
