"""A code logs one browser in, once; the cookie reads, survives a restart, and ends with the token it came from."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from outerstep.dashboard.logins import (
    CODE_S,
    MOST_CODES,
    MOST_OF_ONE,
    SESSION_S,
    Logins,
    cookie_in,
    cookie_name,
    link_to,
)
from outerstep.errors import Unauthorized


@dataclass
class Tokens:
    admin: bytes = b"admin-secret"
    known: dict[str, str] = field(default_factory=lambda: {"run": "ab" * 32, "board": "cd" * 32})

    def sign_key(self) -> bytes:
        return self.admin

    def digest(self, name: str) -> str | None:
        return self.known.get(name)


class Asked:
    """What a login looks at of a request."""

    def __init__(self, host: str = "gpu:8512", origin: str = "https://gpu:8512") -> None:
        self.headers = {"host": host, "origin": origin}


class Clock:
    now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def made(clock: Clock, tokens: Tokens | None = None) -> Logins:
    return Logins(tokens or Tokens(), clock, secure=True)


def log_in(logins: Logins, token: str = "run", asked: Asked | None = None) -> str:
    """The cookie's value."""
    said = logins.redeem(logins.make_code(token).code, asked or Asked())  # type: ignore[arg-type]
    return said.partition("=")[2].partition(";")[0]


def test_a_code_works_once(clock: Clock) -> None:
    logins = made(clock)
    code = logins.make_code("run").code
    logins.redeem(code, Asked())  # type: ignore[arg-type]
    with pytest.raises(Unauthorized, match="used before"):
        logins.redeem(code, Asked())  # type: ignore[arg-type]


def test_a_code_expires(clock: Clock) -> None:
    logins = made(clock)
    code = logins.make_code("run").code
    clock.now += CODE_S
    with pytest.raises(Unauthorized, match="too old"):
        logins.redeem(code, Asked())  # type: ignore[arg-type]


@pytest.mark.parametrize("code", ["", "a" * 32, "a" * 31 + "é", "x" * 10_000])
def test_a_guess_is_refused(clock: Clock, code: str) -> None:
    logins = made(clock)
    logins.make_code("run")
    with pytest.raises(Unauthorized):
        logins.redeem(code, Asked())  # type: ignore[arg-type]


def test_who_asks_for_many_codes_displaces_its_own(clock: Clock) -> None:
    logins = made(clock)
    others = logins.make_code("board").code
    mine = [logins.make_code("run").code for _ in range(MOST_CODES * 2)]
    logins.redeem(others, Asked())  # type: ignore[arg-type]
    for code in mine[:-MOST_OF_ONE]:
        with pytest.raises(Unauthorized):
            logins.redeem(code, Asked())  # type: ignore[arg-type]
    logins.redeem(mine[-1], Asked())  # type: ignore[arg-type]


def test_there_are_so_many_codes_at_most(clock: Clock) -> None:
    tokens = Tokens(known={f"t{i}": "ab" * 32 for i in range(2 * MOST_CODES)})
    logins = made(clock, tokens)
    for name in tokens.known:
        logins.make_code(name)
    assert len(logins._codes) == MOST_CODES


def test_a_cookie_reads_and_does_nothing_else(clock: Clock) -> None:
    logins = made(clock)
    caller = logins.caller_of(log_in(logins, "board"))
    assert caller.name == "board"
    assert [right for right in ("read", "join", "control") if caller.may(right)] == ["read"]  # type: ignore[arg-type]


def test_a_cookie_outlives_the_process_and_not_its_time(clock: Clock) -> None:
    tokens = Tokens()
    cookie = log_in(made(clock, tokens))
    clock.now += SESSION_S - 1.0
    assert made(clock, tokens).caller_of(cookie).name == "run"
    clock.now += 1.0
    with pytest.raises(Unauthorized, match="ended"):
        made(clock, tokens).caller_of(cookie)


@pytest.mark.parametrize("change", ["revoked", "rotated", "admin rotated"])
def test_a_cookie_ends_with_its_token(clock: Clock, change: str) -> None:
    tokens = Tokens()
    logins = made(clock, tokens)
    cookie = log_in(logins, "board")
    if change == "revoked":
        del tokens.known["board"]
    elif change == "rotated":
        tokens.known["board"] = "ef" * 32
    else:
        tokens.admin = b"another"
    with pytest.raises(Unauthorized):
        logins.caller_of(cookie)


def test_a_changed_cookie_is_nobodys(clock: Clock) -> None:
    logins = made(clock)
    cookie = log_in(logins, "board")
    for other in (cookie.replace("board", "run"), cookie[:-1], cookie + "0", cookie.upper(), "", "~~~", "a" * 5000):
        with pytest.raises(Unauthorized):
            logins.caller_of(other)


def test_a_cookie_is_kept_from_scripts_and_other_sites(clock: Clock) -> None:
    logins = made(clock)
    said = logins.redeem(logins.make_code("run").code, Asked())  # type: ignore[arg-type]
    assert said.startswith("outerstep-8512=")
    for mark in ("HttpOnly", "SameSite=Strict", "Secure", "Path=/page", f"Max-Age={SESSION_S:.0f}"):
        assert f"; {mark}" in said


@pytest.mark.parametrize(
    ("origin", "is_secure"),
    [
        ("http://127.0.0.1:40001", False),
        ("http://[::1]:40001", False),
        ("https://127.0.0.1:8512", True),
        ("http://gpu.example.org", True),
        ("http://127.0.0.1.example.org", True),
    ],
)
def test_only_a_tunnel_on_this_machine_gets_a_cookie_that_is_not_secure(
    clock: Clock, origin: str, is_secure: bool
) -> None:
    logins = made(clock)
    said = logins.redeem(logins.make_code("run").code, Asked("127.0.0.1:40001", origin))  # type: ignore[arg-type]
    assert ("; Secure" in said) == is_secure


def test_servers_of_one_host_have_cookies_of_their_own() -> None:
    names = [cookie_name(host) for host in ("gpu:8512", "gpu:8513", "gpu", "[::1]:8512", "[::1]", "gpu:x;y=z")]
    assert names == ["outerstep-8512", "outerstep-8513", "outerstep", "outerstep-8512", "outerstep", "outerstep"]
    assert cookie_in("a=1; outerstep-8513=x; outerstep-8512=y", "gpu:8512") == "y"
    assert cookie_in("outerstep-85=x", "gpu:8512") == ""


def test_a_port_without_tokens_asks_for_no_login(clock: Clock) -> None:
    logins = Logins(None, clock, secure=False)
    assert logins.make_code("").code == ""
    assert logins.caller_of("").may("read")
    with pytest.raises(Unauthorized):
        logins.redeem("a" * 32, Asked())  # type: ignore[arg-type]


def test_a_link_keeps_its_code_behind_the_number_sign() -> None:
    assert link_to("gpu:8512", "CODE", plain=False) == "https://gpu:8512/page#CODE"
    assert link_to("gpu:8512", "", plain=True) == "http://gpu:8512/page"
