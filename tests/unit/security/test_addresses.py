"""Join strings with several addresses, as they are written, pasted and tried; and the addresses that a machine has."""

from __future__ import annotations

import ipaddress
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outerstep.demo.sites import UNSHARE
from outerstep.errors import ConfigError, TransportError, UntrustedServer
from outerstep.security import Access, Credentials, mended, parse_join_string
from outerstep.security.interfaces import MOST_ADDRESSES, outward_hosts
from outerstep.wire.http_transport import HttpTransport
from ports import free_port
from sites import Site

TOKEN = "run-" + "a" * 43
PIN = "ab" * 32
TWO = f"outerstep://{TOKEN}@10.0.0.1:8512,[fd00::1]:8600#sha256={PIN}"


def test_a_join_string_names_every_address_of_its_server() -> None:
    access = parse_join_string(TWO)
    assert access.places == (("10.0.0.1", 8512), ("fd00::1", 8600))
    assert access.address == "10.0.0.1:8512"
    assert access.join_string == TWO


def test_it_can_begin_with_another_of_them() -> None:
    access = parse_join_string(TWO)
    assert access.at("fd00::1", 8600).places == (("fd00::1", 8600), ("10.0.0.1", 8512))
    assert access.at("10.9.9.9", 8512).places == (("10.9.9.9", 8512),)


@pytest.mark.parametrize(
    ("places", "why"),
    [
        ("10.0.0.1:8512,", "must be host:port, got ''"),
        (",10.0.0.1:8512", "must be host:port, got ''"),
        ("10.0.0.1:8512;10.0.0.2", "must be host:port"),
        (",".join(f"10.0.0.{i}:8512" for i in range(1, 10)), "it names 9 addresses, at most 8 are tried"),
        ("[fe80::1]:8512", "link-local, and does not say on which interface of this machine"),
    ],
)
def test_a_list_that_is_none_is_refused(places: str, why: str) -> None:
    with pytest.raises(ConfigError, match="this is not a join string") as refusal:
        parse_join_string(f"outerstep://{TOKEN}@{places}#sha256={PIN}")
    assert why in str(refusal.value)
    assert TOKEN not in str(refusal.value)


def test_a_link_local_address_with_its_interface_is_one() -> None:
    assert parse_join_string(f"outerstep://{TOKEN}@[fe80::1%eth0]:8512").host == "fe80::1%eth0"


@pytest.mark.parametrize(
    "pasted", [f"  {TWO}\n", f"{TWO[:50]}\n{TWO[50:]}", f'"{TWO}"', f"“{TWO[:90]}\r\n  {TWO[90:]}”", f"`{TWO}`"]
)
def test_what_a_terminal_or_a_chat_adds_to_it_is_taken_off(pasted: str) -> None:
    assert mended(pasted) == TWO


def test_a_variable_with_several_addresses_serves_each_of_them(tmp_path: Path) -> None:
    known = Credentials(tmp_path, {"OUTERSTEP_JOIN": TWO}).find("[fd00::1]:8600")
    assert known is not None
    assert known.places == (("fd00::1", 8600), ("10.0.0.1", 8512))


class TestThisMachine:
    def test_its_addresses_are_reachable_ones_and_not_too_many(self) -> None:
        found = outward_hosts()
        assert 1 <= len(found) <= MOST_ADDRESSES
        assert len(set(found)) == len(found)
        if found != [socket.gethostname()]:
            assert not any(ipaddress.ip_address(host).is_loopback for host in found)

    def test_without_a_default_route_its_interfaces_are_asked(self) -> None:
        """A namespace with a cable, a bridge of containers, and no route out."""
        script = (
            "ip link set lo up && ip link add docker0 type veth peer name other && ip link set docker0 up && "
            "ip address add 172.17.0.1/16 dev docker0 && ip link add cable type veth peer name far && "
            "ip address add 10.66.0.1/24 dev cable && ip address add fd66::1/64 dev cable nodad && "
            "ip link set cable up && ip link set far up && ip link set other up && "
            "ip link add off type veth peer name off2 && ip address add 10.67.0.1/24 dev off && "
            f"exec {sys.executable} -c 'import socket; from outerstep.security.interfaces import outward_hosts; "
            "print(outward_hosts(), outward_hosts(socket.AF_INET6))'"
        )
        done = subprocess.run([*UNSHARE, "sh", "-c", script], capture_output=True, text=True, timeout=60)
        assert done.stdout.strip() == "['10.66.0.1', '172.17.0.1'] ['fd66::1']", done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("site"))
    yield made
    made.server.stop()


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("stranger"))
    yield made
    made.server.stop()


class TestTryingThem:
    def line(self, site: Site, *ports: int) -> str:
        access = site.server.access
        (first, *others) = [("127.0.0.1", port) for port in ports]
        return Access(*first, access.token, access.fingerprint, others=tuple(others)).join_string

    def test_the_first_that_answers_is_kept(self, site: Site) -> None:
        port = site.server.access.port
        transport = HttpTransport(self.line(site, free_port(), port))
        assert transport.status()["run_id"] == site.server.run_id
        assert transport.address == f"127.0.0.1:{port}"
        transport.close()

    def test_somebody_else_at_one_of_them_is_passed_by_and_gets_nothing(self, site: Site, stranger: Site) -> None:
        port = site.server.access.port
        transport = HttpTransport(self.line(site, stranger.server.access.port, port))
        assert transport.status()["run_id"] == site.server.run_id
        transport.close()

    def test_one_that_is_only_silent_now_may_be_the_server(self, site: Site, stranger: Site) -> None:
        silent = free_port()
        transport = HttpTransport(self.line(site, stranger.server.access.port, silent))
        with pytest.raises(TransportError, match=f"127.0.0.1:{silent}: .*refused"):
            transport.status()

    def test_if_all_are_somebody_else_that_is_said(self, site: Site, stranger: Site) -> None:
        port = stranger.server.access.port
        transport = HttpTransport(Access("localhost", port, TOKEN, PIN, others=(("127.0.0.1", port),)).join_string)
        with pytest.raises(UntrustedServer, match="shows another certificate"):
            transport.status()
