"""Who may see the page: a one-time code becomes a cookie.

    outerstep page                   shows a token with the right to read, and gets a code
    https://HOST:PORT/page#CODE      the browser keeps what is behind # to itself: no log and no proxy sees the code
    POST /page/login                 the page hands the code over, once, and gets a cookie

A code works once, and for fifteen minutes. The cookie is HttpOnly, SameSite=Strict, and Secure under TLS. It names the
token whose holder asked for the code, and is signed with a key made of the admin token: so nothing is kept here, a
restart of the server ends no session, and revoking or rotating either token ends it at once. A session reads, and does
nothing else; orders need the admin token itself, which no cookie holds.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from ..errors import Unauthorized
from ..security import Caller, TokenGuard, is_loopback
from ..security.tokens import TokenFile, digest_of
from ..wire.http_request import HttpRequest
from ..wire.messages import PageCode

PAGE_PATH = "/page"
CODE_S = 900.0
SESSION_S = 7 * 86_400.0
MOST_CODES = 64  # outstanding; of one token an eighth
MOST_OF_ONE = 8
CODE = re.compile(r"[A-Za-z0-9_-]{32}")
_COOKIE = re.compile(r"([A-Za-z0-9.:_-]{1,128})~([0-9a-f]{16})~([0-9]{1,12})~([0-9a-f]{64})")
ANOTHER = "run `outerstep page` where the token is, and open the link that it prints"


class PageTokens(Protocol):
    """The tokens of a port, as far as the page needs them."""

    def sign_key(self) -> bytes:
        """The secret that cookies are signed with."""

    def digest(self, name: str) -> str | None:
        """SHA-256 of the token of this name; None = there is none, or it is no longer valid."""


@dataclass(frozen=True)
class ServerTokens:
    """A server's: its token file, and its guard, which knows what has expired."""

    file: TokenFile
    guard: TokenGuard

    def sign_key(self) -> bytes:
        return self.file.current().admin.encode()

    def digest(self, name: str) -> str | None:
        return self.file.current().digest(name) if name in self.guard.valid_names() else None


@dataclass(frozen=True)
class PeerTokens:
    """A peer's: the run's token, and its user's own admin token."""

    file: TokenFile
    run_token: Callable[[], str]

    def sign_key(self) -> bytes:
        return self.file.current().admin.encode()

    def digest(self, name: str) -> str | None:
        token = {"run": self.run_token(), "admin": self.file.current().admin}.get(name)
        return None if token is None else digest_of(token.encode()).hex()


@dataclass(frozen=True)
class _Code:
    token: str
    until: float


class Logins:
    """Codes and cookies. `tokens` None: the port asks for no tokens (`--insecure`), and neither does its page.
    `clock`: seconds since 1970, for a session outlives the process."""

    def __init__(self, tokens: PageTokens | None, clock: Callable[[], float], *, secure: bool) -> None:
        self._tokens, self._clock, self._secure = tokens, clock, secure
        self._lock = threading.Lock()
        self._codes: dict[bytes, _Code] = {}  # by digest, the oldest first

    @property
    def is_open(self) -> bool:
        return self._tokens is None

    def make_code(self, token: str) -> PageCode:
        """For a holder of the token of this name. One that asks for many displaces its own."""
        if self._tokens is None:
            return PageCode("", 0.0)
        code, now = secrets.token_urlsafe(24), self._clock()
        with self._lock:
            self._codes = {key: each for key, each in self._codes.items() if each.until > now}
            own = [key for key, each in self._codes.items() if each.token == token]
            if len(own) >= MOST_OF_ONE:
                del self._codes[own[0]]
            elif len(self._codes) >= MOST_CODES:
                del self._codes[next(iter(self._codes))]
            self._codes[digest_of(code.encode())] = _Code(token, now + CODE_S)
        return PageCode(code, CODE_S)

    def redeem(self, code: str, request: HttpRequest) -> str:
        """The Set-Cookie for a code, which is used up."""
        if self._tokens is None:
            raise Unauthorized("this page asks for no login")
        found = None
        if CODE.fullmatch(code) is not None:
            with self._lock:
                found = self._codes.pop(digest_of(code.encode()), None)
        if found is None or self._clock() >= found.until:
            raise Unauthorized("this login link was used before, or is too old", hint=ANOTHER)
        digest = self._tokens.digest(found.token)
        if digest is None:
            raise Unauthorized("the token that this link was made with is no longer valid", hint=ANOTHER)
        said = f"{found.token}~{digest[:16]}~{int(self._clock() + SESSION_S)}"
        return self._cookie(f"{said}~{self._signature(said)}", request, SESSION_S)

    def forget(self, request: HttpRequest) -> str:
        """The Set-Cookie that ends a session in this browser."""
        return self._cookie("", request, 0.0)

    def opens(self, request: HttpRequest) -> Caller:
        """Whose session it is."""
        return self.caller_of(cookie_in(request.headers.get("cookie", ""), request.headers.get("host", "")))

    def caller_of(self, cookie: str) -> Caller:
        if self._tokens is None:
            return Caller("anybody")
        parts = _COOKIE.fullmatch(cookie)
        if parts is None:
            raise Unauthorized("this page wants a login", hint=ANOTHER)
        token, digest, until, signature = parts.groups()
        said = cookie.rpartition("~")[0]
        if not hmac.compare_digest(signature, self._signature(said)) or self._clock() >= int(until):
            raise Unauthorized("this session has ended", hint=ANOTHER)
        if not hmac.compare_digest((self._tokens.digest(token) or "")[:16], digest):
            raise Unauthorized("the token of this session is no longer valid", hint=ANOTHER)
        return Caller("run", name=token, rights=frozenset({"read"}))

    def _signature(self, said: str) -> str:
        assert self._tokens is not None
        return hmac.new(self._tokens.sign_key(), f"page {said}".encode(), hashlib.sha256).hexdigest()

    def _cookie(self, value: str, request: HttpRequest, seconds: float) -> str:
        host, origin = request.headers.get("host", ""), request.headers.get("origin", "")
        # Through a tunnel the browser speaks plain HTTP with its own machine (tunnel.py), and keeps no secure cookie.
        is_tunnelled = origin.startswith("http://") and is_loopback(urlsplit(origin).hostname or "")
        secure = "; Secure" if self._secure and not is_tunnelled else ""
        path = f"Path={PAGE_PATH}; Max-Age={seconds:.0f}"
        return f"{cookie_name(host)}={value}; {path}; HttpOnly; SameSite=Strict{secure}"


def cookie_name(host: str) -> str:
    """A browser keeps cookies by host and not by port, and several servers may be on one host."""
    port = host.rpartition(":")[2] if not host.endswith("]") else ""
    return f"outerstep-{port}" if re.fullmatch(r"[0-9]{1,5}", port) else "outerstep"


def cookie_in(header: str, host: str) -> str:
    """Its value; "" = there is none."""
    name = cookie_name(host)
    for part in header.split(";"):
        key, _, value = part.strip().partition("=")
        if key == name:
            return value
    return ""


def link_to(address: str, code: str, *, plain: bool) -> str:
    """For a browser."""
    return f"{'http' if plain else 'https'}://{address}{PAGE_PATH}{f'#{code}' if code else ''}"
