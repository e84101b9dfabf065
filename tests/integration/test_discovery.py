"""`--announce` and `--discover` over real multicast on the loopback, and the line as a QR code."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from outerstep.cli import discovery
from outerstep.cli.discovery import announced, find_known, look_around
from outerstep.cli.qr import qr_code
from outerstep.errors import ConfigError
from outerstep.installing import install_line
from outerstep.security import Access, Credentials

LOOPBACK = ["127.0.0.1"]
PATIENCE_S = (1.0, 3.0, 9.0, 27.0)  # a busy machine may take its time to answer
HERE = Access("127.0.0.1", 18512, "run-" + "a" * 43, "ab" * 32)


@pytest.fixture(scope="module", autouse=True)
def _announced() -> Iterator[None]:
    with announced(HERE, LOOPBACK):
        yield


def test_a_run_is_found_by_its_certificate_and_no_token_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    info = discovery._zeroconf().ServiceInfo
    monkeypatch.setattr(
        discovery._zeroconf(), "ServiceInfo", lambda *a, **k: sent.append(repr(k).encode()) or info(*a, **k)
    )
    both = {((("127.0.0.1", 18512),), "ab" * 32), ((("127.0.0.1", 18513),), "cd" * 32)}
    with announced(replace(HERE, port=18513, fingerprint="cd" * 32), LOOPBACK):
        for seconds in PATIENCE_S:
            found = look_around(seconds, LOOPBACK)
            if both <= {(one.places, one.fingerprint) for one in found}:
                break
        else:
            pytest.fail(f"only found {found}")
    assert sent
    assert b"run-" not in b"".join(sent)
    assert socket.gethostname().partition(".")[0] in str(found[0])


def test_a_pc_that_has_the_token_finds_the_new_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find() -> Access:
        for seconds in PATIENCE_S:
            monkeypatch.setattr(discovery, "LOOK_S", seconds)
            try:
                return find_known(str(tmp_path), LOOPBACK)
            except ConfigError as error:
                if "no run announces itself" not in str(error):
                    raise
        pytest.fail("nothing was found")

    with pytest.raises(ConfigError, match=r"found .* at 127.0.0.1:18512, .*; no token of it is known here: paste"):
        find()
    Credentials(tmp_path).remember(replace(HERE, host="10.0.0.9"))  # where it was yesterday
    assert find() == HERE


def test_what_no_server_of_ours_would_say_is_passed_by() -> None:
    kinds = discovery._zeroconf()
    name = f"x.{discovery.SERVICE}"
    for port, addresses, pin in [
        (0, ["127.0.0.1"], "ab" * 32),
        (18512, [], "ab" * 32),
        (18512, ["127.0.0.1"], "ab" * 31),
        (18512, ["127.0.0.1"], "\N{SNOWMAN}" * 20),
        (18512, ["fe80::1"], "ab" * 32),
    ]:
        said = kinds.ServiceInfo(
            discovery.SERVICE, name, port=port, parsed_addresses=addresses, properties={discovery.PIN: pin}
        )
        assert discovery._read(said) is None
    hostile = kinds.ServiceInfo(
        discovery.SERVICE,
        f"red\u202edleif.{discovery.SERVICE}",
        port=1,
        parsed_addresses=["10.0.0.1"],
        properties={discovery.PIN: "ab" * 32},
    )
    read = discovery._read(hostile)
    assert read is not None
    assert "\u202e" not in str(read)
    with announced(HERE, LOOPBACK):  # and what cannot even be a name stops nobody
        line = discovery._open(kinds, LOOPBACK)
        assert discovery._ask(kinds, line, f"\x1b[31m.{discovery.SERVICE}") is None
        line.close()


def test_without_the_package_the_error_names_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zeroconf", None)
    with pytest.raises(ConfigError, match=re.escape(install_line("lan"))):
        look_around()


def test_a_line_is_drawn_where_there_is_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    line = f'outerstep run --join "{HERE.join_string}" -- python train.py'
    drawn = qr_code(line, (80, 60))
    assert 20 < len(drawn.splitlines()) < 54
    assert qr_code(line, (40, 60)) == ""
    assert qr_code(line, (80, 24)) == ""
    monkeypatch.setitem(sys.modules, "segno", None)
    assert qr_code(line, (80, 60)) == ""
