"""Where a server listens, and the addresses that its join string names."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import TypeVar

from ..config import DEFAULT_PORT, ServerConfig
from ..errors import ConfigError
from ..security import parse_address
from ..security.interfaces import outward_hosts

T = TypeVar("T")

PORTS_TRIED = 100
EVERYWHERE = ("0.0.0.0", "::")


def advertised(config: ServerConfig, port: int) -> list[tuple[str, int]]:
    """Hosts and ports of the join string of a server that listens on this port."""
    named, host = config.advertise, config.host
    if named is not None:
        host, stated = parse_address(named)
        return [(host, stated if named.rstrip("/").endswith(f":{stated}") else port)]
    if host not in EVERYWHERE:
        return [(host, port)]
    return [(each, port) for each in outward_hosts(socket.AF_INET6 if ":" in host else socket.AF_INET)]


def open_port(config: ServerConfig, listen: Callable[[int], T]) -> T:
    """What `listen(port)` makes on the port that is said, or on the first that is free."""
    port = config.port
    candidates = [port] if port is not None else list(range(DEFAULT_PORT, DEFAULT_PORT + PORTS_TRIED))
    for candidate in candidates:
        try:
            return listen(candidate)
        except OSError as error:
            last = error
    raise ConfigError(
        f"cannot listen on {config.host}:{candidates[0]}: {_reason(last)}; "
        "choose another host or port, or stop what uses it"
    ) from last


def _reason(error: OSError) -> str:
    """Without the address, which the message has already. (Name look-ups have error numbers of their own.)"""
    number = error.errno or 0
    return str(error.strerror) if isinstance(error, socket.gaierror) or number < 0 else os.strerror(number)
