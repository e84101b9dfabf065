"""Join strings and addresses: what is taken, what is said about the rest, and that no token is ever said."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outerstep.config import WorkerConfig
from outerstep.errors import ConfigError
from outerstep.security import (
    Access,
    is_join_string,
    is_loopback,
    parse_address,
    parse_join_string,
    redact,
    shown_address,
)
from outerstep.security.tokens import new_token

TOKEN = "run-oNfkJmq154F_c0V-paJpdyoOM8mV40fxFct0gfsnxrI"  # drawn once: names of tests contain it
PIN = "0123456789abcdef" * 4
GOOD = f"outerstep://{TOKEN}@192.168.1.100:8512#sha256={PIN}"


@pytest.mark.parametrize("host", ["192.168.1.100", "gpu.example.org", "::1", "fe80::1%eth0", "bücher.example"])
@pytest.mark.parametrize("fingerprint", [PIN, None])
def test_what_is_written_is_read_back(host: str, fingerprint: str | None) -> None:
    access = Access(host, 8512, TOKEN, fingerprint)
    assert parse_join_string(access.join_string) == access
    assert parse_join_string(f"  {access.join_string}\n") == access


def test_an_admin_token_is_kept_as_one() -> None:
    admin = new_token("admin")
    access = parse_join_string(GOOD.replace(TOKEN, admin))
    assert (access.token, access.admin) == ("", admin)
    assert access.join_string == GOOD.replace(TOKEN, admin)


def test_the_default_port_may_be_left_out_and_hexadecimal_may_be_large() -> None:
    access = parse_join_string(f"outerstep://{TOKEN}@host#sha256={PIN.upper()}")
    assert (access.port, access.fingerprint) == (8512, PIN)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must begin with outerstep://"),
        (GOOD.removeprefix("outerstep://"), "must begin with outerstep://"),
        (GOOD.replace("outerstep", "https"), "must begin with outerstep://"),
        (GOOD.replace("@", "@\n"), "space or a line break"),
        (f"outerstep://192.168.1.100:8512#sha256={PIN}", "the token is missing"),
        (f"outerstep://@192.168.1.100:8512#sha256={PIN}", "the token is missing"),
        (GOOD.replace(TOKEN, TOKEN[:-1]), r"not a token \(it has 46 characters\): was it cut off"),
        (GOOD.replace(TOKEN, f"x:{TOKEN}"), "not a token"),
        (f"outerstep://{TOKEN}@", "address is missing"),
        (f"outerstep://{TOKEN}@:8512", "host:port"),
        (f"outerstep://{TOKEN}@host:0", "host:port"),
        (f"outerstep://{TOKEN}@host:８５１２", "host:port"),
        (f"outerstep://{TOKEN}@::1:8512", r"\[address\]:port"),
        (GOOD.replace(PIN, PIN[:40]), "64 hexadecimal digits, got 40 characters: was it cut off"),
        (GOOD.replace(PIN, PIN[:-1] + "g"), "64 hexadecimal digits"),
        (GOOD.replace("sha256", "md5"), "after # must start with sha256=, got 'md5'"),
        (GOOD.partition("#")[0] + "#", "after # must start with sha256="),
        (f"{GOOD}#sha256={PIN}", "64 hexadecimal digits"),
        (f"outerstep://{TOKEN}@{GOOD.removeprefix('outerstep://')}", "not a token"),
    ],
)
def test_anything_else_is_refused_by_what_is_wrong_with_it(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        parse_join_string(text)
    assert TOKEN[4:-1] not in str(refused.value)


@given(st.text(max_size=80), st.integers(0, 200), st.text(max_size=8))
def test_no_error_shows_the_token_however_the_string_is_mangled(before: str, at: int, inserted: str) -> None:
    said: list[str] = []
    for text in (before + GOOD, GOOD[:at] + inserted + GOOD[at:], GOOD[:at] + inserted, GOOD[at:]):
        for parse in (parse_join_string, parse_address):
            try:
                parse(text)
            except ConfigError as error:
                said.append(str(error))
    assert not [text for text in said if TOKEN[4:] in text]


@pytest.mark.parametrize(
    "text", ["https://host:8512", "outerstep://x@h", f"{TOKEN}@host:8512", "a b:8512", "host:8512/path", "host?:1"]
)
def test_an_address_is_host_and_port_and_nothing_else(text: str) -> None:
    with pytest.raises(ConfigError, match="server address") as refused:
        parse_address(text)
    assert TOKEN not in str(refused.value)


def test_a_plain_address_is_read_like_any_other() -> None:
    assert parse_address("http://192.168.1.100:8512/") == parse_address("192.168.1.100:8512") == ("192.168.1.100", 8512)
    assert not is_join_string("http://192.168.1.100:8512")


@pytest.mark.parametrize("text", [GOOD, f"'{GOOD}'", f"at {TOKEN}", TOKEN[:30], f"http://user:{TOKEN}@host"])
def test_nothing_of_a_token_is_left_in_what_is_shown(text: str) -> None:
    assert TOKEN[5:25] not in redact(text)


def test_people_are_shown_host_and_port_of_a_join_string() -> None:
    assert shown_address(GOOD) == parse_join_string(GOOD).address
    assert shown_address("http://192.168.1.100:8512") == "http://192.168.1.100:8512"
    assert shown_address(f"http://user:{TOKEN}@host") == "http://…@host"


def test_what_holds_a_join_string_does_not_show_its_token() -> None:
    config = WorkerConfig(server_addr=GOOD)
    for shown in (repr(config), str(config), f"{config}", repr(parse_join_string(GOOD))):
        assert TOKEN[4:] not in shown
        assert "192.168.1.100" in shown
    assert config.server_addr == GOOD


@pytest.mark.parametrize(("host", "here"), [("localhost", True), ("LOCALHOST", True), ("::1", True), ("gpu", False)])
def test_which_hosts_are_the_loopback(host: str, here: bool) -> None:
    assert is_loopback(host) is here
