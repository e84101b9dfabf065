"""The files that make the page: plain HTML, CSS and JavaScript out of this package, the same for everybody.

They are our own, and those of the library that draws the charts (library.py).

They are read once. A browser asks each time whether it still has the newest (ETag), so an update of the server is an
update of the page. The headers let the page load nothing but these files, run no script that is not one of them, and
turn no text into markup: what a worker calls itself stays text even if the page has a mistake.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from importlib.resources import files

from ..wire.http_request import HttpRequest
from ..wire.routes import Reply
from .library import REMEDY, chart_library
from .logins import PAGE_PATH

log = logging.getLogger(__name__)

KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
NAMES = ("page.css", "page.js", "charts.js", "map.js", "words.js", "icon.svg")
LIBRARY_NAMES = ("uplot.js", "uplot.css")
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
ALWAYS = (
    ("Content-Security-Policy", POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cache-Control", "no-cache"),
)


def page_files() -> dict[str, Callable[[HttpRequest], Reply]]:
    """Path → what answers."""
    found = {PAGE_PATH: _own("page.html"), f"{PAGE_PATH}/": _to_page}
    return found | {f"{PAGE_PATH}/{name}": _own(name) for name in NAMES} | _library_files()


def _library_files() -> dict[str, Callable[[HttpRequest], Reply]]:
    library = chart_library()
    if not library.is_here():
        log.warning("the page has no charts: %s is not here. To fetch it: %s", library.name, REMEDY)
    paths = {f"{PAGE_PATH}/{name}": library.read(name) for name in LIBRARY_NAMES}
    return {path: _serve(path, data) if data is not None else _nothing for path, data in paths.items()}


def _nothing(request: HttpRequest) -> Reply:
    """The page says what is missing, where its charts would be."""
    return Reply(b"", status=404, headers=ALWAYS)


def _to_page(request: HttpRequest) -> Reply:
    """As people type it."""
    return Reply(b"", status=303, headers=(("Location", PAGE_PATH), *ALWAYS))


def _own(name: str) -> Callable[[HttpRequest], Reply]:
    return _serve(name, files(__package__).joinpath("static", name).read_bytes())


def _serve(name: str, data: bytes) -> Callable[[HttpRequest], Reply]:
    tag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
    headers = (("Content-Type", KINDS[name.rpartition(".")[2]]), ("ETag", tag), *ALWAYS)

    def answer(request: HttpRequest) -> Reply:
        if request.headers.get("if-none-match") == tag:
            return Reply(b"", status=304, headers=headers)
        return Reply(data, headers=headers)

    return answer
