"""The addresses of this machine that another one may reach it by, for a join string.

The default route says which address goes out to the world. Two PCs on a switch, or on one cable, have none, and a
laptop with a cable to the other PC has one that leads elsewhere. So all interfaces are asked. Which of the addresses
the other machine can reach only it can find out: it tries them in turn (wire/http_transport.py).
"""

from __future__ import annotations

import array
import ipaddress
import re
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

MOST_ADDRESSES = 6  # a longer line does not fit into anybody's terminal
INSIDE = re.compile(r"(docker|br-|virbr|vmnet|vboxnet|lxc|lxd|cni|flannel|podman)")
"""Bridges to containers and virtual machines of this one machine: they come last."""

LINUX = Path("/proc/net/dev")
SIOCGIFCONF, SIOCGIFFLAGS = 0x8912, 0x8913
IFF_UP = 0x1
IFREQ_BYTES = 40 if struct.calcsize("P") == 8 else 32
MOST_INTERFACES = 256
PASSING = 0x01 | 0x08 | 0x20 | 0x40  # IPv6 addresses that are temporary, duplicate, deprecated or not yet checked


def outward_hosts(family: int = socket.AF_INET) -> list[str]:
    """This machine's addresses, the most likely first; its name, if it has no address."""
    routed = routed_host(family)
    found = [*([routed] if routed else []), *_by_likelihood(_interfaces(family))]
    usable = [host for host in dict.fromkeys(found) if _is_usable(host)]
    return usable[:MOST_ADDRESSES] or [socket.gethostname()]


def routed_host(family: int = socket.AF_INET) -> str:
    """The address of the default route; "" = there is none. Connecting a datagram socket sends nothing."""
    reserved = "192.0.2.1" if family == socket.AF_INET else "2001:db8::1"
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((reserved, 9))  # it only selects the route
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _is_usable(host: str) -> bool:
    """IPv6's link-local addresses are left out: each machine has its own name for the link that they belong to."""
    ip = ipaddress.ip_address(host)
    mine = ip.is_loopback or ip.is_unspecified or ip.is_multicast
    return not mine and not (ip.version == 6 and ip.is_link_local)


def _by_likelihood(found: Iterable[tuple[str, str]]) -> list[str]:
    return [host for _, host in sorted(found, key=lambda one: INSIDE.match(one[0]) is not None)]


def _interfaces(family: int) -> list[tuple[str, str]]:
    """(interface, address). Elsewhere than on Linux, what the machine's own name stands for."""
    try:
        if LINUX.is_file():
            return _linux_ipv4() if family == socket.AF_INET else _linux_ipv6()
        return [("", str(one[4][0])) for one in socket.getaddrinfo(socket.gethostname(), None, family)]
    except OSError:
        return []


def _linux_ipv4() -> list[tuple[str, str]]:
    from fcntl import ioctl

    room = array.array("B", bytes(IFREQ_BYTES * MOST_INTERFACES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        answer = ioctl(asked.fileno(), SIOCGIFCONF, struct.pack("iP", len(room), room.buffer_info()[0]))
        filled, data, found = struct.unpack("iP", answer)[0], room.tobytes(), []
        for begin in range(0, filled, IFREQ_BYTES):
            entry = data[begin : begin + IFREQ_BYTES]
            name = entry[:16].split(b"\0")[0]
            (flags,) = struct.unpack_from("H", ioctl(asked.fileno(), SIOCGIFFLAGS, entry), 16)
            if flags & IFF_UP:
                found.append((name.decode(errors="replace"), socket.inet_ntoa(entry[20:24])))
    return found


def _linux_ipv6() -> list[tuple[str, str]]:
    found = []
    for line in Path("/proc/net/if_inet6").read_text().splitlines():
        digits, _, _, _, flags, name = line.split()
        if not int(flags, 16) & PASSING:
            found.append((name, str(ipaddress.IPv6Address(bytes.fromhex(digits)))))
    return found
