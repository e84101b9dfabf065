"""The page's side of a server or a peer: its routes, and the thread that keeps open pages up to date.

It reads events and asks for the status, like anybody. No round waits for it: events are kept in a ring, and the rest
happens on a thread of its own, which looks into the ring; seldom while no page is open, for then it only keeps the
curves for one that is opened later. That thread paces itself: it rests so long after each update that its updates take
no more than `SHARE` of a core, however many workers a status is about. It sleeps until something may be due, for waking
up costs as much as telling a few readers.

| path | who | what |
|---|---|---|
| `GET /page` and its files | everybody | the page itself, the same for all; nothing of the run is in it |
| `POST /page/link` | a token that reads | a one-time code for a login link (logins.py) |
| `POST /page/login` | whoever has the code | a cookie |
| `POST /page/logout` | everybody | ends the session in this browser |
| `GET /page/state` | a session | what a page is greeted with, as JSON |
| `GET /page/live` | a session | the same, and then every change, as server-sent events (streams.py) |
| `GET /page/model` | a session | the newest model, as `GET /v1/model` |

Orders go to `/v1/control`, with the admin token that the operator types into the page.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from msgspec import Struct

from ..errors import Unauthorized
from ..observe import EventRing
from ..observe.status import Status
from ..security import Caller
from ..security.guard import check_own_page
from ..wire.http_request import HttpRequest
from ..wire.messages import JSON_TYPE, PAGE_LINK_PATH, PageCode, decode_json, encode_json
from ..wire.routes import PlainRoute, Reply, Route
from .files import page_files
from .history import MOST_POINTS, PageHistory
from .logins import PAGE_PATH, Logins, PageTokens, cookie_in
from .streams import PageStreams

log = logging.getLogger(__name__)

UPDATE_S = 2.0  # between two updates, if nothing happens
SOONEST_S = 0.5  # if something does; the ring is looked into as often while somebody watches
UNWATCHED_S = 10.0  # between two updates, if nobody does
SHARE = 0.005  # of a core
LOOK_S = 5.0
MOST_EVENTS = 16384  # between two updates; of more the oldest are not told
MOST_LOGIN_BYTES = 1024
NO_STORE = (("Content-Type", JSON_TYPE), ("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"))


class PageLogin(Struct, frozen=True, forbid_unknown_fields=True):
    """What the page sends to log in."""

    code: str


@dataclass
class _Rhythm:
    """When the last update was, and when streams are looked at again, in seconds of the monotonic clock; and how long
    to rest after an update."""

    updated: float = -math.inf
    look_at: float = 0.0
    rest_s: float = 0.0


class Dashboard:
    """`status`: of the service that it shows. `read_model`: answers with the model; None = there is none to download.
    `takes_orders`: the service takes them from its page, if they come with the admin token. `happened` is the EventSink
    that the page reads from."""

    def __init__(
        self,
        status: Callable[[], Status],
        *,
        read_model: Callable[[HttpRequest], Reply] | None = None,
        takes_orders: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._status, self._read_model, self._clock = status, read_model, clock
        self._facts = {"model": read_model is not None, "orders": takes_orders}
        self._logins = Logins(None, clock, secure=False)
        self.happened = EventRing(MOST_EVENTS, clock=clock)
        self._history = PageHistory()
        self.streams = PageStreams(time.monotonic)
        self._stopping = threading.Event()
        self._shown = b"{}"
        self._pace = _Rhythm()
        self._has_failed = False
        self._lock = threading.Lock()  # of the history and what is shown: `GET /page/state` asks from another thread
        self._thread = threading.Thread(target=self._live, name="outerstep-page", daemon=True)
        self.routes: dict[tuple[str, str], Route] = self._make_routes()

    def guard_with(self, tokens: PageTokens | None, *, tls: bool) -> None:
        """Before it is served: the tokens of the port. None = it asks for none."""
        self._logins = Logins(tokens, self._clock, secure=tls)

    def make_link(self, token: str) -> PageCode:
        """For a holder of the token of this name."""
        return self._logins.make_code(token)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Whoever watches sees the last of it."""
        self._stopping.set()
        self.streams.wake()
        if self._thread.is_alive():
            self._thread.join(5.0)
        else:
            self.streams.close()

    def let_go(self) -> None:
        """In a process that was forked: the connections are its parent's."""
        self.streams.let_go()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        while not self._stopping.is_set():
            try:
                self._turn()
            except (
                Exception
            ):  # a page that does not move is no reason to lose the thread, and no training depends on it
                if not self._has_failed:
                    log.exception("the page could not be updated; it is tried again, without another line like this")
                self._has_failed = True
                self._stopping.wait(UPDATE_S)
        with contextlib.suppress(Exception):  # the last word; the service may be gone already
            self._update()
        self.streams.close()

    def _turn(self) -> None:
        """Wait until something is to be done, and do it."""
        self.streams.wait(max(self._wake_at() - time.monotonic(), 0.0))
        pace, began = self._pace, time.thread_time()
        self.streams.greet(self._greeting)
        now = time.monotonic()
        if now >= pace.look_at:
            self.streams.look()
            pace.look_at = now + LOOK_S
        if now < self._due_at():
            self.streams.remind()  # an update may be far off, after one that took long
            return
        self._update()
        pace.rest_s = (time.thread_time() - began) / SHARE

    def _wake_at(self) -> float:
        """When the next thing may be due. An event wakes nobody, so the ring is looked into now and then, but not while
        no update could follow."""
        due_at = self._due_at()
        if not self.streams.has_readers:
            return due_at
        glance_at = max(time.monotonic() + SOONEST_S, self._pace.updated + self._pace.rest_s)
        return min(due_at, glance_at, self._pace.look_at, self.streams.comment_at)

    def _due_at(self) -> float:
        """When the next update is: soon if something has happened, and seldom if nobody watches."""
        pause_s = UNWATCHED_S
        if self.streams.has_readers:
            pause_s = UPDATE_S if self.happened.is_empty else SOONEST_S
        return self._pace.updated + max(pause_s, self._pace.rest_s)

    def _update(self) -> None:
        """Take in what happened, and tell everybody who watches."""
        with self._lock:
            changes = self._take_in()
        if self.streams.has_readers:
            self.streams.send(_event("update", changes))

    def _take_in(self) -> bytes:
        self._pace.updated = time.monotonic()
        for seen in self.happened.take():
            self._history.hear(seen.event, seen.time_s)
        status, now = self._status(), self._clock()
        self._history.sample(status, now)
        self._shown = msgspec.json.encode(status)
        return self._rendered(now, self._history.take_fresh())

    def _rendered(self, now: float, facts: dict[str, Any]) -> bytes:
        page = {"now": round(now, 2), "pages": len(self.streams), **facts, "status": msgspec.Raw(self._shown)}
        return msgspec.json.encode(page)

    def _greeting(self) -> bytes:
        return _event("hello", self._everything())

    def _everything(self) -> bytes:
        with self._lock:
            is_old = time.monotonic() >= self._pace.updated + max(UPDATE_S, self._pace.rest_s)
            if self._shown == b"{}" or (is_old and not self.streams.has_readers):
                self._take_in()
            facts = {**self._facts, "open": self._logins.is_open, "update_s": UPDATE_S, "most_points": MOST_POINTS}
            return self._rendered(self._clock(), {**facts, **self._history.everything()})

    # --- requests -----------------------------------------------------------------------------------------------------

    def _make_routes(self) -> dict[tuple[str, str], Route]:
        routes: dict[tuple[str, str], Route] = {
            ("POST", PAGE_LINK_PATH): PlainRoute(self._link, reads=True),
            ("POST", f"{PAGE_PATH}/login"): PlainRoute(self._login, is_public=True),
            ("POST", f"{PAGE_PATH}/logout"): PlainRoute(self._logout, is_public=True),
            ("GET", f"{PAGE_PATH}/state"): PlainRoute(self._state, reads=True, opens=self._opens),
            ("GET", f"{PAGE_PATH}/live"): PlainRoute(self._stream, reads=True, opens=self._opens),
        }
        routes |= {("GET", path): PlainRoute(handler, is_public=True) for path, handler in page_files().items()}
        if self._read_model is not None:
            routes["GET", f"{PAGE_PATH}/model"] = PlainRoute(self._model, reads=True, opens=self._opens)
        return routes

    def _opens(self, request: HttpRequest) -> Caller:
        check_own_page(request.headers)
        return self._logins.opens(request)

    def _link(self, request: HttpRequest) -> Reply:
        request.body.check_size(MOST_LOGIN_BYTES, "the body")
        request.body.discard()
        return Reply(encode_json(self._logins.make_code(request.token)), headers=NO_STORE)

    def _login(self, request: HttpRequest) -> Reply:
        check_own_page(request.headers)
        request.body.check_size(MOST_LOGIN_BYTES, "a login")
        said = decode_json(request.body.read(), PageLogin)
        cookie = self._logins.redeem(said.code, request)
        return Reply(b"{}", headers=(*NO_STORE, ("Set-Cookie", cookie)))

    def _logout(self, request: HttpRequest) -> Reply:
        check_own_page(request.headers)
        request.body.check_size(MOST_LOGIN_BYTES, "the body")
        request.body.discard()
        cookie = self._logins.forget(request)
        return Reply(b"{}", headers=(*NO_STORE, ("Set-Cookie", cookie)))

    def _state(self, request: HttpRequest) -> Reply:
        return Reply(self._everything(), headers=NO_STORE)

    def _stream(self, request: HttpRequest) -> Reply:
        cookie = cookie_in(request.headers.get("cookie", ""), request.headers.get("host", ""))
        logins, streams = self._logins, self.streams

        def is_valid() -> bool:
            try:
                logins.caller_of(cookie)
            except Unauthorized:
                return False
            return True

        streams.reserve()
        return Reply(b"", hand_over=lambda sock: streams.add(sock, is_valid))

    def _model(self, request: HttpRequest) -> Reply:
        assert self._read_model is not None
        reply = self._read_model(request)
        return replace(
            reply, headers=(*reply.headers, ("Content-Disposition", 'attachment; filename="model.safetensors"'))
        )


def _event(kind: str, data: bytes) -> bytes:
    """JSON as msgspec writes it is one line."""
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
