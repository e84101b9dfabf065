"""A relay leads where it is meant to lead, for those who may, as often as it is meant to. Real sockets, real TLS."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from outerstep.coordination.layers.routing import Routing, WayUp
from outerstep.errors import NoCredentials, TransportError, UntrustedServer
from outerstep.hierarchy.ways_up import WaysUp
from outerstep.security import Access, Credentials
from outerstep.security.tokens import new_token
from outerstep.server import DiLoCoServer
from outerstep.types import AskNonce
from outerstep.wire.http_server import HttpServer
from outerstep.wire.http_transport import HttpTransport
from outerstep.wire.relay import Relay, RelayLimits, open_tunnel
from ports import free_port
from support import Ledger, wait_until


class Target:
    """The layer above, as far as a relay can tell: it sends back what comes."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.accepted = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.accepted += 1
                threading.Thread(target=self._echo, args=(connection,), daemon=True).start()

    def _echo(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            while piece := connection.recv(65536):
                connection.sendall(piece)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._listener.close()


@dataclass
class Scene:
    server: DiLoCoServer
    target: Target
    relay: Relay

    def ticket(self) -> str:
        with contextlib.closing(HttpTransport(self.server.address)) as transport:
            return transport.ask_relay(self.target.address)

    def knock(self, head: bytes, *, then: bytes = b"") -> tuple[bytes, socket.socket]:
        """The answer to these first bytes, and the connection."""
        host, _, port = self.server.address.rpartition(":")
        sock = socket.create_connection((host, int(port)), timeout=20)
        sock.sendall(head)
        answer = sock.recv(4096)
        if then:
            sock.sendall(then)
        return answer, sock

    def connect(self, ticket: str, target: str | None = None) -> tuple[bytes, socket.socket]:
        line = f"CONNECT {target or self.target.address} HTTP/1.0\r\nProxy-Authorization: Bearer {ticket}\r\n\r\n"
        return self.knock(line.encode())

    @property
    def tunnels(self) -> int:
        return self.relay._tunnels.total()


@pytest.fixture
def scene() -> Iterator[Scene]:
    target = Target()
    relay = Relay([target.address], RelayLimits(tunnels=3, tunnels_each=3, tickets_per_minute_each=8))
    server = DiLoCoServer(Ledger(2).state_dict(), 1, 0)
    server.service.routes |= relay.routes
    server.start()
    yield Scene(server, target, relay)
    server.stop()
    target.close()


def test_bytes_pass_both_ways_as_they_are_and_the_tunnel_ends_with_either_end(scene: Scene) -> None:
    answer, sock = scene.connect(scene.ticket())
    assert answer.startswith(b"HTTP/1.1 200")
    payload = bytes(range(256)) * 4096
    threading.Thread(target=sock.sendall, args=(payload,), daemon=True).start()
    got = b""
    while len(got) < len(payload):
        got += sock.recv(1 << 20)
    assert got == payload
    assert scene.tunnels == 1
    sock.close()
    wait_until(lambda: scene.tunnels == 0)
    assert scene.relay.carried_bytes == 2 * len(payload)


@pytest.mark.parametrize(
    "head",
    [
        b"CONNECT {target} HTTP/1.1\r\nHost: x\r\n\r\n",
        b"CONNECT {target} HTTP/1.1\r\nHost: x\r\nProxy-Authorization: Bearer 00\r\n\r\n",
        b"CONNECT {target} HTTP/1.1\r\nHost: x\r\nProxy-Authorization: Basic 00\r\n\r\n",
        b"CONNECT nowhere HTTP/1.0\r\nProxy-Authorization: Bearer 00\r\n\r\n",
        b"CONNECT {target} HTTP/1.0\r\nProxy-Authorization: Bearer \xff\xfe\r\n\r\n",
        b"C" * 5000,
        b"CAT / HTTP/1.0\r\n\r\n",
        b"C\x00\r\n\r\n",
    ],
)
def test_without_a_ticket_nobody_gets_anywhere(scene: Scene, head: bytes) -> None:
    answer, sock = scene.knock(head.replace(b"{target}", scene.target.address.encode()))
    sock.close()
    assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 407"))
    assert scene.target.accepted == 0
    assert scene.tunnels == 0


def test_a_ticket_is_for_one_tunnel_and_for_its_target(scene: Scene) -> None:
    ticket = scene.ticket()
    answer, sock = scene.connect(ticket, target="127.0.0.1:22")
    sock.close()
    assert answer.startswith(b"HTTP/1.1 407")
    answer, first = scene.connect(ticket)
    assert answer.startswith(b"HTTP/1.1 200")
    answer, again = scene.connect(ticket)
    assert answer.startswith(b"HTTP/1.1 407")
    for each in (first, again):
        each.close()
    wait_until(lambda: scene.target.accepted > 0)  # the target's own thread may count after the tunnel's answer
    assert scene.target.accepted == 1


def test_a_ticket_ages(scene: Scene) -> None:
    now = 0.0
    scene.relay._clock = lambda: now
    ticket, now = scene.ticket(), 31.0
    answer, sock = scene.connect(ticket)
    sock.close()
    assert answer.startswith(b"HTTP/1.1 407")


def test_tickets_are_for_those_who_may_join_and_for_the_layer_above_only(scene: Scene) -> None:
    only = f"leads to {scene.target.address} only, not to 10.0.0.1:22"
    with (
        contextlib.closing(HttpTransport(scene.server.address)) as transport,
        pytest.raises(TransportError, match=only),
    ):
        transport.ask_relay("10.0.0.1:22")
    access = Credentials().find(scene.server.address)
    assert access is not None
    secret = Credentials().tokens.give("looker", rights=("read",))
    looker = Access(access.host, access.port, secret, access.fingerprint)
    for text, why in ((looker.join_string, "right to join"), (stranger(access), "not valid")):
        with contextlib.closing(HttpTransport(text)) as transport, pytest.raises(TransportError, match=why):
            transport.ask_relay(scene.target.address)
    assert scene.target.accepted == 0


def stranger(access: Access) -> str:
    return Access(access.host, access.port, new_token("run"), access.fingerprint).join_string


def test_a_flood_of_tunnels_is_bounded_in_number_and_in_rate(scene: Scene) -> None:
    held = [scene.connect(scene.ticket())[1] for _ in range(3)]
    with pytest.raises(TransportError, match="no room for another tunnel"):
        scene.ticket()
    for sock in held:
        sock.close()
    wait_until(lambda: scene.tunnels == 0)
    for _ in range(5):
        scene.connect(scene.ticket())[1].close()
        wait_until(lambda: scene.tunnels == 0)
    with pytest.raises(TransportError, match="too many tunnels in a minute"):
        scene.ticket()
    assert scene.target.accepted == 8
    assert scene.server.status()["sync_round"] == 0, "the server serves its own as ever"


def test_tickets_that_nobody_uses_take_the_room_of_tunnels_for_half_a_minute(scene: Scene) -> None:
    now = 0.0
    scene.relay._clock = lambda: now
    for _ in range(3):
        scene.ticket()
    with pytest.raises(TransportError, match="no room"):
        scene.ticket()
    now = 31.0
    assert scene.ticket()


def test_a_layer_above_that_is_not_there_is_502_and_the_relay_goes_on(scene: Scene) -> None:
    ticket = scene.ticket()
    scene.target.close()
    answer, sock = scene.connect(ticket)
    sock.close()
    assert answer.startswith(b"HTTP/1.1 502")
    wait_until(lambda: scene.tunnels == 0)
    assert scene.server.status()["sync_round"] == 0


def test_a_relay_cannot_pose_as_the_server_behind_it(scene: Scene) -> None:
    """Its own certificate is not that of the layer above: the cluster sends nothing."""
    posing = DiLoCoServer(Ledger(2).state_dict(), 1, 0).start()
    scene.relay._targets.add(posing.address)
    other = Access("127.0.0.1", int(posing.address.rpartition(":")[2]), new_token("run"), "ab" * 32)
    through = HttpTransport(other.join_string, relay=HttpTransport(scene.server.address))
    with pytest.raises(UntrustedServer, match=f"{posing.address} shows another certificate.*Nothing was sent"):
        through.status()
    through.close()
    posing.stop()


def test_a_relay_that_poses_does_not_make_a_short_absence_an_end(scene: Scene) -> None:
    """The server above does not answer for a moment, and the relay leads to another one. An untrusted server is an end;
    a cluster that gave up for that would be cut off for good by any relay."""
    posing = DiLoCoServer(Ledger(2).state_dict(), 1, 0).start()
    scene.relay._targets.add(posing.address)
    above = Access("127.0.0.1", int(posing.address.rpartition(":")[2]), new_token("run"), "ab" * 32)

    def connect(way: WayUp) -> HttpTransport:
        if not way.relay:
            return HttpTransport(f"http://127.0.0.1:{free_port()}")
        return HttpTransport(above.join_string, relay=HttpTransport(scene.server.address))

    ways = WaysUp(Routing([above.address], [scene.server.address]), connect)
    with pytest.raises(TransportError, match="another certificate"):
        ways.call(AskNonce(worker_id="west"))
    ways.close()
    posing.stop()


def test_a_relay_that_we_have_lost_the_token_of_is_a_way_that_does_not_work(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(self: Credentials, server: str) -> Access | None:
        raise NoCredentials("no token is known here")

    with contextlib.closing(HttpTransport(scene.server.address)) as relay:
        monkeypatch.setattr(Credentials, "find", nothing)
        relay._access = Access("127.0.0.1", relay._port, new_token("run"), "ab" * 32)
        with pytest.raises(TransportError, match=r"no way to .* no token is known here"):
            relay.ask_relay(scene.target.address)


def test_a_server_relays_for_nobody_unless_it_was_told_to() -> None:
    server = DiLoCoServer(Ledger(2).state_dict(), 1, 0).start()
    scene = Scene(server, Target(), Relay([]))
    with pytest.raises(TransportError, match="no such path"):
        scene.ticket()
    answer, sock = scene.connect("00" * 16)
    sock.close()
    assert answer.startswith(b"HTTP/1.1 403") or b"tls" in answer.lower()
    assert scene.target.accepted == 0
    server.stop()
    scene.target.close()


def test_a_port_without_tls_relays_too() -> None:
    """--insecure: whoever reaches the port may be led to the layer above, and nowhere else."""
    target = Target()
    relay = Relay([target.address])
    port = HttpServer(relay.routes, "127.0.0.1", 0)
    port.start()
    with contextlib.closing(HttpTransport(f"http://127.0.0.1:{port.port}")) as transport:
        ticket = transport.ask_relay(target.address)
        sock = open_tunnel(("127.0.0.1", port.port), target.address, ticket, 20.0)
        sock.sendall(b"x")
        assert sock.recv(1) == b"x"
        sock.close()
    port.stop()
    target.close()


@pytest.mark.parametrize(
    "answers",
    [b"HTTP/1.1 407 no\r\n\r\n", b"nonsense", b"\x00" * 9000, b"HTTP/1.1 200 ok\r\n" + b"x: y\r\n" * 9000, b""],
    ids=["no", "nonsense", "zeros", "endless", "nothing"],
)
def test_a_relay_that_lies_is_a_way_that_does_not_work_and_no_more(answers: bytes) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def lie() -> None:
        with listener.accept()[0] as sock, contextlib.suppress(OSError):
            sock.recv(4096)
            sock.sendall(answers)

    threading.Thread(target=lie, daemon=True).start()
    with pytest.raises(OSError, match=r"relay (gave|answered)|reset"):
        open_tunnel(listener.getsockname(), "127.0.0.1:9", "00" * 16, 5.0)
    listener.close()
